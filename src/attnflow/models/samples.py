"""Samples of a model's weights: they tell in milliseconds whether it has changed."""

import hashlib
from collections.abc import Hashable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# the names of data types whose tensors are read together; those of others are read one by one
COMMON_TYPES = ("float32", "bfloat16", "float16", "float64", "int64")
SAMPLED = 64  # values of each tensor in a digest
WATCHED_VALUES = 16  # ... and in a state, which is compared at every use of a model
SMALL = 1024  # tensors of at most this many values, such as gates and norms, are read whole


def sample_state(module: "torch.nn.Module") -> Hashable:
    """The parts of a module, the versions of its tensors, and a sample of their values.

    Values are read every time, since versions miss writes through `.data` or numpy; and a sample
    misses a write to a few values of a large tensor, which counts as a new version.
    """
    import torch

    parts = list(iterate_parts(module))
    tensors = [tensor for part in parts for _, tensor in list_own_tensors(part)]
    common = {getattr(torch, name) for name in COMMON_TYPES}
    slices: dict[torch.dtype, list[torch.Tensor]] = {}  # read together: one call instead of many
    values: list[bytes] = []
    for tensor in tensors:
        if tensor.dtype in common and tensor.is_contiguous() and tensor.numel():
            flat = tensor.detach().view(-1)
            step = 1 if flat.shape[0] <= SMALL else -(-flat.shape[0] // WATCHED_VALUES)
            slices.setdefault(tensor.dtype, []).append(flat[::step].cpu())
        else:
            values.append(sample_values(tensor))
    values += [copy_bytes(torch.cat(sampled)) for sampled in slices.values()]
    # tensors that were made in inference mode count no versions
    versions = (0 if tensor.is_inference() else tensor._version for tensor in tensors)
    return tuple(map(id, parts)), tuple(versions), tuple(values)


def iterate_parts(module: "torch.nn.Module") -> "Iterator[torch.nn.Module]":
    """A module and the parts below it; one with several names comes more than once."""
    yield module
    for part in module._modules.values():
        if part is not None:
            yield from iterate_parts(part)


def list_own_tensors(part: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    """The parameters and buffers of a part itself that have data, by name.

    Without buffers that are not saved with it: those follow from the configuration, and some are
    replaced for a longer input (the frequencies of rotations) although the model is the same.
    """
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        saved = name not in part._non_persistent_buffers_set
        if tensor is not None and saved and not tensor.is_meta:
            yield name, tensor


def digest_weights(module: "torch.nn.Module") -> str:
    """A digest of the names, types and shapes of all tensors, and of a sample of their values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(list_tensors(module), key=itemgetter(0)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(sample_values(tensor))
    return digest.hexdigest()


def list_tensors(module: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of `list_own_tensors` of a module and of all its parts, by their whole names."""
    for prefix, part in module.named_modules():
        for name, tensor in list_own_tensors(part):
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
        return copy_bytes(values)
    except (RuntimeError, TypeError, NotImplementedError):
        return b""  # sparse, or quantised in its own way: it counts by name, type and shape


def copy_bytes(values: "torch.Tensor") -> bytes:
    """The bytes of a tensor [value]."""
    import torch

    read: bytes = values.cpu().view(torch.uint8).numpy().tobytes()
    return read
