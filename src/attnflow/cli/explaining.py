"""The commands that take a model and a text: explain, generate, capture, demo."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from attnflow.analysis.explaining import describe_row, explain
from attnflow.analysis.generating import generate
from attnflow.capturing.assembly import capture
from attnflow.cli.options import (
    LEFT_OUT,
    OWN,
    AnyModel,
    ComparedWith,
    Edges,
    Exclude,
    Graph,
    Layer,
    Normalize,
    Residual,
    SomeMethods,
    Truncation,
    Without,
    check_names,
    check_out,
    import_own,
    read_edge_names,
    read_exclude,
    read_functions,
    read_input,
    read_normalize,
    read_numbers,
    read_reference,
)
from attnflow.core.files import PICTURES
from attnflow.core.methods import METHODS
from attnflow.errors import OptionError
from attnflow.models.loading import BUNDLED, load
from attnflow.show.answers import print_explanation, print_story
from attnflow.show.terminal import notes, print_note, say

PAGE_ENDINGS = (".html", *PICTURES, ".csv", ".json", ".md", ".tex", ".npz")
DEMO = ("the key to the cabinets", "the keys to the cabinets")
ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder with a model, or a hub id.", show_default=False),
]
Page = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="FILE",
        help="Write a page (.html), a picture (.png, .svg, .pdf) or numbers (.csv, .json, .npz).",
        show_default=False,
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]


def capture_command(
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
    truncation: Truncation = False,
) -> None:
    """Capture a model's attention on a text, for the other commands."""
    check_out(out, [".npz"])
    chosen = None if heads == "all" else heads
    attention = capture(load(model), text, heads=chosen, truncation=truncation)
    attention.save(out)
    say(f"{out}: {str(attention)[1:-1]}")


def generate_command(
    model: ModelName,
    prompt: Annotated[
        str,
        typer.Argument(help="The text to continue; - for standard input.", show_default=False),
    ],
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 20,
    method: Annotated[
        str | None,
        typer.Option(help=f"raw, rollout or flow; or your own as {OWN}.", show_default="rollout"),
    ] = None,
    edges: Edges = None,
    layer: Layer = None,
    residual: Residual = None,
    without: Without = "",
    graph: Graph = None,
    normalize: Normalize = "sum",
    compared_with: ComparedWith = None,
    exclude: Exclude = LEFT_OUT,
    keep_common: Annotated[
        bool, typer.Option("--keep-common", help="Name common words and punctuation too.")
    ] = False,
    out: Page = None,
    open_it: Open = False,
) -> None:
    """Generate from a prompt, and show which of its words stand out for each generated token.

    They are compared with what the other generated tokens read, unless --compared-with says
    otherwise; with none, the whole prompt is shown for each.
    """
    left_out, reference = read_exclude(exclude), read_reference(compared_with, "others")
    chosen = read_functions(method or "rollout", "method")
    check_names((name for name in chosen if chosen[name] is None), METHODS, "method")
    check_out(out, PAGE_ENDINGS)
    check_open(out, open_it)
    if out is not None and (compared_with is not None or exclude != LEFT_OUT or keep_common):
        raise OptionError(
            "--compared-with, --exclude and --keep-common choose what the terminal shows; a file"
            " holds every prompt token: leave them out"
        )
    is_page = out is not None and out.suffix.lower() == ".html"
    plain = (layer, residual, without, graph, normalize) == (None, None, "", None, "sum")
    if is_page and not (plain and method is None):
        raise OptionError(
            "a page shows every method and layer, not normalised; leave --method, --layer,"
            " --residual, --without, --graph, --normalize out"
        )
    is_picture = out is not None and out.suffix.lower() in PICTURES
    shows_all = is_page or (is_picture and plain and method is None)
    make = None if graph is None else import_own(graph, "graph")
    taken_out = read_numbers(without, "--without")
    kinds = read_edge_names(edges)
    if kinds is not None and len(kinds) > 1 and not shows_all:
        raise OptionError(
            f"one kind of edges is shown at a time; got {', '.join(kinds)}: give one, or --out with"
            " a page, which shows all"
        )
    of_attention = method is not None or residual is not None or without or graph is not None
    if kinds is None and (of_attention or normalize == "receptive_field"):
        kinds = {"attention": None}
    story = generate(load(model), read_input(prompt), max_new_tokens=max_new_tokens, edges=kinds)
    for note in story.notes:
        print_note(note)
    with notes():
        result = story.by(
            chosen,
            edges=next(iter(story.plan())),
            residual=residual,
            without=taken_out,
            graph=make,
            normalize=read_normalize(normalize),
        )
    if compared_with is None and len(story.tokens) < 2:
        reference = "even"  # there are no others
    if layer is not None and layer not in result.layers:
        raise OptionError(f"layer must be from 1 to {len(result.layers)}; got {layer}")
    if out is not None and is_picture:
        from attnflow.show import figures

        if shows_all:
            story.save(out)
        else:
            figures.generation(result, layer).save(out)
    elif out is not None:
        show_page((story if is_page else result).save(out), open_it)
    else:
        print_story(
            Console(),
            story,
            result,
            layer=result.layers[-1] if layer is None else layer,
            reference=reference,
            exclude=left_out,
            keep_common=keep_common,
        )


