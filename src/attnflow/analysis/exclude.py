"""`find_excluded`: the positions that views leave out of colours and shares, by name or number."""

from collections.abc import Iterable, Sequence

from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.generate.generation import Generation
from attnflow.analysis.generate.prompt_attention import PromptAttention
from attnflow.analysis.intervene.intervention import Intervention
from attnflow.core.checks import check_positions
from attnflow.errors import OptionError

Exclusion = str | Sequence[int | str] | None
EXCLUSIONS = ("sinks", "special", "explained", "none")  # or positions
ASIDES = EXCLUSIONS[:3]  # left out of sentences
Explained = Explanation | Generation | PromptAttention | Intervention


def find_excluded(exclude: Exclusion, size: int, of: Explained | None = None) -> tuple[int, ...]:
    """The positions, out of `size`, that are not coloured.

    "sinks", "special" (tokens) and "explained" (the position) stand for the positions that `of`
    knows, unless these are all there are; "none" and None for no position.
    """
    if exclude is None:
        return ()
    if not isinstance(exclude, Iterable):
        raise OptionError(
            f"exclude must be {', '.join(map(repr, EXCLUSIONS))} or a list of positions;"
            f" got {exclude!r}"
        )
    listed = [exclude] if isinstance(exclude, str) else list(exclude)
    names = [each for each in listed if isinstance(each, str)]
    numbers = [each for each in listed if not isinstance(each, str)]
    excluded = set(check_positions(numbers, size, "exclude"))
    if len(excluded) == size:
        raise OptionError(f"exclude must leave at least one of {size} tokens; got all of them")
    named = {place for name in names for place in list_named(name, of) if place < size}
    return tuple(sorted(excluded | named if len(excluded | named) < size else excluded))


def list_named(name: str, of: Explained | None) -> Iterable[int]:
    """The positions that a name stands for."""
    if name not in EXCLUSIONS:
        raise OptionError(
            f"unknown exclude {name!r}; choose from {', '.join(EXCLUSIONS)}, positions"
        )
    if name == "none":
        return ()
    if name == "explained" and of is not None:  # a generation explains no position of its prompt
        if isinstance(of, Intervention):
            return [of.position]
        return of.explained if isinstance(of, Explanation) else ()
    if name == "sinks" and isinstance(of, Explanation | Generation | Intervention):
        return [sink.position for sink in of.sinks]
    if of is None or name == "sinks":
        raise OptionError(
            f"a result alone does not know which tokens are {name}; give their positions, as"
            " exclude=[sink.position for sink in sinks(attention)]"
        )
    if isinstance(of, Explanation | Intervention):
        marks: Sequence[bool] = of.special
    else:
        marks = [token in of.special for token in of.prompt]
    return [place for place, special in enumerate(marks) if special]
