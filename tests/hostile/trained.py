"""Models whose weights change after they were probed: what was true of them may be so no more.

A mixer beside attention has a gate of 0 at first, so that attention explains the block; then the
gate is opened in one of the ways in which weights change, and edges must be refused, as they are
for a copy of the changed model.
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attnflow as af
from tests.families import build
from tests.hostile.tries import Result, refusal, run_tries

FAMILIES = ["llama", "gpt2", "bert", "mistral", "gemma2", "roberta"]
IDS = [5, 6, 7, 8, 9]


class Gated(nn.Module):
    """Attention with something beside it, which mixes positions as far as its gate is open."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.gate = nn.Parameter(torch.zeros(1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("attention"), name)

    def forward(self, *given: Any, **named: Any) -> Any:
        """Attention, and the mean of all states through the gate."""
        output = self.attention(*given, **named)
        state = given[0] if given else named["hidden_states"]
        beside = self.gate * state.mean(dim=1, keepdim=True)
        if isinstance(output, tuple):
            return (output[0] + beside, *output[1:])
        return output + beside


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these changes."""
    return run_tries(attempt, "trained", numbers, seed, folder)


def attempt(draw: random.Random, number: int, folder: Path) -> str | None:
    """Probe a model, open the gate, and ask again."""
    family = draw.choice(FAMILIES)
    name = list(CHANGES)[number % len(CHANGES)]
    kind = draw.choice(["norm", "contribution"])
    module = deepcopy(build(family))
    gated = put_gate(module, draw)
    model = af.Model(module)
    before = ask(model, kind)
    if before:
        return f"{family}: with the gate closed, {kind} edges are refused: {before}"
    CHANGES[name](module, gated)
    fresh = ask(af.Model(deepcopy(module)), kind)
    if fresh is None:
        return f"{family}: a copy with an open gate has {kind} edges"
    if ask(model, kind) is None:
        return f"{family}: {kind} edges are given after the gate was opened by {name}"
    return None


def put_gate(module: nn.Module, draw: random.Random) -> Gated:
    """Put the gate beside one attention."""
    names = ("self_attn", "attn", "attention")
    places = [
        (part, name)
        for part in module.modules()
        for name in names
        if isinstance(getattr(part, name, None), nn.Module) and hasattr(part, "forward")
        if (not hasattr(getattr(part, name), "self_attn") and "Layer" in type(part).__name__)
        or (type(part).__name__ in ("GPT2Block",) and name == "attn")
    ]
    part, name = draw.choice(places)
    gated = Gated(getattr(part, name))
    setattr(part, name, gated)
    return gated


def ask(model: af.Model, kind: str) -> str | None:
    """Why edges are refused; None if they are given."""
    try:
        af.attention_graph(model, IDS, edges=kind)
    except af.AttnFlowError as error:
        return refusal(error) or str(error)
    return None


def take_step(module: nn.Module, gated: Gated) -> None:
    """One step of an optimiser."""
    for parameter in module.parameters():
        parameter.grad = None
    gated.gate.grad = torch.full_like(gated.gate, -1.0)
    torch.optim.SGD([gated.gate], lr=1.0).step()


def load_state(module: nn.Module, gated: Gated) -> None:
    """Weights from elsewhere."""
    state = module.state_dict()
    name = next(each for each in state if each.endswith(".gate"))
    module.load_state_dict({**state, name: torch.ones(1)})


def copy_data(module: nn.Module, gated: Gated) -> None:
    """A write that counts no version."""
    gated.gate.data.copy_(torch.ones(1))


def replace_parameter(module: nn.Module, gated: Gated) -> None:
    """Another parameter in its place."""
    gated.gate = nn.Parameter(torch.ones(1))


def write_numpy(module: nn.Module, gated: Gated) -> None:
    """A write through memory that is shared with numpy."""
    gated.gate.detach().numpy()[:] = 1.0


CHANGES: dict[str, Callable[[nn.Module, Gated], None]] = {
    "a step of an optimiser": take_step,
    "load_state_dict": load_state,
    "data.copy_": copy_data,
    "another parameter": replace_parameter,
    "numpy": write_numpy,
}
