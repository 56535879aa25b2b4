"""The shape of the code, counted: lines, decisions of functions, names, and uses of `Any`.

    python -m tests.shape               of this tree
    python -m tests.shape PATH          of another one, such as an older clone's src/attnflow

`test_house.py` holds the limits.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "attnflow"
MOST_DECISIONS = 15
Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_code_lines(path: Path) -> int:
    """The lines of a file that are neither blank nor only a comment or a docstring."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def count_decisions(function: ast.AST) -> int:
    """Branches, loops, conditional expressions, boolean operators, comprehensions and their conditions."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        else:
            count += isinstance(
                node,
                ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.match_case,
            )
    return count


def list_functions(path: Path) -> Iterator[Function]:
    """All functions and methods of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def list_names(path: Path) -> set[str]:
    """What a module defines itself: functions, classes, types and constants."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    return {name for name in names if not name.startswith("__")}


def find_shared_names(source: Path = SOURCE) -> dict[str, list[str]]:
    """Names that several modules define, and these modules."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for name in list_names(path):
            places[name].append(path.relative_to(source).as_posix())
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def count_any(path: Path) -> int:
    """How often a file says `Any`, imports aside."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def main() -> None:
    """Print the counts of each package, the functions of most decisions, and shared names."""
    parser = argparse.ArgumentParser(description="Count lines of code, decisions, names and Any.")
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE)
    source = parser.parse_args().source
    lines, anys = Counter[str](), Counter[str]()
    long: list[tuple[int, str]] = []
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        package = place.parts[0] if len(place.parts) > 1 else "attnflow"
        lines[package] += count_code_lines(path)
        anys[package] += count_any(path)
        for function in list_functions(path):
            decisions = count_decisions(function)
            if decisions > MOST_DECISIONS:
                long.append((decisions, f"{place}: {function.name}"))
    print(f"{lines.total():,} lines of code, {anys.total()} times Any")
    for package, count in lines.most_common():
        print(f"  {count:6,}  {anys[package]:4}  {package}")
    print(f"{len(long)} functions of more than {MOST_DECISIONS} decisions")
    for decisions, name in sorted(long, reverse=True):
        print(f"  {decisions:6}  {name}")
    shared = find_shared_names(source)
    print(f"{len(shared)} names are defined in several files")
    for name, places in shared.items():
        print(f"  {name}: {', '.join(places)}")


if __name__ == "__main__":
    main()
