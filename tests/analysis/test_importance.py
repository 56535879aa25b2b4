"""Blank-out against a loop over tokens, input gradients against finite differences, and what both refuse."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.analysis.importance.blank_out import find_replacement
from attnflow.analysis.importance.input_gradient import REDUCTIONS
from attnflow.capturing.backward import find_first_block
from tests.families import build, word_tokenizer

TEXT = "the key to the cabinets"
MODELS = {
    "classifier": ("distilbert", "the lost key"),
    "masked LM": ("modernbert", "the [MASK] to cabinets"),
    "causal LM": ("llama", "the key to here"),
    "causal LM, eager": ("bloom", "the key to here"),
    "bundled": ("", TEXT),
}


def model_of(name: str) -> af.Model:
    return (
        af.load("verb-number")
        if name == "bundled"
        else af.Model(build(MODELS[name][0]), word_tokenizer())
    )


def number_of(model: af.Model, target: str) -> int:
    """The families know more ids than the tokenizer has words: those are called by their numbers."""
    return int(target) if target.isdecimal() else model.target(target)


def probability(
    model: af.Model, ids: tuple[int, ...], at: int, target: int, mask: list[int] | None = None
) -> float:
    """The target's probability at a position, by one plain forward pass on one sequence."""
    with torch.no_grad():
        output = model.model(
            input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask or [1] * len(ids)])
        ).logits[0]
    row = output if output.ndim == 1 else output[at]
    return float(row.double().softmax(-1)[target])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("replacement", [None, "attention", 5])
def test_blank_out_equals_a_loop_over_tokens(name: str, replacement: Any) -> None:
    model = model_of(name)
    encoded = model.encode(MODELS[name][1])
    at = model.logit_position(encoded)
    found = af.blank_out(model, MODELS[name][1], replacement=replacement)
    target = number_of(model, found.target)
    before = probability(model, encoded.ids, at, target)
    assert found.probability == pytest.approx(before, abs=1e-6)
    expected = []
    for place in range(len(encoded.ids)):
        ids, mask = list(encoded.ids), [1] * len(encoded.ids)
        if replacement == "attention":
            mask[place] = 0
        else:
            ids[place] = model.tokenizer.unk_token_id if replacement is None else replacement
        expected.append(abs(probability(model, tuple(ids), at, target, mask) - before))
    np.testing.assert_allclose(found.values, expected, atol=2e-6)
    assert found.values.max() > 1e-4
    assert found.tokens == encoded.tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("of", ["probability", "logit"])
def test_input_gradients_equal_finite_differences(name: str, of: str) -> None:
    model = model_of(name)
    text = MODELS[name][1]
    encoded = model.encode(text)
    layer = model.model.get_input_embeddings()
    at, width = model.logit_position(encoded), layer.weight.shape[1]
    model.model.double()
    try:
        target = number_of(model, af.input_gradient(model, text).target)
        delta = torch.zeros(len(encoded.ids), width, dtype=torch.float64)

        def watched() -> float:
            handle = layer.register_forward_hook(lambda module, given, output: output + delta)
            try:
                with torch.no_grad():
                    logits = model.logits(model.batch([encoded]), [at])[0].double()
            finally:
                handle.remove()
            return float(logits[target] if of == "logit" else logits.softmax(-1)[target])

        gradient = np.zeros((len(encoded.ids), width))
        for place, axis in np.ndindex(len(encoded.ids), min(width, 12)):
            sides = []
            for step in (1e-3, -1e-3):
                delta.zero_()[place, axis] = step
                sides.append(watched())
            gradient[place, axis] = (sides[0] - sides[1]) / 2e-3
        mine = gradient_of(model, text, of)
    finally:
        model.model.float()
    np.testing.assert_allclose(
        mine[:, :12], gradient[:, :12], atol=1e-3 * np.abs(mine).max(), rtol=1e-2
    )


def gradient_of(model: af.Model, text: str, of: str) -> np.ndarray[Any, Any]:
    """[token, width]: the whole gradient that input_gradient reduces, caught on its way."""
    caught = []
    original = REDUCTIONS["norm"]

    def catch(gradient: Any, embedding: Any) -> Any:
        caught.append(gradient[0].numpy())
        return original(gradient, embedding)

    REDUCTIONS["norm"] = catch
    try:
        af.input_gradient(model, text, of=of)
    finally:
        REDUCTIONS["norm"] = original
    return np.asarray(caught[0])


