"""Every kind of attack can fail: it reports what is broken on purpose."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.cli import commands as cli
from attnflow.core import graph, methods
from attnflow.core.flow import solve as flows
from attnflow.corpus import explain_corpus as corpus
from attnflow.corpus.folder import merge_errors
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import hash_file
from attnflow.models import execution
from attnflow.models.chats import Template
from tests.hostile import __main__ as hostile
from tests.hostile import tokens
from tests.hostile.tries import Result, run_tries
from tests.pages import explanation_page

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
    patch.setattr(cli, "main_app", lambda **_: print("\x1b[2J"))


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


def unsure_captures(patch: pytest.MonkeyPatch) -> None:
    right = af.capture

    def capture(*given: Any, **options: Any) -> Any:
        found = right(*given, **options)
        alone = threading.current_thread() is threading.main_thread()
        return found if alone else replace(found, weights=found.weights[:, :, ::-1])

    patch.setattr(af, "capture", capture)


def searched_turns(patch: pytest.MonkeyPatch) -> None:
    def find(template: Any, number: int) -> Any:
        content = template.messages[number]["content"].strip()
        start = template.text.find(content)
        return ((start, start + len(content)),) if content else ()

    patch.setattr(Template, "find_content", find)


def remembered_models(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(execution, "sample_state", lambda module: 0)


def other_rows(patch: pytest.MonkeyPatch) -> None:
    def read(model: Any, given: Any, **options: Any) -> Any:
        if not isinstance(given, list):
            given = list(reversed(list(given)))
        return right(model, given, **options)

    right = af.rollout_rows
    patch.setattr(af, "rollout_rows", read)


def lost_scales(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(methods, "SAFE_DIGITS", np.inf)


BREAKS: list[tuple[str, Break, Sequence[int], str]] = [
    ("graphs", wrong_flows, [0, 3], "igraph says"),
    ("arrays", unchecked_rows, range(1, 51, 5), "weights are not finite"),
    ("models", bare_errors, [10], "KeyError"),
    ("commands", hidden_characters, [0], "on standard output"),
    ("manifests", bare_manifests, [0], "KeyError"),
    ("kills", other_bytes, [4], "errors.parquet has other bytes"),
    ("threads", unsure_captures, range(4), "differs from what it is alone"),
    ("chats", searched_turns, range(12), "gave turns"),
    ("trained", remembered_models, [2], "edges are given after the gate was opened"),
    ("spellings", other_rows, [3], "other numbers"),
    ("scales", lost_scales, range(8), "differs from that of 1"),
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


@pytest.mark.parametrize(
    ("kind", "count"),
    [("threads", 4), ("chats", 60), ("trained", 5), ("spellings", 17), ("scales", 20)],
)
def test_what_is_sound_stands_some_of_the_tries(kind: str, count: int, tmp_path: Path) -> None:
    result: Result = import_module(f"tests.hostile.{kind}").run(range(count), 1, tmp_path)
    assert result.bad == ()


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
