"""Draw what README shows: the demo in a terminal, as an SVG.

python docs/make_figures.py
"""

from io import StringIO
from pathlib import Path

from rich.console import Console

from attnflow.cli import show_demo


def main() -> None:
    """Write docs/demo.svg."""
    console = Console(record=True, width=104, file=StringIO(), force_terminal=True)
    show_demo(console)
    console.save_svg(str(Path(__file__).with_name("demo.svg")), title="make demo")


if __name__ == "__main__":
    main()
