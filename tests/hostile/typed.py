"""What is typed in the tries of commands: each place of a command as it should be, or not."""

import json
import os
import random
from pathlib import Path

import numpy as np

import attnflow as af
from tests.corpora import sentences, write_csv
from tests.families import build, word_tokenizer
from tests.oracles import attention

CONTROL = "key \x1b[31m\x07 \u202e \x9b2J \u2028 lost"
BYTES = os.fsdecode(b"key \xff\xfe lost")  # what is no UTF-8 comes from a shell like this
DIGITS = "9" * 5000
HERE, CORPUS = "here", "corpus"  # the folder that each try has a copy of, and a corpus in it


def make_material(base: Path) -> Path:
    """Files, models and a corpus to give to commands, with control characters in their words."""
    here, rng = base / HERE, np.random.default_rng(0)
    here.mkdir(parents=True)
    for name, family in (("encoder", "bert"), ("decoder", "llama"), ("classifier", "distilbert")):
        build(family).save_pretrained(base / name)
        word_tokenizer().save_pretrained(base / name)
    rewrite(base / "classifier" / "config.json", id2label={"0": "a\x1b[31m", "1": "b\u202e"})
    decoder = base / "decoder" / "tokenizer.json"
    model = json.loads(decoder.read_text(encoding="utf-8"))["model"]
    more = {f"word{number}{CONTROL}": number for number in range(len(model["vocab"]), 60)}
    rewrite(decoder, model={**model, "vocab": model["vocab"] | more})
    np.save(here / "good.npy", attention("peaky", 3, 5, rng))
    np.save(here / "causal.npy", attention("causal", 3, 5, rng))
    names = np.array(["a", "\x1b[31m", "\u202e", "\n", "\x9b2J"])
    np.savez(here / "tokens.npz", weights=attention("flat", 2, 5, rng), tokens=names)
    np.savez(here / "heads.npz", weights=attention("flat", 6, 5, rng).reshape(2, 3, 5, 5))
    write_csv(here / "texts.csv", sentences(6))
    (here / "labels.tsv").write_text("".join(f"{each}\tsingular\n" for each in sentences(4)))
    rows = [{"text": f"the {CONTROL}"}, {"text": "the old key"}, {"text": ""}, {"id": 3}, []]
    (here / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    af.explain_corpus(
        here / "rows.jsonl", here / CORPUS, importance=["blank_out"], text_column="text"
    )
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


def rewrite(path: Path, **changes: object) -> None:
    """Other values in a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


# fmt: off
NUMBERS = [
    "-1", "0", "9" * 30, DIGITS, f"-{DIGITS}", "1.5", "nan", "", "x", "٣", "²", "1_0", "0x1", " 1",
    "1e3", "--", "\x1b[2J", BYTES, "999999",
]
FRACTIONS = [
    "-1", "1", "1e400", "nan", "inf", "-inf", "", "x", DIGITS, "1e-400", "٣", "0,5", BYTES,
]
LISTS = [
    "", ",", ",,", "0,0", "-1", "x", "0,x", DIGITS, "0 " * 5000, "raw,raw", "rolout", CONTROL,
    BYTES,
]
TEXTS = [
    "", " ", "\n", CONTROL, BYTES, "key " * 5000, "x" * 100_000, "-h", "--", "--out", "🙂" * 50,
    "שלום", "[bold]key[/bold] [/red]", "the 'key' \"to\" %s {} %(x)s", "\ufeff", "\u0301" * 50,
    "NULL", "=1+1",
]
READ = [
    "missing.npz", "a folder", "loop.npz", "nowhere.csv", "", ".", "/", "/dev/null", "~",
    "x" * 300 + ".npz", "esc\x1b[31m.npy", "two\nlines.npy", os.fsdecode(b"bytes\xff.npy"),
    "damaged.npz", "tokens.npz", CONTROL, "texts.csv", "http://localhost/x.npz",
    "a/" * 3000 + "x.npz", BYTES, "old.csv/x.npz",
]
WRITE = [
    "a folder.csv", "loop.csv", "nowhere.csv", "no folder/x.csv", "x", "", ".", "/", "/dev/null",
    "/dev/full", "x.docx", "x" * 300 + ".csv", "\x1b[31m.csv", "two\nlines.csv",
    os.fsdecode(b"bytes\xff.csv"), "x.CSV", "old.csv/x.csv", "~/x/y.csv", ".csv", "-.csv",
    "a/" * 3000 + "x.csv", BYTES, "x.csv ", "/proc/x.csv", "loop.csv/x.html", "x.npz", "x.json",
    "x.html", "x.png",
]
NAMES = [
    "", "rolout", "Rollout", "raw,flow", CONTROL, BYTES, "x" * 10_000, "None", "none", "__class__",
    "1",
]
MODELS = [
    "", "no-such-model", "./no/such", "/", ".", "a folder", "texts.csv", "../x", "a/b/c", CONTROL,
    BYTES, "x" * 10_000, "https://localhost/x", "~", "loop.csv", "-", "verb-number/",
    "VERB-NUMBER",
]
# fmt: on
FEW = [each for each in NUMBERS if each != "999999"]  # work that is asked for is done

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
    "{classifier}": (["MATERIAL/classifier"], MODELS),
    "{encoder}": (["MATERIAL/encoder"], MODELS),
    "{decoder}": (["MATERIAL/decoder"], MODELS),
    "{few}": (["1", "3"], FEW),
    "{method}": (["raw", "rollout", "flow"], NAMES),
    "{target}": (["singular", "1"], [*NAMES, *NUMBERS]),
    "{methods}": (["rollout", "raw,flow"], LISTS),
    "{importance}": (["", "blank_out"], LISTS),
    "{layers}": (["", "1,2"], LISTS),
    "{texts}": (["texts.csv", "rows.jsonl"], READ),
    "{labels}": (["labels.tsv", "texts.csv"], READ),
    "{column}": (["text"], NAMES),
    "{folder}": (["out"], [*WRITE, "a folder"]),
    "{corpus}": (["corpus"], READ),
    "{engine}": (["local"], NAMES),
}
COMMANDS = [
    "raw {file} --layer {layer} --heads {heads} --without {without} --out {numbers}",
    "rollout {file} --layer {layer} --bottom {bottom} --residual {residual}",
    "rollout {file} --out {numbers}",
    "flow {file} --layer {layer} --position {position} --bottom {bottom} --workers {workers}",
    "flow {file} --heads {heads} --residual {residual} --without {without} --out {numbers}",
    "explain {text} --layer {layer} --position {position}",
    "explain {text} --model {model} --target {target}",
    "explain {text} --model {classifier} --target {target}",
    "explain {text} --model {model} --foil {target} --edges gradient",
    "explain {text} --model {classifier} --runner-up --target {target}",
    "generate {decoder} {text} --edges relevance --foil {target} --max-new-tokens 2",
    "evaluate {model} {labels} --foil {target} --methods rollout --limit {few}",
    "corpus run {texts} --out {folder} --foil {target} --importance {importance} --limit {few}",
    "explain {text} --residual {residual} --normalize {normalize} --out {page}",
    "explain {text} --importance --words --truncation",
    "capture {encoder} {text} --heads {heads} --out {npz}",
    "capture {model} {text} --truncation --out {npz}",
    "generate {decoder} {text} --max-new-tokens {few} --method {method} --layer {layer}",
    "generate {decoder} {text} --max-new-tokens {few} --out {page}",
    "generate {decoder} {text} --without {without} --keep-common --max-new-tokens 2",
    "corpus run {texts} --out {folder} --methods {methods} --layers {layers} --shard-rows {few}",
    "corpus run {texts} --out {folder} --model {encoder} --position {position} --limit {few}",
    "corpus run {texts} --out {folder} --text-column {column} --importance {importance}",
    "corpus run {texts} --out {folder} --engine {engine} --batch-tokens {few}",
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
    """The arguments of one try: a command as it should be, except for two places at most."""
    words = COMMANDS[number % len(COMMANDS)].split()
    places = [each for each in range(len(words)) if "{" in words[each]]
    hostile = set(draw.sample(places, k=min(len(places), draw.choice([0, 1, 1, 1, 2]))))
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
