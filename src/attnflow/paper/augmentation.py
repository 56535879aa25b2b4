"""Sentences to train on: those of the data, and those made from them, so that no cheap cue gives the verb's number away.

Files whose sentences were chosen for their attractors teach "the opposite of the last noun". So each such sentence also comes with its
attractors in the subject's number, cut off after its subject, with its subject flipped (and its label with it), and with all nouns
flipped. Natural sentences with one noun are flipped as well; verbs inside sentences give more, shorter ones; a small grammar adds what
is rare in the data: relative clauses, coordination, pronouns, quantifiers.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attnflow.models.verb_number import LABELS
from attnflow.paper.agreement import Sentence
from attnflow.paper.nouns import EDGE, PLURAL, SINGULAR, Lexicon

SHORT = 8  # words; a sentence no longer than this may get an introduction
OPENINGS = 12  # words in which an introduction ends
PRONOUNS = frozenset(["i", "you", "he", "she", "it", "we", "they", "one"])
OPENERS = """
in on at for with as since while after although when if from during by under because once but despite upon though like unlike regardless
within through between among without before until according due to
"""
JOINTS = "because while where but although since whereas ; though when if whether"
# verbs whose form tells their number; after these words, have and do are infinitives
INNER = {
    "is": 0,
    "has": 0,
    "was": 0,
    "does": 0,
    "VBZ": 0,
    "are": 1,
    "have": 1,
    "were": 1,
    "do": 1,
    "VBP": 1,
}
BARE = "to will would could should can may might must shall 'll 'd do does did let not n't cannot there"


@dataclass(frozen=True)
class Mixture:
    """How much of what: shares of sources, of variants of sentences with attractors, and of what is done to natural ones."""

    natural: float = 0.396  # shared evenly by the files without counted attractors
    inner: float = 0.054
    hard: float = 0.51  # sentences with attractors
    grammar: float = 0.04
    variants: Mapping[str, float] = field(
        default_factory=lambda: {
            "plain": 0.45,
            "unattract": 0.15,
            "cut": 0.1,
            "flip": 0.12,
            "flip_all": 0.18,
        }
    )
    flipped: float = 0.2  # natural sentences whose one noun changes its number
    introduced: float = 0.2  # short sentences that come after the beginning of another


@dataclass(frozen=True)
class Parsed:
    """A sentence with the places of its subject and of its attractors' heads."""

    sentence: Sentence
    subject: int
    attractors: tuple[int, ...]


def parse(sentence: Sentence, lexicon: Lexicon) -> Parsed | None:
    """The subject of a sentence with attractors: the last noun of the verb's number, if as many nouns follow it as were counted."""
    places = [place for place, word in enumerate(sentence.words) if word in lexicon.number]
    number = LABELS.index(sentence.label)
    subject = next(
        (place for place in reversed(places) if lexicon.number[sentence.words[place]] == number),
        None,
    )
    if subject is None:
        return None
    after = [place for place in places if place > subject]
    if len(after) != sentence.attractors or not PRONOUNS.isdisjoint(sentence.words[subject + 1 :]):
        return None
    return Parsed(sentence, subject, tuple(place for place in after if place + 1 not in after))


def variant(parsed: Parsed, kind: str, lexicon: Lexicon) -> Sentence:
    """The sentence changed: attractors to the subject's number, cut after the subject, subject flipped, or all flipped."""
    words, label = list(parsed.sentence.words), parsed.sentence.label
    if kind == "cut":
        words = words[: parsed.subject + 1]
    if kind in ("unattract", "flip_all"):
        for place in parsed.attractors:
            lexicon.flip(words, place)
    if kind in ("flip", "flip_all"):
        lexicon.flip(words, parsed.subject)
        label = opposite(label)
    return Sentence(tuple(words), label, kind)


