"""Inputs are encoded once: what `Encoded` knows, how chats are read, and that every door takes them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.models.encoded import Encoded, are_many
from tests.families import build, word_tokenizer

TEXT = "the key is lost. Here the cabinets are lost? Here is the key to the cabinets"
SHORT = "the key is lost"
# each message between its own marks; the last mark asks for an answer
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no\ntools') }}{% endif %}"
    "[MASK] {{ m['role'] }} {{ m['content'] | trim }} [SEP] {% endfor %}"
    "{% if add_generation_prompt %}[MASK] assistant{% endif %}"
)
ASKED = [
    {"role": "system", "content": " the key "},
    {"role": "user", "content": "is lost here"},
]
ANSWERED = [*ASKED, {"role": "assistant", "content": "the key"}]
MARKED = "[MASK] system the key [SEP] [MASK] user is lost here [SEP] "
RENDERED = f"{MARKED}[MASK] assistant"
CONTINUED = f"{MARKED}[MASK] assistant the key"


def make_model(kind: str, template: str = TEMPLATE) -> af.Model:
    """A tiny model with a tokenizer of words and a template of chats."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return af.Model(build(kind), tokenizer)


@pytest.fixture(scope="module")
def writer() -> af.Model:
    """A decoder that reads chats."""
    return make_model("llama")


class SlowTokenizer:
    """A tokenizer that does not know which characters its tokens are of."""

    is_fast = False

    def __init__(self) -> None:
        self.inner = word_tokenizer()
        self.inner.chat_template = TEMPLATE

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(self, *texts: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self.inner(*texts, **options)["input_ids"]}


# ---- what an encoded input knows ----------------------------------------------------------------


def test_a_text_knows_the_characters_of_its_tokens(writer: af.Model) -> None:
    encoded = writer.encode(SHORT)
    assert encoded.text == SHORT
    assert encoded.offsets == (None, (0, 3), (4, 7), (8, 10), (11, 15), None)
    assert encoded.words == (None, 0, 1, 2, 3, None)
    assert (encoded.turns, encoded.messages) == ((), ())
    assert encoded.starts.tolist() == [-1, 0, 4, 8, 11, -1]


def test_a_chat_knows_its_rendered_text_and_its_turns(writer: af.Model) -> None:
    encoded = writer.encode(ASKED)
    assert encoded.text == RENDERED
    assert encoded.offsets is not None
    pieces = [RENDERED[slice(*span)] for span in encoded.offsets if span is not None]
    assert pieces == re.findall(r"\[?\w+\]?", RENDERED)  # no token beside the template's own
    assert [
        (each.name, [RENDERED[slice(*span)] for span in each.spans]) for each in encoded.turns
    ] == [
        ("1 system", ["the key"]),
        ("2 user", ["is lost here"]),
    ]
    assert writer.encode(tuple(ASKED)) == encoded


def test_ids_pairs_and_images_have_no_text(writer: af.Model) -> None:
    import torch

    ids = writer.encode([5, 6])
    assert (ids.text, ids.offsets, ids.turns) == (None, None, ())
    pair = af.Model(build("bert"), word_tokenizer()).encode(("the key", "is lost"))
    assert (pair.text, pair.offsets) == (None, None)
    assert pair.token_types == (0, 0, 0, 0, 1, 1, 1)
    assert pair.words == (None, 0, 1, None, 2, 3, None)
    vision = af.Model(build("vit"))
    size = vision.config.image_size
    image = vision.encode(torch.zeros(3, size, size))
    assert (image.text, image.offsets, image.turns) == (None, None, ())


def test_the_source_of_an_encoder_decoder_is_its_text() -> None:
    encoded = af.Model(build("bart"), word_tokenizer()).encode((SHORT, "the key"))
    assert encoded.text == SHORT
    assert encoded.offsets is not None
    assert encoded.decoder_tokens[1:] == ("the", "key", "[SEP]")


