"""The frozen records every layer passes on, and the invariants they refuse to break.

Nothing here computes: a record checks itself when it is built and raises ``EvidenceError`` when it
cannot be true. Times are nanoseconds, sizes are bytes, absent is ``None``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from draftproof.errors import EvidenceError

Claim = Literal["bitwise", "guarded", "unproved", "fixed"]
FinishReason = Literal["stop", "length", "interrupted"]


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise EvidenceError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Token ids a drafter proposes for one round, best first position first.

    ``match_length`` is the number of context tokens a retrieval drafter matched before it copied;
    ``None`` for drafters that compute. ``source`` names the drafter, also inside a cascade.
    """

    ids: tuple[int, ...]
    source: str
    match_length: int | None = None


EMPTY_DRAFT = Draft(ids=(), source="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How deep to verify this round and why: the expected tokens and seconds behind the choice."""

    depth: int
    reason: str
    expected_tokens: float | None = None
    expected_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One propose-verify-commit cycle.

    ``position`` is the number of tokens (prompt included) before the round's first emitted token;
    ``num_drafted`` the draft tokens verified; ``emitted`` the accepted tokens and the bonus token, cut
    where the output ended. ``num_redecided`` counts near-ties decided again by one-row arithmetic.
    ``offered`` holds every id the drafter proposed, verified or not; a trace written before it existed
    holds none.
    """

    index: int
    position: int
    source: str
    num_offered: int
    num_drafted: int
    num_accepted: int
    emitted: tuple[int, ...]
    num_redecided: int = 0
    num_forwards: int = 1
    reason: str = ""
    expected_tokens: float | None = None
    draft_ns: int = 0
    verify_ns: int = 0
    commit_ns: int = 0
    offered: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.offered) in (0, self.num_offered), "a round lists all it was offered")
        _require(self.num_drafted <= self.num_offered, "a round drafted more than it was offered")
        _require(self.num_accepted <= self.num_drafted, "a round accepted more than it drafted")
        _require(len(self.emitted) >= 1, "a round emitted nothing")
        _require(
            self.num_accepted <= len(self.emitted) <= self.num_accepted + 1,
            "a round emits its accepted tokens and at most one more",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All rounds of one decode, in order, with the time the prompt took."""

    num_prompt: int
    prefill_ns: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        position = self.num_prompt
        for index, round_ in enumerate(self.rounds):
            _require(round_.index == index, "rounds out of order")
            _require(round_.position == position, "rounds overlap or leave a gap")
            position += len(round_.emitted)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every emitted token in order."""
        return tuple(token for round_ in self.rounds for token in round_.emitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEvidence:
    """What the probe saw for one operation: the form chosen and the row counts it reproduces.

    ``max_rows`` is the largest row count up to which *every* smaller one gave, row by row, the bits
    of stock's one-row call; 1 means none but the one-row call itself. ``seconds_by_rows`` are the
    fastest of a few calls of the chosen form; ``rejected`` says which faster forms failed, and where.
    """

    op: str
    shape: tuple[int, ...]
    form: str
    max_rows: int
    is_exact: bool
    num_checked: int
    seconds_by_rows: dict[int, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What runs batched and what row by row, and the claim that follows.

    ``margin_bound`` is set for ``guarded`` only: rows whose top-1/top-2 margin is below it are decided
    again by one-row arithmetic. ``fixed_rows`` is set for ``fixed`` only.
    """

    claim: Claim
    dtype: str
    fingerprint: str
    ops: tuple[OpEvidence, ...]
    max_rows: int
    margin_bound: float | None = None
    fixed_rows: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_rows >= 1, "a plan verifies at least one row")
        _require((self.claim == "fixed") == (self.fixed_rows is not None), "fixed_rows goes with fixed")

    def form(self, op: str) -> OpEvidence:
        """The evidence for ``op``; raises ``EvidenceError`` when the plan never probed it."""
        for evidence in self.ops:
            if evidence.op == op:
                return evidence
        raise EvidenceError(f"the plan has no entry for {op!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """Seconds of one verification by rows and by cached positions, measured on this machine.

    ``seconds[i][j]`` belongs to ``contexts[i]`` and ``rows[j]``; both axes ascend.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _require(len(self.rows) >= 1, "a curve has at least one row count")
        _require(len(self.seconds) == len(self.contexts) >= 1, "one line of seconds a context")
        _require(all(len(line) == len(self.rows) for line in self.seconds), "one figure a row count")
        _require(self.rows[0] == 1, "the curve starts at one row")
        _require(list(self.rows) == sorted(set(self.rows)), "row counts ascend")
        _require(list(self.contexts) == sorted(set(self.contexts)), "contexts ascend")
        _require(all(s > 0 for line in self.seconds for s in line), "costs are positive")

    @property
    def is_steady(self) -> bool:
        """Whether no row count is half as dear again at fewer positions: such a curve saw other load."""
        columns = zip(*self.seconds, strict=True)
        return all(1.5 * more >= less for column in columns for less, more in combinations(column, 2))

    def at(self, num_rows: int, context: int) -> float:
        """Seconds of a verification of ``num_rows`` rows over ``context`` cached positions.

        Linear between measured points; held at the ends of the context axis below the first point and
        extended along the last segment above it.
        """
        by_row = [self._by_context(j, context) for j in range(len(self.rows))]
        return _interpolate(self.rows, by_row, num_rows)

    def _by_context(self, j: int, context: int) -> float:
        column = [line[j] for line in self.seconds]
        return _interpolate(self.contexts, column, max(context, self.contexts[0]))


def _interpolate(xs: tuple[int, ...], ys: list[float], x: float) -> float:
    if len(xs) == 1:
        return ys[0]
    hi = next((i for i in range(1, len(xs)) if xs[i] >= x), len(xs) - 1)
    lo = hi - 1
    slope = (ys[hi] - ys[lo]) / (xs[hi] - xs[lo])
    return max(ys[lo] + slope * (x - xs[lo]), 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine and the software a figure was measured on; equal fields, comparable bits."""

    cpu: str
    isa: str
    num_threads: int
    device: str
    os: str
    python: str
    torch: str
    transformers: str
    environment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a decode loop reports of itself through ``Workload.report_stats``; a claim, not a measurement.

    ``steps`` forwards after the prompt's, ``verifies`` those that checked a draft, ``drafted`` and
    ``accepted`` draft tokens, ``tokens`` emitted by them.
    """

    steps: int = 0
    verifies: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        values = (self.steps, self.verifies, self.drafted, self.accepted, self.tokens)
        _require(all(value >= 0 for value in values), "a counter is never negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One timed decode of one prompt by one arm.

    Attributes:
        order: counts all legs of the run.
        start_ns: monotonic.
        num_tokens: emitted tokens (for audio without tokens, frames).
        tokens_sha256: hash of the ids joined by commas, or of the output's bytes where it has no ids.
        peak_bytes: peak resident memory of the arm's process during this leg, or since it started where
            the system cannot reset the peak (``Machine`` says nothing about which; compare arms only).
        peak_cuda_bytes: peak memory allocated by torch on CUDA, ``None`` elsewhere.
        is_first_seen: this arm's process had not seen the prompt before.
        num_forwards: forwards after the prompt's, counted by the harness; ``None`` where it could not count.
        counters: what the arm reported of itself, ``None`` if it reported nothing.
        host: the machine that ran the leg, where a run has several.
    """

    label: str
    arm: str
    pair: int
    order: int
    start_ns: int
    duration_ns: int
    num_tokens: int
    tokens_sha256: str
    peak_bytes: int
    peak_cuda_bytes: int | None = None
    is_first_seen: bool = False
    num_forwards: int | None = None
    counters: Counters | None = None
    host: str = ""

    def __post_init__(self) -> None:
        _require(self.duration_ns > 0, "a leg takes time")
        _require(self.num_tokens > 0, "a leg emits tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFloor:
    """How fast this machine can read the weights once: no forward over all of them can be faster.

    ``bytes_per_second`` is the fastest of several reads of a buffer of ``num_bytes``, the size of the
    weights (or the largest part of them that was read), with the threads of the run.
    """

    num_bytes: int
    bytes_per_second: float

    @property
    def seconds(self) -> float:
        """Seconds of one read."""
        return self.num_bytes / self.bytes_per_second
