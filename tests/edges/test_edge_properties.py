"""Edges: properties that hold for any input, blocks that are wired otherwise, and bad input."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attnflow as af
from tests.edges.odd_blocks import ODD, attend, rewire, run_mlp
from tests.families import build, perturb

IDS = [5, 6, 7, 8, 9, 10, 11]
LONG = list(range(4, 34))  # more than a head is wide
TEXT = "the key to the cabinets"
KINDS = ("effective", "norm", "contribution", "gradient")
few = settings(max_examples=5, deadline=None)
a_token = st.integers(4, 59)


@cache
def open_perturbed(family: str) -> af.Model:
    return af.Model(perturb(family))


def compute_edges(model: Any, ids: Any, kind: str, **options: Any) -> Any:
    return af.attention_graph(model, ids, edges=kind, **options).edges


# ---- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["distilbert", "llama", "gemma2", "gpt-oss", "t5"])
@few
@given(ids=st.lists(a_token, min_size=1, max_size=20))
def test_rows_sum_to_one_and_gradient_rows_hold_the_identity(
    family: str, kind: str, ids: list[int]
) -> None:
    graph = af.attention_graph(open_perturbed(family), ids, edges=kind)
    plain = af.attention_graph(open_perturbed(family), ids)
    assert graph.edges.shape == plain.edges.shape
    assert np.isfinite(graph.edges).all()
    assert (graph.edges >= 0).all()
    assert ((graph.edges > 0) <= (plain.edges > 0)).all()  # nothing on a hidden key
    if kind == "gradient":
        assert (np.diagonal(graph.edges, axis1=1, axis2=2) >= 1).all()
        return
    np.testing.assert_allclose(graph.edges.sum(axis=-1), 1.0, atol=1e-6)
    rolled = af.rollout(graph, normalize=None).values
    np.testing.assert_allclose(rolled.sum(axis=-1), 1.0, atol=1e-5)


@cache
def blind_model() -> af.Model:
    """An encoder that knows no positions; it predicts from the first one."""
    model = perturb("distilbert")
    model.distilbert.embeddings.position_embeddings.weight.data.zero_()
    return af.Model(model)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(data=st.data(), ids=st.lists(a_token, min_size=2, max_size=12))
def test_permuted_positions_permute_the_edges(kind: str, data: Any, ids: list[int]) -> None:
    order = [0, *data.draw(st.permutations(range(1, len(ids))))]
    plain = compute_edges(blind_model(), ids, kind)
    turned = compute_edges(blind_model(), [ids[place] for place in order], kind)
    np.testing.assert_allclose(turned, plain[:, order][:, :, order], atol=2e-5)


def test_permuted_positions_do_not_permute_edges_where_positions_count() -> None:
    order = [0, 3, 1, 2]
    plain = compute_edges(open_perturbed("roberta"), IDS[:4], "norm")
    turned = compute_edges(open_perturbed("roberta"), [IDS[place] for place in order], "norm")
    assert np.abs(turned - plain[:, order][:, :, order]).max() > 1e-3


def scale_head(model: Any, family: str, head: int, factor: float) -> None:
    """Multiply the values of one head (of all that share them) by a factor, and divide after it."""
    with torch.no_grad():
        if family == "gpt2":
            attention = model.transformer.h[1].attn
            rows = slice(8 * head, 8 * head + 8)
            start = 2 * 32 + 8 * head
            attention.c_attn.weight[:, start : start + 8] *= factor
            attention.c_attn.bias[start : start + 8] *= factor
            attention.c_proj.weight[rows] /= factor
        elif family == "distilbert":
            attention = model.distilbert.transformer.layer[1].attention
            rows = slice(8 * head, 8 * head + 8)
            attention.v_lin.weight[rows] *= factor
            attention.v_lin.bias[rows] *= factor
            attention.out_lin.weight[:, rows] /= factor
        else:  # two heads share the values
            attention = model.model.layers[1].self_attn
            shared = head // 2
            attention.v_proj.weight[8 * shared : 8 * shared + 8] *= factor
            attention.o_proj.weight[:, 16 * shared : 16 * shared + 16] /= factor


@pytest.mark.parametrize("kind", ["norm", "contribution", "gradient"])
@pytest.mark.parametrize("family", ["gpt2", "distilbert", "gemma2"])
@few
@given(head=st.integers(0, 3), size=st.floats(0.1, 10.0), sign=st.sampled_from([-1, 1]))
def test_scaling_values_against_the_projection_changes_nothing(
    family: str, kind: str, head: int, size: float, sign: int
) -> None:
    scaled = deepcopy(open_perturbed(family).model)
    scale_head(scaled, family, head, sign * size)
    plain = compute_edges(open_perturbed(family), IDS, kind)
    np.testing.assert_allclose(compute_edges(scaled, IDS, kind), plain, rtol=1e-4, atol=2e-5)


# ---- effective attention ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "mistral", "gemma2", "modernbert"])
def test_effective_attention_is_the_shortest_that_gives_the_same_output(family: str) -> None:
    """Row by row, with numpy's pseudo-inverse on the keys that the row may see; no mask, causal, windows."""
    taken = 0.0
    hidden = 0
    for mix in af.capture_mix(open_perturbed(family), LONG):
        found = af.EDGES["effective"].compute(mix).numpy()
        weights, values = mix.attention.double().numpy(), mix.values.double().numpy()
        outputs = values @ mix.projection.double().numpy()  # [head, key, model width]
        for head in range(len(weights)):
            for row in range(len(LONG)):
                seen = np.flatnonzero(weights[:, row].any(axis=0))
                hidden += len(LONG) - len(seen)
                told = outputs[head, seen]
                expected = np.zeros(len(LONG))
                expected[seen] = weights[head, row, seen] @ told @ np.linalg.pinv(told, rcond=1e-6)
                np.testing.assert_allclose(found[head, row], expected, atol=1e-6)
                difference = (weights[head, row] - found[head, row]) @ outputs[head]
                assert np.abs(difference).max() < 1e-5  # the part taken away changes no output
                assert (found[head, row][weights[:, row].max(axis=0) == 0] == 0).all()
                if len(seen) <= values.shape[-1]:
                    np.testing.assert_allclose(found[head, row], weights[head, row], atol=1e-6)
                else:
                    taken = max(taken, np.abs(found[head, row] - weights[head, row]).max())
    assert (hidden > 0) == (family != "bert")
    # a window of four keys is never wider than a head; gemma2 has layers without one
    assert (taken > 1e-3) == (family != "mistral")


