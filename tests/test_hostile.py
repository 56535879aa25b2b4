"""Every kind of attack can fail: it reports what is broken on purpose."""

import os
import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.cli import commands as cli
from attnflow.core import flows, graph
from attnflow.corpus import running as corpus
from attnflow.corpus.folder import merge_errors
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import hash_file
from attnflow.show.page import explanation_page
from tests.hostile import __main__ as hostile
from tests.hostile import tokens
from tests.hostile.tries import Result, run_tries

pytest.importorskip("pyarrow")

Break = Callable[[pytest.MonkeyPatch], None]


def wrong_flows(patch: pytest.MonkeyPatch) -> None:
    right = flows.find_flows
    patch.setattr(flows, "find_flows", lambda *given, **options: right(*given, **options) + 1e-6)


def unchecked_rows(patch: pytest.MonkeyPatch) -> None:
    def check_rows(weights: Any, *given: Any, **options: Any) -> Any:
        return weights

    patch.setattr(graph, "check_rows", check_rows)


def bare_errors(patch: pytest.MonkeyPatch) -> None:
    def load(name: Any) -> Any:
        raise KeyError(str(name))

    patch.setattr(af, "load", load)


def hidden_characters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cli, "app", lambda **_: print("\x1b[2J"))


def bare_manifests(patch: pytest.MonkeyPatch) -> None:
    def read(folder: Any) -> Any:
        raise KeyError("rows")

    patch.setattr(Manifest, "read", read)


def other_bytes(patch: pytest.MonkeyPatch) -> None:
    def merge(folder: Path, manifest: Manifest) -> str:
        merge_errors(folder, manifest)
        with open(folder / "errors.parquet", "ab") as file:
            file.write(str(os.getpid()).encode())
        return hash_file(folder / "errors.parquet")[1]

    patch.setattr(corpus, "merge_errors", merge)


def tokens_as_markup(patch: pytest.MonkeyPatch) -> None:
    def marked_up(explanation: Any) -> str:
        return explanation_page(explanation).replace("</main>", f"{explanation.text}</main>")

    patch.setitem(tokens.PAGES, "explanation", marked_up)


BREAKS: list[tuple[str, Break, Sequence[int], str]] = [
    ("graphs", wrong_flows, [0, 3], "igraph says"),
    ("arrays", unchecked_rows, range(1, 51, 5), "weights are not finite"),
    ("models", bare_errors, [10], "KeyError"),
    ("commands", hidden_characters, [0], "on standard output"),
    ("manifests", bare_manifests, [0], "KeyError"),
    ("kills", other_bytes, [4], "errors.parquet has other bytes"),
    pytest.param(
        "tokens", tokens_as_markup, [0, 6], "a script of the token", marks=pytest.mark.browser
    ),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("kind", "break_it", "numbers", "told"), BREAKS)
def test_what_is_broken_on_purpose_is_reported(
    kind: str,
    break_it: Break,
    numbers: Sequence[int],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    result: Result = import_module(f"tests.hostile.{kind}").run(numbers, 0, tmp_path)
    assert result.tries == len(numbers)
    assert result.clean < result.tries
    assert any(told in line for line in result.bad)
    assert all(line.startswith(f"{kind} --number ") and "\n" not in line for line in result.bad)


def test_a_try_that_crashes_hangs_or_fills_the_memory_is_bad_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    def attempt(draw: Any, number: int, folder: Path) -> str | None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while number == 2:
            pass
        if number == 3:
            np.ones(2**33)
        return None if number < 6 else str(draw.random())

    result = run_tries(attempt, "x", range(8), 0, tmp_path, seconds=2)
    assert [line.split(": ")[1] for line in result.bad[:3]] == [
        "the process ended with status -9",
        "it was still at work when its time was over",
        "MemoryError",
    ]
    again = run_tries(attempt, "x", [7, 6], 0, tmp_path)
    assert again.bad == result.bad[3:]  # the same whenever it is drawn
    assert len(again.bad) == 2


def test_the_table_and_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hostile, "KINDS", {"arrays": (2, 3)})
    monkeypatch.setattr("tests.hostile.arrays.run", lambda *given: Result(3, ("a",)))
    assert hostile.main(["--full", "--seed", "5"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:4] == ["arrays", "3", "2", "1"]
    assert shown[2] == "bad: --seed 5 --only a"
