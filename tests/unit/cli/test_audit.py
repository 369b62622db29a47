"""``draftproof audit``: the verdict first, exit codes, one JSON document, prompts built again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftproof import audit as module
from draftproof.audit import AuditReport, Finding
from draftproof.bench.prompts import build_prompt, diverse_inputs
from draftproof.cli import audit as command
from draftproof.errors import UsageError
from draftproof.folder import Evidence, write_run
from draftproof.models.load import load_tokenizer
from draftproof.results import compute

GOOD = AuditReport(
    outcome="pass", num_legs=18, num_figures=233, num_outputs=2, num_tokens=3000, num_mismatches=0,
    num_ties=0, rate_bound=0.001, findings=(),
)  # fmt: skip
NOTE = Finding(check="replay", message="another torch", is_failure=False)
FAULT = Finding(check="figure", message="results.speedup.median: published 2.41, recomputed 2.31")


def test_a_pass_in_two_lines_and_its_notes() -> None:
    assert command.lines(replace(GOOD, findings=(NOTE,))) == [
        "PASS",
        "18 legs joined, 233 figures recomputed, 3000 tokens of 2 outputs replayed,"
        " 0 mismatched: under 1 in 1000 (95 %)",
        "note: another torch",
    ]


def test_a_failure_and_what_it_found() -> None:
    bad = replace(
        GOOD, outcome="fail", num_legs=1, num_figures=1, num_outputs=1, num_tokens=1, num_mismatches=3,
        num_ties=2, rate_bound=None, findings=(NOTE, FAULT),
    )  # fmt: skip
    assert command.lines(bad) == [
        "FAIL: 1 finding",
        "1 leg joined, 1 figure recomputed, 1 token of 1 output replayed, 3 mismatched, 2 of them within the"
        " measured noise",
        "figure: results.speedup.median: published 2.41, recomputed 2.31", "note: another torch",
    ]  # fmt: skip
    assert command.lines(replace(bad, num_ties=0))[1].endswith("replayed, 3 mismatched")
    assert command.lines(replace(bad, num_outputs=None))[1].endswith(", no token replayed")


def test_more_findings_than_a_terminal_wants() -> None:
    findings = tuple(replace(FAULT, message=f"m{i}") for i in range(23))
    shown = command.lines(replace(GOOD, outcome="fail", findings=findings))
    assert shown[0] == "FAIL: 23 findings"
    assert shown[2:] == [*(f"figure: m{i}" for i in range(20)), "and 3 more (--json lists them)"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command over an audit that answers ``report``: (code, stdout, stderr, the audit's arguments)."""

    def runner(report: Any, *, replay: bool = True, json_output: bool = False) -> tuple[Any, ...]:
        given: dict[str, Any] = {}

        def audit(folder: Path, **options: Any) -> AuditReport:
            given.update(folder=folder, **options)
            options["progress"]("news", 1, 2)
            if isinstance(report, BaseException):
                raise report
            assert isinstance(report, AuditReport)
            return report

        monkeypatch.setattr(module, "audit", audit)
        code = command.run(Path("runs/[x]"), replay=replay, json_output=json_output)
        return (code, *capsys.readouterr(), given)

    return runner


def test_exit_codes_and_streams(run: Callable[..., Any]) -> None:
    code, out, err, given = run(GOOD)
    assert (code, out.splitlines()[0], err) == (0, "PASS", "")
    assert (given["folder"], given["replay"], given["prompts"]) == (Path("runs/[x]"), True, command.rebuild)
    bad = replace(GOOD, outcome="fail", findings=(replace(FAULT, message="[bold]x[/bold]"),))
    code, out, _, given = run(bad, replay=False)
    assert (code, out.splitlines()[0], out.splitlines()[2]) == (
        1,
        "FAIL: 1 finding",
        "figure: [bold]x[/bold]",
    )
    assert given["replay"] is False


def test_one_json_document(run: Callable[..., Any]) -> None:
    code, out, err, _ = run(replace(GOOD, outcome="fail", findings=(FAULT, NOTE)), json_output=True)
    assert (code, err) == (1, "")
    document = json.loads(out)
    assert (document["outcome"], document["rate_bound"]) == ("fail", 0.001)
    assert document["findings"][0] == {"check": "figure", "message": FAULT.message, "is_failure": True}


def test_interrupted_and_unusable(run: Callable[..., Any]) -> None:
    assert run(KeyboardInterrupt())[:3] == (130, "", "interrupted: the run folder was left as it was\n")
    with pytest.raises(UsageError, match="no run"):
        run(UsageError("no run in x"))


def test_prompts_of_the_packaged_suite_are_built_again(
    honest_run: Callable[..., Evidence], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Through the whole command: the honest prompt passes, one other id is named."""
    folder = tiny_folder("llama")
    tokenizer = load_tokenizer(folder)
    ids = {i.label: tuple(build_prompt(i, tokenizer, 300, chat=False)) for i in diverse_inputs()[:3]}
    request = {"model": str(folder), "suite": "diverse", "prompt_len": 300, "chat": None}
    outputs = dict.fromkeys(ids, (1, 2, 3))
    for name, prompts in (("good", ids), ("bad", {**ids, "code": (*ids["code"][:-1], 0)})):
        run = honest_run(outputs, prompts=prompts, **request)
        assert command.rebuild(run) == {label: list(prompt) for label, prompt in ids.items()}
        write_run(tmp_path / name, run, compute(run))
        report = module.audit(tmp_path / name, prompts=command.rebuild)
        named = [f.message for f in report.findings if "prompts.jsonl" in f.message]
        assert named == ([] if name == "good" else [
            "code: its prompt in prompts.jsonl is not the one the suite gives"
        ])  # fmt: skip


@pytest.mark.parametrize("request_", [{"suite": "mine.jsonl"}, {"suite": "diverse", "prompt_len": None}])
def test_prompts_that_are_the_users_own(
    honest_run: Callable[..., Evidence], request_: dict[str, Any]
) -> None:
    assert command.rebuild(honest_run(**request_)) == {}
    assert command.rebuild(replace(honest_run(suite="diverse", prompt_len=300), kind="evaluate")) == {}
