"""How attention stands in a model's blocks: what carries its output, and what it is added to.

No table of families says it: a model is traced once, on a short input, and arithmetic says it. The
output of attention enters a projection; what leaves it, the *branch*, may pass a norm or a factor;
a later state equals an earlier one plus the branch, and these two are the residual stream before
and after. The way back says whether that is all: nothing later may depend on what attention gave,
or on the stream before it, but through that sum. Where no such sum is seen, or where it is not all,
attention stands otherwise than anybody has looked at, and what builds on the wiring is refused, by
the attention's name.
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
# ... and two gradients that differ by this share of their length are the same
SAME_GRADIENT = {8: 1e-3, 4: 1e-3, 2: 5e-2}
NO_WAY_BACK = "WarnNotImplemented"  # how torch calls the gradient of what has none
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
    live: "torch.Tensor"  # the same as it was seen, with its way back


def trace(model: Any, arguments: dict[str, Any]) -> list[Event]:
    """What passes through a model's modules, in order."""
    import torch

    events: list[Event] = []
    names = {module: name for name, module in model.named_modules()}

    def note(side: str, module: Any, value: Any) -> None:
        state = first_state(value)
        if state is not None:
            flat = state.detach().reshape(-1, state.shape[-1])
            events.append(Event(Tap(side, names[module]), names[module], flat, state))

    def before(module: Any, given: Any, named: dict[str, Any]) -> None:
        note("in", module, given if given else named.get("hidden_states"))

    def after(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        note("out", module, output)

    def listen(attend: Attend, module: Any, *given: Any, **options: Any) -> Any:
        output = attend.function(module, *given, **options)
        joined = output[0].detach().requires_grad_()  # the way back ends here
        flat = joined.detach().reshape(joined.shape[0] * joined.shape[1], -1)
        events.append(Event(None, names.get(module, ""), flat, joined))
        return (joined, *output[1:])

    with ExitStack() as hooks, intercepting(listen):
        for module in names:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        given = {name: copy_inference(value) for name, value in arguments.items()}
        weights = {
            name: copy_inference(weight)
            for name, weight in (*model.named_parameters(), *model.named_buffers())
            if weight.is_inference()
        }
        torch.func.functional_call(model, weights, kwargs=given)
    return events


def copy_inference(value: Any) -> Any:
    """A tensor made in inference mode, as one that has a way back; anything else as it is."""
    return value.clone() if getattr(value, "is_inference", bool)() else value


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
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        events = trace(model, arguments)
        modules = dict(model.named_modules())
        calls = [place for place, event in enumerate(events) if event.tap is None]
        return [find_wiring(events, place, modules) for place in calls]


def find_wiring(events: list[Event], call: int, modules: dict[str, Any]) -> Wiring:
    """How the attention call at one place among the events stands in its block."""
    name = events[call].module
    kind = type(modules[name]).__name__
    reason = f"no projection was found that reads what {name} ({kind}) gives"
    for start in find_projections(events, call, modules):
        projection = events[start].module
        branches = list(follow_branch(events, start))
        width = events[start].state.shape
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
        for place, beside in ((place, beside) for beside in (False, True) for place in later):
            best = find_sum(events, start, place, earlier, branches, beside)
            if best is None:
                continue
            residual, (branch, passed), factor, module = best
            before, stream = residual.tap, events[place].tap
            assert before is not None
            assert stream is not None
            if not is_all(events, call, place, branch, factor, None if beside else residual):
                reason = (
                    f"what {name} ({kind}) gives goes on by other ways than the residual stream"
                )
                break
            norm = None if beside else find_post_norm(events, place, modules)
            return Wiring(name, projection, before, passed, factor, stream, module, norm)
        else:
            if reason.startswith("no projection"):
                reason = f"what {name} ({kind}) adds to the residual stream was not found"
    raise CaptureError(f"{reason}; use edges='attention'")


def find_projections(events: list[Event], call: int, modules: dict[str, Any]) -> list[int]:
    """Where modules that read the joined heads give their results.

    Those with weights of their own come first; then modules around them, as adapters are.
    """
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
        wanted = Tap("out", event.module)
        results = (after for after in range(place, len(events)) if events[after].tap == wanted)
        result = next(results, None)
        if result is not None:
            weighs = getattr(modules[event.module], "weight", None) is not None
            found[weighs].append(result)
    return found[True] + found[False]


Branch = tuple[Event, tuple[str, ...]]  # and the names of the modules that it passed


def follow_branch(events: list[Event], start: int) -> Iterator[Branch]:
    """The branch, and what modules made of it."""
    shown: list[Branch] = [(events[start], ())]
    yield shown[0]
    for place in range(start + 1, min(start + LOOK_AHEAD, len(events))):
        event = events[place]
        if event.tap is None or event.tap.side != "in":
            continue
        for branch, passed in list(shown):
            state = branch.state
            if state.shape != event.state.shape or not is_same(state, event.state):
                continue
            made = find_output(events, place)
            if made is None or made.state.shape != state.shape or is_same(made.state, state):
                break
            shown.append((made, (*passed, event.module)))
            yield shown[-1]
            break


def find_output(events: list[Event], entered: int) -> Event | None:
    """What a module gave back whose input was seen at a place."""
    wanted = Tap("out", events[entered].module)
    return next((event for event in events[entered + 1 :] if event.tap == wanted), None)


def find_sum(
    events: list[Event],
    start: int,
    place: int,
    earlier: list[Event],
    branches: list[Branch],
    beside: bool,
) -> tuple[Event, Branch, float, str | None] | None:
    """How the state at a place is an earlier one plus a multiple of the branch; None if it is not.

    beside: plus the output of another module as well.
    """
    total = events[place].state
    best: tuple[float, Any] = (ADDS_UP[total.element_size()], None)
    for event in earlier:
        rest = total - event.state
        for way in branches:
            branch = way[0].state
            length = float(branch.norm())
            if not beside:
                factor = float((rest * branch).sum()) / max(length**2, 1e-30)
                error = float((rest - factor * branch).norm()) / max(abs(factor) * length, 1e-30)
                if error < best[0] and abs(factor) > LEAST_FACTOR:
                    best = (error, (event, way, factor, None))
                continue
            for other in events[start + 1 : place + 1]:
                if other.tap is None or other.tap.side != "out" or other.state.shape != rest.shape:
                    continue
                error = float((rest - branch - other.state).norm()) / max(length, 1e-30)
                if error < best[0]:
                    best = (error, (event, way, 1.0, other.module))
    return best[1]  # type: ignore[no-any-return]


# Up to the next attention, let R be any number that depends on all that was seen after the sum. If
# what attention gave, J, reaches it through the sum S = x + factor * branch alone, then dR/dJ is
# dR/dS, times the factor, back through the branch; and dR/dx is dR/dS. A second projection of J, a
# branch that is added once more, or a stream that goes on past the sum all make a difference.
def is_all(
    events: list[Event],
    call: int,
    place: int,
    branch: Event,
    factor: float,
    residual: Event | None,
) -> bool:
    """Whether later states depend on attention, and on the residual, through one sum alone.

    place: of the sum. residual: None where something else reads it too, an MLP beside attention.
    """
    import torch

    later: list[Event] = []
    for event in events[place:]:
        if event.tap is None:
            break
        later.append(event)
    joined, total = events[call].live, events[place]
    shown = [event.live for event in later if event.live.requires_grad]
    steps = [event.live.grad_fn for event in (*events[call:place], *later)]
    blocked = any(step is not None and NO_WAY_BACK in step.name() for step in steps)
    if blocked or not (branch.live.requires_grad and shown):
        return True  # quantised weights: what the layer mixed must still add up
    generator = torch.Generator().manual_seed(0)
    number = torch.zeros((), device=joined.device)
    for state in shown:
        noise = torch.randn(state.shape, generator=generator) / state.numel() ** 0.5
        number = number + (state * noise.to(state.device, state.dtype)).sum().float()
    totals = list_same(later, total)
    before = [] if residual is None else list_same(events[:call], residual)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    by_joined, *found = torch.autograd.grad(number, [joined, *totals, *before], **options)
    limit = SAME_GRADIENT[joined.element_size()]

    def is_close(first: Any, second: Any) -> bool:
        first, second = first.flatten().float(), second.flatten().float()
        return float((first - second).norm()) <= limit * float(second.norm())

    for by_total in found[: len(totals)]:
        given = (factor * by_total).reshape(branch.live.shape).to(branch.live.dtype)
        (through,) = torch.autograd.grad(branch.live, joined, given, **options)
        if is_close(through, by_joined) and (
            not before or any(is_close(one, by_total) for one in found[len(totals) :])
        ):
            return True
    return False


def list_same(events: list[Event], wanted: Event) -> list["torch.Tensor"]:
    """The tensors that show the same state as an event, each once, those with a way back."""
    found: dict[int, torch.Tensor] = {}
    for event in events:
        if event.tap is None or event.state.shape != wanted.state.shape:
            continue
        if event.live.requires_grad and is_same(event.state, wanted.state):
            found.setdefault(id(event.live), event.live)
    return list(found.values())


def find_post_norm(events: list[Event], place: int, modules: dict[str, Any]) -> str | None:
    """The norm that the stream passes before it goes on; None where it goes on as it is.

    What is added to next says which of the two is the stream.
    """
    event = events[place]
    if event.tap is None or event.tap.side != "in" or is_container(modules[event.module]):
        return None
    output = find_output(events, place)
    if output is None or output.state.shape != event.state.shape:
        return None
    made = output.state
    if is_same(made, event.state):
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
