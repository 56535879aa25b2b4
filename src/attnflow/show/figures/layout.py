"""The layout of figures: sizes in inches, panels in rows, and text that fits them."""

import textwrap
from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.text import join_pieces, split_shown
from attnflow.show.colours import AGAINST, RAMP
from attnflow.show.figures.drawing import FONT, METHOD_TITLES
from attnflow.show.figures.panels import find_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

COLUMN, PAGE = 3.3, 7.0  # inches: a column of a paper, and its page
WIDEST = 21.0  # inches: where a figure stops growing
LINE = 1.4 * (FONT + 1) / 72  # inches from one line of a title to the next
LABEL_SPACE = 1.25 * FONT / 72  # inches from one label to the next that leave both legible
PANEL = 1.25  # inches of the narrowest panel that has room for its title
LABEL_LENGTH = 16  # characters of a token that are shown
NAME_LENGTH = 100  # characters of the name of a method
SEEN = 0.2  # of the scale: colours from here on differ visibly from white
# the scale of `Comparison.scaled`: 1/3 for every doubling, up to 1
TIMES = tuple(zip(np.arange(-3, 4) / 3, ("≤ 1/8", "1/4", "1/2", "1", "2", "4", "≥ 8"), strict=True))
EXCLUDED: Any = {"facecolor": "0.96", "edgecolor": "0.8", "hatch": "////", "linewidth": 0.0}


# ---- panels -------------------------------------------------------------------------------------


def choose_width(tokens: int) -> float:
    """The width in inches: a column if the labels of the tokens fit, else a page, else more."""
    if tokens <= 40:
        return COLUMN if tokens <= 16 else PAGE
    return min(WIDEST, tokens * LABEL_SPACE * 1.15 + 0.8)


def measure_room(ax: "Axes", along: str, count: int = 1) -> float:
    """The inches of an axis per label."""
    box = ax.get_window_extent()
    length = box.width if along == "x" else box.height
    return float(max(1e-3, length / find_figure(ax).dpi / max(1, count)))


def set_title(
    ax: "Axes",
    text: str,
    notes: Sequence[str] = (),
    *,
    pad: float | None = None,
    most: int = 4,
) -> None:
    """Set a title of at most two lines, no wider than the axes, with notes below it.

    pad: points between title and axes; matplotlib's own if None. most: lines of a note; where a
    note has one, so has the title above it.
    """
    room = 1.15 * measure_room(ax, "x")
    above = 1 if notes and most == 1 else 2
    lines = [wrap_text(text, room, most=above)]
    lines += [wrap_text(note, room, most=most) for note in notes]
    ax.set_title("\n".join(lines), parse_math=False, pad=pad)


def title_method(name: str) -> str:
    """The name of a method as a title."""
    return METHOD_TITLES.get(name, label_tokens([name], NAME_LENGTH)[0])


def wrap_text(text: str, width: float, *, most: int) -> str:
    """Wrap a title to a number of lines of a width in inches; what does not fit is cut off."""
    needed = measure_text([text]) * (FONT + 1) / FONT
    if needed <= width:
        return text
    characters = max(4, int(0.93 * width / needed * len(text)))
    return "\n".join(textwrap.wrap(text, characters, max_lines=most, placeholder="…"))


# ---- the text of tokens -------------------------------------------------------------------------


def label_tokens(tokens: Iterable[str], longest: int = LABEL_LENGTH) -> list[str]:
    r"""Labels of tokens: shortened, without marks of tokenizers, escaped if the font lacks a glyph.

    >>> label_tokens(["Ġkey", "▁to", "##s", "Ċ", chr(0x200b), "x" * 10_000])
    ['key', 'to', 's', '\\n', '\\u200b', 'xxxxxxxxxxxxxxx…']
    """
    drawable = list_glyphs()
    whole = join_pieces(list(map(str, tokens)))
    return [label_token(token, drawable, longest) for token in whole]


def list_glyphs() -> set[int]:
    """The characters that matplotlib's fonts, as the user has set them, can draw."""
    import matplotlib
    from matplotlib.font_manager import FontProperties, findfont, get_font

    families = matplotlib.rcParams["font.family"]
    return {
        code
        for family in families
        for code in get_font(str(findfont(FontProperties(family=[family])))).get_charmap()
    }


def label_token(token: str, drawable: set[int], longest: int) -> str:
    """The label of one token."""
    units = list(split_shown(str(token)))
    shown = ""
    for unit in units:
        if not drawable.issuperset(map(ord, unit)):
            unit = unit.encode("unicode_escape").decode()
        if len(shown) + len(unit) > longest - (len(units) > longest):  # no escape is cut in two
            return shown[: longest - 1] + "…"
        shown += unit
    return shown


