"""Chats: messages rendered by a tokenizer's template, and where each content stands in the text.

The places come from the template itself, never from a search, which would find a content "user" in
the name of a role. A message is rendered again with marks in its content: where the text without
the marks is the same as before, the marks show where the content begins and ends.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from attnflow.errors import AttnFlowError, OptionError

Message = dict[str, Any]  # its role and content; templates may read more
Range = tuple[int, int]  # (start, end), the end not included
Ranges = tuple[Range, ...]

# characters for private use, which no template trims or tells from letters
MARK = "\ue0a7\uf3c1\ue0a8"
# a template may remove a part of a content, such as reasoning; the rest is cut at a boundary
BOUNDARY = re.compile(r"(?<=[>\]}\s])(?=\S)|(?<=\S)(?=[<\[{\s])")
FIRST_BOUNDARIES = 8  # that are tried one after the other; the others are halved


class ChatTokenizer(Protocol):
    """A tokenizer that may have a chat template."""

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool
    ) -> object:
        """The text of a chat, unless it is to be tokenised."""


@dataclass(frozen=True)
class Turn:
    """The content of one message.

    Parameters
    ----------
    name
        Its number, counted from 1, and its role.
    spans
        Where it stands in the text: once, or as often as the template repeats it.
    """

    name: str
    spans: Ranges


@dataclass(frozen=True)
class Chat:
    """A chat as a text.

    Parameters
    ----------
    messages
        As they were given.
    text
        As the template writes it. It ends with the generation prompt or, where the assistant spoke
        last, with the content to be continued; an empty one is begun by the generation prompt.
    turns
        Without empty contents, and without those that the template leaves out.
    problem
        Why no turns are known; empty if they are.
    """

    messages: tuple[Message, ...]
    text: str
    turns: tuple[Turn, ...] = ()
    problem: str = ""


def read_chat(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> Chat:
    """The text and the turns of a chat."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise OptionError(
            "chat messages need a tokenizer with a chat template, and this one has none;"
            " give a text"
        )
    for message in messages:
        check_message(message)
    given, told = tuple(map(dict, messages)), list(messages)
    continues = told[-1]["role"] == "assistant"
    if continues and is_blank(told[-1]):
        told, continues = told[:-1], False
    if not told:
        raise OptionError("a chat must have a message that is not empty; got none")

    def render(changed: list[Message]) -> str:
        return str(
            tokenizer.apply_chat_template(
                changed, add_generation_prompt=not continues, tokenize=False
            )
        )

    try:
        text = render(told)
        if any(is_printed(message, text) for message in told):
            told = list(map(join_parts, told))
            text = render(told)
    except AttnFlowError:
        raise
    except Exception as error:
        raise OptionError(describe_failure(error)) from error
    template = Template(render, told, text)
    places = [template.find_content(number) for number in range(len(told))]
    if continues:
        text = text[: find_end(told[-1], places[-1])]
    if None in places:
        problem = (
            f"the template changes the content of message {places.index(None) + 1}, so that its"
            " place in the text is unknown: give spans of characters"
        )
        return Chat(given, text, problem=problem)
    turns = [
        Turn(f"{number} {message['role']}", spans)
        for number, (message, spans) in enumerate(zip(told, places, strict=True), start=1)
        if spans
    ]
    return Chat(given, text, tuple(turns))


def check_message(message: Mapping[str, object]) -> None:
    """Refuse a message without a role and a content."""
    content = message.get("content")
    # templates may take a list of parts, and calls of tools instead of a content
    known = isinstance(content, str | list) or "tool_calls" in message
    if not known or not isinstance(message.get("role"), str):
        raise OptionError(f"a message must have a role and a content, both texts; got {message!r}")


def is_blank(message: Message) -> bool:
    """Whether a message has nothing but a role."""
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    return Content.read(message) is None and not any(others.values()) and has_texts_only(message)


def has_texts_only(message: Message) -> bool:
    """Whether every part of a content is a text."""
    parts = message.get("content") or ()
    return all(
        isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str))
        for part in parts
    )


