"""`compute_shard`: some rows of a corpus in, their table and their errors out.

It knows no files and no processes. The numbers depend on the rows of the shard and on the job
alone: batches are made within a shard, never across. On processors of one kind they are the same to
the last bit. Which rows are too large depends on the memory of the machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnflow.analysis.job import Job
from attnflow.analysis.run import (
    GRAPH_STAGE,
    MODEL_STAGE,
    Case,
    GraphMade,
    ImportanceReady,
    MethodRun,
    Predicted,
    ResultReady,
    StageStarted,
    reduce_positions,
    run,
)
from attnflow.core.arrays import Floats
from attnflow.core.memory import find_available_memory, format_gigabytes, is_of_memory
from attnflow.corpus.job import CorpusJob, StoredJob
from attnflow.corpus.rows import CorpusRow, is_decodable
from attnflow.corpus.shard_tables import Failure, ScoredRow, make_error_table, make_result_table
from attnflow.corpus.shares import share_row
from attnflow.errors import AttnFlowError, OptionError, TooLongError
from attnflow.models.encoded import Encoded, batches
from attnflow.models.model import Model

if TYPE_CHECKING:
    import pyarrow

# why a row has no result
EMPTY, TOO_LONG, TOO_SHORT, TOO_LARGE, UNDECODABLE, UNREADABLE, UNKNOWN_LABEL, MODEL = (
    "empty",
    "too long",
    "too short",
    "too large",
    "undecodable",
    "unreadable",
    "unknown label",
    "model error",
)
LITTLE_SHARD_MEMORY = 2**27  # bytes; less than that is assumed to be available


class MethodError(AttnFlowError, RuntimeError):
    """A method that failed, so that its numbers for other texts are not to be trusted either."""


@dataclass(frozen=True, eq=False)
class RowTask:
    """A row that the model can take."""

    row: CorpusRow
    encoded: Encoded
    target: int | None  # the class that is watched; None: what is predicted

    @property
    def size(self) -> int:
        """How many positions its graph has."""
        return count_positions(self.encoded)


def compute_shard(
    model: Model, planned: CorpusJob, job: Job, rows: Sequence[CorpusRow]
) -> "tuple[pyarrow.Table, pyarrow.Table]":
    """The tables of the rows that have a result and of those that have none.

    Every row is in exactly one of them.
    """
    import pyarrow as pa

    examined = [examine_row(model, job, row, planned.watched) for row in rows]
    failures = [each for each in examined if isinstance(each, Failure)]
    tasks = [each for each in examined if isinstance(each, RowTask)]
    # a table per batch: many small arrays, if kept, would leave the memory full of holes
    tables = [make_result_table([], planned.stored)]
    for results in compute_tasks(model, planned, job, tasks):
        failures += [each for each in results if isinstance(each, Failure)]
        scored = [each for each in results if isinstance(each, ScoredRow)]
        tables.append(make_result_table(scored, planned.stored))
    failures.sort(key=lambda failure: failure.row.number)
    return pa.concat_tables(tables).combine_chunks().sort_by("row"), make_error_table(failures)


def compute_tasks(
    model: Model, planned: CorpusJob, job: Job, tasks: Sequence[RowTask]
) -> Iterator[list[ScoredRow | Failure]]:
    """The results of all rows, some at a time."""
    if job.segments is not None:
        yield [share_task(model, job, task) for task in tasks]
        return
    for places in batches([task.encoded for task in tasks], planned.stored.batch_tokens):
        yield compute_batch(model, planned, job, [tasks[place] for place in places])


def examine_row(model: Model, job: Job, row: CorpusRow, watched: bool) -> RowTask | Failure:
    """A row as the model takes it, with the class to watch; or why it has no result."""
    if row.problem is not None:
        return Failure(row, UNREADABLE, row.problem)
    if not is_decodable(row.text):
        return Failure(row, UNDECODABLE, "the text is not UTF-8, or holds a lone surrogate")
    if not row.text.strip():
        return Failure(row, EMPTY, "the text must not be empty")
    try:
        encoded = model.encode(row.text)
    except Exception as error:
        reason = TOO_LONG if isinstance(error, TooLongError) else MODEL
        return Failure(row, reason, to_one_line(error))
    problem = find_missing_position(model, job, encoded)
    if problem is not None:
        return Failure(row, TOO_SHORT, problem)
    target = None
    if watched and row.label is not None:
        try:
            target = model.target(row.label)
        except AttnFlowError as error:
            return Failure(row, UNKNOWN_LABEL, str(error))
    return RowTask(row, encoded, target)


def find_missing_position(model: Model, job: Job, encoded: Encoded) -> str | None:
    """Why a text lacks positions that the job names; None if it has them all."""
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


def to_one_line(error: BaseException) -> str:
    """An error in one line."""
    return str(AttnFlowError(error)) or type(error).__name__


def compute_batch(
    model: Model, planned: CorpusJob, job: Job, batch: Sequence[RowTask]
) -> list[ScoredRow | Failure]:
    """The scores of each row; where the model fails, row by row, to keep the others."""
    try:
        check_memory(planned, batch)
        return list(score_batch(model, planned.stored, job, batch))
    except MethodError:
        raise
    except Exception as error:  # a model is foreign code, and may raise anything
        if len(batch) == 1:
            return [explain_failure(planned, batch[0], error)]
    return [result for task in batch for result in compute_batch(model, planned, job, [task])]


def explain_failure(planned: CorpusJob, task: RowTask, error: Exception) -> Failure:
    """The reason why a row has no result."""
    if not lacks_memory(error):
        return Failure(task.row, MODEL, to_one_line(error))
    needed = format_gigabytes(estimate_memory(planned, [task]))
    detail = f"{task.size:,} tokens need about {needed} of memory: {to_one_line(error)}"
    return Failure(task.row, TOO_LARGE, detail)


def score_batch(
    model: Model, stored: StoredJob, job: Job, batch: Sequence[RowTask]
) -> list[ScoredRow]:
    """The scores of each row, from the events of one run.

    An error of a method is not the fault of a row, and stops the run. So does an error of a
    user-defined importance, which is reported with the row that it failed on.
    """
    own = job.own_importance
    graphs = {GRAPH_STAGE, *stored.results}
    found = [ScoredRow(task.row, task.encoded, None, {}, ()) for task in batch]
    stage = StageStarted(0, MODEL_STAGE)
    cases = [Case(task.row.text, task.encoded, task.target) for task in batch]
    try:
        for event in run(model, cases, job, batch_tokens=stored.batch_tokens):
            place = event.number
            match event:
                case StageStarted():
                    stage = event
                case Predicted():
                    found[place] = replace(found[place], prediction=event.prediction)
                case GraphMade():
                    removed = found[place].removed or event.graph.removed
                    found[place] = replace(found[place], removed=removed)
                case ResultReady():
                    found[place].scores[event.run.name] = read_scores(event.run, job)
                case ImportanceReady():
                    found[place].scores[event.name] = event.importance.values
    except Exception as error:
        at_fault = stage.name in graphs or (stage.name in own and len(batch) == 1)
        if at_fault and not lacks_memory(error):
            raise fail_method(stage.name, batch[stage.number].row, error) from error
        raise
    return found


def read_scores(done: MethodRun, job: Job) -> Floats:
    """[layer, token] of one method at the position, or over the positions, that the job says."""
    scores = reduce_positions(done.result.values, job.position)
    if not np.isfinite(scores).all():
        raise OptionError(f"{done.name} of this text is not finite")
    return scores


def share_task(model: Model, job: Job, task: RowTask) -> ScoredRow | Failure:
    """The shares of a row's segments; or why there are none."""
    try:
        return share_row(model, task.row, task.encoded, job)
    except Exception as error:  # a model is foreign code, and may raise anything
        return Failure(task.row, TOO_LARGE if lacks_memory(error) else MODEL, to_one_line(error))


