"""Corners of the core that other tests leave open: what `tests/mutations.py` could change unnoticed."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.core import memory, provenance
from attnflow.core.flow.solve import find_all_flows, find_flows
from attnflow.core.groups import list_numbers, read_groups
from attnflow.core.io.files import check_writable, read_lines, write_file
from attnflow.core.provenance import Source, list_versions, read_versions
from attnflow.core.results import measure_spread
from tests.oracles import Floats, attention, edges_of

RNG = np.random.default_rng(0)
WORDS = af.Attention(
    RNG.dirichlet(np.ones(5), size=(3, 2, 5)),
    tokens=["[CLS]", "un", "##do", "it", "[SEP]"],
    words=[None, 0, 0, 1, None],
)


# ---- results ------------------------------------------------------------------------------------


def renamed_flow(graph: af.Attention, **options: Any) -> af.TokenAttention:
    """A method of a user's own, built on flow, so that its result knows what limits it."""
    return replace(af.flow(graph, **options), method="mine")


@pytest.mark.parametrize(
    "method",
    [
        af.raw,
        af.rollout,
        renamed_flow,
    ],
)
@pytest.mark.parametrize("options", [{}, {"layers": [3], "positions": [4, 1]}])
def test_every_array_of_a_result_by_word_has_the_shape_that_its_names_say(
    method: Any, options: dict[str, Any]
) -> None:
    by_token = method(WORDS, **options)
    try:
        result = by_token.by_word()
    except af.OptionError:
        assert by_token.limits is not None  # such a result may refuse, as flow does
        return
    assert result.tokens == ("[CLS]", "undo", "it", "[SEP]")
    assert [group.positions for group in result.groups] == [(0,), (1, 2), (3,), (4,)]
    rows = (len(result.layers), len(result.positions))
    assert len(result.queries) == len(result.positions)
    assert result.spread.shape == result.visible_keys.shape == rows
    for array in (result.values, result.limits, result.saturated):
        assert array is None or array.shape == (*rows, len(result.tokens))
    assert len(list(result.rows())) == len(result.to_pandas()) == result.values.size


@pytest.mark.parametrize("method", [af.raw, af.rollout, af.flow])
def test_a_selected_row_is_that_row_with_all_that_is_known_of_it(method: Any) -> None:
    whole = method(WORDS, layers=[1, 3, 2], positions=[4, 2, 0], normalize=None)
    row = whole.select(2, 3)
    assert (row.layers, row.positions, row.queries) == ((3,), (2,), ("##do",))
    assert row.values.tolist() == [[whole.at(2, 3).tolist()]]
    assert row.spread.tolist() == [[whole.spread[1, 1]]]
    assert row.visible_keys.tolist() == [[5]]
    if method is af.flow:
        assert row.limits.tolist() == [[whole.limits[1, 1].tolist()]]
    with pytest.raises(af.OptionError, match="position 1 was not computed"):
        whole.select(1, 3)


def test_a_result_made_by_hand_knows_its_size_from_its_keys() -> None:
    values = np.array([[[0.2, 0.3, 0.5]]])  # [layer, query, key]
    named: dict[str, Any] = {"tokens": ("a", "b", "c"), "queries": ("c",), "causal": False}
    result = af.TokenAttention(values, "mine", (1,), (2,), 0, normalize=None, **named)
    assert result.size == 3
    assert result.at(-1).tolist() == [0.2, 0.3, 0.5]


@pytest.mark.parametrize("copy", [True, False, None])
def test_a_result_is_an_array_of_the_type_asked_for(copy: bool | None) -> None:
    result = af.rollout(WORDS)
    single = result.__array__(np.float32, copy=copy)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, result.values, rtol=1e-6)
    assert np.shares_memory(result.__array__(copy=copy), result.values) == (not copy)


