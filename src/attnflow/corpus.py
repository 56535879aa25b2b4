"""`explain_corpus`: a whole data set -> a folder of Parquet shards that any crash leaves whole, and that the same call completes.

A shard is `shard_rows` rows of the input, in their order. It is computed as a whole, written beside and renamed; then the manifest is, with
the shard's checksum. What the manifest does not vouch for is computed again, so no row is lost and none is there twice.
"""

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from attnflow.corpus_folder import (
    ERRORS,
    MANIFEST,
    Manifest,
    Shard,
    is_whole,
    locked,
    made,
    merge_errors,
    pack,
    shard_errors_path,
    shard_path,
    sweep,
    write_shard,
)
from attnflow.corpus_input import Row, Source, fingerprint, source_of
from attnflow.corpus_shard import Job, compute_shard, model_fingerprint, one_thread, plan_job
from attnflow.errors import AttnFlowError, FileError, OptionError
from attnflow.graph import RESIDUAL, check_whole
from attnflow.loading import BUNDLED, load
from attnflow.models import Model, require_torch
from attnflow.progress import progress_bar

SHARD_ROWS = 1000
MOST_SHARD_ROWS = 100_000  # a shard is in memory as a whole
WRITING = (
    0.05  # the share of the time that writing the manifest, which grows with its shards, may take
)
ENGINES = ("local", "ray")
LIBRARIES = ("attnflow", "torch", "transformers", "numpy", "pyarrow")
Report = Callable[[str], object]


def explain_corpus(
    inputs: Any,
    out: str | os.PathLike[str],
    *,
    model: Any = BUNDLED,
    text_column: str | None = None,
    id_column: str | None = None,
    label_column: str | None = None,
    methods: Any = ("raw", "rollout", "flow"),
    layers: Any = None,
    position: str | int = "focal",
    normalize: str | None = "sum",
    residual: float = RESIDUAL,
    importance: Any = (),
    limit: int | None = None,
    batch_tokens: int | None = None,
    workers: int | None = None,
    engine: str = "local",
    address: str | None = None,
    shard_rows: int = SHARD_ROWS,
    report: Report = lambda note: None,
) -> Manifest:
    r"""Token attention of every text of one or several files (.parquet, .csv, .tsv, .jsonl, packed or not), into the folder `out`.

    The same call goes on where an earlier one was stopped, however it was. Columns: the texts are in "text", else "sentence", else the only
    column; an id is by default the file's name and the row's number in it; a label is kept, and is the target of importance. layers: by
    default all for raw and rollout, the top one for flow. position: "focal", where the prediction comes from; "max" or "mean" over
    all; or a number. workers: processes, each with a model of its own and one thread; the result does not depend on their number.
    engine: "local", where one worker is the default, or "ray", where it is as many as the cluster has GPUs or cores for; address: of a
    running Ray cluster ("auto": the one of this machine); without it one is started here for as long as the run lasts.
    Rows without a result are in errors.parquet, with the reason. report: told what a user should know. `read_corpus` gives the table.

    >>> import attnflow as af
    >>> _ = Path("texts.csv").write_text("text,label\nthe key to the cabinets,singular\n,plural\n")
    >>> manifest = af.explain_corpus("texts.csv", "explained", methods=["rollout"], label_column="label")
    >>> af.read_corpus("explained").select(["id", "prediction"]).to_pylist()
    [{'id': 'texts.csv:0', 'prediction': 'singular'}]
    """
    source = source_of(inputs, text=text_column, id=id_column, label=label_column, limit=limit)
    if limit is not None:
        check_whole("limit", limit)
    if workers is not None:
        check_whole("workers", workers)
    if engine not in ENGINES:
        raise OptionError(f"unknown engine {engine!r}; choose from {', '.join(ENGINES)}")
    if address is not None and engine != "ray":
        raise OptionError(
            f"an address is that of a Ray cluster: give engine='ray' with it; got {address!r}"
        )
    check_whole("shard_rows", shard_rows, MOST_SHARD_ROWS)
    is_name = isinstance(model, str | os.PathLike)
    if not is_name and (engine == "ray" or (workers or 1) > 1):
        raise OptionError(
            "each worker loads the model by its name: give model as a folder or a hub id; or workers=1, engine='local'"
        )
    require_torch()
    if engine == "ray":
        from attnflow.corpus_ray import on_ray, require_ray

        require_ray(address)
    folder = made(out)
    stamps = source.stamps
    with locked(folder), one_thread():
        loaded = load(model) if is_name else model if isinstance(model, Model) else Model(model)
        job = plan_job(
            loaded,
            methods=methods,
            layers=layers,
            position=position,
            normalize=normalize,
            residual=residual,
            importance=importance,
            batch_tokens=batch_tokens,
        )
        name = os.fspath(model) if is_name else loaded.name
        manifest = planned(folder, source, job, model_facts(name, loaded), shard_rows, report)
        manifest.write(folder)
        missing = manifest.missing
        work = Work(source, shard_rows, frozenset(missing))
        if engine == "ray":
            done = on_ray(name, manifest, job, folder, work, workers, address)
        elif workers and workers > 1:
            done = in_processes(name, job, folder, work, min(workers, len(missing)))
        else:
            done = in_turn(loaded, job, folder, work)
        del loaded
        with closing(done):
            keep(folder, manifest, done, partial(refuse_other_input, folder, source, stamps))
        gone = manifest.missing + [
            index for index in sorted(manifest.shards) if not shard_path(folder, index).exists()
        ]
        if gone:
            raise FileError(
                f"{len(gone)} shards of {folder} are missing, among them {gone[0]}: the same command goes on"
            )
        if missing or not is_whole(folder / ERRORS, manifest.errors_sha256):
            manifest.errors_sha256 = merge_errors(folder, manifest)
            manifest.write(folder)
    return manifest


