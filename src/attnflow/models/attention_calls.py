"""The attention calls of a model: intercepted, and recorded beside its own computation.

The model runs with the attention implementation that it has (SDPA, its own eager). transformers
gets the function that attends from `AttentionInterface.get_interface`; while calls are intercepted,
that function is wrapped. The wrapper calls it, returns its output untouched, and computes the
weights from the same queries, keys and mask, block by block, fusing heads at once. Families outside
this interface (DeBERTa, BLOOM, MPNet) are eager anyway, and return their weights with
`output_attentions`.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import ROW_TOLERANCE
from attnflow.core.memory import find_available_memory, format_gigabytes
from attnflow.models.attention_weights import Scoring, compute_weights, fuse
from attnflow.models.families import WINDOW

if TYPE_CHECKING:
    import torch
    import transformers


@dataclass(frozen=True)
class LayerWeights:
    """The attention weights of one layer as they were recorded, on the CPU."""

    name: str  # of the module, within its model
    weights: npt.NDArray[np.float32]  # [sequence, head (1 if fused), query, key]
    no_token_share: "torch.Tensor | None"  # [sequence, query], mean over heads
    window: int | None  # a query sees keys less than this many positions away


# [sequence, query, head, width], and [sequence, head, query, key] where weights are returned
AttentionOutput: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


@dataclass(frozen=True)
class AttentionFunction:
    """The function that computes a model's attention."""

    compute: "Callable[..., AttentionOutput]"
    hides_future: bool  # without a mask, in causal modules; a model's eager function does not
    returns_weights: bool = False  # those that it attended by, of every head


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention as a model made it, and its output."""

    name: str  # of the module, within its model
    module: "torch.nn.Module"
    function: AttentionFunction
    query: "torch.Tensor"  # [sequence, head, query, width]
    key: "torch.Tensor"  # [sequence, group of heads, key, width]
    value: "torch.Tensor"  # likewise
    mask: "torch.Tensor | None"
    options: dict[str, Any]  # what the family passed besides
    output: AttentionOutput

    @property
    def window(self) -> int | None:
        """A query sees keys less than this many positions away."""
        return self.options.get(WINDOW)

    @property
    def returned_weights(self) -> "torch.Tensor | None":
        """[sequence, head, query, key]: the weights that were returned with the output, if any."""
        weights = self.output[1] if self.function.returns_weights else None
        return None if weights is None else restore_rows(weights.detach())

    @property
    def scoring(self) -> Scoring:
        """How its queries and keys are scored."""
        given = (self.module, self.query, self.key, self.mask, self.options)
        return Scoring.read(*given, hides_future=self.function.hides_future)

    def shape(self, heads: str | None) -> tuple[int, int, int, int]:
        """[sequence, head (1 if fused), query, key]: of its weights."""
        count = self.query.shape[1] if heads is None else 1
        return (self.query.shape[0], count, self.query.shape[2], self.key.shape[2])

    def weigh(self, heads: str | None, weights: "torch.Tensor") -> "torch.Tensor | None":
        """Compute weights of this shape, in place; returns the share of no token, if any."""
        import torch

        given = self.returned_weights
        if given is not None:
            weights.copy_(fuse(given, heads))
            return None
        # autocast would round the logits to 16 bits, and rows would not sum to 1
        with torch.no_grad(), torch.autocast(self.query.device.type, enabled=False):
            return compute_weights(self.scoring, heads, weights)


LITTLE_MEMORY = 2**28  # bytes that are allocated without measuring how much memory is left
# called with an AttentionFunction and the arguments that a model passes to it
Interceptor: TypeAlias = Callable[..., AttentionOutput]
interceptor: ContextVar[Interceptor | None] = ContextVar("interceptor", default=None)
interface_lock = threading.RLock()
interceptions = 0  # interceptions under way, in all threads


class LayerBuffer:
    """Buffers for the weights of successive layers, in one array while their shapes agree."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.used = 0
        self.array: npt.NDArray[np.float32] = np.empty((0,), np.float32)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """An uninitialised array of this shape."""
        if self.used == len(self.array) or self.array.shape[1:] != shape:
            check_weights_fit(self.depth, shape)
            self.array, self.used = np.empty((self.depth, *shape), np.float32), 0
        self.used += 1
        layer: npt.NDArray[np.float32] = self.array[self.used - 1]
        return layer


