"""`blank_out`: how much a prediction changes when a token, or a group of them, is blanked out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.variant import Variant
from attnflow.analysis.importance.watch import (
    Foils,
    Targets,
    WatchedClass,
    read_watched,
    watch,
)
from attnflow.capturing.capture import find_source
from attnflow.core.checks import check_integers
from attnflow.core.groups import Group, Groups, read_groups
from attnflow.errors import OptionError
from attnflow.models.encoded import AnInput, Encoded, OneInput
from attnflow.models.load import ModelLike
from attnflow.models.model import Model


@overload
def blank_out(
    model: ModelLike,
    inputs: OneInput,
    target: Targets = None,
    *,
    foil: Foils = None,
    replacement: int | str | None = None,
    position: int | None = None,
    groups: Groups | None = None,
    signed: bool = False,
    batch_tokens: int | None = None,
) -> Importance: ...
@overload
def blank_out(
    model: ModelLike,
    inputs: list[AnInput],
    target: Targets = None,
    *,
    foil: Foils = None,
    replacement: int | str | None = None,
    position: int | None = None,
    groups: Groups | None = None,
    signed: bool = False,
    batch_tokens: int | None = None,
) -> list[Importance]: ...
def blank_out(
    model: ModelLike,
    inputs: object,
    target: Targets = None,
    *,
    foil: Foils = None,
    replacement: int | str | None = None,
    position: int | None = None,
    groups: Groups | None = None,
    signed: bool = False,
    batch_tokens: int | None = None,
) -> Importance | list[Importance]:
    """The change of the target's probability when a token is replaced by UNK, per token.

    With a foil, the change of the difference of their logits.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    inputs
        A text, a pair of texts, token ids, or the messages of a chat; or a list of them, which
        gives a list.
    target
        A class by name or number (for language models a token), one for all inputs or a list with
        one per input; the predicted one if None. Names of tokens are as in `Model.target`.
    foil
        A class to contrast the target with, one for all inputs or a list: the logit of the target
        minus that of the foil is watched. `RUNNER_UP` is the most probable class, on the unchanged
        input, other than the target.
    replacement
        A token, its id, or "attention", which takes the token out of the attention mask. If None:
        UNK, or the mask token if there is no UNK, or "attention" if there is neither. An UNK that
        also starts or ends texts (GPT-2), or that the tokenizer never produces (byte-level
        tokenizers), is not used.
    position
        As in `Model.predict`.
    groups
        "words", or lists of positions: a group is blanked out as a whole.
    signed
        Keep the sign: positive where the token speaks for the target, so that what is watched
        falls without it, negative where it speaks against it. Otherwise the absolute change.
    batch_tokens
        The number of tokens per batch; the model's default if None.

    >>> from attnflow import load
    >>> blank_out(load("verb-number"), "the keys to the old house").top(1)[0][:2]
    (2, 'keys')
    """
    watched = read_watched(model, inputs, target, "blank_out", foil)
    model, encoded = watched.model, watched.encoded
    blank = find_replacement(model, replacement)
    places = [model.logit_position(value, position) for value in encoded]
    results = measure_blank_out(
        model,
        encoded,
        places,
        watched.watch(places, batch_tokens),
        blank=blank,
        groups=groups,
        signed=signed,
        batch_tokens=batch_tokens,
    )
    return watched.unwrap(results)


def measure_blank_out(
    model: Model,
    encoded: Sequence[Encoded],
    at: Sequence[int],
    before: Sequence[WatchedClass],
    *,
    blank: int | None,
    groups: Groups | None = None,
    signed: bool = False,
    batch_tokens: int | None = None,
) -> list[Importance]:
    """Blank-out of inputs whose unchanged predictions are known.

    at: the positions where predictions are read. before: what is watched of each.
    """
    units = [list_blanked(value, groups) for value in encoded]
    variants = [
        blank_tokens(Variant(value, place, seen.target, seen.foil), unit.positions, blank)
        for value, place, seen, parts in zip(encoded, at, before, units, strict=True)
        for unit in parts
    ]
    after = iter(watch(model, variants, batch_tokens))
    results = []
    source = replace(find_source(model), method="blank_out")
    for value, seen, parts in zip(encoded, before, units, strict=True):
        drops = np.array([seen.value - next(after).value for _ in parts])
        label = seen.name(model)
        results.append(
            Importance(
                drops if signed else np.abs(drops),
                "blank_out",
                tuple(unit.name for unit in parts),
                label,
                seen.probability,
                value.words if groups is None else None,
                signed,
                None if groups is None else parts,
                replace(source, target=label),
                score=seen.difference,
            )
        )
    return results


def find_replacement(model: Model, replacement: object) -> int | None:
    """The id that replaces a blanked token; None to remove the token from the attention mask."""
    tokenizer = model.tokenizer
    if replacement == "attention":
        return None
    if replacement is None:
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is not None and unknown not in model.marks and gives_unknown(tokenizer):
            return int(unknown)
        mask = getattr(tokenizer, "mask_token_id", None)
        return None if mask is None else int(mask)
    if isinstance(replacement, str):
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        if replacement not in vocabulary:
            raise OptionError(
                "replacement must be a token of the model's vocabulary, its id, or 'attention';"
                f" got {replacement!r}"
            )
        replacement = int(vocabulary[replacement])
    (replacement,) = check_integers([replacement], "replacement")
    if not 0 <= replacement < model.vocabulary_size:
        raise OptionError(
            "replacement must be a token, 'attention', or an id from 0 to"
            f" {model.vocabulary_size - 1}; got {replacement!r}"
        )
    return replacement


def gives_unknown(tokenizer: object) -> bool:
    """Whether a tokenizer ever produces its unknown token, so that a model has learned it.

    Byte-level tokenizers have tokens for every text. Their unknown token is another one, often the
    separator of documents, which cuts off all text before it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return getattr(getattr(backend, "model", None), "unk_token", "") is not None


def list_blanked(encoded: Encoded, groups: Groups | None) -> tuple[Group, ...]:
    """The units that are blanked out one by one: tokens, or groups of positions."""
    if groups is None:
        return tuple(Group(name, (place,)) for place, name in enumerate(encoded.tokens))
    return read_groups(groups, len(encoded.tokens), tokens=encoded.tokens, words=encoded.words)


def blank_tokens(intact: Variant, positions: Sequence[int], blank: int | None) -> Variant:
    """An input with some tokens replaced, or masked out of attention if `blank` is None."""
    if blank is None:
        return replace(intact, hidden=tuple(positions), original=intact.encoded)
    gone = set(positions)
    old = enumerate(intact.encoded.ids)
    ids = tuple(blank if place in gone else token for place, token in old)
    changed = replace(intact.encoded, ids=ids)
    return replace(intact, encoded=changed, original=intact.encoded)
