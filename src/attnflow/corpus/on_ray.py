"""A corpus on Ray: Ray Data streams shards to a pool of actors, each with a model of its own.

Only the machine where the run was started touches the user's files: it reads the input, and one
actor on it writes the shards. Ray Data passes the rows of a shard to an actor and a short record of
it back, so no finished shard is lost with a machine; unfinished ones are computed on another one.
"""

import contextlib
import gc
import json
import os
import socket
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from attnflow.corpus.folder import (
    PackedShard,
    pack_shard,
    remove_leftovers,
    shard_path,
    write_shard,
)
from attnflow.corpus.job import CorpusJob
from attnflow.corpus.local import FinishedShards, WorkerPlan
from attnflow.corpus.manifest import ShardRecord
from attnflow.corpus.planning import list_run_versions
from attnflow.corpus.rows import CorpusRow, PendingShards
from attnflow.corpus.shard import compute_shard
from attnflow.errors import AttnFlowError, FileError, MissingExtraError, OptionError
from attnflow.models.fingerprint import model_fingerprint
from attnflow.models.load import SHIPPED, load
from attnflow.models.model import Model

if TYPE_CHECKING:
    import pyarrow

STALLED = 86400.0  # seconds in which no shard moves, after which a pass is given up
SETTINGS = 4  # the frame of HTTP/2, which Ray speaks, that both sides begin with
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
AHEAD = 2  # shards that an actor is working on or has waiting
LEAD = 4  # shards per actor that may be read and not yet written, so that memory stays flat
QUIET = {  # read when Ray is imported, and started; what the user has set stays
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_LOG_LEVEL": "CRITICAL",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else the working directory is uploaded
}


