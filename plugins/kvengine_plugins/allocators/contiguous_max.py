"""Contiguous reservation of max_model_len slots per sequence, in regions of a buddy arena.

Source: Orca (Max) of Kwon et al., SOSP 2023, section 6.1.
"""

from __future__ import annotations

from kvengine.kv.buddy import BuddyArena
from kvengine.policies import Allocator, Build
from kvengine_plugins.allocators.contiguous import build_contiguous


def contiguous_max(config: object, build: Build) -> Allocator:
    """Whatever a sequence will use of it."""
    return build_contiguous("contiguous_max", "max", BuddyArena, build)
