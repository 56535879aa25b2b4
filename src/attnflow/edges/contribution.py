"""`contribution`: how much nearer a part brings the stream to what it is (ALTI).

The edge from query i to key j weighs max(0, |y_i| - |y_i - part(i, j)|), |.| the sum of absolute
values, y_i the stream after attention; rows sum to 1 (Ferrando et al. 2022; clipped as in
Ferrando and Voita 2024). It does not factor as lengths do, so each part is built, in one loop that
holds a single part at a time.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from attnflow.capturing.mix import LayerMix
from attnflow.edges.norm import normalise_edges

if TYPE_CHECKING:
    import torch

KEYS = 64  # of one task: four cache lines of weights; results do not depend on it


def weigh_contribution(mix: LayerMix) -> "torch.Tensor":
    """[query, key]: the contribution of each part, rows summing to 1."""
    import torch

    from attnflow.edges.kernels import measure_contributions

    lengths = mix.stream.abs().sum(dim=-1)
    arrays = [
        np.ascontiguousarray(tensor.cpu().numpy())
        for tensor in (mix.weights, mix.vectors, mix.residual, mix.stream, lengths, mix.own)
    ]
    queries, keys = mix.weights.shape[1:]
    edges = np.zeros((queries, keys), np.float32)

    def run(start: int) -> None:
        measure_contributions(start, min(start + KEYS, keys), *arrays, edges)

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        list(pool.map(run, range(0, keys, KEYS)))
    return normalise_edges(torch.from_numpy(edges), mix.own.cpu())
