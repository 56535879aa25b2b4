"""Which statements of the paper hold on which models: verdicts, and the table of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from attnflow.core.io.formatting import Panel
from attnflow.core.io.tables import Table
from attnflow.models.load import SHIPPED
from attnflow.paper.pictures import PRONOUNS, REFERENTS, compare_words, explain_masks, find_word
from attnflow.paper.runs import (
    Mean,
    choose_importance,
    choose_sentences,
    evaluate_models,
    load_seeds,
    summarise_runs,
)
from attnflow.paper.statements import (
    STATEMENTS,
    TOP_LAYER,
    Evidence,
    NamedParts,
    PaperMeans,
    Statement,
)

HELD, OPEN, NOT_HELD = "held", "open", "not held"
JUDGED_SENTENCES = 2000  # as many as in the paper's tables
PAPER = "the paper"
JUDGED_LAYERS = range(1, TOP_LAYER + 1)


@dataclass(frozen=True)
class Verdict:
    """Whether a statement holds, and the weakest of its measured parts."""

    verdict: str
    part: str
    mean: Mean
    agreeing: str = ""  # how many models say yes, where each says yes or no

    def __str__(self) -> str:
        if self.agreeing:
            return f"{self.verdict}, {self.agreeing}" if self.verdict == OPEN else self.verdict
        figure = self.mean if self.mean.low < self.mean.high else f"{self.mean.value:.2f}"
        return f"{self.verdict}: {figure}{f' ({self.part})' if self.part else ''}"


def judge(statement: Statement, parts: NamedParts) -> Verdict:
    """Held if the intervals of all parts are beyond the bound, not held if one falls short of it.

    Otherwise it is open.
    """
    means = {name: summarise_runs(values) for name, values in parts.items()}
    bound = statement.bound
    # by how much a part is beyond the bound: at least, on average, at most
    margins = {
        name: (bound - mean.high, bound - mean.value, bound - mean.low)
        if statement.below
        else (mean.low - bound, mean.value - bound, mean.high - bound)
        for name, mean in means.items()
    }
    verdict = OPEN
    if all(least > 0 for least, _, _ in margins.values()):
        verdict = HELD
    elif any(most <= 0 for _, _, most in margins.values()):
        verdict = NOT_HELD
    weakest = min(margins, key=lambda name: margins[name][1])
    answers, count = means[weakest].value, len(parts[weakest])
    agreeing = f"{round(answers * count)} of {count} models" if statement.labels else ""
    return Verdict(verdict, weakest, means[weakest], agreeing)


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict on one column of models."""

    tokens: str  # the ranked tokens: "with CLS", "without CLS", or empty
    says: str
    criterion: str
    models: str
    verdict: Verdict


@dataclass(frozen=True, eq=False)
class Judgement(Table):
    """All statements on all columns of models."""

    columns: ClassVar = (
        "tokens",
        "statement",
        "holds if",
        "models",
        "verdict",
        "part",
        "value",
        "low",
        "high",
    )

    judged: tuple[Judged, ...]
    entropies: dict[str, tuple[Mean, ...]]  # by models: of raw attention, per layer
    # by models and score: the share of words that CLS outranks, per layer if the score has layers
    ranks: dict[tuple[str, str], tuple[Mean, ...]]
    data: str
    command: str

    def rows(self) -> Iterator[tuple[str | float, ...]]:
        """One row per statement and column of models."""
        for each in self.judged:
            mean = each.verdict.mean
            yield (
                each.tokens,
                each.says,
                each.criterion,
                each.models,
                each.verdict.verdict,
                each.verdict.part,
                mean.value,
                mean.low,
                mean.high,
            )

    def _panels(self) -> Iterator[Panel]:
        captions = {
            "": "Attention and sentences",
            "with CLS": "Correlations, with CLS among the ranked tokens, as in the paper",
            "without CLS": "Correlations of the words alone, without CLS",
        }
        for tokens, caption in captions.items():
            chosen = [each for each in self.judged if each.tokens == tokens]
            names = list(dict.fromkeys(each.models for each in chosen))
            cells: dict[tuple[str, str], dict[str, str]] = {}
            for each in chosen:
                cells.setdefault((each.says, each.criterion), {})[each.models] = str(each.verdict)
            lines = [
                [*key, *(by_model.get(name, "") for name in names)]
                for key, by_model in cells.items()
            ]
            if lines:
                yield Panel(["statement", "holds if", *names], lines, f"**{caption}**")
        layers = [f"layer {layer}" for layer in JUDGED_LAYERS]
        yield Panel(
            ["models", *layers],
            [[name, *map(str, means)] for name, means in self.entropies.items()],
            "**Entropy of CLS's raw attention, relative to its maximum**",
        )
        lines = [
            [*key, *map(str, means), *[""] * (len(layers) - len(means))]
            for key, means in self.ranks.items()
        ]
        note = (
            f"Held: the 95 % interval, by bootstrap over sentences and models, is beyond the bound;"
            f" not held: it falls short of it; open: neither. Of several parts the weakest is"
            f" shown. Sentences: {self.data}.\n\nCommand: `{self.command}`"
        )
        caption = "**The share of words that CLS outranks; by importance, one number**"
        yield Panel(["models", "score", *layers], lines, caption, note)


