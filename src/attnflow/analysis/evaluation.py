"""`evaluate`: does token attention rank tokens as their importance does?"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from attnflow.analysis.examples import check_example, split_example
from attnflow.analysis.importance import IMPORTANCES
from attnflow.analysis.pipeline import (
    GraphMaker,
    ImportanceFunction,
    Reading,
    check_query,
    choose_graphs,
    describe_graphs,
    open_model,
    read_graph_maker,
    read_importances,
    read_inputs,
    refuse_graphs,
    score_importance,
    score_query,
)
from attnflow.analysis.rationales import read_rationales
from attnflow.analysis.report import Report
from attnflow.analysis.sanity import Sanity, measure_sanity, read_seeds
from attnflow.analysis.scored import ScoredExample
from attnflow.analysis.scorers import Scorer, check_scores, read_scorers, split_older
from attnflow.analysis.statistics import check_statistic
from attnflow.analysis.yardsticks import Faithful, Subject, Yardsticks
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count, check_integers
from attnflow.core.custom import Choices, Method, read_methods
from attnflow.core.graph import AttentionGraph
from attnflow.core.methods import METHODS
from attnflow.core.provenance import Source
from attnflow.edges.building import refuse_residual
from attnflow.edges.choosing import EdgeWeight, name_result, read_edges
from attnflow.errors import OptionError
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model
from attnflow.progress import progress_bar

CHUNK = 32  # examples that are captured and scored together


def evaluate(
    model: Any,
    examples: Iterable[Any],
    *,
    methods: Choices = tuple(METHODS),
    edges: Any = "attention",
    against: Choices = tuple(IMPORTANCES),
    scorers: Mapping[str, Scorer] | Callable[[Any], Any] | None = None,
    layers: Iterable[int] | int | None = None,
    limit: int | None = None,
    special_tokens: bool = False,
    query: str | int = "focal",
    graph: GraphMaker | None = None,
    residual: float | None = None,
    without: Sequence[int] = (),
    workers: int = 1,
    faithfulness: Any = (),
    replacement: Any = None,
    target_of: str = "probability",
    rationales: Sequence[Any] | None = None,
    statistic: str = "spearman",
    undefined: str = "drop",
    sanity: bool | Sequence[int] = False,
) -> Report:
    """How well methods rank the tokens of examples: by correlation with importance, and more.

    One forward pass per example serves all methods. Interrupted by Ctrl-C, it returns the report
    of what is done.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    examples
        Texts, or pairs (text, label); without a label the target of importance is what the model
        predicts.
    methods
        Names of methods, or {name: function} with methods of your own; None stands for attnflow's
        own of that name.
    edges
        What an edge of the graph weighs, one or several, as for `explain`; rows on edges other than
        attention are called after both: "contribution rollout".
    against
        Names of importances, or {name: function}, called as f(model, inputs, target).
    scorers
        Scores that you have already, by name: one array per example (one number per token), or a
        function of the text. They have no layers.
    layers
        The layers to score; all if None.
    limit
        At most so many examples.
    special_tokens
        Whether CLS, SEP and the like take part in the correlations.
    query
        Whose token attention is taken: "focal", the position that the prediction comes from;
        "max" or "mean" over all positions; or a position.
    graph
        A function from an `Attention` to an `AttentionGraph`; `attention.graph()` if None.
    residual
        The weight of the residual connection, 0.5 if None.
    without
        Positions to take out of every graph, for instance a sink; they are not ranked.
    workers
        Threads for attention flow.
    faithfulness
        Names of metrics, or {name: function}, as `faithfulness` takes them; their columns stand
        beside the correlations, with two more rows: a random order (the mean of 10 seeds), and the
        best order that was found.
    replacement
        What is done to tokens that are taken away, as for `faithfulness`; or a list of such, each
        measured by itself, so that `Report.agreement` can compare them.
    target_of
        The value that faithfulness watches: "probability", "log_probability" or "logit".
    rationales
        One per example: 1 for each token that somebody marked as the reason, else 0; gives the
        columns of `plausibility`.
    statistic
        The rank correlation: "spearman", "kendall" (tau-b), or "dense", Spearman's of dense ranks,
        as the authors of the paper compute it; it lifts methods that tie many tokens, as flow does.
    undefined
        Whether means leave out undefined correlations ("drop"), or count them as zero ("zero").
        They are undefined where all scores are equal, so that to drop them favours methods that tie
        many tokens. How many there are is always told. Undefined metrics are always left out.
    sanity
        Whether to measure too how far each ranking changes when the weights of a copy of the model
        are randomised, layer by layer from the top: `report.sanity`. A list of seeds draws them
        once for each.

    >>> from attnflow import load
    >>> examples = [("the key to the cabinets", "singular")]
    >>> evaluate(load("verb-number"), examples, methods=["rollout"], against=["blank_out"])
    <Report: rollout against blank_out, 1 example>
    """
    if isinstance(examples, str) or not isinstance(examples, Iterable):
        got = "one text: put it in a list" if isinstance(examples, str) else type(examples).__name__
        raise OptionError(f"examples must be a list of texts, or of (text, label); got {got}")
    if limit is not None:
        limit = check_count("limit", limit)
    chosen = list(islice(examples, limit))
    if not chosen:
        raise OptionError("there must be at least one example; got none")
    check_statistic(statistic, undefined)
    methods, older_scorers = split_older(methods, METHODS, 1, "methods", "scorers={name: function}")
    against, older_against = split_older(
        against, IMPORTANCES, 3, "against", "a function f(model, inputs, target)"
    )
    model = open_model(model)
    job = Evaluation(
        model=model,
        methods=read_methods(methods),
        against=read_importances(against),
        scorers=read_scorers(scorers, len(chosen)),
        older_scorers=older_scorers,
        older_against=older_against,
        wanted=layers,
        query=check_query(query),
        make_graph=read_graph_maker(graph, residual, without),
        heads="mean" if graph is None else None,  # a function of the user's may fuse them
        edges=read_edges(edges),
        residual=residual,
        workers=workers,
        yardsticks=Yardsticks.read(model, faithfulness, replacement, target_of),
        bare=rationales is not None,
    )
    job.check()
    refuse_graphs(job.edges, graph, without)
    seeds = read_seeds(sanity)
    if seeds and not job.methods:
        raise OptionError("sanity ranks by methods on randomised weights; got scorers alone")
    pairs = [split_example(example) for example in chosen]
    encoded = [  # all of them, before anything is computed
        check_example(job.model, f"example {number}", *pair) for number, pair in enumerate(pairs, 1)
    ]
    marks = read_rationales(rationales, [len(inputs.tokens) for inputs in encoded])
    done: list[ScoredExample] = []
    tested: Sanity | None = None
    with progress_bar("evaluating") as tick:
        try:
            for start in range(0, len(chosen), CHUNK):
                part = slice(start, start + CHUNK)
                done += job.score(
                    range(len(chosen))[part], chosen[part], pairs[part], encoded[part]
                )
                tick(len(done), len(chosen))
            if seeds:
                tested = measure_sanity(job, done, pairs, encoded, seeds, special_tokens)
        except KeyboardInterrupt:
            if not done:
                raise
    if marks is not None:
        done = [replace(each, rationale=mark) for each, mark in zip(done, marks, strict=False)]
    yardsticks = job.yardsticks
    return Report(
        model=job.model.name,
        methods=(*job.method_names, *job.scorer_names),
        against=(*job.against, *job.older_against),
        layers=job.layers,
        examples=tuple(done),
        special_tokens=special_tokens,
        query=str(query),
        asked=len(chosen),
        seconds=job.seconds,
        scorers=job.scorer_names,
        source=job.source,
        statistic=statistic,
        undefined=undefined,
        faithfulness=() if yardsticks is None else tuple(yardsticks.request.metrics),
        replacements=() if yardsticks is None else yardsticks.names,
        target_of=target_of.replace("-", "_"),
        sanity=tested,
    )


@dataclass
class Evaluation:
    """What is computed of every example, and how long each part took."""

    model: Model
    methods: dict[str, Method]
    against: dict[str, ImportanceFunction]
    scorers: dict[str, Scorer]
    older_scorers: dict[str, Callable[[Any], Any]]
    older_against: dict[str, Callable[[Any], Any]]
    wanted: Iterable[int] | int | None  # layers
    query: str | int
    make_graph: GraphMaker
    heads: str | None
    edges: dict[str, EdgeWeight]
    residual: float | None
    workers: int
    yardsticks: Yardsticks | None = None
    bare: bool = False  # whether methods are measured by something else than importance, too
    layers: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    source: Source | None = None

    @property
    def scorer_names(self) -> tuple[str, ...]:
        """The names of all scorers."""
        return (*self.scorers, *self.older_scorers)

    @property
    def method_names(self) -> tuple[str, ...]:
        """The names of all methods, on each kind of edges."""
        return tuple(name_result(edge, name) for edge in self.edges for name in self.methods)

    def check(self) -> None:
        """Refuse a job that has nothing to rank, or nothing to rank it against."""
        refuse_residual(self.edges, self.residual)
        for what, names, known in (
            ("method", [*self.method_names, *self.scorer_names], METHODS),
            ("importance", [*self.against, *self.older_against], IMPORTANCES),
        ):
            if not names and not (what == "importance" and (self.yardsticks or self.bare)):
                raise OptionError(f"at least one {what} is needed; choose from {', '.join(known)}")
            for name in names:
                if names.count(name) > 1:
                    raise OptionError(
                        f"each {what} must have a name of its own; got {name!r} twice"
                    )

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time of a block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def score(
        self,
        places: Sequence[int],
        examples: Sequence[Any],
        pairs: Sequence[tuple[Any, Any]],
        encoded: Sequence[Encoded],
    ) -> list[ScoredExample]:
        """All scores of a few examples. places: their numbers among all."""
        texts, labels = [text for text, _ in pairs], [label for _, label in pairs]
        position = None if isinstance(self.query, str) else self.query
        readings: list[Reading] = []
        graphs: list[dict[str, AttentionGraph]] = []
        if self.methods or self.against or self.yardsticks:
            targets = [None if label is None else self.model.target(label) for label in labels]
            with self.timed("capture"):
                readings = read_inputs(
                    self.model,
                    encoded,
                    targets=targets,
                    position=position,
                    heads=self.heads,
                    edges=self.edges,
                    residual=self.residual,
                )
            graphs = [choose_graphs(reading, self.edges, self.make_graph) for reading in readings]
            self.source = self.source or describe_graphs(graphs[0])
        importance: dict[str, list[Any]] = {}
        for name, function in self.against.items():
            with self.timed(name):
                importance[name] = score_importance(
                    self.model, readings, name, function, values=texts, position=position
                )
        watched = [str(label) for label in labels]
        if self.model.predicts and readings:
            watched = [self.model.label(int(reading.target or 0)) for reading in readings]
        if importance:
            watched = [scored.target for scored in next(iter(importance.values()))]
        for name, older in self.older_against.items():
            importance[name] = self._call_each(name, older, examples, encoded)
        scores: dict[str, list[Floats]] = {}
        for edge in self.edges:
            for method_name, method in self.methods.items():
                name = name_result(edge, method_name)
                with self.timed(name):
                    scores[name] = [
                        self.score_method(name, method, by_edge[edge], inputs)
                        for by_edge, inputs in zip(graphs, encoded, strict=True)
                    ]
        for name, scorer in self.scorers.items():
            given = texts if callable(scorer) else places
            score: Callable[[Any], Any] = scorer if callable(scorer) else scorer.__getitem__
            scores[name] = [row[None] for row in self._call_each(name, score, given, encoded)]
        for name, older in self.older_scorers.items():
            scores[name] = [row[None] for row in self._call_each(name, older, examples, encoded)]
        removed = [next(iter(by_edge.values())).removed for by_edge in graphs]
        removed = removed or [()] * len(examples)
        faithful = self.measure(readings, scores, removed, position)
        return [
            ScoredExample(
                text,
                target,
                inputs.tokens,
                inputs.special,
                {name: rows[place] for name, rows in scores.items()},
                {name: np.asarray(values[place]) for name, values in importance.items()},
                gone,
                measured,
            )
            for place, (text, target, inputs, gone, measured) in enumerate(
                zip(texts, watched, encoded, removed, faithful, strict=True)
            )
        ]

    def measure(
        self,
        readings: Sequence[Reading],
        scores: Mapping[str, Sequence[Floats]],
        removed: Sequence[tuple[int, ...]],
        position: int | None,
    ) -> list[tuple[Faithful, ...]]:
        """How faithful all scores [layer, token] of each input are; nothing if not asked for."""
        if self.yardsticks is None:
            return [()] * len(removed)
        with self.timed("faithfulness"):
            subjects = [
                Subject(
                    reading.encoded,
                    self.model.logit_position(reading.encoded, reading.position),
                    position,
                    int(reading.target or 0),
                    gone,
                )
                for reading, gone in zip(readings, removed, strict=True)
            ]
            return self.yardsticks.measure(subjects, scores)

    def score_method(
        self, name: str, method: Method, graph: AttentionGraph, encoded: Encoded
    ) -> Floats:
        """[layer, token] of one method at the position, or over those, that the query means."""
        if not self.layers:
            layers = range(1, graph.depth + 1) if self.wanted is None else self.wanted
            self.layers = tuple(dict.fromkeys(check_integers(layers, "layers")))
        options: dict[str, Any] = {"layers": self.layers, "workers": self.workers}
        return score_query(self.model, name, method, graph, encoded, self.query, **options)

    def _call_each(
        self,
        name: str,
        scorer: Callable[[Any], Any],
        given: Sequence[Any],
        encoded: Sequence[Encoded],
    ) -> list[Floats]:
        """[token] per example, by a function of the user's."""
        with self.timed(name):
            return [
                check_scores(name, scorer, value, inputs.tokens)
                for value, inputs in zip(given, encoded, strict=True)
            ]
