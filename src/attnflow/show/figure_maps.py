"""Heat maps: of one result, of several methods side by side, of a generation."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation
from attnflow.analysis.prompt_attention import PromptAttention
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.show.drawing import (
    Drawing,
    check_axes,
    check_drawable,
    check_explanations,
    check_scale,
    check_shape,
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
    WIDEST,
    add_colour_bar,
    choose_columns,
    choose_width,
    draw_map,
    label_tokens,
    make_panels,
    measure_labels,
    measure_map,
    set_title,
    set_token_ticks,
    title_method,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARGINS = 0.9  # inches beside maps: the layers at the left, the colour bar at the right


@use_style()
def heatmap(
    token_attention: TokenAttention,
    position: int | None = None,
    *,
    scale: float | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw one position's token attention: layers down, tokens across, with a colour bar.

    Parameters
    ----------
    token_attention
        What a method returned.
    position
        The query; by default the first one computed, the last if the model is causal.
    scale
        The value of the darkest colour; the largest value drawn if None.
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
    result = token_attention
    position = result.positions[-1 if result.causal else 0] if position is None else position
    layers, values = stack_rows(result, position)
    scale = check_scale(scale, values)
    if ax is None:
        size = choose_width(len(result.tokens)), measure_map(len(layers), result.tokens)
        ax = make_figure(*size).subplots()
    (ax,) = check_axes(ax, 1)
    chosen = position if has_token_keys(result) else None
    image = draw_map(ax, values, layers, result.tokens, scale, chosen)
    query = label_tokens([result.queries[result.positions.index(position)]])[0]
    ax.set_ylabel("layer")
    set_title(ax, f"{title_method(result.method)} of {query}")
    artists = {"map": image, "bar": add_colour_bar([image], [ax])}
    return Drawing(find_figure(ax), (ax,), artists, describe_sources([result]))


@use_style()
def compare_heatmaps(
    explanations: Explanation | Sequence[Explanation],
    position: int | Sequence[int] | None = None,
    *,
    scale: float | None = None,
    axes: "Axes | Iterable[Any] | None" = None,
) -> Drawing:
    """Draw one position's token attention by every method, for one input or several, on one scale.

    Parameters
    ----------
    explanations
        What `explain` returned, one or a list of them, all with the same methods.
    position
        The query, or a list with one per explanation; the explained positions if None.
    scale
        The value of the darkest colour; the largest value drawn if None.
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
    positions = list_positions(position, several)
    names = list(several[0].results)
    rows = [  # per panel: layers, values [layer, token]
        stack_rows(result, query)
        for explanation, query in zip(several, positions, strict=True)
        for result in explanation.results.values()
    ]
    scale = check_scale(scale, *(values for _, values in rows))
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
        height = without_tokens * len(several) * (measure_map(deepest, ()) + 0.1)
        for explanation in several:
            height += (per_input - without_tokens) * measure_map(deepest, explanation.tokens)
        axes = make_panels(len(names), columns, width, height, blocks=len(several))
    panels = check_axes(axes, len(rows))
    artists: dict[str, Any] = {name: [] for name in names}
    for number, (ax, (layers, values)) in enumerate(zip(panels, rows, strict=True)):
        which, place = divmod(number, len(names))
        tokens, query = several[which].tokens, positions[which]
        image = draw_map(ax, values, layers, tokens, scale, query)
        artists[names[place]].append(image)
        # one title is enough where the maps of a method are in one column
        if which == 0 or not own or columns < len(names):
            set_title(ax, title_method(names[place]))
        if own and place % columns:
            ax.set_yticks([])
        else:
            ax.set_ylabel("layer")
        if stacked and place < len(names) - 1:
            ax.set_xticks([])  # only the last map of an input is labelled with its tokens
    images = [image for name in names for image in artists[name]]
    artists.setdefault("bar", add_colour_bar(images, panels))
    return Drawing(find_figure(panels[0]), tuple(panels), artists, describe_sources(several))


@use_style()
def generation(
    generation: Generation | PromptAttention,
    layer: int | None = None,
    *,
    method: str | Callable[..., TokenAttention] = "rollout",
    edges: str = "attention",
    scale: float | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw what generated tokens looked at: generated tokens down, prompt tokens across.

    Parameters
    ----------
    generation
        What `generate` returned, or its token attention, filtered or not.
    layer
        The layer that is drawn; the top one if None.
    method
        What a `Generation` is asked for by `Generation.by`: the name of a method, or one of yours.
    edges
        ... and on which edges.
    scale
        The value of the darkest colour; the largest value drawn if None.
    ax
        Axes to draw into; a new figure if None.

    Returns
    -------
    Drawing
        Artists: "map", whose array is [generated, prompt], and "bar".

    >>> from attnflow import PromptAttention
    >>> halves = np.full((1, 2, 1), 0.5)
    >>> result = PromptAttention(halves, "rollout", ("the", "key"), ("is",), (1,))
    >>> generation(result, layer=1).save("generation.png").name
    'generation.png'
    """
    result = (
        generation.by(method, edges=edges) if isinstance(generation, Generation) else generation
    )
    if not isinstance(result, PromptAttention):
        raise OptionError(
            f"generation draws what generate gives, or its rollout(); got {type(result).__name__}"
        )
    expected = (len(result.generated), len(result.prompt), len(result.layers))
    meaning = "these generated tokens, prompt tokens and layers"
    check_shape("values [generated, prompt, layer]", result.values, expected, meaning)
    (layer,) = check_integers([max(result.layers) if layer is None else layer], "layer")
    if layer not in result.layers:
        computed = list_numbers(result.layers)
        raise OptionError(f"layer {layer} was not computed; this result has layers {computed}")
    values = result.values[:, :, result.layers.index(layer)]
    if ax is None:
        width = choose_width(len(result.prompt) + int(measure_labels(result.generated) / LABEL))
        height = max(0.8, len(result.generated) * LABEL * 1.2) + 0.6 + measure_labels(result.prompt)
        ax = make_figure(width, min(WIDEST, height)).subplots()
    (ax,) = check_axes(ax, 1)
    image = draw_map(ax, values, [], result.prompt, check_scale(scale, values), None)
    set_token_ticks(ax, result.generated, along="y")
    ax.set(xlabel="prompt", ylabel="generated")
    set_title(ax, f"{title_method(result.method)}, layer {layer}")
    artists = {"map": image, "bar": add_colour_bar([image], [ax])}
    return Drawing(find_figure(ax), (ax,), artists, describe_sources([result]))


# ---- what they share ----------------------------------------------------------------------------


def stack_rows(result: TokenAttention, position: int) -> tuple[list[int], Floats]:
    """The layers in ascending order, and values [layer, token] of one position."""
    layers = sorted(set(result.layers))
    return layers, np.stack([result.at(position, layer) for layer in layers])


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
