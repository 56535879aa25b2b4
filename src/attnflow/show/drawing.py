"""What all figures share: the paper they are drawn on, the text of tokens, the colours, and the files they are written to."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from attnflow.core.files import PICTURES, Writer, by_ending
from attnflow.core.graph import Floats, integers
from attnflow.core.results import TokenAttention
from attnflow.core.text import split_shown
from attnflow.errors import FileError, MissingExtraError, OptionError

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    Numbers = npt.NDArray[Any]

COLUMN, PAGE, WIDEST = (
    3.3,
    7.0,
    21.0,
)  # inches: a column of a paper, its page, and where growing ends
FONT = 8.0  # points
LABEL = 1.25 * FONT / 72  # inches from one label to the next that leave both legible
LONGEST = 16  # characters of a token that are shown
FAINTEST = 0.01  # of the strongest edge: what is weaker could not be seen, and is not drawn
PATCH = re.compile(r"(\d+),(\d+)")
DPI = 200
# from Okabe and Ito's palette, told apart by every kind of eye, and by line and marker where there is no colour
COLOURS = {"raw": "#0072B2", "rollout": "#E69F00", "flow": "#009E73"}
OTHER_COLOURS = ("#CC79A7", "#56B4E9", "#000000", "#F0E442")
MARKED = "#D55E00"
TITLES = {"raw": "raw attention", "rollout": "attention rollout", "flow": "attention flow"}
CMAP = "Blues"  # one hue, from white: it survives greyscale
STYLE: Any = {
    "font.size": FONT,
    "axes.titlesize": FONT + 1,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "legend.fontsize": FONT,
    "figure.titlesize": FONT + 1,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "text.usetex": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "attnflow",  # the same figure gives the same file
    "pdf.fonttype": 42,
}


@contextmanager
def style() -> Iterator[None]:
    """matplotlib with attnflow's settings, for the time of one drawing; also a decorator."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError(
            "figures need matplotlib: pip install 'attnflow[figures]'"
        ) from error
    with matplotlib.rc_context(STYLE):
        yield


@dataclass(frozen=True, eq=False)
class Drawing:
    """What was drawn: the figure, its axes, and the artists that hold the data, by name. It shows itself in a notebook."""

    figure: "Figure"
    axes: tuple["Axes", ...]
    artists: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .png, .svg or .pdf, by the ending of the name."""
        return save(self.figure, path)

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        _write("png", self.figure, file)
        return file.getvalue()

    def __repr__(self) -> str:
        return f"<Drawing: {', '.join(self.artists)}>"


@style()
def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure, or a `Drawing`, as .png, .svg or .pdf, by the ending of the name; the same figure gives the same bytes.

    >>> from matplotlib.figure import Figure
    >>> save(Figure(), "empty.svg").name
    'empty.svg'
    """
    figure = figure.figure if isinstance(figure, Drawing) else figure
    if not hasattr(figure, "savefig"):
        raise OptionError(
            f"save takes a figure or what a drawing returned; got {type(figure).__name__}"
        )
    writers: dict[str, Writer] = {
        ending: partial(_write, ending[1:], figure) for ending in PICTURES
    }
    return by_ending(path, writers)


@style()
def _write(ending: str, figure: "Figure", file: IO[bytes]) -> None:
    undated: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(file, format=ending, dpi=DPI, metadata=undated.get(ending))


# ---- paper ----------------------------------------------------------------------------------------------------------------------


def paper(width: float, height: float) -> "Figure":
    """An empty figure, in inches, that belongs to no window and makes room for its labels by itself."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def width_for(tokens: int) -> float:
    """A column while the labels of the tokens fit, then a page, then what they need."""
    return (
        COLUMN
        if tokens <= 16
        else PAGE
        if tokens <= 40
        else min(WIDEST, tokens * LABEL * 1.15 + 0.8)
    )


def label_room(tokens: Sequence[str]) -> float:
    """Inches that the labels of tokens may take, turned or beside the axis."""
    return text_width(labels(tokens)) + 0.1


def map_height(layers: int, tokens: Sequence[str]) -> float:
    """Inches of a heat map."""
    return float(np.clip(layers * LABEL * 1.15, 0.6, 12.0)) + 0.4 + label_room(tokens)


def figure_of(ax: "Axes") -> "Figure":
    """The whole figure that axes stand in, also when they stand in a part of it."""
    figure: Any = ax.figure
    while figure is not figure.figure:
        figure = figure.figure
    whole: Figure = figure
    return whole


def given_axes(axes: Any, count: int) -> list["Axes"]:
    """The user's axes, if they are as many as the drawing has panels."""
    found = list(np.ravel(np.asarray(axes, dtype=object)))
    if len(found) != count or not all(hasattr(ax, "imshow") for ax in found):
        kinds = ", ".join(sorted({type(ax).__name__ for ax in found}))
        raise OptionError(
            f"this drawing has {count} panel{'s' * (count > 1)}, one matplotlib Axes each; got {len(found)}: {kinds}"
        )
    return found


