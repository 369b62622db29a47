"""The only producer of timed legs: both arms through one clock, one counter, one pipe.

An arm is a worker process that decodes one prompt at a time. A leg's clock starts when the request is
handed over and stops when the plain ids have arrived. The arms of a pair run right after each other, in an
order that alternates from pair to pair.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftproof import stats
from draftproof.clock import Clock
from draftproof.errors import UsageError
from draftproof.folder import Decode
from draftproof.record import Leg, Trace
from draftproof.wire import decode, tokens_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to decode: which worker, and with which drafter and depth (``None`` for stock)."""

    name: str
    worker: Worker
    drafter: str | None = None
    depth: int | str | None = None


class Worker:
    """A worker process; use as a context manager.

    Args:
        settings: first line sent to ``draftproof.bench.worker``.

    Raises:
        UsageError: the worker could not load its model, or died.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "draftproof.bench.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        self._kind = settings["kind"]
        try:
            self._send(settings)
            self.machine: dict[str, Any] = self._receive()["machine"]
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        self._send(request)
        return self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        stream = self._process.stdin
        if stream is None or self._process.poll() is not None:
            raise UsageError(f"the {self._kind} worker is gone (exit code {self._process.poll()})")
        try:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
        except BrokenPipeError as error:
            raise UsageError(f"the {self._kind} worker no longer listens") from error

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            code = self._process.wait()
            raise UsageError(f"the {self._kind} worker died (exit code {code}); its message is above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise UsageError(reply["error"])
        return reply


@dataclass(slots=True, kw_only=True)
class Stopwatch:
    """Times legs; counts them over the whole run and knows which process has seen which prompt."""

    clock: Clock
    options: dict[str, Any] = field(default_factory=dict)
    num_legs: int = 0
    _seen: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    _is_judged_first: bool = True

    def time(self, arm: Arm, label: str, pair: int, prompt_ids: Sequence[int], max_new: int) -> Decode:
        """Decode ``prompt_ids`` once with ``arm``."""
        request = {
            "prompt_ids": list(prompt_ids), "max_new_tokens": max_new, "drafter": arm.drafter,
            "depth": arm.depth, "options": self.options,
        }  # fmt: skip
        seen = (id(arm.worker), tuple(prompt_ids))
        start = self.clock.now_ns()
        reply = arm.worker.ask(request)
        duration = self.clock.now_ns() - start
        ids = tuple(reply["token_ids"])
        trace = decode(Trace, reply["trace"]) if reply.get("trace") is not None else None
        leg = Leg(
            label=label, arm=arm.name, pair=pair, order=self.num_legs, start_ns=start, duration_ns=duration,
            num_tokens=len(ids), tokens_sha256=tokens_sha256(ids), peak_bytes=reply["peak_bytes"],
            peak_cuda_bytes=reply.get("peak_cuda_bytes"), is_first_seen=seen not in self._seen,
            num_forwards=reply.get("num_forwards"), counters=stats.own_counters(trace) if trace else None,
        )  # fmt: skip
        self._seen.add(seen)
        self.num_legs += 1
        return Decode(leg=leg, token_ids=ids, trace=trace)

    def pair(
        self, arms: Sequence[Arm], label: str, pair: int, prompt_ids: Sequence[int], max_new: int
    ) -> list[Decode]:
        """One leg of every arm, the order reversed from one call to the next, whatever the input.

        The leg that begins a pair follows one of its own process and is 1 to 2 % faster. Over an even number
        of pairs both arms begin as often; where it is odd, the arm that begins once more changes from
        input to input.

        Args:
            arms: stock first, the judged arm last. In an input's first pair the judged arm's decode comes
                before any other decode of that prompt in the same process.
            label: of the input.
            pair: its number within the input.
            prompt_ids: of the prompt.
            max_new: most tokens to emit.
        """
        is_judged_first, self._is_judged_first = self._is_judged_first, not self._is_judged_first
        stock, *own = arms
        if is_judged_first:
            order = [*reversed(own), stock]
        else:
            order = [stock, *(reversed(own) if pair == 0 else own)]
        return [self.time(arm, label, pair, prompt_ids, max_new) for arm in order]
