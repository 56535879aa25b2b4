"""What is asked of a long input, checked; and what is answered, named.

Rows and segments share their options: `RowRequest.read` is the one reader of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Required, TypedDict

import numpy as np

from attnflow.capturing.assembly import find_source
from attnflow.capturing.carrying import Carrier, Even, LayerAttention, is_causal_language_model
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers, check_positions, check_residual
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import refuse_removed
from attnflow.core.results import TokenAttention
from attnflow.errors import CaptureError, OptionError
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model

Numbers = Iterable[int] | int


class RawOptions(TypedDict, total=False):
    """The options of `raw_rows`; those of all rows and segments."""

    positions: Required[Numbers]
    layers: Numbers | None
    edges: Any
    without: Sequence[int]
    truncation: bool


class RowOptions(RawOptions, total=False):
    """The options of `rollout_rows`."""

    residual: float | None
    normalize: str
    skip: float


@dataclass(frozen=True)
class RowRequest:
    """Which rows of an input are asked for, on which graph."""

    model: Model
    encoded: Encoded
    method: str
    positions: tuple[int, ...]
    layers: tuple[int, ...] | None  # None: whoever computes them says which
    removed: tuple[int, ...]
    residual: float | None  # None: inside the edges
    normalize: str
    edges: str = "attention"

    @classmethod
    def read(
        cls,
        model: Model,
        encoded: Encoded,
        method: str,
        positions: Any,
        layers: Any,
        *,
        without: Any = (),
        residual: float | None = RESIDUAL,
        normalize: Any = "sum",
        edges: str = "attention",
    ) -> "RowRequest":
        """Check what was asked for, before the model runs as far as its depth is known."""
        size = len(encoded.tokens)
        removed = check_removed(without, size)
        asked = check_rows(positions, size, removed)
        share = None if residual is None else check_residual(residual)
        if normalize not in ("sum", "receptive_field"):
            raise OptionError(
                f"unknown normalize {normalize!r}; choose from 'sum' or 'receptive_field'"
            )
        if edges != "attention" and (removed or normalize == "receptive_field"):
            given = f"without={list(removed)}" if removed else f"normalize={normalize!r}"
            raise OptionError(
                f"without and receptive fields are of attention; got edges {edges!r} and {given}:"
                " leave it out"
            )
        numbers = check_layers(layers, model)
        return cls(model, encoded, method, asked, numbers, removed, share, normalize, edges)

    @property
    def carrier(self) -> Carrier:
        """How its graph's layers carry."""
        return Carrier(self.residual or 0.0, self.removed)

    def wants(self, layer: int) -> bool:
        """Whether rows of this layer may be asked for."""
        return self.layers is None or layer in self.layers

    def reaches(self, layer: int) -> bool:
        """Whether what is asked for may depend on this layer."""
        return self.layers is None or layer <= max(self.layers)

    def make_even(self, window: int | None) -> LayerAttention:
        """A layer without preference, over the keys that the model lets a query see."""
        size, device = len(self.encoded.tokens), self.model.device
        return Even(size, is_causal(self.model), device, window)

    def answer(
        self,
        values: Floats,
        layers: tuple[int, ...],
        windows: Sequence[int | None],
        *,
        field: Floats | None = None,
        **more: Any,
    ) -> TokenAttention:
        """Values [layer, query, key], normalised and named.

        windows: of all layers. field: what attention without preference gives, to divide by. more:
        of groups instead of positions.
        """
        tokens, size = self.encoded.tokens, len(self.encoded.tokens)
        if not np.isfinite(values).all():
            raise CaptureError(
                f"the {self.edges} edges of {self.model.name} must be finite; got NaN or infinity"
            )
        if field is not None:
            np.divide(values, field, out=values, where=field > 0)
        sums = values.sum(axis=-1, keepdims=True)
        np.divide(values, sums, out=values, where=sums > 0)
        source = replace(
            find_source(self.model), method=self.method, edges=self.edges, residual=self.residual
        )
        known: dict[str, Any] = {"tokens": tokens, "words": self.encoded.words, **more}
        return TokenAttention(
            values=values,
            method=self.method,
            layers=layers,
            positions=self.positions,
            bottom=None if self.method == "raw" else 0,
            queries=tuple(tokens[position] for position in self.positions),
            causal=is_causal(self.model),
            normalize=self.normalize,
            window=tuple(
                None if window is None or window >= size else window for window in windows
            ),
            removed=self.removed,
            size=size,
            edges=self.edges,
            source=source,
            **known,
        )


def is_causal(model: Model) -> bool:
    """Whether no query sees a later key."""
    return is_causal_language_model(model) or model.probe.causal


# ---- checks -------------------------------------------------------------------------------------


def check_rows(positions: Any, size: int, removed: Sequence[int]) -> tuple[int, ...]:
    """The positions whose rows are asked for, from 0; at least one, at most all."""
    if positions is None:
        raise OptionError(
            "rows are of the positions asked for; got positions=None: give some, as [-1]"
        )
    asked = check_positions(positions, size)
    if not asked:
        raise OptionError("at least one position must be asked for; got none")
    if len(asked) > size:
        raise OptionError(
            f"at most {size} rows can be asked for, one per position; got {len(asked)}"
        )
    refuse_removed(asked, size, removed)
    return asked


def check_removed(without: Any, size: int) -> tuple[int, ...]:
    """The positions to take out, from 0; one must be left."""
    removed = check_positions(without, size, "without")
    if len(set(removed)) == size:
        raise OptionError(f"without must leave at least one position; got all {size}")
    return removed


def check_layers(layers: Any, model: Model) -> tuple[int, ...] | None:
    """The layers asked for, before the model runs as far as its depth is known; None for None."""
    if layers is None:
        return None
    asked = tuple(check_integers(layers, "layers"))
    if not asked:
        raise OptionError("at least one layer must be asked for; got none")
    return check_depth(asked, max(asked) if model.depth is None else model.depth)


def check_depth(layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """The layers, if a model has them."""
    for layer in layers:
        if not 1 <= layer <= depth:
            raise OptionError(f"layers must be from 1 to {depth}; got {layer}")
    return layers


def check_skip(skip: Any) -> float:
    """The share of a row that need not be followed."""
    number = isinstance(skip, float | int) and not isinstance(skip, bool)
    if not number or not 0 <= skip < 1:
        raise OptionError(f"skip must be a number from 0 up to but not including 1; got {skip!r}")
    return float(skip)
