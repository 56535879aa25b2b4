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

    Supply and demand may be any two vectors: that is how solve.py cuts a deep problem down to a
    shallow one, and how several nodes of layer 0 become one target, into which all of them drain:
    its demand is the sum of their columns. Several nodes of the top layer become one source in the
    same way: its supply is the sum of their rows.

Capacities that carry nothing
    Maximum flow is homogeneous: capacities times s give the flow times s. So all capacities are
    divided by the largest row sum of the graph, and the flow is multiplied by it. On that scale a
    capacity of at most 2^-52 carries nothing, in any layer and at any depth: rounding leaves as
    much of a full edge, and no search could tell the two apart.

How it is solved
    By Dinic's algorithm, with one idea that suits dense layers: *which* edges can carry more is
    kept as bits, 64 edges to a machine word, beside the float64 numbers of *how much*. One AND
    then finds the useful edges of a node, and a search never looks at an edge that it does not
    use. The bits also mark the edges to restore before the next pair.

Why it is exact
    A search ends in one of two ways. Either the flow has met a cut, and no flow is larger than a
    cut. Or no path of unused capacity leads from supply to demand; then the edges from the nodes
    that cannot reach demand to those that can are all full, and they are such a cut (Ford and
    Fulkerson). Between this and exact arithmetic stand only sums of float64 numbers.
"""

import numpy as np

from attnflow.core.flow.capacities import TINY, read_capacity
from attnflow.core.flow.kernels import (
    ONE,
    find_lowest,
    find_shared,
    holds,
    kernel,
    part,
    remove,
    share,
)
from attnflow.core.flow.network import find_near, find_window, restore, set_window, take_back, use

MET = 1e-13  # a flow this close to a cut has met it, and the cut's capacity is the answer
MOST_SUPPLY = 0.6  # a column with more than this share of the supply goes first

# ---- which edge comes next -----------------------------------------------------------------------


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


# ---- the last steps ------------------------------------------------------------------------------


# The last step is most of the work. Nothing follows it, so it needs no path.
@part
def finish(u, amount, column, net):
    """Send an amount from node u of inner layer 1 into demand; return the rest."""
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
    """Send what fits of an amount from u through node v into demand; return the amount sent."""
    demand = net.demand[v]
    amount = min(amount, min(net.unused[0, u, v], demand))
    use(0, u, v, amount, net)
    net.demand[v] = demand - amount
    if demand - amount <= TINY:
        remove(net.near[0, 0], v)
    return amount


# The last step but one, without a path for the same reason. Each turn either sends all that is
# left, or fills the edge to v, or finds v useless: it ends.
@part
def finish_above(u, amount, column, net):
    """Send an amount from node u of inner layer 2 into demand; return the rest."""
    while amount > TINY:
        v = find_lower(2, u, 0, column, net)
        if v < 0:
            remove(net.near[0, 2], u)
            return amount
        want = min(amount, net.unused[1, u, v])
        sent = want - finish(v, want, column, net)
        if sent > 0.0:
            use(1, u, v, sent, net)
            amount -= sent
    return amount


# ---- sliding down the target's column ------------------------------------------------------------

# In a deep graph most of the flow enters the target's column high up and goes straight down from
# there. Walking down for each edge into the column would be most of the work. So the amounts that
# enter are summed by layer, and the column is booked once, from the sums. Until then `room` is at
# most what the column can still carry from its top, hence from any layer. An amount that does not
# fit into it is measured after the column has been booked.
#
# This is for the first phase only, in which no path climbs. There a path takes an edge of the
# column only after sliding down from its upper end has left something over. Whatever the reason, a
# full edge or the demand, `slide` has then booked the column, so that no path sees it out of date.


@part
def enter_column(layer, u, amount, column, net):
    """Send what fits of an amount from u down the target's column; return the amount sent."""
    if u == column:
        return slide(layer, amount, column, net)
    if not share(net.down[layer - 1, u], net.near[0, layer - 1], column):
        return 0.0
    amount = min(amount, net.unused[layer - 1, u, column])
    amount = slide(layer - 1, amount, column, net)
    if amount > 0.0:
        use(layer - 1, u, column, amount, net)
    return amount


