"""`Report`: how methods and scorers do by each yardstick, example by example."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from attnflow.analysis.evaluate.differences import (
    Agreement,
    Differences,
    compare_methods,
    compare_replacements,
)
from attnflow.analysis.evaluate.sanity import Sanity
from attnflow.analysis.evaluate.scored_example import ScoredExample
from attnflow.analysis.evaluate.yardsticks import BASELINES, RANDOM
from attnflow.analysis.faithfulness.metrics import prefers_lower
from attnflow.analysis.faithfulness.plausibility import PLAUSIBILITY, Marks, measure_plausibility
from attnflow.analysis.statistics import STATISTIC_NAMES, STATISTICS, summarise
from attnflow.core.arrays import Floats
from attnflow.core.io.formatting import Panel, format_count
from attnflow.core.io.tables import Table
from attnflow.core.provenance import Source
from attnflow.errors import OptionError


class ReportRow(NamedTuple):
    """A method in a layer, by one yardstick; columns as in `Report.columns`."""

    against: str
    method: str
    layer: int | None
    mean: float
    std: float
    examples: int
    undefined: int
    replacement: str | None = None


Yardstick = tuple[str, str | None]  # an importance or a metric, and the replacement of a metric


@dataclass(frozen=True, eq=False)
class Report(Table):
    """How methods do by each yardstick, example by example.

    A yardstick is the rank correlation with an importance, a metric of faithfulness, or agreement
    with rationales.

    Parameters
    ----------
    model
        The model's name.
    methods
        The names of all that was ranked: methods, then scorers.
    against
        The names of the importances.
    layers
        The layers of the methods.
    examples
        The scores per example.
    special_tokens
        Whether CLS, SEP and the like take part.
    position
        The position that is explained: "focal", "max" or "mean" over all, or a number.
    asked
        How many examples were given; fewer were done if the run was interrupted.
    seconds
        Where the time went, by part.
    scorers
        Those of `methods` that are user-defined scores without layers.
    source
        Where the numbers came from.
    statistic
        The rank correlation: "spearman", "kendall", or "dense", Spearman's of dense ranks.
    undefined
        Whether means leave out undefined correlations ("drop"), or count them as zero ("zero").
    faithfulness
        The names of the metrics of faithfulness.
    replacements
        How tokens were taken away; each is measured by itself.
    target_of
        The value that faithfulness watches; with a foil "logit", from which that of the foil is
        subtracted.
    sanity
        How far rankings change when weights are randomised; None if not measured.
    best
        Whether faithfulness has a row of the best order found.

    >>> import attnflow as af
    >>> examples = [("the key to the cabinets", "singular"), ("the old keys", "plural")]
    >>> report = af.evaluate(af.load("verb-number"), examples, methods="flow", against="blank_out")
    >>> report.to_pandas().columns.tolist()
    ['against', 'method', 'layer', 'mean', 'std', 'examples', 'undefined']
    """

    columns: ClassVar = ReportRow._fields[:-1]

    model: str
    methods: tuple[str, ...]
    against: tuple[str, ...]
    layers: tuple[int, ...]
    examples: tuple[ScoredExample, ...]
    special_tokens: bool = False
    position: str = "focal"
    asked: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    scorers: tuple[str, ...] = ()
    source: Source | None = None
    statistic: str = "spearman"
    undefined: str = "drop"
    faithfulness: tuple[str, ...] = ()
    replacements: tuple[str, ...] = ()
    target_of: str = "probability"
    sanity: Sanity | None = None
    best: bool = False

    @property
    def query(self) -> str:
        """The old name of `position`."""
        warnings.warn(
            "Report.query is now position; the old name works in this version only",
            FutureWarning,
            stacklevel=2,
        )
        return self.position

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*self.columns, "replacement") if self.faithfulness else self.columns

    @cached_property
    def correlations(self) -> dict[tuple[str, str], Floats]:
        """{(against, method): [layer, example]}; NaN where a correlation is undefined."""
        correlate = STATISTICS[self.statistic]
        kept = [(example, example.keep(self.special_tokens)) for example in self.examples]
        return {
            (name, method): stack_examples(
                [
                    correlate(example.scores[method][:, ranked], example.importance[name][ranked])
                    for example, ranked in kept
                ]
            )
            for name in self.against
            for method in self.methods
        }

    @property
    def yardsticks(self) -> tuple[Yardstick, ...]:
        """All yardsticks of the report: importances, rationales, metrics of faithfulness."""
        marked = any(example.rationale is not None for example in self.examples)
        plain = (*self.against, *(PLAUSIBILITY if marked else ()))
        return (
            *((name, None) for name in plain),
            *((name, way) for way in self.replacements for name in self.faithfulness),
        )

    @property
    def baselines(self) -> tuple[str, ...]:
        """The orders that metrics of faithfulness set beside the methods."""
        return BASELINES if self.best else (RANDOM,)

    def list_methods(self, against: str) -> tuple[str, ...]:
        """The methods, and for a metric of faithfulness the orders beside them.

        Parameters
        ----------
        against
            The yardstick.
        """
        return (*self.methods, *(self.baselines if against in self.faithfulness else ()))

    def has_layers(self, method: str) -> bool:
        """Whether a method has scores per layer, unlike scorers, random and best orders.

        Parameters
        ----------
        method
            Its name.
        """
        return method not in (*self.scorers, *BASELINES)

    def values(self, method: str, against: str, replacement: str | None = None) -> Floats:
        """[layer, example] of one method by one yardstick; NaN where it is undefined.

        Parameters
        ----------
        method, against
            Of which method, or scorer, by which yardstick.
        replacement
            For faithfulness: under which replacement, the first one if None.
        """
        if against in self.faithfulness:
            way = self.replacements.index(replacement or self.replacements[0])
            return stack_examples(
                [example.faithful[way].values[against][method] for example in self.examples]
            )
        if against in self.against:
            return self.correlations[against, method]
        return self._plausibilities[against, method]

    def treat(self, against: str) -> str:
        """How undefined values of a yardstick count: "drop" or "zero".

        Only correlations may be zero: a metric is undefined for all methods alike.

        Parameters
        ----------
        against
            The yardstick.
        """
        return self.undefined if against in self.against else "drop"

    @cached_property
    def _plausibilities(self) -> dict[tuple[str, str], Floats]:
        """[layer, example] for each (measure of plausibility, method)."""
        found: dict[tuple[str, str], Floats] = {}
        for method in self.methods:
            by_example = [
                [measure_plausibility(row[kept], marks[kept]) for row in example.scores[method]]
                for example, kept, marks in self._list_marked()
            ]
            by_layer = np.moveaxis(np.array(by_example), 0, 1)  # [layer, example, measure]
            for place, name in enumerate(PLAUSIBILITY):
                found[name, method] = by_layer[..., place]
        return found

    def _list_marked(self) -> Iterator[tuple[ScoredExample, Marks, Marks]]:
        """Each example, its ranked tokens and its rationale, without marks if it has none."""
        for example in self.examples:
            kept = example.keep(self.special_tokens)
            marks = np.zeros_like(kept) if example.rationale is None else example.rationale
            yield example, kept, marks

    def including(self, special_tokens: bool) -> "Report":
        """The same scores, correlated with or without CLS, SEP and the like.

        Parameters
        ----------
        special_tokens
            Whether they take part.
        """
        return replace(self, special_tokens=special_tokens)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """(against, method, layer, mean, standard deviation, examples, how many are undefined).

        The layer of a scorer, and of a random or the best order, is None. With
        faithfulness there is one more column, the replacement. `named_rows` have names for them.
        """
        width = len(self._columns)
        return (row[:width] for row in self.named_rows)

    @cached_property
    def named_rows(self) -> tuple[ReportRow, ...]:
        """The rows with all columns, by name."""
        return tuple(self._summarise())

    def _summarise(self) -> Iterator[ReportRow]:
        for against, replacement in self.yardsticks:
            for method in self.list_methods(against):
                values = self.values(method, against, replacement)
                layers = self.layers if self.has_layers(method) else (None,)
                for layer, row in zip(layers, values, strict=True):
                    numbers = summarise(row, self.treat(against))
                    yield ReportRow(against, method, layer, *numbers, replacement)

    def mean(self, method: str, against: str, layer: int | None = None) -> float:
        """The mean of a method in a layer, by one yardstick.

        Parameters
        ----------
        method, against
            Of which method, or scorer, with which importance, or by which metric (under the first
            replacement).
        layer
            The top one computed if None; a scorer has none.
        """
        first = next(iter(self.replacements), None)
        chosen = [
            row
            for row in self.named_rows
            if (row.against, row.method) == (against, method)
            and (layer is None or row.layer in (layer, None))
            and row.replacement in (None, first)
        ]
        if not chosen:
            raise OptionError(
                f"this report has no {method} against {against} in layer {layer};"
                f" it has {', '.join(self.methods)}"
            )
        return float(chosen[-1].mean)

    def differences(
        self,
        against: str | Iterable[str] | None = None,
        *,
        layer: int | None = None,
        methods: Iterable[str] | None = None,
        replacement: str | None = None,
        seed: int = 0,
    ) -> Differences:
        """Paired differences between methods: mean, 95 % interval, p value, corrected by Holm.

        Intervals are bootstrapped over examples; p values come from a sign-flip test. All rows are
        one family: with fewer yardsticks or methods, fewer comparisons are corrected for.

        Parameters
        ----------
        against
            The yardsticks: importances, measures of plausibility, metrics; all if None.
        layer
            Of which layer; the top one computed if None.
        methods
            Two or more; all if None. "random order" may be among them, and "best found" if it was
            searched.
        replacement
            For faithfulness: under which replacement, the first one if None.
        seed
            Of the random draws.
        """
        return compare_methods(self, against, layer, methods, replacement, seed)

    def agreement(self) -> Agreement:
        """The agreement of the replacements; `evaluate` must have been given several."""
        return compare_replacements(self)

    def _panels(self) -> Iterator[Panel]:
        """One table per importance: methods down, layers across, mean ± standard deviation.

        Then one table per replacement, with the other yardsticks beside the correlations.
        """
        statistic = STATISTIC_NAMES[self.statistic]
        for name in self.against:
            caption = f"{statistic} with {name} ({self.model}, {self.describe_examples()})"
            yield Panel(self._header(), self._cells(name), caption)
        plain = [yardstick for yardstick in self.yardsticks if yardstick[1] is None]
        if self.faithfulness:
            for way in self.replacements:
                metrics = [(name, way) for name in self.faithfulness]
                caption = (
                    f"Faithfulness, replacement: {way}, of the {self.describe_value()}, beside the"
                    f" correlations ({self.model}, {self.describe_examples()})"
                )
                yield self._compare([*plain, *metrics], caption)
            if len(self.replacements) > 1:
                found = self.agreement()
                caption = "Agreement of replacements: on the order of methods, and of examples"
                yield Panel(found.columns, found.rows(), caption)
        elif len(plain) > len(self.against):
            caption = f"Agreement with rationales ({self.model}, {self.describe_examples()})"
            yield self._compare(plain, caption)
        if self.sanity is not None:
            yield from self.sanity._panels()

    def _compare(self, yardsticks: Sequence[Yardstick], caption: str) -> Panel:
        """Methods and layers down, yardsticks across: mean ± standard deviation."""
        cells: dict[tuple[str, int | None], dict[str, ReportRow]] = {}
        for row in self.named_rows:
            if (row.against, row.replacement) in yardsticks:
                cells.setdefault((row.method, row.layer), {})[row.against] = row
        names = [name for name, _ in yardsticks]
        lines = []
        for (method, layer), by_name in cells.items():
            means = [
                f"{by_name[name].mean:.3f} ± {by_name[name].std:.3f}" if name in by_name else None
                for name in names
            ]
            lines.append([method, layer, *means, format_undefined(by_name.values())])
        lower = [name for name in names if prefers_lower(name)]
        note = f"lower is better: {', '.join(lower)}" if lower else ""
        return Panel(["method", "layer", *names, "undefined"], lines, caption, note)

    def _header(self) -> list[str]:
        """Scorers have no layers, and so a column of their own."""
        layers = [f"layer {layer}" for layer in self.layers]
        return ["method", *layers, *["score"] * bool(self.scorers), "undefined"]

    def _cells(self, against: str) -> Iterator[list[str]]:
        for method in self.methods:
            rows = [
                row for row in self.named_rows if (row.against, row.method) == (against, method)
            ]
            means = [f"{row.mean:.2f} ± {row.std:.2f}" for row in rows]
            blanks = [""] * len(self.layers)
            if method in self.scorers:
                means = [*blanks, *means]
            elif self.scorers:
                means = [*means, ""]
            yield [method, *means, format_undefined(rows)]

    def describe_value(self) -> str:
        """What faithfulness watches, in words, for captions."""
        if any(example.foil is not None for example in self.examples):
            return "logit of target minus foil"
        return f"{self.target_of.replace('_', '-')} of the target"

    def describe_examples(self) -> str:
        """The number of examples and the tokens that are ranked, for captions."""
        special = sorted(
            {
                token
                for example in self.examples
                for token, mark in zip(example.tokens, example.special, strict=True)
                if mark
            }
        )
        counted = f"n = {len(self.examples)}" + (
            f" of {self.asked} asked for" if self.asked > len(self.examples) else ""
        )
        kept = "included" if self.special_tokens else "left out"
        zero = "; undefined correlations count as 0" if self.undefined == "zero" else ""
        names = ", ".join(special) or "special tokens"
        return f"{counted}; {names} {kept}; position {self.position}{zero}"

    def _content(self) -> dict[str, object]:
        """All results, including the scores of every token of every example."""
        return {
            "model": self.model,
            "special_tokens": self.special_tokens,
            "position": self.position,
            "asked": self.asked,
            "layers": self.layers,
            "statistic": self.statistic,
            "undefined": self.undefined,
            "target_of": self.target_of,
            "seconds": self.seconds,
            **super()._content(),
            "sanity": None if self.sanity is None else [r._asdict() for r in self.sanity.rows()],
            "examples": [
                example.describe(
                    {
                        f"{method} against {name}": values[:, place].tolist()
                        for (name, method), values in self.correlations.items()
                    }
                )
                for place, example in enumerate(self.examples)
            ],
        }

    def __repr__(self) -> str:
        yardsticks = dict.fromkeys(name for name, _ in self.yardsticks)
        names = f"{', '.join(self.methods)} against {', '.join(yardsticks)}"
        return f"<Report: {names}, {format_count(len(self.examples), 'example')}>"


def stack_examples(rows: Sequence[Floats]) -> Floats:
    """[layer, example] from the values [layer] of each example."""
    return np.stack(rows, axis=1) if rows else np.empty((0, 0))


def format_undefined(rows: Iterable[ReportRow]) -> str:
    """The number of undefined examples of several rows: one number, or the least and the most."""
    counts = {row.undefined for row in rows}
    return "–".join(map(str, sorted({min(counts), max(counts)}))) if counts else ""
