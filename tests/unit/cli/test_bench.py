"""``draftproof bench``: the table and the summary, what is withheld, exit codes, one JSON document."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import run as runs
from draftproof.bench.run import BenchSettings
from draftproof.cli import bench as command
from draftproof.cli.terminal import stdout
from draftproof.errors import OptionError

SETTINGS = {"model": "m", "depth": "auto", "pairs": 2}
Run = Callable[..., tuple[int, str, str]]


def ratio(median: float, low: float, high: float, interval: list[float] | None = None) -> dict[str, Any]:
    return {"median": median, "low": low, "high": high, "interval": interval, "num_pairs": 3}


def row(label: str, speed: float) -> dict[str, Any]:
    return {
        "label": label, "num_tokens": 256, "num_mismatched_tokens": 0, "num_checked_tokens": 1536,
        "first_difference": None, "tokens_per_verify": 2.125, "tokens_per_step": 1.5, "decode_stats": None,
        "speedup": ratio(speed, speed - 0.25, speed + 0.25), "serial_speedup": ratio(1.17, 1.1, 1.2),
        "speculation_speedup": ratio(1.31, 1.3, 1.4),
    }  # fmt: skip


RESULTS: dict[str, Any] = {
    "model": "smollm2", "dtype": "bfloat16", "arm": "auto", "claim": "bitwise", "status": "complete",
    "inputs": [row("news", 1.5), row("code", 2.75)], "peak_bytes": {"stock": 400 << 20, "engine": 300 << 20},
    "num_checked_tokens": 3072, "num_mismatched_tokens": 0, "speedup": ratio(2.12, 1.51, 2.73, [1.61, 2.62]),
    "serial_speedup": ratio(1.19, 1.1, 1.2), "speculation_speedup": ratio(1.33, 1.3, 1.4),
    "worst_input": "news",
}  # fmt: skip


def mismatched() -> dict[str, Any]:
    results = copy.deepcopy(RESULTS)
    results |= dict.fromkeys(("speedup", "serial_speedup", "speculation_speedup", "worst_input"))
    results |= {"num_mismatched_tokens": 3}
    bad = results["inputs"][1]
    bad |= dict.fromkeys(("speedup", "serial_speedup", "speculation_speedup"))
    bad |= {"num_mismatched_tokens": 3, "first_difference": 41}
    return results


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def runner(
        results: dict[str, Any], *, out: Path | None = None, json_output: bool = False, **changes: Any
    ) -> tuple[int, str, str]:
        def run_bench(settings: BenchSettings, folder: Path, report: Any) -> dict[str, Any]:
            report("news, pair 1 of 3", 0, 6)
            run_bench.called = (settings, folder)  # type: ignore[attr-defined]
            return results

        monkeypatch.setattr(runs, "run_bench", run_bench)
        code = command.run({**SETTINGS, **changes}, out, json_output=json_output)
        runner.called = run_bench.called  # type: ignore[attr-defined]
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return runner


def test_a_good_run(run: Run, tmp_path: Path) -> None:
    code, out, err = run(RESULTS, out=tmp_path / "here")
    assert code == 0
    (news,) = [line for line in out.splitlines() if " news " in line and "speedup" not in line]
    for cell in ("256", "1.17x", "1.50x", "1.25-1.75", "2.12", "1.50", "yes"):
        assert f" {cell} " in news
    (code_row,) = [line for line in out.splitlines() if " code " in line]
    assert "2.75x" in code_row
    assert "withheld" not in out
    text = " ".join(out.split())
    assert (
        "median speedup 2.12x (95 % interval 1.61-2.62 over inputs), worst input news 1.51x, best 2.73x"
        in text
    )
    assert "leaner forward 1.19x" in text
    assert "speculation 1.33x" in text
    assert "peak resident memory 300 MiB, stock 400 MiB (0.75x)" in text
    assert "3072 tokens checked against stock, 0 mismatched" in text
    assert str(tmp_path / "here") in err


def test_no_interval_where_there_are_too_few_inputs() -> None:
    results = {**RESULTS, "speedup": ratio(1.5, 1.5, 1.5)}
    assert "interval" not in command.summary(results)


def test_a_mismatch_withholds_and_is_exit_code_1(run: Run) -> None:
    code, out, _ = run(mismatched())
    assert code == 1
    (bad,) = [line for line in out.splitlines() if " code " in line]
    assert bad.count("withheld") == 2
    assert "NO, from token 41" in bad
    assert "x " not in bad.replace("withheld", "")
    text = " ".join(out.split())
    assert (
        "3072 tokens checked against stock, 3 mismatched: the speed of an output that differs is withheld"
        in text
    )
    assert "median speedup" not in text
    assert "MiB" not in text


def test_an_interrupt_is_130_even_with_a_mismatch(run: Run) -> None:
    assert run({**RESULTS, "status": "interrupted"})[0] == 130
    assert run({**mismatched(), "status": "interrupted"})[0] == 130


def test_an_interrupt_before_the_first_pair_does_not_speak_of_a_difference(run: Run) -> None:
    nothing = {
        **RESULTS, "status": "interrupted", "inputs": [], "num_checked_tokens": 0,
        "peak_bytes": {"stock": 0, "engine": 0},
        **dict.fromkeys(("speedup", "serial_speedup", "speculation_speedup", "worst_input")),
    }  # fmt: skip
    code, out, _ = run(nothing)
    assert code == 130
    assert "differs" not in out
    assert "withheld" not in out


@pytest.mark.parametrize("results", [RESULTS, mismatched()], ids=["good", "mismatched"])
def test_json_is_one_document_and_nothing_else(results: dict[str, Any], run: Run) -> None:
    code, out, err = run(results, json_output=True)
    assert code == (0 if results is RESULTS else 1)
    assert out.count("\n") == 1
    assert json.loads(out) == results
    assert "runs/" in err


def test_settings_and_folder_are_handed_over(run: Run, tmp_path: Path) -> None:
    run(RESULTS, depth="4", drafter="lookup", labels=("a",), out=tmp_path / "x")
    settings, folder = run.called  # type: ignore[attr-defined]
    assert folder == tmp_path / "x"
    assert settings == BenchSettings(model="m", depth=4, pairs=2, drafter="lookup", labels=("a",))


def test_the_default_folder_is_named_by_the_time(run: Run) -> None:
    _, _, err = run(RESULTS)
    _, folder = run.called  # type: ignore[attr-defined]
    assert re.fullmatch(r"runs/\d{8}-\d{6}", str(folder))
    assert str(folder) in err


def test_settings_are_checked_before_anything_runs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError):
        run(RESULTS, pairs=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["[bold]x", "[/red]", "a [b] c", ":smile:", "back\\"])
def test_names_of_the_users_are_shown_as_they_are(name: str, run: Run, tmp_path: Path) -> None:
    """Labels, model folders and run folders are data, never markup."""
    results = {**copy.deepcopy(RESULTS), "worst_input": name, "model": name}
    results["inputs"][0]["label"] = name
    _, out, err = run(results, out=Path(name))
    (line,) = [x for x in out.splitlines() if "1.25-1.75" in x]
    assert f" {name} " in line
    assert f"worst input {name} 1.51x" in out
    assert f"{name} · bfloat16" in out
    assert name in err


def test_the_table_has_a_line_an_input(capsys: pytest.CaptureFixture[str]) -> None:
    table = command.table(RESULTS)
    assert table.row_count == 2
    assert [column.header for column in table.columns] == [
        "input", "tokens", "own serial", "auto", "range", "tok/verify", "tok/forward", "tokens equal stock's",
    ]  # fmt: skip
    without = copy.deepcopy(RESULTS)
    without["inputs"][0] |= {"tokens_per_verify": None, "tokens_per_step": None}
    stdout().print(command.table(without), width=200)
    (news,) = [line for line in capsys.readouterr().out.splitlines() if " news " in line]
    assert news.count(" - ") == 2
