"""`attnflow intervene`: what Python gives, files by their endings, and one line for bad input."""

import json
from pathlib import Path

import pytest

import attnflow as af
from tests.console import say_inside

TEXT = "the keys to the cabinet"


def test_intervene_prints_what_python_gives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--blank", "keys", "--cut", "6,0,5", "--heads-off", "4.2,5.0"]
    printed = say_inside(monkeypatch, capsys, "intervene", TEXT, *options)
    result = af.intervene(
        "verb-number", TEXT, blank="keys", cut=[(6, 0, 5)], heads_off=[(4, 2), (5, 0)]
    )
    assert result.summary() in printed
    assert f"| 2 | keys | {next(r for r in result.rows() if r.key == 2).before:.4f} |" in printed


@pytest.mark.parametrize("edges", ["attention", "relevance"])
def test_intervene_cuts_the_flow_to_a_word(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    edges: str,
) -> None:
    out = tmp_path / "cut.json"
    options = ["--cut-flow", "keys", "--edges", edges, "--out", out]
    assert "written:" in say_inside(monkeypatch, capsys, "intervene", TEXT, *options)
    graph = af.attention_graph("verb-number", TEXT, edges=edges)
    best = af.max_flow(graph, source=(6, 0), target=(0, [2]))
    expected = af.intervene("verb-number", TEXT, cut=best)
    found = json.loads(out.read_text())
    assert expected.after.logit is not None
    assert found["after"]["logit"] == pytest.approx(expected.after.logit, abs=1e-5)
    assert found["change"]["residual_share"] == pytest.approx(expected.change.residual_share)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing is changed: give --blank, --cut, --cut-flow or --heads-off"),
        (["--cut", "1,2"], "an edge to cut is (layer, query, key)"),
        (["--cut", "7,0,0"], "must be from 1 to 6; got 7"),
        (["--heads-off", "3"], "--heads-off takes layer.head, for instance 4.2,5.0; got '3'"),
        (["--blank", "the"], "must stand in the text once; got 'the', which stands there 2 times"),
        (["--blank", "2:9"], "a span is (start, end) within the 6 positions"),
        (["--cut-flow", "door"], "must stand in the text once; got 'door'"),
        (["--cut-flow", "keys", "--edges", "flow"], "unknown edge weight 'flow'"),
        (["--blank", "keys", "--out", "x.npz"], "the ending must be one of .html"),
        (["--blank", "keys", "--reference", "the"], "reference is for heads that are switched off"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    printed = say_inside(monkeypatch, capsys, "intervene", TEXT, *arguments, status=2)
    assert message in printed
    assert printed.count("\n") == 1
