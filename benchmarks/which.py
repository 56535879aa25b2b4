"""Which method to use: every kind of edges and method, by every yardstick, on every model.

python benchmarks/which.py --data FOLDER [--keep PLACE]   all models, written to benchmarks/results/ and docs/which-method.md
python benchmarks/which.py MODEL ... [--keep PLACE]       these models alone; the results of the others stay
python benchmarks/which.py --docs                         only rewrite the tables and the figure, from benchmarks/results/which.json

Models: verb-number, sentiment (MiniLM fine-tuned on SST-2), smollm2 (the next word), and the planted ones. FOLDER holds
SST-2's train.tsv, dev.tsv and test.tsv, as for benchmarks/edges.py, which trains the sentiment model in the same folder
(--sentiment). Texts with even numbers choose, those with odd numbers report.
"""

import argparse
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnflow as af
from attnflow.analysis.job import FIRST
from edge_scores import SEED
from edges import KINDS, PLAIN, RESAMPLES, Interval, bootstrap
from sheets import HERE, Sheet, environment_of, fill_page, publish, say, show
from which_figure import draw
from which_scores import (
    LATER,
    PLANTED,
    PRECISION,
    SETTINGS,
    SPEARMAN,
    list_rows,
    measure_model,
)
from which_tables import (
    ALL,
    EVEN,
    JUDGES,
    ODD,
    Measured,
    interval_rows,
    tabulate,
    tabulate_held_out,
    tabulate_planted,
    tabulate_replacements,
    tabulate_truth,
    tabulate_yardsticks,
)

TODAY = {
    "decoder": " ".join(FIRST["decoder"]),
    "encoder classifier": " ".join(FIRST["encoder"]),
}
PLANTED_NAMES = tuple(f"planted:{name}" for name in af.PLANTED)
DOCS = HERE.parent / "docs"


# ---- the choice ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The row chosen for a kind of models on the even texts, and its results on the odd ones."""

    kind: str
    today: str  # the present default
    chosen: str  # the best on the even texts
    second: str  # the next best there
    lead: Interval  # of the chosen row over today's, on the odd texts, over all models of the kind
    behind: tuple[str, ...]  # models where it is behind today's beyond the interval

    @property
    def default(self) -> str:
        """The new default: it changes only if the lead is clear on the texts that had no part in the choice."""
        return self.chosen if self.lead.low > 0 and not self.behind else self.today


def choose(kind: str, measured: Mapping[str, Measured]) -> Choice:
    """The row with the highest mean score on even texts, over models of one kind, judged on odd ones."""
    even = [each.scores(EVEN) for each in measured.values()]
    common = [
        name
        for name in next(iter(measured.values())).candidates
        if all(name in each.candidates for each in measured.values())
    ]
    means = {row: float(np.mean([np.mean(each[row]) for each in even])) for row in common}
    chosen, second = sorted(common, key=lambda row: -means[row])[:2]
    today = TODAY[kind]
    odd = {name: each.scores(ODD) for name, each in measured.items()}
    leads = {name: each[chosen] - each[today] for name, each in odd.items()}
    behind = tuple(name for name, lead in leads.items() if bootstrap(lead).high < 0)
    return Choice(kind, today, chosen, second, bootstrap(*leads.values()), behind)


