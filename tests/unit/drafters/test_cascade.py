"""Which proposal the cascade takes, whom it asks, and what it tells the others and the policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftproof.depth import CostAwareDepth, FixedDepth
from draftproof.drafters.base import Drafter
from draftproof.drafters.cascade import Cascade
from draftproof.record import CostCurve, Decision, Draft

LOOK_EVERY = 16
FREE = CostCurve(rows=(1, 17), contexts=(0,), seconds=((1.0, 1.0),))


class Fake:
    """Proposes ``ids``, cut to what is asked for, and logs every call."""

    def __init__(self, name: str, ids: Sequence[int] = (1, 2, 3)) -> None:
        self.name = name
        self.ids = tuple(ids)
        self.asked: list[int] = []
        self.prompts: list[list[int]] = []
        self.observed: list[list[int]] = []

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self.prompts.append(list(prompt_ids))

    def observe(self, token_ids: Sequence[int]) -> None:
        self.observed.append(list(token_ids))

    def propose(self, max_tokens: int) -> Draft:
        self.asked.append(max_tokens)
        return Draft(ids=self.ids[:max_tokens], source=self.name)


class Rates:
    """A policy that rates drafts by ``rates`` of their source and wants ``wanted`` tokens of a source."""

    max_depth = 8

    def __init__(self, rates: dict[str, float], wanted: int = 8) -> None:
        self.rates, self.wanted = rates, wanted
        self.watched: list[str] = []
        self.contexts: set[int] = set()
        self.asked: list[tuple[str, int]] = []

    def choose(self, draft: Draft, context: int) -> Decision:
        raise AssertionError("the decode loop chooses")

    def rate(self, draft: Draft, context: int) -> float:
        self.contexts.add(context)
        return self.rates[draft.source]

    def ask(self, source: str, context: int) -> int:
        self.asked.append((source, context))
        return self.wanted

    def watch(self, draft: Draft) -> None:
        self.watched.append(draft.source)

    def settle(self, emitted: Sequence[int]) -> None:
        raise AssertionError("the decode loop settles")

    def observe_cost(self, num_rows: int, context: int, seconds: float) -> None:
        raise AssertionError("the decode loop measures")

    def observe_drafting(self, draft: Draft, seconds: float) -> None:
        raise AssertionError("the decode loop measures")


def cascade(cheap: Sequence[Drafter], costly: Sequence[Drafter], policy: Rates) -> Cascade:
    made = Cascade(cheap, costly, policy)
    made.reset([9] * 5)
    return made


def test_is_a_drafter_named_auto() -> None:
    made = Cascade([], [], FixedDepth(1))
    assert isinstance(made, Drafter)
    assert made.name == "auto"
    made.reset([1])
    assert made.propose(4) == Draft(ids=(), source="auto")


@pytest.mark.parametrize(
    ("rates", "winner"),
    [
        ({"a": 1.0, "b": 2.0, "m": 0.5}, "b"),
        ({"a": 3.0, "b": 2.0, "m": 0.5}, "a"),
        ({"a": 1.0, "b": 2.0, "m": 2.5}, "m"),
        ({"a": 2.0, "b": 2.0, "m": 2.0}, "a"),  # ties go to the first
    ],
)
def test_the_proposal_with_the_highest_rate_wins_and_the_others_are_watched(
    rates: dict[str, float], winner: str
) -> None:
    policy = Rates(rates)
    drafters = {name: Fake(name, ids) for name, ids in (("a", (1,)), ("b", (2,)), ("m", (3,)))}
    made = cascade([drafters["a"], drafters["b"]], [drafters["m"]], policy)
    assert made.propose(8) == Draft(ids=drafters[winner].ids, source=winner)
    assert sorted(policy.watched) == sorted({"a", "b", "m"} - {winner})


def test_equal_proposals_of_two_drafters_are_two_proposals() -> None:
    """The loser is told from the winner by identity: one of the two is watched here, the other later."""
    policy = Rates({"a": 1.0})
    made = cascade([Fake("a"), Fake("a")], [], policy)
    assert made.propose(8).ids == (1, 2, 3)
    assert policy.watched == ["a"]


def test_empty_proposals_take_no_part() -> None:
    policy = Rates({"b": 0.1})
    made = cascade([Fake("a", ()), Fake("b")], [Fake("m", ())], policy)
    assert made.propose(8).source == "b"
    assert policy.watched == []


def test_nobody_proposes_anything() -> None:
    policy = Rates({})
    made = cascade([Fake("a", ())], [Fake("m", ())], policy)
    assert made.propose(8) == Draft(ids=(), source="auto")
    assert policy.watched == []


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "asked"), [(8, 3, 3), (6, 8, 6), (2, 8, 4), (0, 8, 4), (0, 3, 3)]
)
def test_the_costly_are_asked_for_what_the_policy_wants_of_them(
    wanted: int, max_tokens: int, asked: int
) -> None:
    cheap, costly = Fake("a"), Fake("m")
    policy = Rates({"a": 1.0, "m": 2.0}, wanted)
    made = cascade([cheap], [costly], policy)
    made.propose(max_tokens)
    assert cheap.asked == [max_tokens]
    assert costly.asked == [asked]  # the first round is a look: at least four tokens
    made.propose(max_tokens)
    assert costly.asked[1:] == [min(wanted, max_tokens)]
    assert policy.asked == [("m", 5)] * 2


def test_the_costly_are_always_asked_where_retrieval_has_nothing() -> None:
    costly = Fake("m")
    made = cascade([Fake("a", ())], [costly], Rates({"m": 0.001}))
    assert [made.propose(4).source for _ in range(40)] == ["m"] * 40
    assert costly.asked == [4] * 40


def test_the_costly_rest_while_retrieval_is_better_but_for_a_look() -> None:
    costly = Fake("m")
    made = cascade([Fake("a")], [costly], Rates({"a": 2.0, "m": 1.0}))
    is_asked = []
    for _ in range(3 * LOOK_EVERY):
        before = len(costly.asked)
        assert made.propose(4).source == "a"
        is_asked.append(len(costly.asked) > before)
    assert is_asked == ([True] + [False] * (LOOK_EVERY - 1)) * 3


def test_the_costly_are_asked_while_they_are_no_worse() -> None:
    policy = Rates({"a": 2.0, "m": 2.0})
    costly = Fake("m")
    made = cascade([Fake("a")], [costly], policy)
    for _ in range(5):
        made.propose(4)
    assert len(costly.asked) == 5
    policy.rates["a"] = 1.0
    assert made.propose(4).source == "m"
    policy.rates["a"] = 3.0  # above what the costly one gave last
    assert made.propose(4).source == "a"
    assert len(costly.asked) == 6
    policy.rates["a"] = 1.5  # below it again
    assert made.propose(4).source == "m"
    assert len(costly.asked) == 7


def test_several_costly_ones_are_remembered_apart() -> None:
    good, bad = Fake("good"), Fake("bad")
    made = cascade([Fake("a")], [bad, good], Rates({"a": 2.0, "good": 3.0, "bad": 1.0}))
    assert [made.propose(4).source for _ in range(10)] == ["good"] * 10
    assert (len(good.asked), len(bad.asked)) == (10, 1)


def test_a_new_request_forgets_the_last_one() -> None:
    policy = Rates({"a": 2.0, "m": 1.0})
    costly = Fake("m")
    made = cascade([Fake("a")], [costly], policy)
    made.propose(4)
    made.propose(4)
    assert len(costly.asked) == 1
    made.reset([8, 8])
    asked = []
    for _ in range(LOOK_EVERY + 1):
        made.propose(4)
        asked.append(len(costly.asked) - 1)
    assert asked == [1] * LOOK_EVERY + [2], "its first round is a first round again"
    assert policy.contexts == {5, 2}
    made.reset([8])
    costly.ids = ()
    made.propose(4)
    costly.ids = (1,)
    made.propose(4)
    assert len(costly.asked) == 5, "what it gave in the last request counts no more"


def test_every_drafter_is_told_everything() -> None:
    drafters = [Fake("a"), Fake("b"), Fake("m")]
    policy = Rates({"a": 3.0, "b": 2.0, "m": 1.0})
    made = cascade(drafters[:2], drafters[2:], policy)
    made.observe([1, 2])
    made.observe([3])
    made.propose(4)
    for drafter in drafters:
        assert drafter.prompts == [[9] * 5]
        assert drafter.observed == [[1, 2], [3]]
    assert policy.contexts == {8}


def test_it_works_with_the_real_policies() -> None:
    """Fixed: the longer one. Cost-aware: the one that has been right."""
    made = Cascade([Fake("a", (1,)), Fake("b", (1, 2))], [], FixedDepth(4))
    made.reset([0])
    assert made.propose(4).source == "b"
    policy = CostAwareDepth(FREE)
    made = Cascade([Fake("a", (1, 1)), Fake("b", (2, 2))], [], policy)
    made.reset([0])
    for _ in range(10):
        policy.watch(made.propose(4))
        policy.settle([2, 2])
    assert made.propose(4).source == "b"
    for _ in range(30):
        policy.watch(made.propose(4))
        policy.settle([1, 1])
    assert made.propose(4).source == "a"
