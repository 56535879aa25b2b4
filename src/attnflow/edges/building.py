"""`attention_graph`: a model and an input in, a graph of any edges out.

One forward pass gives the edges of all weights that were asked for, layer by layer. Those that need
the gradient of a target take one more pass before it, with its way back.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakKeyDictionary

import numpy as np

from attnflow.capturing.assembly import capture_batch, check_mixers, find_source
from attnflow.capturing.mixing import LayerMix, Pending, follow_layers, make_mix
from attnflow.capturing.rerunning import Block, find_blocks, record_blocks
from attnflow.core.arrays import Array
from attnflow.core.checks import check_residual
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.edges.choosing import EdgeWeight, read_edges
from attnflow.edges.zeroing import refuse_cross
from attnflow.errors import CaptureError, OptionError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import name_part
from attnflow.models.inputs import AnInput, Encoded, OneInput, are_many, batches
from attnflow.models.listening import Attend, intercepting
from attnflow.models.model import Model
from attnflow.models.probing import make_probe_inputs
from attnflow.models.wiring import Wiring, find_wirings

if TYPE_CHECKING:
    import torch

WIRINGS: "WeakKeyDictionary[Any, list[Wiring]]" = WeakKeyDictionary()
WATCHED = ("logit", "log_probability", "probability")
Target = int | str | tuple[int | str, int | str] | list[int | None] | None


@overload
def attention_graph(
    model: Any,
    inputs: OneInput,
    *,
    edges: Any = ...,
    target: Target = ...,
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
    target: Target = ...,
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
    target: Target = None,
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
    values = inputs if are_many(inputs) else [inputs]
    encoded = [model.encode(value, truncation=truncation) for value in values]
    graphs: dict[int, AttentionGraph] = {}
    options: dict[str, Any] = {"target": target, "target_of": target_of, "position": position}
    for batch in batches(encoded, model.batch_tokens):
        chosen = [encoded[place] for place in batch]
        made = weigh_batch(model, chosen, weights, residual=residual, heads=heads, **options)
        graphs |= {
            place: next(iter(by_name.values())) for place, by_name in zip(batch, made, strict=True)
        }
    return [graphs[place] for place in range(len(encoded))] if values is inputs else graphs[0]


def capture_mix(
    model: Any,
    value: OneInput,
    *,
    target: Target = None,
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
    gradients = None
    if gradient:
        gradients = find_gradients(model, [encoded], target, target_of, position)
    run_mixes(
        model, [encoded], gradients, lambda number, place, mix: mixes.append(mix), rerun=rerun
    )
    return mixes


# ---- graphs -------------------------------------------------------------------------------------


def refuse_residual(weights: Mapping[str, EdgeWeight], residual: float | None) -> None:
    """Refuse a residual to mix in where all edges hold it inside."""
    if residual is not None and all(weight.residual == "inside" for weight in weights.values()):
        raise OptionError(
            f"edges {', '.join(map(repr, weights))} hold the residual inside, so residual is not"
            f" mixed in; got {residual!r}: leave it out"
        )


def weigh_batch(
    model: Model,
    inputs: Sequence[Encoded],
    weights: Mapping[str, EdgeWeight],
    *,
    target: Target = None,
    target_of: str = "logit",
    residual: float | None = None,
    heads: str = "mean",
    position: int | None = None,
) -> list[dict[str, AttentionGraph]]:
    """Graphs by the name of their edges, for each input of a batch."""
    share = check_residual(RESIDUAL if residual is None else residual)
    rerun = any(weight.rerun for weight in weights.values())
    if rerun and len(inputs) > 1:  # a block is run again for one input, without padding
        options: dict[str, Any] = {"target_of": target_of, "residual": residual, "heads": heads}
        targets = target if isinstance(target, list) else None
        return [
            weigh_batch(
                model,
                [encoded],
                weights,
                target=target if targets is None else [targets[place]],
                position=position,
                **options,
            )[0]
            for place, encoded in enumerate(inputs)
        ]
    if model.is_encoder_decoder and (without := [n for n, w in weights.items() if not w.cross]):
        refuse_cross(without[0], model.name)
    graphs: list[dict[str, AttentionGraph]] = [{} for _ in inputs]
    mixed = {name: weight for name, weight in weights.items() if name != "attention"}
    if "attention" in weights or not mixed:
        for place, attention in enumerate(capture_batch(model, inputs, heads)):
            graphs[place]["attention"] = attention.graph(residual=share)
    if not mixed:
        return graphs
    gradients = None
    if any(weight.gradient for weight in mixed.values()):
        gradients = find_gradients(model, inputs, target, target_of, position)
    layers: list[dict[str, list[Array]]] = [{name: [] for name in mixed} for _ in inputs]
    parts: list[str] = []

    def weigh(number: int, place: int, mix: LayerMix) -> None:
        if place == 0:
            parts.append(mix.name)
        for name, weight in mixed.items():
            matrix = weight.weigh(mix, heads).astype(np.float32)
            layers[place][name].append(widen_layer(model, inputs[place], mix.name, matrix))

    run_mixes(model, inputs, gradients, weigh, rerun=rerun)
    order = range(len(parts))
    names = None
    if model.is_encoder_decoder:
        order, names = order_parts(parts)  # type: ignore[assignment]
    source = find_source(model)
    for place, encoded in enumerate(inputs):
        words = encoded.words
        if words is not None:
            words = (*words, *[None] * len(encoded.decoder_tokens))
        for name, weight in mixed.items():
            stack = np.stack([layers[place][name][number] for number in order])
            inside = weight.residual == "inside"
            graphs[place][name] = AttentionGraph(
                None if inside else stack,
                edges=stack if inside else None,
                residual=None if inside else share,
                tokens=(*encoded.tokens, *encoded.decoder_tokens),
                words=words,
                layer_names=names,
                edge_name=name,
                source=replace(source, edges=name, residual=None if inside else share),
            )
    return graphs


def widen_layer(model: Model, encoded: Encoded, name: str, matrix: Array) -> Array:
    """A layer over all positions of the graph: those that it does not touch stay as they are."""
    if not model.is_encoder_decoder:
        return matrix
    source, target = len(encoded.ids), len(encoded.decoder_ids)
    whole = np.eye(source + target, dtype=matrix.dtype)
    part = name_part(name)
    rows = slice(0, source) if part == "encoder" else slice(source, None)
    columns = {
        "encoder": slice(0, source),
        "decoder": slice(source, None),
        "cross": slice(None),  # the encoder's keys, then the decoder's own positions
    }[part]
    whole[rows] = 0.0
    whole[rows, columns] = matrix
    return whole


def order_parts(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """The order of an encoder-decoder's layers in the graph, and what they are called there."""
    counts = {"encoder": 0, "decoder": 0, "cross": 0}
    titles = []
    for name in names:
        part = name_part(name)
        counts[part] += 1
        kind = {"encoder": "", "decoder": " self", "cross": " cross"}[part]
        titles.append(f"{'encoder' if part == 'encoder' else 'decoder'} {counts[part]}{kind}")
    order = sorted(range(len(names)), key=lambda place: not titles[place].startswith("encoder"))
    return order, [titles[place] for place in order]


