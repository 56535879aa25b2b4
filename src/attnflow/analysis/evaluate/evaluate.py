"""`evaluate`: does token attention rank tokens as their importance does?"""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypedDict, overload

import numpy as np

from attnflow.analysis.evaluate.examples import (
    Example,
    GivenExample,
    read_example,
    read_foils,
    split_example,
    take_examples,
)
from attnflow.analysis.evaluate.report import Report
from attnflow.analysis.evaluate.sanity import Sanity, measure_sanity, read_seeds
from attnflow.analysis.evaluate.scored_example import ScoredExample
from attnflow.analysis.evaluate.scorers import Scorer, Scorers, read_scorers, run_scorer
from attnflow.analysis.evaluate.truth.evaluate_truth import evaluate_truth, refuse_options
from attnflow.analysis.evaluate.truth.truth_prompts import TruthPrompts
from attnflow.analysis.evaluate.truth.truth_report import TruthReport
from attnflow.analysis.evaluate.yardsticks import Faithful, Subject, Yardsticks, check_best
from attnflow.analysis.faithfulness.faithfulness import choose_value
from attnflow.analysis.faithfulness.plausibility import read_rationales
from attnflow.analysis.importance.importances import IMPORTANCES, PAPER_IMPORTANCES
from attnflow.analysis.importance.watch import check_scorable
from attnflow.analysis.job import GraphMaker, Job
from attnflow.analysis.run import (
    Case,
    GraphMade,
    ImportanceReady,
    Predicted,
    ResultReady,
    describe_graphs,
    reduce_positions,
    run,
)
from attnflow.analysis.statistics import check_statistic
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.choices import Choices
from attnflow.core.graph import AttentionGraph
from attnflow.core.methods import METHODS
from attnflow.core.provenance import Source
from attnflow.errors import OptionError
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import Foil, Prediction
from attnflow.progress import progress_bar

# examples that are computed between two steps of the progress bar; perturbed inputs of a few fill
# batches by themselves
EXAMPLES_PER_STEP, PERTURBED_PER_STEP = 32, 4


