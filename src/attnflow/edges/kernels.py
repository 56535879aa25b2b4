"""The loops behind contribution and norm edges: numpy and numba only."""

import numpy as np
import numpy.typing as npt
from numba import njit

Singles = npt.NDArray[np.float32]

HEADS_TOGETHER = 4  # heads whose vectors are subtracted in one pass


# One part at a time, in a buffer of the model's width that stays in the nearest cache: the stream
# minus the vectors of each head. Sums are taken in any order (fastmath), within float32's rounding.
@njit(cache=True, nogil=True, fastmath=True)
def measure_contributions(
    first: int,
    last: int,
    weights: Singles,
    vectors: Singles,
    residual: Singles,
    stream: Singles,
    lengths: Singles,
    own: npt.NDArray[np.int64],
    edges: Singles,
) -> None:
    """Set edges [query, key] of keys first..last-1 to |y| - |y - part|, at least 0.

    weights: [head, query, key]; vectors: [head, key, width]; residual, stream: [query, width];
    lengths: [query], |y|.
    """
    heads, queries, _ = weights.shape
    width = stream.shape[1]
    grouped = heads - heads % HEADS_TOGETHER
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
            is_seen = is_own
            for h in range(heads):
                is_seen = is_seen or part[h] != 0.0
            if not is_seen:
                continue
            for k in range(width):
                rest[k] = stream[i, k]
            if is_own:
                for k in range(width):
                    rest[k] -= residual[i, k]
            for h in range(0, grouped, HEADS_TOGETHER):
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


# Half the products of a symmetric form are enough: those beside the diagonal count twice, and are
# already doubled in `products`. The innermost loop runs over keys, which are contiguous in memory.
@njit(cache=True, nogil=True, fastmath=True)
def measure_squares(weights: Singles, products: Singles, squares: Singles) -> None:
    """Set squares [query, key] to a' G a, a the weights of all heads on a key.

    weights: [head, query, key]; products: [pair of heads, key], G in the order (0, 0), (0, 1), ...,
    (1, 1), (1, 2), ..., doubled beside the diagonal.
    """
    heads, queries, keys = weights.shape
    inner = np.empty(keys, np.float32)
    total = np.empty(keys, np.float32)
    for i in range(queries):
        total[:] = 0.0
        pair = 0
        for h in range(heads):
            inner[:] = 0.0
            for g in range(h, heads):
                for j in range(keys):
                    inner[j] += products[pair, j] * weights[g, i, j]
                pair += 1
            for j in range(keys):
                total[j] += inner[j] * weights[h, i, j]
        squares[i] = total
