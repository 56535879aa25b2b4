"""Chats: contents stand where the template puts them, whatever it does to them."""

from typing import Any

import pytest

import attnflow as af
from attnflow.models.chats import MARK, Chat, Message, read_chat
from tests.families import word_tokenizer


def render(body: str, messages: list[Message]) -> Chat:
    """A chat by a template that writes this for the content of each message `m`."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + ("
        + body
        + ") + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    return read_chat(tokenizer, messages)


def say(*turns: tuple[str, Any]) -> list[Message]:
    """Messages from pairs of role and content."""
    return [{"role": role, "content": content} for role, content in turns]


def read(chat: Chat) -> list[tuple[str, list[str]]]:
    """The turns of a chat: names and what stands at their places."""
    assert MARK not in chat.text
    return [(turn.name, [chat.text[slice(*span)] for span in turn.spans]) for turn in chat.turns]


THOUGHT = f"<think>\nwhy {'not ' * 50}\n</think>\n\nbecause"


@pytest.mark.parametrize(
    ("body", "messages", "expected"),
    [
        pytest.param(
            "m['content']",
            say(("user", "user"), ("assistant", "user"), ("user", "a")),
            [("1 user", ["user"]), ("2 assistant", ["user"]), ("3 user", ["a"])],
            id="contents that are names of roles and letters of marks",
        ),
        pytest.param(
            "m['content'] | trim",
            say(("system", ""), ("user", "  a b \n")),
            [("2 user", ["a b"])],
            id="an empty system message, and white space that is stripped",
        ),
        pytest.param(
            "m['content'].split('</think>')[-1] | trim",
            say(("user", "q"), ("assistant", THOUGHT), ("user", "<think>")),
            [("1 user", ["q"]), ("2 assistant", ["because"]), ("3 user", ["<think>"])],
            id="reasoning that is removed",
        ),
        pytest.param(
            "m['content'].split('<think>')[0] | trim",
            say(("user", "x"), ("assistant", "yes <think> hm</think>"), ("user", "a")),
            [("1 user", ["x"]), ("2 assistant", ["yes"]), ("3 user", ["a"])],
            id="an end that is removed",
        ),
        pytest.param(
            "m['content'] + ' / ' + m['content']",
            say(("user", "a"), ("user", "user")),
            [("1 user", ["a", "a"]), ("2 user", ["user", "user"])],
            id="contents that stand twice",
        ),
        pytest.param(
            "m['content'] | upper",
            say(("user", "user"), ("user", "a")),
            [("1 user", ["USER"]), ("2 user", ["A"])],
            id="contents that are changed as a whole",
        ),
        pytest.param(
            "'[key]' + m['content'] if 'key' in m['content'] else m['content']",
            say(("user", "key"), ("user", "bar")),
            [("1 user", ["key"]), ("2 user", ["bar"])],
            id="words that the template adds to some contents",
        ),
        pytest.param(
            "m['content'] if m['role'] != 'system' else ''",
            say(("system", "the key"), ("user", "the key")),
            [("2 user", ["the key"])],
            id="a system that is not heard",
        ),
        pytest.param(
            "m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join('+')",
            say(
                ("user", [{"type": "text", "text": "the"}, {"type": "text", "text": "key"}]),
                ("user", "the"),
            ),
            [("1 user", ["the+key"]), ("2 user", ["the"])],
            id="contents of several parts",
        ),
    ],
)
def test_turns_stand_where_the_template_puts_them(
    body: str, messages: list[Message], expected: list[tuple[str, list[str]]]
) -> None:
    chat = render(body, messages)
    assert chat.problem == ""
    assert read(chat) == expected
    assert chat.text.endswith("<|im_start|>assistant")


def test_a_final_turn_of_the_assistant_is_continued() -> None:
    chat = render("m['content'] | trim", say(("user", "the key"), ("assistant", " is lost ")))
    assert chat.text == "<|im_start|>user\nthe key<|im_end|>\n<|im_start|>assistant\nis lost"
    assert read(chat) == [("1 user", ["the key"]), ("2 assistant", ["is lost"])]


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
def test_an_empty_final_turn_of_the_assistant_is_begun(content: Any) -> None:
    chat = render("m['content'] | trim", say(("user", "the key"), ("assistant", content)))
    assert chat.text == "<|im_start|>user\nthe key<|im_end|>\n<|im_start|>assistant"
    assert read(chat) == [("1 user", ["the key"])]
    assert len(chat.messages) == 2


@pytest.mark.parametrize(
    ("body", "last", "message"),
    [
        ("m['tool_calls'] or m['content']", {"tool_calls": "find"}, "but this one calls tools"),
        ("m['content']", {"content": "so", "tool_calls": "find"}, "but this one calls tools"),
        ("m['content'] | reverse", {"content": "lost"}, "so that its end is unknown"),
        ("m['content'] if loop.first else ''", {"content": "lost"}, "the template leaves this one"),
    ],
)
def test_a_final_turn_that_cannot_be_continued_is_refused(
    body: str, last: Message, message: str
) -> None:
    with pytest.raises(af.OptionError, match=message):
        render(body, [*say(("user", "key")), {"role": "assistant", **last}])


def test_parts_are_joined_for_a_template_that_takes_texts() -> None:
    parts = [{"type": "text", "text": "the 'key'"}, {"type": "text", "text": "is"}]
    chat = render("m['content'] | string", say(("user", parts), ("assistant", parts[:1])))
    assert read(chat) == [("1 user", ["the 'key'\nis"]), ("2 assistant", ["the 'key'"])]
    assert chat.text.endswith("the 'key'")
    assert read(render("m['content'] | string", say(("user", ["the", "key"])))) == [
        ("1 user", ["the\nkey"])
    ]
    with pytest.raises(af.OptionError, match="parts that are not text: leave them out"):
        render("m['content'] | string", say(("user", [*parts, {"type": "image", "url": "a"}])))


def test_contents_that_cannot_be_placed_are_told_and_the_text_is_whole() -> None:
    messages = say(("user", "the key"), ("user", "lost"))
    chat = render("m['content'] | reverse", messages)
    assert chat.turns == ()
    assert "the content of message 1" in chat.problem
    assert chat.text.endswith("tsol<|im_end|>\n<|im_start|>assistant")


def test_what_a_template_refuses_is_one_line() -> None:
    with pytest.raises(af.OptionError, match="the chat template refuses these messages: no such"):
        render("raise_exception('no\nsuch')", say(("user", "a")))
    with pytest.raises(af.OptionError, match="template of the tokenizer is broken in line 2: u"):
        render("m['content'", say(("user", "a")))
    with pytest.raises(af.OptionError, match="failed on these messages: UndefinedError: 'dict"):
        render("m.missing.name", say(("user", "a")))
    with pytest.raises(af.OptionError, match="must have a message that is not empty"):
        render("m['content']", say(("assistant", " ")))
    with pytest.raises(af.OptionError, match="must have a role and a content"):
        render("m['content']", [{"role": "user"}])
