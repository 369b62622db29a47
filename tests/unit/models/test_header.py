"""Headers of safetensors files: as safetensors itself reads them, without data, and one line when broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftproof.errors import ModelFileError
from draftproof.models.header import Stored, describe, read_header

TENSORS = {
    "a": torch.zeros(3, 5), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(2, 2, 1).half(),
    "d": torch.zeros((), dtype=torch.int64), "e": torch.zeros(0, 3), "f": torch.zeros(3, dtype=torch.uint8),
    "g": torch.zeros(4).to(torch.float8_e4m3fn), "h": torch.zeros(2, dtype=torch.bool),
}  # fmt: skip


def saved(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def written(file: Path, rows: dict[str, Any], num_data: int = 0) -> Path:
    text = json.dumps(rows).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * num_data)
    return file


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert [word for word in words if word not in message] == []


def test_every_tensor_is_described_as_torch_sees_it(tmp_path: Path) -> None:
    file = saved(tmp_path)
    header = read_header(file)
    assert not header.is_cut
    with safe_open(file, framework="pt") as opened:
        assert set(header.tensors) == set(opened.keys()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert header.tensors[name] == Stored(
            shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), num_bytes=tensor.nbytes
        )


@pytest.mark.parametrize("missing", [1, 30, None])
def test_a_file_without_its_data_is_described_all_the_same(missing: int | None, tmp_path: Path) -> None:
    file = saved(tmp_path)
    whole = read_header(file).tensors
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    file.write_bytes(data[:end] if missing is None else data[:-missing])
    header = read_header(file)
    assert header.is_cut
    assert header.tensors == whole
    assert describe(tmp_path).cut == ("model.safetensors",)


@pytest.mark.parametrize("kept", [0, 4, 7, 8, 60])
def test_cut_in_the_header(kept: int, tmp_path: Path) -> None:
    file = saved(tmp_path)
    file.write_bytes(file.read_bytes()[:kept])
    refused(lambda: read_header(file), str(file))


@pytest.mark.parametrize("content", [b"GGUF" * 10, b"\xff" * 64, b"{}" * 40, b"\3" + b"\0" * 7 + b"[1]"])
def test_a_file_of_another_format(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    refused(lambda: describe(tmp_path), str(file))


@pytest.mark.parametrize(
    "row",
    [
        3, [], {}, {"dtype": "F32", "shape": [2]}, {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]},
        {"dtype": [], "shape": [2], "data_offsets": [0, 8]},
    ],
)  # fmt: skip
def test_a_broken_entry(row: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "model.safetensors", {"w": row}, 8)
    refused(lambda: read_header(file), str(file), "broken header")


def test_a_type_torch_has_not_keeps_its_name(tmp_path: Path) -> None:
    row = {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}
    header = read_header(written(tmp_path / "w.safetensors", {"w": row}, 2))
    assert header.tensors == {"w": Stored(shape=(4,), dtype="F4", num_bytes=2)}


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    refused(lambda: describe(tmp_path), "model.safetensors")


def test_no_weights_at_all(tmp_path: Path) -> None:
    refused(lambda: describe(tmp_path), str(tmp_path), "no model.safetensors and no index")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "one.safetensors")
    save_file({"c": TENSORS["c"], "unnamed": TENSORS["a"]}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_shards_count_as_the_index_names_them(sharded: Path) -> None:
    found = describe(sharded)
    assert (found.absent, found.cut) == ((), ())
    assert list(found.tensors) == ["a", "b", "c"]
    assert found.tensors["c"].shape == (2, 2, 1)


def test_of_an_absent_shard_only_the_names_are_known(sharded: Path) -> None:
    (sharded / "one.safetensors").unlink()
    found = describe(sharded)
    assert found.absent == ("one.safetensors",)
    assert found.tensors["a"] == found.tensors["b"] == Stored()
    assert found.tensors["c"].dtype == "float16"


def test_a_tensor_its_shard_does_not_hold_is_not_there(sharded: Path) -> None:
    save_file({"other": TENSORS["a"]}, sharded / "two.safetensors")
    assert list(describe(sharded).tensors) == ["a", "b"]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(lambda: describe(sharded), str(sharded))
