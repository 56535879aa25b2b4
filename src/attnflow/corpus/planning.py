"""The manifest that a run begins with: a new one, or the folder's, if everything is as it was."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from attnflow.analysis.importance.importances import IMPORTANCES
from attnflow.core.methods import METHODS
from attnflow.core.provenance import read_versions
from attnflow.corpus.folder import matches, remove_leftovers, shard_errors_path, shard_path
from attnflow.corpus.formats import TellUser
from attnflow.corpus.job import CorpusOptions, StoredJob, recall_foil
from attnflow.corpus.manifest import MANIFEST_FORMAT, MOST_SHARDS, InputRecord, Manifest
from attnflow.corpus.read_corpus import read_shards
from attnflow.corpus.rows import InputFiles, hash_file
from attnflow.corpus.survey import survey_input
from attnflow.edges.edge_weight import EDGES
from attnflow.errors import FileError, OptionError
from attnflow.models.fingerprint import model_fingerprint
from attnflow.models.model import Model

NUMBER_MAKERS = ("attnflow", "torch", "transformers", "numpy", "pyarrow")  # they make the numbers


def recall_options(folder: Path, begun: Manifest, given: Collection[str]) -> CorpusOptions:
    """The options that a folder was begun with; given: the names of those of this call.

    A manifest is data: a function that it names, and this call does not, is never imported.
    """
    stored, name = begun.options, begun.model["name"]
    for option, names, known, places in (
        ("methods", stored.methods, METHODS, stored.functions),
        ("importance", stored.importance, IMPORTANCES, stored.functions),
        ("edges", stored.edges, EDGES, stored.own_edges),
    ):
        own = [each for each in names if each not in known]
        if own and option not in given:
            raise OptionError(
                f"{folder} was begun with a function of yours among its {option}, {own[0]!r}"
                f" ({places.get(own[0], 'nowhere')}), which a manifest alone does not have"
                f" imported: give {option} (--{option}) again"
            )
    if stored.graph is not None and "graph" not in given:
        raise OptionError(
            f"{folder} was begun with graphs of a function of yours ({stored.graph}), which a"
            " manifest alone does not have imported: give graph (--graph) again"
        )
    if "model" not in given and begun.is_of_object:
        raise OptionError(f"{folder} was begun with a loaded model, a {name}: give it as model")
    makes_graphs = "graph" in given  # by a function, which uses neither residual nor without
    return CorpusOptions(
        model=name,
        text_column=stored.columns["text"],
        id_column=stored.columns["id"],
        label_column=stored.columns["label"],
        keep=stored.keep,
        methods=stored.methods,
        edges=stored.edges,
        first=None if {"methods", "edges"} & set(given) else stored.first is not None,
        layers=stored.layers,
        position=stored.position,
        normalize=stored.normalize,
        residual=None if makes_graphs else stored.residual,
        without=() if makes_graphs else stored.without,
        segments=stored.segments,
        importance=stored.importance,
        foil=recall_foil(stored.foil),
        limit=stored.limit,
        batch_tokens=stored.batch_tokens,
        shard_rows=begun.shard_rows,
    )


def begin_manifest(
    inputs: InputFiles, stored: StoredJob, name: str, model: Model, shard_rows: int
) -> Manifest:
    """The manifest of a run that begins now; its rows are not counted yet.

    An input is read three times, each time in pieces: here its bytes, for the checksum; once its
    rows, which `survey_input` must have seen before a model computes for hours; and once the rows
    that are computed. One pass less would need all rows in memory, or a checksum of a file that
    Parquet reads from its end.
    """
    hashes = [hash_file(path) for path in inputs.paths]
    return Manifest(
        versions=list_run_versions(),
        model={
            "name": name,
            "class": model.name,
            "task": model.task,
            "fingerprint": model_fingerprint(model),
        },
        inputs=tuple(
            InputRecord(file=file, bytes=size, sha256=sha256)
            for file, (size, sha256) in zip(inputs.names, hashes, strict=True)
        ),
        options=stored,
        rows=0,
        shard_rows=shard_rows,
        shards={},
        errors_sha256=None,
        seconds=0.0,
        format=MANIFEST_FORMAT,
    )


def plan_manifest(
    folder: Path,
    begun: Manifest | None,
    now: Manifest,
    inputs: InputFiles,
    model: Model,
    notify: TellUser,
    *,
    watched: bool,
) -> Manifest:
    """The manifest to continue: the folder's if its input and options are unchanged, or a new one.

    watched: whether labels are the targets of importance or of gradient edges.
    """
    remove_leftovers(folder)
    if begun is not None:
        refuse_changes(folder, begun, now)
        drop_damaged(folder, begun, notify)
        return begun
    others = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if others:
        raise FileError(
            f"{folder} is not empty and holds no corpus (it has {others[0]}); give another folder"
        )
    rows = survey_input(inputs, model, notify, watched=watched)
    if not rows:
        raise FileError(f"{', '.join(inputs.paths)}: there are no rows")
    begun = replace(now, rows=rows)
    if begun.count > MOST_SHARDS:
        raise OptionError(
            f"a corpus has at most {MOST_SHARDS:,} shards; got {begun.count:,}:"
            " give more shard_rows"
        )
    return begun


def drop_damaged(folder: Path, manifest: Manifest, notify: TellUser) -> None:
    """Drop shards with damaged files from the manifest, so that they are computed again."""
    for library, used in list_run_versions().items():
        if manifest.versions.get(library) != used:
            notify(
                f"{library} was {manifest.versions.get(library)} when {folder} was begun,"
                f" and is {used}: last digits may differ"
            )
    for index, shard in sorted(manifest.shards.items()):
        if not matches(shard_path(folder, index), shard.sha256) or not (
            shard.errors_sha256 is None
            or matches(shard_errors_path(folder, index), shard.errors_sha256)
        ):
            notify(f"{shard_path(folder, index).name} is missing or damaged: it is computed again")
            del manifest.shards[index]
    for _ in read_shards(folder, manifest):  # whole files that are not what the manifest says
        break
    if len(manifest.shards) < manifest.count:
        manifest.errors_sha256 = None


def refuse_changes(folder: Path, begun: Manifest, now: Manifest) -> None:
    """Refuse to resume if something differs from the begun run, in one line that names it."""
    before = {**begun.options.record(), "shard_rows": begun.shard_rows}
    after = {**now.options.record(), "shard_rows": now.shard_rows}
    changed = [name for name in after if after[name] != before[name]]
    changes = [f"option {name} was {before[name]!r} and is {after[name]!r}" for name in changed]
    if begun.model["fingerprint"] != now.model["fingerprint"]:
        names = begun.model["name"], now.model["name"]
        changes.append(
            f"the model {names[1]} has other weights"
            if names[0] == names[1]
            else f"the model was {names[0]} and is {names[1]}"
        )
    files = [", ".join(file["file"] for file in each.inputs) for each in (begun, now)]
    if files[0] != files[1]:
        changes.append(f"the input was {files[0]} and is {files[1]}")
    else:
        changes += [
            f"the input {file['file']} has another content"
            for then, file in zip(begun.inputs, now.inputs, strict=True)
            if then["sha256"] != file["sha256"]
        ]
    if changes:
        raise FileError(
            f"{folder} was begun otherwise: {'; '.join(changes)}."
            " Give what was given then, or another folder",
            options=changed,
        )


def list_run_versions() -> dict[str, str]:
    """The versions of attnflow and of the libraries that make the numbers."""
    return dict(read_versions(NUMBER_MAKERS))
