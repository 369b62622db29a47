"""Asks for more memory than there is."""

import torch


def apply(workload):
    workload.run = lambda inputs: torch.empty(2**60)
