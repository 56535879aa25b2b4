"""Value zeroing against reruns of the whole model, with a hook that sets one value to zero."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import attnflow as af
from attnflow.models.wiring.find import find_wirings
from tests.families import FAMILIES, GROUPED, OUTSIDE, PAIRS, build, make_input, text

IDS = [5, 6, 7, 8, 9, 10, 11]
Zero = Callable[[torch.Tensor, int], None]


def zero_all(values: torch.Tensor, position: int) -> None:
    """[sequence, position, width], all of it the value."""
    values[:, position] = 0.0


def zero_last_third(values: torch.Tensor, position: int) -> None:
    """Queries, keys and values, one after the other."""
    values[:, position, 2 * values.shape[-1] // 3 :] = 0.0


def zero_last_of_each_head(values: torch.Tensor, position: int) -> None:
    """Query, key and value of each of four heads."""
    heads = values.view(*values.shape[:2], 4, 3, -1)
    heads[:, position, :, 2] = 0.0


# where values are made, what of that is the value, and where the block stands
PLACES: dict[str, tuple[str, Zero, str]] = {
    "bert": ("encoder.layer.{}.attention.self.value", zero_all, "encoder.layer.{}"),
    "gpt2": ("transformer.h.{}.attn.c_attn", zero_last_third, "transformer.h.{}"),
    "llama": ("model.layers.{}.self_attn.v_proj", zero_all, "model.layers.{}"),
    "gemma2": ("model.layers.{}.self_attn.v_proj", zero_all, "model.layers.{}"),
    "gpt-oss": ("model.layers.{}.self_attn.v_proj", zero_all, "model.layers.{}"),
    "vit": ("vit.layers.{}.attention.v_proj", zero_all, "vit.layers.{}"),
    "gpt-neox": (
        "gpt_neox.layers.{}.attention.query_key_value",
        zero_last_of_each_head,
        "gpt_neox.layers.{}",
    ),
    "t5 encoder": ("encoder.block.{}.layer.0.SelfAttention.v", zero_all, "encoder.block.{}"),
}


def make_model(family: str) -> Any:
    if family != "t5 encoder":
        return build(family)
    model = t.T5EncoderModel(deepcopy(build("t5").config)).eval()
    model.load_state_dict(build("t5").state_dict(), strict=False)
    return model


@contextmanager
def hook_output(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, given, output: change(output))
    try:
        yield
    finally:
        handle.remove()


def run_block(model: Any, arguments: dict[str, Any], block: str) -> torch.Tensor:
    """[position, width]: what a block gives when the whole model runs."""
    seen: list[torch.Tensor] = []

    def keep(output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    with torch.no_grad(), hook_output(model.get_submodule(block), keep):
        model(**arguments)
    return seen[-1][0]


def run_without(
    model: Any, arguments: dict[str, Any], places: tuple[str, Zero, str], layer: int, position: int
) -> torch.Tensor:
    """[position, width]: what a layer's block gives with one value of that layer set to zero."""
    value, zero, block = places

    def change(output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        zero(changed, position)
        return changed

    with hook_output(model.get_submodule(value.format(layer)), change):
        return run_block(model, arguments, block.format(layer))


@pytest.mark.parametrize("family", PLACES)
def test_edges_equal_reruns_of_the_whole_model_without_one_value(family: str) -> None:
    model = make_model(family)
    wrapped = af.Model(model)
    graph = af.attention_graph(wrapped, make_input(family), edges="value_zeroing")
    arguments = dict(wrapped.batch([wrapped.encode(make_input(family))]))
    with torch.no_grad():
        states = model(**arguments, output_hidden_states=True).hidden_states
    for layer in range(graph.depth):
        places = PLACES[family]
        whole = run_block(model, arguments, places[2].format(layer)).double()
        if layer + 1 < graph.depth:  # the last one may have passed a norm
            torch.testing.assert_close(states[layer + 1][0].double(), whole, atol=1e-5, rtol=1e-5)
        expected = np.zeros((graph.size, graph.size))
        for key in range(graph.size):
            without = run_without(model, arguments, places, layer, key).double()
            cosine = torch.nn.functional.cosine_similarity(without, whole, dim=-1)
            expected[:, key] = 1.0 - cosine.numpy()
        expected /= expected.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(graph.edges[layer], expected, atol=1e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OUTSIDE])
