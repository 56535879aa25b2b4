"""Running a model: in eval mode, also from several threads, and with errors that name it."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

from attnflow.core.memory import is_of_memory
from attnflow.core.provenance import MODEL_LIBRARIES
from attnflow.errors import AttnFlowError, CaptureError, MissingExtraError
from attnflow.models.context import set_within
from attnflow.models.samples import sample_state

if TYPE_CHECKING:
    import torch

    from attnflow.models.model import Model

Given = TypeVar("Given")
mode_lock = threading.Lock()
# modules that were in training mode, and how many blocks keep each of them out of it
held: "dict[torch.nn.Module, int]" = {}
# modules that were compiled in place, how many blocks run each of them eagerly, and its compiled
# call: hooks and intercepted attention are not what was compiled
paused: "dict[torch.nn.Module, tuple[int, object]]" = {}


@contextmanager
def evaluating(module: "torch.nn.Module") -> Iterator[None]:
    """A block in which a torch module is in eval mode and runs eagerly, every part of it.

    Then each part is as it was. Blocks may overlap, in one thread or several: the last one to end
    switches back.
    """
    with mode_lock:
        parts = list(module.modules())
        mine = [part for part in parts if part.training or part in held]
        for part in mine:
            held[part] = held.get(part, 0) + 1
            part.training = False
        compiled = [part for part in parts if part._compiled_call_impl is not None]
        for part in compiled:
            count, call = paused.get(part, (0, part._compiled_call_impl))
            paused[part] = count + 1, call
            # never None, since another thread may be about to call it
            part._compiled_call_impl = part._call_impl
    try:
        yield
    finally:
        with mode_lock:
            for part in compiled:
                count, call = paused.pop(part)
                if count > 1:
                    paused[part] = count - 1, call
                else:
                    part._compiled_call_impl = call
            for part in mine:
                held[part] -= 1
                if not held[part]:
                    del held[part]
                    part.training = True


# the states of modules that do not change within a block of this thread
states_in_use: "ContextVar[Mapping[torch.nn.Module, Hashable]]" = ContextVar(
    "states_in_use", default=MappingProxyType({})
)


@contextmanager
def unchanged(module: "torch.nn.Module") -> Iterator[None]:
    """Within this context, a module does not change: caches sample its weights once, not often."""
    known = states_in_use.get()
    if module in known:
        yield
    else:
        with set_within(states_in_use, {**known, module: sample_state(module)}):
            yield


class ModuleCache(Generic[Given]):
    """Values that are computed once per torch module and key, in whichever thread comes first.

    They are computed again when the module has changed: its weights, however they were written to,
    or its parts. Within `unchanged`, this is asked once.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: WeakKeyDictionary[torch.nn.Module, CacheEntry[Given]] = WeakKeyDictionary()

    def get(self, module: "torch.nn.Module", key: Hashable, compute: Callable[[], Given]) -> Given:
        """The value of a module and a key; other threads wait for the values of this module."""
        with self.lock:
            entry = self.entries.setdefault(module, CacheEntry())
        with entry.lock:
            state = states_in_use.get().get(module)
            if state is None:
                state = sample_state(module)
            if state != entry.state:
                entry.state, entry.values = state, {}
            if key not in entry.values:
                entry.values[key] = compute()
            return entry.values[key]


@dataclass
class CacheEntry(Generic[Given]):
    """The values of one module, valid for one state of it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    state: Hashable = None
    values: dict[Hashable, Given] = field(default_factory=dict)


@contextmanager
def running(model: "Model") -> Iterator[None]:
    """A block in which a model runs: its exceptions become errors of one line that name it."""
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
    """Raise an error that names the extra to install if torch or another library is missing.

    torch is imported, the others are only searched: transformers takes seconds to import.
    """
    message = f"{user} needs {' and '.join(libraries)}: pip install 'attnflow[models]'"
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(message) from error
    if any(find_spec(library) is None for library in libraries):
        raise MissingExtraError(message)
