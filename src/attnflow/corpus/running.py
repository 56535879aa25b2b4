"""`explain_corpus`: a whole data set -> a folder of Parquet shards that any crash leaves whole, and that the same call completes.

A shard is `shard_rows` rows of the input, in their order. It is computed as a whole, written beside and renamed; then the manifest is, with
the shard's checksum. What the manifest does not vouch for is computed again, so no row is lost and none is there twice.
"""

import json
import os
import signal
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from attnflow.core.graph import RESIDUAL, check_whole
from attnflow.corpus.folder import (
    ERRORS,
    MANIFEST,
    MOST_SHARD_ROWS,
    MOST_SHARDS,
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
from attnflow.corpus.reading import read_shards
from attnflow.corpus.rows import Report, Row, Source, fingerprint, source_of
from attnflow.corpus.shard import (
    MODEL,
    Job,
    compute_shard,
    model_fingerprint,
    one_thread,
    plan_job,
)
from attnflow.errors import AttnFlowError, CaptureError, CorpusWarning, FileError, OptionError
from attnflow.models.execution import require_torch
from attnflow.models.loading import BUNDLED, load
from attnflow.models.model import Model
from attnflow.notices import give_notice
from attnflow.progress import progress_bar

SHARD_ROWS = 1000
WRITING = (
    0.05  # the share of the time that writing the manifest, which grows with its shards, may take
)
ENGINES = ("local", "ray")
SHOWN_LABELS = 3  # of those that are no classes
KNOWN_LABELS = 1000  # different labels that are remembered
LIBRARIES = ("attnflow", "torch", "transformers", "numpy", "pyarrow")
# what an option is if it is not given, and the folder is not begun
DEFAULTS: dict[str, Any] = {
    "model": BUNDLED,
    "text_column": None,
    "id_column": None,
    "label_column": None,
    "keep": (),
    "methods": ("raw", "rollout", "flow"),
    "layers": None,
    "position": "focal",
    "normalize": "sum",
    "residual": RESIDUAL,
    "importance": (),
    "limit": None,
    "batch_tokens": None,
    "shard_rows": SHARD_ROWS,
}


class NotGiven:
    """An option that is not given, where None says something."""

    def __repr__(self) -> str:
        return "not given"


NOT_GIVEN = NotGiven()


def explain_corpus(
    inputs: Any,
    out: str | os.PathLike[str],
    *,
    model: Any = None,
    text_column: str | None = None,
    id_column: str | None = None,
    label_column: str | None = None,
    keep: Any = None,
    methods: Any = None,
    layers: Any = None,
    position: str | int | None = None,
    normalize: str | NotGiven | None = NOT_GIVEN,
    residual: float | None = None,
    importance: Any = None,
    limit: int | None = None,
    batch_tokens: int | None = None,
    workers: int | None = None,
    engine: str = "local",
    address: str | None = None,
    shard_rows: int | None = None,
    report: Report | None = None,
) -> Manifest:
    r"""Token attention of every text of one or several files, into the folder `out`.

    The same call resumes where an earlier one was stopped, however it was; options that are not
    given are then those of the earlier call, and others are refused. Rows without a result are in
    errors.parquet, with the reason; `read_corpus` gives the table of the others.

    Parameters
    ----------
    inputs
        The path of a file (.parquet, .csv, .tsv, .jsonl, packed or not), or several.
    out
        The folder: made if it is not there, completed if it was begun.
    model
        A folder, a hub id or a `Model`; by default the model that ships with attnflow.
    text_column
        The column of the texts; by default "text", else "sentence", else the only one.
    id_column
        The column of the ids; by default an id is the file's name and the row's number in it.
    label_column
        The column of the labels: they are stored, and are the targets of importance.
    keep
        Columns of the input that are stored with the results, as strings.
    methods
        "raw", "rollout", "flow"; all of them by default.
    layers
        The layers to store; by default all for raw and rollout, the top one for flow.
    position
        "focal" (default), where the prediction comes from; "max" or "mean" over all positions; or
        a position.
    normalize
        "sum" (default), "receptive_field", or None for the values as they are.
    residual
        The weight of the residual connection, 0.5 by default.
    importance
        "blank_out", "input_gradient" or both; none by default.
    limit
        At most so many rows.
    batch_tokens
        Tokens that run through the model together; the model's choice by default.
    workers
        Processes, each with a model of its own and one thread; the result does not depend on their
        number. One by default, on Ray as many as the cluster has GPUs or cores for.
    engine
        "local", or "ray".
    address
        Of a running Ray cluster ("auto": the one of this machine); without it one is started here
        for as long as the run lasts.
    shard_rows
        Rows per shard, 1,000 by default.
    report
        A function that is told what a user should know; a `CorpusWarning` if None.

    >>> import attnflow as af
    >>> _ = Path("texts.csv").write_text("text,label\nthe key to the cabinets,singular\n,plural\n")
    >>> manifest = af.explain_corpus("texts.csv", "explained", methods=["rollout"], label_column="label")
    >>> af.read_corpus("explained").select(["id", "prediction"]).to_pylist()
    [{'id': 'texts.csv:0', 'prediction': 'singular'}]
    """
    given = {
        "model": model,
        "text_column": text_column,
        "id_column": id_column,
        "label_column": label_column,
        "keep": keep,
        "methods": methods,
        "layers": layers,
        "position": position,
        "residual": residual,
        "importance": importance,
        "limit": limit,
        "batch_tokens": batch_tokens,
        "shard_rows": shard_rows,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(normalize, NotGiven):
        given["normalize"] = normalize
    report = warn_user if report is None else report
    source = source_of(inputs)
    for name, most in {"limit": None, "workers": None, "shard_rows": MOST_SHARD_ROWS}.items():
        value = workers if name == "workers" else given.get(name)
        if value is not None:
            check_whole(name, value, most)
    if engine not in ENGINES:
        raise OptionError(f"unknown engine {engine!r}; choose from {', '.join(ENGINES)}")
    if address is not None and engine != "ray":
        raise OptionError(
            f"an address is that of a Ray cluster: give engine='ray' with it; got {address!r}"
        )
    is_name = model is None or isinstance(model, str | os.PathLike)
    if not is_name and (engine == "ray" or (workers or 1) > 1):
        raise OptionError(
            "each worker loads the model by its name: give model as a folder or a hub id; or workers=1, engine='local'"
        )
    require_torch()
    if engine == "ray":
        from attnflow.corpus.on_ray import on_ray, require_ray

        require_ray(address)
    folder = made(out)
    stamps = source.stamps
    with locked(folder), one_thread():
        begun = Manifest.read(folder) if (folder / MANIFEST).exists() else None
        chosen = {**DEFAULTS, **({} if begun is None else options_of(begun)), **given}
        if begun is not None and model is None:
            refuse_nameless(folder, begun)
        source = replace(
            source,
            text=chosen["text_column"],
            id=chosen["id_column"],
            label=chosen["label_column"],
            limit=chosen["limit"],
        )
        model = chosen["model"]
        loaded = load(model) if is_name else model if isinstance(model, Model) else Model(model)
        job = plan_job(
            loaded,
            methods=chosen["methods"],
            layers=chosen["layers"],
            position=chosen["position"],
            normalize=chosen["normalize"],
            residual=chosen["residual"],
            importance=chosen["importance"],
            batch_tokens=chosen["batch_tokens"],
            keep=chosen["keep"],
        )
        source = replace(source, keep=job.keep)
        name = os.fspath(model) if is_name else loaded.name
        manifest = plan(folder, begun, source, job, name, loaded, chosen["shard_rows"], report)
        manifest.write(folder)
        missing = manifest.missing
        work = Work(source, manifest.shard_rows, frozenset(missing))
        if engine == "ray":
            done = on_ray(name, manifest, job, folder, work, workers, address)
        elif workers and workers > 1:
            weights = manifest.model["fingerprint"]
            done = in_processes(name, weights, job, folder, work, min(workers, len(missing)))
        else:
            done = in_turn(loaded, job, folder, work)
        del loaded
        with closing(done):
            collect(folder, manifest, done, partial(refuse_other_input, folder, source, stamps))
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


def warn_user(note: str) -> None:
    """What is told where nobody else listens."""
    give_notice(note, CorpusWarning, stacklevel=2)


def collect(
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
                if not manifest.shards and not fresh:
                    refuse_hopeless(folder, index, shard)
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


def refuse_hopeless(folder: Path, index: int, shard: Shard) -> None:
    """Stop if no row of the first shard has a result, for one and the same error of the model.

    All others would fail as well. Rows that never reached the model do not count, as long as they
    are fewer. The shard is not vouched for, so that the same command computes it again.
    """
    import pyarrow.parquet as pq

    if shard.rows or 2 * shard.reasons.get(MODEL, 0) <= shard.errors:
        return
    path = shard_errors_path(folder, index)
    failures = pq.read_table(path, columns=["reason", "detail"]).to_pylist()
    details = {each["detail"] for each in failures if each["reason"] == MODEL}
    if len(details) == 1:
        path.unlink()
        shard_path(folder, index).unlink()
        raise CaptureError(
            "the model failed on every row of the first shard with one and the same error:"
            f" {details.pop()}; the run is stopped, and the same command resumes it"
        )


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


def options_of(begun: Manifest) -> dict[str, Any]:
    """The options that a folder was begun with, as `explain_corpus` takes them."""
    columns = {f"{name}_column": column for name, column in begun.options["columns"].items()}
    same = {name: begun.options[name] for name in DEFAULTS if name in begun.options}
    return {**same, **columns, "model": begun.model["name"], "shard_rows": begun.shard_rows}


def refuse_nameless(folder: Path, begun: Manifest) -> None:
    """A model that was given as an object is known by its class, and cannot be loaded by that."""
    name = begun.model["name"]
    if name == begun.model["class"] and not Path(name).is_dir():
        raise OptionError(f"{folder} was begun with a loaded model, a {name}: give it as model")


def plan(
    folder: Path,
    begun: Manifest | None,
    source: Source,
    job: Job,
    name: str,
    model: Model,
    shard_rows: int,
    report: Report,
) -> Manifest:
    """The manifest to resume from: a new one, or the folder's if all is as it was then."""
    options = asdict(job)
    del options["depth"]  # which is the model's
    options |= {
        "columns": {"text": source.text, "id": source.id, "label": source.label},
        "limit": source.limit,
    }
    options = json.loads(json.dumps(options))
    facts = model_facts(name, model)
    prints = [fingerprint(path) for path in source.paths]
    inputs = [
        {"file": name, "bytes": size, "sha256": sha}
        for name, (size, sha) in zip(source.names, prints, strict=True)
    ]
    sweep(folder)
    if begun is not None:
        refuse_changes(folder, begun, inputs, facts, options, shard_rows)
        drop_damaged(folder, begun, report)
        return begun
    others = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if others:
        raise FileError(
            f"{folder} is not empty and holds no corpus (it has {others[0]}); give another folder"
        )
    rows = survey(source, job, model, report)
    if not rows:
        raise FileError(f"{', '.join(source.paths)}: there are no rows")
    manifest = Manifest(versions(), facts, inputs, options, rows, shard_rows)
    if manifest.count > MOST_SHARDS:
        raise OptionError(
            f"a corpus has at most {MOST_SHARDS:,} shards; got {manifest.count:,}:"
            " give more shard_rows"
        )
    return manifest


def drop_damaged(folder: Path, manifest: Manifest, report: Report) -> None:
    """Take out of the manifest what is not as it was written, so that it is computed again."""
    for library, used in versions().items():
        if manifest.versions.get(library) != used:
            report(
                f"{library} was {manifest.versions.get(library)} when {folder} was begun,"
                f" and is {used}: last digits may differ"
            )
    for index, shard in sorted(manifest.shards.items()):
        if not is_whole(shard_path(folder, index), shard.sha256) or not (
            shard.errors_sha256 is None
            or is_whole(shard_errors_path(folder, index), shard.errors_sha256)
        ):
            report(f"{shard_path(folder, index).name} is missing or damaged: it is computed again")
            del manifest.shards[index]
    for _ in read_shards(folder, manifest):  # whole files that are not what the manifest says
        break
    if len(manifest.shards) < manifest.count:
        manifest.errors_sha256 = None


def survey(source: Source, job: Job, model: Model, report: Report) -> int:
    """How many rows there are; what is wrong with the input is told before anything is computed."""
    count, ids = 0, array("q")  # 8 bytes per row are enough to see that an id is repeated
    watched = bool(job.importance) and source.label is not None
    unknown: dict[str, None] = {}
    known: dict[str, bool] = {}
    labels = [0, 0]  # how many rows have a label that is no class, and one that is
    for row in source.rows(report):
        count += 1
        if source.id is not None:
            ids.append(hash(row.id))
        if watched and row.label is not None and row.problem is None:
            if row.label not in known and len(known) < KNOWN_LABELS:
                known[row.label] = is_class(model, row.label)
            fits = known[row.label] if row.label in known else is_class(model, row.label)
            labels[fits] += 1
            if not fits and len(unknown) < SHOWN_LABELS:
                unknown[row.label] = None
    if labels[False] > labels[True]:  # stars from 1 to 5 hold some class numbers by accident
        raise OptionError(
            f"importance watches the class that a label names, and {labels[False]:,} of"
            f" {sum(labels):,} labels in {source.label!r} are no class of {model.name}; got"
            f" {', '.join(map(repr, unknown))}: give another label_column, or none"
        )
    report_repeated(source, np.frombuffer(ids, np.int64), report)
    return count


def is_class(model: Model, label: str) -> bool:
    """Whether a label names a class of the model."""
    try:
        model.target(label)
    except AttnFlowError:
        return False
    return True


def report_repeated(
    source: Source, ids: "np.ndarray[Any, np.dtype[np.int64]]", report: Report
) -> None:
    """Say which id several rows have, and how many do; ids: a hash for each row, in their order."""
    order = np.argsort(ids, kind="stable")
    again = order[1:][np.diff(ids[order]) == 0]  # rows whose id an earlier row has
    if not len(again):
        return
    second = int(again.min())
    first = int(np.flatnonzero(ids == ids[second])[0])
    found = next(islice(source.rows(), second, None)).id
    report(
        f"ids in {source.id!r} are repeated: rows {first} and {second} both have {found!r};"
        f" {len(again):,} of {len(ids):,} rows have an id that an earlier row has"
    )


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
    name: str, weights: str, job: Job, folder: Path, work: Work, workers: int
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
                target=work_for, args=(theirs, name, weights, job, folder), daemon=True
            )
            with interrupts_blocked():
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


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A block in which no interrupt arrives; in a process that is started within, none ever does.

    Ctrl-C goes to all processes, and this one alone answers it: it ends the others.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which would unblock them when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work_for(connection: Any, name: str, weights: str, job: Job, folder: Path) -> None:
    """What a worker process does: load the model, then shard after shard.

    It ends with the process that gives the work. weights: the fingerprint that the model must have.
    """
    import multiprocessing
    import threading
    import traceback
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    try:
        with one_thread():
            model = load(name)
            if model_fingerprint(model) != weights:
                raise FileError(
                    f"the model {name} has other weights in a worker than where the run was"
                    " started: some are drawn at random when it is loaded, or its files changed"
                )
            while True:
                index, rows = connection.recv()
                connection.send((index, finish_shard(model, job, folder, index, rows)))
    except EOFError:
        return
    except AttnFlowError as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))
