"""Counters, ratios and intervals against figures worked out by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.errors import EvidenceError
from draftproof.record import Counters, Leg, Round, Trace
from draftproof.stats import (
    DecodeStats,
    GeometricMean,
    RatioStats,
    bootstrap_median,
    count_mismatches,
    counter_stats,
    decode_stats,
    first_difference,
    geometric_mean,
    mean_ratio,
    median_stats,
    pair_noise,
    paired_ratios,
    summarise,
)


def _round(index: int, position: int, num_drafted: int, num_accepted: int, num_emitted: int,
           num_redecided: int = 0) -> Round:  # fmt: skip
    return Round(
        index=index, position=position, source="s", num_offered=num_drafted + 2, num_drafted=num_drafted,
        num_accepted=num_accepted, emitted=tuple(range(num_emitted)), num_redecided=num_redecided,
        num_forwards=1 + num_redecided, draft_ns=10 * index, verify_ns=100 * index, commit_ns=1000 * index,
    )  # fmt: skip


# The prompt's round would spoil every counter if it were counted.
PROMPT = Round(
    index=0, position=5, source="prompt", num_offered=0, num_drafted=0, num_accepted=0, emitted=(1,),
    num_forwards=0, draft_ns=7, verify_ns=7, commit_ns=7,
)  # fmt: skip


def test_a_decode_counted_by_hand() -> None:
    """Four rounds after the prompt: all right, none right, no draft, cut at the end and redecided twice."""
    rounds = (
        PROMPT,
        _round(1, 6, num_drafted=3, num_accepted=3, num_emitted=4),
        _round(2, 10, num_drafted=4, num_accepted=0, num_emitted=1),
        _round(3, 11, num_drafted=0, num_accepted=0, num_emitted=1),
        _round(4, 12, num_drafted=3, num_accepted=2, num_emitted=2, num_redecided=2),
    )
    assert decode_stats(Trace(num_prompt=5, prefill_ns=99, rounds=rounds)) == DecodeStats(
        steps=6, verifies=3, drafted=10, accepted=5, tokens=9, redecided=2, acceptance_rate=0.5,
        tokens_per_verify=7 / 3, tokens_per_step=8 / 6, draft_ns=100, verify_ns=1000, commit_ns=10000,
    )  # fmt: skip


def test_a_serial_decode_verifies_nothing() -> None:
    rounds = (PROMPT, _round(1, 6, 0, 0, 1), _round(2, 7, 0, 0, 1))
    got = decode_stats(Trace(num_prompt=5, prefill_ns=0, rounds=rounds))
    assert (got.steps, got.verifies, got.drafted, got.accepted, got.tokens) == (2, 0, 0, 0, 3)
    assert (got.acceptance_rate, got.tokens_per_verify, got.tokens_per_step) == (None, None, 1.0)


@pytest.mark.parametrize(("rounds", "num_tokens"), [((), 0), ((PROMPT,), 1)])
def test_a_decode_without_steps_has_no_rates(rounds: tuple[Round, ...], num_tokens: int) -> None:
    assert decode_stats(Trace(num_prompt=5, prefill_ns=0, rounds=rounds)) == DecodeStats(
        steps=0, verifies=0, drafted=0, accepted=0, tokens=num_tokens, redecided=0, acceptance_rate=None,
        tokens_per_verify=None, tokens_per_step=None, draft_ns=0, verify_ns=0, commit_ns=0,
    )  # fmt: skip


COUNTED = Counters(steps=6, verifies=3, drafted=10, accepted=5, tokens=8)


def test_medians_of_counters_and_rates_derived_from_them() -> None:
    runs = [
        counter_stats(COUNTED),
        counter_stats(Counters(steps=2, verifies=2, drafted=4, accepted=4, tokens=6)),
        counter_stats(Counters(steps=10, verifies=1, drafted=2, accepted=0, tokens=10)),
    ]
    assert median_stats(runs) == {
        "steps": 6, "verifies": 2, "drafted": 4, "accepted": 4, "tokens": 8, "acceptance_rate": 1.0,
        "tokens_per_verify": 3.0, "tokens_per_step": 8 / 6,
    }  # fmt: skip
    halves = median_stats(runs[:2])
    assert halves is not None
    assert (halves["steps"], halves["verifies"], halves["accepted"]) == (4, 2.5, 4.5)
    assert (halves["tokens_per_verify"], halves["acceptance_rate"]) == (7 / 2.5, 4.5 / 7)
    assert isinstance(halves["steps"], int)


def test_a_trace_and_the_same_run_reported_publish_the_same() -> None:
    """The prompt's own token is in a trace and not in what a loop reports."""
    rounds = (PROMPT, _round(1, 6, 3, 3, 4), _round(2, 10, 4, 0, 1), _round(3, 11, 0, 0, 1))
    traced = decode_stats(Trace(num_prompt=5, prefill_ns=0, rounds=rounds))
    reported = Counters(steps=3, verifies=2, drafted=7, accepted=3, tokens=6)
    assert replace(traced, draft_ns=0, verify_ns=0, commit_ns=0) == counter_stats(reported)
    assert median_stats([traced]) == median_stats([counter_stats(reported)])


