"""Answers: a text that is forced on a causal model after a prompt, token by token.

The token at position p is predicted at position p - 1. So an answer of k tokens after a prompt of m
is predicted at the positions m - 1 to m + k - 2, and its last token is no input: nothing that
predicts the answer reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnflow.core.checks import is_integer
from attnflow.core.text import clean_text, number_marked
from attnflow.errors import OptionError
from attnflow.models.encode import (
    call_tokenizer,
    check_ids,
    check_texts,
    encode_texts,
    mark_special,
    read_ids,
)
from attnflow.models.encoded import Encoded, OneInput
from attnflow.models.execution import evaluating
from attnflow.models.predict import Prediction, Target

if TYPE_CHECKING:
    import torch

    from attnflow.models.model import Model

AnswerText = str | Sequence[int]  # or token ids


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and where they are predicted.

    Parameters
    ----------
    text
        The answer as a text.
    ids
        Its tokens.
    prompt
        How many tokens come before it.
    encoded
        The prompt and all tokens of the answer but the last.
    """

    text: str
    ids: tuple[int, ...]
    prompt: int
    encoded: Encoded

    @property
    def span(self) -> tuple[int, ...]:
        """The positions at which its tokens are predicted."""
        return tuple(range(self.prompt - 1, self.prompt - 1 + len(self.ids)))


def check_answer(answer: object) -> None:
    """Refuse an answer that is neither a text nor token ids, or empty; no model is needed."""
    if isinstance(answer, str):
        if not answer.strip():
            raise OptionError(f"an answer must not be empty; got {answer!r}")
        check_texts([answer])
        return
    listed = answer.tolist() if isinstance(answer, np.ndarray) else answer
    if not isinstance(listed, Sequence) or not all(map(is_integer, listed)):
        raise OptionError(f"an answer must be a text or token ids; got {answer!r}")
    if not listed:
        raise OptionError("an answer must have at least one token; got none")


def check_speaks(model: "Model", what: str) -> None:
    """Refuse a model that does not predict the next token of one sequence. what: is asked for."""
    if model.task != "causal LM" or not model.is_causal or model.is_encoder_decoder:
        raise OptionError(
            f"{what} is of a causal language model, which predicts every next token; got"
            f" {model.name}: leave it out, or choose a class by target="
        )


def read_answer(
    model: "Model", value: OneInput, answer: AnswerText, *, truncation: bool = False
) -> Answer:
    """An answer after a prompt, which is a text, a chat or token ids.

    It is tokenised as the continuation of the text where that leaves the tokens of the prompt as
    they are, and alone where they would melt together.
    """
    check_speaks(model, "an answer")
    check_answer(answer)
    prompt = model.encode(value, truncation=truncation)
    if not isinstance(answer, str):
        return continue_ids(model, prompt, tuple(map(int, answer)))
    if model.tokenizer is None:
        raise OptionError(
            "this model has no tokenizer, so its answers are token ids; got a text: give"
            " Model(model, tokenizer)"
        )
    size = len(prompt.ids)
    if prompt.text is not None and not truncation:
        together = encode_texts(model, (prompt.text + answer,), False, prompt.chat)
        if len(together.ids) > size and together.ids[:size] == prompt.ids:
            return Answer(answer, together.ids[size:], size, cut_last(together))
    options: dict[str, object] = {"add_special_tokens": False, "verbose": False}
    ids = tuple(read_ids(call_tokenizer(model.tokenizer, (answer,), options)["input_ids"]))
    before, after = (decode(model, each) for each in (prompt.ids, prompt.ids + ids))
    if after != before + answer:
        raise OptionError(
            f"the tokens of an answer must follow those of its prompt; {clean_text(answer)!r} has"
            f" none that continue it by exactly this text with the tokenizer of {model.name}: begin"
            " it with a space, or give token ids"
        )
    return replace(continue_ids(model, prompt, ids), text=answer)


def refuse_beside(what: str, **options: object) -> None:
    """Refuse options that say otherwise what is explained. what: the option that says it."""
    for option, given in options.items():
        if given is not None:
            raise OptionError(
                f"{what} says what is explained, so {option} is not used; got {given!r}: leave it"
                " out",
                options=[option],
            )


