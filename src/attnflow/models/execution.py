"""Running a model: in eval mode, also from several threads, and with errors that name it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attnflow.core.memory import is_of_memory
from attnflow.core.provenance import MODEL_LIBRARIES
from attnflow.errors import AttnFlowError, CaptureError, MissingExtraError

if TYPE_CHECKING:
    from attnflow.models.model import Model

mode_lock = threading.Lock()
# modules that were in training mode, and how many blocks keep each of them out of it
held: dict[Any, int] = {}


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """A block in which a torch module is in eval mode, every part of it; then each is as it was.

    Blocks may overlap, in one thread or several: the last one to end switches back.
    """
    with mode_lock:
        mine = [part for part in module.modules() if part.training or part in held]
        for part in mine:
            held[part] = held.get(part, 0) + 1
            part.training = False
    try:
        yield
    finally:
        with mode_lock:
            for part in mine:
                held[part] -= 1
                if not held[part]:
                    del held[part]
                    part.training = True


@contextmanager
def running(model: "Model") -> Iterator[None]:
    """A block in which a model computes: whatever it raises becomes one line that names it."""
    try:
        yield
    except (AttnFlowError, MemoryError):
        raise
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        if is_of_memory(error):
            raise MemoryError(line) from error
        raise CaptureError(
            f"{model.name} failed on this input: {type(error).__name__}: {line[:300]}"
        ) from error


def require_torch(user: str = "a model", libraries: Sequence[str] = MODEL_LIBRARIES) -> None:
    """Refuse early, and by the extra's name, where torch or another library is missing.

    torch is imported, the others are only looked for: transformers takes seconds to import.
    """
    message = f"{user} needs {' and '.join(libraries)}: pip install 'attnflow[models]'"
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(message) from error
    if any(find_spec(library) is None for library in libraries):
        raise MissingExtraError(message)