def method_title(method: str) -> str:
    """The name of a method, for people."""
    return TITLES.get(method, method)


# ---- the text of tokens ---------------------------------------------------------------------------------------------------------


def labels(tokens: Iterable[str], longest: int = LONGEST) -> list[str]:
    r"""Tokens as they are drawn: without the marks of tokenizers, escaped where the font has no glyph, shortened.

    >>> labels(["Ġkey", "▁to", "##s", "Ċ", chr(0x200b), "x" * 10_000])
    ['key', 'to', 's', '\\n', '\\u200b', 'xxxxxxxxxxxxxxx…']
    """
    drawable = glyphs()
    return [label(token, drawable, longest) for token in tokens]


def glyphs() -> set[int]:
    """The characters that matplotlib's fonts, as the user has set them, can draw."""
    import matplotlib
    from matplotlib.font_manager import FontProperties, findfont, get_font

    families = matplotlib.rcParams["font.family"]
    return {
        code
        for family in families
        for code in get_font(str(findfont(FontProperties(family=[family])))).get_charmap()
    }


def label(token: str, drawable: set[int], longest: int) -> str:
    """One token as it is drawn."""
    units = list(split_shown(str(token)))
    shown = ""
    for unit in units:
        if not drawable.issuperset(map(ord, unit)):
            unit = unit.encode("unicode_escape").decode()
        if len(shown) + len(unit) > longest - (len(units) > longest):  # no escape is cut in two
            return shown[: longest - 1] + "…"
        shown += unit
    return shown


def token_ticks(
    ax: "Axes", tokens: Sequence[str], *, along: str = "x", chosen: int | None = None
) -> None:
    """Name the places 0, 1, ... of an axis by tokens: turned where they are too wide, every few where they are too many, one in bold."""
    names = labels(tokens)
    room = room_of(ax, along, len(names))
    step = max(1, ceil(LABEL / room - 0.35))
    places = list(range(0, len(names), step))
    if chosen is not None and 0 <= chosen < len(names) and chosen not in places:
        places[min(len(places) - 1, round(chosen / step))] = (
            chosen  # the explained one is always named
        )
    shown = [names[place] for place in places]
    if along == "y":
        ax.set_yticks(places, shown, parse_math=False)
    else:
        turn = (
            0 if text_width(shown) + 0.06 < room * step else 45 if room * step > 1.5 * LABEL else 90
        )
        turned: dict[str, Any] = {
            "rotation": turn,
            "ha": "right",
            "va": "center" if turn == 90 else "top",
            "rotation_mode": "anchor",
        }
        ax.set_xticks(places, shown, parse_math=False, **(turned if turn else {}))
    ax.tick_params(axis="x" if along == "x" else "y", length=0, pad=3)
    if chosen in places:
        ticks = ax.get_xticklabels() if along == "x" else ax.get_yticklabels()
        ticks[places.index(chosen)].set_fontweight("bold")


def layer_ticks(
    ax: "Axes", places: Sequence[int], layers: Sequence[int], *, along: str = "y", ground: str = "0"
) -> None:
    """Number the layers along an axis, every few where they are too many; ground: what layer 0 is called."""
    names = [str(layer) if layer else ground for layer in layers]
    wide = LABEL if along == "y" else text_width(names) + 0.06
    step = max(1, ceil(wide / room_of(ax, along, len(names)) - 0.35))
    (ax.set_yticks if along == "y" else ax.set_xticks)(places[::step], names[::step])
    ax.tick_params(axis="y" if along == "y" else "x", length=0, pad=3)


def room_of(ax: "Axes", along: str, count: int) -> float:
    """Inches of an axis for each of so many labels."""
    box = ax.get_window_extent()
    return max(
        1e-3, (box.width if along == "x" else box.height) / figure_of(ax).dpi / max(1, count)
    )


