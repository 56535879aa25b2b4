"""`capture`: a model and an input in, `Attention` out, in memory that does not grow with the number of heads.

The model runs as it is, with the attention implementation that it has (SDPA, its own eager): transformers asks
`AttentionInterface.get_interface` for the function that attends, and while a capture runs, that function is wrapped. The wrapper calls
it, passes its output on untouched, and computes the weights beside it from the same queries, keys and mask, block by block, fusing
heads at once. Families that do not ask (DeBERTa, BLOOM, MPNet) are eager anyway, and give their weights with `output_attentions`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.attention import Attention
from attnflow.errors import CaptureError, OptionError, WeightsError
from attnflow.models import BATCH_TOKENS, Encoded, Model, are_many, batches, evaluating

if TYPE_CHECKING:
    import torch

BLOCK = (
    2**20
)  # numbers in one block of weights [sequence, head, query, key], at most, if one query's row is not larger
HEADS = ("mean", "max", "min", None)


@dataclass(frozen=True)
class Call:
    """One layer's attention as it was called: fused weights [sequence, head, query, key], on the CPU."""

    name: str  # of the module, within its model
    weights: npt.NDArray[np.float32]  # [sequence, head (1 if fused), query, key]
    sink: "torch.Tensor | None"  # [sequence, query]: the share of attention that goes to no token
    window: int | None  # a query sees keys less than so many positions away


