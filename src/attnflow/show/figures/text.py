"""Coloured running text: as a figure, and as source for LaTeX."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnflow.analysis.exclude import Exclusion
from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.io.formatting import escape_latex
from attnflow.core.text import number_marked, show_token
from attnflow.errors import OptionError, printable
from attnflow.show.colours import AGAINST, RAMP, measure_light
from attnflow.show.figures.drawing import FONT, Drawing, use_style
from attnflow.show.figures.layout import (
    PAGE,
    WIDEST,
    label_tokens,
    measure_room,
    measure_text,
    wrap_text,
)
from attnflow.show.figures.panels import Panels, check_axes, find_figure, make_figure
from attnflow.show.figures.score_rows import ScoreRow, Scores, read_score_rows
from attnflow.show.figures.shading import keep_together

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = FONT + 1  # points of the text
LINE_HEIGHT = 1.75 * SIZE / 72  # inches from one line to the next
BOX = 1.4 * SIZE / 72  # inches of a box's height
SPACE, PADDING = 0.05, 0.018  # inches between words; and of a box beside its token
MARGIN, LEGEND = 0.08, 0.6  # inches: beside the texts, below all
GAP, HEADING = 0.1, 0.17  # inches: above a heading, and of each of its lines
NARROWEST_FIGURE = 1.5  # inches of a figure
SHORTEST, LONGEST_TEXT = 8, 60  # characters of a token that are shown, by the room there is
LEAST_SHADE = 0.02  # the share whose colour differs visibly from white
FAINT_INK = "0.55"  # the ink of tokens that are not coloured


@dataclass(frozen=True)
class Piece:
    """A token of a running text."""

    name: str
    share: float  # of the largest score of its row, from -1 to 1
    is_coloured: bool
    starts_word: bool
    ends_word: bool

    @property
    def padding(self) -> tuple[float, float]:
        """The inches of its box at the left and at the right: none inside a word."""
        return PADDING * self.starts_word, PADDING * self.ends_word


class Placed(NamedTuple):
    """A piece in its line."""

    piece: Piece
    label: str
    left: float  # inches
    width: float  # inches of its box


@use_style()
def text(
    scores: Explanation | Scores,
    *,
    names: Sequence[str] | None = None,
    layer: int | None = None,
    exclude: Exclusion = None,
    compared_with: str | None = None,
    width: float = PAGE,
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    r"""Draw the running text, coloured by the scores of its tokens: once per method or importance.

    Colours are shares of the largest score, which is written beside the title; where it is
    compared, they say how many times what was expected. What speaks against the target, or is less
    than expected, is orange and underlined. A row that hardly differs between tokens stays grey.

    Parameters
    ----------
    scores
        What `explain` returned, or {name: (tokens, values)}, as for `bars`.
    names
        Of the methods and importances that are drawn, in this order; all if None.
    layer
        The layer of methods; the top one if None.
    exclude
        "sinks", "special" (CLS, SEP and the like), "explained" (the position) or positions: tokens
        that are grey and not coloured, whose shares are written beside the titles.
    compared_with
        None: the scores. "even" or "others": how far shares lie below or above what
        `TokenAttention.compared_with` expects, from 1/8 to 8 times as much.
    width
        The width of a new figure, in inches.
    axes
        Axes to draw into, one per name; a new figure if None. Text that does not fit runs out of
        them below.

    Returns
    -------
    Drawing
        Artists: {name: its boxes, a collection of one per coloured token}. It also saves as .tex,
        for the package xcolor.

    >>> from attnflow import explain
    >>> drawn = text(explain("the key to the cabinets"), names=["rollout"], exclude="special")
    >>> drawn.to_latex().splitlines()[5]
    '\\colorbox[HTML]{99C7E0}{\\strut the}'
    """
    rows = read_score_rows(scores, names, layer, False, exclude, compared_with)
    starts = find_starts(scores, next(iter(rows.values())).tokens)
    pieces = {name: split_row(row, starts) for name, row in rows.items()}
    headings = {name: make_row_title(row) for name, row in rows.items()}
    if axes is None:
        inside = check_width(width) - 2 * MARGIN
        lines = [len(wrap_pieces(each, inside)) for each in pieces.values()]
        above = [len(wrap_heading(*heading, inside)) for heading in headings.values()]
        panels = Panels(tuple(place_panels(width, lines, above)), 1, is_new=True)
    else:
        panels = Panels(check_axes(axes, len(rows)), 1, is_new=False)
    artists: dict[str, Any] = {}
    for ax, (name, each) in zip(panels.axes, pieces.items(), strict=True):
        room = measure_room(ax, "x")
        artists[name] = draw_text(ax, wrap_pieces(each, room))
        draw_heading(ax, wrap_heading(*headings[name], room))
    signed = any(piece.share < 0 for each in pieces.values() for piece in each)
    legend = describe_colours(list(rows.values()), signed=signed)
    if panels.is_new:
        add_legend(panels.figure, width, legend, signed=signed)
    drawn = panels.finish(artists, [scores])
    latex = format_text(list(pieces.values()), list(headings.values()), legend, drawn.source)
    return replace(drawn, latex=latex)


# ---- the text -----------------------------------------------------------------------------------


def find_starts(scores: Explanation | Scores, tokens: Sequence[str]) -> list[bool]:
    """Whether each token starts a word: by the words of an explanation, or by the tokens' marks."""
    words = scores.words if isinstance(scores, Explanation) else None
    fits = words is not None and len(words) == len(tokens)
    numbers = (words if fits else None) or number_marked(tokens)
    before = (None, *numbers)
    return [word is None or word != last for word, last in zip(numbers, before, strict=False)]


