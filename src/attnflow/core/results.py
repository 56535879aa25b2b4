"""What the methods return: `TokenAttention` and `MaxFlow`, with their tables and files."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count, check_integers
from attnflow.core.files import by_ending, dump_json, write_csv
from attnflow.core.groups import Group, list_numbers, sum_groups, word_groups
from attnflow.core.provenance import Source
from attnflow.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    import pandas


LIMITS = ("between", "source", "target")  # what limits a flow, by the codes of `limits`


@dataclass(frozen=True, eq=False)
class TokenAttention:
    """How much each token of layer `bottom` reaches each position of each layer.

    values: [layer, query, key], one matrix for each of `layers`, one row for each of `positions`,
    one column for each position of layer `bottom` (of raw attention: of the layer below), or for
    each of `groups`. tokens: the names of the keys. window, removed: the layers' windows and the
    positions that were taken out, as in the graph.

    >>> import attnflow as af
    >>> result = af.rollout(af.Attention([[[0.5, 0.5], [1.0, 0.0]]], tokens=["the", "key"]))
    >>> result.at(position=1)
    array([0.5, 0.5])
    >>> result.top(1, position=0)
    [(0, 'the', 0.75)]
    """

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
    limits: npt.NDArray[np.int8] | None = None  # [layer, query, key], places in LIMITS
    window: tuple[int | None, ...] | None = None
    removed: tuple[int, ...] = ()
    size: int | None = None  # positions of the graph
    edges: str = "attention"  # what an edge of the graph weighs
    source: Source | None = None  # where it came from

    @property
    def limited_by(self) -> npt.NDArray[np.str_] | None:
        """[layer, query, key], of flow only: what the maximum flow equals, before normalisation.

        "source": the sum of the source's row in its layer. "target": the sum of the target's
        column (of its group's) in layer `bottom` + 1. "between": neither, or a removed position.
        """
        return None if self.limits is None else np.array(LIMITS)[self.limits]

    @cached_property
    def saturated(self) -> npt.NDArray[np.bool_] | None:
        """[layer, query, key], of flow only: where source or target alone limit the flow."""
        return None if self.limits is None else self.limits != LIMITS.index("between")

    @cached_property
    def spread(self) -> Floats:
        """[layer, query]: 0 where a row is even, and says nothing, to 1 where all is on one key.

        Half the summed distance of the row, made to sum to 1, from even over the n keys that it
        may see, divided by the largest that this can be, 1 - 1/n.
        """
        places = range(len(self.layers))
        return np.stack([measure_spread(self.values[at], self._visible(at)) for at in places])

    @property
    def visible_keys(self) -> npt.NDArray[np.int64]:
        """[layer, query]: how many keys (or groups) each row may see."""
        return np.stack([self._visible(place).sum(axis=1) for place in range(len(self.layers))])

    def _visible(self, place: int) -> npt.NDArray[np.bool_]:
        """[query, key] of the layer at this place: the keys that each query may see.

        A step through a layer with window w leads at most w - 1 positions away. A group is seen
        if one of its positions is.
        """
        layer = self.layers[place]
        bottom = layer - 1 if self.bottom is None else self.bottom
        keys = np.arange(self.values.shape[-1])  # their positions, one group after another
        if self.groups is not None:
            keys = np.concatenate([group.positions for group in self.groups])
        ahead = keys[None, :] - np.array(self.positions)[:, None]  # [query, position]
        seen = ahead <= 0 if self.causal else np.ones(ahead.shape, bool)
        windows = (None,) if self.window is None else self.window[bottom:layer]
        if None not in windows:
            seen &= np.abs(ahead) <= sum(window - 1 for window in windows if window is not None)
        seen &= ~np.isin(keys, self.removed)
        if self.groups is None:
            return seen
        starts = np.cumsum([0, *(len(group.positions) for group in self.groups)])[:-1]
        return np.logical_or.reduceat(seen, starts, axis=1)

    def at(self, position: int, layer: int | None = None) -> Floats:
        """[key]: the row of one position, in the top layer computed if none is given."""
        layer = max(self.layers) if layer is None else layer
        (layer,), (position,) = (
            check_integers([layer], "layer"),
            check_integers([position], "position"),
        )
        if layer not in self.layers:
            raise OptionError(
                f"layer {layer} was not computed; this result has layers {list_numbers(self.layers)}"
            )
        if position not in self.positions:
            raise OptionError(
                f"position {position} was not computed; this result has positions {list_numbers(self.positions)}"
            )
        row: Floats = self.values[self.layers.index(layer), self.positions.index(position)]
        return row

    def select(self, position: int, layer: int) -> "TokenAttention":
        """The same with one layer and one position only."""
        self.at(position, layer)  # refuses what was not computed
        first, second = self.layers.index(layer), self.positions.index(position)
        part = (slice(first, first + 1), slice(second, second + 1))
        return replace(
            self,
            values=self.values[part],
            layers=(layer,),
            positions=(position,),
            queries=(self.queries[second],),
            limits=None if self.limits is None else self.limits[part],
        )

    def top(
        self, k: int = 5, *, position: int | None = None, layer: int | None = None
    ) -> list[tuple[int, str, float]]:
        """The k strongest keys of a row, as (key, token, value); of the first position computed, or the last if causal, by default."""
        k = check_count("k", k)
        if position is None:
            position = self.positions[-1 if self.causal else 0]
        row = self.at(position, layer)
        return [
            (int(key), self.tokens[key], float(row[key]))
            for key in np.argsort(-row, kind="stable")[:k]
        ]

    def by_word(self) -> "TokenAttention":
        """The same with the tokens of each word summed over keys; a token of no word stands alone.

        Flow refuses: the flow to a word is no sum, it is what `flow(..., groups="words")` gives.
        """
        if self.normalize == "receptive_field":
            raise OptionError(
                "what is relative to a receptive field does not add up over a word's tokens;"
                f" ask for it: {self.method}(graph, groups='words', normalize='receptive_field')"
            )
        if self.method == "flow":
            raise OptionError(
                "the flow to a word is not the sum of the flows to its tokens, which would rank"
                " words by their number of tokens; ask for it: flow(graph, groups='words')"
            )
        groups = word_groups(self.tokens, self.words)
        return replace(
            self,
            values=sum_groups(self.values, groups),
            tokens=tuple(group.name for group in groups),
            words=None,
            groups=groups,
        )

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one line for each layer, position and key."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas needs pandas: pip install 'attnflow[pandas]'"
            ) from error
        layers, queries, keys = self.values.shape
        columns = {
            "layer": np.repeat(self.layers, queries * keys),
            "position": np.tile(np.repeat(self.positions, keys), layers),
            "query": np.tile(np.repeat(np.array(self.queries, dtype=object), keys), layers),
            "key": np.tile(np.arange(keys), layers * queries),
            "token": np.tile(np.array(self.tokens, dtype=object), layers * queries),
            "value": self.values.ravel(),
        }
        return pandas.DataFrame(columns)

    def rows(self) -> Iterator[tuple[int, int, str, int, str, float]]:
        """(layer, position, query, key, token, value) for each value."""
        for matrix, layer in zip(self.values, self.layers, strict=True):
            for row, position, query in zip(
                matrix.tolist(), self.positions, self.queries, strict=True
            ):
                for key, (token, value) in enumerate(zip(self.tokens, row, strict=True)):
                    yield layer, position, query, key, token, value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .csv (one line a value), .json or .npz, by the ending of the name."""
        return by_ending(
            path, {".csv": self._write_csv, ".json": self._write_json, ".npz": self._write_npz}
        )

    def _write_csv(self, file: IO[bytes]) -> None:
        write_csv(file, ["layer", "position", "query", "key", "token", "value"], self.rows())

    def _write_json(self, file: IO[bytes]) -> None:
        content = {
            "method": self.method,
            "normalize": self.normalize,
            "layers": self.layers,
            "positions": self.positions,
            "bottom": self.bottom,
            "tokens": self.tokens,
            "queries": self.queries,
            "values": self.values.tolist(),
        }
        if self.groups is not None:
            content["groups"] = [group.positions for group in self.groups]
        if self.saturated is not None:
            content["saturated"] = self.saturated.tolist()
        file.write(dump_json(content).encode())

    def _write_npz(self, file: IO[bytes]) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {
            "values": self.values,
            "layers": np.array(self.layers),
            "positions": np.array(self.positions),
            "tokens": np.array(self.tokens),
            "queries": np.array(self.queries),
            "method": np.array(self.method),
            "normalize": np.array(self.normalize or "none"),
            "bottom": np.array(-1 if self.bottom is None else self.bottom),
        }
        if self.groups is not None:  # each key's positions, one after another, and how many it has
            arrays["group_positions"] = np.concatenate([group.positions for group in self.groups])
            arrays["group_lengths"] = np.array([len(group.positions) for group in self.groups])
        if self.saturated is not None:
            arrays["saturated"] = self.saturated
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        down_to = "" if self.bottom is None else f" to layer {self.bottom}"
        positions = f"{len(self.positions)} position{'s' * (len(self.positions) != 1)}"
        keys = f"{len(self.tokens)} {'keys' if self.groups is None else 'groups'}"
        layers = f"{self.method} from layers {list_numbers(self.layers)}{down_to}"
        return f"<TokenAttention: {layers}, {positions}, {keys}>"


@dataclass(frozen=True, eq=False)
class MaxFlow:
    """One maximum flow: its value, the flow on every edge, and the edges that limit it.

    edges: [layer, query, key], the flow on the edge from (layer, query) to (layer-1, key), for layers bottom+1..source layer.
    cut: (layer, query, key) of every edge of a minimum cut. All of them are full, and their capacities sum to the value.
    target: (layer, position), or (layer, positions) of a group that was taken together.
    """

    value: float
    source: tuple[int, int]
    target: tuple[int, int | tuple[int, ...]]
    edges: Floats  # [layer, query, key]
    cut: tuple[tuple[int, int, int], ...]
    cut_capacity: float
    tokens: tuple[str, ...]
    provenance: Source | None = None  # where it came from; `source` is a node

    @property
    def targets(self) -> tuple[int, ...]:
        """The positions of the target: one, or those of a group."""
        end = self.target[1]
        return end if isinstance(end, tuple) else (end,)

    def __repr__(self) -> str:
        return f"<MaxFlow: {self.value:.6g} from {self.source} to {self.target}, limited by {len(self.cut)} edges>"


def measure_spread(values: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """[...]: how far rows of values [..., key] are from even over the keys that are seen.

    0 where they are even, or nothing is there to compare; 1 where all is on one key.
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
