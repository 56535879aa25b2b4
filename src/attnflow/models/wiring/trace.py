"""The trace of a model: the inputs and outputs of its modules, in order, in one short run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from attnflow.models.attention_calls import AttentionFunction, AttentionOutput, intercept_attention
from attnflow.models.hooks import watch_modules

if TYPE_CHECKING:
    import torch

    from attnflow.models.wiring.sums import Sum
    from attnflow.models.wiring.wiring import Miss

# by bytes per number: two tensors that differ by this share of their length are the same
SAME = {8: 1e-5, 4: 1e-5, 2: 5e-3}


TapSide = Literal["in", "out"]


@dataclass(frozen=True)
class Tap:
    """Where a state is observed: as the first argument ("in") or the result ("out") of a module."""

    side: TapSide
    module: str


@dataclass(frozen=True, eq=False)
class TraceEvent:
    """A state that was observed, or a call of attention."""

    tap: Tap | None  # None: the output of attention
    module: str
    state: "torch.Tensor"  # [position, width], all sequences one below another
    live: "torch.Tensor"  # the same as it was observed, with its autograd graph


@dataclass(frozen=True, eq=False)
class Trace:
    """The events of one forward pass on a short input; each attention call begins a new graph."""

    events: list[TraceEvent]
    modules: "dict[str, torch.nn.Module]"  # of the model, by name
    sums: "dict[tuple[int, bool], Sum | Miss]" = field(default_factory=dict)  # see `find_sum`

    @property
    def calls(self) -> list[int]:
        """The places of the attention calls among the events."""
        return [place for place, event in enumerate(self.events) if event.tap is None]

    def describe(self, call: int) -> str:
        """The name and class of the module that made an attention call."""
        name = self.events[call].module
        return f"{name} ({type(self.modules[name]).__name__})"

    def find_place(self, tap: Tap, places: Sequence[int]) -> int | None:
        """The first of these places at which a tap was observed."""
        return next((place for place in places if self.events[place].tap == tap), None)

    def find_output(self, entered: int) -> TraceEvent | None:
        """The output of the module whose input was observed at a place."""
        wanted = Tap("out", self.events[entered].module)
        place = self.find_place(wanted, range(entered + 1, len(self.events)))
        return None if place is None else self.events[place]


def run_trace(model: "torch.nn.Module", arguments: "Mapping[str, torch.Tensor]") -> Trace:
    """Run a torch module once, and record the states that its parts read and return."""
    import torch

    events: list[TraceEvent] = []
    names = {module: name for name, module in model.named_modules()}

    def record(side: TapSide, module: "torch.nn.Module", state: "torch.Tensor | None") -> None:
        if state is not None:
            flat = state.detach().reshape(-1, state.shape[-1])
            events.append(TraceEvent(Tap(side, names[module]), names[module], flat, state))

    def before(
        module: "torch.nn.Module", given: tuple[object, ...], named: dict[str, object]
    ) -> None:
        record("in", module, first_input(given, named))

    def after(module: "torch.nn.Module", given: tuple[object, ...], output: object) -> None:
        record("out", module, first_state(output))

    def attend(
        function: AttentionFunction, module: "torch.nn.Module", *given: object, **options: object
    ) -> AttentionOutput:
        output = function.compute(module, *given, **options)
        joined = output[0].detach().requires_grad_()  # the autograd graph begins anew here
        flat = joined.detach().reshape(joined.shape[0] * joined.shape[1], -1)
        events.append(TraceEvent(None, names.get(module, ""), flat, joined))
        return joined, output[1]

    given = {name: copy_inference(value) for name, value in arguments.items()}
    weights = {
        name: copy_inference(weight)
        for name, weight in (*model.named_parameters(), *model.named_buffers())
        if weight.is_inference()
    }
    with watch_modules(names, before=before, after=after), intercept_attention(attend):
        torch.func.functional_call(model, weights, kwargs=given)
    return Trace(events, dict(model.named_modules()))


def copy_inference(value: "torch.Tensor") -> "torch.Tensor":
    """A tensor made in inference mode, as one that autograd accepts; anything else as it is."""
    return value.clone() if getattr(value, "is_inference", bool)() else value


def first_state(value: object) -> "torch.Tensor | None":
    """The first tensor of states among the arguments or results of a module."""
    import torch

    while isinstance(value, tuple | list):
        if not value:
            return None
        value = value[0]
    value = getattr(value, "last_hidden_state", value)
    is_state = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2
    return value if is_state else None


def first_input(given: tuple[object, ...], named: Mapping[str, object]) -> "torch.Tensor | None":
    """The first tensor of states that a module was called with."""
    return first_state(given if given else named.get("hidden_states"))


def is_same(first: "torch.Tensor", second: "torch.Tensor") -> bool:
    """Whether two states of one size are the same numbers."""
    one, other = first.reshape(-1), second.reshape(-1)
    if one.shape != other.shape:
        return False
    limit = SAME[other.element_size()]
    return float((one - other).float().norm()) <= limit * float(other.float().norm())


def list_same(events: Sequence[TraceEvent], wanted: TraceEvent) -> list["torch.Tensor"]:
    """The tensors that show the same state as an event, each once, those with a gradient."""
    same = {
        id(event.live): event.live
        for event in events
        if event.tap is not None
        and event.state.shape == wanted.state.shape
        and event.live.requires_grad
        and is_same(event.state, wanted.state)
    }
    return list(same.values())
