"""The paper's experiments: data and split, grammar, tables, and the commands that print them."""

import csv
import gzip
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.analysis.evaluate.differences import Differences
from attnflow.paper import grammar, pictures, tables
from attnflow.paper.agreement import Sentence, read_agreement
from attnflow.paper.printed import PRINTED_TABLES
from attnflow.paper.runs import sample
from tests.console import inside
from tests.families import build, word_tokenizer

ROWS = "VBZ\tthe key to the NNS\nVBP\tthe keys\n"
COLUMNS = """
sentence orig_sentence pos_sentence subj verb subj_pos has_rel has_nsubj verb_pos subj_index
verb_index n_intervening last_intervening n_diff_intervening distance max_depth all_nouns
nouns_up_to_verb
"""
HEADER = COLUMNS.split()
TOP = "\t".join(HEADER) + "\n"


def full(**cells: str) -> str:
    return "\t".join(cells.get(name, "x") for name in HEADER)


# ---- data ----------------------------------------------------------------------------------------


def test_both_forms_of_the_data_are_read(tmp_path: Path) -> None:
    (tmp_path / "numpred.test.2").write_text(ROWS)
    (tmp_path / "numpred.val").write_text(ROWS)
    row = full(
        sentence="the key to the cabinets is here",
        verb_pos="VBZ",
        verb_index="6",
        n_diff_intervening="1",
    )
    with gzip.open(tmp_path / "agr.tsv.gz", "wt") as file:
        file.write("\t".join(HEADER) + "\n" + row + "\n")
    found = read_agreement([tmp_path])
    assert found[0] == Sentence(
        ("the", "key", "to", "the", "cabinets"), "singular", "agr.tsv.gz", 1
    )
    assert [(each.source, each.label, each.attractors) for each in found[1:]] == [
        ("numpred.test.2", "singular", 2),
        ("numpred.test.2", "plural", 2),
        ("numpred.val", "singular", None),
        ("numpred.val", "plural", None),
    ]
    assert found[1].text == "the key to the NNS"


def test_rows_that_begin_alike_stand_on_one_side() -> None:
    sides = {
        Sentence(("the", "key", "to", "the", word), "singular", "x").side
        for word in "abcdefghijklmnopqrstuvwxyz"
    }
    assert len(sides) == 1
    counts = [Sentence((str(number),), "plural", "x").side for number in range(3000)]
    assert 0.08 < counts.count("test") / 3000 < 0.12
    assert 0.03 < counts.count("dev") / 3000 < 0.07


