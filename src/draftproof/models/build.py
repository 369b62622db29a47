"""Turns checkpoint tensors into the parts of a row-exact target, in the forms a plan chose.

Architecture files ask a ``Builder`` for fused linears and norm weights by checkpoint name; the builder
checks every shape, packs one layer's weights at a time and hands out nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from draftproof.errors import ModelFileError
from draftproof.models.decoder import DecoderParts
from draftproof.ops.experts import Experts
from draftproof.ops.gated_delta import FORMS, DeltaForms
from draftproof.ops.linear import MAX_ROWS, LinearSpec, PlainLinear, RowLinear, build_form
from draftproof.record import Plan


class HeadBuilder(Protocol):
    """Builds heads of one target: a ``models.mtp.HeadMaker``."""

    def __call__(self, build: Builder) -> object:
        """The head whose tensors ``build`` hands out."""

    def beside(self, build: Builder) -> object | None:
        """The head that the target's own checkpoint holds, if any."""


class WeightSource(Protocol):
    """Named tensors, each handed out once: a checkpoint folder or a loaded module."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the target's dtype, on its device."""

    def peek(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same, without counting as handed out."""

    def repeats(self, name: str, original: Tensor) -> bool:
        """Whether the tensor ``name`` holds the numbers of ``original``, without counting as handed out."""

    def forget(self, name: str) -> None:
        """Mark as deliberately unused."""

    def has_any(self, prefix: str) -> bool:
        """Whether a tensor under ``prefix`` is left."""

    def finish(self) -> None:
        """Raise if a tensor was never asked for."""


def head_size_of(config: Any) -> int:
    """Size of one attention head."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def linear_specs(config: Any) -> tuple[LinearSpec, ...]:
    """Every linear shape of a llama-like configuration, as the targets fuse them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * head_size_of(config)
    groups = config.num_key_value_heads * head_size_of(config)
    return (
        LinearSpec(name="qkv", num_in=hidden, parts=(heads, groups, groups)),
        LinearSpec(name="out", num_in=heads, parts=(hidden,)),
        LinearSpec(name="gate_up", num_in=hidden, parts=(inner, inner)),
        LinearSpec(name="down", num_in=inner, parts=(hidden,)),
        LinearSpec(name="head", num_in=hidden, parts=(config.vocab_size,)),
    )


def head_spec(config: Any) -> LinearSpec:
    """The shape of a native head's own linear; whether there is such a head is known only when it is read."""
    return LinearSpec(name="mtp_in", num_in=2 * config.hidden_size, parts=(config.hidden_size,))


def rotary_table(
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]], num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[positions, K]`` from stock's module, computed as it computes one position."""
    with torch.inference_mode():
        cos, sin = rotary(torch.arange(num_positions)[None])
    return cos[0].to(device), sin[0].to(device)


def full_rotary(
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], build: Builder
) -> Callable[[int], dict[str, tuple[Tensor, Tensor]]]:
    """Tables by number of positions, of a stock module that all layers share, under the kind ``full``."""
    probe = torch.empty(0, dtype=build.dtype)

    def make(num_positions: int) -> dict[str, tuple[Tensor, Tensor]]:
        return {"full": rotary_table(partial(rotary, probe), num_positions, build.device)}

    return make


