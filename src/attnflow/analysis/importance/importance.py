"""`Importance`: one number per token, how much a prediction depends on it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.groups import Group, sum_groups, word_groups
from attnflow.core.io.formatting import Panel, format_count, format_number
from attnflow.core.io.tables import ArrayTable
from attnflow.core.provenance import Source
from attnflow.errors import OptionError


class ImportanceRow(NamedTuple):
    """The importance of one token or group."""

    method: str
    target: str
    key: int
    token: str
    value: float


@dataclass(frozen=True, eq=False)
class Importance(ArrayTable):
    """One number per token: how much the target's probability depends on it.

    With a foil, how much the difference of their logits does.

    Parameters
    ----------
    values
        [token]: signed values are positive where a token speaks for the target, and negative where
        it speaks against it; others are not negative.
    method
        "blank_out", "input_gradient", or the name of a user-defined function.
    tokens
        The names of the tokens, or of the groups.
    target
        The name of the class (for language models: the token) whose probability was watched; with
        a foil both: "plural - singular".
    probability
        The target's probability on the unchanged input.
    words
        The number of the word per token; None if unknown.
    signed
        Whether the values have a sign.
    groups
        The groups of positions that were scored; None for tokens.
    source
        Where the result came from.
    score
        For relevance, what was shared out: the target's logit. With a foil, the target's logit
        minus that of the foil, which was watched instead of the probability. Else None.
    biases
        For relevance, the share of the model's biases in the score; else None.

    >>> keys = Importance(np.array([0.1, 0.7]), "mine", ("the", "keys"), "plural", 0.9)
    >>> keys.top(1)
    [(1, 'keys', 0.7)]
    """

    columns = ImportanceRow._fields

    values: Floats  # [token]
    method: str
    tokens: tuple[str, ...]
    target: str
    probability: float
    words: tuple[int | None, ...] | None = None
    signed: bool = False
    groups: tuple[Group, ...] | None = None
    source: Source | None = None
    score: float | None = None
    biases: float | None = None

    def top(self, k: int = 5) -> list[tuple[int, str, float]]:
        """The most important tokens, for or against, as (position, token, value).

        Parameters
        ----------
        k
            The maximum number of tokens.
        """
        check_count("k", k)
        order = np.argsort(-np.abs(self.values), kind="stable")[:k]
        return [(int(at), self.tokens[at], float(self.values[at])) for at in order]

    def by_word(self) -> "Importance":
        """A copy with the tokens of a word summed; a token without a word stands alone.

        Blank-out refuses: a word is blanked out as a whole by `blank_out(..., groups="words")`.
        """
        if self.method == "blank_out":
            raise OptionError(
                "blank-out of a word is not the sum over its tokens;"
                " ask for it: blank_out(model, text, groups='words')"
            )
        groups = word_groups(self.tokens, self.words)
        names = tuple(group.name for group in groups)
        values = sum_groups(self.values, groups)
        return replace(self, values=values, tokens=names, words=None, groups=groups)

    def rows(self) -> Iterator[ImportanceRow]:
        """One (method, target, key, token, value) per token."""
        for key, (token, value) in enumerate(zip(self.tokens, self.values.tolist(), strict=True)):
            yield ImportanceRow(self.method, self.target, key, token, value)

    def describe_value(self) -> str:
        """What was watched on the unchanged input: "probability 0.9768", or "logit 3.7421".

        >>> Importance(np.array([0.1]), "mine", ("keys",), "plural", 0.9).describe_value()
        'probability 0.9000'
        """
        if self.score is not None:
            return f"logit {format_number(self.score)}"
        return f"probability {format_number(self.probability)}"

    def _view(self) -> Iterator[Panel]:
        yield Panel(
            ("key", "token", "value"),
            [(row.key, row.token, row.value) for row in self.rows()],
            caption=f"{self.method}: what {self.target}, with {self.describe_value()}, depends on",
            bar="value",
        )

    def _content(self) -> dict[str, object]:
        content: dict[str, object] = {
            "method": self.method,
            "target": self.target,
            "probability": self.probability,
            "signed": self.signed,
            "tokens": self.tokens,
            "values": self.values,
        }
        if self.score is not None:
            content |= {"score": self.score, "biases": self.biases}
        if self.groups is not None:
            content["groups"] = [group.positions for group in self.groups]
        return content

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy:
            return np.array(self.values, dtype=dtype)
        return np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        watched = f"{self.target!r} ({self.probability:.3f})"
        tokens = format_count(len(self.tokens), "token")
        return f"<Importance: {self.method} of {tokens} for {watched}>"
