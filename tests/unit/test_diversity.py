"""The data_dependent label against hand-computed sets, and against noise without any dependence."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from draftproof import diversity
from draftproof.diversity import Diverse, DiverseInput, InputRow, diverse


def _row(label: str, *ratios: float, steps: float | None = None, good: bool = True) -> InputRow:
    return InputRow(label=label, ratios=ratios, steps_per_token=steps, is_judged_good=good)


def test_a_calm_set_worked_out() -> None:
    rows = [_row("prose", *[2.0] * 5, steps=0.5), _row("code", *[2.1] * 5, steps=0.5),
            _row("poem", *[1.95] * 5, steps=0.5)]  # fmt: skip
    assert diverse(rows) == Diverse(
        status="ok", median_speedup=2.0, min_speedup=1.95, max_speedup=2.1, min_input="poem",
        max_input="code", spread=pytest.approx(0.075), noise=0.0, threshold=0.10, steps_vary=False,
        data_dependent=False,
        why="speedups spread 7.5% (1.95x on poem to 2.10x on code), within the threshold of 10.0% (the "
        "larger of 10% and 3 x 0.0% noise); decode steps per token are 0.5 on every input that reports them",
        inputs=(
            DiverseInput(label="prose", speedup=2.0, interval=(2.0, 2.0), noise=0.0, steps_per_token=0.5),
            DiverseInput(label="code", speedup=2.1, interval=(2.1, 2.1), noise=0.0, steps_per_token=0.5),
            DiverseInput(label="poem", speedup=1.95, interval=(1.95, 1.95), noise=0.0, steps_per_token=0.5),
        ),
    )  # fmt: skip


def test_the_published_names_are_the_agreed_ones() -> None:
    assert [field.name for field in fields(Diverse)] == [
        "status", "median_speedup", "min_speedup", "max_speedup", "min_input", "max_input", "spread",
        "noise", "threshold", "steps_vary", "data_dependent", "why", "inputs",
    ]  # fmt: skip


def test_a_spread_labels_without_any_counter() -> None:
    got = diverse([_row("a", 1.0, 1.0, 1.0), _row("b", 3.0, 3.0, 3.0), _row("c", 1.5, 1.5, 1.5)])
    assert (got.data_dependent, got.steps_vary, got.spread) == (True, None, pytest.approx(4 / 3))
    assert got.why == (
        "speedups spread 133.3% (1.00x on a to 3.00x on b), over the threshold of 10.0% (the larger of 10% "
        "and 3 x 0.0% noise); decode steps per token are unknown"
    )


def test_steps_label_where_timing_sees_nothing() -> None:
    got = diverse([_row("a", 2.0, 2.0, 2.0, steps=0.5), _row("b", 2.0, 2.0, 2.0, steps=0.75)])
    assert (got.data_dependent, got.steps_vary, got.spread) == (True, True, 0.0)
    assert got.why.endswith("decode steps per token change with the input (0.5 to 0.75)")


def test_the_threshold_is_exceeded_not_met() -> None:
    """1.0 to 1.125 around 1.125 is a ninth: over 10 %; 0.9 and 1.0 around 1.0 is a tenth at most."""
    assert diverse([_row("a", 1.0), _row("b", 1.125), _row("c", 1.125)]).data_dependent
    assert not diverse([_row("a", 0.90625), _row("b", 1.0), _row("c", 1.0)]).data_dependent


@pytest.mark.parametrize(("other", "want"), [(0.5 * (1 + 9e-7), False), (0.5 * (1 + 2e-6), True)])
def test_steps_may_differ_by_rounding(other: float, want: bool) -> None:
    got = diverse([_row("a", 1.0, steps=0.5), _row("b", 1.0, steps=other), _row("c", 1.0)])
    assert got.steps_vary is want
    assert got.data_dependent is want


def test_one_report_of_steps_says_nothing() -> None:
    got = diverse([_row("a", 1.0, steps=0.5), _row("b", 1.0)])
    assert (got.steps_vary, got.data_dependent) == (None, False)


def test_noise_is_the_median_over_inputs_so_one_noisy_input_hides_nothing() -> None:
    calm = [_row(name, *[speed] * 5) for name, speed in (("a", 1.0), ("b", 1.25), ("c", 1.0))]
    got = diverse([*calm, _row("wild", 0.5, 0.8, 1.0, 1.4, 2.0)])
    assert (got.noise, got.threshold, got.data_dependent) == (0.0, 0.10, True)
    assert got.inputs[3].noise > 0.5


def test_noise_raises_the_threshold() -> None:
    rows = [_row("a", 0.9, 1.0, 1.1), _row("b", 1.08, 1.2, 1.32)]
    got = diverse(rows)
    assert got.noise == pytest.approx(0.118, abs=0.003)
    assert got.threshold == pytest.approx(3 * got.noise)
    assert got.spread == pytest.approx(0.2 / 1.1)
    assert not got.data_dependent


def test_too_few_pairs_are_said_and_still_labelled_by_the_floor() -> None:
    got = diverse([_row("a", 1.0, 1.0), _row("b", 1.5, 1.5)])
    assert (got.noise, got.threshold, got.data_dependent) == (None, 0.10, True)
    assert "(the least there is: too few pairs to know the noise)" in got.why


def test_a_set_of_one_timed_input_is_skipped() -> None:
    got = diverse([_row("a", 1.0, 1.5, 2.0, steps=0.5), _row("untimed", steps=1.0)])
    assert (got.status, got.data_dependent, got.median_speedup, got.steps_vary) == (
        "skipped", False, None, None,
    )  # fmt: skip
    assert got.why == "dependence takes two timed inputs, there are 1"
    assert [row.label for row in got.inputs] == ["a", "untimed"]
    assert diverse([]).why == "dependence takes two timed inputs, there are 0"


def test_an_untimed_input_beside_timed_ones_counts_for_nothing() -> None:
    got = diverse([_row("a", 1.0), _row("untimed", steps=0.1), _row("b", 1.0, steps=1.0)])
    assert (got.status, got.steps_vary, got.spread) == ("ok", None, 0.0)
    assert got.inputs[1] == DiverseInput(
        label="untimed", speedup=None, interval=None, noise=None, steps_per_token=0.1
    )


def test_wrong_output_withholds_every_speed_and_names_the_inputs() -> None:
    got = diverse([_row("a", 1.0), _row("code", 2.0, good=False), _row("math", 2.0, good=False)])
    assert (got.status, got.why) == ("failed", "speeds are withheld: wrong output on code, math")
    assert (got.median_speedup, got.min_input, got.data_dependent) == (None, None, False)
    assert [row.speedup for row in got.inputs] == [None, None, None]


def _draws(tails: str, noise: float, seed: int, runs: int) -> np.ndarray:
    """Ratios of 12 inputs and 5 pairs: lognormal, Student's t with 3 degrees, or one outlier in ten."""
    rng, shape = np.random.default_rng(seed), (runs, 12, 5)
    if tails == "t":
        return np.exp(noise * rng.standard_t(3, shape))
    wide = np.where(rng.random(shape) < 0.1, 5.0, 1.0) if tails == "outliers" else 1.0
    return np.exp(noise * wide * rng.standard_normal(shape))


def _num_labelled(runs: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> int:
    # Intervals take most of the time and no part in the label.
    monkeypatch.setattr(diversity, "bootstrap_median", lambda ratios: None)
    rows = [[_row(str(i), *pairs) for i, pairs in enumerate(run)] for run in runs.tolist()]
    return sum(diverse(run).data_dependent for run in rows)


@pytest.mark.parametrize("noise", [0.03, 0.05, 0.10])
@pytest.mark.parametrize("tails", ["normal", "t", "outliers"])
def test_a_run_against_itself_stays_unlabelled(
    tails: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _num_labelled(_draws(tails, noise, seed=3, runs=400), monkeypatch) <= 20


@pytest.mark.parametrize("tails", ["normal", "t", "outliers"])
def test_a_quarter_more_on_one_input_is_labelled(tails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _draws(tails, 0.02, seed=4, runs=200)
    runs[:, 7] *= 1.25
    assert _num_labelled(runs, monkeypatch) >= 198
