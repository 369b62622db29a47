"""A replay computes what ``generate`` computes, bit for bit, whatever it is told to emit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftproof.errors import ModelFileError, ModelNotFoundError, OptionError, PromptError
from draftproof.models.generic import GenericTarget
from draftproof.models.stock import StockModel
from draftproof.replay import Mismatch, ReplayRow, load_stock, replay

CPU = torch.device("cpu")
PROMPT = [17, 200, 3, 44, 121, 9, 250, 31, 8, 64]
NUM_NEW = 24
MODELS = [
    (kind, dtype)
    for kind in ("llama", "gemma3_text", "qwen3", "gpt2", "mistral")
    for dtype in (torch.float32, torch.bfloat16)
]


class Spy(LogitsProcessor):
    """Keeps every row of scores it is shown."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.rows.append(scores.clone())
        return scores


@pytest.fixture(scope="module")
def stock(tiny_folder: Callable[..., Path]) -> StockModel:
    return StockModel(tiny_folder("llama"), torch.float32, CPU)


@pytest.fixture(scope="module")
def plain(stock: StockModel) -> tuple[int, ...]:
    return stock.generate(PROMPT, NUM_NEW)


def judged(stock: StockModel, tokens: Any, max_new_tokens: int = NUM_NEW, **options: Any) -> ReplayRow:
    return replay(stock, "x", PROMPT, tokens, max_new_tokens=max_new_tokens, **options)


def stepped(stock: StockModel, tokens: Sequence[int]) -> Tensor:
    """Logits after the prompt and after every token but the last, by one-token forwards without generate."""
    session = GenericTarget(stock.module).open(len(PROMPT) + len(tokens))
    rows = [session.prefill(PROMPT)]
    for token in tokens[:-1]:
        rows.append(session.verify([token])[0])
        session.commit(1)
    return torch.stack(rows).float()


