"""What benchmarks/which.py measures on one model: every row (edges and method, and the scores beside them) by every yardstick.

The results of each text are kept in a file, one line of JSON per text, so that an interrupted run resumes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import attnflow as af
from attnflow.analysis.faithfulness.faithfulness import Measurement, measure_orders, trace_orders
from attnflow.analysis.faithfulness.metrics import BINS, METRICS, PerturbationCurve, prefers_lower
from attnflow.analysis.faithfulness.orders import Order, draw_orders, find_by_beam, order_units
from attnflow.analysis.faithfulness.perturb import (
    Inquiry,
    Perturber,
    Question,
    list_perturbed,
    read_replacement,
)
from attnflow.analysis.importance.variant import Variant
from attnflow.analysis.importance.watch import watch
from attnflow.analysis.statistics import spearman
from attnflow.edges.edge_weight import name_result
from edge_scores import METHODS, Floats, choose_texts, open_model
from planted import precision_at_k, tie
from sheets import say

SPEARMAN, PRECISION = "Spearman", "precision at k"
RANDOM, BEST, LATER = "random order", "best found", "later tokens first"
BLANK, GRADIENT = "blank_out", "input_gradient"
ALL_EDGES = ("attention", "effective", "norm", "contribution", "gradient", "value_zeroing")
BINNED = ("comprehensiveness", "sufficiency", "log_odds")
AREAS = ("deletion", "insertion")
NORMALISED = ("normalised_comprehensiveness", "normalised_sufficiency")
SEARCHED = ("comprehensiveness", "sufficiency")  # metrics whose best orders a beam searches


@dataclass(frozen=True)
class Setting:
    """What is measured on one model, limited so that it finishes."""

    count: int  # texts
    longest: int  # tokens of a text
    replacements: tuple[str, ...]
    metrics: tuple[str, ...] = (*BINNED, *AREAS)
    edges: tuple[str, ...] = ALL_EDGES
    beam: bool = False  # whether a beam searches the best orders
    seeds: int = 10  # of random orders
    together: int = 10  # texts that are measured, and kept, at a time

    @property
    def searches(self) -> bool:
        """Whether best orders are searched; otherwise the best row found stands for them."""
        return self.beam or any(METRICS[name].normalised for name in self.metrics)


SETTINGS = {
    "verb-number": Setting(
        150, 48, ("unknown", "removal"), metrics=(*BINNED, *AREAS, *NORMALISED), together=25
    ),
    "sentiment": Setting(120, 14, ("unknown",), beam=True, seeds=5),
    "smollm2": Setting(
        48,
        21,
        ("attention",),
        seeds=3,
        together=4,
    ),
}
PLANTED = Setting(200, 48, ("unknown",), beam=True, together=100)

Truth = Callable[[str], Sequence[int]]  # the positions that an answer depends on
Record = dict[
    str, Any
]  # of one text: {"tokens", "yardsticks": {replacement: {yardstick: {row: value}}}}


def list_rows(setting: Setting) -> list[str]:
    """All rows of a model's tables: edges and methods, importances, and orders to compare with."""
    named = [f"{edges} {method}" for edges in setting.edges for method in METHODS]
    return [*named, GRADIENT, BLANK, LATER, RANDOM, BEST]


# ---- scores --------------------------------------------------------------------------------------


def score_texts(model: af.Model, texts: Sequence[str], setting: Setting) -> list[dict[str, Floats]]:
    """[token] by the name of the row, for each text: the explained position's row in the top layer."""
    report = af.evaluate(
        model, texts, layers=[model.depth or 1], edges=list(setting.edges), against=GRADIENT
    )
    assert read_replacement(model, None).name == setting.replacements[0]  # as blank-out chooses
    signed = af.blank_out(model, list(texts), signed=True)
    found = []
    for example, blanked in zip(report.examples, signed, strict=True):
        rows = {
            f"{edges} {method}": example.scores[name_result(edges, method)][0]
            for edges in setting.edges
            for method in METHODS
        }
        size = len(example.tokens)
        others = {
            GRADIENT: example.importance[GRADIENT],
            BLANK: blanked.values,
            LATER: np.arange(size) / size,
        }
        found.append(rows | others)
    return found


def inquire(
    question: Question, orders: Sequence[Order], request: Measurement, beam: bool
) -> Inquiry[tuple[list[PerturbationCurve], list[PerturbationCurve]]]:
    """The curves of the orders, and of all that were tried: these and the best ones found."""
    measured = yield from measure_orders(question, orders, request)
    tried = [*measured.curves, *measured.best.values()]
    if beam:
        winners = []
        for name in SEARCHED:
            search = request.search(METRICS[name], len(question.units), best=True)
            winners.append((yield from find_by_beam(search)))
        tried += yield from trace_orders(question, winners, request)
    return measured.curves, tried


# ---- yardsticks ----------------------------------------------------------------------------------


