"""The notebook is run from its first cell to its last, as a reader runs it."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).parent.parent / "examples" / "tour.ipynb"


def test_the_tour_runs_and_shows_its_page_pictures_and_table() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    shown = [
        set(output.data)
        for output in outputs
        if output.output_type in ("display_data", "execute_result")
    ]
    assert any("text/html" in kinds for kinds in shown)
    assert sum("image/png" in kinds for kinds in shown) == 5
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "| rollout |" in printed
    assert "| lateness |" in printed
    assert "read mostly" in printed
