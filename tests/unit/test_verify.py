"""The accept rule on drafts small enough to read, then on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from draftproof.verify import Walk, walk

Call = tuple[str, int]


class Target:
    """Chooses ``choices[row]``, is done after ``num_until_done`` tokens, and logs every call."""

    def __init__(self, choices: Sequence[int], num_until_done: int | None = None) -> None:
        self._choices, self._left = choices, num_until_done
        self.calls: list[Call] = []

    def choose(self, row: int) -> int:
        self.calls.append(("choose", row))
        return self._choices[row]

    def push(self, token: int) -> bool:
        self.calls.append(("push", token))
        if self._left is not None:
            self._left -= 1
        return self._left == 0


def test_all_right_earns_the_bonus() -> None:
    target = Target([5, 6, 7])
    assert walk([5, 6], target.choose, target.push) == Walk(num_accepted=2, emitted=(5, 6, 7), is_done=False)
    assert target.calls == [
        ("choose", 0), ("push", 5), ("choose", 1), ("push", 6), ("choose", 2), ("push", 7)
    ]  # fmt: skip


def test_the_first_wrong_token_is_replaced_and_ends_the_round() -> None:
    """Row 2 is computed behind a wrong token: it is never asked for, though it would agree."""
    target = Target([5, 9, 7])
    assert walk([5, 6], target.choose, target.push) == Walk(num_accepted=1, emitted=(5, 9), is_done=False)
    assert target.calls == [("choose", 0), ("push", 5), ("choose", 1), ("push", 9)]


def test_a_wrong_start_emits_one_token() -> None:
    target = Target([1, 6, 7])
    assert walk([5, 6], target.choose, target.push) == Walk(num_accepted=0, emitted=(1,), is_done=False)
    assert target.calls == [("choose", 0), ("push", 1)]


def test_no_draft_is_serial_decoding() -> None:
    target = Target([4])
    assert walk((), target.choose, target.push) == Walk(num_accepted=0, emitted=(4,), is_done=False)
    assert target.calls == [("choose", 0), ("push", 4)]


@pytest.mark.parametrize(
    ("num_until_done", "expected"),
    [
        (1, Walk(num_accepted=1, emitted=(5,), is_done=True)),
        (2, Walk(num_accepted=2, emitted=(5, 6), is_done=True)),
        (3, Walk(num_accepted=2, emitted=(5, 6, 7), is_done=True)),
    ],
)
def test_an_output_that_ends_inside_the_draft_has_no_bonus(num_until_done: int, expected: Walk) -> None:
    target = Target([5, 6, 7], num_until_done)
    assert walk([5, 6], target.choose, target.push) == expected
    assert len(target.calls) == 2 * num_until_done


def test_a_replacement_can_end_the_output() -> None:
    target = Target([5, 9, 7], num_until_done=2)
    assert walk([5, 6], target.choose, target.push) == Walk(num_accepted=1, emitted=(5, 9), is_done=True)


def test_a_token_is_pushed_before_the_next_row_is_asked_for() -> None:
    """Choices may depend on what was pushed; here each is the sum of the tokens so far."""
    pushed = [1]

    def push(token: int) -> bool:
        pushed.append(token)
        return False

    assert walk([1, 2, 4, 9], lambda _: sum(pushed), push).emitted == (1, 2, 4, 8)


def test_every_small_draft_emits_the_serial_output() -> None:
    """All drafts of up to 3 of 2 tokens, all choices, all ends: the emitted tokens are the choices."""
    num_seen = 0
    for length in range(4):
        for draft in product((0, 1), repeat=length):
            for choices in product((0, 1), repeat=length + 1):
                for num_until_done in (*range(1, length + 2), None):
                    target = Target(choices, num_until_done)
                    done = walk(draft, target.choose, target.push)
                    num_equal = next((i for i in range(length) if draft[i] != choices[i]), length)
                    num_emitted = min(num_equal + 1, num_until_done or length + 1)
                    assert done.emitted == choices[:num_emitted]
                    assert done.num_accepted == min(num_equal, num_emitted)
                    assert done.is_done == (num_emitted == num_until_done)
                    assert target.calls == [
                        call
                        for row, token in enumerate(done.emitted)
                        for call in (("choose", row), ("push", token))
                    ]
                    num_seen += 1
    assert num_seen == sum(2**n * 2 ** (n + 1) * (n + 2) for n in range(4))
