"""Several drafters as one: every round the proposal with the most expected tokens per second.

Retrieval drafters are asked every round, as asking costs microseconds. A drafter that computes is asked
only when no retrieval proposal is expected to beat what it gave lately, and now and then to notice when
it has become better. All proposals are judged by the depth policy's own estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.depth import DepthPolicy
from draftproof.drafters.base import Drafter
from draftproof.record import Draft

_LOOK_EVERY, _LOOK_TOKENS = 16, 4


class Cascade:
    """The best of several drafters, round by round.

    Args:
        cheap: drafters whose proposals cost nothing.
        costly: drafters that run a model to propose.
        policy: judges proposals; the same one the decode loop uses.
    """

    name = "auto"

    def __init__(self, cheap: Sequence[Drafter], costly: Sequence[Drafter], policy: DepthPolicy) -> None:
        self._cheap, self._costly, self._policy = list(cheap), list(costly), policy
        self._context = 0
        self._rounds = 0
        self._last_rate: dict[str, float] = {}

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Start a request in every drafter."""
        self._context, self._rounds = len(prompt_ids), 0
        self._last_rate = {}
        for drafter in (*self._cheap, *self._costly):
            drafter.reset(prompt_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Tell every drafter."""
        self._context += len(token_ids)
        for drafter in (*self._cheap, *self._costly):
            drafter.observe(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        """The proposal with the highest expected rate."""
        self._rounds += 1
        drafts = [drafter.propose(max_tokens) for drafter in self._cheap]
        drafts = [draft for draft in drafts if draft.ids]
        best_rate = max((self._policy.rate(draft, self._context) for draft in drafts), default=0.0)
        for drafter in self._costly:
            is_due = self._rounds % _LOOK_EVERY == 1
            if self._last_rate.get(drafter.name, best_rate) < best_rate and not is_due:
                continue
            wanted = self._policy.ask(drafter.name, self._context)
            draft = drafter.propose(min(max_tokens, max(wanted, _LOOK_TOKENS if is_due else 0)))
            if draft.ids:
                drafts.append(draft)
                self._last_rate[drafter.name] = self._policy.rate(draft, self._context)
        if not drafts:
            return Draft(ids=(), source=self.name)
        best = max(drafts, key=lambda draft: self._policy.rate(draft, self._context))
        for draft in drafts:
            if draft is not best:
                self._policy.watch(draft)
        return best
