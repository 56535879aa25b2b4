"""What the command line says: options instead of Python's arguments, and one thing in the singular."""

from pathlib import Path

import pytest

from attnflow.cli.commands import describe, spell_options
from attnflow.cli.options import OWN
from attnflow.cli.output import PageOutput
from attnflow.edges.edge_weight import EDGES
from attnflow.errors import OptionError
from tests.console import EXAMPLE, inside


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus", "run", "t.csv", "--out", "o", "--methods", "bogus"], f"a function as {OWN}\n"),
        (["corpus", "run", "t.csv", "--out", "o", "--importance", "bogus"], f"as {OWN}\n"),
        (["corpus", "run", "t.csv", "--out", "o", "--edges", "bogus"], f"as {OWN}\n"),
        (["explain", "key", "--methods", "bogus"], f"or give a function as {OWN}\n"),
        (["evaluate", "verb-number", "t.csv", "--faithfulness", "bogus"], f"as {OWN}\n"),
        # compare takes names alone
        (["compare", "a", "b", "--results", "bogus"], "choose from raw, rollout, flow\n"),
        (["compare", "a", "b", "--results", "bogus rollout"], "signed_relevance, value_zeroing\n"),
        (["corpus", "run", "empty.csv", "--out", "o"], "empty.csv has no columns: give"),
        (["corpus", "run", "two.csv", "--out", "o"], "'a', 'b': name it by --text-column\n"),
        (
            ["corpus", "run", "t.csv", "--out", "o", "--text-column", "nix"],
            "no column 'nix' (--text-column)",
        ),
        (["corpus", "run", "t.csv", "--out", "o", "--shard-rows", "0"], "--shard-rows must be"),
        (["corpus", "run", "t.csv", "--out", "o", "--address", "x"], "give --engine ray with it"),
        (["explain", "key", "--out", "t.csv/y.html"], "t.csv is a file, not a folder\n"),
        (["explain", "key " * 2000, "--importance"], "pass --truncation to cut the rest off\n"),
        (["flow", EXAMPLE, "--bottom", "2", "--layer", "2"], "got --bottom=2, layers=[2]"),
        (["flow", EXAMPLE, "--layer", "9"], "--layer must be from 1 to 6; got 9"),
        (["explain", "key", "--target", "dual"], "unknown --target 'dual'; choose from singular"),
        (["reproduce", "table2", "--reduce", "x"], "unknown --reduce 'x'; choose from sum"),
        # what the user typed is nobody's argument
        (["flow", "bottom=2.npz"], "bottom=2.npz"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_errors_speak_of_the_command_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("text\nthe key\n")
    Path("two.csv").write_text("a,b\n1,2\n")
    Path("empty.csv").write_text("")
    assert inside(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "{name" not in said
    assert not Path("o").exists()


def test_only_options_of_the_command_are_spoken_of() -> None:
    flags = {"heads": "--heads", "text_column": "--text-column", "normalize": "--normalize"}
    for option, spelled in {
        "heads='mean'": "--heads mean",
        "heads=True": "--heads",
        "text_column": "--text-column",
        "normalize=None": "--normalize none",
        "shard_rows": "shard_rows",  # not an option of this command
        "edges=['norm']": "edges=['norm']",
    }.items():
        error = OptionError(f"give {option}, not methods='x'", options=[option])
        assert spell_options(error, flags) == f"give {spelled}, not methods='x'"
    assert spell_options(OptionError("got heads='mean'"), flags) == "got heads='mean'"


def test_one_of_a_thing_is_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("text\nthe key\n")
    for arguments, message in {
        "corpus run t.csv --out o --methods rollout": "o: 1 text in 1 shard; 0 errors\n",
        "corpus verify o": "o: whole; 1 row in 1 shard; 0 errors\n",
        "corpus page o --out pages": "index.html, with 1 text\n",
    }.items():
        assert inside(monkeypatch, *arguments.split()) == 0
        assert capsys.readouterr().out.endswith(message)


def test_the_text_of_a_lack_of_memory_is_shown() -> None:
    told = describe(MemoryError("attention over 9 positions takes 3 GB"))
    assert told.startswith("there is not enough memory for this: attention over 9 positions takes")


def test_help_names_every_kind_of_edges_and_of_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert inside(monkeypatch, "explain", "--help") == 0
    helped = capsys.readouterr().out
    for name in (*EDGES, *PageOutput.endings):
        assert name in helped
