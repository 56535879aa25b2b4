"""Figures 1 to 4 of the paper, redrawn."""

from collections.abc import Sequence

import torch

from attnflow import figures
from attnflow.analysis.explain.explain import explain
from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.groups import list_words
from attnflow.core.text import join_subwords
from attnflow.errors import OptionError
from attnflow.models.execution import evaluating
from attnflow.models.load import BUNDLED, ModelLike, open_model
from attnflow.models.model import Model
from attnflow.show.figures.drawing import Drawing

SENTENCE = "the key to the cabinets"
PICTURED_SENTENCES = (
    SENTENCE,
    "the article on NNP large systems",
    "here the NNS differ in that the female",
)
MASK = "[MASK]"  # stands for the model's own mask
PRONOUNS = (f"The author talked to Sara about {MASK} book.", f"Mary convinced John of {MASK} love.")
PRONOUN_REFERENTS = (("author", "Sara"), ("Mary", "John"))
# whom a pronoun means
REFERENTS = ({"his": "author", "her": "Sara"}, {"his": "John", "her": "Mary"})
CANDIDATES = ("his", "her")


def figure_1(text: str = SENTENCE, *, model: ModelLike = BUNDLED) -> Drawing:
    """Raw attention, rollout and flow between neighbouring layers, side by side."""
    return figures.compare_graphs(explain(text, model=model, edges="attention", importance=()))


def figure_2(text: str = SENTENCE, *, model: ModelLike = BUNDLED) -> Drawing:
    """Raw attention of the focal position, in each layer."""
    explanation = explain(text, model=model, edges="attention", importance=())
    return figures.heatmap(explanation.raw, explanation.position)


def figure_3(texts: Sequence[str] = PICTURED_SENTENCES, *, model: ModelLike = BUNDLED) -> Drawing:
    """Raw attention, rollout and flow of the focal position in each layer, for each sentence."""
    loaded = open_model(model)
    return figures.compare_heatmaps(
        [
            explain(text, model=loaded, edges="attention", importance=())
            for text in texts or PICTURED_SENTENCES
        ]
    )


def figure_4(
    texts: Sequence[str] = PRONOUNS,
    *,
    model: ModelLike,
    references: Sequence[tuple[str, str]] = PRONOUN_REFERENTS,
    candidates: tuple[str, str] = CANDIDATES,
) -> Drawing:
    """A masked pronoun: the relative probabilities of two words, beside the mask's token attention.

    The attention shown is that to the two words that the pronoun may refer to.
    """
    if len(texts) != len(references):
        raise OptionError(
            "each sentence needs its two references; "
            f"got {len(texts)} sentences and {len(references)} pairs"
        )
    loaded, explanations = explain_masks(texts, model)
    places = [
        (find_word(explanation, one), find_word(explanation, other))
        for explanation, (one, other) in zip(explanations, references, strict=True)
    ]
    return figures.pronoun(
        explanations,
        [compare_words(loaded, explanation, candidates) for explanation in explanations],
        places,
        label="relative probability",
    )


def explain_masks(texts: Sequence[str], model: ModelLike) -> tuple[Model, list[Explanation]]:
    """A masked LM, and its explanations of sentences with a mask."""
    loaded = open_model(model)
    if loaded.task != "masked LM" or getattr(loaded.tokenizer, "mask_token", None) is None:
        raise OptionError(
            "figure 4 needs a masked LM with a tokenizer that has a mask; "
            f"got {loaded.name}, {loaded.task}"
        )
    return loaded, [
        explain(
            text.replace(MASK, loaded.tokenizer.mask_token),
            model=loaded,
            edges="attention",
            importance=(),
        )
        for text in texts
    ]


def compare_words(model: Model, explanation: Explanation, words: Sequence[str]) -> dict[str, float]:
    """The probability of each word at the mask, given that it is one of these."""
    assert explanation.text is not None  # it was made of a text
    encoded = model.encode(explanation.text)
    with evaluating(model.model), torch.no_grad():
        probabilities = model.probabilities(
            model.logits(model.batch([encoded]), [model.logit_position(encoded)])
        )[0]
    by_word = {word: float(probabilities[model.target(word)]) for word in words}
    return {word: probability / sum(by_word.values()) for word, probability in by_word.items()}


def find_word(explanation: Explanation, word: str) -> int:
    """The position of a word in a sentence; of its first token if it has several."""
    for group in list_words(explanation.attention.words or tuple(range(len(explanation.tokens)))):
        if join_subwords([explanation.tokens[place] for place in group]).lower() == word.lower():
            return group[0]
    raise OptionError(
        f"a reference must be a word of its sentence; got {word!r} for {explanation.text!r}"
    )
