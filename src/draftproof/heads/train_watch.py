"""What a head would have drafted along known text: acceptance by draft step, and the loss there.

Teacher forced: every place of an answer begins a draft, and a draft goes on along the text. A step counts
only where all steps before it were right, and is accepted where its most likely id is the target's. The
engine begins drafts only where the last one ended, so its own acceptance is another figure: rank heads by
that one. Letters: B rows, T slots, K draft steps, N places, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.heads.train_data import Batch, Example, collate
from draftproof.heads.train_loss import Loss, compare
from draftproof.heads.train_model import FrozenTarget

Rows = Callable[[Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Figures of one sample of rows, by draft step.

    Attributes:
        loss: mean of the training loss.
        reached: drafts whose earlier steps were all right.
        accepted: those of them whose step is the target's choice.
    """

    loss: tuple[float, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> list[float | None]:
        """Share accepted of the drafts that came so far; ``None`` where none did."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]

    @property
    def length(self) -> float:
        """Tokens of a verification that the shares add up to, bonus included."""
        rates = [rate or 0.0 for rate in self.acceptance]
        return 1.0 + sum(math.prod(rates[: step + 1]) for step in range(len(rates)))

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return {"loss": list(self.loss), "acceptance": self.acceptance, "acceptance_length": self.length,
                "num_drafts": self.reached[0]}  # fmt: skip


def watch(
    examples: Sequence[Example], rows_of: Rows, target: FrozenTarget, *, num_steps: int, loss: Loss,
    batch_tokens: int, report: Callable[[int, int], None],
) -> Watched:  # fmt: skip
    """Run ``num_steps`` draft steps over every example.

    Args:
        examples: the sample.
        rows_of: the head's rows ``[K, B, T, D]`` and the target's hidden rows ``[B, L, D]`` of a batch.
        target: gives the output layer.
        num_steps: draft steps ``K``.
        loss: which loss is averaged.
        batch_tokens: most tokens run at once.
        report: hears how many examples of how many are done.
    """
    losses, places = torch.zeros(num_steps), torch.zeros(num_steps)
    reached, accepted = torch.zeros(num_steps, dtype=torch.long), torch.zeros(num_steps, dtype=torch.long)
    done = 0
    for group in _groups(examples, batch_tokens):
        batch = collate(group, num_steps, target.device)
        loss_KBT, is_right_KBT, is_text_KBT = _judged(batch, *rows_of(batch), target.output_VD, loss)
        losses += (loss_KBT * batch.is_place_KBT).sum((1, 2)).cpu()
        places += batch.is_place_KBT.sum((1, 2)).cpu()
        so_far = torch.ones_like(is_text_KBT[0])
        for step in range(num_steps):
            # A draft's next step is one slot on.
            so_far = batch.is_place_KBT[step] & (so_far if step == 0 else so_far.roll(1, 1))
            reached[step] += so_far.sum().cpu()
            accepted[step] += (so_far & is_right_KBT[step]).sum().cpu()
            so_far = so_far & is_text_KBT[step]
        done += len(group)
        report(done, len(examples))
    mean = (losses / places.clamp(min=1)).tolist()
    return Watched(loss=tuple(mean), reached=tuple(reached.tolist()), accepted=tuple(accepted.tolist()))


def _judged(
    batch: Batch, rows_KBTD: Tensor, hidden_BLD: Tensor, output_VD: Tensor, loss: Loss
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, whether the guess is the target's choice, and whether it is the text's token; ``[K, B, T]``."""
    is_used_BT = batch.is_place_KBT.any(0)
    found = compare(rows_KBTD[:, is_used_BT], hidden_BLD[:, 1:][is_used_BT], output_VD, loss)
    next_N = torch.cat([batch.ids_BL[:, 2:], torch.zeros_like(batch.ids_BL[:, :1])], 1)[is_used_BT]

    def spread(values_KN: Tensor) -> Tensor:
        full = torch.zeros(batch.is_place_KBT.shape, dtype=values_KN.dtype, device=values_KN.device)
        full[:, is_used_BT] = values_KN
        return full

    return spread(found.loss_KN), spread(found.guess_KN == found.best_N), spread(found.guess_KN == next_N)


def _groups(examples: Sequence[Example], batch_tokens: int) -> list[list[Example]]:
    """Examples of like lengths together, at most ``batch_tokens`` in one group, filling included."""
    groups: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        if not groups or len(groups[-1][0].ids) * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(example)
    return groups
