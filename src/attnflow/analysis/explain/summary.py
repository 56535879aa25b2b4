"""Summaries in a sentence or two: the prediction, what was read, and what to distrust.

Shares are computed without sinks, special tokens and the explained position, which hold much the
same share in every text.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.statistics import spearman
from attnflow.core.arrays import Floats
from attnflow.core.comparison import Comparison
from attnflow.core.evenness import (
    WORTH_A_WARNING,
    are_even,
    find_even_spread,
    say_nothing,
)
from attnflow.core.groups import Group, name_places
from attnflow.core.results import TokenAttention
from attnflow.core.sinks import BoolArray, Sink
from attnflow.core.text import PATCH_NAME, number_marked, show_token, show_watched

if TYPE_CHECKING:
    from attnflow.analysis.explain.explanation import Explanation
    from attnflow.analysis.generate.generation import Generation
    from attnflow.analysis.generate.prompt_attention import PromptAttention

NAMED_WORDS = 3  # the maximum number of words that are named ...
NEARLY = 0.5  # ... each with at least this part of the first one's share
NOTHING = 0.005  # smaller changes of probability are reported as none
SMALL_PROBABILITY = 0.01  # a smaller one is shown by its first digit
LITTLE_SHARE = 0.1  # a smaller rest of a row is reported
DOUBTFUL = 0.3  # a smaller rank correlation with blank-out is reported as a doubt
WORD_WIDTH = 40  # the maximum number of characters of a word
SPECIAL_WORD = re.compile(r"\[[A-Z]+\]|<\S+>")


# ---- facts --------------------------------------------------------------------------------------


def find_unnamed(explanation: "Explanation") -> set[int]:
    """The positions of sinks and special tokens."""
    marked = {position for position, special in enumerate(explanation.special) if special}
    return marked | {sink.position for sink in explanation.sinks}


def find_asides(explanation: "Explanation") -> tuple[int, ...]:
    """The positions that sentences leave out: sinks, special tokens and the explained one."""
    return tuple(sorted(find_unnamed(explanation) | set(explanation.explained)))


def measure_agreement(explanation: "Explanation") -> dict[str, float]:
    """By result, the rank correlation of its row with blank-out, where it is defined."""
    if "blank_out" not in explanation.importance:
        return {}
    kept = np.ones(len(explanation.tokens), bool)
    kept[list(find_asides(explanation))] = False
    importance = np.abs(explanation.importance["blank_out"].values[kept])
    agreement = {}
    for name, result in explanation.results.items():
        row = result.at(explanation.position)
        if len(row) == len(kept):
            agreement[name] = float(spearman(row[kept][None], importance)[0])
    return {name: value for name, value in agreement.items() if not np.isnan(value)}


def find_even(explanation: "Explanation") -> dict[str, float]:
    """By result, the spread of its row where that is even over the tokens that are compared.

    What would be told is judged in words too, in which it is told.
    """
    asides = find_asides(explanation)
    even = {}
    for name in explanation.results:
        spread = find_row_spread(explanation, name, exclude=asides)
        if spread is not None:
            even[name] = spread
    while told := choose_told(explanation, even):
        by_word = has_words(explanation, told)
        spread = find_row_spread(explanation, told, by_word=by_word, exclude=asides)
        if spread is None:
            break
        even[told] = spread
    return {name: even[name] for name in explanation.results if name in even}


def find_row_spread(
    explanation: "Explanation",
    name: str,
    layer: int | None = None,
    *,
    by_word: bool = False,
    exclude: Sequence[int],
) -> float | None:
    """The spread of a row that says nothing, in tokens or in the words that are shown; else None.

    Words of many tokens have more of a row that is even over tokens, so both are judged.
    """
    for grouped in (False, True) if by_word else (False,):
        row = explanation.row(name, layer, by_word=grouped)
        spread = find_even_spread(row.compared_with("even", exclude=exclude))
        if spread is not None:
            return spread
    return None


def choose_told(explanation: "Explanation", even: Collection[str]) -> str:
    """The result that is told: the first, or else the next that is not even; empty if all are."""
    if explanation.first and explanation.first not in even:
        return explanation.first
    return next((name for name in explanation.results if name not in even), "")


def has_words(explanation: "Explanation", name: str) -> bool:
    """Whether the words of a result are known."""
    words = explanation.results[name].words
    return words is not None and any(word is not None for word in words)


# ---- an explanation -----------------------------------------------------------------------------


def summarise_explanation(explanation: "Explanation") -> str:
    """One sentence on an explanation, as `Explanation.summary` gives it."""
    answer, doubts = phrase_explanation(explanation)
    return " ".join([*answer, *doubts])


def phrase_explanation(explanation: "Explanation") -> tuple[list[str], list[str]]:
    """Sentences on the prediction and what was read; and sentences on what to distrust."""
    even = explanation.even
    first = choose_told(explanation, even)
    answer: list[str] = []
    doubts: list[str] = []
    edges = {result.edges for result in explanation.results.values()}
    if explanation.witnesses is not None and edges == {"attention"}:
        answer.append("These are rows of attention alone, not of contributions.")
    if explanation.prediction is not None:
        label, probability = explanation.prediction
        # that of a whole answer may be small
        form = ".1g" if explanation.span and probability < SMALL_PROBABILITY else ".2f"
        answer.append(f"{quote_text(show_token(label))} {probability:{form}}.")
    if first:
        answer += phrase_reading(explanation, first)
    if even:
        says = "say" if len(even) > 1 else "says"
        doubts.append(f"{begin(join_names(list(even)))} {says} nothing here.")
    ranked = len(explanation.tokens) - len(find_asides(explanation))
    if first in explanation.agreement and ranked >= WORTH_A_WARNING[1]:
        value = explanation.agreement[first]
        doubt = ": distrust it" if value < DOUBTFUL else ""
        doubts.append(f"On this text {first} ranks tokens like blank-out at {value:.2f}{doubt}.")
    return answer, doubts


def phrase_reading(explanation: "Explanation", name: str) -> Iterator[str]:
    """What the explained position read by one result, and what blanking that out costs."""
    asides = find_asides(explanation)
    row = explanation.row(name, by_word=has_words(explanation, name))
    compared = row.compared_with("even", exclude=asides)
    shares = compared.shares[0, 0]
    if not shares.any():
        return
    names = name_keys(explanation, row)
    named = choose_named(shares)
    strongest = [phrase_share(names, shares, key, row) for key in named]
    unit = name_unit(explanation, row)
    seen = compared.expected[0, 0] > 0
    alike = phrase_alike(shares, seen, unit)
    if row.groups is not None and not alike:  # longer words have more of even tokens
        by_token = explanation.row(name).compared_with("even", exclude=asides)
        alike = phrase_alike(by_token.shares[0, 0], by_token.expected[0, 0] > 0, "tokens")
    read = alike or phrase_read(names, shares, seen, strongest)
    by = "" if name == explanation.first else f"by {name} "
    who = "it" if explanation.prediction is not None else name_places(explanation.explained)
    cost = phrase_cost(explanation, row, names, None if alike else named[0])
    aside = phrase_asides(explanation.special, explanation.sinks, explanation.explained)
    yield f"{begin(f'{by}{who}')} {read}{aside}{cost}."
    at_sinks = row.compared_with("even", exclude=[sink.position for sink in explanation.sinks])
    left = 1 - float(at_sinks.excluded_share[0, 0])
    if left < LITTLE_SHARE:
        yield f"Only {format_percent(left)} of {name} lies there."


def phrase_cost(
    explanation: "Explanation", row: TokenAttention, names: Sequence[str], top: int | None
) -> str:
    """What blanking out a key costs, and which key costs most; empty if unknown.

    top: the key that was read most; None if all were read alike.
    """
    importance = explanation.importance if row.groups is None else explanation.word_importance
    scored = importance.get("blank_out")
    if scored is None:
        return ""
    blanked = dict(zip(list_key_positions(scored), scored.values.tolist(), strict=True))
    holding = list_key_positions(row)
    costs = {key: blanked[held] for key, held in enumerate(holding) if held in blanked}
    unnamed = find_unnamed(explanation)
    others = [key for key in costs if not unnamed.intersection(holding[key])]
    most = max(others, key=lambda key: costs[key], default=-1)
    top = most if top is None else top
    if top not in costs:
        return ""
    most = most if others else top
    target = ""
    if explanation.prediction is not None and scored.target != explanation.prediction[0]:
        target = f"{show_watched(scored.target)} "
    cost = costs[top]
    verb = f"costs {target}{cost:.2f}" if cost > 0 else f"adds {target}{-cost:.2f}"
    verb = verb if abs(cost) >= NOTHING else "costs nothing"
    also = ""
    if most != top and costs[most] >= max(NOTHING, cost):
        also = f", {names[most]} costs most, {costs[most]:.2f}"
    return f"; blanking {names[top]} {verb}{also}"


def name_keys(explanation: "Explanation", row: TokenAttention) -> list[str]:
    """The names of the keys of a row in a sentence."""
    captured = explanation.captured
    if captured is not None and captured.grid is not None:
        found = [PATCH_NAME.fullmatch(token) for token in row.tokens]
        return [
            "the patch in row {}, column {}".format(*match.groups()) if match else show_token(token)
            for token, match in zip(row.tokens, found, strict=True)
        ]
    if explanation.graph is not None and explanation.graph.tokens is None:
        return [f"position {token}" for token in row.tokens]
    return [name_word(token) for token in row.tokens]


def name_unit(explanation: "Explanation", row: TokenAttention) -> str:
    """The noun for the keys of a row, in the plural."""
    if explanation.captured is not None and explanation.captured.grid is not None:
        return "patches"
    return "words" if row.groups is not None else "tokens"


def phrase_share(names: Sequence[str], shares: Floats, key: int, row: TokenAttention) -> str:
    """A key with its share in percent; with its position if another key has the same name."""
    where = f"position {list_key_positions(row)[key][0]}, " if names.count(names[key]) > 1 else ""
    return f"{names[key]} ({where}{format_percent(shares[key])})"


def list_key_positions(row: TokenAttention | Importance) -> list[tuple[int, ...]]:
    """The positions of every key."""
    if row.groups is None:
        return [(key,) for key in range(len(row.tokens))]
    return [group.positions for group in row.groups]


# ---- a generation -------------------------------------------------------------------------------


def summarise_generation(
    generation: "Generation",
    result: "PromptAttention | None" = None,
    layer: int | None = None,
    asides: Sequence[int] | None = None,
) -> str:
    """One sentence on a generation, as `Generation.summary` gives it.

    result, layer, asides: what it is told by, if not by `first_result` in the top layer without
    sinks and special tokens.
    """
    several = len(generation.tokens) > 1
    subject = quote_text(show_token(generation.tokens[0]))
    if several:
        subject = f"{len(generation.tokens)} tokens with a mean probability of"
    sentences = [f"{subject} {float(np.mean(generation.probabilities)):.2f}."]
    result = generation.first_result if result is None else result
    asides = find_prompt_asides(generation) if asides is None else asides
    place = result.find_place(layer)
    compared = result.compared_with("others" if several else "even", exclude=asides)
    shares = compared.shares[place]  # [generated, token]
    seen = ~np.isin(np.arange(len(result.prompt)), asides) & result.read
    words = list_marked_words(result.prompt, np.flatnonzero(~seen).tolist())
    by_word = compared.grouped(words)
    read_words = by_word.shares[place].mean(axis=0)  # [word]
    if not read_words.any():
        return sentences[0]
    names = [name_word(word.name) for word in words]
    every = np.ones(len(words), bool)
    read = (
        phrase_alike(read_words, every, "words")
        # longer words have more of what is even over tokens
        or phrase_alike(shares.mean(axis=0), seen, "tokens")
        or phrase_read(names, read_words, every, list_strongest(names, read_words))
    )
    who = "They" if several else "It"
    sentences.append(f"{who} {read} of the prompt{phrase_prompt_asides(generation, asides)}.")
    # a token that read all alike does not stand out, whatever the others read
    even = say_nothing(shares, np.broadcast_to(seen, shares.shape))
    if several and not even.all():
        difference = np.where(even[:, None], -np.inf, by_word.difference[place])
        sentences.append(phrase_standing(generation, by_word, place, difference, names))
    left = 1 - float(compared.excluded_share[place].mean())
    if left < LITTLE_SHARE:
        sentences.append(
            f"Only {format_percent(left)} of {result.method} on the prompt lies there."
        )
    return " ".join(sentences)


def find_prompt_asides(generation: "Generation") -> list[int]:
    """The prompt positions that sentences leave out: special tokens and sinks."""
    prompt = generation.first_result.prompt
    marked = [place for place, token in enumerate(prompt) if token in generation.special]
    return marked + [sink.position for sink in generation.sinks if sink.position < generation.size]


def phrase_prompt_asides(generation: "Generation", asides: Sequence[int]) -> str:
    """Which of the special tokens and sinks of a prompt are among the positions left out."""
    special = [
        at in asides and token in generation.special for at, token in enumerate(generation.prompt)
    ]
    return phrase_asides(special, [sink for sink in generation.sinks if sink.position in asides])


def list_strongest(names: Sequence[str], shares: Floats) -> list[str]:
    """The keys to name, with their shares in percent."""
    return [f"{names[key]} ({format_percent(shares[key])})" for key in choose_named(shares)]


def phrase_standing(
    generation: "Generation",
    by_word: Comparison,
    place: int,
    difference: Floats,
    names: Sequence[str],
) -> str:
    """The generated token and the word that differ most in a layer, by [generated, word]."""
    token, word = divmod(int(difference.argmax()), len(names))
    standing = quote_text(show_token(generation.tokens[token]))
    here, elsewhere = by_word.shares[place, token, word], by_word.expected[place, token, word]
    both = f"{format_percent(here)}, {format_percent(elsewhere)} elsewhere"
    return f"{standing} stands out: {names[word]} has {both}."


def list_marked_words(tokens: Sequence[str], without: Sequence[int]) -> list[Group]:
    """The words of tokens by the marks of their tokenizer, without those that hold a position."""
    words: dict[int, list[int]] = {}
    for place, number in enumerate(number_marked(tokens)):
        words.setdefault(number, []).append(place)
    kept = [places for places in words.values() if not set(places).intersection(without)]
    return [
        Group("".join(show_token(tokens[at]) for at in places), tuple(places)) for places in kept
    ]


# ---- words --------------------------------------------------------------------------------------


def choose_named(shares: Floats) -> list[int]:
    """The keys to name: the strongest, and those that come near it."""
    order = np.argsort(-shares, kind="stable")[:NAMED_WORDS]
    return [int(key) for key in order if shares[key] >= NEARLY * shares[order[0]]]


def phrase_read(
    names: Sequence[str], shares: Floats, counts: BoolArray, strongest: Sequence[str]
) -> str:
    """What was read, by the shares of the keys that count, which are not alike.

    strongest: the keys to name, with their shares.
    """
    if counts.sum() == 1:
        return f"read only {names[int(counts.argmax())]}"
    return f"read mostly {join_names(strongest)}"


def phrase_alike(shares: Floats, counts: BoolArray, unit: str) -> str:
    """That all keys that count were read alike; empty if they were not, or if it is one key."""
    if counts.sum() < 2 or not are_even(shares, counts):
        return ""
    return f"read all {counts.sum()} {unit} alike"


def phrase_asides(
    special: Sequence[bool], sinks: Sequence[Sink], explained: Sequence[int] = ()
) -> str:
    """Which tokens the shares leave out; empty if none.

    explained: the explained positions, if they are left out.

    >>> phrase_asides([True, False], [Sink(1, ".", 0.5)])
    ', special tokens and sinks aside'
    """
    marked = {at for at, is_special in enumerate(special) if is_special}
    taking = {sink.position for sink in sinks if sink.position < len(special)} - marked
    own = set(explained) - marked - taking
    kinds = {"special tokens": marked, "sinks": taking, "itself": own}
    named = [kind for kind, held in kinds.items() if held]
    return f", {join_names(named)} aside" if named else ""


def name_word(word: str) -> str:
    """A word inside a sentence: without marks around it, and quoted unless it is a plain word.

    >>> name_word("(key),"), name_word("[UNK]的[UNK]")
    ('key', '“[UNK]的[UNK]”')
    """
    shown = show_token(word)
    # a backslash begins an escape, and brackets belong to [UNK]
    inner = (
        shown if SPECIAL_WORD.search(shown) else re.sub(r"^[^\w\\]+|[^\w]+$", "", shown) or shown
    )
    inner = inner if len(inner) <= WORD_WIDTH else f"{inner[: WORD_WIDTH - 1]}…"
    return quote_text(inner)


def quote_text(text: str) -> str:
    """A text in quotation marks, unless it begins and ends like a word."""
    plain = text and all(place.isalnum() for place in (text[0], text[-1]))
    return text if plain else f"“{text}”"


def join_names(names: Sequence[str]) -> str:
    """a; a and b; a, b and c.

    >>> join_names(["raw", "rollout", "flow"])
    'raw, rollout and flow'
    """
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def begin(text: str) -> str:
    """A text with a capital letter first."""
    return text[:1].upper() + text[1:]


def format_percent(share: float) -> str:
    """A share in percent.

    >>> format_percent(0.284), format_percent(0.0004), format_percent(1e-7)
    ('28 %', '0.04 %', '0.00001 %')
    """
    if share >= 0.01 or share <= 0:
        return f"{100 * share:.0f} %"
    digits = 1 - int(np.floor(np.log10(100 * share)))
    return f"{100 * share:.{max(digits - 1, 1)}f} %"
