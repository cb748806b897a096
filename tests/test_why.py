"""One request's life: parts that sum to its latency to the nanosecond, the reasons against a diary of every plan,
what is printed, and what happens to a mistake."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine import launch
from kvengine.analysis.timeline import STALLED_BY_PREFILLS, WAITING_FOR_PROMPT, Part, Timeline
from kvengine.analysis.waits import NOT_RECORDED, Cause, Waits, _Stops
from kvengine.analysis.why import explain, lines_of
from kvengine.cli import main
from kvengine.core.decision import Action, Decision
from kvengine.core.errors import RequestError
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.reasons import Reason, Refusal, Verdict
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.recording import NullRecorder, PoolState
from kvengine.policies import Mechanism, Preemption
from kvengine.registry import Registry, discover
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.run_directory import RunDirectory, read_tables
from kvengine.telemetry.tables import SCHEMAS, columns
from kvengine.testing.engines import TestEngine
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission

MS = 1_000_000
QUICK = ["executor=null", "workload=synthetic", "workload.num_requests=8", "model=checksum", "num_blocks=40"]


class Choosy(WholePromptAdmission):
    """Refuses for good whose id says so, and lets all others precede whose id says that, while anybody else is
    there."""

    def refuses(self, seq: Sequence, view: Any) -> Refusal | None:
        if seq.state is SequenceState.WAITING and not seq.deferred and any(view.running):
            if seq.request.id.startswith("late"):
                return Refusal(Reason.DEADLINE, "5 ms too late", Verdict.DEFER)
            if seq.request.id.startswith("never"):
                return Refusal(Reason.DEADLINE, "9 ms too late", Verdict.REFUSE)
        return super().refuses(seq, view)


class SwapPreemption(Preemption):
    def mechanism(self, victim: Sequence) -> Mechanism:
        return Mechanism.SWAP


def registry() -> Registry:
    found = discover()
    found.add("admission", "choosy", lambda config, build: Choosy(), summary="of this test")
    found.add("preemption", "swapping", lambda config, build: SwapPreemption(), summary="of this test")
    return found


class Diary(NullRecorder):
    """Every plan as it was told, idle ones too: its time and its decisions."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, list[Decision]]] = []

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        self.idle(plan)

    def idle(self, plan: StepPlan) -> None:
        self.plans.append((plan.now_ns, list(plan.decisions)))


class Tee:
    """Tells several recorders the same."""

    def __init__(self, *recorders: Any) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> Any:
        calls = [getattr(recorder, name) for recorder in self._recorders]
        return lambda *told: [call(*told) for call in calls]


class Recorded:
    """An engine with a recorder and a diary, driven by hand."""

    def __init__(self, sink: Any = None, *, by_priority: bool = False, **settings: Any) -> None:
        """`by_priority`: of three requests in a row each is more urgent than the one before."""
        self._by_priority = by_priority
        self.test_engine = TestEngine(registry=registry(), **settings)
        self.recorder = ColumnRecorder(sink)
        self.diary = Diary()
        tee: Any = Tee(self.test_engine.log, self.recorder, self.diary)
        self.test_engine.engine.recorder = tee

    @property
    def tables(self) -> dict[str, pa.Table]:
        self.recorder.flush()
        return self.recorder.tables()

    def run(self, work: list[tuple[int, str, int, int, int]], aborts: dict[int, str]) -> Timeline:
        """Add each of `work` (step, id, prompt, new tokens, choices) before that step, abort at others; then finish.

        They arrived an odd number of ns before, so that no plan was made at that moment.
        """
        engine, clock = self.test_engine.engine, self.test_engine.engine.clock
        last = max([step for step, *_ in work] + [*aborts, 0])
        for step in range(last + 1):
            for number, (at, request_id, prompt, new, n) in enumerate(work):
                if at == step:
                    arrived = clock.now() - (min(number * 123_457, 9 * MS) if step else 0)
                    self._add(request_id, range(7 * number, 7 * number + prompt), new, n, arrived)
            if step in aborts:
                engine.abort(aborts[step])
            self.test_engine.step()
        self.test_engine.run()
        return Timeline(self.tables)

    def _add(self, request_id: str, prompt: range, new: int, n: int, arrival_ns: int) -> None:
        request = Request(
            id=request_id,
            prompt_token_ids=tuple(token % 250 for token in prompt),
            sampling=SamplingParams(max_tokens=new, temperature=0.0, n=n),
            arrival_ns=arrival_ns,
            priority=-(prompt.start % 3) if self._by_priority else 0,
        )
        self.test_engine.engine.add_request(request)


