"""What several commands share: options, defined once, and how their texts are read."""

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from attnflow.core.comparison import REFERENCES
from attnflow.core.custom import import_function
from attnflow.core.files import check_ending, check_writable
from attnflow.edges.choosing import EdgeWeight
from attnflow.errors import OptionError
from attnflow.show.shading import ASIDES, EXCLUSIONS

OWN = "package.module:function"
LEFT_OUT = ",".join(ASIDES)

AnyModel = Annotated[
    str,
    typer.Option(help="A folder with a model, a hub id, or the model that ships with attnflow."),
]
Layer = Annotated[
    int | None,
    typer.Option(help="Explain this layer's output; the top one by default.", show_default=False),
]
Layers = Annotated[
    str | None,
    typer.Option(help="Which layers, like 1,6; all by default.", show_default=False),
]
Methods = Annotated[
    str,
    typer.Option(help=f"Which methods, separated by commas; your own as {OWN} or name={OWN}."),
]
SomeMethods = Annotated[
    str | None,
    typer.Option(
        help=f"Which methods, separated by commas; your own as {OWN} or name={OWN}. By default raw,"
        " rollout and flow, and first what serves best on edges of another kind.",
        show_default=False,
    ),
]
Edges = Annotated[
    str | None,
    typer.Option(
        help="What an edge weighs, separated by commas: attention, effective, norm, contribution,"
        f" gradient; your own as {OWN}.",
        show_default=False,
    ),
]
Importances = Annotated[
    str, typer.Option(help=f"Which importances, separated by commas; your own as {OWN}.")
]
Faithfulness = Annotated[
    str,
    typer.Option(
        metavar="METRIC,METRIC",
        help="Metrics of faithfulness beside the correlations: comprehensiveness, sufficiency,"
        " deletion, insertion, log_odds, comprehensiveness@20, normalised_comprehensiveness, ...;"
        f" your own as {OWN}.",
        show_default=False,
    ),
]
Replacements = Annotated[
    str,
    typer.Option(
        "--replacement",
        metavar="NAME,NAME",
        help="What is done to tokens that are taken away: unknown, mask, removal, attention, or a"
        " token; several are compared.",
        show_default="as blank-out chooses",
    ),
]
TargetOf = Annotated[
    str,
    typer.Option(help="What faithfulness watches: probability, log_probability or logit."),
]
Statistic = Annotated[
    str, typer.Option(help="The rank correlation: spearman, kendall, or dense (ranks).")
]
Undefined = Annotated[
    str, typer.Option(help="What undefined correlations do: drop out, or count as zero.")
]
Query = Annotated[
    str, typer.Option(help="focal, max or mean over positions, or the number of a position.")
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
    typer.Option(
        metavar="POSITIONS",
        help="Positions to take out first, for instance 0 or 0,7.",
        show_default=False,
    ),
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
        help="Show what exceeds what was to be expected: of even attention, or by the other"
        " positions.",
        show_default=False,
    ),
]
Graph = Annotated[
    str | None,
    typer.Option(
        metavar="FUNCTION",
        help=f"A function of yours from Attention to AttentionGraph, as {OWN}.",
        show_default=False,
    ),
]
Normalize = Annotated[str, typer.Option(help="sum (rows sum to 1), receptive_field, or none.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="The maximum number of examples.", show_default=False)
]
Seed = Annotated[int, typer.Option(min=0, help="The seed of everything that is drawn at random.")]
SpecialTokens = Annotated[
    bool, typer.Option("--special-tokens", help="Rank CLS, SEP and the like too.")
]
Truncation = Annotated[
    bool, typer.Option("--truncation", help="Cut off what is longer than the model takes.")
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="FILE",
        help="Write .csv, .json, .md or .tex as well.",
        show_default=False,
    ),
]


def split_names(text: str) -> list[str]:
    """Names separated by commas or spaces."""
    return text.replace(",", " ").split()


