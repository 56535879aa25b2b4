"""Warnings that a caller may collect: in its own context only, whatever other threads do.

`warnings.catch_warnings` changes filters of the whole process. A context variable changes nothing
but what is seen by the code that runs within.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

collecting: ContextVar[list[str] | None] = ContextVar("collecting", default=None)


@contextmanager
def collect_notices() -> Iterator[list[str]]:
    """A list that gets the text of every notice given within, instead of a warning.

    >>> with collect_notices() as notices:
    ...     give_notice("flow is even", UserWarning)
    >>> notices
    ['flow is even']
    """
    notices: list[str] = []
    before = collecting.set(notices)
    try:
        yield notices
    finally:
        collecting.reset(before)


def give_notice(text: str, category: type[Warning], *, stacklevel: int = 1) -> None:
    """Warn, unless somebody collects. stacklevel: of `warnings.warn`, counted from the caller."""
    notices = collecting.get()
    if notices is None:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    else:
        notices.append(text)
