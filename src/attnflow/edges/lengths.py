"""`norm`: how long the part is that a key brought (Kobayashi et al. 2021).

The length of a sum of vectors needs their products only. Treat the residual as one more head: with
a the weights of query i on key j, one per head, and G_j the Gram matrix of the heads' vectors of
key j, the length of the part is the root of a' G_j a. So no part [query, key, width] is ever
built.
"""

from typing import TYPE_CHECKING

from attnflow.capturing.mixing import LayerMix

if TYPE_CHECKING:
    import torch


def weigh_lengths(mix: LayerMix) -> "torch.Tensor":
    """[query, key]: the length of each part, rows summing to 1."""
    import torch

    vectors = mix.vectors.transpose(0, 1)  # [key, head, width]
    gram = vectors @ vectors.transpose(1, 2)  # [key, head, head]
    weights = mix.weights.permute(2, 1, 0)  # [key, query, head]
    squares = ((weights @ gram) * weights).sum(dim=-1).T  # [query, key]
    queries = torch.arange(len(mix.own), device=mix.own.device)
    # the query itself: its residual is added, so the cross terms and its own length are
    own = mix.weights[:, queries, mix.own].T  # [query, head]
    crossed = (vectors[mix.own] @ mix.residual[..., None])[..., 0]  # [query, head]
    squares = squares.clone()
    squares[queries, mix.own] += 2 * (own * crossed).sum(dim=-1) + mix.residual.pow(2).sum(dim=-1)
    return normalise_rows(squares.clamp_min(0.0).sqrt(), mix.own)


def normalise_rows(edges: "torch.Tensor", own: "torch.Tensor") -> "torch.Tensor":
    """edges [query, key] whose rows sum to 1; a row that is all 0 keeps to itself."""
    import torch

    edges = edges.double().clone()
    empty = edges.sum(dim=-1) <= 0
    edges[torch.arange(len(own), device=own.device)[empty], own[empty]] = 1.0
    return edges / edges.sum(dim=-1, keepdim=True)
