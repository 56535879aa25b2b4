"""`record`: the same weights as torch's own, the same outputs to the last bit, and the module left as it was found."""

import copy
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.capturing.record.record import record
from attnflow.capturing.record.recordings import Recordings
from attnflow.errors import CaptureError

SAME = 1e-6
BATCH, LENGTH, SOURCE, SIZE, HEADS = 3, 5, 7, 8, 2
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
LEFT = PADDED.flip(1)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
BIAS = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seed_torch() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype stage.*")
        warnings.filterwarnings(
            "ignore", message="enable_nested_tensor is True, but self.use_nested_tensor is False"
        )
        yield


def randomise(module: nn.Module) -> Any:
    """Parameters that torch starts at 0 or 1 are moved away: a forgotten bias or norm then shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.eval()


def make_attention(**options: Any) -> Any:
    return randomise(
        nn.MultiheadAttention(SIZE, options.pop("heads", HEADS), **{"batch_first": True, **options})
    )


def make_encoder(
    layers: int = 3, *, nested: bool = True, heads: int = HEADS, **options: Any
) -> Any:
    layer = nn.TransformerEncoderLayer(SIZE, heads, 16, **{"batch_first": True, **options})
    return randomise(nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested))


def run_recorded(
    module: nn.Module, *args: Any, heads: str | None = None, **kwargs: Any
) -> tuple[Any, Recordings]:
    with record(module, heads=heads) as recordings:
        output = module(*args, **kwargs)
    return output, recordings


def assert_bit_identical(first: Any, second: Any) -> None:
    if isinstance(first, tuple):
        for one, other in zip(first, second, strict=True):
            assert_bit_identical(one, other)
    elif first is not None:
        assert torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
        assert torch.equal(first.isnan(), second.isnan())


class Slow:
    """Torch's own weights of every call, in order: each self_attn is made to go the slow way and to return them."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.weights = module, list[Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def ask(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

        hooks = []
        for part in self.module.modules():
            if isinstance(part, nn.MultiheadAttention):
                hooks.append(part.register_forward_pre_hook(ask, with_kwargs=True))
                hooks.append(
                    part.register_forward_hook(
                        lambda _, __, output: self.weights.append(output[1].detach())
                    )
                )
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return self.module(*args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
            for hook in hooks:
                hook.remove()


def assert_like_torch(module: nn.Module, *args: Any, **kwargs: Any) -> Recordings:
    """Recorded weights equal torch's own slow ones where a query is real, and the outputs are the same to the last bit."""
    slow = Slow(module)
    with torch.no_grad():
        slow(*args, **kwargs)
        plain = module(*args, **kwargs)
        output, recordings = run_recorded(module, *args, **kwargs)
    assert_bit_identical(plain, output)
    assert len(recordings) == len(slow.weights) > 0
    for call, expected in zip(recordings, slow.weights, strict=True):
        real = (
            np.ones(call.weights.shape[::2], bool)
            if call.padding is None or not call.self_attention
            else ~call.padding
        )
        found = call.weights.transpose(0, 2, 1, 3)[real]
        keys = call.weights.shape[-1]
        wanted = expected[:, :, : call.weights.shape[2], :keys].numpy().transpose(0, 2, 1, 3)[real]
        assert np.abs(found - wanted).max() < SAME
        assert call.weights.dtype == np.float32
    return recordings


# ---- one nn.MultiheadAttention ------------------------------------------------------------------------------------------------


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "bool": {"attn_mask": CAUSAL != 0},
    "float": {"attn_mask": BIAS},
    "bool-per-head": {
        "attn_mask": (
            torch.rand(BATCH * HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
            < 0.3
        )
        & ~torch.eye(LENGTH).bool()
    },
    "float-per-head": {
        "attn_mask": torch.randn(
            BATCH * HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)
        )
    },
    "padding": {"key_padding_mask": PADDED},
    "float-padding": {
        "key_padding_mask": torch.zeros(PADDED.shape).masked_fill(PADDED, -torch.inf)
    },
    "finite-padding": {"key_padding_mask": PADDED * -1e9},
    "both": {"attn_mask": CAUSAL != 0, "key_padding_mask": PADDED},
    "both-float": {
        "attn_mask": BIAS,
        "key_padding_mask": torch.zeros(PADDED.shape).masked_fill(PADDED, -torch.inf),
    },
    "hint": {"attn_mask": CAUSAL, "is_causal": True},
    "hint-and-padding": {
        "attn_mask": CAUSAL,
        "is_causal": True,
        "key_padding_mask": torch.zeros(PADDED.shape).masked_fill(PADDED, -torch.inf),
    },
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"batch_first": False}, {"heads": 1}], ids=str
)
def test_weights_equal_torch_under_every_mask(
    options: dict[str, Any], masks: str, need_weights: bool, fast: bool
) -> None:
    module, x = make_attention(**options), torch.randn(BATCH, LENGTH, SIZE)
    given = dict(MASKS[masks])
    if options.get("heads") == 1 and "per-head" in masks:
        given["attn_mask"] = given["attn_mask"][:BATCH]
    x = x if module.batch_first else x.transpose(0, 1)
    with torch.no_grad():
        _, expected = module(x, x, x, need_weights=True, average_attn_weights=False, **given)
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            plain = module(x, x, x, need_weights=need_weights, **given)
            output, (call,) = run_recorded(module, x, x, x, need_weights=need_weights, **given)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert_bit_identical(plain, output)
    assert np.abs(call.weights - expected.numpy()).max() < SAME
    assert (call.name, call.self_attention, call.no_token_share) == ("", True, None)
    if "padding" in masks or "both" in masks:
        assert call.padding is not None
        assert np.array_equal(call.padding, PADDED.numpy())
    else:
        assert call.padding is None


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 6, "vdim": 4}, {"kdim": 6, "vdim": 4, "bias": False}], ids=str
)
def test_cross_attention_with_other_sizes(options: dict[str, Any], batch_first: bool) -> None:
    module = make_attention(batch_first=batch_first, **options)
    query = torch.randn(BATCH, LENGTH, SIZE)
    key, value = torch.randn(BATCH, SOURCE, module.kdim), torch.randn(BATCH, SOURCE, module.vdim)
    inputs = [each if batch_first else each.transpose(0, 1) for each in (query, key, value)]
    _, expected = module(*inputs, average_attn_weights=False)
    plain = module(*inputs, need_weights=False)
    output, (call,) = run_recorded(module, *inputs, need_weights=False)
    assert_bit_identical(plain, output)
    assert np.abs(call.weights - expected.detach().numpy()).max() < SAME
    assert not call.self_attention


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"attn_mask": BIAS},
        {"attn_mask": torch.stack([BIAS, -BIAS])},
        {"key_padding_mask": PADDED[1]},
    ],
    ids=str,
)
def test_unbatched_inputs(masks: dict[str, Any]) -> None:
    module, x = make_attention(), torch.randn(LENGTH, SIZE)
    _, expected = module(x, x, x, average_attn_weights=False, **masks)
    output, (call,) = run_recorded(module, x, x, x, need_weights=False, **masks)
    assert_bit_identical(module(x, x, x, need_weights=False, **masks), output)
    assert call.weights.shape == (1, HEADS, LENGTH, LENGTH)
    assert np.abs(call.weights[0] - expected.detach().numpy()).max() < SAME


