"""The file that a training can be continued from: whole or not there, never of other options, and noticed if a single bit is wrong."""

import json
import os
import zlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from attnflow.errors import FileError

WEIGHTS = "model.safetensors"  # a folder that holds this holds a finished model
CHECKPOINT = Path("checkpoint") / "state.safetensors"
Tensors = dict[str, Tensor]


def claim(folder: Path, resume: bool) -> Path:
    """Make the folder and give the path of its checkpoint; or an error, if something in it would be overwritten."""
    checkpoint = folder / CHECKPOINT
    try:
        if folder.exists() and not folder.is_dir():
            raise FileError(
                f"a model is written to a folder; {folder} is a file: choose another --out"
            )
        if (folder / WEIGHTS).exists():
            raise FileError(f"{folder} already holds a model; choose another --out")
        if checkpoint.exists() and not resume:
            raise FileError(
                f"{folder} holds a training that is not finished; pass --resume to go on with it, or choose another --out"
            )
        if resume and not checkpoint.exists():
            raise FileError(
                f"{folder} holds no checkpoint to go on from; leave --resume out to start from the beginning"
            )
        rests = set(checkpoint.parent.glob(".attnflow-*"))  # of writes that were killed
        others = sorted(set(folder.rglob("*")) - rests - {checkpoint.parent})
        if others and not resume:
            raise FileError(
                f"{folder} must be new or empty; it holds {others[0].relative_to(folder)}: choose another --out"
            )
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        for rest in rests:
            rest.unlink()
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot write to {str(folder)!r}: {getattr(error, 'strerror', None) or error}; choose another --out"
        ) from error
    return checkpoint


def read_checkpoint(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the facts of a checkpoint; or an error, if a single bit of it is not as it was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["attnflow"])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
        if facts["checksum"] != checksum(tensors):
            raise ValueError("its checksum does not fit")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise FileError(
            f"the checkpoint {path} is damaged ({error}); delete it, or choose another --out"
        ) from error
    return tensors, facts


def agree(path: Path, written: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Refuse to continue a training with other options than it began with."""
    differing = [name for name in {**written, **given} if written.get(name) != given.get(name)]
    if differing:
        what = ", ".join(
            f"{name} was {written.get(name)}, is {given.get(name)}" for name in differing
        )
        raise FileError(
            f"{path} is of a training with other options or data: {what}; give the same, or choose another --out"
        )


def checksum(tensors: Tensors) -> int:
    """One number for all bytes of named tensors."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(
            tensors[name].reshape(-1).view(torch.uint8).numpy(), zlib.crc32(name.encode(), found)
        )
    return found


def write_through(file: IO[bytes], data: bytes) -> None:
    """Write, and wait until the disk has it: a name must never point to bytes that a power cut would lose."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def part_of(tensors: Tensors, part: str) -> Tensors:
    """The tensors whose names begin with a part's name, without it."""
    return {
        name.removeprefix(f"{part}."): value
        for name, value in tensors.items()
        if name.startswith(f"{part}.")
    }


def digest(value: object) -> str:
    """A short name for any JSON value, for example all rows of the data: other value, other name.

    >>> digest([["a sentence", 1]]) == digest([("a sentence", 1)]) != digest([["a sentence", 0]])
    True
    """
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
