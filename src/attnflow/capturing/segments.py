"""`rollout_segments`: the share of every part of an input, found during one forward pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from attnflow.capturing.asking import Numbers, RowRequest, check_depth, check_removed
from attnflow.capturing.carrying import LayerAttention, run_layers
from attnflow.capturing.prompts import Message, Prompt, read_prompts
from attnflow.capturing.spans import Segments, read_segments
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import Group
from attnflow.core.memory import find_available_memory, format_gigabytes
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.models.inputs import Input
from attnflow.models.model import Model
from attnflow.progress import progress_bar

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
    model: "Model | torch.nn.Module",
    inputs: list[int] | list[Message],
    **options: Unpack[SegmentOptions],
) -> TokenAttention: ...


@overload
def rollout_segments(
    model: "Model | torch.nn.Module", inputs: list[Any], **options: Unpack[SegmentOptions]
) -> list[TokenAttention]: ...


@overload
def rollout_segments(
    model: "Model | torch.nn.Module", inputs: Input, **options: Unpack[SegmentOptions]
) -> TokenAttention: ...


def rollout_segments(
    model: "Model | torch.nn.Module",
    inputs: "Input | list[Any]",
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

    What `rollout(graph, groups=...)` gives for these groups, of an input of any length: the shares
    travel up while the model runs, at the price of one more attention per layer, and nothing is
    kept. Rows sum to 1: what no segment holds is one more group, the last.

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
        Whose rows to give; all if None. A negative position counts from the end.

    >>> import attnflow as af
    >>> shares = af.rollout_segments(
    ...     af.load("verb-number"), "the key to the cabinets", segments={"noun": "the key"}
    ... )
    >>> shares.tokens, shares.at(position=0).round(2).tolist()
    (('noun', '(rest)'), [0.3, 0.7])
    """
    model = model if isinstance(model, Model) else Model(model)
    prompts, many = read_prompts(model, inputs, truncation, "rollout_segments", places=True)
    each = [segments] * len(prompts)
    if many and not isinstance(segments, str):
        each = check_each(segments, len(prompts))
    options: dict[str, Any] = {"residual": residual, "without": without, "normalize": normalize}
    results = []
    for prompt, own in zip(prompts, each, strict=True):
        size = len(prompt.encoded.tokens)
        asked = positions
        if asked is None:
            asked = sorted(set(range(size)) - set(check_removed(without, size)))
        request = RowRequest.read(model, prompt.encoded, "rollout", asked, layers, **options)
        results.append(roll_segments(request, prompt, own, unit)[0])
    return results if many else results[0]


def check_each(segments: Any, count: int) -> list[Segments]:
    """The segments of each of several inputs."""
    if not isinstance(segments, list | tuple) or len(segments) != count:
        raise OptionError(
            f"segments of {count} inputs must be one name for all, as 'sentences', or a list of"
            f" {count}; got {type(segments).__name__}"
        )
    return list(segments)


def roll_segments(
    request: RowRequest,
    prompt: Prompt,
    segments: Segments,
    unit: str,
    *,
    logits_at: int | None = None,
) -> tuple[TokenAttention, Any]:
    """The shares of the segments of one input; and what the model gave, as `run_layers` does."""
    groups = read_segments(prompt, segments, unit, request.removed)
    layers = len(request.layers or ()) or request.model.depth or 1
    check_room(layers, len(request.positions), len(groups))
    parts = []
    for start in range(0, len(groups), COLUMNS):
        some = groups[start : start + COLUMNS]
        found, windows, output = carry_segments(request, some, logits_at)
        parts.append(found)
    asked = request.layers
    tops = tuple(parts[0]) if asked is None else check_depth(asked, len(windows))
    values = np.stack([np.concatenate([part[top] for part in parts], axis=-1) for top in tops])
    field = None
    if request.normalize == "receptive_field":
        field = measure_field(request, groups, tops, windows)
    names = tuple(group.name for group in groups)
    more: dict[str, Any] = {"tokens": names, "words": None, "groups": groups}
    return request.answer(values, tops, windows, field=field, **more), output


def carry_segments(
    request: RowRequest, groups: Sequence[Group], logits_at: int | None
) -> tuple[dict[int, npt.NDArray[np.float64]], list[int | None], Any]:
    """[position, group] by layer, in one forward pass; the windows of all layers; its output."""
    columns = start_columns(request, groups)
    found: dict[int, npt.NDArray[np.float64]] = {}
    windows: list[int | None] = []

    with progress_bar("shares of segments") as tick:

        def carry(number: int, layer: LayerAttention) -> None:
            nonlocal columns
            windows.append(layer.window)
            if not request.reaches(number):
                return
            columns = request.carrier.carry_up(layer, columns)
            if request.wants(number):
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


def pick_rows(request: RowRequest, columns: "torch.Tensor") -> npt.NDArray[np.float64]:
    """[asked position, group] of columns [position, group]."""
    rows: npt.NDArray[np.float64] = columns[list(request.positions)].cpu().double().numpy()
    return rows


def measure_field(
    request: RowRequest,
    groups: Sequence[Group],
    layers: Sequence[int],
    windows: Sequence[int | None],
) -> npt.NDArray[np.float64]:
    """[layer, position, group]: the shares that attention without preference would give."""
    columns, found = start_columns(request, groups), {}
    for number, window in enumerate(windows[: max(layers)], start=1):
        columns = request.carrier.carry_up(request.make_even(window), columns)
        if number in layers:
            found[number] = pick_rows(request, columns)
    return np.stack([found[layer] for layer in layers])


def check_room(layers: int, positions: int, groups: int) -> None:
    """Refuse a result that memory cannot hold, before the model runs."""
    needed, available = 2 * 8 * layers * positions * groups, find_available_memory()
    if available is not None and needed > available:
        raise OptionError(
            f"the shares of {groups} segments at {positions} positions of {layers} layers take"
            f" {format_gigabytes(needed)}, and {format_gigabytes(available)} are available; give"
            " positions=[-1], or fewer layers"
        )
