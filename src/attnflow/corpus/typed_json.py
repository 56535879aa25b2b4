"""`read_typed`: JSON as dataclasses and TypedDicts, checked against their types and rules.

A rule stands beside its type: `Annotated[int, Rule("a whole number, at least 1", ...)]`.
"""

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from attnflow.corpus.rows import is_decodable
from attnflow.errors import FileError

Typed = TypeVar("Typed")


@dataclass(frozen=True)
class Rule:
    """What a value must be, beside its type."""

    what: str
    holds: Callable[[Any], bool]


def whole(least: int, most: int = 2**53) -> Rule:
    """A whole number in a range; beyond 2**53 not every reader of JSON is exact."""
    return Rule(f"a whole number, at least {least}", lambda value: least <= value <= most)


def is_writable(text: str) -> bool:
    """Whether UTF-8 can encode a text, and it may be the name of a file."""
    return "\0" not in text and is_decodable(text)


Count = Annotated[int, whole(0)]
Positive = Annotated[int, whole(1)]
AnyText = Annotated[str, Rule("a text", is_writable)]
Visible = Annotated[
    str,
    Rule(
        "a visible text",
        lambda text: is_writable(text) and text.isprintable() and bool(text.strip()),
    ),
]
Sha256 = Annotated[
    str, Rule("64 hexadecimal digits", lambda text: bool(re.fullmatch("[0-9a-f]{64}", text)))
]
NOT_EMPTY = Rule("a list of at least one value", bool)
CONTENT = "it"  # what messages call the whole content of a file


def read_typed(kind: type[Typed], value: object, name: str = CONTENT) -> Typed:
    """A value of JSON as this type; what does not fit is refused by its name.

    >>> read_typed(tuple[Count, ...], [1, 2], "layers")
    (1, 2)
    """
    return cast(Typed, read_value(kind, value, name))


def read_value(kind: object, value: object, name: str) -> object:
    """The same of a type that is not a class as well: a union, or one with rules."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, *rules = arguments
        result = read_value(inner, value, name)
        for rule in rules:
            if not rule.holds(result):
                raise mismatch(name, rule.what, value)
        return result
    if origin in (Union, UnionType):
        return read_union(arguments, value, name)
    if origin is tuple:
        if not isinstance(value, list):
            raise mismatch(name, "a list", value)
        return tuple(
            read_value(arguments[0], item, f"number {place} of {name}")
            for place, item in enumerate(value)
        )
    if origin is dict:
        return read_mapping(arguments[0], arguments[1], value, name)
    if not isinstance(kind, type):
        raise TypeError(f"no type of JSON: {kind!r}")
    if kind in (str, int, float, bool, NoneType):
        return read_scalar(kind, value, name)
    return read_object(kind, value, name)


def read_scalar(kind: type, value: object, name: str) -> object:
    """A string, a number, null, true or false; the last two are not numbers."""
    accepted: type | UnionType = int | float if kind is float else kind
    if isinstance(value, accepted) and isinstance(value, bool) == (kind is bool):
        return value
    words = {
        str: "a text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        NoneType: "null",
    }
    raise mismatch(name, words[kind], value)


def read_union(kinds: tuple[object, ...], value: object, name: str) -> object:
    """A value of the first type that it fits; null only where that is one of them."""
    if value is None and NoneType in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not NoneType]
    for kind in others:
        try:
            return read_value(kind, value, name)
        except FileError:
            continue
    return read_value(last, value, name)


def read_mapping(key_kind: object, kind: object, value: object, name: str) -> dict[object, object]:
    """An object with any keys: texts, or whole numbers as JSON writes them."""
    result: dict[object, object] = {}
    for key, item in check_object(value, name).items():
        number: object
        if key_kind is not int:
            number = read_value(key_kind, key, f"a key of {name}")
        elif re.fullmatch("0|[1-9][0-9]{0,15}", key):
            number = int(key)
        else:
            raise mismatch(f"a key of {name}", "a whole number", key)
        result[number] = read_value(kind, item, f"{key[:80]} of {name}")
    return result


def read_object(kind: type[Typed], value: object, name: str) -> Typed:
    """A dataclass or a TypedDict; fields that have a default may be missing."""
    content = check_object(value, name)
    hints = get_type_hints(kind, include_extras=True)
    optional = set()
    if is_dataclass(kind):
        optional = {
            field.name
            for field in fields(kind)
            if field.default is not MISSING or field.default_factory is not MISSING
        }
    for key in hints:
        if key not in content and key not in optional:
            raise FileError(f"{name} must have {key!r}, and has not")
    for key in content:
        if key not in hints:
            raise FileError(f"{name} must have none but {', '.join(hints)}; got {quote_value(key)}")
    inside = "" if name == CONTENT else f" of {name}"
    return kind(
        **{key: read_value(hints[key], item, f"{key}{inside}") for key, item in content.items()}
    )


def check_object(value: object, name: str) -> dict[str, object]:
    """Refuse what is not an object of JSON."""
    if not isinstance(value, dict):
        raise mismatch(name, "an object", value)
    return value


def mismatch(name: str, what: str, value: object) -> FileError:
    """The error of a value that is something else."""
    return FileError(f"{name} must be {what}; got {quote_value(value)}")


def quote_value(value: object) -> str:
    """A value for a message: what should be a number may be a book, or have a thousand digits."""
    return repr(value)[:80] if isinstance(value, str | int | float) else type(value).__name__
