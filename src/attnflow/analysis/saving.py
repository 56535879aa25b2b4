"""Reports on disk: Markdown, CSV, LaTeX or JSON, by the ending of the name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnflow.core.files import dump_json, write_by_ending
from attnflow.core.tables import Table


class ReportTable(Table):
    """A table that is saved as .md, .csv, .tex or .json."""

    def to_json(self) -> str:
        """The rows as JSON, one object each."""
        return dump_json([dict(zip(self._columns, row, strict=True)) for row in self.rows()])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .md, .csv, .tex or .json.

        Parameters
        ----------
        path
            The file; its ending says which.
        """
        forms = {
            ".md": self.to_markdown,
            ".csv": self.to_csv,
            ".tex": self.to_latex,
            ".json": self.to_json,
        }

        def writer(form: Callable[[], str]) -> Callable[[Any], object]:
            return lambda file: file.write(form().encode(errors="backslashreplace"))

        return write_by_ending(path, {ending: writer(form) for ending, form in forms.items()})