def merge(known: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """The earlier results, updated by the fresh ones: whole tables, lines, columns and panels."""
    tables = known["tables"] | fresh["tables"]
    for name, key in (("choices", 3), ("yardsticks", None)):
        if name in known["tables"] and name in fresh["tables"]:
            old, new = known["tables"][name], fresh["tables"][name]
            rows = merge_columns(old, new) if key is None else merge_lines(old, new, key)
            tables[name] = old | {"rows": rows}
    chosen = {choice["kind"]: choice for choice in [*known["choices"], *fresh["choices"]]}
    drawn = {(each["model"], each["yardstick"]): each for each in known["panels"]}
    drawn |= {(each["model"], each["yardstick"]): each for each in fresh["panels"]}
    return {"choices": list(chosen.values()), "tables": tables, "panels": list(drawn.values())}


def merge_lines(old: Mapping[str, Any], new: Mapping[str, Any], key: int) -> list[list[str]]:
    """The lines of a table; fresh ones replace those with the same cell at `key`."""
    fresh = {line[key]: line for line in new["rows"]}
    return [fresh.get(line[key], line) for line in old["rows"]]


def merge_columns(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[list[str]]:
    """The lines of a table, named by their first cell, with fresh columns replaced."""
    fresh = {line[0]: dict(zip(new["header"], line, strict=True)) for line in new["rows"]}
    names = list(dict.fromkeys([line[0] for line in old["rows"]] + list(fresh)))
    stale = {line[0]: dict(zip(old["header"], line, strict=True)) for line in old["rows"]}
    cells = {name: stale.get(name, {}) | fresh.get(name, {}) for name in names}
    return [[cells[name].get(column, "") for column in old["header"]] for name in names]


def tabulate_choices(choices: Sequence[Choice], measured: Mapping[str, Measured]) -> Sheet:
    """The choice of each kind of models, its score on the odd texts of each model, and its lead there."""
    lines = []
    for choice in choices:
        for name, each in measured.items():
            if KINDS[name] == choice.kind:
                odd = each.scores(ODD)
                line = [choice.kind, f"**{choice.chosen}**", choice.today, name]
                line.append(str(bootstrap(odd[choice.chosen])))
                for other in (choice.second, PLAIN, LATER):
                    lead = bootstrap(odd[choice.chosen] - odd[other])
                    line.append(f"{choice.second}: {lead}" if other == choice.second else str(lead))
                lines.append(line)
    header = ["kind of model", "best on even texts", "default of `explain`", "model", "score"]
    header += ["lead over the next best on even texts", f"over {PLAIN}", f"over {LATER}"]
    return Sheet("chosen on even texts, reported on odd ones: the score", header, lines)


# ---- files ---------------------------------------------------------------------------------------


def collect_points(measured: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """What the figure shows: panels with {row: interval}."""
    panels = []
    for name in KINDS:
        if name in measured:
            each = measured[name]
            correlations = interval_rows(each.values(SPEARMAN, ODD))
            faithful = each.scores(ODD, JUDGES[1:])
            panels += [
                list_points(name, SPEARMAN, correlations),
                list_points(name, "faithfulness", interval_rows(faithful)),
            ]
    planted = [each for name, each in measured.items() if name in PLANTED_NAMES]
    if planted:
        rows = list_rows(PLANTED)
        true = [each.values(PRECISION) for each in planted]
        precision = {name: bootstrap(*(each[name] for each in true)) for name in rows}
        scores = [each.scores(ALL, JUDGES[1:]) for each in planted]
        faithful_rows = {name: bootstrap(*(each[name] for each in scores)) for name in rows}
        panels += [
            list_points("planted", PRECISION, precision),
            list_points("planted", "faithfulness", faithful_rows),
        ]
    return panels


def list_points(model: str, yardstick: str, rows: Mapping[str, Interval]) -> dict[str, Any]:
    """One panel of the figure."""
    return {
        "model": model,
        "yardstick": yardstick,
        "rows": {name: asdict(value) for name, value in rows.items()},
    }


def read_results() -> dict[str, Any]:
    """The earlier results."""
    found: dict[str, Any] = json.loads((HERE / "results" / "which.json").read_text("utf-8"))
    return found


def group_kinds() -> dict[str, list[str]]:
    """The models of each kind."""
    kinds: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        kinds.setdefault(kind, []).append(name)
    return kinds


def explain_measurement(kept: bool, alone: Sequence[str]) -> list[str]:
    """What the tables show. kept: whether texts were measured before. alone: models, if not all were measured."""
    before = (
        " What was measured of each text was kept, and the minutes above are those of the last run."
        * kept
    )
    if alone:
        before += f" The last run measured {', '.join(alone)}; the rest stands as it was."
    seeds = ", ".join(f"{name} {setting.seeds}" for name, setting in SETTINGS.items())
    return [
        "Scores are the explained position's row in the top layer; special tokens and, of the decoder, the last token are"
        " neither ranked nor taken away. *Spearman* is the correlation with the absolute value of blank-out (0 where all"
        " tokens get the same); benchmarks/edges.py measures it on more texts. Metrics of faithfulness watch the"
        " probability of what the model predicts; sufficiency, deletion and log_odds are better when lower. *(blank_out)* and"
        " *(input_gradient)* are orders by these importances, blank-out with its sign; *(random order)* is the mean of some seeds"
        f" ({seeds}, planted {PLANTED.seeds}); *(best found)* is, text by text and metric by metric, the best of all orders that were"
        " run: on verb-number also the best of all there are (by comprehensiveness and by sufficiency; by a beam above 12 tokens),"
        " on sentiment and the planted models those of a beam; on smollm2, where a beam takes two minutes a text, it is the best row and nothing is normalised.",
        f"The *score* is the mean over {', '.join(JUDGES)} (those that a model has) of how far a row is from the random order, 0, to the"
        f" best found, 1. Means over texts with 95 % intervals by {RESAMPLES:,} bootstrap resamples of texts; what a share is divided by"
        f" is not drawn anew. All seeds are {SEED}. The default of a kind of models is what has the highest mean score on the texts with"
        " even numbers, if on those with odd numbers its lead over today's is beyond the paired interval and it is behind it on no"
        " model; else today's." + before,
    ]


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(description="Measure edges and methods by every yardstick.")
    parser.add_argument(
        "models", nargs="*", help=f"{', '.join(SETTINGS)}, planted; all if none is named"
    )
    parser.add_argument("--data", type=Path, help="folder with SST-2's train, dev and test.tsv")
    parser.add_argument(
        "--sentiment",
        type=Path,
        default=Path("build/sentiment"),
        help="folder of the sentiment model",
    )
    parser.add_argument("--keep", type=Path, help="folder to keep what is measured of each text")
    parser.add_argument("--quick", action="store_true", help="6 texts a model; nothing is written")
    parser.add_argument(
        "--docs", action="store_true", help="write the docs again, without measuring"
    )
    asked = parser.parse_args()
    if asked.docs:
        listed = read_results()
        fill_page(DOCS / "which-method.md", listed["tables"])
        draw(listed["panels"], DOCS / "pictures" / "which.svg")
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    names = [*PLANTED_NAMES, *SETTINGS]
    if asked.models:
        names = [
            name for name in names if name in asked.models or name.split(":")[0] in asked.models
        ]
    if "sentiment" in names and asked.data is None:
        say("the sentiment model is left out: its sentences (SST-2) are not given, see --data")
        names.remove("sentiment")
    measured: dict[str, Measured] = {}
    for name in names:
        records = measure_model(
            name,
            asked.data,
            asked.sentiment,
            None if asked.quick else asked.keep,
            6 if asked.quick else None,
        )
        measured[name] = Measured(name, SETTINGS.get(name, PLANTED), records)
    large = {name: each for name, each in measured.items() if name in SETTINGS}
    planted = {name: each for name, each in measured.items() if name in PLANTED_NAMES}
    tables = {name: tabulate(each) for name, each in large.items()}
    tables |= {f"{name}, held out": tabulate_held_out(each) for name, each in large.items()}
    choices = [
        choose(kind, {name: large[name] for name in names})
        for kind, names in group_kinds().items()
        if set(names) <= set(large)
    ]
    if choices:
        tables["choices"] = tabulate_choices(choices, large)
    if large:
        tables["yardsticks"] = tabulate_yardsticks(large)
    if len(planted) == len(PLANTED_NAMES):
        tables["planted"] = tabulate_planted(planted)
        tables["truth"] = tabulate_truth(planted)
    if "verb-number" in large:
        tables["replacements"] = tabulate_replacements(large["verb-number"])
    show(tables.values())
    if asked.quick:
        say("nothing is written: that takes all texts")
        return
    fresh: dict[str, Any] = {
        "choices": [{**asdict(choice), "default": choice.default} for choice in choices],
        "tables": {name: asdict(table) for name, table in tables.items()},
        "panels": collect_points(measured),
    }
    whole = len(measured) == len(SETTINGS) + len(PLANTED_NAMES)
    results = fresh if whole else merge(read_results(), fresh)
    publish(
        "which",
        "Which method to believe",
        explain_measurement(asked.keep is not None, () if whole else names),
        [Sheet(**table) for table in results["tables"].values()],
        [],
        environment_of(["attnflow", "numpy", "torch", "transformers"], began),
        **results,
    )
    fill_page(DOCS / "which-method.md", results["tables"])
    draw(results["panels"], DOCS / "pictures" / "which.svg")


if __name__ == "__main__":
    main()
