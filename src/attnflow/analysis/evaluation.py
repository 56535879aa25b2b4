"""`evaluate`: does token attention rank tokens as their importance does? Spearman's rank correlation over many examples, as a `Report`."""

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from attnflow.analysis.importance import IMPORTANCES
from attnflow.analysis.pipeline import Reading, read_inputs, score_importance
from attnflow.core.files import by_ending, dump_json, read_lines, write_csv
from attnflow.core.graph import RESIDUAL, Floats, integers
from attnflow.core.methods import METHODS
from attnflow.errors import AttnFlowError, FileError, OptionError
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model
from attnflow.notices import collect_notices
from attnflow.progress import progress_bar

TIES = 9  # scores of one example that agree to so many digits of the largest are equal: what is left is rounding
CHUNK = 32  # examples that are captured and scored together
HEADER = ["against", "method", "layer", "mean", "std", "examples", "undefined"]
Scorer = Callable[[Any], Any]  # from an example, as it was given, to one number a token


@dataclass(frozen=True, eq=False)
class Scored:
    """One example with all its scores."""

    text: Any
    label: str  # the target of its importance: the label that was given, else the prediction
    tokens: tuple[str, ...]
    special: tuple[bool, ...]  # CLS, SEP and their like
    scores: dict[str, Floats]  # by method: [layer, token]; a scorer of the user's has one layer
    importance: dict[str, Floats]  # by name: [token]


