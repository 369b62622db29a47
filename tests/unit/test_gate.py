"""The quality gates on figures worked out by hand, and what must hold for any."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.errors import EvidenceError, OptionError
from draftproof.gate import (
    LIMITS,
    LOG_FLOOR,
    NEAR_LOSSLESS,
    RELAXED,
    GateRow,
    GateSample,
    judge,
    kl_divergence,
    thresholds,
)
from draftproof.wire import decode, encode


def sample(label: str = "code", *, kl: tuple[float, ...] = (0.01, 0.03), agreed: int = 2,
           stock: float = 0.5, own: float | None = 0.6) -> GateSample:  # fmt: skip
    flags = tuple(index < agreed for index in range(len(kl)))
    return GateSample(label=label, kl=kl, is_agreed=flags, stock_nll=stock, own_nll=own)


def met(rows: tuple[GateRow, ...]) -> dict[str, bool]:
    return {row.gate: row.is_met for row in rows}


# KL


def test_kl_of_two_tokens_and_the_rest_by_hand() -> None:
    reference = [math.log(0.5), math.log(0.25)]  # the rest has 0.25
    candidate = [math.log(0.25), math.log(0.25)]  # the rest has 0.5
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert kl_divergence(reference, candidate) == pytest.approx(expected)


def test_the_rest_counts_though_the_listed_tokens_agree() -> None:
    """Half of stock's mass is on tokens the candidate thinks impossible: it can only be in the listed one."""
    assert kl_divergence([math.log(0.5)], [math.log(1.0)]) == pytest.approx(
        0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - LOG_FLOOR)
    )


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e300, LOG_FLOOR])
def test_what_is_not_a_number_counts_as_the_floor(value: float) -> None:
    assert kl_divergence([0.0], [value]) == pytest.approx(-LOG_FLOOR)
    assert kl_divergence([value], [value]) == 0.0


@pytest.mark.parametrize(
    ("reference", "candidate", "message"),
    [
        ([], [], "0 reference and 0 candidate"),
        ([-1.0, -2.0], [-1.0], "2 reference and 1 candidate"),
        ([-1.0], [0.01], "log-probabilities of 1 tokens sum to 1.01005, over 1"),
        ([math.log(0.6), math.log(0.6)], [-1.0, -1.0], "sum to 1.2, over 1"),
        ([-1.0], [math.inf], "over 1"),
    ],
)
def test_kl_refuses_what_is_no_distribution(
    reference: list[float], candidate: list[float], message: str
) -> None:
    with pytest.raises(EvidenceError, match=message):
        kl_divergence(reference, candidate)


def distribution(size: int) -> st.SearchStrategy[list[float]]:
    """Log-probabilities of the first ``size`` of ``size + 1`` tokens."""
    weights = st.lists(st.floats(1e-9, 1.0), min_size=size + 1, max_size=size + 1)
    return weights.map(lambda w: [math.log(x / math.fsum(w)) for x in w[:-1]])


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(distribution(n), distribution(n))))
def test_kl_is_never_negative_and_zero_for_itself(pair: tuple[list[float], list[float]]) -> None:
    reference, candidate = pair
    value = kl_divergence(reference, candidate)
    assert 0.0 <= value <= -LOG_FLOOR
    assert kl_divergence(reference, reference) == 0.0


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(distribution(n), distribution(n), st.just(n))))
def test_kl_of_the_lumped_tokens_is_a_lower_bound(case: tuple[list[float], list[float], int]) -> None:
    """Fewer listed tokens, a larger rest, never a larger divergence."""
    reference, candidate, size = case
    values = [kl_divergence(reference[:n], candidate[:n]) for n in range(1, size + 1)]
    assert all(a <= b + 1e-9 for a, b in zip(values, values[1:], strict=False))


# Thresholds


def test_the_documented_limits() -> None:
    assert [getattr(NEAR_LOSSLESS, name) for name in LIMITS] == [0.05, 0.15, 0.85, 0.25]
    assert [getattr(RELAXED, name) for name in LIMITS] == [0.10, 0.30, 0.80, 0.30]
    assert LIMITS == ("max_mean_kl", "max_worst_kl", "min_top1", "max_nll_increase")
    assert thresholds("near-lossless") is not RELAXED
    assert thresholds("near-lossless") == NEAR_LOSSLESS
    assert thresholds("relaxed") == RELAXED


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_an_option(name: str) -> None:
    changed = thresholds("relaxed", **{name: 0.5})
    assert asdict(changed) == {**asdict(RELAXED), name: 0.5}


