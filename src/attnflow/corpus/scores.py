"""What the stored scores say: rank correlations with importance, and the strongest words.

No model runs, unless faithfulness is asked for.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from attnflow.analysis.evaluate.yardsticks import Yardsticks, check_best
from attnflow.analysis.faithfulness.faithfulness import choose_value
from attnflow.analysis.faithfulness.metrics import prefers_lower
from attnflow.analysis.job import read_faithfulness
from attnflow.analysis.statistics import (
    STATISTIC_NAMES,
    STATISTICS,
    bootstrap,
    check_statistic,
    summarise,
    treat_undefined,
)
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.choices import Choices
from attnflow.core.groups import word_groups
from attnflow.core.io.formatting import Panel
from attnflow.core.io.tables import Table
from attnflow.core.provenance import Source
from attnflow.core.text import is_common
from attnflow.corpus.faithfulness import measure_rows, open_same, stack_values
from attnflow.corpus.job import StoredJob, recall_foil
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import require_pyarrow
from attnflow.corpus.text_rows import TextRow, read_text_rows
from attnflow.edges.edge_weight import split_name
from attnflow.errors import OptionError
from attnflow.models.load import ModelLike
from attnflow.models.predict import number_foil
from attnflow.progress import progress_bar


class CorpusReportRow(NamedTuple):
    """A method in a layer, by one yardstick; columns as in `CorpusReport.columns`."""

    against: str
    method: str
    layer: int | None
    mean: float
    low: float
    high: float
    std: float
    examples: int
    undefined: int
    replacement: str | None = None

    def format(self) -> list[str | None]:
        """The cells as they are printed; low and high share one."""
        return [
            self.against,
            self.method,
            None if self.layer is None else str(self.layer),
            f"{self.mean:.3f}",
            f"{self.low:.3f} to {self.high:.3f}",
            f"{self.std:.3f}",
            str(self.examples),
            str(self.undefined),
            self.replacement,
        ]


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
    contrasts
        Whether faithfulness watched the logit of the target minus that of a foil.
    """

    columns: ClassVar = CorpusReportRow._fields[:-1]

    name: str
    layers: dict[str, tuple[int, ...]]
    correlations: dict[tuple[str, str], Floats]
    special_tokens: bool = False
    seed: int = 0
    source: Source | None = None
    statistic: str = "spearman"
    undefined: str = "drop"
    measured: dict[tuple[str, str, str], Floats] = field(default_factory=dict)
    contrasts: bool = False

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*self.columns, "replacement") if self.measured else self.columns

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """(against, method, layer, mean, low, high, standard deviation, texts, undefined).

        low and high are the ends of the 95 % interval of the mean; undefined: of how many texts.
        With faithfulness there is one more column, the replacement.
        """
        width = len(self._columns)
        return (row[:width] for row in self.named_rows())

    def named_rows(self) -> Iterator[CorpusReportRow]:
        """The same rows with names for their columns."""
        plain = {(name, None, method): rows for (name, method), rows in self.correlations.items()}
        for (against, way, method), by_layer in (plain | self.measured).items():
            treated = self.undefined if way is None else "drop"
            for layer, values in zip(self.layers.get(method, (None,)), by_layer, strict=True):
                mean, deviation, texts, undefined = summarise(values, treated)
                low, high = bootstrap(treat_undefined(values, treated), seed=self.seed)
                yield CorpusReportRow(
                    against, method, layer, mean, low, high, deviation, texts, undefined, way
                )

    def _panels(self) -> Iterator[Panel]:
        """One line per yardstick, method and layer."""
        kept = "included" if self.special_tokens else "left out"
        value = " (of the logit of the target minus that of the foil)" if self.contrasts else ""
        more = f" and faithfulness{value}" if self.measured else ""
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
        cells = (row.format()[: len(header)] for row in self.named_rows())
        yield Panel(header, cells, caption, note)


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
    faithfulness: Choices | None = (),
    replacement: object = None,
    target_of: str | None = None,
    best: bool = False,
    model: "ModelLike | None" = None,
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
    statistic, undefined, faithfulness, replacement, target_of, best
        As in `evaluate`; for faithfulness the model runs, on perturbed texts, and watches the
        difference of logits if the corpus has a foil.
    model
        The model that the corpus was computed with, needed for faithfulness; loaded by the name
        that the folder has noted if None.
    """
    require_pyarrow()
    check_statistic(statistic, undefined)
    if limit is not None:
        check_count("limit", limit)
    manifest = read_token_scores(folder)
    job = manifest.options
    chosen = choose_stored(methods, job.results, "method", folder)
    scored = choose_stored(against, job.importance, "importance", folder)
    foil = recall_foil(job.foil)
    watched = choose_value(target_of, contrasts=foil is not None)
    measurement, yardsticks = read_faithfulness(faithfulness, watched), None
    check_best(best, measurement)
    if measurement is not None:
        opened = open_same(folder, manifest, model)
        yardsticks = Yardsticks.read(opened, measurement, replacement, best=best)
    if not scored and yardsticks is None:
        raise OptionError(
            f"{folder} holds no importance to compare with; compute it with importance, blank_out"
            " or input_gradient"
        )
    place = Path(folder)
    texts = islice(read_text_rows(place, manifest, [*chosen, *scored]), limit)
    measured = {}
    if yardsticks is not None:
        rows = read_text_rows(place, manifest, chosen, ["text", "tokens", "label"])
        against_foil = number_foil(yardsticks.model, foil)
        found = measure_rows(yardsticks, islice(rows, limit), chosen, job.position, against_foil)
        total = manifest.rows if limit is None else min(limit, manifest.rows)
        with progress_bar("evaluating") as tick:
            measured = stack_values(found, lambda done: tick(done, total))
    return CorpusReport(
        name=os.fspath(folder),
        layers={method: job.layers[method] for method in chosen},
        correlations=correlate(texts, job, chosen, scored, statistic, special_tokens),
        special_tokens=special_tokens,
        seed=seed,
        source=Source(
            manifest.model["name"],
            manifest.model["fingerprint"],
            manifest.versions,
            edges=job.edges[0] if len(job.edges) == 1 else None,
            residual=job.residual,
        ),
        statistic=statistic,
        undefined=undefined,
        measured=measured,
        contrasts=foil is not None,
    )


def correlate(
    texts: Iterable[TextRow],
    job: StoredJob,
    methods: Sequence[str],
    against: Sequence[str],
    statistic: str,
    special_tokens: bool,
) -> dict[tuple[str, str], Floats]:
    """By (importance, method): [layer, text], the rank correlation."""
    found: dict[tuple[str, str], list[Floats]] = {
        (name, method): [] for name in against for method in methods
    }
    for text in texts:
        ranked = text.ranked(special_tokens)
        scores = text.round_scores([*methods, *against])
        kept = {name: values[..., ranked] for name, values in scores.items()}
        for (name, method), rows in found.items():
            rows.append(STATISTICS[statistic](kept[method], kept[name]))
    return {
        (name, method): np.stack(rows, axis=1) if rows else np.empty((len(job.layers[method]), 0))
        for (name, method), rows in found.items()
    }


def read_token_scores(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a corpus whose scores are of tokens; one of segments is refused."""
    manifest = Manifest.read(folder)
    if manifest.options.segments is not None:
        raise OptionError(
            f"{folder} holds shares of {manifest.options.segments}, not of tokens: read them"
            " with read_corpus"
        )
    return manifest


