"""`attention`: the attention weights themselves."""

from typing import TYPE_CHECKING

from attnflow.capturing.mix import LayerMix

if TYPE_CHECKING:
    import torch


def weigh_attention(mix: LayerMix) -> "torch.Tensor":
    """[head, query, key]: the weights of every head."""
    return mix.attention
