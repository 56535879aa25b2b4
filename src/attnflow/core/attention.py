"""`Attention`: the attention weights of one sequence as a model gave them, with its tokens."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnflow.core.files import open_input, write_file
from attnflow.core.graph import (
    LEAK,
    RESIDUAL,
    Array,
    AttentionGraph,
    Floats,
    check_mask,
    check_residual,
    check_rows,
    check_source,
    freeze,
    integers,
    layer_names_of,
    make_graph,
    make_room,
    names_of,
    needs_copy,
    positions_of,
    read_only,
    slabs,
    stack_layers,
    take_out,
    to_array,
    words_of,
)
from attnflow.core.provenance import Source
from attnflow.errors import AttnFlowError, FileError, OptionError, WeightsError

FUSIONS: dict[str, Callable[..., Array]] = {"mean": np.mean, "max": np.max, "min": np.min}
FORMAT = 1  # of the .npz file


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Attention:
    """One sequence's attention weights.

    Takes numpy, torch (any device, with gradient, bfloat16), JAX and TensorFlow arrays, and the
    list of per-layer arrays that a model returns. Rows must sum to 1; they are renormalised in
    float64. Weights of float32 stay float32, and all arrays are read-only.

    Parameters
    ----------
    weights
        [layer, head, query, key]; [layer, query, key] if heads are fused already; or a list of
        one array [batch=1, head, query, key] per layer.
    tokens
        One name per position.
    causal
        No query sees a later key; inferred if None.
    window
        A query sees only keys less than so many positions away: one number for all layers, or one
        (or None) per layer.
    words
        The word that each token belongs to, by number.
    fused
        How heads were fused, where they were: "mean" if None and there is no axis of heads.
    no_token_share
        [layer, query]: the share of attention that went to no token, in models whose softmax has
        an extra logit.
    layer_names
        What each layer is, where they are not simply a model's layers.
    grid
        Patches down and across, for images.
    source
        Where the weights came from, as a `Source`.
    copy
        False: the array given, if it is a numpy array of float32 or float64, becomes the
        Attention's own and is renormalised in place.
    sink
        The old name of `no_token_share`.

    >>> attention = Attention([[[0.5, 0.5], [1.0, 0.0]]], tokens=["the", "key"])
    >>> attention
    <Attention: 1 layer, fused heads (mean), 2 positions>
    """

    weights: Array  # [layer, head, query, key], rows sum to 1
    tokens: tuple[str, ...] | None
    causal: bool
    window: tuple[int | None, ...]
    words: tuple[int | None, ...] | None
    fused: str | None
    no_token_share: Floats | None  # [layer, query]
    layer_names: tuple[str, ...] | None
    grid: tuple[int, int] | None
    source: Source | None

    def __init__(
        self,
        weights: Any,
        *,
        tokens: Iterable[str] | None = None,
        causal: bool | None = None,
        window: int | Sequence[int | None] | None = None,
        words: Iterable[int | None] | None = None,
        fused: str | None = None,
        no_token_share: Any = None,
        layer_names: Iterable[str] | None = None,
        grid: tuple[int, int] | None = None,
        source: Source | None = None,
        copy: bool = True,
        sink: Any = None,
    ) -> None:
        if sink is not None:
            warnings.warn(
                "Attention(sink=...) is now called no_token_share: a sink is a token",
                FutureWarning,
                stacklevel=2,
            )
            no_token_share = sink if no_token_share is None else no_token_share
        array, precision = stack_layers(weights)
        if fused is not None and not isinstance(fused, str):
            raise WeightsError(f"fused must say how heads were fused, as a string; got {fused!r}")
        if array.ndim not in (3, 4):
            raise WeightsError(
                f"weights must have 4 axes [layer, head, query, key], or 3 if heads are fused; got shape {array.shape}"
            )
        if array.ndim == 3:
            fused = fused or "mean"
        elif fused is not None and array.shape[1] != 1:
            raise WeightsError(
                f"fused weights must have one head; got {array.shape[1]} with fused={fused!r}"
            )
        depth, size = array.shape[0], array.shape[-1]
        checked = check_rows(array, precision, copy=needs_copy(array, weights, copy))
        causal, windows = check_mask(checked, "weights", causal, window, leak=LEAK)
        if no_token_share is not None:
            no_token_share = check_shares(no_token_share, (depth, size))
        freeze(
            self,
            weights=read_only(checked.reshape(depth, -1, size, size)),
            tokens=names_of(tokens, size, "tokens"),
            causal=causal,
            window=windows,
            words=words_of(words, size),
            fused=fused,
            no_token_share=no_token_share,
            layer_names=layer_names_of(layer_names, depth),
            grid=None if grid is None else (int(grid[0]), int(grid[1])),
            source=check_source(source),
        )

    @property
    def sink(self) -> Floats | None:
        """The old name of `no_token_share`."""
        warnings.warn(
            "Attention.sink is now called no_token_share: a sink is a token",
            FutureWarning,
            stacklevel=2,
        )
        return self.no_token_share

    @property
    def depth(self) -> int:
        """The number of layers."""
        return int(self.weights.shape[0])

    @property
    def heads(self) -> int:
        """The number of heads kept; 1 if they are fused."""
        return int(self.weights.shape[1])

    @property
    def size(self) -> int:
        """The number of positions."""
        return int(self.weights.shape[2])

    def graph(
        self,
        *,
        heads: str | int | Callable[..., Array] = "mean",
        residual: float = RESIDUAL,
        top_head: tuple[int, int] | None = None,
        without: Sequence[int] = (),
    ) -> AttentionGraph:
        """The attention graph: heads fused, residual mixed in.

        heads: "mean", "max" or "min" (rows sum to 1 again, and a row with nothing left looks at itself), one head's number, or a function
        called as f(weights, axis=0) with weights [head, query, key]. top_head=(layer, head): that head alone in that layer, where the
        graph then ends, over fused layers below. without: positions to take out before the residual is mixed in, for instance a sink
        token; a row with nothing left looks at itself.

        >>> Attention([[[0.5, 0.5], [1.0, 0.0]]]).graph(residual=0.5).edges.tolist()
        [[[0.75, 0.25], [0.5, 0.5]]]
        """
        gone = positions_of(without, self.size, "without")
        if len(set(gone)) == self.size:
            raise OptionError(f"without must leave at least one position; got all {self.size}")
        fused = self._fuse(heads)
        if top_head is not None:
            layer, head = self._top_head(top_head)
            top = self.weights[layer - 1, head].astype(fused.dtype)[None]
            take_out(top, ())  # its rows sum to 1 in the precision of the others
            fused = np.concatenate([fused[: layer - 1], top])
        if gone:
            fused = fused.copy() if np.may_share_memory(fused, self.weights) else fused
            take_out(fused, gone)
        depth, residual = len(fused), check_residual(residual)
        return make_graph(
            weights=fused,
            residual=residual,
            tokens=self.tokens,
            causal=self.causal,
            window=self.window[:depth],
            words=self.words,
            removed=gone,
            layer_names=None if self.layer_names is None else self.layer_names[:depth],
            edge_name="attention",
            source=replace(self.source or Source(), edges="attention", residual=residual),
        )

    def _fuse(self, heads: str | int | Callable[..., Array]) -> Array:
        """[layer, query, key], rows sum to 1: of one head as it is, of several in float64."""
        if not isinstance(heads, str | int | np.integer | Callable):
            raise OptionError(f"heads must be a name, a head's number or a function; got {heads!r}")
        if self.fused is not None and heads not in (self.fused, "mean"):
            raise OptionError(
                f"these weights are fused over heads already ({self.fused}); heads={heads!r} needs weights of every head"
            )
        if isinstance(heads, str):
            if heads not in FUSIONS:
                raise OptionError(
                    f"unknown head fusion {heads!r}; choose from {', '.join(FUSIONS)}, a head's number or a function"
                )
        elif not callable(heads):
            (head,) = integers([heads], "heads")
            self._check_head(head)
        if self.heads == 1 and not callable(heads):
            return self.weights[:, 0]
        if not isinstance(heads, str) and not callable(heads):
            return np.ascontiguousarray(self.weights[:, head])
        fused = make_room((self.depth, self.size, self.size), 8)
        if isinstance(heads, str):
            for layers, queries in slabs(self.weights):
                part = self.weights[layers, :, queries].astype(np.float64)
                fused[layers, queries] = FUSIONS[heads](part, axis=1)
        else:
            for number, layer in enumerate(self.weights, start=1):
                fused[number - 1] = fused_by(heads, layer.astype(np.float64), number)
        take_out(fused, ())  # rows sum to 1 again
        return fused

    def _top_head(self, top_head: tuple[int, int]) -> tuple[int, int]:
        if np.shape(top_head) != (2,):
            raise OptionError(f"top_head must be a pair (layer, head); got {top_head!r}")
        layer, head = integers(top_head, "top_head")
        if self.fused is not None:
            raise OptionError(
                f"these weights are fused over heads already ({self.fused}); top_head needs weights of every head"
            )
        if not 1 <= layer <= self.depth:
            raise OptionError(f"the layer of top_head must be from 1 to {self.depth}; got {layer}")
        self._check_head(head)
        return layer, head

    def _check_head(self, head: int) -> None:
        if not 0 <= head < self.heads:
            raise OptionError(f"a head's number must be from 0 to {self.heads - 1}; got {head}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an .npz file: plain arrays, no pickle.

        >>> Attention([[[1.0]]], tokens=["hello"]).save("hello.npz").name
        'hello.npz'
        """
        if Path(path).suffix.lower() != ".npz":
            raise FileError(f"cannot write {Path(path)}: attention is saved as .npz")
        arrays: dict[str, Array] = {
            "format": np.array(FORMAT),
            "weights": self.weights,
            "causal": np.array(self.causal),
            "window": np.array([0 if window is None else window for window in self.window]),
        }
        if self.tokens is not None:
            # one string of UTF-8 bytes a token: numpy's own strings drop trailing NULs
            encoded = [token.encode("utf-8", "surrogatepass") for token in self.tokens]
            arrays["token_bytes"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
            arrays["token_lengths"] = np.array([len(token) for token in encoded])
        if self.words is not None:
            arrays["words"] = np.array([-1 if word is None else word for word in self.words])
        if self.fused is not None:
            arrays["fused"] = np.array(self.fused)
        if self.no_token_share is not None:
            arrays["no_token_share"] = self.no_token_share
        if self.layer_names is not None:
            arrays["layer_names"] = np.array(self.layer_names)
        if self.grid is not None:
            arrays["grid"] = np.array(self.grid)
        if self.source is not None:
            arrays["source"] = np.array(self.source.to_json())
        return write_file(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Attention":
        """Read what `save` wrote; or a .npy, or an .npz with one array, of weights.

        >>> _ = Attention([[[1.0]]], tokens=["hello"]).save("hello.npz")
        >>> Attention.load("hello.npz").tokens
        ('hello',)
        """
        arrays = read_arrays(Path(path))
        if "weights" not in arrays:
            if len(arrays) != 1:
                raise FileError(
                    f"{path} must hold one array, or one named 'weights'; it holds {', '.join(arrays) or 'none'}"
                )
            return cls(next(iter(arrays.values())))
        try:
            written = int(arrays.get("format", np.array(FORMAT)))
            if written > FORMAT:
                raise FileError(
                    f"{path} was written by a newer attnflow (format {written}); update attnflow to read it"
                )
            return cls(
                arrays["weights"],
                tokens=stored_tokens(arrays),
                causal=bool(arrays["causal"]) if "causal" in arrays else None,
                window=[int(window) or None for window in arrays["window"]]
                if "window" in arrays
                else None,
                words=[int(word) for word in arrays["words"]] if "words" in arrays else None,
                fused=arrays["fused"].item() if "fused" in arrays else None,
                # files of attnflow 0.2 and before call it "sink"
                no_token_share=arrays.get("no_token_share", arrays.get("sink")),
                layer_names=[str(name) for name in arrays["layer_names"]]
                if "layer_names" in arrays
                else None,
                grid=tuple(arrays["grid"].tolist()) if "grid" in arrays else None,
                source=Source.from_json(arrays["source"].item()) if "source" in arrays else None,
            )
        except (TypeError, ValueError, KeyError, OverflowError, IndexError) as error:
            if isinstance(error, AttnFlowError):
                raise
            raise FileError(
                f"{path} is not a file of attention weights that attnflow wrote: {error}"
            ) from error

    def __repr__(self) -> str:
        layers = f"{self.depth} layer{'s' * (self.depth > 1)}"
        heads = (
            f"fused heads ({self.fused})"
            if self.fused
            else f"{self.heads} head{'s' * (self.heads > 1)}"
        )
        return f"<Attention: {layers}, {heads}, {self.size} {'causal ' if self.causal else ''}positions>"


def check_shares(shares: Any, shape: tuple[int, int]) -> Floats:
    """no_token_share as float64, read-only; or an error."""
    checked = to_array(shares, "no_token_share")[0].astype(np.float64)
    if checked.shape != shape:
        raise WeightsError(
            f"no_token_share must have shape [layer, query], here {shape}; got {checked.shape}"
        )
    if not ((checked >= 0) & (checked <= 1 + LEAK)).all():
        raise WeightsError("no_token_share must be shares from 0 to 1; some are not")
    return read_only(checked)


def fused_by(fusion: Callable[..., Array], layer: Floats, number: int) -> Floats:
    """[query, key] of layer [head, query, key] by a function of the user's, or an error that names the layer's number."""
    try:
        matrix = np.asarray(fusion(layer, axis=0), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"a head fusion is called as f(weights, axis=0) and must give an array; it failed: {error}"
        ) from error
    if matrix.shape != layer.shape[1:] or not np.isfinite(matrix).all() or (matrix < 0).any():
        raise OptionError(
            f"a head fusion must turn [head, query, key] into [query, key], finite and not negative;"
            f" in layer {number} it gave shape {matrix.shape} for {layer.shape}"
        )
    return matrix


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz, or the one of an .npy; never unpickles."""
    try:
        with open_input(path) as file:
            loaded = np.load(file, allow_pickle=False)
            return (
                {"weights": loaded}
                if isinstance(loaded, np.ndarray)
                else {name: loaded[name] for name in loaded.files}
            )
    except FileNotFoundError as error:
        raise FileError(f"no such file: {path}") from error
    except IsADirectoryError as error:
        raise FileError(
            f"{path} is a folder; give an .npz or .npy file of attention weights"
        ) from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise FileError(f"{path} is too large for this machine's memory: {error}") from error
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds on damaged files
        if "pickle" in str(error).lower():
            raise FileError(
                f"{path} holds pickled objects or no array at all; attnflow reads plain .npz and .npy arrays"
            ) from error
        raise FileError(f"{path} is damaged, cut off, or no array file: {error}") from error


def stored_tokens(arrays: dict[str, Array]) -> list[str] | None:
    """The tokens of a saved file; also plain string arrays named 'tokens' that users write themselves."""
    if "token_bytes" in arrays:
        data, lengths = (
            arrays["token_bytes"].tobytes(),
            [int(length) for length in arrays["token_lengths"]],
        )
        if min(lengths, default=0) < 0 or sum(lengths) != len(data):
            raise ValueError("its tokens do not have the lengths that it says")
        ends = np.cumsum(lengths)
        return [
            data[end - length : end].decode("utf-8", "surrogatepass")
            for length, end in zip(lengths, ends, strict=True)
        ]
    if "tokens" in arrays and arrays["tokens"].ndim != 1:
        raise ValueError("its tokens are no list")
    return [str(token) for token in arrays["tokens"]] if "tokens" in arrays else None
