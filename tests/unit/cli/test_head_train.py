"""``draftproof head train``: the table and lines, and what the first of several processes tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli import head_train as command
from draftproof.cli.terminal import stdout
from draftproof.heads import train as training


def look(step: int, held: float) -> dict[str, Any]:
    part = {"loss": [1.0, 2.0], "acceptance": [held - 1, None], "acceptance_length": held, "num_drafts": 9}
    return {"step": step, "num_tokens": 100 * step, "training_loss": 1.5 if step else None,
            "train": part | {"acceptance_length": held + 0.25}, "held_out": part}  # fmt: skip


SUMMARY: dict[str, Any] = {
    "status": "complete", "out": "runs/t", "model": "smollm2", "start": "fresh", "num_parameters": 1234567,
    "depth": 2, "step": 20, "num_steps": 20, "best_step": 10, "num_rows": {"train": 90, "held_out": 10},
    "num_sample_rows": {"train": 64, "held_out": 10},
    "history": [look(0, 1.0), look(10, 1.75), look(20, 1.5)],
}  # fmt: skip


def test_the_table_has_a_line_a_look(capsys: pytest.CaptureFixture[str]) -> None:
    stdout().print(command.table(SUMMARY))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert str(command.table(SUMMARY).title) == "smollm2 · fresh head, 1,234,567 parameters"
    assert ["0", "0", "1.25", "1.00", "0.0%"] in lines
    assert ["10", "1000", "1.500", "2.00", "1.75", "75.0%"] in lines


def test_the_lines_say_where_the_best_head_is_and_that_it_got_worse() -> None:
    assert command.lines(SUMMARY) == [
        "90 train and 10 held-out answers; acceptance over 64 and 10 of them, teacher forced, bonus included",
        f"best held-out length 1.75: {Path('runs/t/step-000010')}",
        "held-out length fell from there to 1.50 at step 20",
        f"training: runs/t, plotted in {Path('runs/t/training.html')}",
    ]


def test_an_interrupted_run_says_how_to_go_on() -> None:
    early = SUMMARY | {"status": "interrupted", "step": 4, "best_step": None, "history": [look(0, 1.0)]}
    lines = command.lines(early)
    assert lines[1] == "interrupted after step 4 of 20: the same command goes on"
    assert len(lines) == 3


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("interrupted", 130)])
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_the_first_process_alone_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, status: str,
    code: int, rank: str | None,
) -> None:  # fmt: skip
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    summary = SUMMARY | {"status": status}
    monkeypatch.setattr(training, "train_head", lambda *_, provenance: summary)
    monkeypatch.setattr(command, "provenance_of", lambda *_: {})
    settings = {
        "model": "m", "corpus": "c", "dtype": "float32", "device": "cpu", "depth": 2, "epochs": None,
        "steps": 20, "batch_tokens": 64, "loss": "kl", "step_decay": 0.8, "rate": None, "warmup": 0.1,
        "weight_decay": 0.0, "clip": 1.0, "seed": 0, "start": None, "checkpoint_every": None,
        "sample_rows": 4, "autocast": None, "threads": None,
    }  # fmt: skip
    assert command.run(settings, tmp_path, json_output=True) == code
    out = capsys.readouterr().out
    assert (json.loads(out) == summary) if rank != "1" else (out == "")
