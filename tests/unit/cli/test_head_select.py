"""What the selection says: every candidate in the table, the winner by its rule, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftproof.cli import head_select as command
from draftproof.heads import select
from draftproof.heads.ranking import Figure, Standing


def standing(name: str, length: float, *, is_slower: bool = False) -> dict[str, Any]:
    figure = Figure(value=length, interval=(length - 0.25, length + 0.25))
    return Standing(
        name=name, acceptance_length=figure, mean_length=length, first_acceptance=0.5,
        speedup=Figure(value=1.5, interval=None), against_fastest=figure, is_slower=is_slower,
        worst_kind=("poem", 1.125), by_kind={"poem": 1.125},
    ).row()  # fmt: skip


SUMMARY = {
    "status": "complete", "model": "m", "depth": 3, "claim": "guarded", "num_decoded": 8, "num_prompts": 9,
    "num_dev_prompts": 4, "winner": "b", "refused": [{"name": "a", "prompt": 5, "from_token": 7}],
    "candidates": [standing("a", 2.5), standing("b", 2.0), standing("c", 2.25, is_slower=True)], "out": "o",
}  # fmt: skip


def test_the_table_has_every_candidate_and_what_became_of_it() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(command.table(SUMMARY))
    rows = [
        line.split() for line in capture.get().splitlines() if line.strip().startswith(("a ", "b ", "c "))
    ]
    assert [(row[0], row[-1]) for row in rows] == [("a", "refused"), ("b", "chosen"), ("c", "slower")]
    assert rows[0][1:5] == ["2.50", "(2.25-2.75)", "50.0%", "1.50x"]
    assert "1.12" in rows[0]


def test_the_lines_name_who_was_refused_and_who_was_chosen() -> None:
    refused, chosen, copy = command.lines(SUMMARY)
    assert refused == "refused: a left stock's text on held-out prompt 5 at token 7"
    assert chosen.startswith("chosen: b, ")
    assert "every token of 4 more prompts was stock's (claim guarded)" in chosen
    assert copy == "its copy: o/head"
    assert command.lines({**SUMMARY, "winner": None})[-1] == "no candidate decodes what stock decodes"
    interrupted = command.lines({**SUMMARY, "winner": None, "status": "interrupted"})
    assert interrupted[-1] == "interrupted after 8 of 9 prompts: the same command goes on"


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"winner": None}, 1), ({"status": "interrupted", "winner": None}, 130)]
)
def test_exit_codes(
    changes: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []

    def select_head(settings: Any, out: Path, report: Any, *, provenance: Any) -> dict[str, Any]:
        given.extend((settings.heads, out, provenance))
        return SUMMARY | changes

    monkeypatch.setattr(select, "select_head", select_head)
    monkeypatch.setattr(command, "provenance_of", lambda settings, report: {"argv": [settings["model"]]})
    settings = {"model": "m", "corpus": "c", "heads": ("a",)}
    assert command.run(settings, Path("o"), json_output=True) == code
    assert json.loads(capsys.readouterr().out)["winner"] == (SUMMARY | changes)["winner"]
    assert given == [("a",), Path("o"), {"argv": ["m"]}]
    assert command.run(settings, Path("o"), json_output=False) == code
    assert "b" in capsys.readouterr().out
