"""From a text, a pair of texts, token ids or an image to `Encoded`, and to a model's arguments."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnflow.errors import CaptureError, OptionError
from attnflow.models.families import list_image_marks
from attnflow.models.inputs import (
    Encoded,
    call_tokenizer,
    pad_ids,
    read_ids,
    read_image,
    read_patch_size,
    select_arguments,
    tokenize,
)

if TYPE_CHECKING:
    import torch

    from attnflow.models.model import Model


def encode_input(model: "Model", value: Any, truncation: bool) -> Encoded:
    """One input as the model takes it; what is encoded already stays as it is."""
    if isinstance(value, Encoded):
        return value
    if model.is_vision:
        return encode_image(model, value)
    target = None
    pair = isinstance(value, tuple) and len(value) == 2 and model.is_encoder_decoder
    if pair and not all(isinstance(part, int) for part in value):
        value, target = value
    encoded = encode_tokens(model, value, truncation)
    if not model.is_encoder_decoder:
        return encoded
    decoder_ids = find_decoder_ids(model, encoded.ids, target)
    return replace(encoded, decoder_ids=decoder_ids, decoder_tokens=model.names(decoder_ids))


def encode_tokens(model: "Model", value: Any, truncation: bool) -> Encoded:
    """The tokens of one or two texts, or token ids as they are; checked."""
    texts = read_texts(model, value)
    tokens = tokenize(model.tokenizer, texts) if texts else None
    ids = tuple(read_ids(value)) if tokens is None else tokens.ids
    if not ids:
        raise OptionError("an input must have at least one token; got none")
    most = model.max_length
    if most is not None and len(ids) > most:
        if not truncation:
            raise OptionError(
                f"this model takes at most {most} tokens; got {len(ids)}:"
                " pass truncation=True to cut the rest off"
            )
        tokens = tokenize(model.tokenizer, texts, most) if texts else None
        ids = ids[:most] if tokens is None else tokens.ids
    size = model.vocabulary_size
    if min(ids) < 0 or max(ids) >= size:
        worst = max(ids) if max(ids) >= size else min(ids)
        raise CaptureError(
            f"token ids of {model.name} must be from 0 to {size - 1}; got {worst}:"
            " the tokenizer does not fit the model"
        )
    special = tuple(number in model.marks for number in ids)
    if tokens is None:
        return Encoded(ids, model.names(ids), special=special)
    return Encoded(
        ids,
        tokens.names or model.names(ids),
        tokens.words,
        special=special,
        segments=tokens.segments if model.segments > 1 else (),
    )


def read_texts(model: "Model", value: Any) -> tuple[str, ...]:
    """One text, or a pair of them, checked; empty if the value is no text."""
    pair = isinstance(value, tuple) and len(value) == 2
    if pair and all(isinstance(text, str) for text in value):
        texts: tuple[str, ...] = value
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
    for text in texts:
        if not text.strip():
            raise OptionError(f"a text must not be empty; got {text!r}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise OptionError(f"a text must be Unicode, as UTF-8 can say it; got {text!r}")
    return texts


def find_decoder_ids(model: "Model", ids: tuple[int, ...], target: Any) -> tuple[int, ...]:
    """What the decoder reads: the target, a classifier's own shifted input, or the start."""
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


def encode_image(model: "Model", value: Any) -> Encoded:
    """The pixels of an image, and the names of its patches: row and column."""
    pixels = read_image(value, model.image_processor, model.config, model.name)
    down, across = read_patch_size(model.config)
    grid = (pixels.shape[1] // down, pixels.shape[2] // across)
    marks = list_image_marks(model.model, model.config)
    patches = [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
    special = (*[True] * len(marks), *[False] * len(patches))
    return Encoded((), (*marks, *patches), pixels=pixels, grid=grid, special=special)


def find_marks(tokenizer: Any) -> frozenset[int]:
    """The ids that a tokenizer adds to a text; the unknown word and the mask are words."""
    words = {getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "mask")}
    others = {
        getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "cls", "sep", "pad")
    }
    return frozenset(
        number
        for number in getattr(tokenizer, "all_special_ids", ())
        if number not in words or number in others
    )


def make_batch(model: "Model", inputs: Sequence[Encoded]) -> dict[str, "torch.Tensor"]:
    """The model's own arguments for several inputs, padded on the right."""
    import torch

    if model.is_vision:
        pixels = [encoded.pixels for encoded in inputs if encoded.pixels is not None]
        return {"pixel_values": torch.stack(pixels).to(device=model.device, dtype=model.dtype)}
    ids, mask = pad_ids([encoded.ids for encoded in inputs], model.padding)
    arguments = {"input_ids": ids, "attention_mask": mask}
    if any(encoded.segments for encoded in inputs):
        segments = [encoded.segments or (0,) * len(encoded.ids) for encoded in inputs]
        arguments["token_type_ids"], _ = pad_ids(segments, 0)
    if model.is_encoder_decoder and model.task != "sequence classification":
        ids, mask = pad_ids([encoded.decoder_ids for encoded in inputs], model.padding)
        arguments |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    accepted = select_arguments(model.model, arguments)
    return {name: tensor.to(model.device) for name, tensor in accepted.items()}
