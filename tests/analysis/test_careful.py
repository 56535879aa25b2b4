"""Small promises: what users give is not changed, what they mistake is told, what they write is not read as markup."""

import pickle
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import attnflow as af
from attnflow.models.fingerprint import read_settings
from tests.families import build

IDS = [5, 6, 7, 8]
untyped: Any = af  # mypy would refuse what is tried here


def spoil(mix: af.LayerMix) -> Any:
    """Edges of attention that write to all that they are given."""
    edges = mix.attention.mean(dim=0) + torch.eye(len(mix.own))
    for part in (mix.attention, mix.weights, mix.vectors, mix.residual, mix.stream):
        part.zero_()
    return edges


@pytest.mark.parametrize("residual", ["inside", "mixed"])
@pytest.mark.parametrize(("family", "is_refused"), [("llama", True), ("bert", False)])
def test_edges_that_read_the_future_of_a_causal_model_are_refused(
    family: str, is_refused: bool, residual: str
) -> None:
    own = af.edge_weight("own", lambda mix: torch.ones(mix.weights.shape[1:]), residual=residual)
    seen = af.edge_weight("seen", lambda mix: torch.ones(4, 4).tril() + 1e-9, residual=residual)
    model = af.Model(build(family))
    if is_refused:
        with pytest.raises(af.OptionError, match=r"must be 0 at later positions, .* at query 0, k"):
            af.attention_graph(model, IDS, edges=own)
        with pytest.raises(af.OptionError, match="must be 0 at later positions"):
            af.generate(model, IDS, edges=own, max_new_tokens=2)
    else:
        assert not af.attention_graph(model, IDS, edges=own).causal
    graph = af.attention_graph(model, IDS, edges=seen)
    assert graph.causal == is_refused


def test_edges_that_write_to_their_input_change_no_other_edges() -> None:
    model = af.Model(build("llama"))
    options: dict[str, Any] = {"model": model, "methods": "rollout", "importance": ()}
    alone = af.explain(IDS, edges=["contribution"], **options)
    own = af.edge_weight("own", spoil, residual="inside")
    both = af.explain(IDS, edges={"own": own, "contribution": None}, **options)
    name = "contribution rollout"
    np.testing.assert_array_equal(both.results[name].values, alone.results[name].values)


@pytest.mark.parametrize("scale", [1e-250, 1e-60, 1e60, 1e250])
def test_edges_of_any_size_have_the_shares_of_those_of_size_1(scale: float) -> None:
    model = af.Model(build("llama"))

    def weigh(size: float) -> af.AttentionGraph:
        def compute(mix: af.LayerMix) -> Any:
            return (mix.attention.double().mean(dim=0) + torch.eye(len(mix.own))) * size

        edges = af.edge_weight("own", compute, residual="inside")
        return af.attention_graph(model, IDS, edges=edges)

    for method in (af.rollout, af.flow):
        np.testing.assert_allclose(
            method(weigh(scale)).values, method(weigh(1.0)).values, atol=1e-6
        )
    if not 1e-100 < scale < 1e100:
        how = "exceeds" if scale > 1 else "is below"
        with pytest.raises(af.WeightsError, match=f"{how} the range of float64"):
            af.rollout(weigh(scale), normalize=None)


# the product of all layers is in range; that of the lower two, or its row sums, are not
@pytest.mark.parametrize("exponents", [(-187, -133, 254), (-74, 114, 266), (200, 200, -150)])
@pytest.mark.parametrize("positions", [None, [2]])
def test_layers_of_very_different_sizes_have_the_shares_of_those_of_size_1(
    exponents: tuple[int, ...], positions: list[int] | None
) -> None:
    edges = np.tril(np.random.default_rng(0).random((3, 4, 4))) + np.eye(4)
    scaled = edges * 10.0 ** np.array(exponents)[:, None, None]
    found, expected = (
        af.rollout(make_graph(each), layers=[3], positions=positions) for each in (scaled, edges)
    )
    np.testing.assert_allclose(found.values, expected.values, atol=1e-6)


