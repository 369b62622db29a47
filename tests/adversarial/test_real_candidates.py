"""The same cheats as files, on a small random Llama, each in a real process of its own.

Outputs, failures, counters and memory are real; time is a fake clock that moves 10 ms a forward, so that a
verdict never depends on how busy the machine is.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftproof import results
from draftproof.bench.runner import ChildRunner, Failure, Reply
from draftproof.bench.trial import Case, JudgedInput, Trial
from draftproof.bench.workloads.base import Inputs
from draftproof.bench.workloads.llm import LLMWorkload
from draftproof.folder import Evidence
from draftproof.record import Machine
from draftproof.testing import FakeClock
from draftproof.wire import decode

CANDIDATES = Path(__file__).parent / "candidates"
NUM_TOKENS, PAIRS = 24, 5
Judge = Callable[..., "Judged"]
pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    evidence: Evidence
    results: dict[str, Any]

    @property
    def outcome(self) -> str:
        return str(self.results["verdict"]["outcome"])

    @property
    def reasons(self) -> str:
        return "\n".join(self.results["verdict"]["reasons"])

    @property
    def notes(self) -> str:
        return "\n".join(self.results["verdict"]["notes"])


class Metered:
    """A runner whose every forward takes 10 ms of a fake clock; the prompt's is one."""

    def __init__(self, inner: ChildRunner, clock: FakeClock) -> None:
        self._inner, self._clock = inner, clock

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Reply | Failure:
        reply = self._inner.run(prompt_ids, max_new_tokens)
        counted = NUM_TOKENS - 1 if isinstance(reply, Failure) else reply.num_forwards
        self._clock.advance(10_000_000 * (1 + (NUM_TOKENS - 1 if counted is None else counted)))
        return reply

    def score(self, request: dict[str, Any]) -> Any:
        raise AssertionError("an exact trial scores nothing")


@pytest.fixture(scope="module")
def workload(tiny_folder: Callable[..., Path]) -> LLMWorkload:
    folder = tiny_folder("llama")
    return LLMWorkload(model=str(folder), dtype="float32", prompt_len=400, max_new_tokens=NUM_TOKENS)


def settings(workload: LLMWorkload, transform: Path | None) -> dict[str, Any]:
    sha256 = None if transform is None else hashlib.sha256(transform.read_bytes()).hexdigest()
    return {
        "kind": "workload", "workload": "llm", "options": workload.options, "threads": 1, "device": "cpu",
        "transform": None if transform is None else str(transform), "sha256": sha256,
    }  # fmt: skip


@pytest.fixture(scope="module")
def stock(workload: LLMWorkload) -> Iterator[ChildRunner]:
    with ChildRunner(settings(workload, None), timeout=300) as child:
        assert isinstance(child.ready, dict)
        yield child


@pytest.fixture(scope="module")
def case(workload: LLMWorkload) -> Case:
    roles = {"main": "main", "holdout": "holdout", "poem": "diverse", "code": "diverse"}
    items = [
        JudgedInput(label=label, role=role, inputs=workload.make_inputs(text=label))  # type: ignore[arg-type]
        for label, role in roles.items()
    ]
    warm = Inputs(token_ids=tuple(range(100, 200)), max_new_tokens=NUM_TOKENS)
    return Case(inputs=tuple(items), warm_up=warm, compare=workload.compare, pairs=PAIRS)


@pytest.fixture
def judge(workload: LLMWorkload, stock: ChildRunner, case: Case) -> Judge:
    def judged(name: str, timeout: float = 300, watch: Callable[[ChildRunner], Any] | None = None) -> Judged:
        clock = FakeClock()
        assert isinstance(stock.ready, dict)
        begun = Evidence(
            kind="evaluate", request={"model": "tiny", "dtype": "float32"}, status="running", arm=name,
            roles={}, machine=decode(Machine, stock.ready["machine"]),
        )  # fmt: skip
        with ExitStack() as stack:

            def start() -> Any:
                transform = CANDIDATES / f"{name}.py"
                child = stack.enter_context(ChildRunner(settings(workload, transform), timeout))
                if isinstance(child.ready, Failure):
                    return child.ready
                if watch is not None:
                    watch(child)
                return Metered(child, clock)

            trial = Trial(case, begun, clock, lambda _: None, lambda *_: None)
            evidence = trial.run(Metered(stock, clock), start)
        return Judged(evidence=evidence, results=results.compute(evidence))

    return judged


