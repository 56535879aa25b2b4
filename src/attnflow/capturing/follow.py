"""Following a model through its layers: what each attention mixed, and the states around it.

A model runs unchanged while hooks keep the states that its wiring (models/wiring/) names. Once the
last of them is observed, the layer is reported and released, so one layer is in memory at a time.
The weights of every layer are recorded as in models/attention_calls.py, so that one forward pass
serves both attention and edges.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from attnflow.errors import CaptureError
from attnflow.models.attention_calls import (
    AttentionCall,
    LayerBuffer,
    LayerWeights,
    check_weights_fit,
    observe_calls,
)
from attnflow.models.attention_weights import fuse
from attnflow.models.hooks import watch_modules
from attnflow.models.model import Model
from attnflow.models.wiring.find import find_wirings
from attnflow.models.wiring.trace import Tap, first_input, first_state
from attnflow.models.wiring.wiring import Wiring

if TYPE_CHECKING:
    import torch

# False while modules run that are not part of the run that is followed
is_following: ContextVar[bool] = ContextVar("is_following", default=True)


class TappedLayer(Protocol):
    """An attention layer whose states are collected as its taps are observed."""

    wiring: Wiring
    states: dict[Tap, "torch.Tensor"]


@dataclass(eq=False)
class ObservedLayer:
    """What was observed of one attention layer, with the weights of every head."""

    wiring: Wiring
    weights: "torch.Tensor"  # [sequence, head, query, key]
    values: "torch.Tensor"  # [sequence, head, key, width]
    residual: "torch.Tensor"  # [sequence, query, model width]
    states: dict[Tap, "torch.Tensor"] = field(default_factory=dict)


Finish = Callable[[int, ObservedLayer], None]
AnyLayer = TypeVar("AnyLayer", bound=TappedLayer)
Begin = Callable[[Wiring, AttentionCall, "torch.Tensor"], AnyLayer]


@contextmanager
def follow_layers(
    model: Model, finish: Finish, heads: str | None = "mean"
) -> Iterator[list[LayerWeights]]:
    """Within this context, call `finish(number, layer)` for each attention layer of this thread.

    Yields a list that is filled with the weights of each attention call, heads fused, or of every
    head if None.
    """
    import torch

    recorded: list[LayerWeights] = []
    buffer = LayerBuffer(model.depth or 1)
    latest: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # weights and share of no token

    def record(call: AttentionCall) -> None:
        fused = buffer.take(call.shape(heads))
        check_weights_fit(1, call.shape(None))
        weights = torch.empty(call.shape(None), device=call.query.device)
        share = call.weigh(None, weights)
        torch.from_numpy(fused).copy_(fuse(weights, heads))
        recorded.append(LayerWeights(call.name, fused, share, call.window))
        latest[:] = [(weights, share)]

    def begin(wiring: Wiring, call: AttentionCall, residual: "torch.Tensor") -> ObservedLayer:
        weights, share = latest.pop()
        values = spread_groups(call.value.detach().float(), call.query.shape[1])
        if share is not None:
            take_share(weights, values, call.output[0].detach())
        # padded queries may see no key
        weights = torch.nan_to_num_(weights)
        return ObservedLayer(wiring, weights, values, residual)

    with follow_calls(model, begin, finish, record):
        yield recorded


@contextmanager
def follow_calls(
    model: Model,
    begin: Begin[AnyLayer],
    finish: Callable[[int, AnyLayer], None],
    record: Callable[[AttentionCall], None] | None = None,
) -> Iterator[None]:
    """Within this context, follow each attention call of this thread through its layer.

    begin: makes a layer of a call and of the residual stream before it [sequence, query, model
    width]; finish: called with the layer's number and the layer, once all its states are observed.
    record: called with each call before its layer begins.
    """
    wirings = find_wirings(model)
    modules = dict(model.model.named_modules())
    names = {module: name for name, module in modules.items()}
    taps = {tap for wiring in wirings for tap in wiring.taps}
    follower = Follower(wirings, begin, finish, record)

    def before(
        module: "torch.nn.Module", given: tuple[object, ...], named: dict[str, object]
    ) -> None:
        follower.observe(Tap("in", names[module]), first_input(given, named))

    def after(module: "torch.nn.Module", given: tuple[object, ...], output: object) -> None:
        follower.observe(Tap("out", names[module]), first_state(output))

    with (
        observe_calls(model.model, follower.take),
        watch_modules([modules[tap.module] for tap in taps if tap.side == "in"], before=before),
        watch_modules([modules[tap.module] for tap in taps if tap.side == "out"], after=after),
    ):
        yield
    follower.check_end()


class Follower(Generic[AnyLayer]):
    """Collects the states of one layer after another; see `follow_calls`."""

    def __init__(
        self,
        wirings: Sequence[Wiring],
        begin: Begin[AnyLayer],
        finish: Callable[[int, AnyLayer], None],
        record: Callable[[AttentionCall], None] | None,
    ) -> None:
        self.wirings, self.begin, self.finish, self.record = wirings, begin, finish, record
        self.latest: dict[Tap, torch.Tensor] = {}
        self.layer: AnyLayer | None = None  # has attended, and is not finished
        self.done = 0

    @property
    def wiring(self) -> Wiring:
        """The wiring of the current layer."""
        return self.wirings[self.done % len(self.wirings)]

    def take(self, call: AttentionCall) -> None:
        """Begin a layer with its attention call."""
        if self.record is not None:
            self.record(call)
        if self.layer is not None or self.wiring.attention != call.name:
            raise CaptureError(f"{call.name} attended otherwise than when the model was traced")
        self.layer = self.begin(self.wiring, call, self.latest[self.wiring.residual])

    def observe(self, tap: Tap, state: "torch.Tensor | None") -> None:
        """Keep a state, and finish the layer if it is its last."""
        if state is None or not is_following.get():
            return
        self.latest[tap] = state.detach()
        layer = self.layer
        if layer is None:
            return
        layer.states[tap] = state.detach()
        if tap == self.wiring.taps[-1]:
            self.layer = None
            self.finish(self.done, layer)
            self.done += 1

    def check_end(self) -> None:
        """Refuse a run in which a layer was not finished."""
        finished = self.done % len(self.wirings)
        if self.layer is not None or not self.done or finished:
            raise CaptureError(
                f"{finished} of {len(self.wirings)} attention layers were followed to their end"
            )


def take_share(weights: "torch.Tensor", values: "torch.Tensor", joined: "torch.Tensor") -> None:
    """Take the share of no token out of weights [sequence, head, query, key], in place.

    The rows that the model used sum to less than 1 by this share. It is read off the output of
    attention, joined [sequence, query, head, width].
    """
    mixed = weights @ values
    given = joined.float().transpose(1, 2)
    length = mixed.pow(2).sum(dim=-1, keepdim=True).clamp_min(1e-30)
    weights *= ((mixed * given).sum(dim=-1, keepdim=True) / length).clamp(0.0, 1.0)


def spread_groups(value: "torch.Tensor", heads: int) -> "torch.Tensor":
    """[sequence, head, key, width]: the values of each head, where heads share them in groups."""
    return value.repeat_interleave(heads // value.shape[1], dim=1)
