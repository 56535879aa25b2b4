"""What is refused of a model's files: code, sizes that no weights have, weights made up.

What is loaded is data, whatever it says: no code of a folder runs and nothing asks on standard
input, and no weight is made up.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnflow.errors import FileError
from attnflow.models.families import ABOVE_LAYERS
from attnflow.models.model import Model
from attnflow.models.model_files import ModelFiles, wrap_errors

# more layers, heads and labels than any model has, and few enough to list
MOST = {"labels": 1_000_000} | dict.fromkeys(
    ("layer", "layers", "head", "heads", "experts", "blocks", "stages", "groups"), 10_000
)
SPARE = 2**28  # numbers that a model may hold beyond those in its files, such as causal masks

# ---- what the settings name ---------------------------------------------------------------------


def check_config(file: str, settings: dict[str, Any]) -> None:
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
            pairs = value.items() if isinstance(value, dict) else ((name, item) for item in value)
            waiting += [(str(key), item, False) for key, item in pairs]
        # transformers builds the parts of a model by their own auto_map, and asks for permission
        if name == "auto_map" and not on_top and value:
            raise FileError(f"{file}: a part of the model has an auto_map, code of its own")
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise FileError(f"{file}: {name} names code on the hub: {value!r}; leave it out")
        most = MOST.get(name.rpartition("_")[2])
        if most is not None and isinstance(value, int | float) and value > most:
            raise FileError(f"{file}: {name} must be at most {most}; got {value!r:.60}")


def find_class(file: str, settings: dict[str, Any]) -> Any:
    """The class of transformers that config.json names; the one of its type if it names none.

    An Auto class would look for the folder's own code, and other names are no models.
    """
    import transformers

    names = settings.get("architectures")
    if names is None or names == []:
        return transformers.AutoModel
    name = names[0] if isinstance(names, list) else names
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if (
        not isinstance(kind, type)
        or not issubclass(kind, transformers.PreTrainedModel)
        or kind.__name__.endswith("PreTrainedModel")
    ):
        raise FileError(
            f"{file}: architectures names {name!r}, which is no model class of transformers "
            f"{transformers.__version__}; a model's own code never runs"
        )
    return kind


def check_image_processor(file: str, settings: dict[str, Any]) -> None:
    """Refuse an image processor that is no class of transformers."""
    from transformers.image_processing_utils import ImageProcessingMixin

    nested = settings.get("image_processor")
    for part in (settings, nested if isinstance(nested, dict) else {}):
        code = part.get("auto_map")
        code = code.get("AutoImageProcessor") if isinstance(code, dict) else code
        name = part.get("image_processor_type")
        if name is None and isinstance(part.get("feature_extractor_type"), str):
            name = part["feature_extractor_type"].replace("FeatureExtractor", "ImageProcessor")
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
        kind = getattr(transformers, f"{stem}Pil", None) or getattr(transformers, stem, None)
        known = known or kind is not None
        fits = isinstance(kind, type) and issubclass(kind, base)
        if kind is not None and not fits and not hasattr(kind, "_backends"):
            raise FileError(f"{file} names {name!r}, which is no {base.__name__} of transformers")
        if not stem.endswith("Fast"):
            break
        stem = stem.removesuffix("Fast")
    if code and not known:
        raise FileError(f"{file} needs the model's own code ({code}), which never runs")


# ---- sizes and weights --------------------------------------------------------------------------


def count_stored(
    files: ModelFiles, gguf: str | None, settings: dict[str, Any]
) -> tuple[int, int] | tuple[None, None]:
    """How many tensors and numbers a folder's weights can give; unknown before a download."""
    from safetensors import safe_open

    if not files.is_folder:
        return None, None
    if gguf is not None:  # the number of tensors stands behind the version; a weight has a bit
        path = Path(files.name, gguf)
        with path.open("rb") as content:
            return int.from_bytes(content.read(16)[8:], "little"), 8 * path.stat().st_size
    tensors = numbers = 0
    packed = 32 if settings.get("quantization_config") else 1  # weights in a number, at most
    chosen = {"model.safetensors"} & files.names
    if not chosen or settings.get("transformers_weights"):  # shards, or a file by another name
        chosen = {file for file in files.names if file.endswith(".safetensors")}
    for file in sorted(chosen):
        with (
            wrap_errors(f"{file} of {files.name}"),
            safe_open(Path(files.name, file), framework="pt") as weights,
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


def check_weights(files: ModelFiles, loaded: Model, report: dict[str, Any]) -> None:
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
            f"cannot load {files.name}: {len(wrong)} weights of {loaded.name} are {what} in its "
            f"files, and would be random: {', '.join(wrong[:3])}{more}"
        )
    if report.get("error_msgs"):
        raise FileError(f"cannot load {files.name}: {report['error_msgs'][0]}")


def check_data(files: ModelFiles, model: Any) -> None:
    """Refuse a model of which a parameter or buffer is on the meta device, without data."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None:
        raise FileError(f"cannot load {files.name}: {empty} is on the meta device, without data")
