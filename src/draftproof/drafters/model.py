"""Drafters that compute: a separate smaller model, or the target's own first layers.

Both decode greedily with their own cache. What they drafted stays pending in that cache; when tokens are
committed, the rows that turned out right are kept and only the others are computed again. The early exit
shares the target's weights through a truncated *view*: nothing of the target is changed, so nothing has
to be put back when drafting fails. Draft-model speculation: Leviathan et al. 2023, arXiv 2211.17192;
early exit: Elhoushi et al. 2024 (LayerSkip), arXiv 2404.16710.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.errors import DrafterError
from draftproof.models.base import Session, Target
from draftproof.record import Draft


class ModelDrafter:
    """Greedy drafts from a target-like model.

    Args:
        model: the drafting model; same vocabulary as the target.
        capacity: positions its cache must hold (prompt, output and one draft).
        name: the draft's ``source``.
    """

    def __init__(self, model: Target, capacity: int, name: str = "draft_model") -> None:
        self.name = name
        self._model = model
        self._capacity = min(capacity, model.max_context)
        self._session: Session | None = None
        self._unseen: list[int] = []
        self._pending: list[int] = []

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Start a request: run the prompt through the drafting model."""
        self._session = None
        self._pending, self._unseen = [], []
        if len(prompt_ids) >= self._capacity:
            return  # its context is too short for this prompt: it drafts nothing
        self._session = self._model.open(self._capacity)
        self._session.prefill(prompt_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Remember committed tokens; they are run when the next draft is asked for."""
        self._unseen.extend(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        """Up to ``max_tokens`` greedy tokens."""
        session = self._session
        limit = min(max_tokens, self._model.max_rows - 1)
        if session is None or limit < 1 or not self._unseen:
            return Draft(ids=(), source=self.name)
        room = self._capacity - session.num_cached - len(self._unseen)
        if room < limit:
            return Draft(ids=(), source=self.name)
        token = self._catch_up(session)
        drafted = [token]
        while len(drafted) < limit:
            logits_TV = session.verify([token])
            self._pending.append(token)
            token = int(logits_TV[-1].argmax())
            drafted.append(token)
        return Draft(ids=tuple(drafted), source=self.name)

    def _catch_up(self, session: Session) -> int:
        """Keep the pending rows that were right, run the rest; the model's next token."""
        kept = 0
        last = len(self._unseen) - 1
        while kept < min(len(self._pending), last) and self._pending[kept] == self._unseen[kept]:
            kept += 1
        session.commit(kept)
        self._pending = []
        todo = self._unseen[kept:]
        self._unseen = []
        for start in range(0, len(todo), self._model.max_rows):
            chunk = todo[start : start + self._model.max_rows]
            logits_TV = session.verify(chunk)
            session.commit(len(chunk))
        return int(logits_TV[-1].argmax())


def check_vocabulary(target: Target, drafter: Target) -> None:
    """Refuse a draft model whose token ids mean something else.

    Raises:
        DrafterError: the vocabularies differ in size.
    """
    if target.vocab_size != drafter.vocab_size:
        raise DrafterError(
            f"the draft model's vocabulary has {drafter.vocab_size} entries, the target's"
            f" {target.vocab_size}; draft models must share the target's tokenizer"
        )
