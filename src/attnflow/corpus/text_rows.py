"""`read_text_rows`: the stored rows of a corpus, one text at a time, with typed columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.read_corpus import read_shards

STORED_DIGITS = 6  # of a score in float32; what follows is rounding, and breaks no tie


@dataclass(frozen=True, eq=False)
class TextRow:
    """A text with its scores; columns that were not read have the defaults.

    Parameters
    ----------
    special
        [token], whether it is one of the model's own, such as CLS.
    scores
        By result [layer, token], by importance [token].
    removed
        Positions that the graph was made without.
    words
        [token], the number of its word.
    """

    special: npt.NDArray[np.bool_]
    scores: dict[str, Floats]
    removed: Sequence[int] = ()
    id: str = ""
    text: str = ""
    tokens: Sequence[str] = ()
    words: Sequence[int | None] | None = None
    label: str | None = None
    prediction: str | None = None
    probability: float | None = None

    def ranked(self, special_tokens: bool) -> npt.NDArray[np.bool_]:
        """[token], which ones are ranked; special_tokens: whether those are."""
        chosen = np.ones(len(self.special), bool) if special_tokens else ~self.special
        chosen[list(self.removed)] = False
        return chosen

    def round_scores(self, names: Sequence[str]) -> dict[str, Floats]:
        """Some scores, relative to the largest of their row, to the digits that float32 holds."""
        rounded = {}
        for name in names:
            scores = self.scores[name]
            largest = np.abs(scores).max(axis=-1, keepdims=True)
            rounded[name] = np.round(scores / np.where(largest > 0, largest, 1.0), STORED_DIGITS)
        return rounded


def read_text_rows(
    folder: Path, manifest: Manifest, scores: Sequence[str], columns: Sequence[str] = ()
) -> Iterator[TextRow]:
    """All rows with some of their scores and of their other columns."""
    removed = ["removed"] if manifest.options.removes_positions else []
    for batch in read_shards(folder, manifest, ["special", *removed, *columns, *scores]):
        for row in batch.to_pylist():
            yield TextRow(
                np.array(row["special"], bool),
                {name: np.array(row[name], np.float64) for name in scores},
                **{name: row[name] for name in (*removed, *columns)},
            )