def compute_on_ray(
    plan: WorkerPlan, pending: PendingShards, workers: int | None, address: str | None
) -> FinishedShards:
    """Compute shards on a cluster; shards lost in one pass over the data go into another."""
    if not pending.missing:
        return
    with connect(address, workers) as ray:
        resources, first, most = size_pool(ray, workers, len(pending.missing))
        at_home = {
            "num_cpus": 0,
            "label_selector": {"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        }
        is_folder = plan.model not in SHIPPED and Path(plan.model).is_dir()
        arguments = {
            "name": str(Path(plan.model).resolve()) if is_folder else plan.model,
            "fingerprint": plan.fingerprint,
            "versions": list_run_versions(),
            "planned": plan.job,
        }
        while pending.missing:
            for index in pending.missing:  # what the manifest does not record counts as not written
                shard_path(plan.folder, index).unlink(missing_ok=True)
            writer = (
                ray.remote(ShardWriter)
                .options(max_restarts=-1, max_task_retries=-1, **at_home)
                .remote(plan.folder.resolve(), pending.missing)
            )
            data = stream_shards(ray, pending, writer, LEAD * most, at_home).map_batches(
                Explainer,
                fn_constructor_kwargs={**arguments, "writer": writer},
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(
                    min_size=first, max_size=most, max_tasks_in_flight_per_actor=AHEAD
                ),
                **resources,
            )
            done: set[int] = set()
            lost: Exception | None = None
            try:
                for index, shard in read_answers(data):
                    if index in pending.missing and index not in done:
                        done.add(index)
                        yield index, shard
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, ray.exceptions.RayError):
                    raise  # a fault of ours: its traceback is wanted
                lost = error.cause
            except (ray.data.exceptions.ExecutionTimeoutError, ray.exceptions.RayError) as error:
                lost = error
            if lost and not done:
                raise FileError(
                    f"the cluster computed no shard ({type(lost).__name__}): is attnflow[ray]"
                    " installed on each of its machines, are memory and cores free? The same"
                    " command resumes the run, perhaps with other --workers"
                ) from lost
            if not done:
                return
            pending = replace(pending, missing=pending.missing - done)
    remove_leftovers(plan.folder)


def require_ray(address: str | None) -> Any:
    """Import Ray, and check the address."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
            import ray.data
            import ray.exceptions
    except ImportError as error:
        raise MissingExtraError("engine 'ray' needs Ray: pip install 'attnflow[ray]'") from error
    if address is not None:
        check_address(address)
    return ray


@contextlib.contextmanager
def connect(address: str | None, workers: int | None) -> Iterator[Any]:
    """A block in which Ray is connected to a cluster.

    It is the one at the address; else the one that this process is connected to already; else one
    that is started here for as long as the block lasts.
    """
    ray = require_ray(address)
    ours = not ray.is_initialized()
    if ours:
        options = (
            {"address": address}
            if address
            else {"address": "local", "num_cpus": workers, "include_dashboard": False}
        )
        try:
            ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise FileError(
                f"no Ray cluster was found at {address}: start one (ray start --head),"
                " or give its address"
            ) from error
        except (ray.exceptions.RayError, ValueError, RuntimeError, OSError) as error:
            raise FileError(
                f"cannot connect to Ray at {address or 'this machine'}:"
                f" {str(error).splitlines()[0]}"
            ) from error
    elif address not in (None, "auto", known := ray.get_runtime_context().gcs_address):
        raise OptionError(
            f"this process is connected to Ray at {known} already: leave the address out,"
            f" or disconnect; got {address}"
        )
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()
        gc.collect()  # an interrupted pool keeps its cores until its data set is gone


def check_address(address: str) -> None:
    """Refuse an address that is not HOST:PORT, or where Ray does not answer.

    `ray.init` takes no timeout: it tries for minutes, and then some versions end the process from
    C++, where no error can be caught. Ray's own health check says that it is "NOT a public API".
    So this asks what every gRPC server must answer: to the preface of HTTP/2 the first frame of the
    answer is SETTINGS (RFC 9113, section 3.4). With TLS only the port is tried.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise OptionError(
            "address must be HOST:PORT of the cluster, or auto, on one of its machines;"
            f" got {address}"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(HELLO)
            answer = connection.recv(4)
    except (OSError, OverflowError, ValueError) as error:
        raise FileError(
            f"cannot connect to Ray at {address}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if len(answer) < 4 or answer[3] != SETTINGS:
        raise FileError(f"cannot connect to Ray at {address}: what answers there is not Ray")


def size_pool(ray: Any, workers: int | None, tasks: int) -> tuple[dict[str, float], int, int]:
    """The resources of an actor, and the number of actors: at first, and if the cluster grows.

    An actor needs a GPU if the cluster has any, else a core.
    """
    has = ray.cluster_resources()
    resources = {"num_cpus": 1.0, "num_gpus": 1.0} if has.get("GPU", 0) >= 1 else {"num_cpus": 1.0}
    slots = int(has.get("GPU", 0)) or int(has.get("CPU", 0))
    if slots < 1:
        raise OptionError("this Ray cluster has no cores to work on: start a node with --num-cpus")
    most = max(1, min(workers or slots, tasks))
    return resources, min(slots, most), most


def stream_shards(
    ray: Any, pending: PendingShards, writer: Any, lead: int, at_home: dict[str, object]
) -> Any:
    """A data set with one block per shard, {"index", "rows", "problem"}.

    One task reads it, here, and stays at most `lead` shards ahead of the writer.
    """
    import pyarrow as pa

    here = os.getcwd()

    def make_block(index: int, rows: list[CorpusRow], problem: str | None = None) -> pa.Table:
        cells = {"index": index, "rows": encode_corpus_rows(rows), "problem": problem}
        return pa.Table.from_pylist(
            [cells],
            pa.schema({"index": pa.int64(), "rows": pa.large_binary(), "problem": pa.string()}),
        )

    def read() -> Iterator[pa.Table]:
        try:
            with contextlib.chdir(here):
                for number, (index, rows) in enumerate(pending):
                    while number - ray.get(writer.count.remote()) >= lead:
                        time.sleep(0.02)
                    yield make_block(index, rows)
        except AttnFlowError as error:  # told by an actor, as its own problems are
            yield make_block(-1, [], str(error))

    class Shards(ray.data.Datasource):
        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, parallelism: int, *args: Any, **options: Any) -> list[Any]:
            unknown = ray.data.block.BlockMetadata(
                num_rows=None, size_bytes=None, input_files=None, exec_stats=None
            )
            return [ray.data.ReadTask(read, unknown)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own
        data = ray.data.read_datasource(Shards(), override_num_blocks=1, **at_home)
    context = data.context
    context.target_max_block_size = 1  # no block is joined to another: a shard is a task
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = STALLED
    context.raise_original_map_exception = True
    context.max_consecutive_actor_init_deaths = 3
    return data


def encode_corpus_rows(rows: list[CorpusRow]) -> bytes:
    """Rows on their way to an actor.

    Texts may hold lone surrogates, and two of them must not become one character.
    """
    return json.dumps([astuple(row) for row in rows], ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def decode_rows(content: bytes) -> list[CorpusRow]:
    """Rows from the bytes of `encode_corpus_rows`."""
    rows = json.loads(content.decode("utf-8", "surrogatepass"))
    return [replace(CorpusRow(*row), kept=tuple(row[-1])) for row in rows]  # JSON knows no tuples


def read_answers(data: Any) -> Iterator[tuple[int, ShardRecord]]:
    """The records of finished shards, as the actors report them; a problem is raised."""
    for batch in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for answer in batch.to_pylist():
            if answer["problem"] is not None:
                raise FileError(answer["problem"])
            yield answer["index"], ShardRecord(**json.loads(answer["shard"]))


class ShardAnswer(TypedDict):
    """The report of an actor on a shard: its record as JSON, or the problem."""

    index: int
    shard: str | None
    problem: str | None


class ShardWriter:
    """The actor that writes shards, on the machine where the folder is."""

    def __init__(self, folder: Path, missing: Iterable[int]) -> None:
        self.folder = folder
        # what is there already was written by a writer that was killed, in whose place this one is
        self.written: dict[int, ShardRecord | None] = {
            index: None for index in missing if shard_path(folder, index).exists()
        }

    def count(self) -> int:
        """How many shards were written."""
        return len(self.written)

    def write(self, index: int, packed: PackedShard) -> ShardRecord | str:
        """Write a shard, once; returns its record for the manifest, or why it could not."""
        try:
            shard = self.written.get(index) or write_shard(self.folder, index, packed)
        except AttnFlowError as error:
            return str(error)
        self.written[index] = shard
        return shard


class Explainer:
    """An actor that computes shards.

    A problem with its machine is reported with the first shard: Ray would only retry an error.
    """

    def __init__(
        self, name: str, fingerprint: str, versions: dict[str, str], planned: CorpusJob, writer: Any
    ) -> None:
        self.planned, self.writer = planned, writer
        self.problem: str | None = None
        try:
            self.model = load_same(name, fingerprint, versions)
            self.job = planned.stored.open()
        except AttnFlowError as error:
            self.problem = f"on a machine of the cluster: {error}"
        except Exception as error:
            self.problem = f"on a machine of the cluster: {type(error).__name__}: {error}"

    def __call__(self, batch: "pyarrow.Table") -> "pyarrow.Table":
        """{"index", "rows", "problem"} -> {"index", "shard", "problem"}."""
        import pyarrow as pa

        answers = [self.explain(**task) for task in batch.to_pylist()]
        return pa.Table.from_pylist(
            answers, pa.schema({"index": pa.int64(), "shard": pa.string(), "problem": pa.string()})
        )

    def explain(self, index: int, rows: bytes, problem: str | None) -> ShardAnswer:
        """The answer that `read_answers` reads."""
        problem = problem or self.problem
        if problem is not None:
            return {"index": index, "shard": None, "problem": problem}
        import ray

        try:
            tables = compute_shard(self.model, self.planned, self.job, decode_rows(rows))
            packed = pack_shard(*tables)
        except AttnFlowError as error:  # of a method; told here, since Ray would only try again
            return {"index": index, "shard": None, "problem": str(error)}
        record = ray.get(self.writer.write.remote(index, packed))
        if isinstance(record, str):
            return {"index": index, "shard": None, "problem": record}
        return {"index": index, "shard": json.dumps(asdict(record)), "problem": None}


def load_same(name: str, fingerprint: str, versions: dict[str, str]) -> Model:
    """The model that the run was begun with, on this machine's GPU if Ray gave one.

    Other weights and other versions of libraries are refused.
    """
    import torch

    torch.set_num_threads(1)
    for library, used in list_run_versions().items():
        if versions[library] != used:
            raise FileError(
                f"{library} is {used} there and {versions[library]} where the run was started:"
                " install the same"
            )
    model = load(name)
    if model_fingerprint(model) != fingerprint:
        raise FileError(
            f"the model {name} has other weights there than where the run was started:"
            " give one folder that all machines see"
        )
    if torch.cuda.is_available():
        model.model.to("cuda")
    return model
