"""The model that ships with attnflow: what it predicts, how it reads words it does not know, its files, and its capture."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.models.bundled import verb_number
from attnflow.models.bundled.verb_number import (
    SPECIAL,
    VerbNumber,
    VerbNumberConfig,
    Vocabulary,
    classify_word,
    find_words,
)
from attnflow.models.load import SHIPPED
from attnflow.paper.cards import list_departures
from attnflow.paper.recipes import CAREFUL, PLAIN_RECIPE

WEIGHTS = Path(verb_number.__file__).parent / "weights"
SINGULAR = """
the key
the key to the cabinet
the key to the cabinets
the man with the old books
the president of the companies
the child near the houses
the school in the old towns
every house on the roads
the author of these popular books
this picture of the players
the woman that the students know
the city behind the mountains
she
he
it
the government
a large number of people in the city and its mayor 's
the list of the names
a member of the teams
the zorb near the glimps
""".strip().splitlines()
PLURAL = """
the keys
the keys to the cabinets
the keys to the cabinet
the men with the old book
the presidents of the company
the children near the house
the schools in the old town
the houses on the road
the authors of this popular book
these pictures of the player
the women that the student knows
the cities behind the mountain
they
we
these
many countries
the cat and the dog
the lists of the name
the members of the team
the zorbs near the glimp
""".strip().splitlines()


def test_the_bundled_model_knows_the_number_of_these_subjects() -> None:
    model = af.load("verb-number")
    found = [label for label, _ in model.predict(SINGULAR + PLURAL)]
    right = [
        label == expected
        for label, expected in zip(
            found, ["singular"] * len(SINGULAR) + ["plural"] * len(PLURAL), strict=True
        )
    ]
    wrong = [text for text, good in zip(SINGULAR + PLURAL, right, strict=True) if not good]
    assert np.mean(right[: len(SINGULAR)]) >= 0.9, wrong
    assert np.mean(right[len(SINGULAR) :]) >= 0.9, wrong
    pair = ("the key to the cabinets", "the keys to the cabinets")
    assert [label for label, _ in model.predict(list(pair))] == ["singular", "plural"]


@pytest.mark.parametrize(("name", "folder"), SHIPPED.items())
def test_the_bundled_models_have_the_size_of_the_papers(name: str, folder: str) -> None:
    model = af.load(name)
    config = model.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (6, 8, 128)
    assert sum(path.stat().st_size for path in (WEIGHTS.parent / folder).iterdir()) < 5_000_000
    assert model.origin == name


def test_the_plain_model_has_the_shape_of_the_papers() -> None:
    """Raw attention almost uniform above layer three, and the residual of CLS fading in rollout."""
    model = af.load("verb-number-plain")
    right = [label for label, _ in model.predict(SINGULAR + PLURAL)]
    expected = ["singular"] * len(SINGULAR) + ["plural"] * len(PLURAL)
    assert np.mean([one == other for one, other in zip(right, expected, strict=True)]) >= 0.7
    attention = af.capture(model, "the man with the old books")
    row = attention.weights[3:, 0, 0]  # [layer, key] of CLS
    entropy = -(row * np.log(row)).sum(axis=-1) / np.log(row.shape[-1])
    assert entropy.min() > 0.9
    own = af.rollout(attention, positions=[0]).values[:, 0, 0]  # [layer]
    assert (np.diff(own) < 0).all()


def test_it_loads_without_transformers() -> None:
    program = (
        "import sys, attnflow as af; af.explain('the key'); print('transformers' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


def test_capture_gives_the_weights_that_the_model_computes() -> None:
    model = af.load("verb-number")
    texts = ["the key to the cabinets", "the keys"]
    batch = model.batch([model.encode(text) for text in texts])
    with torch.no_grad():
        expected = model.model(**batch, output_attentions=True).attentions
    for place, attention in enumerate(af.capture(model, texts, heads=None)):
        size = attention.size
        for layer in range(6):
            np.testing.assert_allclose(
                attention.weights[layer], expected[layer][place, :, :size, :size], atol=1e-6
            )
    assert expected[0][1, :, :, 3:].abs().max() == 0  # padding gets nothing


def test_padding_does_not_change_a_prediction() -> None:
    model = af.load("verb-number")
    texts = ["the keys", "the key to the cabinets of the old house that we saw"]
    assert [label for label, _ in model.predict(texts)] == [
        model.predict([text])[0][0] for text in texts
    ]
    for together, text in zip(model.predict(texts), texts, strict=True):
        assert together[1] == pytest.approx(model.predict([text])[0][1], abs=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "It's the dogs' bone, isn't it?",
            ["It", "'s", "the", "dogs", "'", "bone", ",", "is", "n't", "it", "?"],
        ),
        ("“Well-known” authors don’t", ['"', "Well-known", '"', "authors", "do", "n't"]),
        ("the 1,000 U.S. ships", ["the", "1", ",", "000", "U.S", ".", "ships"]),
        ("  \t two\nlines  ", ["two", "lines"]),
        ("日本 café", ["日本", "café"]),
    ],
)
def test_a_text_is_cut_as_the_data_is(text: str, expected: list[str]) -> None:
    assert [match.group() for match in find_words(text)] == expected


def test_rows_of_the_data_are_cut_back_into_their_words() -> None:
    row = "the NNS 's well-known `` VBG '' films , which do n't ( as it 'd be ) -- and NNP"
    assert [match.group() for match in find_words(row)] == row.split()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("glimps", "NNS"), ("glimp", "NN"), ("glimpmen", "NNS"), ("glass-ss", "NN"), ("glimpus", "NN"),
        ("glimping", "VBG"), ("glimped", "VBN"), ("glimply", "RB"), ("glimpous", "JJ"), ("1998", "CD"), ("3.5", "CD"), ("21st", "CD"),
        ("Glimp", "NNP"), ("x", "NN"),
    ],
)  # fmt: skip
def test_an_unknown_word_is_read_by_its_look(word: str, expected: str) -> None:
    assert classify_word(word) == expected


def test_an_unknown_word_keeps_its_number() -> None:
    vocabulary = af.load("verb-number").tokenizer
    assert vocabulary("The glimps saw Glimpia").tokens() == [
        "[CLS]",
        "the",
        "glimps/NNS",
        "saw",
        "Glimpia/NNP",
    ]
    assert (
        vocabulary("Glimps saw").tokens()[1] == "Glimps/NNS"
    )  # the first word of a text is no name for its capital
    encoded = af.load("verb-number").encode("the glimps saw")
    assert encoded.words == (None, 0, 1, 2)
    assert vocabulary.convert_ids_to_tokens(encoded.ids)[2] == "NNS"


def test_a_vocabulary_that_is_none_is_refused() -> None:
    with pytest.raises(af.FileError, match="must begin with"):
        Vocabulary(["the", *SPECIAL])
    with pytest.raises(af.FileError, match="name each word once"):
        Vocabulary([*SPECIAL, "the", "the"])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    vocabulary = Vocabulary([*SPECIAL, "the", "key", "keys", "NN", "NNS"])
    config = VerbNumberConfig(
        len(vocabulary),
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=8,
        max_position_embeddings=9,
    )
    verb_number.save_verb_number(VerbNumber(config), vocabulary, tmp_path)
    return tmp_path


def test_a_saved_model_loads_by_its_folder(tiny: Path) -> None:
    model = af.load(tiny)
    assert (model.max_length, model.task, model.tokenizer.words[3]) == (
        9,
        "sequence classification",
        "the",
    )
    again, _ = verb_number.load_verb_number(tiny)
    for name, weight in again.state_dict().items():
        np.testing.assert_array_equal(weight, model.model.state_dict()[name])
    assert model.model.state_dict()["norm.weight"].dtype == torch.float32
    with pytest.raises(af.OptionError, match="at most 9 tokens; got 10"):
        model.encode("key " * 9)
    assert len(model.encode("key " * 9, truncation=True).ids) == 9


def damage(folder: Path, what: str) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if what == "no vocabulary":
        (folder / "vocabulary.txt").unlink()
    elif what == "cut weights":
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    elif what == "another size":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    elif what == "unknown option":
        (folder / "config.json").write_text(json.dumps(config | {"colour": "blue"}))
    elif what == "no labels":
        (folder / "config.json").write_text(json.dumps({"model_type": "verb-number"}))


@pytest.mark.parametrize(
    "what", ["no vocabulary", "cut weights", "another size", "unknown option", "no labels"]
)
def test_a_damaged_folder_is_one_clear_line(what: str, tiny: Path) -> None:
    damage(tiny, what)
    with pytest.raises(af.FileError, match="is not a verb-number model") as error:
        af.load(tiny)
    assert "\n" not in str(error.value)


def test_a_full_disk_leaves_the_old_model_whole(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (tiny / "model.safetensors").read_bytes()
    model, vocabulary = verb_number.load_verb_number(tiny)

    def full(path: Any, write: Any) -> None:
        raise af.FileError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(verb_number, "write_file", full)
    with pytest.raises(af.FileError, match="No space left"):
        verb_number.save_verb_number(model, vocabulary, tiny)
    assert (tiny / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(("name", "folder"), SHIPPED.items())
def test_a_card_names_all_that_differs_from_the_paper(name: str, folder: str) -> None:
    recipe = PLAIN_RECIPE if name.endswith("plain") else CAREFUL
    card = (WEIGHTS.parent / folder / "README.md").read_text()
    for line in list_departures(recipe):
        assert f"\n- {line}\n" in card
    assert f'recipe "{recipe.name}"' in card
    assert f"--recipe={recipe.name} --seed=0" in card


def test_the_model_card_says_what_is_known(tmp_path: Path) -> None:
    card = (WEIGHTS / "README.md").read_text()
    for word in (
        "numpred",
        "MASC",
        "Linzen",
        "seed",
        "attnflow train verb-number",
        "attractors",
        "licen",
        "split",
    ):
        assert word in card, word
    shutil.copytree(WEIGHTS, tmp_path / "copy")
    assert af.load(tmp_path / "copy").predict(["the key"])[0][0] == "singular"
