"""Edges of a generation against those of the finished text, with all ways to generate."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import attnflow as af
from attnflow.core.io.tables import TABLE_ENDINGS
from tests.families import build, space_tokenizer

DECODERS = ("gpt2", "gpt-neox", "opt", "llama", "mistral", "qwen3", "gemma2", "phi3", "gpt-oss")
PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13], [7, 8, 9])  # the second one is padded
IN_STEPS = ("effective", "norm", "contribution")
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None}


def continued(model: af.Model, prompt: list[int]) -> list[int]:
    """The prompt and what follows, by the model's own generate."""
    plain: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, **OPTIONS}
    ids: list[int] = model.model.generate(torch.tensor([prompt]), **plain)[0].tolist()
    return ids


@pytest.mark.parametrize("family", DECODERS)
def test_edges_of_a_generation_are_those_of_the_finished_text(family: str) -> None:
    model = af.Model(build(family))
    stories = af.generate(model, list(PROMPTS), edges=["attention", *IN_STEPS], **OPTIONS)
    for story, prompt in zip(stories, PROMPTS, strict=True):
        ids = continued(model, prompt)
        for kind in IN_STEPS:
            graph = af.attention_graph(model, ids[:-1], edges=kind)
            np.testing.assert_allclose(story.graphs[kind].edges, graph.edges, atol=1e-5)
            rolled = af.rollout(graph, positions=list(story.positions), normalize=None).values
            result = story.by("rollout", edges=kind)
            expected = rolled[:, :, : len(prompt)].transpose(1, 2, 0)
            np.testing.assert_allclose(result.values, expected, atol=1e-5)
            assert (result.method, result.edges) == (f"{kind} rollout", kind)
        plain = af.generate(model, prompt, edges="attention", **OPTIONS)
        assert plain.edges == ("attention",)
        np.testing.assert_allclose(story.rollout().values, plain.rollout().values, atol=1e-6)
        np.testing.assert_allclose(story.probabilities, plain.probabilities, atol=1e-5)


def test_gradient_edges_watch_each_generated_token() -> None:
    model = af.Model(build("llama"))
    prompt = [5, 6, 7, 8]
    story = af.generate(model, prompt, edges=["gradient"], **OPTIONS)
    ids = continued(model, prompt)
    result = story.by("rollout", edges="gradient")
    for number in range(4):
        seen = ids[: len(prompt) + number]
        graph = af.attention_graph(model, seen, edges="gradient", target=ids[len(seen)])
        rolled = af.rollout(graph, positions=[len(seen) - 1], normalize=None).values[:, 0, :4]
        np.testing.assert_allclose(result.values[number], rolled.T, atol=1e-6)


def test_what_comes_first_is_generated_along_and_shown_first(tmp_path: Any) -> None:
    story = af.generate(build("llama"), [5, 6, 7, 8], **OPTIONS)
    assert story.edges == ("contribution", "attention")
    assert [choice.name for choice in story.plan()] == [
        "contribution rollout",
        "raw",
        "rollout",
        "flow",
    ]
    for ending in (".html", ".png"):
        assert story.save(tmp_path / f"story{ending}").stat().st_size > 1000
    assert story.save(tmp_path / "flow.html", methods="flow", edges=["contribution"]).exists()


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, "attention"),
        (["contribution", "attention"], "attention"),
        ("contribution", "contribution"),
        (["norm", "contribution"], "norm"),
        ("gradient", "gradient"),
    ],
)
def test_a_story_is_rolled_out_on_the_edges_that_were_asked_for(asked: Any, given: str) -> None:
    story = af.generate(build("llama"), [5, 6, 7, 8], edges=asked, **OPTIONS)
    result = story.rollout()
    assert result.edges == given
    assert result.method == ("rollout" if given == "attention" else f"{given} rollout")
    assert np.array_equal(result.values, story.by("rollout", edges=given).values)
    assert np.array_equal(  # asked for by name, attention is there all the same
        story.rollout(edges="attention").values,
        af.rollout(story.attention, normalize=None).values[:, 3:, :4].transpose(1, 2, 0),
    )