def keep(
    folder: Path,
    manifest: Manifest,
    done: Iterable[tuple[int, Shard]],
    check_input: Callable[[], None],
) -> None:
    """Note every shard that is done in the manifest, which is written as often as that takes a small share of the time.

    It vouches for a shard only while the input is the one that it speaks of: else nobody knows what the shard was computed from.
    """
    began, before = time.perf_counter(), manifest.seconds
    written, cost = 0.0, 0.0
    fresh: dict[int, Shard] = {}  # not vouched for yet

    def vouch() -> None:
        check_input()
        manifest.shards |= fresh
        fresh.clear()
        manifest.seconds = before + time.perf_counter() - began
        manifest.write(folder)

    with progress_bar(f"explaining {manifest.rows:,} texts") as tick:
        try:
            for index, shard in done:
                fresh[index] = shard
                now = time.perf_counter()
                if (now - written) * WRITING >= cost:
                    vouch()
                    written = time.perf_counter()
                    cost = written - now
                tick(
                    min(manifest.rows, (len(manifest.shards) + len(fresh)) * manifest.shard_rows),
                    manifest.rows,
                )
        finally:
            if fresh:
                vouch()


def refuse_other_input(folder: Path, source: Source, stamps: tuple[Any, ...]) -> None:
    """Files that are not as they were when the run began."""
    changed = [
        path
        for path, then, now in zip(source.paths, stamps, source.stamps, strict=True)
        if then != now
    ]
    if changed:
        raise FileError(
            f"{', '.join(changed)} changed while it was read: give it as it was when {folder} was begun"
        )


# ---- planning -------------------------------------------------------------------------------------------------------------------


def planned(
    folder: Path, source: Source, job: Job, model: dict[str, str], shard_rows: int, report: Report
) -> Manifest:
    """The manifest to go on from: a new one, or that of the folder if it was begun with the same input, model and options."""
    options = json.loads(
        json.dumps(
            {
                **asdict(job),
                "columns": {"text": source.text, "id": source.id, "label": source.label},
            }
        )
    )
    options["limit"] = source.limit
    prints = [fingerprint(path) for path in source.paths]
    inputs = [
        {"file": name, "bytes": size, "sha256": sha}
        for name, (size, sha) in zip(source.names, prints, strict=True)
    ]
    sweep(folder)
    if (folder / MANIFEST).exists():
        manifest = Manifest.read(folder)
        refuse_changes(folder, manifest, inputs, model, options, shard_rows)
        for library, used in versions().items():
            if manifest.versions.get(library) != used:
                report(
                    f"{library} was {manifest.versions.get(library)} when {folder} was begun, and is {used}: last digits may differ"
                )
        for index, shard in sorted(manifest.shards.items()):
            if not is_whole(shard_path(folder, index), shard.sha256) or not (
                shard.errors_sha256 is None
                or is_whole(shard_errors_path(folder, index), shard.errors_sha256)
            ):
                report(
                    f"{shard_path(folder, index).name} is missing or damaged: it is computed again"
                )
                del manifest.shards[index]
        if len(manifest.shards) < manifest.count:
            manifest.errors_sha256 = None
        return manifest
    others = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if others:
        raise FileError(
            f"{folder} is not empty and holds no corpus (it has {others[0]}); give another folder"
        )
    rows = sum(1 for _ in source.rows())
    if not rows:
        raise FileError(f"{', '.join(source.paths)}: there are no rows")
    return Manifest(versions(), model, inputs, options, rows, shard_rows)


