"""A corpus on disk: shards of token ids with an index beside each, and a manifest over all of them.

``shard-00000.safetensors`` holds ``ids`` (all rows end to end), ``offsets`` (one more than rows),
``prompt_lengths`` and ``flags``; ``shard-00000.jsonl`` a header and then one chained line a row: prompt,
text, kind, split, hashes. The index is written last, so a shard without one was never finished; the manifest
keeps the hash of every file. Both appear whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from draftproof.errors import EvidenceError, ShardError, StorageError, UsageError
from draftproof.wire import (
    FORMAT_VERSION,
    canonical,
    chain,
    check_chain,
    check_version,
    tokens_sha256,
    write_atomic,
)

Split = Literal["train", "held-out"]
MANIFEST = "manifest.json"
SAMPLED, FINISHED, HELD_OUT, RAW = 1, 2, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One answer of the target.

    ``ids`` are the prompt's and then the answer's, ``messages`` the conversation before the answer (for a raw
    text one message of role ``text``); ``finished`` where the answer came to its own end.
    """

    index: int
    category: str
    language: str
    origin: str
    split: Split
    is_raw: bool
    is_sampled: bool
    finished: bool
    messages: tuple[tuple[str, str], ...]
    text: str
    ids: tuple[int, ...]
    prompt_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows made together, and the facts of how: counts, times, machine."""

    number: int
    rows: tuple[Row, ...]
    facts: dict[str, Any]


def prompt_sha256(turns: tuple[str, ...]) -> str:
    """Hash of what the user wrote."""
    return hashlib.sha256(canonical(list(turns)).encode()).hexdigest()


def split_of(turns: tuple[str, ...], held_out_share: float) -> Split:
    """Which part a prompt belongs to: its own hash decides, so no other prompt or run can change it."""
    return "held-out" if int(prompt_sha256(turns)[:13], 16) < held_out_share * 16**13 else "train"


def names(number: int) -> tuple[str, str]:
    """File names of a shard: tensors and index."""
    return f"shard-{number:05d}.safetensors", f"shard-{number:05d}.jsonl"


def write_shard(folder: Path, shard: Shard) -> dict[str, str]:
    """Write both files, the index last; their hashes by name."""
    tensors = safetensors.numpy.save(_tensors(shard.rows))
    digest = hashlib.sha256(tensors).hexdigest()
    head = {"shard": shard.number, "tensors": digest, "num_rows": len(shard.rows), "facts": shard.facts}
    lines = "".join(canonical(row) + "\n" for row in chain([head, *map(_encoded, shard.rows)])).encode()
    tensor_name, index_name = names(shard.number)
    write_atomic(folder / tensor_name, tensors)
    write_atomic(folder / index_name, lines)
    return {tensor_name: digest, index_name: hashlib.sha256(lines).hexdigest()}


def _tensors(rows: tuple[Row, ...]) -> dict[str, np.ndarray[Any, Any]]:
    lengths = [len(row.ids) for row in rows]
    flags = [
        SAMPLED * row.is_sampled + FINISHED * row.finished + HELD_OUT * (row.split == "held-out")
        + RAW * row.is_raw
        for row in rows
    ]  # fmt: skip
    return {
        "ids": np.fromiter((token for row in rows for token in row.ids), np.int32, sum(lengths)),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "prompt_lengths": np.array([row.prompt_length for row in rows], dtype=np.int32),
        "flags": np.array(flags, dtype=np.uint8),
    }


def _encoded(row: Row) -> dict[str, Any]:
    turns = tuple(text for role, text in row.messages if role != "assistant")
    return {
        "index": row.index, "category": row.category, "language": row.language, "origin": row.origin,
        "split": row.split, "messages": [{"role": role, "content": text} for role, text in row.messages],
        "text": row.text, "num_tokens": row.num_tokens, "prompt_sha256": prompt_sha256(turns),
        "ids_sha256": tokens_sha256(row.ids),
    }  # fmt: skip


def read_shard(folder: Path, number: int, expected: Mapping[str, str] | None = None) -> Shard:
    """The shard, every hash checked; ``expected`` are those of the manifest.

    Raises:
        ShardError: a file is missing, cut off or changed; the message names it.
    """
    tensor_name, index_name = names(number)
    raw = {name: _bytes(folder / name) for name in (tensor_name, index_name)}
    for name, digest in (expected or {}).items():
        if hashlib.sha256(raw[name]).hexdigest() != digest:
            raise ShardError(f"{folder / name} was changed: its hash is not the manifest's")
    try:
        head, *rows = [json.loads(line) for line in raw[index_name].decode("utf-8").splitlines()]
        check_chain([head, *rows])
        if head["num_rows"] != len(rows):
            raise EvidenceError(f"{len(rows)} rows where the header says {head['num_rows']}")
        if head["shard"] != number or not isinstance(head["facts"], dict):
            raise EvidenceError("the header is another shard's")
    except (ValueError, KeyError, TypeError, AttributeError, EvidenceError) as error:
        raise ShardError(f"{folder / index_name} is damaged: {error}") from error
    if hashlib.sha256(raw[tensor_name]).hexdigest() != head["tensors"]:
        raise ShardError(f"{folder / tensor_name} was changed: its hash is not the index's")
    try:
        tensors = safetensors.numpy.load(raw[tensor_name])
        decoded = tuple(_decoded(row, tensors, place) for place, row in enumerate(rows))
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError, EvidenceError) as error:
        raise ShardError(f"{folder / tensor_name} does not fit its index: {error}") from error
    return Shard(number=number, rows=decoded, facts=head["facts"])


def hashes(folder: Path, number: int) -> dict[str, str]:
    """Hashes of a shard's files by name, as they are now."""
    return {name: hashlib.sha256(_bytes(folder / name)).hexdigest() for name in names(number)}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ShardError(f"{path} is missing") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _decoded(row: dict[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]], place: int) -> Row:
    start, end = (int(offset) for offset in tensors["offsets"][place : place + 2])
    ids = tuple(tensors["ids"][start:end].tolist())
    if tokens_sha256(ids) != row["ids_sha256"]:
        raise EvidenceError(f"the ids of row {row['index']} are others")
    flags = int(tensors["flags"][place])
    return Row(
        index=row["index"], category=row["category"], language=row["language"], origin=row["origin"],
        split=row["split"], is_raw=bool(flags & RAW), is_sampled=bool(flags & SAMPLED),
        finished=bool(flags & FINISHED), text=row["text"], ids=ids,
        messages=tuple((message["role"], message["content"]) for message in row["messages"]),
        prompt_length=int(tensors["prompt_lengths"][place]),
    )  # fmt: skip


