"""``generate(custom_generate=…)`` on tiny random models: stock's ids, the module's own weights, refusals."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessorList,
    StopStringCriteria,
)

import draftproof
from draftproof.errors import DrafterError, OptionError, UsageError
from draftproof.hf_generate import custom_generate
from draftproof.models.decoder import DecoderTarget
from draftproof.models.generic import GenericTarget
from draftproof.testing import ScriptedDrafter

pytestmark = pytest.mark.slow

# The name on the package is the function, so the module is found by it.
module_of_it: Any = sys.modules[custom_generate.__module__]
PROMPT = torch.tensor(
    [[101, 110, 32, 116, 104, 101, 32, 111, 116, 104, 101, 114, 32, 101, 110, 32, 116, 104]]
)
NUM_NEW = 48
DECODERS = ("llama", "qwen3", "gemma3_text")
OTHERS = ("gpt2", "mistral")
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for this file, as a probe takes seconds; one thread, as models are tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTPROOF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def fresh(tiny_folder: Any) -> Callable[..., Any]:
    """A newly loaded module: nothing is prepared for it yet."""

    def load(kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
        folder = tiny_folder(kind, dtype)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()

    return load


@pytest.fixture(scope="module")
def model(fresh: Callable[..., Any]) -> Callable[..., Any]:
    """A module shared by the tests of this file; do not change it."""
    return functools.cache(fresh)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Any) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder("llama", torch.bfloat16))


def stock(module: Any, ids: torch.Tensor = PROMPT, **options: Any) -> list[int]:
    out = module.generate(ids, **{"do_sample": False, "max_new_tokens": NUM_NEW, **options})
    return list(out[0].tolist())


def ours(module: Any, ids: torch.Tensor = PROMPT, **options: Any) -> list[int]:
    return stock(module, ids, custom_generate=custom_generate, **options)


def target_of(module: Any) -> Any:
    return module_of_it._prepare(module)[0]


class Counting:
    """The real function, and how often it ran: ``generate`` ignores what it does not recognise."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return custom_generate(*args, **kwargs)


def test_generate_really_calls_it(model: Any) -> None:
    counting = Counting()
    assert stock(model(), custom_generate=counting) == stock(model())
    assert counting.num_calls == 1


def test_the_public_name_is_the_function_every_time() -> None:
    # generate() takes what is not callable for "no custom function" and decodes serially without a word.
    for _ in range(3):
        assert callable(draftproof.custom_generate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*DECODERS, *OTHERS])
def test_emits_stocks_ids(kind: str, dtype: torch.dtype, model: Any) -> None:
    module = model(kind, dtype)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW}
    want = module.generate(PROMPT, **options)
    if kind in OTHERS and dtype == torch.bfloat16:
        # Drafts leave keys of other bits behind, and in half precision ties are too frequent to bet on.
        options["depth"] = 0
    got = module.generate(PROMPT, **options, custom_generate=custom_generate)
    assert torch.equal(got, want)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    assert isinstance(target_of(module), DecoderTarget if kind in DECODERS else GenericTarget)


@pytest.mark.parametrize("drafter", ["auto", "lookup", "suffix", "early_exit"])
@pytest.mark.parametrize("depth", ["auto", 0, 1, 5, 16])
def test_any_drafter_and_depth_emits_stocks_ids(drafter: str, depth: Any, model: Any) -> None:
    assert ours(model(), drafter=drafter, depth=depth) == stock(model())


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2"])
def test_depths_on_a_sliding_and_on_a_generic_cache(kind: str, model: Any) -> None:
    module = model(kind, torch.float32)
    for depth in (0, 1, 5, 16):
        assert ours(module, depth=depth, drafter="lookup") == stock(module)


@pytest.mark.parametrize("length", [1, 2, 33])
def test_prompt_lengths(length: int, model: Any) -> None:
    ids = (torch.arange(length) * 37 + 5)[None] % 288
    for module in (model("llama", torch.bfloat16), model("gpt2", torch.float32)):
        assert ours(module, ids) == stock(module, ids)


