"""Whether a candidate replaces what is integrated: a paired A/B in alternating rounds, decided by one rule.

A is what is integrated so far (stock, or a candidate accepted before), B the candidate. The rule is
kernel-agent's: B wins most rounds, and the lower bound of its gain is worth having. What this does not
judge: whether B is exact on other inputs and how its speed changes with them; its evaluation in the ledger
does, and its label and its diverse-set median are carried over beside the A/B's own number.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from draftproof.errors import DraftproofError, EvidenceError, OptionError, UsageError
from draftproof.folder import RUN, SEAL, STOCK, read_json, seal
from draftproof.ledger import Ledger, LedgerRow, candidates, integrated
from draftproof.record import Leg, Machine
from draftproof.wire import FORMAT_VERSION, canonical, check_version, decode, encode, write_atomic

INTEGRATION = "integration.json"
MIN_ROUNDS = 8
MIN_WIN_RATE = 0.8
MIN_GAIN = 0.01
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AbRule:
    """When B is accepted.

    It wins ``min_win_rate`` of the rounds or more, and the lower end of the 95 % interval of its relative
    gain is above ``min_gain``. ``seed`` draws the resamples.
    """

    min_win_rate: float = MIN_WIN_RATE
    min_gain: float = MIN_GAIN
    num_resamples: int = NUM_RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.min_win_rate <= 1:
            raise OptionError(f"min_win_rate is a share above 0 and up to 1, got {self.min_win_rate}")
        if not 0 <= self.min_gain < math.inf:
            raise OptionError(f"min_gain is 0 or more (0.01 means 1 %), got {self.min_gain}")
        if self.num_resamples < 1:
            raise OptionError(f"num_resamples must be 1 or more, got {self.num_resamples}")


RULE = AbRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class AbDecision:
    """What the rule says. ``gain`` is the geometric mean of the rounds' ratios, less one: 0.05 is 5 %."""

    accepted: bool
    win_rate: float
    gain: float
    interval: tuple[float, float]
    num_rounds: int
    why: str


def check_rounds(num_rounds: int) -> None:
    """Refuse an A/B of too few rounds before anything is loaded."""
    if num_rounds < MIN_ROUNDS:
        raise UsageError(f"an A/B takes {MIN_ROUNDS} rounds or more, got {num_rounds}")


def decide(ratios: Sequence[float], rule: AbRule = RULE) -> AbDecision:
    """Apply ``rule`` to A's time over B's, one ratio a round. Equal times are no win for B.

    Raises:
        UsageError: fewer rounds than ``MIN_ROUNDS``.
    """
    check_rounds(len(ratios))
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise EvidenceError("a ratio of two times is positive and finite")
    wins = sum(ratio > 1 for ratio in ratios)
    logs = [math.log(ratio) for ratio in ratios]
    gain = math.expm1(math.fsum(logs) / len(logs))
    low, high = _mean_interval(logs, rule)
    interval = (math.expm1(low), math.expm1(high))
    is_often = wins / len(ratios) >= rule.min_win_rate
    is_much = interval[0] > rule.min_gain
    return AbDecision(
        accepted=is_often and is_much, win_rate=wins / len(ratios), gain=gain, interval=interval,
        num_rounds=len(ratios),
        why=(
            f"won {wins} of {len(ratios)} rounds ({'' if is_often else 'not '}the {rule.min_win_rate:.0%}"
            f" needed); gained {gain:.1%}, interval {interval[0]:.1%} to {interval[1]:.1%}"
            f" ({'' if is_much else 'not '}above {rule.min_gain:.1%})"
        ),
    )  # fmt: skip


