"""The job and its runner: options are read in one place, and events come as things become known."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.analysis.job import Job, Plan
from attnflow.analysis.run import Case, run
from attnflow.core.flow import solve
from attnflow.models.predict import Prediction, Target
from tests.families import build

TEXT = "the keys to the old house"
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}


def test_events_come_in_the_order_in_which_things_become_known() -> None:
    events = list(af.explain_events(TEXT))
    kinds = [event.kind for event in events if event.kind != "started"]
    assert kinds == [
        "encoded",
        "predicted",
        *["graph", "result"],  # relevance flow
        *["graph", "result", "result", "result"],  # raw, rollout, flow
        *["importance", "importance"],
        "done",
    ]
    assert {event.number for event in events} == {0}
    # what is computed next is told before it is known
    names = [event.name for event in events if event.kind == "started"]  # type: ignore[attr-defined]
    results = [event.run.name for event in events if event.kind == "result"]  # type: ignore[attr-defined]
    assert [name for name in names if name in results] == results
    assert results == ["relevance flow", "raw", "rollout", "flow"]


def test_the_prediction_is_known_before_any_flow_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise RuntimeError("a flow was solved")

    monkeypatch.setattr(solve, "find_flows", fail)
    monkeypatch.setattr(solve, "find_all_flows", fail)
    seen: list[Any] = []
    with pytest.raises(RuntimeError, match="a flow was solved"):
        seen.extend(af.explain_events(TEXT))
    (predicted,) = [event for event in seen if event.kind == "predicted"]
    assert predicted.prediction.label == "plural"


def test_events_of_several_inputs_carry_their_numbers() -> None:
    model = af.load()
    texts = ["the key", TEXT, "the cabinets near the old key"]
    job = Job.read(methods=["rollout"], importance=["blank_out"])
    told: dict[int, list[Any]] = {}
    for event in run(model, [Case(text, model.encode(text)) for text in texts], job):
        told.setdefault(event.number, []).append(event)
    assert sorted(told) == [0, 1, 2]
    for number, text in enumerate(texts):
        alone = af.explain(text, methods=["rollout"], importance=["blank_out"])
        (result,) = [event.run.result for event in told[number] if event.kind == "result"]
        (scored,) = [event.importance for event in told[number] if event.kind == "importance"]
        assert result.positions == (0,)
        assert result.at(0) == pytest.approx(alone.rollout.at(0), abs=1e-6)
        assert scored.values == pytest.approx(abs(alone.importance["blank_out"].values), abs=1e-5)
        assert told[number][-1].kind == "done"


def test_a_prediction_is_a_pair_that_knows_its_target() -> None:
    said = af.explain(TEXT, target="singular", methods=["raw"], importance=()).prediction
    assert said is not None
    label, probability = said
    assert (label, said.label, said.target.label, said.target.number) == (
        "plural",
        "plural",
        "singular",
        0,
    )
    assert said.target.probability == pytest.approx(1 - probability, abs=1e-6)
    copied = pickle.loads(pickle.dumps(said))
    assert (copied, copied.target) == (said, said.target)
    assert isinstance(copied, Prediction)
    assert Prediction("a", 0.5, Target(1, "b", 0.2)) == ("a", 0.5)


def test_no_target_becomes_class_0() -> None:
    # the predicted class is 1, and so is the one that importance watches
    found = af.explain(TEXT, importance=["blank_out"], methods=["raw"])
    assert found.importance["blank_out"].target == "plural"
    report = af.evaluate("verb-number", [TEXT], methods="raw", against="blank_out")
    assert (report.examples[0].label, report.examples[0].target) == ("plural", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["rolout"]}, "unknown method 'rolout'; choose from raw, rollout, flow"),
        ({"edges": "norms"}, "unknown edges 'norms'; choose from attention"),
        ({"importance": ["saliency"]}, "unknown importance 'saliency'"),
        ({"position": "last"}, "unknown position 'last'; choose from focal, max, mean"),
        ({"position": True}, "unknown position True"),
        ({"target": ("a", "b", "c")}, "a contrast is between two targets; got 3"),
        ({"heads": "median"}, "unknown heads 'median'"),
        ({"residual": 2.0}, "residual"),
        ({"without": ["x"]}, "without must be whole numbers"),
        ({"normalize": "rows"}, "unknown normalize 'rows'"),
        ({"normalize": ["sum"]}, "unknown normalize"),
        ({"edges": "norm", "residual": 0.3}, "hold the residual inside"),
        ({"edges": "norm", "without": [0]}, "make graphs of attention"),
        ({"graph": "x"}, "graph must be a function"),
        ({"layers": ["top"]}, "layers must be whole numbers"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(af.OptionError, match=message):
        Job.read(**options)


def test_the_same_options_are_refused_in_the_same_words_at_every_door(tmp_path: Path) -> None:
    doors: list[Callable[..., Any]] = [
        lambda **options: af.explain(TEXT, model="no-such-model", **options),
        lambda **options: af.evaluate("no-such-model", [TEXT], **options),
        lambda **options: next(af.explain_events(TEXT, model="no-such-model", **options)),
        lambda **options: af.explain_corpus(texts, tmp_path / "out", model="no-such", **options),
    ]
    texts = tmp_path / "texts.csv"
    texts.write_text("text\nthe key\n")
    wrong: list[dict[str, Any]] = [{"methods": ["rolout"]}, {"edges": "norms"}, {"without": ["x"]}]
    for options in wrong:
        with pytest.raises(af.OptionError) as expected:
            Job.read(**options)
        for door in doors:
            with pytest.raises(af.OptionError) as got:
                door(**options)
            assert str(got.value) == str(expected.value)


def test_a_plan_has_every_method_on_all_edges_and_what_comes_first() -> None:
    model = af.load()
    assert [choice.name for choice in Job.read().plan(model).choices] == [
        "relevance flow",
        "raw",
        "rollout",
        "flow",
    ]
    named = Job.read(methods=["raw", "flow"], edges=["norm", "attention"]).plan(model)
    assert [choice.name for choice in named.choices] == ["norm raw", "norm flow", "raw", "flow"]
    assert named.first is None
    first = Job.read().plan(model)
    assert isinstance(first, Plan)
    assert list(first.drop_first().weights) == ["attention"]


def test_query_is_position_for_one_more_release() -> None:
    with pytest.warns(FutureWarning, match="query is now position"):
        old = af.evaluate("verb-number", [TEXT], methods="raw", against="blank_out", query="max")
    new = af.evaluate("verb-number", [TEXT], methods="raw", against="blank_out", position="max")
    assert old.position == new.position == "max"
    assert list(old.rows()) == list(new.rows())


def test_a_text_generates_once_where_its_edges_are_not_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = af.Model(build("llama"))
    generate, count = type(model.model).generate, []

    def counted(self: Any, *given: Any, **options: Any) -> Any:
        count.append(1)
        return generate(self, *given, **options)

    def fail(*given: Any) -> Any:
        raise af.CaptureError("the branch of layer 1 was not understood")

    monkeypatch.setattr(type(model.model), "generate", counted)
    monkeypatch.setattr("attnflow.edges.graphs.make_mix", fail)
    story = af.generate(model, [5, 6, 7], **OPTIONS)
    assert len(count) == 1
    assert story.edges == ("attention",)
    assert "contribution edges are not available for this model" in story.notes[0]


def test_a_flow_to_words_is_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = af.explain(TEXT, methods=["flow"], importance=())
    solved = []
    find = vars(solve)["find_flows"]

    def counted(*given: Any, **options: Any) -> Any:
        solved.append(1)
        return find(*given, **options)

    monkeypatch.setattr(solve, "find_flows", counted)
    rows = [found.row("flow", by_word=True) for _ in range(3)]
    assert rows[0] is rows[2]
    assert len(solved) <= 1


def test_events_of_weights_and_wrong_options_are_refused_by_the_call() -> None:
    with pytest.raises(af.OptionError, match="requires an input of a model; got Attention"):
        af.explain_events(af.Attention([[[1.0]]]))
    with pytest.raises(af.OptionError, match="unknown method 'rolout'"):
        af.explain_events(TEXT, methods=["rolout"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": "max"}, "one position is explained, a number or focal; got 'max'"),
        ({"position": "last"}, "one position is explained, a number or focal; got 'last'"),
        ({"target": (None, "plural")}, "a contrast is between two named targets"),
    ],
)
def test_what_an_explanation_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        af.explain(TEXT, **options)


def test_importances_of_several_inputs_are_read_at_their_own_positions() -> None:
    model = af.Model(build("gpt2"))
    values: list[list[int]] = [[5, 6, 7], [8, 9, 10, 11, 12]]
    job = Job.read(methods=["raw"], importance=["input_gradient"], everywhere=True, by_word=True)
    found = {
        event.number: event.importance.values
        for event in run(model, [Case(value, model.encode(value)) for value in values], job)
        if isinstance(event, af.ImportanceReady)
    }
    for number, value in enumerate(values):
        alone = af.input_gradient(model, value).values
        assert found[number] == pytest.approx(alone, abs=1e-6)
    assert found[1][-1] > 0


def test_query_beside_position_is_refused_and_a_report_knows_both_names() -> None:
    with pytest.raises(af.OptionError, match="query is the old name of position"):
        af.evaluate("verb-number", [TEXT], position="max", query="mean")
    report = af.evaluate("verb-number", [TEXT], methods="raw", against="blank_out")
    with pytest.warns(FutureWarning, match=r"Report\.query is now position"):
        assert report.query == "focal"


def test_following_that_fails_at_the_first_layer_leaves_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = af.Model(build("llama"))
    expected = af.generate(model, [5, 6, 7], edges="attention", **OPTIONS)

    def fail(*given: Any, **options: Any) -> Any:
        raise af.CaptureError("layer 1 attended otherwise than when the model was traced")

    monkeypatch.setattr("attnflow.analysis.generate.generate.find_wirings", fail)
    with pytest.raises(af.CaptureError, match="attended otherwise"):
        af.generate(model, [5, 6, 7], edges="norm", **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr("attnflow.capturing.follow.spread_groups", fail)
    story = af.generate(model, [5, 6, 7], **OPTIONS)
    assert story.tokens == expected.tokens
    assert "contribution edges are not available for this model" in story.notes[0]


def test_mistakes_of_users_at_new_doors_are_one_line() -> None:
    untyped: Any = af  # mypy would refuse all of this
    with (
        pytest.raises(af.OptionError, match="must be a function of a Progress; got int"),
        untyped.progress_listener(3),
    ):
        pass
    with pytest.raises(af.OptionError, match="workers must be a whole number"):
        untyped.explain(TEXT, methods="raw", workers="x")
    with pytest.raises(af.OptionError, match="must be a BackwardRule or None; got 'plain'"):
        untyped.EdgeWeight("mine", lambda mix: mix.attention, backward="plain")
    with pytest.raises(af.OptionError, match="explained without a model; got 'verb-number'"):
        af.explain(af.Attention([[[1.0]]]), model="verb-number")
    with pytest.raises(af.OptionError, match="one text per prompt; got the pair"):
        untyped.generate(af.Model(build("llama")), ("the key", "is lost"))


def test_layers_by_result_are_for_corpora_and_unknown_options_are_refused() -> None:
    untyped: Any = af  # mypy would refuse all of this
    with pytest.raises(af.OptionError, match="layers must be whole numbers"):
        untyped.evaluate("verb-number", [TEXT], methods="raw", layers={"raw": [1]})
    for option in ("segments", "layers", "everywhere"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            untyped.explain_events(TEXT, **{option: None})


@pytest.mark.parametrize("part", ["spread_groups", "Follower.take"])
def test_following_that_fails_on_the_way_leaves_attention(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = af.Model(build("llama"))
    expected = af.generate(model, [5, 6, 7], edges="attention", **OPTIONS)
    calls = []
    module = sys.modules["attnflow.capturing.follow"]
    owner, name = (module.Follower, "take") if "." in part else (module, part)
    right = getattr(owner, name)

    def fail_later(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise af.CaptureError("a layer attended otherwise")
        return right(*given)

    monkeypatch.setattr(owner, name, fail_later)
    story = af.generate(model, [5, 6, 7], **OPTIONS)
    assert len(calls) == 2
    assert story.tokens == expected.tokens
    assert story.edges == ("attention",)
    np.testing.assert_allclose(story.attention.weights, expected.attention.weights, atol=1e-6)
    assert "a layer attended otherwise" in story.notes[0]
