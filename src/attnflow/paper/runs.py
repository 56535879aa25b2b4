"""Models on the same sentences: their reports, and means with intervals over both."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from attnflow.analysis.evaluate.evaluate import evaluate
from attnflow.analysis.evaluate.report import Report
from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.input_gradient import REDUCTIONS, input_gradient
from attnflow.analysis.statistics import bootstrap_runs
from attnflow.core.arrays import Floats
from attnflow.core.methods import METHODS
from attnflow.errors import OptionError, RoundingWarning
from attnflow.models.load import BUNDLED, load
from attnflow.models.model import Model
from attnflow.paper import grammar
from attnflow.paper.agreement import Sentence, read_agreement

DATA_SIDES = ("test", "dev", "train", "all")
Against = dict[str, Callable[..., list[Importance]] | None]


@dataclass(frozen=True)
class Mean:
    """A mean over sentences and models, with its standard deviation and confidence interval."""

    value: float
    deviation: float
    low: float  # of the 95 % interval
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def summarise_runs(values: Floats) -> Mean:
    """The mean of values [model, sentence], NaN left out, and its interval over both."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Mean(*[float("nan")] * 4)
    return Mean(float(known.mean()), float(known.std()), *bootstrap_runs(values))


@dataclass(frozen=True, eq=False)
class Runs:
    """The reports of models on the same sentences; several are the seeds of one recipe."""

    reports: tuple[Report, ...]

    @property
    def first(self) -> Report:
        """The report of the first model."""
        return self.reports[0]

    @property
    def models(self) -> str:
        """The names of the models, as they were loaded."""
        return ", ".join(
            (report.source and report.source.model) or report.model for report in self.reports
        )

    @property
    def examples(self) -> int:
        """The number of sentences that every model was evaluated on."""
        return min(len(report.examples) for report in self.reports)

    @cached_property
    def ranked(self) -> dict[bool, tuple[Report, ...]]:
        """The reports with (True) and without special tokens among what is ranked."""
        return {
            special: tuple(report.including(special) for report in self.reports)
            for special in (True, False)
        }

    def correlations(self, against: str, method: str, layer: int, special: bool) -> Floats:
        """[model, sentence]: of a method in a layer with an importance, with CLS or without it."""
        place = self.first.layers.index(layer)
        rows = [report.values(method, against)[place] for report in self.ranked[special]]
        return np.stack([row[: self.examples] for row in rows])


# ---- what is measured ----------------------------------------------------------------------------


def evaluate_models(
    models: Sequence[Model], sentences: Sequence[Sentence], against: Against
) -> Runs:
    """All methods in all layers, of every model on the sentences.

    Ctrl-C ends it with what is done.
    """
    reports = []
    for model in models:
        pairs = [(sentence.text, sentence.label) for sentence in sentences]
        reports.append(evaluate(model, pairs, methods=METHODS, against=against))
        if len(reports[-1].examples) < len(pairs):
            break
    return Runs(tuple(reports))


def load_seeds(names: str, what: str) -> list[Model]:
    """Verb-number models by their names, separated by commas: the seeds of one recipe."""
    models = [load(name.strip()) for name in names.split(",") if name.strip()]
    if not models:
        raise OptionError(f"{what} needs a verb-number model; got {names!r}")
    for model in models:
        if getattr(model.model.config, "model_type", None) != BUNDLED:
            raise OptionError(
                f"{what} is of a verb-number model, as attnflow train verb-number makes it; "
                f"got {model.name}"
            )
    return models


def choose_importance(name: str, reduce: str = "norm") -> Against:
    """An importance by name; the name says how gradients are reduced, unless to their norm."""
    if name == "blank_out" or reduce == "norm":
        return {name: None}
    if reduce not in REDUCTIONS:
        raise OptionError(
            f"unknown reduce {reduce!r}; choose from {', '.join(REDUCTIONS)}", options=["reduce"]
        )

    def score(model: Model, inputs: list[str], target: list[int]) -> list[Importance]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundingWarning)  # the table's text says it
            return input_gradient(model, inputs, target, reduce=reduce)

    return {f"input_gradient, {reduce}": score}


def choose_sentences(
    data: Sequence[Path], limit: int, *, seed: int = 0, side: str = "test"
) -> tuple[list[Sentence], str]:
    """Sentences of one side of the data, or of the grammar without data; and their description."""
    if side not in DATA_SIDES:
        raise OptionError(f"unknown side {side!r}; choose from {', '.join(DATA_SIDES)}")
    if not data:
        made = list(islice(grammar.sentences(seed=seed), limit))
        return made, "attnflow's own grammar, with 0, 1 and 2 attractors"
    files = ", ".join(path.name for path in data)
    where = f"all of {files}" if side == "all" else f"{side} side of {files}"
    return sample(read_agreement(data), limit, seed, side), where


def sample(
    sentences: Sequence[Sentence], limit: int, seed: int, side: str = "test"
) -> list[Sentence]:
    """Different sentences of two words and more, drawn at random from a side of the split.

    No training saw the test side; "all" is every sentence.
    """
    found = [
        sentence
        for sentence in dict.fromkeys(sentences)
        if side in ("all", sentence.side) and len(sentence.words) > 1
    ]
    if not found:
        raise OptionError(
            f"the data has no sentence on the {side} side (by their first four words);"
            f" got {len(sentences)} sentences: give more of it, or --side all"
        )
    order = np.random.default_rng(seed).permutation(len(found))[:limit]
    return [found[place] for place in order]


def measure_verb_accuracy(model: Model, sentences: Sequence[Sentence]) -> float:
    """The share of sentences whose verb the model gets right."""
    predicted = model.predict([sentence.text for sentence in sentences])
    pairs = zip(predicted, sentences, strict=True)
    return float(np.mean([label == sentence.label for (label, _), sentence in pairs]))
