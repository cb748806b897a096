"""The command line as a user meets it: one line for a mistake, tables and directories for a run."""

from __future__ import annotations

import errno
import json
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvengine import launch
from kvengine.cli import main
from kvengine.core.errors import ModelError
from kvengine.core.reasons import Refusal
from kvengine.core.sequence import Sequence
from kvengine.models import smollm2
from kvengine.policies import SchedulingView
from kvengine.registry import discover
from kvengine.run import Run
from kvengine.telemetry.run_directory import read_tables
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission

QUICK = ["executor=null", "workload=synthetic", "workload.num_requests=6", "model=checksum"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs land in tmp_path/traces, as they do for someone who installed the wheel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")


def recorded(tmp_path: Path) -> list[Path]:
    traces = tmp_path / "traces"
    return sorted(traces.iterdir()) if traces.exists() else []


MISTAKES = [
    ("scheduler=contineous", "scheduler=contineous:", "did you mean 'continuous'"),
    ("schedular=static", "schedular=static:", "did you mean 'scheduler'"),
    ("executor=nul", "executor=nul:", "did you mean 'null'"),
    ("model=smollm", "model=smollm:", "did you mean 'smollm2-135m'"),
    ("scheduler=1", "scheduler=1:", "choices: chunked"),
    ("kv=16", "kv=16:", "choices: auto"),
    ("allocator=null", "allocator=null:", "choices: best_fit"),
    ("prefix_cache=onn", "prefix_cache=onn:", "did you mean 'on'"),
    ("prefix_cache.host_bandwidth=0", "prefix_cache.host_bandwidth=0", "positive number"),
    ("prefix_cache.offload=true", "prefix_cache.offload=True:", "engine.swap_space_bytes"),
    ("prefix_cache=on allocator=contiguous_max", "prefix_cache=on:", "take allocator=paged"),
    ("preemption=swap", "preemption=swap:", "set engine.swap_space_bytes"),
    ("preemption=auto num_host_blocks=0", "preemption=auto:", "set engine.swap_space_bytes"),
    ("preemption=auto preemption.host_bandwidth=0", "preemption.host_bandwidth=0", "positive number"),
    ("preemption=auto preemption.recompute_rate=-1", "preemption.recompute_rate=-1", "positive number"),
    ("preemption=never", "preemption=never:", "take admission=reserve_worst_case"),
    ("workload=tree allocator=first_fit", "workload=tree:", "take allocator=paged"),
    ("workload=tree scheduler=static", "workload=tree:", "take scheduler.deliver=token"),
    (
        "workload=chat workload.num_sesions=5",
        "workload.num_sesions=5:",
        "did you mean 'workload.num_sessions'",
    ),
    ("workload=chat workload.num_requests=5", "workload.num_requests=5:", "choices: workload.arrival"),
    ("experiment=fragmentaton", "experiment=fragmentaton:", "did you mean 'fragmentation'"),
    ("debug.integrity=maybe", "debug.integrity=maybe:", "true or false"),
    ("num_host_blocks=-1", "engine.num_host_blocks=-1:", "at least 0"),
    ("max_num_seqs=0", "engine.max_num_seqs=0:", "at least 1"),
    ("max_num_seqs=-3", "engine.max_num_seqs=-3:", "at least 1"),
    ("max_num_seqs=many", "engine.max_num_seqs=many:", "whole number"),
    ("max_num_seqs=null", "engine.max_num_seqs=null:", "whole number"),
    ("max_num_batched_tokens=0", "engine.max_num_batched_tokens=0:", "at least 1"),
    ("max_num_batched_tokens=-1", "engine.max_num_batched_tokens=-1:", "at least 1"),
    ("max_model_len=0", "engine.max_model_len=0:", "at least 1"),
    ("max_model_len=9000", "engine.max_model_len=9000:", "8192"),
    ("gpu_memory_utilization=1.5", "engine.gpu_memory_utilization=1.5:", "at most 1"),
    ("block_size=0", "kv.block_size=0:", "at least 1"),
    ("block_size=-4", "kv.block_size=-4:", "at least 1"),
    ("num_blocks=0", "engine.num_blocks=0:", "at least 1"),
    ("num_blocks=8 kv_memory_bytes=9", "engine.num_blocks=8:", "not both"),
    ("num_host_blocks=-1", "engine.num_host_blocks=-1:", "at least 0"),
    ("swap_space_bytes=-1", "engine.swap_space_bytes=-1:", "at least 0"),
    ("swap_space_bytes=9 num_host_blocks=9", "engine.num_host_blocks=9:", "not both"),
    ("swap_space_bytes=1000", "engine.swap_space_bytes=1000:", "368640"),
    ("num_host_blocks=1000000000", "engine.num_host_blocks=1000000000:", "at most"),
    ("num_host_blocks=60000000", "engine.num_host_blocks=60000000:", "this machine has"),
    ("num_blocks=1000000000", "engine.num_blocks=1000000000:", "at most"),
    ("num_blocks=60000000", "engine.num_blocks=60000000:", "this machine has"),
    ("kv_memory_bytes=1000", "engine.kv_memory_bytes=1000:", "368640"),
    ("kv=fp9", "kv=fp9:", "did you mean 'fp8'"),
    ("kv.dtype=bf61", "kv.dtype=bf61:", "did you mean 'bf16'"),
    ("kv.blocksize=4", "kv.blocksize=4:", "did you mean 'kv.block_size'"),
    ("max_num_batched_tokens=100", "engine.max_num_batched_tokens=100:", "max_model_len=2048"),
    (
        "enable_chunked_prefill=true scheduler=static",
        "engine.enable_chunked_prefill=True:",
        "scheduler=chunked",
    ),
    ("enable_chunked_prefill=false scheduler=chunked", "engine.enable_chunked_prefill=False:", "continuous"),
    ("enable_chunked_prefill=maybe", "engine.enable_chunked_prefill=maybe:", "true or false"),
    ("allocator=contiguous_max num_blocks=100", "allocator=contiguous_max:", "max_model_len"),
    ("workload=jsonl", "workload.path=null:", ""),
    ("workload.path=nowhere.jsonl", "workload.path=nowhere.jsonl:", "No such file"),
    ("workload.sampling.temperature=-1", "workload.sampling.temperature=-1.0:", "positive"),
    ("workload.sampling.stop_token_ids=5", "workload.sampling.stop_token_ids=5:", "must be a list"),
    ("workload.sampling.stop_token_ids='5,6'", "workload.sampling.stop_token_ids=5,6:", "must be a list"),
    ("model.path=a=b", "model.path=a=b:", "quote"),
    ("scheduler=static,chunked", "scheduler=static,chunked:", "-m"),
    ("-m scheduler=static,contineous", "scheduler=contineous:", "did you mean 'continuous'"),
    ("-m max_num_seqs=4,0", "engine.max_num_seqs=0:", "at least 1"),
    ("engine=3", "engine=3:", "group"),
    ("+extra=1", "extra=1:", "no such group"),
    ("~scheduler", "scheduler: ", "names no scheduler"),
    ("workload=???", "workload", ""),
    ("model.path=no/such-model", "model.path=no/such-model:", "no such directory"),
    ("model=hf", "model.path=null:", "directory"),
    ("model=checksum", "model=checksum:", "executor=null"),
    ("executor.device=cuda", "executor.device=cuda:", "auto, cpu"),
    ("plugin", "command=plugin:", "did you mean 'plugins'"),
    ("pull", "pull=:", "name one model"),
    ("foo=bar", "foo=bar:", "scheduler"),
    ("scheduler=static foo", "command=foo:", "KEY=VALUE"),
    ("=5", "command==5:", "KEY=VALUE"),
    ("--hlep", "flag=--hlep:", "did you mean '--help'"),
    ("-m scheduler=static -r", "flags: ", "--multirun"),
    ("-m max_num_seqs=interval(1,3)", "engine.max_num_seqs=", "a,b"),
    ("-m scheduler=static,chunked hydra.sweep.subdir=abc", "hydra.sweep.subdir", "number"),
    ("workload.path=", "workload.path=:", "names no file"),
    ("model.path=", "model.path=:", "directory"),
    ("executor=null executor.step_ms=1e-9", "executor.step_ms=1e-09:", "1e-6"),
    ("workload=synthetic workload.num_requests=1e99", "workload.num_requests=", "100,000,000"),
    ("pull smolm2-135m", "model=smolm2-135m:", "did you mean 'smollm2-135m'"),
]


@pytest.mark.parametrize(("words", "begins", "says"), MISTAKES, ids=[words for words, _, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str, begins: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {begins}")
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert recorded(tmp_path) == []


def test_a_bad_line_of_a_prompts_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    assert main(["workload.path=p.jsonl"]) == 2
    assert "p.jsonl" in (said := capsys.readouterr().err)
    assert "line 2" in said


def test_booleans_as_users_write_them() -> None:
    for word in ("1", "yes", "on", "true"):
        assert main([*QUICK, f"telemetry.record={word}", "telemetry.spans=off"]) == 0


def test_a_run_prints_its_table_and_leaves_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(QUICK) == 0
    said = capsys.readouterr().out
    for label in (
        "6 finished", "prompt tokens", "output tokens", "duration", "tok/s", "TTFT", "TPOT", "ITL", "queue time",
        "KV held / pool", "KV held / owned", "KV pool", "seats taken", "steps", "preemptions", "Bound by",
        "Start-up", "first token",
    ):  # fmt: skip
        assert label in said, label
    (run,) = recorded(tmp_path)
    assert f"Recorded in {run}" in said
    content = json.loads((run / "run.json").read_text())
    assert content["status"] == "complete"
    assert content["config"]["scheduler"]["name"] == "continuous"
    assert content["spans"]["num_dropped"] == 0
    tables = read_tables(run)
    assert len(tables["requests"]) == 6
    assert len((run / "outputs.jsonl").read_text().splitlines()) == 6
    assert len(tables["steps"]) == content["summary"]["num_steps"]


def test_static_shows_its_waste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "scheduler=static"]) == 0
    said = capsys.readouterr().out
    assert "of row-steps computed for nothing" in said
    assert "padding tokens" in said


def test_a_sweep_ends_with_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "scheduler=static,chunked", "allocator=contiguous_max,paged"]
    assert main([*QUICK, *words, "max_model_len=1024"]) == 0
    table = capsys.readouterr().out.split("All variants")[1]
    assert "with executor=null workload=synthetic" in table
    assert table.count("scheduler=static") == 2
    assert table.count("allocator=paged") == 2
    (sweep,) = recorded(tmp_path)
    assert sorted(p.name for p in sweep.iterdir() if p.is_dir()) == ["0", "1", "2", "3"]


