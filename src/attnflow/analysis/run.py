"""`run`: the one runner of analyses. A model, inputs and a `Job` in; typed events out.

`explain` collects the events of one input, `evaluate` those of many examples, a corpus those of its
rows. One forward pass gives attention, prediction and edges of a batch. All gradients share one
more forward pass, with one backward pass per watched scalar and backward rule. Blank-out and
user-defined functions run the model on top of that.
"""

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from attnflow.analysis.importance.blank_out import find_replacement, measure_blank_out
from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.input_gradient import (
    WATCH_KEY,
    input_gradient,
    read_input_gradients,
    watch_input,
)
from attnflow.analysis.importance.relevance import (
    RELEVANCE_KEY,
    read_relevance,
    relevance,
    watch_relevance,
)
from attnflow.analysis.importance.watch import WatchedClass, check_scorable
from attnflow.analysis.job import (
    IMPORTANCE_FORM,
    ImportanceFunction,
    Job,
    MethodChoice,
    Plan,
    Position,
    describe_missing_edges,
)
from attnflow.analysis.long_inputs import (
    BY_ROWS,
    ROWS_ABOVE,
    check_span_size,
    describe_loss,
    explain_position,
    goes_by_rows,
    plan_long,
    plan_rows,
)
from attnflow.capturing.answers import run_answer
from attnflow.capturing.backward import BackwardPass, Watch, pair_aims, run_backward
from attnflow.capturing.backward_rule import LINEARISED, BackwardRule
from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.choices import Method, MethodOptions, accepts, call_own, run_method
from attnflow.core.evenness import (
    WORTH_A_WARNING,
    find_even_spread,
    phrase_even,
    warn_if_even,
)
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, refuse_removed, word_groups
from attnflow.core.provenance import Source
from attnflow.core.results import TokenAttention
from attnflow.core.sinks import sinks
from attnflow.core.text import join_subwords
from attnflow.edges.graphs import run_edges, watch_edges
from attnflow.errors import CaptureError, OptionError
from attnflow.models.answers import (
    Answer,
    check_answer_foil,
    locate_span,
    pair_answers,
    predict_answer,
)
from attnflow.models.encoded import Encoded, OneInput, batches
from attnflow.models.execution import unchanged
from attnflow.models.model import Model
from attnflow.models.predict import (
    Foil,
    FoilNumber,
    Prediction,
    Target,
    check_foils,
    number_foil,
    predict_targets,
)
from attnflow.notices import collect_notices, ignore_notices

MODEL_STAGE, GRAPH_STAGE = "model", "the attention graph"  # stages without a result
ALL_POSITIONS = 64  # up to this many tokens, every method is computed for all positions


@dataclass(frozen=True, eq=False)
class Case:
    """One input of a run.

    Parameters
    ----------
    value
        The input as it was given, passed to user-defined importances.
    encoded
        The same as the model takes it.
    target
        The class to watch, instead of the job's.
    foil
        The class to contrast the target with, instead of the job's.
    span
        The positions that are explained together, instead of the job's position. Such an input runs
        alone.
    answer, against
        The answer that is explained, and the one that it is contrasted with.
    """

    value: OneInput
    encoded: Encoded
    target: int | None = None
    foil: Foil | None = None
    span: tuple[int, ...] = ()
    answer: Answer | None = None
    against: Answer | None = None

    @classmethod
    def read(cls, model: Model, value: OneInput, job: Job) -> "Case":
        """An input with its answer or span, by the options of a job."""
        if job.answer is None:
            encoded = model.encode(value, truncation=job.truncation)
            return cls(value, encoded, span=locate_span(model, encoded, job.span))
        answer, against = pair_answers(
            model,
            value,
            job.answer,
            check_answer_foil(job.foil),
            truncation=job.truncation,
        )
        return cls(value, answer.encoded, span=answer.span, answer=answer, against=against)

    @property
    def group(self) -> Group:
        """The span, named after the answer or its tokens."""
        tokens = [self.encoded.tokens[position] for position in self.span]
        name = join_subwords(tokens) if self.answer is None else self.answer.text
        return Group(name, self.span)


