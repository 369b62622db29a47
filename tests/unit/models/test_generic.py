"""The generic target: transformers' own forward and cache, rows undone by cropping, or a refusal to draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from draftproof.errors import DrafterError, RollbackError
from draftproof.models.generic import GenericTarget
from draftproof.models.stock import SerialRun, StockModel

CPU = torch.device("cpu")
NUM_STEPS = 17
# Around Mistral's window of 16, and far beyond it.
LENGTHS = (1, 2, 7, 14, 15, 16, 17, 20, 40)
# fp32 rounding, six digits below logits of size ten, summed in another order; a token too many or too few
# in the cache changes them by several units.
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["gpt2", "mistral", "llama"])
def stock(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> StockModel:
    return StockModel(tiny_folder(request.param), torch.float32, CPU)


@pytest.fixture(scope="module")
def runs(stock: StockModel) -> dict[int, tuple[list[int], SerialRun]]:
    prompts = {n: [(7 * i * i + 3 * i + n) % 288 for i in range(n)] for n in LENGTHS}
    return {n: (prompt, stock.run(prompt, NUM_STEPS)) for n, prompt in prompts.items()}


def test_describes_the_model(tiny_folder: Callable[..., Path]) -> None:
    module = StockModel(tiny_folder("gpt2"), torch.float32, CPU).module
    target = GenericTarget(module, max_rows=5)
    assert (target.name, target.vocab_size, target.max_context, target.max_rows) == ("gpt2", 288, 256, 5)
    assert target.nbytes == sum(p.numel() * 4 for p in module.parameters())
    assert target.refuse_drafting() is None


def test_one_row_steps_have_the_bits_of_stock(stock: StockModel, runs: dict[int, Any]) -> None:
    for prompt, run in runs.values():
        session = GenericTarget(stock.module).open(len(prompt) + NUM_STEPS)
        got = [session.prefill(prompt)]
        for token in run.token_ids[:-1]:
            got.append(session.verify([token])[0])
            session.commit(1)
        assert torch.equal(torch.stack(got), run.logits_NV)


@pytest.mark.parametrize("num_rows", [2, 5, 16])
def test_several_rows_choose_stocks_tokens(stock: StockModel, runs: dict[int, Any], num_rows: int) -> None:
    for prompt, run in runs.values():
        session = GenericTarget(stock.module).open(len(prompt) + NUM_STEPS + num_rows)
        got = [session.prefill(prompt)[None]]
        for start in range(0, NUM_STEPS - 1, num_rows):
            chunk = run.token_ids[start : min(start + num_rows, NUM_STEPS - 1)]
            got.append(session.verify(chunk))
            session.commit(len(chunk))
        assert_same(torch.cat(got), run)


def test_wrong_drafts_leave_no_trace(stock: StockModel, runs: dict[int, Any]) -> None:
    """Partial commits, empty ones, and verifications appended to pending ones, at every length."""
    for prompt, run in runs.values():
        rng = random.Random(len(prompt))
        session = GenericTarget(stock.module).open(len(prompt) + NUM_STEPS + 40)
        got = [session.prefill(prompt)]
        while len(got) < NUM_STEPS:
            done = len(got) - 1
            right = run.token_ids[done : done + rng.randint(0, min(5, NUM_STEPS - 1 - done))]
            wrong = [rng.randrange(288) for _ in range(rng.randint(1, 8))]
            cut = rng.randint(0, len(right))
            rows = session.verify(right[:cut]) if cut else torch.empty(0, 288)
            rows = torch.cat([rows, session.verify([*right[cut:], *wrong])])
            assert session.num_cached == len(prompt) + done
            session.commit(len(right))
            assert session.num_cached == len(prompt) + done + len(right)
            got.extend(rows[: len(right)])
        assert_same(torch.stack(got), run)


def assert_same(got: Tensor, run: SerialRun) -> None:
    assert got.shape == run.logits_NV.shape
    assert got.argmax(-1).tolist() == run.logits_NV.argmax(-1).tolist() == list(run.token_ids)
    assert (got - run.logits_NV).abs().max() < TOLERANCE


def test_a_sliding_cache_stays_small(tiny_folder: Callable[..., Path]) -> None:
    """Recording what a rollback may need must not let it grow for ever."""
    target = GenericTarget(StockModel(tiny_folder("mistral"), torch.float32, CPU).module)
    session = target.open(400)
    session.prefill(list(range(1, 30)))
    for kept in (4, 0, 2, 4, 4, 3, 0, 1):
        session.verify([5, 6, 7, 8])
        session.commit(kept)
        assert {layer.keys.shape[-2] for layer in session._cache.layers} == {15}
    assert session.num_cached == 29 + 18


def test_misuse_is_refused_and_changes_nothing(stock: StockModel) -> None:
    target = GenericTarget(stock.module)
    session, roomy = target.open(8), target.open(30)
    session.prefill([1, 2, 3])
    roomy.prefill([1, 2, 3])
    with pytest.raises(RollbackError, match="cache full: capacity 8"):
        session.verify([4, 5, 6, 7, 8, 9])
    session.verify([7, 7])
    for num_rows in (-1, 3):
        with pytest.raises(RollbackError, match=f"cannot commit {num_rows} of 2 pending rows"):
            session.commit(num_rows)
    with pytest.raises(RollbackError, match="cache full"):
        session.verify([4, 5, 6, 7])
    session.commit(0)
    assert torch.equal(session.verify([4]), roomy.verify([4]))


def test_a_second_prompt_is_refused(stock: StockModel) -> None:
    session = GenericTarget(stock.module).open(30)
    session.prefill([1, 2, 3])
    with pytest.raises(RollbackError):
        session.prefill([4, 5])


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
RECURRENT: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4, "num_hidden_layers": 2},
    "Lfm2": HEADS | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "Qwen3_5": HEADS | {
        "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest) -> GenericTarget:
    name: str = request.param
    config_name = "Qwen3_5TextConfig" if name == "Qwen3_5" else f"{name}Config"
    config = getattr(transformers, config_name)(**SMALL | RECURRENT[name])
    module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return GenericTarget(module)


def test_a_state_that_cannot_be_undone_is_named(recurrent: GenericTarget) -> None:
    reason = recurrent.refuse_drafting()
    assert reason is not None
    assert reason.startswith("layer 0 keeps a state that cannot be rolled back (")


def test_a_module_that_calls_itself_stateful_is_believed(stock: StockModel) -> None:
    class Stateful(type(stock.module)):  # type: ignore[misc]
        _is_stateful = True

    with torch.device("meta"):
        module = Stateful(stock.module.config)
    assert GenericTarget(module).refuse_drafting() == "Stateful keeps a state that cannot be rolled back"


def test_without_drafts_a_recurrent_model_decodes_as_stock_does(
    recurrent: GenericTarget, feed: Callable[..., Tensor]
) -> None:
    prompt, tokens = [5, 9, 2, 33], [7, 60, 1, 1, 40]
    session = recurrent.open(20)
    got = [session.prefill(prompt)]
    for token in tokens:
        got.append(session.verify([token])[0])
        session.commit(1)
    assert torch.equal(torch.stack(got), feed(recurrent.module, prompt, tokens))
    assert session.num_cached == 9


def test_a_recurrent_model_drops_no_rows(recurrent: GenericTarget) -> None:
    session = recurrent.open(20)
    session.prefill([5, 9])
    session.verify([7, 8])
    for num_rows in (0, 1):
        with pytest.raises(DrafterError, match="layer 0 keeps a state that cannot be rolled back"):
            session.commit(num_rows)
    session.commit(2)
    assert session.num_cached == 4
