"""Prediction, residual, regret and break-even against a decode worked out by hand, and brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.costmodel import PARTS, cost_model
from draftproof.record import CostCurve, Round, Trace
from draftproof.wire import canonical

SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a drafter proposes for one round, and how much of it the policy verifies."""

    ids: tuple[int, ...]
    depth: int


def _decode(target: Sequence[int], offers: Sequence[Offer], num_prompt: int = 3) -> Trace:
    """Speculate towards ``target`` by the accept rule; offers repeat, and the end cuts the last round."""
    rounds = [Round(index=0, position=num_prompt, source="prompt", num_offered=0, num_drafted=0,
                    num_accepted=0, emitted=(target[0],), num_forwards=0)]  # fmt: skip
    done = 1
    while done < len(target):
        offer = offers[(len(rounds) - 1) % len(offers)]
        ids, accepted = offer.ids[: offer.depth], 0
        while accepted < len(ids) and target[done + accepted : done + accepted + 1] == [ids[accepted]]:
            accepted += 1
        emitted = tuple(target[done : done + accepted + 1])
        rounds.append(Round(
            index=len(rounds), position=num_prompt + done, source="s", num_offered=len(offer.ids),
            num_drafted=len(ids), num_accepted=accepted, emitted=emitted, offered=offer.ids,
        ))  # fmt: skip
        done += len(emitted)
    return Trace(num_prompt=num_prompt, prefill_ns=0, rounds=tuple(rounds))


def _timed(trace: Trace, verify: Sequence[float], redecided: int) -> Trace:
    """A tenth of a second of drafting and a twentieth of commit a round; 2 s of prefill."""
    rounds = [trace.rounds[0]]
    for round_, seconds in zip(trace.rounds[1:], verify, strict=True):
        rounds.append(replace(
            round_, draft_ns=SECOND // 10, commit_ns=SECOND // 20, verify_ns=round(seconds * SECOND),
            num_redecided=int(round_.index == redecided),
        ))  # fmt: skip
    return replace(trace, prefill_ns=2 * SECOND, rounds=tuple(rounds))


# One row costs a second, each of the next two half a second more, then a second each.
CURVE = CostCurve(rows=(1, 2, 3, 5), contexts=(10,), seconds=((1.0, 1.5, 2.0, 4.0),))
BARE = _decode(
    [1, 5, 6, 7, 9, 2, 3],
    [
        Offer(ids=(5, 6, 7, 8), depth=2),  # three would have been right
        Offer(ids=(4, 4), depth=2),
        Offer(ids=(), depth=0),
        Offer(ids=(3, 9), depth=1),  # right, and the output ends with it
    ],
)
HAND = _timed(BARE, verify=(2.2, 2.5, 1.1, 1.5), redecided=2)


def test_the_hand_made_decode_is_what_the_figures_below_assume() -> None:
    rounds = HAND.rounds[1:]
    assert [r.position for r in rounds] == [4, 7, 8, 9]
    assert [(r.num_drafted, r.num_accepted, len(r.emitted)) for r in rounds] == [
        (2, 2, 3), (2, 0, 1), (0, 0, 1), (1, 1, 1),
    ]  # fmt: skip


def test_prediction_and_residual_worked_out() -> None:
    """Six steps after 2 s of prefill, against 2 + 2 + 1 + 1.5 s of verifications after the same."""
    row = cost_model({"a": HAND}, CURVE, {"a": 0.8})["inputs"][0]
    assert row["predicted"] == pytest.approx(8 / 8.5)
    assert row["residual"] == pytest.approx(0.85 - 1)
    accounted = 8.5 + 0.4 + 0.2 + 0.5 + 0.3
    assert row["parts"] == pytest.approx({
        "drafting": -0.4 / accounted, "committing": -0.2 / accounted, "redeciding": -0.5 / accounted,
        "verifying": -0.3 / accounted, "rest": 0.85 - 8.5 / accounted,
    })  # fmt: skip
    assert (row["label"], row["measured"], tuple(row["parts"])) == ("a", 0.8, PARTS)