def test_every_family_has_its_blocks_and_hides_what_is_hidden(family: str) -> None:
    model = build(family)
    wrapped = af.Model(model)
    arguments = dict(wrapped.batch([wrapped.encode(make_input(family))]))
    with torch.no_grad():
        output = model(**arguments, output_hidden_states=True)
    names = ("encoder_hidden_states", "decoder_hidden_states")
    stacks = [output[name] for name in (names if family in PAIRS else ("hidden_states",))]
    mixes = af.capture_mix(wrapped, make_input(family), rerun=True)
    for mix in mixes:
        assert mix.rerun is not None
        assert mix.output is not None
        keys = int(mix.own[0]) or mix.attention.shape[2]  # those of another sequence stand first
        changed = mix.rerun(range(keys)).double()
        moved = (changed - mix.output.double()).norm(dim=-1).T  # [query, key]
        seen = mix.visible[:, :keys]
        if family not in PAIRS or "encoder." in mix.name:
            assert (moved[~seen] < 1e-4).all()
        assert float(moved[seen].max()) > 1e-2
    # what blocks give are the model's own states, but for the last of a stack, which is normed
    outputs = [mix.output for mix in mixes if not int(mix.own[0])]
    for stack in stacks:
        given = [outputs.pop(0) for _ in stack[1:]]
        for state, observed in zip(stack[1:-1], given, strict=False):
            torch.testing.assert_close(observed, state[0], atol=1e-4, rtol=1e-4)
    assert not outputs


@pytest.mark.parametrize(
    ("family", "value"),
    [
        ("bart", "model.decoder.layers.1.{}.v_proj"),
        ("t5", "decoder.block.1.layer.{}.v"),
    ],
)
def test_a_decoder_block_is_run_again_without_values_of_either_attention(
    family: str, value: str
) -> None:
    model = build(family)
    wrapped = af.Model(model)
    parts = {"bart": ("self_attn", "encoder_attn"), "t5": ("0.SelfAttention", "1.EncDecAttention")}
    block = {"bart": "model.decoder.layers.1", "t5": "decoder.block.1"}[family]
    arguments = dict(wrapped.batch([wrapped.encode(IDS)]))
    mixes = {mix.name: mix for mix in af.capture_mix(wrapped, IDS, rerun=True)}
    for part in parts[family]:
        name = value.format(part)
        mix = mixes[name.rpartition(".")[0]]
        assert mix.rerun is not None
        without = run_without(model, arguments, (name, zero_all, block), 1, 0)
        torch.testing.assert_close(mix.rerun([0])[0], without, atol=1e-4, rtol=1e-4)
        assert mix.output is not None
        assert float((mix.output - without).abs().max()) > 1e-2


@pytest.mark.parametrize("family", PAIRS)
def test_attention_to_another_sequence_is_refused_with_a_way_out(family: str) -> None:
    message = r"no edge for the residual of attention to another .* use contribution edges"
    with pytest.raises(af.OptionError, match=message):
        af.attention_graph(build(family), IDS, edges="value_zeroing")
    mix = next(mix for mix in af.capture_mix(build(family), IDS, rerun=True) if int(mix.own[0]) > 0)
    with pytest.raises(af.OptionError, match=message):
        af.EDGES["value_zeroing"].weigh(mix)


@pytest.mark.parametrize("family", OUTSIDE)
def test_families_outside_of_the_interface_are_refused_by_name(family: str) -> None:
    model = af.Model(build(family))
    with pytest.raises(af.CaptureError, match=f"{model.name} attends outside of transformers"):
        af.attention_graph(model, IDS, edges="value_zeroing")


