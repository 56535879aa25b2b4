"""The one pipeline: an input runs once through a model, for its attention and its prediction.

`explain`, `evaluate` and the shards of a corpus all ask it. What importance needs comes on top: the
variants of blank-out, the pass of a gradient, and whatever a function of the user's runs.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnflow.analysis.importance import (
    IMPORTANCES,
    Importance,
    check_scorable,
    choose_targets,
    find_replacement,
    measure_blank_out,
)
from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.checks import check_residual
from attnflow.core.custom import Choices, Method, accepts, call_own, read_choices, run_method
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.core.provenance import Source
from attnflow.edges.building import drop_attention, run_edges
from attnflow.edges.choosing import EdgeWeight
from attnflow.errors import OptionError
from attnflow.models.inputs import Encoded, batches
from attnflow.models.loading import load
from attnflow.models.model import Model
from attnflow.notices import ignore_notices

ImportanceFunction = Callable[..., Any]
IMPORTANCE_FORM = "f(model, inputs, target) -> list[Importance]"
GraphMaker = Callable[[Attention], AttentionGraph]
QUERIES = ("focal", "max", "mean")
NO_EDGES: dict[str, EdgeWeight] = {}  # but attention


@dataclass(frozen=True, eq=False)
class Reading:
    """What one forward pass told of one input."""

    encoded: Encoded
    position: int  # in the attention graph: where the prediction comes from, or the one asked for
    attention: Attention
    prediction: tuple[str, float] | None  # None for a model that predicts nothing
    graphs: Mapping[str, AttentionGraph]  # by the name of their edges, other than attention
    target: int | None = None  # the class that importance watches
    probability: float | None = None  # of the target


def open_model(model: Any) -> Model:
    """A `Model` as it is; loaded, if it is the name of one; made, if it is a Hugging Face model."""
    if isinstance(model, str | os.PathLike):
        return load(model)
    return model if isinstance(model, Model) else Model(model)


def read_batch(
    model: Model,
    inputs: Sequence[Encoded],
    *,
    targets: Sequence[int | None] | None = None,
    position: int | None = None,
    heads: str | None = "mean",
    edges: Mapping[str, EdgeWeight] = NO_EDGES,
    residual: float | None = None,
    contrast: tuple[int | str, int | str] | None = None,
) -> list[Reading]:
    """Run a model once on a batch.

    targets: a class per input; what is predicted where None. edges: what graphs are to be made of
    beside attention; residual is mixed into those that do not hold it. contrast: two classes whose
    difference gradient edges watch.
    """
    places = [model.locate(encoded, position) for encoded in inputs]
    aims: Sequence[int | None] = targets or [None] * len(inputs)
    run, graphs = run_edges(
        model,
        inputs,
        drop_attention(edges),
        heads,
        target=list(aims) if contrast is None else contrast,
        residual=residual,
        position=position,
    )
    if not model.predicts:
        bare = zip(inputs, places, run.attentions, graphs, strict=True)
        return [Reading(encoded, at, seen, None, by_edge) for encoded, at, seen, by_edge in bare]
    logits = model.read_logits(run.output, list(map(model.logit_position, inputs, places)))
    probabilities = model.probabilities(logits)
    chosen = choose_targets(model, probabilities, aims)
    watched = [float(probabilities[row, aim]) for row, aim in enumerate(chosen)]
    predictions = model.read_predictions(logits)
    parts = zip(inputs, places, run.attentions, predictions, graphs, chosen, watched, strict=True)
    return [Reading(*part) for part in parts]


def read_inputs(
    model: Model,
    inputs: Sequence[Encoded],
    *,
    targets: Sequence[int | None] | None = None,
    **options: Any,
) -> list[Reading]:
    """The same for any number of inputs, some of similar length at a time.

    options are those of `read_batch`.
    """
    aims = targets or [None] * len(inputs)
    readings: dict[int, Reading] = {}
    for batch in batches(inputs, model.batch_tokens):
        chosen = [inputs[place] for place in batch]
        watched = [aims[place] for place in batch]
        done = read_batch(model, chosen, targets=watched, **options)
        readings |= dict(zip(batch, done, strict=True))
    return [readings[place] for place in range(len(inputs))]


# ---- the graph ----------------------------------------------------------------------------------


def read_graph_maker(
    graph: GraphMaker | None,
    residual: float | None = None,
    without: Sequence[int] = (),
    heads: str = "mean",
) -> GraphMaker:
    """How attention becomes a graph: by a function of the user's, or with these options.

    residual: the paper's, 0.5, if None. without: positions to take out. heads: how to fuse those
    that were kept.
    """
    if graph is None:
        share = check_residual(RESIDUAL if residual is None else residual)
        chosen = tuple(without)
        return lambda attention: attention.graph(
            residual=share, without=chosen, heads="mean" if attention.fused else heads
        )
    if residual is not None or len(without):
        raise OptionError(
            "graph makes the whole graph, so residual and without have no say;"
            " leave them out, or have the function do it"
        )
    if not callable(graph):
        raise OptionError(
            "graph must be a function from an Attention to an AttentionGraph;"
            f" got {type(graph).__name__}"
        )
    own: GraphMaker = graph

    def make(attention: Attention) -> AttentionGraph:
        made = call_own("graph", own, attention)
        if not isinstance(made, AttentionGraph):
            raise OptionError(f"graph must return an AttentionGraph; got {type(made).__name__}")
        if made.size != attention.size:
            raise OptionError(
                f"graph must keep all positions, {attention.size} here (without= takes some out"
                f" and keeps their numbers); got {made.size}"
            )
        return made

    return make


def choose_graphs(
    reading: Reading, edges: Iterable[str], make: GraphMaker
) -> dict[str, AttentionGraph]:
    """The graph of each kind of edges, in their order. make: from attention to its graph."""
    return {
        name: make(reading.attention) if name == "attention" else reading.graphs[name]
        for name in edges
    }


def refuse_graphs(
    edges: Mapping[str, EdgeWeight], graph: GraphMaker | None, without: Sequence[int]
) -> None:
    """Refuse to make graphs of attention in another way where other edges are asked for."""
    others = drop_attention(edges)
    if others and (graph is not None or len(without)):
        raise OptionError(
            f"graph and without make graphs of attention; got edges {', '.join(others)} as well"
        )


def describe_graphs(graphs: Mapping[str, AttentionGraph]) -> Source:
    """Where results on several kinds of edges came from."""
    sources = [graph.source for graph in graphs.values()]
    residual = next((each.residual for each in sources if each.residual is not None), None)
    heads = next((each.heads for each in sources if each.heads is not None), None)
    kinds = ", ".join(graphs)
    return replace(sources[0], edges=kinds, residual=residual, target=None, heads=heads)


# ---- scores -------------------------------------------------------------------------------------


def check_query(query: Any) -> str | int:
    """Whose token attention is taken: "focal", "max" or "mean" over positions, or a position."""
    known = isinstance(query, str) and query in QUERIES
    number = isinstance(query, int | np.integer) and not isinstance(query, bool)
    if not known and not number:
        raise OptionError(f"unknown query {query!r}; choose from focal, max, mean, or a position")
    return query if isinstance(query, str) else int(query)


def score_query(
    model: Model,
    name: str,
    method: Method,
    graph: AttentionGraph,
    encoded: Encoded,
    query: str | int,
    **options: Any,
) -> Floats:
    """[layer, token] of one method at the position that a query means, or over all of them.

    query: "focal", "max", "mean" or a number. options are the method's: layers, normalize, workers.
    """
    position = model.focal(encoded) if query == "focal" else query
    if isinstance(position, int):
        positions = [model.locate(encoded, position)]
    else:
        positions = list(graph.kept)
    with ignore_notices():  # that flow says little shows in what is made of it
        values = run_method(name, method, graph, positions=positions, **options).values
    reduced: Floats = values.mean(axis=1) if query == "mean" else values.max(axis=1)
    return reduced


def read_importances(chosen: Choices) -> dict[str, ImportanceFunction]:
    """Importances as {name: function}, from names, functions, or {name: function}; none for ()."""
    return read_choices(chosen, IMPORTANCES, "importance", IMPORTANCE_FORM, (None, [], None), {})


def score_importance(
    model: Model,
    readings: Sequence[Reading],
    name: str,
    function: ImportanceFunction | None = None,
    *,
    values: Sequence[Any] = (),
    position: int | None = None,
    batch_tokens: int | None = None,
    **options: Any,
) -> list[Importance]:
    """One importance of each input, at the position that was read.

    function: of the user's own; attnflow's of that name if None. values: the inputs as they were
    given, which is what a function of the user's gets. options are those of attnflow's own.
    """
    check_scorable(model, name)
    inputs = [reading.encoded for reading in readings]
    targets = [reading.target for reading in readings]
    if function is not None and function is not IMPORTANCES.get(name):
        asked = {"position": position} if position is not None else {}
        given = {option: asked[option] for option in asked if accepts(function, option)}
        scores = call_own(name, function, model, list(values), targets, **given)
        return check_importance(model, name, scores, readings)
    if name == "blank_out":
        return measure_blank_out(
            model,
            inputs,
            [model.logit_position(reading.encoded, reading.position) for reading in readings],
            [(int(reading.target or 0), float(reading.probability or 0.0)) for reading in readings],
            blank=find_replacement(model, None),
            batch_tokens=batch_tokens,
            **options,
        )
    scored: list[Importance] = IMPORTANCES[name](
        model, inputs, targets, position=position, batch_tokens=batch_tokens, **options
    )
    return scored


def check_importance(
    model: Model, name: str, scores: Any, readings: Sequence[Reading]
) -> list[Importance]:
    """What a function of the user's says of inputs: an Importance, or one number per token."""
    if not isinstance(scores, list | tuple) or len(scores) != len(readings):
        count = len(scores) if isinstance(scores, list | tuple) else type(scores).__name__
        raise OptionError(
            f"{name} must give a list with one importance per input, {len(readings)} here,"
            f" as {IMPORTANCE_FORM}; got {count}"
        )
    checked = []
    for score, reading in zip(scores, readings, strict=True):
        encoded = reading.encoded
        try:
            values = np.array(score, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{name} must give numbers; got {type(score).__name__}") from error
        if values.shape != (len(encoded.tokens),) or not np.isfinite(values).all():
            raise OptionError(
                f"{name} must give one finite number per token, {len(encoded.tokens)} here;"
                f" got shape {values.shape}"
            )
        if isinstance(score, Importance):
            checked.append(replace(score, method=name, words=encoded.words))
            continue
        target = model.label(int(reading.target or 0))
        signed = bool((values < 0).any())
        checked.append(
            Importance(
                values,
                name,
                encoded.tokens,
                target,
                float(reading.probability or 0.0),
                encoded.words,
                signed,
            )
        )
    return checked
