"""Fingerprints, which tell whether two models are the same, wherever they were loaded from."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from weakref import WeakKeyDictionary

from attnflow.models.execution import ModuleCache
from attnflow.models.model import Model
from attnflow.models.samples import digest_weights

QUICK = "quick-"  # begins a quick fingerprint, so that it is never compared with a whole one
QUICK_DIGITS = 16  # of a quick fingerprint: 64 bits, so that no two of a million models share one
# settings about the origin of a model
PROVENANCE = ("_name_or_path", "transformers_version")
# settings that transformers adds when it saves a model; names and types of tensors imply them
SAVED = ("architectures", "dtype", "torch_dtype")
weight_digests: ModuleCache[str] = ModuleCache()
# the size of each vocabulary and its digest
of_vocabularies: WeakKeyDictionary[object, tuple[int, str]] = WeakKeyDictionary()  # by tokenizer


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

    "quick-" and 16 hex digits, while `model_fingerprint` gives 64 digits. It takes milliseconds.
    Training changes it; a change of single values may go unnoticed, but not by
    `model_fingerprint`.

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
    weights = weight_digests.get(model.model, None, lambda: digest_weights(model.model))
    digest.update(weights.encode())
    return QUICK + digest.hexdigest()[:QUICK_DIGITS]


def read_settings(config: object, without: Sequence[str] = PROVENANCE) -> bytes:
    """A configuration as JSON, without some settings."""
    settings: dict[str, object] | None = None
    if is_dataclass(config) and not isinstance(config, type):
        with suppress(Exception):  # settings that differ by layer refuse to be read
            settings = asdict(config)
    if settings is None:
        settings = dict(config.to_dict() if hasattr(config, "to_dict") else vars(config))
    for name in without:
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True, default=str).encode()


def read_vocabulary(tokenizer: object) -> bytes:
    """The rules and words of a tokenizer, or its words and ids; empty if they are unknown."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words = getattr(tokenizer, "get_vocab", dict)
        return json.dumps(sorted(words().items())).encode("utf-8", "backslashreplace")
    if backend.truncation is not None or backend.padding is not None:
        # transformers leaves the options of the last call there
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    vocabulary: bytes = backend.to_str().encode("utf-8", "backslashreplace")
    return vocabulary


def digest_vocabulary(tokenizer: object) -> str:
    """The size of a tokenizer's vocabulary and a digest of it, kept while the size is the same."""
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    known = None
    with suppress(TypeError):  # a custom tokenizer that does not support weak references
        known = of_vocabularies.get(tokenizer)
    if known is None or known[0] != size:
        known = (size, f"{size} {hashlib.sha256(read_vocabulary(tokenizer)).hexdigest()}")
        with suppress(TypeError):
            of_vocabularies[tokenizer] = known
    return known[1]
