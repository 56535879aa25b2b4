"""The command line, run as a user runs it: output, files, and one line with exit status 2 for what is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import webbrowser
from pathlib import Path

import numpy as np
import pytest

import attnflow as af
from attnflow import progress
from attnflow.cli import commands as cli
from attnflow.cli import explain as explaining
from tests.console import EXAMPLE, inside
from tests.oracles import attention


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "attnflow", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120"},
        check=False,
    )


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    path = tmp_path / "causal.npy"
    np.save(path, attention("causal", 3, 5, np.random.default_rng(0)))
    return path


def test_version_and_help(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version").stdout.strip() == f"attnflow {af.__version__}"
    helped = run("--help")
    assert helped.returncode == 0
    for command in (
        "raw",
        "rollout",
        "flow",
        "capture",
        "generate",
        "explain",
        "evaluate",
        "corpus",
        "train",
        "reproduce",
        "demo",
    ):
        assert command in helped.stdout
        assert inside(monkeypatch, *command.split(), "--help") == 0
    for command in (
        "corpus run",
        "corpus status",
        "corpus verify",
        "corpus evaluate",
        "corpus top",
    ):
        assert inside(monkeypatch, *command.split(), "--help") == 0
    for command in (
        "train verb-number",
        "train sentiment",
        "reproduce table1",
        "reproduce table2",
        "reproduce table3",
        "reproduce statements",
    ):
        assert inside(monkeypatch, *command.split(), "--help") == 0


def test_demo_explains_two_sentences_of_both_numbers() -> None:
    shown = run("demo")
    assert shown.returncode == 0, shown.stderr
    for word in (
        "singular 0.97. It read mostly",
        "plural 0.98. It read mostly keys",
        "raw",
        "rollout",
        "flow",
        "blank out",
        "cabinet",
        "█",
    ):
        assert word in shown.stdout


def test_explain_shows_a_strip_for_each_method(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert inside(monkeypatch, "explain", "the keys to the cabinet", "--layer", "3") == 0
    shown = capsys.readouterr().out
    found = af.explain("the keys to the cabinet", importance=())
    assert shown.startswith(found.summary())
    assert "layer 3 of 6, position 0, [CLS], read:" in shown
    for method in ("raw", "rollout", "flow"):
        line = next(line for line in shown.splitlines() if line.strip().startswith(f"{method} "))
        # the explained position itself is not shaded
        best = found.results[method].top(2, position=0, layer=3)
        _, token, value = next(each for each in best if each[0] != 0)
        assert line.rstrip().endswith(f"{token} {value:.3f}")
        assert f"{token}█" in line
    assert "blank out" not in shown
    assert (
        inside(
            monkeypatch,
            "explain",
            "the lost key",
            "--model",
            folders / "decoder",
            "--importance",
            "--words",
            "--position",
            "2",
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "layer 3 of 3, position 2" in shown
    assert "input gradient" in shown


def test_a_page_is_written_and_opened(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def browse(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", browse)
    assert (
        inside(
            monkeypatch, "explain", "the key", "--heads", "--out", tmp_path / "key.html", "--open"
        )
        == 0
    )
    out = tmp_path / "story.html"
    assert (
        inside(
            monkeypatch,
            "generate",
            folders / "decoder",
            "the key",
            "--max-new-tokens",
            "2",
            "--out",
            out,
            "--open",
        )
        == 0
    )
    assert opened == [(tmp_path / "key.html").as_uri(), out.as_uri()]
    assert out.read_text().startswith("<!doctype html>")
    assert (
        inside(
            monkeypatch,
            "generate",
            folders / "decoder",
            "the key",
            "--max-new-tokens",
            "2",
            "--out",
            tmp_path / "s.png",
        )
        == 0
    )


@pytest.mark.parametrize("ending", [".csv", ".json", ".npz", ".html", ".png", ".svg", ".pdf"])
def test_explain_writes_by_ending(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / f"x{ending}"
    assert inside(monkeypatch, "explain", "the key", "--target", "plural", "--out", out) == 0
    assert out.stat().st_size > 100
    if ending == ".json":
        assert json.loads(out.read_text())["blank_out"]["target"] == "plural"


@pytest.mark.parametrize("method", ["raw", "rollout", "flow"])
def test_table_shows_the_row_that_python_gives(
    method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert inside(monkeypatch, method, EXAMPLE, "--layer", "3", "--position", "2") == 0
    expected = af.METHODS[method](af.Attention.load(EXAMPLE), layers=[3], positions=[2])
    lines = capsys.readouterr().out.splitlines()
    assert "from layer 3, position 2 (keys)" in lines[0]
    assert [float(line.split()[2].rstrip("*")) for line in lines[2:15]] == [
        round(value, 4) for value in expected.at(2)
    ]


def test_defaults_are_the_top_layer_and_the_focal_position(
    causal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(monkeypatch, "rollout", EXAMPLE)
    assert "from layer 6, position 0 ([CLS]), to layer 0" in capsys.readouterr().out
    inside(monkeypatch, "rollout", causal)
    assert "from layer 3, position 4 (4), to layer 0" in capsys.readouterr().out


def test_options_reach_the_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    options = [
        "--layer",
        "5",
        "--position",
        "3",
        "--bottom",
        "2",
        "--heads",
        "max",
        "--residual",
        "0.3",
        "--without",
        "0,12",
    ]
    assert (
        inside(
            monkeypatch,
            "flow",
            EXAMPLE,
            *options,
            "--normalize",
            "none",
            "--workers",
            "2",
            "--out",
            out,
        )
        == 0
    )
    graph = af.Attention.load(EXAMPLE).graph(heads="max", residual=0.3, without=[0, 12])
    with pytest.warns(af.SaturationWarning):
        expected = af.flow(graph, layers=[5], positions=[3], bottom=2, normalize=None)
    written = json.loads(out.read_text())
    assert np.array_equal(written["values"], expected.values)
    assert (written["layers"], written["positions"], written["bottom"]) == ([5], [3], 2)
    assert (
        inside(
            monkeypatch,
            "raw",
            EXAMPLE,
            "--heads",
            "7",
            "--normalize",
            "receptive_field",
            "--out",
            out,
        )
        == 0
    )
    assert json.loads(out.read_text())["normalize"] == "receptive_field"


@pytest.mark.parametrize("ending", ["csv", "json", "npz"])
def test_out_writes_by_ending_and_replaces(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / f"out.{ending}"
    out.write_text("old")
    assert inside(monkeypatch, "rollout", EXAMPLE, "--out", out) == 0
    assert out.stat().st_size > 100
    assert [file.name for file in tmp_path.iterdir()] == [out.name]


def test_saturation_is_a_note_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "deep.npy", np.full((8, 9, 9), 1 / 9))
    assert inside(monkeypatch, "flow", tmp_path / "deep.npy") == 0
    captured = capsys.readouterr()
    assert "note: attention flow from layer 8 is saturated" in " ".join(captured.err.split())
    assert "* at the bound" in captured.out


def test_tokens_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = ["[red]bold[/red]", "\x1b[31m", "line\nbreak", "\ud800", "</script>"]
    af.Attention(np.full((1, 5, 5), 0.2), tokens=tokens).save(tmp_path / "odd.npz")
    assert inside(monkeypatch, "raw", tmp_path / "odd.npz") == 0
    shown = capsys.readouterr().out
    assert "[red]bold[/red]" in shown
    assert "\x1b[31m" not in shown
    assert "line\\nbreak" in shown
    assert run("raw", tmp_path / "odd.npz").returncode == 0


def test_a_terminal_without_unicode_gets_plain_bars(causal: Path) -> None:
    command = [sys.executable, "-m", "attnflow", "rollout", str(causal)]
    shown = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True
    )
    assert b"####" in shown.stdout


# ---- models ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models on disk, with a tokenizer of words: `encoder` and `decoder`."""
    from tests.families import build, word_tokenizer

    place = tmp_path_factory.mktemp("models")
    for name, family in (("encoder", "bert"), ("decoder", "llama")):
        build(family).save_pretrained(place / name)
        word_tokenizer().save_pretrained(place / name)
    return place


