"""What must not be in a corpus: evaluation texts, texts that say the same again, tails that go round.

Words are runs of letters and digits in lower case; Chinese and Japanese characters, which no spaces part,
are counted one by one. Word and character n-grams are kept apart. An evaluation text shorter than an n-gram
counts whole. What this does not see: a paraphrase, a translation.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_CHARACTER = re.compile(rf"[{_UNSPACED}]")

Gram = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """An n-gram of an evaluation text that was found, and in which text."""

    label: str
    gram: str


def streams(text: str) -> tuple[list[str], list[str]]:
    """The words and the unspaced characters of a text, each in order."""
    tokens = _TOKEN.findall(text.lower())
    return (
        [token for token in tokens if not _CHARACTER.fullmatch(token)],
        [token for token in tokens if _CHARACTER.fullmatch(token)],
    )


def grams(tokens: Sequence[str], length: int) -> Iterator[Gram]:
    """Every run of ``length`` tokens."""
    return (tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1))


class Guard:
    """Tells whether a text shares an n-gram with an evaluation text.

    Args:
        texts: evaluation texts by label.
        num_words: length of a word n-gram.
        num_characters: length of a character n-gram.
    """

    _FEWEST = 3

    def __init__(self, texts: Mapping[str, str], *, num_words: int = 8, num_characters: int = 12) -> None:
        self._known: tuple[dict[int, dict[Gram, str]], ...] = ({}, {})
        for label, text in texts.items():
            for known, tokens, longest in zip(
                self._known, streams(text), (num_words, num_characters), strict=True
            ):
                length = min(longest, len(tokens))
                if length >= self._FEWEST:
                    found = dict.fromkeys(grams(tokens, length), label)
                    known[length] = found | known.get(length, {})

    def hit(self, text: str) -> Hit | None:
        """The first n-gram shared with an evaluation text."""
        for known, tokens in zip(self._known, streams(text), strict=True):
            for length, labels in known.items():
                for gram in grams(tokens, length):
                    if gram in labels:
                        return Hit(label=labels[gram], gram=" ".join(gram))
        return None


class NearDuplicates:
    """Finds texts like an earlier one, by sketches: the smallest hashes of their runs of five tokens.

    The share of equal hashes among the smallest of both sketches estimates the Jaccard similarity of the sets
    of runs (Broder 1997, bottom-k). Texts of fewer tokens than a run count whole.
    """

    _RUN, _SIZE, _SAME = 5, 48, 0.5

    def __init__(self) -> None:
        self._sketches: list[frozenset[int]] = []
        self._places: dict[int, list[int]] = {}

    def is_new(self, text: str) -> bool:
        """Whether no earlier text is like this one; a new text is remembered."""
        sketch = self._sketch(text)
        shared = Counter(place for value in sketch for place in self._places.get(value, ()))
        if any(self._is_same(sketch, self._sketches[place]) for place, _ in shared.most_common(8)):
            return False
        for value in sketch:
            self._places.setdefault(value, []).append(len(self._sketches))
        self._sketches.append(sketch)
        return True

    def _is_same(self, one: frozenset[int], other: frozenset[int]) -> bool:
        lowest = sorted(one | other)[: self._SIZE]
        return sum(value in one and value in other for value in lowest) >= self._SAME * len(lowest)

    def _sketch(self, text: str) -> frozenset[int]:
        tokens = [token for stream in streams(text) for token in stream]
        runs = {" ".join(run) for run in grams(tokens, min(self._RUN, len(tokens)))}
        hashes = (hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs)
        return frozenset(sorted(int.from_bytes(value) for value in hashes)[: self._SIZE])


def has_looping_tail(ids: Sequence[int], *, fewest_tokens: int = 32, fewest_rounds: int = 4) -> bool:
    """Whether the end repeats itself: several rounds of one period, over a stretch worth the name."""
    longest = len(ids) // fewest_rounds
    for period in range(1, longest + 1):
        need = max(period * fewest_rounds, fewest_tokens)
        if need <= len(ids) and all(ids[-i] == ids[-i - period] for i in range(1, need - period + 1)):
            return True
    return False


def is_repetitive(text: str, *, run: int = 4, fewest: int = 24, share: float = 0.4) -> bool:
    """Whether few runs of four tokens are distinct: a loop that varies, or in the middle."""
    tokens = [token for stream in streams(text) for token in stream]
    runs = list(grams(tokens, run))
    return len(runs) >= fewest and len(set(runs)) < share * len(runs)
