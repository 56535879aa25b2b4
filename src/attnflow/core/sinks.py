"""`sinks`: the positions that nearly every other position attends to, whatever the text.

Their share means little, so that views leave them out and name them. A position is a sink if, in
most of the layers in which it can be judged, most rows give it a large share:

- It is judged in layers in which at least half of the other positions see it, and at least three.
  If a window hides it from more, or the text is shorter, it is not.
- A share is large if its odds are at least `ODDS` times those of even attention over the keys that
  the row may see, and if it is at least `LARGE_SHARE`. Odds, since a share of 1/2 cannot be 4 times
  as large; keys that the row may see, since even attention in a causal model gives early positions
  more than late ones.
- Most rows: `MOST_ROWS` of those that see it, without its own. Most layers: more than half.

Weights are judged before the residual is mixed in. Edges with the residual inside hold it on their
diagonal, so that their rows are judged without it, by what they take from other positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.graph import AttentionGraph
from attnflow.core.masks import LEAK, find_visible
from attnflow.core.request import Weights, name_positions, read_graph
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError

ODDS = 4.0  # how many times the odds of even attention
LARGE_SHARE = 0.05
MOST_ROWS = 0.75
FEWEST_ROWS = 3  # with fewer, "most rows" means little

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sink:
    """A position that takes a large share of most rows in most layers.

    Parameters
    ----------
    position
        The position, from 0.
    token
        Its token.
    share
        Its mean share of the rows of other positions that may see it, over layers.
    """

    position: int
    token: str
    share: float


def sinks(attention: Weights | TokenAttention) -> tuple[Sink, ...]:
    """Find the positions that take a large share of most rows in most layers, the largest first.

    A row's share is large if it is at least 0.05 and its odds are at least 4 times those of even
    attention over the keys that the row may see. A sink gets that from three quarters of the rows
    that see it, in more than half of the layers in which at least half of the positions, and three
    of them, see it.

    Parameters
    ----------
    attention
        An `Attention`, an `AttentionGraph`, or weights that `Attention` takes. Weights are judged
        before the residual is mixed in; edges that include it are judged without their diagonal. Or
        raw attention of some positions, as `raw_rows` computes it for inputs that are too long for
        a graph; then only these rows are judged.

    >>> every_row = [0.625, 0.125, 0.125, 0.125]  # on the first position
    >>> sinks([[every_row] * 4])
    (Sink(position=0, token='0', share=0.625),)
    >>> sinks([[[0.25] * 4] * 4])
    ()
    """
    positions: Sequence[int]
    if isinstance(attention, TokenAttention):
        tokens, positions, layers = attention.tokens, attention.positions, list_raw_rows(attention)
    else:
        graph = read_graph(attention)
        tokens, positions = name_positions(graph), range(graph.size)
        layers = list_rows(graph)
    size = len(tokens)
    own = np.array(positions)[:, None] == np.arange(size)  # [query, key]
    shares, judged, large = np.zeros(size), np.zeros(size, int), np.zeros(size, int)
    for rows, seen in layers:
        others = seen & ~own
        keys = seen.sum(axis=1, keepdims=True)
        # share / (1 - share) = ODDS / (keys - 1)
        least = np.maximum(LARGE_SHARE, ODDS / (ODDS + np.maximum(keys - 1, 1)))
        count = others.sum(axis=0)  # [key]: how many see it
        readers = int(others.any(axis=1).sum())
        counts = (count >= FEWEST_ROWS) & (2 * count >= readers - 1)
        taken = np.where(others, rows, 0.0)
        enough = ((taken >= least) & others).sum(axis=0) >= MOST_ROWS * count
        shares += np.where(counts, taken.sum(axis=0) / np.maximum(count, 1), 0.0)
        judged += counts
        large += counts & enough
    found = np.flatnonzero(2 * large > judged)
    every = [Sink(int(at), tokens[at], float(shares[at] / judged[at])) for at in found]
    return tuple(sorted(every, key=lambda sink: -sink.share))


def list_rows(graph: AttentionGraph) -> Iterator[tuple[Floats, BoolArray]]:
    """Rows of shares [query, key] of each layer, and which keys they may see."""
    everyone = list(range(graph.size))
    for layer, window in enumerate(graph.window, start=1):
        rows = graph.weight_rows([layer], everyone)[0]
        seen = find_visible(graph.size, graph.causal, window).copy()
        if graph.layer_names is not None:
            # positions that a layer does not touch attend to themselves
            seen &= (rows > 0) & (rows.sum(axis=1) - np.diagonal(rows) > LEAK)[:, None]
        seen[list(graph.removed)] = seen[:, list(graph.removed)] = False
        if graph.residual is None:
            whole = rows.sum(axis=1)
            np.fill_diagonal(rows, 0.0)
            np.fill_diagonal(seen, False)
            sums = rows.sum(axis=1)
            # next to nothing beside the diagonal is rounding
            sums = np.where(sums > LEAK * whole, sums, np.inf)[:, None]
            rows = rows / sums
        seen &= seen.sum(axis=1, keepdims=True) > 1  # a row that sees one key has no choice
        yield rows, seen


def list_raw_rows(raw: TokenAttention) -> Iterator[tuple[Floats, BoolArray]]:
    """The same for raw attention of some positions."""
    if raw.method != "raw" or raw.groups is not None or raw.edges != "attention":
        raise OptionError(
            f"sinks require raw attention to single tokens; got {raw!r} on {raw.edges} edges"
        )
    for layer, rows in zip(raw.layers, raw.values, strict=True):
        window = None if raw.window is None else raw.window[layer - 1]
        seen = find_visible(len(raw.tokens), raw.causal, window, list(raw.positions)).copy()
        seen[:, list(raw.removed)] = False
        yield rows, seen & (seen.sum(axis=1, keepdims=True) > 1)
