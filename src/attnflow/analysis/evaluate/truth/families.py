"""The families of prompts whose true token is known: templates, filled at random.

A template has slots of one word. The word in one of them, the value, decides the answer. A variant
of a prompt replaces some words, and says what the answer becomes:

    swap        another value: the answer of that value
    calm        all distractors replaced at once: the same answer
    exchange    the keys of two entries exchanged, or another key asked for: the other's value

Entries stand in random order, and the asked one is drawn uniformly among them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from attnflow.analysis.evaluate.truth.words import (
    ANIMALS,
    CODES,
    COUNT_NOUNS,
    FILLER_SENTENCES,
    FIRST_NAMES,
    LOCKED,
    OBJECTS,
    PLACES,
    RELATIVES,
)

Random: TypeAlias = np.random.Generator
# the words of a pool that are one token for a model, in the order of the pool
Fit: TypeAlias = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Rewording:
    """Other words in some slots of a draft, and the answer that they should give."""

    words: Mapping[int, str]  # by slot
    answer: str


@dataclass(frozen=True)
class Draft:
    """A prompt of a family before a model has seen it.

    Parameters
    ----------
    family
        Its family.
    template
        The text, with {0}, {1}, ... for slots.
    words
        The word of each slot.
    value, keys
        The slot whose word decides the answer, and those that select it.
    answer, foil
        The right next word, and a wrong one that the prompt suggests.
    pool
        The words among which the answer is to be the most probable one.
    swaps, calms, exchanges
        The variants by their kind.
    """

    family: str
    template: str
    words: tuple[str, ...]
    value: int
    answer: str
    foil: str
    pool: tuple[str, ...]
    keys: tuple[int, ...] = ()
    swaps: tuple[Rewording, ...] = ()
    calms: tuple[Rewording, ...] = ()
    exchanges: tuple[Rewording, ...] = ()

    def write(self, words: Mapping[int, str] | None = None) -> str:
        """The text of the prompt, or of a variant with other words in some slots."""
        chosen = dict(enumerate(self.words)) | dict(words or {})
        return self.template.format(*(chosen[slot] for slot in range(len(self.words))))


@dataclass
class TemplateWriter:
    """Writes a template, and numbers its slots."""

    family: str
    parts: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Add text without slots."""
        self.parts.append(text.replace("{", "{{").replace("}", "}}"))

    def fill(self, word: str) -> int:
        """Add a slot with a word; its number."""
        self.parts.append(f"{{{len(self.words)}}}")
        self.words.append(word)
        return len(self.words) - 1

    def finish(self, value: int, answer: str, foil: str, pool: Sequence[str]) -> Draft:
        """The prompt, without variants."""
        text, words = "".join(self.parts), tuple(self.words)
        return Draft(self.family, text, words, value, answer, foil, tuple(pool))


class TooFewWordsError(ValueError):
    """Too few words of a pool are single tokens for a model."""


def draw_words(rng: Random, pool: Sequence[str], count: int) -> list[str]:
    """Different words of a pool, in random order."""
    if len(pool) < count:
        raise TooFewWordsError
    return [pool[place] for place in rng.permutation(len(pool))[:count]]


# ---- entries of keys and values -----------------------------------------------------------------


@dataclass(frozen=True)
class EntryStyle:
    """How a list of entries is written: each has a key and a value."""

    before: str  # the text before the first entry
    entry: str  # with {key} and {value}
    query: str  # with {key}
    keys: Sequence[str]
    values: Sequence[str]
    least: int  # entries
    most: int
    filler: int = 0  # the most sentences between two entries


