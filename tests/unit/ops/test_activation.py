"""Gated activations have the bits of the MLPs transformers runs, gate and up computed apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from draftproof.ops.activation import gelu_gate, silu_gate

GATES = pytest.mark.parametrize(
    ("function", "stock"),
    [(silu_gate, ACT2FN["silu"]), (gelu_gate, ACT2FN["gelu_pytorch_tanh"])],
    ids=["silu", "gelu"],
)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def draw(num_rows: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows + inner)
    gate, up = (4 * torch.randn(2, num_rows, inner, generator=generator)).to(dtype)
    return gate.contiguous(), up.contiguous()


@GATES
@DTYPES
@pytest.mark.parametrize("inner", [1, 7, 64, 77, 160, 1536])
def test_one_row_is_stocks(
    function: Callable[[Tensor, Tensor], Tensor],
    stock: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    inner: int,
) -> None:
    gate, up = draw(1, inner, dtype)
    want = stock(gate) * up
    fused = torch.cat([gate, up], -1)
    given = fused.clone()
    got = function(*fused.chunk(2, -1))
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert torch.equal(fused, given)


@GATES
@DTYPES
@pytest.mark.parametrize("num_rows", [2, 5, 32])
def test_rows_of_whole_vectors_are_stocks_row_by_row(
    function: Callable[[Tensor, Tensor], Tensor],
    stock: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    num_rows: int,
) -> None:
    """256 columns are whole vectors everywhere; for other widths the probe decides."""
    gate, up = draw(num_rows, 256, dtype)
    want = torch.cat([stock(gate[t : t + 1]) * up[t : t + 1] for t in range(num_rows)])
    assert torch.equal(function(*torch.cat([gate, up], -1).chunk(2, -1)), want)


def test_gate_and_up_are_not_mixed_up() -> None:
    halves = torch.tensor([[0.0, 1.0, 5.0, 7.0]]).chunk(2, -1)
    assert silu_gate(*halves).tolist() == [[0.0, pytest.approx(7 / (1 + 2.718281828**-1))]]
    # 0.5 * (1 + tanh(sqrt(2 / pi) * 1.044715)) at 1; the exact gelu differs in the fourth place.
    assert gelu_gate(*halves).tolist() == [[0.0, pytest.approx(7 * 0.8411919906, rel=1e-6)]]
