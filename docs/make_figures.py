"""Draw what README shows: the demo in a terminal, as an SVG.

python docs/make_figures.py
"""

from io import StringIO
from pathlib import Path

from rich.console import Console

import attnflow as af
from attnflow.cli import DEMO
from attnflow.terminal import print_explanation


def main() -> None:
    """Write docs/demo.svg."""
    console = Console(record=True, width=104, file=StringIO(), force_terminal=True)
    for text in DEMO:
        print_explanation(console, af.explain(text))
        console.print()
    console.save_svg(str(Path(__file__).with_name("demo.svg")), title="make demo")


if __name__ == "__main__":
    main()
