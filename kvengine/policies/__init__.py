"""The contracts that plug-ins satisfy: one Protocol per kind, each with its invariants.

A factory registered for a kind is called as `factory(config, build)`: `config` is an instance of the plug-in's
own schema, `build` a `Build` with what is assembled so far. Nothing of a plug-in is looked up by name while
the engine steps.
"""

from kvengine.policies.memory import Allocator, CachedBlock, Eviction, HostPool
from kvengine.policies.running import Attention, Build, Executor, Model, Tokenizer, Workload
from kvengine.policies.scheduling import (
    Admission,
    Mechanism,
    Predictor,
    Preemption,
    Queue,
    Scheduler,
    SchedulingView,
    Victim,
)

__all__ = [
    "Admission", "Allocator", "Attention", "Build", "CachedBlock", "Eviction", "Executor", "HostPool", "Mechanism",
    "Model", "Predictor", "Preemption", "Queue", "Scheduler", "SchedulingView", "Tokenizer", "Victim", "Workload",
]  # fmt: skip
