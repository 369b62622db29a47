"""What a target is: weights that open sessions; a session is one request's forward passes and cache.

``verify`` runs the last committed token's successor rows and leaves them pending; ``commit`` keeps the
first ones. Nothing here knows tokens from text, drafters or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Session(Protocol):
    """One request on one target. Not reusable for another prompt."""

    @property
    def num_cached(self) -> int:
        """Committed positions."""

    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Run the prompt as stock does. Returns the last position's logits, ``[V]``."""

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        """Run ``token_ids`` after the committed and pending rows. Returns logits ``[T, V]``.

        The rows stay pending until ``commit``; calling again appends to them.
        """

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows (0: drop all), without a forward."""


class Target(Protocol):
    """A model ready to decode."""

    name: str
    vocab_size: int
    max_context: int
    max_rows: int

    def open(self, capacity: int) -> Session:
        """A fresh session able to hold ``capacity`` positions."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights held in memory."""
