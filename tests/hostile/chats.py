"""Odd chats: turns must stand exactly where the template puts the contents.

Six templates, among them ones that strip, merge, remove or repeat contents; each is written again
here as a function that says where every character of the text comes from.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attnflow as af
from tests.families import word_tokenizer
from tests.hostile.tries import Result, run_tries

Message = dict[str, Any]
Piece = tuple[str, int | None]  # a part of the text, and the message whose content it is
ROLES = ("system", "user", "assistant")
WORDS = "the key user assistant system a is lost im_start im_end INST think \u00e9t\u00e9 \u9375 1".split()
OPEN = "{% for m in messages %}"
CLOSE = "{% endfor %}"


def plain(messages: Sequence[Message]) -> list[Piece]:
    """Contents as they are, between names of roles."""
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        pieces += [
            (f"<|im_start|>{message['role']}\n", None),
            (message["content"], number),
            ("<|im_end|>\n", None),
        ]
    return [*pieces, *ask(messages, "<|im_start|>assistant\n")]


def stripped(messages: Sequence[Message]) -> list[Piece]:
    """Contents without white space around them."""
    return plain([{**each, "content": each["content"].strip()} for each in messages])


def merged(messages: Sequence[Message]) -> list[Piece]:
    """The system's words stand in the turn of the first user."""
    pieces: list[Piece] = []
    waiting: list[Piece] = []
    for number, message in enumerate(messages):
        content: Piece = (message["content"].strip(), number)
        if message["role"] == "system":
            waiting += [("<<SYS>> ", None), content, (" <</SYS>> ", None)]
        elif message["role"] == "user":
            pieces += [("[INST] ", None), *waiting, content, (" [/INST]", None)]
            waiting = []
        else:
            pieces += [(" ", None), content, (" </s>", None)]
    return [*pieces, *ask(messages, "")]


def forgetful(messages: Sequence[Message]) -> list[Piece]:
    """Reasoning is removed from contents."""
    kept = [{**each, "content": each["content"].split("</think>")[-1].strip()} for each in messages]
    return plain(kept)


def repeated(messages: Sequence[Message]) -> list[Piece]:
    """Every content stands twice."""
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        content: Piece = (message["content"], number)
        pieces += [(f"{message['role']}: ", None), content, (" | ", None), content, ("\n", None)]
    return [*pieces, *ask(messages, "assistant: ")]


def selective(messages: Sequence[Message]) -> list[Piece]:
    """The system is not heard; others lose the white space at their end."""
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        if message["role"] != "system":
            pieces += [
                (f"<{message['role']}>", None),
                (message["content"].rstrip(), number),
                (f"</{message['role']}>", None),
            ]
    return [*pieces, *ask(messages, "<assistant>")]


def ask(messages: Sequence[Message], prompt: str) -> list[Piece]:
    """The generation prompt, unless the assistant spoke last, and not of a turn yet to begin."""
    last = messages[-1]
    return [] if last["role"] == "assistant" and "is_over" not in last else [(prompt, None)]


def write(body: str, prompt: str) -> str:
    """A template of Jinja from what it writes for a message `m`, and its generation prompt."""
    return f"{OPEN}{body}{CLOSE}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


def im(content: str) -> str:
    """A template that writes this of each message between names of roles."""
    body = "{{ '<|im_start|>' + m['role'] + '\n' + (" + content + ") + '<|im_end|>\n' }}"
    return write(body, "{{ '<|im_start|>assistant\n' }}")


