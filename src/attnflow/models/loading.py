"""`load`: a model by its name, from the hub, a folder, or the one that ships with attnflow.

What is loaded is data, whatever it says: no code of a folder runs, nothing asks on standard input,
no weight is made up, and everything that is wrong with it is one line.
"""

import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnflow.errors import AttnFlowError, FileError, OptionError
from attnflow.models.execution import require_torch
from attnflow.models.families import ABOVE_LAYERS
from attnflow.models.model import Model

# the name of the model that ships with attnflow, and the model_type in its config.json
BUNDLED = "verb-number"
PATIENCE = 5.0  # seconds that the hub has to say whether it knows a model
# more layers, heads and labels than any model has, and few enough to list
MOST = {"labels": 1_000_000} | dict.fromkeys(
    ("layer", "layers", "head", "heads", "experts", "blocks", "stages", "groups"), 10_000
)
SPARE = 2**28  # numbers that a model may hold beyond those in its files, such as causal masks
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# files that hold a vocabulary, by how their names begin or end
VOCABULARY = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken", "encoder.json")
VOCABULARY_ENDINGS = (".spm", ".tiktoken", ".model", ".codes", ".bpe")
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def load(name: str | os.PathLike[str] = BUNDLED) -> Model:
    """A model from a hub id, a folder, or a folder with a GGUF file; safetensors or GGUF only.

    A model's own code never runs, and a weight that is missing is an error. "verb-number" is the
    model that ships with attnflow: is the verb that follows these words singular or plural?

    Parameters
    ----------
    name
        A folder, or a hub id such as "org/name". It is a folder, and never asked for on the hub,
        if it is a path object, exists, is no valid hub id, is absolute, begins with "." or "~",
        contains a backslash, ends in a slash, or begins with the name of a folder that is here.

    >>> load("verb-number").predict(["the key to the cabinets", "the keys to the cabinet"])[0][0]
    'singular'

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    >>> BertModel(BertConfig(hidden_size=8, **sizes)).save_pretrained("tiny")
    >>> load("tiny")
    <Model: BertModel, encoder>
    """
    require_torch()
    if isinstance(name, str) and name == BUNDLED:
        from attnflow.models import verb_number

        return Model(*verb_number.load(str(files("attnflow.models") / "weights")))
    with wrap_errors(name):
        source = find_source(name)
        if source.is_folder and model_type(Path(source.name)) == BUNDLED:
            from attnflow.models import verb_number

            return Model(*verb_number.load(source.name))
        with hold_back_logs():
            return load_source(source)


@dataclass(frozen=True)
class Source:
    """Where the files of a model are: in a folder, or in a repository of the hub."""

    name: str  # as transformers takes it
    files: frozenset[str]
    is_folder: bool
    is_offline: bool = False  # take what the cache holds, and ask nobody

    @property
    def options(self) -> dict[str, Any]:
        """What every `from_pretrained` is given."""
        return {"trust_remote_code": False, "local_files_only": self.is_offline or self.is_folder}

    def read_json(self, file: str) -> dict[str, Any]:
        """The object in one of the files, empty if there is no such file."""
        from transformers.utils import cached_file

        if file not in self.files:
            return {}
        with wrap_errors(f"{file} of {self.name}"):
            path = Path(self.name, file)
            if not self.is_folder:
                path = Path(cached_file(self.name, file, local_files_only=self.is_offline))
            found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise FileError(f"{file} of {self.name} must be an object; got {found!r:.60}")
        return found


# ---- folders and the hub ------------------------------------------------------------------------


def find_source(name: str | os.PathLike[str]) -> Source:
    """The folder or repository that a name means; an error at once if it is a missing folder."""
    if not isinstance(name, str | os.PathLike):
        raise OptionError(f"a model must be a folder or a hub id; got {type(name).__name__}")
    place = Path(os.fsdecode(name)).expanduser()
    if os.fspath(name) and place.is_dir():
        return Source(str(place), frozenset(path.name for path in place.iterdir()), True)
    if place.exists() and os.fspath(name):
        raise FileError(f"{place} is a file; give the folder that it is in: {place.parent}")
    if isinstance(name, str) and may_be_hub_id(name):
        return ask_hub(name)
    given = os.fsdecode(name) or "''"
    raise FileError(f"cannot load {given}: no such folder; give one, or a hub id such as org/name")


