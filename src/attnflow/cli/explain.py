"""The commands that take a model and a text: explain, demo, capture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from attnflow.analysis.explain.explain import explain
from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.explain.summary import find_asides
from attnflow.analysis.run import describe_row, describe_top_row
from attnflow.capturing.capture import capture
from attnflow.cli.options import (
    LEFT_OUT,
    AnyModel,
    Edges,
    FoilFlags,
    GraphFlags,
    LayerOption,
    ModelName,
    Normalize,
    SomeMethods,
    Truncation,
    ViewFlags,
    expand_options,
    read_edge_names,
    read_functions,
    read_input,
    read_normalize,
    read_numbers,
)
from attnflow.cli.output import PageOutput, check_out
from attnflow.core.choices import Choices
from attnflow.core.fusion import FUSIONS
from attnflow.core.methods import METHODS
from attnflow.errors import OptionError
from attnflow.models.load import BUNDLED, load
from attnflow.show.terminal.answers import print_explanation
from attnflow.show.terminal.tables import print_notes, say

DEMO = ("the keys to the cabinet", "the author of the books")


@dataclass(frozen=True)
class ExplanationView(ViewFlags):
    """What the terminal shows of an explanation."""

    layer: LayerOption = None
    words: Annotated[bool, typer.Option("--words", help="Words instead of subwords.")] = False

    def check(self, output: PageOutput) -> None:
        """Refuse these options for a file, and a comparison of words with other positions."""
        reference = self.read_reference(None)
        chosen = self.layer is not None or self.words or reference or self.exclude != LEFT_OUT
        if output.out is not None and chosen:
            raise OptionError(
                "--layer, --words, --compared-with and --exclude choose what the terminal shows; a"
                " file holds every layer and token: leave them out"
            )
        if self.words and reference == "others":
            raise OptionError(
                "--compared-with others compares tokens, and words are computed for one position:"
                " leave --words out, or compare with even"
            )


def list_terminal_notes(explanation: Explanation, view: ExplanationView) -> list[str]:
    """The notes on what the terminal shows: those on rows are of the layer that is shown."""
    asides = find_asides(explanation)
    of_top = {
        note
        for done in explanation.runs.values()
        for note in describe_top_row(done, explanation.position, asides)
    }
    notes = [note for note in explanation.notes if note not in of_top]
    for name in explanation.results if view.layer != 1 else ():
        row = explanation.row(name, view.layer, by_word=view.words)
        notes += describe_row(row, name, asides)
    return notes


@expand_options
def explain_command(
    text: Annotated[str, typer.Argument(help="The text to explain; - for standard input.")],
    *,
    pair: Annotated[
        str | None, typer.Option(help="A second text, for models that read two: TEXT and this.")
    ] = None,
    model: AnyModel = BUNDLED,
    methods: SomeMethods = None,
    edges: Edges = None,
    position: Annotated[
        int | None,
        typer.Option(help="Explain this position; by default where the prediction comes from."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The class that importance watches; the prediction by default."),
    ] = None,
    foil: FoilFlags,
    answer: Annotated[
        str | None,
        typer.Option(
            help="Explain a whole answer of a language model, which continues TEXT as it stands:"
            " ' Paris, the city of light'; --foil is then another answer."
        ),
    ] = None,
    span: Annotated[
        str | None,
        typer.Option(metavar="POSITIONS", help="Explain these positions together: 4,5,6."),
    ] = None,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance",
            help="Show blank-out and input gradients too; of an answer, relevance.",
        ),
    ] = False,
    view: ExplanationView,
    graph: GraphFlags,
    normalize: Normalize = "sum",
    heads: Annotated[bool, typer.Option("--heads", help="Keep every head, for the page.")] = False,
    truncation: Truncation = False,
    output: PageOutput,
) -> None:
    """Explain a prediction: what the model says of a text, and which tokens it looked at."""
    output.check()
    view.check(output)
    exclude, reference = view.read_exclude(), view.read_reference(None)
    is_filed, contrast = output.out is not None, foil.read()
    is_watched = importance or target is not None or contrast is not None
    wanted: Choices | None = ["relevance"] if importance else ()
    if answer is None and span is None:
        wanted = None if is_watched or (is_filed and not output.is_picture) else ()
    text = read_input(text)
    explanation = explain(
        text if pair is None else (text, pair),
        model=model,
        methods=None if methods is None else read_functions(methods, METHODS, "method"),
        edges=read_edge_names(edges),
        importance=wanted,
        position=position,
        target=target,
        foil=contrast,
        answer=answer,
        span=read_positions(span),
        normalize=read_normalize(normalize),
        truncation=truncation,
        heads=None if heads and is_filed else "mean",
        **graph.read(),
    )
    if is_filed or explanation.graph is None:
        print_notes(explanation.notes)
    else:
        print_notes(list_terminal_notes(explanation, view))
    print_notes(describe_missing_importance(explanation, output, importance, is_watched))
    if is_filed:
        output.write(explanation)
        return
    print_explanation(
        Console(),
        explanation,
        layer=view.layer,
        by_word=view.words,
        exclude=exclude,
        reference=reference,
    )


def read_positions(text: str | None) -> list[int] | None:
    """The positions that are explained together, if any."""
    return None if text is None else read_numbers(text, "--span")


def describe_missing_importance(
    explanation: Explanation, output: PageOutput, is_shown: bool, is_watched: bool
) -> list[str]:
    """Notes on requested importance that is not shown."""
    notes = []
    if output.is_picture and is_watched:
        notes.append("a picture shows token attention alone; importance is in pages and numbers")
    if is_shown and not explanation.importance and explanation.graph is not None:
        notes.append(f"importance requires a prediction, and {explanation.model} makes none")
    return notes


def demo_command() -> None:
    """Explain two sentences by the model that ships with attnflow: singular or plural verb?"""
    for text in DEMO:
        print_explanation(Console(), explain(text))
        say("")


def capture_command(
    model: ModelName,
    text: Annotated[str, typer.Argument(help="The text to read.")],
    out: Annotated[
        Path, typer.Option(readable=False, metavar="FILE", help="The .npz file to write.")
    ],
    heads: Annotated[
        str, typer.Option(help="How to fuse heads: mean, max, min, or all, which keeps every head.")
    ] = "mean",
    truncation: Truncation = False,
) -> None:
    """Capture a model's attention on a text, for the other commands."""
    check_out(out, [".npz"])
    chosen = None if heads == "all" else heads
    if chosen is not None and chosen not in FUSIONS:
        raise OptionError(f"unknown --heads {heads!r}; choose from {', '.join(FUSIONS)}, all")
    attention = capture(load(model), text, heads=chosen, truncation=truncation)
    attention.save(out)
    say(f"{out}: {str(attention)[1:-1]}")
