"""`LayerMix`: what one layer mixed, and the proof that nothing is missing.

It is made of what was seen of a layer (following.py), one sequence at a time.

The proof, per position: what the heads' values and the projection give, weighted by attention, is
the branch that was observed; and the residual plus the branch is the stream that was observed. A
family that nobody has looked at gives an error here, never a number.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnflow.capturing.following import Pending
from attnflow.errors import CaptureError
from attnflow.models.wiring import Tap, Wiring

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
    """What a norm, or a factor per channel, does: a linear map but for a scale per position.

    u -> scale * weight * (u - mean(u) if centred) + offset
    """

    weight: "torch.Tensor"  # [width]
    offset: "torch.Tensor"  # [width]
    centred: bool

    def turn(self, vectors: "torch.Tensor") -> "torch.Tensor":
        """vectors [..., width] through the map, but for its scale and offset."""
        if self.centred:
            vectors = vectors - vectors.mean(dim=-1, keepdim=True)
        return vectors * self.weight

    def fit_scale(
        self, entered: "torch.Tensor", left: "torch.Tensor", name: str, dtype: Any
    ) -> "torch.Tensor":
        """[position, 1]: its scale, from states [position, width] that entered and left it.

        dtype: the model's.
        """
        turned = self.turn(entered)
        target = left - self.offset
        length = turned.pow(2).sum(dim=-1, keepdim=True).clamp_min(1e-30)
        scale = (turned * target).sum(dim=-1, keepdim=True) / length
        check_parts(scale * turned, target, left, f"the norm {name}", dtype)
        return scale


class ModuleReader:
    """What the projections and norms of a model do; each is read once."""

    def __init__(self, model: Any) -> None:
        self.modules = dict(model.named_modules())
        self.projections: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.gains: dict[str, Gain] = {}

    def projection(self, name: str, width: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """[width, model width] and [model width]: what a projection multiplies by, and adds."""
        if name not in self.projections:
            self.projections[name] = read_projection(self.modules[name], width)
        return self.projections[name]

    def gain(self, name: str, width: int, device: Any) -> Gain:
        """What a norm or factor does."""
        if name not in self.gains:
            self.gains[name] = read_gain(self.modules[name], name, width, device)
        return self.gains[name]


def copy_module(module: Any) -> Any:
    """A module to try things on: in float32, and nobody listens to it."""
    copy = deepcopy(module).float()
    copy._forward_hooks.clear()
    copy._forward_pre_hooks.clear()
    return copy


def read_gain(module: Any, name: str, width: int, device: Any) -> Gain:
    """The map of a norm or factor, from what it does to some vectors."""
    import torch

    generator = torch.Generator().manual_seed(0)
    probe = 100 * (torch.rand(width, generator=generator) + 0.5)  # large beside any epsilon
    probe[::2] *= -1

    plain_module = copy_module(module)

    def run(vector: "torch.Tensor") -> "torch.Tensor":
        try:
            with torch.no_grad():
                return plain_module(vector.to(device)[None, None])[0, 0].double().cpu()
        except Exception as error:
            raise CaptureError(
                f"{name} ({type(module).__name__}), which the attention's output passes, was not"
                f" understood: {type(error).__name__}: {error}; use edges='attention'"
            ) from error

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
    return Gain(weight.float().to(device), offset.float().to(device), centred)


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


# ---- from what was seen to a mix ----------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The part of a call that belongs to one sequence, without its padding."""

    rows: slice  # of the queries
    columns: slice  # of the keys
    own: int = 0  # which of those keys is the first query itself


def make_mix(
    reader: ModuleReader,
    layer: Pending,
    place: int,
    span: Span,
    gradient: "torch.Tensor | None" = None,
    vectors: "torch.Tensor | None" = None,
) -> LayerMix:
    """The mix of one sequence of a batch; checked.

    gradient: [sequence, query, head, width], of the target by what attention gave. vectors: what
    `turn_values` gives, where it is known already.
    """
    import torch

    wiring = layer.wiring
    sequences, _, queries, _ = layer.weights.shape

    def cut(shown: "torch.Tensor") -> "torch.Tensor":
        """[query, width] of this sequence."""
        return shown.reshape(sequences, queries, -1)[place, span.rows].float()

    def state(tap: Tap) -> "torch.Tensor":
        return cut(layer.seen[tap])

    dtype = layer.residual.dtype
    attention = layer.weights[place, :, span.rows, span.columns]
    values = layer.values[place, :, span.columns]
    heads, _, width = values.shape
    joined, bias = reader.projection(wiring.projection, heads * width)
    branch = state(Tap("out", wiring.projection))
    mixed = (attention @ values).transpose(0, 1).reshape(len(branch), -1) @ joined
    check_parts(mixed, branch - bias, branch, f"the branch of {wiring.attention}", dtype)
    projection = joined.reshape(heads, width, -1)
    residual = cut(layer.residual)
    weights, stream = attention, state(wiring.stream)
    added = branch
    for name in wiring.passed:
        gain = reader.gain(name, branch.shape[-1], branch.device)
        entered, added = state(Tap("in", name)), state(Tap("out", name))
        weights = weights * gain.fit_scale(entered, added, name, dtype)
    total = residual + wiring.factor * added
    if wiring.beside is not None:
        observed = stream - state(Tap("out", wiring.beside))
        check_parts(total, observed, total, f"the stream after {wiring.attention}", dtype)
        stream = total
    else:
        check_parts(total, stream, total, f"the stream after {wiring.attention}", dtype)
    if wiring.norm is not None:
        gain = reader.gain(wiring.norm, stream.shape[-1], stream.device)
        left = state(Tap("out", wiring.norm))
        scale = gain.fit_scale(stream, left, wiring.norm, dtype)
        residual = scale * gain.turn(residual)
        weights, stream = weights * scale, left
    by_weight = None
    if gradient is not None:  # d target / d weight[i, j] = <d target / d output[i], value[j]>
        by_output = gradient[place, span.rows].float().transpose(0, 1)  # [head, query, width]
        by_weight = by_output @ values.transpose(1, 2)
    mix = LayerMix(
        wiring.attention,
        attention,
        weights,
        values,
        projection,
        turn_values(reader, wiring, values) if vectors is None else vectors,
        residual,
        stream,
        span.own + torch.arange(len(residual), device=attention.device),
        by_weight,
    )
    return add_own_keys(mix) if layer.crosses else mix


def turn_values(reader: ModuleReader, wiring: Wiring, values: "torch.Tensor") -> "torch.Tensor":
    """[head, key, model width]: values [head, key, width] through the projection and the norms."""
    heads, _, width = values.shape
    joined, _ = reader.projection(wiring.projection, heads * width)
    turned = joined.reshape(heads, width, -1) * wiring.factor
    # norms are linear: they may as well turn the projection
    for name in (*wiring.passed, *([] if wiring.norm is None else [wiring.norm])):
        turned = reader.gain(name, turned.shape[-1], values.device).turn(turned)
    return values @ turned


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
        own=torch.arange(queries, device=mix.own.device) + keys,
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
    weight = next(iter(copy.parameters()), None)  # quantised ones are no parameters
    with torch.no_grad():
        units = torch.eye(width, device=None if weight is None else weight.device)[None]
        try:
            bias = copy(torch.zeros_like(units[:, :1]))[0, 0]
            return copy(units)[0] - bias, bias
        except Exception as error:
            raise CaptureError(
                f"the output projection {type(module).__name__} cannot be read:"
                f" {type(error).__name__}: {error}; use edges='attention'"
            ) from error
