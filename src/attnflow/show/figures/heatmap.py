"""Heat maps: of one result, and of several methods side by side."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnflow.analysis.exclude import Exclusion, find_excluded
from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.core.sinks import BoolArray
from attnflow.errors import OptionError
from attnflow.show.figures.drawing import (
    Drawing,
    check_drawable,
    check_explanations,
    has_token_keys,
    use_style,
)
from attnflow.show.figures.layout import (
    LABEL_SPACE,
    PAGE,
    PANEL,
    add_colour_bar,
    choose_width,
    draw_map,
    label_tokens,
    measure_map,
    set_title,
    title_method,
)
from attnflow.show.figures.panels import choose_columns, open_panels
from attnflow.show.figures.shading import (
    Scale,
    Shading,
    find_columns,
    find_spread,
    note_excluded,
    stack_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

MARGINS = 0.9  # inches beside maps: the layers at the left, the colour bar at the right


@use_style()
def heatmap(
    token_attention: TokenAttention,
    position: int | None = None,
    *,
    exclude: Exclusion = None,
    scale: Scale = "common",
    compared_with: str | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw one position's token attention: layers up, tokens across, with a colour bar.

    Parameters
    ----------
    token_attention
        What a method returned.
    position
        The query; by default the first one computed, the last if the model is causal.
    exclude
        Positions of tokens that are not coloured, and have no part in the scale; their share of the
        top layer is written below the title.
    scale
        The value of the darkest colour. "common": the largest value drawn. "row": the largest of
        each layer, so that colours are shares of it.
    compared_with
        None: the values. "even" or "others": how far they lie below (orange) or above (blue) what
        `TokenAttention.compared_with` expects, from -1 to 1.
    ax
        Axes to draw into; a new figure if None.

    Returns
    -------
    Drawing
        Artists: "map", whose array is [layer, token], and "bar".

    >>> from attnflow import Attention, rollout
    >>> result = rollout(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"]))
    >>> heatmap(result, 1).artists["map"].get_array().shape
    (2, 2)
    """
    check_drawable(token_attention)
    shading = Shading(scale, compared_with)
    result = token_attention
    position = result.positions[-1 if result.causal else 0] if position is None else position
    excluded = find_excluded(exclude, result.size or len(result.tokens))
    row = MapRow.read(result, position, excluded, compared_with)
    (values,), limit = scale_rows(shading, [row])
    height = measure_map(len(row.layers), result.tokens, len(row.notes))
    panels = open_panels(ax, 1, 1, choose_width(len(result.tokens)), height)
    (ax,) = panels.axes
    query = label_tokens([result.queries[result.positions.index(position)]])[0]
    image = draw_row(ax, row, values, limit, signed=shading.is_signed)
    set_title(ax, f"{title_method(result.method)} of {query}{row.note_even()}", row.notes, most=1)
    ax.set_ylabel("layer")
    bar = add_colour_bar([image], panels.axes, label=shading.label)
    return panels.finish({"map": image, "bar": bar}, [result])


