"""The figures: files, artists that hold the right data, tokens that are only text, refusals."""

import inspect
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from PIL import Image

import attnflow as af
from attnflow import figures
from attnflow.analysis.evaluate.scored_example import ScoredExample
from attnflow.analysis.evaluate.yardsticks import Faithful
from attnflow.figures import Drawing
from attnflow.show import colours
from attnflow.show.figures import drawing, graph_parts, layout
from tests.explained import with_results
from tests.oracles import attention
from tests.show.drawings import HOSTILE

DEPTH, TOKENS = 3, ("[CLS]", "Ġthe", "▁keys", "##ing", "are")
SIZE = len(TOKENS)
WEIGHTS = attention("peaky", DEPTH, SIZE, np.random.default_rng(0))
GRAPH = af.AttentionGraph(WEIGHTS, tokens=TOKENS)
ROLLOUT = af.rollout(GRAPH)
PATCHES = ("[CLS]", "[REG0]", *(f"{row},{column}" for row in range(2) for column in range(3)))
VISION = af.raw(af.Attention(attention("flat", 2, 8, np.random.default_rng(1)), tokens=PATCHES))
PICTURE = np.random.default_rng(2).integers(0, 256, (20, 30, 3)).astype(np.uint8)
EXPLAINED_MODEL = af.explain("the key", importance=())  # what is drawn of it is put in by tests


def results_of(weights: Any, tokens: tuple[str, ...]) -> dict[str, af.TokenAttention]:
    given = af.Attention(weights, tokens=tokens)
    flows = af.flow(given, layers=range(1, given.depth + 1))
    return {"raw": af.raw(given), "rollout": af.rollout(given), "flow": flows}


def explained(
    tokens: tuple[str, ...] = TOKENS, weights: Any = WEIGHTS, position: int = 0
) -> af.Explanation:
    return with_results(
        EXPLAINED_MODEL,
        results_of(weights, tokens),
        text="$x$ is text",
        tokens=tokens,
        special=(False,) * len(tokens),
        position=position,
    )


def report(
    layers: tuple[int, ...] = (1, 2, 3), methods: tuple[str, ...] = ("raw", "rollout", "flow")
) -> af.Report:
    rng = np.random.default_rng(3)
    examples = tuple(
        ScoredExample(
            "t",
            "l",
            TOKENS,
            (False,) * SIZE,
            {name: rng.random((len(layers), SIZE)) for name in methods},
            {"blank_out": rng.random(SIZE)},
        )
        for _ in range(4)
    )
    return af.Report("m", methods, ("blank_out",), layers, examples)


def measured() -> af.Report:
    found = report()
    rng = np.random.default_rng(5)
    counts = dict.fromkeys(found.methods, len(found.layers)) | dict.fromkeys(found.baselines, 1)
    examples = [
        replace(
            example,
            faithful=(
                Faithful(
                    "unknown",
                    {"deletion": {name: rng.random(count) for name, count in counts.items()}},
                    {name: rng.random((count, 2, SIZE + 1)) for name, count in counts.items()},
                ),
            ),
        )
        for example in found.examples
    ]
    return replace(
        found, examples=tuple(examples), faithfulness=("deletion",), replacements=("unknown",)
    )


def story(
    prompt: tuple[str, ...] = TOKENS[:3], generated: tuple[str, ...] = ("are", "old", ".")
) -> af.Generation:
    size = len(prompt) + len(generated) - 1
    given = af.Attention(
        attention("causal", 2, size, np.random.default_rng(4)), tokens=[*prompt, *generated[:-1]]
    )
    return af.Generation("are old.", generated, (0.5,) * len(generated), prompt, given)


def edge_graphs(tokens: tuple[str, ...] = TOKENS) -> dict[str, af.AttentionGraph]:
    """Graphs of one input: attention with its residual, and edges of rows that sum to 2."""
    weights = attention("peaky", DEPTH, len(tokens), np.random.default_rng(5))
    inside = af.AttentionGraph(edges=2 * weights, tokens=tokens, edge_name="mine")
    return {"attention": af.AttentionGraph(weights, tokens=tokens), "mine": inside}


EXPLAINED = explained()
CHANGED = af.intervene("verb-number", "the keys", blank="keys")
FIGURES: dict[str, Callable[[], Drawing]] = {
    "layered_graph": lambda: figures.layered_graph(ROLLOUT, position=2),
    "compare_graphs": lambda: figures.compare_graphs(EXPLAINED),
    "heatmap": lambda: figures.heatmap(ROLLOUT, 1),
    "compare_heatmaps": lambda: figures.compare_heatmaps([EXPLAINED, EXPLAINED]),
    "pronoun": lambda: figures.pronoun(EXPLAINED, {"his": 0.7, "her": 0.3}, (2, 4)),
    "layer_curves": lambda: figures.layer_curves(report()),
    "deletion_curves": lambda: figures.deletion_curves(measured()),
    "generation": lambda: figures.generation(story(), 2),
    "compare_generations": lambda: figures.compare_generations([story().raw(), story().rollout()]),
    "bars": lambda: figures.bars(EXPLAINED, names=["rollout", "raw"]),
    "text": lambda: figures.text(EXPLAINED, names=["rollout", "raw"]),
    "edges": lambda: figures.edges(edge_graphs(), 2),
    "flow_paths": lambda: figures.flow_paths(af.max_flow(GRAPH, source=(3, 0), target=(0, 2))),
    "intervention": lambda: figures.intervention(CHANGED),
    "overlay": lambda: figures.overlay(VISION, PICTURE),
    "compare_overlays": lambda: figures.compare_overlays(
        with_results(EXPLAINED, {"raw": VISION}, tokens=PATCHES, picture=PICTURE / 255)
    ),
}