def test_an_honest_lookup_is_sound_and_reconciled(judge: Judge) -> None:
    done = judge("lookup")
    assert done.outcome in ("pass", "tie"), done.reasons
    assert done.results["num_mismatched_tokens"] == 0
    assert [row["reconciled"] for row in done.results["inputs"]] == [True] * 4
    assert sum(row["decode_stats"]["drafted"] for row in done.results["inputs"]) > 0
    firsts = [d.leg.is_first_seen for d in done.evidence.of("code", "lookup")]
    assert firsts == [True] + [False] * (PAIRS - 1)
    assert {d.leg.num_forwards for d in done.evidence.of("code", "stock")} == {NUM_TOKENS - 1}
    assert all(d.leg.peak_bytes > 10 << 20 for d in done.evidence.decodes)


def test_wrong_on_code_fails_and_names_the_input(judge: Judge) -> None:
    done = judge("wrong_on_code")
    assert done.outcome == "fail"
    assert done.reasons.startswith("code: token 5 is not stock's")
    assert done.results["speedup"] is None
    assert [row["label"] for row in done.results["inputs"]] == ["main", "holdout", "poem", "code"]


def test_wrong_at_a_late_token_fails_there(judge: Judge) -> None:
    done = judge("wrong_late")
    assert done.outcome == "fail"
    assert done.reasons.startswith("main: token 20 is not stock's")


def test_what_a_candidate_prints_disturbs_nothing(judge: Judge) -> None:
    done = judge("prints")
    assert done.outcome == "tie", done.reasons
    assert done.results["num_mismatched_tokens"] == 0


def test_patching_the_judge_in_its_own_process_changes_nothing(judge: Judge) -> None:
    done = judge("patches_judge")
    assert done.outcome == "fail"
    assert done.reasons.startswith("main: token 0 is not stock's")


def test_every_input_is_judged_though_the_workload_knows_none(judge: Judge) -> None:
    done = judge("honest_patches")
    assert done.outcome == "tie", done.reasons
    assert [row["label"] for row in done.results["inputs"]] == ["main", "holdout", "poem", "code"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "main: the candidate failed (error): ValueError: a line and another"),
        ("runs_out_of_memory", "warm-up: the candidate failed (oom): RuntimeError: "),
        ("raises_in_apply", "loading: the candidate failed (error): RuntimeError: cannot speed up Llama"),
        ("exits", "main: the candidate failed (exit): its process ended (exit code 7)"),
        ("nonsense", "warm-up: the candidate failed (error): TypeError: run() must return the new token ids"),
        ("answers_early", "warm-up: the candidate failed (exit): answered before it was asked"),
    ],
)
def test_a_broken_candidate_fails_with_its_reason(name: str, reason: str, judge: Judge) -> None:
    done = judge(name)
    assert done.outcome == "fail"
    assert reason in done.reasons
    assert done.results["speedup"] is None
    assert len(done.evidence.of("main", "stock-solo")) == PAIRS


def test_a_candidate_that_never_reports_passes_with_a_note(judge: Judge) -> None:
    done = judge("never_reports")
    assert done.outcome == "tie", done.reasons
    assert done.notes == (
        "no counters were reported (report_stats); steps are the forwards the harness counted"
    )
    assert {row["num_forwards"] for row in done.results["inputs"]} == {NUM_TOKENS - 1}


def test_a_candidate_that_lies_about_its_steps_fails(judge: Judge) -> None:
    done = judge("lies")
    assert done.outcome == "fail"
    assert f"main: reported 2 steps, the harness counted {NUM_TOKENS - 1} forwards" in done.reasons


def test_counters_are_unverified_where_the_hook_was_taken_off(judge: Judge) -> None:
    done = judge("hides_forwards")
    assert done.results["flags"][-1] == "counters_unverified"
    assert "no forward of the model was seen" in done.notes


def test_a_candidate_that_hangs_is_stopped(judge: Judge) -> None:
    done = judge("hangs", timeout=4)
    assert done.outcome == "fail"
    assert "holdout: the candidate failed (timeout): no answer within 4 s; it was stopped" in done.reasons
    assert "not run, as holdout did not pass: poem, code" in done.notes
    assert [row["label"] for row in done.results["inputs"]] == ["main", "holdout"]


def test_a_candidate_is_stopped_while_stock_runs(judge: Judge) -> None:
    states: list[str] = []

    def watch(child: ChildRunner) -> None:
        run = child.run

        def watched(prompt_ids: Sequence[int], max_new_tokens: int) -> Reply | Failure:
            states.append(state(child))
            return run(prompt_ids, max_new_tokens)

        child.run = watched  # type: ignore[method-assign]

    def state(child: ChildRunner) -> str:
        """States of the process, which is waited for, and of what it started, which follows at once."""
        own = child._process.pid
        spinners = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        for _ in range(100):
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (str(own), *spinners)]
            found = "".join(stat.rsplit(")", 1)[1].split()[0] for stat in stats)
            if found == "TT":
                break
            threading.Event().wait(0.001)
        return found

    done = judge("works_between", watch=watch)
    assert done.outcome == "tie", done.reasons
    assert set(states) == {"TT"}
