"""Rows as batches: which rows when, where a draft may begin, and corpora that do not fit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.errors import OptionError, UsageError
from draftproof.heads.shards import Row, Shard, Split, write_manifest, write_shard
from draftproof.heads.train_data import Example, Order, check_text, collate, read_examples, sample

CPU = torch.device("cpu")
LENGTHS = [(7 * i) % 60 + 4 for i in range(200)]


def row(index: int, split: Split = "train", **fields: Any) -> Row:
    settled: dict[str, Any] = {
        "index": index, "category": "news", "language": "en", "origin": "template", "split": split,
        "is_raw": False, "is_sampled": False, "finished": True, "messages": (("user", f"q{index}"),),
        "text": "7 8 9", "ids": (1, 2, 7, 8, 9), "prompt_length": 2,
    }  # fmt: skip
    return Row(**settled | fields)


def corpus(folder: Path, *rows: Row) -> Path:
    digests = write_shard(folder, Shard(number=0, rows=rows, facts={}))
    shards = [{"shard": 0, "files": digests, "num_rows": len(rows)}]
    write_manifest(folder, {"shards": shards, "removed_rows": [99]})
    return folder


class TestRead:
    def test_rows_of_the_split_with_something_to_predict(self, tmp_path: Path) -> None:
        folder = corpus(
            tmp_path, row(0), row(1, "held-out"), row(2, ids=(1, 2, 7)), row(99), row(4, is_sampled=True)
        )
        assert read_examples(folder, "train", 10) == [
            Example(ids=(1, 2, 7, 8, 9), prompt_length=2, is_sampled=False),
            Example(ids=(1, 2, 7, 8, 9), prompt_length=2, is_sampled=True),
        ]
        assert len(read_examples(folder, "held-out", 10)) == 1

    def test_what_does_not_fit(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no corpus in"):
            read_examples(tmp_path, "train", 10)
        folder = corpus(tmp_path, row(0))
        with pytest.raises(OptionError, match="holds id 9, but the model knows 9: make one with it"):
            read_examples(folder, "train", 9)
        with pytest.raises(OptionError, match="no held-out answers, so overfitting would go unseen"):
            read_examples(folder, "held-out", 10)
        other = corpus(tmp_path / "other", row(0, "held-out"))
        with pytest.raises(OptionError, match="no train answers to train on"):
            read_examples(other, "train", 10)

    def test_another_tokenizer_is_seen(self, tmp_path: Path) -> None:
        folder = corpus(tmp_path, row(0))
        check_text(folder, lambda ids: " ".join(map(str, ids)))
        with pytest.raises(OptionError, match="was made with another tokenizer"):
            check_text(folder, lambda ids: "".join(map(str, ids)))


def test_places_are_where_the_engine_drafts() -> None:
    """Spelt out: after each committed answer token, every draft step while the text goes on."""
    examples = [
        Example(ids=tuple(range(10, 19)), prompt_length=3, is_sampled=False),
        Example(ids=(1, 2, 3, 4, 5, 6), prompt_length=4, is_sampled=False),
    ]
    batch = collate(examples, 3, CPU)
    assert batch.ids_BL.tolist() == [list(range(10, 19)), [1, 2, 3, 4, 5, 6, 0, 0, 0]]
    assert batch.is_place_KBT.shape == (3, 2, 8)
    for place, example in enumerate(examples):
        wanted = set()
        for last in range(example.prompt_length, len(example.ids)):
            for step in range(3):
                predicted = last + 1 + step
                if predicted < len(example.ids):
                    wanted.add((step, predicted - 2))
        found = batch.is_place_KBT[:, place].nonzero().tolist()
        assert {tuple(pair) for pair in found} == wanted
        counts = [max(example.num_places - step, 0) for step in range(3)]
        assert batch.is_place_KBT[:, place].sum(1).tolist() == counts


class TestOrder:
    def test_an_epoch_reads_every_row_once_in_batches_that_fit(self) -> None:
        order = Order(LENGTHS, 256, 1)
        num = order.steps(1)
        batches = [order.at(step) for step in range(num)]
        assert {epoch for epoch, _ in batches} == {0}
        assert Counter(r for _, rows in batches for r in rows) == Counter(range(200))
        for _, rows in batches:
            assert max(LENGTHS[r] for r in rows) * len(rows) <= 256
        filled = sum(max(LENGTHS[r] for r in rows) * len(rows) for _, rows in batches)
        assert sum(LENGTHS) > 0.85 * filled, "rows of like length go together"

    def test_the_step_alone_decides(self) -> None:
        order, again = Order(LENGTHS, 256, 1), Order(LENGTHS, 256, 1)
        wanted = [order.at(step) for step in range(3 * order.steps(1))]
        assert {epoch for epoch, _ in wanted} >= {0, 1, 2}
        for step in (70, 3, 40, 0, 71):
            assert again.at(step) == wanted[step]
        assert Order(LENGTHS, 256, 2).at(0) != wanted[0]
        first, second = (sorted(map(tuple, (r for e, r in wanted if e == n))) for n in (0, 1))
        assert first != second

    def test_epochs_follow_one_another(self) -> None:
        order = Order(LENGTHS, 256, 1)
        whole = order.steps(2)
        assert order.at(whole - 1)[0] == 1
        assert order.at(whole)[0] == 2

    def test_a_row_longer_than_a_batch_is_one_of_its_own(self) -> None:
        order = Order([300, 10, 12], 100, 1)
        assert sorted(map(sorted, (order.at(step)[1] for step in range(order.steps(1))))) == [[0], [1, 2]]


def test_a_sample_is_greedy_first_and_the_same_every_time() -> None:
    examples = [Example(ids=(i, 1, 2), prompt_length=1, is_sampled=i % 2 == 0) for i in range(20)]
    drawn = sample(examples, 14, 3)
    assert drawn == sample(examples, 14, 3)
    assert [example.is_sampled for example in drawn] == [False] * 10 + [True] * 4
    assert drawn[:10] != examples[1::2]
    assert len(sample(examples, 99, 3)) == 20
