"""A bench on a real local Ray cluster of two nodes, with stations that decode nothing.

The stations are sent to the nodes by value, so they know nothing of this file but themselves. What they did
is in a log both nodes append to.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftproof.bench import run as runs
from draftproof.bench.cluster import OnRay, named_station
from draftproof.bench.run import BenchSettings, Item, run_bench
from draftproof.bench.station import StationSettings
from draftproof.clock import RealClock
from draftproof.errors import OptionError, UsageError
from draftproof.folder import Decode, check_seal, read_run
from draftproof.models import load as loading
from draftproof.record import CostCurve, Leg, Plan
from draftproof.wire import tokens_sha256

SETTINGS = StationSettings(
    base={"folder": "?"}, arm="lookup", drafter="lookup", depth="auto", max_new_tokens=4, options={}
)
ITEMS = [Item(label=label, pair=pair, prompt_ids=(1, 2)) for label in "abcd" for pair in (0, 1)]
WARM = (2, 1)


class FakeStation:
    """Logs every pair with the process that decoded it; can refuse and die."""

    def __init__(
        self, log: Path, plan: dict[str, str], settings: StationSettings, warm_ids: Sequence[int]
    ) -> None:
        self._log, self._plan, self._settings, self._warm = log, plan, settings, tuple(warm_ids)
        self._order = 0

    def __enter__(self) -> FakeStation:
        self._write("start", self._settings.base["folder"], self._warm)
        if "start" in self._plan:
            raise UsageError(self._plan["start"])
        return self

    def __exit__(self, *_: object) -> None:
        self._write("close")

    def _write(self, *words: object) -> None:
        with self._log.open("a") as stream:
            stream.write(" ".join(map(str, (os.getpid(), *words))) + "\n")

    def pair(self, label: str, pair: int, prompt_ids: Sequence[int]) -> list[Decode]:
        name = f"{label}{pair}"
        self._write("pair", name)
        what = self._plan.get(name)
        mark = self._log.with_name(f"died-{name}")
        if what == "die" and not mark.exists():
            mark.touch()
            os._exit(1)
        if what is not None and what != "die":
            raise UsageError(what)
        return [self._decode(label, pair, arm) for arm in ("lookup", "stock")]

    def _decode(self, label: str, pair: int, arm: str) -> Decode:
        start, ids = RealClock().now_ns(), (65, 66, 67, 68)
        leg = Leg(
            label=label, arm=arm, pair=pair, order=self._order, start_ns=start,
            duration_ns=20_000_000 if arm == "stock" else 10_000_000, num_tokens=4,
            tokens_sha256=tokens_sha256(ids), peak_bytes=os.getpid(),
        )  # fmt: skip
        self._order += 1
        return Decode(leg=leg, token_ids=ids)


@dataclass
class Nodes:
    """The cluster, and what its stations did."""

    address: str
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def place(self, **plan: str) -> OnRay:
        station: Any = partial(FakeStation, self.log, plan)
        return OnRay(address=self.address, model=str(self.folder), station=station)

    def rows(self, what: str) -> list[list[str]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [words for line in lines if (words := line.split())[1] == what]


@pytest.fixture
def nodes(address: str, tmp_path: Path) -> Nodes:
    return Nodes(address=address, folder=tmp_path)


Done = list[tuple[Item, list[Decode]]]


def decode_all(place: OnRay) -> tuple[list[Item], Done]:
    announced: list[Item] = []
    with place(SETTINGS, WARM) as fleet:
        done = list(fleet.run(ITEMS, announced.append))
    return announced, done


@pytest.mark.slow
def test_every_item_once_on_both_nodes_and_no_pair_split(nodes: Nodes) -> None:
    """The process of the last pair dies once: that pair is decoded again, elsewhere and whole."""
    announced, done = decode_all(nodes.place(d1="die"))
    assert announced == [*ITEMS, ITEMS[-1]]
    assert sorted((item.label, item.pair) for item, _ in done) == [(i.label, i.pair) for i in ITEMS]
    counts: Counter[tuple[str, int]] = Counter()
    for item, decodes in done:
        assert [(d.leg.label, d.leg.pair, d.leg.arm) for d in decodes] == [
            (item.label, item.pair, "lookup"), (item.label, item.pair, "stock"),
        ]  # fmt: skip
        (host,) = {d.leg.host for d in decodes}
        # The process says itself which it was: no leg of a pair came from another.
        (process,) = {d.leg.peak_bytes for d in decodes}
        counts[host, process] += 1
    assert len(counts) == len({host for host, _ in counts}) == 2
    assert min(counts.values()) >= 2
    # Every node got the model's name and the warm-up text, and the one that lives was closed.
    assert [words[2:] for words in nodes.rows("start")] == [[str(nodes.folder), "(2,", "1)"]] * 2
    assert len(nodes.rows("close")) == 1
    tried = [words[0] for words in nodes.rows("pair") if words[2] == "d1"]
    assert len(set(tried)) == len(tried) == 2
    assert {str(d.leg.peak_bytes) for item, decodes in done if item == ITEMS[-1] for d in decodes} == {
        tried[1]
    }


@pytest.mark.slow
def test_when_every_node_is_gone_the_run_says_so(nodes: Nodes) -> None:
    with pytest.raises(UsageError) as caught:
        decode_all(nodes.place(a0="die", a1="die"))
    assert str(caught.value) == "every Ray node is gone; 8 pairs are left: resume the run"


@pytest.mark.slow
def test_a_station_that_cannot_start_is_one_line(nodes: Nodes) -> None:
    with pytest.raises(UsageError) as caught:
        decode_all(nodes.place(start="the engine worker died"))
    assert str(caught.value) == "a Ray node could not start its processes: the engine worker died"


@pytest.fixture
def bench(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A whole bench on the cluster, with no model and no tokenizer on this side either."""

    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return bytes(ids).decode()

    class Loaded:
        plan = Plan(claim="bitwise", dtype="bfloat16", fingerprint="f", ops=(), max_rows=32)
        curve = CostCurve(rows=(1,), contexts=(4,), seconds=((0.01,),))
        target = SimpleNamespace(max_context=512)

    monkeypatch.setattr(runs.engines, "load", lambda name, **options: Loaded())
    monkeypatch.setattr(runs, "resolve", lambda name, dtype: nodes.folder)
    monkeypatch.setattr(runs, "load_tokenizer", lambda folder: Letters())
    monkeypatch.setattr(runs, "provenance", lambda model, argv: {"weights": "w"})
    suite = nodes.folder / "suite.jsonl"
    suite.write_text("".join(json.dumps({"label": c, "prompt": f"text {c}"}) + "\n" for c in "abcd"))
    settings = BenchSettings(
        model="m", drafter="lookup", suite=str(suite), pairs=2, max_new_tokens=4, prompt_len=40
    )

    def run(place: OnRay, *, resume: bool = False) -> dict[str, Any]:
        return run_bench(settings, nodes.folder / "run", lambda *_: None, place=place, resume=resume)

    return run


