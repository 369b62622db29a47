"""The fakes themselves: a target that misses one token, or forgives one, would pass every other test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftproof.drafters.base import Drafter
from draftproof.errors import RollbackError
from draftproof.record import Draft
from draftproof.testing import FakeClock, ScriptedDrafter, TableTarget

PREFIX = [3, 1, 4, 1, 5]


def test_logits_depend_on_every_token_its_place_and_the_seed() -> None:
    target = TableTarget(8)
    base = target.logits(PREFIX)
    assert base.shape == (8,)
    assert base.dtype == torch.float32
    changed = [[*PREFIX[:i], 7, *PREFIX[i + 1 :]] for i in range(len(PREFIX))]
    others = [*changed, PREFIX[::-1], PREFIX[1:], [*PREFIX, 0], [31, 4, 1, 5], []]
    assert all(not torch.equal(base, target.logits(other)) for other in others)
    assert not torch.equal(base, TableTarget(8, seed=1).logits(PREFIX))


def test_logits_are_the_same_every_time() -> None:
    assert torch.equal(TableTarget(8).logits(PREFIX), TableTarget(8).logits(tuple(PREFIX)))
    assert TableTarget(8).logits(PREFIX).argmax() == TableTarget(8).logits(PREFIX).argmax()


def test_targets_differ_enough_that_wrong_prefixes_choose_wrong_tokens() -> None:
    """Over many prefixes a shifted one agrees about as often as chance: one in eight."""
    target = TableTarget(8)
    prefixes = [[i, *PREFIX] for i in range(200)]
    agree = sum(int(target.logits(p).argmax() == target.logits(p[:-1]).argmax()) for p in prefixes)
    assert agree < 60
    assert len({int(target.logits(p).argmax()) for p in prefixes}) == 8


@pytest.mark.parametrize("period", [1, 2, 4])
def test_a_period_looks_back_so_far_and_no_further(period: int) -> None:
    target = TableTarget(8, period=period)
    changed = [[*PREFIX[:i], 7, *PREFIX[i + 1 :]] for i in range(len(PREFIX))]
    is_same = [torch.equal(target.logits(PREFIX), target.logits(other)) for other in changed]
    assert is_same == [True] * (5 - period) + [False] * period


def test_a_tie_ties_the_first_two() -> None:
    logits = TableTarget(8, tie=True).logits(PREFIX)
    assert logits[0] == logits[1] == logits.max()
    assert (logits == logits.max()).sum() == 2
    assert logits.argmax() == 0


def test_a_target_declares_itself() -> None:
    target = TableTarget(5, max_context=99, max_rows=3)
    assert (target.name, target.vocab_size, target.max_context, target.max_rows) == ("table", 5, 99, 3)
    assert target.nbytes == 0


# --- sessions ------------------------------------------------------------------------------------------


def test_a_session_gives_the_targets_logits_row_by_row() -> None:
    target = TableTarget(8)
    session = target.open(20)
    assert torch.equal(session.prefill(PREFIX), target.logits(PREFIX))
    assert session.tokens == PREFIX
    rows = session.verify([2, 6, 7])
    assert rows.shape == (3, 8)
    for row, fed in enumerate(([2], [2, 6], [2, 6, 7])):
        assert torch.equal(rows[row], target.logits([*PREFIX, *fed]))
    assert (session.tokens, session.num_cached) == (PREFIX, 5), "rows are pending"


def test_verifying_again_appends_to_the_pending_rows() -> None:
    target = TableTarget(8)
    session = target.open(20)
    session.prefill(PREFIX)
    session.verify([2, 6])
    assert torch.equal(session.verify([7])[0], target.logits([*PREFIX, 2, 6, 7]))
    session.commit(3)
    assert session.tokens == [*PREFIX, 2, 6, 7]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3])
def test_a_commit_keeps_the_first_rows_and_drops_the_rest(num_rows: int) -> None:
    target = TableTarget(8)
    session = target.open(20)
    session.prefill(PREFIX)
    session.verify([2, 6, 7])
    session.commit(num_rows)
    kept = [*PREFIX, *[2, 6, 7][:num_rows]]
    assert (session.tokens, session.num_cached) == (kept, len(kept))
    assert torch.equal(session.verify([0])[0], target.logits([*kept, 0]))
    with pytest.raises(RollbackError, match="cannot commit 2 of 1"):
        session.commit(2)


def test_forwards_and_rows_are_counted_the_prompt_apart() -> None:
    session = TableTarget(8).open(20)
    session.prefill(PREFIX)
    assert (session.num_forwards, session.num_rows) == (0, 0)
    session.verify([1, 2, 3])
    session.verify([4])
    session.commit(1)
    assert (session.num_forwards, session.num_rows) == (2, 4)


def test_sessions_share_nothing() -> None:
    target = TableTarget(8)
    one, two = target.open(20), target.open(20)
    one.prefill(PREFIX)
    one.verify([1])
    assert (two.num_cached, two.num_forwards) == (0, 0)
    two.prefill([1])
    assert one.tokens == PREFIX


def test_the_callers_prompt_is_not_kept() -> None:
    prompt = list(PREFIX)
    session = TableTarget(8).open(20)
    session.prefill(prompt)
    session.verify([9])
    session.commit(1)
    assert prompt == PREFIX


def test_misuse_is_refused() -> None:
    session = TableTarget(8, max_rows=3).open(9)
    session.prefill(PREFIX)
    with pytest.raises(RollbackError, match="empty cache"):
        session.prefill([1])
    with pytest.raises(RollbackError, match="cannot commit 1 of 0"):
        session.commit(1)
    with pytest.raises(RollbackError, match="too many rows"):
        session.verify([1, 2, 3, 4])
    session.verify([1, 2, 3])
    with pytest.raises(RollbackError, match="too many rows"):
        session.verify([4])
    with pytest.raises(RollbackError, match="cannot commit -1"):
        session.commit(-1)
    session.commit(3)
    session.verify([4])
    with pytest.raises(RollbackError, match="cache full"):
        session.verify([5])
    session.commit(1)
    assert session.tokens == [*PREFIX, 1, 2, 3, 4], "refused calls changed nothing"
    assert session.num_forwards == 2


# --- drafter and clock ---------------------------------------------------------------------------------


def test_a_scripted_drafter_says_what_its_script_says() -> None:
    calls: list[tuple[list[int], int]] = []

    def script(context: Sequence[int], max_tokens: int) -> Sequence[int]:
        calls.append((list(context), max_tokens))
        return [7, 8, 9]

    drafter = ScriptedDrafter(script)
    assert isinstance(drafter, Drafter)
    drafter.reset([1, 2])
    drafter.observe((3, 4))
    drafter.observe([5])
    assert drafter.propose(2) == Draft(ids=(7, 8), source="scripted")
    assert drafter.propose(0) == Draft(ids=(), source="scripted")
    assert drafter.propose(9).ids == (7, 8, 9)
    drafter.reset([6])
    drafter.propose(1)
    assert calls == [([1, 2, 3, 4, 5], 2), ([1, 2, 3, 4, 5], 0), ([1, 2, 3, 4, 5], 9), ([6], 1)]


def test_a_fake_clock_ticks_by_itself_and_when_told() -> None:
    clock = FakeClock(tick_ns=10)
    assert [clock.now_ns(), clock.now_ns()] == [10, 20]
    clock.advance(500)
    assert clock.now_ns() == 530
    assert FakeClock().now_ns() == 1000
