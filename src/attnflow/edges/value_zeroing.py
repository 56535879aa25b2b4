"""`value_zeroing`: how a block's output turns when a key's value is set to zero.

The edge from query i to key j weighs the cosine distance between the output of the whole block
(attention, MLP and norms) at i, unchanged and with the value of j set to zero in all heads of
that layer; rows sum to 1 (Mohebbi et al. 2023). The block is run once per key.
"""

from typing import TYPE_CHECKING

from attnflow.capturing.mix import LayerMix
from attnflow.capturing.rerun import TOKENS
from attnflow.edges.norm import normalise_edges
from attnflow.errors import CaptureError, OptionError

if TYPE_CHECKING:
    import torch

MOVES = 1e-6  # an output that moves by a smaller share of its length counts as unchanged


def weigh_value_zeroing(mix: LayerMix) -> "torch.Tensor":
    """[query, key]: the cosine distance due to each value, rows summing to 1."""
    import torch

    if mix.rerun is None or mix.output is None:
        raise CaptureError(f"the block of {mix.name} was not recorded")
    if bool((mix.own >= len(mix.output)).any()):
        refuse_cross("value_zeroing", mix.name)
    keys = mix.attention.shape[2]
    distances = torch.zeros(mix.attention.shape[1:], dtype=torch.float64, device=mix.output.device)
    at_once = max(1, TOKENS // len(mix.output))
    for start in range(0, keys, at_once):
        chosen = range(start, min(start + at_once, keys))
        changed = mix.rerun(chosen)
        distances[:, start : chosen.stop] = measure_distance(changed, mix.output).T
    distances[~mix.visible | (distances < MOVES**2 / 2)] = 0.0
    return normalise_edges(distances, mix.own)


def measure_distance(first: "torch.Tensor", second: "torch.Tensor") -> "torch.Tensor":
    """[..., position]: 1 - cosine of vectors [..., position, width]; exact even if small."""
    units = [
        each.double() / each.double().norm(dim=-1, keepdim=True).clamp_min(1e-300)
        for each in (first, second)
    ]
    return (units[0] - units[1]).pow(2).sum(dim=-1) / 2


def refuse_cross(name: str, where: str) -> None:
    """Refuse attention to another sequence: its residual is not a value, and gets no edge."""
    raise OptionError(
        f"edges {name!r} have no edge for the residual of attention to another sequence"
        f" ({where}): only values can be set to zero; use contribution edges"
    )
