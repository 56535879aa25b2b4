"""`Explanation`: one input, the prediction for it, and the token attention behind it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, ClassVar

import numpy as np

from attnflow.analysis.explain.summary import find_even, measure_agreement, summarise_explanation
from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.run import MethodRun
from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.choices import accepts, run_method
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, name_places, sum_groups
from attnflow.core.io.files import PICTURES, Writer, check_ending
from attnflow.core.io.formatting import format_count
from attnflow.core.io.tables import ArrayTable
from attnflow.core.provenance import Source
from attnflow.core.results import TokenAttention
from attnflow.core.row_table import KEY_COLUMNS
from attnflow.core.sinks import Sink, sinks
from attnflow.errors import OptionError
from attnflow.models.encoded import OneInput
from attnflow.models.predict import Prediction
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
        Whether a token is special, such as CLS and SEP.
    position
        The explained position; by default, the one that the prediction comes from. The last one of
        a span.
    prediction
        Label and probability, with the class that importance and gradients watch; None for a model
        without prediction.
    captured
        The attention that was captured, or given; None if a graph was given.
    graph
        The graph that the methods ran on; the first one for several kinds of edges. None for a long
        input, for which rows of the explained position were computed.
    runs
        By result: the method, the edges and the graph that it ran on, and the result itself, token
        attention of all layers. Raw and rollout have all positions; other methods have them up to
        64 tokens, else the explained one. A long input has the explained one alone.
    importance
        The importances by name.
    word_importance
        The same by whitespace words.
    notes
        Notes on the results of the explained position.
    source
        Where the numbers came from.
    picture
        The input of a vision model, [height, width] or [height, width, 3], from 0 to 1; None for
        other inputs.
    segments
        The turns of a chat, or the sentences of a long text, and last what is left; each is shown
        as one bar. Empty for other inputs.
    witnesses
        For a long input: raw attention of positions spread over it, in which sinks are found.
    span
        The positions that are explained together: those that predict the tokens of an answer, or
        those that were given; none if one position is explained. Results then have their one row.

    >>> import attnflow as af
    >>> explanation = af.explain("the keys to the house", methods=["rollout"], importance=())
    >>> explanation.results["rollout"].top(1, position=0)[0][1]
    'keys'
    """

    columns: ClassVar = (*KEY_COLUMNS, "value")

    text: OneInput | None
    model: str
    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    position: int
    prediction: Prediction | None
    captured: Attention | None
    graph: AttentionGraph | None
    runs: dict[str, MethodRun]
    importance: dict[str, Importance]
    word_importance: dict[str, Importance] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: Source = field(default_factory=Source)
    picture: Floats | None = None
    segments: tuple[Group, ...] = ()
    witnesses: TokenAttention | None = None
    span: tuple[int, ...] = ()

    @property
    def explained(self) -> tuple[int, ...]:
        """The explained positions: those of the span, or the only one."""
        return self.span or (self.position,)

    @property
    def attention(self) -> Attention:
        """The attention that was captured, or given."""
        if self.captured is None:
            raise OptionError(
                "this explanation is of a graph, or of rows alone, which have no weights of heads"
            )
        return self.captured

    @cached_property
    def results(self) -> dict[str, TokenAttention]:
        """Token attention by the name of its method and edges."""
        return {name: each.result for name, each in self.runs.items()}

    @property
    def graphs(self) -> dict[str, AttentionGraph]:
        """By result, the graph that it was computed on; empty for a long input."""
        return {name: each.graph for name, each in self.runs.items() if each.graph is not None}

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

        In the captured attention; if there is none, in the graph; for a long input, in `witnesses`.
        """
        if self.graph is None:
            return () if self.witnesses is None else sinks(self.witnesses)
        found = sinks(self.graph if self.captured is None else self.captured)
        return tuple(sink for sink in found if sink.position not in self.graph.removed)

    @cached_property
    def agreement(self) -> dict[str, float]:
        """By result, the rank correlation of its top layer with blank-out at this position.

        Spearman's, with the absolute value of blank-out, over all tokens but sinks, special tokens
        and the explained position. Results for which it is undefined are left out; empty without
        blank-out.
        """
        return measure_agreement(self)

    @cached_property
    def even(self) -> dict[str, float]:
        """By result, the spread of its row where that is even, so that it says nothing.

        The row of the explained position in the top layer, without sinks, special tokens and the
        position itself, is even if its spread is below 0.08 and no token has 1.25 times the even
        share. Rows of fewer than 8 tokens are not judged. What `summary` would name is judged in
        words too.
        """
        return find_even(self)

    def summary(self) -> str:
        """A sentence or two: the prediction, what was read, and what to distrust.

        What was read is taken from `first`, or from the next result if that one is even, by word.
        Shares are computed without sinks, special tokens and the explained position. `agreement`
        is included if at least 8 tokens are ranked.

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
            The name of the result.
        layer
            The top one if None.
        by_word
            To whole words, by `groups="words"` of the method; without a graph, and for methods
            without groups, summed over the tokens of a word.
        by_segment
            To `segments`, likewise.
        """
        result = self._result(name)
        top = max(result.layers) if layer is None else layer
        shown = result.select(self.position, top)
        if not by_word and not by_segment:
            return shown
        done = self.runs[name]
        if done.graph is None or not accepts(done.method, "groups"):
            return shown.by_word() if by_word else sum_segments(shown, self.segments)
        key = (name, top, by_word)
        if key not in self._grouped:  # a flow to words is solved once
            with ignore_notices():  # the views that show the row give its notes
                self._grouped[key] = run_method(
                    name,
                    done.method,
                    done.graph,
                    layers=[top],
                    positions=None if result.sources else [self.position],
                    sources=result.sources,
                    normalize=result.normalize,
                    groups="words" if by_word else self.segments,
                )
        return self._grouped[key]

    @cached_property
    def _grouped(self) -> dict[tuple[str, int, bool], TokenAttention]:
        """The rows to words and segments computed so far, by result and layer."""
        return {}

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
        own scale. Special tokens and sinks, which would outshine the words, are not coloured; their
        shares are stated.

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
        from attnflow.show.figures.heatmap import compare_heatmaps
        from attnflow.show.figures.overlay import compare_overlays

        if self.picture is not None:
            return compare_overlays(self, scale="row").save(path)
        return compare_heatmaps(self, exclude=["special", "sinks"], scale="row").save(path)

    def _writers(self) -> dict[str, Writer]:
        return {".html": self._write_page, **super()._writers()}

    def _write_page(self, file: IO[bytes]) -> None:
        file.write(self._make_page().encode(errors="backslashreplace"))

    def _repr_html_(self) -> str:
        from attnflow.show.page.page import framed

        return framed(self._make_page())

    def _make_page(self) -> str:
        from attnflow.analysis.page.page import describe_explanation
        from attnflow.show.page.page import fill_page

        return fill_page(describe_explanation(self))

    def _content(self) -> dict[str, object]:
        content: dict[str, object] = {
            "text": None if not self.texts else self.text,
            "model": self.model,
            "prediction": self.prediction,
            "target": self.source.target,
            "tokens": self.tokens,
            "special": self.special,
            "position": self.position,
            "notes": self.notes,
        }
        if self.span:
            content["span"] = self.span
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

    def _arrays(self) -> dict[str, object]:
        arrays: dict[str, object] = {
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
        where = name_places(self.explained) + (f" of {self.model}" if self.model else "")
        return f"<Explanation: {format_count(len(self.tokens), 'token')}, {where}{predicted}>"


def sum_segments(row: TokenAttention, segments: Sequence[Group]) -> TokenAttention:
    """A copy with the keys of each segment summed."""
    if row.normalize == "receptive_field":
        raise OptionError(
            "values relative to a receptive field do not add up over the tokens of a segment;"
            " use rollout_segments(..., normalize='receptive_field')"
        )
    return replace(
        row,
        values=sum_groups(row.values, segments),
        tokens=tuple(group.name for group in segments),
        words=None,
        groups=tuple(segments),
    )
