"""Rollout of long inputs: rows and segments against the model's own attention, and against code without attnflow. Run from the repository root:

    python benchmarks/long.py            all measurements, written to benchmarks/results/
    python benchmarks/long.py --short    the same lengths with fewer layers, written too
    python benchmarks/long.py --quick    the same tables from smaller sizes, printed only

With --answers FILE, measurements are kept there, and an interrupted run resumes. Each measurement runs in a fresh process on one thread (long_one.py). Seconds are CPU time; figures that are compared come from one run.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sheets import HERE, Figure, Sheet, environment_of, figure_sheet, publish, say, show

Found = dict[str, float]
ROWS_LIMIT, SEGMENTS_LIMIT = 4.0, 1.2  # at most: multiples of the attention part
MEMORY_LIMIT = 1.2  # at most: multiples of the queries and keys kept, above the forward pass
DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Effort:
    """How much to measure: tokens with layers; the longest, rows only; one layer; equality; rows on edges; sizes without attnflow, with layers and GB."""

    lengths: tuple[tuple[int, int], ...]
    longest: tuple[int, int]
    kernels: int
    equality: tuple[int, int]
    edges: tuple[int, int]
    today: tuple[int, ...]
    limit: tuple[int, int]


TODAY = (1024, 2048, 4096)
FULL = Effort(((8192, 30), (16_384, 30)), (32_768, 6), 8192, (1024, 30), (8192, 2), TODAY, (30, 8))
SHORT = Effort(((8192, 6), (16_384, 2)), (32_768, 2), 8192, (1024, 6), (8192, 2), TODAY, (6, 2))
QUICK = Effort(((512, 3), (1024, 2)), (2048, 2), 1024, (256, 3), (512, 2), (256, 512), (3, 8))


@dataclass
class Measurements:
    """What long_one.py printed, by its arguments; kept in a file, if one is given."""

    file: Path | None
    done: dict[str, Found]

    def run(self, *arguments: object) -> Found:
        """What long_one.py prints in a new process, or printed before."""
        asked = " ".join(map(str, arguments))
        if asked not in self.done:
            say(asked)
            command = [sys.executable, str(HERE / "long_one.py"), *map(str, arguments)]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            self.done[asked] = json.loads(answer.stdout.splitlines()[-1])
            if self.file is not None:
                self.file.write_text(json.dumps(self.done, indent=1))
        return self.done[asked]


def describe(value: float, target: float) -> str:
    """Whether a target is met."""
    return "yes" if value <= target else "NO"


def make_time_sheet(runs: list[tuple[str, Found]]) -> Sheet:
    """The cost of rows and segments, in multiples of the attention of the same run."""
    rows = []
    for what, run in runs:
        ratio = run["carrying"] / run["attention"]
        limit = ROWS_LIMIT if what == "rows" else SEGMENTS_LIMIT
        rows.append(
            [
                "32 rows of the top layer" if what == "rows" else "64 segments, all layers",
                f"{run['tokens']:,.0f}",
                f"{run['layers']:.0f}",
                f"{run['seconds'] - run['carrying']:.3g}",
                f"{run['attention']:.3g}",
                f"{run['carrying']:.3g}",
                f"**{ratio:.2f}x**",
                f"{limit:g}x",
                describe(ratio, limit),
            ]
        )
    header = ["what", "tokens", "layers", "forward pass, s", "its attention, s", "added, s"]
    title = "CPU seconds of one run"
    return Sheet(title, [*header, "added / attention", "target", "met"], rows)


def make_memory_sheet(forwards: dict[float, Found], runs: list[tuple[str, Found]]) -> Sheet:
    """Peaks above the loaded model."""
    rows = []
    for what, run in runs:
        alone = forwards.get(run["tokens"])
        above = None if alone is None else run["peak"] - alone["peak"]
        share = None if above is None else above / run["kept"]
        matrices = run["layers"] * run["tokens"] ** 2 * 4 / 1e6
        rows.append(
            [
                what,
                f"{run['tokens']:,.0f}",
                f"{run['layers']:.0f}",
                f"{run['kept']:,.0f}" if what == "rows" else "none",
                "" if alone is None else f"{alone['peak']:,.0f}",
                f"{run['peak']:,.0f}",
                "" if above is None else f"{above:,.0f}",
                "" if share is None or what != "rows" else f"**{share:.2f}x**",
                "" if share is None or what != "rows" else describe(share, MEMORY_LIMIT),
                f"{matrices:,.0f}",
            ]
        )
    header = [
        "what",
        "tokens",
        "layers",
        "queries and keys kept, MB",
        "forward pass, MB",
        "peak, MB",
    ]
    header += ["above the forward pass, MB", "above / kept", "met", "fused matrices would be, MB"]
    title = f"peak memory above the loaded model; target for rows: at most {MEMORY_LIMIT:g}x what is kept"
    return Sheet(title, header, rows)


def make_today_sheet(found: dict[int, dict[str, Found]], layers: int, gigabytes: int) -> Sheet:
    """One row of rollout by hand, and by rollout_rows."""
    rows = []
    for tokens, ways in found.items():
        cells = []
        for way in ("today", "ours"):
            run = ways[way]
            failed = bool(run["failed"])
            cells += (
                ["out of memory", f"over {gigabytes:,} GB"]
                if failed
                else [f"{run['seconds']:.3g}", f"{run['peak']:,.0f}"]
            )
        rows.append([f"{tokens:,}", *cells])
    header = ["tokens", "by hand, s", "by hand, MB", "rollout_rows, s", "rollout_rows, MB"]
    title = f"one row of rollout, forward pass included, {layers} layers, under a limit of {gigabytes} GB above the loaded model"
    return Sheet(title, header, rows)


def make_kernel_sheet(found: Found, tokens: int) -> Sheet:
    """32 rows through one layer."""
    names = {
        "attention": "the layer's attention itself (SDPA)",
        "backward": "rows as the backward pass of SDPA with respect to its values",
        "blocks": "rows by blocks of queries, heads fused first (what rollout_rows does)",
    }
    rows = [
        [text, f"{found[name]:.3g}", f"{found[name] / found['attention']:.2f}x"]
        for name, text in names.items()
    ]
    return Sheet(
        f"32 rows through one layer of {tokens:,} tokens, CPU seconds", ["way", "s", "x"], rows
    )


def make_edge_sheet(found: dict[str, Found]) -> Sheet:
    """One row on edges other than attention."""
    rows = [
        [
            name,
            f"{run['tokens']:,.0f}",
            f"{run['layers']:.0f}",
            f"{run['attention']:.3g}",
            f"{run['carrying']:.3g}",
            f"{run['carrying'] / run['attention']:.1f}x",
            f"{run['lost']:.2g}",
            f"{run['peak']:,.0f}",
        ]
        for name, run in found.items()
    ]
    header = ["edges", "tokens", "layers", "the model's attention, s", "added, s"]
    title = "one row of the top layer on other edges, random weights, CPU seconds of one run"
    return Sheet(title, [*header, "added / attention", "lost of the row", "peak, MB"], rows)


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(description="Measure rollout of long inputs.")
    parser.add_argument("--quick", action="store_true", help="smaller sizes; nothing is written")
    parser.add_argument("--short", action="store_true", help="fewer layers")
    parser.add_argument("--answers", type=Path, help="a JSON file to keep measurements in")
    given = parser.parse_args()
    effort = QUICK if given.quick else SHORT if given.short else FULL
    known = given.answers is not None and given.answers.exists()
    run_fresh = Measurements(
        given.answers, json.loads(given.answers.read_text()) if known else {}
    ).run
    began = time.monotonic()
    layers, gigabytes = effort.limit
    forwards: dict[float, Found] = {}
    runs: list[tuple[str, Found]] = []
    for length in effort.lengths:
        forwards[length[0]] = run_fresh("forward", *length)
        runs += [(what, run_fresh(what, *length)) for what in ("rows", "segments")]
    kernels = run_fresh("kernels", effort.kernels)
    equal = run_fresh("equal", *effort.equality)
    edges = {name: run_fresh(name, *effort.edges) for name in ("norm", "contribution")}
    today = {
        tokens: {way: run_fresh(way, tokens, layers, gigabytes) for way in ("today", "ours")}
        for tokens in effort.today
    }
    runs.append(("rows", run_fresh("rows", *effort.longest)))
    figures = [
        Figure(
            f"largest difference of {what} from the matrices' rollout", equal[what], "", DIFFERENCE
        )
        for what in ("rows", "segments")
    ]
    figures.append(
        Figure(
            "largest difference of blocks from the backward pass",
            kernels["difference"],
            "",
            DIFFERENCE,
        )
    )
    sheets = [
        make_time_sheet(runs),
        make_memory_sheet(forwards, runs),
        make_today_sheet(today, layers, gigabytes),
        make_kernel_sheet(kernels, effort.kernels),
        make_edge_sheet(edges),
        figure_sheet(figures),
    ]
    environment = environment_of(["attnflow", "numpy", "torch", "transformers"], began)
    show(sheets)
    if effort is QUICK:
        return
    notes = [
        "One thread, CPU seconds. SmolLM2's shape (9 heads of 64, 3 key-value heads) with random weights, float32, on random token ids; of its 30 layers"
        f" {', '.join(f'{depth} at {size:,} tokens' for size, depth in (*effort.lengths, effort.longest))}."
        " Of the top layer only the rows asked for are weighed, so rows cost less where layers are few. The forward pass is run with"
        " `logits_to_keep=1` and without a cache; its attention is timed inside the run that is measured. Peaks are of resident memory, seen every"
        " 2 ms, each in a process of its own.",
        "by hand: eager attention with `output_attentions=True`, mean over heads, then the product of the layers' matrices in torch.",
        f"Equality: {effort.equality[1]} layers, {effort.equality[0]:,} tokens, 32 rows of the top layer against `rollout(capture(...))`.",
    ]
    if known:
        notes.append(
            "Measured before, several processes at a time on a busy machine; the minutes above are of writing this page."
        )
    content = {
        "runs": [{"what": what, **run} for what, run in runs],
        "forward": list(forwards.values()),
        "today": today,
        "kernels": kernels,
        "edges": edges,
    }
    publish(
        "long",
        "Rollout of long inputs: rows and segments without matrices",
        notes,
        sheets,
        figures,
        environment,
        **content,
    )


if __name__ == "__main__":
    main()