def test_costs_are_read_at_the_position_where_they_fall() -> None:
    """One row costs its position in seconds, two rows twice that."""
    curve = CostCurve(rows=(1, 2), contexts=(1, 101), seconds=((1.0, 2.0), (101.0, 202.0)))
    trace = _decode([1, 5, 6, 7], [Offer(ids=(5,), depth=1), Offer(ids=(), depth=0)])
    got = cost_model({"a": trace}, curve, {})
    assert got["inputs"][0]["predicted"] == pytest.approx((4 + 5 + 6) / (2 * 4 + 6))
    assert got["regret"]["policy_rate"] == pytest.approx(3 / (2 * 4 + 6))
    assert got["break_even"]["context"] == 4


def test_regret_worked_out() -> None:
    """Tokens of the first round by depth are 1, 2, 3, 4, 4; of the others always 1."""
    got = cost_model({"a": HAND}, CURVE, {})
    assert got["regret"] == got["inputs"][0]["regret"]
    assert got["regret"]["fixed"] == [
        {"depth": 0, "rate": 4 / 4}, {"depth": 1, "rate": 5 / 5.5}, {"depth": 2, "rate": 6 / 7},
        {"depth": 3, "rate": 7 / 8}, {"depth": 4, "rate": 7 / 9},
    ]  # fmt: skip
    assert got["regret"]["best_fixed"] == {"depth": 0, "rate": 1.0}
    assert got["regret"]["policy_rate"] == 6 / 6.5
    assert got["regret"]["oracle_rate"] == 6 / 5  # depth 2, then 0, 0, 0
    assert got["regret"]["regret_fixed"] == pytest.approx(1 / 13)
    assert got["regret"]["regret_oracle"] == pytest.approx(3 / 13)
    assert got["regret"]["num_rounds"] == 4


def test_a_policy_may_beat_every_fixed_depth() -> None:
    trace = _decode([1, 5, 5, 5, 9], [Offer(ids=(5, 5, 5), depth=2), Offer(ids=(4, 4, 4), depth=0)])
    regret = cost_model({"a": trace}, CURVE, {})["regret"]
    assert [row["rate"] for row in regret["fixed"]] == [2 / 2, 3 / 3, 4 / 4, 5 / 6]
    assert regret["best_fixed"] == {"depth": 0, "rate": 1.0}  # of equals the shallowest
    assert regret["policy_rate"] == regret["oracle_rate"] == 4 / 3
    assert (regret["regret_fixed"], regret["regret_oracle"]) == (1 - 4 / 3, 0.0)


def test_a_trace_without_the_offered_ids_has_no_regret_and_keeps_its_prediction() -> None:
    old = replace(HAND, rounds=tuple(replace(r, offered=()) for r in HAND.rounds))
    got = cost_model({"a": HAND, "old": old}, CURVE, {"a": 0.8, "old": 0.8})
    assert got["inputs"][0]["regret"] is not None
    assert got["inputs"][1]["regret"] is None
    assert got["regret"] is None
    assert got["inputs"][1]["parts"] == got["inputs"][0]["parts"]
    assert got["break_even"]["depths"][0]["acceptance_length"] is None
    assert got["break_even"]["paying_depths"] == []
    assert "does not hold what was offered" in got["break_even"]["advice"]


def test_over_inputs_speedups_are_medians_and_the_parts_still_add_up() -> None:
    slow = _timed(BARE, verify=(3.0, 2.0, 1.0, 1.5), redecided=9)
    short = replace(HAND, rounds=HAND.rounds[:3])
    got = cost_model({"a": HAND, "b": slow, "c": short}, CURVE, {"a": 0.8, "b": 1.2, "c": 0.7})
    assert got["predicted"] == pytest.approx(8 / 8.5)
    assert got["measured"] == 0.8
    residuals = [row["residual"] for row in got["inputs"]]
    assert got["residual"] == pytest.approx(sum(residuals) / 3)
    assert sum(got["parts"].values()) == pytest.approx(got["residual"])
    assert got["parts"]["redeciding"] == pytest.approx(
        sum(row["parts"]["redeciding"] for row in got["inputs"]) / 3
    )


