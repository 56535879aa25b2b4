"""Sixteen threads on one model: edges, captures, generations and plain forward passes.

Each gives what it gives alone, on a model that was used before and on one that nothing has seen.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np

import attnflow as af
from tests.families import build
from tests.hostile.tries import Result, run_tries

THREADS = 16
FAMILIES = ["llama", "gpt2", "bert", "roberta", "distilbert", "mistral", "gemma2", "gpt-neox"]
KINDS = ("norm", "contribution", "gradient", "effective")
SAME = 1e-5
Work = Callable[[af.Model], Any]


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these crowds."""
    return run_tries(attempt, "threads", numbers, seed, folder, seconds=60, memory=None)


def attempt(draw: random.Random, number: int, folder: Path) -> str | None:
    """Let the threads work at once on a shared, warm or fresh model; compare with each alone."""
    family = FAMILIES[number % len(FAMILIES)]
    jobs = [draw_work(draw, family) for _ in range(THREADS)]
    alone = af.Model(deepcopy(build(family)))
    expected = [work(alone) for _, work in jobs]
    shared = af.Model(deepcopy(build(family)))
    warm = draw.random() < 0.5
    if warm:
        for _, work in jobs[:4]:
            work(shared)
    ready = Barrier(THREADS)
    alike = draw.random() < 0.5  # one `Model`, or one for each thread, of the same module

    def start(work: Work) -> Any:
        ready.wait()
        return work(shared if alike else af.Model(shared.model))

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(start, [work for _, work in jobs]))
    for (name, _), one, other in zip(jobs, found, expected, strict=True):
        if np.shape(one) != np.shape(other) or np.abs(np.subtract(one, other)).max() > SAME:
            return f"{family}, {'warm' if warm else 'fresh'}: {name} differs from what it is alone"
    return None


def draw_work(draw: random.Random, family: str) -> tuple[str, Work]:
    """Something to do with a model, and its name."""
    ids = [draw.randrange(5, 60) for _ in range(draw.randint(3, 9))]
    known = af.Model(build(family))
    kind = draw.choice(KINDS if known.predicts else [each for each in KINDS if each != "gradient"])

    def find_edges(model: af.Model) -> Any:
        return af.attention_graph(model, ids, edges=kind).edges

    def find_attention(model: af.Model) -> Any:
        return af.capture(model, ids).weights

    def run_plainly(model: af.Model) -> Any:
        import torch

        with torch.no_grad():
            return model.model(input_ids=torch.tensor([ids]))[0].double().numpy()

    def write(model: af.Model) -> Any:
        story = af.generate(model, ids, max_new_tokens=3, eos_token_id=None)
        return story.by("rollout", edges="contribution").values

    works = {f"edges {kind}": find_edges, "capture": find_attention, "forward": run_plainly}
    if known.task == "causal LM":
        works["generation"] = write
    return draw.choice(list(works.items()))
