"""The text of tokens: marks go, what cannot be seen is escaped, whatever the token is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnflow.core.text import (
    JOINERS,
    LETTERS,
    is_common,
    join_subwords,
    read_bytes,
    show_token,
    show_tokens,
    split_shown,
)

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
    "cabinets/NNS": "cabinets",  # the class of a word that the bundled model does not know
    "🔑/NN": "🔑",
    "and/or": "and/or",
    "/NN": "/NN",
    "Ġ/CD": "/CD",
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


@pytest.mark.parametrize("text", ["“item”", "café", "naïve €", "キー", "🔑", "key", "stół"])
def test_bytes_written_as_letters_are_read_as_their_characters(text: str) -> None:
    written = {byte: letter for letter, byte in LETTERS.items()}
    token = "".join(written[byte] for byte in text.encode())
    assert read_bytes(token) == text
    assert join_subwords(["Ġ" + token[:1], token[1:]]) == text  # whatever the cut
    assert read_bytes(text) == text


def test_the_letters_for_bytes_are_those_of_gpt2() -> None:
    pretokenizer = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel
    assert set(LETTERS) == set(pretokenizer.alphabet())
    assert len(LETTERS) == 256 == len(set(LETTERS.values()))
    ((piece, _),) = pretokenizer(add_prefix_space=False, use_regex=False).pre_tokenize_str("“é🔑")
    assert read_bytes(piece) == "“é🔑"


@given(st.text(max_size=12), st.data())
def test_characters_cut_into_pieces_are_shown_whole(text: str, data: st.DataObject) -> None:
    written = {byte: letter for letter, byte in LETTERS.items()}
    letters = "".join(written[byte] for byte in text.encode("utf-8", "replace"))
    tokens = []
    while letters:
        size = data.draw(st.integers(1, 4))
        tokens.append(letters[:size])
        letters = letters[size:]
    shown = show_tokens(tokens)
    assert len(shown) == len(tokens)
    if text.isprintable() and text.isalnum():
        assert "".join(shown).replace("·", "") == text.replace("·", "")
