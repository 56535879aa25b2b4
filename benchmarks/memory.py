"""The memory of one row, printed. benchmarks/flow.py runs it in a fresh process:

    memory.py weights               flow at 24 x 512, in MB above its weights, including the making of the graph
    memory.py graph                 the same above its graph: the flow alone
    memory.py rollout 30 4000       the peak of the whole process, in multiples of the weights that it
    memory.py flow 30 4000          holds: 30 layers, 4,000 tokens, float32, causal as a decoder's

A causal graph has no waist (solve.py), so flow searches all of it, which takes the most memory. Another thread reads the resident
memory every 2 ms; kernels release the GIL.
"""

import sys
import threading
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import psutil

import attnflow as af
from inputs import SEED, random

MB = 1e6
DEPTH, SIZE = 24, 512


def peak_above_start(task: Callable[[], object]) -> float:
    """The highest resident memory while the task runs, in MB above that before."""
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    seen = [before]

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    task()
    seen.append(process.memory_info().rss)
    done.set()
    watcher.join()
    return float(max(seen) - before) / MB


def row(graph: af.AttentionGraph) -> object:
    """The flows from one node of the top layer."""
    return af.flow(graph, layers=[graph.depth], positions=[graph.size // 2], normalize=None)


def random_causal(depth: int, size: int) -> npt.NDArray[np.float32]:
    """softmax(normal logits) over the keys up to each query, made layer by layer."""
    rng = np.random.default_rng(SEED)
    weights = np.empty((depth, size, size), np.float32)
    for layer in weights:
        rng.standard_normal(out=layer, dtype=np.float32)
        np.exp(layer, out=layer)
        layer *= np.tri(size, dtype=bool)
        layer /= layer.sum(axis=-1, keepdims=True)
    return weights


def measure_row(method: str, depth: int, size: int) -> float:
    """The peak of this process for one row of the top layer, in multiples of its weights."""
    weights = random_causal(depth, size)

    def compute() -> af.TokenAttention:
        attention = af.Attention(weights, copy=False)
        return af.METHODS[method](attention, layers=[depth], positions=[size - 1])

    before = psutil.Process().memory_info().rss / MB
    return float(before + peak_above_start(compute)) * MB / weights.nbytes


def measure_flow(given: str) -> float:
    """The memory of a row of flow, in MB above what is given."""
    row(af.AttentionGraph(random(DEPTH, 16, 1.0)))  # loads the kernels
    weights = random(DEPTH, SIZE, 1.0)
    graph = af.AttentionGraph(weights) if given == "graph" else None
    return peak_above_start(lambda: row(graph or af.AttentionGraph(weights)))


if __name__ == "__main__":
    warnings.simplefilter("ignore", af.SaturationWarning)
    what, *shape = sys.argv[1:]
    print(measure_row(what, *map(int, shape)) if shape else measure_flow(what))
