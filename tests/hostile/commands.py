"""Command lines: exit status 0, or 1 or 2 with one line on standard error.

No traceback, no control character, no half-written file, whatever is typed.
"""

import json
import os
import random
import re
import shutil
import sys
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attnflow.cli import commands as cli
from attnflow.corpus.folder import LOCK
from tests.hostile.damage import damage_bytes
from tests.hostile.tries import Result, describe, run_tries
from tests.hostile.typed import HERE, compose, make_material

TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
LINE = 20_000  # characters: a line on standard error that is longer helps nobody


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these command lines."""
    base = make_material(folder / "material")
    return run_tries(partial(attempt, base), "commands", numbers, seed, folder, seconds=60)


# ---- one command -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a command ended; `raised` is the error that it did not catch."""

    status: object
    out: str
    err: str
    raised: str | None = None


def run_command(arguments: Sequence[str], folder: Path) -> Ended:
    """The command line in this process, with all that reaches its standard output and error."""
    saved = os.dup(1), os.dup(2)
    paths = folder / ".stdout", folder / ".stderr"
    before = sys.argv, sys.stdout, sys.stderr
    raised: str | None = None
    status: object = 0
    try:
        for stream, path in zip((1, 2), paths, strict=True):
            with open(path, "wb") as file:
                os.dup2(file.fileno(), stream)
        sys.stdout, sys.stderr = (
            open(stream, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            for stream in (1, 2)
        )
        sys.argv = ["attnflow", *arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                cli.main()
            except SystemExit as ended:
                status = ended.code or 0
            except BaseException as error:
                raised = describe(error)
        for each in (sys.stdout, sys.stderr):
            each.flush()
    finally:
        sys.argv, sys.stdout, sys.stderr = before
        for stream, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
    out, err = (path.read_bytes().decode("utf-8", "surrogateescape") for path in paths)
    for path in paths:
        path.unlink()
    return Ended(status, out, err, raised)


def complaint(ended: Ended) -> str | None:
    """What is bad about the way in which a command ended."""
    if ended.raised is not None:
        return f"a traceback: {ended.raised}"
    if ended.status not in (0, 1, 2):
        return f"exit status {ended.status!r}"
    for name, text in (("output", ended.out), ("error", ended.err)):
        if "Traceback" in text:
            return f"a traceback on standard {name}: {text[-200:]!r}"
        hidden = next((each for each in text if is_hidden(each)), None)
        if hidden is not None:
            where = text.index(hidden)
            return f"{hidden!r} on standard {name}: {text[max(0, where - 60) : where + 20]!r}"
    lines = [line for line in ended.err.splitlines() if not line.startswith("note: ")]
    # the parser's own errors: how the command is used, and what was wrong, in a frame
    usage = ended.err.startswith(("Usage: ", "╭─ Error"))
    if ended.status == 2 and not usage and len(lines) != 1:
        return f"{len(lines)} lines on standard error: {squeeze(ended.err)!r}"
    if ended.status == 1 and len(lines) > 1 and not usage:
        return f"{len(lines)} lines on standard error: {squeeze(ended.err)!r}"
    if ended.status == 0 and lines:
        return f"exit status 0, and on standard error: {squeeze(ended.err)!r}"
    if any(len(line) > LINE for line in lines):
        return f"a line of {max(map(len, lines)):,} characters on standard error"
    return None


def squeeze(text: str) -> str:
    """The start of an output, without the length of its frames."""
    return re.sub(r"[─ ]{3,}", "  ", text)[:300]


def is_hidden(character: str) -> bool:
    """Whether a terminal would obey a character instead of showing it."""
    return character != "\n" and (
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in TURNING
    )


# ---- tries -------------------------------------------------------------------------------------


def attempt(base: Path, draw: random.Random, number: int, folder: Path) -> str | None:
    """Type one command; what is bad about its end, or about the files that it left."""
    from transformers.utils import logging

    # as the command does in a process of its own, before transformers is imported
    logging.disable_progress_bar()
    here = folder / HERE
    shutil.copytree(base / HERE, here, symlinks=True)
    (here / "damaged.npz").write_bytes(damage_bytes(draw, (here / "heads.npz").read_bytes()))
    os.chdir(here)
    os.environ.update(COLUMNS="2000", HOME=str(folder))
    before = contents(here)
    arguments = compose(draw, number, base)
    ended = run_command(arguments, folder)
    found = complaint(ended) or left_behind(here, before, ended.status == 0)
    return found and f"{found}; attnflow {shown(arguments)}"


def shown(arguments: list[str]) -> str:
    """A command line to read."""
    return " ".join(
        each if each.isprintable() and " " not in each and each else ascii(each)
        for each in (
            f"{each[:40]}...({len(each):,} characters)" if len(each) > 200 else each
            for each in arguments
        )
    )


def contents(here: Path) -> dict[Path, bytes]:
    """All files of a folder with their bytes, except for a corpus's lock, which is empty."""
    files = (path for path in sorted(here.rglob("*")) if path.is_file())
    return {path: path.read_bytes() for path in files if path.name != LOCK}


def left_behind(here: Path, before: dict[Path, bytes], done: bool) -> str | None:
    """A file that is half-written, written by a command that failed, or not what it should be."""
    after = contents(here)
    for path, content in after.items():
        if path.name.startswith(".attnflow-"):
            return f"a temporary file is left: {path.relative_to(here)}"
        if (
            before.get(path) != content and path.parent == here
        ):  # a corpus run that failed may be resumed
            if not done:
                return f"the command failed, and wrote {path.name!r}"
            check_file(path)
    gone = sorted(set(before) - set(after))
    return f"{gone[0].name!r} is gone" if gone else None


def check_file(path: Path) -> None:
    """Raise what a reader of the file would raise."""
    ending = path.suffix.lower()
    if ending == ".json":
        json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse_constant)
    elif ending == ".npz":
        with np.load(path) as arrays:
            assert all(arrays[name].size >= 0 for name in arrays.files)
    else:
        assert path.stat().st_size > 0, f"{path.name} is empty"


def refuse_constant(name: str) -> Any:
    """JSON knows no NaN and no infinity."""
    raise ValueError(f"{name} is no JSON")
