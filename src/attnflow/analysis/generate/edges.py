"""The edges of a generation: each kind computes token attention on its own graph, or as rows.

Attention, and edges recorded while the model generates, have one graph over all positions. Edges
that watch a token have one graph per generated token, made on demand. After a long prompt there is
no graph, only rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from attnflow.analysis.generate.prompt_attention import normalise_prompt
from attnflow.analysis.job import Job
from attnflow.analysis.long_inputs import BY_ROWS, ROWS_ABOVE, make_row_job
from attnflow.capturing.backward import pair_aims
from attnflow.core.arrays import Array, Floats
from attnflow.core.attention import Attention
from attnflow.core.choices import run_method
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import list_numbers
from attnflow.core.methods import flow, roll_span, rollout
from attnflow.core.provenance import Source
from attnflow.core.results import TokenAttention
from attnflow.edges.edge_weight import EdgeWeight
from attnflow.edges.graphs import compute_gradients, run_edges, watch_edges
from attnflow.errors import OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model
from attnflow.models.predict import FoilNumber
from attnflow.progress import progress_bar
from attnflow.rows.products import Recomputed, StoredAttention
from attnflow.rows.rows import compute_rows


class GeneratedEdges(Protocol):
    """One kind of edges of a generation."""

    @property
    def graph(self) -> AttentionGraph | None:
        """The graph over all positions, if there is one."""
        ...

    def find_graph(self, job: Job, positions: Sequence[int]) -> AttentionGraph | None:
        """The graph of a job, on which all these positions are; None if there is no such graph."""
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

    def find_graph(self, job: Job, positions: Sequence[int]) -> AttentionGraph:
        """The graph of a job, from which none of these positions may be removed."""
        graph = job.make_graph(self.attention)
        if set(positions) & set(graph.removed):
            raise OptionError(
                f"without must leave the positions that predicted, {list_numbers(positions)};"
                f" got {list(graph.removed)}"
            )
        return graph

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """One result of all positions."""
        return [run_on_graph(self.find_graph(job, positions), job, positions)]


@dataclass(frozen=True, eq=False)
class GraphEdges:
    """Edges recorded while the model generated, as one graph over all positions."""

    name: str
    graph: AttentionGraph

    def find_graph(self, job: Job, positions: Sequence[int]) -> AttentionGraph:
        """The graph, which has no options."""
        refuse_graph_options(self.name, job)
        return self.graph

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """One result of all positions."""
        return [run_on_graph(self.find_graph(job, positions), job, positions)]


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

    def find_graph(self, job: Job, positions: Sequence[int]) -> None:
        """None: each token has its own."""

    def run(self, job: Job, positions: Sequence[int]) -> list[TokenAttention]:
        """A result per position, each on the graph of its token."""
        refuse_graph_options(self.weight.name, job)
        results = []
        with progress_bar(f"{self.weight.name} edges of generated tokens") as tick:
            for done, position in enumerate(positions, start=1):
                graph = self.make_graph(position + 1 - self.prompt)
                results.append(run_on_graph(graph, job, [position]))
                tick(done, len(positions))
        return results


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
        The layers of a pass over all of them; if None, the model runs once more.
    computed
        The results so far, by method and options.
    """

    model: Model
    encoded: Encoded
    weight: EdgeWeight
    layers: Sequence[Recomputed | StoredAttention] | None = None
    graph: None = None
    computed: dict[tuple[object, ...], TokenAttention] = field(default_factory=dict)

    def find_graph(self, job: Job, positions: Sequence[int]) -> None:
        """None: only rows are computed."""

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


class AnswerRows(NamedTuple):
    """Rows of tokens of an answer, over the prompt and the answer."""

    values: Floats  # [generated, key, layer]
    saturated: npt.NDArray[np.bool_] | None  # of flow: [generated, key, layer]
    layers: tuple[int, ...]
    edges: str
    source: Source | None

    @property
    def shares(self) -> Floats:
        """The same, each row divided by its sum, unless it is all zeros."""
        if self.values.min(initial=0.0) < 0:
            raise OptionError(
                f"rows with negative values are no shares, and {self.edges} edges have some: take"
                " the rows of single tokens, by(...), or other edges"
            )
        return normalise_prompt(self.values)


def join_rows(kind: GeneratedEdges, job: Job, positions: Sequence[int]) -> AnswerRows:
    """The rows of these positions by the one method of a job."""
    results = kind.run(job, positions)
    size = results[-1].values.shape[2]  # later tokens see more

    def join(parts: Iterable[Array]) -> Array:
        """[generated, key, layer] of parts [layer, query, key]."""
        wide = [np.pad(part, ((0, 0), (0, 0), (0, size - part.shape[2]))) for part in parts]
        return np.concatenate(wide, axis=1).transpose(1, 2, 0)

    limited = [result.saturated for result in results if result.saturated is not None]
    return AnswerRows(
        join(result.values for result in results),
        join(limited) if limited else None,
        tuple(results[0].layers),
        results[0].edges,
        results[0].source,
    )


def run_span(kind: GeneratedEdges, job: Job, positions: Sequence[int]) -> AnswerRows:
    """One row: the mean of those of these positions, each divided by its sum first."""
    (method,) = job.named_methods.values()
    graph = None
    if method is flow or (method is rollout and job.normalize != "receptive_field"):
        graph = kind.find_graph(job, positions)
    if method is flow:
        return run_flow(graph, job, positions)
    if graph is None or graph.signed:
        rows = join_rows(kind, job, positions)
        return rows._replace(values=rows.shares.mean(axis=0, keepdims=True), saturated=None)
    layers = tuple(range(1, graph.depth + 1))
    values = roll_span(graph, positions).T[None]  # [1, key, layer]
    return AnswerRows(values, None, layers, graph.edge_name, graph.source.by_method("rollout"))


def run_flow(graph: AttentionGraph | None, job: Job, positions: Sequence[int]) -> AnswerRows:
    """One row: the maximum flow from these positions together."""
    if graph is None:
        raise OptionError(
            "flow from several tokens together needs one graph, which edges that watch a token and"
            " long prompts do not have; got method='flow': take rollout"
        )
    layers = tuple(range(1, graph.depth + 1))
    plain = None if job.normalize == "sum" else job.normalize
    result = flow(graph, layers=layers, sources=[positions], normalize=plain, workers=job.workers)
    values = result.values.transpose(1, 2, 0)
    return AnswerRows(values, None, layers, result.edges, result.source)


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
