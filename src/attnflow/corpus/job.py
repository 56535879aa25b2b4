"""The options of a corpus: as `explain_corpus` takes them, as a manifest records them, as a `Job`.

A manifest holds no functions: attnflow's own go by their names, user-defined ones by a reference,
`package.module:function`. `StoredJob.open` makes the `Job` of it again, in each worker.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypedDict

from attnflow.analysis.importance.importances import IMPORTANCES
from attnflow.analysis.job import (
    POSITIONS,
    TEXT_SEGMENTS,
    GraphMaker,
    Job,
    Plan,
    choose_first,
    describe_missing_edges,
)
from attnflow.analysis.run import Case, StageStarted, run
from attnflow.core.checks import Numbers, check_count, check_integers, check_list
from attnflow.core.choices import Choices, import_function, run_method
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.core.methods import METHODS
from attnflow.corpus.formats import Columns
from attnflow.corpus.functions import choose_edges, import_choices, name_functions, name_graph
from attnflow.corpus.typed_json import NOT_EMPTY, AnyText, Count, Positive, Rule, Visible
from attnflow.edges.edge_weight import EdgeWeight, name_result, read_edges, split_name
from attnflow.edges.graphs import compute_gradients, run_edges, watch_edges
from attnflow.errors import AttnFlowError, CaptureError, CorpusWarning, OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.load import BUNDLED, ModelLike
from attnflow.models.model import Model
from attnflow.models.predict import RUNNER_UP, Foil, RunnerUp
from attnflow.notices import give_notice, ignore_notices

if TYPE_CHECKING:
    import pyarrow

SHARD_ROWS = 1000
SHARES_METHOD = "rollout"  # what shares of segments are of
TRIAL_TEXT = "a b"  # what a user-defined importance is tried on
LayerChoice = Numbers | Mapping[str, Numbers] | None


@dataclass(frozen=True)
class CorpusOptions:
    """The options of `explain_corpus`, with their defaults; see there."""

    model: ModelLike = BUNDLED
    text_column: str | None = None
    id_column: str | None = None
    label_column: str | None = None
    keep: str | Iterable[str] = ()
    methods: Choices | None = None  # all, and rollout for segments
    edges: Choices | None = None  # attention
    first: bool | None = None  # whether the default result comes first; if None, unless named
    layers: LayerChoice = None
    position: str | int = "focal"
    normalize: str | None = "sum"
    residual: float | None = None
    without: Numbers = ()
    graph: GraphMaker | str | None = None
    segments: str | None = None
    importance: Choices = ()
    foil: Foil | None = None
    limit: int | None = None
    batch_tokens: int | None = None
    shard_rows: int = SHARD_ROWS


class ColumnNames(TypedDict):
    """The columns of the input that were named."""

    text: AnyText | None
    id: AnyText | None
    label: AnyText | None


class RunnerUpRecord(TypedDict):
    """The automatic foil in a manifest: an object, since every text may be the name of a class."""

    runner_up: Annotated[bool, Rule("true", bool)]


FoilRecord = AnyText | Count | RunnerUpRecord


def record_foil(foil: Foil | None) -> FoilRecord | None:
    """A foil as a manifest records it.

    >>> record_foil(RUNNER_UP), record_foil("plural")
    ({'runner_up': True}, 'plural')
    """
    if isinstance(foil, RunnerUp):
        return {"runner_up": True}
    return foil if foil is None or isinstance(foil, str) else int(foil)


def recall_foil(record: FoilRecord | None) -> Foil | None:
    """The foil of a record.

    >>> recall_foil({"runner_up": True})
    attnflow.RUNNER_UP
    """
    return RUNNER_UP if isinstance(record, dict) else record


@dataclass(frozen=True)
class StoredJob:
    """What is computed of every text, as the manifest records it.

    layers: those that are stored, by result. residual: None where nothing is mixed in, or by a
    user-defined graph. functions: references of user-defined methods and importances; own_edges:
    of edge weights. first: a result that is computed before them. A manifest of an older version
    may lack what has a default here.
    """

    methods: Annotated[tuple[Visible, ...], NOT_EMPTY]
    layers: dict[str, Annotated[tuple[Positive, ...], NOT_EMPTY]]
    position: str | Count
    normalize: str | None
    importance: tuple[Visible, ...]
    batch_tokens: Positive
    residual: float | None = RESIDUAL
    without: tuple[Count, ...] = ()
    graph: Visible | None = None
    functions: dict[str, Visible] = field(default_factory=dict)
    keep: tuple[AnyText, ...] = ()
    edges: Annotated[tuple[Visible, ...], NOT_EMPTY] = ("attention",)
    own_edges: dict[str, Visible] = field(default_factory=dict)
    segments: (
        Annotated[str, Rule(", ".join(TEXT_SEGMENTS), lambda kind: kind in TEXT_SEGMENTS)] | None
    ) = None
    columns: ColumnNames = field(
        default_factory=lambda: ColumnNames(text=None, id=None, label=None)
    )
    limit: Positive | None = None
    foil: FoilRecord | None = None
    first: Visible | None = None

    @property
    def results(self) -> tuple[str, ...]:
        """The columns of scores: the one that comes first, and every method on all edges."""
        first = () if self.first is None else (self.first,)
        return (*first, *name_results(self.edges, self.methods))

    @property
    def removes_positions(self) -> bool:
        """Whether positions may have been taken out of graphs, so that a column says which."""
        return bool(self.without) or self.graph is not None

    @property
    def input_columns(self) -> Columns:
        """The columns of the input that are read."""
        return Columns(**self.columns, keep=self.keep)

    @property
    def schema(self) -> "pyarrow.Schema":
        """The columns of its shards; those that are kept of the input stand last."""
        import pyarrow as pa

        fields = {
            "id": pa.string(),
            "row": pa.int64(),
            "text": pa.string(),
            "tokens": pa.list_(pa.string()),
            "special": pa.list_(pa.bool_()),
            "words": pa.list_(pa.int32()),
            "label": pa.string(),
            "prediction": pa.string(),
            "probability": pa.float64(),
        }
        if self.removes_positions:
            fields["removed"] = pa.list_(pa.int32())
        if self.segments is not None:  # whose names and numbers of tokens two columns say
            fields |= {"segments": pa.list_(pa.string()), "segment_tokens": pa.list_(pa.int32())}
        fields |= {name: pa.list_(pa.list_(pa.float32())) for name in self.results}
        fields |= {name: pa.list_(pa.float32()) for name in self.importance}
        fields |= {name: pa.string() for name in self.keep}
        return pa.schema(list(fields.items()))

    def record(self) -> dict[str, object]:
        """Its options as JSON gives them back."""
        options: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return options

    def check(self) -> None:
        """Refuse options that no run has recorded, without the import of a function."""
        Job.read(
            position=self.position,
            normalize=self.normalize,
            residual=self.residual,
            without=self.without,
        )
        if set(self.layers) != set(self.results):
            raise OptionError(
                f"layers must be given for each result; got {sorted(self.layers)} for"
                f" {sorted(self.results)}"
            )
        for option, names, known in (
            ("functions", self.functions, {*self.methods, *self.importance}),
            ("own_edges", self.own_edges, {*self.edges}),
        ):
            for name in names.keys() - known:
                raise OptionError(f"{option} must be of names that are computed; got {name!r}")
        self.check_columns()

    def check_columns(self) -> None:
        """Refuse two columns of one name."""
        bare = replace(self, methods=(), importance=(), keep=(), first=None)
        taken = set(bare.schema.names)
        for names, message in (
            (
                self.results,
                "methods and kinds of edges must give columns of different names; got {!r} twice:"
                " rename a method",
            ),
            (self.importance, "methods and importances must have different names; got {!r} twice"),
            (
                self.keep,
                "keep must name columns that the result has not already; got {!r}: rename it in"
                " the input",
            ),
        ):
            for name in names:
                if name in taken:
                    raise OptionError(message.format(name))
                taken.add(name)

    def open(self) -> Job:
        """The job itself, in a worker: user-defined functions are imported."""

        def find(names: Iterable[str], places: Mapping[str, str], what: str) -> Choices:
            own = {name: import_function(places[name], what) for name in names if name in places}
            return {name: own.get(name) for name in names}

        job = Job.read(
            methods=find(self.methods, self.functions, "method"),
            importance=find(self.importance, self.functions, "importance"),
            edges=find(self.edges, self.own_edges, "edge weight"),
            layers=self.layers,
            position=self.position,
            foil=recall_foil(self.foil),
            normalize=self.normalize,
            residual=self.residual,
            without=self.without,
            graph=None if self.graph is None else import_function(self.graph, "graph"),
            segments=self.segments,
        )
        return job if self.first is None else replace(job, first=split_name(self.first))


@dataclass(frozen=True)
class CorpusJob:
    """A job as it travels to workers, with the size of the model's graphs.

    depth: their layers; heads: those that are kept while capturing. The memory of a row depends on
    both. watched: whether labels are the targets of importance or of gradient edges.
    """

    stored: StoredJob
    depth: int
    heads: int
    watched: bool


def name_results(edges: Iterable[str], methods: Iterable[str]) -> tuple[str, ...]:
    """The columns of scores: every method on every kind of edges.

    >>> name_results(["attention", "norm"], ["raw", "rollout"])
    ('raw', 'rollout', 'norm raw', 'norm rollout')
    """
    listed = tuple(methods)
    return tuple(name_result(edge_name, method) for edge_name in edges for method in listed)


def plan_job(
    model: Model, options: CorpusOptions, job: Job, references: "References"
) -> tuple[CorpusJob, Job]:
    """The job that these options mean for a model, tried on two tokens before anything is read."""
    check_model(model, job)
    job.check_target(model)
    trial = model.encode([0] * (max(job.without, default=0) + 2))
    check_kept(model, trial, job)
    first = choose_first(model) if job.first is None and wants_first(options, job) else job.first
    try:
        graphs, heads = try_edges(model, replace(job, first=first), trial)
        job = replace(job, first=first)
    except (CaptureError, OptionError) as error:
        if first is None:
            raise
        give_notice(describe_missing_edges(first[0], error), CorpusWarning, stacklevel=4)
        graphs, heads = try_edges(model, job, trial)
    layers = try_methods(job, graphs, options.layers)
    try_importance(model, job)
    keep = (
        [options.keep] if isinstance(options.keep, str) else list(check_list(options.keep, "keep"))
    )
    if not all(isinstance(name, str) for name in keep):
        raise OptionError(f"keep must be names of columns; got {keep!r}")
    stored = StoredJob(
        methods=tuple(job.named_methods),
        layers=layers,
        position=job.position,
        normalize=job.normalize,
        importance=tuple(job.importance or ()),
        batch_tokens=options.batch_tokens or model.batch_tokens,
        residual=find_mixed_residual(job),
        without=job.without,
        graph=references.graph,
        functions=references.functions,
        keep=tuple(dict.fromkeys(keep)),
        edges=tuple(job.edges or ()),
        own_edges=references.edges,
        segments=job.segments,
        columns=ColumnNames(
            text=options.text_column, id=options.id_column, label=options.label_column
        ),
        limit=options.limit,
        foil=record_foil(job.foil),
        first=None if job.first is None else name_result(*job.first),
    )
    stored.check_columns()
    depth = next(iter(graphs.values())).depth
    weights = job.plan(model).weights
    watched = bool(job.importance) or any(edge.rules for edge in weights.values())
    return CorpusJob(stored, depth, heads, watched), replace(job, layers=layers)


class References(NamedTuple):
    """Where user-defined functions are imported from, by name."""

    functions: dict[str, str]  # methods and importances
    edges: dict[str, str]
    graph: str | None


def read_job(options: CorpusOptions, importable: bool = False) -> tuple[Job, References]:
    """The job that these options mean for any model, with the references of its functions.

    importable: whether workers must be able to import user-defined functions.
    """
    default = tuple(METHODS) if options.segments is None else (SHARES_METHOD,)
    methods, method_references = import_choices(
        default if options.methods is None else options.methods, "method"
    )
    importance, importance_references = import_choices(options.importance, "importance")
    edges, edge_references = choose_edges(
        "attention" if options.edges is None else options.edges, importable
    )
    graph = options.graph
    job = Job.read(
        methods=methods,
        importance=importance,
        edges=edges,
        position=options.position,
        foil=options.foil,
        normalize=options.normalize,
        # that of a resumed folder stays unused where edges hold the residual inside
        residual=options.residual if mixes_residual(edges) else None,
        without=options.without,
        graph=import_function(graph, "graph") if isinstance(graph, str) else graph,
        segments=options.segments,
    )
    if not methods:
        raise OptionError(f"at least one method is needed; choose from {', '.join(METHODS)}")
    if isinstance(job.position, int) and job.position < 0:
        raise OptionError(
            f"unknown position {job.position}; choose from {', '.join(POSITIONS)}, or a position"
            " from 0 on"
        )
    if min(job.without, default=0) < 0:
        raise OptionError(f"without must be positions from 0 on; got {min(job.without)}")
    if options.batch_tokens is not None:
        check_count("batch_tokens", options.batch_tokens)
    functions = name_functions(
        job.named_methods, METHODS, method_references, "method", importable
    ) | name_functions(
        job.importance or {}, IMPORTANCES, importance_references, "importance", importable
    )
    place = None if graph is None else name_graph(graph, importable)
    return job, References(functions, edge_references, place)


def wants_first(options: CorpusOptions, job: Job) -> bool:
    """Whether the default method of a model comes first."""
    if options.first is not None:
        return options.first
    named = options.methods is not None or options.edges is not None or options.segments is not None
    return not named and replace(job, methods=None, edges=None).has_default_methods


def mixes_residual(edges: Mapping[str, EdgeWeight]) -> bool:
    """Whether a residual is mixed into any of these edges."""
    return any(weight.residual == "mixed" for weight in edges.values())


def find_mixed_residual(job: Job) -> float | None:
    """The residual that is mixed in; None if none is, or by a user-defined graph."""
    if job.graph is not None or not mixes_residual(job.edges or {}):
        return None
    return RESIDUAL if job.residual is None else job.residual


# ---- checks, and the trial -----------------------------------------------------------------------


def check_model(model: Model, job: Job) -> None:
    """Refuse a model that reads no texts, or importance of one that has none."""
    if model.is_vision or model.tokenizer is None:
        raise OptionError(
            f"a corpus needs a model that reads texts, with its tokenizer; got {model.name}"
        )
    bare = model.is_encoder_decoder or model.task in ("encoder", "encoder-decoder")
    if job.importance and bare:
        raise OptionError(
            "importance is for models that read one sequence of tokens and predict;"
            f" got {model.name}, {model.task}"
        )


def check_kept(model: Model, trial: Encoded, job: Job) -> None:
    """Refuse to take out the position that is explained."""
    explained: str | int = job.position
    if explained == "focal":
        with suppress(OptionError):  # of a masked LM, whose texts alone have masks
            explained = model.focal(trial)
    if explained in job.without:
        raise OptionError(
            f"without must leave the position that is explained, {explained} here; got"
            f" {list(job.without)}: give another position, or 'max' or 'mean'"
        )


def refuse_unknown_layers(layers: LayerChoice, job: StoredJob) -> None:
    """Refuse layers of a result that is not computed."""
    for name in layers if isinstance(layers, Mapping) else ():
        if name not in job.results:
            raise OptionError(
                f"layers must be those of methods that are computed, {', '.join(job.results)};"
                f" got {name!r}"
            )


def try_edges(model: Model, job: Job, trial: Encoded) -> tuple[dict[str, AttentionGraph], int]:
    """The graph of each kind of edges of an input, unless the model cannot give them.

    And how many heads were kept.
    """
    weights = job.plan(model).weights
    # the last position: without a mask, a masked LM has no focal one
    gradients = compute_gradients(model, [trial], watch_edges(model, weights), position=-1)
    passed, (made,) = run_edges(
        model, [trial], weights, job.kept_heads, gradients, residual=job.residual
    )
    graphs = {
        name: made[name] if name in made else job.make_graph(passed.attentions[0])
        for name in weights
    }
    return graphs, passed.attentions[0].heads


def try_methods(
    job: Job, graphs: Mapping[str, AttentionGraph], layers: LayerChoice
) -> dict[str, tuple[int, ...]]:
    """The layers that each method gives on each kind of edges of an input."""
    stored = {}
    for choice in Plan.make(job.named_methods, job.edges or {}, job.first).choices:
        graph = graphs[choice.edges]
        wanted = layers.get(choice.name) if isinstance(layers, Mapping) else layers
        asked = None if wanted is None else check_integers(wanted, "layers")
        with ignore_notices():
            result = run_method(
                choice.name,
                choice.compute,
                graph,
                layers=asked,
                positions=[graph.kept[-1]],
                normalize=job.normalize,
            )
        stored[choice.name] = tuple(result.layers)
    return stored


def try_importance(model: Model, job: Job) -> None:
    """Call every user-defined importance once, so that its errors are raised before the run."""
    own = job.own_importance
    if not own:
        return
    trial = replace(
        job,
        methods={},
        edges=read_edges("attention"),
        importance=own,
        position="focal",
        foil=None if job.foil is None else RUNNER_UP,  # which differs from every prediction
        graph=None,
        without=(),
        residual=None,
    )
    stage = ""
    try:
        for event in run(model, [Case(TRIAL_TEXT, model.encode(TRIAL_TEXT))], trial):
            stage = event.name if isinstance(event, StageStarted) else stage
    except AttnFlowError:
        if stage in own:
            raise
        # a masked LM wants a mask, a tokenizer other words: rows will tell