def measure_texts(
    model: af.Model, texts: Sequence[str], setting: Setting, truth: Truth | None = None
) -> list[Record]:
    """Every row of each text by every yardstick, under every replacement."""
    request = Measurement.read(setting.metrics, BINS, "probability")
    ways = [read_replacement(model, name) for name in setting.replacements]
    scored = score_texts(model, texts, setting)
    encoded = [model.encode(text) for text in texts]
    places = [model.logit_position(value) for value in encoded]
    whole = [Variant(value, place, None) for value, place in zip(encoded, places, strict=True)]
    watched = watch(model, whole, None)
    records: list[Record] = []
    jobs: list[tuple[Record, str, dict[str, list[Order]], Question]] = []
    for value, place, seen, rows, text in zip(encoded, places, watched, scored, texts, strict=True):
        units, chosen, _ = list_perturbed(model, value)
        at = list(chosen)
        record: Record = {"tokens": len(value.tokens), "yardsticks": {}}
        known = {name: row[at] for name, row in rows.items()}
        plain = {SPEARMAN: correlate(known)}
        if truth is not None:
            plain[PRECISION] = find_true(known, np.isin(at, truth(text)))
        orders = {name: [order_units(row)] for name, row in known.items()}
        orders[RANDOM] = draw_orders(len(units), setting.seeds)
        for way in ways:
            record["yardsticks"][way.name] = dict(plain)
            jobs.append((record, way.name, orders, Question(value, place, seen.target, units, way)))
        records.append(record)
    inquiries = [
        (question, inquire(question, list_different(orders), request, setting.beam))
        for _, _, orders, question in jobs
    ]
    answers = Perturber(model).answer(inquiries)
    for (record, name, orders, _), (curves, tried) in zip(jobs, answers, strict=True):
        found = dict(zip(list_different(orders), map(request.measure, curves), strict=True))
        every = [found[drawn[0]] for row, drawn in orders.items() if row != RANDOM]
        if setting.searches:
            every += [*found.values(), *map(request.measure, tried)]
        for metric in setting.metrics:
            best = np.nanmin if prefers_lower(metric) else np.nanmax
            record["yardsticks"][name][metric] = {
                row: float(np.mean([found[order][metric] for order in drawn]))
                for row, drawn in orders.items()
            } | {BEST: float(best([values[metric] for values in every]))}
    return records


def list_different(orders: dict[str, list[Order]]) -> list[Order]:
    """The orders without repetitions."""
    return list(dict.fromkeys(order for rows in orders.values() for order in rows))


def correlate(rows: dict[str, Floats]) -> dict[str, float]:
    """Spearman's correlation of each row [unit] with the size of blank-out; 0 where all units are equal."""
    size = np.abs(rows[BLANK])
    found = {
        name: float(np.nan_to_num(spearman(row[None], size)[0]))
        for name, row in rows.items()
        if name != BLANK
    }
    return found | {RANDOM: 0.0, BEST: 1.0}


def find_true(rows: dict[str, Floats], true: Any) -> dict[str, float]:
    """Precision at k of each row [unit]; true: [unit], bool."""
    found = {name: precision_at_k(tie(row), true) for name, row in rows.items()}
    return found | {RANDOM: float(true.mean()), BEST: 1.0}


# ---- models --------------------------------------------------------------------------------------


def read_kept(path: Path | None, count: int) -> list[Record]:
    """The first records of a file, if it exists."""
    if path is None or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line) for line in lines]


def measure_kept(
    name: str,
    model: af.Model,
    texts: Sequence[str],
    setting: Setting,
    keep: Path | None,
    truth: Truth | None = None,
) -> list[Record]:
    """The records of the texts: the kept ones, and the others, measured now and kept."""
    path = None if keep is None else keep / f"{name}.jsonl"
    records = read_kept(path, len(texts))
    while len(records) < len(texts):
        start = len(records)
        part = texts[start : start + setting.together]
        fresh = measure_texts(model, part, setting, truth)
        records += fresh
        say(f"{name}: text {len(records)} of {len(texts)}")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in fresh)
    return records


def measure_model(
    name: str, data: Path | None, folder: Path, keep: Path | None, count: int | None
) -> list[Record]:
    """The results of a model by its name; planted models are called planted:NAME."""
    setting = SETTINGS.get(name, PLANTED)
    count, called = count or setting.count, name.replace(":", "-")
    records = read_kept(None if keep is None else keep / f"{called}.jsonl", count)
    if len(records) == count:  # the model need not be loaded
        return records
    if name not in SETTINGS:
        planted = af.planted(name.removeprefix("planted:"))
        texts = planted.examples(count)
        return measure_kept(called, planted.model, texts, setting, keep, planted.truth)
    model, candidates = open_model(name, data, folder)
    texts = choose_texts(model, candidates, count, setting.longest)
    return measure_kept(called, model, texts, setting, keep)
