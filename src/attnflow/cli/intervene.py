"""The command that changes a model or its input and compares predictions: intervene."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from attnflow.analysis.intervene.change import Change, Edge
from attnflow.analysis.intervene.flow_to import flow_to
from attnflow.analysis.intervene.intervene import intervene
from attnflow.cli.options import (
    AnyModel,
    FoilFlags,
    check_known_name,
    expand_options,
    import_own,
    read_input,
    read_name_or_number,
    read_numbers,
    split_names,
)
from attnflow.cli.output import PageOutput, file_option
from attnflow.core.flow.max_flow import MaxFlow
from attnflow.core.io.files import PICTURES
from attnflow.core.io.tables import TABLE_ENDINGS
from attnflow.edges.edge_weight import EDGES
from attnflow.errors import OptionError
from attnflow.models.load import BUNDLED, load
from attnflow.show.terminal.tables import print_markdown

Passages = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PASSAGE",
        help="Blank out a passage that stands in the text once, or a position, or a span like 3:5;"
        " may be given several times.",
    ),
]


@dataclass(frozen=True)
class ChangeFlags:
    """What is changed."""

    blank: Passages = None
    cut: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER,QUERY,KEY[,HEAD]",
            help="Cut an edge of attention; may be given several times.",
        ),
    ] = None
    cut_flow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PASSAGE",
            help="Cut the minimum cut of the maximum flow to this passage, position or span; may be"
            " given several times.",
        ),
    ] = None
    edges: Annotated[
        str,
        typer.Option(help="The edges of that flow, one kind, like contribution or relevance."),
    ] = "attention"
    heads_off: Annotated[
        str,
        typer.Option(metavar="LAYER.HEAD,...", help="Switch heads off, for instance 4.2,5.0."),
    ] = ""

    def read(self) -> tuple[Change, list[Change]]:
        """The change without flows, and the passages that flows lead to; checked by their form."""
        if ":" not in self.edges:
            check_known_name(self.edges, EDGES, "edge weight")
        cut: list[Edge] = [tuple(read_numbers(each, "--cut")) for each in self.cut or []]
        blank = [read_place(each, "--blank") for each in self.blank or []]
        heads = [read_head_name(each) for each in split_names(self.heads_off)]
        flows = [Change(blank=[read_place(each, "--cut-flow")]) for each in self.cut_flow or []]
        return Change(blank, cut, heads), flows


@dataclass(frozen=True)
class InterventionOutput(PageOutput):
    """The file of an intervention: a page, a picture or numbers."""

    endings: ClassVar[tuple[str, ...]] = (".html", *PICTURES, *TABLE_ENDINGS)

    out: Annotated[
        Path | None,
        file_option(
            "Write a page (.html), a picture of both rows (.png, .svg, .pdf) or numbers (.csv,"
            " .json, .md, .tex)."
        ),
    ] = None


@expand_options
def intervene_command(
    text: Annotated[str, typer.Argument(help="The text to read; - for standard input.")],
    *,
    change: ChangeFlags,
    model: AnyModel = BUNDLED,
    replacement: Annotated[
        str | None,
        typer.Option(
            help="What replaces blanked tokens: a token, its id, or attention.",
            show_default="as blank-out chooses",
        ),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Heads that are switched off give their mean over this text, instead of zero; may"
            " be given several times.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The class, or token, to watch; the prediction by default.")
    ] = None,
    foil: FoilFlags,
    position: Annotated[
        int | None,
        typer.Option(help="Read the prediction here; by default where it comes from."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Also generate at most this many tokens, before and after, greedily."),
    ] = None,
    output: InterventionOutput,
) -> None:
    """Blank out tokens, cut edges of attention or switch heads off: what is predicted then?"""
    output.check()
    alone, passages = change.read()
    if alone == Change() and not passages:
        raise OptionError("nothing is changed: give --blank, --cut, --cut-flow or --heads-off")
    against = foil.read()
    token = None if replacement is None else read_name_or_number(replacement, "--replacement")
    loaded, value = load(model), read_input(text)
    edges = import_own(change.edges, "edge weight") if ":" in change.edges else change.edges
    flows: list[MaxFlow] = [
        flow_to(loaded, value, each, edges=edges, position=position, target=target, foil=against)
        for each in passages
    ]
    result = intervene(
        loaded,
        value,
        Change(alone.blank, [*alone.cut, *flows], alone.heads_off),
        replacement=token,
        reference=reference,
        target=target,
        foil=against,
        position=position,
        max_new_tokens=max_new_tokens,
    )
    if output.out is None:
        print_markdown(result.to_markdown())
    else:
        output.write(result)


def read_place(text: str, option: str) -> str | int | tuple[int, int]:
    """A passage, a position, or a span like 3:5."""
    start, colon, end = text.partition(":")
    if colon and start.isdecimal() and end.isdecimal():
        first, last = read_numbers(f"{start},{end}", option)
        return first, last
    return read_name_or_number(text, option)


def read_head_name(text: str) -> tuple[int, int]:
    """A head, like 4.2: layer 4, head 2."""
    numbers = read_numbers(text.replace(".", ","), "--heads-off") if text.count(".") == 1 else []
    if len(numbers) != 2:
        raise OptionError(f"--heads-off takes layer.head, for instance 4.2,5.0; got {text!r}")
    return numbers[0], numbers[1]
