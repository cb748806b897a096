"""Contiguous reservation of the prompt and the output rounded up to a power of two, in regions of a buddy arena.

Source: Orca (Pow2) of Kwon et al., SOSP 2023, section 6.1: "over-reserves the space for outputs by at most 2x".
"""

from __future__ import annotations

from kvengine.kv.buddy import BuddyArena
from kvengine.policies import Allocator, Build
from kvengine_plugins.allocators.contiguous import build_contiguous


def contiguous_pow2(config: object, build: Build) -> Allocator:
    """For 25 new tokens as for 32, but for no more than max_model_len in all."""
    return build_contiguous("contiguous_pow2", "pow2", BuddyArena, build)
