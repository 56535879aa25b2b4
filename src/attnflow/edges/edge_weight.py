"""`EDGES`: edge weights by name; and user-defined ones."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnflow.capturing.backward_rule import LINEARISED, PLAIN, BackwardRule, read_rule
from attnflow.capturing.mix import LayerMix
from attnflow.core.arrays import Floats
from attnflow.core.choices import Choices, call_own, check_name, name_function
from attnflow.core.fusion import FUSIONS
from attnflow.edges.attention import weigh_attention
from attnflow.edges.contribution import weigh_contribution
from attnflow.edges.effective import weigh_effective
from attnflow.edges.gradient import weigh_gradient
from attnflow.edges.norm import weigh_norm
from attnflow.edges.relevance import (
    carry_relevance,
    weigh_relevance,
    weigh_relevance_and_gradient,
    weigh_signed_relevance,
)
from attnflow.edges.value_zeroing import weigh_value_zeroing
from attnflow.errors import OptionError

RESIDUALS = ("inside", "mixed")
FUTURE_ROUNDING = 1e-6  # of the largest edge
Weigh = Callable[[LayerMix], Any]  # an array or tensor [query, key] or [head, query, key]


class LayerEdges(NamedTuple):
    """The edges of one layer."""

    weights: Floats  # [query, key]
    has_heads: bool  # whether they were fused from several heads


@dataclass(frozen=True)
class EdgeWeight:
    """The weight of the edges of a graph.

    Parameters
    ----------
    name
        The name that results bear.
    compute
        A function of a `LayerMix`; returns [query, key], or [head, query, key], which is fused.
    residual
        "inside": the weights contain the residual connection. "mixed": it is mixed in as for
        attention, and rows sum to 1.
    backward
        The rule of the backward pass that computes `LayerMix.gradient`, or several, whose
        gradients are in `LayerMix.gradients`; None if not needed.
    identity
        Whether the residual connection is added to the weights, with weight 1.
    signed
        Whether `compute` may return negative weights, which become 0 once heads are fused.
    rerun
        Whether the block is run again without some values.
    cross
        Whether attention to another sequence has edges.
    carry
        Makes edges, which may be negative, of the weights of all layers [layer, query, key], the
        watched scores and their positions.
    """

    name: str
    compute: Weigh
    residual: str = "inside"
    backward: BackwardRule | tuple[BackwardRule, ...] | None = None
    identity: bool = False
    signed: bool = False
    rerun: bool = False
    cross: bool = True
    carry: Callable[[Floats, Sequence[float], Sequence[int]], Floats] | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(rule, BackwardRule) for rule in self.rules):
            raise OptionError(
                f"backward of edges {self.name!r} must be a BackwardRule or None; got"
                f" {self.backward!r}: af.edge_weight takes names of rules as well"
            )

    @property
    def rules(self) -> tuple[BackwardRule, ...]:
        """The backward rules."""
        if self.backward is None:
            return ()
        return self.backward if isinstance(self.backward, tuple) else (self.backward,)

    @property
    def gradient(self) -> bool:
        """The old name of `backward`: whether there is one."""
        warnings.warn("EdgeWeight.gradient is now backward", FutureWarning, stacklevel=2)
        return self.backward is not None

    def __call__(self, mix: LayerMix) -> Any:
        """The result of `compute` for one layer."""
        return self.compute(mix)

    def weigh(self, mix: LayerMix, heads: str = "mean") -> Floats:
        """[query, key] of one layer, checked.

        Parameters
        ----------
        mix, heads
            As for `weigh_layer`.
        """
        return self.weigh_layer(mix, heads).weights

    def weigh_layer(self, mix: LayerMix, heads: str = "mean") -> LayerEdges:
        """The edges of one layer, checked.

        Parameters
        ----------
        mix
            The mix of the layer.
        heads
            "mean", "max" or "min", where `compute` returns every head.
        """
        where = f"edges {self.name!r} of {mix.name}"
        hidden = None if EDGES.get(self.name) is self else find_future(mix)
        values = call_own(where, self.compute, mix)
        try:
            edges, has_heads = fuse_values(values, heads)
        except (TypeError, ValueError, RuntimeError) as error:  # numpy takes no sparse tensor
            raise OptionError(
                f"{where} must be an array of numbers; got {type(values).__name__}"
            ) from error
        expected = tuple(mix.attention.shape[1:])
        if edges.shape != expected:
            raise OptionError(
                f"{where} must have shape [query, key], here {expected}; got {edges.shape}"
            )
        if self.signed:
            edges = np.maximum(edges, 0.0)
        is_negative = self.carry is None and bool((edges < 0).any())
        if is_negative or not np.isfinite(edges).all():
            raise OptionError(f"{where} must be finite and not negative; got {edges.min():.3g}")
        own = mix.own.cpu().numpy()
        if hidden is not None:
            clear_future(where, edges, hidden)
        if self.residual == "mixed":
            empty = edges.sum(axis=-1) <= 0
            edges[np.flatnonzero(empty), own[empty]] = 1.0
            edges /= edges.sum(axis=-1, keepdims=True)
        if self.identity:
            edges[np.arange(len(own)), own] += 1.0
        return LayerEdges(edges, has_heads)


def find_future(mix: LayerMix) -> npt.NDArray[np.bool_]:
    """[query, key]: the later positions, where attention is causal; else nothing."""
    keys = np.arange(mix.attention.shape[-1])
    later: npt.NDArray[np.bool_] = mix.own.cpu().numpy()[:, None] < keys
    is_causal = not mix.attention.numpy(force=True)[:, later].any()
    return later & is_causal


def clear_future(where: str, edges: Floats, hidden: npt.NDArray[np.bool_]) -> None:
    """Refuse edges [query, key] that read later positions; clear rounding there, in place."""
    ahead = np.where(hidden, np.abs(edges), 0.0)
    if ahead.max(initial=0.0) > FUTURE_ROUNDING * np.abs(edges).max(initial=0.0):
        query, key = divmod(int(ahead.argmax()), edges.shape[1])
        raise OptionError(
            f"{where} must be 0 at later positions, which causal attention hides; got"
            f" {edges[query, key]:.3g} at query {query}, key {key}"
        )
    edges[hidden] = 0.0


def fuse_values(values: Any, heads: str) -> LayerEdges:
    """Values in float64, with heads fused if there are several; those of tensors in their dtype.

    Raises TypeError, ValueError or RuntimeError for anything but an array of real numbers.
    """
    has_heads = False
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point() and values.element_size() <= 2:  # numpy knows no bfloat16
            values = values.float()
        if values.ndim == 3 and len(values):
            fuse = {"mean": values.mean, "max": values.amax, "min": values.amin}[heads]
            values, has_heads = fuse(dim=0), True
        values = values.numpy()
    if np.iscomplexobj(values):
        raise TypeError("an edge weight is one number")
    edges = np.array(values, dtype=np.float64)
    if edges.ndim == 3 and len(edges):
        return LayerEdges(np.asarray(FUSIONS[heads](edges, axis=0)), True)
    return LayerEdges(edges, has_heads)


EDGES: dict[str, EdgeWeight] = {
    "attention": EdgeWeight("attention", weigh_attention, residual="mixed"),
    "effective": EdgeWeight("effective", weigh_effective, residual="mixed", signed=True),
    "norm": EdgeWeight("norm", weigh_norm),
    "contribution": EdgeWeight("contribution", weigh_contribution),
    "gradient": EdgeWeight("gradient", weigh_gradient, backward=PLAIN, identity=True),
    "relevance": EdgeWeight("relevance", weigh_relevance, backward=LINEARISED, identity=True),
    "relevance_and_gradient": EdgeWeight(
        "relevance_and_gradient",
        weigh_relevance_and_gradient,
        backward=(LINEARISED, PLAIN),
        identity=True,
    ),
    "signed_relevance": EdgeWeight(
        "signed_relevance", weigh_signed_relevance, backward=LINEARISED, carry=carry_relevance
    ),
    "value_zeroing": EdgeWeight("value_zeroing", weigh_value_zeroing, rerun=True, cross=False),
}


def edge_weight(
    name: str,
    compute: Weigh,
    *,
    residual: str = "inside",
    backward: BackwardRule | str | None = None,
    rerun: bool = False,
    gradient: bool | None = None,
) -> EdgeWeight:
    """Make a user-defined edge weight.

    Parameters
    ----------
    name
        The name that results bear.
    compute
        A function of one `LayerMix`, called once per layer; returns [query, key], finite and not
        negative, or [head, query, key], whose heads are then fused.
    residual
        "inside" if the weights contain the residual connection; "mixed" to mix it in, as for
        attention.
    backward
        The rule of the backward pass that computes `LayerMix.gradient`: a `BackwardRule`, or the
        name of one ("plain": autograd unchanged). None if no gradient is needed.
    rerun
        Whether `LayerMix.rerun` and `LayerMix.output` are needed.
    gradient
        Deprecated: `gradient=True` is now `backward="plain"`.

    >>> values = edge_weight("values", lambda mix: mix.attention.mean(0), residual="mixed")
    >>> values.name, values.residual
    ('values', 'mixed')
    """
    check_name(name, "edge weight")
    if name in EDGES:
        raise OptionError(f"a user-defined edge weight must have a name of its own; got {name!r}")
    if residual not in RESIDUALS:
        raise OptionError(f"unknown residual {residual!r}; choose from {', '.join(RESIDUALS)}")
    if not callable(compute):
        raise OptionError(f"compute must be a function; got {type(compute).__name__}")
    rule = read_backward(backward, gradient, "edge_weight")
    return EdgeWeight(name, compute, residual, rule, rerun=rerun)


def read_backward(
    backward: BackwardRule | str | None, gradient: bool | None, function: str
) -> BackwardRule | None:
    """The rule of a backward pass; `gradient=`, its old name, works with a warning.

    function: the function that was called, in the warning.
    """
    if gradient is None:
        return read_rule(backward)
    warnings.warn(
        f"{function}(gradient=True) is now {function}(backward='plain')",
        FutureWarning,
        stacklevel=3,
    )
    return read_rule(backward) or (PLAIN if gradient else None)


def read_edges(chosen: Choices) -> dict[str, EdgeWeight]:
    """Edge weights by name, from names, `EdgeWeight`s, or {name: function}."""
    if isinstance(chosen, str) or callable(chosen):
        chosen = [chosen]
    if not isinstance(chosen, Iterable) or isinstance(chosen, bytes):
        raise OptionError(
            f"edges must be names, or {{name: function}}; got {chosen!r}: choose from"
            f" {', '.join(EDGES)}, or give what af.edge_weight makes",
            options=["edges"],
        )
    pairs = chosen.items() if isinstance(chosen, dict) else ((None, item) for item in chosen)
    weights: dict[str, EdgeWeight] = {}
    for name, item in pairs:
        weight = read_edge(name, item)
        if weight.name in weights:
            raise OptionError(
                f"each edge weight must have a name of its own; got {weight.name!r} twice"
            )
        weights[weight.name] = weight
    if not weights:
        raise OptionError(
            f"at least one edge weight is needed; choose from {', '.join(EDGES)}", options=["edges"]
        )
    return weights


def read_edge(name: str | None, item: Any) -> EdgeWeight:
    """One edge weight, from a name, an `EdgeWeight` or a function. name: its key in a dict."""
    if item is None or isinstance(item, str):
        known = name if item is None else item
        if known not in EDGES:
            raise OptionError(
                f"unknown edges {known!r}; choose from {', '.join(EDGES)},"
                " or give what af.edge_weight makes",
                options=["edges"],
            )
        return EDGES[known]
    if not isinstance(item, EdgeWeight):
        return edge_weight(name or name_function(item, "edge weight"), item)
    if name in (None, item.name):
        return item
    return replace(item, name=edge_weight(name, item.compute).name)


def name_result(edge_name: str, method: str) -> str:
    """The name of a method's result on some edges; on attention, that of the method alone.

    >>> name_result("attention", "rollout"), name_result("contribution", "rollout")
    ('rollout', 'contribution rollout')
    """
    return method if edge_name == "attention" else f"{edge_name} {method}"


def split_name(result: str) -> tuple[str, str]:
    """The edges and the method of a result, from its name.

    >>> split_name("rollout"), split_name("contribution rollout")
    (('attention', 'rollout'), ('contribution', 'rollout'))
    """
    edge_name, _, method = result.rpartition(" ")
    return edge_name or "attention", method
