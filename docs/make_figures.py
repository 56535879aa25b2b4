"""Draw what README and docs show, by the commands and lines that stand beside the pictures.

make docs-figures
"""

import os
import subprocess
import sys
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

import attnflow as af
from attnflow import figures
from attnflow.cli.commands import DEMO
from attnflow.paper import grammar
from attnflow.show.terminal import print_explanation

FOLDER = Path(__file__).parent / "pictures"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
]


def command(*arguments: str) -> None:
    """Run attnflow as a user does."""
    subprocess.run(
        [sys.executable, "-m", "attnflow", *arguments],
        cwd=FOLDER,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def terminal() -> None:
    """The demo, as the terminal shows it."""
    console = Console(record=True, width=92, file=StringIO(), force_terminal=True)
    for text in DEMO:
        print_explanation(console, af.explain(text))
        console.print()
    console.save_svg(str(FOLDER / "demo.svg"), title="make demo")


def lines() -> None:
    """The pictures of docs/gallery.md that are made by lines of Python."""
    found = af.explain("the authors that the old man likes")
    graph = found.attention.graph()
    figures.attention_graph(found.rollout, position=0).save(FOLDER / "graph.svg")
    figures.flow_paths(af.max_flow(graph, source=(3, 0), target=(0, 2))).save(FOLDER / "paths.svg")
    examples = [(each.text, each.label) for each in islice(grammar.sentences(), 300)]
    figures.layer_curves(af.evaluate(af.load("verb-number"), examples)).save(FOLDER / "curves.svg")


def vision() -> None:
    """A vision model's patches over a picture: a seeded one, on a picture of two discs."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    down, across = np.mgrid[:64, :64]
    picture = np.full((64, 64, 3), 235, np.uint8)
    picture[(down - 20) ** 2 + (across - 20) ** 2 < 120] = (200, 60, 40)
    picture[(down - 42) ** 2 + (across - 44) ** 2 < 200] = (40, 90, 180)
    pixels = torch.tensor(picture / 255.0, dtype=torch.float32).permute(2, 0, 1)
    model = ViTForImageClassification(
        ViTConfig(**sizes, image_size=64, patch_size=8, initializer_range=0.3)
    )
    figures.overlay(af.rollout(af.capture(model, pixels)), picture).save(FOLDER / "overlay.png")


def page() -> None:
    """The interactive page, light and dark, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as place, sync_playwright() as playwright:
        file = af.explain("the authors that the old man likes").save(Path(place) / "page.html")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for scheme in ("light", "dark"):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": 1000, "height": 900}
            )  # type: ignore[arg-type]
            tab = context.new_page()
            tab.goto(file.resolve().as_uri())
            tab.wait_for_timeout(300)
            tab.screenshot(path=FOLDER / f"page-{scheme}.png")
        browser.close()


def main() -> None:
    """Write docs/pictures."""
    FOLDER.mkdir(exist_ok=True)
    terminal()
    for name in ("figure1", "figure2", "figure3"):
        command("reproduce", name, "--out", f"{name}.svg")
    lines()
    vision()
    page()


if __name__ == "__main__":
    main()
