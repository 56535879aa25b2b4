"""The token attention of a vision model's patches over the picture, which is drawn in grey."""

import os
from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.arrays import Array, Floats
from attnflow.core.checks import check_integers
from attnflow.core.results import TokenAttention
from attnflow.core.text import find_patches
from attnflow.errors import FileError, OptionError
from attnflow.show.colours import RAMP
from attnflow.show.figures.drawing import (
    Drawing,
    check_drawable,
    check_explanations,
    check_scale,
    use_style,
)
from attnflow.show.figures.layout import (
    COLUMN,
    PAGE,
    add_colour_bar,
    label_tokens,
    set_title,
    title_method,
)
from attnflow.show.figures.panels import choose_columns, open_panels
from attnflow.show.figures.shading import Scale, Shading, find_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUE = RAMP[-2]  # of the patches: dark, so that they are seen without colour too
PALEST = 0.45  # the grey that black becomes, so that nothing in the picture is as dark as a patch
GRIDDED = 32  # patches along a side up to which lines part them


@use_style()
def overlay(
    token_attention: TokenAttention,
    image: Any,
    *,
    position: int | None = None,
    layer: int | None = None,
    grid: tuple[int, int] | None = None,
    scale: float | None = None,
    opacity: float = 0.85,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw a vision model's token attention, patch by patch, over the picture.

    The picture is pale and grey; a patch is the more opaque the larger its value. The share of
    other tokens, such as CLS and registers, is written below.

    Parameters
    ----------
    token_attention
        What a method returned for a vision model.
    image
        The part of the picture that the model saw: a PIL image, an array [height, width] or
        [height, width, 3], or the path of a file.
    position
        The query; the first one computed if None.
    layer
        The layer that is drawn; the top one if None.
    grid
        The patches down and across, if the tokens are not named "row,column"; the patches are
        then the last tokens.
    scale
        The value of the most opaque patch; the largest value of a patch if None.
    opacity
        The opacity of that patch, from 0 to 1.
    ax
        Axes to draw into; a new figure if None.

    Returns
    -------
    Drawing
        Artists: "image", "map", whose array is [down, across], and "bar".

    >>> from attnflow import Attention, raw
    >>> result = raw(Attention([[[0.2] * 5] * 5], tokens=["[CLS]", "0,0", "0,1", "1,0", "1,1"]))
    >>> overlay(result, np.zeros((8, 8, 3))).artists["map"].get_array().shape
    (2, 2)
    """
    check_drawable(token_attention)
    result = token_attention
    position = result.positions[0] if position is None else position
    row = result.at(position, layer)
    places = place_patches(result.tokens, grid)
    pixels = read_pixels(image)
    check_fit(pixels, places)
    check_opacity(opacity)
    height, width = pixels.shape[:2]
    panels = open_panels(ax, 1, 1, COLUMN, measure_picture(height, width, 2.5))
    (ax,) = panels.axes
    values = row[places]
    picture, patches = draw_patches(ax, pixels, values, check_scale(scale, values), opacity)
    ax.set_xlabel(list_other_values(result.tokens, row, places), parse_math=False)
    query = label_tokens([result.queries[result.positions.index(position)]])[0]
    shown = max(result.layers) if layer is None else layer
    even = note_even_patches(result.select(position, shown), places)
    set_title(ax, f"{title_method(result.method)} of {query}, layer {shown}{even}")
    artists = {"image": picture, "map": patches, "bar": add_colour_bar([patches], [ax])}
    return panels.finish(artists, [result])


@use_style()
def compare_overlays(
    explanation: Explanation,
    *,
    position: int | None = None,
    layer: int | None = None,
    scale: Scale = "common",
    opacity: float = 0.85,
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw a vision model's token attention by every method, each over the picture.

    The picture is the one that the explanation keeps, as the model saw it.

    Parameters
    ----------
    explanation
        What `explain` returned for an image.
    position
        The query; the explained one if None.
    layer
        The layer that is drawn; the top one if None.
    scale
        The value of the most opaque patch. "common": the largest of all. "row": the largest of each
        picture, so that opacity is the share of it.
    opacity
        The opacity of that patch, from 0 to 1.
    axes
        Axes to draw into, one per method; a new figure if None.

    Returns
    -------
    Drawing
        Artists: {method: its map [down, across]}, and "bar".

    >>> import torch
    >>> from transformers import ViTConfig, ViTForImageClassification
    >>> from attnflow import explain
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4))
    >>> found = explain(torch.rand(3, 8, 8), model=model, methods=["rollout"])
    >>> compare_overlays(found).artists["rollout"].get_array().shape
    (2, 2)
    """
    (explanation,) = check_explanations(explanation)[:1]
    if explanation.picture is None:
        raise OptionError(
            "this explanation keeps no picture to draw over; explain an image with a vision model,"
            " or give the picture: figures.overlay(result, image)"
        )
    check_opacity(opacity)
    names = list(explanation.results)
    position = explanation.position if position is None else position
    places = place_patches(explanation.tokens, None)
    pixels = read_pixels(explanation.picture)
    rows = {name: result.at(position, layer) for name, result in explanation.results.items()}
    flat = [row[places].reshape(1, -1) for row in rows.values()]  # a picture is one row
    maps, limit = Shading(scale).scale_maps(flat)
    columns = choose_columns(len(names), 3)
    width = COLUMN if columns == 1 else PAGE
    tall = measure_picture(len(pixels), len(pixels[0]), (width - 0.7) / columns)
    panels = open_panels(axes, len(names), columns, width, ceil(len(names) / columns) * tall)
    artists: dict[str, Any] = {}
    for ax, name, values in zip(panels.axes, names, maps, strict=True):
        patches = values.reshape(places.shape)
        _, artists[name] = draw_patches(ax, pixels, patches, limit, opacity)
        ax.set_xlabel(list_other_values(explanation.tokens, rows[name], places), parse_math=False)
        top = max(explanation.results[name].layers) if layer is None else layer
        even = note_even_patches(explanation.results[name].select(position, top), places)
        set_title(ax, f"{title_method(name)}, layer {top}{even}")
    share = ", by the largest of its picture" if scale == "row" else ""
    bar = add_colour_bar(list(artists.values()), panels.axes, label=f"token attention{share}")
    artists.setdefault("bar", bar)
    return panels.finish(artists, [explanation])


def measure_picture(height: int, width: int, inches: float) -> float:
    """The height in inches of a picture of a width in inches, with title and notes."""
    return float(np.clip(inches * height / width, 1.2, 8.0)) + 0.65


def note_even_patches(row: TokenAttention, places: Array) -> str:
    """The part of the title of a row that hardly differs between patches; empty for others."""
    others = sorted(set(range(len(row.tokens))) - set(places.ravel().tolist()))
    spread = find_spread(row, others)
    return "" if spread is None else f", even (spread {spread:.1g})"


def check_opacity(opacity: float) -> None:
    """Refuse anything but a number from 0 to 1."""
    if not 0 <= opacity <= 1:
        raise OptionError(f"opacity must be from 0 to 1; got {opacity}")


def draw_patches(
    ax: "Axes", pixels: Array, values: Floats, scale: float, opacity: float
) -> tuple[Any, Any]:
    """Draw a picture in pale grey, and over it patches [down, across] in one hue."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    (height, width), (down, across) = pixels.shape[:2], values.shape
    pale: Any = {"cmap": "gray", "vmin": 0.0, "vmax": 1.0}
    picture = ax.imshow(PALEST + (1 - PALEST) * turn_grey(pixels), **pale)
    hue = LinearSegmentedColormap.from_list(
        "attnflow", [(*to_rgb(HUE), 0), (*to_rgb(HUE), opacity)]
    )
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    patches = ax.imshow(
        values, cmap=hue, vmin=0.0, vmax=scale, extent=extent, interpolation="nearest"
    )
    if max(down, across) <= GRIDDED:
        thin: Any = {"color": "white", "linewidth": 0.3, "alpha": 0.7}
        ax.hlines(np.arange(1, down) * height / down - 0.5, -0.5, width - 0.5, **thin)
        ax.vlines(np.arange(1, across) * width / across - 0.5, -0.5, height - 0.5, **thin)
    ax.set(xticks=[], yticks=[])
    return picture, patches


def turn_grey(pixels: Array) -> Floats:
    """[height, width] from 0 to 1: the luma of a picture."""
    values = pixels.astype(float) / (255 if pixels.dtype.kind in "ui" else 1)
    if values.ndim == 2:
        return values
    grey: Floats = values[..., :3] @ np.array([0.299, 0.587, 0.114])
    return grey


def list_other_values(tokens: Sequence[str], row: Floats, places: Array) -> str:
    """The values of tokens other than patches, such as CLS, in lines of three."""
    others = sorted(set(range(len(tokens))) - set(places.ravel().tolist()))
    names = label_tokens([tokens[place] for place in others])
    below = [f"{name} {row[place]:.3f}" for name, place in zip(names, others, strict=True)]
    lines = [", ".join(below[start : start + 3]) for start in range(0, min(len(below), 9), 3)]
    return "\n".join(lines) + (" …" if len(below) > 9 else "")


def place_patches(tokens: Sequence[str], grid: tuple[int, int] | None) -> Array:
    """[down, across]: the keys of the patches, from the tokens' names or from the grid."""
    named = find_patches(tokens)
    if named:
        down, across = (max(place[axis] for place in named) + 1 for axis in (0, 1))
        if len(named) != down * across or (grid is not None and tuple(grid) != (down, across)):
            raise OptionError(
                f"the tokens name {len(named)} patches of a grid of {down} x {across};"
                f" got grid={grid}"
            )
        return np.array([[named[row, column] for column in range(across)] for row in range(down)])
    if grid is None:
        raise OptionError(
            "these tokens name no patches ('0,0', '0,1', ...); give grid=(down, across)"
        )
    sizes = check_integers(grid, "grid")
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] > len(tokens):
        raise OptionError(
            f"grid must be (down, across), at most {len(tokens)} patches, as many as there are"
            f" tokens; got {grid}"
        )
    return np.arange(len(tokens) - sizes[0] * sizes[1], len(tokens)).reshape(sizes)


