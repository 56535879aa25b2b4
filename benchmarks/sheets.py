"""Shared by the benchmarks: figures with their targets, tables for the terminal and for Markdown, and the files in results/."""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """A single number, with its limit if there is one."""

    what: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> str:
        """Whether the target is met."""
        if self.target is None:
            return ""
        return (
            "yes"
            if (self.value >= self.target if self.at_least else self.value <= self.target)
            else "NO"
        )


def say(text: str) -> None:
    """Print progress on standard error."""
    Console(stderr=True).print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}", highlight=False)


def seconds_of(task: Callable[[], object]) -> float:
    """The seconds that the task takes."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Sheet:
    """A table for the terminal and for Markdown; **cells** are highlighted."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        """The table for the terminal."""
        table = Table(*self.header, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(
                *(f"[bold]{cell.strip('*')}[/]" if cell.startswith("**") else cell for cell in row)
            )
        return table

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return (
            f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
        )


def figure_sheet(figures: list[Figure]) -> Sheet:
    """A sheet of the single numbers."""
    rows = []
    for figure in figures:
        target = (
            ""
            if figure.target is None
            else f"{'at least' if figure.at_least else 'at most'} {figure.target:,g}"
        )
        shown = (
            f"{figure.value:.1e}"
            if figure.value < 1e-3
            else f"{figure.value:,.0f}"
            if figure.value > 1000
            else f"{figure.value:.4g}"
        )
        rows.append([figure.what, f"{shown} {figure.unit}".strip(), target, figure.met])
    return Sheet("other figures", ["figure", "measured", "target", "met"], rows)


def show(sheets: Iterable[Sheet]) -> None:
    """Print the sheets, wide if into a pipe."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for sheet in sheets:
        console.print(sheet.rich())


def environment_of(packages: Iterable[str], began: float) -> dict[str, Any]:
    """Where a measurement ran, with which packages, and its minutes since `began` (monotonic clock)."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "packages": {package: version(package) for package in packages},
    }


def publish(
    name: str,
    title: str,
    notes: Sequence[str],
    sheets: Iterable[Sheet],
    figures: Iterable[Figure],
    environment: dict[str, Any],
    **content: Any,
) -> None:
    """Write results/NAME.md and results/NAME.json."""
    versions = ", ".join(
        f"{package} {number}" for package, number in environment["packages"].items()
    )
    head = (
        f"Written by `python benchmarks/{name}.py` in {environment['minutes']} minutes. Python {environment['python']},"
        f" {environment['system']}, {environment['cores']} cores. Versions: {versions}."
    )
    page = (
        "\n\n".join([f"# {title}", head, *notes, *(sheet.markdown().rstrip() for sheet in sheets)])
        + "\n"
    )
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    listed = {
        "environment": environment,
        **content,
        "figures": [asdict(figure) for figure in figures],
    }
    (folder / f"{name}.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    say(f"written to benchmarks/results/ after {environment['minutes']} minutes")


def fill_page(page: Path, tables: Mapping[str, Any]) -> None:
    """Put tables in the places of a page that name them: between <!-- NAME --> and <!-- end -->."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        head, tail = f"<!-- {name} -->\n", "\n<!-- end -->"
        before, found, after = text.partition(head)
        if found:
            text = before + head + "\n" + tell_table(table) + tail + after.partition(tail)[2]
    page.write_text(text, encoding="utf-8")


def tell_table(table: Mapping[str, Any]) -> str:
    """A table as Markdown, its title in italics above it."""
    _, _, body = Sheet(**table).markdown().split("\n", 2)
    return f"*{table['title']}*\n\n{body}"


def copy_tables(page: Path) -> None:
    """Copy tables of results/NAME.md into a page, between <!-- NAME: TITLE --> and <!-- end -->."""
    text = page.read_text(encoding="utf-8")
    for name, title in re.findall(r"<!-- (\w+): (.+?) -->\n", text):
        measured = HERE / "results" / f"{name}.md"
        if not measured.exists():  # what another benchmark writes later
            continue
        results = measured.read_text(encoding="utf-8")
        _, found, body = results.partition(f"### {title}\n\n")
        assert found, f"results/{name}.md has no table {title!r}"
        head, tail = f"<!-- {name}: {title} -->\n", "<!-- end -->"
        before, _, after = text.partition(head)
        table = body.partition("\n\n")[0].rstrip()
        text = f"{before}{head}\n*{title}*\n\n{table}\n\n{tail}{after.partition(tail)[2]}"
    page.write_text(text, encoding="utf-8")
