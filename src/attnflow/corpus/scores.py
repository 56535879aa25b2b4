"""What the stored scores say: rank correlations with importance, and the strongest words.

No model runs, unless faithfulness is asked for.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from attnflow.analysis.metrics import prefers_lower
from attnflow.analysis.statistics import (
    STATISTIC_NAMES,
    STATISTICS,
    bootstrap,
    check_statistic,
    summarise,
    treat_undefined,
)
from attnflow.analysis.yardsticks import Yardsticks
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.formatting import Panel
from attnflow.core.groups import word_groups
from attnflow.core.provenance import Source
from attnflow.core.tables import Table
from attnflow.core.text import is_common
from attnflow.corpus.manifest import Manifest, removes_positions
from attnflow.corpus.measured import measure_rows, open_same, stack_values
from attnflow.corpus.reading import read_shards
from attnflow.corpus.rows import require_pyarrow
from attnflow.corpus.shard_tables import name_results
from attnflow.errors import OptionError

STORED_DIGITS = 6  # of a score in float32; what follows is rounding, and breaks no tie


@dataclass(frozen=True, eq=False)
class CorpusReport(Table):
    """Rank correlations of stored methods with stored importance, and faithfulness, text by text.

    Parameters
    ----------
    name
        The folder of the corpus.
    layers
        The layers by method.
    correlations
        By (against, method): [layer, text]; NaN where a correlation is undefined.
    special_tokens
        Whether CLS, SEP and the like take part.
    seed
        The seed of the bootstrap.
    source
        Where the scores came from.
    statistic, undefined
        As in `Report`.
    measured
        Of faithfulness, by (metric, replacement, method): [layer, text]; a random order and the
        best one found are among the methods.
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
    statistic: str = "spearman"
    undefined: str = "drop"
    measured: dict[tuple[str, str, str], Floats] = field(default_factory=dict)

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*self.columns, "replacement") if self.measured else self.columns

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """(against, method, layer, mean, low, high, standard deviation, texts, undefined).

        low and high are the ends of the 95 % interval of the mean; undefined: of how many texts.
        With faithfulness there is one more column, the replacement.
        """
        plain = {(name, None, method): rows for (name, method), rows in self.correlations.items()}
        for (against, way, method), by_layer in (plain | self.measured).items():
            treated = self.undefined if way is None else "drop"
            for layer, values in zip(self.layers.get(method, (None,)), by_layer, strict=True):
                mean, deviation, texts, undefined = summarise(values, treated)
                low, high = bootstrap(treat_undefined(values, treated), seed=self.seed)
                row = against, method, layer, mean, low, high, deviation, texts, undefined
                yield (*row, way) if self.measured else row

    def _panels(self) -> Iterator[Panel]:
        """One line per yardstick, method and layer."""
        kept = "included" if self.special_tokens else "left out"
        more = " and faithfulness" if self.measured else ""
        zero = "; undefined correlations count as 0" if self.undefined == "zero" else ""
        caption = (
            f"{STATISTIC_NAMES[self.statistic]}{more} in {self.name}; special tokens {kept}{zero}"
        )
        header = [
            "against",
            "method",
            "layer",
            "mean",
            "95 % interval",
            "std",
            "texts",
            "undefined",
            *["replacement"] * bool(self.measured),
        ]
        metrics = dict.fromkeys(metric for metric, _, _ in self.measured)
        lower = [name for name in metrics if prefers_lower(name)]
        note = f"lower is better: {', '.join(lower)}" if lower else ""
        yield Panel(header, map(format_correlation, self.rows()), caption, note)


def format_correlation(row: Sequence[Any]) -> list[str | None]:
    """The cells of one row as they are printed."""
    against, method, layer, mean, low, high, deviation, texts, undefined, *way = row
    numbers = [f"{mean:.3f}", f"{low:.3f} to {high:.3f}", f"{deviation:.3f}"]
    place = None if layer is None else str(layer)
    return [against, method, place, *numbers, str(texts), str(undefined), *way]