def check_sums(timeline: Timeline) -> None:
    """The parts follow each other from arrival to finish, and every part is the sum of its shares."""
    for (request_id, choice), life in timeline.lives.items():
        parts = timeline.parts((request_id, choice))
        row = life.request
        assert parts[0].begin_ns == row["arrival_ns"]
        assert all(before.end_ns == after.begin_ns for before, after in pairwise(parts))
        if row["finished_ns"] is not None:
            assert parts[-1].end_ns == row["finished_ns"]
            assert sum(part.ns for part in parts) == row["finished_ns"] - row["arrival_ns"]
        for part in parts:
            assert sum(share.ns for share in part.shares) == part.ns, (request_id, part)
            assert all(share.ns > 0 and type(share.ns) is int for share in part.shares)
            assert all(part.begin_ns <= share.first_ns < part.end_ns for share in part.shares)
        assert [part.preemption is not None for part in parts] == [
            part.phase == "preempted" for part in parts
        ]


def expected_reasons(diary: Diary, seq_id: str, begin: int, end: int, preempted: bool) -> dict[str, int]:
    """The reasons of a wait, plan by plan from the diary: for the rule see kvengine.analysis.waits."""
    found: dict[str, int] = defaultdict(int)
    moments = [now for now, _ in diary.plans]
    first = next((i for i, now in enumerate(moments) if now >= begin), len(moments))
    found[Reason.STEP_IN_PROGRESS] += min([*moments[first : first + 1], end]) - begin
    if preempted:
        first = max(i for i, now in enumerate(moments) if now == begin)
    deferred = False
    for i in range(first, len(moments)):
        if moments[i] >= end:
            break
        until = min([*moments[i + 1 : i + 2], end])
        own = [d for d in diary.plans[i][1] if d.seq is not None and d.seq.id == seq_id]
        refused = [d.reason for d in own if d.action in (Action.REFUSE, Action.REJECT)]
        refused = sorted(reason for reason in refused if reason is not Reason.NO_SWAP_SPACE)
        stated = [d.reason for d in diary.plans[i][1] if d.action is Action.STOP]
        deferred = deferred or any(d.action is Action.DEFER for d in own)
        rest = (
            [Reason.DEADLINE] if deferred else [*stated, Reason.PREEMPTED_FOR if i == first else NOT_RECORDED]
        )
        found[[*refused, *rest][0]] += until - moments[i]
    return {reason: ns for reason, ns in found.items() if ns}


def check_reasons(run: Recorded, timeline: Timeline) -> None:
    """Of every first choice; the others wait for its prompt."""
    for (request_id, choice), life in timeline.lives.items():
        if choice:
            continue
        name = f"{request_id}/0" if request_id.startswith("many") else request_id
        for part in timeline.waits((request_id, choice)):
            found = {share.name: share.ns for share in part.shares}
            preempted = part.phase == "preempted"
            assert found == expected_reasons(run.diary, name, part.begin_ns, part.end_ns, preempted), (
                life,
                part,
            )


