"""The victim is whom the one sentence says, on kvengine's own test engine.

Whether it keeps kvengine's contract is checked by: pytest --kvengine-conformance victim=most_blocks
"""

import pytest
from kvengine.core.errors import ConfigError
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output

from kvengine_most_blocks import MostBlocksConfig

PROMPTS = {"oldest": [1, 2], "large": [3, 4, 5, 6, 7], "small": [8, 9]}


def first_victim(**settings: int) -> str:
    """Who is preempted first where 3 more tokens than the prompts' 9 fit the pool, a block each."""
    engine = TestEngine(
        policies={"victim": "most_blocks"},
        settings={"victim": settings},
        block_size=1,
        num_blocks=12,
        max_model_len=12,
    )
    for request_id, prompt in PROMPTS.items():
        engine.add(request_id, prompt, max_tokens=4)
    assert engine.run() == {name: checksum_output(prompt, 4) for name, prompt in PROMPTS.items()}
    return next(step.preempted[0] for step in engine.log.steps if step.preempted)


def test_whoever_holds_most_blocks_gives_way() -> None:
    assert first_victim() == "large"


def test_those_that_have_run_longest_are_spared() -> None:
    assert first_victim(spare=1) == "small"  # the very oldest is never a candidate


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="spare"):
        MostBlocksConfig(spare=-1)
