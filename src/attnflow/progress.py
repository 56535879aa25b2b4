"""A progress bar for what takes long: on a terminal only, and only after two seconds."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attnflow.errors import printable

PATIENCE = 2.0  # seconds without a bar
showing: ContextVar[bool] = ContextVar(
    "showing", default=False
)  # work within work shows the outer bar alone


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function to be told (done, total).

    Once the work has taken a while, a bar on standard error shows it.
    """
    if not sys.stderr.isatty() or showing.get():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(escape(printable(title)), total=None)
    start = threading.Timer(
        PATIENCE, bar.start
    )  # by a thread of its own: compiling kernels tells nothing for seconds
    start.daemon = True
    start.start()
    token = showing.set(True)
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        showing.reset(token)
        start.cancel()
        start.join()
        bar.stop()
