"""``draftproof head shortlist``: tables, files, JSON, and one line for every wrong use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof import cli
from draftproof.cli import shortlist as command
from draftproof.cli.terminal import stdout
from draftproof.drafters.shortlist import read_shortlist
from draftproof.heads import sizing

TEXT = "the rest of her hen set"
ANSWERS = [
    ("train", "poem", "en", TEXT * 3),
    ("train", "code", "de", "abcdefgh" * 4),
    ("held-out", "poem", "en", TEXT * 2),
    ("held-out", "code", "zh", "xyz"),
]


def run(*arguments: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["draftproof", "head", "shortlist", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def given(tiny_folder: Callable[..., Path], answered: Callable[..., Path]) -> list[Any]:
    model = tiny_folder("qwen3_5_mtp", eos_token_id=2)
    return ["--corpus", answered(ANSWERS), "--model", model, "--dtype", "float32"]


def test_the_lists_are_written_and_described(
    given: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lists" / "ids.json"
    assert run(*given, "--size", 16, "--size", 8, "--out", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    places = [out.with_name(f"ids-{size}.json") for size in (8, 16)]
    assert summary["written"] == [str(place) for place in places]
    small, large = (read_shortlist(place) for place in places)
    assert (len(small), len(large)) == (8, 16)
    assert 2 in small, "the end token"
    assert set(small) < set(large)
    found = summary["coverage"]
    assert found["sizes"] == [8, 16]
    assert found["by_category"]["code"]["shares"] == [0.0, 0.0]
    assert 0 < found["all"]["shares"][0] < found["all"]["shares"][1] < 1
    document = json.loads(out.with_name("ids-8.provenance.json").read_text())
    assert document["run"]["argv"][:2] == ["head", "shortlist"]
    assert {"torch", "transformers"} <= set(document["run"]["versions"])
    assert document["corpus"]["folder"] == str(given[1])
    assert document["num_ids"] == 8


def test_nothing_is_written_without_out(
    given: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(*given, "--size", 8) == 0
    shown = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert "share of held-out answer tokens" in shown
    assert "1 special ids are always in" in shown
    assert "shortlist:" not in shown


def test_costs_are_measured_on_the_head_and_auto_takes_the_best(
    given: list[Any], tmp_path: Path, scratch_cache: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sizing, "_REPEATS", 20)
    out = tmp_path / "ids.json"
    options = ["--size", "auto", "--size", 8, "--size", 20, "--depth", 2, "--acceptance", 0.7]
    assert run(*given, *options, "--out", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    cost = summary["cost"]
    assert (cost["depth"], cost["acceptance"], cost["is_body_measured"]) == (2, 0.7, True)
    assert [line["size"] for line in cost["sizes"]] == [8, 20, 288]
    fastest = max(cost["sizes"], key=lambda line: line["tokens_per_second"])["size"]
    assert cost["best"] == fastest
    assert summary["chosen"] == ([] if fastest == 288 else [fastest])
    assert out.exists() == (fastest != 288)
    assert run(*given, "--cost", "--size", 8) == 0
    assert "medians of 20 interleaved calls" in capsys.readouterr().out


SUMMARY: dict[str, Any] = {
    "model": "smollm2", "num_train_tokens": 900, "always": [0, 2], "chosen": [2048],
    "written": ["ids.json"], "left": None,
    "coverage": {
        "sizes": [2048, 4096], "vocab_size": 49152, "num_seen": 700,
        "all": {"num_tokens": 30, "shares": [0.9, 0.95]},
        "by_category": {"poem": {"num_tokens": 30, "shares": [0.9, 0.95]}},
        "by_language": {"zh": {"num_tokens": 30, "shares": [0.5, 0.625]}},
    },
    "cost": {
        "depth": 3, "acceptance": 0.5, "num_repeats": 200, "body_ms": 1.25, "is_body_measured": False,
        "verification_ms": 30.0, "best": 2048,
        "sizes": [
            {"size": 2048, "coverage": 0.9, "output_ms": 0.25, "spread_ms": 0.01, "saved_ms": 1.75,
             "coverage_per_ms": None, "tokens_per_second": 60.0},
            {"size": 49152, "coverage": 1.0, "output_ms": 2.0, "spread_ms": 0.1, "saved_ms": 0.0,
             "coverage_per_ms": 0.057, "tokens_per_second": 50.0},
        ],
    },
}  # fmt: skip


def test_the_tables_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stdout().print(command.coverage_table(SUMMARY))
    stdout().print(command.cost_table(SUMMARY["cost"]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["poem", "30", "90.0%", "95.0%"] in rows
    assert ["zh", "30", "50.0%", "62.5%"] in rows
    assert ["all", "30", "90.0%", "95.0%"] in rows
    assert ["2048", "90.0%", "0.250", "0.010", "1.750", "60.0", "1.20x"] in rows
    assert ["49152", "100.0%", "2.000", "0.100", "0.000", "5.7%", "50.0", "1.00x"] in rows


def test_the_lines() -> None:
    told = command.lines(SUMMARY, is_auto=True)
    assert told[0].startswith("900 train tokens, 700 of 49152 ids seen; 2 special ids are always in")
    assert "1.250 ms (a layer's share of a forward), a verification 30.00 ms" in told[1]
    assert told[2:] == ["auto: 2048 ids, the most predicted tokens a second", "shortlist: ids.json"]
    assert "no list to choose" in command.lines(SUMMARY | {"chosen": []}, is_auto=True)[2]
    assert len(command.lines(SUMMARY | {"cost": None}, is_auto=False)) == 2
    stale = command.lines(SUMMARY | {"chosen": [], "written": [], "left": "a.json"}, is_auto=True)
    assert stale[3] == "a.json holds a list of an earlier run: remove it where a head would use it"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_list_of_an_earlier_run_is_named_when_auto_writes_none(
    given: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    is_there: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "_cost", lambda *_: {**SUMMARY["cost"], "best": 288})
    out = tmp_path / "ids.json"
    if is_there:
        out.write_text("[1]")
    assert run(*given, "--size", "auto", "--size", 8, "--out", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["written"], summary["left"]) == ([], str(out) if is_there else None)
    assert out.exists() == is_there


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "many"], "--size must be a number of ids or auto"),
        (["--size", "0"], "no room for the 1 always kept"),
        (["--size", "289"], "--size 289 is more than the model's 288 ids"),
        ([], "the model has only 288 ids: name sizes with --size"),
        (["--size", "8", "--depth", "2", "--head", "h"], "--depth, --head would do nothing: add --cost"),
        (["--size", "8", "--threads", "2"], "--threads would do nothing: add --cost or --size auto"),
        (["--size", "8", "--cost", "--depth", "0"], "--depth must be 1 or more"),
        (["--size", "8", "--cost", "--acceptance", "0"], "--acceptance must be above 0"),
        (["--size", "8", "--cost", "--head", "nowhere"], "no head folder 'nowhere'"),
        (["--size", "8", "--corpus", "nowhere"], "no corpus in nowhere"),
        (["--size", "8", "--model", "no-such"], "no model 'no-such'"),
        (["--size", "8", "--out", "."], ". is a folder: name a file with --out"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    given: list[Any], scratch_cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
    message: str,
) -> None:  # fmt: skip
    assert run(*given, *arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert message in captured.err


def test_a_target_without_rows_of_its_own_is_refused_with_cost(
    tiny_folder: Callable[..., Path], given: list[Any], scratch_cache: Path, capsys: Any
) -> None:
    arguments = [*given, "--model", tiny_folder("mistral"), "--size", 8, "--cost"]
    assert run(*arguments) == 2
    assert "--cost needs a row-exact target" in capsys.readouterr().err
