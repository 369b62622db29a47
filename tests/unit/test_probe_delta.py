"""The probe of a gated delta net: honest forms pass, forms that lie are rejected with the row count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from draftproof import probe_delta as module
from draftproof.ops.gated_delta import FORMS, DeltaInput, conv_rows, delta_rows, gates_row_by_row
from draftproof.ops.linear import MAX_ROWS
from draftproof.probe_delta import probe_delta
from draftproof.record import OpEvidence

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
SIZES = (2, 4, 16, 24, 4)


def found(dtype: torch.dtype = FP32, sizes: tuple[int, int, int, int, int] = SIZES) -> dict[str, OpEvidence]:
    return {evidence.op: evidence for evidence in probe_delta(*sizes, dtype, CPU)}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("sizes", [SIZES, (4, 4, 8, 8, 4), (1, 3, 32, 16, 2)])
def test_every_operation_has_an_exact_form_here(
    dtype: torch.dtype, sizes: tuple[int, int, int, int, int]
) -> None:
    evidence = found(dtype, sizes)
    assert list(evidence) == ["conv", "gates", "delta", "gated_norm"]
    for op in FORMS:
        assert evidence[op].is_exact
        assert evidence[op].max_rows == MAX_ROWS
        assert evidence[op].form in FORMS[op]


def drifting_conv(windows_TCW: Tensor, weight_C1W: Tensor) -> Tensor:
    return conv_rows(windows_TCW, weight_C1W) * (1 if len(windows_TCW) < 5 else 1 + 1e-6)


def stale_delta(rows: DeltaInput, state_HKV: Tensor, into: Sequence[Tensor]) -> Tensor:
    """Right outputs, but the last state is the one before it."""
    out = delta_rows(rows, state_HKV, into)
    if len(into) > 2:
        into[-1].copy_(into[-2])
    return out


def shifted_gates(a_TH: Tensor, b_TH: Tensor, decay_H: Tensor, bias_H: Tensor) -> tuple[Tensor, Tensor]:
    g_TH, beta_TH = gates_row_by_row(a_TH, b_TH, decay_H, bias_H)
    return g_TH, beta_TH.roll(1, 0)


LIES: dict[str, tuple[Callable[..., object], str]] = {
    "conv": (drifting_conv, "from 5 rows"),
    "delta": (stale_delta, "from 3 rows"),
    "gates": (shifted_gates, "from 2 rows"),
}


@pytest.mark.parametrize("op", LIES)
def test_a_form_that_lies_is_rejected_for_an_honest_one(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lie, where = LIES[op]
    monkeypatch.setitem(FORMS, op, {"lie": lie, **FORMS[op]})
    evidence = found()[op]
    assert evidence.rejected["lie"] == where
    assert (evidence.is_exact, evidence.max_rows) == (True, MAX_ROWS)
    assert evidence.form != "lie"


@pytest.mark.parametrize("op", LIES)
def test_with_nothing_but_lies_there_is_no_proof(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lie, where = LIES[op]
    monkeypatch.setitem(FORMS, op, {"lie": lie})
    evidence = found()[op]
    assert (evidence.is_exact, evidence.max_rows, evidence.rejected) == (False, 1, {"lie": where})


def test_a_gated_norm_that_depends_on_its_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module.gated_norm

    def lie(x_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        return honest(x_THV, z_THV, weight_V, eps) * (1 if len(x_THV) < 9 else 1 + 1e-6)

    monkeypatch.setattr(module, "gated_norm", lie)
    evidence = found()["gated_norm"]
    assert (evidence.is_exact, evidence.max_rows) == (False, 1)
