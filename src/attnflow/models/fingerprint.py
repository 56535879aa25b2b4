"""Fingerprints of a model: is it the same one, whatever its name, its folder and its device?"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch

SAMPLED = 64  # values of each tensor that a quick fingerprint looks at
QUICK = "quick-"  # begins a quick fingerprint, so that nobody compares it with a whole one
QUICK_DIGITS = 16  # of a quick fingerprint: 64 bits, so that no two of a million models share one
# what says where a model came from, and not what it is
PROVENANCE = ("_name_or_path", "transformers_version")
# what transformers writes down when a model is saved, and the tensors' names and types say anyway
SAVED = ("architectures", "dtype", "torch_dtype")
# digests that hold while what they are of is unchanged: (its state, the digest)
of_weights: "WeakKeyDictionary[Any, tuple[Any, str]]" = WeakKeyDictionary()  # by torch module
of_vocabularies: "WeakKeyDictionary[Any, tuple[int, str]]" = WeakKeyDictionary()  # by tokenizer


def model_fingerprint(model: Model) -> str:
    """SHA-256 over a model's configuration, vocabulary and all weights.

    Parameters
    ----------
    model
        The model; where it was loaded from does not count.
    """
    import torch

    digest = hashlib.sha256(read_settings(model.config))
    digest.update(read_vocabulary(model.tokenizer))
    for name, weight in sorted(model.model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def quick_fingerprint(model: Model) -> str:
    """A digest of a model's configuration, vocabulary and some values of every weight.

    "quick-" and 16 hex digits, while `model_fingerprint` gives 64 digits and nothing else. It takes
    milliseconds, and less where nothing changed since it was asked for last. Training
    changes it; a change of single values may go unseen, which `model_fingerprint` sees.

    Parameters
    ----------
    model
        The model; neither where it was loaded from nor its device counts.

    >>> from attnflow import load
    >>> quick_fingerprint(load("verb-number")) == quick_fingerprint(load("verb-number"))
    True
    """
    digest = hashlib.sha256(read_settings(model.config, (*PROVENANCE, *SAVED)))
    digest.update(digest_vocabulary(model.tokenizer).encode())
    digest.update(digest_weights(model.model).encode())
    return QUICK + digest.hexdigest()[:QUICK_DIGITS]


def read_settings(config: Any, without: Sequence[str] = PROVENANCE) -> bytes:
    """A configuration as JSON, without some settings."""
    if is_dataclass(config) and not isinstance(config, type):
        settings = asdict(config)
    else:
        settings = dict(config.to_dict() if hasattr(config, "to_dict") else vars(config))
    for name in without:
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True, default=str).encode()


def read_vocabulary(tokenizer: Any) -> bytes:
    """All that a tokenizer goes by, or its words and their ids; nothing if it does not say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words = getattr(tokenizer, "get_vocab", dict)
        return json.dumps(sorted(words().items())).encode("utf-8", "backslashreplace")
    if backend.truncation is not None or backend.padding is not None:
        # transformers keeps there how the tokenizer was called last
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    vocabulary: bytes = backend.to_str().encode("utf-8", "backslashreplace")
    return vocabulary


def digest_vocabulary(tokenizer: Any) -> str:
    """The size of a tokenizer's vocabulary and a digest of it, kept while the size is the same."""
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    known = None
    with suppress(TypeError):  # a user's own tokenizer, which nothing can refer to weakly
        known = of_vocabularies.get(tokenizer)
    if known is None or known[0] != size:
        known = (size, f"{size} {hashlib.sha256(read_vocabulary(tokenizer)).hexdigest()}")
        with suppress(TypeError):
            of_vocabularies[tokenizer] = known
    return known[1]


# ---- weights ------------------------------------------------------------------------------------


def digest_weights(module: Any) -> str:
    """A digest of a sample of every tensor, kept while no tensor was written to or replaced."""
    tensors = dict(list_tensors(module))
    state = None
    # tensors of inference mode count no versions, sparse ones lie nowhere: sampled every time
    with suppress(RuntimeError, NotImplementedError):
        # whoever writes to a tensor in place counts its version up; a new tensor lies elsewhere
        state = tuple((tensor._version, tensor.data_ptr()) for tensor in tensors.values())
    known = of_weights.get(module)
    if known is None or state is None or known[0] != state:
        digest = hashlib.sha256()
        for name in sorted(tensors):
            tensor = tensors[name]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(sample_values(tensor))
        known = of_weights[module] = (state, digest.hexdigest())
    return known[1]


def list_tensors(module: Any) -> "Iterator[tuple[str, torch.Tensor]]":
    """The parameters and buffers of a module that have data, by name.

    Without buffers that are not saved with it: those are made of the configuration, and some are
    made anew for a longer input (the frequencies of rotations), which is no other model.
    """
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            saved = name not in part._non_persistent_buffers_set
            if tensor is not None and saved and not tensor.is_meta:
                yield f"{prefix}.{name}", tensor


def sample_values(tensor: "torch.Tensor") -> bytes:
    """The bytes of values that are evenly spaced over a tensor; of all, if it has few."""
    import torch

    size = tensor.numel()
    count = min(size, SAMPLED)
    places = torch.arange(count) * size // max(1, count)
    try:
        values = tensor.detach()
        if values.is_contiguous():
            values = values.view(-1)[places]
        else:  # to flatten it would copy it
            values = values[torch.unravel_index(places, values.shape)]
        sampled: bytes = values.cpu().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):
        return b""  # sparse, or quantised in its own way: it counts by name, type and shape
    return sampled
