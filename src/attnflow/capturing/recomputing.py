"""Blocks that are computed again on the way back from a target, instead of being kept.

A gradient needs what each layer computed. Where that is much, only what enters a block is kept,
and the block runs once more when the way back reaches it (torch.utils.checkpoint): one more forward
pass, and the memory of one block instead of all.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attnflow.capturing.rerunning import find_blocks
from attnflow.errors import CaptureError
from attnflow.models.model import Model

KEPT = 150e6  # bytes that may be kept
STATES = 16  # what a block keeps per token, in states of the model's width
WIDTH = 1024  # of a model that does not say
recomputes: ContextVar[bool] = ContextVar("recomputes", default=False)
patch_lock = threading.RLock()
patched: dict[Any, int] = {}  # modules, and how many ways back under way use each


@contextmanager
def save_memory(model: Model, tokens: int) -> Iterator[None]:
    """While this lasts, blocks are computed again on the way back, if so many tokens are many."""
    width = getattr(model.config, "hidden_size", None) or WIDTH
    depth = model.depth or 1
    kept = tokens * depth * STATES * width * model.dtype.itemsize
    names: Iterable[str] = ()
    if kept > KEPT:
        try:
            names = set(find_blocks(model))
        except CaptureError:  # then everything is kept
            names = ()
    modules = dict(model.model.named_modules())
    with recomputing([modules[name] for name in names]):
        yield


@contextmanager
def recomputing(modules: list[Any]) -> Iterator[None]:
    """While this lasts, these modules are computed again on the way back, in this thread."""
    with patch_lock:
        for module in modules:
            patched[module] = patched.get(module, 0) + 1
            if patched[module] == 1:
                patch(module)
    token = recomputes.set(True)
    try:
        yield
    finally:
        recomputes.reset(token)
        with patch_lock:
            for module in modules:
                patched[module] -= 1
                if not patched[module]:
                    del patched[module]
                    unpatch(module)


def patch(module: Any) -> None:
    """Let a module's forward be computed again where this is asked for."""
    import torch
    from torch.utils.checkpoint import checkpoint

    original = module.forward

    def forward(*given: Any, **named: Any) -> Any:
        if not recomputes.get() or not torch.is_grad_enabled():
            return original(*given, **named)
        return checkpoint(original, *given, use_reentrant=False, preserve_rng_state=False, **named)

    forward.before = module.__dict__.get("forward")  # type: ignore[attr-defined]
    module.forward = forward


def unpatch(module: Any) -> None:
    """Give a module its forward back."""
    before = module.forward.before
    if before is None:
        del module.forward
    else:
        module.forward = before
