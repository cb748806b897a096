"""Contiguous reservation without rounding, in the smallest gap that is large enough.

Source: Knuth, "The Art of Computer Programming", volume 1, section 2.5; the reservations are those of Kwon et al.,
SOSP 2023, section 6.1.
"""

from __future__ import annotations

from functools import partial

from kvengine.kv.free_list_arena import FreeListArena
from kvengine.policies import Allocator, Build
from kvengine_plugins.allocators.contiguous import FitConfig, build_contiguous


def best_fit(config: FitConfig, build: Build) -> Allocator:
    """Of equal gaps the one at the lowest address."""
    return build_contiguous("best_fit", config.reserve, partial(FreeListArena, fit="best"), build)
