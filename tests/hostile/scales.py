"""Edges of any size, from 1e-300 to 1e300: shares do not depend on it, and nothing is NaN."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import attnflow as af
from tests.families import build
from tests.hostile.tries import Result, refusal, run_tries

SAME = 1e-6  # edges are kept in float32


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these scales."""
    return run_tries(attempt, "scales", numbers, seed, folder)


def attempt(draw: random.Random, number: int, folder: Path) -> str | None:
    """Own edges of one scale against the same of scale one: shares by every method, or a refusal."""
    chance = np.random.default_rng(draw.randrange(2**32))
    exponent = draw.uniform(-300, 300)
    scale = 10.0**exponent
    layers = build("llama").config.num_hidden_layers
    size = draw.randint(2, 7)
    base = np.tril(chance.random((layers, size, size))) + np.eye(size)
    uneven = draw.random() < 0.3  # each layer has a scale of its own
    scales = [10.0 ** draw.uniform(-300, 300) if uneven else scale for _ in range(layers)]
    model = af.Model(build("llama"))
    ids = list(range(5, 5 + size))
    one = make_graph(model, ids, base, [1.0] * layers)
    try:
        other = make_graph(model, ids, base, scales)
        for method in (af.rollout, af.flow) if not uneven else (af.rollout,):
            wanted, found = (method(graph, layers=[layers]).values for graph in (one, other))
            if not np.isfinite(found).all():
                return f"{method.__name__} of edges of {scales!r} is not finite"
            if np.abs(found - wanted).max() > SAME:
                return f"{method.__name__} of edges of {scales!r} differs from that of 1"
    except af.AttnFlowError as error:
        return refusal(error)
    return None


def make_graph(
    model: af.Model, ids: list[int], base: np.ndarray, scales: Sequence[float]
) -> af.AttentionGraph:
    """A graph of edges that are the same but for their size."""
    import torch

    waiting = iter(zip(base, scales, strict=True))

    def weigh(mix: af.LayerMix) -> torch.Tensor:
        edges, scale = next(waiting)
        return torch.tensor(edges * scale, dtype=torch.float64)

    return af.attention_graph(model, ids, edges=af.edge_weight("own", weigh, residual="inside"))
