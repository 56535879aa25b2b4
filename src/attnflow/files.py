"""Writing files so that nothing is ever half-written: beside the final name first, then renamed."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from attnflow.errors import FileError

Writer = Callable[[IO[bytes]], None]


def write_file(path: str | os.PathLike[str], write: Writer) -> Path:
    """Call `write` with a binary file beside `path`, then rename it to `path`; on any failure `path` stays as it was."""
    target = Path(path)
    if target.is_dir():
        raise FileError(f"cannot write {target}: it is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise FileError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.exists() and not os.access(target, os.W_OK):
        raise FileError(f"cannot write {target}: it exists and is read-only")
    beside = None
    try:
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:100]}.", delete=False) as file:
            beside = Path(file.name)
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o666 & ~umask)  # temporary files are private, the result is an ordinary file
        beside.replace(target)
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)
    return target


def by_ending(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Path:
    """Write with the writer that belongs to the ending of `path`."""
    ending = Path(path).suffix.lower()
    if ending not in writers:
        raise FileError(f"cannot write {Path(path)}: the ending must be one of {', '.join(writers)}; got {ending or 'none'}")
    return write_file(path, writers[ending])
