"""A method of the user's own is seen at every door, and so are importances, scores and graphs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import attnflow as af
from attnflow import figures
from attnflow.core.choices import import_function, read_methods, refer_to
from tests.families import build, word_tokenizer
from tests.oracles import any_attention
from tests.own_methods import last_layer, squared, token_length, without_first

TEXT = "the key to the cabinets"
FOUR: dict[str, Any] = {"raw": None, "rollout": None, "flow": None}


@pytest.fixture(scope="module")
def model() -> af.Model:
    return af.load("verb-number")


@pytest.fixture(scope="module")
def story() -> af.Generation:
    writer = af.Model(build("llama"), word_tokenizer())
    return af.generate(writer, TEXT, max_new_tokens=4, eos_token_id=None)


# ---- a fourth method, made in five lines ----------------------------------------------------------


def reversed_rollout(graph: af.AttentionGraph) -> Any:
    """[layer, query, key]: the layers multiplied in the wrong order."""
    product, layers = np.eye(graph.size), []
    for edges in graph.edges:
        layers.append(product := product @ edges)
    return np.stack(layers)


MINE = af.token_attention("mine", reversed_rollout)


def test_a_method_of_five_lines_is_seen_at_every_door(
    model: af.Model, story: af.Generation, tmp_path: Path
) -> None:
    explanation = af.explain(TEXT, methods={**FOUR, "mine": MINE})
    assert explanation.graph is not None
    expected = reversed_rollout(explanation.graph)
    expected /= expected.sum(axis=-1, keepdims=True)
    assert list(explanation.results) == ["raw", "rollout", "flow", "mine"]
    np.testing.assert_allclose(explanation.results["mine"].values, expected, atol=1e-12)
    np.testing.assert_allclose(explanation.scores()["mine"][1], expected[-1, 0], atol=1e-12)
    assert sum(row[0] == "mine" for row in explanation.rows()) == 6 * 6

    report = af.evaluate(model, [TEXT], methods=["rollout", MINE], against=["blank_out"])
    np.testing.assert_allclose(report.examples[0].scores["mine"], expected[:, 0], atol=1e-12)
    assert "| mine |" in report.to_markdown()

    prompt = story.by(MINE, normalize="sum")
    graph = story.attention.graph()
    rows = reversed_rollout(graph)[:, story.size - 1 :, : story.size]
    rows /= rows.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(prompt.values, rows.transpose(1, 2, 0), atol=1e-12)
    assert prompt.method == "mine"
    assert story.by({"other": MINE}).method == "other"

    for drawing in (
        figures.compare_heatmaps(explanation),
        figures.compare_graphs(explanation),
        figures.pronoun(explanation, {"is": 0.5, "are": 0.5}, (2, 5)),
        figures.generation(story, method=MINE),
        figures.layer_curves(report),
    ):
        drawing.save(tmp_path / "figure.png")
    maps = figures.compare_heatmaps(explanation).artists["mine"]
    np.testing.assert_allclose(maps[0].get_array(), expected[:, 0], atol=1e-12)
    for ending in (".html", ".csv", ".json", ".npz"):
        assert explanation.save(tmp_path / f"all{ending}").stat().st_size > 100
    assert '"name":"mine"' in (tmp_path / "all.html").read_text()
    story.save(tmp_path / "story.html", methods=["rollout", MINE])
    assert '"name":"mine"' in (tmp_path / "story.html").read_text()


def test_a_corpus_with_two_workers_has_the_method_and_the_importance(tmp_path: Path) -> None:
    texts = tmp_path / "texts.csv"
    texts.write_text("text\n" + "".join(f"the key number {n} to the house\n" for n in range(8)))
    options: dict[str, Any] = {
        "methods": {"rollout": None, "squared": squared, "own": last_layer},
        "importance": {"length": token_length},
        "shard_rows": 3,
    }
    for workers in (1, 2):
        af.explain_corpus(texts, tmp_path / f"out{workers}", workers=workers, **options)
    one, two = (af.read_corpus(tmp_path / f"out{workers}") for workers in (1, 2))
    assert one.equals(two)
    row = one.to_pylist()[0]
    graph = af.capture(af.load("verb-number"), row["text"]).graph()
    np.testing.assert_allclose(row["squared"], squared(graph).values[:, 0], atol=1e-6)
    np.testing.assert_allclose(row["own"], af.raw(graph).values[:, 0], atol=1e-6)
    assert row["length"] == [float(len(token)) for token in row["tokens"]]


# ---- methods ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(any_attention())
def test_rollout_made_of_an_array_is_rollout(weights: Any) -> None:
    attention = af.Attention(weights)

    def multiply(graph: af.AttentionGraph) -> Any:
        rolled, layers = np.eye(graph.size), []
        for edges in graph.edges:
            layers.append(rolled := edges @ rolled)
        return np.stack(layers)

    mine = af.token_attention("mine", multiply)
    for options in ({}, {"layers": [attention.depth], "positions": [0]}, {"normalize": None}):
        np.testing.assert_allclose(
            mine(attention, **options).values, af.rollout(attention, **options).values, atol=1e-12
        )
    groups = [[position] for position in range(attention.size)]
    np.testing.assert_allclose(mine(attention, groups=groups).values, mine(attention).values)
    np.testing.assert_allclose(
        mine(attention, normalize="receptive_field").values,
        af.rollout(attention, normalize="receptive_field").values,
        atol=1e-12,
    )


def test_a_function_that_names_layers_positions_and_bottom_gets_what_was_asked() -> None:
    asked = []

    def rows(graph: Any, layers: Any, positions: Any, bottom: int) -> Any:
        asked.append((layers, positions, bottom))
        return np.ones((len(layers), len(positions), graph.size))

    attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 3)
    mine = af.token_attention("mine", rows)
    assert mine(attention, layers=[3, 2], positions=[1], bottom=1).values.shape == (2, 1, 2)
    assert asked == [((3, 2), (1,), 1)]
    with pytest.raises(af.OptionError, match="squared looks down to layer 0"):
        squared(attention, bottom=1, layers=[2])


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda graph: graph.weights[0], r"must give \[layer, query, key\], here \(6, 6, 6\)"),
        (lambda graph: "no", "must give an array"),
        (lambda graph: graph.weights * np.nan, "must give finite numbers"),
        (lambda graph: -graph.weights, "must give no negative number where rows are to sum to 1"),
        (lambda graph: 1 / 0, "wrong failed: ZeroDivisionError: division by zero"),
    ],
)
def test_an_array_of_another_kind_is_one_line(compute: Callable[..., Any], message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        af.explain(TEXT, methods=[af.token_attention("wrong", compute)], importance=())


def give_nothing(
    graph: Any, *, layers: Any, positions: Any, bottom: Any = 0, normalize: Any = None
) -> None:
    return None


def give_other_layers(
    graph: Any, *, layers: Any, positions: Any, bottom: Any = 0, normalize: Any = None
) -> Any:
    return af.raw(graph, layers=[1], positions=positions)


def give_too_few_tokens(
    graph: Any, *, layers: Any, positions: Any, bottom: Any = 0, normalize: Any = None
) -> Any:
    result = af.raw(graph, layers=layers, positions=positions)
    return replace(result, tokens=result.tokens[1:])


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("rolout", "unknown method 'rolout'; choose from raw, rollout, flow"),
        ({"mine": None}, "unknown method 'mine'"),
        ({"rollout": squared}, "must be a function with a name of its own; got 'rollout'"),
        ({"mine": 3}, "must be a function with a name of its own; got 'mine': int"),
        ([squared, squared], "names of methods must be unique; got 'squared' twice"),
        ({"tokens": squared}, "must not be that of a column of results; got 'tokens'"),
        ({" ": squared}, "must be a string of visible text"),
        ({"a\nb": squared}, "must be a string of visible text"),
        (lambda graph: graph, "needs one: give {name: function}"),
        (3, "methods must be names, or {name: function}; got 3"),
        (
            {"mine": lambda graph, layers: None},
            "the method 'mine' must be called as f(graph, *, layers, positions, bottom, normalize)",
        ),
        ({"mine": give_nothing}, "mine must return a TokenAttention"),
        ({"mine": give_other_layers}, "mine must give the layers that are asked for"),
        (
            {"mine": give_too_few_tokens},
            "(6, 6, 6), and a token per key; got shape (6, 6, 6) and 5",
        ),
    ],
)
def test_a_wrong_method_is_one_line(methods: Any, message: str) -> None:
    with pytest.raises(af.OptionError) as error:
        af.explain(TEXT, methods=methods, importance=())
    assert message in str(error.value)


def test_attnflows_own_functions_and_partials_are_methods() -> None:
    deep = partial(af.rollout, bottom=0)
    explanation = af.explain(TEXT, methods={"rollout": af.rollout, "deep": deep}, importance=())
    np.testing.assert_array_equal(
        explanation.results["deep"].values, explanation.results["rollout"].values
    )
    assert explanation.results["deep"].method == "deep"
    assert list(read_methods(af.flow)) == ["flow"]
    with pytest.raises(af.OptionError, match=r"no raw; it has rollout, deep: ask for it"):
        explanation.raw  # noqa: B018


def test_references_lead_to_functions_and_back() -> None:
    assert import_function("tests.own_methods:last_layer", "method") is last_layer
    assert refer_to(last_layer) == "tests.own_methods:last_layer"
    assert refer_to(lambda graph: graph) is None
    for reference in ("tests.own_methods:none", "no.such:thing", "tests.own_methods", "os:sep"):
        with pytest.raises(af.OptionError):
            import_function(reference, "method")


def test_words_of_a_method_that_knows_no_groups_are_summed() -> None:
    explanation = af.explain("the keys", methods={"own": last_layer}, importance=())
    tokens, values = explanation.scores(by_word=True)["own"]
    assert len(tokens) == len(values)
    np.testing.assert_allclose(values.sum(), 1.0)


# ---- importances and scores -------------------------------------------------------------------------


def test_an_importance_of_ones_own_goes_in_by_its_function(model: af.Model) -> None:
    masked = partial(af.blank_out, replacement="[UNK]")
    explanation = af.explain(TEXT, importance={"length": token_length, "masked": masked})
    assert list(explanation.importance) == ["length", "masked"]
    expected = af.blank_out(model, TEXT)
    np.testing.assert_allclose(explanation.importance["masked"].values, expected.values, atol=1e-6)
    assert explanation.importance["masked"].method == "masked"
    assert explanation.importance["length"].target == expected.target
    examples = [(TEXT, "plural"), ("the old keys", "plural")]
    report = af.evaluate(
        model, examples, methods="raw", against={"blank_out": None, "length": token_length}
    )
    assert report.against == ("blank_out", "length")
    np.testing.assert_array_equal(
        report.examples[0].importance["length"], explanation.importance["length"].values
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda model, inputs, target: None, "must give a list with one importance per input"),
        (lambda model, inputs, target: [[1.0]], "one finite number per token, 6 here"),
        (lambda model, inputs, target: ["no"], "must give numbers; got str"),
        (lambda model, inputs: None, "must be called as f(model, inputs, target)"),
        (lambda model, inputs, target: 1 / 0, "mine failed: ZeroDivisionError"),
    ],
)
def test_a_wrong_importance_is_one_line(function: Any, message: str) -> None:
    with pytest.raises(af.OptionError) as error:
        af.explain(TEXT, importance={"mine": function}, methods="raw")
    assert message in str(error.value)


def test_scores_that_a_user_has_stand_outside_of_the_layers(model: af.Model) -> None:
    examples = [(TEXT, "singular"), ("the old keys", "plural")]
    arrays = [np.arange(6.0), np.arange(4.0)]
    report = af.evaluate(
        model,
        examples,
        methods=["rollout"],
        against=["blank_out"],
        layers=[1, 6],
        scorers={
            "place": arrays,
            "length": lambda text: [float(len(t)) for t in model.encode(text).tokens],
        },
    )
    assert report.scorers == ("place", "length")
    layers = {row[1]: row[2] for row in report.rows()}
    assert layers == {"rollout": 6, "place": None, "length": None}
    header, _, rollout, place = report.to_markdown().splitlines()[2:6]
    assert header == "| method | layer 1 | layer 6 | score | undefined |"
    assert rollout.split("|")[4].strip() == ""
    assert place.startswith("| place |  |  |")
    with pytest.raises(af.OptionError, match="one array per example, 2 here; got 1"):
        af.evaluate(model, examples, scorers={"place": arrays[:1]})
    with pytest.raises(af.OptionError, match="must be one number per token, 6 here"):
        af.evaluate(model, examples, scorers={"place": [[1.0], [2.0]]})
    with pytest.raises(af.OptionError, match="a scorer must have a name of its own"):
        af.evaluate(model, examples, scorers={"rollout": arrays})


# ---- weights, and graphs of one's own -----------------------------------------------------------------


def test_weights_that_a_user_has_reach_page_and_figures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5), (4, 3, 5))  # [layer, head, query, key]
    attention = af.Attention(weights, tokens=["a", "b", "c", "d", "e"])
    explanation = af.explain(attention, position=-1)
    assert (explanation.prediction, explanation.importance, explanation.position) == (None, {}, 4)
    np.testing.assert_allclose(explanation.rollout.values, af.rollout(attention).values)
    for ending in (".html", ".png", ".csv", ".json", ".npz"):
        assert explanation.save(tmp_path / f"weights{ending}").stat().st_size > 100
    assert "<iframe" in explanation._repr_html_()
    causal = np.tril(weights[:, 0]) / np.tril(weights[:, 0]).sum(axis=-1, keepdims=True)
    assert af.explain(af.Attention(causal)).position == 4
    graph = af.AttentionGraph(edges=rng.random((3, 4, 4)))
    inside = af.explain(graph)
    np.testing.assert_allclose(inside.rollout.values, af.rollout(graph).values)
    inside.save(tmp_path / "inside.html")
    for options in ({"model": "verb-number"}, {"target": 0}, {"truncation": True}):
        with pytest.raises(af.OptionError, match="explained without a model"):
            af.explain(attention, **options)
    with pytest.raises(af.OptionError, match="a graph is explained as it is"):
        af.explain(graph, graph=without_first)


def test_a_graph_of_ones_own_goes_through_explain_evaluate_and_generate(
    model: af.Model, story: af.Generation
) -> None:
    attention = af.capture(model, TEXT)
    expected = af.rollout(attention.graph(without=[1]), positions=[0])
    # heads are fused while they are captured, or by the function: alike within float32's rounding
    for options in ({"without": [1]}, {"graph": lambda attention: attention.graph(without=[1])}):
        explanation = af.explain(TEXT, methods="rollout", importance=(), **options)
        np.testing.assert_allclose(explanation.rollout.at(0), expected.at(0), atol=1e-7)
        assert explanation.graph is not None
        assert explanation.graph.removed == (1,)
        report = af.evaluate(
            model, [TEXT], methods="rollout", against="blank_out", special_tokens=True, **options
        )
        example = report.examples[0]
        assert example.keep(True).tolist() == [True, False, True, True, True, True]
        np.testing.assert_allclose(example.scores["rollout"], expected.values[:, 0], atol=1e-7)
        made = story.by("rollout", **options)
        direct = af.rollout(story.attention.graph(without=[1]), normalize=None).values
        np.testing.assert_allclose(
            made.values, direct[:, story.size - 2 :, : story.size].transpose(1, 2, 0), atol=1e-7
        )
    head = af.explain(
        TEXT,
        heads=None,
        graph=lambda attention: attention.graph(top_head=(3, 1)),
        methods="rollout",
        importance=(),
    )
    kept = af.capture(model, TEXT, heads=None)
    np.testing.assert_allclose(
        head.rollout.at(0), af.rollout(kept.graph(top_head=(3, 1))).at(0), atol=1e-12
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": 3}, "graph must be a function from an Attention to an AttentionGraph; got int"),
        ({"graph": lambda attention: None}, "graph must return an AttentionGraph; got NoneType"),
        ({"graph": lambda attention: 1 / 0}, "graph failed: ZeroDivisionError"),
        ({"graph": without_first, "residual": 0.3}, "residual and without are not used"),
        ({"graph": without_first, "without": [2]}, "residual and without are not used"),
        ({"without": [9]}, "9"),
        ({"without": [0]}, "position 0 was taken out"),
        ({"residual": 2}, "residual must be a number from 0"),
    ],
)
def test_a_wrong_graph_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.AttnFlowError) as error:
        af.explain(TEXT, importance=(), **options)
    assert message in str(error.value)


def top_head_graph(attention: af.Attention) -> af.AttentionGraph:
    """Head 3 alone in the top layer, over fused layers below: it needs every head."""
    return attention.graph(top_head=(attention.depth, 3))


def test_a_function_that_makes_graphs_gets_every_head_at_every_door(tmp_path: Path) -> None:
    text, model = "the keys to the old house", af.load()
    graph = top_head_graph(af.capture(model, text, heads=None))
    expected = af.rollout(graph).at(0)
    options: dict[str, Any] = {"methods": ["rollout"], "graph": top_head_graph}
    explained = af.explain(text, model=model, importance=(), **options)
    np.testing.assert_allclose(explained.rollout.at(0), expected, atol=1e-12)
    report = af.evaluate(model, [text], against="blank_out", layers=[6], **options)
    np.testing.assert_allclose(report.examples[0].scores["rollout"][0], expected, atol=1e-12)
    (tmp_path / "texts.csv").write_text(f"text\n{text}\n")
    af.explain_corpus(tmp_path / "texts.csv", tmp_path / "out", layers=[6], **options)
    (row,) = af.read_corpus(tmp_path / "out").to_pandas()["rollout"]
    np.testing.assert_allclose(row[0], expected, atol=1e-6)
