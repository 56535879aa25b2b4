"""The loop behind contributions: numpy and numba only."""

from typing import Any

import numpy as np
from numba import njit

TOGETHER = 4  # heads whose vectors are taken away in one go


# One part at a time, in a buffer of the model's width that stays in the nearest cache: the stream,
# less what each head brought. Sums are added up in any order (fastmath), within float32's rounding.
@njit(cache=True, nogil=True, fastmath=True)
def measure_contributions(
    first: int,
    last: int,
    weights: Any,
    vectors: Any,
    residual: Any,
    stream: Any,
    lengths: Any,
    own: Any,
    edges: Any,
) -> None:
    """Set edges [query, key] of keys first..last-1 to |y| - |y - part|, at least 0.

    weights: [head, query, key]; vectors: [head, key, width]; residual, stream: [query, width];
    lengths: [query], |y|.
    """
    heads, queries, _ = weights.shape
    width = stream.shape[1]
    grouped = heads - heads % TOGETHER
    rest = np.empty(width, np.float32)
    # the weights of these keys side by side: each cache line is fetched once for all of them
    beside = np.empty((last - first, queries, heads), np.float32)
    for h in range(heads):
        for i in range(queries):
            for j in range(first, last):
                beside[j - first, i, h] = weights[h, i, j]
    for j in range(first, last):
        for i in range(queries):
            part = beside[j - first, i]
            is_own = own[i] == j
            heard = is_own
            for h in range(heads):
                heard = heard or part[h] != 0.0
            if not heard:
                continue
            for k in range(width):
                rest[k] = stream[i, k]
            if is_own:
                for k in range(width):
                    rest[k] -= residual[i, k]
            for h in range(0, grouped, TOGETHER):
                a, b, c, d = part[h], part[h + 1], part[h + 2], part[h + 3]
                for k in range(width):
                    rest[k] -= (
                        a * vectors[h, j, k]
                        + b * vectors[h + 1, j, k]
                        + c * vectors[h + 2, j, k]
                        + d * vectors[h + 3, j, k]
                    )
            for h in range(grouped, heads):
                weight = part[h]
                for k in range(width):
                    rest[k] -= weight * vectors[h, j, k]
            total = np.float32(0.0)
            for k in range(width):
                total += abs(rest[k])
            edges[i, j] = max(np.float32(0.0), lengths[i] - total)
