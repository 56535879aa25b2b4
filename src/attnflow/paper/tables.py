"""Tables 1 to 3 of the paper, recomputed and set beside the printed ones."""

import io
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from attnflow.analysis.evaluation import evaluate
from attnflow.analysis.gradients import REDUCTIONS, input_gradient
from attnflow.analysis.report import Report
from attnflow.analysis.token_importance import Importance
from attnflow.core.files import write_csv, write_file
from attnflow.core.formatting import format_markdown
from attnflow.errors import OptionError, RoundingWarning
from attnflow.models.loading import BUNDLED, load
from attnflow.models.model import Model
from attnflow.paper import grammar
from attnflow.paper.agreement import Sentence, read_agreement

Cell = tuple[float, float]  # mean and standard deviation


@dataclass(frozen=True)
class Printed:
    """A table as the paper prints it: a row of cells per method, a cell per layer."""

    title: str
    against: str
    layers: tuple[int, ...]
    cells: dict[str, tuple[Cell, ...]]
    examples: int


def read_cells(*values: str) -> tuple[Cell, ...]:
    """Cells from text such as the paper prints: mean±deviation."""
    return tuple(
        (float(mean), float(deviation))
        for mean, deviation in (value.split("±") for value in values)
    )


PRINTED = {
    "table1": Printed(
        "Table 1: token attention of CLS against blank-out, verb-number model",
        "blank_out",
        (1, 2, 3, 4, 5, 6),
        {
            "raw": read_cells(
                "0.69±0.27", "0.10±0.43", "-0.11±0.49", "-0.09±0.52", "0.20±0.45", "0.29±0.39"
            ),
            "rollout": read_cells(
                "0.32±0.26", "0.38±0.27", "0.51±0.26", "0.62±0.26", "0.70±0.25", "0.71±0.24"
            ),
            "flow": read_cells(
                "0.32±0.26", "0.44±0.29", "0.70±0.25", "0.70±0.22", "0.71±0.22", "0.70±0.22"
            ),
        },
        2000,
    ),
    "table2": Printed(
        "Table 2: token attention of CLS against input gradients, verb-number model",
        "input_gradient",
        (1, 2, 3, 4, 5, 6),
        {
            "raw": read_cells(
                "0.53±0.33", "0.16±0.38", "-0.06±0.42", "0.00±0.47", "0.24±0.40", "0.46±0.35"
            ),
            "rollout": read_cells(
                "0.22±0.31", "0.27±0.32", "0.39±0.32", "0.47±0.32", "0.53±0.32", "0.54±0.31"
            ),
            "flow": read_cells(
                "0.22±0.31", "0.31±0.34", "0.54±0.32", "0.61±0.28", "0.60±0.28", "0.61±0.28"
            ),
        },
        2000,
    ),
    "table3": Printed(
        "Table 3: token attention against input gradients, DistilBERT on SST-2",
        "input_gradient",
        (1, 3, 5, 6),
        {
            "raw": read_cells("0.12±0.21", "0.09±0.21", "0.08±0.20", "0.09±0.21"),
            "rollout": read_cells("0.11±0.19", "0.12±0.21", "0.13±0.21", "0.13±0.20"),
            "flow": read_cells("0.11±0.19", "0.11±0.21", "0.12±0.22", "0.14±0.21"),
        },
        100,
    ),
}
SENTIMENT = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"


@dataclass(frozen=True, eq=False)
class PaperTable:
    """A table of the paper beside ours, with and without special tokens."""

    printed: Printed
    report: Report
    data: str  # where the sentences came from
    command: str

    def rows(self) -> Iterator[tuple[str, int, float, float, float, float, float, float, int, int]]:
        """One row per method and layer.

        (method, layer, mean and deviation in the paper, ours with special tokens, ours without
        them, examples, undefined without special tokens)
        """
        included, excluded = (
            list(self.report.including(special).rows()) for special in (True, False)
        )
        theirs = {
            (method, layer): cell
            for method, row in self.printed.cells.items()
            for layer, cell in zip(self.printed.layers, row, strict=True)
        }
        for with_special, without in zip(included, excluded, strict=True):
            layer = with_special[2] or 0
            mean, deviation = theirs[with_special[1], layer]
            yield (
                with_special[1],
                layer,
                mean,
                deviation,
                *with_special[3:5],
                *without[3:5],
                without[5],
                without[6],
            )

    def to_markdown(self) -> str:
        """The paper's table, ours below it, and the command."""
        special = sorted(
            {
                token
                for example in self.report.examples
                for token, mark in zip(example.tokens, example.special, strict=True)
                if mark
            }
        )
        marks = ", ".join(special) or "special tokens"
        counted = {
            "the paper": (2, self.printed.examples),
            f"ours, with {marks}": (4, None),
            f"ours, without {marks}": (6, None),
        }
        lines = [f"**{self.printed.title}**", ""]
        rows = list(self.rows())
        table = []
        for name, (start, examples) in counted.items():
            for method in self.printed.cells:
                values = [
                    f"{row[start]:.2f} ± {row[start + 1]:.2f}" for row in rows if row[0] == method
                ]
                table.append([name, method, *values, str(examples or len(self.report.examples))])
        lines += format_markdown(
            ["", "method", *(f"layer {layer}" for layer in self.printed.layers), "n"], table
        )
        interrupted = (
            f"Interrupted after {len(self.report.examples)} of {self.report.asked} sentences. "
        )
        partial = interrupted if len(self.report.examples) < self.report.asked else ""
        if any(name.endswith(", sum") for name in self.report.against):
            partial += (
                "The sum of a gradient is rounding error where a layer norm reads the embedding. "
            )
        undefined = max((row[9] for row in rows), default=0)
        lines += [
            "",
            f"{partial}Spearman's rank correlation with {', '.join(self.report.against)}, "
            f"mean ± standard deviation over sentences; query: {self.report.query}; "
            f"model: {self.report.model}; sentences: {self.data}; "
            f"undefined and so left out of the mean: {undefined} at most.",
            "",
            f"Command: `{self.command}`",
            "",
        ]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """One line per method and layer."""
        file = io.BytesIO()
        names = [
            f"{whose}_{what}"
            for whose in ("paper", "with_special", "without_special")
            for what in ("mean", "std")
        ]
        write_csv(file, ["method", "layer", *names, "examples", "undefined"], self.rows())
        return file.getvalue().decode()

    def save(self, stem: str | os.PathLike[str]) -> list[Path]:
        """Write both forms, as STEM.md and STEM.csv."""
        texts = {".md": self.to_markdown(), ".csv": self.to_csv()}

        def write(ending: str) -> Path:
            return write_file(
                f"{os.fspath(stem)}{ending}",
                lambda file: file.write(texts[ending].encode(errors="backslashreplace")),
            )

        return [write(ending) for ending in texts]


