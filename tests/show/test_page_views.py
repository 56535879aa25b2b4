"""The views of the page below its text, in a real browser: matrix, paths, layers, heads, picture, numbers; what is saved and copied."""

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import attnflow as af
from tests.families import build, word_tokenizer
from tests.oracles import Floats
from tests.pages import (
    CLOSE,
    HOSTILE,
    TOKENS,
    Open,
    explained,
    explanation_page,
    generation_page,
    go_to,
    random_attention,
    settled,
    show,
    state,
    table,
    text_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::attnflow.SaturationWarning")]

SENTENCE = "the old key to a red door of houses"  # every word once
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def small() -> af.Explanation:
    """The bundled model, with every head; no word comes twice."""
    return af.explain(SENTENCE, heads=None, edges="attention")


# ---- paths -----------------------------------------------------------------------------------------


def read_edges(tab: "Page", names: list[str]) -> list[tuple[int, int, int]]:
    """The edges that the page lists: (layer, query, key)."""
    tab.evaluate("document.getElementById('edges').open = true")
    tab.wait_for_timeout(100)
    edges = []
    for line in tab.locator("#edge-list li").all_inner_texts():
        told = re.search(r"layer (\d+): “(.*)” reads “(.*)”", re.sub("[\u2068\u2069]", "", line))
        assert told is not None
        edges.append((int(told[1]), names.index(told[2]), names.index(told[3])))
    return edges


def carried(graph: af.AttentionGraph, edges: list[tuple[int, int, int]], position: int) -> Floats:
    """[key]: the part of what starts at a node of the top layer that arrives over these edges."""
    mass: Floats = np.eye(graph.size)[position]
    for layer in range(graph.depth, 0, -1):
        kept = np.zeros((graph.size, graph.size))
        for at, query, key in edges:
            if at == layer:
                kept[query, key] = graph.layer_edges(layer)[query, key]
        mass = mass @ kept
    return mass


def test_the_paths_of_rollout_carry_the_share_that_is_told(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    counts = []
    for share in (50, 80):
        go_to(tab, method="rollout", share=share)
        show(tab, "paths-section")
        told = re.search(r"(\d+) edges carry ([\d.]+) %", text_of(tab, "#paths-caption"))
        assert told is not None
        counts.append(int(told[1]))
        assert float(told[2]) >= share - 1
        edges = read_edges(tab, list(small.tokens))
        if len(edges) == counts[-1]:
            arrived = carried(small.graphs["rollout"], edges, small.position).sum()
            assert arrived == pytest.approx(float(told[2]) / 100, abs=0.01)
    assert counts[0] < counts[1]
    go_to(tab, method="rollout", share=20, pin=3)
    show(tab, "paths-section")
    told = re.search(
        r"(\d+) edges carry ([\d.]+) % of what arrives there", text_of(tab, "#paths-caption")
    )
    assert told is not None
    arrived = carried(small.graphs["rollout"], read_edges(tab, list(small.tokens)), small.position)[
        3
    ]
    assert arrived / small.rollout.at(small.position)[3] == pytest.approx(
        float(told[2]) / 100, abs=0.01
    )


def test_the_paths_of_flow_are_the_maximum_flow_and_its_cut(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    for key in (2, 5):
        go_to(tab, method="flow", pin=key, share=100)
        show(tab, "paths-section")
        best = af.max_flow(
            small.graphs["rollout"], source=(small.depth, small.position), target=(0, key)
        )
        told = text_of(tab, "#paths-caption")
        value = re.search(rf"to “{small.tokens[key]}” is (\d\.\d+)", told)
        assert value is not None
        assert float(value[1]) == pytest.approx(best.value, abs=CLOSE)
        assert f"the cut, {len(best.cut)} edges" in told
    go_to(tab, method="flow", pin=2, layer=3)
    assert "af.max_flow(graph, source=(3, 0), target=(0, [2]))" in text_of(tab, "#paths-caption")


def test_a_click_on_an_edge_names_its_heads(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    go_to(tab, method="rollout", share=50)
    show(tab, "paths-section")
    ((layer, query, key), *_) = read_edges(tab, list(small.tokens))
    told = text_of(tab, "#edge-list li:first-child")
    weights = small.attention.weights[layer - 1, :, query, key]
    for head, value in re.findall(r"head (\d+) (\d\.\d+)", told):
        assert float(value) == pytest.approx(weights[int(head)], abs=CLOSE)
    assert f"head {int(np.argmax(weights))} " in told


def test_many_layers_are_merged_into_bands(visit: Open) -> None:
    found = explained(random_attention(24, 9, sharpness=3.0))
    tab = visit(explanation_page(found))
    go_to(tab, method="rollout", pin=4)
    show(tab, "paths-section")
    assert "merged into bands" in text_of(tab, "#paths-caption")
    saved = save(tab, "paths", "svg")
    assert "layers 1–3" in saved
    go_to(tab, method="rollout", layer=20)
    assert "carry" in text_of(tab, "#paths-caption")


# ---- matrix, layers, bars -----------------------------------------------------------------------------


def test_the_cell_under_the_pointer_is_the_number_of_the_array(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    go_to(tab, method="rollout", against="nothing", sinks="true")
    for kind in ("layers", "positions"):
        tab.locator("#rows").select_option(kind)
        show(tab, "matrix-section")
        box = tab.locator("#matrix").bounding_box()
        assert box is not None
        for across, down in ((0.3, 0.1), (0.5, 0.3), (0.8, 0.5)):
            tab.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
            settled(tab)
            told = re.search(r"^(?:layer (\d+)|(\d+) \S+), (\S+): (\S+)", text_of(tab, "#cell"))
            assert told is not None
            layer = int(told[1]) if told[1] else small.depth
            position = int(told[2]) if told[2] else small.position
            key = small.tokens.index(told[3])
            assert float(told[4]) == pytest.approx(
                small.rollout.at(position, layer)[key], abs=CLOSE
            )
            assert state(tab, "hover") == str(key)


def test_a_click_on_a_row_of_the_matrix_goes_there(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    show(tab, "matrix-section")
    box = tab.locator("#matrix").bounding_box()
    assert box is not None
    tab.mouse.click(box["x"] + 200, box["y"] + 4 + 2.5 * 22)
    assert state(tab, "layer") == str(small.depth - 2)


def test_the_matrix_is_zoomed_and_moved_by_keys_and_buttons(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    show(tab, "matrix-section")
    read = "document.querySelector('#matrix canvas').toDataURL()"
    whole = tab.evaluate(read)
    tab.locator("#zoom-in").click()
    near = tab.evaluate(read)
    tab.locator("#matrix-scroll").press("ArrowRight")
    assert len({whole, near, tab.evaluate(read)}) == 3
    tab.locator("#zoom-all").click()
    assert tab.evaluate(read) == whole


def test_many_positions_are_pooled_into_tiles(visit: Open) -> None:
    found = explained(random_attention(3, 200), methods=["raw", "rollout"])
    tab = visit(explanation_page(found))
    go_to(tab, rows="positions", against="nothing", sinks="true")
    show(tab, "matrix-section")
    assert "pooled into 128 tiles" in text_of(tab, "#matrix-caption")
    box = tab.locator("#matrix").bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + 400, box["y"] + 200)
    settled(tab)
    told = re.search(r"^(\d+)–(\d+), t(\d+): (\S+)", text_of(tab, "#cell"))
    assert told is not None
    first, last, key = int(told[1]), int(told[2]), int(told[3])
    end = next(200 * at // 128 for at in range(1, 129) if 200 * at // 128 > key)
    rows = found.rollout.values[-1, first : last + 1, key:end]
    assert float(told[4]) == pytest.approx(rows.sum(axis=1).mean(), abs=CLOSE)


def test_layers_and_importance_are_drawn_for_the_top_tokens(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    go_to(tab, method="rollout")
    show(tab, "layers-section")
    row = small.rollout.at(small.position).copy()
    row[small.position] = -1
    best = [small.tokens[at] for at in np.argsort(-row)[:6]]
    lines = save(tab, "layers", "svg")
    assert all(name in lines for name in best)
    bars = texts_of(save(tab, "bars", "svg"))
    values = small.importance["blank_out"].values
    top = small.tokens[int(np.argmax(np.abs(np.where(row < 0, 0, values))))]
    assert top in bars
    assert "Blank-out" in bars


# ---- heads, picture, two texts --------------------------------------------------------------------------


def test_heads_are_thumbnails_and_a_click_opens_one(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    tab.locator("#heads-section summary").click()
    depth, heads = small.attention.weights.shape[:2]
    assert tab.locator(".thumb").count() == depth * heads
    tab.get_by_role("button", name="layer 2, head 3", exact=True).click()
    tab.locator("#head").scroll_into_view_if_needed()
    box = tab.locator("#head").bounding_box()
    assert box is not None
    size = len(small.tokens)
    query, key = 4, 2
    tab.mouse.move(
        box["x"] + (key + 0.5) * box["width"] / size,
        box["y"] + (query + 0.5) * box["height"] / size,
    )
    told = text_of(tab, "#head-cell")
    assert told.startswith(f"{query} “{small.tokens[query]}” reads {key} “{small.tokens[key]}”")
    value = float(told.rsplit(" ", 1)[1])
    assert value == pytest.approx(small.attention.weights[1, 3, query, key], abs=CLOSE)


def test_heads_that_were_not_kept_say_what_to_ask_for(visit: Open) -> None:
    tab = visit(explanation_page(explained(random_attention(3, 5))))
    tab.locator("#heads-section summary").click()
    assert "af.explain(text, heads=None)" in text_of(tab, "#heads-hint")


@pytest.fixture(scope="module")
def vision() -> tuple[Any, Any]:
    model = build("vit")
    side = model.config.image_size
    return af.Model(model), np.random.default_rng(0).random((3, side, side)).astype(np.float32)


def test_a_vision_model_shows_the_picture_under_its_patches(
    visit: Open, vision: tuple[Any, Any]
) -> None:
    import torch

    model, pixels = vision
    found = af.explain(torch.tensor(pixels), model=model, methods=["rollout"])
    tab = visit(explanation_page(found))
    assert tab.locator("#text .token").all_inner_texts() == ["[CLS]"]
    box = tab.locator("#picture").bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.17 * box["height"])
    settled(tab)
    told = re.search(r"“(\d),(\d)”, position (\d+): (\d\.\d+)", text_of(tab, "#card-focus"))
    assert told is not None
    assert found.tokens[int(told[3])] == f"{told[1]},{told[2]}" == "0,1"
    assert float(told[4]) == pytest.approx(found.rollout.at(0)[int(told[3])], abs=CLOSE)
    svg = save(tab, "picture", "svg")
    assert "data:image/jpeg" in svg


def test_patches_without_a_picture_leave_their_grid(visit: Open, vision: tuple[Any, Any]) -> None:
    import torch

    model, pixels = vision
    found = af.explain(torch.tensor(pixels), model=model, methods=["rollout"])
    tab = visit(explanation_page(replace(found, picture=None)))
    assert "its grid stands alone" in text_of(tab, "#notes")
    assert tab.locator("#picture canvas").first.is_visible()


def test_an_encoder_decoder_has_two_texts_and_named_layers(visit: Open) -> None:
    model = af.Model(build("bart"), word_tokenizer())
    found = af.explain(("the key to the cabinets", "the old house"), model=model, edges="attention")
    tab = visit(explanation_page(found))
    source, target = tab.locator("#text .text").all()
    count = source.locator(".token").count()
    assert source.locator(".token").all_inner_texts() == list(found.tokens[:count])
    assert target.locator(".token").all_inner_texts() == list(found.tokens[count:])
    assert found.tokens[count - 1] == "[SEP]"
    assert tab.locator(".part-name").all_inner_texts() == ["Source", "Target"]
    assert found.graphs["rollout"].layer_names is not None
    assert tab.locator("#layer-name").inner_text() == found.graphs["rollout"].layer_names[-1]


# ---- numbers, saved and copied ----------------------------------------------------------------------------


def texts_of(svg: str) -> list[str | None]:
    """The texts of a drawing."""
    return [each.text for each in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]


def save(tab: "Page", figure: str, kind: str) -> str:
    """What a button saves."""
    tab.wait_for_selector(f"#{figure}-saves [data-save={kind}]", state="attached")
    with tab.expect_download() as waiting:
        tab.evaluate(
            "where => document.querySelector(where).click()", f"#{figure}-saves [data-save={kind}]"
        )
    return Path(waiting.value.path()).read_bytes().decode("utf-8", "replace")


def copied(tab: "Page", kind: str) -> str:
    """What a button copies."""
    tab.evaluate(
        "Object.defineProperty(navigator, 'clipboard', { configurable: true, value: { writeText: async (text) => { window.copied = text; } } })"
    )
    tab.evaluate("document.getElementById('tables').open = true")
    tab.locator(f"#copy-{kind}").click()
    tab.wait_for_function("window.copied !== undefined")
    return str(
        tab.evaluate("() => { const text = window.copied; delete window.copied; return text; }")
    )


def test_the_table_is_sorted_by_any_column(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    go_to(tab, sinks="true")
    table(tab)
    assert not tab.locator("#all-rows").is_visible()
    tab.get_by_role("button", name="Rollout", exact=True).click()
    order = np.argsort(-small.rollout.at(small.position), kind="stable")
    assert table(tab)["token"] == [small.tokens[at] for at in order]
    tab.get_by_role("button", name="Rollout", exact=True).click()
    assert table(tab)["token"] == [small.tokens[at] for at in order[::-1]]
    assert tab.locator("th[aria-sort=ascending]").inner_text() == "Rollout"
    tab.get_by_role("button", name="token", exact=True).click()
    assert table(tab)["token"] == sorted(small.tokens)


def test_numbers_are_copied_as_csv_latex_and_coloured_html(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    go_to(tab, method="rollout", sinks="true")
    head, *rows = list(csv.reader(io.StringIO(copied(tab, "csv"))))
    values = np.array([float(row[head.index("Rollout")]) for row in rows])
    assert np.abs(values - small.rollout.at(small.position)).max() < CLOSE
    assert [row[1] for row in rows] == list(small.tokens)
    latex = copied(tab, "latex")
    assert latex.count("\\colorbox[HTML]{") == len(small.tokens)
    assert "\\begin{tabular}{rl" in latex
    assert f"& {small.tokens[3]} &" in latex
    html = copied(tab, "html")
    assert re.sub(r"<[^>]*>", "", html) == " ".join(small.tokens)
    assert html.count("background:#") == len(small.tokens)


def test_hostile_tokens_are_inert_in_what_is_copied(visit: Open, small: af.Explanation) -> None:
    tokens = [*HOSTILE, "\\input{x}", "=1+1", "a&b%c$d#e_f^g~h", "}{"]
    tokens = [token for token in tokens if len(token) < 100][-len(small.tokens) :]
    tab = visit(explanation_page(replace(small, tokens=tuple(tokens))))
    go_to(tab, method="rollout", sinks="true")
    latex = copied(tab, "latex")
    commands = set(re.findall(r"\\([a-zA-Z]+)", latex))
    ours = {"setlength", "fboxsep", "colorbox", "textcolor", "strut", "begin", "end", "toprule"}
    ours |= {"midrule", "bottomrule", "textbackslash", "textasciicircum", "textasciitilde"}
    ours |= {"textless", "textgreater", "textquotedbl", "textbar", "textasciigrave"}
    assert commands <= ours
    assert "\\textbackslash{}input\\{x\\}" in latex
    assert "a\\&b\\%c\\$d\\#e\\_f\\textasciicircum{}g\\textasciitilde{}h" in latex
    cells = [row[1] for row in csv.reader(io.StringIO(copied(tab, "csv")))]
    assert "'=1+1" in cells
    html = copied(tab, "html")
    assert set(re.findall(r"<(\w+)", html)) == {"p", "span"}


@pytest.mark.parametrize("figure", ["paths", "matrix", "layers", "bars"])
def test_drawings_are_saved_with_title_legend_model_and_method(
    visit: Open, small: af.Explanation, figure: str
) -> None:
    tokens = tuple(HOSTILE)[: len(small.tokens)]
    tab = visit(explanation_page(replace(small, tokens=tokens)))
    go_to(tab, method="rollout", against="even")
    show(tab, f"{figure}-section")
    assert save(tab, figure, "png").startswith("\ufffdPNG")
    svg = save(tab, figure, "svg")
    texts = " ".join(filter(None, texts_of(svg)))
    for part in ("Rollout", small.model, "8 times even attention", "attnflow ·"):
        assert part in texts
    tags = {each.tag.split("}")[1] for each in ElementTree.fromstring(svg).iter()}
    assert tags <= {"svg", "title", "path", "circle", "rect", "text"}
    if figure in ("paths", "matrix"):
        assert "שלום" in texts
        assert r"two\nlines" in texts


def test_the_matrix_of_a_story_has_the_answer_as_rows(visit: Open) -> None:
    model = af.Model(build("llama"), word_tokenizer())
    story = af.generate(model, "the key to the cabinets is", max_new_tokens=6, eos_token_id=None)
    tab = visit(generation_page(story))
    go_to(tab, method="rollout", against="nothing", sinks="true")
    show(tab, "matrix-section")
    box = tab.locator("#matrix").bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + 300, box["y"] + 4 + 2.5 * 22)
    settled(tab)
    value = float(text_of(tab, "#cell").rsplit(": ", 1)[1].split()[0])
    key = int(state(tab, "hover"))
    assert value == pytest.approx(story.rollout().values[2, key, -1], abs=CLOSE)
    tab.mouse.click(box["x"] + 300, box["y"] + 4 + 2.5 * 22)
    assert state(tab, "position") == str(story.size + 1)
    assert tab.locator(TOKENS).count() == story.size + 6
