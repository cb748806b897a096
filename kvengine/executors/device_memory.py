"""What memory a device has for the KV pool; importable without torch, which is asked only where a GPU is."""

from __future__ import annotations

import os
from pathlib import Path

from kvengine.core.errors import ConfigError
from kvengine.core.shapes import KvShape, ModelShape
from kvengine.executors.config import TorchConfig
from kvengine.kv.sizing import BYTES_PER_VALUE
from kvengine.policies import Model

ACTIVATION_BYTES = 2 * 2**30
"""Left free on a GPU for activations and the allocator's slack."""


def uses_gpu(config: TorchConfig) -> bool:
    """Whether the torch executor will run on a GPU."""
    if config.device == "cpu" or not Path("/proc/driver/nvidia").exists():
        return config.device == "cuda"
    import torch

    return config.device == "cuda" or torch.cuda.is_available()


def gpu_kv_bytes(model: Model, utilization: float) -> int:
    """`utilization` of the GPU's memory less what is in use, the weights and ACTIVATION_BYTES.

    Raises ConfigError when nothing is left. Not measured on a GPU yet.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("executor.device", "cuda", "torch sees no GPU here; choices: auto, cpu")
    free, total = torch.cuda.mem_get_info()
    left = int(total * utilization) - (total - free) - model.weight_bytes() - ACTIVATION_BYTES
    if left <= 0:
        raise ConfigError(
            "engine.gpu_memory_utilization",
            utilization,
            f"leaves nothing for KV: {model.weight_bytes():,} bytes of weights on a GPU of {total:,} bytes",
        )
    return left


def check_host_memory(kv: KvShape, shape: ModelShape, *, pool_on_gpu: bool = False) -> None:
    """ConfigError when the pool (unless it lies on a GPU) and the host pool exceed this machine's memory."""
    block_bytes = kv.block_size * shape.kv_bytes_per_token(BYTES_PER_VALUE[kv.dtype])
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pool = 0 if pool_on_gpu else kv.num_blocks * block_bytes
    if pool > present:
        raise ConfigError(
            "engine.num_blocks",
            kv.num_blocks,
            f"the KV pool would take {pool / 2**30:,.1f} GiB, this machine has {present / 2**30:,.1f}; "
            f"lower num_blocks or kv_memory_bytes",
        )
    host = kv.num_host_blocks * block_bytes
    if pool + host > present:
        raise ConfigError(
            "engine.num_host_blocks",
            kv.num_host_blocks,
            f"the host pool would take {host / 2**30:,.1f} GiB besides {pool / 2**30:,.1f} of the KV pool, this "
            f"machine has {present / 2**30:,.1f}; lower num_host_blocks or swap_space_bytes",
        )
