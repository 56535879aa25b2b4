"""`planted`: small Transformers whose answer is known to depend on these tokens and no others.

This file has the rules: the words, the answer, and the tokens that it depends on. The weights that
follow a rule are built by hand in weights.py; nothing is trained.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attnflow.core.checks import check_count, check_integers
from attnflow.errors import OptionError
from attnflow.models.execution import require_torch
from attnflow.models.model import Model

PREFIX = "planted:"  # of the names by which `load` knows these models
MAX_WORDS = 12  # of a text
EXAMPLE_WORDS = (6, 10)  # fewest and most of an example
FILLER = ""  # the kind of words that say nothing
LETTER_WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")
FILLERS = ("the", "so", "then")


@dataclass(frozen=True)
class PlantedRule:
    """The rule of a planted model, in terms of the kinds of its words.

    Parameters
    ----------
    about
        The rule in one line; {k} stands for the number of the word that is copied.
    kinds
        The kind of each word that the model knows.
    labels
        The answers.
    decide
        A function of the kinds of a text's words, and k, that returns the answer.
    find
        A function of the same that returns the places (from 0) of the words that the answer
        depends on.
    swaps
        The kinds that may replace each kind, to see whether the answer changes.
    k
        The word that is copied by default, counted from 1; None if none is copied.
    least
        The smallest k.
    shown
        The answers that examples have: all if None. An answer that is due to a missing word
        depends on no word of the text.
    """

    about: str
    kinds: dict[str, str]
    labels: tuple[str, ...]
    decide: Callable[[Sequence[str], int], str]
    find: Callable[[Sequence[str], int], list[int]]
    swaps: dict[str, tuple[str, ...]]
    k: int | None = None
    least: int = 1
    shown: tuple[str, ...] | None = None


# ---- the rules ----------------------------------------------------------------------------------


def copy_kind(kinds: Sequence[str], k: int) -> str:
    """The k-th word."""
    return kinds[k - 1]


def find_copied(kinds: Sequence[str], k: int) -> list[int]:
    """The k-th word alone."""
    return [k - 1]


def hold_both(kinds: Sequence[str], k: int) -> str:
    """Whether salt and pepper both occur."""
    return "both" if {"salt", "pepper"} <= set(kinds) else "not both"


def find_both(kinds: Sequence[str], k: int) -> list[int]:
    """Every marker, if both kinds occur; where one is missing, no word matters."""
    both = hold_both(kinds, k) == "both"
    return [place for place, kind in enumerate(kinds) if both and kind != FILLER]


def count_kinds(kinds: Sequence[str], k: int) -> str:
    """The more frequent kind; animal if they are even."""
    return "fruit" if kinds.count("fruit") > kinds.count("animal") else "animal"


def find_majority(kinds: Sequence[str], k: int) -> list[int]:
    """The words of the kind that won."""
    return [place for place, kind in enumerate(kinds) if kind == count_kinds(kinds, k)]


def read_last(kinds: Sequence[str], k: int) -> str:
    """The kind of the last word that is not a filler; cold if there is none."""
    return next((kind for kind in reversed(kinds) if kind != FILLER), "cold")


def find_last_mark(kinds: Sequence[str], k: int) -> list[int]:
    """The last word that is not a filler."""
    return [place for place, kind in enumerate(kinds) if kind != FILLER][-1:]


def name_kinds(**words: Sequence[str]) -> dict[str, str]:
    """The kind of each word, from the words of each kind; and fillers."""
    kinds = {word: kind for kind, listed in words.items() for word in listed}
    return kinds | dict.fromkeys(FILLERS, FILLER)


LETTER_KINDS = {word: word for word in LETTER_WORDS}
LETTER_SWAPS = {
    word: tuple(other for other in LETTER_WORDS if other != word) for word in LETTER_WORDS
}
COPY = PlantedRule(
    "the answer is word {k}, read where it stands",
    LETTER_KINDS,
    LETTER_WORDS,
    copy_kind,
    find_copied,
    LETTER_SWAPS,
    k=3,
)
PLANTED: dict[str, PlantedRule] = {
    "copy": COPY,
    "relay": replace(COPY, about="the answer is word {k}, read from the word before it", least=2),
    "conjunction": PlantedRule(
        "both, if salt and pepper both occur; else not both",
        name_kinds(salt=["salt"], pepper=["pepper"]),
        ("not both", "both"),
        hold_both,
        find_both,
        {"salt": (FILLER,), "pepper": (FILLER,), FILLER: (FILLER,)},
        shown=("both",),
    ),
    "majority": PlantedRule(
        "fruit, if more words name fruit than animals; else animal",
        name_kinds(fruit=["apple", "plum"], animal=["cat", "dog"]),
        ("animal", "fruit"),
        count_kinds,
        find_majority,
        {"fruit": ("animal",), "animal": ("fruit",), FILLER: (FILLER,)},
    ),
    "last": PlantedRule(
        "warm or cold, as the last word that names a colour is; cold if none does",
        name_kinds(warm=["red", "orange"], cold=["blue", "green"]),
        ("cold", "warm"),
        read_last,
        find_last_mark,
        {"warm": ("cold",), "cold": ("warm",), FILLER: (FILLER,)},
    ),
}


# ---- the models ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Planted:
    """A model with a known answer, made by `planted`.

    Parameters
    ----------
    name
        Its name in `PLANTED`.
    model
        The `Model`: two Transformer blocks of four heads each, and a tokenizer of whole words.
    words
        The words that it knows.
    about
        The rule in one line.
    k
        The word that is copied, counted from 1; None if none is.

    >>> import attnflow as af
    >>> af.planted("last")
    <Planted 'last': warm or cold, as the last word that names a colour is; cold if none does>
    """

    name: str
    model: Model
    words: tuple[str, ...]
    about: str
    k: int | None = None

    def __repr__(self) -> str:
        return f"<Planted {self.name!r}: {self.about}>"

    @property
    def rule(self) -> PlantedRule:
        """The rule that the model follows."""
        return PLANTED[self.name]

    def answer(self, text: str) -> str:
        """The answer by the rule, which is the model's prediction.

        Parameters
        ----------
        text
            Words of `words`, with spaces between them.

        >>> import attnflow as af
        >>> af.planted("majority").answer("the apple so plum then cat")
        'fruit'
        """
        return self.rule.decide(self._read_kinds(text), self.k or 0)

    def truth(self, text: str) -> tuple[int, ...]:
        """The positions of the tokens that the answer depends on; CLS has position 0.

        A token counts if it belongs to a smallest change of the text that changes the answer: one
        none of whose parts would do alone. To change a token is to replace it by one of `swaps`.

        Parameters
        ----------
        text
            As for `answer`.

        >>> import attnflow as af
        >>> af.planted("copy").truth("elk ant fox hen")
        (3,)
        >>> af.planted("conjunction").truth("salt the pepper"), af.planted("last").truth("so")
        ((1, 3), ())
        """
        return tuple(place + 1 for place in self.rule.find(self._read_kinds(text), self.k or 0))

    def swaps(self, word: str) -> tuple[str, ...]:
        """The words that may replace a word, to see whether the answer changes.

        A word that has opposites is replaced by one of the other kind; a marker of the conjunction
        by a filler; a filler by another filler.

        Parameters
        ----------
        word
            One of `words`.

        >>> import attnflow as af
        >>> af.planted("last").swaps("red"), af.planted("last").swaps("so")
        (('blue', 'green'), ('the', 'then'))
        """
        (kind,) = self._read_kinds(word, least=1)
        kinds = self.rule.swaps[kind]
        return tuple(
            other
            for other, its_kind in self.rule.kinds.items()
            if its_kind in kinds and other != word
        )

    def examples(self, count: int, *, seed: int = 0) -> list[str]:
        """Texts whose answer depends on some of their words, and not on all of them.

        They have 6 to 10 words, or k if that is more; answers take turns.

        Parameters
        ----------
        count
            How many.
        seed
            Of the draws: the same seed, the same texts.

        >>> import attnflow as af
        >>> af.planted("last").examples(2)
        ['red orange then then blue then so', 'orange so green the orange then the']
        """
        check_count("count", count)
        generator = random.Random(f"{self.name} {check_integers([seed], 'seed')[0]}")
        fewest, most = (max(self.k or 0, size) for size in EXAMPLE_WORDS)
        wanted = self.rule.shown or self.rule.labels
        texts: list[str] = []
        while len(texts) < count:
            size = generator.randint(fewest, most)
            text = " ".join(generator.choices(self.words, k=size))
            turn = wanted[len(texts) % len(wanted)]
            if self.answer(text) == turn and 0 < len(self.truth(text)) < size:
                texts.append(text)
        return texts

    def _read_kinds(self, text: str, least: int | None = None) -> list[str]:
        """The kinds of a text's words, checked."""
        least = (self.k or 1) if least is None else least
        words = split_text(text, self.words, least, MAX_WORDS)
        return [self.rule.kinds[word] for word in words]


