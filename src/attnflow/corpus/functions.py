"""User-defined functions: given by name, as an object, or as `package.module:function`."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attnflow.analysis.job import GraphMaker
from attnflow.core.choices import Choices, check_name, import_function, name_function, refer_to
from attnflow.edges.edge_weight import EDGES, EdgeWeight, read_edges
from attnflow.errors import OptionError


def import_choices(
    chosen: Choices, what: str
) -> tuple[dict[str, Callable[..., Any] | None], dict[str, str]]:
    """Choices in which `package.module:function` is imported; and those references, by name.

    A string may also be `name=package.module:function`.

    >>> import_choices(["raw", "mine=attnflow.core.methods:rollout"], "method")[1]
    {'mine': 'attnflow.core.methods:rollout'}
    """
    if isinstance(chosen, str) or callable(chosen):
        chosen = [chosen]
    if not isinstance(chosen, Iterable):
        raise OptionError(f"{what}s must be names, or {{name: function}}; got {chosen!r}")
    pairs: Iterable[tuple[str | None, Any]] = (
        chosen.items() if isinstance(chosen, Mapping) else [(None, choice) for choice in chosen]
    )
    functions: dict[str, Callable[..., Any] | None] = {}
    references = {}
    for name, choice in pairs:
        function = choice
        if isinstance(choice, str) and ":" in choice:
            alias, _, reference = choice.rpartition("=") if name is None else (name, "", choice)
            function = import_function(reference, what)
            name = alias or name_choice(function, what, reference)
            references[name] = refer_to_own(function) or reference
        elif name is None and isinstance(choice, str):
            name, function = choice, None
        elif name is None:
            name = name_choice(choice, what)
        if name in functions:
            raise OptionError(f"each {what} must have a name of its own; got {name!r} twice")
        functions[name] = function
    return functions, references


def choose_edges(chosen: Choices, importable: bool) -> tuple[dict[str, EdgeWeight], dict[str, str]]:
    """Edge weights by name, and the references of those that are not attnflow's own."""
    edges, references = import_choices(chosen, "edge weight")
    weights = read_edges(edges)
    for name in weights:
        check_name(name, "edge weight")
    own = {name: item for name, item in edges.items() if callable(item)}
    return weights, name_functions(own, EDGES, references, "edge weight", importable)


def name_choice(function: object, what: str, reference: str = "") -> str:
    """The name of a choice that was given without one: an edge weight's, or its reference's."""
    if isinstance(function, EdgeWeight):
        return function.name
    return reference.rpartition(":")[2].rpartition(".")[2] or name_function(function, what)


def refer_to_own(function: Callable[..., object] | EdgeWeight) -> str | None:
    """`package.module:name` of a function, or of an edge weight; None if it cannot be imported.

    An edge weight is looked up in the module of its function.
    """
    if not isinstance(function, EdgeWeight):
        return refer_to(function)
    module = getattr(function.compute, "__module__", None)
    if module is None or module == "__main__" or module not in sys.modules:
        return None
    named = vars(sys.modules[module]).items()
    return next((f"{module}:{name}" for name, value in named if value is function), None)


def name_functions(
    functions: Mapping[str, Callable[..., object]],
    known: Mapping[str, object],
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
    """The reference of a user-defined function that makes graphs."""
    if isinstance(graph, str):
        return refer_to(import_function(graph, "graph")) or graph
    return name_own(graph, "the function that makes graphs", importable)


def name_own(function: Callable[..., object] | EdgeWeight, what: str, importable: bool) -> str:
    """`package.module:function`; the bare name if it cannot be imported and need not be."""
    reference = refer_to_own(function)
    if reference is not None:
        return reference
    function = function.compute if isinstance(function, EdgeWeight) else function
    name = str(getattr(function, "__qualname__", type(function).__name__))
    if importable:
        raise OptionError(
            f"each worker imports {what}, and {name} cannot be imported (a lambda, a local function"
            " or one of __main__): give it as 'package.module:function'; or workers=1,"
            " engine='local'"
        )
    return name
