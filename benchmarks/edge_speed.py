"""The cost of edges: time and memory of a graph of each kind, and of flow on it. Run from the repository root:

    python benchmarks/edge_speed.py            all measurements, written to benchmarks/results/
    python benchmarks/edge_speed.py --quick    one shape and few tokens, printed only

Each measurement runs in a fresh process on one thread (edge_speed_one.py).
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from edge_speed_one import KINDS
from sheets import HERE, Sheet, environment_of, publish, say, show

SHAPES = ("MiniLM", "SmolLM2")
TIMES = {"norm": 3.0, "contribution": 5.0, "gradient": 5.0}  # at most: multiples of a forward pass
RULES = {"relevance": 1.2, "relevance_and_gradient": 2.2}  # at most: multiples of gradient edges
MEMORY = 300.0  # at most: MB above capture
FLOWS = {"norm": 1.5, "contribution": 1.5}  # at most: multiples of flow on attention
FLOW_TOKENS = 64


def fresh(*arguments: object) -> Any:
    """What edge_speed_one.py prints in a new process."""
    command = [sys.executable, str(HERE / "edge_speed_one.py"), *map(str, arguments)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def judge(value: float, target: float | None, unit: str = "x") -> str:
    """A cell: the value, and whether it meets its target."""
    shown = f"{value:.0f}{unit}" if unit == " MB" else f"{value:.2f}{unit}"
    return shown if target is None else f"{shown} {'(met)' if value <= target else '(NOT MET)'}"


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(description="Measure what edges cost.")
    parser.add_argument("--quick", action="store_true", help="few tokens; nothing is written")
    quick = parser.parse_args().quick
    began = time.monotonic()
    shapes, sizes = (SHAPES[:1], {64: 3}) if quick else (SHAPES, {128: 5, 512: 3})
    seconds, peaks, flows = {}, {}, {}
    for shape in shapes:
        for size, rounds in sizes.items():
            say(f"time: {shape}'s shape, {size} tokens")
            seconds[f"{shape} {size}"] = fresh("times", shape, size, rounds)
        say(f"memory: {shape}'s shape")
        peaks[shape] = {kind: fresh("memory", shape, max(sizes), kind) for kind in KINDS}
        say(f"flow: {shape}")
        flows[shape] = fresh("flow", shape, 24 if quick else FLOW_TOKENS, 3)
    time_rows = [
        [
            *name.split(),
            f"{found['forward']:.3g}",
            *(judge(found[kind] / found["forward"], TIMES.get(kind)) for kind in KINDS),
        ]
        for name, found in seconds.items()
    ]
    rule_rows = [
        [
            *name.split(),
            f"{found['gradient']:.3g}",
            *(judge(found[kind] / found["gradient"], most) for kind, most in RULES.items()),
        ]
        for name, found in seconds.items()
    ]
    memory_rows = [
        [
            shape,
            f"{found['attention']:.0f} MB",
            *(judge(found[kind] - found["attention"], MEMORY, " MB") for kind in KINDS[1:]),
        ]
        for shape, found in peaks.items()
    ]
    flow_rows = [
        [
            shape,
            what,
            f"{found['attention']:.3g}",
            *(
                judge(found[kind] / found["attention"], FLOWS.get(kind)) if kind in found else "-"
                for kind in KINDS[1:]
            ),
        ]
        for shape, parts in flows.items()
        for what, found in parts.items()
    ]
    sheets = [
        Sheet(
            "the whole call, divided by a plain forward pass",
            ["shape", "tokens", "forward, s", *KINDS],
            time_rows,
        ),
        Sheet(
            "the whole call, divided by gradient edges",
            ["shape", "tokens", "gradient, s", *RULES],
            rule_rows,
        ),
        Sheet(
            f"peak memory at {max(sizes)} tokens: capture above the loaded model, others above capture",
            ["shape", *KINDS],
            memory_rows,
        ),
        Sheet(
            f"flow on {FLOW_TOKENS} tokens, divided by flow on attention",
            ["model", "of the top layer", "attention, s", *KINDS[1:]],
            flow_rows,
        ),
    ]
    show(sheets)
    if quick:
        return
    notes = [
        "One thread; seconds of the processor, medians in turns. Time and memory: models with random weights in the shape of MiniLM (a"
        " classifier) and SmolLM2 (a language model, 49,152 tokens), float32, on random token ids. The forward pass gives the logits of"
        " one position. Flow: the real models on English text; MiniLM predicts nothing, so it has no gradient and relevance edges.",
    ]
    environment = environment_of(["attnflow", "numpy", "torch", "transformers"], began)
    content = {"seconds": seconds, "peaks": peaks, "flows": flows}
    publish("edge_speed", "What edges cost", notes, sheets, [], environment, **content)


if __name__ == "__main__":
    main()
