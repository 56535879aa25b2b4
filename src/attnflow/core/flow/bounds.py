"""Maximum flows without a search, and bounds of others; terms as in search.py."""

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.flow.capacities import TINY
from attnflow.core.flow.kernels import kernel, part


# Two edges in a row. Each path source -> u -> target stands alone, so it carries the smaller of
# its two capacities.
@kernel
def solve_two_layers(supplies, demands, flows):
    """Set flows [source, target] to the exact flow through one inner layer."""
    for k in range(flows.shape[0]):
        for m in range(flows.shape[1]):
            total = 0.0
            for u in range(supplies.shape[1]):
                total += min(supplies[k, u], demands[m, u])
            flows[k, m] = total


# Upwards. The flow through node u fits the edge to u, and it is a flow from u to the target, so it
# is at most u's own maximum. Hence flow(k, m) <= sum over u of min(edge[k, u], below[u, m]):
# the flow through one inner layer, with below as its demand.
#
# Downwards. Let g_u be a maximum flow from u. For weights w_u >= 0 with sum at most 1, the mixture
# of all w_u g_u fits every capacity, since each g_u does; and node u can be given
# w_u below[u, m] <= edge[k, u]. The best weights fill the largest below[u, m] first.
#
# Neither asks what the rows sum to, nor whether m is one node or several that drain into one.
# Closure: if every u takes in all that m can, below[u, m] = c_m, then the weights edge[k, u] / c_m
# give min(row sum of k, c_m), the outer cut of k: deep layers close without a search.
def bound_from_below(supplies: Floats, below: Floats) -> tuple[Floats, Floats]:
    """Upper and lower bounds [source, target] by below [node, target], the flows one layer down."""
    demands = np.ascontiguousarray(below.T)  # [target, node]
    upper, lower = np.empty((2, len(supplies), len(demands)))
    solve_two_layers(supplies, demands, upper)
    mix_flows(supplies, demands, np.argsort(-demands, axis=1, kind="stable"), lower)
    return upper, lower


@kernel
def mix_flows(supplies, demands, order, flows):
    """Set flows [source, target] to the best mixtures; order [target, rank] of falling demand."""
    for k in range(flows.shape[0]):
        for m in range(flows.shape[1]):
            flows[k, m] = mix(supplies[k], demands[m], order[m])


@part
def mix(supply, demand, order):
    """The flow of the best mixture, for one pair."""
    unspent = 1.0
    total = 0.0
    for u in order:
        if unspent <= 0.0 or demand[u] <= TINY:
            break
        weight = min(unspent, supply[u] / demand[u])
        unspent -= weight
        total += weight * demand[u]
    return total