@part
def slide(layer, amount, column, net):
    """Send what fits of an amount down the target's column into demand; return the amount sent."""
    sent = min(amount, net.demand[column])
    fits = sent <= net.room[0]
    if not fits:
        book_column(column, net)
        for step in range(layer):
            sent = min(sent, net.unused[step, column, column])
    if sent > TINY:
        net.entered[layer] += sent
        net.entered[0] += sent
        net.room[0] -= sent
        net.demand[column] -= sent
        if net.demand[column] <= TINY:
            remove(net.near[0, 0], column)
    else:
        sent = 0.0
    if sent < amount and net.entered[0] > 0.0:
        book_column(column, net)
    return sent


@part
def book_column(column, net):
    """Book what slid down the target's column, and measure what fits beside it."""
    room = np.inf
    amount = 0.0
    for step in range(net.up.shape[0] - 1, -1, -1):
        amount += net.entered[step + 1]
        net.entered[step + 1] = 0.0
        if amount > 0.0:
            use(step, column, column, amount, net)
        room = min(room, net.unused[step, column, column])
    net.entered[0] = 0.0
    net.room[0] = room


# ---- sending along a path ------------------------------------------------------------------------


@part
def push(tip, layer, u, climbs, want, net):
    """Put a node at the tip of the path, with what it is to send on."""
    net.path[tip, 0], net.path[tip, 1], net.path[tip, 2] = layer, u, climbs
    net.want[tip], net.sent[tip] = want, 0.0


# Every move goes to a node that is nearer to demand: down within near[climbs], or up into
# near[climbs - 1] along an edge that carries flow, which takes that flow back. So paths cannot
# circle, and a node found useless stays so for this phase.
@part
def extend(tip, column, first_phase, net):
    """Let the node at the tip send on; return whether the path has grown by a node for that."""
    layer, u, climbs = net.path[tip, 0], net.path[tip, 1], net.path[tip, 2]
    if first_phase and layer > 1 and net.want[tip] - net.sent[tip] > TINY:
        rest = net.want[tip] - net.sent[tip]
        net.sent[tip] += enter_column(layer, u, rest, column, net)
    rest = net.want[tip] - net.sent[tip]
    if rest <= TINY:
        return False
    if layer == 1 and climbs == 0:
        net.sent[tip] = net.want[tip] - finish(u, rest, column, net)
        return False
    if layer == 2 and climbs == 0:
        net.sent[tip] = net.want[tip] - finish_above(u, rest, column, net)
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
    """Send as much of a node's supply as fits along shortest paths; return the amount sent."""
    push(0, net.up.shape[0], origin, climbs, net.supply[origin], net)
    tip = 0
    while tip >= 0:
        if extend(tip, column, climbs == 0, net):
            tip += 1
        else:
            tip -= 1
            if tip >= 0:
                book(tip, net)
    net.supply[origin] -= net.sent[0]
    return net.sent[0]


# ---- the search ----------------------------------------------------------------------------------


# The source's own column is hardest to place in shallow graphs, and wherever it holds most of the
# supply: it goes first. This is a kernel, not a part: inlined, the hot loop would share its
# registers with the code around it.
@kernel
def send(climbs, enough, first, last, net):
    """One phase: send as much supply as fits, or `enough`, along shortest paths; return the sum."""
    top = net.up.shape[0]
    column = first + np.argmax(net.demand[first : last + 1])
    heaviest = first + np.argmax(net.supply[first : last + 1])
    own_first = top <= 2 or net.supply[heaviest] > MOST_SUPPLY * net.supply.sum()
    book_column(column, net)
    total = 0.0
    for turn in range(first - 1 if own_first else first, last + 1):
        origin = turn if turn >= first else heaviest
        if net.supply[origin] > TINY and holds(net.near[climbs, top], origin):
            total += send_from(origin, climbs, column, net)
            if total >= enough:
                break
    book_column(column, net)
    return total


# Each phase leaves no path of the length that it used (a blocking flow), so lengths grow and the
# phases end (Dinic). A bound of less than MET is met by half of it, never by 0, so that the flow to
# an unreachable target is 0.
@kernel
def search(bound, first, last, net):
    """The maximum flow through a network that carries none, or `bound` where the flow meets it."""
    flow = 0.0
    enough = bound - min(MET, 0.5 * bound)
    set_window(first, last, net)
    while flow < enough:
        climbs = find_near(first, last, net)
        if climbs < 0:
            return flow
        flow += send(climbs, enough - flow, first, last, net)
    return bound


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
