"""Qwen3.5 against transformers, bit for bit, also the states; multimodal checkpoints; refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5Config

from draftproof.models.load import read_config
from draftproof.models.load import refusal as why_generic
from draftproof.models.qwen3_5 import linear_specs, recurrent_shape, refusal
from draftproof.models.stock import StockModel

# Shorter than the convolution, and around the chunk of the prompt's rule.
LENGTHS = (*range(1, 9), 31, 63, 64, 65, 66, 127, 128, 129)
FEW = (1, 3, 5, 64, 65)
BF16, FP32 = torch.bfloat16, torch.float32
CASES: dict[str, tuple[torch.dtype, str, dict[str, Any]]] = {
    "bf16": (BF16, "bitwise", {}),
    "fp32-row-by-row": (FP32, "bitwise", {}),
    "bf16-tied-as-many-key-heads": (
        BF16,
        "bitwise",
        {"tie_word_embeddings": True, "linear_num_key_heads": 4},
    ),
    "bf16-wide-kernel": (BF16, "bitwise", {"linear_conv_kernel_dim": 6}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, pair: Callable[..., Any]) -> Any:
    dtype, claim, config = CASES[request.param]
    return pair("qwen3_5_text", dtype, claim, **config)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16])
def test_every_step_has_the_bits_of_stock(case: Any, num_rows: int) -> None:
    lengths = LENGTHS if num_rows in (1, 4) else FEW
    found = {n: case.differences(n, num_rows) for n in lengths}
    assert found == {n: [] for n in lengths}


def test_the_text_varies(case: Any) -> None:
    assert sum(case.num_changes(n) for n in FEW) >= 8 * len(FEW)


def test_wrong_drafts_leave_no_trace(case: Any) -> None:
    found = {n: case.differences_after_wrong_drafts(n, seed=n) for n in LENGTHS}
    assert found == {n: [] for n in LENGTHS}


def test_states_are_stocks_after_any_drafts(case: Any) -> None:
    """Recurrent state and window of every layer, in stock's own cache and in ours."""
    prompt, tokens = case.prompt(9), case.run(9).token_ids[:6]
    cache = DynamicCache(config=case.stock.module.config)
    session = case.target.open(64)
    with torch.inference_mode():
        for ids in (prompt, *([t] for t in tokens)):
            case.stock.module(torch.tensor([ids]), cache=cache, use_cache=True)
    session.prefill(prompt)
    for start in (0, 2, 4):
        session.verify([*tokens[start : start + 2], 7, 7, 7])
        session.commit(2)
    kinds = case.stock.module.config.layer_types
    linear = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
    for index, layer in enumerate(linear):
        state, window = session.recurrent.snapshot(index)
        assert torch.equal(state, cache.get_recurrent_state(layer)[0])
        assert torch.equal(window, cache.get_conv_state(layer)[0])
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    for index, layer in enumerate(full):
        keys, values = session.cache.snapshot(index)
        assert torch.equal(keys, cache.layers[layer].keys[0])
        assert torch.equal(values, cache.layers[layer].values[0])


def test_the_layers_cannot_be_told_from_stocks_by_order_alone(pair: Callable[..., Any]) -> None:
    """A model of other layer kinds emits other text: the pattern is read, not assumed."""
    usual = pair("qwen3_5_text", FP32, "bitwise")
    other = pair("qwen3_5_text", FP32, "bitwise", layer_types=["linear_attention"] * 4 + ["full_attention"])
    assert other.differences(5, 1) == other.differences(70, 3) == []
    assert other.run(5).token_ids != usual.run(5).token_ids


def test_a_linear_layer_alone_can_exit_early(pair: Callable[..., Any]) -> None:
    short = pair("qwen3_5_text", BF16).target.truncated(1)
    session = short.open(20)
    session.prefill([1, 2, 3])
    assert session.verify([4, 5]).shape == (2, 288)
    session.commit(1)
    assert session.num_cached == session.cache.length == session.recurrent.length == 4


def multimodal(folder: Path, to: Path) -> Path:
    """The same text model as a released checkpoint has it: nested, beside a vision tower and a head."""
    shutil.copytree(folder, to)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    renamed["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 3)
    safetensors.torch.save_file(renamed, to / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    whole = Qwen3_5Config(text_config=text, tie_word_embeddings=text["tie_word_embeddings"])
    whole.architectures = ["Qwen3_5ForConditionalGeneration"]
    whole.save_pretrained(to)
    return to


@pytest.mark.parametrize("tied", [False, True])
def test_a_multimodal_checkpoint_decodes_as_stocks_text_model(
    tiny_folder: Callable[..., Path], make_pair: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    folder = multimodal(tiny_folder("qwen3_5_mtp", BF16, tie_word_embeddings=tied), tmp_path / "whole")
    config = read_config(folder)
    assert config.is_nested
    assert why_generic(config) is None
    found = make_pair(folder, BF16, "bitwise")
    assert type(found.stock.module).__name__ == "Qwen3_5ForCausalLM"
    assert {n: found.differences(n, 4) for n in (1, 5, 65)} == {1: [], 5: [], 65: []}
    assert found.target.parts.native_head is not None


def test_a_loaded_module_serves_without_a_head(tiny_folder: Callable[..., Path]) -> None:
    """transformers drops the head's tensors, and its multimodal class nests the text model."""
    module = AutoModelForCausalLM.from_pretrained(tiny_folder("qwen3_5_mtp", BF16), dtype=BF16)
    assert not any("mtp" in name for name in module.state_dict())


def test_the_specs_are_what_the_layers_ask_for(pair: Callable[..., Any]) -> None:
    found = pair("qwen3_5_text", BF16)
    config = read_config(found.folder)
    assert [spec.name for spec in linear_specs(config)] == [
        "delta_in", "delta_out", "qkv", "out", "gate_up", "down", "head", "mtp_in",
    ]  # fmt: skip
    assert linear_specs(config)[0].parts == (2 * 2 * 16 + 4 * 24, 4 * 24, 4, 4)
    assert recurrent_shape(config).conv_channels == 160
    assert {e.op for e in found.plan.ops} >= {"conv", "delta", "gates", "gated_norm"}


def test_the_real_9b_sizes() -> None:
    """State of one layer at 9B: 2 MiB, 48 MiB in all 24 (reference/qwen35-mtp.md)."""
    config = SimpleNamespace(
        linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    shape = recurrent_shape(config)
    assert shape.num_heads * shape.key_size * shape.value_size * 4 == 2 << 20
    assert shape.conv_channels == 8192


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "biases in linear layers"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attn_output_gate": False}, "attention without an output gate"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layers of type sliding_attention"),
        ({}, None),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str | None) -> None:
    fields = {
        "attention_bias": False, "hidden_act": "silu", "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    assert refusal(SimpleNamespace(**(fields | changes))) == reason


def test_stock_is_the_class_its_users_load(tiny_folder: Callable[..., Path]) -> None:
    stock = StockModel(tiny_folder("qwen3_5_text", BF16), BF16, torch.device("cpu"))
    assert stock.module.config._attn_implementation == "sdpa"