def test_a_list_gives_what_single_inputs_give() -> None:
    bundled = af.load("verb-number")
    texts = ["the key to the cabinets", "the old keys", "the man who has the dogs that bark"]
    together = af.attention_graph(bundled, texts, edges="value_zeroing")
    for sentence, graph in zip(texts, together, strict=True):
        alone = af.attention_graph(bundled, sentence, edges="value_zeroing")
        np.testing.assert_allclose(graph.edges, alone.edges, atol=1e-6)
        assert (graph.edge_name, graph.residual) == ("value_zeroing", None)
        assert af.rollout(graph).edges == "value_zeroing"
        np.testing.assert_allclose(graph.edges.sum(axis=-1), 1.0, atol=1e-6)


def test_values_that_are_zero_anyway_leave_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    model = af.Model(deepcopy(build("llama")))
    # where a layer adds nothing, its wiring cannot be found: it is found before, and kept
    monkeypatch.setattr("attnflow.models.execution.sample_state", lambda module: 0)
    find_wirings(model)
    model.model.model.layers[1].self_attn.v_proj.weight.data.zero_()
    edges = af.attention_graph(model, IDS, edges="value_zeroing").edges
    np.testing.assert_array_equal(edges[1], np.eye(len(IDS)))
    assert not np.array_equal(edges[0], np.eye(len(IDS)))


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 0.2)]
)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_any_precision_gives_the_same_edges(family: str, dtype: Any, close: float) -> None:
    model = build(family)
    whole = af.attention_graph(model, IDS, edges="value_zeroing").edges
    rounded = af.attention_graph(deepcopy(model).to(dtype), IDS, edges="value_zeroing").edges
    np.testing.assert_allclose(rounded, whole, atol=close)


def test_a_block_that_gives_another_output_is_an_error_that_names_it() -> None:
    model = deepcopy(build("llama"))
    wrapped = af.Model(model)
    af.attention_graph(wrapped, IDS, edges="value_zeroing")
    calls = [1.0]

    def drift(output: Any) -> Any:
        calls.append(calls[-1] * 1.01)
        return calls[-1] * output

    with (
        hook_output(model.model.layers[1], drift),
        pytest.raises(af.CaptureError, match=r"model\.layers\.1 \(LlamaDecoderLayer\) gave anoth"),
    ):
        af.attention_graph(wrapped, IDS, edges="value_zeroing")


def test_one_layer_many_tokens_and_a_weight_of_ones_own(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model = t.LlamaForCausalLM(text(t.LlamaConfig, num_hidden_layers=1, **GROUPED)()).eval()
    ids = list(range(4, 34))
    edges = af.attention_graph(model, ids, edges="value_zeroing").edges
    monkeypatch.setattr("attnflow.capturing.rerun.TOKENS", 100)
    monkeypatch.setattr("attnflow.edges.value_zeroing.TOKENS", 70)
    np.testing.assert_allclose(
        af.attention_graph(model, ids, edges="value_zeroing").edges, edges, atol=1e-6
    )

    def measure(mix: af.LayerMix) -> Any:
        assert mix.rerun is not None
        return (mix.rerun(range(len(mix.own))) - mix.output).norm(dim=-1).T

    own = af.edge_weight("moved", measure, rerun=True)
    moved = af.attention_graph(model, ids, edges=own).edges[0]
    assert (moved[np.tril_indices(30)] > 0).all()
    assert moved[np.triu_indices(30, 1)].max() < 1e-5
    mix = af.capture_mix(model, ids, rerun=True)[0]
    assert mix.rerun is not None
    assert mix.rerun([]).shape == (0, 30, 32)
    with pytest.raises(af.OptionError, match=r"keys must be in 0\.\.29; got \[30\]"):
        mix.rerun([30])
    with pytest.raises(af.CaptureError, match="was not recorded"):
        af.EDGES["value_zeroing"].weigh(af.capture_mix(model, ids)[0])
