"""Choices, stops and limits, with processors and criteria that keep a record of how they were called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.errors import OptionError
from draftproof.rules import Rules, RuleSet

CPU = torch.device("cpu")
PROMPT = [4, 5, 6]


def rules(prompt: Sequence[int] = PROMPT, max_new_tokens: int = 10, **options: Any) -> Rules:
    return Rules(RuleSet(max_new_tokens=max_new_tokens, **options), prompt, CPU)


class Log:
    """Calls of a processor and of all its copies, in order."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.scores: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Log:
        return self


class Counting:
    """Adds 100 to token ``number of calls so far``: what it returns depends on its state."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.num_calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.dtype == torch.long
        assert ids.shape[0] == 1
        self.log.ids.append(ids[0].tolist())
        self.log.scores.append(scores.clone())
        scores = scores.clone()
        scores[0, self.num_calls % scores.shape[1]] += 100
        self.num_calls += 1
        return scores


class Criterion:
    """True at the ``num_until_true``-th call; keeps the ids it saw."""

    def __init__(self, num_until_true: int, make: Any = bool) -> None:
        self._left, self._make = num_until_true, make
        self.ids: list[list[int]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Any:
        self.ids.append(ids[0].tolist())
        self._left -= 1
        return self._make(self._left == 0)


# --- choosing ------------------------------------------------------------------------------------------


def test_the_highest_score_of_each_row_is_chosen() -> None:
    choose = rules().chooser(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 1.0, 9.0]]))
    assert [choose(row) for row in (0, 1, 2)] == [1, 0, 2]
    assert isinstance(choose(0), int)


@pytest.mark.parametrize("processors", [(), (lambda ids, scores: scores,)], ids=["plain", "processed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_index_wins_a_tie(processors: tuple[Any, ...], dtype: torch.dtype) -> None:
    rows = torch.zeros(5, 300, dtype=dtype)
    expected = [0, 1, 7, 100, 299]
    for row, first in enumerate(expected[1:], start=1):
        rows[row, first::7] = 2.0
    choose = rules(processors=processors).chooser(rows)
    assert [choose(row) for row in range(5)] == expected


def test_processors_run_in_order_on_fp32_copies_with_the_serial_ids() -> None:
    log = Log()
    one = rules(processors=(Counting(log), lambda ids, scores: -scores))
    rows = torch.tensor([[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]], dtype=torch.bfloat16)
    before = rows.clone()
    choose = one.chooser(rows)
    assert choose(0) == 1  # 100.5, 1.5, 2.5 negated
    one.push(1)
    assert choose(1) == 0  # 3.5, 104.5, 5.5 negated
    assert log.ids == [PROMPT, [*PROMPT, 1]]
    assert [scores.dtype for scores in log.scores] == [torch.float32] * 2
    assert [scores.tolist() for scores in log.scores] == [[[0.5, 1.5, 2.5]], [[3.5, 4.5, 5.5]]]
    assert torch.equal(rows, before)


def test_a_processor_that_writes_into_its_scores_does_not_spoil_the_logits() -> None:
    def overwrite(ids: Tensor, scores: Tensor) -> Tensor:
        scores.fill_(0)
        return scores

    rows = torch.tensor([[0.0, 2.0]])
    one = rules(processors=(overwrite,))
    assert one.chooser(rows)(0) == 0
    assert one.margin(rows[0]) == 0.0
    assert rows.tolist() == [[0.0, 2.0]]


def test_a_processor_is_called_once_a_chosen_row_and_never_before() -> None:
    log = Log()
    one = rules(processors=(Counting(log),))
    choose = one.chooser(torch.zeros(4, 6))
    assert log.ids == []
    emitted = []
    for row in range(3):
        emitted.append(choose(row))
        one.push(emitted[-1])
    assert emitted == [0, 1, 2]
    assert log.ids == [PROMPT, [*PROMPT, 0], [*PROMPT, 0, 1]]


def test_the_callers_processor_is_left_as_it_was() -> None:
    """Two requests from one rule set decode the same."""
    mine = Counting(Log())
    rule_set = RuleSet(max_new_tokens=4, processors=(mine,))
    for _ in range(2):
        one = Rules(rule_set, PROMPT, CPU)
        choose = one.chooser(torch.zeros(2, 4))
        assert [choose(0), choose(1)] == [0, 1]
    assert mine.num_calls == 0


# --- margins -------------------------------------------------------------------------------------------


def test_the_margin_is_top_one_minus_top_two() -> None:
    assert rules().margin(torch.tensor([1.0, 4.5, -3.0, 4.0])) == 0.5
    assert rules().margin(torch.tensor([2.0, 1.0, 2.0])) == 0.0
    halves = rules(processors=(lambda ids, scores: scores / 2,))
    assert halves.margin(torch.tensor([1.0, 4.5, -3.0, 4.0])) == 0.25
    # A processor that spreads scores spreads their noise too: the logits' own margin caps it.
    doubled = rules(processors=(lambda ids, scores: scores * 2,))
    assert doubled.margin(torch.tensor([1.0, 4.5, -3.0, 4.0])) == 0.5
    masked = rules(processors=(lambda ids, scores: scores.masked_fill(scores < 4.2, -torch.inf),))
    assert masked.margin(torch.tensor([1.0, 4.5, -3.0, 4.0])) == 0.5


def test_functions_are_refused_where_margins_are_asked_for() -> None:
    RuleSet(max_new_tokens=1, processors=(Counting(Log()),)).refuse_uncopyable()
    with pytest.raises(OptionError, match="not a function"):
        RuleSet(max_new_tokens=1, processors=(lambda ids, scores: scores,)).refuse_uncopyable()


def test_a_margin_does_not_advance_processors() -> None:
    log = Log()
    one = rules(processors=(Counting(log),))
    rows = torch.zeros(3, 4)
    rows[0, 0] = rows[1, 0] = 200.0  # the processor's 100 comes on top of the first, then competes
    choose = one.chooser(rows)
    assert [one.margin(rows[0]) for _ in range(3)] == [200.0] * 3
    assert choose(0) == 0
    one.push(0)
    assert one.margin(rows[1]) == 100.0
    assert choose(1) == 0
    assert log.ids == [PROMPT] * 4 + [[*PROMPT, 0]] * 2


# --- stopping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_the_length_ends_the_output_without_a_stop(max_new_tokens: int) -> None:
    one = rules(max_new_tokens=max_new_tokens)
    for left in range(max_new_tokens, 0, -1):
        assert one.num_left == left
        assert one.push(9) == (left == 1)
    assert one.num_left == 0
    assert not one.is_stopped


@pytest.mark.parametrize(
    ("eos_ids", "tokens", "num_pushed"),
    [
        (frozenset(), [0, 2, 7], None),
        (frozenset({2}), [0, 1, 2], 3),
        (frozenset({2, 7}), [0, 7], 2),
        (frozenset({2, 7}), [2], 1),
        (frozenset({0}), [0], 1),
        (frozenset({4}), [1, 3], None),  # in the prompt an eos ends nothing
    ],
)
def test_any_eos_ends_the_output(eos_ids: frozenset[int], tokens: list[int], num_pushed: int | None) -> None:
    one = rules(eos_ids=eos_ids)
    done = [one.push(token) for token in tokens]
    assert done == [i + 1 == num_pushed for i in range(len(tokens))]
    assert one.is_stopped == (num_pushed is not None)
    assert one.num_left == 10 - len(tokens)


def test_an_eos_as_the_last_token_is_a_stop() -> None:
    one = rules(max_new_tokens=1, eos_ids=frozenset({3}))
    assert one.push(3)
    assert one.is_stopped
    assert one.num_left == 0


@pytest.mark.parametrize("make", [bool, lambda x: torch.tensor([x]), torch.tensor])
def test_a_criterion_ends_the_output(make: Any) -> None:
    criterion = Criterion(2, make)
    one = rules(criteria=(criterion,))
    assert one.push(1) is False
    assert not one.is_stopped
    assert one.push(2) is True
    assert one.is_stopped
    assert criterion.ids == [[*PROMPT, 1], [*PROMPT, 1, 2]]


def test_every_criterion_is_asked_once_a_token_whatever_the_others_say() -> None:
    """Stock asks all of them and joins the answers; one that counts must count the same."""
    criteria = [Criterion(1), Criterion(2), Criterion(99)]
    one = rules(criteria=tuple(criteria), eos_ids=frozenset({7}))
    assert one.push(7)
    assert [len(criterion.ids) for criterion in criteria] == [1, 1, 1]
    late = rules(criteria=(Criterion(99), Criterion(1), Criterion(99)))
    assert late.push(1)
    assert late.is_stopped


def test_criteria_see_tokens_as_long_ids_and_never_the_room_behind() -> None:
    seen: list[tuple[torch.dtype, list[int]]] = []

    def look(ids: Tensor, scores: Tensor) -> bool:
        seen.append((ids.dtype, list(ids.shape)))
        return False

    one = rules(max_new_tokens=100, criteria=(look,))
    one.push(1)
    one.push(2)
    assert seen == [(torch.long, [1, 4]), (torch.long, [1, 5])]


def test_ids_given_to_processors_are_not_changed_later() -> None:
    """A processor may keep what it was given."""
    kept: list[Tensor] = []

    def keep(ids: Tensor, scores: Tensor) -> Tensor:
        kept.append(ids)
        return scores

    one = rules(processors=(keep,))
    choose = one.chooser(torch.zeros(3, 4))
    for row, token in enumerate((3, 2, 1)):
        choose(row)
        one.push(token)
    assert [ids[0].tolist() for ids in kept] == [PROMPT, [*PROMPT, 3], [*PROMPT, 3, 2]]
