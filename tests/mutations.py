"""Do the tests notice a change? The code is changed in one place at a time, and its tests run.

    python -m tests.mutations --packages core analysis [--number N] [--seed S] [--workers W]
    python -m tests.mutations --files core/graph.py core/results.py:120 [...]

Of each package, or of each file, some mutations are drawn. A mutation is one small change of the
source: an operator swapped, a constant moved by one, a statement, a keyword or the end of a slice
left out. It is written into a copy of the project, where the tests of the file run. A mutation that
passes has survived: either it is equivalent (it breaks no promise), or a test is missing. A file
with a line stands for the mutations of that line. Messages, annotations and `__repr__` stay.

60 mutations of core and 60 of analysis take about ten minutes on two cores.
"""

import argparse
import ast
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src", "attnflow")
MEMORY = 12 * 2**30  # bytes of address space: a mutation may ask for an array of any size
PATIENCE = 3  # times the processor time of the tests alone: so an endless loop is caught
LEAST_PATIENCE = 60  # seconds of processor time: kernels may have to be compiled first
ASLEEP = 600  # seconds: no working test sleeps this long, even on a busy machine

# The fast tests of a file: those of the longest part of its path that stands here. The test that
# is most likely to fail comes first. All of core also runs its doctests and edge cases.
GENERAL = ["src/attnflow/core", "tests/core/test_core_edges.py"]
METHODS_AND_GRAPHS = ["tests/core/test_methods.py", "tests/core/test_graph.py"]
RUNNER = ["tests/analysis/test_run.py", "tests/analysis/test_explain.py"]
TESTS = {
    "core": METHODS_AND_GRAPHS,
    "core/choices.py": ["tests/analysis/test_open_methods.py", "-k not corpus"],
    "core/comparison.py": ["tests/core/test_comparison.py"],
    "core/flow": ["tests/core/test_maxflow.py"],
    "core/flow/max_flow.py": ["tests/core/test_tables.py", "tests/core/test_methods.py"],
    "core/io/files.py": ["tests/core/test_files.py", "tests/core/test_graph.py"],
    "core/io/formatting.py": ["tests/core/test_tables.py"],
    "core/io/tables.py": ["tests/core/test_tables.py", "tests/test_house.py"],
    "core/io/views.py": ["tests/core/test_tables.py"],
    "core/memory.py": [],
    "core/padding.py": ["tests/core/test_batches.py"],
    "core/provenance.py": [],
    "core/row_table.py": ["tests/core/test_tables.py", "tests/core/test_comparison.py"],
    "core/sinks.py": ["tests/core/test_sinks.py"],
    "core/text.py": ["tests/core/test_text.py"],
    "analysis": RUNNER,
    "analysis/evaluate": [
        "tests/analysis/test_evaluate.py",
        "tests/analysis/test_yardsticks.py",
        "tests/analysis/test_comparing.py",
        "tests/analysis/test_sanity.py",
    ],
    "analysis/explain": [
        "tests/analysis/test_explain.py",
        "tests/analysis/test_summary.py",
        "tests/analysis/test_side_by_side.py",
    ],
    "analysis/explain/fold.py": ["tests/rows/test_long.py", "-k fold"],
    "analysis/faithfulness": [
        "tests/analysis/test_faithfulness.py",
        "tests/analysis/test_yardsticks.py",
    ],
    "analysis/generate": [
        "tests/analysis/test_generation.py",
        "tests/analysis/test_generation_edges.py",
    ],
    "analysis/importance": ["tests/analysis/test_importance.py", "tests/analysis/test_run.py"],
    "analysis/long_inputs.py": ["tests/rows/test_long.py"],
    "analysis/page": ["tests/analysis/test_page_data.py"],
    "analysis/statistics.py": [
        "tests/analysis/test_comparing.py",
        "tests/analysis/test_yardsticks.py",
        "tests/analysis/test_evaluate.py",
    ],
}

OPERATOR = re.compile(rb"is not|not in|//|\*\*|<<|>>|[<>=!]=|[-+*/%&|<>]|\b(is|in|and|or)\b")
SWAPS = {"<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"]}
SWAPS |= {"//": ["*"], "%": ["//"]}
PAIRS = "==,!= +,- *,/ <<,>> &,| and,or min,max minimum,maximum argmin,argmax any,all"
for pair in [*PAIRS.split(), "is,is not", "in,not in"]:
    one, other = pair.split(",")
    SWAPS |= {one: [other], other: [one]}

Change = tuple[int, int, str]  # start and end in bytes, and what to put there