NO_INDEX = full(verb_pos="VBZ", verb_index="two", n_diff_intervening="0")
BAD = {
    "columns": (
        "numpred.val",
        b"VBZ\tthe key\textra\n",
        "line 1: the columns sentence, verb_pos, verb_index",
    ),
    "one column": (
        "numpred.val",
        ROWS.encode() + b"the key\n",
        "line 3: two columns are needed, VBZ or VBP",
    ),
    "label": (
        "numpred.val",
        b"VBZ\tthe key\nVBD\tthe keys\n",
        "line 2: the verb must be VBZ or VBP; got 'VBD'",
    ),
    "no words": (
        "numpred.val",
        b"VBZ\tthe key\nVBP\t \n",
        "line 2: there are no words before the verb",
    ),
    "encoding": ("numpred.val", b"VBZ\tthe key\nVBP\tcaf\xe9s\n", "line 2: not UTF-8"),
    "empty": ("numpred.val", b"", "is empty: rows such as 'VBZ'"),
    "verb": ("a.tsv", f"{TOP}{NO_INDEX}".encode(), "line 2: verb_index and"),
    "width": (
        "a.tsv",
        f"{TOP}VBZ\tx\n".encode(),
        "line 2: 18 columns are needed, as in the header; got 2",
    ),
    "no gzip": ("a.tsv.gz", b"plain text", "cannot read"),
    "cut gzip": ("a.tsv.gz", gzip.compress(ROWS.encode() * 100)[:-20], "cannot read"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_by_file_and_line(name: str, tmp_path: Path) -> None:
    file, content, message = BAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(af.FileError) as error:
        read_agreement([tmp_path])
    assert file in str(error.value)
    assert message in str(error.value)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(af.FileError, match="holds no data"):
        read_agreement([tmp_path])
    with pytest.raises(af.FileError, match="does not exist"):
        read_agreement([tmp_path / "missing"])


# ---- the grammar ---------------------------------------------------------------------------------


def test_the_grammar_makes_different_sentences_with_the_attractors_it_says() -> None:
    found = list(islice(grammar.sentences(seed=3), 3000))
    assert len({each.words for each in found}) == 3000
    assert found[:50] == list(islice(grammar.sentences(seed=3), 50))
    assert found[:50] != list(islice(grammar.sentences(seed=4), 50))
    singular, plural = set(grammar.NOUNS), set(grammar.NOUNS.values())
    openings = {tuple(opening.split()) for opening in grammar.OPENINGS if opening}
    for each in found:
        words = next(
            (each.words[len(start) :] for start in openings if each.words[: len(start)] == start),
            each.words,
        )
        numbers = [word in plural for word in words if word in singular | plural]
        assert ["singular", "plural"][numbers[0]] == each.label
        assert sum(number != numbers[0] for number in numbers[1:]) == each.attractors
    assert {each.attractors for each in found} == {0, 1, 2}
    assert 0.4 < np.mean([each.label == "plural" for each in found]) < 0.6


def test_the_grammars_words_are_all_in_the_vocabulary() -> None:
    known = set(af.load("verb-number").tokenizer.words)
    words = {word for each in islice(grammar.sentences(), 3000) for word in each.words}
    assert sorted(words - known) == []


# ---- tables --------------------------------------------------------------------------------------


def differ(table: tables.PaperTable, special: bool, layer: int) -> Differences:
    """How much higher rollout is than flow, by the report's own comparison."""
    report = table.report.including(special)
    return report.differences(layer=layer, methods=["rollout", "flow"])


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_a_table_has_the_papers_rows_and_ours_with_and_without_cls(name: str) -> None:
    table = tables.compute_verb_number_table(name, limit=4, command="attnflow reproduce")
    rows = list(csv.DictReader(table.to_csv().splitlines()))
    assert [(row["method"], int(row["layer"])) for row in rows] == [
        (m, layer) for m in (*af.METHODS, "flow - rollout") for layer in range(1, 7)
    ]
    printed = PRINTED_TABLES[name]
    rows, differences = rows[:18], rows[18:]
    for row in rows:
        mean, deviation = printed.cells[row["method"]][int(row["layer"]) - 1]
        assert (float(row["paper_mean"]), float(row["paper_std"]), row["examples"]) == (
            mean,
            deviation,
            "4",
        )
    for special, column in {True: "with_special_mean", False: "without_special_mean"}.items():
        expected = [row[3] for row in table.report.including(special).rows()]
        np.testing.assert_allclose([float(row[column] or "nan") for row in rows], expected)
        paired = {
            each.layer: each for layer in range(1, 7) for each in differ(table, special, layer)
        }
        for row in differences:
            pair = paired[int(row["layer"])]
            assert float(row[column]) == pytest.approx(-pair.difference)
            assert float(row[column.replace("mean", "low")]) == pytest.approx(-pair.high)
            assert float(row[column.replace("mean", "high")]) == pytest.approx(-pair.low)
    text = table.to_markdown()
    assert [
        text.count(word)
        for word in ("| the paper |", "| ours, with [CLS] |", "| ours, without [CLS] |")
    ] == [4, 4, 4]
    assert "attnflow's own grammar" in text
    assert "`attnflow reproduce`" in text
    assert table.report.against == (printed.against,)


def test_the_paper_is_quoted_as_it_is_printed() -> None:
    one, two, three = (PRINTED_TABLES[name].cells for name in ("table1", "table2", "table3"))
    assert (one["raw"][0], one["flow"][5]) == ((0.69, 0.27), (0.70, 0.22))
    assert (two["raw"][2], two["rollout"][5]) == ((-0.06, 0.42), (0.54, 0.31))
    assert (three["raw"][0], three["flow"][3]) == ((0.12, 0.21), (0.14, 0.21))


def test_sentences_of_the_data_come_from_the_test_side_alone(tmp_path: Path) -> None:
    words = [
        f"the {noun} of the {other}"
        for noun in list(grammar.NOUNS)[:20]
        for other in list(grammar.NOUNS)[:20]
    ]
    (tmp_path / "numpred.val").write_text("".join(f"VBZ\t{each}\n" for each in words * 2))
    table = tables.compute_verb_number_table("table1", data=[tmp_path], limit=6)
    side = {
        example.text: Sentence(tuple(example.text.split()), "singular", "x").side
        for example in table.report.examples
    }
    assert set(side.values()) == {"test"}
    assert len(side) == 6
    assert f"test side of {tmp_path.name}" in table.to_markdown()


def test_all_sides_of_the_data_are_used_on_request(tmp_path: Path) -> None:
    words = [f"the {one} near {other}" for one in grammar.NOUNS for other in grammar.NOUNS]
    found = [Sentence(tuple(each.split()), "singular", "x") for each in words]
    everything = sample(found, 10_000, 0, "all")
    assert set(everything) == set(found)
    sides = [set(sample(found, 10_000, 0, side)) for side in ("train", "dev", "test")]
    assert sum(map(len, sides)) == len(found)
    assert set.union(*sides) == set(found)
    (tmp_path / "numpred.val").write_text("".join(f"VBZ\t{each}\n" for each in words))
    table = tables.compute_verb_number_table("table1", data=[tmp_path], limit=3, side="all")
    assert f"sentences: all of {tmp_path.name};" in table.to_markdown()


def test_seeds_of_one_recipe_are_one_table() -> None:
    one, two = (
        tables.compute_verb_number_table("table1", model=model, limit=5)
        for model in ("verb-number", "verb-number,verb-number")
    )
    for single, double in zip(one.rows, two.rows, strict=True):
        assert double.with_special.value == pytest.approx(single.with_special.value)
        assert double.undefined == 2 * single.undefined
    assert "bootstrap over sentences and 2 models" in two.to_markdown()
    assert "accuracy 1.000, 1.000" in two.to_markdown()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sentiment classifier with six layers, in a folder."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    sizes = {
        "vocab_size": 60,
        "dim": 16,
        "n_layers": 6,
        "n_heads": 2,
        "hidden_dim": 16,
        "max_position_embeddings": 30,
    }
    DistilBertForSequenceClassification(DistilBertConfig(**sizes)).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def test_table_3_takes_the_largest_row_of_four_layers(
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "test.tsv").write_text("the key to the cabinets\t0\nthe lost key is here\t1\n")
    monkeypatch.chdir(tmp_path)
    assert (
        inside(monkeypatch, "reproduce", "table3", "--model", classifier, "--data", tmp_path) == 0
    )
    shown = capsys.readouterr().out
    assert "position: max" in shown
    assert f"attnflow reproduce table3 --model {classifier} --data {tmp_path}" in shown
    rows = list(csv.DictReader((tmp_path / "table3.csv").read_text().splitlines()))
    assert [(row["method"], row["layer"]) for row in rows[:5]] == [
        ("raw", layer) for layer in "1356"
    ] + [("rollout", "1")]
    assert (tmp_path / "table3.md").read_text().count("| the paper |") == 4


def test_the_table_commands_write_both_forms_where_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        inside(
            monkeypatch,
            "reproduce",
            "table2",
            "--limit",
            3,
            "--reduce",
            "sum",
            "--out",
            tmp_path / "two.md",
        )
        == 0
    )
    shown = capsys.readouterr()
    assert "input_gradient, sum" in shown.out
    assert (tmp_path / "two.md").read_text().strip() == shown.out.strip()
    assert len((tmp_path / "two.csv").read_text().splitlines()) == 25
    assert "written:" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "table1", "--data", "{folder}/missing"], "does not exist"),
        (["reproduce", "table1", "--out", "{folder}/no/such"], "does not exist"),
        (["reproduce", "table1", "--model", "{folder}/classifier"], "of a verb-number model"),
        (["reproduce", "table2", "--limit", "2", "--reduce", "max"], "unknown --reduce 'max'"),
        (["reproduce", "table1", "--side", "left"], "unknown side 'left'; choose from test, dev"),
        (["reproduce", "table1", "--model", ","], "table1 needs a verb-number model; got ','"),
        (
            [
                "reproduce",
                "table3",
                "--model",
                "{folder}/classifier",
                "--data",
                "{folder}/missing.tsv",
            ],
            "cannot read",
        ),
        (
            ["reproduce", "table3", "--model", "{folder}/classifier", "--data", "{folder}/bad.tsv"],
            "bad.tsv, line 2",
        ),
        (["evaluate", "verb-number", "{folder}/missing.tsv"], "cannot read"),
        (
            ["evaluate", "verb-number", "{folder}/bad.tsv", "--out", "{folder}/x.xls"],
            "the ending must be one of .csv, .json, .md, .tex",
        ),
        (
            ["evaluate", "verb-number", "{folder}/bad.tsv", "--layers", "top"],
            "--layers must be numbers like 1,6",
        ),
        (
            ["train", "verb-number", "--data", "{folder}/missing", "--out", "{folder}/new"],
            "does not exist",
        ),
        (
            [
                "train",
                "sentiment",
                "--base",
                "{folder}/classifier",
                "--data",
                "{folder}",
                "--out",
                "{folder}/new",
            ],
            "cannot read",
        ),
    ],
)
def test_bad_input_to_the_laboratory_is_one_line(
    arguments: list[str],
    message: str,
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "classifier").symlink_to(classifier)
    (tmp_path / "bad.tsv").write_text("the key\t1\nthe keys\t5\n")
    monkeypatch.chdir(tmp_path)
    assert inside(monkeypatch, *(part.format(folder=tmp_path) for part in arguments)) == 2
    error = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line and not line.startswith("Loading weights")
    ]
    assert len(error) == 1
    assert message in error[0]