def test_the_spread_of_rows_is_the_same_along_any_axes() -> None:
    values = RNG.random((2, 3, 4))
    seen = RNG.random((2, 3, 4)) < 0.8
    stacked = [measure_spread(rows, mask) for rows, mask in zip(values, seen, strict=True)]
    np.testing.assert_array_equal(measure_spread(values, seen), stacked)


# ---- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-0.1, np.nan, np.inf])
def test_one_bad_number_of_a_head_fusion_is_refused(bad: float) -> None:
    def fuse(weights: Floats, axis: int) -> Floats:
        fused: Floats = weights.mean(axis=axis)
        fused[2, 3] = bad
        return fused

    with pytest.raises(af.OptionError, match="finite and not negative; in layer 1"):
        WORDS.graph(heads=fuse)


def test_a_layer_that_is_larger_than_a_slab_is_worked_on_alone() -> None:
    even = af.Attention(np.full((2, 300, 300), 1 / 300))  # a slab has 65,536 numbers
    assert np.abs(even.graph(residual=0).edges - 1 / 300).max() < 1e-15


@pytest.mark.parametrize(("off", "fits"), [(5e-3, True), (2e-2, False)])
def test_rows_of_16_bits_may_be_off_by_a_hundredth(off: float, fits: bool) -> None:
    weights = np.full((1, 4, 4), 0.25 * (1 + off), np.float16)
    if fits:
        assert np.abs(af.Attention(weights).graph().weights - 0.25).max() < 1e-15
    else:
        with pytest.raises(af.WeightsError, match=r"must sum to 1 within 0\.01; layer 1, query 0"):
            af.Attention(weights)


def test_all_that_an_attention_knows_is_saved_and_loaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"layer_names": list("abc"), "grid": (1, 5), "window": [5, None, 6]}
    first = af.Attention(W, tokens=list("vwxyz"), **options)
    second = af.Attention.load(first.save(tmp_path / "all.npz"))
    for name in ("tokens", "causal", "window", "words", "fused", "layer_names", "grid"):
        assert getattr(first, name) == getattr(second, name)
    assert second.grid == (1, 5)
    assert second.window == (5, None, 6)


W = WORDS.weights
BAD_FILES: list[tuple[Any, str]] = [
    (lambda path: None, "No such file or directory"),
    (lambda path: path.mkdir(), "is a folder; give an .npz or .npy file"),
    (lambda path: path.write_bytes(b"some text"), "holds pickled objects or no array at all"),
    (lambda path: np.savez(path, weights=np.array([{}])), "holds pickled objects or no array at"),
    (lambda path: path.write_bytes(b"PK\x03\x04 cut"), "is damaged, cut off, or no array file"),
    (lambda path: np.savez(path, a=W, b=W), "or one named 'weights'; it holds a, b"),
    (lambda path: np.savez(path), "or one named 'weights'; it holds none"),
    (lambda path: np.savez(path, weights=W, format=2), r"by a newer attnflow \(format 2\)"),
    (lambda path: np.savez(path, weights=W, tokens=[list("abcde")]), "its tokens are not a list"),
    (lambda path: np.savez(path, weights=W, grid=[1]), "grid must be"),
    (
        lambda path: np.savez(path, weights=W, token_bytes=[1], token_lengths=[2, -1]),
        "the lengths of its tokens do not match their bytes",
    ),
]


@pytest.mark.parametrize(("write", "message"), BAD_FILES)
def test_a_bad_file_of_weights_is_an_error_of_one_line(
    write: Any, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "bad.npz")
    with pytest.raises(af.AttnFlowError, match=message) as error:
        af.Attention.load(tmp_path / "bad.npz")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", [0, 2])
def test_a_layer_without_weights_is_named_by_its_number(place: int) -> None:
    layers: list[Any] = [np.eye(2)[None, None]] * 3
    layers[place] = None
    with pytest.raises(
        af.WeightsError, match=rf"^layer {place + 1} is None: the model returned no"
    ):
        af.Attention(layers)


