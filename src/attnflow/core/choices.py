"""Methods by name, or user-defined: made, read, called and checked.

A method is `f(graph, *, layers, positions, bottom, normalize) -> TokenAttention`. It may also take
`groups`, if it knows how to take positions together, and `workers`, the number of threads.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pkgutil import resolve_name
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, Groups
from attnflow.core.methods import METHODS
from attnflow.core.request import Request, Weights, average_sources
from attnflow.core.results import TokenAttention
from attnflow.errors import AttnFlowError, OptionError

AnyFunction = Callable[..., Any]  # user-defined, or found by name
Method = Callable[..., TokenAttention]
T = TypeVar("T")
Choice = TypeVar("Choice", bound=AnyFunction)
Choices = str | AnyFunction | Iterable[Any] | Mapping[str, Any]
METHOD_FORM = "f(graph, *, layers, positions, bottom, normalize) -> TokenAttention"
SELECTING = ("layers", "positions", "bottom")  # options that `token_attention` hands on
# the columns of files and tables of results, whose names methods and importances cannot have
RESERVED_NAMES = """
id row text tokens special words label prediction probability model target position notes source
layers layer token key query value method removed
"""
RESERVED = frozenset(RESERVED_NAMES.split())


def token_attention(name: str, compute: Callable[..., npt.ArrayLike]) -> Method:
    """Make a method from a function that returns an array.

    The method checks its options, normalises rows, sums groups, and names the result. It can be
    used wherever the name of a method can.

    Parameters
    ----------
    name
        Its name in tables, in figures and on the page.
    compute
        Called as `compute(graph)` with an `AttentionGraph`; returns [layer, query, key] for layers
        1..depth and all positions. If it takes `layers`, `positions` or `bottom` by name, they are
        handed on, and only these layers and positions are returned. Without `bottom` the method
        always looks down to layer 0.

    >>> import attnflow as af
    >>> squared = token_attention("squared", lambda graph: graph.weights**2)
    >>> squared(af.Attention([[[0.75, 0.25], [0.5, 0.5]]])).at(position=0)
    array([0.9, 0.1])
    """
    check_name(name, "method")
    if not callable(compute):
        raise OptionError(f"compute must be a function; got {type(compute).__name__}")
    wanted = [option for option in SELECTING if accepts(compute, option)]

    def method(
        graph: Weights,
        *,
        layers: Iterable[int] | int | None = None,
        positions: Iterable[int] | int | None = None,
        bottom: int = 0,
        normalize: str | None = "sum",
        groups: Groups | None = None,
        sources: Groups | None = None,
    ) -> TokenAttention:
        if bottom and "bottom" not in wanted:
            raise OptionError(
                f"{name} looks down to layer 0, so it takes no bottom; got bottom={bottom}"
            )
        ask = Request.read(
            graph, name, layers, positions, bottom, normalize, groups, sources, every_layer=True
        )
        given = {option: getattr(ask, option) for option in wanted}

        def compute_rows(graph: AttentionGraph) -> Floats:
            values = call_own(name, compute, graph, **given)
            rows = check_values(name, values, graph, ask, wanted)
            if "layers" not in wanted:
                rows = rows[np.array(ask.layers) - 1]
            if "positions" not in wanted:
                rows = rows[:, list(ask.positions)]
            return ask.sum_groups(np.array(rows, dtype=np.float64))  # a copy, to be normalised

        return ask.answer(compute_rows)

    method.__name__ = method.__qualname__ = name
    method.__module__ = compute.__module__  # where a worker finds it, if it has this name there
    method.__doc__ = compute.__doc__
    return method


def read_methods(chosen: Choices) -> dict[str, Method]:
    """Methods as {name: function}, from names, functions, or {name: function}.

    In a mapping None stands for the built-in method of that name. Unknown names, functions that
    cannot be called like a method, and duplicate names are refused.

    >>> list(read_methods({"rollout": None, "mine": METHODS["raw"]}))
    ['rollout', 'mine']
    """
    options = dict.fromkeys((*SELECTING, "normalize"))
    return read_choices(chosen, METHODS, "method", METHOD_FORM, (None,), options)


class MethodOptions(TypedDict, total=False):
    """The options of a method; `groups`, `sources` and `workers` are optional ones."""

    layers: Sequence[int] | None
    positions: Sequence[int] | None
    bottom: int
    normalize: str | None
    groups: Groups | None
    sources: Sequence[Group] | None
    workers: int


def run_method(
    name: str, method: Method, graph: AttentionGraph, **options: Unpack[MethodOptions]
) -> TokenAttention:
    """Run a method, check its result against the options, and give it this name.

    `groups` and `workers` are handed on to methods that take them. Of methods that do not name
    `sources` the mean of the rows of each is taken.
    """
    sources = options.get("sources")
    positions = options.get("positions")
    if sources is not None:
        called = find_signature(method)
        if called is None or "sources" not in called.parameters:
            options["sources"] = None
            options["positions"] = [at for source in sources for at in source.positions]
            return gather_sources(run_method(name, method, graph, **options), sources)
        positions = [max(source.positions) for source in sources]
    elif "sources" in options:
        del options["sources"]
    optional = options.keys() & {"groups", "workers"}
    refused = {option for option in optional if not accepts(method, option)}
    taken = {option: given for option, given in options.items() if option not in refused}
    if method in METHODS.values():
        result = method(graph, **taken)
    else:
        result = call_own(name, method, graph, **taken)
        check_result(name, result, graph, options.get("layers"), positions)
    return result if result.method == name else replace(result, method=name)


def gather_sources(result: TokenAttention, sources: Sequence[Group]) -> TokenAttention:
    """A copy whose rows are the means of rows of positions, one source after another."""
    return replace(
        result,
        values=average_sources(result.values, sources),
        positions=tuple(max(source.positions) for source in sources),
        queries=tuple(source.name for source in sources),
        sources=tuple(sources),
        limits=None,
        lost=None,
    )


def accepts(function: AnyFunction, option: str) -> bool:
    """Whether a function takes an option by its name."""
    called = find_signature(function)
    parameters = {} if called is None else called.parameters
    known = parameters.get(option)
    if known is not None:
        return known.kind not in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL)
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())


def find_signature(function: AnyFunction) -> Signature | None:
    """The signature of a function; None for builtins without one."""
    try:
        return signature(function)
    except (TypeError, ValueError):
        return None


def add_article(what: str) -> str:
    """A noun with "a" or "an".

    >>> add_article("method"), add_article("edge weight")
    ('a method', 'an edge weight')
    """
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def import_function(reference: str, what: str) -> AnyFunction:
    """The function that `package.module:function` names.

    >>> import_function("attnflow:rollout", "method").__name__
    'rollout'
    """
    try:
        target: object = resolve_name(reference)
    except Exception as error:  # importing a module runs its code, which may raise anything
        raise OptionError(
            f"a user-defined {what} is named as package.module:function, and {reference!r} cannot"
            f" be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(target):
        raise OptionError(f"{reference!r} must name a function; got {type(target).__name__}")
    return target


def refer_to(function: AnyFunction) -> str | None:
    """`package.module:function` by which another process finds a function; None if it cannot.

    >>> refer_to(METHODS["raw"]), refer_to(lambda graph: graph)
    ('attnflow.core.methods:raw', None)
    """
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__":
        return None
    reference = f"{module}:{path}"
    try:
        return reference if import_function(reference, "method") is function else None
    except OptionError:
        return None


# ---- functions chosen by name, or user-defined ---------------------------------------------------


def read_choices(
    chosen: Choices,
    known: Mapping[str, Choice],
    what: str,
    form: str,
    arguments: tuple[object, ...],
    options: Mapping[str, object],
) -> dict[str, Choice]:
    """Functions by name, known or user-defined, checked.

    form: how such a function is called, for messages. arguments, options: what it must take.
    """
    if isinstance(chosen, str) or callable(chosen):
        chosen = [chosen]
    if not isinstance(chosen, Iterable):
        raise OptionError(
            f"{what}s must be names, or {{name: function}}; got {chosen!r}:"
            f" choose from {', '.join(known)}",
            options=[name_option(what)],
        )
    pairs = (
        chosen.items()
        if isinstance(chosen, Mapping)
        else [
            (item if isinstance(item, str) else name_function(item, what), item) for item in chosen
        ]
    )
    functions: dict[str, Choice] = {}
    for name, function in pairs:
        if function is None or isinstance(function, str):
            if not isinstance(name, str) or name not in known:
                raise OptionError(
                    f"unknown {what} {name!r}; choose from {', '.join(known)},"
                    " or give a function: {name: function}",
                    options=[name_option(what)],
                )
            function = known[name]
        elif function is not known.get(name):
            check_own(name, function, known, what, form, arguments, options)
        if name in functions:
            raise OptionError(
                f"names of {what}s must be unique; got {name!r} twice", options=[name_option(what)]
            )
        functions[name] = function
    return functions


def name_option(what: str) -> str:
    """The option that takes functions of a kind.

    >>> name_option("method"), name_option("importance"), name_option("metric")
    ('methods', 'importance', 'faithfulness')
    """
    return {"method": "methods", "metric": "faithfulness"}.get(what, what)


def check_own(
    name: object,
    function: object,
    known: Mapping[str, AnyFunction],
    what: str,
    form: str,
    arguments: tuple[object, ...],
    options: Mapping[str, object],
) -> None:
    """Refuse a user-defined function whose name is taken, or that cannot be called as `form`."""
    check_name(name, what)
    if name in known or not callable(function):
        raise OptionError(
            f"a user-defined {what} must be a function with a name of its own;"
            f" got {name!r}: {type(function).__name__}"
        )
    called = find_signature(function)
    if called is None:
        return
    try:
        called.bind(*arguments, **options)
    except TypeError as error:
        raise OptionError(
            f"the {what} {name!r} must be called as {form}; its signature is {called}: {error}"
        ) from error


def check_name(name: object, what: str) -> None:
    """Refuse a name that cannot be the column of a table."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise OptionError(
            f"the name of {add_article(what)} must be a string of visible text; got {name!r}"
        )
    if name in RESERVED:
        raise OptionError(
            f"the name of {add_article(what)} must not be that of a column of results; got {name!r}"
        )


