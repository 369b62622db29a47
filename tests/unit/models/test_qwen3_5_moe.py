"""Qwen3.5 with experts against transformers, bit for bit; both forms of checkpoint; its head; refusals."""

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
from torch import Tensor
from transformers import DynamicCache, Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

import draftproof
from draftproof.drafters.mtp import head_of
from draftproof.errors import ModelFileError
from draftproof.models.load import read_config
from draftproof.models.load import refusal as why_generic
from draftproof.models.qwen3_5_moe import linear_specs, refusal

# Shorter than the convolution, and around the chunk of the prompt's rule.
LENGTHS = (*range(1, 6), 63, 64, 65, 128, 130)
FEW = (1, 3, 64, 65)
BF16, FP32 = torch.bfloat16, torch.float32
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (BF16, {}),
    "fp32-row-by-row": (FP32, {}),
    "bf16-tied-most-experts": (BF16, {"tie_word_embeddings": True, "num_experts_per_tok": 5}),
    "bf16-one-expert-a-row": (BF16, {"num_experts": 3, "num_experts_per_tok": 1}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, pair: Callable[..., Any]) -> Any:
    dtype, config = CASES[request.param]
    return pair("qwen3_5_moe_text", dtype, "bitwise", **config)


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


def fused(folder: Path, to: Path, like: str = "") -> Path:
    """A copy whose layers under ``like`` hold their experts in two tensors."""
    shutil.copytree(folder, to)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    blocks = {name.split("experts.")[0] for name in tensors if "experts." in name and like in name}
    for block in blocks:
        parts: dict[str, list[Tensor]] = {part: [] for part in ("gate", "up", "down")}
        for part, held in parts.items():
            while (name := f"{block}experts.{len(held)}.{part}_proj.weight") in tensors:
                held.append(tensors.pop(name))
        both = [torch.cat(each) for each in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{block}experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{block}experts.down_proj"] = torch.stack(parts["down"])
    safetensors.torch.save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("offset", [0, 4])
def test_fused_experts_give_the_same_model(
    pair: Callable[..., Any], make_pair: Callable[..., Any], shifted_folder: Callable[[Path, int], Path],
    tmp_path: Path, dtype: torch.dtype, offset: int,
) -> None:  # fmt: skip
    """At any address of the mapped file, where stock computes, too."""
    apart = pair("qwen3_5_moe_text", dtype, "bitwise")
    folder = shifted_folder(fused(apart.folder, tmp_path / "fused"), offset)
    assert "model.layers.0.mlp.experts.down_proj" in safetensors.torch.load_file(folder / "model.safetensors")
    found = make_pair(folder, dtype, "bitwise")
    assert {n: found.differences(n, 4) for n in FEW} == {n: [] for n in FEW}
    assert found.run(65).token_ids == apart.run(65).token_ids


def test_a_multimodal_checkpoint_decodes_as_stocks_text_model(
    tiny_folder: Callable[..., Path], make_pair: Callable[..., Any], tmp_path: Path
) -> None:
    folder = fused(tiny_folder("qwen3_5_moe_mtp", BF16), tmp_path / "whole", like="model.layers.1")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    renamed["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 3)
    safetensors.torch.save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    whole = Qwen3_5MoeConfig(text_config=text)
    whole.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    whole.save_pretrained(folder)
    config = read_config(folder)
    assert (config.is_nested, config.model_type, why_generic(config)) == (True, "qwen3_5_moe_text", None)
    found = make_pair(folder, BF16, "bitwise")
    assert type(found.stock.module).__name__ == "Qwen3_5MoeForCausalLM"
    assert {n: found.differences(n, 4) for n in (1, 5, 65)} == {1: [], 5: [], 65: []}
    assert found.target.parts.native_head is not None


class StockHead:
    """The head of stock's own modules, one slot a call."""

    def __init__(self, found: Any) -> None:
        trunk = found.stock.module
        config = type(trunk.config)(**trunk.config.to_dict() | {
            "num_hidden_layers": 1, "layer_types": ["full_attention"],
        })  # fmt: skip
        config._attn_implementation = "sdpa"
        config._experts_implementation = "grouped_mm"
        tensors = safetensors.torch.load_file(found.folder / "model.safetensors")
        own = {k.removeprefix("mtp."): v for k, v in tensors.items() if k.startswith("mtp.")}
        # Assigned, not copied: one-row fp32 kernels choose their path by the weight's address.
        self._layer = Qwen3_5MoeDecoderLayer(config, 0).eval()
        self._layer.load_state_dict(_merged(own, config.num_experts), assign=True)
        self._norms = {}
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            self._norms[name] = Qwen3_5MoeRMSNorm(64, config.rms_norm_eps).to(found.target.parts.dtype)
            self._norms[name].load_state_dict({"weight": own[f"{name}.weight"]})
        self._project, self._trunk = own["fc.weight"], trunk.model
        self._cache, self._position = DynamicCache(config=config), 0

    @torch.inference_mode()
    def __call__(self, ids_1: Tensor, hidden_1D: Tensor) -> Tensor:
        halves = [
            self._norms["pre_fc_norm_embedding"](self._trunk.embed_tokens(ids_1)),
            self._norms["pre_fc_norm_hidden"](hidden_1D),
        ]
        u_1D = torch.nn.functional.linear(torch.cat(halves, -1), self._project)
        positions = torch.full((3, 1, 1), self._position)
        out = self._layer(u_1D[None], self._trunk.rotary_emb(u_1D[None], positions), cache=self._cache)
        self._position += 1
        rows: Tensor = self._norms["norm"](out[0])
        return rows


def _merged(own: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """The decoder layer's tensors, experts in two."""
    layer = {k.removeprefix("layers.0."): v for k, v in own.items() if k.startswith("layers.0.")}
    if "mlp.experts.gate_up_proj" in layer:
        return layer
    parts = {
        part: [layer.pop(f"mlp.experts.{i}.{part}_proj.weight") for i in range(num_experts)]
        for part in ("gate", "up", "down")
    }
    layer["mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat(both) for both in zip(parts["gate"], parts["up"], strict=True)]
    )
    layer["mlp.experts.down_proj"] = torch.stack(parts["down"])
    return layer


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_heads_slots_have_the_bits_of_stocks_modules(
    pair: Callable[..., Any], make_pair: Callable[..., Any], tmp_path: Path, dtype: torch.dtype,
    is_fused: bool,
) -> None:  # fmt: skip
    apart = pair("qwen3_5_moe_mtp", dtype, "bitwise")
    found = (
        make_pair(fused(apart.folder, tmp_path / "fused", "mtp."), dtype, "bitwise") if is_fused else apart
    )
    ids, target, head = found.prompt(14), found.target, head_of(found.target)
    session = target.open(64)
    session.hidden.keep()
    session.prefill(ids)
    hidden_TD, next_ids = session.hidden.take(), torch.tensor(ids[1:])
    stock = StockHead(found)
    want = torch.cat([stock(next_ids[p : p + 1], hidden_TD[p : p + 1]) for p in range(13)])
    own = head.open(64, target.max_rows, target.tables(64))
    got = [own.prefill(next_ids[:1], hidden_TD[:1])]
    for start, end in ((1, 2), (2, 5), (5, 13)):
        got.append(own.extend(next_ids[start:end], hidden_TD[start:end]))
        own.cache.commit(end - start)
    assert torch.equal(torch.cat(got), want)
    assert want.std() > 0.1


@pytest.mark.usefixtures("scratch_cache")
def test_the_engine_emits_stocks_text(pair: Callable[..., Any]) -> None:
    found = pair("qwen3_5_moe_mtp", BF16, "bitwise")
    engine = draftproof.load(str(found.folder), dtype="bfloat16", claim="bitwise")
    for length in (1, 40):
        prompt = found.prompt(length)
        want = found.stock.run(prompt, 24).token_ids
        for depth in range(5):
            got = engine.generate(prompt, drafter="mtp", depth=depth, max_new_tokens=24)
            assert list(got.token_ids) == list(want), (length, depth)
            assert (got.trace.rounds[-2].source == "mtp") == (depth > 0)


def test_rows_are_sent_to_different_experts(pair: Callable[..., Any]) -> None:
    """Else rows would share their products in any order."""
    found = pair("qwen3_5_moe_text", FP32, "bitwise")
    with torch.inference_mode():
        logits = found.stock.module(torch.tensor([found.prompt(65)]), output_router_logits=True).router_logits
    chosen = torch.stack(logits).view(3, 65, 6).topk(2, -1).indices
    assert all(len(layer.unique()) == 6 for layer in chosen)


def test_bytes_count_the_experts_of_a_row(pair: Callable[..., Any]) -> None:
    few, many = (pair("qwen3_5_moe_text", BF16, "bitwise", num_experts_per_tok=n).target for n in (2, 5))
    assert many.nbytes - few.nbytes == 3 * 3 * (3 * 24 * 64) * 2


def test_the_specs_are_what_the_layers_ask_for(pair: Callable[..., Any]) -> None:
    found = pair("qwen3_5_moe_text", BF16, "bitwise")
    specs = {spec.name: spec for spec in linear_specs(read_config(found.folder))}
    assert list(specs) == [
        "delta_in", "delta_out", "qkv", "out", "gate_up", "down", "head", "mtp_in", "router",
    ]  # fmt: skip
    assert specs["gate_up"].parts == (48, 48)
    assert specs["router"].parts == (6, 1)
    assert {e.op for e in found.plan.ops} >= {*specs, "conv", "delta", "gates", "gated_norm", "silu_gate"}


@pytest.mark.parametrize("stored", ["one by one", "fused"])
def test_a_missing_or_misshaped_expert_is_refused_by_name(
    tiny_folder: Callable[..., Path], make_pair: Callable[..., Any], tmp_path: Path, stored: str
) -> None:
    folder, name = tiny_folder("qwen3_5_moe_mtp", BF16), "mtp.layers.0.mlp.experts.5.down_proj.weight"
    if stored == "fused":
        folder, name = fused(folder, tmp_path / "fused"), "mtp.layers.0.mlp.experts.down_proj"
    for change in ("missing", "longer", "int8"):
        copy = shutil.copytree(folder, tmp_path / change)
        tensors = safetensors.torch.load_file(copy / "model.safetensors")
        held = tensors.pop(name)
        if change != "missing":
            tensors[name] = torch.cat([held, held[:1]]) if change == "longer" else held.to(torch.int8)
        safetensors.torch.save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
            make_pair(copy, BF16, "bitwise")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"_experts_implementation": "grouped_mm"}, None),
        ({"_experts_implementation": "eager"}, "experts computed as 'eager'"),
        ({"attention_bias": True}, "biases in linear layers"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str | None) -> None:
    fields = {"attention_bias": False, "hidden_act": "silu", "layer_types": ["full_attention"]}
    assert refusal(SimpleNamespace(**(fields | changes))) == reason