def refuse_changes(
    folder: Path,
    manifest: Manifest,
    inputs: list[dict[str, Any]],
    model: dict[str, str],
    options: dict[str, Any],
    shard_rows: int,
) -> None:
    """One line that names what is not as it was when the folder was begun."""
    changed = [
        f"option {name} was {manifest.options.get(name)!r} and is {value!r}"
        for name, value in options.items()
        if manifest.options.get(name) != value
    ]
    if manifest.shard_rows != shard_rows:
        changed.append(f"option shard_rows was {manifest.shard_rows} and is {shard_rows}")
    if manifest.model["fingerprint"] != model["fingerprint"]:
        names = manifest.model["name"], model["name"]
        changed.append(
            f"the model was {names[0]} and is {names[1]}"
            if names[0] != names[1]
            else f"the model {names[0]} has other weights"
        )
    if [each["file"] for each in manifest.inputs] != [each["file"] for each in inputs]:
        files = [
            ", ".join(each["file"] for each in several) for several in (manifest.inputs, inputs)
        ]
        changed.append(f"the input was {files[0]} and is {files[1]}")
    else:
        both = zip(manifest.inputs, inputs, strict=True)
        changed += [
            f"the input {now['file']} has another content"
            for then, now in both
            if then["sha256"] != now["sha256"]
        ]
    if changed:
        raise FileError(
            f"{folder} was begun otherwise: {'; '.join(changed)}. Give what was given then, or another folder"
        )


def model_facts(name: str, model: Model) -> dict[str, str]:
    """What the manifest says of a model."""
    return {
        "name": name,
        "class": model.name,
        "task": model.task,
        "fingerprint": model_fingerprint(model),
    }


def versions() -> dict[str, str]:
    """Of attnflow and the libraries that make the numbers."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "unknown"
    return found


@dataclass(frozen=True)
class Work:
    """The shards that are missing: an iterator over (index, rows), one shard in memory at a time, as often as it is asked for."""

    source: Source
    shard_rows: int
    missing: frozenset[int]

    def __iter__(self) -> Iterator[tuple[int, list[Row]]]:
        last = max(self.missing, default=-1)
        for index, rows in groupby(
            self.source.rows(), key=lambda row: row.number // self.shard_rows
        ):
            if index in self.missing:
                yield index, list(rows)
            if index >= last:
                return


# ---- computing ------------------------------------------------------------------------------------------------------------------


def finish_shard(model: Model, job: Job, folder: Path, index: int, rows: list[Row]) -> Shard:
    """Compute a shard and write it; what the manifest is to say of it."""
    return write_shard(folder, index, pack(*compute_shard(model, job, rows)))


def in_turn(model: Model, job: Job, folder: Path, work: Work) -> Generator[tuple[int, Shard]]:
    """Each shard in this process."""
    for index, rows in work:
        yield index, finish_shard(model, job, folder, index, rows)


def in_processes(
    name: str, job: Job, folder: Path, work: Work, workers: int
) -> Generator[tuple[int, Shard]]:
    """Shards in processes that load the model once, as they become ready; each process has one shard at a time."""
    import multiprocessing
    from multiprocessing.connection import wait

    context = multiprocessing.get_context("spawn")
    tasks = iter(work)
    crew: dict[Any, Any] = {}  # from a connection to its process
    busy: list[Any] = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            crew[ours] = context.Process(
                target=work_for, args=(theirs, name, job, folder), daemon=True
            )
            crew[ours].start()
            theirs.close()  # so that the end of the process is heard
        for connection, task in zip(crew, tasks, strict=False):
            connection.send(task)
            busy.append(connection)
        while busy:
            ready: list[Any] = wait(busy)
            for connection in ready:
                answer = connection.recv()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                busy.remove(connection)
                for task in islice(tasks, 1):
                    connection.send(task)
                    busy.append(connection)
    except (EOFError, ConnectionError) as error:
        for process in crew.values():
            process.join(0.1)
        if any(
            process.exitcode == 1 for process in crew.values()
        ):  # not killed, and had nothing to say
            raise OptionError(
                "a worker could not start; each imports the script that runs this, if any: put its work under if __name__ == '__main__':"
            ) from error
        raise FileError(
            "a worker died (out of memory, or killed): the same command goes on; perhaps with fewer workers"
        ) from error
    finally:
        for process in (
            crew.values()
        ):  # at once: whatever they are at, nothing is half-written under its own name
            process.kill()
            process.join()
        sweep(folder)


def work_for(connection: Any, name: str, job: Job, folder: Path) -> None:
    """What a worker process does: load the model, then shard after shard; it ends with the process that gives the work."""
    import multiprocessing
    import signal
    import threading
    import traceback
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its workers
    try:
        with one_thread():
            model = load(name)
            while True:
                index, rows = connection.recv()
                connection.send((index, finish_shard(model, job, folder, index, rows)))
    except EOFError:
        return
    except AttnFlowError as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))
