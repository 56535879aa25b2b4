"""The commands of a corpus: run, status, verify, evaluate, top, page."""

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli.evaluating import evaluate_folder, note_unfinished
from attnflow.cli.options import (
    OWN,
    Edges,
    Faithfulness,
    Graph,
    Layer,
    Limit,
    Replacements,
    ReportFile,
    Residual,
    Seed,
    SpecialTokens,
    Statistic,
    TargetOf,
    Undefined,
    Without,
    read_layers,
    read_name_or_number,
    read_normalize,
    read_numbers,
    search_current_folder,
    split_columns,
    split_names,
)
from attnflow.core.files import write_file
from attnflow.core.formatting import format_count, format_markdown
from attnflow.corpus.listing import choose_strip, count_failed, list_texts
from attnflow.corpus.manifest import MANIFEST
from attnflow.corpus.running import DEFAULTS, NOT_GIVEN, NotGiven, explain_corpus
from attnflow.corpus.scores import top_words
from attnflow.corpus.shares import TEXT_KINDS
from attnflow.corpus.status import corpus_status, verify_corpus
from attnflow.errors import FileError, OptionError
from attnflow.show.terminal import print_markdown, print_note, say

GENERATOR = b'<meta name="generator" content="attnflow">'  # in every page of ours
app = typer.Typer(
    help="Explain every text of a data set: a folder of Parquet files, whole after any crash.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", readable=False, help="The folder of a corpus.", show_default=False
    ),
]


@app.command("run")
def run_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            readable=False,
            help="Files: .parquet, .csv, .tsv, .jsonl; compressed too.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            readable=False,
            help="The folder to write; it is completed if begun.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a model, a hub id, or the model that ships with attnflow.",
            show_default=DEFAULTS["model"],
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(help="Where the texts are; by default text, sentence or the only column."),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="What rows are called; by default file and row number.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Labels to keep; importance and gradient edges watch them.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,COLUMN", help="Other columns of the input to keep.", show_default=False
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Which methods, separated by commas; your own as {OWN} or name={OWN}.",
            show_default=",".join(DEFAULTS["methods"]),
        ),
    ] = None,
    edges: Edges = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Which layers, like 1,6; all, and for flow the top one, by default.",
            show_default=False,
        ),
    ] = None,
    position: Annotated[
        str | None,
        typer.Option(
            help="focal, max or mean over positions, or the number of a position.",
            show_default=DEFAULTS["position"],
        ),
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            help="sum (rows sum to 1), receptive_field, or none.",
            show_default=DEFAULTS["normalize"],
        ),
    ] = None,
    residual: Residual = None,
    without: Without = "",
    graph: Graph = None,
    segments: Annotated[
        str | None,
        typer.Option(
            help=f"Shares of {', '.join(TEXT_KINDS)} instead of tokens, by rollout; texts may be"
            " long.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(
            help=f"blank_out, input_gradient, separated by commas; your own as {OWN}.",
            show_default=False,
        ),
    ] = None,
    limit: Limit = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that run through the model together.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes, each with a model and one thread; 1, or all of a Ray cluster.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a Ray cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Of a Ray cluster, or auto; by default one is started here.",
            show_default=False,
        ),
    ] = None,
    shard_rows: Annotated[
        int | None,
        typer.Option(help="Rows per shard.", show_default=str(DEFAULTS["shard_rows"])),
    ] = None,
) -> None:
    """Explain every text of some files; the same command resumes after any stop.

    Options that are not given are then those of the run that was stopped; functions of your own
    must be given again.
    """
    if any(":" in (option or "") for option in (methods, edges, importance, graph)):
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
            methods=None if methods is None else split_names(methods),
            edges=None if edges is None else split_names(edges),
            layers=read_layers(layers),
            position=None if position is None else read_name_or_number(position, "--position"),
            normalize=read_choice(normalize),
            residual=residual,
            without=read_numbers(without, "--without") or None,
            graph=graph,
            segments=segments,
            importance=None if importance is None else split_names(importance),
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
            f"attnflow: interrupted {tell_progress(out)}; the same command resumes the run",
            err=True,
        )
        raise typer.Exit(130) from None
    say(
        f"{out}: {format_count(manifest.rows - manifest.errors, 'text')}"
        f" in {format_count(manifest.count, 'shard')}; {format_count(manifest.errors, 'error')}"
    )


