"""Comparisons within a report: paired differences of methods, and agreement of replacements."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from attnflow.analysis.statistics import bootstrap, correct_family, find_p_value, kendall, spearman
from attnflow.analysis.yardsticks import BASELINES
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.formatting import Panel
from attnflow.core.provenance import Source
from attnflow.core.tables import Table
from attnflow.errors import OptionError

if TYPE_CHECKING:
    from attnflow.analysis.report import Report


@dataclass(frozen=True)
class Difference:
    """One paired comparison: how much higher a method is than another, over the same examples."""

    against: str
    method: str
    other: str
    layer: int | None  # None where both are scores without layers
    difference: float  # mean of method minus other
    low: float  # of the 95 % interval
    high: float
    p: float
    corrected: float  # p, by Holm over the family
    examples: int  # that count
    undefined: int  # of one or both
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

    columns: ClassVar = (
        "against",
        "method",
        "other",
        "layer",
        "difference",
        "low",
        "high",
        "p",
        "corrected",
        "examples",
        "undefined",
        "replacement",
    )

    differences: tuple[Difference, ...]
    treated: str = "drop"
    source: Source | None = None

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One row per comparison, as `columns`."""
        for each in self.differences:
            yield tuple(getattr(each, name) for name in self.columns)

    def _panels(self) -> Iterator[Panel]:
        header = (
            *self.columns[:5],
            "95 % interval",
            *self.columns[7:],
        )
        rows = [(*row[:5], f"{row[5]:.4f} to {row[6]:.4f}", *row[7:]) for row in self.rows()]
        note = (
            "p: a test by changes of sign; corrected: by Holm over"
            f" {len(rows)} comparisons; undefined correlations"
            f" {'count as 0' if self.treated == 'zero' else 'are left out, in pairs'}"
        )
        yield Panel(header, rows, "Paired differences, method minus other", note)


def compare_methods(
    report: "Report",
    against: Sequence[str],
    layer: int | None,
    methods: Sequence[str],
    replacement: str | None,
    seed: int,
) -> Differences:
    """Every pair of methods by every yardstick, and the correction over all of them."""
    found: list[Difference] = []
    for name in against:
        for method, other in combinations(methods, 2):
            if name not in report.faithfulness and {method, other} & set(BASELINES):
                continue  # a random order is measured by faithfulness alone
            first, at = pick_layer(report, method, name, layer, replacement)
            second, beside = pick_layer(report, other, name, layer, replacement)
            values = first - second
            missing = int(np.isnan(values).sum())
            if report.treat(name) == "zero":
                values = np.nan_to_num(first) - np.nan_to_num(second)
            values = values[~np.isnan(values)]
            low, high = bootstrap(values, seed=seed)
            found.append(
                Difference(
                    name,
                    method,
                    other,
                    at if beside is None else beside,
                    float(values.mean()) if len(values) else float("nan"),
                    low,
                    high,
                    find_p_value(values, seed=seed),
                    float("nan"),
                    len(values),
                    missing,
                    replacement if name in report.faithfulness else None,
                )
            )
    corrected = correct_family([each.p for each in found])
    both = zip(found, corrected, strict=True)
    rows = tuple(Difference(**{**vars(each), "corrected": p}) for each, p in both)
    return Differences(rows, report.undefined, report.source)


def pick_layer(
    report: "Report", method: str, against: str, layer: int | None, replacement: str | None
) -> tuple[Floats, int | None]:
    """[example] of a method in a layer, the top one if None, and that layer; scorers have none."""
    rows = report.values(method, against, replacement)
    if method in (*report.scorers, *BASELINES):
        return rows[0], None
    chosen = max(report.layers) if layer is None else layer
    return rows[report.layers.index(chosen)], chosen


