"""`rollout_segments`: the share of every part of an input, found during one forward pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from attnflow.capturing.carrying import Carrier, LayerAttention, run_layers
from attnflow.capturing.prompts import Message, Prompt, read_prompts
from attnflow.capturing.rows import (
    Numbers,
    check_depth,
    check_layers,
    check_normalize,
    check_removed,
    check_rows,
    make_even,
    name_rows,
)
from attnflow.capturing.spans import Segments, read_segments
from attnflow.core.checks import check_residual
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


@overload
def rollout_segments(
    model: "Model | torch.nn.Module",
    inputs: list[int] | list[Message],
    *,
    segments: Segments,
    unit: str = "positions",
    layers: Numbers | None = None,
    positions: Numbers | None = None,
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> TokenAttention: ...


@overload
def rollout_segments(
    model: "Model | torch.nn.Module",
    inputs: list[Any],
    *,
    segments: Segments,
    unit: str = "positions",
    layers: Numbers | None = None,
    positions: Numbers | None = None,
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> list[TokenAttention]: ...


@overload
def rollout_segments(
    model: "Model | torch.nn.Module",
    inputs: Input,
    *,
    segments: Segments,
    unit: str = "positions",
    layers: Numbers | None = None,
    positions: Numbers | None = None,
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
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
    residual = check_residual(residual)
    check_normalize(normalize)
    prompts, many = read_prompts(model, inputs, truncation, "rollout_segments", places=True)
    each = [segments] * len(prompts)
    if many and not isinstance(segments, str):
        each = check_each(segments, len(prompts))
    results = [
        roll_segments(model, prompt, own, unit, layers, positions, residual, without, normalize)
        for prompt, own in zip(prompts, each, strict=True)
    ]
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
    model: Model,
    prompt: Prompt,
    segments: Segments,
    unit: str,
    layers: Any,
    positions: Any,
    residual: float,
    without: Any,
    normalize: str,
) -> TokenAttention:
    """The shares of the segments of one input."""
    size = len(prompt.encoded.tokens)
    removed = check_removed(without, size)
    every = sorted(set(range(size)) - set(removed))
    asked = check_rows(every if positions is None else positions, size, removed)
    numbers = check_layers(layers, model)
    groups = read_segments(prompt, segments, unit, removed)
    check_room(len(numbers or ()) or model.depth or 1, len(asked), len(groups))
    carrier = Carrier(residual, removed)
    parts = []
    for start in range(0, len(groups), COLUMNS):
        some = groups[start : start + COLUMNS]
        found, windows = carry_segments(model, prompt, some, asked, numbers, carrier)
        parts.append(found)
    tops = tuple(parts[0]) if numbers is None else check_depth(numbers, len(windows))
    values = np.stack([np.concatenate([part[top] for part in parts], axis=-1) for top in tops])
    field = None
    if normalize == "receptive_field":
        field = measure_field(model, prompt, groups, asked, tops, carrier, windows)
    return name_rows(
        model,
        prompt.encoded,
        values,
        "rollout",
        tops,
        asked,
        removed,
        windows,
        residual=residual,
        field=field,
        tokens=tuple(group.name for group in groups),
        words=None,
        groups=groups,
    )


def carry_segments(
    model: Model,
    prompt: Prompt,
    groups: Sequence[Group],
    positions: Sequence[int],
    layers: Sequence[int] | None,
    carrier: Carrier,
) -> tuple[dict[int, npt.NDArray[np.float64]], list[int | None]]:
    """[position, group] by layer, in one forward pass; the windows of all layers."""
    columns = start_columns(model, prompt, groups)
    found: dict[int, npt.NDArray[np.float64]] = {}
    windows: list[int | None] = []

    with progress_bar("shares of segments") as tick:

        def carry(number: int, layer: LayerAttention) -> None:
            nonlocal columns
            windows.append(layer.window)
            if layers is not None and number > max(layers):
                return
            columns = carrier.carry_up(layer, columns)
            if layers is None or number in layers:
                found[number] = columns[list(positions)].cpu().numpy().astype(np.float64)
            tick(number, model.depth or number)

        run_layers(model, prompt.encoded, carry)
    return found, windows


def start_columns(model: Model, prompt: Prompt, groups: Sequence[Group]) -> "torch.Tensor":
    """[position, group]: 1 where a position is in a group."""
    import torch

    columns = torch.zeros(len(prompt.encoded.tokens), len(groups), device=model.device)
    for place, group in enumerate(groups):
        columns[list(group.positions), place] = 1.0
    return columns


def measure_field(
    model: Model,
    prompt: Prompt,
    groups: Sequence[Group],
    positions: Sequence[int],
    layers: Sequence[int],
    carrier: Carrier,
    windows: Sequence[int | None],
) -> npt.NDArray[np.float64]:
    """[layer, position, group]: the shares that attention without preference would give."""
    columns, found = start_columns(model, prompt, groups), {}
    for number, window in enumerate(windows[: max(layers)], start=1):
        columns = carrier.carry_up(make_even(model, prompt.encoded, window), columns)
        if number in layers:
            found[number] = columns[list(positions)].cpu().numpy().astype(np.float64)
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
