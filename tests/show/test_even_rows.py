"""A row that hardly tells tokens apart is told as such by everything that shows it.

For every method and kind of edges: sentence, notes, figures, terminal, page, generation, comparison.
"""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import attnflow as af
from attnflow import figures
from attnflow.analysis.explain.summary import find_asides
from attnflow.analysis.page.page import describe_explanation, describe_generation
from attnflow.analysis.run import describe_top_row
from attnflow.core.evenness import find_even_spread
from attnflow.core.results import LIMITS
from attnflow.show.terminal.answers import print_explanation, print_story
from tests.explained import with_results
from tests.families import build, word_tokenizer
from tests.oracles import Floats
from tests.pages import Open, colours, explained, go_to, random_attention, text_of
from tests.show.drawings import title_of

EDGES = ["attention", "norm", "contribution", "gradient", "relevance"]
NAMES = [
    method if edges == "attention" else f"{edges} {method}"
    for edges in EDGES
    for method in ("raw", "rollout", "flow")
]
LONG = "the lost key to the cabinets is here the lost key"
SHORT = "the lost key is here"
TOP_TEXT = 0.041  # of the one word that is named first


@pytest.fixture(scope="module", params=[LONG, SHORT], ids=["long", "short"])
def base(request: pytest.FixtureRequest) -> af.Explanation:
    """All methods on all edges of a tiny classifier with random weights."""
    model = af.Model(build("distilbert"), word_tokenizer())
    return af.explain(
        request.param, model=model, methods=["raw", "rollout", "flow"], edges=EDGES, importance=()
    )


def plant(found: af.Explanation, name: str) -> af.Explanation:
    """The explanation with one result, whose explained row is even but for the explained token.

    The words have 0.0375, one 0.041 and one 0.034, and what is left out has the rest.
    """
    result = found.results[name]
    asides = set(find_asides(found))
    words = [place for place in range(len(found.tokens)) if place not in asides]
    values = result.values.copy()
    row = np.full(len(found.tokens), 0.0)
    row[words] = 0.0375
    row[words[-1]], row[words[0]] = TOP_TEXT, 0.034
    row[sorted(asides)] = (1 - row.sum()) / len(asides)
    values[:, result.positions.index(found.position)] = row
    limits = None if result.limits is None else np.full_like(result.limits, LIMITS.index("between"))
    return with_results(found, {name: replace(result, values=values, limits=limits, words=None)})


def count_words(found: af.Explanation) -> int:
    return len(found.tokens) - len(find_asides(found))


def check_sentence(found: af.Explanation, name: str, is_long: bool) -> None:
    told = found.summary()
    assert "mostly" not in told
    assert (list(found.even) == [name]) == is_long
    if is_long:
        assert told.endswith(f"{name[0].upper()}{name[1:]} says nothing here.")
    else:
        assert f"read all {count_words(found)} tokens alike" in told


def check_next_is_named(found: af.Explanation, name: str, is_long: bool) -> None:
    """Another result is named where there is one that says something."""
    result = found.results[name]
    values = np.full_like(result.values, 0.01)
    values[..., 2] = 0.9
    told_of = replace(result, values=values)
    both = with_results(found, {name: result, "mine": told_of})
    told = both.summary()
    assert ("By mine" in told or both.first == "mine") == is_long
    assert describe_explanation(both).first == ("mine" if is_long else both.first)


def check_notes(found: af.Explanation, name: str, is_long: bool) -> None:
    notes = describe_top_row(found.runs[name], found.position, find_asides(found))
    assert [note for note in notes if "is even: the spread" in note] == list(notes)
    assert bool(notes) == is_long


def check_page(found: af.Explanation, name: str, is_long: bool) -> None:
    (method,) = describe_explanation(found).methods
    assert method.even is not None
    assert method.even["token"][-1] == (int(is_long),)


def check_text(found: af.Explanation, name: str, is_long: bool) -> None:
    drawn = figures.text(found, exclude=["special", "sinks", "explained"])
    assert (len(drawn.artists[name].get_paths()) == 0) == is_long


def check_bars(found: af.Explanation, name: str, is_long: bool) -> None:
    drawn = figures.bars(found, exclude=["special", "sinks", "explained"])
    assert ("hardly differs" in title_of(drawn.axes[0])) == is_long
    hues = {bar.get_facecolor() for bar in drawn.artists[name]}
    assert all(len(set(hue[:3])) == 1 for hue in hues) == is_long  # grey


def check_map(found: af.Explanation, name: str, is_long: bool) -> None:
    exclude = ["special", "sinks", "explained"]
    drawn = figures.compare_heatmaps(found, exclude=exclude, scale="row")
    assert ("even (spread" in title_of(drawn.axes[0])) == is_long
    top = np.ma.getmaskarray(drawn.artists[name][0].get_array())[-1]
    assert top.all() == is_long


def check_terminal(found: af.Explanation, name: str, is_long: bool) -> None:
    for reference in (None, "even"):
        console = Console(file=StringIO(), width=200)
        print_explanation(
            console,
            found,
            layer=None,
            by_word=False,
            reference=reference,
            exclude=["special", "sinks", "explained"],
        )
        told = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("hardly differs between tokens here" in told) == is_long


def check_comparison(found: af.Explanation, name: str, is_long: bool) -> None:
    pair = af.compare(found, methods=(name, name))
    assert (pair.summary() == "Both say nothing: they read all tokens alike.") == is_long
    assert ("says nothing" in pair.to_markdown()) == is_long


