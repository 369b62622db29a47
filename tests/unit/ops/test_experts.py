"""Experts against stock's whole block: every row as stock computes it alone, a prompt as in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from draftproof.ops.experts import Experts, route

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Hidden, experts, experts a row is sent to, inner: small, all chosen, as many as in 35B-A3B.
SIZES = pytest.mark.parametrize("sizes", [(24, 5, 2, 8), (64, 4, 4, 24), (32, 256, 8, 16)], ids=str)


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Experts]:
    """Stock's block, and the experts made of its tensors."""
    hidden, num, chosen, inner = sizes
    config = Qwen3_5MoeTextConfig(
        hidden_size=hidden, num_experts=num, num_experts_per_tok=chosen, moe_intermediate_size=inner,
        shared_expert_intermediate_size=32,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    block = Qwen3_5MoeSparseMoeBlock(config)
    for seed, parameter in enumerate(block.parameters()):
        parameter.data = 2 * draw(*parameter.shape, seed=seed) / parameter.shape[-1] ** 0.5
    block = block.to(dtype).requires_grad_(requires_grad=False)
    return block, Experts(config, block.experts.gate_up_proj, block.experts.down_proj)


def inputs(block: Any, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the layers hand over: router and gate in one tensor, as a fused linear gives them."""
    routed_TN = torch.cat([F.linear(x_TD, block.gate.weight), block.shared_expert_gate(x_TD)], -1)
    return x_TD, routed_TN, block.shared_expert(x_TD)


@DTYPES
@SIZES
@torch.inference_mode()
def test_rows_are_stocks_one_row_blocks(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    block, experts = made(sizes, dtype)
    x_TD = draw(32, sizes[0], seed=99).to(dtype)
    want = torch.cat([block(row[None])[0] for row in x_TD.split(1)])
    alone = [inputs(block, row) for row in x_TD.split(1)]
    together = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for count in (1, 2, 7, 32):
        assert torch.equal(experts.rows(*(part[:count] for part in together)), want[:count])


@DTYPES
@SIZES
@pytest.mark.parametrize("num_rows", [1, 2, 17, 130])
@torch.inference_mode()
def test_a_prompt_is_stocks_block(sizes: tuple[int, ...], dtype: torch.dtype, num_rows: int) -> None:
    """Long enough for a strided column of gates to show: its sigmoid has other bits in fp32."""
    block, experts = made(sizes, dtype)
    x_TD = draw(num_rows, sizes[0], seed=98).to(dtype)
    assert torch.equal(experts.prompt(*inputs(block, x_TD)), block(x_TD[None])[0])


@DTYPES
@torch.inference_mode()
def test_routing_is_stocks(dtype: torch.dtype) -> None:
    block, _ = made((32, 256, 8, 16), dtype)
    logits, weights, ids = block.gate(draw(40, 32, seed=97).to(dtype))
    got_weights, got_ids = route(logits, 8)
    assert got_weights.dtype == weights.dtype
    assert torch.equal(got_weights, weights)
    assert torch.equal(got_ids, ids)


@torch.inference_mode()
def test_rows_that_share_an_expert_have_other_bits_in_one_call() -> None:
    """Why rows run one by one."""
    block, experts = made((64, 4, 4, 24), torch.float32)
    x_TD = draw(8, 64, seed=96)
    parts = inputs(block, x_TD)
    assert not torch.equal(experts.prompt(*parts), experts.rows(*parts))


def test_weights_are_held_not_copied() -> None:
    block, experts = made((24, 5, 2, 8), torch.bfloat16)
    held = experts._module
    assert held.gate_up_proj.data_ptr() == block.experts.gate_up_proj.data_ptr()
    assert held.down_proj.data_ptr() == block.experts.down_proj.data_ptr()
    assert experts.nbytes == 2 * (3 * 8 * 24) * 2
