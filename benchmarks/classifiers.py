"""Which edges and method for a classifier?

python benchmarks/classifiers.py --data FOLDER [--sentiment FOLDER]

verb-number (sentences of its grammar) and MiniLM fine-tuned on SST-2 (FOLDER holds SST-2, as for benchmarks/edges.py):
comprehensiveness and sufficiency of every row, on the first texts of at most 16 tokens. On verb-number also the rank of
the one noun whose change of number changes the answer, on sentences that have exactly one such noun among several.
Texts with even numbers choose the default, by comprehensiveness minus sufficiency; those with odd numbers report.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnflow as af
from attnflow.analysis.evaluate.truth.ranks import average_families, rank_truth
from attnflow.paper import grammar
from edge_scores import SEED, open_model
from sheets import HERE, Sheet, copy_tables, environment_of, publish, say, show

EDGES = ["attention", "norm", "contribution", "gradient", "relevance", "relevance_and_gradient"]
METHODS = ["raw", "rollout", "flow"]
ROWS = [f"{edges} {method}" for edges in EDGES for method in METHODS]
COUNT, LONGEST, SENTENCES = 120, 16, 600
LATER = "later tokens first"
FORMS = grammar.NOUNS | {many: one for one, many in grammar.NOUNS.items()}


def score_rows(model: af.Model, text: str) -> dict[str, Any]:
    """[token] by the name of the row: the explained position's row in the top layer."""
    found = {}
    for edges in EDGES:
        graph = af.attention_graph(model, text, edges=edges)
        for method in METHODS:
            result = af.METHODS[method](graph, layers=[graph.depth], positions=[0])
            found[f"{edges} {method}"] = result.at(0)
    found["relevance"] = af.relevance(model, text).values
    found["blank_out"] = af.blank_out(model, text, signed=True).values
    found["input_gradient"] = af.input_gradient(model, text).values
    found[LATER] = np.arange(len(found["relevance"]), dtype=float)
    return found


def measure_faithfulness(model: af.Model, texts: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    """{row: {metric: [text]}}, and the score, comprehensiveness minus sufficiency."""
    metrics = ["comprehensiveness", "sufficiency"]
    measured: dict[str, dict[str, list[float]]] = {}
    for number, text in enumerate(texts, start=1):
        if number % 20 == 0:
            say(f"{model.name}: text {number} of {len(texts)}")
        rows = score_rows(model, text)
        values = af.faithfulness(model, [text] * len(rows), list(rows.values()), metrics=metrics)
        for name, each in zip(rows, values, strict=True):
            kept = measured.setdefault(name, {metric: [] for metric in metrics})
            for metric in metrics:
                kept[metric].append(each[metric])
    return {
        name: {
            **{metric: np.array(values) for metric, values in each.items()},
            "score": np.array(each["comprehensiveness"]) - np.array(each["sufficiency"]),
        }
        for name, each in measured.items()
    }


def find_deciding_noun(model: af.Model, words: list[str], label: str) -> int | None:
    """The place of the one noun whose number decides the answer; None unless there is just one of several."""
    nouns = [place for place, word in enumerate(words) if word in FORMS]
    texts = [" ".join(words)]
    for place in nouns:
        changed = words.copy()
        changed[place] = FORMS[words[place]]
        texts.append(" ".join(changed))
    first, *others = (answer for answer, _ in model.predict(texts))
    deciding = [place for place, answer in zip(nouns, others, strict=True) if answer != first]
    return deciding[0] if first == label and len(nouns) > 1 and len(deciding) == 1 else None


def measure_truth(model: af.Model) -> dict[str, np.ndarray]:
    """{row: [sentence]}: the reciprocal rank of the deciding noun among the words."""
    found: dict[str, list[float]] = {}
    sentences = grammar.sentences(seed=SEED + 1)
    for sentence in (next(sentences) for _ in range(SENTENCES)):
        words = list(sentence.words)
        place = find_deciding_noun(model, words, sentence.label)
        if place is None:
            continue
        ranked = np.arange(1, len(words) + 1)  # without CLS
        for name, scores in score_rows(model, " ".join(words)).items():
            rank = rank_truth(scores, ranked, place + 1)
            found.setdefault(name, []).append(rank.reciprocal)
    return {name: np.array(values) for name, values in found.items()}


def interval(values: np.ndarray, sign: str = "") -> str:
    """A mean with its bootstrap interval."""
    mean = average_families(values, ["all"] * len(values))
    return f"{mean.mean:{sign}.3f} [{mean.low:{sign}.3f}, {mean.high:{sign}.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sentiment", type=Path, default=Path("build/sentiment"))
    given = parser.parse_args()
    began = time.monotonic()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measured = {}
    for name in ("verb-number", "sentiment"):
        model, texts = open_model(name, given.data, given.sentiment)
        chosen = [text for text in texts if 6 <= len(model.encode(text).tokens) <= LONGEST][:COUNT]
        measured[name] = measure_faithfulness(model, chosen)
    say("verb-number: the noun that decides")
    truth = measure_truth(af.load("verb-number"))
    even, odd = slice(0, None, 2), slice(1, None, 2)
    scores = {
        row: float(np.mean([measured[name][row]["score"][even].mean() for name in measured]))
        for row in ROWS
    }
    best = max(scores, key=lambda row: scores[row])
    today = "gradient flow"
    rows, differences = [], []
    for row in measured["sentiment"]:
        cells = [
            interval(measured[name][row][metric][odd])
            for name in measured
            for metric in ("comprehensiveness", "sufficiency")
        ]
        rows.append([row, *cells, interval(truth[row])])
    for row in [
        name
        for name in ROWS
        if name.split()[0] in ("gradient", "relevance", "relevance_and_gradient")
    ]:
        cells = [
            interval(measured[name][row]["score"][odd] - measured[name][today]["score"][odd], "+")
            for name in measured
        ]
        differences.append(
            [row, f"{scores[row]:.3f}", *cells, interval(truth[row] - truth[today], "+")]
        )
    sheets = [
        Sheet(
            "classifiers, on the texts with odd numbers; and all sentences with a deciding noun",
            [
                "row",
                *(
                    f"{name}: {metric}"
                    for name in measured
                    for metric in ("comprehensiveness", "sufficiency")
                ),
                f"verb-number: mrr of the deciding noun ({len(truth[today])} sentences)",
            ],
            rows,
        ),
        Sheet(
            f"score (comprehensiveness minus sufficiency): on the even texts, and minus {today} on the odd ones",
            ["row", "score, even texts", *measured, "mrr of the deciding noun"],
            differences,
        ),
    ]
    show(sheets)
    publish(
        "classifiers",
        "Edges and methods for classifiers",
        [
            f"Best on the even texts of both models: **{best}**; the default before was {today}. Means with 95 % bootstrap"
            " intervals over texts; differences are paired."
        ],
        sheets,
        [],
        environment_of(["attnflow", "numpy", "torch", "transformers"], began),
        chosen=best,
        scores=scores,
    )

    for page in ("truth.md", "which-method.md"):
        copy_tables(HERE.parent / "docs" / page)


if __name__ == "__main__":
    main()