def read_comparison(
    report: "Report",
    against: str | Iterable[str] | None,
    layer: int | None,
    methods: Iterable[str] | None,
    replacement: str | None,
) -> tuple[list[str], int | None, list[str], str | None]:
    """What is to be compared, checked: yardsticks, layer, methods, replacement."""
    known = list(dict.fromkeys(name for name, _ in report.yardsticks))
    wanted = known if against is None else [against] if isinstance(against, str) else list(against)
    for name in wanted:
        if name not in known:
            raise OptionError(f"this report has no yardstick {name!r}; it has {', '.join(known)}")
    names = (*report.methods, *(BASELINES if report.faithfulness else ()))
    chosen = list(report.methods) if methods is None else list(methods)
    for name in chosen:
        if name not in names:
            raise OptionError(f"this report has no method {name!r}; it has {', '.join(names)}")
    if len(set(chosen)) < max(2, len(chosen)):
        raise OptionError(
            "a difference is between two different methods or more;"
            f" got {', '.join(chosen) or 'none'}"
        )
    return wanted, read_layer(report, layer), chosen, read_way(report, replacement)


def read_layer(report: "Report", layer: int | None) -> int | None:
    """A layer of the report; None for the top one."""
    if layer is None:
        return None
    (layer,) = check_integers([layer], "layer")
    if layer not in report.layers:
        known = ", ".join(map(str, report.layers)) or "none"
        raise OptionError(f"this report has no layer {layer}; it has {known}")
    return layer


def read_way(report: "Report", replacement: str | None) -> str | None:
    """A replacement of the report, the first if None; None if it has none."""
    if replacement is None:
        return next(iter(report.replacements), None)
    if replacement not in report.replacements:
        known = ", ".join(report.replacements) or "none"
        raise OptionError(f"this report has no replacement {replacement!r}; it has {known}")
    return replacement


# ---- agreement of replacements -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Agreement(Table):
    """How alike two replacements judge: by metric and pair of replacements.

    `methods` is Kendall's tau-b between the means of all rows (methods and layers) under one and
    the other: 1 if they put the methods into the same order. `examples` is the mean over these rows
    of Spearman's correlation over examples. NaN where either is undefined.
    """

    columns: ClassVar = ("metric", "replacement", "other", "methods", "examples", "rows")

    found: tuple[tuple[str, str, str, float, float, int], ...]
    source: Source | None = None

    def rows(self) -> Iterator[tuple[str, str, str, float, float, int]]:
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
    for metric in report.faithfulness:
        for pair in combinations(report.replacements, 2):
            first, second = (
                np.concatenate([report.values(each, metric, way) for each in report.methods])
                for way in pair
            )  # [method and layer, example]
            known = ~np.isnan(first + second).any(axis=0)
            first, second = first[:, known], second[:, known]
            methods = examples = float("nan")
            if known.any():
                methods = float(kendall(first.mean(axis=1)[None], second.mean(axis=1))[0])
                each = [
                    spearman(row[None], other)[0] for row, other in zip(first, second, strict=True)
                ]
                defined = [value for value in each if not np.isnan(value)]
                examples = float(np.mean(defined)) if defined else float("nan")
            found.append((metric, *pair, methods, examples, len(first)))
    return Agreement(tuple(found), report.source)


# ---- mean curves ---------------------------------------------------------------------------------

SHARES = np.linspace(0.0, 1.0, 21)  # of the tokens, where curves of texts of any length meet


@dataclass(frozen=True, eq=False)
class MeanCurve:
    """The mean over examples of the value of the target, by the share of tokens gone, or kept."""

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
    for side, found in enumerate(sides):
        for method in (*report.methods, *BASELINES):
            at = 0
            if method not in (*report.scorers, *BASELINES):
                at = report.layers.index(max(report.layers) if layer is None else layer)
            rows = []
            for example in report.examples:
                steps = example.faithful[place].curves[method][at, side]
                known = np.flatnonzero(~np.isnan(steps))
                if len(known) > 1:
                    rows.append(np.interp(SHARES, known / (len(steps) - 1), steps[known]))
            if rows:
                found[method] = MeanCurve(np.mean(rows, axis=0), np.std(rows, axis=0), len(rows))
    return sides