def read_pixels(image: Any) -> Array:
    """[height, width] or [height, width, 3 or 4] of a PIL image, an array, or a file."""
    if isinstance(image, str | os.PathLike):
        from PIL import Image, ImageOps

        try:
            with Image.open(image) as opened:  # as image processors read files
                image = ImageOps.exif_transpose(opened).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FileError(f"cannot read {os.fspath(image)} as an image: {reason}") from error
    elif hasattr(image, "convert"):
        image = image.convert("RGB")
    pixels = np.asarray(image)
    shaped = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if pixels.dtype.kind not in "buif" or not shaped or not pixels.size:
        raise OptionError(
            "an image must have shape [height, width] or [height, width, 3];"
            f" got {pixels.shape} of {pixels.dtype}"
        )
    top = 1 if pixels.dtype.kind in "bf" else 255
    if not (pixels >= 0).all() or not (pixels <= top).all():
        raise OptionError(
            "an image must hold floats from 0 to 1, or whole numbers from 0 to 255;"
            " give the picture before normalisation"
        )
    return pixels.astype(float) if pixels.dtype.kind == "b" else pixels


def check_fit(pixels: Array, places: Array) -> None:
    """Refuse a picture whose aspect ratio is not that of the patches: the model saw another."""
    (height, width), (down, across) = pixels.shape[:2], places.shape
    stretch = (height / down) / (width / across)  # a patch's height by its width
    if height < down or width < across or (down != across and not 2 / 3 <= stretch <= 3 / 2):
        raise OptionError(
            f"the picture must fit the grid of {down} x {across} patches (down x across); got"
            f" {height} x {width} pixels: give the part of the picture that the model saw"
        )