@few
@given(repeated=st.lists(st.integers(0, 6), min_size=len(LONG), max_size=len(LONG)))
def test_effective_attention_where_values_repeat(repeated: list[int]) -> None:
    """Few different values span few directions, fewer than a row has keys."""
    mix = af.capture_mix(open_perturbed("gpt2"), LONG)[1]
    mix = replace(mix, values=mix.values[:, repeated])
    found = af.EDGES["effective"].compute(mix).numpy()
    outputs = (mix.values.double() @ mix.projection.double()).numpy()
    for head, weights in enumerate(mix.attention.double().numpy()):
        for row in range(len(LONG)):
            told = outputs[head, : row + 1]
            expected = weights[row, : row + 1] @ told @ np.linalg.pinv(told, rcond=1e-6)
            np.testing.assert_allclose(found[head, row, : row + 1], expected, atol=1e-6)


@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_effective_attention_knows_nothing_of_padding(family: str) -> None:
    inputs = [LONG, LONG[3:23], LONG[:5]]
    together = af.attention_graph(open_perturbed(family), inputs, edges="effective")
    for ids, graph in zip(inputs, together, strict=True):
        np.testing.assert_allclose(
            graph.edges, compute_edges(open_perturbed(family), ids, "effective"), atol=1e-5
        )


# ---- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 6e-2), (torch.float16, 8e-3)])
@pytest.mark.parametrize("family", ["distilbert", "gpt2", "gpt-neox", "gemma2", "gpt-oss", "t5"])
def test_sixteen_bits_keep_the_identity_and_stay_near(
    family: str, dtype: Any, close: float
) -> None:
    model = build(family).eval()
    rounded = deepcopy(model).to(dtype)
    for kind in KINDS:
        if kind == "gradient" and family in ("gpt-oss", "t5"):
            continue  # which expert is asked, or a deep way back, turns on the last bit
        options = {"target": 1} if kind == "gradient" else {}
        whole, found = (compute_edges(each, IDS, kind, **options) for each in (model, rounded))
        np.testing.assert_allclose(found, whole, atol=close * max(1.0, whole.max()))
    for mix in af.capture_mix(rounded, IDS):
        parts = torch.einsum("hij,hjd->ijd", mix.weights, mix.vectors).sum(dim=1) + mix.residual
        rest = mix.stream - parts  # what no key brought: nearly the same everywhere
        assert float((rest - rest.mean(0)).norm() / mix.stream.norm()) < 3e-2


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_the_tolerance_of_the_identity_is_what_it_says(dtype: Any, limit: float) -> None:
    model = deepcopy(build("llama")).to(dtype).eval()
    wrapped = af.Model(model)
    af.attention_graph(wrapped, IDS, edges="norm")  # traced
    layer = model.model.layers[2].self_attn.o_proj

    def run(share: float) -> None:
        handle = layer.register_forward_hook(lambda module, given, output: (1 + share) * output)
        try:
            af.attention_graph(wrapped, IDS, edges="norm")
        finally:
            handle.remove()

    run(0.3 * limit)
    with pytest.raises(af.CaptureError, match=r"model\.layers\.2\.self_attn was not understood"):
        run(2 * limit)


