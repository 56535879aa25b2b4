"""`explain`: one input in, everything about it out: the prediction, token attention by all methods, and importance."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from attnflow.analysis.importance import IMPORTANCES, Importance
from attnflow.analysis.pipeline import Reading, read_batch, score_importance
from attnflow.core.attention import Attention
from attnflow.core.files import PICTURES, Writer, by_ending, dump_json, known_ending, write_csv
from attnflow.core.graph import RESIDUAL
from attnflow.core.groups import word_groups
from attnflow.core.methods import METHODS, flow, raw, rollout, warn_if_even
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.models.inputs import are_many
from attnflow.models.loading import BUNDLED, load
from attnflow.models.model import Model
from attnflow.notices import collect_notices

ALL_FLOWS = 64  # up to so many tokens, flow is computed for every position of every layer


@dataclass(frozen=True, eq=False)
class Explanation:
    """One input, what the model makes of it, and what it looked at.

    position: the focal one, where the prediction comes from, or the one that was asked for. raw, rollout: all layers and positions; flow:
    all layers; all positions up to 64 tokens, else the focal one. importance: by name, those that were asked for.
    """

    text: Any
    model: str
    tokens: tuple[str, ...]
    special: tuple[bool, ...]  # tokens that are no words of the input: CLS, SEP and their like
    position: int
    prediction: (
        tuple[str, float] | None
    )  # label and probability; None for a model that predicts nothing
    attention: Attention
    raw: TokenAttention
    rollout: TokenAttention
    flow: TokenAttention
    importance: dict[str, Importance]
    word_importance: dict[str, Importance] = field(default_factory=dict)  # by whitespace words
    notes: tuple[str, ...] = ()  # what is to be said of the explained position's flow
    residual: float = RESIDUAL

    @property
    def methods(self) -> dict[str, TokenAttention]:
        """The three results by their names."""
        return {"raw": self.raw, "rollout": self.rollout, "flow": self.flow}

    def scores(
        self, layer: int | None = None, *, by_word: bool = False
    ) -> dict[str, tuple[tuple[str, ...], npt.NDArray[np.float64]]]:
        """(tokens, one number a token) of each method in a layer, the top one if none is given, and of each importance.

        by_word: subwords summed to words; of flow, the maximum flow to each whole word.
        """
        found: dict[str, tuple[tuple[str, ...], npt.NDArray[np.float64]]] = {}
        for name in self.methods:
            shown = self.row(name, layer, by_word=by_word)
            found[name] = (shown.tokens, shown.at(self.position))
        for name, importance in (self.word_importance if by_word else self.importance).items():
            found[name] = (importance.tokens, importance.values)
        return found

    def row(self, name: str, layer: int | None = None, *, by_word: bool = False) -> TokenAttention:
        """One method at the explained position of one layer, the top one if None.

        by_word: to whole words, as `groups="words"` of the method gives it.
        """
        result = self.methods[name]
        top = max(result.layers) if layer is None else layer
        if not by_word:
            return result.select(self.position, top)
        graph = self.attention.graph(residual=self.residual)
        options: dict[str, Any] = {"layers": [top], "positions": [self.position]}
        with collect_notices():  # whoever shows the row says what is to be said of it
            return METHODS[name](graph, **options, normalize=result.normalize, groups="words")

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, or both of a pair; none for token ids and images."""
        given = self.text if isinstance(self.text, tuple) else (self.text,)
        return tuple(each for each in given if isinstance(each, str))

    def rows(self) -> Iterator[tuple[str, int | None, int, str, float]]:
        """(method, layer, position of the token, token, value) of the explained position; importance has no layer."""
        for name, result in self.methods.items():
            for layer in result.layers:
                for place, value in enumerate(result.at(self.position, layer).tolist()):
                    yield name, layer, place, self.tokens[place], value
        for name, importance in self.importance.items():
            for place, value in enumerate(importance.values.tolist()):
                yield name, None, place, self.tokens[place], value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write by the ending of the name: the interactive page (.html), heat maps (.png, .svg, .pdf), or numbers (.csv, .json, .npz)."""
        writers: dict[str, Writer] = {
            ".html": self._write_page,
            ".csv": self._write_csv,
            ".json": self._write_json,
            ".npz": self._write_npz,
        }
        if known_ending(path, [*writers, *PICTURES]) in writers:
            return by_ending(path, writers)
        from attnflow.show import figures

        return figures.compare_heatmaps(self).save(path)

    def _write_page(self, file: IO[bytes]) -> None:
        from attnflow.show.page import explanation_page

        file.write(explanation_page(self).encode(errors="backslashreplace"))

    def _repr_html_(self) -> str:
        from attnflow.show.page import explanation_page, framed

        return framed(explanation_page(self))

    def _write_csv(self, file: IO[bytes]) -> None:
        write_csv(file, ["method", "layer", "position", "token", "value"], self.rows())

    def _write_json(self, file: IO[bytes]) -> None:
        content: dict[str, Any] = {
            "text": None if not self.texts else self.text,
            "model": self.model,
            "prediction": self.prediction,
            "target": next((each.target for each in self.importance.values()), None),
            "tokens": self.tokens,
            "special": self.special,
            "position": self.position,
            "notes": self.notes,
        }
        for name, result in self.methods.items():
            rows = {layer: result.at(self.position, layer).tolist() for layer in result.layers}
            content[name] = {"layers": list(rows), "values": list(rows.values())}
        for name, importance in self.importance.items():
            content[name] = {
                "target": importance.target,
                "probability": importance.probability,
                "signed": importance.signed,
                "values": importance.values.tolist(),
            }
        file.write(dump_json(content).encode())

    def _write_npz(self, file: IO[bytes]) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": np.array(self.tokens),
            "special": np.array(self.special),
            "position": np.array(self.position),
            "layers": np.array(self.raw.layers),
        }
        for name, result in self.methods.items():
            arrays[name] = np.stack(
                [result.at(self.position, layer) for layer in result.layers]
            )  # [layer, token]
        arrays |= {name: importance.values for name, importance in self.importance.items()}
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        predicted = (
            "" if self.prediction is None else f", {self.prediction[0]} ({self.prediction[1]:.3f})"
        )
        return f"<Explanation: {len(self.tokens)} tokens, position {self.position} of {self.model}{predicted}>"


def explain(
    value: Any,
    *,
    model: Any = BUNDLED,
    position: int | None = None,
    target: int | str | None = None,
    importance: Iterable[str] | str = ("blank_out", "input_gradient"),
    heads: str | None = "mean",
    residual: float = RESIDUAL,
    normalize: str | None = "sum",
    truncation: bool = False,
    workers: int = 1,
) -> Explanation:
    """Explain what a model makes of one input (a text, token ids, an image): prediction, token attention, importance.

    model: a name or folder as `load` takes it, a `Model`, or a Hugging Face model; the one that ships with attnflow if not given.
    position: explained instead of the focal one. target: the class whose probability importance watches; the prediction if not given.
    importance: which to compute, "blank_out" and "input_gradient"; () for none. It is left out where a model has none: for images,
    encoder-decoders and models that predict nothing.

    >>> found = explain("the key to the cabinets")
    >>> found.prediction[0], found.flow.at(position=0).shape
    ('singular', (6,))
    """
    model = (
        load(model)
        if isinstance(model, str | os.PathLike)
        else model
        if isinstance(model, Model)
        else Model(model)
    )
    wanted = [importance] if isinstance(importance, str) else list(importance)
    for name in wanted:
        if name not in IMPORTANCES:
            raise OptionError(f"unknown importance {name!r}; choose from {', '.join(IMPORTANCES)}")
    if are_many(value):
        raise OptionError(
            f"explain takes one input; got a list of {len(value)}: call it for each,"
            " or use explain_corpus for a file of them"
        )
    encoded = model.encode(value, truncation=truncation)
    if target is not None and not model.predicts:
        raise OptionError(
            f"a target is a class that the model predicts, and {model.name} has no head that"
            f" predicts; got {target!r}: leave it out"
        )
    aim = None if target is None else model.target(target)
    (reading,) = read_batch(model, [encoded], targets=[aim], position=position, heads=heads)
    attention, position = reading.attention, reading.position
    graph = attention.graph(residual=residual)
    every = range(1, graph.depth + 1)
    options: dict[str, Any] = {"layers": every, "normalize": normalize}
    with collect_notices():  # of all rows; what is said is about the one that is shown
        flows = flow(
            graph,
            positions=None if graph.size <= ALL_FLOWS else [position],
            workers=workers,
            **options,
        )
    scored: dict[str, Importance] = {}
    by_word: dict[str, Importance] = {}
    if model.predicts and not model.is_vision and not model.is_encoder_decoder:
        for name in wanted:
            scored[name] = score_tokens(model, reading, name)
            if encoded.words is not None:
                by_word[name] = score_words(model, reading, scored[name])
    return Explanation(
        text=value,
        model=model.name,
        tokens=(*encoded.tokens, *encoded.decoder_tokens),
        special=(*encoded.special, *[False] * len(encoded.decoder_tokens)),
        position=position,
        prediction=reading.prediction,
        attention=attention,
        raw=raw(graph, **options),
        rollout=rollout(graph, **options),
        flow=flows,
        importance=scored,
        word_importance=by_word,
        notes=describe_flow(flows.select(position, graph.depth)),
        residual=residual,
    )


def score_tokens(model: Model, reading: Reading, name: str, **options: Any) -> Importance:
    """One importance of each token, or of groups of them; blank-out keeps its sign."""
    options |= {"signed": True} if name == "blank_out" else {}
    (found,) = score_importance(model, [reading], name, position=reading.position, **options)
    return found


def score_words(model: Model, reading: Reading, by_token: Importance) -> Importance:
    """The same of each word: blank-out blanks it as a whole, others are summed over its tokens."""
    if by_token.method != "blank_out":
        return by_token.by_word()
    words = word_groups(by_token.tokens, by_token.words)
    values = by_token.values[[word.positions[0] for word in words]]
    several = [place for place, word in enumerate(words) if len(word.positions) > 1]
    if several:  # a word of one token is blanked out already
        groups = [words[place] for place in several]
        values[several] = score_tokens(model, reading, "blank_out", groups=groups).values
    names = tuple(word.name for word in words)
    return replace(by_token, values=values, tokens=names, words=None, groups=words)


def describe_flow(row: TokenAttention) -> tuple[str, ...]:
    """What has to be said of a row of flow that is shown, if anything."""
    with collect_notices() as notices:
        warn_if_even(row)
    return tuple(notices)
