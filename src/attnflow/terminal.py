"""What the command line shows: tables with bars, strips of coloured tokens, notes."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnflow.errors import SaturationWarning, printable
from attnflow.explain import Explanation
from attnflow.results import TokenAttention


def print_table(console: Console, results: list[TokenAttention]) -> None:
    """Tokens down, a number and a bar for each method across; a star marks flows at the bound that all sources share."""
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


# the colours of the page and of the figures' heat maps (ColorBrewer's Blues), each with a mark for a terminal without colour
SHADES = [
    (" ", ""),
    ("░", "#000000 on #deebf7"),
    ("▒", "#000000 on #9ecae1"),
    ("▓", "#000000 on #4292c6"),
    ("█", "#ffffff on #08519c"),
]
ASCII = {" ": " ", "░": ".", "▒": ":", "▓": "+", "█": "#"}


def heat_strip(console: Console, tokens: Sequence[str], values: Sequence[float]) -> Text:
    """The tokens in a row, coloured from none to strong by their share of the largest value; marked, where there is no colour."""
    strip = Text()
    largest = max(values, default=0.0)
    for token, value in zip(tokens, values, strict=True):
        shade = SHADES[
            min(len(SHADES) - 1, int(len(SHADES) * value / largest)) if largest > 0 else 0
        ]
        strip.append_text(
            shaded(console, printable(token).replace("Ġ", "").replace("▁", ""), shade)
        ).append(" ")
    return strip


def say(text: object, *, err: bool = False) -> None:
    """Print lines of plain text, cleaned, to standard output or standard error."""
    typer.echo(printable(text, keep="\n"), err=err)


def print_note(note: object) -> None:
    """A note on standard error, in one line."""
    line = printable(" ".join(str(note).split()))
    Console(stderr=True).print(Text(f"note: {line}", style="yellow"))


def print_markdown(markdown: str) -> None:
    """Our tables in Markdown: drawn on a terminal, as they are in a pipe.

    Only the lines of tables are read: a word of somebody's text that looks like a link or like
    emphasis stays a word.
    """
    console, rows = Console(), list[list[str]]()
    if not console.is_terminal:
        say(markdown)
        return
    for line in [*markdown.split("\n"), ""]:
        if line.startswith("| "):
            rows.append(read_cells(line))
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


def read_cells(line: str) -> list[str]:
    """The cells of one line of a table in Markdown, cleaned."""
    cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
    return [printable(cell.replace("\\|", "|")) for cell in cells]


@contextmanager
def notes() -> Iterator[None]:
    """What attnflow warns of within becomes a note on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SaturationWarning)
        yield
    for warning in caught:
        print_note(warning.message)


def print_explanation(
    console: Console, explanation: Explanation, *, layer: int | None = None, by_word: bool = False
) -> None:
    """The prediction, then one strip of tokens for each method and importance, with its strongest token at the end."""
    shown = max(explanation.raw.layers) if layer is None else layer
    scores = explanation.scores(shown, by_word=by_word)
    if isinstance(explanation.text, str):
        console.print(Text(printable(explanation.text), style="bold"))
    if explanation.prediction is not None:
        label, probability = explanation.prediction
        console.print(Text(f"{printable(label)}, with probability {probability:.3f}"))
    token = printable(explanation.tokens[explanation.position])
    console.print(
        Text(
            f"what position {explanation.position}, {token}, of layer {shown} looks at:",
            style="dim",
        )
    )
    width = max(map(len, scores))
    for name, (tokens, values) in scores.items():
        best = int(values.argmax())
        strongest = Text(f" {printable(tokens[best])} {values[best]:.3f}", style="dim")
        strip = heat_strip(console, tokens, values.tolist()).append_text(strongest)
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(printable(name).replace("_", " ").ljust(width)), strip)
        console.print(table)
    console.print(scale(console, width))


def scale(console: Console, indent: int) -> Text:
    """What the marks and colours mean."""
    text = Text(f"{'':>{indent}}  ").append("share of the largest: ", style="dim")
    for place, shade in enumerate(SHADES):
        text.append_text(shaded(console, f"{100 * place // len(SHADES)}%", shade)).append(" ")
    return text


def shaded(console: Console, text: str, shade: tuple[str, str]) -> Text:
    """A text in its colour, or followed by its mark on a terminal without colour."""
    mark, style = shade
    if console.color_system is not None and not console.no_color:
        return Text(f" {text} ", style=style)
    return Text(f"{text}{mark if console.encoding.lower().startswith('utf') else ASCII[mark]}")
