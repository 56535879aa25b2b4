"""Exact maximum flow through a dense layered graph: the kernels behind attention flow.

The problem
    `edges[l-1, k, j]` is the capacity of the edge from node (l, k) down to node (l-1, j), for l = 1..depth. Asked for: the
    largest flow from a node of the top layer to a node of layer 0, for many such pairs, each a problem of its own.

The form in which it is searched
    A source only hands out its row and a target only takes in its column. What lies between are depth - 1 *inner layers*,
    numbered 0..top from the bottom up, with `top` = depth - 2 matrices of capacities between them, the *steps*:

        supply[u]      = edges[depth-1, source, u]    what enters node u of inner layer `top`
        inner[i, u, v] = edges[i+1, u, v]             what fits from node u of inner layer i+1 to node v of inner layer i
                                                      (as it is held: `capacity` makes it, layers.py says why)
        demand[v]      = edges[0, v, target]          what node v of inner layer 0 can hand on to the target

    Supply and demand may be any two vectors: that is how flows.py cuts a deep problem down to a
    shallow one, and how several nodes of layer 0 become one target, into which all of them drain:
    its demand is the sum of their columns.

What carries nothing
    Maximum flow is homogeneous: capacities times s give the flow times s. So all capacities are
    divided by the largest row sum of the graph, solved, and multiplied back. On that scale a
    capacity of at most 2^-52 carries nothing, in any layer and at any depth. It is what rounding
    leaves of a full edge, and no search could tell the two apart.

How it is searched
    By Dinic's algorithm, with one idea that suits dense layers: *which* edges can carry more is kept as bits, 64 edges to a
    machine word, beside the float64 numbers of *how much*. "The edges of u that lead somewhere useful" is then one AND, and the
    search never looks at an edge that it does not use. The bits also tell what to restore before the next pair.

Why it is exact
    A search ends in one of two ways. Either the flow has met a cut, and no flow is larger than a cut. Or no path of unused
    capacity leads from supply to demand; then the edges from the nodes that cannot reach demand to those that can are all full, and
    they are such a cut (Ford and Fulkerson). Between this and exact arithmetic stand only sums of float64 numbers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]
Scratch = tuple[npt.NDArray[Any], ...]
Held = tuple[npt.NDArray[Any], Floats, Floats]  # of layers.py: weights, factors, diagonal

TINY = 2.0**-52  # a capacity of at most this part of the largest row sum carries nothing
MET = 1e-13  # a flow this close to a cut has met it, and the cut's capacity is the answer
ONE = np.uint64(1)


def kernel(**options: Any) -> Callable[[Any], Any]:
    """Compile without holding the GIL, and keep the result on disk if there is a place for it."""

    def compiled(function: Any) -> Any:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # a read-only installation and no home to write to
            return njit(nogil=True, **options)(function)

    return compiled


# ---- sets of positions as bits ------------------------------------------------------------------------------------------------


@intrinsic
def lowest(typing_context: Any, word: Any) -> Any:
    """The place of the lowest bit set in a word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@kernel(inline="always")
def bit(position):
    """The bit of a position within its word, which is word number `position >> 6`."""
    return ONE << np.uint64(position & 63)


# ---- capacities, as they are held ---------------------------------------------------------------------------------------------


@kernel(inline="always")
def capacity(inner, step, u, v):
    """What fits from node u of the layer above a step to node v of the one below."""
    weights, factors, diagonal = inner
    amount = factors[step, u] * weights[step, u, v]
    return amount + diagonal[step, u] if u == v else amount


@kernel()
def fill(inner, unused):
    """Set unused [step, upper, lower] to the capacities."""
    weights, factors, diagonal = inner
    steps, nodes, _ = weights.shape
    for step in range(steps):
        for u in range(nodes):
            for v in range(nodes):
                unused[step, u, v] = factors[step, u] * weights[step, u, v]
            unused[step, u, u] += diagonal[step, u]


@kernel()
def open_ways(inner, ways):
    """Set in ways [step, upper, word] the bit of every edge that can carry something."""
    steps, nodes, _ = inner[0].shape
    for step in range(steps):
        for u in range(nodes):
            for v in range(nodes):
                if capacity(inner, step, u, v) > TINY:
                    ways[step, u, v >> 6] |= bit(v)


@kernel(fastmath=True)
def sum_clipped(inner, most):
    """[step]: the sum of a step's capacities, none counted for more than `most`, nor a residual."""
    weights, factors, _ = inner
    steps, nodes, _ = weights.shape
    sums = np.zeros(steps)
    for step in range(steps):
        for u in range(nodes):
            clipped = 0.0
            for v in range(nodes):
                clipped += min(factors[step, u] * weights[step, u, v], most)
            sums[step] += clipped
    return sums


