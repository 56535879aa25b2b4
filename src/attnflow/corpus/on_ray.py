"""A corpus on Ray: Ray Data streams shards to a pool of actors, each with a model of its own.

Only the machine where the run was started touches the user's files: there the input is read, and there one actor writes the shards. What
Ray Data passes on is a shard's rows on the way in and a line about it on the way out, so that a machine that dies takes no result with it:
what it had in work is computed again, elsewhere.
"""

import contextlib
import gc
import json
import os
import socket
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from attnflow.corpus.folder import Manifest, Packed, Shard, pack, shard_path, sweep, write_shard
from attnflow.corpus.rows import Row
from attnflow.corpus.running import Work, versions
from attnflow.corpus.shard import Job, compute_shard, model_fingerprint
from attnflow.errors import AttnFlowError, FileError, MissingExtraError, OptionError
from attnflow.models.loading import BUNDLED, load
from attnflow.models.model import Model

STALLED = 86400.0  # seconds in which no shard moves, after which a pass is given up
SETTINGS = 4  # the frame of HTTP/2, which Ray speaks, that both sides begin with
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
AHEAD = 2  # shards that an actor has in work or waiting
LEAD = (
    4  # for each actor, how many shards may be read and not yet written, so that memory stays flat
)
QUIET = {  # read when Ray is imported, and started; what the user has set stays
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_LOG_LEVEL": "CRITICAL",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else the working directory is uploaded
}


