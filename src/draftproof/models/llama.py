"""Llama (``model_type: llama``): SmolLM2 and everything else with the plain Llama layer, without biases.

Source: ``transformers.models.llama.modeling_llama`` (5.24), whose order of operations and casts is kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftproof.cache import LayerShape
from draftproof.models.build import Builder, full_rotary, head_size_of
from draftproof.models.decoder import DecoderParts, Step
from draftproof.models.mtp import HeadMaker
from draftproof.ops.activation import silu_gate
from draftproof.ops.norm import rms_norm
from draftproof.ops.rotary import rotate


def refusal(config: Any) -> str | None:
    """Why this configuration cannot run row-exact, or ``None``."""
    if config.attention_bias or config.mlp_bias:
        return "biases in linear layers"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}"
    return None


class LlamaLayer:
    """One decoder layer over rows ``[T, D]``."""

    def __init__(self, config: Any, build: Builder, prefix: str, index: int) -> None:
        self._index, self._eps = index, config.rms_norm_eps
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._size = head_size_of(config)
        self._scale = self._size**-0.5
        self._qkv = build.qkv(prefix + "self_attn.", self._heads, self._groups, self._size)
        self._out = build.linear("out", [prefix + "self_attn.o_proj"], self._heads * self._size)
        self._gate_up = build.gate_up(prefix + "mlp.", config.intermediate_size)
        self._down = build.linear("down", [prefix + "mlp.down_proj"], config.intermediate_size)
        self._norm_in = build.vector(prefix + "input_layernorm.weight")
        self._norm_mlp = build.vector(prefix + "post_attention_layernorm.weight")

    def __call__(self, h_TD: Tensor, step: Step) -> Tensor:
        """``[T, D] -> [T, D]``."""
        x_TD = rms_norm(h_TD, self._norm_in, self._eps)
        qkv = step.linear(self._qkv, x_TD).view(len(h_TD), -1, self._size)
        rotary = step.rotary("full")
        qk = rotate(qkv[:, : self._heads + self._groups], rotary.cos_T1K, rotary.signed_sin_T1K)
        q_THK, k_TGK = qk[:, : self._heads], qk[:, self._heads :]
        mixed = step.attend(self._index, q_THK, k_TGK, qkv[:, self._heads + self._groups :], self._scale)
        h_TD = h_TD + step.linear(self._out, mixed)
        x_TD = rms_norm(h_TD, self._norm_mlp, self._eps)
        return h_TD + step.linear(self._down, step.activate(silu_gate, step.linear(self._gate_up, x_TD)))


def build(config: Any, build: Builder) -> DecoderParts:
    """The target's parts from a checkpoint."""
    embedding, head = build.embedding_and_head(config)
    layers = tuple(
        LlamaLayer(config, build, f"model.layers.{i}.", i) for i in range(config.num_hidden_layers)
    )
    norm, eps = build.vector("model.norm.weight"), config.rms_norm_eps
    shape = LayerShape(num_groups=config.num_key_value_heads, head_size=head_size_of(config))
    make_rotary = full_rotary(LlamaRotaryEmbedding(config), build)

    make_head = HeadMaker(
        config=config, make_layer=lambda apart, prefix: LlamaLayer(config, apart, prefix, 0), shape=shape,
        embedding_VD=embedding, output=head,
    )  # fmt: skip
    return build.parts(
        config, embedding=embedding, head=head, layers=layers, shapes=(shape,) * len(layers),
        final_norm=lambda h: rms_norm(h, norm, eps), make_rotary=make_rotary, make_head=make_head,
    )  # fmt: skip
