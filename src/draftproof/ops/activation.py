"""Gated activations over the halves of a fused ``[gate | up]`` row, in stock's operations.

Plain functions: silu and gelu differ between one row and many only where a row's width is no multiple of
the vector length, which the probe checks (``probe`` falls back to one row a call).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_gate(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[T, I]``."""
    return F.silu(gate_TI).mul_(up_TI)


def gelu_gate(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """``gelu_tanh(gate) * up``: ``[T, I]``."""
    return F.gelu(gate_TI, approximate="tanh").mul_(up_TI)
