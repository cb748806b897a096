"""The engine's time in integer nanoseconds since it was made: real, or moved by what steps are said to take."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds that never go back."""

    def now(self) -> int: ...

    def advance(self, duration_ns: int) -> None:
        """A step of that length has ended."""
        ...

    def wait_until(self, moment_ns: int) -> None:
        """Return when `now()` has reached `moment_ns`, or a little earlier on a real clock."""
        ...


class WallClock:
    """Real time; it advances by itself."""

    LONGEST_WAIT_S = 0.05
    """A wait returns after this, so that an interrupt is seen."""

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()

    def now(self) -> int:
        return time.perf_counter_ns() - self._start

    def advance(self, duration_ns: int) -> None:
        """Nothing: the step has taken its time already."""

    def wait_until(self, moment_ns: int) -> None:
        time.sleep(min(max(moment_ns - self.now(), 0) / 1e9, self.LONGEST_WAIT_S))


class VirtualClock:
    """Time that moves only when a step or a wait moves it."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        return self._now

    def advance(self, duration_ns: int) -> None:
        self._now += duration_ns

    def wait_until(self, moment_ns: int) -> None:
        self._now = max(self._now, moment_ns)