@dataclass(frozen=True, eq=False)
class MethodRun:
    """A method on one kind of edges: the graph that it ran on, and its result.

    Parameters
    ----------
    name
        The name of the result: of the method, after its edges unless these are attention.
    edges
        The kind of edges.
    method
        The function itself.
    graph
        What it ran on; None for rows of a long input.
    result
        The result of the method.
    """

    name: str
    edges: str
    method: Method
    graph: AttentionGraph | None
    result: TokenAttention


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Event:
    """The base of all events: news of one input.

    Parameters
    ----------
    number
        The number of the input, counted from 0.
    """

    kind: ClassVar[str] = ""

    number: int


@dataclass(frozen=True, eq=False)
class InputEncoded(Event):
    """An input as the model takes it.

    Parameters
    ----------
    number
        The number of the input.
    encoded
        Its tokens, words, text and turns.
    """

    kind: ClassVar[str] = "encoded"

    encoded: Encoded


@dataclass(frozen=True, eq=False)
class StageStarted(Event):
    """The next computation.

    Parameters
    ----------
    number
        The number of the input, or of the first one of a batch.
    name
        The name of the stage ("model", "the attention graph"), the result or the importance.
    """

    kind: ClassVar[str] = "started"

    name: str


@dataclass(frozen=True, eq=False)
class Predicted(Event):
    """The attention and the prediction of one forward pass.

    Parameters
    ----------
    number
        The number of the input.
    position
        The explained position.
    prediction
        The prediction, with the class that is watched; None for a model without prediction.
    attention
        The captured attention; None for a long input.
    span
        The positions that are explained together; none if one is explained.
    seconds
        The time of the forward pass, for the first input of its batch; 0 for the others.
    """

    kind: ClassVar[str] = "predicted"

    position: int
    prediction: Prediction | None
    attention: Attention | None
    seconds: float = 0.0
    span: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class GraphMade(Event):
    """The graph of one kind of edges.

    Parameters
    ----------
    number
        The number of the input.
    edges
        The name of the edges.
    graph
        The graph.
    """

    kind: ClassVar[str] = "graph"

    edges: str
    graph: AttentionGraph


@dataclass(frozen=True, eq=False)
class ResultReady(Event):
    """The result of one method.

    Parameters
    ----------
    number
        The number of the input.
    run
        The method, its edges and graph, and the result.
    notes
        Notes on the row of the explained position.
    seconds
        The time of the method.
    """

    kind: ClassVar[str] = "result"

    run: MethodRun
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class ImportanceReady(Event):
    """One importance of the tokens.

    Parameters
    ----------
    number
        The number of the input.
    name
        The name of the importance.
    importance
        The importance of each token.
    by_word
        The importance of each word, if the job includes it and words are known.
    seconds
        The time for the whole batch, for its first input; 0 for the others.
    """

    kind: ClassVar[str] = "importance"

    name: str
    importance: Importance
    by_word: Importance | None = None
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class InputDone(Event):
    """The end of an input.

    Parameters
    ----------
    number
        The number of the input.
    notes
        Notes on what was left out.
    witnesses
        For a long input: raw attention of positions spread over it, in which sinks are found.
    """

    kind: ClassVar[str] = "done"

    notes: tuple[str, ...] = ()
    witnesses: TokenAttention | None = None


# ---- the runner ---------------------------------------------------------------------------------


def run(
    model: Model, cases: Sequence[Case], job: Job, *, batch_tokens: int | None = None
) -> Iterator[Event]:
    """Run a model on inputs, in batches of similar length, and yield events as results are ready.

    batch_tokens: the number of tokens that run together; the model's default if None.
    """
    plan = job.plan(model)
    named = name_cases(model, cases, job)
    for number, case in enumerate(cases):
        yield InputEncoded(number, case.encoded)
    short: dict[int, Case] = {}
    for number, case in enumerate(named):
        if needs_rows(model, job, plan, case):
            yield from run_rows(model, number, case, job, plan)
        else:
            short[number] = case
    numbers = list(short)
    encoded = [case.encoded for case in short.values()]
    for places in batches(encoded, model.batch_tokens if batch_tokens is None else batch_tokens):
        batch = {numbers[place]: short[numbers[place]] for place in places}
        yield from run_graphs(model, batch, job, plan, batch_tokens)


