"""The command line: parses, calls one function, prints."""

import os
import sys
import warnings
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import attnflow
from attnflow import __version__
from attnflow.analysis.explanation import describe_flow
from attnflow.analysis.importance import IMPORTANCES
from attnflow.cli import corpora as corpus_cli
from attnflow.cli import lab
from attnflow.core.attention import Attention
from attnflow.core.files import PICTURES, known_ending, writable
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.core.methods import METHODS
from attnflow.core.results import TokenAttention
from attnflow.core.text import show_token
from attnflow.errors import AttnFlowError, OptionError, printable
from attnflow.models.loading import BUNDLED
from attnflow.show.terminal import (
    heat_strip,
    notes,
    print_explanation,
    print_note,
    print_table,
    say,
)

PLAIN = (None, RESIDUAL, "", "sum", "rollout")  # options of generate that a page can do without
# what typer raises of a command line that it cannot read; newer versions bring a click of their own
USAGE_ERROR: Any = next(
    parent for parent in typer.BadParameter.__mro__ if parent.__name__ == "ClickException"
)
DEMO = ("the key to the cabinets", "the keys to the cabinets")

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
ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder with a model, or a hub id.", show_default=False),
]
Layer = Annotated[
    int | None,
    typer.Option(help="Explain this layer's output; the top one if not given.", show_default=False),
]
Position = Annotated[
    int | None,
    typer.Option(
        help="Explain this position; 0, or the last if causal, if not given.", show_default=False
    ),
]
Bottom = Annotated[int, typer.Option(help="The layer to look down to; 0 is the input.")]
Heads = Annotated[
    str, typer.Option(help="How to fuse heads: mean, max, min, or one head's number.")
]
Residual = Annotated[
    float, typer.Option(help="Weight of the residual connection, from 0 up to but not including 1.")
]
Without = Annotated[
    str,
    typer.Option(
        metavar="POSITIONS",
        help="Positions to take out first, for instance 0 or 0,7.",
        show_default=False,
    ),
]
Normalize = Annotated[str, typer.Option(help="sum (rows sum to 1), receptive_field, or none.")]
Workers = Annotated[int, typer.Option(help="Threads.")]
PAGE_ENDINGS = (".html", *PICTURES, ".csv", ".json", ".npz")
Page = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="FILE",
        help="Write an interactive page (.html), a picture (.png, .svg, .pdf) or numbers (.csv, .json, .npz).",
        show_default=False,
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]
Out = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="FILE",
        help="Write .csv, .json or .npz instead of a table.",
        show_default=False,
    ),
]


def show_version(asked: bool) -> None:
    if asked:
        say(f"attnflow {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
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
    out: Annotated[
        Path,
        typer.Option(
            readable=False, metavar="FILE", help="The .npz file to write.", show_default=False
        ),
    ],
    heads: Annotated[
        str, typer.Option(help="How to fuse heads: mean, max, min, or all, which keeps every head.")
    ] = "mean",
    truncation: Annotated[
        bool, typer.Option("--truncation", help="Cut off what is longer than the model takes.")
    ] = False,
) -> None:
    """Capture a model's attention on a text, for the other commands."""
    check_out(out, [".npz"])
    found = attnflow.capture(
        attnflow.load(model), text, heads=None if heads == "all" else heads, truncation=truncation
    )
    found.save(out)
    say(f"{out}: {str(found)[1:-1]}")


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
    keep_common: Annotated[
        bool,
        typer.Option("--keep-common", help="Keep common words, punctuation and special tokens."),
    ] = False,
    out: Page = None,
    open_it: Open = False,
) -> None:
    """Generate from a prompt, and show what of the prompt each generated token looked at."""
    if method not in METHODS:
        raise OptionError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    check_out(out, PAGE_ENDINGS)
    check_open(out, open_it)
    if (
        out is not None
        and out.suffix.lower() == ".html"
        and (layer, residual, without, normalize, method) != PLAIN
    ):
        raise OptionError(
            "a page shows every method and layer, not normalised; leave --method, --layer, --residual, --without, --normalize out"
        )
    story = attnflow.generate(attnflow.load(model), prompt, max_new_tokens=max_new_tokens)
    options = {
        "residual": residual,
        "without": lab.whole_numbers(without, "--without"),
        "normalize": None if normalize.lower() == "none" else normalize,
    }
    with notes():
        result = getattr(story, method)(**options)
    if layer is not None and layer not in result.layers:
        raise OptionError(f"layer must be from 1 to {len(result.layers)}; got {layer}")
    if out is not None:
        if out.suffix.lower() in PICTURES:
            from attnflow.show import figures

            figures.generation(result, layer).save(out)
        else:
            show_page((story if out.suffix.lower() == ".html" else result).save(out), open_it)
        return
    with notes():
        shown = result if keep_common else result.filtered()
    console = Console()
    console.print(Text(printable(story.text, keep="\n"), style="bold"))
    chosen = -1 if layer is None else result.layers.index(layer)
    if shown.kept is not None:
        least, most = shown.kept[:, chosen].min(), shown.kept[:, chosen].max()
        console.print(
            Text(
                f"without common words, punctuation and special tokens: {least:.2g} to {most:.2g}"
                " of each row is shown (--keep-common shows all)",
                style="dim",
            )
        )
    for token, values in zip(shown.generated, shown.values[:, :, chosen], strict=True):
        console.print(
            Text(f"{show_token(token):>16}  ").append_text(
                heat_strip(console, shown.prompt, values)
            )
        )


