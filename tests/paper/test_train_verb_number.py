"""The recipe of the bundled model: nouns, sentences made from others, batches, a small training."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow.cli import commands
from attnflow.models.bundled.verb_number import VerbNumberConfig
from attnflow.paper import grammar
from attnflow.paper.agreement import Sentence
from attnflow.paper.augmentation import (
    Mixture,
    find_inner_sentences,
    find_introductions,
    flip_simple,
    make_variant,
    parse,
    stream_sentences,
)
from attnflow.paper.cards import format_command, list_departures
from attnflow.paper.nouns import Lexicon, build_lexicon
from attnflow.paper.recipes import CAREFUL, PARTS, PLAIN_RECIPE, Recipe, choose_recipe
from attnflow.paper.train_verb_number import (
    Batches,
    build_vocabulary,
    compute_loss,
    count_right,
    make_model,
    split_sides,
    train_verb_number,
)

TINY = VerbNumberConfig(0, num_hidden_layers=1, num_attention_heads=2, hidden_size=8)


def sentence(text: str, label: str = "plural", attractors: int | None = None) -> Sentence:
    return Sentence(
        tuple(text.split()),
        label,
        "x" if attractors is None else f"numpred.test.{attractors}",
        attractors,
    )


@pytest.fixture(scope="module")
def corpus() -> list[Sentence]:
    """Sentences of the grammar as if they were data: some counted, some natural."""
    found = list(islice(grammar.sentences(seed=5), 1500))
    return [
        Sentence(
            each.words,
            each.label,
            f"numpred.test.{each.attractors}" if each.attractors else "numpred.val",
            each.attractors or None,
        )
        for each in found
    ]


@pytest.fixture(scope="module")
def lexicon(corpus: list[Sentence]) -> Lexicon:
    return build_lexicon(corpus)


def test_the_lexicon_finds_the_nouns_of_the_grammar(lexicon: Lexicon) -> None:
    found = {
        (one, many)
        for one, many in grammar.NOUNS.items()
        if lexicon.other.get(one) == many and lexicon.other.get(many) == one
    }
    assert len(found) > 0.9 * len(grammar.NOUNS)
    assert {lexicon.number[one] for one, _ in found} == {0}
    assert not {"the", "this", "big", "of", "often"} & set(lexicon.number)


@pytest.mark.parametrize(
    ("kind", "text", "label"),
    [
        ("unattract", "the keys to the old doors", "plural"),
        ("cut", "the keys", "plural"),
        ("flip", "the key to the old door", "singular"),
        ("flip_all", "the key to the old doors", "singular"),
    ],
)
def test_variants_of_a_sentence_with_an_attractor(
    kind: str, text: str, label: str, lexicon: Lexicon
) -> None:
    found = parse(sentence("the keys to the old door", "plural", 1), lexicon)
    assert found is not None
    assert (found.subject, found.attractors) == (1, (5,))
    changed = make_variant(found, kind, lexicon)
    assert (changed.text, changed.label) == (text, label)


def test_determiners_change_with_their_noun(lexicon: Lexicon) -> None:
    for before, after in {
        "these old keys": "this old key",
        "every key": "all keys",
        "this key": "these keys",
        "many doors": "a door",
    }.items():
        words = before.split()
        lexicon.flip(words, len(words) - 1)
        assert " ".join(words) == after
    words = ["these", "of", "the", "keys"]
    lexicon.flip(words, 3)
    assert words[0] == "these"  # it belongs to another phrase


def test_only_simple_sentences_are_flipped(lexicon: Lexicon) -> None:
    found = flip_simple(sentence("the old keys often"), lexicon)
    assert found is not None
    assert (found.text, found.label) == ("the old key often", "singular")
    for text in ("the keys of the door", "the keys", "they"):
        assert (
            flip_simple(sentence(text, "singular"), lexicon) is None
        )  # two nouns; another number than the verb's; none
    assert (
        parse(sentence("the keys that we know near the door", "plural", 1), lexicon) is None
    )  # a pronoun between


def test_verbs_inside_sentences_give_more_of_them() -> None:
    found = {
        (each.text, each.label)
        for each in find_inner_sentences(
            [sentence("the key is old but the doors are new and they want to have")]
        )
    }
    assert found == {("the key", "singular"), ("the key is old but the doors", "plural")}
    assert find_introductions([sentence("in the summer , the keys")]) == [
        ("in", "the", "summer", ",")
    ]


def test_the_stream_keeps_to_the_train_side_and_is_the_same_for_the_same_seed(
    corpus: list[Sentence], lexicon: Lexicon
) -> None:
    train = split_sides(corpus)["train"]
    drawn = list(islice(stream_sentences(train, lexicon, Mixture(), random.Random(1)), 3000))
    assert {each.side for each in drawn} == {"train"}
    assert drawn[:100] == list(
        islice(stream_sentences(train, lexicon, Mixture(), random.Random(1)), 100)
    )
    sources = {each.source for each in drawn}
    assert {
        "numpred.val",
        "numpred.test.1",
        "cut",
        "flip",
        "flip_all",
        "unattract",
        "flipped",
        "grammar",
    } <= sources
    assert 0.4 < sum(each.label == "plural" for each in drawn) / 3000 < 0.6


def test_a_batch_depends_on_its_step_alone(corpus: list[Sentence], lexicon: Lexicon) -> None:
    sides = split_sides(corpus)
    vocabulary = build_vocabulary(sides["train"])
    batches = Batches(sides["train"], vocabulary, lexicon, Recipe(batch=4), seed=3)
    first, late = batches(0), batches(95)
    for other in (
        batches(0),
        Batches(sides["train"], vocabulary, lexicon, Recipe(batch=4), seed=3)(0),
    ):
        assert all(
            torch.equal(getattr(first, name), getattr(other, name))
            for name in ("ids", "mask", "labels", "truth")
        )
    assert torch.equal(late.ids, batches(95).ids)
    assert first.ids.shape[0] == 4
    assert (first.ids[:, 0] == vocabulary.cls_token_id).all()
    blanked = late.truth >= 0
    assert (late.ids[blanked] == vocabulary.unk_token_id).all()


# ---- recipes -------------------------------------------------------------------------------------


def test_the_parts_are_all_in_which_the_recipes_differ() -> None:
    differing = {
        option.name
        for option in fields(Recipe)
        if option.compare and getattr(PLAIN_RECIPE, option.name) != getattr(CAREFUL, option.name)
    }
    named = [option for options in PARTS.values() for option in options]
    assert sorted(named) == sorted(differing)
    assert choose_recipe("careful", without=PARTS) == PLAIN_RECIPE
    for part, options in PARTS.items():
        chosen = choose_recipe("careful", without=[part])
        changed = {
            option.name
            for option in fields(Recipe)
            if option.compare and getattr(chosen, option.name) != getattr(CAREFUL, option.name)
        }
        assert (chosen.name, changed) == (f"careful without {part}", set(options))


def test_plain_sentences_are_those_of_the_data(corpus: list[Sentence], lexicon: Lexicon) -> None:
    train = split_sides(corpus)["train"]
    drawn = list(
        islice(stream_sentences(train, lexicon, PLAIN_RECIPE.mixture, random.Random(1)), 2000)
    )
    assert set(drawn) <= set(train)
    counted = sum(bool(each.attractors) for each in drawn) / len(drawn)
    assert counted == pytest.approx(0.51 / (0.51 + 0.396), abs=0.05)


def test_a_plain_model_starts_as_gpt_2_does(corpus: list[Sentence], lexicon: Lexicon) -> None:
    vocabulary = build_vocabulary(corpus)
    plain, careful = (
        make_model(vocabulary, lexicon, recipe, 0, None) for recipe in (PLAIN_RECIPE, CAREFUL)
    )
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    first, second = (model.blocks[0].feed_forward[0].weight for model in (plain, careful))
    ratio = (second / first).detach()
    torch.testing.assert_close(ratio, torch.full_like(ratio, 3.0))
    assert {block.attention.dropout.p for block in plain.blocks} == {0.1}
    assert {block.attention.dropout.p for block in careful.blocks} == {0.0}


def test_words_that_are_not_guessed_do_not_count(corpus: list[Sentence], lexicon: Lexicon) -> None:
    vocabulary = build_vocabulary(corpus)
    model = make_model(vocabulary, lexicon, PLAIN_RECIPE, 0, TINY).eval()
    batch = Batches(split_sides(corpus)["train"], vocabulary, lexicon, PLAIN_RECIPE, seed=3)(0)
    assert (batch.truth >= 0).any()
    with torch.no_grad():
        plain, guessed = (
            compute_loss(model, batch, replace(PLAIN_RECIPE, blank_loss=weight))
            for weight in (0.0, 0.5)
        )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.ids, batch.mask).logits.float()
    assert float(plain) == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, batch.labels)), abs=1e-6
    )
    assert float(guessed) > float(plain) + 1


@pytest.mark.parametrize(
    ("recipe", "without"), [("plain", []), ("careful", ["length", "blank-loss"])]
)
def test_the_command_in_a_card_trains_by_the_same_recipe(recipe: str, without: list[str]) -> None:
    chosen = choose_recipe(recipe, without=without)
    for steps, last in ((chosen.steps, "--seed=3"), (5, "--steps=5")):
        command = format_command([Path("d")], Path("o"), 3, replace(chosen, steps=steps))
        parts = [f"--without={part}" for part in without]
        start = ["attnflow", "train", "verb-number", "--data=d", "--out=o", f"--recipe={recipe}"]
        assert command.split()[: len(start) + len(parts)] == [*start, *parts]
        assert command.endswith(last)


# ---- training for real ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: list[Sentence]) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in sorted({each.source for each in corpus}):
        rows = [
            f"{'VBP' if each.label == 'plural' else 'VBZ'}\t{each.text}\n"
            for each in corpus
            if each.source == name
        ]
        (folder / name).write_text("".join(rows))
    return folder


def test_a_small_training_learns_and_its_model_loads(data: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    size = VerbNumberConfig(0, num_hidden_layers=1, num_attention_heads=2, hidden_size=32)
    found = train_verb_number(
        [data],
        tmp_path / "out",
        recipe=choose_recipe(steps=300),
        seed=1,
        size=size,
        report=lines.append,
    )
    assert found.test["natural"].accuracy > 0.85
    assert len(lines) == 4
    model = af.load(tmp_path / "out")
    sides = split_sides(islice(grammar.sentences(seed=5), 300))
    again = count_right(model.model, model.tokenizer, sides["test"])
    assert again["natural"].count > 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        f"| natural | {found.test['natural'].count} | {found.test['natural'].accuracy:.3f} |"
        in card
    )
    assert "attnflow train verb-number --data=" in card
    with pytest.raises(af.FileError, match="already holds a model"):
        train_verb_number([data], tmp_path / "out")


PROGRAM = """
import sys, torch
from pathlib import Path
from attnflow.paper.recipes import choose_recipe
from attnflow.paper.train_verb_number import train_verb_number
from tests.paper.test_train_verb_number import TINY

