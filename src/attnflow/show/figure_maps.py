"""Heat maps: of one result, and of several methods side by side."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.core.checks import check_integers
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.show.drawing import (
    Drawing,
    check_axes,
    check_drawable,
    check_explanations,
    describe_sources,
    find_figure,
    has_token_keys,
    make_figure,
    use_style,
)
from attnflow.show.layout import (
    LABEL,
    PAGE,
    PANEL,
    add_colour_bar,
    choose_columns,
    choose_width,
    draw_map,
    label_tokens,
    make_panels,
    measure_map,
    set_title,
    title_method,
)
from attnflow.show.shading import (
    Exclusion,
    Scale,
    check_comparison,
    find_columns,
    find_excluded,
    find_spread,
    label_colours,
    note_excluded,
    scale_maps,
    stack_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    check_comparison(compared_with, scale)
    result = token_attention
    position = result.positions[-1 if result.causal else 0] if position is None else position
    excluded = find_excluded(exclude, result.size or len(result.tokens))
    left_out = find_columns(result.groups, excluded)
    layers, values = stack_rows(result, position, excluded, compared_with)
    (shown,), limit = scale_maps([values], 1.0 if compared_with else scale)
    notes = note_excluded(result.tokens, result.at(position), left_out)
    if ax is None:
        width = choose_width(len(result.tokens))
        ax = make_figure(width, measure_map(len(layers), result.tokens, len(notes))).subplots()
    (ax,) = check_axes(ax, 1)
    chosen = position if has_token_keys(result) else None
    colours: Any = {"excluded": left_out, "signed": compared_with is not None}
    image = draw_map(ax, shown, layers, result.tokens, limit, chosen, **colours)
    query = label_tokens([result.queries[result.positions.index(position)]])[0]
    ax.set_ylabel("layer")
    title = f"{title_method(result.method)} of {query}"
    set_title(ax, title + tell_even(result.select(position), excluded), notes, most=1)
    bar = add_colour_bar([image], [ax], label=label_colours(scale, compared_with))
    return Drawing(find_figure(ax), (ax,), {"map": image, "bar": bar}, describe_sources([result]))


@use_style()
def compare_heatmaps(
    explanations: Explanation | Sequence[Explanation],
    position: int | Sequence[int] | None = None,
    *,
    exclude: Exclusion = None,
    scale: Scale = "common",
    compared_with: str | None = None,
    axes: "Axes | Iterable[Any] | None" = None,
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
    check_comparison(compared_with, scale)
    positions = list_positions(position, several)
    names = list(several[0].results)
    excluded = [find_excluded(exclude, len(one.tokens), one) for one in several]
    rows = [  # per panel: layers, values [layer, token]
        stack_rows(result, query, left_out, compared_with)
        for explanation, query, left_out in zip(several, positions, excluded, strict=True)
        for result in explanation.results.values()
    ]
    maps, limit = scale_maps([values for _, values in rows], 1.0 if compared_with else scale)
    own = axes is None
    longest = max(len(explanation.tokens) for explanation in several)
    fitting = int((PAGE - MARGINS) / max(PANEL, longest * LABEL))
    columns = choose_columns(len(names), fitting)
    stacked = own and columns == 1 and len(names) > 1
    if axes is None:
        width = choose_width(longest) if len(names) == 1 else max(PAGE, choose_width(longest))
        deepest = max(len(layers) for layers, _ in rows)
        per_input = ceil(len(names) / columns)  # rows of maps
        without_tokens = per_input - 1 if stacked else 0
        noted = int(any(excluded))
        height = without_tokens * len(several) * (measure_map(deepest, (), noted) + 0.1)
        for explanation in several:
            tall = measure_map(deepest, explanation.tokens, noted)
            height += (per_input - without_tokens) * tall
        axes = make_panels(len(names), columns, width, height, blocks=len(several))
    panels = check_axes(axes, len(rows))
    artists: dict[str, Any] = {name: [] for name in names}
    for number, (ax, (layers, _), values) in enumerate(zip(panels, rows, maps, strict=True)):
        which, place = divmod(number, len(names))
        tokens, query, left_out = several[which].tokens, positions[which], excluded[which]
        colours: Any = {"excluded": left_out, "signed": compared_with is not None}
        image = draw_map(ax, values, layers, tokens, limit, query, **colours)
        artists[names[place]].append(image)
        top = several[which].results[names[place]].select(query)
        notes = note_excluded(tokens, top.values[0, 0], left_out)
        even = tell_even(top, left_out)
        # one title is enough where the maps of a method are in one column
        if which == 0 or not own or columns < len(names) or notes or even:
            set_title(ax, title_method(names[place]) + even, notes, most=1)
        if own and place % columns:
            ax.set_yticks([])
        else:
            ax.set_ylabel("layer")
        if stacked and place < len(names) - 1:
            ax.set_xticks([])  # only the last map of an input is labelled with its tokens
    images = [image for name in names for image in artists[name]]
    bar = add_colour_bar(images, panels, label=label_colours(scale, compared_with))
    artists.setdefault("bar", bar)
    return Drawing(find_figure(panels[0]), tuple(panels), artists, describe_sources(several))


def tell_even(row: TokenAttention, excluded: Sequence[int]) -> str:
    """What the title of a map says of a row that hardly tells tokens apart; empty for others."""
    spread = find_spread(row, excluded)
    return "" if spread is None else f", even (spread {spread:.1g})"


def list_positions(
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
