"""Shards on a real local Ray cluster of two nodes; a tiny model in one test, else writers that only count.

The writers are sent to the nodes by value, so they know nothing of this file but themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.errors import OptionError, UsageError
from draftproof.heads.cluster import OnRay, RemoteWriter
from draftproof.heads.corpus import CorpusSettings, Job, make_corpus
from draftproof.heads.shards import Row, Shard, read_corpus, read_shard
from draftproof.heads.writer import WriterSettings

JOBS = [Job(number=n, first=8 * n, count=8) for n in range(6)]


class FakeWriter:
    """Makes empty shards; the settings' model is a folder with a file for each thing to go wrong."""

    def __init__(self, settings: WriterSettings, host: str) -> None:
        self._folder, self._host = Path(settings.model), host
        if (self._folder / "start").exists():
            raise UsageError((self._folder / "start").read_text())

    def ready(self) -> str:
        return self._host

    def make(self, job: Job) -> Shard:
        die, refuse = self._folder / f"die-{job.number}", self._folder / f"refuse-{job.number}"
        if die.exists():
            die.unlink()
            os._exit(1)
        if refuse.exists():
            raise UsageError("no space left")
        return Shard(number=job.number, rows=(), facts={"host": self._host, "count": job.count})

    def close(self) -> None:
        pass


@pytest.fixture
def settings(tmp_path: Path) -> WriterSettings:
    return WriterSettings(
        model=str(tmp_path), dtype="float32", device="cpu", seed=1, batch=4, max_new_tokens=12,
        sampled_share=0.4, self_instruct_share=0.0, held_out_share=0.2, evaluation={}, threads=1,
    )  # fmt: skip


def run(address: str, settings: WriterSettings) -> list[Shard]:
    with OnRay(address, settings, FakeWriter) as place:
        return list(place.run(iter(JOBS), lambda *_: None))


@pytest.mark.slow
def test_every_shard_once_on_both_nodes_and_one_that_died_again(
    address: str, settings: WriterSettings, tmp_path: Path
) -> None:
    (tmp_path / "die-5").touch()
    done = run(address, settings)
    assert sorted(shard.number for shard in done) == [job.number for job in JOBS]
    assert len({shard.facts["host"] for shard in done}) == 2
    assert not (tmp_path / "die-5").exists()


@pytest.mark.slow
def test_when_every_node_is_gone_the_run_says_so(
    address: str, settings: WriterSettings, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / f"die-{number}").touch()
    with pytest.raises(UsageError, match="every Ray node is gone: run the same command again to go on"):
        run(address, settings)


@pytest.mark.slow
def test_refusals_are_one_line(address: str, settings: WriterSettings, tmp_path: Path) -> None:
    (tmp_path / "refuse-1").touch()
    with pytest.raises(UsageError) as caught:
        run(address, settings)
    assert str(caught.value) == "shard 1: no space left"
    (tmp_path / "start").write_text("no such model")
    with pytest.raises(UsageError) as caught:
        run(address, settings)
    assert str(caught.value) == "a Ray node could not load the model: no such model"


def plain(row: Row) -> Row:
    """Without what a near-tie could change between one thread and two."""
    return replace(row, ids=(), text="", finished=False)


@pytest.mark.slow
def test_a_corpus_of_a_cluster_is_the_corpus_of_one_process(
    address: str, settings: WriterSettings, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    writer = replace(settings, model=str(tiny_folder("llama", max_position_embeddings=2048)))
    wanted = CorpusSettings(tokens=None, prompts=28, writer=writer)
    summaries = [
        make_corpus(wanted, tmp_path / name, lambda *_: None, provenance={}, place=place)
        for name, place in (("ray", OnRay(address, writer)), ("here", None))
    ]
    assert [s["status"] for s in summaries] == ["complete", "complete"]
    here, there = (list(map(plain, read_corpus(tmp_path / name))) for name in ("here", "ray"))
    assert here == there
    assert len({read_shard(tmp_path / "ray", n).facts["host"] for n in range(4)}) == 2


def test_without_ray_the_extra_is_named(settings: WriterSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'draftproof\[ray\]'"):
        OnRay("auto", settings).__enter__()


def test_a_node_resolves_the_model_for_itself(
    settings: WriterSettings, tiny_folder: Callable[..., Path]
) -> None:
    writer = RemoteWriter(replace(settings, model=str(tiny_folder("llama")), threads=2), "node:1")
    assert writer.ready() == "node:1"
    made = writer.make(Job(number=0, first=0, count=2))
    assert (made.facts["host"], made.facts["count"]) == ("node:1", 2)
