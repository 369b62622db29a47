"""One shard of a tiny random model: rows, what is removed and why, and the comparison with stock."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.errors import OptionError
from draftproof.heads import writer as writers
from draftproof.heads.overlap import streams
from draftproof.heads.shards import Shard
from draftproof.heads.writer import ShardWriter, WriterSettings
from draftproof.models.load import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}/{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SETTINGS = WriterSettings(
    model="tiny", dtype="float32", device="cpu", seed=3, batch=6, max_new_tokens=24, sampled_share=0.4,
    self_instruct_share=0.0, held_out_share=0.2, evaluation={},
)  # fmt: skip
WIDE = {"max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a chat template and an end token that random text meets now and then."""
    made = tmp_path_factory.mktemp("chat") / "llama"
    shutil.copytree(tiny_folder("llama", eos_token_id=7, **WIDE), made)
    tokenizer: Any = load_tokenizer(made)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return made


def make(folder: Path, count: int = 24, number: int = 0, **changes: Any) -> Shard:
    return ShardWriter(replace(SETTINGS, **changes), folder).make(number, number * count, count)


@pytest.fixture(scope="module")
def shard(folder: Path) -> Shard:
    return make(folder)


def test_greedy_rows_are_stocks_and_the_record_says_so(folder: Path, shard: Shard) -> None:
    """Tiny fp32 models have no near-ties: the measured sample must be equal to the last token."""
    stock = shard.facts["stock"]
    assert (stock["num_rows"], stock["num_equal"], stock["differences"]) == (2, 2, [])
    assert stock["num_tokens"] > 0
    assert stock["duration_ns"] > 0
    module = writers.StockModel(folder, torch.float32, torch.device("cpu"))
    greedy = [row for row in shard.rows if not row.is_sampled]
    assert len(greedy) > 5
    for row in greedy:
        assert module.generate(row.ids[: row.prompt_length], row.num_tokens) == row.ids[row.prompt_length :]


def test_a_difference_from_stock_is_counted_and_placed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = writers.StockModel.generate

    def other(self: Any, ids: Any, length: int, **options: Any) -> tuple[int, ...]:
        alone = honest(self, ids, length, **options)
        return (*alone[:5], alone[5] + 1, *alone[6:])

    monkeypatch.setattr(writers.StockModel, "generate", other)
    stock = make(folder).facts["stock"]
    assert (stock["num_rows"], stock["num_equal"]) == (2, 0)
    assert [d["from_token"] for d in stock["differences"]] == [5, 5]


def test_a_shard_made_again_is_the_same(folder: Path, shard: Shard) -> None:
    assert make(folder).rows == shard.rows
    assert make(folder, seed=4).rows != shard.rows


def test_later_shards_are_checked_now_and_then(folder: Path) -> None:
    writer = ShardWriter(SETTINGS, folder)
    checked = {n: writer.make(n, n * 24, 6).facts["stock"]["num_rows"] for n in (7, 8, 15, 16)}
    assert {n: bool(rows) for n, rows in checked.items()} == {7: True, 8: False, 15: False, 16: True}
    assert checked[16] == 1


def test_rows_say_what_they_are(folder: Path, shard: Shard) -> None:
    tokenizer: Any = load_tokenizer(folder)
    assert [row.index for row in shard.rows] == sorted({row.index for row in shard.rows})
    for row in shard.rows:
        if row.is_raw:
            expected = row.messages[0][1]
        else:
            turns = [{"role": role, "content": text} for role, text in row.messages]
            expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(row.ids[: row.prompt_length]) == expected
        assert tokenizer.decode(row.ids[row.prompt_length :], skip_special_tokens=True).strip() == row.text
        assert row.finished is (row.ids[-1] == 7)
        assert row.num_tokens <= 24
    longer = [row for row in shard.rows if len(row.messages) > 1]
    assert longer
    assert {tuple(role for role, _ in row.messages) for row in longer} == {("user", "assistant", "user")}
    assert {row.origin for row in shard.rows} == {"template"}


def test_every_prompt_is_a_row_or_a_reason(shard: Shard) -> None:
    assert len(shard.rows) + sum(shard.facts["removed"].values()) == shard.facts["count"] == 24
    decoded = sum(row.num_tokens for row in shard.rows)
    assert shard.facts["num_decoded"] >= decoded
    assert shard.facts["decode_ns"] > 0


def test_evaluation_prompts_and_answers_are_excluded(folder: Path, shard: Shard) -> None:
    """One row's prompt and another's answer are declared evaluation texts: both go, and are named."""
    asked = next(row for row in shard.rows if len(streams(row.messages[0][1])[0]) >= 10)
    answered = next(row for row in reversed(shard.rows) if len(streams(row.text)[0]) >= 3)
    made = make(folder, evaluation={"prompt": asked.messages[0][1], "answer": answered.text})
    left = {row.index for row in made.rows}
    assert {row.index for row in shard.rows} - left >= {asked.index, answered.index}
    overlap = made.facts["overlap"]
    assert set(overlap["by_text"]) == {"prompt", "answer"}
    assert {(e["index"], e["where"], e["text"]) for e in overlap["examples"]} >= {
        (asked.index, "prompt", "prompt"), (answered.index, "answer", "answer"),
    }  # fmt: skip
    assert made.facts["removed"]["overlap in prompt"] >= 1
    assert made.facts["removed"]["overlap in answer"] >= 1


def test_loops_and_short_answers_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "is_repetitive", lambda text: True)
    made = make(folder, count=6)
    assert (made.rows, made.facts["removed"]) == ((), {"loop": 6})
    monkeypatch.setattr(writers, "is_repetitive", lambda text: False)
    monkeypatch.setattr(writers, "_FEWEST_TOKENS", 25)
    assert make(folder, count=6).facts["removed"] == {"too short": 6}


def test_a_prompt_that_does_not_fit_is_removed(tiny_folder: Callable[..., Path]) -> None:
    narrow = tiny_folder("llama", max_position_embeddings=160)
    made = make(narrow)
    assert made.facts["removed"]["prompt too long"] > 0
    assert max(row.prompt_length for row in made.rows) <= 160 - 24


def test_the_model_writes_turns_itself(folder: Path) -> None:
    """Those that do not end are removed; the rest are prompts like others, split by their own text."""
    made = make(folder, count=60, self_instruct_share=1.0)
    own = [row for row in made.rows if row.origin == "self"]
    assert own
    assert all(row.messages[0][0] == "user" and row.messages[0][1] for row in own)
    assert len({row.messages[0][1] for row in own}) > 1
    assert made.facts["removed"]["no user turn"] > 0
    assert {row.origin for row in made.rows if row.is_raw} <= {"template"}


def test_a_model_without_a_template_reads_raw_texts(tiny_folder: Callable[..., Path]) -> None:
    plain = tiny_folder("llama", **WIDE)
    made = make(plain, count=12)
    assert made.rows
    assert all(row.is_raw for row in made.rows)
    with pytest.raises(OptionError, match="--self-instruct-share needs a model with a chat template"):
        make(plain, self_instruct_share=0.1)


def test_the_fingerprint_sees_what_decides_texts() -> None:
    same = replace(SETTINGS, threads=7)
    assert same.fingerprint() == SETTINGS.fingerprint()
    others = [replace(SETTINGS, seed=4), replace(SETTINGS, evaluation={"a": "b"}), replace(SETTINGS, batch=8)]
    assert len({made.fingerprint() for made in (SETTINGS, *others)}) == 4