def test_bad_weights_in_a_file_are_an_error_of_the_weights(tmp_path: Path) -> None:
    np.save(tmp_path / "halves.npy", np.full((1, 2, 2), 0.25))
    with pytest.raises(af.WeightsError, match=r"^rows of the weights must sum to 1"):
        af.Attention.load(tmp_path / "halves.npy")


def test_the_row_of_a_removed_position_may_be_empty_under_a_mask() -> None:
    weights = [[[0.0, 0.0, 0.0], [0.5, 0.5, 1e-9], [0.2, 0.3, 0.5]]]
    graph = af.AttentionGraph(weights, causal=True, removed=[0])
    assert graph.edges[0, 0].tolist() == [0.0, 0.0, 0.0]
    expected = np.array([[0.0, 1.0, 0.0], [0.0, 0.1875, 0.8125]])
    np.testing.assert_allclose(graph.edges[0, 1:], expected, atol=1e-15)


# ---- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([3, 1, 2], "1..3"), ([1, 2], "1, 2"), ([4, 2, 3, 9, 9], "2, 3, 4, 9"), ([7], "7"), ([], "")],
)
def test_a_run_of_three_numbers_or_more_is_shortened(numbers: list[int], expected: str) -> None:
    assert list_numbers(numbers) == expected


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([0, 1, 2, 3], "[CLS] undo it"),
        ([3, 1, 2], "it undo"),
        ([0, 3, 1, 2], "[CLS] it undo"),
        ([2, 1], "do un"),  # not one after the other
        ([0, 4], "[CLS] [SEP]"),  # neither has a word, so they are not of the same
        ([2, 3], "do it"),
    ],
)
def test_a_group_is_named_by_its_words(positions: list[int], expected: str) -> None:
    assert read_groups([positions], 5, tokens=WORDS.tokens, words=WORDS.words)[0].name == expected


def test_without_words_every_token_of_a_group_is_a_word_of_its_name() -> None:
    (group,) = read_groups([[1, 2]], 3, tokens=["a", "un", "##do"])
    assert group.name == "un do"


# ---- flows --------------------------------------------------------------------------------------


def test_flows_are_not_taken_for_causal_unless_it_is_said() -> None:
    edges = edges_of(attention("peaky", 5, 6, np.random.default_rng(2)))
    every = find_all_flows(edges)
    assert np.abs(every - find_all_flows(edges, causal=False)).max() == 0
    top = find_flows(edges, np.arange(6))
    assert np.abs(top - find_flows(edges, np.arange(6), causal=False)).max() == 0
    assert np.abs(every[-1] - top).max() < 1e-12


# ---- files --------------------------------------------------------------------------------------


