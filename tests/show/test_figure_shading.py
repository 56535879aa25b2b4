"""What figures colour: tokens left out, scales, comparisons, the direction of layers, pictures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from PIL import Image
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import attnflow as af
from attnflow import figures
from attnflow.show import colours
from attnflow.show.figures import graph_parts, layout
from tests.explained import with_results
from tests.oracles import attention
from tests.show.drawings import light, read_texts, title_of

SIZE, DEPTH = 9, 3
TOKENS = ("[CLS]", *(f"token{place}" for place in range(1, SIZE)))


def sunk() -> af.Explanation:
    """An explanation of weights whose first position takes half of every row."""
    weights = 0.5 * attention("peaky", DEPTH, SIZE, np.random.default_rng(0))
    weights[:, :, 0] += 0.5
    return af.explain(af.Attention(weights, tokens=TOKENS), position=4)


SUNK = sunk()


# ---- tokens that are left out -------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 7, 9, 14, 40])
@pytest.mark.parametrize("count", [1, 4])
def test_the_title_of_a_map_has_at_most_two_lines(size: int, count: int) -> None:
    weights = 0.3 + attention("uniform", DEPTH, size, np.random.default_rng(0))  # even: it says so
    weights[:, :, 0] += 2.0
    weights /= weights.sum(axis=-1, keepdims=True)
    tokens = ["[CLS]", *(f"token{at}" for at in range(1, size - 1)), "[SEP]"]
    found = af.explain(af.Attention(weights, tokens=tokens), methods=["raw", "rollout", "flow"])
    found = with_results(found, dict(list(found.results.items())[:count]))
    drawings = [figures.compare_heatmaps(found, exclude=[0, size - 1], scale="row")]
    drawings += [figures.heatmap(found.raw, exclude=[0, size - 1])]
    for drawn in drawings:
        for ax in drawn.axes:
            assert len(ax.get_title().splitlines()) == 2
            assert "[CLS] " in title_of(ax)
            assert ("even" in title_of(ax)) == (size >= 10)


@pytest.mark.parametrize("exclude", ["sinks", [0], ["sinks", 0], ["sinks", "none"], (0, -SIZE)])
def test_what_is_excluded_has_no_colour_and_no_part_in_the_scale(exclude: Any) -> None:
    assert [sink.position for sink in SUNK.sinks] == [0]
    drawn = figures.compare_heatmaps(SUNK, exclude=exclude)
    rows = {name: result.values[:, 4] for name, result in SUNK.results.items()}  # [layer, key]
    largest = max(float(row[:, 1:].max()) for row in rows.values())
    for ax, (name, row) in zip(drawn.axes, rows.items(), strict=True):
        shown = drawn.artists[name][0].get_array()
        assert np.ma.getmaskarray(shown).sum(axis=0).tolist() == [DEPTH] + [0] * (SIZE - 1)
        np.testing.assert_array_equal(shown[:, 1:], row[:, 1:])
        assert drawn.artists[name][0].get_clim() == (0.0, largest)
        assert f"[CLS] {100 * row[-1, 0]:.0f} % left out" in title_of(ax)
    assert drawn.artists["bar"].extend == "neither"  # what is hidden is not beyond the scale


def test_one_result_takes_positions_also_of_words() -> None:
    result = SUNK.rollout
    drawn = figures.heatmap(result, 4, exclude=[0, 1])
    assert np.ma.getmaskarray(drawn.artists["map"].get_array())[0].nonzero()[0].tolist() == [0, 1]
    words = replace(result, words=(None, 0, 0, 1, 2, 2, 2, 3, 3)).by_word()
    shown = figures.heatmap(words, 4, exclude=[2]).artists["map"].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(shown)[0].nonzero()[0], [1])  # its word
    share = words.at(4)[1] / words.at(4).sum()
    title = title_of(figures.heatmap(words, 4, exclude=[2]).axes[0])
    assert f"token1token2 {100 * share:.0f} % left out" in title


def test_names_never_leave_out_everything_and_positions_that_do_are_refused() -> None:
    alone = replace(SUNK, special=(True,) * SIZE)
    shown = figures.compare_heatmaps(alone, exclude="special").artists["rollout"][0].get_array()
    assert not np.ma.getmaskarray(shown).any()
    refused: list[tuple[Any, str]] = [
        (range(SIZE), f"exclude must leave at least one of {SIZE} tokens; got all of them"),
        ("sink", "unknown exclude 'sink'; choose from sinks, special, explained, none, positions"),
        ([SIZE], f"exclude must be from -{SIZE} to {SIZE - 1}; got {SIZE}"),
        ([0.5], "exclude must be whole numbers"),
        (
            0,
            "exclude must be 'sinks', 'special', 'explained', 'none' or a list of positions; got 0",
        ),
    ]
    for exclude, message in refused:
        with pytest.raises(af.OptionError, match=message):
            figures.compare_heatmaps(SUNK, exclude=exclude)
    with pytest.raises(af.OptionError, match="a result alone does not know which tokens are sinks"):
        figures.heatmap(SUNK.rollout, exclude="sinks")


def test_many_tokens_left_out_are_counted() -> None:
    drawn = figures.heatmap(SUNK.rollout, 4, exclude=[0, 1, 2, 3])
    share = SUNK.rollout.at(4)[:4].sum()
    assert f"4 tokens {100 * share:.0f} % left out" in title_of(drawn.axes[0])


@pytest.mark.parametrize("orientation", ["up", "right"])
def test_graphs_draw_no_edges_to_what_is_excluded(orientation: str) -> None:
    drawn = figures.compare_graphs(SUNK, exclude="sinks", orientation=orientation)
    others = [1, 2, 3, 5, 6, 7, 8]
    largest = max(result.values[:, 4, others].max() for result in SUNK.results.values())
    thick = graph_parts.choose_thickness(SIZE)
    for ax, (name, result) in zip(drawn.axes, SUNK.results.items(), strict=True):
        for part in ("edges", "front"):
            ends = np.array(drawn.artists[name][part].get_segments()).round().astype(int)
            keys = ends[:, 1, 0 if orientation == "up" else 1]
            assert len(keys)
            assert 0 not in keys
        assert max(drawn.artists[name]["front"].get_linewidths()) <= thick + 1e-9
        share = result.at(4)[0] / result.at(4).sum()
        assert f"not drawn: [CLS] {100 * share:.0f} % of layer 3" in title_of(ax)
    labels = [text.get_text() for text in drawn.artists["key"].get_texts()]
    assert labels[1:3] == [f"{0.1 * largest:.2g}", f"{0.5 * largest:.2g}"]
    assert labels[3] in (f"{largest:.2g}", f"≥ {largest:.2g}")


# ---- scales -------------------------------------------------------------------------------------


def test_each_row_has_its_own_scale_if_asked() -> None:
    drawn = figures.compare_heatmaps(SUNK, exclude="sinks", scale="row")
    for name, result in SUNK.results.items():
        rows = result.values[:, 4, 1:]
        shown = drawn.artists[name][0]
        np.testing.assert_allclose(shown.get_array()[:, 1:], rows / rows.max(axis=1)[:, None])
        assert shown.get_clim() == (0.0, 1.0)
    assert drawn.artists["bar"].ax.get_ylabel() == "token attention,\nby the largest of its row"
    same = figures.heatmap(SUNK.rollout, 4, scale="common").artists["map"]
    np.testing.assert_array_equal(same.get_array(), SUNK.rollout.values[:, 4])
    empty = replace(SUNK.rollout, values=np.zeros_like(SUNK.rollout.values))
    assert not figures.heatmap(empty, 4, scale="row").artists["map"].get_array().any()
    for scale in ("rows", 0, True):
        with pytest.raises(af.OptionError, match="scale"):
            figures.heatmap(SUNK.rollout, 4, scale=scale)


def test_the_key_of_a_graph_has_the_widths_of_its_edges() -> None:
    drawn = figures.layered_graph(SUNK.rollout, position=4, scale=0.25)
    *_, widest = drawn.artists["key"].get_lines()
    front = drawn.artists["front"]
    weights = np.sort(SUNK.rollout.values[:, 4].ravel())
    weights = weights[weights > 0.01 * 0.25]
    np.testing.assert_allclose(
        front.get_linewidths(),
        graph_parts.choose_thickness(SIZE) * (0.1 + 0.9 * np.minimum(weights / 0.25, 1)),
    )
    assert widest.get_linewidth() == pytest.approx(max(front.get_linewidths()))
    texts = [text.get_text() for text in drawn.artists["key"].get_texts()]
    assert texts == ["token attention:", "0.025", "0.12", "≥ 0.25"]
    whole = figures.layered_graph(SUNK.rollout)
    assert whole.artists["key"].get_texts()[-1].get_text() == f"{SUNK.rollout.values.max():.2g}"
    given = figures.layered_graph(SUNK.rollout, ax=Figure().subplots())
    assert given.axes[0].get_legend() is given.artists["key"]


# ---- comparisons --------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["even", "others"])
def test_maps_show_how_far_values_are_from_what_was_expected(reference: str) -> None:
    drawn = figures.compare_heatmaps(SUNK, exclude=[0], compared_with=reference)
    for name, result in SUNK.results.items():
        scaled = result.compared_with(reference, exclude=[0]).scaled[:, 4]
        shown = drawn.artists[name][0]
        np.testing.assert_array_equal(shown.get_array()[:, 1:], scaled[:, 1:])
        assert shown.get_clim() == (-1.0, 1.0)
        for place, colour in ((0.0, colours.AGAINST[-1]), (1.0, colours.RAMP[-1])):
            np.testing.assert_allclose(shown.get_cmap()(place)[:3], to_rgb(colour), atol=0.01)
    # for whoever sees no colour, a mark stands where a value is clearly lower
    marked: Any = drawn.axes[0].collections[-1].get_offsets()
    first = np.ma.filled(drawn.artists["raw"][0].get_array(), 0.0)
    assert len(marked) == (first < -layout.SEEN).sum() > 0
    labels = [label.get_text() for label in drawn.artists["bar"].ax.get_yticklabels()]
    assert labels == ["≤ 1/8", "1/4", "1/2", "1", "2", "4", "≥ 8"]
    assert "times" in drawn.artists["bar"].ax.get_ylabel()


def test_a_comparison_has_a_scale_of_its_own() -> None:
    drawings: list[tuple[Any, Any]] = [(figures.heatmap, SUNK.rollout)]
    drawings += [(figures.generation, make_story().rollout()), (figures.compare_heatmaps, SUNK)]
    for draw, given in drawings:
        with pytest.raises(af.OptionError, match=r"so scale does not apply; got scale='row'"):
            draw(given, scale="row", compared_with="even")
        with pytest.raises(af.OptionError, match=r"unknown compared_with 'odd'; choose from None"):
            draw(given, compared_with="odd")


# ---- layers go up -------------------------------------------------------------------------------


def test_higher_layers_stand_higher_in_every_figure_or_further_right() -> None:
    assert SUNK.graph is not None
    flows = af.max_flow(SUNK.graph, source=(3, 0), target=(0, 2))
    drawings = [
        figures.heatmap(SUNK.rollout, 4),
        figures.compare_heatmaps(SUNK),
        figures.pronoun(SUNK, {"his": 0.5, "her": 0.5}, (1, 2)),
        figures.layered_graph(SUNK.rollout),
        figures.compare_graphs(SUNK, orientation="up"),
        figures.compare_graphs(SUNK),
        figures.flow_paths(flows),
        figures.flow_paths(flows, orientation="right"),
    ]
    for drawn in drawings:
        told = 0
        for ax in drawn.axes:
            for axis, way in ((ax.yaxis, 1), (ax.xaxis, 0)):
                if axis.label.get_text() != "layer":
                    continue
                numbers = [
                    "0" if t.get_text() == "input" else t.get_text() for t in axis.get_ticklabels()
                ]
                places = [ax.transData.transform((t, t))[way] for t in axis.get_ticklocs()]
                assert list(map(int, numbers)) == sorted(map(int, numbers))
                assert (np.diff(places) > 0).all()
                told += len(numbers) >= DEPTH
        assert told


# ---- generations --------------------------------------------------------------------------------


def make_story(edges: Any = None) -> af.Generation:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=50))
    return af.generate(model, [4, 19, 7, 33], max_new_tokens=3, eos_token_id=None, edges=edges)


def test_a_picture_of_a_story_has_every_kind_of_edges(tmp_path: Path) -> None:
    story = make_story(["attention", "norm"])
    said = read_texts(story.save(tmp_path / "story.svg"))
    assert "attention rollout, layer 2" in said
    assert "norm rollout, layer 2" in said
    named = story.save(tmp_path / "named.svg", methods=["raw", "rollout"], edges=["norm"])
    assert "norm raw, layer 2" in read_texts(named)
    assert "attention rollout" not in read_texts(named)


@pytest.mark.parametrize("reference", [None, "even", "others"])
def test_maps_of_several_results_of_a_story(reference: str | None) -> None:
    story = make_story()
    results = [story.raw(), story.rollout()]
    drawn = figures.compare_generations(results, 1, exclude=[0], compared_with=reference)
    for image, result in zip(drawn.artists["maps"], results, strict=True):
        expected = result.values[:, :, 0]
        if reference is not None:
            expected = result.compared_with(reference, exclude=[0]).scaled[0]
        np.testing.assert_array_equal(image.get_array()[:, 1:], expected[:, 1:])
        assert np.ma.getmaskarray(image.get_array())[:, 0].all()
    shares = results[1].values[:, :, 0] / results[1].values[:, :, 0].sum(axis=1, keepdims=True)
    name = layout.label_tokens([story.prompt[0]])[0]
    mean = f"{name} {100 * shares[:, 0].mean():.0f} % left out"
    assert mean in title_of(drawn.axes[1])


def test_results_drawn_together_are_of_one_generation() -> None:
    one = make_story().rollout()
    for given, message in (
        ([], "draws a list of what Generation.by gives; got list"),
        (one, "got PromptAttention"),
        ([one, SUNK.rollout], "got PromptAttention, TokenAttention"),
        ([one, replace(one, generated=("a", "b", "c"))], "must be of one generation"),
        (
            [one, replace(one, layers=(1, 3))],
            "layer must be one of 1, 3, those of this result; got 2",
        ),
    ):
        with pytest.raises(af.OptionError, match=message):
            figures.compare_generations(given)  # type: ignore[arg-type]


# ---- explanations and pictures ------------------------------------------------------------------


def test_a_saved_picture_lets_the_words_shine(tmp_path: Path) -> None:
    found = af.explain("the authors that the old man likes", importance=())
    said = " ".join(read_texts(found.save(tmp_path / "found.svg")).split())
    share = found.results["relevance flow"].at(0)[0]
    assert share > 0.5
    assert f"[CLS] {100 * share:.0f} % left out" in said.replace("\u00a0", " ")


def make_vit(processor: Any = None) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(
        ViTConfig(**sizes, intermediate_size=8, image_size=16, patch_size=4)
    )
    return af.Model(model, processor) if processor else model


def test_an_explained_image_is_drawn_with_its_patches(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})  # it normalises
    found = af.explain(path, model=make_vit(processor), methods=["raw", "rollout"])
    path.unlink()  # the explanation keeps what the model saw
    assert found.picture is not None
    np.testing.assert_allclose(found.picture, pixels / 255, atol=1e-6)
    drawn = figures.compare_overlays(found)
    for name, result in found.results.items():
        np.testing.assert_array_equal(
            drawn.artists[name].get_array(), result.at(0)[1:].reshape(4, 4)
        )
    said = read_texts(found.save(tmp_path / "found.svg"))
    assert "raw attention, layer 2" in said
    assert "[CLS]" in said
    assert "0,0" not in said  # no map of a row of patches
    each = figures.compare_overlays(found, scale="row", layer=1).artists["raw"].get_array()
    np.testing.assert_allclose(each.max(), 1.0)


def test_pixels_without_a_processor_are_brought_to_colours() -> None:
    torch.manual_seed(1)
    pixels = 3 * torch.randn(3, 16, 16)
    found = af.explain(pixels, model=make_vit(), methods=["raw"])
    assert found.picture is not None
    assert (found.picture.min(), found.picture.max()) == (0.0, 1.0)
    shown = torch.rand(3, 16, 16)
    kept = af.explain(shown, model=make_vit(), methods=["raw"]).picture
    assert kept is not None
    np.testing.assert_allclose(kept, shown.permute(1, 2, 0).numpy(), atol=1e-6)


def test_an_explanation_without_a_picture_says_so() -> None:
    with pytest.raises(af.OptionError, match="this explanation keeps no picture to draw over;"):
        figures.compare_overlays(SUNK)


def test_an_overlay_is_one_hue_over_pale_grey() -> None:
    tokens = ("[CLS]", *(f"{row},{column}" for row in range(2) for column in range(2)))
    values = np.array([[[0.5, 0.0, 0.1, 0.2, 0.2]] * 5])
    result = af.raw(af.Attention(values, tokens=tokens))
    black = np.zeros((8, 8, 3))
    drawn = figures.overlay(result, black, opacity=0.9)
    shown, hue = drawn.artists["image"].get_array(), drawn.artists["map"].get_cmap()
    assert shown.min() == shown.max() == pytest.approx(0.45)  # of black
    assert [hue(share)[3] for share in (0.0, 1.0)] == pytest.approx([0.0, 0.9])
    assert {to_hex(hue(share)[:3]) for share in (0.0, 0.3, 1.0)} == {colours.RAMP[-2]}
    strongest = 0.9 * np.array(to_rgb(colours.RAMP[-2])) + 0.1 * 0.45
    # the strongest patch over black is darker than the darkest of the picture, also without colour
    assert (light("0.45") + 0.05) / (light(to_hex(strongest)) + 0.05) > 1.3
    assert drawn.artists["map"].get_clim() == (0.0, 0.2)
    assert figures.overlay(result, black, scale=0.4).artists["map"].get_clim() == (0.0, 0.4)
    with pytest.raises(af.OptionError, match="scale must be a number above 0"):
        figures.overlay(result, black, scale=-1)
