"""Inputs of a model: `Encoded`, and what tokenizers, image files and batches are made of."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.core.checks import check_count, is_integer
from attnflow.errors import AttnFlowError, CaptureError, OptionError
from attnflow.models.families import find_family

if TYPE_CHECKING:
    import PIL.Image
    import torch

WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Encoded:
    """One input as the model takes it, and the names of its positions."""

    ids: tuple[int, ...]  # of the encoder, or of a decoder that stands alone; empty for images
    tokens: tuple[str, ...]
    words: tuple[int | None, ...] | None = None  # the whitespace word of each token
    decoder_ids: tuple[int, ...] = ()  # of a decoder with an encoder
    decoder_tokens: tuple[str, ...] = ()
    pixels: "torch.Tensor | None" = None  # [channel, height, width]
    grid: tuple[int, int] | None = None  # patches down and across
    special: tuple[bool, ...] = ()  # whether a token is no word of the input: CLS, SEP, ...
    segments: tuple[int, ...] = ()  # 0 or 1 per token, where the input is a pair of texts


# One input: a text, a pair of texts, token ids, an image; or a pair (source, target). Several
# inputs are a list of them; but a list of whole numbers is one input. So functions that take both
# have the overloads list[int] -> one result, list[Any] -> a list of results, Input -> one result,
# in this order: where torch's types are not known, an image is Any, and Any takes a list too.
Image: TypeAlias = "torch.Tensor | npt.NDArray[Any] | PIL.Image.Image | os.PathLike[str]"
Input: TypeAlias = "str | tuple[Any, ...] | list[int] | Encoded | Image"


# ---- texts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """What a tokenizer made of one or two texts; padding is left out."""

    ids: tuple[int, ...]
    names: tuple[str, ...] | None  # None where the tokenizer does not say
    words: tuple[int | None, ...] | None
    segments: tuple[int, ...]  # empty for one text


def tokenize(tokenizer: Any, texts: Sequence[str], max_length: int | None = None) -> Tokens:
    """The tokens of one text, or of a pair of them; cut off after max_length tokens, if given."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    options: dict[str, Any] = {"return_offsets_mapping": True} if fast else {}
    if max_length is None:
        options["verbose"] = False  # the caller says what is too long
    else:
        options |= {"truncation": True, "max_length": max_length}
    if len(texts) > 1:
        options["return_token_type_ids"] = True
    encoded = call_tokenizer(tokenizer, texts, options)
    ids = read_ids(encoded["input_ids"])
    mask = read_ids(encoded["attention_mask"]) if "attention_mask" in encoded else [1] * len(ids)
    real = [place for place, seen in enumerate(mask) if seen]  # a tokenizer may pad by itself
    names, words = None, None
    if fast:
        tokens = encoded.tokens()
        names = tuple(tokens[place] for place in real)
        numbers = number_words(texts, encoded.sequence_ids(), encoded["offset_mapping"])
        words = tuple(numbers[place] for place in real)
    kinds = read_ids(encoded["token_type_ids"]) if len(texts) > 1 else []
    segments = tuple(kinds[place] for place in real) if kinds else ()
    return Tokens(tuple(ids[place] for place in real), names, words, segments)


def call_tokenizer(tokenizer: Any, texts: Sequence[str], options: dict[str, Any]) -> Any:
    """What the tokenizer says; or one line, whatever it raises (a panic of Rust's among it)."""
    try:
        return tokenizer(*texts, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError, AttnFlowError):
        raise
    except BaseException as error:
        line = " ".join(str(error).split())
        raise CaptureError(
            f"the tokenizer failed on this text: {type(error).__name__}: {line[:300]}"
        ) from error


def number_words(
    texts: Sequence[str], parts: Sequence[int | None], spans: Sequence[tuple[int, int]]
) -> list[int | None]:
    """The whitespace word of each token, counted over all texts; None for tokens that are no text.

    parts: the text that each token is of, None for special tokens. spans: its characters in that
    text. "don't" is one word, however many tokens it has.
    """
    starts = [[match.start() for match in WORD.finditer(text)] for text in texts]
    numbers: list[int | None] = []
    for part, (start, end) in zip(parts, spans, strict=True):
        if part is None:
            numbers.append(None)
            continue
        piece = texts[part][start:end]
        # a token may begin with the space before it
        first = start + len(piece) - len(piece.lstrip())
        word = bisect_right(starts[part], first) - 1
        numbers.append(None if not piece.strip() else word + sum(map(len, starts[:part])))
    return numbers


