"""Tables as Markdown, LaTeX and HTML, with every special character of a token escaped."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real

from attnflow.core.checks import check_count
from attnflow.core.provenance import Source
from attnflow.core.text import shorten, show_token
from attnflow.errors import printable

TOKEN_COLUMNS = ("query", "token")  # whose cells are tokens, with the marks of their tokenizer
VIEW_ROWS = 30  # of a table in a notebook
VIEW_CHARACTERS = 40  # of a cell in a notebook
Cells = Sequence[object]


@dataclass(frozen=True)
class Panel:
    """One table as it is printed.

    Parameters
    ----------
    header
        The names of the columns.
    rows
        One sequence of cells per row: strings, numbers, or None for an empty cell.
    caption, note
        A line above the table, and one below it; empty for none.
    bar
        The column whose numbers get a bar behind them in a notebook; None for no bars.
    """

    header: Sequence[str]
    rows: Iterable[Cells]
    caption: str = ""
    note: str = ""
    bar: str | None = None


def take_rows(rows: Iterable[Cells], limit: int | None) -> tuple[list[Cells], int]:
    """The first `limit` rows, all if None, and the number of rows left out."""
    if limit is not None:
        check_count("limit", limit)
    remaining = iter(rows)
    return list(islice(remaining, limit)), sum(1 for _ in remaining)


def format_count(number: int, noun: str) -> str:
    """A number of things.

    >>> format_count(1, "row"), format_count(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def count_rows(rows: Sequence[Cells], left: int) -> str:
    """A note on how many rows are shown; empty if all are."""
    return f"{len(rows):,} of {format_count(len(rows) + left, 'row')}" if left else ""


# ---- cells --------------------------------------------------------------------------------------


def format_number(value: float) -> str:
    """A number as all tables print it: four decimals, or scientific notation if they do not suit.

    >>> [format_number(value) for value in (0.25, 0, 1e-7, -12.5)]
    ['0.2500', '0', '1.00e-07', '-12.5000']
    """
    if value == 0:
        return "0"
    return f"{value:.4f}" if 1e-4 <= abs(value) < 1e6 or value != value else f"{value:.2e}"


def format_cell(value: object, column: str = "") -> str:
    """One cell as a single line of printable text.

    >>> format_cell("Ġkey", "token"), format_cell(None), format_cell(3), format_cell(0.5)
    ('key', '', '3', '0.5000')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Real) and not isinstance(value, Integral):
        return format_number(float(value))
    return show_token(str(value)) if column in TOKEN_COLUMNS else printable(value)


def format_row(header: Sequence[str], row: Cells) -> list[str]:
    """The cells of one row as text."""
    return [format_cell(cell, name) for name, cell in zip(header, row, strict=True)]


def find_numbers(header: Sequence[str], rows: Sequence[Cells]) -> list[bool]:
    """Which columns hold numbers, and are right-aligned."""
    if not rows:
        return [False] * len(header)
    return [
        all(isinstance(cell, Real | None) and not isinstance(cell, bool) for cell in cells)
        for cells in zip(*rows, strict=True)
    ]


# ---- Markdown -----------------------------------------------------------------------------------


MARKDOWN = str.maketrans({"|": r"\|", "<": "&lt;", "&": "&amp;"})


def format_markdown(header: Sequence[str], rows: Iterable[Cells]) -> list[str]:
    r"""The lines of a table in Markdown; pipes in cells are escaped, and what would be HTML.

    >>> print(*format_markdown(["token", "value"], [("a|<b>", 0.5)]), sep="\n")
    | token | value |
    | --- | --- |
    | a\|&lt;b> | 0.5000 |
    """
    lines = [list(header), *(format_row(header, row) for row in rows)]
    cells = [[cell.translate(MARKDOWN) for cell in line] for line in lines]
    cells.insert(1, ["---"] * len(header))
    return [f"| {' | '.join(line)} |" for line in cells]


# ---- LaTeX --------------------------------------------------------------------------------------

LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        **{character: f"\\{character}" for character in "{}$&#_%"},
        # LaTeX takes these at the start of a row for options of the line break before it
        **{character: f"{{{character}}}" for character in "[]*"},
        # what `show_token` and the tables themselves write
        "␣": r"\textvisiblespace{}",
        "∅": r"$\emptyset$",
        "±": r"$\pm$",
        "…": r"\dots{}",
    }
)
LIGATURES = re.compile(r"([-`',])(?=\1)|[?!](?=`)")  # print as another character


def escape_latex(text: str) -> str:
    r"""Escape a text so that LaTeX prints it verbatim and executes none of it.

    >>> escape_latex(r"50% of \input{x}")
    '50\\% of \\textbackslash{}input\\{x\\}'
    """
    return LIGATURES.sub(r"\g<0>{}", text.translate(LATEX))


def format_latex(header: Sequence[str], rows: Iterable[Cells]) -> list[str]:
    r"""The lines of a tabular with the rules of booktabs; numbers are right-aligned.

    >>> print(*format_latex(["token", "value"], [("R&D", 0.5)]), sep="\n")
    \begin{tabular}{lr}
    \toprule
    token & value \\
    \midrule
    R\&D & 0.5000 \\
    \bottomrule
    \end{tabular}
    """
    body = list(rows)
    numeric = find_numbers(header, body)

    def format_line(row: Cells) -> str:
        cells = map(escape_latex, format_row(header, row))
        signed = (
            cell.replace("-", "$-$", 1) if number and cell.startswith("-") else cell
            for cell, number in zip(cells, numeric, strict=True)
        )
        return f"{' & '.join(signed)} \\\\"

    names = " & ".join(map(escape_latex, header))
    return [
        f"\\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numeric)}}}",
        "\\toprule",
        f"{names} \\\\",
        "\\midrule",
        *map(format_line, body),
        "\\bottomrule",
        "\\end{tabular}",
    ]


# ---- HTML, for notebooks ------------------------------------------------------------------------

# no colours of text or background, so that both light and dark notebooks can show it; bars are half
# transparent: blue, and orange for negative numbers
BAR_FOR, BAR_AGAINST = "rgba(66,146,198,.45)", "rgba(241,105,19,.45)"
TABLE = "border-collapse:collapse;color:inherit"
FAINT_STYLE = "opacity:.7;font-size:90%;margin:.3em 0"


def format_html(panels: Iterable[Panel], source: Source | None = None) -> str:
    """Panels as HTML for a notebook: no scripts, no external resources, the first rows only."""
    parts = []
    for panel in panels:
        rows, left = take_rows(panel.rows, VIEW_ROWS)
        parts += [
            format_paragraph(panel.caption, "margin:.5em 0"),
            format_html_table(panel.header, rows, panel.bar),
            format_paragraph(count_rows(rows, left)),
            format_paragraph(panel.note),
        ]
    parts.append(format_paragraph(str(source or "")))
    return f"<div>{''.join(parts)}</div>"


def format_paragraph(text: str, style: str = FAINT_STYLE) -> str:
    """A line beside a table; empty for an empty text."""
    return f'<p style="{style}">{html.escape(printable(text))}</p>' if text else ""


def format_html_table(header: Sequence[str], rows: Sequence[Cells], bar: str | None) -> str:
    """One table; column `bar` has bars behind its numbers, relative to the largest one."""
    numeric = find_numbers(header, rows)
    styles = [f"padding:.1em .5em;text-align:{'right' if n else 'left'}" for n in numeric]
    place = -1 if bar is None else list(header).index(bar)
    largest = 0.0 if bar is None else max((abs(measure_bar(row[place])) for row in rows), default=0)

    def format_one(cell: object, column: int) -> str:
        style = styles[column]
        if column == place:
            style += f";min-width:8em{format_bar(measure_bar(cell), largest)}"
        text = shorten(format_cell(cell, header[column]), VIEW_CHARACTERS)
        # bdi: right-to-left text turns nothing around it
        return f'<td style="{style}"><bdi>{html.escape(text)}</bdi></td>'

    names = "".join(
        f'<th style="{style}">{html.escape(printable(name))}</th>'
        for name, style in zip(header, styles, strict=True)
    )
    lines = (
        f"<tr>{''.join(format_one(cell, column) for column, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return format_html_rows(names, lines)


def format_html_rows(names: str, lines: Iterable[str]) -> str:
    """A table in HTML from the cells of its header and its rows."""
    return (
        f'<table style="{TABLE}"><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def format_bar(value: float, largest: float) -> str:
    """The style of a bar; empty if all bars are."""
    if largest == 0:
        return ""
    share = f"{100 * abs(value) / largest:.1f}%"
    colour = BAR_AGAINST if value < 0 else BAR_FOR
    return f";background:linear-gradient(90deg,{colour} {share},transparent {share})"


def measure_bar(cell: object) -> float:
    """The length of a cell's bar; 0 if the cell has no finite number."""
    value = float(cell) if isinstance(cell, Real) else 0.0
    return value if math.isfinite(value) else 0.0
