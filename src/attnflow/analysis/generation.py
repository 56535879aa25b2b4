"""What a model generated, each token with its token attention over the prompt.

Position m-1+i is the one that predicted the i-th generated token, for a prompt of m tokens; so row
i of every result belongs to that position.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from attnflow.analysis.pipeline import GraphMaker, read_graph_maker
from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.custom import Choices, read_methods, run_method
from attnflow.core.files import PICTURES, check_ending, dump_json, write_by_ending, write_file
from attnflow.core.graph import AttentionGraph
from attnflow.core.provenance import Source
from attnflow.core.requests import NORMALIZATIONS
from attnflow.core.results import TokenAttention, measure_spread
from attnflow.core.tables import Table
from attnflow.core.text import COMMON_WORDS, is_common
from attnflow.core.views import format_heat_map
from attnflow.edges.choosing import name_result
from attnflow.errors import OptionError, ShareWarning
from attnflow.notices import give_notice

LITTLE = 0.01  # a kept share below this is warned of


@dataclass(frozen=True, eq=False)
class PromptAttention(Table):
    """M: how much each prompt token reached each generated one, in each layer.

    Parameters
    ----------
    values
        [generated token, prompt token, layer]; np.asarray gives them too.
    method
        The name of the method.
    prompt, generated
        The names of the tokens.
    layers
        The numbers of the layers.
    special
        The tokenizer's special tokens.
    kept
        [generated token, layer]: the share of each row that `filtered` kept, before the rest was
        made to sum to 1; None if nothing was filtered.
    saturated
        [generated token, prompt token, layer], of flow: where source or target alone limit it.
    edges
        What an edge of the graph weighs.
    source
        Where the values came from.

    >>> found = PromptAttention(np.full((1, 2, 1), 0.5), "rollout", ("the", "key"), ("is",), (1,))
    >>> list(found.rows())
    [('rollout', 1, 0, 'is', 0, 'the', 0.5), ('rollout', 1, 0, 'is', 1, 'key', 0.5)]
    """

    columns: ClassVar = ("method", "layer", "position", "query", "key", "token", "value")

    values: Floats  # [generated, prompt, layer]
    method: str
    prompt: tuple[str, ...]
    generated: tuple[str, ...]
    layers: tuple[int, ...]
    special: frozenset[str] = frozenset()
    kept: Floats | None = None  # [generated, layer]
    saturated: npt.NDArray[np.bool_] | None = None  # [generated, prompt, layer]
    edges: str = "attention"
    source: Source | None = None

    @cached_property
    def spread(self) -> Floats:
        """[generated token, layer]: 0 where a row is even over the prompt, 1 if all is on one."""
        rows = self.values.transpose(0, 2, 1)  # [generated, layer, prompt]
        return measure_spread(rows, np.ones(rows.shape, bool))

    def filtered(
        self,
        *,
        words: Collection[str] = COMMON_WORDS,
        punctuation: bool = True,
        special: bool = True,
    ) -> "PromptAttention":
        """The same without some prompt tokens, the rest summing to 1 again.

        `.kept` says how much of each row the rest was; a warning says where it was next to nothing,
        since then what is shown is the noise that filtering left.

        Parameters
        ----------
        words
            Words to take out, in lower case; English function words by default.
        punctuation, special
            Whether to take out punctuation, and the tokenizer's special tokens.
        """
        unwanted = {word.lower() for word in words}

        def stays(token: str) -> bool:
            if token in self.special:
                return not special
            return not is_common(token, unwanted, punctuation)

        places = [place for place, token in enumerate(self.prompt) if stays(token)]
        if not places:
            raise OptionError(
                "filtering must leave at least one prompt token; got none:"
                " give words=() or punctuation=False"
            )
        whole = self.values.sum(axis=1)  # [generated, layer]
        values = self.values[:, places]
        sums = values.sum(axis=1)
        kept = np.divide(sums, whole, out=np.zeros_like(sums), where=whole > 0)
        kept = kept if self.kept is None else kept * self.kept
        if kept[:, -1].min() < LITTLE:
            give_notice(
                f"filtering kept {kept[:, -1].min():.2g} of a row of {self.method}: what is shown"
                " is what the tokens that were taken out left over; look at it unfiltered",
                ShareWarning,
            )
        return replace(
            self,
            values=normalise_rows(values),
            prompt=tuple(self.prompt[place] for place in places),
            kept=kept,
            saturated=None if self.saturated is None else self.saturated[:, places],
        )

    def rows(self) -> Iterator[tuple[str, int, int, str, int, str, float]]:
        """(method, layer, position, query, key, token, value) for each value.

        position and query: the number of the generated token, and the token; key and token: those
        of the prompt.
        """
        for i, new in enumerate(self.generated):
            for j, old in enumerate(self.prompt):
                for layer, value in zip(self.layers, self.values[i, j].tolist(), strict=True):
                    yield self.method, layer, i, new, j, old, value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .csv (one line per value), .json or .npz.

        Parameters
        ----------
        path
            The file; its ending says which.
        """
        content: dict[str, Any] = {
            "method": self.method,
            "prompt": self.prompt,
            "generated": self.generated,
            "layers": self.layers,
        }
        if self.kept is not None:
            content["kept"] = self.kept.tolist()
        arrays: dict[str, Any] = {name: np.array(value) for name, value in content.items()}
        if self.source is not None:
            content["source"] = self.source.to_dict()
            arrays["source"] = np.array(self.source.to_json())
        return write_by_ending(
            path,
            {
                ".csv": self._write_csv,
                ".json": lambda file: file.write(
                    dump_json({**content, "values": self.values.tolist()}).encode()
                ),
                ".npz": lambda file: np.savez_compressed(file, values=self.values, **arrays),
            },
        )

    def _repr_html_(self) -> str:
        caption = f"{self.method}, layer {self.layers[-1]}: what each generated token looked at"
        top = self.values[:, :, -1]
        return format_heat_map(
            top, self.generated, self.prompt, caption=caption, source=self.source
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        return "<PromptAttention: {}, {} generated x {} prompt tokens x {} layers>".format(
            self.method, *self.values.shape
        )


def normalise_rows(values: Floats) -> Floats:
    """values [generated, prompt, layer] that sum to 1 over the prompt, where they are not all 0."""
    sums = values.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)
    return shares


