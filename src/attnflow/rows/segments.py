"""`rollout_segments`: the share of every part of an input, found during one forward pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack, overload

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import Numbers
from attnflow.core.choices import Choices
from attnflow.core.groups import Group
from attnflow.core.memory import find_available_memory, format_gigabytes
from attnflow.core.request import check_layers
from attnflow.core.results import TokenAttention
from attnflow.edges.edge_weight import EDGES, EdgeWeight
from attnflow.errors import CaptureError, OptionError
from attnflow.models.encoded import AnInput, OneInput
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.segments import Segments, read_segments
from attnflow.models.wiring.find import find_wirings
from attnflow.models.wiring.linear_maps import ModuleReader
from attnflow.notices import give_notice
from attnflow.progress import progress_bar
from attnflow.rows.blocks import MixedLayer, run_mixes, weigh_layer
from attnflow.rows.products import Recomputed, StoredAttention, run_layers
from attnflow.rows.request import RowRequest, check_removed, encode_rows
from attnflow.rows.rows import choose_graph, read_weight

if TYPE_CHECKING:
    import torch

# segments that one forward pass carries: with more, their product takes longer than the weights
COLUMNS = 1024


class SegmentOptions(TypedDict, total=False):
    """The options of `rollout_segments`."""

    segments: Required[Segments]
    unit: str
    layers: Numbers | None
    positions: Numbers | None
    edges: Choices | EdgeWeight | None
    residual: float | None
    without: Sequence[int]
    normalize: str
    truncation: bool


@overload
def rollout_segments(
    model: ModelLike, inputs: OneInput, **options: Unpack[SegmentOptions]
) -> TokenAttention: ...
@overload
def rollout_segments(
    model: ModelLike, inputs: list[AnInput], **options: Unpack[SegmentOptions]
) -> list[TokenAttention]: ...
def rollout_segments(
    model: ModelLike,
    inputs: OneInput | list[AnInput],
    *,
    segments: Segments,
    unit: str = "positions",
    layers: Numbers | None = None,
    positions: Numbers | None = None,
    edges: Choices | EdgeWeight | None = None,
    residual: float | None = None,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> TokenAttention | list[TokenAttention]:
    """Attention rollout to parts of an input: which document, sentence or turn was read?

    The same as `rollout(attention_graph(model, inputs, edges=edges), groups=...)`, for an input of
    any length: the shares travel up while the model runs, and no layer is kept. On attention that
    costs one more attention per layer; other edges weigh every layer. Rows sum to 1: positions
    outside of all segments are one more group, the last.

    Parameters
    ----------
    model, inputs, residual, without, normalize, truncation
        As for `rollout_rows`.
    segments
        "sentences", "lines" or "words" of a text, "turns" of a chat (the content of each message);
        or {name: segment}, or a list of them. A segment is a span (start, end), the end not
        included, a passage that stands in the text once, or a `Group`. They must not overlap, and
        need not cover the input. For a list of inputs, a list of one per input is taken too.
    unit
        What spans count: "positions" or "characters".
    layers, positions
        The rows to compute. If None: on attention, all; on other edges the top layer and, in causal
        models, the last position. Negative positions count from the end.
    edges
        What an edge of the graph weighs, as for `rollout_rows`. If None: contribution in causal
        models, where attention runs to the first tokens whatever they say; attention in other
        models, and where `residual`, `without` or a receptive field ask for its graph.

    >>> import attnflow as af
    >>> shares = af.rollout_segments(
    ...     af.load("verb-number"), "the key to the cabinets", segments={"noun": "the key"}
    ... )
    >>> shares.tokens, shares.at(position=0).round(2).tolist()
    (('noun', '(rest)'), [0.3, 0.7])
    """
    named_weight = None if edges is None else read_weight(edges)
    model = open_model(model)
    each, many = encode_rows(model, inputs, truncation, "rollout_segments")
    named = [segments] * len(each)
    if many and not isinstance(segments, str):
        named = check_each(segments, len(each))
    of_attention = residual is not None or bool(without) or normalize == "receptive_field"
    weight = named_weight or choose_weight(model, of_attention=of_attention)
    graph = choose_graph(weight, residual, without, normalize)
    if layers is None and weight.name != "attention":
        layers = len(find_wirings(model))
    results = []
    for encoded, own in zip(each, named, strict=True):
        default = choose_positions(model, weight, len(encoded.tokens), without)
        asked = default if positions is None else positions
        request = RowRequest.read(model, encoded, "rollout", asked, layers, **graph)
        results.append(roll_segments(request, own, unit, weight)[0])
    if edges is None and not of_attention:
        tell_default(model, weight)
    return results if many else results[0]


def choose_weight(model: Model, *, of_attention: bool) -> EdgeWeight:
    """The edges if none are named. of_attention: whether options ask for the attention graph."""
    if of_attention or not model.is_causal or find_missing(model):
        return EDGES["attention"]
    return EDGES["contribution"]


def find_missing(model: Model) -> CaptureError | None:
    """Why edges other than attention are not available for a model; None if they are."""
    try:
        find_wirings(model)
    except CaptureError as error:
        return error
    return None


def tell_default(model: Model, weight: EdgeWeight) -> None:
    """Say which edges were followed in a causal model, as none were named."""
    if not model.is_causal:
        return
    if weight.name == "attention":
        text = f"rollout_segments followed attention, not contributions: {find_missing(model)}"
        give_notice(text, UserWarning, stacklevel=3)
        return
    give_notice(
        "rollout_segments of a causal model now follows contribution edges, from the last position"
        " of the top layer; edges='attention' gives the shares of 0.3, edges='contribution' these"
        " without this warning",
        FutureWarning,
        stacklevel=3,
    )


def choose_positions(
    model: Model, weight: EdgeWeight, size: int, without: Sequence[int]
) -> list[int]:
    """The positions if none are named."""
    if weight.name != "attention" and model.is_causal:
        return [size - 1]
    return sorted(set(range(size)) - set(check_removed(without, size)))


def check_each(segments: object, count: int) -> list[Segments]:
    """The segments of each of several inputs."""
    if not isinstance(segments, list | tuple) or len(segments) != count:
        raise OptionError(
            f"segments of {count} inputs must be one name for all, as 'sentences', or a list of"
            f" {count}; got {type(segments).__name__}"
        )
    return list(segments)


def roll_segments(
    request: RowRequest,
    segments: Segments,
    unit: str,
    weight: EdgeWeight,
    *,
    logits_at: int | None = None,
) -> tuple[TokenAttention, Any]:
    """The shares of the segments of one input, and the model's output, as from `run_layers`."""
    groups = read_segments(request.encoded, segments, unit, request.removed)
    layers = len(request.layers or ()) or request.model.depth or 1
    check_room(layers, len(request.positions), len(groups))
    parts = []
    for start in range(0, len(groups), COLUMNS):
        some = groups[start : start + COLUMNS]
        found, windows, output = carry_segments(request, some, weight, logits_at)
        parts.append(found)
    asked = request.layers
    tops = tuple(parts[0]) if asked is None else check_layers(asked, len(windows))
    values = np.stack([np.concatenate([part[top] for part in parts], axis=-1) for top in tops])
    field = None
    if request.normalize == "receptive_field":
        field = measure_field(request, groups, tops, windows)
    return request.answer(values, tops, windows, field=field, groups=groups), output


