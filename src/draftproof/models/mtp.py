"""Native multi-token-prediction heads: one decoder layer over [embedding of the next token; hidden row].

Slot ``p`` holds token ``x[p + 1]`` and the row ``h[p]`` that the target's output layer read, and predicts
``x[p + 2]`` (Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek-AI 2024, arXiv 2412.19437, section 2.2):
``u = fc([norm(embed(x)); norm(h)])``, a full decoder layer with a key/value cache of its own, a final norm,
the target's own output layer. When several tokens are drafted, the layer's output, normed or not, is the
hidden row of the next slot. How a family names its parts and does this is a ``HeadStyle``, a row of
``HEAD_STYLES``; the decoder layer is the architecture's own. Rows carry the bits of one-row calls as the
target's do, by the same plan. One layer only: a chain of several different ones is not run.
Letters: T rows, D hidden, V vocabulary, W shortlist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.cache import KVCache, LayerShape
from draftproof.errors import ModelFileError, RollbackError
from draftproof.models.build import Builder
from draftproof.models.decoder import Layer, PromptStep, RotaryTable, RowsStep, Step
from draftproof.ops.linear import MAX_ROWS, PlainLinear, RowLinear
from draftproof.ops.norm import rms_norm, rms_norm_shifted


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStyle:
    """How a family stores its head, by checkpoint name, and how it runs it.

    Attributes:
        prefix: of every part; may name fields of the configuration, as in ``{config.num_hidden_layers}``.
        block: prefix of the decoder layer, after ``prefix``.
        embedding_copy: where the checkpoint repeats the target's embedding. A copy that is not equal is
            refused: transformers' ``MtpModel`` drops it unread and takes the target's, too.
        output_copy: the same of the output layer.
        is_norm_shifted: norms store gamma - 1 and are applied in fp32.
        is_hidden_first: the hidden row is joined before the embedding.
        is_normed_fed_back: the hidden row of the next slot is what the output layer reads; else the decoder
            layer's output before the final norm.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    block: str
    final_norm: str
    embedding_copy: str | None = None
    output_copy: str | None = None
    is_norm_shifted: bool = False
    is_hidden_first: bool = False
    is_normed_fed_back: bool = True

    def prefix_in(self, config: Any) -> str:
        """The prefix in a checkpoint of this configuration."""
        return self.prefix.format(config=config)