def choose_stored(
    wanted: Sequence[str] | None, stored: Sequence[str], what: str, folder: object
) -> list[str]:
    """The requested names, which must be stored; all stored ones if None."""
    for name in wanted or ():
        if name not in stored:
            raise OptionError(
                f"{folder} holds no {what} {name!r}; it has {', '.join(stored) or 'none'}"
            )
    return list(stored if wanted is None else wanted)


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
    job = manifest.options
    choose_stored([method], job.results, "method", folder)
    check_count("k", k)
    check_count("min_count", min_count)
    layers = job.layers[method]
    top = layers.index(max(layers))
    adds_up = split_name(method)[1] != "flow"
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for text in read_text_rows(Path(folder), manifest, [method], ["tokens", "words"]):
        for name, value in sum_by_word(text, text.scores[method][top], adds_up):
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


def sum_by_word(text: TextRow, values: Floats, adds_up: bool) -> Iterator[tuple[str, float]]:
    """The words of a text and their values [token], without special tokens.

    adds_up: whether the value of a word is the sum of its tokens'.
    """
    places = np.flatnonzero(text.ranked(special_tokens=False)).tolist()
    words = text.words or range(len(text.tokens))
    groups = word_groups([text.tokens[place] for place in places], [words[p] for p in places])
    for group in groups:
        if not adds_up and len(group.positions) > 1:
            raise OptionError(
                f"flows to the pieces of a word do not add up, and {group.name!r} has"
                f" {len(group.positions)} pieces: rank words by rollout or raw"
            )
        yield group.name, sum(float(values[places[position]]) for position in group.positions)
