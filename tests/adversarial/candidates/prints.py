"""Writes to both ends of what it takes for the judge's pipe, and starts a process that does."""

import os
import subprocess
import sys


def apply(workload):
    stock = workload.run

    def run(inputs):
        print('{"token_ids": [1], "id": "0"}')
        os.write(1, b'{"token_ids": [1]}\n')
        subprocess.run([sys.executable, "-c", "print('{}')"], check=True)
        assert sys.stdin.read() == ""
        return stock(inputs)

    workload.run = run
