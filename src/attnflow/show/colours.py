"""The colours of all views: the scale of token attention, and the look of every method."""

from collections.abc import Sequence
from typing import NamedTuple

# fmt: off
# from weak to strong. One hue from white (ColorBrewer's Blues), which survives greyscale; what
# speaks against the target is orange, which no kind of colour blindness takes for blue
RAMP = (
    "#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6",
    "#4292c6", "#2171b5", "#08519c", "#08306b",
)
AGAINST = (
    "#fff5eb", "#fee6ce", "#fdd0a2", "#fdae6b", "#fd8d3c",
    "#f16913", "#d94801", "#a63603", "#7f2704",
)
# the same on a dark ground, where strong is light
DARK_RAMP = (
    "#13202d", "#14304c", "#1a4a78", "#2065a5", "#2f7fc0",
    "#4f9bd3", "#7fb8e0", "#b3d6ee", "#deebf7",
)
DARK_AGAINST = (
    "#2a1d12", "#4a2a10", "#733c0e", "#9c4f0f", "#c4651a",
    "#e08236", "#f0a364", "#f8c79a", "#fee6ce",
)
# fmt: on

# from Okabe and Ito's palette, distinct for every kind of colour vision, without its yellow, which
# is too pale on white paper
METHOD_COLOURS = {"raw": "#0072B2", "rollout": "#E69F00", "flow": "#009E73"}
OTHER_COLOURS = ("#CC79A7", "#000000", "#56B4E9", "#D55E00")
MARK_COLOUR = "#D55E00"  # what a figure points at

Line = str | tuple[float, tuple[float, ...]]  # as matplotlib takes it: a name, or (offset, dashes)
METHOD_LINES: dict[str, tuple[str, Line]] = {  # marker and line, distinct without colour
    "raw": ("o", "-"),
    "rollout": ("s", "--"),
    "flow": ("^", "-."),
}
# lists of different lengths, so that a pair of marker and line recurs late
OTHER_MARKERS = ("D", "v", "P", "X", "<", "*", ">")
OTHER_LINES: tuple[Line, ...] = (
    ":",
    (0, (9, 3)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (1, 3)),
    (0, (9, 2, 2, 2)),
)


DARK_LINE = 0.16  # luminance of lines that stand out from grey ones, also without colour


def measure_light(colour: str) -> float:
    """The relative luminance of a colour "#rrggbb", from 0 to 1.

    >>> measure_light("#000000"), measure_light("#ffffff")
    (0.0, 1.0)
    """
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def darken(colour: str) -> str:
    """The same hue, dark enough that a line of it stands out from grey lines without colour.

    >>> darken("#000000"), darken("#E69F00")
    ('#000000', '#936600')
    """
    channels = [float(int(colour[place : place + 2], 16)) for place in (1, 3, 5)]
    while measure_light(shown := "#" + "".join(f"{round(c):02x}" for c in channels)) > DARK_LINE:
        channels = [0.98 * channel for channel in channels]
    return shown


class Look(NamedTuple):
    """The look of a method: colour, marker and line."""

    colour: str
    marker: str
    line: Line


def choose_look(name: str, names: Sequence[str]) -> Look:
    """The look of a method by its place among those that are drawn together.

    >>> choose_look("mine", ["rollout", "mine"]).colour == OTHER_COLOURS[0]
    True
    """
    if name in METHOD_COLOURS:
        return Look(METHOD_COLOURS[name], *METHOD_LINES[name])
    place = [other for other in names if other not in METHOD_COLOURS].index(name)
    return Look(
        OTHER_COLOURS[place % len(OTHER_COLOURS)],
        OTHER_MARKERS[place % len(OTHER_MARKERS)],
        OTHER_LINES[place % len(OTHER_LINES)],
    )
