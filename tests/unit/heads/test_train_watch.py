"""Acceptance by draft step against a count by hand, draft by draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.heads.train_data import Batch, Example
from draftproof.heads.train_watch import Watched, watch

VOCAB, DEPTH = 6, 3
CPU = torch.device("cpu")
EXAMPLES = [
    Example(ids=(0, 1, 2, 3, 4, 5, 0, 1, 2), prompt_length=2, is_sampled=False),
    Example(ids=(5, 4, 3, 2, 1, 0), prompt_length=1, is_sampled=True),
]


class Table:
    """Guesses drawn by row, step and slot; the target's choice is the text's token but for every fifth."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        self.is_right = torch.rand(DEPTH, 10, 20, generator=generator) < 0.7
        self.groups: list[int] = []

    def guess(self, step: int, first: int, slot: int, text: int) -> int:
        return text if self.is_right[step, first, slot] else (text + 1) % VOCAB

    @staticmethod
    def best(slot: int, text: int) -> int:
        return text if slot % 5 else (text + 1) % VOCAB

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        num, length = batch.ids_BL.shape
        self.groups.append(num)
        rows, hidden = torch.zeros(DEPTH, num, length - 1, VOCAB), torch.zeros(num, length, VOCAB)
        for row, ids in enumerate(batch.ids_BL.tolist()):
            for slot in range(length - 2):
                hidden[row, slot + 1, self.best(slot, ids[slot + 2])] = 5.0
                for step in range(DEPTH):
                    rows[step, row, slot, self.guess(step, ids[0], slot, ids[slot + 2])] = 5.0
        return rows, hidden


def run(table: Table, batch_tokens: int = 100) -> Watched:
    target: Any = SimpleNamespace(output_VD=torch.eye(VOCAB), device=CPU)
    return watch(
        EXAMPLES, table, target, num_steps=DEPTH, loss="argmax", batch_tokens=batch_tokens,
        report=lambda *_: None,
    )  # fmt: skip


def by_hand(table: Table) -> tuple[list[int], list[int]]:
    reached, accepted = [0] * DEPTH, [0] * DEPTH
    for example in EXAMPLES:
        ids = example.ids
        for last in range(example.prompt_length, len(ids)):
            for step in range(DEPTH):
                slot = last - 1 + step
                if slot + 2 >= len(ids):
                    break
                reached[step] += 1
                guess = table.guess(step, ids[0], slot, ids[slot + 2])
                accepted[step] += guess == table.best(slot, ids[slot + 2])
                if guess != ids[slot + 2]:
                    break
    return reached, accepted


@pytest.mark.parametrize("batch_tokens", [1, 100])
def test_every_draft_is_followed_while_it_is_right(batch_tokens: int) -> None:
    table = Table()
    found, (reached, accepted) = run(table, batch_tokens), by_hand(table)
    assert (list(found.reached), list(found.accepted)) == (reached, accepted)
    assert reached[0] > reached[1] > reached[2] > 0
    assert table.groups == ([1, 1] if batch_tokens == 1 else [2])


def test_the_loss_is_a_mean_over_all_places() -> None:
    table = Table()
    found = run(table)
    high, low = (torch.tensor([5.0, *[0.0] * 5]).log_softmax(0)[i].item() for i in (0, 1))
    for step in range(DEPTH):
        each = []
        for example in EXAMPLES:
            for slot in range(example.prompt_length - 1 + step, len(example.ids) - 2):
                text = example.ids[slot + 2]
                is_same = table.guess(step, example.ids[0], slot, text) == table.best(slot, text)
                each.append(-high if is_same else -low)
        assert found.loss[step] == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_lengths_add_up() -> None:
    found = Watched(loss=(1.0, 2.0, 3.0), reached=(10, 5, 0), accepted=(6, 2, 0))
    assert found.acceptance == [0.6, 0.4, None]
    assert found.length == pytest.approx(1 + 0.6 + 0.24)
    assert found.row() == {
        "loss": [1.0, 2.0, 3.0], "acceptance": [0.6, 0.4, None], "acceptance_length": found.length,
        "num_drafts": 10,
    }  # fmt: skip
