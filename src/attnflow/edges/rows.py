"""`rollout_rows`, `raw_rows`: rows of token attention of any length, in linear memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
import numpy.typing as npt

from attnflow.capturing.asking import (
    Numbers,
    RawOptions,
    RowOptions,
    RowRequest,
    check_depth,
    check_skip,
)
from attnflow.capturing.carrying import (
    Held,
    LayerAttention,
    Recomputed,
    Shelf,
    choose_queries,
    run_layers,
)
from attnflow.capturing.mixing import ModuleReader
from attnflow.capturing.prompts import Message, read_prompts
from attnflow.core.arrays import Floats
from attnflow.core.graph import RESIDUAL
from attnflow.core.results import TokenAttention
from attnflow.edges.blocks import EdgeLayer, MixedLayer, refuse_whole, run_mixes
from attnflow.edges.building import refuse_residual
from attnflow.edges.choosing import EdgeWeight, read_edges
from attnflow.errors import OptionError
from attnflow.models.inputs import Encoded, Input
from attnflow.models.model import Model
from attnflow.progress import progress_bar

if TYPE_CHECKING:
    import torch

TOGETHER = 64  # positions whose rows travel down at the same time, from all layers asked for


@overload
def rollout_rows(
    model: "Model | torch.nn.Module",
    inputs: list[int] | list[Message],
    **options: Unpack[RowOptions],
) -> TokenAttention: ...


@overload
def rollout_rows(
    model: "Model | torch.nn.Module", inputs: list[Any], **options: Unpack[RowOptions]
) -> list[TokenAttention]: ...


@overload
def rollout_rows(
    model: "Model | torch.nn.Module", inputs: Input, **options: Unpack[RowOptions]
) -> TokenAttention: ...


def rollout_rows(
    model: "Model | torch.nn.Module",
    inputs: "Input | list[Any]",
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    edges: Any = "attention",
    residual: float | None = None,
    without: Sequence[int] = (),
    normalize: str = "sum",
    skip: float = 0.0,
    truncation: bool = False,
) -> TokenAttention | list[TokenAttention]:
    """Attention rollout of some positions of an input of any length: no matrix is ever built.

    What `rollout(attention_graph(model, inputs, edges=edges), positions=...)` gives. Queries and
    keys of the layers are kept, and rows travel down together through weights that are computed
    for some queries at a time: about as much work as the model's attention itself. On other edges
    values and states are kept as well, and each block of queries costs what its edges cost.

    Parameters
    ----------
    model
        A `Model`, or a Hugging Face model that takes token ids; encoder-decoders are refused.
    inputs
        One input as in `capture`, or the messages of a chat; or a list of such, which gives a list.
    positions
        Whose rows to give; a negative one counts from the end.
    layers
        Whose rows to give; the top layer's if None.
    edges
        What an edge of the graph weighs, as for `attention_graph`; those that need a gradient, or
        blocks run again, are refused.
    residual
        The weight of the residual connection, from 0 up to but not including 1, 0.5 if None;
        refused where edges hold it inside.
    without
        Positions to take out before the residual is mixed in, for instance a sink; of attention.
    normalize
        "sum", so that rows sum to 1, or "receptive_field", divided by what attention without
        preference would give, then the same; the latter of attention.
    skip
        At most this share of a row is not followed: in every layer, the queries that hold least of
        it, for which edges are then not computed. How much that was is `lost` of the result.
    truncation
        Cut off what is longer than the model takes.

    >>> import attnflow as af
    >>> rows = af.rollout_rows(af.load("verb-number"), "the key to the cabinets", positions=[0])
    >>> rows
    <TokenAttention: rollout from layers 6 to layer 0, 1 position, 6 keys>
    >>> round(float(rows.at(0).sum()), 6)
    1.0
    """
    model = model if isinstance(model, Model) else Model(model)
    weight = read_weight(edges)
    refuse_residual({weight.name: weight}, residual)
    share = check_skip(skip)
    mixed = (RESIDUAL if residual is None else residual) if weight.residual == "mixed" else None
    prompts, many = read_prompts(model, inputs, truncation, "rollout_rows")
    options: dict[str, Any] = {"residual": mixed, "without": without, "normalize": normalize}
    results = []
    for prompt in prompts:
        request = RowRequest.read(
            model, prompt.encoded, "rollout", positions, layers, edges=weight.name, **options
        )
        results += read_rows(model, prompt.encoded, [RowJob(request, weight, share)])[0]
    return results if many else results[0]


@overload
def raw_rows(
    model: "Model | torch.nn.Module",
    inputs: list[int] | list[Message],
    **options: Unpack[RawOptions],
) -> TokenAttention: ...


@overload
def raw_rows(
    model: "Model | torch.nn.Module", inputs: list[Any], **options: Unpack[RawOptions]
) -> list[TokenAttention]: ...


@overload
def raw_rows(
    model: "Model | torch.nn.Module", inputs: Input, **options: Unpack[RawOptions]
) -> TokenAttention: ...


def raw_rows(
    model: "Model | torch.nn.Module",
    inputs: "Input | list[Any]",
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    edges: Any = "attention",
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
    model = model if isinstance(model, Model) else Model(model)
    weight = read_weight(edges)
    prompts, many = read_prompts(model, inputs, truncation, "raw_rows")
    options: dict[str, Any] = {"residual": None, "without": without, "edges": weight.name}
    results = []
    for prompt in prompts:
        request = RowRequest.read(model, prompt.encoded, "raw", positions, layers, **options)
        results += read_rows(model, prompt.encoded, [RowJob(request, weight)])[0]
    return results if many else results[0]


def read_weight(edges: Any) -> EdgeWeight:
    """The one kind of edges that rows are asked for on."""
    weights = read_edges(edges)
    if len(weights) != 1:
        raise OptionError(f"rows are on one kind of edges; got {', '.join(weights)}")
    (weight,) = weights.values()
    refuse_whole(weight)
    return weight


# ---- one pass for all rows ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowJob:
    """Rows of one input on one kind of edges."""

    request: RowRequest
    weight: EdgeWeight
    skip: float = 0.0  # the share of a row that need not be followed


def read_rows(
    model: Model,
    encoded: Encoded,
    jobs: Sequence[RowJob],
    *,
    logits_at: int | None = None,
    known: Sequence[Recomputed] | None = None,
) -> tuple[list[TokenAttention], Any]:
    """The rows of all jobs, in their order, in one forward pass; and what the model gave.

    logits_at: as in `run_layers`. known: the layers of attention, where the model has run before.
    """
    shelf, reader = Shelf(model.depth or 1), ModuleReader(model.model)
    kept: list[Recomputed | Held | MixedLayer] = []
    windows: list[int | None] = []
    raws = {job: RawRows(job) for job in jobs if job.request.method == "raw"}
    rolled = [job for job in jobs if job.request.method == "rollout"]

    def choose_layer(layer: Any, weight: EdgeWeight) -> LayerAttention:
        if not isinstance(layer, MixedLayer):
            chosen: LayerAttention = layer
            return chosen
        on_attention = weight.name == "attention"
        return layer.attention if on_attention else EdgeLayer(layer, weight, reader)

    def take(number: int, layer: Any) -> None:
        windows.append(layer.window)
        for job, rows in raws.items():
            rows.see(number, choose_layer(layer, job.weight))
        if any(job.request.reaches(number) for job in rolled):
            kept.append(layer.keep(shelf) if known is None else layer)

    output = None
    if known is not None:
        for number, layer in enumerate(known, start=1):
            take(number, layer)
    else:
        on_attention = all(job.weight.name == "attention" for job in jobs)
        run = run_layers if on_attention else run_mixes
        output = run(model, encoded, take, logits_at=logits_at)
    results = {job: rows.answer(windows) for job, rows in raws.items()}
    for job in rolled:
        layers = [choose_layer(layer, job.weight) for layer in kept]
        results[job] = roll_rows(job, layers, windows)
    return [results[job] for job in jobs], output


class RawRows:
    """Rows of raw attention, found layer by layer while the model runs."""

    def __init__(self, job: RowJob) -> None:
        import torch

        self.request = job.request
        self.ascending = torch.tensor(sorted(set(job.request.positions)))
        self.found: dict[int, npt.NDArray[np.float64]] = {}  # [position, key] by layer

    def see(self, number: int, layer: LayerAttention) -> None:
        """Weigh the rows asked for of one layer, if any are."""
        if self.request.layers is None:
            self.found.clear()  # the top layer comes last
        if not self.request.wants(number):
            return
        self.found[number] = self.weigh(layer)

    def weigh(self, layer: LayerAttention) -> npt.NDArray[np.float64]:
        """[position, key]: the rows asked for of one layer, in ascending order."""
        rows = np.zeros((len(self.ascending), len(self.request.encoded.tokens)))
        done = 0
        for block in self.request.carrier.take_blocks(layer, self.ascending):
            end = done + len(block.weights)
            rows[done:end, : block.keys] = block.weights.cpu().numpy()
            done = end
        return rows

    def answer(self, windows: Sequence[int | None]) -> TokenAttention:
        """The rows, named."""
        asked = self.request.layers
        tops = tuple(self.found) if asked is None else check_depth(asked, len(windows))
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
    """The rows of rollout, through layers from the lowest on."""
    asked = job.request.layers
    tops = (len(layers),) if asked is None else check_depth(asked, len(layers))
    values, lost = roll_down(job, layers, tops)
    field = None
    if job.request.normalize == "receptive_field":
        even = [job.request.make_even(window) for window in windows[: max(tops)]]
        field, _ = roll_down(RowJob(job.request, job.weight), even, tops)
    return job.request.answer(values, tops, windows, field=field, lost=lost if job.skip else None)


def roll_down(
    job: RowJob, layers: Sequence[LayerAttention], tops: Sequence[int]
) -> tuple[Floats, Floats]:
    """[layer, query, key]: rows that start in these layers; [layer, query]: what each has lost."""
    import torch

    request = job.request
    size = len(request.encoded.tokens)
    values = np.empty((len(tops), len(request.positions), size))
    lost = np.empty(values.shape[:2])
    order = np.argsort(np.argsort(tops, kind="stable"), kind="stable")
    with torch.no_grad(), progress_bar("attention rollout") as tick:
        for first in range(0, len(request.positions), TOGETHER):
            some = request.positions[first : first + TOGETHER]
            start = torch.zeros(len(some), size, device=request.model.device)  # [query, key]
            start[torch.arange(len(some)), list(some)] = 1.0
            rolled, gone = start[:0], start[:0, 0]  # [layer and query, key], [layer and query]
            for layer in range(max(tops), 0, -1):
                tick(max(tops) - layer + first * max(tops), len(request.positions) * max(tops))
                new = tops.count(layer)
                rolled = torch.cat([*[start] * new, rolled])
                gone = torch.cat([gone.new_zeros(new * len(some)), gone])
                # as much in every layer, so that a row loses no more than it may in all of them
                queries = choose_queries(rolled, job.skip / max(tops))
                left = rolled.sum(dim=1) - rolled[:, queries].sum(dim=1)
                gone = gone + (1 - request.carrier.residual) * left.clamp_min(0.0)
                rolled = request.carrier.carry_down(layers[layer - 1], rolled, queries)
            shape = (len(tops), len(some))
            part = slice(first, first + len(some))
            values[:, part] = rolled.cpu().numpy().reshape(*shape, size)[order]
            lost[:, part] = gone.cpu().numpy().reshape(shape)[order]
    return values, lost
