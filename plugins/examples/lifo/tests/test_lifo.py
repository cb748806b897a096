"""The queue serves in the order that its one sentence says, on kvengine's own test engine.

Whether it keeps kvengine's contract is checked by: pytest --kvengine-conformance queue=lifo
"""

import pytest
from kvengine.core.errors import ConfigError
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output

from kvengine_lifo import LifoConfig


def served(fifo_up_to: int) -> str:
    """The order in which a, b, c, d and e end that come in this order, where one runs at a time."""
    engine = TestEngine(
        policies={"queue": "lifo"},
        settings={"queue": {"fifo_up_to": fifo_up_to}},
        max_num_seqs=1,
    )
    for i, request_id in enumerate("abcde"):
        engine.add(request_id, [i], max_tokens=2)
    assert engine.run() == {name: checksum_output([i], 2) for i, name in enumerate("abcde")}
    return "".join(seq.id for seq in engine.log.finished_sequences)


def test_last_come_is_first_served_until_few_wait() -> None:
    assert served(fifo_up_to=0) == "edcba"
    assert served(fifo_up_to=2) == "edcab"
    assert served(fifo_up_to=5) == "abcde"


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="fifo_up_to"):
        LifoConfig(fifo_up_to=-1)
