"""Figures from traces and legs: decode counters, paired ratios, bootstrap intervals. No torch, no clock.

A ratio is always stock's time over an arm's time *of the same pair and prompt*. Unknown is ``None``: an
interval from a single value does not exist.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftproof.record import Leg, Trace

_FEWEST_FOR_INTERVAL = 3


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
    """95 % percentile bootstrap interval of the median; ``None`` for fewer than three values."""
    if len(values) < _FEWEST_FOR_INTERVAL:
        return None
    import numpy as np
    from scipy.stats import bootstrap

    done = bootstrap(
        (np.asarray(values),), np.median, n_resamples=5000, method="percentile",
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return (float(done.confidence_interval.low), float(done.confidence_interval.high))


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
