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
    score_importance,
)
from attnflow.capturing.assembly import capture
from attnflow.core.attention import Attention
from attnflow.core.checks import check_count, check_integers
from attnflow.core.custom import (
    Choices,
    Method,
    import_function,
    name_function,
    read_methods,
    refer_to,
    run_method,
)
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.core.methods import METHODS
from attnflow.corpus.shard_tables import result_schema
from attnflow.errors import AttnFlowError, OptionError
from attnflow.models.model import Model
from attnflow.notices import collect_notices

if TYPE_CHECKING:
    import pyarrow

TRIAL_TEXT = "a b"  # what an importance of the user's is tried on
LayerChoice = Iterable[int] | int | Mapping[str, Iterable[int] | int] | None


@dataclass(frozen=True)
class Job:
    """What is computed of every text; it can be pickled, and the manifest records it."""

    methods: tuple[str, ...]
    layers: dict[str, tuple[int, ...]]  # that are stored, by method
    position: str | int  # "focal", "max" or "mean" over all positions, or a position
    normalize: str | None
    importance: tuple[str, ...]
    batch_tokens: int
    residual: float | None = RESIDUAL  # None: the graph is made by a function of the user's
    without: tuple[int, ...] = ()  # positions that are taken out of every graph
    graph: str | None = None  # the reference of the function that makes graphs
    functions: dict[str, str] = field(default_factory=dict)  # references of the user's own
    keep: tuple[str, ...] = ()  # columns of the input that are stored with the results
    depth: int = 1  # of the model's graphs; no option, but what a row needs depends on it

    @property
    def schema(self) -> "pyarrow.Schema":
        """The columns of its shards."""
        removed = bool(self.without) or self.graph is not None
        return result_schema(self.methods, self.importance, self.keep, removed=removed)


@dataclass(frozen=True, eq=False)
class Functions:
    """The functions that a job names, ready to be called."""

    methods: dict[str, Method]
    importance: dict[str, ImportanceFunction]
    make_graph: GraphMaker


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
    residual: float | None = None,
    without: Iterable[int] | int = (),
    graph: GraphMaker | str | None = None,
    keep: str | Iterable[str] = (),
    importable: bool = False,
) -> tuple[Job, Functions]:
    """The job that these options mean for a model, tried on two tokens before anything is read.

    layers: the same for every method, or by method. importable: whether workers must be able to
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
    refuse_unknown_position(position)
    if batch_tokens is not None:
        check_count("batch_tokens", batch_tokens)
    check_model(model, used_importance)
    gone = tuple(dict.fromkeys(check_integers(without, "without")))
    if any(place < 0 for place in gone):
        raise OptionError(f"without must be positions from 0 on; got {min(gone)}")
    own_graph = import_function(graph, "graph") if isinstance(graph, str) else graph
    used = Functions(used_methods, used_importance, read_graph_maker(own_graph, residual, gone))
    asked = layers if isinstance(layers, Mapping) else dict.fromkeys(used_methods, layers)
    trial = capture(model, [0] * (max(gone, default=0) + 2))
    check_kept(model, trial, position, gone)
    stored, depth = try_methods(used, trial, asked, normalize)
    try_importance(model, used_importance)
    job = Job(
        methods=tuple(used_methods),
        layers=stored,
        position=position,
        normalize=normalize,
        importance=tuple(used_importance),
        batch_tokens=batch_tokens or model.batch_tokens,
        residual=(RESIDUAL if residual is None else float(residual)) if graph is None else None,
        without=gone,
        graph=None if graph is None else name_graph(graph, importable),
        functions=functions,
        keep=tuple(dict.fromkeys([keep] if isinstance(keep, str) else keep)),
        depth=depth,
    )
    refuse_repeated_columns(job)
    return job, used


# ---- functions of the user's own -----------------------------------------------------------------


def import_choices(chosen: Any, what: str) -> tuple[Choices, dict[str, str]]:
    """Choices in which `package.module:function` is imported; and those references, by name.

    A string may also be `name=package.module:function`.

    >>> import_choices(["raw", "mine=attnflow.core.methods:rollout"], "method")[1]
    {'mine': 'attnflow.core.methods:rollout'}
    """
    if isinstance(chosen, str) or callable(chosen):
        chosen = [chosen]
    if not isinstance(chosen, Iterable):
        raise OptionError(f"{what}s must be names, or {{name: function}}; got {chosen!r}")
    pairs: Iterable[tuple[Any, Any]] = (
        chosen.items() if isinstance(chosen, Mapping) else [(None, choice) for choice in chosen]
    )
    functions: dict[str, Any] = {}
    references = {}
    for name, choice in pairs:
        function = choice
        if isinstance(choice, str) and ":" in choice:
            alias, _, reference = choice.rpartition("=") if name is None else (name, "", choice)
            function = import_function(reference, what)
            name = alias or reference.rpartition(":")[2].rpartition(".")[2]
            references[name] = refer_to(function) or reference
        elif name is None and isinstance(choice, str):
            name, function = choice, None
        elif name is None:
            name = name_function(choice, what)
        if name in functions:
            raise OptionError(f"each {what} must have a name of its own; got {name!r} twice")
        functions[name] = function
    return functions, references


def name_functions(
    functions: Mapping[str, Callable[..., Any]],
    known: Mapping[str, Any],
    references: Mapping[str, str],
    what: str,
    importable: bool,
) -> dict[str, str]:
    """The references of those functions that are not attnflow's own, by name."""
    return {
        name: references.get(name) or name_own(function, f"the {what} {name!r}", importable)
        for name, function in functions.items()
        if function is not known.get(name)
    }