def explain_command(
    text: Annotated[
        str,
        typer.Argument(help="The text to explain; - for standard input.", show_default=False),
    ],
    pair: Annotated[
        str | None,
        typer.Option(
            help="A second text, for models that read two: TEXT and this.", show_default=False
        ),
    ] = None,
    model: AnyModel = BUNDLED,
    methods: SomeMethods = None,
    edges: Edges = None,
    layer: Layer = None,
    position: Annotated[
        int | None,
        typer.Option(
            help="Explain this position; by default where the prediction comes from.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The class that importance watches; the prediction by default.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        bool, typer.Option("--importance", help="Show blank-out and input gradients too.")
    ] = False,
    words: Annotated[bool, typer.Option("--words", help="Words instead of subwords.")] = False,
    compared_with: ComparedWith = None,
    exclude: Exclude = LEFT_OUT,
    residual: Residual = None,
    without: Without = "",
    graph: Graph = None,
    normalize: Normalize = "sum",
    heads: Annotated[bool, typer.Option("--heads", help="Keep every head, for the page.")] = False,
    truncation: Truncation = False,
    out: Page = None,
    open_it: Open = False,
) -> None:
    """Explain a prediction: what the model says of a text, and which tokens it looked at."""
    check_out(out, PAGE_ENDINGS)
    check_open(out, open_it)
    left_out, reference = read_exclude(exclude), read_reference(compared_with, None)
    if out is not None and (layer is not None or words or reference or exclude != LEFT_OUT):
        raise OptionError(
            "--layer, --words, --compared-with and --exclude choose what the terminal shows; a file"
            " holds every layer and token: leave them out"
        )
    if words and reference == "others":
        raise OptionError(
            "--compared-with others compares tokens, and words are computed for one position:"
            " leave --words out, or compare with even"
        )
    text = read_input(text)
    watched = importance or target is not None or out is not None
    explanation = explain(
        text if pair is None else (text, pair),
        model=model,
        methods=None if methods is None else read_functions(methods, "method"),
        edges=read_edge_names(edges),
        importance=None if watched else (),
        position=position,
        target=target,
        residual=residual,
        without=read_numbers(without, "--without"),
        graph=None if graph is None else import_own(graph, "graph"),
        normalize=read_normalize(normalize),
        truncation=truncation,
        heads=None if heads else "mean",
    )
    if out is not None or explanation.graph is None:
        for note in explanation.notes:
            print_note(note)
    elif layer != 1:
        for name in explanation.results:
            for note in describe_row(explanation.row(name, layer, by_word=words)):
                print_note(note)
    if out is not None and out.suffix.lower() in PICTURES and (importance or target is not None):
        print_note("a picture shows token attention alone; importance is in pages and numbers")
    if importance and not explanation.importance and explanation.graph is not None:
        print_note(
            f"there is no importance: {explanation.model} predicts nothing that it could watch"
        )
    if out is not None:
        show_page(explanation.save(out), open_it)
        return
    print_explanation(
        Console(), explanation, layer=layer, by_word=words, exclude=left_out, reference=reference
    )


def demo_command() -> None:
    """Explain two sentences by the model that ships with attnflow: singular or plural verb?"""
    for text in DEMO:
        print_explanation(Console(), explain(text))
        say("")


def check_open(out: Path | None, open_it: bool) -> None:
    """Refuse to open what is no page."""
    if open_it and (out is None or out.suffix.lower() != ".html"):
        raise OptionError(
            "--open shows a page in the browser, so it needs --out with a name that ends in .html"
        )


def show_page(path: Path, open_it: bool) -> None:
    """Say where a file was written; open it in the user's browser, if that was asked for."""
    say(f"written: {path}")
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        say(f"note: no browser was found; open {path} by hand", err=True)
