"""Models converted from GGUF files once, and kept in the user's cache as safetensors.

Unpacking the weights of a GGUF file takes many times as long as reading them from safetensors.
"""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attnflow.models.files import ModelFiles
from attnflow.models.model import Model
from attnflow.notices import give_notice

if TYPE_CHECKING:
    import transformers

PLACE = "ATTNFLOW_CACHE"  # the variable that names another folder; empty: nothing is kept
SMALL_FILES = (".json", ".jinja", ".model")  # of a tokenizer, read beside a GGUF file
DIGITS = 32  # of a fingerprint
OWN_NAME = re.compile(rf"[0-9a-f]{{{DIGITS}}}(\.|$)")  # of a folder that is kept or was left


def find_cache() -> Path | None:
    """The folder of converted models, which need not exist; None if nothing is to be kept."""
    own = os.environ.get(PLACE)
    if own is not None:
        return Path(own).expanduser() if own else None
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attnflow" / "gguf"


def locate_copy(files: ModelFiles, gguf: str) -> Path | None:
    """Where the converted model of a GGUF file is, or would be; None if nothing is to be kept."""
    import transformers

    with suppress(OSError, RuntimeError):  # a file that cannot be read, a user without a home
        cache = find_cache()
        if cache is None:
            return None
        digest = hashlib.sha256(transformers.__version__.encode())
        for name in sorted(files.names):
            if name == gguf or name.endswith(SMALL_FILES):
                with Path(files.name, name).open("rb") as file:
                    digest.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
        return cache / digest.hexdigest()[:DIGITS]
    return None


def keep_converted(model: Model, place: Path) -> None:
    """Write a model beside its place and rename it; without an error where that cannot be done."""
    from safetensors.torch import save_model

    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        settings = model.config.to_dict()
        settings.pop("quantization_config", None)
        config = type(model.config).from_dict(settings)
        config.architectures = [type(model.model).__name__]
        config.save_pretrained(part)
        save_model(model.model, str(part / "model.safetensors"), metadata={"format": "pt"})
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(part)
        part.rename(place)
    except Exception:  # a full disk, a folder of someone else, a model that cannot be written
        shutil.rmtree(part, ignore_errors=True)
        return
    give_notice(
        f"the GGUF file of {model.origin} was converted once, to {measure_folder(place) / 1e6:,.0f}"
        f" MB in {place}, and loads from there from now on; attnflow cache --clear removes it",
        UserWarning,
    )


def restore_settings(config: "transformers.PreTrainedConfig", name: str) -> None:
    """Settings of a converted model as those of its GGUF file: results are of the same model."""
    config.architectures = None
    config._name_or_path = name


def list_converted() -> Iterator[tuple[Path, int]]:
    """The folder and the size in bytes of each converted model, and of what was left unfinished."""
    cache = find_cache()
    if cache is not None and cache.is_dir():
        for place in sorted(cache.iterdir()):
            if place.is_dir() and OWN_NAME.match(place.name):
                yield place, measure_folder(place)


def clear_converted() -> int:
    """Remove all converted models; the bytes that this sets free."""
    found = list(list_converted())
    for place, _ in found:
        shutil.rmtree(place)
    return sum(size for _, size in found)


def measure_folder(place: Path) -> int:
    """The size of the files in a folder, in bytes."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