def test_an_input_without_a_measurement_has_a_prediction_only() -> None:
    got = cost_model({"a": HAND, "b": HAND}, CURVE, {"b": 0.8})
    assert got["inputs"][0]["predicted"] == got["inputs"][1]["predicted"]
    assert (got["inputs"][0]["measured"], got["inputs"][0]["residual"]) == (None, None)
    assert got["inputs"][0]["parts"] is None
    assert got["residual"] == got["inputs"][1]["residual"]
    alone = cost_model({"a": HAND}, CURVE, {})
    assert (alone["measured"], alone["residual"], alone["parts"]) == (None, None, None)


def test_a_decode_that_ended_with_the_prompt_predicts_nothing() -> None:
    got = cost_model({"a": _decode([1], [])}, CURVE, {"a": 1.0})
    assert got["inputs"] == [
        {"label": "a", "predicted": None, "measured": 1.0, "residual": None, "parts": None, "regret": None}
    ]
    assert (got["predicted"], got["regret"], got["break_even"]) == (None, None, None)


def test_a_trace_without_times_is_not_explained() -> None:
    """All its rounds took nothing, so nothing can be shared out."""
    got = cost_model({"a": BARE}, CURVE, {"a": 0.8})
    assert got["inputs"][0]["residual"] == pytest.approx(0.8 / (6 / 6.5) - 1)
    assert got["inputs"][0]["parts"] is None
    assert (got["residual"], got["parts"]) == (None, None)


def test_break_even_worked_out() -> None:
    """Eight ids offered in 0.4 s; at depth 3 only the first round offered as many."""
    got = cost_model({"a": HAND, "b": HAND}, CURVE, {})["break_even"]
    assert got["context"] == 7
    rows = got["depths"]
    assert [row["depth"] for row in rows] == [1, 2, 3, 4]
    assert [row["needed"] for row in rows] == [1.5, 2.0, 3.0, 4.0]
    assert [row["needed_with_drafting"] for row in rows] == pytest.approx([1.55, 2.1, 3.15, 4.2])
    assert [row["acceptance_length"] for row in rows] == pytest.approx([4 / 3, 5 / 3, 4, 4])
    assert [row["num_rounds"] for row in rows] == [6, 6, 2, 2]
    assert got["paying_depths"] == []
    assert got["advice"] == (
        "Drafting does not pay at any depth; it comes closest at depth 1, where a verification and its draft "
        "cost 1.55 plain steps and emit 1.33 tokens."
    )


def _break_even(target: Sequence[int], offers: Sequence[Offer], costs: Sequence[float]) -> dict[str, Any]:
    curve = CostCurve(rows=tuple(range(1, len(costs) + 1)), contexts=(1,), seconds=(tuple(costs),))
    found: dict[str, Any] = cost_model({"a": _decode(target, offers)}, curve, {})["break_even"]
    return found


def test_advice_where_drafting_pays_names_every_depth() -> None:
    """All is right, and a step in the curve makes depth 3 dear."""
    got = _break_even([7] * 21, [Offer(ids=(7,) * 4, depth=3)], [1.0, 1.2, 1.4, 4.5, 4.6])
    assert got["paying_depths"] == [1, 2, 4]
    assert got["advice"] == (
        "Drafting pays at depth 1-2, 4, most at depth 2, where a verification and its draft cost 1.40 plain "
        "steps and emit 3.00 tokens."
    )
    one = _break_even([7] * 21, [Offer(ids=(7,), depth=1)], [1.0, 1.2])
    assert one["advice"].startswith("Drafting pays at depth 1, most at depth 1,")


def test_advice_takes_five_rounds() -> None:
    few = _break_even([7] * 9, [Offer(ids=(7,), depth=1)], [1.0, 1.2])
    assert few["depths"][0]["num_rounds"] == 4
    assert few["advice"] == "No depth was offered in 5 rounds or more: too few drafts to advise on."
    assert few["paying_depths"] == []
    assert _break_even([7] * 11, [Offer(ids=(7,), depth=1)], [1.0, 1.2])["paying_depths"] == [1]
    none = _break_even([7] * 9, [Offer(ids=(), depth=0)], [1.0])
    assert (none["depths"], none["paying_depths"]) == ([], [])
    assert "too few drafts" in none["advice"]


