"""`Comparison`: token attention beside its expectation.

All keys that a row may see are compared, except those left out; the shares that remain sum to 1.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.groups import Group, list_numbers, sum_groups
from attnflow.core.io.formatting import Panel
from attnflow.core.io.tables import Column
from attnflow.core.provenance import Source
from attnflow.core.row_table import KEY_COLUMNS, RowTable, pick_largest
from attnflow.errors import OptionError

REFERENCES = ("even", "others")
DOUBLINGS = 3  # `scaled` ends at 2**DOUBLINGS times the expectation

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Comparison(RowTable):
    """Token attention compared with its expectation.

    Returned by `compared_with` of a `TokenAttention`, or of a `PromptAttention`, whose generated
    tokens are then the queries and whose prompt tokens are the keys.

    Parameters
    ----------
    shares
        [layer, query, key]: the shares of the compared keys; a row sums to 1, or is 0 if nothing is
        left. Keys that were left out, or that a row may not see, are 0.
    expected
        [layer, query, key]: the expected shares.
    excluded_share
        [layer, query]: the share of a row that lies on the keys that were left out.
    reference
        The expectation: "even", uniform attention over the keys that a row may see and that are
        not left out; or "others", the mean of the other rows of the layer.
    excluded
        The places of the keys that were left out.
    method, layers, positions, tokens, queries
        Those of the compared result; for a `PromptAttention`, positions are the numbers of the
        generated tokens.
    causal, groups, size, source, sources
        Those of the result as well.

    >>> import attnflow as af
    >>> weights = [[[0.5, 0.3, 0.2], [0.5, 0.375, 0.125], [0.5, 0.5, 0.0]]]
    >>> raw = af.raw(af.Attention(weights, tokens=["[CLS]", "a", "key"]))
    >>> compared = raw.compared_with("even", exclude=[0])
    >>> compared.shares[0, 0], compared.ratio[0, 0], compared.excluded_share[0]
    (array([0. , 0.6, 0.4]), array([nan, 1.2, 0.8]), array([0.5, 0.5, 0.5]))
    >>> compared.top(1, position=1)
    [(1, 'a', 0.25)]
    """

    columns = (*KEY_COLUMNS, "share", "expected", "difference", "ratio")
    row_fields = ("shares", "expected", "excluded_share")

    shares: Floats  # [layer, query, key]
    expected: Floats  # [layer, query, key]
    excluded_share: Floats  # [layer, query]
    reference: str
    excluded: tuple[int, ...]
    method: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    queries: tuple[str, ...]
    causal: bool = False
    groups: tuple[Group, ...] | None = None
    size: int | None = None
    source: Source | None = None
    sources: tuple[Group, ...] | None = None

    @cached_property
    def difference(self) -> Floats:
        """[layer, query, key]: shares - expected."""
        return self.shares - self.expected

    @cached_property
    def ratio(self) -> Floats:
        """[layer, query, key]: shares / expected; NaN where 0 is expected."""
        nothing = np.full_like(self.shares, np.nan)
        return np.divide(self.shares, self.expected, out=nothing, where=self.expected > 0)

    @cached_property
    def scaled(self) -> Floats:
        """[layer, query, key]: log2(ratio) / 3 from -1 to 1, one scale for all results.

        -1: at most 1/8 of the expectation, 0 included. 0: as expected, or not compared. 1: at least
        8 times as much, or any share where 0 is expected.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.clip(np.log2(self.ratio) / DOUBLINGS, -1.0, 1.0)
        unexpected = np.where(self.shares > 0, 1.0, 0.0)
        return np.where(self.expected > 0, scaled, unexpected)

    def grouped(self, groups: Sequence[Group]) -> "Comparison":
        """A copy whose keys are groups of these keys, with shares and expectations summed.

        Parameters
        ----------
        groups
            Names, and the places of the keys to take together.
        """
        gone = set(self.excluded)
        return replace(
            self,
            shares=sum_groups(self.shares, groups),
            expected=sum_groups(self.expected, groups),
            excluded=tuple(
                place for place, group in enumerate(groups) if gone.issuperset(group.positions)
            ),
            tokens=tuple(group.name for group in groups),
            groups=tuple(groups),
        )

    @property
    def _ranked(self) -> Floats:
        return self.difference

    def rows(self) -> Iterator[tuple[object, ...]]:
        """One row of all columns per key; the ratio is None where 0 is expected."""
        ratio = self.ratio.astype(object)
        ratio[np.isnan(self.ratio)] = None
        return self._list_rows(self.shares, self.expected, self.difference, ratio)

    def _by_column(self) -> dict[str, Column]:
        numbers = {"difference": self.difference, "ratio": self.ratio}
        return self._list_columns(share=self.shares, expected=self.expected, **numbers)

    def _view(self) -> Iterator[Panel]:
        """The default position in the top layer, the keys that differ most in their order."""
        shown = self.select(self._choose_position())
        arrays = (shown.shares, shown.expected, shown.difference)
        numbers = np.stack([array[0, 0] for array in arrays], axis=1)  # [key, column]
        most = pick_largest(np.abs(numbers[:, 2]))
        left_out = (
            f"; left out: keys {list_numbers(self.excluded)}, {shown.excluded_share[0, 0]:.0%}"
            if self.excluded
            else ""
        )
        cut = f"the {len(most)} of {len(numbers):,} that differ most"
        yield Panel(
            ("key", "token", "share", "expected", "difference"),
            [(key, self.tokens[key], *numbers[key].tolist()) for key in most],
            caption=f"{self.method} compared with {self.reference}: {shown._name_row()}{left_out}",
            note=cut if len(most) < len(numbers) else "",
            bar="difference",
        )

    def _content(self) -> dict[str, object]:
        return {
            "method": self.method,
            "reference": self.reference,
            "layers": self.layers,
            "positions": self.positions,
            "tokens": self.tokens,
            "queries": self.queries,
            "excluded": self.excluded,
            "excluded_share": self.excluded_share,
            "shares": self.shares,
            "expected": self.expected,
            **self._group_content(),
        }

    def __repr__(self) -> str:
        left_out = f", without keys {list_numbers(self.excluded)}" if self.excluded else ""
        layers = f"layers {list_numbers(self.layers)}"
        return f"<Comparison: {self.method} with {self.reference}, {layers}{left_out}>"


