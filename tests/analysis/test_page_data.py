"""The page before a browser sees it: what is in the file, what is not, and how its numbers are packed."""

import base64
import io
import json
import re
import zlib
from dataclasses import is_dataclass, replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import attnflow as af
from attnflow.analysis.explain.summary import find_asides
from attnflow.analysis.page import pack as page_packing
from attnflow.analysis.page import page as page_data
from attnflow.analysis.page.pack import choose_bands, pack_array, pool_tiles
from attnflow.analysis.page.page import describe_explanation, describe_generation
from attnflow.analysis.page.schema import to_json
from attnflow.analysis.page.strips import describe_pair
from attnflow.analysis.page.types import declare_types
from attnflow.core.evenness import find_even_spread
from attnflow.core.text import show_token
from attnflow.models.predict import Prediction, Target
from attnflow.show.page import page
from attnflow.show.page.page import encode_json, framed
from tests.oracles import Floats
from tests.pages import explanation_page, generation_page

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
    if "deflated" in packed:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(str(packed["deflated"]))), np.uint8)
        content = planes.reshape(2, -1).T.tobytes()
    else:
        content = base64.b64decode(str(packed["float16"]))
    values = np.frombuffer(content, dtype="<f2").astype(np.float64)
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
        for each in (files("attnflow.show.page") / "assets").iterdir()
        if each.is_file()
    ]
    assert sum(len(each.encode()) for each in assets) < 150_000
    html = explanation_page(explained())
    outline = Outline()
    outline.feed(html)
    assert outline.references == ["#text-section"]
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
        replace(
            found,
            tokens=(text,) * 6,
            text=text,
            model=text,
            prediction=Prediction(text, 0.5, Target(0, text, 0.5)),
        )
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
    assert [graph["edges"] for graph in graphs_of(data)] == ["relevance", "attention"]
    for name, number in (("relevance flow", 0), ("rollout", 1)):
        weights, packed = found.graphs[name].weights, graphs_of(data)[number]["weights"]
        weights = weights / weights.sum(axis=-1).max() if number == 0 else weights  # shares
        assert np.abs(unpacked(packed) - weights).max() < 3e-4
        assert method_of(data, name)["graph"] == number
    assert data["first"] == "relevance flow"
    assert np.abs(unpacked(data["heads"]) - found.attention.weights).max() < 3e-4  # type: ignore[arg-type]
    flow = method_of(data, "flow")["rows"]
    assert np.abs(unpacked(flow["values"]) - found.flow.values).max() < 3e-4


def test_float16_is_little_endian_with_its_shape() -> None:
    packed = pack_array(np.array([[1.0, 0.5], [0.0, 0.25]]))
    assert packed.shape == (2, 2)
    assert base64.b64decode(packed.float16 or "") == b"\x00\x3c\x00\x38\x00\x00\x00\x34"


def test_heads_come_only_where_they_were_captured_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "heads" not in data_of(explanation_page(explained()))
    monkeypatch.setattr(page_packing, "HEAD_BYTES", 10)
    data = data_of(explanation_page(explained(heads=None)))
    assert "heads" not in data
    assert "heads are too large" in str(data["notes"])


def test_a_graph_that_is_too_large_leaves_the_rows_of_the_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_packing, "GRAPH_BYTES", 10)
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
    rows = [found.flow.select(found.position, layer) for layer in found.flow.layers]
    compared = [row.compared_with("even", exclude=list(find_asides(found))) for row in rows]
    even = [[int(find_even_spread(each) is not None)] for each in compared]
    assert flow["even"]["token"] == even


def test_a_long_generation_has_no_flow_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "LONG", 7)
    data = data_of(generation_page(random_generation()))
    assert [each["name"] for each in data["methods"]] == ["raw", "rollout"]  # type: ignore[attr-defined]
    assert "generation.by('flow'" in str(data["notes"])


def test_what_is_deflated_is_the_same_and_smaller() -> None:
    generator = np.random.default_rng(0)
    weights = np.tril(generator.random((4, 100, 100)))
    weights /= weights.sum(axis=-1, keepdims=True)
    packed = pack_array(weights)
    assert np.array_equal(unpacked(to_json(packed)), weights.astype(np.float16).astype(np.float64))
    assert packed.deflated is not None
    assert len(packed.deflated) < 0.6 * (4 * 2 * weights.size / 3)
    noise = pack_array(generator.random(20_000).view(np.float16))  # all bits random
    assert noise.float16 is not None


