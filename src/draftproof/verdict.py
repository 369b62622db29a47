"""The judge: what a comparison shows, as an outcome with its reasons. Pure: records in, records out.

``fail`` is a fault of the candidate, ``void`` a fault of the evidence, ``tie`` no measurable difference. A
speed is shown for ``pass``, ``tie`` and a plain "slower"; in every other case it is withheld and the reason
stands in its place. What this does not prove: that the clock was honest, or that the candidate's process
could not reach the judge's. Nor does it see what touches a few inputs only: whether stock was held up is
asked of the main input, and whether repeats are served from a store is asked of the median input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from draftproof.record import Counters

Outcome = Literal["pass", "tie", "fail", "void"]

# A leg's pair ratios may spread by this much (relative, one pair) before nothing can be claimed: a choice.
NOISE_LIMIT = 0.25
# Stock's own time may move by this much between the first and the second half of the run, or between
# running alone and running beside the candidate.
DRIFT_LIMIT = 0.20
# Repeats of a prompt may be faster than its first decode by this much, relative to stock's own repeats.
WARM_LIMIT = 0.15
# Rounds after which "every draft token was accepted" is no luck.
MANY_ROUNDS = 32
# The memory floor is a measurement too: a leg under this share of it did not read the weights.
FLOOR_SHARE = 0.8
# A loop may count the prompt's own forward or not.
COUNT_SLACK = 1
_FEW = 3
_STOCK_FAILED = "failed: stock"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegCase:
    """One judged leg: what it took, and what it and the harness counted."""

    seconds: float
    num_tokens: int
    num_forwards: int | None = None
    counters: Counters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCase:
    """One input as the judge sees it.

    Attributes:
        num_expected: tokens stock emitted.
        num_emitted: tokens of every judged leg.
        first_difference: first differing token of any leg, ``None`` if all are equal.
        speedups: stock over arm, pair by pair, in order.
        speculation: interval of own serial over arm; ``None`` without a serial arm.
        tokens_per_step: emitted per forward after the prompt, ``None`` if unknown.
        first_seen: stock over arm where both saw the prompt first; ``repeats`` the others.
        stock_seconds: stock's legs beside the arm, in order; ``solo_seconds`` those before it was loaded.
    """

    label: str
    num_expected: int
    num_emitted: tuple[int, ...]
    num_mismatched: int = 0
    first_difference: int | None = None
    speedups: tuple[float, ...] = ()
    noise: float | None = None
    speculation: tuple[float, float] | None = None
    tokens_per_step: float | None = None
    first_seen: float | None = None
    repeats: tuple[float, ...] = ()
    stock_seconds: tuple[float, ...] = ()
    solo_seconds: tuple[float, ...] = ()
    legs: tuple[LegCase, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A whole comparison.

    ``speedup`` is the geometric mean ``over`` inputs, or over the pairs of the one input that counts;
    ``interval`` its 99 % interval, ``None`` where there are too few. ``needs_all``: a part of the inputs
    shows nothing (an evaluation; a bench that was cut short shows what it measured).
    """

    inputs: tuple[InputCase, ...]
    num_expected_inputs: int
    is_exact_mode: bool = True
    status: str = "complete"
    needs_all: bool = False
    speedup: float | None = None
    over: str = "inputs"
    interval: tuple[float, float] | None = None
    floor_seconds: float | None = None
    rounds_drafted: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    unmet_gates: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome, why, and what a reader should know besides."""

    outcome: Outcome
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    is_speed_shown: bool = True
    is_counted: bool = True


def judge(case: Case) -> Verdict:
    """Faults of the candidate first, then faults of the evidence, then the speed itself."""
    faults = [
        *_missing(case),
        *_differences(case),
        *case.unmet_gates,
        *_lies(case),
        *_warm_store(case, is_noise_known=True),
    ]
    doubts = [] if faults else _doubts(case)
    notes, is_counted = _counting_notes(case)
    notes = (*case.notes, *notes)
    if faults or doubts:
        return Verdict(
            outcome="fail" if faults else "void", reasons=tuple(faults or doubts), notes=notes,
            is_speed_shown=False, is_counted=is_counted,
        )  # fmt: skip
    outcome, reason = _speed(case)
    return Verdict(outcome=outcome, reasons=(reason,), notes=notes, is_counted=is_counted)


def _missing(case: Case) -> list[str]:
    """An arm that died, unless it was the control."""
    is_candidates = case.status.startswith("failed") and not case.status.startswith(_STOCK_FAILED)
    return [case.status] if is_candidates else []


def _doubts(case: Case) -> list[str]:
    if case.status.startswith(_STOCK_FAILED):
        return [case.status]
    if not case.inputs or not any(item.speedups for item in case.inputs):
        return ["nothing was measured"]
    found = [*_too_fast(case), *_too_lucky(case), *_under_floor(case), *_drift(case), *_noise(case)]
    if (case.status == "complete" or case.needs_all) and len(case.inputs) < case.num_expected_inputs:
        found.append(f"only {len(case.inputs)} of {case.num_expected_inputs} inputs were measured")
    elif case.status != "complete" and case.needs_all:
        found.append(f"the evaluation did not end: {case.status}")
    return [*found, *_warm_store(case, is_noise_known=False)]


def _differences(case: Case) -> list[str]:
    """Token counts always; tokens in exact mode."""
    found = []
    for item in case.inputs:
        wrong = sorted({n for n in item.num_emitted if n != item.num_expected})
        if wrong:
            found.append(f"{item.label}: {wrong[0]} tokens where stock emits {item.num_expected}")
        elif case.is_exact_mode and item.first_difference is not None:
            found.append(
                f"{item.label}: token {item.first_difference} is not stock's"
                f" ({item.num_mismatched} of its compared tokens differ)"
            )
    return found


def _lies(case: Case) -> list[str]:
    """Counters that contradict themselves, the output, or the harness's own count."""
    for item in case.inputs:
        for leg in item.legs:
            why = contradiction(leg)
            if why is not None:
                return [f"{item.label}: {why}"]
    return []


