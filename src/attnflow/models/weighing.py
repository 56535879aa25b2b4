"""Attention weights from queries and keys: block by block, heads fused at once.

`capture` and `record` share what is here but for the loop over blocks, which stands twice on
purpose. Here queries and keys come from transformers' interface, projected, rotated and perhaps in
groups, and keys that the causal mask hides are never multiplied. There (multihead.py) the
projections are those of `nn.MultiheadAttention`, keys are added that are no tokens, padded queries
may have no key at all, and every row is checked, because no other check follows.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.core.fusion import FUSIONS
from attnflow.errors import OptionError
from attnflow.models.families import CAUSAL, NO_TOKEN_SCORE, SCALING, SCORE_BIAS, SOFTCAP

if TYPE_CHECKING:
    import torch

# scores [sequence, head, query, key] in one block, unless one query has more: 4 MB of float32
BLOCK_SCORES = 2**20


def check_heads(heads: str | None) -> None:
    """Refuse what is no way to fuse heads while they are computed."""
    if heads not in (*FUSIONS, None):
        raise OptionError(
            f"unknown heads {heads!r}; choose from {', '.join(map(repr, FUSIONS))} or None,"
            " which keeps every head"
        )


def cut_queries(queries: int, scores: int, block: int | None = None) -> Iterator[slice]:
    """Blocks of queries whose scores fit in memory together.

    scores: of one query. block: scores in one block; BLOCK_SCORES if None.
    """
    step = max(1, (BLOCK_SCORES if block is None else block) // max(1, scores))
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))


def hide(scores: "torch.Tensor", mask: "torch.Tensor") -> None:
    """Apply a mask to scores, in place: a bool one hides where it is True, others are added."""
    import torch

    if mask.dtype == torch.bool:
        scores.masked_fill_(mask, -torch.inf)
    else:
        scores.add_(mask)


def fuse(weights: "torch.Tensor", heads: str | None) -> "torch.Tensor":
    """Weights [sequence, head, query, key] with heads fused to one, rows summing to 1 again.

    All heads if None. Rows that the minimum leaves empty stay so: `fill_empty_rows`.
    """
    if heads is None:
        return weights
    if heads == "mean":
        return weights.mean(dim=1, keepdim=True)
    fused = (weights.amax if heads == "max" else weights.amin)(dim=1, keepdim=True)
    sums = fused.sum(dim=-1, keepdim=True)
    return fused / sums.where(sums > 0, 1.0)


def fill_empty_rows(weights: Any, first: int = 0) -> None:
    """Let rows of weights [..., query, key] that are all 0 look at themselves, in place.

    weights: a numpy array or a tensor. first: the key that stands where the first query stands.
    """
    own = np.arange(weights.shape[-2])
    weights[..., own, first + own] += weights.sum(axis=-1) == 0


def measure_no_token_share(scores: "torch.Tensor", keys: int) -> "torch.Tensor":
    """[sequence, query]: the attention that goes to no token, mean over heads.

    scores: [sequence, head, query, key], of which those after the first `keys` are of no tokens.
    """
    return scores.softmax(dim=-1)[..., keys:].sum(dim=-1).mean(dim=1)


def compute_weights(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    mask: "torch.Tensor | None",
    heads: str | None,
    weights: "torch.Tensor",
    options: dict[str, Any],
    *,
    hides_future: bool,
    block_scores: int | None = None,
) -> "torch.Tensor | None":
    """Set weights [sequence, head or 1, query, key] to those that the interface attends by.

    query: [sequence, head, query, width]; key likewise, where several heads may share one. options:
    what the family gave with them. hides_future: whether the function that attends does so by
    itself, where it has no mask and the module is causal. block_scores: as in `cut_queries`.
    Returns the share of no token [sequence, query], where a model has a score for it.
    """
    import torch

    sequences, count, queries, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    scaling = options.get(SCALING)
    scaling = width**-0.5 if scaling is None else scaling
    softcap, bias, extra = (options.get(name) for name in (SOFTCAP, SCORE_BIAS, NO_TOKEN_SCORE))
    is_causal = options.get(CAUSAL)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    hides_future = hides_future and mask is None and bool(is_causal) and queries > 1
    share = None if extra is None else torch.empty(sequences, queries)
    across = key.float().transpose(2, 3)  # [sequence, group, width, key]
    for rows in cut_queries(queries, sequences * count * keys, block_scores):
        size = rows.stop - rows.start
        seen = min(keys, rows.stop) if hides_future else keys  # no query here sees a later key
        # the heads of a group below each other
        block = (query[:, :, rows].float() * scaling).reshape(sequences, groups, -1, width)
        scores = (block @ across[..., :seen]).view(sequences, count, size, seen)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            scores += bias[:, :, rows, :seen].float()
        if mask is not None:
            part = mask[:, :, rows if mask.shape[2] > 1 else slice(None), :seen]
            hide(scores, ~part if part.dtype == torch.bool else part.float())
        if hides_future:
            shape = (size, seen - rows.start)
            future = torch.ones(shape, dtype=torch.bool, device=scores.device).triu_(1)
            hide(scores[..., rows.start :], future)
            weights[:, :, rows, seen:] = 0.0
        if share is not None and extra is not None:
            more = extra.float().reshape(1, -1, 1, 1).expand(sequences, -1, size, 1)
            every = torch.cat([scores, more], dim=-1)
            share[:, rows] = measure_no_token_share(every, seen).cpu()
        weights[:, :, rows, :seen] = fuse(torch.softmax(scores, dim=-1, out=scores), heads)
    return share
