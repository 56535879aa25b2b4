"""What a model generated, each token with its token attention over the prompt.

Position m-1+i predicted the i-th generated token, for a prompt of m tokens; row i of every result
is that of this position.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from attnflow.analysis.explain.summary import summarise_generation
from attnflow.analysis.generate.edges import AttentionEdges, GeneratedEdges
from attnflow.analysis.generate.prompt_attention import (
    PromptAttention,
    PromptTable,
    normalise_prompt,
)
from attnflow.analysis.job import GraphMaker, Job, MethodChoice
from attnflow.analysis.long_inputs import ROWS_ABOVE
from attnflow.core.attention import Attention
from attnflow.core.choices import Choices, read_methods
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group
from attnflow.core.io.files import PICTURES, check_ending, write_file
from attnflow.core.io.formatting import format_count
from attnflow.core.io.tables import TABLE_ENDINGS
from attnflow.core.methods import METHODS
from attnflow.core.sinks import Sink, sinks
from attnflow.edges.edge_weight import name_result
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


@dataclass(frozen=True, eq=False)
class Generation:
    """What a model generated, and its attention while it did so.

    Parameters
    ----------
    text
        The generated text.
    tokens
        The generated tokens.
    probabilities
        The probability of each generated token when it was chosen.
    prompt
        The tokens of the prompt.
    captured
        The attention over the prompt and all generated tokens but the last, which the model did not
        read; None after a long prompt, for which rows are computed instead.
    special
        The tokenizer's special tokens.
    other_edges
        All edges but the captured attention, by name. They compute token attention on graphs of
        their own, or as rows after a long prompt.
    notes
        Notes for the user: what was left out, and why.
    shown
        The methods that a page shows by default, each with its edges; all of attnflow's on
        attention if None.
    segments
        The turns of a chat, or the sentences of a long prompt, and last what is left, each shown
        as one bar. Empty for other prompts.
    """

    text: str
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]
    prompt: tuple[str, ...]
    captured: Attention | None  # [layer, 1, position, position]
    special: frozenset[str] = frozenset()
    other_edges: Mapping[str, GeneratedEdges] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shown: tuple[MethodChoice, ...] | None = None
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

    @cached_property
    def all_edges(self) -> dict[str, GeneratedEdges]:
        """All edges by name, the captured attention included."""
        known = dict(self.other_edges)
        return (
            known if self.captured is None else known | {"attention": AttentionEdges(self.captured)}
        )

    @property
    def edges(self) -> tuple[str, ...]:
        """The names of its edges."""
        return tuple(self.all_edges)

    @cached_property
    def graphs(self) -> dict[str, AttentionGraph]:
        """By edges, the graph over all positions; without edges that have none."""
        return {name: each.graph for name, each in self.all_edges.items() if each.graph is not None}

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
        if "attention" not in self.all_edges:
            return ()
        (rows,) = self.all_edges["attention"].run(Job.read(methods="raw"), self.positions)
        return sinks(rows)

    @cached_property
    def first_result(self) -> PromptAttention:
        """What is shown first, rows summing to 1 over the prompt: rollout on the first edges."""
        choices = self.plan()
        alike = [choice for choice in choices if choice.edges == choices[0].edges]
        first = next((choice for choice in alike if choice.method == "rollout"), alike[0])
        with ignore_notices():  # the views that show it give its notes
            return self.by({first.method: first.compute}, edges=first.edges, normalize="sum")

    def summary(
        self,
        result: PromptAttention | None = None,
        *,
        layer: int | None = None,
        exclude: Sequence[int] | None = None,
    ) -> str:
        """What was read of the prompt, in a sentence, and which generated token stands out.

        Words are joined. The sentence says whether sinks and special tokens are left aside; shares
        are of the rest.

        Parameters
        ----------
        result
            A result of this generation; rollout on its first edges if None.
        layer
            A layer of the result; the top one if None.
        exclude
            Positions of the prompt to leave aside; sinks and special tokens if None.
        """
        return summarise_generation(self, result, layer, exclude)

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
            The name of a method, a user-defined method, or {name: method}.
        edges
            The weight of an edge of the graph: one of the edges that `generate` was called with.
            If None, attention, or the first of them if attention was not among them.
        residual
            The weight of the residual connection, 0.5 if None; refused for edges that include it.
        without
            Positions to take out of the graph, such as a sink; not those that predicted.
        normalize
            None: the part of each row that lies on the prompt, as it is (for flow, the maximum
            flows). "sum": rows sum to 1 over the prompt. "receptive_field": relative to what
            attention without preference would give, then the same.
        graph
            A function from an `Attention` to an `AttentionGraph`; `attention.graph()` if None.
        workers
            Threads for attention flow.
        """
        job = Job.read(
            methods=method,
            residual=residual,
            without=without,
            normalize=normalize,
            graph=graph,
            workers=workers,
        )
        kind = self._default_edges if edges is None else edges
        if not isinstance(kind, str):
            raise OptionError(f"edges must be the name of one kind of edges; got {kind!r}")
        if kind not in self.all_edges:
            raise OptionError(
                f"this generation has no edges {kind!r}; it has {', '.join(self.edges)}: name"
                f" them when generating, as generate(..., edges=['attention', {kind!r}])"
            )
        if len(job.named_methods) != 1:
            raise OptionError(f"by takes one method; got {', '.join(job.named_methods)}")
        (name,) = job.named_methods
        results = self.all_edges[kind].run(job, self.positions)
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
            values if normalize is None else normalise_prompt(values),
            name_result(kind, name),
            self.prompt,
            self.tokens,
            tuple(results[0].layers),
            self.special,
            saturated=np.concatenate(limited) if limited else None,
            edges=results[0].edges,
            source=results[0].source,
        )

    @property
    def _default_edges(self) -> str:
        """Attention, unless `generate` was called with other edges only."""
        named = [choice.edges for choice in self.plan()]
        return "attention" if "attention" in named or not named else named[0]

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

    def plan(
        self, methods: Choices | None = None, edges: Sequence[str] | None = None
    ) -> tuple[MethodChoice, ...]:
        """The methods that a page shows, each with its edges.

        Parameters
        ----------
        methods
            Names, or {name: function}; if None, the default and all of attnflow's.
        edges
            Names of its edges; if None, those that `generate` was called with, or attention where
            methods are named.
        """
        if methods is None and edges is None and self.shown is not None:
            return self.shown
        functions = METHODS if methods is None else read_methods(methods)
        kinds = ["attention"] if edges is None else edges
        if not functions or not len(kinds):
            raise OptionError("at least one method and one kind of edges are needed; got none")
        return tuple(
            MethodChoice(kind, name, method) for kind in kinds for name, method in functions.items()
        )

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
        tokens and sinks, which would outshine the words, are not coloured; their shares are stated.

        Parameters
        ----------
        path
            The file; its ending says which: .html; .png, .svg, .pdf; .csv, .json, .npz, .md, .tex.
        methods, edges
            What is shown, as for `plan`.
        """
        plan = self.plan(methods, edges)
        ending = check_ending(path, [".html", *PICTURES, *TABLE_ENDINGS, ".npz"])
        if ending == ".html":
            page = self._make_page(None if methods is None and edges is None else plan)
            return write_file(path, lambda file: file.write(page.encode(errors="backslashreplace")))
        # by default, rollout stands for all methods on the same edges
        results = [
            self.by({choice.method: choice.compute}, edges=choice.edges)
            for choice in plan
            if methods is not None or choice.method == "rollout"
        ]
        if ending not in PICTURES:
            return PromptTable(self.text, self.probabilities, tuple(results)).save(path)
        from attnflow.show.figures.generation import compare_generations

        taking = [sink.position for sink in self.sinks if sink.position < self.size]
        excluded: list[int | str] | str
        excluded = ["special", *taking] if len(taking) < self.size else "special"
        return compare_generations(results, exclude=excluded, scale="row").save(path)

    def _repr_html_(self) -> str:
        from attnflow.show.page.page import framed

        return framed(self._make_page())

    def _make_page(self, plan: Sequence[MethodChoice] | None = None) -> str:
        from attnflow.analysis.page.page import describe_generation
        from attnflow.show.page.page import fill_page

        return fill_page(describe_generation(self, plan))

    def __repr__(self) -> str:
        after = f"{format_count(len(self.tokens), 'token')} after a prompt of {self.size}"
        return f"<Generation: {after}: {self.text[:60]!r}>"
