"""Rules built without weights choose and stop as ``generate`` does; what is not greedy is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from draftproof.errors import OptionError
from draftproof.models.load import load_tokenizer
from draftproof.models.stock import RuleFactory, StockModel, eos_ids, refuse_options
from draftproof.rules import Rules

CPU = torch.device("cpu")
PROMPT = [17, 200, 3, 44, 121, 9]
NUM_NEW = 24


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def stock(folder: Path) -> StockModel:
    return StockModel(folder, torch.float32, CPU)


@pytest.fixture(scope="module")
def plain(stock: StockModel) -> tuple[int, ...]:
    tokens = stock.generate(PROMPT, NUM_NEW)
    assert len(tokens) == NUM_NEW
    return tokens


@pytest.fixture
def decode(stepper: Callable[..., Any]) -> Callable[..., tuple[int, ...]]:
    """Serial decoding by our rules over stock's own logits."""

    def run(
        folder: Path, stock: StockModel, prompt: list[int] = PROMPT, num_new: int = NUM_NEW, **options: Any
    ) -> tuple[int, ...]:
        factory, tokenizer = RuleFactory(folder, CPU), load_tokenizer(folder)
        rules = Rules(factory.build(len(prompt), num_new, tokenizer, **options), prompt, CPU)
        step = stepper(stock.module)
        tokens = [rules.chooser(step(prompt))(0)]
        while not rules.push(tokens[-1]):
            tokens.append(rules.chooser(step(tokens[-1:]))(0))
        return tuple(tokens)

    return run


class Shift(LogitsProcessor):
    """Stateful: forbids the tokens of every other step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, scores.argmax(-1)] -= 100.0 * (self.calls % 2)
        return scores


class After(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((1,), input_ids.shape[1] >= self.length, dtype=torch.bool)


def options_for(plain: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Options that each change the text ``plain`` (asserted), by name of the case."""
    a, b, c, d = plain[2], plain[4], plain[5], plain[7]
    return {
        "repetition_penalty": {"repetition_penalty": 1.7},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[a], [b, c]]},
        "sequence_bias": {"sequence_bias": [[[a], -20.0], [[d], 4.0], [[b, c], -20.0]]},
        "suppress_tokens": {"suppress_tokens": [a, d]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [plain[0]]},
        "one-eos": {"eos_token_id": b},
        "several-eos": {"eos_token_id": [280, d, b]},
        "eos-held-back": {"eos_token_id": a, "min_new_tokens": 9},
        "min_length": {"eos_token_id": a, "min_length": len(PROMPT) + 9},
        "eos-and-no-repeats": {"eos_token_id": [d], "no_repeat_ngram_size": 2, "repetition_penalty": 1.1},
        "forced_eos_token_id": {"forced_eos_token_id": 5},
        "decay": {"eos_token_id": 33, "exponential_decay_length_penalty": (2, 1.9)},
        "several": {"repetition_penalty": 1.3, "bad_words_ids": [[a]], "suppress_tokens": [b]},
    }


CASES = sorted(options_for(tuple(range(NUM_NEW))))


@pytest.mark.parametrize("name", CASES)
def test_options_mean_what_they_mean_to_generate(
    name: str, folder: Path, stock: StockModel, plain: tuple[int, ...], decode: Callable[..., Any]
) -> None:
    options = options_for(plain)[name]
    want = stock.generate(PROMPT, NUM_NEW, **options)
    assert want != plain, "the option must matter"
    assert decode(folder, stock, **options) == want


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_repetition_penalty": 6.0},
        {"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[PROMPT[1]], 60.0], [[61], 30.0]]},
    ],
    ids=["penalty", "ngrams"],
)
def test_options_that_read_the_prompt_itself(
    options: dict[str, Any],
    folder: Path,
    stock: StockModel,
    plain: tuple[int, ...],
    decode: Callable[..., Any],
) -> None:
    """A factory that does not know the prompt may refuse them, but not apply them to another."""
    want = stock.generate(PROMPT, NUM_NEW, **options)
    assert want != plain
    try:
        got = decode(folder, stock, **options)
    except OptionError:
        return
    assert got == want


