"""The command that takes a model and a long prompt: segments."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnflow.cli.options import (
    OWN,
    LayerOption,
    ModelName,
    PositionOption,
    Residual,
    Truncation,
    Without,
    read_edge_names,
    read_numbers,
)
from attnflow.cli.output import NUMBER_ENDINGS, NumberFile, check_out
from attnflow.core.results import TokenAttention
from attnflow.core.text import shorten, show_token
from attnflow.edges.edge_weight import name_result
from attnflow.errors import FileError, OptionError, printable
from attnflow.models.load import load
from attnflow.models.segments import KINDS, Segments, cut_marker
from attnflow.notices import collect_notices
from attnflow.rows.segments import rollout_segments
from attnflow.show.terminal.tables import print_note, say

MARKER = "marker"
NOW_CONTRIBUTIONS = "contribution edges, the default for decoders; --edges attention is that of 0.3"
SHOWN_SEGMENTS = 40  # segments on the terminal; a file has all
PromptFile = Annotated[
    Path,
    typer.Argument(
        readable=False,
        help="A text file; for turns, a JSON file of messages with role and content.",
    ),
]
SegmentEdges = Annotated[
    str | None,
    typer.Option(
        help="What an edge weighs: attention, norm, contribution, effective; your own as"
        f" {OWN}. By default contribution for decoders, and attention for other models."
    ),
]


def segments_command(
    model: ModelName,
    file: PromptFile,
    by: Annotated[
        str, typer.Option(help=f"What to cut the prompt into: {', '.join((*KINDS, MARKER))}.")
    ] = "sentences",
    marker: Annotated[
        str | None, typer.Option(help="With --by marker: the text that every segment begins with.")
    ] = None,
    layer: LayerOption = None,
    position: PositionOption = None,
    edges: SegmentEdges = None,
    residual: Residual = None,
    without: Without = "",
    truncation: Truncation = False,
    out: NumberFile = None,
) -> None:
    """Show how much of each part of a long prompt reached a position: rollout to segments."""
    check_out(out, NUMBER_ENDINGS)
    if by not in (*KINDS, MARKER):
        raise OptionError(f"unknown --by {by!r}; choose from {', '.join((*KINDS, MARKER))}")
    if (by == MARKER) != (marker is not None):
        raise OptionError(
            "--by marker and --marker TEXT belong together; got one without the other"
        )
    prompt = read_messages(file) if by == "turns" else read_prompt(file)
    cut: Segments = by if marker is None else dict(cut_marker(str(prompt), marker))
    reader = load(model)
    with collect_notices() as notices:
        shares: TokenAttention = rollout_segments(
            reader,
            prompt,
            segments=cut,
            unit="positions" if marker is None else "characters",
            layers=layer,
            positions=(-1 if reader.is_causal else 0) if position is None else position,
            edges=read_edge_names(edges),
            residual=residual,
            without=read_numbers(without, "--without"),
            truncation=truncation,
        )
    for notice in notices:
        print_note(notice if shares.edges == "attention" else NOW_CONTRIBUTIONS)
    if out is not None:
        say(f"written: {shares.save(out)}")
    else:
        print_shares(Console(), shares)


def read_prompt(file: Path) -> str:
    """The text of a file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror or error}") from error


def read_messages(file: Path) -> list[dict[str, object]]:
    """The messages of a chat."""
    try:
        messages = json.loads(read_prompt(file))
    except ValueError as error:
        raise FileError(f"{file} must hold messages as JSON; it does not: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise FileError(f"{file} must hold a list of messages, each with a role and a content")
    if not messages:
        raise FileError(f"{file} must hold at least one message; it has none")
    return messages


def print_shares(console: Console, shares: TokenAttention) -> None:
    """The segments in their order, each with its tokens, its share and a bar."""
    row, groups = shares.values[-1, 0], shares.groups or ()
    where = f"layer {shares.layers[-1]}, position {shares.positions[0]}"
    name = name_result(shares.edges, shares.method)
    console.print(Text(f"{name}: from {where} ({show_token(shares.queries[0])}), to segments"))
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("segment", overflow="fold")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    width = max(6, min(40, console.width // 3))
    table.add_column("", width=width, no_wrap=True)
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    strongest = sorted(np.argsort(-row, kind="stable")[:SHOWN_SEGMENTS].tolist())
    for place in strongest:
        value, group = float(row[place]), groups[place]
        bar = block * round(width * value / float(row.max()))
        table.add_row(
            Text(str(place)),
            Text(printable(shorten(group.name))),
            Text(str(len(group.positions))),
            Text(f"{value:.4f}"),
            Text(bar, style="blue"),
        )
    console.print(table)
    if len(strongest) < len(row):
        note = f"the {len(strongest)} strongest of {len(row)} segments; --out writes all"
        console.print(Text(note, style="dim"))
