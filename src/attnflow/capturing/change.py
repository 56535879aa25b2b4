"""Running a model with some edges of its attention cut, or some heads switched off.

The model computes its attention as always, by whatever kernel it uses. Only the rows of attention
that lose a key are computed again, without it, and take the place of the model's own. So whatever
is not changed stays the same, to the last bit, and no kernel needs a mask that it might refuse.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attnflow.capturing.capture import (
    ForwardPass,
    assemble_batch,
    check_mixers,
    order_layers,
    place_part,
    read_arguments,
)
from attnflow.capturing.follow import spread_groups
from attnflow.errors import CaptureError, OptionError
from attnflow.models.attention_calls import (
    AttentionCall,
    AttentionFunction,
    AttentionOutput,
    LayerBuffer,
    LayerWeights,
    collect_eager_calls,
    intercept_attention,
    observe_calls,
)
from attnflow.models.attention_weights import Scoring, cut_queries, fuse
from attnflow.models.encoded import Encoded
from attnflow.models.execution import evaluating, running
from attnflow.models.families import name_part
from attnflow.models.model import Model
from attnflow.models.predict import keep_logits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CutEdge:
    """An edge of one attention, which is cut."""

    query: int  # among the queries of this attention
    key: int
    head: int | None  # all heads if None
    name: tuple[int, ...]  # as it was given, for messages
    is_checked: bool = True  # whether the query must see the key


@dataclass(frozen=True)
class CallChange:
    """The changes of one attention call, for one sequence."""

    cut: tuple[CutEdge, ...] = ()
    # heads that are switched off, and the output that they give instead [width]; zero if None
    off: "Mapping[int, torch.Tensor | None]" = field(default_factory=lambda: MappingProxyType({}))


Changes = Mapping[int, CallChange]  # of one sequence, by the number of the attention call


@dataclass(frozen=True)
class LayerPlace:
    """A layer of the graph: the attention call that it is, and the positions that it mixes."""

    call: int  # the number of the call in a forward pass
    heads: int
    rows: slice  # the positions of its queries in the graph
    columns: slice  # of its keys
    name: str  # of the layer, for messages


@dataclass(frozen=True, eq=False)
class ChangedPass(ForwardPass):
    """A forward pass with changes, and where the layers of the graph are."""

    layers: list[LayerPlace]


def run_changed(
    model: Model,
    inputs: Sequence[Encoded],
    changes: Sequence[Changes],
    places: Sequence[int],
    hidden: Sequence[Sequence[int]],
) -> tuple[ChangedPass, Sequence[int]]:
    """Run the model once on inputs of the same length, each with its changes of attention.

    places: where each prediction is read, if at all. hidden: positions that attention masks out.
    Returns the pass, with heads fused to their mean, and where its scores are in the output.
    """
    import torch

    check_mixers(model)
    arguments: dict[str, Any] = read_arguments(model, inputs)
    hide_positions(model, arguments, hidden)
    if model.predicts:
        arguments, places = keep_logits(model, arguments, places)
    run = ChangedRun(model, changes, hidden)
    with evaluating(model.model), torch.no_grad(), running(model):
        if model.probe.interface:
            with run.watch():
                output = model.model(**arguments)
        else:  # only its input is changed
            run.calls, output = collect_eager_calls(model.model, arguments, "mean")
            run.heads = [1] * len(run.calls)
    attentions = assemble_batch(model, inputs, run.calls, "mean", may_be_empty=run.may_be_empty)
    return ChangedPass(attentions, output, place_layers(model, inputs[0], run)), places


def check_interface(model: Model) -> None:
    """Refuse a model whose attention cannot be changed."""
    if not model.probe.interface:
        raise CaptureError(
            f"{model.name} computes attention outside transformers' attention interface, so its"
            " edges and heads cannot be changed; blank tokens out instead: blank=[...]"
        )


def hide_positions(
    model: Model, arguments: dict[str, Any], hidden: Sequence[Sequence[int]]
) -> None:
    """Take positions out of the attention mask, in place."""
    if not any(hidden):
        return
    if "attention_mask" not in arguments:
        raise OptionError(
            f"replacement='attention' needs an attention mask, and {model.name} takes none;"
            " give a token to put in place of others",
            options=["replacement='attention'"],
        )
    for row, positions in enumerate(hidden):
        arguments["attention_mask"][row, list(positions)] = 0


def place_layers(model: Model, encoded: Encoded, run: "ChangedRun") -> list[LayerPlace]:
    """Where the layers of the graph are among the attention calls."""
    if not model.is_encoder_decoder:
        every = slice(0, len(encoded.tokens))
        return [
            LayerPlace(call, heads, every, every, f"layer {call + 1}")
            for call, heads in enumerate(run.heads)
        ]
    names = [call.name for call in run.calls]
    order, titles = order_layers(names)
    sizes = len(encoded.ids), len(encoded.decoder_ids)
    return [
        LayerPlace(
            call,
            run.heads[call],
            *place_part(name_part(names[call]), *sizes),
            f"layer {number} ({title})",
        )
        for number, (call, title) in enumerate(zip(order, titles, strict=True), start=1)
    ]


# ---- one run -------------------------------------------------------------------------------------


class ChangedRun:
    """Changes attention calls as a model makes them, and records the weights.

    changes, hidden: of each sequence. per_step: while a model generates, the calls that each step
    makes again; positions are then counted over all steps, and weights are not recorded.
    """

    def __init__(
        self,
        model: Model,
        changes: Sequence[Changes],
        hidden: Sequence[Sequence[int]] = (),
        *,
        per_step: int | None = None,
    ) -> None:
        self.changes, self.hidden = changes, hidden
        self.is_pair = model.is_encoder_decoder
        self.names = {module: name for name, module in model.model.named_modules()}
        self.buffer = LayerBuffer(model.depth or 1)
        self.per_step = per_step
        self.calls: list[LayerWeights] = []
        self.heads: list[int] = []
        self.count = 0
        self.read = 0  # positions that steps before this one have read

    @property
    def may_be_empty(self) -> bool:
        """Whether rows may have lost every key."""
        return any(self.changes) or any(self.hidden)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While this lasts, attention in this thread is changed."""
        with intercept_attention(self.attend):
            yield

    def attend(
        self,
        function: AttentionFunction,
        module: "torch.nn.Module",
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        attention_mask: "torch.Tensor | None" = None,
        *rest: object,
        **options: Any,
    ) -> AttentionOutput:
        """The attention of a call, changed where this is wanted."""
        output = function.compute(module, query, key, value, attention_mask, *rest, **options)
        if module not in self.names:
            return output
        given = (query, key, value, attention_mask, options, output)
        call = AttentionCall(self.names[module], module, function, *given)
        number = self.count if self.per_step is None else self.count % self.per_step
        self.count += 1
        changed = ChangedCall(call, self.read, self.list_changes(number, call))
        if self.per_step is None:
            self.record(call, changed)
        elif number == self.per_step - 1:
            self.read += query.shape[2]
        return changed.output, output[1]

    def list_changes(self, number: int, call: AttentionCall) -> dict[int, CallChange]:
        """The changes of a call, by sequence."""
        changes = {row: each[number] for row, each in enumerate(self.changes) if number in each}
        if changes and call.query.shape[0] != len(self.changes):
            raise CaptureError(
                f"{call.name} attends for {call.query.shape[0]} sequences, and the model reads"
                f" {len(self.changes)}: its attention cannot be changed"
            )
        return changes

    def record(self, call: AttentionCall, changed: "ChangedCall") -> None:
        """Keep the weights of a call, with heads fused."""
        import torch

        weights = self.buffer.take(call.shape("mean"))
        share = changed.fuse(torch.from_numpy(weights))
        # what hidden positions read goes nowhere
        if not self.is_pair or name_part(call.name) == "encoder":
            for row, positions in enumerate(self.hidden):
                weights[row, :, list(positions)] = 0.0
        self.calls.append(LayerWeights(call.name, weights, share, call.window))
        self.heads.append(call.query.shape[1])


