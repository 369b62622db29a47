"""Workers end with one line, whatever happens to them; legs are timed and ordered as documented."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import pair
from draftproof.bench.pair import Arm, Stopwatch, Worker
from draftproof.errors import UsageError
from draftproof.testing import FakeClock
from draftproof.wire import tokens_sha256

HEAD = """
import json, os, sys, time
def read():
    return json.loads(sys.stdin.readline())
def answer(**reply):
    sys.stdout.write(json.dumps(reply) + "\\n")
    sys.stdout.flush()
settings = read()
"""
ECHO = """
answer(machine={"settings": settings})
for line in sys.stdin:
    answer(got=json.loads(line))
"""
SETTINGS = {"kind": "stock", "folder": "Grüße"}


Popen = subprocess.Popen[str]


class Starter:
    """Starts a ``Worker`` whose process runs the given script, and knows every process it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[Popen] = []

    def __call__(self, script: str) -> Worker:
        path = self._folder / f"worker{len(self.processes)}.py"
        path.write_text(HEAD + script)
        real = subprocess.Popen

        def popen(command: list[str], **options: Any) -> Popen:
            assert command == [sys.executable, "-m", "draftproof.bench.worker"]
            self.processes.append(real([sys.executable, str(path)], **options))
            return self.processes[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pair.subprocess, "Popen", popen)
            return Worker(SETTINGS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for process in starter.processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def is_over(process: Popen) -> bool:
    """Ended, waited for, and no pipe left open."""
    streams = (process.stdin, process.stdout)
    return process.returncode is not None and all(s is None or s.closed for s in streams)


def test_messages_are_json_lines_and_settings_come_first(start: Starter) -> None:
    with start(ECHO) as worker:
        assert worker.machine == {"settings": SETTINGS}
        for request in ({"a": [1, 2]}, {"text": "line\nbreak ü"}):
            assert worker.ask(request) == {"got": request}


@pytest.mark.parametrize("script", [ECHO, "answer(machine={})\ntime.sleep(20)"], ids=["waits", "hangs"])
def test_leaving_ends_the_process(script: str, start: Starter) -> None:
    with start(script) as worker:
        assert worker._process.poll() is None
    assert is_over(start.processes[0])
    assert start.processes[0].returncode == -signal.SIGKILL


def test_an_exception_inside_ends_the_process_too(start: Starter) -> None:
    with pytest.raises(ZeroDivisionError), start(ECHO) as worker:
        raise ZeroDivisionError
    assert is_over(worker._process)


def test_the_workers_own_session_keeps_ctrl_c_away_from_it(start: Starter) -> None:
    with start("answer(machine={'session': os.getsid(0)})") as worker:
        assert worker.machine["session"] != os.getsid(0)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ('answer(error="no model here")', "no model here"),
        ("sys.exit(3)", r"the stock worker died \(exit code 3\)"),
        ("os.kill(os.getpid(), 9)", r"the stock worker died \(exit code -9\)"),
    ],
    ids=["error", "exit", "killed"],
)
def test_a_worker_that_cannot_start(script: str, told: str, start: Starter) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        start(script)
    assert len(str(caught.value).splitlines()) == 1
    # Nobody holds the worker, so it must have cleaned up by itself.
    assert is_over(start.processes[0])


def test_a_failed_request_leaves_the_worker_alive(start: Starter) -> None:
    script = """
answer(machine={})
read(), answer(error="depth must be 0 or more, got -1")
read(), answer(fine=True)
"""
    with start(script) as worker:
        with pytest.raises(UsageError, match="^depth must be 0 or more, got -1$"):
            worker.ask({})
        assert worker.ask({}) == {"fine": True}


def test_a_worker_that_dies_while_decoding(start: Starter) -> None:
    with start("answer(machine={})\nread()\nsys.exit(7)") as worker:
        with pytest.raises(UsageError, match=r"^the stock worker died \(exit code 7\)[^\n]*$"):
            worker.ask({})
        with pytest.raises(UsageError, match=r"^the stock worker is gone \(exit code 7\)$"):
            worker.ask({})


def test_a_worker_that_dies_between_requests(start: Starter) -> None:
    with start(ECHO) as worker:
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        with pytest.raises(UsageError, match=r"^the stock worker is gone \(exit code -9\)$"):
            worker.ask({})


