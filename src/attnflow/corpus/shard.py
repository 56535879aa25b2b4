"""`compute_shard`: some rows of a corpus in, their table and their errors out.

It knows no files and no processes. The numbers depend on the rows of the shard and on the job
alone: batches are made within a shard, never across. On processors of one kind they are the same to
the last bit. Which rows are too large depends on the memory of the machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnflow.analysis.importance import IMPORTANCES
from attnflow.analysis.pipeline import (
    Reading,
    choose_graphs,
    read_batch,
    score_importance,
    score_query,
)
from attnflow.core.arrays import Floats
from attnflow.core.custom import Method
from attnflow.core.graph import AttentionGraph
from attnflow.core.memory import find_available_memory, format_gigabytes, is_of_memory
from attnflow.corpus.job import Functions, Job
from attnflow.corpus.rows import Row, is_decodable
from attnflow.corpus.shard_tables import Failure, ScoredRow, make_error_table, make_result_table
from attnflow.corpus.shares import share_row
from attnflow.edges.choosing import name_result
from attnflow.errors import AttnFlowError, OptionError
from attnflow.models.inputs import Encoded, batches
from attnflow.models.model import Model

if TYPE_CHECKING:
    import pyarrow

# why a row has no result
EMPTY, TOO_LONG, TOO_SHORT, TOO_LARGE, UNDECODABLE, UNREADABLE, LABEL, MODEL = (
    "empty",
    "too long",
    "too short",
    "too large",
    "undecodable",
    "unreadable",
    "unknown label",
    "model error",
)
LITTLE_MEMORY = 2**27  # bytes; whether so few are available is not asked


class MethodError(AttnFlowError, RuntimeError):
    """A method that failed, so that its numbers for other texts are not to be trusted either."""


@dataclass(frozen=True, eq=False)
class RowTask:
    """A row that the model can take."""

    row: Row
    encoded: Encoded
    target: int | None  # the class that is watched; None: what is predicted

    @property
    def size(self) -> int:
        """How many positions its graph has."""
        return count_positions(self.encoded)


@dataclass(frozen=True, eq=False)
class Observed:
    """What the model says of a row."""

    task: RowTask
    reading: Reading
    importance: dict[str, Floats]  # [token]


def compute_shard(
    model: Model, job: Job, functions: Functions, rows: Sequence[Row]
) -> "tuple[pyarrow.Table, pyarrow.Table]":
    """The tables of the rows that have a result and of those that have none.

    Every row is in exactly one of them.
    """
    import pyarrow as pa

    failures: list[Failure] = []
    tasks: list[RowTask] = []
    for row in rows:
        task = examine_row(model, job, row)
        if isinstance(task, Failure):
            failures.append(task)
        else:
            tasks.append(task)
    schema = job.schema
    # a table per batch: many small arrays, if kept, would leave the memory full of holes
    tables = [make_result_table([], job.results, job.importance, schema)]
    if job.segments is not None:
        shared = [share_task(model, job, job.segments, task) for task in tasks]
        failures += [each for each in shared if isinstance(each, Failure)]
        rows_shared = [each for each in shared if isinstance(each, ScoredRow)]
        tables.append(make_result_table(rows_shared, job.results, job.importance, schema))
        tasks = []
    for places in batches([task.encoded for task in tasks], job.batch_tokens):
        results = []
        for observed in observe(model, job, functions, [tasks[place] for place in places]):
            result = (
                observed
                if isinstance(observed, Failure)
                else score_row(model, job, functions, observed)
            )
            if isinstance(result, Failure):
                failures.append(result)
            else:
                results.append(result)
        tables.append(make_result_table(results, job.results, job.importance, schema))
    failures.sort(key=lambda failure: failure.row.number)
    return pa.concat_tables(tables).combine_chunks().sort_by("row"), make_error_table(failures)


def examine_row(model: Model, job: Job, row: Row) -> RowTask | Failure:
    """A row as the model takes it, with the class to watch; or why that cannot be."""
    if row.problem is not None:
        return Failure(row, UNREADABLE, row.problem)
    if not is_decodable(row.text):
        return Failure(row, UNDECODABLE, "the text is not UTF-8, or holds a lone surrogate")
    if not row.text.strip():
        return Failure(row, EMPTY, "the text must not be empty")
    try:
        encoded = model.encode(row.text)
    except Exception as error:
        reason = TOO_LONG if is_too_long(model, row.text) else MODEL
        return Failure(row, reason, to_one_line(error))
    problem = find_missing_position(model, job, encoded)
    if problem is not None:
        return Failure(row, TOO_SHORT, problem)
    target = None
    if job.watched and row.label is not None:
        try:
            target = model.target(row.label)
        except AttnFlowError as error:
            return Failure(row, LABEL, str(error))
    return RowTask(row, encoded, target)


def find_missing_position(model: Model, job: Job, encoded: Encoded) -> str | None:
    """Why a text does not have the positions that the job speaks of; None if it has."""
    size = count_positions(encoded)
    if isinstance(job.position, int) and job.position >= size:
        return f"position must be from 0 to {size - 1}; got {job.position}"
    if not job.without:
        return None
    if max(job.without) >= size:
        return f"without must be from 0 to {size - 1}; got {max(job.without)}"
    if len(job.without) == size:
        return f"without must leave at least one position; got all {size}"
    with suppress(AttnFlowError):  # a text without a mask, which the model will say
        explained = model.focal(encoded) if job.position == "focal" else None
        if explained in job.without:
            return f"without must leave the position that is explained; got {explained}"
    return None


def count_positions(encoded: Encoded) -> int:
    """How many positions the graph of an input has."""
    return len(encoded.tokens) + len(encoded.decoder_tokens)


def is_too_long(model: Model, text: str) -> bool:
    """Whether a text has more tokens than the model takes."""
    try:
        return (
            model.max_length is not None
            and len(model.tokenizer(text, verbose=False)["input_ids"]) > model.max_length
        )
    except Exception:  # a tokenizer that fails on this text, whatever it raises
        return False


def to_one_line(error: BaseException) -> str:
    """An error in one line."""
    return str(AttnFlowError(error)) or type(error).__name__


def observe(
    model: Model, job: Job, functions: Functions, batch: Sequence[RowTask]
) -> Iterator[Observed | Failure]:
    """What the model says of each row; where it fails, row by row, to keep the others."""
    try:
        check_memory(job, batch)
        observed = run_model(model, job, functions, batch)
    except MethodError:
        raise
    except Exception as error:  # a model is foreign code, and may raise anything
        if len(batch) > 1:
            for task in batch:
                yield from observe(model, job, functions, [task])
        else:
            yield explain_failure(job, batch[0], error)
    else:
        yield from observed


def explain_failure(job: Job, task: RowTask, error: Exception) -> Failure:
    """Why there is no result for a row."""
    if not lacks_memory(error):
        return Failure(task.row, MODEL, to_one_line(error))
    needed = format_gigabytes(estimate_memory(job, [task]))
    detail = f"{task.size:,} tokens need about {needed} of memory: {to_one_line(error)}"
    return Failure(task.row, TOO_LARGE, detail)


def run_model(
    model: Model, job: Job, functions: Functions, batch: Sequence[RowTask]
) -> list[Observed]:
    """One forward pass for prediction, attention and other edges of each row; then importance."""
    position = None if isinstance(job.position, str) else job.position
    readings = read_batch(
        model,
        [task.encoded for task in batch],
        targets=[task.target for task in batch],
        position=position,
        heads="mean" if job.graph is None else None,
        edges=functions.edges,
        residual=job.residual,
    )
    importance = {
        name: score_batch(model, job, functions, name, batch, readings, position)
        for name in job.importance
    }
    return [
        Observed(task, reading, {name: scores[place] for name, scores in importance.items()})
        for place, (task, reading) in enumerate(zip(batch, readings, strict=True))
    ]


def score_batch(
    model: Model,
    job: Job,
    functions: Functions,
    name: str,
    batch: Sequence[RowTask],
    readings: Sequence[Reading],
    position: int | None,
) -> list[Floats]:
    """[token] of one importance for each row.

    An importance of attnflow's fails where the model does; one of the user's stops the run, by the
    row that it failed on.
    """
    function = functions.importance[name]
    try:
        scores = score_importance(
            model,
            readings,
            name,
            function,
            values=[task.row.text for task in batch],
            position=position,
            batch_tokens=job.batch_tokens,
        )
    except Exception as error:
        own = function is not IMPORTANCES.get(name)
        if own and len(batch) == 1 and not lacks_memory(error):
            raise fail_method(name, batch[0].row, error) from error
        raise
    return [score.values for score in scores]


def share_task(model: Model, job: Job, segments: str, task: RowTask) -> ScoredRow | Failure:
    """The shares of a row's segments; or why there are none."""
    options = {"residual": job.residual, "without": job.without, "normalize": job.normalize}
    (layers,) = job.layers.values()
    try:
        return share_row(model, task.row, segments, job.position, layers, **options)
    except Exception as error:  # a model is foreign code, and may raise anything
        return Failure(task.row, TOO_LARGE if lacks_memory(error) else MODEL, to_one_line(error))


