"""`attention_graph`: the graph of a model's layers on an input, with any edges.

One forward pass gives attention, prediction and all edges that are requested, layer by layer. Those
that need gradients share one more forward pass before it, with one backward pass per backward rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import numpy as np

from attnflow.capturing.backward import (
    Gradients,
    TargetOrPair,
    Watch,
    WatchedTarget,
    read_foil,
    read_targets,
    run_backward,
)
from attnflow.capturing.backward_rule import BackwardRule
from attnflow.capturing.capture import (
    ForwardPass,
    embed_layer,
    extend_words,
    find_source,
    order_layers,
    place_part,
    run_batch,
)
from attnflow.capturing.follow import Finish, ObservedLayer
from attnflow.capturing.mix import LayerMix, SequenceSlice, add_gradient, make_mix
from attnflow.capturing.rerun import record_blocks
from attnflow.core.arrays import Array
from attnflow.core.checks import check_residual
from attnflow.core.choices import Choices
from attnflow.core.fusion import FUSIONS
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.edges.edge_weight import EDGES, EdgeWeight, read_backward, read_edges
from attnflow.edges.value_zeroing import refuse_cross
from attnflow.errors import OptionError
from attnflow.models.encode import encode_inputs
from attnflow.models.encoded import AnInput, Encoded, OneInput, batches
from attnflow.models.execution import unchanged
from attnflow.models.families import name_part
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import Foil
from attnflow.models.wiring.linear_maps import ModuleReader

# the mix of a layer, with the gradient of each backward rule, and under None without one
MixByRule = Mapping[BackwardRule | None, LayerMix]


class EdgePass(NamedTuple):
    """One forward pass, and the graphs of each input by the name of their edges."""

    forward: ForwardPass
    graphs: list[dict[str, AttentionGraph]]


# the largest edge of a layer that is kept in float32, with room for those that are far smaller
SMALLEST_SINGLE, LARGEST_SINGLE = 1e-20, 1e30


@overload
def attention_graph(
    model: ModelLike,
    inputs: OneInput,
    *,
    edges: Choices = ...,
    target: TargetOrPair = ...,
    foil: Foil | None = ...,
    target_of: str = ...,
    residual: float | None = ...,
    heads: str = ...,
    position: int | None = ...,
    truncation: bool = ...,
) -> AttentionGraph: ...


@overload
def attention_graph(
    model: ModelLike,
    inputs: list[AnInput],
    *,
    edges: Choices = ...,
    target: TargetOrPair = ...,
    foil: Foil | None = ...,
    target_of: str = ...,
    residual: float | None = ...,
    heads: str = ...,
    position: int | None = ...,
    truncation: bool = ...,
) -> list[AttentionGraph]: ...


def attention_graph(
    model: ModelLike,
    inputs: object,
    *,
    edges: Choices = "attention",
    target: TargetOrPair = None,
    foil: Foil | None = None,
    target_of: str = "logit",
    residual: float | None = None,
    heads: str = "mean",
    position: int | None = None,
    truncation: bool = False,
) -> AttentionGraph | list[AttentionGraph]:
    """Compute the graph of a model's layers on an input, with edges of any kind.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    inputs
        One input, as `capture` takes it, or a list of them, which returns a list.
    edges
        The weight of the edges: "attention"; "effective", without the part that changes no output;
        "norm", the length of the part that comes from a key; "contribution", how much nearer that
        part brings the stream to its value; "gradient", attention times its gradient, where
        positive; "relevance", the same in a linearised backward pass; "relevance_and_gradient",
        the mean of both; "signed_relevance", exact shares with their signs, for rollout;
        "value_zeroing", how the block's output turns without a key's value; or an
        `edge_weight`.
    target
        The target of gradient and relevance edges: a class by name or number, for language models a
        token; or a pair of them, whose difference is watched. The predicted class if None.
    foil
        The class that the target is contrasted with; `RUNNER_UP` is the most probable other one.
    target_of
        "logit", "log_probability" or "probability" of the target.
    residual
        The weight of the residual connection, 0.5 if None, for edges that it is mixed into; refused
        where the edges contain it.
    heads
        "mean", "max" or "min", for edges that have heads: attention, effective, gradient.
    position
        Where the target is read; where the prediction comes from if None.
    truncation
        Whether to cut inputs to the maximum length of the model.

    >>> from attnflow import load
    >>> attention_graph(load("verb-number"), "the key to the cabinets", edges="contribution")
    <AttentionGraph: 6 layers, 6 positions, residual inside>
    """
    model = open_model(model)
    weights = read_edges(edges)
    if len(weights) != 1:
        raise OptionError(f"one kind of edges makes a graph; got {', '.join(weights)}")
    (name,) = weights
    refuse_residual(weights, residual)
    if heads not in list(FUSIONS):  # it may be what cannot be hashed
        raise OptionError(f"unknown heads {heads!r}; choose from {', '.join(FUSIONS)}")
    encoded, many = encode_inputs(model, inputs, truncation)
    for each in encoded if position is not None else ():
        model.locate(each, position)  # refused also where no gradient is taken
    watches = watch_edges(model, weights, read_foil(target, foil), target_of)
    graphs: dict[int, AttentionGraph] = {}
    for batch in batches(encoded, model.batch_tokens):
        chosen = [encoded[place] for place in batch]
        with unchanged(model.model):
            gradients = compute_gradients(model, chosen, watches, position)
            passed, made = run_edges(
                model, chosen, weights, heads, gradients, residual=residual, logits=False
            )
        for place, attention, by_name in zip(batch, passed.attentions, made, strict=True):
            graphs[place] = (
                by_name[name]
                if by_name
                else attention.graph(residual=RESIDUAL if residual is None else residual)
            )
            if heads != "mean" and graphs[place].source.heads is None:
                raise OptionError(
                    f"edges {name!r} have no heads to fuse; got heads={heads!r}: leave it out"
                )
    return [graphs[place] for place in range(len(encoded))] if many else graphs[0]


def capture_mix(
    model: ModelLike,
    value: OneInput,
    *,
    target: TargetOrPair = None,
    foil: Foil | None = None,
    target_of: str = "logit",
    position: int | None = None,
    backward: BackwardRule | str | None = None,
    rerun: bool = False,
    gradient: bool | None = None,
) -> list[LayerMix]:
    """Capture the parts that each layer mixed on one input.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    value
        One input, as `capture` takes it.
    target, foil, target_of, position
        The target of the gradient, as for `attention_graph`.
    backward
        The rule of the backward pass that computes `LayerMix.gradient`, as for `edge_weight`; None
        if no gradient is needed.
    rerun
        Whether to record `LayerMix.output` and `LayerMix.rerun`.
    gradient
        Deprecated: `gradient=True` is now `backward="plain"`.

    >>> from attnflow import load
    >>> mix = capture_mix(load("verb-number"), "the key to the cabinets")[5]
    >>> mix.attention.shape, mix.vectors.shape
    (torch.Size([8, 6, 6]), torch.Size([8, 6, 128]))
    """
    rule = read_backward(backward, gradient, "capture_mix")
    model = open_model(model)
    encoded = model.encode(value)
    aim = read_foil(target, foil)
    read_targets(model, aim, target_of, 1)
    if position is not None:
        model.locate(encoded, position)  # refused also where no gradient is taken
    watches = {} if rule is None else {rule: watch_rule(model, rule, aim, target_of)}
    gradients = compute_gradients(model, [encoded], watches, position)
    mixes: list[LayerMix] = []

    def take(place: int, by_rule: MixByRule) -> None:
        mixes.append(by_rule[rule])

    finish = read_mixes(model, [encoded], take, gradients, rerun)
    run_batch(model, [encoded], "mean", finish, logits=False)
    return mixes


# ---- gradients ----------------------------------------------------------------------------------


def watch_edges(
    model: Model,
    weights: Mapping[str, EdgeWeight],
    target: WatchedTarget = None,
    target_of: str = "logit",
) -> dict[BackwardRule, Watch]:
    """One watch per backward rule of these edge weights, for `run_backward`.

    The target is checked even if no edges need it.
    """
    read_targets(model, target, target_of, len(target) if isinstance(target, list) else 1)
    rules = [rule for weight in weights.values() for rule in weight.rules]
    return {rule: watch_rule(model, rule, target, target_of) for rule in rules}


def watch_rule(
    model: Model, rule: BackwardRule, target: WatchedTarget = None, target_of: str = "logit"
) -> Watch:
    """The watch of a backward rule, with the proof that a linear one conserves the target."""
    if rule.conserves and target_of != "logit":
        raise OptionError(
            f"relevance watches the logit, of which it gives shares; got target_of={target_of!r}:"
            " leave it out"
        )
    one_stack = not (model.is_vision or model.is_encoder_decoder)
    wanted = ("attention", "blocks") if rule.conserves and one_stack else ("attention",)
    return Watch(target, target_of, rule, wanted)


def compute_gradients(
    model: Model,
    inputs: Sequence[Encoded],
    watches: Mapping[BackwardRule, Watch],
    position: int | None = None,
) -> dict[BackwardRule, Gradients]:
    """The gradients of each watch; without one, nothing runs."""
    if not watches:
        return {}
    found = run_backward(model, inputs, watches, position=position)
    return {rule: found.gradients[rule] for rule in watches}


# ---- graphs -------------------------------------------------------------------------------------


def refuse_residual(weights: Mapping[str, EdgeWeight], residual: float | None) -> None:
    """Refuse a residual to mix in where all edges contain it."""
    if residual is not None and all(weight.residual == "inside" for weight in weights.values()):
        raise OptionError(
            f"edges {', '.join(map(repr, weights))} hold the residual inside, so residual is not"
            f" mixed in; got {residual!r}: leave it out"
        )


def drop_attention(weights: Mapping[str, EdgeWeight]) -> dict[str, EdgeWeight]:
    """The edge weights that need more than captured attention."""
    return {name: weight for name, weight in weights.items() if name != "attention"}


def run_edges(
    model: Model,
    inputs: Sequence[Encoded],
    weights: Mapping[str, EdgeWeight],
    heads: str | None = "mean",
    gradients: Mapping[Any, Gradients] = MappingProxyType({}),
    *,
    residual: float | None = None,
    logits: bool | Sequence[int] = True,
) -> EdgePass:
    """Run the model once, and make the graphs of all edges other than attention.

    heads: how heads of attention are fused, None to keep every head; those of edges are then fused
    by their mean. gradients: by backward rule, as `watch_edges` requests them; those with respect
    to attention are used up. logits: whether the scores of the model are wanted, or at which
    positions.
    """
    weights = drop_attention(weights)
    if not weights:
        return EdgePass(run_batch(model, inputs, heads, logits=logits), [{} for _ in inputs])
    if model.is_encoder_decoder:
        for name, weight in weights.items():
            if not weight.cross:
                refuse_cross(name, model.name)
    rules = {rule for weight in weights.values() for rule in weight.rules}
    chosen = {rule: found for rule, found in gradients.items() if rule in rules}
    collector = EdgeCollector(model, inputs, weights, heads)
    rerun = any(weight.rerun for weight in weights.values())
    finish = read_mixes(model, inputs, collector.take, chosen, rerun)
    passed = run_batch(model, inputs, heads, finish, logits=logits)
    return EdgePass(passed, collector.make_graphs(residual, chosen))


@dataclass(eq=False)
class EdgeCollector:
    """The edges of every layer of a batch, collected in one forward pass."""

    model: Model
    inputs: Sequence[Encoded]
    weights: Mapping[str, EdgeWeight]
    heads: str | None
    fused: dict[str, str] = field(default_factory=dict)  # how heads were fused, by edge weight
    names: list[str] = field(default_factory=list)  # of the modules that attend

    def __post_init__(self) -> None:
        # by input and edge weight, [query, key] of each layer
        self.layers: list[dict[str, list[Array]]] = [
            {name: [] for name in self.weights} for _ in self.inputs
        ]

    def take(self, place: int, mixes: MixByRule) -> None:
        """Weigh the edges of one layer of one input."""
        name = mixes[None].name
        if place == 0:
            self.names.append(name)
        for kind, edges in weigh_mixes(mixes, self.weights, self.heads, self.fused).items():
            self.layers[place][kind].append(self.widen(edges, name, self.inputs[place]))

    def widen(self, edges: Array, name: str, encoded: Encoded) -> Array:
        """Edges [query, key] of the attention of this name, over all positions of the graph."""
        if not self.model.is_encoder_decoder:
            return edges
        encoder, decoder = len(encoded.ids), len(encoded.decoder_ids)
        part = name_part(name)
        rows, columns = place_part(part, encoder, decoder)
        if part == "cross":  # its keys are followed by the decoder's own positions
            columns = slice(None)
        return embed_layer(edges, rows, columns, encoder + decoder)

    def make_graphs(
        self, residual: float | None, gradients: Mapping[BackwardRule, Gradients]
    ) -> list[dict[str, AttentionGraph]]:
        """The graphs of each input, by the name of their edges."""
        order: Sequence[int] = range(len(self.names))
        titles = None
        if self.model.is_encoder_decoder:
            order, titles = order_layers(self.names)
        graphs = []
        for place, (encoded, layers) in enumerate(zip(self.inputs, self.layers, strict=True)):
            stacks = {}
            for name in self.weights:
                matrices = layers.pop(name)
                stacks[name] = np.stack([matrices[number] for number in order])
                stacks[name] = carry_layers(self.weights[name], stacks[name], gradients, place)
            targets = {rule: found.names[place] for rule, found in gradients.items()}
            graphs.append(
                make_graphs(
                    self.model,
                    self.weights,
                    stacks,
                    self.fused,
                    residual,
                    targets,
                    tokens=(*encoded.tokens, *encoded.decoder_tokens),
                    words=extend_words(encoded),
                    layer_names=titles,
                )
            )
        return graphs


def weigh_mixes(
    mixes: MixByRule,
    weights: Mapping[str, EdgeWeight],
    heads: str | None,
    fused: dict[str, str],
) -> dict[str, Array]:
    """[query, key] of each edge weight, from the mix with the gradient of its backward rule.

    fused: receives how heads were fused, for edges that have heads.
    """
    found = {}
    for name, weight in weights.items():
        mix = select_mix(mixes, weight)
        if EDGES.get(weight.name) is not weight:  # a user-defined function may write to its input
            mix = mix.copy()
        edges, has_heads = weight.weigh_layer(mix, heads or "mean")
        if has_heads:
            fused[name] = heads or "mean"
        found[name] = reduce_precision(edges)
    return found


def select_mix(mixes: MixByRule, weight: EdgeWeight) -> LayerMix:
    """The mix of a layer with the gradients that an edge weight needs."""
    if not weight.rules:
        return mixes[None]
    gradients = {rule.name: mixes[rule].gradient for rule in weight.rules}
    return replace(mixes[weight.rules[0]], gradients=gradients)


def carry_layers(
    weight: EdgeWeight, layers: Array, gradients: Mapping[BackwardRule, Gradients], place: int
) -> Array:
    """[layer, query, key] of one input, carried down from the watched score if need be."""
    if weight.carry is None:
        return layers
    found = gradients[weight.rules[0]]
    return weight.carry(layers.astype(np.float64), *found.list_watched(place))


def reduce_precision(edges: Array) -> Array:
    """Edges in float32, unless their size is beyond its range."""
    largest = np.abs(edges).max(initial=0.0)
    fits = largest == 0 or SMALLEST_SINGLE < largest < LARGEST_SINGLE
    return edges.astype(np.float32) if fits else edges


def make_graphs(
    model: Model,
    weights: Mapping[str, EdgeWeight],
    stacks: Mapping[str, Array],
    fused: Mapping[str, str],
    residual: float | None = None,
    targets: Mapping[BackwardRule, str] = MappingProxyType({}),
    *,
    tokens: Sequence[str],
    words: Sequence[int | None] | None = None,
    layer_names: Sequence[str] | None = None,
    causal: bool | None = None,
) -> dict[str, AttentionGraph]:
    """The graph of each edge weight, from its layers [layer, query, key].

    fused: how heads were fused, for edges that have heads. targets: by backward rule. Names and
    causal: as for `AttentionGraph`.
    """
    share = check_residual(RESIDUAL if residual is None else residual)
    source = find_source(model)
    graphs = {}
    for name, weight in weights.items():
        inside = weight.residual == "inside"
        mixed = None if inside else share
        target = targets.get(weight.rules[0]) if weight.rules else None
        graphs[name] = AttentionGraph(
            None if inside else stacks[name],
            edges=stacks[name] if inside else None,
            signed=weight.carry is not None,
            residual=mixed,
            edge_name=name,
            source=replace(
                source, edges=name, residual=mixed, target=target, heads=fused.get(name)
            ),
            tokens=tokens,
            words=words,
            layer_names=layer_names,
            causal=causal,
            copy=False,
        )
    return graphs


def read_mixes(
    model: Model,
    inputs: Sequence[Encoded],
    take: Callable[[int, MixByRule], None],
    gradients: Mapping[BackwardRule, Gradients],
    rerun: bool = False,
) -> Finish:
    """A function for `run_batch` to call per layer, which calls `take(place, mixes)` per input.

    rerun: whether a mix has the output of its block and `rerun`.
    """
    reader = ModuleReader(model.model)
    # a block runs again for one input, without padding
    blocks = [record_blocks(model, encoded) for encoded in inputs] if rerun else None

    def finish(number: int, layer: ObservedLayer) -> None:
        part = name_part(layer.wiring.attention) if model.is_encoder_decoder else "encoder"
        # each is used once
        by_output = {rule: found.attention.pop(number) for rule, found in gradients.items()}
        for place, encoded in enumerate(inputs):
            source, target = len(encoded.tokens), len(encoded.decoder_ids)
            queries = slice(0, source if part == "encoder" else target)
            keys = slice(0, target if part == "decoder" else source)
            mix = make_mix(reader, layer, place, SequenceSlice(queries, keys))
            if blocks is not None:
                mix = blocks[place][number].join(mix)
            mixes: dict[BackwardRule | None, LayerMix] = {None: mix}
            for rule, gradient in by_output.items():
                mixes[rule] = add_gradient(mix, gradient[place, queries])
            take(place, mixes)

    return finish
