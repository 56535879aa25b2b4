"""Edges of a long input for some queries at a time: weighed, used, dropped.

Rows of one layer's edges depend on their own query alone. So of each layer only what is linear in
the length is kept, queries, keys, values and the states around attention; what a block of queries
mixed (`LayerMix`) is made of it when the block is needed, and no matrix is ever built.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attnflow.capturing.carrying import (
    Block,
    Held,
    LayerCount,
    Recomputed,
    Shelf,
    find_body,
    read_call,
)
from attnflow.capturing.following import (
    Pending,
    follow_calls,
    list_taps,
    spread_groups,
    take_share,
)
from attnflow.capturing.mixing import ModuleReader, Span, make_mix, turn_values
from attnflow.edges.choosing import EdgeWeight
from attnflow.errors import OptionError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import NO_TOKEN_SCORE
from attnflow.models.inputs import Encoded
from attnflow.models.listening import Heard
from attnflow.models.model import Model
from attnflow.models.weighing import cut_queries
from attnflow.models.wiring import Tap, Wiring

if TYPE_CHECKING:
    import torch

# weights [head, query, key] in one block: 64 MB of float32, of which there are some copies
BLOCK_WEIGHTS = 2**24
WHOLE = Span(slice(None), slice(None))


@dataclass(eq=False)
class MixedLayer:
    """One attention layer of one input, with the states that say what it mixed."""

    wiring: Wiring
    attention: Recomputed | Held  # of every head
    value: "torch.Tensor"  # [1, group of heads, key, width]
    residual: "torch.Tensor"  # [1, position, model width]
    # [1, position, head, width]: what attention gave, where a share of it goes to no token
    joined: "torch.Tensor | None" = None
    seen: dict[Tap, "torch.Tensor"] = field(default_factory=dict)

    @property
    def window(self) -> int | None:
        """A query sees keys less than so many positions away."""
        return self.attention.window

    def keep(self, shelf: Shelf) -> "MixedLayer":
        """The same, to be kept: it holds nothing else in memory."""
        needed = dict.fromkeys(tap for tap in list_taps(self.wiring) if tap in self.seen)
        return replace(
            self,
            attention=self.attention.keep(shelf),
            value=shelf.put("value", self.value),
            residual=shelf.put("residual", self.residual),
            joined=None if self.joined is None else shelf.put("joined", self.joined),
            seen={
                tap: shelf.put(f"state {number}", self.seen[tap])
                for number, tap in enumerate(needed)
            },
        )


@dataclass(frozen=True, eq=False)
class EdgeLayer:
    """The edges of one layer, to be weighed for some queries at a time."""

    layer: MixedLayer
    weight: EdgeWeight
    reader: ModuleReader

    @property
    def window(self) -> int | None:
        """A query sees keys less than so many positions away."""
        return self.layer.window

    def blocks(self, queries: "torch.Tensor") -> Iterator[Block]:
        """The edges of these positions, ascending, block by block."""
        values = spread_groups(self.layer.value.detach().float(), self.layer.attention.heads)
        vectors = turn_values(self.reader, self.layer.wiring, values[0])
        for part in cut_queries(len(queries), values.shape[1] * values.shape[2], BLOCK_WEIGHTS):
            yield self.weigh(queries[part].to(values.device), values, vectors)

    def weigh(
        self, queries: "torch.Tensor", values: "torch.Tensor", vectors: "torch.Tensor"
    ) -> Block:
        """The edges of these positions, which are one block.

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

        seen = {tap: cut(state) for tap, state in layer.seen.items()}
        block = Pending(
            layer.wiring, attention, values[:, :, :keys], cut(layer.residual), False, seen
        )
        mix = make_mix(self.reader, block, 0, WHOLE, vectors=vectors[:, :keys])
        edges = self.weight.weigh(replace(mix, own=queries))
        weights = torch.from_numpy(edges).to(queries.device, torch.float32)
        return Block(queries, keys, weights)


def run_mixes(
    model: Model,
    encoded: Encoded,
    take: Callable[[int, MixedLayer], None],
    *,
    logits_at: int | None = None,
) -> Any:
    """Run a model on one input, as `run_layers` does; `take` gets what each layer mixed."""
    import torch

    count = LayerCount(model, len(encoded.tokens))
    module, arguments = find_body(model, encoded, logits_at)

    def begin(wiring: Wiring, heard: Heard, residual: "torch.Tensor") -> MixedLayer:
        attention = read_call(heard, None)
        count.add(attention, *heard.shape(None)[2:])
        shares = heard.options.get(NO_TOKEN_SCORE) is not None
        joined = heard.output[0].detach() if shares else None
        return MixedLayer(wiring, attention, heard.value, residual, joined)

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
    """Refuse edges whose rows need more than their own query."""
    needs = {
        "the way back from a target, which keeps whole matrices": weight.gradient,
        "each block run again per token": weight.rerun,
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise OptionError(
                f"rows cannot be had on edges {weight.name!r}: they need {need}; use 'attention',"
                " 'norm' or 'contribution', or attention_graph for a short input"
            )