@pytest.mark.parametrize("masks", ["none", "bool", "float-per-head", "padding", "both"])
@pytest.mark.parametrize(
    "options",
    [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
    ids=str,
)
def test_added_keys_have_the_share_of_no_token(options: dict[str, Any], masks: str) -> None:
    module, x = make_attention(**options), torch.randn(BATCH, LENGTH, SIZE)
    _, full = module(x, x, x, average_attn_weights=False, **MASKS[masks])
    full = full.detach().numpy()
    output, (call,) = run_recorded(module, x, x, x, need_weights=False, **MASKS[masks])
    assert_bit_identical(module(x, x, x, need_weights=False, **MASKS[masks]), output)
    tokens = full[..., :LENGTH]
    assert np.abs(call.weights - tokens / tokens.sum(-1, keepdims=True)).max() < SAME
    assert call.no_token_share is not None
    assert np.abs(call.no_token_share - full[..., LENGTH:].sum(-1).mean(1)).max() < SAME
    assert np.abs(call.weights.sum(-1) - 1).max() < SAME
    attention = Recordings([call]).attention(sequence=0)
    assert attention.no_token_share is not None
    assert np.allclose(attention.no_token_share[0], call.no_token_share[0])


def test_is_causal_counts_where_torch_relies_on_it() -> None:
    """With need_weights=False and no padding mask the slow path puts its own causal mask in the place of attn_mask."""
    module, x = make_attention(), torch.randn(BATCH, LENGTH, SIZE, requires_grad=True)
    _, (call,) = run_recorded(module, x, x, x, need_weights=False, attn_mask=BIAS, is_causal=True)
    _, expected = module(x, x, x, attn_mask=CAUSAL, average_attn_weights=False)
    assert np.abs(call.weights - expected.detach().numpy()).max() < SAME
    _, (call,) = run_recorded(module, x, x, x, need_weights=True, attn_mask=BIAS, is_causal=True)
    _, expected = module(x, x, x, attn_mask=BIAS, average_attn_weights=False)
    assert np.abs(call.weights - expected.detach().numpy()).max() < SAME


def test_weights_are_those_before_dropout_and_randomness_is_untouched() -> None:
    module, x = make_attention(dropout=0.5), torch.randn(BATCH, LENGTH, SIZE)
    _, expected = module(x, x, x, average_attn_weights=False)
    module.train()
    torch.manual_seed(5)
    plain, after = module(x, x, x), torch.rand(1)
    torch.manual_seed(5)
    output, (call,) = run_recorded(module, x, x, x)
    assert_bit_identical(plain, output)
    assert torch.equal(after, torch.rand(1))
    assert np.abs(call.weights - expected.detach().numpy()).max() < SAME


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float64, np.float64), (torch.bfloat16, np.float32), (torch.float16, np.float32)],
)
def test_precision(dtype: torch.dtype, kept: type) -> None:
    module, x = make_attention().to(dtype), torch.randn(BATCH, LENGTH, SIZE).to(dtype)
    output, (call,) = run_recorded(module, x, x, x, need_weights=False)
    assert_bit_identical(module(x, x, x, need_weights=False), output)
    exact = copy.deepcopy(module).double()
    _, expected = exact(x.double(), x.double(), x.double(), average_attn_weights=False)
    assert call.weights.dtype == kept
    assert np.abs(call.weights - expected.detach().numpy()).max() < (
        1e-12 if kept is np.float64 else SAME
    )


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
def test_fused_heads_equal_those_fused_later(heads: str) -> None:
    module, x = make_attention(add_zero_attn=True), torch.randn(BATCH, LENGTH, SIZE)
    _, every = run_recorded(module, x, x, x)
    _, fused = run_recorded(module, x, x, x, heads=heads)
    assert fused[0].weights.shape == (BATCH, 1, LENGTH, LENGTH)
    assert (
        np.abs(
            every.attention(1).graph(heads=heads).weights
            - fused.attention(1).graph(heads=heads).weights
        ).max()
        < SAME
    )
    assert fused.attention(1).fused == heads
    with record(module) as recordings:
        module(x, x, x)
    assert recordings[0].fused == "mean"


