"""The statements of the paper about its models, and how each is measured.

A statement is measured in parts: arrays [model, sentence], whose means must all be on one side of a
bound. Statements about correlations are measured with CLS among the ranked tokens, as in the paper,
and without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from attnflow.analysis.evaluate.scored_example import ScoredExample
from attnflow.analysis.explain.explain import explain
from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.arrays import Floats
from attnflow.core.results import measure_spread
from attnflow.models.model import Model
from attnflow.paper.pictures import PICTURED_SENTENCES, find_word
from attnflow.paper.printed import PRINTED_TABLES
from attnflow.paper.runs import Runs

UPPER = (4, 5, 6)  # the layers above layer three
TOP_LAYER = 6
UNIFORM = 0.95  # the share of its maximum from which on entropy is that of almost uniform weights
CLIMB = 0.1  # a change of a correlation that is worth the name
KEY, ARTICLE, FEMALE = PICTURED_SENTENCES
NamedParts = dict[str, Floats]  # by their names: [model, sentence]


class Correlations(Protocol):
    """Correlations of the paper, or of models."""

    def correlate(self, against: str, method: str, layer: int) -> Floats:
        """[model, sentence]: of a method in a layer with an importance."""


class PaperMeans:
    """The means that the paper prints, as if of one model and one sentence."""

    def correlate(self, against: str, method: str, layer: int) -> Floats:
        """[1, 1]: the printed mean."""
        printed = next(each for each in PRINTED_TABLES.values() if each.against == against)
        return np.array([[printed.cells[method][printed.layers.index(layer)][0]]])


@dataclass(frozen=True, eq=False)
class Evidence:
    """Models that count as one, such as the seeds of a recipe, and their measurements."""

    models: Sequence[Model]
    runs: Runs
    special: bool = True  # whether CLS is among the ranked tokens
    explanations: dict[str, list[Explanation]] = field(default_factory=dict)

    def correlate(self, against: str, method: str, layer: int) -> Floats:
        """[model, sentence]: of a method in a layer with an importance."""
        return self.runs.correlations(against, method, layer, self.special)

    def per_sentence(self, measure: Callable[[ScoredExample], float]) -> Floats:
        """[model, sentence]: a number of each sentence's scores."""
        return np.array(
            [
                [measure(example) for example in report.examples[: self.runs.examples]]
                for report in self.runs.reports
            ]
        )

    @cached_property
    def entropies(self) -> dict[int, Floats]:
        """By layer: [model, sentence], the entropy of CLS's raw attention by its maximum."""

        def measure(layer: int) -> Floats:
            return self.per_sentence(
                lambda example: measure_entropy(example.scores["raw"][layer - 1])
            )

        return {layer: measure(layer) for layer in range(1, TOP_LAYER + 1)}

    def spread(self, method: str) -> Floats:
        """[model, sentence]: how far CLS's top row is from even over the words."""
        return self.per_sentence(
            lambda example: float(
                measure_spread(example.scores[method][TOP_LAYER - 1], ~np.array(example.special))
            )
        )

    def outrank(self, method: str, layer: int) -> Floats:
        """[model, sentence]: the share of words that CLS outranks by a method in a layer."""
        return self.per_sentence(
            lambda example: measure_rank(example.scores[method][layer - 1], find_own(example))
        )

    def outrank_by_importance(self, name: str) -> Floats:
        """[model, sentence]: the share of words that CLS outranks by an importance."""
        return self.per_sentence(
            lambda example: measure_rank(example.importance[name], find_own(example))
        )

    def explain(self, text: str) -> list[Explanation]:
        """The explanation of a sentence by each model."""
        if text not in self.explanations:
            self.explanations[text] = [
                explain(text, model=model, edges="attention", importance=())
                for model in self.models
            ]
        return self.explanations[text]

    def predictions(self, text: str) -> list[str]:
        """What each model predicts of a sentence."""
        return [str((each.prediction or ("none", 0.0))[0]) for each in self.explain(text)]

    def prominence(self, text: str, word: str, method: str) -> Floats:
        """[model, 1]: the top weight of CLS on a word, by the mean of its weights on all words."""
        found = []
        for each in self.explain(text):
            weights = each.results[method].at(each.position)
            words = [place for place in range(len(each.tokens)) if place != each.position]
            found.append([weights[find_word(each, word)] / weights[words].mean()])
        return np.array(found)


