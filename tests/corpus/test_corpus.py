"""Corpora: every format read, every row in the result or in the errors.

Every damage is mended or refused, and every kill survived.
"""

import fcntl
import gzip
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from transformers import BloomConfig, BloomForCausalLM

import attnflow as af
from attnflow.analysis import run as runner
from attnflow.analysis.statistics import bootstrap
from attnflow.core.methods import METHODS
from attnflow.corpus import local, on_ray, planning
from attnflow.corpus.folder import pack_shard, shard_path, write_shard
from attnflow.corpus.formats import ROWS_AHEAD, Columns
from attnflow.corpus.job import CorpusJob, StoredJob
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import CorpusRow, InputFiles, gather_inputs
from attnflow.corpus.scores import evaluate_corpus, top_words
from attnflow.corpus.shard_tables import make_error_table
from attnflow.corpus.status import corpus_status, verify_corpus
from tests.console import inside, say_inside
from tests.corpora import command, errors, is_gone, sentences, table, write_csv
from tests.families import DECODERS, build, word_tokenizer

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CHEAP: dict[str, Any] = {"methods": ["rollout"], "layers": [6]}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file of 50 texts, one of them empty."""
    return write_csv(tmp_path / "texts.csv", [*sentences(30), "", *sentences(19, 1)])


def begun(texts: Path, out: Path, **options: Any) -> Manifest:
    return af.explain_corpus(texts, out, **{**CHEAP, "shard_rows": 10, **options})


def read_input(path: Any, limit: int | None = None, **columns: Any) -> InputFiles:
    return replace(gather_inputs(path, Columns(**columns)), limit=limit)


# ---- what is computed ----------------------------------------------------------------------------


def test_a_row_holds_what_explain_says_of_its_text(texts: Path, tmp_path: Path) -> None:
    importance = ["blank_out", "input_gradient"]
    af.explain_corpus(texts, tmp_path / "out", importance=importance, limit=12, shard_rows=5)
    rows = table(tmp_path / "out").to_pylist()
    assert [row["row"] for row in rows] == list(range(12))
    assert rows[3]["id"] == "texts.csv:3"
    for row in rows[::4]:
        found = af.explain(row["text"])
        assert found.prediction is not None
        assert (tuple(row["tokens"]), tuple(row["special"]), row["prediction"]) == (
            found.tokens,
            found.special,
            found.prediction[0],
        )
        assert row["probability"] == pytest.approx(found.prediction[1], abs=1e-5)
        for name, layers in {"raw": range(1, 7), "rollout": range(1, 7), "flow": [6]}.items():
            expected = [found.results[name].at(0, layer) for layer in layers]
            np.testing.assert_allclose(np.array(row[name]), np.array(expected), atol=1e-5)
        for name in importance:
            np.testing.assert_allclose(row[name], np.abs(found.importance[name].values), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "distilbert", "bart"])
def test_hugging_face_models_are_taken_too(family: str, texts: Path, tmp_path: Path) -> None:
    model = af.Model(build(family), word_tokenizer())
    af.explain_corpus(texts, tmp_path / "out", model=model, limit=6)
    for row in table(tmp_path / "out").to_pylist():
        found = af.explain(row["text"], model=model, importance=())
        assert tuple(row["tokens"]) == found.tokens
        np.testing.assert_allclose(row["rollout"][-1], found.rollout.at(found.position), atol=1e-5)
        assert row["prediction"] == (None if found.prediction is None else found.prediction[0])
    assert verify_corpus(tmp_path / "out") == []


@pytest.mark.filterwarnings("ignore::attnflow.SaturationWarning")
def test_position_and_normalisation_are_those_of_the_methods(texts: Path, tmp_path: Path) -> None:
    reductions: dict[Any, Callable[[Any], Any]] = {
        2: lambda values: values[:, 2],
        "max": lambda values: values.max(1),
        "mean": lambda values: values.mean(1),
    }
    for position, reduce in reductions.items():
        out = tmp_path / f"{position}"
        begun(texts, out, position=position, normalize=None, methods=["flow"], limit=3)
        for row in table(out).to_pylist():
            values = af.flow(af.capture(af.load(), row["text"]), layers=[6], normalize=None).values
            np.testing.assert_allclose(row["flow"], reduce(values), atol=1e-5)


def test_a_label_is_kept_and_is_the_target_of_importance(tmp_path: Path) -> None:
    path = tmp_path / "texts.tsv"
    path.write_text("sentence\tgold\nthe key\tplural\nthe key\t0\nthe key\tdual\n")
    begun(path, tmp_path / "out", label_column="gold", importance="blank_out")
    rows = table(tmp_path / "out").to_pylist()
    assert [row["label"] for row in rows] == ["plural", "0"]
    for row, target in zip(rows, ("plural", "singular"), strict=True):
        np.testing.assert_allclose(
            row["blank_out"], af.blank_out(af.load(), "the key", target).values, atol=1e-6
        )
    assert [(each["row"], each["reason"]) for each in errors(tmp_path / "out")] == [
        (2, "unknown label")
    ]


def test_the_number_of_workers_changes_nothing(texts: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "methods": ["raw", "rollout", "flow"],
        "layers": None,
        "importance": ["blank_out"],
    }
    one, two = (
        begun(texts, tmp_path / "one", **options),
        begun(texts, tmp_path / "two", workers=2, **options),
    )
    assert {index: shard.sha256 for index, shard in one.shards.items()} == {
        index: shard.sha256 for index, shard in two.shards.items()
    }
    assert one.errors_sha256 == two.errors_sha256
    assert table(tmp_path / "one").equals(table(tmp_path / "two"))
    assert table(tmp_path / "one").num_rows == 49


# ---- what is read --------------------------------------------------------------------------------

ROWS = [
    {"id": "a", "text": 'the "key"', "label": "x"},
    {"id": "b", "text": "the\nkeys", "label": "y"},
    {"id": "c", "text": "é", "label": "z"},
]
CSV = 'id,text,label\na,"the ""key""",x\nb,"the\nkeys",y\nc,é,z\n'.encode()
JSON = "".join(json.dumps(row) + "\n\n" for row in ROWS).encode()


def parquet_file(path: Path, kind: Any = None) -> None:
    found = pa.Table.from_pylist(ROWS)
    pq.write_table(
        found if kind is None else found.set_column(1, "text", found.column("text").cast(kind)),
        path,
    )


