"""The types of a page's data for its scripts, made from the schema.

`python -m attnflow.analysis.page.types` writes them to show/page/assets/schema.d.ts, which editors
read and pages leave out.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from attnflow.analysis.page import schema
from attnflow.analysis.page.schema import name_in_json

FILE = Path(__file__).parents[2] / "show" / "page" / "assets" / "schema.d.ts"
TYPES_HEADER = "// made from analysis/page/schema.py by python -m attnflow.analysis.page.types\n"
NAMES = {"str": "string", "bool": "boolean", "int": "number", "float": "number", "NoneType": "null"}


def declare_types() -> str:
    """The declarations of all dataclasses of the schema, as they appear in JSON."""
    classes = [
        value
        for value in vars(schema).values()
        if inspect.isclass(value) and is_dataclass(value) and value.__module__ == schema.__name__
    ]
    return TYPES_HEADER + "".join(f"\n{declare_class(each)}" for each in classes)


def declare_class(kind: type) -> str:
    """One dataclass as an interface, which extends its flat parts."""
    hints, (description, by_field) = get_type_hints(kind), read_docstring(kind)
    parts, lines = [], []
    for each in fields(kind):
        hint, optional = hints[each.name], each.default is None
        if optional:
            parts_of_hint = tuple(part for part in get_args(hint) if part is not NoneType)
            hint = Union[parts_of_hint]  # noqa: UP007
        if each.metadata.get("flat"):
            parts.append(f"Partial<{hint.__name__}>" if optional else hint.__name__)
            continue
        comment = f"  // {by_field[each.name]}" if each.name in by_field else ""
        lines.append(f"  {name_in_json(each)}{'?' * optional}: {write_type(hint)};{comment}\n")
    extends = f" extends {', '.join(parts)}" if parts else ""
    return f"/** {description} */\ninterface {kind.__name__}{extends} {{\n{''.join(lines)}}}\n"


def write_type(hint: object) -> str:
    """A type in TypeScript.

    >>> write_type(tuple[int | None, ...]), write_type(dict[str, tuple[str, float]])
    ('(number | null)[]', 'Record<string, [string, number]>')
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(write_type, parts)))
    if origin is Literal:
        return " | ".join(f'"{part}"' for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        inside = write_type(parts[0])
        return f"({inside})[]" if " | " in inside else f"{inside}[]"
    if origin is tuple:
        return f"[{', '.join(map(write_type, parts))}]"
    if origin is not None and issubclass(origin, Mapping):
        return f"Record<{', '.join(map(write_type, parts))}>"
    name = getattr(hint, "__name__", "")
    return NAMES.get(name, name)


def read_docstring(kind: type) -> tuple[str, dict[str, str]]:
    """The description of a class, and those of its fields by name, each in one line."""
    description, _, listed = inspect.cleandoc(kind.__doc__ or "").partition(
        "Parameters\n----------\n"
    )
    by_field: dict[str, str] = {}
    for names, text in re.findall(r"^(\S.*)\n((?:    .*\n?)+)", listed, re.MULTILINE):
        by_field |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return " ".join(description.split()), by_field


if __name__ == "__main__":
    FILE.write_text(declare_types(), encoding="utf-8")