def fail_method(name: str, row: CorpusRow, error: Exception) -> MethodError:
    """The error that stops a run."""
    cause = find_cause(error)
    return MethodError(
        f"{name} failed on row {row.number} ({row.id}):"
        f" {type(cause).__name__}: {to_one_line(cause)}"
    )


def find_cause(error: Exception) -> Exception:
    """The error of a user-defined function, if this error reports one."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


# ---- memory and threads -------------------------------------------------------------------------


def lacks_memory(error: Exception) -> bool:
    """Whether memory was short, also in a user-defined function."""
    return is_of_memory(error) or is_of_memory(find_cause(error))


def check_memory(planned: CorpusJob, batch: Sequence[RowTask]) -> None:
    """Refuse a batch that needs more memory than there is: Linux would promise it, then kill."""
    needed = estimate_memory(planned, batch)
    available = find_available_memory() if needed > LITTLE_SHARD_MEMORY else None
    if available is not None and needed > available:
        raise MemoryError(f"{format_gigabytes(available)} are available")


def estimate_memory(planned: CorpusJob, batch: Sequence[RowTask]) -> int:
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
    others = sum(name != "attention" for name in planned.stored.edges)
    others += planned.stored.first is not None
    held = 4 * (planned.heads + 2 * others) * len(batch)
    return size**2 * (planned.depth * (held + 2 * 8) + 2 * 8)


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
