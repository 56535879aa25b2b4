"""`rollout_rows`, `raw_rows`: rows of token attention of any length, in linear memory."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from attnflow.capturing.assembly import find_source
from attnflow.capturing.carrying import (
    Carrier,
    Even,
    LayerAttention,
    Shelf,
    is_causal_language_model,
    run_layers,
)
from attnflow.capturing.prompts import Message, read_prompts
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers, check_positions, check_residual
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import refuse_removed
from attnflow.core.results import TokenAttention
from attnflow.errors import CaptureError, OptionError
from attnflow.models.inputs import Encoded, Input
from attnflow.models.model import Model
from attnflow.progress import progress_bar

if TYPE_CHECKING:
    import torch

Numbers = Iterable[int] | int


@overload
def rollout_rows(
    model: "Model | torch.nn.Module",
    inputs: list[int] | list[Message],
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> TokenAttention: ...


@overload
def rollout_rows(
    model: "Model | torch.nn.Module",
    inputs: list[Any],
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> list[TokenAttention]: ...


@overload
def rollout_rows(
    model: "Model | torch.nn.Module",
    inputs: Input,
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> TokenAttention: ...


def rollout_rows(
    model: "Model | torch.nn.Module",
    inputs: "Input | list[Any]",
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    residual: float = RESIDUAL,
    without: Sequence[int] = (),
    normalize: str = "sum",
    truncation: bool = False,
) -> TokenAttention | list[TokenAttention]:
    """Attention rollout of some positions of an input of any length: no matrix is ever built.

    What `rollout(capture(model, inputs).graph(residual=residual), positions=...)` gives. Queries
    and keys of the layers are kept, and rows travel down together through weights that are
    computed for some queries at a time: about as much work as the model's attention itself.

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
    residual
        The weight of the residual connection, from 0 up to but not including 1.
    without
        Positions to take out before the residual is mixed in, for instance a sink.
    normalize
        "sum", so that rows sum to 1, or "receptive_field", divided by what attention without
        preference would give, then the same.
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
    residual = check_residual(residual)
    check_normalize(normalize)
    prompts, many = read_prompts(model, inputs, truncation, "rollout_rows")
    results = [
        roll_rows(model, prompt.encoded, positions, layers, residual, without, normalize)
        for prompt in prompts
    ]
    return results if many else results[0]


@overload
def raw_rows(
    model: "Model | torch.nn.Module",
    inputs: list[int] | list[Message],
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    without: Sequence[int] = (),
    truncation: bool = False,
) -> TokenAttention: ...


@overload
def raw_rows(
    model: "Model | torch.nn.Module",
    inputs: list[Any],
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    without: Sequence[int] = (),
    truncation: bool = False,
) -> list[TokenAttention]: ...


@overload
def raw_rows(
    model: "Model | torch.nn.Module",
    inputs: Input,
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    without: Sequence[int] = (),
    truncation: bool = False,
) -> TokenAttention: ...


def raw_rows(
    model: "Model | torch.nn.Module",
    inputs: "Input | list[Any]",
    *,
    positions: Numbers,
    layers: Numbers | None = None,
    without: Sequence[int] = (),
    truncation: bool = False,
) -> TokenAttention | list[TokenAttention]:
    """Raw attention of some positions of an input of any length: only these rows are computed.

    Parameters
    ----------
    model, inputs, positions, layers, without, truncation
        As for `rollout_rows`.

    >>> import attnflow as af
    >>> af.raw_rows(af.load("verb-number"), "the key to the cabinets", positions=[0, -1])
    <TokenAttention: raw from layers 6, 2 positions, 6 keys>
    """
    model = model if isinstance(model, Model) else Model(model)
    prompts, many = read_prompts(model, inputs, truncation, "raw_rows")
    results = [weigh_rows(model, prompt.encoded, positions, layers, without) for prompt in prompts]
    return results if many else results[0]


# ---- one input ----------------------------------------------------------------------------------


def roll_rows(
    model: Model,
    encoded: Encoded,
    positions: Any,
    layers: Any,
    residual: float,
    without: Any,
    normalize: str,
) -> TokenAttention:
    """The rows of rollout of one input."""
    import torch

    size = len(encoded.tokens)
    removed = check_removed(without, size)
    asked = check_rows(positions, size, removed)
    numbers = check_layers(layers, model)
    kept, shelf = list[LayerAttention](), Shelf(model.depth or 1)
    windows: list[int | None] = []

    def keep(number: int, layer: LayerAttention) -> None:
        windows.append(layer.window)
        if numbers is None or number <= max(numbers):
            kept.append(layer.keep(shelf))

    run_layers(model, encoded, keep)
    tops = (len(kept),) if numbers is None else check_depth(numbers, len(kept))
    start = torch.zeros(len(asked), size, device=model.device)  # [query, key]
    start[torch.arange(len(asked)), list(asked)] = 1.0
    carrier = Carrier(residual, removed)
    values, field = roll_down(carrier, kept, start, tops), None
    if normalize == "receptive_field":
        even = [make_even(model, encoded, window) for window in windows[: max(tops)]]
        field = roll_down(carrier, even, start, tops)
    return name_rows(
        model,
        encoded,
        values,
        "rollout",
        tops,
        asked,
        removed,
        windows,
        residual=residual,
        field=field,
    )


