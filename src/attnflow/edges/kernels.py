"""The loops behind contribution and norm edges: numpy and numba only."""

import numpy as np
import numpy.typing as npt
from numba import njit

Singles = npt.NDArray[np.float32]

HEADS_TOGETHER = 4  # heads whose vectors are subtracted in one pass
QUERIES = 64  # whose streams stay in cache while the keys of a task go by


# Parts of four queries at a time, in buffers of the model's width that stay in the nearest cache:
# the stream minus the vectors of each head, each of which is read once for all four. Sums are taken
# in any order (fastmath), within float32's rounding.
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
    rest_1, rest_2 = np.empty(width, np.float32), np.empty(width, np.float32)
    rest_3, rest_4 = np.empty(width, np.float32), np.empty(width, np.float32)
    # the weights of these keys side by side: each cache line is fetched once for all of them
    beside = np.empty((last - first, QUERIES, heads), np.float32)
    seen = np.empty((last - first, QUERIES), np.bool_)
    for top in range(0, queries, QUERIES):
        bottom = min(top + QUERIES, queries)
        for i in range(top, bottom):
            for j in range(first, last):
                seen[j - first, i - top] = own[i] == j
            for h in range(heads):
                for j in range(first, last):
                    beside[j - first, i - top, h] = weights[h, i, j]
                    seen[j - first, i - top] |= weights[h, i, j] != 0.0
        for j in range(first, last):
            parts, sees = beside[j - first], seen[j - first]
            for i_1 in range(top, bottom, 4):
                # the last query stands in for those beyond it
                i_2, i_3 = min(i_1 + 1, bottom - 1), min(i_1 + 2, bottom - 1)
                i_4 = min(i_1 + 3, bottom - 1)
                if not (sees[i_1 - top] or sees[i_2 - top] or sees[i_3 - top] or sees[i_4 - top]):
                    continue
                part_1, part_2 = parts[i_1 - top], parts[i_2 - top]
                part_3, part_4 = parts[i_3 - top], parts[i_4 - top]
                for k in range(width):
                    rest_1[k], rest_2[k] = stream[i_1, k], stream[i_2, k]
                    rest_3[k], rest_4[k] = stream[i_3, k], stream[i_4, k]
                if own[i_1] == j:
                    for k in range(width):
                        rest_1[k] -= residual[i_1, k]
                if own[i_2] == j:
                    for k in range(width):
                        rest_2[k] -= residual[i_2, k]
                if own[i_3] == j:
                    for k in range(width):
                        rest_3[k] -= residual[i_3, k]
                if own[i_4] == j:
                    for k in range(width):
                        rest_4[k] -= residual[i_4, k]
                for h in range(0, grouped, HEADS_TOGETHER):
                    a_1, b_1, c_1, d_1 = part_1[h], part_1[h + 1], part_1[h + 2], part_1[h + 3]
                    a_2, b_2, c_2, d_2 = part_2[h], part_2[h + 1], part_2[h + 2], part_2[h + 3]
                    a_3, b_3, c_3, d_3 = part_3[h], part_3[h + 1], part_3[h + 2], part_3[h + 3]
                    a_4, b_4, c_4, d_4 = part_4[h], part_4[h + 1], part_4[h + 2], part_4[h + 3]
                    for k in range(width):
                        a, b = vectors[h, j, k], vectors[h + 1, j, k]
                        c, d = vectors[h + 2, j, k], vectors[h + 3, j, k]
                        rest_1[k] -= a_1 * a + b_1 * b + c_1 * c + d_1 * d
                        rest_2[k] -= a_2 * a + b_2 * b + c_2 * c + d_2 * d
                        rest_3[k] -= a_3 * a + b_3 * b + c_3 * c + d_3 * d
                        rest_4[k] -= a_4 * a + b_4 * b + c_4 * c + d_4 * d
                for h in range(grouped, heads):
                    a_1, a_2, a_3, a_4 = part_1[h], part_2[h], part_3[h], part_4[h]
                    for k in range(width):
                        rest_1[k] -= a_1 * vectors[h, j, k]
                        rest_2[k] -= a_2 * vectors[h, j, k]
                        rest_3[k] -= a_3 * vectors[h, j, k]
                        rest_4[k] -= a_4 * vectors[h, j, k]
                nothing = np.float32(0.0)
                sum_1, sum_2, sum_3, sum_4 = nothing, nothing, nothing, nothing
                for k in range(width):
                    sum_1 += abs(rest_1[k])
                    sum_2 += abs(rest_2[k])
                    sum_3 += abs(rest_3[k])
                    sum_4 += abs(rest_4[k])
                if sees[i_1 - top]:
                    edges[i_1, j] = max(nothing, lengths[i_1] - sum_1)
                if sees[i_2 - top]:
                    edges[i_2, j] = max(nothing, lengths[i_2] - sum_2)
                if sees[i_3 - top]:
                    edges[i_3, j] = max(nothing, lengths[i_3] - sum_3)
                if sees[i_4 - top]:
                    edges[i_4, j] = max(nothing, lengths[i_4] - sum_4)


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
