"""Watching modules from one thread, while other threads may run them too.

torch copies a module's hooks before it calls them, and only then looks up whether each one takes
keyword arguments: a hook that another thread adds or removes in between is called without them. So
hooks accept both forms, and ignore calls from other threads.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Positional = tuple[object, ...]
Before = Callable[["torch.nn.Module", Positional, dict[str, object]], None]
After = Callable[["torch.nn.Module", Positional, object], None]


@contextmanager
def watch_modules(
    modules: "Iterable[torch.nn.Module]",
    *,
    before: Before | None = None,
    after: After | None = None,
    prepend: bool = False,
) -> Iterator[None]:
    """While this lasts, report every call of these modules in this thread.

    before: called with the module, its arguments and its keyword arguments. after: called with the
    module, its arguments and its output. prepend: whether `before` precedes hooks of others.
    """
    thread = threading.get_ident()

    def enter(
        module: "torch.nn.Module", given: Positional, named: dict[str, object] | None = None
    ) -> None:
        if before is not None and threading.get_ident() == thread:
            before(module, given, named or {})

    def leave(module: "torch.nn.Module", given: Positional, output: object) -> None:
        if after is not None and threading.get_ident() == thread:
            after(module, given, output)

    with ExitStack() as hooks:
        for module in modules:
            if before is not None:
                handle = module.register_forward_pre_hook(enter, prepend=prepend, with_kwargs=True)
                hooks.callback(handle.remove)
            if after is not None:
                hooks.callback(module.register_forward_hook(leave).remove)
        yield