def roll_down(
    carrier: Carrier, kept: list[LayerAttention], start: "torch.Tensor", tops: Sequence[int]
) -> Floats:
    """[layer, query, key]: rows that start in these layers, carried down together.

    kept: the layers from the lowest on; each is let go once it has been used.
    """
    import torch

    rolled = start[:0]  # [layer and query, key]
    with torch.no_grad(), progress_bar("attention rollout") as tick:
        for layer in range(max(tops), 0, -1):
            tick(max(tops) - layer, max(tops))
            rolled = torch.cat([*[start] * tops.count(layer), rolled])
            rolled = carrier.carry_down(kept.pop(), rolled)
    order = np.argsort(np.argsort(tops, kind="stable"), kind="stable")
    values: Floats = rolled.cpu().numpy().astype(np.float64).reshape(len(tops), *start.shape)[order]
    return values


def make_even(model: Model, encoded: Encoded, window: int | None) -> LayerAttention:
    """A layer without preference, over the keys that the model lets a query see."""
    return Even(len(encoded.tokens), is_causal(model), model.device, window)


def is_causal(model: Model) -> bool:
    """Whether no query sees a later key."""
    return is_causal_language_model(model) or model.probe.causal


def weigh_rows(
    model: Model, encoded: Encoded, positions: Any, layers: Any, without: Any
) -> TokenAttention:
    """The rows of raw attention of one input."""
    import torch

    size = len(encoded.tokens)
    removed = check_removed(without, size)
    asked = check_rows(positions, size, removed)
    numbers = check_layers(layers, model)
    carrier = Carrier(0.0, removed)
    ascending = torch.tensor(sorted(set(asked)))
    found: dict[int, npt.NDArray[np.float64]] = {}  # [position, key] by layer
    windows: list[int | None] = []

    def weigh(number: int, layer: LayerAttention) -> None:
        windows.append(layer.window)
        if numbers is None:
            found.clear()  # the top layer comes last
        elif number not in numbers:
            return
        found[number] = rows = np.zeros((len(ascending), size))
        done = 0
        for block in carrier.take_blocks(layer, ascending):
            end = done + len(block.weights)
            rows[done:end, : block.keys] = block.weights.cpu().numpy()
            done = end

    run_layers(model, encoded, weigh)
    tops = tuple(found) if numbers is None else check_depth(numbers, len(windows))
    places = np.searchsorted(ascending.numpy(), asked)
    values = np.stack([found[layer][places] for layer in tops])
    return name_rows(model, encoded, values, "raw", tops, asked, removed, windows)


def name_rows(
    model: Model,
    encoded: Encoded,
    values: Floats,
    method: str,
    layers: tuple[int, ...],
    positions: tuple[int, ...],
    removed: tuple[int, ...],
    windows: Sequence[int | None],
    *,
    residual: float | None = None,
    field: Floats | None = None,
    **more: Any,
) -> TokenAttention:
    """Values [layer, query, key], normalised and named.

    field: what attention without preference gives, to divide by. more: of groups instead of
    positions.
    """
    size = len(encoded.tokens)
    if not np.isfinite(values).all():
        raise CaptureError(f"the attention of {model.name} must be finite; got NaN or infinity")
    if field is not None:
        np.divide(values, field, out=values, where=field > 0)
    values /= values.sum(axis=-1, keepdims=True)
    source = replace(
        find_source(model), method=method, edges="attention", residual=residual, heads="mean"
    )
    known: dict[str, Any] = {"tokens": encoded.tokens, "words": encoded.words, **more}
    return TokenAttention(
        values=values,
        method=method,
        layers=layers,
        positions=positions,
        bottom=None if method == "raw" else 0,
        queries=tuple(encoded.tokens[position] for position in positions),
        causal=is_causal(model),
        normalize="sum" if field is None else "receptive_field",
        window=tuple(None if window is None or window >= size else window for window in windows),
        removed=removed,
        size=size,
        source=source,
        **known,
    )


# ---- checks -------------------------------------------------------------------------------------


def check_normalize(normalize: Any) -> None:
    """Refuse what is no way to normalise rows."""
    if normalize not in ("sum", "receptive_field"):
        raise OptionError(
            f"unknown normalize {normalize!r}; choose from 'sum' or 'receptive_field'"
        )


def check_rows(positions: Any, size: int, removed: Sequence[int]) -> tuple[int, ...]:
    """The positions whose rows are asked for, from 0; at least one, at most all."""
    if positions is None:
        raise OptionError(
            "rows are of the positions asked for; got positions=None: give some, as [-1]"
        )
    asked = check_positions(positions, size)
    if not asked:
        raise OptionError("at least one position must be asked for; got none")
    if len(asked) > size:
        raise OptionError(
            f"at most {size} rows can be asked for, one per position; got {len(asked)}"
        )
    refuse_removed(asked, size, removed)
    return asked


def check_removed(without: Any, size: int) -> tuple[int, ...]:
    """The positions to take out, from 0; one must be left."""
    removed = check_positions(without, size, "without")
    if len(set(removed)) == size:
        raise OptionError(f"without must leave at least one position; got all {size}")
    return removed


def check_layers(layers: Any, model: Model) -> tuple[int, ...] | None:
    """The layers asked for, before the model runs as far as its depth is known; None for None."""
    if layers is None:
        return None
    asked = tuple(check_integers(layers, "layers"))
    if not asked:
        raise OptionError("at least one layer must be asked for; got none")
    return check_depth(asked, max(asked) if model.depth is None else model.depth)


def check_depth(layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """The layers, if a model has them."""
    for layer in layers:
        if not 1 <= layer <= depth:
            raise OptionError(f"layers must be from 1 to {depth}; got {layer}")
    return layers
