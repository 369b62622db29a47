"""Counts of a corpus, near-duplicates across shards, and the figures made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftproof.heads.shards import Row, Shard
from draftproof.heads.tally import Tally

TEXT = "a text of ten words that is long enough here"


def row(index: int, text: str, **changes: Any) -> Row:
    made = Row(
        index=index, category="news", language="en", origin="template", split="train", is_raw=False,
        is_sampled=False, finished=True, messages=(("user", f"prompt {index}"),), text=text,
        ids=tuple(range(12)), prompt_length=2,
    )  # fmt: skip
    return replace(made, **changes)


def facts(**changes: Any) -> dict[str, Any]:
    stock = {"num_rows": 2, "num_equal": 1, "num_tokens": 10, "duration_ns": 10**9,
             "differences": [{"index": 0, "from_token": 3, "of": 9}]}  # fmt: skip
    overlap = {"by_text": {"news": 1}, "examples": [{"index": 7, "text": "news"}]}
    return {"count": 8, "removed": {"loop": 2}, "overlap": overlap, "num_decoded": 400,
            "decode_ns": 2 * 10**9, "stock": stock, **changes}  # fmt: skip


@pytest.fixture
def summary() -> tuple[Tally, dict[str, Any]]:
    tally = Tally()
    first = (row(0, TEXT), row(1, "other words " * 3, language="de", split="held-out"))
    second = (
        row(8, TEXT.upper()),
        row(9, "something else entirely", messages=(("user", "prompt 0"),)),
        row(10, "third and last answer", category="code", is_sampled=True, origin="self"),
    )
    tally.add(Shard(number=0, rows=first, facts=facts()))
    tally.add(Shard(number=1, rows=second, facts=facts(decode_ns=10**9, removed={"loop": 1, "short": 4})))
    return tally, tally.summary()


def test_what_is_kept_is_counted_by_kind(summary: tuple[Tally, dict[str, Any]]) -> None:
    tally, made = summary
    assert (made["num_prompts"], made["num_rows"], made["num_tokens"]) == (16, 3, 30)
    assert made["tokens_by_category"] == {"code": {"en": 10}, "news": {"en": 10, "de": 10}}
    assert made["parts"]["train"] == {"num_rows": 2, "num_tokens": 20}
    assert {name: part["num_rows"] for name, part in made["parts"].items()} == {
        "train": 2, "held-out": 1, "template": 2, "self": 1, "greedy": 2, "sampled": 1,
    }  # fmt: skip
    assert tally.num_tokens == 30


def test_what_is_removed_is_named(summary: tuple[Tally, dict[str, Any]]) -> None:
    tally, made = summary
    assert tally.removed_rows == [8, 9]
    assert made["removed"] == {"short": 4, "loop": 3, "near-duplicate": 1, "same prompt": 1}
    assert made["overlap"]["by_text"] == {"news": 2}
    assert len(made["overlap"]["examples"]) == 2


def test_speeds_and_equality(summary: tuple[Tally, dict[str, Any]]) -> None:
    made = summary[1]
    assert made["tokens_per_second"] == pytest.approx(800 / 3)
    assert made["stock"]["tokens_per_second"] == 10
    assert (made["stock"]["num_equal"], made["stock"]["num_rows"]) == (2, 4)
    assert made["ratio"] == pytest.approx(80 / 3)
    assert made["ratio_by_shard"] == [20, 40]


def test_nothing_measured_is_no_ratio() -> None:
    nothing = {"num_rows": 0, "num_equal": 0, "num_tokens": 0, "duration_ns": 0, "differences": []}
    tally = Tally()
    assert tally.summary()["ratio"] is None
    tally.add(Shard(number=0, rows=(), facts=facts(stock=nothing)))
    made = tally.summary()
    assert (made["ratio"], made["ratio_by_shard"], made["tokens_per_second"]) == (None, [], 200)