PRESSED = {"num_blocks": 9, "block_size": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"policies": {"scheduler": "chunked"}, "max_num_batched_tokens": 6, **PRESSED},
    "continuous": {"policies": {"scheduler": "continuous"}, "max_num_seqs": 3, **PRESSED},
    "choosy": {"policies": {"scheduler": "continuous", "admission": "choosy"}, "max_num_seqs": 2, **PRESSED},
    "swapping": {"policies": {"scheduler": "chunked", "preemption": "swapping"}, "num_host_blocks": 3, **PRESSED},
    "static": {"policies": {"scheduler": "static"}, "settings": {"scheduler": {"max_wait_s": 0.033}},
               "max_num_seqs": 3, **PRESSED},
    "contiguous": {"policies": {"allocator": "contiguous_max"}, "num_blocks": 24, "block_size": 4,
                   "max_model_len": 32},
    "mlfq": {"policies": {"scheduler": "mlfq"}, "settings": {"scheduler": {"quantum": 1, "levels": 3}},
             "max_num_seqs": 2, "by_priority": True, **PRESSED},
    "slo_refuse": {"policies": {"admission": "slo"}, "settings": {"admission": {"ttft_ms": 15.0}},
                   "max_num_seqs": 2, **PRESSED},
    "slo_defer": {"policies": {"admission": "slo"}, "settings": {"admission": {"ttft_ms": 15.0, "late": "defer"}},
                  "max_num_seqs": 2, **PRESSED},
    "priority": {"policies": {"queue": "priority", "victim": "lowest_priority", "preemption": "swap"},
                 "max_num_seqs": 2, "num_host_blocks": 5, "by_priority": True, **PRESSED},
    "never": {"policies": {"admission": "reserve_worst_case", "preemption": "never"}, "num_blocks": 12,
              "block_size": 4},
}  # fmt: skip
WORK = st.lists(
    st.tuples(
        st.integers(0, 12), st.sampled_from(["r", "late", "never", "many"]), st.integers(1, 12), st.integers(1, 9)
    ),
    min_size=1,
    max_size=9,
)  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=12, deadline=None)
@given(work=WORK, aborts=st.dictionaries(st.integers(0, 14), st.integers(0, 8), max_size=2))
def test_every_nanosecond_of_every_request_is_accounted_for(
    name: str, work: list[tuple[int, str, int, int]], aborts: dict[int, int]
) -> None:
    named = [
        (step, f"{kind}{i}", prompt, new, 2 if kind == "many" else 1)
        for i, (step, kind, prompt, new) in enumerate(work)
    ]
    run = Recorded(**SETTINGS[name])
    timeline = run.run(named, {step: named[i % len(named)][1] for step, i in aborts.items()})
    check_sums(timeline)
    check_reasons(run, timeline)


