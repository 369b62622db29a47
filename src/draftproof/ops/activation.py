"""Gated activations over a fused ``[gate | up]`` row, in stock's operations.

Plain functions: silu and gelu differ between one row and many only where a row's width is no multiple of
the vector length, which the probe checks (``probe`` falls back to one row a call).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_gate(gate_up_TN: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[T, 2 I] -> [T, I]``."""
    gate, up = gate_up_TN.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_gate(gate_up_TN: Tensor) -> Tensor:
    """``gelu_tanh(gate) * up``: ``[T, 2 I] -> [T, I]``."""
    gate, up = gate_up_TN.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)
