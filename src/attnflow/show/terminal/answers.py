"""Explanations and generations on a terminal: a summary in a sentence, then strips of words."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from attnflow.analysis.exclude import ASIDES, Exclusion, find_excluded
from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.explain.summary import (
    find_row_spread,
    format_percent,
    list_marked_words,
    name_word,
)
from attnflow.analysis.generate.generation import Generation
from attnflow.analysis.generate.prompt_attention import PromptAttention
from attnflow.core.comparison import Comparison
from attnflow.core.evenness import say_nothing
from attnflow.core.groups import name_places
from attnflow.core.results import TokenAttention
from attnflow.core.sinks import Sink
from attnflow.core.text import is_common, show_token, show_tokens, show_watched
from attnflow.errors import printable
from attnflow.show.terminal.folding import print_segments
from attnflow.show.terminal.strips import (
    WIDEST_LABEL,
    choose_style,
    describe_doublings,
    describe_shares,
    find_doublings,
    find_steps,
    join_words,
    print_strip,
    print_wrapped,
    speaks_unicode,
)

STANDING_OUT = 4  # words that are named for each generated token
NAMED_TOKENS = 4  # tokens that are named among those that are not shaded


# ---- an explanation -----------------------------------------------------------------------------


def print_explanation(
    console: Console,
    explanation: Explanation,
    *,
    layer: int | None = None,
    by_word: bool = False,
    exclude: Exclusion = ASIDES,
    reference: str | None = None,
) -> None:
    """Print the summary, then a strip per method and importance, and legends.

    A long text is folded: a bar per sentence instead of strips. A chat has a bar per turn as well.
    exclude: positions that are not shaded, as for figures.
    reference: "even" or "others": shade by how far shares lie above or below these.
    """
    shown = explanation.depth if layer is None else layer
    asides = find_excluded(exclude, len(explanation.tokens), explanation)
    print_wrapped(console, printable(explanation.summary()), "bold")
    token = " ".join(show_tokens([explanation.tokens[at] for at in explanation.explained]))
    places = name_places(explanation.explained)
    where = f"layer {shown} of {explanation.depth}, {places}, {token}"
    print_wrapped(console, f"{where}, read:", "dim")
    if explanation.segments or explanation.graph is None:
        print_segments(console, explanation, shown, asides)
    if explanation.graph is None:
        print_asides(console, explanation.tokens, explanation.sinks, asides, "left out", "counts")
        return
    names = [*explanation.results, *explanation.importance]
    indent = 2 + min(WIDEST_LABEL, max(map(len, names), default=0))
    for name, result in explanation.results.items():
        row = explanation.row(name, shown, by_word=by_word)
        spread = find_row_spread(explanation, name, shown, by_word=by_word, exclude=asides)
        compared = compare_row(row, result, asides, reference, spread)
        if isinstance(compared, str):
            words = [Text(word, style="dim") for word in compared.split()]
        else:
            numbers = None if by_word else explanation.words
            words = shade_row(console, row, compared, reference, numbers)
        print_strip(console, label_strip(name), words, indent)
    print_importance(console, explanation, by_word, indent)
    if reference is not None:
        console.print(describe_doublings(console, reference))
    if reference is None or explanation.importance:
        signed = any(importance.signed for importance in explanation.importance.values())
        of_what = "" if reference is None else "importance, "
        console.print(describe_shares(console, of_what, signed=signed))
    print_asides(console, explanation.tokens, explanation.sinks, asides)


def compare_row(
    row: TokenAttention,
    result: TokenAttention,
    asides: Sequence[int],
    reference: str | None,
    spread: float | None,
) -> Comparison | str:
    """The comparison that shades the row of a result; or why the row says nothing.

    spread: that of a row that says nothing.
    """
    compared = row.compared_with("even", exclude=asides)
    if reference is not None and (compared.expected > 0).sum() < 2:
        return "fewer than two tokens count here; --exclude none counts all"
    if spread is not None:
        unit = "tokens" if row.groups is None else "words"
        return f"hardly differs between {unit} here (spread {spread:.2g}): it says nothing"
    if reference != "others":
        return compared
    if len(result.positions) < 2:
        return "no other position was computed: compare with even"
    others = result.compared_with("others", exclude=asides)
    return others.select(row.positions[0], row.layers[0])


def shade_row(
    console: Console,
    row: TokenAttention,
    compared: Comparison,
    reference: str | None,
    words: Sequence[int | None] | None,
) -> list[Text]:
    """The words of one row, shaded, and its strongest one with its number."""
    if row.groups is not None:  # they are words
        words = [None] * len(row.tokens)
    if reference is None:
        shares = compared.shares[0, 0]
        steps = find_steps(shares)
        best = int(shares.argmax())
        number = format_value(float(row.values[0, 0, best]))
    else:
        steps = find_doublings(compared.scaled[0, 0])
        best = int(compared.difference[0, 0].argmax())
        number = format_times(console, float(compared.ratio[0, 0, best]))
    joined = join_words(console, row.tokens, steps, words, compared=reference is not None)
    if compared.shares.any():
        joined.append(Text(f"| {show_token(row.tokens[best])} {number}", style="dim"))
    return joined


def print_importance(
    console: Console, explanation: Explanation, by_word: bool, indent: int
) -> None:
    """Print the target of importance, and a strip for each."""
    scored = explanation.word_importance if by_word else explanation.importance
    for place, (name, importance) in enumerate(scored.items()):
        if place == 0:
            value = f"probability {importance.probability:.3f}"
            if importance.score is not None:
                value = f"logit {importance.score:.3f}"
            watched = f"{show_watched(importance.target)} ({value})"
            print_wrapped(console, f"what {watched} depends on:", "dim")
        values = importance.values.copy()
        marked = zip(explanation.tokens, explanation.special, strict=True)
        special = {token for token, is_special in marked if is_special}
        quiet = [token in special for token in importance.tokens]
        values[quiet] = 0.0 if not all(quiet) else values[quiet]
        best = int(np.abs(values).argmax())
        words = [None] * len(values) if by_word else importance.words
        joined = join_words(console, importance.tokens, find_steps(values), words)
        number = format_value(float(values[best]))
        strongest = f"| {show_token(importance.tokens[best])} {number}"
        print_strip(console, label_strip(name), [*joined, Text(strongest, style="dim")], indent)


def print_asides(
    console: Console,
    tokens: Sequence[str],
    sinks: Sequence[Sink],
    asides: Collection[int],
    what: str = "not shaded",
    undo: str = "shades",
) -> None:
    """Print which tokens are not shaded, if any, and how much sinks among them hold."""
    held = {sink.position: sink.share for sink in sinks}
    named = [
        f"{show_token(tokens[at])} ({format_percent(held[at])} of all attention)"
        for at in held
        if at in asides
    ]
    rest = dict.fromkeys(show_token(tokens[at]) for at in sorted(asides) if at not in held)
    named += list(rest)[:NAMED_TOKENS]
    named += [f"{len(rest) - NAMED_TOKENS} more"] if len(rest) > NAMED_TOKENS else []
    if named:
        print_wrapped(console, f"{what}: {', '.join(named)}; --exclude none {undo} all", "dim")


# ---- a generation -------------------------------------------------------------------------------


def print_story(
    console: Console,
    story: Generation,
    result: PromptAttention,
    *,
    layer: int,
    reference: str | None,
    exclude: Exclusion = ASIDES,
    keep_common: bool = False,
) -> None:
    """Print the generated text, and for each of its tokens the words of the prompt that it read.

    reference: "others" or "even": the words that stand out against that; None: the whole prompt.
    exclude: prompt tokens that do not count, as for figures.
    """
    asides = find_excluded(exclude, story.size, story)
    sentence = story.summary(result, layer=layer, exclude=asides)
    print_wrapped(console, printable(sentence), "bold")
    console.print(Text(printable(story.text, keep="\n")))
    against = {"others": "against the others", "even": "against even attention", None: "by token"}
    where = f"layer {layer} of {len(result.layers)}"
    print_wrapped(console, f"{result.method}, {where}, {against[reference]}:", "dim")
    width = min(WIDEST_LABEL, max(len(show_token(token)) for token in result.generated))
    even = result.compared_with("even", exclude=asides)
    place = result.layers.index(layer)
    silent = say_nothing(even.shares[place], even.expected[place] > 0).tolist()
    if reference is None:
        rows = shade_prompt(console, result, layer, asides, keep_common)
        legend = describe_shares(console)
    else:
        compared = result.compared_with(reference, exclude=asides)
        rows = name_standing(console, compared, layer, keep_common)
        legend = Text("share of the row, and how many times the expected share", style="dim")
    told = zip(result.generated, story.probabilities, rows, silent, strict=True)
    for token, probability, words, is_silent in told:
        if is_silent:
            words = [Text("read all tokens alike", style="dim")]
        label = Text(f"{show_token(token)[:width]:>{width}} ")
        label.append(f"{probability:.2f}", style="dim")
        print_strip(console, label, words, width + 7)
    console.print(legend)
    print_asides(console, story.prompt, story.sinks, asides, "left out", "counts")
    if not keep_common:
        print_common(console, result, asides)


def print_common(console: Console, result: PromptAttention, asides: Collection[int]) -> None:
    """Print which common words of the prompt are not named, though the sentence counts them."""
    found = dict.fromkeys(
        show_token(word.name)
        for word in list_marked_words(result.prompt, list(asides))
        if is_common(word.name)
    )
    if found:
        shown = [*list(found)[:NAMED_TOKENS], *(["..."] if len(found) > NAMED_TOKENS else [])]
        note = f"common, not named: {', '.join(shown)}; --keep-common names all"
        print_wrapped(console, printable(note), "dim")


def name_standing(
    console: Console, compared: Comparison, layer: int, keep_common: bool
) -> Iterator[list[Text]]:
    """For each generated token, the words of the prompt that stand out, the largest first."""
    words = [
        word
        for word in list_marked_words(compared.tokens, compared.excluded)
        if keep_common or not is_common(word.name)
    ]
    for row in compared.positions:
        if not words:
            yield [Text("nothing", style="dim")]
            continue
        grouped = compared.select(row, layer).grouped(words)
        steps = find_doublings(grouped.scaled[0, 0])
        named = []
        for key, _, _ in grouped.top(STANDING_OUT):
            if steps[key] < 1:
                continue
            share = format_percent(float(grouped.shares[0, 0, key]))
            times = format_times(console, float(grouped.ratio[0, 0, key]))
            word = Text(name_word(grouped.tokens[key]), style=choose_style(console, steps[key]))
            named.append(Text().append_text(word).append(f" {share} {times}", style="dim"))
        for word in named[:-1]:
            word.append(",", style="dim")
        yield named or [Text("nothing stands out", style="dim")]


def shade_prompt(
    console: Console,
    result: PromptAttention,
    layer: int,
    asides: Collection[int],
    keep_common: bool,
) -> Iterator[list[Text]]:
    """For each generated token, the prompt, shaded."""
    values = result.values[:, :, result.layers.index(layer)].copy()
    quiet = [
        at in asides or (not keep_common and is_common(token))
        for at, token in enumerate(result.prompt)
    ]
    values[:, quiet] = 0.0
    for row in values:
        yield join_words(console, result.prompt, find_steps(row))


# ---- words --------------------------------------------------------------------------------------


def label_strip(name: str) -> Text:
    """The name of a method or an importance before its strip."""
    shown = printable(name).replace("_", " ")
    return Text(shown if len(shown) <= WIDEST_LABEL else f"{shown[: WIDEST_LABEL - 1]}…")


def format_value(value: float) -> str:
    """A number beside a strip: three decimals, more where they would all be 0."""
    return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def format_times(console: Console, ratio: float) -> str:
    """How many times the expected share."""
    sign = "×" if speaks_unicode(console) else "x"
    return f"{sign}{ratio:.1f}" if np.isfinite(ratio) else "new"
