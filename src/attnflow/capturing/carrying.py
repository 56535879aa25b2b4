"""Products with attention that is never a matrix: rows carried down, columns carried up.

A layer of rollout is needed only as a factor: `r W` carries a row down, `W R` carries columns up.
So the weights W [query, key], mean over heads, are computed from a layer's queries and keys for
some queries at a time, multiplied, and dropped: memory of one block, whatever the length. `r W` is
also the gradient of attention with respect to its values, and `W R` is attention with R in the
place of the values; but a kernel multiplies for each head, and its backward pass computes three
products that nobody wants, while a block fuses heads first: benchmarks/long.py measures both.
Blocks know everything that capture knows: soft-capping, windows, grouped keys, biases.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

from attnflow.capturing.assembly import check_mixers
from attnflow.core.masks import LEAK
from attnflow.errors import CaptureError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import (
    CAUSAL,
    LANGUAGE,
    READS_AHEAD,
    SCALING,
    SCORE_BIAS,
    SOFTCAP,
    WINDOW,
)
from attnflow.models.inputs import Encoded, select_arguments
from attnflow.models.listening import (
    Attend,
    collect_eager_calls,
    intercepting,
    restore_rows,
)
from attnflow.models.model import Model
from attnflow.models.weighing import BLOCK_SCORES, compute_weights, cut_queries, fuse

if TYPE_CHECKING:
    import torch

# with fewer queries at a time, products of matrices are slow ...
BLOCK_QUERIES = 40
MOST_SCORES = 2**25  # ... unless their scores take more than 128 MB


@dataclass(frozen=True)
class Block:
    """The weights of some queries of a layer: `weights` [query, key], rows sum to 1."""

    queries: "torch.Tensor"  # their positions, ascending
    keys: int  # the first so many positions are its keys; later ones have weight 0
    weights: "torch.Tensor"


class LayerAttention(Protocol):
    """One layer's attention, mean over heads, to be weighed for some queries at a time."""

    @property
    def window(self) -> int | None:
        """A query sees keys less than so many positions away."""

    def keep(self, shelf: "Shelf") -> "LayerAttention":
        """The same, to be kept: it holds nothing else in memory."""

    def blocks(self, queries: "torch.Tensor") -> Iterator[Block]:
        """The weights of these positions, ascending, block by block."""


@dataclass(frozen=True)
class Recomputed:
    """Attention as queries and keys, from which weights are computed whenever they are needed."""

    module: Any
    query: "torch.Tensor"  # [1, head, position, width]
    key: "torch.Tensor"  # [1, group of heads, position, width]
    mask: "torch.Tensor | None"  # the model's own, shared by layers
    options: dict[str, Any]
    hides_future: bool
    window: int | None

    def keep(self, shelf: "Shelf") -> "Recomputed":
        """The same, to be kept: it holds nothing else in memory."""
        return replace(self, query=shelf.put("query", self.query), key=shelf.put("key", self.key))

    def blocks(self, queries: "torch.Tensor") -> Iterator[Block]:
        """The weights of these positions, ascending, block by block."""
        import torch

        heads, size = self.query.shape[1], self.key.shape[2]
        queries = queries.to(self.query.device)
        bias = self.options.get(SCORE_BIAS)
        block = choose_block(heads * size)
        for part in cut_queries(len(queries), heads * size, block):
            asked = queries[part]
            keys = int(asked[-1]) + 1 if self.hides_future else size
            options = dict(self.options)
            if bias is not None:
                options[SCORE_BIAS] = bias[..., :keys][:, :, asked]
            weights = self.query.new_empty((1, 1, len(asked), keys), dtype=torch.float32)
            # autocast would round the scores to 16 bits
            with torch.autocast(self.query.device.type, enabled=False):
                compute_weights(
                    self.module,
                    self.query[:, :, asked],
                    self.key[:, :, :keys],
                    self._cut_mask(asked, keys),
                    "mean",
                    weights,
                    options,
                    hides_future=False,
                    block_scores=block,
                )
            yield Block(asked, keys, weights[0, 0])

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
    """How many scores to compute together, if one query has so many."""
    return max(BLOCK_SCORES, min(BLOCK_QUERIES * scores, MOST_SCORES))


