"""Which methods find the tokens of planted models, and do rankings notice randomised weights?

python benchmarks/planted.py

For each planted model, its examples are scored by each kind of edges and method, in the top layer at CLS; CLS itself
is left out. Precision at k is the share of true tokens among the k with the highest scores, where k is the number of
true tokens; ties at the k-th place count by the mean over their orders. AUPRC is average precision. A second table
shows how far rankings of the verb-number model change when its weights are randomised from the top.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

import time
import warnings
from itertools import islice
from typing import Any

import numpy as np

import attnflow as af
from attnflow.paper import grammar
from sheets import HERE, say

EXAMPLES = 200
RANDOM_ORDERS = 10
SENTENCES, SEEDS = 40, (0, 1, 2)
DIGITS = 5  # scores that agree to this many digits of the largest are tied: float32 holds no more


def tie(scores: Any) -> Any:
    """Scores without rounding errors."""
    largest = np.abs(scores).max()
    return np.round(scores / largest, DIGITS) if largest > 0 else scores


def precision_at_k(scores: Any, true: Any) -> float:
    """The share of true tokens among the first k, where k is their number. true: [token], bool."""
    k = int(true.sum())
    limit = np.sort(scores)[-k]
    above, level = scores > limit, scores == limit
    left = k - above.sum()  # places shared by the scores at the limit
    return float((true[above].sum() + true[level].mean() * left) / k)


def average_precision(scores: Any, true: Any) -> float:
    """The area under the curve of precision over recall, with a step for each different score."""
    total, before = 0.0, 0
    for limit in np.unique(scores)[::-1]:
        chosen = scores >= limit
        hits = int(true[chosen].sum())
        total += (hits - before) / true.sum() * hits / chosen.sum()
        before = hits
    return total


def score_tokens(planted: af.Planted, texts: list[str]) -> dict[str, list[Any]]:
    """[token] of each text, CLS left out, by edges and method and by importance."""
    scores: dict[str, list[Any]] = {}
    for edges in af.EDGES:
        graphs = af.attention_graph(planted.model, texts, edges=edges)
        for name, method in af.METHODS.items():
            if graphs[0].signed and name == "flow":
                continue  # a capacity is not negative
            rows = [method(graph, layers=[graph.depth], positions=[0]).at(0) for graph in graphs]
            scores[f"{edges} {name}"] = [row[1:] for row in rows]
    blanked = af.blank_out(planted.model, texts, signed=True)
    scores["blank_out, for the answer"] = [found.values[1:] for found in blanked]
    scores["blank_out, either way"] = [np.abs(found.values[1:]) for found in blanked]
    gradients = af.input_gradient(planted.model, texts)
    scores["input_gradient"] = [found.values[1:] for found in gradients]
    return scores


def measure(planted: af.Planted) -> dict[str, tuple[float, float]]:
    """(precision at k, AUPRC) by the name of the scores, mean over examples."""
    texts = planted.examples(EXAMPLES)
    assert [label for label, _ in planted.model.predict(list(texts))] == [
        planted.answer(text) for text in texts
    ]
    truths = [np.isin(np.arange(1, len(text.split()) + 1), planted.truth(text)) for text in texts]
    found = {}
    for name, rows in score_tokens(planted, texts).items():
        pairs = [(tie(row), true) for row, true in zip(rows, truths, strict=True)]
        found[name] = average(pairs)
    rng = np.random.default_rng(0)
    drawn = [(rng.random(len(true)), true) for true in truths for _ in range(RANDOM_ORDERS)]
    return found | {"random order": average(drawn)}


def average(pairs: list[tuple[Any, Any]]) -> tuple[float, float]:
    """The means of both figures over examples."""
    precisions = [precision_at_k(scores, true) for scores, true in pairs]
    areas = [average_precision(scores, true) for scores, true in pairs]
    return float(np.mean(precisions)), float(np.mean(areas))


def report_truth(found: dict[str, dict[str, tuple[float, float]]]) -> list[str]:
    """A table in Markdown: scores down, models across; the best of each model is bold."""
    lines = [
        f"## The true tokens, {EXAMPLES} examples of each model",
        "",
        "Precision at k / AUPRC.",
        "",
    ]
    lines.append(f"| edges, method | {' | '.join(found)} |")
    lines.append(f"| --- |{' --- |' * len(found)}")
    for name in next(iter(found.values())):
        cells = []
        for by_name in found.values():
            cell = "{:.2f} / {:.2f}".format(*by_name[name])
            best = max(by_name.values())
            cells.append(f"**{cell}**" if by_name[name][0] >= best[0] - 5e-4 else cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def report_misses() -> list[str]:
    """Why input gradients miss the relay, and blank-out some last colours."""
    relay, last = af.planted("relay"), af.planted("last")
    gradients = af.input_gradient(relay.model, relay.examples(EXAMPLES))
    before = sum(int(found.values[1:].argmax()) + 2 == relay.k for found in gradients)
    again: list[float] = []
    others: list[float] = []
    drops: list[float] = []
    texts = last.examples(EXAMPLES)
    for text, found in zip(texts, af.blank_out(last.model, texts, signed=True), strict=True):
        (true,) = last.truth(text)
        colours = [kind for kind in map(last.rule.kinds.get, text.split()[:true]) if kind]
        same = len(colours) > 1 and colours[-2] == colours[-1]
        ranked = precision_at_k(tie(found.values[1:]), np.arange(1, len(found.values)) == true)
        (again if same else others).append(ranked)
        drops += [abs(float(found.values[true]))] * same
    return [
        f"- relay: the input gradient is longest at the word before word k in {before} of"
        f" {EXAMPLES} examples",
        f"- last: {len(again)} of {EXAMPLES} examples have a colour of the same kind before the"
        f" last one; blanking the last one out changes the probability by at most"
        f" {max(drops):.4f} there. Precision of blank_out for the answer: {np.mean(again):.2f}"
        f" there, {np.mean(others):.2f} elsewhere",
        "",
    ]


def report_sanity() -> list[str]:
    """The table of the verb-number model on randomised weights."""
    say("verb-number: randomised weights")
    texts = [each.text for each in islice(grammar.sentences(seed=0), SENTENCES)]
    report = af.evaluate(
        "verb-number", texts, edges=list(af.EDGES), against="blank_out", sanity=list(SEEDS)
    )
    assert report.sanity is not None
    return ["## Sanity, verb-number", "", report.sanity.to_markdown()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    began = time.time()
    found = {}
    for name in af.PLANTED:
        say(f"{name}: {EXAMPLES} examples")
        found[name] = measure(af.planted(name))
    lines = ["# Planted models and sanity", "", "`python benchmarks/planted.py`", ""]
    lines += [
        *report_truth(found),
        *report_misses(),
        *report_sanity(),
        f"{time.time() - began:.0f} s",
    ]
    (HERE / "results" / "planted.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))
