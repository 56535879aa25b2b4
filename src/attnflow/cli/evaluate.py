"""`attnflow evaluate`: rank correlations of methods with importance, on texts or on a corpus."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from attnflow.analysis.evaluate.evaluate import evaluate
from attnflow.analysis.evaluate.examples import check_lines, read_text_lines
from attnflow.analysis.evaluate.report import Report
from attnflow.analysis.evaluate.truth.families import TRUTH_FAMILIES
from attnflow.analysis.evaluate.truth.truth_prompts import read_families, truth_prompts
from attnflow.analysis.evaluate.truth.truth_report import TruthReport
from attnflow.analysis.evaluate.yardsticks import check_best
from attnflow.analysis.importance.importances import IMPORTANCES
from attnflow.analysis.job import Job
from attnflow.analysis.statistics import check_statistic
from attnflow.cli.options import (
    Edges,
    FoilFlags,
    Functions,
    GraphFlags,
    LayersOption,
    PositionChoice,
    ScoringFlags,
    SomeImportances,
    SomeMethods,
    expand_options,
    parse_layers,
    read_name_or_number,
    read_named,
    split_columns,
    split_names,
)
from attnflow.cli.output import ReportFile, check_out
from attnflow.core.io.formatting import format_count
from attnflow.core.io.tables import TABLE_ENDINGS
from attnflow.core.methods import METHODS
from attnflow.corpus.manifest import MANIFEST
from attnflow.corpus.scores import evaluate_corpus
from attnflow.corpus.status import corpus_status
from attnflow.edges.edge_weight import EDGES
from attnflow.errors import OptionError
from attnflow.models.load import load
from attnflow.show.terminal.tables import print_markdown, say

PROMPTS = 50
GIVEN_FOIL = "given"  # with --truth: the wrong word that each prompt suggests


@dataclass(frozen=True)
class TruthFlags:
    """Prompts whose true token is known, in place of a file."""

    truth: Annotated[
        bool,
        typer.Option(
            "--truth",
            help="Make prompts whose true token is known, in place of a file, and say where it is"
            " ranked; for causal language models.",
        ),
    ] = False
    count: Annotated[
        int | None, typer.Option(min=1, help="With --truth: the number of prompts; 50 by default.")
    ] = None
    families: Annotated[
        str | None,
        typer.Option(
            help=f"With --truth: which families, separated by commas: {', '.join(TRUTH_FAMILIES)}."
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, help="With --truth: the seed of the prompts.")
    ] = None


class JudgedArguments(TypedDict):
    """What is judged, for `evaluate`."""

    methods: Functions | None
    edges: Functions | None
    against: Functions | None


@dataclass(frozen=True)
class JudgedFlags:
    """What is judged, and what it is compared with."""

    methods: SomeMethods = None
    edges: Edges = None
    against: SomeImportances = None

    def read(self) -> JudgedArguments:
        """The arguments of `evaluate`."""
        return {
            "methods": read_named(self.methods, METHODS, "method"),
            "edges": read_named(self.edges, EDGES, "edge weight"),
            "against": read_named(self.against, IMPORTANCES, "importance"),
        }


@dataclass(frozen=True)
class PlaceFlags:
    """What is ranked of each text."""

    layers: LayersOption = None
    position: PositionChoice = "focal"
    sanity: Annotated[
        bool,
        typer.Option(
            "--sanity", help="Rank again while weights are randomised from the top, on a copy."
        ),
    ] = False


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
    judged: JudgedFlags,
    place: PlaceFlags,
    foil: FoilFlags,
    graph: GraphFlags,
    scoring: ScoringFlags,
    truth: TruthFlags,
    differences: Annotated[
        bool,
        typer.Option(
            "--differences", help="Compare all methods in pairs, in the top layer, as well."
        ),
    ] = False,
    out: ReportFile = None,
) -> None:
    """Measure how well methods rank the tokens of many texts.

    Rank correlation with blank-out and input gradients, and faithfulness: how far the prediction
    falls when the tokens of the highest scores are taken away. With --truth, the rank of the token
    that decides a language model's answer, on prompts where it is known.
    """
    check_out(out, TABLE_ENDINGS)
    report: Report | TruthReport
    if truth != TruthFlags() and not truth.truth:
        raise OptionError("--count, --families and --seed are for prompts; give --truth as well")
    if truth.truth:
        others = (file, place, graph, replace(scoring, limit=None))
        if others != (None, PlaceFlags(), GraphFlags(), ScoringFlags()):
            raise OptionError(
                "prompts of --truth are judged by the rank of their true token: leave out the file,"
                " and all options but --methods, --edges, --against, --foil, --runner-up, --count,"
                " --families, --seed, --limit, --differences, --out"
            )
        report = evaluate_prompts(model, judged, foil, truth, scoring.limit)
    elif file is not None:
        report = evaluate_file(model, file, judged, place, foil, graph, scoring)
    else:
        given = (judged.edges, place, foil, graph)
        is_as_computed = given == (None, PlaceFlags(), FoilFlags(), GraphFlags())
        check_stored(model, is_as_computed, differences)
        methods, against = (split_columns(each or "") for each in (judged.methods, judged.against))
        evaluate_folder(Path(model), methods, against, scoring, out)
        return
    if out is not None:
        report.save(out)
    print_markdown(report.to_markdown())
    if differences:
        print_markdown(report.differences().to_markdown())
    note_interruption(report)


def check_stored(model: str, is_as_computed: bool, differences: bool) -> None:
    """Refuse what is no folder of a corpus, and options that its results do not take."""
    if not (Path(model) / MANIFEST).is_file():
        raise OptionError(
            "evaluate needs a model and a file of texts (or --truth), or the folder of a corpus"
            f" alone; got {model!r}"
        )
    if not is_as_computed:
        raise OptionError(
            "a corpus is evaluated as it was computed: leave out --layers, --position,"
            " --foil, --runner-up, --residual, --without, --graph, --edges, --sanity"
        )
    if differences:
        raise OptionError("--differences is for texts in a file; leave it out for a corpus")


def evaluate_file(
    model: str,
    file: Path,
    judged: JudgedFlags,
    place: PlaceFlags,
    foil: FoilFlags,
    graph: GraphFlags,
    scoring: ScoringFlags,
) -> Report:
    """Evaluate the texts of a file; file and options are checked before the model is loaded."""
    chosen, made, scored = judged.read(), graph.read(), scoring.read()
    numbers = parse_layers(place.layers)
    position = read_name_or_number(place.position, "--position")
    check_statistic(scoring.statistic, scoring.undefined)
    job = Job.read(
        methods=chosen["methods"],
        edges=chosen["edges"],
        importance=chosen["against"],
        layers=numbers,
        position=position,
        foil=foil.read(),
        faithfulness=scored["faithfulness"],
        target_of=scoring.target_of,
        **made,
    )
    check_best(scoring.best, job.faithfulness)
    lines = read_text_lines(file, scoring.limit)
    loaded = load(model)
    return evaluate(
        loaded,
        check_lines(loaded, lines),
        layers=numbers,
        position=position,
        foil=foil.read(),
        sanity=place.sanity,
        **chosen,
        **made,
        **scored,
    )


def evaluate_prompts(
    model: str, judged: JudgedFlags, foil: FoilFlags, truth: TruthFlags, limit: int | None
) -> TruthReport:
    """Make prompts with known truth, print how many passed the checks, and evaluate on them."""
    chosen = judged.read()
    Job.read(methods=chosen["methods"], edges=chosen["edges"], importance=chosen["against"])
    families = None if truth.families is None else read_families(split_names(truth.families))
    loaded = load(model)
    prompts = truth_prompts(
        loaded, families=families, count=truth.count or PROMPTS, seed=truth.seed or 0
    )
    print_markdown(prompts.to_markdown())
    against = prompts.foils if foil.foil == GIVEN_FOIL else foil.read()
    return evaluate(loaded, prompts, foil=against, limit=limit, **chosen)


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


def note_interruption(report: Report | TruthReport) -> None:
    """Note on standard error that an evaluation was interrupted."""
    done = report.prompts if isinstance(report, TruthReport) else report.examples
    if len(done) < report.asked:
        asked = format_count(report.asked, "example")
        say(f"note: interrupted after {len(done):,} of {asked}", err=True)
