"""`find_wirings`: the places of a model's attention calls in their blocks.

There is no table of families. A model is traced once, on a short input, and each attention call is
compared with the wiring patterns in turn. A call that fits none of them is refused by its name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from attnflow.errors import CaptureError
from attnflow.models.execution import ModuleCache, evaluating, running
from attnflow.models.model import Model
from attnflow.models.probe import make_probe_inputs
from attnflow.models.wiring.parallel import Parallel
from attnflow.models.wiring.post_norm import PostNorm
from attnflow.models.wiring.pre_norm import PreNorm
from attnflow.models.wiring.trace import Tap, Trace, is_same, run_trace
from attnflow.models.wiring.wiring import Miss, Wiring

if TYPE_CHECKING:
    import torch

# the first that fits counts: a sum that is normed before it goes on is also a sum
PATTERNS: tuple[type[Wiring], ...] = (PostNorm, PreNorm, Parallel)
REASONS = {
    Miss.NO_PROJECTION: "no projection was found that reads the output of {}",
    Miss.NO_SUM: "the sum that adds the output of {} to the residual stream was not found",
    Miss.OTHER_PATHS: "the output of {} also reaches later states outside of the residual stream",
}
patterns_in_use: ContextVar[tuple[type[Wiring], ...]] = ContextVar("patterns", default=PATTERNS)
wirings: ModuleCache[list[Wiring]] = ModuleCache()


@contextmanager
def use_patterns(*patterns: type[Wiring]) -> Iterator[None]:
    """A block in which these wiring patterns are tried after `PATTERNS`, in this thread.

    Parameters
    ----------
    patterns
        Subclasses of `Wiring`, in the order in which they are tried.
    """
    token = patterns_in_use.set((*patterns_in_use.get(), *patterns))
    try:
        yield
    finally:
        patterns_in_use.reset(token)


def find_wirings(model: Model) -> list[Wiring]:
    """The wiring of each attention call of a model, in order; a model is traced once."""
    if not model.probe.interface:
        raise CaptureError(
            f"{model.name} attends outside of transformers' attention interface, so its layers"
            " cannot be observed; use attention edges"
        )
    patterns = patterns_in_use.get()
    return wirings.get(model.model, patterns, lambda: trace_wirings(model, patterns))


def trace_wirings(model: Model, patterns: Sequence[type[Wiring]]) -> list[Wiring]:
    """The wirings of `find_wirings`, from a trace of the model."""
    import torch

    arguments, _ = make_probe_inputs(model, model.model)
    with (
        evaluating(model.model),
        running(model),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        trace = run_trace(model.model, arguments)
        found = [recognise(trace, call, patterns) for call in trace.calls]
        return name_blocks(trace, found)


def recognise(trace: Trace, call: int, patterns: Sequence[type[Wiring]]) -> Wiring:
    """The wiring of an attention call, by the first pattern that fits."""
    miss = Miss.NO_PROJECTION
    for pattern in patterns:
        found = pattern.recognise(trace, call)
        if isinstance(found, Wiring):
            return found
        miss = max(miss, found)
    raise CaptureError(f"{REASONS[miss].format(trace.describe(call))}; use attention edges")


# ---- blocks -------------------------------------------------------------------------------------


def name_blocks(trace: Trace, wirings: Sequence[Wiring]) -> list[Wiring]:
    """The same wirings, with their blocks where these are found."""
    names = [
        wiring.block or find_block(trace, number, wirings) for number, wiring in enumerate(wirings)
    ]
    kinds = {type(trace.modules[name]) for name in names if name is not None}
    return [
        replace(wiring, block=name or find_last_block(trace, wiring, kinds))
        for name, wiring in zip(names, wirings, strict=True)
    ]


def find_block(trace: Trace, number: int, wirings: Sequence[Wiring]) -> str | None:
    """The smallest module around a call whose output is the stream that the next block reads."""
    events, calls = trace.events, trace.calls
    for name in list_around(wirings[number]):
        end = trace.find_place(Tap("out", name), range(calls[number], len(events)))
        if end is None:
            continue
        for later in range(number + 1, len(calls)):
            # cross-attention is inside a block, after self-attention
            if calls[later] < end or wirings[later].crosses:
                continue
            before = range(calls[later] - 1, -1, -1)
            residual = trace.find_place(wirings[later].residual, before)
            if residual is not None and is_same(events[residual].state, events[end].state):
                return name
            break
    return None


def find_last_block(
    trace: Trace, wiring: Wiring, kinds: "set[type[torch.nn.Module]]"
) -> str | None:
    """The block of the last attention of a stack, which no other block follows.

    It is of the kind of those before it; of a single one, the largest module around it in a list.
    """
    around = list_around(wiring)
    similar = (name for name in around if type(trace.modules[name]) in kinds)
    listed = (name for name in reversed(around) if name.rpartition(".")[2].isdigit())
    return next(similar, None) or next(listed, None)


def list_around(wiring: Wiring) -> list[str]:
    """The names of the modules around an attention, the smallest first."""
    parts = wiring.attention.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
