"""Heat maps of a generation: the prompt tokens that each generated token looked at."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnflow.analysis.exclude import Exclusion, find_excluded
from attnflow.analysis.generate.generation import Generation
from attnflow.analysis.generate.prompt_attention import PromptAttention
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.evenness import say_nothing
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.core.sinks import BoolArray
from attnflow.errors import OptionError
from attnflow.show.figures.drawing import Drawing, check_shape, use_style
from attnflow.show.figures.layout import (
    LABEL_SPACE,
    WIDEST,
    add_colour_bar,
    choose_width,
    draw_map,
    measure_labels,
    measure_map,
    set_title,
    set_token_ticks,
    title_method,
)
from attnflow.show.figures.panels import open_panels
from attnflow.show.figures.shading import Scale, Shading, mask_columns, note_excluded

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@use_style()
def generation(
    generation: Generation | PromptAttention,
    layer: int | None = None,
    *,
    method: str | Callable[..., TokenAttention] = "rollout",
    edges: str | None = None,
    exclude: Exclusion = None,
    scale: Scale = "common",
    compared_with: str | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw the token attention of generated tokens: these down, prompt tokens across.

    Parameters
    ----------
    generation
        What `generate` returned, or its token attention, filtered or not.
    layer
        The layer that is drawn; the top one if None.
    method
        The method of a `Generation`, as for `Generation.by`: a name, or a user-defined method.
    edges
        The edges of a `Generation`, as for `Generation.by`.
    exclude
        "sinks" (of a `Generation`), "special" or positions: prompt tokens that are not coloured,
        and have no part in the scale; their mean share is written below the title.
    scale
        The value of the darkest colour. "common": the largest value drawn. "row": the largest of
        each generated token, so that colours are shares of it.
    compared_with
        None: the values. "even" or "others": how far they lie below (orange) or above (blue) what
        `PromptAttention.compared_with` expects, from -1 to 1.
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
    result = generation
    if isinstance(generation, Generation):
        result = generation.by(method, edges=edges)
        exclude = find_excluded(exclude, generation.size, generation) or None
    if not isinstance(result, PromptAttention):
        raise OptionError(
            f"generation draws what generate gives, or its rollout(); got {type(result).__name__}"
        )
    drawn = compare_generations(
        [result], layer, exclude=exclude, scale=scale, compared_with=compared_with, axes=ax
    )
    artists = {"map": drawn.artists["maps"][0], "bar": drawn.artists["bar"]}
    return replace(drawn, artists=artists)


@use_style()
def compare_generations(
    results: Sequence[PromptAttention],
    layer: int | None = None,
    *,
    exclude: Exclusion = None,
    scale: Scale = "common",
    compared_with: str | None = None,
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw the token attention of generated tokens by several methods or kinds of edges.

    Parameters
    ----------
    results
        What `Generation.by` returned, several times, for one generation.
    layer
        The layer that is drawn; the top one if None.
    exclude
        "special" or positions, as for `generation`.
    scale
        As for `generation`; "common": the largest value in all maps.
    compared_with
        As for `generation`.
    axes
        Axes to draw into, one per result; a new figure if None.

    Returns
    -------
    Drawing
        Artists: "maps", one per result, whose arrays are [generated, prompt], and "bar".

    >>> from attnflow import PromptAttention
    >>> halves = np.full((1, 2, 1), 0.5)
    >>> result = PromptAttention(halves, "rollout", ("the", "key"), ("is",), (1,))
    >>> len(compare_generations([result, result]).artists["maps"])
    2
    """
    first = check_results(results)
    shading = Shading(scale, compared_with)
    layer = check_layer(results, layer)
    excluded = find_excluded(exclude, len(first.prompt), first)
    rows = [select_layer(result, layer) for result in results]
    compared = rows
    if compared_with is not None:
        comparisons = [one.compared_with(compared_with, exclude=excluded) for one in results]
        compared = [
            comparison.scaled[result.layers.index(layer)]
            for comparison, result in zip(comparisons, results, strict=True)
        ]
    even = [flag_even_rows(result, layer, excluded) for result in results]
    maps, limit = shading.scale_maps([mask_columns(values, excluded) for values in compared], even)
    panels = open_panels(axes, len(results), 1, *measure_generations(results, bool(excluded)))
    images = []
    for place, (ax, result, values) in enumerate(zip(panels.axes, results, maps, strict=True)):
        image = draw_map(
            ax,
            values,
            [],
            result.prompt,
            limit,
            None,
            excluded=excluded,
            signed=shading.is_signed,
        )
        images.append(image)
        set_token_ticks(ax, result.generated, along="y")
        ax.set_ylabel("generated")
        if panels.ends_column(place):
            ax.set_xlabel("prompt")
        else:
            ax.set_xticks([])  # the prompt stands once, below the last map
        notes = note_excluded(result.prompt, average_rows(rows[place]), excluded)
        title = f"{title_method(result.method)}, layer {layer}{note_even_rows(even[place])}"
        set_title(ax, title, notes, most=1)
    bar = add_colour_bar(images, panels.axes, label=shading.label)
    return panels.finish({"maps": images, "bar": bar}, results)