class ChangedCall:
    """One attention call with its changes, by sequence. start: its first query's position."""

    def __init__(self, call: AttentionCall, start: int, changes: Mapping[int, CallChange]) -> None:
        import torch

        self.call, self.changes = call, changes
        self.output = call.output[0]
        self.weights: torch.Tensor | None = None  # [sequence, head, query, key], if changed
        self.share: torch.Tensor | None = None
        if not changes:
            return
        self.output = self.output.clone()
        self.weights = torch.empty(call.shape(None), device=call.query.device)
        self.share = call.weigh(None, self.weights)
        self.touched = self.weights.new_zeros(*self.weights.shape[::2], dtype=torch.bool)
        with torch.autocast(call.query.device.type, enabled=False):
            self.cut(start)
        for row, change in changes.items():
            for head, mean in change.off.items():
                self.output[row, :, head] = 0.0 if mean is None else mean.to(self.output)

    def list_cut(self, start: int) -> list[tuple[int, CutEdge, int, int]]:
        """(sequence, edge, query, key) of the edges that this call has."""
        _, _, queries, keys = self.call.shape(None)
        first = start + queries - keys  # position of the first key: a cache may hold the last ones
        if queries != keys and start == 0:  # attention to another sequence
            first = 0
        return [
            (row, edge, edge.query - start, edge.key - first)
            for row, change in self.changes.items()
            for edge in change.cut
            if 0 <= edge.query - start < queries and 0 <= edge.key - first < keys
        ]

    def cut(self, start: int) -> None:
        """Compute the rows again that lose a key."""
        import torch

        cut = self.list_cut(start)
        if not cut or self.weights is None:
            return
        scoring = self.call.scoring
        sequences, heads, queries, keys = self.call.shape(None)
        values = spread_groups(self.call.value.float(), heads)
        output = self.output.transpose(1, 2)  # a view: [sequence, head, query, width]
        for rows in cut_queries(queries, sequences * heads * keys):
            here = [each for each in cut if rows.start <= each[2] < rows.stop]
            if not here:
                continue
            scores = score_visible(scoring, rows)
            gone = mark_cut(scores, here, rows.start)
            shares = share_out(scores.masked_fill_(gone, -torch.inf), scoring.no_token)
            changed = gone.any(dim=-1)  # [sequence, head, query]
            self.touched[:, rows] |= changed.any(dim=1)
            seen = shares.shape[3]
            mixed = (shares @ values[:, :, :seen]).to(output.dtype)
            output[:, :, rows][changed] = mixed[changed]
            sums = shares.sum(dim=-1, keepdim=True)
            even = shares / sums.where(sums > 0, 1.0)
            self.weights[:, :, rows, :seen][changed] = even[changed]
            if self.share is not None:
                left = (1 - sums[..., 0]).clamp(0.0, 1.0).mean(dim=1).cpu()
                self.share[:, rows] = left

    def fuse(self, fused: "torch.Tensor") -> "torch.Tensor | None":
        """Set weights [sequence, 1, query, key] to the mean of the heads that still attend.

        Rows that no head has a key for are 0. Returns the share of no token, if any.
        """
        if self.weights is None:
            return self.call.weigh("mean", fused)
        for row, change in self.changes.items():
            self.weights[row, list(change.off)] = 0.0
            self.touched[row] |= bool(change.off)
        fused.copy_(fuse(self.weights, "mean"))
        sums = self.weights.sum(dim=(1, 3))[..., None]
        left = self.weights.sum(dim=1) / sums.where(sums > 0, 1.0)
        fused[:, 0][self.touched] = left[self.touched].to(fused)
        return self.share


