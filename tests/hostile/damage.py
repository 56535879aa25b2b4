"""Damage to files: bytes lost or changed, and JSON with values of every wrong kind."""

import json
import random
from typing import Any

DIGITS = "a whole number of 5,000 digits"  # Python's json writes none, so it is put in afterwards
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "0", "nul\0", "\x1b[31mred\x1b[0m", "two\nlines"),
    *("\u202eevil", "\ud800", "../../outside", "/etc/passwd", "null", "x" * 10_000, DIGITS),
    *([], [[]], [None], ["x"], [0, 0], {}, {"x": 1}, {"": None}),
]


def damage_bytes(draw: random.Random, content: bytes) -> bytes:
    """The content of a file after an accident."""
    size = len(content)
    start = draw.randrange(size)
    length = min(draw.choice([1, 2, 8, 100]), size - start)
    changed = bytearray(content)
    accident = draw.choice(["cut", "flip", "zero", "noise", "lose", "double", "empty", "insert"])
    if accident == "cut":
        return content[:start]
    if accident == "flip":
        for _ in range(draw.choice([1, 1, 5, 50])):
            changed[draw.randrange(size)] ^= 1 << draw.randrange(8)
    elif accident == "zero":
        changed[start : start + length] = bytes(length)
    elif accident == "noise":
        changed[start : start + length] = draw.randbytes(length)
    elif accident == "lose":
        del changed[start : start + length]
    elif accident == "double":
        changed[start:start] = changed[start : start + length]
    elif accident == "insert":
        changed[start:start] = draw.randbytes(length)
    return bytes(changed) if accident != "empty" else b""


def damage_head(draw: random.Random, content: bytes, head: int) -> bytes:
    """The same within the first bytes, where a file says what it holds."""
    return damage_bytes(draw, content[:head]) + content[head:]


def damage_json(draw: random.Random, value: Any, keys: list[str] | None = None) -> Any:
    """A value like this one, with one to three of its parts odd, missing or elsewhere.

    keys: those of the top level that may be damaged; all if None.
    """
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        parent, key = draw.choice(places_of(value, keys))
        change = draw.choice(["odd", "odd", "odd", "near", "lose", "wrap", "rename"])
        if change == "near" and isinstance(parent[key], int | float):
            parent[key] = draw.choice(
                [-parent[key], parent[key] + 1, parent[key] - 1, parent[key] * 1000]
            )
        elif change == "lose":
            del parent[key]
        elif change == "wrap":
            parent[key] = draw.choice([[parent[key]], {"value": parent[key]}, str(parent[key])])
        elif change == "rename" and isinstance(parent, dict):
            parent[draw.choice(["", "-1", "0", "1e9", "x", f"{key} ", "9" * 30])] = parent.pop(key)
        else:
            parent[key] = draw.choice(ODD)
        if not places_of(value, keys):
            break
    return value


def places_of(value: Any, keys: list[str] | None = None) -> list[tuple[Any, Any]]:
    """(container, key or index) of every part of a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = [(value, key) for key, _ in items if keys is None or key in keys]
    return found + [place for _, key in found for place in places_of(value[key])]


def odd_json(draw: random.Random, content: bytes) -> bytes:
    """A file that should hold a JSON object and does not."""
    return draw.choice(
        [
            damage_bytes(draw, content),
            *(b"", b"null", b"[]", b"{}", b"0", b'"text"', b"NaN", b"[" * 100_000),
            *(b"{" + content, content + content, b"\xff\xfe" + content, b"\xef\xbb\xbf" + content),
            content.decode("utf-8").encode("utf-16"),
            content.replace(b":", b": " + b"9" * 5000 + b"0 ,", 1),
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        ]
    )


def dump(value: Any) -> bytes:
    """JSON as text, with what Python's json would not write."""
    return json.dumps(value, indent=1).replace(json.dumps(DIGITS), "9" * 5000).encode()
