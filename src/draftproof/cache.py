"""Key/value caches with append, mark, commit and rollback; full and sliding layers.

A verification appends rows that are *pending* until ``commit(n)`` keeps the first ``n`` of them and drops
the rest, without a forward and without touching a committed byte. ``rollback(mark)`` returns to a mark
taken since the last commit; anything else raises. Storage is static: full layers hold ``capacity``
positions, sliding layers a moving stretch of ``2 * window`` positions, compacted only at a commit.
Letters: G key heads, S positions, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftproof.errors import RollbackError


class Cache(Protocol):
    """State of one request that can undo a verification."""

    def mark(self) -> int:
        """A point to return to: the number of positions held, pending rows included."""

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows, drop the rest."""

    def rollback(self, mark: int) -> None:
        """Restore the state at ``mark`` exactly, or raise ``RollbackError``."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Key/value geometry of one layer; ``window`` is ``None`` for full attention."""

    num_groups: int
    head_size: int
    window: int | None = None


class _Group:
    """Keys and values of all layers of one shape, stacked. ``base`` is the position held in slot 0.

    Stacking makes one slice serve every layer: views of a row are made once a verification, not once a
    layer. ``L`` layers.
    """

    def __init__(self, shape: LayerShape, num_layers: int, capacity: int, max_rows: int,
                 dtype: torch.dtype, device: torch.device) -> None:  # fmt: skip
        self.window = shape.window
        slots = capacity if shape.window is None else min(capacity, 2 * shape.window + max_rows)
        size = (num_layers, shape.num_groups, slots, shape.head_size)
        self.keys_LGSK = torch.empty(size, dtype=dtype, device=device)
        self.values_LGSK = torch.empty(size, dtype=dtype, device=device)
        self.base = 0

    def make_room(self, length: int, num_rows: int) -> None:
        """Slide the window to the front when ``num_rows`` more would not fit; committed rows only."""
        if self.window is None or length + num_rows - self.base <= self.keys_LGSK.shape[2]:
            return
        first = max(length - self.window + 1, self.base)
        for store in (self.keys_LGSK, self.values_LGSK):
            kept = store[:, :, first - self.base : length - self.base].clone()
            store[:, :, : length - first] = kept
        self.base = first

    def first_visible(self, position: int) -> int:
        """The oldest position the row at ``position`` attends to."""
        return 0 if self.window is None else max(position - self.window + 1, 0)

    def layers(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Views ``[G, stop - start, K]`` of keys and values, layer by layer."""
        span = slice(start - self.base, stop - self.base)
        keys, values = self.keys_LGSK[:, :, span], self.values_LGSK[:, :, span]
        return list(zip(keys.unbind(0), values.unbind(0), strict=True))


class CacheRows:
    """The rows reserved by one ``begin``: where each layer writes them, and what each row sees."""

    def __init__(self, groups: list[_Group], place: list[tuple[int, int]], start: int, num_rows: int) -> None:
        self._place, self._start = place, start
        self._groups = groups
        self._targets = [group.layers(start, start + num_rows) for group in groups]
        self._seen = [
            [g.layers(g.first_visible(p), p + 1) for p in range(start, start + num_rows)] for g in groups
        ]

    def write(self, layer: int, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Store the keys and values of these rows for ``layer``."""
        group, index = self._place[layer]
        keys, values = self._targets[group][index]
        keys.copy_(k_TGK.transpose(0, 1))
        values.copy_(v_TGK.transpose(0, 1))

    def visible(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """``[G, S, K]`` keys and values that ``row`` attends to, itself included, oldest first."""
        group, index = self._place[layer]
        return self._seen[group][row][index]

    def is_masked(self, layer: int, row: int) -> bool:
        """Whether stock passes a mask for ``row``: its sliding window is full."""
        window = self._groups[self._place[layer][0]].window
        return window is not None and self._start + row + 1 >= window


class KVCache:
    """Key/value cache of a whole model for one request.

    Args:
        layers: one shape a layer.
        capacity: positions a full layer can hold, prompt and pending rows included.
        max_rows: most rows that may be pending.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(self, layers: Sequence[LayerShape], *, capacity: int, max_rows: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        self.capacity = capacity
        self.max_rows = max_rows
        shapes = list(dict.fromkeys(layers))
        counts = [list(layers).count(shape) for shape in shapes]
        self._place = [(shapes.index(s), list(layers[:i]).count(s)) for i, s in enumerate(layers)]
        self._groups = [
            _Group(shape, count, capacity, max_rows, dtype, device)
            for shape, count in zip(shapes, counts, strict=True)
        ]
        self._length = 0
        self._pending = 0

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._length

    @property
    def num_pending(self) -> int:
        """Rows appended since the last commit."""
        return self._pending

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(g.keys_LGSK.nbytes + g.values_LGSK.nbytes for g in self._groups)

    def begin(self, num_rows: int) -> CacheRows:
        """Reserve ``num_rows`` pending rows in every layer."""
        if num_rows < 1:
            raise RollbackError(f"a verification has at least one row, got {num_rows}")
        start = self._length + self._pending
        if start + num_rows > self.capacity or self._pending + num_rows > self.max_rows:
            raise RollbackError(
                f"cache full: {start} positions and {num_rows} more rows,"
                f" capacity {self.capacity}, at most {self.max_rows} pending"
            )
        if self._pending == 0:
            for group in self._groups:
                group.make_room(self._length, self.max_rows)
        self._pending += num_rows
        return CacheRows(self._groups, self._place, start, num_rows)

    def write_prompt(self, layer: int, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Store a prompt into an empty cache; a sliding layer keeps what the next token can see.

        ``finish_prompt`` makes it count.
        """
        group, index = self._place[layer]
        store = self._groups[group]
        store.base = store.first_visible(len(k_TGK))
        keys, values = store.layers(store.base, len(k_TGK))[index]
        keys.copy_(k_TGK[store.base :].transpose(0, 1))
        values.copy_(v_TGK[store.base :].transpose(0, 1))

    def finish_prompt(self, num_rows: int) -> None:
        """Commit the prompt's ``num_rows`` positions."""
        if self._length or self._pending:
            raise RollbackError("a prompt can only fill an empty cache")
        self._length = num_rows

    def mark(self) -> int:
        """A point ``rollback`` can return to."""
        return self._length + self._pending

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows, drop the rest."""
        if not 0 <= num_rows <= self._pending:
            raise RollbackError(f"cannot commit {num_rows} of {self._pending} pending rows")
        self._length += num_rows
        self._pending = 0

    def rollback(self, mark: int) -> None:
        """Drop pending rows appended after ``mark``; raises if ``mark`` is older than the last commit."""
        if not self._length <= mark <= self._length + self._pending:
            raise RollbackError(f"cannot roll back to {mark}: {self._length} positions are committed")
        self._pending = mark - self._length

    def snapshot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of what the *next* row of ``layer`` would see of the committed positions; for tests."""
        group, index = self._place[layer]
        store = self._groups[group]
        keys, values = store.layers(store.first_visible(self._length), self._length)[index]
        return keys.clone(), values.clone()