def name_function(function: object, what: str) -> str:
    """The `__name__` of a function; functions without one are refused."""
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str) or name == "<lambda>":
        raise OptionError(
            f"{add_article(what)} without a name needs one: give {{name: function}};"
            f" got {function!r}"
        )
    return name


# ---- calls of user-defined functions -------------------------------------------------------------


def call_own(name: str, function: Callable[..., T], *arguments: object, **options: object) -> T:
    """Call a user-defined function; an exception becomes a one-line error with its name."""
    try:
        return function(*arguments, **options)
    except (AttnFlowError, MemoryError):
        raise
    except Exception as error:
        raise OptionError(f"{name} failed: {type(error).__name__}: {error}") from error


def check_values(
    name: str, values: npt.ArrayLike, graph: AttentionGraph, ask: Request, wanted: Iterable[str]
) -> Floats:
    """Check that values [layer, query, key] are finite numbers of the expected shape."""
    expected = (
        len(ask.layers) if "layers" in wanted else graph.depth,
        len(ask.positions) if "positions" in wanted else graph.size,
        graph.size,
    )
    try:
        rows = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{name} must give an array [layer, query, key] of numbers;"
            f" got {type(values).__name__}: {error}"
        ) from error
    if rows.shape != expected:
        raise OptionError(
            f"{name} must give [layer, query, key], here {expected}; got shape {rows.shape}"
        )
    check_finite(name, rows)
    if ask.normalize is not None and (rows < 0).any():
        raise OptionError(
            f"{name} must give no negative number where rows are to sum to 1;"
            f" got {rows.min():.3g}: ask for normalize=None",
            options=["normalize=None"],
        )
    return rows


