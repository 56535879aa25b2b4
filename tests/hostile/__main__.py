"""Run the attacks: `python -m tests.hostile [--full] [--only KIND] [--seed N] [--number N]`.

Prints a table, and a line for each bad try; exit status 1 if there is one.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

# kind: (tries by default, all tries); each is a file of this folder
KINDS = {
    "graphs": (3000, 3000),
    "arrays": (1000, 1000),
    "models": (192, 300),
    "commands": (336, 500),
    "manifests": (200, 500),
    "kills": (12, 60),
    "tokens": (40, 40),
    "threads": (16, 96),
    "chats": (300, 2000),
    "trained": (25, 100),
    "spellings": (34, 340),
    "scales": (100, 1000),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="all tries; a part of them if not given"
    )
    parser.add_argument("--only", choices=KINDS, help="one kind alone")
    parser.add_argument("--seed", type=int, default=0, help="what all tries are drawn from")
    parser.add_argument("--number", type=int, help="one try of a kind alone")
    asked = parser.parse_args(arguments)
    if asked.number is not None and asked.only is None:
        parser.error("--number is that of one kind's try: give --only too")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # no try asks anyone, or draws bars
    bad: list[str] = []
    print(f"{'kind':10}{'tries':>8}{'clean':>8}{'bad':>6}{'seconds':>9}", flush=True)
    for kind in [asked.only] if asked.only else KINDS:
        numbers = range(KINDS[kind][asked.full]) if asked.number is None else [asked.number]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            run = import_module(f"tests.hostile.{kind}").run
            result = run(numbers, asked.seed, Path(folder).resolve())
        row = f"{kind:10}{result.tries:8,}{result.clean:8,}{len(result.bad):6,}"
        print(f"{row}{time.monotonic() - began:9.0f}", flush=True)
        bad += result.bad
    for line in bad:
        print(f"bad: --seed {asked.seed} --only {line}")
    if bad:
        print("repeat one alone: python -m tests.hostile --seed ... --only ... --number ...")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