def test_the_curve_is_exported_with_its_ratios() -> None:
    curve = CostCurve(rows=(1, 4), contexts=(8, 64), seconds=((2.0, 3.0), (4.0, 8.0)))
    got = cost_model({"a": HAND}, curve, {})
    assert got["curve"] == {
        "rows": [1, 4], "contexts": [8, 64], "seconds": [[2.0, 3.0], [4.0, 8.0]],
        "ratios": [[1.0, 1.5], [1.0, 2.0]],
    }  # fmt: skip
    canonical(got)


SECONDS = st.floats(0.1, 10.0)
CURVES = st.builds(
    lambda first, second: CostCurve(rows=(1, 2, 4, 8), contexts=(1, 20), seconds=(first, second)),
    st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
)  # fmt: skip
OFFERS = st.lists(
    st.builds(Offer, ids=st.lists(st.integers(0, 1), max_size=4).map(tuple), depth=st.integers(0, 4)),
    min_size=1, max_size=6,
)  # fmt: skip
TRACES = st.builds(_decode, st.lists(st.integers(0, 1), min_size=2, max_size=25), OFFERS)


@settings(deadline=None)
@given(st.lists(TRACES, min_size=1, max_size=3), CURVES)
def test_no_choice_beats_the_oracle(traces: list[Trace], curve: CostCurve) -> None:
    got = cost_model({str(i): trace for i, trace in enumerate(traces)}, curve, {})
    for regret in [got["regret"], *(row["regret"] for row in got["inputs"])]:
        assert regret["oracle_rate"] >= regret["policy_rate"]
        assert (
            regret["oracle_rate"]
            >= regret["best_fixed"]["rate"]
            == max(row["rate"] for row in regret["fixed"])
        )
        assert 0 <= regret["regret_oracle"] < 1
        assert regret["regret_fixed"] < 1
    rounds = [r for trace in traces for r in trace.rounds[1:]]
    seconds = sum(curve.at(r.num_drafted + 1, r.position) for r in rounds)
    assert math.isclose(got["regret"]["policy_rate"], sum(len(r.emitted) for r in rounds) / seconds)


@settings(deadline=None)
@given(TRACES, CURVES)
def test_the_oracle_is_the_best_of_all_choices(trace: Trace, curve: CostCurve) -> None:
    """Brute force over the first rounds, each depth decoded by the accept rule."""
    kept = tuple(islice(trace.rounds, 5))
    short = replace(trace, rounds=kept)
    ids, options = short.token_ids, []
    for round_ in kept[1:]:
        follows = list(ids[round_.position - trace.num_prompt - 1 :])
        each = []
        for depth in range(round_.num_offered + 1):
            again = _decode(follows, [Offer(ids=round_.offered, depth=depth)]).rounds[1]
            each.append((len(again.emitted), curve.at(depth + 1, round_.position)))
        options.append(each)
    rates = (sum(t for t, _ in choice) / sum(s for _, s in choice) for choice in product(*options))
    regret = cost_model({"a": short}, curve, {})["regret"]
    assert math.isclose(regret["oracle_rate"], max(rates))


@settings(deadline=None)
@given(
    TRACES, CURVES, st.lists(st.integers(SECOND // 1000, SECOND), min_size=4, max_size=4), st.floats(0.1, 10)
)
def test_the_parts_add_up_to_the_residual(
    trace: Trace, curve: CostCurve, times: list[int], measured: float
) -> None:
    prefill, draft, verify, commit = times
    rounds = [
        replace(r, draft_ns=draft, verify_ns=verify * r.index, commit_ns=commit, num_redecided=r.index % 2)
        for r in trace.rounds
    ]
    timed = replace(trace, prefill_ns=prefill, rounds=tuple(rounds))
    row = cost_model({"a": timed}, curve, {"a": measured})["inputs"][0]
    assert math.isclose(sum(row["parts"].values()), row["residual"], rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(row["residual"], measured / row["predicted"] - 1, abs_tol=1e-12)
    assert -1 < row["parts"]["drafting"] < 0
