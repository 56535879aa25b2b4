"""`load`: a model by its name, from the hub, from a folder, or the one that ships with attnflow.

Whatever is wrong with its files is reported in one line; see file_checks.py.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, TypeAlias

from attnflow.errors import FileError
from attnflow.models.converted import keep_converted, locate_copy, restore_settings
from attnflow.models.execution import require_torch
from attnflow.models.file_checks import (
    check_class,
    check_config,
    check_weights,
    find_class,
    limit_size,
)
from attnflow.models.files import ModelFiles, find_files, find_gguf, has_tokenizer, wrap_errors
from attnflow.models.model import Model
from attnflow.models.planted.planted import PREFIX, planted

if TYPE_CHECKING:
    import torch
    import transformers

# a `Model`, a name or folder as `load` takes it, or a Hugging Face model
ModelLike: TypeAlias = "Model | str | os.PathLike[str] | torch.nn.Module"
# the name of the model that ships with attnflow, and the model_type in its config.json
BUNDLED = "verb-number"
# the folders of all models that ship
SHIPPED = {BUNDLED: "weights", f"{BUNDLED}-plain": "weights_plain"}
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def load(name: str | os.PathLike[str] = BUNDLED) -> Model:
    """Load a model from a hub id or a folder, with safetensors or a GGUF file.

    A model's own code never runs, and missing weights are an error. "verb-number" ships with
    attnflow: is the verb that follows these words singular or plural? "verb-number-plain" is the
    same model, trained as the paper describes it: see docs/reproduction.md. "planted:copy" and the
    like are models whose answers are known: see `planted`.

    A GGUF file is converted when it is first loaded, and read as safetensors from the user's cache
    afterwards; `attnflow cache` lists such models and removes them.

    Parameters
    ----------
    name
        A folder, or a hub id such as "org/name". It is a folder, and never looked up on the hub,
        if it is a path object, exists, is not a valid hub id, is absolute, begins with "." or "~",
        contains a backslash, ends in a slash, or begins with the name of an existing folder.

    >>> load("verb-number").predict(["the key to the cabinets", "the keys to the cabinet"])[0][0]
    'singular'

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    >>> BertModel(BertConfig(hidden_size=8, **sizes)).save_pretrained("tiny")
    >>> load("tiny")
    <Model: BertModel, encoder>
    """
    require_torch()
    if isinstance(name, str) and name in SHIPPED:
        return load_bundled(str(resources.files("attnflow.models.bundled") / SHIPPED[name]), name)
    if isinstance(name, str) and name.startswith(PREFIX):
        return planted(name.removeprefix(PREFIX)).model
    with wrap_errors(name):
        files = find_files(name)
        if files.is_folder and files.read_json("config.json").get("model_type") == BUNDLED:
            return load_bundled(files.name, files.origin)
        with hold_back_logs():
            return load_files(files)


def open_model(model: ModelLike) -> Model:
    """A `Model` as it is, loaded from a name or folder, or made from a Hugging Face model."""
    if isinstance(model, str | os.PathLike):
        return load(model)
    return model if isinstance(model, Model) else Model(model)


def load_bundled(folder: str, origin: str) -> Model:
    """A verb-number model: one that ships with attnflow, or one trained with it."""
    from attnflow.models.bundled.verb_number import load_verb_number  # it imports torch

    return Model(*load_verb_number(folder), origin=origin)


def load_files(files: ModelFiles) -> Model:
    """The model of a folder or repository, with its tokenizer or image processor.

    A GGUF file is converted when it is first loaded, and read from the user's cache afterwards.
    """
    gguf = find_gguf(files)
    place = None if gguf is None else locate_copy(files, gguf)
    if place is not None and place.is_dir():
        with suppress(Exception):  # damaged: it is made again
            names = frozenset(path.name for path in place.iterdir())
            model = load_stored(replace(files, name=str(place), names=names), None, files.origin)
            restore_settings(model.config, files.name)
            return model
        shutil.rmtree(place, ignore_errors=True)
    model = load_stored(files, gguf, files.origin)
    if place is not None:
        keep_converted(model, place)
    return model


def load_stored(files: ModelFiles, gguf: str | None, origin: str) -> Model:
    """The model as it is stored: as safetensors, or in a GGUF file."""
    import transformers

    if gguf is None:
        if "config.json" not in files.names:
            raise FileError(f"cannot load {files.name}: it has no config.json")
        settings, file = files.read_json("config.json"), f"config.json of {files.name}"
        check_config(file, settings)
        kind = find_class(file, settings.get("architectures"))
        options = files.options | {"use_safetensors": True}
    else:
        settings, kind = {}, transformers.AutoModelForCausalLM
        options = files.options | {"gguf_file": gguf}
    with limit_size(files, packed=gguf is not None or "quantization_config" in settings):
        model, report = kind.from_pretrained(
            files.name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below by their names
            **options,
        )
    loaded = Model(model, origin=origin)
    check_weights(files.name, loaded, report)
    if hasattr(model.config, "patch_size") and not hasattr(model.config, "vocab_size"):
        processor = load_image_processor(files, settings)
    else:
        processor = load_tokenizer(files, settings, gguf)
    return Model(model, processor, origin=origin)


def load_image_processor(
    files: ModelFiles, settings: Mapping[str, object]
) -> "transformers.BaseImageProcessor | None":
    """The image processor of a model; None if it has no file of one.

    settings: of the model's config.json.
    """
    import transformers
    from transformers.image_processing_utils import ImageProcessingMixin

    base = ImageProcessingMixin
    check_class(f"config.json of {files.name}", settings.get("image_processor_type"), base)
    present = [file for file in IMAGE_PROCESSOR if file in files.names]
    for file in present:
        whole = files.read_json(file)
        nested = whole.get("image_processor")
        for part in (whole, nested if isinstance(nested, dict) else {}):
            older = str(part.get("feature_extractor_type", ""))  # read as transformers reads it
            older = older.replace("FeatureExtractor", "ImageProcessor")
            name = part.get("image_processor_type") or older
            code = find_code(part, "AutoImageProcessor")
            check_class(f"{file} of {files.name}", name, base, code)
    if not present:
        return None
    with wrap_errors(f"the image processor of {files.name}"):
        return transformers.AutoImageProcessor.from_pretrained(files.name, **files.options)


def load_tokenizer(
    files: ModelFiles, settings: Mapping[str, object], gguf: str | None
) -> "transformers.PreTrainedTokenizerBase | None":
    """The tokenizer of a model; None if it has no vocabulary, and takes token ids alone.

    settings: of the model's config.json.
    """
    import transformers

    if not has_tokenizer(files, gguf):
        return None
    own, base = files.read_json("tokenizer_config.json"), transformers.PreTrainedTokenizerBase
    code = find_code(own, "AutoTokenizer")
    check_class(f"tokenizer_config.json of {files.name}", own.get("tokenizer_class"), base, code)
    check_class(f"config.json of {files.name}", settings.get("tokenizer_class"), base)
    options = files.options | ({} if gguf is None else {"gguf_file": gguf})
    with wrap_errors(f"the tokenizer of {files.name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(files.name, **options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise FileError(f"cannot load the tokenizer of {files.name}: it has no vocabulary")
        return tokenizer


def find_code(settings: Mapping[str, object], auto_class: str) -> object:
    """The code that settings name for an Auto class; None if they name none."""
    code = settings.get("auto_map")
    return code.get(auto_class) if isinstance(code, dict) else code


@contextmanager
def hold_back_logs() -> Iterator[None]:
    """A block that holds back this thread's logs of transformers, and drops them if it fails."""
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
