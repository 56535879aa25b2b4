"""`Explanation`: one input, the prediction for it, and the token attention behind it."""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from attnflow.analysis.importance import Importance
from attnflow.analysis.summaries import find_even, measure_agreement, summarise_explanation
from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.custom import Method, accepts, run_method
from attnflow.core.files import PICTURES, Writer, check_ending
from attnflow.core.formatting import format_count
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, sum_groups
from attnflow.core.provenance import Source
from attnflow.core.results import TokenAttention
from attnflow.core.sink_tokens import Sink, sinks
from attnflow.core.tables import ArrayTable
from attnflow.errors import OptionError
from attnflow.notices import ignore_notices


@dataclass(frozen=True, eq=False)
class Explanation(ArrayTable):
    """One input, the prediction for it, and the token attention behind it.

    Parameters
    ----------
    text
        The input as it was given; None for weights.
    model
        The model's name; empty for weights.
    tokens
        The names of the positions.
    special
        Which tokens are no words of the input: CLS, SEP and the like.
    position
        The explained position: where the prediction comes from, or the one asked for.
    prediction
        Label and probability; None where nothing is predicted.
    captured
        The attention that was captured, or given; None where a graph was given.
    graph
        What the methods ran on; of several kinds of edges, the first. None for a long input, of
        which only the rows of the explained position were computed.
    graphs
        By result, the graph that it was computed on; empty for a long input.
    results
        By method: token attention of all layers; of raw and rollout all positions, of other
        methods too up to 64 tokens, else the explained one. The explained one alone for a long
        input.
    importance
        By name, those that were asked for.
    word_importance
        The same by whitespace words.
    notes
        What is to be said of the explained position's results.
    functions
        The methods themselves, by name.
    source
        Where the numbers came from.
    picture
        The picture as a vision model saw it, [height, width] or [height, width, 3], from 0 to 1;
        None for other inputs.
    segments
        The turns of a chat, or the sentences of a long text, and last what is left; to be shown as
        one bar each. Empty for other inputs.
    witnesses
        Of a long input: raw attention of some positions all over it, in which sinks are found.

    >>> import attnflow as af
    >>> explanation = af.explain("the keys to the house", methods=["rollout"], importance=())
    >>> explanation.results["rollout"].top(1, position=0)[0][1]
    'keys'
    """

    columns: ClassVar = ("method", "layer", "position", "query", "key", "token", "value")

    text: Any
    model: str
    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    position: int
    prediction: tuple[str, float] | None
    captured: Attention | None
    graph: AttentionGraph | None
    graphs: dict[str, AttentionGraph]
    results: dict[str, TokenAttention]
    importance: dict[str, Importance]
    word_importance: dict[str, Importance] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    functions: dict[str, Method] = field(default_factory=dict)
    source: Source = field(default_factory=Source)
    picture: Floats | None = None
    segments: tuple[Group, ...] = ()
    witnesses: TokenAttention | None = None

    @property
    def attention(self) -> Attention:
        """The attention that was captured, or given."""
        if self.captured is None:
            raise OptionError(
                "this explanation is of a graph, or of rows alone, which have no weights of heads"
            )
        return self.captured

    @property
    def raw(self) -> TokenAttention:
        """Raw attention."""
        return self._result("raw")

    @property
    def rollout(self) -> TokenAttention:
        """Attention rollout."""
        return self._result("rollout")

    @property
    def flow(self) -> TokenAttention:
        """Attention flow."""
        return self._result("flow")

    @property
    def methods(self) -> dict[str, TokenAttention]:
        """The old name of `results`."""
        warnings.warn(
            "Explanation.methods is called results now; the old name works in this version only",
            FutureWarning,
            stacklevel=2,
        )
        return self.results

    @property
    def first(self) -> str:
        """The name of the result that is shown first."""
        names = list(self.results)
        on_attention = not names or self.results[names[0]].edges == "attention"
        return "rollout" if on_attention and "rollout" in names else names[0] if names else ""

    @property
    def residual(self) -> float | None:
        """The weight of the residual connection; None if it is inside the edges."""
        return self.source.residual if self.graph is None else self.graph.residual

    @property
    def depth(self) -> int:
        """The number of layers."""
        if self.graph is not None:
            return self.graph.depth
        return max((max(result.layers) for result in self.results.values()), default=0)

    @cached_property
    def sinks(self) -> tuple[Sink, ...]:
        """The positions that take a large share of most rows in most layers, the largest first.

        Of the attention that was captured; of the graph where there is none; of a long input's
        `witnesses`.
        """
        if self.graph is None:
            return () if self.witnesses is None else sinks(self.witnesses)
        found = sinks(self.graph if self.captured is None else self.captured)
        return tuple(sink for sink in found if sink.position not in self.graph.removed)

    @cached_property
    def agreement(self) -> dict[str, float]:
        """By result, the rank correlation of its top layer with blank-out at this position.

        Spearman's, with the absolute value of blank-out, over all tokens but sinks, special tokens
        and the explained position. Results for which it is undefined are left out, and all of them
        if blank-out was not asked for.
        """
        return measure_agreement(self)

    @cached_property
    def even(self) -> dict[str, float]:
        """By result that says nothing here, its spread, which is below 0.02.

        Of the row of the explained position in the top layer, without sinks, special tokens and
        the position itself. Rows of fewer than 8 tokens are not judged.
        """
        return find_even(self)

    def summary(self) -> str:
        """What it says, in a sentence: the prediction, what was read, what to distrust.

        Read mostly: by `first` (the next one that says something, if it is even), with words joined
        and without sinks, special tokens and the explained position, of which it says that they
        are left aside: shares are of the rest. `agreement` is told where at least 8 tokens are
        ranked.

        >>> import attnflow as af
        >>> af.explain("the keys to the house", methods=["rollout"], importance=()).summary()
        'plural 0.98. It read mostly keys (43 %), special tokens aside.'
        """
        return summarise_explanation(self)

    def _result(self, name: str) -> TokenAttention:
        if name not in self.results:
            raise OptionError(
                f"this explanation has no {name}; it has {', '.join(self.results) or 'no method'}:"
                f" ask for it by methods=[{name!r}, ...]"
            )
        return self.results[name]

    def scores(
        self, layer: int | None = None, *, by_word: bool = False
    ) -> dict[str, tuple[tuple[str, ...], Floats]]:
        """{name: (tokens, one number per token)} of methods in a layer, and of importances.

        Parameters
        ----------
        layer
            The top one if None.
        by_word
            Subwords summed to words; for flow, the maximum flow to a whole word.
        """
        scores: dict[str, tuple[tuple[str, ...], Floats]] = {}
        for name in self.results:
            shown = self.row(name, layer, by_word=by_word)
            scores[name] = (shown.tokens, shown.at(self.position))
        for name, importance in (self.word_importance if by_word else self.importance).items():
            scores[name] = (importance.tokens, importance.values)
        return scores

    def row(
        self,
        name: str,
        layer: int | None = None,
        *,
        by_word: bool = False,
        by_segment: bool = False,
    ) -> TokenAttention:
        """One method at the explained position of one layer.

        Parameters
        ----------
        name
            Of the method.
        layer
            The top one if None.
        by_word
            To whole words, as `groups="words"` of the method gives it; summed over a word's tokens
            for a method that knows no groups, and where there is no graph.
        by_segment
            To `segments`, likewise.
        """
        result = self._result(name)
        top = max(result.layers) if layer is None else layer
        shown = result.select(self.position, top)
        if not by_word and not by_segment:
            return shown
        method, graph = self.functions[name], self.graphs.get(name)
        if graph is None or not accepts(method, "groups"):
            return shown.by_word() if by_word else sum_segments(shown, self.segments)
        options: dict[str, Any] = {"layers": [top], "positions": [self.position]}
        options |= {"normalize": result.normalize, "groups": "words" if by_word else self.segments}
        with ignore_notices():  # whoever shows the row says what is to be said of it
            return run_method(name, method, graph, **options)

    @property
    def words(self) -> tuple[int | None, ...] | None:
        """The number of the word per token; None if unknown."""
        return next((result.words for result in self.results.values()), None)

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, or both of a pair; none for token ids, images and weights."""
        given = self.text if isinstance(self.text, tuple) else (self.text,)
        return tuple(text for text in given if isinstance(text, str))

    def rows(self) -> Iterator[tuple[str, int | None, int, str, int, str, float]]:
        """(method, layer, position, query, key, token, value) of the explained position.

        The layer of importance is None.
        """
        here = (self.position, self.tokens[self.position])
        for name, result in self.results.items():
            for layer in result.layers:
                for key, value in enumerate(result.at(self.position, layer).tolist()):
                    yield name, layer, *here, key, self.tokens[key], value
        for name, importance in self.importance.items():
            for key, value in enumerate(importance.values.tolist()):
                yield name, None, *here, key, self.tokens[key], value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the interactive page, a picture, or numbers.

        A picture has a heat map for every method, or for an image its patches; each layer has its
        own scale. Special tokens and sinks, which would outshine the words, are not coloured, and
        it says their shares.

        Parameters
        ----------
        path
            The file; its ending says which: .html; .png, .svg, .pdf; .csv, .json, .npz, .md, .tex.
        """
        if check_ending(path, [*self._writers(), *PICTURES]) not in PICTURES:
            return super().save(path)
        if self.graph is None:
            raise OptionError(
                f"a picture has no room for {len(self.tokens):,} tokens; save a page (.html), or"
                " numbers (.csv, .json, .npz)"
            )
        from attnflow.show import figures

        if self.picture is not None:
            return figures.compare_overlays(self, scale="row").save(path)
        return figures.compare_heatmaps(self, exclude=["special", "sinks"], scale="row").save(path)

    def _writers(self) -> dict[str, Writer]:
        return {".html": self._write_page, **super()._writers()}

    def _write_page(self, file: IO[bytes]) -> None:
        from attnflow.show.page import explanation_page

        file.write(explanation_page(self).encode(errors="backslashreplace"))

    def _repr_html_(self) -> str:
        from attnflow.show.page import explanation_page, framed

        return framed(explanation_page(self))

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "text": None if not self.texts else self.text,
            "model": self.model,
            "prediction": self.prediction,
            "target": self.source.target,
            "tokens": self.tokens,
            "special": self.special,
            "position": self.position,
            "notes": self.notes,
        }
        for name, result in self.results.items():
            rows = {layer: result.at(self.position, layer).tolist() for layer in result.layers}
            content[name] = {"layers": list(rows), "values": list(rows.values())}
        if self.segments:
            content["segments"] = [(group.name, group.positions) for group in self.segments]
        for name, importance in self.importance.items():
            content[name] = {
                "target": importance.target,
                "probability": importance.probability,
                "signed": importance.signed,
                "values": importance.values,
            }
        return content

    def _arrays(self) -> dict[str, Any]:
        arrays: dict[str, Any] = {
            "tokens": self.tokens,
            "special": self.special,
            "position": self.position,
            "layers": np.arange(1, self.depth + 1),
        }
        for name, result in self.results.items():  # [layer, token]
            arrays[name] = np.stack([result.at(self.position, layer) for layer in result.layers])
        return arrays | {name: importance.values for name, importance in self.importance.items()}

    def __repr__(self) -> str:
        predicted = (
            "" if self.prediction is None else f", {self.prediction[0]} ({self.prediction[1]:.3f})"
        )
        where = f"position {self.position}" + (f" of {self.model}" if self.model else "")
        return f"<Explanation: {format_count(len(self.tokens), 'token')}, {where}{predicted}>"


def sum_segments(row: TokenAttention, segments: Sequence[Group]) -> TokenAttention:
    """A copy with the keys of each segment summed."""
    if row.normalize == "receptive_field":
        raise OptionError(
            "what is relative to a receptive field does not add up over a segment's tokens;"
            " ask for it: rollout_segments(..., normalize='receptive_field')"
        )
    return replace(
        row,
        values=sum_groups(row.values, segments),
        tokens=tuple(group.name for group in segments),
        words=None,
        groups=tuple(segments),
    )
