"""The packaged model against stock: bits of every step where that is claimed, tokens everywhere.

One engine and one stock model serve the whole file. Nothing here asserts a speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import engine as engines
from draftproof.bench.prompts import build_prompt, diverse_inputs
from draftproof.engine import Engine
from draftproof.hf_generate import custom_generate
from draftproof.models.stock import SerialRun, StockModel
from draftproof.stream import Generation

pytestmark = [pytest.mark.model, pytest.mark.slow]

LABELS = ("code", "question", "chinese")
PROMPT_LEN, NUM_NEW, NUM_STEPS = 192, 32, 100
ROWS = (1, 2, 4, 8, 16)
DEPTHS: tuple[Any, ...] = ("auto", 0, 1, 4, 16)
DRAFTERS = ("lookup", "suffix", "auto", "early_exit", "draft_model")
Prompts = dict[str, list[int]]
StockIds = Callable[..., tuple[int, ...]]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    return engines.load(str(model_folder))


@pytest.fixture(scope="module")
def stock(model_folder: Path) -> StockModel:
    return StockModel(model_folder, torch.bfloat16, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> Prompts:
    chosen = [item for item in diverse_inputs() if item.label in LABELS]
    return {item.label: build_prompt(item, engine.tokenizer, PROMPT_LEN, chat=True) for item in chosen}


@pytest.fixture(scope="module")
def stock_ids(stock: StockModel, prompts: Prompts) -> StockIds:
    """What stock emits for a prompt, computed once."""
    return cache(lambda label, num=NUM_NEW: stock.generate(prompts[label], num))


@pytest.fixture(scope="module")
def serial_run(stock: StockModel, prompts: Prompts) -> SerialRun:
    """Stock's logits of a hundred steps; it must not stop before."""
    run = stock.run(prompts["code"], NUM_STEPS, min_new_tokens=NUM_STEPS)
    assert len(run.token_ids) == len(run.logits_NV) == NUM_STEPS
    return run


def request(engine: Engine, prompt: Any, drafter: str = "auto", **options: Any) -> Generation:
    """A request; the model is its own draft model, so that what it drafts is always right."""
    if drafter == "draft_model":
        options["draft_model"] = engine.target
    return engine.generate(prompt, **{"max_new_tokens": NUM_NEW, "drafter": drafter, **options})


def shape(done: Generation) -> list[tuple[Any, ...]]:
    """What was drafted and accepted, without times."""
    return [(r.source, r.num_offered, r.num_drafted, r.num_accepted, r.emitted) for r in done.trace.rounds]


class TestSteps:
    """A hundred steps, several rows at a time, against stock's one-token steps."""

    def check(self, engine: Engine, got_TV: torch.Tensor, want_TV: torch.Tensor) -> None:
        if engine.plan.claim == "bitwise":
            assert torch.equal(got_TV, want_TV)
        else:
            assert torch.equal(got_TV.argmax(-1), want_TV.argmax(-1))

    @pytest.mark.parametrize("rows", ROWS)
    def test_verified_rows_are_stocks_steps(
        self, rows: int, engine: Engine, prompts: Prompts, serial_run: SerialRun
    ) -> None:
        session = engine.target.open(PROMPT_LEN + NUM_STEPS + 32)
        want_NV, ids = serial_run.logits_NV, serial_run.token_ids
        self.check(engine, session.prefill(prompts["code"])[None], want_NV[:1])
        for start in range(0, NUM_STEPS - 1, rows):
            fed = ids[start : min(start + rows, NUM_STEPS - 1)]
            got_TV = session.verify(fed)
            assert got_TV.shape == (len(fed), engine.target.vocab_size)
            self.check(engine, got_TV, want_NV[start + 1 : start + 1 + len(fed)])
            session.commit(len(fed))
        assert session.num_cached == PROMPT_LEN + NUM_STEPS - 1

    def test_rejected_rows_leave_no_trace(
        self, engine: Engine, prompts: Prompts, serial_run: SerialRun
    ) -> None:
        """Every verification ends in wrong tokens; what follows must not know."""
        session = engine.target.open(PROMPT_LEN + NUM_STEPS + 32)
        session.prefill(prompts["code"])
        want_NV, ids = serial_run.logits_NV, serial_run.token_ids
        place, turn = 0, 0
        while place < 64:
            good = 1 + turn % 5
            fed = ids[place : place + good]
            got_TV = session.verify([*fed, *((i + 1) % 1000 for i in ids[place + good : place + good + 6])])
            self.check(engine, got_TV[:good], want_NV[place + 1 : place + 1 + good])
            session.commit(good)
            place, turn = place + good, turn + 1


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_drafter_and_depth_emits_stocks_tokens(
    drafter: str, depth: Any, engine: Engine, prompts: Prompts, stock_ids: StockIds
) -> None:
    # Prompts take turns, two of them with "auto", so that every drafter and every depth sees each.
    turn = DRAFTERS.index(drafter) + DEPTHS.index(depth)
    for label in [LABELS[(turn + i) % len(LABELS)] for i in range(2 if depth == "auto" else 1)]:
        done = request(engine, prompts[label], drafter, depth=depth)
        assert done.token_ids == stock_ids(label)
        if depth != "auto":
            assert max(r.num_drafted for r in done.trace.rounds) <= depth