def test_tokens_are_no_markup_in_markdown() -> None:
    attention = af.Attention([[[1.0, 0.0], [0.5, 0.5]]], tokens=["<s>", "<script>&|"])
    table = af.rollout(attention).to_markdown()
    assert "<" not in table
    assert r"&lt;script>&amp;\|" in table


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: untyped.Model(build("llama"), task=["x"]), r"unknown task \['x'\]"),
        (
            lambda: untyped.explain(
                {"role": "user", "content": "x"}, model=af.Model(build("llama"))
            ),
            "a chat is a list of messages; got one message: put it in a list",
        ),
        (
            lambda: af.rollout_segments(
                af.Model(build("llama")), IDS, segments={"(rest)": (0, 2)}, positions=[-1]
            ),
            r"'\(rest\)' is the name of the positions in no segment",
        ),
        (
            lambda: untyped.blank_out("verb-number", "the key", target={"plural"}),
            r"a target must be the name or the number of a class; got \{'plural'\}",
        ),
        (
            lambda: untyped.input_gradient("verb-number", "the key", reduce=["norm"]),
            r"unknown reduce=\['norm'\]; choose from sum, norm, times_input",
        ),
        (
            lambda: untyped.attention_graph("verb-number", "the key", heads=["max"]),
            r"unknown heads \['max'\]; choose from mean, max, min",
        ),
        (
            lambda: untyped.evaluate("verb-number", ["the key"], statistic=["spearman"]),
            r"unknown statistic \['spearman'\]; choose from spearman",
        ),
        (
            lambda: af.attention_graph(
                "verb-number",
                "the key",
                edges=af.edge_weight("own", lambda mix: mix.attention[0].to_sparse()),
            ),
            r"edges 'own' of blocks\.0\.attention must be an array of numbers; got Tensor",
        ),
    ],
)
def test_mistakes_are_one_line(call: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        call()


def test_edges_of_very_different_sizes_are_warned_of() -> None:
    edges = np.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1e18, 2.0, 1.0]]] * 2)
    graph = make_graph(edges)
    with pytest.warns(af.RoundingWarning, match=r"a row sum to 1, of another to 1e\+18"):
        af.flow(graph, normalize=None)
    with pytest.warns(af.RoundingWarning, match=r"a row sum to 1, of another to 1e\+18"):
        af.max_flow(graph, source=(2, 1), target=(0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_own_edges_may_have_16_bits(dtype: torch.dtype) -> None:
    model = af.Model(build("llama"))
    for heads in (False, True):

        def compute(mix: af.LayerMix, heads: bool = heads) -> Any:
            return (mix.attention if heads else mix.attention.mean(dim=0)).to(dtype)

        own = af.edge_weight("own", compute, residual="mixed")
        edges = af.attention_graph(model, IDS, edges=own).edges
        expected = af.attention_graph(model, IDS, edges="attention").edges
        np.testing.assert_allclose(edges, expected, atol=5e-3)


def make_graph(edges: Any) -> af.AttentionGraph:
    """A graph of these edges [layer, query, key]."""
    waiting = iter(edges)
    own = af.edge_weight("own", lambda mix: torch.tensor(next(waiting)), residual="inside")
    config = t.LlamaConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=len(edges),
        num_attention_heads=2,
    )
    model = af.Model(t.LlamaForCausalLM(config).eval())
    return af.attention_graph(model, IDS[: edges.shape[-1]], edges=own)


@pytest.mark.parametrize(
    "option", [{"target_of": "x"}, {"position": 9}, {"position": "x"}, {"target": "x"}]
)
def test_options_of_gradients_are_checked_where_none_is_taken(option: dict[str, Any]) -> None:
    with pytest.raises(af.OptionError):
        untyped.attention_graph("verb-number", "the key", edges="norm", **option)
    with pytest.raises(af.OptionError):
        untyped.capture_mix("verb-number", "the key", **option)


def test_placeholders_without_an_image_are_refused() -> None:
    model = af.Model(deepcopy(build("llama")))
    model.model.config.image_token_id = 7
    with pytest.raises(
        af.OptionError, match="token 7 of LlamaForCausalLM stands for images that were not given"
    ):
        af.capture(model, IDS)


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SEEN = {**SIZES, "image_size": 24, "patch_size": 8}
READ = {**SIZES, "vocab_size": 64, "max_position_embeddings": 16}


@pytest.mark.parametrize(
    "make",
    [
        lambda: t.CLIPForImageClassification(t.CLIPConfig(vision_config=SEEN, text_config=READ)),
        lambda: t.SiglipForImageClassification(
            t.SiglipConfig(vision_config=SEEN, text_config=READ)
        ),
    ],
)
def test_classifiers_whose_vision_has_a_configuration_of_its_own_are_captured(make: Any) -> None:
    attention = af.capture(af.Model(make().eval()), torch.zeros(3, 24, 24))
    assert attention.size in (9, 10)  # patches, and CLS


def test_a_decoder_that_classifies_picks_its_own_position() -> None:
    config = t.BioGptConfig(**SIZES, vocab_size=64, max_position_embeddings=40, pad_token_id=1)
    module = t.BioGptForSequenceClassification(config).eval()
    ((_, probability),) = af.Model(module).predict([IDS])
    with torch.no_grad():
        expected = module(input_ids=torch.tensor([IDS])).logits.softmax(-1).max()
    assert probability == pytest.approx(float(expected), abs=1e-6)


def test_settings_that_differ_by_layer_leave_a_fingerprint() -> None:
    config = t.Gemma4TextConfig()
    with pytest.raises(Exception, match="is a per-layer attribute"):
        asdict(config)
    assert b"head_dim" in read_settings(config)


def test_attention_that_is_no_matrix_is_refused_by_its_shape() -> None:
    config = t.LongformerConfig(
        **SIZES, vocab_size=64, attention_window=[4, 4], max_position_embeddings=40
    )
    with pytest.raises(af.CaptureError, match="does not attend from each position to all of them"):
        af.capture(
            af.Model(t.LongformerForSequenceClassification(config).eval()), list(range(5, 15))
        )


def test_a_copy_of_attention_cannot_be_written_to() -> None:
    attention = af.Attention([[[1.0, 0.0], [0.5, 0.5]]])
    for one in (attention, attention.graph()):
        for copied in (deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert not copied.weights.flags.writeable
            np.testing.assert_array_equal(copied.weights, one.weights)


def test_a_generation_with_gradient_edges_can_be_pickled() -> None:
    story = af.generate(
        af.Model(build("llama")),
        IDS,
        max_new_tokens=2,
        eos_token_id=None,
        edges=["attention", "gradient"],
    )
    found = pickle.loads(pickle.dumps(story))
    np.testing.assert_allclose(
        found.rollout(edges="gradient").values, story.rollout(edges="gradient").values, atol=1e-6
    )


KEY = ("verb-number", "the key")


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda: af.explain("the key", methods="mean"), "methods"),
        (lambda: af.explain("the key", edges="mean"), "edges"),
        (lambda: af.explain("the key", importance="mean"), "importance"),
        (lambda: af.explain("the key", target="dual"), "target"),
        (lambda: af.explain("the key", target=2), "target"),
        (lambda: af.explain("the key", foil="dual"), "foil"),
        (lambda: af.explain("the key", normalize="mean"), "normalize"),
        (lambda: af.explain("the key", position=9), "position"),
        (lambda: af.rollout(af.capture(*KEY), layers=[7]), "layers"),
        (lambda: untyped.explain("the key", truncation="no"), "truncation"),
        (lambda: untyped.capture(*KEY, truncation="no"), "truncation"),
        (lambda: af.capture(*KEY, heads="median"), "heads"),
        (lambda: af.capture(*KEY, heads=None).graph(heads="median"), "heads"),
        (lambda: af.rollout(af.capture(*KEY)).at(0, layer=7), "layer"),
        (lambda: af.evaluate(KEY[0], KEY[1:], statistic="mean"), "statistic"),
        (lambda: af.evaluate(KEY[0], KEY[1:], position="mid"), "position"),
        (lambda: af.evaluate(KEY[0], KEY[1:], faithfulness="mean"), "faithfulness"),
        (lambda: af.input_gradient(*KEY, reduce="mean"), "reduce='mean'"),
        (lambda: af.input_gradient(*KEY, of="mean"), "of='mean'"),
    ],
)
def test_an_error_names_the_option_that_it_is_about(call: Any, option: str) -> None:
    with pytest.raises(af.OptionError) as error:
        call()
    assert error.value.options == (option,)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ((5, 6.5), "tuple that holds float"),
        ({5: 1}, "dict: .* its input_ids"),
        ({5, 6}, "set"),
        (5.5, "float"),
    ],
)
def test_an_input_of_no_kind_is_told_by_what_it_holds(value: Any, got: str) -> None:
    with pytest.raises(af.OptionError, match=f"an input must be a text, .*; got {got}"):
        untyped.capture(af.Model(build("llama")), value)


