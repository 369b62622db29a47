"""GLM-4.5's dense form (``model_type: glm4_moe`` without experts): Llama's layer, half of each head rotated.

Source: ``transformers.models.glm4_moe.modeling_glm4_moe`` (5.24), whose order of operations and casts is
kept. Queries and keys are normed where the configuration says so. Layers of experts are refused and left to
the generic target. A native head sits behind the last layer, as one more layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from draftproof.cache import LayerShape
from draftproof.models.build import Builder, full_rotary, head_size_of, head_spec
from draftproof.models.build import linear_specs as dense_specs
from draftproof.models.decoder import DecoderParts, Step
from draftproof.models.mtp import HeadMaker
from draftproof.ops.activation import silu_gate
from draftproof.ops.linear import LinearSpec
from draftproof.ops.norm import rms_norm
from draftproof.ops.rotary import rotate_first


def refusal(config: Any) -> str | None:
    """Why this configuration cannot run row-exact, or ``None``."""
    num_heads = config.num_mtp_layers or 0
    if config.first_k_dense_replace < config.num_hidden_layers + num_heads:
        return "layers of experts"
    if num_heads > 1:
        return f"a chain of {num_heads} native heads"
    if config.attention_bias:
        return "biases in linear layers"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}"
    return None


def linear_specs(config: Any) -> tuple[LinearSpec, ...]:
    """Every linear shape of this configuration, as the layers fuse them."""
    return (*dense_specs(config), head_spec(config))


class Glm4MoeLayer:
    """One dense decoder layer over rows ``[T, D]``."""

    def __init__(self, config: Any, build: Builder, prefix: str, index: int) -> None:
        self._index, self._eps = index, config.rms_norm_eps
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._size = head_size_of(config)
        self._qkv = build.qkv(prefix + "self_attn.", self._heads, self._groups, self._size)
        self._out = build.linear("out", [prefix + "self_attn.o_proj"], self._heads * self._size)
        self._gate_up = build.gate_up(prefix + "mlp.", config.intermediate_size)
        self._down = build.linear("down", [prefix + "mlp.down_proj"], config.intermediate_size)
        self._norm_in = build.vector(prefix + "input_layernorm.weight")
        self._norm_mlp = build.vector(prefix + "post_attention_layernorm.weight")
        self._norm_q = self._norm_k = None
        if config.use_qk_norm:
            self._norm_q = build.vector(prefix + "self_attn.q_norm.weight", self._size)
            self._norm_k = build.vector(prefix + "self_attn.k_norm.weight", self._size)

    def __call__(self, h_TD: Tensor, step: Step) -> Tensor:
        """``[T, D] -> [T, D]``."""
        x_TD = rms_norm(h_TD, self._norm_in, self._eps)
        h_TD = h_TD + step.linear(self._out, self._attend(x_TD, step))
        x_TD = rms_norm(h_TD, self._norm_mlp, self._eps)
        return h_TD + step.linear(self._down, step.activate(silu_gate, step.linear(self._gate_up, x_TD)))

    def _attend(self, x_TD: Tensor, step: Step) -> Tensor:
        heads, groups = self._heads, self._groups
        qkv = step.linear(self._qkv, x_TD).view(len(x_TD), -1, self._size)
        q_THK, k_TGK, v_TGK = qkv.split([heads, groups, groups], 1)
        if self._norm_q is not None and self._norm_k is not None:
            q_THK = rms_norm(q_THK, self._norm_q, self._eps)
            k_TGK = rms_norm(k_TGK, self._norm_k, self._eps)
        rotary = step.rotary("full")
        q_THK = rotate_first(q_THK, rotary.cos_T1K, rotary.signed_sin_T1K)
        k_TGK = rotate_first(k_TGK, rotary.cos_T1K, rotary.signed_sin_T1K)
        return step.attend(self._index, q_THK, k_TGK, v_TGK, self._size**-0.5)


def build(config: Any, build: Builder) -> DecoderParts:
    """The target's parts from a checkpoint."""
    embedding, head = build.embedding_and_head(config)
    num_layers = config.num_hidden_layers
    layers = tuple(Glm4MoeLayer(config, build, f"model.layers.{i}.", i) for i in range(num_layers))
    shape = LayerShape(num_groups=config.num_key_value_heads, head_size=head_size_of(config))
    norm, eps = build.vector("model.norm.weight"), config.rms_norm_eps
    make_rotary = full_rotary(Glm4MoeRotaryEmbedding(config), build)

    make_head = HeadMaker(
        config=config, make_layer=lambda apart, prefix: Glm4MoeLayer(config, apart, prefix, 0),
        shape=shape, embedding_VD=embedding, output=head,
    )  # fmt: skip
    return build.parts(
        config, embedding=embedding, head=head, layers=layers, shapes=(shape,) * num_layers,
        final_norm=lambda h: rms_norm(h, norm, eps), make_rotary=make_rotary, make_head=make_head,
    )  # fmt: skip