torch.set_num_threads(1)
data, out, resume = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "resume"
recipe = choose_recipe("plain", steps=40)
train_verb_number([data], out, recipe=recipe, seed=4, size=TINY, resume=resume)
"""


def test_killed_and_resumed_it_gives_the_weights_of_an_unbroken_run(
    data: Path, tmp_path: Path
) -> None:
    def run(out: str, how: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(data), str(tmp_path / out), how],
            cwd=Path(__file__).parents[2],
        )

    whole = run("whole", "new")
    killed = run("killed", "new")
    checkpoint = tmp_path / "killed" / "checkpoint" / "state.safetensors"
    until = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < until and killed.poll() is None:
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    assert whole.wait(timeout=120) == 0
    assert run("killed", "resume").wait(timeout=120) == 0
    for name in ("model.safetensors", "vocabulary.txt", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    assert not checkpoint.exists()


def test_the_log_stands_beside_the_weights_and_goes_on_when_a_run_does(
    data: Path, tmp_path: Path
) -> None:
    out, recipe = tmp_path / "out", choose_recipe("plain", steps=8)
    stop = {"at": 3}

    def report(line: str) -> None:
        stop["at"] -= 1
        if not stop["at"]:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_verb_number([data], out, recipe=recipe, seed=2, size=TINY, report=report)
    before = (out / "training.log").read_text()
    found = train_verb_number([data], out, recipe=recipe, seed=2, size=TINY, resume=True)
    lines = (out / "training.log").read_text().splitlines()
    assert "\n".join(lines).startswith(before)
    assert lines[0].startswith('recipe plain, seed 2: {"name": "plain", "steps": 8, ')
    steps = [line.split(":")[0] for line in lines if line.startswith("step ")]
    assert steps == [f"step {step} of 8" for step in (2, 4, 6, 8)]
    assert "stopped at step 6 of 8; pass --resume to continue" in lines
    assert lines[-1].startswith("finished after")
    card = (out / "README.md").read_text()
    assert all(f"- {line}" in card for line in list_departures(recipe))
    assert found.steps == 8


def test_another_recipes_checkpoint_is_refused_and_left_alone(data: Path, tmp_path: Path) -> None:
    out, plain = tmp_path / "out", choose_recipe("plain", steps=8)

    def report(line: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_verb_number([data], out, recipe=plain, size=TINY, report=report)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    careful = choose_recipe("careful", steps=8)
    with pytest.raises(af.FileError, match="recipe was plain, is careful") as error:
        train_verb_number([data], out, recipe=careful, size=TINY, resume=True)
    assert "\n" not in str(error.value)
    with pytest.raises(af.FileError, match="holds an unfinished training; pass --resume"):
        train_verb_number([data], out, recipe=careful, size=TINY)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "recipe": (["--recipe", "fast"], "unknown recipe 'fast'; choose from plain, careful"),
    "part": (["--without", "luck"], "unknown part 'luck'; choose from blank-loss, augmentation"),
    "part of plain": (
        ["--recipe", "plain", "--without", "length"],
        "parts are left out of the careful recipe; got recipe 'plain' without length",
    ),
    "seed": (["--seed", "-1"], "Invalid value for '--seed'"),
    "no seed": (["--seed", "lucky"], "Invalid value for '--seed'"),
    "large seed": (["--seed", str(2**32)], "seed must be a whole number from 0 to 4294967295"),
    "columns": (["--data", "bad.tsv"], "bad.tsv, line 1: the columns sentence, verb_pos"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_of_a_training_are_one_line(
    name: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, message = BAD_OPTIONS[name]
    (tmp_path / "bad.tsv").write_text("sentence\tverb\tlabel\nthe key\tis\tVBZ\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "verb-number", "--data", str(data), "--out", "new", *options]
    monkeypatch.setattr(sys, "argv", ["attnflow", *arguments])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert len((shown.out + shown.err).strip().splitlines()) == 1
    assert message in shown.err
    assert not (tmp_path / "new").exists()


def test_too_little_data_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "numpred.val").write_text("VBZ\tthe key\n")
    with pytest.raises(
        af.FileError, match=r"has no sentence on the (train|dev|test) side of the split"
    ):
        train_verb_number([tmp_path], tmp_path / "out")