def test_a_story_saves_the_numbers_of_its_results(tmp_path: Path) -> None:
    story = af.generate(build("llama"), [5, 6, 7, 8], **OPTIONS)
    saved = {ending: story.save(tmp_path / f"story{ending}") for ending in (*TABLE_ENDINGS, ".npz")}
    results = [story.by("rollout", edges="contribution"), story.rollout()]
    with saved[".csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [row for result in results for row in result.rows()]
    assert [float(row["value"]) for row in rows] == [row[-1] for row in expected]
    assert [row["method"] for row in rows] == [row[0] for row in expected]
    content = json.loads(saved[".json"].read_text())
    arrays = np.load(saved[".npz"])
    for result in results:
        assert np.array_equal(content[result.method], result.values)
        assert np.array_equal(arrays[result.method], result.values)
    assert content["text"] == story.text
    assert content["source"]["edges"] is None  # each result has its own
    for ending in (".md", ".tex"):
        assert saved[ending].read_text().count("contribution rollout") == 4 * 4 * 3
    named = story.save(tmp_path / "flow.csv", methods=["raw", "flow"]).read_text()
    assert {line.split(",")[0] for line in named.splitlines()} == {"method", "raw", "flow"}
    with pytest.raises(af.FileError, match=r"one of .html, .png, .svg, .pdf, .csv, .json, .md"):
        story.save(tmp_path / "story.xlsx")


def test_sampling_is_the_same_with_edges_and_where_they_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled: dict[str, Any] = {**OPTIONS, "do_sample": True, "temperature": 3.0}
    model = af.Model(build("llama"))

    def draw(**options: Any) -> af.Generation:
        torch.manual_seed(0)
        return af.generate(model, [5, 6, 7], **sampled, **options)

    expected = draw(edges="attention")
    assert draw().tokens == expected.tokens

    def fail(*given: Any) -> Any:
        raise af.CaptureError("the branch of layer 1 was not understood")

    monkeypatch.setattr("attnflow.edges.graphs.make_mix", fail)
    story = draw()
    assert story.tokens == expected.tokens
    assert story.edges == ("attention",)
    assert "contribution edges are not available for this model" in story.notes[0]
    with pytest.raises(af.CaptureError, match="layer 1 was not understood"):
        draw(edges="norm")


def test_a_family_outside_of_the_interface_generates_on_attention() -> None:
    story = af.generate(build("bloom"), [5, 6, 7], **OPTIONS)
    assert story.edges == ("attention",)
    assert "outside of transformers' attention interface" in story.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edges": "norm"}, "has no edges 'norm'; it has contribution, attention: name them when"),
        ({"edges": "contribution", "residual": 0.3}, "make a graph of attention; got edges='contr"),
        ({"edges": "contribution", "without": [0]}, "make a graph of attention"),
    ],
)
def test_edges_that_were_not_named_and_options_of_attention_are_refused(
    options: dict[str, Any], message: str
) -> None:
    story = af.generate(build("gpt2"), [5, 6, 7], **OPTIONS)
    with pytest.raises(af.OptionError, match=message):
        story.rollout(**options)


def test_value_zeroing_has_whole_layers_to_run_again() -> None:
    model = af.Model(build("gpt2"))
    story = af.generate(model, [5, 6, 7], edges=["value_zeroing"], **OPTIONS)
    ids = continued(model, [5, 6, 7])
    expected = af.attention_graph(model, ids[:-1], edges="value_zeroing")
    np.testing.assert_allclose(story.graphs["value_zeroing"].edges, expected.edges, atol=1e-5)


@pytest.mark.parametrize("edges", ["attention", None])
def test_beams_and_guessed_tokens_are_the_models_own(edges: Any) -> None:
    model = build("llama")
    prompts: list[list[int]] = [[5, 6, 7, 8, 5, 6], [7, 8, 9]]
    sampled: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, **OPTIONS}
    ways: list[dict[str, Any]] = [
        {"num_beams": 3},
        {"generation_config": t.GenerationConfig(num_beams=2, eos_token_id=None)},
        {"assistant_model": build("gpt2")},
        {"prompt_lookup_num_tokens": 2},
        {"prefill_chunk_size": 2},
    ]
    for way in ways:
        stories = af.generate(model, prompts, edges=edges, **{**OPTIONS, **way})
        for story, prompt in zip(stories, prompts, strict=True):
            expected = model.generate(torch.tensor([prompt]), **{**sampled, **way})[0].tolist()
            assert [int(token) for token in (*story.prompt, *story.tokens)] == expected
            replayed = af.replay(model, prompt, expected[len(prompt) :], edges=edges)
            np.testing.assert_allclose(story.rollout().values, replayed.rollout().values, atol=1e-5)
            np.testing.assert_allclose(story.probabilities, replayed.probabilities, atol=1e-5)


@pytest.mark.parametrize("edges", ["attention", None])
def test_a_string_may_stop_an_answer(edges: Any) -> None:
    model = af.Model(build("llama"), space_tokenizer(["abcdef the key to the cabinets is lost"]))
    options: dict[str, Any] = {"edges": edges, "max_new_tokens": 12, "eos_token_id": None}
    whole = af.generate(model, "the key", **options)
    stop = whole.text[3:5]
    story = af.generate(model, "the key", stop_strings=[stop], **options)
    count = len(story.tokens)
    assert 0 < count < 12
    assert story.tokens == whole.tokens[:count]
    assert stop in story.text
    assert story.offsets is not None
    assert stop not in story.text[: story.offsets[-1][0]]
    assert story.span(tokens=story.text).values.shape == (1, len(story.prompt), 3)