@pytest.mark.parametrize(("kind", "dtype"), MODELS, ids=lambda value: str(value).replace("torch.", ""))
def test_the_logits_are_generates_own(
    kind: str, dtype: torch.dtype, tiny_folder: Callable[..., Path]
) -> None:
    model = StockModel(tiny_folder(kind, dtype), dtype, CPU)
    serial, spy = model.run(PROMPT, NUM_NEW), Spy()
    row = judged(model, serial.token_ids, logits_processor=[spy])
    assert torch.equal(torch.cat(spy.rows), serial.logits_NV)
    top = serial.logits_NV.topk(2, dim=-1).values
    assert row == ReplayRow(
        label="x", num_tokens=NUM_NEW, mismatches=(), margins=tuple((top[:, 0] - top[:, 1]).tolist())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_token_is_judged_and_then_taken_as_given(
    dtype: torch.dtype, tiny_folder: Callable[..., Path]
) -> None:
    """Expected, gap, rank and every margin after it come from plain one-token forwards over the output."""
    model = StockModel(tiny_folder("llama", dtype), dtype, CPU)
    tokens = list(model.generate(PROMPT, NUM_NEW))
    tokens[5] = int(stepped(model, tokens)[5].argsort(descending=True, stable=True)[3])
    logits = stepped(model, tokens)
    wrong = [i for i in range(NUM_NEW) if int(logits[i].argmax()) != tokens[i]]
    spy = Spy()
    row = judged(model, tokens, logits_processor=[spy])
    assert torch.equal(torch.cat(spy.rows), logits)
    assert [m.position for m in row.mismatches] == wrong
    assert len(wrong) > 1, "the rest of the output follows another prefix"
    for mismatch in row.mismatches:
        scores, token = logits[mismatch.position], tokens[mismatch.position]
        assert mismatch.expected == int(scores.argmax())
        assert mismatch.gap == float(scores.max() - scores[token])
        order = scores.argsort(descending=True, stable=True).tolist()
        assert mismatch.rank == order.index(token)
    assert row.mismatches[0].rank == 3
    top = logits.topk(2, dim=-1).values
    assert row.margins == tuple((top[:, 0] - top[:, 1]).tolist())


class Fixed(LogitsProcessor):
    """Replaces the scores; with it a test decides what stock wants."""

    def __init__(self, scores: dict[int, float], floor: float = 0.0) -> None:
        self.scores, self.floor = scores, floor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        made = torch.full_like(scores, self.floor)
        for token, score in self.scores.items():
            made[0, token] = score
        return made


@pytest.mark.parametrize(
    ("token", "gap", "rank"),
    [(7, 0.0, 1), (9, 0.0, 2), (4, 1.5, 3), (0, 4.0, 4), (200, 4.0, 201 - 1)],
)
def test_gap_and_rank_by_hand(stock: StockModel, token: int, gap: float, rank: int) -> None:
    """Scores 4 for 5, 7 and 9, 2.5 for 4, else 0; of equals the lower id comes first."""
    rule = Fixed({5: 4.0, 7: 4.0, 9: 4.0, 4: 2.5})
    row = judged(stock, [token], 1, logits_processor=[rule])
    assert row.mismatches == (Mismatch(position=0, emitted=token, expected=5, gap=gap, rank=rank),)
    assert row.margins == (0.0,)


def test_what_the_rules_forbid_has_no_gap_and_the_only_choice_no_margin(stock: StockModel) -> None:
    row = judged(stock, [4, 5], 2, logits_processor=[Fixed({5: 1.0}, floor=-torch.inf)])
    assert row.margins == (None, None)
    assert [(m.position, m.expected, m.gap) for m in row.mismatches] == [(0, 5, None)]
    assert row.mismatches[0].rank == 5  # the lower ids 0 to 3 are as impossible, and come first


def test_rules_of_the_model_folder_are_applied_to_the_emitted_tokens(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 1.7, "renormalize_logits": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = StockModel(folder, torch.float32, CPU)
    tokens = model.generate(PROMPT, NUM_NEW)
    assert tokens != StockModel(tiny_folder("llama"), torch.float32, CPU).generate(PROMPT, NUM_NEW)
    row = judged(model, tokens)
    assert row.mismatches == ()
    out = model._generate(PROMPT, NUM_NEW, return_dict_in_generate=True, output_scores=True)
    top = torch.cat(out.scores).topk(2, dim=-1).values
    assert row.margins == tuple((top[:, 0] - top[:, 1]).tolist())


def test_other_options_of_the_request_count_too(stock: StockModel, plain: tuple[int, ...]) -> None:
    tokens = stock.generate(PROMPT, NUM_NEW, repetition_penalty=1.7)
    assert judged(stock, tokens, repetition_penalty=1.7).mismatches == ()
    assert judged(stock, tokens).mismatches != ()


def ending(folder: Path, tmp_path: Path, eos: int) -> StockModel:
    made = tmp_path / "model"
    shutil.copytree(folder, made)
    settings = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": eos}))
    return StockModel(made, torch.float32, CPU)


def test_natural_and_fixed_ends(
    tiny_folder: Callable[..., Path], tmp_path: Path, plain: tuple[int, ...]
) -> None:
    """The seventh token ends the output by nature; a fixed length masks it as ``generate`` does."""
    eos = plain[6]
    assert eos not in plain[:6]
    model = ending(tiny_folder("llama"), tmp_path, eos)
    natural = model.generate(PROMPT, NUM_NEW)
    fixed = model.generate(PROMPT, NUM_NEW, min_new_tokens=NUM_NEW)
    assert natural == plain[:7]
    assert len(fixed) == NUM_NEW
    assert judged(model, natural).mismatches == ()
    assert judged(model, fixed, min_new_tokens=NUM_NEW).mismatches == ()
    forbidden = judged(model, plain, min_new_tokens=NUM_NEW).mismatches[0]
    assert (forbidden.position, forbidden.emitted, forbidden.gap) == (6, eos, None)
    assert forbidden.expected == fixed[6]


def test_an_output_that_ends_early(stock: StockModel, plain: tuple[int, ...]) -> None:
    row = judged(stock, plain[:10])
    assert row.mismatches == (Mismatch(position=10, emitted=None, expected=plain[10]),)
    assert (row.num_tokens, len(row.margins)) == (10, 10)


@pytest.mark.parametrize("num_new", [4, NUM_NEW])
def test_an_output_that_goes_on(
    num_new: int, stock: StockModel, tiny_folder: Callable[..., Path], tmp_path: Path, plain: tuple[int, ...]
) -> None:
    """Past the limit, and past the end token."""
    model = stock if num_new == 4 else ending(tiny_folder("llama"), tmp_path, plain[3])
    row = judged(model, plain[:6], num_new)
    assert row.mismatches == tuple(Mismatch(position=i, emitted=plain[i], expected=None) for i in (4, 5))
    assert (row.num_tokens, len(row.margins)) == (6, 4)


def test_no_output_at_all(stock: StockModel, plain: tuple[int, ...]) -> None:
    row = judged(stock, [])
    assert row.mismatches == (Mismatch(position=0, emitted=None, expected=plain[0]),)


@pytest.mark.parametrize("token", [-1, 288, 10**12])
def test_a_token_the_model_does_not_have(stock: StockModel, plain: tuple[int, ...], token: int) -> None:
    row = judged(stock, [plain[0], token, 5])
    assert row.mismatches == (
        Mismatch(position=1, emitted=token, expected=plain[1]),
        Mismatch(position=2, emitted=5, expected=None),
    )


@pytest.mark.parametrize("prompt", [[], [3, 288], [-1]])
def test_prompts_the_model_cannot_read(stock: StockModel, prompt: list[int]) -> None:
    with pytest.raises(PromptError, match="code: the prompt is empty or holds ids outside 0 to 287"):
        replay(stock, "code", prompt, [1], max_new_tokens=4)


def test_progress_and_interrupts(stock: StockModel, plain: tuple[int, ...]) -> None:
    seen: list[tuple[str, int, int]] = []
    judged(stock, plain, progress=lambda *told: seen.append(told))
    assert seen == [("x", i, NUM_NEW) for i in range(1, NUM_NEW + 1)]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(stock, plain, progress=stop)
    assert judged(stock, plain).mismatches == ()


def test_stock_is_loaded_as_the_request_names_it(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    loaded = load_stock(str(folder), "bfloat16", "cpu")
    assert loaded.folder == folder
    assert loaded.model.module.dtype == torch.bfloat16


def test_stock_that_cannot_be_loaded(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model 'nothing-here'"):
        load_stock("nothing-here", "float32", "cpu")
    with pytest.raises(OptionError, match="no dtype 'int7'; known: bfloat16"):
        load_stock(str(tiny_folder("llama")), "int7", "cpu")
    with pytest.raises(ModelFileError, match="cannot load .* on nowhere"):
        load_stock(str(tiny_folder("llama")), "float32", "nowhere")
    broken = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), broken)
    (broken / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(ModelFileError, match="cannot load"):
        load_stock(str(broken), "float32", "cpu")