def test_one_failed_variant_does_not_stop_the_sweep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Run.execute

    def fails_for_static(run: Run) -> int:
        if run._config["scheduler"]["name"] == "static":
            raise ModelError("it burnt down")
        return whole(run)

    monkeypatch.setattr(Run, "execute", fails_for_static)
    assert main([*QUICK, "-m", "scheduler=static,chunked"]) == 1
    said = capsys.readouterr()
    assert "error: it burnt down" in said.err
    assert "failed" in said.out.split("All variants")[1]


def test_alias_picks_the_scheduler(tmp_path: Path) -> None:
    assert main([*QUICK, "enable_chunked_prefill=true", "block_size=4"]) == 0
    (run,) = recorded(tmp_path)
    config = json.loads((run / "run.json").read_text())["config"]
    assert config["scheduler"]["name"] == "chunked"
    assert config["kv"]["block_size"] == 4


def test_a_request_that_cannot_fit_is_refused_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"id": "long", "prompt_token_ids": [1] * 50, "max_tokens": 100},
        {"id": "empty", "prompt": ""},
        {"id": "zero", "prompt": "a", "max_tokens": 0},
        {"id": "negative", "prompt": "a", "max_tokens": -1},
        {"id": "good", "prompt": "abc", "max_tokens": 3},
    ]
    (tmp_path / "w.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["workload=jsonl", "workload.path=w.jsonl", "executor=null", "model=checksum", "max_model_len=64"]
    assert main(words) == 0
    said = capsys.readouterr().out
    for name in ("long", "empty", "zero", "negative"):
        assert f"refused: request '{name}'" in said
    assert "1 finished, 4 rejected" in said


def test_ctrl_c_keeps_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    take = Run._take

    def interrupt_at_third(run: Run, outputs: list, progress: object) -> None:
        nonlocal taken
        taken += 1
        if taken == 3:
            signal.raise_signal(signal.SIGINT)
        take(run, outputs, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "_take", interrupt_at_third)
    assert main(QUICK) == 130
    assert "(interrupted)" in capsys.readouterr().out
    (run,) = recorded(tmp_path)
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    tables = read_tables(run)
    assert len(tables["steps"]) == 3
    assert set(tables["requests"]["status"].to_pylist()) <= {"unfinished", "finished"}
    assert len(tables["requests"]) == 6


def test_ctrl_c_ends_a_sweep_with_the_table_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "_take", lambda *a: signal.raise_signal(signal.SIGINT))
    assert main([*QUICK, "-m", "scheduler=static,chunked"]) == 130
    table = capsys.readouterr().out.split("All variants")[1]
    assert "interrupted" in table
    assert "1 of 2 variants were not started" in table


