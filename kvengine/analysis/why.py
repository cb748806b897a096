"""One request's life as a few readable lines: what it waited for, what it computed, who took its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kvengine.analysis.timeline import (
    BETWEEN_STEPS,
    COMPUTED,
    HELD,
    IN_OTHER_STEPS,
    STALLED_BY_PREFILLS,
    Part,
    Timeline,
)
from kvengine.core.errors import ConfigError, nearest
from kvengine.core.reasons import Reason
from kvengine.telemetry.phases import Key

WORDS = {
    STALLED_BY_PREFILLS: "stalled by prefills of others",
    IN_OTHER_STEPS: "in steps without it",
    BETWEEN_STEPS: "between steps",
    HELD: "held after its last token",
}


def find_request(requests: pa.Table, name: str) -> list[dict[str, Any]]:
    """The rows of the request `name`, or of the one choice that `name/choice` names; ConfigError, with the nearest
    id, when there is none."""
    ids = requests["request_id"].to_pylist()
    request_id, _, choice = name.rpartition("/")
    found = [i for i, other in enumerate(ids) if other == name]
    if not found and choice.isdigit():
        numbers = requests["choice"].to_pylist()
        found = [i for i, other in enumerate(ids) if other == request_id and numbers[i] == int(choice)]
    if found:
        return requests.take(pa.array(found, pa.int64())).to_pylist()
    if not ids:
        raise ConfigError("request", name, "no request of this run was recorded as ended")
    known = list(dict.fromkeys(ids))
    meant = nearest(name, known)
    said = f"did you mean '{meant}'? " if meant else ""
    problem = f"no such request; {said}{len(known):,} are recorded, the first is '{known[0]}'"
    raise ConfigError("request", name, problem)


def explain(tables: dict[str, pa.Table], name: str) -> list[dict[str, Any]]:
    """Every choice of a request as plain data: its row of the table `requests`, and the `parts` of its latency,
    which add up to it (ns). ConfigError as from `find_request`."""
    rows = find_request(tables["requests"], name)
    timeline = Timeline(tables)
    served = [row for row in rows if row["status"] != "rejected"]
    return [_explained(row, timeline) for row in served or rows]


def _explained(row: dict[str, Any], timeline: Timeline) -> dict[str, Any]:
    key: Key = (row["request_id"], row["choice"])
    parts = [] if row["status"] == "rejected" else timeline.parts(key)
    latency = parts[-1].end_ns - row["arrival_ns"] if parts else 0
    return {**row, "latency_ns": latency, "parts": [_plain(part) for part in parts]}


def _plain(part: Part) -> dict[str, Any]:
    said = {
        "phase": part.phase,
        "begin_ns": part.begin_ns,
        "end_ns": part.end_ns,
        "ns": part.ns,
        "shares": [share._asdict() for share in part.shares],
    }
    if part.phase in ("prefill", "decode"):
        said |= {"num_steps": part.num_steps, "num_tokens": part.num_tokens}
    if part.preemption is not None:
        said["preemption"] = part.preemption._asdict()
    return said


def lines_of(choice: dict[str, Any], policies: Mapping[str, str]) -> list[str]:
    """What `explain` says of one choice, as lines for a terminal; `policies` are names by kind, to say which kind
    chose a victim."""
    if choice["status"] == "rejected":
        return [f"{choice['request_id']}: rejected when it came: {choice['problem']}"]
    lines = [_headline(choice)]
    for part in choice["parts"]:
        offset = (part["begin_ns"] - choice["arrival_ns"]) / 1e9
        lines.append(f"  +{offset:.3f} s  {_line(part, policies, name_of(choice))}")
    lines.append(f"  +{choice['latency_ns'] / 1e9:.3f} s  {_ending(choice)}")
    return lines


def name_of(choice: dict[str, Any]) -> str:
    """The request's id, and the choice if it is not the first."""
    return f"{choice['request_id']}/{choice['choice']}" if choice["choice"] else choice["request_id"]


def _headline(choice: dict[str, Any]) -> str:
    cached = f" ({choice['num_cached_tokens']:,} cached)" if choice["num_cached_tokens"] else ""
    words = [
        f"{name_of(choice)}: {choice['num_prompt_tokens']:,} prompt tokens{cached}",
        f"{choice['num_output_tokens']:,} output tokens",
        f"{_time(choice['latency_ns'])} in all",
    ]
    if choice["tenant"] is not None:
        words.append(f"tenant {choice['tenant']}")
    if choice["priority"]:
        words.append(f"priority {choice['priority']}")
    return ", ".join(words)


def _ending(choice: dict[str, Any]) -> str:
    if choice["status"] == "unfinished":
        return "unfinished when the run ended"
    if choice["status"] == "refused":
        return "refused for good"
    return "aborted" if choice["status"] == "aborted" else f"finished: {choice['finish_reason']}"


def _line(part: dict[str, Any], policies: Mapping[str, str], choice: str) -> str:
    took, spent = _time(part["ns"]), _spent(part["shares"])
    if part["phase"] == "queued":
        return f"queued {took}{spent}"
    if part["phase"] == "preempted":
        left = _left(part["preemption"], policies, choice)
        return f"{left}, waited {took}{spent}"
    if part["phase"] == "decode":
        return f"decode {_count(part['num_tokens'], 'more token')}, {took}{spent}"
    if not part["num_steps"]:
        return f"began with what was computed already, {took}{spent}" if part["ns"] else "entered"
    return (
        f"prefill {_count(part['num_tokens'], 'token')} in {_count(part['num_steps'], 'step')}, {took}{spent}"
    )


def _left(of: dict[str, Any], policies: Mapping[str, str], choice: str) -> str:
    """How and for whom the choice of that name was preempted."""
    kind = next((kind for kind in ("victim", "scheduler") if policies.get(kind) == of["policy"]), "policy")
    tokens = _count(of["num_tokens_lost"], "token")
    if of["swapped"]:
        fate = f"{tokens} in {_count(of['num_moved_blocks'], 'block')} moved to the host"
    else:
        fate = f"{tokens} to compute again"
    why = "" if of["reason"] == Reason.PREEMPTED_FOR else f"{of['reason']}, "
    freed = f"{_count(of['num_blocks_freed'], 'block')} freed"
    word = "swapped out" if of["swapped"] else "preempted"
    whom = "itself" if of["beneficiary"] in (choice, f"{choice}/0") else of["beneficiary"]
    return f"{word} at step {of['step']:,} for {whom} ({why}{kind}={of['policy']}, {freed}, {fate})"


def _spent(shares: list[dict[str, Any]]) -> str:
    said = [_share(share) for share in shares if share["name"] != COMPUTED]
    return f" ({'; '.join(said)})" if said else ""


def _share(share: dict[str, Any]) -> str:
    detail = f"first {share['detail']}" if share["detail"] and share["times"] > 1 else share["detail"]
    return f"{_time(share['ns'])} {WORDS.get(share['name'], share['name'])} {detail}".rstrip()


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _time(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= size:
            return f"{ns / size:,.{3 if unit == 's' else 1}f} {unit}"
    return f"{ns} ns" if ns else "0 s"