def check_answer_foil(foil: object) -> str | None:
    """Refuse a foil of an answer that is no other answer."""
    if isinstance(foil, str | None):
        return foil
    raise OptionError(
        f"the foil of an answer is another answer, a text; got {foil!r}", options=["foil"]
    )


def pair_answers(
    model: "Model",
    value: OneInput,
    answer: AnswerText,
    foil: str | None = None,
    *,
    truncation: bool = False,
) -> tuple[Answer, Answer | None]:
    """An answer after a prompt, and the answer that it is contrasted with, if any."""
    said = read_answer(model, value, answer, truncation=truncation)
    if foil is None:
        return said, None
    other = read_answer(model, value, foil, truncation=truncation)
    if said.ids == other.ids:
        raise OptionError(f"a contrast is between two different answers; got {foil!r} twice")
    return said, other


def locate_span(model: "Model", encoded: Encoded, span: Sequence[int] | None) -> tuple[int, ...]:
    """The positions of a span from 0, in order; none if it is None."""
    if span is None:
        return ()
    check_speaks(model, "a span of positions")
    places = [model.locate(encoded, position) for position in span]
    if len(set(places)) < len(places):
        raise OptionError(f"the positions of a span must be distinct; got {list(span)}")
    return tuple(sorted(places))


def continue_ids(model: "Model", prompt: Encoded, ids: tuple[int, ...]) -> Answer:
    """An answer of token ids after a prompt, whose text ends with the prompt."""
    together = prompt.ids + ids
    check_ids(model, together, truncation=False)
    names, left = model.names(ids), len(ids) - 1
    words = prompt.words
    if words is not None:
        first = 1 + max((word for word in words if word is not None), default=-1)
        words = (*words, *(first + word for word in number_marked(names[:-1])))
    encoded = replace(
        prompt,
        ids=together[:-1],
        tokens=(*prompt.tokens, *names[:-1]),
        words=words,
        special=(*prompt.special, *mark_special(model, ids)[:-1]),
        token_types=(*prompt.token_types, *[1] * left) if prompt.token_types else (),
        offsets=None if prompt.offsets is None else (*prompt.offsets, *[None] * left),
    )
    return Answer(decode(model, ids), ids, len(prompt.ids), encoded)


def decode(model: "Model", ids: Sequence[int]) -> str:
    """The text of tokens, special ones included; their numbers without a tokenizer."""
    if model.tokenizer is None:
        return " ".join(model.names(ids))
    return str(model.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


# ---- how probable it is --------------------------------------------------------------------------


class AnswerScore(NamedTuple):
    """What a model makes of an answer."""

    logits: float  # the sum over its tokens
    probability: float  # of all its tokens, each after those before it


def score_answer(model: "Model", logits: "torch.Tensor", answer: Answer) -> AnswerScore:
    """The score of an answer. logits: [token, class], where its tokens are predicted."""
    rows = range(len(answer.ids))
    chosen = logits.double()[rows, answer.ids]
    spoken = model.log_probabilities(logits.double())[rows, answer.ids]
    return AnswerScore(float(chosen.sum()), float(spoken.sum().exp()))


def predict_answer(
    model: "Model", output: object, answer: Answer, foil: Answer | None = None
) -> Prediction:
    """The answer as a prediction, with the probability of all its tokens.

    output: of the model on the answer. Its foil, if any, takes a forward pass of its own.
    """
    import torch

    scored = score_answer(model, model.read_logits(output, answer.span), answer)
    target = Target(answer.ids[-1], answer.text, scored.probability)
    if foil is None:
        return Prediction(answer.text, scored.probability, target)
    with evaluating(model.model), torch.no_grad():
        logits = model.logits(model.batch([foil.encoded]), foil.span)
    other = score_answer(model, logits, foil)
    return Prediction(
        answer.text,
        scored.probability,
        target,
        Target(foil.ids[-1], foil.text, other.probability),
        scored.logits - other.logits,
    )


# ---- tokens --------------------------------------------------------------------------------------


def cut_last(encoded: Encoded) -> Encoded:
    """An input without its last token."""
    return replace(
        encoded,
        ids=encoded.ids[:-1],
        tokens=encoded.tokens[:-1],
        words=None if encoded.words is None else encoded.words[:-1],
        special=encoded.special[:-1],
        offsets=None if encoded.offsets is None else encoded.offsets[:-1],
    )
