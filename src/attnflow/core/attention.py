"""`Attention`: the attention weights of one sequence, as a model returns them, with its tokens."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from attnflow.core.arrays import (
    Floats,
    check_rows,
    needs_copy,
    read_only,
    stack_layers,
    to_array,
)
from attnflow.core.checks import (
    check_grid,
    check_integers,
    check_positions,
    check_residual,
    check_source,
)
from attnflow.core.fusion import Fusion, check_head, fuse_heads, name_fusion
from attnflow.core.graph import RESIDUAL, AttentionGraph, LayeredWeights, make_graph
from attnflow.core.io.files import write_file, write_npz
from attnflow.core.io.formatting import format_count
from attnflow.core.io.storage import pack_attention, read_arrays, unpack_attention
from attnflow.core.io.views import format_attention
from attnflow.core.masks import LEAK, check_mask, take_out
from attnflow.core.padding import cut_sequence, pick_real, read_padded, read_padding
from attnflow.core.provenance import Source
from attnflow.errors import AttnFlowError, FileError, OptionError, WeightsError


class WeightsOptions(TypedDict, total=False):
    """Options that are the same for all sequences of a batch."""

    causal: bool | None
    window: int | Sequence[int | None] | None
    fused: str | None
    layer_names: Iterable[str] | None
    source: Source | None


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Attention(LayeredWeights):
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
        The size of a sliding window: a query sees only keys less than this many positions away.
        One number for all layers, or one (or None) per layer.
    words
        The number of the word per token.
    fused
        How heads were fused; if None, "mean" for weights without an axis of heads.
    no_token_share
        [layer, query]: the share of attention to no token, in models whose softmax has an extra
        logit.
    layer_names
        The names of the layers, if they are not simply a model's layers.
    grid
        The number of patches down and across, for images.
    source
        The origin of the weights, a `Source`.
    copy
        If False, a numpy array of float32 or float64 is not copied: it is renormalised in place and
        belongs to the Attention.

    >>> attention = Attention([[[0.5, 0.5], [1.0, 0.0]]], tokens=["the", "key"])
    >>> attention
    <Attention: 1 layer, fused heads (mean), 2 positions>
    """

    # weights are [layer, head, query, key], rows sum to 1
    fused: str | None
    no_token_share: Floats | None  # [layer, query]
    grid: tuple[int, int] | None
    source: Source | None

    def __init__(
        self,
        weights: object,
        *,
        tokens: Iterable[str] | None = None,
        causal: bool | None = None,
        window: int | Sequence[int | None] | None = None,
        words: Iterable[int | None] | None = None,
        fused: str | None = None,
        no_token_share: object = None,
        layer_names: Iterable[str] | None = None,
        grid: tuple[int, int] | None = None,
        source: Source | None = None,
        copy: bool = True,
    ) -> None:
        array, precision = stack_layers(weights)
        if fused is not None and not isinstance(fused, str):
            raise WeightsError(f"fused must say how heads were fused, as a string; got {fused!r}")
        if array.ndim not in (3, 4):
            raise WeightsError(
                "weights must have 4 axes [layer, head, query, key], or 3 if heads are fused;"
                f" got shape {array.shape}"
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
        self._fill(
            checked.reshape(depth, -1, size, size),
            tokens=tokens,
            words=words,
            layer_names=layer_names,
            causal=causal,
            window=windows,
            fused=fused,
            no_token_share=check_shares(no_token_share, (depth, size)),
            grid=check_grid(grid),
            source=check_source(source),
        )

    @property
    def heads(self) -> int:
        """The number of heads; 1 if they are fused."""
        return int(self.weights.shape[1])

    def graph(
        self,
        *,
        heads: Fusion = "mean",
        residual: float = RESIDUAL,
        top_head: tuple[int, int] | None = None,
        without: Sequence[int] = (),
    ) -> AttentionGraph:
        """The attention graph: heads fused, residual mixed in.

        Parameters
        ----------
        heads
            "mean", "max" or "min" (rows are renormalised; a row with nothing left becomes the
            identity), one head's number, or a function called as f(weights, axis=0) with weights
            [head, query, key].
        residual
            The weight of the residual connection, from 0 up to but not including 1.
        top_head
            (layer, head): that head alone in that layer, where the graph then ends, over fused
            layers below.
        without
            Positions to remove before the residual is mixed in, for instance a sink; a row with
            nothing left becomes the identity. Negative positions count from the end.

        >>> Attention([[[0.5, 0.5], [1.0, 0.0]]]).graph(residual=0.5).edges.tolist()
        [[[0.75, 0.25], [0.5, 0.5]]]
        """
        gone = check_positions(without, self.size, "without")
        if len(set(gone)) == self.size:
            raise OptionError(f"without must leave at least one position; got all {self.size}")
        residual = check_residual(residual)
        if not isinstance(heads, str) or heads not in (self.fused, "mean"):
            self._check_fused(f"heads={heads!r}")
        weights = fuse_heads(self.weights, heads if self.fused is None else "mean")
        if top_head is not None:
            layer, head = self._read_top_head(top_head)
            top = self.weights[layer - 1, head].astype(weights.dtype)[None]
            take_out(top, ())  # its rows sum to 1 in the precision of the others
            weights = np.concatenate([weights[: layer - 1], top])
        if gone:
            shared = np.may_share_memory(weights, self.weights)
            weights = weights.copy() if shared else weights
            take_out(weights, gone)
        depth = len(weights)
        return make_graph(
            weights=weights,
            residual=residual,
            tokens=self.tokens,
            causal=self.causal,
            window=self.window[:depth],
            words=self.words,
            removed=gone,
            layer_names=None if self.layer_names is None else self.layer_names[:depth],
            edge_name="attention",
            signed=False,
            source=replace(
                self.source or Source(),
                edges="attention",
                residual=residual,
                heads=self.fused or name_fusion(heads, top_head),
            ),
        )

    def _read_top_head(self, top_head: tuple[int, int]) -> tuple[int, int]:
        if np.shape(top_head) != (2,):
            raise OptionError(f"top_head must be a pair (layer, head); got {top_head!r}")
        layer, head = check_integers(top_head, "top_head")
        self._check_fused("top_head")
        if not 1 <= layer <= self.depth:
            raise OptionError(f"the layer of top_head must be from 1 to {self.depth}; got {layer}")
        return layer, check_head(head, self.heads)

    def _check_fused(self, option: str) -> None:
        """Refuse what needs weights of every head."""
        if self.fused is not None:
            raise OptionError(
                f"these weights are fused over heads already ({self.fused}); {option} needs weights"
                " of every head"
            )

    @classmethod
    def from_batch(
        cls,
        weights: object,
        mask: object,
        tokens: Iterable[Iterable[str]] | None = None,
        *,
        words: Iterable[Iterable[int | None]] | None = None,
        **options: Unpack[WeightsOptions],
    ) -> "list[Attention]":
        """One Attention per sequence of a padded batch, as a model returns its weights.

        Rows and columns of padding are cut out, wherever they stand. The attention of real tokens
        to padding must be 0, up to rounding.

        Parameters
        ----------
        weights
            A list of one array [batch, head, query, key] per layer, or [batch, query, key] if heads
            are fused; or one array [layer, batch, head, query, key]. One array of 4 axes is
            ambiguous, and refused.
        mask
            [batch, position]: the attention mask, 1 for real tokens and 0 for padding.
        tokens
            One list of names per sequence: of all positions, or of the real tokens.
        words
            One list of word numbers per sequence, of the same tokens.
        options
            `causal`, `window`, `fused`, `layer_names` and `source` of all sequences, as for
            `Attention`.

        >>> layer = [[[1.0, 0.0], [0.0, 0.0]], [[0.5, 0.5], [1.0, 0.0]]]  # [batch, query, key]
        >>> [one.size for one in Attention.from_batch([np.array(layer)], [[1, 0], [1, 1]])]
        [1, 2]
        """
        layers, precision = read_padded(weights)
        reals = read_padding(mask, len(layers[0]), layers[0].shape[-1])
        named = zip(
            pick_real(tokens, "tokens", reals), pick_real(words, "words", reals), strict=True
        )
        attentions = []
        for sequence, (names, numbers) in enumerate(named):
            try:
                own = cut_sequence(layers, precision, sequence, reals[sequence])
                one = cls(own, tokens=names, words=numbers, copy=False, **options)
            except WeightsError as error:
                raise WeightsError(f"sequence {sequence} of the batch: {error}") from error
            attentions.append(one)
        return attentions

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an .npz file: plain arrays, no pickle.

        Parameters
        ----------
        path
            The file's name, which ends in .npz.

        >>> Attention([[[1.0]]], tokens=["hello"]).save("hello.npz").name
        'hello.npz'
        """
        if Path(path).suffix.lower() != ".npz":
            raise FileError(f"cannot write {Path(path)}: attention is saved as .npz")
        return write_file(path, lambda file: write_npz(file, pack_attention(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Attention":
        """Read a file of `save`, a .npy of weights, or an .npz with one array of weights.

        Parameters
        ----------
        path
            The file's name.

        >>> _ = Attention([[[1.0]]], tokens=["hello"]).save("hello.npz")
        >>> Attention.load("hello.npz").tokens
        ('hello',)
        """
        arrays = read_arrays(Path(path))
        try:
            return cls(**unpack_attention(arrays, Path(path)))
        except (TypeError, ValueError, KeyError, OverflowError, IndexError) as error:
            if isinstance(error, AttnFlowError):
                raise
            raise FileError(
                f"{path} is not a file of attention weights that attnflow wrote: {error}"
            ) from error

    def _repr_html_(self) -> str:
        return format_attention(self)

    def __repr__(self) -> str:
        layers = format_count(self.depth, "layer")
        heads = f"fused heads ({self.fused})" if self.fused else format_count(self.heads, "head")
        positions = format_count(self.size, f"{'causal ' * self.causal}position")
        return f"<Attention: {layers}, {heads}, {positions}>"


def check_shares(shares: object, shape: tuple[int, int]) -> Floats | None:
    """Check no_token_share [layer, query], and make it float64 and read-only; None for None."""
    if shares is None:
        return None
    checked = to_array(shares, "no_token_share")[0].astype(np.float64)
    if checked.shape != shape:
        raise WeightsError(
            f"no_token_share must have shape [layer, query], here {shape}; got {checked.shape}"
        )
    if not ((checked >= 0) & (checked <= 1 + LEAK)).all():
        raise WeightsError("no_token_share must be shares from 0 to 1; some are not")
    return read_only(checked)
