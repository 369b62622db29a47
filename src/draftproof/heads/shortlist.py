"""``head shortlist``: ids a head may draft, by their frequency in a corpus, and how much each size covers.

Counted are the answers of the train split; covered are those of the held-out split, token by token, for
every kind and language of prompt. Coverage is a ceiling: an id outside the list is never drafted, one inside
may still be drafted wrongly. Frequencies are those of the target's own answers (FR-Spec, Zhao et al. 2025,
arXiv 2502.14856, counts a text corpus). What a size costs is ``sizing``'s; nothing is trained here.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig

from draftproof.drafters.shortlist import check_room, ranked
from draftproof.errors import ModelFileError, OptionError
from draftproof.heads.chat import Chat
from draftproof.heads.shards import MANIFEST, Row, read_corpus, read_manifest
from draftproof.models.load import load_tokenizer, read_config
from draftproof.models.stock import eos_ids
from draftproof.wire import FORMAT_VERSION, canonical, tokens_sha256, write_atomic

Report = Callable[[str, int, int], None]
DEFAULT_SIZES = (2048, 4096, 8192, 16384)
_ROWS_DECODED = 8
_EVERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Of a target: how many ids, those every list holds (special and end tokens), and ids to text."""

    size: int
    always: tuple[int, ...]
    text: Callable[[Sequence[int]], str]

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        """The vocabulary of the model in a hub folder; reads no weights."""
        config, tokenizer = read_config(folder), load_tokenizer(folder)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        always = special | set(tokenizer.all_special_ids) | eos_ids(_generation_config(folder, config))
        return cls(
            size=config.vocab_size, always=tuple(sorted(i for i in always if 0 <= i < config.vocab_size)),
            text=Chat(tokenizer).text,
        )  # fmt: skip


