"""One input in many spellings, at every door: the same numbers, or a refusal of one line.

A door that takes a spelling gives what it gives for the plain list of token ids.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnflow as af
from tests.families import build, word_tokenizer
from tests.hostile.tries import Result, complain, refusal, run_tries

SAME = 1e-6
Ids = list[int]
FAMILIES = ["llama", "gpt2", "mistral", "gemma2"]
SPELLINGS: dict[str, Callable[[Ids], Any]] = {
    "tuple": tuple,
    "numpy integers": lambda ids: [np.int64(each) for each in ids],
    "numpy array": np.array,
    "numpy int32": lambda ids: np.array(ids, dtype=np.int32),
    "numpy row": lambda ids: np.array([ids]),
    "tensor": torch.tensor,
    "tensor row": lambda ids: torch.tensor([ids]),
    "tensor scalars": lambda ids: list(torch.tensor(ids)),
    "range": lambda ids: range(ids[0], ids[0] + len(ids)),
    "array": lambda ids: array("q", ids),
    "iterator": iter,
    "floats": lambda ids: [float(each) for each in ids],
    "bytes": bytes,
    "bytearray": bytearray,
    "booleans": lambda ids: [True] * len(ids),
    "dictionary": lambda ids: {"input_ids": ids},
    "none": lambda ids: None,
}
# which are no token ids, and must be refused
OTHER = {"floats", "bytes", "bytearray", "booleans", "dictionary", "none"}
DOORS: dict[str, Callable[[af.Model, Any], Any]] = {
    "capture": lambda model, given: af.capture(model, given),
    "explain": lambda model, given: af.explain(
        given, model=model, methods="rollout", edges="attention", importance=()
    ),
    "generate": lambda model, given: af.generate(
        model, given, max_new_tokens=2, eos_token_id=None, edges="attention"
    ),
    "evaluate": lambda model, given: af.evaluate(
        model, [given], methods="rollout", against="blank_out"
    ),
    "rollout_rows": lambda model, given: af.rollout_rows(model, given, positions=[-1]),
}


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these spellings."""
    return run_tries(attempt, "spellings", numbers, seed, folder)


def attempt(draw: random.Random, number: int, folder: Path) -> str | None:
    """One spelling at all doors, against the plain list."""
    name = list(SPELLINGS)[number % len(SPELLINGS)]
    start, size = draw.randrange(5, 40), draw.randint(2, 8)
    ids = list(range(start, start + size))
    model = af.Model(build(draw.choice(FAMILIES)), word_tokenizer())
    taken = {}
    for door, enter in DOORS.items():

        def judge(door: str = door, enter: Callable[[af.Model, Any], Any] = enter) -> str | None:
            try:
                found = enter(model, SPELLINGS[name](ids))
            except af.AttnFlowError as error:
                return refusal(error)
            taken[door] = True
            expected = enter(model, ids)
            one, other = read_numbers(found), read_numbers(expected)
            if one.shape != other.shape or np.abs(one - other).max() > SAME:
                return "gives other numbers than the list of token ids"
            return None

        complaint = complain(judge)
        if complaint:
            return f"{name} at {door}: {complaint}"
    if name in OTHER and taken:
        return f"{name} is taken by {', '.join(taken)}"
    if taken and len(taken) < len(DOORS):
        missing = ", ".join(door for door in DOORS if door not in taken)
        return f"{name} is taken by {', '.join(taken)}, and refused by {missing}"
    return None


def read_numbers(found: Any) -> Any:
    """The numbers of what a door gave."""
    if isinstance(found, af.Report):
        return found.examples[0].scores["rollout"]
    if isinstance(found, af.Explanation):
        return found.rollout.at(found.position)
    if isinstance(found, af.Generation):
        return found.rollout().values
    return np.asarray(found.weights if isinstance(found, af.Attention) else found.values)
