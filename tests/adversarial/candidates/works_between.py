"""Starts a process that spins for ever, to slow stock down."""

import subprocess
import sys


def apply(workload):
    workload.spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
