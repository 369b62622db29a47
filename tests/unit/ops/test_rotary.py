"""Rotation has the bits of transformers' ``apply_rotary_pos_emb``, which lays heads before rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb as gemma_rotary
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as glm_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as qwen_rotary

from draftproof.ops.rotary import rotate, rotate_first, rotate_reference, sign_first_half

SHAPES = [(1, 4, 16), (1, 1, 64), (5, 6, 24), (32, 3, 128), (2, 9, 2), (3, 1, 320)]
STOCK = pytest.mark.parametrize(
    "stock", [llama_rotary, qwen_rotary, gemma_rotary], ids=["llama", "qwen3", "gemma3"]
)


def draw(*size: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def angles(num_rows: int, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.randn(num_rows, head_size // 2, generator=torch.Generator().manual_seed(8)).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@STOCK
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rotation_is_stocks(stock: object, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x_THK, (cos, sin) = draw(*shape, dtype=dtype, seed=1), angles(shape[0], shape[2], dtype)
    other = draw(*shape, dtype=dtype, seed=2)
    want, want_other = (
        y[0].transpose(0, 1)
        for y in stock(x_THK.transpose(0, 1)[None], other.transpose(0, 1)[None], cos[None], sin[None])
    )
    given = x_THK.clone(), cos.clone(), sin.clone()
    signed = sign_first_half(sin)
    got = rotate(x_THK, cos[:, None], signed[:, None])
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert torch.equal(rotate(other, cos[:, None], signed[:, None]), want_other)
    assert torch.equal(rotate_reference(x_THK, cos, sin), want)
    assert all(torch.equal(a, b) for a, b in zip(given, (x_THK, cos, sin), strict=True))


@pytest.mark.parametrize("num_rotated", [2, 8, 14, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_first_part_is_rotated_as_glms(num_rotated: int, dtype: torch.dtype) -> None:
    x_THK, (cos, sin) = draw(5, 3, 16, dtype=dtype, seed=4), angles(5, num_rotated, dtype)
    x_HTK = x_THK.transpose(0, 1)[None]
    want = glm_rotary(x_HTK, x_HTK, cos[None], sin[None])[0][0].transpose(0, 1)
    got = rotate_first(x_THK, cos[:, None], sign_first_half(sin)[:, None])
    assert torch.equal(got, want)
    assert torch.equal(got[..., num_rotated:], x_THK[..., num_rotated:])


def test_the_sign_goes_to_the_first_half() -> None:
    sin = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.0, 5.0, -6.0, 7.0]])
    signed = sign_first_half(sin)
    assert signed.tolist() == [[-1.0, 2.0, 3.0, 4.0], [0.0, -5.0, -6.0, 7.0]]
    assert sin[0, 0] == 1.0


def test_queries_and_keys_may_be_rotated_together() -> None:
    """Slices of a fused row, as the architectures pass them."""
    fused, (cos, sin) = draw(4, 8, 24, dtype=torch.bfloat16, seed=3), angles(4, 24, torch.bfloat16)
    signed = sign_first_half(sin)[:, None]
    together = rotate(fused[:, :6], cos[:, None], signed)
    assert torch.equal(together[:, :4], rotate(fused[:, :4].contiguous(), cos[:, None], signed))
    assert torch.equal(together[:, 4:], rotate(fused[:, 4:6].contiguous(), cos[:, None], signed))
