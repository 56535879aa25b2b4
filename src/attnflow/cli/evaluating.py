"""`attnflow evaluate`: rank correlations of methods with importance, on texts or on a corpus."""

from pathlib import Path
from typing import Annotated

import typer

from attnflow.analysis.evaluation import evaluate
from attnflow.analysis.examples import read_examples
from attnflow.analysis.importance import IMPORTANCES
from attnflow.analysis.report import Report
from attnflow.cli.options import (
    Edges,
    Faithfulness,
    Graph,
    Importances,
    Layers,
    Limit,
    Methods,
    Query,
    Replacements,
    ReportFile,
    Residual,
    SpecialTokens,
    Statistic,
    TargetOf,
    Undefined,
    Without,
    check_out,
    import_own,
    read_edge_names,
    read_functions,
    read_layers,
    read_name_or_number,
    read_numbers,
    read_replacements,
    split_columns,
)
from attnflow.core.formatting import format_count
from attnflow.core.methods import METHODS
from attnflow.core.tables import TABLE_ENDINGS
from attnflow.corpus.manifest import MANIFEST
from attnflow.corpus.scores import evaluate_corpus
from attnflow.corpus.status import corpus_status
from attnflow.errors import OptionError
from attnflow.models.loading import load
from attnflow.show.terminal import print_markdown, say

ALL_METHODS, ALL_IMPORTANCES = ",".join(METHODS), ",".join(IMPORTANCES)


def evaluate_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a model, a hub id, or verb-number; or a corpus folder, alone.",
            show_default=False,
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            help="A .tsv or .csv file: one text per line, then its label.",
            show_default=False,
        ),
    ] = None,
    methods: Methods = ALL_METHODS,
    edges: Edges = None,
    against: Importances = ALL_IMPORTANCES,
    layers: Layers = None,
    limit: Limit = None,
    special_tokens: SpecialTokens = False,
    query: Query = "focal",
    residual: Residual = None,
    without: Without = "",
    graph: Graph = None,
    faithfulness: Faithfulness = "",
    replacement: Replacements = "",
    target_of: TargetOf = "probability",
    statistic: Statistic = "spearman",
    undefined: Undefined = "drop",
    differences: Annotated[
        bool,
        typer.Option(
            "--differences", help="Compare all methods in pairs, in the top layer, as well."
        ),
    ] = False,
    sanity: Annotated[
        bool,
        typer.Option(
            "--sanity", help="Rank again while weights are randomised from the top, on a copy."
        ),
    ] = False,
    out: ReportFile = None,
) -> None:
    """Measure how well methods rank the tokens of many texts.

    Rank correlation with blank-out and input gradients, and faithfulness: how far the prediction
    falls when the tokens of the highest scores are taken away.
    """
    if file is None:
        if not (Path(model) / MANIFEST).is_file():
            raise OptionError(
                "evaluate needs a model and a file of texts, or the folder of a corpus alone;"
                f" got {model!r}"
            )
        given = (layers or None, query, residual, without or None, graph, edges, sanity)
        if given != (None, "focal", None, None, None, None, False):
            raise OptionError(
                "a corpus is evaluated as it was computed: leave out --layers, --query,"
                " --residual, --without, --graph, --edges, --sanity"
            )
        wanted = (
            [] if methods == ALL_METHODS else split_columns(methods),
            [] if against == ALL_IMPORTANCES else split_columns(against),
        )
        if differences:
            raise OptionError("--differences is for texts in a file; leave it out for a corpus")
        chosen_yardsticks = faithfulness, replacement, target_of, statistic, undefined
        evaluate_folder(Path(model), *wanted, special_tokens, limit, out, *chosen_yardsticks)
        return
    check_out(out, TABLE_ENDINGS)
    chosen = read_layers(layers)
    functions = read_functions(methods, "method"), read_functions(against, "importance")
    taken_out = read_numbers(without, "--without")
    loaded = load(model)
    report = evaluate(
        loaded,
        read_examples(file, loaded, limit),
        methods=functions[0],
        edges=read_edge_names(edges) or "attention",
        against=functions[1],
        layers=chosen,
        limit=limit,
        special_tokens=special_tokens,
        query=read_name_or_number(query, "--query"),
        residual=residual,
        without=taken_out,
        graph=None if graph is None else import_own(graph, "graph"),
        faithfulness=read_functions(faithfulness, "metric"),
        replacement=read_replacements(replacement),
        target_of=target_of,
        statistic=statistic,
        undefined=undefined,
        sanity=sanity,
    )
    if out is not None:
        report.save(out)
    print_markdown(report.to_markdown())
    if differences:
        print_markdown(report.differences().to_markdown())
    note_interruption(report)


def evaluate_folder(
    folder: Path,
    methods: list[str],
    against: list[str],
    special_tokens: bool,
    limit: int | None,
    out: Path | None,
    faithfulness: str,
    replacement: str,
    target_of: str,
    statistic: str,
    undefined: str,
    seed: int = 0,
    model: str | None = None,
) -> None:
    """What the scores that a corpus holds are worth; of all that is stored by default."""
    check_out(out, TABLE_ENDINGS)
    report = evaluate_corpus(
        folder,
        methods=methods or None,
        against=against or None,
        special_tokens=special_tokens,
        limit=limit,
        seed=seed,
        statistic=statistic,
        undefined=undefined,
        faithfulness=read_functions(faithfulness, "metric"),
        replacement=read_replacements(replacement),
        target_of=target_of,
        model=model,
    )
    if out is not None:
        report.save(out)
    note_unfinished(folder)
    print_markdown(report.to_markdown())


def note_unfinished(folder: Path) -> None:
    """Say so, if a corpus is not whole yet."""
    status = corpus_status(folder)
    if not status.finished:
        say(
            f"note: {folder} is not finished: {status.done:,} of"
            f" {format_count(status.rows, 'row')} so far",
            err=True,
        )


def note_interruption(report: Report) -> None:
    """Say so, if an evaluation was interrupted."""
    if len(report.examples) < report.asked:
        asked = format_count(report.asked, "example")
        say(f"note: interrupted after {len(report.examples):,} of {asked}", err=True)
