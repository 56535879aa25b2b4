"""Bars and coloured text: numbers, colours, words joined, LaTeX that prints and does nothing else."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import attnflow as af
from attnflow import figures
from attnflow.core.evenness import find_even_spread
from attnflow.core.io.formatting import LATEX
from attnflow.core.text import show_token
from attnflow.show import colours
from attnflow.show.figures import layout
from attnflow.show.figures.bars import BAR_GREY
from attnflow.show.figures.text import choose_colour, choose_ink
from tests.explained import with_results
from tests.show.drawings import HOSTILE, light, read_texts

FOUND = af.explain("the authors that the old man likes")
SCORES = {"mine": (("a", "##b", "c", "d"), [0.1, -0.4, 0.2, 0.0])}
COMMANDS = {"colorbox", "textcolor", "strut", "underline", "textbf", "footnotesize", "par"}
COMMANDS |= {"medskip", "setlength", "fboxsep", "raggedright", "textbackslash", "textasciicircum"}
COMMANDS |= {"textasciitilde", "textless", "textgreater", "textbar", "textvisiblespace"}
COMMANDS |= {"emptyset", "pm", "dots"}


def lengths(bars: Any) -> list[float]:
    return [bar.get_width() for bar in bars]


# ---- bars ---------------------------------------------------------------------------------------


def test_bars_are_the_scores_of_every_method_and_importance() -> None:
    drawn = figures.bars(FOUND)
    assert list(drawn.artists) == [*FOUND.results, *FOUND.importance]
    for name, (_, values) in FOUND.scores().items():
        np.testing.assert_allclose(lengths(drawn.artists[name]), values)
        row = FOUND.row(name) if name in FOUND.results else None
        is_even = row is not None and find_even_spread(row.compared_with("even")) is not None
        for bar, value in zip(drawn.artists[name], values, strict=True):
            ramp: tuple[str, ...] = colours.AGAINST if value < 0 else colours.RAMP
            if is_even:
                ramp = (to_hex(BAR_GREY),)
            assert to_hex(bar.get_facecolor()) in ramp
    ax = drawn.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(FOUND.tokens)
    assert ax.yaxis_inverted()  # the first word on top
    assert [ax.get_title() for ax in drawn.axes[-2:]] == ["blank-out", "input gradient"]
    assert drawn.axes[-2].get_xlabel() == "for plural"
    assert (FOUND.importance["blank_out"].values < 0).any()


def test_bars_of_some_words_in_another_order_of_names() -> None:
    drawn = figures.bars(FOUND, names=["blank_out", "rollout"], strongest=3, exclude="special")
    assert list(drawn.artists) == ["blank_out", "rollout"]
    values = np.abs(FOUND.importance["blank_out"].values[1:])
    kept = 1 + np.sort(np.argsort(-values, kind="stable")[:3])
    expected = FOUND.importance["blank_out"].values[kept]
    np.testing.assert_allclose(lengths(drawn.artists["blank_out"]), expected)
    np.testing.assert_allclose(lengths(drawn.artists["rollout"]), FOUND.rollout.at(0)[kept])
    share = 100 * FOUND.rollout.at(0)[0]
    title = drawn.axes[1].get_title().replace("\u00a0", " ")
    assert f"[CLS] {share:.0f} % left out" in " ".join(title.split())
    assert "strongest 3 of 8" in title


@pytest.mark.parametrize("reference", ["even", "others"])
def test_bars_of_differences_leave_importance_as_it_is(reference: str) -> None:
    names = ["rollout", "blank_out"]
    drawn = figures.bars(FOUND, names=names, compared_with=reference, exclude=[0], layer=2)
    compared = FOUND.rollout.compared_with(reference, exclude=[0]).select(0, 2)
    np.testing.assert_allclose(lengths(drawn.artists["rollout"]), compared.difference[0, 0, 1:])
    assert sum(lengths(drawn.artists["rollout"])) == pytest.approx(0)
    blanked = FOUND.importance["blank_out"].values[1:]
    np.testing.assert_allclose(lengths(drawn.artists["blank_out"]), blanked)


def test_bars_of_words_and_of_scores_that_a_user_has() -> None:
    given = af.Attention(
        [[[0.4, 0.3, 0.2, 0.1]] * 4] * 2,
        tokens=["[CLS]", "un", "##do", "it"],
        words=[None, 0, 0, 1],
    )
    words = figures.bars(af.explain(given), names=["rollout"], by_word=True)
    shown = [label.get_text() for label in words.axes[0].get_yticklabels()]
    assert shown == ["[CLS]", "undo", "it"]
    rolled = af.rollout(given).by_word().at(0)
    np.testing.assert_allclose(lengths(words.artists["rollout"]), rolled)
    ax = Figure().subplots()
    own = figures.bars(SCORES, axes=ax)
    assert own.axes == (ax,)
    assert lengths(own.artists["mine"]) == [0.1, -0.4, 0.2, 0.0]
    low, high = ax.get_xlim()
    assert low < -0.4 < 0.2 < high


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("size", [1, 8, 60])
def test_bars_and_their_numbers_have_room(count: int, size: int) -> None:
    rng = np.random.default_rng(count)
    tokens = tuple(f"{place:W>9}" for place in range(size))
    scores = {f"method {n}": (tokens, rng.normal(size=size)) for n in range(count)}
    drawn = figures.bars(scores)
    drawn.figure.draw_without_rendering()
    whole = drawn.figure.bbox.padded(1)
    for ax in drawn.axes:
        inside = ax.get_window_extent()
        boxes = [text.get_window_extent() for text in (*ax.texts, ax.title, *ax.get_yticklabels())]
        assert all(whole.contains(*box.min) and whole.contains(*box.max) for box in boxes)
        for text in ax.texts:  # a number does not reach the words beside it
            assert text.get_window_extent().x0 > inside.x0 - 2
            assert text.get_window_extent().x1 < inside.x1 + 2
        heights = [label.get_window_extent().y0 for label in ax.get_yticklabels()]
        assert all(abs(one - other) > 8 for one, other in pairwise(heights))


# ---- text ---------------------------------------------------------------------------------------


def test_boxes_have_the_colours_of_the_scores() -> None:
    drawn = figures.text(FOUND, exclude="special")
    for name, (_, values) in FOUND.scores().items():
        words = values[1:]
        shares = words / np.abs(words).max()
        boxes = drawn.artists[name].get_facecolors()
        assert [to_hex(box) for box in boxes] == [choose_colour(share) for share in shares]
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts[: len(FOUND.tokens)] == list(FOUND.tokens)
    scaled = FOUND.rollout.compared_with("even", exclude=[0]).scaled[-1, 0, 1:]
    compared = figures.text(FOUND, names=["rollout"], exclude=[0], compared_with="even")
    boxes = compared.artists["rollout"].get_facecolors()
    assert [to_hex(box) for box in boxes] == [choose_colour(share) for share in scaled]
    assert "1: 8 times what was expected; underlined: below 0" in compared.to_latex()
    both = figures.text(FOUND, names=["rollout", "blank_out"], compared_with="even").to_latex()
    assert "1: 8 times what was expected, or the darkest importance" in both


def test_colours_run_along_the_ramps_and_text_reads_on_them() -> None:
    for share, colour in ((0, colours.RAMP[0]), (1, colours.RAMP[-1]), (-1, colours.AGAINST[-1])):
        assert choose_colour(share) == colour
    for share in np.linspace(-1, 1, 101):
        ground, ink = light(choose_colour(share)) + 0.05, light(choose_ink(choose_colour(share)))
        assert max(ground, ink + 0.05) / min(ground, ink + 0.05) >= 4.5


def test_words_are_joined_and_lines_end_between_them() -> None:
    tokens = tuple(["un", "##believ", "##able", "stories", "of", "cabinet", "##s", "."] * 12)
    given = {"mine": (tokens, np.arange(len(tokens)) / len(tokens))}
    drawn = figures.text(given, width=4.0)
    drawn.figure.draw_without_rendering()
    (ax,) = drawn.axes
    boxes = [box.get_extents() for box in drawn.artists["mine"].get_paths()]  # inches
    for (token, box), (_, before) in zip(
        list(zip(tokens, boxes, strict=True))[1:], zip(tokens, boxes, strict=False), strict=False
    ):
        same_line = abs(box.y0 - before.y0) < 1e-6
        if token.startswith("##"):
            assert same_line
            assert box.x0 == pytest.approx(before.x1)
        elif same_line:
            assert box.x0 > before.x1 + 0.02
    assert max(box.x1 for box in boxes) <= 4.0
    assert len({round(box.y0, 4) for box in boxes}) > 3
    whole = drawn.figure.bbox.padded(1)
    extents = [text.get_window_extent() for text in ax.texts if text.get_text()]
    assert all(whole.contains(*one.min) and whole.contains(*one.max) for one in extents)
    bottom = drawn.figure.axes[-1].get_tightbbox()
    assert bottom is not None
    assert min(one.y0 for one in extents) > bottom.y1  # the legend is below all lines


def test_what_speaks_against_is_underlined() -> None:
    drawn = figures.text(SCORES)
    (line,) = drawn.axes[0].lines
    left, right = np.asarray(line.get_xdata(), float)
    box = drawn.artists["mine"].get_paths()[1].get_extents()
    assert box.x0 <= left < right <= box.x1
    assert drawn.to_latex().count(r"\underline") == 1


def test_a_row_that_says_nothing_stays_grey_and_says_so(tmp_path: Path) -> None:
    even = af.Attention(np.full((3, 12, 12), 1 / 12), tokens=[f"t{n}" for n in range(12)])
    drawn = figures.text(af.explain(even, methods=["rollout"]), exclude=[0])
    assert len(drawn.artists["rollout"].get_paths()) == 0
    said = read_texts(drawn.save(tmp_path / "even.svg"))
    assert "hardly differs between tokens" in said
    assert "colorbox" not in drawn.to_latex()


def test_long_tokens_stay_in_the_figure() -> None:
    drawn = figures.text({"mine": (("W" * 300, "short", "m" * 300), [1.0, 0.5, 0.2])}, width=2.0)
    drawn.figure.draw_without_rendering()
    whole = drawn.figure.bbox.padded(1)
    boxes = [text.get_window_extent() for text in drawn.axes[0].texts if text.get_text()]
    assert all(whole.contains(*box.min) and whole.contains(*box.max) for box in boxes)


def test_long_headings_stand_in_lines_of_their_own() -> None:
    drawn = figures.text({"very long name " * 9: SCORES["mine"]}, width=2.5, exclude=[0, 1])
    drawn.figure.draw_without_rendering()
    whole = drawn.figure.bbox.padded(1)
    boxes = [text.get_window_extent() for text in drawn.axes[0].texts if text.get_text()]
    assert all(whole.contains(*box.min) and whole.contains(*box.max) for box in boxes)
    for place, one in enumerate(boxes):
        for other in boxes[place + 1 :]:
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            down = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(across, down) <= 3


# ---- LaTeX --------------------------------------------------------------------------------------


def unescape(latex: str) -> str:
    """What LaTeX prints of an escaped text."""
    for character, escaped in sorted(LATEX.items(), key=lambda pair: -len(str(pair[1]))):
        if len(str(escaped)) > 2:
            latex = latex.replace(str(escaped), f"\x01{character}\x02")
    latex = re.sub(r"\\([{}$&#_%])", lambda match: f"\x01{ord(match[1])}\x02", latex)
    latex = latex.replace("{}", "")
    return re.sub(r"\x01(\d+)\x02", lambda match: chr(int(match[1])), latex)


def read_group(latex: str) -> str:
    """What stands before the brace that closes the group; inside of an underline."""
    latex = latex.removeprefix(r"\underline{")
    depth = 0
    for match in re.finditer(r"\\.|[{}]", latex):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return latex[: match.start()]
    raise AssertionError(latex)


def test_hostile_tokens_are_printed_and_do_nothing(tmp_path: Path) -> None:
    tokens = (*HOSTILE, r"\input{/etc/passwd}", "%", "}{", "\\end{document}", "~^", "--", "#1")
    rng = np.random.default_rng(0)
    drawn = figures.text({"$x$ & <b>_%": (tokens, rng.normal(size=len(tokens)))}, exclude=[1])
    latex = drawn.save(tmp_path / "text.tex").read_text(encoding="utf-8")
    assert latex == drawn.to_latex().encode(errors="backslashreplace").decode()
    body = "\n".join(line for line in latex.splitlines() if not line.startswith("%"))
    assert set(re.findall(r"\\([a-zA-Z]+)", body)) <= COMMANDS
    depth = 0
    for sign in re.findall(r"\\.|[{}]", body):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    assert not re.search(r"(?<!\\)[&#]", body)
    assert not re.search(r"(?<!\\)%(?!$)", body, re.MULTILINE)  # a comment ends its line at once
    lines = [line for line in body.splitlines() if "strut " in line]
    for token, line in zip(tokens, lines, strict=True):
        shown = show_token(token)
        shown = shown if len(shown) <= 60 else f"{shown[:59]}…"
        assert unescape(read_group(line.split("strut ", 1)[1])) == shown
    for ending in ("png", "pdf", "svg"):
        drawn.save(tmp_path / f"text.{ending}")
    bars = figures.bars({"$x$ & <b>_%": (tokens, rng.normal(size=len(tokens)))})
    for path in (tmp_path / "text.svg", bars.save(tmp_path / "bars.svg")):
        assert set(layout.label_tokens(tokens[:3])) - {""} <= {
            text[:15] + "…" if len(text) > 16 else text for text in read_texts(path).split("\n")
        }
        assert "<img" not in path.read_text()


def test_only_text_has_source_for_latex(tmp_path: Path) -> None:
    drawn = figures.bars(SCORES)
    with pytest.raises(af.OptionError, match=r"no source for LaTeX, which figures.text gives"):
        drawn.to_latex()
    with pytest.raises(af.FileError, match=r"must be one of .png, .svg, .pdf; got .tex"):
        drawn.save(tmp_path / "bars.tex")
    source = figures.text(FOUND, names=["rollout"]).to_latex()
    assert f"% source: {FOUND.source}" in source


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [figures.bars, figures.text])
@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (None, {}, r"scores must be what explain gives, or \{name: \(tokens, values\)\}.*NoneType"),
        ({}, {}, "got dict"),
        ({"a": [1.0]}, {}, r"scores must be \(tokens, values\)"),
        ({"a": (["x"], ["y"])}, {}, r"scores must be \(tokens, values\)"),
        ({"a": (["x"], [1.0, 2.0])}, {}, r"a has 1 tokens and values of shape \(2,\)"),
        ({"a": (["x"], [np.nan])}, {}, "one finite number per token"),
        ({"a": ([], [])}, {}, "a has 0 tokens"),
        ({"a": (["x"], [1]), "b": (["y"], [1])}, {}, "must have the same tokens"),
        (SCORES, {"layer": 1}, "layer requires an explanation, not scores alone"),
        (SCORES, {"compared_with": "even"}, "compared_with requires an explanation"),
        (SCORES, {"exclude": "sinks"}, "a result alone does not know which tokens are sinks"),
        (FOUND, {"names": ["rolout"]}, "unknown score 'rolout'; choose from relevance flow, raw"),
        (FOUND, {"names": []}, "names must be at least one; got none"),
        (FOUND, {"layer": 9}, "layer must be one of .*; got 9"),
        (FOUND, {"compared_with": "odd"}, "unknown compared_with 'odd'"),
        (
            with_results(FOUND, {}, importance={}),
            {},
            "an explanation must hold a method or an importance",
        ),
        (SCORES, {"axes": "axes"}, "one matplotlib Axes per panel; got 1: str"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_line(
    draw: Any, given: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        draw(given, **options)
    assert "\n" not in str(error.value)


def test_options_of_one_figure_only() -> None:
    with pytest.raises(af.OptionError, match="strongest must be a whole number, at least 1"):
        figures.bars(SCORES, strongest=0)
    with pytest.raises(af.OptionError, match="comparisons are per token, not per word"):
        figures.bars(FOUND, by_word=True, compared_with="even")
    with pytest.raises(af.OptionError, match=r"width must be from 1.5 to 21.0 inches; got 0"):
        figures.text(SCORES, width=0)
