"""The loop behind lengths: numpy and numba only."""

from typing import Any

import numpy as np
from numba import njit


# Of a symmetric form half the products are enough: those beside the diagonal count twice, which
# `products` holds already. The innermost loop runs over keys, which lie side by side in memory.
@njit(cache=True, nogil=True, fastmath=True)
def measure_squares(weights: Any, products: Any, squares: Any) -> None:
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