def flip_simple(sentence: Sentence, lexicon: Lexicon) -> Sentence | None:
    """A natural sentence with its one noun and its label flipped; nothing if it is not that simple."""
    words = list(sentence.words)
    places = lexicon.heads(words)
    if (
        len(places) != 1
        or LABELS[lexicon.number[words[places[0]]]] != sentence.label
        or len(words) - places[0] > 3
    ):
        return None
    if any(word in EDGE - {"in", "as"} for word in words[max(0, places[0] - 4) : places[0]]):
        return None
    lexicon.flip(words, places[0])
    return Sentence(tuple(words), opposite(sentence.label), "flipped")


def opposite(label: str) -> str:
    return LABELS[1 - LABELS.index(label)]


def inner_sentences(sentences: Sequence[Sentence]) -> list[Sentence]:
    """The words before verbs that stand inside sentences, with those verbs' number."""
    bare = set(BARE.split())
    known = {sentence.words for sentence in sentences}
    found: set[Sentence] = set()
    for sentence in sentences:
        for place, word in enumerate(sentence.words):
            before = sentence.words[:place]
            if (
                not before
                or word not in INNER
                or before in known
                or before[-1] in ("there", "i", "you")
            ):
                continue
            if not (word in ("have", "do") and bare & set(before[-3:])):
                found.add(Sentence(before, LABELS[INNER[word]], "inner"))
    return sorted(found, key=lambda each: (each.words, each.label))


def introductions(sentences: Iterable[Sentence]) -> list[tuple[str, ...]]:
    """Beginnings after which a new clause begins: "in the early years ," or "the NNS are small because"."""
    openers, joints = set(OPENERS.split()), set(JOINTS.split())
    found: set[tuple[str, ...]] = set()
    for sentence in sentences:
        for place, word in enumerate(sentence.words[:OPENINGS]):
            if place >= 2 and (word in joints or (word == "," and sentence.words[0] in openers)):
                found.add(sentence.words[: place + 1])
    return sorted(found)


# ---- the stream -----------------------------------------------------------------------------------------------------------------


def training_stream(
    sentences: Sequence[Sentence], lexicon: Lexicon, mixture: Mixture, chance: random.Random
) -> Iterator[Sentence]:
    """Sentences without end; none that the split puts on another side than train."""
    openings = introductions(sentences)
    for sentence in variants(sentences, lexicon, mixture, chance):
        words = sentence.words
        if openings and len(words) <= SHORT and chance.random() < mixture.introduced:
            sentence = replace(sentence, words=chance.choice(openings) + words)
        if sentence.side == "train":
            yield sentence


def variants(
    sentences: Sequence[Sentence], lexicon: Lexicon, mixture: Mixture, chance: random.Random
) -> Iterator[Sentence]:
    """Sentences without end, by source and variant; each source is gone through before it begins anew."""
    sources: dict[str, Sequence[Sentence]] = {
        "inner": inner_sentences(sentences),
        "hard": [each for each in sentences if each.attractors],
    }
    for name in dict.fromkeys(each.source for each in sentences if not each.attractors):
        sources[name] = [each for each in sentences if each.source == name and not each.attractors]
    natural = mixture.natural / max(1, len(sources) - 2)
    shares = {"inner": mixture.inner, "hard": mixture.hard}
    weights = {name: shares.get(name, natural) for name, found in sources.items() if found} | {
        "grammar": mixture.grammar
    }
    parsed = {each: parse(each, lexicon) for each in sources["hard"]}
    nouns = nouns_by_number(lexicon)
    decks: dict[str, list[Sentence]] = {name: [] for name in sources}
    while True:
        (name,) = chance.choices(list(weights), list(weights.values()))
        if name == "grammar":
            yield grammar_sentence(nouns, chance)
            continue
        decks[name] = decks[name] or chance.sample(sources[name], len(sources[name]))
        sentence = decks[name].pop()
        if name == "hard":
            (kind,) = chance.choices(list(mixture.variants), list(mixture.variants.values()))
            found = parsed[sentence]
            if kind == "plain":
                yield sentence
            elif found is not None:
                yield variant(found, kind, lexicon)
        else:
            yield (
                flip_simple(sentence, lexicon) if chance.random() < mixture.flipped else None
            ) or sentence