def test_min_of_heads_that_share_no_key_looks_at_itself() -> None:
    mask = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool)
    mask[0, :, 0] = mask[1, :, 1] = False
    module, x = make_attention(), torch.randn(LENGTH, SIZE)
    _, (call,) = run_recorded(module, x, x, x, attn_mask=mask, heads="min")
    assert np.array_equal(call.weights[0, 0], np.eye(LENGTH))


@pytest.mark.parametrize("heads", [None, "mean", "max", "min"])
def test_blocks_of_queries_change_nothing(
    heads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = make_attention(add_bias_kv=True), torch.randn(BATCH, LENGTH, SIZE)
    given = MASKS["both"] | {"attn_mask": MASKS["bool-per-head"]["attn_mask"]}
    _, (whole,) = run_recorded(module, x, x, x, heads=heads, **given)
    monkeypatch.setattr(
        sys.modules["attnflow.models.attention_weights"],
        "BLOCK_SCORES",
        2 * BATCH * HEADS * (LENGTH + 1),
    )
    _, (blocks,) = run_recorded(module, x, x, x, heads=heads, **given)
    assert np.abs(whole.weights - blocks.weights).max() < SAME
    assert whole.no_token_share is not None
    assert np.abs(whole.no_token_share - blocks.no_token_share).max() < SAME


# ---- encoders, decoders, and one's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"mask": CAUSAL},
        {"mask": CAUSAL != 0},
        {"src_key_padding_mask": PADDED},
        {"src_key_padding_mask": LEFT},
    ],
    ids=str,
)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True},
        {"activation": "gelu"},
        {"batch_first": False},
        {"heads": 1},
        {"bias": False},
    ],
    ids=str,
)
def test_encoder_like_torch_on_every_path(
    options: dict[str, Any], nested: bool, masks: dict[str, Any]
) -> None:
    module, x = make_encoder(nested=nested, **options), torch.randn(BATCH, LENGTH, SIZE)
    x = x if options.get("batch_first", True) else x.transpose(0, 1)
    recordings = assert_like_torch(module, x, **masks)
    assert [call.name for call in recordings] == [f"layers.{layer}.self_attn" for layer in range(3)]
    attention = recordings.attention(sequence=1)
    assert attention.size == (3 if "src_key_padding_mask" in masks else LENGTH)
    assert attention.causal == ("mask" in masks)
    assert af.rollout(attention).values.shape == (3, attention.size, attention.size)


