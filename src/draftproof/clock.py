"""The only reader of time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in nanoseconds."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""


class RealClock:
    """The process's monotonic performance counter."""

    def now_ns(self) -> int:
        """Nanoseconds of ``time.perf_counter_ns``."""
        return time.perf_counter_ns()