def compute_verb_number_table(
    name: str,
    *,
    model: str = BUNDLED,
    data: Sequence[Path] = (),
    limit: int | None = None,
    seed: int = 0,
    reduce: str = "norm",
    command: str = "",
) -> PaperTable:
    """Table 1 or 2: raw attention, rollout and flow of CLS in all layers.

    The sentences are those of the test side of the data, or of our grammar if there is no data.
    """
    printed = PRINTED[name]
    limit = printed.examples if limit is None else limit
    chosen = (
        sample(read_agreement(data), limit, seed)
        if data
        else list(islice(grammar.sentences(seed=seed), limit))
    )
    loaded = load(model)
    if getattr(loaded.model.config, "model_type", None) != BUNDLED:
        raise OptionError(
            f"{name} is of a verb-number model, as attnflow train verb-number makes it; "
            f"got {loaded.name}"
        )
    report = evaluate(
        loaded,
        [(sentence.text, sentence.label) for sentence in chosen],
        against=choose_importance(printed, reduce),
        limit=limit,
    )
    source = (
        f"test side of {', '.join(path.name for path in data)}"
        if data
        else "attnflow's own grammar, with 0, 1 and 2 attractors"
    )
    done = chosen[: len(report.examples)]
    return PaperTable(
        printed,
        report,
        f"{source}; accuracy {measure_accuracy(loaded, done):.3f}",
        command or quote_command_line(),
    )


def compute_sentiment_table(
    sentences: Iterable[tuple[str, int]],
    data: str,
    *,
    model: str = SENTIMENT,
    limit: int | None = None,
    query: str = "max",
    reduce: str = "norm",
    command: str = "",
) -> PaperTable:
    """Table 3: token attention of a sentiment classifier against its input gradients.

    By default it is the largest over query positions, as the authors took it.
    """
    printed = PRINTED["table3"]
    loaded = load(model)
    limit = printed.examples if limit is None else limit
    yardstick = choose_importance(printed, reduce)
    depth = getattr(loaded.model.config, "num_hidden_layers", 6)
    if depth < max(printed.layers):
        raise OptionError(
            f"table 3 shows layers {', '.join(map(str, printed.layers))}; this model has {depth}"
        )
    chosen = [
        pair
        for pair in sentences
        if len(loaded.encode(pair[0], truncation=True).ids) < (loaded.max_length or 10**9)
    ]
    report = evaluate(
        loaded, chosen, against=yardstick, layers=printed.layers, limit=limit, query=query
    )
    return PaperTable(printed, report, data, command or quote_command_line())


def choose_importance(
    printed: Printed, reduce: str
) -> dict[str, Callable[..., list[Importance]] | None]:
    """The table's importance; gradients reduced otherwise than by their length say so by name."""
    if printed.against == "blank_out" or reduce == "norm":
        return {printed.against: None}
    if reduce not in REDUCTIONS:
        raise OptionError(f"unknown reduce {reduce!r}; choose from {', '.join(REDUCTIONS)}")

    def score(model: Model, inputs: list[str], target: list[int]) -> list[Importance]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundingWarning)  # the table's text says it
            return input_gradient(model, inputs, target, reduce=reduce)

    return {f"input_gradient, {reduce}": score}


def sample(sentences: Sequence[Sentence], limit: int, seed: int) -> list[Sentence]:
    """Sentences drawn at random from the test side of the split, which no training saw."""
    test = [
        sentence
        for sentence in dict.fromkeys(sentences)
        if sentence.side == "test" and len(sentence.words) > 1
    ]
    if not test:
        raise OptionError(
            "the data has no sentence on the test side (a tenth, by their first four words); "
            f"got {len(sentences)} sentences"
        )
    order = np.random.default_rng(seed).permutation(len(test))[:limit]
    return [test[place] for place in order]


def measure_accuracy(model: Model, sentences: Sequence[Sentence]) -> float:
    """The share of sentences whose verb the model gets right."""
    predicted = model.predict([sentence.text for sentence in sentences])
    pairs = zip(predicted, sentences, strict=True)
    return float(np.mean([label == sentence.label for (label, _), sentence in pairs]))


def quote_command_line() -> str:
    """The command that is running."""
    return shlex.join(["attnflow", *sys.argv[1:]])
