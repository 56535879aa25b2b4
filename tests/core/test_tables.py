"""Results as tables: the same rows in every form, whatever their tokens, and where they came from."""

import csv
import html.parser
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from attnflow.core.io.formatting import (
    VIEW_ROWS,
    Panel,
    escape_latex,
    format_html,
    format_latex,
    format_markdown,
    format_number,
)
from attnflow.core.io.tables import Table
from attnflow.core.io.views import VIEW_NAME, VIEW_SIDE, format_attention, format_heat_map
from attnflow.core.provenance import Source
from attnflow.core.text import clean_text, show_token
from tests.oracles import attention

HOSTILE = [
    "</td><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "a|b",
    r"\input{/etc/passwd}",
    "$&#_^~%{}[]*",
    "two\nlines",
    "\u202eevil",
    "\ud800",
    "\x1b[31m",
    "Ġkey",
    "",
    "x" * 10_000,
]
SOURCE = Source(
    "verb-number", "0a1b2c3d", {"attnflow": "0.3"}, "rollout", "attention", residual=0.5
)
WEIGHTS = attention("peaky", 3, len(HOSTILE), np.random.default_rng(0))
GRAPH = af.Attention(WEIGHTS, tokens=HOSTILE).graph()
ROLLOUT = replace(af.rollout(GRAPH, layers=[2, 3], positions=[0, 4]), source=SOURCE)
FLOW = replace(af.max_flow(GRAPH, source=(3, 0), target=(0, [1, 2])), provenance=SOURCE)
IMPORTANCE = af.Importance(
    np.linspace(-0.5, 0.5, len(HOSTILE)),
    "blank_out",
    tuple(HOSTILE),
    "</p>",
    0.9,
    signed=True,
    source=SOURCE,
)
RESULTS: dict[str, Any] = {"rollout": ROLLOUT, "max_flow": FLOW, "blank_out": IMPORTANCE}


@dataclass(frozen=True)
class Small(Table):
    """The least that a table needs."""

    columns = ("token", "layer", "value")
    cells: tuple[tuple[Any, ...], ...] = (("a|b", 1, 0.5), ("Ġkey", None, float("nan")))
    source: Source | None = None

    def rows(self) -> Iterator[tuple[Any, ...]]:
        yield from self.cells


# ---- one table in all forms ----------------------------------------------------------------------


