"""Which edges agree with blank-out: raw, rollout and flow on each kind of edges.

python benchmarks/edges.py --data FOLDER          three models, written to benchmarks/results/
python benchmarks/edges.py --quick [MODEL] ...    few texts, printed only
python benchmarks/edges.py --keep PLACE [MODEL]   measurements are kept in PLACE, and read from it

The texts: SmolLM2's next word on the prompts of prompts.txt, sentences of the grammar for the
verb-number model that ships with attnflow, and SST-2 for a fine-tuned MiniLM. FOLDER holds SST-2's
train.tsv, dev.tsv and test.tsv, each line a sentence, a tab, 0 or 1; without it the sentiment model
is left out. It is trained once, in the folder --sentiment. On the classifiers, blank-out is
`af.blank_out`: the change of the predicted class's probability when a token becomes UNK. On SmolLM2
it is the change of the predicted token's log-probability when a position leaves the attention mask.
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_scores import FEWEST, MOST, PROMPTS, SEED, SENTENCES, Floats, Scores, measure_model
from sheets import Figure, Sheet, environment_of, figure_sheet, publish, say, show

KINDS = {
    "smollm2": "decoder",
    "verb-number": "encoder classifier",
    "sentiment": "encoder classifier",
}
PLAIN, TIE = "attention rollout", "contribution rollout"  # the paper's; what ties go to
TO_REACH = {"contribution rollout": 0.35, "gradient rollout": 0.35}  # on SmolLM2
RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean over texts and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def bootstrap(*samples: Sequence[float] | Floats) -> Interval:
    """The means of bootstrap samples: in each, the texts are drawn again with replacement."""
    rng = np.random.default_rng(SEED)
    means = np.zeros(RESAMPLES)
    for sample in samples:
        values = np.asarray(sample)
        drawn = rng.integers(0, len(values), (RESAMPLES, len(values)))
        means += values[drawn].mean(axis=1) / len(samples)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(np.mean([np.mean(each) for each in samples])), float(low), float(high))


def subtract(left: Scores, right: Scores, half: slice = slice(None)) -> Floats:
    """[text]: how much better one correlates than the other, on the same texts."""
    return np.subtract(left.correlation[half], right.correlation[half])


def tabulate(title: str, found: dict[str, Scores]) -> Sheet:
    """Every kind of edges and every method on one model; the best is bold."""
    best = max(found, key=lambda name: float(np.mean(found[name].correlation)))
    rows = []
    for name, scores in found.items():
        against = "" if name == PLAIN else str(bootstrap(subtract(scores, found[PLAIN])))
        cells = [name, str(bootstrap(scores.correlation)), against]
        cells += [f"{np.mean(scores.first):.2f}", str(bootstrap(scores.top)).replace("+", "")]
        rows.append([f"**{cell}**" if name == best and cell else cell for cell in cells])
    header = ["edges, method", "Spearman", "minus plain rollout", "first token", "top 5 in common"]
    return Sheet(title, header, rows)


def choose_default(measured: dict[str, dict[str, Scores]]) -> tuple[str, str, Interval]:
    """What ranks best on the even texts of the models of one kind, and its lead over the fallback."""
    even = slice(0, None, 2)
    names = [name for name in next(iter(measured.values())) if not name.startswith("(")]
    means = {
        name: np.mean([np.mean(found[name].correlation[even]) for found in measured.values()])
        for name in names
    }
    best = max(names, key=lambda name: float(means[name]))
    ahead = bootstrap(*(subtract(found[best], found[TIE], even) for found in measured.values()))
    return (best if ahead.low > 0 else TIE), best, ahead


def judge(
    kind: str, measured: dict[str, dict[str, Scores]]
) -> tuple[list[list[str]], dict[str, Any]]:
    """The default of one kind of model, chosen on the even texts and reported on the odd ones."""
    chosen, best, ahead = choose_default(measured)
    odd = slice(1, None, 2)
    rows = []
    held: dict[str, Any] = {}
    for model, found in measured.items():
        figures = [bootstrap(found[name].correlation[odd]) for name in (chosen, TIE, PLAIN)]
        gain = bootstrap(subtract(found[chosen], found[PLAIN], odd))
        behind = "BEHIND" if gain.high < 0 else "no"
        rows.append(
            [
                kind,
                f"**{chosen}**",
                f"{best}, {ahead}",
                model,
                *map(str, figures),
                str(gain),
                behind,
            ]
        )
        held[model] = {
            **{
                name: asdict(value)
                for name, value in zip((chosen, TIE, PLAIN), figures, strict=True)
            },
            "minus plain rollout": asdict(gain),
            "behind": behind == "BEHIND",
        }
    return rows, {"default": chosen, "best": best, "ahead": asdict(ahead), "held out": held}


def summarise(found: dict[str, Scores]) -> dict[str, Any]:
    """The figures of one model, for the file."""
    return {
        name: {
            "spearman": asdict(bootstrap(scores.correlation)),
            "minus plain rollout": asdict(bootstrap(subtract(scores, found[PLAIN]))),
            "first token": float(np.mean(scores.first)),
            "top 5": asdict(bootstrap(scores.top)),
            "undefined": scores.undefined,
        }
        for name, scores in found.items()
    }


def list_models(names: Sequence[str], data: Path | None) -> list[str]:
    """The models to measure: all, or the named ones; sentiment only if its sentences are given."""
    chosen = list(names or KINDS)
    for name in chosen:
        if name not in KINDS:
            raise SystemExit(f"unknown model {name!r}; choose from {', '.join(KINDS)}")
    if "sentiment" in chosen and data is None:
        say("the sentiment model is left out: its sentences (SST-2) are not given, see --data")
        chosen.remove("sentiment")
    return chosen


def explain_measurement(minutes: dict[str, float], kept: bool) -> list[str]:
    """What the tables show, on which texts, and how long the measurement took."""
    return [
        "Spearman's correlation with blank-out, of the explained position's row in the top layer, without the first token,"
        " special tokens and the explained position; the share of the first token (CLS on the classifiers) in that row; and how many of the five"
        f" best tokens are among blank-out's five best. Means over texts with 95 % intervals by {RESAMPLES:,} bootstrap resamples of texts;"
        " *minus plain rollout* is paired, text by text. A row that gives all tokens the same counts as 0.",
        f"Texts: the {len(PROMPTS)} prompts of benchmarks/prompts.txt; sentences of the grammar; sentences of SST-2's test.tsv in"
        f" shuffled order; of both the first {SENTENCES} with {FEWEST} words or more and at most {MOST} tokens. All seeds are {SEED}. Measuring took "
        + ", ".join(f"{value:.1f} minutes on {name}" for name, value in minutes.items())
        + ", of one core's time"
        + (", one model at a time, and was kept" if kept else "")
        + f". The command: `python benchmarks/edges.py --data FOLDER{' --keep PLACE' if kept else ''}`.",
        f"The default of a kind of models is what has the highest mean (over its models) on the texts with even numbers, unless it is not ahead of {TIE}"
        " there beyond the paired interval: then it is that. *Behind*: the paired interval on the odd texts lies below 0.",
    ]


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(description="Measure edges against blank-out.")
    parser.add_argument("models", nargs="*", help=f"{', '.join(KINDS)}; all if none is named")
    parser.add_argument("--data", type=Path, help="folder with SST-2's train, dev and test.tsv")
    parser.add_argument(
        "--sentiment",
        type=Path,
        default=Path("build/sentiment"),
        help="folder of the sentiment model; trained there if it is empty (build/sentiment)",
    )
    parser.add_argument("--keep", type=Path, help="folder to keep what is measured of each model")
    parser.add_argument("--quick", action="store_true", help="10 texts a model; nothing is written")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    measured: dict[str, dict[str, Scores]] = {}
    counts, minutes, sheets, notes = {}, {}, [], []
    for name in list_models(asked.models, asked.data):
        keep, count = (None, 10) if asked.quick else (asked.keep, None)
        taken = measure_model(name, asked.data, asked.sentiment, keep, count)
        measured[name] = {key: Scores(**scores) for key, scores in taken["scores"].items()}
        lengths, minutes[name] = taken["lengths"], taken["minutes"]
        counts[name] = len(lengths)
        title = f"{name}, {len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens"
        sheets.append(tabulate(title, measured[name]))
        if taken["accuracy"] is not None:
            notes.append(f"The sentiment model is right on {taken['accuracy']:.1%} of test.tsv.")
    rows, choices = [], {}
    for kind in dict.fromkeys(KINDS[name] for name in measured):
        same = {name: found for name, found in measured.items() if KINDS[name] == kind}
        lines, choices[kind] = judge(kind, same)
        rows += lines
    header = ["kind of model", "default", "best on even texts, minus contribution rollout", "model"]
    header += ["default", TIE, PLAIN, "default minus plain", "behind plain?"]
    sheets.append(Sheet("defaults: chosen on even texts, reported on odd ones", header, rows))
    figures = [
        Figure(
            f"{name} on SmolLM2, Spearman",
            float(np.mean(measured["smollm2"][name].correlation)),
            "",
            target,
            True,
        )
        for name, target in TO_REACH.items()
        if "smollm2" in measured
    ]
    sheets.append(figure_sheet(figures))
    show(sheets)
    if asked.quick or asked.models:
        return
    notes = [*explain_measurement(minutes, asked.keep is not None), *notes]
    environment = environment_of(["attnflow", "numpy", "torch", "transformers"], began)
    environment["minutes"] = round(sum(minutes.values()), 1)  # some may have been kept
    summaries = {
        name: {"texts": counts[name], **summarise(found)} for name, found in measured.items()
    }
    publish(
        "edges",
        "Edges against blank-out",
        notes,
        sheets,
        figures,
        environment,
        models=summaries,
        defaults=choices,
    )


if __name__ == "__main__":
    main()
