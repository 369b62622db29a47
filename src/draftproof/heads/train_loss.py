"""How far a head's distribution is from the target's, and the gradient, without keeping logits.

The output layer is frozen, so the gradient of its inputs is known as soon as a chunk of rows is compared:
both are computed in the forward pass and no ``[N, V]`` tensor outlives its chunk. The target's distribution
of a position is computed once for all draft steps. Letters: K draft steps, N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Literal["kl", "tv", "argmax"]
LOSSES: tuple[str, ...] = get_args(Loss)
# Of a chunk. On a CPU larger tensors are mapped anew each time, and their page faults cost.
_MOST_LOGITS, _MOST_LOGITS_GPU = 1 << 22, 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Rows against the target's: ``loss_KN``, the head's best ids ``guess_KN``, the target's ``best_N``."""

    loss_KN: Tensor
    guess_KN: Tensor
    best_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The target's distribution of some positions: probabilities, their negative entropy, likeliest ids."""

    p_NV: Tensor
    information_N: Tensor
    best_N: Tensor

    @classmethod
    def of(cls, teacher_NV: Tensor) -> Goal:
        """From logits in fp32."""
        log_p_NV = teacher_NV.log_softmax(-1)
        p_NV = log_p_NV.exp()
        return cls(p_NV=p_NV, information_N=torch.linalg.vecdot(p_NV, log_p_NV), best_N=teacher_NV.argmax(-1))


def divergence(student_NV: Tensor, goal: Goal, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss of every row, ``[N]`` in nats (total variation: from 0 to 1), and its gradient by ``student_NV``.

    Args:
        student_NV: logits of the head, fp32.
        goal: what the target has there.
        loss: ``kl``, Kullback-Leibler divergence from the target's distribution to the head's; ``tv``, their
            total variation, which is one minus the acceptance of exact speculative sampling (Leviathan et al.
            2023, arXiv 2211.17192, theorem 3.5); ``argmax``, cross entropy with the target's most likely id.
    """
    log_q_NV = student_NV.log_softmax(-1)
    q_NV = log_q_NV.exp()
    if loss == "argmax":
        best_N1 = goal.best_N[:, None]
        return -log_q_NV.gather(-1, best_N1)[:, 0], q_NV.scatter_add_(
            -1, best_N1, -torch.ones_like(q_NV[:, :1])
        )
    if loss == "kl":
        value_N = goal.information_N - torch.linalg.vecdot(goal.p_NV, log_q_NV)
        return value_N, q_NV.sub_(goal.p_NV)
    apart_NV = q_NV - goal.p_NV
    slope_NV = 0.5 * apart_NV.sign()
    gradient_NV = q_NV * (slope_NV - torch.linalg.vecdot(q_NV, slope_NV)[:, None])
    return 0.5 * apart_NV.abs().sum(-1), gradient_NV


def _logits(rows_ND: Tensor, output_VD: Tensor) -> Tensor:
    """Logits in fp32 of rows read in the output layer's dtype, as the engine reads them."""
    return F.linear(rows_ND.to(output_VD.dtype), output_VD).float()


def _chunks(num_rows: int, output_VD: Tensor) -> list[slice]:
    most = _MOST_LOGITS if output_VD.device.type == "cpu" else _MOST_LOGITS_GPU
    size = max(most // len(output_VD), 1)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


class _Distil(torch.autograd.Function):
    """Weighted sum of losses over frozen logits; the gradient by rows is made in ``forward``."""

    @staticmethod
    def forward(
        ctx: Any, rows_KND: Tensor, goal_ND: Tensor, weight_KN: Tensor, output_VD: Tensor, loss: Loss
    ) -> tuple[Tensor, Tensor]:
        gradient_KND = torch.empty_like(rows_KND)
        loss_KN = torch.zeros_like(weight_KN)
        for span in _chunks(len(goal_ND), output_VD):
            goal = Goal.of(_logits(goal_ND[span], output_VD))
            for step, rows_ND in enumerate(rows_KND[:, span]):
                value_N, by_logits_NV = divergence(_logits(rows_ND, output_VD), goal, loss)
                loss_KN[step, span] = value_N
                by_logits_NV *= weight_KN[step, span, None]
                gradient_KND[step, span] = (by_logits_NV.to(output_VD.dtype) @ output_VD).to(rows_KND.dtype)
        ctx.save_for_backward(gradient_KND)
        ctx.mark_non_differentiable(loss_KN)
        return (loss_KN * weight_KN).sum(), loss_KN

    @staticmethod
    def backward(ctx: Any, *by_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_KND,) = ctx.saved_tensors
        return by_outputs[0] * gradient_KND, None, None, None, None


def distil(
    rows_KND: Tensor, goal_ND: Tensor, weight_KN: Tensor, output_VD: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """The weighted sum of losses, a scalar with gradients by ``rows_KND``, and every loss, ``[K, N]``.

    Args:
        rows_KND: what the output layer reads of the head, by draft step.
        goal_ND: what it reads of the target at the same positions.
        weight_KN: of every loss, fp32; 0 leaves one out.
        output_VD: the frozen output layer.
        loss: as in ``divergence``.
    """
    total, loss_KN = _Distil.apply(  # type: ignore[no-untyped-call]
        rows_KND, goal_ND, weight_KN, output_VD, loss
    )
    return total, loss_KN


@torch.no_grad()
def compare(rows_KND: Tensor, goal_ND: Tensor, output_VD: Tensor, loss: Loss) -> Compared:
    """Losses and most likely ids of head and target, without gradients; arguments as in ``distil``."""
    shape = rows_KND.shape[:2]
    loss_KN = torch.empty(shape, device=rows_KND.device)
    guess_KN = torch.empty(shape, dtype=torch.long, device=rows_KND.device)
    best_N = torch.empty(shape[1], dtype=torch.long, device=rows_KND.device)
    for span in _chunks(shape[1], output_VD):
        goal = Goal.of(_logits(goal_ND[span], output_VD))
        best_N[span] = goal.best_N
        for step, rows_ND in enumerate(rows_KND[:, span]):
            student_NV = _logits(rows_ND, output_VD)
            guess_KN[step, span] = student_NV.argmax(-1)
            loss_KN[step, span] = divergence(student_NV, goal, loss)[0]
    return Compared(loss_KN=loss_KN, guess_KN=guess_KN, best_N=best_N)
