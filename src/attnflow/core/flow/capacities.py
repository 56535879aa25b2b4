"""Capacities between inner layers, read from the weights; terms as in search.py.

A graph of float32 would double in float64. So kernels read each capacity from the weights
(layers.py), and the only array of float64 is the one that a search writes (`copy_capacities`).
"""

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.flow.kernels import Bits, insert, kernel, part
from attnflow.core.layers import Held

TINY = 2.0**-52  # a capacity of at most this part of the largest row sum carries nothing


def keep_usable(capacities: Floats) -> Floats:
    """The same capacities, on the scale of 1, with 0 for those that carry nothing."""
    return np.ascontiguousarray(np.where(capacities > TINY, capacities, 0.0))


@part
def read_capacity(inner, step, u, v):
    """The capacity from node u above a step to node v below it."""
    amount = inner.factors[step, u] * inner.weights[step, u, v]
    return amount + inner.diagonal[step, u] if u == v else amount


def copy_capacities(inner: Held) -> Floats:
    """[step, upper, lower]: all capacities in float64, a new array."""
    copied = np.empty(inner.weights.shape)
    fill_copy(inner, copied)
    return copied


@kernel
def fill_copy(inner, copied):
    """Set copied [step, upper, lower] to the capacities."""
    steps, nodes, _ = copied.shape
    for step in range(steps):
        for u in range(nodes):
            for v in range(nodes):
                copied[step, u, v] = inner.factors[step, u] * inner.weights[step, u, v]
            copied[step, u, u] += inner.diagonal[step, u]


def find_ways(inner: Held) -> Bits:
    """[step, upper, word]: the edges that can carry something, as bits."""
    steps, nodes, _ = inner.weights.shape
    ways = np.zeros((steps, nodes, (nodes + 63) // 64), np.uint64)
    fill_ways(inner, ways)
    return ways


@kernel
def fill_ways(inner, ways):
    """Put into ways [step, upper, word] every edge that can carry something."""
    steps, nodes, _ = inner.weights.shape
    for step in range(steps):
        for u in range(nodes):
            for v in range(nodes):
                if read_capacity(inner, step, u, v) > TINY:
                    insert(ways[step, u], v)


# The residual is alike in all steps, so it is left out.
def measure_evenness(inner: Held) -> Floats:
    """[step]: the sum of all capacities, each counted as at most an even share of a row."""
    steps, nodes, _ = inner.weights.shape
    sums = np.zeros((steps, nodes))
    add_clipped(inner, 1 / nodes, sums)
    evenness: Floats = sums.sum(axis=1)
    return evenness


@kernel
def add_clipped(inner, most, sums):
    """Add the capacities to sums [step, lower], each counted as at most `most`."""
    steps, nodes = sums.shape
    for step in range(steps):
        for u in range(nodes):
            for v in range(nodes):
                sums[step, v] += min(inner.factors[step, u] * inner.weights[step, u, v], most)
