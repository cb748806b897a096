"""Swap a victim out, or compute it again, whichever takes less time by a bandwidth and a rate."""

from __future__ import annotations

from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import KvShape
from kvengine.policies import Mechanism, Preemption


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """`host_bandwidth` (bytes/s) of the link between host and device, `recompute_rate` (tokens/s) of prefills."""

    host_bandwidth: float = 25e9
    recompute_rate: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("host_bandwidth", "recompute_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"preemption.{name}", getattr(self, name), "must be a positive number")


class AutoPreemption(Preemption):
    """Whole blocks move, twice; tokens are computed, once. So a link too slow for a full block never serves, and
    one that is fast enough may not pay for a victim that has little in its last block.

    Copying is taken to keep the engine as busy as computing does, and what a prefix cache might save is not counted.
    """

    def __init__(self, config: AutoConfig, kv: KvShape) -> None:
        self._block_size = kv.block_size
        self._move_s = 2 * kv.block_bytes / config.host_bandwidth
        """Of a block, out and in again."""
        self._compute_s = 1 / config.recompute_rate
        """Of a token."""
        self.swaps = self._move_s < self._block_size * self._compute_s

    def mechanism(self, victim: Sequence) -> Mechanism:
        tokens = victim.num_computed_tokens
        num_blocks = -(-tokens // self._block_size) - victim.block_table.num_dropped
        faster = num_blocks * self._move_s < tokens * self._compute_s
        return Mechanism.SWAP if faster else Mechanism.RECOMPUTE