@pytest.mark.parametrize(
    ("quality", "limits", "message"),
    [
        ("exact", {}, "quality 'exact' has no gates; those with gates are near-lossless, relaxed"),
        ("relaxed", {"max_kl": 1.0}, "no such limit: max_kl; there are max_mean_kl, max_worst_kl"),
        ("relaxed", {"quality": 1.0}, "no such limit: quality"),
        ("relaxed", {"max_mean_kl": -0.1}, "max_mean_kl must be a number of 0 or more, got -0.1"),
        ("relaxed", {"max_nll_increase": math.nan}, "max_nll_increase must be a number"),
        ("relaxed", {"max_worst_kl": math.inf}, "max_worst_kl must be a number"),
        ("relaxed", {"min_top1": 1.01}, r"min_top1 is a share and at most 1, got 1\.01"),
    ],
)
def test_limits_that_mean_nothing_are_refused(quality: str, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        thresholds(quality, **limits)


# Judgement


def test_four_gates_over_two_inputs_by_hand() -> None:
    samples = (
        sample("code", kl=(0.01, 0.03), agreed=2, stock=0.5, own=0.6),
        sample("poem", kl=(0.00, 0.00, 0.12), agreed=2, stock=1.0, own=0.8),
    )
    rows = judge(samples, NEAR_LOSSLESS)
    assert [(row.label, row.gate, row.limit, row.is_met, row.quality) for row in rows] == [
        ("all", "mean_kl", 0.05, True, "near-lossless"),
        ("poem", "worst_kl", 0.15, True, "near-lossless"),
        ("all", "top1", 0.85, False, "near-lossless"),
        ("all", "nll_increase", 0.25, True, "near-lossless"),
    ]
    # Inputs count alike: (0.02 + 0.04) / 2 and (1 + 2/3) / 2, whatever their lengths.
    assert [row.value for row in rows] == pytest.approx([0.03, 0.04, 5 / 6, (0.1 - 0.2) / 2])


def test_a_figure_at_its_limit_is_met() -> None:
    limits = thresholds("relaxed", max_mean_kl=0.25, max_worst_kl=0.25, min_top1=0.5, max_nll_increase=0.25)
    rows = judge([sample(kl=(0.25, 0.25), agreed=1, stock=0.5, own=0.75)], limits)
    assert met(rows) == {"mean_kl": True, "worst_kl": True, "top1": True, "nll_increase": True}


@pytest.mark.parametrize(
    ("bad", "gate"),
    [
        (sample(kl=(0.06, 0.06)), "mean_kl"),
        (sample(agreed=1), "top1"),
        (sample(stock=0.5, own=0.76), "nll_increase"),
    ],
)
def test_each_gate_fails_alone(bad: GateSample, gate: str) -> None:
    assert [name for name, is_met in met(judge([bad], NEAR_LOSSLESS)).items() if not is_met] == [gate]


def test_one_bad_input_among_many_is_named() -> None:
    samples = [sample(str(n), kl=(0.0, 0.0)) for n in range(12)] + [sample("poem", kl=(0.1, 0.22))]
    rows = judge(samples, NEAR_LOSSLESS)
    assert met(rows) == {"mean_kl": True, "worst_kl": False, "top1": True, "nll_increase": True}
    assert next(row.label for row in rows if row.gate == "worst_kl") == "poem"


def test_a_loop_that_emits_nothing_fails() -> None:
    rows = judge([sample("a"), sample("b", own=None)], RELAXED)
    assert rows[-1] == GateRow(
        label="all", gate="nll_increase", value=None, limit=0.30, is_met=False, quality="relaxed"
    )
    assert all(row.is_met for row in rows[:-1])


@pytest.mark.parametrize("samples", [[], [sample("a"), sample("a")]])
def test_one_sample_an_input(samples: list[GateSample]) -> None:
    with pytest.raises(EvidenceError, match="a gate needs samples, one an input"):
        judge(samples, RELAXED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl": ()}, "code: 0 KL values and 2 flags"),
        ({"is_agreed": (True,)}, "code: 2 KL values and 1 flags"),
        ({"kl": (-0.01, 0.0)}, "negative or not a number"),
        ({"kl": (math.nan, 0.0)}, "negative or not a number"),
        ({"stock_nll": -0.1}, "negative or not a number"),
        ({"own_nll": math.inf}, "negative or not a number"),
    ],
)
def test_a_sample_keeps_its_invariants(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        replace(sample(), **changes)


def test_samples_and_rows_are_plain_json() -> None:
    before = sample(own=None)
    assert decode(GateSample, json.loads(json.dumps(encode(before)))) == before
    for row in judge([before], RELAXED):
        assert decode(GateRow, json.loads(json.dumps(encode(row), allow_nan=False))) == row


SAMPLES = st.lists(
    st.builds(
        lambda kl, agreed, stock, own: sample(kl=tuple(kl), agreed=agreed, stock=stock, own=own),
        st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 5),
        st.floats(0, 2), st.floats(0, 2),
    ),
    min_size=1, max_size=5,
).map(lambda made: tuple(replace(s, label=str(index)) for index, s in enumerate(made)))  # fmt: skip


@given(SAMPLES)
def test_a_candidate_that_is_stock_meets_every_gate(samples: tuple[GateSample, ...]) -> None:
    same = [
        replace(s, kl=(0.0,) * len(s.kl), is_agreed=(True,) * len(s.kl), own_nll=s.stock_nll) for s in samples
    ]
    zero = thresholds("near-lossless", max_mean_kl=0, max_worst_kl=0, min_top1=1, max_nll_increase=0)
    assert all(row.is_met for row in judge(same, zero))


@given(SAMPLES, st.floats(0, 1), st.floats(0, 1))
def test_worse_figures_never_meet_more(samples: tuple[GateSample, ...], more: float, nats: float) -> None:
    first, *others = samples
    worse = replace(
        first, kl=(first.kl[0] + more, *first.kl[1:]), is_agreed=(False, *first.is_agreed[1:]),
        own_nll=(first.own_nll or 0.0) + nats,
    )  # fmt: skip
    before, after = met(judge(samples, RELAXED)), met(judge((worse, *others), RELAXED))
    assert all(before[gate] or not after[gate] for gate in before)


@given(SAMPLES)
def test_relaxed_meets_what_near_lossless_meets(samples: tuple[GateSample, ...]) -> None:
    strict, loose = met(judge(samples, NEAR_LOSSLESS)), met(judge(samples, RELAXED))
    assert all(loose[gate] for gate, is_met in strict.items() if is_met)


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_inputs_does_not_matter(samples: tuple[GateSample, ...], random: Any) -> None:
    shuffled = random.sample(samples, len(samples))
    assert met(judge(samples, RELAXED)) == met(judge(shuffled, RELAXED))
    for one, other in zip(judge(samples, RELAXED), judge(shuffled, RELAXED), strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-12)
