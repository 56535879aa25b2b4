"""`RowRequest`: validated requests for rows or segments of a long input, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from attnflow.capturing.capture import find_source
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_positions, check_residual
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import Group
from attnflow.core.request import (
    check_layers,
    check_normalize,
    check_query_positions,
    normalise_rows,
)
from attnflow.core.results import TokenAttention
from attnflow.errors import CaptureError, OptionError
from attnflow.models.encode import encode_inputs
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model
from attnflow.rows.products import Carrier, Even, LayerAttention, is_causal_language_model


def encode_rows(
    model: Model, inputs: object, truncation: bool, what: str
) -> tuple[list[Encoded], bool]:
    """One input or several, and whether they are several; encoder-decoders are refused.

    what: the public function, for the message.
    """
    if model.is_encoder_decoder:
        raise OptionError(
            f"{what} is for models with one stack of layers; {model.name} is an encoder-decoder:"
            " use rollout(capture(...))"
        )
    return encode_inputs(model, inputs, truncation)


class RowGraph(TypedDict, total=False):
    """The options of a request that say which graph rows are of."""

    without: Sequence[int]
    residual: float | None
    normalize: str
    edges: str


@dataclass(frozen=True)
class RowRequest:
    """Rows or shares of one input, checked: which ones, and on which graph."""

    model: Model
    encoded: Encoded
    method: str
    positions: tuple[int, ...]
    layers: tuple[int, ...] | None  # None: the default of what computes them
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
        positions: object,
        layers: object,
        *,
        without: object = (),
        residual: float | None = RESIDUAL,
        normalize: str = "sum",
        edges: str = "attention",
    ) -> "RowRequest":
        """Check the options before the model runs, layers only if its depth is known."""
        size = len(encoded.tokens)
        removed = check_removed(without, size)
        if positions is None:
            raise OptionError("rows require positions; got positions=None: give some, as [-1]")
        asked = check_query_positions(positions, size, removed)
        if len(asked) > size:
            raise OptionError(
                f"at most {size} rows can be asked for, one per position; got {len(asked)}"
            )
        check_normalize(normalize, ("sum", "receptive_field"))
        if edges != "attention" and (removed or normalize == "receptive_field"):
            given = f"without={list(removed)}" if removed else f"normalize={normalize!r}"
            raise OptionError(
                f"without and receptive fields are of attention; got edges {edges!r} and {given}:"
                " leave it out"
            )
        return cls(
            model=model,
            encoded=encoded,
            method=method,
            positions=asked,
            layers=None if layers is None else check_layers(layers, model.depth),
            removed=removed,
            residual=None if residual is None else check_residual(residual),
            normalize=normalize,
            edges=edges,
        )

    @property
    def carrier(self) -> Carrier:
        """The products with the layers of its graph."""
        return Carrier(self.residual or 0.0, self.removed)

    def includes(self, layer: int) -> bool:
        """Whether rows of this layer are computed."""
        return self.layers is None or layer in self.layers

    def depends_on(self, layer: int) -> bool:
        """Whether the rows may depend on this layer."""
        return self.layers is None or layer <= max(self.layers)

    def make_even(self, window: int | None) -> LayerAttention:
        """A layer of uniform attention over the keys that a query may see."""
        size, device = len(self.encoded.tokens), self.model.device
        return Even(size, is_causal_model(self.model), device, window)

    def answer(
        self,
        values: Floats,
        layers: tuple[int, ...],
        windows: Sequence[int | None],
        *,
        field: Floats | None = None,
        lost: Floats | None = None,
        groups: tuple[Group, ...] | None = None,
    ) -> TokenAttention:
        """Normalise values [layer, query, key], or [layer, query, group], and name them.

        windows: of all layers. field: the values of uniform attention, to divide by. lost
        [layer, query]: the share of a row that was not followed.
        """
        tokens, size = self.encoded.tokens, len(self.encoded.tokens)
        if not np.isfinite(values).all():
            raise CaptureError(
                f"the {self.edges} edges of {self.model.name} must be finite; got NaN or infinity"
            )
        normalise_rows(values, field)
        source = replace(
            find_source(self.model),
            method=self.method,
            edges=self.edges,
            residual=self.residual,
            heads="mean" if self.edges == "attention" else None,
        )
        narrow = (None if window is None or window >= size else window for window in windows)
        return TokenAttention(
            values=values,
            method=self.method,
            layers=layers,
            positions=self.positions,
            bottom=None if self.method == "raw" else 0,
            tokens=tokens if groups is None else tuple(group.name for group in groups),
            queries=tuple(tokens[position] for position in self.positions),
            causal=is_causal_model(self.model),
            normalize=self.normalize,
            words=self.encoded.words if groups is None else None,
            groups=groups,
            window=tuple(narrow),
            removed=self.removed,
            size=size,
            edges=self.edges,
            source=source,
            lost=lost,
        )


def is_causal_model(model: Model) -> bool:
    """Whether no query sees a later key."""
    return is_causal_language_model(model) or model.probe.causal


def check_removed(without: object, size: int) -> tuple[int, ...]:
    """The positions to take out, from 0; one must be left."""
    removed = check_positions(without, size, "without")
    if len(set(removed)) == size:
        raise OptionError(f"without must leave at least one position; got all {size}")
    return removed


def check_skip(skip: object) -> float:
    """The share of a row that need not be followed."""
    if isinstance(skip, bool) or not isinstance(skip, float | int) or not 0 <= skip < 1:
        raise OptionError(f"skip must be a number from 0 up to but not including 1; got {skip!r}")
    return float(skip)