def name_cases(model: Model, cases: Sequence[Case], job: Job) -> list[Case]:
    """The cases with what is watched of each: its own target and foil, or the job's."""
    target, foil = job.check_target(model)
    named = [
        replace(
            case,
            target=target if case.target is None else case.target,
            foil=foil if case.foil is None else number_foil(model, case.foil),
        )
        for case in cases
    ]
    check_foils([case.foil for case in named])
    return named


def run_graphs(
    model: Model, batch: Mapping[int, Case], job: Job, plan: Plan, batch_tokens: int | None
) -> Iterator[Event]:
    """The events of a batch of numbered cases, from its forward pass on."""
    first = next(iter(batch))
    yield StageStarted(first, MODEL_STAGE)
    notes: tuple[str, ...] = ()
    try:
        with unchanged(model.model):
            readings = read_batch(model, batch, job, plan)
    except CaptureError as error:
        if plan.first is None:
            raise
        notes = (describe_missing_edges(plan.first, error),)
        plan = plan.drop_first()
        readings = read_batch(model, batch, job, plan)
    for reading in readings:
        yield Predicted(
            reading.number,
            reading.position,
            reading.prediction,
            reading.attention,
            reading.seconds,
            reading.case.span,
        )
    for reading in readings:
        yield from run_methods(reading, job, plan)
    for name, function in job.choose_importance(model).items():
        yield StageStarted(first, name)
        start = time.perf_counter()
        scored = score_importance(model, readings, job, name, function, batch_tokens)
        seconds = time.perf_counter() - start
        for reading, importance in zip(readings, scored, strict=True):
            words = None
            if job.by_word and reading.encoded.words is not None:
                words = score_words(model, reading, importance)
            yield ImportanceReady(reading.number, name, importance, words, seconds)
            seconds = 0.0
    for number in batch:
        yield InputDone(number, notes)


# ---- one forward pass ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reading:
    """The results of one forward pass for one input."""

    number: int
    case: Case
    position: int  # the explained one, in the attention graph
    attention: Attention
    prediction: Prediction | None  # None for a model without prediction
    graphs: Mapping[str, AttentionGraph]  # by the name of their edges, other than attention
    known: Mapping[str, Importance] = field(default_factory=dict)  # importances of the same pass
    seconds: float = 0.0

    @property
    def encoded(self) -> Encoded:
        """The input as the model takes it."""
        return self.case.encoded

    @property
    def target(self) -> Target:
        """The class that importance watches."""
        if self.prediction is None:
            raise OptionError("importance requires a model that predicts")
        return self.prediction.target

    @cached_property
    def asides(self) -> tuple[int, ...]:
        """The positions that are left out of comparisons."""
        explained = self.case.span or (self.position,)
        return find_row_asides(self.attention, self.encoded.special, explained)

    @property
    def watched(self) -> WatchedClass:
        """What importance watches: the target, against its foil if it has one."""
        target, prediction = self.target, self.prediction
        if prediction is None or prediction.foil is None:
            return WatchedClass(target.number, target.probability)
        return WatchedClass(
            target.number, target.probability, prediction.foil.number, prediction.difference
        )


def read_batch(model: Model, batch: Mapping[int, Case], job: Job, plan: Plan) -> list[Reading]:
    """Run a model once on a batch: attention, prediction and the graphs of other edges.

    What requires gradients, edges and importances, shares one more forward pass, which comes first.
    """
    start = time.perf_counter()
    inputs = [case.encoded for case in batch.values()]
    targets = [case.target for case in batch.values()]
    foils = [number_foil(model, case.foil) for case in batch.values()]
    cases = list(batch.values())
    places = [locate_case(model, case, job) for case in cases]
    edge_watches = watch_edges(model, plan.weights, pair_aims(targets, foils))
    watches, key = watch_importances(model, job, edge_watches, targets, foils)
    backward = None
    known: list[dict[str, Importance]] = [{} for _ in inputs]
    if watches:
        backward = differentiate_cases(model, cases, watches, job)
        if WATCH_KEY in watches:
            for each, found in zip(
                known, read_input_gradients(model, inputs, backward), strict=True
            ):
                each["input_gradient"] = found
        if key is not None:
            known[0]["relevance"] = read_relevance(model, inputs[0], backward, key)
    passed, graphs = run_edges(
        model,
        inputs,
        plan.weights,
        job.kept_heads,
        {} if backward is None else backward.gradients,
        residual=job.residual,
    )
    predictions: Sequence[Prediction | None] = [None] * len(inputs)
    if cases[0].answer is not None:
        predictions = [predict_answer(model, passed.output, cases[0].answer, cases[0].against)]
    elif model.predicts:
        logits = model.read_logits(passed.output, list(map(model.logit_position, inputs, places)))
        predictions = predict_targets(model, logits, targets, foils)
    seconds = time.perf_counter() - start
    return [
        Reading(
            number,
            case,
            places[row],
            passed.attentions[row],
            predictions[row],
            graphs[row],
            known[row],
            seconds if row == 0 else 0.0,
        )
        for row, (number, case) in enumerate(batch.items())
    ]


