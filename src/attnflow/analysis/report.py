"""`Report`: rank correlations of methods and scorers with importance, example by example."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from attnflow.analysis.sanity import Sanity
from attnflow.analysis.statistics import spearman
from attnflow.core.arrays import Floats
from attnflow.core.formatting import Panel
from attnflow.core.provenance import Source
from attnflow.core.tables import Table
from attnflow.errors import OptionError

ReportRow = tuple[str, str, int | None, float, float, int, int]


@dataclass(frozen=True, eq=False)
class ScoredExample:
    """One example with all its scores."""

    text: Any
    label: str  # the target of its importance: the label that was given, else the prediction
    tokens: tuple[str, ...]
    special: tuple[bool, ...]  # CLS, SEP and the like
    scores: dict[str, Floats]  # by method: [layer, token]; by scorer: [1, token]
    importance: dict[str, Floats]  # by name: [token]
    removed: tuple[int, ...] = ()  # positions that the graph was made without

    def keep(self, special_tokens: bool) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """[token]: which tokens are ranked."""
        kept = np.ones(len(self.tokens), bool) if special_tokens else ~np.array(self.special, bool)
        kept[list(self.removed)] = False
        return kept


@dataclass(frozen=True, eq=False)
class Report(Table):
    """Rank correlations of methods with importance, example by example.

    Parameters
    ----------
    model
        The model's name.
    methods
        The names of all that was ranked: methods, then scorers.
    against
        The names of the importances.
    layers
        The layers of the methods.
    examples
        The scores per example.
    special_tokens
        Whether CLS, SEP and the like take part.
    query
        The position that is explained: "focal", "max" or "mean" over all, or a number.
    asked
        How many examples were given; fewer were done if the run was interrupted.
    seconds
        Where the time went, by part.
    scorers
        Those of `methods` that are scores of the user's and have no layers.
    source
        Where the numbers came from.
    sanity
        How far rankings change when weights are randomised; None if nobody asked.

    >>> import attnflow as af
    >>> examples = [("the key to the cabinets", "singular"), ("the old keys", "plural")]
    >>> report = af.evaluate(af.load("verb-number"), examples, methods="flow", against="blank_out")
    >>> report.to_pandas().columns.tolist()
    ['against', 'method', 'layer', 'mean', 'std', 'examples', 'undefined']
    """

    columns: ClassVar = ("against", "method", "layer", "mean", "std", "examples", "undefined")

    model: str
    methods: tuple[str, ...]
    against: tuple[str, ...]
    layers: tuple[int, ...]
    examples: tuple[ScoredExample, ...]
    special_tokens: bool = False
    query: str = "focal"
    asked: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    scorers: tuple[str, ...] = ()
    source: Source | None = None
    sanity: Sanity | None = None

    @cached_property
    def correlations(self) -> dict[tuple[str, str], Floats]:
        """{(against, method): [layer, example]}; NaN where a correlation is undefined."""
        correlations = {}
        for name in self.against:
            for method in self.methods:
                by_example = [self._correlate(example, method, name) for example in self.examples]
                correlations[name, method] = (
                    np.stack(by_example, axis=1) if by_example else np.empty((0, 0))
                )
        return correlations

    def _correlate(self, example: ScoredExample, method: str, name: str) -> Floats:
        """[layer] of one example."""
        kept = example.keep(self.special_tokens)
        return spearman(example.scores[method][:, kept], example.importance[name][kept])

    def including(self, special_tokens: bool) -> "Report":
        """The same scores, correlated with or without CLS, SEP and the like.

        Parameters
        ----------
        special_tokens
            Whether they take part.
        """
        return replace(self, special_tokens=special_tokens)

    def rows(self) -> Iterator[ReportRow]:
        """(against, method, layer, mean, standard deviation, examples, how many are undefined).

        The layer of a scorer is None.
        """
        for (name, method), values in self.correlations.items():
            layers = [None] if method in self.scorers else self.layers
            for layer, row in zip(layers, values, strict=True):
                known = row[~np.isnan(row)]
                mean, deviation = (
                    (float(known.mean()), float(known.std()))
                    if len(known)
                    else (float("nan"), float("nan"))
                )
                yield name, method, layer, mean, deviation, len(row), len(row) - len(known)

    def mean(self, method: str, against: str, layer: int | None = None) -> float:
        """The mean correlation of a method in a layer.

        Parameters
        ----------
        method, against
            Of which method, or scorer, with which importance.
        layer
            The top one computed if None; a scorer has none.
        """
        chosen = [
            row
            for row in self.rows()
            if row[:2] == (against, method) and (layer is None or row[2] in (layer, None))
        ]
        if not chosen:
            raise OptionError(
                f"this report has no {method} against {against} in layer {layer};"
                f" it has {', '.join(self.methods)}"
            )
        return chosen[-1][3]

    def _panels(self) -> Iterator[Panel]:
        """One table per importance: methods down, layers across, mean ± standard deviation."""
        for name in self.against:
            caption = f"Spearman correlation with {name} ({self.model}, {self.what()})"
            yield Panel(self._header(), self._cells(name), caption)
        if self.sanity is not None:
            yield from self.sanity._panels()

    def _header(self) -> list[str]:
        """Scorers have no layers, and so a column of their own."""
        layers = [f"layer {layer}" for layer in self.layers]
        return ["method", *layers, *["score"] * bool(self.scorers), "undefined"]

    def _cells(self, against: str) -> Iterator[list[str]]:
        for method in self.methods:
            rows = [row for row in self.rows() if row[:2] == (against, method)]
            means = [f"{row[3]:.2f} ± {row[4]:.2f}" for row in rows]
            blanks = [""] * len(self.layers)
            if method in self.scorers:
                means = [*blanks, *means]
            elif self.scorers:
                means = [*means, ""]
            undefined = sorted({row[6] for row in rows})
            ends = dict.fromkeys([undefined[0], undefined[-1]] if undefined else [])
            yield [method, *means, "–".join(map(str, ends))]

    def what(self) -> str:
        """What the correlations are over, in words."""
        special = sorted(
            {
                token
                for example in self.examples
                for token, mark in zip(example.tokens, example.special, strict=True)
                if mark
            }
        )
        counted = f"n = {len(self.examples)}" + (
            f" of {self.asked} asked for" if self.asked > len(self.examples) else ""
        )
        kept = "included" if self.special_tokens else "left out"
        return f"{counted}; {', '.join(special) or 'special tokens'} {kept}; query {self.query}"

    def _content(self) -> dict[str, Any]:
        """Everything, the scores of every token of every example too."""
        return {
            "model": self.model,
            "special_tokens": self.special_tokens,
            "query": self.query,
            "asked": self.asked,
            "layers": self.layers,
            "seconds": self.seconds,
            **super()._content(),
            "sanity": None if self.sanity is None else self.sanity.list_rows(),
            "examples": [
                self._describe(place, example) for place, example in enumerate(self.examples)
            ],
        }

    def _describe(self, place: int, example: ScoredExample) -> dict[str, Any]:
        """One example for JSON."""
        return {
            "text": example.text if isinstance(example.text, str) else repr(example.text),
            "label": example.label,
            "tokens": example.tokens,
            "special": example.special,
            "scores": {name: values.tolist() for name, values in example.scores.items()},
            "importance": {name: values.tolist() for name, values in example.importance.items()},
            "correlation": {
                f"{method} against {name}": values[:, place].tolist()
                for (name, method), values in self.correlations.items()
            },
        }

    def __repr__(self) -> str:
        names = f"{', '.join(self.methods)} against {', '.join(self.against)}"
        return f"<Report: {names}, {len(self.examples)} examples>"