STYLES = {
    "relatives": EntryStyle(
        "Let me tell you about the people I know.",
        " My {key}'s name is {value}.",
        " My {key}'s name is",
        RELATIVES,
        FIRST_NAMES,
        2,
        4,
        2,
    ),
    "owners": EntryStyle(
        "Here is who has what.",
        " {value} has the {key}.",
        " The {key} belongs to",
        OBJECTS,
        FIRST_NAMES,
        2,
        4,
    ),
    "needle": EntryStyle(
        "Please remember this.",
        " The password of the {key} is {value}.",
        " The password of the {key} is",
        LOCKED,
        CODES,
        2,
        3,
        6,
    ),
    "pairs": EntryStyle("Pairs:", " {key} {value},", " {key}", ANIMALS, OBJECTS, 6, 10),
    "shots": EntryStyle(
        "Examples",
        "\nInput: {key}\nOutput: {value}",
        "\nInput: {key}\nOutput:",
        ANIMALS,
        OBJECTS,
        3,
        6,
    ),
    "passwords": EntryStyle(
        "Keep this secret.",
        " {key}'s password is {value}.",
        " {key}'s password is",
        FIRST_NAMES,
        CODES,
        2,
        3,
    ),
}


def draft_entries(family: str, rng: Random, fit: Fit) -> Draft:
    """Entries of a key and a value each, one of whose keys is asked for."""
    style = STYLES[family]
    pool = fit(style.values)
    count = int(rng.integers(style.least, style.most + 1))
    keys = draw_words(rng, fit(style.keys), count)
    # those of the entries, two to swap in, and one for each distractor
    values = draw_words(rng, [word for word in pool if word not in keys], 2 * count + 1)
    asked, other = rng.permutation(count)[:2].tolist()
    writer = TemplateWriter(family)
    writer.say(style.before)
    key_slots, value_slots = [], []
    for number in range(count):
        slots = write_entry(writer, style.entry, {"key": keys[number], "value": values[number]})
        key_slots.append(slots["key"])
        value_slots.append(slots["value"])
        for sentence in draw_words(rng, FILLER_SENTENCES, int(rng.integers(0, style.filler + 1))):
            writer.say(f" {sentence.strip()}")
    query = write_entry(writer, style.query, {"key": keys[asked]})["key"]
    draft = writer.finish(value_slots[asked], values[asked], values[other], pool)
    fresh = values[count:]
    distractors = [slot for number, slot in enumerate(value_slots) if number != asked]
    return replace(
        draft,
        keys=(key_slots[asked], query),
        swaps=tuple(Rewording({value_slots[asked]: word}, word) for word in fresh[:2]),
        calms=(Rewording(dict(zip(distractors, fresh[2:], strict=True)), values[asked]),),
        exchanges=(
            Rewording(
                {key_slots[asked]: keys[other], key_slots[other]: keys[asked]}, values[other]
            ),
            Rewording({query: keys[other]}, values[other]),
        ),
    )


def write_entry(writer: TemplateWriter, form: str, words: Mapping[str, str]) -> dict[str, int]:
    """Write a form with {key} and {value}; the slot of each."""
    slots = {}
    rest = form
    for name in sorted(words, key=lambda name: form.index(f"{{{name}}}")):
        before, rest = rest.split(f"{{{name}}}")
        writer.say(before)
        slots[name] = writer.fill(words[name])
    writer.say(rest)
    return slots


# ---- the other families -------------------------------------------------------------------------


def draft_repeat(family: str, rng: Random, fit: Fit) -> Draft:
    """A list that is begun again: the next word is that of the first list."""
    pool = fit([*OBJECTS, *ANIMALS])
    count = int(rng.integers(8, 17))
    words = draw_words(rng, pool, 2 * count + 1)
    known = int(rng.integers(2, count))  # words of the second list; the answer is the next one
    writer = TemplateWriter(family)
    writer.say("List:")
    slots: list[list[int]] = []  # of each word
    for word in words[:count]:
        writer.say(" ")
        slots.append([writer.fill(word)])
    writer.say("\nList:")
    for number in range(known):
        writer.say(" ")
        slots[number].append(writer.fill(words[number]))
    others = [number for number in range(count) if number != known]
    foil = words[others[int(rng.integers(len(others)))]]
    draft = writer.finish(slots[known][0], words[known], foil, pool)
    fresh = words[count:]
    calm = {
        slot: word for number, word in zip(others, fresh[2:], strict=True) for slot in slots[number]
    }
    return replace(
        draft,
        swaps=tuple(Rewording({slots[known][0]: word}, word) for word in fresh[:2]),
        calms=(Rewording(calm, words[known]),),
    )