def is_printed(message: Message, text: str) -> bool:
    """Whether a template that takes texts wrote the parts of a content as Python prints them."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return False
    printed = [parts, *(part for part in parts if isinstance(part, dict))]
    return any(part and str(part) in text for part in printed)


def join_parts(message: Message) -> Message:
    """The message with one text: its parts, each on a line of its own."""
    if not isinstance(message.get("content"), list):
        return message
    if not has_texts_only(message):
        raise OptionError(
            "the chat template takes texts as contents, and a content has parts that are not text:"
            " leave them out"
        )
    return {**message, "content": "\n".join(map(read_text_part, message["content"]))}


def find_end(message: Message, spans: Ranges | None) -> int:
    """Where the text of a chat ends whose last turn is continued."""
    if message.get("tool_calls"):
        problem = "this one calls tools"
    elif spans is None:
        problem = "the template changes this one, so that its end is unknown"
    elif not spans:
        problem = "the template leaves this one out"
    else:
        return spans[-1][1]
    raise OptionError(
        f"a final turn of the assistant is continued, but {problem}: end with another turn, or"
        " give the text of the chat"
    )


def describe_failure(error: Exception) -> str:
    """Why a template wrote nothing: it may refuse a role or an order of roles, or be broken."""
    kind, line = type(error).__name__, " ".join(str(error).split())[:300]
    if kind == "TemplateError":  # what `raise_exception` raises
        return f"the chat template refuses these messages: {line}"
    if kind in ("TemplateSyntaxError", "TemplateAssertionError"):
        where = f" in line {number}" if (number := getattr(error, "lineno", None)) else ""
        return f"the chat template of the tokenizer is broken{where}: {line}"
    return f"the chat template failed on these messages: {kind}: {line}"


# ---- where contents stand -----------------------------------------------------------------------


@dataclass(frozen=True)
class Template:
    """A template and what it wrote for some messages."""

    render: Callable[[list[Message]], str]
    messages: Sequence[Message]
    text: str

    def find_content(self, number: int) -> Ranges | None:
        """Where the content of a message stands; () if it is left out, None if that is unknown."""
        content = Content.read(self.messages[number])
        if content is None:
            return ()
        marks = self.place_marks(number, content.mark(0, content.size))
        if marks and len(marks) % 2 == 0:
            return pair_marks(marks)
        return self.find_rest(number, content) or self.find_replaced(number, content)

    def find_rest(self, number: int, content: "Content") -> Ranges | None:
        """Where the rest of a content stands of which the template removes the start or the end."""
        starts, ends = content.list_boundaries()

        def is_kept(start: int | None, end: int | None) -> bool:
            return bool(self.place_marks(number, content.mark(start, end)))

        start = find_least(starts, lambda place: is_kept(place, None))
        end = find_least(ends, lambda place: is_kept(None, place))
        if start is None or end is None or start >= end:
            return None
        marks = self.place_marks(number, content.mark(start, end))
        return pair_marks(marks) if marks and len(marks) % 2 == 0 else None

    def find_replaced(self, number: int, content: "Content") -> Ranges | None:
        """Where a content stands by what the template writes around a mark in its place."""
        rendered = self.try_render(number, content.replace(MARK))
        if rendered is None:
            return None
        first, *others = rendered.split(MARK)
        if not others:  # the content is not shown at all
            return () if rendered == self.text else None
        left = len(self.text) - sum(map(len, (first, *others)))
        size = left // len(others)  # of the content, alike wherever it stands
        spans, place = [], len(first)
        for piece in others:
            spans.append((place, place + size))
            place += size + len(piece)
        expected = first + "".join(
            self.text[slice(*span)] + piece for span, piece in zip(spans, others, strict=True)
        )
        contents = {self.text[slice(*span)] for span in spans}
        if size < 0 or expected != self.text or len(contents) > 1:
            return None
        return tuple(spans) if size else ()

    def place_marks(self, number: int, marked: Message) -> list[int] | None:
        """Where the marks in a message stand in the text; None if they change anything else."""
        rendered = self.try_render(number, marked)
        if rendered is None or rendered.replace(MARK, "") != self.text:
            return None
        return list(accumulate(map(len, rendered.split(MARK)[:-1])))

    def try_render(self, number: int, message: Message) -> str | None:
        """The text with another message at a place; None if the template refuses it."""
        changed = list(self.messages)
        changed[number] = message
        try:
            return self.render(changed)
        except Exception:  # a template may raise anything
            return None


@dataclass(frozen=True)
class Content:
    """The content of a message: one text, or parts of which some are texts."""

    message: Message
    texts: tuple[str, ...]  # one of the message, or those of its parts
    first: int  # the first and the last text that are not blank
    last: int

    @classmethod
    def read(cls, message: Message) -> "Content | None":
        """The content of a message; None if it holds no text."""
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = tuple(map(read_text_part, parts))
        written = [place for place, text in enumerate(texts) if text.strip()]
        return cls(message, texts, written[0], written[-1]) if written else None

    @property
    def size(self) -> int:
        """The characters of the last text, up to white space at its end."""
        return len(self.texts[self.last].rstrip())

    def mark(self, start: int | None, end: int | None) -> Message:
        """The message with marks: before a character of the first text, and one of the last."""
        texts = list(self.texts)
        if end is not None:
            texts[self.last] = insert_mark(texts[self.last], end)
        if start is not None:
            text = texts[self.first]
            texts[self.first] = insert_mark(text, max(start, len(text) - len(text.lstrip())))
        return self.write(texts)

    def replace(self, text: str) -> Message:
        """The message with one text instead of all."""
        texts = [""] * len(self.texts)
        texts[self.first] = text
        return self.write(texts)

    def write(self, texts: Sequence[str]) -> Message:
        """The message with other texts."""
        content = self.message["content"]
        if isinstance(content, str):
            return {**self.message, "content": texts[0]}
        parts = [
            {**part, "text": text} if isinstance(part, dict) and "text" in part else part
            for part, text in zip(content, texts, strict=True)
        ]
        return {**self.message, "content": parts}

    def list_boundaries(self) -> tuple[list[int], list[int]]:
        """Where the rest of the content may begin, in order, and where it may end, from the end."""
        first, last = self.texts[self.first], self.texts[self.last]
        starts = [0, *(match.start() for match in BOUNDARY.finditer(first))]
        ends = [self.size, *(match.start() for match in BOUNDARY.finditer(last))][::-1]
        return starts, sorted(set(ends), reverse=True)


def read_text_part(part: object) -> str:
    """The text of a content, or of a part of it; empty for an image and the like."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ""


def insert_mark(text: str, place: int) -> str:
    """A text with a mark before a character."""
    return text[:place] + MARK + text[place:]


def pair_marks(marks: Sequence[int]) -> Ranges:
    """Spans from marks at their starts and ends in turn."""
    return tuple(zip(marks[::2], marks[1::2], strict=True))


def find_least(candidates: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The first candidate for which a condition holds, which then mostly holds for those behind."""
    for candidate in candidates[:FIRST_BOUNDARIES]:
        if holds(candidate):
            return candidate
    place = bisect_left(candidates, True, lo=min(FIRST_BOUNDARIES, len(candidates)), key=holds)
    return candidates[place] if place < len(candidates) else None
