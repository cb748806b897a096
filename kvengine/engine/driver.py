"""Feeds a workload to an engine until all of it is done, keeping the arrival times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

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

    What follows from outputs of a workload that reacts is sent at its own arrival time, and in a closed loop
    needs a free place besides, for which it goes before new requests. Other workloads are numbered (`ordinal`)
    as they are sent; one that reacts numbers its requests itself, for their order may differ between runs.

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
        self._workload = workload
        self._concurrency = workload.concurrency
        self._requests: Iterator[Request] = workload.requests()
        self._next: Request | None = next(self._requests, None)
        self._follow_ups: list[tuple[int, int, Request]] = []
        """A heap of (moment on the engine's clock in ns, tie-breaker, request)."""
        self._tie_breakers = count()
        self._on_outputs = on_outputs
        self._on_rejected = on_rejected
        self._interrupted = interrupted
        self._start_ns = engine.clock.now()
        self._num_fruitless_wakes = 0
        self.report = DriverReport()

    def run(self) -> DriverReport:
        """Until every request is finished or refused; EngineStalledError if that can never be."""
        while self._has_work and not self._interrupted():
            self._send_due()
            outputs = self._engine.step()
            if isinstance(outputs, Idle):
                self._wait(outputs.wake_at)
                continue
            self._num_fruitless_wakes = 0
            self._on_outputs(outputs)
            if self._workload.reacts:
                self._react(outputs)
        self.report.interrupted = self._has_work
        return self.report

    @property
    def _has_work(self) -> bool:
        return bool(self._next or self._follow_ups or self._engine.has_unfinished)

    def _send_due(self) -> None:
        now = self._engine.clock.now()
        while (due := self._next_sending(now)) and due[0] <= now and not self._interrupted():
            _, is_new = due
            request = self._next if is_new else heappop(self._follow_ups)[-1]
            assert request is not None
            arrival = now if self._concurrency else request.arrival_ns + self._start_ns
            ordinal = request.ordinal if self._workload.reacts else self.report.num_sent
            self._send(replace(request, arrival_ns=arrival, ordinal=ordinal))
            if is_new:
                self._next = next(self._requests, None)

    def _next_sending(self, now: int) -> tuple[int, bool] | None:
        """The moment at which the next request can be sent and whether it is a new one, follow-ups first;
        None if there is none, or no place until another has finished."""
        if self._concurrency and self._engine.num_unfinished >= self._concurrency:
            return None
        moments = []
        if self._follow_ups:
            moments.append((self._follow_ups[0][0], False))
        if self._next is not None:
            moments.append((now if self._concurrency else self._next.arrival_ns + self._start_ns, True))
        return min(moments, default=None)

    def _send(self, request: Request) -> None:
        self.report.num_sent += 1
        add = self._engine.add_request if request.fork_of is None else self._engine.fork
        try:
            add(request)
        except RequestError as error:
            self.report.rejected.append(error)
            self._on_rejected(error)

    def _react(self, outputs: list[RequestOutput]) -> None:
        """Keep what follows from `outputs` until it arrives."""
        elapsed_ns = self._engine.clock.now() - self._start_ns
        for output in outputs:
            for request in self._workload.after(output, elapsed_ns):
                moment = request.arrival_ns + self._start_ns
                heappush(self._follow_ups, (moment, next(self._tie_breakers), request))

    def _wait(self, wake_at: int | None) -> None:
        """Until the next arrival or `wake_at`; EngineStalledError if there is neither and somebody waits."""
        moments = []
        if (due := self._next_sending(self._engine.clock.now())) is not None:
            moments.append(due[0])
        if wake_at is not None and self._num_fruitless_wakes < MAX_FRUITLESS_WAKES:
            moments.append(wake_at)
        if moments:
            self._engine.clock.wait_until(min(moments))
            self._num_fruitless_wakes += wake_at is not None and self._engine.clock.now() >= wake_at
        elif self._engine.has_unfinished:
            raise self._engine.stalled()