FORMATS: dict[str, Callable[[Path], object]] = {
    "x.csv": lambda path: path.write_bytes(CSV),
    "bom.csv": lambda path: path.write_bytes(b"\xef\xbb\xbf" + CSV),
    "x.csv.gz": lambda path: path.write_bytes(gzip.compress(CSV)),
    "x.csv.zst": lambda path: path.write_bytes(pa.Codec("zstd").compress(CSV, asbytes=True)),
    "x.tsv": lambda path: path.write_bytes(
        b'label\tid\ttext\r\nx\ta\tthe "key"\r\n\r\ny\tb\tthe\x0bkeys\r\nz\tc\t\xc3\xa9'
    ),
    "x.jsonl": lambda path: path.write_bytes(JSON),
    "x.ndjson.gz": lambda path: path.write_bytes(gzip.compress(JSON)),
    "x.parquet": parquet_file,
    "large.parquet": lambda path: parquet_file(path, pa.large_string()),
    "dictionary.parquet": lambda path: parquet_file(path, pa.dictionary(pa.int8(), pa.string())),
    "binary.parquet": lambda path: parquet_file(path, pa.binary()),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_alike(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name)
    rows = list(read_input(tmp_path / name, id="id", label="label").rows())
    assert [
        {"id": row.id, "text": row.text.replace("\x0b", "\n"), "label": row.label} for row in rows
    ] == ROWS
    plain = list(read_input([tmp_path / name, tmp_path / name], limit=5).rows())
    assert [row.number for row in plain] == [0, 1, 2, 3, 4]
    assert [row.id for row in plain] == [f"{tmp_path / name}:{place}" for place in (0, 1, 2, 0, 1)]
    assert {row.label for row in plain} == {None}


def test_files_with_one_column_need_no_name_and_blank_lines_are_empty_texts(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("words\nthe key\n\nthe keys\n")
    assert [row.text for row in read_input(tmp_path / "one.csv").rows()] == [
        "the key",
        "",
        "the keys",
    ]


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "ending": ("x.docx", b"", "the ending must be one of .csv, .tsv, .jsonl, .ndjson, .parquet"),
    "packed parquet": ("x.parquet.gz", b"", "the ending must be one of"),
    "empty": ("x.csv", b"", "x.csv has no columns: give a file with a text per row"),
    "no rows": ("x.csv", b"text\n", "there are no rows"),
    "columns": (
        "x.csv",
        b"a,b\n1,2\n",
        "which column holds the texts? it has 'a', 'b': name it by text_column",
    ),
    "json columns": (
        "x.jsonl",
        b'{"a": 1, "b": 2}',
        "which column holds the texts? it has 'a', 'b'",
    ),
    "gzip": ("x.csv.gz", b"text\nthe key\n", "cannot read"),
    "truncated gzip": ("x.csv.gz", gzip.compress(CSV * 9)[:-20], "cannot read"),
    "parquet": ("x.parquet", b"text\nthe key\n", "cannot read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_clear_line(name: str, tmp_path: Path) -> None:
    file, content, message = BAD_FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(af.FileError) as error:
        begun(tmp_path / file, tmp_path / "out")
    assert message in str(error.value)
    assert file in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_run_that_does_not_begin_leaves_folders_as_they_were(texts: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "mine").mkdir(parents=True)
    (here / "mine" / "notes.txt").write_text("mine")
    (here / "empty").mkdir()
    before = sorted(here.rglob("*"))
    for out in ("new", "new/and/deep", "mine", "mine/new", "empty"):
        with pytest.raises(af.AttnFlowError):
            begun(texts, here / out, methods=["rolout"])
        assert sorted(here.rglob("*")) == before


ONLY_IDS = b'{"id": "7"}\n' * ROWS_AHEAD


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'{"id": "7"}\n{"id": "8", "text": "key"}\n', [None, "key"]),
        (b'{"id": "7", "sentence": "x"}\n{"text": "key"}\n', [None, "key"]),
        (b'no JSON\n{"words": "key"}\n{"other": 1, "words": "keys"}\n', "which column"),
        (ONLY_IDS + b'\n{"id": "8", "text": "key"}\n', f"x.jsonl, line {ROWS_AHEAD + 2}: "),
        (ONLY_IDS + b'{"id": "8", "sentence": "key"}\n', "name it by text_column"),
        (b"no JSON\n" * ROWS_AHEAD + b'{"words": "key"}\n', [*[None] * ROWS_AHEAD, "key"]),
        (b'{"text": "key", "text": "keys"}\n{"text": "key"}\n', [None, "key"]),
    ],
)
def test_the_columns_of_json_lines_are_those_of_many_lines(
    content: bytes, found: list[str | None] | str, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    source = read_input(tmp_path / "x.jsonl")
    if isinstance(found, list):
        assert [None if row.problem else row.text for row in source.rows()] == found
    else:
        with pytest.raises(af.FileError, match=found):
            list(source.rows())


@pytest.mark.parametrize(
    "content",
    [
        'text,n\n"the key",1\n\n"the\nkeys",2\n"the man,3\nthe dogs,4\nthe house,5\n',
        'text,n\nthe key,1\n\nthe keys,2\n\n"the man,3\nthe dogs,4\n"the house",5\n',
        'text,n\n"the key",1\n"the\nkeys",2\n\n"the man',
    ],
)
def test_a_quote_that_is_not_closed_is_refused_by_its_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(af.FileError, match=r"x\.csv, line 6: a quote that is opened"):
        begun(tmp_path / "x.csv", tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_quote_that_stands_wrong_in_its_line_costs_only_that(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('text,n\n"the" key,1\n"the\nkeys",2\n')
    wrong, right = read_input(tmp_path / "x.csv").rows()
    assert (wrong.text, "line 2" in str(wrong.problem)) == ('"the" key,1', True)
    assert (right.text, right.problem) == ("the\nkeys", None)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", "text,n\nthe key,1\n"),
        ("x.tsv.gz", "текст\nключ\n"),
        ("x.jsonl", '{"text": "ключ"}\n'),
    ],
)
def test_utf_16_is_refused(name: str, content: str, encoding: str, tmp_path: Path) -> None:
    found = content.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(found) if name.endswith(".gz") else found)
    with pytest.raises(af.FileError, match=f"{name} is not UTF-8 .* UTF-16: save it as UTF-8"):
        begun(tmp_path / name, tmp_path / "out")


def test_ids_that_are_repeated_are_told(tmp_path: Path) -> None:
    path, notes = tmp_path / "x.csv", list[str]()
    path.write_text("id,text\na,key\nb,key\nc,key\nb,keys\na,key\nb,key\n")
    begun(path, tmp_path / "out", id_column="id", report=notes.append)
    with pytest.warns(af.CorpusWarning, match="are repeated"):  # where nobody listens
        begun(path, tmp_path / "warned", id_column="id")
    assert notes == [
        "ids in 'id' are repeated: rows 1 and 3 both have 'b';"
        " 3 of 6 rows have an id that an earlier row has"
    ]
    assert table(tmp_path / "out").num_rows == 6


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_columns_of_one_name_are_told_or_refused(ending: str, tmp_path: Path) -> None:
    path, notes = tmp_path / f"x.{ending}", list[str]()
    if ending == "parquet":
        pq.write_table(pa.table([pa.array(["key"])] * 3, names=["text", "n", "n"]), path)
    else:
        path.write_text("text,n,n\nkey,1,2\n".replace(",", "," if ending == "csv" else "\t"))
    assert [row.text for row in read_input(path).rows(notes.append)] == ["key"]
    assert notes == [f"{path} has 2 columns 'n'; none of them is used"]
    for option in ({"text": "n"}, {"id": "n"}, {"label": "n"}, {"keep": ("n",)}):
        with pytest.raises(af.FileError, match=r"has 2 columns 'n' \(.*\): rename all but one"):
            list(read_input(path, **option).rows())


