"""`Attention.from_batch`: each sequence of a padded batch is what it is alone."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from tests.oracles import KINDS, Floats, attention

RNG = np.random.default_rng(0)
Ints = npt.NDArray[np.int64]


def pad(sequences: list[Floats], reals: list[list[int]], size: int) -> tuple[Floats, Ints]:
    """[layer, batch, head, query, key] and mask, with no numbers at all in the rows of padding."""
    layers, heads = sequences[0].shape[:2]
    batch = np.zeros((layers, len(sequences), heads, size, size))
    mask = np.zeros((len(sequences), size), np.int64)
    for number, (own, real) in enumerate(zip(sequences, reals, strict=True)):
        mask[number, real] = 1
        batch[:, number, :, mask[number] == 0] = np.nan
        batch[:, number][..., np.array(real)[:, None], real] = own
    return batch, mask


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Floats], list[list[int]], int]:
    """Sequences of different lengths, and where their tokens stand: anywhere, in order."""
    size = draw(st.integers(1, 7))
    layers, heads, count = (draw(st.integers(1, 3)) for _ in range(3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    reals = [
        sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size)))
        for _ in range(count)
    ]
    kind = draw(st.sampled_from([kind for kind in KINDS if kind != "extreme"]))
    sequences = [
        np.stack([attention(kind, heads, len(real), rng) for _ in range(layers)]) for real in reals
    ]
    return sequences, reals, size


@settings(max_examples=80, deadline=None)
@given(batches(), st.sampled_from(["array", "layers", "torch", "nested"]), st.booleans())
def test_each_sequence_is_what_it_is_alone(
    drawn: tuple[list[Floats], list[list[int]], int], given_as: str, padded_tokens: bool
) -> None:
    sequences, reals, size = drawn
    batch, mask = pad(sequences, reals, size)
    forms: dict[str, Any] = {
        "array": batch,
        "layers": list(batch),
        "torch": tuple(torch.tensor(layer) for layer in batch),
        "nested": batch.tolist(),
    }
    weights = forms[given_as]
    positions = [range(size) if padded_tokens else real for real in reals]
    tokens = [[f"{number}.{at}" for at in own] for number, own in enumerate(positions)]
    words = [list(own) for own in positions]
    given_mask: Any = torch.tensor(mask) if given_as == "torch" else mask.tolist()
    results = af.Attention.from_batch(weights, given_mask, tokens, words=words)
    assert len(results) == len(sequences)
    for number, (result, own, real) in enumerate(zip(results, sequences, reals, strict=True)):
        alone = af.Attention(own)
        assert (result.weights == alone.weights).all()
        assert result.causal == alone.causal
        assert result.tokens == tuple(f"{number}.{at}" for at in real)
        assert result.words == tuple(real)


@settings(max_examples=30, deadline=None)
@given(batches())
def test_layers_of_three_axes_are_fused_over_heads(
    drawn: tuple[list[Floats], list[list[int]], int],
) -> None:
    sequences, reals, size = drawn
    batch, mask = pad([own[:, :1] for own in sequences], reals, size)
    for result, own in zip(
        af.Attention.from_batch(list(batch[:, :, 0]), mask, fused="max"), sequences, strict=True
    ):
        assert result.fused == "max"
        assert (result.weights == af.Attention(own[:, :1]).weights).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_padded_batches_of_a_model_give_what_one_by_one_runs_give(family: str, side: str) -> None:
    torch.manual_seed(0)
    model: Any
    if family == "bert":
        model = transformers.BertModel(
            transformers.BertConfig(
                vocab_size=50,
                hidden_size=16,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=32,
                attn_implementation="eager",
            )
        )
    else:
        model = transformers.GPT2Model(
            transformers.GPT2Config(
                vocab_size=50, n_embd=16, n_layer=3, n_head=2, attn_implementation="eager"
            )
        )
    model.eval()
    texts = [torch.randint(0, 50, (length,)) for length in (5, 9, 1, 7)]
    size = max(map(len, texts))
    ids, mask = torch.zeros(len(texts), size, dtype=torch.long), torch.zeros(len(texts), size)
    for number, text in enumerate(texts):
        part = slice(size - len(text), size) if side == "left" else slice(len(text))
        ids[number, part], mask[number, part] = text, 1
    places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(ids, attention_mask=mask.long(), position_ids=places, output_attentions=True)
        alone = [model(text[None], output_attentions=True).attentions for text in texts]
    results = af.Attention.from_batch(output.attentions, mask.long())
    for result, one in zip(results, alone, strict=True):
        expected = af.Attention(one)
        assert (result.heads, result.depth) == (2, 3)
        assert result.causal == expected.causal
        assert np.abs(result.weights - expected.weights).max() < 1e-6
        assert np.abs(af.rollout(result).values - af.rollout(expected).values).max() < 1e-6
    half = af.Attention.from_batch([layer.bfloat16() for layer in output.attentions], mask)
    for rough, result in zip(half, results, strict=True):
        assert np.abs(rough.weights - result.weights).max() < 1e-2
        assert np.abs(rough.weights.sum(axis=-1) - 1).max() < 1e-6


SEQUENCES = [attention("peaky", 2, length, RNG)[None] for length in (3, 2)]
BATCH, MASK = pad(SEQUENCES, [[0, 1, 2], [1, 2]], 3)
LEAKING = BATCH.copy()
LEAKING[0, 1, 1, 2] = [0.25, 0.5, 0.25]


@pytest.mark.parametrize(
    ("weights", "mask", "options", "message"),
    [
        (BATCH[0], MASK, {}, "with fewer axes, heads and sequences cannot be told apart"),
        (BATCH[:, :, 0], MASK, {}, r"one array \[layer, batch, head, query, key\], or a list"),
        ([BATCH[0], BATCH[0, :1]], MASK, {}, "all layers must have the same shape"),
        ([BATCH[0, 0, 0]], MASK, {}, r"layers must be \[batch, head, query, key\]"),
        ([BATCH[0, ..., :2]], MASK, {}, "as many queries as keys; got shape"),
        (BATCH[:, :0], MASK[:0], {}, "layers must be"),
        (BATCH[:0], MASK, {}, "layers must be"),
        ([], MASK, {}, "attn_implementation='eager'"),
        (None, MASK, {}, "attn_implementation='eager'"),
        ([BATCH[0], None], MASK, {}, "layer 2 is None: the model returned no attention weights"),
        (BATCH, MASK[:1], {}, r"mask must have shape \[batch, position\], here \(2, 3\)"),
        (BATCH, MASK.T, {}, "mask must have shape"),
        (BATCH, None, {}, "mask must be"),
        (BATCH, 2 * MASK, {}, "mask must be 1 for real tokens and 0 for padding"),
        (BATCH, MASK * [[1], [0]], {}, "got none in sequence 1, whose mask is all 0: leave it out"),
        (
            LEAKING,
            MASK,
            {},
            "sequence 1 of the batch: real tokens must give no attention to padding; layer 1,"
            " head 1, query 2 gives 0.25",
        ),
        (BATCH, np.ones_like(MASK), {}, "sequence 1 of the batch: weights must be finite"),
        (BATCH, MASK, {"tokens": [["a"]]}, "tokens must be one list per sequence; got 1 for 2"),
        (
            BATCH,
            MASK,
            {"tokens": [["a", "b", "c"], ["a"]]},
            "tokens of sequence 1 must be one per position, 3, or one per real token, 2; got 1",
        ),
        (BATCH, MASK, {"tokens": ["abc", "ab"]}, "one list per sequence; got a string"),
        (BATCH, MASK, {"tokens": 3}, "tokens must be a list"),
        (BATCH, MASK, {"window": 1}, "sequence 0 of the batch: weights must be 0 where the mask"),
    ],
)
def test_bad_batches_get_one_clear_line(
    weights: Any, mask: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(af.AttnFlowError, match=message) as error:
        af.Attention.from_batch(weights, mask, **options)
    assert "\n" not in str(error.value)
