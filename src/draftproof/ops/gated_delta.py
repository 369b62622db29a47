"""The gated delta rule and its short convolution, one row as stock computes it and many rows with its bits.

A row decays the state, reads it, corrects it and reads it again (Yang, Kautz, Hatamizadeh 2024, Gated Delta
Networks, arXiv 2412.06464): ``S = exp(g) S; d = beta (v - S^T k); S = S + k d^T; o = S^T q``, all in fp32.
``*_reference`` calls stock's own functions one row at a time; the form used shares what rows do not depend
on and runs the recurrence row by row, leaving the state after *every* row, so that a commit selects one.
The probe compares both. Prompts call stock's functions over all rows, as its prefill does.
Letters: T rows, C convolution channels, W its width, H value heads, N query/key heads, K key size, V value
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    causal_conv1d_update,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInput:
    """What the recurrence of several rows reads: the convolved projections, split, and the two gates.

    ``q_TNK`` and ``k_TNK`` are not normalised, ``g_TH`` is the log decay in fp32, ``beta_TH`` the write
    strength in the activations' dtype.
    """

    q_TNK: Tensor
    k_TNK: Tensor
    v_THV: Tensor
    g_TH: Tensor
    beta_TH: Tensor


def conv_reference(window_CW: Tensor, x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    """Stock's one-row update, row after row: ``[T, C] -> [T, C]``, SiLU included."""
    window = window_CW[None].clone()
    columns = [row_C[None, :, None] for row_C in x_TC.unbind(0)]
    return torch.cat([causal_conv1d_update(x, window, weight_CW, None, "silu") for x in columns])[..., 0]


def conv_rows(windows_TCW: Tensor, weight_C1W: Tensor) -> Tensor:
    """The bits of ``conv_reference`` for rows given as windows of ``W`` old columns and the row's own.

    ``[T, C, W + 1] -> [T, C]``. Stock's update computes two outputs a row and keeps the second; with
    ``W`` columns and one output fp32 kernels give other bits.
    """
    return F.silu(F.conv1d(windows_TCW, weight_C1W, groups=windows_TCW.shape[1])[..., -1])


def conv_row_by_row(windows_TCW: Tensor, weight_C1W: Tensor) -> Tensor:
    """The same, one call a row: for kernels whose bits depend on the batch."""
    return torch.cat([conv_rows(window[None], weight_C1W) for window in windows_TCW.unbind(0)])


def conv_prompt(x_TC: Tensor, weight_CW: Tensor) -> Tensor:
    """A whole prompt, ``[T, C] -> [T, C]``; one shorter than the kernel is padded, as stock's cache does."""
    num_rows, width = x_TC.shape[0], weight_CW.shape[1]
    columns = x_TC.contiguous()[None].transpose(
        1, 2
    )  # a slice of a fused row would be convolved by another kernel
    if num_rows < width:
        columns = F.pad(columns, (width - num_rows, 0))
    out: Tensor = causal_conv1d_fn(columns, weight_CW, None, activation="silu")
    return out[0, :, -num_rows:].t()


