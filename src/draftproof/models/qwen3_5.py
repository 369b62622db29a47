"""Qwen3.5, dense text models (``model_type: qwen3_5_text``): gated delta nets and gated attention.

Source: ``transformers.models.qwen3_5.modeling_qwen3_5`` (5.24), whose order of operations and casts is kept.
Norm weights are stored as gamma - 1 and applied in fp32, but for the gated norm after the recurrence, which
stores gamma. Text positions are the same on all three rotary axes, so the multimodal embedding is the plain
one on the first part of every head. Released checkpoints keep the text model under ``model.language_model``
beside a vision tower; ``models.load`` renames the first and leaves the second alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from draftproof.cache import LayerShape
from draftproof.models.build import Builder, full_rotary, head_size_of, head_spec
from draftproof.models.decoder import DecoderParts, Layer, Step
from draftproof.models.mtp import HeadMaker
from draftproof.ops.activation import silu_gate
from draftproof.ops.gated_delta import DeltaInput, gated_norm
from draftproof.ops.linear import LinearSpec
from draftproof.ops.norm import rms_norm_shifted
from draftproof.ops.rotary import rotate_first
from draftproof.recurrent import RecurrentShape


def refusal(config: Any) -> str | None:
    """Why this configuration cannot run row-exact, or ``None``."""
    if config.attention_bias:
        return "biases in linear layers"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}"
    if unknown := set(config.layer_types) - {"linear_attention", "full_attention"}:
        return f"layers of type {', '.join(sorted(unknown))}"
    if not getattr(config, "attn_output_gate", True):
        return "attention without an output gate"
    return None


def recurrent_shape(config: Any) -> RecurrentShape:
    """State of one linear-attention layer."""
    return RecurrentShape(
        num_heads=config.linear_num_value_heads, key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim, conv_channels=_conv_channels(config),
        conv_width=config.linear_conv_kernel_dim,
    )  # fmt: skip


def _conv_channels(config: Any) -> int:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return int(2 * keys + config.linear_num_value_heads * config.linear_value_head_dim)


def linear_specs(config: Any) -> tuple[LinearSpec, ...]:
    """Every linear shape of this configuration, as the layers fuse them."""
    return specs_around(config, config.intermediate_size)


def specs_around(config: Any, inner: int) -> tuple[LinearSpec, ...]:
    """Every linear shape, where the dense feed-forward part is ``inner`` wide."""
    hidden, size = config.hidden_size, head_size_of(config)
    heads, groups = config.num_attention_heads * size, config.num_key_value_heads * size
    num_states = config.linear_num_value_heads
    values = num_states * config.linear_value_head_dim
    delta = (_conv_channels(config), values, num_states, num_states)
    return (
        LinearSpec(name="delta_in", num_in=hidden, parts=delta),
        LinearSpec(name="delta_out", num_in=values, parts=(hidden,)),
        LinearSpec(name="qkv", num_in=hidden, parts=(2 * heads, groups, groups)),
        LinearSpec(name="out", num_in=heads, parts=(hidden,)),
        LinearSpec(name="gate_up", num_in=hidden, parts=(inner, inner)),
        LinearSpec(name="down", num_in=inner, parts=(hidden,)),
        LinearSpec(name="head", num_in=hidden, parts=(config.vocab_size,)),
        head_spec(config),
    )


class FeedForward:
    """The dense feed-forward part, ``[T, D] -> [T, D]``."""

    def __init__(self, config: Any, build: Builder, prefix: str) -> None:
        self._gate_up = build.gate_up(prefix, config.intermediate_size)
        self._down = build.linear("down", [prefix + "down_proj"], config.intermediate_size)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Down of the gated up."""
        return step.linear(self._down, step.activate(silu_gate, step.linear(self._gate_up, x_TD)))


