"""The sum that adds an attention's branch to the residual stream, found by arithmetic.

The output of attention enters a projection; its output, the *branch*, may pass a norm or a factor;
a later state equals an earlier one plus the branch, and these two are the residual stream before
and after. The backward pass shows whether that is all: later states may depend on the output of
attention, and on the stream before it, only through that sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from attnflow.models.wiring.trace import Tap, Trace, TraceEvent, is_same, list_same
from attnflow.models.wiring.wiring import BranchWiring, Miss

if TYPE_CHECKING:
    import torch

# by bytes per number: a sum may miss its total by this share of the part that is added
ADDS_UP = {8: 1e-4, 4: 1e-4, 2: 5e-2}
# ... and two gradients that differ by this share of their length are the same
SAME_GRADIENT = {8: 1e-3, 4: 1e-3, 2: 5e-2}
NO_GRADIENT = "WarnNotImplemented"  # the autograd step of an operation without a derivative
LEAST_FACTOR = 1e-3  # a branch multiplied by less is not added
LOOK_BACK = 16  # different states before attention, one of which is the residual
LOOK_AHEAD = 80  # events after the projection, among which the sum must be
Pattern = TypeVar("Pattern", bound=BranchWiring)


@dataclass(frozen=True, eq=False)
class Branch:
    """The output of a projection, perhaps passed through other modules."""

    event: TraceEvent
    passed: tuple[str, ...] = ()  # the names of these modules


class Parts(NamedTuple):
    """The parts of a sum: an earlier state, a multiple of the branch, and perhaps more."""

    residual: TraceEvent  # the earlier state
    branch: Branch
    factor: float = 1.0
    beside: str | None = None  # a module whose output is added at the same time


@dataclass(frozen=True, eq=False)
class Sum:
    """A state that equals an earlier one plus a multiple of the branch."""

    attention: str
    projection: str
    parts: Parts
    place: int  # of the sum among the events
    stream: Tap  # where it is observed

    def make_wiring(self, pattern: type[Pattern], *own: str) -> Pattern:
        """The wiring by a pattern. own: the fields that the pattern adds to `BranchWiring`."""
        residual, branch, factor, _ = self.parts
        assert residual.tap is not None
        start = (self.attention, residual.tap, self.projection)
        return pattern(*start, branch.passed, factor, self.stream, *own)


def find_sum(trace: Trace, call: int, *, beside: bool = False) -> Sum | Miss:
    """The sum through which all of an attention call reaches later states.

    beside: whether another module's output is added too, which may read the residual as well. The
    result is kept with the trace, because several patterns build on it.
    """
    key = (call, beside)
    if key not in trace.sums:
        trace.sums[key] = search_sum(trace, call, beside)
    return trace.sums[key]


def search_sum(trace: Trace, call: int, beside: bool) -> Sum | Miss:
    """The sum that `find_sum` returns."""
    miss = Miss.NO_PROJECTION
    for start in find_projections(trace, call):
        found = next(list_sums(trace, call, start, beside), None)
        if found is None:
            miss = max(miss, Miss.NO_SUM)
        elif carries_all(trace, call, found):
            return found
        else:
            miss = Miss.OTHER_PATHS
    return miss


def list_sums(trace: Trace, call: int, start: int, beside: bool) -> Iterator[Sum]:
    """The sums with the branch of a projection whose output is the event at `start`."""
    events = trace.events
    shape = events[start].state.shape
    branches = list(follow_branch(trace, start))
    earlier = list_earlier(events[:call], shape)
    outputs: list[TraceEvent] = []
    for place in range(start + 1, min(start + LOOK_AHEAD, len(events))):
        event = events[place]
        if event.tap is None or event.state.shape != shape:
            continue
        if event.tap.side == "out":
            outputs.append(event)
        parts = fit_sum(event.state, earlier, branches, outputs if beside else None)
        if parts is not None:
            yield Sum(events[call].module, events[start].module, parts, place, event.tap)


def list_earlier(events: Sequence[TraceEvent], shape: "torch.Size") -> list[TraceEvent]:
    """The last few different states of a shape, the latest first."""
    earlier: dict[int, TraceEvent] = {}
    for event in reversed(events):
        if event.tap is not None and event.state.shape == shape:
            earlier.setdefault(event.state.data_ptr(), event)
        if len(earlier) == LOOK_BACK:
            break
    return list(earlier.values())


def find_projections(trace: Trace, call: int) -> list[int]:
    """The places of the outputs of modules that read the joined heads.

    Those with weights of their own come first; then modules around them, such as adapters.
    """
    events = trace.events
    joined = events[call].state
    found: dict[bool, list[int]] = {True: [], False: []}
    for place in range(call + 1, min(call + LOOK_AHEAD, len(events))):
        event = events[place]
        if event.tap is None:
            break
        if event.tap.side != "in" or event.state.numel() != joined.numel():
            continue
        if not is_same(event.state, joined):
            continue
        result = trace.find_place(Tap("out", event.module), range(place, len(events)))
        if result is not None:
            weighs = getattr(trace.modules[event.module], "weight", None) is not None
            found[weighs].append(result)
    return found[True] + found[False]


def follow_branch(trace: Trace, start: int) -> Iterator[Branch]:
    """The branch that begins at a place, and its outputs of later modules."""
    events = trace.events
    shown = [Branch(events[start])]
    yield shown[0]
    for place in range(start + 1, min(start + LOOK_AHEAD, len(events))):
        event = events[place]
        if event.tap is None or event.tap.side != "in":
            continue
        for branch in list(shown):
            state = branch.event.state
            if state.shape != event.state.shape or not is_same(state, event.state):
                continue
            made = trace.find_output(place)
            if made is None or made.state.shape != state.shape or is_same(made.state, state):
                break
            shown.append(Branch(made, (*branch.passed, event.module)))
            yield shown[-1]
            break


def fit_sum(
    total: "torch.Tensor",
    earlier: Sequence[TraceEvent],
    branches: Sequence[Branch],
    others: Sequence[TraceEvent] | None,
) -> Parts | None:
    """The parts that make up a total [position, width] with the least error, if any do.

    others: the outputs of other modules, one of which is a part; None for a multiple of the branch.
    """
    least, best = ADDS_UP[total.element_size()], None
    for event in earlier:
        rest = total - event.state
        for branch in branches:
            for error, parts in list_fits(rest, event, branch, others):
                if error < least:
                    least, best = error, parts
    return best


def list_fits(
    rest: "torch.Tensor", event: TraceEvent, branch: Branch, others: Sequence[TraceEvent] | None
) -> Iterator[tuple[float, Parts]]:
    """What may make up a total beside an earlier state, with the error of each."""
    added = branch.event.state
    length = float(added.norm())
    if others is None:
        factor = float((rest * added).sum()) / max(length**2, 1e-30)
        if abs(factor) > LEAST_FACTOR:
            error = float((rest - factor * added).norm()) / max(abs(factor) * length, 1e-30)
            yield error, Parts(event, branch, factor)
        return
    for other in others:
        error = float((rest - added - other.state).norm()) / max(length, 1e-30)
        yield error, Parts(event, branch, beside=other.module)


# Up to the next attention, let R be any number that depends on all that was observed after the sum.
# If the output of attention, J, reaches it through the sum S = x + factor * branch alone, then
# dR/dJ is dR/dS, times the factor, back through the branch; and dR/dx is dR/dS. A second projection
# of J, a branch that is added once more, or a stream that goes on past the sum make a difference.
def carries_all(trace: Trace, call: int, found: Sum) -> bool:
    """Whether later states depend on attention, and on the residual, through one sum alone.

    The residual is left out where a module beside attention reads it too.
    """
    import torch

    events, place, branch = trace.events, found.place, found.parts.branch.event
    later = list(takewhile(lambda event: event.tap is not None, events[place:]))
    joined = events[call].live
    shown = [event.live for event in later if event.live.requires_grad]
    can_tell = branch.live.requires_grad and bool(shown)
    if not can_tell or lacks_gradient((*events[call:place], *later)):
        return True  # quantised weights: what the layer mixed must still add up
    generator = torch.Generator().manual_seed(0)
    number = torch.zeros((), device=joined.device)
    for state in shown:
        noise = torch.randn(state.shape, generator=generator) / state.numel() ** 0.5
        number = number + (state * noise.to(state.device, state.dtype)).sum().float()
    totals = list_same(later, events[place])
    before = list_same(events[:call], found.parts.residual) if found.parts.beside is None else []
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    by_joined, *rest = torch.autograd.grad(number, [joined, *totals, *before], **options)
    by_totals, by_before = rest[: len(totals)], rest[len(totals) :]
    limit = SAME_GRADIENT[joined.element_size()]
    for by_total in by_totals:
        given = found.parts.factor * by_total
        given = given.reshape(branch.live.shape).to(branch.live.dtype)
        (through,) = torch.autograd.grad(branch.live, joined, given, **options)
        if is_close(through, by_joined, limit) and (
            not before or any(is_close(one, by_total, limit) for one in by_before)
        ):
            return True
    return False


def lacks_gradient(events: Sequence[TraceEvent]) -> bool:
    """Whether an operation without a derivative made any of these states."""
    steps = (event.live.grad_fn for event in events)
    return any(step is not None and NO_GRADIENT in step.name() for step in steps)


def is_close(first: "torch.Tensor", second: "torch.Tensor", limit: float) -> bool:
    """Whether two gradients differ by at most a share of the second one's length."""
    first, second = first.flatten().float(), second.flatten().float()
    return float((first - second).norm()) <= limit * float(second.norm())