def test_capture_writes_what_the_other_commands_read(
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "weights.npz"
    assert (
        inside(
            monkeypatch,
            "capture",
            folders / "encoder",
            "the key is lost",
            "--heads",
            "all",
            "--out",
            out,
        )
        == 0
    )
    assert "Attention: 3 layers, 4 heads, 6 positions" in capsys.readouterr().out
    expected = af.capture(af.load(folders / "encoder"), "the key is lost", heads=None)
    assert (af.Attention.load(out).weights == expected.weights).all()
    assert inside(monkeypatch, "flow", out, "--layer", "2", "--heads", "max") == 0


def test_generate_shows_a_strip_for_each_token_and_writes_files(
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert (
        inside(
            monkeypatch,
            "generate",
            folders / "decoder",
            "the key to cabinets lost",
            "--max-new-tokens",
            "4",
            "--keep-common",
            "--compared-with",
            "none",
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 tokens with a mean probability of 0.")
    start = next(at for at, line in enumerate(lines) if line.endswith("layer 3 of 3, by token:"))
    assert all("cabinets" in line and "█" in line for line in lines[start + 1 : start + 5])
    for reference, told in (("others", "against the others:"), ("even", "against even attention:")):
        given = ["--max-new-tokens", "4", "--compared-with", reference, "--exclude", "none"]
        prompt = "the key to cabinets lost"
        assert inside(monkeypatch, "generate", folders / "decoder", prompt, *given) == 0
        shown = capsys.readouterr().out
        assert f"contribution rollout, layer 3 of 3, {told}" in shown
        assert "left out" not in shown
    one = ["the key to cabinets", "--max-new-tokens", "1"]
    assert inside(monkeypatch, "generate", folders / "decoder", *one) == 0
    assert "against even attention:" in capsys.readouterr().out  # there are no others
    for ending in ("csv", "json", "npz"):
        out = tmp_path / f"story.{ending}"
        assert (
            inside(
                monkeypatch,
                "generate",
                folders / "decoder",
                "the key",
                "--max-new-tokens",
                "2",
                "--method",
                "raw",
                "--out",
                out,
            )
            == 0
        )
        assert out.stat().st_size > 50
    lines = (tmp_path / "story.csv").read_text().splitlines()
    assert lines[0] == "method,layer,position,query,key,token,value,source"
    out = tmp_path / "one.csv"
    given = ["--max-new-tokens", "2", "--layer", "2", "--out", str(out)]
    assert inside(monkeypatch, "generate", folders / "decoder", "the key", *given) == 0
    assert {line.split(",")[1] for line in out.read_text().splitlines()[1:]} == {"2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", ""], "must not be empty"),
        (["explain", "key " * 70], "takes at most 64 tokens; got 71"),
        (
            ["explain", "the key", "--layer", "7"],
            "--layer must be one of 1..6, those of this result; got 7",
        ),
        (["explain", "the key", "--position", "3"], "position must be from 0 to 2; got 3"),
        (
            ["explain", "the key", "--target", "dual"],
            "unknown --target 'dual'; choose from singular, plural",
        ),
        (["explain", "the key", "--target", "2"], "target must be from 0 to 1"),
        (["explain", "the key", "--out", "x.docx"], "the ending must be one of"),
        (
            ["explain", "the key", "--layer", "2", "--out", "x.html"],
            "--layer, --words, --compared-with and --exclude choose what the terminal shows",
        ),
        (
            ["explain", "the key", "--exclude", "none", "--out", "x.html"],
            "choose what the terminal shows",
        ),
        (
            ["explain", "the key", "--exclude", "sink"],
            "unknown --exclude 'sink'; choose from sinks, special, explained, none, positions",
        ),
        (["explain", "the key", "--exclude", "7"], "exclude must be from -3 to 2; got 7"),
        (
            ["explain", "the key", "--compared-with", "all"],
            "--compared-with must be even, others or none; got 'all'",
        ),
        (
            ["explain", "the key", "--compared-with", "others", "--words"],
            "--compared-with others compares tokens",
        ),
        (
            [
                "generate",
                "decoder",
                "the key",
                "--max-new-tokens",
                "1",
                "--compared-with",
                "others",
            ],
            "'others' are the other rows of a layer, and this result has one",
        ),
        (
            ["generate", "decoder", "the key", "--exclude", "none", "--out", "x.csv"],
            "choose what the terminal shows; a file holds every prompt token",
        ),
        (
            ["generate", "decoder", "the key", "--residual", "0.1", "--out", "x.html"],
            "a page shows every method and layer",
        ),
        (
            ["explain", "the key", "--open"],
            "--open shows a page in the browser, so it needs --out with a name that ends in .html",
        ),
        (["explain", "the key", "--model", "no-such-model"], "cannot load no-such-model"),
        (["capture", "encoder", "", "--out", "x.npz"], "must not be empty"),
        (
            ["capture", "encoder", "the key", "--heads", "median", "--out", "x.npz"],
            "unknown --heads 'median'; choose from mean, max, min, all",
        ),
        (
            ["capture", "encoder", "key " * 60, "--out", "x.npz"],
            "takes at most 40 tokens; got 62: pass --truncation to",
        ),
        (
            ["capture", "encoder", "the key", "--out", "x.csv"],
            "the ending must be one of .npz; got .csv",
        ),
        (["capture", ".", "the key", "--out", "x.npz"], "holds no weights"),
        (["generate", "encoder", "the key"], "generate needs a causal LM"),
        (["generate", "decoder", "the key", "--max-new-tokens", "0"], "at least 1; got 0"),
        (
            ["generate", "decoder", "the key", "--method", "rolout"],
            "unknown method 'rolout'; choose from raw, rollout, flow",
        ),
        (
            ["generate", "decoder", "the key", "--layer", "9", "--max-new-tokens", "1"],
            "layer must be from 1 to 3; got 9",
        ),
    ],
)
def test_bad_input_to_models_is_one_line_and_exit_status_2(
    arguments: list[str],
    message: str,
    folders: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folders)
    assert inside(monkeypatch, *arguments) == 2
    captured = capsys.readouterr().err.splitlines()
    assert captured[-1].startswith("attnflow: ")
    assert message in captured[-1]


# ---- bad input ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    good = attention("peaky", 3, 4, np.random.default_rng(0))
    arrays = {
        "nan.npy": np.where(np.eye(4) > 0, np.nan, good),
        "infinite.npy": np.where(np.eye(4) > 0, np.inf, good),
        "negative.npy": good - 0.5,
        "sums.npy": good * 1.5,
        "oblong.npy": good[:, :3],
        "axes.npy": good[0],
        "empty.npy": np.empty((0, 4, 4)),
        "words.npy": np.array(["a", "b"]),
        "fused.npy": good,
    }
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}]), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", weights=np.array([{"a": 1}], dtype=object))
    np.savez(tmp_path / "two.npz", a=good, b=good)
    np.savez(tmp_path / "tokens.npz", weights=good, tokens=np.array(["just one"]))
    np.savez(tmp_path / "newer.npz", weights=good, format=np.array(99))
    np.savez(tmp_path / "whole.npz", weights=good)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:300])
    (tmp_path / "cut.npy").write_bytes((tmp_path / "fused.npy").read_bytes()[:200])
    np.savez_compressed(tmp_path / "packed.npz", weights=good)
    packed = bytearray((tmp_path / "packed.npz").read_bytes())
    packed[60:90] = bytes(30)
    (tmp_path / "flipped.npz").write_bytes(packed)
    (tmp_path / "header.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f8',")
    for name, fields in {
        "format": {"format": np.array([1, 2])},
        "lengths": {"token_bytes": np.frombuffer(b"abcd", np.uint8)},
        "longer": {
            "token_bytes": np.frombuffer(b"abcd", np.uint8),
            "token_lengths": np.array([9, 9, 9, 9]),
        },
        "letters": {"words": np.array(list("abcd"))},
        "windows": {"window": np.array(["a", "b", "c"])},
        "maybe": {"causal": np.array([True, False])},
        "fusions": {"fused": np.array(["a", "b"])},
    }.items():
        np.savez(tmp_path / f"{name}.npz", weights=good, **fields)  # type: ignore[arg-type]
    (tmp_path / "text.npz").write_text("not an array at all")
    (tmp_path / "nothing.npy").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    return tmp_path