def locate_case(model: Model, case: Case, job: Job) -> int:
    """The explained position of an input; the last of a span."""
    return case.span[-1] if case.span else model.locate(case.encoded, job.asked_position)


def differentiate_cases(
    model: Model, cases: Sequence[Case], watches: Mapping[Hashable, Watch], job: Job
) -> BackwardPass:
    """The backward passes of a batch; of an answer or a span, from the sum over its positions."""
    case = cases[0]
    if case.answer is not None:
        return run_answer(model, case.answer, watches, case.against)
    encoded = [each.encoded for each in cases]
    if not case.span:
        return run_backward(model, encoded, watches, position=job.asked_position)
    aims = pair_aims([case.target], [number_foil(model, case.foil)]) * len(case.span)
    spans = {key: replace(watch, target=aims) for key, watch in watches.items()}
    return run_backward(model, encoded, spans, position=case.span)


def watch_importances(
    model: Model,
    job: Job,
    edge_watches: Mapping[BackwardRule, Watch],
    targets: Sequence[int | None],
    foils: Sequence[FoilNumber | None],
) -> tuple[dict[Hashable, Watch], Hashable | None]:
    """What is watched for edges and importances together, and the key of relevance if it is.

    A single importance without such edges makes its own pass. Relevance is known by input only if
    there is one; it shares the backward pass of edges with the same rule.
    """
    watches: dict[Hashable, Watch] = dict(edge_watches.items())
    chosen = job.choose_importance(model)
    has_gradient = chosen.get("input_gradient") is input_gradient
    has_relevance = chosen.get("relevance") is relevance and len(targets) == 1
    if not watches and not (has_relevance and (has_gradient or job.explains_span)):
        return {}, None
    if has_gradient:
        watches[WATCH_KEY] = watch_input(targets, foils)
    if not has_relevance:
        return watches, None
    if LINEARISED in edge_watches:
        return watches, LINEARISED
    watches[RELEVANCE_KEY] = watch_relevance(pair_aims(targets, foils))
    return watches, RELEVANCE_KEY


# ---- methods ------------------------------------------------------------------------------------


def run_methods(reading: Reading, job: Job, plan: Plan) -> Iterator[Event]:
    """The graphs of one input, and every method on its edges."""
    number = reading.number
    for edges, choices in plan.by_edges().items():
        yield StageStarted(number, GRAPH_STAGE)
        graph = job.make_graph(reading.attention) if edges == "attention" else reading.graphs[edges]
        yield GraphMade(number, edges, graph)
        for choice in choices:
            yield StageStarted(number, choice.name)
            start = time.perf_counter()
            together = reading.case.group if reading.case.span else None
            done = run_choice(choice, graph, reading.position, job, together)
            notes: tuple[str, ...] = ()
            if job.everywhere:
                notes = describe_top_row(done, reading.position, reading.asides)
            yield ResultReady(number, done, notes, time.perf_counter() - start)


