"""`EDGES`: what an edge can weigh, by name; and edge weights of a user's own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnflow.capturing.mixing import LayerMix
from attnflow.core.arrays import Floats
from attnflow.core.custom import Choices, call_own, check_name, name_function
from attnflow.core.fusion import FUSIONS
from attnflow.edges.contribution import weigh_contributions
from attnflow.edges.effective import weigh_effective
from attnflow.edges.lengths import weigh_lengths
from attnflow.edges.plain import weigh_attention
from attnflow.edges.relevance import weigh_relevance
from attnflow.edges.zeroing import weigh_zeroing
from attnflow.errors import OptionError

RESIDUALS = ("inside", "mixed")


@dataclass(frozen=True)
class EdgeWeight:
    """What an edge of the graph weighs.

    Parameters
    ----------
    name
        What results are called after it.
    compute
        A function of a `LayerMix`; returns [query, key], or [head, query, key], which is fused.
    residual
        "inside": the weights hold the residual connection. "mixed": it is mixed in as for
        attention, and rows sum to 1.
    gradient
        Whether it needs the gradient of a target.
    identity
        Whether the residual connection stands in the graph with weight 1, beside the weights.
    signed
        Whether `compute` may give negative weights, which become 0 once heads are fused.
    rerun
        Whether it needs the block run again without some values.
    cross
        Whether it has edges for attention to another sequence.
    """

    name: str
    compute: Callable[[LayerMix], Any]
    residual: str = "inside"
    gradient: bool = False
    identity: bool = False
    signed: bool = False
    rerun: bool = False
    cross: bool = True

    def __call__(self, mix: LayerMix) -> Any:
        """What `compute` says of one layer."""
        return self.compute(mix)

    def weigh(self, mix: LayerMix, heads: str = "mean", *, must_fuse: bool = False) -> Floats:
        """[query, key] of one layer, checked.

        Parameters
        ----------
        mix, heads, must_fuse
            As for `weigh_heads`.
        """
        return self.weigh_heads(mix, heads, must_fuse=must_fuse)[0]

    def weigh_heads(
        self, mix: LayerMix, heads: str = "mean", *, must_fuse: bool = False
    ) -> tuple[Floats, bool]:
        """[query, key] of one layer, checked, and whether heads were fused.

        Parameters
        ----------
        mix
            What the layer mixed.
        heads
            "mean", "max" or "min", where `compute` gives every head.
        must_fuse
            Refuse heads other than "mean" where it does not.
        """
        values = call_own(f"edges {self.name!r} of {mix.name}", self.compute, mix)
        has_heads = False
        if hasattr(values, "detach"):
            values = values.detach().cpu()
            if values.ndim == 3 and len(values):
                values, has_heads = fuse_heads(values, heads), True
            values = values.numpy()
        try:
            if np.iscomplexobj(values):
                raise TypeError("an edge weight is one number")
            edges = np.array(values, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"edges {self.name!r} of {mix.name} must be an array of numbers;"
                f" got {type(values).__name__}"
            ) from error
        if edges.ndim == 3 and len(edges):
            edges, has_heads = np.asarray(FUSIONS[heads](edges, axis=0)), True
        elif must_fuse and not has_heads and heads != "mean":
            raise OptionError(
                f"edges {self.name!r} have no heads to fuse; got heads={heads!r}: leave it out"
            )
        expected = tuple(mix.attention.shape[1:])
        if edges.shape != expected:
            raise OptionError(
                f"edges {self.name!r} of {mix.name} must have shape [query, key], here {expected};"
                f" got {edges.shape}"
            )
        if self.signed:
            edges = np.maximum(edges, 0.0)
        if not np.isfinite(edges).all() or (edges < 0).any():
            raise OptionError(
                f"edges {self.name!r} of {mix.name} must be finite and not negative;"
                f" got {edges.min():.3g}"
            )
        own = mix.own.cpu().numpy()
        if self.residual == "mixed":
            empty = edges.sum(axis=-1) <= 0
            edges[np.flatnonzero(empty), own[empty]] = 1.0
            edges /= edges.sum(axis=-1, keepdims=True)
        if self.identity:
            edges[np.arange(len(own)), own] += 1.0
        return edges, has_heads


EDGES: dict[str, EdgeWeight] = {
    "attention": EdgeWeight("attention", weigh_attention, residual="mixed"),
    "effective": EdgeWeight("effective", weigh_effective, residual="mixed", signed=True),
    "norm": EdgeWeight("norm", weigh_lengths),
    "contribution": EdgeWeight("contribution", weigh_contributions),
    "gradient": EdgeWeight("gradient", weigh_relevance, gradient=True, identity=True),
    "value_zeroing": EdgeWeight("value_zeroing", weigh_zeroing, rerun=True, cross=False),
}


def fuse_heads(values: Any, heads: str) -> Any:
    """[query, key]: a tensor [head, query, key] fused, in its own precision."""
    if heads == "mean":
        return values.mean(dim=0)
    return values.amax(dim=0) if heads == "max" else values.amin(dim=0)


def edge_weight(
    name: str,
    compute: Callable[[LayerMix], Any],
    *,
    residual: str = "inside",
    gradient: bool = False,
    rerun: bool = False,
) -> EdgeWeight:
    """Make an edge weight of your own.

    Parameters
    ----------
    name
        What results are called after it.
    compute
        A function of one `LayerMix`, called once per layer; returns [query, key], finite and not
        negative, or [head, query, key], whose heads are then fused.
    residual
        "inside" if the weights hold the residual connection; "mixed" if it is to be mixed in, as
        for attention.
    gradient
        Whether `LayerMix.gradient` is needed.
    rerun
        Whether `LayerMix.rerun` and `LayerMix.output` are needed.

    >>> values = edge_weight("values", lambda mix: mix.attention.mean(0), residual="mixed")
    >>> values.name, values.residual
    ('values', 'mixed')
    """
    check_name(name, "edge weight")
    if name in EDGES:
        raise OptionError(f"an edge weight of your own must have a name of its own; got {name!r}")
    if residual not in RESIDUALS:
        raise OptionError(f"unknown residual {residual!r}; choose from {', '.join(RESIDUALS)}")
    if not callable(compute):
        raise OptionError(f"compute must be a function; got {type(compute).__name__}")
    return EdgeWeight(name, compute, residual, gradient, rerun=rerun)


def read_edges(chosen: Choices) -> dict[str, EdgeWeight]:
    """Edge weights by name, from names, `EdgeWeight`s, or {name: function}."""
    if isinstance(chosen, str | EdgeWeight) or callable(chosen):
        chosen = [chosen]
    if not isinstance(chosen, Iterable) or isinstance(chosen, bytes):
        raise OptionError(
            f"edges must be names, or {{name: function}}; got {chosen!r}: choose from"
            f" {', '.join(EDGES)}, or give what af.edge_weight makes"
        )
    pairs = list(chosen.items()) if isinstance(chosen, dict) else [(None, item) for item in chosen]
    weights: dict[str, EdgeWeight] = {}
    for name, item in pairs:
        if item is None or isinstance(item, str):
            wanted = name if item is None else item
            if wanted not in EDGES:
                raise OptionError(
                    f"unknown edges {wanted!r}; choose from {', '.join(EDGES)},"
                    " or give what af.edge_weight makes"
                )
            weight = EDGES[wanted]
        elif isinstance(item, EdgeWeight):
            weight = item if name in (None, item.name) else rename_weight(item, name)
        else:
            weight = edge_weight(name or name_function(item, "edge weight"), item)
        if weight.name in weights:
            raise OptionError(
                f"each edge weight must have a name of its own; got {weight.name!r} twice"
            )
        weights[weight.name] = weight
    if not weights:
        raise OptionError(f"at least one edge weight is needed; choose from {', '.join(EDGES)}")
    return weights


def check_fusion(heads: str) -> None:
    """Refuse what is no way to fuse the heads of edges."""
    if heads not in FUSIONS:
        raise OptionError(f"unknown heads {heads!r}; choose from {', '.join(FUSIONS)}")


def rename_weight(weight: EdgeWeight, name: str) -> EdgeWeight:
    """The same edge weight under another name."""
    edge_weight(name, weight.compute)  # which refuses a name that it may not have
    return replace(weight, name=name)


def name_result(edge_name: str, method: str) -> str:
    """What a method's result on some edges is called: on attention, after the method alone.

    >>> name_result("attention", "rollout"), name_result("contribution", "rollout")
    ('rollout', 'contribution rollout')
    """
    return method if edge_name == "attention" else f"{edge_name} {method}"


def split_name(result: str) -> tuple[str, str]:
    """The edges and the method that a result is called after.

    >>> split_name("rollout"), split_name("contribution rollout")
    (('attention', 'rollout'), ('contribution', 'rollout'))
    """
    edge_name, _, method = result.rpartition(" ")
    return edge_name or "attention", method
