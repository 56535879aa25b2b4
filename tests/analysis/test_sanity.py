"""Sanity: rankings on randomised weights, the order of stages, and that the given model stays unchanged."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import attnflow as af
from attnflow.analysis.evaluate.sanity import copy_model, list_stages, randomise_weights
from attnflow.core.graph import AttentionGraph
from attnflow.models.fingerprint import model_fingerprint
from tests.families import build, word_tokenizer

TEXTS = ["the key to the old cabinets", "the keys that the man lost", "a dog and the cats"]


def order_by_place(graph: AttentionGraph) -> Any:
    """[layer, query, key]: the same whatever the model does."""
    return np.tile(np.arange(1.0, graph.size + 1), (graph.depth, graph.size, 1))


def test_gradient_edges_change_with_the_head_and_a_method_that_looks_at_nothing_never() -> None:
    model = af.load("verb-number")
    methods = {"rollout": None, "place": af.token_attention("place", order_by_place)}
    report = af.evaluate(
        model, TEXTS, methods=methods, edges=["attention", "gradient"], sanity=[0, 1]
    )
    sanity = report.sanity
    assert sanity is not None
    assert sanity.stages == ("head", *(f"layer {number}" for number in range(6, 0, -1)))
    assert all(values.shape == (2, 7, 3) for values in sanity.correlations.values())
    for stage in sanity.stages:
        assert sanity.mean("place", stage) == pytest.approx(1.0)
        assert sanity.mean("gradient place", stage) == pytest.approx(1.0)
        assert sanity.mean("gradient rollout", stage) < 0.9
    assert sanity.mean("rollout", "head") == pytest.approx(1.0)  # attention does not know the head
    assert sanity.mean("rollout") < 0.6


def test_correlations_are_those_of_a_copy_randomised_by_hand() -> None:
    model, text = af.load("verb-number"), TEXTS[0]
    report = af.evaluate(model, [text], methods="rollout", edges="gradient", sanity=[3])
    assert report.sanity is not None
    copy = copy_model(model)
    target = model.target(model.predict([text])[0][0])
    intact = af.rollout(af.attention_graph(model, text, edges="gradient")).at(0)
    parts = list_stages(copy, model.encode(text))
    for number, modules in enumerate(parts.values()):
        randomise_weights(modules, 3000 + number)
        graph = af.attention_graph(copy, text, edges="gradient", target=target)
        expected = spearmanr(af.rollout(graph).at(0)[1:], intact[1:]).statistic
        found = report.sanity.correlations["gradient rollout"][0, number, 0]
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["distilbert", "llama", "gpt2"])
def test_hugging_face_models_are_randomised_from_the_top_on_a_copy(name: str) -> None:
    module = build(name)
    model = af.Model(module, word_tokenizer())
    before = model_fingerprint(model)
    options: dict[str, Any] = {"methods": "rollout", "edges": ["attention", "gradient"]}
    options |= {"against": "blank_out", "layers": [2, 3]}
    found = [
        af.evaluate(model, TEXTS, sanity=seeds, **options).sanity for seeds in (True, [0], [1])
    ]
    assert model_fingerprint(model) == before
    assert not any(part.training for part in module.modules())
    first, again, other = [each.correlations for each in found if each is not None]
    assert found[0] is not None
    assert found[0].stages == ("head", "layer 3", "layer 2", "layer 1")
    assert found[0].layer == 3
    for method in first:
        np.testing.assert_array_equal(first[method], again[method])
        assert not np.array_equal(first[method], other[method])
    assert (first["rollout"][:, 0] > 0.999).all()


def test_stages_change_what_they_name_and_nothing_below() -> None:
    """GPT-2 shares the weights of its head with its embeddings: the embeddings stay."""
    model = af.Model(build("gpt2"), word_tokenizer())
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    copy = copy_model(model)
    parts = list_stages(copy, model.encode(TEXTS[0]))
    changed = ["lm_head", "transformer.ln_f", "transformer.h.2", "transformer.h.1"]
    for name, modules in list(parts.items())[:3]:
        randomise_weights(modules, 0)
        assert name in ("head", "layer 3", "layer 2")
    for name, weight in copy.model.named_parameters(remove_duplicate=False):
        same = torch.equal(weight, model.model.get_parameter(name))
        is_flat = weight.std(correction=0) == 0  # norms before training: nothing to draw
        assert same == (is_flat or not name.startswith(tuple(changed))), name


@pytest.mark.parametrize("name", ["albert", "t5", "opt"])
def test_blocks_are_found_however_they_are_arranged(name: str) -> None:
    model = af.Model(build(name), word_tokenizer())
    parts = list_stages(model, model.encode(TEXTS[0]))
    layers = [stage for stage in parts if stage != "head"]
    expected = {
        "albert": 1,
        "t5": len(model.model.encoder.block) + len(model.model.decoder.block)
        if name == "t5"
        else 0,
        "opt": 3,
    }
    assert len(layers) == expected[name]
    if name == "t5":
        assert layers[0].startswith("decoder.block")
        assert layers[-1] == "encoder.block.0"


def test_random_weights_have_the_mean_and_spread_of_those_they_replace() -> None:
    linear = torch.nn.Linear(200, 300)
    with torch.no_grad():
        linear.weight.mul_(3.0).add_(0.5)
    old = linear.weight.detach().clone()
    randomise_weights([linear], 0)
    new = linear.weight.detach()
    assert float(new.mean()) == pytest.approx(float(old.mean()), abs=0.01)
    assert float(new.std()) == pytest.approx(float(old.std()), rel=0.02)
    assert abs(np.corrcoef(new.ravel(), old.ravel())[0, 1]) < 0.02


def test_the_report_has_its_sanity_in_every_form() -> None:
    planted = af.planted("last")
    examples = planted.examples(4)
    report = af.evaluate(planted.model, examples, methods=["raw", "rollout"], sanity=True)
    assert report.sanity is not None
    assert report.sanity.to_markdown().strip() in report.to_markdown()
    assert "n = 4; special tokens left out; seed 0" in report.to_markdown()
    assert json.loads(report.to_json())["sanity"][0]["randomised"] == "head"
    assert len(report.sanity.to_csv().splitlines()) == 1 + 2 * 3
    assert "sanity" in report.seconds
    plain = af.evaluate(planted.model, examples, methods=["raw", "rollout"])
    assert plain.sanity is None
    tables, _, _ = plain.to_markdown().partition("source:")
    assert report.to_markdown().startswith(tables.rstrip())
    assert repr(report.sanity) == "<Sanity: raw, rollout, 4 examples, randomised down to layer 1>"
    with pytest.raises(af.OptionError, match="no sanity of flow at layer 1; it has raw, rollout"):
        report.sanity.mean("flow")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sanity": 3}, "sanity must be True, False or a list of seeds; got 3"),
        ({"sanity": []}, "sanity must be True, False or a list of seeds; got []"),
        ({"sanity": "yes"}, "sanity must be True, False or a list of seeds; got 'yes'"),
        ({"sanity": [-1]}, "seeds of sanity must not be negative; got -1"),
        ({"sanity": [0.5]}, "seeds of sanity must be"),
        (
            {"sanity": True, "methods": [], "scorers": {"x": lambda text: [0.0] * 7}},
            "sanity ranks by methods on randomised weights; got scorers alone",
        ),
    ],
)
def test_what_is_wrong_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.OptionError) as error:
        af.evaluate("verb-number", TEXTS[:1], **options)
    assert message in str(error.value)


def test_a_model_without_blocks_is_refused() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = build("distilbert").distilbert.embeddings
            self.config = build("distilbert").config

    with pytest.raises(af.CaptureError, match="Holder has no list of blocks whose weights"):
        list_stages(af.Model(Holder()), af.load("verb-number").encode(TEXTS[0]))
