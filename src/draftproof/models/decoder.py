"""The pass shared by all row-exact targets: embed, layers, norm, output layer; one row set or one prompt.

An architecture file supplies layers that call ``step.linear`` and ``step.attend``; whether those run a
verification (all rows through the plan's linears, attention and recurrence row by row) or a prompt (stock's
own calls over all rows) is the step's business, so a layer is written once. Batch size is one and has no
dimension. Letters: T rows, D hidden, H heads, G key heads, K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.cache import CacheRows, KVCache, LayerShape
from draftproof.errors import RollbackError
from draftproof.ops.attention import attend_prompt, attend_row
from draftproof.ops.experts import Experts
from draftproof.ops.gated_delta import DeltaForms, DeltaInput, conv_prompt, delta_prompt, gates
from draftproof.ops.linear import RowLinear
from draftproof.ops.rotary import sign_first_half
from draftproof.recurrent import RecurrentCache, RecurrentRows, RecurrentShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryRows:
    """Cosine and signed sine of this pass's rows, ``[T, 1, K]`` each."""

    cos_T1K: Tensor
    signed_sin_T1K: Tensor


Gates = tuple[Tensor, Tensor]
Gated = Callable[[Tensor, Tensor], Tensor]


class Step(Protocol):
    """How one pass computes: handed to every layer.

    A layer's number counts attention layers in ``attend`` and linear-attention layers in ``convolve`` and
    ``recur``.
    """

    def linear(self, op: RowLinear, x_TK: Tensor) -> Tensor:
        """``[T, K] -> [T, N]``."""

    def activate(self, gated: Gated, gate_up_TN: Tensor) -> Tensor:
        """A gated activation over fused rows, ``[T, 2 I] -> [T, I]``."""

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float) -> Tensor:
        """Store keys and values, attend: ``[T, H * K]``."""

    def rotary(self, kind: str) -> RotaryRows:
        """Rotary rows of this pass for the layer kind."""

    def convolve(self, layer: int, x_TC: Tensor, weight_CW: Tensor, forms: DeltaForms) -> Tensor:
        """Remember the columns, convolve causally, SiLU: ``[T, C] -> [T, C]``."""

    def gates(self, a_TH: Tensor, b_TH: Tensor, decay_H: Tensor, bias_H: Tensor, forms: DeltaForms) -> Gates:
        """Log decay and write strength of every row, ``[T, H]`` each."""

    def recur(self, layer: int, rows: DeltaInput, forms: DeltaForms) -> Tensor:
        """Run the gated delta rule from the stored state, store what follows: ``[T, H, V]``."""

    def mix(self, experts: Experts, x_TD: Tensor, routed_TN: Tensor, shared_TD: Tensor) -> Tensor:
        """Send rows to their experts, add the shared one's: ``[T, D]``."""


Layer = Callable[[Tensor, Step], Tensor]
_States = TypeVar("_States", RecurrentRows, RecurrentCache)


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
    """Everything an architecture file hands over: the model, in the pieces the passes need.

    ``native_head`` is a ``models.mtp.NativeHead`` where the checkpoint holds one, or one was attached; no
    pass runs it. ``make_head`` is the ``models.mtp.HeadMaker`` that builds heads of this target.
    """

    name: str
    vocab_size: int
    max_context: int
    dtype: torch.dtype
    device: torch.device
    embedding_VD: Tensor
    embed_scale: Tensor | None
    layers: tuple[Layer, ...]
    shapes: tuple[LayerShape | RecurrentShape, ...]
    final_norm: Callable[[Tensor], Tensor]
    head: RowLinear
    make_rotary: RotaryMaker
    linears: tuple[RowLinear | Experts, ...]
    native_head: object | None = None
    make_head: object | None = None

    @property
    def attention_shapes(self) -> list[LayerShape]:
        """Of the attention layers, in order."""
        return [shape for shape in self.shapes if isinstance(shape, LayerShape)]

    @property
    def recurrent_shapes(self) -> list[RecurrentShape]:
        """Of the linear-attention layers, in order."""
        return [shape for shape in self.shapes if isinstance(shape, RecurrentShape)]


