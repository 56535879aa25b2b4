"""Listening to a model's attention: what each call mixed, beside the model's own computation.

The model runs as it is, with the attention implementation that it has (SDPA, its own eager):
transformers asks `AttentionInterface.get_interface` for the function that attends, and while
somebody listens, that function is wrapped. The wrapper calls it, passes its output on untouched, and
computes the weights beside it from the same queries, keys and mask, block by block, fusing heads at
once. Families that do not ask (DeBERTa, BLOOM, MPNet) are eager anyway, and give their weights with
`output_attentions`.

`probe` asks a model once what it is made of: is it causal, and does anything but this attention
carry information from one position to another?
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.errors import CaptureError
from attnflow.models.families import (
    CAUSAL,
    NO_TOKEN_SCORE,
    SCALING,
    SCORE_BIAS,
    SOFTCAP,
    WINDOW,
)

if TYPE_CHECKING:
    import torch

# numbers in one block of weights [sequence, head, query, key], at most, if one query's row is not
# larger
BLOCK = 2**20
ROUNDED = 1e-2  # how far from 1 a row of 16-bit weights may sum
CHANGED = 1e-3  # a state that moves by this share of its largest number depends on what was changed
AT_ALL = 1e-5  # ... and by this share, if it is to depend on it at all


@dataclass(frozen=True)
class Call:
    """One layer's attention as it was called: fused weights [sequence, head, query, key], on the CPU."""

    name: str  # of the module, within its model
    weights: npt.NDArray[np.float32]  # [sequence, head (1 if fused), query, key]
    sink: "torch.Tensor | None"  # [sequence, query]: the share of attention that goes to no token
    window: int | None  # a query sees keys less than so many positions away


@dataclass(frozen=True)
class Attend:
    """The function that a model attends by."""

    function: Callable[..., Any]
    hides_future: bool  # without a mask, in modules that are causal; a model's own eager does not


Listener = Callable[..., Any]
listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
patching = threading.RLock()
patched = 0  # captures under way, in all threads


