"""Results as tables: the same columns for pandas, CSV, JSON, Markdown, LaTeX and HTML.

Columns mean the same in every result: `position` and `query` are the explained position and its
token, `key` and `token` the place and the name of an input token.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, cast

import numpy as np

from attnflow.core.arrays import Array
from attnflow.core.io.files import Writer, dump_json, write_by_ending, write_csv, write_npz
from attnflow.core.io.formatting import (
    Cells,
    Panel,
    count_rows,
    format_html,
    format_latex,
    format_markdown,
    take_rows,
)
from attnflow.core.provenance import Source
from attnflow.core.text import clean_text
from attnflow.errors import MissingExtraError, printable

if TYPE_CHECKING:
    import pandas

Column = Sequence[object] | Array
TableFormat = Callable[[Sequence[str], Iterable[Cells]], list[str]]
TABLE_ENDINGS = (".csv", ".json", ".md", ".tex")  # of files that every table can be saved as


class Table(ABC):
    """A result that is a table: a subclass names its `columns` and yields its `rows`.

    A subclass may override `_panels`, the tables that Markdown and LaTeX print, if they are not one
    table of all rows; `_view`, those that a notebook shows, if they are fewer; and `_content`, the
    content of JSON, if it is more.
    """

    columns: ClassVar[tuple[str, ...]]
    _source_field: ClassVar = "source"  # the field with the origin of the result

    @abstractmethod
    def rows(self) -> Iterator[tuple[object, ...]]:
        """The rows, one value per column."""

    def to_pandas(self) -> "pandas.DataFrame":
        """All rows as a DataFrame; `.attrs["source"]` is their origin, if it is known."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas needs pandas: pip install 'attnflow[pandas]'"
            ) from error
        columns = self._by_column()
        for name, values in columns.items():
            if isinstance(values, tuple) and None in values:
                # otherwise whole numbers with gaps would become floats
                whole = all(isinstance(value, int | None) for value in values)
                columns[name] = pandas.array(values, dtype="Int64") if whole else values
        frame = pandas.DataFrame(columns)
        if self._provenance is not None:
            frame.attrs["source"] = self._provenance.to_dict()
        return frame

    def to_csv(self) -> str:
        """All rows as CSV, as `save` writes them.

        The last column, `source`, is their origin, if it is known.
        """
        file = io.BytesIO()
        self._write_csv(file)
        return file.getvalue().decode()

    def to_json(self) -> str:
        """The result as JSON, as `save` writes it, with its origin, if it is known."""
        content = self._content()
        if self._provenance is not None:
            content[self._source_field] = self._provenance.to_dict()
        return dump_json(content)

    def to_markdown(self, *, limit: int | None = None) -> str:
        """The rows as a table in Markdown.

        Parameters
        ----------
        limit
            The maximum number of rows; all if None.
        """
        return self._print(format_markdown, limit, between="\n")

    def to_latex(self, *, limit: int | None = None) -> str:
        """The rows as a LaTeX `tabular`, for the package booktabs.

        Every character of a token is escaped. Letters beyond the Latin ones need XeLaTeX or
        LuaLaTeX, and a font that has them.

        Parameters
        ----------
        limit
            The maximum number of rows; all if None.
        """
        return self._print(format_latex, limit, mark="% ")

    def _print(
        self, format_table: TableFormat, limit: int | None, *, mark: str = "", between: str = ""
    ) -> str:
        """All panels as text. mark: stands before each line outside of tables."""
        parts = []
        for panel in self._panels():
            rows, left = take_rows(panel.rows, limit)
            table = "\n".join(format_table(panel.header, rows))
            below = [count_rows(rows, left), panel.note]
            parts += [*mark_notes(mark, panel.caption), table, *mark_notes(mark, *below)]
        if self._provenance is not None:
            parts += mark_notes(mark, f"source: {self._provenance}")
        return between.join(f"{part}\n" for part in parts)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result and its origin, in the format of the file's ending.

        Parameters
        ----------
        path
            A file that ends in .csv, .json, .md or .tex; results that are arrays also take .npz.
        """
        return write_by_ending(path, self._writers())

    def _writers(self) -> dict[str, Writer]:
        """The writers by the ending of a file's name."""

        def make_writer(form: Callable[[], str]) -> Writer:
            return lambda file: file.write(form().encode(errors="backslashreplace"))

        texts = map(make_writer, (self.to_json, self.to_markdown, self.to_latex))
        return dict(zip(TABLE_ENDINGS, (self._write_csv, *texts), strict=True))

    def _content(self) -> dict[str, object]:
        """The content of JSON: rows by their columns."""
        return {"table": [dict(zip(self._columns, row, strict=True)) for row in self.rows()]}

    def _repr_html_(self) -> str:
        return format_html(self._view(), self._provenance)

    def _panels(self) -> Iterator[Panel]:
        yield Panel(self._columns, self.rows())

    def _view(self) -> Iterator[Panel]:
        return self._panels()

    def _by_column(self) -> dict[str, Column]:
        """The values by column; results made of arrays override this."""
        rows = (
            [clean_text(cell) if isinstance(cell, str) else cell for cell in row]
            for row in self.rows()
        )
        values = list(zip(*rows, strict=True)) or [()] * len(self._columns)
        return dict(zip(self._columns, values, strict=True))

    @property
    def _columns(self) -> tuple[str, ...]:
        """The names of the columns; results with a variable number of columns override this."""
        return self.columns

    @property
    def _provenance(self) -> Source | None:
        """The origin of the result."""
        source: Source | None = getattr(self, self._source_field, None)
        return source

    def _write_csv(self, file: IO[bytes]) -> None:
        source = () if self._provenance is None else (str(self._provenance),)
        names = ("source",) if source else ()
        write_csv(file, [*self._columns, *names], ((*row, *source) for row in self.rows()))


class ArrayTable(Table):
    """A table whose values are arrays, which .npz files hold too."""

    @abstractmethod
    def _content(self) -> dict[str, object]:
        """The content of JSON: arrays as they are, `groups`, `sources` as lists of positions."""

    def _arrays(self) -> dict[str, object]:
        """The content of an .npz file; overridden if JSON has values that arrays cannot hold.

        Groups and sources become one array of all their positions and one of their lengths.
        """
        arrays = self._content()
        for what in ("group", "source"):
            groups = cast(list[tuple[int, ...]] | None, arrays.pop(f"{what}s", None))
            if groups is not None:
                arrays[f"{what}_positions"] = np.concatenate(groups)
                arrays[f"{what}_lengths"] = np.array([len(positions) for positions in groups])
        return arrays

    def _writers(self) -> dict[str, Writer]:
        return {**super()._writers(), ".npz": self._write_npz}

    def _write_npz(self, file: IO[bytes]) -> None:
        arrays = {name: np.asarray(value) for name, value in self._arrays().items()}
        if self._provenance is not None:
            arrays[self._source_field] = np.array(self._provenance.to_json())
        write_npz(file, arrays)


def mark_notes(mark: str, *notes: str) -> list[str]:
    """Lines beside a table, the empty ones left out."""
    return [f"{mark}{printable(note)}" for note in notes if note]
