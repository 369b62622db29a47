"""Break-even acceptance and best depth: closed forms, and the published ratios of Qwen3.5."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.forecast import best_depth, break_even, expected_tokens, gain

CHANCES = st.floats(0.0, 0.99)
COSTS = st.floats(0.001, 0.95)
DEPTHS = st.integers(1, 16)


@given(CHANCES, DEPTHS)
def test_expected_tokens_are_the_closed_form(acceptance: float, depth: int) -> None:
    closed = (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    assert expected_tokens(acceptance, depth) == pytest.approx(closed, rel=1e-9)


def test_all_right_and_all_wrong() -> None:
    assert [expected_tokens(1.0, depth) for depth in range(4)] == [1, 2, 3, 4]
    assert [expected_tokens(0.0, depth) for depth in range(4)] == [1, 1, 1, 1]


@given(COSTS, DEPTHS)
def test_a_depth_pays_above_its_break_even_and_not_below(extra: float, depth: int) -> None:
    bar = break_even(depth, extra)
    assert bar is not None
    assert 0 < bar < 1
    # The bisection ends within 2**-40 of the root.
    assert gain(bar + 1e-9, depth, extra) > 1
    assert gain(bar - 1e-9, depth, extra) < 1


@pytest.mark.parametrize("extra", [0.05, 0.159, 0.9])
def test_one_token_pays_from_its_cost_on(extra: float) -> None:
    assert break_even(1, extra) == pytest.approx(extra, abs=1e-9)


def test_deeper_needs_more() -> None:
    bars = [break_even(depth, 0.159) or 0.0 for depth in range(1, 6)]
    assert bars == sorted(set(bars))


@pytest.mark.parametrize("depth", [1, 4])
def test_a_draft_as_dear_as_a_pass_never_pays(depth: int) -> None:
    assert break_even(depth, 1.0) is None
    assert break_even(depth, 1.5) is None
    assert break_even(depth, 0.99) is not None


def test_the_ceiling_of_the_9b() -> None:
    """Speedup of one draft token at 86 % and 15.9 % of a pass (reference/qwen35-mtp.md, 1.3)."""
    assert gain(0.86, 1, 0.159) == pytest.approx(1.61, abs=0.01)


@given(CHANCES, COSTS)
def test_no_depth_beats_the_best(acceptance: float, extra: float) -> None:
    best = best_depth(acceptance, extra, 8)
    gains = [gain(acceptance, depth, extra) for depth in range(9)]
    assert gains[best] == max(gains)
    assert best == gains.index(max(gains))


def test_nothing_pays_below_the_first_break_even() -> None:
    assert best_depth(0.15, 0.159, 8) == 0
    assert best_depth(0.17, 0.159, 8) == 1
    assert best_depth(1.0, 0.159, 8) == 8
