"""``draftproof bench``: the table and the summary, what is withheld, what follows a run, exit codes, JSON."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from draftproof import audit as audits
from draftproof.audit import AuditReport, Finding
from draftproof.bench import run as runs
from draftproof.bench.cluster import OnRay
from draftproof.bench.run import BenchSettings, Here
from draftproof.cli import audit as audit_command
from draftproof.cli import bench as command
from draftproof.cli.bench import Wishes
from draftproof.cli.terminal import stdout
from draftproof.errors import OptionError, StorageError, UsageError
from draftproof.folder import Evidence, check_seal, write_run
from draftproof.ledger import Ledger
from draftproof.report import page
from draftproof.results import compute

SETTINGS = {"model": "m", "depth": "auto", "pairs": 2, "drafter": "lookup"}
Outcome = tuple[int, str, str]


def ratio(median: float, low: float, high: float, interval: list[float] | None = None) -> dict[str, Any]:
    return {"median": median, "low": low, "high": high, "interval": interval, "num_pairs": 3}


def row(label: str, speed: float) -> dict[str, Any]:
    return {
        "label": label, "role": "diverse", "num_tokens": 256, "num_mismatched_tokens": 0,
        "num_checked_tokens": 1536,
        "first_difference": None, "tokens_per_step": 1.625, "noise": 0.034,
        "decode_stats": {"tokens_per_verify": 2.125},
        "speedup": ratio(speed, speed - 0.5, speed + 0.5, [speed - 0.25, speed + 0.25]),
        "serial_speedup": ratio(1.17, 1.1, 1.2), "speculation_speedup": ratio(1.31, 1.3, 1.4),
    }  # fmt: skip


RESULTS: dict[str, Any] = {
    "model": "smollm2", "dtype": "bfloat16", "arm": "lookup", "claim": "bitwise", "status": "complete",
    "quality": "exact", "verdict": {"outcome": "pass", "reasons": ["faster than stock: 2.10x"], "notes": []},
    "flags": [], "inputs": [row("news", 1.5), row("code", 2.75)],
    "peak_bytes": {"stock": 400 << 20, "engine": 300 << 20, "drafter": 1 << 20},
    "num_checked_tokens": 3072, "num_mismatched_tokens": 0, "speedup": ratio(2.12, 1.51, 2.73, [1.61, 2.62]),
    "serial_speedup": ratio(1.19, 1.1, 1.2), "speculation_speedup": ratio(1.33, 1.3, 1.4),
    "worst_input": "news", "best_input": "code",
    "metrics": {"diverse": {"data_dependent": False, "median_speedup": 2.12, "why": "spread 3 %"}},
    "cost": {"break_even": {"advice": "Drafting pays at depth 1-3."}},
}  # fmt: skip
SPEEDS = ("speedup", "serial_speedup", "speculation_speedup")


def mismatched() -> dict[str, Any]:
    results = copy.deepcopy(RESULTS)
    results |= dict.fromkeys((*SPEEDS, "worst_input", "best_input", "cost"))
    results |= {
        "num_mismatched_tokens": 3, "metrics": {"diverse": None},
        "verdict": {"outcome": "fail", "reasons": ["code: token 41 is not stock's"], "notes": ["a note"]},
    }  # fmt: skip
    for each in results["inputs"]:
        each.update(dict.fromkeys((*SPEEDS, "noise")))
    results["inputs"][1] |= {"num_mismatched_tokens": 3, "first_difference": 41}
    return results


def nothing() -> dict[str, Any]:
    return mismatched() | {
        "status": "interrupted", "inputs": [], "num_checked_tokens": 0, "num_mismatched_tokens": 0,
        "verdict": {"outcome": "void", "reasons": ["nothing was measured"], "notes": []},
        "peak_bytes": {"stock": None, "engine": None, "drafter": None},
    }  # fmt: skip


def audited(outcome: Any = "pass", *findings: Finding) -> AuditReport:
    return AuditReport(
        outcome=outcome, num_legs=12, num_figures=90, num_outputs=2, num_tokens=512, num_mismatches=0,
        num_ties=0, rate_bound=3 / 512, findings=findings,
    )  # fmt: skip


@dataclass
class Bench:
    """Runs the command on given results and keeps what it did, in order."""

    folder: Path
    capture: Callable[[], Any]
    evidence: Evidence
    report: AuditReport = field(default_factory=audited)
    did: list[Any] = field(default_factory=list)
    results: dict[str, Any] | Exception = field(default_factory=dict)

    def __call__(
        self, results: dict[str, Any] | Exception = RESULTS, *, wishes: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Outcome:  # fmt: skip
        self.results = results
        self.did.clear()
        wanted = {
            "out": self.folder / "run", "resume": False, "audit": True, "ray": None,
            "ledger": self.folder / "ledger.jsonl", "json_output": False,
        }  # fmt: skip
        code = command.run({**SETTINGS, **changes}, Wishes(**wanted | (wishes or {})))
        captured = self.capture()
        return code, captured.out, captured.err

    def run_bench(
        self, settings: BenchSettings, folder: Path, report: Any, *, place: Any, resume: bool
    ) -> dict[str, Any]:
        report("news, pair 1", 0, 6)
        self.did.append(("bench", settings, folder, place, resume))
        if isinstance(self.results, Exception):
            raise self.results
        write_run(folder, replace(self.evidence, status=self.results["status"]), self.results)
        return self.results

    def audit(self, folder: Path, *, progress: Any, prompts: Any) -> AuditReport:
        assert check_seal(folder) == []
        progress("replaying", 1, 2)
        self.did.append(("audit", folder, prompts))
        return self.report

    def write_report(self, folder: Path) -> None:
        self.did.append(("report", folder))
        (folder / "report.html").write_text("<html>")

    @property
    def steps(self) -> list[str]:
        return [done[0] for done in self.did]


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    honest_run: Callable[..., Evidence],
) -> Bench:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    facts = {"started": "2026-01-02T03:04:05+0000", "argv": ["bench", "--drafter", "lookup"]}
    made = Bench(folder=tmp_path, capture=capsys.readouterr, evidence=replace(honest_run(), provenance=facts))
    monkeypatch.setattr(runs, "run_bench", made.run_bench)
    monkeypatch.setattr(audits, "audit", made.audit)
    monkeypatch.setattr(page, "write_report", made.write_report)
    return made


class TestOutput:
    def test_a_good_run(self, bench: Bench) -> None:
        code, out, err = bench()
        assert code == 0
        (news,) = [line for line in out.splitlines() if " news " in line and "speedup" not in line]
        cells = re.split(r"\s{2,}", news.strip())
        assert cells == ["news", "256", "1.17x", "1.50x", "1.25-1.75", "3%", "2.12", "1.62", "yes"]
        (code_row,) = [line for line in out.splitlines() if " code " in line and "speedup" not in line]
        assert "2.75x" in code_row
        text = " ".join(out.split())
        assert "verdict: pass: faster than stock: 2.10x" in text
        assert (
            "median speedup 2.12x (95 % interval 1.61-2.62 over inputs), worst input news 1.51x,"
            " best code 2.73x"
        ) in text
        assert "leaner forward 1.19x" in text
        assert "speculation 1.33x" in text
        assert "data-dependent" not in text
        assert "Drafting pays at depth 1-3." in text
        assert "peak resident memory 300 MiB, stock 400 MiB (0.75x)" in text
        assert "3072 tokens checked against stock, 0 mismatched" in text
        assert "audit: PASS" in text
        assert "512 tokens of 2 outputs replayed, 0 mismatched" in text
        assert f"report: {bench.folder / 'run' / 'report.html'}" in text
        assert str(bench.folder / "run") in err
        assert "withheld" not in text
        assert "no speed is shown" not in text

    def test_the_label_comes_with_its_why(self) -> None:
        labelled = {**RESULTS, "metrics": {"diverse": {"data_dependent": True, "why": "it spreads 41 %"}}}
        assert "data-dependent: it spreads 41 %" in command.summary(labelled)

    def test_one_input_has_pairs_and_no_worst_one(self) -> None:
        single = {**RESULTS, "inputs": RESULTS["inputs"][:1]}
        text = command.summary(single)
        assert "median speedup 2.12x (95 % interval 1.61-2.62 over pairs), pairs from 1.51x to 2.73x" in text
        assert "worst" not in text

    def test_what_is_not_there_is_not_spoken_of(self) -> None:
        bare = {
            **RESULTS, "speedup": ratio(1.5, 1.5, 1.5), "cost": None, "serial_speedup": None,
            "speculation_speedup": None,
        }  # fmt: skip
        text = command.summary(bare)
        assert "interval" not in text
        assert "leaner forward" not in text
        assert "Drafting" not in text

    def test_an_evaluation_is_quoted_by_its_main_input(self) -> None:
        results = copy.deepcopy(RESULTS)
        results["inputs"][0] |= {"role": "main"}
        results["speedup"] = ratio(1.5, 1.25, 1.75, [1.3, 1.7])
        results["metrics"]["diverse"] |= {
            "median_speedup": 2.5, "min_input": "poem", "min_speedup": 1.1, "max_input": "code",
            "max_speedup": 3.2,
        }  # fmt: skip
        lines = command.summary(results).splitlines()
        assert "main input 1.50x (95 % interval 1.30-1.70 over pairs), pairs from 1.25x to 1.75x" in lines
        assert "diverse set: median 2.50x, worst input poem 1.10x, best code 3.20x" in lines

    def test_pairs_too_few_for_an_interval_show_their_range(self) -> None:
        results = copy.deepcopy(RESULTS)
        for row_ in results["inputs"]:
            row_["speedup"]["interval"] = None
        table = command.table(results)
        (header,) = [column for column in table.columns if column.header == "range of pairs"]
        assert list(header.cells) == ["1.00-2.00", "2.25-3.25"]

    def test_the_table_has_a_line_an_input(self, capsys: pytest.CaptureFixture[str]) -> None:
        table = command.table(RESULTS)
        assert table.row_count == 2
        assert [column.header for column in table.columns] == [
            "input", "tokens", "own serial", "lookup", "95 %", "noise", "tok a verify",
            "tok a forward", "equal stock's",
        ]  # fmt: skip
        without = copy.deepcopy(RESULTS)
        without["inputs"][0] |= {"decode_stats": None, "tokens_per_step": None, "noise": None}
        stdout().print(command.table(without), width=200)
        (news,) = [line for line in capsys.readouterr().out.splitlines() if " news " in line]
        assert news.count(" - ") == 3

    @pytest.mark.parametrize("name", ["[bold]x", "[/red]", "a [b] c", ":smile:", "back\\"])
    def test_names_of_the_users_are_shown_as_they_are(self, name: str, bench: Bench) -> None:
        """Labels, model folders and run folders are data, never markup."""
        results = {**copy.deepcopy(RESULTS), "worst_input": name, "model": name}
        results["inputs"][0]["label"] = name
        _, out, err = bench(results, wishes={"out": Path(name)})
        (line,) = [x for x in out.splitlines() if "1.25-1.75" in x]
        assert f" {name} " in line
        assert f"worst input {name} 1.51x" in out
        assert f"{name} · bfloat16" in out
        assert name in err

    def test_a_document_as_results_computes_it(self, bench: Bench, honest_run: Any) -> None:
        """The hand-made ones above must not drift from it."""
        for evidence in (honest_run(), replace(honest_run(), status="interrupted")):
            results = compute(evidence)
            _, out, _ = bench(results)
            speed = results["speedup"]["median"]
            assert f"median speedup {speed:.2f}x" in out
            assert all(f" {label} " in out for label in evidence.roles)


class TestWithheld:
    def test_a_mismatch_shows_no_speed_and_is_exit_code_1(self, bench: Bench) -> None:
        code, out, _ = bench(mismatched())
        assert code == 1
        (bad,) = [line for line in out.splitlines() if " code " in line and "token 41 is" not in line]
        assert "NO, from token 41" in bad
        assert not re.search(r"\dx", out), "no ratio anywhere"
        text = " ".join(out.split())
        assert "verdict: fail: code: token 41 is not stock's" in text
        assert "note: a note" in text
        assert "no speed is shown for such a run; the raw legs are kept" in text
        assert "3072 tokens checked against stock, 3 mismatched" in text
        assert "median speedup" not in text
        assert "MiB" not in text

    def test_an_interrupt_before_the_first_pair(self, bench: Bench) -> None:
        code, out, _ = bench(nothing())
        assert code == 130
        assert "nothing was measured" in out
        assert "report:" not in out
        assert bench.steps == ["bench"]
        assert Ledger(bench.folder / "ledger.jsonl").read().rows == ()


class TestExitCodes:
    @pytest.mark.parametrize(("outcome", "code"), [("pass", 0), ("tie", 0), ("fail", 1), ("void", 1)])
    def test_follow_the_verdict(self, outcome: str, code: int, bench: Bench) -> None:
        results = mismatched() if outcome == "void" else copy.deepcopy(RESULTS)
        results["verdict"] = {"outcome": outcome, "reasons": ["because"], "notes": []}
        assert bench(results)[0] == code

    def test_a_failed_audit_is_1_whatever_the_verdict(self, bench: Bench) -> None:
        bench.report = audited("fail", Finding(check="replay", message="news: token 3 is not stock's"))
        code, out, _ = bench()
        assert code == 1
        assert "audit: FAIL: 1 finding" in out
        assert "replay: news: token 3 is not stock's" in out

    @pytest.mark.parametrize("results", [RESULTS, mismatched()], ids=["good", "mismatched"])
    def test_an_interrupt_is_130_whatever_the_verdict(self, results: dict[str, Any], bench: Bench) -> None:
        code, out, _ = bench({**results, "status": "interrupted"})
        assert code == 130
        assert f"--resume --out {bench.folder / 'run'}" in out


class TestWhatFollows:
    def test_audit_then_report_then_seal_then_ledger(self, bench: Bench) -> None:
        bench()
        folder = bench.folder / "run"
        assert bench.did[1:] == [("audit", folder, audit_command.rebuild), ("report", folder)]
        assert check_seal(folder) == [], "the report is sealed with the run"
        (entered,) = Ledger(bench.folder / "ledger.jsonl").read().rows
        assert (entered.name, entered.kind, entered.status) == ("lookup", "bench", "keep")
        assert (entered.speedup, entered.diverse_speedup) == (2.12, 2.12)
        assert (entered.time, entered.run) == ("2026-01-02T03:04:05+0000", str(folder))
        assert entered.argv == ("bench", "--drafter", "lookup")
        assert entered.seal == json.loads((folder / "seal.json").read_text())["hash"]

    def test_a_bad_run_is_entered_with_its_reason_and_no_speed(self, bench: Bench) -> None:
        bench(mismatched())
        (entered,) = Ledger(bench.folder / "ledger.jsonl").read().rows
        assert (entered.status, entered.speedup) == ("fail", None)
        assert entered.reasons == ("code: token 41 is not stock's",)

    def test_an_unfinished_run_gets_a_report_and_nothing_else(self, bench: Bench) -> None:
        bench({**RESULTS, "status": "interrupted"})
        assert bench.steps == ["bench", "report"]
        assert check_seal(bench.folder / "run") == []
        assert Ledger(bench.folder / "ledger.jsonl").read().rows == ()

    def test_without_the_audit(self, bench: Bench) -> None:
        code, out, _ = bench(wishes={"audit": False})
        assert (code, bench.steps) == (0, ["bench", "report"])
        assert "audit:" not in out
        assert len(Ledger(bench.folder / "ledger.jsonl").read().rows) == 1

    def test_an_error_ends_it(self, bench: Bench) -> None:
        with pytest.raises(UsageError, match="^the engine worker died$"):
            bench(UsageError("the engine worker died"))
        assert bench.steps == ["bench"]

    def test_a_ledger_that_cannot_be_written_is_told(self, bench: Bench) -> None:
        (bench.folder / "file").write_text("in the way")
        with pytest.raises(StorageError):
            bench(wishes={"ledger": bench.folder / "file" / "ledger.jsonl"})


class TestJson:
    @pytest.mark.parametrize("results", [RESULTS, mismatched()], ids=["good", "mismatched"])
    def test_is_one_document_and_nothing_else(self, results: dict[str, Any], bench: Bench) -> None:
        code, out, _ = bench(results, wishes={"json_output": True})
        assert code == (0 if results is RESULTS else 1)
        assert out.count("\n") == 1
        document = json.loads(out)
        assert document.pop("run") == str(bench.folder / "run")
        checked = document.pop("audit")
        assert (checked["outcome"], checked["num_tokens"], checked["findings"]) == ("pass", 512, [])
        assert document == results

    def test_without_an_audit_says_so(self, bench: Bench) -> None:
        _, out, _ = bench(wishes={"json_output": True, "audit": False})
        assert json.loads(out)["audit"] is None


class TestSettings:
    def test_are_handed_over(self, bench: Bench) -> None:
        bench(depth="4", labels=("a",), stop="fixed", chat=True)
        (_, settings, folder, place, resume) = bench.did[0]
        assert settings == BenchSettings(
            model="m", depth=4, pairs=2, drafter="lookup", labels=("a",), stop="fixed", chat=True
        )
        assert (folder, place, resume) == (bench.folder / "run", Here, False)

    def test_a_cluster_is_the_place(self, bench: Bench) -> None:
        bench(wishes={"ray": "10.0.0.1:6379"})
        assert bench.did[0][3] == OnRay(address="10.0.0.1:6379", model="m")

    def test_resuming_needs_a_folder(self, bench: Bench) -> None:
        bench(wishes={"resume": True})
        assert bench.did[0][4] is True
        with pytest.raises(OptionError, match="name it with --out"):
            bench(wishes={"resume": True, "out": None})
        assert bench.did == []

    def test_the_default_folder_is_named_by_the_time(self, bench: Bench) -> None:
        _, _, err = bench(wishes={"out": None})
        folder = bench.did[0][2]
        assert re.fullmatch(r"runs/\d{8}-\d{6}", str(folder))
        assert str(folder) in err

    @pytest.mark.parametrize("change", [{"pairs": 0}, {"depth": "deep"}, {"drafter": "none"}])
    def test_are_checked_before_anything_runs(self, change: dict[str, Any], bench: Bench) -> None:
        with pytest.raises(OptionError):
            bench(**change)
        assert bench.did == []
        assert bench.capture().out == ""
