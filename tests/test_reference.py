"""The reference: every public name says what it takes, and every public function shows it."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import attnflow as af
from attnflow import figures

SECTIONS = re.compile(
    r"(?m)^(Parameters|Other Parameters)\n-{3,}\n((?:.*\n?)*?)(?=^\S.*\n-{3,}|\Z)"
)


def list_public() -> Iterator[tuple[str, Any]]:
    """Public functions, classes, and the public methods that classes define, by their names."""
    for module, prefix in ((af, ""), (figures, "figures.")):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield prefix + name, value
            elif inspect.isclass(value) and not issubclass(value, Exception):
                yield prefix + name, value
                for method in sorted(set(dir(value))):
                    function = inspect.getattr_static(value, method)
                    function = getattr(function, "__func__", function)  # of a class method
                    ours = (getattr(function, "__module__", None) or "").startswith("attnflow")
                    if inspect.isfunction(function) and ours and not method.startswith("_"):
                        yield f"{prefix}{name}.{method}", function


PUBLIC = dict(list_public())
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]


def list_parameters(value: Callable[..., Any]) -> set[str]:
    """The names of what a function takes, or what a class is made of."""
    names = [name for name in inspect.signature(value).parameters if not name.startswith("_")]
    return set(names) - {"self", "cls"}


def list_documented(docstring: str) -> set[str]:
    """The names that a section of parameters explains, one or several to a line."""
    names: set[str] = set()
    for _, body in SECTIONS.findall(inspect.cleandoc(docstring) + "\n"):
        explained, *_ = re.split(r"(?m)^>>>", body)  # an example ends the section
        for line in explained.splitlines():
            if line and not line.startswith(" "):
                written = line.partition(" : ")[0]
                names |= {name.strip().lstrip("*") for name in written.split(",")}
    return names


def test_sections_are_read_as_numpydoc_writes_them() -> None:
    docstring = """Do it.

    Parameters
    ----------
    first, second
        Two of them.
    third : int
        With a type, and a word, then another.
    **options
        The rest.

    Returns
    -------
    int

    >>> 1
    1
    """
    ended = """Do it.

    Parameters
    ----------
    first
        One.

    >>> [1, 2]
    [1, 2]
    """
    assert list_documented(docstring) == {"first", "second", "third", "options"}
    assert list_documented(ended) == {"first"}
    assert list_documented("Parameters are not a section.") == set()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_of_a_public_name_is_explained(name: str) -> None:
    value = PUBLIC[name]
    docstring = value.__doc__ or ""
    assert docstring.strip(), "no docstring"
    missing = list_parameters(value) - list_documented(docstring)
    assert not missing, f"{name} does not explain {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", PUBLIC)
def test_no_parameter_is_explained_that_does_not_exist(name: str) -> None:
    value = PUBLIC[name]
    surplus = list_documented(value.__doc__ or "") - list_parameters(value)
    assert not surplus, f"{name} explains {', '.join(sorted(surplus))}"


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "." not in name.split("figures.")[-1]]
)
def test_every_public_function_has_an_example_that_runs(name: str) -> None:
    assert ">>>" in (PUBLIC[name].__doc__ or "")
