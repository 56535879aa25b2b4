"""The tables of benchmarks/which.py: the results of a model, as shares from a random order to the best one, and as sheets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnflow.analysis.statistics import kendall, spearman
from edge_scores import METHODS, Floats
from edges import Interval, bootstrap
from sheets import Sheet
from which_scores import (
    BEST,
    PLANTED,
    PRECISION,
    RANDOM,
    SPEARMAN,
    Record,
    Setting,
    list_rows,
)

EVEN, ODD, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)
# the score is made of these: blank-out, removing the top tokens, and keeping them
JUDGES = (SPEARMAN, "comprehensiveness", "sufficiency")
SCORE, BASE = "score", "comprehensiveness"


@dataclass(frozen=True)
class Measured:
    """All results of one model."""

    name: str
    setting: Setting
    records: Sequence[Record]

    @property
    def replacement(self) -> str:
        """The first replacement, which the tables use."""
        return self.setting.replacements[0]

    @property
    def yardsticks(self) -> tuple[str, ...]:
        """The names of the yardsticks."""
        return tuple(self.records[0]["yardsticks"][self.replacement])

    @property
    def candidates(self) -> list[str]:
        """The rows that `explain` could show first."""
        return [f"{edges} {method}" for edges in self.setting.edges for method in METHODS]

    def title(self, half: str) -> str:
        """The title of a table: model, texts and replacement."""
        lengths = [record["tokens"] for record in self.records]
        return (
            f"{self.name}, {half} of {len(self.records)} texts of {min(lengths)} to {max(lengths)} tokens;"
            f" replacement: {self.replacement}"
        )

    def values(
        self, yardstick: str, half: slice = ALL, way: str | None = None
    ) -> dict[str, Floats]:
        """[text] by row; texts where a yardstick is undefined are left out of all rows alike."""
        taken = [
            record["yardsticks"][way or self.replacement][yardstick] for record in self.records
        ]
        rows = {name: np.array([each[name] for each in taken[half]]) for name in taken[0]}
        known = ~np.isnan(np.stack(list(rows.values()))).any(axis=0)
        return {name: row[known] for name, row in rows.items()}

    def shares(self, yardstick: str, half: slice = ALL) -> dict[str, Floats]:
        """[text] by row: how far from a random order, 0, to the best one found, 1, on average over texts."""
        rows = self.values(yardstick, half)
        way = float(np.mean(rows[BEST] - rows[RANDOM]))
        return {name: (row - rows[RANDOM]) / way for name, row in rows.items()}

    def scores(self, half: slice = ALL, judges: Sequence[str] = JUDGES) -> dict[str, Floats]:
        """[text] by row: the mean of its shares by the yardsticks of the score that it has."""
        shares = [self.shares(name, half) for name in judges if name in self.yardsticks]
        common = [name for name in shares[0] if all(name in each for each in shares)]
        return {name: np.mean([each[name] for each in shares], axis=0) for name in common}


# ---- tables --------------------------------------------------------------------------------------


def tabulate(measured: Measured) -> Sheet:
    """Every row by every yardstick, over all texts; the best candidate by each is bold."""
    columns: dict[str, dict[str, Interval]] = {SCORE: interval_rows(measured.scores())}
    for name in measured.yardsticks:
        columns[name] = interval_rows(measured.values(name))
    return lay_out(measured, columns, measured.title("all"))


def tabulate_held_out(measured: Measured) -> Sheet:
    """The score of every row, and its parts, over the texts with odd numbers."""
    columns = {SCORE: interval_rows(measured.scores(ODD))}
    judges = [name for name in JUDGES if name in measured.yardsticks]
    columns |= {name: interval_rows(measured.shares(name, ODD)) for name in judges}
    return lay_out(measured, columns, measured.title("the odd"))


def interval_rows(rows: Mapping[str, Floats]) -> dict[str, Interval]:
    """Mean and interval of each row [text]."""
    return {name: bootstrap(row) for name, row in rows.items()}


def lay_out(measured: Measured, columns: Mapping[str, Mapping[str, Interval]], title: str) -> Sheet:
    """Rows down, yardsticks across."""
    best = {}
    for name, column in columns.items():
        lower = column[BEST].mean < column[RANDOM].mean
        pick = min if lower else max
        best[name] = pick(measured.candidates, key=lambda row: column[row].mean)
    lines = []
    for row in list_rows(measured.setting):
        cells = [str(column[row]) if row in column else "" for column in columns.values()]
        stands_out = [best[name] == row for name in columns]
        shown = row if row in measured.candidates else f"({row})"
        lines.append(
            [
                shown,
                *(
                    f"**{cell}**" if out else cell
                    for cell, out in zip(cells, stands_out, strict=True)
                ),
            ]
        )
    return Sheet(title, ["edges, method", *columns], lines)


def tabulate_planted(measured: Mapping[str, Measured]) -> Sheet:
    """Precision at k of every row on every planted model."""
    found = {name: interval_rows(each.values(PRECISION)) for name, each in measured.items()}
    names = [name for name in list_rows(PLANTED) if name != BEST]
    lines = [
        [name, *(str(column[name]).replace("+", "") for column in found.values())] for name in names
    ]
    header = ["edges, method", *(name.removeprefix("planted:") for name in found)]
    return Sheet(f"planted models, precision at k, {PLANTED.count} texts each", header, lines)


def tabulate_truth(measured: Mapping[str, Measured]) -> Sheet:
    """Whether yardsticks order the rows as precision at k does, where the truth is known."""
    yardsticks = [name for name in next(iter(measured.values())).yardsticks if name != PRECISION]
    lines = []
    for name in yardsticks:
        taus = [compare_orders(each, name, PRECISION) for each in measured.values()]
        lines.append([name, *(f"{tau:+.2f}" for tau in taus), f"{np.mean(taus):+.2f}"])
    header = ["yardstick", *(name.removeprefix("planted:") for name in measured), "mean"]
    return Sheet(
        "planted models: Kendall's tau between the order of the methods by a yardstick and by precision at k;"
        f" replacement: {PLANTED.replacements[0]}",
        header,
        lines,
    )


def compare_orders(measured: Measured, yardstick: str, other: str) -> float:
    """Kendall's tau between the means of the candidates by two yardsticks, both oriented so that higher is better."""
    first, second = (
        [float(np.mean(measured.shares(name)[row])) for row in measured.candidates]
        for name in (yardstick, other)
    )
    return float(kendall(np.array([first]), np.array(second))[0])


