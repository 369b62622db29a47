"""What the charts of speed and memory hold: the published figures, in order, with the same as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftproof import results as published
from draftproof.folder import Evidence
from draftproof.report import charts


def ratio(median: float, interval: list[float] | None = None) -> dict[str, Any]:
    return {"median": median, "low": median, "high": median, "interval": interval, "num_pairs": 5}


def row(label: str, speed: float | None, **more: Any) -> dict[str, Any]:
    return {
        "label": label, "role": "diverse", "num_prompt": 512, "num_tokens": 256, "num_mismatched_tokens": 0,
        "first_difference": None, "noise": 0.02,
        "decode_stats": {"tokens_per_step": 2.0, "acceptance_rate": 0.5},
        "reconciled": None, "speedup": None if speed is None else ratio(speed, [speed - 0.1, speed + 0.1]),
        "serial_speedup": ratio(1.5), "speculation_speedup": ratio(1.25), "first_seen_speedup": ratio(1.9),
        "repeat_speedup": ratio(2.0), **more,
    }  # fmt: skip


def document(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "inputs": list(rows), "speedup": ratio(2.0, [1.8, 2.2]), "serial_speedup": ratio(1.5),
        "speculation_speedup": ratio(1.25), "worst_input": "low", "first_seen_speedup": ratio(1.9),
        "repeat_speedup": ratio(2.0), **more,
    }  # fmt: skip


def test_inputs_are_sorted_and_the_withheld_are_named() -> None:
    chart = charts.speedups(document(row("low", 1.5), row("none", None), row("high", 2.5)))
    assert chart.data is not None
    assert chart.data["rows"][0] == {
        "label": "high",
        "whole": {"median": 2.5, "around": [2.4, 2.6], "kind": "95 %", "pairs": 5},
        "serial": {"median": 1.5, "around": [1.5, 1.5], "kind": "range", "pairs": 5},
    }
    assert [r["label"] for r in chart.data["rows"]] == ["high", "low"]
    assert chart.data["quoted"] == {"name": "median", "value": 2.0}
    assert chart.data["worst"] == "low"
    assert "Not drawn, because withheld: none." in chart.hint
    assert chart.alt == "Speedup of 2 inputs, from 1.50× (low) to 2.50× (high)."
    assert [key.text for key in chart.keys] == ["against stock", "leaner forward alone"]


def test_the_table_has_every_input_in_the_suite_s_order() -> None:
    odd = row("odd", None, first_difference=7, num_mismatched_tokens=9, decode_stats=None, reconciled=False)
    table = charts.speedups(document(row("low", 1.5, reconciled=True), odd)).table
    assert table is not None
    assert table.rows[0] == (
        "low", "diverse", "512", "256", "0", "1.50×", "1.40–1.60", "1.50×", "1.25×", "2 %", "2.00", "50 %",
        "yes",
    )  # fmt: skip
    assert table.rows[1] == (
        "odd", "diverse", "512", "256", "9 (first at 7)", "withheld", "", "1.50×", "1.25×", "2 %",
        "not measured", "not measured", "NO",
    )  # fmt: skip
    assert len(table.columns) == len(table.rows[0])


def test_few_pairs_show_their_range_and_one_pair_shows_none() -> None:
    few = ratio(2.0) | {"low": 1.5, "high": 2.5, "num_pairs": 3}
    one = ratio(2.0) | {"num_pairs": 1}
    chart = charts.speedups(document(row("few", 2.0, speedup=few), row("one", 2.0, speedup=one)))
    assert chart.data is not None
    points = {found["label"]: found["whole"] for found in chart.data["rows"]}
    assert (points["few"]["around"], points["few"]["kind"]) == ([1.5, 2.5], "range")
    assert points["one"]["around"] is None
    assert "range of pairs (an interval takes five)" in chart.hint


def test_an_input_without_an_interval_says_so() -> None:
    table = charts.speedups(document(row("a", 2.0, speedup=ratio(2.0)))).table
    assert table is not None
    assert table.rows[0][6] == "none"


def test_a_run_whose_speed_is_withheld_draws_none(make: Callable[..., Evidence]) -> None:
    results = published.compute(make(wrong_on="code"))
    for chart in (charts.speedups(results), charts.split(results)):
        assert chart.data is None
        assert chart.missing == "The speed is withheld; see the verdict."
    assert charts.repeats(results).data is None


def test_an_evaluation_is_marked_at_its_main_input(evaluation_results: dict[str, Any]) -> None:
    chart = charts.speedups(evaluation_results)
    assert chart.data is not None
    assert chart.data["quoted"] == {"name": "main input", "value": evaluation_results["speedup"]["median"]}
    assert [key.text for key in chart.keys] == ["against stock"]
    assert charts.split(evaluation_results).missing.startswith("This run has no serial arm")


def test_the_split_names_both_factors() -> None:
    chart = charts.split(document())
    assert chart.data == {"serial": 1.5, "speculation": 1.25, "whole": 2.0}
    assert chart.alt == "Leaner forward 1.50×, speculation 1.25×, together 2.00×."
    assert chart.table is not None
    assert chart.table.rows[2] == ("together", "2.00×", "1.80–2.20", "2.00×", "2.00×")


def test_first_seen_beside_repeats() -> None:
    only = row("once", 2.0, repeat_speedup=None)
    chart = charts.repeats(document(only, row("never", 2.0, first_seen_speedup=None, repeat_speedup=None)))
    assert chart.data is not None
    assert chart.data["rows"] == [
        {
            "label": "once",
            "repeat": None,
            "first": {"median": 1.9, "around": [1.9, 1.9], "kind": "range", "pairs": 5},
        }
    ]
    assert [key.text for key in chart.keys] == ["first seen, median 1.90×", "repeats, median 2.00×"]
    assert chart.table is not None
    assert chart.table.rows == (("once", "1.90×", "not measured"),)


def test_memory_of_both_sides() -> None:
    peaks = {
        "peak_bytes": {"stock": 800 << 20, "engine": 900 << 20, "drafter": -(50 << 20)},
        "peak_cuda_bytes": {"stock": 10 << 20, "engine": 20 << 20, "drafter": None},
    }
    chart = charts.memory(peaks)
    assert chart.data is not None
    assert [(bar["kind"], bar["arm"], bar["bytes"] >> 20) for bar in chart.data["bars"]] == [
        ("resident", "stock", 800), ("resident", "engine", 900), ("CUDA", "stock", 10),
        ("CUDA", "engine", 20),
    ]  # fmt: skip
    assert chart.hint.endswith("resident −50 MiB; CUDA not measured.")
    assert chart.table is not None
    assert chart.table.rows[0] == ("resident", "800 MiB", "900 MiB", "−50 MiB")


def test_memory_that_was_not_measured() -> None:
    none = {"stock": None, "engine": None, "drafter": None}
    chart = charts.memory({"peak_bytes": none, "peak_cuda_bytes": None})
    assert (chart.data, chart.missing) == (None, "not measured")
