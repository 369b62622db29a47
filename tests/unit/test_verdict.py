"""Every refusal with its reason, just on either side of its limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.record import Counters
from draftproof.verdict import (
    DRIFT_LIMIT,
    MANY_ROUNDS,
    NOISE_LIMIT,
    WARM_LIMIT,
    Case,
    InputCase,
    LegCase,
    Verdict,
    contradiction,
    judge,
)


def an_input(label: str = "news", **changes: Any) -> InputCase:
    """Ten tokens, twice as fast as stock, nothing wrong."""
    fields: dict[str, Any] = {
        "label": label, "num_expected": 10, "num_emitted": (10, 10), "speedups": (2.0, 2.0, 2.0),
        "noise": 0.02, "tokens_per_step": 2.5, "stock_seconds": (1.0,) * 6,
    }  # fmt: skip
    return InputCase(**fields | changes)


def a_case(*inputs: InputCase, **changes: Any) -> Case:
    chosen = inputs or (an_input(), an_input("code"))
    fields: dict[str, Any] = {
        "num_expected_inputs": len(chosen), "speedup": 2.0, "interval": (1.9, 2.1),
    }  # fmt: skip
    return Case(inputs=chosen, **fields | changes)


def refused(case: Case, outcome: str, *words: str) -> Verdict:
    """The one reason holds every word and no speed is shown."""
    verdict = judge(case)
    assert verdict.outcome == outcome, verdict
    assert not verdict.is_speed_shown
    (reason,) = verdict.reasons
    for word in words:
        assert word in reason
    return verdict


def accepted(case: Case, outcome: str = "pass") -> Verdict:
    verdict = judge(case)
    assert verdict.outcome == outcome, verdict
    assert verdict.is_speed_shown
    return verdict


class TestSpeed:
    @pytest.mark.parametrize(
        ("interval", "outcome", "word"),
        [
            ((1.001, 2.1), "pass", "2.00x (geometric mean over inputs, 99 % 1.00-2.10)"),
            ((1.0, 2.1), "tie", "not shown to differ"),
            ((0.9, 1.0), "tie", "not shown to differ"), ((0.8, 0.999), "fail", "slower than stock"),
        ],
    )  # fmt: skip
    def test_the_interval_decides(self, interval: tuple[float, float], outcome: str, word: str) -> None:
        verdict = accepted(a_case(interval=interval), outcome)
        assert word in verdict.reasons[0]

    @pytest.mark.parametrize(
        ("middle", "noise", "outcome"),
        [
            (1.05, 0.04, "pass"),
            (1.05, 0.06, "tie"),
            (0.95, 0.04, "fail"),
            (0.95, 0.06, "tie"),
            (1.09, None, "tie"),
        ],
    )
    def test_without_an_interval_the_noise_decides(
        self, middle: float, noise: float | None, outcome: str
    ) -> None:
        case = a_case(an_input(noise=noise), interval=None, speedup=middle)
        accepted(case, outcome)


class TestFaults:
    def test_a_different_token(self) -> None:
        case = a_case(an_input(), an_input("code", first_difference=7, num_mismatched=3))
        refused(case, "fail", "code", "token 7", "3 of its compared tokens")

    def test_a_different_token_is_for_the_gates_where_quality_is_not_exact(self) -> None:
        item = an_input("code", first_difference=7, num_mismatched=3)
        accepted(a_case(item, is_exact_mode=False))
        refused(a_case(item, is_exact_mode=False, unmet_gates=("code: kl is 3",)), "fail", "kl is 3")

    @pytest.mark.parametrize("is_exact", [True, False])
    def test_another_number_of_tokens(self, is_exact: bool) -> None:
        case = a_case(an_input(num_emitted=(10, 9), first_difference=9), is_exact_mode=is_exact)
        refused(case, "fail", "9 tokens where stock emits 10")

    def test_an_arm_that_died(self) -> None:
        refused(a_case(status="failed: it raised"), "fail", "failed: it raised")

    def test_every_input_at_fault_is_named(self) -> None:
        case = a_case(an_input(first_difference=1), an_input("code", first_difference=2))
        assert [reason.split(":")[0] for reason in judge(case).reasons] == ["news", "code"]


LEG = LegCase(
    seconds=1.0, num_tokens=10, num_forwards=4,
    counters=Counters(steps=4, verifies=3, drafted=12, accepted=6, tokens=10),
)  # fmt: skip


class TestCounters:
    def test_the_truth_is_reconciled(self) -> None:
        assert contradiction(LEG) is None
        verdict = accepted(a_case(an_input(legs=(LEG,))))
        assert verdict.is_counted
        assert verdict.notes == ()

    @pytest.mark.parametrize(
        ("told", "words"),
        [
            ({"steps": 6}, "reported 6 steps, the harness counted 4"),
            ({"steps": 2, "verifies": 2}, "reported 2 steps, the harness counted 4"),
            ({"accepted": 13}, "13 accepted of 12"),
            ({"verifies": 5}, "5 verifications in 4 steps"),
            ({"tokens": 12}, "reported 12 tokens, emitted 10"),
            ({"tokens": 8}, "reported 8 tokens, emitted 10"),
            ({"accepted": 4}, "reported 10 tokens from 4 steps and 4 accepted"),
        ],
    )
    def test_a_lie_fails(self, told: dict[str, int], words: str) -> None:
        leg = replace(LEG, counters=replace(LEG.counters or Counters(), **told))
        assert words in (contradiction(leg) or "")
        refused(a_case(an_input(), an_input("code", legs=(LEG, leg))), "fail", "code", words)

    @pytest.mark.parametrize("told", [{"steps": 5}, {"steps": 3}, {"tokens": 9}, {"tokens": 11}])
    def test_the_prompts_own_token_and_forward_may_count_or_not(self, told: dict[str, int]) -> None:
        counters = Counters(**{"steps": 4, "verifies": 3, "drafted": 12, "accepted": 8, "tokens": 10} | told)
        assert contradiction(replace(LEG, counters=counters)) is None

    def test_nothing_reported_is_a_note(self) -> None:
        verdict = accepted(a_case(an_input(legs=(replace(LEG, counters=None),))))
        assert "no counters were reported" in verdict.notes[0]
        assert "harness counted" in verdict.notes[0]
        assert verdict.is_counted

    def test_nothing_reported_and_nothing_counted(self) -> None:
        leg = replace(LEG, counters=None, num_forwards=None)
        verdict = accepted(a_case(an_input(legs=(leg,))))
        assert "steps are unknown" in verdict.notes[0]
        assert not verdict.is_counted

    @pytest.mark.parametrize("counted", [None, 0])
    def test_what_could_not_be_counted_is_marked(self, counted: int | None) -> None:
        verdict = accepted(a_case(an_input(legs=(replace(LEG, num_forwards=counted),))))
        assert "could not be checked" in verdict.notes[0]
        assert not verdict.is_counted


class TestWarmStore:
    def case(self, gain: float, noise: float = 0.02, is_other_warm: bool = True) -> Case:
        warm = an_input(first_seen=1.0, repeats=(gain, gain), noise=noise)
        other = an_input(
            "code", first_seen=2.0, repeats=(2.0 * (gain if is_other_warm else 1.0),), noise=noise
        )
        return a_case(warm, other)

    def test_repeats_faster_than_the_first(self) -> None:
        refused(self.case(1.01 + WARM_LIMIT), "fail", "repeats of a prompt are", "news", "used again")
        accepted(self.case(0.99 + WARM_LIMIT))

    def test_noise_widens_the_limit(self) -> None:
        accepted(self.case(1.28, noise=0.1))
        refused(self.case(1.32, noise=0.1), "fail", "limit 1.30x")

    def test_the_median_input_counts(self) -> None:
        refused(self.case(1.5, is_other_warm=False), "fail", "1.25x")
        accepted(self.case(1.25, is_other_warm=False))


class TestDoubts:
    def test_nothing_measured(self) -> None:
        refused(Case(inputs=(), num_expected_inputs=2), "void", "nothing was measured")
        refused(a_case(an_input(speedups=())), "void", "nothing was measured")

    def test_a_missing_input(self) -> None:
        refused(a_case(num_expected_inputs=3), "void", "only 2 of 3 inputs")
        accepted(a_case(num_expected_inputs=3, status="interrupted"))

    def test_more_speed_than_tokens_a_forward(self) -> None:
        def item(low: float) -> InputCase:
            return an_input(speculation=(low, low + 0.1), tokens_per_step=2.0)

        refused(a_case(item(2.05)), "void", "gained 2.05x", "2.00 tokens a forward")
        accepted(a_case(item(2.03)))

    def test_every_draft_accepted(self) -> None:
        known = {"tokens_drafted": 99, "tokens_accepted": 99}
        refused(
            a_case(rounds_drafted=MANY_ROUNDS, **known), "void", "all 99 draft tokens", "known beforehand"
        )
        accepted(a_case(rounds_drafted=MANY_ROUNDS - 1, **known))
        accepted(a_case(rounds_drafted=MANY_ROUNDS, tokens_drafted=99, tokens_accepted=98))
        accepted(a_case(rounds_drafted=MANY_ROUNDS))

    def test_faster_than_memory(self) -> None:
        def case(seconds: float, **changes: Any) -> Case:
            leg = replace(LEG, seconds=seconds)
            return a_case(an_input(legs=(leg,)), floor_seconds=0.5, **changes)

        refused(case(1.59), "void", "4 forwards in 1.590 s", "1.600 s")
        accepted(case(1.61))
        accepted(case(1.59, is_exact_mode=False))

    def test_the_control_held_up(self) -> None:
        def item(beside: float) -> InputCase:
            return an_input(stock_seconds=(beside,) * 6, solo_seconds=(1.0, 1.0, 1.0))

        refused(a_case(item(1.01 + DRIFT_LIMIT)), "void", "slower beside the candidate than alone")
        accepted(a_case(item(0.99 + DRIFT_LIMIT)))

    @pytest.mark.parametrize("later", [1.3, 0.7])
    def test_drift(self, later: float) -> None:
        item = an_input(stock_seconds=(1.0,) * 6 + (later,) * 6)
        verdict = judge(a_case(item))
        assert verdict.outcome == "void"
        assert any(f"took {later:.2f}x" in reason for reason in verdict.reasons)

    @pytest.mark.parametrize("num_pairs", [3, 5])
    def test_drift_is_seen_with_few_pairs(self, num_pairs: int) -> None:
        slower = [1.0 + 0.3 * i for i in range(num_pairs)]
        case = a_case(
            an_input(stock_seconds=tuple(slower)), an_input("code", stock_seconds=(1.0, 1.0, 1.9, 1.9))
        )
        refused(case, "void", "stock drifted")
        accepted(a_case(an_input(stock_seconds=(1.0,) * num_pairs)))

    def test_an_evaluation_cut_short(self) -> None:
        refused(a_case(needs_all=True, num_expected_inputs=3, status="interrupted"), "void", "only 2 of 3")
        refused(a_case(needs_all=True, status="interrupted"), "void", "did not end: interrupted")
        accepted(a_case(status="interrupted"))

    def test_a_control_that_died(self) -> None:
        refused(a_case(status="failed: stock: code: out of memory"), "void", "out of memory")

    def test_a_warm_store_is_only_doubted_while_the_noise_is_unknown(self) -> None:
        warm = an_input(first_seen=1.0, repeats=(1.2,), noise=None)
        refused(a_case(warm), "void", "used again")
        refused(a_case(replace(warm, noise=0.01)), "fail", "used again")

    def test_noise(self) -> None:
        refused(a_case(an_input(noise=NOISE_LIMIT + 0.01)), "void", "too noisy", "26%")
        accepted(a_case(an_input(noise=NOISE_LIMIT)))

    def test_a_fault_is_not_excused_by_doubts(self) -> None:
        refused(a_case(an_input(noise=0.9, first_difference=3)), "fail", "token 3")


@given(
    st.builds(
        an_input, first_difference=st.none() | st.integers(0, 9), noise=st.none() | st.floats(0, 1),
        num_emitted=st.lists(st.integers(9, 10), min_size=1, max_size=3).map(tuple),
        speedups=st.lists(st.floats(0.1, 9), max_size=4).map(tuple),
    ),
    st.none() | st.tuples(st.floats(0.1, 1.5), st.floats(1.5, 9)),
)  # fmt: skip
def test_a_speed_is_shown_only_for_equal_outputs(
    item: InputCase, interval: tuple[float, float] | None
) -> None:
    verdict = judge(a_case(item, interval=interval))
    assert verdict.reasons
    if item.first_difference is not None or set(item.num_emitted) != {10}:
        assert verdict.outcome == "fail"
        assert not verdict.is_speed_shown
    if verdict.is_speed_shown:
        assert verdict.outcome != "void"
