"""A hub folder mapped onto the target and its native head without reading a weight.

The architecture's own ``build`` runs over meta tensors and a source that knows only names, shapes and dtypes,
so that this mapping and the loader cannot disagree. Where the loader stops at the first thing that is wrong,
everything is collected here. It does not compare numbers: whether the stored copy of a tied output layer
is one is seen only when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.errors import ModelError, ModelFileError
from draftproof.models import sizes
from draftproof.models.build import Builder
from draftproof.models.decoder import DecoderParts
from draftproof.models.header import Described, Stored, describe
from draftproof.models.load import ARCHITECTURES, DTYPES, read_config, refusal
from draftproof.models.mtp import HEAD_STYLES, HeadMaker, NativeHead
from draftproof.models.sizes import Sizes
from draftproof.models.weights import FLOATS, asked_name, misfit
from draftproof.ops.gated_delta import FORMS
from draftproof.record import OpEvidence, Plan

Kind = Literal["missing", "unfit", "left over", "unsupported"]
_NUM_NAMED = 3
_EXPERTS = ".mlp.experts."
# The first that a name contains decides.
_PART_OF = {
    ".self_attn.": sizes.ATTENTION, ".linear_attn.": sizes.DELTA, _EXPERTS: sizes.EXPERTS,
    ".mlp.": sizes.MLPS, "norm": sizes.NORMS, "embed_tokens": sizes.EMBEDDING, "lm_head": sizes.OUTPUT,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason why the folder cannot be loaded; ``name`` is a tensor as the target asks for it."""

    kind: Kind
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a folder holds and what is wrong with it.

    Attributes:
        dtype: of weights and activations, as asked for or as most of the folder is stored.
        stored: tensors of target and head by stored dtype; ``unknown`` for those no header describes.
        stored_bytes: of these tensors; ``None`` unless every header is there.
        sizes: parameters and shapes; ``None`` where nothing could be built.
        has_head: the checkpoint holds a native head.
        notes: worth knowing, and no reason to refuse.
    """

    folder: Path
    model_type: str
    dtype: str
    stored: dict[str, int]
    stored_bytes: int | None
    sizes: Sizes | None
    has_head: bool
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    def refuse_problems(self) -> None:
        """Raise one line that names what is wrong, if anything is.

        Raises:
            ModelFileError: something is missing, does not fit or is left over.
        """
        if self.problems:
            raise ModelFileError(f"{self.folder} does not map onto {self.model_type}: {self._summary()}")

    def _summary(self) -> str:
        found = []
        for kind, count in Counter(problem.kind for problem in self.problems).items():
            some = [p.name if p.kind in ("missing", "left over") else p.text
                    for p in self.problems if p.kind == kind][:_NUM_NAMED]  # fmt: skip
            more = f" and {count - len(some)} more" if count > len(some) else ""
            found.append(f"{count} {kind} ({', '.join(some)}{more})")
        return "; ".join(found)


class MetaWeights:
    """Meta tensors of whatever shape is asked for, as a ``WeightSource``; what does not fit is noted.

    Args:
        stored: what the folder holds, by the name it is asked for.
        dtype: of the tensors handed out.
    """

    def __init__(self, stored: Mapping[str, Stored], dtype: torch.dtype) -> None:
        self._left, self._dtype = dict(stored), dtype
        self.taken: dict[str, tuple[int, ...]] = {}
        self.problems: list[Problem] = []
        self.compared: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def has_any(self, prefix: str) -> bool:
        """Whether a tensor under ``prefix`` is left."""
        return any(name.startswith(prefix) for name in self._left)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A meta tensor of ``shape``, whatever is stored."""
        stored = self._left.pop(name, None)
        if stored is None:
            self._note("missing", name, f"the checkpoint lacks the tensor {name!r}")
        elif stored.shape is not None and stored.dtype is not None:
            why = misfit(name, stored.shape, stored.dtype, shape)
            if why is not None:
                self._note("unfit", name, why)
        self.taken[name] = shape
        return self.peek(name, shape)

    def peek(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A meta tensor of ``shape``, without counting as taken."""
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def repeats(self, name: str, original: Tensor) -> bool:
        """Whether ``name`` can repeat ``original``: numbers are compared only when they are read."""
        stored, shape = self._left[name], tuple(original.shape)
        why = misfit(name, stored.shape or shape, stored.dtype or FLOATS[0], shape)
        if why is not None:
            self._note("unfit", name, why)
        self.compared.append(name)
        return True

    def forget(self, name: str) -> None:
        """Drop a tied copy."""
        self._left.pop(name, None)

    def finish(self) -> None:
        """Note every tensor nobody asked for."""
        for name in sorted(self._left):
            self._note("left over", name, f"the architecture does not use {name}")

    def _note(self, kind: Kind, name: str, text: str) -> None:
        self.problems.append(Problem(kind=kind, name=name, text=text))


def take_inventory(folder: Path, dtype: str | None = None) -> Inventory:
    """Map a hub folder onto the target and the head; ``dtype`` defaults to the folder's.

    Raises:
        ModelError: no hub folder, a broken index or header, or a model without a row-exact target.
    """
    config = read_config(folder)
    why = refusal(config)
    if why is not None:
        raise ModelError(f"{folder} cannot be mapped: {why}")
    described = describe(folder)
    renamed = ARCHITECTURES[config.model_type].renamed
    names = {stored: asked_name(stored, renamed) for stored in described.tensors}
    ours = {name: described.tensors[stored] for stored, name in names.items() if name is not None}
    others = [described.tensors[stored] for stored, name in names.items() if name is None]
    chosen = dtype or _usual_dtype(ours, config)
    source = MetaWeights(ours, DTYPES[chosen])
    parts = _build(config, source, DTYPES[chosen])
    head = None if parts is None else parts.native_head
    return Inventory(
        folder=folder, model_type=config.model_type, dtype=chosen,
        stored=dict(Counter(stored.dtype or "unknown" for stored in ours.values())),
        stored_bytes=_sum_bytes(ours.values()) if not described.absent else None,
        sizes=None if parts is None else _sizes(config, parts, source.taken),
        has_head=head is not None, problems=tuple(source.problems),
        notes=tuple(_notes(config, described, source, others, has_head=head is not None)),
    )  # fmt: skip


def _sum_bytes(stored: Any) -> int:
    return sum(tensor.num_bytes or 0 for tensor in stored)


def _usual_dtype(stored: Mapping[str, Stored], config: Any) -> str:
    """The float type most bytes are stored in, else the configuration's, else bfloat16."""
    held: Counter[str] = Counter()
    for tensor in stored.values():
        held[tensor.dtype or ""] += tensor.num_bytes or 0
    said = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    usual = [name for name, size in held.most_common() if name in FLOATS and size]
    return next((name for name in (*usual, said) if name in FLOATS), FLOATS[0])


def _plain_plan(config: Any) -> Plan:
    """Nothing packed: a layout of weights needs weights."""
    forms = {spec.name: "plain" for spec in ARCHITECTURES[config.model_type].linear_specs(config)}
    forms |= {op: next(iter(known)) for op, known in FORMS.items()}
    ops = tuple(
        OpEvidence(op=op, shape=(), form=form, max_rows=1, is_exact=False, num_checked=0)
        for op, form in forms.items()
    )
    return Plan(claim="unproved", dtype=FLOATS[0], fingerprint="", ops=ops, max_rows=1)


def _build(config: Any, source: MetaWeights, dtype: torch.dtype) -> DecoderParts | None:
    """The target on the meta device; ``None``, and a problem noted, where the architecture refuses."""
    hidden, meta = config.hidden_size, torch.device("meta")
    builder = Builder(source, _plain_plan(config), hidden=hidden, dtype=dtype, device=meta)
    try:
        return ARCHITECTURES[config.model_type].build(config, builder)
    except ModelFileError as error:
        source.problems.append(Problem(kind="unsupported", name=config.model_type, text=str(error)))
        return None


def _sizes(config: Any, parts: DecoderParts, taken: Mapping[str, tuple[int, ...]]) -> Sizes:
    num_params = dict.fromkeys(sizes.PARTS, 0)
    style = HEAD_STYLES.get(config.model_type)
    of_head = style.prefix_in(config) if style is not None else None
    for name, shape in taken.items():
        part = next((part for mark, part in _PART_OF.items() if mark in name), sizes.OTHER)
        if of_head is not None and name.startswith(of_head):  # named like the target's layers
            part = sizes.HEAD_EXPERTS if part == sizes.EXPERTS else sizes.HEAD
        num_params[part] += prod(shape)
    head = parts.native_head
    return Sizes(
        num_params={part: count for part, count in num_params.items() if count},
        vocab_size=parts.vocab_size, hidden=config.hidden_size, itemsize=parts.dtype.itemsize,
        is_tied=bool(config.tie_word_embeddings), attention=tuple(parts.attention_shapes),
        recurrent=tuple(parts.recurrent_shapes), head=head.shape if isinstance(head, NativeHead) else None,
        expert_share=config.num_experts_per_tok / config.num_experts if num_params[sizes.EXPERTS] else 1.0,
    )  # fmt: skip


def _notes(
    config: Any, described: Described, source: MetaWeights, others: list[Stored], *, has_head: bool
) -> list[str]:
    notes = []
    if described.absent:
        notes.append(
            f"not here: {_some(described.absent, 'shard')}; shapes and types of their tensors are the"
            " configuration's"
        )
    if described.cut:
        notes.append(f"less data than its header says: {_some(described.cut, 'file')}")
    if others:
        size = "" if described.absent else f", {_sum_bytes(others) / 1e9:.2f} GB"
        notes.append(f"not the text model's, and never read: {len(others)} tensors{size}")
    if source.compared:
        notes.append(f"compared with the target's own only when read: {', '.join(source.compared)}")
    if getattr(config, "mtp_num_hidden_layers", 0) and not has_head:
        notes.append("the configuration names a native head, the checkpoint holds none of its tensors")
    return notes


def _some(names: tuple[str, ...], word: str) -> str:
    more = ", ..." if len(names) > _NUM_NAMED else ""
    return f"{len(names)} {word}{'s' * (len(names) > 1)} ({', '.join(names[:_NUM_NAMED])}{more})"


def map_head(config: Any, stored: Mapping[str, Stored]) -> tuple[Problem, ...]:
    """What is wrong with tensors that should be a head of this target: names, shapes and types, no numbers.

    Args:
        config: of a target that ``models.load.refusal`` does not refuse.
        stored: the tensors by the names a head of it has.

    Raises:
        ModelFileError: no head can be built for this configuration at all.
    """
    meta, dtype = torch.device("meta"), DTYPES[FLOATS[0]]
    target = MetaWeights({}, dtype)
    parts = _build(config, target, dtype)
    make_head = None if parts is None else parts.make_head
    if not isinstance(make_head, HeadMaker):
        raise ModelFileError(f"no head can be built for {config.model_type!r}: {target.problems[-1].text}")
    source = MetaWeights(stored, dtype)
    make_head(
        Builder(
            source, _plain_plan(config), hidden=config.hidden_size, dtype=dtype, device=meta, is_apart=True
        )
    )  # fmt: skip
    source.finish()
    return tuple(source.problems)