class Builder:
    """Hands packed linears and norm weights to an architecture file.

    Args:
        source: where tensors come from.
        plan: forms and row limits by operation name.
        hidden: width of the residual stream.
        dtype: of weights and activations.
        device: where the target runs.
        is_apart: for a head: linears the plan never probed are run as they are.
    """

    def __init__(self, source: WeightSource, plan: Plan, *, hidden: int, dtype: torch.dtype,
                 device: torch.device, is_apart: bool = False) -> None:  # fmt: skip
        self.dtype, self.device, self._is_apart = dtype, device, is_apart
        self._source, self._plan, self._hidden = source, plan, hidden
        self._linears: list[RowLinear | Experts] = []

    def linear(self, op: str, names: Sequence[str], num_in: int, sizes: Sequence[int] = ()) -> RowLinear:
        """The linear ``op`` fused from the named parts; ``sizes`` default to the residual width."""
        shapes = [(size, num_in) for size in (sizes or (self._hidden,))]
        parts = [
            self._source.take(f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)
        ]
        return self._row_linear(op, parts)

    def _row_linear(self, op: str, parts_NK: Sequence[Tensor]) -> RowLinear:
        if self._is_apart and op not in {evidence.op for evidence in self._plan.ops}:
            linear = RowLinear(PlainLinear(parts_NK), MAX_ROWS)  # a draft's bits are nobody's business
        else:
            evidence = self._plan.form(op)
            weights = build_form(evidence.form, parts_NK)
            linear = RowLinear(weights, evidence.max_rows, self._plan.fixed_rows)
        self._linears.append(linear)
        return linear

    def apart(self) -> Builder:
        """A builder over the same weights that counts its own: what a head holds is not the target's."""
        return Builder(
            self._source, self._plan, hidden=self._hidden, dtype=self.dtype, device=self.device,
            is_apart=True,
        )  # fmt: skip

    def has_any(self, prefix: str) -> bool:
        """Whether the checkpoint holds a tensor under ``prefix`` that nobody took."""
        return self._source.has_any(prefix)

    @property
    def nbytes(self) -> int:
        """Bytes of the linears built so far, and of what was counted with them."""
        return sum(linear.nbytes for linear in self._linears)

    def count(self, experts: Experts) -> None:
        """Count a layer's experts among the linears."""
        self._linears.append(experts)

    def qkv(self, prefix: str, num_heads: int, num_groups: int, head_size: int) -> RowLinear:
        """Query, key and value projections, fused: ``[T, D] -> [T, (H + 2 G) * K]``."""
        names = [f"{prefix}{part}_proj" for part in "qkv"]
        sizes = [num_heads * head_size, num_groups * head_size, num_groups * head_size]
        return self.linear("qkv", names, self._hidden, sizes)

    def gate_up(self, prefix: str, inner: int) -> RowLinear:
        """Gate and up projections, fused: ``[T, D] -> [T, 2 I]``."""
        names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        return self.linear("gate_up", names, self._hidden, [inner, inner])

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight that is neither a linear nor a norm, where the checkpoint has it.

        Not a copy: fp32 kernels may choose their path by the weight's address, and stock computes in the
        mapped file.
        """
        return self._source.take(name, shape)

    def delta_forms(self) -> DeltaForms:
        """The forms of the recurrence that the plan chose."""
        return DeltaForms.of({op: self._plan.form(op).form for op in FORMS})

    def vector(self, name: str, size: int | None = None) -> Tensor:
        """A norm weight, ``[size]``, the residual width by default."""
        return self._source.take(name, (size or self._hidden,)).clone()

    def gamma(self, name: str, size: int | None = None) -> Tensor:
        """A Gemma norm weight as the fp32 factor it is applied as: ``1 + weight``."""
        return 1.0 + self.vector(name, size).float()

    def drop_copy(self, name: str, original: Callable[[], Tensor]) -> None:
        """Leave out a tensor that repeats ``original``, if there is one; refuse one that differs."""
        if name not in self._source:
            return
        if not self._source.repeats(name, original()):
            raise ModelFileError(f"{name} differs from the target's own, which it should repeat")
        self._source.forget(name)

    def embedding_and_head(self, config: Any) -> tuple[Tensor, RowLinear]:
        """The embedding ``[V, D]`` and the output layer, tied or not."""
        shape = (config.vocab_size, self._hidden)
        name = "model.embed_tokens.weight"
        if not config.tie_word_embeddings:
            head = self.linear("head", ["lm_head"], self._hidden, [config.vocab_size])
            return self._source.take(name, shape), head
        dense = self._source.peek(name, shape)
        if "lm_head.weight" in self._source and not self._source.repeats("lm_head.weight", dense):
            raise ModelFileError("tied embeddings, but the checkpoint holds another output layer")
        self._source.forget("lm_head.weight")
        head = self._row_linear("head", [dense])
        embedding = self._source.take(name, shape)
        return (dense if head.shares(dense) else embedding), head

    def parts(self, config: Any, *, embedding: Tensor, head: RowLinear, make_head: HeadBuilder,
              embed_scale: Tensor | None = None, **fields: Any) -> DecoderParts:  # fmt: skip
        """The finished parts, with the checkpoint's own head; refuses a checkpoint with tensors left over."""
        native_head = make_head.beside(self)
        self._source.finish()
        return DecoderParts(
            name=config.model_type, vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings, dtype=self.dtype, device=self.device,
            embedding_VD=embedding, embed_scale=embed_scale, head=head, linears=tuple(self._linears),
            native_head=native_head, make_head=make_head, **fields,
        )  # fmt: skip
