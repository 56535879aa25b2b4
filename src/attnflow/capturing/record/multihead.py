"""The attention weights of one call of `nn.MultiheadAttention`, computed from its arguments."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnflow.core.arrays import ROW_TOLERANCE
from attnflow.errors import CaptureError
from attnflow.models.attention_weights import (
    cut_queries,
    fill_empty_rows,
    fuse,
    hide,
    measure_no_token_share,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class MultiheadInput:
    """The arguments of one call of nn.MultiheadAttention, batch first."""

    module: "torch.nn.MultiheadAttention"
    query: "torch.Tensor"  # [batch, query, feature]
    key: "torch.Tensor"  # [batch, key, feature]
    mask: "torch.Tensor | None"  # [query, key] or [batch * head, query, key]
    padding: "torch.Tensor | None"  # [batch, key]: bool, or added to the scores
    is_causal: bool  # torch applies its own causal mask instead of `mask`
    unused: "torch.Tensor | None"  # [batch, query]: rows that are not used, 0 if undefined


def compute_multihead_weights(
    given: MultiheadInput, heads: str | None, place: str
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """[batch, head or 1, query, key], and the share of no token [batch, query] if there is one.

    place: the name of the call in errors.
    """
    import torch

    dtype = torch.float64 if given.query.dtype == torch.float64 else torch.float32
    queries, keys = project(given, dtype)  # [batch, head, position, dim]
    batch, count, length, _ = queries.shape
    size = given.key.shape[1]
    masks = list_masks(given, queries, keys)
    weights = torch.empty(batch, count if heads is None else 1, length, size, dtype=dtype)
    has_share = keys.shape[2] > size  # bias_k or the zero key
    share = torch.empty(batch, length, dtype=dtype) if has_share else None
    tolerance = ROW_TOLERANCE[weights.element_size()]
    for rows in cut_queries(length, batch * count * keys.shape[2]):
        scores = queries[:, :, rows] @ keys.transpose(-2, -1)  # [batch, head, block, key]
        for mask in masks:
            hide(scores[..., : mask.shape[-1]], mask[:, :, rows])
        if share is not None:
            share[:, rows] = measure_no_token_share(scores, size)
        part = fuse(scores[..., :size].softmax(dim=-1), heads)
        if heads == "min" and length == size:  # where heads share no key
            fill_empty_rows(part, rows.start)
        sums = part.sum(-1)  # [batch, head or 1, block]
        wrong = ~((sums - 1).abs() <= tolerance)
        if given.unused is not None:
            unused = given.unused[:, rows]
            part = part.masked_fill((wrong.any(1) & unused)[:, None, :, None], 0.0)
            wrong &= ~unused[:, None]
        if wrong.any():
            sequence, head, row = wrong.nonzero()[0].tolist()
            where = f"{place}: query {rows.start + row} of sequence {sequence}"
            # in any head
            sees_none = (scores[sequence, :, row, :size] == -torch.inf).all(-1).any()
            raise CaptureError(
                f"{where} sees no key, so that its weights are NaN;"
                " give a mask that leaves every query one key"
                if sees_none
                else f"{where}: weights must sum to 1 within {tolerance:g};"
                f" got {float(sums[sequence, head, row]):.6g};"
                " look for NaN or infinity in the module's input and parameters"
            )
        weights[:, :, rows] = part
    return weights, share


def project(given: MultiheadInput, dtype: "torch.dtype") -> "tuple[torch.Tensor, torch.Tensor]":
    """Scaled queries and keys [batch, head, position, dim]; bias_k and the zero key come last."""
    import torch

    module, linear = given.module, torch.nn.functional.linear
    if module.in_proj_weight is None:
        by_query, by_key = module.q_proj_weight, module.k_proj_weight
    else:
        by_query, by_key, _ = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.to(dtype).chunk(3)
    query = linear(given.query.to(dtype), by_query.to(dtype), biases[0])  # [batch, query, embed]
    key = linear(given.key.to(dtype), by_key.to(dtype), biases[1])  # [batch, key, embed]
    if module.bias_k is not None:
        key = torch.cat([key, module.bias_k.to(dtype).expand(len(key), 1, -1)], dim=1)
    if module.add_zero_attn:
        key = torch.cat([key, torch.zeros_like(key[:, :1])], dim=1)
    query, key = (
        states.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for states in (query, key)
    )
    return query * query.shape[-1] ** -0.5, key


def list_masks(
    given: MultiheadInput, query: "torch.Tensor", key: "torch.Tensor"
) -> "list[torch.Tensor]":
    """The masks that apply to this call, each [batch or 1, head or 1, query, key]."""
    import torch

    batch, count, length, _ = query.shape
    masks = []
    if given.is_causal:  # hides bias_k and the zero key too
        shape = (length, key.shape[2])
        masks.append(torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)[None, None])
    elif given.mask is not None and given.mask.dim() == 2:
        masks.append(given.mask[None, None])
    elif given.mask is not None:
        masks.append(given.mask.reshape(batch, count, length, given.key.shape[1]))
    if given.padding is not None:
        masks.append(given.padding[:, None, None].expand(-1, -1, length, -1))
    return masks