def score_visible(scoring: Scoring, rows: slice) -> "torch.Tensor":
    """[sequence, head, query, key]: the scores of some queries, minus infinity where hidden."""
    import torch

    scores = scoring.score(rows)
    mask = scoring.mask
    if mask is not None and mask.dtype != torch.bool:  # hides by the lowest number of its type
        scores.masked_fill_(scores <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    return scores


def mark_cut(
    scores: "torch.Tensor", cut: Sequence[tuple[int, CutEdge, int, int]], first: int
) -> "torch.Tensor":
    """[sequence, head, query, key]: whether an edge is cut; those that are checked must exist.

    scores: of queries from `first` on, up to the last key that any of them sees.
    """
    import torch

    gone = torch.zeros_like(scores, dtype=torch.bool)
    visible = scores.isfinite().any(dim=1).cpu().numpy()  # [sequence, query, key], by any head
    seen = scores.shape[3]
    heads: dict[int | None, list[tuple[int, int, int]]] = {}
    for row, edge, query, key in cut:
        place = row, query - first, key
        if edge.is_checked and not (key < seen and visible[place]):
            refuse_edge(edge)
        if key < seen:
            heads.setdefault(edge.head, []).append(place)
    for head, places in heads.items():
        sequences, queries, keys = torch.tensor(places, device=gone.device).unbind(dim=1)
        gone[sequences, slice(None) if head is None else head, queries, keys] = True
    return gone


def refuse_edge(edge: CutEdge) -> None:
    """Refuse an edge that the model does not have."""
    layer, query, key = edge.name[:3]
    raise OptionError(
        f"an edge leads to a position that its query sees; got {edge.name}, and in layer {layer}"
        f" position {query} does not see position {key}, which comes later or lies outside a window"
    )


def share_out(scores: "torch.Tensor", no_token: "torch.Tensor | None") -> "torch.Tensor":
    """[..., key]: softmax of scores [sequence, head, query, key]; 0 in rows without a key.

    no_token: [head]: the score of a key that is not a token, whose share is left out.
    """
    import torch

    if no_token is not None:
        sequences, _, size, seen = scores.shape
        more = no_token.float().reshape(1, -1, 1, 1).expand(sequences, -1, size, 1)
        return torch.cat([scores, more], dim=-1).softmax(dim=-1)[..., :seen]
    return torch.nan_to_num(scores.softmax(dim=-1), nan=0.0)


# ---- heads over reference inputs -----------------------------------------------------------------


def average_heads(model: Model, reference: Sequence[Encoded]) -> "dict[int, torch.Tensor]":
    """[head, width] by attention call: the mean output of each head, over all positions."""
    import torch

    sums: dict[int, torch.Tensor] = {}
    lengths: Counter[int] = Counter()
    for encoded in reference:
        outputs: list[torch.Tensor] = []  # [query, head, width] of each call

        def keep(call: AttentionCall, outputs: list[torch.Tensor] = outputs) -> None:
            outputs.append(call.output[0].detach()[0].double())

        with (
            evaluating(model.model),
            torch.no_grad(),
            running(model),
            observe_calls(model.model, keep),
        ):
            model.model(**read_arguments(model, [encoded], logits=False))
        for number, output in enumerate(outputs):
            sums[number] = sums.get(number, torch.zeros_like(output[0])) + output.sum(dim=0)
            lengths[number] += len(output)
    return {number: total / lengths[number] for number, total in sums.items()}
