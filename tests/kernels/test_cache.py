"""Writes saturate instead of overflowing, what is written is what is read, and blocks move bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvengine_kernels.cache import (
    KV_DTYPES,
    allocate_cache,
    allocate_host_pool,
    allocate_pool,
    copy_blocks,
    layer_caches,
    read_kv,
    swap_in,
    swap_out,
    write_kv,
)

COMPUTE = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = {"fp8": 448, "fp8_e5m2": 57344, "fp16": 65504}
NARROWING = [(compute, name) for compute in COMPUTE for name in LIMITS if compute != KV_DTYPES[name]]


def round_trip(values: torch.Tensor, name: str) -> torch.Tensor:
    """Write values [T] as K and their negatives as V to the end of a cache; return both [2, T] in fp32."""
    tokens = len(values)
    caches = [allocate_cache(tokens + 1, 2, 1, 1, KV_DTYPES[name], "cpu") for _ in range(2)]
    slots = torch.arange(tokens) + tokens + 2
    k = values.view(-1, 1, 1)
    write_kv(k, -k, caches[0], caches[1], slots)
    for cache in caches:
        assert not read_kv(cache, torch.arange(tokens + 2), torch.float32).any()
    return torch.stack([read_kv(cache, slots, torch.float32).flatten() for cache in caches])


@pytest.mark.parametrize(("compute", "name"), NARROWING, ids=str)
def test_writes_saturate(compute: torch.dtype, name: str) -> None:
    """bf16 has no 65504: a clamp in bf16 would round up to 65536, which is inf in fp16."""
    limit = LIMITS[name]
    large = torch.tensor([limit, 1.01 * limit, 2 * limit, 1e9, float("inf")]).to(compute)
    k, v = round_trip(torch.cat([large, -large]), name)
    assert k.tolist() == [limit] * 5 + [-limit] * 5
    assert torch.equal(v, -k)


def test_fp8_writes_of_known_failure_h4() -> None:
    k, _ = round_trip(torch.tensor([449.0, 1000.0, -1e9, 0.0]), "fp8")
    assert k.tolist() == [448, 448, -448, 0]


@pytest.mark.parametrize("name", KV_DTYPES)
def test_nan_stays_nan(name: str) -> None:
    k, _ = round_trip(torch.tensor([float("nan"), 1.5]), name)
    assert k.isnan().tolist() == [True, False]


def test_infinity_survives_where_nothing_is_narrowed() -> None:
    k, _ = round_trip(torch.tensor([float("inf")]), "fp32")
    assert k.tolist() == [float("inf")]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_every_fp8_code_reads_as_torch_casts_it(name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(KV_DTYPES[name]).view(256, 1, 1)
    want = codes.to(dtype)
    torch.testing.assert_close(read_kv(codes, torch.arange(256), dtype), want, rtol=0, atol=0, equal_nan=True)


# ---- blocks of a pool of all layers

DTYPES = pytest.mark.parametrize("name", KV_DTYPES)
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 3, 6, 4, 2, 8


def random_bits(pool: torch.Tensor) -> torch.Tensor:
    """Fill with every kind of bits: infinities, and NaN of any payload and sign, quiet and signalling."""
    generator = torch.Generator().manual_seed(0)
    raw = bits(pool).view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    special = [0x7F, 0xFF, 0x7C, 0xFC]  # last bytes of infinities and NaN in one or the other format
    raw.view(-1)[: len(special) * 64] = torch.tensor(special, dtype=torch.uint8).repeat(64)
    return pool


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view as integers: NaN equals itself, -0 differs from 0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def new_pool(name: str, layers: int = LAYERS) -> torch.Tensor:
    return random_bits(allocate_pool(layers, BLOCKS, BLOCK_SIZE, HEADS, DIM, KV_DTYPES[name], "cpu"))


def test_a_pool_holds_k_and_v_of_every_layer_as_caches_by_slot() -> None:
    pool = allocate_pool(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, torch.float32, "cpu")
    assert pool.shape == (2 * LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM)
    caches = layer_caches(pool)
    assert [cache.shape for pair in caches for cache in pair] == [
        (BLOCKS * BLOCK_SIZE, HEADS, DIM)
    ] * 2 * LAYERS
    for layer, (k_cache, v_cache) in enumerate(caches):
        assert k_cache.is_contiguous()
        k = torch.full((1, HEADS, DIM), float(layer + 1))
        write_kv(k, -k, k_cache, v_cache, torch.tensor([3 * BLOCK_SIZE + 1]))
    assert pool[:, 3, 1, 0, 0].tolist() == [1, -1, 2, -2, 3, -3]
    assert pool.count_nonzero() == 2 * LAYERS * HEADS * DIM


@DTYPES
def test_copies_are_bit_for_bit_and_touch_nothing_else(name: str) -> None:
    pool = new_pool(name)
    want = bits(pool).clone()
    want[:, [5, 0]] = want[:, [1, 3]]
    copy_blocks(pool, [1, 3], [5, 0])
    assert torch.equal(bits(pool), want)


@DTYPES
def test_one_source_may_be_copied_twice(name: str) -> None:
    pool = new_pool(name)
    want = bits(pool).clone()
    want[:, 4] = want[:, 5] = want[:, 2]
    copy_blocks(pool, [2, 2], [4, 5])
    assert torch.equal(bits(pool), want)


@DTYPES
def test_what_goes_out_comes_back_bit_for_bit_into_other_blocks(name: str) -> None:
    pool = new_pool(name)
    host = allocate_host_pool(pool, 4)
    assert host.dtype == pool.dtype
    assert not bits(host).any()
    want = bits(pool).clone()
    swap_out(pool, host, [4, 0, 2], [1, 3, 0])
    assert torch.equal(bits(pool), want)
    assert not bits(host)[2].any()
    bits(pool)[:, [0, 2, 4]] = 0
    swap_in(host, pool, [0, 1], [0, 5])
    want[:, 0], want[:, 5] = want[:, 2], want[:, 4].clone()
    want[:, [2, 4]] = 0
    assert torch.equal(bits(pool), want)
    swap_in(host, pool, [3], [2])
    assert torch.equal(bits(pool)[:, 2], bits(new_pool(name))[:, 0])


@pytest.mark.parametrize("host_blocks", [0, 3])
def test_a_host_pool_may_be_empty(host_blocks: int) -> None:
    pool = new_pool("fp32")
    assert len(allocate_host_pool(pool, host_blocks)) == host_blocks


class Operations(TorchDispatchMode):
    """Names of the torch operations that really move or compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(call: Callable[..., None], *arguments: Any) -> list[str]:
    with Operations() as seen:
        call(*arguments)
    return seen.names


