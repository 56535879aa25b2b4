"""The command that generates from a prompt: generate."""

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from attnflow import figures
from attnflow.analysis.generate.generate import generate
from attnflow.analysis.generate.prompt_attention import PromptAttention
from attnflow.analysis.job import Job
from attnflow.cli.options import (
    OWN,
    Edges,
    FoilFlags,
    Functions,
    GraphFlags,
    LayerOption,
    ModelName,
    Normalize,
    ViewFlags,
    expand_options,
    read_edge_names,
    read_functions,
    read_input,
    read_normalize,
)
from attnflow.cli.output import PageOutput
from attnflow.core.checks import check_count
from attnflow.core.methods import METHODS
from attnflow.errors import OptionError
from attnflow.models.load import load
from attnflow.show.terminal.answers import print_story
from attnflow.show.terminal.tables import notes, print_notes


@dataclass(frozen=True)
class ResultFlags(GraphFlags):
    """Which token attention of a generation is shown; by default all of it, where a file can."""

    method: Annotated[
        str | None,
        typer.Option(help=f"raw, rollout or flow; or your own as {OWN}.", show_default="rollout"),
    ] = None
    layer: LayerOption = None
    normalize: Normalize = "sum"

    def choose_edges(self, edges: str | None, *, shows_all: bool) -> Functions | None:
        """The edges to generate with, one kind unless all are shown; None for the model's first."""
        kinds = read_edge_names(edges)
        if kinds is not None and len(kinds) > 1 and not shows_all:
            raise OptionError(
                f"one kind of edges is shown at a time; got {', '.join(kinds)}: give one, or --out"
                " with a page, which shows all"
            )
        made = self.residual is not None or self.without or self.graph or self.method
        if kinds is None and (made or self.normalize == "receptive_field"):
            return {"attention": None}
        return kinds

    def choose_layer(self, result: PromptAttention) -> PromptAttention:
        """The layer of a result that is shown; all if none is chosen."""
        return result if self.layer is None else result.at_layer(self.layer)


@dataclass(frozen=True)
class StoryView(ViewFlags):
    """What the terminal shows of a generation."""

    keep_common: Annotated[
        bool, typer.Option("--keep-common", help="Name common words and punctuation too.")
    ] = False


@expand_options
def generate_command(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - for standard input.")],
    *,
    max_new_tokens: Annotated[int, typer.Option(help="The maximum number of tokens.")] = 20,
    edges: Edges = None,
    foil: FoilFlags,
    shown: ResultFlags,
    view: StoryView,
    output: PageOutput,
) -> None:
    """Generate from a prompt, and show which of its words stand out for each generated token.

    They are compared with what the other generated tokens read, unless --compared-with says
    otherwise; with none, the whole prompt is shown for each.
    """
    exclude, reference = view.read_exclude(), view.read_reference("others")
    method = read_functions(shown.method or "rollout", METHODS, "method")
    output.check()
    if output.out is not None and view != StoryView():
        raise OptionError(
            "--compared-with, --exclude and --keep-common choose what the terminal shows; a file"
            " holds every prompt token: leave them out"
        )
    is_plain = shown == ResultFlags()
    if output.is_page and not is_plain:
        raise OptionError(
            "a page shows every method and layer, not normalised; leave --method, --layer,"
            " --residual, --without, --graph, --normalize out"
        )
    shows_all = is_plain and (output.is_page or output.is_picture)
    kinds = shown.choose_edges(edges, shows_all=shows_all)
    graph = shown.read()
    normalize = read_normalize(shown.normalize)
    contrast = foil.read()
    Job.read(methods=method, edges=kinds, foil=contrast, normalize=normalize, **graph)
    check_count("max_new_tokens", max_new_tokens)
    given = read_input(prompt)
    loaded = load(model)
    if shown.layer is not None and loaded.depth is not None:
        check_layer_number(shown.layer, loaded.depth)
    story = generate(loaded, given, max_new_tokens=max_new_tokens, edges=kinds, foil=contrast)
    print_notes(story.notes)
    if shows_all:
        output.write(story)
        return
    with notes():
        result = story.by(
            method,
            edges=story.plan()[0].edges,
            normalize=normalize,
            **graph,
        )
    if output.out is not None:
        chosen = shown.choose_layer(result)
        output.write(figures.generation(chosen) if output.is_picture else chosen)
        return
    if view.compared_with is None and len(story.tokens) < 2:
        reference = "even"  # a single token has no others
    print_story(
        Console(),
        story,
        result,
        layer=shown.choose_layer(result).layers[-1],
        reference=reference,
        exclude=exclude,
        keep_common=view.keep_common,
    )


def check_layer_number(layer: int, depth: int) -> None:
    """Refuse a layer that the model does not have."""
    if not 1 <= layer <= depth:
        raise OptionError(f"layer must be from 1 to {depth}; got {layer}", options=["layer"])