def test_a_slow_tokenizer_gives_text_without_offsets() -> None:
    model = af.Model(build("llama"), SlowTokenizer())
    fast = make_model("llama")
    for given in (SHORT, ASKED):
        encoded = model.encode(given)
        assert encoded.ids == fast.encode(given).ids
        assert encoded.text == fast.encode(given).text
        assert (encoded.offsets, encoded.words) == (None, None)
    assert af.explain(ASKED, model=model, importance=()).segments == ()
    with pytest.raises(af.OptionError, match="need a text and a fast tokenizer"):
        af.rollout_segments(model, ASKED, segments="turns")


def test_truncation_is_the_tokenizers_own() -> None:
    model = make_model("llama")
    model.tokenizer.model_max_length = 6
    with pytest.raises(af.OptionError, match="at most 6 tokens; got 20: pass truncation=True"):
        model.encode(TEXT)
    cut = model.encode(TEXT, truncation=True)
    assert cut.tokens == ("[CLS]", "the", "key", "is", "lost", "[SEP]")
    assert cut.offsets == (None, (0, 3), (4, 7), (8, 10), (11, 15), None)
    assert cut.text == TEXT
    chat = model.encode(ASKED, truncation=True)
    assert chat.tokens == ("[MASK]", "[UNK]", "the", "key", "[SEP]", "[MASK]")
    shares = af.rollout_segments(
        model, ASKED, segments="turns", edges="contribution", truncation=True
    )
    assert shares.tokens == ("1 system", "(rest)")  # what was cut off has no positions
    assert model.encode([5, 6] * 5, truncation=True).ids == (5, 6) * 3
    assert model.encode("the key", truncation=True) == model.encode("the key")


# ---- tokenised once -----------------------------------------------------------------------------


@pytest.fixture
def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[af.Model], list[Any]]:
    """A function that makes a list of the texts a model's tokenizer is called on from now on."""

    def count(model: af.Model) -> list[Any]:
        calls: list[Any] = []
        kind = type(model.tokenizer)
        tokenize = kind.__call__

        def call(self: Any, *texts: Any, **options: Any) -> Any:
            calls.append(texts)
            return tokenize(self, *texts, **options)

        monkeypatch.setattr(kind, "__call__", call)
        return calls

    return count


STORY: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None}
ONCE: dict[str, Callable[[af.Model, Any], Any]] = {
    "encode": lambda model, value: model.encode(value),
    "encode, cut off": lambda model, value: model.encode(value, truncation=True),
    "capture": af.capture,
    "attention_graph": af.attention_graph,
    "explain": lambda model, value: af.explain(value, model=model),
    "explain, cut off": lambda model, value: af.explain(value, model=model, truncation=True),
    "rollout_rows": lambda model, value: af.rollout_rows(model, value, positions=[-1]),
    "rollout_segments": lambda model, value: af.rollout_segments(
        model, value, segments="lines", edges="contribution"
    ),
    "blank_out": af.blank_out,
    "evaluate": lambda model, value: af.evaluate(model, [value], methods=["rollout"]),
    "generate": lambda model, value: af.generate(model, value, **STORY),
}


@pytest.mark.parametrize("value", [SHORT, TEXT, ASKED], ids=["text", "long text", "chat"])
@pytest.mark.parametrize("door", ONCE)
def test_an_input_is_tokenised_once(
    door: str,
    value: Any,
    writer: af.Model,
    short_graphs: None,
    count_calls: Callable[[af.Model], list[Any]],
) -> None:
    calls = count_calls(writer)
    ONCE[door](writer, value)
    assert calls == [(RENDERED if value is ASKED else value,)]


def test_what_is_cut_off_is_tokenised_once(count_calls: Callable[[af.Model], list[Any]]) -> None:
    model = make_model("llama")
    model.tokenizer.model_max_length = 6
    calls = count_calls(model)
    af.rollout_segments(model, TEXT, segments="sentences", edges="contribution", truncation=True)
    assert len(calls) == 1