def shares(part: Part) -> list[tuple[str, str, int]]:
    return [(share.name, share.detail, share.ns // MS) for share in part.shares]


def story(parts: list[Part]) -> list[tuple[str, list[tuple[str, str, int]]]]:
    return [(part.phase, shares(part)) for part in parts]


# ---- lives worked out by hand: every step takes 10 ms


def test_a_life_with_a_stall_and_a_wait() -> None:
    """One seat more than `c` finds; `b`'s prefill in step 2 stalls `a`, whose last token comes in step 4."""
    run = Recorded(policies={"scheduler": "continuous"}, max_num_seqs=2)
    timeline = run.run([(0, "a", 4, 4, 1), (2, "b", 4, 3, 1), (3, "c", 4, 1, 1)], {})
    assert story(timeline.parts(("a", 0))) == [
        ("queued", []),
        ("prefill", [("computed", "", 10)]),
        ("decode", [("computed", "", 30), (STALLED_BY_PREFILLS, "", 10)]),
    ]
    [queued, *_] = timeline.parts(("c", 0))
    arrival = timeline.lives["c", 0].request["arrival_ns"]
    assert queued.begin_ns == arrival == 30 * MS - 2 * 123_457
    assert [(s.name, s.ns) for s in queued.shares] == [
        (Reason.STEP_IN_PROGRESS, 2 * 123_457),
        (Reason.MAX_NUM_SEQS, 20 * MS),
    ]


def test_a_life_with_a_preemption() -> None:
    """D1 of the known failures: two prompts of 8 tokens, 8 new ones each, in 6 blocks of 4."""
    run = Recorded(policies={"scheduler": "continuous"}, num_blocks=6, block_size=4)
    timeline = run.run([(0, "a", 8, 8, 1), (0, "b", 8, 8, 1)], {})
    assert story(timeline.parts(("b", 0)))[:4] == [
        ("queued", []),
        ("prefill", [("computed", "", 10)]),
        ("decode", [("computed", "", 40)]),
        (
            "preempted",
            [(Reason.AFTER_PREEMPTION, "", 10), ("NO_BLOCKS", "4 needed, 2 free, 0 of them promised", 20)],
        ),
    ]
    gone = timeline.parts(("b", 0))[3].preemption
    assert gone is not None
    assert (gone.step, gone.beneficiary, gone.policy, gone.reason) == (
        5,
        "a",
        "latest_arrival",
        "PREEMPTED_FOR",
    )
    assert (gone.num_blocks_freed, gone.num_tokens_lost, gone.swapped) == (3, 12, False)
    assert (gone.num_free_before, gone.num_free_after) == (0, 3)


def test_deferred_until_it_enters_and_refused_for_good() -> None:
    """`late` asks in step 1 and lets `b` go first; in step 2 it is alone, and there is no seat for it until `a` has
    its last token. `never` ends with the step in which it asks."""
    run = Recorded(**SETTINGS["choosy"])
    late, never, b = ((1, name, 4, 2, 1) for name in ("late", "never", "b"))
    timeline = run.run([(0, "a", 4, 3, 1), late, never, b], {})
    assert timeline.lives["never", 0].request["status"] == "refused"
    asked = (Reason.STEP_IN_PROGRESS, "", 0)
    assert story(timeline.parts(("never", 0))) == [("queued", [asked, ("DEADLINE", "9 ms too late", 10)])]
    reasons = [asked, ("DEADLINE", "5 ms too late", 10), ("MAX_NUM_SEQS", "", 10)]
    assert story(timeline.parts(("late", 0)))[0] == ("queued", reasons)


def test_choices_wait_for_the_prompt_that_they_share() -> None:
    """Of 3 chunks; with one seat the second choice waits for it after that as well."""
    for seats, last in ((4, ("queued", [(WAITING_FOR_PROMPT, "many/0", 20)])), (1, None)):
        run = Recorded(max_num_seqs=seats, max_num_batched_tokens=4)
        parts = run.run([(0, "many", 10, 3, 2)], {}).parts(("many", 1))
        if last is not None:
            assert story(parts)[0] == last
        else:
            assert story(parts)[0] == (
                "queued",
                [(WAITING_FOR_PROMPT, "many/0", 30), ("MAX_NUM_SEQS", "", 20)],
            )


def test_a_batch_that_forms_and_one_that_is_held() -> None:
    """`a` waits 33 ms for company, has its token after 10 ms and is handed over with the batch, which `b` ends."""
    run = Recorded(**SETTINGS["static"])
    timeline = run.run([(0, "a", 4, 1, 1), (0, "b", 4, 4, 1)], {})
    assert story(timeline.parts(("a", 0))) == [
        ("queued", [(Reason.BATCH_FORMING, "", 33)]),
        ("prefill", [("computed", "", 10)]),
        ("decode", [("held", "", 30)]),
    ]


def test_of_two_plans_at_one_moment_the_later_one_holds() -> None:
    """A plan that takes no time refuses `a` for one reason, the next one for another; a plan without it ends it."""

    def decision(
        first: int, last: int, begin: int, end: int, action: str, reason: str, key: str | None
    ) -> tuple:
        of = (key, 0) if key else (None, None)
        return (first, last, begin * MS, end * MS, *of, action, reason, "", "", 0, 0, 0, 0, 0, 0)

    rows = [
        decision(0, 1, 0, 10, "refuse", "NO_BLOCKS", "a"),
        decision(2, 2, 10, 10, "refuse", "MAX_NUM_SEQS", "a"),
        decision(3, 5, 20, 40, "stop", "BATCH_DRAINING", None),
        decision(6, 6, 40, 40, "stop", "POLICY", None),
    ]
    starts = [0, 10, 10, 20, 30, 40, 40, 60]
    pool = PoolState(*[0] * 9)
    steps = [(i, at * MS, at * MS, *[0] * 9, *pool, 0, 0, 0) for i, at in enumerate(starts)]
    tables = {name: columns(name, []) for name in SCHEMAS}
    tables |= {"steps": columns("steps", steps), "decisions": columns("decisions", rows)}
    waits = Waits(tables)
    found = waits.queued(("a", 0), 0, 70 * MS)
    assert [(s.name, s.first_ns // MS, s.ns // MS) for s in found] == [
        ("NO_BLOCKS", 0, 10),
        ("MAX_NUM_SEQS", 10, 10),
        ("BATCH_DRAINING", 20, 20),
        ("POLICY", 40, 20),
        (NOT_RECORDED, 60, 10),
    ]
    other = waits.queued(("b", 0), 5 * MS, 35 * MS)
    assert [(s.name, s.ns // MS) for s in other] == [
        (Reason.STEP_IN_PROGRESS, 15), ("BATCH_DRAINING", 15)
    ]  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from("XYZ")), max_size=12),
    st.integers(-5, 40),
    st.integers(-5, 40),
)
def test_what_was_stated_for_all_is_summed_as_if_moment_by_moment(
    stops: list[tuple[int, int, str]], begin: int, end: int
) -> None:
    stops = sorted({begin: (begin, length, name) for begin, length, name in stops}.values())
    at = {}
    for start, length, name in stops:
        following = min((other for other, _, _ in stops if other > start), default=99)
        for moment in range(start, min(start + length, following)):
            at[moment] = name
    expected: dict[str, list[int]] = defaultdict(list)
    for moment in range(begin, end):
        expected[at.get(moment, "else")].append(moment)
    told = _Stops([(start, start + length, Cause(name)) for start, length, name in stops])
    found = {share.name: (share.first_ns, share.ns) for share in told.shares(begin, end, Cause("else"))}
    assert found == {name: (moments[0], len(moments)) for name, moments in expected.items()}


# ---- the command


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight requests of two choices each."""
    path = tmp_path_factory.mktemp("traces") / "2026-12-01_10-00-00"
    assert main([*QUICK, "scheduler=chunked", "workload.sampling.n=2", f"hydra.run.dir={path}"]) == 0
    return path


@pytest.fixture
def recorded(one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It, as the only run in traces/ of where we are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(one_run, tmp_path / "traces" / one_run.name)
    return Path("traces") / one_run.name


class TestCommand:
    def why(self, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        capsys.readouterr()
        assert main(["why", *words]) == 0
        return capsys.readouterr().out

    def test_by_name_by_path_and_the_latest(self, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said = {self.why(capsys, where, "r3") for where in ("latest", recorded.name, str(recorded))}
        assert len(said) == 1
        [text] = said
        assert [line.split(":")[0] for line in text.splitlines() if line[0] != " "] == ["r3", "r3/1"]
        assert self.why(capsys, "latest", "r3/1") == text[text.index("r3/1:") :]

    def test_json_holds_parts_that_sum_to_the_latency(
        self, recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for number in range(8):
            said = json.loads(self.why(capsys, "latest", f"r{number}", "--json"))
            assert [choice["choice"] for choice in said["choices"]] == [0, 1]
            for choice in said["choices"]:
                latency = choice["finished_ns"] - choice["arrival_ns"]
                assert sum(part["ns"] for part in choice["parts"]) == choice["latency_ns"] == latency

    @pytest.mark.parametrize(
        ("words", "begins", "says"),
        [
            ("", "why=:", "takes RUN and REQUEST"),
            ("latest", "why=latest:", "takes RUN and REQUEST"),
            ("latest r3 more", "why=latest r3 more:", "takes RUN and REQUEST"),
            ("nowhere r3", "run=nowhere:", "no recorded run"),
            ("20 r3", "run=20:", "no recorded run"),
            ("latest r33", "request=r33:", "did you mean 'r3'"),
            ("latest r3/2", "request=r3/2:", "did you mean 'r3'"),
            ("latest zzz", "request=zzz:", "8 are recorded"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, words: str, begins: str, says: str, recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        assert main(["why", *words.split()]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"error: {begins}")
        assert says in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""

    def test_a_mistyped_run_has_a_nearest_name(
        self, recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        assert main(["why", recorded.name[:-2], "r3"]) == 2
        assert f"did you mean '{recorded.name}'" in capsys.readouterr().err

    def test_a_sweep_is_no_run_and_its_variants_are(
        self, recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for variant in "01":
            shutil.copytree(recorded, Path("traces/sweep_1") / variant)
        assert main(["why", "sweep_1", "r3"]) == 2
        assert "as in sweep_1/0" in capsys.readouterr().err
        assert self.why(capsys, "sweep_1/1", "r3").startswith("r3: ")

    def test_a_killed_run_tells_of_those_that_ended(
        self, recorded: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its parts: a run that goes on after its tables were flushed, and is never told that it ended."""
        directory = RunDirectory(Path("traces/killed"))
        directory.write_run({"status": "running"})
        run = Recorded(directory, **SETTINGS["chunked"])
        run.test_engine.add("short", range(8), 2)
        run.test_engine.add("long", range(8), 9)
        while "short" not in run.test_engine.finish_reasons:
            run.test_engine.step()
        run.recorder.flush()
        run.test_engine.step()
        assert "finished: length" in self.why(capsys, "killed", "short")
        assert main(["why", "killed", "long"]) == 2
        assert "1 are recorded" in capsys.readouterr().err
        shutil.rmtree("traces/killed/requests")
        assert main(["why", "killed", "short"]) == 2
        assert "no request of this run was recorded" in capsys.readouterr().err

    def test_a_broken_file_is_one_line(self, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (recorded / "steps" / "00000.parquet").write_bytes(b"nothing of the kind")
        capsys.readouterr()
        assert main(["why", "latest", "r3"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_killed_run_accounts_for_as_much_as_it_recorded(tmp_path: Path) -> None:
    """Whatever steps and refusals are missing at the end, what is there still adds up."""
    run = Recorded(RunDirectory(tmp_path), **SETTINGS["chunked"])
    run.run([(i // 2, f"r{i}", 8, 6, 1) for i in range(7)], {})
    whole = read_tables(tmp_path)
    for kept in range(0, len(whole["steps"]), 3):
        last = int(whole["steps"]["start_ns"][kept].as_py())
        early = [i for i, moment in enumerate(whole["decisions"]["time_ns"].to_pylist()) if moment <= last]
        part = {"steps": whole["steps"].slice(0, kept + 1), "decisions": whole["decisions"].take(early)}
        timeline = Timeline({**whole, **part})
        for key in timeline.lives:
            for item in timeline.parts(key):
                assert sum(share.ns for share in item.shares) == item.ns


POLICIES = {"victim": "latest_arrival", "scheduler": "continuous"}


def said_of(run: Recorded, name: str) -> str:
    return "\n".join(line for choice in explain(run.tables, name) for line in lines_of(choice, POLICIES))


def test_what_is_printed() -> None:
    run = Recorded(policies={"scheduler": "continuous"}, num_blocks=6, block_size=4)
    with pytest.raises(RequestError):
        run.test_engine.add("huge", range(200), 200)
    run.run([(0, "a", 8, 8, 1), (0, "b", 8, 8, 1)], {})
    assert said_of(run, "b") == (
        "b: 8 prompt tokens, 8 output tokens, 110.0 ms in all\n"
        "  +0.000 s  queued 0 s\n"
        "  +0.000 s  prefill 8 tokens in 1 step, 10.0 ms\n"
        "  +0.010 s  decode 4 more tokens, 40.0 ms\n"
        "  +0.050 s  preempted at step 5 for a (victim=latest_arrival, 3 blocks freed, 12 tokens to compute again), "
        "waited 30.0 ms (10.0 ms AFTER_PREEMPTION; 20.0 ms NO_BLOCKS 4 needed, 2 free, 0 of them promised)\n"
        "  +0.080 s  prefill 5 tokens in 1 step, 10.0 ms\n"
        "  +0.090 s  decode 2 more tokens, 20.0 ms\n"
        "  +0.110 s  finished: length"
    )
    assert said_of(run, "huge").startswith("huge: rejected when it came: NEVER_FITS: ")


def test_what_is_printed_of_a_swap() -> None:
    run = Recorded(policies={"preemption": "swapping"}, num_blocks=6, block_size=4, num_host_blocks=6)
    run.run([(0, "a", 8, 8, 1), (0, "b", 8, 8, 1)], {})
    assert "swapped out at step 5 for a (victim=latest_arrival, " in said_of(run, "b")
    assert "12 tokens in 3 blocks moved to the host), waited " in said_of(run, "b")


def test_that_the_host_was_full_is_no_reason_of_a_wait() -> None:
    """It says how the sequence left: its KV was dropped."""
    run = Recorded(policies={"preemption": "swapping"}, num_blocks=6, block_size=4, num_host_blocks=1)
    timeline = run.run([(0, "a", 8, 8, 1), (0, "b", 8, 8, 1)], {})
    assert Reason.NO_SWAP_SPACE in run.tables["decisions"]["reason"].to_pylist()
    [gone] = [part for part in timeline.parts(("b", 0)) if part.preemption]
    assert gone.preemption is not None
    assert not gone.preemption.swapped
    assert Reason.NO_SWAP_SPACE not in {share.name for share in gone.shares}


def test_what_is_printed_of_ends_that_are_not_the_usual_one() -> None:
    run = Recorded(**SETTINGS["choosy"])
    run.run([(0, "a", 4, 9, 1), (1, "never", 4, 2, 1), (2, "b", 4, 9, 1)], {4: "b"})
    assert said_of(run, "never").endswith("refused for good")
    assert said_of(run, "b").endswith("aborted")
