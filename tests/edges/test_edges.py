"""Edges of every kind, against loops over the formulas in float64, on every family."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.core.choices import call_own
from attnflow.models.wiring.find import find_wirings
from tests.edges.parts import build_parts
from tests.families import FAMILIES, OUTSIDE, PAIRS, build, make_input, perturb

TEXT = "the key to the cabinets"
KINDS = ("effective", "norm", "contribution")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OUTSIDE])
def test_edges_are_those_of_the_formulas(family: str) -> None:
    model = af.Model(perturb(family))
    for mix in af.capture_mix(model, make_input(family)):
        parts, stream = build_parts(mix), mix.stream.double().numpy()
        lengths = np.linalg.norm(parts, axis=-1)
        whole = np.abs(stream).sum(axis=-1)[:, None]
        nearer = np.maximum(0.0, whole - np.abs(stream[:, None] - parts).sum(axis=-1))
        for name, expected in {"norm": lengths, "contribution": nearer}.items():
            empty = expected.sum(axis=-1) == 0
            expected[empty, mix.own[empty]] = 1.0
            expected /= expected.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(af.EDGES[name].weigh(mix), expected, atol=3e-6)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OUTSIDE])
def test_the_parts_add_up_to_the_stream_but_for_what_no_key_brought(family: str) -> None:
    model = af.Model(perturb(family))
    norms = [getattr(wiring, "norm", None) for wiring in find_wirings(model)]
    for mix, norm in zip(af.capture_mix(model, make_input(family)), norms, strict=True):
        rest = mix.stream.double().numpy() - build_parts(mix).sum(axis=1)
        if norm is None:  # the bias of the projection alone, which is the same at every query
            length = np.linalg.norm(mix.stream.double().numpy(), axis=-1).max()
            assert np.abs(rest - rest[:1]).max() < 1e-5 * length


@pytest.mark.parametrize(
    "family",
    ["roberta", "distilbert", "gpt2", "gpt-neox", "llama", "gemma2", "mistral", "opt", "t5"],
)
def test_gradients_equal_autograd_through_eager_attention(family: str) -> None:
    model = deepcopy(build(family)).eval()
    model.set_attn_implementation("eager")
    wrapped = af.Model(model)
    encoded = wrapped.encode([5, 6, 7, 8, 9])
    arguments = dict(wrapped.batch([encoded]))
    output = (
        model(**arguments, output_attentions=True, use_cache=False)
        if family
        in (
            "gpt2",
            "gpt-neox",
            "llama",
            "gemma2",
            "mistral",
            "opt",
            "t5",
        )
        else model(**arguments, output_attentions=True)
    )
    logits = wrapped.read_logits(output, [wrapped.logit_position(encoded)])
    layers = getattr(output, "attentions", None)
    if layers is None:
        pytest.skip("an encoder-decoder gives its weights apart")
    expected = torch.autograd.grad(logits[0, logits[0].argmax()], layers)
    mixes = af.capture_mix(af.Model(build(family)), [5, 6, 7, 8, 9], backward="plain")
    for mix, gradient in zip(mixes, expected, strict=True):
        seen = mix.attention > 0
        assert mix.gradient is not None
        difference = (mix.gradient - gradient[0])[seen].abs().max()
        assert float(difference) < 1e-5 * max(1.0, float(gradient.abs().max()))


def test_gradient_edges_roll_out_to_the_relevance_of_chefer(bundled: af.Model) -> None:
    graph = af.attention_graph(bundled, TEXT, edges="gradient")
    relevance = np.eye(graph.size)
    for mix in af.capture_mix(bundled, TEXT, backward="plain"):
        assert mix.gradient is not None
        positive = (mix.attention * mix.gradient).clamp_min(0).mean(dim=0).double().numpy()
        relevance = relevance + positive @ relevance
    rolled = af.rollout(graph, normalize=None).values[-1]
    np.testing.assert_allclose(rolled, relevance, rtol=1e-5)
    assert all(parameter.grad is None for parameter in bundled.model.parameters())


def test_effective_attention_changes_no_output_and_hides_what_is_hidden() -> None:
    model = af.Model(perturb("llama"))
    ids = list(range(4, 34))  # more keys than a head is wide
    for mix in af.capture_mix(model, ids):
        effective = call_own("effective", af.EDGES["effective"].compute, mix)
        before = mix.attention.double() @ mix.vectors.double()
        np.testing.assert_allclose(effective @ mix.vectors.double(), before, atol=1e-5)
        assert float(effective[:, ~mix.visible].abs().max()) == 0.0
        assert float((effective - mix.attention).abs().max()) > 1e-3
    short = af.capture_mix(model, ids[:5])[0]
    effective = call_own("effective", af.EDGES["effective"].compute, short)
    np.testing.assert_allclose(effective, short.attention, atol=1e-6)  # nothing to take away


@pytest.mark.parametrize("kind", [*KINDS, "gradient"])
def test_a_batch_gives_what_single_inputs_give(bundled: af.Model, kind: str) -> None:
    texts = [TEXT, "the old keys", "the man who has the dogs that bark"]
    together = af.attention_graph(bundled, texts, edges=kind)
    for text, graph in zip(texts, together, strict=True):
        alone = af.attention_graph(bundled, text, edges=kind)
        np.testing.assert_allclose(graph.edges, alone.edges, atol=1e-5)
        assert (graph.edge_name, graph.tokens) == (kind, alone.tokens)
        assert af.rollout(graph).edges == kind


def test_scaling_values_against_the_projection_changes_nothing() -> None:
    ids = [5, 6, 7, 8, 9]
    plain, scaled = build("llama"), deepcopy(build("llama"))
    with torch.no_grad():
        attention = scaled.model.layers[1].self_attn
        attention.v_proj.weight[:8] *= 4.0  # the first pair of heads
        attention.o_proj.weight[:, :16] /= 4.0
    for kind in ("norm", "contribution", "gradient"):
        first, second = (
            af.attention_graph(af.Model(model), ids, edges=kind).edges for model in (plain, scaled)
        )
        np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("family", ["llama", "bert", "gemma2", "gpt2"])
def test_the_parts_add_up_in_any_precision(family: str, dtype: Any, close: float) -> None:
    model = deepcopy(build(family)).eval()
    for kind in ("norm", "contribution"):
        whole = af.attention_graph(model, make_input(family), edges=kind).edges
        rounded = af.attention_graph(
            deepcopy(model).to(dtype), make_input(family), edges=kind
        ).edges
        np.testing.assert_allclose(rounded, whole, atol=close)


def test_a_layer_that_does_not_add_up_is_an_error_that_names_it() -> None:
    model = build("llama").eval()
    wrapped = af.Model(model)
    af.attention_graph(wrapped, [5, 6, 7], edges="norm")  # traced
    layer = model.model.layers[1].self_attn.o_proj
    handle = layer.register_forward_hook(lambda module, given, output: 1.5 * output)
    try:
        with pytest.raises(af.CaptureError, match=r"the branch of model\.layers\.1\.self_attn"):
            af.attention_graph(wrapped, [5, 6, 7], edges="norm")
    finally:
        handle.remove()


@pytest.mark.parametrize("family", PAIRS)
def test_an_encoder_decoder_is_one_graph(family: str) -> None:
    model = af.Model(build(family))
    graph = af.attention_graph(model, [5, 6, 7, 8], edges="contribution")
    attention = af.attention_graph(model, [5, 6, 7, 8])
    assert (graph.depth, graph.size) == (attention.depth, attention.size)
    assert graph.layer_names == attention.layer_names
    np.testing.assert_allclose(graph.edges.sum(axis=-1), 1.0, atol=1e-6)
    assert ((graph.edges > 0) <= (attention.edges > 0)).all()


def test_an_edge_weight_of_ones_own_and_contrastive_targets(bundled: af.Model) -> None:
    own = af.edge_weight("values", lambda mix: mix.attention.mean(dim=0), residual="mixed")
    mine = af.attention_graph(bundled, TEXT, edges=own, residual=0.3)
    plain = af.attention_graph(bundled, TEXT, residual=0.3)
    np.testing.assert_allclose(mine.edges, plain.edges, atol=1e-6)
    for target in (("singular", "plural"), "plural", 1):
        graph = af.attention_graph(bundled, TEXT, edges="gradient", target=target)
        assert (graph.edges >= 0).all()
    first = af.capture_mix(bundled, TEXT, backward="plain", target=("singular", "plural"))[0]
    second = af.capture_mix(bundled, TEXT, backward="plain", target=("plural", "singular"))[0]
    assert first.gradient is not None
    assert second.gradient is not None
    np.testing.assert_allclose(first.gradient, -second.gradient, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edges": "norms"}, "unknown edges 'norms'; choose from attention, effective, norm"),
        ({"edges": []}, "at least one edge weight is needed"),
        ({"edges": ["norm", "attention"]}, "one kind of edges makes a graph"),
        ({"edges": "norm", "residual": 0.5}, "hold the residual inside"),
        ({"edges": "gradient", "target_of": "loss"}, "unknown target_of 'loss'"),
        ({"edges": "gradient", "target": "dual"}, "unknown target 'dual'"),
        ({"edges": {"mine": lambda mix: mix.attention[0, 0]}}, "must have shape [query, key]"),
        ({"edges": {"mine": lambda mix: -mix.attention}}, "must be finite and not negative"),
        ({"edges": {"mine": lambda mix: 1 / 0}}, "of blocks.0.attention failed: ZeroDivisionError"),
        ({"edges": {"norm": lambda mix: mix.attention}}, "must have a name of its own"),
    ],
)
def test_bad_edges_are_one_line(bundled: af.Model, options: Any, message: str) -> None:
    with pytest.raises(af.AttnFlowError) as error:
        af.attention_graph(bundled, TEXT, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("family", OUTSIDE)
def test_families_outside_of_the_interface_are_refused_by_name(family: str) -> None:
    model = af.Model(build(family))
    with pytest.raises(af.CaptureError, match=f"{model.name} attends outside of transformers"):
        af.attention_graph(model, [5, 6, 7], edges="norm")
    assert af.attention_graph(model, [5, 6, 7]).depth == 3


def test_a_model_that_predicts_nothing_has_no_gradient() -> None:
    with pytest.raises(af.OptionError, match="no head that predicts; use contribution edges"):
        af.attention_graph(build("bert"), [5, 6, 7], edges="gradient")


def test_explain_names_results_after_edges_and_method(bundled: af.Model, tmp_path: Any) -> None:
    found = af.explain(
        TEXT, edges=["attention", "contribution"], methods=["rollout", "flow"], importance=()
    )
    assert list(found.results) == ["rollout", "flow", "contribution rollout", "contribution flow"]
    graph = af.attention_graph(bundled, TEXT, edges="contribution")
    np.testing.assert_allclose(
        found.results["contribution rollout"].values, af.rollout(graph).values, atol=1e-6
    )
    assert found.results["contribution rollout"].source.edges == "contribution"  # type: ignore[union-attr]
    for ending in (".html", ".png", ".json"):
        assert found.save(tmp_path / f"edges{ending}").stat().st_size > 100
    words = found.scores(by_word=True)["contribution flow"]
    assert len(words[0]) == len(words[1])
    for options in ({"without": [1]}, {"graph": lambda attention: attention.graph()}):
        with pytest.raises(af.OptionError, match="make graphs of attention"):
            af.explain(TEXT, edges="norm", **options)


def test_evaluate_ranks_every_method_on_every_kind_of_edges(bundled: af.Model) -> None:
    examples = [(TEXT, "singular"), ("the old keys", "plural")]
    report = af.evaluate(
        bundled,
        examples,
        methods=["raw", "rollout"],
        edges=["attention", "contribution", "gradient"],
        against="blank_out",
        layers=[6],
    )
    expected = [
        f"{edge}{name}"
        for edge in ("", "contribution ", "gradient ")
        for name in ("raw", "rollout")
    ]
    assert list(report.methods) == expected
    for (text, label), example in zip(examples, report.examples, strict=True):
        for kind in ("contribution", "gradient"):
            graph = af.attention_graph(bundled, text, edges=kind, target=label)
            row = af.rollout(graph, layers=[6], positions=[0]).values[:, 0]
            np.testing.assert_allclose(example.scores[f"{kind} rollout"], row, atol=1e-5)


def test_a_contrast_is_explained_and_every_result_knows_its_target(bundled: af.Model) -> None:
    pair = ("singular", "plural")
    found = af.explain(TEXT, edges="gradient", methods="rollout", target=pair, importance=())
    graph = af.attention_graph(bundled, TEXT, edges="gradient", target=pair)
    result = found.results["gradient rollout"]
    np.testing.assert_allclose(result.values, af.rollout(graph).values, atol=1e-6)
    assert graph.source.target == "singular - plural"
    assert result.source is not None
    assert result.source.target == "singular - plural"
    with pytest.raises(af.OptionError, match="between two different targets"):
        af.attention_graph(bundled, TEXT, edges="gradient", target=("plural", "plural"))


def test_a_report_on_several_kinds_of_edges_names_them_all(bundled: af.Model) -> None:
    options: dict[str, Any] = {"methods": "rollout", "against": "blank_out", "layers": [6]}
    kinds = ["gradient", "attention"]
    report = af.evaluate(bundled, [TEXT], edges=kinds, residual=0.3, **options)
    assert report.source is not None
    assert (report.source.edges, report.source.residual) == ("gradient, attention", 0.3)


def test_results_know_how_heads_were_fused(bundled: af.Model) -> None:
    fused = {
        kind: af.attention_graph(bundled, TEXT, edges=kind).source.heads
        for kind in ("attention", "effective", "gradient", "norm", "contribution")
    }
    assert fused == {
        "attention": "mean",
        "effective": "mean",
        "gradient": "mean",
        "norm": None,  # has no heads
        "contribution": None,
    }
    for kind in ("attention", "effective", "gradient"):
        graph = af.attention_graph(bundled, TEXT, edges=kind, heads="max")
        assert (graph.source.heads, af.rollout(graph).source) == (
            "max",
            replace(graph.source, method="rollout"),
        )
    own = af.edge_weight("strongest", lambda mix: mix.attention.amax(dim=0), residual="mixed")
    assert af.attention_graph(bundled, TEXT, edges=own).source.heads is None  # it fused them itself
    every = af.edge_weight("every", lambda mix: mix.attention, residual="mixed")
    assert af.attention_graph(bundled, TEXT, edges=every, heads="min").source.heads == "min"
    kept = af.capture(bundled, TEXT, heads=None)
    assert kept.graph(heads="max").source.heads == "max"
    assert kept.graph(heads=3).source.heads == "3"
    assert kept.graph(heads=np.median).source.heads == "median"
    assert kept.graph(top_head=(6, 3)).source.heads == "mean, head 3 alone in layer 6"
    assert af.capture(bundled, TEXT, heads="max").graph().source.heads == "max"
    found = af.explain(TEXT, heads="max", edges=["attention", "norm"], methods="rollout")
    assert "heads max" in str(found.source)
    heads = {name: result.source.heads for name, result in found.results.items() if result.source}
    assert heads == {"rollout": "max", "norm rollout": None}
    assert af.rollout_rows(bundled, TEXT, positions=[0]).source.heads == "mean"  # type: ignore[union-attr]
    story = af.generate(build("llama"), [5, 6, 7], max_new_tokens=2, heads="max")
    told = story.rollout().source
    assert told is not None
    assert told.heads == "max"


@pytest.mark.parametrize("edges", [3, b"norm", None])
def test_what_is_no_edges_is_refused_in_one_line(bundled: af.Model, edges: Any) -> None:
    with pytest.raises(af.OptionError, match="edges must be names"):
        af.attention_graph(bundled, TEXT, edges=edges)
