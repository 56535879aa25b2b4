"""Captured weights are the model's own, for every family, in a batch as alone, and the model is left as it was found."""

import sys
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import attnflow as af
from attnflow.capturing.capture import assemble_pair
from attnflow.models.attention_calls import LayerWeights, record_weights
from attnflow.models.fingerprint import quick_fingerprint
from tests.families import DECODERS, ENCODERS, FAMILIES, PAIRS, VISION, build, word_tokenizer
from tests.oracles import Floats

SAME = 1e-5
IDS = [7, 23, 41, 9, 55, 12, 30, 8, 17, 44, 5]
TARGET = [11, 6, 29, 33]
STACKS = {**ENCODERS, **DECODERS}


def make_example(family: str) -> Any:
    """An input for a family."""
    if family in VISION:
        return torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(3))
    return (IDS, TARGET) if family in PAIRS else IDS


def make_arguments(family: str) -> dict[str, torch.Tensor]:
    """The same input as the model takes it."""
    model = af.Model(build(family))
    return model.batch([model.encode(make_example(family))])


def run_eager(family: str) -> Any:
    """What the family's own eager attention returns."""
    with torch.no_grad():
        return build(family, "eager")(**make_arguments(family), output_attentions=True)


def stack(layers: Any) -> Floats:
    """[layer, head, query, key] of the first sequence, rows summing to 1 (those of sinks do not)."""
    weights: Floats = np.stack([layer[0].double().numpy() for layer in layers])
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def compute_expected(family: str) -> Floats:
    """The graph's weights by the plain definition: block matrices for encoder-decoders."""
    output = run_eager(family)
    if family not in PAIRS:
        return stack(output.attentions)
    encoder, decoder, cross = (
        stack(getattr(output, name))
        for name in ("encoder_attentions", "decoder_attentions", "cross_attentions")
    )
    source, target = len(IDS), decoder.shape[-1]
    heads = encoder.shape[1]
    layers = []
    for weights in encoder:
        layers.append(
            np.stack(
                [
                    np.block(
                        [
                            [each, np.zeros((source, target))],
                            [np.zeros((target, source)), np.eye(target)],
                        ]
                    )
                    for each in weights
                ]
            )
        )
    for own, other in zip(decoder, cross, strict=True):
        zeros = np.zeros((source, target))
        layers.append(
            np.stack(
                [np.block([[np.eye(source), zeros], [zeros.T, own[head]]]) for head in range(heads)]
            )
        )
        layers.append(
            np.stack(
                [
                    np.block([[np.eye(source), zeros], [other[head], np.zeros((target, target))]])
                    for head in range(heads)
                ]
            )
        )
    return np.stack(layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_equals_output_attentions(family: str) -> None:
    weights = compute_expected(family)
    captured = af.capture(af.Model(build(family)), make_example(family), heads=None)
    assert captured.weights.shape == weights.shape
    assert np.abs(captured.weights - weights).max() < SAME
    for heads in ("mean", "max", "min"):
        fused = af.capture(af.Model(build(family)), make_example(family), heads=heads)
        assert fused.fused == heads
        assert (
            np.abs(fused.graph(heads=heads).edges - captured.graph(heads=heads).edges).max() < SAME
        )
    assert captured.causal == (family in DECODERS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", [None, "eager"])
def test_outputs_are_bit_identical_and_the_model_is_left_as_found(
    family: str, implementation: str | None
) -> None:
    model = build(family, implementation)
    given = make_arguments(family)
    before = state(model)
    with torch.no_grad():
        plain = model(**given)
        with record_weights(model, "mean"):
            heard = model(**given)
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, heard[name]), name
    af.capture(af.Model(model), make_example(family))
    assert state(model) == before


def state(model: Any) -> Any:
    """All of a model that capture could change."""
    hooks = [
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    ]
    training = [module.training for module in model.modules()]
    return (
        model.config._attn_implementation,
        hooks,
        training,
        transformers.AttentionInterface.get_interface,
    )


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS, *PAIRS])
def test_a_batch_gives_what_each_gives_alone(family: str) -> None:
    model = af.Model(build(family))
    inputs: list[Any] = [IDS, IDS[:4], IDS[2:9], [IDS[3]]]
    if family in PAIRS:
        inputs = [(IDS, TARGET), (IDS[:4], TARGET[:1]), (IDS[2:9], TARGET[:3])]
    for heads in ("mean", None):
        together = af.capture(model, inputs, heads=heads)
        for each, attention in zip(inputs, together, strict=True):
            alone = af.capture(model, each, heads=heads)
            assert attention.tokens == alone.tokens
            assert np.abs(attention.weights - alone.weights).max() < SAME


