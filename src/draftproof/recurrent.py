"""Recurrent states and convolution windows with append, mark, commit and rollback, for linear attention.

Every pending row leaves the state of all its layers in a slot of its own, so ``commit(n)`` makes the slot of
row ``n`` the committed one: a selection, no copy, no forward. Slots of dropped rows are used again; there are
never more than the most rows ever pending and one. Convolution inputs lie on a tape of columns: the window
of any row is a slice, and committing moves where the next one begins.
Letters: L layers, H heads, K key size, V value size, C convolution channels, W convolution width, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.errors import RollbackError

_SPARE_ROWS = 4  # verifications of the largest size that fit on the tape before it is wound back


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """State of one linear-attention layer: ``[H, K, V]`` in fp32 and a window of ``[C, W]`` columns."""

    num_heads: int
    key_size: int
    value_size: int
    conv_channels: int
    conv_width: int


class RecurrentRows:
    """The rows reserved by one ``begin``: the state before them, where each layer leaves what follows."""

    def __init__(self, cache: RecurrentCache, start: int, num_rows: int) -> None:
        self._cache, self._start, self._num_rows = cache, start, num_rows
        self._before, self._after = cache.slots(start, num_rows)

    def windows(self, layer: int, x_TC: Tensor) -> Tensor:
        """Append the convolution inputs of these rows; a copy of every row's window, ``[T, C, W + 1]``."""
        return self._cache.append_columns(layer, self._start, x_TC)

    def before(self, layer: int) -> Tensor:
        """The state these rows start from, ``[H, K, V]``; not to be written."""
        return self._before[layer]

    def after(self, layer: int) -> list[Tensor]:
        """Where the state after each row goes, ``[H, K, V]`` each."""
        return [slot[layer] for slot in self._after]


class RecurrentCache:
    """States and windows of all linear-attention layers for one request.

    Args:
        shapes: one a layer, all equal.
        max_rows: most rows that may be pending.
        dtype: of the convolution inputs; states are fp32.
        device: where they live.
    """

    def __init__(self, shapes: Sequence[RecurrentShape], *, max_rows: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        if len(set(shapes)) != 1:
            raise RollbackError(f"linear-attention layers must have one shape, got {len(set(shapes))}")
        shape = shapes[0]
        self.max_rows = max_rows
        self._size = (len(shapes), shape.num_heads, shape.key_size, shape.value_size)
        self._device, self._width = device, shape.conv_width
        columns = shape.conv_width + (_SPARE_ROWS + 1) * max_rows
        self._tape_LCS = torch.zeros(len(shapes), shape.conv_channels, columns, dtype=dtype, device=device)
        self._base = 0
        self._state = torch.zeros(self._size, device=device)
        self._pending: list[Tensor] = []
        self._free: list[Tensor] = []
        self._length = 0

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._length

    @property
    def num_pending(self) -> int:
        """Rows appended since the last commit."""
        return len(self._pending)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        slots = (self._state, *self._pending, *self._free)
        return self._tape_LCS.nbytes + sum(slot.nbytes for slot in slots)

    def begin(self, num_rows: int) -> RecurrentRows:
        """Reserve ``num_rows`` pending rows in every layer."""
        start = len(self._pending)
        if num_rows < 1 or start + num_rows > self.max_rows:
            raise RollbackError(f"{start} rows pending and {num_rows} more: at most {self.max_rows}")
        if start == 0 and self._base + self._width + self.max_rows > self._tape_LCS.shape[2]:
            self._tape_LCS[:, :, : self._width] = self._window()
            self._base = 0
        while len(self._free) < num_rows:
            self._free.append(torch.empty(self._size, device=self._device))
        self._pending += [self._free.pop() for _ in range(num_rows)]
        return RecurrentRows(self, start, num_rows)

    def slots(self, start: int, num_rows: int) -> tuple[Tensor, list[Tensor]]:
        """The slot before pending row ``start``, and those of the ``num_rows`` rows from it on."""
        before = self._pending[start - 1] if start else self._state
        return before, self._pending[start : start + num_rows]

    def append_columns(self, layer: int, start: int, x_TC: Tensor) -> Tensor:
        """Write the columns of the rows from pending row ``start`` on; their windows, ``[T, C, W + 1]``."""
        first = self._base + start
        stop = first + self._width + x_TC.shape[0]
        self._tape_LCS[layer, :, first + self._width : stop] = x_TC.t()
        windows = self._tape_LCS[layer, :, first:stop].unfold(1, self._width + 1, 1)
        return windows.transpose(0, 1).contiguous()

    def write_columns(self, layer: int, x_TC: Tensor) -> None:
        """Keep the last columns of a prompt's convolution inputs; ``finish_prompt`` makes them count."""
        last = x_TC[-self._width :].t()
        self._tape_LCS[layer, :, : self._width - last.shape[1]] = 0
        self._tape_LCS[layer, :, self._width - last.shape[1] : self._width] = last

    def write_state(self, layer: int, state_HKV: Tensor) -> None:
        """Keep the state after a prompt; ``finish_prompt`` makes it count."""
        self._state[layer] = state_HKV

    def finish_prompt(self, num_rows: int) -> None:
        """Commit the prompt's ``num_rows`` positions."""
        if self._length or self._pending:
            raise RollbackError("a prompt can only fill an empty cache")
        self._length = num_rows

    def mark(self) -> int:
        """A point ``rollback`` can return to."""
        return self._length + len(self._pending)

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows, drop the rest: the slot of the last one is the state."""
        if not 0 <= num_rows <= len(self._pending):
            raise RollbackError(f"cannot commit {num_rows} of {len(self._pending)} pending rows")
        if num_rows:
            self._free.append(self._state)
            self._state = self._pending.pop(num_rows - 1)
        self._free += self._pending
        self._pending = []
        self._base += num_rows
        self._length += num_rows

    def rollback(self, mark: int) -> None:
        """Drop pending rows appended after ``mark``; raises if ``mark`` is older than the last commit."""
        if not self._length <= mark <= self._length + len(self._pending):
            raise RollbackError(f"cannot roll back to {mark}: {self._length} positions are committed")
        kept = mark - self._length
        self._free += self._pending[kept:]
        del self._pending[kept:]

    def snapshot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of the committed state ``[H, K, V]`` and window ``[C, W]`` of ``layer``; for tests."""
        return self._state[layer].clone(), self._window()[layer]

    def _window(self) -> Tensor:
        """A copy of the columns before the next row, all layers."""
        return self._tape_LCS[:, :, self._base : self._base + self._width].clone()
