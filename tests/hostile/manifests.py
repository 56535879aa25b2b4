"""Damaged manifests of a real corpus, at every command of a corpus and at `af.read_corpus`.

One in ten names code of its own, which nobody may import.
"""

import json
import random
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attnflow as af
from attnflow.corpus.folder import ERRORS
from attnflow.corpus.job import name_results
from attnflow.corpus.manifest import MANIFEST
from tests.corpora import sentences, write_csv
from tests.hostile.commands import complaint, run_command
from tests.hostile.damage import damage_json, dump, odd_json
from tests.hostile.tries import Result, complain, refusal, run_tries

ROWS = 11
HARMFUL = "harmful"  # a module that can be found, and leaves a trace
COMMANDS = {
    "status": [],
    "verify": [],
    "evaluate": [],
    "top": ["--min-count", "1"],
    "run": ["--shard-rows", "4", "--importance", "blank_out"],
}


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these manifests."""
    base = make_corpus(folder / "corpus")
    return run_tries(partial(attempt, base), "manifests", numbers, seed, folder, seconds=120)


def make_corpus(base: Path) -> Path:
    """A corpus of three shards, with one error, computed by the model that ships with attnflow."""
    base.mkdir(parents=True)
    texts = write_csv(base / "texts.csv", [*sentences(6), "", *sentences(4, 1)])
    af.explain_corpus(
        texts, base / "out", importance=["blank_out"], foil=af.RUNNER_UP, shard_rows=4
    )
    return base


def attempt(base: Path, draw: random.Random, number: int, folder: Path) -> str | None:
    """Damage one manifest, and ask for all that can be asked for; what is bad, if anything."""
    out = folder / "out"
    shutil.copytree(base / "out", out)
    content = (out / MANIFEST).read_bytes()
    whole = number % 50 == 0  # then all must be well
    if whole:
        damaged = content
    elif number % 10 == 3:
        damaged = dump(name_code(draw, json.loads(content)))
    elif number % 5 == 4:
        damaged = odd_json(draw, content)
    else:
        part = draw.choice(
            [None, ["shards"], ["options"], ["model"], ["rows", "shard_rows", "inputs"]]
        )
        damaged = dump(damage_json(draw, json.loads(content), part))
    (out / MANIFEST).write_bytes(damaged)
    trace = folder / "trace"
    (folder / f"{HARMFUL}.py").write_text(f"open({str(trace)!r}, 'w')\nmethod = len\n")
    sys.path.insert(0, str(folder))
    found = with_name(complain(lambda: read_it(out)), "read_corpus")
    for name, options in COMMANDS.items():
        given = [str(base / "texts.csv"), "--out", str(out)] if name == "run" else [str(out)]
        ended = run_command(["corpus", name, *given, *options], folder)
        found = found or with_name(complaint(ended), f"corpus {name}")
        if whole and ended.status != 0:
            found = found or f"corpus {name}: {ended.err} of a corpus that is whole"
        if name == "run" and ended.status == 0:
            found = found or with_name(complain(lambda: lost_rows(out)), "corpus run")
    left = list(out.glob(".attnflow-*"))
    found = found or (f"a temporary file is left: {left[0].name}" if left else None)
    found = found or ("code that only the manifest names was imported" if trace.exists() else None)
    return found and f"{found}; the manifest differs: {difference(content, damaged)}"


def name_code(draw: random.Random, content: Any) -> Any:
    """A manifest that names a function where it may, so that a reader could import it."""
    options, reference = content["options"], f"{HARMFUL}:method"
    name = draw.choice(["mine", reference, f"mine={reference}"])
    column = draw.choice(["methods", "importance", "edges", "graph", "keep"])
    if column == "graph":
        options["graph"] = reference
    else:
        options[column] = draw.choice([[name], [*options[column], name]])
    columns = name_results(options["edges"], options["methods"])
    options["layers"] = {column: [6] for column in columns}
    if draw.random() < 0.7:
        options["own_edges" if column == "edges" else "functions"] = {name: reference}
    return content


def with_name(found: str | None, name: str) -> str | None:
    """What was bad, with the command that it was bad about."""
    return found and f"{name}: {found}"


def read_it(out: Path) -> str | None:
    """The table by the library: an error of one line, or rows that are there."""
    try:
        af.read_corpus(out)
    except af.AttnFlowError as error:
        return refusal(error)
    return None


def lost_rows(out: Path) -> str | None:
    """A run that says that it is done has every row in its table or in its errors, once."""
    import pyarrow.parquet as pq

    tables = af.read_corpus(out), pq.read_table(out / ERRORS)
    rows = sorted(row for table in tables for row in table["row"].to_pylist())
    return None if rows == list(range(ROWS)) else f"it says that it is done, with the rows {rows}"


def difference(whole: bytes, damaged: bytes) -> str:
    """Where a damaged manifest begins to differ, to look at."""
    same = next(
        (
            place
            for place, pair in enumerate(zip(whole, damaged, strict=False))
            if pair[0] != pair[1]
        ),
        min(len(whole), len(damaged)),
    )
    line = damaged.rfind(b"\n", 0, same) + 1
    return ascii(damaged[line : same + 60].decode("utf-8", "replace").strip())
