"""The rows' forms against stock's own functions, one row a call; prompts against stock's module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5RMSNormGated

from draftproof.ops.gated_delta import (
    FORMS,
    DeltaForms,
    DeltaInput,
    conv_prompt,
    conv_reference,
    conv_row_by_row,
    conv_rows,
    delta_prompt,
    delta_reference,
    delta_row_by_row,
    delta_rows,
    gated_norm,
    gated_norm_reference,
    gates,
    gates_row_by_row,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Key heads, value heads, key size, value size: small, odd, as in 0.8B and 9B.
SHAPES = ((1, 1, 8, 8), (3, 6, 24, 40), (2, 4, 128, 128))
COUNTS = (1, 2, 5, 9)

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator).to(dtype)


def given(shape: tuple[int, ...], num_rows: int, dtype: torch.dtype) -> tuple[DeltaInput, Tensor]:
    num_keys, num_heads, key_size, value_size = shape
    rows = DeltaInput(
        q_TNK=draw(dtype, num_rows, num_keys, key_size),
        k_TNK=draw(dtype, num_rows, num_keys, key_size, seed=1),
        v_THV=draw(dtype, num_rows, num_heads, value_size),
        g_TH=-draw(torch.float32, num_rows, num_heads).abs(),
        beta_TH=draw(dtype, num_rows, num_heads, seed=2).sigmoid(),
    )
    return rows, draw(torch.float32, num_heads, key_size, value_size)


def windows(tape_CS: Tensor, num_rows: int, width: int) -> Tensor:
    return tape_CS[:, -num_rows - width :].unfold(1, width + 1, 1).transpose(0, 1).contiguous()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", COUNTS)
def test_the_recurrence_has_stocks_bits_and_leaves_every_state(
    dtype: torch.dtype, shape: tuple[int, ...], num_rows: int
) -> None:
    rows, state = given(shape, num_rows, dtype)
    kept = state.clone()
    want, states = delta_reference(rows, state)
    assert want.dtype == dtype
    for form in (delta_rows, delta_row_by_row):
        into = [torch.full_like(state, torch.nan) for _ in range(num_rows)]
        assert torch.equal(form(rows, state, into), want)
        assert all(torch.equal(a, b) for a, b in zip(into, states, strict=True))
        assert torch.equal(state, kept), "the state before is only read"
    assert not torch.equal(states[-1], state)


@pytest.mark.parametrize("num_rows", COUNTS)
def test_the_convolution_has_stocks_bits(dtype: torch.dtype, num_rows: int) -> None:
    channels, width = 48, 4
    tape, weight = draw(dtype, channels, width + num_rows), draw(dtype, channels, width)
    want = conv_reference(tape[:, :width], tape[:, width:].t(), weight)
    got = conv_row_by_row(windows(tape, num_rows, width), weight[:, None])
    assert torch.equal(got, want)
    assert conv_rows(windows(tape, num_rows, width), weight[:, None]).shape == want.shape
    assert (conv_rows(windows(tape, num_rows, width), weight[:, None]) - want).abs().max() < 0.05


def test_the_gates_one_row_a_call(dtype: torch.dtype) -> None:
    a, b, decay, bias = (
        draw(dtype, 7, 3),
        draw(dtype, 7, 3, seed=1),
        -draw(torch.float32, 3).exp(),
        draw(dtype, 3),
    )
    singles = [gates(a[t : t + 1], b[t : t + 1], decay, bias) for t in range(7)]
    got = gates_row_by_row(a, b, decay, bias)
    for index in (0, 1):
        assert torch.equal(got[index], torch.cat([single[index] for single in singles]))
    assert got[0].dtype == torch.float32
    assert got[1].dtype == dtype
    assert (got[0] <= 0).all()


def test_the_gates_of_a_slice_are_those_of_its_copy(dtype: torch.dtype) -> None:
    """A slice's elements would go through another exponential than stock's contiguous ones."""
    fused, decay, bias = draw(dtype, 5, 40), -draw(torch.float32, 4).exp(), draw(dtype, 4)
    a, b = fused[:, 3:7], fused[:, 20:24]
    got, want = gates(a, b, decay, bias), gates(a.contiguous(), b.contiguous(), decay, bias)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("num_rows", COUNTS)
def test_the_gated_norm_is_stocks_module(dtype: torch.dtype, num_rows: int) -> None:
    x, z, weight = draw(dtype, num_rows, 4, 24), draw(dtype, num_rows, 4, 24, seed=1), draw(dtype, 24)
    module = Qwen3_5RMSNormGated(24, eps=1e-6)
    module.weight.data = weight
    with torch.no_grad():
        want = torch.stack([module(row, gate) for row, gate in zip(x, z, strict=True)])
    assert torch.equal(gated_norm_reference(x, z, weight, 1e-6), want)
    assert torch.equal(gated_norm(x, z, weight, 1e-6), want)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 63, 64, 65, 129])
def test_a_prompt_is_stocks_layer(dtype: torch.dtype, num_rows: int) -> None:
    """Convolution and chunked rule, shorter than the kernel and around the chunk's border."""
    config = Qwen3_5TextConfig(
        hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    layer = Qwen3_5GatedDeltaNet(config, 0).to(dtype)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = draw(dtype, *parameter.shape, seed=seed) * 0.3
    seen: list[Tensor] = []
    layer.norm.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    x = draw(dtype, 1, num_rows, 32)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        layer(x, cache=cache)
        mixed = conv_prompt(layer.in_proj_qkv(x)[0], layer.conv1d.weight.squeeze(1))
        q, k, v = mixed.split([16, 16, 32], -1)
        decay = -layer.A_log.float().exp()
        g, beta = gates(layer.in_proj_a(x)[0], layer.in_proj_b(x)[0], decay, layer.dt_bias)
        shape = (num_rows, -1, 8)
        out, state = delta_prompt(
            DeltaInput(
                q_TNK=q.reshape(shape), k_TNK=k.reshape(shape), v_THV=v.reshape(shape), g_TH=g, beta_TH=beta
            )
        )
    assert torch.equal(out.reshape(-1, 8), seen[0])
    assert torch.equal(state, cache.get_recurrent_state(0)[0])


def test_forms_are_found_by_the_names_of_a_plan(dtype: torch.dtype) -> None:
    forms = DeltaForms.of({"conv": "row by row", "delta": "batched", "gates": "row by row"})
    assert (forms.conv, forms.delta, forms.gates) == (conv_row_by_row, delta_rows, gates_row_by_row)
    assert {op: list(found) for op, found in FORMS.items()} == dict.fromkeys(
        ("conv", "delta", "gates"), ["batched", "row by row"]
    )
