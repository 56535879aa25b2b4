"""`TruthReport`: where methods rank the token that is known to be true."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import ClassVar, NamedTuple

import numpy as np

from attnflow.analysis.evaluate.truth.ranks import (
    FamilyMean,
    TruthRank,
    average_families,
    split_families,
)
from attnflow.core.arrays import Floats
from attnflow.core.io.formatting import Panel, format_count
from attnflow.core.io.tables import Table
from attnflow.core.provenance import Source
from attnflow.errors import OptionError

MEASURES = TruthRank._fields
# tokens from the value to the last one, up to and including each of these
DISTANCES = (10, 20, 40, 80)


class TruthRow(NamedTuple):
    """One method over all prompts."""

    method: str
    mrr: float  # the mean reciprocal rank of the value
    low: float  # of its 95 % interval
    high: float
    hit: float  # the share of prompts whose value alone is first
    precision: float  # the average precision of value and keys
    prompts: int
    keyed: int  # prompts whose keys are known


@dataclass(frozen=True, eq=False)
class RankedPrompt:
    """One prompt, and where each method ranks its true tokens.

    Parameters
    ----------
    family
        The kind of prompt.
    text, answer, foil
        The prompt, the right next word, and the one that it was contrasted with, if any.
    distance
        The tokens from the value to the last one.
    ranks
        By method.
    """

    family: str
    text: str
    answer: str
    foil: str | None
    distance: int
    ranks: dict[str, TruthRank]


@dataclass(frozen=True, eq=False)
class TruthReport(Table):
    """Where methods rank the true tokens of prompts; families weigh equally in all means.

    Intervals are bootstrapped within families. The first and the last token are not ranked.
    Tokens with the same score share their mean rank.

    Parameters
    ----------
    model
        The model's name.
    methods
        All that was ranked: methods, importances, scorers, and the orders "later tokens first",
        "earlier tokens first" and "random order".
    prompts
        The ranks per prompt.
    asked
        How many prompts were given; fewer were done if the run was interrupted.
    seconds
        Where the time went, by part.
    source
        Where the numbers came from.
    """

    columns: ClassVar = TruthRow._fields

    model: str
    methods: tuple[str, ...]
    prompts: tuple[RankedPrompt, ...]
    asked: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    source: Source | None = None

    @cached_property
    def families(self) -> tuple[str, ...]:
        """The family of each prompt."""
        return tuple(prompt.family for prompt in self.prompts)

    def values(self, method: str, measure: str = "reciprocal") -> Floats:
        """[prompt]: a measure of one method; NaN where it is undefined.

        Parameters
        ----------
        method
            One of `methods`.
        measure
            "reciprocal" (1 / the rank of the value), "hit" or "precision" (of value and keys).
        """
        if method not in self.methods:
            raise OptionError(f"unknown method {method!r}; choose from {', '.join(self.methods)}")
        if measure not in MEASURES:
            raise OptionError(f"unknown measure {measure!r}; choose from {', '.join(MEASURES)}")
        return np.array([getattr(prompt.ranks[method], measure) for prompt in self.prompts])

    def mean(self, method: str, measure: str = "reciprocal") -> FamilyMean:
        """The mean of a method over all prompts, with its 95 % interval.

        Parameters
        ----------
        method, measure
            As in `values`.
        """
        return average_families(self.values(method, measure), self.families)

    def rows(self) -> Iterator[TruthRow]:
        """(method, mean reciprocal rank, its interval, hits, average precision, prompts, keyed)."""
        for method in self.methods:
            mrr, hit, precision = (self.mean(method, measure) for measure in MEASURES)
            yield TruthRow(
                method, *mrr[:3], hit.mean, precision.mean, mrr.prompts, precision.prompts
            )

    def differences(
        self, methods: Iterable[str] | None = None, measure: str = "reciprocal"
    ) -> "TruthDifferences":
        """Paired differences between methods; level where the 95 % interval holds 0.

        Parameters
        ----------
        methods
            Two or more; all if None.
        measure
            As in `values`.
        """
        chosen = list(self.methods if methods is None else methods)
        values = {method: self.values(method, measure) for method in chosen}
        if len(values) < 2:
            raise OptionError(
                "a difference is between two different methods or more; got"
                f" {', '.join(chosen) or 'none'}"
            )
        found = []
        for first, second in combinations(values, 2):
            mean = average_families(values[first] - values[second], self.families)
            is_level = mean.low <= 0 <= mean.high
            found.append(TruthDifference(first, second, *mean[:3], is_level, mean.prompts))
        return TruthDifferences(tuple(found), measure, self.source)

    def by_family(self, method: str, measure: str = "reciprocal") -> dict[str, float]:
        """The mean of a method in each family.

        Parameters
        ----------
        method, measure
            As in `values`.
        """
        groups = split_families(self.values(method, measure), self.families)
        return {family: float(values.mean()) for family, values in groups.items()}

    def by_distance(self, method: str, measure: str = "reciprocal") -> dict[str, float]:
        """The mean of a method over prompts by the distance of the value, in tokens.

        Parameters
        ----------
        method, measure
            As in `values`.
        """
        groups = split_families(self.values(method, measure), self._distances)
        return {name: float(groups[name].mean()) for name in name_distances() if name in groups}

    @cached_property
    def _distances(self) -> tuple[str, ...]:
        """The name of the distance of each prompt."""
        names = name_distances()
        places = np.searchsorted(DISTANCES, [prompt.distance for prompt in self.prompts])
        return tuple(names[place] for place in places)

    def _panels(self) -> Iterator[Panel]:
        of = f"({self.model}, {format_count(len(self.prompts), 'prompt')})"
        lines = [
            [
                row.method,
                f"{row.mrr:.2f} [{row.low:.2f}, {row.high:.2f}]",
                f"{row.hit:.2f}",
                f"{row.precision:.2f}" if row.keyed else None,
            ]
            for row in self.rows()
        ]
        keyed = next(self.rows()).keyed
        note = (
            "mrr: mean reciprocal rank of the true token, with its 95 % interval; hit: how often it"
            f" is first; precision: average precision of value and keys ({keyed} prompts)"
        )
        header = ["method", "mrr", "hit", "precision"]
        yield Panel(header, lines, f"Rank of the true token {of}", note)
        yield self._spread("by family", self.families, sorted(set(self.families)))
        known = [name for name in name_distances() if name in self._distances]
        yield self._spread("by tokens from the value to the end", self._distances, known)

    def _spread(self, title: str, groups: Sequence[str], names: Sequence[str]) -> Panel:
        """Mean reciprocal ranks: methods down, groups of prompts across."""
        lines = []
        for method in self.methods:
            found = split_families(self.values(method), groups)
            lines.append([method, *(f"{found[name].mean():.2f}" for name in names)])
        counts = [f"{name} ({groups.count(name)})" for name in names]
        return Panel(["method", *counts], lines, f"Mean reciprocal rank {title}")

    def _content(self) -> dict[str, object]:
        prompts = [
            {
                "family": prompt.family,
                "text": prompt.text,
                "answer": prompt.answer,
                "foil": prompt.foil,
                "distance": prompt.distance,
                "ranks": {name: rank._asdict() for name, rank in prompt.ranks.items()},
            }
            for prompt in self.prompts
        ]
        return {"model": self.model, **super()._content(), "prompts": prompts}

    def __repr__(self) -> str:
        return f"<TruthReport: {self.model}, {format_count(len(self.prompts), 'prompt')}>"


def name_distances() -> tuple[str, ...]:
    """The names of the groups of distances, in ascending order.

    >>> name_distances()
    ('1-10', '11-20', '21-40', '41-80', '81+')
    """
    starts = [1, *(limit + 1 for limit in DISTANCES)]
    ends = [*(f"-{limit}" for limit in DISTANCES), "+"]
    return tuple(f"{start}{end}" for start, end in zip(starts, ends, strict=True))


class TruthDifference(NamedTuple):
    """How much better a method ranks the true token than another, over the same prompts."""

    method: str
    other: str
    difference: float
    low: float
    high: float
    level: bool  # the 95 % interval holds 0
    prompts: int


@dataclass(frozen=True, eq=False)
class TruthDifferences(Table):
    """Paired differences between methods over prompts with known truth.

    Parameters
    ----------
    differences
        One per pair of methods.
    measure
        What is compared.
    source
        Where the numbers came from.
    """

    columns: ClassVar = TruthDifference._fields

    differences: tuple[TruthDifference, ...]
    measure: str
    source: Source | None = None

    def rows(self) -> Iterator[TruthDifference]:
        """(method, other, difference, low, high, level, prompts)."""
        yield from self.differences
