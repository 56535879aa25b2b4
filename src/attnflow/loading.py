"""`load`: a model by its name, with what it needs: from the hub, from a folder, or the one that ships with attnflow."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnflow.errors import CaptureError, FileError, OptionError
from attnflow.models import Model, require_torch

BUNDLED = "verb-number"  # the name of the model that ships with attnflow, and the model_type in its config.json


def load(name: str | os.PathLike[str] = BUNDLED) -> Model:
    """A model from a hub id, a folder, or a folder with a GGUF file; safetensors or GGUF only, and never a model's own code.

    "verb-number" is the model that ships with attnflow: is the verb that follows these words singular or plural?

    >>> load("verb-number").predict(["the key to the cabinets", "the keys to the cabinet"])[0][0]
    'singular'

    >>> from transformers import BertConfig, BertModel
    >>> BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)).save_pretrained("tiny")
    >>> load("tiny")
    <Model: BertModel, encoder>
    """
    require_torch()
    place = Path(name)
    if name == BUNDLED or model_type(place) == BUNDLED:
        from attnflow import verb_number

        return Model(
            *verb_number.load(str(files("attnflow") / "weights") if name == BUNDLED else place)
        )
    import transformers

    options: dict[str, Any] = {"trust_remote_code": False}
    if place.is_dir():
        options |= folder_options(place)
    gguf = {key: value for key, value in options.items() if key == "gguf_file"}
    weights = {} if gguf else {"use_safetensors": True}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        architecture = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        kind = getattr(transformers, architecture, transformers.AutoModel)
        model = (transformers.AutoModelForCausalLM if gguf else kind).from_pretrained(
            name, **gguf, **weights
        )
        return Model(model, processor_of(name, config, options))
    except (OSError, ValueError, KeyError, ImportError) as error:
        if isinstance(error, FileError | CaptureError | OptionError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileError(
            f"cannot load {name} (a folder of a model, or a hub id that is in the cache or can be downloaded): {reason}"
        ) from error


def model_type(place: Path) -> str | None:
    """What the config.json of a folder says the model is, if there is one that can be read."""
    try:
        found = json.loads((place / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def folder_options(place: Path) -> dict[str, str]:
    """What to load from a folder, or why it cannot be loaded."""
    if list(place.glob("*.safetensors")):
        return {}
    found = sorted(path.name for path in place.glob("*.gguf"))
    if found:
        return {"gguf_file": found[0]}
    pickles = sorted(
        path.name for path in place.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickles:
        raise FileError(
            f"{place} holds weights as pickles ({pickles[0]}), which can run code; save them with safe_serialization=True"
        )
    raise FileError(f"{place} holds no weights: a model.safetensors or a .gguf file is needed")


def processor_of(name: str | os.PathLike[str], config: Any, options: dict[str, Any]) -> Any:
    """The tokenizer or image processor that belongs to a model; None if there is none."""
    import transformers

    vision = hasattr(config, "patch_size") and not hasattr(config, "vocab_size")
    kind = transformers.AutoImageProcessor if vision else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError):
        return None  # then it takes token ids, and says so when it is given a text
