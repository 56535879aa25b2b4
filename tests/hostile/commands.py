"""Command lines: exit status 0, or 1 or 2 with one line on standard error; no traceback, no control character, no half-written file."""

import json
import os
import random
import re
import shutil
import sys
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attnflow import cli
from attnflow.corpus_folder import LOCK
from tests.families import build, word_tokenizer
from tests.hostile.damage import damage_bytes
from tests.hostile.tries import Result, describe, run_tries
from tests.oracles import attention
from tests.test_corpus import sentences, write_csv

TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
LINE = 20_000  # characters: a line on standard error that is longer helps nobody


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these command lines."""
    base = make_material(folder / "material")
    return run_tries(partial(attempt, base), "commands", numbers, seed, folder, seconds=60)


# ---- one command ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a command ended; `raised` is the error that it did not catch."""

    status: object
    out: str
    err: str
    raised: str | None = None


def run_command(arguments: Sequence[str], folder: Path) -> Ended:
    """The command line in this process, as a shell would start it, with all that reaches its standard output and error."""
    saved = os.dup(1), os.dup(2)
    paths = folder / ".stdout", folder / ".stderr"
    before = sys.argv, sys.stdout, sys.stderr
    raised: str | None = None
    status: object = 0
    try:
        for stream, path in zip((1, 2), paths, strict=True):
            with open(path, "wb") as file:
                os.dup2(file.fileno(), stream)
        sys.stdout, sys.stderr = (
            open(stream, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            for stream in (1, 2)
        )
        sys.argv = ["attnflow", *arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                cli.main()
            except SystemExit as ended:
                status = ended.code or 0
            except BaseException as error:
                raised = describe(error)
        for each in (sys.stdout, sys.stderr):
            each.flush()
    finally:
        sys.argv, sys.stdout, sys.stderr = before
        for stream, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
    out, err = (path.read_bytes().decode("utf-8", "surrogateescape") for path in paths)
    for path in paths:
        path.unlink()
    return Ended(status, out, err, raised)


def complaint(ended: Ended) -> str | None:
    """What is bad about the way in which a command ended."""
    if ended.raised is not None:
        return f"a traceback: {ended.raised}"
    if ended.status not in (0, 1, 2):
        return f"exit status {ended.status!r}"
    for name, text in (("output", ended.out), ("error", ended.err)):
        if "Traceback" in text:
            return f"a traceback on standard {name}: {text[-200:]!r}"
        hidden = next((each for each in text if is_hidden(each)), None)
        if hidden is not None:
            where = text.index(hidden)
            return f"{hidden!r} on standard {name}: {text[max(0, where - 60) : where + 20]!r}"
    lines = [line for line in ended.err.splitlines() if not line.startswith("note: ")]
    # the parser's own errors: how the command is used, and what was wrong, in a frame
    usage = ended.err.startswith(("Usage: ", "╭─ Error"))
    if ended.status == 2 and not usage and len(lines) != 1:
        return f"{len(lines)} lines on standard error: {squeeze(ended.err)!r}"
    if ended.status == 1 and len(lines) > 1 and not usage:
        return f"{len(lines)} lines on standard error: {squeeze(ended.err)!r}"
    if ended.status == 0 and lines:
        return f"exit status 0, and on standard error: {squeeze(ended.err)!r}"
    if any(len(line) > LINE for line in lines):
        return f"a line of {max(map(len, lines)):,} characters on standard error"
    return None


def squeeze(text: str) -> str:
    """The start of an output, without the length of its frames."""
    return re.sub(r"[─ ]{3,}", "  ", text)[:300]


def is_hidden(character: str) -> bool:
    """Whether a terminal would obey a character instead of showing it."""
    return character != "\n" and (
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in TURNING
    )


# ---- what is typed --------------------------------------------------------------------------------------------------------------


def make_material(base: Path) -> Path:
    """Files and models that commands are given: a folder that each try has a copy of, beside models that all share."""
    (base / "here").mkdir(parents=True)
    for name, family in (("encoder", "bert"), ("decoder", "llama")):
        build(family).save_pretrained(base / name)
        word_tokenizer().save_pretrained(base / name)
    here, rng = base / "here", np.random.default_rng(0)
    np.save(here / "good.npy", attention("peaky", 3, 5, rng))
    np.save(here / "causal.npy", attention("causal", 3, 5, rng))
    names = np.array(["a", "\x1b[31m", "\u202e", "\n", "\x9b2J"])
    np.savez(here / "tokens.npz", weights=attention("flat", 2, 5, rng), tokens=names)
    np.savez(here / "heads.npz", weights=attention("flat", 6, 5, rng).reshape(2, 3, 5, 5))
    write_csv(here / "texts.csv", sentences(6))
    (here / "labels.tsv").write_text("".join(f"{each}\tsingular\n" for each in sentences(4)))
    (here / "rows.jsonl").write_text('{"text": "the key"}\n{"text": ""}\n{"id": 3}\n[]\n')
    (here / "old.csv").write_text("old")
    (here / "old.html").write_text("old")
    (here / "a folder").mkdir()
    (here / "a folder.csv").mkdir()
    (here / "loop.csv").symlink_to("loop.csv")
    (here / "loop.npz").symlink_to("loop.npz")
    (here / "nowhere.csv").symlink_to("no folder/x.csv")
    (here / "esc\x1b[31m.npy").write_bytes(b"no array")
    (here / "two\nlines.npy").write_bytes(b"no array")
    with open(os.fsencode(here) + b"/bytes\xff.npy", "wb") as file:
        file.write((here / "good.npy").read_bytes())
    return base


CONTROL = "key \x1b[31m\x07 \u202e \x9b2J \u2028 lost"
BYTES = os.fsdecode(b"key \xff\xfe lost")  # what is no UTF-8 comes from a shell like this
NUMBERS = [
    "-1",
    "0",
    "9" * 30,
    "9" * 5000,
    "-" + "9" * 5000,
    "1.5",
    "nan",
    "",
    "x",
    "٣",
    "²",
    "1_0",
    "0x1",
]
NUMBERS += [" 1", "1e3", "--", "\x1b[2J", BYTES, "999999"]
FRACTIONS = [
    "-1",
    "1",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "",
    "x",
    "9" * 5000,
    "1e-400",
    "٣",
    "0,5",
    BYTES,
]
LISTS = [
    "",
    ",",
    ",,",
    "0,0",
    "-1",
    "x",
    "0,x",
    "9" * 5000,
    "0 " * 5000,
    "raw,raw",
    "rolout",
    CONTROL,
    BYTES,
]
TEXTS = [
    "",
    " ",
    "\n",
    CONTROL,
    BYTES,
    "key " * 5000,
    "x" * 100_000,
    "-h",
    "--",
    "--out",
    "🙂" * 50,
    "שלום",
]
TEXTS += [
    "[bold]key[/bold] [/red]",
    "the 'key' \"to\" %s {} %(x)s",
    "\ufeff",
    "\u0301" * 50,
    "NULL",
    "=1+1",
]
READ = [
    "missing.npz",
    "a folder",
    "loop.npz",
    "nowhere.csv",
    "",
    ".",
    "/",
    "/dev/null",
    "~",
    "x" * 300 + ".npz",
]
READ += [
    "esc\x1b[31m.npy",
    "two\nlines.npy",
    os.fsdecode(b"bytes\xff.npy"),
    "damaged.npz",
    "tokens.npz",
    CONTROL,
]
READ += ["texts.csv", "http://localhost/x.npz", "a/" * 3000 + "x.npz", BYTES, "old.csv/x.npz"]
WRITE = [
    "a folder.csv",
    "loop.csv",
    "nowhere.csv",
    "no folder/x.csv",
    "x",
    "",
    ".",
    "/",
    "/dev/null",
    "/dev/full",
]
WRITE += [
    "x.docx",
    "x" * 300 + ".csv",
    "\x1b[31m.csv",
    "two\nlines.csv",
    os.fsdecode(b"bytes\xff.csv"),
    "x.CSV",
]
WRITE += [
    "old.csv/x.csv",
    "~/x/y.csv",
    ".csv",
    "-.csv",
    "a/" * 3000 + "x.csv",
    BYTES,
    "x.csv ",
    "/proc/x.csv",
]
WRITE += ["loop.csv/x.html", "x.npz", "x.json", "x.html", "x.png"]
NAMES = [
    "",
    "rolout",
    "Rollout",
    "raw,flow",
    CONTROL,
    BYTES,
    "x" * 10_000,
    "None",
    "none",
    "__class__",
    "1",
]
MODELS = [
    "",
    "no-such-model",
    "./no/such",
    "/",
    ".",
    "a folder",
    "texts.csv",
    "../x",
    "a/b/c",
    CONTROL,
    BYTES,
]
MODELS += ["x" * 10_000, "https://localhost/x", "~", "loop.csv", "-", "verb-number/", "VERB-NUMBER"]

# what may stand in a place of a command line: first as it should be, then as it should not
PLACES: dict[str, tuple[list[str], list[str]]] = {
    "{file}": (["good.npy", "causal.npy", "heads.npz", "tokens.npz"], READ),
    "{layer}": (["1", "2"], NUMBERS),
    "{position}": (["0", "1"], NUMBERS),
    "{bottom}": (["0"], NUMBERS),
    "{heads}": (["mean"], [*NAMES, *NUMBERS]),
    "{residual}": (["0.5", "0"], FRACTIONS),
    "{without}": (["", "1"], LISTS),
    "{normalize}": (["sum", "none", "receptive_field"], NAMES),
    "{workers}": (["1", "2"], NUMBERS),
    "{numbers}": (["x.csv", "x.json", "x.npz", "old.csv"], WRITE),
    "{page}": (["x.csv", "x.json", "x.npz", "x.html", "old.html", "x.svg"], WRITE),
    "{npz}": (["x.npz"], WRITE),
    "{table}": (["x.md", "x.csv", "x.json"], WRITE),
    "{text}": (["the key to the cabinets"], TEXTS),
    "{model}": (["verb-number", "MATERIAL/encoder", "MATERIAL/decoder"], MODELS),
    "{encoder}": (["MATERIAL/encoder"], MODELS),
    "{decoder}": (["MATERIAL/decoder"], MODELS),
    "{few}": (
        ["1", "3"],
        [each for each in NUMBERS if each != "999999"],
    ),  # work that is asked for is done
    "{method}": (["raw", "rollout", "flow"], NAMES),
    "{target}": (["singular", "1"], [*NAMES, *NUMBERS]),
    "{methods}": (["rollout", "raw,flow"], LISTS),
    "{importance}": (["", "blank_out"], LISTS),
    "{layers}": (["", "1,2"], LISTS),
    "{texts}": (["texts.csv", "rows.jsonl"], READ),
    "{labels}": (["labels.tsv", "texts.csv"], READ),
    "{column}": (["text"], NAMES),
    "{folder}": (["out"], [*WRITE, "a folder"]),
    "{corpus}": (["MATERIAL/here", "out"], READ),
    "{engine}": (["local"], NAMES),
}
COMMANDS = [
    "raw {file} --layer {layer} --position {position} --heads {heads} --without {without} --out {numbers}",
    "rollout {file} --layer {layer} --bottom {bottom} --residual {residual} --normalize {normalize}",
    "rollout {file} --out {numbers}",
    "flow {file} --layer {layer} --position {position} --bottom {bottom} --workers {workers}",
    "flow {file} --heads {heads} --residual {residual} --without {without} --out {numbers}",
    "explain {text} --layer {layer} --position {position}",
    "explain {text} --model {model} --target {target}",
    "explain {text} --residual {residual} --normalize {normalize} --out {page}",
    "explain {text} --importance --words --truncation",
    "capture {encoder} {text} --heads {heads} --out {npz}",
    "capture {model} {text} --truncation --out {npz}",
    "generate {decoder} {text} --max-new-tokens {few} --method {method} --layer {layer}",
    "generate {decoder} {text} --max-new-tokens {few} --out {page}",
    "generate {decoder} {text} --without {without} --normalize {normalize} --keep-common --max-new-tokens 2",
    "corpus run {texts} --out {folder} --methods {methods} --layers {layers} --shard-rows {few}",
    "corpus run {texts} --out {folder} --model {encoder} --position {position} --limit {few}",
    "corpus run {texts} --out {folder} --text-column {column} --id-column {column} --importance {importance}",
    "corpus run {texts} --out {folder} --engine {engine} --batch-tokens {few} --residual {residual}",
    "corpus status {corpus}",
    "corpus verify {corpus}",
    "corpus top {corpus} --method {method} --k {few} --min-count {few}",
    "corpus evaluate {corpus} --methods {methods} --out {table}",
    "evaluate {model} {labels} --methods {methods} --layers {layers} --limit {few} --out {table}",
    "train verb-number --data {texts} --out {folder} --steps {few}",
    "train sentiment --base {encoder} --data {texts} --out {folder}",
    "reproduce figure1 {text} --model {model} --out {page}",
    "{method} {text}",
    "{method} --{method} {text}",
]


def compose(draw: random.Random, number: int, base: Path) -> list[str]:
    """The arguments of one try: a command as it should be, except for one or two places."""
    words = COMMANDS[number % len(COMMANDS)].split()
    places = [each for each in range(len(words)) if "{" in words[each]]
    hostile = set(draw.sample(places, k=min(len(places), draw.choice([1, 1, 2]))))
    for place in places:
        name = words[place][words[place].index("{") :]
        value = draw.choice(PLACES[name][place in hostile])
        words[place] = words[place].replace(name, value.replace("MATERIAL", str(base)))
    accident = draw.random()
    if accident < 0.05:
        del words[draw.randrange(1, len(words))]
    elif accident < 0.1:
        words.insert(
            draw.randrange(1, len(words) + 1),
            draw.choice(["--nonsense", CONTROL, BYTES, "--\x1b[2J", "--"]),
        )
    return words


def attempt(base: Path, draw: random.Random, number: int, folder: Path) -> str | None:
    """Type one command; what is bad about its end, or about the files that it left."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # as the command does for a process of its own, before transformers is there
    here = folder / "here"
    shutil.copytree(base / "here", here, symlinks=True)
    (here / "damaged.npz").write_bytes(damage_bytes(draw, (here / "heads.npz").read_bytes()))
    os.chdir(here)
    os.environ.update(COLUMNS="2000", HOME=str(folder))
    before = contents(here)
    arguments = compose(draw, number, base)
    ended = run_command(arguments, folder)
    found = complaint(ended) or left_behind(here, before, ended.status == 0)
    return found and f"{found}; attnflow {shown(arguments)}"


def shown(arguments: list[str]) -> str:
    """A command line to read."""
    return " ".join(
        each if each.isprintable() and " " not in each and each else ascii(each)
        for each in (
            f"{each[:40]}...({len(each):,} characters)" if len(each) > 200 else each
            for each in arguments
        )
    )


def contents(here: Path) -> dict[Path, bytes]:
    """All files of a folder, with their bytes; the lock of a corpus, which is always empty, left out."""
    files = (path for path in sorted(here.rglob("*")) if path.is_file())
    return {path: path.read_bytes() for path in files if path.name != LOCK}


def left_behind(here: Path, before: dict[Path, bytes], done: bool) -> str | None:
    """A file that is half-written, changed by a command that failed, or not what its ending says."""
    after = contents(here)
    for path, content in after.items():
        if path.name.startswith(".attnflow-"):
            return f"a temporary file is left: {path.relative_to(here)}"
        if (
            before.get(path) != content and path.parent == here
        ):  # a corpus run that failed may be resumed
            if not done:
                return f"the command failed, and wrote {path.name!r}"
            check_file(path)
    gone = sorted(set(before) - set(after))
    return f"{gone[0].name!r} is gone" if gone else None


def check_file(path: Path) -> None:
    """Raise what a reader of the file would raise."""
    ending = path.suffix.lower()
    if ending == ".json":
        json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse_constant)
    elif ending == ".npz":
        with np.load(path) as arrays:
            assert all(arrays[name].size >= 0 for name in arrays.files)
    else:
        assert path.stat().st_size > 0, f"{path.name} is empty"


def refuse_constant(name: str) -> Any:
    """JSON knows no NaN and no infinity."""
    raise ValueError(f"{name} is no JSON")
