"""The manifest that a run begins with: a new one, or the folder's, if everything is as it was."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnflow.analysis.importance import IMPORTANCES
from attnflow.core.methods import METHODS
from attnflow.core.provenance import read_versions
from attnflow.corpus.folder import matches, remove_leftovers, shard_errors_path, shard_path
from attnflow.corpus.formats import Notify
from attnflow.corpus.job import Job
from attnflow.corpus.manifest import MOST_SHARDS, Manifest
from attnflow.corpus.reading import read_shards
from attnflow.corpus.rows import InputFiles, hash_file
from attnflow.corpus.survey import survey_input
from attnflow.edges.choosing import EDGES
from attnflow.errors import FileError, OptionError
from attnflow.models.fingerprint import model_fingerprint
from attnflow.models.model import Model

LIBRARIES = ("attnflow", "torch", "transformers", "numpy", "pyarrow")  # they make the numbers


def recall_options(folder: Path, begun: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a folder was begun with, as `explain_corpus` takes them.

    A manifest is data: a function that it names, and this call does not, is never imported.
    """
    known: dict[str, Collection[str]] = {
        "methods": METHODS,
        "importance": IMPORTANCES,
        "edges": EDGES,
    }
    for option, names in known.items():
        places = begun.options["own_edges" if option == "edges" else "functions"]
        own = [name for name in begun.options[option] if name not in names]
        if own and option not in given:
            origin = places.get(own[0], "nowhere")
            raise OptionError(
                f"{folder} was begun with a function of yours among its {option}, {own[0]!r}"
                f" ({origin}), which a manifest alone does not have imported:"
                f" give {option} (--{option}) again"
            )
    if begun.options["graph"] is not None and "graph" not in given:
        raise OptionError(
            f"{folder} was begun with graphs of a function of yours ({begun.options['graph']}),"
            " which a manifest alone does not have imported: give graph (--graph) again"
        )
    name = begun.model["name"]
    if "model" not in given and name == begun.model["class"] and not Path(name).is_dir():
        # an object is known by its class, and cannot be loaded by that
        raise OptionError(f"{folder} was begun with a loaded model, a {name}: give it as model")
    columns = {f"{role}_column": column for role, column in begun.options["columns"].items()}
    replaced = {"columns", "functions", "own_edges", "graph"}
    replaced |= {"residual", "without"} if "graph" in given else set()  # a graph of yours has these
    recorded = {option: value for option, value in begun.options.items() if option not in replaced}
    return {**recorded, **columns, "model": name, "shard_rows": begun.shard_rows}


def plan_manifest(
    folder: Path,
    begun: Manifest | None,
    inputs: InputFiles,
    job: Job,
    name: str,
    model: Model,
    shard_rows: int,
    notify: Notify,
) -> Manifest:
    """The manifest to resume from: a new one, or the folder's if everything is as it was then."""
    options = asdict(job)
    for derived in ("depth", "heads", "watched"):  # which follow from the others and the model
        del options[derived]
    columns = inputs.columns
    options |= {
        "columns": {"text": columns.text, "id": columns.id, "label": columns.label},
        "limit": inputs.limit,
    }
    options = json.loads(json.dumps(options))
    described = describe_model(name, model)
    hashes = [hash_file(path) for path in inputs.paths]
    files = [
        {"file": file, "bytes": size, "sha256": sha256}
        for file, (size, sha256) in zip(inputs.names, hashes, strict=True)
    ]
    remove_leftovers(folder)
    if begun is not None:
        refuse_changes(folder, begun, files, described, options, shard_rows)
        drop_damaged(folder, begun, notify)
        return begun
    others = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if others:
        raise FileError(
            f"{folder} is not empty and holds no corpus (it has {others[0]}); give another folder"
        )
    watched = job.watched and columns.label is not None
    rows = survey_input(inputs, model, notify, watched=watched)
    if not rows:
        raise FileError(f"{', '.join(inputs.paths)}: there are no rows")
    manifest = Manifest(list_run_versions(), described, files, options, rows, shard_rows)
    if manifest.count > MOST_SHARDS:
        raise OptionError(
            f"a corpus has at most {MOST_SHARDS:,} shards; got {manifest.count:,}:"
            " give more shard_rows"
        )
    return manifest


def drop_damaged(folder: Path, manifest: Manifest, notify: Notify) -> None:
    """Take out of the manifest what is not as it was written, so that it is computed again."""
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


def refuse_changes(
    folder: Path,
    manifest: Manifest,
    files: list[dict[str, Any]],
    model: dict[str, str],
    options: dict[str, Any],
    shard_rows: int,
) -> None:
    """One line that names what is not as it was when the folder was begun."""
    changes = [
        f"option {name} was {manifest.options.get(name)!r} and is {value!r}"
        for name, value in options.items()
        if manifest.options.get(name) != value
    ]
    if manifest.shard_rows != shard_rows:
        changes.append(f"option shard_rows was {manifest.shard_rows} and is {shard_rows}")
    if manifest.model["fingerprint"] != model["fingerprint"]:
        before, now = manifest.model["name"], model["name"]
        changes.append(
            f"the model was {before} and is {now}"
            if before != now
            else f"the model {now} has other weights"
        )
    earlier = manifest.inputs
    if [file["file"] for file in earlier] != [file["file"] for file in files]:
        names = [", ".join(file["file"] for file in several) for several in (earlier, files)]
        changes.append(f"the input was {names[0]} and is {names[1]}")
    else:
        changes += [
            f"the input {file['file']} has another content"
            for then, file in zip(earlier, files, strict=True)
            if then["sha256"] != file["sha256"]
        ]
    if changes:
        raise FileError(
            f"{folder} was begun otherwise: {'; '.join(changes)}."
            " Give what was given then, or another folder"
        )


def describe_model(name: str, model: Model) -> dict[str, str]:
    """What the manifest says of a model."""
    return {
        "name": name,
        "class": model.name,
        "task": model.task,
        "fingerprint": model_fingerprint(model),
    }


def list_run_versions() -> dict[str, str]:
    """The versions of attnflow and of the libraries that make the numbers."""
    return dict(read_versions(LIBRARIES))
