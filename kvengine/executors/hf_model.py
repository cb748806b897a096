"""Any transformers causal LM over a paged cache, through its own attention dispatch.

The model gets a flat batch [1, T_all] without masks or cache of its own; `AttentionInterface` hands every
layer's q, k, v to `paged_attention_forward`, which writes k, v by slot and attends through the block tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from kvengine.core.errors import ModelError
from kvengine.core.plan import StepPlan
from kvengine.core.shapes import KvShape, ModelShape
from kvengine.executors.input_batch import InputBatch
from kvengine.models.hf import declared_windows
from kvengine_kernels.cache import (
    KV_DTYPES,
    allocate_host_pool,
    allocate_pool,
    copy_blocks,
    layer_caches,
    swap_in,
    swap_out,
    write_kv,
)

ATTENTION_NAME = "kvengine"

HARMLESS_ARGUMENTS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)
"""What layers pass that says nothing about which keys a query may see or how they are weighed."""


@dataclass(slots=True)
class _Step:
    """What one forward pass hands to every layer, and the window with which each layer attended."""

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    slot_mapping: torch.Tensor
    backend: Any
    plan: Any
    windows: dict[int, int | None] = field(default_factory=dict)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kvengine_step: _Step | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """q [1, H, T, D], k and v [1, Hkv, T, D] -> ([1, T, H, D], None), as AttentionInterface wants it.

    Raises ModelError for an argument whose meaning is unknown (ignoring it could change the answer), and for
    layers that use attention in a way that one cache per layer cannot serve.
    """
    _refuse_unknown(module, attention_mask, others)
    if kvengine_step is None:
        raise ModelError(f"{type(module).__name__} does not pass on to attention what its model was given")
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    k_cache, v_cache = _cache_of(module, kvengine_step, keys, values)
    kvengine_step.windows[int(module.layer_idx)] = sliding_window  # type: ignore[arg-type]
    write_kv(keys, values, k_cache, v_cache, kvengine_step.slot_mapping)
    out = kvengine_step.backend.run(
        kvengine_step.plan,
        query[0].transpose(0, 1),
        k_cache,
        v_cache,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _cache_of(
    module: torch.nn.Module, step: _Step, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches of the module's layer; ModelError when it attends twice or with heads they were not made for."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    if layer in step.windows:
        raise ModelError(f"{type(module).__name__} attends more than once in layer {layer}")
    k_cache, v_cache = step.caches[layer]
    if keys.shape[1:] != k_cache.shape[1:] or values.shape[1:] != v_cache.shape[1:]:
        raise ModelError(
            f"{type(module).__name__}: K {tuple(keys.shape[1:])} and V {tuple(values.shape[1:])} per token do not "
            f"fit a cache of {tuple(k_cache.shape[1:])}"
        )
    return k_cache, v_cache


def _refuse_unknown(module: torch.nn.Module, mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    unknown = [name for name, given in others.items() if name not in HARMLESS_ARGUMENTS and given is not None]
    if mask is not None:
        unknown.append("a mask")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        unknown.append("non-causal attention")
    if unknown:
        what = ", ".join(unknown)
        raise ModelError(
            f"{type(module).__name__} passes {what} to attention, which kvengine does not support"
        )


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class HfLogitsModel:
    """A transformers module, the pool with the K and V of its layers (and one scratch block), and the host pool."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        shape: ModelShape,
        kv: KvShape,
        backend: Any,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.device = device
        self._module = module
        self._backend = backend
        windows = declared_windows(module.config)
        self._windows = {layer: window for layer, window in windows.items() if window < max_model_len}
        self._pool, self._host_pool = _allocate(kv, shape, device)
        self._caches = layer_caches(self._pool)

    def move(self, plan: StepPlan) -> None:
        if plan.swap_outs:
            swap_out(self._pool, self._host_pool, *_columns(plan.swap_outs))
        if plan.swap_ins:
            swap_in(self._host_pool, self._pool, *_columns(plan.swap_ins))
        if plan.copies:
            copy_blocks(self._pool, *_columns(plan.copies))

    def forward(self, batch: InputBatch) -> torch.Tensor:
        meta = batch.attention
        step = _Step(self._caches, meta.slot_mapping, self._backend, self._backend.plan(meta))
        output = self._module(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.sample_at,
            kvengine_step=step,
        )
        ignored = [
            layer for layer, window in self._windows.items() if (step.windows.get(layer) or math.inf) > window
        ]
        if ignored:
            raise ModelError(
                f"layers {ignored} of {type(self._module).__name__} do not tell attention of "
                f"sliding_window={self._windows[ignored[0]]}, so their answers would be wrong; "
                f"a lower engine.max_model_len needs no window"
            )
        return output.logits[0].float()


def _columns(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [source for source, _ in pairs], [destination for _, destination in pairs]


def _allocate(kv: KvShape, shape: ModelShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool, with a scratch block after its last, and the host pool; ModelError when memory does not suffice."""
    try:
        pool = allocate_pool(
            shape.num_layers,
            kv.num_blocks + 1,
            kv.block_size,
            shape.num_kv_heads,
            shape.head_dim,
            KV_DTYPES[kv.dtype],
            device,
        )
    except RuntimeError as error:
        raise ModelError(
            f"no memory for a KV pool of {kv.num_blocks} blocks; lower engine.kv_memory_bytes or "
            f"engine.num_blocks ({str(error).splitlines()[0]})"
        ) from error
    try:
        return pool, allocate_host_pool(pool, kv.num_host_blocks)
    except RuntimeError as error:
        raise ModelError(
            f"no host memory for {kv.num_host_blocks} blocks; lower engine.swap_space_bytes or "
            f"engine.num_host_blocks ({str(error).splitlines()[0]})"
        ) from error
