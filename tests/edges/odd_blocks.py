"""Blocks of a Llama that are wired otherwise than any family."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.families import perturb


def attend(block: Any, stream: Any, options: Any) -> Any:
    return block.self_attn(hidden_states=block.input_layernorm(stream), **options)[0]


def run_mlp(block: Any, stream: Any) -> Any:
    return block.mlp(block.post_attention_layernorm(stream))


class TwoInputs(nn.Module):
    """A gate on the branch that also reads another input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((32,), 1.5))

    def forward(self, branch: Any, other: Any) -> Any:
        return branch * self.scale * torch.sigmoid(other)


def gate_stream(block: Any, x: Any, **options: Any) -> Any:
    y = 0.7 * x + attend(block, x, options)
    return y + run_mlp(block, y)


def gate_branch(block: Any, x: Any, **options: Any) -> Any:
    y = x + torch.sigmoid(block.extra(x)) * attend(block, x, options)
    return y + run_mlp(block, y)


def gate_by_module(block: Any, x: Any, **options: Any) -> Any:
    y = x + block.gate(attend(block, x, options), x)
    return y + run_mlp(block, y)


def gate_by_constant(block: Any, x: Any, **options: Any) -> Any:
    y = x + block.gate(attend(block, x, options), torch.zeros(32))
    return y + run_mlp(block, y)


def multiply(block: Any, x: Any, **options: Any) -> Any:
    y = x * (1 + attend(block, x, options))
    return y + run_mlp(block, y)


def drop_residual(block: Any, x: Any, **options: Any) -> Any:
    y = attend(block, x, options)
    return y + run_mlp(block, y)


def add_once_more(block: Any, x: Any, **options: Any) -> Any:
    branch = attend(block, x, options)
    y = x + branch
    return y + run_mlp(block, y) + branch


def project_twice(block: Any, x: Any, **options: Any) -> Any:
    branch = attend(block, x, options)
    y = x + branch + block.extra(branch)
    return y + run_mlp(block, y)


def read_only(block: Any, x: Any, **options: Any) -> Any:
    return x + run_mlp(block, x + attend(block, x, options))


def run_mlp_beside_attention(block: Any, x: Any, **options: Any) -> Any:
    branch = attend(block, x, options)
    return x + branch + run_mlp(block, branch)


def bend_branch(block: Any, x: Any, **options: Any) -> Any:
    y = x + block.bend(attend(block, x, options))
    return y + run_mlp(block, y)


def turn_branch(block: Any, x: Any, **options: Any) -> Any:
    y = x + block.extra(attend(block, x, options))
    return y + run_mlp(block, y)


ODD = [
    gate_stream,
    gate_branch,
    gate_by_module,
    gate_by_constant,
    multiply,
    drop_residual,
    add_once_more,
    project_twice,
    read_only,
    run_mlp_beside_attention,
    bend_branch,
    turn_branch,
]


def rewire(forward: Callable[..., Any]) -> Any:
    """A Llama whose second block is wired otherwise."""
    model = perturb("llama")
    block = model.model.layers[1]
    torch.manual_seed(0)
    block.extra, block.gate, block.bend = nn.Linear(32, 32), TwoInputs(), nn.GELU()
    block.__class__ = type("Odd", (type(block),), {"forward": forward})
    return model
