"""Does the speedup depend on the input? The ``data_dependent`` label over a diverse set, with its reason.

A label, never a rejection. Two things set it: per-input speedups that spread further than timing noise
explains, or decode steps per token that change with the input, which timing cannot hide.

The spread compares medians of several pairs, the noise is that of a single pair. For medians of five pairs
three times the noise is 5.6 standard errors, which the range of twelve inputs without any dependence exceeds
in about one run of fifty at 10 % noise, heavy tails or not (simulated; under 3.3 % noise the 10 % floor
decides). With three pairs it would be one run in six: take at least five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from draftproof.stats import bootstrap_median, pair_noise

SPREAD_FLOOR = 0.10
NOISE_FACTOR = 3.0
_SAME_STEPS = 1e-6
_FEWEST_TO_DIFFER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """One input of the set: the ratios of its pairs, and its decode steps per token where known."""

    label: str
    ratios: tuple[float, ...]
    steps_per_token: float | None
    is_judged_good: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DiverseInput:
    """One input's figures: median speedup, its interval, and the noise of one of its pairs."""

    label: str
    speedup: float | None
    interval: tuple[float, float] | None
    noise: float | None
    steps_per_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverse:
    """The published ``metrics.diverse``.

    Attributes:
        status: ``ok``; ``skipped`` with fewer than two timed inputs; ``failed`` when the output of an input
            was judged wrong. All figures are withheld unless it is ``ok``.
        spread: (largest - smallest) / median of the inputs' speedups.
        noise: median over inputs of the noise of one pair; the largest would let one noisy input hide a real
            dependence. ``None`` when no input has three pairs.
        threshold: the larger of 10 % and three times ``noise``; the spread must exceed it.
        steps_vary: whether decode steps per token differ by more than rounding; ``None`` when fewer than
            two inputs report them.
        why: one sentence with the numbers, labelled or not.
    """

    status: Literal["ok", "skipped", "failed"]
    median_speedup: float | None
    min_speedup: float | None
    max_speedup: float | None
    min_input: str | None
    max_input: str | None
    spread: float | None
    noise: float | None
    threshold: float | None
    steps_vary: bool | None
    data_dependent: bool
    why: str
    inputs: tuple[DiverseInput, ...]


def diverse(rows: Sequence[InputRow]) -> Diverse:
    """Judge the set; rows without ratios were not timed and count for nothing."""
    wrong = [row.label for row in rows if not row.is_judged_good]
    if wrong:
        return _withheld("failed", rows, f"speeds are withheld: wrong output on {', '.join(wrong)}")
    timed = [row for row in rows if row.ratios]
    if len(timed) < _FEWEST_TO_DIFFER:
        return _withheld("skipped", rows, f"dependence takes two timed inputs, there are {len(timed)}")
    speedups = {row.label: median(row.ratios) for row in timed}
    noises = [noise for row in timed if (noise := pair_noise(row.ratios)) is not None]
    noise = median(noises) if noises else None
    steps = [row.steps_per_token for row in timed if row.steps_per_token is not None]
    middle = median(speedups.values())
    low, high = min(speedups, key=speedups.__getitem__), max(speedups, key=speedups.__getitem__)
    spread = (speedups[high] - speedups[low]) / middle
    threshold = max(SPREAD_FLOOR, NOISE_FACTOR * (noise or 0.0))
    steps_vary = _vary(steps)
    range_ = f"{speedups[low]:.2f}x on {low} to {speedups[high]:.2f}x on {high}"
    side = "over" if spread > threshold else "within"
    return Diverse(
        status="ok", median_speedup=middle, min_speedup=speedups[low], max_speedup=speedups[high],
        min_input=low, max_input=high, spread=spread, noise=noise, threshold=threshold,
        steps_vary=steps_vary, data_dependent=spread > threshold or bool(steps_vary),
        why=f"speedups spread {spread:.1%} ({range_}), {side} the threshold of {threshold:.1%} "
        f"({_noise_words(noise)}); {_steps_words(steps, steps_vary)}",
        inputs=tuple(map(_figures, rows)),
    )  # fmt: skip


def _withheld(status: Literal["skipped", "failed"], rows: Sequence[InputRow], why: str) -> Diverse:
    return Diverse(
        status=status, median_speedup=None, min_speedup=None, max_speedup=None, min_input=None,
        max_input=None, spread=None, noise=None, threshold=None, steps_vary=None, data_dependent=False,
        why=why, inputs=tuple(
            DiverseInput(label=row.label, speedup=None, interval=None, noise=None,
                         steps_per_token=row.steps_per_token)
            for row in rows
        ),
    )  # fmt: skip


def _figures(row: InputRow) -> DiverseInput:
    return DiverseInput(
        label=row.label, speedup=median(row.ratios) if row.ratios else None,
        interval=bootstrap_median(row.ratios), noise=pair_noise(row.ratios),
        steps_per_token=row.steps_per_token,
    )  # fmt: skip


def _vary(steps: Sequence[float]) -> bool | None:
    if len(steps) < _FEWEST_TO_DIFFER:
        return None
    return max(steps) - min(steps) > _SAME_STEPS * max(steps)


def _noise_words(noise: float | None) -> str:
    if noise is None:
        return "the least there is: too few pairs to know the noise"
    return f"the larger of {SPREAD_FLOOR:.0%} and {NOISE_FACTOR:.0f} x {noise:.1%} noise"


def _steps_words(steps: Sequence[float], steps_vary: bool | None) -> str:
    if steps_vary is None:
        return "decode steps per token are unknown"
    if steps_vary:
        return f"decode steps per token change with the input ({min(steps):.3g} to {max(steps):.3g})"
    return f"decode steps per token are {steps[0]:.3g} on every input that reports them"