class Shelf:
    """Places for the tensors of all layers, in one array of each name.

    Kept where they were made, between what a layer makes and drops, they would split the memory
    that it drops into pieces too small for the next one.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.arrays: dict[str, tuple[torch.Tensor, int]] = {}  # and places used

    def put(self, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        """A copy of a tensor."""
        array, used = self.arrays.get(name, (tensor.new_empty((0, *tensor.shape)), 0))
        if used == len(array) or array.shape[1:] != tensor.shape or array.dtype != tensor.dtype:
            array, used = tensor.new_empty((self.depth, *tensor.shape)), 0
        self.arrays[name] = (array, used + 1)
        return array[used].copy_(tensor)


@dataclass(frozen=True)
class Held:
    """Attention of a model that computes the whole matrix itself, and gives it."""

    weights: "torch.Tensor"  # [query, key]
    window: int | None = None

    def keep(self, shelf: "Shelf") -> "Held":
        """The same: the matrix is its own."""
        return self

    def blocks(self, queries: "torch.Tensor") -> Iterator[Block]:
        """The weights of these positions, ascending, block by block."""
        size = self.weights.shape[1]
        for part in cut_queries(len(queries), size):
            yield Block(queries[part], size, self.weights[queries[part]])


@dataclass(frozen=True)
class Even:
    """Attention without preference: even over the keys that a query may see."""

    size: int
    causal: bool
    device: "torch.device"
    window: int | None

    def keep(self, shelf: "Shelf") -> "Even":
        """The same: it holds nothing."""
        return self

    def blocks(self, queries: "torch.Tensor") -> Iterator[Block]:
        """The weights of these positions, ascending, block by block."""
        import torch

        for part in cut_queries(len(queries), self.size):
            asked = queries[part].to(self.device)
            keys = int(asked[-1]) + 1 if self.causal else self.size
            away = asked[:, None] - torch.arange(keys, device=self.device)  # [query, key]
            seen = away >= 0 if self.causal else torch.ones_like(away, dtype=torch.bool)
            if self.window is not None:
                seen &= away.abs() < self.window
            yield Block(asked, keys, seen / seen.sum(dim=1, keepdim=True))


# ---- products -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Carrier:
    """How a layer of the graph carries: its residual, and the positions that are taken out."""

    residual: float
    removed: tuple[int, ...] = ()

    def carry_down(self, layer: LayerAttention, rows: "torch.Tensor") -> "torch.Tensor":
        """Rows [row, position] of layer l as rows over the positions of layer l - 1."""
        carried = rows * self.residual
        # blocks of queries that no row has reached are not weighed at all
        for block in self.take_blocks(layer, rows.any(dim=0).nonzero()[:, 0]):
            part = (1 - self.residual) * rows[:, block.queries]
            carried[:, : block.keys] += part @ block.weights
        return carried

    def carry_up(self, layer: LayerAttention, columns: "torch.Tensor") -> "torch.Tensor":
        """Columns [position, column] of layer l - 1 as columns over the positions of layer l."""
        import torch

        carried = columns * self.residual
        for block in self.take_blocks(layer, torch.arange(len(columns), device=columns.device)):
            carried[block.queries] += (1 - self.residual) * (block.weights @ columns[: block.keys])
        return carried

    def take_blocks(self, layer: LayerAttention, queries: "torch.Tensor") -> Iterator[Block]:
        """The blocks of a layer, without the positions that are taken out.

        Rows sum to 1 again, and a row with nothing left looks at itself.
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


# ---- running a model ----------------------------------------------------------------------------


def run_layers(model: Model, encoded: Encoded, take: Callable[[int, LayerAttention], None]) -> None:
    """Run a model on one input; each layer's number and attention go to `take`, as they come.

    Alone, so that no padding enters; without a cache, and without the logits of every position.
    """
    import torch

    check_mixers(model)
    size, count = len(encoded.tokens), 0
    module, arguments = find_body(model, encoded)
    own = set(model.model.modules())
    must_hide = is_causal_language_model(model)

    def note(layer: LayerAttention, queries: int, keys: int) -> None:
        nonlocal count
        count += 1
        if (queries, keys) != (size, size):
            raise CaptureError(
                f"layer {count} of {model.name} attends from {queries} to {keys} positions;"
                f" its input has {size}"
            )
        if must_hide:
            check_future(model, layer, count, size)
        take(count, layer)

    def listen(
        attend: Attend,
        part: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        output = attend.function(part, query, key, value, attention_mask, *rest, **options)
        if part in own:
            layer = read_call(attend, part, query, key, attention_mask, options, output)
            note(layer, query.shape[2], key.shape[2])
        return output

    with evaluating(model.model), torch.no_grad(), running(model):
        if model.probe.interface:
            with intercepting(listen):
                module(**arguments)
        else:
            calls, _ = collect_eager_calls(module, arguments, "mean")
            for call in calls:
                matrix = torch.from_numpy(call.weights[0, 0]).to(model.device)
                note(Held(matrix, call.window), *matrix.shape)
    if not count:
        raise CaptureError(f"{model.name} made no attention that could be captured: it has none")
    if model.depth is not None and count != model.depth:
        raise CaptureError(
            f"{model.name} has {model.depth} layers, but {count} attention calls were recorded:"
            " rows would be wrong"
        )


def find_body(model: Model, encoded: Encoded) -> tuple[Any, dict[str, Any]]:
    """What to run, and its arguments: all layers, but no logits that nobody reads."""
    known = signature(model.model.forward).parameters
    arguments: dict[str, Any] = dict(model.batch([encoded]))
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "logits_to_keep" in known:
        return model.model, {**arguments, "logits_to_keep": 1}
    body = getattr(model.model, "base_model", None)
    if model.task not in LANGUAGE or body is None or body is model.model:
        return model.model, arguments
    return body, select_arguments(body, arguments)


def read_call(
    attend: Attend,
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    mask: "torch.Tensor | None",
    options: dict[str, Any],
    output: Any,
) -> LayerAttention:
    """The attention of one call of the interface."""
    window = options.get(WINDOW)
    if attend.gives_weights:
        return Held(fuse(restore_rows(output[1].detach()), "mean")[0, 0], window)
    is_causal = options.get(CAUSAL)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    hides_future = attend.hides_future and mask is None and bool(is_causal)
    # the extra score of no token is not among them: it changes no share among tokens
    kept = {name: options[name] for name in (SCALING, SOFTCAP, SCORE_BIAS) if name in options}
    return Recomputed(module, query, key, mask, kept, hides_future, window)


def is_causal_language_model(model: Model) -> bool:
    """Whether what follows must be hidden, so that a mask that went missing is an error."""
    return model.task == "causal LM" and not getattr(model.config, READS_AHEAD, False)


def check_future(model: Model, layer: LayerAttention, number: int, size: int) -> None:
    """Refuse a causal language model whose first position sees a later one."""
    import torch

    for block in layer.blocks(torch.zeros(1, dtype=torch.long)):
        if size > 1 and block.keys > 1 and block.weights[0, 1:].max() > LEAK:
            raise CaptureError(
                f"the attention of {model.name} must hide what follows; got"
                f" {float(block.weights[0, 1:].max()):.3g} at layer {number}, position 0"
            )
