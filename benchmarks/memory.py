"""The memory of a row at 24 x 512, in MB above its input, printed; to be run in a fresh process as `memory.py weights|graph`.

weights: the input is the weights, so it counts the graph, which checks them and adds the residual, and the flow. graph: the input is
a graph with its edges, so it counts the flow alone. Another thread looks at the resident memory every 2 ms; kernels release the GIL.
"""

import sys
import threading
import warnings
from collections.abc import Callable

import psutil

import attnflow as af
from inputs import random

MB = 1e6
DEPTH, SIZE = 24, 512


def peak_above_start(task: Callable[[], object]) -> float:
    """The highest resident memory while the task runs, in MB above what it was before."""
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


if __name__ == "__main__":
    warnings.simplefilter("ignore", af.SaturationWarning)
    row(af.AttentionGraph(random(DEPTH, 16, 1.0)))  # loads the kernels
    weights = random(DEPTH, SIZE, 1.0)
    if sys.argv[1] == "weights":
        print(peak_above_start(lambda: row(af.AttentionGraph(weights))))
    else:
        graph = af.AttentionGraph(weights)
        assert graph.edges.any()  # made when first asked for
        print(peak_above_start(lambda: row(graph)))