# ---- bounds: what needs no search ---------------------------------------------------------------------------------------------


# Two edges in a row. Each path source -> u -> target stands alone, so it carries the smaller of its two capacities.
@kernel()
def two_layers(supplies, demands, flows):
    """Set flows [source, target] to the exact flow through one inner layer."""
    for k in range(flows.shape[0]):
        for m in range(flows.shape[1]):
            total = 0.0
            for u in range(supplies.shape[1]):
                total += min(supplies[k, u], demands[m, u])
            flows[k, m] = total


# In a causal graph no edge leads to a later position, so a path stays between the first node with demand and the last with supply.
@kernel()
def window(supply, demand, causal):
    """The first and last position that a path may touch; an empty window if there is no path."""
    first = 0
    last = supply.shape[0] - 1
    if causal:
        while first < demand.shape[0] and demand[first] <= TINY:
            first += 1
        while last >= 0 and supply[last] <= TINY:
            last -= 1
    return first, last


# From the layer below, upwards. What passes through node u fits the edge to u, and it is a flow
# from u to the target, so it is at most u's own maximum. Hence
# flow(k, m) <= sum over u of min(edge[k, u], below[u, m]).
#
# From the layer below, downwards. Let g_u be a maximum flow from u. For weights w_u >= 0 with sum
# at most 1, the mixture of all w_u g_u fits every capacity, since each g_u does; and node u can be
# given w_u below[u, m] <= edge[k, u]. The best weights fill the largest below[u, m] first.
#
# Neither asks what the rows sum to, nor whether m is one node or several that drain into one.
# Closure: if every u takes in all that m can, below[u, m] = c_m, then the weights edge[k, u] / c_m
# give min(row sum of k, c_m), the outer cut of k: deep layers close without a search.
@kernel()
def bounds_from_below(supplies, below, upper, lower):
    """Lower upper [source, target], and set lower [source, target], by below [node, target], the flows from one layer down."""
    sources, targets = upper.shape
    for m in range(targets):
        order = np.argsort(-below[:, m])
        for k in range(sources):
            most = 0.0
            for u in range(below.shape[0]):
                most += min(supplies[k, u], below[u, m])
            upper[k, m] = min(upper[k, m], most)
            weight = 1.0
            least = 0.0
            for u in order:
                flow = below[u, m]
                if weight <= 0.0 or flow <= TINY:
                    break
                share = min(weight, supplies[k, u] / flow)
                weight -= share
                least += share * flow
            lower[k, m] = least


# ---- the search ---------------------------------------------------------------------------------------------------------------


# A path from inner layer i to demand goes down i times, and once more for each time it climbs. Its length is i + 2 * climbs, so one
# sweep from the bottom up for each number of climbs is a breadth-first search from the demand.
@kernel()
def find_near(first, last, supply, demand, down, up, near, known):
    """Put each node into near[climbs] for the fewest climbs on a way to demand; return those of the nearest supply, or -1."""
    top, _, words = up.shape
    known[:, :] = 0
    for climbs in range(near.shape[0]):
        grown = False
        for layer in range(top + 1):
            near[climbs, layer, :] = 0
            for u in range(first, last + 1):
                if known[layer, u >> 6] & bit(u):
                    continue
                reaches = climbs == 0 and layer == 0 and demand[u] > TINY
                if layer > 0:
                    for word in range(words):
                        if down[layer - 1, u, word] & near[climbs, layer - 1, word]:
                            reaches = True
                            break
                if not reaches and climbs > 0 and layer < top:
                    for word in range(words):
                        if up[layer, u, word] & near[climbs - 1, layer + 1, word]:
                            reaches = True
                            break
                if reaches:
                    near[climbs, layer, u >> 6] |= bit(u)
                    grown = True
            for word in range(words):
                known[layer, word] |= near[climbs, layer, word]
        for u in range(first, last + 1):
            if supply[u] > TINY and near[climbs, top, u >> 6] & bit(u):
                return climbs
        if not grown:
            return -1
    return -1


