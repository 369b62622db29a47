"""Qwen3 against transformers, bit for bit, without and with sliding layers; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from draftproof.models.qwen3 import refusal

# Around the window of 16, and the length at which a sliding cache first moves.
LENGTHS = (*range(1, 21), 31, 32, 33, 48, 63)
FEW = (1, 7, 15, 16, 17, 33)
BF16, FP32 = torch.bfloat16, torch.float32
SLIDING = {
    "use_sliding_window": True, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (BF16, {}),
    "bf16-sliding": (BF16, SLIDING),
    "fp32-sliding": (FP32, SLIDING),
    "bf16-tied-one-key-head": (BF16, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, pair: Callable[..., Any]) -> Any:
    dtype, config = CASES[request.param]
    return pair("qwen3", dtype, **config)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16])
def test_every_step_has_the_bits_of_stock(case: Any, num_rows: int) -> None:
    """One row a call always; several wherever the plan says so."""
    if num_rows > 1 and case.plan.claim != "bitwise":
        pytest.skip(f"the plan claims {case.plan.claim} here")
    lengths = LENGTHS if num_rows in (1, 4) else FEW
    found = {n: case.differences(n, num_rows) for n in lengths}
    assert found == {n: [] for n in lengths}


def test_the_text_varies(case: Any) -> None:
    assert sum(case.num_changes(n) for n in FEW) >= 8 * len(FEW)


def test_wrong_drafts_leave_no_trace(case: Any) -> None:
    if case.plan.claim != "bitwise":
        pytest.skip(f"the plan claims {case.plan.claim} here")
    found = {n: case.differences_after_wrong_drafts(n, seed=n) for n in LENGTHS}
    assert found == {n: [] for n in LENGTHS}


def test_the_window_matters(pair: Callable[..., Any]) -> None:
    """Else the sliding cases would pass with full attention."""
    sliding, full = pair("qwen3", FP32, **SLIDING), pair("qwen3", FP32)
    assert torch.equal(sliding.run(10).logits_NV[:6], full.run(10).logits_NV[:6])
    assert not torch.equal(sliding.run(20).logits_NV[0], full.run(20).logits_NV[0])


def test_fixed_rows_make_the_number_of_real_rows_irrelevant(pair: Callable[..., Any]) -> None:
    found = pair("qwen3", BF16, "fixed", **SLIDING)
    for length in (3, 14, 20):
        tokens = found.run(length).token_ids[:12]
        by_rows = {}
        for num_rows in (1, 3, 8, 12):
            session = found.target.open(64)
            out = [session.prefill(found.prompt(length))[None]]
            for start in range(0, 12, num_rows):
                out.append(session.verify(tokens[start : start + num_rows]))
                session.commit(len(out[-1]))
            by_rows[num_rows] = torch.cat(out)
        assert all(torch.equal(x, by_rows[1]) for x in by_rows.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        (SLIDING | {"num_hidden_layers": 3}, None),
        ({"attention_bias": True}, "biases in linear layers"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
    ],
)
def test_refusal(changes: dict[str, Any], reason: str | None) -> None:
    assert refusal(Qwen3Config(**changes)) == reason