@app.command()
def explain(
    text: Annotated[str, typer.Argument(help="The text to explain.", show_default=False)],
    pair: Annotated[
        str | None,
        typer.Option(
            help="A second text, for models that read two: TEXT and this.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A folder with a model, a hub id, or the model that ships with attnflow."
        ),
    ] = BUNDLED,
    layer: Layer = None,
    position: Annotated[
        int | None,
        typer.Option(
            help="Explain this position; where the prediction comes from, if not given.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The class that importance watches; the prediction if not given.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        bool, typer.Option("--importance", help="Show blank-out and input gradients too.")
    ] = False,
    words: Annotated[bool, typer.Option("--words", help="Words instead of subwords.")] = False,
    residual: Residual = RESIDUAL,
    normalize: Normalize = "sum",
    heads: Annotated[bool, typer.Option("--heads", help="Keep every head, for the page.")] = False,
    truncation: Annotated[
        bool, typer.Option("--truncation", help="Cut off what is longer than the model takes.")
    ] = False,
    out: Page = None,
    open_it: Open = False,
) -> None:
    """Explain a prediction: what the model says of a text, and which tokens it looked at, by three methods."""
    check_out(out, PAGE_ENDINGS)
    check_open(out, open_it)
    if out is not None and (layer is not None or words):
        raise OptionError(
            "--layer and --words choose what the terminal shows; a file holds every layer and token: leave them out"
        )
    found = attnflow.explain(
        text if pair is None else (text, pair),
        model=model,
        position=position,
        target=target,
        importance=tuple(IMPORTANCES)
        if importance or target is not None or out is not None
        else (),
        residual=residual,
        normalize=None if normalize.lower() == "none" else normalize,
        truncation=truncation,
        heads=None if heads else "mean",
    )
    shown = () if layer == 1 else describe_flow(found.row("flow", layer, by_word=words))
    for note in found.notes if out is not None else shown:
        print_note(note)
    if out is not None and out.suffix.lower() in PICTURES and (importance or target is not None):
        print_note("a picture shows token attention alone; importance is in pages and numbers")
    if importance and not found.importance:
        print_note(f"there is no importance: {found.model} predicts nothing that it could watch")
    if out is not None:
        show_page(found.save(out), open_it)
        return
    print_explanation(Console(), found, layer=layer, by_word=words)


@app.command()
def demo() -> None:
    """Explain two sentences by the model that ships with attnflow: is the verb that follows singular or plural?"""
    for text in DEMO:
        print_explanation(Console(), attnflow.explain(text))
        say("")


app.command("evaluate")(lab.evaluate_command)
app.add_typer(corpus_cli.app, name="corpus")
app.add_typer(lab.train, name="train")
app.add_typer(lab.reproduce, name="reproduce")


# ---- what the commands share --------------------------------------------------------------------------------------------------


def check_out(out: Path | None, endings: Sequence[str] = (".csv", ".json", ".npz")) -> None:
    """Refuse an output that cannot be written before anything is computed."""
    if out is not None:
        known_ending(out, endings)
        writable(out)


def check_open(out: Path | None, open_it: bool) -> None:
    if open_it and (out is None or out.suffix.lower() != ".html"):
        raise OptionError(
            "--open shows a page in the browser, so it needs --out with a name that ends in .html"
        )


def show_page(path: Path, open_it: bool) -> None:
    """Open a page that was written in the user's browser, if that was asked for."""
    say(f"written: {path}")
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        say(f"note: no browser was found; open {path} by hand", err=True)


def read_graph(file: Path, heads: str, residual: float, without: str) -> AttentionGraph:
    fusion = lab.name_or_number(heads, "--heads")
    return Attention.load(file).graph(
        heads=fusion, residual=residual, without=lab.whole_numbers(without, "--without")
    )


def run(
    method: str,
    graph: AttentionGraph,
    layer: int | None,
    position: int | None,
    normalize: str,
    **options: Any,
) -> TokenAttention:
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


def finish(result: TokenAttention, out: Path | None) -> None:
    if out is not None:
        result.save(out)
        return
    console = Console()
    down_to = "the layer below" if result.bottom is None else f"layer {result.bottom}"
    title = f"{result.method}: from layer {result.layers[0]}, position {result.positions[0]} ({printable(result.queries[0])}), to {down_to}"
    console.print(Text(title))
    print_table(console, [result])


def main() -> None:
    """Run the command line; an error of the user's input is one line and exit status 2."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            # a token that the terminal cannot show is no reason to stop
            stream.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars, too, stay out of pipes
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print_note(message)
            status = app(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as head has
        status = 1
        drop_output()
    except typer.Abort:
        status = 130
    except (
        AttnFlowError,
        USAGE_ERROR,
        OSError,
        UnicodeError,
        MemoryError,
        RecursionError,
    ) as error:
        status = 2
        line = error if isinstance(error, AttnFlowError) else AttnFlowError(describe(error))
        if isinstance(error, OSError):
            drop_output()
        with suppress(OSError):
            if str(line):
                print(f"attnflow: {line}", file=sys.stderr, flush=True)
    sys.exit(status)


def describe(error: BaseException) -> str:
    """What happened, for a user who did not write the code; empty if the help was shown instead."""
    if isinstance(error, USAGE_ERROR):
        if type(error).__name__ == "NoArgsIsHelpError":
            return ""
        context = getattr(error, "ctx", None)
        way_out = "" if context is None else f"; see {context.command_path} --help"
        return f"{error.format_message().rstrip('.')}{way_out}"
    if isinstance(error, OSError):
        place = "cannot write the output" if error.filename is None else error.filename
        return f"{place}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "there is not enough memory for this; give a shorter text, or ask for fewer layers"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply to be read"
    return f"a text cannot be read or written: {error}"


def drop_output() -> None:
    """Let go what standard output does not take, or Python tries again, and complains, at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
