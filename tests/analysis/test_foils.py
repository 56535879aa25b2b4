"""Targets and foils at every door: what is watched, per example too, and what is refused in one line."""

import copy
import json
import pickle
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import attnflow as af
from attnflow.analysis.job import Job
from attnflow.analysis.page.page import describe_explanation
from attnflow.analysis.run import Case, ImportanceReady, Predicted, run
from attnflow.corpus.scores import evaluate_corpus
from attnflow.models.predict import SpelledToken
from tests.console import inside
from tests.families import build, word_tokenizer

TEXT = "the keys to the old house"
WORDS = ["the", "key", "to", "Paris", "Rome"]
SCORES = [0.0, 1.0, 3.0, 2.0, 0.0, 0.0, 1.0]


def logits(model: Any, ids: Any) -> Any:
    """[class], in float64."""
    encoded = model.encode(list(ids))
    with torch.no_grad():
        found = model.logits(model.batch([encoded]), [model.logit_position(encoded)])
    return found[0].double()


def lean(model: Any, ids: Any, target: int = 1, foil: int = 0) -> float:
    """The logit of the target minus that of the foil."""
    found = logits(model, ids)
    return float(found[target] - found[foil])


def spelled_model(paris: float = 0.0) -> Any:
    """A tiny Llama over words with and without a space before them; it prefers " Paris" to "Paris" by so much."""
    names = [name for word in WORDS for name in (word, f"Ġ{word}")]
    letters = sorted({letter for name in names for letter in name})
    vocabulary = {name: place for place, name in enumerate(dict.fromkeys([*names, *letters]))}
    merges: list[tuple[str, str]] = []
    for name in names:  # letter by letter, from the left
        for end in range(2, len(name) + 1):
            if name[:end] not in vocabulary:
                vocabulary[name[:end]] = len(vocabulary)
            merges.append((name[: end - 1], name[end - 1]))
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    module = deepcopy(build("llama"))  # whose head is replaced
    head = torch.nn.Linear(module.config.hidden_size, module.config.vocab_size)
    torch.manual_seed(1)
    torch.nn.init.normal_(head.weight, std=0.01)
    torch.nn.init.zeros_(head.bias)
    head.bias.data[vocabulary["ĠParis"]] = paris
    module.lm_head = head
    return af.Model(module.eval(), PreTrainedTokenizerFast(tokenizer_object=base))


# ---- what is watched -----------------------------------------------------------------------------


def test_blank_out_is_the_change_of_the_difference() -> None:
    model = af.load()
    found = af.blank_out(model, TEXT, "plural", foil="singular", signed=True)
    ids = list(model.encode(TEXT).ids)
    unknown = model.tokenizer.unk_token_id
    whole = lean(model, ids)
    expected = [
        whole - lean(model, [*ids[:place], unknown, *ids[place + 1 :]]) for place in range(len(ids))
    ]
    np.testing.assert_allclose(found.values, expected, atol=1e-4)
    assert found.target == "plural - singular"
    assert found.score == pytest.approx(whole, abs=1e-5)
    assert found.describe_value() == "logit 3.7421"


def test_input_gradient_is_that_of_the_difference() -> None:
    model = af.Model(build("llama"))
    ids = [3, 5, 7, 2]
    found = af.input_gradient(model, ids, 9, foil=4)
    words = model.model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    last = model.model(inputs_embeds=words).logits[0, -1]
    difference = float((last[9] - last[4]).detach())
    (gradient,) = torch.autograd.grad(last[9] - last[4], words)
    np.testing.assert_allclose(found.values, gradient[0].norm(dim=-1), rtol=1e-4)
    assert found.score == pytest.approx(difference, rel=1e-4)


def test_faithfulness_watches_the_difference() -> None:
    model = af.load()
    metrics = ["comprehensiveness@100", "log_odds@100"]
    options: dict[str, Any] = {"metrics": metrics, "target": "plural", "foil": "singular"}
    found = af.faithfulness(model, TEXT, SCORES, **options)
    ids, unknown = list(model.encode(TEXT).ids), model.tokenizer.unk_token_id
    fall = lean(model, ids) - lean(model, [ids[0], *[unknown] * (len(ids) - 1)])
    assert found["comprehensiveness@100"] == pytest.approx(fall, abs=1e-4)
    assert found["log_odds@100"] == pytest.approx(-fall, abs=1e-4)
    assert found == af.faithfulness(model, TEXT, SCORES, **options, target_of="logit")


