"""Equal service to all tenants that wait: a virtual token counter for each, the least served goes first.

Source: Sheng et al., "Fairness in Serving Large Language Models" (VTC), OSDI 2024, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kvengine.core.errors import ConfigError
from kvengine.core.plan import StepPlan
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import Queue
from kvengine_plugins.queues.ordered import Ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class FairConfig:
    """What a tenant is charged for each prompt token computed (`prompt_weight`) and each token generated
    (`output_weight`)."""

    prompt_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        for name in ("prompt_weight", "output_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"queue.{name}", getattr(self, name), "must be a positive number")


class _Tenant:
    """What one tenant was charged, and who waits for it."""

    __slots__ = ("counter", "new", "waiting")

    def __init__(self) -> None:
        self.counter = 0.0
        self.waiting: Ranking[Sequence] = Ranking()
        """By arrival."""
        self.new: set[Sequence] = set()
        """Those of them that never ran."""


class FairQueue(Queue):
    """The tenant with the least counter first, and of it the oldest; requests without a tenant are one of their own.

    A tenant without a queued request gathers no credit: when one arrives, its counter is lifted to the least of
    the tenants with queued requests, or, where there are none, to that of the tenant who was the last to have
    one. Queued are requests that never ran: a preempted sequence is none, whether it came back to an otherwise idle
    tenant or is what others are compared with.

    Two tenants that have queued requests all the time are charged within 2 * max(prompt_weight * longest
    prompt, output_weight * tokens of a full batch) of each other, where nobody is preempted. Peeking costs O(1),
    all else O(log n), and a step O(log n) for each tenant that has running sequences.
    """

    def __init__(self, config: FairConfig) -> None:
        self._config = config
        self._tenants: dict[str | None, _Tenant] = {}
        self._by_counter: Ranking[_Tenant] = Ranking()
        """Those for whom somebody waits, by counter and then by their oldest."""
        self._queued: Ranking[_Tenant] = Ranking()
        """Those with a request that never ran, by counter."""
        self._last_to_leave: _Tenant | None = None
        self._length = 0

    def push(self, seq: Sequence) -> None:
        tenant = self._tenant_of(seq)
        if seq.state is SequenceState.WAITING:
            if not tenant.new:
                self._lift(tenant)
            tenant.new.add(seq)
        tenant.waiting.put(seq, seq.order)
        self._length += 1
        self._rank(tenant)

    def peek(self) -> Sequence:
        return self._by_counter.first().waiting.first()

    def remove(self, seq: Sequence) -> None:
        tenant = self._tenant_of(seq)
        if not tenant.waiting.discard(seq):
            raise ValueError(f"{seq} does not wait here")
        self._length -= 1
        if seq in tenant.new:
            tenant.new.remove(seq)
            if not tenant.new:
                self._last_to_leave = tenant
        self._rank(tenant)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """As if each were admitted in its turn, and charged for its whole prompt."""
        turns = []
        for tenant in self._by_counter:
            line = iter(tenant.waiting)
            first = next(line)
            turns.append((tenant.counter, first.order, first, line))
        heapify(turns)
        while turns:
            counter, _, seq, line = heappop(turns)
            if seq.state is SequenceState.WAITING:
                counter += self._config.prompt_weight * seq.num_prompt_tokens
            yield seq
            after = next(line, None)
            if after is not None:
                heappush(turns, (counter, after.order, after, line))

    def admitted(self, seq: Sequence, num_tokens: int) -> None:
        self._charge(self._tenant_of(seq), self._config.prompt_weight * num_tokens)

    def committed(self, plan: StepPlan) -> None:
        generated: dict[_Tenant, int] = {}
        for row in plan.rows:
            if row.samples:
                tenant = self._tenant_of(row.seq)
                generated[tenant] = generated.get(tenant, 0) + 1 + len(row.forks)
        for tenant, num_tokens in generated.items():
            self._charge(tenant, self._config.output_weight * num_tokens)

    def _tenant_of(self, seq: Sequence) -> _Tenant:
        name = seq.request.tenant
        if name not in self._tenants:
            self._tenants[name] = _Tenant()
        return self._tenants[name]

    def _lift(self, tenant: _Tenant) -> None:
        """A request arrives for `tenant`, which had none queued."""
        if len(self._queued):
            tenant.counter = max(tenant.counter, self._queued.first().counter)
        elif self._last_to_leave is not None:
            tenant.counter = max(tenant.counter, self._last_to_leave.counter)

    def _charge(self, tenant: _Tenant, amount: float) -> None:
        tenant.counter += amount
        self._rank(tenant)

    def _rank(self, tenant: _Tenant) -> None:
        if len(tenant.waiting):
            self._by_counter.put(tenant, (tenant.counter, tenant.waiting.first().order))
        else:
            self._by_counter.discard(tenant)
        if tenant.new:
            self._queued.put(tenant, tenant.counter)
        else:
            self._queued.discard(tenant)