def test_evaluate_prints_a_table_and_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.tsv").write_text(
        "the key to the cabinets\tsingular\nthe keys to the cabinet\tplural\nthe keys\tplural\n"
    )
    options = [
        "--methods",
        "rollout,flow",
        "--against",
        "blank_out",
        "--layers",
        "1,6",
        "--limit",
        2,
    ]
    assert (
        inside(
            monkeypatch,
            "evaluate",
            "verb-number",
            tmp_path / "x.tsv",
            *options,
            "--out",
            tmp_path / "r.csv",
        )
        == 0
    )
    assert "n = 2; [CLS] left out" in capsys.readouterr().out
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 5


def test_a_model_of_another_kind_is_not_taken_for_the_verb_number_model() -> None:
    with pytest.raises(af.FileError, match="cannot load"):
        tables.compute_verb_number_table("table1", model="no/such-model", limit=1)
    assert build("distilbert").config.model_type != "verb-number"


# ---- figures -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pronouns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny seeded masked LM that knows the words of the paper's two sentences, in a folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    words = [
        *special,
        "The",
        "author",
        "talked",
        "to",
        "Sara",
        "about",
        "book",
        ".",
        "Mary",
        "convinced",
        "John",
        "of",
        "love",
        "his",
        "her",
    ]
    base = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    base.pre_tokenizer = BertPreTokenizer()
    base.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    folder = tmp_path_factory.mktemp("pronouns")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=base, **names).save_pretrained(folder)
    return folder