# ---- the methods --------------------------------------------------------------------------------


def score_row(
    model: Model, job: Job, functions: Functions, observed: Observed
) -> ScoredRow | Failure:
    """All methods on every kind of edges of one row.

    They must take whatever a model gives, so that an error is the method's and not the row's.
    """
    task, reading = observed.task, observed.reading
    scores: dict[str, Floats] = {}
    name = "the attention graph"
    try:
        graphs = choose_graphs(reading, job.edges, functions.make_graph)
        for edge_name, graph in graphs.items():
            for method_name, method in functions.methods.items():
                name = name_result(edge_name, method_name)
                scores[name] = score_method(model, job, name, method, graph, task.encoded)
    except Exception as error:
        if lacks_memory(error):
            return explain_failure(job, task, error)
        raise fail_method(name, task.row, error) from error
    scores |= observed.importance
    removed = next(iter(graphs.values())).removed  # with other edges none is
    return ScoredRow(task.row, task.encoded, reading.prediction, scores, removed)


def score_method(
    model: Model, job: Job, name: str, method: Method, graph: AttentionGraph, encoded: Encoded
) -> Floats:
    """[layer, token] of one method at the position, or over the positions, that the job says."""
    options = {"layers": job.layers[name], "normalize": job.normalize}
    scores = score_query(model, name, method, graph, encoded, job.position, **options)
    if not np.isfinite(scores).all():
        raise OptionError(f"{name} of this text is not finite")
    return scores


