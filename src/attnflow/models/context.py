"""Context variables that have a value within a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def set_within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Within this context, a context variable has this value.

    >>> is_open = ContextVar("is_open", default=False)
    >>> with set_within(is_open, True):
    ...     is_open.get()
    True
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