def test_the_fused_path_is_really_taken_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fused = list[bool](), torch._transformer_encoder_layer_fwd

    def counted(x: Any, *args: Any) -> Any:
        calls.append(x.is_nested)
        return fused(x, *args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    module, x = make_encoder(), torch.randn(BATCH, LENGTH, SIZE)
    with torch.no_grad():
        run_recorded(module, x)
        run_recorded(module, x, src_key_padding_mask=PADDED)
    assert calls == [False] * 3 + [True] * 3


def test_nested_rows_of_padded_queries_are_zero_and_the_longest_sequence_sets_the_length() -> None:
    module, x = make_encoder(), torch.randn(BATCH, LENGTH, SIZE)
    with torch.no_grad():
        _, recordings = run_recorded(module, x[1:], src_key_padding_mask=PADDED[1:])
    for call in recordings:
        assert call.weights.shape == (2, HEADS, 4, 4)
        assert call.padding is not None
        assert call.padding.tolist() == [[False, False, False, True], [False] * 4]
        assert not call.weights[0, :, 3].any()


def test_a_bias_in_a_float_mask_is_recorded_as_the_fused_kernel_reads_it() -> None:
    """The fused kernel hides a key wherever a float mask is not 0; the slow path adds it. Each is recorded as it was."""
    module, x, bias = (
        make_encoder(1),
        torch.randn(BATCH, LENGTH, SIZE),
        BIAS.clone().fill_diagonal_(0),
    )
    bias[:, 0] = 0
    with torch.no_grad():
        _, (fused,) = run_recorded(module, x, mask=bias)
    _, (slow,) = run_recorded(module, x, mask=bias)
    attn = module.layers[0].self_attn
    for call, mask in ((fused, bias != 0), (slow, bias)):
        _, expected = attn(x, x, x, attn_mask=mask, average_attn_weights=False)
        assert np.abs(call.weights - expected.detach().numpy()).max() < SAME
    with torch.no_grad():  # and this is what the kernel does, not our reading of it
        assert torch.allclose(module(x, mask=bias), module(x, mask=bias != 0), atol=1e-6)


@pytest.mark.parametrize("mode", ["train", "grad"])
def test_encoder_in_training_and_with_gradient(mode: str) -> None:
    module, x = (
        make_encoder(dropout=0.4 if mode == "train" else 0.0),
        torch.randn(BATCH, LENGTH, SIZE),
    )
    module.train(mode == "train")
    outputs, gradients = [], []
    for recording in (False, True):
        torch.manual_seed(3)
        module.zero_grad()
        output = (
            run_recorded(module, x, src_key_padding_mask=PADDED)[0]
            if recording
            else module(x, src_key_padding_mask=PADDED)
        )
        output.square().sum().backward()
        outputs.append(output)
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    assert_bit_identical(*outputs)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_self_and_cross(batch_first: bool, norm_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(
        SIZE, HEADS, 16, batch_first=batch_first, norm_first=norm_first
    )
    module = randomise(nn.TransformerDecoder(layer, 2))
    target, memory = torch.randn(BATCH, LENGTH, SIZE), torch.randn(BATCH, LENGTH, SIZE)
    if not batch_first:
        target, memory = target.transpose(0, 1), memory.transpose(0, 1)
    recordings = assert_like_torch(
        module, target, memory, tgt_mask=CAUSAL != 0, memory_key_padding_mask=PADDED
    )
    assert [call.name for call in recordings] == [
        f"layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn", "multihead_attn")
    ]
    assert [call.self_attention for call in recordings] == [True, False] * 2
    with pytest.raises(
        CaptureError, match=r"'layers.0.multihead_attn' is cross-attention; pick by name"
    ):
        recordings.attention()
    attention = recordings.attention(names="layers.*.self_attn")
    assert (attention.depth, attention.causal) == (2, True)


def test_transformer_parts_are_picked_by_name() -> None:
    module = randomise(nn.Transformer(SIZE, HEADS, 2, 2, 16, batch_first=True))
    source, target = torch.randn(BATCH, SOURCE, SIZE), torch.randn(BATCH, LENGTH, SIZE)
    recordings = assert_like_torch(module, source, target, tgt_mask=CAUSAL)
    assert len(recordings) == 6
    assert recordings.attention(names="encoder").size == SOURCE
    assert recordings.attention(names="decoder.layers.*.self_attn").size == LENGTH
    only_self = Recordings(call for call in recordings if call.self_attention)
    with pytest.raises(
        CaptureError, match=r"same length; got 5, 7; pick by name, as attention\(names='encoder'\)"
    ):
        only_self.attention()


class Own(nn.Module):  # type: ignore[misc, unused-ignore]
    """A user's module: calls attention in its own way, one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make_attention(heads=4)
        self.shared = make_attention(heads=4, batch_first=False)

    def forward(self, x: Any, padding: Any = None) -> Any:
        x = x + self.first(x, x, x, padding, False)[0]
        for _ in range(2):
            y = x.transpose(0, 1)
            x = x + self.shared.forward(
                y * 1.0, y * 1.0, value=y, need_weights=False, key_padding_mask=padding
            )[0].transpose(0, 1)
        return x


def test_ones_own_module() -> None:
    module, x = randomise(Own()), torch.randn(BATCH, LENGTH, SIZE)
    output, recordings = run_recorded(module, x, PADDED)
    assert_bit_identical(module(x, PADDED), output)
    assert [call.name for call in recordings] == ["first", "shared", "shared"]
    assert all(call.self_attention for call in recordings)
    _, expected = module.first(x, x, x, PADDED, average_attn_weights=False)
    assert np.abs(recordings[0].weights - expected.detach().numpy()).max() < SAME
    assert recordings.attention().depth == 3


class Shifted(nn.TransformerEncoderLayer):  # type: ignore[misc, unused-ignore]
    """A user's layer that changes its input before it hands it on."""

    def forward(self, src: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(src + 1.0, *args, **kwargs)


def test_a_layer_that_changes_its_input_first() -> None:
    module, x = (
        randomise(Shifted(SIZE, HEADS, 16, batch_first=True, norm_first=True)),
        torch.randn(BATCH, LENGTH, SIZE),
    )
    assert_like_torch(module, x)


@pytest.mark.parametrize("path", ["fused", "slow"])
@pytest.mark.parametrize("padding", [PADDED, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}], ids=str)
def test_a_padded_batch_gives_what_each_sequence_gives_alone(
    options: dict[str, Any], padding: Any, path: str
) -> None:
    module, x = make_encoder(**options), torch.randn(BATCH, LENGTH, SIZE)
    with torch.set_grad_enabled(path == "slow"):
        _, together = run_recorded(module, x, src_key_padding_mask=padding)
        for sequence in range(BATCH):
            real = ~padding[sequence]
            _, alone = run_recorded(module, x[sequence, real][None])
            tokens = [str(position) for position in range(LENGTH)]
            found, expected = together.attention(sequence, tokens=tokens), alone.attention()
            assert np.abs(found.weights - expected.weights).max() < 1e-5
            assert found.tokens == tuple(np.array(tokens)[real.numpy()])
            assert together.attention(sequence, tokens=["x"] * int(real.sum())).tokens == (
                "x",
            ) * int(real.sum())


def test_rows_of_padded_queries_without_a_key_are_set_aside() -> None:
    module, x, causal = make_attention(), torch.randn(BATCH, LENGTH, SIZE), CAUSAL != 0
    output, recordings = run_recorded(module, x, x, x, attn_mask=causal, key_padding_mask=LEFT)
    assert_bit_identical(module(x, x, x, attn_mask=causal, key_padding_mask=LEFT), output)
    assert not recordings[0].weights[1, :, :2].any()
    assert recordings.attention(sequence=1).causal
    _, alone = run_recorded(module, x[1:2, 2:], x[1:2, 2:], x[1:2, 2:], attn_mask=causal[2:, 2:])
    assert np.abs(recordings.attention(1).weights - alone.attention().weights).max() < 1e-5


def test_left_padding_under_a_causal_mask_through_a_stack() -> None:
    module, x = make_encoder(2, nested=False), torch.randn(BATCH, LENGTH, SIZE)
    _, together = run_recorded(module, x, mask=CAUSAL != 0, src_key_padding_mask=LEFT)
    for sequence in range(BATCH):
        real = ~LEFT[sequence]
        _, alone = run_recorded(module, x[sequence, real][None], mask=(CAUSAL != 0)[real][:, real])
        assert np.abs(together.attention(sequence).weights - alone.attention().weights).max() < 1e-5


def compute_output(module: Any, weights: Any, x: Any) -> Any:
    """What the module must have given if these were its weights [batch, head, query, key]."""
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[2]
    value = nn.functional.linear(x, module.in_proj_weight.chunk(3)[2], bias)
    mixed = torch.from_numpy(weights) @ value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return module.out_proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("padding", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_wrong_hint_is_recorded_as_torch_took_it(bias: bool, padding: Any, grad: bool) -> None:
    """Some paths believe the hint, others the mask: the recorded weights are those that made the output."""
    module, x = make_attention(bias=bias), torch.randn(BATCH, LENGTH, SIZE)
    with torch.set_grad_enabled(grad):
        given = {
            "attn_mask": (CAUSAL != 0).T,
            "is_causal": True,
            "key_padding_mask": None if padding is None else padding & False,
        }
        output, (call,) = run_recorded(module, x, x, x, need_weights=False, **given)
        assert torch.allclose(compute_output(module, call.weights, x), output[0], atol=1e-5)


def test_a_causal_hint_hides_the_added_keys_too() -> None:
    module, x = make_attention(add_zero_attn=True), torch.randn(BATCH, LENGTH, SIZE)
    output, (call,) = run_recorded(
        module, x, x, x, need_weights=False, attn_mask=CAUSAL, is_causal=True
    )
    assert torch.allclose(compute_output(module, call.weights, x), output[0], atol=1e-5)
    assert call.no_token_share is not None
    assert not call.no_token_share.any()


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["inference", "autocast"],
)
def test_outputs_are_bit_identical_in_other_modes(mode: Callable[[], Any]) -> None:
    module, x = make_encoder(), torch.randn(BATCH, LENGTH, SIZE)
    with mode():
        plain = module(x, src_key_padding_mask=PADDED)
        output, recordings = run_recorded(module, x, src_key_padding_mask=PADDED)
    assert_bit_identical(plain, output)
    assert recordings.attention(1).depth == 3


def test_passes_are_told_apart() -> None:
    module, x = make_encoder(), torch.randn(BATCH, LENGTH, SIZE)
    with record(module) as recordings:
        module(x)
        module(2 * x)
    assert [call.forward_pass for call in recordings] == [0] * 3 + [1] * 3
    with pytest.raises(
        CaptureError, match=r"2 forward passes; pick one, as attention\(forward_pass=1\)"
    ):
        recordings.attention()
    _, second = run_recorded(module, 2 * x, heads="mean")
    assert np.array_equal(recordings.attention(forward_pass=1).weights, second.attention().weights)


# ---- the module is left as it was found ---------------------------------------------------------------------------------------


def take_snapshot(module: nn.Module) -> Any:
    state = {
        name: (tensor.data_ptr(), tensor.clone()) for name, tensor in module.state_dict().items()
    }
    parts = [
        ({name: id(value) for name, value in vars(part).items()}, part.training)
        for part in module.modules()
    ]
    hooks = [
        len(value)
        for part in module.modules()
        for name, value in vars(part).items()
        if name.endswith("hooks")
    ]
    return state, parts, hooks, torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()


def assert_unchanged(before: Any, after: Any) -> None:
    assert before[1:] == after[1:]
    for name, (pointer, tensor) in before[0].items():
        assert after[0][name][0] == pointer
        assert torch.equal(after[0][name][1], tensor)


@pytest.mark.parametrize(
    "make",
    [
        make_encoder,
        make_attention,
        lambda: randomise(nn.Transformer(SIZE, HEADS, 1, 1, 16, batch_first=True)),
    ],
)
def test_module_is_restored_after_a_normal_end_and_after_an_error(make: Callable[[], Any]) -> None:
    module, x = make(), torch.randn(BATCH, LENGTH, SIZE)
    inputs = {nn.TransformerEncoder: 1, nn.MultiheadAttention: 3, nn.Transformer: 2}[
        type(module)
    ] * [x]
    before = take_snapshot(module)
    run_recorded(module, *inputs)
    assert_unchanged(before, take_snapshot(module))
    with pytest.raises(KeyError, match="mine"), record(module):
        raise KeyError("mine") if module(*inputs) is not None else AssertionError
    assert_unchanged(before, take_snapshot(module))
    with pytest.raises((RuntimeError, AssertionError)), record(module):
        module(*(each[..., :3] for each in inputs))
    assert_unchanged(before, take_snapshot(module))


def test_a_shadow_that_somebody_else_put_there_stays() -> None:
    module, x = make_attention(), torch.randn(BATCH, LENGTH, SIZE)
    original, seen = module.forward, list[int]()

    def shadow(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    module.forward = shadow
    with record(module) as outer, record(module, heads=None) as inner:
        module(x, x, x)
    assert module.forward is shadow
    assert (len(seen), len(outer), len(inner)) == (1, 1, 1)


# ---- several at once --------------------------------------------------------------------------


def test_threads_record_their_own_passes_and_leave_the_module_as_it_was() -> None:
    """Two threads on one module, in step as rounds begin: each gets what it gets alone."""
    module = make_encoder()
    inputs = [torch.randn(BATCH, length, SIZE) for length in (LENGTH, SOURCE)]
    with torch.no_grad():
        alone = [run_recorded(module, x) for x in inputs]
    before, start, wrong = dict(vars(module)), threading.Barrier(2), list[str]()

    def work(mine: int) -> None:
        for turn in range(50):
            start.wait(60)
            with torch.no_grad(), record(module, heads=None) as recordings:
                for _ in range(turn % 3 + 1):
                    output = module(inputs[mine])
            expected = [call.weights for call in alone[mine][1]] * (turn % 3 + 1)
            same = [
                np.array_equal(*pair)
                for pair in zip(expected, list_weights(recordings), strict=False)
            ]
            if len(recordings) != len(expected) or not all(same):
                wrong.append(f"thread {mine}, round {turn}: {len(recordings)} calls, {same}")
            if not torch.equal(output, alone[mine][0]):
                wrong.append(f"thread {mine}, round {turn}: another output")

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, mine) for mine in range(2)]:
            done.result(120)
    assert wrong == []
    assert vars(module) == before
    assert not any({"forward", "merge_masks"} & set(vars(part)) for part in module.modules())