def check_weights_fit(depth: int, shape: tuple[int, ...]) -> None:
    """Refuse weights that exceed the memory: the system would kill the process."""
    needed = 4 * depth * math.prod(shape)
    available = find_available_memory() if needed > LITTLE_MEMORY else None
    if available is not None and needed > available:
        raise MemoryError(
            f"attention over {shape[-1]} positions in {depth} layers takes"
            f" {format_gigabytes(needed)}, and {format_gigabytes(available)} are available;"
            " rollout_rows and rollout_segments build no such matrices"
        )


@contextmanager
def record_weights(
    model: "torch.nn.Module", heads: str | None, depth: int = 1
) -> Iterator[list[LayerWeights]]:
    """A list that fills with the weights of each attention call of the model in this thread.

    depth: how many layers are expected, so that their weights share one array.
    """
    import torch

    recorded: list[LayerWeights] = []
    buffer = LayerBuffer(depth)

    def take(call: AttentionCall) -> None:
        weights = buffer.take(call.shape(heads))
        share = call.weigh(heads, torch.from_numpy(weights))
        recorded.append(LayerWeights(call.name, weights, share, call.window))

    with observe_calls(model, take):
        yield recorded


@contextmanager
def observe_calls(
    model: "torch.nn.Module", take: Callable[[AttentionCall], None]
) -> Iterator[None]:
    """While this lasts, call `take` after each attention call of the model in this thread.

    The model's own computation is untouched.
    """
    names = {module: name for name, module in model.named_modules()}

    def attend(
        function: AttentionFunction,
        module: "torch.nn.Module",
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        attention_mask: "torch.Tensor | None" = None,
        *rest: object,
        **options: Any,
    ) -> AttentionOutput:
        output = function.compute(module, query, key, value, attention_mask, *rest, **options)
        if module in names:
            given = (query, key, value, attention_mask, options, output)
            take(AttentionCall(names[module], module, function, *given))
        return output

    with intercept_attention(attend):
        yield


@contextmanager
def intercept_attention(attend: Interceptor) -> Iterator[None]:
    """While this lasts, attention in this thread is `attend(function, module, ...)`."""
    with patch_interface():
        token = interceptor.set(attend)
        try:
            yield
        finally:
            interceptor.reset(token)


@contextmanager
def patch_interface() -> Iterator[None]:
    """While this lasts, the functions of transformers' AttentionInterface can be intercepted."""
    global interceptions
    if "transformers" not in sys.modules:  # then there is nothing to patch
        yield
        return
    from transformers import AttentionInterface

    with interface_lock:
        interceptions += 1
        if interceptions == 1:
            original = AttentionInterface.get_interface

            def get_interface(
                self: AttentionInterface, name: str | None, default: Callable[..., AttentionOutput]
            ) -> Callable[..., AttentionOutput]:
                compute: Callable[..., AttentionOutput] = original(self, name, default)
                attend = interceptor.get()
                if attend is None:
                    return compute
                hides_future = compute is not default
                return partial(attend, AttentionFunction(compute, hides_future=hides_future))

            get_interface.original = original  # type: ignore[attr-defined]
            AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        with interface_lock:
            interceptions -= 1
            if interceptions == 0:
                AttentionInterface.get_interface = AttentionInterface.get_interface.original


def find_attention_function(
    compute: Callable[..., AttentionOutput],
) -> Callable[..., AttentionOutput]:
    """The function that computes attention, through the interceptor if one is active.

    For modules of this package, which call it as transformers calls its attention functions.
    """
    attend = interceptor.get()
    if attend is None:
        return compute
    return partial(attend, AttentionFunction(compute, hides_future=False, returns_weights=True))


def collect_eager_calls(
    model: "torch.nn.Module", arguments: "Mapping[str, torch.Tensor]", heads: str | None
) -> "tuple[list[LayerWeights], transformers.utils.ModelOutput | None]":
    """The weights that a model outside the interface returns, per layer; and its output."""
    try:
        output = model(**arguments, output_attentions=True)
    except (TypeError, IndexError, AttributeError, NotImplementedError):
        return [], None  # the option is unknown, or its weights are missing
    layers = getattr(output, "attentions", None) or ()
    matrices = [layer for layer in layers if getattr(layer, "ndim", 0) == 4]
    return [
        LayerWeights(f"layer {number}", fuse(restore_rows(layer), heads).cpu().numpy(), None, None)
        for number, layer in enumerate(matrices, start=1)
    ], output


def restore_rows(layer: "torch.Tensor") -> "torch.Tensor":
    """Weights as float32; rows that 16 bits rounded sum to 1 again."""
    weights = layer.float()
    if layer.element_size() > 2:
        return weights
    sums = weights.sum(dim=-1, keepdim=True)
    return weights / sums.where((sums - 1).abs() < ROW_TOLERANCE[2], 1.0)
