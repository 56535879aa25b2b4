"""What is computed of every text: a `Job`, which travels to workers, and its functions."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnflow.analysis.importance import IMPORTANCES
from attnflow.analysis.pipeline import (
    QUERIES,
    GraphMaker,
    ImportanceFunction,
    read_batch,
    read_graph_maker,
    read_importances,
    refuse_graphs,
    score_importance,
)
from attnflow.core.checks import check_count, check_integers
from attnflow.core.custom import (
    Choices,
    Method,
    import_function,
    read_methods,
    run_method,
)
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.core.methods import METHODS
from attnflow.corpus.own_functions import (
    choose_edges,
    import_choices,
    name_functions,
    name_graph,
)
from attnflow.corpus.shard_tables import name_results, result_schema
from attnflow.corpus.shares import check_shares
from attnflow.edges.building import drop_attention, run_edges
from attnflow.edges.choosing import EdgeWeight, name_result, read_edges
from attnflow.errors import AttnFlowError, OptionError
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model
from attnflow.notices import ignore_notices

if TYPE_CHECKING:
    import pyarrow

TRIAL_TEXT = "a b"  # what an importance of the user's is tried on
LayerChoice = Iterable[int] | int | Mapping[str, Iterable[int] | int] | None


@dataclass(frozen=True)
class Job:
    """What is computed of every text; it can be pickled, and the manifest records it."""

    methods: tuple[str, ...]
    layers: dict[str, tuple[int, ...]]  # that are stored, by result
    position: str | int  # "focal", "max" or "mean" over all positions, or a position
    normalize: str | None
    importance: tuple[str, ...]
    batch_tokens: int
    residual: float | None = RESIDUAL  # None: the graph is made by a function of the user's
    without: tuple[int, ...] = ()  # positions that are taken out of every graph
    graph: str | None = None  # the reference of the function that makes graphs
    functions: dict[str, str] = field(default_factory=dict)  # references of the user's own
    keep: tuple[str, ...] = ()  # columns of the input that are stored with the results
    edges: tuple[str, ...] = ("attention",)
    own_edges: dict[str, str] = field(default_factory=dict)  # references of the user's own
    segments: str | None = None  # what scores are of, instead of tokens
    # no options, but what follows from them and the model:
    depth: int = 1  # of the model's graphs, on which depends what a row needs
    heads: int = 1  # that are kept, on which it depends too
    watched: bool = False  # whether labels are targets, of importance or of gradient edges

    @property
    def results(self) -> tuple[str, ...]:
        """The columns of scores: every method on every kind of edges."""
        return name_results(self.edges, self.methods)

    @property
    def schema(self) -> "pyarrow.Schema":
        """The columns of its shards."""
        removed = bool(self.without) or self.graph is not None
        names = self.results, self.importance, self.keep
        return result_schema(*names, removed=removed, segments=self.segments is not None)


@dataclass(frozen=True, eq=False)
class Functions:
    """The functions that a job names, ready to be called."""

    methods: dict[str, Method]
    importance: dict[str, ImportanceFunction]
    make_graph: GraphMaker
    edges: dict[str, EdgeWeight]


def import_functions(job: Job) -> Functions:
    """The functions of a job in a worker, where those of the user's are imported."""

    def find(name: str, known: Mapping[str, Any], what: str) -> Callable[..., Any]:
        own = job.functions.get(name)
        function: Callable[..., Any] = known[name] if own is None else import_function(own, what)
        return function

    own_graph = None if job.graph is None else import_function(job.graph, "graph")
    return Functions(
        {name: find(name, METHODS, "method") for name in job.methods},
        {name: find(name, IMPORTANCES, "importance") for name in job.importance},
        read_graph_maker(own_graph, job.residual, job.without),
        read_edges(
            {
                name: import_function(job.own_edges[name], "edge weight")
                if name in job.own_edges
                else None
                for name in job.edges
            }
        ),
    )


