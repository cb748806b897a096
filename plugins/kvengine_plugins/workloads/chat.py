"""Conversations: sessions of several turns, each with all that was said before, and pauses between them.

With one turn per session it is a stream of requests that share system prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvengine.core.errors import ConfigError
from kvengine.core.plan import RequestOutput
from kvengine.core.reasons import FinishReason
from kvengine.core.request import Request, SamplingParams
from kvengine.policies import Build, Workload
from kvengine.workloads.arrivals import (
    NS_PER_S,
    ArrivalConfig,
    arrival_times,
    check_counts,
    chosen_seed,
    random_stream,
)
from kvengine.workloads.lengths import LONGEST, LengthConfig, lengths
from kvengine_plugins.workloads.parts import (
    check_no_stop_tokens,
    check_range,
    check_sampling,
    plain_vocabulary,
)

MAX_SESSIONS = 1_000_000
MAX_THINK_TIME_S = 1e6
FOUR_TURNS = LengthConfig(distribution="fixed", mean=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """`num_sessions` of so many `turns` (a number drawn per session); `seed` of all that is drawn (null:
    engine.seed); `system_prompt_len` tokens before every session's first turn, of which there are
    `num_system_prompts` different ones, taken in turn, as are `tenants` (0: none); each turn adds `user_len` tokens
    to the conversation and gets `output_len`; the next follows after an exponential pause of mean
    `think_time_s`; `arrival` of sessions, or `concurrency` for a closed loop, in which pauses are kept;
    `sampling` of every request, whose `max_tokens` caps outputs. With several choices the first one goes on.
    """

    num_sessions: int = 16
    seed: int | None = None
    turns: LengthConfig = FOUR_TURNS
    system_prompt_len: int = 64
    num_system_prompts: int = 1
    user_len: LengthConfig = field(default_factory=LengthConfig)
    output_len: LengthConfig = field(default_factory=LengthConfig)
    think_time_s: float = 1.0
    tenants: int = 0
    arrival: ArrivalConfig = field(default_factory=ArrivalConfig)
    concurrency: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        check_counts(None, self.concurrency, self.arrival)
        check_range("num_sessions", self.num_sessions, 1, MAX_SESSIONS)
        check_range("system_prompt_len", self.system_prompt_len, 0, LONGEST)
        check_range("num_system_prompts", self.num_system_prompts, 1, MAX_SESSIONS)
        check_range("think_time_s", self.think_time_s, 0, MAX_THINK_TIME_S)
        check_range("tenants", self.tenants, 0, MAX_SESSIONS)
        for name in ("turns", "user_len", "output_len"):
            getattr(self, name).check(f"workload.{name}")
        check_no_stop_tokens(self.sampling, "chat")


@dataclass(slots=True)
class _Session:
    """One conversation under way: `turn` is the number of turns asked so far."""

    ordinal: int
    num_turns: int
    user_lens: Iterator[int]
    output_lens: Iterator[int]
    pauses_ns: Iterator[int]
    turn: int = 0


class ChatWorkload(Workload):
    """Turn k of session s is `s.tk`, both from 0: all tokens of the turns before, those generated included.

    The first turn is clipped to max_model_len, first its output and then the user's part; a session ends
    early when its next turn does not fit, and when one is refused, so num_requests is the most there can be.
    Every session and purpose has a random stream of its own. ConfigError for a system prompt that leaves no
    room for a user's token and a new one.
    """

    knows_lengths = True
    reacts = True

    def __init__(self, config: ChatConfig, build: Build) -> None:
        assert build.model is not None
        assert build.limits is not None
        check_sampling(config.sampling, build)
        self._max_model_len = build.limits.max_model_len
        if config.system_prompt_len + 2 > self._max_model_len:
            problem = (
                f"leaves no room for a user's token and a new one in max_model_len={self._max_model_len}"
            )
            raise ConfigError("workload.system_prompt_len", config.system_prompt_len, problem)
        self._config = config
        self._seed = chosen_seed(build.seed if config.seed is None else config.seed)
        self._vocabulary = plain_vocabulary(build.model.shape())
        self._asked: dict[str, _Session] = {}
        """Sessions whose turn of that id is unfinished."""
        self.concurrency = config.concurrency
        self.num_requests = sum(islice(self._turn_counts(), config.num_sessions))

    def requests(self) -> Iterator[Request]:
        """The first turn of each session, as it is asked for; starts all sessions anew."""
        self._asked.clear()
        arrivals, turns = arrival_times(self._config.arrival, self._seed), self._turn_counts()
        for ordinal in range(self._config.num_sessions):
            session = self._session(ordinal, next(turns))
            first = self._turn(session, self._system_prompt(ordinal), next(arrivals))
            assert first is not None
            yield first

    def after(self, output: RequestOutput, now_ns: int) -> Iterable[Request]:
        """The next turn, when the first choice of one has ended."""
        if output.finish_reason is None or output.choice:
            return ()
        session = self._asked.pop(output.request_id, None)
        if session is None or output.finish_reason is FinishReason.ABORT:
            return ()
        spoken = tuple(output.sequence.token_ids)
        turn = self._turn(session, spoken, now_ns + next(session.pauses_ns))
        return () if turn is None else (turn,)

    def _turn_counts(self) -> Iterator[int]:
        return lengths(self._config.turns, random_stream(self._seed, "turns"))

    def _session(self, ordinal: int, num_turns: int) -> _Session:
        config, seed = self._config, self._seed
        return _Session(
            ordinal=ordinal,
            num_turns=num_turns,
            user_lens=lengths(config.user_len, random_stream(seed, "user_len", ordinal)),
            output_lens=lengths(config.output_len, random_stream(seed, "output_len", ordinal)),
            pauses_ns=self._pauses_ns(ordinal),
        )

    def _pauses_ns(self, session: int) -> Iterator[int]:
        stream = random_stream(self._seed, "think_time", session)
        while True:
            yield round(stream.standard_exponential() * self._config.think_time_s * NS_PER_S)

    def _turn(self, session: _Session, spoken: tuple[int, ...], arrival_ns: int) -> Request | None:
        """The next request of `session`, in which `spoken` was said; None when it is over."""
        if session.turn == session.num_turns:
            return None
        room = self._max_model_len - len(spoken)
        num_user, num_output = next(session.user_lens), next(session.output_lens)
        if session.turn == 0:
            num_output = min(num_output, max(1, room - num_user))
            num_user = min(num_user, room - num_output)
        if num_user + num_output > room:
            return None
        ordinal, tenants = session.ordinal, self._config.tenants
        request = Request(
            id=f"s{ordinal}.t{session.turn}",
            prompt_token_ids=spoken + self._drawn(f"user{session.turn}", ordinal, num_user),
            sampling=self._config.sampling,
            arrival_ns=arrival_ns,
            known_output_tokens=num_output,
            tenant=f"tenant{ordinal % tenants}" if tenants > 1 else None,
            ordinal=session.turn * self._config.num_sessions + ordinal,
        )
        session.turn += 1
        self._asked[request.id] = session
        return request

    def _system_prompt(self, session: int) -> tuple[int, ...]:
        group = session % self._config.num_system_prompts
        return self._drawn("system_prompt", group, self._config.system_prompt_len)

    def _drawn(self, purpose: str, ordinal: int, count: int) -> tuple[int, ...]:
        """`count` token ids of a random stream of their own."""
        stream = random_stream(self._seed, purpose, ordinal)
        return tuple(self._vocabulary[stream.integers(len(self._vocabulary), size=count)].tolist())
