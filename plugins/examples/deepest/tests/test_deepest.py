"""The block that dies is the one that the one sentence says, on kvengine's own test engine.

Whether it keeps kvengine's contract is checked by: pytest --kvengine-conformance eviction=deepest
"""

import pytest
from kvengine.core.errors import ConfigError
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output

from kvengine_deepest import DeepestConfig

SHORT, LONG, OTHER = [1, 2], [3, 4, 5, 6, 7, 8], [9, 10, 11]


def still_cached(eviction: str, prompt: list[int], **settings: int) -> int:
    """Blocks of `prompt` that can be hit when SHORT, LONG and OTHER were computed, for which two are missing."""
    engine = TestEngine(
        policies={"eviction": eviction},
        settings={"eviction": settings},
        prefix_cache=PrefixCacheConfig(mode="on"),
        block_size=1,
        num_blocks=9,
        max_model_len=9,
    )
    for i, tokens in enumerate((SHORT, LONG, OTHER, [*prompt, 12])):
        engine.add(f"r{i}", tokens, max_tokens=1)
        assert engine.run()[f"r{i}"] == checksum_output(tokens, 1)
    return engine.log.finished_sequences[-1].num_cached_tokens


def test_the_deepest_goes_first_however_recent() -> None:
    assert still_cached("deepest", SHORT, stride=1) == 2
    assert still_cached("deepest", LONG, stride=1) == 4
    assert still_cached("lru", SHORT) == 0
    assert still_cached("lru", LONG) == 6


def test_within_a_stride_the_least_recent_goes_first() -> None:
    assert still_cached("deepest", SHORT, stride=100) == 0


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="stride"):
        DeepestConfig(stride=0)