# Every move of a path goes to a node that is nearer to demand: down within near[climbs], or up into near[climbs - 1] along an
# edge that carries flow, which takes that flow back. So paths cannot circle, and a node found useless stays so for this phase.
# The widest edges are tried first: the one to the target's own column and, because of the residual, the one straight down.
@kernel()
def send(
    start_climbs, enough, first, last, inner, supply, demand, unused, down, up, near, at, want, sent
):
    """One phase: send supply along shortest paths until none is left, or `enough` has been sent; return what was sent."""
    top, _, words = up.shape
    column = first + np.argmax(demand[first : last + 1])
    heaviest = first + np.argmax(supply[first : last + 1])
    total = 0.0
    for turn in range(first - 1, last + 1):
        # in shallow graphs the source's own column is hardest to place, so it goes first
        origin = turn if turn >= first else heaviest
        if turn < first and top > 2:
            continue
        if supply[origin] <= TINY or not near[start_climbs, top, origin >> 6] & bit(origin):
            continue
        tip = 0  # the path is a stack of nodes: each wants to send some, and has sent some
        at[0, 0], at[0, 1], at[0, 2] = top, origin, start_climbs
        want[0], sent[0] = supply[origin], 0.0
        while True:
            layer, u, climbs = at[tip, 0], at[tip, 1], at[tip, 2]
            rest = want[tip] - sent[tip]
            if (
                rest > TINY and layer == 0 and climbs == 0
            ):  # demand itself: only where there are no steps
                amount = min(rest, demand[u])
                demand[u] -= amount
                sent[tip] += amount
            elif (
                rest > TINY and layer == 1 and climbs == 0
            ):  # the last step: most of the work, so without the stack
                for choice in range(-2, words):
                    if choice < 0:
                        wide = column if choice == -2 else u
                        word = wide >> 6
                        ways = down[0, u, word] & near[0, 0, word] & bit(wide)
                    else:
                        word = choice
                        ways = down[0, u, word] & near[0, 0, word]
                    while ways and rest > TINY:
                        v = (word << 6) + lowest(ways)
                        ways &= ways - ONE
                        amount = min(rest, min(unused[0, u, v], demand[v]))
                        left, lacking = unused[0, u, v] - amount, demand[v] - amount
                        unused[0, u, v], demand[v] = left, lacking
                        up[0, v, u >> 6] |= bit(u)
                        if left <= TINY:
                            down[0, u, word] &= ~bit(v)
                        if lacking <= TINY:
                            near[0, 0, word] &= ~bit(v)
                        rest -= amount
                    if rest <= TINY:
                        break
                sent[tip] = want[tip] - rest
                if rest > TINY:
                    near[0, 1, u >> 6] &= ~bit(u)
            elif rest > TINY:
                v = -1
                if layer > 0:
                    step = layer - 1
                    if down[step, u, column >> 6] & near[climbs, step, column >> 6] & bit(column):
                        v = column
                    elif down[step, u, u >> 6] & near[climbs, step, u >> 6] & bit(u):
                        v = u
                    else:
                        for word in range(words):
                            ways = down[step, u, word] & near[climbs, step, word]
                            if ways:
                                v = (word << 6) + lowest(ways)
                                break
                    if (
                        v >= 0 and unused[step, u, v] <= TINY
                    ):  # rounding can leave the bit of a full edge
                        down[step, u, v >> 6] &= ~bit(v)
                        continue
                    if v >= 0:
                        tip += 1
                        at[tip, 0], at[tip, 1], at[tip, 2] = step, v, climbs
                        want[tip], sent[tip] = min(rest, unused[step, u, v]), 0.0
                        continue
                if layer < top and climbs > 0:
                    for word in range(words):
                        ways = up[layer, u, word] & near[climbs - 1, layer + 1, word]
                        if ways:
                            v = (word << 6) + lowest(ways)
                            break
                    if (
                        v >= 0 and capacity(inner, layer, v, u) - unused[layer, v, u] <= TINY
                    ):  # ... or of an empty one
                        unused[layer, v, u] = capacity(inner, layer, v, u)
                        up[layer, u, v >> 6] &= ~bit(v)
                        continue
                    if v >= 0:
                        tip += 1
                        at[tip, 0], at[tip, 1], at[tip, 2] = layer + 1, v, climbs - 1
                        want[tip], sent[tip] = (
                            min(rest, capacity(inner, layer, v, u) - unused[layer, v, u]),
                            0.0,
                        )
                        continue
                near[climbs, layer, u >> 6] &= ~bit(u)
            # the node has sent all that it wanted, or all that it could: book it on the edge that led here, and step back
            amount = sent[tip]
            if tip == 0:
                break
            tip -= 1
            if amount <= 0.0:
                continue
            sent[tip] += amount
            from_layer, a = at[tip, 0], at[tip, 1]
            if from_layer > layer:
                unused[layer, a, u] -= amount
                up[layer, u, a >> 6] |= bit(a)
                if unused[layer, a, u] <= TINY:
                    down[layer, a, u >> 6] &= ~bit(u)
            else:
                unused[from_layer, u, a] += amount
                down[from_layer, u, a >> 6] |= bit(a)
                whole = capacity(inner, from_layer, u, a)
                if unused[from_layer, u, a] >= whole - TINY:
                    unused[from_layer, u, a] = whole
                    up[from_layer, a, u >> 6] &= ~bit(u)
        supply[origin] -= sent[0]
        total += sent[0]
        if total >= enough:
            break
    return total