# From configuration, builder and prefix.
MakeFeedForward = Callable[[Any, Builder, str], Layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer stands: its prefix, its number among layers of its kind, and its feed-forward part."""

    prefix: str
    index: int
    feed_forward: MakeFeedForward


class _Block:
    """What both kinds of layer share: two norms around a token mixer and a feed-forward part."""

    def __init__(self, config: Any, build: Builder, place: Place) -> None:
        prefix = place.prefix
        self._eps, self._index = config.rms_norm_eps, place.index
        self._feed_forward = place.feed_forward(config, build, prefix + "mlp.")
        self._norm_in = build.gamma(prefix + "input_layernorm.weight")
        self._norm_mlp = build.gamma(prefix + "post_attention_layernorm.weight")

    def __call__(self, h_TD: Tensor, step: Step) -> Tensor:
        """``[T, D] -> [T, D]``."""
        h_TD = h_TD + self._mix(rms_norm_shifted(h_TD, self._norm_in, self._eps), step)
        x_TD = rms_norm_shifted(h_TD, self._norm_mlp, self._eps)
        return h_TD + self._feed_forward(x_TD, step)

    def _mix(self, x_TD: Tensor, step: Step) -> Tensor:
        raise NotImplementedError


class AttentionLayer(_Block):
    """Gated attention: queries bring a gate for their head's output."""

    def __init__(self, config: Any, build: Builder, place: Place) -> None:
        super().__init__(config, build, place)
        prefix = place.prefix
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._size = head_size_of(config)
        names = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        groups = self._groups * self._size
        self._qkv = build.linear(
            "qkv", names, config.hidden_size, [2 * self._heads * self._size, groups, groups]
        )
        self._out = build.linear("out", [prefix + "self_attn.o_proj"], self._heads * self._size)
        self._norm_q = build.gamma(prefix + "self_attn.q_norm.weight", self._size)
        self._norm_k = build.gamma(prefix + "self_attn.k_norm.weight", self._size)

    def _mix(self, x_TD: Tensor, step: Step) -> Tensor:
        num_rows, heads, size = len(x_TD), self._heads, self._size
        qkv = step.linear(self._qkv, x_TD)
        queries, keys, values = qkv.split([2 * heads * size, *[self._groups * size] * 2], -1)
        q_THK, gate_THK = queries.view(num_rows, heads, 2 * size).chunk(2, -1)
        rotary = step.rotary("full")
        cos_T1K, sin_T1K = rotary.cos_T1K, rotary.signed_sin_T1K
        k_TGK = rms_norm_shifted(keys.view(num_rows, -1, size), self._norm_k, self._eps)
        q_THK = rotate_first(rms_norm_shifted(q_THK, self._norm_q, self._eps), cos_T1K, sin_T1K)
        k_TGK = rotate_first(k_TGK, cos_T1K, sin_T1K)
        mixed = step.attend(self._index, q_THK, k_TGK, values.view(num_rows, -1, size), size**-0.5)
        return step.linear(self._out, mixed * torch.sigmoid(gate_THK.reshape(num_rows, -1)))


class DeltaLayer(_Block):
    """Gated delta net: short convolution, recurrent state, gated norm."""

    def __init__(self, config: Any, build: Builder, place: Place) -> None:
        super().__init__(config, build, place)
        shape = self._shape = recurrent_shape(config)
        self._keys = config.linear_num_key_heads * shape.key_size
        self._values = shape.num_heads * shape.value_size
        name = place.prefix + "linear_attn."
        sizes = [shape.conv_channels, self._values, shape.num_heads, shape.num_heads]
        self._in = build.linear("delta_in", [f"{name}in_proj_{p}" for p in ("qkv", "z", "b", "a")],
                                config.hidden_size, sizes)  # fmt: skip
        self._out = build.linear("delta_out", [name + "out_proj"], self._values)
        weight = build.tensor(name + "conv1d.weight", (shape.conv_channels, 1, shape.conv_width))
        self._conv_CW = weight.squeeze(1)
        self._decay_H = -build.vector(name + "A_log", shape.num_heads).float().exp()
        self._bias_H = build.vector(name + "dt_bias", shape.num_heads)
        self._norm_V = build.vector(name + "norm.weight", shape.value_size)
        self._forms = build.delta_forms()

    def _mix(self, x_TD: Tensor, step: Step) -> Tensor:
        num_rows, shape, forms = len(x_TD), self._shape, self._forms
        x_TC, z, b_TH, a_TH = step.linear(self._in, x_TD).split(
            [shape.conv_channels, self._values, shape.num_heads, shape.num_heads], -1
        )
        x_TC = step.convolve(self._index, x_TC, self._conv_CW, forms)
        q, k, v = x_TC.split([self._keys, self._keys, self._values], -1)
        g_TH, beta_TH = step.gates(a_TH, b_TH, self._decay_H, self._bias_H, forms)
        out_THV = step.recur(self._index, DeltaInput(
            q_TNK=q.reshape(num_rows, -1, shape.key_size), k_TNK=k.reshape(num_rows, -1, shape.key_size),
            v_THV=v.reshape(num_rows, -1, shape.value_size), g_TH=g_TH, beta_TH=beta_TH,
        ), forms)  # fmt: skip
        z_THV = z.reshape(out_THV.shape)
        return step.linear(self._out, gated_norm(out_THV, z_THV, self._norm_V, self._eps).view(num_rows, -1))


def build(config: Any, build: Builder) -> DecoderParts:
    """The target's parts from a checkpoint."""
    return assemble(config, build, FeedForward)


def assemble(config: Any, build: Builder, feed_forward: MakeFeedForward) -> DecoderParts:
    """The same with any feed-forward part in the layers and in the native head."""
    embedding, head = build.embedding_and_head(config)
    attention = LayerShape(num_groups=config.num_key_value_heads, head_size=head_size_of(config))
    layers: list[_Block] = []
    shapes: list[LayerShape | RecurrentShape] = []
    for index, kind in enumerate(config.layer_types):
        before = config.layer_types[:index].count(kind)
        place = Place(prefix=f"model.layers.{index}.", index=before, feed_forward=feed_forward)
        if kind == "full_attention":
            layers.append(AttentionLayer(config, build, place))
            shapes.append(attention)
        else:
            layers.append(DeltaLayer(config, build, place))
            shapes.append(recurrent_shape(config))
    norm, eps = build.gamma("model.norm.weight"), config.rms_norm_eps
    make_rotary = full_rotary(Qwen3_5TextRotaryEmbedding(config), build)

    def make_layer(apart: Builder, prefix: str) -> AttentionLayer:
        return AttentionLayer(config, apart, Place(prefix=prefix, index=0, feed_forward=feed_forward))

    make_head = HeadMaker(
        config=config, make_layer=make_layer, shape=attention, embedding_VD=embedding, output=head
    )
    return build.parts(
        config, embedding=embedding, head=head, layers=tuple(layers), shapes=tuple(shapes),
        final_norm=lambda h: rms_norm_shifted(h, norm, eps), make_rotary=make_rotary, make_head=make_head,
    )  # fmt: skip