def capture(
    model: Any,
    inputs: Any,
    *,
    heads: str | None = "mean",
    truncation: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> Any:
    """The attention of a model on one input (a text, token ids, an image), or a list of them on a list of inputs.

    heads: "mean", "max" or "min" fuse while capturing, so that one matrix a layer is kept; None keeps every head. Padding never enters.
    For an encoder-decoder, an input may be a pair (source, target), and positions are those of the encoder, then of the decoder.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
    >>> capture(model, [[101, 7592, 102], [101, 102]], heads=None)
    [<Attention: 2 layers, 2 heads, 3 positions>, <Attention: 2 layers, 2 heads, 2 positions>]
    """
    model = model if isinstance(model, Model) else Model(model)
    if heads not in HEADS:
        raise OptionError(
            f"unknown heads {heads!r}; choose from 'mean', 'max', 'min' or None, which keeps every head"
        )
    many = are_many(inputs)
    encoded = [model.encode(each, truncation=truncation) for each in (inputs if many else [inputs])]
    found: dict[int, Attention] = {}
    for batch in batches(
        encoded, min(batch_tokens, model.batch_tokens) if model.batch_tokens == 1 else batch_tokens
    ):
        attentions = capture_batch(model, [encoded[place] for place in batch], heads)
        found |= dict(zip(batch, attentions, strict=True))
    return [found[place] for place in range(len(encoded))] if many else found[0]


def capture_batch(model: Model, inputs: Sequence[Encoded], heads: str | None) -> list[Attention]:
    """Run the model once on a batch, and cut each input's attention out of what was heard."""
    import torch

    arguments: dict[str, Any] = dict(model.batch(inputs))
    if "use_cache" in signature(model.model.forward).parameters:
        arguments["use_cache"] = False  # nothing follows, so keys and values need not be kept
    calls: list[Call] = []
    with evaluating(model.model), torch.no_grad():
        if hasattr(
            model.model, "set_attn_implementation"
        ):  # a model of transformers, and so perhaps one that asks the interface
            with listening(model.model, heads) as calls:
                model.model(**arguments)
        if not calls:
            calls = eager_calls(model, arguments, heads)
    if not calls:
        raise CaptureError(
            f"{model.name} made no attention that could be captured: it has no attention layers, or hides them"
        )
    assemble = encoder_decoder if model.is_encoder_decoder else one_stack
    return [assemble(model, encoded, calls, place, heads) for place, encoded in enumerate(inputs)]


# ---- listening to the attention interface ---------------------------------------------------------------------------------------

Listener = Callable[..., Any]
listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
patching = threading.RLock()
patched = 0  # captures under way, in all threads


class Layers:
    """Places for the weights of one layer after another, in one array for all layers as long as they have the same shape."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.used = 0
        self.array: npt.NDArray[np.float32] = np.empty((0,), np.float32)

    def next(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """An uninitialised array of this shape."""
        if self.used == len(self.array) or self.array.shape[1:] != shape:
            self.array, self.used = np.empty((self.depth, *shape), np.float32), 0
        self.used += 1
        layer: npt.NDArray[np.float32] = self.array[self.used - 1]
        return layer


@contextmanager
def listening(model: Any, heads: str | None) -> Iterator[list[Call]]:
    """A list that fills with one Call for each attention that the model computes in this thread, in their order."""
    import torch

    names = {module: name for name, module in model.named_modules()}
    calls: list[Call] = []
    layers = Layers(getattr(model.config, "num_hidden_layers", 1))

    def listen(
        attend: Any,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        output = attend(module, query, key, value, mask, *rest, **options)
        if module in names:
            weights = layers.next(
                (
                    query.shape[0],
                    query.shape[1] if heads is None else 1,
                    query.shape[2],
                    key.shape[2],
                )
            )
            sink = attention_weights(
                module, query, key, mask, heads, options, torch.from_numpy(weights)
            )
            calls.append(Call(names[module], weights, sink, options.get("sliding_window")))
        return output

    with interface_patched():
        token = listener.set(listen)
        try:
            yield calls
        finally:
            listener.reset(token)


@contextmanager
def interface_patched() -> Iterator[None]:
    """While this lasts, every function that transformers' AttentionInterface gives out passes by the thread's listener."""
    global patched
    from functools import partial

    from transformers import AttentionInterface

    with patching:
        patched += 1
        if patched == 1:
            original = AttentionInterface.get_interface

            def get_interface(self: Any, name: Any, default: Any) -> Any:
                attend = original(self, name, default)
                listen = listener.get()
                return attend if listen is None else partial(listen, attend)

            get_interface.original = original  # type: ignore[attr-defined]
            AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        with patching:
            patched -= 1
            if patched == 0:
                AttentionInterface.get_interface = AttentionInterface.get_interface.original


def attention_weights(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    mask: "torch.Tensor | None",
    heads: str | None,
    options: dict[str, Any],
    weights: "torch.Tensor",
) -> "torch.Tensor | None":
    """Set weights [sequence, head or 1, query, key] to those that attention has, from what the interface was given.

    query: [sequence, head, query, width]; key likewise, where several heads may share one. Returns the share of a sink logit [sequence,
    query], if there is one.
    """
    import torch

    sequences, count, queries, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    scaling = options.get("scaling")
    scaling = width**-0.5 if scaling is None else scaling
    softcap, bias, sinks = (
        options.get("softcap"),
        options.get("position_bias"),
        options.get("s_aux"),
    )
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    hides_future = mask is None and bool(is_causal) and queries > 1
    sink = None if sinks is None else torch.empty(sequences, queries)
    across = key.float().transpose(2, 3)  # [sequence, group, width, key]
    step = max(1, BLOCK // (sequences * count * keys))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        seen = (
            min(keys, rows.stop) if hides_future else keys
        )  # no query of this block sees a later key
        block = (query[:, :, rows].float() * scaling).reshape(
            sequences, groups, -1, width
        )  # a group's heads below each other
        logits = (block @ across[..., :seen]).view(
            sequences, count, rows.stop - start, seen
        )  # [sequence, head, query, key]
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            logits += bias[:, :, rows, :seen].float()
        if mask is not None:
            part = mask[:, :, rows if mask.shape[2] > 1 else slice(None), :seen]
            logits = (
                logits.masked_fill_(~part, float("-inf"))
                if part.dtype == torch.bool
                else logits.add_(part.float())
            )
        if hides_future:
            future = torch.ones(
                rows.stop - start, seen - start, dtype=torch.bool, device=logits.device
            ).triu_(1)
            logits[..., start:].masked_fill_(future, float("-inf"))
            weights[:, :, rows, seen:] = 0.0
        if sinks is not None:
            extra = sinks.float().reshape(1, -1, 1, 1).expand(sequences, -1, logits.shape[2], 1)
            shares = torch.cat([logits, extra], dim=-1).softmax(dim=-1)[..., -1]
            sink[:, rows] = shares.mean(dim=1).cpu()  # type: ignore[index]
        weights[:, :, rows, :seen] = fuse(torch.softmax(logits, dim=-1, out=logits), heads)
    return sink


def fuse(weights: "torch.Tensor", heads: str | None) -> "torch.Tensor":
    """Weights [sequence, head, query, key] with heads fused to one, rows summing to 1 again; all heads if None."""
    if heads is None:
        return weights
    if heads == "mean":
        return weights.mean(dim=1, keepdim=True)
    fused = (weights.amax if heads == "max" else weights.amin)(dim=1, keepdim=True)
    sums = fused.sum(dim=-1, keepdim=True)
    return fused / sums.where(sums > 0, 1.0)


def eager_calls(model: Model, arguments: dict[str, Any], heads: str | None) -> list[Call]:
    """The calls of a model outside the interface, from the weights that it returns itself."""
    layers = getattr(model.model(**arguments, output_attentions=True), "attentions", None) or ()
    return [
        Call(f"layer {number}", fuse(layer.float(), heads).cpu().numpy(), None, None)
        for number, layer in enumerate(layers, start=1)
        if layer is not None
    ]


# ---- from calls to Attention ----------------------------------------------------------------------------------------------------


def one_stack(
    model: Model, encoded: Encoded, calls: Sequence[Call], place: int, heads: str | None
) -> Attention:
    """The attention of an encoder, a decoder or a vision model: one call a layer."""
    size = len(encoded.tokens)
    check_layers(model, calls, getattr(model.model.config, "num_hidden_layers", len(calls)))
    for number, call in enumerate(calls, start=1):
        if min(call.weights.shape[2:]) < size or (
            model.is_vision and call.weights.shape[2] != size
        ):
            raise CaptureError(
                f"layer {number} of {model.name} attends over {call.weights.shape[2]} positions; its input has {size}"
            )
    weights = stacked(calls, place, size, heads)
    sinks = [call.sink for call in calls]
    sink = None
    if any(each is not None for each in sinks):
        sink = np.stack(
            [np.zeros(size) if each is None else each[place, :size].numpy() for each in sinks]
        )
    windows = [
        call.window if call.window is not None and call.window < size else None for call in calls
    ]
    # a language model that predicts the next token must not have seen it: then a mask went missing, and that is an error
    causal = (
        True
        if model.task == "causal LM"
        and size > 1
        and not getattr(model.model.config, "use_bidirectional_attention", False)
        else None
    )
    names = {"tokens": encoded.tokens, "words": encoded.words, "grid": encoded.grid}
    return checked(model, weights, causal=causal, window=windows, sink=sink, fused=heads, **names)


def stacked(
    calls: Sequence[Call], place: int, size: int, heads: str | None
) -> npt.NDArray[np.float32]:
    """[layer, head, query, key] of one input: the array that the calls were written to, where it holds nothing else."""
    first = calls[0].weights
    if (
        first.base is not None
        and first.base.shape == (len(calls), 1, first.shape[1], size, size)
        and heads != "min"
    ):
        whole: npt.NDArray[np.float32] = first.base[:, 0]
        return whole
    return np.stack([repaired(call.weights[place, :, :size, :size], heads) for call in calls])


def encoder_decoder(
    model: Model, encoded: Encoded, calls: Sequence[Call], place: int, heads: str | None
) -> Attention:
    """One graph over encoder and decoder positions: what a layer does not touch passes by the identity.

    An encoder layer mixes encoder positions; a decoder layer is two graph layers, self-attention and then attention to the encoder.
    """
    source, target = len(encoded.ids), len(encoded.decoder_ids)
    above, below = slice(source, source + target), slice(0, source)
    layers, names, counts = [], [], {"encoder": 0, "decoder": 0, "cross": 0}
    for call in calls:
        part = part_of(call.name)
        counts[part] += 1
        rows, columns = {
            "encoder": (below, below),
            "decoder": (above, above),
            "cross": (above, below),
        }[part]
        matrix = np.broadcast_to(
            np.eye(source + target, dtype=np.float32),
            (call.weights.shape[1], source + target, source + target),
        ).copy()
        matrix[:, rows] = 0.0
        height, width = rows.stop - rows.start, columns.stop - columns.start
        matrix[:, rows, columns] = repaired(call.weights[place, :, :height, :width], heads)
        layers.append(matrix)
        names.append(
            f"{part} {counts[part]}"
            if part == "encoder"
            else f"decoder {counts[part]} {'self' if part == 'decoder' else 'cross'}"
        )
    if counts["decoder"] != counts["cross"] or not counts["encoder"]:
        raise CaptureError(
            f"{model.name} made {counts} attention calls: encoder, and decoder with cross-attention, were expected"
        )
    order = sorted(
        range(len(layers)), key=lambda index: not names[index].startswith("encoder")
    )  # stable: the encoder runs first
    return checked(
        model,
        np.stack([layers[index] for index in order]),
        tokens=(*encoded.tokens, *encoded.decoder_tokens),
        fused=heads,
        causal=False,
        layer_names=[names[index] for index in order],
    )


def part_of(name: str) -> str:
    """The part of an encoder-decoder that a module belongs to, by its name."""
    if any(
        word in name for word in ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn")
    ):
        return "cross"
    return "decoder" if "decoder" in name else "encoder"


def repaired(weights: npt.NDArray[np.float32], heads: str | None) -> npt.NDArray[np.float32]:
    """[head, query, key] where a row that fusion by minimum left empty looks at itself."""
    if heads != "min":
        return weights
    empty = weights.sum(axis=-1, keepdims=True) == 0
    return np.where(empty, np.eye(weights.shape[-2], weights.shape[-1], dtype=np.float32), weights)


def check_layers(model: Model, calls: Sequence[Call], expected: int) -> None:
    if len(calls) != expected:
        raise CaptureError(
            f"{model.name} has {expected} layers, but {len(calls)} attention calls were heard: capture would be wrong"
        )


def checked(model: Model, weights: npt.NDArray[np.float32], **options: Any) -> Attention:
    """The Attention, or an error that says whose layer did not come out as attention."""
    try:
        return Attention(weights, copy=False, **options)
    except WeightsError as error:
        raise CaptureError(
            f"the captured weights of {model.name} are not attention: {error}"
        ) from error