def test_serial_counters_have_one_token_a_step_and_no_rates_of_drafts() -> None:
    assert median_stats([counter_stats(Counters(steps=63, tokens=63))]) == {
        "steps": 63, "verifies": 0, "drafted": 0, "accepted": 0, "tokens": 63, "acceptance_rate": None,
        "tokens_per_verify": None, "tokens_per_step": 1.0,
    }  # fmt: skip


def test_nothing_counted_has_no_rates_and_no_run_no_stats() -> None:
    assert median_stats([]) is None
    empty = decode_stats(Trace(num_prompt=5, prefill_ns=0, rounds=()))
    for run in (empty, counter_stats(Counters())):
        assert median_stats([run]) == {
            **dict.fromkeys(("steps", "verifies", "drafted", "accepted", "tokens"), 0),
            **dict.fromkeys(("acceptance_rate", "tokens_per_verify", "tokens_per_step")),
        }


def _leg(label: str, arm: str, pair: int, duration_ns: int) -> Leg:
    return Leg(
        label=label, arm=arm, pair=pair, order=0, start_ns=0, duration_ns=duration_ns, num_tokens=1,
        tokens_sha256="", peak_bytes=0,
    )  # fmt: skip


LEGS = [
    _leg("a", "ours", 2, 300),
    _leg("a", "stock", 2, 150),
    _leg("a", "stock", 0, 300),
    _leg("a", "ours", 0, 100),
    _leg("a", "serial", 0, 200),
    _leg("b", "ours", 1, 1),  # another prompt: no partner in a
    _leg("a", "stock", 1, 700),
    _leg("a", "ours", 3, 5),
    _leg("b", "stock", 1, 10),
]


def test_ratios_pair_by_label_and_pair_in_order() -> None:
    assert paired_ratios(LEGS, "a", "ours") == [3.0, 0.5]
    assert paired_ratios(iter(LEGS), "b", "ours") == [10.0]
    assert paired_ratios(LEGS, "a", "ours", base="serial") == [2.0]
    assert paired_ratios(LEGS, "a", "serial", base="ours") == [0.5]
    assert paired_ratios(LEGS, "c", "ours") == []
    assert paired_ratios(LEGS, "a", "missing") == []


@pytest.mark.parametrize(("values", "median"), [([2.0], 2.0), ([4.0, 1.0], 2.5)])
def test_few_values_have_a_median_and_no_interval(values: list[float], median: float) -> None:
    assert bootstrap_median(values) is None
    assert summarise(values) == RatioStats(
        median=median, low=min(values), high=max(values), interval=None, num_pairs=len(values)
    )


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        # The median of 5 draws is the least of 5 values with probability 5.8 %, more than 2.5 %.
        ([3.0, 1.0, 5.0, 2.0, 4.0], (1.0, 5.0)),
        # Of 7: 1.0 % for the least, 10.8 % for the two least. A 99 % interval would be (1, 7).
        ([7.0, 1.0, 2.0, 6.0, 5.0, 3.0, 4.0], (2.0, 6.0)),
        # Of 9: 3.0 % for the two least. A 90 % interval would be (3, 7).
        ([9.0, 1.0, 2.0, 6.0, 5.0, 3.0, 4.0, 8.0, 7.0], (2.0, 8.0)),
        ([1.5, 1.5, 1.5, 1.5, 1.5], (1.5, 1.5)),
        ([3.0, 1.0, 2.0], None),
        ([1.5] * 4, None),
    ],
)
def test_intervals_of_the_median_worked_out(
    values: list[float], interval: tuple[float, float] | None
) -> None:
    assert bootstrap_median(values) == interval
    assert summarise(values) == RatioStats(
        median=statistics.median(values), low=min(values), high=max(values), interval=interval,
        num_pairs=len(values),
    )  # fmt: skip


def test_intervals_depend_on_the_values_and_the_seed_alone() -> None:
    values = [1.1**i for i in range(40)]
    found = [bootstrap_median(values, seed) for seed in range(12)]
    assert found == [bootstrap_median(values, seed) for seed in range(12)]
    assert len(set(found)) > 1
    assert summarise(values, seed=3).interval == found[3]


@pytest.mark.parametrize(
    ("values", "value", "interval"),
    [
        ([3.0], 3.0, None),
        ([1.0, 4.0], 2.0, None),
        ([4.0, 1.0, 2.0], 2.0, None),
        ([0.5, 0.5, 0.5, 0.5], 0.5, None),
        # None of five draws the 4: 33 %. Three or more: 5.8 %; four or more: 0.7 %, less than 2.5 %.
        ([1.0, 4.0, 1.0, 1.0, 1.0], 4.0**0.2, (1.0, 4.0**0.6)),
        ([1.1] * 5, 1.1, (1.1, 1.1)),
    ],
)
def test_geometric_means_worked_out(
    values: list[float], value: float, interval: tuple[float, float] | None
) -> None:
    got = geometric_mean(values)
    assert got.value == pytest.approx(value, rel=1e-15)
    assert got.interval == (None if interval is None else pytest.approx(interval, rel=1e-15))


