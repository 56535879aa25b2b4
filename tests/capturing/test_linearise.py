"""The linearised backward pass: conserves the logit, equals an oracle by hand, and leaves the forward pass as it is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import attnflow as af
from attnflow.analysis.importance.relevance import RELEVANCE_KEY, watch_relevance
from attnflow.capturing.backward import Watch, run_backward
from attnflow.capturing.backward_rule import LINEAR_PARTS, LINEARISED, PLAIN
from tests.families import DECODERS, ENCODERS, FAMILIES, OUTSIDE, make_input, perturb

KEPT = "attnflow.capturing.checkpointing.KEPT"
TEXT = "the keys to the old house"
ONE_STACK = [family for family in [*ENCODERS, *DECODERS] if family not in OUTSIDE]


def predicting(family: str, **options: Any) -> af.Model:
    """A model of a family with a head that predicts: a classifier, or a language model."""
    _, config = FAMILIES[family]
    given = config()
    auto = t.AutoModelForCausalLM if family in DECODERS else t.AutoModelForSequenceClassification
    torch.manual_seed(0)
    model = auto.from_config(given, **options)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    return af.Model(model.eval())


@pytest.mark.parametrize("family", ONE_STACK)
def test_tokens_and_biases_add_up_to_the_logit(family: str) -> None:
    try:
        model = predicting(family)
    except ValueError:
        pytest.skip(f"{family} has no head that predicts")
    if not model.probe.interface:
        pytest.skip(f"{family} attends outside of the interface")
    given = make_input(family)
    shares = af.relevance(model, given)
    assert shares.score is not None
    assert shares.biases is not None
    scale = max(abs(shares.score), float(np.abs(shares.values).sum()))
    assert abs(shares.values.sum() + shares.biases - shares.score) <= 1e-4 * scale
    with torch.no_grad():
        encoded = model.encode(given)
        logits = model.logits(model.batch([encoded]), [model.logit_position(encoded)])
    assert shares.score == float(logits.max())  # the forward pass is that of the model, bit for bit


@pytest.mark.parametrize("part", [*LINEAR_PARTS, "attention"])
def test_conservation_fails_without_any_one_part(part: str) -> None:
    model = predicting("llama")  # has no biases
    encoded = model.encode(make_input("llama"))

    def missing(rule: af.BackwardRule) -> float:
        watch = Watch(None, "logit", rule, ("blocks",))
        found = run_backward(model, [encoded], {0: watch})
        state, gradient = found.states["blocks"], found.gradients[0].states["blocks"]
        total = float((state.double() * gradient.double()).sum())
        return abs(total - found.gradients[0].scores[0]) / abs(found.gradients[0].scores[0])

    whole = replace(LINEARISED, name="copy")
    lesser = (
        replace(whole, attention=None)
        if part == "attention"
        else replace(whole, linear=set(LINEAR_PARTS) - {part})
    )
    assert missing(whole) < 1e-5
    assert missing(lesser) > 1e-2


def test_a_small_logit_is_as_precise_as_the_largest_one() -> None:
    model = predicting("gpt2")
    model.model.bfloat16()
    for target in range(60):
        shares = af.relevance(model, make_input("gpt2"), target)
        assert shares.score is not None
        missing = abs(shares.values.sum() + shares.biases - shares.score)
        assert missing < 0.03 * np.abs(shares.values).sum() + 0.05


# ---- the rule beside others ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "vit"])
def test_other_rules_of_the_same_forward_pass_are_what_they_are_alone(family: str) -> None:
    model = af.Model(perturb(family)) if family not in ("llama", "gpt2") else predicting(family)
    if not model.predicts:
        pytest.skip(f"{family} here predicts nothing")
    encoded = [model.encode(make_input(family))]
    watches = {"plain": Watch(rule=PLAIN), "linearised": Watch(rule=LINEARISED)}
    both = run_backward(model, encoded, watches).gradients
    for name, watch in watches.items():
        alone = run_backward(model, encoded, {name: watch}).gradients[name]
        for call, gradient in alone.attention.items():
            torch.testing.assert_close(both[name].attention[call], gradient)


def test_recomputed_blocks_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = predicting("gpt2")
    inputs = [make_input("gpt2"), make_input("gpt2", 5)]
    kept = [af.relevance(model, each) for each in inputs]
    graph = af.attention_graph(model, inputs[0], edges="relevance_and_gradient")
    monkeypatch.setattr(KEPT, 0.0)
    for before, value in zip(kept, inputs, strict=True):
        after = af.relevance(model, value)
        np.testing.assert_allclose(after.values, before.values, rtol=1e-5, atol=1e-7)
        assert after.biases == pytest.approx(before.biases, rel=1e-5)
    again = af.attention_graph(model, inputs[0], edges="relevance_and_gradient")
    np.testing.assert_allclose(again.edges, graph.edges, rtol=1e-5, atol=1e-7)


def test_the_mean_of_both_is_the_mean_of_both() -> None:
    parts = [
        af.attention_graph("verb-number", TEXT, edges=edges).edges
        for edges in ("relevance", "gradient", "relevance_and_gradient")
    ]
    np.testing.assert_allclose((parts[0] + parts[1]) / 2, parts[2], rtol=1e-5)


# ---- signed edges --------------------------------------------------------------------------------


def test_signed_relevance_is_the_sum_over_all_paths() -> None:
    model = predicting("llama")
    given = make_input("llama")
    shares = af.relevance(model, given, foil=af.RUNNER_UP)
    graph = af.attention_graph(model, given, edges="signed_relevance", foil=af.RUNNER_UP)
    assert graph.signed
    row = af.rollout(graph, normalize=None).at(-1)
    assert (row < 0).any()
    assert row.sum() == pytest.approx(1)
    assert shares.score is not None
    scale = np.abs(shares.values).max()
    np.testing.assert_allclose(row * shares.score, shares.values, atol=1e-4 * scale)
    with pytest.raises(af.OptionError, match="a capacity is not negative, and signed_relevance"):
        af.flow(graph)
    with pytest.raises(af.OptionError, match="use rollout, or relevance edges"):
        af.max_flow(graph, source=(2, 6), target=(0, 1))


# ---- targets, foils and what is refused ----------------------------------------------------------


def test_a_foil_is_the_difference_of_two_relevances() -> None:
    named = [af.relevance("verb-number", TEXT, target) for target in ("plural", "singular")]
    contrast = af.relevance("verb-number", TEXT, foil=af.RUNNER_UP)
    assert contrast.target == "plural - singular"
    np.testing.assert_allclose(contrast.values, named[0].values - named[1].values, atol=1e-5)
    several = af.relevance("verb-number", [TEXT, "the keys"], ["plural", None], foil="singular")[:1]
    np.testing.assert_allclose(several[0].values, contrast.values, atol=1e-6)


def test_explain_has_relevance_by_name_and_watches_the_foil() -> None:
    ex = af.explain(TEXT, edges="relevance", importance="relevance", foil=af.RUNNER_UP)
    assert ex.importance["relevance"].target == "plural - singular"
    assert ex.runs["relevance rollout"].graph is not None
    assert ex.runs["relevance rollout"].graph.source.target == "plural - singular"
    words = ex.importance["relevance"].by_word()
    assert words.values.sum() == pytest.approx(ex.importance["relevance"].values.sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "plural", "foil": "plural"}, "a contrast is between two different targets"),
        ({"target": ("plural", "singular"), "foil": 0}, "a pair of targets has its foil"),
        ({"foil": "many"}, "unknown foil 'many'; choose from singular, plural"),
        ({"foil": "plural"}, "a contrast is between two different targets; got 'plural' twice"),
    ],
)
def test_foils_are_checked(options: dict[str, Any], message: str) -> None:
    for door in (
        af.explain,
        lambda text, **given: af.attention_graph("verb-number", text, **given),
    ):
        with pytest.raises(af.OptionError, match=message):
            door(TEXT, edges="relevance", **options)


def test_relevance_watches_the_logit_only() -> None:
    with pytest.raises(af.OptionError, match="relevance watches the logit"):
        af.attention_graph("verb-number", TEXT, edges="relevance", target_of="probability")


class Odd(torch.nn.Module):
    """A feed-forward network for which there is no rule."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.map = kind, torch.nn.Linear(width, width)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        if self.kind == "cumprod":
            return state.cumprod(-1) * 0.0 + self.map(state)
        if self.kind == "matmul":
            return state @ (state.transpose(1, 2) @ self.map(state)) * 1e-3
        return self.map(state) + torch.sigmoid(state)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("cumprod", "cumprod"),
        ("matmul", "matmul of two tensors that both depend on the stream"),
        ("sum", "add of the stream and a factor that is held fixed"),
    ],
)
def test_an_operation_without_a_rule_names_its_module(kind: str, what: str) -> None:
    model = predicting("llama")
    model.model.model.layers[1].mlp = Odd(kind, 32).eval()
    with pytest.raises(
        af.CaptureError, match=rf"model\.layers\.1\.mlp \(Odd\): it computes {what}"
    ):
        run_backward(
            model, [model.encode(make_input("llama"))], {RELEVANCE_KEY: watch_relevance([None])}
        )


def test_a_rule_names_its_linear_parts() -> None:
    rule = af.BackwardRule("norms alone", linear={"norms"})
    assert rule.linear == {"norms"}
    assert not rule.conserves
    with pytest.raises(af.OptionError, match="unknown linear part 'gates'"):
        af.BackwardRule("mine", linear=["gates"])


def test_without_named_methods_signed_edges_have_no_flow() -> None:
    assert list(af.explain(TEXT, edges="signed_relevance").results) == [
        "signed_relevance raw",
        "signed_relevance rollout",
    ]
    with pytest.raises(af.OptionError, match="a capacity is not negative"):
        af.explain(TEXT, edges="signed_relevance", methods="flow")
