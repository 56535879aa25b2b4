"""Edges of a long input, computed for some queries at a time, used and dropped.

A row of a layer's edges depends on its own query alone. So each layer keeps only what is linear in
the length: queries, keys, values and the states around attention. The `LayerMix` of a block of
queries is made when the block is needed, and no matrix is ever built.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attnflow.capturing.follow import ObservedLayer, follow_calls, spread_groups, take_share
from attnflow.capturing.mix import SequenceSlice, make_mix
from attnflow.edges.edge_weight import EdgeWeight
from attnflow.errors import OptionError
from attnflow.models.attention_calls import AttentionCall
from attnflow.models.attention_weights import cut_queries
from attnflow.models.encoded import Encoded
from attnflow.models.execution import evaluating, running
from attnflow.models.families import NO_TOKEN_SCORE
from attnflow.models.model import Model
from attnflow.models.wiring.linear_maps import ModuleReader
from attnflow.models.wiring.trace import Tap
from attnflow.models.wiring.wiring import Wiring
from attnflow.rows.products import (
    LayerAttention,
    LayerCount,
    Recomputed,
    RowBlock,
    StoredAttention,
    TensorPool,
    find_body,
    read_call,
)

if TYPE_CHECKING:
    import torch

# weights [head, query, key] in one block: 64 MB of float32, of which there are some copies
BLOCK_WEIGHTS = 2**24
WHOLE = SequenceSlice(slice(None), slice(None))


@dataclass(eq=False)
class MixedLayer:
    """One attention layer of one input, with the states that its `LayerMix` is made of."""

    wiring: Wiring
    attention: Recomputed | StoredAttention  # of every head
    value: "torch.Tensor"  # [1, group of heads, key, width]
    residual: "torch.Tensor"  # [1, position, model width]
    # [1, position, head, width]: the output of attention, if a share of it goes to no token
    joined: "torch.Tensor | None" = None
    states: dict[Tap, "torch.Tensor"] = field(default_factory=dict)

    @property
    def window(self) -> int | None:
        """A query sees keys less than this many positions away."""
        return self.attention.window

    def keep(self, pool: TensorPool) -> "MixedLayer":
        """A copy that keeps nothing else in memory."""
        needed = dict.fromkeys(tap for tap in self.wiring.taps if tap in self.states)
        return replace(
            self,
            attention=self.attention.keep(pool),
            value=pool.copy("value", self.value),
            residual=pool.copy("residual", self.residual),
            joined=None if self.joined is None else pool.copy("joined", self.joined),
            states={
                tap: pool.copy(f"state {number}", self.states[tap])
                for number, tap in enumerate(needed)
            },
        )


@dataclass(frozen=True, eq=False)
class EdgeLayer:
    """The edges of one layer, weighed for some queries at a time."""

    layer: MixedLayer
    weight: EdgeWeight
    reader: ModuleReader

    @property
    def window(self) -> int | None:
        """A query sees keys less than this many positions away."""
        return self.layer.window

    def blocks(self, queries: "torch.Tensor") -> Iterator[RowBlock]:
        """The edges of these positions, which ascend, block by block."""
        values = spread_groups(self.layer.value.detach().float(), self.layer.attention.heads)
        vectors = self.layer.wiring.make_vectors(values[0], self.reader)
        for part in cut_queries(len(queries), values.shape[1] * values.shape[2], BLOCK_WEIGHTS):
            yield self.weigh(queries[part].to(values.device), values, vectors)

    def weigh(
        self, queries: "torch.Tensor", values: "torch.Tensor", vectors: "torch.Tensor"
    ) -> RowBlock:
        """The edges of one block of positions.

        values: [1, head, key, width]; vectors: [head, key, model width].
        """
        import torch

        layer = self.layer
        attention = layer.attention.weigh(queries, None)[None]
        keys = attention.shape[-1]
        if layer.joined is not None:
            take_share(attention, values[:, :, :keys], layer.joined[:, queries])
        size = values.shape[2]

        def cut(state: "torch.Tensor") -> "torch.Tensor":
            return state.reshape(1, size, -1)[:, queries]

        states = {tap: cut(state) for tap, state in layer.states.items()}
        block = ObservedLayer(
            layer.wiring, attention, values[:, :, :keys], cut(layer.residual), states
        )
        mix = make_mix(self.reader, block, 0, WHOLE, vectors=vectors[:, :keys])
        edges = self.weight.weigh(replace(mix, own=queries))
        weights = torch.from_numpy(edges).to(queries.device, torch.float32)
        return RowBlock(queries, keys, weights)


def weigh_layer(
    layer: Recomputed | StoredAttention | MixedLayer, weight: EdgeWeight, reader: ModuleReader
) -> LayerAttention:
    """The edges of a layer, under this edge weight."""
    if not isinstance(layer, MixedLayer):
        return layer
    on_attention = weight.name == "attention"
    return layer.attention if on_attention else EdgeLayer(layer, weight, reader)


def run_mixes(
    model: Model,
    encoded: Encoded,
    take: Callable[[int, MixedLayer], None],
    *,
    logits_at: int | None = None,
) -> Any:
    """Run a model on one input like `run_layers`; `take` gets each layer with its states."""
    import torch

    count = LayerCount(model, len(encoded.tokens))
    module, arguments = find_body(model, encoded, logits_at)

    def begin(wiring: Wiring, call: AttentionCall, residual: "torch.Tensor") -> MixedLayer:
        attention = read_call(call, None)
        count.add(attention, *call.shape(None)[2:])
        shares = call.options.get(NO_TOKEN_SCORE) is not None
        joined = call.output[0].detach() if shares else None
        return MixedLayer(wiring, attention, call.value, residual, joined)

    def finish(number: int, layer: MixedLayer) -> None:
        take(number + 1, layer)

    with (
        evaluating(model.model),
        torch.no_grad(),
        running(model),
        follow_calls(model, begin, finish),
    ):
        output = module(**arguments)
    count.check()
    return output


def refuse_whole(weight: EdgeWeight) -> None:
    """Refuse edges whose rows depend on more than their own query."""
    needs = {
        "a backward pass from a target, which keeps whole matrices": bool(weight.rules),
        "each block run again per token": weight.rerun,
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise OptionError(
                f"rows are not available on edges {weight.name!r}: they need {need}; use"
                " 'attention', 'norm' or 'contribution', or attention_graph for a short input"
            )