def measure_entropy(weights: Floats) -> float:
    """The entropy of weights [key] that sum to 1, relative to that of even ones.

    >>> measure_entropy(np.array([0.25, 0.25, 0.25, 0.25])), measure_entropy(np.array([1.0, 0.0]))
    (1.0, 0.0)
    """
    present = weights[weights > 0]
    return float(-(present * np.log(present)).sum() / np.log(len(weights))) + 0.0


def measure_rank(scores: Floats, place: int) -> float:
    """The share of the other scores [token] that one is above; a tie counts half.

    >>> measure_rank(np.array([0.5, 0.1, 0.5, 0.9]), 0)
    0.5
    """
    others = np.delete(scores, place)
    return float(((scores[place] > others) + 0.5 * (scores[place] == others)).mean())


# ---- rows of attention ---------------------------------------------------------------------------


def find_own(example: ScoredExample) -> int:
    """The place of CLS."""
    return example.special.index(True)


def fade_residual(evidence: Evidence) -> NamedParts:
    """CLS's share of its own row in the top layer, by that in layer 1."""

    def measure(method: str) -> Floats:
        def fade(example: ScoredExample) -> float:
            own = example.scores[method][:, find_own(example)]  # [layer]
            return float(own[TOP_LAYER - 1] / own[0])

        return evidence.per_sentence(fade)

    return {method: measure(method) for method in ("rollout", "flow")}


def compare_first_layers(evidence: Evidence) -> NamedParts:
    """The largest difference of rollout and flow in layer 1."""
    return {
        "": evidence.per_sentence(
            lambda example: float(
                np.abs(example.scores["rollout"][0] - example.scores["flow"][0]).max()
            )
        )
    }


def compare_residual(evidence: Evidence) -> NamedParts:
    """The largest difference in layer 1 of rollout from raw attention, half of it CLS itself."""

    def differ(example: ScoredExample) -> float:
        mixed = example.scores["raw"][0] / 2
        mixed[find_own(example)] += 0.5
        return float(np.abs(example.scores["rollout"][0] - mixed).max())

    return {"": evidence.per_sentence(differ)}


# ---- correlations --------------------------------------------------------------------------------


def lead_of_first_layer(evidence: Correlations, against: str) -> NamedParts:
    """How much higher raw attention is in layer 1 than in each other."""
    first = evidence.correlate(against, "raw", 1)
    return {
        f"layer {layer}": first - evidence.correlate(against, "raw", layer)
        for layer in range(2, TOP_LAYER + 1)
    }


def lead_over_raw(evidence: Correlations, against: str) -> NamedParts:
    """How much higher rollout and flow are than raw attention in the top layer."""
    raw = evidence.correlate(against, "raw", TOP_LAYER)
    return {
        method: evidence.correlate(against, method, TOP_LAYER) - raw
        for method in ("rollout", "flow")
    }


def lead_over_rollout(evidence: Correlations, against: str) -> NamedParts:
    """How much higher flow is than rollout, on average over the layers above the first."""
    differences = [
        evidence.correlate(against, "flow", layer) - evidence.correlate(against, "rollout", layer)
        for layer in range(2, TOP_LAYER + 1)
    ]
    mean: Floats = np.mean(differences, axis=0)
    return {"": mean}


def climb(evidence: Correlations, method: str, start: int, end: int) -> NamedParts:
    """How much higher a method is in one layer than in another, against blank-out."""
    return {
        "": evidence.correlate("blank_out", method, end)
        - evidence.correlate("blank_out", method, start)
    }


# ---- the paper's sentences -----------------------------------------------------------------------


def check_labels(evidence: Evidence, expected: dict[str, str]) -> NamedParts:
    """[model, 1] per sentence: 1 where a model predicts what is expected, else 0."""
    return {
        text: np.array([[float(label == wanted)] for label in evidence.predictions(text)])
        for text, wanted in expected.items()
    }


def weigh_words(evidence: Evidence, text: str, words: Sequence[str]) -> NamedParts:
    """How prominent words are in the top rows of rollout and flow."""
    return {
        f"{word}, {method}": evidence.prominence(text, word, method)
        for word in words
        for method in ("rollout", "flow")
    }


# ---- all of them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """A statement of the paper: it holds if all parts are above a bound, or below it."""

    says: str
    criterion: str
    bound: float
    below: bool = False
    # either of models, or of correlations, those of the paper too
    measure: Callable[[Evidence], NamedParts] | None = None
    correlated: Callable[[Correlations], NamedParts] | None = None
    labels: bool = False  # whether 1 means yes and 0 no


