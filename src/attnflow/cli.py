"""The command line: parses, calls one function, prints."""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import attnflow
from attnflow import __version__
from attnflow.attention import Attention
from attnflow.errors import AttnFlowError, OptionError, SaturationWarning
from attnflow.files import known_ending, writable
from attnflow.graph import RESIDUAL, AttentionGraph
from attnflow.methods import METHODS
from attnflow.results import TokenAttention

app = typer.Typer(
    help="Which input tokens does a Transformer look at? Raw attention, attention rollout and attention flow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[
    Path,
    typer.Argument(
        readable=False,
        show_default=False,
        help="An .npz or .npy file of weights: one number a layer, head, query and key; heads may be fused.",
    ),
]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a model, or a hub id.", show_default=False)]
Layer = Annotated[int | None, typer.Option(help="Explain this layer's output; the top one if not given.", show_default=False)]
Position = Annotated[int | None, typer.Option(help="Explain this position; 0, or the last if causal, if not given.", show_default=False)]
Bottom = Annotated[int, typer.Option(help="The layer to look down to; 0 is the input.")]
Heads = Annotated[str, typer.Option(help="How to fuse heads: mean, max, min, or one head's number.")]
Residual = Annotated[float, typer.Option(help="Weight of the residual connection, from 0 up to but not including 1.")]
Without = Annotated[str, typer.Option(metavar="POSITIONS", help="Positions to take out first, for instance 0 or 0,7.", show_default=False)]
Normalize = Annotated[str, typer.Option(help="sum (rows sum to 1), receptive_field, or none.")]
Workers = Annotated[int, typer.Option(help="Threads.")]
Out = Annotated[
    Path | None, typer.Option(readable=False, metavar="FILE", help="Write .csv, .json or .npz instead of a table.", show_default=False)
]


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"attnflow {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command()
def raw(
    file: File,
    layer: Layer = None,
    position: Position = None,
    heads: Heads = "mean",
    residual: Residual = RESIDUAL,
    without: Without = "",
    normalize: Normalize = "sum",
    out: Out = None,
) -> None:
    """Raw attention: one layer's weights, fused over heads."""
    check_out(out)
    graph = read_graph(file, heads, residual, without)
    finish(run("raw", graph, layer, position, normalize), out)


@app.command()
def rollout(
    file: File,
    layer: Layer = None,
    position: Position = None,
    bottom: Bottom = 0,
    heads: Heads = "mean",
    residual: Residual = RESIDUAL,
    without: Without = "",
    normalize: Normalize = "sum",
    out: Out = None,
) -> None:
    """Attention rollout: the product of the layers' matrices."""
    check_out(out)
    graph = read_graph(file, heads, residual, without)
    finish(run("rollout", graph, layer, position, normalize, bottom=bottom), out)


@app.command()
def flow(
    file: File,
    layer: Layer = None,
    position: Position = None,
    bottom: Bottom = 0,
    heads: Heads = "mean",
    residual: Residual = RESIDUAL,
    without: Without = "",
    normalize: Normalize = "sum",
    workers: Workers = 1,
    out: Out = None,
) -> None:
    """Attention flow: the maximum flow to each token, exact."""
    check_out(out)
    graph = read_graph(file, heads, residual, without)
    finish(run("flow", graph, layer, position, normalize, bottom=bottom, workers=workers), out)


@app.command()
def capture(
    model: ModelName,
    text: Annotated[str, typer.Argument(help="The text to read.", show_default=False)],
    out: Annotated[Path, typer.Option(readable=False, metavar="FILE", help="The .npz file to write.", show_default=False)],
    heads: Annotated[str, typer.Option(help="How to fuse heads: mean, max, min, or all, which keeps every head.")] = "mean",
    truncation: Annotated[bool, typer.Option("--truncation", help="Cut off what is longer than the model takes.")] = False,
) -> None:
    """Capture a model's attention on a text, for the other commands."""
    check_out(out, [".npz"])
    found = attnflow.capture(attnflow.load(model), text, heads=None if heads == "all" else heads, truncation=truncation)
    found.save(out)
    typer.echo(f"{out}: {str(found)[1:-1]}")


@app.command()
def generate(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="The text to go on from.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 20,
    method: Annotated[str, typer.Option(help="raw, rollout or flow.")] = "rollout",
    layer: Layer = None,
    residual: Residual = RESIDUAL,
    without: Without = "",
    normalize: Normalize = "sum",
    keep_common: Annotated[bool, typer.Option("--keep-common", help="Keep common words, punctuation and special tokens.")] = False,
    out: Out = None,
) -> None:
    """Generate from a prompt, and show what of the prompt each generated token looked at."""
    if method not in METHODS:
        raise OptionError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    check_out(out)
    story = attnflow.generate(attnflow.load(model), prompt, max_new_tokens=max_new_tokens)
    options = {"residual": residual, "without": numbers(without), "normalize": None if normalize.lower() == "none" else normalize}
    with notes():
        result = getattr(story, method)(**options)
    if layer is not None and layer not in result.layers:
        raise OptionError(f"layer must be from 1 to {len(result.layers)}; got {layer}")
    if out is not None:
        result.save(out)
        return
    shown = result if keep_common else result.filtered()
    console = Console()
    console.print(Text(story.text, style="bold"))
    chosen = -1 if layer is None else result.layers.index(layer)
    for token, values in zip(shown.generated, shown.values[:, :, chosen], strict=True):
        console.print(Text(f"{printable(token):>16}  ").append_text(heat_strip(shown.prompt, values)))


