"""Where the files of a model are: in a folder, or in a repository of the hub."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attnflow.errors import AttnFlowError, FileError, OptionError

HUB_PATIENCE = 5.0  # seconds to wait for the hub
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# files that hold a vocabulary, by how their names begin or end
VOCABULARY = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken", "encoder.json")
VOCABULARY_ENDINGS = (".spm", ".tiktoken", ".model", ".codes", ".bpe")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, in a folder or in a repository of the hub."""

    name: str  # as transformers takes it
    names: frozenset[str]  # of the files
    is_folder: bool
    is_offline: bool = False  # take what the cache holds

    @property
    def origin(self) -> str:
        """The name of the model in results: a hub id, or the folder's name without its path."""
        return Path(os.path.abspath(self.name)).name if self.is_folder else self.name

    @property
    def options(self) -> dict[str, object]:
        """The options of every `from_pretrained`."""
        return {"trust_remote_code": False, "local_files_only": self.is_offline or self.is_folder}

    def read_json(self, file: str) -> dict[str, object]:
        """The object in one of the files, empty if there is no such file."""
        from transformers.utils import cached_file

        if file not in self.names:
            return {}
        with wrap_errors(f"{file} of {self.name}"):
            path = cached_file(self.name, file, local_files_only=self.is_offline)
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise FileError(f"{file} of {self.name} must be an object; got {content!r:.60}")
        return content


def find_files(name: str | os.PathLike[str]) -> ModelFiles:
    """The folder or repository of a name; a missing folder is an error without asking the hub."""
    if not isinstance(name, str | os.PathLike):
        raise OptionError(f"a model must be a folder or a hub id; got {type(name).__name__}")
    place = Path(os.fsdecode(name)).expanduser()
    if os.fspath(name) and place.is_dir():
        return ModelFiles(str(place), frozenset(path.name for path in place.iterdir()), True)
    if place.exists() and os.fspath(name):
        raise FileError(f"{place} is a file; give the folder that it is in: {place.parent}")
    if isinstance(name, str) and may_be_hub_id(name):
        return ask_hub(name)
    given = os.fsdecode(name) or "''"
    raise FileError(f"cannot load {given}: no such folder; give one, or a hub id such as org/name")


def may_be_hub_id(name: str) -> bool:
    """Whether a name that is not a folder here may be a model of the hub."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # lazy

    if name.startswith((".", "~", "/")) or name.endswith("/") or "\\" in name:
        return False
    owner, _, rest = name.partition("/")
    if rest and Path(owner).is_dir():  # a mistyped folder: "runs/modle"
        return False
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def ask_hub(name: str) -> ModelFiles:
    """A repository of the hub; its copy in the cache if the hub does not answer."""
    import huggingface_hub

    try:
        # transformers would try for half a minute to reach the hub
        siblings = huggingface_hub.model_info(name, timeout=HUB_PATIENCE).siblings or ()
        return ModelFiles(name, frozenset(file.rfilename for file in siblings), False)
    except Exception as error:
        config = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if isinstance(config, str):
            cached = frozenset(path.name for path in Path(config).parent.iterdir())
            return ModelFiles(name, cached, False, is_offline=True)
        raise FileError(
            f"cannot load {name}: there is no such folder here, the cache has no such model, and "
            f"the hub gave none: {describe_error(error)}"
        ) from error


def find_gguf(files: ModelFiles) -> str | None:
    """The GGUF file to load from a folder without safetensors; an error if it has no weights."""
    endings = {file: Path(file).suffix for file in sorted(files.names)}
    if not files.is_folder or ".safetensors" in endings.values():
        return None
    gguf = next((file for file, ending in endings.items() if ending == ".gguf"), None)
    if gguf is not None:
        return gguf
    pickles = [file for file, ending in endings.items() if ending in PICKLES]
    if pickles:
        raise FileError(
            f"{files.name} holds weights as pickles ({pickles[0]}), which can run code; "
            "save them as safetensors, with save_pretrained"
        )
    raise FileError(f"{files.name} holds no weights: a model.safetensors or a .gguf file is needed")


def has_tokenizer(files: ModelFiles, gguf: str | None) -> bool:
    """Whether any file holds a part of a tokenizer."""
    if gguf is not None:
        with Path(files.name, gguf).open("rb") as file:
            return b"tokenizer.ggml.tokens" in file.read(2**24)  # names come before the weights
    return any(
        file.startswith(VOCABULARY) or file.endswith(VOCABULARY_ENDINGS) for file in files.names
    )


# ---- errors -------------------------------------------------------------------------------------


@contextmanager
def wrap_errors(name: object) -> Iterator[None]:
    """A block in which exceptions of libraries over bad files become a FileError."""
    try:
        yield
    except AttnFlowError:
        raise
    except BaseException as error:
        # a panic of Rust code (tokenizers, safetensors) is not an Exception, but bad files cause it
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FileError(f"cannot load {name}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """The first line of an error's message, with its type if the message says little alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    if not lines:
        return kind
    speaks = isinstance(error, OSError | ValueError | ImportError | RuntimeError)
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if speaks and not isinstance(error, RecursionError) else f"{kind}: {text}"