def tabulate_yardsticks(measured: Mapping[str, Measured]) -> Sheet:
    """Whether yardsticks agree on the order of the methods, on each model."""
    names = dict.fromkeys(name for each in measured.values() for name in each.yardsticks)
    lines = []
    for name in names:
        if name == BASE:
            continue
        cells = [
            f"{compare_orders(each, BASE, name):+.2f}" if name in each.yardsticks else ""
            for each in measured.values()
        ]
        lines.append([name, *cells])
    header = ["yardstick", *(f"{name} ({each.replacement})" for name, each in measured.items())]
    title = f"Kendall's tau between the order of the methods by {BASE} and by another yardstick (replacement)"
    return Sheet(title, header, lines)


def tabulate_replacements(measured: Measured) -> Sheet:
    """Whether two replacements agree on the order of the methods, and of the texts."""
    first, second = measured.setting.replacements
    lines = []
    for metric in measured.setting.metrics:
        one, two = (measured.values(metric, way=way) for way in (first, second))
        means = [
            [float(np.mean(rows[name])) for name in measured.candidates] for rows in (one, two)
        ]
        methods = float(kendall(np.array(means[:1]), np.array(means[1]))[0])
        texts = "undefined on different texts"
        if len(one[BEST]) == len(two[BEST]):
            each = [spearman(one[name][None], two[name])[0] for name in measured.candidates]
            texts = f"{np.nanmean(each):+.2f}"
        best = [
            max(measured.candidates, key=lambda name: float(np.mean(shares[name])))
            for shares in (share_rows(one), share_rows(two))
        ]
        lines.append([metric, f"{methods:+.2f}", texts, *best])
    header = ["metric", "methods: tau", "texts: Spearman", f"best by {first}", f"best by {second}"]
    return Sheet(f"{measured.name}: agreement of replacements, {first} and {second}", header, lines)


def share_rows(rows: Mapping[str, Floats]) -> dict[str, Floats]:
    """[text] by row, oriented so that higher is better."""
    sign = 1.0 if np.mean(rows[BEST]) >= np.mean(rows[RANDOM]) else -1.0
    return {name: sign * row for name, row in rows.items()}
