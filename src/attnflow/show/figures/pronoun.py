"""A masked pronoun: the probabilities of two words, and the tokens that the mask looks at."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.errors import OptionError
from attnflow.show.figures.drawing import Drawing, check_explanations, find_largest, use_style
from attnflow.show.figures.heatmap import list_row_positions
from attnflow.show.figures.layout import (
    COLUMN,
    PAGE,
    add_colour_bar,
    draw_map,
    label_tokens,
    measure_map,
    set_title,
    set_token_ticks,
    title_method,
)
from attnflow.show.figures.panels import Panels, check_axes, choose_columns, make_figure
from attnflow.show.figures.shading import stack_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MAPS = 4  # maps side by side
LayerAndPosition = tuple[int, int]


@use_style()
def pronoun(
    explanations: Explanation | Sequence[Explanation],
    words: Mapping[str, float] | Sequence[Mapping[str, float]],
    references: LayerAndPosition | Sequence[LayerAndPosition],
    *,
    position: int | Sequence[int] | None = None,
    label: str = "probability",
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw the probabilities of two words for a masked pronoun, and the tokens that it looks at.

    For every method, this is its token attention to the two tokens that may be referred to.

    Parameters
    ----------
    explanations
        What `explain` returned, one or a list of them, all with the same methods.
    words
        Probabilities by word, as {"his": 0.8, "her": 0.2}; or a list with one dict per explanation.
    references
        The positions of the two tokens, or a list with one pair per explanation.
    position
        The position of the mask, or a list with one per explanation; the explained ones if None.
    label
        The label of the axis of probabilities.
    axes
        Axes to draw into: per explanation one for the words, then one per method; a new figure if
        None.

    Returns
    -------
    Drawing
        Artists: {method: a list with one map [layer, reference] per explanation},
        "bars" (the words' bars, per explanation) and "bar" (the colour bar, per explanation).

    >>> from attnflow import explain
    >>> explanation = explain("the key to the cabinets", importance=())
    >>> pronoun(explanation, {"is": 0.9, "are": 0.1}, (2, 5)).save("pronoun.png").name
    'pronoun.png'
    """
    several = check_explanations(explanations)
    positions = list_row_positions(position, several)
    chances = [words] if isinstance(words, Mapping) else list(words)
    for chance in chances:
        check_probabilities(chance)
    pairs = list_pairs(references, several)
    if len(chances) != len(several):
        raise OptionError(
            f"words must be one dict per explanation, here {len(several)}; got {len(chances)}"
        )
    names = list(several[0].results)
    rows = [  # per explanation {method: (layers, values [layer, reference])}
        [
            (layers, values[:, pair])
            for layers, values in (
                stack_rows(result, query) for result in explanation.results.values()
            )
        ]
        for explanation, query, pair in zip(several, positions, pairs, strict=True)
    ]
    scale = find_largest(values for maps in rows for _, values in maps)
    columns, each = choose_columns(len(names), MOST_MAPS), 1 + len(names)
    if axes is None:
        made = make_pronoun_panels(several, len(names), columns, rows, chances, pairs)
        panels = Panels(tuple(made), columns, is_new=True)
    else:
        panels = Panels(check_axes(axes, len(several) * each), columns, is_new=False)
    artists: dict[str, Any] = {name: [] for name in names}
    bars, colour_bars = [], []
    for which, (chance, pair, maps) in enumerate(zip(chances, pairs, rows, strict=True)):
        first, *others = panels.axes[which * each :][:each]
        bars.append(draw_probabilities(first, chance, label))
        tokens = [several[which].tokens[place] for place in pair]
        for place, (ax, (layers, values)) in enumerate(zip(others, maps, strict=True)):
            image = draw_map(ax, values, layers, tokens, scale, None)
            artists[names[place]].append(image)
            set_title(ax, title_method(names[place]))
            if panels.starts_row(place):
                ax.set_ylabel("layer")
            else:
                ax.set_yticks([])
        colour_bars.append(add_colour_bar([image], others))
    # a method may have the name of another artist, and is the one that keeps it
    return panels.finish({"bars": bars, "bar": colour_bars, **artists}, several)


def make_pronoun_panels(
    several: Sequence[Explanation],
    count: int,
    columns: int,
    rows: Sequence[Sequence[tuple[list[int], Floats]]],
    chances: Sequence[Mapping[str, float]],
    pairs: Sequence[Sequence[int]],
) -> list["Axes"]:
    """The axes of a new figure, below the texts of explanations: for the words, then the maps."""
    high = ceil(count / columns)
    heights = []
    for explanation, maps, chance, pair in zip(several, rows, chances, pairs, strict=True):
        tokens = [*(explanation.tokens[place] for place in pair), *chance]
        deepest = max(len(layers) for layers, _ in maps)
        heights.append(high * measure_map(deepest, tokens) + 0.3)
    width = COLUMN if columns == 1 else PAGE
    parts = make_figure(width, sum(heights)).subfigures(
        len(several), 1, height_ratios=heights, squeeze=False
    )
    panels = []
    for part, explanation in zip(parts.flat, several, strict=True):
        grid = part.add_gridspec(high, 1 + columns, width_ratios=[1.15, *[1] * columns])
        panels.append(part.add_subplot(grid[:, 0]))
        for place in range(count):
            panels.append(part.add_subplot(grid[place // columns, 1 + place % columns]))
        if isinstance(explanation.text, str):
            text = label_tokens([explanation.text], int(11 * width))[0]
            part.suptitle(text, x=0.01, ha="left", parse_math=False, fontstyle="italic")
    return panels


def list_pairs(
    references: LayerAndPosition | Sequence[LayerAndPosition], several: Sequence[Explanation]
) -> list[list[int]]:
    """Two positions per explanation."""
    single = all(np.ndim(reference) == 0 for reference in references)
    pairs = cast(list[LayerAndPosition], [references] if single else list(references))
    if len(pairs) != len(several):
        raise OptionError(
            f"references must be one pair per explanation, here {len(several)}; got {len(pairs)}"
        )
    checked = []
    for explanation, pair in zip(several, pairs, strict=True):
        places, size = check_integers(pair, "references"), len(explanation.tokens)
        if len(places) != 2 or not all(0 <= place < size for place in places):
            raise OptionError(
                f"references must be two positions from 0 to {size - 1}; got {tuple(places)}"
            )
        checked.append(places)
    return checked


def check_probabilities(words: Mapping[str, float]) -> None:
    """Refuse anything but probabilities by word."""
    given = words.values() if isinstance(words, Mapping) else ()
    if not given or not all(
        isinstance(value, int | float | np.number) and 0 <= value <= 1 for value in given
    ):
        raise OptionError(f"words must be {{word: probability}}, from 0 to 1; got {words!r}")


def draw_probabilities(ax: "Axes", chances: Mapping[str, float], label: str) -> Any:
    """One bar per word, with its probability above it."""
    bars = ax.bar(range(len(chances)), list(chances.values()), color="0.45", width=0.6)
    ax.bar_label(bars, fmt="%.2f", padding=1)
    ax.set(ylim=(0, 1.12), yticks=[0, 0.5, 1], xlim=(-0.6, len(chances) - 0.4))
    ax.set_ylabel(label, parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    set_token_ticks(ax, list(chances), along="x")
    return bars
