"""The cost of the experiments: how long Table 1 takes and where the time goes; blank-out against a loop over tokens. Run from the repository root:

python benchmarks/lab.py            2,000 sentences, written to benchmarks/results/
python benchmarks/lab.py --quick    200 sentences, printed only
"""

import argparse
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

import attnflow as af
from attnflow.paper import grammar
from sheets import Figure, Sheet, environment_of, figure_sheet, publish, say, seconds_of, show

MINUTES, FLOW_SHARE, BLANK_OUT = (
    5.0,
    1 / 3,
    5.0,
)  # at most; at most; times faster than the loop, at least
COUNT, ROUNDS = 100, 3  # sentences of the blank-out measurement


def table_1(limit: int) -> tuple[float, dict[str, float], list[str]]:
    """Seconds of the whole command, run in its own process; of its parts, as the command prints them; and its command line."""
    command = [
        sys.executable,
        "-m",
        "attnflow",
        "reproduce",
        "table1",
        "--limit",
        str(limit),
        "--out",
    ]
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        answer = subprocess.run(
            [*command, str(Path(folder) / "table1")], capture_output=True, text=True, check=True
        )
        seconds = time.perf_counter() - start
    parts = answer.stderr.strip().splitlines()[-1].split("time: ")[1].split(", ")
    return (
        seconds,
        {part.rsplit(" ", 2)[0]: float(part.rsplit(" ", 2)[1]) for part in parts},
        command[3:-1],
    )


def loop(model: af.Model, text: str) -> list[float]:
    """Blank-out by the simplest code: one forward pass per token."""
    ids = list(model.encode(text).ids)
    with torch.no_grad():
        before = model.model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        target = int(before.argmax())
        changes = []
        for place in range(len(ids)):
            changed = [*ids[:place], model.tokenizer.unk_token_id, *ids[place + 1 :]]
            after = model.model(input_ids=torch.tensor([changed])).logits[0].softmax(-1)
            changes.append(abs(float(after[target] - before[target])))
    return changes


def blank_out() -> list[Figure]:
    """Sentences by the loop, by blank_out one at a time, and by blank_out on all of them; in turns."""
    model = af.load("verb-number")
    texts = [each.text for each in islice(grammar.sentences(seed=1), COUNT)]
    worst = max(
        float(np.abs(af.blank_out(model, text).values - loop(model, text)).max())
        for text in texts[:20]
    )
    times: dict[str, list[float]] = {"loop": [], "one": [], "all": []}
    for _ in range(ROUNDS):
        times["loop"].append(seconds_of(lambda: [loop(model, text) for text in texts]))
        times["one"].append(seconds_of(lambda: [af.blank_out(model, text) for text in texts]))
        times["all"].append(seconds_of(lambda: af.blank_out(model, texts)))
    slow = median(times["loop"])
    return [
        Figure(f"blank-out of {COUNT} sentences by a loop over tokens", slow, "s"),
        Figure(
            "blank_out(model, texts) against that loop",
            slow / median(times["all"]),
            "x",
            BLANK_OUT,
            at_least=True,
        ),
        Figure(
            "blank_out(model, text), one after another, against that loop",
            slow / median(times["one"]),
            "x",
        ),
        Figure("largest difference between them", worst, "", 1e-5),
    ]


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(description="Measure the laboratory.")
    parser.add_argument("--quick", action="store_true", help="fewer sentences; nothing is written")
    quick = parser.parse_args().quick
    limit, began = 200 if quick else 2000, time.monotonic()
    say(f"Table 1 on {limit:,} sentences")
    table_1(2)  # kernels are compiled, files are in memory
    seconds, parts, command = table_1(limit)
    say("blank-out")
    figures = [
        Figure(
            f"Table 1, {limit:,} sentences, the whole command", seconds / 60, "minutes", MINUTES
        ),
        Figure("flow's share of it", parts["flow"] / seconds, "", FLOW_SHARE),
        *(
            Figure(f"{name}'s share of it", parts[name] / seconds, "")
            for name in ("blank_out", "capture", "raw", "rollout")
        ),
        *blank_out(),
    ]
    rows = [
        [name, f"{took:.1f}", f"{100 * took / seconds:.0f} %"]
        for name, took in {**parts, "the whole command": seconds}.items()
    ]
    sheets = [
        Sheet("where the time of Table 1 goes", ["part", "seconds", "share"], rows),
        figure_sheet(figures),
    ]
    show(sheets)
    if quick:
        return
    notes = [
        f"Table 1 is `attnflow {' '.join(command)}`, on the bundled model and sentences of the grammar, in a process of its own; what is"
        " left of its time is the start, the import of torch, correlations and files. Blank-out: the bundled model,"
        f" {COUNT} sentences of the grammar, medians of {ROUNDS} rounds in turns.",
    ]
    environment = environment_of(["attnflow", "numpy", "torch"], began)
    publish("lab", "The laboratory", notes, sheets, figures, environment, parts=parts)


if __name__ == "__main__":
    main()