def test_the_runner_up_is_chosen_on_the_whole_input() -> None:
    model = af.Model(build("llama"))
    ids = [3, 5, 7, 2]
    first, second = logits(model, ids).topk(2).indices.tolist()
    for function in (af.blank_out, af.input_gradient, af.relevance):
        found = function(model, ids, foil=af.RUNNER_UP)
        named = function(model, ids, foil=second)
        np.testing.assert_array_equal(found.values, named.values)
        assert found.target == f"{model.label(first)} - {model.label(second)}"
    scores = [1.0, 3.0, 2.0, 0.0]
    automatic, named_one = (
        af.faithfulness(model, ids, scores, foil=foil, replacement="removal")
        for foil in (af.RUNNER_UP, second)
    )
    assert automatic == named_one
    # of a target that is not the prediction, it is the prediction
    assert af.blank_out(model, ids, second, foil=af.RUNNER_UP).target.endswith(model.label(first))


def test_a_list_of_foils_has_one_per_input() -> None:
    model = af.Model(build("llama"))
    inputs, foils = [[3, 5, 7], [2, 4, 6, 8]], [9, 11]
    for function in (af.blank_out, af.input_gradient, af.relevance):
        several = function(model, inputs, [1, 2], foil=foils)
        for place, found in enumerate(several):
            alone = function(model, inputs[place], place + 1, foil=foils[place])
            np.testing.assert_allclose(found.values, alone.values, rtol=1e-4, atol=1e-6)


def test_explain_passes_its_foil_to_all_importances() -> None:
    seen: list[Any] = []

    def own(model: Any, inputs: Any, target: Any, foil: Any = None) -> Any:
        seen.append(foil)
        return af.blank_out(model, inputs, target, foil=foil)

    importance = {"blank_out": None, "input_gradient": None, "relevance": None, "own": own}
    for edges in ("attention", "gradient"):  # input gradients share the pass of gradient edges
        ex = af.explain(TEXT, edges=edges, foil=af.RUNNER_UP, importance=importance)
        assert {each.target for each in ex.importance.values()} == {"plural - singular"}
        np.testing.assert_allclose(
            ex.importance["input_gradient"].values,
            af.input_gradient("verb-number", TEXT, foil="singular").values,
            rtol=1e-4,
        )
        difference = [each.score or 0.0 for each in ex.importance.values()]
        assert max(difference) - min(difference) < 1e-4
    assert seen == [[0], [0]]
    prediction = ex.prediction
    assert prediction is not None
    assert prediction.foil is not None
    assert (prediction.target.label, prediction.foil.label) == ("plural", "singular")
    assert pickle.loads(pickle.dumps(prediction)).foil == prediction.foil
    assert "blanking keys costs plural - singular" in ex.summary()
    shown = describe_explanation(ex).importance
    assert [each.target for each in shown] == ["plural - singular"] * len(shown)
    assert all(each.score == pytest.approx(3.742, abs=1e-3) for each in shown)


def test_a_case_has_its_own_foil() -> None:
    model = af.Model(build("llama"))
    ids = [[3, 5, 7], [2, 4, 6]]
    job = Job.read(methods="rollout", edges="relevance", importance="relevance", foil=9)
    cases = [Case(ids[0], model.encode(ids[0]), 1, 11), Case(ids[1], model.encode(ids[1]), 1)]
    events = list(run(model, cases, job))
    watched = [event.prediction for event in events if isinstance(event, Predicted)]
    assert [each.foil.number for each in watched if each and each.foil] == [11, 9]
    scored = [event.importance for event in events if isinstance(event, ImportanceReady)]
    names = [f"{model.label(1)} - {model.label(foil)}" for foil in (11, 9)]
    assert [each.target for each in scored] == names
    alone = Job.read(methods="rollout", edges="relevance")
    with pytest.raises(af.OptionError, match="foils are of all inputs or of none; got None for"):
        list(run(model, cases, alone))


# ---- evaluate ------------------------------------------------------------------------------------

EXAMPLES = [(TEXT, "plural"), ("the key to the cabinets", "singular")]


