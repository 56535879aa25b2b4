"""Tables 1 to 3 of the paper, recomputed and set beside the printed ones."""

import io
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from attnflow.analysis.evaluate.evaluate import evaluate
from attnflow.analysis.evaluate.report import Report
from attnflow.core.arrays import Floats
from attnflow.core.io.files import write_csv, write_file
from attnflow.core.io.formatting import format_markdown
from attnflow.core.methods import METHODS
from attnflow.errors import OptionError
from attnflow.models.load import BUNDLED, load
from attnflow.paper.printed import PRINTED_TABLES, MeanAndDeviation, Printed
from attnflow.paper.runs import (
    Mean,
    Runs,
    choose_importance,
    choose_sentences,
    evaluate_models,
    load_seeds,
    measure_verb_accuracy,
    summarise_runs,
)

DIFFERENCE = "flow - rollout"  # the row of paired differences
SENTIMENT = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"


@dataclass(frozen=True)
class TableRow:
    """A method, or the difference of two, in a layer."""

    method: str
    layer: int
    paper: MeanAndDeviation
    with_special: Mean
    without_special: Mean
    examples: int
    undefined: int  # without special tokens


@dataclass(frozen=True, eq=False)
class PaperTable:
    """A table of the paper beside ours, with and without special tokens."""

    printed: Printed
    runs: Runs
    data: str  # where the sentences came from
    command: str

    @property
    def report(self) -> Report:
        """The report of the first model."""
        return self.runs.first

    def values(self, method: str, layer: int, special_tokens: bool) -> Floats:
        """[model, sentence]: correlations; of "flow - rollout", their differences in pairs."""
        (against,) = self.report.against
        first, *others = (
            self.runs.correlations(against, name, layer, special_tokens)
            for name in method.split(" - ")
        )
        return first - others[0] if others else first

    @cached_property
    def rows(self) -> list[TableRow]:
        """One row per method and layer, and per difference and layer."""
        rows = []
        for method in (*self.printed.cells, DIFFERENCE):
            for place, layer in enumerate(self.printed.layers):
                paper = [self.printed.cells[name][place] for name in method.split(" - ")]
                with_special, without = (
                    self.values(method, layer, special) for special in (True, False)
                )
                row = TableRow(
                    method,
                    layer,
                    paper[0] if len(paper) == 1 else (paper[0][0] - paper[1][0], float("nan")),
                    summarise_runs(with_special),
                    summarise_runs(without),
                    self.runs.examples,
                    int(np.isnan(without).sum()),
                )
                rows.append(row)
        return rows

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
        ours = str(self.runs.examples)
        whose = {
            "the paper": ("paper", str(self.printed.examples)),
            f"ours, with {marks}": ("with_special", ours),
            f"ours, without {marks}": ("without_special", ours),
        }
        table = [
            [
                name,
                method,
                *(format_mean(getattr(row, kind)) for row in self.rows if row.method == method),
                count,
            ]
            for name, (kind, count) in whose.items()
            for method in (*self.printed.cells, DIFFERENCE)
        ]
        lines = [f"**{self.printed.title}**", ""]
        lines += format_markdown(
            ["", "method", *(f"layer {layer}" for layer in self.printed.layers), "n"], table
        )
        lines += ["", self.describe(), "", f"Command: `{self.command}`"]
        return "\n".join([*lines, ""])

    def describe(self) -> str:
        """What the table shows, in one paragraph."""
        undefined = max(row.undefined for row in self.rows)
        partial, examples, count = "", self.runs.examples, len(self.runs.reports)
        if examples < self.report.asked:
            partial = f"Interrupted after {examples} of {self.report.asked} sentences. "
        if any(name.endswith(", sum") for name in self.report.against):
            partial += (
                "The sum of a gradient is rounding error where a layer norm reads the embedding. "
            )
        over = "sentences" if count == 1 else f"sentences and {count} models"
        return (
            f"{partial}Spearman's rank correlation with {', '.join(self.report.against)};"
            f" the paper: mean ± standard deviation over sentences; ours: mean and its 95 %"
            f" interval, by bootstrap over {over}; position: {self.report.position};"
            f" model: {self.runs.models};"
            f" sentences: {self.data}; undefined and so left out of the mean: {undefined} at most"
            f"{'' if count == 1 else f' of {count} x {examples}'}."
        )

    def to_csv(self) -> str:
        """One line per method and layer, and per difference."""
        file = io.BytesIO()
        names = ["paper_mean", "paper_std"]
        names += [
            f"{whose}_{what}"
            for whose in ("with_special", "without_special")
            for what in ("mean", "std", "low", "high")
        ]
        lines = (
            (
                row.method,
                row.layer,
                *row.paper,
                *astuple(row.with_special),
                *astuple(row.without_special),
                row.examples,
                row.undefined,
            )
            for row in self.rows
        )
        write_csv(file, ["method", "layer", *names, "examples", "undefined"], lines)
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


def format_mean(mean: Mean | MeanAndDeviation) -> str:
    """A cell of the table: ours with an interval, the paper's with a deviation if it has one."""
    if isinstance(mean, Mean):
        return str(mean)
    value, deviation = mean
    return f"{value:.2f}" if np.isnan(deviation) else f"{value:.2f} ± {deviation:.2f}"


def compute_verb_number_table(
    name: str,
    *,
    model: str = BUNDLED,
    data: Sequence[Path] = (),
    side: str = "test",
    limit: int | None = None,
    seed: int = 0,
    reduce: str = "norm",
    command: str = "",
) -> PaperTable:
    """Table 1 or 2: raw attention, rollout and flow of CLS in all layers.

    The sentences come from one side of the data, or from the grammar without data. Several
    models, separated by commas, are the seeds of one recipe.
    """
    printed = PRINTED_TABLES[name]
    against = choose_importance(printed.against, reduce)
    chosen, where = choose_sentences(
        data, printed.examples if limit is None else limit, seed=seed, side=side
    )
    models = load_seeds(model, name)
    runs = evaluate_models(models, chosen, against)
    done = chosen[: runs.examples]
    accuracies = ", ".join(f"{measure_verb_accuracy(each, done):.3f}" for each in models)
    return PaperTable(
        printed, runs, f"{where}; accuracy {accuracies}", command or quote_command_line()
    )


def compute_sentiment_table(
    sentences: Iterable[tuple[str, int]],
    data: str,
    *,
    model: str = SENTIMENT,
    limit: int | None = None,
    position: str = "max",
    reduce: str = "norm",
    command: str = "",
) -> PaperTable:
    """Table 3: token attention of a sentiment classifier against its input gradients.

    By default it is the largest over query positions, as the authors took it.
    """
    printed = PRINTED_TABLES["table3"]
    loaded = load(model)
    limit = printed.examples if limit is None else limit
    yardstick = choose_importance(printed.against, reduce)
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
        loaded,
        chosen,
        methods=METHODS,
        against=yardstick,
        layers=printed.layers,
        limit=limit,
        position=position,
    )
    return PaperTable(printed, Runs((report,)), data, command or quote_command_line())


def quote_command_line() -> str:
    """The command that is running."""
    return shlex.join(["attnflow", *sys.argv[1:]])
