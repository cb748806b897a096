"""Contiguous reservation without rounding, in the first gap that is large enough.

Source: Knuth, "The Art of Computer Programming", volume 1, section 2.5; the reservations are those of Kwon et al.,
SOSP 2023, section 6.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvengine.kv.free_list_arena import FreeListArena
from kvengine.policies import Allocator, Build
from kvengine_plugins.allocators.contiguous import ReserveName, build_contiguous


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFitConfig:
    """`reserve`: `max` (max_model_len slots), `pow2` (the true output rounded up to a power of two), `oracle`."""

    reserve: ReserveName = "max"


def first_fit(config: FirstFitConfig, build: Build) -> Allocator:
    """The gap at the lowest address."""
    return build_contiguous("first_fit", config.reserve, partial(FreeListArena, fit="first"), build)