class RowsStep:
    """A verification: linears over all rows, one attention call and one recurrence a row."""

    def __init__(
        self, rows: CacheRows, rotary: dict[str, RotaryRows], states: RecurrentRows | None = None
    ) -> None:
        self._rows, self._rotary, self._states = rows, rotary, states

    def linear(self, op: RowLinear, x_TK: Tensor) -> Tensor:
        """As ``Step`` says."""
        return op.rows(x_TK)

    def activate(self, gated: Gated, gate_up_TN: Tensor) -> Tensor:
        """As ``Step`` says."""
        return gated(*gate_up_TN.chunk(2, -1))

    def rotary(self, kind: str) -> RotaryRows:
        """As ``Step`` says."""
        return self._rotary[kind]

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float) -> Tensor:
        """As ``Step`` says."""
        rows = self._rows
        rows.write(layer, k_TGK, v_TGK)
        mixed = [
            attend_row(q_HK, *rows.visible(layer, t), scale, masked=rows.is_masked(layer, t))
            for t, q_HK in enumerate(q_THK.unbind(0))
        ]
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]

    def convolve(self, layer: int, x_TC: Tensor, weight_CW: Tensor, forms: DeltaForms) -> Tensor:
        """As ``Step`` says."""
        return forms.conv(_have(self._states).windows(layer, x_TC), weight_CW[:, None])

    def gates(self, a_TH: Tensor, b_TH: Tensor, decay_H: Tensor, bias_H: Tensor, forms: DeltaForms) -> Gates:
        """As ``Step`` says."""
        return forms.gates(a_TH, b_TH, decay_H, bias_H)

    def recur(self, layer: int, rows: DeltaInput, forms: DeltaForms) -> Tensor:
        """As ``Step`` says."""
        states = _have(self._states)
        return forms.delta(rows, states.before(layer), states.after(layer))

    def mix(self, experts: Experts, x_TD: Tensor, routed_TN: Tensor, shared_TD: Tensor) -> Tensor:
        """As ``Step`` says."""
        return experts.rows(x_TD, routed_TN, shared_TD)


def _have(states: _States | None) -> _States:
    if states is None:
        raise RollbackError("this pass holds no recurrent state")
    return states


class PromptStep:
    """A prefill: every operation over all rows at once, as stock calls it."""

    def __init__(
        self, cache: KVCache, tables: dict[str, RotaryTable], shapes: Sequence[LayerShape], num_rows: int,
        states: RecurrentCache | None = None,
    ) -> None:  # fmt: skip
        self._cache, self._shapes, self._states = cache, shapes, states
        self._rotary = {kind: table.rows(0, num_rows) for kind, table in tables.items()}

    def linear(self, op: RowLinear, x_TK: Tensor) -> Tensor:
        """As ``Step`` says."""
        return op.prompt(x_TK)

    def activate(self, gated: Gated, gate_up_TN: Tensor) -> Tensor:
        """As ``Step`` says; the gate is made contiguous, as vectors of a strided one begin anew each row."""
        gate_TI, up_TI = gate_up_TN.chunk(2, -1)
        return gated(gate_TI.contiguous(), up_TI)

    def rotary(self, kind: str) -> RotaryRows:
        """As ``Step`` says."""
        return self._rotary[kind]

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, scale: float) -> Tensor:
        """As ``Step`` says."""
        self._cache.write_prompt(layer, k_TGK, v_TGK)
        return attend_prompt(q_THK, k_TGK, v_TGK, scale, self._shapes[layer].window)

    def convolve(self, layer: int, x_TC: Tensor, weight_CW: Tensor, forms: DeltaForms) -> Tensor:
        """As ``Step`` says."""
        _have(self._states).write_columns(layer, x_TC)
        return conv_prompt(x_TC, weight_CW)

    def gates(self, a_TH: Tensor, b_TH: Tensor, decay_H: Tensor, bias_H: Tensor, forms: DeltaForms) -> Gates:
        """As ``Step`` says."""
        return gates(a_TH, b_TH, decay_H, bias_H)

    def recur(self, layer: int, rows: DeltaInput, forms: DeltaForms) -> Tensor:
        """As ``Step`` says."""
        out_THV, state_HKV = delta_prompt(rows)
        _have(self._states).write_state(layer, state_HKV)
        return out_THV

    def mix(self, experts: Experts, x_TD: Tensor, routed_TN: Tensor, shared_TD: Tensor) -> Tensor:
        """As ``Step`` says."""
        return experts.prompt(x_TD, routed_TN, shared_TD)


