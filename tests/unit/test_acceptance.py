"""Acceptance figures against a decode counted by hand, and their relations on any decode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.acceptance import acceptance
from draftproof.record import Round, Trace
from draftproof.stats import decode_stats
from draftproof.wire import canonical


def _trace(*rounds: tuple[int, int, int], num_prompt: int = 4, source: str = "s", forwards: int = 1) -> Trace:
    """Rounds of (drafted, accepted, emitted) after the prompt's."""
    first = Round(index=0, position=num_prompt, source="prompt", num_offered=9, num_drafted=9,
                  num_accepted=9, emitted=(0,) * 9, num_forwards=0)  # fmt: skip
    out, position = [first], num_prompt + 9
    for index, (drafted, accepted, emitted) in enumerate(rounds, 1):
        out.append(Round(
            index=index, position=position, source=source if drafted else "none", num_offered=drafted,
            num_drafted=drafted, num_accepted=accepted, emitted=(0,) * emitted, num_forwards=forwards,
        ))  # fmt: skip
        position += emitted
    return Trace(num_prompt=num_prompt, prefill_ns=0, rounds=tuple(out))


# Emits 9 (prompt) + 4 + 1 + 1 + 3 + 2 tokens; the last round is cut behind its second accepted token.
HAND = _trace((3, 3, 4), (2, 0, 1), (0, 0, 1), (3, 2, 3), (4, 2, 2))
OTHER = _trace((1, 1, 2), source="t")


def test_positions_counted_by_hand() -> None:
    """The cut round of depth 4 was judged on two positions: no failure at its third."""
    got = acceptance({"a": [HAND]})
    assert got is not None
    assert got["positions"] == [
        {"position": 1, "conditional": 3 / 4, "joint": 3 / 4, "num_trials": 4, "num_rounds": 4},
        {"position": 2, "conditional": 1.0, "joint": 3 / 4, "num_trials": 3, "num_rounds": 4},
        {"position": 3, "conditional": 1 / 2, "joint": 1 / 2, "num_trials": 2, "num_rounds": 2},
    ]
    assert (got["num_rounds"], got["num_unjudged"]) == (4, 2)
    assert got["acceptance_rate"] == 7 / 12
    assert got["depths"] == {"0": 1, "2": 1, "3": 2, "4": 1}


def test_both_conventions_and_both_averages() -> None:
    got = acceptance({"a": [HAND], "b": [OTHER], "serial": [_trace((0, 0, 1))]})
    assert got is not None
    assert got["acceptance_length"] == {
        "with_bonus": {"token_weighted": 12 / 5, "per_prompt": (10 / 4 + 2) / 2},
        "without_bonus": {"token_weighted": 8 / 5, "per_prompt": (7 / 4 + 1) / 2},
    }
    assert got["by_input"]["a"] == {
        "with_bonus": 10 / 4, "without_bonus": 7 / 4, "acceptance_rate": 7 / 12, "num_rounds": 4,
        "depth_histogram": {"0": 1, "2": 1, "3": 2, "4": 1},
        "accepted_histogram": {"0": 1, "2": 2, "3": 1},
    }  # fmt: skip
    assert got["by_input"]["serial"] == {
        "with_bonus": None, "without_bonus": None, "acceptance_rate": None, "num_rounds": 0,
        "depth_histogram": {"0": 1}, "accepted_histogram": {},
    }  # fmt: skip
    assert got["sources"] == {
        "s": {"rounds": 4, "drafted": 12, "accepted": 7, "acceptance_rate": 7 / 12},
        "t": {"rounds": 1, "drafted": 1, "accepted": 1, "acceptance_rate": 1.0},
    }


def test_repeats_of_an_input_are_pooled() -> None:
    once, twice = acceptance({"a": [HAND]}), acceptance({"a": [HAND, HAND]})
    assert once is not None
    assert twice is not None
    assert twice["acceptance_length"] == once["acceptance_length"]
    assert twice["by_input"]["a"]["num_rounds"] == 8