def test_evaluate_takes_a_foil_per_example() -> None:
    options: dict[str, Any] = {
        "methods": "rollout",
        "edges": "relevance",
        "faithfulness": "comprehensiveness",
        "layers": [6],
    }
    report = af.evaluate("verb-number", EXAMPLES, foil=["singular", "plural"], **options)
    automatic = af.evaluate("verb-number", EXAMPLES, foil=af.RUNNER_UP, **options)
    assert [(each.label, each.foil) for each in report.examples] == [
        ("plural", "singular"),
        ("singular", "plural"),
    ]
    assert list(report.rows()) == list(automatic.rows())
    for example, (text, label) in zip(report.examples, EXAMPLES, strict=True):
        foil = example.foil
        expected = af.blank_out("verb-number", text, label, foil=foil).values
        np.testing.assert_allclose(example.importance["blank_out"], expected, atol=1e-5)
        graph = af.attention_graph("verb-number", text, edges="relevance", target=label, foil=foil)
        row = af.rollout(graph).at(position=0)
        np.testing.assert_allclose(example.scores["relevance rollout"][0], row, atol=1e-5)
    assert "of the logit of target minus foil, beside" in report.to_markdown()
    content = json.loads(json.dumps(report._content(), default=lambda value: value.tolist()))
    assert content["examples"][0]["foil"] == "singular"
    assert content["target_of"] == "logit"


def test_sanity_keeps_the_foil_of_the_intact_model() -> None:
    report = af.evaluate(
        "verb-number", EXAMPLES, methods="rollout", edges="gradient", foil=af.RUNNER_UP, sanity=True
    )
    assert report.sanity is not None
    assert np.isfinite(report.sanity.mean("gradient rollout"))


@pytest.mark.parametrize(
    ("foil", "message"),
    [
        (["plural"], "a list of foils has one per example, 2 here; got 1"),
        (["singular", None], "got None for example 2: name a class, or give attnflow.RUNNER_UP"),
        (["singular", "dual"], "example 2: unknown foil 'dual'; choose from singular, plural"),
        (
            ["plural", "plural"],
            "example 1: a contrast is between two different targets; got 'plural' twice",
        ),
        ("plural", "a contrast is between two different targets; got 'plural' twice"),
    ],
)
def test_foils_of_examples_are_checked(foil: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        af.evaluate("verb-number", EXAMPLES, foil=foil)


# ---- generations ---------------------------------------------------------------------------------


def test_generated_tokens_are_contrasted() -> None:
    model = af.Model(build("llama"))
    options: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None}
    edges = ["gradient", "relevance"]
    story = af.generate(model, [3, 5, 7], edges=edges, foil=af.RUNNER_UP, **options)
    first, second = logits(model, [3, 5, 7]).topk(2).indices.tolist()
    for kind in edges:
        graph = af.attention_graph(model, [3, 5, 7], edges=kind, target=first, foil=second)
        whole = af.rollout(graph, normalize=None).values[:, -1]
        found = story.by("rollout", edges=kind)
        np.testing.assert_allclose(found.values[0].T, whole, atol=1e-5)
    assert pickle.loads(pickle.dumps(story)).edges == story.edges
    story = af.generate(model, [3, 5, 7], edges="relevance", foil=int(first), **options)
    with pytest.raises(
        af.OptionError, match=r"a foil is another token; .* generated token 0: give"
    ):
        story.rollout()


def test_a_generation_without_edges_that_watch_refuses_a_foil() -> None:
    with pytest.raises(af.OptionError, match=r"watch each generated token, .* got edges attention"):
        af.generate(build("llama"), [3, 5], edges="attention", foil=4)


# ---- corpora -------------------------------------------------------------------------------------


def begin(folder: Path, **options: Any) -> Any:
    path = folder / "texts.csv"
    rows = "".join(f"{text},{label}\n" for text, label in EXAMPLES)
    path.write_text(f"text,label\n{rows}the old keys,plural\n")
    given = {"methods": ["rollout"], "edges": "relevance", "label_column": "label"} | options
    return af.explain_corpus(path, folder / "out", **given)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_corpus_records_the_runner_up(workers: int, tmp_path: Path) -> None:
    begin(tmp_path, foil=af.RUNNER_UP, importance="blank_out", workers=workers)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["options"]["foil"] == {"runner_up": True}
    for row in af.read_corpus(tmp_path / "out").to_pylist():
        ex = af.explain(row["text"], edges="relevance", target=row["label"], foil=af.RUNNER_UP)
        np.testing.assert_allclose(
            row["blank_out"], np.abs(ex.importance["blank_out"].values), atol=1e-4
        )
        values = ex.results["relevance rollout"].values[:, 0]
        np.testing.assert_allclose(row["relevance rollout"], values, atol=1e-5)
    begin(tmp_path, workers=workers)  # the foil is that of the folder
    with pytest.raises(
        af.FileError, match=r"option foil was \{'runner_up': True\} and is 'plural'"
    ):
        begin(tmp_path, foil="plural")


