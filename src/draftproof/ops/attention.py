"""Attention called exactly as stock calls it: one query row at a time, or a whole prompt.

SDPA over several query rows gives other bits than one-row calls on every CPU measured, so verification
makes one call a row. What transformers passes for one token depends on the mask: without one it sets
``enable_gqa``; a full sliding window brings an all-true mask, and then the query heads of a group are
passed as rows of their key head (``pack_gqa``). Both are mirrored here; ``tests/e2e`` compares with the
real model. Letters: T rows, S cached positions, H heads, G key heads, K head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# transformers sets ``enable_gqa`` up to this head size only (``use_gqa_in_sdpa``).
_MAX_GROUPED_SIZE = 256


def attend_row(q_HK: Tensor, keys_GSK: Tensor, values_GSK: Tensor, scale: float, *, masked: bool) -> Tensor:
    """One row over ``S`` positions, ``[H, K] -> [1, H * K]``, as transformers calls SDPA for one token.

    ``masked`` is true where stock passes an (all-true) mask: in a sliding layer whose window is full.
    """
    num_heads, head_size = q_HK.shape
    num_groups = keys_GSK.shape[0]
    keys, values = keys_GSK[None], values_GSK[None]
    if not masked and head_size <= _MAX_GROUPED_SIZE:
        out = F.scaled_dot_product_attention(
            q_HK.view(1, num_heads, 1, head_size), keys, values, scale=scale,
            enable_gqa=num_heads != num_groups,
        )  # fmt: skip
        return out.view(1, -1)
    mask = None
    if masked:
        mask = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool, device=q_HK.device)
    query = q_HK.view(1, num_groups, num_heads // num_groups, head_size)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(1, -1)


def attend_prompt(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float, window: int | None) -> Tensor:
    """A whole prompt, ``[T, H, K] -> [T, H * K]``, as transformers calls SDPA in its prefill.

    ``window`` is the sliding window, or ``None`` for full attention. A prompt at least as long as the
    window gets a boolean band mask, and then stock repeats the key heads instead of ``enable_gqa``.
    """
    num_rows, num_heads, head_size = q_THK.shape
    num_groups = k_TGK.shape[1]
    query, keys, values = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    is_grouped = num_heads != num_groups
    if window is not None and num_rows >= window:
        repeat = num_heads // num_groups
        if num_rows == 1:
            return attend_row(q_THK[0], keys[0], values[0], scale, masked=True)
        out = F.scaled_dot_product_attention(
            query, _repeat(keys, repeat), _repeat(values, repeat),
            attn_mask=band_mask(num_rows, window, q_THK.device), scale=scale,
        )  # fmt: skip
    elif is_grouped and head_size > _MAX_GROUPED_SIZE:
        if num_rows == 1:
            return attend_row(q_THK[0], keys[0], values[0], scale, masked=False)
        repeat = num_heads // num_groups
        out = F.scaled_dot_product_attention(
            query, _repeat(keys, repeat), _repeat(values, repeat), is_causal=True, scale=scale
        )
    else:
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=num_rows > 1, scale=scale, enable_gqa=is_grouped
        )
    return out.transpose(1, 2).reshape(num_rows, num_heads * head_size)


def band_mask(num_rows: int, window: int, device: torch.device) -> Tensor:
    """``[1, 1, T, T]`` boolean: row i sees columns ``i - window < j <= i``."""
    row = torch.arange(num_rows, device=device)[:, None]
    column = torch.arange(num_rows, device=device)[None]
    return ((column <= row) & (column > row - window))[None, None]


def _repeat(x: Tensor, times: int) -> Tensor:
    """Stock's ``repeat_kv``: ``[1, G, S, K] -> [1, G * times, S, K]``."""
    if times == 1:
        return x
    _, groups, length, size = x.shape
    return x[:, :, None].expand(1, groups, times, length, size).reshape(1, groups * times, length, size)
