"""`load`: a model by its name, from the hub, a folder, or the one that ships with attnflow.

Everything that is wrong with it is one line: see checking.py.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from attnflow.errors import FileError
from attnflow.models.checking import (
    check_class,
    check_config,
    check_data,
    check_image_processor,
    check_weights,
    count_stored,
    find_class,
    limit_size,
)
from attnflow.models.execution import require_torch
from attnflow.models.model import Model
from attnflow.models.model_files import (
    ModelFiles,
    find_files,
    find_gguf,
    has_tokenizer,
    read_model_type,
    wrap_errors,
)
from attnflow.models.planting import PREFIX, planted

# the name of the model that ships with attnflow, and the model_type in its config.json
BUNDLED = "verb-number"
# the folders of all models that ship
SHIPPED = {BUNDLED: "weights", f"{BUNDLED}-plain": "weights_plain"}
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def load(name: str | os.PathLike[str] = BUNDLED) -> Model:
    """A model from a hub id, a folder, or a folder with a GGUF file; safetensors or GGUF only.

    A model's own code never runs, and a weight that is missing is an error. "verb-number" is the
    model that ships with attnflow: is the verb that follows these words singular or plural?
    "verb-number-plain" is the same trained as the paper describes it: see docs/reproduction.md.
    "planted:copy" and the like are the models whose answers are known: see `planted`.

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
    if isinstance(name, str) and name in SHIPPED:
        return load_bundled(str(resources.files("attnflow.models") / SHIPPED[name]), name)
    if isinstance(name, str) and name.startswith(PREFIX):
        return planted(name.removeprefix(PREFIX)).model
    with wrap_errors(name):
        files = find_files(name)
        if files.is_folder and read_model_type(Path(files.name)) == BUNDLED:
            return load_bundled(files.name, files.origin)
        with hold_back_logs():
            return load_files(files)


def load_bundled(folder: str, origin: str) -> Model:
    """A verb-number model, the one that ships with attnflow or one that a user trained."""
    from attnflow.models.verb_number import load_verb_number  # it imports torch

    return Model(*load_verb_number(folder), origin=origin)


def load_files(files: ModelFiles) -> Model:
    """The model of a folder or repository, with its tokenizer or image processor."""
    import transformers

    gguf = find_gguf(files)
    options = files.options | ({} if gguf is None else {"gguf_file": gguf})
    if gguf is None:
        if "config.json" not in files.names:
            raise FileError(f"cannot load {files.name}: it has no config.json")
        settings = files.read_json("config.json")
        file = f"config.json of {files.name}"
        check_config(file, settings)
        kind, weights = find_class(file, settings), {"use_safetensors": True}
    else:
        settings, kind, weights = {}, transformers.AutoModelForCausalLM, {}
    with limit_size(files.name, *count_stored(files, gguf, settings)):
        model, report = kind.from_pretrained(
            files.name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below by their names
            **options,
            **weights,
        )
    check_data(files, model)
    check_weights(files, Model(model), report)
    processor = load_processor(files, model.config, settings, options)
    return Model(model, processor, origin=files.origin)


def load_processor(
    files: ModelFiles, config: Any, settings: dict[str, Any], options: dict[str, Any]
) -> Any:
    """The tokenizer or image processor that belongs to a model; None if it has no file of one."""
    import transformers
    from transformers.image_processing_utils import ImageProcessingMixin

    if hasattr(config, "patch_size") and not hasattr(config, "vocab_size"):
        present = [file for file in IMAGE_PROCESSOR if file in files.names]
        for file in present:
            check_image_processor(f"{file} of {files.name}", files.read_json(file))
        named = settings.get("image_processor_type")
        check_class(f"config.json of {files.name}", named, ImageProcessingMixin, None)
        if not present:
            return None
        with wrap_errors(f"the image processor of {files.name}"):
            return transformers.AutoImageProcessor.from_pretrained(files.name, **options)
    if not has_tokenizer(files, options.get("gguf_file")):
        return None  # then it takes token ids, and says so when it is given a text
    own = files.read_json("tokenizer_config.json")
    base = transformers.PreTrainedTokenizerBase
    code = own.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else code
    check_class(f"tokenizer_config.json of {files.name}", own.get("tokenizer_class"), base, code)
    check_class(f"config.json of {files.name}", settings.get("tokenizer_class"), base, None)
    with wrap_errors(f"the tokenizer of {files.name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(files.name, **options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise FileError(f"cannot load the tokenizer of {files.name}: it has no vocabulary")
        return tokenizer


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
