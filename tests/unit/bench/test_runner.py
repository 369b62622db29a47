"""The judge's end of the pipe: whatever the other side does becomes a reply or a failure with a reason."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import runner
from draftproof.bench.runner import ChildRunner, Failure, Reply
from draftproof.bench.workloads.base import Output
from draftproof.errors import EvidenceError, UsageError
from draftproof.record import Counters

GOOD = {"token_ids": [3, 4], "peak_bytes": 9, "num_forwards": 1, "peak_cuda_bytes": None, "counters": None}
Child = Callable[..., ChildRunner]

# Stands in for the judged process: answers its settings, then lets `answer(request)` do what a test wants.
SCRIPT = """
import json, os, sys, time
def say(text):
    sys.stdout.write(text + "\\n"); sys.stdout.flush()
sys.stdin.readline()
say(json.dumps({"machine": {}}))
for line in sys.stdin:
    request = json.loads(line)
    good = {"id": request["id"], **GOOD, "token_ids": request.get("prompt_ids", [])}
    ANSWER
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A child whose answer to a request is ``answer``, a line of Python."""
    with ExitStack() as stack:

        def make(answer: str, timeout: float = 20, **more: Any) -> ChildRunner:
            script = tmp_path / "child.py"
            script.write_text(SCRIPT.replace("GOOD", repr(GOOD)).replace("ANSWER", answer))
            interpreter = tmp_path / "python"
            interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "{script}"\n')
            interpreter.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(interpreter))
            return stack.enter_context(ChildRunner({}, timeout, **more))

        yield make


def test_an_answer_becomes_a_reply(child: Child) -> None:
    made = child("say(json.dumps(good | {'counters': {'steps': 1, 'tokens': 1}}))")
    assert made.ready == {"machine": {}}
    expected = Reply(
        output=Output(token_ids=(5, 6)), counters=Counters(steps=1, tokens=1), num_forwards=1, peak_bytes=9
    )
    assert made.run([5, 6], 2) == expected
    assert made.run([5, 6], 2) == expected


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        ("say('no json')", "exit", "wrote something that is no answer to the judge's pipe"),
        ("say('[1]')", "exit", "wrote something that is no answer to the judge's pipe"),
        ("say('{}')", "exit", "answered before it was asked"),
        ("say(json.dumps(good | {'id': 'other'}))", "exit", "answered before it was asked"),
        ("sys.exit(3)", "exit", "its process ended (exit code 3)"),
        ("sys.exit(0)", "exit", "its process ended (exit code 0)"),
        ("os.kill(os.getpid(), 9)", "exit", "its process was ended by SIGKILL"),
        ("time.sleep(60)", "timeout", "no answer within 2 s; it was stopped"),
        ("os.write(1, b'{'); time.sleep(60)", "timeout", "no answer within 2 s; it was stopped"),
        ("say(json.dumps({'id': request['id'], 'failure': {'kind': 'oom', 'reason': 'a\\nb'}}))", "oom",
         "a b"),
        ("say(json.dumps({'id': request['id'], 'failure': {}}))", "error", "None"),
        ("say(json.dumps(good | {'token_ids': []}))", "error", "answered nonsense: an empty output"),
        ("say(json.dumps(good | {'token_ids': 'x'}))", "error", "answered nonsense: token ids must be"),
        ("say(json.dumps(good | {'num_forwards': -1}))", "error", "answered nonsense: a count that is no"),
        ("say(json.dumps(good | {'peak_bytes': 1.5}))", "error", "answered nonsense: a peak that is no"),
        ("say(json.dumps(good | {'counters': {'steps': -1}}))", "error", "answered nonsense: "),
        ("say(json.dumps(good | {'counters': 3}))", "error", "answered nonsense: "),
        ("say(json.dumps(good | {'trace': {}}))", "error", "answered nonsense: "),
    ],
)  # fmt: skip
def test_everything_else_is_a_failure_with_a_reason(
    answer: str, kind: str, reason: str, child: Child
) -> None:
    made = child(answer, timeout=2)
    found = made.run([5], 2)
    assert isinstance(found, Failure)
    assert (found.kind, found.reason[: len(reason)]) == (kind, reason)
    assert found.is_final == (kind in ("exit", "timeout"))
    if found.is_final:
        again = made.run([5], 2)
        assert isinstance(again, Failure)
        assert again.is_final


def test_a_child_that_closes_its_pipe_is_ended(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_SECONDS_TO_END", 0.5)
    made = child("os.close(1); time.sleep(60)")
    assert made.run([5], 2) == Failure(kind="exit", reason="it closed the judge's pipe")


def test_a_child_that_never_loads_is_stopped(child: Child) -> None:
    made = child("pass", timeout=60, load_timeout=0.001)
    assert made.ready == Failure(kind="timeout", reason="no answer within 0.001 s; it was stopped")


def test_refused_settings_raise_the_childs_own_line(tmp_path: Path) -> None:
    settings = {
        "kind": "workload", "workload": "image", "options": {}, "threads": None, "device": "cpu",
        "transform": None,
    }  # fmt: skip
    with pytest.raises(UsageError, match="unknown workload 'image'; known: llm, tts"):
        ChildRunner(settings, 60)


def test_scores_come_back_as_they_are(child: Child) -> None:
    made = child("say(json.dumps({'id': request['id'], 'score': request['score'] + 'ed'}))")
    assert made.score({"score": "ask"}) == "asked"


def test_a_closed_child_is_gone_with_all_it_started(child: Child) -> None:
    made = child("import subprocess; kid = subprocess.Popen(['sleep', '600']);"
                 " say(json.dumps(good | {'token_ids': [kid.pid]}))")  # fmt: skip
    reply = made.run([5], 2)
    assert isinstance(reply, Reply)
    (pid,) = reply.output.token_ids
    made.close()
    assert made._process.returncode is not None
    for _ in range(1000):  # the kernel ends it soon after, not at once
        if is_gone(pid):
            break
        threading.Event().wait(0.005)
    assert is_gone(pid)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def test_a_reply_keeps_to_its_invariants() -> None:
    with pytest.raises(EvidenceError):
        runner._reply({**GOOD, "counters": {"steps": "many"}})
