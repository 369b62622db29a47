"""Gemma 3 text models (``model_type: gemma3_text``): sliding and full layers, four norms, scaled embedding.

Source: ``transformers.models.gemma3.modeling_gemma3`` (5.24), whose order of operations and casts is
kept. Norm weights are stored as gamma - 1 and applied in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from draftproof.cache import LayerShape
from draftproof.models.build import Builder, rotary_table
from draftproof.models.decoder import DecoderParts, Step
from draftproof.models.mtp import HeadMaker
from draftproof.ops.activation import gelu_gate
from draftproof.ops.norm import rms_norm_shifted
from draftproof.ops.rotary import rotate


def refusal(config: Any) -> str | None:
    """Why this configuration cannot run row-exact, or ``None``."""
    if config.attention_bias:
        return "biases in linear layers"
    if config.hidden_activation != "gelu_pytorch_tanh":
        return f"activation {config.hidden_activation!r}"
    if config.attn_logit_softcapping or config.final_logit_softcapping:
        return "logit soft-capping"
    if config.use_bidirectional_attention:
        return "bidirectional attention"
    return None


class Gemma3Layer:
    """One decoder layer over rows ``[T, D]``."""

    def __init__(self, config: Any, build: Builder, prefix: str, index: int, kind: str) -> None:
        self._index, self._eps, self._kind = index, config.rms_norm_eps, kind
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._size = config.head_dim
        self._scale = config.query_pre_attn_scalar**-0.5
        self._qkv = build.qkv(prefix + "self_attn.", self._heads, self._groups, self._size)
        self._out = build.linear("out", [prefix + "self_attn.o_proj"], self._heads * self._size)
        self._gate_up = build.gate_up(prefix + "mlp.", config.intermediate_size)
        self._down = build.linear("down", [prefix + "mlp.down_proj"], config.intermediate_size)
        self._norm_in = build.gamma(prefix + "input_layernorm.weight")
        self._norm_attended = build.gamma(prefix + "post_attention_layernorm.weight")
        self._norm_mlp = build.gamma(prefix + "pre_feedforward_layernorm.weight")
        self._norm_out = build.gamma(prefix + "post_feedforward_layernorm.weight")
        self._norm_q = build.gamma(prefix + "self_attn.q_norm.weight", self._size)
        self._norm_k = build.gamma(prefix + "self_attn.k_norm.weight", self._size)

    def __call__(self, h_TD: Tensor, step: Step) -> Tensor:
        """``[T, D] -> [T, D]``."""
        heads, groups, eps = self._heads, self._groups, self._eps
        x_TD = rms_norm_shifted(h_TD, self._norm_in, eps)
        qkv = step.linear(self._qkv, x_TD).view(len(h_TD), -1, self._size)
        rotary = step.rotary(self._kind)
        q_THK = rms_norm_shifted(qkv[:, :heads], self._norm_q, eps)
        k_TGK = rms_norm_shifted(qkv[:, heads : heads + groups], self._norm_k, eps)
        q_THK = rotate(q_THK, rotary.cos_T1K, rotary.signed_sin_T1K)
        k_TGK = rotate(k_TGK, rotary.cos_T1K, rotary.signed_sin_T1K)
        mixed = step.attend(self._index, q_THK, k_TGK, qkv[:, heads + groups :], self._scale)
        h_TD = h_TD + rms_norm_shifted(step.linear(self._out, mixed), self._norm_attended, eps)
        x_TD = rms_norm_shifted(h_TD, self._norm_mlp, eps)
        x_TD = step.linear(self._down, step.activate(gelu_gate, step.linear(self._gate_up, x_TD)))
        return h_TD + rms_norm_shifted(x_TD, self._norm_out, eps)


def build(config: Any, build: Builder) -> DecoderParts:
    """The target's parts from a checkpoint."""
    embedding, head = build.embedding_and_head(config)
    layers = tuple(
        Gemma3Layer(config, build, f"model.layers.{i}.", i, kind) for i, kind in enumerate(config.layer_types)
    )
    norm, eps = build.gamma("model.norm.weight"), config.rms_norm_eps
    shapes = tuple(
        LayerShape(
            num_groups=config.num_key_value_heads, head_size=config.head_dim,
            window=config.sliding_window if kind == "sliding_attention" else None,
        )
        for kind in config.layer_types
    )  # fmt: skip
    rotary = Gemma3RotaryEmbedding(config)

    def make_rotary(num_positions: int) -> dict[str, tuple[Tensor, Tensor]]:
        probe = torch.empty(0, dtype=build.dtype)
        return {
            kind: rotary_table(partial(rotary, probe, layer_type=kind), num_positions, build.device)
            for kind in sorted(set(config.layer_types))
        }

    scale = torch.tensor(config.hidden_size**0.5).to(build.dtype).to(build.device)
    kind_of_head = max(config.layer_types, key=lambda kind: kind == "full_attention")
    make_head = HeadMaker(
        config=config, make_layer=lambda apart, prefix: Gemma3Layer(config, apart, prefix, 0, kind_of_head),
        shape=replace(shapes[0], window=None), embedding_VD=embedding, output=head,
    )  # fmt: skip
    return build.parts(
        config, embedding=embedding, head=head, layers=layers, shapes=shapes, embed_scale=scale,
        final_norm=lambda h: rms_norm_shifted(h, norm, eps), make_rotary=make_rotary, make_head=make_head,
    )  # fmt: skip