def test_figure_4_shows_the_masks_attention_to_its_references_and_the_words_probabilities(
    pronouns: Path,
) -> None:
    drawn = pictures.figure_4(model=str(pronouns))
    model = af.load(pronouns)
    for number, (text, (one, other)) in enumerate(
        zip(pictures.PRONOUNS, pictures.PRONOUN_REFERENTS, strict=True)
    ):
        found = af.explain(text, model=model, importance=())
        places = [found.tokens.index(one), found.tokens.index(other)]
        mask = found.tokens.index("[MASK]")
        expected = np.stack([found.rollout.at(mask, layer)[places] for layer in (1, 2, 3)])
        np.testing.assert_allclose(
            np.asarray(drawn.artists["rollout"][number].get_array()), expected
        )
        chances = [af.blank_out(model, text, word).probability for word in ("his", "her")]
        heights = [bar.get_height() for bar in drawn.artists["bars"][number]]
        np.testing.assert_allclose(heights, np.array(chances) / sum(chances), atol=1e-6)
    assert drawn.axes[0].get_ylabel() == "relative probability"


def test_figures_1_to_3_are_those_of_the_explanations() -> None:
    found = af.explain("the keys near the door", importance=())
    raw = pictures.figure_2("the keys near the door").artists["map"].get_array()
    np.testing.assert_allclose(
        np.asarray(raw), np.stack([found.raw.at(0, layer) for layer in range(1, 7)])
    )
    assert len(pictures.figure_3().artists["flow"]) == 3
    assert set(pictures.figure_1().artists) == {"raw", "rollout", "flow", "key"}


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_figure_commands_write_pictures(
    ending: str,
    pronouns: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["figure1", "the key"],
        ["figure2"],
        ["figure3", "the key", "the keys"],
        ["figure4", "--model", pronouns],
    ):
        name = f"{arguments[0]}.{ending}"
        assert inside(monkeypatch, "reproduce", *arguments, "--out", name) == 0
        assert f"written: {name}" in capsys.readouterr().out
        assert (tmp_path / name).stat().st_size > 3000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure1", "--out", "x.gif"], "the ending must be one of .png, .svg, .pdf; got .gif"),
        (["figure1", "--out", "no/x.png"], "does not exist"),
        (["figure2", ""], "must not be empty"),
        (["figure4", "--model", "verb-number"], "figure 4 needs a masked LM"),
        (
            ["figure4", "--model", "{pronouns}", "the [MASK] book"],
            "each sentence needs its two references; got 1 sentences and 0 pairs",
        ),
        (
            ["figure4", "--model", "{pronouns}", "the [MASK] book", "--references", "the"],
            "two words with a comma between them; got 'the'",
        ),
        (
            ["figure4", "--model", "{pronouns}", "of [MASK] book", "--references", "of,Sara"],
            "a reference must be a word of its sentence",
        ),
        (
            ["figure4", "--model", "{pronouns}", "of his book", "--references", "of,book"],
            "put [MASK] in it",
        ),
        (["figure4", "--model", "{pronouns}", "--candidates", "his,hers"], "unknown target 'hers'"),
    ],
)
def test_bad_input_to_figures_is_one_line(
    arguments: list[str],
    message: str,
    pronouns: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status = inside(
        monkeypatch, "reproduce", *(part.format(pronouns=pronouns) for part in arguments)
    )
    captured = capsys.readouterr()
    lines = [
        line
        for line in (captured.out + captured.err).splitlines()
        if line and not line.startswith("Loading weights")
    ]
    assert (status, len(lines)) == (2, 1)
    assert message in lines[0]
