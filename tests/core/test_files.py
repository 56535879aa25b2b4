"""Files are whole or not there, keep their permissions, and JSON is always valid."""

import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.core.io.files import dump_json, write_file

NAN, INFINITE = float("nan"), float("inf")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o666, 0o755])
@pytest.mark.parametrize("linked", [False, True])
def test_an_overwritten_file_keeps_its_permissions(
    permissions: int, linked: bool, tmp_path: Path
) -> None:
    target = tmp_path / "target.csv"
    target.write_text("old")
    target.chmod(permissions)
    path = tmp_path / "link.csv" if linked else target
    if linked:
        path.symlink_to(target)
    write_file(path, lambda file: file.write(b"new"))
    assert (target.read_text(), mode(target)) == ("new", permissions)
    assert path.is_symlink() == linked


def test_a_new_file_follows_the_umask_which_is_never_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between setting it and putting it back, other threads would make files for everybody."""
    umask = os.umask
    before = umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail(f"umask was set to {mask:o}"))
        write_file(tmp_path / "new.csv", lambda file: file.write(b"new"))
    finally:
        umask(before)
    assert mode(tmp_path / "new.csv") == 0o640


def test_no_file_of_another_writer_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "taken")
    (tmp_path / ".attnflow-taken").write_text("theirs")
    with pytest.raises(af.FileError, match=r"cannot write .*mine.csv: File exists"):
        write_file(tmp_path / "mine.csv", lambda file: file.write(b"mine"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


def test_a_failure_leaves_nothing_beside_and_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("old")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(af.errors.FileError, match=r"mine.csv: No space left on device"):
        write_file(path, fail)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("mine.csv", "old")]


def strict(text: str) -> Any:
    """As readers other than Python's read JSON: NaN and Infinity are no words of it."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"a": [1, 0.5, None, "x", True]}, {"a": [1, 0.5, None, "x", True]}),
        ([NAN, [INFINITE, -INFINITE], (NAN, 1)], [None, [None, None], [None, 1]]),
        ({"a": {"b": NAN}, NAN: 1}, {"a": {"b": None}, "null": 1}),
        ([np.float32(0.5), np.float64(NAN), np.float32(NAN)], [0.5, None, None]),
        ([np.int64(3), np.bool_(True), np.array([[1.0, NAN]])], [3, True, [[1.0, None]]]),
        ({np.int64(2): np.float16(INFINITE)}, {"2": None}),
        ("\ud800", "\ud800"),
    ],
)
def test_json_is_always_valid(content: object, expected: object) -> None:
    assert strict(dump_json(content)) == expected


def test_results_with_numbers_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    result = af.rollout(np.full((2, 3, 3), 1 / 3))
    result.values[0, 0, 0] = NAN
    result.save(tmp_path / "x.json")
    assert strict((tmp_path / "x.json").read_text())["values"][0][0][0] is None