QWEN3_5 = HeadStyle(
    prefix="mtp.", embedding_norm="pre_fc_norm_embedding", hidden_norm="pre_fc_norm_hidden", projection="fc",
    block="layers.0.", final_norm="norm", is_norm_shifted=True,
)  # fmt: skip
GLM4_MOE = HeadStyle(
    prefix="model.layers.{config.num_hidden_layers}.", embedding_norm="enorm", hidden_norm="hnorm",
    projection="eh_proj", block="", final_norm="shared_head.norm", embedding_copy="embed_tokens",
    output_copy="shared_head.head",
)  # fmt: skip
# A head trained for a family that has none, in a folder of its own.
TRAINED = HeadStyle(
    prefix="head.", embedding_norm="embedding_norm", hidden_norm="hidden_norm", projection="projection",
    block="layer.", final_norm="norm",
)  # fmt: skip
HEAD_STYLES = {"qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_5, "glm4_moe": GLM4_MOE}


def trained_style(config: Any) -> HeadStyle:
    """The style of trained heads; norms are stored as the family stores them."""
    return replace(TRAINED, is_norm_shifted=config.model_type.startswith("gemma"))


class NativeHead:
    """A head's weights; ``open`` gives one request's state.

    Args:
        style: how its parts are named and joined.
        config: the target's configuration.
        build: hands out the head's weights; a missing, mis-shaped or wrongly typed one is refused by name.
        make_layer: the family's decoder layer, from its prefix.
        shape: of the layer's keys and values.
        embedding_VD: the target's own embedding.
        output: the target's own output layer.
        default_shortlist: ids it drafts where a request names none; all where ``None``.
    """

    def __init__(
        self, style: HeadStyle, config: Any, build: Builder, *, make_layer: Callable[[str], Layer],
        shape: LayerShape, embedding_VD: Tensor, output: RowLinear,
        default_shortlist: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        if getattr(config, "mtp_use_dedicated_embeddings", False):
            raise ModelFileError("a native head with an embedding of its own is not supported")
        self.style, self.shape, self.output = style, shape, output
        self.default_shortlist = default_shortlist
        self.embedding_VD, self.dtype, self.device = embedding_VD, build.dtype, build.device
        self._eps = config.rms_norm_eps
        prefix = style.prefix_in(config)
        weight = build.gamma if style.is_norm_shifted else build.vector
        self._norm_embedding = weight(f"{prefix}{style.embedding_norm}.weight")
        self._norm_hidden = weight(f"{prefix}{style.hidden_norm}.weight")
        self._norm_final = weight(f"{prefix}{style.final_norm}.weight")
        self._project = build.linear("mtp_in", [prefix + style.projection], 2 * config.hidden_size)
        self._layer = make_layer(prefix + style.block)
        if style.embedding_copy is not None:
            build.drop_copy(f"{prefix}{style.embedding_copy}.weight", lambda: embedding_VD)
        if style.output_copy is not None:
            build.drop_copy(f"{prefix}{style.output_copy}.weight", output.dense)
        self.nbytes = build.nbytes
        self._shortlists: dict[tuple[int, ...], RowLinear] = {}

    def open(self, capacity: int, max_rows: int, tables: dict[str, RotaryTable]) -> HeadSession:
        """State for one request of at most ``capacity`` slots."""
        return HeadSession(self, capacity, max_rows, tables)

    def join(self, ids_T: Tensor, hidden_TD: Tensor, step: Step) -> Tensor:
        """The layer's input ``[T, D]``: both halves normed, joined in the family's order, projected."""
        embedded = F.embedding(ids_T, self.embedding_VD).to(self.dtype)
        halves = [self._norm(embedded, self._norm_embedding), self._norm(hidden_TD, self._norm_hidden)]
        joined = torch.cat(halves[::-1] if self.style.is_hidden_first else halves, -1)
        return step.linear(self._project, joined)

    def finish(self, u_TD: Tensor, step: Step) -> Tensor:
        """The decoder layer, ``[T, D]``: the hidden rows of the next slots, as the family feeds them back."""
        y_TD = self._layer(u_TD, step)
        return self._norm(y_TD, self._norm_final) if self.style.is_normed_fed_back else y_TD

    def readable(self, out_TD: Tensor) -> Tensor:
        """What the output layer reads of ``finish``'s rows."""
        return out_TD if self.style.is_normed_fed_back else self._norm(out_TD, self._norm_final)

    def _norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        norm = rms_norm_shifted if self.style.is_norm_shifted else rms_norm
        return norm(x_TD, weight_D, self._eps)

    def shortlist(self, ids_W: Tensor) -> RowLinear:
        """The rows ``ids_W`` of the output layer as a layer of its own, ``[T, D] -> [T, W]``.

        A copy, made once for a list of ids.
        """
        key = tuple(ids_W.tolist())
        if key not in self._shortlists:
            self._shortlists[key] = shortened(self.output, ids_W)
        return self._shortlists[key]


def shortened(output: RowLinear, ids_W: Tensor) -> RowLinear:
    """A copy of the rows ``ids_W`` (int64) of an output layer, ``[T, D] -> [T, W]``."""
    return RowLinear(PlainLinear([output.dense()[ids_W]]), MAX_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMaker:
    """What a head of one target is built from besides its own tensors.

    Attributes:
        config: the target's configuration.
        make_layer: the family's decoder layer, from a builder and a prefix.
        shape: of its keys and values.
        embedding_VD: the target's own embedding.
        output: the target's own output layer.
    """

    config: Any
    make_layer: Callable[[Builder, str], Layer]
    shape: LayerShape
    embedding_VD: Tensor
    output: RowLinear

    @property
    def style(self) -> HeadStyle:
        """The family's own, or that of trained heads where it has none."""
        return HEAD_STYLES.get(self.config.model_type) or trained_style(self.config)

    def __call__(self, build: Builder, shortlist: tuple[int, ...] | None = None) -> NativeHead:
        """The head whose tensors ``build`` hands out; ``shortlist`` is its default."""
        return NativeHead(
            self.style, self.config, build, make_layer=partial(self.make_layer, build), shape=self.shape,
            embedding_VD=self.embedding_VD, output=self.output, default_shortlist=shortlist,
        )  # fmt: skip

    def beside(self, build: Builder) -> NativeHead | None:
        """The head that the target's checkpoint holds, if any; call this after the target's own layers.

        Whether it does is read from the tensors: configurations claim heads that were not saved.
        """
        is_native = self.config.model_type in HEAD_STYLES
        return self(build.apart()) if is_native and build.has_any(self.style.prefix_in(self.config)) else None


class HeadSession:
    """Keys and values of one request's head, with the target cache's mark, commit and rollback."""

    def __init__(
        self, head: NativeHead, capacity: int, max_rows: int, tables: dict[str, RotaryTable]
    ) -> None:
        self._head, self._tables, self._max_rows = head, tables, max_rows
        self.cache = KVCache(
            [head.shape], capacity=capacity, max_rows=max_rows, dtype=head.dtype, device=head.device
        )

    @torch.inference_mode()
    def prefill(self, ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """The first slots, all at once and committed; ``[T, D]``."""
        if self.cache.mark():
            raise RollbackError("a prompt can only fill an empty cache")
        step = PromptStep(self.cache, self._tables, [self._head.shape], len(ids_T))
        out_TD = self._head.finish(self._head.join(ids_T, hidden_TD, step), step)
        self.cache.finish_prompt(len(ids_T))
        return out_TD

    @torch.inference_mode()
    def extend(self, ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """The next slots, pending until ``cache.commit``; ``[T, D]``."""
        start = self.cache.mark()
        rows = self.cache.begin(len(ids_T))
        try:
            rotary = {kind: table.rows(start, len(ids_T)) for kind, table in self._tables.items()}
            step = RowsStep(rows, rotary)
            return self._head.finish(self._head.join(ids_T, hidden_TD, step), step)
        except BaseException:
            self.cache.rollback(start)
            raise

    @torch.inference_mode()
    def catch_up(self, ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """Committed slots of any number; the last one's output, ``[1, D]``."""
        if not self.cache.mark():
            return self.prefill(ids_T, hidden_TD)[-1:]
        for start in range(0, len(ids_T), self._max_rows):
            span = slice(start, start + self._max_rows)
            out_TD = self.extend(ids_T[span], hidden_TD[span])
            self.cache.commit(len(out_TD))
        return out_TD[-1:]