STATEMENTS = (
    Statement(
        "Raw attention is almost uniform above layer three",
        f"entropy of CLS's row at least {UNIFORM} of its maximum in layers 4 to 6",
        UNIFORM,
        measure=lambda evidence: {f"layer {n}": evidence.entropies[n] for n in UPPER},
    ),
    Statement(
        "Raw attention tells positions apart in the first layers only",
        "that entropy is higher in each of layers 4 to 6 than in layer 1",
        0.0,
        measure=lambda evidence: {
            f"layer {n}": evidence.entropies[n] - evidence.entropies[1] for n in UPPER
        },
    ),
    Statement(
        "Layer 1 of rollout and of flow are the same",
        "CLS's rows differ by less than 1e-6",
        1e-6,
        below=True,
        measure=compare_first_layers,
    ),
    Statement(
        "They differ from raw attention by the residual alone",
        "layer 1 of rollout and half raw attention, half CLS itself, differ by less than 1e-6",
        1e-6,
        below=True,
        measure=compare_residual,
    ),
    Statement(
        "The residual fades in higher layers",
        "CLS's share of its own row falls below half from layer 1 to 6",
        0.5,
        below=True,
        measure=fade_residual,
    ),
    Statement(
        "Rollout and flow are more distinctive than raw attention above",
        "spread over words in layer 6 above raw attention's",
        0.0,
        measure=lambda evidence: {
            method: evidence.spread(method) - evidence.spread("raw")
            for method in ("rollout", "flow")
        },
    ),
    Statement(
        "Rollout is more focused, flow amortised over the most attended tokens",
        "spread over words in layer 6: rollout's above flow's",
        0.0,
        measure=lambda evidence: {"": evidence.spread("rollout") - evidence.spread("flow")},
    ),
    Statement(
        f'"{KEY}" is classified correctly',
        "singular",
        0.5,
        measure=lambda evidence: check_labels(evidence, {KEY: "singular"}),
        labels=True,
    ),
    Statement(
        f'"{ARTICLE}" is, and "articles" flips it',
        "singular, then plural",
        0.5,
        measure=lambda evidence: check_labels(
            evidence, {ARTICLE: "singular", ARTICLE.replace("article", "articles"): "plural"}
        ),
        labels=True,
    ),
    Statement(
        'Rollout and flow weigh both "article" and "systems" there',
        "CLS's weight in layer 6 above the mean of the words",
        1.0,
        measure=lambda evidence: weigh_words(evidence, ARTICLE, ("article", "systems")),
    ),
    Statement(
        f'"{FEMALE}" is misclassified, and NNP for NNS flips it',
        "plural, then singular",
        0.5,
        measure=lambda evidence: check_labels(
            evidence, {FEMALE: "plural", FEMALE.replace("NNS", "NNP"): "singular"}
        ),
        labels=True,
    ),
    Statement(
        'Rollout and flow weigh "NNS" there',
        "CLS's weight in layer 6 above the mean of the words",
        1.0,
        measure=lambda evidence: weigh_words(evidence, FEMALE, ("NNS",)),
    ),
    *(
        Statement(says.format(name), criterion, 0.0, correlated=correlated)
        for name, against in (("blank-out", "blank_out"), ("input gradients", "input_gradient"))
        for says, criterion, correlated in (
            (
                "Raw attention's correlation with {} is low except in layer 1",
                "layer 1 above each other layer",
                partial(lead_of_first_layer, against=against),
            ),
            (
                "Rollout and flow correlate better with {} than raw attention",
                "both above it in layer 6",
                partial(lead_over_raw, against=against),
            ),
            (
                "Flow is more reliable than rollout, by {}",
                "above it, on average over layers 2 to 6",
                partial(lead_over_rollout, against=against),
            ),
        )
    ),
    Statement(
        "Rollout's correlation climbs with the layers (Table 1)",
        f"layer 6 above layer 1 by more than {CLIMB}, blank-out",
        CLIMB,
        correlated=partial(climb, method="rollout", start=1, end=TOP_LAYER),
    ),
    Statement(
        "Flow's has climbed by layer 3 (Table 1)",
        f"layer 3 above layer 1 by more than {CLIMB}, blank-out",
        CLIMB,
        correlated=partial(climb, method="flow", start=1, end=3),
    ),
    Statement(
        "Flow's stays there (Table 1)",
        f"layer 6 not below layer 3 by {CLIMB / 2} or more, blank-out",
        -CLIMB / 2,
        correlated=partial(climb, method="flow", start=3, end=TOP_LAYER),
    ),
)
