"""What the gates are fed, on models whose distribution is a table and on a tiny random one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftproof.bench.quality import NUM_TOKENS, forward_logprobs, own_nll, reference, sample
from draftproof.errors import EvidenceError, PromptError, UsageError
from draftproof.gate import LOG_FLOOR, NEAR_LOSSLESS, judge
from draftproof.models.stock import StockModel

VOCAB = 288
PROMPT = (72, 101, 108, 108, 111)


class Table:
    """``model(input_ids)`` whose logits depend on the last token alone: row ``i`` follows token ``i``."""

    device = torch.device("cpu")

    def __init__(self, logits_VV: Any, dtype: torch.dtype = torch.float32) -> None:
        self.logits_VV = torch.as_tensor(logits_VV, dtype=dtype)
        self.calls: list[list[int]] = []

    def __call__(self, *, input_ids: torch.Tensor) -> Any:
        self.calls.append(input_ids[0].tolist())
        return SimpleNamespace(logits=self.logits_VV[input_ids])


# After 0 comes 1 (3/4), after 1 comes 0 or 2 (1/2 each), after 2 anything.
STOCK = Table([[-math.inf, math.log(0.75), math.log(0.25)], [0.0, -math.inf, 0.0], [0.0, 0.0, 0.0]])


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[..., Path]) -> Any:
    return StockModel(tiny_folder("llama"), torch.float32, torch.device("cpu")).module


def test_stock_is_scored_on_each_token_after_what_comes_before_it() -> None:
    found = reference(STOCK, [2, 0], token_ids=[1, 2, 0])
    assert found["token_ids"] == [1, 2, 0]
    assert found["nll"] == pytest.approx(-(math.log(0.75) + math.log(0.5) + math.log(1 / 3)) / 3)
    assert found["top_ids"][0] == [1, 2, 0]
    assert found["top_logprobs"][0] == pytest.approx([math.log(0.75), math.log(0.25), LOG_FLOOR])
    assert set(found["top_ids"][1][:2]) == {0, 2}
    assert STOCK.calls[-1] == [2, 0, 1, 2, 0]  # one plain call over everything


def test_the_continuation_is_cut_to_the_number_of_tokens() -> None:
    assert reference(STOCK, [0], 2, [1, 2, 0])["token_ids"] == [1, 2]
    assert reference(STOCK, [0], 9, [1, 2, 0])["token_ids"] == [1, 2, 0]


def test_the_candidate_answers_at_stocks_tokens() -> None:
    candidate = Table([[0.0, 0.0, math.log(2)], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    found = forward_logprobs(candidate, [0], [1, 2], [[1, 2, 0], [2, 0, 1]])
    assert found["top_logprobs"][0] == pytest.approx([math.log(1 / 4), math.log(1 / 2), math.log(1 / 4)])
    assert found["top_logprobs"][1] == pytest.approx([math.log(1 / 3)] * 3)
    assert found["argmax_ids"][0] == 2
    assert found["best_logprobs"] == pytest.approx([math.log(1 / 2), math.log(1 / 3)])


def test_a_sample_joins_both_answers() -> None:
    """After 0 the candidate prefers 2; after 1 it holds everything equally likely, which counts as agreed."""
    candidate = Table([[0.0, 0.0, math.log(2)], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    stock = reference(STOCK, [0], token_ids=[1, 2])
    forward = forward_logprobs(candidate, [0], [1, 2], stock["top_ids"])
    found = sample("code", stock, forward, own_nll(STOCK, [0], [2, 1]))
    assert found.is_agreed == (False, True)
    first = 0.75 * math.log(0.75 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert found.kl == pytest.approx((first, math.log(1.5)), abs=1e-5)
    assert found.stock_nll == stock["nll"]
    assert found.own_nll == pytest.approx(-(math.log(0.25) + math.log(1 / 3)) / 2)


def test_a_token_stock_calls_impossible_costs_the_floor_and_not_infinity() -> None:
    assert own_nll(STOCK, [0], [0]) == pytest.approx(-LOG_FLOOR)
    assert own_nll(STOCK, [0], []) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_candidate_of_broken_numbers_is_measured_and_fails(value: float) -> None:
    stock = reference(STOCK, [0], token_ids=[1, 2])
    forward = forward_logprobs(Table([[value] * 3] * 3), [0], [1, 2], stock["top_ids"])
    json.dumps(forward, allow_nan=False)
    rows = judge([sample("code", stock, forward, 0.0)], NEAR_LOSSLESS)
    assert {row.gate: row.is_met for row in rows}["mean_kl"] is False


def test_an_answer_that_is_no_distribution_is_refused() -> None:
    stock = reference(STOCK, [0], token_ids=[1, 2])
    honest = forward_logprobs(STOCK, [0], [1, 2], stock["top_ids"])
    lie = {**honest, "top_logprobs": [[0.0, 0.0, 0.0]] * 2}
    with pytest.raises(EvidenceError, match="sum to 3, over 1"):
        sample("code", stock, lie, 0.0)
    with pytest.raises(ValueError, match="shorter"):
        sample("code", stock, {**honest, "argmax_ids": [1]}, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_normalised_in_fp32(dtype: torch.dtype) -> None:
    table = Table([[3.0, 1.0, 0.0]] * 3, dtype)
    total = math.log(math.e**3 + math.e + 1)
    assert reference(table, [0], token_ids=[1])["top_logprobs"][0] == pytest.approx(
        [3 - total, 1 - total, -total], abs=1e-6
    )


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (SimpleNamespace(logits=torch.zeros(1, 2, 3)), r"\[1, 2, 3\]"),
        (SimpleNamespace(logits=torch.zeros(4, 3)), r"\[4, 3\]"),
        (SimpleNamespace(logits=None), "NoneType"),
        ([1, 2], "NoneType"),
    ],
)
def test_a_plain_call_that_no_longer_works_is_named(answer: Any, found: str) -> None:
    def model(*, input_ids: torch.Tensor) -> Any:
        assert input_ids.shape == (1, 4)
        return answer

    model.device = torch.device("cpu")  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=rf"gave logits {found}, expected \[1, 4, V\]"):
        forward_logprobs(model, [0, 1], [2, 0], [[0], [0]])


@pytest.mark.parametrize(("prompt", "ids"), [([], [1]), ([1], [])])
def test_nothing_to_score_is_refused(prompt: list[int], ids: list[int]) -> None:
    with pytest.raises(PromptError, match="none to score"):
        reference(STOCK, prompt, token_ids=ids)


def test_the_continuation_is_stocks_greedy_one(model: Any, tiny_folder: Callable[..., Path]) -> None:
    stock = StockModel(tiny_folder("llama"), torch.float32, torch.device("cpu"))
    found = reference(model, PROMPT)
    assert len(found["token_ids"]) == NUM_TOKENS == 64
    assert found["token_ids"] == list(stock.generate(PROMPT, 64))
    assert {len(row) for row in found["top_ids"]} == {32}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert reference(model, PROMPT, 1)["token_ids"] == found["token_ids"][:1]


def test_the_model_is_its_own_perfect_candidate(model: Any) -> None:
    stock = reference(model, PROMPT, 16)
    forward = forward_logprobs(model, PROMPT, stock["token_ids"], stock["top_ids"])
    assert json.loads(json.dumps(forward, allow_nan=False)) == forward
    found = sample("code", stock, forward, own_nll(model, PROMPT, stock["token_ids"]))
    assert found.kl == (0.0,) * 16
    assert found.is_agreed == (True,) * 16
    assert found.own_nll == found.stock_nll
    assert found.stock_nll == pytest.approx(
        -sum(row[ids.index(token)] for row, ids, token in zip(
            stock["top_logprobs"], stock["top_ids"], stock["token_ids"], strict=True)) / 16
    )  # fmt: skip


def test_no_gradient_is_kept(model: Any) -> None:
    assert any(parameter.requires_grad for parameter in model.parameters())
    before = torch.is_grad_enabled()
    reference(model, PROMPT, 2)
    assert torch.is_grad_enabled() is before
