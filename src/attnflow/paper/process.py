"""The surroundings of a training: fixed random numbers, Ctrl-C between steps, a progress bar."""

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """A block in which torch's random numbers follow from the seed, and sums have a fixed order."""
    before = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed; a second Ctrl-C interrupts.

    So no step is interrupted halfway.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set  # other threads get no signals
        return

    def note(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def training_bar(total: int) -> Iterator[Callable[[int, float, float], None]]:
    """Yield a function that takes (step, loss, best accuracy) and shows them in a progress bar.

    The bar is on standard error, and on a terminal only.
    """
    if not sys.stderr.isatty():
        yield lambda step, loss, accuracy: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    figures = TextColumn("loss {task.fields[loss]:.3f}, dev {task.fields[accuracy]}")
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        figures,
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("", total=total, loss=math.nan, accuracy="-")

        def show(step: int, loss: float, accuracy: float) -> None:
            bar.update(
                line,
                completed=step,
                loss=loss,
                accuracy=f"{accuracy:.3f}" if math.isfinite(accuracy) else "-",
            )

        yield show
