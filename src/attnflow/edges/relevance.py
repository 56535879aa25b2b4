"""`relevance`: attention that the target depends on, in a linearised backward pass.

The formula is that of gradient edges, E = I + mean over heads of max(0, W * G). The backward pass
holds attention weights, the scales of norms and the ratios of activations fixed, and halves the
gradient of gated products (capturing/linearise.py), as layer-wise relevance propagation does for
Transformers (Ali et al. 2022, AttnLRP, RelP, GIM).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnflow.capturing.backward_rule import LINEARISED, PLAIN
from attnflow.capturing.mix import LayerMix
from attnflow.core.arrays import Floats
from attnflow.edges.gradient import attribute, weigh_gradient
from attnflow.errors import CaptureError

if TYPE_CHECKING:
    import torch

weigh_relevance = weigh_gradient  # of another backward pass
# relevance that other positions than the explained one may have at the top, as a share of all
STRAY = 1e-3


def weigh_relevance_and_gradient(mix: LayerMix) -> "torch.Tensor":
    """[head, query, key]: the mean of both kinds of edges.

    Relevance finds the token whose content is the answer; the gradient also passes through the
    attention weights, and finds the tokens that select it.
    """
    parts = [attribute(mix, rule.name).clamp_(min=0.0) for rule in (LINEARISED, PLAIN)]
    return (parts[0] + parts[1]) / 2


def weigh_signed_relevance(mix: LayerMix) -> "torch.Tensor":
    """[query, key]: weights times gradients, summed over heads, with their signs."""
    return attribute(mix).double().sum(dim=0)


def carry_relevance(layers: Floats, scores: Sequence[float], positions: Sequence[int]) -> Floats:
    """[layer, query, key]: the share of its relevance that each node hands on to those below.

    layers: [layer, query, key], weights times gradients. A node hands on what it got: to each key
    its part by attention, and the rest to itself, by the residual connection. So rows sum to 1, and
    the products of edges along all paths from a position, times its score, add up to it.
    """
    relevance = np.zeros(layers.shape[-1])  # of the nodes of the layer above
    relevance[list(positions)] = scores
    shares = np.empty_like(layers)
    for number in reversed(range(len(layers))):
        handed = layers[number].copy()  # [query, key]
        silent = relevance == 0
        if np.abs(handed[silent]).sum() > STRAY * np.abs(handed).sum():
            raise CaptureError(
                "signed relevance begins at one position, and this model's prediction reads"
                " several; use relevance edges"
            )
        handed[silent] = 0.0
        np.einsum("ii->i", handed)[:] += relevance - handed.sum(axis=-1)
        shares[number] = np.divide(
            handed, relevance[:, None], out=np.eye(len(handed)), where=~silent[:, None]
        )
        relevance = handed.sum(axis=0)
    return shares
