"""Warnings that a caller can collect or ignore, in its own context only.

`warnings.catch_warnings` changes the filters of the whole process; a context variable affects only
the code that runs in the context, whatever other threads do.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# the list that collects notices; None: they become warnings
collecting: ContextVar[list[str] | None] = ContextVar("collecting", default=None)
ignoring: ContextVar[bool] = ContextVar("ignoring", default=False)


@contextmanager
def collect_notices() -> Iterator[list[str]]:
    """Collect the texts of notices in a list, instead of warning.

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
    """Ignore all notices, so that their causes need not be computed.

    >>> with ignore_notices():
    ...     give_notice("flow is even", UserWarning)
    """
    before = ignoring.set(True)
    try:
        yield
    finally:
        ignoring.reset(before)


def are_notices_read() -> bool:
    """Whether notices are collected or become warnings."""
    return not ignoring.get()


def give_notice(text: str, category: type[Warning], *, stacklevel: int = 1) -> None:
    """Collect a notice, or warn. stacklevel: as for `warnings.warn`, counted from the caller."""
    notices = collecting.get()
    if not are_notices_read():
        return
    if notices is None:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    else:
        notices.append(text)
