"""The promises of the package as a whole: imports, the order of the house, the wheel's contents, the changelog."""

import ast
import importlib
import inspect
import subprocess
import sys
import time
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import attnflow as af
from attnflow import progress

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
ORDER = ["errors", "notices", "progress", "core", "models", "capturing", "edges"]
ORDER += ["analysis", "corpus", "show", "paper", "cli"]
# imports inside a function, allowed one by one, because they point down or would close a circle
LATE = {
    ("analysis.explanation", "show.page"),
    ("analysis.explanation", "show.figures"),
    ("analysis.generation", "show.page"),
    ("analysis.side_by_side", "show.strip_pages"),
    ("analysis.generation", "show.figures"),
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
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnflow."):
            names = [str(node.module).removeprefix("attnflow.")]
            if (SOURCE / names[0]).is_dir():  # from attnflow.package import module
                names = [f"{names[0]}.{alias.name}" for alias in node.names]
            yield from ((name, node.col_offset > 0) for name in names)


def test_packages_import_those_above_them_and_make_no_circles() -> None:
    circles: dict[str, set[str]] = {}
    for path in [*SOURCE.glob("*.py"), *SOURCE.glob("*/*.py")]:
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        package = name.split(".")[0]
        if package in ("__init__", "__main__", "figures"):
            continue
        for other, late in list_imports(path):
            if late and (name, other) in LATE:
                continue
            above = other.split(".")[0]
            assert ORDER.index(above) <= ORDER.index(package), f"{name} imports {other}"
            if not late:
                circles.setdefault(name, set()).add(other)
    assert list(TopologicalSorter(circles).static_order())  # raises where there is a circle


def test_no_module_is_named_after_a_public_function_and_dir_shows_public_names() -> None:
    functions = {name for name in af.__all__ if inspect.isfunction(getattr(af, name))}
    modules = {path.stem for path in SOURCE.rglob("*.py")} | {
        path.name for path in SOURCE.iterdir() if path.is_dir()
    }
    assert not functions & modules
    assert [name for name in dir(af) if not name.startswith("__")] == sorted(
        [*af.__all__, "figures"]
    )
    from attnflow import figures

    assert figures.heatmap is importlib.import_module("attnflow.show.figures").heatmap


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
    kernels = ("kernels", "capacities", "network", "maxflow", "bounds", "mincut")
    known = {f"attnflow.core.{name}" for name in ("arrays", "layers", *kernels)}
    for name in kernels:
        tree = ast.parse((SOURCE / "core" / f"{name}.py").read_text())
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
    assert sorted(path.name for path in (SOURCE / "models" / "weights").iterdir()) == [
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
