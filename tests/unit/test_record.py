"""Records check themselves, cannot be changed, and the cost curve interpolates as documented."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from draftproof.errors import EvidenceError
from draftproof.record import (
    EMPTY_DRAFT,
    CostCurve,
    Counters,
    Decision,
    Draft,
    Leg,
    Machine,
    MemoryFloor,
    OpEvidence,
    Plan,
    Round,
    Trace,
)

ROUND = Round(
    index=0, position=3, source="lookup", num_offered=4, num_drafted=3, num_accepted=2, emitted=(5, 6, 7)
)
OP = OpEvidence(op="qkv", shape=(8, 4), form="plain", max_rows=4, is_exact=True, num_checked=9)
PLAN = Plan(claim="bitwise", dtype="float32", fingerprint="f", ops=(OP, replace(OP, op="out")), max_rows=4)
LEG = Leg(
    label="a", arm="stock", pair=0, order=0, start_ns=1, duration_ns=2, num_tokens=3, tokens_sha256="0",
    peak_bytes=4,
)  # fmt: skip
MACHINE = Machine(
    cpu="c", isa="i", num_threads=2, device="cpu", os="o", python="3", torch="2", transformers="5"
)
# Cost grows by 1 a row up to 3 rows, then by 2; at context 100 everything is twice as dear.
CURVE = CostCurve(rows=(1, 3, 5), contexts=(10, 100), seconds=((1.0, 3.0, 7.0), (2.0, 6.0, 14.0)))
RECORDS = [
    Draft(ids=(1,), source="s"),
    Decision(depth=1, reason="r"),
    ROUND,
    Trace(num_prompt=3, prefill_ns=1, rounds=(ROUND,)),
    OP,
    PLAN,
    CURVE,
    MACHINE,
    LEG,
    Counters(steps=1),
    MemoryFloor(num_bytes=10, bytes_per_second=4.0),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_frozen_slotted_and_named_only(record: Any) -> None:
    for field in fields(record):
        with pytest.raises(FrozenInstanceError):
            setattr(record, field.name, None)
    assert not hasattr(record, "__dict__")
    with pytest.raises(TypeError, match="positional"):
        type(record)(*[getattr(record, field.name) for field in fields(record)])


def test_equal_fields_make_equal_records() -> None:
    assert Draft(ids=(1, 2), source="s") == Draft(ids=(1, 2), source="s", match_length=None)
    assert Draft(ids=(1, 2), source="s") != Draft(ids=(1, 2), source="s", match_length=0)


def test_the_empty_draft_is_empty() -> None:
    assert EMPTY_DRAFT.ids == ()
    assert EMPTY_DRAFT.source == "none"
    assert EMPTY_DRAFT.match_length is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_offered": 2}, "drafted more than it was offered"),
        ({"num_accepted": 4, "emitted": (5, 6, 7, 8)}, "accepted more than it drafted"),
        ({"num_accepted": 0, "emitted": ()}, "emitted nothing"),
        ({"emitted": (5,)}, "at most one more"),
        ({"emitted": (5, 6, 7, 8)}, "at most one more"),
    ],
)
def test_a_round_that_cannot_be_true_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        replace(ROUND, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"num_offered": 3},
        {"emitted": (5, 6)},  # cut where the output ended: no bonus
        {"num_accepted": 3, "emitted": (5, 6, 7, 8)},
        {"num_offered": 0, "num_drafted": 0, "num_accepted": 0, "emitted": (5,)},
    ],
)
def test_rounds_at_the_limits_are_accepted(change: dict[str, Any]) -> None:
    assert all(getattr(replace(ROUND, **change), name) == value for name, value in change.items())


@pytest.mark.parametrize("offered", [(5,), (5, 6, 8), (5, 6, 8, 9, 9)])
def test_a_round_lists_all_it_was_offered_or_nothing(offered: tuple[int, ...]) -> None:
    with pytest.raises(EvidenceError, match="lists all it was offered"):
        replace(ROUND, offered=offered)


def test_a_round_may_list_what_it_was_offered() -> None:
    assert ROUND.offered == ()
    assert replace(ROUND, offered=(5, 6, 8, 9)).offered == (5, 6, 8, 9)


def test_a_trace_joins_what_its_rounds_emitted() -> None:
    second = replace(ROUND, index=1, position=6, num_accepted=0, emitted=(9,))
    third = replace(ROUND, index=2, position=7)
    trace = Trace(num_prompt=3, prefill_ns=0, rounds=(ROUND, second, third))
    assert trace.token_ids == (5, 6, 7, 9, 5, 6, 7)
    assert Trace(num_prompt=3, prefill_ns=0, rounds=()).token_ids == ()


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ((replace(ROUND, index=1),), "out of order"),
        ((ROUND, replace(ROUND, index=0, position=6)), "out of order"),
        ((ROUND, replace(ROUND, index=2, position=6)), "out of order"),
        ((replace(ROUND, position=2),), "overlap or leave a gap"),
        ((ROUND, replace(ROUND, index=1, position=5)), "overlap or leave a gap"),
        ((ROUND, replace(ROUND, index=1, position=7)), "overlap or leave a gap"),
    ],
)
def test_a_trace_whose_rounds_do_not_follow_is_refused(rounds: tuple[Round, ...], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        Trace(num_prompt=3, prefill_ns=0, rounds=rounds)


def test_a_plan_finds_its_evidence_by_name() -> None:
    assert PLAN.form("qkv") is PLAN.ops[0]
    assert PLAN.form("out") is PLAN.ops[1]
    with pytest.raises(EvidenceError, match="no entry for 'head'"):
        PLAN.form("head")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_rows": 0}, "at least one row"),
        ({"claim": "fixed"}, "fixed_rows goes with fixed"),
        ({"fixed_rows": 8}, "fixed_rows goes with fixed"),
        ({"claim": "guarded", "fixed_rows": 8}, "fixed_rows goes with fixed"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        replace(PLAN, **change)


def test_a_fixed_plan_of_one_row_is_a_plan() -> None:
    plan = replace(PLAN, claim="fixed", fixed_rows=8, max_rows=1)
    assert (plan.fixed_rows, plan.max_rows) == (8, 1)


@pytest.mark.parametrize("change", [{"duration_ns": 0}, {"duration_ns": -1}, {"num_tokens": 0}])
def test_a_leg_without_time_or_tokens_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EvidenceError, match="a leg"):
        replace(LEG, **change)


def test_a_leg_says_only_what_was_measured() -> None:
    """What an arm, a system or a single machine cannot tell is absent."""
    assert (LEG.peak_cuda_bytes, LEG.num_forwards, LEG.counters) == (None, None, None)
    assert (LEG.is_first_seen, LEG.host) == (False, "")
    told = {"peak_cuda_bytes": 5, "num_forwards": 2, "counters": Counters(steps=2), "host": "a:1"}
    full = replace(LEG, **told)
    assert {name: getattr(full, name) for name in told} == told


@pytest.mark.parametrize("name", ["steps", "verifies", "drafted", "accepted", "tokens"])
def test_a_counter_is_never_negative(name: str) -> None:
    assert getattr(Counters(), name) == 0
    assert getattr(Counters(**{name: 3}), name) == 3
    with pytest.raises(EvidenceError, match="never negative"):
        Counters(**{name: -1})


def test_counters_may_lie() -> None:
    """They are a claim: more accepted than drafted is for the judge to find, not for the record."""
    assert Counters(accepted=9, drafted=1).accepted == 9


def test_the_memory_floor_in_seconds() -> None:
    assert MemoryFloor(num_bytes=10, bytes_per_second=4.0).seconds == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": (), "seconds": ()}, "one line of seconds a context"),
        ({"contexts": (10,)}, "one line of seconds a context"),
        ({"contexts": (10, 100, 200)}, "one line of seconds a context"),
        ({"seconds": ((1.0, 3.0, 7.0), (2.0, 6.0))}, "one figure a row count"),
        ({"rows": (1, 3)}, "one figure a row count"),
        ({"rows": (2, 3, 5)}, "starts at one row"),
        ({"rows": (1, 5, 3)}, "row counts ascend"),
        ({"rows": (1, 3, 3)}, "row counts ascend"),
        ({"contexts": (100, 10)}, "contexts ascend"),
        ({"contexts": (10, 10)}, "contexts ascend"),
        ({"seconds": ((1.0, 3.0, 7.0), (2.0, 6.0, 0.0))}, "costs are positive"),
        ({"seconds": ((1.0, -3.0, 7.0), (2.0, 6.0, 14.0))}, "costs are positive"),
        ({"seconds": ((float("nan"), 3.0, 7.0), (2.0, 6.0, 14.0))}, "costs are positive"),
    ],
)
def test_a_curve_that_cannot_be_true_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        replace(CURVE, **change)


@pytest.mark.parametrize(
    ("num_rows", "context", "seconds"),
    [
        (1, 10, 1.0), (3, 10, 3.0), (5, 10, 7.0), (1, 100, 2.0), (3, 100, 6.0), (5, 100, 14.0),
        (2, 10, 2.0), (4, 10, 5.0),  # between two row counts
        (3, 55, 4.5), (4, 55, 7.5),  # half-way between the contexts, and on both axes
        (1, 0, 1.0), (4, 5, 5.0),  # held below the first context
        (1, 190, 3.0), (4, 190, 15.0),  # the last segment goes on: three times the first
        (7, 10, 11.0), (7, 100, 22.0),  # and so it does on the row axis
    ],
)  # fmt: skip
def test_a_curve_is_linear_between_its_points(num_rows: int, context: int, seconds: float) -> None:
    # Half-way between binary fractions everything here is exact.
    assert CURVE.at(num_rows, context) == seconds


def test_the_right_segment_of_several_contexts_is_taken() -> None:
    curve = CostCurve(rows=(1,), contexts=(0, 10, 20), seconds=((1.0,), (2.0,), (10.0,)))
    assert [curve.at(1, context) for context in (0, 5, 10, 15, 20, 25)] == [1.0, 1.5, 2.0, 6.0, 10.0, 14.0]


def test_a_single_point_holds_everywhere() -> None:
    curve = CostCurve(rows=(1,), contexts=(64,), seconds=((0.25,),))
    assert {curve.at(n, context) for n in (1, 2, 17) for context in (0, 64, 9999)} == {0.25}


def test_an_extended_curve_stays_positive() -> None:
    """A falling last segment would reach zero and below; a rate divides by it."""
    curve = CostCurve(rows=(1, 2), contexts=(0, 10), seconds=((2.0, 1.0), (1.0, 0.5)))
    assert curve.at(17, 0) == 1e-9
    assert curve.at(1, 1000) == 1e-9


@pytest.mark.parametrize(
    ("seconds", "is_steady"),
    [
        (((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), True), (((1.5, 1.0), (1.0, 1.0), (2.0, 9.0)), True),
        (((1.51, 1.0), (1.0, 1.0), (2.0, 9.0)), False), (((1.0, 3.1), (1.0, 3.0), (1.0, 2.0)), False),
    ],
)  # fmt: skip
def test_a_curve_is_steady_unless_more_positions_are_much_cheaper(
    seconds: tuple[tuple[float, float], ...], is_steady: bool
) -> None:
    assert CostCurve(rows=(1, 2), contexts=(64, 512, 1024), seconds=seconds).is_steady == is_steady