def delta_reference(rows: DeltaInput, state_HKV: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Stock's recurrence, one row a call: outputs ``[T, H, V]`` and the state after every row."""
    outs, states, state = [], [], state_HKV
    for t in range(len(rows.q_TNK)):
        out, after = torch_recurrent_gated_delta_rule(
            *_batched(rows, t),
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        state = after[0]
        outs.append(out[0, 0])
        states.append(state)
    return torch.stack(outs), states


def _batched(rows: DeltaInput, t: int) -> tuple[Tensor, ...]:
    parts = (rows.q_TNK, rows.k_TNK, rows.v_THV, rows.g_TH, rows.beta_TH)
    return tuple(part[None, t : t + 1] for part in parts)


def delta_rows(rows: DeltaInput, state_HKV: Tensor, into: Sequence[Tensor]) -> Tensor:
    """The bits of ``delta_reference``; the state after row ``t`` is written to ``into[t]``, ``[H, K, V]``."""
    q_THK, k_THK = (_normalised(x, rows.v_THV.shape[1]) for x in (rows.q_TNK, rows.k_TNK))
    q_THK = q_THK / (q_THK.shape[-1] ** 0.5)
    v_THV, beta_TH1 = rows.v_THV.float(), rows.beta_TH.float()[..., None]
    decay_TH11 = rows.g_TH.float().exp()[..., None, None]
    out_THV = torch.empty_like(v_THV)
    scratch, before = torch.empty_like(state_HKV), state_HKV
    for t, after in enumerate(into):
        k_HK1 = k_THK[t, :, :, None]
        torch.mul(before, decay_TH11[t], out=after)
        read_HV = torch.mul(after, k_HK1, out=scratch).sum(dim=-2)
        delta_H1V = ((v_THV[t] - read_HV) * beta_TH1[t])[:, None]
        after.add_(torch.mul(k_HK1, delta_H1V, out=scratch))
        torch.sum(torch.mul(after, q_THK[t, :, :, None], out=scratch), dim=-2, out=out_THV[t])
        before = after
    return out_THV.to(rows.q_TNK.dtype)


def _normalised(x_TNK: Tensor, num_heads: int) -> Tensor:
    """Unit length in fp32, every head repeated for the value heads it serves: ``[T, H, K]``."""
    x = x_TNK.float()
    x = x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _EPS)
    repeat = num_heads // x.shape[1]
    return x if repeat == 1 else x.repeat_interleave(repeat, dim=1)


def delta_row_by_row(rows: DeltaInput, state_HKV: Tensor, into: Sequence[Tensor]) -> Tensor:
    """The same through stock's own function, one call a row: where a kernel package replaces it."""
    out_THV, states = delta_reference(rows, state_HKV)
    for after, state in zip(into, states, strict=True):
        after.copy_(state)
    return out_THV


def delta_prompt(rows: DeltaInput) -> tuple[Tensor, Tensor]:
    """A prompt through stock's chunked rule: outputs ``[T, H, V]`` and the final state ``[H, K, V]``."""
    parts = (rows.q_TNK, rows.k_TNK, rows.v_THV, rows.g_TH, rows.beta_TH)
    out, state = torch_chunk_gated_delta_rule(
        *(part[None] for part in parts), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0], state[0]


def gates(a_TH: Tensor, b_TH: Tensor, decay_H: Tensor, bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay (fp32) and write strength, ``[T, H]`` each; ``decay_H`` is ``-exp(A_log)`` in fp32.

    Inputs are made contiguous, as stock's are: elements of a slice go through another exponential.
    """
    return decay_H * F.softplus(a_TH.contiguous().float() + bias_H), b_TH.contiguous().sigmoid()


def gates_row_by_row(a_TH: Tensor, b_TH: Tensor, decay_H: Tensor, bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """The same, one row a call."""
    pairs = [
        gates(a[None], b[None], decay_H, bias_H) for a, b in zip(a_TH.unbind(0), b_TH.unbind(0), strict=True)
    ]
    return torch.cat([g for g, _ in pairs]), torch.cat([beta for _, beta in pairs])


def gated_norm_reference(x_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """As transformers writes it: normalise in fp32, cast, scale, then multiply by ``silu(z)`` in fp32."""
    hidden = x_THV.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    hidden = weight_V * hidden.to(x_THV.dtype)
    hidden = hidden * F.silu(z_THV.to(torch.float32))
    return hidden.to(x_THV.dtype)


def gated_norm(x_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """The bits of ``gated_norm_reference`` with fewer temporaries."""
    hidden = F.rms_norm(x_THV, x_THV.shape[-1:], None, eps).mul_(weight_V)
    return F.silu(z_THV.float()).mul_(hidden).to(x_THV.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaForms:
    """The forms a plan found to carry one-row bits; see ``FORMS``."""

    conv: Callable[[Tensor, Tensor], Tensor]
    delta: Callable[[DeltaInput, Tensor, Sequence[Tensor]], Tensor]
    gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, chosen: dict[str, str]) -> DeltaForms:
        """The functions behind the names of a plan, by operation."""
        return cls(**{op: FORMS[op][chosen[op]] for op in FORMS})


FORMS: dict[str, dict[str, Callable[..., Any]]] = {
    "conv": {"batched": conv_rows, "row by row": conv_row_by_row},
    "delta": {"batched": delta_rows, "row by row": delta_row_by_row},
    "gates": {"batched": gates, "row by row": gates_row_by_row},
}
