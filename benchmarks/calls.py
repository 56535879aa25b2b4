"""How many files of the package one call of `explain` passes through.

    python benchmarks/calls.py            the second call with a loaded model is counted
    python benchmarks/calls.py --files    also the files, in the order in which they are entered

A file is entered when one of its functions is called; a switch is a call from one file of the package into another.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import attnflow as af

TEXT = "the keys to the old house"
SOURCE = str(Path(af.__file__).parent)


def count_calls(model: af.Model, text: str) -> tuple[dict[str, int], Counter[tuple[str, str]]]:
    """The calls of each file in one explanation, in the order of the first, and the calls from file to file."""
    files: dict[str, int] = {}
    switches: Counter[tuple[str, str]] = Counter()

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(SOURCE):
            return
        files[name] = files.get(name, 0) + 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(SOURCE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != name:
            switches[caller.f_code.co_filename, name] += 1

    sys.setprofile(observe)
    try:
        af.explain(text, model=model)
    finally:
        sys.setprofile(None)
    return files, switches


def main() -> None:
    """Print the files entered and the switches between them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", action="store_true", help="list the files, with their calls")
    listed = parser.parse_args().files
    model = af.load()
    af.explain(TEXT, model=model)
    files, switches = count_calls(model, TEXT)
    print(
        f"explain({TEXT!r}): {len(files)} files entered, {switches.total()} switches between them"
    )
    for name, count in files.items() if listed else ():
        print(f"{count:6}  {Path(name).relative_to(SOURCE)}")


if __name__ == "__main__":
    main()
