"""Products with attention that is never a matrix: rows carried down, columns carried up.

Rollout needs a layer only as a factor: `r W` carries a row down, `W R` carries columns up. So the
weights W [query, key], averaged over heads, are computed from queries and keys for some queries at
a time, multiplied, and dropped: memory for one block, whatever the length. `r W` is also the
gradient of attention with respect to its values, and `W R` is attention with R in place of the
values; but a kernel multiplies for each head, and its backward pass computes three products that
are not needed, while a block fuses heads first (benchmarks/long.py measures both). Blocks follow
everything that capture does: soft-capping, windows, grouped keys, biases.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

from attnflow.capturing.capture import check_mixers
from attnflow.core.masks import LEAK
from attnflow.errors import CaptureError
from attnflow.models.attention_calls import AttentionCall, collect_eager_calls, observe_calls
from attnflow.models.attention_weights import (
    BLOCK_SCORES,
    Scoring,
    compute_weights,
    cut_queries,
    fuse,
)
from attnflow.models.encoded import Encoded, select_arguments
from attnflow.models.execution import evaluating, running
from attnflow.models.families import (
    CAUSAL,
    LANGUAGE,
    READS_AHEAD,
    SCALING,
    SCORE_BIAS,
    SOFTCAP,
)
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch

BLOCK_QUERIES = 40  # products of fewer queries at a time are slow ...
MOST_SCORES = 2**25  # ... but their scores take at most 128 MB


@dataclass(frozen=True)
class RowBlock:
    """The weights of some queries of a layer: `weights` [query, key], rows sum to 1."""

    queries: "torch.Tensor"  # their positions, ascending
    keys: int  # the number of its keys, the first positions; later ones have weight 0
    weights: "torch.Tensor"


class LayerAttention(Protocol):
    """One layer of a graph, computed for some queries at a time."""

    @property
    def window(self) -> int | None:
        """A query sees keys less than this many positions away."""

    def blocks(self, queries: "torch.Tensor") -> Iterator[RowBlock]:
        """The weights of these positions, ascending, block by block."""


@dataclass(frozen=True)
class Recomputed:
    """Attention as queries and keys, from which weights are computed when they are needed."""

    module: "torch.nn.Module"
    query: "torch.Tensor"  # [1, head, position, width]
    key: "torch.Tensor"  # [1, group of heads, position, width]
    mask: "torch.Tensor | None"  # the model's own, shared by layers
    options: dict[str, Any]
    hides_future: bool
    window: int | None

    @property
    def heads(self) -> int:
        """The number of heads."""
        return int(self.query.shape[1])

    def keep(self, pool: "TensorPool") -> "Recomputed":
        """A copy that keeps nothing else in memory."""
        return replace(self, query=pool.copy("query", self.query), key=pool.copy("key", self.key))

    def blocks(self, queries: "torch.Tensor") -> Iterator[RowBlock]:
        """The weights of these positions, ascending, block by block."""
        scores = self.heads * self.key.shape[2]
        for part in cut_queries(len(queries), scores, choose_block(scores)):
            (weights,) = self.weigh(queries[part], "mean")
            yield RowBlock(queries[part].to(weights.device), weights.shape[1], weights)

    def weigh(self, queries: "torch.Tensor", heads: str | None) -> "torch.Tensor":
        """[head (1 if fused), query, key]: the weights of these positions, ascending.

        Keys are the first positions, up to the last that has a weight.
        """
        import torch

        asked = queries.to(self.query.device)
        keys = int(asked[-1]) + 1 if self.hides_future else self.key.shape[2]
        options = dict(self.options)
        if SCORE_BIAS in options:
            options[SCORE_BIAS] = options[SCORE_BIAS][..., :keys][:, :, asked]
        shape = (1, self.heads if heads is None else 1, len(asked), keys)
        weights = torch.empty(shape, dtype=torch.float32, device=self.query.device)
        # autocast would round the scores to 16 bits
        with torch.autocast(self.query.device.type, enabled=False):
            scoring = Scoring.read(
                self.module,
                self.query[:, :, asked],
                self.key[:, :, :keys],
                self._cut_mask(asked, keys),
                options,
                hides_future=False,
            )
            scores = choose_block(self.heads * self.key.shape[2])
            compute_weights(scoring, heads, weights, scores)
        return weights[0]

    def _cut_mask(self, asked: "torch.Tensor", keys: int) -> "torch.Tensor | None":
        """The mask [1, head or 1, query or 1, key] of a block; None if it hides nothing."""
        import torch

        if self.hides_future:
            first = int(asked[0])  # up to here all of them see every key
            later = torch.arange(first, keys, device=asked.device) > asked[:, None]
            # added to the scores, which is four times as fast as filling them
            hidden = torch.zeros(len(asked), keys, device=asked.device)
            hidden[:, first:].masked_fill_(later, -torch.inf)
            return hidden[None, None]
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        return self.mask[:, :, asked]


def choose_block(scores: int) -> int:
    """The number of scores to compute at a time; scores: those of one query."""
    return max(BLOCK_SCORES, min(BLOCK_QUERIES * scores, MOST_SCORES))


class TensorPool:
    """Memory for the tensors of all layers: one array per name.

    Tensors kept where a layer made them would stand between those that it drops, and split the
    memory that this frees into pieces too small for the next layer.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.arrays: dict[str, tuple[torch.Tensor, int]] = {}  # each with the number of places used

    def copy(self, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        """Copy a tensor of one layer into the array of this name."""
        array, used = self.arrays.get(name, (tensor.new_empty((0, *tensor.shape)), 0))
        if used == len(array) or array.shape[1:] != tensor.shape or array.dtype != tensor.dtype:
            array, used = tensor.new_empty((self.depth, *tensor.shape)), 0
        self.arrays[name] = (array, used + 1)
        return array[used].copy_(tensor)


@dataclass(frozen=True)
class StoredAttention:
    """Attention of a model that returns the whole matrix."""

    weights: "torch.Tensor"  # [head (1 if fused), query, key]
    window: int | None = None

    @property
    def heads(self) -> int:
        """The number of heads; 1 if they are fused."""
        return len(self.weights)

    def keep(self, pool: "TensorPool") -> "StoredAttention":
        """The same, as the matrix belongs to nothing else."""
        return self

    def blocks(self, queries: "torch.Tensor") -> Iterator[RowBlock]:
        """The weights of these positions, ascending, block by block."""
        heads, _, size = self.weights.shape
        for part in cut_queries(len(queries), heads * size):
            weights = self.weigh(queries[part], None).mean(dim=0)
            yield RowBlock(queries[part].to(weights.device), size, weights)

    def weigh(self, queries: "torch.Tensor", heads: str | None) -> "torch.Tensor":
        """[head (1 if fused), query, key]: the weights of these positions."""
        return fuse(self.weights[None, :, queries.to(self.weights.device)], heads)[0]


@dataclass(frozen=True)
class Even:
    """Uniform attention over the keys that a query may see."""

    size: int
    causal: bool
    device: "torch.device"
    window: int | None

    def blocks(self, queries: "torch.Tensor") -> Iterator[RowBlock]:
        """The weights of these positions, ascending, block by block."""
        import torch

        for part in cut_queries(len(queries), self.size):
            asked = queries[part].to(self.device)
            keys = int(asked[-1]) + 1 if self.causal else self.size
            away = asked[:, None] - torch.arange(keys, device=self.device)  # [query, key]
            seen = away >= 0 if self.causal else torch.ones_like(away, dtype=torch.bool)
            if self.window is not None:
                seen &= away.abs() < self.window
            yield RowBlock(asked, keys, seen / seen.sum(dim=1, keepdim=True))


# ---- products -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Carrier:
    """The products with a layer of the graph: with its residual, without removed positions."""

    residual: float
    removed: tuple[int, ...] = ()

    def carry_down(
        self, layer: LayerAttention, rows: "torch.Tensor", queries: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Rows [row, position] of layer l as rows over the positions of layer l - 1.

        queries: the positions to follow, ascending; of the others only the residual is carried.
        All that a row has reached if None.
        """
        carried = rows * self.residual
        followed = choose_queries(rows) if queries is None else queries
        for block in self.take_blocks(layer, followed):
            carried[:, : block.keys].addmm_(
                rows[:, block.queries], block.weights, alpha=1 - self.residual
            )
        return carried

    def carry_up(
        self, layer: LayerAttention, columns: "torch.Tensor", queries: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Columns [position, column] of layer l - 1 as columns over the positions of layer l.

        queries: the positions to compute, ascending; all if None.
        """
        import torch

        carried = columns * self.residual
        wanted = torch.arange(len(columns), device=columns.device) if queries is None else queries
        for block in self.take_blocks(layer, wanted):
            carried[block.queries] += (1 - self.residual) * (block.weights @ columns[: block.keys])
        return carried

    def take_blocks(self, layer: LayerAttention, queries: "torch.Tensor") -> Iterator[RowBlock]:
        """The blocks of a layer, without removed positions.

        Rows sum to 1 again, and a row with nothing left becomes the identity.
        """
        for block in layer.blocks(queries):
            if self.removed:
                gone = [position for position in self.removed if position < block.keys]
                block.weights[:, gone] = 0.0
                sums = block.weights.sum(dim=1, keepdim=True)
                block.weights.div_(sums.where(sums > 0, 1.0))
                alone = (sums[:, 0] == 0).nonzero()[:, 0]
                block.weights[alone, block.queries[alone]] = 1.0
            yield block


def choose_queries(rows: "torch.Tensor", skip: float = 0.0) -> "torch.Tensor":
    """The positions, ascending, that rows [row, position] have reached.

    skip: leave out those that together hold at most this share of every row.
    """
    most = rows.amax(dim=0)  # no row loses more than the sum of these
    if skip <= 0:
        return most.nonzero()[:, 0]
    values, order = most.sort()
    dropped = order[values.cumsum(dim=0) <= skip]
    most[dropped] = 0.0
    return most.nonzero()[:, 0]


# ---- running a model ----------------------------------------------------------------------------


def run_layers(
    model: Model,
    encoded: Encoded,
    take: "Callable[[int, Recomputed | StoredAttention], None]",
    *,
    logits_at: int | Sequence[int] | None = None,
) -> Any:
    """Run a model on one input, and call `take` with each layer's number and attention.

    The input runs alone, so that no padding enters, without a cache. Returns the model's output,
    with the logits of the positions `logits_at` only.
    """
    import torch

    count = LayerCount(model, len(encoded.tokens))
    module, arguments = find_body(model, encoded, logits_at)

    def add(call: AttentionCall) -> None:
        layer = read_call(call)
        take(count.add(layer, *call.shape(None)[2:]), layer)

    with evaluating(model.model), torch.no_grad(), running(model):
        if model.probe.interface:
            with observe_calls(model.model, add):
                output = module(**arguments)
        else:
            calls, output = collect_eager_calls(module, arguments, "mean")
            for call in calls:
                stored = StoredAttention(
                    torch.from_numpy(call.weights[0]).to(model.device), call.window
                )
                take(count.add(stored, *stored.weights.shape[1:]), stored)
    count.check()
    return output


class LayerCount:
    """Checks of the layers of one input: of each as it is computed, and of their number."""

    def __init__(self, model: Model, size: int) -> None:
        check_mixers(model)
        self.model, self.size, self.count = model, size, 0
        self.must_hide = is_causal_language_model(model)

    def add(self, layer: LayerAttention, queries: int, keys: int) -> int:
        """Check one more layer, and return its number."""
        self.count += 1
        if (queries, keys) != (self.size, self.size):
            raise CaptureError(
                f"layer {self.count} of {self.model.name} attends from {queries} to {keys}"
                f" positions; its input has {self.size}"
            )
        if self.must_hide:
            check_future(self.model, layer, self.count, self.size)
        return self.count

    def check(self) -> None:
        """Refuse a wrong number of layers."""
        name, depth = self.model.name, self.model.depth
        if not self.count:
            raise CaptureError(f"{name} has no attention that could be captured")
        if depth is not None and self.count != depth:
            raise CaptureError(
                f"{name} has {depth} layers, but {self.count} attention calls were recorded:"
                " rows would be wrong"
            )


def find_body(
    model: Model, encoded: Encoded, logits_at: int | Sequence[int] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The module to run, and its arguments: all layers, and the logits of positions, or none."""
    import torch

    known = signature(model.model.forward).parameters
    arguments: dict[str, Any] = dict(model.batch([encoded]))
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "logits_to_keep" in known:
        at = [logits_at] if isinstance(logits_at, int) else logits_at
        kept = 1 if at is None else torch.tensor(at, device=model.device)
        return model.model, {**arguments, "logits_to_keep": kept}
    body = getattr(model.model, "base_model", None)
    if logits_at is not None or model.task not in LANGUAGE or body in (None, model.model):
        return model.model, arguments
    return body, select_arguments(body, arguments)


def read_call(call: AttentionCall, heads: str | None = "mean") -> "Recomputed | StoredAttention":
    """The attention of one call of the interface. heads: how to fuse weights that it returned."""
    given = call.returned_weights
    if given is not None:
        return StoredAttention(fuse(given, heads)[0], call.window)
    is_causal = call.options.get(CAUSAL)
    is_causal = getattr(call.module, "is_causal", True) if is_causal is None else is_causal
    hides_future = call.function.hides_future and call.mask is None and bool(is_causal)
    # without the extra score of no token, which changes no share among tokens
    kept = {name: call.options.get(name) for name in (SCALING, SOFTCAP, SCORE_BIAS)}
    kept = {name: value for name, value in kept.items() if value is not None}
    given_to = (call.module, call.query, call.key, call.mask)
    return Recomputed(*given_to, kept, hides_future, call.window)


def is_causal_language_model(model: Model) -> bool:
    """Whether later positions must be hidden, so that a missing mask is an error."""
    return model.task == "causal LM" and not getattr(model.config, READS_AHEAD, False)


def check_future(model: Model, layer: LayerAttention, number: int, size: int) -> None:
    """Refuse a causal language model whose first position sees a later one."""
    import torch

    for block in layer.blocks(torch.zeros(1, dtype=torch.long)):
        if size > 1 and block.keys > 1 and block.weights[0, 1:].max() > LEAK:
            raise CaptureError(
                f"the attention of {model.name} must hide later positions; got"
                f" {float(block.weights[0, 1:].max()):.3g} at layer {number}, position 0"
            )
