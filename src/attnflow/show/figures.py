"""The figures, in matplotlib: graphs, heat maps, curves, paths, patches. They take results, compute nothing, and return what they drew.

Each takes `ax` (or `axes`, where it has several panels), or makes a figure of its own, and returns a `Drawing` with `.figure`, `.axes`,
`.artists` and `.save("name.png")`, also .svg and .pdf. No figure is left behind, and no setting of matplotlib is changed.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnflow.analysis.report import Report
from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation, PromptAttention
from attnflow.core.graph import Floats, integers
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.show.drawing import (
    COLOURS,
    COLUMN,
    LABEL,
    OTHER_COLOURS,
    PAGE,
    WIDEST,
    Drawing,
    check_result,
    check_shape,
    colour_bar,
    figure_of,
    given_axes,
    label_room,
    labels,
    largest,
    layer_map,
    map_height,
    method_title,
    paper,
    patches_of,
    pixels_of,
    probability_bars,
    save,
    style,
    token_ticks,
    width_for,
)
from attnflow.show.figure_graphs import (
    attention_graph,
    checked_scale,
    compare_graphs,
    explanations_of,
    flow_paths,
    same_tokens,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Drawing",
    "attention_graph",
    "compare_graphs",
    "compare_heatmaps",
    "flow_paths",
    "generation",
    "heatmap",
    "layer_curves",
    "overlay",
    "pronoun",
    "save",
]

SIDE_BY_SIDE = 14  # tokens up to which three maps stand side by side; beyond, one below the other
Pair = tuple[int, int]


# ---- heat maps ------------------------------------------------------------------------------------------------------------------


@style()
def heatmap(
    token_attention: TokenAttention,
    position: int | None = None,
    *,
    scale: float | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """One position's token attention: layers down, tokens across, with a colour bar.

    position: the first one computed, or the last if causal, if not given. scale: the value of the darkest colour; the largest one drawn
    if not given. artists: "map", whose array is [layer, token], and "bar".

    >>> from attnflow import Attention, rollout
    >>> result = rollout(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"]))
    >>> heatmap(result, 1).artists["map"].get_array().shape
    (2, 2)
    """
    check_result(token_attention)
    result = token_attention
    position = result.positions[-1 if result.causal else 0] if position is None else position
    layers, values = rows_at(result, position)
    scale = checked_scale(scale, values)
    ax = (
        paper(width_for(len(result.tokens)), map_height(len(layers), result.tokens)).subplots()
        if ax is None
        else given_axes(ax, 1)[0]
    )
    chosen = position if same_tokens(result) else None
    image = layer_map(ax, values, layers, result.tokens, scale, chosen)
    name = labels([result.queries[result.positions.index(position)]])[0]
    ax.set_ylabel("layer")
    ax.set_title(f"{method_title(result.method)} of {name}", parse_math=False)
    return Drawing(figure_of(ax), (ax,), {"map": image, "bar": colour_bar([image], [ax])})


@style()
def compare_heatmaps(
    explanations: Explanation | Sequence[Explanation],
    position: int | Sequence[int] | None = None,
    *,
    scale: float | None = None,
    axes: Any = None,
) -> Drawing:
    """Raw attention, rollout and flow of one position, for one sentence or several, in one scale.

    position: the explained one if not given; a list has one for each sentence. artists: "raw", "rollout" and "flow", each a list with
    the map of each sentence, and "bar".

    >>> from attnflow import explain
    >>> compare_heatmaps(explain("the key to the cabinets", importance=())).save("maps.png").name
    'maps.png'
    """
    several = explanations_of(explanations)
    positions = (
        one_each(position, len(several), "position")
        if position is not None
        else [each.position for each in several]
    )
    panels: list[tuple[str, list[int], Floats, tuple[str, ...], int]] = []
    for each, place in zip(several, positions, strict=True):
        panels += [
            (name, *rows_at(result, place), each.tokens, place)
            for name, result in each.results.items()
        ]
    scale = checked_scale(scale, *(values for _, _, values, _, _ in panels))
    size = max(len(each.tokens) for each in several)
    beside = size <= SIDE_BY_SIDE
    if axes is None:
        deep = max(len(layers) for _, layers, _, _, _ in panels)
        rows = len(several) if beside else len(panels)
        height = sum(
            map_height(deep, each.tokens) + (0 if beside else 2 * (map_height(deep, ()) + 0.1))
            for each in several
        )
        figure = paper(PAGE if beside else max(PAGE, width_for(size)), height)
        drawn = list(np.ravel(figure.subplots(rows, 3 if beside else 1)))
    else:
        drawn = given_axes(axes, len(panels))
    artists: dict[str, Any] = {name: [] for name in COLOURS}
    for number, (ax, (name, layers, values, tokens, place)) in enumerate(
        zip(drawn, panels, strict=True)
    ):
        artists[name].append(layer_map(ax, values, layers, tokens, scale, place))
        inside = axes is None and beside
        if not (inside and number >= 3):
            ax.set_title(method_title(name))
        if inside and number % 3:
            ax.set_yticks([])
        else:
            ax.set_ylabel("layer")
        if axes is None and not beside and number % 3 != 2:
            ax.set_xticks([])  # the tokens of a sentence stand below its three maps
    artists["bar"] = colour_bar([image for name in COLOURS for image in artists[name]], drawn)
    return Drawing(figure_of(drawn[0]), tuple(drawn), artists)


@style()
def pronoun(
    explanations: Explanation | Sequence[Explanation],
    words: Mapping[str, float] | Sequence[Mapping[str, float]],
    references: Pair | Sequence[Pair],
    *,
    position: int | Sequence[int] | None = None,
    label: str = "probability",
    axes: Any = None,
) -> Drawing:
    """The probabilities of two words for a masked pronoun, beside its attention to the two tokens it may refer to, by the three methods.

    words: {"his": 0.8, "her": 0.2}, from the model; references: the positions of two tokens. For several sentences: a list of each.
    position: the mask's; the explained one if not given. label: of the bars' axis. artists: "bars" (a bar container a sentence), "raw",
    "rollout" and "flow" (a map [layer, reference] a sentence), "bar" (the colour bars).

    >>> from attnflow import explain
    >>> found = explain("the key to the cabinets", importance=())
    >>> pronoun(found, {"is": 0.9, "are": 0.1}, (2, 5)).save("pronoun.png").name
    'pronoun.png'
    """
    several = explanations_of(explanations)
    chances = [words] if isinstance(words, Mapping) else list(words)
    pairs = [references] if all(np.ndim(each) == 0 for each in references) else list(references)
    positions = (
        one_each(position, len(several), "position")
        if position is not None
        else [each.position for each in several]
    )
    for what, found in (("words", chances), ("references", pairs)):
        if len(found) != len(several):
            raise OptionError(
                f"{what} must be one for each of {len(several)} explanations; got {len(found)}"
            )
    for chance in chances:
        if not chance or not all(
            isinstance(value, int | float | np.number) and 0 <= value <= 1
            for value in chance.values()
        ):
            raise OptionError(
                f"words must be {{word: probability}}, each from 0 to 1; got {chance!r}"
            )
    maps: list[dict[str, Any]] = []
    for each, pair, place in zip(several, pairs, positions, strict=True):
        pair = cast(Pair, tuple(integers(cast(Pair, pair), "references")))
        if len(pair) != 2 or not all(0 <= one < len(each.tokens) for one in pair):
            raise OptionError(
                f"references must be two positions from 0 to {len(each.tokens) - 1}; got {pair}"
            )
        rows = {name: rows_at(result, place) for name, result in each.results.items()}
        maps.append(
            {
                name: (layers, values[:, pair], [each.tokens[one] for one in pair])
                for name, (layers, values) in rows.items()
            }
        )
    scale = largest(values for found in maps for _, values, _ in found.values())
    if axes is None:
        heights = [
            map_height(len(three["raw"][0]), [*three["raw"][2], *chance]) + 0.3
            for three, chance in zip(maps, chances, strict=True)
        ]
        figure = paper(PAGE, sum(heights))
        parts = np.ravel(
            np.asarray(figure.subfigures(len(several), 1, height_ratios=heights), dtype=object)
        )
        rows_of_axes = [list(part.subplots(1, 4, width_ratios=[1.15, 1, 1, 1])) for part in parts]
        for part, each in zip(parts, several, strict=True):
            if isinstance(each.text, str):
                part.suptitle(
                    labels([each.text], 80)[0],
                    x=0.01,
                    ha="left",
                    parse_math=False,
                    fontstyle="italic",
                )
    else:
        flat = given_axes(axes, 4 * len(several))
        rows_of_axes = [flat[start : start + 4] for start in range(0, len(flat), 4)]
    artists: dict[str, Any] = {name: [] for name in ("bars", *COLOURS, "bar")}
    for row, chance, three in zip(rows_of_axes, chances, maps, strict=True):
        artists["bars"].append(probability_bars(row[0], chance, label))
        for ax, (name, (layers, values, tokens)) in zip(row[1:], three.items(), strict=True):
            artists[name].append(layer_map(ax, values, layers, tokens, scale, None))
            ax.set_title(method_title(name))
            if axes is None and ax is not row[1]:
                ax.set_yticks([])
        row[1].set_ylabel("layer")
        artists["bar"].append(colour_bar([artists["flow"][-1]], row[1:]))
    return Drawing(
        figure_of(rows_of_axes[0][0]), tuple(ax for row in rows_of_axes for ax in row), artists
    )


@style()
def generation(
    generation: Generation | PromptAttention,
    layer: int | None = None,
    *,
    method: str = "rollout",
    scale: float | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """What each generated token looked at: generated tokens down, prompt tokens across, in one layer, the top one if none is given.

    A `Generation` is asked for its `method`; a `PromptAttention`, filtered or not, is drawn as it is. artists: "map" [generated, prompt],
    "bar".

    >>> from attnflow import PromptAttention
    >>> import numpy as np
    >>> found = PromptAttention(np.full((1, 2, 1), 0.5), "rollout", ("the", "key"), ("is",), (1,))
    >>> generation(found, layer=1).save("generation.png").name
    'generation.png'
    """
    if isinstance(generation, Generation):
        if method not in COLOURS:
            raise OptionError(f"unknown method {method!r}; choose from {', '.join(COLOURS)}")
        generation = cast(PromptAttention, getattr(generation, method)())
    if not isinstance(generation, PromptAttention):
        raise OptionError(
            f"generation draws what generate gives, or its rollout(); got {type(generation).__name__}"
        )
    found = generation
    expected = (len(found.generated), len(found.prompt), len(found.layers))
    check_shape(
        "values [generated, prompt, layer]",
        found.values,
        expected,
        "these generated tokens, prompt tokens and layers",
    )
    (layer,) = integers([max(found.layers) if layer is None else layer], "layer")
    if layer not in found.layers:
        raise OptionError(
            f"layer {layer} was not computed; this result has layers {list_numbers(found.layers)}"
        )
    values = found.values[:, :, found.layers.index(layer)]
    width = width_for(len(found.prompt) + int(label_room(found.generated) / LABEL))
    height = min(
        WIDEST, max(0.8, len(found.generated) * LABEL * 1.2) + 0.6 + label_room(found.prompt)
    )
    ax = paper(width, height).subplots() if ax is None else given_axes(ax, 1)[0]
    image = layer_map(ax, values, [], found.prompt, checked_scale(scale, values), None)
    token_ticks(ax, found.generated, along="y")
    ax.set(
        xlabel="prompt", ylabel="generated", title=f"{method_title(found.method)}, layer {layer}"
    )
    return Drawing(figure_of(ax), (ax,), {"map": image, "bar": colour_bar([image], [ax])})


@style()
def overlay(
    token_attention: TokenAttention,
    image: Any,
    *,
    position: int | None = None,
    layer: int | None = None,
    grid: Pair | None = None,
    opacity: float = 0.6,
    ax: "Axes | None" = None,
) -> Drawing:
    """A vision model's token attention, patch by patch, over the picture.

    image: a PIL image, an array [height, width] or [height, width, 3], or the path of a file: the part of the picture that the model saw.
    grid: patches down and across, if the tokens are not named "row,column"; the patches are then the last tokens. What lies on
    other tokens, as CLS and registers, is written below. artists: "image", "map" [down, across], "bar".

    >>> from attnflow import Attention, raw
    >>> result = raw(Attention([[[0.2] * 5] * 5], tokens=["[CLS]", "0,0", "0,1", "1,0", "1,1"]))
    >>> overlay(result, np.zeros((8, 8, 3))).artists["map"].get_array().shape
    (2, 2)
    """
    check_result(token_attention)
    result = token_attention
    position = result.positions[0] if position is None else position
    row = result.at(position, layer)
    places = patches_of(result.tokens, grid)  # [down, across]: the key of each patch
    pixels = pixels_of(image)
    height, width = pixels.shape[:2]
    down, across = places.shape
    stretch = (height / down) / (width / across)  # a patch's height by its width
    if height < down or width < across or (down != across and not 2 / 3 <= stretch <= 3 / 2):
        raise OptionError(
            f"the picture must fit the grid of {down} x {across} patches (down x across); got {height} x {width} pixels:"
            " give the part of the picture that the model saw"
        )
    if not 0 <= opacity <= 1:
        raise OptionError(f"opacity must be from 0 to 1; got {opacity}")
    ax = (
        paper(COLUMN, float(np.clip(2.5 * height / width, 1.2, 8.0)) + 0.65).subplots()
        if ax is None
        else given_axes(ax, 1)[0]
    )
    values = row[places]
    picture = ax.imshow(pixels, cmap="gray" if pixels.ndim == 2 else None)
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    top = largest([values])
    drawn = ax.imshow(
        values,
        cmap="inferno",
        vmin=0,
        vmax=top,
        alpha=opacity,
        extent=extent,
        interpolation="nearest",
    )
    others = [
        place for place in range(len(result.tokens)) if place not in set(places.ravel().tolist())
    ]
    below = [
        f"{name} {row[place]:.3f}"
        for name, place in zip(
            labels([result.tokens[each] for each in others]), others, strict=True
        )
    ]
    lines = [", ".join(below[start : start + 3]) for start in range(0, min(len(below), 9), 3)]
    ax.set_xlabel("\n".join(lines) + (" …" if len(below) > 9 else ""), parse_math=False)
    ax.set(xticks=[], yticks=[])
    name = labels([result.queries[result.positions.index(position)]])[0]
    shown = max(result.layers) if layer is None else layer
    ax.set_title(f"{method_title(result.method)} of {name}, layer {shown}", parse_math=False)
    bar = colour_bar([drawn], [ax])
    bar.solids.set_alpha(opacity)  # as the map has it
    return Drawing(figure_of(ax), (ax,), {"image": picture, "map": drawn, "bar": bar})


# ---- curves ---------------------------------------------------------------------------------------------------------------------


@style()
def layer_curves(report: Report, *, band: str = "error", axes: Any = None) -> Drawing:
    """The rank correlation of each method with importance, layer by layer; a panel for each importance.

    band: "error" (the standard error of the mean) or "std" (the standard deviation over examples). artists: for each
    importance {method: (line, band)}; a method without layers is a level line.

    >>> from attnflow import evaluate, load
    >>> report = evaluate(load("verb-number"), ["the key to the cabinets", "the old keys"], against="blank_out")
    >>> layer_curves(report).save("curves.pdf").name
    'curves.pdf'
    """
    if not isinstance(report, Report):
        raise OptionError(f"layer_curves draws what evaluate gives; got {type(report).__name__}")
    if band not in ("error", "std"):
        raise OptionError(f"unknown band {band!r}; choose from error, std")
    count = len(report.against)
    if axes is None:
        panels = list(
            np.ravel(paper(COLUMN if count == 1 else PAGE, 2.7).subplots(1, count, sharey=True))
        )
    else:
        panels = given_axes(axes, count)
    table = list(report.rows())
    artists: dict[str, Any] = {name: {} for name in report.against}
    others = [method for method in report.methods if method not in COLOURS]
    looks = {"raw": ("o", "-"), "rollout": ("s", "--"), "flow": ("^", "-.")}
    for ax, against in zip(panels, report.against, strict=True):
        for method in report.methods:
            rows = [row for row in table if row[:2] == (against, method)]
            colour = (
                COLOURS[method]
                if method in COLOURS
                else OTHER_COLOURS[others.index(method) % len(OTHER_COLOURS)]
            )
            marker, line = looks.get(method, ("", ":"))
            mean = np.array([row[3] for row in rows])
            spread = np.array(
                [
                    row[4] / (max(row[5] - row[6], 1) ** 0.5 if band == "error" else 1.0)
                    for row in rows
                ]
            )
            layers: list[Any] = [row[2] for row in rows]
            if layers == [None]:  # a scorer of the user's: one number for all layers
                ends = (
                    (report.layers[0], report.layers[-1]) if len(report.layers) > 1 else (0.5, 1.5)
                )
                layers, mean, spread = [*ends], np.repeat(mean, 2), np.repeat(spread, 2)
            if len(layers) == 1:  # methods would hide each other
                layers = [
                    report.layers[0]
                    + 0.1 * (report.methods.index(method) - (len(report.methods) - 1) / 2)
                ]
            (curve,) = ax.plot(
                layers, mean, color=colour, marker=marker, ls=line, ms=3.5, lw=1.3, label=method
            )
            if len(layers) > 1:
                shade: Any = ax.fill_between(
                    layers, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0
                )
            else:
                shade = ax.errorbar(layers, mean, spread, color=colour, capsize=3, ls="")
            artists[against][method] = (curve, shade)
        ax.axhline(0, color="0.6", lw=0.6, zorder=0)
        ax.set_title(against.replace("_", " "), parse_math=False)
        ax.set_xlabel("layer")
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xticks(report.layers[:: -(-len(report.layers) // 12) or 1])
        if len(report.layers) == 1:
            ax.set_xlim(report.layers[0] - 0.5, report.layers[0] + 0.5)
    panels[0].set_ylabel("Spearman correlation")
    what = f"mean ± {'standard error' if band == 'error' else 'standard deviation'}, n = {len(report.examples)}"
    options: dict[str, Any] = {"frameon": False, "title": what}
    if axes is None:
        figure_of(panels[0]).legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=count + 2,
            **options,
        )
    else:
        panels[-1].legend(**options)
    return Drawing(figure_of(panels[0]), tuple(panels), artists)


# ---- what they share ------------------------------------------------------------------------------------------------------------


def one_each(value: int | Sequence[int], count: int, what: str) -> list[int]:
    """One number for all, or one for each."""
    found = integers([value] * count if np.ndim(value) == 0 else cast(Sequence[int], value), what)
    if len(found) != count:
        raise OptionError(
            f"{what} must be one number, or one for each of {count} explanations; got {len(found)}"
        )
    return found


def rows_at(result: TokenAttention, position: int) -> tuple[list[int], Floats]:
    """The layers from the lowest, and [layer, token] of one position."""
    layers = sorted(set(result.layers))
    return layers, np.stack([result.at(position, layer) for layer in layers])
