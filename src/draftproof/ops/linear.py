"""Linear layers whose rows carry the bits of stock's one-row call, and the forms that achieve it.

``reference`` is stock's own call, one row at a time. The fast forms are:

- ``plain``   ``F.linear`` over all rows, one call a part, the checkpoint's own layout;
- ``packed``  oneDNN's prepacked weight (``mkldnn._linear_pointwise``), parts fused into one matrix;
- ``spaced:c`` ``packed`` with zero columns after every ``c`` input columns, so that the kernel's blocks
  along the inner dimension begin where the one-row call's blocks begin. A block's sum gains only exact
  zeros. (Measured on AVX512-BF16: one row accumulates blocks of 512, several rows blocks of 1024, and
  the two orders differ from an inner size of 1024 on.)

No form is trusted: ``draftproof.probe`` compares each with ``reference`` and records up to how many rows
it is exact. This is the only file that touches PyTorch's private mkldnn operators; where they are
missing, only ``plain`` is offered. Letters: T rows, K inner size, N outputs of all parts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.errors import OptionError

MAX_ROWS = 32  # the most rows a verification has

SPACINGS = (512, 1024, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Shape of one (fused) linear layer: ``parts`` are the output sizes stock computes separately."""

    name: str
    num_in: int
    parts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Inner size, then the output size of every part."""
        return (self.num_in, *self.parts)


def reference(x_TK: Tensor, parts_NK: Sequence[Tensor]) -> Tensor:
    """Stock's arithmetic: every part by itself, one row a call. ``[T, K] -> [T, N]``."""
    rows = [torch.cat([F.linear(x_TK[t : t + 1], w) for w in parts_NK], -1) for t in range(len(x_TK))]
    return torch.cat(rows)


def has_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's prepacked linear exists for this device and dtype."""
    is_there = (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float32)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    if not is_there or dtype != torch.bfloat16:
        return is_there
    # On a processor without bf16 instructions oneDNN has no such kernel and would raise.
    supports = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supports is not None and bool(supports())


