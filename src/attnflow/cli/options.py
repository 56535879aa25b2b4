"""The options that several commands share, each defined and read in one place."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypedDict, cast, get_type_hints

import typer

from attnflow.analysis.exclude import ASIDES, EXCLUSIONS
from attnflow.analysis.faithfulness.metrics import METRICS
from attnflow.analysis.job import GraphMaker
from attnflow.core.choices import import_function, name_option
from attnflow.core.comparison import REFERENCES
from attnflow.core.request import NORMALIZATIONS
from attnflow.edges.edge_weight import EDGES, EdgeWeight
from attnflow.errors import OptionError
from attnflow.models.predict import RUNNER_UP, Foil

OWN = "package.module:function"
LEFT_OUT = ",".join(ASIDES)

Function = Callable[..., Any]
Functions = dict[str, Function | None]  # None: the built-in one of that name

# ---- the options --------------------------------------------------------------------------------

AnyModel = Annotated[
    str,
    typer.Option(help="A folder with a model, a hub id, or the model that ships with attnflow."),
]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder with a model, or a hub id.")
]
LayerOption = Annotated[
    int | None, typer.Option(help="Explain this layer's output; the top one by default.")
]
PositionOption = Annotated[
    int | None, typer.Option(help="Explain this position; by default 0, or the last if causal.")
]
LayersOption = Annotated[str | None, typer.Option(help="Which layers, like 1,6; all by default.")]
SomeMethods = Annotated[
    str | None,
    typer.Option(
        help=f"Which methods, separated by commas; your own as {OWN} or name={OWN}. By default raw,"
        " rollout and flow on attention, after rollout or flow on the edges that were measured to"
        " be best for this kind of model."
    ),
]
Edges = Annotated[
    str | None,
    typer.Option(
        help=f"What an edge weighs, separated by commas: {', '.join(EDGES)}; your own as {OWN}."
    ),
]
SomeImportances = Annotated[
    str | None,
    typer.Option(
        help=f"Which importances, separated by commas; your own as {OWN}. By default blank_out and"
        " input_gradient, with --truth also relevance."
    ),
]
Faithfulness = Annotated[
    str,
    typer.Option(
        metavar="METRIC,METRIC",
        help="Metrics of faithfulness beside the correlations: comprehensiveness, sufficiency,"
        " deletion, insertion, log_odds, comprehensiveness@20, normalised_comprehensiveness, ...;"
        f" your own as {OWN}.",
    ),
]
Replacements = Annotated[
    str,
    typer.Option(
        "--replacement",
        metavar="NAME,NAME",
        help="What replaces tokens that are taken away: unknown, mask, removal, attention, or a"
        " token; several are compared.",
        show_default="as blank-out chooses",
    ),
]
TargetOf = Annotated[
    str | None,
    typer.Option(
        help="What faithfulness watches: probability, log_probability or logit.",
        show_default="probability; with a foil logit",
    ),
]
Best = Annotated[
    bool,
    typer.Option(
        "--best",
        help="With --faithfulness: search the best order of each text as well, which takes long.",
    ),
]
FoilOption = Annotated[
    str | None,
    typer.Option(
        metavar="CLASS",
        help="The class, or token, that the target is contrasted with: gradients and importance"
        " watch the difference of their logits.",
    ),
]
RunnerUpOption = Annotated[
    bool, typer.Option("--runner-up", help="The most probable other class is the foil.")
]
Statistic = Annotated[
    str, typer.Option(help="The rank correlation: spearman, kendall, or dense (ranks).")
]
Undefined = Annotated[
    str, typer.Option(help="What undefined correlations do: drop out, or count as zero.")
]
PositionChoice = Annotated[
    str,
    typer.Option(
        "--position",
        "--query",
        help="focal, max or mean over positions, or the number of a position.",
    ),
]
Heads = Annotated[
    str, typer.Option(help="How to fuse heads: mean, max, min, or one head's number.")
]
Residual = Annotated[
    float | None,
    typer.Option(
        help="Weight of the residual connection, from 0 up to but not including 1.",
        show_default="0.5",
    ),
]
Without = Annotated[
    str,
    typer.Option(metavar="POSITIONS", help="Positions to take out first, for instance 0 or 0,7."),
]
Exclude = Annotated[
    str,
    typer.Option(
        metavar="WORD,POSITION",
        help="Tokens that do not count, separated by commas: sinks, special (tokens),"
        " explained (the position), positions like 0,7; or none.",
    ),
]
ComparedWith = Annotated[
    str | None,
    typer.Option(
        metavar="even|others|none",
        help="Show which shares exceed those of even attention, or those of the other positions.",
    ),
]
GraphOption = Annotated[
    str | None,
    typer.Option(
        metavar="FUNCTION", help=f"Your own function from Attention to AttentionGraph, as {OWN}."
    ),
]
Normalize = Annotated[str, typer.Option(help="sum (rows sum to 1), receptive_field, or none.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The maximum number of examples.")]
Seed = Annotated[int, typer.Option(min=0, help="The seed of everything that is drawn at random.")]
SpecialTokens = Annotated[
    bool, typer.Option("--special-tokens", help="Rank CLS, SEP and the like too.")
]
Truncation = Annotated[
    bool, typer.Option("--truncation", help="Truncate texts that are longer than the model takes.")
]


# ---- options that belong together ----------------------------------------------------------------


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: each parameter that is a dataclass becomes its fields.

    >>> @expand_options
    ... def show(layer: int, *, graph: GraphFlags) -> None:
    ...     print(layer, graph.without)
    >>> list(signature(show).parameters)
    ['layer', 'residual', 'without', 'graph']
    >>> show(layer=1, residual=None, without="0,7", graph=None)
    1 0,7
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += map(describe_field, fields(groups[name]))
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def call(**given: object) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def describe_field(field: "Field[Any]") -> Parameter:
    """The parameter of a function for a field of a dataclass."""
    default = Parameter.empty if field.default is MISSING else field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field.type)


class GraphArguments(TypedDict):
    """The arguments that make an attention graph."""

    residual: float | None
    without: list[int]
    graph: GraphMaker | None


@dataclass(frozen=True)
class GraphFlags:
    """How attention becomes a graph."""

    residual: Residual = None
    without: Without = ""
    graph: GraphOption = None

    def read(self) -> GraphArguments:
        """The arguments of functions that make graphs."""
        make = None if self.graph is None else cast(GraphMaker, import_own(self.graph, "graph"))
        without = read_numbers(self.without, "--without")
        return {"residual": self.residual, "without": without, "graph": make}


@dataclass(frozen=True)
class FoilFlags:
    """What the target is contrasted with."""

    foil: FoilOption = None
    runner_up: RunnerUpOption = False

    def read(self) -> Foil | None:
        """The foil: a class by name, or the most probable other one."""
        if self.foil is not None and self.runner_up:
            raise OptionError(
                f"one foil contrasts with the target; got --foil {self.foil} and --runner-up: give"
                " one"
            )
        return RUNNER_UP if self.runner_up else self.foil


class ScoringArguments(TypedDict):
    """The arguments of `evaluate` and `evaluate_corpus` that say how methods are scored."""

    special_tokens: bool
    limit: int | None
    faithfulness: Functions
    replacement: str | list[str] | None
    target_of: str | None
    best: bool
    statistic: str
    undefined: str


@dataclass(frozen=True)
class ScoringFlags:
    """How methods are scored: by rank correlation, and by the faithfulness of their ranks."""

    special_tokens: SpecialTokens = False
    limit: Limit = None
    faithfulness: Faithfulness = ""
    replacement: Replacements = ""
    target_of: TargetOf = None
    best: Best = False
    statistic: Statistic = "spearman"
    undefined: Undefined = "drop"

    def read(self) -> ScoringArguments:
        """The arguments of `evaluate` and `evaluate_corpus`."""
        names = split_names(self.replacement)
        return {
            "special_tokens": self.special_tokens,
            "limit": self.limit,
            "faithfulness": read_functions(self.faithfulness, METRICS, "metric"),
            "replacement": names[0] if len(names) == 1 else names or None,
            "target_of": self.target_of,
            "best": self.best,
            "statistic": self.statistic,
            "undefined": self.undefined,
        }


@dataclass(frozen=True)
class ViewFlags:
    """Which tokens the terminal shades, and what their shares are compared with."""

    compared_with: ComparedWith = None
    exclude: Exclude = LEFT_OUT

    def read_exclude(self) -> list[str | int]:
        """Positions, and words for some of them."""
        chosen = [read_name_or_number(part, "--exclude") for part in split_names(self.exclude)]
        for each in chosen:
            if isinstance(each, str) and each not in EXCLUSIONS:
                known = ", ".join((*EXCLUSIONS, "positions like 0,7"))
                raise OptionError(f"unknown --exclude {each!r}; choose from {known}")
        return chosen

    def read_reference(self, default: str | None) -> str | None:
        """What shares are compared with: "even", "others", or None; the default if not given."""
        if self.compared_with is None:
            return default
        if self.compared_with not in (*REFERENCES, "none"):
            raise OptionError(
                f"--compared-with must be {', '.join(REFERENCES)} or none;"
                f" got {self.compared_with!r}"
            )
        return None if self.compared_with == "none" else self.compared_with


# ---- how they are read ---------------------------------------------------------------------------


def split_names(text: str) -> list[str]:
    """Names separated by commas or spaces."""
    return text.replace(",", " ").split()


def split_columns(text: str) -> list[str]:
    """Names separated by commas; a name may contain spaces."""
    return [name.strip() for name in text.split(",") if name.strip()]


def read_functions(text: str, known: Mapping[str, object], what: str) -> Functions:
    """Functions by name: built-in (None), or user-defined and imported."""
    chosen: Functions = {}
    for part in split_names(text):
        name, _, reference = part.rpartition("=")
        function = import_own(reference, what) if ":" in reference else None
        own_name = function.name if isinstance(function, EdgeWeight) else None
        name = name or own_name or reference.rpartition(":")[2]
        if name in chosen:
            raise OptionError(f"each {what} must have a name of its own; got {name!r} twice")
        if function is None:
            check_known_name(name, known, what, f", or give a function as {OWN}")
        chosen[name] = function
    return chosen


def read_named(text: str | None, known: Mapping[str, object], what: str) -> Functions | None:
    """Functions by name: built-in (None), or user-defined; None if not given."""
    return None if text is None else read_functions(text, known, what)


def read_edge_names(text: str | None) -> Functions | None:
    """Kinds of edges by name: built-in (None), or user-defined; None if not given."""
    return read_named(text, EDGES, "edge weight")


def check_known_name(
    name: str, known: Mapping[str, object], what: str, otherwise: str = ""
) -> None:
    """Refuse an unknown name. otherwise: the alternative to a name, for the message."""
    try:
        known[name]
    except KeyError:  # not `in`: METRICS has more names than it lists
        more = ", comprehensiveness@20 and the like" if known is METRICS else ""
        raise OptionError(
            f"unknown {what} {name!r}; choose from {', '.join(known)}{more}{otherwise}",
            options=[name_option(what)],
        ) from None


def import_own(reference: str, what: str) -> Function:
    """A user-defined function of an installed package or of the current folder."""
    search_current_folder()
    return import_function(reference, what)


def search_current_folder() -> None:
    """Make modules of the current folder importable, after all others."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def read_input(text: str) -> str:
    """The text as typed; for "-" all of standard input, without the end of its last line."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input must be UTF-8; got {error.reason}") from error


def read_number(text: str, option: str) -> int:
    """A whole number of at most 18 digits, which Python always reads."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        cut = f"{text[:20]!r} and {len(text) - 20:,} more characters"
        got = repr(text) if len(text) <= 40 else cut
        raise OptionError(f"{option} must be numbers like 1,6; got {got}")
    return int(text)


def read_numbers(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas or spaces, like 0,7."""
    return [read_number(part, option) for part in split_names(text)]


def read_name_or_number(text: str, option: str) -> str | int:
    """A whole number if the text looks like one, else the text, a name."""
    return read_number(text, option) if text.removeprefix("-").isdecimal() else text


def parse_layers(text: str | None) -> list[int] | None:
    """Layers from a list like 1,6; None if it is empty."""
    return read_numbers(text or "", "--layers") or None


def read_normalize(text: str) -> str | None:
    """The `normalize` of a method."""
    chosen = None if text.lower() == "none" else text
    if chosen not in NORMALIZATIONS:
        known = ", ".join("none" if name is None else name for name in NORMALIZATIONS)
        raise OptionError(f"unknown --normalize {text!r}; choose from {known}")
    return chosen


def read_pair(text: str, option: str) -> tuple[str, str]:
    """Two words with a comma between them."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(words):
        raise OptionError(f"{option} must be two words with a comma between them; got {text!r}")
    return words[0], words[1]