def text_width(texts: Sequence[str]) -> float:
    """Inches that the widest text takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=FONT)
    return max(
        (
            text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72
            for text in texts
            if text
        ),
        default=0.0,
    )


# ---- maps -----------------------------------------------------------------------------------------------------------------------


def layer_map(
    ax: "Axes",
    values: Floats,
    layers: Sequence[int],
    columns: Sequence[str],
    scale: float,
    chosen: int | None,
) -> "AxesImage":
    """A heat map of values [row, column], from 0 to scale."""
    image = ax.imshow(
        values, cmap=CMAP, vmin=0.0, vmax=scale, aspect="auto", interpolation="nearest"
    )
    token_ticks(ax, columns, along="x", chosen=chosen)
    layer_ticks(ax, range(len(layers)), layers)
    return image


def colour_bar(images: Sequence["AxesImage"], axes: Sequence["Axes"]) -> Any:
    """The scale that maps share, at the right of their axes; pointed where some values lie beyond it."""
    beyond = any((np.asarray(image.get_array()) > image.get_clim()[1]).any() for image in images)
    extend: Any = "max" if beyond else "neither"
    figure, boxes = figure_of(axes[0]), [ax.get_position() for ax in axes]
    height = (max(box.y1 for box in boxes) - min(box.y0 for box in boxes)) * figure.get_figheight()
    shape: Any = {
        "fraction": 0.08,
        "pad": 0.02,
        "aspect": max(10.0, height / 0.11),
        "extendfrac": min(0.06, 0.1 / height),
    }
    bar = figure.colorbar(images[0], ax=list(axes), extend=extend, label="token attention", **shape)
    cast(Any, bar.outline).set_linewidth(0.4)
    return bar


def probability_bars(ax: "Axes", chances: Mapping[str, float], label: str) -> Any:
    """A bar a word, with its probability above it."""
    bars = ax.bar(range(len(chances)), list(chances.values()), color="0.45", width=0.6)
    ax.bar_label(bars, fmt="%.2f", padding=1)
    ax.set(ylim=(0, 1.12), yticks=[0, 0.5, 1], ylabel=label, xlim=(-0.6, len(chances) - 0.4))
    ax.spines[["top", "right"]].set_visible(False)
    token_ticks(ax, list(chances), along="x")
    return bars


def largest(arrays: Iterable[Floats]) -> float:
    """The top of a scale that holds all values; 1 if all are zero."""
    return max((float(array.max()) for array in arrays if array.size), default=0.0) or 1.0


# ---- pictures -------------------------------------------------------------------------------------------------------------------


def patches_of(tokens: Sequence[str], grid: tuple[int, int] | None) -> "Numbers":
    """[down, across]: the key of each patch, from the tokens' names or from the grid."""
    named = {
        (int(match[1]), int(match[2])): key
        for key, token in enumerate(tokens)
        if (match := PATCH.fullmatch(token))
    }
    if named:
        down, across = (max(place[axis] for place in named) + 1 for axis in (0, 1))
        if len(named) != down * across or (grid is not None and tuple(grid) != (down, across)):
            raise OptionError(
                f"the tokens name {len(named)} patches of a grid of {down} x {across}; got grid={grid}"
            )
        return np.array([[named[row, column] for column in range(across)] for row in range(down)])
    if grid is None:
        raise OptionError(
            "these tokens name no patches ('0,0', '0,1', ...); give grid=(down, across)"
        )
    sizes = integers(grid, "grid")
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] > len(tokens):
        raise OptionError(
            f"grid must be (down, across), at most {len(tokens)} patches, as many as there are tokens; got {grid}"
        )
    return np.arange(len(tokens) - sizes[0] * sizes[1], len(tokens)).reshape(sizes)


def pixels_of(image: Any) -> "Numbers":
    """[height, width] or [height, width, 3 or 4] of a PIL image, an array, or a file."""
    if isinstance(image, str | os.PathLike):
        from PIL import Image, ImageOps

        try:
            with Image.open(image) as opened:
                image = ImageOps.exif_transpose(opened).convert(
                    "RGB"
                )  # as image processors read files
        except FileNotFoundError as error:
            raise FileError(f"no such file: {os.fspath(image)}") from error
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise FileError(f"cannot read {os.fspath(image)} as an image: {error}") from error
    elif hasattr(image, "convert"):
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if (
        pixels.dtype.kind not in "buif"
        or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
        or not pixels.size
    ):
        raise OptionError(
            f"an image must have shape [height, width] or [height, width, 3]; got {pixels.shape} of {pixels.dtype}"
        )
    top = 1 if pixels.dtype.kind in "bf" else 255
    if not (pixels >= 0).all() or not (pixels <= top).all():
        raise OptionError(
            "an image must hold floats from 0 to 1, or whole numbers from 0 to 255; give the picture before normalisation"
        )
    return pixels.astype(float) if pixels.dtype.kind == "b" else pixels


# ---- checks ---------------------------------------------------------------------------------------------------------------------


def check_result(result: TokenAttention) -> None:
    """A result whose values have the shape that its names say."""
    if not isinstance(result, TokenAttention):
        raise OptionError(
            f"this figure draws a TokenAttention, which raw, rollout and flow give; got {type(result).__name__}"
        )
    expected = (len(result.layers), len(result.positions), len(result.tokens))
    check_shape(
        "values [layer, query, key]",
        result.values,
        expected,
        f"{expected[0]} layers, {expected[1]} positions and {expected[2]} tokens",
    )


def check_shape(what: str, values: Any, expected: tuple[int, ...], means: str) -> None:
    """Finite numbers of a shape."""
    if np.shape(values) != expected:
        raise OptionError(
            f"{what} must have shape {expected}, for {means}; got {np.shape(values)}: tokens and values belong to another"
        )
    if not np.isfinite(values).all():
        raise OptionError(f"{what} must be finite to be drawn; some are not")
