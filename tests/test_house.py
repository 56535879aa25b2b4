"""The promises of the package as a whole: imports, the order of the house, the wheel's contents, the changelog."""

import ast
import subprocess
import sys
import time
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
# from top to bottom; a file imports only from files above it
HOUSE = [
    "errors",
    "notices",
    "files",
    "progress",
    "memory",
    "graph",
    "groups",
    "attention",
    "maxflow",
    "flows",
    "results",
    "drawing",
    "methods",
    "verb_number",
    "inputs",
    "listening",
    "models",
    "loading",
    "capture",
    "record",
    "generation",
    "importance",
    "evaluate",
    "explain",
    "corpus_input",
    "corpus_shard",
    "corpus_folder",
    "corpus_read",
    "corpus",
    "corpus_ray",
    "corpus_table",
    "figure_graphs",
    "figures",
    "page",
    "paper",
    "terminal",
    "lab",
    "corpus_cli",
    "cli",
    "__main__",
]
# imports inside a function that point down the house, allowed one by one: (file, imported)
ALLOWED = {
    ("explain", "page"),
    ("generation", "page"),
    ("explain", "figures"),
    ("generation", "figures"),
    ("corpus", "corpus_ray"),
}
# the files of paper/, in their order
PAPER = [
    "agreement",
    "nouns",
    "augmentation",
    "grammar",
    "checkpoint",
    "training",
    "train_verb_number",
    "sentiment",
    "tables",
    "pictures",
    "__init__",
]


def test_import_attnflow_loads_nothing_heavy() -> None:
    program = f"import sys, attnflow; print([name for name in {HEAVY} if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def imported_by(path: Path, package: str = "attnflow") -> set[str]:
    """What a file imports from a package of ours, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith(f"{package}.")
        ):
            names.add(node.module.removeprefix(f"{package}.").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            names |= {alias.name for alias in node.names if alias.name in HOUSE + PAPER}
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith(f"{package}.")
            }
    return names


def test_every_file_has_its_place_and_imports_point_up() -> None:
    files = {path.stem: path for path in SOURCE.glob("*.py") if path.stem != "__init__"}
    assert sorted(files) == sorted(set(HOUSE) - {"paper"})
    for name, path in files.items():
        for other in imported_by(path):
            assert HOUSE.index(other) < HOUSE.index(name) or (name, other) in ALLOWED, (
                f"{name}.py imports {other}.py, which stands below it"
            )


def test_the_files_of_the_paper_have_their_order_too() -> None:
    files = {path.stem: path for path in (SOURCE / "paper").glob("*.py")}
    assert sorted(files) == sorted(PAPER)
    for name, path in files.items():
        assert all(HOUSE.index(other) <= HOUSE.index("paper") for other in imported_by(path))
        assert all(
            PAPER.index(other) < PAPER.index(name) for other in imported_by(path, "attnflow.paper")
        )


def test_the_kernels_know_numpy_and_numba_only() -> None:
    tree = ast.parse((SOURCE / "maxflow.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {str(module).split(".")[0] for module in modules} == {
        "collections",
        "typing",
        "numpy",
        "numba",
        "llvmlite",
    }


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(af.MissingExtraError, match=r"pip install 'attnflow\[pandas\]'") as error:
        af.raw([[[1.0]]]).to_pandas()
    assert isinstance(error.value, ImportError)


def test_version_has_a_changelog_entry() -> None:
    assert f"## {af.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_ships_is_typed_and_has_its_model() -> None:
    assert (SOURCE / "py.typed").exists()
    assert sorted(path.name for path in (SOURCE / "weights").iterdir()) == [
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
        af.explain,
        af.explain_corpus,
        af.read_corpus,
    ]
    for function in (
        *functions,
        af.Attention,
        af.AttentionGraph,
        af.TokenAttention,
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