# ---- passes -------------------------------------------------------------------------------------


def trace_model(model: Model) -> list[Wiring]:
    """How each attention of a model stands in its block; traced once."""
    if model.model not in WIRINGS:
        if not model.probe.interface:
            raise CaptureError(
                f"{model.name} attends outside of transformers' attention interface, so what its"
                " layers mix is not seen; use edges='attention'"
            )
        arguments, _ = make_probe_inputs(model, model.model)
        with evaluating(model.model), running(model):
            WIRINGS[model.model] = find_wirings(model.model, arguments)
    return WIRINGS[model.model]


def run_mixes(
    model: Model,
    inputs: Sequence[Encoded],
    gradients: "list[torch.Tensor] | None",
    tell: Any,
    *,
    rerun: bool = False,
) -> None:
    """Run a model once on a batch; `tell(number, place, mix)` for each layer and each input."""
    import torch

    check_mixers(model)
    wirings = trace_model(model)
    modules = dict(model.model.named_modules())
    blocks = prepare_blocks(model, wirings, inputs) if rerun else None

    def finish(number: int, layer: Pending) -> None:
        part = name_part(layer.wiring.attention) if model.is_encoder_decoder else "alone"
        for place, encoded in enumerate(inputs):
            source = len(encoded.tokens)
            queries = source if part in ("alone", "encoder") else len(encoded.decoder_ids)
            keys = queries if part == "decoder" else source
            gradient = None if gradients is None else gradients[number]
            mix = make_mix(modules, layer, place, queries, keys, gradient)
            tell(number, place, blocks[number].join(mix) if blocks else mix)

    with (
        evaluating(model.model),
        torch.no_grad(),
        running(model),
        follow_layers(model.model, wirings, finish),
    ):
        model.model(**read_arguments(model, inputs))


