"""Qwen3.5, text models with experts (``model_type: qwen3_5_moe_text``): another feed-forward part.

Source: ``transformers.models.qwen3_5_moe.modeling_qwen3_5_moe`` (5.24), whose order of operations and casts
is kept; token mixers, norms and the native head are those of ``qwen3_5``. Checkpoints hold the experts of a
layer fused in two tensors or one by one, in the text model and in the head independently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftproof.models import qwen3_5
from draftproof.models.build import Builder
from draftproof.models.decoder import DecoderParts, Step
from draftproof.ops.activation import silu_gate
from draftproof.ops.experts import Experts
from draftproof.ops.linear import LinearSpec


def refusal(config: Any) -> str | None:
    """Why this configuration cannot run row-exact, or ``None``."""
    how = getattr(config, "_experts_implementation", None)
    if how not in (None, "grouped_mm"):
        return f"experts computed as {how!r}"
    return qwen3_5.refusal(config)


def linear_specs(config: Any) -> tuple[LinearSpec, ...]:
    """Every linear shape of this configuration, as the layers fuse them; experts are none."""
    router = LinearSpec(name="router", num_in=config.hidden_size, parts=(config.num_experts, 1))
    return (*qwen3_5.specs_around(config, config.shared_expert_intermediate_size), router)


class SparseFeedForward:
    """Experts chosen by a router, beside one shared by all rows behind a gate: ``[T, D] -> [T, D]``."""

    def __init__(self, config: Any, build: Builder, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.shared_expert_intermediate_size
        self._router = build.linear(
            "router", [prefix + "gate", prefix + "shared_expert_gate"], hidden, [config.num_experts, 1]
        )
        self._gate_up = build.gate_up(prefix + "shared_expert.", inner)
        self._down = build.linear("down", [prefix + "shared_expert.down_proj"], inner)
        self._experts = Experts(config, *_experts(config, build, prefix + "experts."))
        build.count(self._experts)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """As stock's block, with the shared expert's linears first."""
        shared_TD = step.linear(self._down, step.activate(silu_gate, step.linear(self._gate_up, x_TD)))
        return step.mix(self._experts, x_TD, step.linear(self._router, x_TD), shared_TD)


def _experts(config: Any, build: Builder, prefix: str) -> tuple[Tensor, Tensor]:
    """Gate and up ``[E, 2 I, D]`` and down projections ``[E, D, I]`` of a layer, however they are stored."""
    num, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    if build.has_any(prefix + "gate_up_proj") or build.has_any(prefix + "down_proj"):
        return (
            build.tensor(prefix + "gate_up_proj", (num, 2 * inner, hidden)),
            build.tensor(prefix + "down_proj", (num, hidden, inner)),
        )

    def parts(name: str, shape: tuple[int, int]) -> list[Tensor]:
        return [build.tensor(f"{prefix}{i}.{name}_proj.weight", shape) for i in range(num)]

    gates, ups = (torch.stack(parts(name, (inner, hidden))) for name in ("gate", "up"))
    return torch.cat((gates, ups), 1), torch.stack(parts("down", (hidden, inner)))


def build(config: Any, build: Builder) -> DecoderParts:
    """The target's parts from a checkpoint."""
    return qwen3_5.assemble(config, build, SparseFeedForward)
