"""One self-contained interactive HTML page from an `Explanation` or a `Generation`.

Data, scripts and style are inlined into one file. All text reaches the page as JSON, and the
document through `textContent` only.
"""

import html
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from attnflow.analysis.defaults import Plan
from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation
from attnflow.core.files import dump_json
from attnflow.show.page_data import describe_explanation, describe_generation
from attnflow.show.page_packing import Data

FRAME_BYTES = 20_000_000  # a larger page is not shown inside a notebook
HEIGHT = 900  # pixels of the frame in a notebook, until the page has said how high it is
# the scripts of the page, in this order
MODULES = (
    "data",
    "numbers",
    "words",
    "state",
    "drawing",
    "text",
    "matrix",
    "paths",
    "views",
    "main",
)
# the frame's page cannot reach the notebook; it says how high it is, and the notebook listens
LISTENER = """<script>(() => {
  const frame = document.currentScript.previousElementSibling;
  addEventListener("message", ({ source, data }) => {
    const height = Number(data?.attnflow);
    if (source !== frame.contentWindow || !(height > 0)) return;
    frame.style.height = `${Math.min(height, 20000)}px`;
  });
})()</script>"""


def explanation_page(explanation: Explanation) -> str:
    """The page of one explanation: the answer, the text in colours, and views to look closer.

    >>> from attnflow import explain
    >>> explanation_page(explain("the key to the cabinets"))[:15]
    '<!doctype html>'
    """
    return fill_template(describe_explanation(explanation))


def generation_page(generation: Generation, plan: Plan | None = None) -> str:
    """The page of one generation: a story, of which every token says what it read.

    plan: by kind of edges, the methods to show; what the generation shows by itself if None.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from attnflow import generate
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> generation_page(generate(model, [464, 1994], max_new_tokens=3, eos_token_id=None))[:15]
    '<!doctype html>'
    """
    return fill_template(describe_generation(generation, plan))


def framed(page: str) -> str:
    """The page inside an iframe for a notebook, so that styles do not mix.

    Its scripts cannot reach the notebook; the frame grows to the height that the page tells.

    >>> framed("<p>hello</p>")[:31]
    '<iframe title="attnflow" srcdoc'
    """
    if len(page) > FRAME_BYTES:
        size = f"{len(page) / 1e6:.0f} MB"
        return (
            f"<p>This page has {size}, too much for a notebook: write it with"
            " <code>.save('page.html')</code> and open that file.</p>"
        )
    style = f"width:100%;height:{HEIGHT}px;border:0"
    attributes = f'sandbox="allow-scripts allow-downloads" style="{style}"'
    frame = f'<iframe title="attnflow" srcdoc="{html.escape(page)}" {attributes}></iframe>'
    return frame + LISTENER


UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def encode_json(data: Data) -> str:
    """JSON for use inside a script element: it cannot end the element or start a comment."""
    return dump_json(data, separators=(",", ":")).translate(UNSAFE)


@cache
def read_asset(name: str) -> str:
    """The text of an asset of the page."""
    return (files("attnflow.show") / "page_assets" / name).read_text(encoding="utf-8")


def join_modules(names: Sequence[str]) -> str:
    """The scripts of a page as one, whose names nothing outside can see."""
    modules = "\n".join(read_asset(f"{name}.js") for name in names)
    return f'(async () => {{\n"use strict";\n{modules}\n}})();'


def fill_template(
    data: Data,
    template: str = "page.html",
    styles: Sequence[str] = ("page.css",),
    modules: Sequence[str] = MODULES,
) -> str:
    """Fill styles, scripts and data into a template.

    Data comes last, so that nothing in it is taken for a placeholder.
    """
    page = (
        read_asset(template)
        .replace("{{css}}", "\n".join(map(read_asset, styles)))
        .replace("{{js}}", join_modules(modules))
    )
    before, after = page.split("{{data}}")
    return f"{before}{encode_json(data)}{after}"