@dataclass(frozen=True)
class Mutation:
    """One change of a file."""

    file: str  # as core/graph.py
    source: bytes
    start: int
    end: int
    after: str

    @property
    def line(self) -> int:
        return self.source.count(b"\n", 0, self.start) + 1

    def apply(self) -> bytes:
        return self.source[: self.start] + self.after.encode() + self.source[self.end :]

    def __str__(self) -> str:
        first, last = self.source.rfind(b"\n", 0, self.start), self.source.find(b"\n", self.end)
        spans = [(first, self.start), (self.start, self.end), (self.end, last)]
        left, old, right = (self.source[start:end].decode().strip() for start, end in spans)
        return f"{self.file}:{self.line}: {left} [{' '.join(old.split())} => {self.after}] {right}"


# ---- where a file can be changed ----------------------------------------------------------------


class Finder:
    """The changes of one source."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.lines = [0]  # where they start
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def place(self, node: Any) -> tuple[int, int]:
        """Where a node stands, in bytes, as ast counts columns."""
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def swap(self, *operands: ast.AST) -> Iterator[Change]:
        """Other operators between operands."""
        for left, right in pairwise(operands):
            operator = OPERATOR.search(self.source, self.place(left)[1], self.place(right)[0])
            if operator:
                yield from ((*operator.span(), new) for new in SWAPS.get(operator[0].decode(), []))

    def walk(self, node: ast.AST, within: bool = False) -> Iterator[Change]:
        """The changes of a node and of all below it; within: inside a function."""
        children: list[Any] = list(ast.iter_child_nodes(node))
        match node:
            case ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
                return
            case ast.BinOp(op=ast.BitOr()) if not within:  # a union of types
                return
            case ast.FunctionDef():
                defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
                for default in defaults:
                    if isinstance(default, ast.Constant) and isinstance(default.value, str | None):
                        yield *self.place(default), "True" if default.value is None else "None"
                children, within = [*defaults, *node.body], True
            case ast.AnnAssign(value=ast.expr() as value):
                children = [value]
            case ast.Raise() | ast.AnnAssign() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                children = []
            case ast.ClassDef(body=children):
                pass
            case ast.Call(func=ast.Name(id="isinstance")):
                children = node.args[:1]
        yield from self.change(node)
        for child in children:
            yield from self.walk(child, within)

    def change(self, node: ast.AST) -> Iterator[Change]:
        """The changes of one node."""
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from self.swap(left, *others)
            case ast.BoolOp(values=operands):
                yield from self.swap(*operands)
            case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                yield from self.swap(left, right)
            case ast.UnaryOp():
                start, _ = self.place(node)
                yield start, start + (3 if isinstance(node.op, ast.Not) else 1), ""
            case ast.Constant(value=bool()):
                yield *self.place(node), str(not node.value)
            case ast.Constant(value=int() | float() as value):
                for other in (value + 1, value - 1) if value else (1,):
                    yield *self.place(node), f"({other})"
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in SWAPS:
                _, end = self.place(node)
                yield end - len(name), end, SWAPS[name][0]
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                    start, end = self.place(test)
                    yield start, end, f"(not {self.source[start:end].decode()})"
            case ast.Slice():
                for part in filter(None, (node.lower, node.upper, node.step)):
                    yield *self.place(part), ""
            case ast.Call():
                for keyword in node.keywords:
                    start, end = self.place(keyword)
                    comma = re.compile(rb"\s*,").match(self.source, end)
                    if keyword.arg not in (None, "strict"):  # lengths agree, checked or not
                        yield start, comma.end() if comma else end, ""
            case ast.Return(value=ast.expr() as value):
                yield *self.place(value), "None"
            case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Subscript()]):
                yield *self.place(node), "pass"
        # but no statement that binds a name, whose loss any test would notice
        if isinstance(node, ast.AugAssign | ast.Break | ast.Continue | ast.Raise):
            yield *self.place(node), "pass"


def list_mutations(file: str, line: str = "") -> Iterator[Mutation]:
    """Every change of a file, or of one line."""
    source = (ROOT / PACKAGE / file).read_bytes()
    for start, end, after in Finder(source).walk(ast.parse(source)):
        mutation = Mutation(file, source, start, end, after)
        if line in ("", str(mutation.line)):
            yield mutation


def is_other_program(mutation: Mutation) -> bool:
    """Whether a mutation is still Python, and another program."""
    try:
        return ast.dump(ast.parse(mutation.apply())) != ast.dump(ast.parse(mutation.source))
    except SyntaxError:  # a parenthesis stood between
        return False


def draw_mutations(possible: list[Mutation], number: int, seed: int) -> list[Mutation]:
    """Up to `number` mutations, without replacement."""
    drawn = random.Random(seed).sample(possible, len(possible))
    return list(islice(filter(is_other_program, drawn), number))


# ---- running the tests --------------------------------------------------------------------------


def pytest_configure() -> None:
    """Hypothesis in the tests of a mutation: always the same examples, and none made smaller."""
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutations", derandomize=True, database=None, phases=phases)
    settings.load_profile("mutations")


def find_tests(file: str) -> tuple[str, ...]:
    """The arguments of pytest that run the tests of a file."""
    place = file
    while place not in TESTS:
        place = place.rpartition("/")[0]
    # an older tree may lack some
    own = [each for each in TESTS[place] if each.startswith("-") or (ROOT / each).exists()]
    general = GENERAL if file.startswith("core/") else [str(PACKAGE / file)]
    return (*own, *general)


def run_tests(
    project: Path, tests: Iterable[str], mutation: Mutation | None = None, seconds: float = ASLEEP
) -> str:
    """What tests do with a mutation: they "passed", "failed" or were "stopped"."""
    kernels = "kernels"
    if mutation is not None:
        path = project / PACKAGE / mutation.file
        stamp = path.stat().st_mtime_ns
        path.write_bytes(mutation.apply())
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        # numba sees that a kernel's own file has changed, not that of a kernel which it calls
        if b"numba" in mutation.source or b"@kernel" in mutation.source:
            kernels = "mutated kernels"
            shutil.rmtree(project / kernels, ignore_errors=True)
    command = ["prlimit", f"--cpu={seconds:.0f}", f"--as={MEMORY}", sys.executable, "-m", "pytest"]
    command += ["-xq", "-n0", "-p", "no:cacheprovider", "-p", "tests.mutations"]
    command += [f"--basetemp={project / 'tmp'}", *tests]
    settings = {"PYTHONPATH": str(project / "src"), "NUMBA_CACHE_DIR": str(project / kernels)}
    environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, timeout=ASLEEP
        )
        if done.returncode == -signal.SIGTERM:  # which neither limit sends
            raise RuntimeError("the tests were ended from outside, which says nothing about them")
        return {0: "passed", 1: "failed"}.get(min(done.returncode, 1), "stopped")
    except subprocess.TimeoutExpired:
        return "stopped"
    finally:
        if mutation is not None:
            path.write_bytes(mutation.source)
            os.utime(path, ns=(stamp, stamp))


@dataclass(frozen=True)
class Laboratory:
    """Copies of the project, in which tests run side by side."""

    projects: SimpleQueue[Path]  # those that are free
    pool: ThreadPoolExecutor

    def time_tests(self, tests: tuple[str, ...]) -> float:
        """The processor time of tests without a mutation, with which they must pass."""
        project = self.projects.get()
        begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        outcome = run_tests(project, tests)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin
        self.projects.put(project)
        if outcome != "passed":
            sys.exit(f"without a mutation these must pass; they {outcome}: {' '.join(tests)}")
        return seconds  # of tests that run at the same time too: a limit may be too large

    def is_caught(self, mutation: Mutation, seconds: float) -> bool:
        """Whether the tests of a mutation's file notice it; printed with what they do."""
        project = self.projects.get()
        begin = time.monotonic()
        outcome = run_tests(project, find_tests(mutation.file), mutation, seconds)
        self.projects.put(project)
        word = "SURVIVED" if outcome == "passed" else outcome
        print(f"{word:9} {time.monotonic() - begin:3.0f} s  {mutation}", flush=True)
        return outcome != "passed"

    def count_caught(self, mutations: list[Mutation]) -> int:
        """How many mutations their tests notice."""
        kinds = list(dict.fromkeys(find_tests(each.file) for each in mutations))
        alone = dict(zip(kinds, self.pool.map(self.time_tests, kinds), strict=True))
        limits = [
            max(LEAST_PATIENCE, PATIENCE * alone[find_tests(each.file)]) for each in mutations
        ]
        return sum(self.pool.map(self.is_caught, mutations, limits))


