"""User-defined scores in `evaluate`: arrays, or functions of the text."""

from collections.abc import Callable, Mapping, Sequence

from attnflow.analysis.evaluate.examples import Example
from attnflow.analysis.faithfulness.faithfulness import check_tokens
from attnflow.analysis.faithfulness.plausibility import read_token_row
from attnflow.core.arrays import Floats
from attnflow.core.choices import call_own, check_name, name_function
from attnflow.core.methods import METHODS
from attnflow.errors import OptionError

# one array per example, or a function of the text
Scorer = Sequence[object] | Callable[..., object]
Scorers = Mapping[str, Scorer] | Callable[..., object]


def read_scorers(scorers: Scorers | None, count: int) -> dict[str, Scorer]:
    """Scorers by name: functions, or one array per example."""
    if scorers is None:
        return {}
    if callable(scorers):
        scorers = {name_function(scorers, "scorer"): scorers}
    if not isinstance(scorers, Mapping):
        raise OptionError(
            "scorers must be {name: function of the text}, or {name: one array per example};"
            f" got {type(scorers).__name__}"
        )
    for name, scorer in scorers.items():
        check_name(name, "scorer")
        if name in METHODS:
            raise OptionError(f"a scorer must have a name of its own; got {name!r}, a method's")
        if callable(scorer):
            continue
        if not hasattr(scorer, "__getitem__") or len(scorer) != count:
            got = len(scorer) if hasattr(scorer, "__len__") else type(scorer).__name__
            raise OptionError(
                f"the scorer {name!r} must be a function of the text, or a list with one array per"
                f" example, {count} here; got {got}"
            )
    return dict(scorers)


def run_scorer(name: str, scorer: Scorer, example: Example) -> Floats:
    """[token]: the scores of an example, checked to be one number per token."""
    given = example.text if callable(scorer) else example.number
    function = scorer if callable(scorer) else scorer.__getitem__
    values = call_own(f"{name} on {given!r}", function, given)
    tokens, what = example.encoded.tokens, f"what {name} gives for {given!r}"
    check_tokens(values, tokens, what)
    return read_token_row(values, len(tokens), what)
