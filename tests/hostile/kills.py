"""SIGKILL to corpus runs at any moment.

What is resumed equals, byte by byte, what was never disturbed, and no process is left.
Two thirds of the kills fall after the first shard, and half of them on runs with two workers.
"""

import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attnflow as af
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.status import corpus_status, verify_corpus
from tests.corpora import is_gone, sentences, write_csv
from tests.hostile.tries import Result, run_tries

ROWS, SHARD_ROWS = 1500, 50
OPTIONS: dict[str, Any] = {"methods": ["rollout"], "layers": [6], "shard_rows": SHARD_ROWS}
SHARDS = ROWS // SHARD_ROWS


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Kill these runs."""
    base = folder / "undisturbed"
    base.mkdir(parents=True)
    texts = write_csv(
        base / "texts.csv", [*sentences(ROWS // 2), "", *sentences(ROWS - ROWS // 2 - 1, 1)]
    )
    af.explain_corpus(texts, base / "out", **OPTIONS)
    return run_tries(
        partial(attempt, base), "kills", numbers, seed, folder, seconds=240, memory=None
    )


def attempt(base: Path, draw: random.Random, number: int, folder: Path) -> str | None:
    """Kill one run, resume it, and compare; what is lost, if anything."""
    out = folder / "out"
    shards = 0 if number % 3 == 0 else draw.randint(1, SHARDS // 2)  # written before the kill
    workers = 1 + number % 2
    killed = start(base, out, workers)
    until(killed, out, shards)
    time.sleep(draw.uniform(0.0, 0.2 if shards == 0 else 0.03))
    os.kill(killed, signal.SIGKILL)
    if os.waitpid(killed, 0)[1] != signal.SIGKILL:
        return f"the run had ended before the kill, after {shards} shards"
    when = f"killed after {shards} of {SHARDS} shards, {workers} workers"
    if not is_gone(killed):
        return f"{when}: a process outlived the run by ten seconds"
    if (out / "manifest.json").exists():
        corpus_status(out)
    resumed = start(base, out, 1)
    if (status := os.waitpid(resumed, 0)[1]) != 0:
        return f"{when}: resuming ended with status {status}"
    found = differences(base / "out", out)
    return found and f"{when}: {found}"


def start(base: Path, out: Path, workers: int) -> int:
    """A run in a process and a session of its own; its process id."""
    if child := os.fork():
        return child
    try:
        os.setsid()
        af.explain_corpus(base / "texts.csv", out, workers=workers, **OPTIONS)
        os._exit(0)
    finally:
        os._exit(1)


def until(process: int, out: Path, shards: int) -> None:
    """Wait until a run has written so many shards, or has ended."""
    while len(list(out.glob("shard-*"))) < shards:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.002)


def differences(whole: Path, out: Path) -> str | None:
    """What a resumed run does not share with one that was never disturbed."""
    names = [sorted(path.name for path in each.iterdir()) for each in (whole, out)]
    if names[0] != names[1]:
        return f"other files: {sorted(set(names[0]) ^ set(names[1]))[:3]}"
    for name in names[0]:
        if name.endswith(".parquet") and (whole / name).read_bytes() != (out / name).read_bytes():
            return f"{name} has other bytes"
    if Manifest.read(whole).shards != Manifest.read(out).shards:
        return "the manifest vouches for other shards"
    wrong = verify_corpus(out)
    return f"verify: {wrong[0]}" if wrong else None
