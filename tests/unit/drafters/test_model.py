"""The computing drafter on fake models: what it drafts, what its cache holds, what it never exceeds."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from draftproof.decode import Decoding, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.base import Drafter
from draftproof.drafters.model import ModelDrafter, check_vocabulary
from draftproof.errors import DrafterError
from draftproof.record import Draft
from draftproof.rules import Rules, RuleSet
from draftproof.testing import FakeClock, TableSession, TableTarget

PROMPT = [3, 1, 2]


class Recorded(TableTarget):
    """A table target that keeps the sessions it opened, with the capacity asked for."""

    def __init__(self, vocab_size: int = 8, **options: int) -> None:
        super().__init__(vocab_size, **options)
        self.sessions: list[TableSession] = []
        self.capacities: list[int] = []

    def open(self, capacity: int) -> TableSession:
        self.capacities.append(capacity)
        self.sessions.append(super().open(capacity))
        return self.sessions[-1]


def greedy(model: TableTarget, context: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    out: list[int] = []
    for _ in range(num_tokens):
        out.append(int(model.logits([*context, *out]).argmax()))
    return tuple(out)


def started(model: TableTarget, capacity: int = 100) -> tuple[ModelDrafter, TableSession]:
    """After the prompt and its first token, as the decode loop starts."""
    drafter = ModelDrafter(model, capacity)
    drafter.reset(PROMPT)
    drafter.observe([0])
    session = drafter._session
    assert isinstance(session, TableSession)
    return drafter, session


def test_is_a_drafter_with_the_name_given() -> None:
    assert isinstance(ModelDrafter(TableTarget(), 9), Drafter)
    assert ModelDrafter(TableTarget(), 9).name == "draft_model"
    drafter = ModelDrafter(TableTarget(), 100, name="early_exit")
    drafter.reset(PROMPT)
    drafter.observe([0])
    assert drafter.propose(2).source == "early_exit"


def test_drafts_the_models_greedy_continuation() -> None:
    model = TableTarget()
    drafter, session = started(model)
    assert drafter.propose(5) == Draft(ids=greedy(model, [*PROMPT, 0], 5), source="draft_model")
    assert session.num_rows == 5, "the last draft token is not run"


@pytest.mark.parametrize("max_rows", [2, 3, 8])
@pytest.mark.parametrize("depth", [1, 4, 7])
@pytest.mark.parametrize("seed", [0, 5])
def test_rows_are_kept_and_dropped_as_tokens_turn_out(max_rows: int, depth: int, seed: int) -> None:
    """Whatever is committed: the cache holds the context and the next draft is the model's own."""
    rng = Random(seed)
    model = Recorded(4, max_rows=max_rows)
    drafter, session = started(model)
    context = [*PROMPT, 0]
    for _ in range(12):
        draft = drafter.propose(depth)
        assert session.tokens == context
        assert draft.ids == greedy(model, context, min(depth, max_rows - 1))
        # Right up to some token, then another one; sometimes more than was drafted.
        num_right = rng.randrange(len(draft.ids) + 1)
        emitted = [*draft.ids[:num_right], *[rng.randrange(4) for _ in range(rng.randrange(1, 4))]]
        split = rng.randrange(len(emitted) + 1)
        drafter.observe(emitted[:split])
        drafter.observe(emitted[split:])
        context += emitted
    assert model.sessions == [session]


@pytest.mark.parametrize(("num_right", "num_rows"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)])
def test_right_rows_are_not_run_again(num_right: int, num_rows: int) -> None:
    """Of four draft tokens the first three are in the cache; only what differs or is missing is run."""
    drafter, session = started(TableTarget())
    draft = drafter.propose(4)
    wrong = (draft.ids[num_right] + 1) % 8 if num_right < 4 else 5
    drafter.observe([*draft.ids[:num_right], wrong])
    before = session.num_rows
    drafter.propose(1)
    assert session.num_rows - before == num_rows


def test_rounds_without_a_draft_are_caught_up() -> None:
    """Pending rows survive rounds in which nothing was asked for."""
    model = TableTarget(max_rows=4)
    drafter, session = started(model)
    draft = drafter.propose(3)
    context = [*PROMPT, 0]
    for token in (*draft.ids, 1, 2, 3, 4, 5):
        assert drafter.propose(0) == Draft(ids=(), source="draft_model")
        drafter.observe([token])
        context.append(token)
    assert session.tokens == [*PROMPT, 0]
    assert drafter.propose(3).ids == greedy(model, context, 3)
    assert session.tokens == context


def test_nothing_is_proposed_before_a_new_token() -> None:
    """Right after the prompt, and twice in one round: there is no row to read the next token from."""
    drafter = ModelDrafter(TableTarget(), 100)
    assert drafter.propose(3).ids == ()
    drafter.reset(PROMPT)
    assert drafter.propose(3).ids == ()
    drafter.observe([0])
    assert len(drafter.propose(3).ids) == 3
    assert drafter.propose(3).ids == ()
    drafter.observe([7])
    assert drafter.propose(3).ids == greedy(TableTarget(), [*PROMPT, 0, 7], 3)