def run_choice(
    choice: MethodChoice,
    graph: AttentionGraph,
    position: int,
    job: Job,
    together: Group | None = None,
) -> MethodRun:
    """One method on a graph, at the positions and layers of a job.

    together: positions of one row, instead of all others.
    """
    positions = [position]
    if job.everywhere:
        refuse_removed([position], graph.size, graph.removed)
        if graph.size <= ALL_POSITIONS or choice.compute in BY_ROWS:  # these are cheap
            positions = list(graph.kept)
    elif job.position in ("max", "mean"):
        positions = list(graph.kept)
    layers = job.layers[choice.name] if isinstance(job.layers, Mapping) else job.layers
    options: MethodOptions = {
        "layers": list(range(1, graph.depth + 1) if layers is None else layers),
        "positions": positions,
        "normalize": job.normalize,
    }
    if together is not None:
        options["positions"], options["sources"] = None, [together]
    if job.workers != 1:
        options["workers"] = job.workers
    with ignore_notices():  # on all rows; notes are on the row that is shown
        result = run_method(choice.name, choice.compute, graph, **options)
    return MethodRun(choice.name, choice.edges, choice.compute, graph, result)


def reduce_positions(values: Floats, position: Position) -> Floats:
    """[layer, key] of rows [layer, query, key]: their mean, their maximum, or the only one."""
    reduced: Floats = values.mean(axis=1) if position == "mean" else values.max(axis=1)
    return reduced


def describe_top_row(run: MethodRun, position: int, asides: Sequence[int]) -> tuple[str, ...]:
    """Notes on the row of a position in the top layer."""
    row = run.result.select(position, max(run.result.layers))
    return describe_row(row, run.name, asides)


def describe_row(row: TokenAttention, name: str, asides: Sequence[int]) -> tuple[str, ...]:
    """Notes on a row that is shown, of the result with this name.

    asides: positions that are not compared: sinks, special tokens and the explained one.
    """
    with collect_notices() as notices:
        warn_if_even(row)
    (layer,) = row.layers
    if notices or layer - (row.bottom or 0) < WORTH_A_WARNING[0]:
        return tuple(notices)
    spread = find_even_spread(row.compared_with("even", exclude=asides))
    if spread is None:
        return ()
    other = "at rollout" if row.saturated is not None else "by another method"
    return (f"{phrase_even(name, str(layer), spread)}; look at a lower layer or {other}",)


def find_row_asides(
    weights: Attention | AttentionGraph, special: Sequence[bool], explained: Sequence[int]
) -> tuple[int, ...]:
    """The positions that are left out of comparisons: sinks, special tokens, explained ones."""
    marked = {place for place, is_special in enumerate(special) if is_special}
    return tuple(sorted(marked | {sink.position for sink in sinks(weights)} | set(explained)))


def describe_graphs(graphs: Mapping[str, AttentionGraph]) -> Source:
    """Where results on several kinds of edges came from."""
    sources = [graph.source for graph in graphs.values()]
    residual = next((each.residual for each in sources if each.residual is not None), None)
    heads = next((each.heads for each in sources if each.heads is not None), None)
    kinds = ", ".join(graphs)
    return replace(sources[0], edges=kinds, residual=residual, target=None, heads=heads)


# ---- long inputs --------------------------------------------------------------------------------


def needs_rows(model: Model, job: Job, plan: Plan, case: Case) -> bool:
    """Whether an input is too long for a graph, so that rows of one position are computed.

    Only where rows are available for everything that was named.
    """
    named = () if job.methods is None else job.methods.values()
    if job.explains_span:
        check_span_size(case.encoded)
        return False
    makes_graph = job.graph is not None or job.heads != "mean" or job.normalize is None
    watches = bool(job.importance) or case.target is not None or case.foil is not None
    return (
        job.everywhere
        and not makes_graph
        and not watches
        and all(method in BY_ROWS for method in named)
        and goes_by_rows(model, len(case.encoded.tokens), plan.drop_first().weights.values())
    )


def run_rows(model: Model, number: int, case: Case, job: Job, plan: Plan) -> Iterator[Event]:
    """The events of a long input: rows of the explained position, and its prediction."""
    place = model.locate(case.encoded, job.asked_position)
    plan, notes = plan_long(model, len(case.encoded.tokens), plan)
    yield StageStarted(number, MODEL_STAGE)
    start = time.perf_counter()
    rows, missing = plan_rows(plan)
    try:
        found = explain_position(model, case.encoded, place, rows, job)
    except CaptureError as error:
        if plan.first is None:
            raise
        notes = (describe_missing_edges(plan.first, error),)
        rows, missing = plan_rows(plan.drop_first())
        found = explain_position(model, case.encoded, place, rows, job)
    results, witnesses, prediction = found
    yield Predicted(number, place, prediction, None, time.perf_counter() - start)
    for choice in rows.choices:
        done = MethodRun(choice.name, choice.edges, choice.compute, None, results[choice.name])
        yield ResultReady(number, done)
    notes += (*missing, *describe_loss(results))
    if job.importance is None and model.predicts:
        notes += (f"importance is left out above {ROWS_ABOVE:,} tokens, unless it is named",)
    yield InputDone(number, notes, witnesses)


