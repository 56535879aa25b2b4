"""`attention_graph`: a model and an input in, a graph of any edges out.

One forward pass gives attention, prediction and the edges of all weights that were asked for, layer
by layer. Those that need the gradient of a target take one more pass before it, with its way back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from attnflow.capturing.assembly import (
    ForwardPass,
    find_source,
    order_layers,
    place_part,
    run_batch,
)
from attnflow.capturing.following import Pending
from attnflow.capturing.mixing import LayerMix, ModuleReader, Span, make_mix
from attnflow.capturing.rerunning import record_blocks
from attnflow.core.arrays import Array
from attnflow.core.checks import check_residual
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.edges.backward import OneTarget, Target, find_gradients
from attnflow.edges.choosing import EdgeWeight, check_fusion, read_edges
from attnflow.edges.zeroing import refuse_cross
from attnflow.errors import OptionError
from attnflow.models.families import name_part
from attnflow.models.inputs import AnInput, Encoded, OneInput, are_many, batches
from attnflow.models.model import Model


@overload
def attention_graph(
    model: Any,
    inputs: OneInput,
    *,
    edges: Any = ...,
    target: OneTarget = ...,
    target_of: str = ...,
    residual: float | None = ...,
    heads: str = ...,
    position: int | None = ...,
    truncation: bool = ...,
) -> AttentionGraph: ...


@overload
def attention_graph(
    model: Any,
    inputs: list[AnInput],
    *,
    edges: Any = ...,
    target: OneTarget = ...,
    target_of: str = ...,
    residual: float | None = ...,
    heads: str = ...,
    position: int | None = ...,
    truncation: bool = ...,
) -> list[AttentionGraph]: ...


def attention_graph(
    model: Any,
    inputs: Any,
    *,
    edges: Any = "attention",
    target: OneTarget = None,
    target_of: str = "logit",
    residual: float | None = None,
    heads: str = "mean",
    position: int | None = None,
    truncation: bool = False,
) -> AttentionGraph | list[AttentionGraph]:
    """The graph of a model's layers on an input, with edges of any kind.

    Parameters
    ----------
    model
        A `Model`, or a Hugging Face model that takes token ids.
    inputs
        One input, as `capture` takes it, or a list of them, which gives a list.
    edges
        What an edge weighs: "attention"; "effective", without what changes no output; "norm", the
        length of what a key brought; "contribution", how much nearer it brought the stream to what
        it became; "gradient", attention times its gradient, where positive; "value_zeroing", how
        the block's output turns without a key's value; or what `edge_weight` makes.
    target
        What gradient edges watch: a class by name or number, for language models a token; or a pair
        of them, whose difference is watched. What the model predicts if None.
    target_of
        "logit", "log_probability" or "probability" of the target.
    residual
        The weight of the residual connection, 0.5 if None, where it is mixed in; refused where the
        edges hold it inside.
    heads
        "mean", "max" or "min", for edges that have heads: attention, effective, gradient.
    position
        Where the target is read; where the prediction comes from if None.
    truncation
        Cut off what is longer than the model takes.

    >>> from attnflow import load
    >>> attention_graph(load("verb-number"), "the key to the cabinets", edges="contribution")
    <AttentionGraph: 6 layers, 6 positions, residual inside>
    """
    model = model if isinstance(model, Model) else Model(model)
    weights = read_edges(edges)
    if len(weights) != 1:
        raise OptionError(f"one kind of edges makes a graph; got {', '.join(weights)}")
    refuse_residual(weights, residual)
    check_fusion(heads)
    values = inputs if are_many(inputs) else [inputs]
    encoded = [model.encode(value, truncation=truncation) for value in values]
    graphs: dict[int, AttentionGraph] = {}
    options: dict[str, Any] = {"target": target, "target_of": target_of, "position": position}
    options |= {"residual": residual, "must_fuse": True}
    others = drop_attention(weights)
    for batch in batches(encoded, model.batch_tokens):
        chosen = [encoded[place] for place in batch]
        run, made = run_edges(model, chosen, others, heads, logits=False, **options)
        for place, attention, by_name in zip(batch, run.attentions, made, strict=True):
            graphs[place] = (
                next(iter(by_name.values()))
                if others
                else attention.graph(residual=RESIDUAL if residual is None else residual)
            )
    return [graphs[place] for place in range(len(encoded))] if values is inputs else graphs[0]


def capture_mix(
    model: Any,
    value: OneInput,
    *,
    target: OneTarget = None,
    target_of: str = "logit",
    position: int | None = None,
    gradient: bool = False,
    rerun: bool = False,
) -> list[LayerMix]:
    """What each layer mixed on one input, for a study of one's own.

    Parameters
    ----------
    model
        A `Model`, or a Hugging Face model that takes token ids.
    value
        One input, as `capture` takes it.
    target, target_of, position
        What the gradient is of, as for `attention_graph`.
    gradient
        Whether to compute it.
    rerun
        Whether each layer can be run again without some values, and has its output.

    >>> from attnflow import load
    >>> mix = capture_mix(load("verb-number"), "the key to the cabinets")[5]
    >>> mix.attention.shape, mix.vectors.shape
    (torch.Size([8, 6, 6]), torch.Size([8, 6, 128]))
    """
    model = model if isinstance(model, Model) else Model(model)
    encoded = model.encode(value)
    mixes: list[LayerMix] = []

    def tell(place: int, mix: LayerMix) -> None:
        mixes.append(mix)

    gradients = None
    if gradient:
        gradients, _ = find_gradients(model, [encoded], target, target_of, position)
    finish = tell_mixes(model, [encoded], gradients, tell, rerun)
    run_batch(model, [encoded], "mean", finish, logits=False)
    return mixes


# ---- graphs -------------------------------------------------------------------------------------


def refuse_residual(weights: Mapping[str, EdgeWeight], residual: float | None) -> None:
    """Refuse a residual to mix in where all edges hold it inside."""
    if residual is not None and all(weight.residual == "inside" for weight in weights.values()):
        raise OptionError(
            f"edges {', '.join(map(repr, weights))} hold the residual inside, so residual is not"
            f" mixed in; got {residual!r}: leave it out"
        )


def drop_attention(weights: Mapping[str, EdgeWeight]) -> dict[str, EdgeWeight]:
    """The edge weights that need more than a capture of attention."""
    return {name: weight for name, weight in weights.items() if name != "attention"}


def run_edges(
    model: Model,
    inputs: Sequence[Encoded],
    weights: Mapping[str, EdgeWeight],
    heads: str | None = "mean",
    *,
    target: Target = None,
    target_of: str = "logit",
    residual: float | None = None,
    position: int | None = None,
    must_fuse: bool = False,
    logits: bool = True,
) -> tuple[ForwardPass, list[dict[str, AttentionGraph]]]:
    """One forward pass, and the graphs of each input by the name of their edges.

    weights: those that are not attention. heads: how attention is fused, None to keep every head;
    edges are fused by their mean then. must_fuse: refuse edges that have no heads to fuse.
    logits: whether the model's scores are wanted.
    """
    if not weights:
        return run_batch(model, inputs, heads, logits=logits), [{} for _ in inputs]
    if model.is_encoder_decoder and (blind := [n for n, w in weights.items() if not w.cross]):
        refuse_cross(blind[0], model.name)
    gradients, watched = None, None
    if any(weight.gradient for weight in weights.values()):
        gradients, watched = find_gradients(model, inputs, target, target_of, position)
    layers: list[dict[str, list[Array]]] = [{name: [] for name in weights} for _ in inputs]
    names: list[str] = []
    fused: dict[str, str] = {}

    def tell(place: int, mix: LayerMix) -> None:
        if place == 0:
            names.append(mix.name)
        for name, matrix in weigh_layer(mix, weights, heads, fused, must_fuse).items():
            layers[place][name].append(widen_layer(model, inputs[place], mix.name, matrix))

    rerun = any(weight.rerun for weight in weights.values())
    finish = tell_mixes(model, inputs, gradients, tell, rerun)
    run = run_batch(model, inputs, heads, finish, logits=logits)
    order, titles = order_layers(names) if model.is_encoder_decoder else (range(len(names)), None)
    graphs: list[dict[str, AttentionGraph]] = []
    for place, (encoded, by_name) in enumerate(zip(inputs, layers, strict=True)):
        words = encoded.words
        if words is not None:
            words = (*words, *[None] * len(encoded.decoder_tokens))
        tokens = (*encoded.tokens, *encoded.decoder_tokens)
        stacks = {name: stack_layers(rows, order) for name, rows in by_name.items()}
        known = {"tokens": tokens, "words": words, "layer_names": titles}
        aim = None if watched is None else watched[place]
        graphs.append(make_graphs(model, weights, stacks, residual, fused, aim, **known))
    return run, graphs


def stack_layers(layers: list[Array], order: Sequence[int]) -> Array:
    """[layer, query, key], in this order; the list is emptied."""
    stack = np.stack([layers[number] for number in order])
    layers.clear()
    return stack


def weigh_layer(
    mix: LayerMix,
    weights: Mapping[str, EdgeWeight],
    heads: str | None,
    fused: dict[str, str],
    must_fuse: bool = False,
) -> dict[str, Array]:
    """[query, key] of each edge weight; fused takes down how those that have heads were fused."""
    found = {}
    for name, weight in weights.items():
        edges, has_heads = weight.weigh_heads(mix, heads or "mean", must_fuse=must_fuse)
        if has_heads:
            fused[name] = heads or "mean"
        found[name] = edges.astype(np.float32)
    return found


def make_graphs(
    model: Model,
    weights: Mapping[str, EdgeWeight],
    stacks: Mapping[str, Array],
    residual: float | None,
    fused: Mapping[str, str],
    watched: str | None = None,
    **known: Any,
) -> dict[str, AttentionGraph]:
    """The graph of each edge weight, from its layers [layer, query, key].

    fused: how heads were fused, of edges that have some. watched: what gradients are of.
    known: what else a graph is to know, of tokens and layers.
    """
    share = check_residual(RESIDUAL if residual is None else residual)
    source = find_source(model)
    graphs = {}
    for name, weight in weights.items():
        inside = weight.residual == "inside"
        mixed = None if inside else share
        aim = watched if weight.gradient else None
        graphs[name] = AttentionGraph(
            None if inside else stacks[name],
            edges=stacks[name] if inside else None,
            residual=mixed,
            edge_name=name,
            source=replace(source, edges=name, residual=mixed, target=aim, heads=fused.get(name)),
            copy=False,
            **known,
        )
    return graphs


def tell_mixes(
    model: Model,
    inputs: Sequence[Encoded],
    gradients: Any,
    tell: Callable[[int, LayerMix], None],
    rerun: bool = False,
) -> Callable[[int, Pending], None]:
    """What `run_batch` is to call per layer: `tell(place, mix)` for each input.

    gradients: what `find_gradients` gave; None if no gradient is needed. rerun: whether a mix is to
    know its block.
    """
    reader = ModuleReader(model.model)
    # a block runs again for one input, without padding
    blocks = [record_blocks(model, encoded) for encoded in inputs] if rerun else None

    def finish(number: int, layer: Pending) -> None:
        part = name_part(layer.wiring.attention) if model.is_encoder_decoder else "alone"
        gradient = None
        if gradients is not None:  # each is used once
            gradient, gradients[number] = gradients[number], None
        for place, encoded in enumerate(inputs):
            source = len(encoded.tokens)
            queries = source if part in ("alone", "encoder") else len(encoded.decoder_ids)
            span = Span(slice(0, queries), slice(0, queries if part == "decoder" else source))
            mix = make_mix(reader, layer, place, span, gradient)
            tell(place, mix if blocks is None else blocks[place][number].join(mix))

    return finish


def widen_layer(model: Model, encoded: Encoded, name: str, matrix: Array) -> Array:
    """A layer over all positions of the graph: those that it does not touch stay as they are."""
    if not model.is_encoder_decoder:
        return matrix
    part = name_part(name)
    rows, columns = place_part(part, len(encoded.ids), len(encoded.decoder_ids))
    whole = np.eye(len(encoded.ids) + len(encoded.decoder_ids), dtype=matrix.dtype)
    whole[rows] = 0.0
    # attention to the encoder: its keys, then the decoder's own positions
    whole[rows, slice(None) if part == "cross" else columns] = matrix
    return whole
