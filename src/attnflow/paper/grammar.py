"""A small grammar of English subjects with their verb's number, for experiments without data."""

import random
from collections.abc import Iterator

from attnflow.errors import OptionError
from attnflow.paper.agreement import Sentence

REGULAR = """
author book bridge building car doctor door farmer garden girl house key letter mountain museum
newspaper officer painting picture player report road room school singer song station student table
teacher temple tree village window writer
"""
NOUNS = {name: f"{name}s" for name in REGULAR.split()}  # singular: plural
IRREGULAR_NOUNS = "child/children church/churches city/cities country/countries man/men woman/women"
NOUNS |= dict(pair.split("/") for pair in IRREGULAR_NOUNS.split())
DETERMINERS = {
    False: ["the", "a", "this", "that", "every"],
    True: ["the", "these", "those", "some", "many"],
}
ADJECTIVES = """
big famous important large local modern new old popular red small young
""".split()
PREPOSITIONS = "about behind beside for from in near of on with".split()
TRANSITIVE = "describes follows helps knows likes sees visits".split()
OPENINGS = [*[""] * 3, "in the summer ,", "today", "of course ,", "as a result ,"]
OPENINGS.append("according to the report ,")
ADVERBS = ["", "", "", "", "often", "usually", "now", "also"]


def sentences(*, seed: int = 0, attractors: tuple[int, ...] = (0, 1, 2)) -> Iterator[Sentence]:
    """Different sentences, with these numbers of attractors in turn, until the grammar has no more.

    >>> from itertools import islice
    >>> for sentence in islice(sentences(seed=1), 3):
    ...     print(sentence.label, sentence.attractors, sentence.text)
    plural 0 some old officers for some doors now
    singular 1 every large table in many small books
    singular 2 as a result , the mountain of those trees for those museums
    """
    if not attractors or min(attractors) < 0:
        raise OptionError(f"attractors must be numbers from 0; got {attractors}")
    chance = random.Random(seed)
    seen: set[tuple[str, ...]] = set()
    misses = 0
    while misses < 1000:
        count = attractors[len(seen) % len(attractors)]
        plural = chance.random() < 0.5
        words = tuple(" ".join(compose_subject(chance, plural, count)).split())
        misses = misses + 1 if words in seen else 0
        if words not in seen:
            seen.add(words)
            yield Sentence(words, "plural" if plural else "singular", "grammar", count)


def compose_subject(chance: random.Random, plural: bool, attractors: int) -> Iterator[str]:
    """A subject and its modifiers: `attractors` nouns of the other number; if 0, up to one more."""
    yield chance.choice(OPENINGS)
    yield compose_noun_phrase(chance, plural)
    others = [not plural] * attractors or [plural] * chance.choice([0, 0, 1])
    # one relative clause, next to the subject: its verb agrees with what it belongs to
    if others and chance.random() < 0.3:
        yield compose_relative_clause(chance, plural, others.pop())
    for other in others:
        yield f"{chance.choice(PREPOSITIONS)} {compose_noun_phrase(chance, other)}"
    yield chance.choice(ADVERBS)


def compose_noun_phrase(chance: random.Random, plural: bool) -> str:
    """A determiner, sometimes an adjective, and a noun."""
    singular = chance.choice(list(NOUNS))
    adjective = chance.choice(ADJECTIVES) if chance.random() < 0.3 else ""
    determiner = chance.choice(DETERMINERS[plural])
    following = adjective or singular
    if determiner == "a" and following[0] in "aeiou":
        determiner = "an"
    return f"{determiner} {adjective} {NOUNS[singular] if plural else singular}"


def compose_relative_clause(chance: random.Random, plural: bool, other: bool) -> str:
    """A clause about a noun that is plural or not, with another noun as its object or subject."""
    verb = chance.choice(TRANSITIVE)
    if chance.random() < 0.5:
        form = verb.removesuffix("s") if plural else verb
        return f"that {form} {compose_noun_phrase(chance, other)}"
    form = verb.removesuffix("s") if other else verb
    return f"that {compose_noun_phrase(chance, other)} {form}"
