"""The terminal: the sentence first, words that are never broken, one ramp for dark and light grounds and one without colours."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

import attnflow as af
from attnflow.analysis.explain.summary import format_percent
from attnflow.cli import commands as cli
from attnflow.core.text import show_token
from attnflow.show.terminal.answers import print_explanation, print_story
from attnflow.show.terminal.strips import (
    AGAINST_16,
    AGAINST_STYLES,
    FOR_16,
    FOR_STYLES,
    find_doublings,
    find_steps,
    join_words,
    lay_out,
    shade,
)
from attnflow.show.terminal.tables import cut_columns, print_markdown
from tests.oracles import attention

STYLE = re.compile(r"\x1b\[[\d;]*m")
TEXT = "the author that the editors of the old magazines in the library like"


def console(width: int = 80, **options: Any) -> Console:
    """A console whose output is kept: without colours, unless asked for."""
    return Console(file=io.StringIO(), width=width, **{"color_system": None, **options})


def read(made: Console) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()


def luminance(colour: Color) -> float:
    """Relative luminance, as WCAG defines it."""
    assert colour.triplet is not None
    parts = [part / 255 for part in colour.triplet]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


@pytest.mark.parametrize("ramp", [FOR_STYLES, AGAINST_STYLES])
def test_the_ramp_reads_on_dark_and_light_grounds(ramp: tuple[str, ...]) -> None:
    """Every step stands out from white, black and a dark theme; ink reads on its ground; more is more colourful."""
    chroma = []
    for name in ramp[1:]:
        style = Style.parse(name)
        shown = style.bgcolor or style.color
        assert shown is not None
        assert shown.triplet is not None
        for ground in (0.0, luminance(Color.parse("#1e1e1e")), 1.0):
            assert contrast(luminance(shown), ground) >= 3
        if style.bgcolor is not None and style.color is not None:
            assert contrast(luminance(style.bgcolor), luminance(style.color)) >= 4.5
            chroma.append(max(shown.triplet) - min(shown.triplet))
    assert chroma == sorted(chroma)
    assert chroma[-1] > 2 * chroma[0]


def test_marks_stand_for_colours_where_there_are_none() -> None:
    plain, colours = console(), console(color_system="truecolor", force_terminal=True)
    assert [shade(plain, "key", step).plain for step in (-3, 0, 1, 2, 3)] == [
        *("-key█", "key", "key░", "key▒", "key█")
    ]
    assert [shade(plain, "key", step, compared=True).plain for step in (-2, 0, 3)] == [
        *("key--", "key", "key+++")
    ]
    unwanted = console(color_system="truecolor", force_terminal=True, no_color=True)
    assert shade(unwanted, "key", 3).plain == "key█"
    few = console(color_system="standard", force_terminal=True)
    for made, above, below in ((colours, FOR_STYLES, AGAINST_STYLES), (few, FOR_16, AGAINST_16)):
        assert shade(made, "key", 3).plain == shade(made, "key", -3, compared=True).plain == "key"
        assert str(shade(made, "key", 3).style) == above[3]
        assert str(shade(made, "key", -2).style) == below[2]

    class Ascii(io.StringIO):
        encoding = "ascii"

    assert shade(Console(file=Ascii(), color_system=None), "key", 3).plain == "key#"


@given(
    st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12)),
    st.integers(20, 90),
    st.integers(0, 15),
)
def test_no_word_is_broken_and_continuations_are_indented(
    words: list[str], width: int, indent: int
) -> None:
    lines = [line.plain for line in lay_out(Text("raw"), map(Text, words), width, indent)]
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.startswith(" " * indent) for line in lines[1:])
    room = width - max(indent, 3)
    if all(cell_len(word) <= room for word in words):
        first = lines[0].removeprefix("raw")
        assert " ".join([first, *lines[1:]]).split() == " ".join(words).split()


def test_a_word_wider_than_a_line_is_cut() -> None:
    (line,) = lay_out(Text("raw"), [Text("x" * 200)], 40, 5)
    assert line.plain == f"raw  {'x' * 34}…"


def test_tokens_of_a_word_are_joined_and_shown_without_marks() -> None:
    made = console()
    tokens, steps = ["ĠLy", "on", "Ġis", ".", "Ċ"], [0, 3, 0, 0, 1]
    assert [word.plain for word in join_words(made, tokens, steps)] == ["Lyon█", "is.", "\\n░"]
    words = [0, 1, 1, None, None]
    assert [word.plain for word in join_words(made, tokens, steps, words)] == [
        *("Ly", "on█is", ".", "\\n░")
    ]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_steps_are_quarters_of_the_largest_with_their_sign(values: list[float]) -> None:
    given_values = np.array(values)
    largest = np.abs(given_values).max()
    for value, step in zip(values, find_steps(given_values), strict=True):
        if largest == 0:
            assert step == 0
            continue
        assert step * value >= 0
        assert abs(step) == min(3, int(4 * (abs(value) / largest)))
    for value, step in zip(values, find_doublings(given_values), strict=True):
        assert abs(3 * value - step) <= 0.5


# ---- an explanation -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explained() -> af.Explanation:
    return af.explain(TEXT)


def test_the_sentence_comes_first_and_all_fits_80_columns(explained: af.Explanation) -> None:
    made = console()
    print_explanation(made, explained)
    lines = read(made).splitlines()
    assert all(cell_len(line) <= 80 for line in lines)
    sentence = explained.summary()
    assert " ".join(lines).startswith(sentence)
    begins = lines.index("layer 6 of 6, position 0, [CLS], read:")
    assert "shaded: 25 %░ 50 %▒ 75 %█ of the largest; against it: -75 %█" in lines
    assert lines[-1].startswith("not shaded: [CLS]")
    for name in ("relevance flow", "raw", "rollout", "flow", "blank out", "input gradient"):
        start = next(
            at for at, line in enumerate(lines) if line.startswith(f"{name} ") and at > begins
        )
        assert lines[start + 1].startswith(" " * 16), "it takes two lines, the second is indented"
        strip = re.sub(r"[░▒█]| -", lambda found: found[0].strip(" -░▒█") or "", lines[start])
        assert strip[16:].split()[:3] == ["[CLS]", "the", "author"]


def test_shading_is_of_the_words_that_are_not_left_out(explained: af.Explanation) -> None:
    cases: tuple[tuple[Any, set[int]], ...] = (
        (("sinks", "special", "explained"), {0}),
        ("special", {0}),
        ("explained", {0}),
        ("none", set()),
        ([], set()),
        (["special", 3], {0, 3}),
    )
    for exclude, unshaded in cases:
        made = console(400)
        print_explanation(made, explained, exclude=exclude)
        line = next(line for line in read(made).splitlines() if line.startswith("raw "))
        shown, strongest = line[16:].split(" | ")
        row = explained.raw.at(0).copy()
        row[list(unshaded)] = 0
        steps = find_steps(row)
        expected = [
            f"{show_token(token)}{'░▒█'[step - 1] if step else ''}"
            for token, step in zip(explained.tokens, steps, strict=True)
        ]
        assert shown.split() == expected
        best = int(row.argmax())
        assert strongest == f"{explained.tokens[best]} {row[best]:.3f}"


@pytest.mark.parametrize("reference", ["even", "others"])
def test_what_is_compared_is_shaded_by_doublings(explained: af.Explanation, reference: str) -> None:
    made = console(400)
    print_explanation(made, explained, reference=reference, layer=4)
    lines = read(made).splitlines()
    line = next(line for line in lines if line.startswith("rollout "))
    compared = explained.rollout.compared_with(reference, exclude=[0]).select(0, 4)
    steps = np.rint(3 * compared.scaled[0, 0]).astype(int)
    expected = [
        f"{token}{('+' if step > 0 else '-') * abs(step)}"
        for token, step in zip(explained.tokens, steps, strict=True)
    ]
    assert line[16:].split(" | ")[0].split() == expected
    key, token, _ = compared.top(1)[0]
    assert line.endswith(f"| {token} ×{compared.ratio[0, 0, key]:.1f}")
    told = {"even": "what even attention gives", "others": "what the others give"}[reference]
    assert f"shaded: ×1/8--- ×1/4-- ×1/2- ×2+ ×4++ ×8+++ {told}" in lines


def test_sinks_are_named_with_their_share() -> None:
    weights = np.full((4, 12, 12), 0.05)
    weights[..., 0] = 0.45
    found = af.explain(af.Attention(weights, tokens=["<s>", *map(str, range(11))]), position=5)
    made = console()
    print_explanation(made, found)
    assert read(made).splitlines()[-1] == (
        "not shaded: <s> (45 % of all attention), 4; --exclude none shades all"
    )


def test_a_method_without_other_positions_says_so() -> None:
    """Beyond 64 tokens, flow is computed for the explained one alone."""
    weights = attention("peaky", 2, 70, np.random.default_rng(0))
    found = af.explain(af.Attention(weights), methods=["raw", "flow"])
    made = console()
    print_explanation(made, found, reference="others")
    assert "flow  no other position was computed: compare with even" in read(made)


@pytest.mark.parametrize("reference", ["even", "others"])
def test_one_token_is_compared_with_nothing_and_it_says_why(reference: str) -> None:
    made = console()
    print_explanation(made, af.explain("key"), reference=reference)
    lines = [line for line in read(made).splitlines() if "fewer than two tokens count" in line]
    assert len(lines) == 4  # of each result
    assert all(line.endswith("--exclude none counts all") for line in lines)
    made = console()
    print_explanation(made, af.explain("key"), reference=reference, exclude="none")
    assert "fewer" not in read(made)


# ---- a generation -------------------------------------------------------------------------------


def tell_story(**options: Any) -> tuple[af.Generation, af.PromptAttention, list[str]]:
    from tests.families import build, word_tokenizer

    model = af.Model(build("llama"), word_tokenizer())
    prompt = "the lost key to cabinets is here"
    story = af.generate(model, prompt, max_new_tokens=6, eos_token_id=None)
    result = story.by("rollout", edges="contribution", normalize="sum")
    made = console(100)
    settings: dict[str, Any] = {"layer": 3, "reference": "others", "keep_common": True, **options}
    print_story(made, story, result, **settings)
    return story, result, read(made).splitlines()


def test_a_story_names_what_stands_out_against_the_others() -> None:
    story, result, lines = tell_story()
    assert " ".join(lines).startswith(story.summary())
    start = lines.index("contribution rollout, layer 3 of 3, against the others:")
    special = [at for at, token in enumerate(story.prompt) if token in story.special]
    assert special
    left_out = {*special, *(sink.position for sink in story.sinks)}
    compared = result.compared_with("others", exclude=[at for at in left_out if at < story.size])
    for row, line in enumerate(lines[start + 1 : start + 7]):
        token, probability = story.tokens[row], story.probabilities[row]
        assert line.split()[:2] == [show_token(token), f"{probability:.2f}"]
        one = compared.select(row)
        for word, share, times in re.findall(r"(\w+) ([\d.]+) % ×([\d.]+)", line):
            at = story.prompt.index(word)
            assert float(share) == pytest.approx(100 * one.shares[0, 0, at], abs=0.51)
            assert float(times) == pytest.approx(one.ratio[0, 0, at], abs=0.051)
            assert float(times) >= 1.4
        best, _, _ = one.top(1)[0]
        stands = one.ratio[0, 0, best] > 2**0.5
        assert (story.prompt[best] in line) == stands
        assert ("nothing stands out" in line) == (not stands)
    assert lines[-1].startswith("left out: ")


@pytest.mark.parametrize(
    ("options", "layer", "exclude"),
    [
        ({"method": "raw"}, 1, "none"),
        ({"method": "rollout", "residual": 0.1}, 2, "none"),
        ({"method": "rollout", "without": [1]}, 3, "special"),
        ({"method": "flow", "normalize": "receptive_field"}, 3, [2]),
    ],
)
def test_the_sentence_of_a_story_is_of_what_is_shown(
    options: dict[str, Any], layer: int, exclude: Any
) -> None:
    from tests.families import perturb, word_tokenizer

    model = af.Model(perturb("llama"), word_tokenizer())
    story = af.generate(
        model, "the lost key to cabinets is here", max_new_tokens=4, eos_token_id=None
    )
    result = story.by(**{"normalize": "sum", "edges": "attention", **options})
    made = console(200)
    print_story(made, story, result, layer=layer, reference="others", exclude=exclude)
    sentence = read(made).splitlines()[0]
    shares = result.values[:, :, layer - 1].copy()  # [generated, token]
    marked = [at for at, token in enumerate(story.prompt) if token in story.special]
    gone = {"none": [], "special": marked}.get(str(exclude), exclude)
    shares[:, gone] = 0
    mean = (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)
    best = int(mean.argmax())
    share = f"({format_percent(float(mean[best]))})"
    assert re.search(rf"read mostly \W*{re.escape(story.prompt[best].strip('[]'))}\W* ", sentence)
    assert share in sentence
    assert ("special tokens aside" in sentence) == (exclude == "special")
    assert "sinks" not in sentence


def test_common_words_that_are_not_named_are_told() -> None:
    _, _, lines = tell_story(keep_common=False)
    assert lines[-1] == "common, not named: the, to, is, here; --keep-common names all"
    _, _, lines = tell_story(keep_common=True)
    assert not any("--keep-common" in line for line in lines)


def test_a_story_without_comparison_shows_the_prompt_for_each_token() -> None:
    story, _, lines = tell_story(reference=None, exclude=[0])
    start = lines.index("contribution rollout, layer 3 of 3, by token:")
    for line in lines[start + 1 : start + 7]:
        assert re.sub("[░▒█]", "", line).split()[2:] == list(story.prompt)
        assert "█" in line
        assert f"{story.prompt[0]} " in line  # not shaded
    _, _, filtered = tell_story(reference=None, keep_common=False)
    assert any("key█" in line or "cabinets█" in line or "lost█" in line for line in filtered)
    assert not any(re.search(r"\b(the|to|is)[░▒█]", line) for line in filtered[:-2])


# ---- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 80])
def test_tables_that_are_too_wide_are_cut_between_columns(width: int) -> None:
    header = ["method", *(f"column {at}" for at in range(12))]
    rows = [[f"m{row}", *(f"{row + at / 100:.2f}" for at in range(12))] for row in range(3)]
    made = console(width)
    tables = cut_columns(header, rows, width)
    for table in tables:
        made.print(table)
    shown = read(made)
    assert all(cell_len(line) <= width for line in shown.splitlines())
    for row in rows:
        for cell in row:
            assert cell in shown
    for name in header:
        assert name in shown  # in one piece
    assert len(tables) == (2 if width == 80 else 12)


def test_every_part_of_a_table_names_its_rows() -> None:
    header = ["method", "layer", *(f"a wide column {at}" for at in range(6))]
    rows = [[name, layer, *["0.123"] * 6] for name in ("raw", "flow") for layer in "12"]
    tables = cut_columns(header, rows, 80)
    assert len(tables) == 2
    for table in tables:
        assert [str(column.header) for column in table.columns[:2]] == ["method", "layer"]
    assert sum(len(table.columns) - 2 for table in tables) == 6


def test_markdown_is_a_table_on_a_terminal_and_markdown_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "| word | count |\n| --- | --- |\n| key | 12 |"
    print_markdown(table)
    assert capsys.readouterr().out == f"{table}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    print_markdown(table)
    shown = STYLE.sub("", capsys.readouterr().out)
    assert "|" not in shown
    assert re.search(r"key +12", shown)


def test_the_top_words_of_a_corpus_are_a_table_or_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "texts.csv").write_text("text\n" + "the keys to the old house\n" * 3)
    af.explain_corpus([tmp_path / "texts.csv"], tmp_path / "out", methods=["raw"])
    command = ["attnflow", "corpus", "top", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*command, "--method", "raw", "--min-count", "1"])

    def show() -> list[str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return STYLE.sub("", capsys.readouterr().out).splitlines()

    assert show()[:2] == ["| word | mean raw | count |", "| --- | --- | --- |"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    drawn = show()
    assert not any("|" in line for line in drawn)
    assert any(re.fullmatch(r"\s*keys +0\.\d{4} +3\s*", line) for line in drawn)


# ---- as a user runs it --------------------------------------------------------------------------


def run(*arguments: str, **environment: str) -> str:
    """What a command prints, in a process of its own, at 80 columns."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    ended = subprocess.run(
        [sys.executable, "-m", "attnflow", *arguments],
        capture_output=True,
        text=True,
        env={**kept, "COLUMNS": "80", **environment},
        check=True,
    )
    return ended.stdout


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}, True),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False),
        ({"PYTHONIOENCODING": "ascii"}, False),
    ],
)
def test_every_terminal_gets_the_same_text(environment: dict[str, str], coloured: bool) -> None:
    shown = run("explain", "the keys to the old cabinet", "--methods", "rollout", **environment)
    assert ("38;2" in shown) == coloured
    plain = STYLE.sub("", shown)
    assert plain.startswith("plural 0.")
    assert all(len(line) <= 80 for line in plain.splitlines())
    strip = next(line for line in plain.splitlines() if line.startswith("rollout "))
    mark = "" if coloured else "#" if "PYTHONIOENCODING" in environment else "█"
    assert f"keys{mark} " in strip


def test_a_table_of_an_array_shows_tokens_as_words(tmp_path: Path) -> None:
    tokens = ["The", "Ġcity", "Ġof", "ĠLyon"]
    af.Attention(np.full((2, 4, 4), 0.25), tokens=tokens).save(tmp_path / "lyon.npz")
    shown = run("rollout", str(tmp_path / "lyon.npz"))
    assert "Lyon" in shown
    assert "Ġ" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
