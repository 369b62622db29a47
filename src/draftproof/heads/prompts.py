"""Seeded prompts over many kinds of text and languages, each a function of (seed, index) alone.

``texts/<language>.json`` holds templates a category and the words that fill them. An index names a cell
(language, category) and how often that cell came before; a stride coprime to the number of ways to fill the
cell's templates then picks one, so a draw shows no prompt twice and needs no memory of earlier ones. Every
block of ``num_cells()`` indices holds each cell once.

Nothing here reads a model or an evaluation text; ``overlap`` compares with those. The templates of other
languages than English are plain sentences around a fixed topic phrase, not always elegant ones.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from draftproof.errors import OptionError

LANGUAGES = ("en", "de", "fr", "es", "zh", "it", "pt", "ru", "ja")
CATEGORIES = (
    "news", "dialogue", "code", "recipe", "poem", "question", "maths", "table", "letter", "summary",
    "translation", "continuation", "story", "instructions", "rewriting", "extraction",
)  # fmt: skip
Origin = Literal["template", "self"]

RAW = "continuation"
_MULTI_TURN_SHARE = 0.2
_NUMBERS = {"n": range(24, 96), "m": range(2, 10), "k": range(3, 10)}
_LISTS = {
    "topic": "topics", "other": "topics", "place": "places", "person": "people", "audience": "audiences",
    "tone": "tones", "format": "formats", "dish": "dishes", "code_language": "codes", "code": "code",
    "columns": "columns", "first": "firsts", "second": "seconds", "third": "thirds", "target": "targets",
    "connector": "connectors",
}  # fmt: skip
# A first sentence names a person and a place, a second one a number: they are slots of the template too.
_INNER = {"first": ("person", "place"), "second": ("n",)}
_SENTENCES = ("first", "second", "third")
_UNSPACED = ("zh", "ja")
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model is asked.

    ``turns`` are the user's, one or several; with ``is_raw`` the one text is continued without a chat. For
    ``origin`` ``self`` the model itself writes the only turn, told by ``hint``; until then there is none.
    ``seed`` is this prompt's own, for sampling.
    """

    index: int
    category: str
    language: str
    origin: Origin
    turns: tuple[str, ...]
    hint: str
    is_raw: bool
    is_sampled: bool
    seed: int

    def with_turn(self, text: str) -> Prompt:
        """This prompt with the turn the model wrote."""
        return replace(self, turns=(text,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parts of a draw, each from 0 to 1: answers sampled, prompts the model writes."""

    sampled: float
    self_instruct: float

    def __post_init__(self) -> None:
        for name in ("sampled", "self_instruct"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(
                    f"--{name.replace('_', '-')}-share must be from 0 to 1, got {getattr(self, name)}"
                )


def num_cells() -> int:
    """Pairs of language and category."""
    return len(LANGUAGES) * len(CATEGORIES)


def draw(seed: int, index: int, shares: Shares) -> Prompt:
    """The prompt of one index.

    Raises:
        OptionError: the cell's templates are used up; another seed would repeat the same prompts.
    """
    block, place = divmod(index, num_cells())
    language, category = _cells(seed, block)[place]
    rng = random.Random(f"prompt {seed} {index}")
    text = _fill(seed, language, category, block)
    is_raw = category == RAW
    is_sampled, is_self = rng.random() < shares.sampled, rng.random() < shares.self_instruct and not is_raw
    turns = [text]
    if not is_raw and rng.random() < _MULTI_TURN_SHARE:
        turns.append(rng.choice(_texts(language)["followups"]))
    topic = rng.choice(_texts(language)["topics"])
    return Prompt(
        index=index, category=category, language=language, origin="self" if is_self else "template",
        turns=() if is_self else tuple(turns), hint=_hint(language, category, topic) if is_self else "",
        is_raw=is_raw, is_sampled=is_sampled, seed=rng.getrandbits(48),
    )  # fmt: skip


def _hint(language: str, category: str, topic: str) -> str:
    name = _texts(language)["name"]
    return f"The user writes in {name} and wants this from you: {category}. The subject is: {topic}."


@cache
def _texts(language: str) -> dict[str, Any]:
    source = resources.files("draftproof.heads") / "texts" / f"{language}.json"
    out: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return out


@cache
def _cells(seed: int, block: int) -> list[tuple[str, str]]:
    cells = [(language, category) for language in LANGUAGES for category in CATEGORIES]
    random.Random(f"cells {seed} {block}").shuffle(cells)
    return cells


def _slots(template: str) -> list[str]:
    """Names to fill, those inside its sentences included, in order of appearance and once each."""
    spread = template.replace("{passage}", "{first} {second} {third}")
    found = [name for slot in re.findall(r"{(\w+)}", spread) for name in (*_INNER.get(slot, ()), slot)]
    return list(dict.fromkeys(found))


def _values(language: str, slot: str) -> Any:
    return _NUMBERS[slot] if slot in _NUMBERS else _texts(language)[_LISTS[slot]]


@cache
def _sizes(language: str, category: str) -> list[int]:
    """Ways to fill each template of a cell."""
    return [
        math.prod(len(_values(language, slot)) for slot in _slots(template))
        for template in _texts(language)["tasks"][category]
    ]


def cell_size(language: str, category: str) -> int:
    """Different prompts a cell can give."""
    return sum(_sizes(language, category))


def _turn(sizes: list[int], visit: int) -> tuple[int, int] | None:
    """Which template the visit uses and how often that one came before: they take turns while they last."""
    used, open_ones = 0, [which for which, size in enumerate(sizes) if size]
    while open_ones:
        rounds = min(sizes[which] for which in open_ones) - used
        if visit < rounds * len(open_ones):
            turn, place = divmod(visit, len(open_ones))
            return open_ones[place], used + turn
        visit -= rounds * len(open_ones)
        used += rounds
        open_ones = [which for which in open_ones if sizes[which] > used]
    return None


def _fill(seed: int, language: str, category: str, visit: int) -> str:
    """The cell's prompt number ``visit``; each template walks its own combinations."""
    templates, sizes = _texts(language)["tasks"][category], _sizes(language, category)
    found = _turn(sizes, visit)
    if found is None:
        raise OptionError(
            f"no {category} prompts in {language} are left after {visit}; ask for at most"
            f" {visit * num_cells()} prompts"
        )
    which, turn = found
    start = random.Random(f"start {seed} {language} {category} {which}").randrange(sizes[which])
    rank = (start + turn * _stride(sizes[which])) % sizes[which]
    values: dict[str, Any] = {}
    for slot in _slots(templates[which]):
        options = _values(language, slot)
        rank, place = divmod(rank, len(options))
        values[slot] = options[place]
    return _render(templates[which], values, "" if language in _UNSPACED else " ")


def _stride(size: int) -> int:
    """A step near the golden section that visits every number below ``size`` before one comes again."""
    step = max(int(size * _GOLDEN), 1)
    while math.gcd(step, size) != 1:
        step += 1
    return step


def _render(template: str, values: dict[str, Any], space: str) -> str:
    spread = template.replace("{passage}", space.join(f"{{{name}}}" for name in _SENTENCES))
    sentences = {name: values[name].format(**values) for name in _SENTENCES if name in values}
    capital = {name: text[:1].upper() + text[1:] for name, text in sentences.items()}
    return spread.format(**values | capital)