def judge_statements(
    models: Sequence[str] = tuple(SHIPPED),
    *,
    data: Sequence[Path] = (),
    side: str = "test",
    limit: int | None = None,
    seed: int = 0,
    masked_lm: str | None = None,
    command: str = "",
) -> Judgement:
    """Every statement on every column of models; seeds of one column are separated by commas.

    The statements about pronouns need a masked LM.
    """
    sentences, where = choose_sentences(
        data, JUDGED_SENTENCES if limit is None else limit, seed=seed, side=side
    )
    against = choose_importance("blank_out") | choose_importance("input_gradient")
    columns = {names: load_seeds(names, "statements") for names in models}
    printed = PaperMeans()
    judged = [
        Judged("with CLS", each.says, each.criterion, PAPER, judge(each, each.correlated(printed)))
        for each in STATEMENTS
        if each.correlated is not None
    ]
    pronouns = [] if masked_lm is None else list(judge_pronouns(masked_lm))
    entropies: dict[str, tuple[Mean, ...]] = {}
    ranks: dict[tuple[str, str], tuple[Mean, ...]] = {}
    counted = len(sentences)
    for names, loaded in columns.items():
        evidence = Evidence(loaded, evaluate_models(loaded, sentences, against))
        judged += judge_models(names, evidence)
        entropies[names] = tuple(map(summarise_runs, evidence.entropies.values()))
        for name in against:
            ranks[names, name] = (summarise_runs(evidence.outrank_by_importance(name)),)
        for name in ("rollout", "flow"):
            ranks[names, name] = tuple(
                summarise_runs(evidence.outrank(name, layer)) for layer in JUDGED_LAYERS
            )
        counted = min(counted, evidence.runs.examples)
    return Judgement((*judged, *pronouns), entropies, ranks, f"{where}, n = {counted:,}", command)


def judge_models(names: str, evidence: Evidence) -> Iterator[Judged]:
    """Every statement on one column of models."""
    words = replace(evidence, special=False)
    for each in STATEMENTS:
        says, criterion = each.says, each.criterion
        if each.measure is not None:
            yield Judged("", says, criterion, names, judge(each, each.measure(evidence)))
        if each.correlated is not None:
            for tokens, ranked in (("with CLS", evidence), ("without CLS", words)):
                verdict = judge(each, each.correlated(ranked))
                yield Judged(tokens, says, criterion, names, verdict)


# ---- pronouns ------------------------------------------------------------------------------------


def judge_pronouns(name: str) -> Iterator[Judged]:
    """What a masked pronoun attends to in the top layer: does it fit the more probable word?"""
    model, explanations = explain_masks(PRONOUNS, name)
    fitting = (("rollout", "flow"), ("flow",))
    for explanation, referents, methods in zip(explanations, REFERENTS, fitting, strict=True):
        chances = compare_words(model, explanation, tuple(referents))
        likely, other = sorted(chances, key=lambda word: -chances[word])
        places = [find_word(explanation, referents[word]) for word in (likely, other)]
        fits = {}
        for method, result in explanation.results.items():
            first, second = result.at(explanation.position)[places]
            fits[method] = bool(first > second)
        held = all(fit == (method in methods) for method, fit in fits.items())
        shown = ", ".join(method for method, fit in fits.items() if fit) or "none"
        yield Judged(
            "",
            f'"{explanation.text}": {" and ".join(methods)} fit the prediction, others do not',
            "in the top layer more on whom the more probable pronoun means",
            name,
            Verdict(
                HELD if held else NOT_HELD,
                f"{likely} {chances[likely]:.2f}; fitting: {shown}",
                Mean(float(held), 0.0, float(held), float(held)),
            ),
        )