def list_files(package: str) -> list[str]:
    """The files of a package, as core/graph.py."""
    source = ROOT / PACKAGE
    return sorted(path.relative_to(source).as_posix() for path in source.glob(f"{package}/**/*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--packages", nargs="+", default=["core", "analysis"])
    parser.add_argument("--files", nargs="+", help="files, or lines as file:line, of any package")
    parser.add_argument("--number", type=int, default=60, help="mutations of each, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    possible: dict[str, list[Mutation]] = {}
    if options.files:
        for name in options.files:
            file, _, line = name.partition(":")
            possible[name] = list(list_mutations(file, line))
    else:
        for package in (name for given in options.packages for name in given.split(",")):
            possible[package] = [
                mutation for file in list_files(package) for mutation in list_mutations(file)
            ]
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(options.workers) as pool,
    ):
        laboratory = Laboratory(SimpleQueue(), pool)
        for number in range(options.workers):
            project = Path(folder, str(number))
            shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "__pycache__"))
            laboratory.projects.put(project)
        for name, mutations in possible.items():
            drawn = draw_mutations(mutations, options.number, options.seed)
            caught = laboratory.count_caught(drawn)
            share = f"{caught / max(1, len(drawn)):.0%}"
            print(f"{name}: caught {caught} of {len(drawn)}, {share}; {len(mutations)} possible")


if __name__ == "__main__":
    main()
