"""Which row of a result belongs to a position of a layer."""

from collections.abc import Sequence

from attnflow.core.checks import check_integers
from attnflow.core.groups import list_numbers
from attnflow.errors import OptionError


def find_row(
    layers: Sequence[int],
    positions: Sequence[int],
    size: int | None,
    position: int,
    layer: int | None,
) -> tuple[int, int]:
    """The places of a layer, the top one if None, and of a position among those of a result.

    size: the number of positions of the sequence, from whose end negative ones count.

    >>> find_row([1, 2], [0, 3], 5, position=-2, layer=None)
    (1, 1)
    """
    layer = max(layers) if layer is None else layer
    (layer,), (asked,) = check_integers([layer], "layer"), check_integers([position], "position")
    if layer not in layers:
        raise OptionError(
            f"layer {layer} was not computed; this result has layers {list_numbers(layers)}"
        )
    if asked < 0 and size is None:
        raise OptionError(
            "a negative position counts from the end of a sequence whose size is known; got"
            f" {asked}: give one of {list_numbers(positions)}, or the result a size"
        )
    counted = asked + (size or 0) if asked < 0 else asked
    if counted not in positions:
        raise OptionError(
            f"position {asked} was not computed;"
            f" this result has positions {list_numbers(positions)}"
        )
    return layers.index(layer), positions.index(counted)