@overload
def evaluate(
    model: ModelLike,
    examples: TruthPrompts,
    *,
    methods: Choices | None = ...,
    edges: Choices | None = ...,
    against: Choices | None = ...,
    scorers: Scorers | None = ...,
    limit: int | None = ...,
    foil: Foil | Sequence[Foil] | None = ...,
    residual: float | None = ...,
    workers: int = ...,
) -> TruthReport: ...
@overload
def evaluate(
    model: ModelLike,
    examples: Iterable[GivenExample],
    *,
    methods: Choices | None = ...,
    edges: Choices | None = ...,
    against: Choices | None = ...,
    scorers: Scorers | None = ...,
    layers: Iterable[int] | int | None = ...,
    limit: int | None = ...,
    special_tokens: bool = ...,
    position: str | int = ...,
    foil: Foil | Sequence[Foil] | None = ...,
    graph: GraphMaker | None = ...,
    residual: float | None = ...,
    without: Sequence[int] = ...,
    workers: int = ...,
    faithfulness: Choices | None = ...,
    replacement: object = ...,
    target_of: str | None = ...,
    best: bool = ...,
    rationales: Sequence[object] | None = ...,
    statistic: str = ...,
    undefined: str = ...,
    sanity: bool | Sequence[int] = ...,
    query: str | int | None = ...,
) -> Report: ...
def evaluate(
    model: ModelLike,
    examples: Iterable[GivenExample] | TruthPrompts,
    *,
    methods: Choices | None = None,
    edges: Choices | None = None,
    against: Choices | None = None,
    scorers: Scorers | None = None,
    layers: Iterable[int] | int | None = None,
    limit: int | None = None,
    special_tokens: bool = False,
    position: str | int = "focal",
    foil: Foil | Sequence[Foil] | None = None,
    graph: GraphMaker | None = None,
    residual: float | None = None,
    without: Sequence[int] = (),
    workers: int = 1,
    faithfulness: Choices | None = (),
    replacement: object = None,
    target_of: str | None = None,
    best: bool = False,
    rationales: Sequence[object] | None = None,
    statistic: str = "spearman",
    undefined: str = "drop",
    sanity: bool | Sequence[int] = False,
    query: str | int | None = None,
) -> Report | TruthReport:
    """How well methods rank the tokens of examples: by correlation with importance, and more.

    One forward pass per example serves all methods. If interrupted by Ctrl-C, it returns the
    report of the examples that are done.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    examples
        Texts, or pairs (text, label); without a label the target of importance is what the model
        predicts. A text may be another input that `Model.encode` takes, such as a chat. Or the
        prompts of `truth_prompts`, whose true token is known: the report then says where methods,
        importances and scorers rank it, and takes the options methods, edges, against, scorers,
        limit, foil, residual and workers.
    methods
        Names of methods, or {name: function} with user-defined methods; a None in their place
        stands for attnflow's own of that name. All of attnflow's if None.
    edges
        What an edge of the graph weighs, one or several, as in `explain`; rows on edges other than
        attention are named after both: "contribution rollout". Attention if None. If methods is
        None as well, the method that `explain` shows first comes first.
    against
        Names of importances, or {name: function}, called as f(model, inputs, target); blank-out and
        input gradients if None, for prompts with known truth also relevance.
    scorers
        User-defined scores by name: one array per example (one number per token), or a function
        of the text. They have no layers.
    layers
        The layers to score; all if None.
    limit
        The maximum number of examples.
    special_tokens
        Whether CLS, SEP and the like take part in the correlations.
    position
        Whose token attention is taken: "focal", the position that the prediction comes from;
        "max" or "mean" over all positions; or a position.
    foil
        The class that each target is contrasted with, or a list with one per example; `RUNNER_UP`
        is the most probable class other than the target. Edges, importances and faithfulness then
        watch the logit of the target minus that of the foil.
    graph
        A function from an `Attention` to an `AttentionGraph`; `attention.graph()` if None.
    residual
        The weight of the residual connection, 0.5 if None.
    without
        Positions to take out of every graph, for instance a sink; they are not ranked.
    workers
        Threads for attention flow.
    faithfulness
        Names of metrics, or {name: function}, as in `faithfulness`; their columns stand beside the
        correlations, with one more row: a random order (the mean of 10 seeds).
    replacement
        How tokens are taken away, as in `faithfulness`; or a list of replacements, each measured
        by itself, so that `Report.agreement` can compare them.
    target_of
        The value that faithfulness watches: "probability" (default), "log_probability" or "logit";
        with a foil always the difference of the logits.
    best
        Whether to search the best order of each example as well, for a row "best found". The time
        of the search grows with the cube of the length.
    rationales
        One per example: 1 for each token that annotators marked as the reason, else 0; gives the
        columns of `plausibility`.
    statistic
        The rank correlation: "spearman", "kendall" (tau-b), or "dense", Spearman's of dense ranks,
        as the authors of the paper compute it; it lifts methods that tie many tokens, as flow does.
    undefined
        Whether means leave out undefined correlations ("drop"), or count them as zero ("zero").
        They are undefined where all scores are equal, so dropping them favours methods that tie
        many tokens. The report always counts them. Undefined metrics are always left out.
    sanity
        Whether to also measure how far each ranking changes when the weights of a copy of the
        model are randomised, layer by layer from the top: `report.sanity`. With a list of seeds,
        they are drawn once for each.
    query
        The old name of `position`.

    >>> from attnflow import load
    >>> examples = [("the key to the cabinets", "singular")]
    >>> evaluate(load("verb-number"), examples, methods=["rollout"], against=["blank_out"])
    <Report: rollout against blank_out, 1 example>
    """
    if query is not None:
        position = rename_query(query, position)
    if isinstance(examples, TruthPrompts):
        refuse_options(
            layers=(layers, None),
            special_tokens=(special_tokens, False),
            position=(position, "focal"),
            graph=(graph, None),
            without=(list(without), []),
            faithfulness=(faithfulness, ()),
            replacement=(replacement, None),
            target_of=(target_of, None),
            best=(best, False),
            rationales=(rationales, None),
            statistic=(statistic, "spearman"),
            undefined=(undefined, "drop"),
            sanity=(sanity, False),
        )
        return evaluate_truth(
            open_model(model),
            examples,
            methods=methods,
            edges=edges,
            against=against,
            scorers=scorers,
            limit=limit,
            foil=foil,
            residual=residual,
            workers=workers,
        )
    chosen = take_examples(examples, limit)
    check_statistic(statistic, undefined)
    one_foil, foils = read_foils(foil, len(chosen))
    watched_value = choose_value(target_of, contrasts=foil is not None)
    job = Job.read(
        methods=methods,
        edges=edges,
        importance=tuple(PAPER_IMPORTANCES) if against is None else against,
        layers=read_all_layers(layers),
        position=position,
        foil=one_foil,
        graph=graph,
        residual=residual,
        without=without,
        workers=workers,
        faithfulness=faithfulness,
        replacement=replacement,
        target_of=watched_value,
    )
    check_best(best, job.faithfulness)
    seeds = read_seeds(sanity)
    if seeds and not job.named_methods:
        raise OptionError("sanity ranks by methods on randomised weights; got scorers alone")
    model = open_model(model)
    yardsticks = Yardsticks.read(model, job.faithfulness, job.replacement, best=best)
    evaluation = Evaluation(model, job, read_scorers(scorers, len(chosen)), yardsticks)
    evaluation.check(has_rationales=rationales is not None)
    asked = [  # all of them are checked before anything is computed
        read_example(model, number, *split_example(example), foil=foils[number])
        for number, example in enumerate(chosen)
    ]
    marks = read_rationales(rationales, [len(example.encoded.tokens) for example in asked])
    done: list[ScoredExample] = []
    tested: Sanity | None = None
    with progress_bar("evaluating") as tick:
        try:
            for start in range(0, len(asked), evaluation.step):
                done += evaluation.score(asked[start : start + evaluation.step])
                tick(len(done), len(asked))
            if seeds:
                tested = measure_sanity(evaluation, done, asked, seeds, special_tokens)
        except KeyboardInterrupt:
            if not done:
                raise
    if marks is not None:
        done = [replace(each, rationale=mark) for each, mark in zip(done, marks, strict=False)]
    return Report(
        model=model.name,
        methods=(*evaluation.method_names, *evaluation.scorers),
        against=tuple(job.importance or ()),
        layers=evaluation.layers,
        examples=tuple(done),
        special_tokens=special_tokens,
        position=str(job.position),
        asked=len(asked),
        seconds=evaluation.seconds,
        scorers=tuple(evaluation.scorers),
        source=evaluation.source,
        statistic=statistic,
        undefined=undefined,
        faithfulness=job.metric_names,
        replacements=yardsticks.names if yardsticks else (),
        target_of=watched_value.replace("-", "_"),
        sanity=tested,
        best=best,
    )


