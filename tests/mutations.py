"""Do the tests bite? The core is changed in one place at a time, and its tests must notice.

    python -m tests.mutations [--files core/graph.py core/results.py:120] [--number N] [--seed S]

A mutation is one small change of the source: an operator swapped, a constant moved by one, a
statement, a keyword or the end of a slice left out. It is written into a copy of the project, where
the tests that concern the file run. A mutation with which they pass has survived: it is equivalent
(nothing that is promised changes), or a test is missing. A file with a line, as above, stands for
the mutations of that line. Messages, annotations and `__repr__` are left as they are.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src", "attnflow")
MEMORY = 12 * 2**30  # bytes of address space: a mutation may ask for an array of any size
PATIENCE = 3  # times the processor time of the tests alone: so a loop without end is caught
ASLEEP = 600  # seconds: nothing that works takes so long, even on a busy machine

# what runs for a file: the fast tests that know it, and with all of them these
GENERAL = ["src/attnflow/core", "tests/test_core_edges.py"]
USUAL = ["tests/test_graph.py", "tests/test_methods.py"]
TESTS = {
    "core/files.py": ["tests/test_files.py", "tests/test_graph.py"],
    **{
        f"core/{name}.py": ["tests/test_maxflow.py"]
        for name in ("bounds", "capacities", "flows", "kernels", "maxflow", "mincut")
    },
    **{f"core/{name}.py": ["tests/test_tables.py"] for name in ("formatting", "views")},
    "core/custom.py": ["tests/test_open_methods.py", "-k not corpus"],
    "core/memory.py": [],
    "core/padding.py": ["tests/test_batches.py"],
    "core/provenance.py": [],
    "core/single_flow.py": ["tests/test_tables.py", "tests/test_methods.py"],
    "core/tables.py": ["tests/test_tables.py", "tests/test_house.py"],
    "core/text.py": ["tests/test_text.py"],
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


def list_mutations(file: str, source: bytes, line: str = "") -> Iterator[Mutation]:
    """Every change of a file, or of one line, that is Python still, and another program."""
    tree = ast.parse(source)
    same = ast.dump(tree)
    for start, end, after in Finder(source).walk(tree):
        mutation = Mutation(file, source, start, end, after)
        try:
            changed = ast.dump(ast.parse(mutation.apply())) != same
        except SyntaxError:  # a parenthesis stood between
            continue
        if changed and line in ("", str(mutation.line)):
            yield mutation


# ---- running the tests --------------------------------------------------------------------------


def pytest_configure() -> None:
    """Hypothesis in the tests of a mutation: always the same examples, and none made smaller."""
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutations", derandomize=True, database=None, phases=phases)
    settings.load_profile("mutations")


def run_tests(project: Path, file: str, source: bytes, seconds: float = ASLEEP) -> str:
    """What the tests of a file do with this source: they "passed", "failed" or were "stopped"."""
    path, folder = project / PACKAGE / file, project / "tmp"
    original, stamp = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(source)
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    # numba sees that a kernel's own file has changed, not that of a kernel which it calls
    kernels = "mutated kernels" if b"numba" in source or b"@kernel" in source else "kernels"
    shutil.rmtree(project / "mutated kernels", ignore_errors=True)
    command = ["prlimit", f"--cpu={seconds:.0f}", f"--as={MEMORY}", sys.executable, "-m", "pytest"]
    command += ["-xq", "-p", "no:cacheprovider", "-p", "tests.mutations", f"--basetemp={folder}"]
    command += [*GENERAL, *TESTS.get(file, USUAL)]
    settings = {"PYTHONPATH": str(project / "src"), "NUMBA_CACHE_DIR": str(project / kernels)}
    environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
    try:
        tests = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, timeout=ASLEEP
        )
        if tests.returncode == -signal.SIGTERM:  # which neither limit sends
            raise RuntimeError("the tests were ended from outside, which says nothing about them")
        return {0: "passed", 1: "failed"}.get(min(tests.returncode, 1), "stopped")
    except subprocess.TimeoutExpired:
        return "stopped"
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stamp, stamp))


def count_caught(project: Path, mutations: list[Mutation], seconds: float) -> int:
    """How many mutations the tests notice; each is printed with what they do."""
    caught = 0
    for mutation in mutations:
        begin = time.monotonic()
        outcome = run_tests(project, mutation.file, mutation.apply(), seconds)
        caught += outcome != "passed"
        word = "SURVIVED" if outcome == "passed" else outcome
        print(f"{word:9} {time.monotonic() - begin:3.0f} s  {mutation}", flush=True)
    return caught


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--files", nargs="+", help="files, or lines as file:line; else the core")
    parser.add_argument("--number", type=int, default=20, help="mutations per file, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    core = sorted(f"core/{path.name}" for path in (ROOT / PACKAGE / "core").glob("*.py"))
    totals = [0, 0]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        projects = [Path(folder, str(number)) for number in range(options.workers)]
        for project in projects:
            shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for name in options.files or core:
            file, _, line = name.partition(":")
            source = (ROOT / PACKAGE / file).read_bytes()
            possible = list(list_mutations(file, source, line))
            number = min(options.number, len(possible))
            chosen = random.Random(options.seed).sample(possible, number)
            begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            alone = set(pool.map(run_tests, projects, repeat(file), repeat(source)))
            if alone != {"passed"}:
                sys.exit(f"the tests of {file} must pass without a mutation; got {alone}")
            seconds = PATIENCE * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin)
            parts = [chosen[place :: options.workers] for place in range(options.workers)]
            caught = sum(pool.map(count_caught, projects, parts, repeat(seconds)))
            print(f"{name}: caught {caught} of {number}; {len(possible)} possible", flush=True)
            totals = [totals[0] + caught, totals[1] + number]
    print(f"all: caught {totals[0]} of {totals[1]}")


if __name__ == "__main__":
    main()