class Layers:
    """Places for the weights of one layer after another, in one array while their shapes agree."""

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
def listening(model: Any, heads: str | None, depth: int = 1) -> Iterator[list[Call]]:
    """A list that fills with one Call for each attention that the model computes in this thread.

    depth: how many layers are expected, so that their weights share one array.
    """
    import torch

    names = {module: name for name, module in model.named_modules()}
    calls: list[Call] = []
    layers = Layers(depth)

    def listen(
        attend: Attend,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        output = attend.function(module, query, key, value, attention_mask, *rest, **options)
        if module in names:
            count = query.shape[1] if heads is None else 1
            weights = layers.next((query.shape[0], count, query.shape[2], key.shape[2]))
            # autocast would round the logits to 16 bits, and rows would not sum to 1
            with torch.autocast(query.device.type, enabled=False):
                sink = compute_weights(
                    module,
                    query,
                    key,
                    attention_mask,
                    heads,
                    options | {"hides_future": attend.hides_future},
                    torch.from_numpy(weights),
                )
            calls.append(Call(names[module], weights, sink, options.get(WINDOW)))
        return output

    with intercepting(listen):
        yield calls


@contextmanager
def intercepting(listen: Listener) -> Iterator[None]:
    """While this lasts, attention in this thread goes through `listen(attend, module, ...)`."""
    with interface_patched():
        token = listener.set(listen)
        try:
            yield
        finally:
            listener.reset(token)


@contextmanager
def interface_patched() -> Iterator[None]:
    """While this lasts, what transformers' AttentionInterface gives out passes by the listener."""
    global patched
    if "transformers" not in sys.modules:  # then nobody asks it
        yield
        return
    from transformers import AttentionInterface

    with patching:
        patched += 1
        if patched == 1:
            original = AttentionInterface.get_interface

            def get_interface(self: Any, name: Any, default: Any) -> Any:
                attend = original(self, name, default)
                listen = listener.get()
                if listen is None:
                    return attend
                return partial(listen, Attend(attend, hides_future=attend is not default))

            get_interface.original = original  # type: ignore[attr-defined]
            AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        with patching:
            patched -= 1
            if patched == 0:
                AttentionInterface.get_interface = AttentionInterface.get_interface.original


def compute_weights(
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
    scaling = options.get(SCALING)
    scaling = width**-0.5 if scaling is None else scaling
    softcap, bias, sinks = (
        options.get(SOFTCAP),
        options.get(SCORE_BIAS),
        options.get(NO_TOKEN_SCORE),
    )
    is_causal = options.get(CAUSAL)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    may_hide = mask is None and options.get("hides_future", True)
    hides_future = may_hide and bool(is_causal) and queries > 1
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


def eager_calls(model: Any, arguments: dict[str, Any], heads: str | None) -> tuple[list[Call], Any]:
    """The calls of a model outside the interface, from the weights that it returns; its output."""
    try:
        output = model(**arguments, output_attentions=True)
    except (TypeError, IndexError, AttributeError, NotImplementedError):
        return [], None  # it knows no such option, or promises weights that it does not have
    layers = getattr(output, "attentions", None) or ()
    found = [layer for layer in layers if getattr(layer, "ndim", 0) == 4]
    return [
        Call(f"layer {number}", fuse(restore_rows(layer), heads).cpu().numpy(), None, None)
        for number, layer in enumerate(found, start=1)
    ], output


def restore_rows(layer: "torch.Tensor") -> "torch.Tensor":
    """Weights as float32; rows that 16 bits rounded sum to 1 again."""
    weights = layer.float()
    if layer.element_size() > 2:
        return weights
    sums = weights.sum(dim=-1, keepdim=True)
    return weights / sums.where((sums - 1).abs() < ROUNDED, 1.0)


# ---- what a model is made of --------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """What a model is made of, as two short inputs showed."""

    interface: bool  # it asks transformers' attention interface
    causal: bool  # no query sees a later key
    mixer: str | None  # what else carries information between positions, by name and class


# Two inputs that differ in one position run side by side, while attention lets every position
# look at itself alone (and at nothing in another sequence). Then no state of another position can
# differ, unless something that is no attention carried it there: a state space, a recurrence, a
# convolution, attention that does not ask the interface. The first module whose output differs is it.
def probe(model: Any, arguments: dict[str, Any], changed: dict[int, int]) -> Probe:
    """What a model does with the arguments of two inputs that differ in one position.

    changed: that position, by the length of the sequence.
    """
    import torch

    causal: list[bool] = []
    differing: list[str] = []
    thread = threading.get_ident()

    def look_at_itself(
        attend: Attend,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        weights = torch.empty(shape)
        facts = options | {"hides_future": attend.hides_future}
        with torch.autocast(query.device.type, enabled=False):
            compute_weights(module, query, key, attention_mask, None, facts, weights)
        if query.shape[2] != key.shape[2]:  # attention to another sequence
            nothing = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
            return value.new_zeros(nothing), None
        causal.append(not weights.triu(1).any())
        own = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return own.transpose(1, 2).contiguous(), None

    def watch(name: str, module: Any) -> Callable[..., None]:
        def note(_: Any, given: Any, output: Any) -> None:
            if threading.get_ident() != thread or not is_different(output, changed):
                return
            if not any(is_different(each, changed) for each in given):
                differing.append(
                    f"{name} ({type(module).__name__})" if name else type(module).__name__
                )

        return note

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(watch(name, module)).remove)
        with intercepting(look_at_itself):
            try:
                model(**arguments)
            except Exception:
                if not differing:  # else what is wanted is known already
                    raise
    if causal:
        return Probe(True, all(causal), differing[0] if differing else None)
    with torch.no_grad():
        calls, _ = eager_calls(model, arguments, None)
        own = [call for call in calls if call.weights.shape[2] == call.weights.shape[3]]
        blind = bool(own) and all(not np.triu(call.weights, 1).any() for call in own)
        if own and "input_ids" in arguments and blind != is_blind_ahead(model, arguments):
            raise CaptureError(
                f"{type(model).__name__} gives other weights than it attends by;"
                " load it with attn_implementation='eager'"
            )
    if len(changed) > 1:  # an encoder-decoder with attention of its own, which is not captured
        return Probe(False, False, None)
    return Probe(False, blind, next(own_mixers(model) if own else iter(differing), None))


def is_blind_ahead(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether what stands last changes no state before it: asked of the model's own states."""
    ids = arguments["input_ids"].clone()
    other = next(each for each in ids.unique().tolist() if each != int(ids[0, -1]))
    ids[1] = ids[0]
    ids[1, -1] = other  # two inputs that differ in their last token
    changed, seen = {ids.shape[1]: ids.shape[1] - 1}, []
    thread = threading.get_ident()

    def note(_: Any, given: Any, output: Any) -> None:
        if threading.get_ident() == thread and is_different(output, changed, AT_ALL):
            seen.append(True)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(note).remove)
        model(**arguments | {"input_ids": ids})
    return not seen


def is_different(output: Any, changed: dict[int, int], share: float = CHANGED) -> bool:
    """Whether states [two inputs, position, width] differ beside the position that was changed."""
    import torch

    output = getattr(output, "last_hidden_state", output)
    while isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return False
    if output.ndim != 3 or len(output) != 2 or output.shape[1] not in changed:
        return False
    distance = (output[0] - output[1]).float().abs()
    distance[changed[output.shape[1]]] = 0.0
    return bool(distance.max() > share * output.float().abs().max().clamp(min=1e-30))


def own_mixers(model: Any) -> Iterator[str]:
    """Modules that mix positions by their kind: what can be said of a model whose attention is its own."""
    import torch

    for name, module in model.named_modules():
        recurrent = isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase)
        kernel, stride = (getattr(module, what, None) for what in ("kernel_size", "stride"))
        # a convolution that steps as far as it is wide cuts patches, and mixes nothing beyond them
        overlaps = isinstance(kernel, tuple) and kernel != stride and set(kernel) != {1}
        if recurrent or overlaps:
            yield f"{name} ({type(module).__name__})"
