"""A mixture of experts as stock computes it: routing, the chosen experts, the shared expert's gate.

The experts are transformers' own module and its own expert functions, fed one row a call in a verification:
several rows would share a matrix product where they are sent to the same expert, and other bits come out. A
prompt is one call over all rows. The linears around the experts are not here: they run by the plan.
Letters: T rows, D hidden, E experts, I inner, C experts a row is sent to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts


def route(logits_TE: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each row's experts, ``[T, C]`` each, in stock's order of operations."""
    probabilities_TE = F.softmax(logits_TE, dtype=torch.float, dim=-1)
    weights_TC, ids_TC = torch.topk(probabilities_TE, num_chosen, dim=-1)
    weights_TC /= weights_TC.sum(dim=-1, keepdim=True)
    return weights_TC.to(logits_TE.dtype), ids_TC


class Experts:
    """The experts of one layer.

    Args:
        config: sizes, activation, and how many experts a row is sent to.
        gate_up_E2ID: gate and up projections, gate first.
        down_EDI: down projections.
    """

    def __init__(self, config: Any, gate_up_E2ID: Tensor, down_EDI: Tensor) -> None:
        with torch.device("meta"):
            self._module: Any = Qwen3_5MoeExperts(config)
        self._module.gate_up_proj = nn.Parameter(gate_up_E2ID, requires_grad=False)
        self._module.down_proj = nn.Parameter(down_EDI, requires_grad=False)
        self._num_experts, self._num_chosen = config.num_experts, config.num_experts_per_tok
        # Off the CPU, ``generate`` takes other calls for its decode steps than for the prompt.
        self._step = grouped_mm_experts_forward
        if gate_up_E2ID.device.type != "cpu":
            self._step = batched_mm_experts_forward

    def rows(self, x_TD: Tensor, routed_TN: Tensor, shared_TD: Tensor) -> Tensor:
        """``[T, D]``, every row as stock computes it alone.

        Args:
            x_TD: the experts' input.
            routed_TN: router logits of every expert and the shared expert's gate, ``[T, E + 1]``.
            shared_TD: the shared expert's output.
        """
        each = zip(x_TD.split(1), routed_TN.split(1), shared_TD.split(1), strict=True)
        return torch.cat([self._mix(self._step, *row) for row in each])

    def prompt(self, x_TD: Tensor, routed_TN: Tensor, shared_TD: Tensor) -> Tensor:
        """The same by one call over all rows, as stock's prefill makes it."""
        return self._mix(grouped_mm_experts_forward, x_TD, routed_TN, shared_TD)

    def _mix(self, forward: Any, x_TD: Tensor, routed_TN: Tensor, shared_TD: Tensor) -> Tensor:
        # Stock's are tensors of their own: fp32 sigmoid has other bits over a strided column.
        logits_TE, gate_T1 = (part.contiguous() for part in routed_TN.split([self._num_experts, 1], -1))
        weights_TC, ids_TC = route(logits_TE, self._num_chosen)
        out_TD: Tensor = forward(self._module, x_TD, ids_TC, weights_TC)
        return out_TD + F.sigmoid(gate_T1) * shared_TD

    @property
    def nbytes(self) -> int:
        """Bytes of the experts that one row is sent to."""
        held = sum(int(weight.nbytes) for weight in self._module.parameters())
        return held * int(self._num_chosen) // int(self._num_experts)
