"""Long inputs: rows of token attention instead of graphs, for `explain` and `generate`.

A graph is a matrix per layer, so it is not built for long inputs. Raw attention and rollout are
computed as rows (rows/rows.py), those of an explained position in one forward pass with its
prediction. Methods that require the graph, such as flow, are left out, with a note.
"""

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING

import numpy as np

from attnflow.analysis.job import ATTENTION, FIRST_WHILE_GENERATING, Job, Plan
from attnflow.core.checks import check_positions
from attnflow.core.choices import Method
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import Group
from attnflow.core.memory import find_available_memory, format_gigabytes
from attnflow.core.methods import METHODS, raw, rollout
from attnflow.core.results import TokenAttention
from attnflow.edges.edge_weight import EDGES, EdgeWeight
from attnflow.errors import OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model
from attnflow.models.predict import Prediction, predict_targets
from attnflow.models.segments import read_segments
from attnflow.rows.request import RowRequest
from attnflow.rows.rows import RowJob, compute_rows

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

# Tokens above which rows are computed instead of a graph: for 2,048 tokens and 30 layers, a graph
# takes 0.5 GB when captured, and methods three times as much on top.
ROWS_ABOVE = 2048
SKIP = 1e-3  # at most this share of a row on edges other than attention is not followed
WITNESSES = 32  # positions, evenly spread, in whose raw attention sinks are found
KEPT_STATES = 6  # of the model's width: queries, keys, values, and the states around attention
BY_ROWS: dict[Method, str] = {raw: "raw", rollout: "rollout"}


def goes_by_rows(model: Model, size: int, weights: Iterable[EdgeWeight]) -> bool:
    """Whether an input of this size is long, and rows are available on all these edges."""
    whole = any(weight.rules or weight.rerun for weight in weights)
    return size > ROWS_ABOVE and not model.is_encoder_decoder and not whole


def plan_long(model: Model, size: int, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan for a long input of this size, with contributions first if nothing was named.

    Gradients would keep whole matrices. Also notes on the cost, or on why they are left out.
    """
    if plan.first is None:
        return plan, ()
    plan = Plan.make(METHODS, ATTENTION, FIRST_WHILE_GENERATING)
    available = find_available_memory()
    needed = estimate_kept(model, size)
    if available is not None and needed > available:
        return plan.drop_first(), (
            f"{plan.first} edges would keep {format_gigabytes(needed)}, and"
            f" {format_gigabytes(available)} are available, so attention is shown alone",
        )
    return plan, (
        f"{plan.first} rows weigh each pair of the {size:,} tokens in every layer, which takes"
        " longer than the model itself; methods=['raw', 'rollout'] leaves them out",
    )


def estimate_kept(model: Model, size: int) -> int:
    """The bytes that rows on edges keep of an input: some states per layer and position."""
    width = int(getattr(model.config, "hidden_size", 0))
    return KEPT_STATES * width * size * (model.depth or 1) * 4


def check_span_size(encoded: Encoded) -> None:
    """Refuse a long input whose answer, or span, is to be explained: that needs its graph."""
    size = len(encoded.tokens)
    if size > ROWS_ABOVE:
        raise OptionError(
            f"an answer or a span is explained in a graph, which is not built above {ROWS_ABOVE:,}"
            f" tokens; got {size:,}: give the answer's token ids to replay, whose span() takes its"
            " rows together"
        )


def plan_rows(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The part of a plan that is available as rows; and notes on what is left out."""
    kept = tuple(choice for choice in plan.choices if choice.compute in BY_ROWS)
    missing = dict.fromkeys(choice.method for choice in plan.choices if choice not in kept)
    notes = []
    if missing:
        notes.append(
            f"{', '.join(missing)} is left out: it needs the whole graph, which is not built above"
            f" {ROWS_ABOVE:,} tokens"
        )
    if list(plan.weights) == ["attention"]:
        notes.append(
            "rows are of attention alone; with edges=['contribution', 'attention'] they also say"
            " what was taken, and take several times as long"
        )
    return Plan(kept, plan.weights), tuple(notes)


def make_row_job(
    model: Model,
    encoded: Encoded,
    weight: EdgeWeight,
    method: str,
    positions: Iterable[int],
    residual: float | None = None,
    without: Sequence[int] = (),
    normalize: str | None = None,
) -> RowJob:
    """Rows of all layers, by a method on edges. residual: 0.5 if None; normalize: "sum" if None."""
    mixed = weight.residual == "mixed" and method == "rollout"
    request = RowRequest.read(
        model,
        encoded,
        method,
        positions,
        None if model.depth is None else range(1, model.depth + 1),
        without=without,
        residual=(RESIDUAL if residual is None else residual) if mixed else None,
        normalize=normalize or "sum",
        edges=weight.name,
    )
    return RowJob(request, weight, 0.0 if weight.name == "attention" else SKIP)


def explain_position(
    model: Model,
    encoded: Encoded,
    position: int,
    plan: Plan,
    job: Job,
) -> tuple[dict[str, TokenAttention], TokenAttention, Prediction | None]:
    """The rows of a position by result, those in which sinks are found, and the prediction."""
    jobs = {
        choice.name: make_row_job(
            model,
            encoded,
            plan.weights[choice.edges],
            BY_ROWS[choice.compute],
            [position],
            job.residual,
            job.without,
            job.normalize,
        )
        for choice in plan.choices
    }
    witnesses = make_witness_job(model, encoded, job.without)
    at = locate_logits(model, encoded, position)
    found, output = compute_rows(model, encoded, [*jobs.values(), witnesses], logits_at=at)
    *rows, raw_rows = found
    return dict(zip(jobs, rows, strict=True)), raw_rows, read_prediction(model, output, at)


def make_witness_job(model: Model, encoded: Encoded, without: Sequence[int]) -> RowJob:
    """Raw attention of positions spread over the input, in which sinks are found."""
    size = len(encoded.tokens)
    removed = check_positions(without, size, "without")
    spread = np.unique(np.linspace(0, size - 1, WITNESSES).astype(int)).tolist()
    kept = [place for place in spread if place not in removed]
    return make_row_job(model, encoded, EDGES["attention"], "raw", kept, without=removed)


def locate_logits(model: Model, encoded: Encoded, position: int) -> int | None:
    """The position whose logits are read; None for a model without prediction."""
    return model.logit_position(encoded, position) if model.predicts else None


def read_prediction(model: Model, output: "ModelOutput", at: int | None) -> Prediction | None:
    """The prediction at a position, the only one whose logits were computed; None if it is None."""
    if at is None:
        return None
    alone = "logits_to_keep" in signature(model.model.forward).parameters
    (prediction,) = predict_targets(model, model.read_logits(output, [0 if alone else at]), [None])
    return prediction


def describe_loss(results: Mapping[str, TokenAttention]) -> tuple[str, ...]:
    """Notes on the shares of rows that were not followed."""
    lost = {name: float(each.lost.max()) for name, each in results.items() if each.lost is not None}
    return tuple(
        f"{name}: {share:.2g} of the row was not followed, on positions that hold next to nothing"
        for name, share in lost.items()
        if share > 0
    )


def find_segments(encoded: Encoded, removed: Sequence[int] = ()) -> tuple[Group, ...]:
    """The turns of a chat or the sentences of a text, and last what is left; none for token ids."""
    if encoded.offsets is None:
        return ()
    kind = "turns" if encoded.turns else "sentences"
    return read_segments(encoded, kind, "positions", removed)
