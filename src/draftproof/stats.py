"""Figures from traces and legs: decode counters, paired ratios, bootstrap intervals. No torch, no clock.

A ratio is always stock's time over an arm's time *of the same pair and prompt*. Unknown is ``None``: an
interval from a single value does not exist.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from draftproof.errors import EvidenceError
from draftproof.record import Counters, Leg, Trace

_FEWEST_FOR_INTERVAL = 3
# A percentile bootstrap of three values is their range and misses the truth one time in four (26 % of 300
# simulated A/A runs at 5 % noise); of five values one time in twenty, as it says.
_FEWEST_FOR_BOOTSTRAP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """Counters of one decode. A round without a draft is a step and no verification.

    ``tokens_per_verify`` is emitted tokens of drafted rounds per drafted round, bonus included.
    ``tokens_per_step`` counts every forward after the prompt's.
    """

    steps: int
    verifies: int
    drafted: int
    accepted: int
    tokens: int
    redecided: int
    acceptance_rate: float | None
    tokens_per_verify: float | None
    tokens_per_step: float | None
    draft_ns: int
    verify_ns: int
    commit_ns: int


def decode_stats(trace: Trace) -> DecodeStats:
    """Count one trace."""
    rounds = trace.rounds[1:]
    verifies = [r for r in rounds if r.num_drafted]
    steps = sum(r.num_forwards for r in rounds)
    drafted = sum(r.num_drafted for r in verifies)
    accepted = sum(r.num_accepted for r in verifies)
    emitted = sum(len(r.emitted) for r in rounds)
    return DecodeStats(
        steps=steps, verifies=len(verifies), drafted=drafted, accepted=accepted,
        tokens=len(trace.token_ids), redecided=sum(r.num_redecided for r in rounds),
        acceptance_rate=accepted / drafted if drafted else None,
        tokens_per_verify=sum(len(r.emitted) for r in verifies) / len(verifies) if verifies else None,
        tokens_per_step=emitted / steps if steps else None,
        draft_ns=sum(r.draft_ns for r in rounds), verify_ns=sum(r.verify_ns for r in rounds),
        commit_ns=sum(r.commit_ns for r in rounds),
    )  # fmt: skip


def own_counters(trace: Trace) -> Counters:
    """What the engine's own trace says it did; ``tokens`` leaves out the prompt's own token."""
    told = decode_stats(trace)
    return Counters(
        steps=told.steps, verifies=told.verifies, drafted=told.drafted, accepted=told.accepted,
        tokens=told.tokens - 1,
    )  # fmt: skip


def counter_stats(counters: Counters) -> DecodeStats:
    """What a run reported of itself, for ``median_stats``; it reports no times, which stand at 0.

    ``tokens`` gains the prompt's own token, which ``Counters`` leave out.
    """
    steps, verifies, tokens = counters.steps, counters.verifies, counters.tokens
    return DecodeStats(
        steps=steps, verifies=verifies, drafted=counters.drafted, accepted=counters.accepted,
        tokens=tokens + 1, redecided=0,
        acceptance_rate=counters.accepted / counters.drafted if counters.drafted else None,
        tokens_per_verify=(counters.accepted + verifies) / verifies if verifies else None,
        tokens_per_step=tokens / steps if steps else None, draft_ns=0, verify_ns=0, commit_ns=0,
    )  # fmt: skip


def median_stats(runs: Sequence[DecodeStats]) -> dict[str, float | None] | None:
    """The published ``decode_stats``: medians of the counters, and three rates derived from the medians.

    ``tokens`` leaves out the prompt's own token, so that ``tokens_per_step`` is 1 for serial decoding.
    ``tokens_per_verify`` is (accepted + verifies) / verifies: a bonus token that the end of the output cut
    off is counted here and nowhere else. ``None`` when there is no run.
    """
    if not runs:
        return None
    steps = _median([run.steps for run in runs])
    verifies = _median([run.verifies for run in runs])
    drafted = _median([run.drafted for run in runs])
    accepted = _median([run.accepted for run in runs])
    tokens = _median([max(run.tokens - 1, 0) for run in runs])
    return {
        "steps": steps, "verifies": verifies, "drafted": drafted, "accepted": accepted, "tokens": tokens,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_verify": (accepted + verifies) / verifies if verifies else None,
        "tokens_per_step": tokens / steps if steps else None,
    }  # fmt: skip


def _median(counts: list[int]) -> float:
    """The median, an integer where it is one."""
    middle = statistics.median(counts)
    return int(middle) if middle == int(middle) else middle


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioStats:
    """Paired ratios of one arm on one input: their median, range, and bootstrap interval of the median."""

    median: float
    low: float
    high: float
    interval: tuple[float, float] | None
    num_pairs: int


def paired_ratios(legs: Iterable[Leg], label: str, arm: str, base: str = "stock") -> list[float]:
    """``base`` time over ``arm`` time for every pair of ``label`` that has both."""
    mine = [leg for leg in legs if leg.label == label]
    times = {(leg.pair, leg.arm): leg.duration_ns for leg in mine}
    pairs = sorted({leg.pair for leg in mine})
    return [
        times[pair, base] / times[pair, arm]
        for pair in pairs
        if (pair, base) in times and (pair, arm) in times
    ]


def summarise(values: Sequence[float], seed: int = 0) -> RatioStats:
    """Median, range and 95 % interval of the median of ``values`` (at least one)."""
    return RatioStats(
        median=statistics.median(values), low=min(values), high=max(values),
        interval=bootstrap_median(values, seed), num_pairs=len(values),
    )  # fmt: skip


def bootstrap_median(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the median; ``None`` for fewer than five values."""
    import numpy as np

    return _bootstrap(values, np.median, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMean:
    """Geometric mean of the inputs' ratios and its 95 % bootstrap interval over inputs."""

    value: float
    interval: tuple[float, float] | None


def geometric_mean(values: Sequence[float], seed: int = 0) -> GeometricMean:
    """Geometric mean of ``values`` (at least one, all positive), inputs drawn again for the interval.

    A ratio and its inverse weigh alike. ``interval`` is ``None`` for fewer than five inputs.
    """
    import numpy as np

    logs, least, most = _logs(values), min(values), max(values)

    def back(log: float) -> float:
        return min(max(math.exp(log), least), most)  # rounding never leaves the range of the values

    found = _bootstrap(logs, np.mean, seed)
    return GeometricMean(
        value=back(statistics.fmean(logs)),
        interval=None if found is None else (back(found[0]), back(found[1])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRatio:
    """Geometric mean of a few ratios and Student's 99 % interval of it, which a verdict can rest on."""

    value: float
    interval: tuple[float, float] | None
    num_values: int


def mean_ratio(values: Sequence[float], level: float = 0.99) -> MeanRatio:
    """Geometric mean of ``values`` (at least one, all positive) with Student's interval over their logs.

    Student's, as it holds for three values too, where a bootstrap does not. It treats the values as drawn
    from more of their kind, so three inputs that gain very differently show little about a fourth.
    ``interval`` is ``None`` for fewer than three values.
    """
    from scipy.stats import t

    logs = _logs(values)
    middle, count = statistics.fmean(logs), len(logs)
    interval = None
    if count >= _FEWEST_FOR_INTERVAL:
        reach = float(t.ppf((1 + level) / 2, count - 1)) * statistics.stdev(logs) / math.sqrt(count)
        interval = (math.exp(middle - reach), math.exp(middle + reach))
    return MeanRatio(value=math.exp(middle), interval=interval, num_values=count)


def _bootstrap(
    values: Sequence[float], statistic: Callable[..., Any], seed: int
) -> tuple[float, float] | None:
    if len(values) < _FEWEST_FOR_BOOTSTRAP:
        return None
    import numpy as np
    from scipy.stats import bootstrap

    done = bootstrap(
        (np.asarray(values),), statistic, n_resamples=5000, method="percentile",
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return (float(done.confidence_interval.low), float(done.confidence_interval.high))


def pair_noise(ratios: Sequence[float]) -> float | None:
    """Relative noise of one pair's ratio, from the pairs of one input; ``None`` for fewer than three.

    The mean difference between two pairs' logarithms, scaled so that it estimates the standard deviation of
    normal noise (Gini's mean difference times half the root of pi). Chosen for its small bias at five pairs:
    1.4826 times the median deviation and half the 16-84 % range both read more than a quarter too low there,
    and would call one A/A run in five data-dependent. An outlier moves it less than a standard deviation.
    """
    if len(ratios) < _FEWEST_FOR_INTERVAL:
        return None
    logs = _logs(ratios)
    return statistics.fmean(abs(a - b) for a, b in combinations(logs, 2)) * math.sqrt(math.pi) / 2


def _logs(ratios: Sequence[float]) -> list[float]:
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise EvidenceError("a ratio of two times is positive and finite")
    return [math.log(ratio) for ratio in ratios]


def first_difference(want: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length where one ends early, ``None`` if equal."""
    for index, (a, b) in enumerate(zip(want, got, strict=False)):
        if a != b:
            return index
    return None if len(want) == len(got) else min(len(want), len(got))


def count_mismatches(want: Sequence[int], got: Sequence[int]) -> int:
    """Positions that differ, missing and surplus tokens included."""
    same = sum(a == b for a, b in zip(want, got, strict=False))
    return max(len(want), len(got)) - same