def test_a_deep_graph_comes_with_bands_whose_product_is_rollout() -> None:
    generator = np.random.default_rng(0)
    weights = generator.random((20, 6, 6))
    attention = af.Attention(weights / weights.sum(axis=-1, keepdims=True), causal=False)
    data = data_of(explanation_page(af.explain(attention, methods=["rollout"])))
    (packed,) = graphs_of(data)
    assert packed["tops"] == choose_bands(20)
    assert packed["tops"][-1] == 20
    whole = np.eye(6)
    for band in unpacked(packed["bands"]):
        whole = band @ whole
    assert np.abs(whole - af.rollout(attention).values[-1]).max() < 1e-3


def test_a_graph_that_is_too_large_comes_as_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_packing, "GRAPH_BYTES", 1000)
    weights = np.full((20, 6, 6), 1 / 6)
    found = af.explain(af.Attention(weights, causal=False), methods=["raw", "rollout"])
    data = data_of(explanation_page(found))
    (packed,) = graphs_of(data)
    assert "weights" not in packed
    assert "bands of layers" in str(data["notes"])
    assert method_of(data, "rollout")["rows"]["positions"] == [0]


def test_tiles_are_means_of_rows_of_sums_of_keys() -> None:
    values = np.random.default_rng(0).random((2, 300, 300))
    tiles = pool_tiles(values, range(300))
    assert tiles is not None
    starts, pooled = [*tiles.starts, 300], unpacked(to_json(tiles.values))
    for row, column in ((0, 0), (5, 90), (127, 127)):
        block = values[1, starts[row] : starts[row + 1], starts[column] : starts[column + 1]]
        assert pooled[1, row, column] == pytest.approx(block.sum(axis=1).mean(), rel=1e-3)


def test_maximum_flows_of_the_top_tokens_travel_with_their_cut() -> None:
    found = explained()
    data = data_of(explanation_page(found))
    flows = method_of(data, "flow")["flows"]
    single = {each["target"][0] for each in flows if len(each["target"]) == 1}
    assert single == set(range(1, len(found.tokens)))  # all but the explained position
    for flow in flows:
        best = af.max_flow(found.graphs["flow"], source=(6, 0), target=(0, flow["target"]))
        assert flow["value"] == pytest.approx(best.value, rel=1e-4)
        cut = [tuple(edge[:3]) for edge in flow["edges"] if edge[4]]
        assert sorted(cut) == sorted(best.cut)


def test_words_and_sentences_are_told_apart_and_what_is_left_out_stands_alone() -> None:
    text = "The key. It was lost!"
    data = data_of(explanation_page(explained(text)))
    units: Any = data["units"]
    tokens: Any = data["tokens"]
    assert units["word"][0] == units["sentence"][0] == [0]  # the explained position
    joined = [" ".join(tokens[at] for at in group) for group in units["sentence"]]
    assert len(joined) == 3
    assert joined[1].endswith(".")


def test_a_frame_keeps_the_page_apart_and_large_pages_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outline = Outline()
    outline.feed(framed(explanation_page(explained())))
    assert outline.tags == ["iframe", "script"]  # the script listens to how high the page is
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


# ---- the schema ---------------------------------------------------------------------------------


def test_the_scripts_have_the_types_of_the_schema_and_refer_to_them() -> None:
    assets = files("attnflow.show.page") / "assets"
    declared = (assets / "schema.d.ts").read_text(encoding="utf-8")
    assert declared == declare_types(), "run python -m attnflow.analysis.page.types"
    names = set(re.findall(r"^interface (\w+)", declared, re.MULTILINE))
    assert {"Page", "Strips", "PageMethod", "Packed"} <= names
    used = {
        name
        for each in assets.iterdir()
        if each.name.endswith(".js")
        for kind in re.findall(
            r"@(?:type|param|returns) \{(.*?)\}", each.read_text(encoding="utf-8")
        )
        for name in re.findall(r"\b[A-Z]\w+", kind)
    }
    browser = {
        "HTMLElement",
        "HTMLInputElement",
        "BlobPart",
        "Promise",
        "Uint8Array",
        "Float32Array",
    }
    assert used - browser <= names
    assert {"Page", "Strips", "PagePicture", "Entry"} <= used
    assert "interface" not in explanation_page(explained())  # editors read it, pages do not hold it


