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
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attnflow.errors import CaptureError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import WINDOW, name_part
from attnflow.models.listening import Attend, Call, LayerBuffer, intercepting
from attnflow.models.model import Model
from attnflow.models.probing import make_probe_inputs
from attnflow.models.weighing import compute_weights, fuse
from attnflow.models.wiring import Tap, Wiring, find_wirings, first_state

if TYPE_CHECKING:
    import torch

WIRINGS: "WeakKeyDictionary[Any, list[Wiring]]" = WeakKeyDictionary()
follows: ContextVar[bool] = ContextVar("follows", default=True)


@dataclass(eq=False)
class Pending:
    """An attention call whose layer is not finished."""

    wiring: Wiring
    weights: "torch.Tensor"  # [sequence, head, query, key]
    values: "torch.Tensor"  # [sequence, head, key, width]
    residual: "torch.Tensor"  # [sequence, query, model width]
    crosses: bool  # it attends to another sequence
    seen: dict[Tap, "torch.Tensor"] = field(default_factory=dict)


Finish = Callable[[int, Pending], None]


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

    wirings = trace_model(model)
    modules = dict(model.model.named_modules())
    names = {module: name for name, module in modules.items()}
    taps = {tap for wiring in wirings for tap in list_taps(wiring)}
    thread = threading.get_ident()
    latest: dict[Tap, torch.Tensor] = {}
    pending: list[Pending] = []
    done = [0]
    calls: list[Call] = []
    layers = LayerBuffer(model.depth or 1)

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

    def listen(
        attend: Attend,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        output = attend.function(module, query, key, value, attention_mask, *rest, **options)
        if module not in names:
            return output
        wiring = wirings[done[0] % len(wirings)]
        if pending or wiring.attention != names[module]:
            raise CaptureError(f"{names[module]} attended otherwise than when the model was traced")
        weights, share = weigh(module, query, key, attention_mask, options, attend)
        count = query.shape[1] if heads is None else 1
        recorded = layers.take((query.shape[0], count, query.shape[2], key.shape[2]))
        torch.from_numpy(recorded).copy_(fuse(weights, heads))
        calls.append(Call(names[module], recorded, share, options.get(WINDOW)))
        values = spread_groups(value.detach().float(), query.shape[1])
        if share is not None:
            take_share(weights, values, output[0].detach())
        # padded queries that see no key
        weights = torch.nan_to_num_(weights)
        crosses = name_part(wiring.attention) == "cross"
        pending.append(Pending(wiring, weights, values, latest[wiring.residual], crosses))
        return output

    with ExitStack() as hooks, intercepting(listen):
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
        yield calls
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


def weigh(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    mask: Any,
    options: dict[str, Any],
    attend: Attend,
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """[sequence, head, query, key]: the weights of every head, rows summing to 1.

    And the share of no token [sequence, query], where a model has a score for it.
    """
    import torch

    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    weights = torch.empty(shape, device=query.device)
    # autocast would round the logits to 16 bits, and rows would not sum to 1
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        share = compute_weights(
            module, query, key, mask, None, weights, options, hides_future=attend.hides_future
        )
    return weights, share


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
