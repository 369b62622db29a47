"""``draftproof head corpus``: tables and lines, JSON, options, and one line for every wrong use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof import cli
from draftproof.cli import head as command
from draftproof.cli.terminal import stdout
from draftproof.heads import corpus as corpora
from draftproof.heads.shards import read_corpus, read_manifest

SUMMARY: dict[str, Any] = {
    "status": "complete", "out": "runs/corpus", "model": "smollm2", "num_shards": 3, "redone": [],
    "num_prompts": 300, "num_rows": 240, "num_tokens": 30000, "tokens_per_second": 512.4,
    "ratio": 12.34, "ratio_by_shard": [11.0, 13.5, 12.1],
    "stock": {"num_rows": 6, "num_equal": 5, "tokens_per_second": 41.52, "differences": []},
    "removed": {"loop": 50, "near-duplicate": 8, "overlap in answer": 2},
    "overlap": {"by_text": {"news": 2}, "examples": []},
    "tokens_by_category": {"code": {"en": 9000, "zh": 1000}, "poem": {"de": 20000}},
    "parts": {
        "train": {"num_rows": 230, "num_tokens": 29000}, "held-out": {"num_rows": 10, "num_tokens": 1000},
    },
}  # fmt: skip


def run(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["draftproof", "head", "corpus", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
    return int(caught.value.code or 0)


def test_the_table_has_every_category_and_language_and_sums(capsys: pytest.CaptureFixture[str]) -> None:
    stdout().print(command.table(SUMMARY))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    title = command.table(SUMMARY).title
    assert str(title) == "smollm2 · 240 answers, 30000 tokens"
    assert ["tokens", "de", "en", "zh", "all"] in lines
    assert ["code", "0", "9000", "1000", "10000"] in lines
    assert ["poem", "20000", "0", "0", "20000"] in lines
    assert lines[-1] == ["all", "20000", "9000", "1000", "30000"]


def test_the_lines_say_what_was_removed_and_measured() -> None:
    assert command.lines(SUMMARY) == [
        "held-out 10 answers (1000 tokens), train 230 answers (29000 tokens)",
        "removed 60 of 300: 50 loop, 8 near-duplicate, 2 overlap in answer",
        "overlap with evaluation texts: 2 excluded (news 2)",
        "512 tokens a second, stock alone 41.5: 12.3x (shard by shard 11.0x to 13.5x)",
        "5 of 6 greedy answers checked are token for token what stock decodes alone",
        "corpus: runs/corpus, 3 shards",
    ]


def test_nothing_kept_and_interrupted() -> None:
    empty = SUMMARY | {"status": "interrupted", "ratio": None, "parts": {}, "removed": {}}
    lines = command.lines(empty)
    assert lines[0] == "no answer was kept"
    assert "removed 0 of 300: nothing" in lines
    assert "too little was decoded to compare with stock" in lines
    assert "interrupted: the same command goes on" in lines


@pytest.fixture
def model(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("llama", max_position_embeddings=2048)


def options(model: Path, out: Path) -> list[str]:
    return [
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--batch",
        "4",
        "--max-new-tokens",
        "12",
        "--out",
        str(out),
    ]


def test_a_corpus_is_made_and_described_as_json(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"label": "mine", "prompt": "some text to keep out"}) + "\n")
    out = tmp_path / "c"
    arguments = [*options(model, out), "--prompts", "8", "--seed", "5", "--sampled-share", "0",
                 "--held-out-share", "0.5", "--against", str(suite), "--json"]  # fmt: skip
    assert run(*arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    manifest = read_manifest(out)
    assert summary["num_prompts"] == 8
    assert {row.is_sampled for row in read_corpus(out)} == {False}
    assert {row.split for row in read_corpus(out)} == {"train", "held-out"}
    request = manifest["request"]
    assert (request["seed"], request["self_instruct_share"]) == (5, 0.0)
    assert {"suite.jsonl: mine", "news", "chinese", "main", "holdout"} <= set(request["evaluation"])
    (facts,) = manifest["runs"]
    assert facts["argv"] == ["head", "corpus", *arguments]
    assert {"torch", "transformers"} <= set(facts["versions"])
    assert facts["weights"] == request["weights"]


def test_an_interrupted_run_says_how_to_go_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpora.ShardWriter, "make", stop)
    assert run(*options(model, tmp_path / "c"), "--prompts", "8") == 130
    assert "interrupted: the same command goes on" in capsys.readouterr().out
    monkeypatch.undo()
    assert run(*options(model, tmp_path / "c"), "--prompts", "8") == 0
    shard = tmp_path / "c" / "shard-00000.safetensors"
    shard.write_bytes(b"no")
    capsys.readouterr()
    assert run(*options(model, tmp_path / "c"), "--prompts", "8") == 0
    assert f"made again: {shard} was changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "8", "--model", "no-such"], "no model 'no-such'"),
        (["--prompts", "8", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--prompts", "0"], "--prompts must be 1 or more, got 0"),
        ([], "give either --tokens or --prompts"),
        (["--prompts", "8", "--self-instruct-share", "0.5"], "--self-instruct-share needs a model"),
        (["--prompts", "8", "--sampled-share", "7"], "--sampled-share must be from 0 to 1, got 7.0"),
        (["--prompts", "8", "--against", "nowhere.jsonl"], "no suite file at nowhere.jsonl"),
        (["--prompts", "8", "--ray", "127.0.0.1:1"], "no Ray cluster at '127.0.0.1:1'"),
        (["--prompts", "8", "--pears", "2"], "No such option: --pears"),
        (["--tokens", str(10**12)], "no room for the corpus in"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*options(model, tmp_path / "c"), *arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert message in captured.err
