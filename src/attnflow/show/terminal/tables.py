"""The output of the command line: tables with bars, Markdown, notes."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import typer
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from attnflow.core.results import TokenAttention
from attnflow.core.text import show_token
from attnflow.errors import printable
from attnflow.notices import collect_notices

NUMBER_START = re.compile(r"[-+]?[\d.]")


def print_table(console: Console, results: list[TokenAttention], most: int | None = None) -> None:
    """Print a table with one row per token and a number and a bar per method.

    A star marks flows at the bound that all sources share. most: how many rows to show, the
    strongest by the first method; all if None.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("token", overflow="fold")
    names = 30 if most is None else 70  # room for a sentence
    width = max(6, min(40, (console.width - names) // len(results) - 10))
    for result in results:
        table.add_column(Text(printable(result.method)), justify="right")
        table.add_column("", width=width, no_wrap=True)
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    starred = False
    first = results[0]
    strongest = np.argsort(-first.values[0, 0], kind="stable")[:most]
    for key in sorted(strongest.tolist()):
        cells = [Text(str(key)), Text(show_token(first.tokens[key]))]
        for result in results:
            row = result.values[0, 0]
            value, largest = float(row[key]), float(row.max())
            star = result.saturated is not None and bool(result.saturated[0, 0, key])
            starred |= star
            bar = block * round(width * value / largest) if largest > 0 else ""
            cells += [Text(f"{value:.4f}{'*' if star else ' '}"), Text(bar, style="blue")]
        table.add_row(*cells)
    console.print(table)
    if len(strongest) < len(first.tokens):
        note = f"the {len(strongest)} strongest of {len(first.tokens):,}; a file has all"
        console.print(Text(note, style="dim"))
    if starred:
        console.print(Text("* at the bound that is the same for every source", style="dim"))


def say(text: object, *, err: bool = False) -> None:
    """Print lines of plain text, cleaned, to standard output or standard error."""
    typer.echo(printable(text, keep="\n"), err=err)


def print_note(note: object) -> None:
    """Print a note on standard error, in one line."""
    line = printable(" ".join(str(note).split()))
    Console(stderr=True).print(Text(f"note: {line}", style="yellow"))


def print_notes(notes: Iterable[object]) -> None:
    """Print several notes, one line each."""
    for note in notes:
        print_note(note)


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
            for part in cut_columns(rows[0], rows[2:], console.width):  # [1] underlines the header
                console.print(part)
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


def cut_columns(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Table]:
    """A table as one, or as several below each other that fit a width.

    Each begins with the columns that tell the rows apart. Cells are not broken, unless a column
    alone is wider than half of the width.
    """
    columns = list(zip(header, *rows, strict=True))
    needs = [3 + max(map(cell_len, column)) for column in columns]  # with the space around it
    naming = count_naming(rows)
    if sum(needs[:naming]) > width // 2:
        naming = 1
    parts = [list(range(naming))]
    for place in range(naming, len(columns)):
        if len(parts[-1]) > naming and sum(needs[at] for at in (*parts[-1], place)) > width:
            parts.append(list(range(naming)))
        parts[-1].append(place)
    tables = []
    for part in parts:
        table = Table(box=SIMPLE, pad_edge=False)
        for place in part:
            add_column(table, columns[place], is_first=place == 0, fits=needs[place] <= width // 2)
        for row in rows:
            table.add_row(*(Text(row[place]) for place in part))
        tables.append(table)
    return tables


def count_naming(rows: Sequence[Sequence[str]]) -> int:
    """The number of first columns that tell rows apart; all if none do."""
    count = max(map(len, rows), default=1)
    distinct = (len({tuple(row[:naming]) for row in rows}) for naming in range(1, count))
    return next((naming for naming, many in enumerate(distinct, 1) if many == len(rows)), count)


def add_column(table: Table, column: Sequence[str], *, is_first: bool, fits: bool) -> None:
    """Add a column with its header first; numbers are flush right."""
    numbers = all(NUMBER_START.match(cell) for cell in column[1:] if cell)
    justify: JustifyMethod = "right" if numbers and not is_first else "left"
    table.add_column(Text(column[0]), justify=justify, no_wrap=fits, overflow="fold")


@contextmanager
def notes() -> Iterator[None]:
    """Print the warnings of attnflow within this context as notes on standard error."""
    with collect_notices() as notices:
        yield
    print_notes(notices)