def draft_ioi(family: str, rng: Random, fit: Fit) -> Draft:
    """Two people and an object: the one who gives it gives it to the other."""
    pool = fit(FIRST_NAMES)
    names = draw_words(rng, pool, 7)
    receiver, giver, third = names[:3]
    places, things = draw_words(rng, fit(PLACES), 2), draw_words(rng, fit(OBJECTS), 2)
    is_first, is_early = rng.integers(2, size=2).tolist()
    writer = TemplateWriter(family)
    slots: dict[str, list[int]] = {"receiver": [], "giver": [], "third": []}

    def name(who: str) -> None:
        slots[who].append(writer.fill({"receiver": receiver, "giver": giver, "third": third}[who]))

    def mention_third() -> None:
        writer.say(" ")
        name("third")
        writer.say(" was at work.")

    writer.say("It was a long day.")
    if is_early:
        mention_third()
    pair = ("receiver", "giver") if is_first else ("giver", "receiver")
    writer.say(" Then, ")
    name(pair[0])
    writer.say(" and ")
    name(pair[1])
    writer.say(" went to the ")
    place = writer.fill(places[0])
    writer.say(".")
    if not is_early:
        mention_third()
    writer.say(" ")
    name("giver")
    writer.say(" gave the ")
    thing = writer.fill(things[0])
    writer.say(" to")
    draft = writer.finish(slots["receiver"][0], receiver, giver, pool)
    calm = {place: places[1], thing: things[1], slots["third"][0]: names[3]}
    calm |= dict.fromkeys(slots["giver"], names[4])
    return replace(
        draft,
        swaps=tuple(Rewording({slots["receiver"][0]: word}, word) for word in names[5:]),
        calms=(Rewording(calm, receiver),),
    )


def draft_agreement(family: str, rng: Random, fit: Fit) -> Draft:
    """A subject with other nouns around it: its number decides between is and are."""
    singular = [one for one, many in COUNT_NOUNS.items() if len(fit([one, many])) == 2]
    nouns = draw_words(rng, singular, 4)
    numbers = rng.integers(2, size=3).tolist()  # of the subject and two others: 1 for plural
    has_source, has_room = rng.integers(2, size=2).tolist()
    near = ("near", "behind", "beside", "with")[int(rng.integers(4))]

    def inflect(place: int, number: int) -> str:
        return COUNT_NOUNS[nouns[place]] if number else nouns[place]

    writer = TemplateWriter(family)
    others: dict[int, str] = {}  # slots of the other nouns, with those of the other number
    if has_source:
        writer.say("According to the ")
        others[writer.fill(inflect(2, numbers[2]))] = inflect(2, 1 - numbers[2])
        writer.say(", the ")
    else:
        writer.say("Today the ")
    subject = writer.fill(inflect(0, numbers[0]))
    writer.say(f" {near} the ")
    others[writer.fill(inflect(1, numbers[1]))] = inflect(1, 1 - numbers[1])
    if has_room:
        writer.say(" in the room")
    verbs = ("is", "are")
    answer, foil = verbs[numbers[0]], verbs[1 - numbers[0]]
    draft = writer.finish(subject, answer, foil, verbs)
    return replace(
        draft,
        swaps=(
            Rewording({subject: inflect(0, 1 - numbers[0])}, foil),
            Rewording({subject: inflect(3, 1 - numbers[0])}, foil),
        ),
        calms=(Rewording(others, answer),),
    )


# called with the name of the family, a generator of random numbers, and what words fit the model
TRUTH_FAMILIES: dict[str, Callable[[str, Random, Fit], Draft]] = {
    "repeat": draft_repeat,
    "relatives": draft_entries,
    "ioi": draft_ioi,
    "agreement": draft_agreement,
    "owners": draft_entries,
    "needle": draft_entries,
    "pairs": draft_entries,
    "shots": draft_entries,
    "passwords": draft_entries,
}
