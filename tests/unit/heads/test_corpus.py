"""A corpus in one go, stopped and gone on with, killed while writing, damaged, and refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftproof.clock import RealClock
from draftproof.errors import OptionError, ShardError, StorageError
from draftproof.heads import corpus as corpora
from draftproof.heads import shards as files
from draftproof.heads.corpus import CorpusSettings, Here, Job, make_corpus
from draftproof.heads.shards import Shard, names, read_corpus, read_manifest, split_of
from draftproof.heads.writer import WriterSettings

COUNT = 28
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(tiny_folder: Callable[..., Path]) -> CorpusSettings:
    writer = WriterSettings(
        model=str(tiny_folder("llama", max_position_embeddings=2048)), dtype="float32", device="cpu", seed=1,
        batch=4, max_new_tokens=12, sampled_share=0.4, self_instruct_share=0.0, held_out_share=0.2,
        evaluation={"suite": "a text of eight words that nobody would write"},
    )  # fmt: skip
    return CorpusSettings(tokens=None, prompts=COUNT, writer=writer)


class Stopping(Here):
    """Makes so many shards, then is interrupted."""

    def __init__(self, settings: WriterSettings, num_shards: int) -> None:
        super().__init__(settings, Path(settings.model))
        self._num = num_shards

    def run(self, jobs: Iterable[Job], report: Any) -> Iterator[Shard]:
        for done, shard in enumerate(super().run(jobs, report)):
            if done == self._num:
                raise KeyboardInterrupt
            yield shard


def make(settings: CorpusSettings, out: Path, place: Any = None) -> dict[str, Any]:
    return make_corpus(settings, out, lambda *_: None, provenance={"argv": ["corpus"]}, place=place)


def content(out: Path) -> list[Any]:
    return list(read_corpus(out))


def counted(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without times and folder."""
    plain = json.loads(json.dumps(summary))
    for name in ("decode_ns", "tokens_per_second", "ratio", "ratio_by_shard", "out", "redone"):
        del plain[name]
    for name in ("duration_ns", "tokens_per_second"):
        del plain["stock"][name]
    return dict(plain)


