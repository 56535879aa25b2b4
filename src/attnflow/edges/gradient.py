"""`gradient`: attention that the target depends on (Chefer, Gur and Wolf 2021).

A_bar is the mean over heads of the positive part of W times its gradient; the graph is I + A_bar,
not normalised, and its rollout is the relevance of Chefer et al.
"""

from typing import TYPE_CHECKING

from attnflow.capturing.mix import LayerMix
from attnflow.errors import CaptureError

if TYPE_CHECKING:
    import torch


def weigh_gradient(mix: LayerMix) -> "torch.Tensor":
    """[head, query, key]: the positive part of each weight times its gradient."""
    return attribute(mix).clamp_(min=0.0)


def attribute(mix: LayerMix, rule: str | None = None) -> "torch.Tensor":
    """[head, query, key]: each weight times its gradient, by the only rule or by one of several."""
    gradient = mix.gradient if rule is None else mix.gradients.get(rule)
    if gradient is None:
        raise CaptureError(f"the gradient of {mix.name} was not computed: give backward='plain'")
    return mix.attention * gradient