def measure_generations(results: Sequence[PromptAttention], is_noted: bool) -> tuple[float, float]:
    """The inches of a figure with a map per result, one below the other."""
    prompt, generated = results[0].prompt, results[0].generated
    width = choose_width(len(prompt) + int(measure_labels(generated) / LABEL_SPACE))
    last = measure_map(len(generated), prompt, is_noted)
    other = measure_map(len(generated), (), is_noted) + 0.1
    return width, min(WIDEST, 0.2 + last + (len(results) - 1) * other)


def check_results(results: object) -> PromptAttention:
    """The first of several results; refused unless all are of one generation."""
    given = list(results) if isinstance(results, Sequence) else []
    if not given or not all(isinstance(result, PromptAttention) for result in given):
        kinds = sorted({type(result).__name__ for result in given}) or [type(results).__name__]
        raise OptionError(
            f"compare_generations draws a list of what Generation.by gives; got {', '.join(kinds)}"
        )
    first: PromptAttention = given[0]
    for result in given:
        expected = (len(result.generated), len(result.prompt), len(result.layers))
        meaning = "these generated tokens, prompt tokens and layers"
        check_shape("values [generated, prompt, layer]", result.values, expected, meaning)
        if (result.prompt, result.generated) != (first.prompt, first.generated):
            raise OptionError(
                "results that are drawn together must be of one generation, with the same prompt"
                f" tokens kept; those of {result.method} and {first.method} differ"
            )
    return first


def check_layer(results: Sequence[PromptAttention], layer: int | None) -> int:
    """The layer that is drawn, the top one if None; refused unless every result has it."""
    (layer,) = check_integers([max(results[0].layers) if layer is None else layer], "layer")
    for result in results:
        if layer not in result.layers:
            computed = list_numbers(result.layers)
            raise OptionError(
                f"layer must be one of {computed}, those of this result; got {layer}",
                options=["layer"],
            )
    return layer


def select_layer(result: PromptAttention, layer: int) -> Floats:
    """[generated, prompt] of one layer."""
    values: Floats = result.values[:, :, result.layers.index(layer)]
    return values


def flag_even_rows(result: PromptAttention, layer: int, excluded: Sequence[int]) -> BoolArray:
    """[generated]: which rows of a layer hardly differ between the prompt tokens that are left."""
    compared = result.compared_with("even", exclude=excluded)
    place = result.layers.index(layer)
    return say_nothing(compared.shares[place], compared.expected[place] > 0)


def note_even_rows(even: BoolArray) -> str:
    """The part of the title that counts even rows; empty if there are none."""
    if even.all():
        return ", even"
    return f", {even.sum()} of {len(even)} rows even" if even.any() else ""


def average_rows(values: Floats) -> Floats:
    """[prompt]: the mean over generated tokens of shares of the row, for [generated, prompt]."""
    sums = values.sum(axis=1, keepdims=True)
    mean: Floats = (values / np.where(sums > 0, sums, 1.0)).mean(axis=0)
    return mean