BAD = [
    (["flow", "missing.npz"], "cannot read missing.npz: No such file or directory"),
    (["flow", "folder"], "folder"),
    (["flow", "nan.npy"], "finite and not negative; got nan at layer 1, query 0, key 0"),
    (["flow", "infinite.npy"], "finite and not negative"),
    (["flow", "negative.npy"], "finite and not negative"),
    (["rollout", "sums.npy"], "layer 1, query 0 sums to 1.5"),
    (["rollout", "oblong.npy"], "square"),
    (["rollout", "axes.npy"], "4 axes"),
    (["rollout", "empty.npy"], "empty"),
    (["rollout", "words.npy"], "real numbers"),
    (["rollout", "tokens.npz"], "tokens must be one name per position, here 4; got 1"),
    (["rollout", "two.npz"], "one array, or one named 'weights'; it holds a, b"),
    (["rollout", "newer.npz"], "newer attnflow"),
    (["raw", "objects.npy"], "pickled objects"),
    (["raw", "objects.npz"], "pickled objects"),
    (["raw", "cut.npz"], "damaged"),
    (["raw", "cut.npy"], "damaged"),
    (["raw", "text.npz"], "pickled objects or no array"),
    (["raw", "flipped.npz"], "damaged"),
    (["raw", "header.npy"], "damaged"),
    (["raw", "format.npz"], "not a file of attention weights that attnflow wrote"),
    (["raw", "lengths.npz"], "not a file of attention weights that attnflow wrote"),
    (["raw", "longer.npz"], "the lengths of its tokens do not match"),
    (["raw", "letters.npz"], "not a file of attention weights that attnflow wrote"),
    (["raw", "windows.npz"], "not a file of attention weights that attnflow wrote"),
    (["raw", "maybe.npz"], "not a file of attention weights that attnflow wrote"),
    (["raw", "fusions.npz"], "not a file of attention weights that attnflow wrote"),
    (["raw", "nothing.npy"], "damaged"),
    (["flow", "fused.npy", "--residual", "1"], "residual must be"),
    (["flow", "fused.npy", "--residual", "nan"], "residual must be"),
    (["flow", "fused.npy", "--layer", "4"], "--layer must be from 1 to 3; got 4"),
    (["flow", "fused.npy", "--position", "4"], "--position must be from -4 to 3; got 4"),
    (["flow", "fused.npy", "--bottom", "3"], "bottom must be from 0 to 2; got 3"),
    (["flow", "fused.npy", "--bottom", "2", "--layer", "2"], "bottom must be below every layer"),
    (["flow", "fused.npy", "--heads", "max"], "fused over heads already"),
    (["flow", "fused.npy", "--heads", "median"], "fused over heads already"),
    (["flow", EXAMPLE, "--heads", "median"], "unknown head fusion 'median'"),
    (["flow", EXAMPLE, "--heads", "12"], "from 0 to 11; got 12"),
    (["flow", EXAMPLE, "--heads", "-1"], "from 0 to 11; got -1"),
    (
        ["flow", "fused.npy", "--without", "x"],
        "--without must be numbers like 1,6; got 'x'",
    ),
    (["flow", "fused.npy", "--without", "9"], "without must be from -4 to 3; got 9"),
    (["flow", "fused.npy", "--without", "0", "--position", "0"], "position 0 was taken out"),
    (
        ["flow", "fused.npy", "--normalize", "max"],
        "unknown --normalize 'max'; choose from sum, receptive_field, none",
    ),
    (["flow", "fused.npy", "--workers", "0"], "workers must be"),
    (
        ["flow", "fused.npy", "--out", "x.xlsx"],
        "ending must be one of .csv, .json, .md, .tex, .npz; got .xlsx",
    ),
    (["flow", "fused.npy", "--out", "nowhere/x.csv"], "does not exist"),
    (["flow", "fused.npy", "--out", "taken.csv"], "it is a folder"),
    (["flow", "fused.npy", "--out", "a" * 300 + ".csv"], "cannot write"),
    (["flow", "fused.npy", "--heads", "9" * 18], "fused over heads already"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    BAD,
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_status_2(
    arguments: list[str],
    message: str,
    bad_files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (bad_files / "taken.csv").mkdir()
    monkeypatch.chdir(bad_files)
    assert inside(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("attnflow: ")
    assert message in captured.err


def test_an_output_that_cannot_be_written_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine.csv"
    out.write_text("mine")
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != out
    )  # the tests may run as root, who may write everything
    assert inside(monkeypatch, "raw", EXAMPLE, "--out", out) == 2
    assert "it exists and is read-only" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_link_is_followed_and_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "target.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "target.csv")
    assert run("raw", EXAMPLE, "--out", tmp_path / "link.csv").returncode == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "target.csv").read_text().startswith("method,layer,")
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "attnflow", "raw", EXAMPLE]
            ended = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert ended.returncode == 2
        assert "cannot write the output" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_no_traceback_and_status_2_in_a_process_of_its_own(bad_files: Path) -> None:
    for arguments in (
        ["flow", "missing.npz"],
        ["flow"],
        ["flow", "fused.npy", "--layer", "x"],
        ["nonsense"],
    ):
        ended = run(*arguments, cwd=bad_files)
        assert ended.returncode == 2
        assert "Traceback" not in ended.stderr


def test_an_interruption_stops_within_a_second(tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", attention("peaky", 8, 256, np.random.default_rng(0)))
    program = (
        "import attnflow as af, sys; a = af.Attention.load(sys.argv[1]);"
        " print('go', flush=True); af.flow(a, workers=int(sys.argv[2]))"
    )
    for workers in ("1", "2"):
        command = [sys.executable, "-c", program, str(tmp_path / "large.npy"), workers]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "go\n"
            time.sleep(3)
            assert process.poll() is None, "the job must be long enough to interrupt"
            asked = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.wait(timeout=20)
            took = time.monotonic() - asked
        assert process.returncode != 0
        assert took < 5, f"took {took:.1f} s"  # a second on a quiet machine


# ---- what a terminal would obey -----------------------------------------------------------------

WORD = "\x1b]0;x\x07\x1b[31m\x9b2J\u202e[link](http://x)[red]x[/red]"
PAYLOAD = f"{WORD}\r"
STYLE = re.compile(r"\x1b\[[0-9;]*m")  # all that a terminal is told by us
DOORS = {
    "a text": ["explain", f"{WORD}5 {PAYLOAD} key"],
    "tokens and labels": ["explain", f"{WORD}5 {WORD}6", "--model", "classifier"],
    "words": ["explain", f"{WORD}5 {WORD}6", "--model", "classifier", "--words", "--importance"],
    "labels in an error": ["explain", f"{WORD}5", "--model", "classifier", "--target", "x"],
    "a target": ["explain", "the key", "--target", PAYLOAD],
    "a name of a model": ["explain", "the key", "--model", f"./{PAYLOAD}"],
    "a broken model": ["explain", "the key", "--model", f"{WORD}.model"],
    "a generated text": ["generate", "decoder", f"{WORD}5 {WORD}6", "--max-new-tokens", "3"],
    "all of a generated text": [
        *["generate", "decoder", f"{WORD}5 {WORD}6", "--max-new-tokens", "3", "--keep-common"]
    ],
    "tokens of a file": ["raw", "tokens.npz"],
    "a file that is missing": ["flow", f"{PAYLOAD}.npz"],
    "a file that is damaged": ["flow", f"{WORD}.npz"],
    "an ending": ["flow", EXAMPLE, "--out", f"x.{PAYLOAD}"],
    "a folder that is missing": ["flow", EXAMPLE, "--out", f"{PAYLOAD}/x.csv"],
    "a file that is written": ["capture", "decoder", f"{WORD}5", "--out", f"{WORD}2.npz"],
    "a number": ["explain", "the key", "--layer", PAYLOAD],
    "positions": ["flow", EXAMPLE, "--without", PAYLOAD],
    "an option": ["explain", "the key", f"--{PAYLOAD}", "1"],
    "a command": [PAYLOAD],
    "bytes that are no UTF-8": ["explain", "\udcff\udc9b31m", "--layer", "\udc9b"],
    "a text that is no UTF-8": ["explain", "\udcff\udc9b31m", "--model", "classifier"],
    "a method": ["evaluate", "verb-number", "texts.tsv", "--methods", PAYLOAD],
    "a label of a row": ["evaluate", "classifier", "texts.tsv"],
    "a corpus": [
        *["corpus", "run", "texts.csv", "--out", f"{WORD}.corpus", "--model", "classifier"],
        *["--methods", "raw", "--importance", "blank_out"],
    ],
    "the words of a corpus": [
        *["corpus", "top", f"{WORD}.corpus", "--method", "raw", "--min-count", "1"]
    ],
    "the state of a corpus": ["corpus", "status", f"{WORD}.corpus"],
    "a corpus that is whole": ["corpus", "verify", f"{WORD}.corpus"],
    "the correlations of a corpus": ["corpus", "evaluate", f"{WORD}.corpus"],
    "a corpus that is none": ["corpus", "status", PAYLOAD],
    "a column": [
        *["corpus", "run", "texts.csv", "--out", "other.corpus", "--text-column", PAYLOAD]
    ],
}
FAILING = {  # the doors that are to end in one line
    *["labels in an error", "a target", "a name of a model", "a broken model"],
    *["a file that is missing", "a file that is damaged", "an ending", "a folder that is missing"],
    *["a number", "positions", "an option", "a command", "bytes that are no UTF-8"],
    *["a text that is no UTF-8", "a method", "a label of a row", "a corpus that is none"],
    "a column",
}
SILENT = {"a number", "bytes that are no UTF-8", "the state of a corpus"}  # these name no value
# every command in one process, for speed: each with files for standard output and standard error
PROGRAM = """
import json, os, sys, traceback
from pathlib import Path
from attnflow.cli import commands as cli
from attnflow.cli import explain as explaining
doors, place = sys.argv[1:]
for door, arguments in json.loads(Path(doors).read_text()).items():
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{place}/{door}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv, status = ["attnflow", *arguments], 0
    try:
        cli.main()
    except SystemExit as ended:
        status = ended.code or 0
    except Exception:
        status = traceback.print_exc() or 1
    sys.stdout.flush()
    Path(place, f"{door}.status").write_text(str(status))
"""


@pytest.fixture(scope="module", params=["pipe", "colour"])
def opened_doors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each door wrote, in files named after it; in a pipe, and on a terminal with colour."""
    from transformers import BertForSequenceClassification

    from tests.families import FAMILIES, build, word_tokenizer

    place = tmp_path_factory.mktemp("doors")
    labels = {0: f"{PAYLOAD}none", 1: f"{PAYLOAD}some"}
    config = FAMILIES["bert"][1]()
    config.id2label, config.label2id = labels, {name: number for number, name in labels.items()}
    for name, model in {
        "classifier": BertForSequenceClassification(config).eval(),
        "decoder": build("llama"),
    }.items():
        model.save_pretrained(place / name)
        word_tokenizer().save_pretrained(place / name)
        path = place / name / "tokenizer.json"
        content = json.loads(path.read_text())
        content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
        vocabulary = dict(list(content["model"]["vocab"].items())[:5])  # the special tokens
        rest = range(len(vocabulary), model.config.vocab_size)
        content["model"]["vocab"] = {**vocabulary, **{f"{WORD}{each}": each for each in rest}}
        path.write_text(json.dumps(content))
    folder = place / f"{WORD}.model".replace("/", os.sep)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    tokens = [PAYLOAD, f"{WORD}\n", "\ud800", "\x7f", "\x85"]
    af.Attention(np.full((1, 5, 5), 0.2), tokens=tokens).save(place / "tokens.npz")
    for ending in (".npz", "2.npz", ".corpus"):
        (place / f"{WORD}{ending}").parent.mkdir(parents=True, exist_ok=True)
    (place / f"{WORD}.npz").write_text("no array")
    (place / "texts.tsv").write_text(f"{WORD}5 {WORD}6\t{WORD}\n")
    (place / "texts.csv").write_text(f'text\n{WORD}5 {WORD}6 {WORD}7\n"{PAYLOAD} {WORD}8"\n" "\n')
    (place / "doors.json").write_text(json.dumps(DOORS))
    colour = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, "doors.json", str(place)],
        cwd=place,
        env={**os.environ, "COLUMNS": "150", **(colour if request.param == "colour" else {})},
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=300,
    )
    return place


@pytest.mark.parametrize("door", list(DOORS))
def test_nothing_that_is_printed_commands_the_terminal(door: str, opened_doors: Path) -> None:
    out, err = ((opened_doors / f"{door}.{name}").read_bytes().decode() for name in ("out", "err"))
    shown = STYLE.sub("", out + err)
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []
    assert "\x1b[31m" not in out + err
    if door not in SILENT:
        assert "\\x1b" in shown or "\\udc" in shown, "the payload is to be seen, escaped"
    status = int((opened_doors / f"{door}.status").read_text())
    assert status == (2 if door in FAILING else 0)
    if door in FAILING:
        assert err.startswith("attnflow: ")
        assert err.count("\n") == 1


def test_markup_in_data_stays_text(opened_doors: Path) -> None:
    shown = STYLE.sub("", (opened_doors / "the words of a corpus.out").read_text())
    assert "[link](http://x)[red]x[/red]5" in shown


def test_the_title_of_a_progress_bar_is_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    with progress.progress_bar(WORD) as tick:
        tick(1, 2)
        time.sleep(0.3)
    shown = capsys.readouterr().err
    assert "\\x1b]0;x\\x07\\x1b[31m\\x9b2J\\u202e[link](http://x)[red]x[/red]" in shown
    assert "\x1b]0;x" not in shown


# ---- the worst of command lines -----------------------------------------------------------------

MANY = "9" * 5000  # Python reads no whole number of so many digits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["evaluate", "verb-number", "t.tsv", "--query", MANY],
            "--position must be numbers like 1,6",
        ),
        (
            ["evaluate", "verb-number", "t.tsv", "--layers", MANY],
            "--layers must be numbers like 1,6",
        ),
        (
            ["evaluate", "verb-number", "t.tsv", "--layers", "²"],
            "--layers must be numbers like 1,6",
        ),
        (
            ["corpus", "run", "t.tsv", "--out", "c", "--position", MANY],
            "--position must be numbers",
        ),
        (["flow", EXAMPLE, "--without", f"0,-{MANY}"], "--without must be numbers like 1,6"),
        (["flow", EXAMPLE, "--heads", MANY], "--heads must be numbers like 1,6"),
        (["flow", EXAMPLE, "--layer", MANY], "Invalid value for '--layer'"),
        (["flow", EXAMPLE, "--out", "loop.csv"], "its links lead in a circle"),
        (["explain", "key", "--out", "loop.html"], "its links lead in a circle"),
        (["explain", "key", "--out", "loop.html/x.html"], "does not exist"),
        (["flow", EXAMPLE, "--out", "a\0b.csv"], "null"),
        (["flow", "a\0b.npz"], "null"),
        (["flow", "pipe.npz"], "pipe.npz is damaged, cut off, or no array file"),
        (["evaluate", "verb-number", "pipe.npz"], "pipe.npz"),
        (["evaluate", "verb-number", "/dev/zero"], "it is a device; give a file"),
        (["flow", "/dev/zero"], "it is a device; give a file"),
        (["corpus", "run", "pipe.csv", "--out", "c"], "it is not an ordinary file"),
    ],
    ids=lambda value: (
        " ".join(value)[:60].encode("unicode_escape").decode() if isinstance(value, list) else ""
    ),
)
def test_the_worst_of_command_lines_are_one_line_too(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.tsv").write_text("the key\tsingular\n")
    for name in ("loop.csv", "loop.html"):
        Path(name).symlink_to(name)
    for name in ("pipe.npz", "pipe.csv"):
        os.mkfifo(name)
    assert inside(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("attnflow: ")
    assert err.count("\n") == 1
    assert message in err


def test_texts_come_through_a_pipe_that_somebody_writes(tmp_path: Path) -> None:
    command = f"{sys.executable} -m attnflow evaluate verb-number <(printf 'the key\\tsingular\\n')"
    options = "--methods raw --against blank_out"
    ended = subprocess.run(
        ["bash", "-c", f"{command} {options}"], capture_output=True, text=True, check=False
    )
    assert "n = 1" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "attnflow: there is not enough memory for this;"),
        (RecursionError("maximum"), "attnflow: the input is nested too deeply to be read"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), "attnflow: a text cannot be read or"),
        (PermissionError(13, "Permission denied", "x\x1b"), "attnflow: x\\x1b: Permission denied"),
        (BrokenPipeError(), ""),
    ],
)
def test_what_a_machine_refuses_is_one_line(
    error: Exception,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(explaining, "explain", fail)
    assert inside(monkeypatch, "explain", "the key") == (2 if line else 1)
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == (1 if line else 0)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(explaining, "explain", fail)
    monkeypatch.setattr(sys, "argv", ["attnflow", "explain", "the key"])
    with pytest.raises(KeyError, match="ours"):
        cli.main()


@pytest.mark.parametrize("arguments", ["--help", f"rollout {EXAMPLE}", "--version"])
@pytest.mark.parametrize("where", ["| true", ">&-", "> /dev/full"])
def test_an_output_that_nobody_reads_is_no_traceback(arguments: str, where: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m attnflow {arguments} {where}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr
    assert "Exception" not in ended.stderr
    assert ended.returncode in {"| true": (0, 1), ">&-": (0,), "> /dev/full": (2,)}[where]
    assert ended.stderr.count("\n") == (1 if where == "> /dev/full" else 0)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["evaluate", "nosuch.tsv"], "nosuch.tsv"),
        (["evaluate", "empty.tsv"], "empty.tsv holds no examples"),
        (["evaluate", "texts.tsv", "--statistic", "pearson"], "unknown --statistic 'pearson'"),
        (["evaluate", "texts.tsv", "--undefined", "nan"], "unknown --undefined nan"),
        (["evaluate", "texts.tsv", "--target-of", "odds"], "unknown --target-of odds"),
        (["evaluate", "texts.tsv", "--faithfulness", "fidelity"], "unknown metric 'fidelity'"),
        (["evaluate", "texts.tsv", "--best"], "best adds a row to the metrics"),
        (["generate", "The", "--max-new-tokens", "0"], "must be a whole number, at least 1; got 0"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(
    command: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.tsv").write_text("the key\tsingular\n")
    Path("empty.tsv").write_text("")
    # a model that cannot be loaded would be the first thing to be refused
    assert inside(monkeypatch, command[0], "./no-model", *command[1:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_an_evaluation_without_layers_is_refused_before_its_model_is_loaded() -> None:
    with pytest.raises(af.OptionError, match=r"layers must name at least one layer.*; got \[\]"):
        af.evaluate("./no-model", ["the key"], layers=[])
