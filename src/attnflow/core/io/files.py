"""Files: written atomically, under a temporary name that is then replaced; and read."""

import csv
import errno
import gzip
import io
import json
import math
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from attnflow.errors import FileError, OptionError

Writer = Callable[[IO[bytes]], object]
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # Windows has no pipes among its files
PICTURES = (".png", ".svg", ".pdf")
BINARY = getattr(os, "O_BINARY", 0)  # without it Windows writes two characters per line break


def write_file(path: str | os.PathLike[str], write: Writer) -> Path:
    """Call `write` with a binary file beside `path`, then rename it to `path`.

    On any failure `path` stays as it was. A file that is overwritten keeps its permissions; a new
    one follows the umask.
    """
    target = check_writable(path)
    name = target.parent / f".attnflow-{secrets.token_hex(8)}"
    beside = None
    try:
        # not by tempfile, whose files are private: here the system applies the umask, which no
        # thread can read without setting it for all
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY
        with name_failures("write", path), open(os.open(name, flags, 0o666), "w+b") as file:
            beside = name
            if target.exists():
                beside.chmod(stat.S_IMODE(target.stat().st_mode))
            write(file)
            file.flush()
            # otherwise a power cut may leave an empty file under the final name
            os.fsync(file.fileno())
        with name_failures("write", path):
            beside.replace(target)
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)
    return Path(path)


@contextmanager
def name_failures(verb: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the system, and of decompression, into a `FileError` that names the file."""
    try:
        yield
    except FileError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot {verb} {Path(path)}: {reason}") from error


def dump_json(content: object, *, separators: tuple[str, str] | None = None) -> str:
    """Standard JSON: numbers that are not finite become null.

    content: dicts, lists, tuples, strings, numbers, None; numpy's scalars and arrays too.
    separators: as `json.dumps` takes them.

    >>> dump_json({"values": [0.5, float("nan")]})
    '{"values": [0.5, null]}'
    """
    try:
        return json.dumps(content, allow_nan=False, separators=separators, default=list_values)
    except (ValueError, TypeError):
        return json.dumps(clean_json(content), allow_nan=False, separators=separators)


def list_values(array: object) -> object:
    """Scalars and arrays of numpy, and tensors of torch, as numbers and lists."""
    if not hasattr(array, "tolist"):
        raise TypeError(f"JSON cannot hold a {type(array).__name__}")
    return array.tolist()


def clean_json(content: object) -> object:
    """The same content with arrays as lists, and None for numbers that are not finite."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {clean_json(key): clean_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [clean_json(value) for value in content]
    if hasattr(content, "tolist"):
        return clean_json(list_values(content))
    return content


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """The lines of a text in UTF-8 with their numbers from 1; blank ones are left out.

    The file is decompressed by gzip if its name ends in .gz.
    """
    with name_failures("read", path), open_file(path) as plain:
        file = cast(IO[bytes], gzip.GzipFile(fileobj=plain)) if str(path).endswith(".gz") else plain
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise FileError(
                    f"{path}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8"
                ) from error
            if text.strip():
                yield number, text


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read without blocking: a pipe without a writer is empty, a device refused."""

    def open_now(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | NONBLOCK)
        if NONBLOCK:
            os.set_blocking(descriptor, True)
        return descriptor

    file = open(path, "rb", opener=open_now)  # noqa: SIM115
    kind = os.fstat(file.fileno()).st_mode
    if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        file.close()
        raise OSError(errno.EINVAL, "it is a device; give a file")
    return file


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The file to write to, with links resolved; refuse what cannot be written."""
    with name_failures("write", path):
        # not by Path.resolve, which raises RuntimeError if links lead in a circle
        target = Path(os.path.realpath(path))
        folder = target.parent
        problems = {
            "its links lead in a circle": target.is_symlink(),
            "it is a folder; give the name of a file": target.is_dir(),
            "it is not an ordinary file": target.exists() and not target.is_file(),
            f"{folder} is a file, not a folder": folder.exists() and not folder.is_dir(),
            f"the folder {folder} does not exist": not folder.exists(),
            "it exists and is read-only": target.exists() and not os.access(target, os.W_OK),
        }
    for problem, is_found in problems.items():
        if is_found:
            raise FileError(f"cannot write {path}: {problem}")
    return target


def check_ending(path: str | os.PathLike[str], endings: Iterable[str]) -> str:
    """The ending of a file's name, one of `endings`."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"a file must be given by its path; got {type(path).__name__}")
    ending = Path(path).suffix.lower()
    if ending not in endings:
        raise FileError(
            f"cannot write {path}: the ending must be one of {', '.join(endings)};"
            f" got {ending or 'none'}"
        )
    return ending


def write_by_ending(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Path:
    """Write with the writer for the ending of `path`."""
    return write_file(path, writers[check_ending(path, writers)])


def write_csv(file: IO[bytes], header: list[str], rows: Iterable[tuple[object, ...]]) -> None:
    """Write a table in UTF-8, row by row; lone surrogates, which it cannot encode, are escaped."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    text.flush()
    text.detach()


def write_npz(file: IO[bytes], arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write arrays, or what numpy can make arrays of, compressed."""
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
