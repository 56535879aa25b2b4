"""Listening to a model's attention: what each call mixed, beside the model's own computation.

The model runs as it is, with the attention implementation that it has (SDPA, its own eager):
transformers asks `AttentionInterface.get_interface` for the function that attends, and while
somebody listens, that function is wrapped. The wrapper calls it, passes its output on untouched, and
computes the weights beside it from the same queries, keys and mask, block by block, fusing heads at
once. Families that do not ask (DeBERTa, BLOOM, MPNet) are eager anyway, and give their weights with
`output_attentions`.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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
