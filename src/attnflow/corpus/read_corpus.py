"""`read_corpus`: the rows of a corpus folder, its shards checked against the manifest."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from attnflow.corpus.folder import shard_path
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import require_pyarrow
from attnflow.errors import FileError, OptionError

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 1024  # at a time


@overload
def read_corpus(
    folder: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    batches: Literal[False] = False,
) -> "pyarrow.Table": ...


@overload
def read_corpus(
    folder: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    batches: Literal[True],
) -> "Iterator[pyarrow.RecordBatch]": ...


def read_corpus(
    folder: str | os.PathLike[str], *, columns: Sequence[str] | None = None, batches: bool = False
) -> "pyarrow.Table | Iterator[pyarrow.RecordBatch]":
    """The results of a corpus, one row per text, in the order of its input.

    While a run is under way, these are the shards that are finished so far.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    columns
        The columns to read; all if None.
    batches
        Whether to return an iterator of `pyarrow.RecordBatch`, which never holds the whole corpus
        in memory, instead of a `pyarrow.Table`.

    >>> import attnflow as af
    >>> _ = Path("texts.jsonl").write_text('{"text": "the key"}')
    >>> _ = af.explain_corpus("texts.jsonl", "out", methods=["rollout"], layers=[6])
    >>> read_corpus("out", columns=["tokens"]).to_pylist()
    [{'tokens': ['[CLS]', 'the', 'key']}]
    """
    require_pyarrow()
    import pyarrow as pa

    manifest = Manifest.read(folder)
    schema = manifest.options.schema
    if columns is not None:
        unknown = [name for name in columns if name not in schema.names]
        if unknown:
            raise OptionError(
                f"unknown column {unknown[0]!r}; choose from {', '.join(schema.names)}"
            )
        schema = pa.schema([schema.field(name) for name in columns])
    shards = read_shards(Path(folder), manifest, columns)
    return shards if batches else pa.Table.from_batches(list(shards), schema=schema)


def read_shards(
    folder: Path, manifest: Manifest, columns: Sequence[str] | None = None
) -> "Iterator[pyarrow.RecordBatch]":
    """The rows of all finished shards, a few at a time, checked against the manifest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, layers = manifest.options.schema, manifest.options.layers
    for index in sorted(manifest.shards):
        path = shard_path(folder, index)
        try:
            with pq.ParquetFile(path) as file:
                check_schema(path, file.schema_arrow, schema)
                for batch in file.iter_batches(
                    batch_size=BATCH_ROWS, columns=None if columns is None else list(columns)
                ):
                    for name in set(layers) & set(batch.schema.names):
                        check_layer_count(path, name, batch.column(name), layers[name])
                    yield batch
        except FileError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            raise FileError(
                f"cannot read {path}: {error}; run the same `corpus run` again, which mends it"
            ) from error


def check_schema(path: Path, schema: "pyarrow.Schema", expected: "pyarrow.Schema") -> None:
    """Refuse a shard whose columns differ from those of the manifest."""
    if not schema.equals(expected):
        raise FileError(
            f"{path.name} has other columns than the manifest says: {', '.join(schema.names)}"
        )


def check_layer_count(
    path: Path, name: str, scores: "pyarrow.Array", layers: Sequence[int]
) -> None:
    """Refuse scores [layer, token] of more or fewer layers than the manifest says."""
    import pyarrow.compute as pc

    if set(pc.list_value_length(scores).to_pylist()) - {len(layers)}:
        raise FileError(
            f"{path.name} has other layers of {name} than the {len(layers)} that the manifest says"
        )
