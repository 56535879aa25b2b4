"""The edges of a generation: each kind computes token attention on its own graph, or as rows.

Attention, and edges recorded while the model generates, have one graph over all positions. Edges
that watch a token have one graph per generated token, made on demand. After a long prompt there is
no graph, only rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from attnflow.analysis.job import Job
from attnflow.analysis.long_inputs import BY_ROWS, ROWS_ABOVE, make_row_job
from attnflow.capturing.backward import pair_aims
from attnflow.core.attention import Attention
from attnflow.core.choices import run_method
from attnflow.core.graph import AttentionGraph
from attnflow.core.results import TokenAttention
from attnflow.edges.edge_weight import EdgeWeight
from attnflow.edges.graphs import compute_gradients, run_edges, watch_edges
from attnflow.errors import OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model
from attnflow.models.predict import FoilNumber
from attnflow.rows.products import Recomputed
from attnflow.rows.rows import compute_rows


class GeneratedEdges(Protocol):
    """One kind of edges of a generation."""

    @property
    def graph(self) -> AttentionGraph | None:
        """The graph over all positions, if there is one."""
        ...

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """Run the one method of a job: one result of all these positions, or one of each."""
        ...


@dataclass(frozen=True, eq=False)
class AttentionEdges:
    """The captured attention; the options of a job make its graph."""

    attention: Attention

    @cached_property
    def graph(self) -> AttentionGraph:
        """The graph with default options."""
        return self.attention.graph()

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """One result of all positions, none of which may be removed."""
        graph = job.make_graph(self.attention)
        if set(positions) & set(graph.removed):
            raise OptionError(
                f"without must leave the positions from {positions[0]} on, which predicted;"
                f" got {list(graph.removed)}"
            )
        return [run_on_graph(graph, job, positions)]


@dataclass(frozen=True, eq=False)
class GraphEdges:
    """Edges recorded while the model generated, as one graph over all positions."""

    name: str
    graph: AttentionGraph

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """One result of all positions."""
        refuse_graph_options(self.name, job)
        return [run_on_graph(self.graph, job, positions)]


@dataclass(frozen=True, eq=False)
class TokenEdges:
    """Edges that watch a token.

    Parameters
    ----------
    model
        The model that generated.
    ids
        The prompt and the generated tokens.
    prompt
        The number of tokens of the prompt.
    weight
        The edge weight.
    foil
        What each token is contrasted with; None if only the token is watched.
    """

    model: Model
    ids: tuple[int, ...]
    prompt: int
    weight: EdgeWeight
    foil: FoilNumber | None = None
    graph: None = None

    def make_graph(self, number: int) -> AttentionGraph:
        """Compute the graph of the i-th generated token.

        It takes a forward pass over the positions before the token, and a backward pass from it.
        """
        token, name = self.prompt + number, self.weight.name
        if self.ids[token] == self.foil:
            raise OptionError(
                f"a foil is another token; got {self.model.label(self.foil)!r}, which is generated"
                f" token {number}: give attnflow.RUNNER_UP, the most probable other token"
            )
        encoded, chosen = [self.model.encode(list(self.ids[:token]))], {name: self.weight}
        watches = watch_edges(self.model, chosen, pair_aims([self.ids[token]], [self.foil]))
        gradients = compute_gradients(self.model, encoded, watches)
        return run_edges(self.model, encoded, chosen, gradients=gradients).graphs[0][name]

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """A result per position, each on the graph of its token."""
        refuse_graph_options(self.weight.name, job)
        return [
            run_on_graph(self.make_graph(number), job, [position])
            for number, position in enumerate(positions)
        ]


@dataclass(frozen=True, eq=False)
class RowEdges:
    """Edges after a long prompt: rows of raw attention and rollout, computed on demand.

    Parameters
    ----------
    model, encoded
        The model, and all tokens but the last one, which it did not read.
    weight
        The weight of an edge.
    layers
        The layers recorded while the model generated; if None, the model runs once more.
    computed
        The results so far, by method and options.
    """

    model: Model
    encoded: Encoded
    weight: EdgeWeight
    layers: Sequence[Recomputed] | None = None
    graph: None = None
    computed: dict[tuple[object, ...], TokenAttention] = field(default_factory=dict)

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """One result of all positions."""
        (method,) = job.named_methods.values()
        if method not in BY_ROWS or job.graph is not None:
            given = "another method" if job.graph is None else "graph"
            raise OptionError(
                f"above {ROWS_ABOVE:,} tokens no graph is built, so only raw and rollout are"
                f" available; got {given}: shorten the prompt"
            )
        if self.weight.name != "attention":
            refuse_graph_options(self.weight.name, job)
        options = (BY_ROWS[method], tuple(positions), job.residual, job.without, job.normalize)
        if options not in self.computed:
            row_job = make_row_job(self.model, self.encoded, self.weight, *options)
            ((result,), _) = compute_rows(self.model, self.encoded, [row_job], known=self.layers)
            self.computed[options] = result
        return [self.computed[options]]


def run_on_graph(graph: AttentionGraph, job: Job, positions: Sequence[int]) -> TokenAttention:
    """All layers of the one method of a job. "sum" is left to the part of rows on the prompt."""
    ((name, method),) = job.named_methods.items()
    return run_method(
        name,
        method,
        graph,
        layers=list(range(1, graph.depth + 1)),
        positions=list(positions),
        normalize=None if job.normalize == "sum" else job.normalize,
        workers=job.workers,
    )


def refuse_graph_options(edges: str, job: Job) -> None:
    """Refuse options that make a graph of attention, where it is made of other edges."""
    if job.residual is not None or job.graph is not None or job.without:
        raise OptionError(
            f"residual, without and graph make a graph of attention; got edges={edges!r} as well:"
            " leave them out",
            options=[f"edges={edges!r}"],
        )
