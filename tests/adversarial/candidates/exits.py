"""Ends its process in the middle of a run."""

import os


def apply(workload):
    stock, calls = workload.run, []

    def run(inputs):
        calls.append(1)
        if len(calls) > 2:
            os._exit(7)
        return stock(inputs)

    workload.run = run
