"""Corpora on edges other than attention: the same columns as everywhere, by any engine."""

import json
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.corpus.job import CorpusOptions, plan_job, read_job
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import CorpusRow
from attnflow.corpus.scores import evaluate_corpus, top_words
from attnflow.corpus.shard import RowTask, estimate_memory
from attnflow.corpus.status import verify_corpus
from tests.console import say_inside
from tests.corpora import assert_refused, command, errors, sentences, table, write_csv
from tests.families import build, word_tokenizer
from tests.own_methods import last_layer, lengths, strongest, token_length, without_first

pytest.importorskip("pyarrow")

EDGES = ["attention", "contribution", "gradient"]
TOP: dict[str, Any] = {"methods": "rollout", "layers": 6, "shard_rows": 10}


def test_a_row_holds_what_explain_says_on_every_kind_of_edges(tmp_path: Path) -> None:
    path, model, methods = tmp_path / "texts.jsonl", af.load(), ["rollout", "flow"]
    labels = ["plural", "singular", None, "dual", "plural"]
    rows = [
        {"text": text, "label": label} for text, label in zip(sentences(5), labels, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    manifest = af.explain_corpus(
        path, tmp_path / "out", edges=EDGES, methods=methods, label_column="label"
    )
    names = ["rollout", "flow", "contribution rollout", "contribution flow"]
    names += ["gradient rollout", "gradient flow"]
    found = table(tmp_path / "out")
    assert found.column_names[9:] == list(manifest.options.results) == names
    assert manifest.options.layers["contribution rollout"] == (1, 2, 3, 4, 5, 6)
    assert manifest.options.layers["gradient flow"] == (6,)
    assert [(row["row"], row["reason"]) for row in errors(tmp_path / "out")] == [
        (3, "unknown label")
    ]
    for row in found.to_pylist():
        options: dict[str, Any] = {"target": row["label"], "importance": (), "methods": methods}
        expected = af.explain(row["text"], model=model, edges=EDGES, **options).results
        for name in names:
            layers = manifest.options.layers[name]
            values = [expected[name].at(0, layer) for layer in layers]
            np.testing.assert_allclose(row[name], values, atol=1e-5)
    assert verify_corpus(tmp_path / "out") == []


def test_the_number_of_workers_changes_nothing_on_edges_of_ones_own(
    texts: Path, tmp_path: Path
) -> None:
    references = {"strongest": "tests.own_methods:strongest", "own": "tests.own_methods:lengths"}
    ways: list[Any] = [
        ["contribution", "gradient", strongest, f"own={references['own']}"],
        ["contribution", "gradient", references["strongest"], f"own={references['own']}"],
        {"contribution": None, "gradient": None, "strongest": strongest, "own": lengths},
    ]
    one = af.explain_corpus(texts, tmp_path / "one", edges=ways[0], residual=0.25, **TOP)
    two = af.explain_corpus(texts, tmp_path / "two", edges=ways[1], residual=0.25, workers=2, **TOP)
    assert one.shards == two.shards
    assert one.options == two.options
    assert one.options.own_edges == references
    (tmp_path / "one" / "shard-00001.parquet").unlink()
    with pytest.warns(af.CorpusWarning, match="shard-00001"):
        resumed = af.explain_corpus(texts, tmp_path / "one", edges=ways[2])
    assert resumed.shards == one.shards
    renamed = [*ways[0][:2], "strongest=tests.own_methods:lengths", ways[0][3]]
    for edges, message in ((renamed, "option own_edges was"), (ways[0][::-1], "option edges was")):
        with pytest.raises(af.FileError, match=message):
            af.explain_corpus(texts, tmp_path / "one", edges=edges)
    model = af.load()
    for row in table(tmp_path / "two").to_pylist()[::9]:
        graph = af.attention_graph(model, row["text"], edges=strongest, residual=0.25)
        expected = af.rollout(graph, layers=[6]).at(0)
        np.testing.assert_allclose(row["strongest rollout"], [expected], atol=1e-6)
        expected = af.rollout(af.attention_graph(model, row["text"], edges="norm")).at(0)
        np.testing.assert_allclose(row["own rollout"], [expected], atol=1e-6)


def test_a_run_that_is_killed_is_resumed_on_the_same_edges(tmp_path: Path) -> None:
    texts, out = write_csv(tmp_path / "texts.csv", sentences(400)), tmp_path / "out"
    options = ["--edges", "attention,contribution", "--methods", "rollout", "--layers", "6"]
    process = subprocess.Popen(
        command("run", texts, "--out", out, *options, "--shard-rows", "20"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (out / "shard-00001.parquet").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    begun = Manifest.read(out)
    assert 0 < len(begun.shards) < begun.count
    with pytest.raises(af.FileError, match=r"option edges was \['attention', 'contribution'\]"):
        af.explain_corpus(texts, out, edges="contribution")
    with pytest.raises(af.FileError, match=r"option layers was .*'contribution rollout': \[6\]"):
        af.explain_corpus(texts, out, layers={"rollout": 6})
    resumed = af.explain_corpus(texts, out)
    whole = af.explain_corpus(
        texts, tmp_path / "whole", edges=EDGES[:2], **{**TOP, "shard_rows": 20}
    )
    assert resumed.shards == whole.shards
    assert verify_corpus(out) == []


def test_a_manifest_without_edges_is_one_of_attention(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = af.explain_corpus(texts, out, **TOP)
    content = json.loads((out / "manifest.json").read_text())
    for option in ("edges", "own_edges"):
        del content["options"][option]
    (out / "manifest.json").write_text(json.dumps(content))
    assert Manifest.read(out).options.results == ("rollout",)
    assert verify_corpus(out) == []
    with pytest.raises(
        af.FileError, match=r"option edges was \['attention'\] and is \['contribution'\]"
    ):
        af.explain_corpus(texts, out, edges="contribution")
    for edges in (None, "attention"):
        assert af.explain_corpus(texts, out, edges=edges).shards == whole.shards


# ---- what is refused, and what fails ------------------------------------------------------------


def fails(mix: af.LayerMix) -> Any:
    raise ZeroDivisionError("no\nlines")


def is_negative(mix: af.LayerMix) -> Any:
    return -mix.attention


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"edges": "contribution", "residual": 0.5}, "hold the residual inside"),
    ({"edges": ["attention", "norm"], "without": [1]}, "got edges norm as well"),
    ({"edges": "norm", "graph": without_first}, "graph and without make graphs of attention"),
    ({"edges": "contribtion"}, "unknown edges 'contribtion'; choose from attention"),
    ({"edges": 3}, "edge weights must be names"),
    ({"edges": []}, "at least one edge weight is needed"),
    ({"edges": ["norm", "norm"]}, "got 'norm' twice"),
    ({"edges": {"mine": fails}}, "'mine' of blocks.0.attention"),
    ({"edges": is_negative}, "edges 'is_negative' of blocks.0.attention"),
    ({"edges": {"norm": lengths}}, "must have a name of its own; got 'norm'"),
    ({"edges": {"norm": strongest}}, "must have a name of its own; got 'norm'"),
    ({"edges": "tests.own_methods:gone"}, "a user-defined edge weight is named as package"),
    ({"edges": {"mine": lambda mix: lengths(mix)}, "workers": 2}, "the edge weight 'mine', and"),
    ({"edges": af.edge_weight("own", lengths), "workers": 2}, "and lengths cannot be imported"),
    ({"edges": "norm", "layers": {"rollout": 6}}, "norm raw, norm rollout, norm flow; got 'roll"),
    ({"edges": "norm", "layers": {"norm flow": 7}}, "layers must be from 1 to 6"),
    ({"edges": "norm", "normalize": "receptive_field"}, "receptive_field"),
    (
        {"edges": ["attention", "norm"], "methods": {"raw": None, "norm raw": last_layer}},
        "columns of different names; got 'norm raw' twice",
    ),
    ({"edges": "norm", "keep": "norm raw"}, "keep must name columns that the result has not"),
    (
        {"edges": "norm", "importance": {"norm raw": token_length}},
        "different names; got 'norm raw'",
    ),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_one_line_before_anything_is_read(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert_refused(options, message, tmp_path)


@pytest.mark.parametrize(
    ("family", "edges", "message"),
    [("bloom", "contribution", "attention"), ("bert", "gradient", "has no head that predicts")],
)
def test_edges_that_a_model_cannot_give_are_refused_before_the_run(
    family: str, edges: str, message: str, texts: Path, tmp_path: Path
) -> None:
    model = af.Model(build(family), word_tokenizer())
    with pytest.raises(af.AttnFlowError, match=message) as error:
        af.explain_corpus(texts, tmp_path / "out", model=model, edges=["attention", edges])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("family", ["modernbert", "bart", "gemma2"])
def test_hugging_face_models_are_taken_too(family: str, tmp_path: Path) -> None:
    model = af.Model(build(family), word_tokenizer())
    edges = ["effective", "contribution"] + (["gradient"] if model.predicts else [])
    word = "[MASK]" if family == "modernbert" else "old"
    texts = write_csv(tmp_path / "texts.csv", [f"the {word} key", f"the {word} man with the dogs"])
    manifest = af.explain_corpus(texts, tmp_path / "out", model=model, edges=edges, methods="flow")
    assert manifest.errors == 0, errors(tmp_path / "out")
    for row in table(tmp_path / "out").to_pylist():
        found = af.explain(row["text"], model=model, edges=edges, methods="flow", importance=())
        for name in manifest.options.results:
            expected = found.results[name].at(found.position)
            np.testing.assert_allclose(row[name][-1], expected, atol=1e-4)


def fails_on_long(mix: af.LayerMix) -> Any:
    if mix.attention.shape[-1] > 8:
        raise LookupError("too long\nfor me")
    return lengths(mix)


def test_a_row_whose_edges_fail_is_an_error_with_the_reason(texts: Path, tmp_path: Path) -> None:
    af.explain_corpus(texts, tmp_path / "out", edges=["attention", fails_on_long], **TOP)
    found = [row for row in errors(tmp_path / "out") if row["reason"] != "empty"]
    sizes = [len(text.split()) + 1 for text in texts.read_text().splitlines()[1:]]
    assert [row["row"] for row in found] == [row for row, size in enumerate(sizes) if size > 8]
    assert {row["reason"] for row in found} == {"model error"}
    for row in found:
        assert "'fails_on_long' of blocks.0.attention" in row["detail"]
        assert "LookupError: too long for me" in row["detail"]
    assert table(tmp_path / "out").num_rows == 29 - len(found)
    assert verify_corpus(tmp_path / "out") == []


def test_every_kind_of_edges_counts_in_the_memory_of_a_row() -> None:
    model = af.load()
    task = RowTask(
        CorpusRow(0, "a", "the key", None), model.encode("the key to the cabinets"), None
    )
    known: dict[str, Any] = {"methods": "rollout", "layers": 6}
    kinds = [["attention"], ["contribution"], ["attention", "contribution"], [*EDGES, "norm"]]
    asked = [CorpusOptions(edges=edges, **known) for edges in kinds]
    jobs = [plan_job(model, options, *read_job(options))[0] for options in asked]
    needed = [estimate_memory(job, [task, task]) for job in jobs]
    assert needed[0] < needed[1] == needed[2] < needed[3]


# ---- what the folder says -----------------------------------------------------------------------


def test_the_commands_know_the_columns(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, out = partial(say_inside, monkeypatch, capsys), tmp_path / "out"
    run = ["corpus", "run", texts, "--out", out, "--importance", "blank_out"]
    run += ["--edges", "attention,contribution,values=tests.own_methods:lengths"]
    assert "29 texts in 1 shard; 1 error" in said(*run, "--methods", "rollout,flow")
    assert "whole; 30 rows in 1 shard; 1 error" in said("corpus", "verify", out)
    assert "finished: yes" in said("corpus", "status", out)
    names = ["rollout", "flow", "contribution rollout", "contribution flow"]
    names += ["values rollout", "values flow", "blank_out"]
    assert table(out).column_names[9:] == names
    shown = said("evaluate", out, "--methods", "contribution rollout,rollout")
    assert "| blank_out | contribution rollout | 6 |" in shown
    assert " flow " not in shown
    assert "| blank_out | values flow | 6 |" in said("corpus", "evaluate", out)
    top = ("corpus", "top", out, "--min-count", "1", "--method")
    assert "| word | mean contribution flow | count |" in said(*top, "contribution flow")
    assert "holds no method 'norm rollout'; it has rollout, flow, contri" in said(
        *top, "norm rollout", status=2
    )
    line = said(*run[:5], status=2)  # a manifest alone has no code imported
    assert "'values' (tests.own_methods:lengths)" in line
    assert "give edges (--edges) again" in line

    rows = table(out).to_pylist()
    report = evaluate_corpus(out)
    options: dict[str, Any] = {"methods": ["rollout", "flow"], "against": "blank_out"}
    found = [row["text"] for row in rows]
    expected = af.evaluate(af.load(), found, edges=EDGES[:2], layers=[6], **options)
    for _, method, layer, mean, *_ in report.rows():
        if layer == 6 and not method.startswith("values"):
            assert mean == pytest.approx(expected.mean(method, "blank_out", 6), abs=0.01)
    assert report.source is not None
    assert report.source.edges is None
    sums: dict[str, list[float]] = {}
    for row in rows:
        scores = zip(row["tokens"], row["contribution rollout"][5], strict=True)
        for token, value in list(scores)[1:]:
            sums.setdefault(token.lower().partition("/")[0], []).append(value)
    ranked = top_words(out, method="contribution rollout", k=100, min_count=1, common=True)
    assert {word: pytest.approx(np.mean(sums[word])) for word in sums} == {
        word: mean for word, mean, _ in ranked
    }
