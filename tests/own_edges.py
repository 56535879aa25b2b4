"""User-defined edge weights with backward rules of their own, in a module that workers can import."""

from typing import Any

import torch

import attnflow as af


def hold_weights(query: Any, key: Any, value: Any) -> Any:
    """Attention weights are constants: nothing goes back to queries and keys."""
    return torch.zeros_like(query), torch.zeros_like(key), value


def is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def hold_scale(call: af.ModuleCall) -> Any:
    """The scale of a norm is a constant; the mean that a layer norm takes away is not."""
    norm: Any = call.module
    gradient, state = call.gradient * norm.weight, call.entered
    epsilon = getattr(norm, "eps", None) or norm.variance_epsilon
    if isinstance(norm, torch.nn.LayerNorm):
        scale = (state.var(-1, keepdim=True, unbiased=False) + epsilon).rsqrt()
        return scale * (gradient - gradient.mean(-1, keepdim=True))
    return gradient * (state.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()


def hold_mlp(call: af.ModuleCall) -> Any:
    """The rules of norms, and for a gated MLP: fixed ratios, the product halved between factors."""
    if is_norm(call.module):
        return hold_scale(call)
    if type(call.module).__name__ == "SiLUActivation":
        return call.gradient * call.entered.sigmoid()
    return call.own / 2 if type(call.module).__name__ == "LlamaMLP" else None


fixed_attention = af.BackwardRule("fixed attention", attention=hold_weights)
fixed_norms = af.BackwardRule("fixed norms", module=hold_scale, applies_to=is_norm)
fixed_both = af.BackwardRule(
    "fixed attention and norms", attention=hold_weights, module=hold_scale, applies_to=is_norm
)
linear = af.BackwardRule("linear", attention=hold_weights, module=hold_mlp)


def weigh(mix: af.LayerMix) -> Any:
    """I + the mean over heads of what speaks for the target."""
    assert mix.gradient is not None
    positive = (mix.attention * mix.gradient).clamp_min(0.0).mean(dim=0)
    positive[torch.arange(len(mix.own)), mix.own] += 1.0
    return positive


held = af.edge_weight("held", weigh, backward=fixed_both)
