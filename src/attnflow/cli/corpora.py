"""The commands of a corpus: run, status, verify, evaluate, top."""

from pathlib import Path
from typing import Annotated, Any

import typer

from attnflow.core.tables import format_markdown as markdown
from attnflow.cli import evaluating, options as lab
from attnflow.corpus import running as corpus
from attnflow.corpus import tables as corpus_table
from attnflow.errors import FileError, OptionError, printable
from attnflow.show.terminal import print_markdown, say

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
            help="Files: .parquet, .csv, .tsv, .jsonl; packed too.",
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
            show_default=corpus.DEFAULTS["model"],
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(help="Where the texts are; text, sentence or the only column if not given."),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="What rows are called; file and row number if not given.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Labels to keep; importance then watches them.")
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
            help="Which methods, with commas between them.",
            show_default=",".join(corpus.DEFAULTS["methods"]),
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Which layers, like 1,6; all, and for flow the top one, if not given.",
            show_default=False,
        ),
    ] = None,
    position: Annotated[
        str | None,
        typer.Option(
            help="focal, max or mean over positions, or a position.",
            show_default=corpus.DEFAULTS["position"],
        ),
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            help="sum (rows sum to 1), receptive_field, or none.",
            show_default=corpus.DEFAULTS["normalize"],
        ),
    ] = None,
    residual: Annotated[
        float | None,
        typer.Option(
            help="Weight of the residual connection, from 0 up to but not including 1.",
            show_default=str(corpus.DEFAULTS["residual"]),
        ),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(help="blank_out, input_gradient, or both with a comma.", show_default=False),
    ] = None,
    limit: lab.Limit = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that run through the model together.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes, each with a model and one thread; 1, on Ray all cores or GPUs, if not given.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a Ray cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Of a Ray cluster, or auto; one is started here if not given.",
            show_default=False,
        ),
    ] = None,
    shard_rows: Annotated[
        int | None,
        typer.Option(help="Rows of a shard.", show_default=str(corpus.DEFAULTS["shard_rows"])),
    ] = None,
) -> None:
    """Explain every text of some files; the same command resumes after any stop.

    Options that are not given are then those of the run that was stopped.
    """
    try:
        manifest = corpus.explain_corpus(
            inputs,
            out,
            model=model,
            text_column=text_column,
            id_column=id_column,
            label_column=label_column,
            keep=columns_of(keep),
            methods=None if methods is None else lab.split_names(methods),
            layers=None if layers is None else lab.read_layers(layers),
            position=None if position is None else lab.read_name_or_number(position, "--position"),
            normalize=normalize_of(normalize),
            residual=residual,
            importance=None if importance is None else lab.split_names(importance),
            limit=limit,
            batch_tokens=batch_tokens,
            workers=workers,
            engine=engine,
            address=address,
            shard_rows=shard_rows,
            report=lambda note: say(f"note: {note}", err=True),
        )
    except KeyboardInterrupt:
        say(f"attnflow: interrupted {how_far(out)}; the same command resumes the run", err=True)
        raise typer.Exit(130) from None
    say(
        f"{out}: {manifest.rows - manifest.errors:,} texts in {manifest.count:,} shards; {manifest.errors:,} errors"
    )


def columns_of(text: str | None) -> list[str] | None:
    """Columns with commas between them; a name may have spaces."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def normalize_of(text: str | None) -> Any:
    """What --normalize means to `explain_corpus`, to which None is a choice."""
    if text is None:
        return corpus.NOT_GIVEN
    return None if text.lower() == "none" else text


def how_far(folder: Path) -> str:
    """How much of a corpus is done, for whoever has stopped it."""
    try:
        status = corpus_table.corpus_status(folder)
    except FileError:
        return "before the first row"
    return f"after {status.done:,} of {status.rows:,} rows"


@app.command("status")
def status_command(folder: Folder) -> None:
    """How far a run is: rows, shards, errors by reason, rate."""
    say(str(corpus_table.corpus_status(folder)))


@app.command("verify")
def verify_command(folder: Folder) -> None:
    """Check every file of a folder: checksums, columns, counts, no row missing, none twice; exit status 1 if something is wrong."""
    wrong = corpus_table.verify_corpus(folder)
    for line in wrong:
        say(line)
    if wrong:
        raise typer.Exit(1)
    status = corpus_table.corpus_status(folder)
    say(
        f"{folder}: whole; {status.rows:,} rows, {sum(status.errors.values()):,} of them errors, in {status.shards:,} shards"
    )


@app.command("evaluate")
def evaluate_command(
    folder: Folder,
    methods: Annotated[
        str, typer.Option(help="Which of the stored methods; all if not given.", show_default=False)
    ] = "",
    against: Annotated[
        str,
        typer.Option(help="Which of the stored importances; all if not given.", show_default=False),
    ] = "",
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Correlate CLS, SEP and their like too.")
    ] = False,
    limit: lab.Limit = None,
    seed: lab.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Write .md, .csv or .json as well.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Rank correlations from the stored scores, with bootstrap confidence intervals; no model runs."""
    evaluating.evaluate_folder(
        folder, lab.split_names(methods), lab.split_names(against), special_tokens, limit, out, seed
    )


@app.command("top")
def top_command(
    folder: Folder,
    method: Annotated[str, typer.Option(help="One of the stored methods.")] = "rollout",
    k: Annotated[int, typer.Option(help="How many words.")] = 20,
    min_count: Annotated[int, typer.Option(help="Leave out words that occur less often.")] = 5,
    keep_common: Annotated[
        bool, typer.Option("--keep-common", help="Keep common words and punctuation.")
    ] = False,
) -> None:
    """The words with the highest mean token attention, with how often they occur."""
    found = corpus_table.top_words(
        folder, method=method, k=k, min_count=min_count, common=keep_common
    )
    if not found:
        raise OptionError(
            f"no word occurs {min_count} times in {folder}; give a smaller --min-count"
        )
    evaluating.note_unfinished(folder)
    cells = [
        [printable(word).replace("|", "\\|"), f"{mean:.4f}", f"{count:,}"]
        for word, mean, count in found
    ]
    print_markdown("\n".join(markdown(["word", f"mean {method}", "count"], cells)))