def test_speculation_is_not_idle(engine: Engine, prompts: Prompts) -> None:
    """Or the test above would compare serial decoding with itself."""
    for drafter in ("suffix", "lookup"):
        rounds = request(engine, prompts["code"], drafter, depth=4, max_new_tokens=40).trace.rounds
        assert sum(r.num_drafted for r in rounds) > 4
        assert sum(r.num_accepted for r in rounds) > 0


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_the_model_drafting_for_itself_is_always_right(
    depth: int, engine: Engine, prompts: Prompts, stock_ids: StockIds
) -> None:
    if engine.plan.claim != "bitwise":
        pytest.skip("without equal bits a near-tie may be drafted differently")
    done = request(engine, prompts["question"], "draft_model", depth=depth)
    assert done.token_ids == stock_ids("question")
    drafted = [r for r in done.trace.rounds if r.num_drafted]
    assert sum(r.num_drafted for r in drafted) >= NUM_NEW // 2 - 1
    assert [r.num_accepted for r in drafted] == [r.num_drafted for r in drafted]
    if done.finish_reason == "length":
        assert all(r.num_drafted == depth for r in drafted[:-1])


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("suffix", {"repetition_penalty": 1.2}),
        ("draft_model", {"no_repeat_ngram_size": 3}),
        ("draft_model", {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "min_new_tokens": 30}),
        ("suffix", {"bad_words_ids": [[28], [216]], "suppress_tokens": [198, 284]}),
    ],
    ids=str,
)
def test_logits_processors(
    drafter: str, options: dict[str, Any], engine: Engine, stock: StockModel, prompts: Prompts
) -> None:
    want = stock.generate(prompts["question"], NUM_NEW, **options)
    assert request(engine, prompts["question"], drafter, depth=4, **options).token_ids == want


class TestEnds:
    QUESTION = "What is the capital of France? Answer with one word."

    def test_a_natural_stop_is_stocks(self, engine: Engine, stock: StockModel) -> None:
        prompt = engine.encode(self.QUESTION)
        want = stock.generate(prompt, 100)
        assert len(want) < 100, "choose a question whose answer is short"
        for drafter in ("none", "auto", "suffix", "draft_model"):
            done = request(engine, self.QUESTION, drafter, max_new_tokens=100)
            assert done.token_ids == want
            assert done.finish_reason == "stop"
            assert done.prompt_ids == tuple(prompt)
        assert engine.tokenizer.eos_token not in done.text

    def test_fewest_tokens_put_the_stop_off(self, engine: Engine, stock: StockModel) -> None:
        prompt = engine.encode(self.QUESTION)
        natural = len(stock.generate(prompt, 100))
        want = stock.generate(prompt, 100, min_new_tokens=natural + 8)
        assert len(want) >= natural + 8
        done = request(engine, prompt, "draft_model", depth=6, max_new_tokens=100, min_new_tokens=natural + 8)
        assert done.token_ids == want

    @pytest.mark.parametrize("place", [9, 21])
    def test_a_stop_string_completes_inside_an_accepted_block(
        self, place: int, engine: Engine, stock: StockModel, prompts: Prompts, stock_ids: StockIds
    ) -> None:
        # Three tokens' text, so that it spans tokens, and no separator that comes earlier.
        new = stock_ids("question")
        text = engine.tokenizer.decode(new[place : place + 3])
        options = {"stop_strings": [text]}
        want = stock.generate(prompts["question"], NUM_NEW, tokenizer=engine.tokenizer, **options)
        assert len(want) <= place + 3
        was_inside = False
        for depth in (3, 8):
            done = request(engine, prompts["question"], "draft_model", depth=depth, **options)
            assert done.token_ids == want
            assert done.finish_reason == "stop"
            last = done.trace.rounds[-1]
            was_inside |= last.num_accepted == len(last.emitted) < last.num_drafted
        assert was_inside
        assert request(engine, prompts["question"], "none", **options).token_ids == want

    def test_several_end_tokens(
        self, engine: Engine, stock: StockModel, prompts: Prompts, stock_ids: StockIds
    ) -> None:
        new = stock_ids("question")
        eos = [2, new[30]]
        want = stock.generate(prompts["question"], NUM_NEW, eos_token_id=eos)
        assert len(want) <= 31
        for drafter in ("suffix", "draft_model"):
            done = request(engine, prompts["question"], drafter, depth=6, eos_token_id=eos)
            assert (done.token_ids, done.finish_reason) == (want, "stop")


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 257])
def test_prompt_lengths(length: int, engine: Engine, stock: StockModel, model_folder: Path) -> None:
    text = " ".join(item.context for item in diverse_inputs())
    prompt = engine.tokenizer(text)["input_ids"][:length]
    assert len(prompt) == length
    run = stock.run(prompt, 12)
    for drafter in ("suffix", "draft_model") if length < PROMPT_LEN else ("draft_model",):
        assert request(engine, prompt, drafter, depth=5, max_new_tokens=12).token_ids == run.token_ids
    if engine.plan.claim == "bitwise":
        session = engine.target.open(length + 32)
        assert torch.equal(session.prefill(prompt), run.logits_NV[0])
        assert torch.equal(session.verify(run.token_ids[:-1]), run.logits_NV[1:])


