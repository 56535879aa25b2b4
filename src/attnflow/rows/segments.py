"""`rollout_segments`: the share of every part of an input, found during one forward pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack, overload

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import Numbers
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import Group
from attnflow.core.memory import find_available_memory, format_gigabytes
from attnflow.core.request import check_layers
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.models.encoded import AnInput, OneInput
from attnflow.models.load import ModelLike, open_model
from attnflow.models.segments import Segments, read_segments
from attnflow.progress import progress_bar
from attnflow.rows.products import LayerAttention, run_layers
from attnflow.rows.request import RowGraph, RowRequest, check_removed, encode_rows

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
    residual: float
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
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> TokenAttention | list[TokenAttention]:
    """Attention rollout to parts of an input: which document, sentence or turn was read?

    The same as `rollout(graph, groups=...)`, for an input of any length: the shares travel up
    while the model runs, which costs one more attention per layer and keeps no layer. Rows sum to
    1: positions outside of all segments are one more group, the last.

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
        The rows to compute; all if None. Negative positions count from the end.

    >>> import attnflow as af
    >>> shares = af.rollout_segments(
    ...     af.load("verb-number"), "the key to the cabinets", segments={"noun": "the key"}
    ... )
    >>> shares.tokens, shares.at(position=0).round(2).tolist()
    (('noun', '(rest)'), [0.3, 0.7])
    """
    model = open_model(model)
    each, many = encode_rows(model, inputs, truncation, "rollout_segments")
    named = [segments] * len(each)
    if many and not isinstance(segments, str):
        named = check_each(segments, len(each))
    graph: RowGraph = {"without": without, "residual": residual, "normalize": normalize}
    results = []
    for encoded, own in zip(each, named, strict=True):
        asked = positions
        if asked is None:
            size = len(encoded.tokens)
            asked = sorted(set(range(size)) - set(check_removed(without, size)))
        request = RowRequest.read(model, encoded, "rollout", asked, layers, **graph)
        results.append(roll_segments(request, own, unit)[0])
    return results if many else results[0]


def check_each(segments: object, count: int) -> list[Segments]:
    """The segments of each of several inputs."""
    if not isinstance(segments, list | tuple) or len(segments) != count:
        raise OptionError(
            f"segments of {count} inputs must be one name for all, as 'sentences', or a list of"
            f" {count}; got {type(segments).__name__}"
        )
    return list(segments)


def roll_segments(
    request: RowRequest, segments: Segments, unit: str, *, logits_at: int | None = None
) -> tuple[TokenAttention, Any]:
    """The shares of the segments of one input, and the model's output, as from `run_layers`."""
    groups = read_segments(request.encoded, segments, unit, request.removed)
    layers = len(request.layers or ()) or request.model.depth or 1
    check_room(layers, len(request.positions), len(groups))
    parts = []
    for start in range(0, len(groups), COLUMNS):
        some = groups[start : start + COLUMNS]
        found, windows, output = carry_segments(request, some, logits_at)
        parts.append(found)
    asked = request.layers
    tops = tuple(parts[0]) if asked is None else check_layers(asked, len(windows))
    values = np.stack([np.concatenate([part[top] for part in parts], axis=-1) for top in tops])
    field = None
    if request.normalize == "receptive_field":
        field = measure_field(request, groups, tops, windows)
    return request.answer(values, tops, windows, field=field, groups=groups), output


def carry_segments(
    request: RowRequest, groups: Sequence[Group], logits_at: int | None
) -> tuple[dict[int, Floats], list[int | None], Any]:
    """[position, group] by layer from one forward pass, the windows of all layers, its output."""
    columns = start_columns(request, groups)
    found: dict[int, Floats] = {}
    windows: list[int | None] = []

    with progress_bar("shares of segments") as tick:

        def carry(number: int, layer: LayerAttention) -> None:
            nonlocal columns
            windows.append(layer.window)
            if not request.depends_on(number):
                return
            columns = request.carrier.carry_up(layer, columns)
            if request.includes(number):
                found[number] = pick_rows(request, columns)
            tick(number, request.model.depth or number)

        output = run_layers(request.model, request.encoded, carry, logits_at=logits_at)
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
