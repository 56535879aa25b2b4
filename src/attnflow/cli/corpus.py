"""The commands of a corpus: run, status, verify, evaluate, top, page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from attnflow.analysis.importance.importances import IMPORTANCES
from attnflow.analysis.job import TEXT_SEGMENTS
from attnflow.cli.evaluate import evaluate_folder, note_unfinished
from attnflow.cli.options import (
    OWN,
    Edges,
    FoilFlags,
    GraphFlags,
    LayerOption,
    Limit,
    ScoringFlags,
    Seed,
    check_known_name,
    expand_options,
    parse_layers,
    read_name_or_number,
    read_normalize,
    read_numbers,
    search_current_folder,
    split_columns,
    split_names,
)
from attnflow.cli.output import ReportFile
from attnflow.core.io.files import write_file
from attnflow.core.io.formatting import format_count, format_markdown
from attnflow.core.methods import METHODS
from attnflow.corpus.explain_corpus import NOT_GIVEN, explain_corpus
from attnflow.corpus.job import CorpusOptions
from attnflow.corpus.manifest import MANIFEST
from attnflow.corpus.scores import top_words
from attnflow.corpus.status import corpus_status, verify_corpus
from attnflow.corpus.stored_texts import choose_strip, count_failed, list_texts
from attnflow.edges.edge_weight import EDGES
from attnflow.errors import FileError, OptionError
from attnflow.show.terminal.tables import print_markdown, print_note, say

GENERATOR = b'<meta name="generator" content="attnflow">'  # in every page that attnflow writes
corpus_app = typer.Typer(
    help="Explain every text of a data set: a folder of Parquet files, whole after any crash.",
    no_args_is_help=True,
)

CorpusFolder = Annotated[
    Path, typer.Argument(metavar="DIR", readable=False, help="The folder of a corpus.")
]


@corpus_app.command("run")
@expand_options
def run_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            readable=False,
            help="Files: .parquet, .csv, .tsv, .jsonl; compressed too.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", readable=False, help="The folder to write; it is completed if begun."
        ),
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a model, a hub id, or the model that ships with attnflow.",
            show_default=str(CorpusOptions.model),
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(help="Where the texts are; by default text, sentence or the only column."),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="The ids of rows; by default file and row number.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Labels to keep; importance and gradient edges watch them.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="COLUMN,COLUMN", help="Other columns of the input to keep."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Which methods, separated by commas; your own as {OWN} or name={OWN}.",
            show_default=",".join(METHODS),
        ),
    ] = None,
    edges: Edges = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Which layers, like 1,6; all, and for flow the top one, by default."),
    ] = None,
    position: Annotated[
        str | None,
        typer.Option(
            help="focal, max or mean over positions, or the number of a position.",
            show_default=str(CorpusOptions.position),
        ),
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            help="sum (rows sum to 1), receptive_field, or none.",
            show_default=str(CorpusOptions.normalize),
        ),
    ] = None,
    graph: GraphFlags,
    segments: Annotated[
        str | None,
        typer.Option(
            help=f"Shares of {', '.join(TEXT_SEGMENTS)} instead of tokens, by rollout; texts may be"
            " long."
        ),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(help=f"blank_out, input_gradient, separated by commas; your own as {OWN}."),
    ] = None,
    foil: FoilFlags,
    limit: Limit = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens that run through the model together.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes, each with a model and one thread; 1, or all of a Ray cluster."
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a Ray cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A Ray cluster, or auto; by default one is started here."
        ),
    ] = None,
    shard_rows: Annotated[
        int | None,
        typer.Option(help="Rows per shard.", show_default=str(CorpusOptions.shard_rows)),
    ] = None,
) -> None:
    """Explain every text of some files; the same command resumes after any stop.

    Options that are not given are then those of the run that was stopped; functions of your own
    must be given again.
    """
    if graph.graph is not None:
        search_current_folder()
    try:
        manifest = explain_corpus(
            inputs,
            out,
            model=model,
            text_column=text_column,
            id_column=id_column,
            label_column=label_column,
            keep=None if keep is None else split_columns(keep),
            methods=list_references(methods, METHODS, "method"),
            edges=list_references(edges, EDGES, "edge weight"),
            layers=parse_layers(layers),
            position=None if position is None else read_name_or_number(position, "--position"),
            normalize=NOT_GIVEN if normalize is None else read_normalize(normalize),
            residual=graph.residual,
            without=read_numbers(graph.without, "--without") or None,
            graph=graph.graph,
            segments=segments,
            importance=list_references(importance, IMPORTANCES, "importance"),
            foil=foil.read(),
            limit=limit,
            batch_tokens=batch_tokens,
            workers=workers,
            engine=engine,
            address=address,
            shard_rows=shard_rows,
            report=lambda note: say(f"note: {note}", err=True),
        )
    except KeyboardInterrupt:
        say(
            f"attnflow: interrupted {describe_progress(out)}; the same command resumes the run",
            err=True,
        )
        raise typer.Exit(130) from None
    say(
        f"{out}: {format_count(manifest.rows - manifest.errors, 'text')}"
        f" in {format_count(manifest.count, 'shard')}; {format_count(manifest.errors, 'error')}"
    )


def list_references(text: str | None, known: Mapping[str, object], what: str) -> list[str] | None:
    """Names, and references to functions, which each worker imports; None if not given."""
    if text is None:
        return None
    names = split_names(text)
    for name in names:
        if ":" in name:
            search_current_folder()
        else:
            check_known_name(name, known, what, f", or give a function as {OWN}")
    return names


def describe_progress(folder: Path) -> str:
    """How far a run got before it was interrupted."""
    try:
        status = corpus_status(folder)
    except FileError:
        return "before the first row"
    return f"after {status.done:,} of {format_count(status.rows, 'row')}"


@corpus_app.command("status")
def status_command(folder: CorpusFolder) -> None:
    """Show how far a run is: rows, shards, errors by reason, rate."""
    say(str(corpus_status(folder)))


@corpus_app.command("verify")
def verify_command(folder: CorpusFolder) -> None:
    """Check every file of a folder: checksums, columns, counts, no row missing, none twice.

    The exit status is 1 if something is wrong.
    """
    faults = verify_corpus(folder)
    for fault in faults:
        say(fault)
    if faults:
        raise typer.Exit(1)
    status = corpus_status(folder)
    say(
        f"{folder}: whole; {format_count(status.rows, 'row')} in"
        f" {format_count(status.shards, 'shard')};"
        f" {format_count(sum(status.errors.values()), 'error')}"
    )


@corpus_app.command("evaluate")
@expand_options
def corpus_evaluate_command(
    folder: CorpusFolder,
    *,
    methods: Annotated[
        str,
        typer.Option(
            help="Which of the stored methods, like rollout,contribution rollout; all by default."
        ),
    ] = "",
    against: Annotated[
        str, typer.Option(help="Which of the stored importances; all by default.")
    ] = "",
    scoring: ScoringFlags,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For faithfulness: where the model of the corpus is now, if not where it was.",
        ),
    ] = None,
    seed: Seed = 0,
    out: ReportFile = None,
) -> None:
    """Rank correlations from the stored scores, with bootstrap confidence intervals.

    No model runs, but for faithfulness: that of the corpus, on perturbed texts.
    """
    names = split_columns(methods), split_columns(against)
    evaluate_folder(folder, *names, scoring, out, seed=seed, model=model)


@corpus_app.command("top")
def top_command(
    folder: CorpusFolder,
    method: Annotated[
        str, typer.Option(help="One of the stored methods, like rollout or contribution rollout.")
    ] = "rollout",
    k: Annotated[int, typer.Option(help="How many words.")] = 20,
    min_count: Annotated[int, typer.Option(help="Leave out words that occur less often.")] = 5,
    keep_common: Annotated[
        bool, typer.Option("--keep-common", help="Keep common words and punctuation.")
    ] = False,
) -> None:
    """List the words with the highest mean token attention, and how often they occur."""
    words = top_words(folder, method=method, k=k, min_count=min_count, common=keep_common)
    if not words:
        raise OptionError(
            f"no word occurs {min_count} times in {folder}; give a smaller --min-count"
        )
    note_unfinished(folder)
    rows = [(word, f"{mean:.4f}", f"{count:,}") for word, mean, count in words]
    print_markdown("\n".join(format_markdown(["word", f"mean {method}", "count"], rows)))


@corpus_app.command("page")
def page_command(
    folder: CorpusFolder,
    out: Annotated[
        Path,
        typer.Option(
            readable=False,
            metavar="FOLDER",
            help="Where index.html is written, and a page per text below it.",
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help="The stored result that the list shows, like rollout.",
            show_default="rollout if it is stored",
        ),
    ] = None,
    layer: LayerOption = None,
    limit: Annotated[int, typer.Option(min=1, help="The maximum number of texts.")] = 200,
) -> None:
    """Write pages of a corpus: a sortable list of coloured texts, each of which opens its page."""
    from attnflow.corpus.text_pages import describe_text, describe_texts
    from attnflow.show.page.page import fill_strips

    name, number = choose_strip(folder, method, layer)
    check_page_folder(out)
    texts = list(list_texts(folder, limit=limit))
    failed = count_failed(folder)
    if failed:
        print_note(failed)
    note_unfinished(folder)
    places = [f"texts/{place:06}.html" for place in range(len(texts))]
    (out / "texts").mkdir(parents=True, exist_ok=True)
    for text, place in zip(texts, places, strict=True):
        write_text(out / place, fill_strips(describe_text(text, "../index.html")))
    for stale in sorted(set((out / "texts").glob("[0-9]*.html")) - {out / at for at in places}):
        stale.unlink()  # of a run with more texts
    notes = [failed] if failed else []
    index = describe_texts(texts, places, name, number, folder.name, notes)
    write_text(out / "index.html", fill_strips(index))
    say(f"written: {out / 'index.html'}, with {format_count(len(texts), 'text')}")


def check_page_folder(out: Path) -> None:
    """Refuse a folder that holds pages of other programs, or a corpus."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"--out must be a folder; got {out}, a file: give another name")
    strangers = [
        path
        for path in (out / "index.html", *sorted((out / "texts").glob("[0-9]*.html")))
        if path.exists() and GENERATOR not in path.read_bytes()[:2000]
    ]
    if strangers or (out / MANIFEST).exists():
        found = strangers[0] if strangers else out / MANIFEST
        raise OptionError(
            f"pages of a corpus go into a folder of their own; {found} was not written by corpus"
            " page: give another folder"
        )


def write_text(path: Path, text: str) -> None:
    """Write a page to a temporary file, and rename it."""
    write_file(path, lambda file: file.write(text.encode(errors="backslashreplace")))
