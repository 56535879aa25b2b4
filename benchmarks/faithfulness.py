"""The speed of faithfulness: batches over examples and methods against loops, and a whole report.

python benchmarks/faithfulness.py

The verb-number model on sentences of its grammar. Two loops do the same work, five metrics of every
method on every sentence: one runs one forward pass at a time, as the formulas say, and one calls
af.faithfulness for every sentence and method. The report adds random orders and the best order
found, which runs all subsets of up to 12 tokens.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

import time
import warnings
from itertools import islice
from typing import Any

import numpy as np
import torch

import attnflow as af
from attnflow.analysis.faithfulness.metrics import DEFAULT_METRICS
from attnflow.paper import grammar
from sheets import Figure, environment_of, figure_sheet, publish, say, show

SENTENCES = 100
LOOPED = 10  # sentences in the comparison with loops
EDGES = ("attention", "norm", "contribution", "gradient")  # each with raw, rollout and flow
BINS = range(10, 101, 10)
UNKNOWN = 1


def list_texts(count: int) -> list[str]:
    """Sentences of the grammar with at least two words to order."""
    texts = (each.text for each in grammar.sentences(seed=0))
    return list(islice((text for text in texts if len(text.split()) > 1), count))


def loop_one_by_one(model: af.Model, text: str, scores: Any, target: int) -> dict[str, float]:
    """Five metrics by one forward pass at a time."""
    ids = model.encode(text).ids
    free = sorted(range(1, len(ids)), key=lambda place: -scores[place])
    count = len(free)

    def run(gone: list[int]) -> float:
        row = [UNKNOWN if place in gone else number for place, number in enumerate(ids)]
        with torch.no_grad():
            logits = model.model(torch.tensor([row])).logits[0]
        return float(logits.double().softmax(-1)[target])

    deleted = [run(free[:step]) for step in range(count + 1)]
    kept = [run(free[step:]) for step in range(count + 1)]
    sizes = [-(-count * percent // 100) for percent in BINS]
    return {
        "comprehensiveness": float(np.mean([deleted[0] - deleted[k] for k in sizes])),
        "sufficiency": float(np.mean([deleted[0] - kept[k] for k in sizes])),
        "deletion": float(np.trapezoid(deleted) / count),
        "insertion": float(np.trapezoid(kept) / count),
        "log_odds": float(np.mean([np.log(deleted[k] / deleted[0]) for k in sizes])),
    }


def compare_loops(model: af.Model) -> list[Figure]:
    """The same numbers by loops and in batches, and how many times faster batches are."""
    texts = list_texts(LOOPED)
    report = af.evaluate(model, texts, layers=[6], edges=EDGES, against="blank_out")
    pairs = [
        (example.text, example.scores[method][0], example.label)
        for example in report.examples
        for method in report.methods
    ]
    say(f"{len(pairs)} sentences and methods, one forward pass at a time")
    start = time.perf_counter()
    looped = [
        loop_one_by_one(model, text, scores, model.target(label)) for text, scores, label in pairs
    ]
    one_by_one = time.perf_counter() - start
    say("one call for each")
    start = time.perf_counter()
    for text, scores, label in pairs:
        af.faithfulness(model, text, scores, target=label)
    calls = time.perf_counter() - start
    say("all together")
    start = time.perf_counter()
    together = af.faithfulness(
        model,
        [text for text, _, _ in pairs],
        [scores for _, scores, _ in pairs],
        target=[label for _, _, label in pairs],
    )
    seconds = time.perf_counter() - start
    worst = max(
        abs(found[name] - expected[name])
        for found, expected in zip(together, looped, strict=True)
        for name in expected
    )
    return [
        Figure("largest difference from the loop", worst, "", 1e-5),
        Figure("loop, one forward pass at a time", one_by_one, "s"),
        Figure("loop, one call per sentence and method", calls, "s"),
        Figure("together", seconds, "s"),
        Figure("times faster than one pass at a time", one_by_one / seconds, "x", 5, True),
        Figure("times faster than one call each", calls / seconds, "x"),
    ]


def measure_report(model: af.Model) -> list[Figure]:
    """A whole report: sentences x methods on edges x five metrics, with both extra rows."""
    texts = list_texts(SENTENCES)
    say(
        f"a report of {SENTENCES} sentences, {3 * len(EDGES)} methods, {len(DEFAULT_METRICS)} metrics"
    )
    start, worked = time.perf_counter(), time.process_time()
    report = af.evaluate(
        model, texts, layers=[6], edges=EDGES, faithfulness=DEFAULT_METRICS, best=True
    )
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    what = f"{SENTENCES} sentences x {len(report.methods)} methods x {len(DEFAULT_METRICS)} metrics"
    return [
        Figure(f"report, {what}", seconds, "s", 120),
        Figure("the same, seconds of processors", worked, "s"),
        Figure("of which faithfulness", report.seconds["faithfulness"], "s"),
    ]


def main() -> None:
    """Measure, print, and write the results."""
    began = time.monotonic()
    warnings.simplefilter("ignore")
    model = af.load("verb-number")
    figures = [*compare_loops(model), *measure_report(model)]
    sheet = figure_sheet(figures)
    show([sheet])
    notes = [
        f"The loops: {LOOPED} sentences x {3 * len(EDGES)} methods x {len(DEFAULT_METRICS)} metrics;"
        f" torch with {torch.get_num_threads()} threads, load of the machine at the end"
        f" {os.getloadavg()[0]:.1f}."
    ]
    publish(
        "faithfulness",
        "Faithfulness: batches over examples and methods",
        notes,
        [sheet],
        figures,
        environment_of(["attnflow", "torch", "numpy"], began),
    )


if __name__ == "__main__":
    main()
