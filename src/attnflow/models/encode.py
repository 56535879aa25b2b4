"""Encoding texts, pairs of texts, chats, token ids and images."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate, compress, repeat
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from attnflow.core.checks import check_flag, is_integer
from attnflow.errors import AttnFlowError, CaptureError, OptionError, TooLongError
from attnflow.models.chats import Chat, Range, read_chat
from attnflow.models.encoded import (
    Encoded,
    are_many,
    is_chat,
    read_image,
    read_patch_size,
)
from attnflow.models.families import list_image_marks

if TYPE_CHECKING:
    import transformers

    from attnflow.models.model import Model

WORD = re.compile(r"\S+")
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot encode
Item = TypeVar("Item")

# settings that name the tokens in whose place a model puts what it sees or hears
PLACEHOLDERS = tuple(
    f"{what}_token_{end}" for what in ("image", "video", "audio") for end in ("id", "index")
)


def encode_inputs(
    model: "Model", inputs: object, truncation: bool = False
) -> tuple[list[Encoded], bool]:
    """Encode one input or several, and whether they are several."""
    check_flag("truncation", truncation)
    if are_many(inputs):
        return [encode_input(model, value, truncation) for value in inputs], True
    return [encode_input(model, inputs, truncation)], False


def encode_input(model: "Model", value: object, truncation: bool) -> Encoded:
    """Encode one input; an `Encoded` is returned as it is."""
    if isinstance(value, Encoded):
        return value
    if model.is_vision:
        return encode_image(model, value)
    target: object = None
    if model.is_encoder_decoder and are_two(value, object) and not are_two(value, int):
        value, target = value
    if is_chat(value):
        chat = read_chat(model.tokenizer, value)
        encoded = encode_texts(model, (chat.text,), truncation, chat)
    elif texts := read_texts(model, value):
        encoded = encode_texts(model, texts, truncation)
    else:
        encoded = encode_ids(model, value, truncation)
    if not model.is_encoder_decoder:
        return encoded
    decoder_ids = find_decoder_ids(model, encoded.ids, target)
    return replace(encoded, decoder_ids=decoder_ids, decoder_tokens=model.names(decoder_ids))


def are_two(value: object, kind: type[Item]) -> TypeGuard[tuple[Item, Item]]:
    """Whether this is two values of a kind, and not a chat of two messages."""
    if not isinstance(value, tuple) or len(value) != 2 or is_chat(value):
        return False
    return all(isinstance(part, kind) for part in value)


# ---- texts --------------------------------------------------------------------------------------


def read_texts(model: "Model", value: object) -> tuple[str, ...]:
    """One text, or a pair of them, checked; empty if the value is not text."""
    texts: tuple[str, ...]
    if are_two(value, str):
        texts = value
        if model.segments < 2 and getattr(model.tokenizer, "sep_token", None) is None:
            raise OptionError(
                "a pair of texts is for models with two segments;"
                f" {model.name} reads one: join them, or put several texts in a list"
            )
    elif isinstance(value, str):
        texts = (value,)
    else:
        return ()
    if model.tokenizer is None:
        raise OptionError(
            "this model has no tokenizer, so it takes token ids; got a text:"
            " give Model(model, tokenizer)"
        )
    return texts


def encode_texts(
    model: "Model",
    texts: Sequence[str],
    truncation: bool,
    chat: Chat | None = None,
) -> Encoded:
    """The tokens of one text, or of a pair of them; the tokenizer is called once.

    chat: what the text was rendered from, if it is a chat.
    """
    check_texts(texts)
    options = choose_options(model, texts, truncation, is_rendered=chat is not None)
    found = call_tokenizer(model.tokenizer, texts, options)
    # a tokenizer may pad by itself
    seen = read_ids(found["attention_mask"]) if "attention_mask" in found else repeat(1)

    def strip(values: Iterable[Item]) -> tuple[Item, ...]:
        return tuple(compress(values, seen))

    ids = strip(read_ids(found["input_ids"]))
    check_ids(model, ids, truncation)
    two = len(texts) > 1
    tokens, words, offsets = None, None, None
    if "offset_mapping" in found:  # of fast tokenizers
        parts, spans = found.sequence_ids(), found["offset_mapping"]
        tokens, words = strip(found.tokens()), strip(number_words(texts, parts, spans))
        pairs = zip(parts, spans, strict=True)
        offsets = strip(None if part is None else span for part, span in pairs)
    has_types = two and model.segments > 1
    return Encoded(
        ids,
        tokens or model.names(ids),
        words,
        special=mark_special(model, ids),
        token_types=strip(read_ids(found["token_type_ids"])) if has_types else (),
        text=None if two else texts[0],
        offsets=None if two else offsets,
        chat=chat,
    )


def check_texts(texts: Sequence[str]) -> None:
    """Refuse texts without a word, and halves of characters."""
    for text in texts:
        if not text.strip():
            raise OptionError(f"a text must not be empty; got {text!r}")
        if SURROGATE.search(text):
            raise OptionError(f"a text must be Unicode that UTF-8 can encode; got {text!r}")


def choose_options(
    model: "Model", texts: Sequence[str], truncation: bool, *, is_rendered: bool
) -> dict[str, object]:
    """How to call a tokenizer. is_rendered: whether a chat template made the text."""
    options: dict[str, object] = {"verbose": False}  # texts that are too long are refused later
    if truncation and model.max_length is not None:
        options = {"truncation": True, "max_length": model.max_length}
    if getattr(model.tokenizer, "is_fast", False):
        options["return_offsets_mapping"] = True
    if len(texts) > 1:
        options["return_token_type_ids"] = True
    if is_rendered:
        options["add_special_tokens"] = False  # the template has written them
    return options


def call_tokenizer(
    tokenizer: "transformers.PreTrainedTokenizerBase",
    texts: Sequence[str],
    options: dict[str, object],
) -> "transformers.BatchEncoding":
    """The result of a tokenizer; whatever it raises, panics of Rust code too, becomes one line."""
    try:
        return tokenizer(*texts, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError, AttnFlowError):
        raise
    except BaseException as error:
        line = " ".join(str(error).split())
        raise CaptureError(
            f"the tokenizer failed on this text: {type(error).__name__}: {line[:300]}"
        ) from error


def number_words(
    texts: Sequence[str], parts: Sequence[int | None], spans: Sequence[Range]
) -> list[int | None]:
    """The whitespace word of each token, counted over all texts; None for tokens without a word.

    parts: the text that each token is of, None for special tokens. spans: its characters in that
    text. "don't" is one word, however many tokens it has.
    """
    starts = [[match.start() for match in WORD.finditer(text)] for text in texts]
    before = [0, *accumulate(map(len, starts))]  # words in the texts before each
    numbers: list[int | None] = []
    for part, (start, end) in zip(parts, spans, strict=True):
        piece = "" if part is None else texts[part][start:end]
        word = piece.lstrip()  # a token may begin with the space before it
        if part is None or not word:
            numbers.append(None)
        else:
            first = start + len(piece) - len(word)
            numbers.append(before[part] + bisect_right(starts[part], first) - 1)
    return numbers


# ---- token ids ----------------------------------------------------------------------------------


def encode_ids(model: "Model", value: object, truncation: bool) -> Encoded:
    """Token ids as they are, checked."""
    ids = tuple(read_ids(value))[: model.max_length if truncation else None]
    check_ids(model, ids, truncation)
    return Encoded(ids, model.names(ids), special=mark_special(model, ids))


def mark_special(model: "Model", ids: Sequence[int]) -> tuple[bool, ...]:
    """Whether each token was added by the tokenizer."""
    return tuple(map(model.marks.__contains__, ids))


def read_ids(value: object) -> list[int]:
    """Token ids from a list, an array or a tensor of whole numbers, of one sequence."""
    if type(value) is list and set(map(type, value)) == {int}:  # as tokenizers give them
        return value
    kind = type(value).__name__
    if isinstance(value, bytes | bytearray | memoryview):
        raise OptionError(f"a text must be a str; got {kind}: decode it, as value.decode()")
    if isinstance(value, Mapping):
        raise OptionError(describe_mapping(value))
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, Iterable) and not isinstance(values, Set):  # which has no order
        items = list(values)
        if len(items) == 1 and isinstance(items[0], list):
            items = items[0]
        if all(map(is_integer, items)):
            return [int(item) for item in items]
        if all(isinstance(item, str) for item in items):
            raise OptionError(
                f"several texts must be a list of them; got {kind}: put them in a list"
            )
        odd = next(item for item in items if not is_integer(item))
        kind = f"{kind} that holds {type(odd).__name__}"
    raise OptionError(f"an input must be a text, token ids or a chat; got {kind}")


def describe_mapping(value: Mapping[object, object]) -> str:
    """Why a mapping is not an input: it may be a message, or what a tokenizer returned."""
    if "role" in value:
        return "a chat is a list of messages; got one message: put it in a list"
    kind = type(value).__name__
    return f"an input must be a text, token ids or a chat; got {kind}: give its input_ids"


def check_ids(model: "Model", ids: Sequence[int], truncation: bool) -> None:
    """Refuse no ids, more than the model takes, and those that it does not know."""
    if not ids:
        raise OptionError("an input must have at least one token; got none")
    most = model.max_length
    if most is not None and len(ids) > most and not truncation:
        raise TooLongError(
            f"this model takes at most {most} tokens; got {len(ids)}:"
            " pass truncation=True to cut the rest off",
            options=["truncation=True"],
        )
    refuse_placeholders(model, ids)
    size = model.vocabulary_size
    if min(ids) < 0 or max(ids) >= size:
        worst = max(ids) if max(ids) >= size else min(ids)
        raise CaptureError(
            f"token ids of {model.name} must be from 0 to {size - 1}; got {worst}:"
            " the tokenizer does not match the model"
        )


def refuse_placeholders(model: "Model", ids: Sequence[int]) -> None:
    """Refuse tokens that stand for images, videos or sounds, which are not given."""
    for name in PLACEHOLDERS:
        number = getattr(model.config, name, None)
        if isinstance(number, int) and number in ids:
            what = name.partition("_")[0]
            raise OptionError(
                f"token {number} of {model.name} stands for {what}s that were not given, so its"
                f" numbers would mean nothing: leave {what} tokens out"
            )


def find_decoder_ids(model: "Model", ids: tuple[int, ...], target: object) -> tuple[int, ...]:
    """The input of the decoder: the target, a classifier's shifted input, or the start token."""
    names = ("decoder_start_token_id", "bos_token_id")
    starts = [getattr(model.config, name, None) for name in names]
    start = next((number for number in starts if number is not None), 0)
    if not isinstance(start, int) or not 0 <= start < model.vocabulary_size:
        raise CaptureError(
            f"the decoder of {model.name} must start with a token id from 0 to"
            f" {model.vocabulary_size - 1}; its configuration says {start!r}"
        )
    if target is not None:
        given = (
            list(call_tokenizer(model.tokenizer, (), {"text_target": target})["input_ids"])
            if isinstance(target, str)
            else read_ids(target)
        )
        return (start, *given) if not given or given[0] != start else tuple(given)
    if model.task == "sequence classification":  # BART-like models shift the input themselves
        return (start, *ids[:-1])
    return (start,)


def encode_image(model: "Model", value: object) -> Encoded:
    """The pixels of an image, and the names of its patches: row and column."""
    pixels = read_image(value, model.image_processor, model.config, model.name)
    down, across = read_patch_size(model.config)
    grid = (pixels.shape[1] // down, pixels.shape[2] // across)
    marks = list_image_marks(model.model, model.config)
    patches = [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
    special = (*[True] * len(marks), *[False] * len(patches))
    return Encoded((), (*marks, *patches), pixels=pixels, grid=grid, special=special)
