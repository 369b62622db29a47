"""Workers end with one line, whatever happens to them; legs are timed and ordered as documented."""

from __future__ import annotations

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
from draftproof.errors import EvidenceError, UsageError
from draftproof.record import Counters, Leg, Round, Trace
from draftproof.testing import FakeClock
from draftproof.wire import encode, tokens_sha256

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
    """Answers with ids that name the request; with a drafter also with a trace that drafts two tokens."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        ids = [len(self.requests), 7, 8, 9]
        reply = {
            "token_ids": ids, "peak_bytes": 1000 + len(self.requests), "peak_cuda_bytes": None,
            "num_forwards": 2,
        }  # fmt: skip
        if request["drafter"] is None:
            return reply
        return {**reply, "trace": encode(traced(len(request["prompt_ids"]), ids))}


def traced(num_prompt: int, ids: Sequence[int]) -> Trace:
    """The prompt's own token; two of three offered tokens verified and one right; a step without a draft."""
    first, second, third, last = ids
    rounds = (
        Round(index=0, position=num_prompt, source="prompt", num_offered=0, num_drafted=0, num_accepted=0,
              emitted=(first,), num_forwards=0),
        Round(index=1, position=num_prompt + 1, source="lookup", num_offered=3, num_drafted=2, num_accepted=1,
              emitted=(second, third), offered=(second, 50, 51)),
        Round(index=2, position=num_prompt + 3, source="none", num_offered=0, num_drafted=0, num_accepted=0,
              emitted=(last,)),
    )  # fmt: skip
    return Trace(num_prompt=num_prompt, prefill_ns=5, rounds=rounds)


Arms = tuple[FakeWorker, FakeWorker, Sequence[Arm]]


def arms() -> Arms:
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
    watch = Stopwatch(clock=FakeClock(tick_ns=10), options={"min_new_tokens": 3})
    timed = watch.time(arm, "news", 2, (5, 6), 30)
    assert own.requests == [
        {"prompt_ids": [5, 6], "max_new_tokens": 30, "drafter": "auto", "depth": 4,
         "options": {"min_new_tokens": 3}}
    ]  # fmt: skip
    assert timed.token_ids == (1, 7, 8, 9)
    assert timed.trace == traced(2, [1, 7, 8, 9])
    assert timed.leg == Leg(
        label="news", arm="auto", pair=2, order=0, start_ns=10, duration_ns=10, num_tokens=4,
        tokens_sha256=tokens_sha256([1, 7, 8, 9]), peak_bytes=1001, peak_cuda_bytes=None, is_first_seen=True,
        num_forwards=2, counters=Counters(steps=2, verifies=1, drafted=2, accepted=1, tokens=3),
    )  # fmt: skip


def test_the_counters_are_the_traces_and_the_forwards_the_workers_whatever_either_says() -> None:
    """They are two counts by two hands, to be compared later; here neither may be bent to the other."""

    class Lying(FakeWorker):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            return super().ask(request) | {"num_forwards": 40, "peak_cuda_bytes": 77}

    leg = Stopwatch(clock=FakeClock()).time(Arm(name="a", worker=Lying(), drafter="a"), "x", 0, [1], 4).leg  # type: ignore[arg-type]
    assert leg.num_forwards == 40
    assert leg.counters is not None
    assert leg.counters.steps == 2
    assert leg.peak_cuda_bytes == 77


def test_a_worker_that_counts_nothing_leaves_it_open() -> None:
    class Plain(FakeWorker):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            return {"token_ids": [3], "peak_bytes": 1, "trace": None}

    leg = Stopwatch(clock=FakeClock()).time(Arm(name="a", worker=Plain()), "x", 0, [1], 4).leg  # type: ignore[arg-type]
    assert (leg.num_forwards, leg.counters, leg.peak_cuda_bytes) == (None, None, None)


@pytest.mark.parametrize("change", [{"num_prompt": 9}, {"rounds": [{"index": 3}]}, {"prefill_ns": "long"}])
def test_a_trace_that_cannot_be_true_is_refused(change: dict[str, Any]) -> None:
    class Wrong(FakeWorker):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            reply = super().ask(request)
            return reply | {"trace": reply["trace"] | change}

    with pytest.raises(EvidenceError):
        Stopwatch(clock=FakeClock()).time(Arm(name="a", worker=Wrong(), drafter="a"), "x", 0, [1], 4)  # type: ignore[arg-type]


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
    assert (timed.trace, timed.leg.counters) == (None, None)
    assert stock.requests == [
        {"prompt_ids": [1], "max_new_tokens": 4, "drafter": None, "depth": None, "options": {}}
    ]


