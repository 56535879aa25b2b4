"""`Report`: how methods and scorers do by each yardstick, example by example."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from attnflow.analysis.comparing import (
    Agreement,
    Differences,
    compare_methods,
    compare_replacements,
    read_comparison,
)
from attnflow.analysis.metrics import prefers_lower
from attnflow.analysis.rationales import PLAUSIBILITY, measure_plausibility
from attnflow.analysis.sanity import Sanity
from attnflow.analysis.scored import ScoredExample
from attnflow.analysis.statistics import STATISTIC_NAMES, STATISTICS, summarise
from attnflow.analysis.yardsticks import BASELINES
from attnflow.core.arrays import Floats
from attnflow.core.formatting import Panel, format_count
from attnflow.core.provenance import Source
from attnflow.core.tables import Table
from attnflow.errors import OptionError

# as `Report.columns`, and the replacement where there is faithfulness
ReportRow = tuple[Any, ...]
Yardstick = tuple[str, str | None]  # an importance or a metric, and the replacement it is under


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
    query
        The position that is explained: "focal", "max" or "mean" over all, or a number.
    asked
        How many examples were given; fewer were done if the run was interrupted.
    seconds
        Where the time went, by part.
    scorers
        Those of `methods` that are scores of the user's and have no layers.
    source
        Where the numbers came from.
    statistic
        The rank correlation: "spearman", "kendall", or "dense", Spearman's of dense ranks.
    undefined
        Whether means leave out undefined correlations ("drop"), or count them as zero ("zero").
    faithfulness
        The names of the metrics of faithfulness.
    replacements
        What was done to tokens that were taken away; each is measured by itself.
    target_of
        The value that faithfulness watches.
    sanity
        How far rankings change when weights are randomised; None if nobody asked.

    >>> import attnflow as af
    >>> examples = [("the key to the cabinets", "singular"), ("the old keys", "plural")]
    >>> report = af.evaluate(af.load("verb-number"), examples, methods="flow", against="blank_out")
    >>> report.to_pandas().columns.tolist()
    ['against', 'method', 'layer', 'mean', 'std', 'examples', 'undefined']
    """

    columns: ClassVar = ("against", "method", "layer", "mean", "std", "examples", "undefined")

    model: str
    methods: tuple[str, ...]
    against: tuple[str, ...]
    layers: tuple[int, ...]
    examples: tuple[ScoredExample, ...]
    special_tokens: bool = False
    query: str = "focal"
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

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*self.columns, "replacement") if self.faithfulness else self.columns

    @cached_property
    def correlations(self) -> dict[tuple[str, str], Floats]:
        """{(against, method): [layer, example]}; NaN where a correlation is undefined."""
        correlations = {}
        for name in self.against:
            for method in self.methods:
                by_example = [self._correlate(example, method, name) for example in self.examples]
                correlations[name, method] = (
                    np.stack(by_example, axis=1) if by_example else np.empty((0, 0))
                )
        return correlations

    def _correlate(self, example: ScoredExample, method: str, name: str) -> Floats:
        """[layer] of one example."""
        kept = example.keep(self.special_tokens)
        correlate = STATISTICS[self.statistic]
        return correlate(example.scores[method][:, kept], example.importance[name][kept])

    @property
    def yardsticks(self) -> tuple[Yardstick, ...]:
        """All that methods are measured by: importances, rationales, metrics of faithfulness."""
        marked = any(example.rationale is not None for example in self.examples)
        plain = (*self.against, *(PLAUSIBILITY if marked else ()))
        return (
            *((name, None) for name in plain),
            *((name, way) for way in self.replacements for name in self.faithfulness),
        )

    def list_methods(self, against: str) -> tuple[str, ...]:
        """The methods, and for a metric of faithfulness what they are to be compared with.

        Parameters
        ----------
        against
            The yardstick.
        """
        return (*self.methods, *(BASELINES if against in self.faithfulness else ()))

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
            rows = [example.faithful[way].values[against][method] for example in self.examples]
            return np.stack(rows, axis=1) if rows else np.empty((0, 0))
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
        found = {}
        for method in self.methods:
            by_example = []
            for example in self.examples:
                kept = example.keep(self.special_tokens)
                marks = (
                    np.zeros(len(kept), bool) if example.rationale is None else example.rationale
                )
                rows = example.scores[method][:, kept]
                by_example.append([measure_plausibility(row, marks[kept]) for row in rows])
            by_layer = np.moveaxis(np.array(by_example), 0, 1)  # [layer, example, measure]
            for place, name in enumerate(PLAUSIBILITY):
                found[name, method] = by_layer[..., place]
        return found

    def including(self, special_tokens: bool) -> "Report":
        """The same scores, correlated with or without CLS, SEP and the like.

        Parameters
        ----------
        special_tokens
            Whether they take part.
        """
        return replace(self, special_tokens=special_tokens)

    def rows(self) -> Iterator[ReportRow]:
        """(against, method, layer, mean, standard deviation, examples, how many are undefined).

        The layer of a scorer, of a random order and of the best one found is None. With
        faithfulness there is one more column, the replacement.
        """
        for against, replacement in self.yardsticks:
            for method in self.list_methods(against):
                values = self.values(method, against, replacement)
                layered = method not in (*self.scorers, *BASELINES)
                layers: tuple[int | None, ...] = self.layers if layered else (None,)
                for layer, row in zip(layers, values, strict=True):
                    known = (against, method, layer, *summarise(row, self.treat(against)))
                    yield (*known, replacement) if self.faithfulness else known

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
        first = self.replacements[:1]
        chosen = [
            row
            for row in self.rows()
            if row[:2] == (against, method)
            and (layer is None or row[2] in (layer, None))
            and row[7:] in ((), (None,), first)
        ]
        if not chosen:
            raise OptionError(
                f"this report has no {method} against {against} in layer {layer};"
                f" it has {', '.join(self.methods)}"
            )
        return float(chosen[-1][3])

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

        Intervals are bootstrapped over examples; p values come from changes of sign. All rows are
        one family: ask for fewer yardsticks or methods, and less is corrected.

        Parameters
        ----------
        against
            The yardsticks: importances, measures of plausibility, metrics; all if None.
        layer
            Of which layer; the top one computed if None.
        methods
            Between which, two or more; all if None. "random order" and "best found" are others to
            compare with.
        replacement
            For faithfulness: under which replacement, the first one if None.
        seed
            Of what is drawn at random.
        """
        return compare_methods(
            self, *read_comparison(self, against, layer, methods, replacement), seed
        )

    def agreement(self) -> Agreement:
        """How alike the replacements judge, where a list of them was given to `evaluate`."""
        return compare_replacements(self)

    def _panels(self) -> Iterator[Panel]:
        """One table per importance: methods down, layers across, mean ± standard deviation.

        What else was measured stands beside the correlations: one table per replacement.
        """
        statistic = STATISTIC_NAMES[self.statistic]
        for name in self.against:
            caption = f"{statistic} with {name} ({self.model}, {self.what()})"
            yield Panel(self._header(), self._cells(name), caption)
        plain = [yardstick for yardstick in self.yardsticks if yardstick[1] is None]
        if self.faithfulness:
            for way in self.replacements:
                metrics = [(name, way) for name in self.faithfulness]
                caption = (
                    f"Faithfulness, replacement: {way}, of the {self.target_of.replace('_', '-')},"
                    f" beside the correlations ({self.model}, {self.what()})"
                )
                yield self._compare([*plain, *metrics], caption)
            if len(self.replacements) > 1:
                found = self.agreement()
                caption = "Agreement of replacements: on the order of methods, and of examples"
                yield Panel(found.columns, found.rows(), caption)
        elif len(plain) > len(self.against):
            caption = f"Agreement with rationales ({self.model}, {self.what()})"
            yield self._compare(plain, caption)
        if self.sanity is not None:
            yield from self.sanity._panels()

    def _compare(self, yardsticks: Sequence[Yardstick], caption: str) -> Panel:
        """Methods and layers down, yardsticks across: mean ± standard deviation."""
        cells: dict[tuple[str, int | None], dict[str, ReportRow]] = {}
        for row in self.rows():
            if (row[0], row[7] if self.faithfulness else None) in yardsticks:
                cells.setdefault((row[1], row[2]), {})[row[0]] = row
        names = [name for name, _ in yardsticks]
        lines = []
        for (method, layer), by_name in cells.items():
            means = [
                f"{by_name[name][3]:.3f} ± {by_name[name][4]:.3f}" if name in by_name else None
                for name in names
            ]
            undefined = sorted({each[6] for each in by_name.values()})
            ends = dict.fromkeys([undefined[0], undefined[-1]])
            lines.append([method, layer, *means, "–".join(map(str, ends))])
        lower = [name for name in names if prefers_lower(name)]
        note = f"lower is better: {', '.join(lower)}" if lower else ""
        return Panel(["method", "layer", *names, "undefined"], lines, caption, note)

    def _header(self) -> list[str]:
        """Scorers have no layers, and so a column of their own."""
        layers = [f"layer {layer}" for layer in self.layers]
        return ["method", *layers, *["score"] * bool(self.scorers), "undefined"]

    def _cells(self, against: str) -> Iterator[list[str]]:
        for method in self.methods:
            rows = [row for row in self.rows() if row[:2] == (against, method)]
            means = [f"{row[3]:.2f} ± {row[4]:.2f}" for row in rows]
            blanks = [""] * len(self.layers)
            if method in self.scorers:
                means = [*blanks, *means]
            elif self.scorers:
                means = [*means, ""]
            undefined = sorted({row[6] for row in rows})
            ends = dict.fromkeys([undefined[0], undefined[-1]] if undefined else [])
            yield [method, *means, "–".join(map(str, ends))]

    def what(self) -> str:
        """What the correlations are over, in words."""
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
        return (
            f"{counted}; {', '.join(special) or 'special tokens'} {kept}; query {self.query}{zero}"
        )

    def _content(self) -> dict[str, Any]:
        """Everything, the scores of every token of every example too."""
        return {
            "model": self.model,
            "special_tokens": self.special_tokens,
            "query": self.query,
            "asked": self.asked,
            "layers": self.layers,
            "statistic": self.statistic,
            "undefined": self.undefined,
            "target_of": self.target_of,
            "seconds": self.seconds,
            **super()._content(),
            "sanity": None if self.sanity is None else self.sanity.list_rows(),
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
