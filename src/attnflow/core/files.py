"""Writing files so that nothing is ever half-written: beside the final name first, then renamed."""

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
from pathlib import Path
from typing import IO, Any, cast

from attnflow.errors import FileError

Writer = Callable[[IO[bytes]], object]
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # Windows has no pipes among its files
PICTURES = (".png", ".svg", ".pdf")
BINARY = getattr(os, "O_BINARY", 0)  # or Windows would write two characters per line break


def write_file(path: str | os.PathLike[str], write: Writer) -> Path:
    """Call `write` with a binary file beside `path`, then rename it to `path`.

    On any failure `path` stays as it was. A file that is overwritten keeps its permissions; a new
    one follows the umask.
    """
    beside = None
    try:
        target = check_writable(path)
        name = target.parent / f".attnflow-{secrets.token_hex(8)}"
        # not by tempfile, whose files are private: so the system applies the umask, which no
        # thread can read without setting it for all
        with open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666), "w+b") as file:
            beside = name
            if target.exists():
                beside.chmod(stat.S_IMODE(target.stat().st_mode))
            write(file)
            file.flush()
            # or, after a power cut, an empty file may stand under the final name
            os.fsync(file.fileno())
        beside.replace(target)
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot write {Path(path)}: {getattr(error, 'strerror', None) or error}"
        ) from error
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)
    return Path(path)


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


def list_values(array: Any) -> object:
    """Scalars and arrays of numpy, and tensors of torch, as what JSON can hold."""
    if not hasattr(array, "tolist"):
        raise TypeError(f"JSON cannot hold a {type(array).__name__}")
    return array.tolist()


def clean_json(content: object) -> object:
    """The same content with arrays as lists, and null for numbers that are not finite."""
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
    number = 0
    try:
        with open_input(path) as plain, decompress(path, plain) as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, FileError):  # of whoever reads these lines
            raise
        raise FileError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error


def open_input(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read, without blocking: a pipe with no writer is empty, a device refused."""

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


def decompress(path: str | os.PathLike[str], file: IO[bytes]) -> IO[bytes]:
    """The file, decompressed by gzip if its name ends in .gz."""
    return cast(IO[bytes], gzip.open(file)) if str(path).endswith(".gz") else file


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The file to write to, links resolved; fails early, before anything is computed."""
    try:
        # not by Path.resolve, which raises RuntimeError where links lead in a circle
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise FileError(f"cannot write {path}: its links lead in a circle")
        if target.is_dir():
            raise FileError(f"cannot write {path}: it is a folder; give the name of a file")
        if target.exists() and not target.is_file():
            raise FileError(f"cannot write {path}: it is no ordinary file")
        if not target.parent.is_dir():
            if target.parent.exists():
                raise FileError(f"cannot write {path}: {target.parent} is a file, not a folder")
            raise FileError(f"cannot write {path}: the folder {target.parent} does not exist")
        if target.exists() and not os.access(target, os.W_OK):
            raise FileError(f"cannot write {path}: it exists and is read-only")
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return target


def check_ending(path: str | os.PathLike[str], endings: Iterable[str]) -> str:
    """The ending of a file's name, if there is a writer for it."""
    ending = Path(path).suffix.lower()
    if ending not in endings:
        raise FileError(
            f"cannot write {path}: the ending must be one of {', '.join(endings)};"
            f" got {ending or 'none'}"
        )
    return ending


def write_by_ending(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Path:
    """Write with the writer that belongs to the ending of `path`."""
    return write_file(path, writers[check_ending(path, writers)])


def write_csv(file: IO[bytes], header: list[str], rows: Iterable[tuple[object, ...]]) -> None:
    """Write a table in UTF-8, row by row; lone surrogates, which it cannot encode, are escaped."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    text.flush()
    text.detach()
