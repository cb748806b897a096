"""Built-in admission policies: whether a waiting sequence may enter now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_admissions(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "admission",
        "whole_prompt",
        lambda config, build: WholePromptAdmission(),
        summary="enter when all known tokens have room, promised blocks subtracted",
    )
