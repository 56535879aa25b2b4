"""The output of the command line: tables with bars, strips of coloured tokens, notes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnflow.analysis.explanation import Explanation
from attnflow.core.arrays import Floats
from attnflow.core.requests import are_even
from attnflow.core.results import TokenAttention
from attnflow.core.text import show_token
from attnflow.errors import printable
from attnflow.notices import collect_notices
from attnflow.show.colours import AGAINST, MARKS, RAMP


def print_table(console: Console, results: list[TokenAttention]) -> None:
    """Print a table with one row per token and a number and a bar per method.

    A star marks flows at the bound that all sources share.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("token", overflow="fold")
    width = max(6, min(40, (console.width - 30) // len(results) - 10))
    for result in results:
        table.add_column(Text(printable(result.method)), justify="right")
        table.add_column("", width=width, no_wrap=True)
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    starred = False
    for key, token in enumerate(results[0].tokens):
        cells = [Text(str(key)), Text(printable(token))]
        for result in results:
            row = result.values[0, 0]
            value, largest = float(row[key]), float(row.max())
            star = result.saturated is not None and bool(result.saturated[0, 0, key])
            starred |= star
            bar = block * round(width * value / largest) if largest > 0 else ""
            cells += [Text(f"{value:.4f}{'*' if star else ' '}"), Text(bar, style="blue")]
        table.add_row(*cells)
    console.print(table)
    if starred:
        console.print(Text("* at the bound that is the same for every source", style="dim"))


def heat_strip(console: Console, tokens: Sequence[str], values: Sequence[float]) -> Text:
    """The tokens in a row, shaded by their share of the largest value.

    Marks replace colours on a terminal without them; negative values are orange, or have a minus.
    """
    strip = Text()
    largest = max(map(abs, values), default=0.0)
    for token, value in zip(tokens, values, strict=True):
        share = abs(value) / largest if largest > 0 else 0.0
        step = min(len(MARKS) - 1, int(len(MARKS) * share))
        strip.append_text(shade(console, show_token(token), step, against=value < 0)).append(" ")
    return strip


def say(text: object, *, err: bool = False) -> None:
    """Print lines of plain text, cleaned, to standard output or standard error."""
    typer.echo(printable(text, keep="\n"), err=err)


def print_note(note: object) -> None:
    """Print a note on standard error, in one line."""
    line = printable(" ".join(str(note).split()))
    Console(stderr=True).print(Text(f"note: {line}", style="yellow"))


def print_markdown(markdown: str) -> None:
    """Print tables in Markdown: drawn on a terminal, unchanged in a pipe.

    Only the lines of tables are parsed: what looks like a link or like emphasis in a text stays.
    """
    console, rows = Console(), list[list[str]]()
    if not console.is_terminal:
        say(markdown)
        return
    for line in [*markdown.split("\n"), ""]:
        if line.startswith("| "):
            rows.append(split_cells(line))
            continue
        if rows:
            table = Table(box=SIMPLE)
            for name in rows[0]:
                table.add_column(Text(name))
            for row in rows[2:]:  # below the header, the line that underlines it
                table.add_row(*map(Text, row))
            console.print(table)
            rows = []
        title = len(line) > 4 and line.startswith("**") and line.endswith("**")
        if line:
            console.print(
                Text(printable(line.strip("*")), "bold") if title else Text(printable(line))
            )


def split_cells(line: str) -> list[str]:
    """The cells of one line of a table in Markdown, cleaned."""
    cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
    return [printable(cell.replace("\\|", "|")) for cell in cells]


@contextmanager
def notes() -> Iterator[None]:
    """Print the warnings of attnflow within this context as notes on standard error."""
    with collect_notices() as notices:
        yield
    for notice in notices:
        print_note(notice)


def print_explanation(
    console: Console, explanation: Explanation, *, layer: int | None = None, by_word: bool = False
) -> None:
    """Print the prediction, a strip of tokens per method and importance, and the strongest."""
    shown = explanation.graph.depth if layer is None else layer
    scores = explanation.scores(shown, by_word=by_word)
    for text in explanation.texts:
        console.print(Text(printable(text), style="bold"))
    if explanation.prediction is not None:
        label, probability = explanation.prediction
        console.print(Text(f"{printable(label)}, with probability {probability:.3f}"))
    token = show_token(explanation.tokens[explanation.position])
    where = f"position {explanation.position}, {token}, of layer {shown}"
    console.print(Text(f"what {where} looks at:", style="dim"))
    width = max(map(len, scores), default=0)
    for name, (tokens, values) in scores.items():
        if name in explanation.importance and name == next(iter(explanation.importance)):
            print_target(console, explanation)
        strip = Text(describe_even(explanation, name, shown, by_word), style="dim")
        if not strip.plain:
            values = quiet_special(explanation, tokens, values)
            best = int(abs(values).argmax())
            strongest = Text(f" {show_token(tokens[best])} {values[best]:.3f}", style="dim")
            strip = heat_strip(console, tokens, values.tolist()).append_text(strongest)
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(printable(name).replace("_", " ").ljust(width)), strip)
        console.print(table)
    signed = any(importance.signed for importance in explanation.importance.values())
    console.print(describe_scale(console, width, signed=signed))


def quiet_special(explanation: Explanation, tokens: Sequence[str], values: Floats) -> Floats:
    """Values without those of CLS, SEP and the like, where one of them would outshine the words."""
    marks = zip(explanation.tokens, explanation.special, strict=True)
    special = {token for token, is_special in marks if is_special}
    if tokens[int(abs(values).argmax())] not in special or special.issuperset(tokens):
        return values
    return np.where([token in special for token in tokens], 0.0, values)


def print_target(console: Console, explanation: Explanation) -> None:
    """Print the target of importance, and its probability."""
    first = next(iter(explanation.importance.values()))
    watched = f"{printable(first.target)} (probability {first.probability:.3f})"
    console.print(Text(f"what {watched} depends on:", style="dim"))


def describe_even(explanation: Explanation, name: str, layer: int, by_word: bool) -> str:
    """Why a strip is not informative; empty if it is."""
    if name not in explanation.results or layer < 2:
        return ""
    row = explanation.row(name, layer, by_word=by_word)
    if row.saturated is None or not are_even(row.spread, row.visible_keys).any():
        return ""
    spread = float(row.spread[0, 0])
    return f"hardly differs between tokens here (spread {spread:.2g}): it says nothing"


def describe_scale(console: Console, indent: int, *, signed: bool = False) -> Text:
    """What the marks and colours mean."""
    text = Text(f"{'':>{indent}}  ").append("share of the largest: ", style="dim")
    for place in range(len(MARKS)):
        text.append_text(shade(console, f"{100 * place // len(MARKS)}%", place)).append(" ")
    if signed:
        text.append("  against: ", style="dim")
        text.append_text(shade(console, "80%", len(MARKS) - 1, against=True))
    return text


def shade(console: Console, text: str, step: int, *, against: bool = False) -> Text:
    """A text in its colour, or followed by its mark on a terminal without colours."""
    mark = MARKS[step]
    if console.color_system is not None and not console.no_color:
        ramp = AGAINST if against else RAMP
        style = "" if mark.place is None else f"{mark.ink} on {ramp[mark.place]}"
        return Text(f" {text} ", style=style)
    sign = mark.sign if console.encoding.lower().startswith("utf") else mark.ascii
    return Text(f"{'-' if against and step else ''}{text}{sign}")
