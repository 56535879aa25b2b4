"""Progress of long computations: for a listener, or as a bar on a terminal."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from attnflow.errors import OptionError, printable

PATIENCE = 2.0  # seconds before a bar appears
REMEMBERED = 3600.0  # seconds whose steps the estimate of the remaining time is made of
# of nested computations only the outer one shows a bar
bar_shown: ContextVar[bool] = ContextVar("bar_shown", default=False)


@dataclass(frozen=True)
class Progress:
    """How far a computation has come.

    Parameters
    ----------
    title
        What is computed.
    done
        The number of parts that are done.
    total
        The number of all parts.
    """

    title: str
    done: int
    total: int


Listener = Callable[[Progress], None]
current_listener: ContextVar[Listener | None] = ContextVar("current_listener", default=None)


@contextmanager
def progress_listener(listener: Listener) -> Iterator[None]:
    """Report the progress of all computations in a block to a function, and show no bar.

    For a server, a notebook, or a log. Nested computations report under their own titles. The
    function is called in the thread that computes, so it should return quickly; an exception that
    it raises stops the computation.

    Parameters
    ----------
    listener
        Called with a `Progress`: `title`, `done` and `total`.

    >>> import attnflow as af
    >>> seen = []
    >>> with progress_listener(seen.append):
    ...     _ = af.evaluate("verb-number", ["the key"], methods="raw", against="blank_out")
    >>> seen
    [Progress(title='evaluating', done=1, total=1)]
    """
    if not callable(listener):
        raise OptionError(
            "a progress listener must be a function of a Progress; got"
            f" {type(listener).__name__}: give one, as progress_listener(print)"
        )
    token = current_listener.set(listener)
    try:
        yield
    finally:
        current_listener.reset(token)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (done, total).

    It reports to the listener of this context, if there is one; otherwise to a bar on standard
    error, which appears after `PATIENCE` seconds and estimates the remaining time.
    """
    listener = current_listener.get()
    if listener is not None:
        yield lambda done, total: listener(Progress(title, done, total))
        return
    if not sys.stderr.isatty() or bar_shown.get():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True, speed_estimate_period=REMEMBERED)
    task = bar.add_task(escape(printable(title)), total=None)
    # started by another thread: compiling kernels reports nothing for seconds
    start = threading.Timer(PATIENCE, bar.start)
    start.daemon = True
    start.start()
    token = bar_shown.set(True)
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        bar_shown.reset(token)
        start.cancel()
        start.join()
        bar.stop()
