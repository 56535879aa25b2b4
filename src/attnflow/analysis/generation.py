"""What a model generated, each token with its token attention over the prompt.

Position m-1+i is the one that predicted the i-th generated token, for a prompt of m tokens; so row
i of every result belongs to that position.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from attnflow.analysis.defaults import Plan
from attnflow.analysis.long_inputs import BY_ROWS, ROWS_ABOVE, RowReader
from attnflow.analysis.pipeline import GraphMaker, read_graph_maker
from attnflow.analysis.prompt_attention import PromptAttention, PromptTable, normalise_rows
from attnflow.analysis.summaries import summarise_generation
from attnflow.core.attention import Attention
from attnflow.core.custom import Choices, Method, read_methods, run_method
from attnflow.core.files import PICTURES, check_ending, write_file
from attnflow.core.formatting import format_count
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group
from attnflow.core.methods import METHODS
from attnflow.core.requests import NORMALIZATIONS
from attnflow.core.results import TokenAttention
from attnflow.core.sink_tokens import Sink, sinks
from attnflow.core.tables import TABLE_ENDINGS
from attnflow.edges.choosing import name_result
from attnflow.errors import OptionError
from attnflow.notices import ignore_notices


class GraphOptions(TypedDict, total=False):
    """The options of `Generation.by`, which `raw`, `rollout` and `flow` take too."""

    edges: str | None
    residual: float | None
    without: Sequence[int]
    normalize: str | None
    graph: GraphMaker | None
    workers: int


def refuse_options(
    edges: str, residual: float | None, without: Sequence[int], graph: GraphMaker | None
) -> None:
    """Refuse options that make a graph of attention, where it is made of other edges."""
    if residual is not None or graph is not None or len(without):
        raise OptionError(
            f"residual, without and graph make a graph of attention; got edges={edges!r} as well:"
            " leave them out"
        )


@dataclass(frozen=True, eq=False)
class Generation:
    """What a model generated, and the attention that it had while doing so.

    Parameters
    ----------
    text
        The generated text.
    tokens
        The generated tokens.
    probabilities
        Of each generated token, when it was chosen.
    prompt
        The tokens of the prompt.
    captured
        The attention over the prompt and all generated tokens but the last, which no position
        looked at; None after a long prompt, for which rows are computed instead.
    special
        The tokenizer's special tokens.
    graphs
        By the name of their edges, over the same positions as the attention.
    token_graphs
        By the name of edges that watch a token: a function that gives the graph of the i-th
        generated one, and computes it then.
    notes
        What is to be said of the generation.
    shown
        By kind of edges, the methods that a page shows if none are named; all of attnflow's on
        attention if None.
    row_readers
        After a long prompt, by kind of edges: a function that gives the rows of the positions that
        predicted, by raw attention or rollout, and computes them then.
    segments
        The turns of a chat, or the sentences of a long prompt, and last what is left; to be shown
        as one bar each. Empty for other prompts.
    """

    text: str
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]
    prompt: tuple[str, ...]
    captured: Attention | None  # [layer, 1, position, position]
    special: frozenset[str] = frozenset()
    graphs: Mapping[str, AttentionGraph] = field(default_factory=dict)
    token_graphs: Mapping[str, Callable[[int], AttentionGraph]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shown: Plan | None = None
    row_readers: Mapping[str, RowReader] = field(default_factory=dict)
    segments: tuple[Group, ...] = ()

    @property
    def attention(self) -> Attention:
        """The attention over the prompt and all generated tokens but the last."""
        if self.captured is None:
            raise OptionError(
                f"above {ROWS_ABOVE:,} tokens attention is not kept; raw and rollout of this"
                " generation compute its rows"
            )
        return self.captured

    @property
    def edges(self) -> tuple[str, ...]:
        """The kinds of edges that it has."""
        if self.row_readers:
            return tuple(self.row_readers)
        return (*self.graphs, "attention", *self.token_graphs)

    @property
    def size(self) -> int:
        """The number of prompt tokens, m."""
        return len(self.prompt)

    @property
    def positions(self) -> range:
        """The positions that predicted the generated tokens."""
        return range(self.size - 1, self.size - 1 + len(self.tokens))

    @cached_property
    def sinks(self) -> tuple[Sink, ...]:
        """The positions that take a large share of most rows in most layers, the largest first.

        Positions of prompt and generated tokens together; after a long prompt, by the rows of the
        positions that predicted.
        """
        if self.captured is not None:
            return sinks(self.captured)
        read = self.row_readers.get("attention")
        return () if read is None else sinks(read("raw", None, (), "sum"))

    @cached_property
    def first_result(self) -> PromptAttention:
        """What is shown first, rows summing to 1 over the prompt: rollout on the first edges."""
        edges, functions = next(iter(self.plan().items()))
        name = "rollout" if "rollout" in functions else next(iter(functions))
        with ignore_notices():  # whoever shows it says what is to be said of it
            return self.by({name: functions[name]}, edges=edges, normalize="sum")

    def summary(self) -> str:
        """What was read of the prompt, in a sentence, and which generated token stands out.

        By `first_result` in the top layer, with words joined and without sinks and special tokens,
        of which it says that they are left aside: shares are of the rest.
        """
        return summarise_generation(self)

    def by(
        self,
        method: Choices,
        *,
        edges: str | None = None,
        residual: float | None = None,
        without: Sequence[int] = (),
        normalize: str | None = None,
        graph: GraphMaker | None = None,
        workers: int = 1,
    ) -> PromptAttention:
        """Token attention over the prompt by any method: [generated, prompt, layer].

        Parameters
        ----------
        method
            The name of a method, a method of your own, or {name: method}.
        edges
            What an edge of the graph weighs: one of those that `generate` was asked for. If None,
            attention; or the first of them, if `generate` was asked for edges without attention.
        residual
            The weight of the residual connection, 0.5 if None; refused where edges hold it inside.
        without
            Positions to take out of the graph, for instance a sink; not those that predicted.
        normalize
            None: the part of each row that lies on the prompt, as it is (of flow, the maximum
            flows). "sum": rows sum to 1 over the prompt. "receptive_field": relative to what
            attention without preference would give, then the same.
        graph
            A function from an `Attention` to an `AttentionGraph`; `attention.graph()` if None.
        workers
            Threads for attention flow.
        """
        if normalize not in NORMALIZATIONS:
            raise OptionError(
                f"unknown normalize {normalize!r}; choose from 'sum', 'receptive_field' or None"
            )
        if edges is None:
            asked = self.plan()
            edges = "attention" if "attention" in asked else next(iter(asked), "attention")
        if not isinstance(edges, str):
            raise OptionError(f"edges must be the name of one kind of edges; got {edges!r}")
        methods = read_methods(method)
        if len(methods) != 1:
            raise OptionError(f"one method is asked for at a time; got {', '.join(methods)}")
        ((name, function),) = methods.items()
        relative = normalize if normalize == "receptive_field" else None

        def run(network: AttentionGraph, positions: Sequence[int]) -> TokenAttention:
            layers = list(range(1, network.depth + 1))
            options: dict[str, Any] = {"normalize": relative, "workers": workers}
            return run_method(
                name, function, network, layers=layers, positions=positions, **options
            )

        if self.row_readers:
            options = {"residual": residual, "without": without, "normalize": relative}
            results = [self._read_rows(function, edges, graph, options)]
        elif edges in self.token_graphs:
            refuse_options(edges, residual, without, graph)
            make = self.token_graphs[edges]
            results = [run(make(i), [position]) for i, position in enumerate(self.positions)]
        else:
            network = self._find_graph(edges, residual, without, graph)
            results = [run(network, list(self.positions))]
        # [generated, prompt, layer]
        values = np.concatenate(
            [result.values[:, :, : self.size].transpose(1, 2, 0) for result in results]
        )
        limited = [
            result.saturated[:, :, : self.size].transpose(1, 2, 0)
            for result in results
            if result.saturated is not None
        ]
        return PromptAttention(
            values if normalize is None else normalise_rows(values),
            name_result(edges, name),
            self.prompt,
            self.tokens,
            tuple(results[0].layers),
            self.special,
            saturated=np.concatenate(limited) if limited else None,
            edges=results[0].edges,
            source=results[0].source,
        )

    def _read_rows(
        self, function: Method, edges: str, graph: GraphMaker | None, options: dict[str, Any]
    ) -> TokenAttention:
        """The rows of the positions that predicted, after a long prompt."""
        self._check_edges(edges)
        if function not in BY_ROWS or graph is not None:
            raise OptionError(
                f"above {ROWS_ABOVE:,} tokens no graph is built, so raw and rollout are all there"
                f" is; got {'graph' if graph else 'another method'}: shorten the prompt"
            )
        if edges != "attention":
            refuse_options(edges, options["residual"], options["without"], graph)
        asked = {"residual": options["residual"], "without": tuple(options["without"])}
        read = self.row_readers[edges]
        return read(BY_ROWS[function], **asked, normalize=options["normalize"] or "sum")

    def _check_edges(self, edges: str) -> None:
        """Refuse edges that were not asked for."""
        if edges not in self.edges:
            raise OptionError(
                f"this generation has no edges {edges!r}; it has {', '.join(self.edges)}: name"
                f" them when generating, as generate(..., edges=['attention', {edges!r}])"
            )

    def _find_graph(
        self,
        edges: str,
        residual: float | None,
        without: Sequence[int],
        graph: GraphMaker | None,
    ) -> AttentionGraph:
        """The graph of one kind of edges, with these options."""
        self._check_edges(edges)
        if edges != "attention":
            refuse_options(edges, residual, without, graph)
            return self.graphs[edges]
        network = read_graph_maker(graph, residual, without)(self.attention)
        if set(self.positions) & set(network.removed):
            raise OptionError(
                f"without must leave the positions from {self.size - 1} on, which predicted;"
                f" got {list(network.removed)}"
            )
        return network

    def raw(self, **options: Unpack[GraphOptions]) -> PromptAttention:
        """Raw attention over the prompt: [generated, prompt, layer].

        Parameters
        ----------
        options
            As for `by`.
        """
        return self.by("raw", **options)

    def rollout(self, **options: Unpack[GraphOptions]) -> PromptAttention:
        """Attention rollout over the prompt: [generated, prompt, layer].

        Parameters
        ----------
        options
            As for `by`.
        """
        return self.by("rollout", **options)

    def flow(self, **options: Unpack[GraphOptions]) -> PromptAttention:
        """Attention flow to the prompt: [generated, prompt, layer].

        Parameters
        ----------
        options
            As for `by`.
        """
        return self.by("flow", **options)

    def plan(self, methods: Choices | None = None, edges: Sequence[str] | None = None) -> Plan:
        """By kind of edges, the methods that a page shows.

        Parameters
        ----------
        methods
            Names, or {name: function}; if None, what comes first, and all of attnflow's.
        edges
            Kinds of edges that this generation has; if None, those that `generate` was asked for,
            or attention where methods are named.
        """
        if methods is None and edges is None and self.shown is not None:
            return self.shown
        functions = read_methods(tuple(METHODS) if methods is None else methods)
        return dict.fromkeys(["attention"] if edges is None else edges, functions)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        methods: Choices | None = None,
        edges: Sequence[str] | None = None,
    ) -> Path:
        """Write the interactive page, a picture of the top layer, or numbers.

        A picture has a map for each kind of edges, of rollout or of the methods that are named;
        numbers are of the same, in all layers. Each generated token has its own scale. Special
        tokens and sinks, which would outshine the words, are not coloured, and it says their
        shares.

        Parameters
        ----------
        path
            The file; its ending says which: .html; .png, .svg, .pdf; .csv, .json, .npz, .md, .tex.
        methods, edges
            What is shown, as for `plan`.
        """
        plan = self.plan(methods, edges)
        ending = check_ending(path, [".html", *PICTURES, *TABLE_ENDINGS, ".npz"])
        if ending != ".html":
            results = []
            for kind, functions in plan.items():
                # where none is named, rollout stands for all of a kind
                named = functions if methods is not None else {"rollout": functions["rollout"]}
                results += [self.by({name: named[name]}, edges=kind) for name in named]
        if ending in PICTURES:
            from attnflow.show import figures

            taking = [sink.position for sink in self.sinks if sink.position < self.size]
            quiet: list[int | str] | str = (
                ["special", *taking] if len(taking) < self.size else "special"
            )
            return figures.compare_generations(results, exclude=quiet, scale="row").save(path)
        if ending != ".html":
            return PromptTable(self.text, self.probabilities, tuple(results)).save(path)
        from attnflow.show.page import generation_page

        page = generation_page(self, None if methods is None and edges is None else plan)
        return write_file(path, lambda file: file.write(page.encode(errors="backslashreplace")))

    def _repr_html_(self) -> str:
        from attnflow.show.page import framed, generation_page

        return framed(generation_page(self))

    def __repr__(self) -> str:
        after = f"{format_count(len(self.tokens), 'token')} after a prompt of {self.size}"
        return f"<Generation: {after}: {self.text[:60]!r}>"
