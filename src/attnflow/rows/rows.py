"""`rollout_rows`, `raw_rows`: rows of token attention of any length, in linear memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack, overload

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import Numbers
from attnflow.core.choices import Choices
from attnflow.core.graph import RESIDUAL
from attnflow.core.request import check_layers
from attnflow.core.results import TokenAttention
from attnflow.edges.edge_weight import EdgeWeight, read_edges
from attnflow.edges.graphs import refuse_residual
from attnflow.errors import OptionError
from attnflow.models.encoded import AnInput, Encoded, OneInput
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.wiring.linear_maps import ModuleReader
from attnflow.progress import progress_bar
from attnflow.rows.blocks import MixedLayer, refuse_whole, run_mixes, weigh_layer
from attnflow.rows.products import (
    LayerAttention,
    Recomputed,
    StoredAttention,
    TensorPool,
    choose_queries,
    run_layers,
)
from attnflow.rows.request import RowGraph, RowRequest, check_skip, encode_rows

ComputedLayer = Recomputed | StoredAttention | MixedLayer


class RawOptions(TypedDict, total=False):
    """The options of `raw_rows`; those of all rows."""

    positions: Required[Numbers]
    layers: Numbers | None
    edges: Choices | EdgeWeight
    without: Sequence[int]
    truncation: bool


class RowOptions(RawOptions, total=False):
    """The options of `rollout_rows`."""

    residual: float | None
    normalize: str
    skip: float


@overload
def rollout_rows(
    model: ModelLike, inputs: OneInput, **options: Unpack[RowOptions]
) -> TokenAttention: ...
@overload
def rollout_rows(
    model: ModelLike, inputs: list[AnInput], **options: Unpack[RowOptions]
) -> list[TokenAttention]: ...
def rollout_rows(
    model: ModelLike,
    inputs: OneInput | list[AnInput],
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    edges: Choices | EdgeWeight = "attention",
    residual: float | None = None,
    without: Sequence[int] = (),
    normalize: str = "sum",
    skip: float = 0.0,
    truncation: bool = False,
) -> TokenAttention | list[TokenAttention]:
    """Attention rollout of some positions of an input of any length: no matrix is ever built.

    The same as `rollout(attention_graph(model, inputs, edges=edges), positions=...)`. Queries and
    keys of all layers are kept, and rows travel down together through weights that are computed
    for some queries at a time: about as much work as the model's attention itself. Other edges
    also keep values and states, and weigh each block of queries.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model;
        encoder-decoders are refused.
    inputs
        One input as in `capture`, or a list of such, which gives a list.
    positions
        The positions whose rows are computed; negative ones count from the end.
    layers
        The layers whose rows are computed; the top one if None.
    edges
        What an edge of the graph weighs, as for `attention_graph`; edges that need a gradient, or
        run blocks again, are refused.
    residual
        The weight of the residual connection, from 0 up to but not including 1, 0.5 if None;
        refused if edges hold it inside.
    without
        Positions to remove before the residual is mixed in, for instance a sink; for attention
        only.
    normalize
        "sum": rows sum to 1. "receptive_field": values are divided by those of uniform attention,
        then rows sum to 1; for attention only.
    skip
        At most this share of a row is not followed: in each layer the queries that hold least of
        it, whose edges are then not computed. `lost` of the result is the share that was skipped.
    truncation
        Cut off inputs that are longer than the model takes.

    >>> import attnflow as af
    >>> rows = af.rollout_rows(af.load("verb-number"), "the key to the cabinets", positions=[0])
    >>> rows
    <TokenAttention: rollout from layers 6 to layer 0, 1 position, 6 keys>
    >>> round(float(rows.at(0).sum()), 6)
    1.0
    """
    model = open_model(model)
    weight = read_weight(edges)
    graph = choose_graph(weight, residual, without, normalize)
    share = check_skip(skip)

    def make_job(encoded: Encoded) -> RowJob:
        request = RowRequest.read(model, encoded, "rollout", positions, layers, **graph)
        return RowJob(request, weight, share)

    return compute_each("rollout_rows", model, inputs, truncation, make_job)


@overload
def raw_rows(
    model: ModelLike, inputs: OneInput, **options: Unpack[RawOptions]
) -> TokenAttention: ...
@overload
def raw_rows(
    model: ModelLike, inputs: list[AnInput], **options: Unpack[RawOptions]
) -> list[TokenAttention]: ...
def raw_rows(
    model: ModelLike,
    inputs: OneInput | list[AnInput],
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    edges: Choices | EdgeWeight = "attention",
    without: Sequence[int] = (),
    truncation: bool = False,
) -> TokenAttention | list[TokenAttention]:
    """Raw attention of some positions of an input of any length: only these rows are computed.

    Parameters
    ----------
    model, inputs, positions, layers, edges, without, truncation
        As for `rollout_rows`.

    >>> import attnflow as af
    >>> af.raw_rows(af.load("verb-number"), "the key to the cabinets", positions=[0, -1])
    <TokenAttention: raw from layers 6, 2 positions, 6 keys>
    """
    model = open_model(model)
    weight = read_weight(edges)
    graph: RowGraph = {"without": without, "residual": None, "edges": weight.name}

    def make_job(encoded: Encoded) -> RowJob:
        request = RowRequest.read(model, encoded, "raw", positions, layers, **graph)
        return RowJob(request, weight)

    return compute_each("raw_rows", model, inputs, truncation, make_job)


def compute_each(
    function: str,
    model: Model,
    inputs: object,
    truncation: bool,
    make_job: "Callable[[Encoded], RowJob]",
) -> TokenAttention | list[TokenAttention]:
    """The rows of one input, or a list of those of several. function: its name, for messages."""
    each, many = encode_rows(model, inputs, truncation, function)
    results = []
    for encoded in each:
        (result,), _ = compute_rows(model, encoded, [make_job(encoded)])
        results.append(result)
    return results if many else results[0]


def read_weight(edges: Choices | EdgeWeight) -> EdgeWeight:
    """The one kind of edges to compute rows on."""
    weights = read_edges(edges)
    if len(weights) != 1:
        raise OptionError(f"rows are on one kind of edges; got {', '.join(weights)}")
    (weight,) = weights.values()
    refuse_whole(weight)
    return weight


def choose_graph(
    weight: EdgeWeight, residual: float | None, without: Sequence[int], normalize: str
) -> RowGraph:
    """The options that say which graph rows on these edges are of; residual: 0.5 if None."""
    refuse_residual({weight.name: weight}, residual)
    mixed = (RESIDUAL if residual is None else residual) if weight.residual == "mixed" else None
    return {"without": without, "residual": mixed, "normalize": normalize, "edges": weight.name}


# ---- one pass for all rows ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowJob:
    """Rows of one input on one kind of edges."""

    request: RowRequest
    weight: EdgeWeight
    skip: float = 0.0  # the share of a row that need not be followed


def compute_rows(
    model: Model,
    encoded: Encoded,
    jobs: Sequence[RowJob],
    *,
    logits_at: int | None = None,
    known: Sequence[Recomputed | StoredAttention] | None = None,
) -> tuple[list[TokenAttention], Any]:
    """The rows of all jobs, in their order, from one forward pass; and the model's output.

    logits_at: as for `run_layers`. known: the layers of attention of a model that has run already.
    """
    collector = RowCollector(model, jobs, keep=known is None)
    if known is not None:
        for number, layer in enumerate(known, start=1):
            collector.take(number, layer)
        return collector.answer(), None
    on_attention = all(job.weight.name == "attention" for job in jobs)
    run = run_layers if on_attention else run_mixes
    output = run(model, encoded, collector.take, logits_at=logits_at)
    return collector.answer(), output


class RowCollector:
    """The layers that jobs need, collected while the model runs.

    keep: copy layers for rollout, as the model will drop them.
    """

    def __init__(self, model: Model, jobs: Sequence[RowJob], *, keep: bool) -> None:
        self.jobs, self.reader = jobs, ModuleReader(model.model)
        self.pool = TensorPool(model.depth or 1) if keep else None
        self.layers: list[ComputedLayer] = []  # of rollout
        self.windows: list[int | None] = []
        self.raws = {job: RawRows(job) for job in jobs if job.request.method == "raw"}
        self.rolled = [job for job in jobs if job.request.method == "rollout"]

    def take(self, number: int, layer: ComputedLayer) -> None:
        """Take one layer, from the lowest on."""
        self.windows.append(layer.window)
        for job, rows in self.raws.items():
            rows.see(number, weigh_layer(layer, job.weight, self.reader))
        if any(job.request.depends_on(number) for job in self.rolled):
            self.layers.append(layer if self.pool is None else layer.keep(self.pool))

    def answer(self) -> list[TokenAttention]:
        """The results of all jobs, once every layer has been taken."""
        results = {job: rows.answer(self.windows) for job, rows in self.raws.items()}
        for job in self.rolled:
            layers = [weigh_layer(layer, job.weight, self.reader) for layer in self.layers]
            results[job] = roll_rows(job, layers, self.windows)
        return [results[job] for job in self.jobs]


class RawRows:
    """Rows of raw attention, computed layer by layer while the model runs."""

    def __init__(self, job: RowJob) -> None:
        import torch

        self.request = job.request
        self.ascending = torch.tensor(sorted(set(job.request.positions)))
        self.found: dict[int, Floats] = {}  # [position, key] by layer

    def see(self, number: int, layer: LayerAttention) -> None:
        """Compute the rows of one layer if they were asked for."""
        if self.request.layers is None:
            self.found.clear()  # the top layer comes last
        if self.request.includes(number):
            self.found[number] = self.weigh(layer)

    def weigh(self, layer: LayerAttention) -> Floats:
        """[position, key]: the rows of one layer, in ascending order."""
        rows = np.zeros((len(self.ascending), len(self.request.encoded.tokens)))
        done = 0
        for block in self.request.carrier.take_blocks(layer, self.ascending):
            end = done + len(block.weights)
            rows[done:end, : block.keys] = block.weights.cpu().numpy()
            done = end
        return rows

    def answer(self, windows: Sequence[int | None]) -> TokenAttention:
        """The result, once every layer has been seen."""
        asked = self.request.layers
        tops = tuple(self.found) if asked is None else check_layers(asked, len(windows))
        places = np.searchsorted(self.ascending.numpy(), self.request.positions)
        values = np.stack([self.found[layer][places] for layer in tops])
        field = None
        if self.request.normalize == "receptive_field":
            even = [self.request.make_even(windows[layer - 1]) for layer in tops]
            field = np.stack([self.weigh(layer)[places] for layer in even])
        return self.request.answer(values, tops, windows, field=field)


def roll_rows(
    job: RowJob, layers: Sequence[LayerAttention], windows: Sequence[int | None]
) -> TokenAttention:
    """The result of a rollout through layers, the lowest first."""
    asked = job.request.layers
    tops = (len(layers),) if asked is None else check_layers(asked, len(layers))
    values, lost = carry_down(job, layers, tops)
    field = None
    if job.request.normalize == "receptive_field":
        even = [job.request.make_even(window) for window in windows[: max(tops)]]
        field, _ = carry_down(RowJob(job.request, job.weight), even, tops)
    return job.request.answer(values, tops, windows, field=field, lost=lost if job.skip else None)


def carry_down(
    job: RowJob, layers: Sequence[LayerAttention], tops: Sequence[int]
) -> tuple[Floats, Floats]:
    """[layer, query, key]: rows that start in these layers; [layer, query]: what each has lost."""
    import torch

    request = job.request
    count, size, depth = len(request.positions), len(request.encoded.tokens), max(tops)
    order = sorted(range(len(tops)), key=lambda place: -tops[place])  # the highest layer first
    rolled = torch.zeros(len(tops) * count, size, device=request.model.device)
    rolled[torch.arange(len(rolled)), list(request.positions) * len(tops)] = 1.0
    gone = rolled.new_zeros(len(rolled))
    with torch.no_grad(), progress_bar(f"{request.edges} rollout") as tick:
        for layer in range(depth, 0, -1):
            begun = slice(sum(top >= layer for top in tops) * count)
            rows = rolled[begun]
            # as much in every layer, so that a row loses no more than it may in all of them
            queries = choose_queries(rows, job.skip / depth)
            left = rows.sum(dim=1) - rows[:, queries].sum(dim=1)
            gone[begun] += (1 - request.carrier.residual) * left.clamp_min(0.0)
            rolled[begun] = request.carrier.carry_down(layers[layer - 1], rows, queries)
            tick(depth - layer + 1, depth)
    values, lost = np.empty((len(tops), count, size)), np.empty((len(tops), count))
    for place, top in enumerate(order):
        part = slice(place * count, (place + 1) * count)
        values[top], lost[top] = rolled[part].cpu().numpy(), gone[part].cpu().numpy()
    return values, lost