# Each phase leaves no path of the length that it used (a blocking flow), so lengths grow and the
# phases end (Dinic). A bound of less than MET is met by half of it: never by nothing, so that what
# cannot be reached is 0.
@kernel()
def search(
    bound, first, last, inner, ways, supply, demand, unused, down, up, near, known, at, want, sent
):
    """The maximum flow from supply to demand, or `bound` where the flow meets it; what is left stands in the scratch arrays."""
    down[:, first : last + 1] = ways[:, first : last + 1]
    flow = 0.0
    enough = bound - min(MET, 0.5 * bound)
    while flow < enough:
        climbs = find_near(first, last, supply, demand, down, up, near, known)
        if climbs < 0:
            return flow
        flow += send(
            climbs,
            enough - flow,
            first,
            last,
            inner,
            supply,
            demand,
            unused,
            down,
            up,
            near,
            at,
            want,
            sent,
        )
    return bound


@kernel()
def restore(first, last, inner, unused, up):
    """Take back all flow: it can only be where a bit of `up` is set, or where it was taken back already."""
    steps, _, words = up.shape
    for step in range(steps):
        for v in range(first, last + 1):
            for word in range(words):
                rest = up[step, v, word]
                up[step, v, word] = 0
                while rest:
                    u = (word << 6) + lowest(rest)
                    rest &= rest - ONE
                    unused[step, u, v] = capacity(inner, step, u, v)


@kernel()
def search_pairs(
    start,
    stop,
    supplies,
    demands,
    causal,
    bounds,
    flows,
    inner,
    ways,
    supply,
    demand,
    unused,
    down,
    up,
    near,
    known,
    at,
    want,
    sent,
):
    """Search the pairs start..stop-1, counted target by target, whose flows [source, target] are still NaN."""
    sources = flows.shape[0]
    for pair in range(start, stop):
        m, k = pair // sources, pair % sources
        if np.isnan(flows[k, m]):
            supply[:] = supplies[k]
            demand[:] = demands[m]
            first, last = window(supply, demand, causal)
            bound = bounds[k, m]
            flows[k, m] = search(
                bound,
                first,
                last,
                inner,
                ways,
                supply,
                demand,
                unused,
                down,
                up,
                near,
                known,
                at,
                want,
                sent,
            )
            restore(first, last, inner, unused, up)


# ---- what a search needs ------------------------------------------------------------------------------------------------------


def ways_of(inner: Held) -> Bits:
    """[step, upper, word]: the edges that can carry something, as bits."""
    steps, nodes, _ = inner[0].shape
    ways = np.zeros((steps, nodes, (nodes + 63) // 64), np.uint64)
    open_ways(inner, ways)
    return ways


def scratch(inner: Held, ways: Bits) -> Scratch:
    """What a search writes, in the order of its arguments; one set a worker."""
    steps, nodes, words = ways.shape
    unused = np.empty((steps, nodes, nodes))
    fill(inner, unused)
    longest = nodes * (steps + 1)  # a path meets no node twice
    return (
        np.empty(nodes),  # supply [node] that is still to be sent
        np.empty(nodes),  # demand [node] that is still to be met
        unused,  # [step, upper, lower]: capacity that no flow uses
        np.empty_like(
            ways
        ),  # down [step, upper, word]: lower nodes to which there is unused capacity
        np.zeros_like(ways),  # up [step, lower, word]: upper nodes from which flow arrives
        np.empty(
            (longest, steps + 1, words), np.uint64
        ),  # near [climbs, layer, word]: nodes by their way to demand
        np.empty((steps + 1, words), np.uint64),  # known [layer, word]: all nodes that are near
        np.empty((longest + 1, 3), np.int64),  # at [depth of path, (layer, node, climbs)]
        np.empty(longest + 1),  # want [depth of path]
        np.empty(longest + 1),  # sent [depth of path]
    )


def usable(capacities: Floats) -> Floats:
    """The same capacities, on the scale of 1, with 0 for those that carry nothing."""
    return np.ascontiguousarray(np.where(capacities > TINY, capacities, 0.0))
