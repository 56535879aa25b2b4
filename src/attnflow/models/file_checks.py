"""What is refused of a model's files: code, sizes far beyond the stored weights, missing weights.

`trust_remote_code=False` and safetensors see to the calls that attnflow makes. transformers makes
more calls while it builds a model, without that option, and would ask on standard input whether to
run the model's own code; and it fills in missing weights with random numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from attnflow.errors import FileError
from attnflow.models.families import ABOVE_LAYERS
from attnflow.models.files import ModelFiles
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch
    import transformers

# more than any model has, and few enough for the lists that configurations make of them
MOST_PARTS = 1_000_000
COUNTED = ("labels", "layer", "layers", "head", "heads", "experts", "blocks", "stages", "groups")
SPARE = 2**28  # numbers that a model may hold beyond those in its files, such as causal masks
LEAST = 2**13  # numbers that each tensor counts for at least, as it takes memory and time

# ---- names and numbers in settings --------------------------------------------------------------


def check_config(file: str, settings: Mapping[str, object]) -> None:
    """Refuse a config.json that needs code of its own, or counts more parts than any model has."""
    import transformers

    own, kind = settings.get("auto_map"), settings.get("model_type")
    if isinstance(own, dict) and "AutoConfig" in own and kind not in transformers.CONFIG_MAPPING:
        raise FileError(
            f"{file}: the type {kind!r} needs the model's own code ({own['AutoConfig']}), "
            "which never runs; use a model that transformers itself knows"
        )
    for name, value in list_settings([*settings.values()]):
        # transformers builds the parts of a model by their own auto_map, and asks for permission
        if name == "auto_map" and value:
            raise FileError(f"{file}: a part of the model has an auto_map, code of its own")
    for name, value in list_settings(settings):
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise FileError(f"{file}: {name} names code on the hub: {value!r}; leave it out")
        count = value if name.rpartition("_")[2] in COUNTED else None
        if isinstance(count, int | float) and count > MOST_PARTS:
            raise FileError(f"{file}: {name} must be at most {MOST_PARTS}; got {count!r:.60}")


def list_settings(settings: object) -> Iterator[tuple[str, object]]:
    """The names and values in settings, and in all objects and lists inside of them."""
    waiting = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def find_class(file: str, names: object) -> "type[transformers.PreTrainedModel]":
    """The model class that the `architectures` of config.json name; AutoModel if they name none."""
    import transformers

    if not names and not isinstance(names, str):
        return transformers.AutoModel  # type: ignore[no-any-return]  # torch is not followed
    name = names[0] if isinstance(names, list) else names
    kind: type[transformers.PreTrainedModel] | None = getattr(transformers, str(name), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if kind is None or not is_model or kind.__name__.endswith("PreTrainedModel"):
        raise FileError(
            f"{file}: architectures names {name!r}, which is not a model class of transformers "
            f"{transformers.__version__}; a model's own code never runs"
        )
    return kind


def check_class(file: str, name: object, base: type, code: object = None) -> None:
    """Refuse a class of transformers that is not of this kind, and a class of the model's own.

    transformers takes whatever it finds under the name, also an Auto class, which would then ask
    on standard input whether to run the model's code. A name that it does not know is harmless:
    the vocabulary is then read as it is. code: what the settings give as the code of the class.
    """
    import transformers

    stem = name if isinstance(name, str) else ""
    while stem.endswith("Fast") and not hasattr(transformers, stem):  # as transformers does
        stem = stem.removesuffix("Fast")
    # without torchvision, transformers takes the class for PIL, and warns of the other
    kind = getattr(transformers, f"{stem}Pil", None) or getattr(transformers, stem, None)
    is_missing = hasattr(kind, "_backends")  # it stands for a class whose library is missing
    if kind and not is_missing and not (isinstance(kind, type) and issubclass(kind, base)):
        raise FileError(f"{file} names {name!r}, which is not a {base.__name__} of transformers")
    if code and not kind:
        raise FileError(f"{file} needs the model's own code ({code}), which never runs")


# ---- sizes and weights --------------------------------------------------------------------------


@contextmanager
def limit_size(files: ModelFiles, *, packed: bool) -> Iterator[None]:
    """A block in which a folder's model is refused if it outgrows its weights while it is built.

    transformers builds a model without memory, then allocates what the files lack: a wrong size in
    config.json would fill the machine before it is noticed. Only this thread is concerned. Before
    a download the size of the weights is not known, and there is no limit. packed: whether a byte
    may hold several weights.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    if not files.is_folder:
        yield
        return
    stored = [name for name in files.names if name.endswith((".safetensors", ".gguf"))]
    size = sum(Path(files.name, name).stat().st_size for name in stored)
    most = (8 if packed else 2) * size + SPARE
    factories = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}

    class Limit(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
        total = 0

        def __torch_function__(
            self,
            function: "Callable[..., torch.Tensor]",
            types: object,
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> "torch.Tensor":
            result = function(*args, **(kwargs or {}))
            if function in factories and result.is_meta:
                self.total += max(LEAST, result.numel())
                if self.total > most:
                    raise FileError(
                        f"cannot load {files.name}: its sizes make a model far larger than its"
                        f" weights ({size} bytes); correct config.json"
                    )
            return result

    with Limit():
        yield


class LoadingReport(TypedDict):
    """A part of the report of `from_pretrained` on the weights that it loaded."""

    missing_keys: set[str]
    mismatched_keys: "set[tuple[str, torch.Size, torch.Size]]"  # name, stored and expected size


def check_weights(name: str, loaded: Model, report: LoadingReport) -> None:
    """Refuse a model if any of its weights did not come from its files.

    Except a pooler above the last layer of a model that predicts nothing: attention does not pass
    through it.
    """
    missing = set(report["missing_keys"])
    if loaded.task == "encoder":
        missing = {key for key in missing if not {*ABOVE_LAYERS} & {*key.split(".")}}
    shapes = {
        key: f"{key} (stored as {list(stored)}, should be {list(expected)})"
        for key, stored, expected in report["mismatched_keys"]
    }
    missing -= set(shapes)
    wrong = sorted(missing) + [shapes[key] for key in sorted(shapes)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        what = "missing or of another size" if missing else "of another size"
        raise FileError(
            f"cannot load {name}: {len(wrong)} weights of {loaded.name} are {what} in its "
            f"files, and would be random: {', '.join(wrong[:3])}{more}"
        )
