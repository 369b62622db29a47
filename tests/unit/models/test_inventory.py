"""Checkpoints mapped from their headers: the loader's verdict, stock's parameter counts, real sizes."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from draftproof.errors import ArchitectureError, ModelError, ModelFileError
from draftproof.models import sizes
from draftproof.models.header import describe
from draftproof.models.inventory import Inventory, _plain_plan, map_head, take_inventory
from draftproof.models.load import load_decoder, read_config

CPU = torch.device("cpu")
KINDS = ("llama", "qwen3", "gemma3_text", "qwen3_5_text", "qwen3_5_mtp")
Shapes = dict[str, tuple[int, ...]]


def without_data(file: Path) -> None:
    """Keep the header only."""
    data = file.read_bytes()
    file.write_bytes(data[: 8 + struct.unpack("<Q", data[:8])[0]])


@pytest.fixture
def copied(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A folder to damage."""

    def make(kind: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
        shutil.copytree(tiny_folder(kind, dtype, **config), tmp_path / "copy")
        return tmp_path / "copy"

    return make


def summed(inventory: Inventory) -> int:
    assert inventory.sizes is not None
    return inventory.sizes.num_target_params


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_without_data(kind: str, tied: bool, copied: Callable[..., Path]) -> None:
    folder = copied(kind, tie_word_embeddings=tied)
    module = AutoModelForCausalLM.from_pretrained(folder)
    without_data(folder / "model.safetensors")
    found = take_inventory(folder)
    found.refuse_problems()
    assert summed(found) == sum(p.numel() for p in module.parameters())
    assert (found.dtype, found.sizes.itemsize, found.sizes.is_tied) == ("bfloat16", 2, tied)
    assert found.has_head == (kind == "qwen3_5_mtp")
    assert (sizes.HEAD in found.sizes.num_params) == found.has_head
    assert sizes.OTHER not in found.sizes.num_params
    assert (sizes.OUTPUT in found.sizes.num_params) == (not tied)
    assert [n for n in found.notes if not n.startswith("less data")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_target_has_the_bytes_that_were_foretold(
    kind: str, tiny_folder: Callable[..., Path]
) -> None:
    folder = tiny_folder(kind, torch.bfloat16, tie_word_embeddings=False)
    config = read_config(folder)
    target = load_decoder(folder, config, _plain_plan(config), dtype=torch.bfloat16, device=CPU)
    found = take_inventory(folder).sizes
    assert found is not None
    session = target.open(40)
    if kind != "gemma3_text":  # its sliding layers hold other numbers of positions
        assert session.cache.nbytes == 40 * found.position_bytes
    if session.recurrent is not None:
        session.prefill([1, 2, 3])
        before = session.recurrent.nbytes
        session.verify([4])
        assert session.recurrent.nbytes - before == found.state_bytes
    conv = sum(prod((s.conv_channels, s.conv_width)) for s in found.recurrent)
    linears = sum(found.num_params.get(p, 0) for p in (sizes.ATTENTION, sizes.DELTA, sizes.MLPS))
    small = sum(  # in the layers, but no linears
        prod(shape) for name, shape in _stored_shapes(folder).items()
        if ("self_attn" in name or "linear_attn" in name) and len(shape) == 1 and not name.startswith("mtp.")
    )  # fmt: skip
    assert target.nbytes == 2 * (linears + found.num_params[sizes.OUTPUT] - small - conv)


def _stored_shapes(folder: Path) -> Shapes:
    return {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}


def test_dtypes(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama", torch.float16)
    assert take_inventory(folder).dtype == "float16"
    wide = take_inventory(folder, "float32")
    assert (wide.dtype, wide.sizes.itemsize if wide.sizes else None) == ("float32", 4)
    assert wide.stored == {"float16": len(_stored_shapes(folder))}
    assert wide.stored_bytes == 2 * sum(map(prod, _stored_shapes(folder).values()))


def _drop(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _reshape(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = torch.zeros(3, 3)


def _quantise(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


def _add(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(1)


def _drop_from_head(tensors: dict[str, Any]) -> None:
    del tensors["mtp.fc.weight"]


def _quantise_head(tensors: dict[str, Any]) -> None:
    tensors["mtp.norm.weight"] = tensors["mtp.norm.weight"].to(torch.float8_e4m3fn)


def _drop_output(tensors: dict[str, Any]) -> None:
    del tensors["lm_head.weight"]


def _nothing(tensors: dict[str, Any]) -> None:
    del tensors


DAMAGES = {
    _drop: [("missing", "model.layers.1.mlp.up_proj.weight")],
    _reshape: [("unfit", "model.norm.weight")],
    _quantise: [("unfit", "model.layers.0.mlp.down_proj.weight")],
    _add: [("left over", "model.layers.0.mlp.down_proj.weight_scale")],
    _drop_from_head: [("missing", "mtp.fc.weight")],
    _quantise_head: [("unfit", "mtp.norm.weight")],
    _drop_output: [("missing", "lm_head.weight")],
    _nothing: [],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_the_loader_refuses_what_the_inventory_finds(
    damage: Callable[[dict[str, Any]], None], copied: Callable[..., Path]
) -> None:
    folder = copied("qwen3_5_mtp")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = take_inventory(folder)
    assert [(p.kind, p.name) for p in found.problems] == DAMAGES[damage]
    assert found.sizes is not None
    config = read_config(folder)

    def load() -> None:
        load_decoder(folder, config, _plain_plan(config), dtype=torch.bfloat16, device=CPU)

    if not DAMAGES[damage]:
        found.refuse_problems()
        load()
        return
    with pytest.raises(ModelFileError, match=found.problems[0].name):
        found.refuse_problems()
    with pytest.raises(ModelFileError) as caught:
        load()
    assert found.problems[0].name in str(caught.value)
    assert found.problems[0].kind == "left over" or str(caught.value) == found.problems[0].text


def test_all_problems_are_collected_and_told_in_one_line(copied: Callable[..., Path]) -> None:
    folder = copied("qwen3_5_mtp")
    tensors = load_file(folder / "model.safetensors")
    for damage in (_drop, _reshape, _quantise, _add, _drop_from_head):
        damage(tensors)
    for index in range(4):
        tensors[f"odd.{index}"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    found = take_inventory(folder)
    assert [p.kind for p in found.problems].count("left over") == 5
    assert len(found.problems) == 9
    with pytest.raises(ModelFileError) as caught:
        found.refuse_problems()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in (
        "2 missing (",
        "mtp.fc.weight",
        "2 unfit (",
        "(3, 3)",
        "int8",
        "5 left over (",
        "and 2 more",
    ):
        assert word in message


def sharded(folder: Path, num_shards: int = 2) -> list[Path]:
    """Split the single file of ``folder`` under an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = [folder / f"model-{i}.safetensors" for i in range(num_shards)]
    named = {name: i % num_shards for i, name in enumerate(tensors)}
    for i, shard in enumerate(shards):
        save_file({name: tensors[name] for name, place in named.items() if place == i}, shard)
    weights = {name: shards[i].name for name, i in named.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return shards


def test_an_index_without_shards_takes_shapes_from_the_configuration(copied: Callable[..., Path]) -> None:
    folder = copied("qwen3_5_mtp")
    whole = take_inventory(folder)
    shards = sharded(folder)
    assert take_inventory(folder).sizes == whole.sizes
    shards[0].unlink()
    half = take_inventory(folder)
    shards[1].unlink()
    none = take_inventory(folder)
    for found in (half, none):
        found.refuse_problems()
        assert found.sizes == whole.sizes
        assert found.stored_bytes is None
        assert found.dtype == "bfloat16"
        assert "the configuration's" in found.notes[0]
    assert "1 shard (model-0.safetensors)" in half.notes[0]
    assert "2 shards (model-0.safetensors, model-1.safetensors)" in none.notes[0]
    assert none.stored == {"unknown": sum(whole.stored.values())}


def test_names_alone_can_be_missing(copied: Callable[..., Path]) -> None:
    folder = copied("llama")
    for shard in sharded(folder):
        shard.unlink()
    file = folder / "model.safetensors.index.json"
    named = json.loads(file.read_text())["weight_map"]
    del named["model.norm.weight"]
    named["odd"] = "model-0.safetensors"
    file.write_text(json.dumps({"weight_map": named}))
    found = take_inventory(folder)
    assert [(p.kind, p.name) for p in found.problems] == [
        ("missing", "model.norm.weight"),
        ("left over", "odd"),
    ]


@pytest.mark.parametrize(("shape", "fits"), [((288, 64), True), ((288, 63), False)])
def test_a_stored_copy_of_a_tied_layer(
    shape: tuple[int, int], fits: bool, copied: Callable[..., Path]
) -> None:
    folder = copied("llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(shape)}, folder / "model.safetensors")
    found = take_inventory(folder)
    assert [(p.kind, p.name) for p in found.problems] == ([] if fits else [("unfit", "lm_head.weight")])
    assert "compared with the target's own only when read: lm_head.weight" in found.notes
    assert found.sizes is not None
    assert sizes.OUTPUT not in found.sizes.num_params


def test_a_head_that_is_promised_and_not_there(copied: Callable[..., Path]) -> None:
    folder = copied("qwen3_5_mtp")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("mtp.")}, folder / "model.safetensors")
    found = take_inventory(folder)
    found.refuse_problems()
    assert not found.has_head
    assert any("names a native head" in note for note in found.notes)


def test_a_head_the_target_cannot_run(copied: Callable[..., Path]) -> None:
    folder = copied("qwen3_5_mtp")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_use_dedicated_embeddings": True}))
    found = take_inventory(folder)
    assert found.sizes is None
    with pytest.raises(ModelFileError, match="1 unsupported .*an embedding of its own"):
        found.refuse_problems()


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_a_model_without_a_row_exact_target(kind: str, tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=f"cannot be mapped: no row-exact target for model type '{kind}'"):
        take_inventory(tiny_folder(kind))


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        take_inventory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "hal9000"}')
    with pytest.raises(ArchitectureError, match="hal9000"):
        take_inventory(tmp_path)


# Layers, hidden, inner, heads, key heads, value heads of the linear layers, tied; then parameters of the text
# model and of the head. From reference/qwen35-mtp.md (1.1, 1.2): the 4B's column was read from real headers,
# the others are second hand, the 2B's least certain.
REAL: dict[str, tuple[tuple[int, int, int, int, int, int, bool], int, int]] = {
    "0.8B": ((24, 1024, 3584, 8, 2, 16, True), 752_393_024, 20_452_864),
    "2B": ((24, 2048, 6144, 8, 2, 16, True), 1_881_825_088, 60_828_160),
    "4B": ((32, 2560, 9216, 16, 4, 32, True), 4_205_751_296, 120_599_552),
    "9B": ((32, 4096, 12288, 16, 4, 32, False), 8_953_803_264, 243_290_624),
    "27B": ((64, 5120, 17408, 24, 4, 48, False), 26_895_998_464, 424_699_392),
}
# Draft step over target pass, weights only: all ids, 32768 of them (1.3).
RATIOS = {"0.8B": (0.365, 0.072), "2B": (0.303, 0.068), "4B": (0.180, 0.049), "9B": (0.159, 0.048),
          "27B": (0.066, 0.023)}  # fmt: skip
STATE_MIB = {"0.8B": 18, "2B": 18, "4B": 48, "9B": 48, "27B": 144}


def real_config(name: str) -> dict[str, Any]:
    layers, hidden, inner, heads, groups, states, tied = REAL[name][0]
    return {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": groups, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": states, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "tie_word_embeddings": tied,
        "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "attn_output_gate": True,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def real_tensors(config: dict[str, Any], stock: torch.nn.Module) -> Shapes:
    """Names and shapes of a released checkpoint: stock's, a head like an attention layer, a vision tensor."""
    text = {name: tuple(p.shape) for name, p in stock.named_parameters()}
    hidden, like = config["hidden_size"], "model.layers.3."
    head = {f"mtp.layers.0.{n.removeprefix(like)}": s for n, s in text.items() if n.startswith(like)}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    head |= {f"mtp.{norm}.weight": (hidden,) for norm in norms} | {"mtp.fc.weight": (hidden, 2 * hidden)}
    assert len(head) == 15
    nested = {n.replace("model.", "model.language_model.", 1): s for n, s in text.items()}
    return nested | head | {"model.visual.patch_embed.proj.weight": (1152, 3, 2, 16, 16)}


def save_header(file: Path, shapes: Shapes) -> None:
    """A safetensors file without data; two small tensors a linear layer are fp32, as released."""
    rows, place = {}, 0
    for name, shape in shapes.items():
        is_wide = name.endswith(("A_log", "linear_attn.norm.weight"))
        stop = place + prod(shape) * (4 if is_wide else 2)
        dtype = "F32" if is_wide else "BF16"
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(rows).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize("name", REAL)
def test_released_sizes(name: str, tmp_path: Path) -> None:
    config = real_config(name)
    with torch.device("meta"):
        stock = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    whole = {"model_type": "qwen3_5", "text_config": config, "vision_config": {},
             "tie_word_embeddings": config["tie_word_embeddings"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    save_header(tmp_path / "model.safetensors", real_tensors(config, stock))
    found = take_inventory(tmp_path)
    found.refuse_problems()
    _, num_target, num_head = REAL[name]
    assert summed(found) == sum(p.numel() for p in stock.parameters()) == num_target
    assert found.sizes is not None
    assert found.sizes.num_params[sizes.HEAD] == num_head
    assert found.sizes.state_bytes == STATE_MIB[name] << 20
    read = found.sizes.token_bytes(0)
    weights = sum(read.values()) - read[sizes.STATE]
    ratios = [found.sizes.draft_bytes(0, n) / weights for n in (248_320, 32_768)]
    # One unit of the last published digit: the notes round their figures in GB first.
    assert ratios == pytest.approx(RATIOS[name], abs=0.001)
    assert "not the text model's, and never read: 1 tensors, 0.00 GB" in found.notes


def test_the_4b_has_the_bytes_of_the_published_index(tmp_path: Path) -> None:
    """9,319,737,856 in all; 333,514,240 parameters of them are the vision tower's, in bf16."""
    config = real_config("4B")
    with torch.device("meta"):
        stock = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    whole = {"model_type": "qwen3_5", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": True}))
    save_header(tmp_path / "model.safetensors", real_tensors(config, stock))
    assert take_inventory(tmp_path).stored_bytes == 9_319_737_856 - 2 * 333_514_240


def test_a_row_reads_the_experts_it_is_sent_to(copied: Callable[..., Path]) -> None:
    found = take_inventory(copied("qwen3_5_moe_mtp"))
    found.refuse_problems()
    config, held = read_config(found.folder), found.sizes
    assert held is not None
    share = config.num_experts_per_tok / config.num_experts
    assert share < 1
    one = 3 * config.hidden_size * config.moe_intermediate_size
    per_layer = one * config.num_experts
    assert held.num_params[sizes.EXPERTS] == per_layer * config.num_hidden_layers
    assert held.num_params[sizes.HEAD_EXPERTS] == per_layer
    read = one * config.num_experts_per_tok * held.itemsize
    assert held.token_bytes(0)[sizes.EXPERTS] == read * config.num_hidden_layers
    assert held.row_bytes(0) >= held.token_bytes(0)[sizes.EXPERTS], "every row has experts of its own"
    rest = held.num_params[sizes.HEAD] * held.itemsize + 2 * config.hidden_size * held.itemsize
    assert held.draft_bytes(0, 1) == rest + read


def test_a_head_behind_the_last_layer_is_no_layer_of_the_target(copied: Callable[..., Path]) -> None:
    found = take_inventory(copied("glm4_moe_mtp"))
    found.refuse_problems()
    assert found.has_head
    module = AutoModelForCausalLM.from_pretrained(found.folder)
    assert summed(found) == sum(p.numel() for p in module.parameters())
    assert found.sizes is not None
    assert found.sizes.num_params[sizes.HEAD] > 0


def test_the_released_35b_with_experts(tmp_path: Path) -> None:
    """34.661B parameters, 2.946B of them active with the output layer; the head's 844.6M, 64.5M (1.2)."""
    config = real_config("9B") | {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    with torch.device("meta"):
        stock = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**config))
    text = {name: tuple(p.shape) for name, p in stock.named_parameters()}
    like = "model.layers.3."
    head = {f"mtp.layers.0.{n.removeprefix(like)}": s for n, s in text.items() if n.startswith(like)}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    head |= {f"mtp.{norm}.weight": (2048,) for norm in norms} | {"mtp.fc.weight": (2048, 4096)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_header(tmp_path / "model.safetensors", text | head)
    found = take_inventory(tmp_path)
    found.refuse_problems()
    held = found.sizes
    assert held is not None
    assert summed(found) == sum(p.numel() for p in stock.parameters())
    assert round(summed(found) / 1e9, 3) == 34.661
    active = sum(held.token_bytes(0).values()) - held.token_bytes(0)[sizes.STATE]
    assert round(active / 2 / 1e9, 3) == 2.946
    assert round((held.num_params[sizes.HEAD] + held.num_params[sizes.HEAD_EXPERTS]) / 1e6, 1) == 844.6
    assert round((held.draft_bytes(0, 0) / 2 - 2048) / 1e6, 1) == 64.5


class TestMapHead:
    @pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_5_mtp", "glm4_moe_mtp"])
    def test_a_head_that_fits_and_every_way_not_to(
        self, kind: str, tiny_folder: Callable[..., Path], head_folder: Callable[..., Path]
    ) -> None:
        config, stored = read_config(tiny_folder(kind)), describe(head_folder(kind)).tensors
        assert map_head(config, stored) == ()
        name = max(stored, key=lambda each: stored[each].num_bytes or 0)
        small, whole = replace(stored[name], shape=(3, 3)), replace(stored[name], dtype="int8")
        lacking = {k: v for k, v in stored.items() if k != name}
        for changed, kind_of_problem, where in (
            (lacking, "missing", name), (stored | {name: small}, "unfit", name),
            (stored | {name: whole}, "unfit", name), (stored | {"other": small}, "left over", "other"),
        ):  # fmt: skip
            (problem,) = map_head(config, changed)
            assert (problem.kind, problem.name) == (kind_of_problem, where)

    def test_a_head_no_target_runs(self, tiny_folder: Callable[..., Path]) -> None:
        config = read_config(tiny_folder("qwen3_5_mtp"))
        config.mtp_use_dedicated_embeddings = True
        with pytest.raises(ModelFileError, match="an embedding of its own"):
            map_head(config, {})
