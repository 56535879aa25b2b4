"""`explain`: one input in, everything about it out: prediction, token attention, importance."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnflow.analysis.defaults import (
    Plan,
    choose_first,
    describe_lack,
    plan_first,
    plan_methods,
)
from attnflow.analysis.explanation import Explanation
from attnflow.analysis.importance import IMPORTANCES, Importance
from attnflow.analysis.long_inputs import (
    BY_ROWS,
    ROWS_ABOVE,
    describe_loss,
    explain_position,
    find_segments,
    goes_by_rows,
    plan_rows,
)
from attnflow.analysis.pipeline import (
    GraphMaker,
    ImportanceFunction,
    Reading,
    choose_graphs,
    open_model,
    read_batch,
    read_graph_maker,
    read_importances,
    refuse_graphs,
    score_importance,
)
from attnflow.capturing.prompts import Prompt, is_chat, read_prompt
from attnflow.core.arrays import find_instead
from attnflow.core.attention import Attention
from attnflow.core.checks import check_position
from attnflow.core.custom import Choices, Method, run_method
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import refuse_removed, word_groups
from attnflow.core.methods import raw, rollout
from attnflow.core.provenance import Source
from attnflow.core.requests import name_positions, warn_if_even
from attnflow.core.results import TokenAttention
from attnflow.edges.building import refuse_residual
from attnflow.edges.choosing import EdgeWeight, name_result, read_edges
from attnflow.errors import CaptureError, OptionError
from attnflow.models.inputs import are_many, restore_picture
from attnflow.models.loading import BUNDLED
from attnflow.models.model import Model
from attnflow.notices import collect_notices, ignore_notices

ALL_POSITIONS = 64  # up to so many tokens, all methods are computed for every position
AT_ANY_LENGTH = (raw, rollout)  # ... and these, which are cheap, for longer inputs too


def explain(
    value: Any,
    *,
    model: Any = None,
    methods: Choices | None = None,
    edges: Any = None,
    importance: Choices | None = None,
    position: int | None = None,
    target: int | str | tuple[int | str, int | str] | None = None,
    heads: str | None = "mean",
    graph: GraphMaker | None = None,
    residual: float | None = None,
    without: Sequence[int] = (),
    normalize: str | None = "sum",
    truncation: bool = False,
    workers: int = 1,
) -> Explanation:
    """Explain what a model makes of one input: prediction, token attention, importance.

    Parameters
    ----------
    value
        A text, a pair of texts, token ids, an image, or the messages of a chat; or an `Attention`
        or `AttentionGraph` that you have, which is explained without a model and so without
        prediction and importance. Above 2,048 tokens no graph is built: raw attention and rollout
        of the explained position are computed as rows, flow and importance are left out, unless
        they are named.
    model
        A name or folder as `load` takes it, a `Model`, or a Hugging Face model; the one that ships
        with attnflow if None.
    methods
        Names of methods, or {name: function} with methods of your own; None stands for attnflow's
        own of that name. All of attnflow's if None.
    edges
        What an edge of the graph weighs, one or several of "attention", "effective", "norm",
        "contribution", "gradient" and what `edge_weight` makes. Results on edges other than
        attention are called after both: "contribution rollout". Attention if None; and where
        methods is None as well, first what serves best: gradient rollout for decoders, gradient
        flow for encoders, contribution rollout where nothing is predicted (docs/edges.md).
    importance
        Names of importances, or {name: function}, called as f(model, inputs, target); () for none,
        all of attnflow's if None.
        It is left out where a model has none: for images, encoder-decoders and models that predict
        nothing.
    position
        Explained instead of the position that the prediction comes from; negative ones count from
        the end.
    target
        The class whose probability importance watches, and whose logit gradient edges watch; the
        prediction if None. A pair of them: gradient edges watch the difference of their logits,
        importance the first.
    heads
        "mean", "max" or "min" fuse heads while capturing; None keeps every head, for the page.
    graph
        A function from an `Attention` to an `AttentionGraph`; `attention.graph()` if None.
    residual
        The weight of the residual connection, 0.5 if None.
    without
        Positions to take out of the graph, for instance a sink.
    normalize
        "sum", "receptive_field" or None, as for `rollout`.
    truncation
        Cut off what is longer than the model takes.
    workers
        Threads for attention flow.

    >>> explanation = explain("the key to the cabinets")
    >>> explanation.prediction[0], explanation.flow.at(position=0).shape
    ('singular', (6,))
    """
    plan = plan_methods(methods, edges)
    importances = read_importances(tuple(IMPORTANCES) if importance is None else importance)
    weights = read_edges("attention" if edges is None else edges)
    if isinstance(value, Attention | AttentionGraph):
        refused = {"model": model, "target": target, "truncation": truncation or None}
        refused |= {"importance": importance or None}
        refused |= {"edges": None if list(weights) == ["attention"] else edges}
        for option, given in refused.items():
            if given is not None:
                raise OptionError(
                    f"weights are explained without a model, so {option} has no say; got {given!r}:"
                    " leave it out"
                )
        make = read_graph_maker(graph, residual, without, heads or "mean")
        functions = dict(plan["attention"])
        return explain_weights(value, make, graph, functions, position, normalize, workers)
    instead = find_instead(value)
    if instead is not None:
        raise OptionError(
            "explain takes a text or another input of a model, an Attention or an AttentionGraph;"
            f" got {type(value).__name__}: {instead}"
        )
    make = read_graph_maker(graph, residual, without)
    refuse_residual(weights, residual)
    refuse_graphs(weights, graph, without)
    model = open_model(BUNDLED if model is None else model)
    if are_many(value) and not is_chat(value):
        raise OptionError(
            f"explain takes one input; got a list of {len(value)}: call it for each,"
            " or use explain_corpus for a file of them"
            if value
            else "explain takes one input; got an empty list: give a text, or messages of a chat"
        )
    prompt = read_prompt(model, value, truncation, places=False)
    encoded = prompt.encoded
    if target is not None and not model.predicts:
        raise OptionError(
            f"a target is a class that the model predicts, and {model.name} has no head that"
            f" predicts; got {target!r}: leave it out"
        )
    contrast = target if isinstance(target, tuple) else None
    watched = target[0] if isinstance(target, tuple) and target else target
    aim = None if watched is None else model.target(watched)
    kept = heads if graph is None else None  # a function of the user's may fuse them as it likes
    options: dict[str, Any] = {"position": position, "heads": kept, "residual": residual}
    options |= {"targets": [aim], "contrast": contrast}
    notes: tuple[str, ...] = ()
    # graphs made in another way, and receptive fields, are of attention
    of_attention = graph is not None or len(without) or normalize == "receptive_field"
    named_functions = [] if methods is None else next(iter(plan.values())).values()
    watches = bool(importance) or target is not None
    if (
        goes_by_rows(model, len(encoded.tokens), weights.values())
        and all(function in BY_ROWS for function in named_functions)
        and not watches
        and (graph is None and heads == "mean" and normalize is not None)
    ):
        prompt = read_prompt(model, value, truncation, places=True)
        rows: dict[str, Any] = {"residual": residual, "without": without, "normalize": normalize}
        found = explain_long(model, value, prompt, position, plan, weights, rows)
        if importance is not None or not model.predicts:
            return found
        lack = f"importance is left out above {ROWS_ABOVE:,} tokens, unless it is named"
        return replace(found, notes=(*found.notes, lack))
    if methods is None and edges is None and not of_attention:
        first = plan_first(*choose_first(model))
        try:
            (reading,) = read_batch(model, [encoded], edges=read_edges(list(first)), **options)
            plan = first
        except CaptureError as error:
            (reading,) = read_batch(model, [encoded], **options)
            notes = (describe_lack(first, error),)
    else:
        (reading,) = read_batch(model, [encoded], edges=weights, **options)
    graphs = choose_graphs(reading, plan, make)
    shown = next(iter(graphs.values()))
    results: dict[str, TokenAttention] = {}
    named: dict[str, Method] = {}
    on_graphs: dict[str, AttentionGraph] = {}
    for edge_name, network in graphs.items():
        titled = {name_result(edge_name, name): method for name, method in plan[edge_name].items()}
        named |= titled
        on_graphs |= dict.fromkeys(titled, network)
        results |= run_methods(titled, network, reading.position, normalize, workers)
    scored: dict[str, Importance] = {}
    by_word: dict[str, Importance] = {}
    if model.predicts and not model.is_vision and not model.is_encoder_decoder:
        given = list(encoded.ids) if truncation or prompt.turns else value
        for name, function in importances.items():
            scored[name] = score_tokens(model, reading, name, function, given)
            if encoded.words is not None:
                by_word[name] = score_words(model, reading, scored[name])
    return Explanation(
        text=prompt.text if prompt.turns else value,
        model=model.name,
        tokens=(*encoded.tokens, *encoded.decoder_tokens),
        special=(*encoded.special, *[False] * len(encoded.decoder_tokens)),
        position=reading.position,
        prediction=reading.prediction,
        captured=reading.attention,
        graph=shown,
        graphs=on_graphs,
        results=results,
        importance=scored,
        word_importance=by_word,
        notes=(*notes, *describe_results(results, reading.position)),
        functions=named,
        source=replace(shown.source, target=next((each.target for each in scored.values()), None)),
        picture=None
        if encoded.pixels is None
        else restore_picture(encoded.pixels, model.image_processor),
        segments=find_segments(prompt, shown.removed) if prompt.turns else (),
    )


def explain_long(
    model: Model,
    value: Any,
    prompt: Prompt,
    position: int | None,
    plan: Plan,
    weights: Mapping[str, EdgeWeight],
    options: dict[str, Any],
) -> Explanation:
    """Explain one position of a long input, by rows alone. options are those of `make_job`."""
    encoded = prompt.encoded
    place = model.locate(encoded, position)
    rows, lacks = plan_rows(plan)
    results, witnesses, prediction = explain_position(
        model, encoded, place, rows, weights, **options
    )
    first = next(iter(results.values()), None)
    source = Source() if first is None or first.source is None else first.source
    return Explanation(
        text=prompt.text if prompt.turns else value,
        model=model.name,
        tokens=encoded.tokens,
        special=encoded.special,
        position=place,
        prediction=prediction,
        captured=None,
        graph=None,
        graphs={},
        results=results,
        importance={},
        notes=(*lacks, *describe_loss(results)),
        functions={
            name_result(edges, name): method
            for edges, methods in rows.items()
            for name, method in methods.items()
        },
        source=replace(source, method=None),
        segments=find_segments(prompt, () if first is None else first.removed),
        witnesses=witnesses,
    )


def explain_weights(
    value: Attention | AttentionGraph,
    make: GraphMaker,
    own: GraphMaker | None,
    functions: dict[str, Method],
    position: int | None,
    normalize: str | None,
    workers: int,
) -> Explanation:
    """Explain weights that a user has. own: the function that makes the graph, if one was given."""
    if isinstance(value, AttentionGraph) and own is not None:
        raise OptionError("a graph is explained as it is, so graph has no say; leave it out")
    graph = value if isinstance(value, AttentionGraph) else make(value)
    if position is None:
        position = graph.kept[-1 if graph.causal else 0]
    else:
        position = check_position(position, graph.size)
    results = run_methods(functions, graph, position, normalize, workers)
    tokens = name_positions(graph)
    return Explanation(
        text=None,
        model=graph.source.model or "",
        tokens=tokens,
        special=(False,) * len(tokens),
        position=position,
        prediction=None,
        captured=value if isinstance(value, Attention) else None,
        graph=graph,
        graphs=dict.fromkeys(results, graph),
        results=results,
        importance={},
        notes=describe_results(results, position),
        functions=functions,
        source=graph.source,
    )


def run_methods(
    functions: dict[str, Method],
    graph: AttentionGraph,
    position: int,
    normalize: str | None,
    workers: int,
) -> dict[str, TokenAttention]:
    """The result of each method on a graph: all layers, and all positions where that is cheap."""
    refuse_removed([position], graph.size, graph.removed)
    results = {}
    options: dict[str, Any] = {"layers": list(range(1, graph.depth + 1)), "normalize": normalize}
    for name, method in functions.items():
        everywhere = graph.size <= ALL_POSITIONS or method in AT_ANY_LENGTH
        positions = list(graph.kept) if everywhere else [position]
        with ignore_notices():  # of all rows; what is said is about the one that is shown
            results[name] = run_method(
                name, method, graph, positions=positions, workers=workers, **options
            )
    return results


def score_tokens(
    model: Model,
    reading: Reading,
    name: str,
    function: ImportanceFunction | None = None,
    value: Any = None,
    **options: Any,
) -> Importance:
    """One importance of each token, or of groups of them; blank-out keeps its sign."""
    options |= {"signed": True} if name == "blank_out" else {}
    (scored,) = score_importance(
        model, [reading], name, function, values=[value], position=reading.position, **options
    )
    return scored


def score_words(model: Model, reading: Reading, by_token: Importance) -> Importance:
    """The same of each word: blank-out blanks it as a whole, others are summed over its tokens."""
    if by_token.method != "blank_out":
        return by_token.by_word()
    words = word_groups(by_token.tokens, by_token.words)
    values = by_token.values[[word.positions[0] for word in words]]
    several = [place for place, word in enumerate(words) if len(word.positions) > 1]
    if several:  # a word of one token is blanked out already
        groups = [words[place] for place in several]
        values[several] = score_tokens(model, reading, "blank_out", groups=groups).values
    names = tuple(word.name for word in words)
    return replace(by_token, values=values, tokens=names, words=None, groups=words)


def describe_results(results: dict[str, TokenAttention], position: int) -> tuple[str, ...]:
    """What has to be said of the rows of a position in the top layer, if anything."""
    rows = [result.select(position, max(result.layers)) for result in results.values()]
    return tuple(note for row in rows for note in describe_row(row))


def describe_row(row: TokenAttention) -> tuple[str, ...]:
    """What has to be said of a row that is shown, if anything."""
    with collect_notices() as notices:
        warn_if_even(row)
    return tuple(notices)