def plan_job(
    model: Model,
    *,
    methods: Choices,
    layers: LayerChoice,
    position: str | int,
    normalize: str | None,
    importance: Choices,
    batch_tokens: int | None,
    edges: Choices = "attention",
    residual: float | None = None,
    without: Iterable[int] | int = (),
    graph: GraphMaker | str | None = None,
    keep: str | Iterable[str] = (),
    segments: str | None = None,
    importable: bool = False,
) -> tuple[Job, Functions]:
    """The job that these options mean for a model, tried on two tokens before anything is read.

    layers: the same for every result, or by result. importable: whether workers must be able to
    import the user's own functions.
    """
    chosen, references = import_choices(methods, "method")
    used_methods = read_methods(chosen)
    if not used_methods:
        raise OptionError(f"at least one method is needed; choose from {', '.join(METHODS)}")
    scored, scored_references = import_choices(importance, "importance")
    used_importance = read_importances(scored)
    functions = name_functions(used_methods, METHODS, references, "method", importable)
    functions |= name_functions(
        used_importance, IMPORTANCES, scored_references, "importance", importable
    )
    weights, own_edges = choose_edges(edges, importable)
    refuse_unknown_position(position)
    if batch_tokens is not None:
        check_count("batch_tokens", batch_tokens)
    check_model(model, used_importance)
    gone = tuple(dict.fromkeys(check_integers(without, "without")))
    if any(place < 0 for place in gone):
        raise OptionError(f"without must be positions from 0 on; got {min(gone)}")
    own_graph = import_function(graph, "graph") if isinstance(graph, str) else graph
    refuse_graphs(weights, own_graph, gone)
    make_graph = read_graph_maker(own_graph, residual, gone)
    used = Functions(used_methods, used_importance, make_graph, weights)
    trial = model.encode([0] * (max(gone, default=0) + 2))
    check_kept(model, trial, position, gone)
    # a function of the user's may fuse heads as it likes, so that it gets all of them
    heads = "mean" if graph is None else None
    graphs, kept_heads = try_edges(model, used, trial, residual, heads)
    stored = try_methods(used, graphs, layers, normalize)
    mixes = any(weight.residual == "mixed" for weight in weights.values())
    try_importance(model, used_importance)
    job = Job(
        methods=tuple(used_methods),
        layers=stored,
        position=position,
        normalize=normalize,
        importance=tuple(used_importance),
        batch_tokens=batch_tokens or model.batch_tokens,
        residual=(
            (RESIDUAL if residual is None else float(residual)) if mixes and graph is None else None
        ),
        without=gone,
        graph=None if graph is None else name_graph(graph, importable),
        functions=functions,
        keep=tuple(dict.fromkeys([keep] if isinstance(keep, str) else keep)),
        edges=tuple(weights),
        own_edges=own_edges,
        segments=segments,
        depth=next(iter(graphs.values())).depth,
        heads=kept_heads,
        watched=bool(used_importance) or any(weight.gradient for weight in weights.values()),
    )
    if segments is not None:
        check_shares(segments, vars(job))
    refuse_repeated_columns(job)
    return job, used


# ---- checks, and the trial -----------------------------------------------------------------------


def refuse_unknown_position(position: Any) -> None:
    """Refuse what is neither the name of a query nor a position."""
    is_position = isinstance(position, int) and not isinstance(position, bool) and position >= 0
    if position not in QUERIES and not is_position:
        raise OptionError(
            f"unknown position {position!r}; choose from {', '.join(QUERIES)},"
            " or a position from 0 on"
        )


def check_model(model: Model, importance: Iterable[str]) -> None:
    """Refuse a model that reads no texts, or has no importance."""
    if model.is_vision or model.tokenizer is None:
        raise OptionError(
            f"a corpus needs a model that reads texts, with its tokenizer; got {model.name}"
        )
    bare = model.is_encoder_decoder or model.task in ("encoder", "encoder-decoder")
    if list(importance) and bare:
        raise OptionError(
            "importance is for models that read one sequence of tokens and predict;"
            f" got {model.name}, {model.task}"
        )


