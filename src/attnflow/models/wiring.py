"""How attention stands in a model's blocks: what carries its output, and what it is added to.

No table of families says it: a model is traced once, on a short input, and arithmetic says it. The
output of attention enters a projection; what leaves it, the *branch*, may pass a norm or a factor;
a later state equals an earlier one plus the branch, and these two are the residual stream before
and after. Where no such sum is seen, attention stands otherwise than anybody has looked at, and
what builds on the wiring is refused, by the attention's name.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnflow.errors import CaptureError
from attnflow.models.listening import Attend, intercepting

if TYPE_CHECKING:
    import torch

# by bytes per number: two tensors that differ by this share of their length are the same ...
SAME = {8: 1e-5, 4: 1e-5, 2: 5e-3}
# ... and a sum may miss its total by this share of the part that is added
ADDS_UP = {8: 1e-4, 4: 1e-4, 2: 5e-2}
LEAST_FACTOR = 1e-3  # a branch multiplied by less is not added
LOOK_BACK = 16  # different states before attention, one of which is the residual
LOOK_AHEAD = 80  # events after the projection, among which the sum must be


@dataclass(frozen=True)
class Tap:
    """Where a state is seen: as the first argument ("in") or the result ("out") of a module."""

    side: str
    module: str


@dataclass(frozen=True)
class Wiring:
    """How one attention call stands in its block."""

    attention: str  # the module that attends
    projection: str  # the module that joins its heads
    residual: Tap  # x, before attention
    passed: tuple[str, ...]  # modules that the branch passes before it is added: norms, factors
    factor: float  # by which the branch is multiplied then
    stream: Tap  # x plus the branch
    beside: str | None = None  # a module whose output is added at the same time: an MLP
    norm: str | None = None  # post-norm: what the stream passes before anybody reads it


@dataclass(frozen=True, eq=False)
class Event:
    """A state that was seen, or a call of attention."""

    tap: Tap | None  # None: the output of attention
    module: str
    state: "torch.Tensor"  # [position, width], all sequences one below another


def trace(model: Any, arguments: dict[str, Any]) -> list[Event]:
    """What passes through a model's modules, in order."""
    import torch

    events: list[Event] = []
    names = {module: name for name, module in model.named_modules()}

    def note(side: str, module: Any, value: Any) -> None:
        state = first_state(value)
        if state is not None:
            flat = state.detach().reshape(-1, state.shape[-1])
            events.append(Event(Tap(side, names[module]), names[module], flat))

    def before(module: Any, given: Any, named: dict[str, Any]) -> None:
        note("in", module, given if given else named.get("hidden_states"))

    def after(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        note("out", module, output)

    def listen(attend: Attend, module: Any, *given: Any, **options: Any) -> Any:
        output = attend.function(module, *given, **options)
        joined = output[0].detach()
        flat = joined.reshape(joined.shape[0] * joined.shape[1], -1)
        events.append(Event(None, names.get(module, ""), flat))
        return output

    with ExitStack() as hooks, torch.no_grad(), intercepting(listen):
        for module in names:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        model(**arguments)
    return events


def first_state(value: Any) -> "torch.Tensor | None":
    """The first tensor of states in what a module was given, or gave back."""
    import torch

    while isinstance(value, tuple | list):
        if not value:
            return None
        value = value[0]
    value = getattr(value, "last_hidden_state", value)
    is_state = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2
    return value if is_state else None


def find_wirings(model: Any, arguments: dict[str, Any]) -> list[Wiring]:
    """How each attention call of a model stands in its block, in the order of the calls."""
    events = trace(model, arguments)
    modules = dict(model.named_modules())
    calls = [place for place, event in enumerate(events) if event.tap is None]
    return [find_wiring(events, place, modules) for place in calls]


def find_wiring(events: list[Event], call: int, modules: dict[str, Any]) -> Wiring:
    """How the attention call at one place among the events stands in its block."""
    name = events[call].module
    start, projection = find_projection(events, call, modules)
    branches = list(follow_branch(events, start))
    width = branches[0][0].shape
    earlier: list[Event] = []
    for event in reversed(events[:call]):
        if event.tap is not None and event.state.shape == width:
            if not any(event.state.data_ptr() == other.state.data_ptr() for other in earlier):
                earlier.append(event)
            if len(earlier) == LOOK_BACK:
                break
    ahead = range(start + 1, min(start + LOOK_AHEAD, len(events)))
    later = [place for place in ahead if events[place].state.shape == width]
    later = [place for place in later if events[place].tap is not None]
    for beside in (False, True):
        for place in later:
            best = find_sum(events, start, place, earlier, branches, beside)
            if best is None:
                continue
            residual, passed, factor, module = best
            stream = events[place].tap
            assert stream is not None
            norm = None if beside else find_post_norm(events, place, modules)
            return Wiring(name, projection, residual, passed, factor, stream, module, norm)
    raise CaptureError(
        f"what {name} ({type(modules[name]).__name__}) adds to the residual stream was not found"
    )


def find_projection(events: list[Event], call: int, modules: dict[str, Any]) -> tuple[int, str]:
    """Where the module that joins the heads gives its result, and its name."""
    joined = events[call].state
    for place in range(call + 1, min(call + LOOK_AHEAD, len(events))):
        event = events[place]
        if event.tap is None:
            break
        entered = (
            event.tap.side == "in" and getattr(modules[event.module], "weight", None) is not None
        )
        if entered and event.state.numel() == joined.numel() and is_same(event.state, joined):
            for after in range(place + 1, len(events)):
                if events[after].tap == Tap("out", event.module):
                    return after, event.module
    name = events[call].module
    raise CaptureError(
        f"no projection was found that reads what {name} ({type(modules[name]).__name__}) gives"
    )


def follow_branch(
    events: list[Event], start: int
) -> Iterator[tuple["torch.Tensor", tuple[str, ...]]]:
    """The branch, and what modules made of it, each with the names of those that it passed."""
    shown: list[tuple[torch.Tensor, tuple[str, ...]]] = [(events[start].state, ())]
    yield shown[0]
    for place in range(start + 1, min(start + LOOK_AHEAD, len(events))):
        event = events[place]
        if event.tap is None or event.tap.side != "in":
            continue
        for state, passed in list(shown):
            if state.shape != event.state.shape or not is_same(state, event.state):
                continue
            made = find_output(events, place)
            if made is not None and made.shape == state.shape and not is_same(made, state):
                shown.append((made, (*passed, event.module)))
                yield shown[-1]
            break


def find_output(events: list[Event], entered: int) -> "torch.Tensor | None":
    """What a module gave back whose input was seen at a place."""
    wanted = Tap("out", events[entered].module)
    for event in events[entered + 1 :]:
        if event.tap == wanted:
            return event.state
    return None


def find_sum(
    events: list[Event],
    start: int,
    place: int,
    earlier: list[Event],
    branches: list[tuple["torch.Tensor", tuple[str, ...]]],
    beside: bool,
) -> tuple[Tap, tuple[str, ...], float, str | None] | None:
    """How the state at a place is an earlier one plus a multiple of the branch; None if it is not.

    beside: plus the output of another module as well.
    """
    total = events[place].state
    best: tuple[float, Any] = (ADDS_UP[total.element_size()], None)
    for event in earlier:
        rest = total - event.state
        for branch, passed in branches:
            length = float(branch.norm())
            if not beside:
                factor = float((rest * branch).sum()) / max(length**2, 1e-30)
                error = float((rest - factor * branch).norm()) / max(abs(factor) * length, 1e-30)
                if error < best[0] and abs(factor) > LEAST_FACTOR:
                    best = (error, (event.tap, passed, factor, None))
                continue
            for other in events[start + 1 : place + 1]:
                if other.tap is None or other.tap.side != "out" or other.state.shape != rest.shape:
                    continue
                error = float((rest - branch - other.state).norm()) / max(length, 1e-30)
                if error < best[0]:
                    best = (error, (event.tap, passed, 1.0, other.module))
    return best[1]  # type: ignore[no-any-return]


def find_post_norm(events: list[Event], place: int, modules: dict[str, Any]) -> str | None:
    """The norm that the stream passes before it goes on; None where it goes on as it is.

    What is added to next says which of the two is the stream.
    """
    event = events[place]
    if event.tap is None or event.tap.side != "in" or is_container(modules[event.module]):
        return None
    made = find_output(events, place)
    if made is None or made.shape != event.state.shape or is_same(made, event.state):
        return None
    outputs: list[torch.Tensor] = []
    for later in events[place + 1 :]:
        if later.tap is None or later.state.shape != made.shape:
            continue
        for base, norm in ((event.state, None), (made, event.module)):
            rest = later.state - base
            for added in outputs:
                limit = ADDS_UP[added.element_size()]
                if float((rest - added).norm()) <= limit * float(added.norm()):
                    return norm
        if later.tap.side == "out" and not is_same(later.state, made):
            outputs.append(later.state)
        if len(outputs) > LOOK_AHEAD:
            break
    return None


def is_container(module: Any) -> bool:
    """Whether a module holds others: then it is no norm."""
    return next(iter(module.children()), None) is not None


def is_same(first: "torch.Tensor", second: "torch.Tensor") -> bool:
    """Whether two states of one size are the same numbers."""
    one, other = first.reshape(-1), second.reshape(-1)
    if one.shape != other.shape:
        return False
    limit = SAME[other.element_size()]
    return float((one - other).float().norm()) <= limit * float(other.float().norm())
