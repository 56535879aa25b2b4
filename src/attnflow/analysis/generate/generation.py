"""What a model generated, each token with its token attention over the prompt.

Position m-1+i predicted the i-th generated token, for a prompt of m tokens; row i of every result
is that of this position.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

from attnflow.analysis.explain.summary import summarise_generation
from attnflow.analysis.generate.edges import (
    AnswerRows,
    AttentionEdges,
    GeneratedEdges,
    join_rows,
    run_span,
)
from attnflow.analysis.generate.prompt_attention import (
    PromptAttention,
    PromptTable,
    normalise_prompt,
)
from attnflow.analysis.generate.spans import find_span, follow_answer
from attnflow.analysis.job import GraphMaker, Job, MethodChoice
from attnflow.analysis.long_inputs import ROWS_ABOVE
from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.checks import check_positions
from attnflow.core.choices import Choices, Method, read_methods
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, name_group
from attnflow.core.io.files import PICTURES, check_ending, write_file
from attnflow.core.io.formatting import format_count
from attnflow.core.io.tables import TABLE_ENDINGS
from attnflow.core.methods import METHODS, flow
from attnflow.core.sinks import Sink, sinks
from attnflow.core.text import number_marked
from attnflow.edges.edge_weight import name_result
from attnflow.errors import OptionError
from attnflow.models.chats import Range
from attnflow.notices import ignore_notices


class JobOptions(TypedDict, total=False):
    """The options of a `Job` that token attention of a generation takes."""

    residual: float | None
    without: Sequence[int]
    normalize: str | None
    graph: GraphMaker | None
    workers: int


class GraphOptions(JobOptions, total=False):
    """The options of `Generation.by`, which `raw`, `rollout`, `flow` and `span` take too."""

    edges: str | None
    through: bool


class AskedRows(NamedTuple):
    """A job, the edges that it is for, and the name of its result."""

    job: Job
    kind: GeneratedEdges
    name: str


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
    offsets
        Each generated token's characters in the text, none of special tokens; None if they are
        unknown.
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
    offsets: tuple[Range, ...] | None = None

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
        if not isinstance(result, PromptAttention | None):
            raise OptionError(
                f"result must be one of this generation, as .rollout(); got {type(result).__name__}"
            )
        asides = None if exclude is None else check_positions(exclude, self.size, "exclude")
        return summarise_generation(self, result, layer, asides)

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
        through: bool = False,
    ) -> PromptAttention:
        """Token attention over the prompt by any method: [generated, prompt, layer].

        Row i is that of the position that predicted the i-th generated token, which is the position
        before it.

        Parameters
        ----------
        method
            The name of a method, a user-defined method, or {name: method}.
        edges
            The weight of an edge of the graph: one of the edges that `generate` was called with.
            If None, attention, or the first of them if attention was not among them. Edges that
            watch a token take a forward and a backward pass per generated token.
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
        through
            Follow what lies on tokens that were generated before through their own rows, back to
            the prompt, over any number of tokens. Each row is first divided by its sum over prompt
            and answer; the result sums to 1 over the prompt. `.passed` holds the share that passed
            through each generated token. Refused for flow, of which rows do not add up.
        """
        asked = self._read(
            method,
            edges=edges,
            residual=residual,
            without=without,
            normalize=normalize,
            graph=graph,
            workers=workers,
            through=through,
        )
        rows = join_rows(asked.kind, asked.job, self.positions)
        if not through:
            return self._describe(asked, rows, rows.values[:, : self.size])
        reached, passed = follow_answer(rows.shares, self.size)
        return replace(self._describe(asked, rows, reached), passed=passed, answer=self.tokens)

    def span(
        self,
        method: Choices = "rollout",
        *,
        tokens: slice | str | Iterable[int] | None = None,
        **options: Unpack[GraphOptions],
    ) -> PromptAttention:
        """Token attention of a part of the answer, taken together: [1, prompt, layer].

        The mean of the rows of the positions that predicted its k tokens, each the position before
        its token, each 1/k: one row that starts at all of them. Where rows do not sum to 1, as on
        gradient and relevance edges, each is divided by its sum over prompt and answer first, so
        that tokens count alike.

        Parameters
        ----------
        method
            As for `by`. For flow, the maximum flow from all these positions together, which is not
            the mean of their flows; on a graph only, so not for edges that watch a token.
        tokens
            A slice or the numbers of generated tokens, or a part of `text` that stands in it once;
            the whole answer if None.
        options
            As for `by`. normalize=None: the part of the row that lies on the prompt.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from attnflow import replay
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
        >>> story = replay(model, [464, 1994], [318, 2626, 13])
        >>> story.span("rollout", tokens=slice(0, 2))
        <PromptAttention: rollout, 1 generated x 2 prompt tokens x 2 layers>
        """
        numbers = find_span(tokens, len(self.tokens), self.text, self.offsets)
        asked = self._read(method, **options)
        name = name_group(numbers, self.tokens, number_marked(self.tokens))
        if not options.get("through"):
            rows = run_span(asked.kind, asked.job, [self.positions[each] for each in numbers])
            return self._describe(asked, rows, rows.values[:, : self.size], (name,))
        rows = join_rows(asked.kind, asked.job, self.positions[: numbers[-1] + 1])
        reached, passed = follow_answer(rows.shares, self.size)
        chosen = list(numbers)
        return replace(
            self._describe(asked, rows, reached[chosen].mean(axis=0, keepdims=True), (name,)),
            passed=passed[chosen].mean(axis=0, keepdims=True),
            answer=self.tokens[: len(passed)],
        )

    def _read(
        self,
        method: Choices,
        *,
        edges: str | None = None,
        through: bool = False,
        **options: Unpack[JobOptions],
    ) -> "AskedRows":
        """The options of `by`, checked."""
        options.setdefault("normalize", None)
        job = Job.read(methods=method, **options)
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
        ((name, compute),) = job.named_methods.items()
        result = name_result(kind, name)
        if through:
            check_through(compute, job)
            result = f"{result} through the answer"
        return AskedRows(job, self.all_edges[kind], result)

    def _describe(
        self,
        asked: "AskedRows",
        rows: AnswerRows,
        values: Floats,
        generated: tuple[str, ...] | None = None,
    ) -> PromptAttention:
        """Values [generated, prompt, layer] as a result. generated: the names of its rows."""
        saturated = rows.saturated
        return PromptAttention(
            values if asked.job.normalize is None else normalise_prompt(values),
            asked.name,
            self.prompt,
            self.tokens if generated is None else generated,
            rows.layers,
            self.special,
            saturated=None if saturated is None else saturated[:, : self.size],
            edges=rows.edges,
            source=rows.source,
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


def check_through(method: Method, job: Job) -> None:
    """Refuse methods and options whose rows cannot be followed through an answer."""
    if method is flow:
        raise OptionError(
            "through follows rows that add up, and flows do not; got method='flow': take rollout"
        )
    if job.normalize == "receptive_field":
        raise OptionError(
            "through follows rows that sum to 1; got normalize='receptive_field': leave it out"
        )