def test_lines_have_their_numbers_and_lose_marks_and_blanks(tmp_path: Path) -> None:
    content = "\ufeffthe key\r\n\n  \nthe\ufeff keys \n".encode()
    expected = [(1, "the key"), (4, "the\ufeff keys ")]
    (tmp_path / "lines.txt").write_bytes(content)
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress(content))
    assert list(read_lines(tmp_path / "lines.txt")) == expected
    assert list(read_lines(tmp_path / "lines.txt.gz")) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"the key\ncaf\xe9\n", r"latin.txt, line 2: not UTF-8 \(.*\); save the file"),
        ("plain.gz", b"the key\n", "cannot read .*plain.gz: "),
        ("cut.gz", gzip.compress(b"the key\n" * 99, mtime=0)[:-9], "cannot read .*cut.gz: "),
        ("missing.txt", None, "cannot read .*missing.txt: No such file"),
    ],
)
def test_what_is_no_text_is_an_error_of_one_line(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(af.FileError, match=message) as error:
        list(read_lines(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.fixture
def alarm() -> Iterator[None]:
    """Waiting for ever is an error after ten seconds."""

    def ring(*_: object) -> None:
        raise TimeoutError("this waits for ever")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_a_pipe_that_nobody_writes_to_is_empty_and_a_device_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert list(read_lines(tmp_path / "pipe")) == []
    with pytest.raises(af.FileError, match="it is a device; give a file"):
        list(read_lines("/dev/null"))


def test_an_error_of_who_reads_the_lines_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("the key\n")
    lines = read_lines(tmp_path / "lines.txt")
    next(lines)
    with pytest.raises(af.FileError, match=r"^mine$"):
        lines.throw(af.FileError("mine"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "cannot write {}: it is a folder; give the name of a file"),
        ("circle", "cannot write {}: its links lead in a circle"),
        ("pipe", "cannot write {}: it is not an ordinary file"),
        ("missing/file", "cannot write {}: the folder {}/missing does not exist"),
        ("nul\0", "cannot write {}\\x00: embedded null byte"),
        ("x" * 300, "cannot write {}: File name too long"),
    ],
)
def test_where_nothing_can_be_written_is_said_once(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    for write in (check_writable, lambda path: write_file(path, lambda file: None)):
        with pytest.raises(af.FileError) as error:
            write(tmp_path / name)
        expected = message.format(str(tmp_path / name).rstrip("\0"), tmp_path)
        assert str(error.value) == expected


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_file_has_all_permissions_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = write_file(tmp_path / "new", lambda file: file.write(b"new"))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_is_on_the_disk_in_full_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = tmp_path / "new", []

    def fsync(descriptor: int) -> None:
        assert not path.exists()
        sizes.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(path, lambda file: file.write(b"new"))
    assert sizes == [3]


def test_a_table_is_utf_8_in_any_locale() -> None:
    program = """
import io
from attnflow.core.io.files import write_csv
file = io.BytesIO()
write_csv(file, ["a", "b"], [("\\xe9", 1), ("\\ud800,", 0.5)])
print(file.getvalue() == b'a,b\\n\\xc3\\xa9,1\\n"\\\\ud800,",0.5\\n')
"""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **locale},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "True\n"


# ---- memory -------------------------------------------------------------------------------------


def make_group(folder: Path, **files: str) -> Path:
    """A control group as the kernel shows it; names have underscores for dots."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(content)
    return folder


def test_what_a_control_group_has_left_is_its_limit_without_caches(tmp_path: Path) -> None:
    stat = "inactive_file 30\nactive_file 4\nanon 1000\nodd\n"
    second = make_group(
        tmp_path / "2", memory_max="900\n", memory_current="100\n", memory_stat=stat
    )
    assert memory.find_left(second) == 900 - 100 + 30 + 4
    files = {"memory_limit_in_bytes": "500", "memory_usage_in_bytes": "20"}
    assert memory.find_left(make_group(tmp_path / "1", **files)) == 480
    free = make_group(tmp_path / "free", memory_max="max\n", memory_current="100\n")
    assert memory.find_left(free) == float("inf")
    assert memory.find_left(tmp_path / "missing") == float("inf")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("0::/a/b\n", ["", "a/b", "a"]),
        ("0::/\n", [""]),
        ("5:cpu,memory:/a\n3:cpu:/c\n", ["", "memory", "memory/a", "c"]),
        (None, [""]),
    ],
)
def test_control_groups_are_those_of_the_process_and_their_parents(
    lines: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        assert path == Path("/proc/self/cgroup")
        if lines is None:
            raise FileNotFoundError(path)
        return lines

    monkeypatch.setattr(Path, "read_text", read)
    assert memory.list_control_groups(tmp_path) == [tmp_path / name for name in expected]


@pytest.mark.parametrize(
    ("known", "left", "expected"),
    [
        ({"MemAvailable:": 8}, [float("inf")], 8192),
        ({"MemAvailable:": 8}, [float("inf"), 5000, 6000], 5000),
        ({"MemAvailable:": 8}, [-3.0], 0),
        ({"MemFree:": 8}, [100], None),
    ],
)
def test_available_memory_is_the_least_that_anything_has_left(
    known: dict[str, int],
    left: list[float],
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = {Path(str(number)): size for number, size in enumerate(left)}
    monkeypatch.setattr(memory, "read_counters", lambda path: known)
    monkeypatch.setattr(memory, "list_control_groups", lambda: list(groups))
    monkeypatch.setattr(memory, "find_left", groups.__getitem__)
    assert memory.find_available_memory() == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory."), True),
        (RuntimeError("can't allocate memory: you tried"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_about_memory_are_known(error: Exception, expected: bool) -> None:
    assert memory.is_of_memory(error) is expected
    assert memory.format_gigabytes(1_234_567_890_123) == "1,234.6 GB"


# ---- provenance ---------------------------------------------------------------------------------


def test_a_source_is_written_and_read_back() -> None:
    source = Source("model", "0a1b", {"attnflow": "0.3"}, "flow", "gradient", "positive", 0.5)
    assert Source.from_json(source.to_json()) == source
    assert json.loads(source.to_json()) == dict(source.to_dict())
    more = json.dumps({**json.loads(source.to_json()), "of a later version": 1})
    assert Source.from_json(more) == source
    with pytest.raises(ValueError, match="must be a JSON object; got list"):
        Source.from_json("[]")
    told = "model 0a1b, flow, gradient edges, target positive, residual 0.5, attnflow 0.3"
    assert str(source) == told
    assert str(Source(versions={}, residual=0.0)) == "residual 0"


def test_versions_are_those_of_the_libraries_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "sys", SimpleNamespace(modules={"torch": None}))
    assert set(list_versions()) == {"attnflow", "numpy", "torch"}
    assert list_versions()["numpy"] == np.__version__
    assert read_versions(("no such library",)) == {"no such library": "unknown"}


# ---- the wrong one of attnflow's own --------------------------------------------------------------

ATTENTION = af.Attention(np.full((2, 3, 3), 1 / 3), tokens=["a", "b", "c"])
UNTYPED: Any = af  # mypy would refuse most of this
RESULT = "give the Attention or AttentionGraph that it was computed from"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: af.AttentionGraph(ATTENTION), "got Attention: attention.graph() makes a graph"),
        (lambda: af.AttentionGraph(edges=ATTENTION), "got Attention: attention.graph() makes a"),
        (lambda: af.Attention(ATTENTION.graph()), "got AttentionGraph: it is a graph already"),
        # of a result, which is an array, rollout would roll out again
        (lambda: af.rollout(af.rollout(ATTENTION)), f"got TokenAttention: {RESULT}"),
        (
            lambda: UNTYPED.flow(af.raw(ATTENTION).compared_with("even")),
            f"got Comparison: {RESULT}",
        ),
        (lambda: UNTYPED.sinks(af.load("verb-number")), "got Model: give af.capture(model, text)"),
        (lambda: UNTYPED.raw(af.explain(ATTENTION)), "got Explanation: give its .graph"),
        (lambda: af.explain(af.rollout(ATTENTION)), f"got TokenAttention: {RESULT}"),
        (lambda: af.explain(af.explain(ATTENTION)), "AttentionGraph; got Explanation: give its"),  # type: ignore[arg-type]
        (lambda: af.Model(af.load("verb-number")), "got a Model: use it as it is"),
        (lambda: UNTYPED.evaluate("verb-number", ATTENTION), "(text, label); got Attention"),
        (
            lambda: af.faithfulness("verb-number", "the key", af.load("verb-number")),
            "scores must be an array of real numbers; got Model",
        ),
    ],
)
def test_the_wrong_object_of_ours_is_one_line_with_a_way_out(make: Any, message: str) -> None:
    with pytest.raises(af.AttnFlowError) as error:
        make()
    assert message in str(error.value)
    assert UNTYPED.rollout(af.explain(ATTENTION).graph).values.shape == (2, 3, 3)  # the way out