def test_the_order_and_number_of_inputs_are_kept() -> None:
    model = af.Model(build("bert"))
    inputs = [IDS[:length] for length in (5, 2, 9, 2, 7)]
    sizes = [attention.size for attention in af.capture(model, inputs, batch_tokens=8)]
    assert sizes == [5, 2, 9, 2, 7]
    nothing: list[str] = []
    assert af.capture(model, nothing) == []


def test_one_input_gives_an_attention_and_several_a_list(tokenizer: Any) -> None:
    """Also to mypy, which reads the types that are named here."""
    model = af.Model(build("bert"), tokenizer)
    assert_type(af.capture(model, "the key"), af.Attention)
    assert_type(af.capture(model, IDS), af.Attention)
    assert_type(af.capture(model, ("the key", "is lost")), af.Attention)
    assert_type(af.capture(model, model.encode("the key")), af.Attention)
    assert_type(af.capture(model, np.array(IDS)), af.Attention)
    assert_type(af.capture(model, ["the key", "is lost"]), list[af.Attention])
    assert_type(af.capture(model, [IDS, IDS]), list[af.Attention])
    assert_type(af.capture(model, [("the key", "is lost"), "the key"]), list[af.Attention])
    assert af.capture(model, "the key").depth == 3
    assert [attention.size for attention in af.capture(model, ["the key", "key"])] == [4, 3]
    assert isinstance(af.capture(model, list(np.array(IDS))), af.Attention)


def test_long_inputs_are_captured_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("gemma2", "t5", "gpt-oss", "llama", "modernbert"):
        model = af.Model(build(family))
        whole = af.capture(model, make_example(family), heads=None)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["attnflow.models.attention_weights"], "BLOCK_SCORES", 100)
            pieces = af.capture(model, make_example(family), heads=None)
        assert np.abs(whole.weights - pieces.weights).max() < 1e-6


def test_a_row_that_heads_leave_empty_looks_at_itself_in_the_graph() -> None:
    """Also in cross-attention, where its own position is none of the keys."""
    model = af.Model(build("bart"))
    encoded = model.encode((IDS[:3], TARGET))
    source, target = len(encoded.ids), len(encoded.decoder_ids)
    shapes = {"encoder": (source, source), "decoder": (target, target)}
    shapes["decoder.encoder_attn"] = (target, source)
    calls = []
    for name, (queries, keys) in shapes.items():
        weights = np.full((1, 1, queries, keys), 1 / keys, np.float32)
        weights[:, :, -1] = 0.0  # the last query's heads share no key
        calls.append(LayerWeights(name, weights, None, None))
    attention = assemble_pair(model, encoded, calls, 0, "min")
    size = source + target
    for layer, row in enumerate([source - 1, size - 1, size - 1]):
        assert np.array_equal(attention.weights[layer, 0, row], np.eye(size)[row])


def test_windows_and_shares_of_no_token_are_kept() -> None:
    assert af.capture(af.Model(build("gemma2")), IDS).window == (4, None, 4)
    assert af.capture(af.Model(build("modernbert")), IDS).window == (None, 4, 4)
    attention = af.capture(af.Model(build("gpt-oss")), IDS)
    left = np.stack(
        [1 - layer[0].sum(dim=-1).mean(dim=0).numpy() for layer in run_eager("gpt-oss").attentions]
    )
    assert attention.no_token_share is not None
    assert np.abs(attention.no_token_share - left).max() < SAME


def test_captured_attention_says_where_it_came_from(tmp_path: Path) -> None:
    module = build("bert")
    source = af.capture(module, IDS).source
    assert source is not None
    assert source.model == "BertModel"
    assert source.fingerprint == quick_fingerprint(af.Model(module))
    assert {"attnflow", "torch", "transformers"} <= set(source.versions)
    for family in ("bart", "vit"):
        assert af.capture(build(family), make_example(family)).source is not None
    module.save_pretrained(tmp_path / "runs" / "best")
    for attention in af.capture(af.load(tmp_path / "runs" / "best"), [IDS, IDS[:3]]):
        assert attention.source == replace(source, model="best")
    assert str(tmp_path) not in repr(attention.source)
    story = af.generate(build("llama"), IDS, max_new_tokens=2)
    assert story.attention.source is not None
    assert story.attention.source.model == "LlamaForCausalLM"