# ---- adapters, quantised weights ----------------------------------------------------------------


class Adapter(nn.Module):
    """A projection and a low-rank change of it, added up."""

    def __init__(self, base: Any, shape: Callable[[Any], Any] = lambda change: change) -> None:
        super().__init__()
        wide, narrow = base.weight.shape
        self.base, self.shape = base, shape
        self.down, self.up = nn.Linear(narrow, 4, bias=False), nn.Linear(4, wide, bias=False)
        for each in (self.down, self.up):
            nn.init.normal_(each.weight, std=0.3, generator=torch.Generator().manual_seed(wide))

    def forward(self, states: Any) -> Any:
        return self.base(states) + self.shape(self.up(self.down(states)))

    def merge(self) -> Any:
        merged = deepcopy(self.base)
        merged.weight.data += self.up.weight.data @ self.down.weight.data
        return merged


class WeightedAdapter(Adapter):
    """One that shows the weight that it changes, as PEFT's do."""

    @property
    def weight(self) -> Any:
        return self.base.weight


def adapt(family: str, make: Callable[[Any], Any]) -> Any:
    model = deepcopy(open_perturbed(family).model)
    for block in model.model.layers:
        for name in ("v_proj", "o_proj"):
            setattr(block.self_attn, name, make(getattr(block.self_attn, name)))
    return model


@pytest.mark.parametrize("kind", [Adapter, WeightedAdapter])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_adapters_count_as_if_they_were_merged(family: str, kind: Any) -> None:
    adapted, merged = adapt(family, kind), adapt(family, lambda base: kind(base).merge())
    for name in KINDS:
        expected = compute_edges(merged, IDS, name)
        np.testing.assert_allclose(
            compute_edges(adapted, IDS, name), expected, rtol=1e-4, atol=1e-5
        )
        assert np.abs(expected - compute_edges(open_perturbed(family), IDS, name)).max() > 1e-2


