"""The judge's end of a judged process: send ids, get plain values, and never trust the other side.

A process that raises, dies, hangs or talks nonsense answers with a ``Failure``; nothing it does raises here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Timer
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from draftproof.bench.workloads.base import Output
from draftproof.errors import EvidenceError, UsageError
from draftproof.record import Counters, Trace
from draftproof.wire import decode

_SECONDS_TO_END = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one run gave. All but ``output`` is the other process's word; ``trace`` is the engine's own."""

    output: Output
    counters: Counters | None = None
    num_forwards: int | None = None
    peak_bytes: int = 0
    peak_cuda_bytes: int | None = None
    trace: Trace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no reply, in one line.

    ``error`` the candidate raised or answered nonsense, ``oom`` memory ran out, ``exit`` its process ended,
    ``timeout`` it was stopped.
    """

    kind: Literal["error", "oom", "exit", "timeout"]
    reason: str

    @property
    def is_final(self) -> bool:
        """Whether the process is gone."""
        return self.kind in ("exit", "timeout")


class Runner(Protocol):
    """One arm of an evaluation."""

    def run(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, is_plain: bool = False
    ) -> Reply | Failure:
        """Decode one prompt to the end; with ``is_plain`` a built-in drafter's process drafts nothing."""

    def score(self, request: dict[str, Any]) -> Any:
        """A quality gate's figures, or a ``Failure``."""


class ChildRunner:
    """A process of ``draftproof.bench.candidate``; use as a context manager.

    Between its requests it is stopped (SIGSTOP) with all it started in its session, so that no arm works,
    or merely spins, while the other one is timed.

    Args:
        settings: the first line sent to it.
        timeout: seconds it has for every request.
        load_timeout: seconds it has to load.

    Raises:
        UsageError: the process refused its settings.
    """

    def __init__(self, settings: dict[str, Any], timeout: float, load_timeout: float = 1800.0) -> None:
        self._timeout, self._is_expired = timeout, False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "draftproof.bench.candidate"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
        self.ready: dict[str, Any] | Failure
        try:
            self.ready = self._exchange(settings, load_timeout)
        except BaseException:
            self.close()
            raise
        if isinstance(self.ready, dict) and "refused" in self.ready:
            self.close()
            raise UsageError(str(self.ready["refused"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and every other it started in its session."""
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def run(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, is_plain: bool = False
    ) -> Reply | Failure:
        """Decode one prompt; the request carries ids and a number no answer can know beforehand."""
        request: dict[str, Any] = {"prompt_ids": list(prompt_ids), "max_new_tokens": max_new_tokens}
        answer = self._ask(request | ({"is_plain": True} if is_plain else {}))
        if isinstance(answer, Failure):
            return answer
        try:
            return _reply(answer)
        except (ValueError, TypeError, EvidenceError) as error:
            return Failure(kind="error", reason=f"answered nonsense: {error}")

    def score(self, request: dict[str, Any]) -> Any:
        """A quality gate's figures, or a ``Failure``."""
        answer = self._ask(request)
        return answer if isinstance(answer, Failure) else answer.get("score")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | Failure:
        number = secrets.token_hex(8)
        answer = self._exchange({"id": number, **request}, self._timeout)
        if isinstance(answer, dict) and answer.get("id") != number:
            self._kill()
            return Failure(kind="exit", reason="answered before it was asked")
        return answer

    def _exchange(self, message: dict[str, Any], timeout: float) -> dict[str, Any] | Failure:
        timer = Timer(timeout, self._expire)
        timer.daemon = True
        timer.start()
        self._signal(signal.SIGCONT)
        try:
            line = self._talk(json.dumps(message) + "\n")
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            return self._ended(timeout)
        self._pause()
        return self._parse(line)

    def _talk(self, line: str) -> str:
        """Send a line and wait for one; an empty one when the process is gone."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            return ""
        try:
            stdin.write(line)
            stdin.flush()
        except BrokenPipeError:
            return ""
        return stdout.readline()

    def _parse(self, line: str) -> dict[str, Any] | Failure:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self._kill()
            return Failure(kind="exit", reason="wrote something that is no answer to the judge's pipe")
        told = answer.get("failure")
        if not isinstance(told, dict):
            return answer
        kind: Literal["error", "oom"] = "oom" if told.get("kind") == "oom" else "error"
        return Failure(kind=kind, reason=" ".join(str(told.get("reason")).split()))

    def _ended(self, timeout: float) -> Failure:
        if self._is_expired:
            return Failure(kind="timeout", reason=f"no answer within {timeout:g} s; it was stopped")
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()
            return Failure(kind="exit", reason="it closed the judge's pipe")
        if code < 0:
            name = signal.Signals(-code).name
            return Failure(kind="exit", reason=f"its process was ended by {name}")
        return Failure(kind="exit", reason=f"its process ended (exit code {code})")

    def _expire(self) -> None:
        self._is_expired = True
        self._kill()

    def _pause(self) -> None:
        """Stop the process and wait until it is (or has ended); what it started stops with it."""
        self._signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _reply(answer: dict[str, Any]) -> Reply:
    """An answer as a record; raises ``ValueError``, ``TypeError`` or ``EvidenceError`` on nonsense."""
    output = Output.from_json(answer)
    if not output.size:
        raise ValueError("an empty output")
    numbers = {name: answer.get(name) for name in ("num_forwards", "peak_cuda_bytes")}
    if not all(value is None or (type(value) is int and value >= 0) for value in numbers.values()):
        raise ValueError("a count that is no whole number")
    counters, trace, peak = answer.get("counters"), answer.get("trace"), answer.get("peak_bytes")
    if type(peak) is not int or peak < 0:
        raise ValueError("a peak that is no whole number")
    return Reply(
        output=output, peak_bytes=peak, counters=None if counters is None else decode(Counters, counters),
        trace=None if trace is None else decode(Trace, trace), **numbers,
    )  # fmt: skip
