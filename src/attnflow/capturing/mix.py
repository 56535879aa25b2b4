"""`LayerMix`: what one layer mixed, and the proof that nothing is missing.

It is computed from the observations of a layer (follow.py), one sequence at a time.

The proof, per position: the values of all heads, weighted by attention and projected, are the
observed branch; and the residual plus the branch is the observed stream. The layer's wiring pattern
(models/wiring/) checks both, so a family that is wired otherwise is an error, never a wrong number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from attnflow.capturing.follow import ObservedLayer
from attnflow.models.wiring.linear_maps import ModuleReader
from attnflow.models.wiring.wiring import Observation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class LayerMix:
    """The parts that one attention layer mixed for one input, in float32.

    The part of the stream at query i that comes from key j is

        part(i, j) = sum over heads of weights[head, i, j] * vectors[head, j]
                     + residual[i] if j is own[i]

    and all parts, with a constant that comes from no key, sum to `stream`. Norms and factors in
    between (of the branch, or of the stream in post-norm blocks) are linear once their scale is
    known, and are already contained in `weights`, `vectors` and `residual`.

    Parameters
    ----------
    name
        The name of the attention module within its model.
    attention
        [head, query, key]: the attention weights.
    weights
        [head, query, key]: the attention weights times the scale of norms at each query.
    values
        [head, key, width]: the values of each head.
    projection
        [head, width, model width]: the rows of the output projection for each head.
    vectors
        [head, key, model width]: values times projection, and the gains of norms.
    residual
        [query, model width]: the residual stream before attention, through the norms.
    stream
        [query, model width]: the residual stream after attention.
    own
        [query]: the key that is the query itself.
    gradient
        [head, query, key]: of the watched scalar with respect to each weight, by the backward
        rule; None without one.
    gradients
        The same by the name of each backward rule that the edges ask for.
    output
        [query, model width]: the output of the whole block, MLP and norms included; None without
        `rerun`.
    rerun
        `rerun(keys)` returns [key, query, model width]: the output of the block with the value of
        each of these keys set to zero; None unless requested.
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
    gradients: "Mapping[str, torch.Tensor | None]" = field(default_factory=dict)

    def copy(self) -> "LayerMix":
        """The same parts in tensors of their own, which may be written to."""
        import torch

        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        copies = {
            name: part.clone() for name, part in parts.items() if isinstance(part, torch.Tensor)
        }
        return replace(self, **copies)

    @property
    def visible(self) -> "torch.Tensor":
        """[query, key]: which keys a query may see."""
        return (self.attention > 0).any(dim=0)


# ---- from observations to a mix -----------------------------------------------------------------


@dataclass(frozen=True)
class SequenceSlice:
    """The part of a call that belongs to one sequence, without its padding."""

    rows: slice  # of the queries
    columns: slice  # of the keys


def make_mix(
    reader: ModuleReader,
    layer: ObservedLayer,
    place: int,
    part: SequenceSlice,
    vectors: "torch.Tensor | None" = None,
) -> LayerMix:
    """The mix of one sequence of a batch; checked.

    vectors: the result of `Wiring.make_vectors`, if it is known already.
    """
    import torch

    wiring = layer.wiring
    sequences, _, queries, _ = layer.weights.shape

    def cut(state: "torch.Tensor") -> "torch.Tensor":
        """[query, width] of this sequence."""
        return state.reshape(sequences, queries, -1)[place, part.rows].float()

    attention = layer.weights[place, :, part.rows, part.columns]
    values = layer.values[place, :, part.columns]
    parts = wiring.split_stream(
        Observation(
            attention,
            values,
            cut(layer.residual),
            lambda tap: cut(layer.states[tap]),
            reader,
            layer.residual.dtype,
        )
    )
    mix = LayerMix(
        name=wiring.attention,
        attention=attention,
        weights=parts.weights,
        values=values,
        projection=parts.projection,
        vectors=wiring.make_vectors(values, reader) if vectors is None else vectors,
        residual=parts.residual,
        stream=parts.stream,
        own=torch.arange(len(parts.residual), device=attention.device),
    )
    return add_own_keys(mix) if wiring.crosses else mix


def add_own_keys(mix: LayerMix) -> LayerMix:
    """A mix of attention to another sequence, with each query added as a key.

    Its weight and value there are 0: it brings the residual only.
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
    )


def add_gradient(mix: LayerMix, by_output: "torch.Tensor") -> LayerMix:
    """A mix with the gradient with respect to its weights.

    by_output: [query, head, width], the gradient with respect to the output of attention.
    """
    # d target / d weight[i, j] = <d target / d output[i], value[j]>
    return replace(mix, gradient=by_output.float().transpose(0, 1) @ mix.values.transpose(1, 2))