def fail_method(name: str, row: Row, error: Exception) -> MethodError:
    """The error that stops a run."""
    cause = find_cause(error)
    return MethodError(
        f"{name} failed on row {row.number} ({row.id}):"
        f" {type(cause).__name__}: {to_one_line(cause)}"
    )


def find_cause(error: Exception) -> Exception:
    """What a function of the user's raised, if the error is about that."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


# ---- memory and threads -------------------------------------------------------------------------


def lacks_memory(error: Exception) -> bool:
    """Whether memory was short, also for a function of the user's."""
    return is_of_memory(error) or is_of_memory(find_cause(error))


def check_memory(job: Job, batch: Sequence[RowTask]) -> None:
    """Refuse a batch that needs more memory than there is: Linux would promise it, then kill."""
    needed = estimate_memory(job, batch)
    available = find_available_memory() if needed > LITTLE_MEMORY else None
    if available is not None and needed > available:
        raise MemoryError(f"{format_gigabytes(available)} are available")


def estimate_memory(job: Job, batch: Sequence[RowTask]) -> int:
    """About how many bytes a batch takes, at least, beside the model itself.

    Capture keeps one float32 matrix per layer, row and head that is kept, padding included. Then,
    one row at a time: the graph's weights and its edges, a float64 matrix per layer each, and about
    two more for what is computed with them. Measured with a Llama and a BERT of 3 layers on 2,000
    tokens: within 5 % of 4 + 2 * 8 bytes per layer, and 2 * 8. Flow and rollout of all positions
    take half as much again, and models that give their weights of all heads (BLOOM, DeBERTa) twice
    as much or more. Each other kind of edges keeps two float32 matrices per layer and row: its
    layers as they come, and the graph that is made of them. Measured with contribution edges of a
    Llama of 3 layers on 1,200 tokens, 1 and 3 rows: within 7 %; effective attention takes a quarter
    more.
    """
    size = max(task.size for task in batch)
    others = sum(name != "attention" for name in job.edges)
    held = 4 * (job.heads + 2 * others) * len(batch)
    return size**2 * (job.depth * (held + 2 * 8) + 2 * 8)


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch has one thread, so that sums are added up in one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
