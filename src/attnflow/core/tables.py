"""Results that are tables: the same columns and numbers for pandas, CSV, Markdown, LaTeX and HTML.

The columns have one meaning in every result: `position` and `query` are the explained position and
its token, `key` and `token` the place and the name of an input token.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np

from attnflow.core.files import Writer, dump_json, write_by_ending, write_csv
from attnflow.core.formatting import (
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

TABLE_ENDINGS = (".csv", ".json", ".md", ".tex")  # of files that every table can be saved as


class Table(ABC):
    """A result that is a table: a subclass names its `columns` and yields its `rows`.

    A subclass may override `_panels`, what Markdown and LaTeX print, where this is not all rows
    one below another; `_view`, what a notebook shows, where this is less; and `_content`, what
    JSON holds, where this is more.
    """

    columns: ClassVar[tuple[str, ...]]
    _source_field: ClassVar = "source"  # which says where the result came from

    @abstractmethod
    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows, one value per column."""

    def to_pandas(self) -> "pandas.DataFrame":
        """All rows as a DataFrame; `.attrs["source"]` says where they came from."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas needs pandas: pip install 'attnflow[pandas]'"
            ) from error
        columns = self._by_column()
        for name, values in columns.items():
            if isinstance(values, tuple) and None in values:
                # or a column of whole numbers with gaps would become one of floats
                whole = all(isinstance(value, int | None) for value in values)
                columns[name] = pandas.array(values, dtype="Int64") if whole else values
        frame = pandas.DataFrame(columns)
        if self._provenance is not None:
            frame.attrs["source"] = self._provenance.to_dict()
        return frame

    def to_csv(self) -> str:
        """All rows as CSV, as `save` writes them.

        The last column, `source`, says where they came from, if that is known.
        """
        file = io.BytesIO()
        self._write_csv(file)
        return file.getvalue().decode()

    def to_json(self) -> str:
        """The result as JSON, as `save` writes it, with where it came from, if that is known."""
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
        lines = []
        for panel in self._panels():
            rows, left = take_rows(panel.rows, limit)
            lines += [printable(panel.caption), ""] if panel.caption else []
            lines += [*format_markdown(panel.header, rows), ""]
            lines += [f"{note}\n" for note in (count_rows(rows, left), panel.note) if note]
        if self._provenance is not None:
            lines += [f"source: {printable(self._provenance)}", ""]
        return "\n".join(lines)

    def to_latex(self, *, limit: int | None = None) -> str:
        """The rows as a LaTeX `tabular`, for the package booktabs.

        Every character of a token is escaped. Letters beyond the Latin ones need XeLaTeX or
        LuaLaTeX, and a font that has them.

        Parameters
        ----------
        limit
            The maximum number of rows; all if None.
        """
        lines = []
        for panel in self._panels():
            rows, left = take_rows(panel.rows, limit)
            lines += [f"% {printable(panel.caption)}"] if panel.caption else []
            lines += format_latex(panel.header, rows)
            lines += [f"% {note}" for note in (count_rows(rows, left), panel.note) if note]
        if self._provenance is not None:
            lines.append(f"% source: {printable(self._provenance)}")
        return "\n".join([*lines, ""])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result, and where it came from; the ending of the name says how.

        Parameters
        ----------
        path
            A file that ends in .csv, .json, .md or .tex; results that are arrays also take .npz.
        """
        return write_by_ending(path, self._writers())

    def _writers(self) -> dict[str, Writer]:
        """How to write a file, by the ending of its name."""

        def make_writer(form: Callable[[], str]) -> Writer:
            return lambda file: file.write(form().encode(errors="backslashreplace"))

        texts = map(make_writer, (self.to_json, self.to_markdown, self.to_latex))
        return dict(zip(TABLE_ENDINGS, (self._write_csv, *texts), strict=True))

    def _content(self) -> dict[str, Any]:
        """What JSON holds, by name: rows by their columns."""
        return {"table": [dict(zip(self._columns, row, strict=True)) for row in self.rows()]}

    def _repr_html_(self) -> str:
        return format_html(self._view(), self._provenance)

    def _panels(self) -> Iterator[Panel]:
        yield Panel(self._columns, self.rows())

    def _view(self) -> Iterator[Panel]:
        return self._panels()

    def _by_column(self) -> dict[str, Sequence[Any]]:
        """The values by column; a result that has them as arrays overrides this."""
        rows = (
            [clean_text(cell) if isinstance(cell, str) else cell for cell in row]
            for row in self.rows()
        )
        values = list(zip(*rows, strict=True)) or [()] * len(self._columns)
        return dict(zip(self._columns, values, strict=True))

    @property
    def _columns(self) -> tuple[str, ...]:
        """The names of the columns; for a result that has more of them at times, to override."""
        return self.columns

    @property
    def _provenance(self) -> Source | None:
        """Where the result came from."""
        source: Source | None = getattr(self, self._source_field, None)
        return source

    def _write_csv(self, file: IO[bytes]) -> None:
        if self._provenance is None:
            write_csv(file, list(self._columns), self.rows())
            return
        source = str(self._provenance)
        write_csv(file, [*self._columns, "source"], ((*row, source) for row in self.rows()))


class ArrayTable(Table):
    """A table whose values are arrays, which .npz files hold too."""

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """What JSON holds, by name: arrays as they are, `groups` as lists of positions."""

    def _arrays(self) -> dict[str, Any]:
        """What an .npz file holds, by name; overridden where JSON has what no array can be.

        Groups become one array of all their positions and one of their lengths.
        """
        arrays = self._content()
        groups = arrays.pop("groups", None)
        if groups is not None:
            arrays["group_positions"] = np.concatenate(groups)
            arrays["group_lengths"] = np.array([len(positions) for positions in groups])
        return arrays

    def _writers(self) -> dict[str, Writer]:
        return {**super()._writers(), ".npz": self._write_npz}

    def _write_npz(self, file: IO[bytes]) -> None:
        arrays = {name: np.asarray(value) for name, value in self._arrays().items()}
        if self._provenance is not None:
            arrays[self._source_field] = np.array(self._provenance.to_json())
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