def rename_query(query: str | int, position: str | int) -> str | int:
    """The position by its old name, with a warning."""
    if position != "focal":
        raise OptionError(f"query is the old name of position; got {query!r} and {position!r}")
    warnings.warn(
        "evaluate's query is now position; the old name works in this version only",
        FutureWarning,
        stacklevel=3,
    )
    return query


def read_all_layers(layers: Iterable[int] | int | None) -> list[int] | None:
    """The layers of every method; a corpus alone has layers by method."""
    return None if layers is None else check_integers(layers, "layers")


class WatchedNames(TypedDict):
    """The fields of a `ScoredExample` on what was watched."""

    target: int | None
    foil: str | None
    foil_number: int | None


def describe_watched(prediction: Prediction | None) -> WatchedNames:
    """The target and the foil of an example."""
    if prediction is None:
        return {"target": None, "foil": None, "foil_number": None}
    target, foil = prediction.target.number, prediction.foil
    if foil is None:
        return {"target": target, "foil": None, "foil_number": None}
    return {"target": target, "foil": foil.label, "foil_number": foil.number}


@dataclass
class Observed:
    """What became known of one example."""

    prediction: Prediction | None = None
    position: int = 0
    removed: tuple[int, ...] = ()
    scores: dict[str, Floats] = field(default_factory=dict)  # [layer, token]
    importance: dict[str, Floats] = field(default_factory=dict)  # [token]