def split_columns(text: str) -> list[str]:
    """Names of columns separated by commas; a name may have spaces."""
    return [name.strip() for name in text.split(",") if name.strip()]


def read_functions(text: str, what: str) -> dict[str, Callable[..., Any] | None]:
    """Methods or importances: names of attnflow's (None), and functions of the user's."""
    chosen: dict[str, Callable[..., Any] | None] = {}
    for part in split_names(text):
        name, _, reference = part.rpartition("=")
        function = import_own(reference, what) if ":" in reference else None
        own_name = function.name if isinstance(function, EdgeWeight) else None
        name = name or own_name or reference.rpartition(":")[2]
        if name in chosen:
            raise OptionError(f"each {what} must have a name of its own; got {name!r} twice")
        chosen[name] = function
    return chosen


def read_input(text: str) -> str:
    """A text as it was typed, or all of standard input for "-", without the last line's end."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input must be UTF-8; got {error.reason}") from error


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse names that are not among attnflow's, where no function can be given."""
    for name in names:
        if name not in known:
            raise OptionError(f"unknown {what} {name!r}; choose from {', '.join(known)}")


def read_edge_names(text: str | None) -> dict[str, Callable[..., Any] | None] | None:
    """Kinds of edges: names of attnflow's (None), and edge weights of the user's; None if none."""
    return None if text is None else read_functions(text, "edge weight")


def import_own(reference: str, what: str) -> Callable[..., Any]:
    """A function of the user's, of an installed package or the current folder."""
    search_current_folder()
    return import_function(reference, what)


def search_current_folder() -> None:
    """Have modules of the current folder found, after all others."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def read_number(text: str, option: str) -> int:
    """A whole number of the command line; Python would refuse to read some thousand digits."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        got = (
            repr(text)
            if len(text) <= 40
            else f"{text[:20]!r} and {len(text) - 20:,} more characters"
        )
        raise OptionError(f"{option} must be numbers like 1,6; got {got}")
    return int(text)


def read_numbers(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas or spaces, like 0,7."""
    return [read_number(part, option) for part in split_names(text)]


def read_exclude(text: str) -> list[str | int]:
    """What --exclude means: positions, and words for some."""
    chosen = [read_name_or_number(part, "--exclude") for part in split_names(text)]
    words = [each for each in chosen if isinstance(each, str)]
    check_names(words, (*EXCLUSIONS, "positions like 0,7"), "--exclude")
    return chosen


def read_reference(text: str | None, default: str | None) -> str | None:
    """What --compared-with means: one of the references, or None."""
    if text is None or text == "none":
        return default if text is None else None
    if text not in REFERENCES:
        raise OptionError(f"--compared-with must be {', '.join(REFERENCES)} or none; got {text!r}")
    return text


def read_name_or_number(text: str, option: str) -> str | int:
    """A whole number, if a text looks like one; else the text, a name that others know."""
    looks = text.removeprefix("-").isdecimal()
    return read_number(text, option) if looks else text


def read_layers(text: str | None) -> list[int] | None:
    """Layers from a list like 1,6; None if there is none."""
    return read_numbers(text or "", "--layers") or None


def read_normalize(text: str) -> str | None:
    """What --normalize means to a method."""
    return None if text.lower() == "none" else text


def read_pair(text: str, option: str) -> tuple[str, str]:
    """Two words with a comma between them."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(words):
        raise OptionError(f"{option} must be two words with a comma between them; got {text!r}")
    return words[0], words[1]


def check_out(out: Path | None, endings: Iterable[str]) -> None:
    """Refuse an output that cannot be written before anything is computed."""
    if out is not None:
        check_ending(out, endings)
        check_writable(out)


def read_replacements(text: str) -> str | list[str] | None:
    """What --replacement means: one, several, or None if it was not given."""
    names = split_names(text)
    return names if len(names) > 1 else next(iter(names), None)
