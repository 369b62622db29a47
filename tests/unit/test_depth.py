"""Depth policies: what they choose, what they learn, and a brute-force reference for the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.depth import MAX_DEPTH, CostAwareDepth, FixedDepth, match_bucket
from draftproof.errors import OptionError
from draftproof.record import CostCurve, Decision, Draft

LOOK_TOKENS, LOOK_EVERY = 4, 16
PRIOR_TRIALS = 3.0


def curve(seconds: Sequence[float], context: int = 0) -> CostCurve:
    """One measured figure for each of 1, 2, ... rows."""
    rows = tuple(range(1, len(seconds) + 1))
    return CostCurve(rows=rows, contexts=(context,), seconds=(tuple(seconds),))


FREE = curve([1.0] * (MAX_DEPTH + 1))
COSTLY = curve([float(rows) for rows in range(1, MAX_DEPTH + 2)])


def draft(num_tokens: int, source: str = "computed", match_length: int | None = None) -> Draft:
    return Draft(ids=tuple(range(num_tokens)), source=source, match_length=match_length)


def teach(policy: CostAwareDepth, ids: Draft, emitted: Sequence[int], times: int = 1) -> None:
    """Rounds whose proposal was ``ids`` and whose outcome was ``emitted``."""
    for _ in range(times):
        policy.watch(ids)
        policy.settle(emitted)


def expected_tokens(policy: CostAwareDepth, proposal: Draft, depth: int) -> float:
    """``E(depth)``: what the policy expects where rows are free and any gain will do."""
    free = replace(policy, curve=FREE, advantage=0.0, _ratio={True: 1.0, False: 1.0})
    tokens = free.choose(replace(proposal, ids=proposal.ids[:depth]), 0).expected_tokens
    assert tokens is not None
    return tokens


def probabilities(policy: CostAwareDepth, proposal: Draft) -> list[float]:
    """Acceptance of each position given those before, from the differences of ``E``."""
    tokens = [expected_tokens(policy, proposal, depth) for depth in range(len(proposal.ids) + 1)]
    survival = [1.0, *(b - a for a, b in pairwise(tokens))]
    return [b / a for a, b in pairwise(survival)]


# --- fixed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_depth", "length", "depth"), [(0, 5, 0), (3, 5, 3), (3, 2, 2), (3, 0, 0)])
def test_fixed_depth_is_fixed_up_to_the_draft(max_depth: int, length: int, depth: int) -> None:
    policy = FixedDepth(max_depth)
    assert policy.choose(draft(length), 7) == Decision(depth=depth, reason="fixed")
    assert policy.rate(draft(length), 7) == depth
    assert policy.ask("anything", 7) == max_depth
    assert policy.max_depth == max_depth


def test_fixed_depth_learns_nothing() -> None:
    policy = FixedDepth(4)
    policy.watch(draft(4))
    policy.settle([9])
    policy.observe_cost(5, 0, 1e9)
    policy.observe_drafting(draft(4), 1e9)
    assert policy == FixedDepth(4)
    assert policy.choose(draft(9), 0).depth == 4


def test_negative_depths_are_refused() -> None:
    with pytest.raises(OptionError, match="0 or more, got -1"):
        FixedDepth(-1)
    with pytest.raises(OptionError, match="0 or more, got -3"):
        CostAwareDepth(FREE, max_depth=-3)
    assert CostAwareDepth(FREE, max_depth=0).choose(draft(5), 0).depth == 0
    assert CostAwareDepth(FREE, max_depth=0).ask("computed", 0) == 0


# --- the choice ----------------------------------------------------------------------------------------


def test_nothing_is_verified_where_every_row_costs_a_step() -> None:
    policy = CostAwareDepth(COSTLY)
    best = draft(16, match_length=99)
    teach(policy, best, best.ids, times=200)
    assert policy.choose(best, 0) == Decision(
        depth=0, reason="cost", expected_tokens=1.0, expected_seconds=1.0
    )


def test_everything_is_verified_where_rows_are_free() -> None:
    policy = CostAwareDepth(FREE)
    good = draft(20)
    teach(policy, good, good.ids, times=50)
    assert policy.choose(good, 0).depth == MAX_DEPTH
    assert policy.choose(draft(7), 0).depth == 7
    assert policy.choose(draft(1), 0).depth == 1
    assert policy.choose(draft(0), 0).depth == 0
    assert CostAwareDepth(FREE, max_depth=5).choose(good, 0).depth == 5


@pytest.mark.parametrize("num_wrong_every", [2, 3, 5, 10, 1000])
def test_staircases_are_filled(num_wrong_every: int) -> None:
    """A row count inside a step is as dear as its last one, so only full steps are chosen."""
    policy = CostAwareDepth(curve([1.0] * 4 + [1.8] * 4 + [3.0] * 4))
    good = draft(11)
    for i in range(1, 200):
        teach(policy, good, [99] if i % num_wrong_every == 0 else good.ids)
    assert policy.choose(good, 0).depth in {3, 7, 11}
    assert policy.choose(draft(5), 0).depth in {3, 5}


def test_staircases_are_climbed_as_acceptance_grows() -> None:
    policy = CostAwareDepth(curve([1.0] + [1.2] * 3 + [1.8] * 4 + [2.45] * 4))
    good = draft(11)
    teach(policy, good, [99], times=100)
    found = [policy.choose(good, 0).depth]
    for _ in range(150):
        teach(policy, good, good.ids)
        found.append(policy.choose(good, 0).depth)
    assert found == sorted(found)
    assert set(found) == {0, 3, 7, 11}


def test_the_expectation_behind_a_choice_worked_out() -> None:
    """Priors of a computed draft are 1/2; rows cost 1, 1.1, 1.2, ...: E/C peaks at depth 2."""
    policy = CostAwareDepth(curve([1 + rows / 10 for rows in range(12)]))
    chosen = policy.choose(draft(8), 0)
    assert chosen.depth == 2
    assert chosen.reason == "cost"
    assert chosen.expected_tokens == 1.75
    assert chosen.expected_seconds == pytest.approx(1.2)  # one division away from C
    assert policy.rate(draft(8), 0) == pytest.approx(1.75 / 1.2)


@pytest.mark.parametrize(("gain", "depth"), [(1.02, 0), (1.04, 1)])
def test_a_depth_must_beat_serial_decoding_clearly(gain: float, depth: int) -> None:
    assert CostAwareDepth(curve([1.0, 1.5 / gain])).choose(draft(1), 0).depth == depth
    assert CostAwareDepth(curve([1.0, 1.5 / gain]), advantage=1.0).choose(draft(1), 0).depth == 1
    assert CostAwareDepth(curve([1.0, 1.5 / gain]), advantage=1.1).choose(draft(1), 0).depth == 0


def test_between_depths_any_gain_counts_and_ties_go_to_the_smaller() -> None:
    """The advantage is asked of drafting at all: 1.75/1.16 beats 1.5/1.0 by half a percent."""
    policy = CostAwareDepth(curve([1.0, 1.0, 1.16]))
    assert policy.choose(draft(2), 0).depth == 2
    policy = CostAwareDepth(curve([2.0, 3.0, 3.5]), advantage=0.5)  # 1/2, 1.5/3, 1.75/3.5: all equal
    assert policy.choose(draft(2), 0).depth == 0
    policy = CostAwareDepth(curve([4.0, 3.0, 3.5]))  # 1/4, then 1/2 twice
    assert policy.choose(draft(2), 0).depth == 1


def test_the_cost_at_this_context_counts() -> None:
    """Rows are free over a short context and as dear as steps over a long one."""
    by_context = CostCurve(rows=(1, 17), contexts=(0, 1000), seconds=((1.0, 1.0), (1.0, 17.0)))
    policy = CostAwareDepth(by_context)
    good = draft(16)
    teach(policy, good, good.ids, times=50)
    assert policy.choose(good, 0).depth == 16
    assert policy.choose(good, 1000).depth == 0
    assert policy.rate(good, 0) > policy.rate(good, 1000) == 1.0


# --- what is learned -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match_length", "bucket"),
    [(None, 0), (0, 1), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (8, 4), (9, 5), (10_000, 5)],
)
def test_match_buckets(match_length: int | None, bucket: int) -> None:
    assert match_bucket(match_length) == bucket


def test_before_anything_was_seen_longer_matches_promise_more() -> None:
    policy = CostAwareDepth(FREE)
    tokens = [expected_tokens(policy, draft(d, "s", length), d) for d in (1, 4) for length in (1, 2, 3, 5, 9)]
    assert tokens[:5] == sorted(set(tokens[:5]))
    assert tokens[5:] == sorted(set(tokens[5:]))
    assert probabilities(policy, draft(6)) == pytest.approx([0.5] * 6)
    for length in (1, 2, 3, 5, 9):
        first, second, *later = probabilities(policy, draft(4, "s", length))
        assert first < second, "a continuation that has begun right usually goes on"
        assert later == pytest.approx([second, second])


def test_acceptance_is_a_discounted_count_worked_out() -> None:
    """Half-life 1: right, right, wrong leaves 0.75 successes of 1.75 trials, with 1.5 of 3 before."""
    policy = CostAwareDepth(FREE, half_life=1)
    one = draft(1)
    assert probabilities(policy, one) == [0.5]
    seen = []
    for emitted in ([0], [0], [9]):
        teach(policy, one, emitted)
        seen.append(probabilities(policy, one)[0])
    assert seen == pytest.approx([2.5 / 4, 3 / 4.5, 2.25 / 4.75])


def test_an_observation_counts_half_after_a_half_life() -> None:
    """30 wrongs after one right: the right one weighs 1/2, the trials are a geometric sum."""
    policy = CostAwareDepth(FREE)
    one = draft(1)
    teach(policy, one, [0])
    teach(policy, one, [9], times=30)
    trials = sum(0.5 ** (age / 30) for age in range(31))
    assert probabilities(policy, one)[0] == pytest.approx(
        (0.5 + 0.5 * PRIOR_TRIALS) / (trials + PRIOR_TRIALS)
    )


def test_what_was_never_verified_is_learned_from_all_the_same() -> None:
    """Depth 0 is no dead end: serial tokens settle the proposal, and drafting starts again."""
    policy = CostAwareDepth(curve([1.0] + [1.5] * 16))
    proposal = draft(4)
    teach(policy, proposal, [99], times=50)
    assert policy.choose(proposal, 0).depth == 0
    for _ in range(40):
        policy.watch(proposal)
        for token in proposal.ids:  # one token a round, as depth 0 commits them
            policy.settle([token])
    assert policy.choose(proposal, 0).depth == 4


@pytest.mark.parametrize("rounds", [[[0], [1], [9]], [[0, 1], [9]], [[0], [1, 9]], [[0, 1, 9, 3]]])
def test_how_tokens_fall_into_rounds_does_not_matter(rounds: list[list[int]]) -> None:
    """Two positions right, the third wrong; nothing is known of the fourth."""
    policy = CostAwareDepth(FREE, half_life=1e9)
    proposal = draft(4)
    policy.watch(proposal)
    for emitted in rounds:
        policy.settle(emitted)
    right, wrong = 2.5 / 4, 1.5 / 4
    # Positions 3 and 4 share their counts.
    assert probabilities(policy, proposal) == pytest.approx([right, right, wrong, wrong])
    before = probabilities(policy, proposal)
    policy.settle([3, 3])
    assert probabilities(policy, proposal) == before, "a settled proposal is no longer watched"


def test_after_a_wrong_token_the_rest_of_a_proposal_says_nothing() -> None:
    policy = CostAwareDepth(FREE, half_life=1e9)
    policy.watch(draft(2))
    policy.settle([9, 1])
    assert probabilities(policy, draft(2)) == pytest.approx([1.5 / 4, 0.5])


def test_positions_are_learned_in_groups() -> None:
    """1, 2, 3-4, 5-8, 9 and more: 16 right tokens are 1, 1, 2, 4 and 8 observations."""
    policy = CostAwareDepth(FREE, half_life=1e9)
    teach(policy, draft(16), range(16))
    found = probabilities(policy, draft(16))
    groups = [1] + [1] + [2] * 2 + [4] * 4 + [8] * 8
    assert found == pytest.approx([(n + 1.5) / (n + 3) for n in groups])


def test_several_proposals_are_watched_at_once() -> None:
    """Each from the round it was made in on; the second one round later."""
    policy = CostAwareDepth(FREE, half_life=1e9)
    first, second = replace(draft(2), source="a"), Draft(ids=(1, 5), source="b")
    policy.watch(first)
    policy.settle([0])
    policy.watch(second)
    policy.settle([1])
    policy.settle([7])
    assert probabilities(policy, first) == pytest.approx([2.5 / 4, 2.5 / 4])
    assert probabilities(policy, second) == pytest.approx([2.5 / 4, 1.5 / 4])


def test_sources_and_buckets_are_learned_apart() -> None:
    policy = CostAwareDepth(FREE)
    others = [draft(2, "b"), draft(2, "a", 1), draft(2, "a", 3), draft(2, "a", 9), draft(2, "b", 2)]
    before = [probabilities(policy, other) for other in others]
    teach(policy, draft(2, "a", 2), [9], times=20)
    assert probabilities(policy, draft(2, "a", 2))[0] < 0.1
    assert [probabilities(policy, other) for other in others] == before
    teach(policy, draft(2, "a", 4), [0, 1], times=20)
    assert probabilities(policy, draft(2, "a", 3))[0] > 0.85, "3 and 4 are one bucket"


@pytest.mark.parametrize("rounds", [[[0, 1], [9]], [[0, 1, 9]], [[0], [1, 2, 3]]])
def test_positions_beyond_the_deepest_are_not_waited_for(rounds: list[list[int]]) -> None:
    """Else the ninth token of a long draft would still be awaited rounds later."""
    policy = CostAwareDepth(FREE, max_depth=2, half_life=1e9)
    policy.watch(draft(4))
    for emitted in rounds:
        policy.settle(emitted)
    assert probabilities(policy, draft(2)) == pytest.approx([2.5 / 4, 2.5 / 4])
    wide = replace(policy, max_depth=4)
    assert probabilities(wide, draft(4)) == pytest.approx([2.5 / 4, 2.5 / 4, 0.5, 0.5])


def test_empty_proposals_teach_nothing() -> None:
    policy = CostAwareDepth(FREE)
    teach(policy, draft(0), [1, 2], times=3)
    assert probabilities(policy, draft(3)) == pytest.approx([0.5] * 3)


# --- cost ----------------------------------------------------------------------------------------------


def test_measured_cost_moves_the_curve_by_a_tenth() -> None:
    policy = CostAwareDepth(COSTLY)
    policy.observe_cost(4, 0, 6.0)  # 1.5 times what the curve says
    assert policy.seconds(2, 0) == pytest.approx(2 * 1.05)
    assert policy.seconds(9, 0) == pytest.approx(9 * 1.05)
    assert policy.seconds(1, 0) == 1.0, "one row is corrected apart"
    policy.observe_cost(1, 0, 0.8)
    assert policy.seconds(1, 0) == pytest.approx(0.98)
    assert policy.seconds(2, 0) == pytest.approx(2 * 1.05)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_outliers_in_cost_are_clipped(num_rows: int) -> None:
    for seconds, ratio in ((1e9, 1.1), (1e-9, 0.95)):
        policy = CostAwareDepth(COSTLY)
        policy.observe_cost(num_rows, 0, seconds)
        assert policy.seconds(num_rows, 0) == pytest.approx(num_rows * ratio)


def test_measured_cost_is_compared_at_its_own_context() -> None:
    by_context = CostCurve(rows=(1, 2), contexts=(0, 100), seconds=((1.0, 2.0), (3.0, 6.0)))
    policy = CostAwareDepth(by_context)
    policy.observe_cost(2, 100, 6.0)
    policy.observe_cost(1, 100, 3.0)
    assert [policy.seconds(n, 0) for n in (1, 2)] == pytest.approx([1.0, 2.0])


def test_rows_that_turn_out_costly_end_drafting() -> None:
    policy = CostAwareDepth(curve([1.0] + [1.3] * 16))
    assert policy.choose(draft(4), 0).depth == 4
    for _ in range(50):
        policy.observe_cost(5, 0, 2.6)
    assert policy.seconds(5, 0) == pytest.approx(2.6, rel=0.01)
    assert policy.choose(draft(4), 0).depth == 0


# --- drafters that cost --------------------------------------------------------------------------------


def costly_policy(each: float, **options: float) -> CostAwareDepth:
    return CostAwareDepth(FREE, draft_seconds={"model": each}, **options)  # type: ignore[arg-type]


def test_free_drafters_are_always_asked_for_everything() -> None:
    policy = costly_policy(1e9)
    assert {policy.ask("suffix", 0) for _ in range(40)} == {MAX_DEPTH}


def test_a_drafter_that_costs_too_much_is_looked_at_now_and_then() -> None:
    policy = costly_policy(1e9)
    asked = [policy.ask("model", 0) for _ in range(3 * LOOK_EVERY)]
    look = [LOOK_TOKENS] + [0] * (LOOK_EVERY - 1)
    assert asked == look * 3


def test_a_look_is_no_deeper_than_the_deepest() -> None:
    policy = CostAwareDepth(FREE, max_depth=2, draft_seconds={"model": 1e9})
    assert [policy.ask("model", 0) for _ in range(3)] == [2, 0, 0]


def test_a_look_does_not_shorten_what_pays() -> None:
    policy = costly_policy(1e-9)
    teach(policy, draft(16, "model"), range(16), times=50)
    assert {policy.ask("model", 0) for _ in range(40)} == {MAX_DEPTH}


def test_drafting_is_paid_for_worked_out() -> None:
    """Acceptance 1/2, rows free, 0.2 a token: 1.5/1.2, 1.75/1.4, 1.875/1.6: one token, the first best."""
    policy = costly_policy(0.2)
    assert [policy.ask("model", 0) for _ in range(3)] == [LOOK_TOKENS, 1, 1]
    assert policy.rate(draft(1, "model"), 0) == pytest.approx(1.5 / 1.2)
    assert policy.rate(draft(3, "model"), 0) == pytest.approx(1.875 / 1.6)
    assert policy.rate(draft(3, "suffix"), 0) == pytest.approx(1.875)


def test_drafting_too_must_beat_serial_decoding_clearly() -> None:
    """1.5 tokens in 1.45 are a gain of 3.4 percent, in 1.47 of 2 percent."""
    policies = [costly_policy(each, max_depth=1) for each in (0.45, 0.47)]
    assert [[policy.ask("model", 0) for _ in range(2)][1] for policy in policies] == [1, 0]


def test_the_time_a_draft_took_is_learned_a_token() -> None:
    policy = costly_policy(1.0)
    policy.observe_drafting(draft(4, "model"), 8.0)
    assert policy.draft_seconds == {"model": pytest.approx(1.2)}
    policy.observe_drafting(draft(0, "model"), 8.0)
    policy.observe_drafting(draft(4, "suffix"), 8.0)
    assert policy.draft_seconds == {"model": pytest.approx(1.2)}


def test_a_drafter_that_becomes_cheap_is_asked_again() -> None:
    policy = costly_policy(10.0)
    assert [policy.ask("model", 0) for _ in range(2)] == [LOOK_TOKENS, 0]
    for _ in range(60):
        policy.observe_drafting(draft(4, "model"), 4e-3)
    assert policy.ask("model", 0) > 0


# --- against brute force -------------------------------------------------------------------------------


SECONDS = st.floats(1e-4, 10.0)
LESSONS = st.lists(
    st.tuples(
        st.sampled_from([("a", None), ("a", 1), ("a", 9), ("b", None)]),
        st.integers(1, 18),  # tokens proposed
        st.integers(0, 18),  # of which right
    ),
    max_size=30,
)


def brute_force(policy: CostAwareDepth, proposal: Draft, context: int, each: float) -> tuple[int, float]:
    """The depth with the most tokens a second, and the rate, from ``E`` and ``C`` alone."""
    deepest = min(policy.max_depth, len(proposal.ids))
    rates = [
        expected_tokens(policy, proposal, depth) / (policy.seconds(depth + 1, context) + depth * each)
        for depth in range(deepest + 1)
    ]
    best = max(rates)
    chosen = rates.index(best)
    return (chosen, best) if best > rates[0] * policy.advantage else (0, rates[0])


@settings(max_examples=150, deadline=None)
@given(
    seconds=st.lists(SECONDS, min_size=17, max_size=17),
    lessons=LESSONS,
    costs=st.lists(st.tuples(st.integers(1, 17), SECONDS), max_size=5),
    max_depth=st.integers(0, 16),
    length=st.integers(0, 20),
    source=st.sampled_from([("a", None), ("a", 1), ("a", 9), ("b", None), ("b", 4)]),
    each=st.floats(0.0, 1.0),
)
def test_the_choice_is_the_best_of_all_depths(
    seconds: list[float], lessons: list[tuple[tuple[str, int | None], int, int]],
    costs: list[tuple[int, float]], max_depth: int, length: int, source: tuple[str, int | None], each: float,
) -> None:  # fmt: skip
    policy = CostAwareDepth(curve(seconds), max_depth=max_depth, draft_seconds={"a": each})
    for (name, match_length), num_tokens, num_right in lessons:
        teach(policy, draft(num_tokens, name, match_length), [*range(num_right), 99])
    for num_rows, took in costs:
        policy.observe_cost(num_rows, 0, took)
    proposal = draft(length, *source)
    best, rate = brute_force(policy, proposal, 0, each=0.0)
    chosen = policy.choose(proposal, 0)
    assert chosen.depth == best
    assert chosen.depth <= min(length, max_depth)
    assert chosen.expected_tokens == expected_tokens(policy, proposal, best)
    assert chosen.expected_seconds == pytest.approx(policy.seconds(best + 1, 0))
    assert chosen.expected_tokens / chosen.expected_seconds == pytest.approx(rate)
    policy.ask("a", 0)  # the first one is a look
    assert policy.ask("a", 0) == brute_force(policy, draft(max_depth, "a"), 0, each)[0]
    assert policy.ask("b", 0) == max_depth
