"""The command that sets two explanations side by side: compare."""

from pathlib import Path
from typing import Annotated

import typer

from attnflow.analysis.explaining import explain
from attnflow.analysis.side_by_side import SideBySide, compare
from attnflow.cli.explaining import Open, check_open, show_page
from attnflow.cli.options import Layer, Truncation, check_names, check_out, split_columns
from attnflow.core.methods import METHODS
from attnflow.core.tables import TABLE_ENDINGS
from attnflow.edges.choosing import EDGES, split_name
from attnflow.errors import OptionError
from attnflow.models.loading import BUNDLED
from attnflow.show.terminal import print_markdown


def compare_command(
    texts: Annotated[
        list[str],
        typer.Argument(metavar="TEXT [TEXT]", show_default=False, help="One text, or two."),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder with a model or a hub id, once or twice; the model that ships with"
            " attnflow by default.",
            show_default=False,
        ),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help='One result, or two: "rollout,contribution rollout"; what explain shows first by'
            " default.",
            show_default=False,
        ),
    ] = None,
    layer: Layer = None,
    words: Annotated[
        bool,
        typer.Option(
            "--words", help="Align words instead of tokens, as is always done for two models."
        ),
    ] = False,
    truncation: Truncation = False,
    out: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Write a page (.html) or numbers (.csv, .json, .md, .tex).",
            show_default=False,
        ),
    ] = None,
    open_it: Open = False,
) -> None:
    """Compare two texts, two models, or two methods: what each reads, and the difference."""
    check_out(out, (".html", *TABLE_ENDINGS))
    check_open(out, open_it)
    models = model or [BUNDLED]
    names = split_columns(results or "")
    for what, given in (("text", texts), ("--model", models), ("name in --results", names)):
        if len(given) > 2:
            raise OptionError(f"two are compared; got {len(given)} of {what}")
    if max(len(texts), len(models), len(names)) < 2:
        raise OptionError(
            "two are compared: give two texts, --model twice, or two names in --results"
        )
    asked = [split_name(name) for name in names]
    check_names((edges for edges, _ in asked), EDGES, "edges")
    check_names((method for _, method in asked), METHODS, "method")
    edges = list(dict.fromkeys(edges for edges, _ in asked)) or None
    wanted = list(dict.fromkeys(method for _, method in asked)) or None
    explanations = [
        explain(text, model=name, methods=wanted, edges=edges, importance=(), truncation=truncation)
        for text, name in zip((texts[0], texts[-1]), (models[0], models[-1]), strict=True)
    ]
    methods = (names[0], names[-1]) if names else None
    pair: SideBySide = compare(
        *explanations, methods=methods, layer=layer, unit="word" if words else None
    )
    if out is None:
        print_markdown(pair.to_markdown())
    else:
        show_page(pair.save(out), open_it)