@pytest.mark.slow
def test_a_refused_decode_is_one_line_and_the_run_can_be_resumed(
    nodes: Nodes, bench: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(UsageError) as caught:
        bench(nodes.place(c1="depth can be at most 31 here, got 40"))
    assert str(caught.value) == "c: depth can be at most 31 here, got 40"
    folder = nodes.folder / "run"
    before, _ = read_run(folder)
    assert before.status == "failed: c: depth can be at most 31 here, got 40"
    kept = {f"{d.leg.label}{d.leg.pair}" for d in before.decodes}
    every = {f"{item.label}{item.pair}" for item in ITEMS}
    assert {"a0", "a1"} <= kept < every

    nodes.log.unlink()
    results = bench(nodes.place(), resume=True)
    assert {words[2] for words in nodes.rows("pair")} == every - kept
    assert len(nodes.rows("pair")) == len(every - kept)
    evidence, published = read_run(folder)
    assert (published, check_seal(folder)) == (results, [])
    assert evidence.decodes[: len(before.decodes)] == before.decodes
    assert [d.leg.order for d in evidence.decodes] == list(range(16))
    for label in "abcd":
        for pair in (0, 1):
            legs = [d.leg for d in evidence.of(label) if d.leg.pair == pair]
            assert sorted(leg.arm for leg in legs) == ["lookup", "stock"]
            assert len({leg.host for leg in legs}) == 1
    assert len({d.leg.host for d in evidence.decodes}) == 2
    assert (results["status"], results["speedup"]["median"]) == ("complete", 2)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no such host:6379", "nonsense"])
def test_an_address_where_no_cluster_is(address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="no Ray cluster at") as caught:
        OnRay(address=address, model=str(tmp_path))(SETTINGS, WARM).__enter__()
    assert repr(address) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'draftproof\[ray\]'"):
        OnRay(address="auto", model="m")(SETTINGS, WARM).__enter__()


def test_a_node_resolves_the_model_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "resolve", lambda name, dtype: tmp_path / f"{name}-{dtype}")
    settings = replace(SETTINGS, base={"folder": "smollm2", "dtype": "float16", "threads": 3})
    station = named_station(settings, WARM)
    assert station._settings == replace(
        settings, base={"folder": str(tmp_path / "smollm2-float16"), "dtype": "float16", "threads": 3}
    )
    assert station._warm == WARM
