"""Feeds a workload to an engine until all of it is done, keeping the arrival times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvengine.core.errors import RequestError
from kvengine.core.plan import Idle, RequestOutput
from kvengine.core.request import Request
from kvengine.engine.engine import Engine
from kvengine.policies import Workload

MAX_FRUITLESS_WAKES = 1000
"""So many times in a row may a policy be asked again at the moment it named and schedule nothing."""


@dataclass(slots=True)
class DriverReport:
    """How a drive ended."""

    num_sent: int = 0
    rejected: list[RequestError] = field(default_factory=list)
    interrupted: bool = False


class Driver:
    """Sends each request of `workload` at its arrival time, or, in a closed loop, when a place is free.

    `on_outputs` gets what every step delivers; `interrupted` is asked after every step, and a true answer
    ends the drive there.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        *,
        on_outputs: Callable[[list[RequestOutput]], None] = lambda outputs: None,
        on_rejected: Callable[[RequestError], None] = lambda error: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._concurrency = workload.concurrency
        self._requests: Iterator[Request] = workload.requests()
        self._next: Request | None = next(self._requests, None)
        self._on_outputs = on_outputs
        self._on_rejected = on_rejected
        self._interrupted = interrupted
        self._start_ns = engine.clock.now()
        self._num_fruitless_wakes = 0
        self.report = DriverReport()

    def run(self) -> DriverReport:
        """Until every request is finished or refused; EngineStalledError if that can never be."""
        while (self._next or self._engine.has_unfinished) and not self._interrupted():
            self._send_due()
            outputs = self._engine.step()
            if isinstance(outputs, Idle):
                self._wait(outputs.wake_at)
                continue
            self._num_fruitless_wakes = 0
            self._on_outputs(outputs)
        self.report.interrupted = bool(self._next or self._engine.has_unfinished)
        return self.report

    def _send_due(self) -> None:
        now = self._engine.clock.now()
        while self._next is not None and self._is_due(self._next, now) and not self._interrupted():
            arrival = now if self._concurrency else self._next.arrival_ns + self._start_ns
            self._send(replace(self._next, arrival_ns=arrival, ordinal=self.report.num_sent))
            self._next = next(self._requests, None)

    def _is_due(self, request: Request, now: int) -> bool:
        if self._concurrency:
            return self._engine.num_unfinished < self._concurrency
        return request.arrival_ns + self._start_ns <= now

    def _send(self, request: Request) -> None:
        self.report.num_sent += 1
        try:
            self._engine.add_request(request)
        except RequestError as error:
            self.report.rejected.append(error)
            self._on_rejected(error)

    def _wait(self, wake_at: int | None) -> None:
        """Until the next arrival or `wake_at`; EngineStalledError if there is neither and somebody waits."""
        moments = []
        if self._next is not None and not self._concurrency:
            moments.append(self._next.arrival_ns + self._start_ns)
        if wake_at is not None and self._num_fruitless_wakes < MAX_FRUITLESS_WAKES:
            moments.append(wake_at)
        if moments:
            self._engine.clock.wait_until(min(moments))
            self._num_fruitless_wakes += wake_at is not None and self._engine.clock.now() >= wake_at
        elif self._engine.has_unfinished:
            raise self._engine.stalled()
