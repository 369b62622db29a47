"""The head lab's later commands are in the group, with their options handed on."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import typer.main

from draftproof import cli
from draftproof.cli import export, shortlist


def test_the_group_holds_them() -> None:
    group: Any = typer.main.get_command(cli.app)
    assert {"corpus", "shortlist", "export", "import"} <= set(group.commands["head"].commands)


def test_every_option_reaches_the_shortlist_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[shortlist.Wishes] = []

    def note(wishes: shortlist.Wishes) -> int:
        seen.append(wishes)
        return 130

    monkeypatch.setattr(shortlist, "run", note)
    options = ["--corpus", "c", "--model", "m", "--size", "9", "--size", "auto", "--cost", "--depth", "2",
               "--acceptance", "0.4", "--head", "h", "--dtype", "float32", "--device", "cuda", "--threads",
               "3", "--out", "o.json", "--json"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["draftproof", "head", "shortlist", *options])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    (wishes,) = seen
    assert (str(wishes.corpus), wishes.model, wishes.dtype) == ("c", "m", "float32")
    assert (wishes.numbers, wishes.is_auto, wishes.is_timed) == ((9,), True, True)
    assert wishes.timing == {
        "depth": 2, "acceptance": 0.4, "head": "h", "device": "cuda", "threads": 3
    }  # fmt: skip
    assert (str(wishes.out), wishes.json_output) == ("o.json", True)


def test_every_option_reaches_export_and_import(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(export, "export", lambda *given: seen.append(given) or 0)
    monkeypatch.setattr(export, "import_", lambda *given: seen.append(given) or 0)
    shared = ["--model", "m", "--out", "o", "--json"]
    for words in (
        ["export", "h", "--to", "sglang", "--depth", "5", "--shortlist", "s.json", *shared],
        ["import", "d", *shared],
    ):
        monkeypatch.setattr(sys, "argv", ["draftproof", "head", *words])
        with pytest.raises(SystemExit):
            cli.main()
    (ends, layout, depth, ids), (back,) = seen
    assert (str(ends.source), ends.model, str(ends.out), ends.json_output) == ("h", "m", "o", True)
    assert (layout, depth, str(ids)) == ("sglang", 5, "s.json")
    assert (str(back.source), back.model, str(back.out), back.json_output) == ("d", "m", "o", True)
