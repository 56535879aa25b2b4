"""The command that sets two explanations side by side: compare."""

from typing import Annotated

import typer

from attnflow.analysis.explain.compare import compare
from attnflow.analysis.explain.explain import explain
from attnflow.cli.options import (
    LayerOption,
    Truncation,
    check_known_name,
    expand_options,
    split_columns,
)
from attnflow.cli.output import ComparisonOutput
from attnflow.core.methods import METHODS
from attnflow.edges.edge_weight import EDGES, split_name
from attnflow.errors import OptionError
from attnflow.models.load import BUNDLED
from attnflow.show.terminal.tables import print_markdown


@expand_options
def compare_command(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT [TEXT]", help="One text, or two.")],
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder with a model or a hub id, once or twice; the model that ships with"
            " attnflow by default."
        ),
    ] = None,
    results: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME",
            help='One result, or two: "rollout,contribution rollout"; what explain shows first by'
            " default.",
        ),
    ] = "",
    layer: LayerOption = None,
    words: Annotated[
        bool,
        typer.Option(
            "--words", help="Align words instead of tokens, as is always done for two models."
        ),
    ] = False,
    truncation: Truncation = False,
    output: ComparisonOutput,
) -> None:
    """Compare two texts, two models, or two methods: what each reads, and the difference."""
    output.check()
    models, names = model or [BUNDLED], split_columns(results)
    counts = {"text": len(texts), "--model": len(models), "name in --results": len(names)}
    for what, count in counts.items():
        if count > 2:
            raise OptionError(f"two are compared; got {count} of {what}")
    if max(counts.values()) < 2:
        raise OptionError(
            "two are compared: give two texts, --model twice, or two names in --results"
        )
    methods, edges = split_results(names)
    explanations = [
        explain(
            text,
            model=name,
            methods=methods or None,
            edges=edges or None,
            importance=(),
            truncation=truncation,
        )
        for text, name in zip((texts[0], texts[-1]), (models[0], models[-1]), strict=True)
    ]
    pair = compare(
        *explanations,
        methods=(names[0], names[-1]) if names else None,
        layer=layer,
        unit="word" if words else None,
    )
    if output.out is None:
        print_markdown(pair.to_markdown())
    else:
        output.write(pair)


def split_results(names: list[str]) -> tuple[list[str], list[str]]:
    """The methods and the edges of results, each once.

    >>> split_results(["rollout", "contribution rollout"])
    (['rollout'], ['attention', 'contribution'])
    """
    parts = [split_name(name) for name in names]
    for edges, method in parts:
        check_known_name(edges, EDGES, "edges")
        check_known_name(method, METHODS, "method")
    methods = dict.fromkeys(method for _, method in parts)
    return list(methods), list(dict.fromkeys(edges for edges, _ in parts))
