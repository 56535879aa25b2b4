"""The commands of the laboratory: train a model, evaluate methods, and compute the paper's tables anew."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnflow.analysis.evaluation import Report, evaluate, read_examples
from attnflow.core.files import PICTURES, known_ending, writable
from attnflow.corpus.folder import MANIFEST
from attnflow.corpus.tables import corpus_status, evaluate_corpus
from attnflow.errors import OptionError
from attnflow.models.loading import BUNDLED, load
from attnflow.show.terminal import print_markdown, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnflow.paper.tables import Table
    from attnflow.show.drawing import Drawing

METHODS, AGAINST = (
    "raw,rollout,flow",
    "blank_out,input_gradient",
)  # what is evaluated if nothing is named

train = typer.Typer(help="Train the models of the paper's experiments.", no_args_is_help=True)
reproduce = typer.Typer(help="Compute the paper's tables and figures anew.", no_args_is_help=True)

Data = Annotated[
    list[Path],
    typer.Option(
        readable=False, metavar="PATH", help="A folder or file of data; may be given several times."
    ),
]
Folder = Annotated[
    Path,
    typer.Option(
        readable=False,
        metavar="FOLDER",
        help="The folder to write the model to.",
        show_default=False,
    ),
]
VerbNumber = Annotated[
    str, typer.Option(help="A verb-number model: a folder, or the one that ships with attnflow.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="At most so many examples.", show_default=False)
]
Seed = Annotated[int, typer.Option(min=0, help="The seed of everything that is drawn at random.")]
Text = Annotated[
    str | None, typer.Argument(help="A sentence; the paper's if not given.", show_default=False)
]
AnyModel = Annotated[
    str,
    typer.Option(help="A folder with a model, a hub id, or the model that ships with attnflow."),
]
Picture = Annotated[
    Path,
    typer.Option(readable=False, metavar="FILE", help="The picture to write: .png, .svg or .pdf."),
]
Reduce = Annotated[
    str,
    typer.Option(
        help="A token's gradient as one number: norm, times_input, or sum, as the authors did."
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
        show_default=False,
    ),
]


@train.command("verb-number")
def verb_number_command(
    data: Data,
    out: Folder,
    seed: Seed = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train for so many steps at most.", show_default=False)
    ] = None,
    resume: Resume = False,
) -> None:
    """Train the verb-number model on numpred.* files, or on the full corpus as .tsv or .tsv.gz."""
    from attnflow.paper.train_verb_number import train_verb_number

    result = train_verb_number(data, out, seed=seed, steps=steps, resume=resume, report=say)
    for name, group in result.test.items():
        say(f"{name}: accuracy {group.accuracy:.3f} on {group.count:,} held-out sentences")
    say(f"{out}: {result.steps} steps, {result.seconds:.0f} s")


@train.command("sentiment")
def sentiment_command(
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The encoder to fine-tune: a folder or a hub id.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            readable=False,
            metavar="FOLDER",
            help="A folder with train, dev and test.tsv.",
            show_default=False,
        ),
    ],
    out: Folder,
    epochs: Annotated[int, typer.Option(min=1, help="How often the data is seen.")] = 3,
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
        f"{out}: accuracy {result.dev:.3f} on dev, {result.test:.3f} on test ({result.steps} steps, {result.seconds:.0f} s)"
    )


@reproduce.command()
def table1(
    model: VerbNumber = BUNDLED,
    data: Data = [],  # noqa: B006  # typer's way to say that none need be given
    limit: Limit = None,
    seed: Seed = 0,
    out: Stem = None,
) -> None:
    """Table 1: raw attention, rollout and flow against blank-out, on the verb-number model."""
    verb_number_table("table1", model, data, limit, seed, out)


@reproduce.command()
def table2(
    model: VerbNumber = BUNDLED,
    data: Data = [],  # noqa: B006
    limit: Limit = None,
    seed: Seed = 0,
    reduce: Reduce = "norm",
    out: Stem = None,
) -> None:
    """Table 2: raw attention, rollout and flow against input gradients, on the verb-number model."""
    verb_number_table("table2", model, data, limit, seed, out, reduce)


def verb_number_table(
    name: str,
    model: str,
    data: list[Path],
    limit: int | None,
    seed: int,
    out: Path | None,
    reduce: str = "norm",
) -> None:
    from attnflow.paper import tables

    stem = stem_of(out, name)
    finish_table(
        tables.compute_verb_number_table(
            name, model=model, data=data, limit=limit, seed=seed, reduce=reduce
        ),
        stem,
    )


@reproduce.command()
def table3(
    data: Annotated[
        Path,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Sentences with labels, as SST-2's test.tsv.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="A sentiment classifier: a folder or a hub id; the paper's DistilBERT if not given."
        ),
    ] = None,
    query: Annotated[
        str, typer.Option(help="max or mean over query positions, or focal: CLS alone.")
    ] = "max",
    limit: Limit = None,
    reduce: Reduce = "norm",
    out: Stem = None,
) -> None:
    """Table 3: raw attention, rollout and flow against input gradients, on a sentiment classifier."""
    from attnflow.paper import sentiment, tables

    stem = stem_of(out, "table3")
    file = data / "test.tsv" if data.is_dir() else data
    sentences = sentiment.read_sst2(file)
    finish_table(
        tables.compute_sentiment_table(
            sentences,
            file.name,
            model=model or tables.SENTIMENT,
            limit=limit,
            query=query,
            reduce=reduce,
        ),
        stem,
    )


@reproduce.command()
def figure1(
    text: Text = None, model: AnyModel = BUNDLED, out: Picture = Path("figure1.png")
) -> None:
    """Figure 1: raw attention, rollout and flow as graphs, side by side."""
    from attnflow.paper import pictures

    draw(lambda: pictures.figure_1(pictures.SENTENCE if text is None else text, model=model), out)


@reproduce.command()
def figure2(
    text: Text = None, model: AnyModel = BUNDLED, out: Picture = Path("figure2.png")
) -> None:
    """Figure 2: raw attention of the focal position in each layer."""
    from attnflow.paper import pictures

    draw(lambda: pictures.figure_2(pictures.SENTENCE if text is None else text, model=model), out)


@reproduce.command()
def figure3(
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="[TEXT]...", help="Sentences; the paper's if none.", show_default=False
        ),
    ] = [],  # noqa: B006
    model: AnyModel = BUNDLED,
    out: Picture = Path("figure3.png"),
) -> None:
    """Figure 3: raw attention, rollout and flow of the focal position in each layer, for several sentences."""
    from attnflow.paper import pictures

    draw(lambda: pictures.figure_3(texts, model=model), out)


@reproduce.command()
def figure4(
    model: Annotated[
        str,
        typer.Option(
            help="A masked LM: a folder or a hub id, for instance bert-base-uncased.",
            show_default=False,
        ),
    ],
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="[TEXT]...",
            help="Sentences with [MASK]; the paper's if none.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    references: Annotated[
        list[str],
        typer.Option(
            metavar="WORD,WORD",
            help="What the pronoun may refer to; once for each sentence.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    candidates: Annotated[
        str, typer.Option(metavar="WORD,WORD", help="The two words for the mask.")
    ] = "his,her",
    out: Picture = Path("figure4.png"),
) -> None:
    """Figure 4: what a masked pronoun looks at, beside the probabilities of two words for it."""
    from attnflow.paper import pictures

    pairs = [pair_of(each, "--references") for each in references]
    draw(
        lambda: pictures.figure_4(
            texts or pictures.PRONOUNS,
            model=model,
            references=pairs if texts or pairs else pictures.REFERENCES,
            candidates=pair_of(candidates, "--candidates"),
        ),
        out,
    )


def draw(figure: "Callable[[], Drawing]", out: Path) -> None:
    """Draw, write, and say where; refused before anything is computed if it cannot be written."""
    known_ending(out, PICTURES)
    writable(out)
    say(f"written: {figure().save(out)}")


def pair_of(text: str, option: str) -> tuple[str, str]:
    """Two words with a comma between them."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(words):
        raise OptionError(f"{option} must be two words with a comma between them; got {text!r}")
    return words[0], words[1]


