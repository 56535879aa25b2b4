"""`LayerMix`: what one layer mixed, and the proof that nothing is missing.

A model runs as it is, while hooks keep what its wiring (models/wiring.py) names. When the residual
stream after an attention has been seen, its `LayerMix` is made, checked, handed to whoever asked,
and let go: one layer is in memory at a time.

The proof, per position: what the heads' values and the projection give, weighted by attention, is
the branch that was observed; and the residual plus the branch is the stream that was observed. A
family that nobody has looked at gives an error here, never a number.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attnflow.errors import CaptureError
from attnflow.models.families import NO_TOKEN_SCORE, name_part
from attnflow.models.listening import Attend, intercepting
from attnflow.models.weighing import compute_weights
from attnflow.models.wiring import Tap, Wiring, first_state

if TYPE_CHECKING:
    import torch

# how far the parts may be from the whole, as a share of its own length, by bytes per number
MISSING = {8: 1e-6, 4: 1e-3, 2: 3e-2}


@dataclass(frozen=True, eq=False)
class LayerMix:
    """What one attention layer mixed for one input, in float32.

    The part of the stream at query i that comes from key j is

        part(i, j) = sum over heads of weights[head, i, j] * vectors[head, j]
                     + residual[i] if j is own[i]

    and all parts, with a constant that no key brought, sum to `stream`. Norms and factors that lie
    between (of the branch, or of the stream where a block norms last) are linear once their scale
    is known, and are contained in `weights`, `vectors` and `residual` already.

    Parameters
    ----------
    name
        The attention module, within its model.
    attention
        [head, query, key]: the weights that the model attended by.
    weights
        [head, query, key]: the same, times the scale of norms at each query.
    values
        [head, key, width]: the values of each head.
    projection
        [head, width, model width]: the rows of the output projection that read each head.
    vectors
        [head, key, model width]: values times projection, through the norms' gains.
    residual
        [query, model width]: the residual stream before attention, through the norms.
    stream
        [query, model width]: the residual stream after attention.
    own
        [query]: the key that is the query itself.
    gradient
        [head, query, key]: of the target by each weight; None if it was not asked for.
    output
        [query, model width]: what the whole block gave, MLP and norms included; None if `rerun`
        was not asked for.
    rerun
        `rerun(keys)` gives [key, query, model width]: what the block gives with the value of each
        of these keys set to zero; None if it was not asked for.
    """

    name: str
    attention: "torch.Tensor"
    weights: "torch.Tensor"
    values: "torch.Tensor"
    projection: "torch.Tensor"
    vectors: "torch.Tensor"
    residual: "torch.Tensor"
    stream: "torch.Tensor"
    own: "torch.Tensor"
    gradient: "torch.Tensor | None" = None
    output: "torch.Tensor | None" = None
    rerun: "Callable[[Sequence[int]], torch.Tensor] | None" = None

    @property
    def visible(self) -> "torch.Tensor":
        """[query, key]: which keys a query may see."""
        return (self.attention > 0).any(dim=0)


@dataclass(frozen=True)
class Gain:
    """A norm, or a factor per channel, as a linear map at a known scale.

    u -> scale * weight * (u - mean(u) if centred) + offset
    """

    weight: "torch.Tensor"  # [width]
    offset: "torch.Tensor"  # [width]
    centred: bool
    scale: "torch.Tensor"  # [position, 1]

    def turn(self, vectors: "torch.Tensor") -> "torch.Tensor":
        """vectors [..., width] through the map, but for its scale and offset."""
        if self.centred:
            vectors = vectors - vectors.mean(dim=-1, keepdim=True)
        return vectors * self.weight


def copy_module(module: Any) -> Any:
    """A module to try things on: in float32, and nobody listens to it."""
    copy = deepcopy(module).float()
    copy._forward_hooks.clear()
    copy._forward_pre_hooks.clear()
    return copy


def read_gain(
    module: Any, entered: "torch.Tensor", left: "torch.Tensor", name: str, dtype: Any
) -> Gain:
    """The map of a norm or factor from what it does: to some vectors, and to the states observed.

    entered, left: [position, width]. dtype: the model's.
    """
    import torch

    width = entered.shape[-1]
    generator = torch.Generator().manual_seed(0)
    probe = 100 * (torch.rand(width, generator=generator) + 0.5)  # large beside any epsilon
    probe[::2] *= -1

    plain_module = copy_module(module)

    def run(vector: "torch.Tensor") -> "torch.Tensor":
        return plain_module(vector.to(entered.device)[None, None])[0, 0].double().cpu()

    offset = run(torch.zeros(width))
    plain, shifted, doubled = run(probe), run(probe + 30.0), run(2 * probe)
    tolerance = 1e-3 * float(plain.norm())
    centred = float((shifted - plain).norm()) < tolerance
    start = probe.double()
    if centred:
        start = start - start.mean()
    linear = float((doubled - offset - 2 * (plain - offset)).norm()) < tolerance
    length = 1.0 if linear else float(start.pow(2).mean().sqrt())
    weight = (plain - offset) / (start / length)
    gain = Gain(
        weight.float().to(entered.device), offset.float().to(entered.device), centred, entered
    )
    turned = gain.turn(entered)
    target = left - gain.offset
    scale = (turned * target).sum(dim=-1, keepdim=True) / turned.pow(2).sum(
        dim=-1, keepdim=True
    ).clamp_min(1e-30)
    gain = replace(gain, scale=scale)
    check_parts(scale * turned, target, left, f"the norm {name}", dtype)
    return gain


def check_parts(
    parts: "torch.Tensor", whole: "torch.Tensor", observed: "torch.Tensor", what: str, dtype: Any
) -> None:
    """Refuse parts [position, width] that miss the whole by more than its own length allows."""
    missing = (parts - whole).norm(dim=-1)
    length = whole.norm(dim=-1).clamp_min(1e-6 * float(observed.norm(dim=-1).max()) + 1e-30)
    worst = float((missing / length).max())
    if not worst <= MISSING[min(8, dtype.itemsize)]:
        raise CaptureError(
            f"{what} was not understood: its parts miss what was observed by {worst:.2g} of its"
            " length; use edges='attention'"
        )


# ---- listening ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Pending:
    """An attention call whose layer is not finished."""

    wiring: Wiring
    weights: "torch.Tensor"  # [sequence, head, query, key]
    values: "torch.Tensor"  # [sequence, head, key, width]
    joined: "torch.Tensor"  # [sequence, query, head, width], what attention gave
    residual: "torch.Tensor"  # [sequence, query, model width]
    crosses: bool  # it attends to another sequence
    seen: dict[Tap, "torch.Tensor"] = field(default_factory=dict)


Finish = Callable[[int, Pending], None]
follows: ContextVar[bool] = ContextVar("follows", default=True)


@contextmanager
def unfollowed() -> Iterator[None]:
    """While this lasts, parts of a model may run that are no part of the run that is followed."""
    token = follows.set(False)
    try:
        yield
    finally:
        follows.reset(token)


@contextmanager
def follow_layers(model: Any, wirings: Sequence[Wiring], finish: Finish) -> Iterator[None]:
    """While this lasts, `finish` is told of each attention layer of this thread, in order."""
    import torch

    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    taps = {tap for wiring in wirings for tap in list_taps(wiring)}
    thread = threading.get_ident()
    latest: dict[Tap, torch.Tensor] = {}
    pending: list[Pending] = []
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
        if pending or done[0] >= len(wirings) or wirings[done[0]].attention != names[module]:
            raise CaptureError(f"{names[module]} attended otherwise than when the model was traced")
        wiring = wirings[done[0]]
        joined = output[0].detach()
        pending.append(
            Pending(
                wiring,
                weigh(module, query, key, attention_mask, options, attend, value, joined),
                spread_groups(value.detach().float(), query.shape[1]),
                joined,
                latest[wiring.residual],
                name_part(wiring.attention) == "cross",
            )
        )
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
        yield
    if pending or done[0] != len(wirings):
        raise CaptureError(
            f"{done[0]} of {len(wirings)} attention layers were followed to their end"
        )


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
    value: "torch.Tensor",
    joined: "torch.Tensor",
) -> "torch.Tensor":
    """[sequence, head, query, key]: the weights of every head as the model used them.

    Where a model has a score of no token, its share is missing from each head's rows: how much it
    is, is read off what attention gave.
    """
    import torch

    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    weights = torch.empty(shape, device=query.device)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        compute_weights(
            module, query, key, mask, None, weights, options, hides_future=attend.hides_future
        )
        weights = torch.nan_to_num(weights)  # padded queries that see no key
        if options.get(NO_TOKEN_SCORE) is not None:
            mixed = weights @ spread_groups(value.float(), shape[1])
            given = joined.float().transpose(1, 2)
            length = mixed.pow(2).sum(dim=-1, keepdim=True).clamp_min(1e-30)
            weights *= ((mixed * given).sum(dim=-1, keepdim=True) / length).clamp(0.0, 1.0)
    return weights


def spread_groups(value: "torch.Tensor", heads: int) -> "torch.Tensor":
    """[sequence, head, key, width]: the values of each head, where several share them."""
    return value.repeat_interleave(heads // value.shape[1], dim=1)


# ---- from what was seen to a mix ----------------------------------------------------------------


def make_mix(
    modules: dict[str, Any],
    layer: Pending,
    place: int,
    queries: int,
    keys: int,
    gradient: "torch.Tensor | None" = None,
) -> LayerMix:
    """The mix of one sequence of a batch, with so many real queries and keys; checked.

    gradient: [sequence, query, head, width], of the target by what attention gave.
    """
    import torch

    wiring = layer.wiring

    def state(tap: Tap) -> "torch.Tensor":
        """[query, width] of this sequence."""
        shown = layer.seen[tap]
        shown = shown.reshape(*layer.residual.shape[:2], -1) if shown.ndim == 2 else shown
        return shown[place, :queries].float()

    dtype = layer.residual.dtype
    attention = layer.weights[place, :, :queries, :keys]
    values = layer.values[place, :, :keys]
    heads, _, width = values.shape
    projection, bias = read_projection(modules[wiring.projection], heads * width)
    projection = projection.reshape(heads, width, -1)
    vectors = values @ projection  # [head, key, model width]
    branch = state(Tap("out", wiring.projection))
    mixed = (attention.unsqueeze(2) @ vectors.unsqueeze(1)).squeeze(2).sum(dim=0)
    check_parts(mixed, branch - bias, branch, f"the branch of {wiring.attention}", dtype)
    residual = layer.residual.reshape(layer.weights.shape[0], layer.weights.shape[2], -1)
    residual = residual[place, :queries].float()
    weights, stream = attention, state(wiring.stream)
    added = branch
    for name in wiring.passed:
        gain = read_gain(
            modules[name], state(Tap("in", name)), state(Tap("out", name)), name, dtype
        )
        vectors = gain.turn(vectors)
        weights = weights * gain.scale[None]
        added = state(Tap("out", name))
    vectors = vectors * wiring.factor
    total = residual + wiring.factor * added
    if wiring.beside is not None:
        observed = stream - state(Tap("out", wiring.beside))
        check_parts(total, observed, total, f"the stream after {wiring.attention}", dtype)
        stream = total
    else:
        check_parts(total, stream, total, f"the stream after {wiring.attention}", dtype)
    if wiring.norm is not None:
        left = state(Tap("out", wiring.norm))
        gain = read_gain(modules[wiring.norm], stream, left, wiring.norm, dtype)
        vectors, residual = gain.turn(vectors), gain.scale * gain.turn(residual)
        weights, stream = weights * gain.scale[None], left
    by_weight = None
    if gradient is not None:  # d target / d weight[i, j] = <d target / d output[i], value[j]>
        by_output = gradient[place, :queries].float().transpose(0, 1)  # [head, query, width]
        by_weight = by_output @ values.transpose(1, 2)
    own = torch.arange(queries, device=attention.device)
    mix = LayerMix(
        wiring.attention,
        attention,
        weights,
        values,
        projection,
        vectors,
        residual,
        stream,
        own,
        by_weight,
    )
    return mix if queries == keys and not layer.crosses else add_own_keys(mix)


def add_own_keys(mix: LayerMix) -> LayerMix:
    """A mix of attention to another sequence, with each query as one more key.

    It has no weight and no value there: only the residual, which is the query's own.
    """
    import torch

    queries, keys = mix.attention.shape[1:]

    def widen(tensor: "torch.Tensor", dimension: int) -> "torch.Tensor":
        shape = list(tensor.shape)
        shape[dimension] = queries
        return torch.cat([tensor, tensor.new_zeros(shape)], dim=dimension)

    return replace(
        mix,
        attention=widen(mix.attention, 2),
        weights=widen(mix.weights, 2),
        values=widen(mix.values, 1),
        vectors=widen(mix.vectors, 1),
        own=mix.own + keys,
        gradient=None if mix.gradient is None else widen(mix.gradient, 2),
    )


def read_projection(module: Any, width: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """[width, model width] and [model width]: what a projection multiplies by, and adds.

    Read off what it does to unit vectors, so that adapters and quantised weights count too.
    """
    import torch

    if type(module) is torch.nn.Linear:
        matrix = module.weight.detach().float().T
        bias = torch.zeros(matrix.shape[1]) if module.bias is None else module.bias.detach().float()
        return matrix, bias.to(matrix.device)
    copy = copy_module(module)
    device = next(iter(copy.parameters())).device
    with torch.no_grad():
        units = torch.eye(width, device=device)[None]
        bias = copy(torch.zeros_like(units[:, :1]))[0, 0]
        return copy(units)[0] - bias, bias
