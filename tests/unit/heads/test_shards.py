"""Shards and manifest: what is written is read back, and every kind of damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from draftproof.errors import ShardError, UsageError
from draftproof.heads.shards import (
    MANIFEST,
    Row,
    Shard,
    finished_shards,
    hashes,
    names,
    read_corpus,
    read_manifest,
    read_shard,
    split_of,
    write_manifest,
    write_shard,
)

ROW = Row(
    index=4, category="poem", language="zh", origin="self", split="train", is_raw=False, is_sampled=True,
    finished=False, messages=(("user", "写诗"), ("assistant", "好"), ("user", "短")), text="诗",
    ids=(9, 8, 49151, 7), prompt_length=3,
)  # fmt: skip
ROWS = (
    ROW,
    replace(
        ROW, index=5, is_raw=True, messages=(("text", "So"),), finished=True, ids=(1, 2), prompt_length=1
    ),
    replace(ROW, index=9, split="held-out", is_sampled=False, ids=tuple(range(90)), prompt_length=60),
)
SHARD = Shard(number=3, rows=ROWS, facts={"count": 8, "removed": {"loop": 2}})
TENSORS, INDEX = names(3)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    other = Shard(number=4, rows=(replace(ROW, index=12),), facts={"count": 8})
    entries = [{"shard": s.number, "files": write_shard(tmp_path, s)} for s in (SHARD, other)]
    write_manifest(tmp_path, {"shards": entries, "removed_rows": [5]})
    return tmp_path


def test_a_shard_is_read_back_whole(corpus: Path) -> None:
    assert read_shard(corpus, 3) == SHARD
    assert [row.num_tokens for row in ROWS] == [1, 1, 30]
    assert finished_shards(corpus) == [3, 4]
    assert hashes(corpus, 3) == read_manifest(corpus)["shards"][0]["files"]
    assert not list(corpus.glob(".*"))


def test_the_tensors_stand_alone(corpus: Path) -> None:
    tensors = safetensors.numpy.load_file(corpus / TENSORS)
    assert {name: (t.dtype.name, t.shape) for name, t in tensors.items()} == {
        "ids": ("int32", (96,)), "offsets": ("int64", (4,)), "prompt_lengths": ("int32", (3,)),
        "flags": ("uint8", (3,)),
    }  # fmt: skip
    assert tensors["offsets"].tolist() == [0, 4, 6, 96]
    assert tensors["prompt_lengths"].tolist() == [3, 1, 60]
    assert tensors["flags"].tolist() == [1, 1 | 2 | 8, 4]


def test_an_empty_shard(tmp_path: Path) -> None:
    empty = Shard(number=0, rows=(), facts={"count": 8})
    write_shard(tmp_path, empty)
    assert read_shard(tmp_path, 0) == empty


def test_removed_rows_and_splits(corpus: Path) -> None:
    assert [row.index for row in read_corpus(corpus)] == [4, 9, 12]
    assert [row.index for row in read_corpus(corpus, "held-out")] == [9]
    assert [row.index for row in read_corpus(corpus, "train")] == [4, 12]


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def drop_last_row(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def edit_text(path: Path) -> None:
    path.write_text(path.read_text().replace('"loop":2', '"loop":3'))


@pytest.mark.parametrize("known", [True, False], ids=["manifest", "alone"])
@pytest.mark.parametrize(
    ("name", "damage"),
    [(TENSORS, flip), (TENSORS, cut), (TENSORS, Path.unlink), (INDEX, flip), (INDEX, cut),
     (INDEX, drop_last_row), (INDEX, edit_text), (INDEX, Path.unlink)],
)  # fmt: skip
def test_damage_is_found_and_named(corpus: Path, name: str, damage: object, known: bool) -> None:
    """With the manifest's hashes, and by the shard's own when a kill left no manifest."""
    files = read_manifest(corpus)["shards"][0]["files"]
    damage(corpus / name)  # type: ignore[operator]
    with pytest.raises(ShardError) as caught:
        read_shard(corpus, 3, files if known else None)
    assert str(corpus / name) in str(caught.value)
    with pytest.raises(ShardError, match="shard-00003"):
        list(read_corpus(corpus))


def test_tensors_of_other_rows_do_not_fit(corpus: Path) -> None:
    """The index's hash is made to match, so only the rows' own hashes can tell."""
    tensors = safetensors.numpy.load_file(corpus / TENSORS)
    shard = Shard(number=3, rows=(replace(ROW, ids=(1, 2, 3, 4)), *ROWS[1:]), facts=SHARD.facts)
    digest = write_shard(corpus, shard)[TENSORS]
    index = (corpus / INDEX).read_text()
    write_shard(corpus, SHARD)
    raw = (corpus / INDEX).read_text()
    assert index != raw
    safetensors.numpy.save_file({**tensors, "ids": np.roll(tensors["ids"], 1)}, corpus / TENSORS)
    assert digest not in raw
    with pytest.raises(ShardError, match=TENSORS):
        read_shard(corpus, 3)


def test_the_shard_of_another_number_is_refused(corpus: Path) -> None:
    for old, new in zip(names(3), names(7), strict=True):
        (corpus / old).rename(corpus / new)
    with pytest.raises(ShardError, match="the header is another shard's"):
        read_shard(corpus, 7)


def test_no_corpus_and_a_damaged_manifest(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no corpus in .*: manifest.json is missing"):
        list(read_corpus(tmp_path / "nothing"))
    document = json.loads((corpus / MANIFEST).read_text())
    document["removed_rows"] = []
    (corpus / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(ShardError, match="manifest.json is damaged: its hash is another"):
        list(read_corpus(corpus))
    (corpus / MANIFEST).write_text("[]")
    with pytest.raises(ShardError, match="manifest.json is damaged"):
        read_manifest(corpus)


def test_the_prompt_alone_decides_its_split() -> None:
    turns = [(f"prompt {i}", "shorter") for i in range(4000)]
    splits = [split_of(turn, 0.1) for turn in turns]
    assert 0.08 < splits.count("held-out") / len(splits) < 0.12
    assert splits == [split_of(turn, 0.1) for turn in turns]
    # A larger share only adds: what was held out stays so.
    assert all(split_of(t, 0.2) == "held-out" for t, s in zip(turns, splits, strict=True) if s == "held-out")
    assert {split_of(turn, 0.0) for turn in turns} == {"train"}
