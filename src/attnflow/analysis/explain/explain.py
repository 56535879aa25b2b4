"""`explain`: one input in; prediction, token attention and importance out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.job import ATTENTION, GraphMaker, Job, Plan
from attnflow.analysis.long_inputs import find_segments
from attnflow.analysis.run import (
    Case,
    Event,
    GraphMade,
    ImportanceReady,
    InputDone,
    Predicted,
    ResultReady,
    describe_top_row,
    find_row_asides,
    run,
    run_choice,
)
from attnflow.capturing.backward import TargetOrPair
from attnflow.core.arrays import find_hint
from attnflow.core.attention import Attention
from attnflow.core.checks import check_position
from attnflow.core.choices import Choices
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, check_group, name_group
from attnflow.core.provenance import Source
from attnflow.core.request import name_positions
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.models.answers import AnswerText
from attnflow.models.encoded import OneInput, are_many, restore_picture
from attnflow.models.load import BUNDLED, ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import Foil
from attnflow.notices import collect_notices

Kind = TypeVar("Kind", bound=Event)
Options = ParamSpec("Options")
Returned = TypeVar("Returned")


def explain(
    value: OneInput | Attention | AttentionGraph,
    *,
    model: "ModelLike | None" = None,
    methods: Choices | None = None,
    edges: Choices | None = None,
    importance: Choices | None = None,
    position: int | None = None,
    target: TargetOrPair = None,
    foil: Foil | None = None,
    answer: AnswerText | None = None,
    span: Sequence[int] | None = None,
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
        or `AttentionGraph`, which is explained without a model, and so without prediction and
        importance. Above 2,048 tokens no graph is built: raw attention and rollout of the explained
        position are computed as rows, and flow and importance are left out unless they are named.
    model
        A name or folder as `load` takes it, a `Model`, or a Hugging Face model; the model that
        ships with attnflow if None.
    methods
        Names of methods, or {name: function} for user-defined ones, where None stands for
        attnflow's own method of that name. All of attnflow's if None.
    edges
        The weight of an edge of the graph: one or several of "attention", "effective", "norm",
        "contribution", "gradient", "relevance" and what `edge_weight` makes. The names of results
        on edges other than attention begin with the edges: "contribution rollout". Attention if
        None. If methods is None as well, the recommended method comes first: relevance rollout for
        decoders, relevance flow for encoders, contribution rollout for models without prediction
        (docs/truth.md). Above 2,048 tokens that is contribution rollout of the explained position.
    importance
        Names of importances ("blank_out", "input_gradient", "relevance"), or {name: function},
        called as f(model, inputs, target); () for none, the first two if None. Left out where it is
        not available: for images, encoder-decoders and models without prediction.
    position
        The position to explain, instead of the one that the prediction comes from; a negative one
        counts from the end.
    target
        The class whose probability importance watches, and whose logit gradient edges watch; the
        prediction if None. A pair is a target and its foil. For language models a token, with the
        space before it: " Paris".
    foil
        A class to contrast the target with: gradient and relevance edges, and importances, watch
        the difference of the two logits. `RUNNER_UP` is the most probable class other than the
        target. With an answer: another answer.
    answer
        Of causal language models: a whole answer to explain instead of one token, a text that
        continues the input as it stands (with its space: " Paris, the city of light"), or token
        ids. All positions that predict its tokens are explained together, and gradients are of the
        sum of their logits (docs/answers.md).
    span
        Of causal language models: positions to explain together, each with its prediction.
    heads
        "mean", "max" or "min" fuse heads while capturing; None keeps every head, for the page.
    graph
        A function from an `Attention` to an `AttentionGraph`; `attention.graph()` if None.
    residual
        The weight of the residual connection, 0.5 if None.
    without
        Positions to take out of the graph, such as a sink.
    normalize
        "sum", "receptive_field" or None, as for `rollout`.
    truncation
        Cut inputs that are longer than the model takes.
    workers
        Threads for attention flow.

    >>> explanation = explain("the key to the cabinets")
    >>> explanation.prediction[0], explanation.flow.at(position=0).shape
    ('singular', (6,))
    """
    job = Job.read(
        methods=methods,
        edges=edges,
        importance=importance,
        position=position,
        target=target,
        foil=foil,
        heads=heads,
        graph=graph,
        residual=residual,
        without=without,
        normalize=normalize,
        truncation=truncation,
        workers=workers,
        everywhere=True,
        by_word=True,
        answer=answer,
        span=span,
    )
    if isinstance(value, Attention | AttentionGraph):
        refuse_model_options(job, model)
        return explain_weights(value, job)
    opened = open_input(value, model)
    case = Case.read(opened, value, job)
    with collect_notices() as notices:
        events = list(run(opened, [case], job))
    return collect_explanation(opened, case, events, notices)


def takes_options_of(
    function: Callable[Options, object],
) -> Callable[[Callable[..., Returned]], Callable[Options, Returned]]:
    """Declare to type checkers that a function takes the same options as another one."""
    return lambda decorated: decorated


