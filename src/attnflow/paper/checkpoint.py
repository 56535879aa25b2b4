"""The file from which a training resumes.

It is complete or absent, belongs to the same options, and its checksum detects every changed bit.
"""

import json
import os
import zlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import IO, TypedDict, cast

import torch
from torch import Tensor

from attnflow.core.io.files import write_file
from attnflow.errors import FileError

WEIGHTS = "model.safetensors"  # a folder that holds this holds a finished model
CHECKPOINT = Path("checkpoint") / "state.safetensors"
LOG = "training.log"
MAX_DIFFERENCES = 4  # that a message names
Tensors = dict[str, Tensor]


class Facts(TypedDict):
    """What a checkpoint holds beside its tensors."""

    fingerprint: dict[str, object]
    step: int
    best_accuracy: float | None  # None before the first measurement
    stale: int
    total_loss: float
    summed: int
    seconds: float
    checksum: int


def claim_folder(folder: Path, resume: bool) -> Path:
    """Make the folder and return the path of its checkpoint; refuse to overwrite anything."""
    checkpoint = folder / CHECKPOINT
    try:
        check_unfinished(folder, checkpoint, resume)
        leftovers = {  # of writes that were killed
            path
            for place in (folder, checkpoint.parent)
            for path in place.glob(".attnflow-*")
            if path.is_file()
        }
        others = sorted(set(folder.rglob("*")) - leftovers - {checkpoint.parent})
        if others and not resume:
            raise FileError(
                f"{folder} must be new or empty; "
                f"it holds {others[0].relative_to(folder)}: choose another --out"
            )
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        for leftover in leftovers:
            leftover.unlink()
    except FileError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(
            f"cannot write to {str(folder)!r}: {reason}; choose another --out"
        ) from error
    return checkpoint


def check_unfinished(folder: Path, checkpoint: Path, resume: bool) -> None:
    """Refuse a folder with a finished model; a checkpoint must exist exactly where it resumes."""
    if folder.exists() and not folder.is_dir():
        raise FileError(f"a model is written to a folder; {folder} is a file: choose another --out")
    if (folder / WEIGHTS).exists():
        raise FileError(f"{folder} already holds a model; choose another --out")
    if checkpoint.exists() and not resume:
        raise FileError(
            f"{folder} holds an unfinished training; "
            "pass --resume to continue it, or choose another --out"
        )
    if resume and not checkpoint.exists():
        raise FileError(
            f"{folder} holds no checkpoint to resume from; "
            "leave --resume out to start from the beginning"
        )


def read_checkpoint(path: Path) -> tuple[Tensors, Facts]:
    """The tensors and facts of a checkpoint, verified by their checksum."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = cast(Facts, json.loads(file.metadata()["attnflow"]))
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}
        if facts["checksum"] != compute_checksum(tensors):
            raise ValueError("its checksum does not match")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise FileError(
            f"the checkpoint {path} is damaged ({error}); delete it, or choose another --out"
        ) from error
    return tensors, facts


def check_resumed_options(
    path: Path, written: Mapping[str, object], given: Mapping[str, object]
) -> None:
    """Refuse to resume a training with other options than it began with."""
    differing = [name for name in {**written, **given} if written.get(name) != given.get(name)]
    if differing:
        changes = ", ".join(
            f"{name} was {written.get(name)}, is {given.get(name)}"
            for name in differing[:MAX_DIFFERENCES]
        )
        more = len(differing) - MAX_DIFFERENCES
        changes += f" and {more} more" if more > 0 else ""
        raise FileError(
            f"{path} is of a training with other options or data: {changes}; "
            "give the same, or choose another --out"
        )


def compute_checksum(tensors: Tensors) -> int:
    """One number for all bytes of named tensors."""
    checksum = 0
    for name in sorted(tensors):
        octets = tensors[name].reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(octets, zlib.crc32(name.encode(), checksum))
    return checksum


def add_line(path: Path, line: str, *, first: str) -> None:
    """Add a line to a log, which begins with `first`; a kill leaves it as it was."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"{first}\n"
    write_file(path, lambda file: file.write(f"{text}{line}\n".encode()))


def write_through(file: IO[bytes], data: bytes) -> None:
    """Write, and wait until the data is on disk: a power cut must not lose a renamed file."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def select_part(tensors: Tensors, part: str) -> Tensors:
    """The tensors whose names begin with that of a part, by the rest of their names."""
    return {
        name.removeprefix(f"{part}."): value
        for name, value in tensors.items()
        if name.startswith(f"{part}.")
    }


def digest(value: object) -> str:
    """A short name of a JSON value, such as the data: different values, different names.

    >>> digest([["a sentence", 1]]) == digest([("a sentence", 1)]) != digest([["a sentence", 0]])
    True
    """
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
