"""One run from a checked configuration to the table on screen and the directory on disk."""

from __future__ import annotations

import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvengine
from kvengine.analysis.bound import bound_line
from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.analysis.table import print_summary
from kvengine.assemble import Blueprint, blueprint
from kvengine.core.errors import KvEngineError, RequestError
from kvengine.core.plan import RequestOutput
from kvengine.engine.driver import Driver, DriverReport
from kvengine.engine.engine import Engine
from kvengine.policies import Tokenizer
from kvengine.registry import KINDS, Registry
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.run_directory import RunDirectory
from kvengine.telemetry.spans import RunFacts, write_spans

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

MAX_REJECTIONS_SHOWN = 5


class Run:
    """Runs one variant. `path` is where its directory will be."""

    def __init__(self, config: Mapping[str, Any], registry: Registry, path: Path) -> None:
        self._config = config
        self._plan: Blueprint = blueprint(config, registry)
        self._directory = RunDirectory(path) if self._plan.telemetry.record else None
        self._recorder = ColumnRecorder(self._directory)
        self._console = Console()
        self._tokenizer: Tokenizer | None = None
        self._times: dict[str, float] = {"startup_s": kvengine.seconds_since_start()}
        self._facts = PoolFacts(
            num_blocks=self._plan.kv.num_blocks,
            block_size=self._plan.kv.block_size,
            max_num_seqs=self._plan.limits.max_num_seqs,
        )

    def execute(self) -> int:
        """Load, drive, report; the exit code. KvEngineError when the run cannot start or go on."""
        began = time.perf_counter()
        engine = self._plan.engine(self._recorder)
        self._times["load_s"] = time.perf_counter() - began
        self._write_run("running")
        status, error = "failed", None
        try:
            report = self._drive(engine)
            status = "interrupted" if report.interrupted else "complete"
            self._show_rejections(report.rejected)
        except KvEngineError as problem:
            error = problem
        finally:
            self._leave(engine, status)
            engine.close()
        if error is not None:
            raise error
        if self._directory and self._directory.problem:
            return EXIT_FAILED
        return EXIT_INTERRUPTED if status == "interrupted" else EXIT_OK

    def _drive(self, engine: Engine) -> DriverReport:
        workload = self._plan.workload
        with _interrupts() as interrupted, _progress(workload.num_requests) as advance:
            return Driver(
                engine,
                workload,
                on_outputs=lambda outputs: self._take(outputs, advance),
                on_rejected=lambda problem: advance(1),
                interrupted=interrupted,
            ).run()

    def _take(self, outputs: list[RequestOutput], advance: Any) -> None:
        if outputs and "first_token_s" not in self._times:
            self._times["first_token_s"] = kvengine.seconds_since_start()
        for output in outputs:
            if output.finish_reason is not None:
                advance(1 / output.sequence.request.sampling.n)
                self._keep_output(output)

    def _keep_output(self, output: RequestOutput) -> None:
        if self._directory is None:
            return
        seq = output.sequence
        ids = seq.token_ids[seq.num_prompt_tokens :]
        content = {
            "request_id": seq.request.id,
            "choice": seq.choice,
            "finish_reason": output.finish_reason,
            "num_prompt_tokens": seq.num_prompt_tokens,
            "token_ids": ids,
        }
        if seq.request.prompt is not None:
            self._tokenizer = self._tokenizer or self._plan.model.tokenizer()
            content |= {"prompt": seq.request.prompt, "text": self._tokenizer.decode(ids)}
        self._directory.write_output(content)

    def _show_rejections(self, rejected: list[RequestError]) -> None:
        for problem in rejected[:MAX_REJECTIONS_SHOWN]:
            self._console.print(f"refused: {problem}", markup=False, soft_wrap=True)
        if len(rejected) > MAX_REJECTIONS_SHOWN:
            self._console.print(f"refused: {len(rejected) - MAX_REJECTIONS_SHOWN} more; all are in requests")

    def _leave(self, engine: Engine, status: str) -> None:
        """Record the unfinished, print the figures, complete the directory."""
        now = engine.clock.now()
        for seq in engine.live_sequences():
            self._recorder.finished(seq, now)
        self._recorder.flush()
        tables = self._recorder.tables()
        summary = summarize(tables, self._facts)
        print_summary(self._console, summary, self._title(status))
        self._console.print(bound_line(tables), markup=False, soft_wrap=True)
        self._console.print(self._time_line(), markup=False, soft_wrap=True)
        if self._directory is None:
            return
        spans = None
        if self._plan.telemetry.spans and self._directory.problem is None:
            spans = self._write_spans(tables, epoch_unix_ns=time.time_ns() - now)
        self._write_run(status, summary=summary, spans=spans)
        if self._directory.problem:
            what = f"recording stopped, {self._directory.path} is incomplete: {self._directory.problem}"
        else:
            what = f"recorded in {self._directory.path}"
        self._console.print(what, markup=False, soft_wrap=True)

    def _write_spans(self, tables: dict[str, Any], epoch_unix_ns: int) -> dict[str, Any] | None:
        assert self._directory
        facts = RunFacts(
            run_id=self._directory.path.name,
            model=self._plan.model.name,
            version=kvengine.__version__,
            epoch_unix_ns=epoch_unix_ns,
            policies={kind: self._config[kind]["name"] for kind in KINDS if kind != "model"},
            max_step_spans=self._plan.telemetry.max_step_spans,
            step_span_interval=self._plan.telemetry.step_span_interval,
        )
        try:
            return write_spans(self._directory.path / "spans.jsonl", tables, facts)
        except OSError as error:
            self._directory.problem = error
            return None

    def _title(self, status: str) -> str:
        chosen = {kind: self._config[kind]["name"] for kind in ("scheduler", "allocator", "executor")}
        words = [f"model={self._plan.model.name}", *(f"{k}={v}" for k, v in chosen.items())]
        words.append(f"kv={self._plan.kv.dtype}")
        return " ".join(words) + ("" if status == "complete" else f"  ({status})")

    def _time_line(self) -> str:
        first = self._times.get("first_token_s")
        said = "none" if first is None else f"{first:.2f} s after the command"
        return (
            f"Start-up {self._times['startup_s']:.2f} s, model load {self._times['load_s']:.2f} s, "
            f"first token {said}."
        )

    def _write_run(self, status: str, **more: Any) -> None:
        if self._directory is not None:
            self._directory.write_run(
                {
                    "status": status,
                    "kvengine": kvengine.__version__,
                    "started_unix_s": round(time.time() - kvengine.seconds_since_start(), 3),
                    "config": dict(self._config),
                    "model": self._plan.model.name,
                    "pool": {
                        "num_blocks": self._plan.kv.num_blocks,
                        "block_size": self._plan.kv.block_size,
                        "dtype": self._plan.kv.dtype,
                    },
                    "limits": {
                        "max_num_seqs": self._plan.limits.max_num_seqs,
                        "max_num_batched_tokens": self._plan.limits.max_num_batched_tokens,
                        "max_model_len": self._plan.limits.max_model_len,
                    },
                    "times": self._times,
                    "machine": {"system": platform.platform(), "processor": platform.machine()},
                    "versions": {"python": platform.python_version(), **_versions()},
                    **more,
                }
            )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "hydra-core", "pyarrow")}


@contextmanager
def _interrupts() -> Iterator[Any]:
    """Ctrl-C sets a flag that is read between steps; a second one interrupts at once."""
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr, if that is a terminal."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda amount: progress.advance(task, amount)
