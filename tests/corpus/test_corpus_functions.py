"""Corpora with methods, importances and graphs of the user's own: in workers, resumed, refused."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.corpus import on_ray
from attnflow.corpus.folder import make_folder
from attnflow.corpus.functions import import_choices
from attnflow.corpus.job import CorpusOptions, name_results, plan_job, read_job
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import gather_inputs
from attnflow.corpus.scores import evaluate_corpus, top_words
from attnflow.corpus.status import corpus_status, verify_corpus
from tests.corpora import assert_refused, command, errors, sentences, table, write_csv
from tests.families import build, word_tokenizer
from tests.own_methods import last_layer, squared, token_length, without_first

pytest.importorskip("pyarrow")

OWN: dict[str, Any] = {
    "methods": {"rollout": None, "squared": squared, "own": last_layer},
    "importance": {"length": token_length},
    "shard_rows": 10,
}
REFERENCES = {
    "squared": "tests.own_methods:squared",
    "own": "tests.own_methods:last_layer",
    "length": "tests.own_methods:token_length",
}


def names_are(folder: Path) -> list[str]:
    return list(af.read_corpus(folder).column_names[9:])


# ---- in workers, in the manifest, in the table --------------------------------------------------


def test_functions_of_a_module_work_in_workers_and_are_columns(texts: Path, tmp_path: Path) -> None:
    one = af.explain_corpus(texts, tmp_path / "one", **OWN)
    two = af.explain_corpus(texts, tmp_path / "two", workers=2, **OWN)
    assert one.shards == two.shards
    assert one.options.functions == two.options.functions == REFERENCES
    assert names_are(tmp_path / "two") == ["rollout", "squared", "own", "length"]
    model = af.load()
    for row in table(tmp_path / "two").to_pylist()[::7]:
        graph = af.capture(model, row["text"]).graph()
        for name, method in {"squared": squared, "own": last_layer}.items():
            expected = method(graph, positions=[0]).values[:, 0]
            np.testing.assert_allclose(row[name], expected, atol=1e-6)
        assert row["length"] == [float(len(token)) for token in row["tokens"]]
    assert verify_corpus(tmp_path / "two") == []
    report = evaluate_corpus(tmp_path / "two", methods=["squared"], against=["length"])
    assert {row[:2] for row in report.rows()} == {("length", "squared")}
    assert top_words(tmp_path / "two", method="own", min_count=1)


def test_an_actor_of_a_cluster_imports_them_too(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = af.explain_corpus(texts, tmp_path / "local", **OWN)
    rows, threads = list(gather_inputs(texts).rows()), torch.get_num_threads()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer: answer))
    options = CorpusOptions(methods=OWN["methods"], importance=OWN["importance"])
    job, _ = plan_job(af.load(), options, *read_job(options, importable=True))
    write = on_ray.ShardWriter(make_folder(tmp_path / "ray"), [0]).write
    writer = SimpleNamespace(write=SimpleNamespace(remote=write))
    facts = local.model["fingerprint"], local.versions
    try:
        sent = pickle.loads(pickle.dumps(job))
        actor = on_ray.Explainer("verb-number", *facts, sent, writer)
        answer = actor.explain(0, on_ray.encode_corpus_rows(rows[:10]), None)
        assert json.loads(answer["shard"] or "")["sha256"] == local.shards[0].sha256
        functions = {**job.stored.functions, "own": "tests.own_methods:gone"}
        gone = replace(job, stored=replace(job.stored, functions=functions))
        lost = on_ray.Explainer("verb-number", *facts, gone, writer).explain(0, b"[]", None)
        assert "on a machine of the cluster: a user-defined method" in str(lost["problem"])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore::attnflow.CorpusWarning")
def test_a_run_is_resumed_by_the_reference_or_by_the_function(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = af.explain_corpus(texts, out, **OWN)
    strings = {
        "methods": ["rollout", REFERENCES["squared"], f"own={REFERENCES['own']}"],
        "importance": {"length": REFERENCES["length"]},
    }
    for number, (given, workers) in enumerate([(strings, 2), (OWN, 1), (strings, 1)]):
        (out / f"shard-{number:05d}.parquet").unlink()
        assert af.explain_corpus(texts, out, workers=workers, **given).shards == whole.shards
    others: list[tuple[dict[str, Any], str]] = [
        ({"methods": {**OWN["methods"], "own": squared}}, "option functions was"),
        ({"methods": ["rollout", squared]}, "option methods was"),
        (
            {
                "importance": {
                    "length": lambda model, inputs, target: token_length(model, inputs, 0)
                }
            },
            r"'length': 'test_a_run.*<lambda>'",
        ),
    ]
    for other, message in others:
        with pytest.raises(af.FileError, match=message):
            af.explain_corpus(texts, out, **{**OWN, **other})


MODULE = """
import numpy as np
import attnflow as af

