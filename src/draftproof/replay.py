"""One plain serial pass over a finished output: what stock would have emitted at every position of it.

The pass is ``generate(do_sample=False)`` itself, called as ``models.stock`` calls it, with one logits
processor more: the *teacher*. It stands behind stock's own processors, notes what stock would choose, and
makes ``generate`` take the emitted token instead. So prefill, cache, masks, one-token forwards and rules
are stock's, and a position is judged on its own even where an earlier token was wrong.

A replay needs stock's weights, and proves an output only on a machine whose bits are those of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from draftproof.errors import ModelFileError, OptionError, PromptError
from draftproof.models.load import DTYPES, resolve
from draftproof.models.stock import StockModel

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A position where the output is not stock's.

    Attributes:
        position: index in the output.
        emitted: ``None`` where the output ended and stock went on.
        expected: stock's token; ``None`` where stock had already stopped.
        gap: score of the expected token minus the emitted one's, after stock's processors; ``None`` where
            there is no pair to compare or the rules forbid the emitted token.
        rank: tokens that stock prefers to the emitted one, ``None`` where there is none to rank.
    """

    position: int
    emitted: int | None
    expected: int | None
    gap: float | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """The replay of one output.

    Attributes:
        num_tokens: length of the output.
        mismatches: in order of position; empty when every token, and the end, is stock's.
        margins: top-1 minus top-2 of the scores stock chose from, a position each; ``None`` where the rules
            left a single token. Shorter than the output where stock had stopped before its end.
    """

    label: str
    num_tokens: int
    mismatches: tuple[Mismatch, ...]
    margins: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStock:
    """The pristine model and the folder it came from."""

    model: StockModel
    folder: Path


def load_stock(name_or_path: str, dtype: str, device: str) -> LoadedStock:
    """Stock as a run's request names it.

    Raises:
        UsageError: there is no such model, dtype or device here, or the model cannot be loaded.
    """
    if dtype not in DTYPES:
        raise OptionError(f"no dtype {dtype!r}; known: {', '.join(DTYPES)}")
    folder = resolve(name_or_path, dtype)
    try:
        model = StockModel(folder, DTYPES[dtype], torch.device(device))
    except (AssertionError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        why = (str(error).splitlines() or [repr(error)])[0]
        raise ModelFileError(f"cannot load {folder} on {device}: {why}") from error
    return LoadedStock(model=model, folder=folder)


def replay(
    stock: StockModel, label: str, prompt_ids: Sequence[int], token_ids: Sequence[int], *,
    max_new_tokens: int, progress: Progress | None = None, **options: Any,
) -> ReplayRow:  # fmt: skip
    """Judge every token of an output.

    Args:
        stock: the pristine model.
        label: names the output in the row and in progress reports.
        prompt_ids: the prompt it followed.
        token_ids: the output.
        max_new_tokens: the limit it was decoded under.
        progress: called as ``(label, tokens done, tokens)`` after each.
        options: ``generate``'s keyword arguments of the request.

    Raises:
        PromptError: the prompt is empty or holds an id the model does not have.
    """
    vocab_size = stock.module.config.get_text_config().vocab_size
    if not prompt_ids or not all(0 <= token < vocab_size for token in prompt_ids):
        raise PromptError(f"{label}: the prompt is empty or holds ids outside 0 to {vocab_size - 1}")
    config = stock.module.generation_config
    teacher = _Teacher(
        label, token_ids, progress,
        is_normalised=bool(options.get("renormalize_logits", config.renormalize_logits)),
    )  # fmt: skip
    before = {name: options.pop(name, None) or [] for name in ("logits_processor", "stopping_criteria")}
    stock.generate(
        prompt_ids, max_new_tokens, logits_processor=[*before["logits_processor"], teacher],
        stopping_criteria=[*before["stopping_criteria"], teacher.is_done], **options,
    )  # fmt: skip
    return teacher.row()


class _Teacher:
    """A logits processor that notes stock's choice and forces the output's token.

    ``is_normalised`` says that stock normalises scores after every processor, hence after this one.
    """

    def __init__(
        self, label: str, token_ids: Sequence[int], progress: Progress | None, *, is_normalised: bool
    ) -> None:
        self._label, self._tokens, self._progress = label, tuple(token_ids), progress
        self._is_normalised = is_normalised
        self._is_over = False
        self._mismatches: list[Mismatch] = []
        self._margins: list[float | None] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note ``scores [1, V]``; the answer is 1 at the forced token and 0 elsewhere."""
        scores_V = (scores.log_softmax(-1) if self._is_normalised else scores)[0]
        position = len(self._margins)
        choice = int(scores_V.argmax())
        if position == len(self._tokens):
            self._mismatches.append(Mismatch(position=position, emitted=None, expected=choice))
            self._is_over = True
            return scores
        token = self._tokens[position]
        top = scores_V.topk(2).values
        self._margins.append(_finite(float(top[0] - top[1])))
        if self._progress is not None:
            self._progress(self._label, position + 1, len(self._tokens))
        if not 0 <= token < len(scores_V):
            self._mismatches.append(Mismatch(position=position, emitted=token, expected=choice))
            self._is_over = True
            return scores
        if token != choice:
            self._mismatches.append(_mismatch(position, token, choice, scores_V))
        forced = torch.zeros_like(scores)
        forced[0, token] = 1.0
        return forced

    def is_done(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """A stopping criterion: there is nothing left that could be forced."""
        return torch.full((1,), self._is_over, dtype=torch.bool, device=input_ids.device)

    def row(self) -> ReplayRow:
        """What was seen; tokens stock never came to are mismatches too."""
        surplus = [
            Mismatch(position=i, emitted=self._tokens[i], expected=None)
            for i in range(len(self._margins), len(self._tokens))
        ]
        return ReplayRow(
            label=self._label, num_tokens=len(self._tokens),
            mismatches=(*self._mismatches, *surplus), margins=tuple(self._margins),
        )  # fmt: skip


def _mismatch(position: int, token: int, choice: int, scores_V: Tensor) -> Mismatch:
    score = scores_V[token]
    is_before = (scores_V == score) & (torch.arange(len(scores_V), device=score.device) < token)
    return Mismatch(
        position=position, emitted=token, expected=choice, gap=_finite(float(scores_V[choice] - score)),
        rank=int((scores_V > score).sum() + is_before.sum()),
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