def contradiction(leg: LegCase) -> str | None:
    """What a leg's reported counters contradict; ``None`` when they agree or nothing was reported."""
    told = leg.counters
    if told is None:
        return None
    checks = (
        (
            bool(leg.num_forwards) and abs(told.steps - (leg.num_forwards or 0)) > COUNT_SLACK,
            f"reported {told.steps} steps, the harness counted {leg.num_forwards} forwards",
        ),
        (told.accepted > told.drafted, f"reported {told.accepted} accepted of {told.drafted} drafted tokens"),
        (told.verifies > told.steps, f"reported {told.verifies} verifications in {told.steps} steps"),
        (
            abs(told.tokens - leg.num_tokens) > COUNT_SLACK,
            f"reported {told.tokens} tokens, emitted {leg.num_tokens}",
        ),
        (
            told.tokens > told.accepted + told.steps + COUNT_SLACK,
            f"reported {told.tokens} tokens from {told.steps} steps and {told.accepted} accepted",
        ),
    )
    return next((why for is_wrong, why in checks if is_wrong), None)


def _counting_notes(case: Case) -> tuple[tuple[str, ...], bool]:
    """What could not be reconciled, and whether everything was."""
    legs = [leg for item in case.inputs for leg in item.legs]
    if not legs:
        return (), True
    if not any(leg.counters for leg in legs):
        known = any(leg.num_forwards for leg in legs)
        source = "steps are the forwards the harness counted" if known else "steps are unknown"
        return (f"no counters were reported (report_stats); {source}",), known
    if not all(leg.num_forwards for leg in legs if leg.counters):
        return ("the reported counters could not be checked: no forward of the model was seen",), False
    return (), True


def _warm_store(case: Case, *, is_noise_known: bool) -> list[str]:
    """A prompt's repeats faster than its first decode, beyond what stock's own repeats gain.

    A fault where the noise is known; where pairs are too few to know it, only a doubt.
    """
    rows = [(i, median(i.repeats) / i.first_seen) for i in case.inputs if i.first_seen and i.repeats]
    noises = [i.noise for i, _ in rows if i.noise is not None]
    if not rows or bool(noises) != is_noise_known:
        return []
    limit = 1 + max(WARM_LIMIT, 3 * (median(noises) if noises else 0.0))
    gain = median([g for _, g in rows])
    if gain <= limit:
        return []
    worst, most = max(rows, key=lambda row: row[1])
    return [
        f"repeats of a prompt are {gain:.2f}x faster than its first decode (limit {limit:.2f}x;"
        f" {worst.label} {most:.2f}x): something kept from the first decode is used again"
    ]