def test_a_new_request_starts_afresh() -> None:
    model = Recorded()
    drafter, _ = started(model)
    drafter.propose(4)
    drafter.observe([1, 2])
    drafter.reset([5, 6])
    drafter.observe([7])
    assert drafter.propose(3).ids == greedy(model, [5, 6, 7], 3)
    assert [session.tokens for session in model.sessions] == [[*PROMPT, 0], [5, 6, 7]]


def test_rows_of_the_last_request_are_no_rows_of_this_one() -> None:
    """The same tokens again, but in a new cache that has none of them."""
    model = TableTarget()
    drafter, _ = started(model)
    draft = drafter.propose(4)
    drafter.reset(PROMPT)
    drafter.observe([*draft.ids, 0])
    assert drafter.propose(3).ids == greedy(model, [*PROMPT, *draft.ids, 0], 3)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5])
def test_never_more_rows_than_the_model_takes(max_rows: int) -> None:
    """The session refuses more. A model of one row cannot run a draft: nothing is drafted."""
    drafter, _ = started(TableTarget(max_rows=max_rows))
    assert len(drafter.propose(16).ids) == max_rows - 1
    drafter.observe(list(range(8)) * 3)
    assert len(drafter.propose(16).ids) == max_rows - 1


# --- room ----------------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_drafts_nothing() -> None:
    model = Recorded()
    for capacity in (2, 3):
        drafter = ModelDrafter(model, capacity)
        drafter.reset(PROMPT)
        drafter.observe([0])
        assert drafter.propose(4) == Draft(ids=(), source="draft_model")
    assert model.sessions == []
    drafter = ModelDrafter(model, 6)
    for prompt, num_drafted in (([1], 1), ([1] * 6, 0), ([2], 1)):  # the same drafter for all
        drafter.reset(prompt)
        drafter.observe([0])
        assert len(drafter.propose(1).ids) == num_drafted


def test_a_short_context_of_the_model_counts_as_capacity() -> None:
    model = Recorded(max_context=6)
    drafter, _ = started(model)
    assert model.capacities == [6]
    assert len(drafter.propose(2).ids) == 2
    drafter = ModelDrafter(model, 5)
    drafter.reset(PROMPT)
    assert model.capacities == [6, 5]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drafting_ends_where_the_context_is_full(depth: int) -> None:
    """It drafts as long as context and draft fit, then never again, and never overflows the cache."""
    model = TableTarget()
    capacity = 14
    drafter, _ = started(model, capacity)
    context = [*PROMPT, 0]
    lengths = []
    while len(context) < 20:
        draft = drafter.propose(depth)
        lengths.append((len(context), len(draft.ids)))
        if draft.ids:
            assert draft.ids == greedy(model, context, depth)
        context.append(5)
        drafter.observe([5])
    assert lengths == [(n, depth if n + depth <= capacity else 0) for n, _ in lengths]


# --- with the decode loop ------------------------------------------------------------------------------


def decode(target: TableTarget, drafter: ModelDrafter, depth: int, num_tokens: int) -> list[tuple[int, int]]:
    rules = Rules(RuleSet(max_new_tokens=num_tokens), PROMPT, torch.device("cpu"))
    run = Decoding(session=target.open(200), rules=rules, clock=FakeClock(), max_rows=target.max_rows)
    context = list(PROMPT)
    counts = []
    for round_ in speculate(run, PROMPT, drafter, FixedDepth(depth)):
        session = drafter._session
        if round_.index:
            assert isinstance(session, TableSession)
            if round_.num_offered:
                assert session.tokens == context, "before the round's tokens"
            counts.append((round_.num_drafted, round_.num_accepted))
        context += round_.emitted
    assert tuple(context[len(PROMPT) :]) == greedy(target, PROMPT, num_tokens)
    return counts


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_the_target_itself_is_always_right(depth: int) -> None:
    target = TableTarget()
    counts = decode(target, ModelDrafter(target, 200), depth, 40)
    assert [accepted for _, accepted in counts] == [drafted for drafted, _ in counts]
    assert len(counts) == -(-39 // (depth + 1))


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_another_model_is_sometimes_wrong_and_does_no_harm(depth: int) -> None:
    counts = decode(TableTarget(3), ModelDrafter(TableTarget(3, seed=9), 200), depth, 60)
    assert 0 < sum(accepted for _, accepted in counts) < sum(drafted for drafted, _ in counts)


# --- vocabulary ----------------------------------------------------------------------------------------


def test_other_vocabularies_are_refused() -> None:
    check_vocabulary(TableTarget(8), TableTarget(8, seed=3))
    for size in (7, 9):
        with pytest.raises(DrafterError, match=rf"vocabulary has {size} entries, the target's 8"):
            check_vocabulary(TableTarget(8), TableTarget(size))
