"""Rows and segments without matrices equal the matrices' rollout, for every family with one stack."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import attnflow as af
from tests.families import DECODERS, ENCODERS, VISION, build, text

SAME = 1e-5
IDS = [7, 23, 41, 9, 55, 12, 30, 8, 17, 44, 5]
STACKS = [*ENCODERS, *DECODERS, *VISION]
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
}
# what the families of capture's own tests do not have: narrow values, biases of scores
OTHERS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "deepseek-v3": (t.DeepseekV3ForCausalLM, text(t.DeepseekV3Config, **LATENT)),
    "mpt": (t.MptForCausalLM, text(t.MptConfig, d_model=32, n_heads=4, n_layers=3)),
    "t5 encoder": (
        t.T5EncoderModel,
        text(t.T5Config, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4),
    ),
}


def example(family: str) -> Any:
    if family in VISION:
        return torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(3))
    return IDS


@cache
def other(family: str) -> Any:
    kind, configuration = OTHERS[family]
    torch.manual_seed(0)
    model = kind._from_config(configuration()).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape) * 0.3
    return model


def check_rows(model: af.Model, given: Any, residual: float, without: list[int]) -> None:
    """Rows of several layers, against the matrices."""
    asked: dict[str, Any] = {"layers": [3, 1, 2], "positions": [5, -1, 2]}
    graph = af.capture(model, given).graph(residual=residual, without=without)
    for expected, rows in (
        (
            af.rollout(graph, **asked),
            af.rollout_rows(model, given, residual=residual, without=without, **asked),
        ),
        (af.raw(graph, **asked), af.raw_rows(model, given, without=without, **asked)),
    ):
        assert np.abs(rows.values - expected.values).max() < SAME
        for name in ("layers", "positions", "bottom", "tokens", "queries", "words", "causal"):
            assert getattr(rows, name) == getattr(expected, name), name
        for name in ("method", "normalize", "window", "removed", "size", "edges"):
            assert getattr(rows, name) == getattr(expected, name), name
        assert rows.source is not None
        assert expected.source is not None
        assert rows.source.fingerprint == expected.source.fingerprint


@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("family", STACKS)
def test_rows_equal_the_rollout_of_captured_attention(
    family: str, implementation: str | None
) -> None:
    model = af.Model(build(family, implementation))
    check_rows(model, example(family), 0.5, [])
    check_rows(model, example(family), 0.2, [0, 3])


@pytest.mark.parametrize("family", OTHERS)
def test_rows_of_latent_attention_and_of_biased_scores_equal_it_too(family: str) -> None:
    check_rows(af.Model(other(family)), IDS, 0.5, [])


def test_rows_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"positions": range(len(IDS)), "layers": [1, 2, 3]}
    for family in ("gemma2", "gpt-oss", "llama", "modernbert", "bloom"):
        model = af.Model(build(family))
        whole = af.rollout_rows(model, IDS, **asked).values
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["attnflow.models.weighing"], "BLOCK_SCORES", 100)
            pieces = af.rollout_rows(model, IDS, **asked).values
        assert np.abs(whole - pieces).max() < 1e-6


def test_the_top_layer_is_the_default_and_several_inputs_give_a_list() -> None:
    model = build("llama")
    rows = af.rollout_rows(model, IDS, positions=[-1])
    assert (rows.layers, rows.positions, rows.values.shape) == ((3,), (10,), (1, 1, 11))
    assert af.raw_rows(model, IDS, positions=-1).layers == (3,)
    inputs = [IDS, IDS[:4], [9]]
    for function in (af.rollout_rows, af.raw_rows):
        together = function(model, inputs, positions=[-1])
        assert [each.values.shape[-1] for each in together] == [11, 4, 1]
        for each, given in zip(together, inputs, strict=True):
            alone = function(model, given, positions=[-1])
            assert isinstance(alone, af.TokenAttention)
            assert np.array_equal(each.values, alone.values)


def test_no_matrix_is_ever_in_memory() -> None:
    """The largest tensor that is made while rows travel, 600 positions long, is no 600 x 600."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            output = func(*args, **(kwargs or {}))
            for each in output if isinstance(output, tuple | list) else [output]:
                if isinstance(each, torch.Tensor):
                    self.largest = max(self.largest, each.numel())
            return output

    torch.manual_seed(0)
    config = text(t.LlamaConfig, max_position_embeddings=1000, num_key_value_heads=2)()
    model = af.Model(t.LlamaForCausalLM._from_config(config).eval())
    ids = torch.randint(0, 60, (600,)).tolist()
    _ = model.probe
    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(sys.modules["attnflow.models.weighing"], "BLOCK_SCORES", 10_000)
        rows = af.rollout_rows(model, ids, positions=range(-8, 0))
    assert 0 < watch.largest < 600 * 600 / 5
    expected = af.rollout(af.capture(model, ids), layers=[3], positions=range(-8, 0))
    assert np.abs(rows.values - expected.values).max() < SAME


def test_half_precision_and_training_mode_are_no_obstacle() -> None:
    model = build("llama").to(torch.bfloat16).train()
    try:
        expected = af.rollout(af.capture(model, IDS), layers=[3], positions=[-1])
        rows = af.rollout_rows(model, IDS, positions=[-1])
        assert np.abs(rows.values - expected.values).max() < SAME
        assert model.training
    finally:
        model.to(torch.float32).eval()


def test_a_mask_that_went_missing_is_an_error() -> None:
    model = build("qwen3")
    attentions = [module for module in model.modules() if getattr(module, "is_causal", False)]
    try:
        for module in attentions:
            module.is_causal = False
        with pytest.raises(af.CaptureError, match=r"must hide what follows; got .* at layer 1"):
            af.rollout_rows(model, IDS, positions=[-1])
    finally:
        for module in attentions:
            module.is_causal = True


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (IDS, {"positions": [11]}, "positions must be from -11 to 10; got 11"),
    (IDS, {"positions": []}, "at least one position must be asked for; got none"),
    (IDS, {"positions": None}, "got positions=None: give some"),
    (IDS, {"positions": [0] * 12}, "at most 11 rows can be asked for, one per position; got 12"),
    (IDS, {"positions": ["a"]}, "positions must be whole numbers; got 'a'"),
    (IDS, {"positions": [0], "layers": [4]}, "layers must be from 1 to 3; got 4"),
    (IDS, {"positions": [0], "layers": [0]}, "layers must be from 1 to 3; got 0"),
    (IDS, {"positions": [0], "layers": []}, "at least one layer must be asked for; got none"),
    (IDS, {"positions": [0], "without": [0]}, "position 0 was taken out"),
    (IDS, {"positions": [0], "without": range(11)}, "must leave at least one position"),
    ("a text", {"positions": [0]}, "has no tokenizer"),
    ([{"role": "user", "content": "hello"}], {"positions": [0]}, "with a chat template"),
]


@pytest.mark.parametrize(("given", "options", "message"), BAD)
def test_bad_rows_get_one_clear_line(given: Any, options: dict[str, Any], message: str) -> None:
    for function in (af.rollout_rows, af.raw_rows):
        with pytest.raises(af.OptionError, match=message) as error:
            function(build("llama"), given, **options)
        assert "\n" not in str(error.value)


def test_a_bad_residual_and_an_encoder_decoder_get_one_clear_line() -> None:
    with pytest.raises(af.OptionError, match="residual must be a number from 0"):
        af.rollout_rows(build("llama"), IDS, positions=[0], residual=1.0)
    with pytest.raises(af.OptionError, match="T5ForConditionalGeneration is an encoder-decoder"):
        af.rollout_rows(build("t5"), IDS, positions=[0])