def _too_fast(case: Case) -> list[str]:
    return [
        f"{item.label}: speculation gained {item.speculation[0]:.2f}x or more, but emitted only"
        f" {item.tokens_per_step:.2f} tokens a forward"
        for item in case.inputs
        if item.speculation and item.tokens_per_step and item.speculation[0] > item.tokens_per_step * 1.02
    ]


def _too_lucky(case: Case) -> list[str]:
    if case.rounds_drafted >= MANY_ROUNDS and case.tokens_accepted == case.tokens_drafted > 0:
        return [
            f"all {case.tokens_drafted} draft tokens of {case.rounds_drafted} rounds were accepted:"
            " the drafts were known beforehand"
        ]
    return []


def _under_floor(case: Case) -> list[str]:
    """Forwards cannot be faster than one read of the weights each."""
    if case.floor_seconds is None or not case.is_exact_mode:
        return []
    for item in case.inputs:
        for leg in item.legs:
            least = FLOOR_SHARE * case.floor_seconds * (leg.num_forwards or 0)
            if leg.seconds < least:
                return [
                    f"{item.label}: {leg.num_forwards} forwards in {leg.seconds:.3f} s, but reading the"
                    f" weights as often takes {least:.3f} s here"
                ]
    return []


def _drift(case: Case) -> list[str]:
    """Stock against itself: alone and beside the candidate, early and late."""
    found = []
    solo = [median(i.stock_seconds) / median(i.solo_seconds)
            for i in case.inputs if i.solo_seconds and i.stock_seconds]  # fmt: skip
    limit = 1 + max(DRIFT_LIMIT, _spread(case))
    if solo and median(solo) > limit:
        found.append(
            f"stock ran {median(solo):.2f}x slower beside the candidate than alone (limit {limit:.2f}x):"
            " the control was held up"
        )
    halves = [_half_ratio(i.stock_seconds) for i in case.inputs if len(i.stock_seconds) >= _FEW]
    if halves and not 1 / limit <= median(halves) <= limit:
        found.append(
            f"stock drifted: the later half of its legs took {median(halves):.2f}x the time of the earlier"
            f" half (limit {limit:.2f}x)"
        )
    return found


def _spread(case: Case) -> float:
    """Relative spread of stock's own legs on one input: the median over inputs of (q75 - q25) / median."""
    rows = [i.stock_seconds for i in case.inputs if len(i.stock_seconds) >= _FEW]
    spreads = [_iqr(seconds) / median(seconds) for seconds in rows]
    return median(spreads) if spreads else 0.0


def _iqr(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[(3 * (len(ordered) - 1)) // 4] - ordered[(len(ordered) - 1) // 4]


def _half_ratio(seconds: Sequence[float]) -> float:
    half = len(seconds) // 2
    return median(seconds[-half:]) / median(seconds[:half])  # the leg in the middle belongs to neither


def _noise(case: Case) -> list[str]:
    noises = [item.noise for item in case.inputs if item.noise is not None]
    if not noises or median(noises) <= NOISE_LIMIT:
        return []
    return [
        f"the machine was too noisy: the pair ratios of one input spread by {median(noises):.0%}"
        f" (limit {NOISE_LIMIT:.0%})"
    ]


def _speed(case: Case) -> tuple[Outcome, str]:
    """Faster, slower, or neither, by the interval; by the noise where there is none."""
    middle = case.speedup or 1.0
    noises = [item.noise for item in case.inputs if item.noise is not None]
    about = median(noises) if noises else 0.1
    low, high = case.interval or (middle / (1 + about), middle * (1 + about))
    kind = "99 %" if case.interval else "give or take the noise"
    figure = f"{middle:.2f}x (geometric mean over {case.over}, {kind} {low:.2f}-{high:.2f})"
    if low > 1:
        return "pass", f"faster than stock: {figure}"
    if high < 1:
        return "fail", f"slower than stock: {figure}"
    return "tie", f"not shown to differ from stock's speed: {figure}"
