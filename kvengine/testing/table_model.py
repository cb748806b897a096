"""A stand-in model for the torch executor whose next-token logits are a table row chosen by the last token."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import torch

from kvengine.core.plan import StepPlan
from kvengine.executors.input_batch import InputBatch


class TableModel:
    """`logits[t]` are the logits after token t: [V][V], log-probabilities for exact distributions.

    The answer depends on no KV, no neighbour and no float order, so whatever differs between two runs comes
    from sampling. It satisfies kvengine.executors.torch_executor.LogitsModel.
    """

    def __init__(self, logits: torch.Tensor | ListLike[ListLike[float]]) -> None:
        self._table = torch.as_tensor(logits, dtype=torch.float32)
        if self._table.dim() != 2 or self._table.shape[0] != self._table.shape[1]:
            raise ValueError(f"the table must be [V][V], not {list(self._table.shape)}")
        self.device = self._table.device

    @classmethod
    def uniform(cls, vocab_size: int) -> TableModel:
        """Every token equally likely after every token."""
        return cls(torch.zeros(vocab_size, vocab_size))

    def move(self, plan: StepPlan) -> None:
        """Nothing: there is no KV to move."""

    def forward(self, batch: InputBatch) -> torch.Tensor:
        return self._table[batch.token_ids[batch.sample_at]]
