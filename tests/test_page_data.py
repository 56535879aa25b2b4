"""The page before a browser sees it: what is in the file, what is not, and how its numbers are packed."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.core.text import is_common, show_token
from attnflow.show import page
from attnflow.show.page import encode_json, explanation_page, framed, generation_page, pack_array
from tests.oracles import Floats

HOSTILE = "</script><img src=x onerror=alert(1)>"


def explained(text: str = "the key to the cabinets", **options: object) -> af.Explanation:
    return af.explain(text, **{"importance": "blank_out", **options})  # type: ignore[arg-type]


def random_generation(prompt: int = 5, new: int = 4, depth: int = 3) -> af.Generation:
    """A generation with random causal attention."""
    generator = np.random.default_rng(0)
    size = prompt + new - 1
    weights = np.tril(generator.random((depth, size, size)) + 0.01)
    attention = af.Attention(weights / weights.sum(axis=-1, keepdims=True), causal=True)
    words = ["the", "old", "harbour", ",", "and", "boats", "were", "waiting", "there", "."]
    tokens = [words[place % len(words)] for place in range(prompt + new)]
    return af.Generation(
        "boats", tuple(tokens[prompt:]), (0.5,) * new, tuple(tokens[:prompt]), attention
    )


def data_of(html: str) -> dict[str, object]:
    """The data of a page, as a browser finds it."""
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL
    )
    return json.loads(found)  # type: ignore[no-any-return]


def unpacked(packed: dict[str, object]) -> Floats:
    values = np.frombuffer(base64.b64decode(str(packed["float16"])), dtype="<f2").astype(np.float64)
    return values.reshape(packed["shape"])  # type: ignore[call-overload,no-any-return]


def method_of(data: dict[str, object], name: str) -> dict[str, Any]:
    """What a page knows of one method."""
    (found,) = [each for each in data["methods"] if each["name"] == name]  # type: ignore[attr-defined]
    return found  # type: ignore[no-any-return]


def graphs_of(data: dict[str, object]) -> list[dict[str, Any]]:
    """The graphs that a page holds."""
    return data["graphs"]  # type: ignore[return-value]


class Outline(HTMLParser):
    """The tags of a page, and every attribute that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "action")
        ]


def test_the_page_is_one_small_file_without_outside_references() -> None:
    assets = [
        each.read_text(encoding="utf-8")
        for each in (files("attnflow.show") / "page_assets").iterdir()
        if each.is_file()
    ]
    assert sum(len(each.encode()) for each in assets) < 64_000
    html = explanation_page(explained())
    outline = Outline()
    outline.feed(html)
    assert outline.references == ["#panel"]
    assert not {"link", "img", "iframe", "base", "object"} & set(outline.tags)
    outside = re.findall(r"https?://[^\s\"'<]+|url\(|@import|fetch\(|XMLHttpRequest|import\(", html)
    assert set(outside) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "default-src 'none'" in html


@pytest.mark.parametrize(
    "text",
    [HOSTILE, "<!--<script>", "a & b", "\u2028\u2029", "\ud800", "{{css}}{{js}}{{data}}", "\0\n\t"],
)
def test_no_text_leaves_the_data(text: str) -> None:
    found = explained()
    html = explanation_page(
        replace(found, tokens=(text,) * 6, text=text, model=text, prediction=(text, 0.5))
    )
    outline, plain = Outline(), Outline()
    outline.feed(html)
    plain.feed(explanation_page(found))
    assert outline.tags == plain.tags
    data = data_of(html)
    assert data["tokens"] == [text] * 6
    assert data["prediction"] == [show_token(text), 0.5]
    assert html.encode("utf-8")  # a lone surrogate, too, can be written


def test_json_holds_nothing_that_ends_a_script() -> None:
    assert re.fullmatch(
        r"[^<>&\u2028\u2029]*", encode_json({"tokens": [HOSTILE, "\u2028", "&lt;", "<!--"]})
    )


def test_the_packed_graph_is_the_graph_to_16_bits() -> None:
    found = explained(heads=None)
    data = data_of(explanation_page(found))
    assert [graph["edges"] for graph in graphs_of(data)] == ["gradient", "attention"]
    for name, number in (("gradient flow", 0), ("rollout", 1)):
        weights, packed = found.graphs[name].weights, graphs_of(data)[number]["weights"]
        weights = weights / weights.sum(axis=-1).max() if number == 0 else weights  # shares
        assert np.abs(unpacked(packed) - weights).max() < 3e-4
        assert method_of(data, name)["graph"] == number
    assert data["first"] == "gradient flow"
    assert np.abs(unpacked(data["heads"]) - found.attention.weights).max() < 3e-4  # type: ignore[arg-type]
    flow = method_of(data, "flow")["rows"]
    assert np.abs(unpacked(flow["values"]) - found.flow.values).max() < 3e-4


def test_float16_is_little_endian_with_its_shape() -> None:
    packed = pack_array(np.array([[1.0, 0.5], [0.0, 0.25]]))
    assert packed["shape"] == [2, 2]
    assert base64.b64decode(packed["float16"]) == b"\x00\x3c\x00\x38\x00\x00\x00\x34"