def carry_segments(
    request: RowRequest, groups: Sequence[Group], weight: EdgeWeight, logits_at: int | None
) -> tuple[dict[int, Floats], list[int | None], Any]:
    """[position, group] by layer from one forward pass, the windows of all layers, its output."""
    import torch

    model, reader = request.model, ModuleReader(request.model.model)
    columns = start_columns(request, groups)
    asked = torch.tensor(sorted(set(request.positions)), device=model.device)
    found: dict[int, Floats] = {}
    windows: list[int | None] = []

    with progress_bar("shares of segments") as tick:

        def carry(number: int, layer: Recomputed | StoredAttention | MixedLayer) -> None:
            nonlocal columns
            windows.append(layer.window)
            if not request.depends_on(number):
                return
            # above the highest layer nothing is asked for, so no other rows are needed
            queries = asked if request.layers and number == max(request.layers) else None
            edges = weigh_layer(layer, weight, reader)
            columns = request.carrier.carry_up(edges, columns, queries)
            if request.includes(number):
                found[number] = pick_rows(request, columns)
            tick(number, model.depth or number)

        run = run_layers if weight.name == "attention" else run_mixes
        output = run(model, request.encoded, carry, logits_at=logits_at)
    return found, windows, output


def start_columns(request: RowRequest, groups: Sequence[Group]) -> "torch.Tensor":
    """[position, group]: 1 where a position is in a group."""
    import torch

    size, device = len(request.encoded.tokens), request.model.device
    columns = torch.zeros(size, len(groups), device=device)
    for place, group in enumerate(groups):
        columns[list(group.positions), place] = 1.0
    return columns


def pick_rows(request: RowRequest, columns: "torch.Tensor") -> Floats:
    """[asked position, group] of columns [position, group]."""
    rows: Floats = columns[list(request.positions)].cpu().double().numpy()
    return rows


def measure_field(
    request: RowRequest,
    groups: Sequence[Group],
    layers: Sequence[int],
    windows: Sequence[int | None],
) -> Floats:
    """[layer, position, group]: the shares under uniform attention."""
    columns, found = start_columns(request, groups), {}
    for number, window in enumerate(windows[: max(layers)], start=1):
        columns = request.carrier.carry_up(request.make_even(window), columns)
        if number in layers:
            found[number] = pick_rows(request, columns)
    return np.stack([found[layer] for layer in layers])


def check_room(layers: int, positions: int, groups: int) -> None:
    """Refuse a result that does not fit into memory, before the model runs."""
    needed, available = 2 * 8 * layers * positions * groups, find_available_memory()
    if available is not None and needed > available:
        raise OptionError(
            f"the shares of {groups} segments at {positions} positions of {layers} layers take"
            f" {format_gigabytes(needed)}, and {format_gigabytes(available)} are available; give"
            " one position, or fewer layers"
        )