def _mean_interval(values: Sequence[float], rule: AbRule) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean."""
    import numpy as np  # noqa: PLC0415 - SciPy is loaded when the first interval is asked for
    from scipy.stats import bootstrap  # noqa: PLC0415

    done = bootstrap(
        (np.asarray(values),), np.mean, n_resamples=rule.num_resamples, method="percentile",
        rng=np.random.default_rng(rule.seed),
    )  # fmt: skip
    return float(done.confidence_interval.low), float(done.confidence_interval.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """One round: a leg of A and a leg of B on the same input, one right after the other."""

    a: Leg
    b: Leg

    def __post_init__(self) -> None:
        first, second = sorted((self.a, self.b), key=lambda leg: leg.start_ns)
        if (self.a.label, self.a.pair) != (self.b.label, self.b.pair):
            raise EvidenceError("both legs of a round belong to one input and one pair")
        if first.start_ns + first.duration_ns > second.start_ns:
            raise EvidenceError("the legs of a round do not overlap")

    @property
    def ratio(self) -> float:
        """A's time over B's."""
        return self.a.duration_ns / self.b.duration_ns

    @property
    def is_a_first(self) -> bool:
        """Which of the two ran first."""
        return self.a.start_ns < self.b.start_ns

    @property
    def is_equal(self) -> bool:
        """Whether both emitted the same."""
        return self.a.tokens_sha256 == self.b.tokens_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """B's latest evaluation and A's; ``base`` is ``None`` while nothing but stock is integrated."""

    row: LedgerRow
    base: LedgerRow | None

    @property
    def base_name(self) -> str:
        """The name of A."""
        return self.base.name if self.base else STOCK


RunPair = Callable[[int], PairTimes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """Both arms, loaded and warmed up: ``run_pair(round)`` times one leg of each.

    Which goes first must alternate from round to round, as ``Stopwatch.pair`` does.
    """

    run_pair: RunPair
    machine: Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Where, when (ISO 8601) and by which command."""

    machine: Machine
    time: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Integration:
    """What ``integration.json`` holds: the raw legs of every round, the rule, and what it said.

    Attributes:
        status: ``running``, ``complete``, ``interrupted`` or ``failed: why``; only a complete A/B has a
            decision.
        candidate: B's name; ``base`` is A's.
        evaluation: id of B's ledger row, where the next five come from.
        benchmark_speedup: B against stock on the benchmark; ``diverse_speedup`` over the diverse set.
        data_dependent: B's speed changes with what is decoded, so the A/B holds for its input.
        num_planned: rounds asked for; ``rounds`` those finished.
    """

    status: str
    candidate: str
    base: str
    evaluation: str | None
    quality: str
    data_dependent: bool
    flags: tuple[str, ...]
    benchmark_speedup: float | None
    diverse_speedup: float | None
    rule: AbRule
    num_planned: int
    machine: Machine
    time: str
    argv: tuple[str, ...]
    rounds: tuple[PairTimes, ...] = ()
    decision: AbDecision | None = None
    kind: Literal["integrate"] = "integrate"
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if (self.decision is not None) != (self.status == "complete"):
            raise EvidenceError("a complete A/B has a decision, no other")
        firsts = [pair.is_a_first for pair in self.rounds]
        if any(x == y for x, y in zip(firsts, firsts[1:], strict=False)):
            raise EvidenceError("A and B take turns at going first")


def choose(rows: Sequence[LedgerRow], name: str) -> Choice:
    """The candidate called ``name`` and what it is up against.

    Raises:
        UsageError: it was never evaluated, its latest evaluation was not kept, or it is integrated.
    """
    known = {c.name: c for c in candidates(rows) if c.num_evaluations}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "evaluate it first; `draftproof status` lists all"
        raise UsageError(f"no candidate {name!r} in the ledger; {hint}")
    row = known[name].row
    if row.status != "keep":
        raise UsageError(
            f"{name!r} is not kept but {row.status} ({row.reasons[0]}); only a kept one can be integrated"
        )
    before = integrated(rows)
    if before is not None and before.name == name:
        raise UsageError(f"{name!r} is what is integrated already (since {before.time})")
    if before is not None and before.name not in known:
        raise UsageError(f"{before.name!r} is integrated but the ledger has no evaluation to rebuild it from")
    return Choice(row=row, base=known[before.name].row if before else None)


