"""One machine's two processes, warmed up and ready to decode pairs, for a bench here or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from draftproof.bench.pair import Arm, Stopwatch, Worker
from draftproof.clock import Clock, RealClock
from draftproof.folder import SERIAL, STOCK, Decode
from draftproof.record import Machine
from draftproof.wire import decode

_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StationSettings:
    """What both processes are started with; plain values, so that it can travel.

    ``base`` is the part of a worker's settings both arms share; ``options`` go to ``generate`` in both.
    With drafter ``stock`` the judged arm, called ``arm``, is a second stock process.
    """

    base: dict[str, Any]
    arm: str
    drafter: str
    depth: int | str
    max_new_tokens: int
    options: dict[str, Any]


class Station:
    """The stock process and the engine's; use as a context manager.

    Args:
        settings: how the arms decode.
        warm_ids: a prompt no input has, decoded by every arm before the first leg.
        clock: times the legs.
    """

    def __init__(
        self, settings: StationSettings, warm_ids: Sequence[int], clock: Clock | None = None
    ) -> None:
        self._settings, self._warm = settings, warm_ids
        self._watch = Stopwatch(clock=clock or RealClock(), options=settings.options)
        self._workers: list[Worker] = []
        self._arms: tuple[Arm, ...] = ()

    def __enter__(self) -> Self:
        settings = self._settings
        try:
            stock = self._open("stock")
            is_engine = settings.drafter != STOCK
            own = self._open("engine" if is_engine else "stock")
            serial = Arm(name=SERIAL, worker=own, drafter="none", depth="auto")
            judged = Arm(name=settings.arm, worker=own, drafter=settings.drafter, depth=settings.depth)
            self.machine = decode(Machine, own.machine)
            self._arms = (Arm(name=STOCK, worker=stock), *((serial,) if is_engine else ()), judged)
            warming = Stopwatch(clock=self._watch.clock, options=_shortened(settings.options))
            for arm in self._arms:
                warming.time(arm, "warm-up", 0, self._warm, _WARM_TOKENS)
        except BaseException:
            self._close()
            raise
        return self

    def _open(self, kind: str) -> Worker:
        worker = Worker({**self._settings.base, "kind": kind})
        self._workers.append(worker.__enter__())
        return worker

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for worker in self._workers:
            worker.__exit__(None, None, None)
        self._workers = []

    def pair(self, label: str, pair: int, prompt_ids: Sequence[int]) -> list[Decode]:
        """One leg of every arm, interleaved; never split between machines."""
        return self._watch.pair(self._arms, label, pair, prompt_ids, self._settings.max_new_tokens)


def _shortened(options: dict[str, Any]) -> dict[str, Any]:
    """``generate``'s options where no more than the warm-up's tokens can be asked for."""
    return {
        name: min(value, _WARM_TOKENS) if name == "min_new_tokens" else value
        for name, value in options.items()
    }