@pytest.mark.parametrize("name", RESULTS)
def test_pandas_and_csv_have_every_value_as_it_is(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    rows = [
        tuple(clean_text(cell) if isinstance(cell, str) else cell for cell in row)
        for row in result.rows()
    ]
    frame = result.to_pandas()
    assert list(frame.columns) == list(result.columns)
    assert list(frame.itertuples(index=False, name=None)) == rows
    assert frame.attrs["source"] == SOURCE.to_dict()
    path = result.save(tmp_path / "result.csv")
    assert path.read_text() == result.to_csv()
    header, *lines = csv.reader(io.StringIO(result.to_csv()))
    assert header == [*result.columns, "source"]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert line[-1] == str(SOURCE)
        for read, value in zip(line, row, strict=False):
            assert read == str(value)


@pytest.mark.parametrize("name", RESULTS)
def test_a_saved_result_is_what_its_forms_say(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    forms = {"csv": result.to_csv, "json": result.to_json}
    forms |= {"md": result.to_markdown, "tex": result.to_latex}
    for ending, form in forms.items():
        saved = result.save(tmp_path / f"result.{ending}").read_bytes()
        assert saved == form().encode(errors="backslashreplace")
    content = json.loads(result.to_json())
    field = "provenance" if name == "max_flow" else "source"
    assert content[field] == SOURCE.to_dict()
    with np.load(result.save(tmp_path / "result.npz")) as arrays:
        assert Source.from_json(str(arrays[field])) == SOURCE
        for shared in content.keys() & {"values", "tokens", "layers", "positions", "cut"}:
            assert arrays[shared].tolist() == content[shared]
    with pytest.raises(af.FileError, match=r"one of \.csv, \.json, \.md, \.tex, \.npz; got \.doc"):
        result.save(tmp_path / "result.doc")


def test_groups_are_saved_as_positions(tmp_path: Path) -> None:
    groups = [[3, 0], [1, 2, 5]]
    result = af.rollout(GRAPH, groups=groups, normalize=None)
    assert json.loads(result.to_json())["groups"] == groups
    with np.load(result.save(tmp_path / "groups.npz")) as arrays:
        assert arrays["group_positions"].tolist() == [3, 0, 1, 2, 5]
        assert arrays["group_lengths"].tolist() == [2, 3]
        assert [arrays["normalize"].item(), arrays["bottom"].item()] == ["none", 0]
    with np.load(af.raw(GRAPH).save(tmp_path / "raw.npz")) as arrays:
        assert [arrays["normalize"].item(), arrays["bottom"].item()] == ["sum", -1]
        assert "group_positions" not in arrays


def test_a_table_without_arrays_is_saved_as_its_rows(tmp_path: Path) -> None:
    saved = Small(source=SOURCE).save(tmp_path / "small.json").read_text()
    first, second = json.loads(saved)["table"]
    assert first == {"token": "a|b", "layer": 1, "value": 0.5}
    assert second == {"token": "Ġkey", "layer": None, "value": None}
    assert json.loads(saved)["source"] == SOURCE.to_dict()
    with pytest.raises(af.FileError, match=r"the ending must be one of .*; got \.npz"):
        Small().save(tmp_path / "small.npz")


def test_a_table_must_have_rows() -> None:
    class Bare(Table):
        columns = ("token",)

    with pytest.raises(TypeError, match=r"abstract method '?rows"):
        Bare()  # type: ignore[abstract]


def test_every_result_of_one_kind_has_the_same_columns() -> None:
    graph = af.Attention(WEIGHTS).graph()
    tables = [af.raw(graph).to_pandas(), af.rollout(graph).to_pandas(), af.flow(graph).to_pandas()]
    columns = ["method", "layer", "position", "query", "key", "token", "value"]
    assert all(list(table.columns) == columns for table in tables)
    assert all(table["method"].nunique() == 1 for table in tables)
    assert list(IMPORTANCE.to_pandas().columns) == ["method", "target", "key", "token", "value"]


def test_a_result_without_a_source_says_none() -> None:
    small = Small()
    assert small.to_csv().splitlines()[0] == "token,layer,value"
    assert "source" not in small.to_pandas().attrs
    assert "source" not in small.to_markdown() + small.to_latex() + small._repr_html_()


def test_whole_numbers_with_gaps_stay_whole_in_pandas() -> None:
    frame = Small().to_pandas()
    assert str(frame["layer"].dtype) == "Int64"
    assert str(frame["value"].dtype) == "float64"
    assert frame["layer"][0] == 1


def test_an_empty_table_is_one() -> None:
    empty = Small(cells=())
    assert empty.to_csv() == "token,layer,value\n"
    assert list(empty.to_pandas().columns) == list(empty.columns)
    assert len(empty.to_pandas()) == 0
    assert empty.to_markdown() == "| token | layer | value |\n| --- | --- | --- |\n"
    assert "\\midrule\n\\bottomrule" in empty.to_latex()
    assert "<tbody></tbody>" in empty._repr_html_()


def test_tables_in_markdown_and_latex_can_be_cut() -> None:
    rows = len(list(ROLLOUT.rows()))
    assert f"3 of {rows} rows" in ROLLOUT.to_markdown(limit=3)
    assert f"% 3 of {rows} rows" in ROLLOUT.to_latex(limit=3)
    assert " rows" not in ROLLOUT.to_markdown(limit=rows)
    assert ROLLOUT.to_markdown().count("\n| ") == rows + 1
    with pytest.raises(af.OptionError, match="limit must be a whole number, at least 1; got 0"):
        ROLLOUT.to_markdown(limit=0)


def test_where_it_came_from_stands_below_every_printed_table() -> None:
    assert ROLLOUT.to_markdown().rstrip().endswith(f"source: {SOURCE}")
    assert ROLLOUT.to_latex().rstrip().endswith(f"% source: {SOURCE}")
    assert str(SOURCE) in ROLLOUT._repr_html_()


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0, 1e-7, -3e9, 12345.678, float("nan"), np.inf])
def test_a_number_keeps_three_digits_in_print(value: float) -> None:
    printed = format_number(value)
    assert np.isclose(float(printed), value, rtol=5e-3, equal_nan=True)
    assert f"| {printed} |" in format_markdown(["value"], [(value,)])[-1]
    assert (
        f"{printed.replace('-', '$-$', 1) if value < 0 else printed} "
        in format_latex(["value"], [(value,)])[-3]
    )
    assert f">{printed}<" in format_html([Panel(["value"], [(value,)])])


# ---- hostile tokens ------------------------------------------------------------------------------


