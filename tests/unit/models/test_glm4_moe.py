"""GLM-4.5's dense form against transformers, bit for bit, without and with its head; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig

from draftproof.models.glm4_moe import linear_specs, refusal
from draftproof.models.load import read_config

LENGTHS = (*range(1, 10), 15, 16, 17, 31, 33, 63, 65)
FEW = (1, 2, 7, 16, 33)
BF16, FP32 = torch.bfloat16, torch.float32
WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "bf16-with-a-head": ("glm4_moe_mtp", BF16, {}),
    "fp32-row-by-row": ("glm4_moe", FP32, {}),
    "bf16-no-inner-norms": ("glm4_moe", BF16, {"use_qk_norm": False}),
    "bf16-tied-one-key-head-all-rotated": (
        "glm4_moe", BF16, {"tie_word_embeddings": True, "num_key_value_heads": 1, **WHOLE},
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, pair: Callable[..., Any]) -> Any:
    kind, dtype, config = CASES[request.param]
    return pair(kind, dtype, "bitwise", **config)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16])
def test_every_step_has_the_bits_of_stock(case: Any, num_rows: int) -> None:
    lengths = LENGTHS if num_rows in (1, 4) else FEW
    found = {n: case.differences(n, num_rows) for n in lengths}
    assert found == {n: [] for n in lengths}


def test_the_text_varies(case: Any) -> None:
    assert sum(case.num_changes(n) for n in FEW) >= 8 * len(FEW)


def test_wrong_drafts_leave_no_trace(case: Any) -> None:
    found = {n: case.differences_after_wrong_drafts(n, seed=n) for n in LENGTHS}
    assert found == {n: [] for n in LENGTHS}


@pytest.mark.parametrize("changes", [{"use_qk_norm": False}, WHOLE], ids=["inner-norms", "rotated-part"])
def test_what_the_configuration_says_matters(pair: Callable[..., Any], changes: dict[str, Any]) -> None:
    """Else the cases would pass with a layer that ignores it."""
    usual, other = pair("glm4_moe", FP32), pair("glm4_moe", FP32, **changes)
    assert not torch.equal(usual.run(7).logits_NV[0], other.run(7).logits_NV[0])


def test_the_specs_are_what_the_layers_ask_for(pair: Callable[..., Any]) -> None:
    found = pair("glm4_moe_mtp", BF16, "bitwise")
    specs = {spec.name: spec for spec in linear_specs(read_config(found.folder))}
    assert list(specs) == ["qkv", "out", "gate_up", "down", "head", "mtp_in"]
    assert (specs["mtp_in"].num_in, specs["mtp_in"].parts) == (128, (64,))
    assert {e.op for e in found.plan.ops} == {*specs, "attention", "norm", "rotary", "silu_gate"}


DENSE = {"first_k_dense_replace": 47, "num_mtp_layers": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (DENSE, None),
        ({"first_k_dense_replace": 46, "num_mtp_layers": 0}, None),
        ({}, "layers of experts"),
        ({"first_k_dense_replace": 46, "num_mtp_layers": 1}, "layers of experts"),
        ({"first_k_dense_replace": 48, "num_mtp_layers": 2}, "a chain of 2 native heads"),
        (DENSE | {"attention_bias": True}, "biases in linear layers"),
        (DENSE | {"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_refusal(changes: dict[str, Any], reason: str | None) -> None:
    assert refusal(Glm4MoeConfig(**changes)) == reason