def _generation_config(folder: Path, config: Any) -> Any:
    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ModelFileError(f"cannot read {file}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of answers: of the train split by id, of the held-out one by (category, language) and id."""

    train: Counter[int] = field(default_factory=Counter)
    held_out: dict[tuple[str, str], Counter[int]] = field(default_factory=dict)

    @property
    def num_held_out(self) -> int:
        """Held-out tokens of all kinds."""
        return sum(sum(counts.values()) for counts in self.held_out.values())


def count_corpus(corpus: Path, vocabulary: Vocabulary, report: Report = lambda *_: None) -> Counts:
    """Count the answers of a corpus, every shard's hash checked.

    Raises:
        UsageError: there is no corpus, or a shard of it is damaged.
        OptionError: it was made with another tokenizer, or a split of it is empty.
    """
    counts = Counts()
    total = read_manifest(corpus)["summary"]["num_rows"]
    for done, row in enumerate(read_corpus(corpus)):
        if done < _ROWS_DECODED:
            _check_tokenizer(corpus, row, vocabulary)
        if done % _EVERY == 0:
            report("counting tokens", done, total)
        answer = row.ids[row.prompt_length :]
        if max(answer, default=0) >= vocabulary.size:
            raise _other_tokenizer(corpus)
        if row.split == "train":
            counts.train.update(answer)
        else:
            counts.held_out.setdefault((row.category, row.language), Counter()).update(answer)
    if not counts.train or not counts.num_held_out:
        split = "train" if not counts.train else "held-out"
        raise OptionError(f"{corpus} holds no {split} answers: make a larger corpus")
    return counts


def _check_tokenizer(corpus: Path, row: Row, vocabulary: Vocabulary) -> None:
    answer = row.ids[row.prompt_length :]
    if max(answer, default=0) >= vocabulary.size or vocabulary.text(answer) != row.text:
        raise _other_tokenizer(corpus)


def _other_tokenizer(corpus: Path) -> OptionError:
    return OptionError(f"{corpus} was made with another tokenizer: give the --model that answered in it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of ``num_tokens`` held-out tokens that the lists contain, one a size."""

    num_tokens: int
    shares: tuple[float, ...]


def coverage(counts: Mapping[int, int], order: Sequence[int], sizes: Sequence[int]) -> Coverage:
    """How much of ``counts`` the first ids of ``order``, a permutation of the vocabulary, hold."""
    reached_V = np.cumsum([counts.get(i, 0) for i in order])
    total = int(reached_V[-1])
    return Coverage(num_tokens=total, shares=tuple(float(reached_V[size - 1] / total) for size in sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Every id in the order lists take them, and what lists of ``sizes`` cover."""

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    num_seen: int
    whole: Coverage
    by_category: dict[str, Coverage]
    by_language: dict[str, Coverage]

    def ids(self, size: int) -> tuple[int, ...]:
        """The list of this size, ascending."""
        return tuple(sorted(self.order[:size]))

    def summary(self) -> dict[str, Any]:
        """As plain values; shares in the order of ``sizes``."""

        def told(part: Coverage) -> dict[str, Any]:
            return {"num_tokens": part.num_tokens, "shares": list(part.shares)}

        return {
            "sizes": list(self.sizes), "vocab_size": len(self.order), "num_seen": self.num_seen,
            "all": told(self.whole), "by_category": {k: told(v) for k, v in self.by_category.items()},
            "by_language": {k: told(v) for k, v in self.by_language.items()},
        }  # fmt: skip


def rank(counts: Counts, vocabulary: Vocabulary, sizes: Iterable[int]) -> Ranking:
    """Rank a vocabulary by the train split and measure coverage on the held-out one.

    Raises:
        OptionError: a size has no room for the ids always kept, or is larger than the vocabulary.
    """
    asked = tuple(sorted(set(sizes)))
    for size in asked:
        check_room(size, len(vocabulary.always))
        if size > vocabulary.size:
            raise OptionError(f"--size {size} is more than the model's {vocabulary.size} ids")
    order = ranked(counts.train, range(vocabulary.size), vocabulary.always)
    parts: tuple[dict[str, Counter[int]], ...] = ({}, {})
    for names, found in counts.held_out.items():
        for part, name in zip(parts, names, strict=True):
            part.setdefault(name, Counter()).update(found)
    by_category, by_language = (
        {name: coverage(part[name], order, asked) for name in sorted(part)} for part in parts
    )
    everything = sum(parts[0].values(), Counter())
    return Ranking(
        order=order, sizes=asked, num_seen=len(counts.train), whole=coverage(everything, order, asked),
        by_category=by_category, by_language=by_language,
    )  # fmt: skip


def default_sizes(vocab_size: int) -> tuple[int, ...]:
    """The usual sizes below the vocabulary's; refuses a vocabulary smaller than all of them."""
    sizes = tuple(size for size in DEFAULT_SIZES if size < vocab_size)
    if not sizes:
        raise OptionError(f"the model has only {vocab_size} ids: name sizes with --size")
    return sizes


def corpus_facts(corpus: Path) -> dict[str, Any]:
    """Which corpus was counted: folder, hash of its manifest, status, and the weights that answered."""
    manifest, raw = read_manifest(corpus), (corpus / MANIFEST).read_bytes()
    return {
        "folder": str(corpus), "manifest_sha256": hashlib.sha256(raw).hexdigest(),
        "status": manifest["status"], "weights": manifest["request"]["weights"],
    }  # fmt: skip


def place_of(out: Path, size: int, num_sizes: int) -> Path:
    """Where a list goes: ``out``, or with several sizes ``out`` with the size before its suffix."""
    return out if num_sizes == 1 else out.with_name(f"{out.stem}-{size}{out.suffix}")


def check_out(out: Path) -> None:
    """Refuse a place where no file can be written, before anything is counted."""
    if out.is_dir():
        raise OptionError(f"{out} is a folder: name a file with --out, such as {out / 'shortlist.json'}")


def write_shortlist(path: Path, ids: Sequence[int], document: Mapping[str, Any]) -> Path:
    """Write the ids, a JSON list as ``--shortlist`` reads it, and beside it how they were chosen.

    Returns:
        The path of the second file, ``<name>.provenance.json``; it holds the hash of the ids.
    """
    body = {
        "format_version": FORMAT_VERSION, "kind": "shortlist", "num_ids": len(ids),
        "ids_sha256": tokens_sha256(ids), **document,
    }  # fmt: skip
    digest = hashlib.sha256(canonical(body).encode()).hexdigest()
    beside = path.with_name(f"{path.stem}.provenance.json")
    write_atomic(path, json.dumps(list(ids)) + "\n")
    write_atomic(beside, json.dumps({**body, "hash": digest}, indent=1) + "\n")
    return beside