def test_reductions_are_what_they_say() -> None:
    gradient, embedding = torch.tensor([[[3.0, -4.0]]]), torch.tensor([[[1.0, 2.0]]])
    found = {name: float(reduce(gradient, embedding)) for name, reduce in REDUCTIONS.items()}
    assert found == {"sum": 1.0, "norm": 5.0, "times_input": 5.0}


def test_the_sum_of_a_gradient_is_zero_where_a_layer_norm_reads_the_embedding() -> None:
    for model in (af.load("verb-number"), af.Model(build("distilbert"), word_tokenizer())):
        with pytest.warns(af.RoundingWarning, match="rounding error; use reduce='norm'"):
            found = af.input_gradient(model, "the key", reduce="sum")
        assert found.values.max() < 1e-4 * af.input_gradient(model, "the key").values.max()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            af.input_gradient(af.Model(build("llama")), [5, 6, 7], reduce="sum").values.min() > 0
        )  # an RMS norm sees the sum


@pytest.mark.parametrize("method", [af.blank_out, af.input_gradient])
def test_a_list_gives_what_each_input_gives_alone(method: Callable[..., Any]) -> None:
    model = af.load("verb-number")
    texts = [TEXT, "the keys", "a long list of old songs that we know"]
    together = method(model, texts, ["singular", None, 1], batch_tokens=12)
    for text, target, found in zip(texts, ["singular", None, "plural"], together, strict=True):
        alone = method(model, text, target)
        np.testing.assert_allclose(found.values, alone.values, atol=1e-5)
        assert (found.target, found.tokens) == (alone.target, alone.tokens)
        assert found.target == (target or model.predict([text])[0][0])


def test_the_model_is_left_as_it_was() -> None:
    model = af.load("verb-number")
    model.model.train()
    model.model.blocks[0].eval()
    before = [module.training for module in model.model.modules()]
    found = af.blank_out(model, TEXT), af.input_gradient(model, TEXT)
    assert [module.training for module in model.model.modules()] == before
    assert all(parameter.grad is None for parameter in model.model.parameters())
    assert not model.model.get_input_embeddings()._forward_hooks
    np.testing.assert_array_equal(
        found[0].values, af.blank_out(model, TEXT).values
    )  # dropout would show
    with torch.no_grad():
        np.testing.assert_array_equal(found[1].values, af.input_gradient(model, TEXT).values)


def test_what_replaces_a_token() -> None:
    tokenizer = word_tokenizer()
    assert find_replacement(af.Model(build("distilbert"), tokenizer), None) == 0  # [UNK]
    tokenizer.unk_token = None
    assert find_replacement(af.Model(build("distilbert"), tokenizer), None) == 4  # [MASK]
    tokenizer.mask_token = None
    assert find_replacement(af.Model(build("distilbert"), tokenizer), None) is None
    tokenizer.unk_token = tokenizer.eos_token = "[SEP]"  # as GPT-2 has it
    assert find_replacement(af.Model(build("gpt2"), tokenizer), None) is None
    assert find_replacement(af.Model(build("gpt2"), tokenizer), "key") == 6


def test_importance_by_word_and_its_top() -> None:
    found = af.Importance(
        np.array([0.1, 0.2, 0.3]),
        "input_gradient",
        ("[CLS]", "cabi", "##nets"),
        "singular",
        0.9,
        (None, 0, 0),
    )
    assert found.top(1) == [(2, "##nets", 0.3)]
    assert found.by_word().tokens == ("[CLS]", "cabinets")
    np.testing.assert_allclose(found.by_word(), [0.1, 0.5])
    assert "input_gradient of 3 tokens for 'singular' (0.900)" in repr(found)
    with pytest.raises(af.OptionError, match="groups='words'"):
        replace(found, method="blank_out").by_word()


def test_blank_out_by_word_blanks_the_whole_word() -> None:
    model = af.load()
    text = "the dogs don't see it"
    encoded = model.encode(text)
    place = encoded.words.index(2) if encoded.words else -1
    found = af.blank_out(model, text, groups="words")
    assert found.tokens[3] == "don't"
    unknown = model.tokenizer.unk_token_id
    ids = list(encoded.ids)
    ids[place : place + 2] = [unknown, unknown]
    before, after = (dict(model.predict([value])) for value in (text, ids))
    drop = before[found.target] - after.get(found.target, 1 - next(iter(after.values())))
    assert found.values[3] == pytest.approx(abs(drop), abs=1e-6)
    shown = af.explain(text).scores(by_word=True)
    assert abs(shown["blank_out"][1]) == pytest.approx(found.values, abs=1e-6)
    assert {tokens for tokens, _ in shown.values()} == {found.tokens}


