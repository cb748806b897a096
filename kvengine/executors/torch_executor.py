"""The executor that runs a model with torch, on CPU or GPU."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from kvengine.core.errors import ConfigError
from kvengine.core.plan import StepPlan, StepResult
from kvengine.executors.config import TorchConfig
from kvengine.executors.hf_model import HfLogitsModel
from kvengine.executors.input_batch import InputBatch, input_batch
from kvengine.executors.sampling import sample_rows
from kvengine.policies import Build


class LogitsModel(Protocol):
    """A model with its KV cache: everything that is not scheduling or sampling."""

    device: torch.device

    def move(self, plan: StepPlan) -> None:
        """Carry out the plan's swap-outs, swap-ins and copies, in this order."""
        ...

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Write the K and V of all tokens, then the logits [rows that sample, vocabulary] float32."""
        ...


class TorchExecutor:
    """Memory operations, one forward pass and one sampling per step; time is real.

    `scratch_block` is the block after the pool's last: idle rows and padding write there.
    """

    virtual_time = False

    def __init__(self, model: LogitsModel, *, block_size: int, scratch_block: int) -> None:
        self._model: LogitsModel | None = model
        self._block_size = block_size
        self._scratch_block = scratch_block

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        assert self._model is not None, "the executor is closed"
        start = time.perf_counter_ns()
        self._model.move(plan)
        token_ids = self._compute(self._model, plan) if plan.num_tokens else []
        if self._model.device.type == "cuda":
            # Nothing waits for a step that samples nothing, and its duration would be that of the launches.
            torch.cuda.synchronize(self._model.device)
        return StepResult(token_ids, time.perf_counter_ns() - start)

    def _compute(self, model: LogitsModel, plan: StepPlan) -> list[list[int]]:
        batch = input_batch(
            plan, block_size=self._block_size, scratch_block=self._scratch_block, device=model.device
        )
        return sample_rows(model.forward(batch), plan.rows)

    def close(self) -> None:
        """Drop the model and its cache."""
        self._model = None


def load_torch_executor(config: TorchConfig, build: Build) -> TorchExecutor:
    """Load the model of `build` onto the device, with its KV pool; ConfigError or ModelError."""
    assert build.model is not None
    assert build.kv is not None
    assert build.attention is not None
    device = _device(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    backend = build.attention.backend()
    module = build.model.load(build).to(device).eval()
    assert build.limits is not None
    model = HfLogitsModel(
        module,
        shape=build.model.shape(),
        kv=build.kv,
        backend=backend,
        device=device,
        max_model_len=build.limits.max_model_len,
    )
    return TorchExecutor(model, block_size=build.kv.block_size, scratch_block=build.kv.num_blocks)


def _device(config: TorchConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("executor.device", "cuda", "torch sees no GPU here; choices: auto, cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
