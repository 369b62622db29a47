"""The training folder: state back bit for bit, heads whole or not at all, and folders that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from draftproof.errors import OptionError, StorageError
from draftproof.heads import train_state
from draftproof.heads.train_state import (
    State,
    TrainFolder,
    checkpoints,
    gather,
    read_manifest,
    restore,
)


def trained(steps: int, start: State | None = None) -> tuple[dict[str, torch.nn.Parameter], State]:
    """Some steps of AdamW on a matrix and a vector, from a state or from the start."""
    generator = torch.Generator().manual_seed(1)
    parts = {name: torch.nn.Parameter(torch.randn(shape, generator=generator))
             for name, shape in (("a", (3, 4)), ("b", (4,)))}  # fmt: skip
    optimizer = torch.optim.AdamW(parts.values(), lr=0.1)
    first = 0
    if start is not None:
        restore(start, parts, optimizer)
        first = start.step
    for step in range(first, first + steps):
        optimizer.zero_grad()
        sum((p * (step + 1)).square().sum() for p in parts.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    return parts, State(step=first + steps, tensors=gather(parts, optimizer), history=[{"step": first}])


def test_a_state_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, _ = trained(5)
    _, state = trained(2)
    folder = TrainFolder(tmp_path, {})
    folder.write_state(state)
    read = folder.read_state()
    assert read is not None
    assert (read.step, read.history, read.tally) == (2, [{"step": 0}], {})
    assert set(read.tensors) == {f"{n}{m}" for n in "ab" for m in ("", ":exp_avg", ":exp_avg_sq")}
    again, _ = trained(3, read)
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert json.loads((tmp_path / train_state.HISTORY).read_text()) == {"step": 0}
    assert sorted(p.name for p in tmp_path.iterdir()) == [train_state.HISTORY, train_state.STATE]


def test_there_may_be_no_state_yet_and_none_before_the_first_step(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path, {})
    assert folder.read_state() is None
    _, state = trained(0)
    assert set(state.tensors) == {"a", "b"}
    again, _ = trained(2, state)
    assert torch.equal(again["a"], trained(2)[0]["a"])


@pytest.mark.parametrize("how", ["cut", "changed", "other"])
def test_a_damaged_state_is_named(tmp_path: Path, how: str) -> None:
    folder = TrainFolder(tmp_path, {})
    folder.write_state(trained(2)[1])
    path = tmp_path / train_state.STATE
    raw = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(raw[:-5])
    elif how == "changed":
        raw[-3] ^= 1
        path.write_bytes(raw)
    else:
        safetensors.torch.save_file({"a": torch.ones(2)}, path, metadata={"facts": "{}"})
    with pytest.raises(
        OptionError, match=r"state\.safetensors is damaged: .*; name another folder with --out"
    ):
        folder.read_state()


def test_a_head_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TrainFolder(tmp_path, {"seed": 1})
    folder.open({"argv": ["train"]}, 0)
    tensors = {"head.norm.weight": torch.ones(4).bfloat16()}
    made = folder.write_head(20, tensors, {"model": "m"})
    assert made == tmp_path / "step-000020"
    assert sorted(p.name for p in made.iterdir()) == ["head.json", "model.safetensors", "provenance.json"]
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o644}
    stored = safetensors.torch.load_file(made / "model.safetensors")
    assert torch.equal(stored["head.norm.weight"], tensors["head.norm.weight"])
    facts = json.loads((made / "head.json").read_text())
    assert (facts["kind"], facts["step"], facts["model"]) == ("head", 20, "m")
    provenance = json.loads((made / "provenance.json").read_text())
    assert provenance == {"request": {"seed": 1}, "runs": [{"argv": ["train"]}]}
    monkeypatch.setattr(train_state, "write_atomic", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder.write_head(40, tensors, {})
    assert checkpoints(tmp_path) == [made]
    assert (tmp_path / ".step-000040").is_dir()
    folder.drop_after(20)
    assert checkpoints(tmp_path) == [made]
    assert not (tmp_path / ".step-000040").exists()
    folder.drop_after(19)
    assert checkpoints(tmp_path) == []


def test_the_manifest_keeps_every_run_and_refuses_other_settings(tmp_path: Path) -> None:
    first = TrainFolder(tmp_path, {"seed": 1, "depth": 3})
    assert first.open({"run": 1}, 0) is None
    first.write_manifest("interrupted", {"step": 4})
    second = TrainFolder(tmp_path, {"seed": 1, "depth": 3})
    found = second.open({"run": 2}, 0)
    assert found is not None
    assert (found["status"], found["summary"]) == ("interrupted", {"step": 4})
    second.write_manifest("complete", {})
    assert read_manifest(tmp_path)["runs"] == [{"run": 1}, {"run": 2}]
    with pytest.raises(OptionError, match="was trained with depth=3, not 2: name another folder with --out"):
        TrainFolder(tmp_path, {"seed": 1, "depth": 2}).open({}, 0)
    path = tmp_path / train_state.MANIFEST
    path.write_text(path.read_text().replace("complete", "partial"))
    with pytest.raises(OptionError, match=r"train\.json is damaged: its hash is another"):
        second.open({}, 0)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="holds other files: name an empty folder"):
        TrainFolder(tmp_path, {}).open({}, 0)
    with pytest.raises(OptionError, match="is a file: name a folder"):
        TrainFolder(tmp_path / "notes.txt", {}).open({}, 0)


def test_no_room_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(StorageError, match="no room for .*: it may need 26 MiB, 5 are free"):
        TrainFolder(tmp_path, {}).open({}, 10 << 20)