def test_a_corpus_job_of_segments_tokenises_each_text_once(
    tmp_path: Path, count_calls: Callable[[af.Model], list[Any]]
) -> None:
    model = make_model("llama")
    model.tokenizer.model_max_length = 12
    texts = [SHORT, "the key. Here it is", TEXT]  # the last is too long
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    calls = count_calls(model)
    af.explain_corpus(path, tmp_path / "out", model=model, segments="sentences")
    assert [calls.count((text,)) for text in texts] == [1, 1, 1]
    rows = af.read_corpus(tmp_path / "out").to_pylist()
    assert [row["segments"] for row in rows] == [
        [SHORT, "(rest)"],
        ["the key.", "Here it is", "(rest)"],
    ]


# ---- chats --------------------------------------------------------------------------------------


def test_a_list_of_messages_is_one_input() -> None:
    assert not are_many(ASKED)
    assert not are_many([5, 6])
    for several in ([ASKED, ASKED], [SHORT], [[5, 6]], [*ASKED, SHORT], []):
        assert are_many(several)


def test_the_generation_prompt_is_added_unless_the_assistant_spoke_last(writer: af.Model) -> None:
    assert writer.encode(ASKED).text == RENDERED
    assert writer.encode(ANSWERED).text == CONTINUED
    for chat in (ASKED, ANSWERED):
        assert af.generate(writer, chat, **STORY).prompt == writer.encode(chat).tokens
    both = af.generate(writer, [ASKED, ANSWERED], **STORY)
    assert [story.prompt for story in both] == [
        writer.encode(chat).tokens for chat in (ASKED, ANSWERED)
    ]


CHATS: dict[str, Callable[[af.Model, Any], Any]] = {
    "predict": lambda model, value: [chance for _, chance in model.predict(value)],
    "capture": lambda model, value: af.capture(model, value).weights,
    "attention_graph": lambda model, value: af.attention_graph(model, value).edges,
    "capture_mix": lambda model, value: af.capture_mix(model, value)[0].stream,
    "rollout_rows": lambda model, value: af.rollout_rows(model, value, positions=[-1]).values,
    "raw_rows": lambda model, value: af.raw_rows(model, value, positions=[-1]).values,
    "rollout_segments": lambda model, value: (
        af.rollout_segments(model, value, segments=[(0, 3)], edges="contribution").values
    ),
    "blank_out": lambda model, value: af.blank_out(model, value).values,
    "input_gradient": lambda model, value: af.input_gradient(model, value).values,
    "faithfulness": lambda model, value: [
        *af.faithfulness(model, value, range(len(model.encode(value).ids))).values()
    ],
    "explain": lambda model, value: af.explain(value, model=model, importance=()).rollout.values,
    "evaluate": lambda model, value: (
        af.evaluate(model, [value], methods=["rollout"]).examples[0].scores["rollout"]
    ),
    "evaluate, labelled": lambda model, value: (
        af.evaluate(model, [(value, "key")], methods=["rollout"]).examples[0].importance
    )["blank_out"],
    "generate": lambda model, value: af.generate(model, value, **STORY).rollout().values,
}


@pytest.mark.parametrize("door", CHATS)
def test_a_chat_is_read_alike_at_every_door(door: str, writer: af.Model) -> None:
    found = CHATS[door](writer, ASKED)
    expected = CHATS[door](writer, list(writer.encode(ASKED).ids))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("door", CHATS)
def test_a_template_that_raises_gives_one_line_at_every_door(door: str, writer: af.Model) -> None:
    chat = [{"role": "tool", "content": "the key"}]
    with pytest.raises(af.OptionError, match="template refuses these messages: no tools") as error:
        CHATS[door](writer, chat)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("door", CHATS)
@pytest.mark.parametrize("message", [{"role": "user", "content": 5}, {"role": "user"}, {}])
def test_a_message_needs_a_role_and_a_content(
    door: str, message: dict[str, Any], writer: af.Model
) -> None:
    with pytest.raises(af.OptionError, match="must have a role and a content, both texts"):
        CHATS[door](writer, [*ASKED, message])


