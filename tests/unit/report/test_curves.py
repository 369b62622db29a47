"""What the charts of acceptance and cost hold, and how the advice reads."""

from __future__ import annotations

import copy
from typing import Any

from draftproof.record import CostCurve
from draftproof.report import curves

ACCEPTANCE: dict[str, Any] = {
    "positions": [
        {"position": 1, "conditional": 0.75, "joint": 0.75, "num_trials": 40, "num_rounds": 40},
        {"position": 2, "conditional": None, "joint": 0.25, "num_trials": 0, "num_rounds": 30},
    ],
    "offsets": [
        {"start": 0, "end": 32, "tokens_per_forward": 1.5, "num_rounds": 9},
        {"start": 32, "end": 64, "tokens_per_forward": 2.5, "num_rounds": 1200},
    ],
    "acceptance_length": {
        "with_bonus": {"token_weighted": 2.45, "per_prompt": 2.5},
        "without_bonus": {"token_weighted": 1.45, "per_prompt": 1.5},
    },
    "sources": {"lookup": {"rounds": 3, "drafted": 12, "accepted": 6, "acceptance_rate": 0.5}},
    "depths": {"0": 7, "1": 2, "10": 1},
}
CURVE = CostCurve(rows=(1, 2), contexts=(128, 512), seconds=((0.02, 0.021), (0.03, 0.0325)))
COST: dict[str, Any] = {
    "predicted": 1.8, "measured": 1.7, "residual": -0.05, "parts": {"drafting": -0.06, "rest": 0.01},
    "inputs": [
        {"label": "a", "predicted": 2.0, "measured": 1.9, "residual": -0.05,
         "parts": {"drafting": -0.06, "rest": 0.01}},
        {"label": "b", "predicted": 1.5, "measured": None, "residual": None, "parts": None},
        {"label": "c", "predicted": None, "measured": None, "residual": None, "parts": None},
    ],
    "regret": {"best_fixed": {"depth": 4, "rate": 90.0}, "regret_fixed": -0.006, "regret_oracle": 0.12},
    "break_even": {
        "context": 600, "paying_depths": [1], "advice": "Drafting pays at depth 1.",
        "depths": [
            {"depth": 1, "needed": 1.05, "needed_with_drafting": 1.07, "acceptance_length": 1.6,
             "num_rounds": 924},
            {"depth": 2, "needed": 1.2, "needed_with_drafting": 1.3, "acceptance_length": None,
             "num_rounds": 0},
        ],
    },
}  # fmt: skip


def test_positions() -> None:
    chart = curves.positions(ACCEPTANCE)
    assert chart.data == {"rows": ACCEPTANCE["positions"]}
    assert chart.alt == "Joint acceptance is 75 % at position 1 and 25 % at position 2."
    assert chart.table is not None
    assert chart.table.rows[1] == ("2", "not measured", "25 %", "0", "30")


def test_offsets_end_before_the_next_bin_starts() -> None:
    chart = curves.offsets(ACCEPTANCE)
    assert chart.data == {"rows": ACCEPTANCE["offsets"]}
    assert chart.alt == "From 1.50 tokens a forward at the start to 2.50 at the end."
    assert chart.table is not None
    assert chart.table.rows == (("0–31", "1.50", "9"), ("32–63", "2.50", "1\u202f200"))


def test_lengths_and_drafters() -> None:
    lengths, drafters = curves.lengths(ACCEPTANCE), curves.drafters(ACCEPTANCE)
    assert lengths is not None
    assert lengths.rows == (("with bonus", "2.45", "2.50"), ("without bonus", "1.45", "1.50"))
    assert drafters is not None
    assert drafters.rows == (("lookup", "3", "12", "6", "50 %"),)


def test_an_arm_without_a_trace_draws_nothing() -> None:
    assert curves.positions(None).data is None
    assert curves.offsets(None).missing == "The judged arm left no trace of rounds."
    assert curves.lengths(None) is None
    assert curves.drafters(None) is None


def test_the_curve_and_the_depths_share_an_axis() -> None:
    chart = curves.curve(CURVE, ACCEPTANCE)
    assert chart.data is not None
    assert [(p["context"], p["rows"], round(p["ms"], 3)) for p in chart.data["points"]] == [
        (128, 1, 20.0), (128, 2, 21.0), (512, 1, 30.0), (512, 2, 32.5),
    ]  # fmt: skip
    assert chart.data["depths"] == [
        {"rows": 1, "depth": 0, "rounds": 7}, {"rows": 2, "depth": 1, "rounds": 2},
        {"rows": 11, "depth": 10, "rounds": 1},
    ]  # fmt: skip
    assert chart.table is not None
    assert chart.table.columns == ("rows", "1", "2")
    assert chart.table.rows[2] == ("rounds that chose it", "7", "2")


def test_a_curve_without_rounds_stands_alone() -> None:
    chart = curves.curve(CURVE, None)
    assert chart.data is not None
    assert chart.data["depths"] == []
    assert chart.table is not None
    assert len(chart.table.rows) == 2
    assert curves.curve(None, ACCEPTANCE).missing == "No cost curve was measured."


def test_predictions_stand_beside_measurements() -> None:
    chart = curves.predicted(COST)
    assert chart.data is not None
    assert chart.data["rows"] == [
        {"label": "a", "predicted": 2.0, "measured": 1.9}, {"label": "b", "predicted": 1.5, "measured": None},
    ]  # fmt: skip
    assert chart.table is not None
    assert chart.table.columns[-2:] == ("of it drafting", "of it rest")
    assert chart.table.rows == (
        ("a", "2.00×", "1.90×", "−5.0 %", "−6.0 %", "+1.0 %"),
        ("b", "1.50×", *["not measured"] * 4),
        ("all inputs", "1.80×", "1.70×", "−5.0 %", "−6.0 %", "+1.0 %"),
    )
    assert curves.predicted(None).data is None


def test_break_even_by_depth() -> None:
    table = curves.break_even(COST)
    assert table is not None
    assert table.rows == (
        ("1", "1.05", "1.07", "1.60", "924", "yes"), ("2", "1.20", "1.30", "never offered", "0", ""),
    )  # fmt: skip
    assert curves.break_even(None) is None


def test_advice_and_regret_read_as_sentences() -> None:
    assert curves.advice(COST) == [
        "Drafting pays at depth 1.",
        "On the same rounds the depth policy was 0.6 % faster than the best fixed depth (4), and 12.0 % under"
        " the best choice of every single round, which only hindsight knows.",
    ]
    worse = copy.deepcopy(COST)
    worse["regret"]["regret_fixed"] = 0.03
    assert "3.0 % slower than the best fixed depth (4)" in curves.advice(worse)[1]
    assert curves.advice(None) == []


def test_an_unknown_regret_says_so() -> None:
    lines = curves.advice({**COST, "regret": None, "break_even": None})
    assert lines == ["Regret of the depth policy: not measured, as the trace does not hold what was offered."]
