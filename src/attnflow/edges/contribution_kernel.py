"""The loop behind contributions: numpy and numba only."""

from typing import Any

import numpy as np
from numba import njit


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
    own: Any,
    edges: Any,
) -> None:
    """Set edges [query, key] of keys first..last-1 to |y| - |y - part|, at least 0.

    weights: [key, query, head]; vectors: [key, head, width]; residual, stream: [query, width].
    """
    queries, width = stream.shape
    heads = vectors.shape[1]
    lengths = np.empty(queries, np.float32)
    for i in range(queries):
        total = np.float32(0.0)
        for k in range(width):
            total += abs(stream[i, k])
        lengths[i] = total
    rest = np.empty(width, np.float32)
    for j in range(first, last):
        for i in range(queries):
            is_own = own[i] == j
            heard = is_own
            for h in range(heads):
                heard = heard or weights[j, i, h] != 0.0
            if not heard:
                continue
            for k in range(width):
                rest[k] = stream[i, k]
            for h in range(heads):
                weight = weights[j, i, h]
                for k in range(width):
                    rest[k] -= weight * vectors[j, h, k]
            if is_own:
                for k in range(width):
                    rest[k] -= residual[i, k]
            total = np.float32(0.0)
            for k in range(width):
                total += abs(rest[k])
            edges[i, j] = max(np.float32(0.0), lengths[i] - total)
