"""Evict the cached block that was used longest ago."""

from __future__ import annotations

from kvengine.policies import CachedBlock


class LruEviction:
    """What was hit or left last stays longest."""

    def rank(self, block: CachedBlock) -> int:
        return block.last_used