def list_weights(recordings: Recordings) -> list[Any]:
    return [call.weights for call in recordings]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [False, True])
def test_blocks_that_overlap_may_close_in_any_order(order: tuple[int, ...], failing: bool) -> None:
    """Two blocks on the module, one on a part of it; each hears all passes until it closes."""
    module, x = make_encoder(2), torch.randn(BATCH, LENGTH, SIZE)
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    blocks = [ExitStack(), ExitStack(), ExitStack()]
    heard = [
        block.enter_context(record(part, heads=None))
        for block, part in zip(blocks, [module, module.layers[1], module], strict=True)
    ]
    calls = [0, 0, 0]
    for closing in order:
        module(x)
        for place in order[order.index(closing) :]:
            calls[place] += 1 if place == 1 else 2
        if failing:
            with pytest.raises(KeyError, match="mine"), blocks[closing]:
                raise KeyError("mine")
        else:
            blocks[closing].close()
    module(x)
    assert [len(each) for each in heard] == calls
    assert [each.passes for each in heard] == [calls[0] // 2, calls[1], calls[2] // 2]
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == before


def test_a_block_hears_its_own_thread_alone() -> None:
    module, x = make_encoder(1), torch.randn(BATCH, LENGTH, SIZE)
    with (
        pytest.raises(CaptureError, match=r"inside the with-block, in the same thread"),
        record(module),
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(module, x).result(60)


# ---- what is refused ----------------------------------------------------------------------------------------------------------


def test_errors_of_what_is_recorded() -> None:
    with (
        pytest.raises(CaptureError, match=r"this Linear has none; use af.capture"),
        record(nn.Linear(2, 2)),
    ):
        pass
    with (
        pytest.raises(CaptureError, match=r"no attention was recorded; run the forward pass"),
        record(make_attention()),
    ):
        pass
    with pytest.raises(af.OptionError, match=r"takes a torch.nn.Module; got int"), record(3):
        pass
    with (
        pytest.raises(
            af.OptionError, match=r"unknown heads 'median'; choose from mean, max, min, or None"
        ),
        record(make_encoder(), heads="median"),
    ):
        pass


class Mine(nn.MultiheadAttention):  # type: ignore[misc, unused-ignore]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_attention_with_a_forward_of_its_own_is_refused_and_left_alone() -> None:
    module = nn.Sequential(make_attention(), Mine(SIZE, HEADS))
    before = take_snapshot(module)
    with (
        pytest.raises(CaptureError, match=r"'1' is a Mine that overrides forward"),
        record(module),
    ):
        pass
    assert_unchanged(before, take_snapshot(module))


def test_a_fused_layer_around_what_is_recorded_is_refused() -> None:
    module, x = make_encoder(1), torch.randn(BATCH, LENGTH, SIZE)
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match=r"record the one layer around it"),
        record(module.layers[0].self_attn),
    ):
        module(x)


