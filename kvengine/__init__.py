"""kvengine: an LLM inference engine in which every policy is a plug-in and every decision is recorded."""

import time

__version__ = "0.1.0"

_started = time.perf_counter()


def seconds_since_start() -> float:
    """Seconds since kvengine was first imported, which is the first thing that its command does."""
    return time.perf_counter() - _started