def test_the_order_of_the_arms_alternates_and_the_judged_one_begins() -> None:
    _, _, three = arms()
    watch = Stopwatch(clock=FakeClock())
    legs = [timed.leg for number in range(4) for timed in watch.pair(three, "x", number, [1], 4)]
    forth, back = ["stock", "serial", "auto"], ["auto", "serial", "stock"]
    assert [leg.arm for leg in legs] == [*back, *forth, *back, *forth]
    assert [leg.pair for leg in legs] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [leg.order for leg in legs] == list(range(12))
    assert all(a.start_ns + a.duration_ns <= b.start_ns for a, b in zip(legs, legs[1:], strict=False))
    assert watch.num_legs == 12


@pytest.mark.parametrize("num_pairs", [1, 3, 5, 6])
def test_neither_arm_begins_more_often_over_two_inputs(num_pairs: int) -> None:
    """Where an input's pairs are odd, the next input makes up for it; the judged arm still sees it first."""
    _, _, three = arms()
    watch = Stopwatch(clock=FakeClock())
    decoded = [
        [timed.leg for timed in watch.pair(three, label, number, [len(label), 1], 4)]
        for label in ("x", "xy")
        for number in range(num_pairs)
    ]
    begins = [next(leg.arm for leg in legs if leg.arm != "serial") for legs in decoded]
    assert begins.count("auto") == begins.count("stock") == num_pairs
    for legs in decoded:
        (judged,) = (leg for leg in legs if leg.arm == "auto")
        assert judged.is_first_seen == (judged.pair == 0)


def test_first_seen_is_by_process_and_prompt() -> None:
    """The engine's two arms share a process: what one has decoded the other may have kept."""
    _, _, three = arms()
    watch = Stopwatch(clock=FakeClock())

    def seen(pair: int, prompt: Sequence[int]) -> dict[str, bool]:
        return {d.leg.arm: d.leg.is_first_seen for d in watch.pair(three, "x", pair, prompt, 4)}

    assert seen(0, [1, 2]) == {"auto": True, "serial": False, "stock": True}
    assert seen(1, [1, 2]) == {"auto": False, "serial": False, "stock": False}
    assert seen(0, [1, 2, 3]) == {"auto": True, "serial": False, "stock": True}
    assert seen(1, [3, 2, 1]) == {"stock": True, "serial": True, "auto": False}


def test_two_stock_processes_see_a_prompt_first_each(start: Starter) -> None:
    """A/A: the second is a process of its own."""
    script = """
answer(machine={})
for line in sys.stdin:
    answer(token_ids=[1], peak_bytes=5)
"""
    with start(script) as one, start(script) as other:
        watch = Stopwatch(clock=FakeClock())
        two = (Arm(name="stock", worker=one), Arm(name="stock-again", worker=other))
        legs = [d.leg for pair in (0, 1) for d in watch.pair(two, "x", pair, [1], 4)]
    assert [(leg.arm, leg.is_first_seen) for leg in legs] == [
        ("stock-again", True), ("stock", True), ("stock", False), ("stock-again", False),
    ]  # fmt: skip


def test_a_request_survives_the_trip_through_json(start: Starter) -> None:
    script = """
answer(machine={})
for line in sys.stdin:
    request = json.loads(line)
    want = {"prompt_ids": [0, 1, 2], "max_new_tokens": 9, "drafter": "auto", "depth": "auto",
            "options": {"min_new_tokens": 9}}
    answer(token_ids=request["prompt_ids"][::-1], peak_bytes=5, num_forwards=int(request == want))
"""
    with start(script) as worker:
        arm = Arm(name="auto", worker=worker, drafter="auto", depth="auto")
        timed = Stopwatch(clock=FakeClock(), options={"min_new_tokens": 9}).time(arm, "x", 0, range(3), 9)
    assert timed.token_ids == (2, 1, 0)
    assert timed.leg.num_forwards == 1