def test_without_options(
    folder: Path, stock: StockModel, plain: tuple[int, ...], decode: Callable[..., Any]
) -> None:
    assert decode(folder, stock) == plain
    assert decode(folder, stock, num_new=1) == plain[:1]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"num_beams": 1, "num_return_sequences": 1},
        {"output_scores": False},
        {"max_time": None},
    ],
    ids=str,
)
def test_saying_that_it_is_greedy_changes_nothing(
    options: dict[str, Any],
    folder: Path,
    stock: StockModel,
    plain: tuple[int, ...],
    decode: Callable[..., Any],
) -> None:
    assert decode(folder, stock, **options) == plain


def test_no_end_token_at_all(
    folder: Path, stock: StockModel, plain: tuple[int, ...], decode: Callable[..., Any], tmp_path: Path
) -> None:
    """``eos_token_id=None`` overrides the folder's own, as it does for ``generate``."""
    changed = tmp_path / "with-eos"
    shutil.copytree(folder, changed)
    GenerationConfig(eos_token_id=plain[3]).save_pretrained(changed)
    ended = StockModel(changed, torch.float32, CPU)
    want = ended.generate(PROMPT, NUM_NEW)
    assert len(want) < NUM_NEW
    assert decode(changed, ended) == want
    assert decode(changed, ended, eos_token_id=None) == ended.generate(PROMPT, NUM_NEW, eos_token_id=None)


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 1.7},
        {"bad_words_ids": [[250], [31, 2]], "no_repeat_ngram_size": 2},
        {"min_new_tokens": 20, "eos_token_id": [15, 8, 3]},
        {"do_sample": True, "temperature": 0.2, "top_k": 3, "top_p": 0.5},
        {"max_length": 10},
        {"max_new_tokens": 3},
    ],
    ids=str,
)
def test_the_folders_own_generation_config_applies(
    own: dict[str, Any], folder: Path, decode: Callable[..., Any], tmp_path: Path
) -> None:
    changed = tmp_path / "with-config"
    shutil.copytree(folder, changed)
    (changed / "generation_config.json").write_text(json.dumps(own))
    stock = StockModel(changed, torch.float32, CPU)
    assert decode(changed, stock) == stock.generate(PROMPT, NUM_NEW)
    assert decode(changed, stock, repetition_penalty=1.2) == stock.generate(
        PROMPT, NUM_NEW, repetition_penalty=1.2
    )