def test_training_mode_is_kept_and_capture_is_without_dropout() -> None:
    model = build("bert")
    model.train()
    model.encoder.layer[1].eval()
    try:
        before = state(model)
        first, second = (af.capture(af.Model(model), IDS) for _ in range(2))
        assert state(model) == before
        assert (first.weights == second.weights).all()
    finally:
        model.eval()


def test_an_error_in_the_model_leaves_it_as_found() -> None:
    model = build("llama")
    before = state(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(af.CaptureError, match="RuntimeError: broken on purpose"):
        af.capture(af.Model(model), IDS)
    handle.remove()
    assert state(model) == before


def test_a_mask_that_went_missing_is_an_error() -> None:
    model = build("llama")
    attentions = [module for module in model.modules() if getattr(module, "is_causal", False)]
    try:
        for module in attentions:
            module.is_causal = False
        with pytest.raises(
            af.CaptureError,
            match=r"weights of LlamaForCausalLM are not attention: .* mask hides a key .* layer 1",
        ):
            af.capture(af.Model(model), IDS)
    finally:
        for module in attentions:
            module.is_causal = True


def test_captures_in_two_threads_do_not_hear_each_other() -> None:
    found: dict[str, Any] = {}

    def work(family: str) -> None:
        for _ in range(5):
            found[family] = af.capture(af.Model(build(family)), IDS, heads=None)

    for family in ("bert", "llama"):
        build(family)
    threads = [threading.Thread(target=work, args=(family,)) for family in ("bert", "llama")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family in ("bert", "llama"):
        assert np.abs(found[family].weights - compute_expected(family)).max() < SAME
    assert not hasattr(transformers.AttentionInterface.get_interface, "original")


def test_half_precision_is_captured() -> None:
    model = deepcopy(build("llama")).to(torch.bfloat16)
    attention = af.capture(af.Model(model), IDS)
    assert np.abs(attention.graph().edges.sum(axis=-1) - 1).max() < 1e-12


def test_a_rollout_runs_from_the_decoder_to_the_source() -> None:
    attention = af.capture(af.Model(build("bart")), (IDS, TARGET))
    graph = attention.graph()
    names = graph.layer_names
    assert names is not None
    assert names == (
        "encoder 1",
        "encoder 2",
        "encoder 3",
        *(f"decoder {layer} {kind}" for layer in (1, 2, 3) for kind in ("self", "cross")),
    )
    product = np.eye(graph.size)
    for weights in compute_expected("bart").mean(axis=1):
        product = (0.5 * weights + 0.5 * np.eye(graph.size)) @ product
    last = graph.size - 1
    assert (
        np.abs(
            af.rollout(graph, layers=[graph.depth], positions=[last]).at(last) - product[last]
        ).max()
        < SAME
    )
    flowed = af.flow(graph, layers=[graph.depth - 2], positions=[last], normalize=None)
    assert flowed.at(last)[: len(IDS)].min() > 0


def test_names_of_layers_and_the_grid_are_saved(tmp_path: Path) -> None:
    for family in ("bart", "vit"):
        first = af.capture(af.Model(build(family)), make_example(family))
        first.save(tmp_path / "captured.npz")
        second = af.Attention.load(tmp_path / "captured.npz")
        assert (second.layer_names, second.grid, second.tokens) == (
            first.layer_names,
            first.grid,
            first.tokens,
        )
        assert (second.weights == first.weights).all()


def test_images_have_a_grid_and_named_positions() -> None:
    assert af.capture(af.Model(build("vit")), make_example("vit")).grid == (3, 3)
    tokens = af.capture(af.Model(build("dinov2")), make_example("dinov2")).tokens
    assert tokens is not None
    assert tokens[:6] == ("[CLS]", "[REG0]", "[REG1]", "[REG2]", "[REG3]", "0,0")
    distilled = af.capture(af.Model(build("deit")), make_example("deit")).tokens
    assert distilled is not None
    assert distilled[:3] == ("[CLS]", "[DISTILL]", "0,0")


def test_pictures_go_through_the_image_processor(tmp_path: Path) -> None:
    processor = transformers.ViTImageProcessorPil(size={"height": 24, "width": 24})
    model = af.Model(build("vit"), processor)
    picture = Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    )
    picture.save(tmp_path / "picture.png")
    attention = af.capture(model, picture)
    pixels = processor(images=picture, return_tensors="pt")["pixel_values"][0]
    assert (attention.weights == af.capture(model, pixels).weights).all()
    assert (attention.weights == af.capture(model, tmp_path / "picture.png").weights).all()
    assert len(af.capture(model, [picture, picture])) == 2
    ((label, _),) = model.predict(picture)
    assert label.startswith("LABEL_")
    for bad in ("https://example.org/a.png", tmp_path / "nothing.png"):
        with pytest.raises(af.OptionError, match="which is not a file"):
            af.capture(model, bad)
    with pytest.raises(af.OptionError, match="takes an image"):
        af.capture(model, {"not": "an image"})  # type: ignore[call-overload]


# ---- models with their tokenizer -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def test_texts_become_tokens_and_words(tokenizer: Any) -> None:
    attention = af.capture(af.Model(build("bert"), tokenizer), "the key is lost")
    assert attention.tokens == ("[CLS]", "the", "key", "is", "lost", "[SEP]")
    assert attention.words == (None, 0, 1, 2, 3, None)
    many = af.capture(
        af.Model(build("bert"), tokenizer), ["the key", "the key to the cabinets is lost"]
    )
    assert [each.size for each in many] == [4, 9]  # whatever side the tokenizer pads on


@pytest.mark.parametrize(
    ("family", "task", "focal"),
    [
        ("bert", "encoder", 0),
        ("roberta", "sequence classification", 0),
        ("electra", "token classification", 0),
        ("gpt2", "causal LM", 3),
        ("t5", "sequence to sequence", 4),
        ("vit", "image classification", 0),
    ],
)
def test_a_model_knows_its_task_and_focal_position(
    family: str, task: str, focal: int, tokenizer: Any
) -> None:
    model = af.Model(build(family))
    assert model.task == task
    encoded = model.encode(make_example(family) if family in VISION else [5, 6, 7, 8])
    assert model.focal(encoded) == focal
    if family not in ("bert", "electra"):
        ((label, probability),) = model.predict([make_example(family)])
        assert isinstance(label, str)
        assert 0 < probability <= 1


def test_a_masked_model_is_explained_at_its_mask(tokenizer: Any) -> None:
    model = af.Model(build("modernbert"), tokenizer)
    assert model.focal(model.encode("the [MASK] is lost")) == 2
    ((token, probability),) = model.predict("the [MASK] is lost")
    with torch.no_grad():
        logits = build("modernbert")(torch.tensor([[2, 5, 4, 9, 11, 3]])).logits[0, 2]
    assert abs(probability - float(logits.softmax(-1).max())) < 1e-5
    assert token == str(int(logits.argmax()))  # an id beyond the tokenizer's words
    with pytest.raises(af.OptionError, match=r"this text has none; put \[MASK\] in it"):
        model.predict("the key is lost")


def test_a_bart_classifier_is_explained_where_its_input_ends() -> None:
    sizes = {
        "d_model": 32,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    config = transformers.BartConfig(
        vocab_size=60, encoder_layers=2, decoder_layers=2, max_position_embeddings=40, **sizes
    )
    config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id = (
        1,
        2,
        3,
        3,
    )
    model = af.Model(transformers.BartForSequenceClassification(config))
    assert model.focal(model.encode([2, 5, 6, 7, 3])) == 5 + 4
    assert af.capture(model, [2, 5, 6, 7, 3]).size == 10
    with pytest.raises(af.OptionError, match="BertModel has no head that predicts"):
        bert().predict(IDS)


def test_a_tagger_predicts_at_any_position() -> None:
    model = af.Model(build("electra"))
    labels = [model.predict(IDS, position=place)[0] for place in range(len(IDS))]
    with torch.no_grad():
        probabilities = build("electra")(torch.tensor([IDS])).logits[0].softmax(dim=-1)
    assert np.allclose(
        [probability for _, probability in labels], probabilities.amax(dim=-1).numpy(), atol=1e-5
    )
    with pytest.raises(af.OptionError, match="position must be from 0 to 10; got 11"):
        model.predict(IDS, position=11)


def test_a_folder_is_loaded_and_gives_the_same(tmp_path: Path, tokenizer: Any) -> None:
    build("bert").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = af.load(tmp_path / "model")
    assert repr(loaded) == "<Model: BertModel, encoder>"
    first = af.capture(loaded, "the key is lost")
    assert (
        np.abs(
            first.weights
            - af.capture(af.Model(build("bert"), tokenizer), "the key is lost").weights
        ).max()
        < 1e-6
    )


# ---- bad input -------------------------------------------------------------------------------------------------------------------


def bert() -> af.Model:
    return af.Model(build("bert"))


class NoAttention(transformers.BertPreTrainedModel):
    def __init__(self) -> None:
        super().__init__(
            transformers.BertConfig(vocab_size=60, hidden_size=8, num_attention_heads=1)
        )
        self.embeddings = torch.nn.Embedding(60, 8)

    def get_input_embeddings(self) -> Any:
        return self.embeddings

    def forward(
        self, input_ids: Any, attention_mask: Any = None, output_attentions: bool = False
    ) -> Any:
        return transformers.modeling_outputs.BaseModelOutput(
            last_hidden_state=self.embeddings(input_ids)
        )


BAD: list[tuple[Any, str]] = [
    (lambda tokenizer: af.capture(af.Model(build("bert"), tokenizer), "  "), "must not be empty"),
    (lambda tokenizer: af.capture(bert(), "the key"), "has no tokenizer"),
    (
        lambda tokenizer: af.capture(bert(), [[5] * 41]),
        "takes at most 40 tokens; got 41: pass truncation=True",
    ),
    (
        lambda tokenizer: af.capture(bert(), [5, 60]),
        "token ids of BertModel must be from 0 to 59; got 60: the tokenizer does not match",
    ),
    (lambda tokenizer: af.capture(bert(), [5, -1]), "from 0 to 59; got -1"),
    (
        lambda tokenizer: af.capture(bert(), 3.5),  # type: ignore[call-overload]
        "text, token ids or a chat; got float",
    ),
    (lambda tokenizer: af.capture(bert(), IDS, heads="median"), "unknown heads 'median'"),
    (
        lambda tokenizer: af.capture(af.Model(NoAttention()), IDS),
        "NoAttention has no attention that could be captured",
    ),
    (
        lambda tokenizer: af.capture(torch.nn.Linear(2, 2), IDS),
        "takes a Hugging Face model, or a module that holds one; got Linear",
    ),
    (lambda tokenizer: af.Model(build("bert"), 5), "tokenizer or an image processor; got int"),
    (
        lambda tokenizer: af.capture(af.Model(build("vit")), torch.zeros(1, 24, 24)),
        r"shape \[3, height, width\]; got \(1, 24, 24\)",
    ),
    (
        lambda tokenizer: af.capture(af.Model(build("vit")), "a picture"),
        "takes pixel tensors; got str",
    ),
    (
        lambda tokenizer: af.capture(af.Model(build("vit")), torch.zeros(3, 32, 24)),
        "takes images of 24 x 24; got 32 x 24",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_gets_one_clear_line(call: Any, message: str, tokenizer: Any) -> None:
    with pytest.raises(af.AttnFlowError, match=message) as error:
        call(tokenizer)
    assert "\n" not in str(error.value)


def test_truncation_cuts_the_rest_off(tokenizer: Any) -> None:
    assert af.capture(bert(), [[5] * 41], truncation=True)[0].size == 40
    text = af.capture(af.Model(build("bert"), tokenizer), "key " * 60, truncation=True)
    assert text.size == 40
    assert text.tokens is not None
    assert text.tokens[-1] == "[SEP]"


def test_folders_that_cannot_be_loaded_say_why(tmp_path: Path) -> None:
    with pytest.raises(af.FileError, match="holds no weights"):
        af.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(af.FileError, match=r"pickles \(pytorch_model.bin\)"):
        af.load(tmp_path)


def test_a_hub_id_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(af.FileError, match="cannot load nobody/nothing") as error:
        af.load("nobody/nothing")
    assert "\n" not in str(error.value)
