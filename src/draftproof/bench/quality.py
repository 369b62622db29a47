"""Measures what the quality gates judge: distributions and likelihoods, teacher forced, as plain JSON.

Each function runs inside the process that holds its model and returns plain values, so that the arms
exchange JSON only: ``reference`` and ``own_nll`` on the pristine stock model, ``forward_logprobs`` on the
candidate's, ``sample`` where the answers meet. Logits are taken from the plain call ``model(input_ids=...)``
over the prompt and its continuation: a candidate that replaces the decode loop has to leave that call
working. What the candidate's process answers is its own word; the parent computes agreement and KL from it,
and only ``own_nll`` is measured entirely by stock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import PromptError, UsageError
from draftproof.gate import LOG_FLOOR, TOP_K, GateSample, kl_divergence
from draftproof.models.generic import GenericTarget

NUM_TOKENS = 64


def reference(
    model: Any, prompt_ids: Sequence[int], num_tokens: int = NUM_TOKENS,
    token_ids: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Stock's continuation of a prompt and its distribution at every position of it.

    Args:
        model: the pristine transformers module.
        prompt_ids: the prompt, not empty.
        num_tokens: length of the continuation.
        token_ids: the continuation where stock has decoded it already, cut to ``num_tokens``: give it
            whenever the candidate's loop stops at an end token, so that both are judged by the same
            rules. Without it, ``num_tokens`` are decoded greedily and an end token does not end them.

    Returns:
        ``token_ids`` (n), ``top_ids`` and ``top_logprobs`` (n lists, most likely first, at most 32
        long) and ``nll``, mean negative log-likelihood of ``token_ids`` in nats.
    """
    ids = list(token_ids[:num_tokens]) if token_ids is not None else _greedy(model, prompt_ids, num_tokens)
    log_probs_NV = _log_probs(model, prompt_ids, ids)
    top = log_probs_NV.topk(min(TOP_K, log_probs_NV.shape[-1]))
    return {
        "token_ids": ids, "top_ids": top.indices.tolist(), "top_logprobs": _finite(top.values),
        "nll": _nll(log_probs_NV, ids),
    }  # fmt: skip


def forward_logprobs(
    model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], top_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The candidate's distribution on stock's continuation, at the tokens stock finds most likely.

    Returns:
        ``top_logprobs`` (n lists as long as those of ``top_ids``, in their order), and the candidate's own
        most likely token: ``argmax_ids`` and ``best_logprobs`` (n each). What is not a number is
        reported as the smallest log-probability the gates tell apart.
    """
    log_probs_NV = _log_probs(model, prompt_ids, token_ids)
    index_NK = torch.tensor([list(row) for row in top_ids], dtype=torch.long, device=log_probs_NV.device)
    best = log_probs_NV.max(dim=-1)
    return {
        "top_logprobs": _finite(log_probs_NV.gather(-1, index_NK)), "argmax_ids": best.indices.tolist(),
        "best_logprobs": _finite(best.values),
    }  # fmt: skip


def own_nll(stock_model: Any, prompt_ids: Sequence[int], own_ids: Sequence[int]) -> float | None:
    """Mean negative log-likelihood, under pristine stock, of tokens a candidate's loop emitted, in nats.

    ``None`` when it emitted none. Cut ``own_ids`` to the length that ``reference`` was given.
    """
    return _nll(_log_probs(stock_model, prompt_ids, own_ids), own_ids) if own_ids else None


def sample(
    label: str, reference: dict[str, Any], forward: dict[str, Any], own_nll: float | None
) -> GateSample:
    """Join what stock and the candidate answered for one input.

    Stock's most likely token is agreed on when no token is more likely to the candidate; ties count.
    """
    rows = list(zip(reference["top_logprobs"], forward["top_logprobs"], strict=True))
    heads = zip(reference["top_ids"], forward["argmax_ids"], strict=True)
    bests = zip(forward["top_logprobs"], forward["best_logprobs"], strict=True)
    return GateSample(
        label=label,
        kl=tuple(kl_divergence(mine, theirs) for mine, theirs in rows),
        is_agreed=tuple(
            top[0] == argmax or row[0] >= best
            for (top, argmax), (row, best) in zip(heads, bests, strict=True)
        ),
        stock_nll=reference["nll"], own_nll=own_nll,
    )  # fmt: skip


def _greedy(model: Any, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """``num_tokens`` of plain greedy decoding, one a forward after the prompt's."""
    session = GenericTarget(model).open(len(prompt_ids) + num_tokens)
    out = [int(session.prefill(prompt_ids).argmax())]
    while len(out) < num_tokens:
        logits_1V = session.verify(out[-1:])
        session.commit(1)
        out.append(int(logits_1V[0].argmax()))
    return out


@torch.inference_mode()
def _log_probs(model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """fp32 log-probabilities of each of ``token_ids`` after all that comes before it, ``[n, V]``."""
    if not prompt_ids or not token_ids:
        raise PromptError(f"{len(prompt_ids)} prompt and {len(token_ids)} continuation tokens: none to score")
    num_rows = len(prompt_ids) + len(token_ids)
    logits = getattr(model(input_ids=_row(model, [*prompt_ids, *token_ids])), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, num_rows):  # noqa: PLR2004
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(
            f"model(input_ids) gave logits {found}, expected [1, {num_rows}, V]: the gates need the plain"
            " forward call of the model to keep working"
        )
    return logits[0, len(prompt_ids) - 1 : -1].float().log_softmax(dim=-1)


def _row(model: Any, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device=model.device)


def _nll(log_probs_NV: Tensor, token_ids: Sequence[int]) -> float:
    index_N1 = torch.tensor(list(token_ids), dtype=torch.long, device=log_probs_NV.device)[:, None]
    chosen = torch.tensor(_finite(log_probs_NV.gather(-1, index_N1)[:, 0]), dtype=torch.float64)
    return max(0.0, -float(chosen.mean()))


def _finite(log_probs: Tensor) -> Any:
    """Nested lists; NaN and infinities, which JSON cannot hold, become the floor."""
    floored = torch.nan_to_num(log_probs, nan=LOG_FLOOR, posinf=LOG_FLOOR, neginf=LOG_FLOOR)
    return floored.clamp(max=0.0).tolist()
