"""Drafts from the target's own multi-token-prediction head.

The head's cache follows the target's: before a draft it runs the slots of every row committed since the last
one, with the hidden rows the target really computed, in one pass whose last row gives the first draft token.
Deeper tokens feed the head's own output back; those slots stay pending and are dropped, as their hidden rows
were guesses, whatever became of the tokens. So no slot ever rests on a rejected row, and none is fresh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.errors import DrafterError
from draftproof.models.decoder import DecoderSession, DecoderTarget
from draftproof.models.mtp import HeadSession, NativeHead
from draftproof.record import Draft


class MtpDrafter:
    """Greedy drafts of a native head.

    Args:
        target: the model whose head drafts.
        session: the request's session on it, before its prompt is run.
        capacity: slots the head's cache must hold.
        shortlist: ids the head may draft; its default where ``None``, all where it has none either. The
            target still decides over all.
    """

    name = "mtp"

    def __init__(
        self, target: DecoderTarget, session: DecoderSession, capacity: int,
        shortlist: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._target, self._session, self._capacity = target, session, capacity
        self._head: NativeHead = head_of(target)
        session.hidden.keep()
        self._ids_W: Tensor | None = None
        self._output = self._head.output
        if shortlist is None:
            shortlist = self._head.default_shortlist
        if shortlist is not None:
            self._ids_W = _checked(shortlist, target.vocab_size).to(self._head.device)
            self._output = self._head.shortlist(self._ids_W)
        self._state: HeadSession | None = None
        self._unseen: list[int] = []

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Start a request with an empty cache; the prompt's slots are run with the first draft."""
        capacity = min(self._capacity, self._target.max_context + self._target.max_rows)
        tables = self._target.tables(capacity)
        self._state = self._head.open(capacity, self._target.max_rows, tables)
        self._unseen = list(prompt_ids[1:])

    def observe(self, token_ids: Sequence[int]) -> None:
        """Remember committed tokens; their slots are run when the next draft is asked for."""
        self._unseen.extend(token_ids)

    @torch.inference_mode()
    def propose(self, max_tokens: int) -> Draft:
        """Up to ``max_tokens`` greedy tokens."""
        state = self._state
        if state is None or max_tokens < 1 or not self._unseen:
            return Draft(ids=(), source=self.name)
        hidden_TD = self._session.hidden.take()
        if len(hidden_TD) != len(self._unseen):
            raise DrafterError(f"{len(self._unseen)} tokens to run, but {len(hidden_TD)} hidden rows")
        ids_T = torch.tensor(self._unseen, device=self._head.device)
        self._unseen = []
        out_1D = state.catch_up(ids_T, hidden_TD)
        drafted = [self._choose(out_1D)]
        for _ in range(min(max_tokens, self._target.max_rows - 1) - 1):
            out_1D = state.extend(drafted[-1], out_1D)
            drafted.append(self._choose(out_1D))
        state.cache.commit(0)
        return Draft(ids=tuple(torch.cat(drafted).tolist()), source=self.name)

    def _choose(self, out_1D: Tensor) -> Tensor:
        """The most likely id, ``[1]``; it stays on the device."""
        best = self._output.rows(self._head.readable(out_1D)).argmax(-1)
        return best if self._ids_W is None else self._ids_W[best]


def head_of(target: object) -> NativeHead:
    """The native head of a target, or a refusal."""
    head = target.parts.native_head if isinstance(target, DecoderTarget) else None
    if not isinstance(head, NativeHead):
        name = getattr(target, "name", type(target).__name__)
        raise DrafterError(f"drafter 'mtp' needs a native head; this {name} checkpoint holds none")
    return head


def _checked(shortlist: Sequence[int], vocab_size: int) -> Tensor:
    ids = sorted(set(shortlist))
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size:
        raise DrafterError(f"a shortlist holds ids in 0..{vocab_size - 1}, at least one")
    return torch.tensor(ids)
