"""Attention has the bits of transformers' own SDPA function: one token, a prompt, every head layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftproof.ops.attention import attend_prompt, attend_row, band_mask

CPU = torch.device("cpu")
# Heads, key heads, head size. Above 256 stock no longer lets SDPA group the heads.
LAYOUTS = [(4, 4, 16), (4, 2, 16), (9, 3, 64), (4, 1, 256), (4, 1, 257), (2, 2, 320), (6, 2, 320), (1, 1, 24)]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)


def draw(*size: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (1.5 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def stock(q_HTK: Tensor, k_GSK: Tensor, v_GSK: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """What an attention module of transformers gets back, ``[T, H * K]``."""
    module = SimpleNamespace(num_key_value_groups=q_HTK.shape[0] // k_GSK.shape[0], is_causal=True)
    out, _ = sdpa_attention_forward(
        module, q_HTK[None], k_GSK[None], v_GSK[None], mask, scaling=scale, dropout=0.0
    )
    return out.reshape(q_HTK.shape[1], -1)


@layouts
@dtypes
@pytest.mark.parametrize("masked", [False, True])
def test_one_row_is_stocks_call_for_one_token(
    layout: tuple[int, int, int], dtype: torch.dtype, masked: bool
) -> None:
    """Over views of a larger store, as the cache gives them, where stock has tensors of their own."""
    heads, groups, size = layout
    q_HK, scale = draw(heads, size, dtype=dtype, seed=1), size**-0.5
    stores = draw(2, groups, 600, size, dtype=dtype, seed=2)
    for start, stop in ((0, 1), (0, 2), (3, 18), (0, 16), (5, 70), (0, 130), (17, 540)):
        keys, values = stores[:, :, start:stop]
        mask = torch.ones(1, 1, 1, stop - start, dtype=torch.bool) if masked else None
        want = stock(q_HK[:, None], keys.contiguous(), values.contiguous(), scale, mask)
        got = attend_row(q_HK, keys, values, scale, masked=masked)
        assert got.dtype == want.dtype
        assert torch.equal(got, want), (start, stop)


@layouts
@dtypes
@pytest.mark.parametrize("window", [None, 2, 16])
def test_a_prompt_is_stocks_call(
    layout: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    """Stock makes a band mask once the prompt is as long as the window."""
    heads, groups, size = layout
    for num_rows in (1, 2, 3, 7, 15, 16, 17, 33, 65):
        q_THK = draw(num_rows, heads, size, dtype=dtype, seed=3)
        k_TGK, v_TGK = draw(2, num_rows, groups, size, dtype=dtype, seed=4)
        mask = None
        if window is not None and num_rows >= window:
            rows = [[i - window < j <= i for j in range(num_rows)] for i in range(num_rows)]
            mask = torch.tensor(rows)[None, None]
        want = stock(*(x.transpose(0, 1) for x in (q_THK, k_TGK, v_TGK)), size**-0.5, mask)
        got = attend_prompt(q_THK, k_TGK, v_TGK, size**-0.5, window)
        assert got.dtype == want.dtype
        assert torch.equal(got, want), num_rows


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What SDPA was called with, defaults filled in; tensors by shape, the mask by its rows."""
    seen: list[dict[str, object]] = []
    honest = F.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        mask = options.get("attn_mask")
        defaults = {
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        }
        plain = {"attn_mask": None if mask is None else (mask.dtype, mask.tolist())}
        shapes = {"shapes": [x.shape for x in (query, key, value)]}
        seen.append(defaults | options | plain | shapes)
        return honest(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return seen


@layouts
@pytest.mark.parametrize("window", [None, 4])
def test_calls_are_stocks_also_where_the_bits_would_not_tell(
    layout: tuple[int, int, int], window: int | None, calls: list[dict[str, object]]
) -> None:
    """Another kernel may be chosen for other arguments, on another machine or in another version."""
    heads, groups, size = layout
    for num_rows in (1, 2, 3, 4, 5, 9):
        q_THK = draw(num_rows, heads, size, dtype=torch.float32, seed=3)
        k_TGK, v_TGK = draw(2, num_rows, groups, size, dtype=torch.float32, seed=4)
        is_masked = window is not None and num_rows >= window
        rows = [[i - (window or 0) < j <= i for j in range(num_rows)] for i in range(num_rows)]
        mask = torch.tensor(rows)[None, None] if is_masked else None
        stock(*(x.transpose(0, 1) for x in (q_THK, k_TGK, v_TGK)), 0.5, mask)
        attend_prompt(q_THK, k_TGK, v_TGK, 0.5, window)
        # One more token: in a sliding layer it sees the last positions of the window.
        past = slice(max(0, num_rows - (window or num_rows)), None)
        keys, values = k_TGK[past].transpose(0, 1), v_TGK[past].transpose(0, 1)
        mask = torch.ones(1, 1, 1, keys.shape[1], dtype=torch.bool) if is_masked else None
        stock(q_THK[0][:, None], keys, values, 0.5, mask)
        attend_row(q_THK[0], keys, values, 0.5, masked=is_masked)
    assert calls[0::2] == calls[1::2]
    assert len(calls) == 24


def test_rows_see_the_past_and_nothing_else() -> None:
    """With one-hot values the output tells which positions were seen."""
    q_THK, k_TGK = draw(7, 1, 8, dtype=torch.float32, seed=5), torch.zeros(7, 1, 8)
    v_TGK = torch.eye(8)[:7, None]
    for window in (None, 1, 3, 7, 8):
        seen = attend_prompt(q_THK, k_TGK, v_TGK, 1.0, window) > 0
        expected = [[j <= i and (window is None or j > i - window) for j in range(8)] for i in range(7)]
        assert seen.tolist() == expected


@pytest.mark.parametrize(("num_rows", "window"), [(1, 1), (5, 1), (5, 2), (5, 5), (5, 9)])
def test_band_mask(num_rows: int, window: int) -> None:
    mask = band_mask(num_rows, window, CPU)
    assert mask.dtype == torch.bool
    rows = [[i - window < j <= i for j in range(num_rows)] for i in range(num_rows)]
    assert mask.tolist() == [[rows]]


def test_the_scale_is_used() -> None:
    q_HK = draw(2, 16, dtype=torch.float32, seed=6)
    keys, values = draw(2, 2, 9, 16, dtype=torch.float32, seed=7)
    by_scale = [attend_row(q_HK, keys, values, scale, masked=False) for scale in (0.1, 0.5)]
    assert not torch.equal(*by_scale)
    scores = torch.einsum("hk,hsk->hs", q_HK.double(), keys.double()) * 0.5
    exact = torch.einsum("hs,hsk->hk", scores.softmax(-1), values.double()).reshape(1, -1)
    # Nine products of fp32 numbers near one: a few units in the last place, 1e-5 is a hundred of them.
    assert (by_scale[1] - exact).abs().max() < 1e-5