@dataclass(frozen=True, eq=False)
class Report:
    """Rank correlations of methods with importance, example by example.

    special_tokens: whether CLS, SEP and their like take part. query: the position that is explained: "focal", "max" or "mean" over all,
    or a number. asked: how many examples there were; fewer were done if it was interrupted. seconds: where the time went.
    """

    model: str
    methods: tuple[str, ...]
    against: tuple[str, ...]
    layers: tuple[int, ...]
    examples: tuple[Scored, ...]
    special_tokens: bool = False
    query: str = "focal"
    asked: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def correlations(self) -> dict[tuple[str, str], Floats]:
        """[layer, example] for each (against, method); not a number where a correlation is undefined."""
        found = {}
        for name in self.against:
            for method in self.methods:
                columns = [
                    spearman(*self._kept(example, method, name)) for example in self.examples
                ]
                found[name, method] = np.stack(columns, axis=1) if columns else np.empty((0, 0))
        return found

    def _kept(self, example: Scored, method: str, name: str) -> tuple[Floats, Floats]:
        keep = (
            np.ones(len(example.tokens), bool)
            if self.special_tokens
            else ~np.array(example.special, bool)
        )
        return example.scores[method][:, keep], example.importance[name][keep]

    def including(self, special_tokens: bool) -> "Report":
        """The same scores, correlated with or without CLS, SEP and their like."""
        return replace(self, special_tokens=special_tokens)

    def rows(self) -> Iterator[tuple[str, str, int | None, float, float, int, int]]:
        """(against, method, layer, mean, standard deviation, examples, how many of them undefined); layer None: of a scorer's own."""
        for (name, method), found in self.correlations.items():
            for layer, values in zip(
                self.layers if method in METHODS else [None], found, strict=True
            ):
                known = values[~np.isnan(values)]
                mean, deviation = (
                    (float(known.mean()), float(known.std()))
                    if len(known)
                    else (float("nan"), float("nan"))
                )
                yield name, method, layer, mean, deviation, len(values), len(values) - len(known)

    def mean(self, method: str, against: str, layer: int | None = None) -> float:
        """The mean correlation of a method in a layer; the top one if none is given."""
        found = [
            row
            for row in self.rows()
            if row[:2] == (against, method) and (layer is None or row[2] in (layer, None))
        ]
        if not found:
            raise OptionError(
                f"this report has no {method} against {against} in layer {layer}; it has {', '.join(self.methods)}"
            )
        return found[-1][3]

    def to_markdown(self) -> str:
        """One table for each importance: methods down, layers across, mean ± standard deviation; and what was counted."""
        text = []
        for name in self.against:
            rows = [row for row in self.rows() if row[0] == name]
            text += [f"Spearman correlation with {name} ({self.model}, {self.what()})", ""]
            columns = [f"layer {layer}" for layer in self.layers] or [
                "score"
            ]  # scorers of the user's alone have no layers
            text += markdown(["method", *columns, "undefined"], self._cells(rows))
            text.append("")
        return "\n".join(text)

    def _cells(self, rows: Sequence[tuple[Any, ...]]) -> Iterator[list[str]]:
        for method in self.methods:
            mine = [row for row in rows if row[1] == method]
            undefined = sorted({row[6] for row in mine})
            values = [f"{row[3]:.2f} ± {row[4]:.2f}" for row in mine]
            blanks = [""] * (
                max(1, len(self.layers)) - len(values)
            )  # a scorer has no layers: its number stands under the last one
            yield [
                method,
                *blanks,
                *values,
                "–".join(map(str, dict.fromkeys([undefined[0], undefined[-1]])))
                if undefined
                else "",
            ]

    def what(self) -> str:
        """What was counted, in words."""
        special = sorted(
            {
                token
                for each in self.examples
                for token, mark in zip(each.tokens, each.special, strict=True)
                if mark
            }
        )
        counted = f"n = {len(self.examples)}" + (
            f" of {self.asked} asked for" if self.asked > len(self.examples) else ""
        )
        kept = "included" if self.special_tokens else "left out"
        return f"{counted}; {', '.join(special) or 'special tokens'} {kept}; query {self.query}"

    def to_csv(self) -> str:
        """One line a method, layer and importance."""
        file = io.BytesIO()
        write_csv(file, HEADER, self.rows())
        return file.getvalue().decode()

    def to_json(self) -> str:
        """Everything, the scores of each token of each example too."""
        content = {
            "model": self.model,
            "special_tokens": self.special_tokens,
            "query": self.query,
            "asked": self.asked,
            "layers": self.layers,
            "seconds": self.seconds,
            "table": [dict(zip(HEADER, row, strict=True)) for row in self.rows()],
            "examples": [
                {
                    "text": each.text if isinstance(each.text, str) else repr(each.text),
                    "label": each.label,
                    "tokens": each.tokens,
                    "special": each.special,
                    "scores": {name: values.tolist() for name, values in each.scores.items()},
                    "importance": {
                        name: values.tolist() for name, values in each.importance.items()
                    },
                    "correlation": {
                        f"{method} against {name}": found[:, place].tolist()
                        for (name, method), found in self.correlations.items()
                    },
                }
                for place, each in enumerate(self.examples)
            ],
        }
        return dump_json(content)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .md, .csv or .json, by the ending of the name."""
        texts = {".md": self.to_markdown, ".csv": self.to_csv, ".json": self.to_json}

        def writer(text: Callable[[], str]) -> Callable[[Any], object]:
            return lambda file: file.write(text().encode(errors="backslashreplace"))

        return by_ending(path, {ending: writer(text) for ending, text in texts.items()})

    def __repr__(self) -> str:
        return f"<Report: {', '.join(self.methods)} against {', '.join(self.against)}, {len(self.examples)} examples>"


def evaluate(
    model: Any,
    examples: Iterable[Any],
    *,
    methods: Any = ("raw", "rollout", "flow"),
    against: Any = ("blank_out", "input_gradient"),
    layers: Any = None,
    limit: int | None = None,
    special_tokens: bool = False,
    query: str | int = "focal",
    residual: float = RESIDUAL,
    workers: int = 1,
) -> Report:
    """How well methods rank the tokens of each example, by Spearman's correlation with their importance.

    examples: texts, or pairs (text, label); without a label the target of importance is what the model predicts. methods, against: names,
    or a dict {name: function} of your own, where None stands for attnflow's (`{"flow": None, "mine": f}`); a function takes the example
    as it was given and returns one number a token. layers: all if not given. query: which position's token attention is taken:
    "focal", where the prediction comes from; "max" or "mean" over all positions; or a position. One capture an example serves all
    methods. Interrupted by Ctrl-C, it returns the report of what is done.

    >>> from attnflow import load
    >>> report = evaluate(load("verb-number"), [("the key to the cabinets", "singular")], methods=["rollout"], against=["blank_out"])
    >>> report
    <Report: rollout against blank_out, 1 examples>
    """
    model = model if isinstance(model, Model) else Model(model)
    job = Job(
        model,
        named(methods, METHODS, "method"),
        named(against, IMPORTANCES, "importance"),
        layers,
        query,
        residual,
        workers,
    )
    if limit is not None:
        (limit,) = integers([limit], "limit")
        if limit < 1:
            raise OptionError(f"limit must be a whole number, at least 1; got {limit!r}")
    if isinstance(examples, str):
        raise OptionError(
            "examples must be a list of texts, or of (text, label); got one text: put it in a list"
        )
    chosen = list(islice(examples, limit))
    if not chosen:
        raise OptionError("there must be at least one example; got none")
    pairs = [pair_of(example) for example in chosen]
    encoded = [  # all of them, before anything is computed
        check_example(model, f"example {number}", *pair) for number, pair in enumerate(pairs, 1)
    ]
    done: list[Scored] = []
    with progress_bar("evaluating") as tick:
        try:
            for start in range(0, len(chosen), CHUNK):
                part = slice(start, start + CHUNK)
                done += job.score(chosen[part], pairs[part], encoded[part])
                tick(len(done), len(chosen))
        except KeyboardInterrupt:
            if not done:
                raise
    names = (tuple(job.methods), tuple(job.against))
    return Report(
        model.name,
        *names,
        job.layers,
        tuple(done),
        special_tokens,
        str(query),
        len(chosen),
        job.seconds,
    )


class Job:
    """What is to be computed of every example, and how long each part took."""

    def __init__(
        self,
        model: Model,
        methods: dict[str, Scorer | None],
        against: dict[str, Scorer | None],
        layers: Any,
        query: str | int,
        residual: float,
        workers: int,
    ) -> None:
        if isinstance(query, str) and query not in ("focal", "max", "mean"):
            raise OptionError(
                f"unknown query {query!r}; choose from focal, max, mean, or a position"
            )
        if not isinstance(query, str):
            (query,) = integers([query], "query")
        self.model, self.methods, self.against = model, methods, against
        self.query, self.residual, self.workers = query, residual, workers
        self.wanted = layers
        self.layers: tuple[int, ...] = ()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time of a block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def score(
        self, examples: Sequence[Any], pairs: Sequence[tuple[Any, Any]], encoded: list[Encoded]
    ) -> list[Scored]:
        """All scores of a few examples: one capture for all methods, one call per importance."""
        texts, labels = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        position = None if isinstance(self.query, str) else self.query
        ours = [name for name, scorer in self.against.items() if scorer is None]
        targets = [None if label is None else self.model.target(label) for label in labels]
        readings: list[Reading] = []
        graphs = []
        if ours or None in self.methods.values():
            with self.timed("capture"):
                readings = read_inputs(self.model, encoded, targets=targets, position=position)
                graphs = [each.attention.graph(residual=self.residual) for each in readings]
        importance: dict[str, list[Any]] = {}
        for name, scorer in self.against.items():
            with self.timed(name):
                importance[name] = (
                    score_importance(self.model, readings, name, position=position)
                    if scorer is None
                    else [
                        own(scorer, name, each, example)
                        for each, example in zip(encoded, examples, strict=True)
                    ]
                )
        watched = [str(label) for label in labels]
        if ours:
            watched = [each.target for each in importance[ours[0]]]
        scores: list[dict[str, Floats]] = [{} for _ in examples]
        for name, scorer in self.methods.items():
            with self.timed(name):
                for place, each in enumerate(encoded):
                    scores[place][name] = (
                        self.token_attention(name, graphs[place], each)
                        if scorer is None
                        else own(scorer, name, each, examples[place])[None]
                    )
        return [
            Scored(
                text,
                target,
                each.tokens,
                each.special,
                found,
                {name: np.asarray(values[place]) for name, values in importance.items()},
            )
            for place, (text, target, each, found) in enumerate(
                zip(texts, watched, encoded, scores, strict=True)
            )
        ]

    def token_attention(self, name: str, graph: Any, encoded: Encoded) -> Floats:
        """[layer, token] of one method at the position (or over the positions) that the query says."""
        if not self.layers:
            found = range(1, graph.depth + 1) if self.wanted is None else self.wanted
            self.layers = tuple(dict.fromkeys(integers(found, "layers")))
        options = {"workers": self.workers} if name == "flow" else {}
        return queried(self.model, name, graph, encoded, self.query, layers=self.layers, **options)


def queried(
    model: Model, name: str, graph: Any, encoded: Encoded, query: str | int, **options: Any
) -> Floats:
    """[layer, token] of one method at the position that a query means, or over all: "focal", "max", "mean" or a number."""
    position = model.focal(encoded) if query == "focal" else query
    positions = None if position in ("max", "mean") else [position]
    with collect_notices():  # that flow says little shows in what is made of it
        values = METHODS[name](
            graph, positions=positions, **options
        ).values  # [layer, query, token]
    reduced: Floats = values.mean(axis=1) if query == "mean" else values.max(axis=1)
    return reduced


def read_examples(
    path: str | os.PathLike[str], model: Model, limit: int | None = None
) -> list[Any]:
    """Texts, or (text, label), from a file: one a line, the label after a tab; a header (text or sentence, and label) may name the columns.

    What the model cannot take is refused by file and line.
    """
    text, label, width = 0, 1, None
    found: list[Any] = []
    for number, line in read_lines(path):
        cells = line.split("\t")
        if width is None:
            width = len(cells)
            names = [cell.strip().lower() for cell in cells]
            heads = [names.index(name) for name in ("text", "sentence") if name in names]
            if heads and (width == 1 or "label" in names):
                text, label = heads[0], names.index("label") if "label" in names else 1
                continue
            if width > 2:
                raise FileError(
                    f"{path}, line {number}: one or two columns are needed, or a header that names text and label; got {width}"
                )
        if len(cells) != width:
            raise FileError(
                f"{path}, line {number}: {width} columns are needed, as in the first line; got {len(cells)}"
            )
        given = cells[label].strip() if width > 1 else None
        check_example(model, f"{path}, line {number}", cells[text], given)
        found.append(cells[text] if given is None else (cells[text], given))
        if len(found) == limit:
            break
    if not found:
        raise FileError(
            f"{path} holds no examples: a text a line is needed, and its label after a tab where there is one"
        )
    return found


def spearman(scores: Floats, importance: Floats) -> Floats:
    """[layer]: Spearman's rank correlation of each row of scores [layer, token] with importance [token]; ties share their mean rank.

    Not a number where it is undefined: fewer than two tokens, or all scores equal.

    >>> spearman(np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]]), np.array([0.1, 0.2, 0.9]))
    array([ 1., -1., nan])
    """
    from scipy.stats import rankdata

    rows = np.vstack([scores, importance])
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        return np.full(len(scores), np.nan)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    ranks = rankdata(np.round(rows / np.where(largest > 0, largest, 1.0), TIES), axis=1)
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    lengths = np.sqrt((centred**2).sum(axis=1))
    product = lengths[:-1] * lengths[-1]
    found: Floats = np.full(len(scores), np.nan)
    np.divide(centred[:-1] @ centred[-1], product, out=found, where=product > 0)
    return np.clip(found, -1.0, 1.0)


def named(chosen: Any, known: Mapping[str, Any], what: str) -> dict[str, Scorer | None]:
    """Names and functions as {name: function, or None for one of attnflow's}."""
    if isinstance(chosen, str) or callable(chosen):
        chosen = [chosen]
    pairs = (
        chosen.items()
        if isinstance(chosen, Mapping)
        else [(name_of(each), None if isinstance(each, str) else each) for each in chosen]
    )
    found: dict[str, Scorer | None] = {}
    for name, scorer in pairs:
        if scorer is None and name not in known:
            raise OptionError(
                f"unknown {what} {name!r}; choose from {', '.join(known)}, or give a function"
            )
        if scorer is not None and (name in known or not callable(scorer)):
            raise OptionError(
                f"a {what} of your own must be a function with a name of its own; got {name!r}: {type(scorer).__name__}"
            )
        if name in found:
            raise OptionError(f"each {what} must have a name of its own; got {name!r} twice")
        found[name] = scorer
    if not found:
        raise OptionError(f"at least one {what} is needed; choose from {', '.join(known)}")
    return found


def name_of(chosen: Any) -> str:
    return (
        chosen
        if isinstance(chosen, str)
        else str(getattr(chosen, "__name__", type(chosen).__name__))
    )


def pair_of(example: Any) -> tuple[Any, Any]:
    """(text, label or None)."""
    if isinstance(example, tuple | list) and len(example) == 2 and not isinstance(example[0], int):
        return example[0], example[1]
    return example, None


def check_example(model: Model, place: str, text: Any, label: Any) -> Encoded:
    """An example as the model takes it, or an error that says where it stands."""
    try:
        encoded = model.encode(text)
        model.focal(encoded)
        if label is not None:
            model.target(label)
        return encoded
    except AttnFlowError as error:
        raise OptionError(f"{place}: {error}") from error


def own(scorer: Scorer, name: str, encoded: Encoded, example: Any) -> Floats:
    """What a function of the user's says of an example, if it is one number a token."""
    try:
        values = np.asarray(scorer(example), dtype=np.float64)
    except AttnFlowError:
        raise
    except Exception as error:
        raise OptionError(
            f"{name} failed on {example!r}: {type(error).__name__}: {error}"
        ) from error
    if values.shape != (len(encoded.tokens),):
        raise OptionError(
            f"{name} must give one number a token, {len(encoded.tokens)} for {example!r}; got shape {values.shape}"
        )
    return values


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
