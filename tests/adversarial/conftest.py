"""Toys for the judge: a stock that never changes, candidates that cheat, one clock that only they advance.

- ``evaluate(candidate, ...)``: a whole trial of a toy candidate; the evidence and what is published of it.
- ``Toy`` candidates are made by the fixture ``toy(...)``.

Outputs have 257 tokens, one from the prompt's forward; stock takes 10 ms a forward. Every leg's time is
disturbed by about 1 %, from a seed, so that intervals and noise are what they are on a quiet machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftproof import results
from draftproof.bench.runner import Failure, Reply
from draftproof.bench.trial import Case, JudgedInput, Trial
from draftproof.bench.workloads.base import Inputs, Output, compare_tokens
from draftproof.folder import Evidence
from draftproof.record import Counters, Machine
from draftproof.testing import FakeClock

NUM_STEPS = 256
STEP_NS = 10_000_000
DRAFT = 4
# How much of an input's output an exact lookup finds in its prompt.
REPETITION = {
    "main": 0.5, "holdout": 0.5, "news": 0.375, "code": 0.75, "poem": 0.25, "table": 0.625, "german": 0.5,
}  # fmt: skip
MACHINE = Machine(cpu="toy", isa="", num_threads=1, device="cpu", os="", python="", torch="", transformers="")


def _ids(label: str) -> tuple[int, ...]:
    return tuple(random.Random(label).randrange(1000) for _ in range(32))


PROMPTS = {label: _ids(label) for label in REPETITION}
LABELS = {ids: label for label, ids in PROMPTS.items()}
WARM_UP = _ids("warm-up")


def truth(prompt_ids: Sequence[int]) -> list[int]:
    """What stock emits."""
    rng = random.Random(",".join(map(str, prompt_ids)))
    return [rng.randrange(1000) for _ in range(NUM_STEPS + 1)]


@dataclass
class Toy:
    """A candidate (or stock) as overridable parts; each sees the label and how often it was asked before."""

    clock: FakeClock
    step_ns: Callable[[str, int], float] = lambda label, seen: STEP_NS
    steps: Callable[[str], int] = lambda label: NUM_STEPS
    spoil: Callable[[str, list[int]], list[int]] = lambda label, ids: ids
    counters: Callable[[int], Counters | None] = lambda steps: None
    is_counted: bool = True
    fail: Callable[[str, int], Failure | None] = lambda label, seen: None
    seed: int = 0
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Reply | Failure:
        assert max_new_tokens == NUM_STEPS + 1
        label = LABELS.get(tuple(prompt_ids), "warm-up")
        seen = self.asked.count(label)
        self.asked.append(label)
        steps = self.steps(label)
        self.clock.advance(round(steps * self.step_ns(label, seen) * self._rng.gauss(1, 0.01)))
        failure = self.fail(label, seen)
        if failure is not None:
            return failure
        output = Output(token_ids=tuple(self.spoil(label, truth(prompt_ids))))
        return Reply(
            output=output, counters=self.counters(steps), peak_bytes=1000,
            num_forwards=steps if self.is_counted else None,
        )  # fmt: skip

    def score(self, request: dict[str, Any]) -> Any:
        raise AssertionError("an exact trial scores nothing")


def honest(steps: int) -> Counters:
    """What an exact lookup of that many steps says of itself: every step drafts, the rest was accepted."""
    return Counters(
        steps=steps, verifies=steps, drafted=DRAFT * steps, accepted=NUM_STEPS - steps, tokens=NUM_STEPS
    )


def lookup_steps(label: str) -> int:
    return round(NUM_STEPS * (1 - REPETITION.get(label, 0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trial: the evidence, the published results, and the statuses that were published on the way."""

    evidence: Evidence
    results: dict[str, Any]
    statuses: list[str]

    @property
    def outcome(self) -> str:
        return str(self.results["verdict"]["outcome"])

    @property
    def reasons(self) -> str:
        return "\n".join(self.results["verdict"]["reasons"])

    @property
    def notes(self) -> str:
        return "\n".join(self.results["verdict"]["notes"])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def toy(clock: FakeClock) -> Callable[..., Toy]:
    def make(**parts: Any) -> Toy:
        return Toy(clock, **{"seed": 1, **parts})

    return make


@pytest.fixture
def evaluate(clock: FakeClock) -> Callable[..., Outcome]:
    def judged(
        candidate: Toy, *, stock: Toy | None = None, pairs: int = 5, labels: Sequence[str] = tuple(PROMPTS),
        on_start: Callable[[], Any] = lambda: None,
    ) -> Outcome:  # fmt: skip
        roles = {"main": "main", "holdout": "holdout"}
        items = [
            JudgedInput(
                label=label, role=roles.get(label, "diverse"),  # type: ignore[arg-type]
                inputs=Inputs(token_ids=PROMPTS[label], max_new_tokens=NUM_STEPS + 1),
            )
            for label in labels
        ]  # fmt: skip
        case = Case(
            inputs=tuple(items), warm_up=Inputs(token_ids=WARM_UP, max_new_tokens=NUM_STEPS + 1),
            compare=lambda a, b: compare_tokens(a.token_ids, b.token_ids), pairs=pairs,
        )  # fmt: skip
        start = Evidence(
            kind="evaluate", request={"model": "toy", "dtype": "float32"}, status="running", arm="toy",
            roles={}, machine=MACHINE,
        )  # fmt: skip
        published: list[Evidence] = []

        def begin() -> Toy:
            assert not candidate.asked
            on_start()
            return candidate

        trial = Trial(case, start, clock, published.append, lambda *_: None)
        evidence = trial.run(stock or Toy(clock), begin)
        assert published[-1] == evidence
        return Outcome(
            evidence=evidence, results=results.compute(evidence), statuses=[e.status for e in published]
        )

    return judged


@pytest.fixture
def parts() -> dict[str, Any]:
    """Names tests of toys need; a conftest is not imported."""
    return {
        "honest": honest, "lookup_steps": lookup_steps, "step_ns": STEP_NS, "num_steps": NUM_STEPS,
        "labels": tuple(PROMPTS), "draft": DRAFT,
    }  # fmt: skip
