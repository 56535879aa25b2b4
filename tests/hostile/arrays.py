"""Damaged arrays, at the doors `Attention`, `AttentionGraph` and `Attention.load`.

Each gives an error of one line, or sound weights.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import attnflow as af
from tests.hostile.damage import damage_bytes, damage_head
from tests.hostile.tries import Result, complain, refusal, run_tries
from tests.oracles import KINDS, Floats, attention

Draw = random.Random


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these arrays."""
    return run_tries(attempt, "arrays", numbers, seed, folder)


# ---- damage ------------------------------------------------------------------------------------


def put(draw: Draw, weights: Floats, value: float) -> Floats:
    """One number changed, anywhere."""
    changed = weights.copy()
    changed[tuple(draw.randrange(length) for length in weights.shape)] = value
    return changed


def ragged(draw: Draw, weights: Floats) -> Any:
    """Nested lists, one of which is longer."""
    nested = row = weights.tolist()
    for _ in range(weights.ndim - 1):
        row = draw.choice(row)
    row.append(0.5)
    return nested


def as_objects(draw: Draw, weights: Floats) -> Any:
    """An array of objects, one of which is no number."""
    changed = weights.astype(object)
    changed.flat[draw.randrange(changed.size)] = draw.choice([None, {}, "x", [1.0], 1 + 2j])
    return changed


# what must not pass: from a draw and sound weights to what is given
REFUSED: dict[str, Callable[[Draw, Floats], Any]] = {
    "nan": lambda draw, w: put(draw, w, np.nan),
    "infinite": lambda draw, w: put(draw, w, draw.choice([np.inf, -np.inf])),
    "negative": lambda draw, w: put(draw, w, -draw.choice([0.5, 1.0, 1e-3, 1e300])),
    "huge number": lambda draw, w: put(draw, w, draw.choice([2.0, 1e10, 1e308])),
    "rows that do not sum": lambda draw, w: w * draw.choice([0.0, 0.5, 1.01, 2.0, 1e-300, 1e300]),
    "one row that does not sum": lambda draw, w: np.concatenate([w[:-1], w[-1:] * 0.9]),
    "logits": lambda draw, w: np.log(w + 1e-9),
    "columns sum": lambda draw, w: w * np.linspace(0.5, 1.5, w.shape[-2])[:, None],
    "an axis missing": lambda draw, w: w.reshape(
        w.shape[-2:] if w.size == w.shape[-1] ** 2 else -1
    ),
    "too many axes": lambda draw, w: w.reshape((1,) * draw.choice([3, 5, 20]) + w.shape),
    "not square": lambda draw, w: np.concatenate([w, w], axis=-2),
    "no axes": lambda draw, w: w.sum(),
    "objects": as_objects,
    "strings": lambda draw, w: w.astype(draw.choice(["U10", "S10"])),
    "ragged": ragged,
    "empty": lambda draw, w: w[(slice(None),) * draw.randrange(w.ndim) + (slice(0, 0),)],
    "masked": lambda draw, w: np.ma.masked_less(w, 0.1),
    "complex": lambda draw, w: w.astype(complex),
    "times": lambda draw, w: (w * 1e9).astype(draw.choice(["M8[s]", "m8[s]"])),
    "records": lambda draw, w: w.view([("x", "f8")]),
    "none": lambda draw, w: draw.choice([None, [], (), [None], {}, "x", b"x", 0, object()]),
    "layers of two shapes": lambda draw, w: [w[0], w[0][..., :1, :1]] if w.shape[-1] > 1 else [],
    "a batch": lambda draw, w: [np.stack([w[0], w[0]]) if w.ndim == 4 else w[:1]] * 2 + [None],
    "huge shape": lambda draw, w: np.broadcast_to(np.float64(1e-6), (2, 2, 10**6, 10**6)),
    "long row": lambda draw, w: np.broadcast_to(np.float64(1e-9), (1, 1, 1, 10**9)),
}
# what may pass, if sound weights come out
DOUBTFUL: dict[str, Callable[[Draw, Floats], Any]] = {
    "nothing": lambda draw, w: w,
    "half": lambda draw, w: w.astype(np.float16),
    "wide": lambda draw, w: w.astype(np.longdouble),
    "whole": lambda draw, w: np.broadcast_to(
        np.eye(w.shape[-1], dtype=draw.choice([int, bool])), w.shape
    ),
    "byte order": lambda draw, w: w.astype(draw.choice([">f8", ">f4", "<f4"])),
    "strides": lambda draw, w: np.ascontiguousarray(w.T).T,
    "negative strides": lambda draw, w: w[::-1, ..., ::-1],
    "tiny": lambda draw, w: put(draw, w, draw.choice([5e-324, -0.0, 1e-310])),
    "almost": lambda draw, w: w * (1 + draw.uniform(-2e-6, 2e-6)),
    "read-only": lambda draw, w: np.broadcast_to(w, w.shape),
    "lists": lambda draw, w: w.tolist(),
    "matrix": lambda draw, w: [np.matrix(layer) for layer in w] if w.ndim == 3 else list(w),
    "a part of objects": lambda draw, w: w.astype(object),
}
TAKEN = ("nothing", "byte order", "strides", "read-only", "lists")  # ... and must pass
# what stands beside the weights in a file, of the wrong kind
FIELDS: dict[str, list[Any]] = {
    "format": [np.nan, -1, 99, "x", [], [1, 2], 1j],
    "causal": [2, "no", [], [True, False], np.nan, True],
    "window": [[], [0] * 99, [-5], ["a"], [np.nan], 3, [10**18], [[1]]],
    "words": [[], [0] * 99, ["a"], [np.inf], 3, [[0]]],
    "fused": [3, ["a", "b"], "", np.nan, "median", "x" * 1000],
    "no_token_share": [np.nan, [[2.0]], [], "x", [[-1.0]]],
    "layer_names": [[], ["x"] * 99, [[["x"]]], 3, "x", ["\x1b[31m"] * 3],
    "grid": [[], [1], [1, 2, 3], [np.nan, 1], "x", [-1, 0], [10**18, 1]],
    "tokens": [[], ["x"] * 99, "x", [["x"]], 3, ["\x1b[31m"] * 3],
    "token_bytes": [[], [300], "x", [1, 2], np.arange(3, dtype=np.uint8)],
    "token_lengths": [[-1, 1], [10**18], "x", [np.nan], 3],
}


