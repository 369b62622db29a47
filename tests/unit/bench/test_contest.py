"""Recipes read back from run folders; what cannot be rebuilt is refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import contest
from draftproof.bench.contest import recipe
from draftproof.errors import UsageError
from draftproof.folder import Evidence, write_run
from draftproof.record import Machine

MACHINE = Machine(
    cpu="c", isa="", num_threads=1, device="cpu", os="o", python="3", torch="2", transformers="5",
)  # fmt: skip
REQUEST: dict[str, Any] = {
    "model": "m", "dtype": "float32", "device": "cpu", "prompt_len": 64, "max_new_tokens": 8,
    "stop": "fixed", "chat": None, "drafter": "lookup", "depth": 3, "claim": "auto", "draft_model": None,
    "exit_layer": None, "threads": 1,
}  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    evidence = Evidence(
        kind="bench", request=REQUEST | changes, status="complete", arm="lookup", roles={}, machine=MACHINE
    )
    write_run(folder, evidence, {})
    return folder


def test_a_bench_is_rebuilt_as_it_was(tmp_path: Path) -> None:
    made = recipe(write(tmp_path / "run"))
    assert (made.candidate.drafter, made.candidate.depth) == ("lookup", 3)
    assert made.settings.options["max_new_tokens"] == 8
    assert made.settings.options["model"] == "m"
    assert made.settings.threads == 1


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        recipe(tmp_path)


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    candidate = contest.Candidate(transform=tmp_path / "gone.py")
    made = contest.Recipe(candidate=candidate, settings=recipe(write(tmp_path / "run")).settings)
    with pytest.raises(UsageError, match="cannot read"):
        contest._line(made, {"options": {}})
