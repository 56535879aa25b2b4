"""The text of tokens: marks go, what cannot be seen is escaped, whatever the token is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnflow.core.text import JOINERS, is_common, join_subwords, show_token, split_shown

SHOWN = {
    "Ġkey": "key",
    "▁key": "key",
    "##able": "able",
    "key</w>": "key",
    "unbeliev@@": "unbeliev",
    "##": "##",  # headings in Markdown, and no rest of a word
    "###": "###",
    "@@": "@@",
    "</w>": "</w>",
    "[CLS]": "[CLS]",
    "</s>": "</s>",
    "ĠNewĠYork": "New York",
    "ĊĊ": "\\n\\n",
    "ĠĠ": "␣",
    " ": "␣",
    "": "∅",
    "two\nlines": "two\\nlines",
    "\u200b": "\\u200b",
    "\u202eevil": "\\u202eevil",
    "\ud800": "\\ud800",
    "\xa0": "\\xa0",
    "\0": "\\x00",
    "👩\u200d👧": "👩\u200d👧",  # one emoji of two, not two
    "\u200d": "\\u200d",
    "a\u200d": "a\\u200d",
    "\u200da": "\\u200da",
    "שלום": "שלום",
}


@pytest.mark.parametrize("token", SHOWN)
def test_a_token_is_shown_as_a_person_reads_it(token: str) -> None:
    assert show_token(token) == SHOWN[token]


@given(st.text())
def test_whatever_a_token_is_something_of_it_can_be_seen(token: str) -> None:
    shown = show_token(token)
    assert shown.strip()
    assert all(character.isprintable() or character in JOINERS for character in shown)
    assert "".join(split_shown(token)) == shown


@given(st.lists(st.text(), min_size=1))
def test_a_word_has_a_name_unless_its_tokens_have_none(tokens: list[str]) -> None:
    assert bool(join_subwords(tokens)) == any(tokens)


@pytest.mark.parametrize("token", ["the", "ĠThe", "▁THE", "##the", "the</w>", ",", "Ġ...", "Ċ", ""])
def test_a_common_token_is_one_whatever_its_marks(token: str) -> None:
    assert is_common(token)


@pytest.mark.parametrize("token", ["key", "ĠKey", "##key", "key,", "[CLS]", "</s>"])
def test_a_token_that_says_something_is_not_common(token: str) -> None:
    assert not is_common(token)


def test_what_is_common_can_be_chosen() -> None:
    assert is_common("Ġkey", ["key"])
    assert not is_common("Ġthe", ["key"])
    assert not is_common(",", punctuation=False)