def check_type(value: object, hint: Any, where: str) -> None:
    """A value of the schema has the type that is declared, all the way down."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [part for part in parts if fits(value, part)]
        assert kinds, f"{where}: {value!r:.80} is not {hint}"
        check_type(value, kinds[0], where)
    elif origin is tuple and parts[-1] is Ellipsis:
        assert isinstance(value, tuple), where
        for part in value:
            check_type(part, parts[0], where)
    elif origin is tuple:
        assert isinstance(value, tuple), where
        for part, kind in zip(value, parts, strict=True):
            check_type(part, kind, where)
    elif is_dataclass(hint):
        assert isinstance(value, hint), where  # type: ignore[arg-type]
        for name, kind in get_type_hints(hint).items():
            check_type(getattr(value, name), kind, f"{where}.{name}")
    elif origin is Literal:
        assert value in parts, where
    elif origin is not None:
        assert isinstance(value, dict), where
        for key, part in value.items():
            check_type(key, str, where)
            check_type(part, parts[1], f"{where}.{key}")
    else:
        assert fits(value, hint), f"{where}: {value!r:.80} is not {hint}"


def fits(value: object, hint: Any) -> bool:
    """Whether a value may be of a type, looked at from outside."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kind = get_origin(hint) or hint
    return isinstance(value, (int, float) if kind is float else kind)


def test_pages_have_the_types_that_are_declared() -> None:
    text = "The unbelievable keys. They were lost!"
    found = explained(text, heads=None, importance=["blank_out", "input_gradient"])
    wide = af.Attention(np.full((2, 200, 200), 1 / 200), causal=False)
    pages = [
        describe_explanation(found),
        describe_explanation(af.explain(wide, methods=["raw", "rollout"])),
        describe_generation(random_generation()),
    ]
    for made in (*pages, describe_pair(af.compare(found, methods=("rollout", "flow")))):
        check_type(made, type(made), type(made).__name__)
    assert pages[0].methods[0].grouped is not None
    assert pages[1].methods[0].tiles is not None


def test_json_has_no_optional_part_that_is_none_and_keeps_other_nulls() -> None:
    made = describe_explanation(explained())
    data: dict[str, Any] = to_json(made)
    assert made.prompt is None
    assert "prompt" not in data
    assert data["normalize"] == "sum"
    assert data["picture"] is None  # whether there is one is always said
    assert data["tokens"] == made.tokens.tokens  # a part without a name of its own
    assert [("rows" in each, "computed" in each) for each in data["methods"]] == [
        (True, False),
        (False, True),
        (False, True),
        (True, False),
    ]
    assert "without" in data["methods"][1]["others"]
    assert "with" in data["methods"][1]["others"]


# ---- the picture of a vision model --------------------------------------------------------------


def test_a_page_shows_the_picture_that_the_explanation_keeps(tmp_path: Path) -> None:
    found = explained_image(tmp_path)
    assert found.picture is not None
    shown = describe_explanation(found).picture
    assert shown is not None
    assert (shown.down, shown.across, shown.patches) == (2, 2, (1, 2, 3, 4))
    content = base64.b64decode((shown.source or "").removeprefix("data:image/jpeg;base64,"))
    drawn = np.asarray(Image.open(io.BytesIO(content)), float) / 255
    grey = found.picture @ [0.299, 0.587, 0.114]
    assert drawn.shape == grey.shape == (shown.height, shown.width)
    assert np.abs(drawn - grey).mean() < 0.03
    assert "picture" not in str(describe_explanation(found).notes)


def test_patches_without_a_picture_are_a_grid_and_a_note(tmp_path: Path) -> None:
    made = describe_explanation(replace(explained_image(tmp_path), picture=None))
    assert made.picture is not None
    assert (made.picture.source, made.picture.width, made.picture.height) == (None, 64, 64)
    assert "its grid stands alone" in str(made.notes)


def explained_image(folder: Path) -> af.Explanation:
    """A file that a vision model saw, and that is gone since."""
    smooth = np.linspace(0, 255, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint8)
    path = folder / "picture.png"
    Image.fromarray(smooth).save(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(**sizes, intermediate_size=8, image_size=16, patch_size=8)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    model = af.Model(ViTForImageClassification(config), processor)
    found = af.explain(path, model=model, methods=["rollout"])
    path.unlink()
    return found
