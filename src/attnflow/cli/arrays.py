"""The commands that take a file of weights: raw, rollout, flow."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from attnflow.cli.options import (
    Heads,
    Layer,
    Normalize,
    Residual,
    Without,
    check_out,
    read_name_or_number,
    read_normalize,
    read_numbers,
)
from attnflow.core.attention import Attention
from attnflow.core.graph import RESIDUAL
from attnflow.core.methods import METHODS
from attnflow.core.results import TokenAttention
from attnflow.core.tables import TABLE_ENDINGS
from attnflow.core.text import show_token
from attnflow.show.terminal import notes, print_table

ENDINGS = (*TABLE_ENDINGS, ".npz")
File = Annotated[
    Path,
    typer.Argument(
        readable=False,
        show_default=False,
        help="An .npz or .npy file of weights [layer, head, query, key], or of fused ones.",
    ),
]
Position = Annotated[
    int | None,
    typer.Option(
        help="Explain this position; by default 0, or the last if causal.", show_default=False
    ),
]
Bottom = Annotated[int, typer.Option(help="The layer to look down to; 0 is the input.")]
Workers = Annotated[int, typer.Option(help="Threads.")]
Out = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="FILE",
        help="Write .csv, .json, .md, .tex or .npz instead of a table.",
        show_default=False,
    ),
]


def raw_command(
    file: File,
    layer: Layer = None,
    position: Position = None,
    heads: Heads = "mean",
    residual: Residual = None,
    without: Without = "",
    normalize: Normalize = "sum",
    out: Out = None,
) -> None:
    """Raw attention: one layer's weights, fused over heads."""
    compute_row("raw", file, layer, position, heads, residual, without, normalize, out)


def rollout_command(
    file: File,
    layer: Layer = None,
    position: Position = None,
    bottom: Bottom = 0,
    heads: Heads = "mean",
    residual: Residual = None,
    without: Without = "",
    normalize: Normalize = "sum",
    out: Out = None,
) -> None:
    """Attention rollout: the product of the layers' matrices."""
    given = (file, layer, position, heads, residual, without, normalize, out)
    compute_row("rollout", *given, bottom=bottom)


def flow_command(
    file: File,
    layer: Layer = None,
    position: Position = None,
    bottom: Bottom = 0,
    heads: Heads = "mean",
    residual: Residual = None,
    without: Without = "",
    normalize: Normalize = "sum",
    workers: Workers = 1,
    out: Out = None,
) -> None:
    """Attention flow: the maximum flow to each token, exact."""
    given = (file, layer, position, heads, residual, without, normalize, out)
    compute_row("flow", *given, bottom=bottom, workers=workers)


def compute_row(
    method: str,
    file: Path,
    layer: int | None,
    position: int | None,
    heads: str,
    residual: float | None,
    without: str,
    normalize: str,
    out: Path | None,
    **options: Any,
) -> None:
    """One row of one method, as a table or a file; what it warns of becomes a note."""
    check_out(out, ENDINGS)
    graph = Attention.load(file).graph(
        heads=read_name_or_number(heads, "--heads"),
        residual=RESIDUAL if residual is None else residual,
        without=read_numbers(without, "--without"),
    )
    if position is None:
        position = graph.kept[-1 if graph.causal else 0]
    with notes():
        result = METHODS[method](
            graph,
            layers=graph.depth if layer is None else layer,
            positions=position,
            normalize=read_normalize(normalize),
            **options,
        )
    if out is not None:
        result.save(out)
    else:
        print_row(result)


def print_row(result: TokenAttention) -> None:
    """A table of one row."""
    console = Console()
    down_to = "the layer below" if result.bottom is None else f"layer {result.bottom}"
    start = f"layer {result.layers[0]}, position {result.positions[0]}"
    title = f"{result.method}: from {start} ({show_token(result.queries[0])}), to {down_to}"
    console.print(Text(title))
    print_table(console, [result])
