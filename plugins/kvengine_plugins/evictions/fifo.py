"""Evict the cached block that was computed longest ago, however often it was hit since."""

from __future__ import annotations

from kvengine.policies import CachedBlock


class FifoEviction:
    """Ages blocks by when they were published."""

    def rank(self, block: CachedBlock) -> int:
        return block.published