def read_ids(value: Any) -> list[int]:
    """Token ids from a list, an array or a tensor of whole numbers, of one sequence."""
    given = value
    if isinstance(value, bytes | bytearray | memoryview):
        raise OptionError(
            f"a text must be a str; got {type(given).__name__}: decode it, as value.decode()"
        )
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Iterable):
        value = list(value)
        if len(value) == 1 and isinstance(value[0], list):
            value = value[0]
        if all(map(is_integer, value)):
            return [int(item) for item in value]
        if all(isinstance(item, str) for item in value):
            raise OptionError(
                f"several texts must be a list of them; got {type(given).__name__}:"
                " put them in a list"
            )
    raise OptionError(f"an input must be a text or token ids; got {type(given).__name__}")


def are_many(inputs: Any) -> TypeGuard[list[Any]]:
    """Whether this is a list of inputs; a list of token ids is one input."""
    return isinstance(inputs, list) and not (
        inputs and all(isinstance(item, Integral) for item in inputs)
    )


# ---- images -------------------------------------------------------------------------------------


def read_image(value: Any, processor: Any, config: Any, name: str) -> "torch.Tensor":
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
            f" got {str(value)!r}, which is no file"
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
    expected = getattr(config, "image_size", None)
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


def restore_picture(pixels: "torch.Tensor", processor: Any) -> npt.NDArray[np.float64]:
    """The picture that a model saw, [height, width, channel] or [height, width], from 0 to 1.

    What the processor did to the colours is undone; without one, pixels beyond 0 and 1 are scaled.
    """
    values = np.nan_to_num(pixels.detach().cpu().double().numpy())  # [channel, height, width]
    mean, std = (getattr(processor, f"image_{name}", None) for name in ("mean", "std"))
    if getattr(processor, "do_normalize", False) and mean is not None and std is not None:
        values = values * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1))
    elif values.min() < 0 or values.max() > 1:
        values = (values - values.min()) / (float(np.ptp(values)) or 1.0)
    shown: npt.NDArray[np.float64] = np.clip(values, 0.0, 1.0)
    return shown.transpose(1, 2, 0) if len(shown) == 3 else shown.mean(axis=0)


def read_patch_size(config: Any) -> tuple[int, int]:
    """The height and width of a patch, in pixels."""
    patch = getattr(config, "patch_size", None)
    if not isinstance(patch, int | Sequence):
        raise CaptureError(
            f"images are read in patches of one size, and {type(config).__name__} names none"
        )
    down, across = patch if isinstance(patch, Sequence) else (patch, patch)
    return int(down), int(across)


# ---- batches ------------------------------------------------------------------------------------


def batches(encoded: Sequence[Encoded], batch_tokens: int) -> Iterator[list[int]]:
    """Places of inputs that run together: of similar length, and not too many tokens."""
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

    length = max(map(len, sequences))
    missing = [length - len(sequence) for sequence in sequences]
    pairs = list(zip(sequences, missing, strict=True))
    ids = torch.tensor([[*sequence, *[padding] * count] for sequence, count in pairs])
    mask = torch.tensor([[1] * len(sequence) + [0] * count for sequence, count in pairs])
    return ids, mask


def select_arguments(module: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that a module's forward takes; all where it takes any."""
    known = signature(module.forward).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        optional = {"use_cache", "token_type_ids"} - set(known)
        return {name: value for name, value in arguments.items() if name not in optional}
    return {name: value for name, value in arguments.items() if name in known}


def list_special_ids(config: Any, name: str) -> list[int]:
    """The ids of a special token in a configuration: none, one or several."""
    ids = getattr(config, f"{name}_token_id", None)
    return [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]


# ---- what may be given, for type checkers -------------------------------------------------------


class ArrayLike(Protocol):
    """An array, a tensor or a picture (numpy, torch, PIL): token ids, or an image."""

    @property
    def size(self) -> Any:
        """How large it is."""


# A list is several inputs, unless it is a list of token ids: so a function that takes one or
# several has two overloads, `inputs: OneInput` and `inputs: list[AnInput]`.
OneInput = str | tuple[str, str] | Sequence[int] | Encoded | os.PathLike[str] | ArrayLike
AnInput = TypeVar("AnInput", bound=OneInput)
