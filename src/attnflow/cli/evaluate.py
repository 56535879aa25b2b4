"""`attnflow evaluate`: rank correlations of methods with importance, on texts or on a corpus."""

from pathlib import Path
from typing import Annotated

import typer

from attnflow.analysis.evaluate.evaluate import evaluate
from attnflow.analysis.evaluate.examples import read_examples
from attnflow.analysis.evaluate.report import Report
from attnflow.analysis.importance.importances import IMPORTANCES, PAPER_IMPORTANCES
from attnflow.analysis.job import Job
from attnflow.cli.options import (
    Edges,
    FoilFlags,
    GraphFlags,
    Importances,
    LayersOption,
    Methods,
    PositionChoice,
    ScoringFlags,
    expand_options,
    parse_layers,
    read_edge_names,
    read_functions,
    read_name_or_number,
    split_columns,
)
from attnflow.cli.output import ReportFile, check_out
from attnflow.core.io.formatting import format_count
from attnflow.core.io.tables import TABLE_ENDINGS
from attnflow.core.methods import METHODS
from attnflow.corpus.manifest import MANIFEST
from attnflow.corpus.scores import evaluate_corpus
from attnflow.corpus.status import corpus_status
from attnflow.errors import OptionError
from attnflow.models.load import load
from attnflow.show.terminal.tables import print_markdown, say

ALL_METHODS, ALL_IMPORTANCES = ",".join(METHODS), ",".join(PAPER_IMPORTANCES)


@expand_options
def evaluate_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a model, a hub id, or verb-number; or a corpus folder, alone.",
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False, help="A .tsv or .csv file: one text per line, then its label."
        ),
    ] = None,
    *,
    methods: Methods = ALL_METHODS,
    edges: Edges = None,
    against: Importances = ALL_IMPORTANCES,
    layers: LayersOption = None,
    position: PositionChoice = "focal",
    foil: FoilFlags,
    graph: GraphFlags,
    scoring: ScoringFlags,
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
    check_out(out, TABLE_ENDINGS)
    if file is None:
        if not (Path(model) / MANIFEST).is_file():
            raise OptionError(
                "evaluate needs a model and a file of texts, or the folder of a corpus alone;"
                f" got {model!r}"
            )
        computed = (layers or None, position, foil, graph, edges, sanity)
        if computed != (None, "focal", FoilFlags(), GraphFlags(), None, False):
            raise OptionError(
                "a corpus is evaluated as it was computed: leave out --layers, --position,"
                " --foil, --runner-up, --residual, --without, --graph, --edges, --sanity"
            )
        if differences:
            raise OptionError("--differences is for texts in a file; leave it out for a corpus")
        stored = [] if methods == ALL_METHODS else split_columns(methods)
        importances = [] if against == ALL_IMPORTANCES else split_columns(against)
        evaluate_folder(Path(model), stored, importances, scoring, out)
        return
    chosen = read_functions(methods, METHODS, "method")
    yardsticks = read_functions(against, IMPORTANCES, "importance")
    numbers, kinds, made = parse_layers(layers), read_edge_names(edges), graph.read()
    place, against_foil = read_name_or_number(position, "--position"), foil.read()
    Job.read(
        methods=chosen,
        edges=kinds or "attention",
        importance=yardsticks,
        layers=numbers,
        position=place,
        foil=against_foil,
        target_of=scoring.target_of,
        **made,
    )
    loaded = load(model)
    report = evaluate(
        loaded,
        read_examples(file, loaded, scoring.limit),
        methods=chosen,
        edges=kinds or "attention",
        against=yardsticks,
        layers=numbers,
        position=place,
        foil=against_foil,
        sanity=sanity,
        **made,
        **scoring.read(),
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
    scoring: ScoringFlags,
    out: Path | None,
    *,
    seed: int = 0,
    model: str | None = None,
) -> None:
    """Evaluate the stored scores of a corpus, all of them if no names are given."""
    check_out(out, TABLE_ENDINGS)
    report = evaluate_corpus(
        folder,
        methods=methods or None,
        against=against or None,
        seed=seed,
        model=model,
        **scoring.read(),
    )
    if out is not None:
        report.save(out)
    note_unfinished(folder)
    print_markdown(report.to_markdown())


def note_unfinished(folder: Path) -> None:
    """Note on standard error that a corpus is not finished."""
    status = corpus_status(folder)
    if not status.finished:
        say(
            f"note: {folder} is not finished: {status.done:,} of"
            f" {format_count(status.rows, 'row')} so far",
            err=True,
        )


def note_interruption(report: Report) -> None:
    """Note on standard error that an evaluation was interrupted."""
    if len(report.examples) < report.asked:
        asked = format_count(report.asked, "example")
        say(f"note: interrupted after {len(report.examples):,} of {asked}", err=True)