def evaluate_corpus(
    folder: str | os.PathLike[str],
    *,
    methods: Sequence[str] | None = None,
    against: Sequence[str] | None = None,
    special_tokens: bool = False,
    limit: int | None = None,
    seed: int = 0,
    statistic: str = "spearman",
    undefined: str = "drop",
    faithfulness: Any = (),
    replacement: Any = None,
    target_of: str = "probability",
    model: Any = None,
) -> CorpusReport:
    """How well the stored methods rank tokens: rank correlation with stored importance.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    methods
        Which of the stored results, by their columns, like "rollout" or "contribution rollout";
        all if None.
    against
        Which of the stored importances; all if None.
    special_tokens
        Whether CLS, SEP and the like take part.
    limit
        The maximum number of texts.
    seed
        The seed of the bootstrap.
    statistic, undefined, faithfulness, replacement, target_of
        As in `evaluate`; for faithfulness the model runs, on perturbed texts.
    model
        The model that the corpus was computed with, needed for faithfulness; loaded by the name
        that the folder has noted if None.
    """
    require_pyarrow()
    check_statistic(statistic, undefined)
    manifest = read_token_scores(folder)
    chosen = choose_stored(methods, manifest.results, "method", folder)
    scored = choose_stored(against, manifest.options["importance"], "importance", folder)
    yardsticks = None
    if callable(faithfulness) or faithfulness:
        opened = open_same(folder, manifest, model)
        yardsticks = Yardsticks.read(opened, faithfulness, replacement, target_of)
    if not scored and yardsticks is None:
        raise OptionError(
            f"{folder} holds no importance to compare with; compute it with importance, blank_out"
            " or input_gradient"
        )
    if limit is not None:
        check_count("limit", limit)
    correlations: dict[tuple[str, str], list[Floats]] = {
        (name, method): [] for name in scored for method in chosen
    }
    for row in islice(read_rows(Path(folder), manifest, [*chosen, *scored]), limit):
        kept = find_kept(row, special_tokens)
        scores = {name: round_scores(row[name])[..., kept] for name in (*chosen, *scored)}
        for name, method in correlations:
            correlations[name, method].append(STATISTICS[statistic](scores[method], scores[name]))
    layers = {method: tuple(manifest.options["layers"][method]) for method in chosen}
    by_layer = {
        (name, method): np.stack(rows, axis=1) if rows else np.empty((len(layers[method]), 0))
        for (name, method), rows in correlations.items()
    }
    edges = manifest.options["edges"]
    measured = {}
    if yardsticks is not None:
        rows = read_rows(Path(folder), manifest, ["text", "tokens", "label", *chosen])
        rounded = (
            {**row, **{name: round_scores(row[name]) for name in chosen}}
            for row in islice(rows, limit)
        )
        position = manifest.options["position"]
        measured = stack_values(measure_rows(yardsticks, rounded, chosen, position))
    source = Source(
        manifest.model["name"],
        manifest.model["fingerprint"],
        manifest.versions,
        edges=edges[0] if len(edges) == 1 else None,
        residual=manifest.options["residual"],
    )
    return CorpusReport(
        os.fspath(folder),
        layers,
        by_layer,
        special_tokens,
        seed,
        source,
        statistic,
        undefined,
        measured,
    )


def read_token_scores(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a corpus whose scores are of tokens; one of segments is refused."""
    manifest = Manifest.read(folder)
    if manifest.options["segments"] is not None:
        raise OptionError(
            f"{folder} holds shares of {manifest.options['segments']}, not of tokens: read them"
            " with read_corpus"
        )
    return manifest


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
    """Some columns of all rows, and what decides which tokens are ranked."""
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
    """Scores in float64, relative to the largest of their row, to the digits that float32 holds."""
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
        One of the stored results, by its column, like "rollout" or "contribution rollout".
    k
        How many words.
    min_count
        Leave out words that occur less often.
    common
        Whether to keep common words and punctuation.
    """
    require_pyarrow()
    manifest = read_token_scores(folder)
    choose_stored([method], manifest.results, "method", folder)
    check_count("k", k)
    check_count("min_count", min_count)
    layers = manifest.options["layers"][method]
    top = layers.index(max(layers))
    adds_up = method not in name_results(manifest.options["edges"], ["flow"])
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for row in read_rows(Path(folder), manifest, ["tokens", "words", method]):
        for name, value in sum_by_word(row, row[method][top], adds_up):
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
    row: Mapping[str, Any], values: Sequence[float], adds_up: bool
) -> Iterator[tuple[str, float]]:
    """The words of a row and their values, without special tokens.

    adds_up: whether the value of a word is the sum of its tokens'.
    """
    places = np.flatnonzero(find_kept(row, special_tokens=False)).tolist()
    words = row["words"] or range(len(row["tokens"]))
    groups = word_groups([row["tokens"][place] for place in places], [words[p] for p in places])
    for group in groups:
        if not adds_up and len(group.positions) > 1:
            raise OptionError(
                f"flows to the pieces of a word do not add up, and {group.name!r} has"
                f" {len(group.positions)} pieces: rank words by rollout or raw"
            )
        yield group.name, sum(values[places[position]] for position in group.positions)