def check_result(
    name: str,
    result: object,
    graph: AttentionGraph,
    layers: Sequence[int] | None,
    positions: Sequence[int] | None,
) -> None:
    """Refuse a method's result that does not have these layers and positions, if given."""
    if not isinstance(result, TokenAttention):
        raise OptionError(
            f"{name} must return a TokenAttention, as {METHOD_FORM};"
            f" got {type(result).__name__}: af.token_attention(name, function) makes such a method"
        )
    rows = {"layers": (layers, result.layers), "positions": (positions, result.positions)}
    for option, (asked, given) in rows.items():
        if asked is not None and tuple(asked) != tuple(given):
            raise OptionError(
                f"{name} must give the {option} that are asked for, {list(asked)};"
                f" got {list(given)}"
            )
    keys = graph.size if result.groups is None else len(result.groups)
    expected = (len(result.layers), len(result.positions), keys)
    if np.shape(result.values) != expected or len(result.tokens) != keys:
        raise OptionError(
            f"{name} must give values [layer, query, key], here {expected}, and a token per"
            f" key; got shape {np.shape(result.values)} and {len(result.tokens)} tokens"
        )
    check_finite(name, result.values)


def check_finite(name: str, values: Floats) -> None:
    """Refuse values that are not finite."""
    if not np.isfinite(values).all():
        raise OptionError(f"{name} must give finite numbers; some are not")
