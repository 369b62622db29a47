"""A training in one go, stopped, killed and gone on with; its heads in the engine; what is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import draftproof
from draftproof.errors import ArchitectureError, ModelFileError, OptionError, UsageError
from draftproof.heads import train as training
from draftproof.heads import train_loop
from draftproof.heads.shards import write_manifest
from draftproof.heads.train import train_head
from draftproof.heads.train_settings import TrainSettings
from draftproof.heads.train_state import checkpoints, read_manifest

PROMPT = [5, 80, 33, 2, 140, 7, 9]
Make = Callable[..., TrainSettings]


def run(settings: TrainSettings, out: Path) -> dict[str, Any]:
    return train_head(settings, out, lambda *_: None, provenance={"argv": ["head", "train"]})


def head_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(safetensors.torch.load_file(folder / "model.safetensors"))


def untimed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_mtp"])
def test_it_learns_and_the_engine_drafts_with_it(
    train_settings: Make, tmp_path: Path, scratch_cache: Path, kind: str
) -> None:
    settings = train_settings(kind, steps=None, epochs=12)
    told: list[tuple[str, int, int]] = []
    summary = train_head(
        settings, tmp_path / "t", lambda *row: told.append(row), provenance={"argv": ["head", "train"]}
    )
    assert (summary["status"], summary["step"]) == ("complete", summary["num_steps"])
    assert summary["start"] == ("native" if kind == "qwen3_5_mtp" else "fresh")
    assert summary["num_rows"] == {"train": 13, "held_out": 3}
    history = summary["history"]
    assert [row["step"] for row in history] == [0, *range(3, summary["step"], 3), summary["step"]]
    assert history[-1]["epoch"] == 11
    assert history[0]["training_loss"] is None
    assert sum(history[-1]["train"]["loss"]) < 0.8 * sum(history[0]["train"]["loss"])
    assert history[-1]["train"]["acceptance_length"] > history[0]["train"]["acceptance_length"]
    assert [json.loads(line) for line in (tmp_path / "t/history.jsonl").read_text().splitlines()] == history
    assert any(row[0].startswith("step 3 of ") and row[1] == 3 for row in told)
    made = checkpoints(tmp_path / "t")
    assert [int(path.name[5:]) for path in made] == [row["step"] for row in history[1:]]
    facts = json.loads((made[-1] / "head.json").read_text())
    assert facts["measured"] == history[-1]
    assert facts["target_sha256"] == summary["target_sha256"]
    engine = draftproof.load(settings.model, dtype="float32", head=str(made[-1]))
    plain = engine.decode(PROMPT, max_new_tokens=16, drafter="none")
    trace = engine.decode(PROMPT, max_new_tokens=16, drafter="mtp", depth=2)
    assert trace.token_ids == plain.token_ids
    assert sum(r.num_drafted for r in trace.rounds) > 10


def test_a_stopped_run_goes_on_to_the_same_weights(
    train_settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in step 4 ends it after that step, between two checkpoints."""
    settings = train_settings()
    whole = run(settings, tmp_path / "whole")
    plain = train_loop.Run._step

    def pressed(self: train_loop.Run, step: int) -> float:
        loss = plain(self, step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    monkeypatch.setattr(train_loop.Run, "_step", pressed)
    first = run(settings, tmp_path / "parts")
    monkeypatch.undo()
    assert (first["status"], first["step"]) == ("interrupted", 4)
    assert read_manifest(tmp_path / "parts")["status"] == "interrupted"
    second = run(settings, tmp_path / "parts")
    assert second["status"] == "complete"
    assert untimed(second["history"]) == untimed(whole["history"])
    one, two = (head_of(tmp_path / name / "step-000006") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert len(read_manifest(tmp_path / "parts")["runs"]) == 2


@pytest.mark.parametrize("where", ["write_state", "write_head", "write_page"])
def test_a_run_killed_while_writing_goes_on(
    train_settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Before a state, before a head, after a page: what came after the last state is done again."""
    settings = train_settings()
    run(settings, tmp_path / "whole")

    class Killed(BaseException):
        pass

    plain = getattr(train_loop.TrainFolder, where)

    def write(self: Any, *arguments: Any) -> Any:
        if self.out.joinpath("step-000003").exists() and where != "write_page":
            raise Killed
        made = plain(self, *arguments)
        if self.out.joinpath("step-000006").exists():
            raise Killed
        return made

    monkeypatch.setattr(train_loop.TrainFolder, where, write)
    with pytest.raises(Killed):
        run(settings, tmp_path / "parts")
    monkeypatch.undo()
    assert run(settings, tmp_path / "parts")["status"] == "complete"
    for step in ("step-000003", "step-000006"):
        one, two = (head_of(tmp_path / name / step) for name in ("whole", "parts"))
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_complete_training_loads_no_model_again(
    train_settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = train_settings(steps=1)
    first = run(settings, tmp_path / "t")
    monkeypatch.setattr(training, "FrozenTarget", lambda *_: pytest.fail("loaded"))
    assert run(settings, tmp_path / "t") == first


def test_a_head_can_be_trained_further(train_settings: Make, tmp_path: Path) -> None:
    run(train_settings(steps=2, checkpoint_every=2), tmp_path / "first")
    start = tmp_path / "first" / "step-000002"
    further = train_settings(steps=1, start=str(start), rate=1e-9)
    run(further, tmp_path / "second")
    before, after = head_of(start), head_of(tmp_path / "second" / "step-000001")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2}, {"loss": "tv"}, {"loss": "argmax"}, {"step_decay": 0.1}, {"rate": 1e-3}, {"clip": 1e-3},
        {"weight_decay": 0.5}, {"warmup": 0.9}, {"depth": 1}, {"batch_tokens": 40}, {"autocast": True},
        {"dtype": "bfloat16", "autocast": False},
    ],
    ids=str,
)  # fmt: skip
def test_every_option_changes_the_head(train_settings: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = train_settings(steps=2, checkpoint_every=2, sample_rows=1)
    run(settings, tmp_path / "plain")
    run(replace(settings, **changes), tmp_path / "other")
    one, two = (head_of(tmp_path / name / "step-000002") for name in ("plain", "other"))
    assert set(one) == set(two)
    assert any(not torch.equal(one[name].float(), two[name].float()) for name in one)


def test_other_settings_or_rows_need_another_folder(train_settings: Make, tmp_path: Path) -> None:
    settings = train_settings(steps=1)
    run(settings, tmp_path / "t")
    with pytest.raises(OptionError, match="was trained with seed=1, not 2: name another folder with --out"):
        run(replace(settings, seed=2), tmp_path / "t")
    assert run(replace(settings, threads=2), tmp_path / "t")["status"] == "complete"
    corpus = Path(settings.corpus)
    document = json.loads((corpus / "manifest.json").read_text())
    write_manifest(corpus, {"shards": document["shards"], "removed_rows": [3]})
    with pytest.raises(OptionError, match=r"was trained with rows=.*: name another folder"):
        run(settings, tmp_path / "t")


class TestRefusals:
    def test_starts_that_are_none(self, train_settings: Make, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="holds no head of its own: start with --init-from fresh"):
            run(train_settings(start="native"), tmp_path / "t")
        with pytest.raises(OptionError, match="--init-from is fresh, native or a head folder, not 'freshh'"):
            run(train_settings(start="freshh"), tmp_path / "t")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ModelFileError, match=r"has no model\.safetensors"):
            run(train_settings(start=str(tmp_path / "empty")), tmp_path / "t")

    def test_models_and_corpora_that_do_not_fit(self, train_settings: Make, tmp_path: Path) -> None:
        settings = train_settings()
        with pytest.raises(UsageError, match="no corpus in"):
            run(replace(settings, corpus=str(tmp_path / "none")), tmp_path / "t")
        with pytest.raises(ArchitectureError, match="not for model type 'mistral'"):
            run(replace(train_settings("mistral"), corpus=settings.corpus), tmp_path / "t")
        assert not (tmp_path / "t").exists()
