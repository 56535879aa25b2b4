"""One self-contained interactive HTML page from an `Explanation` or a `Generation`.

Data, scripts and style are inlined into one file. All text reaches the page as JSON, and the
document through `textContent` only.
"""

import html
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files

from attnflow.analysis.page.schema import Colours, Page, Strips, to_json
from attnflow.core.io.files import dump_json
from attnflow.show.colours import (
    AGAINST,
    DARK_AGAINST,
    DARK_RAMP,
    METHOD_COLOURS,
    OTHER_COLOURS,
    RAMP,
)

FRAME_BYTES = 20_000_000  # a larger page is not shown inside a notebook
HEIGHT = 900  # pixels of the frame in a notebook, until the page has sent its height
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
RAMPS = Colours(light=RAMP, dark=DARK_RAMP, light_against=AGAINST, dark_against=DARK_AGAINST)
COLOURS = replace(RAMPS, lines=(*METHOD_COLOURS.values(), *OTHER_COLOURS))
# the page in the frame cannot reach the notebook: it sends its height, and the notebook listens
LISTENER = """<script>(() => {
  const frame = document.currentScript.previousElementSibling;
  addEventListener("message", ({ source, data }) => {
    const height = Number(data?.attnflow);
    if (source !== frame.contentWindow || !(height > 0)) return;
    frame.style.height = `${Math.min(height, 20000)}px`;
  });
})()</script>"""


def framed(page: str) -> str:
    """The page inside an iframe for a notebook, so that styles do not mix.

    Its scripts cannot reach the notebook; the frame grows to the height that the page reports.

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


def encode_json(data: object) -> str:
    """JSON for use inside a script element: it cannot end the element or start a comment."""
    return dump_json(data, separators=(",", ":")).translate(UNSAFE)


@cache
def read_asset(name: str) -> str:
    """The text of an asset of the page."""
    return (files("attnflow.show.page") / "assets" / name).read_text(encoding="utf-8")


def join_modules(names: Sequence[str]) -> str:
    """The scripts of a page as one script, with names private to it."""
    modules = "\n".join(read_asset(f"{name}.js") for name in names)
    return f'(async () => {{\n"use strict";\n{modules}\n}})();'


def fill_page(page: Page) -> str:
    """The file of a page."""
    page = replace(page, colours=COLOURS)
    return fill_template(to_json(page), "page.html", ("page.css",), MODULES)


def fill_strips(strips: Strips) -> str:
    """The file of a page of strips."""
    strips = replace(strips, colours=RAMPS)
    return fill_template(to_json(strips), "strips.html", ("page.css", "strips.css"), ("strips",))


def fill_template(
    data: object, template: str, styles: Sequence[str], modules: Sequence[str]
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
