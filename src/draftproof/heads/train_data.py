"""Rows of a corpus as batches: which rows a step trains on is a function of seed and step alone.

So a run that goes on needs no state of any generator, and every process of several knows the whole batch
and takes its share. A draft can begin at every slot whose token, the last one committed, lies in the
answer: those are the engine's own places, and nothing is learnt of prompts. Letters: B rows, L tokens of a
row, T slots, K draft steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftproof.errors import OptionError
from draftproof.heads.shards import Row, Split, read_corpus

_POOL_BATCHES = 32
_FEWEST_AHEAD = 2  # the last committed token and one more to predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row: ids of prompt and answer, and where the answer begins."""

    ids: tuple[int, ...]
    prompt_length: int
    is_sampled: bool

    @property
    def num_places(self) -> int:
        """Slots a draft can begin at."""
        return max(len(self.ids) - 1 - self.prompt_length, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows filled up on the right.

    Attributes:
        ids_BL: int64.
        is_place_KBT: whether row ``q`` of a draft step predicts a token of the answer, in a draft begun at a
            place of the answer. ``T`` is ``L - 1``: a row's last token has no slot.
    """

    ids_BL: Tensor
    is_place_KBT: Tensor


def read_examples(corpus: Path, split: Split, vocab_size: int) -> list[Example]:
    """The rows of a split that have something to predict.

    Raises:
        UsageError: there is no corpus, or one of its files is damaged.
        OptionError: it holds ids the model does not know, or nothing of this split.
    """
    made: list[Example] = []
    for row in read_corpus(corpus, split):
        if max(row.ids) >= vocab_size:
            raise OptionError(
                f"{corpus} holds id {max(row.ids)}, but the model knows {vocab_size}: make one with it"
            )
        if row.num_tokens >= _FEWEST_AHEAD:
            made.append(Example(ids=row.ids, prompt_length=row.prompt_length, is_sampled=row.is_sampled))
    if not made:
        raise OptionError(f"{corpus} has no {split} answers{_cure(split)}")
    return made


def _cure(split: Split) -> str:
    if split == "train":
        return " to train on"
    return ", so overfitting would go unseen: make it with more prompts or a larger --held-out-share"


def check_text(corpus: Path, text_of: Callable[[Sequence[int]], str]) -> None:
    """Refuse a corpus whose ids read otherwise with the model's tokenizer; its first row is looked at."""
    row: Row | None = next(read_corpus(corpus), None)
    if row is not None and text_of(row.ids[row.prompt_length :]) != row.text:
        raise OptionError(f"{corpus} was made with another tokenizer: make a corpus with this model")


def sample(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Up to ``count`` examples, the same ones every time; greedy answers first, as the engine decodes so."""
    order = list(range(len(examples)))
    random.Random(f"{seed} sample").shuffle(order)
    order.sort(key=lambda index: examples[index].is_sampled)
    return [examples[index] for index in order[:count]]


def collate(examples: Sequence[Example], num_steps: int, device: torch.device) -> Batch:
    """Examples as one batch for ``num_steps`` draft steps."""
    longest = max(len(example.ids) for example in examples)
    ids_BL = torch.zeros(len(examples), longest, dtype=torch.long)
    for place, example in enumerate(examples):
        ids_BL[place, : len(example.ids)] = torch.tensor(example.ids)
    slots_T = torch.arange(longest - 1)
    starts_B1 = torch.tensor([[example.prompt_length] for example in examples])
    ends_B1 = torch.tensor([[len(example.ids)] for example in examples])
    # In step k row q belongs to the draft after token q - k + 1 and predicts token q + 2.
    is_place = [(slots_T - step + 1 >= starts_B1) & (slots_T + 2 < ends_B1) for step in range(num_steps)]
    return Batch(ids_BL=ids_BL.to(device), is_place_KBT=torch.stack(is_place).to(device))


class Order:
    """Which rows are trained on when.

    Args:
        lengths: tokens of every row.
        batch_tokens: most tokens of a batch, filling included; a longer row is a batch of its own.
        seed: of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        self._lengths, self._most, self._seed = lengths, batch_tokens, seed
        self._epoch, self._batches = -1, list[list[int]]()
        self._starts = [0]

    def steps(self, epochs: int) -> int:
        """Batches of the first epochs."""
        return sum(len(self._of(epoch)) for epoch in range(epochs))

    def at(self, step: int) -> tuple[int, list[int]]:
        """The epoch of a step, and the rows of its batch."""
        epoch = 0
        while True:
            if epoch + 1 == len(self._starts):
                self._starts.append(self._starts[-1] + len(self._of(epoch)))
            if step < self._starts[epoch + 1]:
                return epoch, self._of(epoch)[step - self._starts[epoch]]
            epoch += 1

    def _of(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch: rows shuffled, pools of them cut by length, batches shuffled."""
        if epoch != self._epoch:
            rng = random.Random(f"{self._seed} epoch {epoch}")
            rows = list(range(len(self._lengths)))
            rng.shuffle(rows)
            batches = [batch for pool in self._pools(rows) for batch in self._cut(pool)]
            rng.shuffle(batches)
            self._epoch, self._batches = epoch, batches
        return self._batches

    def _pools(self, rows: Sequence[int]) -> list[list[int]]:
        pools: list[list[int]] = [[]]
        room = self._most * _POOL_BATCHES
        for row in rows:
            if room < self._lengths[row] and pools[-1]:
                pools.append([])
                room = self._most * _POOL_BATCHES
            pools[-1].append(row)
            room -= self._lengths[row]
        return pools

    def _cut(self, pool: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for row in sorted(pool, key=lambda row: -self._lengths[row]):
            longest = self._lengths[batches[-1][0]] if batches else 0
            if not batches or longest * (len(batches[-1]) + 1) > self._most:
                batches.append([])
            batches[-1].append(row)
        return batches
