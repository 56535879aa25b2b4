"""The panels of a figure: axes that the caller gave, or those of a new figure, in rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.core.io.formatting import format_count
from attnflow.errors import OptionError
from attnflow.show.figures.drawing import Drawing, describe_sources

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panels:
    """The axes of a drawing, row by row.

    Axes that the caller gave stand anywhere, so each of them is labelled on its own.
    """

    axes: tuple["Axes", ...]
    columns: int
    is_new: bool

    @property
    def figure(self) -> "Figure":
        """The whole figure."""
        return find_figure(self.axes[0])

    def starts_row(self, place: int) -> bool:
        """Whether a panel is labelled at its left."""
        return not self.is_new or place % self.columns == 0

    def ends_column(self, place: int) -> bool:
        """Whether a panel is labelled below."""
        return not self.is_new or place + self.columns >= len(self.axes)

    def finish(self, artists: dict[str, Any], results: Iterable[object]) -> Drawing:
        """The drawing of these results."""
        return Drawing(self.figure, self.axes, artists, describe_sources(results))


def open_panels(
    axes: "Axes | Iterable[Axes] | None",
    count: int,
    columns: int,
    width: float,
    height: float,
    *,
    blocks: int = 1,
    sharey: bool = False,
) -> Panels:
    """The given axes, one per panel; if None, those of a new figure of a size in inches.

    count: panels per block. blocks: each starts a new row.
    """
    if axes is not None:
        return Panels(check_axes(axes, blocks * count), columns, is_new=False)
    rows = ceil(count / columns)
    grid = make_figure(width, height).subplots(blocks * rows, columns, squeeze=False, sharey=sharey)
    by_block = grid.reshape(blocks, rows * columns)
    for ax in by_block[:, count:].flat:
        ax.remove()
    return Panels(tuple(by_block[:, :count].flat), columns, is_new=True)


def choose_columns(count: int, fitting: int) -> int:
    """The number of panels in a row, of which `fitting` have room.

    Rows of equal length look best, and are worth an extra row.

    >>> [choose_columns(count, 3) for count in (1, 2, 3, 4, 5, 6, 7)]
    [1, 2, 3, 2, 3, 3, 3]
    """
    fitting = max(1, min(count, fitting))
    rows = ceil(count / fitting)
    even = max(columns for columns in range(1, fitting + 1) if count % columns == 0)
    return even if count // even <= rows + 1 else ceil(count / rows)


def make_figure(width: float, height: float) -> "Figure":
    """An empty figure with constrained layout and no window; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def find_figure(ax: "Axes") -> "Figure":
    """The figure of axes, also if they are part of a subfigure."""
    figure: Any = ax.figure
    while figure is not figure.figure:
        figure = figure.figure
    whole: Figure = figure
    return whole


def check_axes(axes: "Axes | Iterable[Axes]", count: int) -> tuple["Axes", ...]:
    """The caller's axes, one per panel."""
    panels: Sequence[Any] = np.ravel(np.asarray(axes, dtype=object)).tolist()
    if len(panels) != count or not all(hasattr(ax, "imshow") for ax in panels):
        kinds = ", ".join(sorted({type(ax).__name__ for ax in panels}))
        raise OptionError(
            f"this drawing has {format_count(count, 'panel')}, one matplotlib Axes per panel;"
            f" got {len(panels)}: {kinds}"
        )
    return tuple(panels)
