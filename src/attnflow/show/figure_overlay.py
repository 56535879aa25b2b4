"""The token attention of a vision model's patches over the picture."""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.core.arrays import Array
from attnflow.core.checks import check_integers
from attnflow.core.results import TokenAttention
from attnflow.errors import FileError, OptionError
from attnflow.show.drawing import (
    Drawing,
    check_axes,
    check_drawable,
    describe_sources,
    find_figure,
    find_largest,
    make_figure,
    use_style,
)
from attnflow.show.layout import COLUMN, add_colour_bar, label_tokens, set_title, title_method

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATCH = re.compile(r"(\d+),(\d+)")


@use_style()
def overlay(
    token_attention: TokenAttention,
    image: Any,
    *,
    position: int | None = None,
    layer: int | None = None,
    grid: tuple[int, int] | None = None,
    opacity: float = 0.6,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw a vision model's token attention, patch by patch, over the picture.

    The share of other tokens, such as CLS and registers, is written below.

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
    opacity
        The opacity of the patches, from 0 to 1.
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
    if not 0 <= opacity <= 1:
        raise OptionError(f"opacity must be from 0 to 1; got {opacity}")
    height, width = pixels.shape[:2]
    if ax is None:
        tall = float(np.clip(2.5 * height / width, 1.2, 8.0)) + 0.65
        ax = make_figure(COLUMN, tall).subplots()
    (ax,) = check_axes(ax, 1)
    values = row[places]
    picture = ax.imshow(pixels, cmap="gray" if pixels.ndim == 2 else None)
    patches = ax.imshow(
        values,
        cmap="inferno",
        vmin=0,
        vmax=find_largest([values]),
        alpha=opacity,
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        interpolation="nearest",
    )
    others = sorted(set(range(len(result.tokens))) - set(places.ravel().tolist()))
    names = label_tokens([result.tokens[place] for place in others])
    below = [f"{name} {row[place]:.3f}" for name, place in zip(names, others, strict=True)]
    lines = [", ".join(below[start : start + 3]) for start in range(0, min(len(below), 9), 3)]
    ax.set_xlabel("\n".join(lines) + (" …" if len(below) > 9 else ""), parse_math=False)
    ax.set(xticks=[], yticks=[])
    query = label_tokens([result.queries[result.positions.index(position)]])[0]
    shown = max(result.layers) if layer is None else layer
    set_title(ax, f"{title_method(result.method)} of {query}, layer {shown}")
    bar = add_colour_bar([patches], [ax])
    bar.solids.set_alpha(opacity)  # as the map has it
    artists = {"image": picture, "map": patches, "bar": bar}
    return Drawing(find_figure(ax), (ax,), artists, describe_sources([result]))


def place_patches(tokens: Sequence[str], grid: tuple[int, int] | None) -> Array:
    """[down, across]: the keys of the patches, from the tokens' names or from the grid."""
    named = {
        (int(match[1]), int(match[2])): key
        for key, token in enumerate(tokens)
        if (match := PATCH.fullmatch(token))
    }
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
        except FileNotFoundError as error:
            raise FileError(f"no such file: {os.fspath(image)}") from error
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise FileError(f"cannot read {os.fspath(image)} as an image: {error}") from error
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
