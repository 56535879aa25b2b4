"""The commands of the laboratory: train the paper's models, compute its tables and figures anew."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnflow.cli.evaluate import note_interruption
from attnflow.cli.options import AnyModel, Limit, Seed, expand_options, read_pair
from attnflow.cli.output import check_out
from attnflow.core.io.files import PICTURES, check_writable
from attnflow.models.load import BUNDLED, SHIPPED
from attnflow.show.terminal.tables import print_markdown, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnflow.paper.tables import PaperTable
    from attnflow.show.figures.drawing import Drawing

train_app = typer.Typer(help="Train the models of the paper's experiments.", no_args_is_help=True)
reproduce = typer.Typer(help="Compute the paper's tables and figures anew.", no_args_is_help=True)

Data = Annotated[
    list[Path],
    typer.Option(
        readable=False, metavar="PATH", help="A folder or file of data; may be given several times."
    ),
]
TrainingFolder = Annotated[
    Path, typer.Option(readable=False, metavar="FOLDER", help="The folder to write the model to.")
]
VerbNumberFolder = Annotated[
    str,
    typer.Option(
        help="A verb-number model: a folder, or one that ships with attnflow; or several seeds of"
        " one recipe, separated by commas."
    ),
]
SideOption = Annotated[
    str, typer.Option(help="Which side of the data's split: test, dev, train, or all of them.")
]
Text = Annotated[str | None, typer.Argument(help="A sentence; the paper's if not given.")]
PictureOption = Annotated[
    Path,
    typer.Option(readable=False, metavar="FILE", help="The picture to write: .png, .svg or .pdf."),
]
Reduce = Annotated[
    str,
    typer.Option(
        help="A token's gradient as one number: norm, times_input, or sum, as the authors' for"
        " Table 3."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the checkpoint of a run that was stopped.")
]
Stem = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="NAME",
        help="Write NAME.md and NAME.csv; by default named after the table.",
    ),
]


@train_app.command("verb-number")
def verb_number_command(
    data: Data,
    out: TrainingFolder,
    recipe: Annotated[
        str, typer.Option(help="plain, as the paper describes it; or careful, as bundled.")
    ] = "careful",
    without: Annotated[
        list[str],
        typer.Option(
            metavar="PART",
            help="Leave out a part of the careful recipe: blank-loss, augmentation, initialisation,"
            " length or regularisation; may be given several times.",
        ),
    ] = [],  # noqa: B006
    seed: Seed = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="The maximum number of steps.")] = None,
    resume: Resume = False,
) -> None:
    """Train the verb-number model on numpred.* files, or on the full corpus as .tsv or .tsv.gz."""
    from attnflow.paper.recipes import choose_recipe
    from attnflow.paper.train_verb_number import train_verb_number

    chosen = choose_recipe(recipe, without=without, steps=steps)

    result = train_verb_number(data, out, recipe=chosen, seed=seed, resume=resume, report=say)
    for name, group in result.test.items():
        say(f"{name}: accuracy {group.accuracy:.3f} on {group.count:,} held-out sentences")
    say(f"{out}: {result.steps} steps, {result.seconds:.0f} s")


@train_app.command("sentiment")
def sentiment_command(
    base: Annotated[
        str, typer.Option(metavar="MODEL", help="The encoder to fine-tune: a folder or a hub id.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            readable=False, metavar="FOLDER", help="A folder with train, dev and test.tsv."
        ),
    ],
    out: TrainingFolder,
    epochs: Annotated[int, typer.Option(min=1, help="The number of passes over the data.")] = 3,
    seed: Seed = 0,
    limit: Limit = None,
    resume: Resume = False,
) -> None:
    """Fine-tune an encoder on sentences with 0 (negative) or 1 (positive), as SST-2 has them."""
    from attnflow.paper.sentiment import train_sentiment

    result = train_sentiment(
        base, data, out, epochs=epochs, seed=seed, limit=limit, resume=resume, report=say
    )
    say(
        f"{out}: accuracy {result.dev:.3f} on dev, {result.test:.3f} on test"
        f" ({result.steps} steps, {result.seconds:.0f} s)"
    )


@dataclass(frozen=True)
class DataFlags:
    """The examples that are evaluated."""

    data: Data = field(default_factory=list)
    side: SideOption = "test"
    limit: Limit = None
    seed: Seed = 0


@reproduce.command()
@expand_options
def table1(*, model: VerbNumberFolder = BUNDLED, data: DataFlags, out: Stem = None) -> None:
    """Table 1: raw attention, rollout and flow against blank-out, on the verb-number model."""
    make_verb_number_table("table1", model, data, out)


@reproduce.command()
@expand_options
def table2(
    *,
    model: VerbNumberFolder = BUNDLED,
    data: DataFlags,
    reduce: Reduce = "norm",
    out: Stem = None,
) -> None:
    """Table 2: raw attention, rollout and flow against input gradients, verb-number model."""
    make_verb_number_table("table2", model, data, out, reduce)


def make_verb_number_table(
    name: str, model: str, data: DataFlags, out: Path | None, reduce: str = "norm"
) -> None:
    """Compute Table 1 or 2, write it and print it."""
    from attnflow.paper import tables

    stem = find_stem(out, name)
    table = tables.compute_verb_number_table(name, model=model, reduce=reduce, **vars(data))
    finish_table(table, stem)


@reproduce.command()
def table3(
    data: Annotated[
        Path,
        typer.Option(
            readable=False, metavar="FILE", help="Sentences with labels, as SST-2's test.tsv."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A sentiment classifier: a folder or a hub id; the paper's by default."),
    ] = None,
    position: Annotated[
        str,
        typer.Option(
            "--position", "--query", help="max or mean over all positions, or focal: CLS alone."
        ),
    ] = "max",
    limit: Limit = None,
    reduce: Reduce = "norm",
    out: Stem = None,
) -> None:
    """Table 3: raw attention, rollout and flow against input gradients, sentiment classifier."""
    from attnflow.paper import sentiment, tables

    stem = find_stem(out, "table3")
    file = data / "test.tsv" if data.is_dir() else data
    sentences = sentiment.read_sst2(file)
    finish_table(
        tables.compute_sentiment_table(
            sentences,
            file.name,
            model=model or tables.SENTIMENT,
            limit=limit,
            position=position,
            reduce=reduce,
        ),
        stem,
    )


@reproduce.command()
@expand_options
def statements(
    *,
    model: Annotated[
        list[str],
        typer.Option(
            help="A verb-number model, or several seeds of one recipe, separated by commas; may be"
            " given several times. Those that ship by default."
        ),
    ] = [],  # noqa: B006
    data: DataFlags,
    masked_lm: Annotated[
        str | None,
        typer.Option(
            help="A masked LM, for the statements about pronouns: a folder or a hub id, for"
            " instance bert-base-uncased."
        ),
    ] = None,
    out: Stem = None,
) -> None:
    """Which statements of the paper hold on which model, each by a stated bound."""
    from attnflow.paper.judging import judge_statements
    from attnflow.paper.tables import quote_command_line

    stem = find_stem(out, "statements")
    found = judge_statements(
        model or tuple(SHIPPED),
        **vars(data),
        masked_lm=masked_lm,
        command=quote_command_line(),
    )
    paths = [found.save(f"{stem}{ending}") for ending in (".md", ".csv")]
    print_markdown(found.to_markdown())
    say(f"written: {', '.join(map(str, paths))}", err=True)


@reproduce.command()
def figure1(
    text: Text = None, model: AnyModel = BUNDLED, out: PictureOption = Path("figure1.png")
) -> None:
    """Figure 1: raw attention, rollout and flow as graphs, side by side."""
    from attnflow.paper import pictures

    draw(lambda: pictures.figure_1(pictures.SENTENCE if text is None else text, model=model), out)


@reproduce.command()
def figure2(
    text: Text = None, model: AnyModel = BUNDLED, out: PictureOption = Path("figure2.png")
) -> None:
    """Figure 2: raw attention of the focal position in each layer."""
    from attnflow.paper import pictures

    draw(lambda: pictures.figure_2(pictures.SENTENCE if text is None else text, model=model), out)


@reproduce.command()
def figure3(
    texts: Annotated[
        list[str], typer.Argument(metavar="[TEXT]...", help="Sentences; the paper's if none.")
    ] = [],  # noqa: B006
    model: AnyModel = BUNDLED,
    out: PictureOption = Path("figure3.png"),
) -> None:
    """Figure 3: raw attention, rollout and flow of the focal position, layer by layer."""
    from attnflow.paper import pictures

    draw(lambda: pictures.figure_3(texts, model=model), out)


@reproduce.command()
def figure4(
    model: Annotated[
        str, typer.Option(help="A masked LM: a folder or a hub id, for instance bert-base-uncased.")
    ],
    texts: Annotated[
        list[str],
        typer.Argument(metavar="[TEXT]...", help="Sentences with [MASK]; the paper's if none."),
    ] = [],  # noqa: B006
    references: Annotated[
        list[str],
        typer.Option(
            metavar="WORD,WORD", help="What the pronoun may refer to; once for each sentence."
        ),
    ] = [],  # noqa: B006
    candidates: Annotated[
        str, typer.Option(metavar="WORD,WORD", help="The two words for the mask.")
    ] = "his,her",
    out: PictureOption = Path("figure4.png"),
) -> None:
    """Figure 4: what a masked pronoun looks at, beside the probabilities of two words for it."""
    from attnflow.paper import pictures

    pairs = [read_pair(pair, "--references") for pair in references]
    draw(
        lambda: pictures.figure_4(
            texts or pictures.PRONOUNS,
            model=model,
            references=pairs if texts or pairs else pictures.PRONOUN_REFERENTS,
            candidates=read_pair(candidates, "--candidates"),
        ),
        out,
    )


def draw(figure: "Callable[[], Drawing]", out: Path) -> None:
    """Draw, write, and say where; refused before anything is computed if it cannot be written."""
    check_out(out, PICTURES)
    say(f"written: {figure().save(out)}")


def find_stem(out: Path | None, name: str) -> Path:
    """The file of a table without its ending; refused at once if it cannot be written."""
    stem = (
        Path(name) if out is None else out.with_suffix("") if out.suffix in (".md", ".csv") else out
    )
    for ending in (".md", ".csv"):
        check_writable(f"{stem}{ending}")
    return stem


def finish_table(table: "PaperTable", stem: Path) -> None:
    """Print a table, write both its forms, and say where."""
    paths = table.save(stem)
    print_markdown(table.to_markdown())
    note_interruption(table.report)
    seconds = ", ".join(f"{name} {took:.1f} s" for name, took in table.report.seconds.items())
    say(f"written: {', '.join(map(str, paths))}; time: {seconds}", err=True)
