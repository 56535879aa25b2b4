"""Parts of an answer: found by text or number, taken together, and followed through the answer.

Position m-1+i predicts token i of an answer, for a prompt of m tokens: the position before it. A
span of k tokens starts from these k positions, 1/k each. Its row is the mean of their rows, each
divided by its sum.

Rows hold a part on the prompt, P [generated, prompt], and a part on the tokens of the answer that
were generated before, A [generated, generated], strictly lower triangular. A share that is on an
earlier token goes on as that token's own row does. The sum over all ways is P + A P + A A P + ...,
which is (I - A)^-1 P; its rows sum to 1 as those of P and A together do.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_positions
from attnflow.core.text import shorten
from attnflow.errors import OptionError

if TYPE_CHECKING:
    import transformers

    from attnflow.models.chats import Range

CONTEXT = 8  # tokens before one that its text may depend on: spaces, pieces of a character


# ---- finding a part of an answer -----------------------------------------------------------------


def find_span(
    tokens: object, count: int, text: str, offsets: "Sequence[Range] | None"
) -> tuple[int, ...]:
    """The numbers of the generated tokens that are meant, ascending.

    Parameters
    ----------
    tokens
        None for all, a slice or numbers of generated tokens, or a part of the text, which stands in
        it once.
    count
        The number of generated tokens.
    text, offsets
        The generated text, and each token's characters in it; None if they are unknown.
    """
    if tokens is None:
        return tuple(range(count))
    if isinstance(tokens, str):
        return find_wording(tokens, text, offsets)
    if isinstance(tokens, slice):
        return cut_span(tokens, count)
    found = tuple(sorted(set(check_positions(tokens, count, "tokens"))))
    if not found:
        raise OptionError("a span must have at least one generated token; got none")
    return found


def cut_span(tokens: slice, count: int) -> tuple[int, ...]:
    """The tokens of a slice, which must be inside of what was generated."""
    try:
        found = tuple(range(count)[tokens])
    except (TypeError, ValueError):
        found = None
    ends = (tokens.start, tokens.stop)
    beyond = any(end is not None and not -count <= end <= count for end in ends) if found else True
    if found is None or beyond:
        raise OptionError(
            f"tokens must be a slice with at least one of the {count} generated tokens; got"
            f" {tokens}"
        )
    return found if found[0] <= found[-1] else found[::-1]


def find_wording(part: str, text: str, offsets: "Sequence[Range] | None") -> tuple[int, ...]:
    """The tokens that hold a part of a generated text, which must stand in it once."""
    if offsets is None:
        raise OptionError(
            f"the places of tokens in the generated text are unknown here; got tokens={part!r}:"
            " give their numbers, as tokens=slice(0, 5)"
        )
    times = text.count(part) if part.strip() else 0
    if times != 1:
        often = f"stands in it {times} times" if times else "does not stand in it"
        raise OptionError(
            f"a span must be a part of the generated text {shorten(text)!r}; got {part!r}, which"
            f" {often}: give the numbers of its tokens, as tokens=slice(0, 5)"
        )
    start = text.index(part) + len(part) - len(part.lstrip())
    end = text.index(part) + len(part.rstrip())
    return tuple(
        number for number, (first, last) in enumerate(offsets) if first < end and last > start
    )


def find_offsets(
    tokenizer: "transformers.PreTrainedTokenizerBase | None", ids: Sequence[int], text: str
) -> "tuple[Range, ...] | None":
    """Each token's characters in the text of all, special tokens having none; None if unknown.

    A token adds what it adds to the text of the few tokens before it. All pieces of a character
    hold it.
    """
    if tokenizer is None:
        return None

    def decode(some: Sequence[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=True))

    offsets: list[Range] = []
    end = 0
    for place, number in enumerate(ids):
        before = ids[max(0, place - CONTEXT) : place]
        start, end = end, end + len(decode([*before, number])) - len(decode(before))
        is_piece = start == end and bool(offsets) and decode([number]) != ""
        offsets.append(offsets[-1] if is_piece else (start, end))
    return tuple(offsets) if end == len(text) else None


# ---- through an answer ---------------------------------------------------------------------------


def follow_answer(shares: Floats, size: int) -> tuple[Floats, Floats]:
    """Follow rows through the tokens that were generated before, all of them, in closed form.

    Returns [generated, prompt, layer], rows that sum to 1; and [generated, generated, layer], the
    share of each row that passed through each generated token, 1 for the row's own token.

    shares: [generated, key, layer] of all generated tokens, rows that sum to 1 over prompt and
    answer. size: the number of prompt tokens.
    """
    count = len(shares)
    rows = shares.transpose(2, 0, 1)  # [layer, generated, key]
    inner = np.zeros((len(rows), count, count))
    known = rows[:, :, size : size + count]  # the last token is read by none
    inner[:, :, : known.shape[2]] = known
    passed = np.linalg.inv(np.eye(count) - inner).astype(np.float64, copy=False)
    reached = passed @ rows[:, :, :size]
    return reached.transpose(1, 2, 0), passed.transpose(1, 2, 0)
