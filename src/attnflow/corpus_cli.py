"""The commands of a corpus: run, status, verify, evaluate, top."""

from pathlib import Path
from typing import Annotated

import typer

from attnflow import corpus, corpus_table, lab
from attnflow.errors import OptionError, printable
from attnflow.evaluate import markdown
from attnflow.graph import RESIDUAL
from attnflow.loading import BUNDLED
from attnflow.terminal import print_markdown, say

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
    model: lab.AnyModel = BUNDLED,
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
    methods: Annotated[
        str, typer.Option(help="Which methods, with commas between them.")
    ] = "raw,rollout,flow",
    layers: Annotated[
        str,
        typer.Option(
            help="Which layers, like 1,6; all, and for flow the top one, if not given.",
            show_default=False,
        ),
    ] = "",
    position: Annotated[
        str, typer.Option(help="focal, max or mean over positions, or a position.")
    ] = "focal",
    normalize: Annotated[
        str, typer.Option(help="sum (rows sum to 1), receptive_field, or none.")
    ] = "sum",
    residual: Annotated[
        float,
        typer.Option(help="Weight of the residual connection, from 0 up to but not including 1."),
    ] = RESIDUAL,
    importance: Annotated[
        str,
        typer.Option(help="blank_out, input_gradient, or both with a comma.", show_default=False),
    ] = "",
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
    shard_rows: Annotated[int, typer.Option(help="Rows of a shard.")] = corpus.SHARD_ROWS,
) -> None:
    """Explain every text of some files; the same command goes on after any stop."""
    manifest = corpus.explain_corpus(
        inputs,
        out,
        model=model,
        text_column=text_column,
        id_column=id_column,
        label_column=label_column,
        methods=lab.listed(methods),
        layers=lab.layers_of(layers),
        position=lab.name_or_number(position, "--position"),
        normalize=None if normalize.lower() == "none" else normalize,
        residual=residual,
        importance=lab.listed(importance),
        limit=limit,
        batch_tokens=batch_tokens,
        workers=workers,
        engine=engine,
        address=address,
        shard_rows=shard_rows,
        report=lambda note: say(f"note: {note}", err=True),
    )
    say(
        f"{out}: {manifest.rows - manifest.errors:,} texts in {manifest.count:,} shards; {manifest.errors:,} errors"
    )


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
    lab.evaluate_folder(
        folder, lab.listed(methods), lab.listed(against), special_tokens, limit, out, seed
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
    lab.note_unfinished(folder)
    cells = [
        [printable(word).replace("|", "\\|"), f"{mean:.4f}", f"{count:,}"]
        for word, mean, count in found
    ]
    print_markdown("\n".join(markdown(["word", f"mean {method}", "count"], cells)))
