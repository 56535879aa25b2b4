"""The parts of a residual stream, built from what a layer mixed."""

from typing import Any

import torch

import attnflow as af


def build_parts(mix: af.LayerMix) -> Any:
    """[query, key, width]: every part, in float64."""
    parts = torch.einsum("hij,hjd->ijd", mix.weights.double(), mix.vectors.double())
    queries = torch.arange(len(mix.own))
    parts[queries, mix.own] += mix.residual.double()
    return parts.numpy()
