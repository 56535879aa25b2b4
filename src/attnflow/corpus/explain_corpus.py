"""`explain_corpus`: a whole data set into a folder of Parquet shards, and every crash survived.

A shard is `shard_rows` rows of the input, in their order. It is computed as a whole, written beside
and renamed; then the manifest is, with the shard's checksum. What the manifest does not record is
computed again, so no row is lost and none is there twice.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from attnflow.analysis.job import GraphMaker
from attnflow.core.checks import check_count
from attnflow.core.choices import Choices
from attnflow.core.io.formatting import format_count
from attnflow.corpus.folder import (
    ERRORS,
    matches,
    merge_errors,
    open_folder,
    shard_errors_path,
    shard_path,
)
from attnflow.corpus.formats import TellUser
from attnflow.corpus.job import (
    CorpusJob,
    CorpusOptions,
    LayerChoice,
    plan_job,
    read_job,
    refuse_unknown_layers,
)
from attnflow.corpus.local import FinishedShards, WorkerPlan, compute_in_processes, compute_in_turn
from attnflow.corpus.manifest import MANIFEST, MOST_SHARD_ROWS, Manifest, ShardRecord
from attnflow.corpus.on_ray import compute_on_ray, require_ray
from attnflow.corpus.planning import begin_manifest, plan_manifest, recall_options
from attnflow.corpus.rows import FileStamp, InputFiles, PendingShards, gather_inputs
from attnflow.corpus.shard import MODEL, one_thread
from attnflow.edges.graphs import refuse_residual
from attnflow.errors import CaptureError, CorpusWarning, FileError, OptionError
from attnflow.models.execution import require_torch
from attnflow.models.load import BUNDLED, ModelLike, open_model
from attnflow.models.predict import Foil
from attnflow.notices import give_notice
from attnflow.progress import progress_bar

# the share of the time that writing the manifest, which grows with its shards, may take
WRITING_SHARE = 0.05
ENGINES = ("local", "ray")


class NotGiven:
    """The type of an option that is not given, where None is a choice."""

    def __repr__(self) -> str:
        return "not given"


NOT_GIVEN = NotGiven()


def explain_corpus(
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    model: "ModelLike | None" = None,
    text_column: str | None = None,
    id_column: str | None = None,
    label_column: str | None = None,
    keep: str | Sequence[str] | None = None,
    methods: Choices | None = None,
    edges: Choices | None = None,
    layers: LayerChoice = None,
    position: str | int | None = None,
    normalize: str | NotGiven | None = NOT_GIVEN,
    residual: float | None = None,
    without: Sequence[int] | int | None = None,
    graph: GraphMaker | str | None = None,
    segments: str | None = None,
    importance: Choices | None = None,
    foil: Foil | None = None,
    limit: int | None = None,
    batch_tokens: int | None = None,
    workers: int | None = None,
    engine: str = "local",
    address: str | None = None,
    shard_rows: int | None = None,
    report: TellUser | None = None,
) -> Manifest:
    r"""Token attention of every text of one or several files, into the folder `out`.

    The same call resumes where an earlier one was stopped, however it was. Options that are not
    given are then those of the earlier call, and others are refused; user-defined functions must be
    given again, since a manifest alone does not have code imported. Rows without a result are in
    errors.parquet, with the reason; `read_corpus` gives the table of the others.

    Parameters
    ----------
    inputs
        The path of a file (.parquet, .csv, .tsv, .jsonl, compressed or not), or several.
    out
        The folder: made if it does not exist, completed if it was begun.
    model
        A folder, a hub id or a `Model`; by default the model that ships with attnflow.
    text_column
        The column of the texts; by default "text", else "sentence", else the only one.
    id_column
        The column of the ids; by default an id is the file's name and the row's number in it.
    label_column
        The column of the labels: they are stored, and are what importance and gradients watch.
    keep
        Columns of the input that are stored with the results, as strings.
    methods
        Names of methods, or {name: function} with user-defined methods, where None stands for
        attnflow's own of that name; "raw", "rollout" and "flow" by default, and if edges is not
        given either, before them the result that `explain` shows first. A function may also be
        given as "package.module:function", or "name=package.module:function"; workers import it.
    edges
        What an edge of the graph weighs, one or several, as for `explain`; "attention" by default.
        Columns on other edges are called after both: "contribution rollout". Gradient edges watch
        the label, else the prediction. User-defined edge weights are given as methods are.
    layers
        The layers to store, or {column: layers}; by default those that a method gives: all, and
        the top one for flow.
    position
        "focal" (default), where the prediction comes from; "max" or "mean" over all positions; or
        a position.
    normalize
        "sum" (default), "receptive_field", or None for the values as they are.
    residual
        The weight of the residual connection, 0.5 by default, where edges do not hold it.
    without
        Positions to take out of every graph, for instance a sink; none by default. Texts that do
        not have them are errors.
    graph
        A function from an `Attention` to an `AttentionGraph`, or its "package.module:function";
        by default `attention.graph()` with `residual` and `without`.
    segments
        "sentences", "lines" or "words": the shares of these instead of tokens, by rollout on
        attention, one number per segment and layer; their names and numbers of tokens are stored.
        No matrices are built, so texts may be long.
    importance
        Names of importances ("blank_out", "input_gradient"), or {name: function} as for methods,
        called as f(model, texts, targets); none by default.
    foil
        The class that labels (predictions, where there is no label) are contrasted with, as for
        `explain`, or `RUNNER_UP`; importance, gradient and relevance edges, and the faithfulness
        that `evaluate_corpus` measures, then watch the difference of the two logits. A text whose
        label is the foil is an error. None by default.
    limit
        The maximum number of rows.
    batch_tokens
        Tokens that run through the model together; the model's choice by default.
    workers
        The number of processes, each with its own model and one thread; results do not depend on
        it. One by default, on Ray as many as the cluster has GPUs or cores for.
    engine
        "local", or "ray".
    address
        Of a running Ray cluster ("auto": the one of this machine); without it one is started here
        for as long as the run lasts.
    shard_rows
        Rows per shard, 1,000 by default.
    report
        A function that is called with every note for the user; a `CorpusWarning` if None.

    >>> import attnflow as af
    >>> _ = Path("texts.csv").write_text("text,label\nthe key to the cabinets,singular\n,plural\n")
    >>> _ = af.explain_corpus("texts.csv", "out", methods=["rollout"], label_column="label")
    >>> af.read_corpus("out").select(["id", "prediction"]).to_pylist()
    [{'id': 'texts.csv:0', 'prediction': 'singular'}]
    """
    options = {
        "model": model,
        "text_column": text_column,
        "id_column": id_column,
        "label_column": label_column,
        "keep": keep,
        "methods": methods,
        "edges": edges,
        "layers": layers,
        "position": position,
        "residual": residual,
        "without": without,
        "graph": graph,
        "segments": segments,
        "importance": importance,
        "foil": foil,
        "limit": limit,
        "batch_tokens": batch_tokens,
        "shard_rows": shard_rows,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if not isinstance(normalize, NotGiven):
        given["normalize"] = normalize
    files = gather_inputs(inputs)
    chosen = Engine.read(engine, workers, address)
    check_counts(limit=limit, shard_rows=shard_rows)
    if chosen.is_parallel and not is_name(given.get("model", BUNDLED)):
        raise OptionError(
            "each worker loads the model by its name: give model as a folder or a hub id;"
            " or workers=1, engine='local'"
        )
    require_torch()
    if engine == "ray":
        require_ray(address)
    stamps = files.stamps
    with open_folder(out) as folder, one_thread():
        begun = Manifest.read(folder) if (folder / MANIFEST).exists() else None
        known = CorpusOptions() if begun is None else recall_options(folder, begun, given.keys())
        wanted = replace(known, **given)
        job, references = read_job(wanted, chosen.is_parallel)
        loaded = open_model(wanted.model)
        planned, job = plan_job(loaded, wanted, job, references)
        refuse_unknown_layers(layers, planned.stored)
        refuse_residual(job.edges or {}, residual)
        files = replace(files, columns=planned.stored.input_columns, limit=planned.stored.limit)
        name = os.fspath(wanted.model) if is_name(wanted.model) else loaded.name
        now = begin_manifest(files, planned.stored, name, loaded, wanted.shard_rows)
        watched = planned.watched and files.columns.label is not None
        manifest = plan_manifest(
            folder, begun, now, files, loaded, report or warn_user, watched=watched
        )
        manifest.write(folder)
        missing = manifest.missing
        pending = PendingShards(files, manifest.shard_rows, frozenset(missing))
        if chosen.is_parallel:
            del loaded, job  # workers have their own
            finished = chosen.compute(name, manifest, planned, folder, pending)
        else:
            finished = compute_in_turn(loaded, planned, job, folder, pending)
        with closing(finished):
            check_input = partial(refuse_changed_input, folder, files, stamps)
            record_shards(folder, manifest, finished, check_input)
        finish_folder(folder, manifest, computed=bool(missing))
    return manifest


@dataclass(frozen=True)
class Engine:
    """Where shards are computed: in this process, in others, or on a Ray cluster."""

    name: str
    workers: int | None
    address: str | None

    @classmethod
    def read(cls, name: str, workers: int | None, address: str | None) -> "Engine":
        """Refuse an unknown engine, and options that it does not have."""
        check_counts(workers=workers)
        if name not in ENGINES:
            raise OptionError(f"unknown engine {name!r}; choose from {', '.join(ENGINES)}")
        if address is not None and name != "ray":
            raise OptionError(
                f"an address is that of a Ray cluster: give engine='ray' with it; got {address!r}",
                options=["engine='ray'"],
            )
        return cls(name, workers, address)

    @property
    def is_parallel(self) -> bool:
        """Whether other processes compute, each with a model of its own."""
        return self.name == "ray" or (self.workers or 1) > 1

    def compute(
        self, name: str, manifest: Manifest, job: CorpusJob, folder: Path, pending: PendingShards
    ) -> FinishedShards:
        """Compute shards in other processes; name: of the model."""
        plan = WorkerPlan(name, manifest.model["fingerprint"], job, folder)
        if self.name == "ray":
            return compute_on_ray(plan, pending, self.workers, self.address)
        return compute_in_processes(plan, pending, self.workers or 1)


def check_counts(**counts: int | None) -> None:
    """Refuse options that are not a whole number, at least 1; None is not given."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value, MOST_SHARD_ROWS if name == "shard_rows" else None)


