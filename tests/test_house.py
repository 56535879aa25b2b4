"""The promises of the package as a whole: imports, the order of the house, the wheel's contents, the changelog."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import attnflow as af
from attnflow import progress
from tests.families import build
from tests.shape import MOST_DECISIONS, count_decisions, find_shared_names, list_functions

SOURCE = Path(af.__file__).parent
ROOT = Path(__file__).parent.parent
HEAVY = [
    "torch",
    "transformers",
    "numba",
    "scipy.stats",
    "matplotlib",
    "pandas",
    "pyarrow",
    "ray",
    "rich",
    "typer",
]
# from top to bottom: a package imports only from packages above it
ORDER = ["errors", "notices", "progress", "core", "models", "capturing", "edges", "rows"]
ORDER += ["analysis", "corpus", "show", "figures", "paper", "cli"]
# imports inside a function, allowed one by one, because they point down or would close a circle
LATE = {
    ("analysis.explain.explanation", "show.page.page"),
    ("analysis.explain.explanation", "show.figures.heatmap"),
    ("analysis.explain.explanation", "show.figures.overlay"),
    ("analysis.generate.generation", "show.page.page"),
    ("analysis.explain.compare", "show.page.page"),
    ("analysis.generate.generation", "show.figures.generation"),
    ("analysis.intervene.intervention", "show.page.page"),
    ("analysis.intervene.intervention", "show.figures.intervention"),
    ("analysis.intervene.intervention", "analysis.page.strips"),
}


def test_import_attnflow_loads_nothing_heavy() -> None:
    program = f"import sys, attnflow; print([name for name in {HEAVY} if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def list_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of ours that a file imports, and whether it does so inside a function."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "attnflow":
            names = [str(node.module).removeprefix("attnflow").lstrip(".")]
            if (
                SOURCE / names[0].replace(".", "/")
            ).is_dir():  # from attnflow.package import module
                names = [f"{names[0]}.{alias.name}".lstrip(".") for alias in node.names]
                names = [name for name in names if name != "__version__"]
            yield from ((name, node.col_offset > 0) for name in names)


def test_packages_import_those_above_them_and_make_no_circles() -> None:
    circles: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        package = name.split(".")[0]
        if package in ("__init__", "__main__"):
            continue
        for other, late in list_imports(path):
            if late and (name, other) in LATE:
                continue
            above = other.split(".")[0]
            assert ORDER.index(above) <= ORDER.index(package), f"{name} imports {other}"
            if not late:
                circles.setdefault(name, set()).add(other)
    assert list(TopologicalSorter(circles).static_order())  # raises where there is a circle


# what computes token attention; of these, and of analysis, show knows types and constants alone
COMPUTING = ("core.methods", "core.choices", "core.flow", "capturing", "edges", "analysis")
# apart from functions that read an option, name what is there, or write it ...
READING = {"find_excluded", "format_percent", "list_marked_words", "name_word", "to_json"}
# ... and, one by one, those that give the finished numbers of a view
ASKED = {
    ("figures/intervention.py", "share_rest"),
    ("terminal/folding.py", "fold_rows"),
    ("terminal/answers.py", "find_row_spread"),
    ("figures/score_rows.py", "find_row_spread"),
    ("figures/deletion_curves.py", "average_curves"),
}


def test_show_computes_nothing() -> None:
    found = set()
    for path in (SOURCE / "show").rglob("*.py"):
        place = path.relative_to(SOURCE / "show").as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            module = (getattr(node, "module", None) or "").removeprefix("attnflow.")
            if isinstance(node, ast.ImportFrom) and f"{module}.".startswith(
                tuple(f"{name}." for name in COMPUTING)
            ):
                found |= {(place, alias.name) for alias in node.names if alias.name[0].islower()}
    assert {(place, name) for place, name in found if name not in READING} == ASKED


def test_no_module_is_named_after_a_public_function_and_dir_shows_public_names() -> None:
    functions = {name for name in af.__all__ if inspect.isfunction(getattr(af, name))}
    assert not functions & {path.stem for path in SOURCE.iterdir()}  # one would shadow the other
    assert [name for name in dir(af) if not name.startswith("__")] == sorted(
        [*af.__all__, "figures"]
    )
    from attnflow import figures

    assert figures.heatmap is importlib.import_module("attnflow.show.figures.heatmap").heatmap


def test_a_function_reads_as_one_thought() -> None:
    kernels = {"measure_contributions"}  # loops of numba, whose proof stands above them
    long = {
        f"{path.relative_to(SOURCE)}: {function.name}": count_decisions(function)
        for path in SOURCE.rglob("*.py")
        for function in list_functions(path)
        if function.name not in kernels
    }
    assert {name: count for name, count in long.items() if count > MOST_DECISIONS} == {}


STIFF = r"\b(nobody|whoever|so many)\b|of the user's|has no say|cannot be had|the way back"


def test_messages_and_docstrings_are_in_plain_words() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(STIFF, line, re.IGNORECASE)
    ]
    assert found == []


def test_a_name_is_defined_once() -> None:
    assert find_shared_names() == {}


def test_the_core_runs_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import attnflow as af
attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 3, tokens=["the", "key"])
print(af.rollout(attention).at(0).round(3), af.flow(attention).at(0).round(3))
try:
    af.load()
except af.MissingExtraError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "pip install 'attnflow[models]'" in found.stdout


def test_the_kernels_know_numpy_numba_and_the_layers_only() -> None:
    kernels = ("kernels", "capacities", "network", "search", "bounds", "cut")
    known = {f"attnflow.core.{name}" for name in ("arrays", "layers")}
    known |= {f"attnflow.core.flow.{name}" for name in kernels}
    for name in kernels:
        tree = ast.parse((SOURCE / "core" / "flow" / f"{name}.py").read_text())
        modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        packages = {module.split(".")[0] for module in modules - known}
        assert packages <= {"collections", "typing", "numpy", "numba", "llvmlite"}


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(af.MissingExtraError, match=r"pip install 'attnflow\[pandas\]'") as error:
        af.raw([[[1.0]]]).to_pandas()
    assert isinstance(error.value, ImportError)


def test_version_has_a_changelog_entry() -> None:
    assert f"## {af.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_ships_is_typed_and_has_its_model() -> None:
    assert (SOURCE / "py.typed").exists()
    assert sorted(path.name for path in (SOURCE / "models" / "bundled" / "weights").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "vocabulary.txt",
    ]


def test_every_public_function_has_a_runnable_example() -> None:
    functions = [
        af.raw,
        af.rollout,
        af.flow,
        af.max_flow,
        af.capture,
        af.record,
        af.generate,
        af.load,
    ]
    functions += [
        af.blank_out,
        af.input_gradient,
        af.evaluate,
        af.faithfulness,
        af.plausibility,
        af.explain,
        af.explain_corpus,
        af.read_corpus,
        af.sinks,
    ]
    for function in (
        *functions,
        af.Attention,
        af.AttentionGraph,
        af.TokenAttention,
        af.TokenAttention.compared_with,
        af.PromptAttention.compared_with,
        af.Comparison,
        af.Model,
        af.Attention.graph,
    ):
        assert ">>>" in (function.__doc__ or ""), function


def test_progress_goes_to_a_listener_and_shows_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    seen: list[af.Progress] = []
    texts = ["the key", "the keys to the old house"] * 20
    with af.progress_listener(seen.append):
        af.evaluate("verb-number", texts, methods="raw", against="blank_out")
    own = [each for each in seen if each.title == "evaluating"]
    assert [(each.done, each.total) for each in own] == [(32, 40), (40, 40)]
    assert capsys.readouterr().err == ""
    with af.progress_listener(seen.append), ThreadPoolExecutor(1) as pool:
        before = len(seen)  # another thread has a context of its own
        pool.submit(af.evaluate, "verb-number", texts[:2], methods="raw", against="blank_out")
    assert len(seen) == before


def test_a_listener_hears_each_generated_token_and_may_stop_it() -> None:
    model, seen = build("llama"), list[af.Progress]()
    with af.progress_listener(seen.append):
        story = af.generate(model, [[7, 8], [9, 10, 11]], max_new_tokens=3, eos_token_id=None)
        ended = af.generate(model, [7, 8], max_new_tokens=5, eos_token_id=range(64))
    assert [len(each.tokens) for each in story] == [3, 3]
    assert len(ended.tokens) == 1
    assert seen == [
        af.Progress("generating", *pair) for pair in ((1, 3), (2, 3), (3, 3), (1, 5), (1, 1))
    ]

    def stop(heard: af.Progress) -> None:
        raise LookupError(f"enough at {heard.done}")

    with af.progress_listener(stop), pytest.raises(LookupError, match="enough at 1"):
        af.generate(model, [7, 8], max_new_tokens=3)


def test_a_progress_bar_shows_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.progress_bar("quiet") as tick:
        tick(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.progress_bar("long work") as tick:
        tick(1, 2)
        time.sleep(0.3)
    assert "long work" in capsys.readouterr().err