def test_a_full_disk_is_said_and_the_figures_stay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    assert main(QUICK) == 1
    said = capsys.readouterr().out
    assert "6 finished" in said
    assert "No space left on device" in said


def test_an_empty_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([""]) == 2
    assert capsys.readouterr().err.startswith("error: command=:")


def test_two_runs_never_share_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*QUICK, f"hydra.run.dir={tmp_path / 'mine'}"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 2
    assert "is not empty" in capsys.readouterr().err
    assert len((tmp_path / "mine" / "outputs.jsonl").read_text().splitlines()) == 6
    sweep = [*QUICK, "-m", f"hydra.sweep.dir={tmp_path / 'many'}", "scheduler=static,chunked"]
    assert main(sweep) == 0
    assert sorted(path.name for path in (tmp_path / "many").iterdir() if path.is_dir()) == ["0", "1"]


def test_a_directory_may_be_named_by_hydra(tmp_path: Path) -> None:
    assert main([*QUICK, f"hydra.run.dir={tmp_path}/${{hydra.job.name}}"]) == 0
    assert (tmp_path / "kvengine" / "run.json").is_file()


def test_config_dir_and_globs_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own" / "scheduler"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("name: static\nbatch_size: 2\nmax_wait_s: 0.0\ndeliver: token\n")
    assert main(["--config-dir", str(tmp_path / "own"), *QUICK, "scheduler=mine"]) == 0
    assert main([*QUICK, "-m", "scheduler=glob(c*)"]) == 0
    assert "scheduler=continuous" in capsys.readouterr().out.split("All variants")[1]


