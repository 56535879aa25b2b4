"""The commands that take a file of weights: raw, rollout, flow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from attnflow.cli.options import (
    Heads,
    LayerOption,
    Normalize,
    PositionOption,
    Residual,
    Without,
    expand_options,
    read_name_or_number,
    read_normalize,
    read_numbers,
)
from attnflow.cli.output import NUMBER_ENDINGS, NumberFile, check_out
from attnflow.core.attention import Attention
from attnflow.core.graph import RESIDUAL
from attnflow.core.methods import METHODS
from attnflow.core.results import TokenAttention
from attnflow.core.text import show_token
from attnflow.show.terminal.tables import notes, print_table

WeightsFile = Annotated[
    Path,
    typer.Argument(
        readable=False,
        help="An .npz or .npy file of weights \\[layer, head, query, key], or of fused ones.",
    ),
]
Bottom = Annotated[int, typer.Option(help="The layer to look down to; 0 is the input.")]
Workers = Annotated[int, typer.Option(help="Threads.")]


@dataclass(frozen=True)
class RowFlags:
    """Which row is computed, and where it is written."""

    layer: LayerOption = None
    position: PositionOption = None
    heads: Heads = "mean"
    residual: Residual = None
    without: Without = ""
    normalize: Normalize = "sum"
    out: NumberFile = None


@expand_options
def raw_command(file: WeightsFile, *, row: RowFlags) -> None:
    """Raw attention: one layer's weights, fused over heads."""
    compute_row("raw", file, row)


@expand_options
def rollout_command(file: WeightsFile, *, row: RowFlags, bottom: Bottom = 0) -> None:
    """Attention rollout: the product of the layers' matrices."""
    compute_row("rollout", file, row, bottom=bottom)


@expand_options
def flow_command(
    file: WeightsFile, *, row: RowFlags, bottom: Bottom = 0, workers: Workers = 1
) -> None:
    """Attention flow: the maximum flow to each token, exact."""
    compute_row("flow", file, row, bottom=bottom, workers=workers)


def compute_row(method: str, file: Path, row: RowFlags, **options: int) -> None:
    """Print or write one row of a method; warnings become notes."""
    check_out(row.out, NUMBER_ENDINGS)
    graph = Attention.load(file).graph(
        heads=read_name_or_number(row.heads, "--heads"),
        residual=RESIDUAL if row.residual is None else row.residual,
        without=read_numbers(row.without, "--without"),
    )
    focal = graph.kept[-1 if graph.causal else 0]
    with notes():
        result = METHODS[method](
            graph,
            layers=graph.depth if row.layer is None else row.layer,
            positions=focal if row.position is None else row.position,
            normalize=read_normalize(row.normalize),
            **options,
        )
    if row.out is not None:
        result.save(row.out)
    else:
        print_row(result)


def print_row(result: TokenAttention) -> None:
    """Print a table of one row."""
    console = Console()
    down_to = "the layer below" if result.bottom is None else f"layer {result.bottom}"
    start = f"layer {result.layers[0]}, position {result.positions[0]}"
    title = f"{result.method}: from {start} ({show_token(result.queries[0])}), to {down_to}"
    console.print(Text(title))
    print_table(console, [result])
