"""What a drafter is: three methods, state for one request only.

The decode loop owns the context. A drafter is told the prompt by ``reset``, learns every committed
token by ``observe``, and answers ``propose`` with *new* ids only (never context plus draft). It may be
wrong as often as it likes: verification decides. It must not look at anything but committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from draftproof.record import Draft


@runtime_checkable
class Drafter(Protocol):
    """Proposes the next tokens of one request."""

    name: str

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Forget everything and start a request whose prompt is ``prompt_ids`` (at least one id)."""

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append committed ``token_ids`` to the context, in order."""

    def propose(self, max_tokens: int) -> Draft:
        """At most ``max_tokens`` ids (0 allowed) that may follow the committed context."""
