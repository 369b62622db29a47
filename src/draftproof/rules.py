"""What stock does between logits and tokens, and when it stops: the same objects, called in the same order.

Logits processors and stopping criteria are transformers' own. They are called once an emitted token, with
the ids serial decoding would have at that point, so stateful ones behave as in serial decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import OptionError

Processor = Callable[[Tensor, Tensor], Tensor]
Criterion = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """How tokens are chosen and when the output ends; no state.

    ``processors`` take ``ids [1, n]`` and fp32 ``scores [1, V]``; ``criteria`` return a boolean tensor
    ``[1]`` or a bool. ``eos_ids`` end the output, and are emitted.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()

    def refuse_uncopyable(self) -> None:
        """Refuse plain functions where margins are asked for: their state cannot be copied.

        Raises:
            OptionError: a processor is a function and not an object.
        """
        if any(isinstance(processor, FunctionType) for processor in self.processors):
            raise OptionError(
                "under the guarded claim a logits processor must be an object, not a function: its state"
                " has to be copied to measure a margin"
            )


def _gap(scores_V: Tensor) -> float:
    top = scores_V.topk(2).values
    return float(top[0] - top[1])


class Rules:
    """The rules of one request, and the ids they are applied to."""

    def __init__(self, rule_set: RuleSet, prompt_ids: Sequence[int], device: torch.device) -> None:
        self._set = rule_set
        self._processors = copy.deepcopy(list(rule_set.processors))
        self._num_prompt = self._length = len(prompt_ids)
        self._ids = torch.empty(1, self._length + rule_set.max_new_tokens, dtype=torch.long, device=device)
        self._ids[0, : self._length] = torch.tensor(prompt_ids, dtype=torch.long)
        self.is_stopped = False

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self._num_prompt + self._set.max_new_tokens - self._length

    def chooser(self, logits_TV: Tensor) -> Callable[[int], int]:
        """The choice after each row: stock's argmax over fp32 scores, the first index on ties."""
        if not self._processors:
            choices: list[int] = logits_TV.float().argmax(-1).tolist()
            return choices.__getitem__
        return lambda row: self._choose(logits_TV[row])

    def _choose(self, logits_V: Tensor) -> int:
        return int(self._scores(logits_V, self._processors).argmax(-1))

    def _scores(self, logits_V: Tensor, processors: Sequence[Processor]) -> Tensor:
        scores = logits_V[None].to(copy=True, dtype=torch.float32)
        ids = self._ids[:, : self._length]
        for processor in processors:
            scores = processor(ids, scores)
        return scores

    def margin(self, logits_V: Tensor) -> float:
        """Top-1 minus top-2, of the logits or of the processed scores, whichever is smaller.

        Processors are asked on copies, so that asking does not count as a step of theirs.
        """
        raw = _gap(logits_V.float())
        if not self._processors:
            return raw
        return min(raw, _gap(self._scores(logits_V, copy.deepcopy(self._processors))[0]))

    def push(self, token: int) -> bool:
        """Append an emitted token; true when the output is complete."""
        self._ids[0, self._length] = token
        self._length += 1
        self.is_stopped = token in self._set.eos_ids
        if self._set.criteria:
            ids = self._ids[:, : self._length]
            scores = torch.empty(0, device=ids.device)
            for criterion in self._set.criteria:
                self.is_stopped |= bool(torch.as_tensor(criterion(ids, scores)).all())
        return self.is_stopped or self.num_left == 0
