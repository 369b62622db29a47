"""A station: two processes, warmed up, one pair at a time, and always closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from draftproof.bench import station as stations
from draftproof.bench.station import Station, StationSettings
from draftproof.errors import UsageError
from draftproof.machine import describe
from draftproof.record import Round, Trace
from draftproof.testing import FakeClock
from draftproof.wire import encode

MACHINE = describe(torch.device("cpu"))
BASE = {"folder": "m", "dtype": "float32", "threads": 1}
SETTINGS = StationSettings(
    base=BASE, arm="lookup", drafter="lookup", depth=3, max_new_tokens=40, options={"min_new_tokens": 40}
)
AGAIN = replace(SETTINGS, arm="stock-again", drafter="stock", depth="auto")
WARM, PROMPT = (9, 8, 7), (1, 2, 3, 4)


@dataclass
class Log:
    """What happened to both processes, in order."""

    fail_at: Callable[[str, dict[str, Any]], str | None] = lambda what, message: None
    started: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def check(self, what: str, message: dict[str, Any]) -> None:
        why = self.fail_at(what, message)
        if why is not None:
            raise UsageError(why)


class FakeWorker:
    def __init__(self, log: Log, settings: dict[str, Any]) -> None:
        log.check("start", settings)
        self.log, self.number, self.kind = log, len(log.started), settings["kind"]
        self.machine = encode(replace(MACHINE, num_threads=self.number + 1))
        log.started.append(settings)

    def __enter__(self) -> FakeWorker:
        self.log.open.append(self.number)
        return self

    def __exit__(self, *_: object) -> None:
        self.log.open.remove(self.number)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.log.check("ask", request)
        self.log.asked.append((self.number, request))
        reply = {"token_ids": [5], "peak_bytes": 10 + self.number, "num_forwards": 0}
        if self.kind == "stock":
            return reply
        first = Round(index=0, position=len(request["prompt_ids"]), source="prompt", num_offered=0,
                      num_drafted=0, num_accepted=0, emitted=(5,), num_forwards=0)  # fmt: skip
        trace = Trace(num_prompt=len(request["prompt_ids"]), prefill_ns=1, rounds=(first,))
        return reply | {"trace": encode(trace)}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(stations, "Worker", lambda settings: FakeWorker(made, settings))
    return made


def test_both_processes_get_the_same_settings_and_every_arm_a_warm_up(log: Log) -> None:
    with Station(SETTINGS, WARM, FakeClock()) as station:
        assert log.started == [{**BASE, "kind": "stock"}, {**BASE, "kind": "engine"}]
        asked = [
            (number, r["drafter"], r["depth"], r["prompt_ids"], r["max_new_tokens"])
            for number, r in log.asked
        ]
        warm = ([9, 8, 7], 8)
        assert asked == [(0, None, None, *warm), (1, "none", "auto", *warm), (1, "lookup", 3, *warm)]
        assert station.machine == replace(MACHINE, num_threads=2), "the judged arm's process"


def test_a_pair_is_one_leg_of_every_arm_counted_from_zero(log: Log) -> None:
    with Station(SETTINGS, WARM, FakeClock()) as station:
        log.asked.clear()
        first, second = (station.pair("news", pair, PROMPT) for pair in (0, 1))
    assert [(d.leg.arm, d.leg.order, d.leg.pair) for d in (*first, *second)] == [
        ("lookup", 0, 0), ("serial", 1, 0), ("stock", 2, 0),
        ("stock", 3, 1), ("serial", 4, 1), ("lookup", 5, 1),
    ]  # fmt: skip
    assert [number for number, _ in log.asked] == [1, 1, 0, 0, 1, 1]
    assert {d.leg.label for d in (*first, *second)} == {"news"}
    for _, request in log.asked:
        assert (request["prompt_ids"], request["max_new_tokens"]) == ([1, 2, 3, 4], 40)
        assert request["options"] == {"min_new_tokens": 40}
    assert [d.leg.peak_bytes for d in first] == [11, 11, 10]
    # The warm-up had another text.
    assert [d.leg.is_first_seen for d in first] == [True, False, True]


def test_stock_against_itself_is_two_stock_processes_and_no_serial_arm(log: Log) -> None:
    with Station(AGAIN, WARM, FakeClock()) as station:
        pair = station.pair("news", 0, PROMPT)
    assert [settings["kind"] for settings in log.started] == ["stock", "stock"]
    assert [(d.leg.arm, d.leg.peak_bytes) for d in pair] == [("stock-again", 11), ("stock", 10)]
    assert [d.trace for d in pair] == [None, None]


def test_leaving_closes_both(log: Log) -> None:
    with Station(SETTINGS, WARM, FakeClock()):
        assert log.open == [0, 1]
    assert log.open == []
    with pytest.raises(ZeroDivisionError), Station(SETTINGS, WARM, FakeClock()):
        raise ZeroDivisionError
    assert log.open == []


@pytest.mark.parametrize(
    ("what", "key", "value"), [("start", "kind", "engine"), ("ask", "drafter", "lookup")]
)
def test_a_start_that_fails_closes_what_was_open(what: str, key: str, value: str, log: Log) -> None:
    log.fail_at = lambda at, message: "no memory" if at == what and message[key] == value else None
    with pytest.raises(UsageError, match="^no memory$"), Station(SETTINGS, WARM, FakeClock()):
        pass
    assert log.started
    assert log.open == []