@use_style()
def compare_heatmaps(
    explanations: Explanation | Sequence[Explanation],
    position: int | Sequence[int] | None = None,
    *,
    exclude: Exclusion = None,
    scale: Scale = "common",
    compared_with: str | None = None,
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw one position's token attention by every method, for one input or several, on one scale.

    Parameters
    ----------
    explanations
        What `explain` returned, one or a list of them, all with the same methods.
    position
        The query, or a list with one per explanation; the explained positions if None.
    exclude
        "sinks", "special" (CLS, SEP and the like), "explained" (the position) or positions: tokens
        that are not coloured, and have no part in the scale; their share of the top layer is
        written below the titles.
    scale
        The value of the darkest colour. "common": the largest value drawn. "row": the largest of
        each layer, so that colours are shares of it.
    compared_with
        As for `heatmap`.
    axes
        Axes to draw into, one per explanation and method; a new figure if None.

    Returns
    -------
    Drawing
        Artists: {method: a list with one map [layer, token] per explanation}, and "bar".

    >>> from attnflow import explain
    >>> compare_heatmaps(explain("the key to the cabinets", importance=())).save("maps.png").name
    'maps.png'
    """
    several = check_explanations(explanations)
    shading = Shading(scale, compared_with)
    names, positions = list(several[0].results), list_row_positions(position, several)
    rows = list_map_rows(several, positions, exclude, compared_with)
    maps, limit = scale_rows(shading, rows)
    longest = max(len(explanation.tokens) for explanation in several)
    fitting = int((PAGE - MARGINS) / max(PANEL, longest * LABEL_SPACE))
    columns = choose_columns(len(names), fitting)
    size = measure_comparison(several, rows, columns)
    panels = open_panels(axes, len(names), columns, *size, blocks=len(several))
    artists: dict[str, Any] = {name: [] for name in names}
    for number, (ax, row, values) in enumerate(zip(panels.axes, rows, maps, strict=True)):
        place = number % len(names)
        artists[names[place]].append(draw_row(ax, row, values, limit, signed=shading.is_signed))
        # one title is enough where the maps of a method are in one column
        is_repeated = panels.is_new and columns == len(names) and number >= columns
        if not is_repeated or row.notes or row.note_even():
            set_title(ax, title_method(names[place]) + row.note_even(), row.notes, most=1)
        if panels.starts_row(place):
            ax.set_ylabel("layer")
        else:
            ax.set_yticks([])
        if panels.is_new and columns == 1 and place < len(names) - 1:
            ax.set_xticks([])  # only the last map of an input is labelled with its tokens
    images = [image for name in names for image in artists[name]]
    artists.setdefault("bar", add_colour_bar(images, panels.axes, label=shading.label))
    return panels.finish(artists, several)


@dataclass(frozen=True)
class MapRow:
    """One position's token attention, layer by layer, as a map shows it."""

    result: TokenAttention
    position: int
    layers: list[int]
    values: Floats  # [layer, token], masked where excluded
    excluded: tuple[int, ...]  # columns
    notes: tuple[str, ...]
    spreads: list[float | None]  # by layer; None where the row says something

    @classmethod
    def read(
        cls,
        result: TokenAttention,
        position: int,
        excluded: Sequence[int],
        compared_with: str | None,
    ) -> "MapRow":
        """The row of a result, without some positions."""
        layers, values = stack_rows(result, position, excluded, compared_with)
        columns = find_columns(result.groups, excluded)
        notes = note_excluded(result.tokens, result.at(position), columns)
        spreads = [find_spread(result.select(position, layer), excluded) for layer in layers]
        return cls(result, position, layers, values, columns, notes, spreads)

    @property
    def even_layers(self) -> BoolArray:
        """[layer]: whether the row of a layer hardly differs between tokens."""
        return np.array([spread is not None for spread in self.spreads])

    def note_even(self) -> str:
        """The part of the title that names even layers; empty if there are none."""
        if self.spreads[-1] is not None:
            return f", even (spread {self.spreads[-1]:.1g})"
        layers = [layer for layer, even in zip(self.layers, self.even_layers, strict=True) if even]
        return f", even in layers {list_numbers(layers)}" if layers else ""


def scale_rows(shading: Shading, rows: Sequence[MapRow]) -> tuple[list[Floats], float]:
    """The values of rows as they are coloured, and the value of their darkest colour."""
    return shading.scale_maps([row.values for row in rows], [row.even_layers for row in rows])


def list_map_rows(
    several: Sequence[Explanation],
    positions: Sequence[int],
    exclude: Exclusion,
    compared_with: str | None,
) -> list[MapRow]:
    """The rows of one position per explanation, by every method."""
    rows = []
    for explanation, position in zip(several, positions, strict=True):
        excluded = find_excluded(exclude, len(explanation.tokens), explanation)
        for result in explanation.results.values():
            rows.append(MapRow.read(result, position, excluded, compared_with))
    return rows


def draw_row(ax: "Axes", row: MapRow, values: Floats, limit: float, *, signed: bool) -> "AxesImage":
    """Draw the map of a row, whose values are scaled to a limit."""
    chosen = row.position if has_token_keys(row.result) else None
    tokens = row.result.tokens
    return draw_map(
        ax, values, row.layers, tokens, limit, chosen, excluded=row.excluded, signed=signed
    )


def measure_comparison(
    several: Sequence[Explanation], rows: Sequence[MapRow], columns: int
) -> tuple[float, float]:
    """The inches of a figure with the maps of several explanations."""
    count = len(rows) // len(several)
    longest = choose_width(max(len(explanation.tokens) for explanation in several))
    deepest, noted = max(len(row.layers) for row in rows), int(any(row.excluded for row in rows))
    per_input = ceil(count / columns)  # rows of maps
    unlabelled = per_input - 1 if columns == 1 else 0
    height = unlabelled * len(several) * (measure_map(deepest, (), noted) + 0.1)
    for explanation in several:
        height += (per_input - unlabelled) * measure_map(deepest, explanation.tokens, noted)
    return longest if count == 1 else max(PAGE, longest), height


def list_row_positions(
    position: int | Sequence[int] | None, several: Sequence[Explanation]
) -> list[int]:
    """One position per explanation: the same for all, a list, or the explained ones."""
    if position is None:
        return [explanation.position for explanation in several]
    single = np.ndim(position) == 0
    positions = check_integers(
        [position] * len(several) if single else cast(Sequence[int], position), "position"
    )
    if len(positions) != len(several):
        raise OptionError(
            f"position must be one number, or one per explanation, here {len(several)};"
            f" got {len(positions)}"
        )
    return positions
