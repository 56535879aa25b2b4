"""The page at 1,000 tokens and 48 layers in Chromium: how long it takes to load, and to answer a hover. Run from the repository root:

    python benchmarks/page.py            written to benchmarks/results/
    python benchmarks/page.py --quick    a smaller graph, printed only

Attention is random: softmax of normal logits that fall off with distance. Chromium is $CHROMIUM or /usr/bin/chromium, without a GPU.
"""

import argparse
import os
import re
import statistics
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

import attnflow as af
from attnflow.analysis.page.page import describe_explanation
from attnflow.show.page.page import fill_page
from sheets import HERE, Figure, environment_of, figure_sheet, publish, say, show

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]
LOAD, HOVER, SMALL, CLOSE = (
    3.0,
    100.0,
    150.0,
    1e-3,
)  # at most: seconds, milliseconds, KB, difference
LOADS, HOVERS = 5, 60

# from the pointer's event to the frame after the one in which the page has painted its answer
HOVERED = """async (place) => {
  const tokens = document.querySelectorAll("#text .token"), token = tokens[Math.floor(place * tokens.length)];
  const began = performance.now();
  token.dispatchEvent(new PointerEvent("pointerover", { pointerType: "mouse", bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return [performance.now() - began, Number(token.dataset.key), document.getElementById("card-focus").textContent];
}"""
VIEWS = ("text-section", "matrix-section", "paths-section")  # in view while the pointer moves


def explanation(depth: int, size: int) -> af.Explanation:
    """An explanation of random attention, position 0."""
    generator = np.random.default_rng(0)
    distance = np.abs(np.arange(size)[:, None] - np.arange(size)[None, :])
    weights = np.exp(2.5 * generator.normal(size=(depth, size, size)) - 0.04 * distance)
    words = (HERE / "english.txt").read_text(encoding="utf-8").split()
    tokens = tuple(words[place % len(words)] for place in range(size))
    attention = af.Attention(
        weights / weights.sum(axis=-1, keepdims=True), tokens=tokens, causal=False
    )
    return af.explain(attention, methods=["raw", "rollout"])


def load(tab: Page, address: str) -> float:
    """Seconds from the request for the page until it is ready."""
    began = time.perf_counter()
    tab.goto(address)
    tab.wait_for_selector("body[data-ready]")
    return time.perf_counter() - began


def measure(depth: int, size: int) -> list[Figure]:
    """Build the page, load it, hover over it."""
    say(f"an explanation of {depth} layers x {size} tokens")
    found = explanation(depth, size)
    began = time.perf_counter()
    html = fill_page(describe_explanation(found))
    building = time.perf_counter() - began
    assets = sum(
        len(each.read_bytes())
        for each in (files("attnflow.show.page") / "assets").iterdir()
        if each.is_file()
    )
    points = np.random.default_rng(1).random(HOVERS // len(VIEWS)).tolist()
    row = found.rollout.at(0)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(html, encoding="utf-8")
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        tab = chromium.new_page(viewport={"width": 1200, "height": 900})
        say("loading and hovering")
        loads = [load(tab, file.as_uri()) for _ in range(LOADS)]
        hovers, worst = [], 0.0
        for view in VIEWS:
            tab.evaluate("id => document.getElementById(id).scrollIntoView()", view)
            tab.wait_for_timeout(1000)  # newly visible parts are painted
            for point in points:
                took, key, told = tab.evaluate(HOVERED, point)
                hovers.append(float(took))
                value = re.search(rf"position {key}: (\S+?),", told)
                assert value is not None, told
                worst = max(worst, abs(float(value[1]) - row[key]))
        chromium.close()
    return [
        Figure("page without its data", assets / 1e3, "KB", SMALL),
        Figure("page with its data", len(html) / 1e6, "MB"),
        Figure("building the page from an explanation", building, "s"),
        Figure(f"loading, median of {LOADS}", statistics.median(loads), "s", LOAD),
        Figure(f"a hover, median of {len(hovers)}", statistics.median(hovers), "ms", HOVER),
        Figure(f"a hover, slowest of {len(hovers)}", max(hovers), "ms", HOVER),
        Figure("largest difference between a number on the page and the array", worst, "", CLOSE),
    ]


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(description="Measure the page in Chromium.")
    parser.add_argument("--quick", action="store_true", help="a smaller graph; nothing is written")
    quick = parser.parse_args().quick
    depth, size = (14, 420) if quick else (48, 1000)
    began = time.monotonic()
    figures = measure(depth, size)
    sheet = figure_sheet(figures)
    show([sheet])
    if quick:
        return
    notes = [
        "Debian's Chromium, headless, without a GPU, 1200 x 900. Loading: from asking for the file until everything is painted. A hover:"
        " from the pointer's event, at random tokens, with the text, the matrix or the paths in sight, until the frame with the answer is painted."
        " Numbers are those of the panel then.",
    ]
    environment = environment_of(["attnflow", "numpy", "playwright"], began)
    publish(
        "page",
        f"The page at {size} tokens and {depth} layers",
        notes,
        [sheet],
        figures,
        environment,
        tokens=size,
        layers=depth,
    )


if __name__ == "__main__":
    main()
