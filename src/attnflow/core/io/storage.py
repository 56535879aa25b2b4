"""Attention weights in files: .npz with all fields of an `Attention`, or plain arrays."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Array
from attnflow.core.io.files import open_file
from attnflow.core.provenance import Source
from attnflow.errors import FileError

if TYPE_CHECKING:
    from attnflow.core.attention import Attention

STORAGE_FORMAT = 1  # of the .npz file


def pack_attention(attention: "Attention") -> dict[str, Array]:
    """All fields of an Attention as plain arrays."""
    arrays: dict[str, Array] = {
        "format": np.array(STORAGE_FORMAT),
        "weights": attention.weights,
        "causal": np.array(attention.causal),
        "window": np.array([0 if window is None else window for window in attention.window]),
    }
    if attention.tokens is not None:
        # one string of UTF-8 bytes per token: numpy's own strings drop trailing NULs
        encoded = [token.encode("utf-8", "surrogatepass") for token in attention.tokens]
        arrays["token_bytes"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        arrays["token_lengths"] = np.array([len(token) for token in encoded])
    words = attention.words
    optional: dict[str, npt.ArrayLike | None] = {
        "words": None if words is None else [-1 if word is None else word for word in words],
        "fused": attention.fused,
        "no_token_share": attention.no_token_share,
        "layer_names": attention.layer_names,
        "grid": attention.grid,
        "source": None if attention.source is None else attention.source.to_json(),
    }
    return arrays | {name: np.array(value) for name, value in optional.items() if value is not None}


# each makes an argument of `Attention` from its array
FIELD_READERS: dict[str, Callable[[Array], object]] = {
    "weights": lambda array: array,
    "causal": bool,
    "window": lambda array: [int(window) or None for window in array],
    "words": lambda array: [int(word) for word in array],
    "fused": lambda array: array.item(),
    "no_token_share": lambda array: array,
    "layer_names": lambda array: [str(name) for name in array],
    "grid": lambda array: tuple(array.tolist()),
    "source": lambda array: Source.from_json(array.item()),
}


def unpack_attention(arrays: dict[str, Array], path: Path) -> dict[str, Any]:
    """The arguments of an Attention from arrays of `pack_attention`, or of any other file."""
    if "weights" not in arrays:
        if len(arrays) != 1:
            raise FileError(
                f"{path} must hold one array, or one named 'weights'; it holds"
                f" {', '.join(arrays) or 'none'}"
            )
        return {"weights": next(iter(arrays.values()))}
    written = int(arrays.get("format", np.array(STORAGE_FORMAT)))
    if written > STORAGE_FORMAT:
        raise FileError(
            f"{path} was written by a newer attnflow (format {written}); update attnflow to read it"
        )
    if "sink" in arrays:  # its name in files of attnflow 0.2 and before
        arrays = {"no_token_share": arrays["sink"], **arrays}
    known = {name: read(arrays[name]) for name, read in FIELD_READERS.items() if name in arrays}
    return {**known, "tokens": read_tokens(arrays)}


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz, or the one of an .npy; never unpickles."""
    try:
        with open_file(path) as file:
            loaded = np.load(file, allow_pickle=False)
            return (
                {"weights": loaded}
                if isinstance(loaded, np.ndarray)
                else {name: loaded[name] for name in loaded.files}
            )
    except IsADirectoryError as error:
        raise FileError(
            f"{path} is a folder; give an .npz or .npy file of attention weights"
        ) from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise FileError(f"{path} is too large for this machine's memory: {error}") from error
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds on damaged files
        if "pickle" in str(error).lower():
            raise FileError(
                f"{path} holds pickled objects or no array at all; attnflow reads plain .npz and"
                " .npy arrays"
            ) from error
        raise FileError(f"{path} is damaged, cut off, or no array file: {error}") from error


def read_tokens(arrays: dict[str, Array]) -> list[str] | None:
    """The tokens of a saved file, or of a plain array of strings named 'tokens'."""
    if "token_bytes" in arrays:
        data, lengths = arrays["token_bytes"].tobytes(), arrays["token_lengths"].tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != len(data):
            raise ValueError("the lengths of its tokens do not match their bytes")
        ends = np.cumsum(lengths)
        return [
            data[end - length : end].decode("utf-8", "surrogatepass")
            for length, end in zip(lengths, ends, strict=True)
        ]
    if "tokens" not in arrays:
        return None
    if arrays["tokens"].ndim != 1:
        raise ValueError("its tokens are not a list")
    return [str(token) for token in arrays["tokens"]]