@pytest.mark.parametrize("column", ["text", "id", "label", "keep"])
def test_values_that_python_has_no_word_for_are_errors_of_their_rows(
    column: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.parquet"
    when = pa.array([0, 2**60], pa.timestamp("ms"))
    pq.write_table(pa.table({"text": ["key", "keys"], "when": when}), path)
    options: dict[str, Any] = {column: ("when",) if column == "keep" else "when"}
    fine, wrong = read_input(path, **options).rows()
    assert fine.problem == ("the text must be a string; got datetime" if column == "text" else None)
    assert str(wrong.problem).startswith("the value of 'when' cannot be converted: ")


KEPT = [{"text": "the key", "n": "1", "my stars": None}, {"text": "", "n": "2", "my stars": "*"}]
KEPT += [{"text": "the keys", "n": "3", "my stars": "é"}]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_columns_are_kept_on_request(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / f"x.{ending}", tmp_path / "out"
    if ending == "csv":
        path.write_text("text,n,my stars\nthe key,1,\n,2,*\nthe keys,3,é\n")
    elif ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in KEPT))
    else:
        pq.write_table(pa.Table.from_pylist(KEPT), path)
    options = ["--methods", "rollout", "--keep", "my stars, n"]
    assert inside(monkeypatch, "corpus", "run", path, "--out", out, *options) == 0
    found = af.read_corpus(out)
    assert found.column_names[-3:] == ["rollout", "my stars", "n"]
    assert found.column("my stars").to_pylist() == ["" if ending == "csv" else None, "é"]
    assert found.column("n").to_pylist() == ["1", "3"]
    assert Manifest.read(out).options.keep == ("my stars", "n")
    assert verify_corpus(out) == []
    for keep, message in {
        ("text",): "keep must name columns that the result has not already; got 'text'",
        ("rollout",): "got 'rollout'",
        ("m",): r"has no column 'm' \(keep\); it has 'text', 'n', 'my stars'",
        (("n",),): r"keep must be names of columns; got \[\('n',\)\]",
    }.items():
        with pytest.raises(af.AttnFlowError, match=message):
            begun(path, tmp_path / "other", keep=keep)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["rolout"]}, "unknown method 'rolout'; choose from raw, rollout, flow"),
        ({"methods": []}, "at least one method is needed"),
        (
            {"importance": ["gradient"]},
            "unknown importance 'gradient'; choose from blank_out, input_gradient",
        ),
        ({"layers": [7]}, "layer"),
        ({"position": "last"}, "unknown position 'last'; choose from focal, max, mean"),
        ({"position": -1}, "unknown position -1"),
        ({"normalize": "max"}, "normali"),
        ({"residual": 1.5}, "residual"),
        ({"limit": 0}, "limit must be a whole number, at least 1; got 0"),
        ({"workers": 0}, "workers must be a whole number, at least 1; got 0"),
        ({"workers": 2, "model": af.load}, "each worker loads the model by its name"),
        ({"shard_rows": 10**6}, "shard_rows must be a whole number, at least 1 and at most 100000"),
        ({"batch_tokens": 0}, "batch_tokens must be a whole number, at least 1; got 0"),
        ({"text_column": "body"}, "has no column 'body' (text_column); it has 'text'"),
        ({"id_column": "key"}, "has no column 'key' (id_column)"),
        ({"engine": "spark"}, "unknown engine 'spark'; choose from local, ray"),
        ({"address": "auto"}, "give engine='ray' with it"),
        ({"model": "/nowhere/model"}, "cannot load /nowhere/model"),
    ],
)
def test_bad_options_are_one_clear_line(
    options: dict[str, Any], message: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(af.AttnFlowError) as error:
        begun(texts, tmp_path / "out", **options)
    assert message in str(error.value)
    with pytest.raises(af.OptionError, match="at least one input file"):
        af.explain_corpus([], tmp_path / "out")


# ---- hostile texts -------------------------------------------------------------------------------

HOSTILE = [
    b"",
    b"   ",
    b"\xe2\x80\x8b",  # a space of no width
    b"key " * 25_000,
    b"k" * 100_000,
    bytes(range(1, 9)) + b"\x0e\x1b[31m\x7f key",
    b"\\ud800 key",  # in JSON: a lone surrogate
    b"\xed\xa0\x80 key",  # the same, as bytes
    b"<script>alert('key')</script>&amp;<b>",
    "🔑👩‍👩‍👧‍👦🇩🇪 key".encode(),
    "המפתח אל الخزائن ‮key".encode(),
    "der Schlüssel".encode("latin-1"),
    "ключ".encode("utf-16-le"),
    b"\xff\xfe\xfd",
    "\ufeffkey \u0301\u0327\ufffd\uffff".encode(),
    b"the key to the cabinets",
    b"null",
    b"\x00key\x00",
    b"=1+1",
]


def test_every_hostile_row_is_in_the_result_or_in_the_errors_once(tmp_path: Path) -> None:
    path = tmp_path / "hostile.jsonl"
    rng = random.Random(0)
    escaped = {b'"': b'\\"', b"\n": b"\\n", b"\t": b"\\t"}
    with open(path, "wb") as file:
        for number in range(2000):
            text = rng.choice(HOSTILE) + (b" %d" % number if number % 3 else b"")
            if len(text) > 10_000 and number % 15:
                text = text[:400]  # long ones are slow to read, so there are fewer
            if number % 50 == 7:
                file.write(
                    rng.choice(
                        [
                            b"no JSON\n",
                            b"[1, 2]\n",
                            b'{"other": 1}\n',
                            b'{"text": 7}\n',
                            b'{"text": null}\n',
                            b'{"text": "cut\n',
                        ]
                    )
                )
                continue
            for sign, code in escaped.items():
                text = text.replace(sign, code)
            text = b"".join(b"\\u%04x" % byte if byte < 32 else bytes([byte]) for byte in text)
            file.write(b'{"text": "' + text + b'"}\n')
    begun(path, tmp_path / "out", shard_rows=300)
    done = [row["row"] for row in table(tmp_path / "out").select(["row"]).to_pylist()]
    failed = errors(tmp_path / "out")
    assert sorted([*done, *(each["row"] for each in failed)]) == list(range(2000))
    assert {each["reason"] for each in failed} == {"empty", "too long", "undecodable", "unreadable"}
    assert all(
        len(each["text"]) <= 200 and each["id"] == f"hostile.jsonl:{each['row']}" and each["detail"]
        for each in failed
    )
    assert len(done) > 700
    assert verify_corpus(tmp_path / "out") == []
    status = corpus_status(tmp_path / "out")
    assert sum(status.errors.values()) == len(failed)


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_bytes_that_are_no_text_are_errors_in_every_format(ending: str, tmp_path: Path) -> None:
    cells = [text for text in HOSTILE if not set(b'"\n\r\t,') & set(text)] * 2
    path = tmp_path / f"x.{ending}"
    if ending == "parquet":
        wrong = pa.Array.from_buffers(
            pa.string(), len(cells), pa.array(cells, pa.binary()).buffers()
        )
        pq.write_table(pa.table({"text": wrong}), path)
    else:
        path.write_bytes(
            b"\n".join([b"text", *cells, b"one\ttoo,many" if ending == "tsv" else b"one,too many"])
            + b"\n"
        )
    manifest = begun(path, tmp_path / "out")
    assert manifest.rows == len(cells) + (ending != "parquet")
    assert verify_corpus(tmp_path / "out") == []
    status = corpus_status(tmp_path / "out").errors
    assert status["undecodable"] == 6
    assert status.get("unreadable", 0) == (ending != "parquet")


def test_a_text_that_breaks_the_model_costs_only_itself(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_batch = vars(runner)["read_batch"]

    def failing(model: Any, cases: Any, *options: Any) -> Any:
        if any("zorbs/NNS" in each.encoded.tokens for each in cases.values()):
            raise RuntimeError("index out of range\nin self")
        return read_batch(model, cases, *options)

    monkeypatch.setattr(runner, "read_batch", failing)
    begun(texts, tmp_path / "out")
    broken = [each for each in errors(tmp_path / "out") if each["reason"] == "model error"]
    assert broken
    assert all(
        "zorbs" in each["text"] and each["detail"] == "index out of range in self"
        for each in broken
    )
    assert not any("zorbs" in row["text"] for row in table(tmp_path / "out").to_pylist())
    assert verify_corpus(tmp_path / "out") == []


@pytest.mark.parametrize("error", [ValueError("not\nreal"), ZeroDivisionError(), KeyError("x")])
def test_an_error_of_a_method_stops_the_run(
    error: Exception, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = METHODS["rollout"]

    def failing(graph: Any, **options: Any) -> Any:
        if graph.size > 10:
            raise error
        return rollout(graph, **options)

    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "rollout", failing)
        line = rf"^rollout failed on row \d+ \(texts\.csv:\d+\): {type(error).__name__}: \S+"
        with pytest.raises(af.AttnFlowError, match=line):
            begun(texts, tmp_path / "out", methods=["raw", "rollout"])
    assert corpus_status(tmp_path / "out").shards_done < 5
    af.explain_corpus(texts, tmp_path / "out")
    assert verify_corpus(tmp_path / "out") == []


def test_a_model_that_fails_on_a_whole_shard_stops_the_run_once(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_batch, out = vars(runner)["read_batch"], tmp_path / "out"
    spoilt = range(0)

    def failing(*arguments: Any) -> Any:
        if now[0] in spoilt:
            raise RuntimeError("no such device")
        return read_batch(*arguments)

    def noting(model: Any, stored: Any, job: Any, rows: Any) -> Any:
        now[0] = rows[0].number
        return compute(model, stored, job, rows)

    now, compute = [0], vars(local)["compute_shard"]
    monkeypatch.setattr(runner, "read_batch", failing)
    monkeypatch.setattr(local, "compute_shard", noting)
    spoilt = range(50)
    with pytest.raises(af.CaptureError, match="with one and the same error: no such device; "):
        begun(texts, out)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "manifest.json"]
    assert corpus_status(out).done == 0
    spoilt = range(30, 40)  # with its empty row; the model works, so the rows are to blame
    begun(texts, out)
    assert corpus_status(out).errors == {"empty": 1, "model error": 9}
    assert verify_corpus(out) == []


def long_model() -> af.Model:
    """A decoder that takes any number of tokens."""
    kind, configuration = DECODERS["llama"]
    config = configuration()
    config.max_position_embeddings = 10**6
    torch.manual_seed(0)
    return af.Model(kind(config).eval(), word_tokenizer())


def test_a_row_that_is_too_large_for_the_memory_is_an_error_of_its_own(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "texts.csv", ["the key", "key " * 60_000, "the keys"])
    begun(path, tmp_path / "out", model=long_model(), layers=[3])
    assert table(tmp_path / "out").column("row").to_pylist() == [0, 2]
    (failed,) = errors(tmp_path / "out")
    assert (failed["row"], failed["reason"]) == (1, "too large")
    assert "60,002 tokens need about 273.6 GB of memory: " in failed["detail"]
    assert verify_corpus(tmp_path / "out") == []


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(lambda: np.empty(2**50), id="numpy"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
)
@pytest.mark.parametrize("part", ["read_batch", "run_choice"])
def test_a_row_that_runs_out_of_memory_is_too_large(
    error: Any, part: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = vars(runner)[part]

    def failing(*arguments: Any) -> Any:
        sizes = (
            [len(case.encoded.tokens) for case in arguments[1].values()]
            if part == "read_batch"
            else [arguments[1].size]
        )
        if max(sizes) > 12:
            raise error if isinstance(error, Exception) else error()
        return function(*arguments)

    monkeypatch.setattr(runner, part, failing)
    begun(texts, tmp_path / "out")
    found = [each for each in errors(tmp_path / "out") if each["reason"] != "empty"]
    assert {each["reason"] for each in found} == {"too large"}
    assert all("13 tokens need about 0.0 GB of memory: " in each["detail"] for each in found)
    assert table(tmp_path / "out").num_rows == 49 - len(found)


# ---- never lose work -----------------------------------------------------------------------------


# runs that are killed, each a fork of a process that has loaded torch already, so that a kill may
# fall into any part of the work
FORKS = """
import glob, os, random, signal, sys, time
import attnflow as af
af.load()
path, out, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(0)
shards = lambda: len(glob.glob(out + "/shard-*"))
for _ in range(count):
    more = shards() + rng.choice([0, 1, 2])
    child = os.fork()
    if not child:
        af.explain_corpus(path, out, methods=["rollout"], layers=[6], shard_rows=100)
        os._exit(0)
    while shards() < more:
        time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.3))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it had ended already"
"""


def test_ten_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    path, out = (
        write_csv(tmp_path / "texts.csv", [*sentences(3000), "", *sentences(2999, 1)]),
        tmp_path / "out",
    )
    run = command(
        "run",
        path,
        "--out",
        out,
        "--methods",
        "rollout",
        "--layers",
        "6",
        "--shard-rows",
        "100",
        "--workers",
        "2",
    )
    for kill in range(2):  # with workers, which must not live on
        process = subprocess.Popen(
            run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        before = len(list(out.glob("shard-*")))
        while len(list(out.glob("shard-*"))) < before + 1 + kill:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert is_gone(process.pid), "a worker outlived its parent by ten seconds"
    subprocess.run([sys.executable, "-c", FORKS, path, out, "8"], check=True)
    status = corpus_status(out)
    assert 2 < status.shards_done < status.shards
    begun(path, out, shard_rows=100)
    assert verify_corpus(out) == []
    whole = begun(path, tmp_path / "whole", shard_rows=100)
    assert table(out).equals(table(tmp_path / "whole"))
    assert errors(out) == errors(tmp_path / "whole")
    assert Manifest.read(out).shards == whole.shards
    assert not list(out.glob(".attnflow-*"))


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Let the computation of shards fail after some."""
    compute, calls = vars(local)["compute_shard"], []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > count:
            raise error
        return compute(*arguments)

    monkeypatch.setattr(local, "compute_shard", failing)


def test_an_interrupted_run_goes_on_where_it_was(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            begun(texts, tmp_path / "out")
    assert table(tmp_path / "out").num_rows == 20
    assert "20 of 50" in str(corpus_status(tmp_path / "out"))
    assert verify_corpus(tmp_path / "out") == ["not finished: it lacks 3 of 5 shards (2..4)"]
    top = subprocess.run(
        command("top", tmp_path / "out", "--min-count", "1"), capture_output=True, text=True
    )
    assert top.returncode == 0
    assert f"note: {tmp_path / 'out'} is not finished: 20 of 50 rows so far" in " ".join(
        top.stderr.split()
    )
    with monkeypatch.context() as patch:
        stop_after(patch, 3, AssertionError("a finished shard is computed again"))
        begun(texts, tmp_path / "out")
    begun(texts, tmp_path / "whole")
    assert table(tmp_path / "out").equals(table(tmp_path / "whole"))


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (2, 0), (2, 1)])
def test_ctrl_c_says_how_far_it_came_and_what_resumes(
    workers: int, shards: int, tmp_path: Path
) -> None:
    path, out = write_csv(tmp_path / "texts.csv", sentences(4000)), tmp_path / "out"
    options = ["--methods", "rollout", "--layers", "6", "--shard-rows", "100"]
    process = subprocess.Popen(
        command("run", path, "--out", out, *options, "--workers", workers),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (out / "manifest.json").exists() or len(Manifest.read(out).shards) < shards:
        assert process.poll() is None
        time.sleep(0.01)
    if not shards:
        time.sleep(0.5)  # workers are being started
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    printed, complaints = process.communicate(timeout=60)
    status = corpus_status(out)
    assert (process.returncode, printed) == (130, "")
    assert complaints == (
        f"attnflow: interrupted after {status.done:,} of 4,000 rows;"
        " the same command resumes the run\n"
    )
    assert status.shards_done >= shards
    assert is_gone(process.pid)
    with open(tmp_path / "said", "w") as said:
        subprocess.run(command("run", path, "--out", out), stdout=said, check=True)
    assert verify_corpus(out) == []


@pytest.mark.filterwarnings("ignore::attnflow.CorpusWarning")
def test_resuming_takes_the_options_of_the_manifest(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    other = tmp_path / "model"
    shutil.copytree(Path(af.__file__).parent / "models" / "bundled" / "weights", other)
    texts.write_text("".join(f"{line},x\n" for line in texts.read_text().splitlines()))
    texts.write_text(texts.read_text().replace("text,x", "body,stars", 1))
    options: dict[str, Any] = {
        "model": other,
        "text_column": "body",
        "id_column": "stars",
        "label_column": "stars",
        "keep": ["stars"],
        "methods": ["raw", "flow"],
        "layers": [5, 6],
        "position": "mean",
        "normalize": None,
        "residual": 0.25,
        "limit": 35,
        "batch_tokens": 100,
        "shard_rows": 10,
    }
    with monkeypatch.context() as patch:
        stop_after(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            af.explain_corpus(texts, out, **options)
    before = Manifest.read(out)
    after = af.explain_corpus(texts, out)
    assert (after.options, after.model, after.shard_rows) == (
        before.options,
        before.model,
        before.shard_rows,
    )
    af.explain_corpus(texts, tmp_path / "whole", **options)
    assert table(out).equals(table(tmp_path / "whole"))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"layers": [6]}, "option layers was"),
        ({"normalize": "sum"}, "option normalize was None and is 'sum'"),
        ({"residual": 0.5}, "option residual was 0.25 and is 0.5"),
        ({"importance": ["blank_out"]}, "option importance"),
        ({"keep": []}, r"option keep was \['stars'\] and is \[\]"),
        ({"shard_rows": 1000}, "option shard_rows was 10 and is 1000"),
    ]
    for other_options, message in changes:
        with pytest.raises(af.FileError, match=f"was begun otherwise: {message}"):
            af.explain_corpus(texts, out, **other_options)


def test_a_model_that_has_no_name_is_asked_for(texts: Path, tmp_path: Path) -> None:
    model = af.Model(build("llama"), word_tokenizer())
    begun(texts, tmp_path / "out", model=model, layers=[3])
    with pytest.raises(
        af.OptionError, match="a loaded model, a LlamaForCausalLM: give it as model"
    ):
        af.explain_corpus(texts, tmp_path / "out")
    af.explain_corpus(texts, tmp_path / "out", model=model)


def test_labels_that_are_no_classes_are_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("text,stars\nthe key,5\nthe keys,4\nthe key,5\n")
    options = {"label_column": "stars", "importance": ["blank_out"]}
    line = "labels in 'stars' are not classes of VerbNumber; got '5', '4'"
    with pytest.raises(af.OptionError, match=line):
        begun(path, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "manifest.json").exists()
    begun(path, tmp_path / "out", label_column="stars")  # which are only kept
    path.write_text("text,stars\nthe key,5\nthe keys,1\n")
    begun(path, tmp_path / "some", **options)
    assert [each["reason"] for each in errors(tmp_path / "some")] == ["unknown label"]


def test_a_worker_with_other_weights_is_refused(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "model_fingerprint", lambda model: "0" * 64)
    with pytest.raises(af.FileError, match="the model verb-number has other weights in a worker"):
        begun(texts, tmp_path / "out", workers=2)  # whose own processes count right
    assert corpus_status(tmp_path / "out").done == 0


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    ["shard-00001.parquet", "shard-00003.parquet", "_errors-00003.parquet", "errors.parquet"],
)
@pytest.mark.parametrize("damage", [truncate, alter, Path.unlink])
def test_a_damaged_file_is_found_and_mended(
    name: str, damage: Callable[[Path], None], texts: Path, tmp_path: Path
) -> None:
    begun(texts, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")}
    damage(tmp_path / "out" / name)
    wrong = verify_corpus(tmp_path / "out")
    assert len(wrong) == 1
    assert wrong[0].startswith(name)
    notes: list[str] = []
    begun(texts, tmp_path / "out", report=notes.append)
    assert notes == (
        []
        if name == "errors.parquet"
        else [f"shard-{name[-13:-8]}.parquet is missing or damaged: it is computed again"]
    )
    assert verify_corpus(tmp_path / "out") == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")} == before


def test_what_changed_is_refused_by_name(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun(texts, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = tmp_path / "model"
    shutil.copytree(Path(af.__file__).parent / "models" / "bundled" / "weights", other)
    begun(texts, out, model=other)  # the same model in another place
    alter(other / "model.safetensors")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"methods": ["raw"]}, r"option methods was \['rollout'\] and is \['raw'\]"),
        ({"layers": [5]}, "option layers was"),
        ({"importance": "blank_out"}, "option importance"),
        ({"normalize": None}, "option normalize was 'sum' and is None"),
        ({"position": "max"}, "option position was 'focal' and is 'max'"),
        ({"limit": 49}, "option limit was None and is 49"),
        ({"shard_rows": 11}, "option shard_rows was 10 and is 11"),
        ({"id_column": "text"}, "option columns"),
        ({"model": other}, "the model was verb-number and is .*model"),
    ]
    for options, message in changes:
        with pytest.raises(af.FileError, match=f"was begun otherwise: .*{message}"):
            begun(texts, out, **options)
    texts.write_text(texts.read_text() + "one more\n")
    with pytest.raises(af.FileError, match=r"the input texts\.csv has another content"):
        begun(texts, out)
    with pytest.raises(af.FileError, match=r"the input was texts\.csv and is other\.csv"):
        begun(write_csv(tmp_path / "other.csv", sentences(3)), out)
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} <= {"manifest.json"}
    assert verify_corpus(out) == []


def test_an_input_that_changes_while_it_is_read_is_refused(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, before = vars(local)["compute_shard"], texts.read_text()

    def changing(model: Any, job: Any, functions: Any, rows: Any) -> Any:
        texts.write_text(before.replace("key", "man"))
        return compute(model, job, functions, rows)

    with monkeypatch.context() as patch:
        patch.setattr(local, "compute_shard", changing)
        with pytest.raises(af.FileError, match=r"texts\.csv changed while it was read"):
            begun(texts, tmp_path / "out")
    assert corpus_status(tmp_path / "out").shards_done == 0
    texts.write_text(before)
    begun(texts, tmp_path / "out")
    assert verify_corpus(tmp_path / "out") == []


def test_a_run_that_is_stopped_vouches_for_nothing_that_a_changed_input_gave(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, before = vars(local)["compute_shard"], texts.read_text()
    calls: list[int] = []

    def changing(model: Any, job: Any, functions: Any, rows: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 3:
            texts.write_text(before.replace("key", "man"))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute(model, job, functions, rows)

    with monkeypatch.context() as patch:
        patch.setattr(local, "compute_shard", changing)
        with pytest.raises(af.FileError, match=r"texts\.csv changed while it was read"):
            begun(texts, tmp_path / "out")
    assert corpus_status(tmp_path / "out").shards_done in (1, 2)
    texts.write_text(before)
    begun(texts, tmp_path / "out")
    begun(texts, tmp_path / "whole")
    assert table(tmp_path / "out").equals(table(tmp_path / "whole"))


def test_an_error_of_the_run_itself_ends_its_workers(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = Manifest.write, []

    def failing(manifest: Manifest, folder: Path) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise af.FileError("no")
        write(manifest, folder)

    monkeypatch.setattr(Manifest, "write", failing)
    with pytest.raises(
        af.FileError, match="no"
    ) as error:  # whose traceback holds on to all that was going on
        begun(texts, tmp_path / "out", workers=2)
    assert multiprocessing.active_children() == []
    assert str(error.value) == "no"


@pytest.mark.filterwarnings("ignore::attnflow.CorpusWarning")
def test_shards_that_vanish_while_it_runs_are_told(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, out = vars(local)["compute_shard"], tmp_path / "out"

    def removing(model: Any, job: Any, functions: Any, rows: Any) -> Any:
        if rows[0].number == 20:
            shard_path(out, 0).unlink()
        return compute(model, job, functions, rows)

    with monkeypatch.context() as patch:
        patch.setattr(local, "compute_shard", removing)
        with pytest.raises(
            af.FileError,
            match=r"out lacks 1 shard, among them 0: the same command resumes",
        ):
            begun(texts, out)
    begun(texts, out)
    assert verify_corpus(out) == []


def test_a_second_run_at_the_same_time_is_refused(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            af.FileError,
            match=r"another run is at work in .*out: wait until it ends, or give another folder",
        ):
            begun(texts, tmp_path / "out")
    begun(texts, tmp_path / "out")


def test_folders_that_are_no_corpus_are_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(
        af.FileError, match=r"is not empty and holds no corpus \(it has texts\.csv\)"
    ):
        begun(texts, tmp_path)
    with pytest.raises(af.FileError, match="cannot make the folder"):
        begun(texts, texts)
    for content, message in {
        "{": "is not a corpus manifest",
        "[]": "is not a corpus manifest",
        '{"format": 99}': "has format 99",
    }.items():
        out = tmp_path / "broken"
        out.mkdir(exist_ok=True)
        (out / "manifest.json").write_text(content)
        for use in (
            af.read_corpus,
            verify_corpus,
            corpus_status,
            evaluate_corpus,
            top_words,
            lambda out: begun(texts, out),
        ):
            with pytest.raises(af.FileError, match=message):
                use(out)
    with pytest.raises(af.FileError, match="is not a corpus folder"):
        af.read_corpus(tmp_path / "nowhere")


DAMAGES: list[tuple[tuple[str | int, ...], Any]] = [
    ((), []),
    ((), None),
    (("format",), True),
    (("format",), "1"),
    (("versions",), []),
    (("versions", "torch"), 2),
    (("model",), "verb-number"),
    (("model", "name"), "a\0b"),
    (("model", "name"), "\ud800"),
    (("model", "fingerprint"), "0" * 63),
    (("model", "else"), "more"),
    (("inputs",), []),
    (("inputs", 0), "texts.csv"),
    (("inputs", 0, "bytes"), -1),
    (("inputs", 0, "sha256"), None),
    (("options",), None),
    (("options", "methods"), "rollout"),
    (("options", "methods"), ["rollout", "rollout"]),
    (("options", "methods"), [["rollout"]]),
    (("options", "methods"), ["id"]),
    (("options", "layers"), {}),
    (("options", "layers", "rollout"), []),
    (("options", "layers", "rollout"), [0]),
    (("options", "layers", "rollout"), ["6"]),
    (("options", "layers", "raw"), [6]),
    (("options", "position"), -1),
    (("options", "position"), ["max"]),
    (("options", "residual"), 1.0),
    (("options", "residual"), float("nan")),
    (("options", "methods"), ["a\x1b[31m"]),
    (("options", "methods"), [" "]),
    (("options", "without"), None),
    (("options", "without"), [-1]),
    (("options", "graph"), 3),
    (("options", "functions"), ["rollout"]),
    (("options", "functions"), {"rollout": None}),
    (("options", "functions"), {"other": "module:function"}),
    (("options", "edges"), None),
    (("options", "edges"), []),
    (("options", "edges"), ["attention", "attention"]),
    (("options", "edges"), ["norm"]),
    (("options", "edges"), ["a\x1b[31m"]),
    (("options", "own_edges"), {"other": "module:function"}),
    (("options", "own_edges"), {"attention": None}),
    (("options", "segments"), "turns"),
    (("options", "importance"), ["rollout"]),
    (("options", "batch_tokens"), 0),
    (("options", "keep"), ["text"]),
    (("options", "columns"), {"text": None}),
    (("options", "columns", "id"), 3),
    (("options", "limit"), 0),
    (("rows",), 0),
    (("rows",), 10**30),
    (("rows",), 10**12),
    (("rows",), 41.0),
    (("rows",), 31),
    (("shard_rows",), 0),
    (("shard_rows",), 10**6),
    (("shards",), []),
    (("shards", "0"), None),
    (("shards", "0"), {}),
    (("shards", "5"), {}),
    (("shards", "01"), {}),
    (("shards", "٣"), {}),
    (("shards", "9" * 5000), {}),
    (("shards", "0", "rows"), 11),
    (("shards", "0", "rows"), -1),
    (("shards", "0", "sha256"), "g" * 64),
    (("shards", "0", "errors"), 1),
    (("shards", "0", "errors_sha256"), "0" * 64),
    (("shards", "3", "errors_sha256"), None),
    (("shards", "3", "reasons"), {"empty": 2}),
    (("shards", "3", "reasons"), {"empty": "1"}),
    (("errors_sha256",), 7),
    (("seconds",), float("inf")),
    (("seconds",), 10**400),
    (("else",), 1),
]
MISSING = ("format", "versions", "model", "inputs", "options", "rows", "shards", "seconds")


def damaged(content: Any, place: tuple[str | int, ...], value: Any) -> bytes:
    """A manifest with another value in one place."""
    if not place:
        return json.dumps(value).encode()
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(content).encode()


def test_a_damaged_manifest_is_one_line_wherever_it_is_read(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun(texts, out)
    good = (out / "manifest.json").read_bytes()
    contents = [damaged(json.loads(good), *damage) for damage in DAMAGES]
    for name in MISSING:
        content = json.loads(good)
        del content[name]
        contents.append(json.dumps(content).encode())
    contents += [b"", b"\xff" + good, good[:-9], b"[" * 100_000, good.decode().encode("utf-16")]
    uses: list[Callable[[Path], Any]] = [af.read_corpus, verify_corpus, corpus_status, top_words]
    uses += [evaluate_corpus, lambda out: af.explain_corpus(texts, out)]
    for content in contents:
        (out / "manifest.json").write_bytes(content)
        for use in uses:
            with pytest.raises(af.FileError, match=r"manifest\.json is not a corpus manifest: "):
                use(out)
    (out / "manifest.json").write_bytes(good)
    assert verify_corpus(out) == []


@pytest.mark.parametrize(
    ("methods", "layers"), [(["raw"], {"raw": [6]}), (["rollout"], {"rollout": [5, 6]})]
)
def test_a_manifest_that_speaks_of_other_scores_is_refused(
    methods: list[str], layers: dict[str, list[int]], texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    begun(texts, out, importance=["blank_out"])
    manifest = Manifest.read(out)
    stored = {name: tuple(numbers) for name, numbers in layers.items()}
    manifest.options = replace(manifest.options, methods=tuple(methods), layers=stored)
    manifest.write(out)
    for use in (af.read_corpus, evaluate_corpus, lambda out: top_words(out, method=methods[0])):
        with pytest.raises(af.FileError, match=r"shard-00000\.parquet has other .* the manifest"):
            use(out)


def test_a_manifest_of_an_older_version_is_read(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun(texts, out)
    content = json.loads((out / "manifest.json").read_text())
    for option in ("keep", "functions", "graph", "without", "edges", "own_edges", "segments"):
        del content["options"][option]
    (out / "manifest.json").write_text(json.dumps(content))
    assert verify_corpus(out) == []
    begun(texts, out)


# bytes; a limit on the size of files stands for the full disk: a shard is over it, the manifest not
SMALL = 8 * 1024


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    path, out = write_csv(tmp_path / "texts.csv", sentences(400)), tmp_path / "out"
    begun(path, out, limit=200, shard_rows=200)
    assert shard_path(out, 0).stat().st_size > SMALL
    shutil.rmtree(out)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    try:
        with pytest.raises(
            af.FileError, match=r"cannot write .*shard-00000\.parquet: .*File too large"
        ):
            begun(path, out, shard_rows=200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(each.name for each in out.iterdir()) == [".lock", "manifest.json"]
    begun(path, out, shard_rows=200)
    assert verify_corpus(out) == []


def test_a_full_disk_under_workers_is_one_line(tmp_path: Path) -> None:
    path, out = write_csv(tmp_path / "texts.csv", sentences(400)), tmp_path / "out"
    limited = ["bash", "-c", 'ulimit -f "$0"; exec "$@"', str(SMALL // 1024)]
    arguments = [
        "run",
        path,
        "--out",
        out,
        "--methods",
        "rollout",
        "--layers",
        "6",
        "--shard-rows",
        "200",
        "--workers",
        "2",
    ]
    found = subprocess.run(
        [*limited, *command(*arguments)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stderr.startswith("attnflow: cannot write")
    assert "File too large" in found.stderr
    assert found.stderr.count("\n") == 1
    assert sorted(each.name for each in out.iterdir()) == [".lock", "manifest.json"]


def test_a_worker_that_dies_is_one_line(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deadly(CorpusRow):
        def __reduce__(self) -> Any:
            return os._exit, (9,)

    rows = [Deadly(number, str(number), "the key") for number in range(50)]
    monkeypatch.setattr("attnflow.corpus.rows.InputFiles.rows", lambda self, *_: iter(rows))
    with pytest.raises(af.FileError, match="a worker died"):
        begun(texts, tmp_path / "out", workers=2)
    monkeypatch.undo()
    begun(texts, tmp_path / "out")
    assert verify_corpus(tmp_path / "out") == []


@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_script_whose_workers_cannot_start_is_told_why(
    from_stdin: bool, texts: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    places = f"{str(texts)!r}, {str(tmp_path / 'out')!r}"
    script.write_text(
        f"import attnflow as af\naf.explain_corpus({places}, workers=2, shard_rows=10)\n"
    )
    command = [sys.executable] if from_stdin else [sys.executable, str(script)]
    answer = subprocess.run(
        command, input=script.read_text() if from_stdin else None, capture_output=True, text=True
    )
    assert answer.returncode == 1
    assert "a worker could not start" in answer.stderr
    assert "if __name__ == '__main__'" in answer.stderr


def test_verify_finds_gaps_and_repeats_that_checksums_do_not(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun(texts, out)
    manifest = Manifest.read(out)
    good = pq.read_table(shard_path(out, 1))
    for wrong, message in (
        (pa.concat_tables([good.slice(0, 9), good.slice(0, 1)]), "rows 10 are there twice"),
        (pq.read_table(shard_path(out, 2)), "are of another shard"),
        (good.slice(1), "shard-00001.parquet: rows 10 are missing"),
        (good.drop_columns(["rollout"]), "other columns"),
    ):
        manifest.shards[1] = write_shard(out, 1, pack_shard(wrong, make_error_table([])))
        manifest.write(out)
        assert any(message in line for line in verify_corpus(out)), message
    shutil.copy(shard_path(out, 2), out / "shard-00009.parquet")
    assert "shard-00009.parquet belongs to no shard of the manifest" in verify_corpus(out)


# ---- memory --------------------------------------------------------------------------------------


# VmHWM, since ru_maxrss begins with that of the process that started this one
MEASURED = """
import sys
import attnflow as af
af.explain_corpus(sys.argv[1], sys.argv[2], methods=["rollout"], layers=[6], shard_rows=500)
status = [line.split() for line in open("/proc/self/status")]
print(next(int(line[1]) // 1024 for line in status if line[0] == "VmHWM:"))
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    runs = []
    for count in (2_000, 20_000):
        path = write_csv(tmp_path / f"{count}.csv", ["the key of the house"] * count)
        program = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / f"{count}")]
        runs.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
    few, many = (int(run.communicate()[0]) for run in runs)
    print(f"peak RSS: {few} MB for 2,000 rows, {many} MB for 20,000")
    assert many < 1.10 * few


# ---- what the folder says ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scored")
    path = write_csv(place / "texts.csv", sentences(60))
    af.explain_corpus(
        path, place / "out", importance=["blank_out", "input_gradient"], shard_rows=25
    )
    return place / "out"


def test_data_tools_read_the_folder(scored: Path) -> None:
    import duckdb
    import pandas

    query = f"select count(*), sum(len(tokens)), avg(rollout[6][1]) from '{scored}/shard-*.parquet'"
    count, tokens, mean = duckdb.sql(query).fetchall()[0]
    frame = pandas.read_parquet(sorted(scored.glob("shard-*.parquet")))
    found = af.read_corpus(scored)
    assert count == len(frame) == found.num_rows == 60
    assert (
        tokens
        == frame["tokens"].map(len).sum()
        == sum(map(len, found.column("tokens").to_pylist()))
    )
    assert mean == pytest.approx(np.mean([row[5][0] for row in frame["rollout"]]), abs=1e-6)
    assert pa.Table.from_batches(list(af.read_corpus(scored, batches=True))).equals(found)
    assert af.read_corpus(scored, columns=["row"]).column_names == ["row"]
    with pytest.raises(af.OptionError, match="unknown column 'rows'; choose from id, row"):
        af.read_corpus(scored, columns=["rows"])


def test_correlations_of_a_folder_are_those_of_evaluate(scored: Path) -> None:
    texts = af.read_corpus(scored).column("text").to_pylist()
    expected = af.evaluate(af.load(), texts, layers=[3, 6])
    for special in (False, True):
        report = evaluate_corpus(scored, special_tokens=special)
        for name, method, layer, mean, low, high, _, count, undefined in report.rows():
            if layer in (3, 6):
                assert mean == pytest.approx(
                    expected.including(special).mean(method, name, layer), abs=0.01
                )
                assert low < mean < high
                assert (count, undefined < 10) == (60, True)
    values = report.correlations["blank_out", "rollout"][5]
    row = af.read_corpus(scored).to_pylist()[7]
    assert values[7] == pytest.approx(
        spearmanr(row["rollout"][5], row["blank_out"]).statistic, abs=1e-3
    )
    assert (
        len(
            evaluate_corpus(scored, methods=["flow"], against=["blank_out"], limit=9).correlations[
                "blank_out", "flow"
            ][0]
        )
        == 9
    )


def test_a_report_is_a_table_like_any_other(scored: Path, tmp_path: Path) -> None:
    report = evaluate_corpus(scored, methods=["rollout", "flow"], against=["blank_out"])
    frame = report.to_pandas()
    assert tuple(frame.columns) == report.columns
    assert len(frame) == 7
    assert frame.attrs["source"]["model"] == "verb-number"
    assert "| blank_out | flow | 6 |" in report.to_markdown()
    assert report.to_latex().count("blank\\_out & rollout") == 6
    assert "<table" in report._repr_html_()
    for ending in (".md", ".csv", ".tex", ".json"):
        assert report.save(tmp_path / f"report{ending}").stat().st_size > 200
    content = json.loads((tmp_path / "report.json").read_text())
    assert len(content["table"]) == 7
    assert content["source"]["model"] == "verb-number"


def test_the_bootstrap_interval_is_that_of_the_normal_law() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.2, 2000)
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(values)
    assert (high - low) / 2 == pytest.approx(1.96 * 0.2 / np.sqrt(2000), rel=0.1)
    assert low < values.mean() < high
    assert np.isnan(bootstrap(np.empty(0))).all()


def test_the_top_words_are_the_means_of_their_attention(scored: Path) -> None:
    sums: dict[str, list[float]] = {}
    for row in af.read_corpus(scored).to_pylist():
        for token, value in list(zip(row["tokens"], row["flow"][0], strict=True))[1:]:
            sums.setdefault(token.lower().partition("/")[0], []).append(value)
    every = top_words(scored, method="flow", k=100, min_count=1, common=True)
    assert {word for word, _, _ in every} == set(sums)
    assert [mean for _, mean, _ in every] == sorted((mean for _, mean, _ in every), reverse=True)
    for word, mean, count in every:
        assert mean == pytest.approx(np.mean(sums[word]))
        assert count == len(sums[word])
    assert "the" not in {word for word, _, _ in top_words(scored, method="flow", min_count=1)}
    assert all(count >= 30 for _, _, count in top_words(scored, min_count=30, common=True))
    with pytest.raises(
        af.OptionError, match=r"holds no method 'rolout'; it has .*, raw, rollout, flow"
    ):
        top_words(scored, method="rolout")


def test_words_are_joined_from_subwords(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    begun(texts, folder, limit=1)
    row = table(folder).slice(0, 1).to_pylist()[0] | {
        "tokens": ["[CLS]", "Cab", "##inets", "."],
        "special": [True, False, False, False],
        "words": [None, 0, 0, 1],
        "rollout": [[0.1, 0.2, 0.3, 0.4]],
    }
    manifest = Manifest.read(folder)
    for name in ("rollout", "flow"):
        manifest.options = replace(manifest.options, methods=(name,), layers={name: (6,)})
        scores = pa.Table.from_pylist(
            [row | {name: row["rollout"]}], schema=manifest.options.schema
        )
        manifest.shards[0] = write_shard(folder, 0, pack_shard(scores, make_error_table([])))
        manifest.write(folder)
        if name == "flow":  # whose sum would rank words by the number of their pieces
            with pytest.raises(af.OptionError, match="'Cabinets' has 2 pieces: rank words by roll"):
                top_words(folder, method=name, min_count=1)
        else:
            ((word, mean, count),) = top_words(folder, method=name, min_count=1)
            assert (word, count) == ("cabinets", 1)
            assert mean == pytest.approx(0.5)


def test_the_commands(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, out = partial(say_inside, monkeypatch, capsys), tmp_path / "out"
    run = [
        "corpus",
        "run",
        texts,
        "--out",
        out,
        "--methods",
        "rollout,flow",
        "--importance",
        "blank_out",
        "--shard-rows",
        "20",
    ]
    assert "49 texts in 3 shards; 1 error" in said(*run)
    truncate(out / "shard-00001.parquet")
    assert "shard-00001.parquet is not what was written: its checksum differs" in said(
        "corpus", "verify", out, status=1
    )
    assert "note: shard-00001.parquet is missing or damaged: it is computed again" in said(*run)
    assert "whole; 50 rows in 3 shards; 1 error" in said("corpus", "verify", out)
    shown = said("corpus", "status", out)
    assert "rows: 50 of 50" in shown
    assert "errors: 1 (1 empty)" in shown
    assert "rows per second" in shown
    assert said("evaluate", out) == said("corpus", "evaluate", out)
    assert "| blank_out | flow | 6 |" in said(
        "evaluate", out, "--methods", "flow", "--out", tmp_path / "report.csv"
    )
    assert len((tmp_path / "report.csv").read_text().splitlines()) == 2
    assert "| word | mean flow | count |" in said(
        "corpus", "top", out, "--method", "flow", "--min-count", "2"
    )
    for arguments, message in {
        (
            "evaluate",
            "verb-number",
        ): "needs a model and a file of texts (or --truth), or the folder of a corpus alone",
        ("evaluate", out, "--layers", "6"): "leave out --layers",
        (
            "evaluate",
            out,
            "--against",
            "input_gradient",
        ): "holds no importance 'input_gradient'; it has blank_out",
        ("corpus", "top", out, "--method", "raw"): "holds no method 'raw'; it has rollout, flow",
        ("corpus", "top", out, "--min-count", "9999"): "give a smaller --min-count",
        ("corpus", "status", tmp_path): "is not a corpus folder",
        (*run[:-1], "21"): "option --shard-rows was 20 and is 21",
        (*run, "--layers", "six"): "--layers must be numbers like 1,6; got 'six'",
    }.items():
        line = said(*arguments, status=2)
        assert message in line
        assert line.startswith("attnflow: ")
        assert line.count("\n") == 1


def test_without_pyarrow_the_extra_is_named(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (lambda: begun(texts, tmp_path / "out"), lambda: af.read_corpus(tmp_path)):
        with pytest.raises(af.MissingExtraError, match=r"pip install 'attnflow\[corpus\]'"):
            use()


def test_without_ray_the_extra_is_named(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(af.MissingExtraError, match=r"pip install 'attnflow\[ray\]'"):
        begun(texts, tmp_path / "out", engine="ray")
    assert not (tmp_path / "out").exists()


def test_a_machine_of_the_cluster_that_is_not_like_ours_is_refused(
    texts: Path, tmp_path: Path
) -> None:
    manifest, threads = begun(texts, tmp_path / "out"), torch.get_num_threads()
    try:
        facts = manifest.model["fingerprint"], manifest.versions
        assert on_ray.load_same("verb-number", *facts).name == af.load().name
        with pytest.raises(
            af.AttnFlowError,
            match="the model verb-number has other weights there than where the run was started",
        ):
            on_ray.load_same("verb-number", "0" * 64, manifest.versions)
        with pytest.raises(
            af.AttnFlowError,
            match=r"torch is .* there and 1\.0 where the run was started: install the same",
        ):
            on_ray.load_same("verb-number", facts[0], {**manifest.versions, "torch": "1.0"})
        actor = on_ray.Explainer(
            "/nowhere/model",
            *facts,
            CorpusJob(StoredJob(("raw",), {}, "focal", "sum", (), 1), 1, 1, False),
            None,
        )
        (answer,) = actor(pa.table({"index": [3], "rows": [b"[]"], "problem": [None]})).to_pylist()
        assert "on a machine of the cluster: cannot load /nowhere/model" in answer["problem"]
    finally:
        torch.set_num_threads(threads)


def test_what_the_writer_of_a_cluster_cannot_write_is_told(tmp_path: Path) -> None:
    packed = pack_shard(pa.table({"id": ["a"]}), make_error_table([]))
    assert "cannot write" in str(on_ray.ShardWriter(tmp_path / "gone", [0]).write(0, packed))
    assert on_ray.ShardWriter(tmp_path, [0]).write(0, packed).rows == 1  # type: ignore[union-attr]
    assert on_ray.ShardWriter(tmp_path, [0, 1]).count() == 1  # one that was started again


@given(st.lists(st.text(st.characters(), max_size=5), max_size=5))
@example(["\ud83d\udc80", "\udcff", "\x00"])
def test_rows_travel_to_actors_unchanged(found: list[str]) -> None:
    rows = [
        CorpusRow(number, text, text, text, None, (text, None)) for number, text in enumerate(found)
    ]
    assert on_ray.decode_rows(on_ray.encode_corpus_rows(rows)) == rows


def test_the_result_that_explain_shows_first_comes_first(texts: Path, tmp_path: Path) -> None:
    first = next(iter(af.explain("the keys").results))
    manifest = af.explain_corpus(texts, tmp_path / "out", limit=2)
    assert manifest.options.results == (first, "raw", "rollout", "flow")
    assert table(tmp_path / "out").column(first).type == table(tmp_path / "out").column("raw").type
    resumed = af.explain_corpus(texts, tmp_path / "out")  # options are those it was begun with
    assert resumed.options == manifest.options
    named = af.explain_corpus(texts, tmp_path / "named", methods="raw", limit=2)
    assert named.options.results == ("raw",)


def test_where_the_first_result_is_not_available_a_note_says_so(
    texts: Path, tmp_path: Path
) -> None:
    config = BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    # which attends outside of the interface, so that gradients are not available
    model = af.Model(BloomForCausalLM(config), word_tokenizer())
    with pytest.warns(af.CorpusWarning, match="edges are not available for this model"):
        manifest = af.explain_corpus(texts, tmp_path / "out", model=model, limit=2)
    assert manifest.options.results == ("raw", "rollout", "flow")