def test_a_round_belongs_to_the_bin_of_its_first_token() -> None:
    """Offsets count from the prompt's own token: 9, 31 and 34, whatever the prompt's length."""
    for num_prompt in (1, 100):
        got = acceptance({"a": [_trace((21, 21, 22), (2, 2, 3), (1, 0, 1), num_prompt=num_prompt)]})
        assert got is not None
        assert got["offsets"] == [
            {"start": 0, "end": 32, "num_rounds": 2, "tokens_per_forward": 25 / 2},
            {"start": 32, "end": 64, "num_rounds": 1, "tokens_per_forward": 1.0},
        ]


def test_offsets_count_forwards_and_bins_without_rounds_are_left_out() -> None:
    got = acceptance({"a": [_trace((90, 90, 91), (2, 1, 2), forwards=4)]})
    assert got is not None
    assert got["offsets"] == [
        {"start": 0, "end": 32, "num_rounds": 1, "tokens_per_forward": 91 / 4},
        {"start": 96, "end": 128, "num_rounds": 1, "tokens_per_forward": 0.5},
    ]
    none = acceptance({"a": [_trace((1, 1, 2), forwards=0)]})
    assert none is not None
    assert none["offsets"][0]["tokens_per_forward"] is None


@pytest.mark.parametrize(
    "traces",
    [{}, {"a": []}, {"a": [_trace((0, 0, 1))]}, {"a": [Trace(num_prompt=1, prefill_ns=0, rounds=())]}],
)
def test_without_a_draft_there_is_no_acceptance(traces: dict[str, Sequence[Trace]]) -> None:
    assert acceptance(traces) is None


@st.composite
def _decodes(draw: st.DrawFn, depth: int | None = None, can_be_cut: bool = True) -> Trace:
    rounds = []
    for _ in range(draw(st.integers(1, 8))):
        drafted = depth or draw(st.integers(0, 5))
        accepted = draw(st.integers(0, drafted))
        rounds.append((drafted, accepted, accepted + 1))
    drafted, accepted, _ = rounds[-1]
    if can_be_cut and accepted and draw(st.booleans()):
        rounds[-1] = (drafted, accepted, accepted)
    return _trace(*rounds)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.lists(_decodes(), max_size=3)))
def test_relations_that_hold_on_any_decode(traces: dict[str, list[Trace]]) -> None:
    got = acceptance(traces)
    stats = [decode_stats(trace) for of in traces.values() for trace in of]
    verifies, accepted = sum(s.verifies for s in stats), sum(s.accepted for s in stats)
    drafted = sum(s.drafted for s in stats)
    if got is None:
        assert verifies == 0
        return
    canonical(got)
    rows = got["positions"]
    assert got["num_rounds"] == verifies == rows[0]["num_rounds"]
    assert sum(row["num_rounds"] for row in rows) + got["num_unjudged"] == drafted
    assert math.isclose(sum(row["joint"] * row["num_rounds"] for row in rows), accepted, abs_tol=1e-9)
    assert math.isclose(got["acceptance_rate"], accepted / drafted)
    for before, row in zip(rows, rows[1:], strict=False):
        assert row["num_rounds"] <= before["num_rounds"]
        if row["num_rounds"] == before["num_rounds"]:
            assert row["joint"] <= before["joint"]
    length = got["acceptance_length"]
    emitted = sum((s.tokens_per_verify or 0) * s.verifies for s in stats)
    assert math.isclose(length["with_bonus"]["token_weighted"] * verifies, emitted)
    assert math.isclose(length["without_bonus"]["token_weighted"] * verifies, accepted, abs_tol=1e-9)
    assert sum(row["num_rounds"] for row in got["by_input"].values()) == verifies
    assert sum(row["rounds"] for row in got["sources"].values()) == verifies
    num_every = sum(got["depths"].values())
    assert sum(row["num_rounds"] for row in got["offsets"]) == num_every
    assert num_every - got["depths"].get("0", 0) == verifies


@settings(deadline=None)
@given(st.lists(_decodes(depth=4, can_be_cut=False), min_size=1, max_size=3))
def test_conditionals_multiply_to_the_joint_at_one_depth(traces: list[Trace]) -> None:
    got = acceptance({"a": traces})
    assert got is not None
    product = Fraction(1)
    for row in got["positions"]:
        if row["conditional"] is None:
            assert product == 0
            break
        product *= Fraction(row["conditional"]).limit_denominator(100)
        assert product == Fraction(row["joint"]).limit_denominator(100)
    assert len(got["positions"]) == 4
