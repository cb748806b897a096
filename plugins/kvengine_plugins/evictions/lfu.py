"""Evict the cached block that was hit least often, the one used longest ago among equals."""

from __future__ import annotations

from kvengine.policies import CachedBlock


class LfuEviction:
    """A prefix that many share outlives a long one that nobody asked for again; counts never fade."""

    def rank(self, block: CachedBlock) -> tuple[int, int]:
        return block.num_hits, block.last_used