def test_markdown_has_one_line_per_row_and_no_cell_too_many() -> None:
    for result in RESULTS.values():
        table = [line for line in result.to_markdown().split("\n") if line.startswith("|")]
        assert len(table) == len(list(result.rows())) + 2
        for line in table:
            assert len(re.findall(r"(?<!\\)\|", line)) == len(result.columns) + 1
            assert line.isprintable()


MACROS = {
    "textbackslash": "\\",
    "textasciicircum": "^",
    "textasciitilde": "~",
    "textless": "<",
    "textgreater": ">",
    "textbar": "|",
    "textvisiblespace": "␣",
    "dots": "…",
}
MATHS = {"emptyset": "∅", "pm": "±"}


def read_latex(text: str) -> str:
    """What LaTeX prints of a text; fails on all that it would execute, or could not end."""
    printed, depth = "", 0
    while text:
        if match := re.match(r"\\([{}$&#_%])", text):
            printed += match[1]
        elif match := re.match(r"\\([a-z]+)\{\}", text):
            printed += MACROS[match[1]]
        elif match := re.match(r"\$\\([a-z]+)\$", text):
            printed += MATHS[match[1]]
        elif match := re.match(r"[{}]", text):
            depth += 1 if match[0] == "{" else -1
            assert depth >= 0
        else:
            match = re.match(r"(?s).", text)
            assert match is not None
            assert match[0] not in "\\$&#_^~%<>|"
            printed += match[0]
        text = text[match.end() :]
    assert depth == 0
    return printed


@given(st.text())
def test_latex_prints_every_token_and_executes_none(token: str) -> None:
    shown = show_token(token)
    escaped = escape_latex(shown)
    assert read_latex(escaped) == shown
    assert not re.search(r"--|``|''|,,|[?!]`", escaped)  # ligatures
    (row,) = format_latex(["token"], [(token,)])[4:-2]
    assert "\n" not in row
    # an option of the line break, or of the rule, before it
    assert not row.startswith(("[", "*"))


def test_latex_has_as_many_cells_as_columns() -> None:
    for result in RESULTS.values():
        text = result.to_latex()
        rows = [line for line in text.splitlines() if line.endswith(" \\\\")]
        assert len(rows) == len(list(result.rows())) + 1
        for row in rows:
            assert len(re.findall(r"(?<!\\)&", row)) == len(result.columns) - 1
        commands = re.findall(r"(?m)^\\\w+", text)
        assert set(commands) <= {"\\begin", "\\toprule", "\\midrule", "\\bottomrule", "\\end"} | {
            f"\\{name}" for name in MACROS
        }