def read_choice(normalize: str | None) -> str | NotGiven | None:
    """What --normalize means to `explain_corpus`, to which None is a choice."""
    return NOT_GIVEN if normalize is None else read_normalize(normalize)


def tell_progress(folder: Path) -> str:
    """How much of a corpus is done, for whoever has stopped it."""
    try:
        status = corpus_status(folder)
    except FileError:
        return "before the first row"
    return f"after {status.done:,} of {format_count(status.rows, 'row')}"


@app.command("status")
def status_command(folder: Folder) -> None:
    """How far a run is: rows, shards, errors by reason, rate."""
    say(str(corpus_status(folder)))


@app.command("verify")
def verify_command(folder: Folder) -> None:
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


@app.command("evaluate")
def evaluate_command(
    folder: Folder,
    methods: Annotated[
        str,
        typer.Option(
            help="Which of the stored methods, like rollout,contribution rollout; all by default.",
            show_default=False,
        ),
    ] = "",
    against: Annotated[
        str,
        typer.Option(help="Which of the stored importances; all by default.", show_default=False),
    ] = "",
    special_tokens: SpecialTokens = False,
    limit: Limit = None,
    faithfulness: Faithfulness = "",
    replacement: Replacements = "",
    target_of: TargetOf = "probability",
    statistic: Statistic = "spearman",
    undefined: Undefined = "drop",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For faithfulness: where the model of the corpus is now, if not where it was.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    out: ReportFile = None,
) -> None:
    """Rank correlations from the stored scores, with bootstrap confidence intervals.

    No model runs, but for faithfulness: that of the corpus, on perturbed texts.
    """
    names = split_columns(methods), split_columns(against)
    yardsticks = faithfulness, replacement, target_of, statistic, undefined
    evaluate_folder(folder, *names, special_tokens, limit, out, *yardsticks, seed, model)


@app.command("top")
def top_command(
    folder: Folder,
    method: Annotated[
        str, typer.Option(help="One of the stored methods, like rollout or contribution rollout.")
    ] = "rollout",
    k: Annotated[int, typer.Option(help="How many words.")] = 20,
    min_count: Annotated[int, typer.Option(help="Leave out words that occur less often.")] = 5,
    keep_common: Annotated[
        bool, typer.Option("--keep-common", help="Keep common words and punctuation.")
    ] = False,
) -> None:
    """The words with the highest mean token attention, with how often they occur."""
    words = top_words(folder, method=method, k=k, min_count=min_count, common=keep_common)
    if not words:
        raise OptionError(
            f"no word occurs {min_count} times in {folder}; give a smaller --min-count"
        )
    note_unfinished(folder)
    rows = [(word, f"{mean:.4f}", f"{count:,}") for word, mean, count in words]
    print_markdown("\n".join(format_markdown(["word", f"mean {method}", "count"], rows)))


@app.command("page")
def page_command(
    folder: Folder,
    out: Annotated[
        Path,
        typer.Option(
            readable=False,
            metavar="FOLDER",
            help="Where index.html is written, and a page per text below it.",
            show_default=False,
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help="The stored result that the list shows, like rollout.",
            show_default="rollout if it is stored",
        ),
    ] = None,
    layer: Layer = None,
    limit: Annotated[int, typer.Option(min=1, help="The maximum number of texts.")] = 200,
) -> None:
    """Write pages of a corpus: a sortable list of coloured texts, each of which opens its page."""
    from attnflow.show.strip_pages import corpus_index, stored_text_page

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
        write_text(out / place, stored_text_page(text, "../index.html"))
    for stale in sorted(set((out / "texts").glob("[0-9]*.html")) - {out / at for at in places}):
        stale.unlink()  # of a run with more texts
    notes = [failed] if failed else []
    write_text(out / "index.html", corpus_index(texts, places, name, number, folder.name, notes))
    say(f"written: {out / 'index.html'}, with {format_count(len(texts), 'text')}")


def check_page_folder(out: Path) -> None:
    """Refuse a folder whose files are not pages that attnflow wrote."""
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
    """Write a page, beside and then renamed."""
    write_file(path, lambda file: file.write(text.encode(errors="backslashreplace")))