def name_graph(graph: GraphMaker | str, importable: bool) -> str:
    """The reference of the user's function that makes graphs."""
    if isinstance(graph, str):
        return refer_to(import_function(graph, "graph")) or graph
    return name_own(graph, "the function that makes graphs", importable)


def name_own(function: Callable[..., Any], what: str, importable: bool) -> str:
    """`package.module:function`; its bare name if nobody can import it, and nobody must."""
    reference = refer_to(function)
    if reference is not None:
        return reference
    name = str(getattr(function, "__qualname__", type(function).__name__))
    if importable:
        raise OptionError(
            f"each worker imports {what}, and {name} cannot be imported (a lambda, a local function"
            " or one of __main__): give it as 'package.module:function'; or workers=1,"
            " engine='local'"
        )
    return name


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


def check_kept(
    model: Model, trial: Attention, position: str | int, without: tuple[int, ...]
) -> None:
    """Refuse to take out the position that is explained."""
    explained = position
    if position == "focal":
        with suppress(OptionError):  # of a masked LM, whose texts alone have masks
            explained = model.focal(model.encode([0] * trial.size))
    if explained in without:
        raise OptionError(
            f"without must leave the position that is explained, {explained} here; got"
            f" {list(without)}: give another position, or 'max' or 'mean'"
        )


def refuse_repeated_columns(job: Job) -> None:
    """Refuse two columns of one name."""
    names = job.schema.names
    listed = [*result_schema((), (), removed="removed" in names).names, *job.methods]
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


def try_methods(
    functions: Functions, trial: Attention, layers: Mapping[str, Any], normalize: str | None
) -> tuple[dict[str, tuple[int, ...]], int]:
    """The layers that each method gives of an input, and the depth of its graph."""
    graph: AttentionGraph = functions.make_graph(trial)
    stored = {}
    for name, method in functions.methods.items():
        wanted = layers.get(name)
        if wanted is not None:
            wanted = check_integers([wanted] if isinstance(wanted, int) else wanted, "layers")
        with collect_notices():
            result = run_method(
                name, method, graph, layers=wanted, positions=[graph.kept[-1]], normalize=normalize
            )
        stored[name] = tuple(result.layers)
    return stored, graph.depth


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