def test_requests_are_independent(engine: Engine, model_folder: Path, prompts: Prompts) -> None:
    """Whatever an engine did before, a request runs as on a fresh one."""
    request(engine, prompts["chinese"], "suffix", max_new_tokens=24, depth=4)
    next(iter(engine.stream(prompts["code"], max_new_tokens=24)))
    got = request(engine, prompts["question"], "suffix", max_new_tokens=32, depth=4)
    fresh = engines.load(str(model_folder))
    assert fresh.plan == engine.plan
    assert shape(got) == shape(request(fresh, prompts["question"], "suffix", max_new_tokens=32, depth=4))


def test_streamed_text_is_the_whole_text(engine: Engine, prompts: Prompts) -> None:
    for label in ("chinese", "question"):
        stream = engine.stream(prompts[label], max_new_tokens=48, drafter="suffix", depth=4)
        pieces = [chunk.text for chunk in stream]
        done = stream.result()
        assert "".join(pieces) == done.text
        assert sum(map(bool, pieces)) > 5
        assert done.text == engine.tokenizer.decode(done.token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def single(model_folder: Path) -> Engine:
    return engines.load(str(model_folder), dtype="float32")


@pytest.fixture(scope="module")
def single_stock(model_folder: Path) -> StockModel:
    return StockModel(model_folder, torch.float32, torch.device("cpu"))


class TestSinglePrecision:
    """fp32: the plan claims what this machine's kernels allow, usually guarded."""

    def test_the_claim_says_how(self, single: Engine) -> None:
        assert single.plan.dtype == "float32"
        several = [e for e in single.plan.ops if e.op != "attention" and not e.is_exact]
        assert single.plan.claim == ("guarded" if several else "bitwise")
        assert (single.plan.margin_bound is not None) == (single.plan.claim == "guarded")

    @pytest.mark.parametrize("label", ["code", "question"])
    def test_tokens_are_stocks(
        self, label: str, single: Engine, single_stock: StockModel, prompts: Prompts
    ) -> None:
        want = single_stock.generate(prompts[label], NUM_NEW)
        for drafter in ("auto", "draft_model"):
            assert request(single, prompts[label], drafter).token_ids == want


class TestCustomGenerate:
    def generate(self, stock: StockModel, prompt: Sequence[int], **options: Any) -> tuple[int, ...]:
        ids = torch.tensor([list(prompt)])
        out = stock.module.generate(
            ids,
            **{"do_sample": False, "max_new_tokens": NUM_NEW, "custom_generate": custom_generate, **options},
        )
        assert torch.equal(out[:, : len(prompt)], ids)
        return tuple(out[0, len(prompt) :].tolist())

    @pytest.mark.parametrize("label", LABELS)
    def test_emits_stocks_tokens(
        self, label: str, stock: StockModel, prompts: Prompts, stock_ids: StockIds
    ) -> None:
        assert self.generate(stock, prompts[label]) == stock_ids(label)

    @pytest.mark.parametrize(("drafter", "depth"), [("suffix", 4), ("early_exit", 2), ("lookup", 16)])
    def test_drafters_and_depths(
        self, drafter: str, depth: int, stock: StockModel, prompts: Prompts, stock_ids: StockIds
    ) -> None:
        got = self.generate(stock, prompts["code"], drafter=drafter, depth=depth)
        assert got == stock_ids("code")

    def test_with_logits_processors(self, stock: StockModel, prompts: Prompts) -> None:
        options = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 40}
        want = stock.generate(prompts["question"], 48, **options)
        assert self.generate(stock, prompts["question"], **options, max_new_tokens=48) == want