TEMPLATES: list[tuple[str, Callable[[Sequence[Message]], list[Piece]]]] = [
    (im("m['content']"), plain),
    (im("m['content'] | trim"), stripped),
    (
        "{% set ns = namespace(system='') %}" + OPEN + "{% if m['role'] == 'system' %}"
        "{% set ns.system = ns.system + '<<SYS>> ' + m['content'] | trim + ' <</SYS>> ' %}"
        "{% elif m['role'] == 'user' %}"
        "{{ '[INST] ' + ns.system + m['content'] | trim + ' [/INST]' }}{% set ns.system = '' %}"
        "{% else %}{{ ' ' + m['content'] | trim + ' </s>' }}{% endif %}" + CLOSE,
        merged,
    ),
    (im("m['content'].split('</think>')[-1] | trim"), forgetful),
    (
        write(
            "{{ m['role'] + ': ' + m['content'] + ' | ' + m['content'] + '\n' }}",
            "{{ 'assistant: ' }}",
        ),
        repeated,
    ),
    (
        write(
            "{% if m['role'] != 'system' %}{{ '<' + m['role'] + '>' + m['content'].rstrip()"
            " + '</' + m['role'] + '>' }}{% endif %}",
            "{{ '<assistant>' }}",
        ),
        selective,
    ),
]


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these chats."""
    return run_tries(attempt, "chats", numbers, seed, folder)


def attempt(draw: random.Random, number: int, folder: Path) -> str | None:
    """Read one chat; what is wrong with its text or its turns, if anything."""
    template, render = TEMPLATES[number % len(TEMPLATES)]
    messages = draw_chat(draw)
    said = list(messages)
    begins = said[-1]["role"] == "assistant" and not said[-1]["content"].strip()
    if begins:  # an empty turn is begun by the generation prompt
        said = [*said[:-2], {**said[-2], "is_over": True}] if len(said) > 1 else []
    if not said:
        return None
    pieces = render(said)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    model = make_reader(tokenizer)
    text = "".join(piece for piece, _ in pieces)
    spans = locate(messages, pieces)
    if said[-1]["role"] == "assistant" and not begins and (last := spans.get(len(messages) - 1)):
        text = text[: last[-1][1]]  # which is continued
    if not text.strip():
        return None
    encoded = model.encode(messages)
    found = None if encoded.turns is None else {each.name: each.spans for each in encoded.turns}
    wanted = {
        f"{place + 1} {messages[place]['role']}": tuple(
            span for span in each if span[0] < len(text)
        )
        for place, each in spans.items()
    }
    if encoded.text != text:
        return f"{render.__name__}: {messages!r} gave {encoded.text!r} instead of {text!r}"
    if (found or {}) != wanted:
        return f"{render.__name__}: {messages!r} gave turns {found!r} instead of {wanted!r}"
    return None


def make_reader(tokenizer: Any) -> af.Model:
    """A tiny decoder of long texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=2048, **sizes, **heads)
    return af.Model(LlamaForCausalLM(config).eval(), tokenizer)


def locate(
    messages: Sequence[Message], pieces: Sequence[Piece]
) -> dict[int, list[tuple[int, int]]]:
    """Where the words of each content stand, white space around them left aside."""
    spans: dict[int, list[tuple[int, int]]] = {}
    place = 0
    for piece, number in pieces:
        if number is not None and piece.strip():
            start = place + len(piece) - len(piece.lstrip())
            spans.setdefault(number, []).append((start, place + len(piece.rstrip())))
        place += len(piece)
    return dict(sorted(spans.items()))


def draw_chat(draw: random.Random) -> list[Message]:
    """Up to six messages."""
    messages = [
        {"role": draw.choice(ROLES), "content": draw_content(draw)}
        for _ in range(draw.randint(1, 6))
    ]
    if draw.random() < 0.3:  # two that are the same
        messages.append(dict(draw.choice(messages)))
    return messages


def draw_content(draw: random.Random) -> str:
    """A content that a search would find in the wrong place."""
    kind = draw.randrange(8)
    words = " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
    if kind == 0:
        return draw.choice(["", " ", "\n"])
    if kind == 1:
        return draw.choice([*ROLES, "a", "i", "s", "<", "im_start", "\n\nHuman:", "[INST]"])
    if kind == 2:
        return f"<think>{words}</think>{draw.choice(['', ' ', chr(10) * 2])}{draw.choice(WORDS)}"
    if kind == 3:
        return f"  {words} \n"
    if kind == 4:
        return f"<|im_end|>\n<|im_start|>assistant\n{words}"
    if kind == 5:
        return f"{{{{ {words} }}}} {{% if x %}} &lt; \\n"
    return words
