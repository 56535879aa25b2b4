"""Long inputs as they are given: texts, token ids, chats; where each token stands in the text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.errors import OptionError
from attnflow.models.inputs import Encoded, are_many, call_tokenizer, number_words, read_ids
from attnflow.models.model import Model

Message = dict[str, Any]  # of a chat: its role and content
Span = tuple[int, int]  # from, and up to but not including


@dataclass(frozen=True)
class Prompt:
    """One input, with its text if it has one."""

    encoded: Encoded
    text: str | None = None
    # each token's characters; None for those that are no text, as CLS
    places: tuple[Span | None, ...] | None = None
    turns: tuple[tuple[str, Span], ...] | None = None  # the content of each message of a chat

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[position]: the first character of each token that is no space; -1 if it is no text."""
        starts = np.full(len(self.places or ()), -1)
        for position, place in enumerate(self.places or ()):
            if place is not None and place[0] < place[1]:
                piece = (self.text or "")[slice(*place)]
                starts[position] = place[0] + (len(piece) - len(piece.lstrip())) % len(piece)
        return starts


def read_prompts(
    model: Model, inputs: Any, truncation: bool, what: str, *, places: bool = False
) -> tuple[list[Prompt], bool]:
    """One input or several, and whether they are several; a list of messages is one chat.

    what: the function that was called, for messages. places: whether to find where tokens stand.
    """
    if model.is_encoder_decoder:
        raise OptionError(
            f"{what} is for models with one stack of layers; {model.name} is an encoder-decoder:"
            " use rollout(capture(...))"
        )
    many = are_many(inputs) and not is_chat(inputs)
    values = inputs if many else [inputs]
    return [read_prompt(model, value, truncation, places) for value in values], many


def is_chat(value: Any) -> bool:
    """Whether this is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def read_prompt(model: Model, value: Any, truncation: bool, places: bool) -> Prompt:
    """One input as it was given."""
    if is_chat(value):
        return read_chat(model, value, truncation)
    encoded = model.encode(value, truncation=truncation)
    if not isinstance(value, str) or model.is_vision:
        return Prompt(encoded)
    if not places or not getattr(model.tokenizer, "is_fast", False):
        return Prompt(encoded, value)
    # as long as what was encoded, which may be cut off
    options = {"truncation": True, "max_length": len(encoded.ids), "add_special_tokens": True}
    ids, spans, _ = locate_tokens(model.tokenizer, value, options)
    return Prompt(encoded, value, tuple(spans) if ids == list(encoded.ids) else None)


def read_chat(model: Model, messages: Sequence[Message], truncation: bool) -> Prompt:
    """Messages through the tokenizer's template, as `generate` reads them."""
    if getattr(model.tokenizer, "chat_template", None) is None:
        raise OptionError(
            "chat messages need a tokenizer with a chat template, and this one has none;"
            " give a text"
        )
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise OptionError(
                f"a message must have a role and a content, both texts; got {message!r}"
            )
    asks = messages[-1]["role"] != "assistant"
    try:
        text = model.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=asks, tokenize=False
        )
    except Exception as error:  # a template may refuse a role, or an order of roles
        line = " ".join(str(error).split())
        raise OptionError(f"the chat template refuses these messages: {line[:300]}") from error
    ids, spans, words = locate_tokens(model.tokenizer, text, {"add_special_tokens": False})
    encoded = model.encode(ids, truncation=truncation)
    size = len(encoded.ids)
    encoded = replace(encoded, words=tuple(words[:size]) if words else None)
    places = tuple(spans[:size]) if spans else None
    return Prompt(encoded, text, places, tuple(find_turns(messages, text)))


def locate_tokens(
    tokenizer: Any, text: str, options: dict[str, Any]
) -> tuple[list[int], list[Span | None], list[int | None]]:
    """The ids of a text, each one's characters and word; the latter empty of a slow tokenizer."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    more: dict[str, Any] = {"return_offsets_mapping": True} if fast else {}
    found = call_tokenizer(tokenizer, (text,), {"verbose": False, **options, **more})
    ids = read_ids(found["input_ids"])
    if not fast:
        return ids, [], []
    mask = read_ids(found["attention_mask"]) if "attention_mask" in found else [1] * len(ids)
    real = [place for place, seen in enumerate(mask) if seen]  # a tokenizer may pad by itself
    parts, spans = found.sequence_ids(), found["offset_mapping"]
    words = number_words((text,), parts, spans)
    places = [None if parts[place] is None else tuple(spans[place]) for place in real]
    return [ids[place] for place in real], places, [words[place] for place in real]


def find_turns(messages: Sequence[Message], text: str) -> list[tuple[str, Span]]:
    """Where the content of each message stands in a chat's text, named by number and role."""
    turns, end = [], 0
    for number, message in enumerate(messages, start=1):
        content = message["content"].strip()  # templates mostly strip it themselves
        start = text.find(content, end)
        if start < 0 or not content:
            raise OptionError(
                f"the content of message {number} must stand in the chat's text as it is; got"
                f" {content[:40]!r}: this template changes it, so give spans of characters"
            )
        end = start + len(content)
        turns.append((f"{number} {message['role']}", (start, end)))
    return turns