def prepare_blocks(
    model: Model, wirings: Sequence[Wiring], inputs: Sequence[Encoded]
) -> list[Block]:
    """The block of each attention call, recorded on one input; checked."""
    import torch

    arguments, _ = make_probe_inputs(model, model.model)
    with evaluating(model.model), torch.no_grad(), running(model):
        names = find_blocks(model.model, wirings, arguments)
        given = read_arguments(model, inputs)
        attentions = [wiring.attention for wiring in wirings]
        return record_blocks(model.model, names, attentions, lambda: model.model(**given))


def read_arguments(model: Model, inputs: Sequence[Encoded]) -> dict[str, Any]:
    """What the model is called with; nothing follows, so that it needs no cache."""
    arguments: dict[str, Any] = dict(model.batch(inputs))
    if "use_cache" in signature(model.model.forward).parameters:
        arguments["use_cache"] = False
    return arguments


def find_gradients(
    model: Model,
    inputs: Sequence[Encoded],
    target: Target,
    target_of: str,
    position: int | None,
) -> "list[torch.Tensor]":
    """Of the target, by what each attention gave: [sequence, query, head, width] per call."""
    import torch

    if not model.predicts:
        raise OptionError(
            f"gradient edges watch a prediction, and {model.name} has no head that predicts; use"
            " edges='contribution'"
        )
    if target_of not in WATCHED:
        raise OptionError(f"unknown target_of {target_of!r}; choose from {', '.join(WATCHED)}")
    outputs: list[torch.Tensor] = []

    def listen(attend: Attend, module: Any, *given: Any, **options: Any) -> Any:
        output = attend.function(module, *given, **options)
        outputs.append(output[0])
        return output

    places = [model.logit_position(encoded, model.locate(encoded, position)) for encoded in inputs]
    with (
        torch.inference_mode(False),
        evaluating(model.model),
        torch.enable_grad(),
        running(model),
        follow_gradients(model) as arguments_of,
        intercepting(listen),
    ):
        output = model.model(**arguments_of(read_arguments(model, inputs)))
        logits = model.read_logits(output, places)  # [sequence, class]
        watched = watch_target(model, logits, target, target_of)
        return list(torch.autograd.grad(watched.sum(), outputs))


@contextmanager
def follow_gradients(model: Model) -> Iterator[Any]:
    """While this lasts, the model's first states need gradients, whatever its parameters need.

    Gives a function that prepares the model's arguments.
    """
    if model.is_vision:

        def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
            pixels = arguments["pixel_values"].detach().requires_grad_()
            return arguments | {"pixel_values": pixels}

        yield prepare
        return

    def after(module: Any, given: Any, output: "torch.Tensor") -> "torch.Tensor":
        return output if output.requires_grad else output.detach().requires_grad_()

    handle = model.embedding.register_forward_hook(after)
    try:
        yield lambda arguments: arguments
    finally:
        handle.remove()


def watch_target(
    model: Model, logits: "torch.Tensor", target: Target, target_of: str
) -> "torch.Tensor":
    """[sequence]: what is watched of the logits [sequence, class]."""
    import torch

    scores = {
        "logit": lambda: logits,
        "log_probability": lambda: logits.log_softmax(dim=-1),
        "probability": lambda: logits.softmax(dim=-1),
    }[target_of]()
    if target is None:
        return scores.gather(1, logits.argmax(dim=-1, keepdim=True))[:, 0]
    if isinstance(target, list):  # one class per sequence
        numbers = torch.tensor(target, device=scores.device)
        return scores.gather(1, numbers[:, None])[:, 0]
    if isinstance(target, tuple):
        if len(target) != 2:
            raise OptionError(f"a contrast is between two targets; got {len(target)}")
        first, second = (model.target(each) for each in target)
        return scores[:, first] - scores[:, second]
    return scores[:, model.target(target)]
