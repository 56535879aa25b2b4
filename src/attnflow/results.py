"""What the methods return: `TokenAttention` and `MaxFlow`, with their tables and files."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.errors import MissingExtraError, OptionError
from attnflow.files import by_ending, dump_json, write_csv
from attnflow.graph import Floats, integers

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class TokenAttention:
    """How much each token of layer `bottom` reaches each position of each layer.

    values: [layer, query, key]: one matrix for each of `layers`, one row for each of `positions`, one column for each position of layer
    `bottom` (for raw attention: of the layer below). tokens: the names of the keys. saturated (flow only): [layer, query, key], where
    the maximum flow equals a bound that is the same for every source.

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
    saturated: npt.NDArray[np.bool_] | None = None

    def at(self, position: int, layer: int | None = None) -> Floats:
        """[key]: the row of one position, in the top layer computed if none is given."""
        layer = max(self.layers) if layer is None else layer
        (layer,), (position,) = integers([layer], "layer"), integers([position], "position")
        if layer not in self.layers:
            raise OptionError(
                f"layer {layer} was not computed; this result has layers {listed(self.layers)}"
            )
        if position not in self.positions:
            raise OptionError(
                f"position {position} was not computed; this result has positions {listed(self.positions)}"
            )
        row: Floats = self.values[self.layers.index(layer), self.positions.index(position)]
        return row

    def top(
        self, k: int = 5, *, position: int | None = None, layer: int | None = None
    ) -> list[tuple[int, str, float]]:
        """The k strongest keys of a row, as (key, token, value); of the first position computed, or the last if causal, by default."""
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise OptionError(f"top takes a whole number, at least 1; got {k!r}")
        if position is None:
            position = self.positions[-1 if self.causal else 0]
        row = self.at(position, layer)
        return [
            (int(key), self.tokens[key], float(row[key]))
            for key in np.argsort(-row, kind="stable")[:k]
        ]

    def by_word(self) -> "TokenAttention":
        """The same with the tokens of each word summed over keys; a token that belongs to no word stands alone."""
        groups = words_of(self.words)
        values = np.stack([self.values[..., group].sum(axis=-1) for group in groups], axis=-1)
        names = tuple(join_subwords([self.tokens[key] for key in group]) for group in groups)
        return replace(self, values=values, tokens=names, words=None, saturated=None)

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
        if self.saturated is not None:
            arrays["saturated"] = self.saturated
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        down_to = "" if self.bottom is None else f" to layer {self.bottom}"
        positions = f"{len(self.positions)} position{'s' * (len(self.positions) != 1)}"
        return f"<TokenAttention: {self.method} from layers {listed(self.layers)}{down_to}, {positions}, {len(self.tokens)} keys>"


@dataclass(frozen=True, eq=False)
class MaxFlow:
    """One maximum flow: its value, the flow on every edge, and the edges that limit it.

    edges: [layer, query, key], the flow on the edge from (layer, query) to (layer-1, key), for layers bottom+1..source layer.
    cut: (layer, query, key) of every edge of a minimum cut. All of them are full, and their capacities sum to the value.
    """

    value: float
    source: tuple[int, int]
    target: tuple[int, int]
    edges: Floats  # [layer, query, key]
    cut: tuple[tuple[int, int, int], ...]
    cut_capacity: float
    tokens: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<MaxFlow: {self.value:.6g} from {self.source} to {self.target}, limited by {len(self.cut)} edges>"


def words_of(words: Sequence[int | None] | None) -> list[list[int]]:
    """The positions of each word, from each token's word; a token that belongs to no word stands alone."""
    if words is None:
        raise OptionError(
            "this result has no words: give Attention(words=[...]), the number of each token's word"
        )
    groups: list[list[int]] = []
    for place, word in enumerate(words):
        if groups and word is not None and word == words[groups[-1][-1]]:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def join_subwords(tokens: Sequence[str]) -> str:
    """One word from its tokens, without the marks by which tokenizers say that a token starts or continues a word."""
    return "".join(token.removeprefix("##").replace("Ġ", "").replace("▁", "") for token in tokens)


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a message: 1..6 for a run, else one by one."""
    ordered = sorted(set(numbers))
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}..{ordered[-1]}"
    return ", ".join(map(str, ordered))
