"""Contiguous reservation without rounding, in the first gap that is large enough.

Source: Knuth, "The Art of Computer Programming", volume 1, section 2.5; the reservations are those of Kwon et al.,
SOSP 2023, section 6.1.
"""

from __future__ import annotations

from functools import partial

from kvengine.kv.free_list_arena import FreeListArena
from kvengine.policies import Allocator, Build
from kvengine_plugins.allocators.contiguous import FitConfig, build_contiguous


def first_fit(config: FitConfig, build: Build) -> Allocator:
    """The gap at the lowest address."""
    return build_contiguous("first_fit", config.reserve, partial(FreeListArena, fit="first"), build)
