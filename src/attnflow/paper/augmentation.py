"""Sentences to train on: those of the data, and variants in which no cheap cue gives the number.

Files whose sentences were chosen for their attractors teach "the opposite of the last noun". So
each such sentence also comes with its attractors in the subject's number, cut off after its
subject, with its subject flipped (and its label with it), and with all nouns flipped. Natural
sentences with one noun are flipped as well; verbs inside sentences give more, shorter ones; a small
grammar adds rare constructions: relative clauses, coordination, pronouns, quantifiers.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attnflow.models.bundled.verb_number import LABELS
from attnflow.paper.agreement import Sentence
from attnflow.paper.nouns import PHRASE_EDGES, PLURAL, SINGULAR, Lexicon

SHORT = 8  # words; a sentence no longer than this may get an introduction
LONGEST_INTRODUCTION = 12  # words
SUBJECT_PRONOUNS = frozenset(["i", "you", "he", "she", "it", "we", "they", "one"])
OPENERS = """
in on at for with as since while after although when if from during by under because once but
despite upon though like unlike regardless within through between among without before until
according due to
"""
JOINTS = "because while where but although since whereas ; though when if whether"
# verbs whose form tells their number; after these words, have and do are infinitives
INNER = dict.fromkeys(("is", "has", "was", "does", "VBZ"), SINGULAR)
INNER |= dict.fromkeys(("are", "have", "were", "do", "VBP"), PLURAL)
BARE = """
to will would could should can may might must shall 'll 'd do does did let not n't cannot there
"""


@dataclass(frozen=True)
class Mixture:
    """Shares: of sources, of variants of sentences with attractors, of changes to natural ones."""

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

    def weigh_sources(self, sources: Mapping[str, Sequence[Sentence]]) -> dict[str, float]:
        """How often each source that has sentences is drawn from, and the grammar."""
        natural = self.natural / max(1, len(sources) - 2)
        shares = {"inner": self.inner, "hard": self.hard}
        weights = {name: shares.get(name, natural) for name, members in sources.items() if members}
        return {**weights, "grammar": self.grammar}


@dataclass(frozen=True)
class Parsed:
    """A sentence with the places of its subject and of its attractors' heads."""

    sentence: Sentence
    subject: int
    attractors: tuple[int, ...]


def parse(sentence: Sentence, lexicon: Lexicon) -> Parsed | None:
    """Find the subject of a sentence with attractors; None if that is in doubt.

    It is the last noun of the verb's number, if as many nouns follow it as were counted.
    """
    places = [place for place, word in enumerate(sentence.words) if word in lexicon.number]
    number = LABELS.index(sentence.label)
    subject = next(
        (place for place in reversed(places) if lexicon.number[sentence.words[place]] == number),
        None,
    )
    if subject is None:
        return None
    after = [place for place in places if place > subject]
    if len(after) != sentence.attractors:
        return None
    if not SUBJECT_PRONOUNS.isdisjoint(sentence.words[subject + 1 :]):
        return None
    return Parsed(sentence, subject, tuple(place for place in after if place + 1 not in after))


def make_variant(parsed: Parsed, kind: str, lexicon: Lexicon) -> Sentence:
    """The sentence, changed in one of the ways that `Mixture.variants` names.

    unattract: attractors in the subject's number; cut: cut off after the subject; flip: subject and
    label flipped; flip_all: all of them flipped.
    """
    words, label = list(parsed.sentence.words), parsed.sentence.label
    if kind == "cut":
        words = words[: parsed.subject + 1]
    if kind in ("unattract", "flip_all"):
        for place in parsed.attractors:
            lexicon.flip(words, place)
    if kind in ("flip", "flip_all"):
        lexicon.flip(words, parsed.subject)
        label = flip_label(label)
    return Sentence(tuple(words), label, kind)


def flip_simple(sentence: Sentence, lexicon: Lexicon) -> Sentence | None:
    """A natural sentence with its only noun and its label flipped; None if it is not so simple."""
    words = list(sentence.words)
    heads = lexicon.find_heads(words)
    if len(heads) != 1:
        return None
    (noun,) = heads
    if LABELS[lexicon.number[words[noun]]] != sentence.label or len(words) - noun > 3:
        return None
    if not (PHRASE_EDGES - {"in", "as"}).isdisjoint(words[max(0, noun - 4) : noun]):
        return None
    lexicon.flip(words, noun)
    return Sentence(tuple(words), flip_label(sentence.label), "flipped")


def flip_label(label: str) -> str:
    """The other label."""
    return LABELS[1 - LABELS.index(label)]


def find_inner_sentences(sentences: Sequence[Sentence]) -> list[Sentence]:
    """The words before verbs that stand inside sentences, with those verbs' number."""
    bare = set(BARE.split())
    known = {sentence.words for sentence in sentences}
    inner: set[Sentence] = set()
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
                inner.add(Sentence(before, LABELS[INNER[word]], "inner"))
    return sorted(inner, key=lambda sentence: (sentence.words, sentence.label))


def find_introductions(sentences: Iterable[Sentence]) -> list[tuple[str, ...]]:
    """Beginnings that a clause may follow: "in the early years ,", "the NNS are small because"."""
    openers, joints = set(OPENERS.split()), set(JOINTS.split())
    introductions: set[tuple[str, ...]] = set()
    for sentence in sentences:
        for place, word in enumerate(sentence.words[:LONGEST_INTRODUCTION]):
            if place >= 2 and (word in joints or (word == "," and sentence.words[0] in openers)):
                introductions.add(sentence.words[: place + 1])
    return sorted(introductions)


# ---- the stream ----------------------------------------------------------------------------------