def test_a_corpus_with_a_named_foil_refuses_rows_of_that_label(tmp_path: Path) -> None:
    begin(tmp_path, foil="singular", importance="blank_out")
    found = af.read_corpus(tmp_path / "out").to_pylist()
    assert [row["label"] for row in found] == ["plural", "plural"]
    report = evaluate_corpus(tmp_path / "out", faithfulness="comprehensiveness")
    expected = af.evaluate(
        "verb-number",
        [EXAMPLES[0], ("the old keys", "plural")],
        methods="rollout",
        edges="relevance",
        foil="singular",
        faithfulness="comprehensiveness",
    )
    means = [
        {row.layer: row.mean for row in each if row.against == "comprehensiveness" and row.layer}
        for each in (report.named_rows(), expected.named_rows)
    ]
    assert means[0] == pytest.approx(means[1], abs=1e-4)
    assert (
        "faithfulness (of the logit of the target minus that of the foil)" in report.to_markdown()
    )
    with pytest.raises(af.OptionError, match="with a foil the difference of two logits is watched"):
        evaluate_corpus(tmp_path / "out", faithfulness="deletion", target_of="probability")


@pytest.mark.parametrize(
    ("foil", "message"),
    [
        ({"runner_up": False}, "runner_up of foil of options must be true; got False"),
        ({"automatic": True}, "foil of options must have 'runner_up'"),
        (["plural"], "foil of options must be an object; got list"),
    ],
)
def test_a_damaged_foil_in_a_manifest_is_refused(foil: Any, message: str, tmp_path: Path) -> None:
    begin(tmp_path)
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["options"]["foil"] = foil
    path.write_text(json.dumps(manifest))
    with pytest.raises(af.FileError, match=message):
        af.read_corpus(tmp_path / "out")


# ---- bad input, at every door --------------------------------------------------------------------

DOORS: dict[str, Any] = {
    "blank_out": lambda model, **options: af.blank_out(model, "the key", **options),
    "input_gradient": lambda model, **options: af.input_gradient(model, "the key", **options),
    "relevance": lambda model, **options: af.relevance(model, "the key", **options),
    "faithfulness": lambda model, **options: af.faithfulness(
        model, "the key", scores_of(model), **options
    ),
    "explain": lambda model, **options: af.explain("the key", model=model, **options),
    "explain_events": lambda model, **options: list(
        af.explain_events("the key", model=model, edges="relevance", **options)
    ),
    "attention_graph": lambda model, **options: af.attention_graph(
        model, "the key", edges="relevance", **options
    ),
    "capture_mix": lambda model, **options: af.capture_mix(
        model, "the key", backward="linearised", **options
    ),
    "evaluate": lambda model, target=None, **options: af.evaluate(
        model, [("the key", target)], methods="rollout", **options
    ),
}