@dataclass
class Evaluation:
    """The scores to compute of every example, and the time that each part took."""

    model: Model
    job: Job
    scorers: dict[str, Scorer]
    yardsticks: Yardsticks | None = None
    layers: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    source: Source | None = None
    computed: tuple[str, ...] = ()

    @property
    def method_names(self) -> tuple[str, ...]:
        """The names of all methods, on each kind of edges.

        Once examples are scored, those that were computed: the default edges are left out where
        they are not available for the model.
        """
        return self.computed or tuple(choice.name for choice in self.job.plan(self.model).choices)

    @property
    def step(self) -> int:
        """The number of examples between two steps of the progress bar."""
        return EXAMPLES_PER_STEP if self.yardsticks is None else PERTURBED_PER_STEP

    def check(self, *, has_rationales: bool) -> None:
        """Refuse an evaluation without methods, or without a yardstick."""
        against = self.job.importance or {}
        for name in against:
            check_scorable(self.model, name)
        names = [*self.method_names, *self.scorers]
        if not names:
            raise OptionError(f"at least one method is needed; choose from {', '.join(METHODS)}")
        if not (against or self.yardsticks or has_rationales):
            known = ", ".join(IMPORTANCES)
            raise OptionError(f"at least one importance is needed; choose from {known}")
        for name in names:
            if names.count(name) > 1:
                raise OptionError(f"names of methods must be unique; got {name!r} twice")

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to that of a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.count(part, time.perf_counter() - start)

    def count(self, part: str, seconds: float) -> None:
        """Add to the time of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def score(self, examples: Sequence[Example]) -> list[ScoredExample]:
        """All scores of a few examples."""
        found = self.observe(examples)
        for name, scorer in self.scorers.items():
            with self.timed(name):
                for example, seen in zip(examples, found, strict=True):
                    seen.scores[name] = run_scorer(name, scorer, example)[None]
        measured = self.measure(examples, found)
        return [
            ScoredExample(
                example.encoded.text if example.encoded.messages else example.text,
                str(example.label) if seen.prediction is None else seen.prediction.target.label,
                example.encoded.tokens,
                example.encoded.special,
                seen.scores,
                seen.importance,
                seen.removed,
                faithful,
                **describe_watched(seen.prediction),
            )
            for example, seen, faithful in zip(examples, found, measured, strict=True)
        ]

    def observe(self, examples: Sequence[Example]) -> list[Observed]:
        """The prediction, results and importances of each example, from one run of the model."""
        found = [Observed() for _ in examples]
        if not (self.method_names or self.job.importance or self.yardsticks):
            return found
        graphs: dict[str, AttentionGraph] = {}
        cases = [
            Case(example.text, example.encoded, example.target, example.foil)
            for example in examples
        ]
        for event in run(self.model, cases, self.job):
            seen = found[event.number]
            match event:
                case Predicted():
                    seen.prediction, seen.position = event.prediction, event.position
                    self.count("capture", event.seconds)
                case GraphMade():
                    seen.removed = seen.removed or event.graph.removed
                    if event.number == 0:
                        graphs[event.edges] = event.graph
                case ResultReady():
                    result = event.run.result
                    seen.scores[event.run.name] = reduce_positions(result.values, self.job.position)
                    self.layers = self.layers or tuple(result.layers)
                    self.count(event.run.name, event.seconds)
                case ImportanceReady():
                    seen.importance[event.name] = np.asarray(event.importance)
                    self.count(event.name, event.seconds)
        self.source = self.source or describe_graphs(graphs)
        self.computed = self.computed or tuple(found[0].scores)
        return found

    def measure(
        self, examples: Sequence[Example], found: Sequence[Observed]
    ) -> list[tuple[Faithful, ...]]:
        """The faithfulness of all scores of each example; empty without metrics."""
        if self.yardsticks is None:
            return [()] * len(examples)
        subjects = []
        for example, seen in zip(examples, found, strict=True):
            if seen.prediction is None:
                raise OptionError("faithfulness requires a model that predicts")
            place = self.model.logit_position(example.encoded, seen.position)
            target, foil = seen.prediction.target.number, seen.prediction.foil
            against = None if foil is None else foil.number
            asked = self.job.asked_position
            subjects.append(Subject(example.encoded, place, asked, target, against, seen.removed))
        with self.timed("faithfulness"):
            names = found[0].scores
            scores = {name: [seen.scores[name] for seen in found] for name in names}
            return self.yardsticks.measure(subjects, scores)
