"""Inputs of a model: `Encoded`, their types, images and batches."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.core.checks import check_count
from attnflow.errors import CaptureError, OptionError
from attnflow.models.chats import Chat, Message, Range, Turn
from attnflow.models.families import find_family

if TYPE_CHECKING:
    import torch
    import transformers


@dataclass(frozen=True)
class Encoded:
    """One encoded input of a model, and the names of its positions."""

    ids: tuple[int, ...]  # of the encoder, or of a decoder that stands alone; empty for images
    tokens: tuple[str, ...]
    words: tuple[int | None, ...] | None = None  # the whitespace word of each token
    decoder_ids: tuple[int, ...] = ()  # of a decoder with an encoder
    decoder_tokens: tuple[str, ...] = ()
    pixels: "torch.Tensor | None" = None  # [channel, height, width]
    grid: tuple[int, int] | None = None  # patches down and across
    special: tuple[bool, ...] = ()  # whether the tokenizer added a token: CLS, SEP, ...
    token_types: tuple[int, ...] = ()  # 0 or 1 per token, where the input is a pair of texts
    # the text that was tokenised, rendered if it is a chat; None for pairs, token ids and images
    text: str | None = None
    # each token's characters in the text, None for tokens such as CLS that are not text; None as a
    # whole where they are unknown: without a text, and of slow tokenizers
    offsets: tuple[Range | None, ...] | None = None
    chat: Chat | None = field(default=None, compare=False)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of a chat; none of other inputs."""
        return () if self.chat is None else self.chat.messages

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of a chat, if the template tells their places; none of other inputs."""
        return () if self.chat is None else self.chat.turns

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[position]: the first character of each token that is not a space; -1 if not text."""
        starts = np.full(len(self.tokens), -1)
        for position, characters in enumerate(self.offsets or ()):
            if characters is not None and characters[0] < characters[1]:
                piece = (self.text or "")[slice(*characters)]
                starts[position] = characters[0] + (len(piece) - len(piece.lstrip())) % len(piece)
        return starts


# ---- one input or several ----------------------------------------------------------------------


class ArrayLike(Protocol):
    """An array, a tensor or a picture (numpy, torch, PIL): token ids, or an image."""

    @property
    def size(self) -> object:
        """How large it is."""


# One input: a text, a pair of texts, token ids, an image, the messages of a chat; or a pair
# (source, target). Several inputs are a list of them; but a list of token ids, or of messages, is
# one input: so a function that takes one or several has two overloads, `inputs: OneInput` and
# `inputs: list[AnInput]`.
OneText = str | tuple[str, str] | Sequence[Message]
OneSequence = OneText | Sequence[int]
OneInput = OneSequence | tuple[OneSequence, OneSequence] | Encoded | os.PathLike[str] | ArrayLike
AnInput = TypeVar("AnInput", bound=OneInput)


def is_chat(value: object) -> TypeGuard[Sequence[Message]]:
    """Whether this is the messages of a chat."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, dict) for item in value)


def are_many(inputs: object) -> TypeGuard[list[object]]:
    """Whether this is a list of inputs; a list of token ids, or of messages, is one input."""
    if not isinstance(inputs, list) or is_chat(inputs):
        return False
    return not inputs or not all(isinstance(item, Integral) for item in inputs)


# ---- images -------------------------------------------------------------------------------------


def read_image(
    value: object,
    processor: "transformers.BaseImageProcessor | None",
    config: object,
    name: str,
) -> "torch.Tensor":
    """The pixels [channel, height, width] of an image, a tensor, an array or a file, checked."""
    import torch

    if isinstance(value, torch.Tensor):
        pixels = value[0] if value.ndim == 4 and value.shape[0] == 1 else value
    elif processor is None:
        raise OptionError(
            "this model has no image processor, so it takes pixel tensors;"
            f" got {type(value).__name__}"
        )
    elif isinstance(value, str | os.PathLike) and not Path(value).is_file():
        raise OptionError(
            "an image must be a PIL image, an array, a tensor or the path of a file;"
            f" got {str(value)!r}, which is not a file"
        )
    else:
        try:
            images = str(value) if isinstance(value, os.PathLike) else value
            pixels = processor(images=images, return_tensors="pt")["pixel_values"][0]
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise OptionError(
                f"{name} takes an image (PIL, numpy or a tensor);"
                f" got {type(value).__name__}: {error}"
            ) from error
    channels = getattr(config, "num_channels", 3)
    if pixels.ndim != 3 or pixels.shape[0] != channels:
        raise OptionError(
            f"an image must have shape [{channels}, height, width]; got {tuple(pixels.shape)}"
        )
    expected = getattr(read_vision_config(config), "image_size", None)
    if (
        isinstance(expected, int)
        and pixels.shape[1:] != (expected, expected)
        and not find_family(config).any_image_size
    ):
        raise OptionError(
            f"{name} takes images of {expected} x {expected};"
            f" got {pixels.shape[1]} x {pixels.shape[2]}: resize it"
        )
    return pixels


def restore_picture(pixels: "torch.Tensor", processor: object) -> npt.NDArray[np.float64]:
    """The picture that a model saw, [height, width, channel] or [height, width], from 0 to 1.

    The processor's normalisation is undone; without one, pixels beyond 0 and 1 are scaled.
    """
    values = np.nan_to_num(pixels.detach().cpu().double().numpy())  # [channel, height, width]
    mean, std = (getattr(processor, f"image_{name}", None) for name in ("mean", "std"))
    if getattr(processor, "do_normalize", False) and mean is not None and std is not None:
        values = values * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1))
    elif values.min() < 0 or values.max() > 1:
        values = (values - values.min()) / (float(np.ptp(values)) or 1.0)
    shown: npt.NDArray[np.float64] = np.clip(values, 0.0, 1.0)
    return shown.transpose(1, 2, 0) if len(shown) == 3 else shown.mean(axis=0)


def read_vision_config(config: object) -> object:
    """The part of a configuration about images: models of images and texts keep it apart."""
    return getattr(config, "vision_config", config)


def read_patch_size(config: object) -> tuple[int, int]:
    """The height and width of a patch, in pixels."""
    patch = getattr(read_vision_config(config), "patch_size", None)
    if not isinstance(patch, int | Sequence):
        raise CaptureError(
            f"images are read in patches of one size, and {type(config).__name__} names none"
        )
    down, across = patch if isinstance(patch, Sequence) else (patch, patch)
    return int(down), int(across)


# ---- batches ------------------------------------------------------------------------------------


def batches(encoded: Sequence[Encoded], batch_tokens: int) -> Iterator[list[int]]:
    """Group inputs of similar length into batches of at most this many tokens; their numbers."""
    batch_tokens = check_count("batch_tokens", batch_tokens)
    batch: list[int] = []
    for place in sorted(range(len(encoded)), key=lambda place: len(encoded[place].tokens)):
        if batch and (len(batch) + 1) * len(encoded[place].tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def pad_ids(
    sequences: Sequence[Sequence[int]], padding: int
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Ids and mask [sequence, position], padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return ids, mask


def select_arguments(
    module: "torch.nn.Module", arguments: "Mapping[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """The arguments that a module's forward accepts."""
    known = signature(module.forward).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        optional = {"use_cache", "token_type_ids"} - set(known)
        return {name: value for name, value in arguments.items() if name not in optional}
    return {name: value for name, value in arguments.items() if name in known}


def list_special_ids(config: object, name: str) -> list[int]:
    """The ids of a special token in a configuration: none, one or several."""
    ids = getattr(config, f"{name}_token_id", None)
    return [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]
