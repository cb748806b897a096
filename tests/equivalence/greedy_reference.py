"""What `transformers` generates greedily, one prompt at a time and with its own cache, and how sure it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

NARROW_GAP = 1e-3
"""Two logits nearer than this are a tie, which rounding may decide either way."""

SEQUENCES_PER_NARROW = 32
"""At most one sequence in so many may hold a tie."""


class Ask(NamedTuple):
    """One greedy request."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens, the end token included, and by how much the first choice led at each of them."""

    tokens: list[int]
    gaps: list[float]

    @property
    def has_narrow(self) -> bool:
        return min(self.gaps) < NARROW_GAP


def load(directory: Path, **config: Any) -> Any:
    """The checkpoint in `directory` in fp32 with transformers' plainest attention; `config` overrides its own."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **config
    ).eval()


def generate(model: Any, asks: Sequence[Ask]) -> list[Answer]:
    """The answers of a loaded model, one after another."""
    return [_generate_one(model, ask) for ask in asks]


def _generate_one(model: Any, ask: Ask) -> Answer:
    output = model.generate(
        torch.tensor([ask.prompt]),
        max_new_tokens=ask.max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(ask.prompt) :].tolist()
    best_two = torch.stack([logits[0].float().topk(2).values for logits in output.logits])
    return Answer(tokens, (best_two[:, 0] - best_two[:, 1]).tolist())


def num_narrow(answers: Sequence[Answer]) -> int:
    """Sequences that hold a tie."""
    return sum(answer.has_narrow for answer in answers)


def differences(answers: Sequence[Answer], outputs: Mapping[int, list[int]]) -> list[str]:
    """One line per output (by place of its request) that leaves its answer where the reference was sure."""
    lines = []
    for place, answer in enumerate(answers):
        output = outputs[place]
        at = first_difference(answer.tokens, output)
        if at is None or (at < len(answer.gaps) and answer.gaps[at] < NARROW_GAP):
            continue
        lines.append(f"request {place}, token {at}: {output[at:][:5]} instead of {answer.tokens[at:][:5]}")
    return lines


def first_difference(expected: list[int], given: list[int]) -> int | None:
    """The first index at which two lists differ, the end of the shorter one included; None if they are equal."""
    if expected == given:
        return None
    shared = min(len(expected), len(given))
    return next((i for i in range(shared) if expected[i] != given[i]), shared)
