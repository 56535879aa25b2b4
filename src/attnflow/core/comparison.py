"""`Comparison`: token attention beside what was to be expected of it.

All keys that a row may see are compared, but for those left out; the shares that remain sum to 1.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.formatting import VIEW_ROWS, Panel
from attnflow.core.groups import Group, list_numbers, sum_groups
from attnflow.core.lookup import find_row
from attnflow.core.provenance import Source
from attnflow.core.tables import ArrayTable
from attnflow.core.text import clean_text, show_token
from attnflow.errors import OptionError

REFERENCES = ("even", "others")
DOUBLINGS = 3  # the scale of `scaled` ends at 2 to the power of so many times what is expected

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Comparison(ArrayTable):
    """Token attention compared with what was to be expected of it.

    Made by `compared_with` of a `TokenAttention`, or of a `PromptAttention`, whose generated tokens
    are then the queries, and whose prompt tokens the keys.

    Parameters
    ----------
    shares
        [layer, query, key]: the shares of the keys that are compared; a row sums to 1, or is 0
        where nothing is left. Keys that were left out, or that a row may not see, are 0.
    expected
        [layer, query, key]: what was to be expected of them, 0 where nothing is.
    excluded_share
        [layer, query]: the share of a row that lies on the keys that were left out.
    reference
        What it is compared with: "even", attention without preference among the keys that a row
        may see and that are not left out; or "others", the mean of the other rows of the layer.
    excluded
        The keys that were left out, by their places.
    method, layers, positions, tokens, queries
        Those of the result that is compared; for a `PromptAttention`, positions are the numbers of
        the generated tokens.
    causal, groups, size, source
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

    columns: ClassVar = (
        *("method", "layer", "position", "query", "key", "token"),
        *("share", "expected", "difference", "ratio"),
    )

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

    @cached_property
    def difference(self) -> Floats:
        """[layer, query, key]: shares - expected."""
        return self.shares - self.expected

    @cached_property
    def ratio(self) -> Floats:
        """[layer, query, key]: shares / expected; NaN where nothing is expected."""
        nothing = np.full_like(self.shares, np.nan)
        return np.divide(self.shares, self.expected, out=nothing, where=self.expected > 0)

    @cached_property
    def scaled(self) -> Floats:
        """[layer, query, key]: log2(ratio) / 3 from -1 to 1, one scale for all results.

        -1: at most 1/8 of what was to be expected, 0 included. 0: as expected, or not compared.
        1: at least 8 times as much, or anything at all where nothing was to be expected.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.clip(np.log2(self.ratio) / DOUBLINGS, -1.0, 1.0)
        unexpected = np.where(self.shares > 0, 1.0, 0.0)
        return np.where(self.expected > 0, scaled, unexpected)

    def select(self, position: int, layer: int | None = None) -> "Comparison":
        """A copy with one position of one layer only.

        Parameters
        ----------
        position, layer
            As for `TokenAttention.at`; of a generation, the number of the generated token.
        """
        place, row = find_row(self.layers, self.positions, self.size, position, layer)
        part = (slice(place, place + 1), slice(row, row + 1))
        return replace(
            self,
            shares=self.shares[part],
            expected=self.expected[part],
            excluded_share=self.excluded_share[part],
            layers=(self.layers[place],),
            positions=(self.positions[row],),
            queries=(self.queries[row],),
        )

    def grouped(self, groups: Sequence[Group]) -> "Comparison":
        """A copy whose keys are groups of these keys, shares and what was to be expected summed.

        Parameters
        ----------
        groups
            Names, and the keys that are taken together, by their places.
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

    def top(
        self, k: int = 5, *, position: int | None = None, layer: int | None = None
    ) -> list[tuple[int, str, float]]:
        """The keys that exceed most what was to be expected, as (key, token, difference).

        Parameters
        ----------
        k
            The maximum number of keys.
        position
            As in `select`; if None, the first position, or the last if the result is causal.
        layer
            As in `select`.
        """
        check_count("k", k)
        chosen = self._default_position if position is None else position
        row = self.select(chosen, layer).difference[0, 0]
        order = np.argsort(-row, kind="stable")[:k]
        return [(int(key), self.tokens[key], float(row[key])) for key in order]

    @property
    def _default_position(self) -> int:
        return self.positions[-1 if self.causal else 0]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One row of all columns per value; the ratio is None where nothing is expected."""
        for place, layer in enumerate(self.layers):
            for row, (position, query) in enumerate(zip(self.positions, self.queries, strict=True)):
                here = (place, row)
                numbers = zip(
                    self.shares[here].tolist(),
                    self.expected[here].tolist(),
                    self.difference[here].tolist(),
                    self.ratio[here].tolist(),
                    strict=True,
                )
                for key, (share, expected, difference, ratio) in enumerate(numbers):
                    told = ratio if ratio == ratio else None
                    named = (self.method, layer, position, query, key, self.tokens[key])
                    yield *named, share, expected, difference, told

    def _by_column(self) -> dict[str, Any]:
        layers, queries, keys = self.shares.shape
        asking, tokens = (
            np.array([clean_text(name) for name in names], dtype=object)
            for names in (self.queries, self.tokens)
        )
        return {
            "method": np.full(self.shares.size, self.method, dtype=object),
            "layer": np.repeat(self.layers, queries * keys),
            "position": np.tile(np.repeat(self.positions, keys), layers),
            "query": np.tile(np.repeat(asking, keys), layers),
            "key": np.tile(np.arange(keys), layers * queries),
            "token": np.tile(tokens, layers * queries),
            "share": self.shares.ravel(),
            "expected": self.expected.ravel(),
            "difference": self.difference.ravel(),
            "ratio": self.ratio.ravel(),
        }

    def _view(self) -> Iterator[Panel]:
        """The default position in the top layer, the keys that differ most in their order."""
        shown = self.select(self._default_position)
        row = shown.difference[0, 0]
        most = np.sort(np.argsort(-np.abs(row), kind="stable")[:VIEW_ROWS]).tolist()
        where = f"layer {shown.layers[0]}, position {shown.positions[0]}"
        rows = [
            (
                key,
                self.tokens[key],
                *(float(part[0, 0, key]) for part in (shown.shares, shown.expected)),
            )
            for key in most
        ]
        left_out = (
            f"; left out: keys {list_numbers(self.excluded)}, {shown.excluded_share[0, 0]:.0%}"
            if self.excluded
            else ""
        )
        yield Panel(
            ("key", "token", "share", "expected", "difference"),
            [(*cells, cells[2] - cells[3]) for cells in rows],
            caption=f"{self.method} compared with {self.reference}: {where}"
            f" ({show_token(shown.queries[0])}){left_out}",
            note=f"the {len(most)} of {len(row):,} that differ most"
            if len(most) < len(row)
            else "",
            bar="difference",
        )

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
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
        }
        if self.groups is not None:
            content["groups"] = [group.positions for group in self.groups]
        return content

    def __repr__(self) -> str:
        left_out = f", without keys {list_numbers(self.excluded)}" if self.excluded else ""
        layers = f"layers {list_numbers(self.layers)}"
        return f"<Comparison: {self.method} with {self.reference}, {layers}{left_out}>"


# ---- what is expected ---------------------------------------------------------------------------


def check_reference(reference: Any, rows: int) -> str:
    """Refuse what nothing can be compared with."""
    if reference not in REFERENCES:
        raise OptionError(f"unknown reference {reference!r}; choose from {', '.join(REFERENCES)}")
    if reference == "others" and rows < 2:
        raise OptionError(
            "'others' are the other rows of a layer, and this result has one: compute several"
            " positions, or compare with 'even'"
        )
    return str(reference)


def compare_rows(
    values: Floats, counts: Counts, excluded: Collection[int], reference: str
) -> tuple[Floats, Floats, Floats]:
    """(shares, expected, excluded share) of the rows [query, key] of one layer.

    counts: [query, key], how many positions of a key a row may see: 0 or 1, more for groups.

    Even attention gives a key the share of its positions among those that the row may see and that
    are not left out. Others: the mean, over the other rows that see the key, of how many times its
    even share each gives it, times the row's own even share. Where every row sees every key this
    is the mean of their shares; in a causal model a short row, whose shares are all large, is not
    taken for preference. A key that no other row sees is as expected, and the rest is scaled
    to what the row gives it.
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
    """The same of several layers: the first three fields of a `Comparison`."""
    shares, expected, gone = zip(
        *(compare_rows(*layer, excluded, reference) for layer in layers), strict=True
    )
    return np.stack(shares), np.stack(expected), np.stack(gone)


def normalise(rows: Floats) -> Floats:
    """Rows [..., key] that sum to 1, where they are not all 0."""
    sums = rows.sum(axis=-1, keepdims=True)
    shares: Floats = np.divide(rows, sums, out=np.zeros_like(rows), where=sums > 0)
    return shares