def test_prompts_are_answered_in_shards_and_split_by_prompt(settings: CorpusSettings, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    summary = make_corpus(
        settings, tmp_path / "c", lambda *row: told.append(row), provenance={"argv": ["head", "corpus"]}
    )
    manifest = read_manifest(tmp_path / "c")
    assert (summary["status"], summary["num_shards"], summary["num_prompts"]) == ("complete", 4, COUNT)
    assert [entry["shard"] for entry in manifest["shards"]] == [0, 1, 2, 3]
    assert manifest["runs"] == [{"argv": ["head", "corpus"]}]
    assert manifest["request"]["seed"] == 1
    assert set(manifest["request"]["evaluation"]) == {"suite"}
    rows = content(tmp_path / "c")
    assert len(rows) == summary["num_rows"] == COUNT - sum(summary["removed"].values())
    assert sum(row.num_tokens for row in rows) == summary["num_tokens"]
    assert {row.index for row in rows} <= set(range(COUNT))
    for row in rows:
        turns = tuple(text for role, text in row.messages if role != "assistant")
        assert row.split == split_of(turns, 0.2)
    assert {row.split for row in rows} == {"train", "held-out"}
    assert summary["stock"]["num_equal"] == summary["stock"]["num_rows"] == 8
    assert told[-1] == ("shard 3: 4 of 4 rows", COUNT, COUNT)


def test_a_stopped_run_goes_on_to_the_same_corpus(settings: CorpusSettings, tmp_path: Path) -> None:
    whole = make(settings, tmp_path / "whole")
    first = make(settings, tmp_path / "parts", Stopping(settings.writer, 2))
    assert (first["status"], first["num_shards"]) == ("interrupted", 2)
    assert read_manifest(tmp_path / "parts")["status"] == "interrupted"
    assert len(content(tmp_path / "parts")) == first["num_rows"]
    before = (tmp_path / "parts" / names(0)[0]).stat().st_mtime_ns
    second = make(settings, tmp_path / "parts")
    assert counted(second) == counted(whole)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert (tmp_path / "parts" / names(0)[0]).stat().st_mtime_ns == before
    assert len(read_manifest(tmp_path / "parts")["runs"]) == 2


def test_a_complete_corpus_loads_no_model_again(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(settings, tmp_path / "c")
    monkeypatch.setattr(corpora, "ShardWriter", lambda *_: pytest.fail("loaded"))
    assert counted(make(settings, tmp_path / "c")) == counted(first)


def test_more_prompts_extend_a_corpus_and_its_last_short_shard(
    settings: CorpusSettings, tmp_path: Path
) -> None:
    """28 prompts leave a shard of 4 where 40 want one of 8: it is named and made again."""
    make(settings, tmp_path / "c")
    more = make(replace(settings, prompts=40), tmp_path / "c")
    assert (more["num_shards"], more["num_prompts"]) == (5, 40)
    assert more["redone"] == [f"{tmp_path / 'c' / names(3)[1]} answers 4 of 8 prompts"]
    whole = make(replace(settings, prompts=40), tmp_path / "whole")
    assert counted(more) == counted(whole)


def test_tokens_end_the_run_at_a_whole_shard(settings: CorpusSettings, tmp_path: Path) -> None:
    wanted = replace(settings, prompts=None, tokens=100)
    summary = make(wanted, tmp_path / "c")
    assert summary["num_tokens"] >= 100
    last = files.read_shard(tmp_path / "c", summary["num_shards"] - 1)
    assert summary["num_tokens"] - sum(row.num_tokens for row in last.rows) < 100
    assert make(wanted, tmp_path / "c")["num_shards"] == summary["num_shards"]


@pytest.mark.parametrize("which", [0, 1], ids=["tensors", "index"])
def test_a_broken_shard_is_named_and_made_again(settings: CorpusSettings, tmp_path: Path, which: int) -> None:
    make(settings, tmp_path / "c")
    before = content(tmp_path / "c")
    broken = tmp_path / "c" / names(1)[which]
    broken.write_bytes(broken.read_bytes()[:-7])
    with pytest.raises(ShardError, match=broken.name):
        content(tmp_path / "c")
    summary = make(settings, tmp_path / "c")
    assert len(summary["redone"]) == 1
    assert str(broken) in summary["redone"][0]
    assert content(tmp_path / "c") == before


def test_without_a_manifest_shards_vouch_for_themselves(settings: CorpusSettings, tmp_path: Path) -> None:
    """A kill between a shard and the manifest; a shard of other settings is not taken over."""
    whole = make(settings, tmp_path / "c")
    (tmp_path / "c" / files.MANIFEST).unlink()
    again = make(settings, tmp_path / "c")
    assert (counted(again), again["redone"]) == (counted(whole), [])
    (tmp_path / "c" / files.MANIFEST).unlink()
    other = replace(settings, writer=replace(settings.writer, seed=2))
    assert make(other, tmp_path / "c")["redone"] == [
        f"shard {n} was made with other settings or weights" for n in range(4)
    ]


CHILD = """
import json, sys, time
from pathlib import Path
from draftproof import wire
from draftproof.heads import corpus, shards
from draftproof.heads.writer import WriterSettings
stated = json.loads(sys.argv[1])
writer = WriterSettings(**stated["writer"])
settings = corpus.CorpusSettings(tokens=None, prompts=stated["prompts"], writer=writer)
out, marker = Path(sys.argv[2]), Path(sys.argv[3])
plain = wire.os.fsync
def slow(handle):
    # In the middle of the third shard's index, its tensors already there.
    if (out / shards.names(2)[0]).exists():
        marker.touch()
        time.sleep(60)
    plain(handle)
wire.os.fsync = slow
corpus.make_corpus(settings, out, lambda *_: None, provenance={})
"""


@pytest.mark.slow
def test_a_run_killed_while_writing_goes_on(settings: CorpusSettings, tmp_path: Path) -> None:
    out, marker = tmp_path / "c", tmp_path / "writing"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(asdict(settings)), str(out), str(marker)]
    )
    clock = RealClock()
    deadline = clock.now_ns() + 60 * 10**9
    while not marker.exists() and clock.now_ns() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert marker.exists()
    assert (out / names(2)[0]).exists()
    assert not (out / names(2)[1]).exists()
    assert list(out.glob(".shard-*"))
    assert len(content(out)) > 0
    made = make(settings, out)
    assert not list(out.glob(".shard-*"))
    whole = make(settings, tmp_path / "whole")
    assert counted(made) == counted(whole)
    assert content(out) == content(tmp_path / "whole")


