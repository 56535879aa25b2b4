"""Nouns in singular and plural, learned from the data, so that a sentence can change its number."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnflow.paper.agreement import Sentence

SINGULAR, PLURAL = 0, 1
IRREGULAR = dict(
    pair.split("/")
    for pair in """
    man/men woman/women child/children person/people foot/feet tooth/teeth mouse/mice
    criterion/criteria phenomenon/phenomena bacterium/bacteria analysis/analyses crisis/crises
    basis/bases thesis/theses hypothesis/hypotheses genus/genera nucleus/nuclei fungus/fungi
    stimulus/stimuli larva/larvae policeman/policemen fisherman/fishermen medium/media datum/data
    wife/wives life/lives leaf/leaves knife/knives wolf/wolves half/halves shelf/shelves NN/NNS
    """.split()
)
NOT_NOUNS = frozenset(
    """
    species series data bacteria subspecies bias is as was has does us his its this yes thus plus
    less always perhaps besides others ones various previous JJ
    """.split()
)
# where nouns and where verbs stand
BEFORE_NOUN = """
the a an this that these those his her its their our my your of some many several two three four
such all other NNP JJ CD 's
"""
BEFORE_VERB = """
to he she it they we i you who which will would can could should may might must not n't also NNS
"""
DETERMINING = "the a an this his her its their our my your JJ no any such"
AFTER_NOUN = """
of in to for and or , . ( ) ; : `` '' -- ' with by from on at as that which who is are was were has
have does do had can may will also not
"""
# determiners for a noun that changes its number, and words that end a noun phrase
TO_PLURAL = (
    "a/some an/some this/these that/those each/all every/all one/two another/other much/many"
)
TO_SINGULAR = """
these/this those/that many/a several/a few/every two/one three/one four/one five/one both/the
all/every most/each various/another numerous/a some/a CD/one other/another more/a
"""
# by the number that the noun had
REPAIRS = tuple(
    dict(pair.split("/") for pair in pairs.split()) for pairs in (TO_PLURAL, TO_SINGULAR)
)
PHRASE_EDGES = frozenset(
    """
    of in to for and or , . ( ) ; : `` '' -- with by from on at as that which who is are was were
    has have
    """.split()
)


@dataclass(frozen=True)
class Lexicon:
    """The number of each noun, and its form in the other number: a word, or else NN or NNS."""

    other: dict[str, str]
    number: dict[str, int]

    def is_paired(self, word: str) -> bool:
        """Whether the other number of a noun is a word of its own, not a tag."""
        return self.other.get(self.other[word]) == word

    def find_heads(self, words: Sequence[str]) -> list[int]:
        """The places of nouns that are not directly followed by a noun."""
        places = [place for place, word in enumerate(words) if word in self.number]
        return [place for place in places if place + 1 not in places]

    def flip(self, words: list[str], place: int) -> None:
        """Put the noun at a place into the other number, and the determiner before it."""
        repairs = REPAIRS[self.number[words[place]]]
        words[place] = self.other[words[place]]
        for before in range(place - 1, max(place - 5, -1), -1):
            if words[before] in repairs and not (words[before] == "that" and before + 1 != place):
                words[before] = repairs[words[before]]
                return
            if words[before] in PHRASE_EDGES:
                return


class Surroundings:
    """How often each word occurs, and how often in the places of nouns and of verbs."""

    def __init__(self, sentences: Iterable[Sentence]) -> None:
        before_noun, before_verb, determiners, after_noun = (
            set(words.split()) for words in (BEFORE_NOUN, BEFORE_VERB, DETERMINING, AFTER_NOUN)
        )
        self.count, self.noun, self.verb, self.determined, self.after = (
            Counter[str]() for _ in range(5)
        )
        for sentence in sentences:
            words = sentence.words
            for before, word, behind in zip(
                ("", *words[:-1]), words, (*words[1:], ","), strict=True
            ):
                self.count[word] += 1
                self.noun[word] += before in before_noun
                self.verb[word] += before in before_verb
                self.determined[word] += before in determiners
                self.after[word] += behind in after_noun

    def is_pair(self, one: str, many: str) -> bool:
        """Whether both words stand mostly where nouns do."""
        often = self.count[one] >= 2 and self.count[many] >= 2
        return (
            often
            and self.noun[one] > 2 * self.verb[one]
            and self.noun[many] + 1 > 2 * self.verb[many]
        )

    def is_noun(self, word: str) -> bool:
        """Whether what follows the word mostly follows nouns."""
        times = self.count[word]
        ordinary = (
            times >= 4 and word.isalpha() and word.islower() and not word.endswith(("ly", "ed"))
        )
        return ordinary and self.after[word] > times / 2 and self.verb[word] < times / 10


def build_lexicon(sentences: Iterable[Sentence]) -> Lexicon:
    """Nouns with their number, from the places in which words stand.

    First pairs such as key and keys, if both stand where nouns do; then nouns that occur in one
    number only.
    """
    seen = Surroundings(sentences)
    plural_of = pair_nouns(seen)
    other = plural_of | {many: one for one, many in plural_of.items()}
    number = dict.fromkeys(plural_of, SINGULAR) | dict.fromkeys(plural_of.values(), PLURAL)
    singles = sorted(set(filter(seen.is_noun, seen.count)) - set(number) - NOT_NOUNS)
    for word in singles:
        is_plural, determined = bool(guess_singulars(word)), seen.determined[word]
        if is_plural and determined + 1 > seen.count[word] / 10:
            other[word], number[word] = "NN", PLURAL
        elif not is_plural and determined > seen.count[word] / 4:
            other[word], number[word] = "NNS", SINGULAR
    return Lexicon(other, number)


def pair_nouns(seen: Surroundings) -> dict[str, str]:
    """The plural of each singular, where both words stand where nouns do."""
    plural_of = {
        one: many for one, many in IRREGULAR.items() if seen.count[one] and seen.count[many]
    }
    for many in sorted(set(seen.count) - NOT_NOUNS):
        for one in guess_singulars(many):
            if one not in plural_of and one not in NOT_NOUNS and seen.is_pair(one, many):
                plural_of[one] = many
                break
    return plural_of


def guess_singulars(word: str) -> list[str]:
    """Possible singulars of a plural, by its ending.

    >>> guess_singulars("churches"), guess_singulars("cities"), guess_singulars("glass")
    (['churche', 'church'], ['city', 'citie'], [])
    """
    if (
        not word.endswith("s")
        or word.endswith(("ss", "us", "is"))
        or len(word) < 4
        or not word.islower()
    ):
        return []
    forms = [word[:-1]]
    if word.endswith("ies"):
        forms.insert(0, f"{word[:-3]}y")
    if word.endswith(("ses", "xes", "zes", "ches", "shes", "oes")):
        forms.append(word[:-2])
    return forms