CHECKS: list[Callable[[af.Explanation, str, bool], None]] = [
    check_sentence,
    check_next_is_named,
    check_notes,
    check_page,
    check_text,
    check_bars,
    check_map,
    check_terminal,
    check_comparison,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_an_even_row_is_told_as_even(
    base: af.Explanation, name: str, check: Callable[[af.Explanation, str, bool], None]
) -> None:
    planted = plant(base, name)
    check(planted, name, count_words(planted) >= 8)


def test_words_are_judged_as_they_are_shown() -> None:
    """A word of many tokens has much of a row that is even over tokens; flow may be even over words."""
    size = 14
    weights = np.full((2, size, size), 1 / size)
    numbers = (0, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    found = af.explain(af.Attention(weights, tokens=[f"t{at}" for at in range(size)]))
    run = replace(found.runs["rollout"], graph=None)  # words are sums

    def show(values: Floats) -> af.Explanation:
        result = replace(found.rollout, values=values, words=numbers)
        return replace(found, runs={"rollout": replace(run, result=result)})

    by_token = show(found.rollout.values)
    assert list(by_token.even) == ["rollout"]
    drawn = figures.bars(by_token, by_word=True, exclude="explained")
    assert "hardly differs between words" in title_of(drawn.axes[0])
    values = found.rollout.values.copy()
    values[:, :, 1:6] *= 0.2  # the five tokens of one word, which together are as the others
    by_word = show(values)
    assert list(by_word.even) == ["rollout"]
    assert "mostly" not in by_word.summary()
    assert "hardly differs" not in title_of(
        figures.bars(by_word, exclude="explained").axes[0]
    )  # in tokens


# ---- generations --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story() -> af.Generation:
    model = af.Model(build("llama"), word_tokenizer())
    return af.generate(model, LONG, max_new_tokens=4, eos_token_id=None)


def even_prompt(story: af.Generation, rows: int) -> af.PromptAttention:
    """The first result, with some rows even, and the others on one token."""
    first = story.first_result
    values = np.full_like(first.values, 0.0375)
    values[:, -1] = TOP_TEXT
    values[rows:, 3] = 0.9
    return replace(first, values=values)


@pytest.mark.parametrize("rows", [0, 3, 4])
def test_even_rows_of_a_generation(
    story: af.Generation, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = even_prompt(story, rows)
    monkeypatch.setitem(story.__dict__, "first_result", result)
    told = story.summary()
    assert ("They read all" in told) == (rows == 4)
    assert ("stands out" in told) == (rows < 4)
    assert ("mostly" in told) == (rows < 4)
    drawn = figures.generation(result, scale="row", exclude=[0])
    assert ("even" in title_of(drawn.axes[0])) == (rows > 0)
    blank = np.ma.getmaskarray(drawn.artists["map"].get_array()).all(axis=1)
    assert blank.tolist() == [at < rows for at in range(4)]
    for reference in (None, "even"):
        console = Console(file=StringIO(), width=200)
        print_story(console, story, result, layer=result.layers[-1], reference=reference)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert shown.count("read all tokens alike") == rows


def test_the_page_of_a_generation_has_a_flag_for_every_row(story: af.Generation) -> None:
    page = describe_generation(story)
    for method in page.methods:
        assert method.even is not None
        for flags in method.even.values():
            assert np.shape(flags) == (len(story.first_result.layers), 4)


# ---- the page -----------------------------------------------------------------------------------


def flag_position(found: af.Explanation, name: str, position: int) -> bool:
    row = found.results[name].select(position)
    return find_even_spread(row.compared_with("even", exclude=find_asides(found))) is not None


@pytest.mark.browser
def test_the_page_and_python_judge_rows_alike(visit: Open) -> None:
    """By the flags of the explained position, and by the page's own rule at the others."""
    from tests.pages import explanation_page

    found = explained(random_attention(8, 12, sharpness=0.45))
    tab = visit(explanation_page(found))
    flags: list[bool] = []
    for name in found.results:
        for position in range(12):
            go_to(tab, method=name, position=position)
            even = flag_position(found, name, position)
            flags.append(even)
            assert ("says nothing" in text_of(tab, "#note")) == even, (name, position)
            assert (text_of(tab, "#card-title").endswith("alike")) == even
            assert (tab.locator("#card-list li").count() == 0) == even
            assert (set(colours(tab)) == {None}) == even
    assert 5 < sum(flags) < len(flags) - 5


@pytest.mark.browser
def test_the_page_of_an_even_row_tells_no_word(visit: Open, base: af.Explanation) -> None:
    from tests.pages import explanation_page

    planted = {name: plant(base, name).runs[name] for name in NAMES}
    found = replace(base, runs=planted)
    is_long = count_words(found) >= 8
    tab = visit(explanation_page(found))
    assert "mostly" not in text_of(tab, "#answer")
    for name in [each for each in NAMES if "raw" in each or "flow" in each]:
        go_to(tab, method=name.replace(" ", "%20"), unit="token")
        if "attention" in found.results[name].edges and "flow" not in name:
            continue  # the page computes it itself, from the weights
        assert ("says nothing" in text_of(tab, "#note")) == is_long, name
        assert (tab.locator("#card-list li").count() == 0) == is_long


def test_the_planted_row_is_even_and_no_other(base: af.Explanation) -> None:
    row: Any = plant(base, "rollout").rollout.at(base.position)
    words: Floats = np.delete(row, find_asides(base))
    assert words.max() / words.mean() < 1.1
    assert words.argmax() == len(words) - 1
