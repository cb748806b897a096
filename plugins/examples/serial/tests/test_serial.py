"""The scheduler does what its one sentence says, on kvengine's own test engine."""

import pytest
from kvengine_serial import SerialConfig

from kvengine.core.errors import ConfigError
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output


def test_one_runs_at_a_time_and_answers_are_right() -> None:
    engine = TestEngine(policies={"scheduler": "serial"})
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=4)
    assert engine.run() == {name: checksum_output(prompt, 4) for name, prompt in prompts.items()}
    assert all(len(step.scheduled) == 1 for step in engine.log.steps)
    assert len(engine.log.steps) == 12


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="at_once"):
        SerialConfig(at_once=0)