def test_identical_values_leave_no_trace_of_rounding() -> None:
    assert geometric_mean([1.1] * 7) == GeometricMean(value=1.1, interval=(1.1, 1.1))


def test_an_interval_of_the_geometric_mean_covers_and_narrows() -> None:
    """Checked against the normal interval of the mean of the logarithms."""
    logs = np.random.default_rng(1).normal(0.5, 0.2, 400)
    got = geometric_mean([math.exp(log) for log in logs], seed=5)
    assert got.interval is not None
    half = 1.96 * logs.std() / 20
    assert np.log(got.interval) == pytest.approx([logs.mean() - half, logs.mean() + half], abs=half / 10)
    assert got == geometric_mean([math.exp(log) for log in logs], seed=5)
    assert got.interval != geometric_mean([math.exp(log) for log in logs], seed=6).interval


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=2))
def test_a_ratio_and_its_inverse_weigh_alike(values: list[float]) -> None:
    inverse = geometric_mean([1 / value for value in values]).value
    assert geometric_mean(values).value == pytest.approx(1 / inverse)


def test_noise_of_a_pair_worked_out() -> None:
    """Differences of the logarithms 0.1, 0.2 and 0.3: their mean is 0.2."""
    ratios = [2.0, 2 * math.exp(0.1), 2 * math.exp(0.3)]
    assert pair_noise(ratios) == pytest.approx(0.2 * math.sqrt(math.pi) / 2)
    assert pair_noise(ratios[:2]) is None
    assert pair_noise([]) is None
    assert pair_noise([1.1, 1.1, 1.1]) == 0.0


def test_noise_of_a_pair_estimates_the_deviation_of_normal_noise() -> None:
    draws = np.random.default_rng(2).lognormal(0.7, 0.05, (4000, 5))
    found = [pair_noise(row) for row in draws.tolist()]
    assert np.mean([noise for noise in found if noise is not None]) == pytest.approx(0.05, rel=0.02)
    assert np.median([noise for noise in found if noise is not None]) == pytest.approx(0.05, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=8), st.floats(0.01, 100))
def test_noise_is_relative(ratios: list[float], factor: float) -> None:
    want = pytest.approx(pair_noise(ratios), abs=1e-9)
    assert pair_noise([factor * ratio for ratio in ratios]) == want
    assert pair_noise([1 / ratio for ratio in ratios]) == want
    assert pair_noise(ratios[::-1]) == want


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_ratio_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(EvidenceError, match="positive and finite"):
        pair_noise([1.0, wrong, 2.0])
    with pytest.raises(EvidenceError, match="positive and finite"):
        geometric_mean([1.0, wrong])


@pytest.mark.parametrize(
    ("want", "got", "first", "count"),
    [
        ([], [], None, 0),
        ([1, 2, 3], [1, 2, 3], None, 0),
        ([1, 2, 3], [9, 2, 3], 0, 1),
        ([1, 2, 3], [1, 2, 9], 2, 1),
        ([1, 2, 3], [9, 2, 9], 0, 2),
        ([1, 2, 3], [1, 2], 2, 1),
        ([1, 2], [1, 2, 3, 4], 2, 2),
        ([1, 2, 3], [1, 9], 1, 2),
        ([], [5, 5], 0, 2),
        ([5], [], 0, 1),
        ([1, 2, 3], [2, 3], 0, 3),  # shifted tokens are different tokens
    ],
)
def test_differences_counted_by_hand(
    want: Sequence[int], got: Sequence[int], first: int | None, count: int
) -> None:
    assert first_difference(want, got) == first
    assert first_difference(tuple(got), tuple(want)) == first
    assert count_mismatches(want, got) == count_mismatches(got, want) == count


def test_students_interval_worked_out() -> None:
    """t(0.995, 2) = 9.9248 times the deviation of the logs over the root of three."""
    got = mean_ratio([1.0, 2.0, 4.0])
    assert (got.value, got.num_values) == (pytest.approx(2.0), 3)
    reach = 9.924843 * math.log(2) / math.sqrt(3)
    assert got.interval == pytest.approx((2 * math.exp(-reach), 2 * math.exp(reach)), rel=1e-6)
    assert mean_ratio([1.0, 2.0]).interval is None


@pytest.mark.parametrize("num_values", [3, 5, 12])
def test_stock_against_itself_is_rarely_called_a_difference(num_values: int) -> None:
    rng = np.random.default_rng(7)
    intervals = [
        mean_ratio(np.exp(0.05 * rng.standard_normal(num_values)).tolist()).interval for _ in range(400)
    ]
    missed = sum(not low <= 1 <= high for low, high in filter(None, intervals))
    assert missed <= 12  # 4 expected at 99 %
