"""One run from a checked configuration to the table on screen and the directory on disk."""

from __future__ import annotations

import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvengine
from kvengine.analysis.bound import bound_line
from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.analysis.table import print_summary, stdout
from kvengine.assemble import Blueprint, blueprint
from kvengine.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, KvEngineError, RequestError
from kvengine.core.plan import RequestOutput
from kvengine.core.reasons import FinishReason
from kvengine.core.sequence import Sequence
from kvengine.engine.driver import Driver, DriverReport
from kvengine.engine.engine import Engine
from kvengine.policies import Tokenizer
from kvengine.progress import Progressing, progressing
from kvengine.registry import KINDS, Registry
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.run_directory import RunDirectory
from kvengine.telemetry.spans import RunFacts, write_spans

MAX_REJECTIONS_SHOWN = 5
SAMPLE_WIDTH = 120


class Run:
    """Runs one variant. `path` is where its directory will be; `began` is when its command (or its turn in a
    sweep) began, in s of kvengine.seconds_since_start; `fetch_s` is what fetching the model took since."""

    def __init__(
        self,
        config: Mapping[str, Any],
        registry: Registry,
        path: Path,
        *,
        began: float = 0.0,
        fetch_s: float = 0.0,
    ) -> None:
        self._config = config
        self._plan: Blueprint = blueprint(config, registry)
        self._directory = RunDirectory(path) if self._plan.telemetry.record else None
        self._recorder = ColumnRecorder(self._directory)
        self._console = stdout()
        self._tokenizer_used: Tokenizer | None = None
        self._report = DriverReport()
        self._sample: str | None = None
        self._sample_size = 0
        self._began = began
        startup_s = kvengine.seconds_since_start() - began - fetch_s
        self._times: dict[str, float] = {"startup_s": startup_s, "fetch_s": fetch_s}
        self._facts = PoolFacts(
            num_blocks=self._plan.kv.num_blocks,
            block_size=self._plan.kv.block_size,
            block_bytes=self._plan.kv.block_bytes,
            max_num_seqs=self._plan.limits.max_num_seqs,
        )

    def execute(self) -> int:
        """Load, drive, report; the exit code. KvEngineError when the run cannot start or go on."""
        next(iter(self._plan.workload.requests()), None)  # what is wrong with its texts shows before the load
        for note in self._plan.notes:
            print(f"note: {note}", file=sys.stderr)
        began = time.perf_counter()
        engine = self._plan.engine(self._recorder)
        self._times["load_s"] = time.perf_counter() - began
        self._write_run("running")
        status, error = "failed", None
        try:
            report = self._drive(engine)
            status = "interrupted" if report.interrupted else "complete"
        except KeyboardInterrupt:
            status = "interrupted"
        except KvEngineError as problem:
            error = problem
        finally:
            self._show_rejections(self._report.rejected)
            with _no_interrupts():
                summary = self._leave(engine, status)
            engine.close()
        if error is not None:
            raise error
        if status == "interrupted":
            return EXIT_INTERRUPTED
        incomplete = self._directory is not None and self._directory.problem is not None
        turned_away = self._report.rejected or summary["num_refused"]
        served_nobody = bool(turned_away) and not summary["num_finished"]
        return EXIT_FAILED if incomplete or served_nobody else EXIT_OK

    def _drive(self, engine: Engine) -> DriverReport:
        workload = self._plan.workload
        with (
            _interrupts() as interrupted,
            progressing(workload.num_requests, self._tokenizer) as progress,
        ):
            driver = Driver(
                engine,
                workload,
                on_outputs=lambda outputs: self._take(outputs, progress),
                on_rejected=lambda problem: progress.advance(1),
                interrupted=interrupted,
            )
            self._report = driver.report  # kept here, so that a run that fails can say whom it refused
            return driver.run()

    def _take(self, outputs: list[RequestOutput], progress: Progressing) -> None:
        if outputs and "first_token_s" not in self._times:
            self._times["first_token_s"] = kvengine.seconds_since_start() - self._began
        progress.show(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                progress.advance(1 / output.sequence.request.sampling.n)
                self._keep_output(output.sequence)

    def _tokenizer(self) -> Tokenizer:
        if self._tokenizer_used is None:
            self._tokenizer_used = self._plan.model.tokenizer()
        return self._tokenizer_used

    def _keep_output(self, seq: Sequence) -> None:
        """Add what `seq` got, finished or not, to the outputs."""
        ids = seq.token_ids[seq.num_prompt_tokens :]
        content: dict[str, Any] = {
            "request_id": seq.request.id,
            "choice": seq.choice,
            "finish_reason": seq.finish_reason,
            "num_prompt_tokens": seq.num_prompt_tokens,
            "num_cached_tokens": seq.num_cached_tokens,
            "token_ids": ids,
        }
        prompt = seq.request.prompt
        if prompt is not None:
            text = self._tokenizer().decode(ids)
            content |= {"prompt": prompt, "text": text}
            if len(ids) > self._sample_size and seq.finish_reason is FinishReason.STOP:
                self._sample_size, self._sample = (
                    len(ids),
                    f"{seq.id}: {_short(prompt)!r} -> {_short(text)!r}",
                )
        if self._directory is not None:
            self._directory.write_output(content)

    def _show_rejections(self, rejected: list[RequestError]) -> None:
        for problem in rejected[:MAX_REJECTIONS_SHOWN]:
            self._console.print(f"refused: {problem}", markup=False, soft_wrap=True)
        if len(rejected) > MAX_REJECTIONS_SHOWN:
            self._console.print(f"refused: {len(rejected) - MAX_REJECTIONS_SHOWN} more; all are in requests")

    def _leave(self, engine: Engine, status: str) -> dict[str, Any]:
        """Record the unfinished, complete the directory, print the figures and return them."""
        now = engine.clock.now()
        epoch_unix_ns = time.time_ns() - now
        for seq in engine.live_sequences():
            self._recorder.finished(seq, now)
            if seq.num_output_tokens:
                self._keep_output(seq)
        self._recorder.flush()
        tables = self._recorder.tables()
        if self._directory is not None:
            for name, table in tables.items():
                self._directory.write_whole(name, table)
        summary = summarize(tables, self._facts, self._plan.slo)
        self._write_run(status, summary=summary)
        print_summary(self._console, summary, self._title(status))
        for line in (bound_line(tables), self._time_line(), self._sample and f"For example {self._sample}"):
            if line:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._directory is not None:
            self._add_spans(self._directory, tables, summary, status, epoch_unix_ns)
        return summary

    def _add_spans(
        self,
        directory: RunDirectory,
        tables: dict[str, Any],
        summary: dict[str, Any],
        status: str,
        epoch_unix_ns: int,
    ) -> None:
        """Add spans.jsonl and its counts to the directory, and say where it is, or what is missing."""
        if self._plan.telemetry.spans and directory.problem is None:
            spans = self._write_spans(directory, tables, epoch_unix_ns)
            self._write_run(status, summary=summary, spans=spans)
        if directory.problem:
            what = f"recording stopped, {directory.path} is incomplete: {directory.problem}"
        else:
            what = f"Recorded in {directory.path}"
        self._console.print(what, markup=False, highlight=False, soft_wrap=True)

    def _write_spans(
        self, directory: RunDirectory, tables: dict[str, Any], epoch_unix_ns: int
    ) -> dict[str, Any] | None:
        facts = RunFacts(
            run_id=self._run_id(),
            model=self._plan.model.name,
            version=kvengine.__version__,
            epoch_unix_ns=epoch_unix_ns,
            policies={kind: self._config[kind]["name"] for kind in KINDS if kind != "model"},
            max_step_spans=self._plan.telemetry.max_step_spans,
            step_span_interval=self._plan.telemetry.step_span_interval,
        )
        try:
            return write_spans(directory.path / "spans.jsonl", tables, facts)
        except OSError as error:
            directory.problem = error
            return None

    def _run_id(self) -> str:
        """The directory's name; a variant of a sweep has its sweep's before it."""
        path = self._directory.path if self._directory else Path("unrecorded")
        return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name

    def _title(self, status: str) -> str:
        chosen = {kind: self._config[kind]["name"] for kind in ("scheduler", "allocator", "executor")}
        words = [f"model={self._plan.model.name}", *(f"{k}={v}" for k, v in chosen.items())]
        words.append(f"kv={self._plan.kv.dtype}")
        words.append(f"prefix_cache={'on' if self._plan.context.allocator.caches else 'off'}")
        return " ".join(words) + ("" if status == "complete" else f"  ({status})")

    def _time_line(self) -> str:
        first = self._times.get("first_token_s")
        said = "none" if first is None else f"{first:.2f} s after the command"
        fetched = (
            f"fetching the model {self._times['fetch_s']:.2f} s, " if self._times["fetch_s"] > 0.5 else ""
        )
        return (
            f"Start-up {self._times['startup_s']:.2f} s, {fetched}model load {self._times['load_s']:.2f} s, "
            f"first token {said}."
        )

    def _write_run(self, status: str, **more: Any) -> None:
        if self._directory is not None:
            self._directory.write_run(
                {
                    "run_id": self._run_id(),
                    "status": status,
                    "kvengine": kvengine.__version__,
                    "started_unix_s": round(time.time() - kvengine.seconds_since_start(), 3),
                    "config": dict(self._config),
                    "model": self._plan.model.name,
                    "pool": asdict(self._plan.kv),
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
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C waits, and says so: what was recorded is being written whole."""

    def wait(signum: int, frame: Any) -> None:
        print("writing the record; a moment", file=sys.stderr)

    before = signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def _short(text: str) -> str:
    """One line of at most SAMPLE_WIDTH characters."""
    words = " ".join(text.split())
    return words if len(words) <= SAMPLE_WIDTH else words[:SAMPLE_WIDTH] + "..."