# ---- what is rare in the data ---------------------------------------------------------------------------------------------------

DETERMINER = (
    "the the the a this that his her every each another my",
    "the the the some these those his her many several two my all",
)
PREPOSITION = [
    "of",
    "in",
    "near",
    "with",
    "behind",
    "to",
    "for",
    "from",
    "beside",
    "under",
    "by",
    "on",
    "at",
    "about",
]
VERBS = [
    "like",
    "see",
    "know",
    "want",
    "use",
    "help",
    "find",
    "follow",
    "support",
    "call",
    "lead",
    "need",
]
PRONOUN = (("he", "she", "it"), ("i", "you", "we", "they"))
QUANTIFIED = (
    ("each of", "one of", "neither of", "every one of"),
    ("all of", "many of", "most of", "some of", "both of", "a number of"),
)
KINDS = [
    "prepositions",
    "prepositions",
    "subject",
    "object",
    "object",
    "both",
    "pronoun",
    "quantified",
]
Nouns = tuple[list[str], list[str]]  # singular, plural


def nouns_by_number(lexicon: Lexicon) -> Nouns:
    """Nouns that have both numbers, and often the tags that stand for rare ones."""
    pairs = sorted(word for word in lexicon.other if lexicon.paired(word) and not word.isupper())
    one, many = (
        [word for word in pairs if lexicon.number[word] == number] for number in (SINGULAR, PLURAL)
    )
    return one + ["NN"] * 30, many + ["NNS"] * 30


def grammar_sentence(nouns: Nouns, chance: random.Random) -> Sentence:
    """The words before a verb: a subject with what may stand between it and the verb."""
    number, other, third = (chance.randrange(2) for _ in range(3))
    subject = noun_phrase(number, nouns, chance)
    kind = chance.choice(KINDS)
    verb = chance.choice(VERBS)
    forms = (f"{verb}s", verb)
    if kind == "prepositions":
        words = [*subject, chance.choice(PREPOSITION), *noun_phrase(other, nouns, chance)]
        if chance.random() < 0.3:
            words += [chance.choice(PREPOSITION), *noun_phrase(third, nouns, chance)]
    elif kind == "subject":
        words = [
            *subject,
            chance.choice(("that", "which", "who")),
            forms[number],
            *noun_phrase(other, nouns, chance),
        ]
    elif kind == "object":
        inner = (
            [chance.choice(PRONOUN[other])]
            if chance.random() < 0.2
            else noun_phrase(other, nouns, chance)
        )
        words = [
            *subject,
            *chance.choice((["that"], ["that"], ["which"], ["who"], [])),
            *inner,
            forms[other],
        ]
    elif kind == "both":
        words, number = [*subject, "and", *noun_phrase(other, nouns, chance)], PLURAL
    elif kind == "pronoun":
        clause = [*subject, forms[number], *noun_phrase(third, nouns, chance), "and"]
        words, number = (
            [
                *chance.choice(([], ["and"], ["but"], ["that"], ["if"], clause)),
                chance.choice(PRONOUN[other]),
            ],
            other,
        )
    else:
        words = [
            *chance.choice(QUANTIFIED[number]).split(),
            chance.choice(("the", "these", "his", "our")),
            chance.choice(nouns[PLURAL]),
        ]
    if chance.random() < 0.1:
        words.append(chance.choice(("also", "often", "always", "never", "usually", "RB")))
    return Sentence(tuple(words), LABELS[number], "grammar")


def noun_phrase(number: int, nouns: Nouns, chance: random.Random) -> list[str]:
    """A determiner, sometimes an adjective, and a noun."""
    adjective = ["JJ"] if chance.random() < 0.15 else []
    return [chance.choice(DETERMINER[number].split()), *adjective, chance.choice(nouns[number])]