@pytest.mark.parametrize(
    ("options", "changes_the_text"),
    [
        ({"repetition_penalty": 1.3}, True),
        ({"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "bad_words_ids": [[101], [32, 116]]}, True),
        ({"suppress_tokens": list(range(0, 288, 3))}, True),
        ({"forced_eos_token_id": 9}, True),
        ({"sequence_bias": [[[32], 30.0], [[101], 30.0]]}, True),
        ({"max_new_tokens": 1}, True),
        ({"max_new_tokens": None, "max_length": 30}, True),
        ({"renormalize_logits": True}, False),
        ({"no_repeat_ngram_size": 3}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stocks_options_are_applied(
    kind: str, options: dict[str, Any], changes_the_text: bool, model: Any
) -> None:
    module = model(kind, torch.float32 if kind == "gpt2" else torch.bfloat16)
    want = stock(module, **options)
    assert ours(module, drafter="lookup", depth=4, **options) == want
    if changes_the_text:
        assert want != stock(module)


def test_processors_and_criteria_of_the_caller_are_applied(model: Any) -> None:
    def no_even_ids(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(0, 288, 2), -torch.inf)

    def after_40_ids(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= 40])

    options = {
        "logits_processor": LogitsProcessorList([no_even_ids]),
        "stopping_criteria": [after_40_ids],
    }
    want = stock(model(), **options)
    assert len(want) == 40
    assert ours(model(), **options, drafter="lookup", depth=7) == want


@pytest.mark.parametrize("several", [False, True])
def test_end_tokens(several: bool, model: Any) -> None:
    new = stock(model())[PROMPT.shape[1] :]
    eos: Any = [287, new[20]] if several else new[20]
    want = stock(model(), eos_token_id=eos)
    assert len(want) == PROMPT.shape[1] + new.index(new[20]) + 1
    for depth in (0, 3, 16):
        assert ours(model(), eos_token_id=eos, depth=depth) == want
    options = {"eos_token_id": eos, "min_new_tokens": 25}
    assert ours(model(), **options) == stock(model(), **options)
    assert len(stock(model(), **options)) > len(want)


def test_stop_strings(model: Any, tokenizer: Any) -> None:
    new = stock(model())[PROMPT.shape[1] :]
    # A whole character, late enough that speculation has begun.
    stop = next(t for t in map(tokenizer.decode, new[10:]) if t.isascii() and t.isprintable())
    # transformers 5.24 hands a custom function's generate() no tokenizer, so ``stop_strings`` cannot be used.
    options = {"stopping_criteria": [StopStringCriteria(tokenizer, [stop])]}
    want = stock(model(), **options)
    assert len(want) < PROMPT.shape[1] + NUM_NEW
    for depth in (0, 3, 16):
        assert ours(model(), depth=depth, **options) == want


def test_the_default_length_is_stocks(model: Any) -> None:
    def run(**options: Any) -> list[int]:
        with pytest.warns(UserWarning, match="max_length"):
            out = model().generate(PROMPT, do_sample=False, **options)
        return list(out[0].tolist())

    assert run(custom_generate=custom_generate) == run()


class Listener:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_puts = 0
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.has_ended
        self.num_puts += 1
        self.ids.extend(value.reshape(-1).tolist())

    def end(self) -> None:
        self.has_ended = True


def test_a_streamer_gets_every_new_id_and_the_end(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = stock(model())

    def next_ids(context: Sequence[int], max_tokens: int) -> Sequence[int]:
        return want[len(context) : len(context) + max_tokens]

    monkeypatch.setattr(module_of_it, "build_drafter", lambda name, options: ScriptedDrafter(next_ids))
    # transformers 5.24 keeps its own ``streamer`` argument from custom functions: it is bound instead.
    listener = Listener()
    bound = functools.partial(custom_generate, streamer=listener, depth=4)
    out = model().generate(PROMPT, do_sample=False, max_new_tokens=NUM_NEW, custom_generate=bound)
    assert out[0].tolist() == want
    assert listener.ids == want[PROMPT.shape[1] :]
    assert listener.num_puts == 1 + -(-(NUM_NEW - 1) // 5)
    assert listener.has_ended


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"do_sample": True}, "greedily"),
            ({"num_beams": 3}, "one sequence|greedily"),
            ({"num_beams": 2, "num_return_sequences": 2}, "one sequence|greedily"),
            ({"return_dict_in_generate": True}, "return_dict_in_generate"),
            ({"attention_mask": torch.tensor([[0] + [1] * (PROMPT.shape[1] - 1)])}, "mask holds zeros"),
            ({"depth": -1}, "0 or more"),
            ({"depth": "deep"}, "depth"),
            ({"drafter": "psychic"}, "psychic"),
            ({"drafter": "none"}, "none"),
            ({"use_cache": False}, "use_cache"),  # stock would compute every step in another shape
        ],
        ids=str,
    )
    def test_what_is_not_greedy_decoding_of_one_sequence(
        self, options: dict[str, Any], told: str, model: Any
    ) -> None:
        with pytest.raises(OptionError, match=told):
            ours(model(), **options)

    def test_a_batch(self, model: Any) -> None:
        with pytest.raises(OptionError, match="one sequence.*got 2"):
            ours(model(), PROMPT.repeat(2, 1))

    def test_a_mask_of_ones_is_no_padding(self, model: Any) -> None:
        assert ours(model(), attention_mask=torch.ones_like(PROMPT)) == stock(model())

    def test_a_drafter_that_needs_a_model(self, model: Any) -> None:
        with pytest.raises(DrafterError):
            ours(model(), drafter="draft_model")
        with pytest.raises(DrafterError, match="early exit"):
            ours(model("gpt2", torch.float32), drafter="early_exit")

    @pytest.mark.parametrize("what", ["cache", "position_ids", "inputs_embeds"])
    def test_model_arguments_that_change_the_output(self, what: str, model: Any) -> None:
        """Silently ignoring them would emit other tokens than stock."""
        module = model()
        if what == "cache":
            cache = DynamicCache(config=module.config)
            with torch.no_grad():
                module(PROMPT[:, :4] + 20, cache=cache)
            ids, options = torch.cat([PROMPT[:, :4] + 20, PROMPT], 1), {"cache": cache}
        elif what == "position_ids":
            ids, options = PROMPT, {"position_ids": torch.arange(PROMPT.shape[1])[None] * 3}
        else:
            ids, options = PROMPT, {"inputs_embeds": module.get_input_embeddings()(PROMPT + 3).detach()}
        with pytest.raises(OptionError):
            ours(module, ids, **options)

    def test_more_positions_than_the_model_has(self, model: Any) -> None:
        num_positions = model().config.max_position_embeddings
        with pytest.raises(UsageError, match="context|position"):
            ours(model(), max_new_tokens=num_positions)
        with pytest.raises(UsageError, match="context|position"):
            ours(model(), torch.ones(1, num_positions + 40, dtype=torch.long), max_new_tokens=4)


class TestSharing:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("kind", DECODERS)
    def test_no_weight_matrix_is_copied(self, kind: str, dtype: torch.dtype, fresh: Any) -> None:
        module = fresh(kind, dtype)
        before = {name: p.data_ptr() for name, p in module.named_parameters()}
        ours(module)
        assert {name: p.data_ptr() for name, p in module.named_parameters()} == before
        target = target_of(module)
        matrices = {p.data_ptr(): p for p in module.parameters() if p.ndim == 2}
        used = [w for linear in target.parts.linears for w in linear._weights.dense_parts()]
        assert {w.data_ptr() for w in [*used, target.parts.embedding_VD]} == set(matrices)
        assert target.nbytes == sum(w.nbytes for w in used)
        embedding = module.get_input_embeddings().weight
        is_tied = module.config.tie_word_embeddings
        assert target.nbytes == sum(p.nbytes for p in matrices.values() if is_tied or p is not embedding)

    def test_it_is_measured_once_a_module(self, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = fresh()
        want = ours(module)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("measured again")

        monkeypatch.setattr(module_of_it.PlanStore, "curve", fail)
        monkeypatch.setattr(module_of_it.PlanStore, "margin", fail)
        assert ours(module) == want

    def test_two_modules_are_kept_apart(self, fresh: Any) -> None:
        one, other = fresh("llama"), fresh("qwen3")
        assert ours(one) == stock(one) != stock(other)
        assert ours(other) == stock(other)
        assert target_of(one) is not target_of(other)

    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_a_module_that_is_dropped_is_freed(self, kind: str, fresh: Any) -> None:
        module = fresh(kind)
        ours(module)
        ref = weakref.ref(module)
        del module
        gc.collect()
        assert ref() is None

    def test_weights_changed_in_place_are_used(self, fresh: Any) -> None:
        module = fresh("llama", torch.float32)
        before = ours(module)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1 + 0.5 * torch.rand(p.shape, generator=generator))
        assert stock(module) != before
        assert ours(module) == stock(module)

    def test_a_module_cast_to_another_dtype_is_prepared_again(self, fresh: Any) -> None:
        module = fresh("llama", torch.bfloat16)
        ours(module, max_new_tokens=200)
        module.float()
        assert ours(module, max_new_tokens=200) == stock(module, max_new_tokens=200)
        assert module_of_it._prepare(module)[1].dtype == "float32"

    def test_a_replaced_weight_is_used(self, fresh: Any) -> None:
        module = fresh("llama", torch.float32)
        before = ours(module)
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().flip(0))
        assert stock(module) != before
        assert ours(module) == stock(module)

    def test_another_attention_is_used(self, fresh: Any) -> None:
        module = fresh("llama", torch.bfloat16)
        ours(module)
        module.set_attn_implementation("eager")
        assert ours(module, max_new_tokens=200, depth=0) == stock(module, max_new_tokens=200)


def test_eager_attention_runs_through_transformers(fresh: Any) -> None:
    module = fresh("llama", torch.float32, attn_implementation="eager")
    assert ours(module, max_new_tokens=200) == stock(module, max_new_tokens=200)
    assert isinstance(target_of(module), GenericTarget)
