"""Exact maximum flow through a dense layered graph: the kernels behind attention flow.

The problem
    `edges[l-1, k, j]` is the capacity of the edge from node (l, k) down to node (l-1, j), for
    l = 1..depth. Wanted: the largest flow from a node of the top layer to a node of layer 0, for
    many such pairs, each a problem of its own.

The form in which it is solved
    A source only hands out its row, and a target only takes in its column. Between them lie
    depth - 1 *inner layers*, numbered 0..top from the bottom up, joined by top = depth - 2
    matrices of capacities, the *steps*:

        supply[u]      = edges[depth-1, source, u]    what enters node u of inner layer top
        inner[i, u, v] = edges[i+1, u, v]             what fits from node u of inner layer i+1
                                                      down to node v of inner layer i;
                                                      see capacities.py
        demand[v]      = edges[0, v, target]          what node v of inner layer 0 can hand on

    Supply and demand may be any two vectors: that is how flows.py cuts a deep problem down to a
    shallow one, and how several nodes of layer 0 become one target, into which all of them drain:
    its demand is the sum of their columns.

What carries nothing
    Maximum flow is homogeneous: capacities times s give the flow times s. So all capacities are
    divided by the largest row sum of the graph, and the flow is multiplied by it. On that scale a
    capacity of at most 2^-52 carries nothing, in any layer and at any depth: it is what rounding
    leaves of a full edge, and no search could tell the two apart.

How it is solved
    By Dinic's algorithm, with one idea that suits dense layers: *which* edges can carry more is
    kept as bits, 64 edges to a machine word, beside the float64 numbers of *how much*. The edges
    of a node that lead somewhere useful are then one AND, and a search never looks at an edge that
    it does not use. The bits also tell what to restore before the next pair.

Why it is exact
    A search ends in one of two ways. Either the flow has met a cut, and no flow is larger than a
    cut. Or no path of unused capacity leads from supply to demand; then the edges from the nodes
    that cannot reach demand to those that can are all full, and they are such a cut (Ford and
    Fulkerson). Between this and exact arithmetic stand only sums of float64 numbers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.capacities import TINY, copy_capacities, read_capacity
from attnflow.core.kernels import (
    ONE,
    Bits,
    find_lowest,
    find_shared,
    holds,
    insert,
    kernel,
    part,
    remove,
    share,
)
from attnflow.core.layers import Held

MET = 1e-13  # a flow this close to a cut has met it, and the cut's capacity is the answer

# ---- the network, and how far its nodes are from demand ------------------------------------------


class Network(NamedTuple):
    """The graph between supply and demand, and the flow that a search sends through it."""

    inner: Held  # [step, upper, lower]: the capacities, as they are held
    ways: Bits  # [step, upper, word]: lower nodes to which an edge can carry anything
    supply: Floats  # [node]: what is still to be sent
    demand: Floats  # [node]: what can still be taken in
    unused: Floats  # [step, upper, lower]: capacity that no flow uses
    down: Bits  # [step, upper, word]: lower nodes to which there is unused capacity
    up: Bits  # [step, lower, word]: upper nodes from which flow arrives
    near: Bits  # [climbs, layer, word]: nodes by the climbs on their shortest way to demand
    known: Bits  # [layer, word]: nodes with any way to demand
    path: npt.NDArray[np.int64]  # [place on the path, (layer, node, climbs)]
    want: Floats  # [place on the path]: what that node is to send on
    sent: Floats  # [place on the path]: what it has sent on


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
            grown |= fill_near(layer, climbs, first, last, net)
        for u in range(first, last + 1):
            if net.supply[u] > TINY and holds(net.near[climbs, top], u):
                return climbs
        if not grown:
            return -1
    return -1


# When a sweep comes to a layer, the nodes that are one move nearer are in `near`: those below by
# this sweep, those above by the one before.
@part
def fill_near(layer, climbs, first, last, net):
    """Fill near[climbs, layer]; return whether any node is in it."""
    near, known = net.near[climbs, layer], net.known[layer]
    near[:] = 0
    grown = False
    for u in range(first, last + 1):
        if not holds(known, u) and is_near(layer, u, climbs, net):
            insert(near, u)
            grown = True
    for word in range(near.shape[0]):
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


# ---- sending along one edge ----------------------------------------------------------------------


# What rounding leaves of a full edge carries nothing: its bit in `down` goes.
@part
def use(step, u, v, amount, net):
    """Send an amount down the edge from u to v."""
    unused = net.unused[step, u, v] - amount
    net.unused[step, u, v] = unused
    insert(net.up[step, v], u)
    if unused <= TINY:
        remove(net.down[step, u], v)


# What rounding leaves on an empty edge is no flow: its capacity is restored, its bit in `up` goes.
@part
def take_back(step, u, v, amount, net):
    """Take an amount back that was sent down the edge from u to v."""
    unused, whole = net.unused[step, u, v] + amount, read_capacity(net.inner, step, u, v)
    net.unused[step, u, v] = unused
    insert(net.down[step, u], v)
    if unused >= whole - TINY:
        net.unused[step, u, v] = whole
        remove(net.up[step, v], u)


# The widest edges are tried first: the one to the target's own column and, because of the
# residual, the one straight down. Rounding can leave the bit of a full edge; it goes here.
@part
def find_lower(layer, u, climbs, column, net):
    """The node below u to which it sends next, or -1."""
    lower, near = net.down[layer - 1, u], net.near[climbs, layer - 1]
    while True:
        if share(lower, near, column):
            v = column
        elif share(lower, near, u):
            v = u
        else:
            v = find_shared(lower, near)
        if v < 0 or net.unused[layer - 1, u, v] > TINY:
            return v
        remove(lower, v)


# In the same way rounding can leave the bit of an empty edge.
@part
def find_upper(layer, u, climbs, net):
    """The node above u from which it takes flow back next, or -1."""
    upper, near = net.up[layer, u], net.near[climbs - 1, layer + 1]
    while True:
        v = find_shared(upper, near)
        if v < 0 or read_capacity(net.inner, layer, v, u) - net.unused[layer, v, u] > TINY:
            return v
        net.unused[layer, v, u] = read_capacity(net.inner, layer, v, u)
        remove(upper, v)


# ---- sending along a path ------------------------------------------------------------------------


# The last step is most of the work. Where it leads nothing follows, so it needs no path.
@part
def finish(u, amount, column, net):
    """Send an amount from node u of inner layer 1 into demand; return what is left of it."""
    lower, near = net.down[0, u], net.near[0, 0]
    for v in (column, u):
        if amount > TINY and share(lower, near, v):
            amount -= finish_through(u, v, amount, net)
    for word in range(near.shape[0]):
        bits = lower[word] & near[word]
        while bits and amount > TINY:
            amount -= finish_through(u, find_lowest(word, bits), amount, net)
            bits &= bits - ONE
        if amount <= TINY:
            return amount
    remove(net.near[0, 1], u)
    return amount


@part
def finish_through(u, v, amount, net):
    """Send what fits of an amount from u through node v into demand; return what was sent."""
    demand = net.demand[v]
    amount = min(amount, min(net.unused[0, u, v], demand))
    use(0, u, v, amount, net)
    net.demand[v] = demand - amount
    if demand - amount <= TINY:
        remove(net.near[0, 0], v)
    return amount


@part
def push(tip, layer, u, climbs, want, net):
    """Put a node at the tip of the path, with what it is to send on."""
    net.path[tip, 0], net.path[tip, 1], net.path[tip, 2] = layer, u, climbs
    net.want[tip], net.sent[tip] = want, 0.0


# Every move goes to a node that is nearer to demand: down within near[climbs], or up into
# near[climbs - 1] along an edge that carries flow, which takes that flow back. So paths cannot
# circle, and a node found useless stays so for this phase.
@part
def extend(tip, column, net):
    """Let the node at the tip send on; return whether the path has grown by a node for that."""
    layer, u, climbs = net.path[tip, 0], net.path[tip, 1], net.path[tip, 2]
    rest = net.want[tip] - net.sent[tip]
    if rest <= TINY:
        return False
    if layer == 1 and climbs == 0:
        net.sent[tip] = net.want[tip] - finish(u, rest, column, net)
        return False
    if layer == 0 and climbs == 0:  # only where there are no steps
        amount = min(rest, net.demand[u])
        net.demand[u] -= amount
        net.sent[tip] += amount
        return False
    if layer > 0:
        v = find_lower(layer, u, climbs, column, net)
        if v >= 0:
            push(tip + 1, layer - 1, v, climbs, min(rest, net.unused[layer - 1, u, v]), net)
            return True
    if layer < net.up.shape[0] and climbs > 0:
        v = find_upper(layer, u, climbs, net)
        if v >= 0:
            flow = read_capacity(net.inner, layer, v, u) - net.unused[layer, v, u]
            push(tip + 1, layer + 1, v, climbs - 1, min(rest, flow), net)
            return True
    remove(net.near[climbs, layer], u)
    return False


@part
def book(tip, net):
    """Book what the node beyond the tip has sent on, on the edge that led to it."""
    amount = net.sent[tip + 1]
    if amount <= 0.0:
        return
    net.sent[tip] += amount
    layer, u = net.path[tip, 0], net.path[tip, 1]
    next_layer, v = net.path[tip + 1, 0], net.path[tip + 1, 1]
    if next_layer < layer:
        use(next_layer, u, v, amount, net)
    else:
        take_back(layer, v, u, amount, net)


# The path is a stack. A node leaves it when it has sent on all that it wants, or all that it can;
# only then is known how much the edge that led to it carries.
@part
def send_from(origin, climbs, column, net):
    """Send the supply of a node along shortest paths, all that fits; return what was sent."""
    push(0, net.up.shape[0], origin, climbs, net.supply[origin], net)
    tip = 0
    while tip >= 0:
        if extend(tip, column, net):
            tip += 1
        else:
            tip -= 1
            if tip >= 0:
                book(tip, net)
    net.supply[origin] -= net.sent[0]
    return net.sent[0]


# ---- the search ----------------------------------------------------------------------------------


# In shallow graphs the source's own column is hardest to place, so it goes first. This is no part
# but a kernel: inlined, the hot loop would share its registers with what surrounds it.
@kernel
def send(climbs, enough, first, last, net):
    """One phase: send supply along shortest paths, all that fits or `enough`; return the sum."""
    top = net.up.shape[0]
    column = first + np.argmax(net.demand[first : last + 1])
    heaviest = first + np.argmax(net.supply[first : last + 1])
    total = 0.0
    for turn in range(first - 1 if top <= 2 else first, last + 1):
        origin = turn if turn >= first else heaviest
        if net.supply[origin] > TINY and holds(net.near[climbs, top], origin):
            total += send_from(origin, climbs, column, net)
            if total >= enough:
                break
    return total


# Each phase leaves no path of the length that it used (a blocking flow), so lengths grow and the
# phases end (Dinic). A bound of less than MET is met by half of it: never by nothing, so that what
# cannot be reached is 0.
@kernel
def search(bound, first, last, net):
    """The maximum flow through a network that carries none, or `bound` where the flow meets it."""
    flow = 0.0
    enough = bound - min(MET, 0.5 * bound)
    while flow < enough:
        climbs = find_near(first, last, net)
        if climbs < 0:
            return flow
        flow += send(climbs, enough - flow, first, last, net)
    return bound


# Where a bit of `up` is not set, all capacity is unused, exactly: `take_back` has seen to that.
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


# In a causal graph no edge leads to a later position, so a path stays between the first node with
# demand and the last with supply.
@part
def find_window(supply, demand, causal):
    """The first and last position that a path may touch; an empty window if there is no path."""
    first = 0
    last = supply.shape[0] - 1
    if causal:
        while first < demand.shape[0] and demand[first] <= TINY:
            first += 1
        while last >= 0 and supply[last] <= TINY:
            last -= 1
    return first, last


@kernel
def search_pairs(start, stop, supplies, demands, causal, bounds, flows, net):
    """Search the pairs start..stop-1, counted by target, whose flows [source, target] are NaN."""
    sources = flows.shape[0]
    for pair in range(start, stop):
        m, k = pair // sources, pair % sources
        if np.isnan(flows[k, m]):
            for u in range(net.supply.shape[0]):
                net.supply[u], net.demand[u] = supplies[k, u], demands[m, u]
            first, last = find_window(net.supply, net.demand, causal)
            flows[k, m] = search(bounds[k, m], first, last, net)
            restore(first, last, net)


# ---- what a search needs -------------------------------------------------------------------------


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
        near=np.empty((longest, steps + 1, words), np.uint64),
        known=np.empty((steps + 1, words), np.uint64),
        path=np.empty((longest + 1, 3), np.int64),
        want=np.empty(longest + 1),
        sent=np.empty(longest + 1),
    )