@takes_options_of(explain)
def explain_events(
    value: OneInput, *, model: "ModelLike | None" = None, **options: Any
) -> Iterator[Event]:
    """Explain one input while it is computed: events in the order in which things become known.

    An `InputEncoded` with the tokens comes first; then `Predicted`, before any method is computed;
    a `GraphMade` for each kind of edges, a `ResultReady` for each method, an `ImportanceReady` for
    each importance; and last `InputDone`. A `StageStarted` announces the next computation.
    `event.kind` names the type: "encoded", "predicted", "graph", "result", "importance", "done",
    "started". The call itself checks the options, loads the model and encodes the input.

    Parameters
    ----------
    value
        One input of a model, as for `explain`.
    model, options
        As for `explain`.

    >>> for event in explain_events("the keys to the house", methods=["rollout"], importance=()):
    ...     if event.kind == "predicted":
    ...         print(event.prediction.label)
    ...     if event.kind == "result":
    ...         print(event.run.result.top(1, position=0)[0][1])
    plural
    keys
    """
    for name in options.keys() - signature(explain).parameters.keys():
        raise TypeError(f"explain_events() got an unexpected keyword argument {name!r}")
    job = Job.read(everywhere=True, by_word=True, **options)
    if isinstance(value, Attention | AttentionGraph):
        raise OptionError(
            "explain_events requires an input of a model; got"
            f" {type(value).__name__}: use explain, which takes weights"
        )
    opened = open_input(value, model)
    return run(opened, [Case.read(opened, value, job)], job)


def open_input(value: OneInput, model: "ModelLike | None") -> Model:
    """The model that explains an input; refuse what is not one input of a model."""
    hint = find_hint(value)
    if hint is not None:
        raise OptionError(
            "explain takes a text or another input of a model, an Attention or an AttentionGraph;"
            f" got {type(value).__name__}: {hint}"
        )
    if are_many(value):
        raise OptionError(
            f"explain takes one input; got a list of {len(value)}: call it for each,"
            " or use explain_corpus for a file of them"
            if value
            else "explain takes one input; got an empty list: give a text, or messages of a chat"
        )
    return open_model(BUNDLED if model is None else model)


# ---- from events to an explanation --------------------------------------------------------------


def collect_explanation(
    model: Model, case: Case, events: Sequence[Event], notices: Sequence[str] = ()
) -> Explanation:
    """The explanation of one input, from all its events. notices: given while it was computed."""
    encoded = case.encoded
    (predicted,) = select_events(events, Predicted)
    (done,) = select_events(events, InputDone)
    graphs = [event.graph for event in select_events(events, GraphMade)]
    graph = graphs[0] if graphs else None
    results = select_events(events, ResultReady)
    scored = select_events(events, ImportanceReady)
    first = results[0].run.result if results else None
    picture = None
    segments: tuple[Group, ...] = ()
    if encoded.pixels is not None:
        picture = restore_picture(encoded.pixels, model.image_processor)
    if encoded.turns or graph is None:
        segments = find_segments(encoded, () if first is None else first.removed)
    return Explanation(
        text=encoded.text if encoded.messages else case.value,
        model=model.name,
        tokens=(*encoded.tokens, *encoded.decoder_tokens),
        special=(*encoded.special, *[False] * len(encoded.decoder_tokens)),
        position=predicted.position,
        span=predicted.span,
        prediction=predicted.prediction,
        captured=predicted.attention,
        graph=graph,
        runs={event.run.name: event.run for event in results},
        importance={event.name: event.importance for event in scored},
        word_importance={
            event.name: event.by_word for event in scored if event.by_word is not None
        },
        notes=(
            *dict.fromkeys(notices),
            *done.notes,
            *(note for event in results for note in event.notes),
        ),
        source=trace_source(graph, first, scored),
        picture=picture,
        segments=segments,
        witnesses=done.witnesses,
    )


def trace_source(
    graph: AttentionGraph | None, first: TokenAttention | None, scored: Sequence[ImportanceReady]
) -> Source:
    """Where the numbers came from: of the first graph, or of the first rows of a long input."""
    if graph is not None:
        return replace(graph.source, target=scored[0].importance.target if scored else None)
    if first is not None and first.source is not None:
        return replace(first.source, method=None)
    return Source()


def select_events(events: Sequence[Event], kind: type[Kind]) -> list[Kind]:
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]


# ---- weights without a model --------------------------------------------------------------------


def refuse_model_options(job: Job, model: object) -> None:
    """Refuse options that require a model, where weights are explained."""
    if model is not None:
        raise OptionError(f"weights are explained without a model; got {model!r}: leave it out")
    edges = list(job.edges or ATTENTION)
    given = {
        "target": job.target,
        "foil": job.foil,
        "answer": job.answer,
        "truncation": job.truncation or None,
        "importance": list(job.importance or ()) or None,
        "edges": None if edges == ["attention"] else edges,
    }
    for option, value in given.items():
        if value is not None:
            raise OptionError(
                f"weights are explained without a model, and {option} requires one; got {value!r}:"
                " leave it out"
            )


def explain_weights(value: Attention | AttentionGraph, job: Job) -> Explanation:
    """Explain attention or a graph without a model."""
    if isinstance(value, AttentionGraph) and job.graph is not None:
        raise OptionError("a graph is explained as it is, so graph is not used; leave it out")
    graph = value if isinstance(value, AttentionGraph) else job.make_graph(value)
    tokens = name_positions(graph)
    together = None
    if job.span is not None:
        places = sorted(check_group(job.span, graph.size, graph.removed, "span"))
        together = Group(name_group(places, tokens, graph.words), tuple(places))
        position = places[-1]
    elif job.asked_position is None:
        position = graph.kept[-1 if graph.causal else 0]
    else:
        position = check_position(job.asked_position, graph.size)
    span = () if together is None else together.positions
    plan = Plan.make(job.named_methods, ATTENTION)
    runs = {
        choice.name: run_choice(choice, graph, position, job, together) for choice in plan.choices
    }
    asides = find_row_asides(value, (), span or (position,))
    return Explanation(
        text=None,
        model=graph.source.model or "",
        tokens=tokens,
        special=(False,) * len(tokens),
        position=position,
        span=span,
        prediction=None,
        captured=value if isinstance(value, Attention) else None,
        graph=graph,
        runs=runs,
        importance={},
        notes=tuple(
            note for each in runs.values() for note in describe_top_row(each, position, asides)
        ),
        source=graph.source,
    )
