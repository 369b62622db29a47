"""Fakes for testing drafters, policies and loops without a model.

The table target's logits depend on *every* token of its prefix, so a cache, order or position error of one
token changes what it emits. The scripted drafter drafts what it is told. The fake clock ticks by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftproof.errors import RollbackError
from draftproof.record import Draft


class TableTarget:
    """A target without weights; implements ``models.base.Target``.

    Args:
        vocab_size: number of tokens.
        max_context: positions allowed.
        max_rows: rows allowed in a verification.
        period: tokens the choice looks back on; small values make text repeat itself, ``None`` looks at all.
        tie: tokens 0 and 1 always tie for the top, so that tie-breaking shows.
        seed: another table.
    """

    def __init__(
        self, vocab_size: int = 8, *, max_context: int = 4096, max_rows: int = 32, period: int | None = None,
        tie: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name = "table"
        self.vocab_size, self.max_context, self.max_rows = vocab_size, max_context, max_rows
        self._period, self._tie, self._seed = period, tie, seed

    @property
    def nbytes(self) -> int:
        """No weights."""
        return 0

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """``[V]`` after ``prefix``, from a hash of it."""
        seen = list(prefix) if self._period is None else list(prefix[-self._period :])
        digest = hashlib.sha256(repr((self._seed, seen)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        out = torch.randn(self.vocab_size, generator=generator)
        if self._tie:
            out[:2] = 10.0
        return out

    def open(self, capacity: int) -> TableSession:
        """A fresh session."""
        return TableSession(self, capacity)


class TableSession:
    """One request on a ``TableTarget``; counts its forwards and rows."""

    def __init__(self, target: TableTarget, capacity: int) -> None:
        self._target, self._capacity = target, capacity
        self.tokens: list[int] = []
        self._pending: list[int] = []
        self.num_forwards = 0
        self.num_rows = 0

    @property
    def num_cached(self) -> int:
        """Committed positions."""
        return len(self.tokens)

    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Commit the prompt; ``[V]``."""
        if self.tokens or self._pending:
            raise RollbackError("a prompt can only fill an empty cache")
        self.tokens = list(token_ids)
        return self._target.logits(self.tokens)

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        """``[T, V]``; rows stay pending."""
        if len(self.tokens) + len(self._pending) + len(token_ids) > self._capacity:
            raise RollbackError("cache full")
        if len(self._pending) + len(token_ids) > self._target.max_rows:
            raise RollbackError("too many rows pending")
        self.num_forwards += 1
        self.num_rows += len(token_ids)
        rows = []
        for token in token_ids:
            self._pending.append(token)
            rows.append(self._target.logits(self.tokens + self._pending))
        return torch.stack(rows)

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows."""
        if not 0 <= num_rows <= len(self._pending):
            raise RollbackError(f"cannot commit {num_rows} of {len(self._pending)} pending rows")
        self.tokens += self._pending[:num_rows]
        self._pending = []


class ScriptedDrafter:
    """Drafts what ``script(context, max_tokens)`` returns, cut to ``max_tokens``.

    With the true continuation at hand a script can be always right, always wrong, right up to a position,
    or empty on some rounds.
    """

    name = "scripted"

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._script = script
        self.context: list[int] = []

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Start a request."""
        self.context = list(prompt_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self.context.extend(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        """What the script says."""
        ids = tuple(self._script(self.context, max_tokens))[:max_tokens]
        return Draft(ids=ids, source=self.name)


class FakeClock:
    """Every reading is ``tick_ns`` later than the one before."""

    def __init__(self, tick_ns: int = 1000) -> None:
        self._now, self._tick = 0, tick_ns

    def now_ns(self) -> int:
        """The next reading."""
        self._now += self._tick
        return self._now

    def advance(self, nanoseconds: int) -> None:
        """Let time pass."""
        self._now += nanoseconds
