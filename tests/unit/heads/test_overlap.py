"""The guard, near-duplicates and loops, on texts made to sit on either side of each border."""

from __future__ import annotations

import random

import pytest

from draftproof.heads.overlap import (
    Guard,
    NearDuplicates,
    has_looping_tail,
    is_repetitive,
    streams,
)

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
CHINESE = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少"


def test_words_and_characters_are_told_apart() -> None:
    assert streams("Don't STOP, 春眠 ab12_c さ!") == (
        ["don", "t", "stop", "ab12", "c"],
        ["春", "眠", "さ"],
    )


@pytest.mark.parametrize(("shared", "is_hit"), [(7, False), (8, True)])
def test_words_shared(shared: int, is_hit: bool) -> None:
    guard = Guard({"news": " ".join(WORDS)})
    found = guard.hit("Well: " + ", ".join(WORDS[2 : 2 + shared]).upper() + "; the end")
    assert (found is not None) is is_hit
    if found:
        assert (found.label, found.gram) == ("news", " ".join(WORDS[2:10]))


@pytest.mark.parametrize(("shared", "is_hit"), [(11, False), (12, True)])
def test_characters_shared(shared: int, is_hit: bool) -> None:
    guard = Guard({"chinese": CHINESE})
    found = guard.hit(f"某人说：{CHINESE[3 : 3 + shared]}。 And so on")
    assert (found is not None) is is_hit


def test_a_short_evaluation_text_counts_whole() -> None:
    guard = Guard({"short": "Count to twenty!", "too short": "Stop it", "long": " ".join(WORDS)})
    assert guard.hit("please count to twenty now").label == "short"  # type: ignore[union-attr]
    assert guard.hit("count up to twenty and stop it") is None


def test_the_first_text_is_named_where_two_share() -> None:
    found = Guard({"a": " ".join(WORDS), "b": " ".join(WORDS)}).hit(" ".join(WORDS))
    assert found is not None
    assert found.label == "a"


def sentence(rng: random.Random, length: int = 120) -> list[str]:
    return [f"w{rng.randrange(500)}" for _ in range(length)]


def test_a_text_changed_a_little_is_a_near_duplicate() -> None:
    rng = random.Random(4)
    texts = [sentence(rng) for _ in range(50)]
    near = NearDuplicates()
    assert all(near.is_new(" ".join(text)) for text in texts)
    for text in texts:
        changed = text.copy()
        changed[60:63] = sentence(rng, 3)
        assert not near.is_new(" ".join(changed).upper())


def test_half_another_text_is_new() -> None:
    rng = random.Random(5)
    near = NearDuplicates()
    for _ in range(30):
        text = sentence(rng)
        assert near.is_new(" ".join(text))
        assert near.is_new(" ".join(text[:60] + sentence(rng, 60)))


def test_chinese_near_duplicates_and_short_texts() -> None:
    near = NearDuplicates()
    assert near.is_new(CHINESE * 1)
    assert not near.is_new(CHINESE + "。")
    assert near.is_new("yes")
    assert not near.is_new("Yes!")
    assert near.is_new("no")


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([5] * 32, True),
        ([5] * 31, False),
        ([*range(100), *[1, 2, 3] * 11], True),
        ([*range(100), *[1, 2, 3] * 10], False),
        ([*[1, 2, 3] * 30, 9], False),
        ([*range(20)] * 4, True),
        ([*range(20)] * 3, False),
        ([7, *[*range(20)] * 4, 0, 1, 2], True),
        (list(range(300)), False),
        ([], False),
    ],
)
def test_a_tail_that_goes_round(ids: list[int], loops: bool) -> None:
    assert has_looping_tail(ids) is loops


def test_a_loop_that_varies_is_repetitive() -> None:
    counted = " ".join(f"and then he said it again, number {i}" for i in range(30))
    assert is_repetitive("so it went on and on and on " * 12)
    assert not is_repetitive(counted)
    assert not is_repetitive("no no no no no no")
    assert not is_repetitive(" ".join(f"w{i}" for i in range(200)))
    assert is_repetitive(CHINESE[:6] * 20)
