"""Llama against transformers, bit for bit: prompts, rows together, wrong drafts, fixed rows, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from draftproof.errors import ModelFileError
from draftproof.models.llama import refusal

LENGTHS = (*range(1, 21), 33, 63)
FEW = (1, 2, 9, 16, 33)
BF16, FP32 = torch.bfloat16, torch.float32
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (BF16, {}),
    "fp32": (FP32, {}),
    # Inner sizes from 1024 on: where several rows and one row add up in different orders.
    "bf16-wide-tied": (BF16, {"intermediate_size": 1152, "tie_word_embeddings": True}),
    "fp32-tied": (FP32, {"tie_word_embeddings": True}),
    "bf16-no-groups-odd-sizes": (
        BF16,
        {"hidden_size": 72, "intermediate_size": 88, "num_key_value_heads": 4, "head_dim": 24},
    ),
    "bf16-scaled-rotary": (
        BF16,
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, pair: Callable[..., Any]) -> Any:
    dtype, config = CASES[request.param]
    return pair("llama", dtype, **config)


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


@pytest.mark.parametrize("offset", [0, 8])
def test_one_row_steps_follow_the_alignment_of_the_file(
    tiny_folder: Callable[..., Path],
    shifted_folder: Callable[..., Path],
    make_pair: Callable[..., Any],
    offset: int,
) -> None:
    """In fp32 the one-row bits of some kernels depend on where the checkpoint is mapped."""
    found = make_pair(shifted_folder(tiny_folder("llama", FP32), offset), FP32, "bitwise")
    where = {p.data_ptr() % 16 for p in found.stock.module.parameters()}
    assert where == {offset}
    assert {n: found.differences(n, 1) for n in (1, 2, 7)} == {1: [], 2: [], 7: []}


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_model_whose_file_holds_a_head_of_its_own(
    tiny_folder: Callable[..., Path], make_pair: Callable[..., Any], tmp_path: Path, is_same: bool
) -> None:
    """Stock ties the head only where both tensors are equal; a target may also refuse the file."""
    folder = tmp_path / "own-head"
    shutil.copytree(tiny_folder("llama", BF16, tie_word_embeddings=True), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not is_same:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        found = make_pair(folder, BF16, "bitwise")
    except ModelFileError:
        assert not is_same
    else:
        assert found.differences(9, 1) == []


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_fixed_rows_make_the_number_of_real_rows_irrelevant(
    pair: Callable[..., Any], dtype: torch.dtype
) -> None:
    found = pair("llama", dtype, "fixed")
    assert found.plan.fixed_rows == 8
    for length in (1, 5, 16):
        prompt, tokens = found.prompt(length), found.run(length).token_ids[:12]
        by_rows = {n: _logits(found.target, prompt, tokens, n) for n in (1, 2, 3, 5, 8, 11, 12)}
        assert {n: torch.equal(x, by_rows[1]) for n, x in by_rows.items()} == dict.fromkeys(by_rows, True)


def _logits(target: Any, prompt: list[int], tokens: tuple[int, ...], num_rows: int) -> torch.Tensor:
    session = target.open(len(prompt) + len(tokens) + num_rows)
    out = [session.prefill(prompt)[None]]
    for start in range(0, len(tokens), num_rows):
        chunk = tokens[start : start + num_rows]
        out.append(session.verify(chunk))
        session.commit(len(chunk))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"attention_bias": True}, "biases in linear layers"),
        ({"mlp_bias": True}, "biases in linear layers"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_refusal(changes: dict[str, Any], reason: str | None) -> None:
    assert refusal(LlamaConfig(**changes)) == reason
