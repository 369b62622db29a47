"""The pass shared by all row-exact targets: embed, layers, norm, output layer; one row set or one prompt.

An architecture file supplies layers that call ``step.linear`` and ``step.attend``; whether those run a
verification (all rows through the plan's linears, attention row by row) or a prompt (stock's own calls
over all rows) is the step's business, so a layer is written once. Batch size is one and has no dimension.
Letters: T rows, D hidden, H heads, G key heads, K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.cache import CacheRows, KVCache, LayerShape
from draftproof.errors import RollbackError
from draftproof.ops.attention import attend_prompt, attend_row
from draftproof.ops.linear import RowLinear
from draftproof.ops.rotary import sign_first_half


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryRows:
    """Cosine and signed sine of this pass's rows, ``[T, 1, K]`` each."""

    cos_T1K: Tensor
    signed_sin_T1K: Tensor


class Step(Protocol):
    """How one pass computes: handed to every layer."""

    def linear(self, op: RowLinear, x_TK: Tensor) -> Tensor:
        """``[T, K] -> [T, N]``."""

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float) -> Tensor:
        """Store keys and values, attend: ``[T, H * K]``."""

    def rotary(self, kind: str) -> RotaryRows:
        """Rotary rows of this pass for the layer kind."""


Layer = Callable[[Tensor, Step], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """Cosine and signed sine of every position, ``[positions, K]`` each, made by stock's own module."""

    cos_SK: Tensor
    signed_sin_SK: Tensor

    def rows(self, start: int, num_rows: int) -> RotaryRows:
        """The rows from position ``start`` on."""
        span = slice(start, start + num_rows)
        return RotaryRows(cos_T1K=self.cos_SK[span, None], signed_sin_T1K=self.signed_sin_SK[span, None])


RotaryMaker = Callable[[int], dict[str, tuple[Tensor, Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """Everything an architecture file hands over: the model, in the pieces the passes need."""

    name: str
    vocab_size: int
    max_context: int
    dtype: torch.dtype
    device: torch.device
    embedding_VD: Tensor
    embed_scale: Tensor | None
    layers: tuple[Layer, ...]
    shapes: tuple[LayerShape, ...]
    final_norm: Callable[[Tensor], Tensor]
    head: RowLinear
    make_rotary: RotaryMaker
    linears: tuple[RowLinear, ...]


class _RowsStep:
    """A verification: linears over all rows, one attention call a row."""

    def __init__(self, rows: CacheRows, rotary: dict[str, RotaryRows]) -> None:
        self._rows, self._rotary = rows, rotary

    def linear(self, op: RowLinear, x_TK: Tensor) -> Tensor:
        return op.rows(x_TK)

    def rotary(self, kind: str) -> RotaryRows:
        return self._rotary[kind]

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float) -> Tensor:
        rows = self._rows
        rows.write(layer, k_TGK, v_TGK)
        mixed = [
            attend_row(q_HK, *rows.visible(layer, t), scale, masked=rows.is_masked(layer, t))
            for t, q_HK in enumerate(q_THK.unbind(0))
        ]
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


class _PromptStep:
    """A prefill: every operation over all rows at once, as stock calls it."""

    def __init__(self, cache: KVCache, tables: dict[str, RotaryTable], shapes: Sequence[LayerShape],
                 num_rows: int) -> None:  # fmt: skip
        self._cache, self._shapes = cache, shapes
        self._rotary = {kind: table.rows(0, num_rows) for kind, table in tables.items()}

    def linear(self, op: RowLinear, x_TK: Tensor) -> Tensor:
        return op.prompt(x_TK)

    def rotary(self, kind: str) -> RotaryRows:
        return self._rotary[kind]

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float) -> Tensor:
        self._cache.write_prompt(layer, k_TGK, v_TGK)
        return attend_prompt(q_THK, k_TGK, v_TGK, scale, self._shapes[layer].window)


class DecoderTarget:
    """A row-exact target built from ``DecoderParts``; implements ``models.base.Target``."""

    def __init__(self, parts: DecoderParts, max_rows: int) -> None:
        self.parts = parts
        self.name = parts.name
        self.vocab_size = parts.vocab_size
        self.max_context = parts.max_context
        self.max_rows = max_rows
        self._tables: dict[str, RotaryTable] = {}

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.parts.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights; embedding rows read from the memory-mapped file are not counted."""
        return sum(op.nbytes for op in self.parts.linears)

    def truncated(self, num_layers: int) -> DecoderTarget:
        """The first ``num_layers`` layers with the same norm and output layer; weights are shared."""
        if not 1 <= num_layers < self.num_layers:
            raise RollbackError(f"cannot keep {num_layers} of {self.num_layers} layers")
        parts = self.parts
        fields = {name: getattr(parts, name) for name in parts.__slots__}
        fields |= {"layers": parts.layers[:num_layers], "shapes": parts.shapes[:num_layers]}
        short = DecoderTarget(DecoderParts(**fields), self.max_rows)
        short._tables = self._tables
        return short

    def open(self, capacity: int) -> DecoderSession:
        """A session that can hold ``capacity`` positions, pending rows included."""
        return DecoderSession(self, min(capacity, self.max_context + self.max_rows))

    def tables(self, num_positions: int) -> dict[str, RotaryTable]:
        """Rotary tables for at least ``num_positions`` positions, grown in powers of two and kept."""
        have = next(iter(self._tables.values())).cos_SK.shape[0] if self._tables else 0
        if have < num_positions:
            size = 1 << max(num_positions - 1, 511).bit_length()
            made = self.parts.make_rotary(size)
            self._tables.update(
                {
                    kind: RotaryTable(cos_SK=cos, signed_sin_SK=sign_first_half(sin))
                    for kind, (cos, sin) in made.items()
                }
            )
        return self._tables


class DecoderSession:
    """One request on a ``DecoderTarget``; implements ``models.base.Session``."""

    def __init__(self, target: DecoderTarget, capacity: int) -> None:
        parts = target.parts
        self._target, self._parts = target, parts
        self._tables = target.tables(capacity)
        self.cache = KVCache(
            list(parts.shapes), capacity=capacity, max_rows=target.max_rows, dtype=parts.dtype,
            device=parts.device,
        )  # fmt: skip

    @property
    def num_cached(self) -> int:
        """Committed positions."""
        return self.cache.length

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Run the prompt as stock does; returns the last position's logits, ``[V]``."""
        if self.cache.mark():
            raise RollbackError("a prompt can only fill an empty cache")
        step = _PromptStep(self.cache, self._tables, self._parts.shapes, len(token_ids))
        h_TD = self._run(token_ids, step)
        self.cache.finish_prompt(len(token_ids))
        return self._parts.head.rows(self._parts.final_norm(h_TD)[-1:])[0]

    @torch.inference_mode()
    def verify(self, token_ids: Sequence[int]) -> Tensor:
        """Run ``token_ids`` after the rows already pending; returns logits ``[T, V]``."""
        start = self.cache.mark()
        rows = self.cache.begin(len(token_ids))
        try:
            rotary = {kind: table.rows(start, len(token_ids)) for kind, table in self._tables.items()}
            step = _RowsStep(rows, rotary)
            return self._parts.head.rows(self._parts.final_norm(self._run(token_ids, step)))
        except BaseException:
            self.cache.rollback(start)
            raise

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows, drop the rest."""
        self.cache.commit(num_rows)

    def _run(self, token_ids: Sequence[int], step: Step) -> Tensor:
        parts = self._parts
        ids_T = torch.tensor(token_ids, dtype=torch.long, device=parts.device)
        h_TD = F.embedding(ids_T, parts.embedding_VD).to(parts.dtype)
        if parts.embed_scale is not None:
            h_TD = h_TD * parts.embed_scale
        for layer in parts.layers:
            h_TD = layer(h_TD, step)
        return h_TD
