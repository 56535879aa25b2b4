"""The text of tokens, and the marks that tokenizers put on them.

"Ġ" and "▁" stand for the space before a word, "Ċ" for a line break, "##" for the rest of a word
(WordPiece), "@@" for a word that continues, "</w>" for the end of one (older BPE), "/NNS" and the
like for the class of a word that is unknown to the bundled model. Byte-level tokenizers write each
byte as a letter, "âĢľ" for the quotation mark “ (GPT-2).
"""

import re
import string
from collections.abc import Collection, Iterator, Sequence

SPACES = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
# only before other text: "##" and "###" are headings, not rests of words
BYTE_PIECES = re.compile(
    r"^##(?=[^#\s])|(?<=[^@])@@\Z|(?<=.)</w>\Z"
    r"|(?<=[^\sĠ▁])/(?:NN|NNS|NNP|VBG|VBN|RB|JJ|CD|\[UNK\])\Z",
    re.DOTALL,
)
# GPT-2's letters for bytes: printable ones stand for themselves, the others start at 256
PRINTED_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTED_BYTES]
LETTERS = {chr(byte): byte for byte in PRINTED_BYTES} | {
    chr(256 + i): b for i, b in enumerate(OTHERS)
}
LONGEST_CHARACTER = 8  # tokens: 4 bytes, and text before or after them
JOINERS = "\u200c\u200d"  # join or part two letters (Persian, Hindi), or build an emoji

# English function words: rollout favours them, as nearly every token attends to them
COMMON_WORDS_TEXT = """
a an the this that these those some any each every no not and or but nor so yet if then than as of
to in on at by for from with into onto over under about after before between through during against
without within up down out off is are was were be been being am do does did done have has had having
will would shall should can could may might must i you he she it we they me him her us them my your
his its our their mine yours hers ours theirs myself yourself himself herself itself ourselves
themselves who whom whose which what when where why how there here also just only very too
"""
COMMON_WORDS = frozenset(COMMON_WORDS_TEXT.split())


def strip_marks(token: str) -> str:
    r"""The text of a token, without the marks of its tokenizer and without spaces around it.

    >>> [strip_marks(token) for token in ("Ġkey", "▁key", "##s", "key</w>", "Ċ", "##", "Ġ")]
    ['key', 'key', 's', 'key', '\n', '##', '']
    >>> [strip_marks(token) for token in ("âĢľitem", "ĠcafÃ©", "##é", "ðŁĶ")]
    ['“item', 'café', 'é', 'ðŁĶ']
    >>> strip_marks("zorbs/NNS")
    'zorbs'
    """
    return read_bytes(BYTE_PIECES.sub("", token)).translate(SPACES).strip(" ")


def read_bytes(text: str) -> str:
    """The characters whose bytes a tokenizer wrote as letters; other texts as they are.

    A piece of a character, and letters that are not valid UTF-8, stay as they are.

    >>> read_bytes("Ġâ" + "Ĥ¬"), read_bytes("stół"), read_bytes("key")
    (' €', 'stół', 'key')
    """
    if text.isascii() or not LETTERS.keys() >= set(text):
        return text
    try:
        return bytes(LETTERS[letter] for letter in text).decode()
    except UnicodeDecodeError:
        return text


def show_token(token: str) -> str:
    r"""A token as people read it, without the marks of its tokenizer.

    Control characters, and all others that are not printable, are escaped as in Python.
    "␣" is a token of spaces only, "∅" an empty one.

    >>> [show_token(token) for token in ("Ġkey", "##s", "Ċ", "Ġ", "", "\x1b[31m")]
    ['key', 's', '\\n', '␣', '∅', '\\x1b[31m']
    """
    return "".join(split_shown(token))


def show_watched(name: str) -> str:
    """The name of a watched class or token, or of a target and its foil, as people read it.

    >>> show_watched("ĠParis"), show_watched("ĠParis - ĠRome"), show_watched("plural - singular")
    ('Paris', 'Paris - Rome', 'plural - singular')
    """
    parts = name.split(" - ")
    return " - ".join(map(show_token, parts)) if all(parts) else show_token(name)


def show_tokens(tokens: Sequence[str]) -> list[str]:
    """Consecutive tokens as `show_token` shows them, with whole characters.

    >>> show_tokens(["ĠðŁ", "Ķ", "ĳ", "s", "é"])
    ['🔑', '·', '·', 's', 'é']
    """
    return [show_token(token) for token in join_pieces(tokens)]


def join_pieces(tokens: Sequence[str]) -> list[str]:
    """Tokens; if several hold the bytes of a character, the first holds all, the others are "·"."""
    joined: list[str] = []
    while len(joined) < len(tokens):
        place = len(joined)
        count = count_pieces(tokens[place : place + LONGEST_CHARACTER])
        joined += ["".join(tokens[place : place + count]), *["·"] * (count - 1)]
    return joined


