"""A progress bar for what takes long: on a terminal only, and only after two seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 2.0  # seconds without a bar


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function to be told (done, total); it draws a bar on standard error once the work has taken a while."""
    started = time.monotonic()
    bar: Any = None
    task: Any = None

    def tick(done: int, total: int) -> None:
        nonlocal bar, task
        if bar is None and sys.stderr.isatty() and time.monotonic() - started > PATIENCE:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            bar.start()
            task = bar.add_task(title, total=total)
        if bar is not None:
            bar.update(task, completed=done, total=total)

    try:
        yield tick
    finally:
        if bar is not None:
            bar.stop()
