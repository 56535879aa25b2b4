"""`norm`: the length of the part that comes from a key (Kobayashi et al. 2021).

The length of a sum of vectors needs only their products. Treat the residual as one more head: with
a the weights of query i on key j, one per head, and G_j the Gram matrix of the heads' vectors of
key j, the length of the part is the root of a' G_j a. So parts [query, key, width] are never built.
"""

from typing import TYPE_CHECKING

from attnflow.capturing.mix import LayerMix

if TYPE_CHECKING:
    import torch


def weigh_norm(mix: LayerMix) -> "torch.Tensor":
    """[query, key]: the length of each part, rows summing to 1."""
    import torch

    vectors = mix.vectors.transpose(0, 1)  # [key, head, width]
    squares = measure_forms(mix.weights, vectors @ vectors.transpose(1, 2))
    queries = torch.arange(len(mix.own), device=mix.own.device)
    # at the query itself the residual is added: its cross terms and its length
    own = mix.weights[:, queries, mix.own].T  # [query, head]
    crossed = (vectors[mix.own] @ mix.residual[..., None])[..., 0]  # [query, head]
    squares[queries, mix.own] += 2 * (own * crossed).sum(dim=-1) + mix.residual.pow(2).sum(dim=-1)
    return normalise_edges(squares.clamp_min(0.0).sqrt(), mix.own)


def measure_forms(weights: "torch.Tensor", gram: "torch.Tensor") -> "torch.Tensor":
    """[query, key]: a' G_j a, a the weights of all heads on key j.

    weights: [head, query, key]; gram: [key, head, head].
    """
    import torch

    if weights.device.type != "cpu":
        turned = weights.permute(2, 1, 0)  # [key, query, head]
        return ((turned @ gram) * turned).sum(dim=-1).T.contiguous()
    from attnflow.edges.kernels import measure_squares

    first, second = torch.triu_indices(gram.shape[1], gram.shape[1])
    products = gram[:, first, second].T * torch.where(first == second, 1.0, 2.0)[:, None]
    squares = torch.empty(weights.shape[1:])
    measure_squares(weights.contiguous().numpy(), products.contiguous().numpy(), squares.numpy())
    return squares


def normalise_edges(edges: "torch.Tensor", own: "torch.Tensor") -> "torch.Tensor":
    """Edges [query, key] with rows that sum to 1; a row of zeros becomes that of the identity."""
    import torch

    edges = edges.double().clone()
    empty = edges.sum(dim=-1) <= 0
    edges[torch.arange(len(own), device=own.device)[empty], own[empty]] = 1.0
    return edges / edges.sum(dim=-1, keepdim=True)