class GraphOptions(TypedDict, total=False):
    """The options of `Generation.by`, which `raw`, `rollout` and `flow` take too."""

    edges: str
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
    attention
        Over the prompt and all generated tokens but the last, which no position looked at.
    special
        The tokenizer's special tokens.
    graphs
        By the name of their edges, over the same positions as the attention.
    token_graphs
        By the name of edges that watch a token: a function that gives the graph of the i-th
        generated one, and computes it then.
    notes
        What is to be said of the generation.
    """

    text: str
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]
    prompt: tuple[str, ...]
    attention: Attention  # [layer, 1, position, position]
    special: frozenset[str] = frozenset()
    graphs: Mapping[str, AttentionGraph] = field(default_factory=dict)
    token_graphs: Mapping[str, Callable[[int], AttentionGraph]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def edges(self) -> tuple[str, ...]:
        """The kinds of edges that it has; the first is shown first."""
        return (*self.graphs, "attention", *self.token_graphs)

    @property
    def size(self) -> int:
        """The number of prompt tokens, m."""
        return len(self.prompt)

    @property
    def positions(self) -> range:
        """The positions that predicted the generated tokens."""
        return range(self.size - 1, self.attention.size)

    def by(
        self,
        method: Choices,
        *,
        edges: str = "attention",
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
            What an edge of the graph weighs: one of those that `generate` was asked for.
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

        if edges in self.token_graphs:
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

    def _find_graph(
        self,
        edges: str,
        residual: float | None,
        without: Sequence[int],
        graph: GraphMaker | None,
    ) -> AttentionGraph:
        """The graph of one kind of edges, with these options."""
        if edges != "attention":
            if edges not in self.graphs:
                raise OptionError(
                    f"this generation has no edges {edges!r}; it has {', '.join(self.edges)}: name"
                    f" them when generating, as generate(..., edges=['attention', {edges!r}])"
                )
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

    def save(self, path: str | os.PathLike[str], *, methods: Choices | None = None) -> Path:
        """Write the interactive page, or a picture of the top layer.

        The numbers are written by what `by`, `raw`, `rollout` and `flow` return.

        Parameters
        ----------
        path
            The file; its ending says which: .html; .png, .svg, .pdf.
        methods
            What the page shows, or the one method that a picture does: names, or {name: function}.
            All of attnflow's on the page, rollout in a picture, if None.
        """
        if check_ending(path, [".html", *PICTURES]) in PICTURES:
            from attnflow.show import figures

            return figures.generation(self.by("rollout" if methods is None else methods)).save(path)
        from attnflow.show.page import generation_page

        page = generation_page(self, methods=methods)
        return write_file(path, lambda file: file.write(page.encode(errors="backslashreplace")))

    def _repr_html_(self) -> str:
        from attnflow.show.page import framed, generation_page

        return framed(generation_page(self))

    def __repr__(self) -> str:
        after = f"{len(self.tokens)} tokens after a prompt of {self.size}"
        return f"<Generation: {after}: {self.text[:60]!r}>"
