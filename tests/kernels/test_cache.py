"""Writes saturate instead of overflowing, and what is written is what is read."""

import pytest
import torch

from kvengine_kernels.cache import KV_DTYPES, allocate_cache, read_kv, write_kv

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
