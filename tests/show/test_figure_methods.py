"""Figures of any number of methods, of any names: their data, their looks, their files."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import attnflow as af
from attnflow import figures
from attnflow.core.provenance import Source
from attnflow.figures import Drawing
from attnflow.show import colours
from attnflow.show.figures import graph_parts, layout, panels
from tests.explained import with_results
from tests.oracles import attention
from tests.show.drawings import light, read_texts

DEPTH = 3
NAMES = ("raw", "contribution rollout", "a$b_{$", "<b>&", "_mine\n\x00\u4e2d", "very long " * 30)
COUNTS = (1, 2, 4, 6)
SIZES = (6, 15, 30)
BASE = af.explain("the key", importance=())  # what is drawn of it is put in by each test
SOURCE = Source("verb-number", "0a1b2c3d", {"attnflow": "0.3"}, method="rollout", residual=0.5)


def explained(count: int, size: int, position: int = 1) -> af.Explanation:
    """An explanation with so many methods, each with values of its own."""
    rng = np.random.default_rng(count)
    tokens = tuple(f"token{place}" for place in range(size))
    several = {
        name: af.rollout(af.Attention(attention("flat", DEPTH, size, rng), tokens=tokens))
        for name in NAMES[:count]
    }
    marks = (False,) * size
    return with_results(BASE, several, tokens=tokens, special=marks, position=position)


class Table(af.Report):
    """A report whose rows are known: means and deviations by method and layer."""

    def rows(self) -> Iterator[tuple[str, str, int | None, float, float, int, int]]:
        rng = np.random.default_rng(len(self.methods))
        for against in self.against:
            for method in self.methods:
                for layer in [None] if method.startswith("scorer") else self.layers:
                    yield against, method, layer, rng.random(), rng.random(), 9, 0


def list_texts(drawn: Drawing) -> Iterator[Text]:
    """The titles, labels and numbers of a figure that can be seen."""
    for ax in drawn.axes:
        yield from (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts)
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = axis.get_major_ticks()
            yield from (tick.label1 for tick in ticks if low <= tick.get_loc() <= high)
    for legend in drawn.figure.legends:
        yield from (legend.get_title(), *legend.get_texts())


def check_texts(drawn: Drawing) -> None:
    """No text hides another one, or leaves the figure; tilted labels are tested elsewhere."""
    drawn.figure.draw_without_rendering()
    shown = [
        text
        for text in list_texts(drawn)
        if text.get_text() and text.get_visible() and text.get_rotation() != 45
    ]
    assert shown
    whole = drawn.figure.bbox.padded(1)
    boxes = [(text, text.get_window_extent()) for text in shown]
    for text, box in boxes:
        assert whole.contains(*box.min), text
        assert whole.contains(*box.max), text
    for (one, first), (other, second) in combinations(boxes, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        down = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert min(across, down) <= 2, (one, other)


def read_chunks(path: Path) -> dict[Any, Any]:
    """The text chunks of a PNG file."""
    with Image.open(path) as image:
        return dict(image.info)


# ---- data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_heat_maps_of_every_method(count: int, size: int) -> None:
    explanation = explained(count, size)
    drawn = figures.compare_heatmaps([explanation, explanation], [1, 2])
    assert list(drawn.artists) == [*NAMES[:count], "bar"]
    assert len(drawn.axes) == 2 * count
    for name, result in explanation.results.items():
        for image, position in zip(drawn.artists[name], (1, 2), strict=True):
            np.testing.assert_array_equal(image.get_array(), result.values[:, position])
    limits = {image.get_clim() for name in NAMES[:count] for image in drawn.artists[name]}
    assert len(limits) == 1
    check_texts(drawn)


@pytest.mark.parametrize("orientation", ["up", "right"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_graphs_of_every_method(count: int, size: int, orientation: str) -> None:
    explanation = explained(count, size)
    drawn = figures.compare_graphs(explanation, orientation=orientation)
    assert list(drawn.artists) == [*NAMES[:count], "key"]
    others = [place for place in range(size) if place != 1]
    largest = max(result.values[:, 1][:, others].max() for result in explanation.results.values())
    thick = graph_parts.choose_thickness(size)
    for name, result in explanation.results.items():
        lines = drawn.artists[name]["edges"]
        segments = np.array(lines.get_segments()).round().astype(int)  # [edge, end, 2]
        if orientation == "right":
            segments = segments[:, :, ::-1]
        queries, layers, keys = segments[:, 0, 0], segments[:, 0, 1], segments[:, 1, 0]
        weights = result.values[layers - 1, queries, keys]
        shares = np.minimum(weights / largest, 1.0)
        np.testing.assert_allclose(lines.get_linewidths(), thick * shares)
        front = drawn.artists[name]["front"]
        colour = colours.darken(colours.choose_look(name, NAMES).colour)
        assert {to_hex(edge) for edge in front.get_colors()} == {colour.lower()}
        assert len(front.get_segments()) == DEPTH * size
    check_texts(drawn)


@pytest.mark.parametrize("orientation", ["up", "right"])
@pytest.mark.parametrize(("count", "size"), [(4, 45), (3, 60), (6, 60)])
def test_graphs_of_many_tokens_say_what_is_left_out(
    count: int, size: int, orientation: str
) -> None:
    left_out = [0, size - 2, size - 1]
    drawn = figures.compare_graphs(
        explained(count, size), orientation=orientation, exclude=left_out
    )
    for ax in drawn.axes:
        said = " ".join(ax.get_title().split())
        note = f"strongest 400 of {3 * size * (size - 3):,} edges, and all of position 1"
        assert note in said or len(ax.get_title()) > 100  # a name of many words is cut
        assert "not drawn: token0" in said
    width, height = drawn.figure.get_size_inches()
    assert 0.4 < width / height < 2.5
    check_texts(drawn)


@pytest.mark.parametrize("count", COUNTS)
def test_pronouns_by_every_method(count: int) -> None:
    explanation = explained(count, 6)
    chances = {"his": 0.7, "$her$": 0.3}
    drawn = figures.pronoun([explanation] * 2, [chances] * 2, [(2, 4), (5, 0)])
    assert len(drawn.axes) == 2 * (1 + count)
    for name, result in explanation.results.items():
        for image, pair in zip(drawn.artists[name], ([2, 4], [5, 0]), strict=True):
            np.testing.assert_array_equal(image.get_array(), result.values[:, 1][:, pair])
    check_texts(drawn)


@pytest.mark.parametrize("against", [("blank_out",), ("blank_out", "a$b$"), tuple("abcd")])
@pytest.mark.parametrize("count", COUNTS)
def test_curves_of_every_method(count: int, against: tuple[str, ...]) -> None:
    report = Table("m", (*NAMES[:count], "scorer $x$"), against, (1, 2, 3), ())
    drawn = figures.layer_curves(report, band="std")
    rows = list(report.rows())
    for name in against:
        assert list(drawn.artists[name]) == list(report.methods)
        for method in report.methods:
            line, band = drawn.artists[name][method]
            means = [row[3] for row in rows if row[:2] == (name, method)]
            np.testing.assert_array_equal(line.get_ydata(), means * (1 if len(means) > 1 else 2))
            highest = max(row[3] + row[4] for row in rows if row[:2] == (name, method))
            assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(highest)
    assert list(drawn.artists[against[0]]["scorer $x$"][0].get_xdata()) == [1, 3]
    assert len(drawn.figure.legends[0].get_texts()) == count + 1
    check_texts(drawn)


def test_curves_of_one_layer_stand_side_by_side_within_the_axes() -> None:
    report = Table("m", (*map(str, range(30)), "scorer"), ("blank_out",), (5,), ())
    curves = figures.layer_curves(report).artists["blank_out"]
    places = [float(curves[str(method)][0].get_xdata()[0]) for method in range(30)]
    assert len(set(places)) == 30
    assert 4.5 < min(places) < max(places) < 5.5
    assert list(curves["scorer"][0].get_xdata()) == [4.5, 5.5]


def test_curves_of_scorers_alone_and_of_layers_in_any_order() -> None:
    alone = figures.layer_curves(Table("m", ("scorer",), ("blank_out",), (), ()))
    assert len(alone.artists["blank_out"]["scorer"][0].get_xdata()) == 2
    turned = figures.layer_curves(Table("m", ("raw",), ("blank_out",), (6, 2, 4), ()))
    assert list(turned.artists["blank_out"]["raw"][0].get_xdata()) == [2, 4, 6]


# ---- looks --------------------------------------------------------------------------------------


def test_methods_are_told_apart_by_colour_and_without_colour() -> None:
    names = ["raw", *map(str, range(20)), "flow", "rollout"]
    looks = [colours.choose_look(name, names) for name in names]
    assert len({(look.marker, look.line) for look in looks}) == len(names)
    few = [colours.choose_look(name, names[:6]) for name in names[:6]]
    assert len({look.marker for look in few}) == len({look.line for look in few}) == 6
    known = [colours.choose_look(name, names).colour for name in ("raw", "rollout", "flow")]
    assert known == list(colours.METHOD_COLOURS.values())
    palette = [*known, *colours.OTHER_COLOURS]
    assert len(set(palette)) == len(palette)
    assert all(light(colour) < 0.5 for colour in palette)  # seen on white paper


def test_edges_in_front_stand_out_without_colour() -> None:
    for colour in (*colours.METHOD_COLOURS.values(), *colours.OTHER_COLOURS):
        front, behind = light(colours.darken(colour)), light(graph_parts.BEHIND)
        assert (behind + 0.05) / (front + 0.05) > 3
        assert (1.05) / (front + 0.05) > 4.5  # and from paper


def test_heat_maps_have_the_colours_of_every_view() -> None:
    result = next(iter(explained(1, 6).results.values()))
    shown = figures.heatmap(result).artists["map"].get_cmap()
    places = np.linspace(0, 1, len(colours.RAMP))
    for place, colour in zip(places, colours.RAMP, strict=True):
        np.testing.assert_allclose(shown(place)[:3], to_rgb(colour), atol=0.01)
    for ramp in (colours.RAMP, colours.AGAINST, colours.DARK_RAMP, colours.DARK_AGAINST):
        steps = np.diff([light(colour) for colour in ramp])
        assert (steps < 0).all() or (steps > 0).all()  # lightness alone tells weak from strong


def test_panels_stand_in_rows_of_one_length_where_that_costs_one_row_at_most() -> None:
    assert [panels.choose_columns(count, 4) for count in range(1, 10)] == [
        1,
        2,
        3,
        4,
        3,
        3,
        4,
        4,
        3,
    ]
    assert [panels.choose_columns(count, 2) for count in range(1, 7)] == [1, 2, 1, 2, 2, 2]
    assert panels.choose_columns(5, 0) == 1


def test_names_of_methods_are_only_text(tmp_path: Path) -> None:
    explanation = explained(len(NAMES), 6)
    values = np.full((1, 2, 1), 0.5)
    prompt = af.PromptAttention(values, NAMES[2], ("the", "key"), ("is",), (1,))
    result = replace(explanation.results["raw"], method=NAMES[2])
    several = {
        "maps": figures.compare_heatmaps(explanation),
        "graphs": figures.compare_graphs(explanation),
        "pronoun": figures.pronoun(explanation, {"his": 1.0}, (1, 2)),
        "curves": figures.layer_curves(Table("m", NAMES, NAMES[2:4], (1, 2), ())),
    }
    single = {
        "graph": figures.layered_graph(result),
        "heat": figures.heatmap(result),
        "story": figures.generation(prompt),
    }
    for kind, drawn in {**several, **single}.items():
        said = replace(drawn, source=f"{NAMES[4]}\ud800 </metadata>")
        said.save(tmp_path / f"{kind}.png")
        shown = read_texts(said.save(tmp_path / f"{kind}.svg"))
        for name in NAMES if kind in several else NAMES[2:3]:
            first = layout.title_method(name).split()[0]
            assert first in shown or (kind == "curves" and name == "raw"), (kind, name)
    said.save(tmp_path / "story.pdf")


# ---- what there is, and what is refused ---------------------------------------------------------


def test_a_graph_says_which_layers_and_positions_a_method_has() -> None:
    explanation = explained(3, 6)
    graph = af.Attention(attention("flat", DEPTH, 6, np.random.default_rng(0))).graph()
    partial = {
        "rollout": explanation.results["raw"],
        "focal": af.rollout(graph, positions=[1]),
        "upper": af.raw(graph, layers=[2, 3]),
    }
    drawn = figures.compare_graphs(with_results(explanation, partial), orientation="up")
    titles = [ax.get_title() for ax in drawn.axes]
    assert titles == ["attention rollout", "focal\nposition 1 only", "upper\nlayers 2, 3 only"]
    limits = {ax.get_ylim() for ax in drawn.axes}
    assert len(limits) == 1  # the same layers at the same height
    top = {"rollout": explanation.results["raw"], "mine": af.rollout(graph, layers=[3])}
    with pytest.raises(
        af.OptionError,
        match=r"a graph needs neighbouring layers; mine has layers 3 down to layer 0",
    ):
        figures.compare_graphs(with_results(explanation, top))
    with pytest.raises(af.OptionError, match=r"position 2 was not computed; this result has pos"):
        figures.compare_graphs(with_results(explanation, partial), position=2)


def test_explanations_drawn_together_have_the_same_methods() -> None:
    one, other = explained(1, 6), explained(2, 6)
    for given in ([one, other], [with_results(one, {})], with_results(one, {})):
        with pytest.raises(
            af.OptionError, match="drawn together must hold the same methods, at least one; got"
        ):
            figures.compare_heatmaps(given)


def test_a_method_may_have_the_name_of_an_artist() -> None:
    explanation = explained(1, 6)
    named = with_results(
        explanation, {"bar": explanation.results["raw"], "bars": explanation.results["raw"]}
    )
    for drawn in (
        figures.compare_heatmaps(named),
        figures.pronoun(named, {"his": 1.0}, (1, 2)),
    ):
        for name in ("bar", "bars"):
            (image,) = drawn.artists[name]
            assert image.get_array().shape[0] == DEPTH


def test_given_axes_are_as_many_as_methods() -> None:
    explanation = explained(4, 6)
    panels: Any = Figure().subplots(2, 2)
    assert figures.compare_heatmaps(explanation, axes=panels).axes == tuple(panels.flat)
    assert (
        len(figures.pronoun(explanation, {"his": 1.0}, (1, 2), axes=Figure().subplots(1, 5)).axes)
        == 5
    )
    for draw in (figures.compare_heatmaps, figures.compare_graphs):
        with pytest.raises(af.OptionError, match="this drawing has 4 panels"):
            draw(explanation, axes=Figure().subplots(1, 3))


def test_figures_compute_no_token_attention() -> None:
    modules = list((Path(af.__file__).parent / "show" / "figures").glob("*.py"))
    assert len(modules) > 10
    for path in modules:
        assert not re.search(r"core\.(methods|flow\.(?!max_flow))|\.graph\(", path.read_text()), (
            path
        )


# ---- where a picture came from ------------------------------------------------------------------


def test_files_say_where_their_data_came_from(tmp_path: Path) -> None:
    result = replace(next(iter(explained(1, 6).results.values())), method="mine", source=SOURCE)
    drawn = figures.heatmap(result)
    assert drawn.source == str(SOURCE)
    about = f"mine of token0; from {SOURCE}"
    chunks = read_chunks(drawn.save(tmp_path / "map.png"))
    assert (chunks["Title"], chunks["Description"]) == ("mine of token0", about)
    assert chunks["Source"] == str(SOURCE)
    assert chunks["Software"].startswith("attnflow ")
    said = " ".join(ElementTree.parse(drawn.save(tmp_path / "map.svg")).getroot().itertext())
    assert about in said
    pdf = drawn.save(tmp_path / "map.pdf").read_bytes()
    assert f"/Subject ({about})".encode() in pdf
    assert f"/Keywords ({SOURCE})".encode() in pdf
    for ending in ("png", "svg", "pdf"):  # no dates: the same figure gives the same bytes
        for again in (figures.heatmap(result), drawn):
            written = again.save(tmp_path / f"again.{ending}").read_bytes()
            assert written == (tmp_path / f"map.{ending}").read_bytes()
    bare = figures.heatmap(replace(result, source=None))
    assert bare.source is None
    assert "Source" not in read_chunks(bare.save(tmp_path / "bare.png"))
    alone = figures.save(drawn.figure, tmp_path / "figure.png")  # a figure alone does not know
    assert "Source" not in read_chunks(alone)


def test_every_figure_hands_on_its_source() -> None:
    explanation = replace(explained(2, 6), source=SOURCE)
    other = replace(explanation, source=replace(SOURCE, model="another"))
    result = replace(next(iter(explanation.results.values())), source=SOURCE)
    best = af.max_flow(
        attention("flat", 2, 3, np.random.default_rng(0)), source=(2, 0), target=(0, 1)
    )
    bare = replace(best, provenance=None)
    assert figures.flow_paths(bare).source is None  # its source is a node
    drawings = [
        figures.layered_graph(result),
        figures.compare_graphs(explanation),
        figures.compare_heatmaps([explanation, explanation]),
        figures.pronoun(explanation, {"his": 1.0}, (1, 2)),
        figures.overlay(result, np.zeros((4, 6)), grid=(2, 3)),
        figures.flow_paths(replace(best, provenance=SOURCE)),
    ]
    assert {drawn.source for drawn in drawings} == {str(SOURCE)}
    both = figures.compare_heatmaps([explanation, other]).source
    assert both == f"{SOURCE}; {other.source}"
