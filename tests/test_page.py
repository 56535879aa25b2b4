"""The page in a real browser, with the network cut: what a reader sees and does, and numbers that equal the arrays to 1e-3.

Chromium is $CHROMIUM or /usr/bin/chromium. Where CHROMIUM is set, these tests do not skip.
"""

import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import attnflow as af
from attnflow.show import page as page_module
from attnflow.show.page import explanation_page, framed, generation_page
from tests.browser import CHROMIUM, Visitor, launch
from tests.families import build, word_tokenizer
from tests.oracles import Floats

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::attnflow.SaturationWarning")]

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

Open = Callable[..., "Page"]


# ---- pages to look at -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> af.Explanation:
    """The bundled model, with every head."""
    return af.explain(TEXT, heads=None, edges="attention")


@pytest.fixture(scope="module")
def story() -> af.Generation:
    """A tiny decoder with a tokenizer, random weights."""
    return af.generate(
        af.Model(build("llama"), word_tokenizer()),
        "the key to the cabinets is",
        max_new_tokens=6,
        eos_token_id=None,
        edges="attention",
    )


def explained(attention: af.Attention, position: int = 0, **options: Any) -> af.Explanation:
    """An explanation of attention that came from elsewhere."""
    found = af.explain(attention, position=position, **options)
    tokens = attention.tokens or tuple(f"t{place}" for place in range(attention.size))
    special = tuple(token.startswith("[") for token in tokens)
    return replace(found, text=" ".join(tokens), model="a model", tokens=tokens, special=special)


def random_attention(
    depth: int, size: int, *, sharpness: float = 2.0, causal: bool = False
) -> af.Attention:
    logits = sharpness * np.random.default_rng(0).normal(size=(depth, size, size))
    weights = np.tril(np.exp(logits)) if causal else np.exp(logits)
    return af.Attention(weights / weights.sum(axis=-1, keepdims=True), causal=causal)


@pytest.fixture(scope="module")
def real() -> af.Attention:
    return af.Attention.load(Path(__file__).parent / "data" / "example.npz")


# ---- the browser ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    if "CHROMIUM" not in os.environ:
        pytest.importorskip("playwright")
        if not Path(CHROMIUM).exists():
            pytest.skip(f"no browser at {CHROMIUM}; set CHROMIUM")
    with launch() as chromium:
        yield chromium


@pytest.fixture
def visit(browser: "Browser", tmp_path: Path) -> Iterator[Open]:
    """Open a page with the network cut; anything on the console, any error, dialog or request fails the test."""
    visitor = Visitor(browser, tmp_path)
    yield visitor.visit
    complaints = visitor.complaints
    visitor.close()
    assert complaints == []


def state(tab: "Page", name: str) -> str:
    """What the page says of itself."""
    return str(tab.evaluate("name => document.body.dataset[name]", name))


def table(tab: "Page", which: str = "methods-table") -> dict[str, list[float]]:
    """A table of the page, by its columns; a dash is not a number."""
    tab.evaluate("document.getElementById('tables').open = true")
    tab.wait_for_selector(f"#{which} tbody tr", state="attached")
    read = "id => [...document.querySelectorAll(`#${id} tr`)].map(row => [...row.children].map(cell => cell.textContent))"
    head, *rows = tab.evaluate(read, which)
    columns = zip(*rows, strict=True)
    return {
        name: [float("nan") if cell == "–" else float(cell) for cell in cells]
        if name != "token"
        else list(cells)
        for name, cells in zip(head, columns, strict=True)
    }


def numbers(tab: "Page") -> list[tuple[str, float]]:
    """The panel beside the graph: (token, value), largest first."""
    read = "[...document.querySelectorAll('#numbers-list li')].map(item => [item.children[0].textContent, item.children[1].textContent])"
    return [(name, float(value)) for name, value in tab.evaluate(read)]


def check_numbers(tab: "Page", row: Floats) -> None:
    """The panel shows the largest numbers of a row; those too small for 16 bits are not there."""
    expected = row[np.argsort(-np.abs(row), kind="stable")][:10]
    shown = np.zeros(len(expected))
    found = [value for _, value in numbers(tab)]
    shown[: len(found)] = found
    assert found
    assert np.abs(shown - expected).max() < CLOSE