def texts_of(path: Path) -> list[str]:
    return [
        "".join(node.itertext())
        for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


def ticks(ax: Any, along: str = "x") -> list[str]:
    return [
        label.get_text()
        for label in (ax.get_xticklabels() if along == "x" else ax.get_yticklabels())
    ]


def ends_of(lines: Any) -> list[tuple[int, int, int]]:
    """(layer, query, key) of each line of a graph that goes up."""
    found = []
    for (query, layer), (key, below) in (
        segment.round().astype(int).tolist() for segment in lines.get_segments()
    ):
        assert below == layer - 1
        found.append((layer, query, key))
    return found


# ---- files and manners --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_written_as_png_svg_and_pdf(name: str, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    drawn = FIGURES[name]()
    assert dict(matplotlib.rcParams) == before
    assert isinstance(drawn.figure, Figure)
    assert all(ax.get_figure(root=True) is drawn.figure for ax in drawn.axes)
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        path = drawn.save(tmp_path / f"figure.{ending}")
        assert path.read_bytes().startswith(start)
    assert any(
        word in text
        for text in texts_of(tmp_path / "figure.svg")
        for word in ("layer", "token attention", "share of the darkest")
    )
    assert drawn._repr_png_().startswith(b"\x89PNG")
    assert repr(drawn).startswith("<Drawing: ")


def test_every_public_figure_is_tested_and_has_an_example() -> None:
    assert set(figures.__all__) == {*FIGURES, "Drawing", "save"}
    for name in figures.__all__:
        documented = inspect.getdoc(getattr(figures, name)) or ""
        assert ">>>" in documented, name
        _, _, parameters = documented.partition("Parameters\n----------\n")
        named = re.findall(r"^(\w+)$", parameters, re.MULTILINE)
        assert set(inspect.signature(getattr(figures, name)).parameters) <= set(named), name


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    for ending in ("png", "svg", "pdf"):
        one, two = (
            figures.heatmap(ROLLOUT, 1).save(tmp_path / f"{name}.{ending}")
            for name in ("one", "two")
        )
        assert one.read_bytes() == two.read_bytes()


def test_nothing_is_loaded_before_a_figure_is_drawn_and_pyplot_never(tmp_path: Path) -> None:
    program = """if True:
        import sys
        import attnflow as af, attnflow.figures as figures
        print("matplotlib" in sys.modules)
        figures.heatmap(af.raw([[[1.0]]]), 0).save(sys.argv[1])
        print("matplotlib.pyplot" in sys.modules)
    """
    command = [sys.executable, "-c", program, str(tmp_path / "figure.png")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


@pytest.mark.parametrize(
    "name", ["layered_graph", "heatmap", "generation", "flow_paths", "overlay"]
)
def test_a_figure_is_drawn_into_the_axes_given(name: str) -> None:
    ax = Figure().subplots()
    inputs: dict[str, Any] = {
        "layered_graph": (ROLLOUT,),
        "heatmap": (ROLLOUT,),
        "generation": (story(),),
        "flow_paths": (af.max_flow(GRAPH, source=(3, 0), target=(0, 2)),),
        "overlay": (VISION, PICTURE),
    }
    drawn = getattr(figures, name)(*inputs[name], ax=ax)
    assert drawn.axes == (ax,)
    assert drawn.figure is ax.figure
    with pytest.raises(
        af.OptionError, match="this drawing has 1 panel, one matplotlib Axes per panel; got 1: str"
    ):
        getattr(figures, name)(*inputs[name], ax="axes")


def test_figures_with_panels_take_as_many_axes() -> None:
    part: Any = np.ravel(np.asarray(Figure().subfigures(1, 2), dtype=object))[0]
    assert figures.compare_graphs(EXPLAINED, axes=part.subplots(1, 3)).figure is part.get_figure(
        root=True
    )
    assert len(figures.compare_heatmaps(EXPLAINED, axes=Figure().subplots(3, 1)).axes) == 3
    assert (
        len(
            figures.pronoun(
                EXPLAINED, {"a": 1.0, "b": 0.0}, (1, 2), axes=Figure().subplots(2, 2)
            ).axes
        )
        == 4
    )
    assert len(figures.layer_curves(report(), axes=Figure().subplots()).axes) == 1
    with pytest.raises(
        af.OptionError,
        match="this drawing has 3 panels, one matplotlib Axes per panel; got 2: Axes",
    ):
        figures.compare_graphs(EXPLAINED, axes=Figure().subplots(1, 2))


# ---- graphs -------------------------------------------------------------------------------------


def test_edges_show_the_values_by_width_and_opacity() -> None:
    drawn = figures.layered_graph(ROLLOUT)
    lines, largest = drawn.artists["edges"], ROLLOUT.values.max()
    edges = ends_of(lines)
    weights = np.array([ROLLOUT.at(query, layer)[key] for layer, query, key in edges])
    assert np.allclose(
        lines.get_linewidths(), graph_parts.choose_thickness(SIZE) * weights / largest
    )
    assert np.allclose(lines.get_colors()[:, 3], 0.04 + 0.96 * weights / largest)
    assert (np.diff(weights) >= 0).all()  # the strongest on top
    assert len(edges) == len(set(edges)) == (ROLLOUT.values > graph_parts.FAINTEST * largest).sum()
    assert len(drawn.artists["front"].get_segments()) == 0
    assert len(drawn.artists["nodes"].get_offsets()) == (DEPTH + 1) * SIZE
    assert ticks(drawn.axes[0]) == ["[CLS]", "the", "keys", "ing", "are"]
    assert ticks(drawn.axes[0], "y") == ["input", "1", "2", "3"]


@pytest.mark.parametrize("layer", [None, 2])
def test_the_edges_of_the_chosen_node_are_in_front(layer: int | None) -> None:
    drawn = figures.layered_graph(ROLLOUT, position=2, layer=layer)
    front, behind = drawn.artists["front"], drawn.artists["edges"]
    assert front.get_zorder() > behind.get_zorder()
    assert {query for _, query, _ in ends_of(front)} == {2}
    assert {each for each, _, _ in ends_of(front)} == ({1, 2, 3} if layer is None else {layer})
    assert not any(query == 2 and layer in (None, each) for each, query, _ in ends_of(behind))
    ink = colours.darken(colours.METHOD_COLOURS["rollout"])
    assert matplotlib.colors.to_hex(front.get_colors()[0]) == ink


def test_layers_go_right_if_asked() -> None:
    up, right = (figures.layered_graph(ROLLOUT, orientation=way) for way in ("up", "right"))
    turned = [segment[:, ::-1] for segment in right.artists["edges"].get_segments()]
    assert np.allclose(turned, up.artists["edges"].get_segments())
    assert ticks(right.axes[0], "y") == ticks(up.axes[0])
    assert right.axes[0].yaxis_inverted()  # the first token on top


def test_beyond_forty_tokens_the_strongest_edges_are_drawn_and_it_says_so() -> None:
    for size, drawn_edges in ((40, 1600), (41, 400)):
        result = af.raw(attention("uniform", 1, size, np.random.default_rng(0)))
        drawn = figures.layered_graph(result)
        assert len(drawn.artists["edges"].get_segments()) == drawn_edges
        assert ("strongest 400 of 1,681 edges" in drawn.axes[0].get_title()) == (size > 40)
    few = figures.layered_graph(ROLLOUT, strongest=4)
    weights = [ROLLOUT.at(query, layer)[key] for layer, query, key in ends_of(few.artists["edges"])]
    assert np.allclose(weights, np.sort(ROLLOUT.values.ravel())[-4:])


def test_a_graph_draws_the_layers_and_positions_that_there_are() -> None:
    some = figures.layered_graph(af.rollout(GRAPH, layers=[3, 2], positions=[4, 1]))
    assert {layer for layer, _, _ in ends_of(some.artists["edges"])} == {2, 3}
    assert {query for _, query, _ in ends_of(some.artists["edges"])} == {1, 4}
    assert ticks(some.axes[0], "y") == ["1", "2", "3"]
    assert {
        layer
        for layer, _, _ in ends_of(
            figures.layered_graph(af.raw(GRAPH, layers=[3])).artists["edges"]
        )
    } == {3}
    assert {
        layer
        for layer, _, _ in ends_of(
            figures.layered_graph(af.rollout(GRAPH, bottom=1, layers=[2])).artists["edges"]
        )
    } == {2}
    with pytest.raises(
        af.OptionError,
        match=r"a graph needs neighbouring layers; this result has layers 3 down to layer 0:",
    ):
        figures.layered_graph(af.flow(GRAPH))


def test_compared_graphs_share_one_scale() -> None:
    drawn = figures.compare_graphs(EXPLAINED, position=1, orientation="up")
    others = [0, 2, 3, 4]  # the edge to itself holds the residual
    largest = max(result.values[:, 1, others].max() for result in EXPLAINED.results.values())
    for name, result in EXPLAINED.results.items():
        lines = drawn.artists[name]["edges"]
        weights = np.array([result.at(query, layer)[key] for layer, query, key in ends_of(lines)])
        shares = np.minimum(weights / largest, 1.0)  # what is wider behind is not the subject
        assert np.allclose(lines.get_linewidths(), graph_parts.choose_thickness(SIZE) * shares)
        assert {query for _, query, _ in ends_of(drawn.artists[name]["front"])} == {1}
    assert [ax.get_title() for ax in drawn.axes] == [
        "raw attention",
        "attention rollout",
        "attention flow",
    ]


def test_paths_carry_the_flow_and_the_cut_is_marked() -> None:
    best = af.max_flow(GRAPH, source=(3, 1), target=(1, 2))
    drawn = figures.flow_paths(best)
    flows = np.array(
        [best.edges[layer - 2, query, key] for layer, query, key in ends_of(drawn.artists["edges"])]
    )
    assert (flows > 0).all()
    shares = flows / best.edges.max()
    assert np.allclose(
        drawn.artists["edges"].get_linewidths(),
        graph_parts.choose_thickness(SIZE) * (0.25 + 0.75 * shares),
    )
    assert tuple(ends_of(drawn.artists["cut"])) == best.cut
    assert drawn.artists["ends"].get_offsets().tolist() == [[1, 3], [2, 1]]
    assert f"maximum flow {best.value:.3g}" in drawn.axes[0].get_title()
    assert "from the in layer 3 to keys in layer 1" in drawn.axes[0].get_title()
    legend: Any = drawn.axes[0].get_legend()
    assert f"minimum cut ({len(best.cut)} edge" in legend.get_texts()[1].get_text()
    together = figures.flow_paths(af.max_flow(GRAPH, source=(3, 1), target=(1, [2, 0])))
    assert together.artists["ends"].get_offsets().tolist() == [[1, 3], [2, 1], [0, 1]]


# ---- maps ---------------------------------------------------------------------------------------


def test_a_heat_map_has_layers_up_and_tokens_across() -> None:
    drawn = figures.heatmap(af.rollout(GRAPH, layers=[3, 1]), 2)
    shown = drawn.artists["map"]
    assert np.allclose(shown.get_array(), [ROLLOUT.at(2, 1), ROLLOUT.at(2, 3)])
    assert shown.get_clim() == (0.0, shown.get_array().max())
    assert ticks(drawn.axes[0], "y") == ["1", "3"]
    assert ticks(drawn.axes[0]) == ["[CLS]", "the", "keys", "ing", "are"]
    assert [label.get_fontweight() for label in drawn.axes[0].get_xticklabels()].index("bold") == 2
    assert drawn.artists["bar"].mappable is shown
    scaled = figures.heatmap(ROLLOUT, 2, scale=0.1).artists
    assert scaled["map"].get_clim() == (0.0, 0.1)
    assert scaled["bar"].extend == "max"


def test_a_heat_map_of_words_and_of_the_default_position() -> None:
    words = af.rollout(af.Attention(WEIGHTS, tokens=TOKENS, words=[None, 0, 1, 1, 2])).by_word()
    assert ticks(figures.heatmap(words, 4).axes[0]) == ["[CLS]", "the", "keysing", "are"]
    causal = af.rollout(af.Attention(attention("causal", 2, 4, np.random.default_rng(0))))
    assert np.allclose(figures.heatmap(causal).artists["map"].get_array()[1], causal.at(3, 2))


@pytest.mark.parametrize("size", [5, 20])
def test_compared_maps_have_one_scale_for_all(size: int) -> None:
    weights = attention("peaky", 2, size, np.random.default_rng(0))
    long = explained(tuple(f"t{place}" for place in range(size)), weights, position=3)
    drawn = figures.compare_heatmaps([EXPLAINED, long], [4, 3])
    for name in af.METHODS:
        first, second = drawn.artists[name]
        assert np.allclose(
            first.get_array(), [EXPLAINED.results[name].at(4, layer) for layer in (1, 2, 3)]
        )
        assert np.allclose(
            second.get_array(), [long.results[name].at(3, layer) for layer in (1, 2)]
        )
    limits = {image.get_clim() for name in af.METHODS for image in drawn.artists[name]}
    assert limits == {
        (0.0, max(image.get_array().max() for name in af.METHODS for image in drawn.artists[name]))
    }
    assert len(drawn.axes) == 6
    assert [text for ax in drawn.axes for text in ticks(ax)].count("t3") == (3 if size == 5 else 1)


def test_a_pronoun_has_its_probabilities_beside_its_references() -> None:
    drawn = figures.pronoun(
        [EXPLAINED] * 2,
        [{"his": 0.7, "her": 0.3}, {"his": 0.2, "her": 0.8}],
        [(2, 4), (4, 1)],
        position=3,
    )
    assert [[bar.get_height() for bar in bars] for bars in drawn.artists["bars"]] == [
        [0.7, 0.3],
        [0.2, 0.8],
    ]
    for name, result in EXPLAINED.results.items():
        for image, pair in zip(drawn.artists[name], ([2, 4], [4, 1]), strict=True):
            assert np.allclose(
                image.get_array(), [result.at(3, layer)[pair] for layer in (1, 2, 3)]
            )
    assert [ticks(ax) for ax in drawn.axes[:2]] == [["his", "her"], ["keys", "are"]]
    assert ticks(drawn.axes[5]) == ["are", "the"]


def test_generated_tokens_stand_down_and_the_prompt_across() -> None:
    told = story()
    for given, layer in ((told, None), (told.rollout(), 2)):
        drawn = figures.generation(given, layer)
        assert np.allclose(drawn.artists["map"].get_array(), told.rollout().values[:, :, 1])
        assert ticks(drawn.axes[0], "y") == ["are", "old", "."]
        assert ticks(drawn.axes[0]) == ["[CLS]", "the", "keys"]
    raw = figures.generation(told, 1, method="raw")
    assert np.allclose(raw.artists["map"].get_array(), told.raw().values[:, :, 0])
    filtered = told.rollout().filtered(words=["the"], punctuation=False)
    assert ticks(figures.generation(filtered).axes[0]) == ["[CLS]", "keys"]


def test_curves_are_the_means_with_their_errors() -> None:
    found = report()
    for band in ("error", "std"):
        drawn = figures.layer_curves(found, band=band)
        for _, method, layer, mean, deviation, n, undefined in found.rows():
            line, shade = drawn.artists["blank_out"][method]
            place = list(line.get_xdata()).index(layer)
            assert line.get_ydata()[place] == pytest.approx(mean)
            half = deviation / (np.sqrt(n - undefined) if band == "error" else 1)
            edge = shade.get_paths()[0].vertices
            assert edge[edge[:, 0] == layer, 1].max() == pytest.approx(mean + half)
            assert edge[edge[:, 0] == layer, 1].min() == pytest.approx(mean - half)
    lines = [drawn.artists["blank_out"][method][0] for method in found.methods]
    assert (
        len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 3
    )
    assert "n = 4" in drawn.figure.legends[0].get_title().get_text()


def test_curves_of_one_layer_and_of_a_scorer_without_layers() -> None:
    one = figures.layer_curves(report(layers=(2,)))
    assert (
        len({float(one.artists["blank_out"][method][0].get_xdata()[0]) for method in af.METHODS})
        == 3
    )  # side by side
    mixed = replace(report(methods=("raw", "mine_$x")), scorers=("mine_$x",))
    for example in mixed.examples:
        example.scores["mine_$x"] = example.scores["mine_$x"][:1]
    line, _ = figures.layer_curves(mixed).artists["blank_out"]["mine_$x"]
    assert list(line.get_xdata()) == [1, 3]
    assert len(set(line.get_ydata())) == 1


def test_edges_are_drawn_side_by_side_on_one_scale(tmp_path: Path) -> None:
    graphs = edge_graphs()
    drawn = figures.edges(graphs, 2)
    assert list(drawn.artists) == ["attention", "mine", "bar"]
    others = ~np.eye(SIZE, dtype=bool)
    largest = max(graph.layer_edges(2)[others].max() for graph in graphs.values())
    for name, graph in graphs.items():
        np.testing.assert_array_equal(drawn.artists[name].get_array(), graph.edges[1])
        assert drawn.artists[name].get_clim() == (0.0, largest)
    assert drawn.artists["bar"].extend == "max"  # the residual lies beyond
    left, right = drawn.axes
    assert left.get_position().y0 == right.get_position().y0
    assert (left.get_title(), right.get_title()) == ("attention", "mine")
    assert ticks(left, "y") == ticks(left) == ticks(right) == ["[CLS]", "the", "keys", "ing", "are"]
    assert ticks(right, "y") == []
    assert "edges of layer 2" in texts_of(drawn.save(tmp_path / "edges.svg"))
    assert figures.edges(graphs, scale=7).artists["mine"].get_clim() == (0.0, 7.0)
    top = figures.edges(graphs).artists["attention"].get_array()
    np.testing.assert_array_equal(top, graphs["attention"].edges[-1])
    axes = Figure().subplots(2, 1)
    assert figures.edges(graphs, 1, axes=axes).axes == tuple(axes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 3, 13, 45, 200])
def test_maps_of_edges_have_their_tokens_and_room(count: int, size: int) -> None:
    graph = af.AttentionGraph(
        attention("peaky", 1, size, np.random.default_rng(6)),
        tokens=[f"{place:W>9}" for place in range(size)],
    )
    drawn = figures.edges({f"kind {number}": graph for number in range(count)})
    drawn.figure.draw_without_rendering()
    boxes = [ax.get_window_extent() for ax in drawn.axes]
    assert len({round(box.y0) for box in boxes}) <= max(1, count - 1)  # some side by side
    for number, (ax, box) in enumerate(zip(drawn.axes, boxes, strict=True)):
        assert 0.5 < box.width / box.height < 2.0  # nearly square
        assert not any(box.overlaps(other) for other in boxes[:number])
        for labels, side in ((ax.get_xticklabels(), "x0"), (ax.get_yticklabels(), "y0")):
            places = [getattr(label.get_window_extent(), side) for label in labels]
            if len(places) > 1:
                assert np.abs(np.diff(places)).min() > 0.9 * drawing.FONT * 100 / 72
    lowest = [ax for ax, box in zip(drawn.axes, boxes, strict=True) if box.y0 == boxes[-1].y0]
    assert all(len(ticks(ax)) >= min(size, 13) for ax in lowest)
    assert len(ticks(drawn.axes[0], "y")) >= min(size, 13)


# ---- pictures -----------------------------------------------------------------------------------


def test_patches_lie_over_the_picture_and_registers_are_named_below(tmp_path: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    for image in (
        PICTURE,
        Image.fromarray(PICTURE),
        tmp_path / "picture.png",
        str(tmp_path / "picture.png"),
        PICTURE / 255,
        PICTURE[..., 0],
    ):
        drawn = figures.overlay(VISION, image, layer=1)
        assert np.allclose(drawn.artists["map"].get_array(), VISION.at(0, 1)[2:].reshape(2, 3))
        assert (
            drawn.artists["map"].get_extent()
            == drawn.artists["image"].get_extent()
            == [-0.5, 29.5, 19.5, -0.5]
        )
        assert drawn.artists["image"].get_array().shape[:2] == (20, 30)
        cls, register = VISION.at(0, 1)[:2]
        assert drawn.axes[0].get_xlabel() == f"[CLS] {cls:.3f}, [REG0] {register:.3f}"


def test_patches_are_found_by_name_or_by_grid() -> None:
    shuffled = replace(
        VISION, tokens=(*PATCHES[2:], *PATCHES[:2]), values=np.roll(VISION.values, -2, axis=-1)
    )
    expected = VISION.at(0)[2:].reshape(2, 3)
    assert np.allclose(figures.overlay(shuffled, PICTURE).artists["map"].get_array(), expected)
    unnamed = replace(VISION, tokens=tuple("abcdefgh"))
    assert np.allclose(
        figures.overlay(unnamed, PICTURE, grid=(2, 3)).artists["map"].get_array(), expected
    )
    for result, options, message in (
        (unnamed, {}, r"these tokens name no patches \('0,0', '0,1', ...\); give grid="),
        (unnamed, {"grid": (3, 3)}, "at most 8 patches, as many as there are tokens; got"),
        (unnamed, {"grid": (0, 3)}, "grid must be"),
        (
            VISION,
            {"grid": (3, 2)},
            r"the tokens name 6 patches of a grid of 2 x 3; got grid=\(3, 2\)",
        ),
        (VISION, {"opacity": 2}, "opacity must be from 0 to 1; got 2"),
    ):
        with pytest.raises(af.OptionError, match=message):
            figures.overlay(result, PICTURE, **options)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            np.zeros((30, 20, 3)),
            r"must fit the grid of 2 x 3 patches \(down x across\); got 30 x 20 pixels",
        ),
        (np.zeros((1, 2, 3)), "got 1 x 2 pixels"),
        (
            np.zeros((3, 20, 30)),
            r"must have shape \[height, width\] or \[height, width, 3\]; got \(3, 20, 30\)",
        ),
        (np.full((20, 30), np.nan), "floats from 0 to 1"),
        (np.full((20, 30, 3), -1.5), "floats from 0 to 1"),
        (["words"], r"must have shape \[height, width\]"),
        (None, r"must have shape \[height, width\]"),
    ],
)
def test_pictures_that_do_not_fit(image: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        figures.overlay(VISION, image)


def test_pictures_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(af.FileError, match="as an image: No such file"):
        figures.overlay(VISION, tmp_path / "none.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(af.FileError, match=r"cannot read .*text.png as an image"):
        figures.overlay(VISION, tmp_path / "text.png")
    with pytest.raises(af.FileError, match="as an image"):
        figures.overlay(VISION, tmp_path)


# ---- tokens are text ----------------------------------------------------------------------------


def test_labels_are_short_and_readable() -> None:
    shown = dict(zip(HOSTILE, layout.label_tokens(HOSTILE), strict=True))
    assert shown["</script><img src=x onerror=alert(1)>"] == "</script><img s…"
    assert shown["$x^2$"] == "$x^2$"
    assert shown["_"] == "_"
    assert shown["one\ntwo\ttabs"] == "one\\ntwo\\ttabs"
    assert [shown["\u200b"], shown["\x00"], shown["\ud800"], shown["  "]] == [
        "\\u200b",
        "\\x00",
        "\\ud800",
        "␣",
    ]
    assert shown["\u202eturned"] == "\\u202eturned"
    assert shown["\u4e2d\u6587"] == "\\u4e2d\\u6587"  # what the font lacks
    assert shown["\u05e9\u05dc\u05d5\u05dd"] == "\u05e9\u05dc\u05d5\u05dd"
    assert shown["x" * 10_000] == "x" * 15 + "…"
    assert all(len(text) <= layout.LABEL_LENGTH for text in shown.values())
    assert layout.label_tokens(["\u4e2d" * 5]) == [
        "\\u4e2d\\u4e2d…"
    ]  # an escape is never cut in two


def test_a_font_that_the_user_adds_draws_what_it_has() -> None:
    assert FontProperties().get_family() == ["sans-serif"]
    with matplotlib.rc_context({"font.family": ["cmr10"]}):
        assert layout.label_tokens(["a\u05e9"]) == ["a\\u05e9"]
    with matplotlib.rc_context({"font.family": ["cmr10", "DejaVu Sans"]}):
        assert layout.label_tokens(["a\u05e9"]) == ["a\u05e9"]


@pytest.mark.filterwarnings("ignore::attnflow.SaturationWarning")
def test_hostile_tokens_are_only_text(tmp_path: Path) -> None:
    size = len(HOSTILE)
    weights = attention("flat", 2, size, np.random.default_rng(0))
    hostile = explained(HOSTILE, weights, position=1)
    shown = {text for text in layout.label_tokens(HOSTILE) if text}
    prompt = af.PromptAttention(np.full((size, size, 1), 0.1), "rollout", HOSTILE, HOSTILE, (1,))
    drawings = {
        "graph": figures.layered_graph(hostile.results["rollout"], position=1),
        "right": figures.layered_graph(hostile.results["rollout"], position=0, orientation="right"),
        "heat": figures.heatmap(hostile.results["rollout"], 2),
        "maps": figures.compare_heatmaps(hostile),
        "story": figures.generation(prompt),
        "edges": figures.edges({"mine": af.AttentionGraph(weights, tokens=HOSTILE)}),
        "paths": figures.flow_paths(
            af.max_flow(af.Attention(weights, tokens=HOSTILE), source=(2, 0), target=(0, 2))
        ),
    }
    for name, drawn in drawings.items():
        for ending in ("png", "pdf"):
            drawn.save(tmp_path / f"{name}.{ending}")
        texts = texts_of(drawn.save(tmp_path / f"{name}.svg"))
        assert shown <= set(texts), name
        assert "<img" not in (tmp_path / f"{name}.svg").read_text()
        width, height = drawn.figure.get_size_inches()
        assert width <= layout.PAGE
        assert height < 10
    bars = figures.pronoun(hostile, {"$x$": 0.5, "\u4e2d</text>": 0.5}, (0, 1))
    assert {"$x$", "\\u4e2d</text>", "$x$ is text"} <= set(
        texts_of(bars.save(tmp_path / "pronoun.svg"))
    )


@pytest.mark.parametrize(
    ("size", "length"), [(5, 3), (5, 16), (12, 8), (16, 16), (40, 16), (80, 5), (300, 5)]
)
def test_labels_do_not_overlap(size: int, length: int) -> None:
    tokens = [f"{place:W>{length}}" for place in range(size)]
    result = af.raw(
        af.Attention(attention("identity", 2, size, np.random.default_rng(0)), tokens=tokens)
    )
    for drawn in (
        figures.layered_graph(result),
        figures.heatmap(result, 0),
        figures.layered_graph(result, orientation="right"),
    ):
        drawn.figure.draw_without_rendering()
        ax = drawn.axes[0]
        labels = [
            label
            for label in (*ax.get_xticklabels(), *ax.get_yticklabels())
            if label.get_text().startswith("W")
        ]
        assert len(labels) >= min(size, 40)
        turn = labels[1].get_rotation()
        boxes = [label.get_window_extent() for label in labels]
        along = "y" if labels[0] in ax.get_yticklabels() else "x"
        starts = np.array(
            [getattr(box, f"{along}1" if along == "x" else f"{along}0") for box in boxes]
        )
        apart = np.abs(np.diff(starts)).min() * (np.sin(np.radians(turn)) if turn else 1.0)
        across = boxes[1].width if along == "x" and turn == 0 else drawing.FONT * 100 / 72
        assert apart >= 0.95 * across, (turn, along)


# ---- what is refused ----------------------------------------------------------------------------


def test_results_of_another_shape_than_their_tokens() -> None:
    fewer = replace(ROLLOUT, tokens=TOKENS[:-1])
    for draw in (
        figures.layered_graph,
        figures.heatmap,
        lambda result: figures.overlay(result, PICTURE),
    ):
        with pytest.raises(
            af.OptionError,
            match=r"shape \(3, 5, 4\), for 3 layers, 5 positions and 4 tokens; got \(3, 5, 5\)",
        ):
            draw(fewer)
    with pytest.raises(af.OptionError, match="must have shape"):
        figures.compare_graphs(with_results(EXPLAINED, {"mine": fewer}))
    with pytest.raises(
        af.OptionError, match="an explanation's results must have its 4 tokens; raw has 5"
    ):
        figures.compare_heatmaps(replace(EXPLAINED, tokens=TOKENS[:-1]))
    with pytest.raises(af.OptionError, match="must have shape"):
        figures.generation(replace(story().rollout(), prompt=("a",)))
    with pytest.raises(af.OptionError, match="must have shape"):
        figures.flow_paths(replace(af.max_flow(GRAPH, source=(3, 0), target=(0, 2)), tokens=("a",)))
    with pytest.raises(af.OptionError, match="must be finite"):
        figures.heatmap(replace(ROLLOUT, values=ROLLOUT.values * np.nan))
    with pytest.raises(af.OptionError, match="got words as keys: draw it before by_word"):
        figures.layered_graph(af.rollout(af.Attention(WEIGHTS, words=[0, 0, 1, 1, 2])).by_word())


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: figures.heatmap(ROLLOUT, 9),
            "position 9 was not computed; this result has positions 0..4",
        ),
        (lambda: figures.layered_graph(ROLLOUT, position=9), "position 9 was not computed"),
        (
            lambda: figures.layered_graph(ROLLOUT, position=1, layer=7),
            "layer must be one of 1..3, those of this result; got 7",
        ),
        (
            lambda: figures.layered_graph(ROLLOUT, layer=2),
            "layer chooses a node together with position",
        ),
        (
            lambda: figures.layered_graph(ROLLOUT, orientation="down"),
            "unknown orientation 'down'; choose from up, right",
        ),
        (
            lambda: figures.layered_graph(ROLLOUT, strongest=0),
            "strongest must be a whole number, at least 1; got 0",
        ),
        (
            lambda: figures.layered_graph(ROLLOUT, strongest=1.5),  # type: ignore[arg-type]
            "strongest must be a whole number, at least 1; got 1.5",
        ),
        (lambda: figures.heatmap(ROLLOUT, scale=0), "scale must be a number above 0"),
        (lambda: figures.compare_graphs(EXPLAINED, position=8), "position 8 was not computed"),
        (
            lambda: figures.compare_heatmaps([EXPLAINED], [1, 2]),
            "position must be one number, or one per explanation, here 1; got 2",
        ),
        (
            lambda: figures.overlay(VISION, PICTURE, layer=4),
            "layer must be one of 1, 2, those of this result; got 4",
        ),
        (
            lambda: figures.generation(story(), 5),
            "layer must be one of 1, 2, those of this result; got 5",
        ),
        (
            lambda: figures.generation(story(), method="rolout"),
            "unknown method 'rolout'; choose from raw, rollout, flow",
        ),
        (
            lambda: figures.layer_curves(report(), band="wide"),
            "unknown band 'wide'; choose from error, std",
        ),
        (lambda: figures.pronoun(EXPLAINED, {"his": 1.5}, (1, 2)), "from 0 to 1; got"),
        (
            lambda: figures.pronoun(EXPLAINED, {"his": 1.0}, (1, 9)),
            r"references must be two positions from 0 to 4; got \(1, 9\)",
        ),
        (
            lambda: figures.pronoun([EXPLAINED], [], (1, 2)),
            "words must be one dict per explanation, here 1; got 0",
        ),
        (lambda: figures.pronoun(EXPLAINED, {"his": 1.0}, ()), r"references must be two positions"),
        (
            lambda: figures.heatmap(WEIGHTS),  # type: ignore[arg-type]
            "draws a TokenAttention, which raw, rollout and flow give; got ndarray",
        ),
        (
            lambda: figures.compare_graphs(ROLLOUT),  # type: ignore[arg-type]
            "draws what explain gives, one or a list; got TokenAttention",
        ),
        (
            lambda: figures.compare_graphs([EXPLAINED] * 2),  # type: ignore[arg-type]
            "compare_graphs draws one explanation; got 2",
        ),
        (lambda: figures.compare_heatmaps([]), "draws what explain gives"),
        (
            lambda: figures.layer_curves(ROLLOUT),  # type: ignore[arg-type]
            "layer_curves draws what evaluate gives; got TokenAttention",
        ),
        (
            lambda: figures.flow_paths(ROLLOUT),  # type: ignore[arg-type]
            "flow_paths draws what max_flow gives; got TokenAttention",
        ),
        (
            lambda: figures.generation(ROLLOUT),  # type: ignore[arg-type]
            "generation draws what generate gives",
        ),
        (
            lambda: figures.edges({}),
            r"edges draws graphs by name, \{'norm': attention_graph\(.*\)\}; got dict",
        ),
        (lambda: figures.edges({"raw": ROLLOUT}), "got TokenAttention"),  # type: ignore[dict-item]
        (lambda: figures.edges([GRAPH]), "edges draws graphs by name"),  # type: ignore[arg-type]
        (lambda: figures.edges(edge_graphs(), 0), "layer must be from 1 to 3; got 0"),
        (lambda: figures.edges(edge_graphs(), 4), "layer must be from 1 to 3; got 4"),
        (lambda: figures.edges(edge_graphs(), scale=0), "scale must be a number above 0"),
        (
            lambda: figures.edges(edge_graphs() | {"other": edge_graphs(TOKENS[:4])["mine"]}),
            "must be of one input and one model; other has 3 layers and 4 positions",
        ),
        (
            lambda: figures.edges(edge_graphs(), axes=Figure().subplots(1, 3)),
            "this drawing has 2 panels, one matplotlib Axes per panel; got 3",
        ),
        (
            lambda: figures.save("figure", "figure.png"),  # type: ignore[arg-type]
            "save takes a figure or what a drawing returned; got str",
        ),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_line(draw: Callable[[], Any], message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        draw()
    assert "\n" not in str(error.value)


def test_where_a_figure_cannot_be_written(tmp_path: Path) -> None:
    drawn = figures.heatmap(ROLLOUT, 1)
    with pytest.raises(af.FileError, match=r"the ending must be one of .png, .svg, .pdf; got .gif"):
        drawn.save(tmp_path / "figure.gif")
    with pytest.raises(af.FileError, match=r"the ending must be one of .png, .svg, .pdf; got none"):
        figures.save(drawn, tmp_path / "figure")
    with pytest.raises(af.FileError, match=r"the folder .*nowhere does not exist"):
        figures.save(drawn.figure, tmp_path / "nowhere" / "figure.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FIGURES)
def test_without_matplotlib_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        af.MissingExtraError, match=r"figures need matplotlib: pip install 'attnflow\[figures\]'"
    ):
        FIGURES[name]()


def test_attention_graph_is_the_old_name_of_layered_graph() -> None:
    with pytest.warns(
        FutureWarning, match=r"figures\.attention_graph is now figures\.layered_graph"
    ):
        assert figures.attention_graph is figures.layered_graph
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = figures.nothing
