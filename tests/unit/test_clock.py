"""The one clock: nanoseconds, monotonic, and read from nowhere else than the performance counter."""

from __future__ import annotations

from itertools import pairwise
from threading import Event
from types import SimpleNamespace

import pytest

from draftproof import clock
from draftproof.clock import RealClock


def test_reads_the_performance_counter_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5, 7_000_000_001])
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=lambda: next(readings)))
    real = RealClock()
    assert [real.now_ns(), real.now_ns()] == [5, 7_000_000_001]


def test_never_goes_back_and_counts_nanoseconds() -> None:
    real = RealClock()
    readings = [real.now_ns() for _ in range(1000)]
    assert all(isinstance(reading, int) for reading in readings)
    assert all(a <= b for a, b in pairwise(readings))
    start = real.now_ns()
    Event().wait(0.02)
    assert 15_000_000 <= real.now_ns() - start < 60_000_000_000
