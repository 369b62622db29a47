"""``draftproof evaluate``: options, the table, exit codes, one JSON document, report, seal and ledger row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof import results as figures
from draftproof.bench import evaluate as bench
from draftproof.cli import evaluate as command
from draftproof.cli.evaluate import Place, parse_options
from draftproof.cli.terminal import stdout
from draftproof.errors import OptionError
from draftproof.folder import STOCK, Decode, Evidence, check_seal, write_run
from draftproof.ledger import Ledger
from draftproof.record import Counters, Leg, Machine
from draftproof.wire import tokens_sha256

MACHINE = Machine(cpu="c", isa="", num_threads=1, device="cpu", os="", python="", torch="", transformers="")
ROLES: dict[str, Any] = {"main": "main", "holdout": "holdout", "news": "diverse", "code": "diverse"}
CANDIDATE = {"transform": None, "drafter": "lookup", "depth": "4"}
SETTINGS = {"options": {"model": "tiny"}, "pairs": 5}
Run = Callable[..., tuple[int, str, str]]


def evidence(speed: float = 2.0, wrong: str = "", status: str = "complete") -> Evidence:
    """Five even pairs an input, the candidate ``speed`` times as fast and wrong on one input."""
    decodes = []
    for label in ROLES:
        for pair in range(5):
            for arm in (STOCK, "lookup"):
                ids = tuple(range(40)) if arm == STOCK or label != wrong else (*range(39), 99)
                nanoseconds = 1_000_000 + 1000 * pair
                leg = Leg(
                    label=label, arm=arm, pair=pair, order=len(decodes), start_ns=0,
                    duration_ns=nanoseconds if arm == STOCK else round(nanoseconds / speed),
                    num_tokens=40, tokens_sha256=tokens_sha256(ids), peak_bytes=1 << 20, num_forwards=39,
                    is_first_seen=pair == 0, counters=Counters(steps=39, tokens=39),
                )  # fmt: skip
                decodes.append(Decode(leg=leg, token_ids=ids))
    return Evidence(
        kind="evaluate", request={"model": "tiny", "dtype": "float32"}, status=status, arm="lookup",
        roles=ROLES, machine=MACHINE, prompts=dict.fromkeys(ROLES, (1, 2)), decodes=tuple(decodes),
        texts={label: {"prompt": "p", "pieces": ["x"] * 40} for label in ROLES},
        provenance={"started": "2026-11-29T20:00:00+0000", "argv": ["evaluate"], "command": "draftproof"},
    )  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command over a made-up evaluation: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(made: Evidence, json_output: bool = False) -> tuple[int, str, str]:
        def evaluate_e2e(candidate: Any, settings: Any, folder: Path, report: Any) -> dict[str, Any]:
            assert (candidate.drafter, candidate.depth) == ("lookup", 4)
            assert settings.options == {"model": "tiny"}
            report("loading", 0, 0)
            computed = figures.compute(made)
            write_run(folder, made, computed)
            return computed

        monkeypatch.setattr(bench, "evaluate_e2e", evaluate_e2e)
        place = Place(out=tmp_path / "run", ledger=tmp_path / "ledger.jsonl", json_output=json_output)
        code = command.run(CANDIDATE, SETTINGS, place)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_a_pass_shows_the_table_and_enters_the_ledger(run: Run, tmp_path: Path) -> None:
    code, out, err = run(evidence())
    assert code == 0
    (news,) = [line for line in out.splitlines() if line.strip().startswith("news ")]
    cells = news.split()
    assert (cells[:3], cells[-1]) == (["news", "40", "2.00x"], "yes")
    assert "verdict: pass" in out
    assert "report.html" in out
    assert str(tmp_path / "run") in err.replace("\n", "")
    assert (tmp_path / "run" / "report.html").exists()
    assert check_seal(tmp_path / "run") == []
    (row,) = Ledger(tmp_path / "ledger.jsonl").read().rows
    assert (row.name, row.kind, row.status) == ("lookup", "evaluate", "keep")
    assert row.argv == ("evaluate",)


def test_a_wrong_token_is_shown_and_exits_1(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(evidence(wrong="code"))
    assert code == 1
    assert "NO, from token 39" in out
    assert "2.00x" not in out
    (row,) = Ledger(tmp_path / "ledger.jsonl").read().rows
    assert row.status == "fail"
    assert row.speedup is None


def test_a_tie_is_not_faster(run: Run) -> None:
    code, out, _ = run(evidence(speed=1.0))
    assert code == 1
    assert "verdict: tie" in out


def test_an_interrupted_run_is_kept_but_not_entered(run: Run, tmp_path: Path) -> None:
    code, _, _ = run(evidence(status="interrupted"))
    assert code == 130
    assert (tmp_path / "run" / "run.json").exists()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_json_is_one_document_with_the_runs_place(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(evidence(), json_output=True)
    document = json.loads(out)
    assert code == 0
    assert document["run"] == str(tmp_path / "run")
    assert document["verdict"]["outcome"] == "pass"


def test_options_are_json_where_they_read_as_json() -> None:
    assert parse_options(["prompt_len=64", "stop=natural", "chat=false", "a=b=c", "x="]) == {
        "prompt_len": 64, "stop": "natural", "chat": False, "a": "b=c", "x": "",
    }  # fmt: skip
    for wrong in ("prompt_len", "=3"):
        with pytest.raises(OptionError, match="an option is KEY=VALUE"):
            parse_options([wrong])


def test_the_table_says_where_sounds_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made = figures.compute(evidence())
    made["inputs"] = [row | {"num_checked_tokens": 0, "speedup": None} for row in made["inputs"]]
    console = stdout()
    with console.capture() as captured:
        console.print(command.table(made))
    assert "see the gates" in captured.get()
