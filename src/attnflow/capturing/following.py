"""Following a model through its layers: what each attention mixed, and what became of it.

A model runs as it is, while hooks keep what its wiring (models/wiring.py) names. When the residual
stream after an attention has been seen, whoever asked is told, and the layer is let go: one layer
is in memory at a time. The weights that every layer attended by are recorded beside it, as
listening.py does, so that one pass serves attention and edges.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from attnflow.errors import CaptureError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import name_part
from attnflow.models.listening import Call, Heard, LayerBuffer, check_room, hearing
from attnflow.models.model import Model
from attnflow.models.probing import make_probe_inputs
from attnflow.models.weighing import fuse
from attnflow.models.wiring import Tap, Wiring, find_wirings, first_state

if TYPE_CHECKING:
    import torch

WIRINGS: "WeakKeyDictionary[Any, list[Wiring]]" = WeakKeyDictionary()
follows: ContextVar[bool] = ContextVar("follows", default=True)


class Followed(Protocol):
    """An attention call whose layer is not finished: states are put into `seen` as they pass."""

    wiring: Wiring
    seen: dict[Tap, "torch.Tensor"]


@dataclass(eq=False)
class Pending:
    """The same with all its weights."""

    wiring: Wiring
    weights: "torch.Tensor"  # [sequence, head, query, key]
    values: "torch.Tensor"  # [sequence, head, key, width]
    residual: "torch.Tensor"  # [sequence, query, model width]
    crosses: bool  # it attends to another sequence
    seen: dict[Tap, "torch.Tensor"] = field(default_factory=dict)


Finish = Callable[[int, Pending], None]
Layer = TypeVar("Layer", bound=Followed)


def trace_model(model: Model) -> list[Wiring]:
    """How each attention of a model stands in its block; traced once."""
    if model.model not in WIRINGS:
        if not model.probe.interface:
            raise CaptureError(
                f"{model.name} attends outside of transformers' attention interface, so what its"
                " layers mix is not seen; use edges='attention'"
            )
        arguments, _ = make_probe_inputs(model, model.model)
        with evaluating(model.model), running(model):
            WIRINGS[model.model] = find_wirings(model.model, arguments)
    return WIRINGS[model.model]


@contextmanager
def follow_layers(model: Model, finish: Finish, heads: str | None = "mean") -> Iterator[list[Call]]:
    """While this lasts, `finish(number, layer)` is told of each attention layer of this thread.

    number counts on over the steps of a generation. Gives a list that fills with one Call per
    attention, with heads fused, or every head if None.
    """
    import torch

    calls: list[Call] = []
    layers = LayerBuffer(model.depth or 1)

    def begin(wiring: Wiring, heard: Heard, residual: "torch.Tensor") -> Pending:
        recorded = layers.take(heard.shape(heads))
        check_room(1, heard.shape(None))
        weights = torch.empty(heard.shape(None), device=heard.query.device)
        share = heard.weigh(None, weights)
        torch.from_numpy(recorded).copy_(fuse(weights, heads))
        calls.append(Call(heard.name, recorded, share, heard.window))
        values = spread_groups(heard.value.detach().float(), heard.query.shape[1])
        if share is not None:
            take_share(weights, values, heard.output[0].detach())
        # padded queries that see no key
        weights = torch.nan_to_num_(weights)
        crosses = name_part(wiring.attention) == "cross"
        return Pending(wiring, weights, values, residual, crosses)

    with follow_calls(model, begin, finish):
        yield calls


@contextmanager
def follow_calls(
    model: Model,
    begin: Callable[[Wiring, Heard, "torch.Tensor"], Layer],
    finish: Callable[[int, Layer], None],
) -> Iterator[None]:
    """While this lasts, each attention of this thread is followed through its layer.

    begin: makes of a call, and of the residual stream before it [sequence, query, model width],
    what collects the states after it; finish: is told of that, with its number, once all were seen.
    """
    wirings = trace_model(model)
    modules = dict(model.model.named_modules())
    taps = {tap for wiring in wirings for tap in list_taps(wiring)}
    thread = threading.get_ident()
    latest: dict[Tap, torch.Tensor] = {}
    pending: list[Layer] = []
    done = [0]

    def see(tap: Tap, value: Any) -> None:
        if threading.get_ident() != thread or not follows.get():
            return
        if (state := first_state(value)) is None:
            return
        latest[tap] = state.detach()
        if pending:
            pending[0].seen[tap] = state.detach()
            if tap == last_tap(pending[0].wiring):
                finish(done[0], pending.pop())
                done[0] += 1

    def take(heard: Heard) -> None:
        wiring = wirings[done[0] % len(wirings)]
        if pending or wiring.attention != heard.name:
            raise CaptureError(f"{heard.name} attended otherwise than when the model was traced")
        pending.append(begin(wiring, heard, latest[wiring.residual]))

    with ExitStack() as hooks, hearing(model.model, take):
        for tap in taps:
            module = modules[tap.module]
            if tap.side == "in":

                def before(_: Any, given: Any, named: dict[str, Any], tap: Tap = tap) -> None:
                    see(tap, given if given else named.get("hidden_states"))

                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            else:

                def after(_: Any, given: Any, output: Any, tap: Tap = tap) -> None:
                    see(tap, output)

                hooks.callback(module.register_forward_hook(after).remove)
        yield
    if pending or not done[0] or done[0] % len(wirings):
        raise CaptureError(
            f"{done[0] % len(wirings)} of {len(wirings)} attention layers were followed to their"
            " end"
        )


@contextmanager
def unfollowed() -> Iterator[None]:
    """While this lasts, parts of a model may run that are no part of the run that is followed."""
    token = follows.set(False)
    try:
        yield
    finally:
        follows.reset(token)


def list_taps(wiring: Wiring) -> list[Tap]:
    """Everything that must be seen of a layer."""
    passed = [Tap(side, name) for name in wiring.passed for side in ("in", "out")]
    beside = [] if wiring.beside is None else [Tap("out", wiring.beside)]
    norm = [] if wiring.norm is None else [Tap("out", wiring.norm)]
    return [wiring.residual, Tap("out", wiring.projection), *passed, *beside, wiring.stream, *norm]


def last_tap(wiring: Wiring) -> Tap:
    """What is seen last of a layer."""
    return wiring.stream if wiring.norm is None else Tap("out", wiring.norm)


def take_share(weights: "torch.Tensor", values: "torch.Tensor", joined: "torch.Tensor") -> None:
    """Take the share of no token out of weights [sequence, head, query, key], in place.

    It is missing from each head's rows as the model used them: how much it is, is read off what
    attention gave, joined [sequence, query, head, width].
    """
    mixed = weights @ values
    given = joined.float().transpose(1, 2)
    length = mixed.pow(2).sum(dim=-1, keepdim=True).clamp_min(1e-30)
    weights *= ((mixed * given).sum(dim=-1, keepdim=True) / length).clamp(0.0, 1.0)


def spread_groups(value: "torch.Tensor", heads: int) -> "torch.Tensor":
    """[sequence, head, key, width]: the values of each head, where several share them."""
    return value.repeat_interleave(heads // value.shape[1], dim=1)