def test_an_adapter_that_is_not_linear_is_refused_by_its_layer() -> None:
    model = adapt("llama", lambda base: Adapter(base, torch.relu))
    with pytest.raises(af.CaptureError, match=r"model\.layers\.0\.self_attn.*use attention edges"):
        compute_edges(model, IDS, "contribution")


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_weights_of_eight_bits_hold_or_are_refused_in_one_line(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way out of torch
        model = torch.ao.quantization.quantize_dynamic(deepcopy(build(family)), {nn.Linear})
    assert compute_edges(model, IDS, "attention").shape == (3, 7, 7)
    with pytest.raises(
        af.CaptureError, match=r"\.0\..*its parts miss.*use attention edges"
    ) as error:
        compute_edges(model, IDS, "norm")
    assert "\n" not in str(error.value)


# ---- blocks that are wired otherwise ------------------------------------------------------------


@pytest.mark.parametrize("forward", ODD, ids=lambda forward: forward.__name__)
def test_a_block_that_is_wired_otherwise_is_an_error_that_names_it(forward: Any) -> None:
    model = rewire(forward)
    with pytest.raises(af.CaptureError, match=r"model\.layers\.1\..*use attention edges"):
        compute_edges(model, IDS, "contribution")
    assert compute_edges(model, IDS, "attention").shape == (3, 7, 7)


def test_a_block_that_is_only_written_otherwise_is_none() -> None:
    def same(block: Any, x: Any, **options: Any) -> Any:
        y = attend(block, x, options) + x
        return run_mlp(block, y) + y

    def negative(block: Any, x: Any, **options: Any) -> Any:
        y = x - attend(block, x, options)
        return y + run_mlp(block, y)

    flipped = deepcopy(open_perturbed("llama").model)
    flipped.model.layers[1].self_attn.o_proj.weight.data *= -1
    for forward, plain in ((same, open_perturbed("llama")), (negative, flipped)):
        expected = compute_edges(plain, IDS, "contribution")
        np.testing.assert_allclose(
            compute_edges(rewire(forward), IDS, "contribution"), expected, atol=1e-5
        )


# ---- bad input ----------------------------------------------------------------------------------


def second(value: Callable[[Any], Any]) -> Callable[[af.LayerMix], Any]:
    """A function that is right but in the second layer."""
    return lambda mix: value(mix) if mix.name == "blocks.1.attention" else mix.attention.mean(0)


@pytest.mark.parametrize("residual", ["inside", "mixed"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda mix: -mix.attention.mean(0), "finite and not negative; got -"),
        (lambda mix: mix.attention.mean(0) - 0.5, "finite and not negative; got -0.5"),
        (lambda mix: mix.attention.mean(0) * np.nan, "finite and not negative; got nan"),
        (lambda mix: mix.attention.mean(0) / 0, "finite and not negative; got"),
        (lambda mix: mix.attention.mean(0)[1:], "shape [query, key], here (6, 6); got (5, 6)"),
        (lambda mix: mix.attention[:0], "shape [query, key], here (6, 6); got (0, 6, 6)"),
        (lambda mix: mix.attention[None], "here (6, 6); got (1, 8, 6, 6)"),
        (lambda mix: None, "here (6, 6); got ()"),
        (lambda mix: "many", "must be an array of numbers; got str"),
        (lambda mix: mix.attention[0].numpy() * 1j, "must be an array of numbers; got ndarray"),
        (lambda mix: mix.gradient.abs(), "failed: AttributeError: 'NoneType' object"),
    ],
)
def test_a_function_that_gives_no_edges_is_named_with_its_layer(
    bundled: af.Model, residual: str, value: Any, message: str
) -> None:
    own = af.edge_weight("mine", second(value), residual=residual)
    with pytest.raises(af.AttnFlowError) as error:
        af.attention_graph(bundled, TEXT, edges=own)
    said = str(error.value)
    assert said.startswith("edges 'mine' of blocks.1.attention")
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edges": "norm", "heads": "max"}, "edges 'norm' have no heads to fuse; got heads='max'"),
        ({"edges": "contribution", "heads": "min"}, "'contribution' have no heads to fuse"),
        ({"edges": "effective", "heads": "sum"}, "unknown heads 'sum'; choose from mean, max, min"),
        ({"edges": "attention", "heads": "sum"}, "unknown heads 'sum'"),
        ({"edges": "norm", "residual": 0.5}, "edges 'norm' hold the residual inside"),
        ({"edges": "contribution", "residual": 0.0}, "'contribution' hold the residual inside"),
        ({"edges": "gradient", "residual": 0.5}, "edges 'gradient' hold the residual inside"),
        ({"edges": "effective", "residual": 1.0}, "residual must be a number from 0"),
        ({"edges": "gradient", "target": [0, 1]}, "one for each of 1 inputs; got 2"),
        ({"edges": "gradient", "target": (0, 1, 1)}, "a contrast is between two targets; got 3"),
        ({"edges": "gradient", "position": 9}, "position must be from 0 to 5; got 9"),
    ],
)
def test_options_that_do_not_fit_the_edges_are_one_line(
    bundled: af.Model, options: Any, message: str
) -> None:
    with pytest.raises(af.OptionError) as error:
        af.attention_graph(bundled, TEXT, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_heads_are_fused_where_edges_have_them(bundled: af.Model) -> None:
    mixes = af.capture_mix(bundled, TEXT, backward="plain")
    for heads, fuse in (("max", np.max), ("min", np.min), ("mean", np.mean)):
        found = compute_edges(bundled, TEXT, "gradient", heads=heads)
        for layer, mix in zip(found, mixes, strict=True):
            assert mix.gradient is not None
            each = (mix.attention * mix.gradient).clamp_min(0).double().numpy()
            np.testing.assert_allclose(layer, np.eye(6) + fuse(each, axis=0), atol=1e-6)


def test_arrays_and_plain_modules_have_no_values_and_are_told_so() -> None:
    attention = af.Attention(np.full((2, 3, 3), 1 / 3))
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    with af.record(plain) as calls:
        plain(torch.randn(4, 1, 8))
    for instead in (attention, attention.weights, plain, calls):
        with pytest.raises(af.OptionError, match=r"Model takes a Hugging Face model") as error:
            af.attention_graph(instead, TEXT, edges="norm")
        assert "\n" not in str(error.value)
    with pytest.raises(af.OptionError, match="edges requires one"):
        af.explain(attention, edges="norm")