def measure_text(texts: Sequence[str]) -> float:
    """The width in inches of the widest text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=FONT)
    measure = text_to_path.get_text_width_height_descent
    widths = (measure(text, font, ismath=False)[0] / 72 for text in texts if text)
    return float(max(widths, default=0.0))


def measure_labels(tokens: Sequence[str]) -> float:
    """The inches that labels of tokens may take, rotated or beside the axis."""
    return measure_text(label_tokens(tokens)) + 0.1


def set_token_ticks(
    ax: "Axes", tokens: Sequence[str], *, along: str = "x", chosen: int | None = None
) -> None:
    """Label the places 0, 1, ... of an axis with tokens, the chosen one in bold.

    Labels are rotated if they are too wide, and only some are drawn if there are too many.
    """
    names = label_tokens(tokens)
    room = measure_room(ax, along, len(names))
    step = max(1, ceil(LABEL_SPACE / room - 0.35))
    places = list(range(0, len(names), step))
    if chosen is not None and 0 <= chosen < len(names) and chosen not in places:
        places[min(len(places) - 1, round(chosen / step))] = chosen  # it is always named
    shown = [names[place] for place in places]
    if along == "y":
        ax.set_yticks(places, shown, parse_math=False)
    else:
        turned: dict[str, Any] = {}
        if measure_text(shown) + 0.06 >= room * step:
            turn = 45 if room * step > 1.5 * LABEL_SPACE else 90
            turned = {"rotation": turn, "ha": "right", "rotation_mode": "anchor"}
            turned["va"] = "center" if turn == 90 else "top"
        ax.set_xticks(places, shown, parse_math=False, **turned)
    ax.tick_params(axis="x" if along == "x" else "y", length=0, pad=3)
    if chosen in places:
        ticks = ax.get_xticklabels() if along == "x" else ax.get_yticklabels()
        ticks[places.index(chosen)].set_fontweight("bold")


def set_layer_ticks(
    ax: "Axes", places: Sequence[int], layers: Sequence[int], *, along: str = "y", ground: str = "0"
) -> None:
    """Label the layers along an axis, only some of them if there are too many.

    ground: the name of layer 0.
    """
    names = [str(layer) if layer else ground for layer in layers]
    wide = LABEL_SPACE if along == "y" else measure_text(names) + 0.06
    step = max(1, ceil(wide / measure_room(ax, along, len(names)) - 0.35))
    (ax.set_yticks if along == "y" else ax.set_xticks)(places[::step], names[::step])
    ax.tick_params(axis="y" if along == "y" else "x", length=0, pad=3)


# ---- heat maps ----------------------------------------------------------------------------------


def measure_map(rows: int, tokens: Sequence[str], notes: int = 0) -> float:
    """The height of a heat map in inches, with lines of notes below its title."""
    inside = float(np.clip(rows * LABEL_SPACE * 1.15, 0.6, 12.0))
    return inside + 0.4 + notes * LINE + measure_labels(tokens)


def draw_map(
    ax: "Axes",
    values: Floats,
    layers: Sequence[int],
    columns: Sequence[str],
    scale: float,
    chosen: int | None,
    *,
    excluded: Sequence[int] = (),
    signed: bool = False,
) -> "AxesImage":
    """Draw a heat map of values [row, column], from 0 to scale; signed, from -scale.

    Rows that are layers go up, as in every figure; other rows, as lines of a text, go down.
    """
    from matplotlib.colors import LinearSegmentedColormap

    colours = (*AGAINST[::-1], *RAMP) if signed else RAMP
    image = ax.imshow(
        values,
        cmap=LinearSegmentedColormap.from_list("attnflow", colours),
        vmin=-scale if signed else 0.0,
        vmax=scale,
        aspect="auto",
        interpolation="nearest",
        origin="lower" if len(layers) else "upper",
    )
    for column in excluded:
        ax.axvspan(column - 0.5, column + 0.5, **EXCLUDED, zorder=0.5)
    if signed:  # signs are visible without colour, too
        rows, places = np.nonzero(np.ma.filled(values, 0.0) < -SEEN * scale)
        ax.scatter(places, rows, marker="_", s=9, color="black", linewidth=0.6)
    set_token_ticks(ax, columns, along="x", chosen=chosen)
    set_layer_ticks(ax, range(len(layers)), layers)
    return image


def add_colour_bar(
    images: Sequence["AxesImage"], axes: Sequence["Axes"], *, label: str = "token attention"
) -> Any:
    """The scale that maps share, at the right of their axes; pointed where values lie beyond it.

    One from -1 to 1 is that of `Comparison.scaled`, and says how many times what was expected.
    """
    shown: list[tuple[Any, float]] = [
        (np.ma.asarray(image.get_array()), image.get_clim()[1]) for image in images
    ]
    beyond = any(bool((values > limit).any()) for values, limit in shown)  # masked values aside
    extend: Any = "max" if beyond else "neither"
    figure, boxes = find_figure(axes[0]), [ax.get_position() for ax in axes]
    height = (max(box.y1 for box in boxes) - min(box.y0 for box in boxes)) * figure.get_figheight()
    shape: Any = {
        "fraction": 0.08,
        "pad": 0.02,
        "aspect": max(10.0, height / 0.11),
        "extendfrac": min(0.06, 0.1 / height),
    }
    bar = figure.colorbar(images[0], ax=list(axes), extend=extend, label=label, **shape)
    if images[0].get_clim()[0] < 0:
        bar.set_ticks([scaled for scaled, _ in TIMES], labels=[times for _, times in TIMES])
    cast(Any, bar.outline).set_linewidth(0.4)
    return bar
