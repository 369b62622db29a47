"""A judged run leaves its page, a seal that holds, and one row in the ledger, also when it went badly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftproof.cli.publish import publish
from draftproof.folder import Evidence, check_seal, read_run, write_run
from draftproof.ledger import Ledger
from draftproof.record import Machine
from draftproof.results import compute

MACHINE = Machine(
    cpu="c", isa="", num_threads=1, device="cpu", os="o", python="3", torch="2", transformers="5",
)  # fmt: skip


def write(folder: Path, status: str) -> dict[str, Any]:
    """A run that measured nothing."""
    evidence = Evidence(
        kind="evaluate", request={"model": "m", "dtype": "float32"}, status=status, arm="mine", roles={},
        machine=MACHINE, provenance={"started": "2026-11-29T12:00:00+0000", "argv": ["evaluate", "mine.py"]},
    )  # fmt: skip
    results = compute(evidence)
    write_run(folder, evidence, results)
    return results


@pytest.mark.parametrize(
    ("status", "entered"), [("complete", ["void"]), ("failed: it raised", ["fail"]), ("interrupted", [])]
)
def test_a_run_is_sealed_and_entered_unless_interrupted(
    status: str, entered: list[str], tmp_path: Path
) -> None:
    results, ledger = write(tmp_path / "run", status), tmp_path / "ledger.jsonl"
    publish(results, tmp_path / "run", ledger, name="mine", kind="evaluate")
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert check_seal(tmp_path / "run") == []
    assert read_run(tmp_path / "run")[1] == results
    rows = Ledger(ledger).read().rows
    assert [row.status for row in rows] == entered
    assert all(row.name == "mine" and row.argv == ("evaluate", "mine.py") for row in rows)
