"""Batched decoding against stock's single-sequence output, on awkward lengths, sizes and architectures."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftproof.errors import OptionError
from draftproof.heads import batch
from draftproof.heads.batch import BatchDecoder, Request, Sampling, sample
from draftproof.models.stock import StockModel

END = 7
Folder = Callable[..., Path]
LENGTHS = (5, 19, 5, 1, 33, 19, 40, 19, 2, 11)


def load(folder: Path) -> StockModel:
    return StockModel(folder, torch.float32, torch.device("cpu"))


def prompts(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(range(256), k=length)) for length in LENGTHS]


def requests(most: int = 24) -> list[Request]:
    return [Request(ids=ids, max_new_tokens=most - i) for i, ids in enumerate(prompts(3))]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_5_text", "gpt2", "mistral"])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_every_row_is_what_stock_decodes_alone(tiny_folder: Folder, kind: str, size: int) -> None:
    """fp32 rows can differ at a near-tie; with these weights there is none, so equality is exact."""
    stock = load(tiny_folder(kind))
    answers = BatchDecoder(stock.module, frozenset(), size).decode(requests())
    expected = [stock.generate(r.ids, r.max_new_tokens) for r in requests()]
    assert [a.ids for a in answers if a.reason == "length"] == [
        e for a, e in zip(answers, expected, strict=True) if a.reason == "length"
    ]
    for answer, whole in zip(answers, expected, strict=True):
        assert whole[: len(answer.ids)] == answer.ids
    assert sum(a.reason == "length" for a in answers) >= 7


def test_rows_end_at_the_end_token_and_make_room(tiny_folder: Folder) -> None:
    """Ends fall at different steps, so rows are dropped, positions cut and waiting prompts let in."""
    stock = load(tiny_folder("llama"))
    free = BatchDecoder(stock.module, frozenset(), 16).decode(requests())
    ends = frozenset(a.ids[i] for i, a in enumerate(free[:6]))
    heard: list[tuple[int, int]] = []
    answers = BatchDecoder(stock.module, ends, 3).decode(requests(), lambda *told: heard.append(told))
    for answer, whole in zip(answers, free, strict=True):
        first = next((i for i, token in enumerate(whole.ids) if token in ends), None)
        assert answer.ids == (whole.ids if first is None else whole.ids[: first + 1])
        assert (answer.reason == "end") is (first is not None)
    assert heard[-1] == (len(LENGTHS), sum(len(a.ids) for a in answers))
    assert heard == sorted(heard)


def test_a_loop_ends_a_row_early(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = load(tiny_folder("llama"))
    monkeypatch.setattr(batch, "has_looping_tail", lambda ids: len(ids) == 16)
    (answer,) = BatchDecoder(stock.module, frozenset(), 2).decode([Request(ids=(3, 4), max_new_tokens=40)])
    assert (len(answer.ids), answer.reason) == (16, "loop")
    assert answer.ids == stock.generate((3, 4), 16)


def sampled(seed: int) -> list[Request]:
    how = [Sampling(temperature=1.0, top_p=0.95, seed=seed + i) for i in range(len(LENGTHS))]
    return [Request(ids=ids, max_new_tokens=20, sampling=s) for ids, s in zip(prompts(3), how, strict=True)]


def test_sampled_rows_depend_on_their_own_seed(tiny_folder: Folder) -> None:
    module = load(tiny_folder("llama")).module
    whole = BatchDecoder(module, frozenset(), 16).decode(sampled(50))
    assert BatchDecoder(module, frozenset(), 16).decode(sampled(50)) == whole
    assert BatchDecoder(module, frozenset(), 3).decode(sampled(50)) == whole
    other = sampled(50)
    other[0] = sampled(99)[0]
    changed = BatchDecoder(module, frozenset(), 16).decode(other)
    assert (changed[0] != whole[0], changed[1:]) == (True, whole[1:])


def test_greedy_and_sampled_rows_share_a_batch(tiny_folder: Folder) -> None:
    stock = load(tiny_folder("llama"))
    mixed = [s if i % 2 else r for i, (r, s) in enumerate(zip(requests(), sampled(50), strict=True))]
    answers = BatchDecoder(stock.module, frozenset(), 4).decode(mixed)
    for place in range(0, len(mixed), 2):
        assert answers[place].ids == stock.generate(mixed[place].ids, len(answers[place].ids))


@pytest.mark.parametrize(("top_p", "allowed"), [(0.4, {2}), (0.5, {2}), (0.75, {2, 0}), (1.0, {0, 1, 2, 3})])
def test_only_the_likeliest_tokens_are_drawn(top_p: float, allowed: set[int]) -> None:
    logits = torch.tensor([0.25, 0.125, 0.5, 0.125]).log()
    how = Sampling(temperature=1.0, top_p=top_p, seed=0)
    grid = [i / 1000 for i in range(1000)]
    assert set(sample(logits.expand(1000, -1), [how] * 1000, grid)) == allowed


def test_draws_follow_the_probabilities_also_past_the_likeliest_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniforms on a grid give each token its share; a short list of likely tokens changes nothing."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    how = Sampling(temperature=0.7, top_p=1.0, seed=0)
    grid = [(i + 0.5) / 4000 for i in range(4000)]
    whole = sample(logits.expand(4000, -1), [how] * 4000, grid)
    shares = torch.bincount(torch.tensor(whole), minlength=50) / len(grid)
    # A token's share of a grid is off by at most one point at either end.
    assert (shares - (logits / 0.7).softmax(-1)).abs().max() <= 2 / len(grid)
    monkeypatch.setattr(batch, "_LIKELY", 4)
    assert sample(logits.expand(4000, -1), [how] * 4000, grid) == whole


def test_a_cache_no_row_can_be_dropped_from_is_refused() -> None:
    with pytest.raises(OptionError, match="no batched decoding with a cache layer of type object"):
        batch._layer(object())


def test_prompts_of_one_length_are_read_together() -> None:
    made = [Request(ids=(1,) * n, max_new_tokens=1) for n in [2] * 20 + [3, 5, 5]]
    groups = list(batch._equal_lengths(made, range(23)))
    assert [len(group) for group in groups] == [16, 4, 1, 2]
    assert [place for group in groups for place in group] == list(range(23))


@pytest.mark.parametrize("size", [2, 16])
def test_an_answer_can_ask_on_among_the_others(tiny_folder: Folder, size: int) -> None:
    """Every third row goes on twice with its own answer in the prompt, as stock would alone."""
    stock = load(tiny_folder("llama"))
    first = [Request(ids=r.ids, max_new_tokens=5 + i) for i, r in enumerate(requests())]
    heard: list[tuple[int, tuple[int, ...]]] = []
    last = {place: r.ids for place, r in enumerate(first)}

    def then(place: int, answer: batch.Answer) -> Request | None:
        heard.append((place, answer.ids))
        if place % 3 or sum(p == place for p, _ in heard) == 3:
            return None
        last[place] = (*last[place], *answer.ids, 65)
        return Request(ids=last[place], max_new_tokens=4)

    answers = BatchDecoder(stock.module, frozenset(), size).decode(first, then=then)
    counts = {place: sum(p == place for p, _ in heard) for place in range(len(first))}
    assert counts == {place: 1 if place % 3 else 3 for place in range(len(first))}
    for place, answer in enumerate(answers):
        length = 5 + place if place % 3 else 4
        assert answer.ids == stock.generate(last[place], length)