# ---- importance ---------------------------------------------------------------------------------


def score_importance(
    model: Model,
    readings: Sequence[Reading],
    job: Job,
    name: str,
    function: ImportanceFunction,
    batch_tokens: int | None,
) -> list[Importance]:
    """One importance of each input, at the position that was read."""
    check_scorable(model, name)
    if name in job.own_importance:
        return score_own_importance(model, readings, job, name, function)
    if name == "blank_out":
        return score_blank_out(model, readings, signed=job.by_word, batch_tokens=batch_tokens)
    known = [each.known[name] for each in readings if name in each.known]
    if len(known) == len(readings):
        return known
    return function(
        model,
        [reading.encoded for reading in readings],
        [reading.target.number for reading in readings],
        foil=[reading.watched.foil for reading in readings],
        position=job.asked_position,
        batch_tokens=batch_tokens,
    )


def score_blank_out(
    model: Model,
    readings: Sequence[Reading],
    *,
    signed: bool,
    batch_tokens: int | None = None,
    groups: Sequence[Group] | None = None,
) -> list[Importance]:
    """Blank-out of each input, by token or by group."""
    return measure_blank_out(
        model,
        [reading.encoded for reading in readings],
        [model.logit_position(reading.encoded, reading.position) for reading in readings],
        [reading.watched for reading in readings],
        blank=find_replacement(model, None),
        signed=signed,
        batch_tokens=batch_tokens,
        groups=groups,
    )


def score_words(model: Model, reading: Reading, by_token: Importance) -> Importance:
    """The importance of each word: blank-out of the whole word; other importances are summed."""
    if by_token.method != "blank_out":
        return by_token.by_word()
    words = word_groups(by_token.tokens, by_token.words)
    values = by_token.values[[word.positions[0] for word in words]]
    several = [place for place, word in enumerate(words) if len(word.positions) > 1]
    if several:  # words of one token are blanked out already
        groups = [words[place] for place in several]
        (scored,) = score_blank_out(model, [reading], signed=True, groups=groups)
        values[several] = scored.values
    names = tuple(word.name for word in words)
    return replace(by_token, values=values, tokens=names, words=None, groups=words)


def score_own_importance(
    model: Model,
    readings: Sequence[Reading],
    job: Job,
    name: str,
    function: ImportanceFunction,
) -> list[Importance]:
    """A user-defined importance of each input, checked."""
    position = job.asked_position
    if job.everywhere and len(readings) == 1:
        position = readings[0].position
    options: dict[str, object] = {} if position is None else {"position": position}
    foils = [reading.watched.foil for reading in readings]
    if None not in foils:
        options["foil"] = foils
    options = {name: value for name, value in options.items() if accepts(function, name)}
    # token ids, where the text alone would be encoded otherwise
    values = [
        list(reading.encoded.ids)
        if job.truncation or reading.encoded.messages
        else reading.case.value
        for reading in readings
    ]
    numbers = [reading.target.number for reading in readings]
    scores = call_own(name, function, model, values, numbers, **options)
    if not isinstance(scores, list | tuple) or len(scores) != len(readings):
        count = len(scores) if isinstance(scores, list | tuple) else type(scores).__name__
        raise OptionError(
            f"{name} must give a list with one importance per input, {len(readings)} here,"
            f" as {IMPORTANCE_FORM}; got {count}"
        )
    return [
        read_importance(name, score, reading)
        for score, reading in zip(scores, readings, strict=True)
    ]


def read_importance(name: str, score: object, reading: Reading) -> Importance:
    """A user-defined importance of one input: an `Importance`, or one number per token."""
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
        return replace(score, method=name, words=encoded.words)
    return Importance(
        values,
        name,
        encoded.tokens,
        reading.target.label,
        reading.target.probability,
        encoded.words,
        bool((values < 0).any()),
    )