class HiddenRows:
    """The rows the output layer read, kept for a native head that reads them too; off until ``keep``."""

    def __init__(self) -> None:
        self._is_on = False
        self._kept: list[Tensor] = []
        self._pending: list[Tensor] = []

    def keep(self) -> None:
        """Keep rows from now on; before the prompt."""
        self._is_on = True

    def append(self, h_TD: Tensor) -> None:
        """Rows of a pass, pending."""
        if self._is_on:
            self._pending.append(h_TD)

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows."""
        if self._pending and num_rows:
            self._kept.append(torch.cat(self._pending)[:num_rows])
        self._pending = []

    def take(self) -> Tensor:
        """Rows ``[n, D]`` committed since the last call, oldest first; raises where there are none."""
        if not self._kept:
            raise RollbackError("no row was committed since hidden rows were last taken")
        rows = torch.cat(self._kept)
        self._kept = []
        return rows


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
        """Bytes of weights one row reads: packed linears and as many experts as it is sent to.

        Embedding rows, read from the memory-mapped file, are not counted.
        """
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
        rows, dtype, device = target.max_rows, parts.dtype, parts.device
        self.cache = KVCache(
            parts.attention_shapes, capacity=capacity, max_rows=rows, dtype=dtype, device=device
        )
        recurrent = parts.recurrent_shapes
        self.recurrent = (
            RecurrentCache(recurrent, max_rows=rows, dtype=dtype, device=device) if recurrent else None
        )
        self.hidden = HiddenRows()
        self.num_rows_run = 0

    @property
    def num_cached(self) -> int:
        """Committed positions."""
        return self.cache.length

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Run the prompt as stock does; returns the last position's logits, ``[V]``."""
        if self.cache.mark():
            raise RollbackError("a prompt can only fill an empty cache")
        parts, num_rows = self._parts, len(token_ids)
        step = PromptStep(self.cache, self._tables, parts.attention_shapes, num_rows, self.recurrent)
        h_TD = self._run(token_ids, step)
        self.cache.finish_prompt(num_rows)
        if self.recurrent is not None:
            self.recurrent.finish_prompt(num_rows)
        self.hidden.append(h_TD)
        self.hidden.commit(num_rows)
        return parts.head.rows(h_TD[-1:])[0]

    @torch.inference_mode()
    def verify(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Run ``token_ids`` after the rows already pending; returns logits ``[T, V]``."""
        start, num_rows = self.cache.mark(), len(token_ids)
        rows = self.cache.begin(num_rows)
        try:
            states = self.recurrent.begin(num_rows) if self.recurrent is not None else None
            rotary = {kind: table.rows(start, num_rows) for kind, table in self._tables.items()}
            h_TD = self._run(token_ids, RowsStep(rows, rotary, states))
            logits_TV = self._parts.head.rows(h_TD)
            self.hidden.append(h_TD)
            return logits_TV
        except BaseException:
            self.cache.rollback(start)
            if self.recurrent is not None:
                self.recurrent.rollback(start)
            raise

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows, drop the rest."""
        self.cache.commit(num_rows)
        if self.recurrent is not None:
            self.recurrent.commit(num_rows)
        self.hidden.commit(num_rows)

    def _run(self, token_ids: Sequence[int] | Tensor, step: Step) -> Tensor:
        """All layers and the final norm, ``[T, D]``."""
        parts = self._parts
        self.num_rows_run += len(token_ids)
        ids_T = torch.as_tensor(token_ids, dtype=torch.long, device=parts.device)
        h_TD = F.embedding(ids_T, parts.embedding_VD).to(parts.dtype)
        if parts.embed_scale is not None:
            h_TD = h_TD * parts.embed_scale
        for layer in parts.layers:
            h_TD = layer(h_TD, step)
        return parts.final_norm(h_TD)
