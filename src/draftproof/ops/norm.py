"""RMS normalisation in stock's order of operations and casts; row-independent by construction.

Each function has two forms: ``*_reference`` written as transformers writes it, and the one used, with
fewer temporaries. A test and the probe compare them bit for bit: ``F.rms_norm`` without a weight is the
same chain of operations in one call, but PyTorch does not promise that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's and Qwen3's norm as transformers writes it: normalise in fp32, cast, then scale."""
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return weight * hidden.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The bits of ``rms_norm_reference``; ``x`` is ``[..., D]``, ``weight`` ``[D]`` of the same dtype."""
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def rms_norm_shifted_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma's norm as transformers writes it: the stored weight is gamma - 1, scaling happens in fp32."""
    hidden = x.float()
    output = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def rms_norm_shifted(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """The bits of ``rms_norm_shifted_reference``; ``gamma`` is ``1.0 + weight.float()``, made once."""
    hidden = x.float()
    scale = (hidden * hidden).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (hidden * scale).mul_(gamma).to(x.dtype)
