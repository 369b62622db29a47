"""Checkpoints: every tensor once and unchanged, and one clear line for each way a file can be broken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.clock import RealClock
from draftproof.errors import ModelFileError
from draftproof.models import weights as weights_module
from draftproof.models.load import load_decoder, read_config
from draftproof.models.weights import Weights
from draftproof.ops.linear import has_packed
from draftproof.plans import PlanRequest, PlanStore, ProbeShapes

CPU = torch.device("cpu")


def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


TENSORS = {"a.weight": draw(3, 5), "b.weight": draw(4), "c.weight": draw(2, 2)}
SHARDS = {"one.safetensors": ["a.weight", "b.weight"], "two.safetensors": ["c.weight"]}


def single(folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    save_file(tensors or TENSORS, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    for shard, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    weight_map = {name: shard for shard, names in SHARDS.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(folder, dtype, CPU)


def refused(call: Callable[[], object], *words: str) -> None:
    """``ModelFileError`` with a message of one line that holds ``words``."""
    with pytest.raises(ModelFileError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("write", [single, sharded])
def test_every_tensor_is_handed_out_once_and_unchanged(write: Callable[[Path], Path], tmp_path: Path) -> None:
    weights = opened(write(tmp_path))
    for name, tensor in TENSORS.items():
        assert name in weights
        assert torch.equal(weights.peek(name, tuple(tensor.shape)), tensor)
        assert name in weights
        assert torch.equal(weights.take(name, tuple(tensor.shape)), tensor)
        assert name not in weights
        refused(lambda: weights.take(name, tuple(tensor.shape)), "lacks the tensor", repr(name))  # noqa: B023
    weights.finish()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_tensors_are_converted_as_stock_converts_them(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    tensor = draw(3, 5, dtype=stored)
    got = opened(single(tmp_path, {"a": tensor}), wanted).take("a", (3, 5))
    assert got.dtype == wanted
    assert torch.equal(got, tensor.to(wanted))


def test_two_tensors_are_compared_and_stay(tmp_path: Path) -> None:
    other = draw(3, 5).clone()
    other[2, 4] += 1
    weights = opened(single(tmp_path, TENSORS | {"same": draw(3, 5), "other": other}))
    assert weights.repeats("same", weights.peek("a.weight", (3, 5)))
    assert not weights.repeats("other", weights.peek("a.weight", (3, 5)))
    assert all(name in weights for name in ("a.weight", "same", "other"))
    refused(lambda: weights.repeats("b.weight", torch.zeros(3, 5)), "b.weight")


def test_missing_tensor(tmp_path: Path) -> None:
    weights = opened(single(tmp_path))
    assert "d.weight" not in weights
    refused(lambda: weights.take("d.weight", (1,)), "lacks the tensor 'd.weight'")


@pytest.mark.parametrize("shape", [(5, 3), (15,), (3, 5, 1), (3, 4), ()])
def test_wrong_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    refused(lambda: opened(single(tmp_path)).take("a.weight", shape), "a.weight", "(3, 5)", str(shape))


def test_left_over_tensors(tmp_path: Path) -> None:
    many = {f"extra.{i}": draw(1) for i in range(5)}
    weights = opened(single(tmp_path, TENSORS | many))
    for name, tensor in TENSORS.items():
        weights.take(name, tuple(tensor.shape))
    refused(weights.finish, "5 tensors", "extra.0, extra.1, extra.2")
    for name in many:
        weights.forget(name)
    weights.finish()
    weights.forget("never.there")


def test_no_weights_at_all(tmp_path: Path) -> None:
    refused(lambda: opened(tmp_path), str(tmp_path), "no model.safetensors and no index")
    (tmp_path / "model.safetensors").mkdir()
    refused(lambda: opened(tmp_path), str(tmp_path))


@pytest.mark.parametrize("kept", [0, 4, 8, 60, -60, -1])
def test_truncated_file(kept: int, tmp_path: Path) -> None:
    """In the length, in the header, in the data, by one byte."""
    path = single(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(lambda: opened(tmp_path), str(tmp_path))


@pytest.mark.parametrize("content", [b"GGUF" * 10, b"\xff" * 64, b"{}" * 40])
def test_file_of_another_format(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(lambda: opened(tmp_path), str(tmp_path))


def test_missing_shard(tmp_path: Path) -> None:
    (sharded(tmp_path) / "two.safetensors").unlink()
    refused(lambda: opened(tmp_path), str(tmp_path), "lacks the shards two.safetensors")


def test_truncated_shard(tmp_path: Path) -> None:
    path = sharded(tmp_path) / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    weights = opened(tmp_path)
    assert torch.equal(weights.take("a.weight", (3, 5)), TENSORS["a.weight"])
    refused(lambda: weights.take("c.weight", (2, 2)), "two.safetensors")


def test_a_shard_without_its_tensor(tmp_path: Path) -> None:
    save_file({"other": draw(1)}, sharded(tmp_path) / "two.safetensors")
    refused(lambda: opened(tmp_path).take("c.weight", (2, 2)), "two.safetensors", "c.weight")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", "[]", "null", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"a": 3}}',
        b"\xff\xfe\x00",
    ],
)  # fmt: skip
def test_broken_index(text: str | bytes, tmp_path: Path) -> None:
    path = sharded(tmp_path) / "model.safetensors.index.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(lambda: opened(tmp_path), str(tmp_path))


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and what the file says of every tensor."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length, json.loads(data[8 : 8 + length])


def test_tensors_stay_where_the_file_is_mapped(tmp_path: Path) -> None:
    """Stock computes there, and one-row fp32 kernels choose their path by the address modulo 16."""
    folder = single(tmp_path, {"a": draw(64, 64), "b": draw(3), "c": draw(64, 64)})
    start, said = header(folder / "model.safetensors")
    weights = opened(folder)
    found = {name: weights.take(name, tuple(said[name]["shape"])).data_ptr() % 16 for name in "abc"}
    assert found == {name: (start + said[name]["data_offsets"][0]) % 16 for name in "abc"}
    assert len(set(found.values())) > 1


def load(folder: Path) -> object:
    config, request = read_config(folder), PlanRequest(dtype=torch.float32, device=CPU)
    store = PlanStore(CPU, RealClock())
    store.probe(ProbeShapes.of(config, request), lambda *_: None)
    return load_decoder(folder, config, store.plan(config, request), dtype=torch.float32, device=CPU)


@pytest.fixture
def tensors(tiny_folder: Callable[..., Path], tmp_path: Path, scratch_cache: Path) -> dict[str, Any]:
    """The tensors of a whole checkpoint and a folder that lacks only them."""
    folder = tmp_path / "model"
    folder.mkdir()
    source = tiny_folder("qwen3")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = opened(source)
    said = header(source / "model.safetensors")[1]
    names = sorted(set(said) - {"__metadata__"})
    return {"folder": folder} | {n: weights.take(n, tuple(said[n]["shape"])).clone() for n in names}


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.1.self_attn.k_norm.weight", "model.layers.2.mlp.up_proj.weight"],
)
def test_a_target_needs_every_tensor(tensors: dict[str, Any], name: str) -> None:
    folder = tensors.pop("folder")
    save_file(tensors, folder / "model.safetensors")
    load(folder)
    changed = {k: v for k, v in tensors.items() if k != name}
    save_file(changed, folder / "model.safetensors")
    refused(lambda: load(folder), "lacks the tensor", name)
    save_file(tensors | {f"{name}_scale": torch.ones(1)}, folder / "model.safetensors")
    refused(lambda: load(folder), "1 tensors this architecture does not use", f"{name}_scale")
    save_file(tensors | {name: torch.ones(3, 3)}, folder / "model.safetensors")
    refused(lambda: load(folder), name, "(3, 3)")


def save_shards(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> int:
    """Neighbours in different shards, under an index; bytes of all tensors."""
    names = list(tensors)
    places = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_a_shard_is_read_once(
    tied: bool, tiny_folder: Callable[..., Path], tmp_path: Path, scratch_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """But for a tied embedding, of which the output layer gets its own."""
    source = tiny_folder("qwen3_5_mtp", tie_word_embeddings=tied)
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_shards(tmp_path, tensors, 3)
    reads: Counter[str] = Counter()

    class Counting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._opened = safe_open(*args, **kwargs)

        def __enter__(self) -> Counting:
            self._file = self._opened.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._opened.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            reads[name] += 1
            return self._file.get_tensor(name)

    monkeypatch.setattr(weights_module, "safe_open", Counting)
    load(tmp_path)
    assert reads == {n: 1 + (tied and n == "model.embed_tokens.weight") for n in tensors}


# In a process of its own: its peak before anything is loaded is known.
MEASURE = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
from draftproof.machine import peak_bytes, reset_peaks
from draftproof.models.inventory import _plain_plan
from draftproof.models.load import DTYPES, load_decoder, read_config

folder, form, dtype = Path(sys.argv[1]), sys.argv[2], DTYPES[sys.argv[3]]
config, cpu = read_config(folder), torch.device("cpu")
plan = _plain_plan(config)
ops = tuple(replace(op, form=form) if op.form == "plain" else op for op in plan.ops)
reset_peaks(cpu)
before = peak_bytes()
target = load_decoder(folder, config, replace(plan, ops=ops), dtype=dtype, device=cpu)
held = target.nbytes + target.parts.embedding_VD.nbytes
print(json.dumps([peak_bytes() - before, held]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint of four shards in bf16, and the bytes of its tensors."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    noise = draw(1 << 24, dtype=torch.bfloat16)
    tensors = {name: noise[: shape.numel()].reshape(shape).clone() for name, shape in shapes.items()}
    return folder, save_shards(folder, tensors, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("plain", "bfloat16"), ("packed", "bfloat16"), ("plain", "float32"), ("packed", "float32"),
     ("spaced:512", "float32")],
)  # fmt: skip
def test_loading_never_holds_the_weights_twice(form: str, dtype: str, large: tuple[Path, int]) -> None:
    """A 9B model in the memory of one copy and a layer: nothing of the file stays behind a packed layer."""
    if form != "plain" and not has_packed(CPU, getattr(torch, dtype)):
        pytest.skip(f"no packed {dtype} linears on this processor")
    folder, stored = large
    command = [sys.executable, "-c", MEASURE, str(folder), form, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, held = json.loads(done.stdout)
    whole = stored * getattr(torch, dtype).itemsize // 2
    # The norms are not counted; zero columns are.
    assert held / whole > 1.4 if form == "spaced:512" else held / whole == pytest.approx(1, abs=0.01)
    assert peak < 1.35 * held
    if (form, dtype) == ("plain", "bfloat16"):  # as stored: everything stays in the mapped file
        assert peak < 0.2 * whole
