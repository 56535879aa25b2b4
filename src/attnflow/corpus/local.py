"""Shards on this machine: in this process, or in processes of their own.

`concurrent.futures.ProcessPoolExecutor` would be shorter, and cannot do three things that runs of
hours need. Before Python 3.11.6 (Debian 12 has 3.11.2) it hangs when a worker is killed while a
task is on its way to another: cpython issues 94777 and 107219; with tasks of 3 MB two of four kills
hung. Before Python 3.14 it cannot end workers at once, so that Ctrl-C would wait for every shard
under way. And it does not say how a worker ended, which tells one that was killed for its memory
from one that could not import the user's script. A pipe per worker has none of these problems.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple, cast

from attnflow.analysis.job import Job
from attnflow.corpus.folder import pack_shard, remove_leftovers, write_shard
from attnflow.corpus.job import CorpusJob
from attnflow.corpus.manifest import ShardRecord
from attnflow.corpus.rows import CorpusRow, PendingShards
from attnflow.corpus.shard import compute_shard, one_thread
from attnflow.errors import AttnFlowError, FileError, OptionError
from attnflow.models.fingerprint import model_fingerprint
from attnflow.models.load import load
from attnflow.models.model import Model

FinishedShards = Generator[tuple[int, ShardRecord]]  # with their numbers, as they become ready


class WorkerPlan(NamedTuple):
    """What a worker needs to compute shards; its model must have this fingerprint."""

    model: str
    fingerprint: str
    job: CorpusJob
    folder: Path


def finish_shard(
    model: Model, planned: CorpusJob, job: Job, folder: Path, index: int, rows: list[CorpusRow]
) -> ShardRecord:
    """Compute a shard and write it; returns its record for the manifest."""
    return write_shard(folder, index, pack_shard(*compute_shard(model, planned, job, rows)))


def compute_in_turn(
    model: Model, planned: CorpusJob, job: Job, folder: Path, pending: PendingShards
) -> FinishedShards:
    """Compute shards in this process."""
    for index, rows in pending:
        yield index, finish_shard(model, planned, job, folder, index, rows)


def compute_in_processes(plan: WorkerPlan, pending: PendingShards, workers: int) -> FinishedShards:
    """Compute shards in processes, each with a model of its own and one shard at a time."""
    tasks = iter(pending)
    crew: dict[Connection, SpawnProcess] = {}
    busy: list[Connection] = []
    try:
        for _ in range(min(workers, len(pending.missing))):
            start_worker(crew, plan)
        for connection, task in zip(crew, tasks, strict=False):
            connection.send(task)
            busy.append(connection)
        while busy:
            for connection in cast("list[Connection]", wait(busy)):
                answer = connection.recv()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                busy.remove(connection)
                for task in islice(tasks, 1):
                    connection.send(task)
                    busy.append(connection)
    except (EOFError, ConnectionError) as error:
        raise explain_death(list(crew.values())) from error
    finally:
        for process in crew.values():  # at once: files are written under temporary names
            process.kill()
            process.join()
        remove_leftovers(plan.folder)


def start_worker(crew: dict[Connection, SpawnProcess], plan: WorkerPlan) -> None:
    """Start a process, and note it by the connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_worker, args=(theirs, plan), daemon=True)
    with interrupts_blocked():
        process.start()
        crew[ours] = process
    theirs.close()  # so that reading ends when the process does


def explain_death(crew: list[SpawnProcess]) -> AttnFlowError:
    """The error of workers of which one ended without an answer."""
    for process in crew:
        process.join(0.1)
    if any(process.exitcode == 1 for process in crew):  # not killed, and never began to work
        return OptionError(
            "a worker could not start; each imports the script that runs this, if any:"
            " put its work under if __name__ == '__main__':"
        )
    return FileError(
        "a worker died (out of memory, or killed): the same command resumes the run,"
        " perhaps with fewer workers"
    )


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A block in which no interrupt arrives; in a process that is started within, none ever does.

    Ctrl-C goes to all processes, and this one alone answers it: it ends the others.
    """
    resource_tracker.ensure_running()  # which would unblock them when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the worker ------------------------------------------------------------------------------


def run_worker(connection: Connection, plan: WorkerPlan) -> None:
    """Load the model, then compute shard after shard; ends with the process that sends them."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        with one_thread():
            model, job = load(plan.model), plan.job.stored.open()
            if model_fingerprint(model) != plan.fingerprint:
                raise FileError(
                    f"the model {plan.model} has other weights in a worker than where the run was"
                    " started: some are drawn at random when it is loaded, or its files changed"
                )
            while True:
                index, rows = connection.recv()
                record = finish_shard(model, plan.job, job, plan.folder, index, rows)
                connection.send((index, record))
    except EOFError:
        return
    except AttnFlowError as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))


def end_with_parent() -> None:
    """Wait until the process that started this one ends, however it does, and end this one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