class Document(html.parser.HTMLParser):
    """The tags, attributes and texts of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["td", "bdi"]:
            self.cells.append(data)


VIEWS: dict[str, Callable[[], str]] = {
    **{name: result._repr_html_ for name, result in RESULTS.items()},
    "attention": lambda: format_attention(af.Attention(WEIGHTS, tokens=HOSTILE)),
    "matrix": lambda: format_heat_map(WEIGHTS[0], HOSTILE, HOSTILE, caption=HOSTILE[0]),
    "caption": lambda: format_html(
        [Panel([HOSTILE[1]], [(1,)], caption=HOSTILE[0], note=HOSTILE[1])]
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_notebook_shows_is_text_and_nothing_runs(name: str) -> None:
    text = VIEWS[name]()
    document = Document(text)
    assert document.tags <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "bdi"}
    assert document.attributes <= {"style", "title"}
    assert "url(" not in text
    assert text.isprintable()
    assert len(text) < 200_000
    assert text.encode()


def test_a_notebook_shows_the_top_layers_row_in_the_order_of_the_text() -> None:
    document = Document(ROLLOUT._repr_html_())
    numbers, tokens = document.cells[::3], document.cells[1::3]
    assert numbers == list(map(str, range(len(HOSTILE))))
    assert tokens[:3] == [show_token(token) for token in HOSTILE[:3]]
    assert document.cells[2::3] == [format_number(value) for value in ROLLOUT.at(0, 3)]
    assert "rollout: layer 3, position 0" in ROLLOUT._repr_html_()


def test_a_notebook_shows_the_strongest_where_there_are_too_many() -> None:
    weights = attention("peaky", 2, 3 * VIEW_ROWS, np.random.default_rng(1))
    result = af.rollout(weights)
    document = Document(result._repr_html_())
    keys = list(map(int, document.cells[::3]))
    assert keys == sorted(key for key, _, _ in result.top(VIEW_ROWS, position=0))
    assert f"the {VIEW_ROWS} strongest of {3 * VIEW_ROWS} keys" in result._repr_html_()
    view = format_attention(af.Attention(weights))
    assert f"the first {VIEW_SIDE} of {3 * VIEW_ROWS} rows" in view
    assert view.count("<td") == VIEW_SIDE**2


def test_bars_are_as_long_as_the_values_and_of_another_colour_against() -> None:
    shown = format_html([Panel(["value"], [(1.0,), (-0.5,), (None,)], bar="value")])
    assert re.findall(r"\) ([\d.]+)%,", shown) == ["100.0", "50.0", "0.0"]
    assert shown.count("241,105,19") == 1
    undefined = format_html([Panel(["value"], [(float("nan"),), (0.0,)], bar="value")])
    assert "gradient" not in undefined


# ---- one maximum flow ----------------------------------------------------------------------------


def test_the_table_of_a_flow_conserves_it_and_marks_a_cut() -> None:
    frame = FLOW.to_pandas()
    assert (frame["flow"] > 0).all()
    top, bottom = frame[frame["layer"] == 3], frame[frame["layer"] == 1]
    assert top["flow"].sum() == pytest.approx(FLOW.value)
    assert bottom["flow"].sum() == pytest.approx(FLOW.value)
    assert set(bottom["key"]) <= {1, 2}
    assert frame[frame["cut"]]["flow"].sum() == pytest.approx(FLOW.cut_capacity)
    edges = frame[frame["cut"]][["layer", "position", "key"]]
    assert set(edges.itertuples(index=False, name=None)) == set(FLOW.cut)
    assert list(frame["layer"]) == sorted(frame["layer"], reverse=True)


def test_a_flow_is_saved_whole(tmp_path: Path) -> None:
    content = json.loads(FLOW.save(tmp_path / "flow.json").read_text())
    assert content["value"] == FLOW.value
    assert content["target"] == [0, [1, 2]]
    assert content["provenance"] == SOURCE.to_dict()
    edges = np.zeros_like(FLOW.edges)
    for layer, query, key, flow in content["edges"]:
        edges[layer - 1, query, key] = flow
    assert (edges == FLOW.edges).all()
    with np.load(FLOW.save(tmp_path / "flow.npz")) as arrays:
        assert (arrays["edges"] == FLOW.edges).all()
        assert tuple(map(tuple, arrays["cut"].tolist())) == FLOW.cut
        assert arrays["target_positions"].tolist() == [1, 2]
        assert Source.from_json(arrays["provenance"].item()) == SOURCE
    with pytest.raises(
        af.FileError, match=r"must be one of .csv, .json, .md, .tex, .npz; got .txt"
    ):
        FLOW.save(tmp_path / "flow.txt")


@pytest.mark.parametrize("name", ["rollout", "blank_out"])
def test_files_say_where_they_came_from(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    content = json.loads(result.save(tmp_path / "result.json").read_text())
    assert content["source"] == SOURCE.to_dict()
    assert np.allclose(content["values"], result.values)
    with np.load(result.save(tmp_path / "result.npz")) as arrays:
        assert Source.from_json(arrays["source"].item()) == SOURCE
        assert (arrays["values"] == result.values).all()
    silent = replace(result, source=None)
    assert "source" not in json.loads(silent.save(tmp_path / "silent.json").read_text())
    with np.load(silent.save(tmp_path / "silent.npz")) as arrays:
        assert "source" not in arrays


def test_a_cut_without_edges_is_saved_as_numbers_of_edges(tmp_path: Path) -> None:
    nothing = af.max_flow(
        af.Attention([np.tri(2) / np.array([[1], [2]])]), source=(1, 0), target=(0, 1)
    )
    assert (nothing.value, nothing.cut) == (0.0, ())
    with np.load(nothing.save(tmp_path / "nothing.npz")) as arrays:
        assert arrays["cut"].shape == (0, 3)
        assert arrays["cut"].dtype == np.int64


def test_a_heat_map_says_what_it_leaves_out_and_nothing_else() -> None:
    whole = format_heat_map(np.ones((2, 3)), ["a", "b"], ["c", "d", "e"])
    assert "the first" not in whole
    assert "…" not in whole
    fits, cut = "x" * VIEW_NAME, "y" * (VIEW_NAME + 1)
    names = [str(number) for number in range(VIEW_SIDE + 1)]
    shown = format_heat_map(np.ones((2, VIEW_SIDE + 1)), [fits, cut], names)
    assert f"the first {VIEW_SIDE} of {VIEW_SIDE + 1} columns" in shown
    assert "rows" not in shown
    assert f">{fits}<" in shown
    assert f">{cut[:-2]}…<" in shown