def on_ray(
    name: str,
    manifest: Manifest,
    job: Job,
    folder: Path,
    work: Work,
    workers: int | None,
    address: str | None,
) -> Generator[tuple[int, Shard]]:
    """Shards as they become ready. What a pass over the data lost, if ever it does, is done in another."""
    if not work.missing:
        return
    with cluster(address, workers) as ray:
        resources, first, most = pool(ray, workers, len(work.missing))
        at_home = {
            "num_cpus": 0,
            "label_selector": {"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        }
        place = str(Path(name).resolve()) if name != BUNDLED and Path(name).is_dir() else name
        facts = {
            "name": place,
            "fingerprint": manifest.model["fingerprint"],
            "versions": versions(),
            "job": job,
        }
        while work.missing:
            for index in work.missing:
                shard_path(folder, index).unlink(
                    missing_ok=True
                )  # what nobody vouches for is not counted as written
            writer = (
                ray.remote(Writer)
                .options(max_restarts=-1, max_task_retries=-1, **at_home)
                .remote(folder.resolve(), work.missing)
            )
            data = shards(ray, work, writer, LEAD * most, at_home).map_batches(
                Explainer,
                fn_constructor_kwargs={**facts, "writer": writer},
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
                for index, shard in results(data):
                    if index in work.missing and index not in done:
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
                    f"the cluster computed no shard ({type(lost).__name__}): is attnflow[ray] installed on each of its machines, has it"
                    " memory and cores that are free? The same command goes on, perhaps with other --workers"
                ) from lost
            if not done:
                return
            work = replace(work, missing=work.missing - done)
    sweep(folder)


def require_ray(address: str | None) -> Any:
    """Ray, imported; and an error if the address is none."""
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
def cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """Ray, connected: to the cluster at the address, to the one that this process is connected to, or to one that is started here."""
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
                f"no Ray cluster was found at {address}: start one (ray start --head), or give its address"
            ) from error
        except (ray.exceptions.RayError, ValueError, RuntimeError, OSError) as error:
            raise FileError(
                f"cannot connect to Ray at {address or 'this machine'}: {str(error).splitlines()[0]}"
            ) from error
    elif address not in (None, "auto", known := ray.get_runtime_context().gcs_address):
        raise OptionError(
            f"this process is connected to Ray at {known} already: leave the address out, or disconnect; got {address}"
        )
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()
        gc.collect()  # a pool that was interrupted keeps its place in the cluster until its data set is gone


def check_address(address: str) -> None:
    """Refuse what is no address, or where nobody answers; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise OptionError(
            f"address must be HOST:PORT of the cluster, or auto, on one of its machines; got {address}"
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


def pool(ray: Any, workers: int | None, tasks: int) -> tuple[dict[str, float], int, int]:
    """What an actor needs (a GPU if the cluster has them, else a core), how many there are at first, and how many if the cluster grows."""
    has = ray.cluster_resources()
    resources = {"num_cpus": 1.0, "num_gpus": 1.0} if has.get("GPU", 0) >= 1 else {"num_cpus": 1.0}
    slots = int(has.get("GPU", 0)) or int(has.get("CPU", 0))
    if slots < 1:
        raise OptionError("this Ray cluster has no cores to work on: start a node with --num-cpus")
    most = max(1, min(workers or slots, tasks))
    return resources, min(slots, most), most


def shards(ray: Any, work: Work, writer: Any, lead: int, at_home: dict[str, Any]) -> Any:
    """A data set of one block a shard, {"index", "rows", "problem"}, read here by one task that keeps so many shards before the writer."""
    import pyarrow as pa

    here = os.getcwd()

    def block(index: int, rows: list[Row], problem: str | None = None) -> Any:
        cells = {"index": index, "rows": packed_rows(rows), "problem": problem}
        return pa.Table.from_pylist(
            [cells],
            pa.schema({"index": pa.int64(), "rows": pa.large_binary(), "problem": pa.string()}),
        )

    def read() -> Iterator[Any]:
        try:
            with contextlib.chdir(here):
                for number, (index, rows) in enumerate(work):
                    while number - ray.get(writer.count.remote()) >= lead:
                        time.sleep(0.02)
                    yield block(index, rows)
        except AttnFlowError as error:  # told by an actor, as its own problems are
            yield block(-1, [], str(error))

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


def packed_rows(rows: list[Row]) -> bytes:
    """Rows on their way to an actor. Texts may hold lone surrogates, and two of them must not become one character."""
    return json.dumps([astuple(row) for row in rows], ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def unpacked_rows(content: bytes) -> list[Row]:
    """What `packed_rows` was given."""
    found = json.loads(content.decode("utf-8", "surrogatepass"))
    return [replace(Row(*row), kept=tuple(row[-1])) for row in found]  # JSON knows no tuples


def results(data: Any) -> Iterator[tuple[int, Shard]]:
    """What the actors say of the shards that they had written, as they say it."""
    for batch in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for answer in batch.to_pylist():
            if answer["problem"] is not None:
                raise FileError(answer["problem"])
            yield answer["index"], Shard(**json.loads(answer["shard"]))


class Writer:
    """The actor that writes shards, on the machine where the folder is."""

    def __init__(self, folder: Path, missing: Iterable[int]) -> None:
        self.folder = folder
        # what is there already was written by a writer that was killed, in whose place this one is
        self.written: dict[int, Shard | None] = {
            index: None for index in missing if shard_path(folder, index).exists()
        }

    def count(self) -> int:
        """How many shards were written."""
        return len(self.written)

    def write(self, index: int, packed: Packed) -> Shard | str:
        """What the manifest is to say of the shard, or why it could not be written; what comes a second time is not written again."""
        try:
            shard = self.written.get(index) or write_shard(self.folder, index, packed)
        except AttnFlowError as error:
            return str(error)
        self.written[index] = shard
        return shard


class Explainer:
    """An actor that computes shards. What is wrong with its machine is told with the first shard, since Ray would only try again."""

    def __init__(
        self, name: str, fingerprint: str, versions: dict[str, str], job: Job, writer: Any
    ) -> None:
        self.job, self.writer = job, writer
        self.problem: str | None = None
        try:
            self.model = same_model(name, fingerprint, versions)
        except Exception as error:
            what = (
                str(error)
                if isinstance(error, AttnFlowError)
                else f"{type(error).__name__}: {error}"
            )
            self.problem = f"on a machine of the cluster: {what}"

    def __call__(self, batch: Any) -> Any:
        """{"index", "rows", "problem"} -> {"index", "shard", "problem"}."""
        import pyarrow as pa

        answers = [self.explain(**task) for task in batch.to_pylist()]
        return pa.Table.from_pylist(
            answers, pa.schema({"index": pa.int64(), "shard": pa.string(), "problem": pa.string()})
        )

    def explain(self, index: int, rows: bytes, problem: str | None) -> dict[str, Any]:
        """What `results` reads."""
        problem = problem or self.problem
        if problem is not None:
            return {"index": index, "shard": None, "problem": problem}
        import ray

        try:
            packed = pack(*compute_shard(self.model, self.job, unpacked_rows(rows)))
        except AttnFlowError as error:  # of a method; told here, since Ray would only try again
            return {"index": index, "shard": None, "problem": str(error)}
        written = ray.get(self.writer.write.remote(index, packed))
        if isinstance(written, str):
            return {"index": index, "shard": None, "problem": written}
        return {"index": index, "shard": json.dumps(asdict(written)), "problem": None}


def same_model(name: str, fingerprint: str, expected: dict[str, str]) -> Model:
    """The model as the run was begun with, on this machine's GPU if Ray gave one; other weights or other libraries are refused."""
    import torch

    torch.set_num_threads(1)
    for library, used in versions().items():
        if expected[library] != used:
            raise FileError(
                f"{library} is {used} there and {expected[library]} where the run was started: install the same"
            )
    model = load(name)
    if model_fingerprint(model) != fingerprint:
        raise FileError(
            f"the model {name} has other weights there than where the run was started: give one folder that all machines see"
        )
    if torch.cuda.is_available():
        model.model.to("cuda")
    return model