# ---- expectations -------------------------------------------------------------------------------


def check_reference(reference: str, rows: int) -> None:
    """Refuse an unknown reference, or one that requires more rows."""
    if reference not in REFERENCES:
        raise OptionError(
            f"unknown reference {reference!r}; choose from {', '.join(REFERENCES)}",
            options=["reference"],
        )
    if reference == "others" and rows < 2:
        raise OptionError(
            "'others' are the other rows of a layer, and this result has one: compute several"
            " positions, or compare with 'even'"
        )


def compare_rows(
    values: Floats, counts: Counts, excluded: Collection[int], reference: str
) -> tuple[Floats, Floats, Floats]:
    """(shares, expected, excluded share) of the rows [query, key] of one layer.

    counts: [query, key], how many positions of a key a row may see: 0 or 1, more for groups.

    "even": a key's share of the positions that the row may see and that are not left out.
    "others": each other row that sees the key gives it some multiple of its even share; the
    expectation is the mean of these multiples, times the row's own even share. If every row sees
    every key this is the mean of their shares; in a causal model, short rows, whose shares are all
    large, do not count as preference. A key that no other row sees is as expected, and the others
    are scaled to the row's share of them.
    """
    kept = counts.copy()
    kept[:, list(excluded)] = 0
    whole = np.where(counts > 0, values, 0.0).sum(axis=-1, keepdims=True)
    rows = np.where(kept > 0, values, 0.0)
    shares = normalise(rows)
    left = rows.sum(axis=-1, keepdims=True)
    gone = np.divide(whole - left, whole, out=np.zeros_like(whole), where=whole > 0)[:, 0]
    even = normalise(np.where(left > 0, kept, 0).astype(np.float64))  # an empty row is not compared
    if reference == "even":
        return shares, even, gone
    times = np.divide(shares, even, out=np.zeros_like(shares), where=even > 0)
    others = (even > 0).sum(axis=0) - (even > 0)  # [query, key]: how many other rows see it
    summed = np.maximum(times.sum(axis=0) - times, 0.0)
    mean = np.divide(summed, others, out=np.zeros_like(summed), where=others > 0)
    comparable = np.where(others > 0, shares, 0.0).sum(axis=-1, keepdims=True)
    expected = comparable * normalise(np.where(others > 0, even * mean, 0.0))
    return shares, np.where(others > 0, expected, shares), gone


def compare_layers(
    layers: Iterable[tuple[Floats, Counts]], excluded: Collection[int], reference: str
) -> tuple[Floats, Floats, Floats]:
    """The same for several layers: the first three fields of a `Comparison`."""
    shares, expected, gone = zip(
        *(compare_rows(*layer, excluded, reference) for layer in layers), strict=True
    )
    return np.stack(shares), np.stack(expected), np.stack(gone)


def normalise(rows: Floats) -> Floats:
    """Rows [..., key] that sum to 1, where they are not all 0."""
    sums = rows.sum(axis=-1, keepdims=True)
    shares: Floats = np.divide(rows, sums, out=np.zeros_like(rows), where=sums > 0)
    return shares
