"""Samples of a model's weights: they tell in milliseconds whether it has changed."""

import hashlib
from collections.abc import Hashable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAMPLED = 64  # values of each tensor


def sample_state(module: "torch.nn.Module") -> Hashable:
    """The parts of a module, and a digest of its weights."""
    return tuple(map(id, module.modules())), digest_weights(module)


def digest_weights(module: "torch.nn.Module") -> str:
    """A digest of the names, types and shapes of all tensors, and of a sample of their values.

    It is computed every time: versions of tensors would miss writes through `.data` or numpy.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(list_tensors(module), key=itemgetter(0)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(sample_values(tensor))
    return digest.hexdigest()


def list_tensors(module: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    """The parameters and buffers of a module that have data, by name.

    Without buffers that are not saved with it: those follow from the configuration, and some are
    replaced for a longer input (the frequencies of rotations) although the model is the same.
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