def test_a_figure_of_one_result_names_those_of_an_explanation() -> None:
    found = af.explain("the key", methods="rollout", importance=())
    with pytest.raises(
        af.OptionError, match=r"got Explanation: give one of its results, .*\.rollo"
    ):
        untyped.figures.heatmap(found)


@pytest.fixture(scope="module")
def story() -> af.Generation:
    return af.generate(af.Model(build("llama")), IDS, max_new_tokens=2, eos_token_id=None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda story: story.summary(5), "result must be one of this generation, .*; got int"),
        (lambda story: story.summary(layer=9), "layer must be one of 1..3, those of this result"),
        (lambda story: story.summary(exclude=[9]), "exclude must be from -4 to 3; got 9"),
        (lambda story: story.rollout().at_layer(9), "layer must be one of 1..3, those of this"),
        (
            lambda story: story.rollout().filtered(words=5),
            "words must be a list of words, .* got 5",
        ),
        (lambda story: story.save(5), "a file must be given by its path; got int"),
        (lambda story: untyped.token_attention("mine", 5), "compute must be a function; got int"),
        (lambda story: untyped.explain_corpus(5, "o"), "a corpus needs paths of files; got int"),
    ],
)
def test_what_is_no_option_at_all_is_one_line(call: Any, message: str, story: Any) -> None:
    with pytest.raises(af.OptionError, match=message):
        call(story)
