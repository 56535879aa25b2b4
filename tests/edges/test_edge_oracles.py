"""Edges against what is computed by hand: from raw weights in float64, and by autograd through eager attention.

Nothing here reads a `LayerMix` to say what is right: values, projections and norms are those of the
model's own modules, streams and attention those of a float64 copy that attends eagerly.
"""

from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from tests.families import FAMILIES, OUTSIDE, PAIRS, make_input, perturb

IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


# ---- float64, from raw weights ------------------------------------------------------------------


def layer_norm(states: Any, norm: Any) -> Any:
    centred = states - states.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps)
    return centred / scale * to_numpy(norm.weight) + to_numpy(norm.bias)


def rms_norm(states: Any, norm: Any, *, plus_one: bool = False) -> Any:
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    scale = np.sqrt((states**2).mean(-1, keepdims=True) + epsilon)
    return states / scale * (to_numpy(norm.weight) + plus_one)


def to_numpy(tensor: Any) -> Any:
    return tensor.detach().double().numpy()


def apply(linear: Any, states: Any) -> Any:
    moved = states @ to_numpy(linear.weight).T
    return moved if linear.bias is None else moved + to_numpy(linear.bias)


def cut_heads(values: Any, heads: int, shared: int) -> Any:
    """[head, key, width] from [key, heads that are kept * width], those that are shared spread."""
    kept = values.reshape(len(values), heads // shared, -1).transpose(1, 0, 2)
    return np.repeat(kept, shared, axis=0)


def read_bert(model: Any, layer: int, x: Any) -> Any:
    block = model.encoder.layer[layer].attention
    values = cut_heads(apply(block.self.value, x), 4, 1)
    return values, to_numpy(block.output.dense.weight).T, to_numpy(block.output.dense.bias)


def read_gpt2(model: Any, layer: int, x: Any) -> Any:
    block = model.transformer.h[layer]
    joint = layer_norm(x, block.ln_1) @ to_numpy(block.attn.c_attn.weight)
    values = (joint + to_numpy(block.attn.c_attn.bias))[:, -32:]
    projection = block.attn.c_proj  # a Conv1D, whose weight stands the other way round
    return cut_heads(values, 4, 1), to_numpy(projection.weight), to_numpy(projection.bias)


def read_llama(model: Any, layer: int, x: Any) -> Any:
    block = model.model.layers[layer]
    normed = rms_norm(x, block.input_layernorm, plus_one="Gemma" in type(model).__name__)
    attention = block.self_attn
    bias = attention.o_proj.bias
    bias = np.zeros(32) if bias is None else to_numpy(bias)
    values = cut_heads(apply(attention.v_proj, normed), 4, 2)
    return values, to_numpy(attention.o_proj.weight).T, bias


def read_neox(model: Any, layer: int, x: Any) -> Any:
    block = model.gpt_neox.layers[layer]
    joint = apply(block.attention.query_key_value, layer_norm(x, block.input_layernorm))
    values = joint.reshape(len(x), 4, 3, 8)[:, :, 2].transpose(1, 0, 2)  # per head: q, k, v
    return values, to_numpy(block.attention.dense.weight).T, to_numpy(block.attention.dense.bias)


READERS = {
    "bert": read_bert,  # post-norm
    "gpt2": read_gpt2,  # pre-norm
    "llama": read_llama,  # pre-norm without centre, grouped keys, rotary positions
    "mistral": read_llama,  # a window of four
    "qwen3": read_llama,  # norms on queries and keys
    "gpt-oss": read_llama,  # a score of no token: rows of attention sum to less than 1
    "gemma2": read_llama,  # norm on the branch, soft-capped scores, windows
    "gpt-neox": read_neox,  # attention beside the MLP
}


def compute_parts(family: str, model: Any, layer: int, x: Any, weights: Any) -> tuple[Any, Any]:
    """T [query, key, width] and y [query, width], by loops over the formulas."""
    values, projection, bias = READERS[family](model, layer, x)
    heads, size, width = values.shape
    parts = np.zeros((size, size, x.shape[1]))
    for i in range(size):
        for j in range(size):
            for h in range(heads):
                rows = projection[h * width : (h + 1) * width]
                parts[i, j] += weights[h, i, j] * (values[h, j] @ rows)
    branch = parts.sum(axis=1) + bias
    if family == "gemma2":
        norm = model.model.layers[layer].post_attention_layernorm
        gain = 1 + to_numpy(norm.weight)
        scale = np.sqrt((branch**2).mean(-1) + norm.eps)
        for i in range(size):
            parts[i] = parts[i] / scale[i] * gain
        branch = rms_norm(branch, norm, plus_one=True)
    stream = x + branch
    for i in range(size):
        parts[i, i] += x[i]
    if family == "bert":
        norm = model.encoder.layer[layer].attention.output.LayerNorm
        scale = np.sqrt(stream.var(axis=-1) + norm.eps)
        for i in range(size):
            centred = parts[i] - parts[i].mean(axis=-1, keepdims=True)
            parts[i] = centred / scale[i] * to_numpy(norm.weight)
        stream = layer_norm(stream, norm)
    return parts, stream


@pytest.mark.parametrize("family", READERS)
def test_edges_are_those_of_the_raw_weights(family: str) -> None:
    model = perturb(family, seed=3)
    exact = perturb(family, "eager", seed=3)
    if family != "gpt-oss":  # whose experts know no float64
        exact = exact.double()
    with torch.no_grad():
        ran = exact(torch.tensor([IDS]), output_attentions=True, output_hidden_states=True)
    found = {
        name: af.attention_graph(model, IDS, edges=name).edges for name in ("norm", "contribution")
    }
    for layer, weights in enumerate(ran.attentions):
        x = to_numpy(ran.hidden_states[layer][0])
        parts, stream = compute_parts(family, exact, layer, x, to_numpy(weights[0]))
        size = len(x)
        lengths, nearer = np.zeros((size, size)), np.zeros((size, size))
        for i in range(size):
            for j in range(size):
                lengths[i, j] = np.sqrt(np.sum(parts[i, j] ** 2))
                left = np.abs(stream[i] - parts[i, j]).sum()
                nearer[i, j] = max(0.0, np.abs(stream[i]).sum() - left)
        for name, expected in (("norm", lengths), ("contribution", nearer)):
            expected /= expected.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(found[name][layer], expected, atol=2e-5, err_msg=name)


def test_what_is_compared_is_not_one_and_the_same() -> None:
    """Norm, contribution and attention differ, and so do norm placements: the oracle can fail."""
    model = perturb("llama", seed=3)
    kinds = [af.attention_graph(model, IDS, edges=name).edges for name in ("norm", "contribution")]
    kinds.append(af.attention_graph(model, IDS).edges)
    for first in range(3):
        for second in range(first):
            assert np.abs(kinds[first] - kinds[second]).max() > 0.05


# ---- gradients ----------------------------------------------------------------------------------

PREDICTING = [
    family
    for family in FAMILIES
    if family not in OUTSIDE and not FAMILIES[family][0].__name__.endswith(("Model", "VisionModel"))
] + ["marian"]
PLACE = 2  # where token classifiers and masked LMs are read
WATCHED: dict[str, tuple[Any, str]] = {
    "predicted": (None, "logit"),
    "log-probability": (1, "log_probability"),
    "contrast": ((0, 1), "logit"),
    "contrast of probabilities": ((1, 0), "probability"),
}


def differentiate_eagerly(family: str, target: Any, target_of: str) -> list[Any]:
    """[head, query, key] per attention, in the order of the calls, by autograd through eager attention."""
    model = perturb(family, "eager", seed=3)
    wrapped = af.Model(model)
    arguments = dict(wrapped.batch([wrapped.encode(make_input(family, 6))]))
    ran = model(**arguments, output_attentions=True)
    logits = ran.logits[0]
    if logits.ndim == 2:  # per position
        logits = logits[PLACE] if is_read_at_place(family) else logits[-1]
    scores = {
        "logit": logits,
        "log_probability": torch.log(torch.exp(logits) / torch.exp(logits).sum()),
        "probability": torch.exp(logits) / torch.exp(logits).sum(),
    }[target_of]
    if target is None:
        watched = scores[int(logits.argmax())]
    elif isinstance(target, tuple):
        watched = scores[target[0]] - scores[target[1]]
    else:
        watched = scores[target]
    if family in PAIRS:
        decoder = zip(ran.decoder_attentions, ran.cross_attentions, strict=True)
        layers = [*ran.encoder_attentions, *(one for both in decoder for one in both)]
    else:
        layers = list(ran.attentions)
    return [gradient[0] for gradient in torch.autograd.grad(watched, layers)]


def is_read_at_place(family: str) -> bool:
    name: str = FAMILIES[family][0].__name__
    return name.endswith(("MaskedLM", "TokenClassification"))


def capture_gradients(family: str, model: Any, target: Any, target_of: str) -> list[af.LayerMix]:
    options: dict[str, Any] = {"position": PLACE} if is_read_at_place(family) else {}
    return af.capture_mix(
        model,
        make_input(family, 6),
        backward="plain",
        target=target,
        target_of=target_of,
        **options,
    )


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("family", PREDICTING)
def test_gradients_are_those_of_autograd_for_every_target(family: str, watched: str) -> None:
    target, target_of = WATCHED[watched]
    expected = differentiate_eagerly(family, target, target_of)
    mixes = capture_gradients(family, perturb(family, seed=3), target, target_of)
    assert len(mixes) == len(expected)
    for mix, gradient in zip(mixes, expected, strict=True):
        assert mix.gradient is not None
        keys = gradient.shape[-1]  # attention to another sequence has the queries as keys too
        seen = mix.attention[..., :keys] > 0
        missed = (mix.gradient[..., :keys] - gradient)[seen].abs().max()
        assert float(missed) < 1e-5 * max(1.0, float(gradient.abs().max()))
        assert float(gradient.abs().max()) > 0 or mix is mixes[-1]


@pytest.mark.parametrize("family", ["roberta", "gpt2", "gemma2", "t5", "modernbert", "vit"])
def test_gradients_leave_the_model_as_it_was(family: str) -> None:
    """Frozen or not, in training or not, with checkpoints or not: the same edges, nothing kept."""
    model = perturb(family, seed=3)
    wrapped = af.Model(model)
    options: dict[str, Any] = {"position": PLACE} if is_read_at_place(family) else {}

    def run() -> Any:
        return af.attention_graph(wrapped, make_input(family, 6), edges="gradient", **options).edges

    def predict() -> Any:
        arguments = dict(wrapped.batch([wrapped.encode(make_input(family, 6))]))
        with torch.no_grad():
            return model(**arguments).logits

    def count_hooks() -> int:
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in model.modules()
        )

    before = predict()
    listening = count_hooks()
    plain = run()
    assert count_hooks() == listening
    assert plain.max() > 1.0 + 1e-4
    checkpoint = getattr(  # its name since transformers 5; the old one warns there
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )
    checkpoint()
    listening = count_hooks()  # transformers' own, so that inputs need gradients
    model.train()
    np.testing.assert_allclose(run(), plain, rtol=1e-5, atol=1e-6)
    assert model.training
    assert any(
        getattr(module, "activation_checkpointing", getattr(module, "gradient_checkpointing", 0))
        for module in model.modules()
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    np.testing.assert_allclose(run(), plain, rtol=1e-5, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert count_hooks() == listening
    model.eval()
    assert torch.equal(predict(), before)
    with torch.inference_mode():
        np.testing.assert_allclose(run(), plain, rtol=1e-5, atol=1e-6)
