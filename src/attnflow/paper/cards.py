"""Model cards of verb-number models: accuracy, data, and departures from the paper's training."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnflow.paper.recipes import PLAIN_RECIPE, RECIPES, UNCHANGED, Recipe


@dataclass(frozen=True)
class Tally:
    """How often the model is right about some sentences."""

    count: int
    right: int

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return self.right / self.count if self.count else float("nan")


def format_command(data: Sequence[Path], out: Path, seed: int, recipe: Recipe) -> str:
    """The command that trains the same model again."""
    name, _, left_out = recipe.name.partition(" without ")
    options = [f"--data={path}" for path in data] + [f"--out={out}", f"--recipe={name}"]
    options += [f"--without={part}" for part in left_out.split(", ") if part]
    options.append(f"--seed={seed}")
    usual = PLAIN_RECIPE.steps if "length" in left_out else RECIPES[name].steps
    if recipe.steps != usual:
        options.append(f"--steps={recipe.steps}")
    return shlex.join(["attnflow", "train", "verb-number", *options])


def list_departures(recipe: Recipe) -> list[str]:
    """How a training differs from the paper's, or what the paper does not say; one line each."""
    mixture = recipe.mixture
    drawn = mixture.natural + mixture.inner + mixture.hard + mixture.grammar
    departures = [
        "Data: the parts of the corpus that are available here, and MASC, instead of the whole"
        " corpus; words that occur twice or more on the train side; at most 63 words.",
        f"Shares: {percent(mixture.hard / drawn)} of the sentences drawn come from the files with"
        " attractors, of which the corpus itself has few.",
        f"UNK: {percent(recipe.blank)} of the words become UNK in training, so that blank-out asks"
        " for nothing unseen; the paper does not say whether its model knew UNK.",
    ]
    if recipe.blank_loss:
        departures.append(
            f"Blanked words are guessed, with weight {recipe.blank_loss:g} beside the label's loss."
        )
    if mixture != UNCHANGED:
        kinds = ", ".join(f"{percent(share)} {kind}" for kind, share in mixture.variants.items())
        departures.append(
            f"Augmentation: sentences with attractors come in variants ({kinds});"
            f" {percent(mixture.flipped)} of the natural ones with a single noun are flipped;"
            f" {percent(mixture.introduced)} of the short ones get an introduction;"
            f" {percent(mixture.inner)} of all are the words before a verb inside a sentence,"
            f" {percent(mixture.grammar)} are made by a grammar (attnflow/paper/augmentation.py)."
        )
    if recipe.tag:
        departures.append(f"{percent(recipe.tag)} of the nouns become NN or NNS.")
    if recipe.embedding != PLAIN_RECIPE.embedding or recipe.linear != PLAIN_RECIPE.linear:
        departures.append(
            f"Initialisation: {recipe.embedding:g} times GPT-2's 0.02 for words,"
            f" {recipe.position:g} times for positions, {recipe.linear:g} times for matrices."
        )
    if recipe.shared:
        departures.append(
            "Words of the same ending, number or noun start with a part of their embedding in"
            " common."
        )
    if recipe.smoothing:
        departures.append(f"Labels are smoothed by {recipe.smoothing:g}.")
    if recipe.average is not None:
        departures.append(f"The weights are a moving average ({recipe.average:g}) over the steps.")
    if recipe.attention_dropout != PLAIN_RECIPE.attention_dropout:
        departures.append(
            f"Dropout of attention weights is {recipe.attention_dropout:g}; elsewhere 0.1, GPT-2's."
        )
    departures.append(
        f"Not in the paper: AdamW with rate {recipe.rate:g}, {percent(recipe.warm_up)} warm-up,"
        f" a cosine fall over the last {percent(recipe.fall)}, decay {recipe.decay:g};"
        f" {recipe.steps:,} steps of {recipe.batch} sentences in bfloat16; the weights that are"
        " best on dev, in float16."
    )
    return departures


def percent(share: float) -> str:
    """A share as a percentage.

    >>> percent(0.054), percent(0.4)
    ('5 %', '40 %')
    """
    return f"{100 * share:.0f} %"


def format_card(
    tallies: Mapping[str, Tally],
    sizes: Mapping[str, int],
    words: int,
    seed: int,
    recipe: Recipe,
    command: str,
) -> str:
    """The model card."""
    rows = "\n".join(
        f"| {name} | {tally.count:,} | {tally.accuracy:.3f} |" for name, tally in tallies.items()
    )
    departures = "\n".join(f"- {line}" for line in list_departures(recipe))
    return f"""# Is the verb that follows these words singular or plural?

A Transformer encoder of GPT-2 blocks without a causal mask: 6 layers, 8 heads, width 128, a CLS
token in front, whose state in the last layer goes to the classifier; the model of Abnar and Zuidema
(2020), trained again by attnflow's recipe "{recipe.name}". Weights in float16, {words:,} words.

## Accuracy on the test side

| sentences | number | accuracy |
| --- | --- | --- |
{rows}

`natural` are the sentences of all files that count no attractors; `attractors` are those of
numpred.test.N, which have exactly N nouns of the other number between subject and verb. The paper
reports 0.96, on another split of the full corpus.

## Data and split

Sentences up to their verb, from Linzen, Dupoux and Goldberg (2016), the simple release without its
train file and its zero-attractor test file (numpred.val, numpred.test.1 to 5), and from the MASC
corpus (numpred.masc), where every verb tagged VBZ or VBP gives one. So this is not the paper's
split. The licence of the data: Linzen's sentences are from the English Wikipedia (CC BY-SA); MASC
is free for research and commercial use. No sentence is in this folder; the vocabulary lists single
words.

The split is by a hash of the first four words: {sizes["train"]:,} sentences train,
{sizes["dev"]:,} dev (to choose the weights), {sizes["test"]:,} test (measured once). Rows that
begin with the same four words are on the same side.

## Training

{recipe.steps:,} steps of {recipe.batch} sentences, seed {seed}. The command:

    {command}

What differs from the paper, or is not said there:

{departures}

## Limits

It reads the words before a verb, in lower case. A word that it does not know is read as its class
(NN, NNS, NNP, VBG ...), guessed from its form. MASC's rows may span clauses and ask for verbs that
nothing announces, so no model is always right there. More than 63 words are refused.
"""
