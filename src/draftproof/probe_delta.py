"""Measures what this machine's kernels do with several rows of a gated delta net, beside ``probe``.

Each operation is tried over all rows at once and, where that changes a row's bits, one row a call. The want
is always stock's own function, one row a call. Letters as in ``ops.gated_delta``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops.gated_delta import (
    FORMS,
    DeltaInput,
    conv_reference,
    delta_reference,
    gated_norm,
    gated_norm_reference,
    gates,
)
from draftproof.ops.linear import MAX_ROWS
from draftproof.record import OpEvidence

_EPS = 1e-6
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, MAX_ROWS)

Try = Callable[[Callable[..., object], int], bool]


@torch.inference_mode()
def probe_delta(
    num_keys: int, num_heads: int, key_size: int, value_size: int, width: int, dtype: torch.dtype,
    device: torch.device,
) -> tuple[OpEvidence, ...]:  # fmt: skip
    """Which form of the convolution, the recurrence and its gates carries one-row bits, and the gated norm.

    Args:
        num_keys: query/key heads.
        num_heads: value heads.
        key_size: size of a key.
        value_size: size of a value.
        width: of the convolution.
        dtype: of activations; states are fp32.
        device: whose kernels.
    """
    generator = torch.Generator().manual_seed(17)

    def rows(*size: int) -> Tensor:
        return (2 * torch.randn(*size, generator=generator)).to(dtype).to(device)

    channels = 2 * num_keys * key_size + num_heads * value_size
    shape = (num_keys, num_heads, key_size, value_size, width)
    return (
        _evidence("conv", shape, _try_conv(rows(channels, width + MAX_ROWS), rows(channels, width))),
        _evidence(
            "gates", (num_heads,), _try_gates(rows(MAX_ROWS, num_heads), rows(MAX_ROWS, num_heads), rows)
        ),
        _evidence("delta", shape, _try_delta(shape, rows)),
        _norm_evidence(rows(MAX_ROWS, num_heads, value_size), rows),
    )


def _evidence(op: str, shape: tuple[int, ...], is_exact: Try) -> OpEvidence:
    """The first form that is exact at every row count; calls of one row are, by construction."""
    rejected: dict[str, str] = {}
    for form, function in FORMS[op].items():
        failed = [count for count in _COUNTS if not is_exact(function, count)]
        if not failed:
            return OpEvidence(
                op=op, shape=shape, form=form, max_rows=MAX_ROWS, is_exact=True, num_checked=sum(_COUNTS),
                rejected=rejected,
            )  # fmt: skip
        rejected[form] = f"from {failed[0]} rows"
    return OpEvidence(
        op=op, shape=shape, form=form, max_rows=1, is_exact=False, num_checked=sum(_COUNTS), rejected=rejected
    )


def _try_conv(tape_CS: Tensor, weight_CW: Tensor) -> Try:
    width = weight_CW.shape[1]
    want = conv_reference(tape_CS[:, :width], tape_CS[:, width:].t(), weight_CW)

    def is_exact(function: Callable[..., object], count: int) -> bool:
        windows = tape_CS[:, : width + count].unfold(1, width + 1, 1).transpose(0, 1).contiguous()
        got = function(windows, weight_CW[:, None])
        return isinstance(got, Tensor) and torch.equal(got, want[:count])

    return is_exact


def _try_gates(a_TH: Tensor, b_TH: Tensor, rows: Callable[..., Tensor]) -> Try:
    decay, bias = -rows(a_TH.shape[1]).float().exp(), rows(a_TH.shape[1])
    singles = [gates(a_TH[t : t + 1], b_TH[t : t + 1], decay, bias) for t in range(len(a_TH))]
    want = [torch.cat(part) for part in zip(*singles, strict=True)]

    def is_exact(function: Callable[..., object], count: int) -> bool:
        got = function(a_TH[:count], b_TH[:count], decay, bias)
        return isinstance(got, tuple) and all(
            torch.equal(g, w[:count]) for g, w in zip(got, want, strict=True)
        )

    return is_exact


def _try_delta(shape: tuple[int, ...], rows: Callable[..., Tensor]) -> Try:
    num_keys, num_heads, key_size, value_size, _ = shape
    given = DeltaInput(
        q_TNK=rows(MAX_ROWS, num_keys, key_size), k_TNK=rows(MAX_ROWS, num_keys, key_size),
        v_THV=rows(MAX_ROWS, num_heads, value_size), g_TH=-rows(MAX_ROWS, num_heads).float().abs(),
        beta_TH=rows(MAX_ROWS, num_heads).sigmoid(),
    )  # fmt: skip
    state = rows(num_heads, key_size, value_size).float()
    want, states = delta_reference(given, state)

    def is_exact(function: Callable[..., object], count: int) -> bool:
        some = DeltaInput(**{name: getattr(given, name)[:count] for name in DeltaInput.__slots__})
        into = [torch.empty_like(state) for _ in range(count)]
        got = function(some, state, into)
        same = isinstance(got, Tensor) and torch.equal(got, want[:count])
        return same and all(torch.equal(a, b) for a, b in zip(into, states, strict=False))

    return is_exact


def _norm_evidence(x_THV: Tensor, rows: Callable[..., Tensor]) -> OpEvidence:
    z_THV, weight = rows(*x_THV.shape), rows(x_THV.shape[2])
    want = torch.cat(
        [gated_norm_reference(x_THV[t : t + 1], z_THV[t : t + 1], weight, _EPS) for t in range(MAX_ROWS)]
    )
    same = all(torch.equal(gated_norm(x_THV[:n], z_THV[:n], weight, _EPS), want[:n]) for n in _COUNTS)
    return OpEvidence(
        op="gated_norm", shape=tuple(x_THV.shape[1:]), form="batched", max_rows=MAX_ROWS if same else 1,
        is_exact=same, num_checked=sum(_COUNTS),
    )  # fmt: skip
