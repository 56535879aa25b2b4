"""The rows that a corpus folder holds, each shard checked against its manifest."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnflow.corpus.folder import Manifest, shard_path
from attnflow.corpus.shard import result_schema
from attnflow.errors import FileError

if TYPE_CHECKING:
    import pyarrow

BATCH = 1024  # rows that are read together


def read_shards(
    folder: Path, manifest: Manifest, columns: Sequence[str] | None = None
) -> "Iterator[pyarrow.RecordBatch]":
    """The rows of all finished shards, a few at a time, as the manifest says that they are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, layers = schema_of(manifest), manifest.options["layers"]
    for index in sorted(manifest.shards):
        path = shard_path(folder, index)
        try:
            with pq.ParquetFile(path) as file:
                check_schema(path, file.schema_arrow, schema)
                for batch in file.iter_batches(
                    batch_size=BATCH, columns=None if columns is None else list(columns)
                ):
                    for name in set(layers) & set(batch.schema.names):
                        check_depth(path, name, batch.column(name), layers[name])
                    yield batch
        except FileError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            raise FileError(
                f"cannot read {path}: {error}; run the same `corpus run` again, which mends it"
            ) from error


def check_schema(path: Path, found: "pyarrow.Schema", expected: "pyarrow.Schema") -> None:
    """Refuse a shard that holds something else than the manifest says."""
    if not found.equals(expected):
        raise FileError(
            f"{path.name} has other columns than the manifest says: {', '.join(found.names)}"
        )


def check_depth(path: Path, name: str, found: "pyarrow.Array", layers: Sequence[int]) -> None:
    """Refuse scores [layer, token] of more or fewer layers than the manifest says."""
    import pyarrow.compute as pc

    if set(pc.list_value_length(found).to_pylist()) - {len(layers)}:
        raise FileError(
            f"{path.name} has other layers of {name} than the {len(layers)} that the manifest says"
        )


def schema_of(manifest: Manifest) -> "pyarrow.Schema":
    """The columns of this corpus."""
    options = manifest.options
    return result_schema(options["methods"], options["importance"], options["keep"])
