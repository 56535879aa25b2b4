"""The network that a search works on: its edges, and how far its nodes are from demand.

Terms as in search.py.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.flow.capacities import TINY, copy_capacities, read_capacity
from attnflow.core.flow.kernels import (
    ONE,
    Bits,
    find_lowest,
    find_shared,
    holds,
    insert,
    make_bit,
    part,
    remove,
)
from attnflow.core.layers import Held


class Network(NamedTuple):
    """The graph between supply and demand, and the flow that a search sends through it."""

    inner: Held  # [step, upper, lower]: the capacities, as they are held
    ways: Bits  # [step, upper, word]: lower nodes to which an edge can carry anything
    supply: Floats  # [node]: the amount still to be sent
    demand: Floats  # [node]: the amount that can still be taken in
    unused: Floats  # [step, upper, lower]: capacity that no flow uses
    down: Bits  # [step, upper, word]: lower nodes to which there is unused capacity
    up: Bits  # [step, lower, word]: upper nodes from which flow arrives
    window: Bits  # [word]: nodes that a path may touch
    near: Bits  # [climbs, layer, word]: nodes by the climbs on their shortest path to demand
    known: Bits  # [layer, word]: nodes with any path to demand
    path: npt.NDArray[np.int64]  # [place on the path, (layer, node, climbs)]
    want: Floats  # [place on the path]: the amount that the node is to send on
    sent: Floats  # [place on the path]: the amount that it has sent on
    entered: Floats  # [layer]: amounts in the target's column, not yet booked; [0]: the sum
    room: Floats  # [1]: the amount that can still slide down all of it


def make_network(inner: Held, ways: Bits) -> Network:
    """A network without flow, whose supply and demand are still to be set; one per worker."""
    steps, nodes, words = ways.shape
    longest = nodes * (steps + 1)  # a path meets no node twice
    return Network(
        inner=inner,
        ways=ways,
        supply=np.empty(nodes),
        demand=np.empty(nodes),
        unused=copy_capacities(inner),
        down=ways.copy(),
        up=np.zeros(ways.shape, np.uint64),
        window=np.empty(words, np.uint64),
        near=np.empty((longest, steps + 1, words), np.uint64),
        known=np.empty((steps + 1, words), np.uint64),
        path=np.empty((longest + 1, 3), np.int64),
        want=np.empty(longest + 1),
        sent=np.empty(longest + 1),
        entered=np.zeros(steps + 1),
        room=np.empty(1),
    )


# In a causal graph no edge leads to a later position, so a path stays between the first node with
# demand and the last with supply.
@part
def find_window(supply, demand, causal):
    """The first and last position that a path may touch; an empty window without a path."""
    first = 0
    last = supply.shape[0] - 1
    if causal:
        while first < demand.shape[0] and demand[first] <= TINY:
            first += 1
        while last >= 0 and supply[last] <= TINY:
            last -= 1
    return first, last


@part
def set_window(first, last, net):
    """Let paths touch the nodes first..last of each layer, and no others."""
    net.window[:] = 0
    for u in range(first, last + 1):
        insert(net.window, u)


# ---- how far nodes are from demand ---------------------------------------------------------------


# A path from inner layer i to demand goes down i times, and once more for each time it climbs. Its
# length is i + 2 * climbs, so one sweep from the bottom up per number of climbs is a breadth-first
# search from the demand.
@part
def find_near(first, last, net):
    """Fill near[0], near[1], ... until one holds supply; return which, or -1 if none does."""
    top = net.up.shape[0]
    net.known[:, :] = 0
    for climbs in range(net.near.shape[0]):
        grown = False
        for layer in range(top + 1):
            grown |= fill_near(layer, climbs, net)
        for u in range(first, last + 1):
            if net.supply[u] > TINY and holds(net.near[climbs, top], u):
                return climbs
        if not grown:
            return -1
    return -1


# When a sweep comes to a layer, the nodes that are one move nearer are in `near`: those below by
# this sweep, those above by the one before.
@part
def fill_near(layer, climbs, net):
    """Fill near[climbs, layer]; return whether any node is in it."""
    near, known = net.near[climbs, layer], net.known[layer]
    grown = False
    for word in range(near.shape[0]):
        near[word] = 0
        unknown = net.window[word] & ~known[word]
        while unknown:
            u = find_lowest(word, unknown)
            if is_near(layer, u, climbs, net):
                near[word] |= make_bit(u)
                grown = True
            unknown &= unknown - ONE
        known[word] |= near[word]
    return grown


@part
def is_near(layer, u, climbs, net):
    """Whether a move takes node u nearer to demand: down, into demand itself, or up."""
    if layer > 0 and find_shared(net.down[layer - 1, u], net.near[climbs, layer - 1]) >= 0:
        return True
    if climbs == 0:
        return layer == 0 and net.demand[u] > TINY
    top = net.up.shape[0]
    return layer < top and find_shared(net.up[layer, u], net.near[climbs - 1, layer + 1]) >= 0


# ---- the flow on one edge ------------------------------------------------------------------------


# The capacity that rounding leaves of a full edge carries nothing: its bit in `down` goes.
@part
def use(step, u, v, amount, net):
    """Send an amount down the edge from u to v."""
    unused = net.unused[step, u, v] - amount
    net.unused[step, u, v] = unused
    insert(net.up[step, v], u)
    if unused <= TINY:
        remove(net.down[step, u], v)


# The flow that rounding leaves on an empty edge counts as none: its capacity is restored, and its
# bit in `up` goes.
@part
def take_back(step, u, v, amount, net):
    """Take an amount back that was sent down the edge from u to v."""
    unused, whole = net.unused[step, u, v] + amount, read_capacity(net.inner, step, u, v)
    net.unused[step, u, v] = unused
    insert(net.down[step, u], v)
    if unused >= whole - TINY:
        net.unused[step, u, v] = whole
        remove(net.up[step, v], u)


# Without its bit in `up` an edge has exactly its whole capacity unused, as `take_back` restores it.
@part
def restore(first, last, net):
    """Take back all flow within a window, so that the next search finds none."""
    for step in range(net.up.shape[0]):
        for v in range(first, last + 1):
            restore_node(step, v, net)


@part
def restore_node(step, v, net):
    """Take back what arrives at node v in a step, and let v send again wherever it can."""
    for word in range(net.up.shape[2]):
        net.down[step, v, word] = net.ways[step, v, word]
        bits = net.up[step, v, word]
        net.up[step, v, word] = 0
        while bits:
            u = find_lowest(word, bits)
            net.unused[step, u, v] = read_capacity(net.inner, step, u, v)
            bits &= bits - ONE
