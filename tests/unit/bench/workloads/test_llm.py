"""Prompts that do not repeat and share nothing, stock decoding with both stops, refused options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench.prompts import LABELS, diverse_inputs
from draftproof.bench.workloads.base import Inputs, Output
from draftproof.bench.workloads.llm import HOLDOUT, MAIN, LLMWorkload, evaluation_texts
from draftproof.errors import ModelNotFoundError, OptionError, PromptError
from draftproof.models.catalog import find, pulled_path
from draftproof.models.stock import StockModel

Folder = Callable[..., Path]
REAL = "smollm2-135m-instruct"
LONGEST_REPEAT = 0.02


def workload(folder: Path, **options: Any) -> LLMWorkload:
    return LLMWorkload(model=str(folder), dtype="float32", **options)


def grams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def repeated_share(ids: Sequence[int], n: int = 4) -> float:
    """Share of the positions whose ``n``-gram has occurred before: what prompt lookup lives on."""
    counts = Counter(grams(ids, n))
    return sum(count - 1 for count in counts.values()) / sum(counts.values())


@pytest.fixture(scope="module")
def real_tokenizer() -> Any:
    """A trained tokenizer, from the default model where it was pulled."""
    packaged = find(REAL)
    if packaged is None or pulled_path(packaged) is None:
        pytest.skip("the default model is not pulled")
    return LLMWorkload(model=REAL).tokenizer


@pytest.mark.model
@pytest.mark.parametrize("prompt_len", [256, 512, 700])
@pytest.mark.parametrize("text", [MAIN, HOLDOUT])
def test_the_prompt_does_not_repeat_itself(text: str, prompt_len: int, real_tokenizer: Any) -> None:
    ids = LLMWorkload(model=REAL, prompt_len=prompt_len, chat=False).make_inputs(text=text).token_ids
    assert len(ids) == prompt_len
    assert repeated_share(ids) <= LONGEST_REPEAT
    paragraph = ids[:64]
    repeated = (list(paragraph) * (prompt_len // 64 + 1))[:prompt_len]
    assert repeated_share(repeated) > 0.7  # the prompt that made lookup look forty times faster


@pytest.mark.model
@pytest.mark.parametrize("prompt_len", [256, 512, 700])
def test_no_prompt_holds_a_line_of_another(prompt_len: int, real_tokenizer: Any) -> None:
    made = LLMWorkload(model=REAL, prompt_len=prompt_len, chat=False)
    prompts = {t: made.make_inputs(text=t).token_ids for t in (MAIN, HOLDOUT, *LABELS)}
    found = {label: set(grams(ids, 8)) for label, ids in prompts.items()}
    shared = [(a, b) for a in (MAIN, HOLDOUT) for b in found if a != b and found[a] & found[b]]
    assert shared == []


def test_the_prompt_ends_in_a_request(tiny_folder: Folder) -> None:
    made = workload(tiny_folder("llama"), prompt_len=400)
    main = made.make_inputs()
    assert main.max_new_tokens == 256
    assert made.tokenizer.decode(main.token_ids).endswith("end with the one question it leaves open.")
    holdout = made.make_inputs(**made.holdout_options())
    assert made.tokenizer.decode(holdout.token_ids).endswith("step by step, and why it matters.")
    assert len(main.token_ids) == len(holdout.token_ids) == 400


def test_diverse_prompts_have_the_main_ones_length_and_their_own_request(tiny_folder: Folder) -> None:
    made = workload(tiny_folder("llama"), prompt_len=420)
    requests = {item.label: item.request for item in diverse_inputs()}
    found = {label: made.make_inputs(**options) for label, options in made.diverse_inputs().items()}
    assert tuple(found) == LABELS
    assert {len(inputs.token_ids) for inputs in found.values()} == {420}
    for label in ("news", "code", "german"):
        assert made.tokenizer.decode(found[label].token_ids).endswith(requests[label])


def test_inputs_take_overrides_and_no_others(tiny_folder: Folder) -> None:
    made = workload(tiny_folder("llama"), prompt_len=400)
    shorter = made.make_inputs(prompt_len=300, max_new_tokens=7)
    assert (len(shorter.token_ids), shorter.max_new_tokens) == (300, 7)
    with pytest.raises(OptionError, match="an input has no option 'temperature'"):
        made.make_inputs(temperature=1)
    with pytest.raises(OptionError, match="no text 'novel'; known: main, holdout, news"):
        made.make_inputs(text="novel")


def test_a_prompt_longer_than_the_texts_is_refused(tiny_folder: Folder) -> None:
    made = workload(tiny_folder("llama"), prompt_len=100_000)
    with pytest.raises(PromptError, match="no text left for the main prompt at 100000 tokens"):
        made.make_inputs()


def test_building_inputs_needs_no_weights(tiny_folder: Folder, tmp_path: Path) -> None:
    for file in tiny_folder("llama").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert len(workload(tmp_path, prompt_len=400).make_inputs().token_ids) == 400


def test_a_fixed_stop_masks_the_end_token_and_a_natural_one_does_not(tiny_folder: Folder) -> None:
    folder = tiny_folder("llama")
    inputs = Inputs(token_ids=tuple(b"some text"), max_new_tokens=12)
    plain = workload(folder)
    plain.load()
    ids = plain.run(inputs)
    assert len(ids) == 12
    end = ids[4]
    ending = tiny_folder("llama", eos_token_id=end, pad_token_id=end)
    natural, fixed = workload(ending, stop="natural"), workload(ending)
    natural.load()
    fixed.load()
    assert natural.run(inputs) == ids[: ids.index(end) + 1]
    without = fixed.run(inputs)
    assert len(without) == 12
    assert end not in without[:-1]


def test_run_is_stocks_own_decoding_and_follows_a_replaced_model(tiny_folder: Folder) -> None:
    import torch  # noqa: PLC0415

    made = workload(tiny_folder("llama"))
    inputs = Inputs(token_ids=tuple(b"the other"), max_new_tokens=8)
    with pytest.raises(OptionError, match="load the workload before running it"):
        made.run(inputs)
    with pytest.raises(OptionError, match="load the workload before replacing its model"):
        made.model = None
    assert made.model is None
    made.load()
    stock = StockModel(tiny_folder("llama"), torch.float32, torch.device("cpu"))
    first = made.run(inputs)
    assert first == stock.generate(inputs.token_ids, 8)
    other = StockModel(tiny_folder("qwen3"), torch.float32, torch.device("cpu"))
    made.model = other.module
    assert made.run(inputs) == other.generate(inputs.token_ids, 8) != first


def test_counted_layer_is_the_decoders_last(tiny_folder: Folder) -> None:
    for kind in ("llama", "gpt2"):
        made = workload(tiny_folder(kind))
        made.load()
        base = made.model.base_model
        layers = base.h if kind == "gpt2" else base.layers
        assert made.counted_module() is layers[-1]


def test_outputs_are_compared_token_by_token(tiny_folder: Folder) -> None:
    found = workload(tiny_folder("llama")).compare(Output(token_ids=(1, 2)), Output(token_ids=(1, 3)))
    assert (found.is_equal, found.first_difference) == (False, 1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stop": "never"}, "stop must be fixed or natural, got 'never'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        LLMWorkload(model="m", **options)


def test_an_unknown_dtype_or_model_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown dtype 'int3'"):
        LLMWorkload(model="m", dtype="int3").make_inputs()
    with pytest.raises(ModelNotFoundError, match="no model 'no-such-model'"):
        LLMWorkload(model="no-such-model").make_inputs()


def test_chat_without_a_template_is_refused(tiny_folder: Folder) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        workload(tiny_folder("llama"), prompt_len=400, chat=True).make_inputs()


def test_evaluation_texts_hold_every_prompt_an_evaluation_decodes(tiny_folder: Folder) -> None:
    """Main and held-out prompts are cut from them; their own requests are there too."""
    texts = evaluation_texts()
    assert set(texts) == {MAIN, HOLDOUT, *LABELS}
    for item in diverse_inputs():
        assert texts[item.label] == f"{item.context}\n\n{item.request}"
    workload = LLMWorkload(model=str(tiny_folder("llama")), dtype="float32", prompt_len=300)
    for label in (MAIN, HOLDOUT):
        item = workload._item(label, 300)
        assert texts[label].endswith(item.request)
        assert all(part in texts[label] for part in item.context.split("\n\n"))
