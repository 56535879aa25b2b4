"""Where the packages of real models are installed."""

from importlib.util import find_spec
from pathlib import Path


def folder(package: str) -> Path:
    """The folder of an installed package."""
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
