"""What tests read from a page, and explanations to make pages of."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import attnflow as af
from attnflow.analysis.job import MethodChoice
from attnflow.analysis.page.page import describe_explanation, describe_generation
from attnflow.show.page.page import fill_page
from tests.oracles import Floats

if TYPE_CHECKING:
    from playwright.sync_api import Page

CLOSE = 1e-3
TEXT = "the key to the cabinets of the old house"
IMAGE = "</script><img src=x onerror=alert(1)>"
# each token, and how it is shown
HOSTILE = {
    IMAGE: IMAGE,
    "\"'`&lt;<b>": "\"'`&lt;<b>",
    "👩‍👧": "👩‍👧",
    "שלום": "שלום",
    "two\nlines": r"two\nlines",
    "\u200b": r"\u200b",
    "x" * 10_000: "x" * 10_000,
    "\u202eevil": r"\u202eevil",
    "\ud800": r"\ud800",
    "Ġkey": "key",
    "\0": r"\x00",
    "": "∅",
}
TOKENS = "#text .token"

Open = Callable[..., "Page"]


def explained(attention: af.Attention, position: int = 0, **options: Any) -> af.Explanation:
    """An explanation of attention that came from elsewhere."""
    found = af.explain(attention, position=position, **options)
    tokens = attention.tokens or tuple(f"t{place}" for place in range(attention.size))
    special = tuple(token.startswith("[") for token in tokens)
    return replace(found, text=" ".join(tokens), model="a model", tokens=tokens, special=special)


def random_attention(
    depth: int, size: int, *, sharpness: float = 2.0, causal: bool = False, **options: Any
) -> af.Attention:
    """Attention with random logits; a higher sharpness makes it less even."""
    logits = sharpness * np.random.default_rng(0).normal(size=(depth, size, size))
    weights = np.tril(np.exp(logits)) if causal else np.exp(logits)
    return af.Attention(weights / weights.sum(axis=-1, keepdims=True), causal=causal, **options)


def state(tab: "Page", name: str) -> str:
    """What the page says of itself."""
    return str(tab.evaluate("name => document.body.dataset[name]", name))


def go_to(tab: "Page", **state: Any) -> None:
    """Put the page into a state, by its address."""
    address = "&".join(f"{name}={value}" for name, value in state.items())
    tab.evaluate("address => { location.hash = address; }", address)
    settled(tab)
    tab.wait_for_timeout(60)


def settled(tab: "Page") -> None:
    """Wait until what follows the pointer is painted."""
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def table(tab: "Page") -> dict[str, Any]:
    """The table of the page by its columns, all rows by position; a dash is not a number."""
    tab.evaluate("document.getElementById('tables').open = true")
    tab.wait_for_selector("#table tbody tr", state="attached")
    if tab.locator("#all-rows").is_visible():
        tab.locator("#all-rows").click()
    read = "[...document.querySelectorAll('#table tr')].map(row => [...row.children].map(cell => cell.textContent))"
    head, *rows = tab.evaluate(read)
    columns = dict(zip(head, zip(*rows, strict=True), strict=True))
    return {
        name: list(cells)
        if name == "token"
        else np.array([np.nan if cell == "–" else float(cell) for cell in cells])
        for name, cells in columns.items()
    }


def column(tab: "Page", title: str, size: int) -> Floats:
    """A column of the table by position, NaN for positions that are left out."""
    shown = table(tab)
    values = np.full(size, np.nan)
    values[shown["position"].astype(int)] = shown[title]
    return values


def check_column(tab: "Page", title: str, row: Floats) -> None:
    """A column of the table is a row of an array."""
    assert np.abs(column(tab, title, len(row)) - row).max() < CLOSE


def colours(tab: "Page", where: str = TOKENS) -> list[tuple[int, ...] | None]:
    """The red, green and blue of each token; None where it has no colour."""
    read = "where => [...document.querySelectorAll(where)].map(each => each.style.background)"
    return [tuple(map(int, re.findall(r"\d+", each))) or None for each in tab.evaluate(read, where)]


def text_of(tab: "Page", where: str) -> str:
    """The text of an element, without the signs that isolate names."""
    return re.sub("[\u2068\u2069]", "", tab.locator(where).inner_text())


def show(tab: "Page", section: str) -> None:
    """Scroll a view into sight, so that it is painted."""
    tab.evaluate("id => document.getElementById(id).scrollIntoView()", section)
    tab.wait_for_timeout(120)
    settled(tab)


def explanation_page(explanation: af.Explanation) -> str:
    """The page of an explanation."""
    return fill_page(describe_explanation(explanation))


def generation_page(generation: af.Generation, plan: Sequence[MethodChoice] | None = None) -> str:
    """The page of a generation; plan: the methods to show."""
    return fill_page(describe_generation(generation, plan))
