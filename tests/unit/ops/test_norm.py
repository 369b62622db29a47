"""Norms have the bits of the modules transformers runs, for one row, many rows and rows of heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from draftproof.ops.norm import (
    rms_norm,
    rms_norm_reference,
    rms_norm_shifted,
    rms_norm_shifted_reference,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 64), (7, 64), (32, 576), (3, 77), (5, 4, 24), (1, 2, 320), (2, 1), (9, 3, 129)]
EPS = 1e-6


def draw(*size: int, dtype: torch.dtype, seed: int, spread: float = 1.0) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return (x * torch.exp(spread * x.flip(-1))).to(dtype)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("module_class", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("eps", [1e-5, EPS])
def test_rms_norm_is_llamas_and_qwen3s(
    shape: tuple[int, ...], module_class: Callable[..., torch.nn.Module], dtype: torch.dtype, eps: float
) -> None:
    module = module_class(shape[-1], eps).to(dtype)
    module.weight.data = draw(shape[-1], dtype=dtype, seed=1, spread=0)
    for spread in (0.0, 2.0):
        x = draw(*shape, dtype=dtype, seed=2, spread=spread)
        given, want = x.clone(), module(x)
        for function in (rms_norm, rms_norm_reference):
            got = function(x, module.weight.data, eps)
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        assert torch.equal(x, given)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_shifted_is_gemmas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = Gemma3RMSNorm(shape[-1], EPS).to(dtype)
    module.weight.data = draw(shape[-1], dtype=dtype, seed=1, spread=0)
    for spread in (0.0, 2.0):
        x = draw(*shape, dtype=dtype, seed=2, spread=spread)
        given, want = x.clone(), module(x)
        gamma = 1.0 + module.weight.data.float()
        kept = gamma.clone()
        got = rms_norm_shifted(x, gamma, EPS)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
        assert torch.equal(rms_norm_shifted_reference(x, module.weight.data, EPS), want)
        assert torch.equal(x, given)
        assert torch.equal(gamma, kept)


def test_extremes(dtype: torch.dtype) -> None:
    """Zeros, the smallest and the largest numbers, rows side by side."""
    info = torch.finfo(dtype)
    rows = [torch.zeros(64), torch.full((64,), info.tiny), torch.full((64,), info.max), torch.ones(64)]
    x = torch.stack(rows).to(dtype)
    weight = draw(64, dtype=dtype, seed=1, spread=0)
    llama, gemma = LlamaRMSNorm(64, EPS).to(dtype), Gemma3RMSNorm(64, EPS).to(dtype)
    llama.weight.data = gemma.weight.data = weight
    assert torch.equal(rms_norm(x, weight, EPS), llama(x))
    assert torch.equal(rms_norm_shifted(x, 1.0 + weight.float(), EPS), gemma(x))


@pytest.mark.parametrize("shape", [(32, 64), (32, 576), (32, 5, 24), (32, 77)], ids=str)
def test_a_row_does_not_depend_on_the_others(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype, seed=4, spread=1.5), draw(shape[-1], dtype=dtype, seed=1, spread=0)
    gamma = 1.0 + weight.float()
    for num_rows in (2, 3, 8, 32):
        for row in range(num_rows):
            one = x[row : row + 1]
            assert torch.equal(rms_norm(x[:num_rows], weight, EPS)[row], rms_norm(one, weight, EPS)[0])
            many = rms_norm_shifted(x[:num_rows], gamma, EPS)
            assert torch.equal(many[row], rms_norm_shifted(one, gamma, EPS)[0])


def test_views_of_a_fused_row_are_enough(dtype: torch.dtype) -> None:
    """Queries and keys are slices of one row, as the architectures pass them."""
    fused = draw(6, 8, 24, dtype=dtype, seed=5)
    weight = draw(24, dtype=dtype, seed=1, spread=0)
    for part in (fused[:, :4], fused[:, 4:6]):
        assert torch.equal(rms_norm(part, weight, EPS), rms_norm_reference(part.contiguous(), weight, EPS))
        assert torch.equal(
            rms_norm_shifted(part, 1.0 + weight.float(), EPS),
            rms_norm_shifted_reference(part.contiguous(), weight, EPS),
        )