def entropy(graph, *, layers=None, positions=None, bottom=0, normalize="sum"):
    return af.raw(graph, layers=layers, positions=positions, normalize=normalize)

class Kept:
    @staticmethod
    def graph(attention):
        return attention.graph(residual=0.25)

def ones(model, inputs, target):
    return [np.ones(len(model.encode(text).tokens)) for text in inputs]
"""


def test_the_command_finds_functions_in_the_current_folder(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(MODULE)
    options = ["--methods", "rollout,my_methods:entropy,second=my_methods:entropy"]
    options += ["--importance", "my_methods:ones", "--graph", "my_methods:Kept.graph"]
    run = command("run", texts, "--out", tmp_path / "out", "--shard-rows", "10")
    run.insert(1, "-P")  # as the installed command runs: without the current folder

    def start(*more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*run, *more], cwd=tmp_path, capture_output=True, text=True, env=environment
        )

    source = str(Path(af.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source}
    done = start(*options, "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert names_are(tmp_path / "out") == ["removed", "rollout", "entropy", "second", "ones"]
    assert Manifest.read(tmp_path / "out").options.graph == "my_methods:Kept.graph"
    row = table(tmp_path / "out").to_pylist()[0]
    graph = af.capture(af.load(), row["text"]).graph(residual=0.25)
    np.testing.assert_allclose(row["rollout"], af.rollout(graph).values[:, 0], atol=1e-6)
    refused = start()
    assert refused.returncode == 2
    assert "give methods (--methods) again" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert start(*options).returncode == 0


# ---- a manifest is data -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"methods": ["rollout", "harm"], "functions": {"harm": "harmful:method"}},
        {"methods": ["rollout", "harmful:method"]},
        {"methods": ["harm=harmful:method"]},
        {"importance": ["harm"], "functions": {"harm": "harmful:method"}},
        {"importance": ["harmful:method"]},
        {"graph": "harmful:method"},
        {"edges": ["attention", "harm"], "own_edges": {"harm": "harmful:method"}},
        {"edges": ["harmful:method"]},
    ],
)
def test_a_manifest_alone_has_no_code_imported(
    changes: dict[str, Any], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, traces = tmp_path / "out", tmp_path / "traces"
    (tmp_path / "harmful.py").write_text(f"open({str(traces)!r}, 'w')\nmethod = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    af.explain_corpus(texts, out, methods="rollout", layers=6, shard_rows=10)
    content = json.loads((out / "manifest.json").read_text())
    content["options"] |= changes
    columns = name_results(content["options"]["edges"], content["options"]["methods"])
    content["options"]["layers"] = {column: [6] for column in columns}
    (out / "manifest.json").write_text(json.dumps(content))
    option = next(iter(changes))
    for workers in (1, 2):
        with pytest.raises(af.OptionError, match=rf"give {option} \(--{option}\) again$") as error:
            af.explain_corpus(texts, out, workers=workers)
        assert "\n" not in str(error.value)
    given: dict[str, Any] = {"methods": "rollout", "graph": without_first, "position": "max"}
    with pytest.raises(af.AttnFlowError):
        af.explain_corpus(texts, out, importance="blank_out", **given)
    corpus_status(out)
    verify_corpus(out)
    for use in (af.read_corpus, evaluate_corpus, top_words):
        try:
            use(out)
        except af.AttnFlowError:
            continue
    assert not traces.exists()
    assert "harmful" not in sys.modules


# ---- what cannot be imported --------------------------------------------------------------------


def local(graph: Any, **options: Any) -> af.TokenAttention:
    return af.raw(graph, **{**options, "bottom": None})


local.__module__ = "__main__"  # as if it were typed in a notebook


class Method:
    """A method that is an object."""

    def __call__(self, graph: Any, **options: Any) -> af.TokenAttention:
        return local(graph, **options)


@pytest.mark.parametrize(
    "function",
    [lambda graph, **options: local(graph, **options), local, partial(local), Method()],
    ids=["lambda", "main", "partial", "object"],
)
def test_what_no_worker_can_import_works_in_one_process(
    function: Any, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = {"methods": {"mine": function}, "shard_rows": 10}
    with pytest.raises(
        af.OptionError, match=r"each worker imports the method 'mine', and .* can"
    ) as error:
        af.explain_corpus("nowhere.csv", out, workers=2, **options)
    assert "give it as 'package.module:function'; or workers=1" in str(error.value)
    whole = af.explain_corpus(texts, out, **options)
    assert ":" not in whole.options.functions["mine"]
    with pytest.raises(af.OptionError, match=r"'mine' \(.*\), .*: give methods \(--methods\)"):
        af.explain_corpus(texts, out)
    (out / "shard-00001.parquet").unlink()
    with pytest.warns(af.CorpusWarning, match="shard-00001"):
        assert af.explain_corpus(texts, out, **options).shards == whole.shards
    with pytest.raises(af.OptionError, match="each worker imports the function that makes graphs"):
        af.explain_corpus(texts, tmp_path / "g", graph=lambda each: each.graph(), workers=2)


# ---- mistakes are one line, before anything is read ----------------------------------------------


def too_few(
    graph: Any, *, layers: Any, positions: Any, bottom: Any = 0, normalize: Any = None
) -> Any:
    return af.raw(graph, layers=[1], positions=[0])


def of_others(graph: Any, **options: Any) -> Any:
    return af.raw(graph, layers=[1], positions=[0])


def array(graph: Any, **options: Any) -> Any:
    return graph.weights


def broken(graph: Any, **options: Any) -> Any:
    raise ZeroDivisionError("no\nlines")


def short_scores(model: Any, inputs: Any, target: Any) -> Any:
    return [np.zeros(1) for _ in inputs]


def no_graph(attention: af.Attention) -> Any:
    return attention.weights


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"methods": {"mine": lambda graph: graph}}, "'mine' must be called as f(graph, *, layers"),
    ({"methods": {"mine": of_others}}, "mine must give the positions that are asked for"),
    ({"methods": {"mine": too_few}, "layers": [2]}, "mine must give the layers that are asked for"),
    ({"methods": {"mine": array}}, "mine must return a TokenAttention"),
    ({"methods": {"mine": broken}}, "mine failed: ZeroDivisionError: no lines"),
    ({"methods": {"mine": 3}}, "a user-defined method must be a function"),
    ({"methods": 3}, "methods must be names"),
    ({"methods": [squared, "squared=tests.own_methods:squared"]}, "got 'squared' twice"),
    ({"methods": {"": squared}}, "visible text; got ''"),
    ({"methods": {"a\nb": squared}}, "visible text; got 'a\\nb'"),
    ({"methods": {"tokens": squared}}, "that of a column of results; got 'tokens'"),
    ({"methods": {"rollout": squared}}, "a name of its own; got 'rollout'"),
    ({"methods": "nowhere.at_all:function"}, "'nowhere.at_all:function' cannot be imported: Mod"),
    ({"methods": "tests.own_methods:nothing"}, "cannot be imported: AttributeError"),
    ({"methods": ["tests.own_methods:np"]}, "must name a function; got module"),
    ({"methods": {"blank_out": squared}, "importance": "blank_out"}, "different names; got 'blank"),
    ({"methods": {"mine": squared}, "keep": "mine"}, "keep must name columns that the result has"),
    ({"methods": {"removed": squared}, "without": [1]}, "got 'removed'"),
    ({"importance": {"mine": short_scores}}, "mine must give one finite number per token"),
    ({"importance": {"mine": lambda model: 1}}, "'mine' must be called as f(model, inputs, target"),
    ({"graph": no_graph}, "graph must return an AttentionGraph; got ndarray"),
    ({"graph": "tests.own_methods"}, "'tests.own_methods'"),
    ({"graph": without_first, "residual": 0.25}, "so residual and without are not used"),
    ({"without": [0]}, "without must leave the position that is explained, 0 here; got [0]"),
    ({"without": [2], "position": 2}, "without must leave the position that is explained, 2"),
    ({"without": [-1]}, "without must be positions from 0 on; got -1"),
    ({"without": "0"}, "without must be whole numbers; got '0'"),
    ({"layers": {"rolout": [6]}}, "raw, rollout, flow; got 'rolout'"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_one_line_before_anything_is_read(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert_refused(options, message, tmp_path)


def fails_on_long(graph: Any, **options: Any) -> Any:
    if graph.size > 8:
        raise LookupError("too long\nfor me")
    return last_layer(graph, **options)


def score_fails_on_long(model: Any, inputs: Any, target: Any) -> Any:
    if max(len(text.split()) for text in inputs) > 7:
        raise LookupError("too long\nfor me")
    return token_length(model, inputs, target)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["methods", "importance"])
def test_a_function_that_fails_on_a_row_stops_the_run(
    kind: str, workers: int, texts: Path, tmp_path: Path
) -> None:
    own = {"methods": fails_on_long, "importance": score_fails_on_long}[kind]
    options: dict[str, Any] = {"methods": "rollout", "layers": 6, "shard_rows": 10}
    line = r"^mine failed on row \d+ \(texts\.csv:\d+\): LookupError: too long for me$"
    with pytest.raises(af.AttnFlowError, match=line):
        af.explain_corpus(
            texts, tmp_path / "out", workers=workers, **{**options, kind: {"mine": own}}
        )
    assert corpus_status(tmp_path / "out").shards_done < 3


def greedy(graph: Any, **options: Any) -> Any:
    if graph.size > 8:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    return last_layer(graph, **options)


def test_a_function_that_runs_out_of_memory_costs_its_row(texts: Path, tmp_path: Path) -> None:
    af.explain_corpus(texts, tmp_path / "out", methods={"greedy": greedy})
    assert {each["reason"] for each in errors(tmp_path / "out")} == {"empty", "too large"}
    assert verify_corpus(tmp_path / "out") == []


# ---- graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["without", "function", "reference"])
def test_positions_are_taken_out_of_every_graph(kind: str, tmp_path: Path) -> None:
    texts = write_csv(tmp_path / "texts.csv", ["the", "the key", *sentences(10), "old house"])
    options: dict[str, Any] = {"position": "max", "importance": "blank_out", "shard_rows": 5}
    kinds: dict[str, dict[str, Any]] = {
        "without": {"without": [0]},
        "function": {"graph": without_first},
        "reference": {"graph": "tests.own_methods:without_first"},
    }
    options |= kinds[kind]
    manifest = af.explain_corpus(texts, tmp_path / "out", workers=2, **options)
    assert manifest.options.graph == (
        None if kind == "without" else "tests.own_methods:without_first"
    )
    assert manifest.options.residual == (0.5 if kind == "without" else None)
    model = af.load()
    rows = table(tmp_path / "out").to_pylist()
    assert len(rows) == 13
    for row in rows[::4]:
        assert row["removed"] == [0]
        graph = af.capture(model, row["text"]).graph(without=[0])
        expected = af.rollout(graph).values.max(axis=1)
        np.testing.assert_allclose(row["rollout"], expected, atol=1e-6)
        assert not expected[:, 0].any()
    report = evaluate_corpus(tmp_path / "out", special_tokens=True)  # which are at position 0 here
    same = evaluate_corpus(tmp_path / "out")
    for key, values in report.correlations.items():
        np.testing.assert_array_equal(values, same.correlations[key])
    expected_report = af.evaluate(
        model,
        [row["text"] for row in rows],
        methods="rollout",
        against="blank_out",
        position="max",
        without=[0],
    )
    means = [row[3] for row in same.rows() if row[1] == "rollout"]
    np.testing.assert_allclose(means, [row[3] for row in expected_report.rows()], atol=1e-3)


def test_texts_without_these_positions_are_errors_of_their_rows(tmp_path: Path) -> None:
    texts = write_csv(tmp_path / "texts.csv", ["the", "the key", "the key to", "the old key to"])
    model = af.Model(build("llama"), word_tokenizer())  # which is explained at its last token
    size = [len(model.encode(text).tokens) for text in ("the", "the key", "the key to")]
    af.explain_corpus(texts, tmp_path / "out", model=model, without=[size[1] - 1], methods="raw")
    assert table(tmp_path / "out").column("row").to_pylist() == [2, 3]
    assert [(each["row"], each["reason"], each["detail"]) for each in errors(tmp_path / "out")] == [
        (0, "too short", f"without must be from 0 to {size[0] - 1}; got {size[1] - 1}"),
        (1, "too short", f"without must leave the position that is explained; got {size[1] - 1}"),
    ]
    assert verify_corpus(tmp_path / "out") == []


def test_layers_may_be_given_by_method(texts: Path, tmp_path: Path) -> None:
    layers: dict[str, list[int] | int] = {"rollout": [2, 6], "flow": 3}
    methods = ["raw", "rollout", "flow"]
    manifest = af.explain_corpus(texts, tmp_path / "out", methods=methods, layers=layers, limit=3)
    assert manifest.options.layers == {
        "raw": (1, 2, 3, 4, 5, 6),
        "rollout": (2, 6),
        "flow": (3,),
    }
    af.explain_corpus(texts, tmp_path / "out")


def test_references_have_names() -> None:
    chosen, references = import_choices(
        ["raw", REFERENCES["own"], f"b={REFERENCES['own']}", squared], "method"
    )
    assert chosen == {"raw": None, "last_layer": last_layer, "b": last_layer, "squared": squared}
    assert references == {"last_layer": REFERENCES["own"], "b": REFERENCES["own"]}
    assert import_choices({"c": REFERENCES["own"], "raw": None}, "method") == (
        {"c": last_layer, "raw": None},
        {"c": REFERENCES["own"]},
    )
