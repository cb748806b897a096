"""workload=azure: lengths and times as the trace has them to the nanosecond, repeatable prompts, bad lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_workloads import EOS, StubModel, make, refused

TINY = str(Path(__file__).parent / "azure_tiny.csv")
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST = "2023-11-16 18:17:03.9799600,374,44"


def azure(**options: Any) -> Any:
    return make("azure", **{"path": TINY, **options})


def trace(name: str) -> str:
    path = DATA / f"azure2023_{name}.csv"
    if not path.exists():
        pytest.skip(f"{path} is absent: the published traces lie beside the checkout, not in it")
    return str(path)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(*lines: str, end: str = "\r\n") -> str:
        (tmp_path / "trace.csv").write_bytes(end.join(lines).encode())
        return str(tmp_path / "trace.csv")

    return write_file


def test_a_small_trace_by_hand() -> None:
    workload = azure()
    assert (workload.num_requests, workload.concurrency, workload.knows_lengths) == (3, None, True)
    requests = list(workload.requests())
    assert [r.id for r in requests] == ["line-2", "line-3", "line-4"]
    assert [len(r.prompt_token_ids) for r in requests] == [374, 396, 20]
    assert [r.known_output_tokens for r in requests] == [44, 1, 7]
    assert [r.arrival_ns for r in requests] == [0, 100, 1_020_040_000]
    assert not any(EOS in r.prompt_token_ids for r in requests)
    assert len(set(requests[0].prompt_token_ids)) > 100
    assert list(workload.requests()) == requests
    assert list(azure(engine_seed=1).requests()) != requests == list(azure(engine_seed=1, seed=0).requests())
    assert requests[:2] == list(azure(num_requests=2).requests())


def test_rate_arrival_and_limits() -> None:
    assert [r.arrival_ns for r in azure(rate_scale=4.0).requests()] == [0, 25, 255_010_000]
    assert [r.arrival_ns for r in azure(arrival="all_at_once").requests()] == [0, 0, 0]
    assert azure(concurrency=2).concurrency == 2
    assert [r.max_new_tokens for r in azure(sampling={"max_tokens": 7}).requests()] == [7, 1, 7]


def test_line_ends_fractions_and_blank_lines_do_not_matter(write: Any) -> None:
    lines = (HEADER, "2024-02-29 23:59:59,1,2", "", "2024-03-01 00:00:00.5,3,4", "")
    for end in ("\r\n", "\n"):
        requests = list(azure(path=write(*lines, end=end)).requests())
        assert [r.arrival_ns for r in requests] == [0, 1_500_000_000]
        assert [r.id for r in requests] == ["line-2", "line-4"]


@pytest.mark.parametrize(("line", "problem"), [
    ("2023-11-16 18:17:04,374", "'2023-11-16 18:17:04,374' has 2 columns and not 3, like 2023-11-16 18:15:46"),
    ("2023-11-16 18:17:04,374,44,5", "'2023-11-16 18:17:04,374,44,5' has 4 columns and not 3"),
    ("1700158623,374,44", "TIMESTAMP='1700158623': must be a time like 2023-11-16 18:15:46.6805900"),
    ("2023-13-16 18:17:04,374,44", "TIMESTAMP='2023-13-16 18:17:04': month must be in 1..12"),
    ("2023-11-16 18:17:03.9,374,44", "TIMESTAMP goes back in time, -0.07996 s after 0 s: sort the file"),
    ("2023-11-16 18:17:04,0,44", "ContextTokens='0': must be between 1 and 10,000,000"),
    ("2023-11-16 18:17:04,374,0", "GeneratedTokens='0': must be between 1 and 10,000,000"),
    ("2023-11-16 18:17:04,374,-4", "GeneratedTokens='-4': must be a whole number"),
    ("2023-11-16 18:17:04,374,", "GeneratedTokens='': must be a whole number"),
    ("2023-11-16 18:17:04,37.5,44", "ContextTokens='37.5': must be a whole number"),
    (HEADER, "TIMESTAMP='TIMESTAMP': must be a time"),
])  # fmt: skip
def test_a_bad_line_is_refused_with_file_and_line(write: Any, line: str, problem: str) -> None:
    path, model = write(HEADER, FIRST, line), StubModel()
    error = refused("azure", path=path, model=model)
    assert (error.key, error.value, model.num_loads) == ("workload.path", path, 0)
    assert error.problem.startswith(f"line 3: {problem}")
    assert azure(path=path, num_requests=1).num_requests == 1


def test_a_file_without_its_header_or_requests(write: Any) -> None:
    expected = f"line 1: must be the header {HEADER}, not {FIRST!r}"
    assert refused("azure", path=write(FIRST)).problem == expected
    assert refused("azure", path=write(HEADER)).problem == "there is no request in it"


@pytest.mark.parametrize(("options", "key"), [
    ({"path": None}, "path"), ({"path": "nowhere.csv"}, "path"), ({"num_requests": 4}, "num_requests"),
    ({"num_requests": 0}, "num_requests"), ({"rate_scale": 0.0}, "rate_scale"), ({"arrival": "poisson"}, "arrival"),
    ({"rate_scale": 2.0, "concurrency": 1}, "rate_scale"),
    ({"rate_scale": 2.0, "arrival": "all_at_once"}, "rate_scale"),
    ({"sampling": {"stop_token_ids": [1]}}, "sampling.stop_token_ids"),
])  # fmt: skip
def test_settings_that_cannot_work(options: dict[str, Any], key: str) -> None:
    assert refused("azure", **{"path": TINY, **options}).key == f"workload.{key}"


@pytest.mark.parametrize(("name", "count", "last_s", "mean_in", "mean_out"), [
    ("conv", 19_366, 3501, 1155, 211), ("code", 8_819, 3435, 2048, 28),
])  # fmt: skip
def test_the_published_traces_have_the_published_figures(
    name: str, count: int, last_s: int, mean_in: int, mean_out: int
) -> None:
    workload = azure(path=trace(name))
    assert workload.num_requests == count
    rows = list(workload._file)
    assert rows[-1]["arrival_ns"] / 1e9 == pytest.approx(last_s, abs=1)
    assert sum(row["ContextTokens"] for row in rows) / count == pytest.approx(mean_in, abs=0.5)
    assert sum(row["GeneratedTokens"] for row in rows) / count == pytest.approx(mean_out, abs=0.5)