# ---- doors -------------------------------------------------------------------------------------


def attempt(draw: Draw, number: int, folder: Path) -> str | None:
    """Give one damaged array to one door; what is wrong, if anything."""
    rng = np.random.default_rng(draw.getrandbits(64))
    depth, size = draw.randint(1, 4), draw.randint(1, 6)
    weights = attention(draw.choice(KINDS), depth, size, rng)  # [layer, query, key]
    door = ("Attention", "AttentionGraph", "array file", "bytes", "fields")[number % 5]
    if door in ("Attention", "AttentionGraph", "array file"):
        table = REFUSED if draw.random() < 0.7 else DOUBTFUL
        name = draw.choice(list(table))
        if door != "AttentionGraph" and draw.random() < 0.5:
            weights = np.stack([weights, weights[::-1]], axis=1)  # [layer, head, query, key]
        given = table[name](draw, weights)
        if door == "array file":
            given = write_array(draw, folder, given)
        found = judge(af.AttentionGraph if door == "AttentionGraph" else read_attention, given)
        if found is None and table is REFUSED:
            found = "it was taken"
        if found == "refused" and name in TAKEN:
            found = "it was not taken"
        return None if found in (None, "refused") else f"{door}, {name}, {weights.shape}: {found}"
    path = write_damaged(draw, folder, af.Attention(weights), door)
    found = judge(af.Attention.load, path)
    return None if found in (None, "refused") else f"{door}, {path.name}: {found}"


def read_attention(given: Any) -> af.Attention:
    """By the constructor, or from a file."""
    return af.Attention.load(given) if isinstance(given, Path) else af.Attention(given)


def judge(door: Callable[[Any], Any], given: Any) -> str | None:
    """Whether a door "refused" what is given or took it soundly (None); else what is bad."""

    def check() -> str | None:
        try:
            result = door(given)
        except af.AttnFlowError as error:
            return refusal(error) or "refused"
        return check_sound(result)

    return complain(check)


def check_sound(result: af.Attention | af.AttentionGraph) -> str | None:
    """What is bad about weights that came through a door, or about their rollout."""
    weights = np.asarray(result.weights, dtype=np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any():
        return "weights are not finite, or negative"
    if np.abs(weights.sum(axis=-1) - 1).max() > 1e-5:
        return f"a row sums to {weights.sum(axis=-1).min()!r} or {weights.sum(axis=-1).max()!r}"
    if result.tokens is not None and len(result.tokens) != result.size:
        return f"{len(result.tokens)} tokens for {result.size} positions"
    rolled = af.rollout(result).values
    if not np.isfinite(rolled).all() or np.abs(rolled.sum(axis=-1) - 1).max() > 1e-6:
        return "rollout's rows do not sum to 1"
    return None


def write_array(draw: Draw, folder: Path, given: Any) -> Any:
    """A file that holds what is given; the thing itself if numpy writes no such file."""
    if getattr(given, "size", 0) > 10**6 or isinstance(given, np.ma.MaskedArray):
        return given
    path = folder / draw.choice(["x.npy", "x.npz"])
    try:
        if path.suffix == ".npy":
            np.save(path, given)
        else:
            np.savez(path, weights=given)
    except (ValueError, TypeError):
        return given
    return path


def write_damaged(draw: Draw, folder: Path, attention: af.Attention, door: str) -> Path:
    """A sound file whose bytes, or whose other fields, are damaged."""
    tokens = [draw.choice(["key", "", "\0", "é", "\ud800"]) for _ in range(attention.size)]
    full = af.Attention(attention.weights, tokens=tokens, words=range(attention.size))
    path = full.save(folder / "whole.npz")
    if door == "fields":
        with np.load(path) as stored:
            arrays = dict(stored)
        for _ in range(draw.choice([1, 1, 2])):
            name = draw.choice([*FIELDS, "weights"])
            if name == "weights":
                del arrays["weights"]
                break
            arrays[name] = np.array(draw.choice(FIELDS[name]))
        np.savez(path, **arrays)
        return path.rename(folder / f"{name}.npz")
    if draw.random() < 0.5:
        path = folder / "whole.npy"
        np.save(path, attention.weights)
    content = path.read_bytes()
    if draw.random() < 0.3 and path.suffix == ".npy":
        shape = str(attention.weights.shape).encode()
        other = draw.choice(
            [b"(-1,)", b"(10**9,)", b"(9999999999, 9999999999)", b"()", b"None", b"[1]"]
        )
        path.write_bytes(content.replace(shape, other.ljust(len(shape))))
    elif draw.random() < 0.5:
        path.write_bytes(damage_head(draw, content, min(200, len(content))))
    else:
        path.write_bytes(damage_bytes(draw, content))
    return path