def finished_shards(folder: Path) -> list[int]:
    """Numbers of the shards that have an index."""
    return sorted(int(path.stem.partition("-")[2]) for path in folder.glob("shard-[0-9]*.jsonl"))


def write_manifest(folder: Path, document: dict[str, Any]) -> None:
    """Write the manifest with the format's version and the hash of its content."""
    body = {"format_version": FORMAT_VERSION, "kind": "corpus", **document}
    digest = hashlib.sha256(canonical(body).encode()).hexdigest()
    write_atomic(folder / MANIFEST, json.dumps({**body, "hash": digest}, indent=1, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its hash checked.

    Raises:
        UsageError: there is no corpus in ``folder``.
        ShardError: the manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(f"no corpus in {folder}: {MANIFEST} is missing")
    try:
        document: dict[str, Any] = json.loads(_bytes(path).decode("utf-8"))
        digest = document.pop("hash")
        check_version(document)
        if hashlib.sha256(canonical(document).encode()).hexdigest() != digest:
            raise EvidenceError("its hash is another")
    except (ValueError, KeyError, TypeError, AttributeError, EvidenceError) as error:
        raise ShardError(f"{path} is damaged: {error}; without it, it is made again") from error
    return document


def read_corpus(folder: Path, split: Split | None = None) -> Iterator[Row]:
    """Every row that was kept, in order, of one split or of both.

    A shard is checked before its first row is given.

    Raises:
        UsageError: there is no corpus in ``folder``.
        ShardError: a file is missing, cut off or changed; the message names it.
    """
    manifest = read_manifest(folder)
    removed = set(manifest["removed_rows"])
    for entry in manifest["shards"]:
        for row in read_shard(folder, entry["shard"], entry["files"]).rows:
            if row.index not in removed and split in (None, row.split):
                yield row
