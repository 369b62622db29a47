"""The quality gates on the packaged model: what should fail fails, and rounding passes.

``gate.py`` has the figures over six prompts. A single prompt's increase in likelihood lies anywhere between
-0.4 and +0.4 nats even for 8 bits and better: only the mean over several prompts says anything. Stock is the
model in fp32 here, which any processor runs quickly; decodes are batched for the same reason.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from draftproof.bench import quality
from draftproof.bench.prompts import build_prompt, diverse_inputs
from draftproof.gate import NEAR_LOSSLESS, RELAXED, GateRow, judge
from draftproof.models.load import load_tokenizer
from draftproof.models.stock import StockModel

pytestmark = [pytest.mark.model, pytest.mark.slow]

LABELS = ("news", "table", "german")
PROMPT_LEN, NUM_TOKENS = 96, 64
Prompts = dict[str, list[int]]


class OneLate(LogitsProcessor):
    """Every token but the first is chosen by the logits from before the last token."""

    def __init__(self) -> None:
        self.pending: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stale, self.pending = self.pending, scores
        return scores if stale is None else stale


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> Prompts:
    tokenizer = load_tokenizer(model_folder)
    chosen = [item for item in diverse_inputs() if item.label in LABELS]
    return {item.label: build_prompt(item, tokenizer, PROMPT_LEN, chat=False) for item in chosen}


@pytest.fixture(scope="module")
def stock(model_folder: Path) -> Any:
    return StockModel(model_folder, torch.float32, torch.device("cpu")).module


@pytest.fixture(scope="module")
def references(stock: Any, prompts: Prompts) -> dict[str, dict[str, Any]]:
    own = decoded(stock, prompts)
    return {label: quality.reference(stock, prompts[label], NUM_TOKENS, own[label]) for label in prompts}


def decoded(module: Any, prompts: Prompts, *processors: LogitsProcessor) -> Prompts:
    """The greedy continuations of all prompts, end tokens masked."""
    ids = torch.tensor(list(prompts.values()))
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS, logits_processor=list(processors),
    )  # fmt: skip
    return dict(zip(prompts, out[:, ids.shape[1] :].tolist(), strict=True))


def rounded(module: Any, num_bits: int, group: int | None) -> Any:
    """Weights of every linear layer but the head, rounded to the nearest of ``num_bits`` per group or row."""
    module, top = copy.deepcopy(module), 2 ** (num_bits - 1) - 1
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            grouped = layer.weight.data.reshape(len(layer.weight), -1, group or layer.in_features)
            scale = grouped.abs().amax(-1, keepdim=True) / top
            layer.weight.data = ((grouped / scale).round() * scale).reshape(layer.weight.shape)
    return module


@pytest.fixture(scope="module")
def judged(stock: Any, references: dict[str, dict[str, Any]], prompts: Prompts) -> Any:
    def rows(candidate: Any, own: Prompts) -> dict[str, GateRow]:
        """The rows of near-lossless by gate."""
        samples = []
        for label, prompt in prompts.items():
            stocks = references[label]
            forward = quality.forward_logprobs(candidate, prompt, stocks["token_ids"], stocks["top_ids"])
            nll = quality.own_nll(stock, prompt, own[label])
            samples.append(quality.sample(label, stocks, forward, nll))
        return {row.gate: row for row in judge(samples, NEAR_LOSSLESS)}

    return rows


@pytest.fixture(scope="module")
def stock_ids(references: dict[str, dict[str, Any]]) -> Prompts:
    return {label: stocks["token_ids"] for label, stocks in references.items()}


def unmet(rows: dict[str, GateRow]) -> list[str]:
    return [gate for gate, row in rows.items() if not row.is_met]


def test_bf16_rounding_passes(judged: Any, prompts: Prompts, model_folder: Path) -> None:
    candidate = StockModel(model_folder, torch.bfloat16, torch.device("cpu")).module
    rows = judged(candidate, decoded(candidate, prompts))
    assert unmet(rows) == []
    assert 0 < rows["mean_kl"].value < 0.01
    assert rows["top1"].value > 0.95


def test_8_bit_weights_pass_on_the_forward(judged: Any, stock: Any, stock_ids: Prompts) -> None:
    rows = judged(rounded(stock, 8, None), stock_ids)
    assert unmet(rows) == []
    assert 0.0005 < rows["mean_kl"].value < 0.02


def test_4_bit_weights_fail_on_the_forward(judged: Any, stock: Any, stock_ids: Prompts) -> None:
    """Groups of 32, as packaged 4-bit files have, and not even relaxed; coarser groups are worse."""
    rows = judged(rounded(stock, 4, 32), stock_ids)
    assert "mean_kl" in unmet(rows)
    assert rows["mean_kl"].value > RELAXED.max_mean_kl
    assert rows["nll_increase"].value == 0.0  # its loop was not run: stock's own tokens stand in


def test_a_loop_one_token_late_fails_on_likelihood_alone(judged: Any, stock: Any, prompts: Prompts) -> None:
    rows = judged(stock, decoded(stock, prompts, OneLate()))
    assert unmet(rows) == ["nll_increase"]
    assert rows["nll_increase"].value > 2 * RELAXED.max_nll_increase
    assert (rows["mean_kl"].value, rows["top1"].value) == (0.0, 1.0)