def split_row(row: ScoreRow, starts: Sequence[bool]) -> list[Piece]:
    """The tokens of a row with their shares of its largest score."""
    coloured = np.full(len(row.tokens), not row.is_even)
    coloured[list(row.excluded)] = False
    largest = float(np.abs(row.values[coloured]).max(initial=0.0)) or 1.0
    scores = row.values / largest if row.scaled is None else row.scaled
    shares = np.where(coloured, scores, 0.0).tolist()
    ends = [*starts[1:], True]
    parts = zip(row.tokens, shares, coloured.tolist(), starts, ends, strict=True)
    return [Piece(*part) for part in parts]


def make_row_title(row: ScoreRow) -> tuple[str, str]:
    """The title of a row, and the note beside it: its largest score, and the tokens left out."""
    title = row.title
    if row.meaning not in ("token attention", "score"):
        title += f" ({row.meaning})"
    if row.is_even:
        return title, "; ".join(row.notes)
    coloured = [place for place in range(len(row.tokens)) if place not in row.excluded]
    scores = np.abs(row.values) if row.scaled is None else row.values
    best = max(coloured, key=lambda place: float(scores[place]))
    name, value = label_tokens([row.tokens[best]])[0], float(row.values[best])
    first = f"darkest: {name} {value:.3g}" if row.scaled is None else f"most: {name} {value:+.3g}"
    return title, "; ".join([keep_together(first), *row.notes])


def describe_colours(rows: Sequence[ScoreRow], *, signed: bool) -> str:
    """The meaning of the colours; some rows may be compared with the expected shares."""
    compared = [row.scaled is not None for row in rows]
    label = "1: 8 times what was expected" if any(compared) else "share of the darkest"
    if any(compared) and not all(compared):
        label += ", or the darkest importance"
    return label + ("; underlined: below 0" if signed else "")


def wrap_heading(title: str, beside: str, width: float) -> list[tuple[str, str]]:
    """Lines of (left, right) above a text: the note beside the title, or below it."""
    known = measure_text([title]) * 1.15 * SIZE / FONT  # bold
    if known + measure_text([beside]) + 0.2 <= width:
        return [(title, beside)]
    below = wrap_text(beside, width * (FONT + 1) / FONT, most=3).split("\n")
    return [(wrap_text(title, 0.85 * width, most=1), ""), *(("", line) for line in below if line)]


