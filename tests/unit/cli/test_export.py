"""``draftproof head export`` and ``import``: lines, JSON, and one line for every wrong use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof import cli


def run(*arguments: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["draftproof", "head", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def given(tiny_folder: Callable[..., Path], head_folder: Callable[..., Path]) -> tuple[Path, list[Any]]:
    return head_folder("qwen3_5_mtp"), ["--model", tiny_folder("qwen3_5_mtp")]


def test_there_and_back(
    given: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, model = given
    ids, out, back = tmp_path / "ids.json", tmp_path / "out", tmp_path / "back"
    ids.write_text("[3, 9]")
    code = run("export", head, *model, "--to", "sglang", "--out", out, "--shortlist", ids, "--depth", 2)
    assert code == 0
    shown = capsys.readouterr().out
    assert f"15 tensors to {out} in the layout of sglang" in shown
    assert "drafts over a shortlist of 2 ids" in shown
    assert f"serve with `--config {out}/sglang.yaml`" in shown
    assert json.loads((out / "sglang.yaml").read_text())["speculative-num-steps"] == 2
    note = json.loads((out / "draftproof.json").read_text())
    assert note["run"]["argv"][:2] == ["head", "export"]
    assert run("import", out, *model, "--out", back, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_tensors"], told["num_ids"], told["layout"]) == (15, 2, "sglang")
    assert json.loads((back / "shortlist.json").read_text()) == [3, 9]


def test_a_shortlist_without_a_place_is_told(
    given: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, model = given
    (head / "shortlist.json").write_text("[3, 9]")
    assert run("export", head, *model, "--to", "speculators", "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "shortlist.json has no place in this layout and was left out" in shown
    assert "speculators stitch-mtp" in shown
    assert run("import", tmp_path / "out", *model, "--out", tmp_path / "back") == 0
    assert "15 tensors from the layout of speculators" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "HEAD", "--to", "vllm"], "--to must be speculators or sglang, got 'vllm'"),
        (["export", "HEAD", "--to", "sglang", "--depth", "0"], "--depth must be 1 or more, got 0"),
        (["export", "nowhere", "--to", "sglang"], "no head folder 'nowhere'"),
        (["export", "HEAD", "--to", "sglang", "--model", "no-such"], "no model 'no-such'"),
        (["export", "HEAD", "--to", "sglang", "--shortlist", "gone"], "cannot read the shortlist gone"),
        (["export", "HEAD", "--to", "sglang", "--out", "HEAD"], "is not an empty folder"),
        (
            ["export", "HEAD", "--to", "speculators", "--model", "LLAMA"],
            "has no layout for a head of 'llama'",
        ),
        (["export", "HEAD"], "Missing option '--to'"),
        (["import", "nowhere"], "no exported folder nowhere"),
        (["import", "HEAD"], "config.json as JSON"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    given: tuple[Path, list[Any]], tiny_folder: Callable[..., Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str,
) -> None:  # fmt: skip
    head, model = given
    places = {"HEAD": str(head), "LLAMA": str(tiny_folder("llama"))}
    words = [places.get(word, word) for word in arguments]
    assert run(words[0], *model, "--out", tmp_path / "out", *words[1:]) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert message in captured.err
    assert not (tmp_path / "out").exists()
