"""Faithfulness of the scores that a corpus holds: the model runs, on perturbed texts alone."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from attnflow.analysis.evaluate.yardsticks import Faithful, Subject, Yardsticks
from attnflow.analysis.importance.variant import Variant
from attnflow.analysis.importance.watch import watch
from attnflow.core.arrays import Floats
from attnflow.corpus.formats import escape
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.text_rows import TextRow
from attnflow.errors import FileError, OptionError
from attnflow.models.fingerprint import model_fingerprint
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import FoilNumber

TEXTS_TOGETHER = 4  # texts that run together, and between two steps of the progress bar
NEEDS_MODEL = "give it as model (attnflow corpus evaluate --model)"


def open_same(
    folder: str | os.PathLike[str], manifest: Manifest, model: "ModelLike | None"
) -> Model:
    """The model that a corpus was computed with: the one that is given, or the one it names."""
    name = manifest.model["name"]
    if model is None:
        if manifest.is_of_object:
            raise OptionError(
                f"faithfulness needs the model, and {folder} was computed with a loaded one,"
                f" a {name}: {NEEDS_MODEL}"
            )
        model = name
    opened = open_model(model)
    if model_fingerprint(opened) != manifest.model["fingerprint"]:
        raise FileError(
            f"faithfulness needs the model that {folder} was computed with, {name};"
            f" {opened.name} has other weights or another tokenizer"
        )
    return opened


def measure_rows(
    yardsticks: Yardsticks,
    rows: Iterable[TextRow],
    methods: Sequence[str],
    position: str | int,
    foil: FoilNumber | None = None,
) -> Iterator[tuple[Faithful, ...]]:
    """How faithful the stored scores of each row are, a few rows at a time.

    rows: with text, tokens, label and the scores of each method. position: as in the manifest.
    foil: what every target is contrasted with, if anything.
    """
    model = yardsticks.model
    explained = None if isinstance(position, str) else position
    remaining = iter(rows)
    while chunk := list(islice(remaining, TEXTS_TOGETHER)):
        encoded = [model.encode(row.text) for row in chunk]
        for value, row in zip(encoded, chunk, strict=True):
            if [escape(token) for token in value.tokens] != list(row.tokens):
                raise FileError(
                    "the stored tokens must be those that the model's tokenizer gives;"
                    f" those of {row.text[:60]!r} are others"
                )
        places = [model.logit_position(value, explained) for value in encoded]
        labels = [None if row.label is None else model.target(row.label) for row in chunk]
        variants = [
            Variant(value, place, label, foil)
            for value, place, label in zip(encoded, places, labels, strict=True)
        ]
        watched = watch(model, variants, None)
        subjects = [
            Subject(value, place, explained, seen.target, seen.foil, tuple(row.removed))
            for value, place, seen, row in zip(encoded, places, watched, chunk, strict=True)
        ]
        rounded = [row.round_scores(methods) for row in chunk]
        scores = {name: [each[name] for each in rounded] for name in methods}
        yield from yardsticks.measure(subjects, scores)


def stack_values(
    measured: Iterable[tuple[Faithful, ...]], tick: Callable[[int], None]
) -> dict[tuple[str, str, str], Floats]:
    """By (metric, replacement, method): [layer, text].

    tick: called with the number of texts so far.
    """
    found: dict[tuple[str, str, str], list[Floats]] = {}
    for number, ways in enumerate(measured, start=1):
        tick(number)
        for each in ways:
            for metric, by_method in each.values.items():
                for method, values in by_method.items():
                    found.setdefault((metric, each.replacement, method), []).append(values)
    return {key: np.stack(rows, axis=1) for key, rows in found.items()}