def wrap_pieces(pieces: Sequence[Piece], width: float) -> list[list[Placed]]:
    """Lines of at most `width` inches; a word is broken only if it is longer than a line."""
    fitting = max(SHORTEST, int(72 * width / SIZE))  # characters as wide as their height
    labels = label_tokens([piece.name for piece in pieces], min(LONGEST_TEXT, fitting))
    known = {label: measure_text([label]) * SIZE / FONT for label in set(labels)}
    wide = [known[label] + sum(piece.padding) for piece, label in zip(pieces, labels, strict=True)]
    starts = [place for place, piece in enumerate(pieces) if piece.starts_word or not place]
    lines: list[list[Placed]] = [[]]
    at = 0.0
    for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True):
        for place in range(start, end):
            # before a word there must be room for all of it, inside it for the next piece
            needed = sum(wide[start:end]) if place == start else wide[place]
            if lines[-1] and at + needed > width + 1e-6:
                lines.append([])
                at = 0.0
            lines[-1].append(Placed(pieces[place], labels[place], at, wide[place]))
            at += wide[place]
        at += SPACE
    return lines


# ---- the figure ---------------------------------------------------------------------------------


def check_width(width: float) -> float:
    """The width of a figure in inches, with room for words."""
    if not isinstance(width, int | float) or not NARROWEST_FIGURE <= width <= WIDEST:
        raise OptionError(
            f"width must be from {NARROWEST_FIGURE} to {WIDEST} inches; got {width!r}"
        )
    return float(width)


def place_panels(width: float, lines: Sequence[int], above: Sequence[int]) -> list["Axes"]:
    """The axes of a new figure, one below another. lines, above: lines of each text and heading."""
    tops = [GAP + count * HEADING for count in above]
    heights = [count * LINE_HEIGHT for count in lines]
    height = sum(tops) + sum(heights) + LEGEND
    figure = make_figure(width, height)
    figure.set_layout_engine("none")  # the lines of a text are as wide as they are
    panels, at = [], height
    for top, tall in zip(tops, heights, strict=True):
        at -= top + tall
        box = (MARGIN / width, at / height, 1 - 2 * MARGIN / width, tall / height)
        panels.append(figure.add_axes(box))
    return panels


def inches_of(ax: "Axes") -> Any:
    """Coordinates in inches from the upper left corner of axes, wherever a layout moves them."""
    from matplotlib.transforms import ScaledTranslation

    corner: Any = ax.transAxes
    return find_figure(ax).dpi_scale_trans + ScaledTranslation(0, 1, corner)


def draw_heading(ax: "Axes", lines: Sequence[tuple[str, str]]) -> None:
    """Draw lines above axes: a title at the left, and its note at the right or below."""
    place: Any = {"transform": inches_of(ax), "va": "baseline", "parse_math": False}
    for number, (left, right) in enumerate(reversed(lines)):
        height = 0.05 + number * HEADING
        if left:
            ax.text(0, height, left, fontsize=SIZE, fontweight="bold", **place)
        alone = len(lines) > 1
        at = 0.0 if alone else measure_room(ax, "x")
        ax.text(at, height, right, ha="left" if alone else "right", color="0.35", **place)


