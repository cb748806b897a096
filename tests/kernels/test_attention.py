"""Every attention backend against a float64 softmax over K and V that the test keeps in plain lists."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.testing.attention_cases import (
    SCALE,
    SCRATCH,
    Case,
    all_slots,
    assert_close,
    attend,
    brute_force,
    fill,
    make_case,
    make_meta,
    mixed_rows,
    only,
    run,
)
from kvengine_kernels import reference, sdpa
from kvengine_kernels.cache import KV_DTYPES, write_kv

BACKENDS = pytest.mark.parametrize("backend", [reference, sdpa], ids=["reference", "sdpa"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
OPTIONS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 6},
    {"sliding_window": 1000},
    {"softcap": 2.0},
    {"sinks": True},
    {"sliding_window": 6, "softcap": 2.0, "sinks": True},
]


def with_sinks(options: dict[str, Any], case: Case) -> dict[str, Any]:
    sinks = torch.linspace(-1, 3, case.q.shape[1]).to(case.q.dtype)
    return {**options, "sinks": sinks} if options.get("sinks") else options


@BACKENDS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 3), (14, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_mixed_batch_equals_brute_force(
    backend: Any, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    case = make_case(
        mixed_rows(block_size), heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, padding=3
    )
    out = attend(backend, case)
    assert out.dtype == dtype
    assert_close(out, brute_force(case), TOLERANCE[dtype])
    assert not out[case.meta.num_tokens :].any()


@BACKENDS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_equal_brute_force(backend: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(mixed_rows(8), heads=(9, 3), dtype=dtype, padding=2)
    options = with_sinks(options, case)
    assert_close(attend(backend, case, **options), brute_force(case, **options), TOLERANCE[dtype])


@BACKENDS
def test_one_plan_serves_layers_that_differ(backend: Any) -> None:
    case = make_case(mixed_rows(8))
    plan = backend.plan(case.meta)
    for window in (None, 6, 3, None, 6):
        out = run(backend, plan, case, sliding_window=window)
        assert_close(out, brute_force(case, sliding_window=window), 1e-5)


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"sinks": True}], ids=str)
def test_query_that_sees_nothing_yields_zero(backend: Any, options: dict[str, Any]) -> None:
    case = make_case([(1, 0), (3, 1), (0, 5), (4, 2)], poison=float("nan"))
    out = attend(backend, case, **with_sinks(options, case))
    assert_close(out, brute_force(case, **with_sinks(options, case)), 1e-5)
    assert not out[[0, 1, 2, 4, 5]].any()


@BACKENDS
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9}, {"softcap": 2.0, "sliding_window": 300}], ids=str
)
def test_long_prompts_and_unlike_lengths(backend: Any, options: dict[str, Any]) -> None:
    """Long enough for sdpa to split the queries into blocks and the decode rows into groups."""
    case = make_case([(300, 700), (1, 1400), (1, 3), (1, 650), (270, 270), (1, 5)], heads=(2, 1))
    assert_close(attend(backend, case, **options), brute_force(case, **options), 1e-5)


def test_sdpa_gathers_little_padding() -> None:
    rows = [(1, 1 + length) for length in range(0, 3000, 100)]
    case = make_case(rows, heads=(1, 1), head_dim=8)
    plan = sdpa.plan(case.meta)
    run(sdpa, plan, case)
    decodes = plan.layouts[None].decodes
    real = sum(length for _, length in rows)
    assert real <= sum(len(decode.slots) for decode in decodes) <= real + sdpa.GROUP_PADDING * len(decodes)
    assert len(decodes) < len(rows)


@BACKENDS
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("options", [{}, *OPTIONS[1:2], OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e5m2], ids=str)
def test_poisoned_pool_does_not_leak(
    backend: Any, poison: float, options: dict[str, Any], kv_dtype: torch.dtype
) -> None:
    clean, dirty = (
        make_case(mixed_rows(8), kv_dtype=kv_dtype, padding=3, poison=value) for value in (0.0, poison)
    )
    assert not dirty.k_cache.float().isfinite().all()
    out = attend(backend, dirty, **with_sinks(options, dirty))
    assert out.isfinite().all()
    assert torch.equal(out, attend(backend, clean, **with_sinks(options, clean)))


@BACKENDS
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("garbage", [3.0, 3e38, float("nan")], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS[:2], OPTIONS[-1]], ids=str)
def test_blocks_that_left_the_window_are_not_read(
    backend: Any, garbage: float, options: dict[str, Any], kv_dtype: torch.dtype
) -> None:
    """They are given back, and the scratch block stands for them in the table."""
    case = make_case([(1, 40), (5, 40), (1, 3)], poison=garbage, kv_dtype=kv_dtype)
    options = with_sinks(options, case)
    want = attend(backend, case, **options)
    tables = case.meta.block_tables.clone()
    for row, (queries, length) in enumerate(zip(case.meta.query_lens, case.meta.seq_lens, strict=True)):
        oldest = max(0, length - queries - options["sliding_window"] + 1)
        tables[row, : oldest // 8] = SCRATCH
    assert (tables == SCRATCH).sum() > (case.meta.block_tables == SCRATCH).sum()
    freed = replace(case, meta=replace(case.meta, block_tables=tables))
    out = attend(backend, freed, **options)
    assert torch.equal(out, want)
    assert_close(out, brute_force(case, **options), 1e-5)


@BACKENDS
def test_idle_row_reads_its_table_whatever_it_writes(backend: Any) -> None:
    case = make_case(mixed_rows(8))
    idle = replace(case, meta=replace(case.meta, slot_mapping=torch.zeros_like(case.meta.slot_mapping)))
    assert torch.equal(attend(backend, idle), attend(backend, case))


@BACKENDS
@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=str)
def test_decode_row_equals_the_row_alone(backend: Any, options: dict[str, Any]) -> None:
    case = make_case([(1, length) for length in (70, 3, 64, 65, 200)], heads=(9, 3))
    together = attend(backend, case, **with_sinks(options, case))
    for row in range(5):
        alone = attend(backend, only(case, row), **with_sinks(options, case))
        assert_close(alone[0], together[row], 1e-6)


@BACKENDS
@pytest.mark.parametrize("name", KV_DTYPES)
def test_storage_dtypes(backend: Any, name: str) -> None:
    case = make_case(mixed_rows(8), kv_dtype=KV_DTYPES[name])
    assert_close(attend(backend, case), brute_force(case), 1e-5)


@BACKENDS
def test_zero_keys_in_fp8_are_finite(backend: Any) -> None:
    case = make_case([(1, 9), (4, 12)], kv_dtype=torch.float8_e4m3fn)
    fill(case.k_cache, 0.0)
    want = brute_force(replace(case, keys=[torch.zeros_like(k) for k in case.keys]))
    assert_close(attend(backend, case), want, 1e-5)


@BACKENDS
def test_offsets_past_int32(backend: Any) -> None:
    """known-failures H3; numpy's zeros are lazy, so 4 GiB of cache cost the few pages that are touched."""
    near = make_case([(1, 32), (20, 32)], heads=(8, 8), head_dim=128, block_size=16, dtype=torch.float16)
    k_cache, v_cache = (torch.from_numpy(np.zeros((131073 * 16, 8, 128), np.float16)) for _ in range(2))
    table = torch.tensor([[131071, 131072]])
    for row, lengths in enumerate([(1, 32), (20, 32)]):
        k, v = near.keys[row].half(), near.values[row].half()
        write_kv(k, v, k_cache, v_cache, all_slots(table[0].tolist(), 32, 16))
        want = only(near, row)
        far = replace(want, meta=make_meta([lengths], table, 16), k_cache=k_cache, v_cache=v_cache)
        assert torch.equal(attend(backend, far), attend(backend, want))
    assert not k_cache[131070 * 16 : 131071 * 16].any()
    assert not k_cache[:16].any()


ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None, database=None)
@given(
    rows=ROWS,
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    block_size=st.sampled_from([1, 3, 8]),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.just(3.0),
    sinks=st.booleans(),
    seed=st.integers(0, 9),
)
def test_sdpa_equals_reference(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    shape: dict[str, Any] = {"heads": heads, "head_dim": 16, "block_size": block_size}
    case = make_case(rows, padding=1, poison=float("nan"), seed=seed, **shape)
    options = with_sinks({"sliding_window": window, "softcap": softcap, "sinks": sinks or None}, case)
    want = reference.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=SCALE, **options)
    assert_close(attend(sdpa, case, **options), want, 1e-5)