def split_text(text: str, known: Sequence[str], least: int, most: int) -> list[str]:
    """The words of a text, in lower case; unknown words, too few or too many are refused."""
    if not isinstance(text, str) or not text.strip():
        raise OptionError(f"a text must not be empty; got {text!r}")
    words = [word if word in known else word.lower() for word in text.split()]
    unknown = next((word for word in words if word not in known), None)
    if unknown is not None:
        raise OptionError(f"this planted model knows the words {', '.join(known)}; got {unknown!r}")
    if not least <= len(words) <= most:
        raise OptionError(
            f"a text of this planted model has {least} to {most} words; got {len(words)}"
        )
    return words


def planted(name: str, *, k: int | None = None) -> Planted:
    """A small Transformer, built by hand, whose answer depends on known tokens in a known way.

    A test set for methods that tell which tokens matter: `Planted.truth` knows the right ones.
    `load("planted:copy")`, and `--model planted:copy` on the command line, give the model alone.

    Parameters
    ----------
    name
        "copy" and "relay", whose answer is word k; "conjunction", of two words; "majority", of two
        kinds of words; "last", the kind of the last word that has one.
    k
        The word that copy and relay copy, counted from 1; the third if None.

    >>> copy = planted("copy")
    >>> copy.model.predict(["elk ant fox hen"])[0][0], copy.truth("elk ant fox hen")
    ('fox', (3,))
    """
    require_torch("a planted model", ["torch"])
    if not isinstance(name, str) or name not in PLANTED:
        raise OptionError(f"unknown planted model {name!r}; choose from {', '.join(PLANTED)}")
    rule = PLANTED[name]
    if k is None:
        k = rule.k
    elif rule.k is None:
        raise OptionError(f"k is for copy and relay, which copy word k; got k={k!r} for {name}")
    else:
        (k,) = check_integers([k], "k")
        if not rule.least <= k <= MAX_WORDS:
            raise OptionError(
                f"k must be from {rule.least} to {MAX_WORDS} for {name}, the words of its texts;"
                f" got {k}"
            )
    from attnflow.models.planted.weights import build_transformer  # it imports torch

    module, vocabulary = build_transformer(name, rule.kinds, rule.labels, k, MAX_WORDS)
    origin = PREFIX + name + ("" if k == rule.k else f", k={k}")
    model = Model(module, vocabulary, origin=origin)
    return Planted(name, model, tuple(rule.kinds), rule.about.format(k=k), k)
