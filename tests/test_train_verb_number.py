"""The recipe of the bundled model: nouns, sentences made from others, batches, a small training."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow.models.verb_number import VerbNumberConfig
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
from attnflow.paper.nouns import Lexicon, build_lexicon
from attnflow.paper.train_verb_number import (
    Batches,
    Recipe,
    build_vocabulary,
    count_right,
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
        [data], tmp_path / "out", seed=1, steps=300, size=size, report=lines.append
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
from attnflow.paper import train_verb_number as recipe
from tests.test_train_verb_number import TINY

torch.set_num_threads(1)
data, out, resume = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "resume"
recipe.train_verb_number([data], out, seed=4, steps=40, size=TINY, resume=resume)
"""


def test_killed_and_resumed_it_gives_the_weights_of_an_unbroken_run(
    data: Path, tmp_path: Path
) -> None:
    def run(out: str, how: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(data), str(tmp_path / out), how],
            cwd=Path(__file__).parent.parent,
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


def test_too_little_data_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "numpred.val").write_text("VBZ\tthe key\n")
    with pytest.raises(
        af.FileError, match=r"has no sentence on the (train|dev|test) side of the split"
    ):
        train_verb_number([tmp_path], tmp_path / "out")
