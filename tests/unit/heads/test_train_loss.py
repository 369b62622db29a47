"""Losses against torch's own autograd, and chunks against all rows at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.heads import train_loss
from draftproof.heads.train_loss import LOSSES, Goal, Loss, compare, distil, divergence

FP32 = torch.float32
LOSS = pytest.mark.parametrize("loss", LOSSES)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(student: Tensor, teacher: Tensor, loss: str) -> Tensor:
    """Every loss as its formula reads."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    if loss == "kl":
        return (p * (p / q).log()).sum(-1)
    if loss == "tv":
        return 1 - torch.minimum(p, q).sum(-1)
    return F.cross_entropy(student, teacher.argmax(-1), reduction="none")


@LOSS
def test_value_and_gradient_are_the_formulas(loss: Loss) -> None:
    student = drawn(6, 11).double().requires_grad_()
    teacher = drawn(6, 11, seed=2).double()
    value, gradient = divergence(student.detach(), Goal.of(teacher), loss)
    want = reference(student, teacher, loss)
    want.sum().backward()
    assert student.grad is not None
    assert torch.allclose(value, want, rtol=1e-12, atol=1e-12)
    assert torch.allclose(gradient, student.grad, rtol=1e-10, atol=1e-12)


@LOSS
def test_equal_distributions_cost_nothing_but_entropy(loss: Loss) -> None:
    same = drawn(3, 7)
    value, gradient = divergence(same, Goal.of(same + 5.0), loss)
    if loss == "argmax":
        assert torch.equal(value, -same.log_softmax(-1).amax(-1))
    else:
        assert value.abs().max() < 1e-6
    if loss == "kl":  # the slope of the total variation jumps where both are equal
        assert gradient.abs().max() < 1e-6


@LOSS
@pytest.mark.parametrize("most_logits", [1, 4 * 13, 1 << 20])
def test_distil_is_the_weighted_sum_with_its_gradient(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, most_logits: int
) -> None:
    """Row by row, four rows at once, all at once."""
    monkeypatch.setattr(train_loss, "_MOST_LOGITS", most_logits)
    output, goal = drawn(13, 5, seed=3), drawn(10, 5, seed=4)
    weight = torch.rand(2, 10, generator=torch.Generator().manual_seed(5))
    weight[1, 3] = 0.0
    rows, plain = drawn(2, 10, 5).requires_grad_(), drawn(2, 10, 5).requires_grad_()
    total, each = distil(rows, goal, weight, output, loss)
    (3 * total).backward()
    values = torch.stack([reference(r @ output.T, goal @ output.T, loss) for r in plain])
    want = (weight * values).sum()
    (3 * want).backward()
    assert rows.grad is not None
    assert plain.grad is not None
    assert torch.allclose(total, want, rtol=1e-5)
    assert torch.allclose(each, values, rtol=1e-4, atol=1e-5)
    assert torch.allclose(rows.grad, plain.grad, rtol=1e-4, atol=1e-5)
    assert not rows.grad[1, 3].any()


def test_no_rows_give_no_loss_and_a_gradient_of_nothing() -> None:
    rows = torch.empty(3, 0, 5, requires_grad=True)
    total, each = distil(rows, torch.empty(0, 5), torch.empty(3, 0), drawn(13, 5), "kl")
    total.backward()
    assert (total.item(), each.shape) == (0.0, (3, 0))
    assert rows.grad is not None


def test_the_output_layers_dtype_is_kept() -> None:
    """A bf16 target's layer reads bf16 rows, as in the engine; rows and gradients stay fp32."""
    rows = drawn(1, 4, 5).requires_grad_()
    output = drawn(13, 5, seed=3).bfloat16()
    total, each = distil(rows, drawn(4, 5, seed=4).bfloat16(), torch.ones(1, 4), output, "kl")
    total.backward()
    assert (each.dtype, total.dtype) == (FP32, FP32)
    assert rows.grad is not None
    assert rows.grad.dtype == FP32
    student = F.linear(rows.detach()[0].bfloat16(), output).float()
    goal = Goal.of(F.linear(drawn(4, 5, seed=4).bfloat16(), output).float())
    want, _ = divergence(student, goal, "kl")
    assert torch.equal(each[0], want)


@pytest.mark.parametrize("most_logits", [1, 1 << 20])
def test_compare_names_the_likeliest_ids(monkeypatch: pytest.MonkeyPatch, most_logits: int) -> None:
    monkeypatch.setattr(train_loss, "_MOST_LOGITS", most_logits)
    output, goal, rows = drawn(13, 5, seed=3), drawn(6, 5, seed=4), drawn(2, 6, 5)
    found = compare(rows, goal, output, "tv")
    assert torch.equal(found.best_N, (goal @ output.T).argmax(-1))
    assert torch.equal(found.guess_KN, (rows @ output.T).argmax(-1))
    want = torch.stack([reference(r @ output.T, goal @ output.T, "tv") for r in rows])
    assert torch.allclose(found.loss_KN, want, rtol=1e-4, atol=1e-6)
