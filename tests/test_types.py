"""What a type checker says of a user's script: exact types, and no error under mypy --strict."""

import doctest
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import attnflow as af
from attnflow import figures

pytest.importorskip("mypy")
ROOT = Path(__file__).parent.parent

# one input gives one result, a list of inputs a list of them; a list of token ids is one input
OVERLOADS = """
from collections.abc import Iterator
from typing import assert_type

import numpy as np
import pyarrow

import attnflow as af

model = af.load("verb-number")
ids = [5, 6, 7]
pair = ("the key", "is lost")

assert_type(af.blank_out(model, "the key"), af.Importance)
assert_type(af.blank_out(model, pair), af.Importance)
assert_type(af.blank_out(model, ids), af.Importance)
assert_type(af.blank_out(model, (5, 6, 7)), af.Importance)
assert_type(af.blank_out(model, np.array(ids)), af.Importance)
assert_type(af.blank_out(model, model.encode("the key")), af.Importance)
assert_type(af.blank_out(model, ["the key", "the keys"]), list[af.Importance])
assert_type(af.blank_out(model, ["the key"], ["plural"], signed=True), list[af.Importance])
assert_type(af.blank_out(model, [pair]), list[af.Importance])
assert_type(af.blank_out(model, [ids, ids]), list[af.Importance])
assert_type(af.blank_out(model, [model.encode("the key")]), list[af.Importance])
assert_type(af.input_gradient(model, "the key"), af.Importance)
assert_type(af.input_gradient(model, ids), af.Importance)
assert_type(af.input_gradient(model, ["the key"], 1), list[af.Importance])

assert_type(af.capture(model, "the key"), af.Attention)
assert_type(af.capture(model, ids), af.Attention)
assert_type(af.capture(model, ["the key", "the keys"]), list[af.Attention])
assert_type(af.capture(model, [ids]), list[af.Attention])

messages = [{"role": "user", "content": "Hello"}]
assert_type(af.generate(model, "Once"), af.Generation)
assert_type(af.generate(model, ids), af.Generation)
assert_type(af.generate(model, messages), af.Generation)
assert_type(af.generate(model, ["Once", "Twice"]), list[af.Generation])
assert_type(af.generate(model, [messages]), list[af.Generation])
assert_type(af.capture("verb-number", messages), af.Attention)
assert_type(af.capture(model, [messages]), list[af.Attention])
assert_type(af.attention_graph(model, messages), af.AttentionGraph)
assert_type(af.blank_out(model, messages), af.Importance)
assert_type(af.blank_out(model, [messages]), list[af.Importance])
assert_type(af.rollout_rows(model, messages, positions=0), af.TokenAttention)

for batch in af.read_corpus("folder", batches=True):
    assert_type(batch, pyarrow.RecordBatch)
assert_type(af.read_corpus("folder"), pyarrow.Table)

values = af.blank_out(model, "the key").values
for importance in af.blank_out(model, ["the key", "the keys"]):
    values = values + importance.values
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all scripts, so that mypy reads the libraries once."""
    return tmp_path_factory.mktemp("typed")


def run_mypy(script: str, folder: Path) -> str:
    """What mypy --strict says of a script that uses attnflow."""
    (folder / "script.py").write_text(script)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # libraries without types of their own, and those that take minutes to check
    untyped, *_ = project["tool"]["mypy"]["overrides"]
    settings = ["[mypy]", "strict = true"]
    settings += ["[mypy-attnflow.*]", "follow_imports = silent"]
    for module in untyped["module"]:
        settings += [f"[mypy-{module}]", "ignore_missing_imports = true", "follow_imports = skip"]
    (folder / "mypy.ini").write_text("\n".join(settings))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-pretty", "script.py"],
        cwd=folder,
        env={"MYPYPATH": str(Path(af.__file__).parent.parent), "PATH": ""},
        capture_output=True,
        text=True,
    )
    lines = (checked.stdout + checked.stderr).splitlines()
    return "\n".join(line for line in lines if not line.startswith("Success"))


def read_blocks(text: str) -> Iterator[str]:
    """The Python of a text in Markdown, without prompts and what they print."""
    for example in doctest.DocTestParser().get_examples(text):
        yield example.source


def test_the_readme_passes_a_strict_type_check(folder: Path) -> None:
    script = "".join(read_blocks((ROOT / "README.md").read_text()))
    assert "af.explain(" in script
    assert run_mypy(script, folder) == ""


def test_one_input_gives_one_result_and_a_list_a_list(folder: Path) -> None:
    assert run_mypy(OVERLOADS, folder) == ""


def test_a_wrong_call_is_an_error_of_the_script(folder: Path) -> None:
    wrong = 'import attnflow as af\nfor each in af.blank_out(af.load(), "the key"):\n    pass\n'
    assert 'script.py:2: error: "Importance" has no attribute "__iter__"' in run_mypy(wrong, folder)


def list_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions, and the public methods of public classes."""
    for module, names in ((af, af.__all__), (figures, figures.__all__)):
        for name in names:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield name, value
            elif inspect.isclass(value):
                for method, function in inspect.getmembers(value, inspect.isroutine):
                    ours = (getattr(function, "__module__", None) or "").startswith("attnflow")
                    if ours and not method.startswith("_"):
                        yield f"{name}.{method}", function


@pytest.mark.parametrize(("name", "function"), list(list_callables()))
def test_what_is_public_says_what_it_returns(name: str, function: Callable[..., Any]) -> None:
    returned = inspect.signature(function).return_annotation
    assert returned is not inspect.Signature.empty
    assert returned is not Any
