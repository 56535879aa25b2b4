"""Strips of a terminal: running text whose words are shaded, never broken, indented where it wraps.

The colours have the same contrast, at least 3 to 1, with a white and with a black ground, on which
they differ by how much colour they have; their ink has at least 4.5 to 1. Without colours, marks
stand for them.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnflow.core.arrays import Floats
from attnflow.core.text import number_marked, show_tokens

STEPS = 3  # of shading, above none
# blue: much of it, or more than expected; orange: against the target, or less than expected
FOR_STYLES = ("", "#3a7bbf", "#ffffff on #5a7894", "bold #ffffff on #0f70e0")
AGAINST_STYLES = ("", "#bb6010", "#ffffff on #8f6f50", "bold #ffffff on #c75200")
# the same of a terminal with 16 colours
FOR_16 = ("", "blue", "black on cyan", "bold white on blue")
AGAINST_16 = ("", "yellow", "black on yellow", "bold white on red")
MARKS = ("", "░", "▒", "█")
ASCII_MARKS = ("", ".", ":", "#")
WIDEST_LABEL = 24  # of a strip, in columns


# ---- shading ------------------------------------------------------------------------------------


def find_steps(values: Floats) -> list[int]:
    """Steps of shading by the share of the largest value [token]: a quarter each, with its sign.

    >>> find_steps(np.array([0.1, 0.4, -0.2, 0.0]))
    [1, 3, -2, 0]
    """
    largest = float(np.abs(values).max(initial=0.0))
    if not largest > 0:
        return [0] * len(values)
    sizes = np.minimum(STEPS, ((STEPS + 1) * np.abs(values) / largest).astype(int))
    return [int(step) for step in np.sign(values) * sizes]


def find_doublings(scaled: Floats) -> list[int]:
    """Steps of shading by `Comparison.scaled` [token]: twice, four times, eight times; or less.

    >>> find_doublings(np.array([1.0, 0.1, -0.4]))
    [3, 0, -1]
    """
    return [int(step) for step in np.rint(STEPS * scaled)]


def choose_style(console: Console, step: int) -> str:
    """The colours of a step, for a terminal that has them; none for another."""
    if not has_colours(console):
        return ""
    few = console.color_system == "standard"
    above, below = (FOR_16, AGAINST_16) if few else (FOR_STYLES, AGAINST_STYLES)
    return (below if step < 0 else above)[abs(step)]


def has_colours(console: Console) -> bool:
    """Whether a terminal shows colours, and its user wants them."""
    return console.color_system is not None and not console.no_color


def shade(console: Console, text: str, step: int, *, compared: bool = False) -> Text:
    """A text in its colour, or followed by its mark on a terminal without colours.

    compared: the marks are plus and minus signs, one for each doubling.
    """
    if has_colours(console):
        return Text(text, style=choose_style(console, step))
    size = abs(step)
    if compared:
        return Text(text + ("-" if step < 0 else "+") * size)
    marks = MARKS if speaks_unicode(console) else ASCII_MARKS
    return Text(f"{'-' if step < 0 else ''}{text}{marks[size]}")


def speaks_unicode(console: Console) -> bool:
    """Whether a terminal shows more than ASCII."""
    return console.encoding.lower().startswith("utf")


def describe_shares(console: Console, of_what: str = "", *, signed: bool = False) -> Text:
    """The legend of shares of the largest value."""
    legend = Text().append(f"{of_what}shaded: ", style="dim")
    for step in range(1, STEPS + 1):
        legend.append_text(shade(console, f"{100 * step // (STEPS + 1)} %", step)).append(" ")
    legend.append("of the largest", style="dim")
    if signed:
        legend.append("; against it: ", style="dim")
        legend.append_text(shade(console, f"{100 * STEPS // (STEPS + 1)} %", -STEPS))
    return legend


def describe_doublings(console: Console, reference: str) -> Text:
    """The legend of comparisons with the expected shares."""
    times = "×" if speaks_unicode(console) else "x"
    legend = Text().append("shaded: ", style="dim")
    for step in (-3, -2, -1, 1, 2, 3):
        name = f"{times}{2**step}" if step > 0 else f"{times}1/{2**-step}"
        legend.append_text(shade(console, name, step, compared=True)).append(" ")
    given = {"even": "what even attention gives", "others": "what the others give"}
    return legend.append(given[reference], style="dim")


# ---- running text -------------------------------------------------------------------------------


def join_words(
    console: Console,
    tokens: Sequence[str],
    steps: Sequence[int],
    words: Sequence[int | None] | None = None,
    *,
    compared: bool = False,
) -> list[Text]:
    """Shaded tokens, those of a word joined.

    words: the number of the word per token, None for one that stands alone; by the marks of the
    tokenizer if None.
    """
    numbers = number_marked(tokens) if words is None else words
    joined: list[Text] = []
    for place, (shown, step) in enumerate(zip(show_tokens(tokens), steps, strict=True)):
        piece = shade(console, shown, step, compared=compared)
        same = place > 0 and numbers[place] is not None and numbers[place] == numbers[place - 1]
        if same:
            joined[-1].append_text(piece)
        else:
            joined.append(piece)
    return joined


def lay_out(label: Text, words: Iterable[Text], width: int, indent: int) -> Iterator[Text]:
    """Lines of at most `width` columns: the label, then words; all but the first are indented.

    A word is never broken: one that is wider than a line is cut.
    """
    line = label.copy()
    line.truncate(width)
    line.append(" " * max(0, indent - cell_len(line.plain)))
    empty = True
    for word in words:
        room = width - cell_len(line.plain) - (not empty)
        if cell_len(word.plain) > room and not empty:
            yield line
            line, empty = Text(" " * indent), True
        if not empty:
            line.append(" ")
        piece = word.copy()
        piece.truncate(max(1, width - cell_len(line.plain)), overflow="ellipsis")
        line.append_text(piece)
        empty = False
    yield line


def print_strip(console: Console, label: Text, words: Iterable[Text], indent: int) -> None:
    """Print a label and words beside it, as many lines as they need."""
    for line in lay_out(label, words, console.width, indent):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def print_wrapped(console: Console, text: str, style: str = "") -> None:
    """Print running text, its words not broken."""
    for line in lay_out(Text(), map(Text, text.split()), console.width, 0):
        console.print(line, style=style, no_wrap=True, overflow="ignore", crop=False)