def check_kept(model: Model, trial: Encoded, position: str | int, without: tuple[int, ...]) -> None:
    """Refuse to take out the position that is explained."""
    explained = position
    if position == "focal":
        with suppress(OptionError):  # of a masked LM, whose texts alone have masks
            explained = model.focal(trial)
    if explained in without:
        raise OptionError(
            f"without must leave the position that is explained, {explained} here; got"
            f" {list(without)}: give another position, or 'max' or 'mean'"
        )


def refuse_repeated_columns(job: Job) -> None:
    """Refuse two columns of one name."""
    names = job.schema.names
    facts = result_schema((), (), removed="removed" in names, segments="segments" in names)
    listed = [*facts.names, *job.results]
    for name in job.results:
        if listed.count(name) > 1:
            raise OptionError(
                f"methods and kinds of edges must give columns of different names; got {name!r}"
                " twice: rename a method"
            )
    for name in job.importance:
        if name in listed:
            raise OptionError(
                f"methods and importances must have different names; got {name!r} twice"
            )
    for name in job.keep:
        if name in (*listed, *job.importance):
            raise OptionError(
                f"keep must name columns that the result has not already; got {name!r}:"
                " rename it in the input"
            )


def refuse_unknown_layers(layers: LayerChoice, job: Job) -> None:
    """Refuse layers of a result that is not computed."""
    for name in layers if isinstance(layers, Mapping) else ():
        if name not in job.results:
            raise OptionError(
                f"layers must be those of methods that are computed, {', '.join(job.results)};"
                f" got {name!r}"
            )


def try_edges(
    model: Model,
    functions: Functions,
    trial: Encoded,
    residual: float | None,
    heads: str | None,
) -> tuple[dict[str, AttentionGraph], int]:
    """The graph of each kind of edges of an input, unless the model cannot give them.

    And how many heads were kept. heads: how they are fused; all are kept if None.
    """
    others = drop_attention(functions.edges)
    # a position is named, since a masked LM has none of its own where there is no mask
    run, (made,) = run_edges(model, [trial], others, heads, residual=residual, position=-1)
    graphs = {
        name: made[name] if name in made else functions.make_graph(run.attentions[0])
        for name in functions.edges
    }
    return graphs, run.attentions[0].heads


def try_methods(
    functions: Functions,
    graphs: Mapping[str, AttentionGraph],
    layers: LayerChoice,
    normalize: str | None,
) -> dict[str, tuple[int, ...]]:
    """The layers that each method gives on each kind of edges of an input."""
    stored = {}
    for edge_name, graph in graphs.items():
        for method_name, method in functions.methods.items():
            name = name_result(edge_name, method_name)
            wanted = layers.get(name) if isinstance(layers, Mapping) else layers
            if wanted is not None:
                wanted = check_integers([wanted] if isinstance(wanted, int) else wanted, "layers")
            ask: dict[str, Any] = {"positions": [graph.kept[-1]], "normalize": normalize}
            with ignore_notices():
                result = run_method(name, method, graph, layers=wanted, **ask)
            stored[name] = tuple(result.layers)
    return stored


def try_importance(model: Model, importance: Mapping[str, ImportanceFunction]) -> None:
    """Call every importance of the user's once, so that its mistakes are told before the run."""
    own = {
        name: function
        for name, function in importance.items()
        if function is not IMPORTANCES.get(name)
    }
    if not own:
        return
    try:
        readings = read_batch(model, [model.encode(TRIAL_TEXT)])
    except AttnFlowError:  # a masked LM wants a mask, a tokenizer other words: rows will tell
        return
    for name, function in own.items():
        score_importance(model, readings, name, function, values=[TRIAL_TEXT])