def test_shards_behind_a_gap_wait_for_it(settings: CorpusSettings, tmp_path: Path) -> None:
    """Nodes finish out of order: a corpus stopped then counts nothing it cannot count in order."""

    class OutOfOrder(Here):
        def run(self, jobs: Iterable[Job], report: Any) -> Iterator[Shard]:
            first, *rest = list(jobs)
            yield from super().run(rest[:2], report)
            raise KeyboardInterrupt

    out = tmp_path / "c"
    first = make(settings, out, OutOfOrder(settings.writer, Path(settings.writer.model)))
    assert (first["num_shards"], first["num_rows"]) == (0, 0)
    assert files.finished_shards(out) == [1, 2]
    made: list[int] = []

    class Watched(Here):
        def run(self, jobs: Iterable[Job], report: Any) -> Iterator[Shard]:
            for shard in super().run(jobs, report):
                made.append(shard.number)
                yield shard

    second = make(settings, out, Watched(settings.writer, Path(settings.writer.model)))
    assert made == [0, 3]
    assert counted(second) == counted(make(settings, tmp_path / "whole"))


def test_other_settings_need_another_folder(settings: CorpusSettings, tmp_path: Path) -> None:
    make(replace(settings, prompts=8), tmp_path / "c")
    other = replace(settings, writer=replace(settings.writer, max_new_tokens=13))
    with pytest.raises(OptionError, match="was made with max_new_tokens=12, not 13: name another folder"):
        make(other, tmp_path / "c")


def test_folders_that_hold_something_else(settings: CorpusSettings, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="holds other files: name an empty folder"):
        make(settings, tmp_path)
    with pytest.raises(OptionError, match="is a file: name a folder"):
        make(settings, tmp_path / "notes.txt")


def test_no_room_is_said_before_the_model_is_loaded(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    monkeypatch.setattr(corpora, "ShardWriter", lambda *_: pytest.fail("loaded"))
    with pytest.raises(StorageError, match="no room for the corpus in .*: it may need 16 MiB, 5 are free"):
        make(settings, tmp_path / "c")


def test_a_model_whose_answers_are_all_removed_ends_the_run(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftproof.heads.writer.is_repetitive", lambda text: True)
    with pytest.raises(OptionError, match="no answer of 4 shards could be kept"):
        make(replace(settings, prompts=None, tokens=10**6), tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 5, "prompts": 5}, "give either --tokens or --prompts"),
        ({"prompts": None}, "give either --tokens or --prompts"),
        ({"prompts": 0}, "--prompts must be 1 or more, got 0"),
        ({"batch": 0}, "--batch must be 1 or more, got 0"),
        ({"max_new_tokens": -1}, "--max-new-tokens must be 1 or more, got -1"),
        ({"threads": 0}, "--threads must be 1 or more, got 0"),
        ({"held_out_share": 1.0}, "--held-out-share must be from 0 to less than 1, got 1.0"),
        ({"sampled_share": 2.0}, "--sampled-share must be from 0 to 1, got 2.0"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; known: bfloat16, float16, float32"),
    ],
)
def test_options_that_mean_nothing(settings: CorpusSettings, changes: dict[str, Any], message: str) -> None:
    mine = {k: v for k, v in changes.items() if k in ("tokens", "prompts")}
    writers = {k: v for k, v in changes.items() if k not in mine}
    with pytest.raises(OptionError) as caught:
        replace(settings, **mine, writer=replace(settings.writer, **writers))
    assert str(caught.value) == message
