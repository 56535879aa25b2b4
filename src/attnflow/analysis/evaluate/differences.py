"""Comparisons within a report: paired differences of methods, and agreement of replacements."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from attnflow.analysis.evaluate.yardsticks import BASELINES
from attnflow.analysis.statistics import (
    bootstrap,
    correct_family,
    find_p_value,
    kendall,
    spearman,
    summarise,
)
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.io.formatting import Panel
from attnflow.core.io.tables import Table
from attnflow.core.provenance import Source
from attnflow.errors import OptionError

if TYPE_CHECKING:
    from attnflow.analysis.evaluate.report import Report


class Difference(NamedTuple):
    """One paired comparison: how much higher a method is than another, over the same examples."""

    against: str
    method: str
    other: str
    layer: int | None  # None if both are scores without layers
    difference: float  # mean of method minus other
    low: float  # of the 95 % interval
    high: float
    p: float
    corrected: float  # p, by Holm over the family
    examples: int  # that count
    undefined: int  # for one or both
    replacement: str | None = None


@dataclass(frozen=True, eq=False)
class Differences(Table):
    """Paired differences between methods; all of them are one family of comparisons.

    Parameters
    ----------
    differences
        One per yardstick and pair of methods.
    treated
        How undefined correlations count: "drop" or "zero".
    source
        Where the numbers came from.

    >>> import attnflow as af
    >>> texts = ["the key to the cabinets", "the old keys", "the men near the house"]
    >>> report = af.evaluate(af.load("verb-number"), texts, methods=["raw", "rollout"], layers=6)
    >>> [(each.against, each.method, each.other) for each in report.differences("blank_out")]
    [('blank_out', 'raw', 'rollout')]
    """

    columns: ClassVar = Difference._fields

    differences: tuple[Difference, ...]
    treated: str = "drop"
    source: Source | None = None

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def rows(self) -> Iterator[Difference]:
        """One row per comparison."""
        return iter(self)

    def _panels(self) -> Iterator[Panel]:
        header = [name for name in self.columns if name != "high"]
        header[header.index("low")] = "95 % interval"
        rows = []
        for each in self:
            cells = each._asdict() | {"low": f"{each.low:.4f} to {each.high:.4f}"}
            del cells["high"]
            rows.append(list(cells.values()))
        note = (
            "p: a test by changes of sign; corrected: by Holm over"
            f" {len(rows)} comparisons; undefined correlations"
            f" {'count as 0' if self.treated == 'zero' else 'are left out, in pairs'}"
        )
        yield Panel(header, rows, "Paired differences, method minus other", note)


def compare_methods(
    report: "Report",
    against: str | Iterable[str] | None,
    layer: int | None,
    methods: Iterable[str] | None,
    replacement: str | None,
    seed: int,
) -> Differences:
    """Every pair of methods by every yardstick, corrected as one family; all of them if None."""
    yardsticks = read_yardsticks(report, against)
    names = read_compared(report, methods)
    layer, way = read_layer(report, layer), read_way(report, replacement)
    found = [
        measure_difference(report, name, *pair, layer, way, seed)
        for name, pair in product(yardsticks, combinations(names, 2))
        # baselines are measured by faithfulness alone
        if name in report.faithfulness or not set(pair) & set(BASELINES)
    ]
    corrected = correct_family([each.p for each in found])
    rows = [each._replace(corrected=p) for each, p in zip(found, corrected, strict=True)]
    return Differences(tuple(rows), report.undefined, report.source)


def measure_difference(
    report: "Report",
    against: str,
    method: str,
    other: str,
    layer: int | None,
    replacement: str | None,
    seed: int,
) -> Difference:
    """One pair of methods by one yardstick, not yet corrected."""
    (row, number), (other_row, other_number) = (
        find_layer(report, name, layer) for name in (method, other)
    )
    first = report.values(method, against, replacement)[row]
    second = report.values(other, against, replacement)[other_row]
    values = first - second
    missing = np.isnan(values)
    if report.treat(against) == "zero":
        values = np.nan_to_num(first) - np.nan_to_num(second)
    else:
        values = values[~missing]
    low, high = bootstrap(values, seed=seed)
    return Difference(
        against,
        method,
        other,
        number if other_number is None else other_number,
        float(values.mean()) if len(values) else float("nan"),
        low,
        high,
        find_p_value(values, seed=seed),
        float("nan"),
        len(values),
        int(missing.sum()),
        replacement if against in report.faithfulness else None,
    )


def find_layer(report: "Report", method: str, layer: int | None) -> tuple[int, int | None]:
    """The row of a layer among those of a method, and the layer; the top one if None.

    Scorers and baselines have one row, and no layer.
    """
    if not report.has_layers(method):
        return 0, None
    chosen = max(report.layers) if layer is None else layer
    return report.layers.index(chosen), chosen


def refuse_unknown(what: str, wanted: Iterable[object], known: Iterable[object]) -> None:
    """Refuse what a report does not have."""
    names = list(known)
    for each in wanted:
        if each not in names:
            got = ", ".join(map(str, names)) or "none"
            raise OptionError(f"this report has no {what} {each!r}; it has {got}")


def read_yardsticks(report: "Report", against: str | Iterable[str] | None) -> list[str]:
    """Yardsticks of the report; all if None."""
    known = list(dict.fromkeys(name for name, _ in report.yardsticks))
    if against is None:
        return known
    wanted = [against] if isinstance(against, str) else list(against)
    refuse_unknown("yardstick", wanted, known)
    return wanted


def read_compared(report: "Report", methods: Iterable[str] | None) -> list[str]:
    """Two or more methods of the report; all if None."""
    chosen = list(report.methods if methods is None else methods)
    refuse_unknown(
        "method", chosen, [*report.methods, *report.baselines * bool(report.faithfulness)]
    )
    if len(set(chosen)) < max(2, len(chosen)):
        raise OptionError(
            "a difference is between two different methods or more;"
            f" got {', '.join(chosen) or 'none'}"
        )
    return chosen


def read_layer(report: "Report", layer: int | None) -> int | None:
    """A layer of the report; None for the top one."""
    if layer is not None:
        refuse_unknown("layer", check_integers([layer], "layer"), report.layers)
    return layer


def read_way(report: "Report", replacement: str | None) -> str | None:
    """A replacement of the report, the first if None; None if it has none."""
    if replacement is None:
        return next(iter(report.replacements), None)
    refuse_unknown("replacement", [replacement], report.replacements)
    return replacement


# ---- agreement of replacements -------------------------------------------------------------------


class AgreementRow(NamedTuple):
    """The agreement of two replacements by one metric."""

    metric: str
    replacement: str
    other: str
    methods: float
    examples: float
    rows: int


@dataclass(frozen=True, eq=False)
class Agreement(Table):
    """The agreement of replacements, by metric and pair of replacements.

    `methods` is Kendall's tau-b between the means of all rows (methods and layers) under one and
    the other: 1 if they rank the methods alike. `examples` is the mean over these rows of
    Spearman's correlation over examples. NaN where either is undefined.
    """

    columns: ClassVar = AgreementRow._fields

    found: tuple[AgreementRow, ...]
    source: Source | None = None

    def rows(self) -> Iterator[AgreementRow]:
        """(metric, replacement, other, agreement on methods, on examples, rows compared)."""
        yield from self.found


def compare_replacements(report: "Report") -> Agreement:
    """The agreement of every pair of replacements by every metric."""
    if len(report.replacements) < 2:
        raise OptionError(
            "agreement is between two replacements or more, as evaluate(...,"
            " faithfulness=..., replacement=['unknown', 'attention']) measures them;"
            f" got {', '.join(report.replacements) or 'none'}"
        )
    found = []
    for metric, pair in product(report.faithfulness, combinations(report.replacements, 2)):
        first, second = (
            np.concatenate([report.values(each, metric, way) for each in report.methods])
            for way in pair
        )  # [method and layer, example]
        agreed = correlate_rows(first, second)
        found.append(AgreementRow(metric, *pair, *agreed, len(first)))
    return Agreement(tuple(found), report.source)


def correlate_rows(first: Floats, second: Floats) -> tuple[float, float]:
    """The agreement of values [row, example] on the order of rows, and of examples."""
    known = ~np.isnan(first + second).any(axis=0)
    if not known.any():
        return float("nan"), float("nan")
    first, second = first[:, known], second[:, known]
    methods = float(kendall(first.mean(axis=1)[None], second.mean(axis=1))[0])
    each = np.array(
        [spearman(row[None], other)[0] for row, other in zip(first, second, strict=True)]
    )
    return methods, summarise(each).mean


# ---- mean curves ---------------------------------------------------------------------------------

SHARES = np.linspace(0.0, 1.0, 21)  # of the tokens: where curves of texts of any length meet


@dataclass(frozen=True, eq=False)
class MeanCurve:
    """The mean over examples of the value of the target, by the share of tokens deleted or kept."""

    mean: Floats  # [share], at SHARES
    std: Floats  # [share]
    examples: int


def average_curves(
    report: "Report", layer: int | None = None, replacement: str | None = None
) -> list[dict[str, MeanCurve]]:
    """By side (deleted, kept), then by method: its mean curve, where one was measured."""
    layer = read_layer(report, layer)
    way = read_way(report, replacement)
    if way is None:
        raise OptionError(
            "there are curves where faithfulness was measured: evaluate(..., faithfulness=...)"
        )
    place = report.replacements.index(way)
    sides: list[dict[str, MeanCurve]] = [{}, {}]
    for method, side in product((*report.methods, *report.baselines), range(2)):
        row, _ = find_layer(report, method, layer)
        curves = [example.faithful[place].curves[method][row, side] for example in report.examples]
        resampled = resample_curves(curves)
        if resampled:
            mean, std = np.mean(resampled, axis=0), np.std(resampled, axis=0)
            sides[side][method] = MeanCurve(mean, std, len(resampled))
    return sides


def resample_curves(curves: Sequence[Floats]) -> list[Floats]:
    """Curves [step] with two or more known steps as [share], interpolated between these."""
    resampled = []
    for curve in curves:
        known = np.flatnonzero(~np.isnan(curve))
        if len(known) > 1:
            resampled.append(np.interp(SHARES, known / (len(curve) - 1), curve[known]))
    return resampled