@app.command()
def demo() -> None:
    """Explain an example that ships with attnflow: a real model's attention, by all three methods."""
    show_demo(Console())


# ---- what the commands share --------------------------------------------------------------------------------------------------


def check_out(out: Path | None, endings: Sequence[str] = (".csv", ".json", ".npz")) -> None:
    """Refuse an output that cannot be written before anything is computed."""
    if out is not None:
        known_ending(out, endings)
        writable(out)


def read_graph(file: Path, heads: str, residual: float, without: str) -> AttentionGraph:
    fusion = int(heads) if heads.removeprefix("-").isdecimal() and len(heads) < 10 else heads
    return Attention.load(file).graph(heads=fusion, residual=residual, without=numbers(without))


def numbers(text: str) -> list[int]:
    """Whole numbers from a list like 0,7 or 0 7."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise OptionError(f"--without must be positions like 0 or 0,7; got {text!r}") from error


def run(method: str, graph: AttentionGraph, layer: int | None, position: int | None, normalize: str, **options: Any) -> TokenAttention:
    """One row of one method; what it warns of becomes a note on standard error."""
    if position is None:
        position = graph.kept[-1 if graph.causal else 0]
    with notes():
        return METHODS[method](
            graph,
            layers=graph.depth if layer is None else layer,
            positions=position,
            normalize=None if normalize.lower() == "none" else normalize,
            **options,
        )


@contextmanager
def notes() -> Iterator[None]:
    """What attnflow warns of within becomes a note on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SaturationWarning)
        yield
    for warning in caught:
        Console(stderr=True).print(Text(f"note: {warning.message}", style="yellow"))


def finish(result: TokenAttention, out: Path | None) -> None:
    if out is not None:
        result.save(out)
        return
    console = Console()
    down_to = "the layer below" if result.bottom is None else f"layer {result.bottom}"
    title = f"{result.method}: from layer {result.layers[0]}, position {result.positions[0]} ({printable(result.queries[0])}), to {down_to}"
    console.print(Text(title))
    print_table(console, [result])


def show_demo(console: Console) -> None:
    with as_file(files("attnflow") / "example.npz") as path:
        attention = Attention.load(path)
    graph = attention.graph()
    results = [run(method, graph, None, None, "sum") for method in METHODS]
    console.print(Text(f"MiniLM (6 layers, 12 heads) reads: {' '.join(results[0].tokens[1:-1])}"))
    console.print(Text(f"How much each token reaches position 0, {results[0].queries[0]}, in layer {graph.depth}, by three methods:"))
    print_table(console, results)


def print_table(console: Console, results: list[TokenAttention]) -> None:
    """Tokens down, a number and a bar for each method across; a star marks flows at the bound that all sources share."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("token", overflow="fold")
    width = max(6, min(40, (console.width - 30) // len(results) - 10))
    for result in results:
        table.add_column(result.method, justify="right")
        table.add_column("", width=width, no_wrap=True)
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    starred = False
    for key, token in enumerate(results[0].tokens):
        cells = [Text(str(key)), Text(printable(token))]
        for result in results:
            row = result.values[0, 0]
            value, largest = float(row[key]), float(row.max())
            star = result.saturated is not None and bool(result.saturated[0, 0, key])
            starred |= star
            bar = block * round(width * value / largest) if largest > 0 else ""
            cells += [Text(f"{value:.4f}{'*' if star else ' '}"), Text(bar, style="blue")]
        table.add_row(*cells)
    console.print(table)
    if starred:
        console.print(Text("* at the bound that is the same for every source", style="dim"))


SHADES = [(" ", ""), ("░", "black on #deebf7"), ("▒", "black on #9ecae1"), ("▓", "black on #4292c6"), ("█", "white on #084594")]


def heat_strip(tokens: Sequence[str], values: Sequence[float]) -> Text:
    """The tokens in a row, each followed by a mark and coloured, from none to strong, by its share of the largest value."""
    strip = Text()
    largest = max(values, default=0.0)
    for token, value in zip(tokens, values, strict=True):
        mark, style = SHADES[min(len(SHADES) - 1, int(len(SHADES) * value / largest)) if largest > 0 else 0]
        strip.append(f"{printable(token).replace('Ġ', '').replace('▁', '')}{mark}", style=style).append(" ")
    return strip


def printable(token: str) -> str:
    return token if token.isprintable() else token.encode("unicode_escape").decode()


def main() -> None:
    """Run the command line; an error of the user's input is one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a token that the terminal cannot show is no reason to stop
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars, too, stay out of pipes
    try:
        app()
    except AttnFlowError as error:
        print(f"attnflow: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk or a closed pipe behind standard output
        print(f"attnflow: cannot write the output: {error.strerror or error}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is still buffered has nowhere to go
        sys.exit(2)
