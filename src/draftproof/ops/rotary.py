"""Rotary position embedding in stock's order of operations, for rows of several heads at once."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_reference(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """As transformers writes it: ``x * cos + rotate_half(x) * sin``."""
    half = x_THK.shape[-1] // 2
    rotated = torch.cat((-x_THK[..., half:], x_THK[..., :half]), dim=-1)
    return (x_THK * cos_TK[:, None]) + (rotated * sin_TK[:, None])


def rotate(x_THK: Tensor, cos_T1K: Tensor, signed_sin_T1K: Tensor) -> Tensor:
    """The bits of ``rotate_reference``; the sign of the first half sits in the sine, made once a pass."""
    half = x_THK.shape[-1] // 2
    swapped = torch.cat((x_THK[..., half:], x_THK[..., :half]), dim=-1)
    return (x_THK * cos_T1K).add_(swapped.mul_(signed_sin_T1K))


def rotate_first(x_THK: Tensor, cos_T1K: Tensor, signed_sin_T1K: Tensor) -> Tensor:
    """``rotate`` the first part of every head, as much as the cosine covers; the rest passes unchanged."""
    num_rotated = cos_T1K.shape[-1]
    rotated = rotate(x_THK[..., :num_rotated], cos_T1K, signed_sin_T1K)
    return torch.cat((rotated, x_THK[..., num_rotated:]), -1)


def sign_first_half(sin_TK: Tensor) -> Tensor:
    """``sin`` with its first half negated: negation is exact, so products keep their bits."""
    half = sin_TK.shape[-1] // 2
    return torch.cat((-sin_TK[..., :half], sin_TK[..., half:]), dim=-1)
