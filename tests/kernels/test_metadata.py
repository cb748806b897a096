"""AttentionMetadata refuses a batch that contradicts itself, naming what is wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvengine.testing.attention_cases import make_case


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"seq_lens": (5,)}, "seq_lens"),
        ({"seq_lens": (9, 25)}, "seq_lens"),
        ({"query_lens": (-1, 4)}, "negative"),
        ({"query_lens": (2, 2)}, "query_start"),
        ({"block_tables": torch.zeros(1, 3, dtype=torch.int64)}, "block_tables"),
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int32)}, "block_tables"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([1, 2, 3, -1])}, "slot_mapping"),
    ],
    ids=str,
)
def test_check_names_the_contradiction(change: dict[str, Any], message: str) -> None:
    meta = make_case([(1, 9), (2, 12)], padding=1).meta
    with pytest.raises(ValueError, match=message):
        replace(meta, **change).check()
