"""The generator: a function of (seed, index), no prompt twice, every kind and language equally often."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from draftproof.errors import OptionError
from draftproof.heads import prompts
from draftproof.heads.prompts import CATEGORIES, LANGUAGES, RAW, Prompt, Shares, cell_size, draw, num_cells

PLAIN = Shares(sampled=0.3, self_instruct=0.0)
MIXED = Shares(sampled=0.3, self_instruct=0.25)


def drawn(count: int, shares: Shares = PLAIN, seed: int = 1) -> list[Prompt]:
    return [draw(seed, index, shares) for index in range(count)]


def test_a_prompt_depends_on_seed_and_index_alone() -> None:
    forward = drawn(400, MIXED)
    order = list(range(400))
    random.Random(5).shuffle(order)
    assert [draw(1, index, MIXED) for index in order] == [forward[index] for index in order]
    assert drawn(400, MIXED, seed=2) != forward


def test_no_prompt_comes_twice() -> None:
    """Far beyond the smallest template's own combinations."""
    texts = Counter(prompt.turns[0] for prompt in drawn(60 * num_cells()))
    assert texts.most_common(1)[0][1] == 1


def test_a_small_cell_gives_each_of_its_prompts_once() -> None:
    smallest = min((cell_size(lang, kind), lang, kind) for lang in LANGUAGES for kind in CATEGORIES)
    size, language, category = smallest
    texts = {prompts._fill(3, language, category, visit) for visit in range(size)}
    assert len(texts) == size
    with pytest.raises(OptionError, match=f"no {category} prompts in {language} are left after {size}"):
        prompts._fill(3, language, category, size)


def test_every_block_holds_every_kind_in_every_language_once() -> None:
    for block in range(3):
        cells = Counter(
            (p.language, p.category) for p in drawn(4 * num_cells())[block * num_cells() :][: num_cells()]
        )
        assert len(cells) == len(LANGUAGES) * len(CATEGORIES) == num_cells()
        assert set(cells.values()) == {1}


def test_texts_are_in_their_language_and_filled() -> None:
    for prompt in drawn(4 * num_cells()):
        text = " ".join(prompt.turns)
        assert text == text.strip() or prompt.is_raw
        assert "{" not in text.replace("{n}", "")
        assert "  " not in text
        if prompt.language == "zh":
            assert any("\u4e00" <= character <= "\u9fff" for character in text)
        if prompt.language == "ru":
            assert any("а" <= character <= "я" for character in text)
        assert prompt.is_raw == (prompt.category == RAW)


def test_shares_are_kept_and_turns_are_one_or_two() -> None:
    many = drawn(20 * num_cells(), MIXED)
    assert 0.27 < sum(p.is_sampled for p in many) / len(many) < 0.33
    chats = [p for p in many if not p.is_raw]
    own = [p for p in chats if p.origin == "self"]
    assert 0.22 < len(own) / len(chats) < 0.28
    assert all(not p.turns and p.hint for p in own)
    asked = [p for p in many if p.origin == "template"]
    assert {len(p.turns) for p in asked if not p.is_raw} == {1, 2}
    assert {len(p.turns) for p in asked if p.is_raw} == {1}
    assert len({p.seed for p in many}) == len(many)


def test_own_shares_change_nothing_else() -> None:
    """A prompt keeps its text when more answers are sampled."""
    more = Shares(sampled=0.9, self_instruct=0.0)
    assert [p.turns for p in drawn(300)] == [p.turns for p in drawn(300, more)]


def test_the_turn_a_model_wrote_takes_its_place() -> None:
    own = next(p for p in drawn(200, MIXED) if p.origin == "self")
    assert own.with_turn("Why?").turns == ("Why?",)


def test_templates_share_their_visits_while_they_last() -> None:
    assert [prompts._turn([2, 5, 1], visit) for visit in range(9)] == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (1, 2), (1, 3), (1, 4), None,
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 8, 30, 97])
def test_a_stride_visits_every_combination(size: int) -> None:
    step = prompts._stride(size)
    assert {turn * step % size for turn in range(size)} == set(range(size))


@pytest.mark.parametrize("name", ["sampled", "self_instruct"])
def test_a_share_is_a_share(name: str) -> None:
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}-share must be from 0 to 1, got 1.5"):
        Shares(**{"sampled": 0.0, "self_instruct": 0.0, name: 1.5})