def test_heads_come_only_where_they_were_captured_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "heads" not in data_of(explanation_page(explained()))
    monkeypatch.setattr(page, "HEAD_BYTES", 10)
    data = data_of(explanation_page(explained(heads=None)))
    assert "heads" not in data
    assert "heads are too large" in str(data["notes"])


def test_a_graph_that_is_too_large_leaves_the_rows_of_the_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "GRAPH_BYTES", 10)
    found = explained()
    data = data_of(explanation_page(found))
    assert "graphs" not in data
    rows = method_of(data, "rollout")["rows"]
    assert rows["positions"] == [found.position]
    assert (
        np.abs(unpacked(rows["values"])[:, 0] - found.rollout.values[:, found.position]).max()
        < 3e-4
    )


def test_a_generations_page_holds_m_and_where_its_flow_is_saturated() -> None:
    generation = random_generation()
    data = data_of(generation_page(generation))
    for name in ("raw", "rollout", "flow"):
        rows = method_of(data, name)["rows"]
        assert rows["positions"] == [4, 5, 6, 7]
        values = getattr(generation, name)().values  # [generated, prompt, layer]
        assert np.abs(unpacked(rows["values"]) - values.transpose(2, 0, 1)).max() < 3e-4
    whole = af.flow(generation.attention, layers=range(1, 4), positions=range(4, 8), normalize=None)
    assert whole.saturated is not None
    saturated = method_of(data, "flow")["saturated"]
    assert saturated == (whole.saturated[..., :5].mean(axis=-1) > 0.95).astype(int).tolist()


def test_a_generations_page_marks_the_rows_that_are_saturated_and_only_those() -> None:
    """Below, all look at the first token; above, evenly at all: with depth, all flows are full."""
    prompt, new, depth = 3, 4, 5
    size = prompt + new - 1
    even = np.tril(np.ones((size, size))) / np.arange(1, size + 1)[:, None]
    weights = np.stack([np.eye(size)[np.zeros(size, int)], *[even] * (depth - 1)])
    attention = af.Attention(weights, causal=True)
    generation = af.Generation("", ("new",) * new, (0.5,) * new, ("old",) * prompt, attention)
    positions = range(prompt - 1, size)
    flows = af.flow(attention, layers=range(1, depth + 1), positions=positions, normalize=None)
    leaving = np.array([attention.graph().edges[layer - 1].sum(axis=1) for layer in flows.layers])
    entering = attention.graph().edges[0].sum(axis=0)
    bounds = np.minimum(leaving[:, positions, None], entering)  # [layer, query, key]
    full = (np.abs(flows.values - bounds) < 1e-9)[..., :prompt].mean(axis=-1)  # shares of rows
    assert (
        method_of(data_of(generation_page(generation)), "flow")["saturated"]
        == (full > 0.95).astype(int).tolist()
    )
    assert full.max(axis=1).tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1, 1])
    assert full[3].tolist() == pytest.approx([1, 2 / 3, 1, 1])


def test_an_explanations_page_marks_the_rows_that_are_saturated_and_how_even_they_are() -> None:
    found = explained()
    data = data_of(explanation_page(found))
    assert found.flow.saturated is not None
    marked = found.flow.saturated.mean(axis=-1) > 0.95  # [layer, query]
    assert not marked[0].any()
    assert marked[-1].all()
    flow = method_of(data, "flow")
    assert flow["saturated"] == marked.astype(int).tolist()
    assert np.abs(np.array(flow["spread"]) - found.flow.spread).max() < 1e-4


def test_a_long_generation_has_no_flow_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LONG", 7)
    data = data_of(generation_page(random_generation()))
    assert [each["name"] for each in data["methods"]] == ["raw", "rollout"]  # type: ignore[attr-defined]
    assert "generation.by('flow'" in str(data["notes"])


def test_common_tokens_are_those_that_filtering_takes_out() -> None:
    generation = random_generation(prompt=10)
    kept = generation.rollout().filtered().prompt
    assert [token for token in generation.prompt if not is_common(token)] == list(kept)


def test_a_frame_keeps_the_page_apart_and_large_pages_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outline = Outline()
    outline.feed(framed(explanation_page(explained())))
    assert outline.tags == ["iframe"]
    monkeypatch.setattr(page, "FRAME_BYTES", 1000)
    text = framed(explanation_page(explained()))
    assert "too much for a notebook" in text
    assert len(text) < 1000


def test_edges_with_the_residual_inside_travel_as_shares_and_every_row_is_given() -> None:
    graph = af.AttentionGraph(edges=7.0 * np.random.default_rng(0).random((3, 5, 5)))
    found = af.explain(graph, methods=["rollout", "flow"])
    data = data_of(explanation_page(found))
    (packed,) = graphs_of(data)
    assert packed["residual"] is None
    assert unpacked(packed["weights"]).sum(axis=-1).max() == pytest.approx(1.0, abs=3e-3)
    rows = method_of(data, "rollout")
    assert "computed" not in rows
    assert np.abs(unpacked(rows["rows"]["values"]) - found.rollout.values).max() < 3e-4