def test_a_copy_is_one_kernel_call_for_all_layers_and_blocks() -> None:
    one = operations(copy_blocks, new_pool("bf16", layers=1), [0], [1])
    many = operations(copy_blocks, new_pool("bf16", layers=7), [0, 2, 4], [1, 3, 5])
    assert many == one
    assert sum("index_copy" in name for name in many) == 1


@pytest.mark.parametrize("call", [swap_out, swap_in], ids=lambda call: call.__name__)
def test_swaps_cost_calls_by_block_and_not_by_layer(call: Callable[..., None]) -> None:
    counts = []
    for layers in (1, 7):
        pool = new_pool("bf16", layers)
        host = allocate_host_pool(pool, 3)
        pools = (pool, host) if call is swap_out else (host, pool)
        counts.append(len(operations(call, *pools, [0, 1], [1, 2])))
    assert counts[0] == counts[1]


WRONG: list[tuple[Sequence[int], Sequence[int], str]] = [
    ([0, 1], [2], "2 blocks"),
    ([0, 1], [2, 2], "twice"),
    ([0], [BLOCKS], "outside"),
    ([BLOCKS], [0], "outside"),
    ([-1], [0], "outside"),
    ([0], [-1], "outside"),
]


@pytest.mark.parametrize(("sources", "destinations", "problem"), WRONG)
@pytest.mark.parametrize("call", [copy_blocks, swap_out, swap_in], ids=lambda call: call.__name__)
def test_pairs_that_make_no_sense_change_nothing(
    call: Callable[..., None], sources: Sequence[int], destinations: Sequence[int], problem: str
) -> None:
    pool = new_pool("fp8")
    host = allocate_host_pool(pool, BLOCKS)
    pools = {copy_blocks: (pool,), swap_out: (pool, host), swap_in: (host, pool)}[call]
    with pytest.raises(ValueError, match=problem):
        call(*pools, sources, destinations)
    assert torch.equal(bits(pool), bits(new_pool("fp8")))
    assert not bits(host).any()


def test_a_copied_block_is_not_overwritten_by_the_same_call() -> None:
    pool = new_pool("fp8")
    with pytest.raises(ValueError, match=r"\[1\] are both"):
        copy_blocks(pool, [0, 1], [1, 2])
    assert torch.equal(bits(pool), bits(new_pool("fp8")))