def candidate_forms(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Every form worth probing for ``spec``, expected fastest first."""
    if not has_packed(device, dtype):
        return ("plain",)
    spaced = tuple(f"spaced:{c}" for c in SPACINGS if spec.num_in > c)
    return ("packed", *spaced, "plain")


class PlainLinear:
    """The checkpoint's own layout, one ``F.linear`` a part. Shares storage with the tensors given."""

    form = "plain"

    def __init__(self, parts_NK: Sequence[Tensor]) -> None:
        self._parts = list(parts_NK)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """All rows in one call a part. ``[T, K] -> [T, N]``."""
        if len(self._parts) == 1:
            return F.linear(x_TK, self._parts[0])
        return torch.cat([F.linear(x_TK, w) for w in self._parts], -1)

    def dense_parts(self) -> list[Tensor]:
        """The weights as stock holds them, ``[N_i, K]`` each."""
        return self._parts

    @property
    def held(self) -> list[Tensor]:
        """The tensors given."""
        return self._parts

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(w.nbytes for w in self._parts)


class PackedLinear:
    """oneDNN's blocked layout, parts fused; with ``spacing`` also zero columns between blocks."""

    def __init__(self, parts_NK: Sequence[Tensor], spacing: int | None = None) -> None:
        self.form = "packed" if spacing is None else f"spaced:{spacing}"
        self._sizes = [w.shape[0] for w in parts_NK]
        self._num_in = parts_NK[0].shape[1]
        self._dtype = parts_NK[0].dtype
        self._spacing = spacing
        fused_NK = torch.cat(list(parts_NK)) if len(parts_NK) > 1 else parts_NK[0]
        spread = fused_NK if spacing is None else spread_columns(fused_NK, spacing)
        self._num_spread = spread.shape[1]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(spread.contiguous())
        self._call = torch.ops.mkldnn._linear_pointwise.default
        self._buffer = torch.zeros(0)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """All rows in one call. ``[T, K] -> [T, N]``."""
        rows = x_TK if self._spacing is None else self._spread_rows(x_TK)
        out: Tensor = self._call(rows, self._packed, None, "none", [], "")
        return out

    def _spread_rows(self, x_TK: Tensor) -> Tensor:
        """Copy rows into a reused buffer whose gaps stay zero."""
        spacing, num_rows = self._spacing or self._num_in, x_TK.shape[0]
        if self._buffer.shape[0] < num_rows:
            self._buffer = torch.zeros(max(num_rows, 8), self._num_spread, dtype=x_TK.dtype)
        rows = self._buffer[:num_rows]
        whole = self._num_in // spacing
        strides = (self._num_spread, 2 * spacing, 1)
        blocks = torch.as_strided(self._buffer, (num_rows, whole, spacing), strides)
        blocks.copy_(x_TK[:, : whole * spacing].view(num_rows, whole, spacing))
        if whole * spacing < self._num_in:
            rows[:, 2 * whole * spacing :].copy_(x_TK[:, whole * spacing :])
        return rows

    def dense_parts(self) -> list[Tensor]:
        """The weights unpacked into stock's layout, ``[N_i, K]`` each; a fresh copy."""
        dense = self._packed.to_dense()
        if self._spacing is not None:
            dense = gather_columns(dense, self._num_in, self._spacing)
        return list(dense.split(self._sizes))

    @property
    def held(self) -> list[Tensor]:
        """None of the tensors given: they were repacked."""
        return []

    @property
    def nbytes(self) -> int:
        """Bytes of weights held, zero columns included."""
        return sum(self._sizes) * self._num_spread * self._dtype.itemsize


def spread_columns(w_NK: Tensor, spacing: int) -> Tensor:
    """Insert ``spacing`` zero columns after every ``spacing`` columns but the last block."""
    num_blocks = -(-w_NK.shape[1] // spacing)
    last = w_NK.shape[1] - (num_blocks - 1) * spacing
    out = w_NK.new_zeros(w_NK.shape[0], 2 * (num_blocks - 1) * spacing + last)
    for i, block in enumerate(w_NK.split(spacing, dim=1)):
        out[:, 2 * i * spacing : 2 * i * spacing + block.shape[1]] = block
    return out


def gather_columns(spread: Tensor, num_in: int, spacing: int) -> Tensor:
    """Undo ``spread_columns``."""
    starts = range(0, num_in, spacing)
    blocks = [spread[:, 2 * s : 2 * s + min(spacing, num_in - s)] for s in starts]
    return torch.cat(blocks, 1)


def build_form(form: str, parts_NK: Sequence[Tensor]) -> PlainLinear | PackedLinear:
    """The weights ``parts_NK`` (``[N_i, K]`` each) in the layout that ``form`` names."""
    if form == "plain":
        return PlainLinear(parts_NK)
    if form == "packed":
        return PackedLinear(parts_NK)
    if form.startswith("spaced:"):
        return PackedLinear(parts_NK, spacing=int(form.partition(":")[2]))
    raise OptionError(f"unknown linear form {form!r}; known: plain, packed, spaced:N")


class RowLinear:
    """A linear layer of a row-exact target: at most ``max_rows`` rows a call, as the plan allows.

    ``fixed_rows`` pads every call to that many rows (the ``fixed`` reference: results depend neither on
    how many rows are real nor on what the others hold, which the probe has checked).
    """

    def __init__(
        self, weights: PlainLinear | PackedLinear, max_rows: int, fixed_rows: int | None = None
    ) -> None:
        self._weights = weights
        self._max_rows = fixed_rows or max_rows
        self._fixed_rows = fixed_rows

    def rows(self, x_TK: Tensor) -> Tensor:
        """``[T, K] -> [T, N]`` with the plan's arithmetic."""
        if self._fixed_rows is None and x_TK.shape[0] <= self._max_rows:
            return self._weights(x_TK)
        return torch.cat([self._call(chunk) for chunk in x_TK.split(self._max_rows)])

    def _call(self, x_TK: Tensor) -> Tensor:
        missing = (self._fixed_rows or 0) - x_TK.shape[0]
        if missing <= 0:
            return self._weights(x_TK)
        return self._weights(F.pad(x_TK, (0, 0, 0, missing)))[: x_TK.shape[0]]

    def prompt(self, x_TK: Tensor) -> Tensor:
        """``[T, K] -> [T, N]`` by stock's own calls over all rows, as its prefill makes them."""
        parts = [F.linear(x_TK, w) for w in self._weights.dense_parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def dense(self) -> Tensor:
        """All parts as stock holds them, ``[N, K]``; a copy where the layout is another."""
        parts = self._weights.dense_parts()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shares(self, weight_NK: Tensor) -> bool:
        """Whether ``weight_NK`` itself is held, not a copy of it."""
        return any(part is weight_NK for part in self._weights.held)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return self._weights.nbytes