def test_a_worker_that_no_longer_listens(start: Starter) -> None:
    """As when it is killed between the check and the write: never a bare BrokenPipeError."""
    with (
        start("answer(machine={})\nos.close(0)\nanswer(closed=True)\ntime.sleep(60)") as worker,
    ):
        assert worker._receive() == {"closed": True}
        with pytest.raises(UsageError, match="stock worker"):
            worker.ask({"prompt_ids": [1]})


class FakeWorker:
    """Answers with ids that name the request."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        reply = {"token_ids": [len(self.requests), 7], "peak_bytes": 1000 + len(self.requests)}
        return reply if request["drafter"] is None else {**reply, "trace": {"rounds": []}}


def arms() -> tuple[FakeWorker, FakeWorker, Sequence[Arm]]:
    stock, own = FakeWorker(), FakeWorker()
    return (
        stock,
        own,
        (
            Arm(name="stock", worker=stock),  # type: ignore[arg-type]
            Arm(name="serial", worker=own, drafter="none", depth="auto"),  # type: ignore[arg-type]
            Arm(name="auto", worker=own, drafter="auto", depth=4),  # type: ignore[arg-type]
        ),
    )


def test_a_leg_holds_what_was_measured() -> None:
    _, own, (_, _, arm) = arms()
    watch = Stopwatch(clock=FakeClock(tick_ns=10))
    timed = watch.time(arm, "news", 2, (5, 6), 30)
    assert own.requests == [{"prompt_ids": [5, 6], "max_new_tokens": 30, "drafter": "auto", "depth": 4}]
    assert timed.token_ids == (1, 7)
    assert timed.trace == {"rounds": []}
    leg = timed.leg
    assert (leg.label, leg.arm, leg.pair, leg.order) == ("news", "auto", 2, 0)
    assert (leg.start_ns, leg.duration_ns) == (10, 10)
    assert (leg.num_tokens, leg.peak_bytes) == (2, 1001)
    assert leg.tokens_sha256 == tokens_sha256([1, 7])


def test_the_clock_runs_from_the_request_to_the_ids() -> None:
    clock = FakeClock(tick_ns=1)

    class Slow(FakeWorker):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            clock.advance(5000)
            return super().ask(request)

    leg = Stopwatch(clock=clock).time(Arm(name="stock", worker=Slow()), "x", 0, [1], 4).leg  # type: ignore[arg-type]
    assert leg.duration_ns == 5001


def test_stock_is_asked_without_drafter_and_has_no_trace() -> None:
    stock, _, (arm, *_) = arms()
    timed = Stopwatch(clock=FakeClock()).time(arm, "news", 0, [1], 4)
    assert timed.trace is None
    assert stock.requests[0] == {"prompt_ids": [1], "max_new_tokens": 4, "drafter": None, "depth": None}


def test_the_order_of_the_arms_alternates_from_pair_to_pair() -> None:
    _, _, three = arms()
    watch = Stopwatch(clock=FakeClock())
    legs = [timed.leg for number in range(4) for timed in watch.pair(three, "x", number, [1], 4)]
    forth, back = ["stock", "serial", "auto"], ["auto", "serial", "stock"]
    assert [leg.arm for leg in legs] == [*forth, *back, *forth, *back]
    assert [leg.pair for leg in legs] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [leg.order for leg in legs] == list(range(12))
    assert all(a.start_ns + a.duration_ns <= b.start_ns for a, b in zip(legs, legs[1:], strict=False))
    assert watch.num_legs == 12


def test_a_request_survives_the_trip_through_json(start: Starter) -> None:
    script = """
answer(machine={})
for line in sys.stdin:
    request = json.loads(line)
    answer(token_ids=request["prompt_ids"][::-1], peak_bytes=5, trace=request)
"""
    with start(script) as worker:
        arm = Arm(name="auto", worker=worker, drafter="auto", depth="auto")
        timed = Stopwatch(clock=FakeClock()).time(arm, "x", 0, range(3), 9)
    assert timed.token_ids == (2, 1, 0)
    assert timed.trace == json.loads(
        '{"prompt_ids": [0, 1, 2], "max_new_tokens": 9, "drafter": "auto", "depth": "auto"}'
    )
