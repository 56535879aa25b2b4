"""What the stored scores say: rank correlations with importance, and the strongest words.

No model runs.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from attnflow.analysis.statistics import bootstrap, spearman
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.files import dump_json, write_by_ending
from attnflow.core.groups import word_groups
from attnflow.core.provenance import Source
from attnflow.core.tables import Panel, Table
from attnflow.core.text import is_common
from attnflow.corpus.manifest import Manifest, removes_positions
from attnflow.corpus.reading import read_shards
from attnflow.corpus.rows import require_pyarrow
from attnflow.errors import OptionError

STORED_DIGITS = 6  # of a score in float32; what follows is rounding, and breaks no tie


@dataclass(frozen=True, eq=False)
class CorpusReport(Table):
    """Rank correlations of stored methods with stored importance, text by text.

    Parameters
    ----------
    name
        The folder of the corpus.
    layers
        The layers of each method.
    correlations
        By (against, method): [layer, text]; NaN where a correlation is undefined.
    special_tokens
        Whether CLS, SEP and the like take part.
    seed
        The seed of the bootstrap.
    source
        Where the scores came from.
    """

    columns: ClassVar = (
        "against",
        "method",
        "layer",
        "mean",
        "low",
        "high",
        "std",
        "examples",
        "undefined",
    )

    name: str
    layers: dict[str, tuple[int, ...]]
    correlations: dict[tuple[str, str], Floats]
    special_tokens: bool = False
    seed: int = 0
    source: Source | None = None

    def rows(self) -> Iterator[tuple[str, str, int, float, float, float, float, int, int]]:
        """(against, method, layer, mean, low, high, standard deviation, texts, undefined).

        low and high are the ends of the 95 % interval of the mean; undefined: of how many texts.
        """
        for (against, method), by_layer in self.correlations.items():
            for layer, values in zip(self.layers[method], by_layer, strict=True):
                known = values[~np.isnan(values)]
                mean, deviation = (
                    (float(known.mean()), float(known.std()))
                    if len(known)
                    else (float("nan"), float("nan"))
                )
                low, high = bootstrap(known, seed=self.seed)
                undefined = len(values) - len(known)
                yield against, method, layer, mean, low, high, deviation, len(values), undefined

    def _panels(self) -> Iterator[Panel]:
        """One line per importance, method and layer."""
        kept = "included" if self.special_tokens else "left out"
        caption = f"Spearman correlation in {self.name}; special tokens {kept}"
        header = [
            "against",
            "method",
            "layer",
            "mean",
            "95 % interval",
            "std",
            "texts",
            "undefined",
        ]
        yield Panel(header, map(format_correlation, self.rows()), caption)

    def to_json(self) -> str:
        """The rows as JSON, one object each."""
        return dump_json([dict(zip(self.columns, row, strict=True)) for row in self.rows()])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .md, .csv, .tex or .json.

        Parameters
        ----------
        path
            The file; its ending says which.
        """
        forms = {
            ".md": self.to_markdown,
            ".csv": self.to_csv,
            ".tex": self.to_latex,
            ".json": self.to_json,
        }

        def writer(form: Callable[[], str]) -> Callable[[Any], object]:
            return lambda file: file.write(form().encode(errors="backslashreplace"))

        return write_by_ending(path, {ending: writer(form) for ending, form in forms.items()})


def format_correlation(row: Sequence[Any]) -> list[str]:
    """The cells of one row as they are printed."""
    against, method, layer, mean, low, high, deviation, texts, undefined = row
    numbers = [f"{mean:.3f}", f"{low:.3f} to {high:.3f}", f"{deviation:.3f}"]
    return [against, method, str(layer), *numbers, str(texts), str(undefined)]