def test_what_has_no_effect_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "gpu_memory_utilization=0.5"]) == 0
    assert capsys.readouterr().err.startswith("note: engine.gpu_memory_utilization is unused")


def test_a_run_without_record_writes_nothing(tmp_path: Path) -> None:
    assert main([*QUICK, "telemetry.record=false"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_spans_are_written_leaves_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_write_spans", interrupted)
    assert main(QUICK) == 130
    (run,) = recorded(tmp_path)
    content = json.loads((run / "run.json").read_text())
    assert content["status"] == "complete"
    assert content["summary"]["num_finished"] == 6


def test_a_policy_that_raises_ends_a_run_by_name_and_keeps_what_was_recorded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two seats and six requests: the admission policy is asked for the fourth when one of the first three ended."""
    whole = WholePromptAdmission.refuses

    def refuses(self: WholePromptAdmission, seq: Sequence, view: SchedulingView) -> Refusal | None:
        if seq.order == 3:
            raise ValueError("lost count")
        return whole(self, seq, view)

    monkeypatch.setattr(WholePromptAdmission, "refuses", refuses)
    assert main([*QUICK, "max_num_seqs=2"]) == 1
    said = capsys.readouterr()
    line = re.fullmatch(
        r"error: admission=whole_prompt \(WholePromptAdmission\), step (\d+), <(\S+) WAITING 0/\d+ tokens>: "
        r"raised ValueError: lost count\n",
        said.err,
    )
    assert line, said.err
    assert "(failed)" in said.out
    (run,) = recorded(tmp_path)
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    tables = read_tables(run)
    assert tables["steps"]["step"].to_pylist() == list(range(int(line[1])))
    status = dict(
        zip(*(tables["requests"][name].to_pylist() for name in ("request_id", "status")), strict=True)
    )
    assert len(status) == 6
    assert status[line[2]] == "unfinished"
    assert "finished" in status.values()
    assert (run / "spans.jsonl").exists()


def test_a_run_that_served_nobody_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "num_blocks=1", "block_size=1"]) == 1
    assert "0 finished, 6 rejected" in capsys.readouterr().out


def test_a_narrow_terminal_gets_paragraphs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main([*QUICK, "-m", "scheduler=static,chunked"]) == 0
    assert "  tok/s: " in capsys.readouterr().out.split("All variants")[1]


def test_an_unwritable_place_for_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").write_text("a file is in the way")
    assert main(QUICK) == 1
    assert capsys.readouterr().err.startswith("error: no run directory can be made in")


def test_without_the_default_model_tiny_goes_on_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Path:
        raise ModelError("nobody has it")

    monkeypatch.setattr(smollm2, "ensure_smollm2", gone)
    monkeypatch.setattr(launch, "_unavailable", [])
    words = ["workload.num_requests=2", "workload.sampling.max_tokens=2", "telemetry.record=false"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err == "warning: going on with model=tiny, the default model cannot be had: nobody has it\n"
    assert "model=tiny" in said.out
    assert main([*words, "model=smollm2-135m"]) == 2
    assert capsys.readouterr().err == "error: nobody has it\n"


def test_plugins_lists_kind_name_summary_and_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("scheduler") and " static " in line)
    assert "longest member ends" in row
    assert row.rstrip().endswith("kvengine 0.1.0")


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [("workload", "synthetic", "requests per second"), ("scheduler", "serial", "at_once: 1")],
)
def test_plugins_shows_the_settings_of_one(
    kind: str, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name not in discover().names(kind):
        pytest.skip(f"{kind}={name} is not installed: pip install ./plugins/examples/serial")
    assert main(["plugins", kind, name]) == 0
    assert says in capsys.readouterr().out
    assert main(["plugins", kind, "nothing"]) == 2


def test_help_lists_groups_options_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "scheduler: chunked, continuous" in said
    for limit in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "kv_memory_bytes"):
        assert limit in said


def test_a_checksum_run_gives_the_golden_tokens(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"id": "g", "prompt_token_ids": [1, 2, 3], "max_tokens": 3}\n')
    words = ["workload=jsonl", "workload.path=w.jsonl", "executor=null", "model=checksum"]
    assert main(words) == 0
    (run,) = recorded(tmp_path)
    output = json.loads((run / "outputs.jsonl").read_text())
    assert output["token_ids"] == [20, 104, 127]
    assert output["finish_reason"] == "length"