def evaluate_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a model, a hub id, or verb-number; or the folder of a corpus, alone.",
            show_default=False,
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            help="A .tsv file: a text a line, its label after a tab.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Which methods, with commas between them.")
    ] = METHODS,
    against: Annotated[
        str, typer.Option(help="Which importance, with commas between them.")
    ] = AGAINST,
    layers: Annotated[
        str,
        typer.Option(
            help="Which layers, with commas between them; all if not given.", show_default=False
        ),
    ] = "",
    limit: Limit = None,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Correlate CLS, SEP and their like too.")
    ] = False,
    query: Annotated[
        str, typer.Option(help="focal, max or mean over positions, or a position.")
    ] = "focal",
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
    """Measure how well methods rank the tokens of many texts: Spearman's correlation with blank-out and input gradients."""
    if file is None:
        if not (Path(model) / MANIFEST).is_file():
            raise OptionError(
                f"evaluate needs a model and a file of texts, or the folder of a corpus alone; got {model!r}"
            )
        if layers or query != "focal":
            raise OptionError(
                "a corpus is evaluated in the layers and at the position that it was computed for: leave out --layers, --query"
            )
        wanted = (
            [] if methods == METHODS else listed(methods),
            [] if against == AGAINST else listed(against),
        )
        evaluate_folder(Path(model), *wanted, special_tokens, limit, out)
        return
    if out is not None:
        known_ending(out, [".md", ".csv", ".json"])
        writable(out)
    chosen = layers_of(layers)
    loaded = load(model)
    report = evaluate(
        loaded,
        read_examples(file, loaded, limit),
        methods=listed(methods),
        against=listed(against),
        layers=chosen,
        limit=limit,
        special_tokens=special_tokens,
        query=name_or_number(query, "--query"),
    )
    if out is not None:
        report.save(out)
    print_markdown(report.to_markdown())
    note_interruption(report)


