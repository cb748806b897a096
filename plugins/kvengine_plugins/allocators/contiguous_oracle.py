"""Contiguous reservation of exactly what a sequence will write, in regions of a buddy arena.

Source: Orca (Oracle) of Kwon et al., SOSP 2023, section 6.1: "infeasible to achieve in practice", an upper bound.
"""

from __future__ import annotations

from kvengine.kv.buddy import BuddyArena
from kvengine.policies import Allocator, Build
from kvengine_plugins.allocators.contiguous import build_contiguous


def contiguous_oracle(config: object, build: Build) -> Allocator:
    """No slot of a reservation stays unused; what the arena rounds up is lost all the same."""
    return build_contiguous("contiguous_oracle", "oracle", BuddyArena, build)
