"""The compilation of kernels, and sets of nodes as bits."""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Bits = npt.NDArray[np.uint64]
ONE = np.uint64(1)

# A kernel is compiled by itself, and cached on disk if possible. A part is inlined into kernels, so
# that short functions cost nothing. Neither allocates memory, so both do without numba's runtime
# (`_nrt`), which would count references to every array that a part is given: atomic operations that
# make the search eight times slower.
#
# The cache notices a change of a kernel's file, but not of a part in another file: after editing a
# part here, in capacities.py or in network.py, empty the `__pycache__` beside it.
OPTIONS = {"nogil": True, "_nrt": False}
part = njit(forceinline=True, **OPTIONS)


def kernel(function: Any) -> Any:
    """Compile a function when it is first called, or load it from the cache."""
    try:
        return njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # a read-only installation and no home to write to
        return njit(**OPTIONS)(function)


# ---- sets of nodes of one layer: nodes [word], 64 to a word -------------------------------------


def unpack_nodes(words: Bits, nodes: int) -> npt.NDArray[np.bool_]:
    """Members [..., node] from [..., word]."""
    octets = words.astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=nodes, bitorder="little").view(bool)


@intrinsic
def count_trailing_zeros(typing_context: Any, word: Any) -> Any:
    """The place of the lowest bit set in a word that is not 0: one instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@part
def make_bit(u):
    """The bit of node u within its word, which is word number `u >> 6`."""
    return ONE << np.uint64(u & 63)


@part
def find_lowest(word, bits):
    """The node of the lowest bit set in word number `word`, whose bits are not all 0."""
    return (word << 6) + count_trailing_zeros(bits)


@part
def insert(nodes, u):
    """Put node u into a set."""
    nodes[u >> 6] |= make_bit(u)


@part
def remove(nodes, u):
    """Take node u out of a set."""
    nodes[u >> 6] &= ~make_bit(u)


@part
def holds(nodes, u):
    """Whether node u is in a set."""
    return nodes[u >> 6] & make_bit(u) != 0


@part
def share(nodes, others, u):
    """Whether node u is in both sets."""
    return nodes[u >> 6] & others[u >> 6] & make_bit(u) != 0


@part
def find_shared(nodes, others):
    """The first node that is in both sets, or -1."""
    for word in range(nodes.shape[0]):
        bits = nodes[word] & others[word]
        if bits:
            return find_lowest(word, bits)
    return -1