def test_signed_blank_out_speaks_for_and_against() -> None:
    model, text = af.load(), "the key to the old cabinets"
    plain = af.blank_out(model, text)
    both = [af.blank_out(model, text, target, signed=True) for target in ("singular", "plural")]
    assert not plain.signed
    assert (plain.values >= 0).all()
    assert both[0].signed
    assert np.abs(both[0].values + both[1].values).max() < 1e-9  # of two classes, one is the other
    assert np.abs(np.abs(both[0].values) - plain.values).max() < 1e-9
    assert both[0].values[plain.tokens.index("key")] > 0 > both[0].values.min()
    assert af.explain(text, target="plural").importance["blank_out"].target == "plural"
    found = af.explain(text, target="plural").importance["blank_out"].values
    assert np.abs(found - both[1].values).max() < 1e-9


@pytest.mark.parametrize("family", ["gpt2", "bert-like", "llama", "verb-number"])
def test_times_input_is_taken_where_the_first_block_begins(family: str) -> None:
    """Gradient times what enters the first block, by a plain pass from there on."""
    if family == "verb-number":
        model = af.load()
        ids = list(model.encode("the key to the cabinets").ids)
    else:
        name = {"bert-like": "roberta"}.get(family, family)
        model, ids = af.Model(build(name)), [7, 23, 41, 9]
    block = find_first_block(model)
    kept: list[torch.Tensor] = []

    def keep(module: Any, given: Any, named: Any) -> Any:
        state = given[0] if given else named["hidden_states"]
        kept.append(state.detach().requires_grad_())
        if given:
            return (kept[0], *given[1:]), named
        return given, {**named, "hidden_states": kept[0]}

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    arguments = model.batch([model.encode(ids)])
    logits = model.logits(arguments, [model.logit_position(model.encode(ids))])
    handle.remove()
    probabilities = model.probabilities(logits)[0]
    probabilities[probabilities.argmax()].backward()
    assert kept[0].grad is not None
    expected = (kept[0].grad * kept[0]).sum(-1).abs()[0].detach().numpy()
    found = af.input_gradient(model, ids, reduce="times_input").values
    assert np.abs(found - expected).max() < 1e-6 * max(1.0, float(expected.max()))
    state = kept[0].detach()[0]
    assert (state - model.embedding(torch.tensor(ids)).detach()).abs().max() > 1e-4 or (
        family == "llama"  # which adds no positions to its embeddings
    )


def test_targets_of_language_models_are_tokens() -> None:
    model = af.Model(build("modernbert"), word_tokenizer())
    found = af.blank_out(model, "the [MASK] to cabinets", "key")
    assert found.target == "key"
    assert found.probability == pytest.approx(
        af.input_gradient(model, "the [MASK] to cabinets", 6).probability
    )


def test_logits_are_computed_where_they_are_read_alone() -> None:
    model = af.Model(build("llama"), word_tokenizer())
    texts = [[5, 6, 7, 8], [9, 10], [5, 6, 7]]
    encoded = [model.encode(ids) for ids in texts]
    with torch.no_grad():
        whole = [model.model(torch.tensor([ids])).logits[0, -1] for ids in texts]
        shapes = []
        head = model.model.lm_head
        hook = head.register_forward_hook(lambda _, given, out: shapes.append(given[0].shape[:2]))
        found = model.logits(model.batch(encoded), [3, 1, 2])
        hook.remove()
    assert shapes == [(3, 3)]  # of sequences and places, and not of 4 positions
    np.testing.assert_allclose(found, torch.stack(whole), atol=1e-5)


