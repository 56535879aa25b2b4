"""`TokenAttention`: the result of a method, with its tables and files."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Array, Floats
from attnflow.core.checks import check_positions
from attnflow.core.comparison import Comparison, check_reference, compare_layers
from attnflow.core.groups import Group, list_numbers, sum_groups, word_groups
from attnflow.core.io.formatting import Panel, format_count
from attnflow.core.io.tables import Column
from attnflow.core.provenance import Source
from attnflow.core.row_table import KEY_COLUMNS, RowTable, pick_largest
from attnflow.errors import OptionError

LIMITS = ("between", "source", "target")  # what limits a flow, by the codes of `limits`


@dataclass(frozen=True, eq=False)
class TokenAttention(RowTable):
    """How much every token of layer `bottom` reaches the positions of higher layers.

    Parameters
    ----------
    values
        [layer, query, key]: one matrix per layer of `layers`, one row per position of `positions`,
        one column per position of layer `bottom` (raw attention: of the layer below), or per group
        of `groups`.
    method
        The name of the method.
    layers, positions
        The layers and positions of the rows; for rows of `sources`, the last position of each.
    bottom
        The layer that the keys are positions of; None for raw attention.
    tokens, queries
        The names of the keys, and of `positions`.
    causal
        Whether no query sees a later key.
    normalize
        "sum", "receptive_field" or None; see `rollout`.
    words
        The number of the word per token; None if unknown.
    groups
        The positions that a key takes together; None if keys are positions.
    sources
        The positions that a row takes together, per row; None if rows are of single positions.
    limits
        [layer, query, key], of flow only: indices into `LIMITS`; see `limited_by`.
    window, removed
        The windows of the graph's layers, and the positions removed from it.
    size
        The number of positions of the graph; inferred if None, unless there are groups.
    edges
        What an edge of the graph weighs.
    source
        The origin of the result.
    lost
        [layer, query]: the share of each row that was not followed, before the row was normalised;
        None if all was.

    >>> import attnflow as af
    >>> result = af.rollout(af.Attention([[[0.5, 0.5], [1.0, 0.0]]], tokens=["the", "key"]))
    >>> result.at(position=-1)
    array([0.5, 0.5])
    >>> result.top(1, position=0)
    [(0, 'the', 0.75)]
    """

    columns = (*KEY_COLUMNS, "value")
    row_fields = ("values", "limits", "lost")

    values: Floats  # [layer, query, key]
    method: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    bottom: int | None
    tokens: tuple[str, ...]
    queries: tuple[str, ...]
    causal: bool
    normalize: str | None
    words: tuple[int | None, ...] | None = None
    groups: tuple[Group, ...] | None = None
    limits: npt.NDArray[np.int8] | None = None  # [layer, query, key], indices into LIMITS
    window: tuple[int | None, ...] | None = None
    removed: tuple[int, ...] = ()
    size: int | None = None  # positions of the graph
    edges: str = "attention"  # what an edge of the graph weighs
    source: Source | None = None
    lost: Floats | None = None  # [layer, query]
    sources: tuple[Group, ...] | None = None  # one per row

    def __post_init__(self) -> None:
        if self.size is None and self.groups is None:  # keys are positions
            object.__setattr__(self, "size", int(self.values.shape[-1]))

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Per row, the positions that it is of: one, or those of a source."""
        if self.sources is None:
            return tuple((position,) for position in self.positions)
        return tuple(source.positions for source in self.sources)

    @property
    def limited_by(self) -> npt.NDArray[np.str_]:
        """[layer, query, key], of flow only: the bound that the maximum flow equals.

        "source": the sum of the row of the source (of all its rows) in its layer. "target": the sum
        of the column of the target, or its group, in layer `bottom` + 1. "between": neither, or a
        removed position.
        """
        if self.limits is None:
            raise OptionError(
                f"limited_by requires a maximum flow; got a result of {self.method}: use flow"
            )
        return np.array(LIMITS)[self.limits]

    @cached_property
    def saturated(self) -> npt.NDArray[np.bool_] | None:
        """[layer, query, key]: whether source or target alone limits a flow; None if not flow."""
        return None if self.limits is None else self.limits != LIMITS.index("between")

    @cached_property
    def spread(self) -> Floats:
        """[layer, query]: from 0, for an even row, to 1, for a row with all on one key.

        The total variation distance between the row, normalised to sum to 1, and the uniform
        distribution over the n keys that it may see, divided by its maximum, 1 - 1/n.
        """
        if self._sees_all:
            return measure_spread(self.values, np.ones(self.values.shape[-1], bool))
        places = range(len(self.layers))
        return np.stack([measure_spread(self.values[at], self.mask_visible(at)) for at in places])

    @property
    def visible_keys(self) -> npt.NDArray[np.int64]:
        """[layer, query]: the number of keys (or groups) that a row may see."""
        if self._sees_all:
            return np.full(self.values.shape[:2], self.values.shape[-1])
        return np.stack([self.mask_visible(place).sum(axis=1) for place in range(len(self.layers))])

    @property
    def _sees_all(self) -> bool:
        """Whether every row may see every key."""
        return not (self.causal or self.removed or any(self.window or ()))

    def mask_visible(self, place: int) -> npt.NDArray[np.bool_]:
        """[query, key]: whether the queries of a layer may see the keys.

        A group is seen if one of its positions is.

        Parameters
        ----------
        place
            The place of the layer among `layers`.
        """
        return self._count_visible(place) > 0

    def _count_visible(self, place: int) -> npt.NDArray[np.int64]:
        """[query, key] of the layer at this place: how many positions of a key a query may see.

        A step through a layer with window w leads at most w - 1 positions away. A source sees
        what one of its positions sees.
        """
        layer = self.layers[place]
        bottom = layer - 1 if self.bottom is None else self.bottom
        keys = np.arange(self.values.shape[-1])  # their positions, one group after another
        if self.groups is not None:
            keys = np.concatenate([group.positions for group in self.groups])
        ends = np.cumsum([0, *map(len, self.members)])[:-1]
        ahead = keys[None, :] - np.concatenate(self.members)[:, None]  # [member, position]
        seen = ahead <= 0 if self.causal else np.ones(ahead.shape, bool)
        windows = (None,) if self.window is None else self.window[bottom:layer]
        if None not in windows:
            seen &= np.abs(ahead) <= sum(window - 1 for window in windows if window is not None)
        seen &= ~np.isin(keys, self.removed)
        counts = np.logical_or.reduceat(seen, ends, axis=0).astype(np.int64)  # [query, position]
        if self.groups is None:
            return counts
        starts = np.cumsum([0, *(len(group.positions) for group in self.groups)])[:-1]
        return np.add.reduceat(counts, starts, axis=1)

    def at(self, position: int, layer: int | None = None) -> Floats:
        """[key]: the row of one position of one layer.

        Parameters
        ----------
        position
            The position; a negative one counts from the end of the sequence.
        layer
            The layer; the top one of this result if None.
        """
        place, row = self._find_row(position, layer)
        values: Floats = self.values[place, row]
        return values

    @property
    def _ranked(self) -> Floats:
        return self.values

    def by_word(self) -> "TokenAttention":
        """A copy with the keys of a word summed; a token without a word stands alone.

        Flow refuses, as the flow to a word is not a sum: `flow(..., groups="words")` computes it.
        """
        if self.normalize == "receptive_field":
            raise OptionError(
                "values relative to a receptive field do not add up over a word's tokens;"
                f" use {self.method}(graph, groups='words', normalize='receptive_field')"
            )
        if self.method == "flow" or self.limits is not None:
            raise OptionError(
                "the flow to a word is not the sum of the flows to its tokens, which would rank"
                " words by their number of tokens; use flow(graph, groups='words')"
            )
        groups = word_groups(self.tokens, self.words)
        return replace(
            self,
            values=sum_groups(self.values, groups),
            tokens=tuple(group.name for group in groups),
            words=None,
            groups=groups,
        )

    def compared_with(self, reference: str, *, exclude: Iterable[int] = ()) -> Comparison:
        """Compare every row with its expectation.

        Parameters
        ----------
        reference
            "even": uniform attention over the keys that a row may see. "others": the mean of the
            other rows of the same layer that may see a key, each relative to its even share;
            requires at least two positions.
        exclude
            Positions to leave out first, for instance sinks, or all groups that hold one of them.
            The rest of each row sums to 1 again.

        >>> import attnflow as af
        >>> raw = af.raw([[[0.9, 0.1], [0.3, 0.7]]])
        >>> raw.compared_with("others").difference.round(3).tolist()
        [[[0.6, -0.6], [-0.6, 0.6]]]
        """
        check_reference(reference, len(self.positions))
        gone = self._find_keys(exclude)
        layers = [
            (self.values[place], self._count_visible(place)) for place in range(len(self.layers))
        ]
        return Comparison(
            *compare_layers(layers, gone, reference),
            reference=reference,
            excluded=gone,
            method=self.method,
            layers=self.layers,
            positions=self.positions,
            tokens=self.tokens,
            queries=self.queries,
            causal=self.causal,
            groups=self.groups,
            size=self.size,
            source=self.source,
            sources=self.sources,
        )

    def _find_keys(self, positions: Iterable[int]) -> tuple[int, ...]:
        """The places of the keys that hold one of these positions."""
        if self.groups is None:
            return tuple(dict.fromkeys(check_positions(positions, len(self.tokens), "exclude")))
        size = self.size or 1 + max(max(group.positions) for group in self.groups)
        gone = set(check_positions(positions, size, "exclude"))
        return tuple(
            place for place, group in enumerate(self.groups) if gone.intersection(group.positions)
        )

    def rows(self) -> Iterator[tuple[str, int, int, str, int, str, float]]:
        """One (method, layer, position, query, key, token, value) per value."""
        return self._list_rows(self.values)

    def _by_column(self) -> dict[str, Column]:
        return self._list_columns(value=self.values)

    def _view(self) -> Iterator[Panel]:
        """The row of the default position in the top layer, its strongest keys in their order."""
        shown = self.select(self._choose_position())
        row = shown.values[0, 0]
        strongest = pick_largest(row)
        kind = "keys" if self.groups is None else "groups"
        cut = f"the {len(strongest)} strongest of {len(row):,} {kind}"
        yield Panel(
            ("key", "token", "value"),
            [(key, self.tokens[key], float(row[key])) for key in strongest],
            caption=f"{self.method}: {shown._name_row()}",
            note=cut if len(strongest) < len(row) else "",
            bar="value",
        )

    def _content(self) -> dict[str, object]:
        content = {
            "method": self.method,
            "edges": self.edges,
            "normalize": self.normalize,
            "layers": self.layers,
            "positions": self.positions,
            "bottom": self.bottom,
            "tokens": self.tokens,
            "queries": self.queries,
            "values": self.values,
            **self._group_content(),
        }
        if self.sources is not None:
            content["sources"] = [source.positions for source in self.sources]
        flags = {"saturated": self.saturated, "lost": self.lost}
        return content | {name: array for name, array in flags.items() if array is not None}

    def _arrays(self) -> dict[str, object]:
        bottom = -1 if self.bottom is None else self.bottom
        return {**super()._arrays(), "normalize": self.normalize or "none", "bottom": bottom}

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        down_to = "" if self.bottom is None else f" to layer {self.bottom}"
        kind = "position" if self.sources is None else "source"
        positions = format_count(len(self.positions), kind)
        keys = format_count(len(self.tokens), "key" if self.groups is None else "group")
        layers = f"{self.method} from layers {list_numbers(self.layers)}{down_to}"
        return f"<TokenAttention: {layers}, {positions}, {keys}>"


def measure_spread(values: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """[...]: how far rows of values [..., key] are from even over the keys that are seen.

    0 for even rows, and for rows with fewer than two keys; 1 if all is on one key.
    """
    rows = np.where(seen, values, 0.0)
    count, sums = seen.sum(axis=-1), rows.sum(axis=-1)
    shares = np.divide(rows, sums[..., None], out=np.zeros_like(rows), where=sums[..., None] > 0)
    even = np.where(seen, 1 / np.maximum(count, 1)[..., None], 0.0)
    distance = np.abs(shares - even).sum(axis=-1) / 2
    most = 1 - 1 / np.maximum(count, 1)
    told = (most > 0) & (sums > 0)
    spread: Floats = np.divide(distance, most, out=np.zeros_like(distance), where=told)
    return spread