def node(tab: "Page", layer: int, position: int, depth: int, size: int) -> tuple[float, float]:
    """Where a node is on the screen: found by the page's own keyboard cursor."""
    cursor = tab.locator("#cursor")
    cursor.focus()
    for key, times in (("Home", 1), ("PageDown", 1), ("ArrowRight", position), ("ArrowUp", layer)):
        for _ in range(times):
            cursor.press(key)
    box = cursor.bounding_box()
    assert box is not None
    cursor.evaluate("cursor => cursor.blur()")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def settled(tab: "Page") -> None:
    """Wait until what follows the pointer is painted."""
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def move_slider(tab: "Page", layer: int) -> None:
    tab.locator("#layer").fill(str(layer))


# ---- what it shows --------------------------------------------------------------------------------------------------------------


def test_tabs_and_slider_change_the_numbers_to_those_of_the_arrays(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    assert tab.locator("h1").inner_text().startswith(small.prediction[0])  # type: ignore[index]
    assert tab.locator("#strips .token").all_inner_texts() == list(small.tokens)
    for layer in (1, 3, small.attention.depth):
        move_slider(tab, layer)
        assert state(tab, "layer") == str(layer)
        shown = table(tab)
        for name, label in (("raw", "Raw"), ("rollout", "Rollout"), ("flow", "Flow")):
            assert (
                np.abs(shown[label] - small.results[name].at(small.position, layer)).max() < CLOSE
            )
            tab.locator(f"#tab-{name}").click()
            assert state(tab, "method") == name
            check_numbers(tab, small.results[name].at(small.position, layer))
    for name, label in (("blank_out", "Blank-out"), ("input_gradient", "Input gradient")):
        tab.locator(f"#tab-{name}").click()
        assert np.abs(table(tab)[label] - small.importance[name].values).max() < CLOSE
        check_numbers(tab, small.importance[name].values)
        assert tab.locator("#layer").is_disabled()


def test_the_heat_maps_table_has_all_layers(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    for name in ("raw", "rollout", "flow"):
        tab.locator(f"#tab-{name}").click()
        shown = table(tab, "map-table")
        for layer in range(1, small.attention.depth + 1):
            assert (
                np.abs(
                    shown[f"layer {layer}"] - small.results[name].at(small.position, layer)
                ).max()
                < CLOSE
            )


def test_side_by_side_shows_every_method(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    tab.locator("#tab-all").click()
    assert tab.locator(".strip").count() == 5
    assert list(table(tab)) == [
        "position",
        "token",
        "Raw",
        "Rollout",
        "Flow",
        "Blank-out",
        "Input gradient",
    ]


def test_positions_are_chosen_by_select_click_and_keyboard(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    tab.locator("#position").select_option("3")
    check_numbers(tab, small.rollout.at(3))
    tab.locator("#strips .token").nth(5).click()
    assert state(tab, "position") == "5"
    check_numbers(tab, small.rollout.at(5))
    tab.locator("#strips .token").nth(5).press("ArrowLeft")
    tab.keyboard.press("Enter")
    assert state(tab, "position") == "4"
    check_numbers(tab, small.rollout.at(4))
    assert tab.locator("#strips [aria-selected=true]").inner_text() == small.tokens[4]


def test_heads_are_shown_one_by_one(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    assert not tab.locator("#head").is_visible()
    tab.locator("#tab-raw").click()
    for head in (0, 7):
        tab.locator("#head").select_option(str(head))
        move_slider(tab, 2)
        assert (
            np.abs(
                table(tab)[f"Raw (head {head})"] - small.attention.weights[1, head, small.position]
            ).max()
            < CLOSE
        )
    tab.locator("#head").select_option("mean")
    check_numbers(tab, small.raw.at(small.position, 2))


def test_switches_take_the_colour_from_common_and_special_tokens(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    common = [place for place, token in enumerate(small.tokens) if token in ("the", "to", "of")]
    tab.locator("#common").click()
    off = tab.evaluate(
        "[...document.querySelectorAll('.token')].map((e, i) => e.style.background ? -1 : i).filter(i => i >= 0)"
    )
    assert off == common
    rest = [place for place in range(len(small.tokens)) if place not in common]
    assert np.abs(table(tab)["Rollout"] - small.rollout.at(small.position)[rest]).max() < CLOSE
    tab.locator("#special").press(" ")
    assert tab.locator(".token.off").count() == len(common) + 1
    assert small.tokens[0] not in [name for name, _ in numbers(tab)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_every_colour_of_the_scale_has_contrast(
    visit: Open, real: af.Attention, scheme: str
) -> None:
    tab = visit(explanation_page(explained(real)), scheme=scheme)
    tab.locator("#tab-all").click()
    if not tab.locator("#special").is_checked():  # what is not coloured has no background
        tab.locator("#special").click()
    read = "[...document.querySelectorAll('.token')].map(e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor])"

    def luminance(colour: str) -> float:
        parts = np.array(re.findall(r"\d+", colour)[:3], float) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for pair in tab.evaluate(read):
        dark, light = sorted(map(luminance, pair))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_saturated_flow_says_that_it_says_nothing(visit: Open) -> None:
    found = explained(random_attention(8, 12, sharpness=0.3))
    assert found.flow.saturated is not None
    shares = found.flow.saturated[:, 0].mean(axis=-1)  # [layer]
    assert shares[-1] > 0.95 > shares[0]
    tab = visit(explanation_page(found))
    assert not tab.locator("#note").is_visible()
    tab.locator("#tab-flow").click()
    assert "it says nothing" in tab.locator("#note").inner_text()
    move_slider(tab, 1)
    assert not tab.locator("#note").is_visible()


BACKGROUNDS = "[...document.querySelectorAll('#strips .token')].map(each => each.style.background)"


def colours(tab: "Page") -> list[tuple[int, ...] | None]:
    """The red, green and blue of each token; None where it has no colour."""
    found = tab.evaluate(BACKGROUNDS)
    return [tuple(map(int, re.findall(r"\d+", each))) or None for each in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_speaks_against_the_target_has_another_colour(
    visit: Open, small: af.Explanation, scheme: str
) -> None:
    values = small.importance["blank_out"].values
    assert values.min() < 0 < values.max()
    tab = visit(explanation_page(small), scheme=scheme)
    tab.locator("#tab-blank_out").click()
    assert f"Watched: \u2068{small.importance['blank_out'].target}" in (
        tab.locator("#meaning").inner_text()
    )
    assert "orange ones against it" in tab.locator("#meaning").inner_text()
    painted = colours(tab)
    for value, colour in zip(values, painted, strict=True):
        assert colour is not None
        if abs(value) > 0.02 * np.abs(values).max():
            assert (colour[2] > colour[0]) == (value > 0), (value, colour)
    shown = table(tab)["Blank-out"]
    assert np.abs(np.array(shown) - values).max() < CLOSE


def test_flow_that_hardly_differs_is_not_painted(visit: Open) -> None:
    found = explained(random_attention(8, 12, sharpness=0.3))
    assert found.flow.select(0, 8).spread[0, 0] < 0.02
    tab = visit(explanation_page(found))
    assert None not in colours(tab)
    tab.locator("#tab-flow").click()
    assert set(colours(tab)) == {None}
    assert "spread 0.01" in tab.locator("#note").inner_text()
    move_slider(tab, 1)
    assert None not in colours(tab)


def test_what_is_not_finite_is_said_not_drawn(visit: Open, small: af.Explanation) -> None:
    unsound = replace(
        small.importance["blank_out"], values=np.array([np.nan, *[0.1] * (len(small.tokens) - 1)])
    )
    tab = visit(explanation_page(replace(small, importance={"blank_out": unsound})))
    assert not tab.locator("#note").is_visible()
    tab.locator("#tab-blank_out").click()
    assert "Blank-out cannot be drawn here" in tab.locator("#note").inner_text()
    assert set(colours(tab)) == {None}


# ---- the graph ------------------------------------------------------------------------------------------------------------------


def test_hovering_a_node_shows_its_numbers_and_a_click_pins_it(
    visit: Open, small: af.Explanation
) -> None:
    depth, size = small.attention.depth, small.attention.size
    tab = visit(explanation_page(small))
    assert tab.locator("#graph svg path").count() > 10
    before = tab.locator("#graph svg").inner_html()
    tab.mouse.move(*node(tab, 4, 2, depth, size))
    settled(tab)
    assert state(tab, "focus") == "4,2"
    check_numbers(tab, small.rollout.at(2, 4))
    assert tab.locator("#graph svg").inner_html() != before
    tab.mouse.move(2, 2)
    settled(tab)
    assert state(tab, "focus") == f"{depth},{small.position}"
    check_numbers(tab, small.rollout.at(small.position))
    x, y = node(tab, 3, 5, depth, size)
    tab.mouse.click(x, y)
    assert (state(tab, "pinned"), state(tab, "layer"), state(tab, "position")) == ("true", "3", "5")
    tab.mouse.move(*node(tab, 2, 1, depth, size))
    settled(tab)
    assert state(tab, "focus") == "3,5"
    check_numbers(tab, small.rollout.at(5, 3))
    tab.keyboard.press("Escape")
    assert (state(tab, "pinned"), state(tab, "layer"), state(tab, "position")) == (
        "false",
        str(depth),
        str(small.position),
    )


def test_the_graph_is_usable_by_keyboard_and_says_what_it_shows(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    cursor = tab.locator("#cursor")
    cursor.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        cursor.press(key)
    layer, position = small.attention.depth - 2, small.position + 2
    assert state(tab, "focus") == f"{layer},{position}"
    check_numbers(tab, small.rollout.at(position, layer))
    said = re.sub("[\u2068\u2069]", "", tab.locator("#live").inner_text())
    assert said.startswith(
        f"layer {layer}, {small.tokens[position]}: {small.rollout.at(position, layer).max():.3f}"[
            :-1
        ]
    )
    cursor.press("Enter")
    assert (state(tab, "pinned"), cursor.get_attribute("aria-pressed")) == ("true", "true")
    cursor.press("Escape")
    assert state(tab, "pinned") == "false"
    tab.locator("#tab-rollout").focus()
    tab.keyboard.press("ArrowRight")
    assert state(tab, "method") == "flow"
    tab.keyboard.press("Home")
    assert state(tab, "method") == "raw"


def test_input_nodes_tell_what_reaches_the_position(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    tab.mouse.move(*node(tab, 0, 2, small.attention.depth, small.attention.size))
    settled(tab)
    value = re.search(r"\d\.\d+", tab.locator("#numbers-hint").inner_text())
    assert value is not None
    assert float(value[0]) == pytest.approx(small.rollout.at(small.position)[2], abs=CLOSE)


@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_rollout_of_every_node_is_computed_in_the_page(visit: Open, sharpness: float) -> None:
    """Twenty-four layers: what 16 bits lose does not add up."""
    found = explained(random_attention(24, 7, sharpness=sharpness))
    tab = visit(explanation_page(found))
    for position in range(7):
        tab.locator("#position").select_option(str(position))
        shown = table(tab, "map-table")
        for layer in range(1, 25):
            assert np.abs(shown[f"layer {layer}"] - found.rollout.at(position, layer)).max() < CLOSE


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options", [{"residual": 0.2}, {"normalize": "receptive_field"}, {"normalize": None}], ids=str
)
def test_residual_and_normalisation_are_those_of_the_explanation(
    visit: Open, causal: bool, options: dict[str, Any]
) -> None:
    found = explained(random_attention(4, 9, causal=causal), 8, **options)
    tab = visit(explanation_page(found))
    for position in (2, 8):
        tab.locator("#position").select_option(str(position))
        shown = table(tab)
        for name, label in (("raw", "Raw"), ("rollout", "Rollout"), ("flow", "Flow")):
            assert np.abs(shown[label] - found.results[name].at(position)).max() < CLOSE


def test_large_graphs_are_drawn_on_canvas_with_flow_for_one_position(visit: Open) -> None:
    found = explained(random_attention(6, 80))
    tab = visit(explanation_page(found))
    assert (tab.locator("#graph canvas").count(), tab.locator("#graph svg").count()) == (
        2,
        0,
    )  # at rest, and what is lit
    picture = "() => document.querySelector('#graph canvas + canvas').toDataURL()"
    before = tab.evaluate(picture)
    tab.mouse.move(*node(tab, 4, 9, 6, 80))
    settled(tab)
    assert state(tab, "focus") == "4,9"
    check_numbers(tab, found.rollout.at(9, 4))
    assert tab.evaluate(picture) != before
    tab.locator("#tab-flow").click()
    assert not tab.locator("#note").is_visible() or "bound" in tab.locator("#note").inner_text()
    shown = table(tab)
    assert len(shown["token"]) == 50
    places = [int(place) for place in shown["position"]]
    assert np.abs(shown["Flow"] - found.flow.at(0)[places]).max() < CLOSE
    tab.locator("#position").select_option("9")
    assert "Flow is given for position 0" in tab.locator("#note").inner_text()


def test_a_page_without_the_graph_still_shows_its_position(
    visit: Open, small: af.Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "GRAPH_BYTES", 10)
    tab = visit(explanation_page(small))
    assert not tab.locator("#graph-section").is_visible()
    shown = table(tab)
    for name, label in (("raw", "Raw"), ("rollout", "Rollout"), ("flow", "Flow")):
        assert np.abs(shown[label] - small.results[name].at(small.position)).max() < CLOSE
    tab.locator("#position").select_option("2")
    assert "Rollout is given for position 0" in tab.locator("#note").inner_text()


def test_an_encoder_decoders_layers_have_their_names(visit: Open) -> None:
    names = ["encoder 1", "decoder 1 self", "decoder 1 cross"]
    weights = random_attention(3, 5).weights
    tab = visit(explanation_page(explained(af.Attention(weights, causal=False, layer_names=names))))
    assert list(table(tab, "map-table"))[2:] == names[::-1]
    assert tab.locator("#layer-name").inner_text() == names[-1]


@pytest.mark.parametrize(("depth", "size"), [(1, 1), (1, 3), (3, 1)])
def test_the_smallest_inputs_have_a_page(visit: Open, depth: int, size: int) -> None:
    found = explained(random_attention(depth, size))
    tab = visit(explanation_page(found))
    for method in ("raw", "flow", "all", "rollout"):
        tab.locator(f"#tab-{method}").click()
    assert np.abs(table(tab)["Rollout"] - found.rollout.at(0)).max() < CLOSE


# ---- generation -----------------------------------------------------------------------------------------------------------------


def test_a_click_on_a_generated_token_colours_the_prompt(visit: Open, story: af.Generation) -> None:
    tab = visit(generation_page(story))
    prompt, generated = tab.locator(".strip").all()
    assert prompt.locator(".token").all_inner_texts() == list(story.prompt)
    assert generated.locator(".token").all_inner_texts() == list(story.tokens)
    results = {
        label: getattr(story, label.lower())().values for label in ("Raw", "Rollout", "Flow")
    }  # [generated, prompt, layer]
    colours = set()
    for choice in (0, 3, 5):
        generated.locator(".token").nth(choice).click()
        colours.add(
            tab.evaluate(
                "[...document.querySelectorAll('.strip')[0].children].map(e => e.style.background).join()"
            )
        )
        for layer in (1, 3):
            move_slider(tab, layer)
            shown = table(tab)
            for label, values in results.items():
                assert np.abs(shown[label] - values[choice, :, layer - 1]).max() < CLOSE
    assert len(colours) == 3
    generated.locator(".token").nth(5).press("ArrowLeft")
    tab.keyboard.press("Enter")
    assert state(tab, "position") == str(story.size - 1 + 4)


def test_the_heat_map_of_a_generation_turns_to_generated_tokens(
    visit: Open, story: af.Generation
) -> None:
    tab = visit(generation_page(story))
    tab.locator("#rows").select_option("generated")
    tab.evaluate("document.getElementById('tables').open = true")
    tab.wait_for_selector("#map-table tbody tr")
    read = "[...document.querySelectorAll('#map-table tbody tr')].map(row => [...row.children].slice(2).map(cell => +cell.textContent))"
    assert np.abs(np.array(tab.evaluate(read)).T - story.rollout().values[:, :, -1]).max() < CLOSE


def test_common_words_of_a_prompt_can_be_switched_off(visit: Open, story: af.Generation) -> None:
    tab = visit(generation_page(story))
    tab.locator("#common").click()
    tab.locator("#special").click()
    kept = story.rollout().filtered().prompt
    coloured = tab.evaluate(
        "[...document.querySelectorAll('.strip')[0].children].filter(e => e.style.background).map(e => e.textContent)"
    )
    assert coloured == list(kept)


def test_the_graph_of_a_generation_reaches_the_positions_that_predicted(
    visit: Open, story: af.Generation
) -> None:
    size = story.attention.size
    tab = visit(generation_page(story))
    tab.mouse.move(*node(tab, 2, story.size + 1, 3, size))
    settled(tab)
    check_numbers(tab, story.rollout().values[2, :, 1])
    tab.mouse.move(*node(tab, 2, 2, 3, size))
    settled(tab)
    check_numbers(tab, af.rollout(story.attention).at(2, 2)[: story.size])


# ---- everyone, everywhere ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["explanation", "generation"])
def test_axe_finds_no_violation(
    visit: Open, small: af.Explanation, story: af.Generation, kind: str, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = visit(
        explanation_page(small) if kind == "explanation" else generation_page(story), scheme=scheme
    )
    table(tab)
    for method in ("rollout", "raw", "flow", "all"):
        tab.locator(f"#tab-{method}").click()
        found = Axe().run(tab)
        assert [
            (each["id"], [node["html"][:200] for node in each["nodes"]])
            for each in found.response["violations"]
        ] == []


@pytest.mark.parametrize("kind", ["explanation", "generation", "long"])
def test_a_phone_shows_it_all(
    visit: Open, small: af.Explanation, story: af.Generation, kind: str
) -> None:
    make = {
        "explanation": lambda: explanation_page(small),
        "generation": lambda: generation_page(story),
        "long": lambda: explanation_page(explained(random_attention(4, 60))),
    }
    tab = visit(make[kind](), width=360)
    table(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.locator("#numbers").is_visible()


def test_the_reader_chooses_the_colours(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small), scheme="dark")
    read = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(read)
    tab.locator("#theme").click()
    assert (state(tab, "theme"), tab.evaluate(read)) == ("light", "rgb(255, 255, 255)")
    tab.locator("#theme").click()
    assert (state(tab, "theme"), tab.evaluate(read)) == ("dark", dark)


@pytest.mark.parametrize("kind", ["explanation", "generation"])
def test_hostile_tokens_are_text_and_run_nothing(
    visit: Open, small: af.Explanation, story: af.Generation, kind: str
) -> None:
    tokens = tuple(HOSTILE)
    if kind == "explanation":
        tokens = tokens[: len(small.tokens)]
        html = explanation_page(
            replace(small, tokens=tokens, text=IMAGE, model=IMAGE, prediction=(IMAGE, 0.5))
        )
    else:
        tokens = tokens[-story.size :]
        html = generation_page(
            replace(story, prompt=tokens, tokens=tokens[: len(story.tokens)], text=IMAGE)
        )
    for width in (1100, 360):
        tab = visit(html, width=width)
        table(tab)
        read = "[...document.querySelectorAll('.strip')[0].children].map(e => [e.textContent, e.title])"
        assert tab.evaluate(read) == [[HOSTILE[token], token] for token in tokens]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for method in ("raw", "flow", "all"):
            tab.locator(f"#tab-{method}").click()
        assert tab.evaluate("document.querySelectorAll('img, b, iframe').length") == 0


@pytest.mark.parametrize("figure", ["graph", "map"])
def test_drawings_are_saved_as_png_and_svg(visit: Open, small: af.Explanation, figure: str) -> None:
    tokens = tuple(HOSTILE)[: len(small.tokens)]
    tab = visit(explanation_page(replace(small, tokens=tokens)))
    for kind in ("png", "svg"):
        with tab.expect_download() as waiting:
            tab.locator(f"[data-figure={figure}] [data-save={kind}]").click()
        assert waiting.value.suggested_filename == f"attnflow-{figure}-rollout.{kind}"
        content = Path(waiting.value.path()).read_bytes()
        if kind == "png":
            assert content.startswith(b"\x89PNG")
            continue
        root = ElementTree.fromstring(content.decode())
        texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert "שלום" in texts
        assert r"two\nlines" in texts
        assert "</script><i…" in texts
        assert {each.tag.split("}")[1] for each in root.iter()} <= {
            "svg",
            "title",
            "path",
            "circle",
            "rect",
            "text",
        }


def test_the_frame_of_a_notebook_works_and_saves(visit: Open, small: af.Explanation) -> None:
    tab = visit(f"<!doctype html><title>notebook</title>{framed(explanation_page(small))}")
    inside = tab.frame_locator("iframe")
    inside.locator("body[data-ready]").wait_for()
    inside.locator("#tab-flow").click()
    assert inside.locator("body").get_attribute("data-method") == "flow"
    with tab.expect_download() as waiting:
        inside.locator("[data-figure=graph] [data-save=svg]").click()
    assert b"<svg" in Path(waiting.value.path()).read_bytes()


# ---- methods of the user's own, and graphs of any kind ----------------------------------------------


def test_a_method_of_the_users_own_has_its_tab_strip_map_and_numbers(visit: Open) -> None:
    name = "mine <b>&"
    mine = af.token_attention(name, lambda graph: graph.weights[::-1] ** 2)
    found = af.explain(TEXT, methods={"rollout": None, name: mine}, importance=())
    tab = visit(explanation_page(found))
    tab.get_by_role("tab", name=name, exact=True).click()
    assert tab.evaluate("document.body.dataset.method") == name
    for layer in (6, 2):
        move_slider(tab, layer)
        check_numbers(tab, found.results[name].at(found.position, layer))
    assert name in tab.locator("#tokens-title").inner_text()
    tab.locator("#tables summary").click()
    shown = table(tab)
    assert np.abs(shown[name] - found.results[name].at(found.position, 2)).max() < CLOSE


def test_a_generation_shows_a_method_of_the_users_own(visit: Open, story: af.Generation) -> None:
    mine = af.token_attention("mine", lambda graph: graph.weights**2)
    tab = visit(generation_page(story, story.plan(["rollout", mine])))
    tab.get_by_role("tab", name="mine", exact=True).click()
    values = story.by(mine).values  # [generated, prompt, layer]
    check_numbers(tab, values[0, :, -1])


def test_positions_that_were_taken_out_are_said_to_be_so(visit: Open) -> None:
    found = af.explain(TEXT, without=[2], importance=())
    tab = visit(explanation_page(found))
    check_numbers(tab, found.rollout.at(found.position))
    tab.locator("#position").select_option("2")
    assert "was taken out of the graph" in tab.locator("#note").inner_text()


def test_edges_with_the_residual_inside_have_their_own_numbers(visit: Open) -> None:
    graph = af.AttentionGraph(edges=3.0 * np.random.default_rng(1).random((3, 6, 6)))
    found = af.explain(graph)
    tab = visit(explanation_page(found))
    for name in ("Rollout", "Raw", "Flow"):
        tab.get_by_role("tab", name=name, exact=True).click()
        check_numbers(tab, found.results[name.lower()].at(found.position))
    assert "The given edges hold the residual" in tab.locator("#notes").inner_text()


def test_what_comes_first_is_shown_first_and_each_method_has_its_own_graph(visit: Open) -> None:
    found = af.explain(TEXT, importance=())
    tab = visit(explanation_page(found))
    assert state(tab, "method") == "gradient flow"
    assert found.results["gradient flow"].top(1, position=0)[0][1] == "[CLS]"
    assert "[CLS]" not in [token for token, _ in numbers(tab)]  # it would outshine the words
    tab.locator("#special").click()
    drawn = []
    for name in ("Gradient flow", "Rollout", "Gradient flow"):
        tab.get_by_role("tab", name=name, exact=True).click()
        for layer in (6, 3):
            move_slider(tab, layer)
            check_numbers(tab, found.results[name.lower()].at(found.position, layer))
        drawn.append(tab.locator("#graph svg").inner_html())
    assert drawn[0] != drawn[1]
    assert drawn[0] == drawn[2]
    notes = tab.locator("#notes").inner_text()
    assert "The gradient edges hold the residual." in notes
    assert "Residual of attention: 0.5." in notes


def test_a_generation_opens_with_what_comes_first(visit: Open) -> None:
    model = af.Model(build("llama"), word_tokenizer())
    found = af.generate(model, "the key to the cabinets is", max_new_tokens=4, eos_token_id=None)
    tab = visit(generation_page(found))
    assert state(tab, "method") == "contribution rollout"
    check_numbers(tab, found.by("rollout", edges="contribution").values[0, :, -1])
    tab.get_by_role("tab", name="Rollout", exact=True).click()
    check_numbers(tab, found.rollout().values[0, :, -1])
