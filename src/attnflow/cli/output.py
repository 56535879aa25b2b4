"""The files that commands write: checked before anything is computed, and named when written."""

import webbrowser
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

import typer
from typer.models import OptionInfo

from attnflow.core.io.files import PICTURES, check_ending, check_writable
from attnflow.core.io.tables import TABLE_ENDINGS
from attnflow.errors import OptionError
from attnflow.show.terminal.tables import say

NUMBER_ENDINGS = (*TABLE_ENDINGS, ".npz")


def file_option(help: str) -> OptionInfo:
    """An option for a file to write, which `check_out` checks."""
    option: OptionInfo = typer.Option(readable=False, metavar="FILE", help=help)
    return option


NumberFile = Annotated[
    Path | None, file_option("Write .csv, .json, .md, .tex or .npz instead of a table.")
]
ReportFile = Annotated[Path | None, file_option("Write .csv, .json, .md or .tex as well.")]
PageFile = Annotated[
    Path | None,
    file_option(
        "Write a page (.html), a picture (.png, .svg, .pdf) or numbers (.csv, .json, .md, .tex,"
        " .npz)."
    ),
]
ComparisonFile = Annotated[
    Path | None, file_option("Write a page (.html) or numbers (.csv, .json, .md, .tex).")
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]


class Savable(Protocol):
    """A result that is written by the ending of a file's name."""

    def save(self, path: Path, /) -> Path: ...


@dataclass(frozen=True)
class PageOutput:
    """The optional output file of a command: a page, a picture or numbers."""

    endings: ClassVar[tuple[str, ...]] = (".html", *PICTURES, *NUMBER_ENDINGS)

    out: PageFile = None
    open_it: Open = False

    @property
    def ending(self) -> str:
        """The ending of the file; empty if none is written."""
        return "" if self.out is None else self.out.suffix.lower()

    @property
    def is_page(self) -> bool:
        """Whether the file is a page."""
        return self.ending == ".html"

    @property
    def is_picture(self) -> bool:
        """Whether the file is a picture."""
        return self.ending in PICTURES

    def check(self) -> None:
        """Refuse a file that cannot be written, and to open anything but a page."""
        check_out(self.out, self.endings)
        if self.open_it and not self.is_page:
            raise OptionError(
                "--open shows a page in the browser, so it needs --out with a name that ends in"
                " .html"
            )

    def write(self, result: Savable) -> None:
        """Write a result, say where, and open the page with --open."""
        if self.out is None:
            return
        path = result.save(self.out)
        say(f"written: {path}")
        if self.open_it and not webbrowser.open(path.resolve().as_uri()):
            say(f"note: no browser was found; open {path} by hand", err=True)


@dataclass(frozen=True)
class ComparisonOutput(PageOutput):
    """The same for a comparison, which has no picture."""

    endings: ClassVar[tuple[str, ...]] = (".html", *TABLE_ENDINGS)

    out: ComparisonFile = None


def check_out(out: Path | None, endings: Iterable[str]) -> None:
    """Refuse an output that cannot be written."""
    if out is not None:
        check_ending(out, endings)
        check_writable(out)
