"""Long inputs: rows of token attention where `explain` and `generate` would build graphs.

A graph is a matrix per layer, so above some length it is never built: raw attention and rollout are
computed as rows (edges/rows.py), those of an explained position in one forward pass with its
prediction. What needs the graph, flow before all, is left out and noted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np

from attnflow.analysis.defaults import Plan
from attnflow.capturing.asking import RowRequest
from attnflow.capturing.caching import CachedLayers
from attnflow.capturing.prompts import Prompt
from attnflow.capturing.spans import read_segments
from attnflow.core.checks import check_positions
from attnflow.core.custom import Method
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import Group
from attnflow.core.methods import raw, rollout
from attnflow.core.results import TokenAttention
from attnflow.edges.choosing import EdgeWeight, name_result, read_edges
from attnflow.edges.rows import RowJob, read_rows
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model

# Tokens above which rows are computed instead of a graph: of 2,048 tokens and 30 layers, a graph
# takes 0.5 GB as it is captured, and methods three times as much beside it.
ROWS_ABOVE = 2048
SKIP = 1e-3  # at most this share of a row on edges other than attention is not followed
WITNESSES = 32  # positions, evenly spread, whose raw attention shows what are sinks
BY_ROWS: dict[Method, str] = {raw: "raw", rollout: "rollout"}
RowReader = Callable[..., TokenAttention]


def goes_by_rows(model: Model, size: int, weights: Iterable[EdgeWeight]) -> bool:
    """Whether an input of so many tokens is long, and rows can be had on all these edges."""
    whole = any(weight.gradient or weight.rerun for weight in weights)
    return size > ROWS_ABOVE and not model.is_encoder_decoder and not whole


def plan_rows(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The part of a plan that rows can be had of; and notes on what is left out."""
    kept, lacking = {}, dict[str, None]()
    for edges, methods in plan.items():
        kept[edges] = {name: each for name, each in methods.items() if each in BY_ROWS}
        lacking |= dict.fromkeys(name for name in methods if name not in kept[edges])
    notes = []
    if lacking:
        notes.append(
            f"{', '.join(lacking)} is left out: it needs the whole graph, which is not built above"
            f" {ROWS_ABOVE:,} tokens"
        )
    if list(plan) == ["attention"]:
        notes.append(
            "rows are of attention alone; asked for with contribution and attention edges, they"
            " also say what was taken, and take some times as long"
        )
    return kept, tuple(notes)


def make_job(
    model: Model,
    encoded: Encoded,
    method: str,
    weight: EdgeWeight,
    positions: Iterable[int],
    *,
    residual: float | None = None,
    without: Sequence[int] = (),
    normalize: str = "sum",
) -> RowJob:
    """Rows of all layers, by a method on edges. residual: the paper's, 0.5, if None."""
    mixed = weight.residual == "mixed" and method == "rollout"
    request = RowRequest.read(
        model,
        encoded,
        method,
        positions,
        None if model.depth is None else range(1, model.depth + 1),
        without=without,
        residual=(RESIDUAL if residual is None else residual) if mixed else None,
        normalize=normalize,
        edges=weight.name,
    )
    return RowJob(request, weight, 0.0 if weight.name == "attention" else SKIP)


def explain_position(
    model: Model,
    encoded: Encoded,
    position: int,
    plan: Plan,
    weights: Mapping[str, EdgeWeight],
    **options: Any,
) -> tuple[dict[str, TokenAttention], TokenAttention, tuple[str, float] | None]:
    """The rows of one position by their names, those that show sinks, and the prediction there.

    options are those of `make_job`.
    """
    jobs = {
        name_result(edges, name): make_job(
            model, encoded, BY_ROWS[method], weights[edges], [position], **options
        )
        for edges, methods in plan.items()
        for name, method in methods.items()
    }
    at = locate_logits(model, encoded, position)
    witnesses = call_witnesses(model, encoded, options.get("without", ()))
    found, output = read_rows(model, encoded, [*jobs.values(), witnesses], logits_at=at)
    *rows, raw_rows = found
    return dict(zip(jobs, rows, strict=True)), raw_rows, read_prediction(model, output, at)


def call_witnesses(model: Model, encoded: Encoded, without: Sequence[int]) -> RowJob:
    """The raw attention of some positions all over the input, which shows what are sinks."""
    size = len(encoded.tokens)
    removed = check_positions(without, size, "without")
    spread = np.unique(np.linspace(0, size - 1, WITNESSES).astype(int)).tolist()
    kept = [place for place in spread if place not in removed]
    (attention,) = read_edges("attention").values()
    return make_job(model, encoded, "raw", attention, kept, without=removed)


def locate_logits(model: Model, encoded: Encoded, position: int) -> int | None:
    """The position whose logits are read, of a model that predicts."""
    return model.logit_position(encoded, position) if model.predicts else None


def read_prediction(model: Model, output: Any, at: int | None) -> tuple[str, float] | None:
    """What a model predicts at the position whose logits it was asked for; None if it was not."""
    if at is None:
        return None
    alone = "logits_to_keep" in signature(model.model.forward).parameters
    (prediction,) = model.read_predictions(model.read_logits(output, [0 if alone else at]))
    return prediction


def describe_loss(results: Mapping[str, TokenAttention]) -> tuple[str, ...]:
    """What rows have lost by what was not followed, if anything."""
    lost = {name: float(each.lost.max()) for name, each in results.items() if each.lost is not None}
    return tuple(
        f"{name}: {share:.2g} of the row was not followed, on positions that hold next to nothing"
        for name, share in lost.items()
        if share > 0
    )


def find_segments(prompt: Prompt, removed: Sequence[int] = ()) -> tuple[Group, ...]:
    """The turns of a chat, else the sentences of a text, and what is left; none of token ids."""
    if prompt.turns is not None:
        return read_segments(prompt, "turns", "positions", removed)
    if prompt.text is None or prompt.places is None:
        return ()
    return read_segments(prompt, "sentences", "positions", removed)


def read_generated(
    model: Model,
    ids: Sequence[int],
    prompt: int,
    weights: Iterable[EdgeWeight],
    cached: CachedLayers,
) -> dict[str, RowReader]:
    """By kind of edges, a function that gives the rows of all generated tokens by a method.

    ids: the prompt, of so many tokens, and what was generated. cached: what was collected while the
    model generated. Where that does not tell the layers, and on other edges than attention, one
    pass over everything but the last token, which no position looked at, does.
    """
    encoded = model.encode(list(ids[:-1]))
    layers = cached.join(len(encoded.ids))

    @cache
    def read(
        name: str, method: str, residual: float | None, without: tuple[int, ...], normalize: str
    ) -> TokenAttention:
        options: dict[str, Any] = {"without": without, "normalize": normalize}
        positions = range(prompt - 1, len(encoded.ids))
        by_name = {weight.name: weight for weight in weights}
        job = make_job(
            model, encoded, method, by_name[name], positions, residual=residual, **options
        )
        known = layers if name == "attention" else None
        ((result,), _) = read_rows(model, encoded, [job], known=known)
        return result

    return {weight.name: partial(read, weight.name) for weight in weights}