def scores_of(model: Any) -> list[float]:
    opened = af.load(model) if isinstance(model, str) else model
    return [float(place) for place in range(len(opened.encode("the key").tokens))]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"target": "dual"}, "unknown target 'dual'; choose from singular, plural"),
    ({"foil": "dual"}, "unknown foil 'dual'; choose from singular, plural"),
    ({"foil": 2}, "foil must be from 0 to 1 for VerbNumber; got 2"),
    ({"foil": 0.5}, "a foil is a class by name or number; got 0.5"),
    (
        {"target": "plural", "foil": "plural"},
        "a contrast is between two different targets; got 'plural' twice",
    ),
    (
        {"target": "plural", "foil": 1},
        "a contrast is between two different targets; got 'plural' twice",
    ),
    ({"foil": "singular"}, "a contrast is between two different targets; got 'singular' twice"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_targets_and_foils_are_one_line(
    door: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(af.OptionError, match=message) as caught:  # the prediction is singular
        DOORS[door]("verb-number", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("door", [door for door in DOORS if door != "faithfulness"])
def test_a_model_that_predicts_nothing_has_no_foil(door: str) -> None:
    with pytest.raises(af.OptionError, match=r"predict.* has no head that predicts"):
        DOORS[door](af.Model(build("bert"), word_tokenizer()), foil=0)


@pytest.mark.parametrize("door", [*DOORS, "generate"])
@pytest.mark.parametrize("name", ["target", "foil"])
@pytest.mark.parametrize("text", ["Paris Rome", "", "  "])
def test_a_token_is_one_token(door: str, name: str, text: str) -> None:
    if (door, name) == ("generate", "target"):
        pytest.skip("its targets are the generated tokens")
    doors = DOORS | {
        "generate": lambda model, **options: af.generate(
            model, "the key", edges="gradient", **options
        )
    }
    with pytest.raises(af.OptionError, match=f"unknown {name} .*it must be one token of"):
        doors[door](spelled_model(), **{name: text})


@pytest.mark.parametrize(
    "ask",
    [
        lambda: af.faithfulness("verb-number", TEXT, SCORES, foil=0, target_of="probability"),
        lambda: af.evaluate(
            "verb-number", EXAMPLES, foil=af.RUNNER_UP, target_of="log_probability"
        ),
        lambda: af.evaluate("verb-number", EXAMPLES, foil=[0, 1], target_of="probability"),
        lambda: af.input_gradient("verb-number", TEXT, foil=0, of="probability"),
    ],
)
def test_a_foil_is_of_logits(ask: Any) -> None:
    with pytest.raises(
        af.OptionError, match=r"with a foil the difference of two logits is watched; got \w+='"
    ):
        ask()


def test_weights_have_no_foil() -> None:
    with pytest.raises(af.OptionError, match=r"and foil requires one; got attnflow\.RUNNER_UP"):
        af.explain(af.capture("verb-number", TEXT), foil=af.RUNNER_UP)


# ---- spellings -----------------------------------------------------------------------------------


def test_a_leading_space_is_part_of_the_token() -> None:
    model = spelled_model()
    names = {name: model.label(model.target(name)) for name in (" Paris", "Paris", "ĠParis", " ")}
    assert names == {" Paris": "ĠParis", "Paris": "Paris", "ĠParis": "ĠParis", " ": "Ġ"}
    token = model.target("Paris")
    assert isinstance(token, SpelledToken)
    for copied in (pickle.loads(pickle.dumps(token)), copy.deepcopy(token)):
        assert (copied, copied.spaced) == (token, model.target(" Paris"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["target", "foil"])
def test_a_space_that_was_forgotten_is_warned_of(door: str, name: str) -> None:
    options = {"target": " the", "foil": " Rome", name: "Paris"}
    said = "'Paris' is a token without a space before it, and ' Paris' is more probable here: give"
    model = spelled_model(paris=5.0)
    if door == "explain":
        ex = DOORS[door](model, **options)
        assert sum(said in note for note in ex.notes) == 1
    else:
        with pytest.warns(af.TargetWarning, match=said):
            DOORS[door](model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", af.TargetWarning)
        DOORS[door](model, **options | {name: " Paris"})
        DOORS[door](spelled_model(paris=-5.0), **options)


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["explain", TEXT, "--foil", "dual"],
            "unknown --foil 'dual'; choose from singular, plural",
        ),
        (["explain", TEXT, "--foil", "plural"], "a contrast is between two different targets"),
        (["explain", TEXT, "--foil", "0", "--runner-up"], "got --foil 0 and --runner-up: give one"),
        (["evaluate", "verb-number", "{file}", "--foil", "dual"], "unknown foil 'dual'"),
        (
            ["evaluate", "verb-number", "{file}", "--runner-up", "--target-of", "probability"],
            "with a foil the difference of two logits is watched",
        ),
        (["corpus", "run", "{file}", "--out", "{out}", "--foil", "dual"], "unknown --foil 'dual'"),
    ],
)
def test_commands_check_foils(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "texts.csv"
    file.write_text(f"text,label\n{TEXT},plural\n")
    filled = [each.format(file=file, out=tmp_path / "out") for each in arguments]
    assert inside(monkeypatch, *filled) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_commands_take_foils(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.csv"
    file.write_text(f"text,label\n{TEXT},plural\n")
    assert inside(monkeypatch, "explain", TEXT, "--edges", "relevance", "--runner-up") == 0
    assert "what plural - singular (logit 3.742) depends on" in capsys.readouterr().out
    options = ["--foil", "singular", "--faithfulness", "comprehensiveness"]
    assert inside(monkeypatch, "evaluate", "verb-number", file, *options) == 0
    assert "logit of target minus foil" in " ".join(capsys.readouterr().out.split())
    out = tmp_path / "out"
    assert inside(monkeypatch, "corpus", "run", file, "--out", out, "--runner-up") == 0
    assert json.loads((out / "manifest.json").read_text())["options"]["foil"] == {"runner_up": True}