def integrate(
    run_pair: RunPair, num_rounds: int, folder: Path, *, choice: Choice, ledger: Ledger, stamp: Stamp,
    rule: AbRule = RULE,
) -> Integration:  # fmt: skip
    """Run the A/B, write ``integration.json`` after every round, seal it, and enter it into ``ledger``.

    Stops at the first round whose outputs differ where the candidate was kept as exact. An interrupt keeps
    the finished rounds and decides nothing.

    Raises:
        UsageError: too few rounds, a folder in use, or an arm that died (entered as void first).
    """
    check_rounds(num_rounds)
    require_fresh(folder)
    done = _begin(choice, num_rounds, stamp, rule)
    _write(folder, done)
    try:
        while done.status == "running":
            done = _next_round(done, run_pair)
            _write(folder, done)
    except KeyboardInterrupt:
        done = replace(done, status="interrupted") if done.status == "running" else done
    except DraftproofError as error:
        _finish(replace(done, status=f"failed: {error}"), folder, choice, ledger)
        raise
    return _finish(done, folder, choice, ledger)


def require_fresh(folder: Path) -> None:
    """Refuse a folder that holds a run: its seal is in the ledger already."""
    used = [name for name in (INTEGRATION, RUN, SEAL) if (folder / name).exists()]
    if used:
        raise UsageError(f"{folder} holds another run ({used[0]}); name a new folder with --out")


def _begin(choice: Choice, num_rounds: int, stamp: Stamp, rule: AbRule) -> Integration:
    row = choice.row
    return Integration(
        status="running", candidate=row.name, base=choice.base_name, evaluation=row.id, quality=row.quality,
        data_dependent=row.is_data_dependent, flags=row.flags, benchmark_speedup=row.speedup,
        diverse_speedup=row.diverse_speedup, rule=rule, num_planned=num_rounds, machine=stamp.machine,
        time=stamp.time, argv=stamp.argv,
    )  # fmt: skip


def _next_round(done: Integration, run_pair: RunPair) -> Integration:
    """One more round; after the last, or at the first wrong output, the end."""
    number = len(done.rounds)
    pair = run_pair(number)
    done = replace(done, rounds=(*done.rounds, pair))
    if done.quality == "exact" and not pair.is_equal:
        return replace(
            done, status=f"failed: round {number}: the output of {done.candidate} is not that of {done.base}"
        )
    if len(done.rounds) < done.num_planned:
        return done
    return replace(done, status="complete", decision=decide([p.ratio for p in done.rounds], done.rule))


def _write(folder: Path, done: Integration) -> None:
    write_atomic(folder / INTEGRATION, canonical(encode(done)) + "\n")


def _finish(done: Integration, folder: Path, choice: Choice, ledger: Ledger) -> Integration:
    _write(folder, done)
    ledger.append(_row(done, choice.row, str(folder), seal(folder)))
    return done


def _row(done: Integration, row: LedgerRow, run: str, digest: str) -> LedgerRow:
    """The A/B as a ledger row: its speedup is B against A, the diverse median stays B against stock."""
    common = LedgerRow(
        time=done.time, name=done.candidate, kind="integrate", status="void", run=run, seal=digest,
        quality=row.quality, claim=row.claim, flags=row.flags, argv=done.argv,
        reasons=(f"against {done.base}: {done.status} after {len(done.rounds)} rounds",),
    )  # fmt: skip
    if done.decision is None:
        is_wrong = bool(done.rounds) and done.quality == "exact" and not done.rounds[-1].is_equal
        return replace(common, status="fail") if is_wrong else common
    low, high = done.decision.interval
    return replace(
        common, status="keep" if done.decision.accepted else "discard", speedup=1 + done.decision.gain,
        interval=(1 + low, 1 + high), diverse_speedup=row.diverse_speedup,
        reasons=(f"against {done.base}: {done.decision.why}",),
    )  # fmt: skip


def read_integration(folder: Path) -> Integration:
    """The record in ``folder``; its own invariants are checked again, the seal is not."""
    document = read_json(folder / INTEGRATION)
    check_version(document)
    return decode(Integration, document)
