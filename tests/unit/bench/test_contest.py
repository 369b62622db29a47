"""Recipes read back from run folders; what cannot be rebuilt is refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import contest
from draftproof.bench.contest import recipe
from draftproof.bench.integrate import Choice
from draftproof.bench.runner import Failure, Reply
from draftproof.bench.trial import Case, JudgedInput
from draftproof.bench.workloads.base import Inputs, Output
from draftproof.errors import UsageError
from draftproof.folder import Evidence, write_run
from draftproof.ledger import LedgerRow
from draftproof.record import Machine
from draftproof.testing import FakeClock
from draftproof.wire import encode

MACHINE = Machine(
    cpu="c", isa="", num_threads=1, device="cpu", os="o", python="3", torch="2", transformers="5",
)  # fmt: skip
REQUEST: dict[str, Any] = {
    "model": "m", "dtype": "float32", "device": "cpu", "prompt_len": 64, "max_new_tokens": 8,
    "stop": "fixed", "chat": None, "drafter": "lookup", "depth": 3, "claim": "auto", "draft_model": None,
    "exit_layer": None, "threads": 1,
}  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    evidence = Evidence(
        kind="bench", request=REQUEST | changes, status="complete", arm="lookup", roles={}, machine=MACHINE
    )
    write_run(folder, evidence, {})
    return folder


def test_a_bench_is_rebuilt_as_it_was(tmp_path: Path) -> None:
    made = recipe(write(tmp_path / "run"))
    assert (made.candidate.drafter, made.candidate.depth) == ("lookup", 3)
    assert made.settings.options["max_new_tokens"] == 8
    assert made.settings.options["model"] == "m"
    assert made.settings.threads == 1


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        recipe(tmp_path)


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    candidate = contest.Candidate(transform=tmp_path / "gone.py")
    made = contest.Recipe(candidate=candidate, settings=recipe(write(tmp_path / "run")).settings)
    with pytest.raises(UsageError, match="cannot read"):
        contest._line(made, {"options": {}})


class FakeRunner:
    """A process that answers at once; all of them share a list of who ran and what."""

    calls: list[tuple[str, tuple[int, ...]]]
    fails: str | None

    def __init__(self, line: dict[str, Any], timeout: float) -> None:
        self.name = str(line.get("drafter") or "stock")
        self.ready: dict[str, Any] | Failure = {"machine": encode(MACHINE)}

    def __enter__(self) -> FakeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, prompt_ids: Any, max_new_tokens: int) -> Reply | Failure:
        type(self).calls.append((self.name, tuple(prompt_ids)))
        if self.name == type(self).fails:
            return Failure(kind="oom", reason="out of memory")
        return Reply(output=Output(token_ids=(1, 2)), peak_bytes=5)


MAIN = Inputs(token_ids=(7, 8), max_new_tokens=2)
CASE = Case(
    inputs=(JudgedInput(label="main", role="main", inputs=MAIN),),
    warm_up=Inputs(token_ids=(9,), max_new_tokens=2), compare=lambda *_: pytest.fail("nothing to compare"),
    pairs=5,
)  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    FakeRunner.calls, FakeRunner.fails = [], None
    monkeypatch.setattr(contest, "ChildRunner", FakeRunner)
    monkeypatch.setattr(contest, "resolved", lambda settings: settings.options)
    monkeypatch.setattr(contest, "build_workload", lambda *_: None)
    monkeypatch.setattr(contest, "freeze", lambda *_: CASE)
    return FakeRunner


def entered(name: str, run: Path) -> LedgerRow:
    return LedgerRow(
        time="2026-11-29", name=name, kind="bench", status="keep", run=str(run), seal="s", quality="exact",
        speedup=2.0,
    )  # fmt: skip


def test_both_arms_are_warmed_and_take_turns_to_go_first(tmp_path: Path, fake: type[FakeRunner]) -> None:
    choice = Choice(row=entered("lookup", write(tmp_path / "b")), base=None)
    with contest.open_arms(choice, lambda *_: None, clock=FakeClock()) as arms:
        assert fake.calls == [("stock", (9,)), ("lookup", (9,))]
        fake.calls.clear()
        times = [arms.run_pair(number) for number in range(3)]
    assert [name for name, _ in fake.calls] == ["stock", "lookup", "lookup", "stock", "stock", "lookup"]
    assert {ids for _, ids in fake.calls} == {(7, 8)}
    assert [(t.a.arm, t.b.arm, t.a.pair) for t in times] == [("stock", "lookup", n) for n in range(3)]
    assert arms.machine == MACHINE


def test_another_version_of_itself_has_a_name_of_its_own(tmp_path: Path, fake: type[FakeRunner]) -> None:
    row = entered("lookup", write(tmp_path / "b"))
    with contest.open_arms(Choice(row=row, base=row), lambda *_: None, clock=FakeClock()) as arms:
        times = arms.run_pair(0)
    assert (times.a.arm, times.b.arm) == ("lookup (integrated)", "lookup")


def test_candidates_judged_on_other_workloads_do_not_meet(tmp_path: Path, fake: type[FakeRunner]) -> None:
    base = entered("suffix", write(tmp_path / "a", drafter="suffix", prompt_len=65))
    choice = Choice(row=entered("lookup", write(tmp_path / "b")), base=base)
    with (
        pytest.raises(UsageError, match="suffix and lookup were judged on different workloads"),
        contest.open_arms(choice, lambda *_: None),
    ):
        pass
    assert fake.calls == []


def test_an_arm_that_fails_is_named(tmp_path: Path, fake: type[FakeRunner]) -> None:
    fake.fails = "lookup"
    choice = Choice(row=entered("lookup", write(tmp_path / "b")), base=None)
    with (
        pytest.raises(UsageError, match="lookup failed in round 1: out of memory"),
        contest.open_arms(choice, lambda *_: None, clock=FakeClock()),
    ):
        pass