def evaluate_folder(
    folder: Path,
    methods: list[str],
    against: list[str],
    special_tokens: bool,
    limit: int | None,
    out: Path | None,
    seed: int = 0,
) -> None:
    """Correlations from the scores that a corpus holds; of all that is stored where nothing is named."""
    if out is not None:
        known_ending(out, [".md", ".csv", ".json"])
        writable(out)
    report = evaluate_corpus(
        folder,
        methods=methods or None,
        against=against or None,
        special_tokens=special_tokens,
        limit=limit,
        seed=seed,
    )
    if out is not None:
        report.save(out)
    note_unfinished(folder)
    print_markdown(report.to_markdown())


# ---- what they share ------------------------------------------------------------------------------------------------------------


def note_unfinished(folder: Path) -> None:
    """Say so, if a corpus is not whole yet."""
    status = corpus_status(folder)
    if not status.finished:
        say(
            f"note: {folder} is not finished: {status.done:,} of {status.rows:,} rows so far",
            err=True,
        )


def listed(text: str) -> list[str]:
    """Names with commas between them."""
    return text.replace(",", " ").split()


def whole_number(text: str, option: str) -> int:
    """A whole number of the command line; Python would refuse to read some thousand digits."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        got = (
            repr(text)
            if len(text) <= 40
            else f"{text[:20]!r} and {len(text) - 20:,} more characters"
        )
        raise OptionError(f"{option} must be numbers like 1,6; got {got}")
    return int(text)


def whole_numbers(text: str, option: str) -> list[int]:
    """Whole numbers with commas or spaces between them, like 0,7."""
    return [whole_number(part, option) for part in listed(text)]


def name_or_number(text: str, option: str) -> str | int:
    """A whole number, if a text looks like one; else the text, a name that others know."""
    looks = text.removeprefix("-").isdecimal()
    return whole_number(text, option) if looks else text


def layers_of(text: str) -> list[int] | None:
    """Layers from a list like 1,6; None if there is none."""
    return whole_numbers(text, "--layers") or None


def stem_of(out: Path | None, name: str) -> Path:
    """Where a table is written, without its endings; refused before anything is computed if it cannot be."""
    stem = (
        Path(name) if out is None else out.with_suffix("") if out.suffix in (".md", ".csv") else out
    )
    for ending in (".md", ".csv"):
        writable(f"{stem}{ending}")
    return stem


def finish_table(table: "Table", stem: Path) -> None:
    """Print a table, write both its forms, and say where."""
    paths = table.save(stem)
    print_markdown(table.to_markdown())
    note_interruption(table.report)
    seconds = ", ".join(f"{name} {took:.1f} s" for name, took in table.report.seconds.items())
    say(f"written: {', '.join(map(str, paths))}; time: {seconds}", err=True)


def note_interruption(report: Report) -> None:
    if len(report.examples) < report.asked:
        say(f"note: interrupted after {len(report.examples)} of {report.asked} examples", err=True)
