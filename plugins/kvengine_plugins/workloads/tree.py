"""Tree search: each tree grows from one prompt, and after every level all its branches fork again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvengine.core.errors import ConfigError
from kvengine.core.plan import RequestOutput
from kvengine.core.request import Request, SamplingParams
from kvengine.policies import Build, Workload
from kvengine.workloads.arrivals import (
    MAX_REQUESTS,
    ArrivalConfig,
    arrival_times,
    chosen_seed,
    random_stream,
)
from kvengine.workloads.lengths import LONGEST
from kvengine_plugins.workloads.parts import (
    check_no_stop_tokens,
    check_range,
    check_sampling,
    plain_vocabulary,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """`num_trees` prompts of `prompt_len` tokens, grown for `depth` levels of `segment_len` new tokens; between
    two levels each branch becomes `branching`, so that branching**(depth - 1) leaves end a tree; `seed` of all
    that is drawn (null: engine.seed); `arrival` of trees; `sampling` of every branch, with n=1 and no limit."""

    num_trees: int = 4
    seed: int | None = None
    prompt_len: int = 64
    branching: int = 2
    depth: int = 3
    segment_len: int = 16
    arrival: ArrivalConfig = field(default_factory=ArrivalConfig)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        check_range("num_trees", self.num_trees, 1, MAX_REQUESTS)
        check_range("prompt_len", self.prompt_len, 1, LONGEST)
        check_range("branching", self.branching, 1, 1000)
        check_range("depth", self.depth, 1, 1000)
        check_range("segment_len", self.segment_len, 1, LONGEST)
        if self.num_trees * self.num_leaves > MAX_REQUESTS:
            problem = f"makes more than {MAX_REQUESTS:,} branches in all"
            raise ConfigError("workload.depth", self.depth, problem)
        check_no_stop_tokens(self.sampling, "tree")
        for name, value, only in (("n", self.sampling.n, 1), ("max_tokens", self.sampling.max_tokens, None)):
            if value != only:
                problem = "a branch is one sequence, which ends with its last level; drop it"
                raise ConfigError(f"workload.sampling.{name}", value, problem)

    @property
    def num_leaves(self) -> int:
        """Leaves of one tree, each the end of a request of its own."""
        return self.branching ** (self.depth - 1)


@dataclass(slots=True)
class _Branch:
    """A request under way: `path` holds the number of the branch taken after each level before it began."""

    tree: int
    path: tuple[int, ...]
    level: int
    """Levels that are complete, those before it began included."""
    num_new: int = 0
    """New tokens in the level under way."""


class TreeWorkload(Workload):
    """A branch goes on as number 0 of those it becomes; the others fork from it, each by one drawn token.

    The root of tree i is `ti`, a fork is named by its path: `t0.0.2` left the root's own line as branch 2 after
    the second level. A fork ends when its own levels are as long as everybody's, so leaves differ by the drawn
    tokens. A branch that has ended before its forks could be sent has none (a scheduler that delivers late).
    """

    knows_lengths = True
    reacts = True
    forks = True
    concurrency = None

    def __init__(self, config: TreeConfig, build: Build) -> None:
        assert build.model is not None
        assert build.limits is not None
        check_sampling(config.sampling, build)
        longest = config.prompt_len + config.depth * config.segment_len + config.depth - 1
        if longest > build.limits.max_model_len:
            problem = f"a leaf has {longest} tokens, more than max_model_len={build.limits.max_model_len}"
            raise ConfigError("workload.segment_len", config.segment_len, problem)
        self._config = config
        self._seed = chosen_seed(build.seed if config.seed is None else config.seed)
        self._vocabulary = plain_vocabulary(build.model.shape())
        if config.branching > len(self._vocabulary):
            problem = f"there are only {len(self._vocabulary)} tokens to tell branches apart"
            raise ConfigError("workload.branching", config.branching, problem)
        self._branches: dict[str, _Branch] = {}
        """By request id."""
        self.num_requests = config.num_trees * config.num_leaves

    def requests(self) -> Iterator[Request]:
        """The roots, as they are asked for; all trees grow anew."""
        self._branches.clear()
        arrivals = arrival_times(self._config.arrival, self._seed)
        for tree in range(self._config.num_trees):
            stream = random_stream(self._seed, "prompt", tree)
            indices = stream.integers(len(self._vocabulary), size=self._config.prompt_len)
            prompt = tuple(self._vocabulary[indices].tolist())
            yield self._request(_Branch(tree, (), 0), prompt, next(arrivals))

    def after(self, output: RequestOutput, now_ns: int) -> Iterable[Request]:
        """The forks of the branch that got `output`, when that completes a level which is not the last."""
        branch = self._branches.get(output.request_id)
        if branch is None:
            return ()
        if output.finish_reason is not None:
            del self._branches[output.request_id]
            return ()
        branch.num_new += len(output.token_ids)
        forks: list[Request] = []
        while branch.num_new >= self._config.segment_len:
            branch.num_new -= self._config.segment_len
            branch.level += 1
            forks += self._forks(branch, output.request_id, now_ns)
        return forks

    def _forks(self, branch: _Branch, parent: str, now_ns: int) -> Iterator[Request]:
        level, config = branch.level, self._config
        path = branch.path + (0,) * (level - 1 - len(branch.path))
        stream = random_stream(self._seed, f"branch{level}", self._ordinal(branch))
        drawn = stream.choice(len(self._vocabulary), size=config.branching - 1, replace=False)
        for number, token in enumerate(self._vocabulary[drawn].tolist(), 1):
            fork = _Branch(branch.tree, (*path, number), level)
            yield self._request(fork, (token,), now_ns, fork_of=parent)

    def _request(
        self, branch: _Branch, prompt: tuple[int, ...], arrival_ns: int, fork_of: str | None = None
    ) -> Request:
        config = self._config
        request = Request(
            id=".".join(map(str, (f"t{branch.tree}", *branch.path))),
            prompt_token_ids=prompt,
            sampling=config.sampling,
            arrival_ns=arrival_ns,
            known_output_tokens=(config.depth - branch.level) * config.segment_len,
            fork_of=fork_of,
            ordinal=self._ordinal(branch),
        )
        self._branches[request.id] = branch
        return request

    def _ordinal(self, branch: _Branch) -> int:
        """Its place among all leaves in order of their paths; unique, since it ends as a leaf of its own."""
        leaf = 0
        for step in branch.path:
            leaf = leaf * self._config.branching + step
        leaf *= self._config.branching ** (self._config.depth - 1 - len(branch.path))
        return branch.tree * self._config.num_leaves + leaf