def is_name(model: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether this is the name or folder of a model, and not a model."""
    return isinstance(model, str | os.PathLike)


def warn_user(note: str) -> None:
    """Give a note as a warning: the default of `report`."""
    give_notice(note, CorpusWarning, stacklevel=2)


def record_shards(
    folder: Path,
    manifest: Manifest,
    finished: Iterable[tuple[int, ShardRecord]],
    check_input: Callable[[], None],
) -> None:
    """Record finished shards in the manifest, written as often as takes a small share of the time.

    A shard is recorded only while the input is unchanged: otherwise what it was computed from is
    unknown.
    """
    began, before = time.perf_counter(), manifest.seconds
    last_written, cost = 0.0, 0.0
    fresh: dict[int, ShardRecord] = {}  # not recorded yet

    def record() -> None:
        check_input()
        manifest.shards |= fresh
        fresh.clear()
        manifest.seconds = before + time.perf_counter() - began
        manifest.write(folder)

    with progress_bar(f"explaining {format_count(manifest.rows, 'text')}") as tick:
        try:
            for index, shard in finished:
                if not manifest.shards and not fresh:
                    refuse_hopeless(folder, index, shard)
                fresh[index] = shard
                now = time.perf_counter()
                if (now - last_written) * WRITING_SHARE >= cost:
                    record()
                    last_written = time.perf_counter()
                    cost = last_written - now
                shards = len(manifest.shards) + len(fresh)
                tick(min(manifest.rows, shards * manifest.shard_rows), manifest.rows)
        finally:
            if fresh:
                record()


def refuse_hopeless(folder: Path, index: int, shard: ShardRecord) -> None:
    """Stop if no row of the first shard has a result, for one and the same error of the model.

    All others would fail as well. Rows that never reached the model do not count, as long as they
    are fewer. The shard is not recorded, so that the same command computes it again.
    """
    import pyarrow.parquet as pq

    if shard.rows or 2 * shard.reasons.get(MODEL, 0) <= shard.errors:
        return
    path = shard_errors_path(folder, index)
    failures = pq.read_table(path, columns=["reason", "detail"]).to_pylist()
    details = {failure["detail"] for failure in failures if failure["reason"] == MODEL}
    if len(details) == 1:
        path.unlink()
        shard_path(folder, index).unlink()
        raise CaptureError(
            "the model failed on every row of the first shard with one and the same error:"
            f" {details.pop()}; the run is stopped, and the same command resumes it"
        )


def refuse_changed_input(
    folder: Path, files: InputFiles, stamps: tuple[FileStamp | None, ...]
) -> None:
    """Refuse files that are not as they were when the run began."""
    changed = [
        path
        for path, then, now in zip(files.paths, stamps, files.stamps, strict=True)
        if then != now
    ]
    if changed:
        raise FileError(
            f"{', '.join(changed)} changed while it was read: give it as it was when {folder} was"
            " begun"
        )


def finish_folder(folder: Path, manifest: Manifest, *, computed: bool) -> None:
    """Merge the errors of all shards, if every shard exists."""
    gone = manifest.missing + [
        index for index in sorted(manifest.shards) if not shard_path(folder, index).exists()
    ]
    if gone:
        raise FileError(
            f"{folder} lacks {format_count(len(gone), 'shard')}, among them {gone[0]}:"
            " the same command resumes the run"
        )
    if computed or not matches(folder / ERRORS, manifest.errors_sha256):
        manifest.errors_sha256 = merge_errors(folder, manifest)
        manifest.write(folder)