def test_one_chat_is_not_a_list_of_examples(writer: af.Model) -> None:
    with pytest.raises(af.OptionError, match="got one chat: put it in a list"):
        af.evaluate(writer, ASKED)  # type: ignore[arg-type]
    report = af.evaluate(writer, [ASKED], methods=["rollout"])
    assert report.examples[0].text == RENDERED


def test_contents_that_only_the_template_knows_are_left_to_it() -> None:
    model = make_model(
        "llama",
        "{% for m in messages %}[MASK] {{ m['tool_calls'] or m['content'][0]['text'] }}"
        "{% endfor %}",
    )
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": "here"},
        {"role": "user", "content": [{"type": "text", "text": "the key"}]},
    ]
    encoded = model.encode(chat)
    assert encoded.tokens == ("[MASK]", "here", "[MASK]", "the", "key")
    assert [turn.name for turn in encoded.turns] == ["2 user"]


REVERSED = TEMPLATE.replace("| trim", "| reverse")


@pytest.mark.parametrize("length", ["short", "long"])
def test_turns_that_are_not_found_fail_only_where_they_are_asked_for(
    length: str, request: pytest.FixtureRequest
) -> None:
    model = make_model("llama", REVERSED)
    if length == "long":
        request.getfixturevalue("short_graphs")
    encoded = model.encode(ASKED)
    assert encoded.turns == ()
    assert encoded.messages == tuple(ASKED)
    found = af.explain(ASKED, model=model)
    assert found.text == encoded.text
    assert [group.name for group in found.segments] == (
        [] if length == "short" else [" ".join(str(encoded.text).split())]
    )
    story = af.generate(model, ASKED, **STORY)
    assert len(story.tokens) == STORY["max_new_tokens"]
    af.rollout_rows(model, ASKED, positions=[-1])
    af.rollout_segments(model, ASKED, segments="sentences", edges="attention")
    with pytest.raises(af.OptionError, match="the template changes the content of message 1"):
        af.rollout_segments(model, ASKED, segments="turns")


# ---- models by name -----------------------------------------------------------------------------


NAMED: dict[str, Callable[[Any, Any], Any]] = {
    **{name: call for name, call in CHATS.items() if name not in ("predict", "generate")},
    "faithfulness": lambda model, value: [
        *af.faithfulness(model, value, [0.0, 1.0, 3.0, 2.0]).values()
    ],
    "evaluate, labelled": lambda model, value: (
        af.evaluate(model, [(value, "plural")], methods=["rollout"]).examples[0].importance
    )["blank_out"],
}


@pytest.mark.parametrize("door", NAMED)
def test_a_name_or_a_folder_of_a_model_works_at_every_door(door: str) -> None:
    text, name = "the keys to", "verb-number"
    expected = NAMED[door](af.load(name), text)
    folder = Path(af.__file__).parent / "models" / "bundled" / "weights"
    for given in (name, folder):
        np.testing.assert_array_equal(np.asarray(NAMED[door](given, text)), np.asarray(expected))


def test_a_language_model_is_generated_from_by_its_folder(tmp_path: Path, writer: af.Model) -> None:
    writer.model.save_pretrained(tmp_path)
    writer.tokenizer.save_pretrained(tmp_path)
    found = af.generate(tmp_path, ASKED, **STORY)
    assert found.tokens == af.generate(writer, ASKED, **STORY).tokens


def test_an_encoded_input_stays_as_it_is(writer: af.Model) -> None:
    encoded = writer.encode(ASKED)
    assert writer.encode(encoded) is encoded
    assert isinstance(encoded, Encoded)
    hash(encoded)  # messages are dicts, and take no part in it
    story = af.generate(writer, encoded, **STORY)  # type: ignore[call-overload]
    assert story.prompt == encoded.tokens