def draw_text(ax: "Axes", lines: Sequence[Sequence[Placed]]) -> Any:
    """Draw the lines of a text into axes, from their upper left corner on; returns the boxes."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    inches = inches_of(ax)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.axis("off")
    boxes, colours = [], []
    for number, line in enumerate(lines):
        middle = -(number + 0.5) * LINE_HEIGHT
        for piece, label, left, wide in line:
            ink = FAINT_INK
            if piece.is_coloured:
                boxes.append(Rectangle((left, middle - BOX / 2), wide, BOX))
                colours.append(choose_colour(piece.share))
                ink = choose_ink(colours[-1])
            ax.text(
                left + piece.padding[0],
                middle,
                label,
                transform=inches,
                fontsize=SIZE,
                va="center_baseline",
                color=ink,
                parse_math=False,
            )
            if piece.is_coloured and piece.share < -LEAST_SHADE:
                under = [middle - BOX / 2 + 0.015] * 2
                ends = [left + piece.padding[0], left + wide - piece.padding[1]]
                ax.plot(ends, under, transform=inches, color=ink, lw=0.7, clip_on=False)
    collection = PatchCollection(
        boxes, facecolors=colours, linewidths=0, transform=inches, clip_on=False, zorder=0.5
    )
    ax.add_collection(collection, autolim=False)
    return collection


def add_legend(figure: "Figure", width: float, label: str, *, signed: bool) -> None:
    """The scale of the colours, below the texts."""
    from matplotlib.colors import to_rgb

    height = figure.get_figheight()
    wide = min(2.2, width / 2)
    left = width - wide - MARGIN - 0.12  # half of the last number stands beside it
    ax = figure.add_axes((left / width, 0.34 / height, wide / width, 0.09 / height))
    low = -1.0 if signed else 0.0
    shades = [to_rgb(choose_colour(share)) for share in np.linspace(low, 1.0, 200)]
    ax.imshow([shades], extent=(low, 1.0, 0.0, 1.0), aspect="auto")
    ax.set(yticks=[], xticks=[-1, 0, 1] if signed else [0, 0.5, 1])
    ax.spines[:].set_linewidth(0.4)
    ax.set_xlabel(label, loc="right")
    ax.tick_params(pad=1.5)
    ax.xaxis.labelpad = 1.0


def choose_colour(share: float) -> str:
    """The colour of a share from -1 to 1, "#rrggbb", between the steps of the ramps."""
    ramp = AGAINST if share < 0 else RAMP
    place = min(abs(share), 1.0) * (len(ramp) - 1)
    low = min(int(place), len(ramp) - 2)
    ends = [[int(ramp[step][at : at + 2], 16) for at in (1, 3, 5)] for step in (low, low + 1)]
    part = place - low
    return "#" + "".join(
        f"{round((1 - part) * one + part * other):02x}" for one, other in zip(*ends, strict=True)
    )


def choose_ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    light = measure_light(colour)
    return "#000000" if (light + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


# ---- LaTeX --------------------------------------------------------------------------------------


def format_text(
    texts: Sequence[Sequence[Piece]],
    headings: Sequence[tuple[str, str]],
    legend: str,
    source: str | None,
) -> str:
    """The same as LaTeX: a box of colour per token, words parted by spaces."""
    lines = [r"% needs \usepackage{xcolor}"]
    lines += [f"% source: {printable(source)}"] if source else []
    lines += [r"{\setlength{\fboxsep}{1.5pt}\raggedright"]
    for pieces, (title, beside) in zip(texts, headings, strict=True):
        said = escape_latex(printable(beside.replace("\u00a0", " ")))
        lines.append(rf"\textbf{{{escape_latex(printable(title))}}} {{\footnotesize {said}}}\par")
        for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
            joined = after is not None and not after.starts_word
            lines.append(format_piece(piece) + ("%" if joined else ""))
        lines.append(r"\par\medskip")
    lines.append(rf"{{\footnotesize colours: {escape_latex(legend)}}}\par}}")
    return "\n".join([*lines, ""])


def format_piece(piece: Piece) -> str:
    """One token as LaTeX."""
    name = show_token(piece.name)
    name = escape_latex(name if len(name) <= LONGEST_TEXT else f"{name[: LONGEST_TEXT - 1]}…")
    if not piece.is_coloured:
        return rf"\textcolor[gray]{{{FAINT_INK}}}{{\strut {name}}}"
    colour = choose_colour(piece.share)
    if piece.share < -LEAST_SHADE:
        name = rf"\underline{{{name}}}"
    if choose_ink(colour) == "#ffffff":
        name = rf"\textcolor[gray]{{1}}{{\strut {name}}}"
        return rf"\colorbox[HTML]{{{colour[1:].upper()}}}{{{name}}}"
    return rf"\colorbox[HTML]{{{colour[1:].upper()}}}{{\strut {name}}}"