def count_pieces(tokens: Sequence[str]) -> int:
    """How many of the first tokens hold whole characters together; 1 if none do, or the first."""
    first = tokens[0]
    if not first.isascii() and LETTERS.keys() >= set(first) and read_bytes(first) == first:
        for count in range(2, len(tokens) + 1):
            whole = "".join(tokens[:count])
            if read_bytes(whole) != whole:
                return count
    return 1


def split_shown(token: str) -> Iterator[str]:
    """The same in units that must not be cut: one character, or one escape, at a time."""
    text = strip_marks(token) or ("␣" if token else "∅")
    for place, character in enumerate(text):
        around = text[place - 1 : place] + text[place + 1 : place + 2]
        joins = character in JOINERS and len(around) == 2 and around.isprintable()
        if character.isprintable() or joins:
            yield character
        else:
            yield character.encode("unicode_escape").decode()


def clean_text(text: str) -> str:
    r"""Escape lone surrogates, so that UTF-8 can encode the text.

    >>> clean_text("key\ud800")
    'key\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def join_subwords(tokens: Sequence[str]) -> str:
    """Join the tokens of a word without marks; a word of marks only keeps them.

    >>> join_subwords(["un", "##believ", "##able"]), join_subwords(["Ġkey", "s"])
    ('unbelievable', 'keys')
    """
    whole = "".join(tokens)
    joined = read_bytes(whole)  # the bytes of a character may be in several tokens
    text = joined.strip(" ") if joined != whole else "".join(map(strip_marks, tokens))
    return text or whole


def number_marked(tokens: Sequence[str]) -> list[int]:
    """The number of the word that each token belongs to, by the marks of its tokenizer.

    If spaces are marked, a token without that mark continues the word before it, except line breaks
    and special tokens; if rests of words are marked, those do. Without marks every token is a word.

    >>> number_marked(["The", "Ġun", "believ", "able", ".", "Ċ", "Yes"])
    [0, 1, 1, 1, 1, 2, 3]
    >>> number_marked(["[CLS]", "un", "##believ", "##able"])
    [0, 1, 1, 1]
    """
    spaced = any(token.startswith(("Ġ", "▁")) for token in tokens)
    numbers: list[int] = []
    apart = True  # the token before stands alone
    for token in tokens:
        alone = "Ċ" in token or "\n" in token or is_special(token)
        begins = token.startswith(("Ġ", "▁")) if spaced else not BYTE_PIECES.match(token)
        word = numbers[-1] if numbers else -1
        numbers.append(word + 1 if apart or alone or begins else word)
        apart = alone
    return numbers


PATCH_NAME = re.compile(r"(\d+),(\d+)")


def find_patches(tokens: Sequence[str]) -> dict[tuple[int, int], int]:
    """The positions of an image's patches by row and column, if tokens are named after them.

    >>> find_patches(["[CLS]", "0,0", "0,1"])
    {(0, 0): 1, (0, 1): 2}
    """
    return {
        (int(match[1]), int(match[2])): place
        for place, token in enumerate(tokens)
        if (match := PATCH_NAME.fullmatch(token))
    }


def is_special(token: str) -> bool:
    """Whether a token looks like a special one: <s>, <|im_start|>, [CLS]."""
    return len(token) > 2 and (token[0], token[-1]) in (("<", ">"), ("[", "]"))


def is_common(token: str, words: Collection[str] = COMMON_WORDS, punctuation: bool = True) -> bool:
    """Whether a token is punctuation, or one of `words`, which are in lower case.

    Marks of tokenizers are ignored: a token of marks only is punctuation.

    >>> [is_common(token) for token in ("ĠThe", "##,", "Ċ", "Ġkey")]
    [True, True, True, False]
    """
    text = strip_marks(token).strip().lower()
    return text in words or (
        punctuation
        and all(character in string.punctuation or character.isspace() for character in text)
    )


ENDS = re.compile(r"[.!?…。！？]+[\"'”’)\]]*\Z")


def number_sentences(tokens: Sequence[str], starts: Sequence[bool]) -> list[int]:
    """The number of the sentence of each token.

    A sentence ends with a full stop, question or exclamation mark if a word begins after it, and
    with a line break.

    >>> number_sentences(["Go", ".", "Stay", "!"], [True, False, True, False])
    [0, 0, 1, 1]
    """
    numbers: list[int] = []
    number, is_over = 0, False
    for token, starts_word in zip(tokens, starts, strict=True):
        text = strip_marks(token)
        if is_over and starts_word and not ENDS.fullmatch(text):
            number, is_over = number + 1, False
        numbers.append(number)
        is_over = is_over or "\n" in text or bool(ENDS.search(text))
        if not starts_word and not ENDS.search(text):
            is_over = False  # "3.5": the number goes on
    return numbers


def shorten(text: str, most: int = 60) -> str:
    """A text in one line of at most this many characters.

    >>> shorten("the key to the cabinets", 8)
    'the key…'
    """
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
