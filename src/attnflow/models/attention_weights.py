"""Attention weights from queries and keys: block by block, with heads fused at once.

`capture` and `record` share this module except for the loop over blocks, which exists twice on
purpose. Here queries and keys come from transformers' interface, projected, rotated and perhaps in
groups, and keys that the causal mask hides are never multiplied. In multihead.py the projections
are those of `nn.MultiheadAttention`, keys may be added that stand for no token, padded queries may
have no key at all, and every row is checked, because no other check follows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.core.fusion import FUSIONS
from attnflow.errors import OptionError
from attnflow.models.families import CAUSAL, NO_TOKEN_SCORE, SCALING, SCORE_BIAS, SOFTCAP

if TYPE_CHECKING:
    import torch

# scores [sequence, head, query, key] in one block, unless one query has more: 4 MB of float32
BLOCK_SCORES = 2**20


def check_heads(heads: str | None) -> None:
    """Refuse an unknown way to fuse heads."""
    if heads not in (*FUSIONS, None):
        raise OptionError(
            f"unknown heads {heads!r}; choose from {', '.join(FUSIONS)}, or None to keep all",
            options=["heads"],
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

    All heads if None. Rows that the minimum leaves empty stay empty; see `fill_empty_rows`.
    """
    if heads is None:
        return weights
    if heads == "mean":
        return weights.mean(dim=1, keepdim=True)
    fused = (weights.amax if heads == "max" else weights.amin)(dim=1, keepdim=True)
    sums = fused.sum(dim=-1, keepdim=True)
    return fused / sums.where(sums > 0, 1.0)


def fill_empty_rows(weights: "npt.NDArray[np.floating] | torch.Tensor", first: int = 0) -> None:
    """Set rows of weights [..., query, key] that are all 0 to the query's own key, in place.

    first: the key at the position of the first query.
    """
    own = np.arange(weights.shape[-2])
    weights[..., own, first + own] += weights.sum(axis=-1) == 0


def measure_no_token_share(scores: "torch.Tensor", keys: int) -> "torch.Tensor":
    """[sequence, query]: the attention that goes to no token, mean over heads.

    scores: [sequence, head, query, key], of which those after the first `keys` are of no tokens.
    """
    return scores.softmax(dim=-1)[..., keys:].sum(dim=-1).mean(dim=1)


@dataclass(frozen=True, eq=False)
class Scoring:
    """Queries and keys, and all that turns them into the scores of the attention interface."""

    query: "torch.Tensor"  # [sequence, head, query, width]
    key: "torch.Tensor"  # [sequence, group of heads, width, key], in float32
    mask: "torch.Tensor | None"  # [sequence, head or 1, query or 1, key]
    bias: "torch.Tensor | None"  # [sequence or 1, head, query, key]
    no_token: "torch.Tensor | None"  # [head]: the score of a key that is not a token
    scaling: float
    softcap: float | None
    hides_future: bool  # by itself, without a mask

    @classmethod
    def read(
        cls,
        module: "torch.nn.Module",
        query: "torch.Tensor",
        key: "torch.Tensor",
        mask: "torch.Tensor | None",
        options: Mapping[str, Any],
        *,
        hides_future: bool,
    ) -> "Scoring":
        """The scoring of one call of the interface, with the options of the model's family.

        key: [sequence, group of heads, key, width]. hides_future: whether the function that
        attends does so by itself, where it has no mask and the module is causal.
        """
        scaling, is_causal = options.get(SCALING), options.get(CAUSAL)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        return cls(
            query,
            key.float().transpose(2, 3),
            mask,
            options.get(SCORE_BIAS),
            options.get(NO_TOKEN_SCORE),
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            options.get(SOFTCAP),
            hides_future and mask is None and bool(is_causal) and query.shape[2] > 1,
        )

    def score(self, rows: slice) -> "torch.Tensor":
        """[sequence, head, query, key]: the scores of some queries, up to the last key they see."""
        import torch

        sequences, count, _, width = self.query.shape
        groups, keys = self.key.shape[1], self.key.shape[3]
        size = rows.stop - rows.start
        seen = min(keys, rows.stop) if self.hides_future else keys
        # the heads of a group below each other
        block = (self.query[:, :, rows].float() * self.scaling).reshape(
            sequences, groups, -1, width
        )
        scores: torch.Tensor = (block @ self.key[..., :seen]).view(sequences, count, size, seen)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            scores += self.bias[:, :, rows, :seen].float()
        if self.mask is not None:
            part = self.mask[:, :, rows if self.mask.shape[2] > 1 else slice(None), :seen]
            hide(scores, ~part if part.dtype == torch.bool else part.float())
        if self.hides_future:
            shape = (size, seen - rows.start)
            future = torch.ones(shape, dtype=torch.bool, device=scores.device).triu_(1)
            hide(scores[..., rows.start :], future)
        return scores


def compute_weights(
    scoring: Scoring,
    heads: str | None,
    weights: "torch.Tensor",
    block_scores: int | None = None,
) -> "torch.Tensor | None":
    """Set weights [sequence, head or 1, query, key] to those that the interface attends by.

    block_scores: as in `cut_queries`. Returns the share of no token [sequence, query], where a
    model has a score for it.
    """
    import torch

    sequences, count, queries, _ = scoring.query.shape
    keys, extra = scoring.key.shape[3], scoring.no_token
    share = None if extra is None else torch.empty(sequences, queries)
    for rows in cut_queries(queries, sequences * count * keys, block_scores):
        scores = scoring.score(rows)
        size, seen = scores.shape[2:]
        if share is not None and extra is not None:
            more = extra.float().reshape(1, -1, 1, 1).expand(sequences, -1, size, 1)
            every = torch.cat([scores, more], dim=-1)
            share[:, rows] = measure_no_token_share(every, seen).cpu()
        weights[:, :, rows, seen:] = 0.0
        weights[:, :, rows, :seen] = fuse(torch.softmax(scores, dim=-1, out=scores), heads)
    return share