def evaluate_corpus(
    folder: str | os.PathLike[str],
    *,
    methods: Sequence[str] | None = None,
    against: Sequence[str] | None = None,
    special_tokens: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> CorpusReport:
    """How well the stored methods rank tokens: Spearman's correlation with stored importance.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    methods
        Which of the stored methods; all if None.
    against
        Which of the stored importances; all if None.
    special_tokens
        Whether CLS, SEP and the like take part.
    limit
        At most so many texts.
    seed
        The seed of the bootstrap.
    """
    require_pyarrow()
    manifest = Manifest.read(folder)
    chosen = choose_stored(methods, manifest.options["methods"], "method", folder)
    scored = choose_stored(against, manifest.options["importance"], "importance", folder)
    if not scored:
        raise OptionError(
            f"{folder} holds no importance to compare with; compute it with importance, blank_out"
            " or input_gradient"
        )
    if limit is not None:
        check_count("limit", limit)
    correlations: dict[tuple[str, str], list[Floats]] = {
        (name, method): [] for name in scored for method in chosen
    }
    for count, row in enumerate(read_rows(Path(folder), manifest, [*chosen, *scored])):
        if count == limit:
            break
        kept = find_kept(row, special_tokens)
        scores = {name: round_scores(row[name])[..., kept] for name in (*chosen, *scored)}
        for name, method in correlations:
            correlations[name, method].append(spearman(scores[method], scores[name]))
    layers = {method: tuple(manifest.options["layers"][method]) for method in chosen}
    by_layer = {
        (name, method): np.stack(rows, axis=1) if rows else np.empty((len(layers[method]), 0))
        for (name, method), rows in correlations.items()
    }
    source = Source(
        manifest.model["name"],
        manifest.model["fingerprint"],
        manifest.versions,
        residual=manifest.options["residual"],
    )
    return CorpusReport(os.fspath(folder), layers, by_layer, special_tokens, seed, source)


def choose_stored(
    wanted: Sequence[str] | None, stored: Sequence[str], what: str, folder: object
) -> list[str]:
    """Those that were asked for, if they are stored; all that are if None."""
    for name in wanted or ():
        if name not in stored:
            raise OptionError(
                f"{folder} holds no {what} {name!r}; it has {', '.join(stored) or 'none'}"
            )
    return list(stored if wanted is None else wanted)


def read_rows(
    folder: Path, manifest: Manifest, columns: Sequence[str]
) -> Iterator[Mapping[str, Any]]:
    """These columns of each row, and what tells which tokens are ranked."""
    removed = ["removed"] if removes_positions(manifest.options) else []
    for batch in read_shards(folder, manifest, ["special", *removed, *columns]):
        yield from batch.to_pylist()


def find_kept(
    row: Mapping[str, Any], special_tokens: bool
) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """[token]: which tokens are ranked."""
    special = np.array(row["special"], bool)
    kept = np.ones(len(special), bool) if special_tokens else ~special
    kept[row.get("removed", [])] = False
    return kept


def round_scores(values: Any) -> Floats:
    """Scores in float64, relative to the largest of each row, to the digits that float32 holds."""
    scores = np.asarray(values, dtype=np.float64)
    largest = np.abs(scores).max(axis=-1, keepdims=True)
    return np.round(scores / np.where(largest > 0, largest, 1.0), STORED_DIGITS)


# ---- words --------------------------------------------------------------------------------------


def top_words(
    folder: str | os.PathLike[str],
    *,
    method: str = "rollout",
    k: int = 20,
    min_count: int = 5,
    common: bool = False,
) -> list[tuple[str, float, int]]:
    """The words with the highest mean token attention in the top layer stored.

    Gives (word in lower case, mean, how often it occurs). The tokens of a word are taken together
    as `TokenAttention.by_word` does; flows to them do not add up, so by flow words are ranked only
    where each is one token. Special tokens are left out.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    method
        One of the stored methods.
    k
        How many words.
    min_count
        Leave out words that occur less often.
    common
        Whether to keep common words and punctuation.
    """
    require_pyarrow()
    manifest = Manifest.read(folder)
    choose_stored([method], manifest.options["methods"], "method", folder)
    check_count("k", k)
    check_count("min_count", min_count)
    layers = manifest.options["layers"][method]
    top = layers.index(max(layers))
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for row in read_rows(Path(folder), manifest, ["tokens", "words", method]):
        for name, value in sum_by_word(row, method, row[method][top]):
            word = name.lower()
            if common or not is_common(word):
                sums[word] += value
                counts[word] += 1
    means = [
        (word, total / counts[word], counts[word])
        for word, total in sums.items()
        if counts[word] >= min_count
    ]
    return sorted(means, key=lambda entry: (-entry[1], entry[0]))[:k]


def sum_by_word(
    row: Mapping[str, Any], method: str, values: Sequence[float]
) -> Iterator[tuple[str, float]]:
    """The words of a row and their values, without special tokens."""
    places = np.flatnonzero(find_kept(row, special_tokens=False)).tolist()
    words = row["words"] or range(len(row["tokens"]))
    groups = word_groups([row["tokens"][place] for place in places], [words[p] for p in places])
    for group in groups:
        if method == "flow" and len(group.positions) > 1:
            raise OptionError(
                f"flows to the pieces of a word do not add up, and {group.name!r} has"
                f" {len(group.positions)} pieces: rank words by rollout or raw"
            )
        yield group.name, sum(values[places[position]] for position in group.positions)