def may_be_hub_id(name: str) -> bool:
    """Whether a name that is no folder here may be a model of the hub."""
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


def ask_hub(name: str) -> Source:
    """A repository of the hub; its copy in the cache if the hub cannot be asked."""
    import huggingface_hub

    try:
        # asked once before transformers does, which tries for half a minute to reach a hub
        found = huggingface_hub.model_info(name, timeout=PATIENCE)
        return Source(name, frozenset(each.rfilename for each in found.siblings or ()), False)
    except Exception as error:
        config = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if isinstance(config, str):
            cached = frozenset(path.name for path in Path(config).parent.iterdir())
            return Source(name, cached, False, is_offline=True)
        raise FileError(
            f"cannot load {name}: there is no such folder here, the cache has no such model, and "
            f"the hub gave none: {reason_of(error)}"
        ) from error


def model_type(place: Path) -> str | None:
    """What the config.json of a folder says the model is, if there is one that can be read."""
    try:
        found = json.loads((place / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def find_gguf(source: Source) -> str | None:
    """The GGUF file to load from a folder without safetensors; an error if it has no weights."""
    endings = {file: Path(file).suffix for file in sorted(source.files)}
    if not source.is_folder or ".safetensors" in endings.values():
        return None
    found = [file for file, ending in endings.items() if ending == ".gguf"]
    if found:
        return found[0]
    pickles = [file for file, ending in endings.items() if ending in PICKLES]
    if pickles:
        raise FileError(
            f"{source.name} holds weights as pickles ({pickles[0]}), which can run code; "
            "save them as safetensors, with save_pretrained"
        )
    raise FileError(
        f"{source.name} holds no weights: a model.safetensors or a .gguf file is needed"
    )


# ---- the model ----------------------------------------------------------------------------------


def load_source(source: Source) -> Model:
    """The model of a folder or repository, with its tokenizer or image processor."""
    import transformers

    gguf = find_gguf(source)
    options = source.options | ({} if gguf is None else {"gguf_file": gguf})
    if gguf is None:
        if "config.json" not in source.files:
            raise FileError(f"cannot load {source.name}: it has no config.json")
        settings = source.read_json("config.json")
        file = f"config.json of {source.name}"
        check_settings(file, settings)
        kind, weights = model_class(file, settings), {"use_safetensors": True}
    else:
        settings, kind, weights = {}, transformers.AutoModelForCausalLM, {}
    with limit_size(source.name, *stored_size(source, gguf, settings)):
        model, report = kind.from_pretrained(
            source.name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below by their names
            **options,
            **weights,
        )
    check_data(source, model)
    check_weights(source, Model(model), report)
    return Model(model, load_processor(source, model.config, settings, options))


def check_settings(file: str, settings: dict[str, Any]) -> None:
    """Refuse a config.json that needs code of its own, or lists of more parts than a model has."""
    import transformers

    own = settings.get("auto_map") or {}
    kind = settings.get("model_type")
    if "AutoConfig" in own and kind not in transformers.CONFIG_MAPPING:
        raise FileError(
            f"{file}: the type {kind!r} needs the model's own code ({own['AutoConfig']}), "
            "which never runs; use a model that transformers itself knows"
        )
    waiting = [(name, value, True) for name, value in settings.items()]
    while waiting:
        name, value, on_top = waiting.pop()
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else ((name, each) for each in value)
            waiting += [(str(key), each, False) for key, each in pairs]
        # transformers builds the parts of a model by their own auto_map, and asks for permission
        if name == "auto_map" and not on_top and value:
            raise FileError(f"{file}: a part of the model has an auto_map, code of its own")
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise FileError(f"{file}: {name} names code on the hub: {value!r}; leave it out")
        most = MOST.get(name.rpartition("_")[2])
        if most is not None and isinstance(value, int | float) and value > most:
            raise FileError(f"{file}: {name} must be at most {most}; got {value!r:.60}")


def model_class(file: str, settings: dict[str, Any]) -> Any:
    """The class of transformers that config.json names; the one of its type if it names none.

    An Auto class would look for the folder's own code, and other names are no models.
    """
    import transformers

    names = settings.get("architectures")
    if names is None or names == []:
        return transformers.AutoModel
    name = names[0] if isinstance(names, list) else names
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if (
        not isinstance(found, type)
        or not issubclass(found, transformers.PreTrainedModel)
        or found.__name__.endswith("PreTrainedModel")
    ):
        raise FileError(
            f"{file}: architectures names {name!r}, which is no model class of transformers "
            f"{transformers.__version__}; a model's own code never runs"
        )
    return found


def stored_size(
    source: Source, gguf: str | None, settings: dict[str, Any]
) -> tuple[int, int] | tuple[None, None]:
    """How many tensors and numbers a folder's weights can give; unknown before a download."""
    from safetensors import safe_open

    if not source.is_folder:
        return None, None
    if gguf is not None:  # the number of tensors stands behind the version; a weight has a bit
        path = Path(source.name, gguf)
        with path.open("rb") as file:
            return int.from_bytes(file.read(16)[8:], "little"), 8 * path.stat().st_size
    tensors = numbers = 0
    packed = 32 if settings.get("quantization_config") else 1  # weights in a number, at most
    chosen = {"model.safetensors"} & source.files
    if not chosen or settings.get("transformers_weights"):  # shards, or a file by another name
        chosen = {file for file in source.files if file.endswith(".safetensors")}
    for each in sorted(chosen):
        with (
            wrap_errors(f"{each} of {source.name}"),
            safe_open(Path(source.name, each), framework="pt") as weights,
        ):
            names = weights.keys()
            shapes = [weights.get_slice(name).get_shape() for name in names]
        tensors += len(shapes)
        numbers += sum(packed * math.prod(shape) for shape in shapes)
    return tensors, numbers


@contextmanager
def limit_size(name: str, tensors: int | None, numbers: int | None) -> Iterator[None]:
    """A block in which a model that is far larger than its weights is refused while it is built.

    transformers builds a model without memory, then allocates what the files do not give: a wrong
    size in config.json would fill the machine before it is found. Only this thread is concerned.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    if tensors is None or numbers is None:
        yield
        return
    factories = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
    most_tensors, most_numbers = 20 * tensors + 20_000, 4 * numbers + SPARE

    class Limit(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
        made = size = 0

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if function in factories and result.is_meta:
                self.made, self.size = self.made + 1, self.size + result.numel()
                if self.made > most_tensors or self.size > most_numbers:
                    raise FileError(
                        f"cannot load {name}: its sizes make a model far larger than its weights "
                        f"({tensors} tensors, at most {numbers} numbers); correct config.json"
                    )
            return result

    with Limit():
        yield


def check_weights(source: Source, loaded: Model, report: dict[str, Any]) -> None:
    """Refuse a model of which any weight did not come from its files.

    A pooler above the last layer of a model that predicts nothing is passed by no attention.
    """
    missing = set(report["missing_keys"])
    if loaded.task == "encoder":
        missing = {name for name in missing if not {*ABOVE_LAYERS} & {*name.split(".")}}
    shapes = {
        name: f"{name} (stored as {list(stored)}, should be {list(expected)})"
        for name, stored, expected in report["mismatched_keys"]
    }
    wrong = sorted(missing - set(shapes)) + [shapes[name] for name in sorted(shapes)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        what = "of another size" if not missing - set(shapes) else "missing or of another size"
        raise FileError(
            f"cannot load {source.name}: {len(wrong)} weights of {loaded.name} are {what} in its "
            f"files, and would be random: {', '.join(wrong[:3])}{more}"
        )
    if report.get("error_msgs"):
        raise FileError(f"cannot load {source.name}: {report['error_msgs'][0]}")


def check_data(source: Source, model: Any) -> None:
    """Refuse a model of which a parameter or buffer is on the meta device, without data."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None:
        raise FileError(f"cannot load {source.name}: {empty} is on the meta device, without data")


# ---- tokenizers and image processors ------------------------------------------------------------


def load_processor(
    source: Source, config: Any, settings: dict[str, Any], options: dict[str, Any]
) -> Any:
    """The tokenizer or image processor that belongs to a model; None if it has no file of one."""
    import transformers
    from transformers.image_processing_utils import ImageProcessingMixin

    if hasattr(config, "patch_size") and not hasattr(config, "vocab_size"):
        found = [file for file in IMAGE_PROCESSOR if file in source.files]
        for file in found:
            check_image_processor(f"{file} of {source.name}", source.read_json(file))
        named = settings.get("image_processor_type")
        check_class(f"config.json of {source.name}", named, ImageProcessingMixin, None)
        if not found:
            return None
        with wrap_errors(f"the image processor of {source.name}"):
            return transformers.AutoImageProcessor.from_pretrained(source.name, **options)
    if not has_tokenizer(source, options.get("gguf_file")):
        return None  # then it takes token ids, and says so when it is given a text
    own = source.read_json("tokenizer_config.json")
    base = transformers.PreTrainedTokenizerBase
    code = own.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else code
    check_class(f"tokenizer_config.json of {source.name}", own.get("tokenizer_class"), base, code)
    check_class(f"config.json of {source.name}", settings.get("tokenizer_class"), base, None)
    with wrap_errors(f"the tokenizer of {source.name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.name, **options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise FileError(f"cannot load the tokenizer of {source.name}: it has no vocabulary")
        return tokenizer


def has_tokenizer(source: Source, gguf: str | None) -> bool:
    """Whether any file holds a part of a tokenizer."""
    if gguf is not None:
        with Path(source.name, gguf).open("rb") as file:
            return b"tokenizer.ggml.tokens" in file.read(2**24)  # names come before the weights
    return any(
        file.startswith(VOCABULARY) or file.endswith(VOCABULARY_ENDINGS) for file in source.files
    )


def check_image_processor(file: str, settings: dict[str, Any]) -> None:
    """Refuse an image processor that is no class of transformers."""
    from transformers.image_processing_utils import ImageProcessingMixin

    nested = settings.get("image_processor")
    for each in (settings, nested if isinstance(nested, dict) else {}):
        code = each.get("auto_map")
        code = code.get("AutoImageProcessor") if isinstance(code, dict) else code
        name = each.get("image_processor_type")
        if name is None and isinstance(each.get("feature_extractor_type"), str):
            name = each["feature_extractor_type"].replace("FeatureExtractor", "ImageProcessor")
        check_class(file, name, ImageProcessingMixin, code)


def check_class(file: str, name: Any, base: type, code: Any) -> None:
    """Refuse the name of a class of transformers that is not of this kind, and a class's own code.

    transformers takes whatever it finds under the name, also an Auto class, which would then ask
    on standard input whether to run the folder's code. A name that it does not know is harmless:
    the vocabulary is then read as it is.
    """
    import transformers

    if name is not None and not isinstance(name, str):
        raise FileError(f"{file}: the name of a class must be a text; got {name!r:.60}")
    known = False
    stem = name or ""
    while stem:  # with every ending that transformers takes off
        # without torchvision, transformers takes the class for PIL, and warns of the other
        found = getattr(transformers, f"{stem}Pil", None) or getattr(transformers, stem, None)
        known = known or found is not None
        is_kind = isinstance(found, type) and issubclass(found, base)
        if found is not None and not is_kind and not hasattr(found, "_backends"):
            raise FileError(f"{file} names {name!r}, which is no {base.__name__} of transformers")
        if not stem.endswith("Fast"):
            break
        stem = stem.removesuffix("Fast")
    if code and not known:
        raise FileError(f"{file} needs the model's own code ({code}), which never runs")


# ---- errors -------------------------------------------------------------------------------------


@contextmanager
def wrap_errors(name: object) -> Iterator[None]:
    """A block in which whatever a library raises over bad files becomes a FileError."""
    try:
        yield
    except AttnFlowError:
        raise
    except BaseException as error:
        # a panic of Rust code (tokenizers, safetensors) is no Exception, yet bad files cause it
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FileError(f"cannot load {name}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, with its type where it says little without."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    if not lines:
        return kind
    speaks = isinstance(error, OSError | ValueError | ImportError | RuntimeError)
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if speaks and not isinstance(error, RecursionError) else f"{kind}: {text}"


@contextmanager
def hold_back_logs() -> Iterator[None]:
    """A block in which this thread's logs of transformers wait, and are dropped if it fails."""
    held: list[tuple[logging.Handler, logging.LogRecord]] = []
    thread = threading.get_ident()
    filters = []
    for handler in logging.getLogger("transformers").handlers:

        def hold(record: logging.LogRecord, handler: logging.Handler = handler) -> bool:
            if record.thread == thread:
                held.append((handler, record))
            return record.thread != thread

        handler.addFilter(hold)
        filters.append((handler, hold))
    try:
        yield
    finally:
        for handler, hold in filters:
            handler.removeFilter(hold)
    for handler, record in held:
        handler.handle(record)
