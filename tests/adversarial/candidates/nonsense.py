"""Answers with text."""


def apply(workload):
    workload.run = lambda inputs: "the answer"