def test_a_query_without_a_key_is_named() -> None:
    module, x = make_attention(), torch.randn(BATCH, LENGTH, SIZE)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[3] = True
    with pytest.raises(
        CaptureError, match=r"'the module', call 0: query 3 of sequence 0 sees no key"
    ):
        run_recorded(module, x, x, x, attn_mask=mask)
    padding = PADDED.clone()
    padding[2] = True
    with pytest.raises(CaptureError, match=r"query 0 of sequence 2 sees no key"):
        run_recorded(module, x, torch.randn(BATCH, LENGTH, SIZE), x, key_padding_mask=padding)
    with pytest.raises(
        CaptureError,
        match=r"query 1 of sequence 0: weights must sum to 1 within 0.0001; got nan; look for NaN",
    ):
        run_recorded(module, x.index_fill(1, torch.tensor(1), torch.nan), x, x)


def test_errors_of_attention() -> None:
    module, x = make_encoder(), torch.randn(BATCH, LENGTH, SIZE)
    padding = PADDED.clone()
    padding[2] = True
    _, recordings = run_recorded(module, x, src_key_padding_mask=padding)
    with pytest.raises(
        CaptureError,
        match=r"starts with 'decoder'; recorded: layers.0.self_attn, layers.1.self_attn, layers.2.self_attn",
    ):
        recordings.attention(names="decoder")
    with pytest.raises(CaptureError, match=r"starts with '' in forward pass 4"):
        recordings.attention(forward_pass=4)
    with pytest.raises(
        af.OptionError, match=r"sequence must be from 0 to 2, its place in the batch; got 3"
    ):
        recordings.attention(sequence=3)
    with pytest.raises(CaptureError, match=r"sequence 2 is padding only"):
        recordings.attention(sequence=2)
    with pytest.raises(
        af.WeightsError, match=r"tokens must be one name per position, here 3; got 2"
    ):
        recordings.attention(sequence=1, tokens=["a", "b"])


def test_torch_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with (
        pytest.raises(af.MissingExtraError, match=r"pip install 'attnflow\[models\]'"),
        record(None),
    ):
        pass
