"""Recomputing blocks in the backward pass, where keeping their states would take much memory.

A gradient needs what each layer computed. Where that is large, only the input of a block is kept,
and the block runs once more when the backward pass reaches it (torch.utils.checkpoint): one more
forward pass per backward pass, and the memory of one block instead of all.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING

from attnflow.capturing.rerun import list_blocks
from attnflow.errors import CaptureError
from attnflow.models.context import set_within
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch

KEPT = 150e6  # bytes that may be kept
STATES = 16  # what a block keeps per token, in states of the model's width
DEFAULT_WIDTH = 1024  # where the configuration has no hidden_size
recomputes: ContextVar[bool] = ContextVar("recomputes", default=False)
# what makes the context in which blocks run and run again
around_blocks: ContextVar[Callable[[], AbstractContextManager[object]]] = ContextVar(
    "around_blocks", default=nullcontext
)
patch_lock = threading.RLock()
modules_in_use: "dict[torch.nn.Module, int]" = {}  # and how many running backward passes use each


@contextmanager
def save_memory(model: Model, tokens: int) -> Iterator[None]:
    """Within this context, backward passes recompute blocks if memory for tokens is short."""
    width = getattr(model.config, "hidden_size", None) or DEFAULT_WIDTH
    depth = model.depth or 1
    kept = tokens * depth * STATES * width * model.dtype.itemsize
    names: set[str] = set()
    if kept > KEPT:
        with suppress(CaptureError):  # blocks that are not found are kept
            names = set(list_blocks(model))
    with recomputing([model.model.get_submodule(name) for name in names]):
        yield


@contextmanager
def recomputing(modules: "Sequence[torch.nn.Module]") -> Iterator[None]:
    """Within this context, the backward passes of this thread recompute these modules."""
    with patch_lock:
        for module in modules:
            modules_in_use[module] = modules_in_use.get(module, 0) + 1
            if modules_in_use[module] == 1:
                patch(module)
    try:
        with set_within(recomputes, True):
            yield
    finally:
        with patch_lock:
            for module in modules:
                modules_in_use[module] -= 1
                if not modules_in_use[module]:
                    del modules_in_use[module]
                    unpatch(module)


def patch(module: "torch.nn.Module") -> None:
    """Make a module's forward recompute in contexts that ask for it."""
    import torch
    from torch.utils.checkpoint import checkpoint

    original = module.forward

    def forward(*given: object, **named: object) -> object:
        if not recomputes.get() or not torch.is_grad_enabled():
            return original(*given, **named)
        context = copy_context()  # autograd may recompute in a thread of its own

        def run(*given: object, **named: object) -> object:
            with around_blocks.get()():
                return original(*given, **named)

        def compute(*given: object, **named: object) -> object:
            return context.copy().run(run, *given, **named)

        return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False, **named)

    forward.before = module.__dict__.get("forward")  # type: ignore[attr-defined]
    module.forward = forward


def unpatch(module: "torch.nn.Module") -> None:
    """Restore a module's forward."""
    before = module.forward.before
    if before is None:
        del module.forward
    else:
        module.forward = before
