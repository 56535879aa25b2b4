"""Listening to a model's attention: what each call mixed, beside the model's own computation.

The model runs as it is, with the attention implementation that it has (SDPA, its own eager):
transformers asks `AttentionInterface.get_interface` for the function that attends, and while
somebody listens, that function is wrapped. The wrapper calls it, passes its output on untouched,
and computes the weights beside it from the same queries, keys and mask, block by block, fusing
heads at once. Families that do not ask (DeBERTa, BLOOM, MPNet) are eager anyway, and give their
weights with `output_attentions`.
"""

import math
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

from attnflow.core.arrays import ROW_TOLERANCE
from attnflow.core.memory import find_available_memory, format_gigabytes
from attnflow.models.families import WINDOW
from attnflow.models.weighing import compute_weights, fuse

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Call:
    """One layer's attention as it was called, on the CPU."""

    name: str  # of the module, within its model
    weights: npt.NDArray[np.float32]  # [sequence, head (1 if fused), query, key]
    no_token_share: "torch.Tensor | None"  # [sequence, query], mean over heads
    window: int | None  # a query sees keys less than so many positions away


@dataclass(frozen=True)
class Attend:
    """The function that a model attends by."""

    function: Callable[..., Any]
    hides_future: bool  # without a mask, in modules that are causal; a model's own eager does not
    gives_weights: bool = False  # beside its output, those that it attended by, of every head


@dataclass(frozen=True, eq=False)
class Heard:
    """One call of attention as a model made it, and what it gave."""

    name: str  # of the module, within its model
    module: Any
    attend: Attend
    query: "torch.Tensor"  # [sequence, head, query, width]
    key: "torch.Tensor"  # [sequence, group of heads, key, width]
    value: "torch.Tensor"  # likewise
    mask: "torch.Tensor | None"
    options: dict[str, Any]  # what the family gave with them
    output: Any  # [sequence, query, head, width], and perhaps weights

    @property
    def window(self) -> int | None:
        """A query sees keys less than so many positions away."""
        return self.options.get(WINDOW)

    @property
    def given_weights(self) -> "torch.Tensor | None":
        """[sequence, head, query, key]: the weights that came with the output, if any did."""
        return restore_rows(self.output[1].detach()) if self.attend.gives_weights else None

    def shape(self, heads: str | None) -> tuple[int, int, int, int]:
        """[sequence, head (1 if fused), query, key]: of its weights."""
        count = self.query.shape[1] if heads is None else 1
        return (self.query.shape[0], count, self.query.shape[2], self.key.shape[2])

    def weigh(self, heads: str | None, weights: "torch.Tensor") -> "torch.Tensor | None":
        """Set weights of this shape; the share of no token [sequence, query], if there is one."""
        import torch

        given = self.given_weights
        if given is not None:
            weights.copy_(fuse(given, heads))
            return None
        # autocast would round the logits to 16 bits, and rows would not sum to 1
        with torch.no_grad(), torch.autocast(self.query.device.type, enabled=False):
            return compute_weights(
                self.module,
                self.query,
                self.key,
                self.mask,
                heads,
                weights,
                self.options,
                hides_future=self.attend.hides_future,
            )


LITTLE_MEMORY = 2**28  # bytes for which nobody asks how much memory is left
Listener = Callable[..., Any]
listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
interface_lock = threading.RLock()
patched = 0  # captures under way, in all threads


class LayerBuffer:
    """Buffers for the weights of successive layers, in one array while their shapes agree."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.used = 0
        self.array: npt.NDArray[np.float32] = np.empty((0,), np.float32)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """An uninitialised array of this shape."""
        if self.used == len(self.array) or self.array.shape[1:] != shape:
            check_room(self.depth, shape)
            self.array, self.used = np.empty((self.depth, *shape), np.float32), 0
        self.used += 1
        layer: npt.NDArray[np.float32] = self.array[self.used - 1]
        return layer


def check_room(depth: int, shape: tuple[int, ...]) -> None:
    """Refuse weights that memory cannot hold: the system would end the process instead."""
    needed = 4 * depth * math.prod(shape)
    available = find_available_memory() if needed > LITTLE_MEMORY else None
    if available is not None and needed > available:
        raise MemoryError(
            f"attention over {shape[-1]} positions in {depth} layers takes"
            f" {format_gigabytes(needed)}, and {format_gigabytes(available)} are available;"
            " rollout_rows and rollout_segments build no such matrices"
        )


@contextmanager
def listening(model: Any, heads: str | None, depth: int = 1) -> Iterator[list[Call]]:
    """A list that fills with one Call per attention that the model computes in this thread.

    depth: how many layers are expected, so that their weights share one array.
    """
    import torch

    calls: list[Call] = []
    layers = LayerBuffer(depth)

    def take(heard: Heard) -> None:
        weights = layers.take(heard.shape(heads))
        share = heard.weigh(heads, torch.from_numpy(weights))
        calls.append(Call(heard.name, weights, share, heard.window))

    with hearing(model, take):
        yield calls


@contextmanager
def hearing(model: Any, take: Callable[[Heard], None]) -> Iterator[None]:
    """While this lasts, `take` is told of each attention of this model in this thread, once done.

    The model's own computation is untouched.
    """
    names = {module: name for name, module in model.named_modules()}

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
            given = (query, key, value, attention_mask, options, output)
            take(Heard(names[module], module, attend, *given))
        return output

    with intercepting(listen):
        yield


@contextmanager
def intercepting(listen: Listener) -> Iterator[None]:
    """While this lasts, attention in this thread goes through `listen(attend, module, ...)`."""
    with patch_interface():
        token = listener.set(listen)
        try:
            yield
        finally:
            listener.reset(token)


@contextmanager
def patch_interface() -> Iterator[None]:
    """While this lasts, what transformers' AttentionInterface gives out passes by the listener."""
    global patched
    if "transformers" not in sys.modules:  # then nobody asks it
        yield
        return
    from transformers import AttentionInterface

    with interface_lock:
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
        with interface_lock:
            patched -= 1
            if patched == 0:
                AttentionInterface.get_interface = AttentionInterface.get_interface.original


def find_attend(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that attends; through the listener, while somebody listens.

    For modules of our own, which are called as transformers' attention functions are.
    """
    listen = listener.get()
    if listen is None:
        return function
    return partial(listen, Attend(function, hides_future=False, gives_weights=True))


def collect_eager_calls(
    model: Any, arguments: dict[str, Any], heads: str | None
) -> tuple[list[Call], Any]:
    """The calls of a model outside the interface, from the weights that it returns; its output."""
    try:
        output = model(**arguments, output_attentions=True)
    except (TypeError, IndexError, AttributeError, NotImplementedError):
        return [], None  # it knows no such option, or promises weights that it does not have
    layers = getattr(output, "attentions", None) or ()
    matrices = [layer for layer in layers if getattr(layer, "ndim", 0) == 4]
    return [
        Call(f"layer {number}", fuse(restore_rows(layer), heads).cpu().numpy(), None, None)
        for number, layer in enumerate(matrices, start=1)
    ], output


def restore_rows(layer: "torch.Tensor") -> "torch.Tensor":
    """Weights as float32; rows that 16 bits rounded sum to 1 again."""
    weights = layer.float()
    if layer.element_size() > 2:
        return weights
    sums = weights.sum(dim=-1, keepdim=True)
    return weights / sums.where((sums - 1).abs() < ROW_TOLERANCE[2], 1.0)