def stream_sentences(
    sentences: Sequence[Sentence], lexicon: Lexicon, mixture: Mixture, chance: random.Random
) -> Iterator[Sentence]:
    """Sentences without end, all of which the split puts on the train side."""
    introductions = find_introductions(sentences)
    for sentence in stream_variants(sentences, lexicon, mixture, chance):
        words = sentence.words
        if introductions and len(words) <= SHORT and chance.random() < mixture.introduced:
            sentence = replace(sentence, words=chance.choice(introductions) + words)
        if sentence.side == "train":
            yield sentence


def stream_variants(
    sentences: Sequence[Sentence], lexicon: Lexicon, mixture: Mixture, chance: random.Random
) -> Iterator[Sentence]:
    """Sentences without end, by source and variant; a source is used up before it starts again."""
    sources: dict[str, list[Sentence]] = {"inner": find_inner_sentences(sentences), "hard": []}
    for sentence in sentences:
        source = "hard" if sentence.attractors else sentence.source
        sources.setdefault(source, []).append(sentence)
    weights = mixture.weigh_sources(sources)
    parsed = {sentence: parse(sentence, lexicon) for sentence in sources["hard"]}
    nouns = list_nouns(lexicon)
    decks: dict[str, list[Sentence]] = {name: [] for name in sources}
    while True:
        (name,) = chance.choices(list(weights), list(weights.values()))
        if name == "grammar":
            yield compose_sentence(nouns, chance)
            continue
        decks[name] = decks[name] or chance.sample(sources[name], len(sources[name]))
        sentence = decks[name].pop()
        if name == "hard":
            (kind,) = chance.choices(list(mixture.variants), list(mixture.variants.values()))
            analysis = parsed[sentence]
            if kind == "plain":
                yield sentence
            elif analysis is not None:
                yield make_variant(analysis, kind, lexicon)
        elif chance.random() < mixture.flipped:
            yield flip_simple(sentence, lexicon) or sentence
        else:
            yield sentence


# ---- constructions that are rare in the data ----------------------------------------------------

# of singular and of plural nouns; what is common stands there often
RARE_DETERMINERS = (
    "the the the a this that his her every each another my",
    "the the the some these those his her many several two my all",
)
RARE_PREPOSITIONS = """
of in near with behind to for from beside under by on at about
""".split()
RARE_VERBS = "like see know want use help find follow support call lead need".split()
PRONOUNS_BY_NUMBER = (("he", "she", "it"), ("i", "you", "we", "they"))
QUANTIFIERS = (
    ("each of", "one of", "neither of", "every one of"),
    ("all of", "many of", "most of", "some of", "both of", "a number of"),
)
CONSTRUCTIONS = """
prepositions prepositions subject object object both pronoun quantified
""".split()
Nouns = tuple[list[str], list[str]]  # singular, plural


def list_nouns(lexicon: Lexicon) -> Nouns:
    """Nouns that have both numbers, and, many times, the tags that stand for rare ones."""
    pairs = sorted(word for word in lexicon.other if lexicon.is_paired(word) and not word.isupper())
    one, many = (
        [word for word in pairs if lexicon.number[word] == number] for number in (SINGULAR, PLURAL)
    )
    return one + ["NN"] * 30, many + ["NNS"] * 30


def compose_sentence(nouns: Nouns, chance: random.Random) -> Sentence:
    """The words before a verb: a subject with what may stand between it and the verb."""
    number, other, third = (chance.randrange(2) for _ in range(3))
    subject = list_noun_phrase(number, nouns, chance)
    kind = chance.choice(CONSTRUCTIONS)
    verb = chance.choice(RARE_VERBS)
    forms = (f"{verb}s", verb)
    if kind == "prepositions":
        words = [
            *subject,
            chance.choice(RARE_PREPOSITIONS),
            *list_noun_phrase(other, nouns, chance),
        ]
        if chance.random() < 0.3:
            words += [chance.choice(RARE_PREPOSITIONS), *list_noun_phrase(third, nouns, chance)]
    elif kind == "subject":
        words = [
            *subject,
            chance.choice(("that", "which", "who")),
            forms[number],
            *list_noun_phrase(other, nouns, chance),
        ]
    elif kind == "object":
        inner = (
            [chance.choice(PRONOUNS_BY_NUMBER[other])]
            if chance.random() < 0.2
            else list_noun_phrase(other, nouns, chance)
        )
        words = [
            *subject,
            *chance.choice((["that"], ["that"], ["which"], ["who"], [])),
            *inner,
            forms[other],
        ]
    elif kind == "both":
        words, number = [*subject, "and", *list_noun_phrase(other, nouns, chance)], PLURAL
    elif kind == "pronoun":
        clause = [*subject, forms[number], *list_noun_phrase(third, nouns, chance), "and"]
        words, number = (
            [
                *chance.choice(([], ["and"], ["but"], ["that"], ["if"], clause)),
                chance.choice(PRONOUNS_BY_NUMBER[other]),
            ],
            other,
        )
    else:
        words = [
            *chance.choice(QUANTIFIERS[number]).split(),
            chance.choice(("the", "these", "his", "our")),
            chance.choice(nouns[PLURAL]),
        ]
    if chance.random() < 0.1:
        words.append(chance.choice(("also", "often", "always", "never", "usually", "RB")))
    return Sentence(tuple(words), LABELS[number], "grammar")


def list_noun_phrase(number: int, nouns: Nouns, chance: random.Random) -> list[str]:
    """A determiner, sometimes an adjective, and a noun."""
    adjective = ["JJ"] if chance.random() < 0.15 else []
    return [
        chance.choice(RARE_DETERMINERS[number].split()),
        *adjective,
        chance.choice(nouns[number]),
    ]