def spaced_tokenizer() -> Any:
    """Byte-level, as GPT-2's is: a space alone is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: place for place, letter in enumerate("Ġabcdefgh")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_tokenizer_over_bytes_has_no_unknown_token_whatever_it_calls_so() -> None:
    """SmolLM2 calls the token unknown that stands between documents: all before it is cut off."""
    tokenizer = spaced_tokenizer()
    tokenizer.unk_token = "h"
    model = af.Model(build("llama"), tokenizer)
    found = af.blank_out(model, "a b c")
    hidden = af.blank_out(model, "a b c", replacement="attention")
    put = af.blank_out(model, "a b c", replacement="h")
    np.testing.assert_array_equal(found.values, hidden.values)
    assert np.abs(found.values - put.values).max() > 1e-6
    scores = [3.0, 2.0, 1.0, 0.0, 0.0]
    both = [af.faithfulness(model, "a b c", scores, replacement=way) for way in (None, "attention")]
    assert both[0] == both[1]
    with pytest.raises(af.OptionError, match=r"needs a token of its own.*never gives it"):
        af.faithfulness(model, "a b c", scores, replacement="unknown")
    # one over words does give it
    words = af.Model(build("llama"), word_tokenizer())
    replaced = af.blank_out(words, "the key to cabinets", replacement="[UNK]")
    np.testing.assert_array_equal(
        af.blank_out(words, "the key to cabinets").values, replaced.values
    )


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: af.blank_out(model, "a b", ""),
        lambda model: af.input_gradient(model, "a b", [""]),
        lambda model: af.faithfulness(model, "a b", [1.0, 0.0, 0.0], target=""),
        lambda model: af.attention_graph(model, "a b", edges="gradient", target=""),
        lambda model: af.attention_graph(model, "a b", edges="gradient", target=("a", "")),
        lambda model: af.explain("a b", model=model, target=""),
        lambda model: af.evaluate(model, [("a b", "")]),
    ],
)
def test_no_text_is_no_target(ask: Any) -> None:
    model = af.Model(build("llama"), spaced_tokenizer())
    assert model.target(" ") == 0  # a space is a token; nothing is none
    with pytest.raises(af.OptionError, match=r"unknown (target|foil) ''; it must be one token"):
        ask(model)


def one_class() -> af.Model:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 60,
    }
    return af.Model(
        BertForSequenceClassification(BertConfig(**sizes, num_labels=1)).eval(), word_tokenizer()
    )


def test_a_model_with_one_output_is_watched_by_its_sigmoid() -> None:
    model = one_class()
    found = af.blank_out(model, "the key")
    with torch.no_grad():
        logit = model.model(**model.batch([model.encode("the key")])).logits[0, 0]
    assert found.probability == pytest.approx(float(logit.double().sigmoid()), abs=1e-6)
    label, probability = model.predict(["the key"])[0]
    assert (label, round(probability, 6)) == ("LABEL_0", round(found.probability, 6))


@pytest.mark.parametrize("padding", [None, 9])
def test_decoders_that_classify_do_so_at_their_last_token(padding: int | None) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=60, n_embd=16, n_layer=2, n_head=2, pad_token_id=padding, num_labels=3
    )
    model = af.Model(
        GPT2ForSequenceClassification(config).eval(), word_tokenizer()
    )  # the tokenizer's padding is another one
    texts = ["the key", "the lost key is here"]
    for text, found, (label, chance) in zip(
        texts, af.blank_out(model, texts), model.predict(texts), strict=True
    ):
        ids = model.encode(text).ids
        with torch.no_grad():
            before = model.model(input_ids=torch.tensor([ids])).logits[0].double().softmax(-1)
        target = int(before.argmax())
        assert (label, found.target) == (f"LABEL_{target}",) * 2
        assert found.probability == pytest.approx(float(before[target]), abs=1e-6)
        assert chance == pytest.approx(found.probability, abs=1e-6)
        expected = [
            abs(probability(model, (*ids[:n], 0, *ids[n + 1 :]), 0, target) - float(before[target]))
            for n in range(len(ids))
        ]
        np.testing.assert_allclose(found.values, expected, atol=1e-6)
        np.testing.assert_allclose(
            af.input_gradient(model, texts)[texts.index(text)].values,
            af.input_gradient(model, text).values,
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: af.blank_out(m, TEXT, "dual"),
            "unknown target 'dual'; choose from singular, plural",
        ),
        (lambda m: af.blank_out(m, TEXT, 2), "target must be from 0 to 1 for VerbNumber; got 2"),
        (
            lambda m: af.input_gradient(m, TEXT, -1),
            "target must be from 0 to 1 for VerbNumber; got -1",
        ),
        (
            lambda m: af.blank_out(m, TEXT, 0.5),  # type: ignore[call-overload]
            "a target is a class by name or number; got 0.5",
        ),
        (lambda m: af.blank_out(m, TEXT, True), "a target is a class by name or number; got True"),
        (
            lambda m: af.blank_out(m, (TEXT, TEXT)),
            "a pair of texts is for models with two segments; VerbNumber reads one",
        ),
        (
            lambda m: af.blank_out(m, TEXT, replacement=3.5),  # type: ignore[call-overload]
            "replacement must be whole numbers; got 3.5",
        ),
        (
            lambda m: af.blank_out(m, [TEXT], [0, 1]),
            "targets must be one for all inputs, or one per input; got 2 for 1 inputs",
        ),
        (
            lambda m: af.blank_out(m, TEXT, replacement="zorb"),
            "replacement must be a token of the model's vocabulary",
        ),
        (
            lambda m: af.blank_out(m, TEXT, batch_tokens=0),
            "batch_tokens must be a whole number, at least 1; got 0",
        ),
        (
            lambda m: af.capture(m, TEXT, batch_tokens=-5),
            "batch_tokens must be a whole number, at least 1; got -5",
        ),
        (lambda m: af.blank_out(m, TEXT, replacement=10**9), "an id from 0 to"),
        (
            lambda m: af.input_gradient(m, TEXT, of="loss"),
            "unknown of='loss'; choose from probability, logit",
        ),
        (
            lambda m: af.input_gradient(m, TEXT, reduce="max"),
            "unknown reduce='max'; choose from sum, norm, times_input",
        ),
        (lambda m: af.blank_out(m, "key " * 80), "this model takes at most 64 tokens; got 81"),
        (lambda m: af.blank_out(m, " "), "a text must not be empty"),
        (lambda m: af.blank_out(build("vit"), torch.zeros(3, 24, 24)), "not for images"),
        (lambda m: af.input_gradient(af.Model(build("t5")), [5, 6]), "not for encoder-decoders"),
        (lambda m: af.blank_out(build("bert"), [5, 6]), "BertModel has no head that predicts"),
        (
            lambda m: af.blank_out(
                af.Model(build("modernbert"), word_tokenizer()), "the [MASK]", "the key"
            ),
            "must be one token",
        ),
        (
            lambda m: af.blank_out(
                af.Model(build("modernbert"), word_tokenizer()), "the [MASK]", "zorb"
            ),
            "unknown target 'zorb'",
        ),
    ],
)
def test_bad_input_is_one_clear_line(call: Callable[[af.Model], Any], message: str) -> None:
    with pytest.raises(af.AttnFlowError) as error:
        call(af.load("verb-number"))
    assert message in str(error.value)


def test_targets_may_be_numbers_of_numpy_and_torch_and_names_come_before_numbers() -> None:
    model = af.load("verb-number")
    for target in (np.int64(1), torch.tensor(1).item(), "plural", "Plural", "1"):
        assert af.blank_out(model, TEXT, target).target == "plural"
    assert [each.target for each in af.blank_out(model, [TEXT, TEXT], np.array([0, 1]))] == [
        "singular",
        "plural",
    ]
    stars = build("distilbert")
    before, stars.config.id2label = stars.config.id2label, {0: "1", 1: "2"}
    try:
        assert af.blank_out(af.Model(stars, word_tokenizer()), "the key", "1").target == "1"
    finally:
        stars.config.id2label = before


def test_the_position_that_is_read_is_the_focal_one() -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2ForTokenClassification

    sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2}
    tagger = af.Model(GPT2ForTokenClassification(GPT2Config(**sizes)))
    assert (
        tagger.logit_position(tagger.encode([5, 6, 7])),
        af.explain([5, 6, 7], model=tagger).position,
    ) == (2, 2)
    classifier = af.Model(
        GPT2ForSequenceClassification(GPT2Config(**sizes, pad_token_id=2, eos_token_id=2))
    )
    found = af.explain([5, 6, 7, 2], model=classifier)
    assert found.position == 2  # what follows is padding, to this model
    assert found.importance["input_gradient"].values[3] == 0
    alone = af.Model(
        GPT2ForSequenceClassification(GPT2Config(**sizes))
    )  # without padding it takes one sequence at a time
    assert (
        len(
            af.evaluate(
                alone, [[5, 6, 7, 9], [5, 9, 8]], methods=["raw"], against=["blank_out"]
            ).examples
        )
        == 2
    )


def test_gradients_are_computed_inside_inference_mode_and_warned_of_in_half_precision() -> None:
    model = af.load("verb-number")
    with torch.inference_mode():
        assert af.input_gradient(model, TEXT).values.max() > 0
    half = af.Model(deepcopy(build("distilbert")).bfloat16(), word_tokenizer())
    with pytest.warns(af.RoundingWarning):
        af.input_gradient(half, "the key", reduce="sum")
