"""The first screen of the page in a real browser: the answer, the text in colours, controls, pins, the story of a generation.

Numbers equal the arrays to 1e-3. Chromium is $CHROMIUM or /usr/bin/chromium; where CHROMIUM is set, these tests do not skip.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import attnflow as af
from attnflow.analysis import long_inputs
from attnflow.analysis.explain.summary import find_asides, phrase_explanation
from attnflow.analysis.page import pack as page_packing
from attnflow.core.groups import Group, sum_groups
from attnflow.models.predict import Prediction, Target
from attnflow.show.page.page import framed
from tests.families import build, word_tokenizer
from tests.pages import (
    CLOSE,
    HOSTILE,
    IMAGE,
    TEXT,
    TOKENS,
    Open,
    check_column,
    colours,
    column,
    explained,
    explanation_page,
    generation_page,
    go_to,
    random_attention,
    settled,
    state,
    table,
    text_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::attnflow.SaturationWarning")]


@pytest.fixture(scope="module")
def small() -> af.Explanation:
    """The bundled model, with every head."""
    return af.explain(TEXT, heads=None)


@pytest.fixture(scope="module")
def story() -> af.Generation:
    """A tiny decoder with a tokenizer, random weights."""
    model = af.Model(build("llama"), word_tokenizer())
    return af.generate(model, "the key to the cabinets is", max_new_tokens=6, eos_token_id=None)


# ---- the answer ------------------------------------------------------------------------------------


def test_the_page_opens_with_the_answer_and_the_running_text(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    answer, _ = phrase_explanation(small)
    assert tab.locator("h1").inner_text() == " ".join(answer)
    assert tab.locator("h1").inner_text().startswith(small.prediction[0])  # type: ignore[index]
    assert tab.locator(TOKENS).all_inner_texts() == [
        token.partition("/")[0] for token in small.tokens
    ]
    assert state(tab, "method") == small.first
    card = tab.locator("#card-list li").all_inner_texts()
    shares = small.row(small.first).compared_with("even", exclude=find_asides(small)).shares[0, 0]
    best = int(np.argmax(shares))
    assert card[0].split("\n") == [small.tokens[best], f"{100 * shares[best]:.0f} %"]
    assert f"{card[0].split()[0]} " in answer[1]


def test_controls_change_the_numbers_to_those_of_the_arrays(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    tab.locator("#show-sinks").click()
    for layer in (1, 3, small.depth):
        tab.locator("#layer").fill(str(layer))
        assert state(tab, "layer") == str(layer)
        titles = ("Raw", "Rollout", "Flow", "Relevance flow")
        for name, title in zip(("raw", "rollout", "flow", "relevance flow"), titles, strict=True):
            check_column(tab, title, small.results[name].at(small.position, layer))
    tab.locator("#method").select_option("rollout")
    assert state(tab, "method") == "rollout"
    tab.locator("#method").select_option("flow")
    assert tab.locator("#edges-choice option").all_inner_texts() == ["relevance", "attention"]
    tab.locator("#edges-choice").select_option("attention")
    assert state(tab, "method") == "flow"
    for name, title in (("blank_out", "Blank-out"), ("input_gradient", "Input gradient")):
        tab.locator("#method").select_option(name)
        check_column(tab, title, small.importance[name].values)
        assert tab.locator("#layer").is_disabled()
        assert tab.locator("#against").is_disabled()


@pytest.mark.parametrize("against", ["even", "others"])
@pytest.mark.parametrize("causal", [False, True])
def test_comparisons_are_those_of_python(visit: Open, against: str, causal: bool) -> None:
    """Expected shares and ratios, with positions left out and with all."""
    found = explained(random_attention(4, 12, causal=causal), 9)
    tab = visit(explanation_page(found))
    for name in ("rollout", "raw", "flow"):
        for exclude, shown in ((find_asides(found), "false"), ((), "true")):
            for position, layer in ((9, 4), (9, 2), (5, 3)):
                go_to(
                    tab, method=name, against=against, sinks=shown, position=position, layer=layer
                )
                result = found.results[name].compared_with(against, exclude=exclude)
                expected = result.select(position, layer).expected[0, 0]
                there = expected > 0
                got = column(tab, "expected", 12)
                assert np.nanmax(np.abs(got - expected)[there]) < CLOSE
                ratio = result.select(position, layer).ratio[0, 0]
                times = column(tab, "times expected", 12)
                assert np.allclose(times[there], ratio[there], rtol=0.01, atol=0.01)


def test_words_are_summed_compared_and_blanked_as_a_whole(visit: Open) -> None:
    words = [0, 1, 1, 2, 3, 3, 3, 4]
    tokens = ["[CLS]", "un", "##do", "it", "re", "##do", "##ing", "now"]
    attention = random_attention(4, 8, tokens=tokens, words=words)
    found = explained(attention)
    tab = visit(explanation_page(found))
    assert state(tab, "unit") == "word"
    assert text_of(tab, "#text") == "[CLS] undo it redoing now"
    groups = [Group("", group) for group in ((0,), (1, 2), (3,), (4, 5, 6), (7,))]
    tab.locator("#show-sinks").click()
    shown = table(tab)
    assert shown["token"] == ["[CLS]", "undo", "it", "redoing", "now"]
    assert np.abs(shown["Rollout"] - sum_groups(found.rollout.at(0), groups)).max() < CLOSE
    by_word = af.flow(found.graphs["rollout"], layers=[4], positions=[0], groups=groups)
    assert np.abs(shown["Flow"] - by_word.at(0)).max() < CLOSE
    tab.locator("#show-sinks").click()
    tab.locator("#against").select_option("others")
    result = found.rollout.by_word().compared_with("others", exclude=[0])
    assert np.abs(table(tab)["expected"] - result.expected[-1, 0, 1:]).max() < CLOSE
    tab.locator("#unit").select_option("token")
    assert table(tab)["token"] == [token.removeprefix("##") for token in tokens[1:]]


def test_sinks_are_named_left_out_and_shown_on_request(visit: Open) -> None:
    weights = np.full((4, 12, 12), 0.5 / 11)
    weights[:, :, 0] = 0.5
    weights += 0.02 * np.random.default_rng(0).random(weights.shape)
    attention = af.Attention(weights / weights.sum(axis=-1, keepdims=True), causal=False)
    found = explained(attention, 5)
    assert [sink.position for sink in found.sinks] == [0]
    tab = visit(explanation_page(found))
    share = f"{100 * found.sinks[0].share:.0f} %"
    assert text_of(tab, "#sinks-text").startswith(f"t0 (position 0) holds {share} of all attention")
    assert colours(tab)[0] is None
    assert "t0" not in [
        each.split("\n")[0] for each in tab.locator("#card-list li").all_inner_texts()
    ]
    tab.locator("#show-sinks").click()
    assert state(tab, "sinks") == "true"
    assert colours(tab)[0] is not None
    assert tab.locator("#card-list li").first.inner_text().startswith("t0")


def test_a_text_without_sinks_says_nothing_of_them(visit: Open) -> None:
    found = af.explain(random_attention(3, 6), position=2)
    found = replace(found, special=(False,) * 6)
    tab = visit(explanation_page(found))
    assert "holds" not in text_of(tab, "#sinks-text")


def test_a_method_that_says_nothing_is_folded_with_its_reason(visit: Open) -> None:
    found = explained(random_attention(8, 12, sharpness=0.3))
    assert list(found.even) == ["rollout", "flow"]
    tab = visit(explanation_page(found))
    assert not tab.locator("#note").is_visible()
    assert "Flow" in text_of(tab, "#trust")
    assert "says nothing" in text_of(tab, "#trust")
    assert tab.locator("#method option").all_inner_texts()[-1] == "Flow (says nothing here)"
    tab.locator("#method").select_option("flow")
    assert "says nothing" in tab.locator("#note").inner_text()
    assert set(colours(tab)) == {None}
    tab.locator("#layer").fill("1")
    assert not tab.locator("#note").is_visible()
    assert len(set(colours(tab))) > 4


def test_the_line_of_trust_gives_the_agreement_with_blank_out(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    for name in ("relevance flow", "rollout"):
        go_to(tab, method=name)
        assert f"like blank-out at {small.agreement[name]:.2f}" in text_of(tab, "#trust")


def test_what_is_not_finite_is_said_not_drawn(visit: Open, small: af.Explanation) -> None:
    values = np.array([np.nan, *[0.1] * (len(small.tokens) - 1)])
    unsound = replace(small.importance["blank_out"], values=values)
    found = replace(small, importance={"blank_out": unsound}, word_importance={})
    tab = visit(explanation_page(found))
    assert not tab.locator("#note").is_visible()
    tab.locator("#method").select_option("blank_out")
    assert "Blank-out cannot be drawn here" in tab.locator("#note").inner_text()
    assert set(colours(tab)) == {None}


# ---- colours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_blue_is_more_than_expected_and_orange_less(
    visit: Open, small: af.Explanation, scheme: str
) -> None:
    tab = visit(explanation_page(small), scheme=scheme)
    compared = small.row(small.first).compared_with("even", exclude=find_asides(small))
    for tone, colour in zip(compared.scaled[0, 0], colours(tab), strict=True):
        if abs(tone) > 0.1:
            assert colour is not None
            assert (colour[2] > colour[0]) == (tone > 0), (tone, colour)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_speaks_against_the_target_has_another_colour(
    visit: Open, small: af.Explanation, scheme: str
) -> None:
    values = small.importance["blank_out"].values
    assert values.min() < 0 < values.max()
    tab = visit(explanation_page(small), scheme=scheme)
    tab.locator("#method").select_option("blank_out")
    assert "orange ones against it" in tab.locator("#meaning").inner_text()
    for value, colour in list(zip(values, colours(tab), strict=True))[1:]:
        if abs(value) > 0.1 * np.abs(values).max():
            assert colour is not None
            assert (colour[2] > colour[0]) == (value > 0), (value, colour)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("against", ["even", "nothing"])
def test_text_on_every_colour_of_the_scale_has_contrast(
    visit: Open, scheme: str, against: str
) -> None:
    tab = visit(explanation_page(explained(random_attention(3, 60))), scheme=scheme)
    go_to(tab, against=against, sinks="true")
    read = "[...document.querySelectorAll('.token')].map(e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor])"

    def luminance(colour: str) -> float:
        parts = np.array(re.findall(r"\d+", colour)[:3], float) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    pairs = [pair for pair in tab.evaluate(read) if not pair[1].startswith("rgba(0")]
    assert len(pairs) > 50
    for pair in pairs:
        dark, light = sorted(map(luminance, pair))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


# ---- one hover, one pin, another position -----------------------------------------------------------


def test_a_token_under_the_pointer_has_its_numbers_and_a_click_pins_it(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    row = small.row(small.first).values[0, 0]
    tab.locator(TOKENS).nth(2).hover()
    settled(tab)
    assert state(tab, "hover") == "2"
    told = text_of(tab, "#card-focus")
    value = re.search(r"position 2: (\d\.\d+), rank (\d+)", told)
    assert value is not None
    assert float(value[1]) == pytest.approx(row[2], abs=CLOSE)
    kept = [at for at in range(len(row)) if at not in find_asides(small)]
    assert int(value[2]) == 1 + sum(row[at] > row[2] for at in kept)
    tab.locator(TOKENS).nth(2).click()
    assert state(tab, "pin") == "2"
    tab.mouse.move(2, 2)
    settled(tab)
    assert "position 2" in text_of(tab, "#card-focus")
    assert tab.locator(f"{TOKENS}[aria-selected=true]").inner_text() == small.tokens[2]
    tab.keyboard.press("Escape")
    assert state(tab, "pin") == ""
    assert "Hover or focus" in text_of(tab, "#card-focus")


def test_the_text_is_read_and_pinned_by_keyboard(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    tab.locator(TOKENS).first.focus()
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    settled(tab)
    assert state(tab, "hover") == "3"
    assert f"“{small.tokens[3]}”, position 3" in text_of(tab, "#live")
    tab.keyboard.press("Enter")
    assert state(tab, "pin") == "3"
    assert text_of(tab, "#live").startswith("Pinned")
    tab.keyboard.press("End")
    tab.keyboard.press(" ")
    assert state(tab, "pin") == str(len(small.tokens) - 1)


def test_another_position_is_explained_by_a_named_control(
    visit: Open, small: af.Explanation
) -> None:
    tab = visit(explanation_page(small))
    go_to(tab, method="rollout", sinks="true")
    tab.locator(TOKENS).nth(4).click()
    assert state(tab, "position") == str(small.position)
    tab.get_by_role("button", name="Explain this position instead").click()
    assert state(tab, "position") == "4"
    check_column(tab, "Rollout", small.rollout.at(4))
    check_column(tab, "Relevance flow", small.results["relevance flow"].at(4))
    assert "position 4" in text_of(tab, "#here")
    tab.get_by_role("button", name="Back to what was asked").click()
    assert state(tab, "position") == str(small.position)


def test_the_state_is_in_the_address(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    tab.locator("#method").select_option("rollout")
    tab.locator("#layer").fill("2")
    tab.locator(TOKENS).nth(5).click()
    address = tab.evaluate("location.hash")
    assert address == "#method=rollout&layer=2&pin=5"
    tab.evaluate("location.reload()")
    tab.wait_for_selector("body[data-ready]")
    assert [state(tab, name) for name in ("method", "layer", "pin")] == ["rollout", "2", "5"]
    go_to(tab, method="nonsense", layer=99, pin=-1, unit="page")
    assert [state(tab, name) for name in ("method", "layer", "pin")] == [small.first, "6", ""]


# ---- graphs of any kind -------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_rollout_of_every_node_is_computed_in_the_page(visit: Open, sharpness: float) -> None:
    """Twenty-four layers: what 16 bits lose does not add up."""
    found = explained(random_attention(24, 7, sharpness=sharpness))
    tab = visit(explanation_page(found))
    for position in range(7):
        for layer in (1, 7, 12, 24):
            go_to(tab, method="rollout", position=position, layer=layer, sinks="true")
            check_column(tab, "Rollout", found.rollout.at(position, layer))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options", [{"residual": 0.2}, {"normalize": "receptive_field"}, {"normalize": None}], ids=str
)
def test_residual_and_normalisation_are_those_of_the_explanation(
    visit: Open, causal: bool, options: dict[str, Any]
) -> None:
    found = explained(random_attention(4, 9, causal=causal), 8, **options)
    tab = visit(explanation_page(found))
    for position in (2, 8):
        go_to(tab, position=position, sinks="true")
        for name, title in (("raw", "Raw"), ("rollout", "Rollout"), ("flow", "Flow")):
            check_column(tab, title, found.results[name].at(position))


def test_above_64_tokens_flow_is_given_for_one_position_and_says_so(visit: Open) -> None:
    found = explained(random_attention(6, 80))
    tab = visit(explanation_page(found))
    go_to(tab, method="flow", sinks="true")
    check_column(tab, "Flow", found.flow.at(0))
    go_to(tab, method="flow", position=9)
    assert "Flow is given for position 0" in text_of(tab, "#note")


def test_a_page_without_the_graph_still_shows_its_position(
    visit: Open, small: af.Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_packing, "GRAPH_BYTES", 10)
    tab = visit(explanation_page(small))
    tab.locator("#show-sinks").click()
    for name, title in (("raw", "Raw"), ("rollout", "Rollout"), ("flow", "Flow")):
        check_column(tab, title, small.results[name].at(small.position))
    go_to(tab, method="rollout", position=2)
    assert "Rollout is given for position 0" in text_of(tab, "#note")


@pytest.mark.parametrize(("depth", "size"), [(1, 1), (1, 3), (3, 1)])
def test_the_smallest_inputs_have_a_page(visit: Open, depth: int, size: int) -> None:
    found = explained(random_attention(depth, size))
    tab = visit(explanation_page(found))
    for method in ("raw", "flow", "rollout"):
        tab.locator("#method").select_option(method)
    go_to(tab, sinks="true")
    check_column(tab, "Rollout", found.rollout.at(0))


def test_a_method_of_the_users_own_has_its_place_and_numbers(visit: Open) -> None:
    name = "mine <b>&"
    mine = af.token_attention(name, lambda graph: graph.weights[::-1] ** 2)
    found = af.explain(TEXT, methods={"rollout": None, name: mine}, importance=())
    tab = visit(explanation_page(found))
    tab.locator("#method").select_option(name)
    assert state(tab, "method") == name
    tab.locator("#show-sinks").click()
    for layer in (6, 2):
        tab.locator("#layer").fill(str(layer))
        check_column(tab, name, found.results[name].at(found.position, layer))


def test_positions_that_were_taken_out_are_said_to_be_so(visit: Open) -> None:
    found = af.explain(TEXT, without=[2], importance=())
    tab = visit(explanation_page(found))
    go_to(tab, position=2)
    assert "was taken out of the graph" in text_of(tab, "#note")


def test_edges_with_the_residual_inside_have_their_own_numbers(visit: Open) -> None:
    graph = af.AttentionGraph(edges=3.0 * np.random.default_rng(1).random((3, 6, 6)))
    found = af.explain(graph)
    tab = visit(explanation_page(found))
    go_to(tab, sinks="true")
    for name in ("Rollout", "Raw", "Flow"):
        check_column(tab, name, found.results[name.lower()].at(found.position))
    assert "The given edges hold the residual" in tab.locator("#notes").inner_text()


# ---- long texts -----------------------------------------------------------------------------------------


def test_a_long_text_folds_into_sentences_with_a_bar_each(visit: Open) -> None:
    words = ["the", "old", "harbour", "was", "quiet", "that", "night", "."]
    tokens = [words[place % 8] for place in range(440)]
    attention = random_attention(3, 440, tokens=tokens)
    found = explained(attention, methods=["raw", "rollout"])
    tab = visit(explanation_page(found))
    assert tab.locator(".fold").count() == 56  # the explained position stands alone
    assert tab.locator(".fold[open]").count() == 3
    assert tab.locator(TOKENS).count() < 60
    groups = [Group("", (0,)), Group("", tuple(range(1, 8)))]
    groups += [Group("", tuple(range(at, at + 8))) for at in range(8, 440, 8)]
    shares = sum_groups(found.rollout.at(0), groups)
    shares = shares[1:] / shares[1:].sum()
    read = (
        "[...document.querySelectorAll('.fold .share')].map(each => parseFloat(each.textContent))"
    )
    assert np.abs(np.array(tab.evaluate(read))[1:] / 100 - shares).max() < CLOSE
    tab.locator(".fold summary").nth(40).click()
    # a browser tells of an opened fold a moment later
    tab.locator(".fold").nth(40).locator(".token").nth(7).wait_for()
    assert tab.locator(".fold").nth(40).locator(".token").count() == 8


LONG_TEXT = "the key to the cabinets is old . the house is red . the key is here ."


def test_a_long_input_without_a_graph_has_a_page(
    visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_inputs, "ROWS_ABOVE", 10)
    model = af.Model(build("llama"), word_tokenizer())
    found = af.explain(LONG_TEXT, model=model, edges="attention", methods=["raw", "rollout"])
    assert found.graph is None
    tab = visit(explanation_page(found))
    go_to(tab, sinks="true", unit="token")
    check_column(tab, "Rollout", found.rollout.at(found.position))
    check_column(tab, "Raw", found.raw.at(found.position))
    assert "not in this page" in text_of(tab, "#paths-caption")
    go_to(tab, sinks="true", unit="sentence")
    rows = found.row("rollout", by_segment=True)
    shown = table(tab)
    assert shown["Rollout"].sum() == pytest.approx(1, abs=CLOSE)
    for group, value in zip(found.segments, rows.at(found.position), strict=True):
        if not set(group.positions) & set(find_asides(found)):
            (told,) = (at for at, key in enumerate(shown["position"]) if key == group.positions[0])
            assert shown["Rollout"][told] == pytest.approx(value, abs=CLOSE)


def test_a_story_after_a_long_prompt_has_a_page(
    visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_inputs, "ROWS_ABOVE", 10)
    monkeypatch.setattr("attnflow.analysis.generate.generation.ROWS_ABOVE", 10)
    model = af.Model(build("llama"), word_tokenizer())
    made = af.generate(model, LONG_TEXT, max_new_tokens=4, eos_token_id=None, edges="attention")
    assert made.captured is None
    tab = visit(generation_page(made))
    go_to(tab, method="rollout", sinks="true", unit="token", position=made.size)
    row = made.rollout().values[1, :, -1]
    assert np.abs(column(tab, "Rollout", made.size) - row).max() < CLOSE


# ---- the story of a generation ----------------------------------------------------------------------------


def test_a_story_compares_each_token_with_the_others(visit: Open, story: af.Generation) -> None:
    tab = visit(generation_page(story))
    assert tab.locator("h1").inner_text() == story.summary()
    assert text_of(tab, ".answer").split() == list(story.tokens)
    answer = tab.locator(".answer .token")
    painted = set()
    for name in ("contribution rollout", "rollout", "raw"):
        edges, _, method = name.rpartition(" ")
        result = story.by(method, edges=edges or "attention")
        for choice, layer in ((0, 3), (3, 3), (5, 2)):
            go_to(tab, method=name, layer=layer, sinks="true")
            answer.nth(choice).click()
            assert state(tab, "position") == str(story.size - 1 + choice)
            title = "Contribution rollout" if "contribution" in name else name.capitalize()
            row = column(tab, title, story.size)
            assert np.abs(row - result.values[choice, :, layer - 1]).max() < CLOSE
            compared = result.compared_with("others")
            place = result.layers.index(layer)
            expected = compared.expected[place, choice]
            assert np.abs(column(tab, "expected", story.size) - expected).max() < CLOSE
            painted.add(str(colours(tab, "#text .text:not(.answer) .token")))
    assert len(painted) > 6


def test_arrow_keys_step_through_the_answer_and_shift_selects_a_span(
    visit: Open, story: af.Generation
) -> None:
    tab = visit(generation_page(story))
    go_to(tab, method="rollout", sinks="true")
    tab.locator(".answer .token").first.click()
    tab.keyboard.press("ArrowRight")
    assert state(tab, "position") == str(story.size)
    assert tab.locator(".answer [aria-selected=true]").count() == 1
    for _ in range(2):
        tab.keyboard.press("Shift+ArrowRight")
    assert tab.locator(".answer [aria-selected=true]").all_inner_texts() == list(story.tokens[1:4])
    mean = story.rollout().values[1:4, :, -1].mean(axis=0)
    assert np.abs(column(tab, "Rollout", story.size) - mean).max() < CLOSE


def test_the_strip_tells_where_each_token_read(visit: Open, story: af.Generation) -> None:
    tab = visit(generation_page(story))
    go_to(tab, method="rollout", position=story.size + 2)
    told = re.search(
        r"probability (\d\.\d+); ([\d.]+) % .* prompt, ([\d.]+) %", text_of(tab, "#story-text")
    )
    assert told is not None
    assert float(told[1]) == pytest.approx(story.probabilities[3], abs=CLOSE)
    row = story.rollout().values[3, :, -1]
    kept = [at for at in range(story.size) if at not in {s.position for s in story.sinks}]
    assert float(told[2]) / 100 == pytest.approx(row[kept].sum(), abs=0.01)
    assert float(told[3]) / 100 == pytest.approx(1 - row.sum(), abs=0.01)


def test_a_generation_shows_a_method_of_the_users_own(visit: Open, story: af.Generation) -> None:
    mine = af.token_attention("mine", lambda graph: graph.weights**2)
    tab = visit(generation_page(story, story.plan(["rollout", mine])))
    go_to(tab, method="mine", sinks="true", position=story.size - 1)
    values = story.by(mine).values  # [generated, prompt, layer]
    assert np.abs(column(tab, "mine", story.size) - values[0, :, -1]).max() < CLOSE


# ---- everyone, everywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1000, 1400])
@pytest.mark.parametrize("kind", ["explanation", "generation", "long"])
def test_axe_finds_no_violation(
    visit: Open, small: af.Explanation, story: af.Generation, kind: str, width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = visit(make_page(kind, small, story), scheme=scheme, width=width)
    table(tab)
    tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for method in ("rollout", "raw"):
        tab.locator("#method").select_option(method)
        tab.locator("#text .token").first.click()
        found = Axe().run(tab)
        assert [
            (each["id"], [node["html"][:200] for node in each["nodes"]])
            for each in found.response["violations"]
        ] == []


def make_page(kind: str, small: af.Explanation, story: af.Generation) -> str:
    """The page of an explanation, of a generation, or of a long text."""
    if kind == "long":
        return explanation_page(explained(random_attention(4, 420), methods=["raw", "rollout"]))
    return explanation_page(small) if kind == "explanation" else generation_page(story)


@pytest.mark.parametrize("width", [360, 390, 1000, 1400])
@pytest.mark.parametrize("kind", ["explanation", "generation", "long"])
def test_no_page_is_wider_than_its_window_and_the_text_begins_high(
    visit: Open, small: af.Explanation, story: af.Generation, kind: str, width: int
) -> None:
    tab = visit(make_page(kind, small, story), width=width)
    assert tab.locator(TOKENS).first.bounding_box()["y"] < 420
    table(tab)
    tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    tab.wait_for_timeout(100)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_the_controls_stay_in_view(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small))
    tab.evaluate("scrollTo(0, 900)")
    assert tab.locator("#controls").bounding_box()["y"] == 0


def test_the_reader_chooses_the_colours(visit: Open, small: af.Explanation) -> None:
    tab = visit(explanation_page(small), scheme="dark")
    read = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(read)
    tab.locator("#theme").click()
    assert (state(tab, "theme"), tab.evaluate(read)) == ("light", "rgb(255, 255, 255)")
    tab.locator("#theme").click()
    assert (state(tab, "theme"), tab.evaluate(read)) == ("dark", dark)


@pytest.mark.parametrize("kind", ["explanation", "generation"])
def test_hostile_tokens_are_text_and_run_nothing(
    visit: Open, small: af.Explanation, story: af.Generation, kind: str
) -> None:
    tokens = tuple(HOSTILE)
    if kind == "explanation":
        tokens = tokens[: len(small.tokens)]
        html = explanation_page(
            replace(
                small,
                tokens=tokens,
                text=IMAGE,
                model=IMAGE,
                prediction=Prediction(IMAGE, 0.5, Target(0, IMAGE, 0.5)),
            )
        )
    else:
        tokens = tokens[-story.size :]
        html = generation_page(
            replace(story, prompt=tokens, tokens=tokens[: len(story.tokens)], text=IMAGE)
        )
    for width in (1100, 360):
        tab = visit(html, width=width)
        table(tab)
        tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        read = "[...document.querySelectorAll('#text .text')[0].querySelectorAll('.token')].map(e => [e.textContent, e.title])"
        assert tab.evaluate(read) == [[HOSTILE[token], token] for token in tokens]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for method in ("raw", "flow", "rollout"):
            tab.locator("#method").select_option(method)
            tab.locator(TOKENS).nth(1).click()
        assert tab.evaluate("document.querySelectorAll('img, b, iframe').length") == 0


def test_the_frame_of_a_notebook_is_as_high_as_its_page(visit: Open, small: af.Explanation) -> None:
    tab = visit(f"<!doctype html><title>notebook</title>{framed(explanation_page(small))}")
    inside = tab.frame_locator("iframe")
    inside.locator("body[data-ready]").wait_for()
    inside.locator("#method").select_option("rollout")
    assert inside.locator("body").get_attribute("data-method") == "rollout"
    tab.wait_for_timeout(200)
    frame: Page = tab
    height = frame.locator("iframe").bounding_box()["height"]
    content = inside.locator("html").evaluate("each => each.getBoundingClientRect().height")
    assert height == pytest.approx(content, abs=2)
    assert height > 1000
