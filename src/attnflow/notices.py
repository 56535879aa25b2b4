"""Warnings that a caller may collect: in its own context only, whatever other threads do.

`warnings.catch_warnings` changes filters of the whole process. A context variable changes nothing
but what is seen by the code that runs within.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# the list that notices go to; None: they become warnings
collecting: ContextVar[list[str] | None] = ContextVar("collecting", default=None)
ignoring: ContextVar[bool] = ContextVar("ignoring", default=False)


@contextmanager
def collect_notices() -> Iterator[list[str]]:
    """A list that gets the text of every notice given within, instead of a warning.

    >>> with collect_notices() as notices:
    ...     give_notice("flow is even", UserWarning)
    >>> notices
    ['flow is even']
    """
    notices: list[str] = []
    before, ignored = collecting.set(notices), ignoring.set(False)
    try:
        yield notices
    finally:
        collecting.reset(before)
        ignoring.reset(ignored)


@contextmanager
def ignore_notices() -> Iterator[None]:
    """A block whose notices nobody reads, so that nobody need look for what they would say.

    >>> with ignore_notices():
    ...     give_notice("flow is even", UserWarning)
    """
    before = ignoring.set(True)
    try:
        yield
    finally:
        ignoring.reset(before)


def are_notices_read() -> bool:
    """Whether a notice would reach somebody."""
    return not ignoring.get()


def give_notice(text: str, category: type[Warning], *, stacklevel: int = 1) -> None:
    """Warn, unless somebody collects. stacklevel: of `warnings.warn`, counted from the caller."""
    notices = collecting.get()
    if not are_notices_read():
        return
    if notices is None:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    else:
        notices.append(text)
