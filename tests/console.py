"""The command line called in the process of a test, and the file that its examples read."""

import sys
from pathlib import Path

import pytest

from attnflow.cli import commands

EXAMPLE = str(Path(__file__).parent / "data" / "example.npz")


def inside(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command in this process, for speed; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["attnflow", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    return int(ended.value.code or 0)


def say_inside(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: object,
    status: int = 0,
) -> str:
    """What the command prints in this process, on both streams; it must end with this status."""
    assert inside(monkeypatch, *arguments) == status
    captured = capsys.readouterr()
    return captured.out + captured.err