@pytest.mark.parametrize(
    "own", [{"num_beams": 3}, {"guidance_scale": 1.5}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_a_folder_that_asks_for_more_than_greedy_decoding_is_refused(
    own: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "not-greedy"
    shutil.copytree(folder, changed)
    (changed / "generation_config.json").write_text(json.dumps(own))
    with pytest.raises(OptionError, match=next(iter(own))):
        _build(changed)


def _build(folder: Path) -> object:
    """Wherever it is refused: when the factory is made, or for a request."""
    return RuleFactory(folder, CPU).build(3, 4, None)


def test_stop_strings(
    folder: Path, stock: StockModel, plain: tuple[int, ...], decode: Callable[..., Any]
) -> None:
    """Inside a token, across tokens, and one that never comes."""
    tokenizer = load_tokenizer(folder)
    # Printable output: only letters and pairs of letters may be chosen.
    banned = [
        i for i in range(288) if not tokenizer.decode([i]).isalpha() or not tokenizer.decode([i]).isascii()
    ]
    only = {"suppress_tokens": banned}
    letters = tokenizer.decode(stock.generate(PROMPT, NUM_NEW, **only))
    assert len(letters) >= NUM_NEW
    for stop in (letters[5:7], letters[8:12], [letters[9:11], letters[4]], "~~"):
        want = stock.generate(PROMPT, NUM_NEW, **only, stop_strings=stop, tokenizer=tokenizer)
        assert (len(want) < NUM_NEW) == (stop != "~~")
        assert decode(folder, stock, **only, stop_strings=stop) == want


def test_processors_and_criteria_of_the_user(
    folder: Path, stock: StockModel, plain: tuple[int, ...], decode: Callable[..., Any]
) -> None:
    want = stock.generate(
        PROMPT, NUM_NEW, logits_processor=[Shift()], stopping_criteria=[After(len(PROMPT) + 11)],
        repetition_penalty=1.2,
    )  # fmt: skip
    assert len(want) == 11
    assert want != plain[:11]
    mine = Shift()
    got = decode(
        folder, stock, logits_processor=[mine], stopping_criteria=[After(len(PROMPT) + 11)],
        repetition_penalty=1.2,
    )  # fmt: skip
    assert got == want
    assert mine.calls == 0, "the caller's object is copied"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", True),
        ("num_beams", 2),
        ("num_return_sequences", 2),
        ("penalty_alpha", 0.6),
        ("dola_layers", "low"),
        ("force_words_ids", [[1]]),
        ("guidance_scale", 1.5),
        ("return_dict_in_generate", True),
        ("output_scores", True),
        ("output_logits", True),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("prompt_lookup_num_tokens", 3),
        ("assistant_early_exit", 1),
        ("cache_implementation", "static"),
        ("max_time", 1.0),
        ("token_healing", True),
        ("watermarking_config", {"bias": 2.0}),
    ],
)
def test_what_is_not_greedy_decoding_is_refused(name: str, value: object, folder: Path) -> None:
    for call in (
        lambda: refuse_options({name: value}),
        lambda: RuleFactory(folder, CPU).build(3, 4, None, **{name: value}),
    ):
        with pytest.raises(OptionError, match=f"^{name}=.*not exact greedy decoding"):
            call()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"repetition_penalti": 1.2}, "repetition_penalti"),
        ({"attention_mask": None, "temprature": 1}, "'attention_mask', 'temprature'"),
        ({"streamer": object()}, "streamer"),
        ({"generation_config": GenerationConfig()}, "generation_config"),
    ],
    ids=["typo", "two", "streamer", "generation_config"],
)
def test_unknown_options_are_named(options: dict[str, Any], named: str, folder: Path) -> None:
    factory = RuleFactory(folder, CPU)
    with pytest.raises(OptionError, match=named):
        factory.build(3, 4, None, **options)


@pytest.mark.parametrize("options", [{"repetition_penalty": 0.0}, {"bad_words_ids": []}], ids=str)
def test_impossible_values_are_refused(options: dict[str, Any], folder: Path) -> None:
    factory = RuleFactory(folder, CPU)
    with pytest.raises(OptionError, match=r"penalty|bad_words_ids"):
        factory.build(3, 4, None, **options)


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, set()), (5, {5}), ([5], {5}), ([5, 7, 5], {5, 7}), (torch.tensor([3, 4]), {3, 4})],
)
def test_eos_ids(value: object, ids: set[int]) -> None:
    config = GenerationConfig()
    config.eos_token_id = value
    found = eos_ids(config)
    assert found == ids
    assert all(type(i) is int for i in found)


def test_no_weights_are_loaded(folder: Path) -> None:
    factory = RuleFactory(folder, CPU)
    assert {p.device.type for p in factory._shell.parameters()} == {"meta"}


def test_raw_logits_and_tokens_belong_together(stock: StockModel, plain: tuple[int, ...]) -> None:
    run = stock.run(PROMPT, NUM_NEW)
    assert run.token_ids == plain
    assert run.logits_NV.shape == (NUM_NEW, 288)
    assert run.logits_NV.argmax(-1).tolist() == list(plain)
