"""``draftproof report``: writes, seals again, and refuses what was changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli import report as command
from draftproof.errors import EvidenceError, UsageError
from draftproof.folder import Decode, Evidence, check_seal, write_run
from draftproof.record import Leg, Machine
from draftproof.results import compute

MACHINE = Machine(
    cpu="c", isa="i", num_threads=1, device="cpu", os="o", python="p", torch="t", transformers="x"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decodes = tuple(
        Decode(
            leg=Leg(label="a", arm=arm, pair=pair, order=2 * pair + i, start_ns=0, duration_ns=ns + pair,
                    num_tokens=3, tokens_sha256="", peak_bytes=1),
            token_ids=(1, 2, 3),
        )
        for pair in range(3) for i, (arm, ns) in enumerate((("stock", 2000), ("auto", 1000)))
    )  # fmt: skip
    evidence = Evidence(kind="bench", request={"model": "m"}, status="complete", arm="auto",
                        roles={"a": "diverse"}, machine=MACHINE, decodes=decodes)  # fmt: skip
    write_run(tmp_path / "run", evidence, compute(evidence))
    return tmp_path / "run"


def hashed(folder: Path) -> str:
    found: dict[str, Any] = json.loads((folder / "seal.json").read_text())
    return str(found["hash"])


def test_the_page_is_written_and_sealed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = hashed(folder)
    assert command.run(folder, None, json_output=False) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder / 'report.html'}\n"
    assert "no network" in err
    assert check_seal(folder) == []
    assert hashed(folder) == before


def test_json_is_one_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(folder, None, json_output=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "report": str(folder / "report.html"), "outcome": "pass", "seal": hashed(folder),
    }  # fmt: skip
    assert err == ""


def test_another_place_leaves_the_folder_alone(folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert command.run(folder, tmp_path / "page.html", json_output=False) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_edited_page_is_written_again(folder: Path) -> None:
    command.run(folder, None, json_output=False)
    page = (folder / "report.html").read_text()
    (folder / "report.html").write_text("edited")
    assert command.run(folder, None, json_output=False) == 0
    assert (folder / "report.html").read_text() == page
    assert check_seal(folder) == []


@pytest.mark.parametrize("name", ["gates.jsonl", "audit.json"])
def test_anything_else_that_changed_is_never_sealed_over(folder: Path, name: str) -> None:
    (folder / name).write_text("edited")
    with pytest.raises(EvidenceError, match=f"is not as it was sealed: {name} was (changed|added); see"):
        command.run(folder, None, json_output=False)
    assert check_seal(folder) != []
    assert not (folder / "report.html").exists()


def test_more_than_one_change_is_counted(folder: Path) -> None:
    (folder / "gates.jsonl").write_text("edited")
    (folder / "other.txt").write_text("new")
    with pytest.raises(EvidenceError, match=r"\(and 1 more\)"):
        command.run(folder, None, json_output=False)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        command.run(tmp_path / "none", None, json_output=False)
