"""The maximum flows of many pairs at once, on any number of threads.

The cheapest steps come first: closed forms and bounds for all pairs, then a search through the
*waist* of a deep graph, then a search of the whole graph for the pairs that are still open. Up to
rounding, values do not depend on the step that found them: a flow that meets a cut is the cut's
capacity.

Edges [layer, query, key] may be any finite numbers that are not negative. They are scaled so that
the largest row sum is 1, and capacities that carry nothing on that scale (search.py) are 0 in every
supply and demand. Only the array that a search writes is float64 as a whole: one copy of the inner
layers per worker.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Array, Floats
from attnflow.core.flow.bounds import bound_from_below, solve_two_layers
from attnflow.core.flow.capacities import find_ways, keep_usable, measure_evenness
from attnflow.core.flow.network import Network, make_network
from attnflow.core.flow.search import MET, search_pairs
from attnflow.core.layers import Layers, rescale

Tick = Callable[[int, int], None]  # called with how much is done, and of how much
Sources = npt.NDArray[np.int64] | Sequence[Sequence[int]]  # nodes, or groups of nodes
# nodes of the searches in one block of work: well under a second, so that Ctrl-C is noticed
BLOCK_NODES = 400_000


# Demands. The nodes of a group drain into one target without limit, so node u of the lowest inner
# layer can hand on to the group the sum of its edges into it. Each of these edges must carry
# something by itself, so the sum is over usable edges.
def find_demands(lowest: Floats, groups: Sequence[Sequence[int]] | None) -> Floats:
    """[target, node] from the lowest edges [query, key]; a target is a key, or a group of keys."""
    columns = keep_usable(lowest).T
    if groups is not None:
        columns = np.stack([columns[list(group)].sum(axis=0) for group in groups])
    return np.ascontiguousarray(columns)


# Supplies, in the same way. A group is one source with an edge to each of its nodes that never
# fills: a node can hand on no more than the sum of its row, so that sum is capacity enough. Node u
# of the highest inner layer can then be given the sum of the group's edges into it.
def find_supplies(edges: Layers, sources: Sources) -> Floats:
    """[source, node] from the highest edges; a source is a query, or a group of queries."""
    if isinstance(sources, np.ndarray):
        return keep_usable(edges.rows(-1, sources))
    return np.stack([keep_usable(edges.rows(-1, list(group))).sum(axis=0) for group in sources])


# Outer cuts. All flow leaves the source and enters the target, so it is at most the sum of either
# side. In a causal graph edges never lead to a later position, so what reaches the target from
# source k stays between the first node with demand and k, and only that part of a sum counts. The
# first node with demand is the target itself, or the first of a group, or a later one. Of a group
# of sources, k is the last.
def bound_by_outer_cuts(
    supplies: Floats, demands: Floats, sources: Sources, causal: bool
) -> Floats:
    """[source, target]: the smaller of what can leave the source and can enter the target."""
    if causal:
        first = (demands > 0).argmax(axis=1)  # [target]; any node without demand
        leaving = supplies[:, ::-1].cumsum(axis=1)[:, ::-1][:, first]  # from there on
        last = [np.max(source) for source in sources]
        entering = demands.cumsum(axis=1)[:, last].T  # up to the source
    else:
        leaving = supplies.sum(axis=1)[:, None]  # [source, 1]
        entering = demands.sum(axis=1)[None, :]  # [1, target]
    return np.ascontiguousarray(np.minimum(leaving, entering), dtype=np.float64)


# ---- deep graphs: most layers only mix, and need no search --------------------------------------


# Carrying an amount through a step. Node u hands out its amount, or its row sum if that is less,
# in the proportions of its row: edge (u, v) carries min(amount[u] / row sum[u], 1) * edge[u, v],
# which fits, whatever the rows sum to. (Where rows sum to 1 this is attention rollout, seen as a
# flow.) A node that hands out less than it was given is given less: each unit that arrives has a
# path. A demand is carried up in the same way, by the columns. So every flow between a lowered
# supply and a raised demand extends to a flow of the whole graph, and where it meets a cut of the
# whole graph it is a maximum flow.
def carry(amounts: Floats, step: Floats) -> Floats:
    """amounts [end, node] carried through a step [node, next node]: [end, next node]."""
    sums = step.sum(axis=1)
    return np.minimum(amounts / np.where(sums > 0, sums, 1.0), 1.0) @ step


def lower_supplies(supplies: Floats, steps: Layers) -> Floats:
    """supplies [source, node] carried down through steps [step, upper, lower]."""
    for step in steps[::-1]:
        supplies = carry(supplies, keep_usable(step))
    return supplies


def raise_demands(demands: Floats, steps: Layers) -> Floats:
    """demands [target, node] carried up through steps [step, upper, lower]."""
    for step in steps:
        demands = carry(demands, keep_usable(step).T)
    return demands


# steps that are searched: one leaves too little choice; three take longer and succeed no more often
WAIST = 2
WORTH_A_WAIST = 5  # with fewer steps, a waist saves too little
PROBES = 6  # pairs tried before a place for the waist is trusted


@dataclass(frozen=True)
class Problem:
    """Many pairs of one graph; terms as in search.py."""

    supplies: Floats  # [source, node]
    demands: Floats  # [target, node]
    inner: Layers
    bounds: Floats  # [source, target]: no flow is larger
    causal: bool

    def narrow(self, place: int) -> "Problem":
        """The problem between inner layers `place` and `place + WAIST`.

        Supplies are lowered to it, and demands raised.
        """
        above, below = place + WAIST, place
        supplies = lower_supplies(self.supplies, self.inner[above:])
        demands = raise_demands(self.demands, self.inner[:below])
        return Problem(supplies, demands, self.inner[below:above], self.bounds, self.causal)


# A waist is tried where attention is most even. In a causal graph it never is: amounts carried
# there leak out of the window, so they meet no bound.
def find_waist(problem: Problem) -> Problem | None:
    """A waist where a few probes meet their bounds, or None."""
    steps = len(problem.inner)
    if problem.causal or steps < WORTH_A_WAIST:
        return None
    evenness = measure_evenness(problem.inner.held)
    places = sorted(
        range(1, steps - WAIST), key=lambda place: -evenness[place : place + WAIST].sum()
    )
    sources, targets = problem.bounds.shape
    probe = np.full(problem.bounds.shape, np.inf)
    pairs = np.linspace(0, sources * targets - 1, PROBES).astype(int)
    for place in places[:2]:
        waist = problem.narrow(place)
        probe[:] = 0.0
        probe.T.flat[pairs] = np.nan
        solve(waist, probe)
        if np.mean(probe.T.flat[pairs] >= problem.bounds.T.flat[pairs]) > 0.5:
            return waist
    return None


# ---- all pairs -----------------------------------------------------------------------------------


# The blocks of work do not depend on the number of workers, so neither do the flows, bit for bit.
def solve(problem: Problem, flows: Floats, workers: int = 1, tick: Tick | None = None) -> None:
    """Search every pair of flows [source, target] that is NaN."""
    if not np.isnan(flows).any():
        return
    steps, nodes, _ = problem.inner.shape
    block = max(1, BLOCK_NODES // (nodes * (steps + 1)))
    starts = range(0, flows.size, block)
    inner = problem.inner.held
    ways = find_ways(inner)
    networks: queue.SimpleQueue[Network] = queue.SimpleQueue()
    for _ in range(min(workers, len(starts))):
        networks.put(make_network(inner, ways))

    def search_block(start: int) -> None:
        mine = networks.get()
        stop = min(start + block, flows.size)
        search_pairs(
            start,
            stop,
            problem.supplies,
            problem.demands,
            problem.causal,
            problem.bounds,
            flows,
            mine,
        )
        networks.put(mine)

    for _ in run_tasks(search_block, starts, workers):
        if tick is not None:
            tick(int(np.count_nonzero(flows == flows)), flows.size)


# An interruption waits only for running tasks.
def run_tasks(task: Callable[[int], None], items: range, workers: int) -> Iterator[None]:
    """Run the task on every item, on `workers` threads."""
    if workers == 1 or len(items) == 1:
        yield from map(task, items)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(task, items)
    finally:
        pool.shutdown(cancel_futures=True)


def settle(problem: Problem, flows: Floats, workers: int, tick: Tick | None) -> None:
    """Find every flow that is NaN: through a waist if it meets the bound, else in the graph."""
    waist = find_waist(problem) if np.isnan(flows).any() else None
    if waist is not None:
        through = np.where(np.isnan(flows), np.nan, -np.inf)
        solve(waist, through, workers, tick)
        np.copyto(flows, problem.bounds, where=through >= problem.bounds)
    solve(problem, flows, workers, tick)


class FlowOptions(TypedDict, total=False):
    """The options of `find_flows` and `find_all_flows`."""

    groups: Sequence[Sequence[int]] | None
    scale: float | None
    causal: bool
    workers: int
    tick: Tick | None


def find_flows(
    edges: Layers | Array,
    sources: Sources,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    scale: float | None = None,
    causal: bool = False,
    workers: int = 1,
    tick: Tick | None = None,
) -> Floats:
    """[source, target]: the maximum flows from nodes of the top layer, or groups, to layer 0.

    edges [layer, query, key]. The targets are the nodes of layer 0, or groups of them. scale: the
    largest row sum of the graph that the layers belong to, computed if None.
    """
    edges, scale = rescale(edges, scale)
    demands = find_demands(edges[0], groups)
    if len(edges) == 1:
        direct = [demands[:, source].reshape(len(demands), -1).sum(axis=1) for source in sources]
        return scale * np.stack(direct)
    supplies = find_supplies(edges, sources)
    flows = np.full((len(supplies), len(demands)), np.nan)
    if len(edges) == 2:
        solve_two_layers(supplies, demands, flows)
    else:
        bounds = bound_by_outer_cuts(supplies, demands, sources, causal)
        settle(Problem(supplies, demands, edges[1:-1], bounds, causal), flows, workers, tick)
    flows *= scale
    return flows


def find_all_flows(
    edges: Layers | Array,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    scale: float | None = None,
    causal: bool = False,
    workers: int = 1,
    tick: Tick | None = None,
) -> Floats:
    """[layer, source, target]: the maximum flows from every node of layers 1..depth, bottom up.

    edges, groups and scale as for `find_flows`.
    """
    edges, scale = rescale(edges, scale)
    depth, nodes, _ = edges.shape
    everyone = np.arange(nodes)
    demands = find_demands(edges[0], groups)
    flows = np.full((depth, nodes, len(demands)), np.nan)
    flows[0] = demands.T
    if depth > 1:
        solve_two_layers(keep_usable(edges[1]), demands, flows[1])
    for layer in range(2, depth):
        supplies = keep_usable(edges[layer])
        most, least = bound_from_below(supplies, flows[layer - 1])
        bounds = np.minimum(bound_by_outer_cuts(supplies, demands, everyone, causal), most)
        np.copyto(flows[layer], bounds, where=least >= bounds - MET)
        problem = Problem(supplies, demands, edges[1:layer], bounds, causal)
        settle(problem, flows[layer], workers, narrow_tick(tick, layer, depth))
    flows *= scale
    return flows


def narrow_tick(tick: Tick | None, part: int, parts: int) -> Tick | None:
    """The progress of one of several equal parts, as progress of the whole."""
    return None if tick is None else lambda done, total: tick(part * total + done, parts * total)
