"""What planning a step costs under each scheduler, with 256 running decodes and 1,000 or 3,000 waiting.

    python benchmarks/planning.py

Prints medians in us, commit apart, beside the floor of a plain loop over the batch in the same run, and exits with 1
where a limit is passed: 150 us to plan with queues fcfs and priority, and 1.1 times as much with three times as
many waiting. Needs a quiet machine.
"""

from __future__ import annotations

import statistics
import sys
import time

from kvengine.core.errors import ConfigError
from kvengine.core.request import Request, SamplingParams
from kvengine.engine.commit import commit
from kvengine.executors.null import NullConfig, NullExecutor
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine

RUNNING, WAITING, THREE_TIMES = 256, 1_000, 3_000
PROMPT, NEW = 32, 2_000
STEPS, WARM_UP = 300, 30
LIMIT_US, LIMIT_RATIO = 150, 1.1
LIMITED_QUEUES = ("fcfs", "priority")


def engine_with(scheduler: str, queue: str, waiting: int) -> TestEngine:
    """One whose seats are all taken by decodes, while `waiting` more wait."""
    made = TestEngine(
        policies={"scheduler": scheduler, "queue": queue},
        num_blocks=100_000,
        max_num_seqs=RUNNING,
        max_model_len=4_096,
        max_num_batched_tokens=2 * RUNNING * PROMPT,
    )
    made.engine.executor = NullExecutor(NullConfig(), block_size=16)
    for i in range(RUNNING + waiting):
        made.engine.add_request(
            Request(
                id=f"r{i}",
                prompt_token_ids=tuple((i + j) % 250 for j in range(PROMPT)),
                sampling=SamplingParams(max_tokens=NEW, temperature=0.0),
                known_output_tokens=NEW,
            )
        )
    for _ in range(WARM_UP):
        made.engine.step()
    return made


def medians_us(made: TestEngine) -> tuple[float, float, float]:
    """Planning, committing, and the floor: a loop over the batch that finds and notes each one's next token."""
    engine, context = made.engine, made.engine.context
    plans, commits, floors = [], [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        plan = context.plan(engine.clock.now())
        planned = time.perf_counter()
        result = engine.executor.execute(plan)
        engine.clock.advance(result.duration_ns)
        executed = time.perf_counter()
        commit(context, plan, result, engine.clock.now())
        commits.append(time.perf_counter() - executed)
        plans.append(planned - began)
        running = list(context.seats.running)
        began = time.perf_counter()
        rows = []
        for seq in running:
            need = len(seq.token_ids) - seq.num_computed_tokens
            if need == 1:
                rows.append((seq, seq.num_computed_tokens, need))
        floors.append(time.perf_counter() - began)
    planning, committing, floor = (statistics.median(times) * 1e6 for times in (plans, commits, floors))
    return planning, committing, floor


def main() -> int:
    registry = discover()
    problems = []
    print(f"us per step, {RUNNING} running; plan and plan3: {WAITING:,} and {THREE_TIMES:,} waiting\n")
    print(f"{'scheduler':18}{'queue':16}{'floor':>8}{'plan':>8}{'plan3':>8}{'ratio':>8}{'commit':>8}")
    for scheduler in registry.names("scheduler"):
        for queue in registry.names("queue"):
            try:
                few, many = (engine_with(scheduler, queue, waiting) for waiting in (WAITING, THREE_TIMES))
            except ConfigError:
                continue  # the two make no sense together
            planning, committing, floor = medians_us(few)
            more, _, _ = medians_us(many)
            ratio = more / planning
            print(
                f"{scheduler:18}{queue:16}{floor:8.1f}{planning:8.1f}{more:8.1f}{ratio:8.2f}{committing:8.1f}",
                flush=True,
            )
            if queue in LIMITED_QUEUES and (planning > LIMIT_US or ratio > LIMIT_RATIO):
                problems.append(f"{scheduler} with {queue}")
    for problem in problems:
        print(f"TOO MUCH: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
