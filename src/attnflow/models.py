"""`Model`: a torch model with its tokenizer or image processor, what it predicts, and the position that its prediction comes from."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnflow.errors import CaptureError, MissingExtraError, OptionError
from attnflow.graph import integers

if TYPE_CHECKING:
    import torch

# what a model is for, by how its class is named
TASKS = {
    "ForSequenceClassification": "sequence classification",
    "VerbNumber": "sequence classification",  # the model that ships with attnflow
    "ForTokenClassification": "token classification",
    "ForImageClassification": "image classification",
    "ForMaskedLM": "masked LM",
    "ForConditionalGeneration": "sequence to sequence",
    "MTModel": "sequence to sequence",  # MarianMTModel
    "ForCausalLM": "causal LM",
    "LMHeadModel": "causal LM",
}
EXTRA_POSITIONS = {
    "roberta",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
}  # count from padding_idx + 1


LANGUAGE = ("masked LM", "causal LM", "sequence to sequence")  # tasks whose classes are tokens
BATCH_TOKENS = 4096  # tokens that run through a model together, padding included


@dataclass(frozen=True)
class Encoded:
    """One input as the model takes it: token ids, or the pixels of an image; and how its positions are called."""

    ids: tuple[int, ...]  # of the encoder, or of a decoder that stands alone; empty for images
    tokens: tuple[str, ...]
    words: tuple[int | None, ...] | None = None
    decoder_ids: tuple[int, ...] = ()  # of a decoder with an encoder
    decoder_tokens: tuple[str, ...] = ()
    pixels: "torch.Tensor | None" = None  # [channel, height, width]
    grid: tuple[int, int] | None = None  # patches down and across
    special: tuple[
        bool, ...
    ] = ()  # whether a token is no word of the input: CLS, SEP, the start and the end of a text


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Model:
    """A Hugging Face model and what turns inputs into its inputs: a tokenizer or an image processor.

    Without either, inputs are token ids (or pixel tensors), and tokens are called by their ids.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = Model(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2)))
    >>> model, model.encode([464, 1994]).tokens
    (<Model: GPT2LMHeadModel, causal LM>, ('464', '1994'))
    """

    model: Any
    tokenizer: Any
    image_processor: Any
    task: str

    def __init__(self, model: Any, processor: Any = None) -> None:
        require_torch()
        if not hasattr(model, "config") or not hasattr(model, "named_modules"):
            raise OptionError(
                f"Model takes a Hugging Face model; got {type(model).__name__} (for plain PyTorch modules there is af.record)"
            )
        tokenizer = getattr(
            processor,
            "tokenizer",
            processor if hasattr(processor, "convert_ids_to_tokens") else None,
        )
        images = getattr(
            processor,
            "image_processor",
            processor if tokenizer is None and callable(processor) else None,
        )
        if processor is not None and tokenizer is None and images is None:
            raise OptionError(
                f"a Model's processor must be a tokenizer or an image processor; got {type(processor).__name__}"
            )
        for name, value in {
            "model": model,
            "tokenizer": tokenizer,
            "image_processor": images,
            "task": task_of(model),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The model's class, for messages."""
        return type(self.model).__name__

    @property
    def is_vision(self) -> bool:
        """Whether its inputs are images."""
        return getattr(self.model, "main_input_name", "input_ids") == "pixel_values"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder looks at an encoder."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @property
    def longest(self) -> int | None:
        """The most tokens that the model takes; None if there is no such number."""
        config = self.model.config
        limits = [
            getattr(config, "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        ]
        if limits[0] is not None and getattr(config, "model_type", "") in EXTRA_POSITIONS:
            limits[0] -= 2
        known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**7]
        return min(known) if known and not self.is_vision else None

    @cached_property
    def is_causal(self) -> bool:
        """Whether a model predicts where its input ends: language models that generate, and token classifiers on such a decoder."""
        decoders = ("GPT", "Llama", "Mistral", "Qwen", "Gemma", "Phi", "OPT", "Bloom", "Falcon")
        return self.task == "causal LM" or (
            self.task == "token classification" and self.name.startswith(decoders)
        )

    @property
    def batch_tokens(self) -> int:
        """How many tokens to run together: as many as a CPU's cache likes, fewer where every token has scores for a large vocabulary."""
        if (
            self.task == "sequence classification"
            and getattr(self.model.config, "pad_token_id", None) is None
        ):
            return 1  # decoders find the last token by its padding, and without one refuse more than one sequence
        size = self.model.get_input_embeddings().weight.shape[0] if self.task in LANGUAGE else 1
        most = BATCH_TOKENS // 4 if self.model.device.type == "cpu" else BATCH_TOKENS
        return max(BATCH_TOKENS // 16, min(most, 2**26 // size))

    def encode(self, value: Any, *, truncation: bool = False) -> Encoded:
        """One input: a text, token ids, an image; for sequence-to-sequence models also a pair (source, target)."""
        if self.is_vision:
            return self._encode_image(value)
        target = None
        if (
            self.is_encoder_decoder
            and isinstance(value, tuple)
            and len(value) == 2
            and not all(isinstance(part, int) for part in value)
        ):
            value, target = value
        ids, tokens, words = self._ids(value, truncation)
        decoder: tuple[int, ...] = ()
        if self.is_encoder_decoder:
            decoder = self._decoder_ids(ids, target)
        return Encoded(
            ids,
            tokens,
            words,
            decoder,
            self.names(decoder),
            special=tuple(each in self.marks for each in ids),
        )

    def _ids(
        self, value: Any, truncation: bool
    ) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int | None, ...] | None]:
        """The token ids of a text, or ids as they are; what they are called; and the word of each where the tokenizer knows it."""
        encoded = None
        if isinstance(value, str):
            if self.tokenizer is None:
                raise OptionError(
                    "this model has no tokenizer, so it takes token ids; got a text: give Model(model, tokenizer)"
                )
            if not value.strip():
                raise OptionError(f"a text must not be empty; got {value!r}")
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise OptionError(f"a text must be Unicode, as UTF-8 can say it; got {value!r}")
            encoded = self.tokenizer(value, verbose=False)
            found = list(encoded["input_ids"])
        else:
            found = token_ids(value)
        if not found:
            raise OptionError("an input must have at least one token; got none")
        longest = self.longest
        if longest is not None and len(found) > longest:
            if not truncation:
                raise OptionError(
                    f"this model takes at most {longest} tokens; got {len(found)}: pass truncation=True (--truncation) to cut the rest off"
                )
            if isinstance(value, str):
                encoded = self.tokenizer(value, truncation=True, max_length=longest)
                found = list(encoded["input_ids"])
            else:
                found = found[:longest]
        size = self.model.get_input_embeddings().weight.shape[0]
        if min(found) < 0 or max(found) >= size:
            worst = max(found) if max(found) >= size else min(found)
            raise CaptureError(
                f"token ids of {self.name} must be from 0 to {size - 1}; got {worst}: the tokenizer does not fit the model"
            )
        if encoded is not None and getattr(encoded, "is_fast", False):
            return tuple(found), tuple(encoded.tokens()), tuple(encoded.word_ids())
        return tuple(found), self.names(found), None

    def _decoder_ids(self, ids: tuple[int, ...], target: Any) -> tuple[int, ...]:
        """What the decoder reads: the target if one is given; a classifier's own shifted input; else the start token."""
        config = self.model.config
        starts = [
            getattr(config, "decoder_start_token_id", None),
            getattr(config, "bos_token_id", None),
            0,
        ]
        start = next(int(each) for each in starts if each is not None)
        if target is not None:
            found = (
                list(self.tokenizer(text_target=target)["input_ids"])
                if isinstance(target, str)
                else token_ids(target)
            )
            return (start, *found) if not found or found[0] != start else tuple(found)
        if (
            self.task == "sequence classification"
        ):  # BART-like models shift the input to the right themselves
            return (start, *ids[:-1])
        return (start,)

    def _encode_image(self, value: Any) -> Encoded:
        import torch

        if isinstance(value, torch.Tensor):
            pixels = value[0] if value.ndim == 4 and value.shape[0] == 1 else value
        elif self.image_processor is None:
            raise OptionError(
                f"this model has no image processor, so it takes pixel tensors; got {type(value).__name__}"
            )
        elif isinstance(value, str | os.PathLike) and not Path(value).is_file():
            raise OptionError(
                f"an image must be a PIL image, an array, a tensor or the path of a file; got {str(value)!r}, which is no file"
            )
        else:
            try:
                images = str(value) if isinstance(value, os.PathLike) else value
                pixels = self.image_processor(images=images, return_tensors="pt")["pixel_values"][0]
            except (ValueError, TypeError, AttributeError, OSError) as error:
                raise OptionError(
                    f"{self.name} takes an image (PIL, numpy or a tensor); got {type(value).__name__}: {error}"
                ) from error
        channels = getattr(self.model.config, "num_channels", 3)
        if pixels.ndim != 3 or pixels.shape[0] != channels:
            raise OptionError(
                f"an image must have shape [{channels}, height, width]; got {tuple(pixels.shape)}"
            )
        expected = getattr(self.model.config, "image_size", None)
        if (
            isinstance(expected, int)
            and pixels.shape[1:] != (expected, expected)
            and "dinov2" not in self.model.config.model_type
        ):
            raise OptionError(
                f"{self.name} takes images of {expected} x {expected}; got {pixels.shape[1]} x {pixels.shape[2]}: resize it"
            )
        patch = self.model.config.patch_size
        down, across = patch if isinstance(patch, Sequence) else (patch, patch)
        grid = (pixels.shape[1] // down, pixels.shape[2] // across)
        special = special_tokens(self.model)
        patches = [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
        marks = (*[True] * len(special), *[False] * len(patches))
        return Encoded((), (*special, *patches), pixels=pixels, grid=grid, special=marks)

    def names(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The tokens of ids; the ids themselves without a tokenizer."""
        if self.tokenizer is None:
            return tuple(str(each) for each in ids)
        tokens = self.tokenizer.convert_ids_to_tokens(list(ids))
        return tuple(
            str(each) if token is None else str(token)
            for each, token in zip(ids, tokens, strict=True)
        )

    def focal(self, encoded: Encoded, *, causal: bool) -> int:
        """The position that the prediction comes from, in the graph of `capture`."""
        if self.task == "masked LM":
            mask = getattr(self.tokenizer, "mask_token_id", None)
            if mask is None or mask not in encoded.ids:
                token = getattr(self.tokenizer, "mask_token", None) or "a mask token"
                raise OptionError(
                    f"a masked LM is explained at its mask, and this text has none; put {token} in it"
                )
            return encoded.ids.index(mask)
        if self.is_encoder_decoder:
            # BART-like classifiers read the decoder where the *input* ends; its own input is the same, shifted by one
            ends = [
                place
                for place, each in enumerate(encoded.ids)
                if each == self.model.config.eos_token_id
            ]
            last = len(encoded.decoder_ids) - 1
            return len(encoded.ids) + (
                ends[-1] if self.task == "sequence classification" and ends else last
            )
        if (
            causal and self.task == "sequence classification"
        ):  # decoders read the last token that is no padding
            padding = getattr(self.model.config, "pad_token_id", None)
            return max(
                (place for place, each in enumerate(encoded.ids) if each != padding),
                default=len(encoded.ids) - 1,
            )
        return len(encoded.tokens) - 1 if causal else 0

    @cached_property
    def marks(self) -> frozenset[int]:
        """The ids that the tokenizer adds to a text; the unknown word and the mask stand for words."""
        words = {
            getattr(self.tokenizer, "unk_token_id", None),
            getattr(self.tokenizer, "mask_token_id", None),
        }
        others = {
            getattr(self.tokenizer, f"{name}_token_id", None)
            for name in ("bos", "eos", "cls", "sep", "pad")
        }
        return frozenset(
            each
            for each in getattr(self.tokenizer, "all_special_ids", ())
            if each not in words or each in others
        )

    def predict(self, inputs: Any, *, position: int | None = None) -> list[tuple[str, float]]:
        """The most probable label (or next, or masked, token) of each input, with its probability.

        position: for models that predict at every position, another one than the focal one.
        """
        import torch

        encoded = [self.encode(value) for value in (inputs if are_many(inputs) else [inputs])]
        found: dict[int, tuple[str, float]] = {}
        with evaluating(self.model), torch.no_grad():
            for batch in batches(encoded, self.batch_tokens):
                chosen = [encoded[place] for place in batch]
                probabilities = self.probabilities(
                    self.logits(self.batch(chosen), [self.reads(each, position) for each in chosen])
                )
                best = probabilities.argmax(dim=-1)
                found |= {
                    place: (self.label(int(best[row])), float(probabilities[row, best[row]]))
                    for row, place in enumerate(batch)
                }
        return [found[place] for place in range(len(encoded))]

    def reads(self, encoded: Encoded, position: int | None = None) -> int:
        """The position of the logits that predict: the focal one if none is given, counted in the part that has logits."""
        if self.task == "sequence classification" or self.is_vision:
            return 0
        offset = len(encoded.ids) if self.is_encoder_decoder else 0
        size = len(encoded.decoder_ids if self.is_encoder_decoder else encoded.ids)
        chosen = (
            self.focal(encoded, causal=self.is_causal) - offset if position is None else position
        )
        if not 0 <= chosen < size:
            raise OptionError(f"position must be from 0 to {size - 1}; got {position}")
        return chosen

    def logits(self, arguments: dict[str, Any], positions: Sequence[int]) -> "torch.Tensor":
        """[sequence, class]: the scores of a batch, each at its position where every position has them."""
        return self.read_logits(self.model(**arguments), positions)

    def read_logits(self, output: Any, positions: Sequence[int]) -> "torch.Tensor":
        """[sequence, class]: the same, of what the model gave back already."""
        import torch

        if not hasattr(output, "logits"):
            raise OptionError(
                f"{self.name} has no head that predicts; load the model with one, as AutoModelForSequenceClassification does"
            )
        found: torch.Tensor = (
            output.logits if output.logits.dtype == torch.float64 else output.logits.float()
        )
        return (
            found[torch.arange(len(found)), torch.tensor(positions)] if found.ndim == 3 else found
        )

    def probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """[sequence, class], in float64: softmax; for a model with one class, or with several that may hold together, each by itself."""
        alone = (
            logits.shape[-1] == 1
            or getattr(self.model.config, "problem_type", None) == "multi_label_classification"
        )
        return logits.double().sigmoid() if alone else logits.double().softmax(dim=-1)

    def target(self, target: int | str) -> int:
        """The number of a class by its number or name; for language models, of a token."""
        labels = (
            {}
            if self.task in LANGUAGE
            else {int(place): str(name) for place, name in self.model.config.id2label.items()}
        )
        size = len(labels) or self.model.get_input_embeddings().weight.shape[0]
        if isinstance(target, str):
            found = [place for place, name in labels.items() if name == target] or [
                place for place, name in labels.items() if name.lower() == target.lower()
            ]
            found = found or self._tokens_of(target)
            if len(found) == 1:
                return found[0]
            if target.isdecimal() and len(target) < 10:  # no name, so a number
                return self.target(int(target))
            known = (
                f"choose from {', '.join(labels.values())}"
                if labels
                else "it must be one token of the model's vocabulary"
            )
            raise OptionError(f"unknown target {target!r}; {known}")
        (number,) = integers([target], "target")
        if not 0 <= number < size:
            raise OptionError(f"target must be from 0 to {size - 1} for {self.name}; got {target}")
        return number

    def _tokens_of(self, target: str) -> list[int]:
        """The ids of a token by its name in the vocabulary, or of a word as it stands within a text."""
        if self.task not in LANGUAGE or self.tokenizer is None:
            return []
        known = self.tokenizer.get_vocab()
        if target in known:
            return [int(known[target])]
        ways = [
            list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (f" {target}", target)
        ]
        return next(
            (
                way
                for way in ways
                if len(way) == 1 and way[0] != getattr(self.tokenizer, "unk_token_id", None)
            ),
            [],
        )

    def label(self, index: int) -> str:
        """The name of a class, or of a token for language models."""
        if self.task in LANGUAGE:
            return self.names([index])[0]
        return str(getattr(self.model.config, "id2label", {}).get(index, index))

    def batch(self, inputs: Sequence[Encoded]) -> dict[str, "torch.Tensor"]:
        """The model's own arguments for several inputs, padded on the right."""
        import torch

        device = self.model.device
        if self.is_vision:
            pixels = [encoded.pixels for encoded in inputs if encoded.pixels is not None]
            return {"pixel_values": torch.stack(pixels).to(device=device, dtype=self.model.dtype)}
        ids, mask = padded([encoded.ids for encoded in inputs], self.padding)
        arguments = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        if self.is_encoder_decoder and self.task != "sequence classification":
            ids, mask = padded([encoded.decoder_ids for encoded in inputs], self.padding)
            arguments |= {
                "decoder_input_ids": ids.to(device),
                "decoder_attention_mask": mask.to(device),
            }
        return arguments

    @property
    def padding(self) -> int:
        """The id that stands where there is no token: the model's, which looks for it itself (RoBERTa, decoders that classify)."""
        known = [
            getattr(self.model.config, "pad_token_id", None),
            getattr(self.tokenizer, "pad_token_id", None),
            0,
        ]
        size = self.model.get_input_embeddings().weight.shape[0]
        return next(int(each) for each in known if isinstance(each, int) and 0 <= each < size)

    def __repr__(self) -> str:
        return f"<Model: {self.name}, {self.task}>"


def task_of(model: Any) -> str:
    """What a model is for."""
    name = type(model).__name__
    for ending, task in TASKS.items():
        if name.endswith(ending):
            return task
    return "encoder-decoder" if getattr(model.config, "is_encoder_decoder", False) else "encoder"


def special_tokens(model: Any) -> list[str]:
    """What stands before the patches of an image."""
    names = {name for name, _ in model.named_parameters()}

    def has(word: str) -> bool:
        return any(name.endswith(word) for name in names)

    registers = getattr(model.config, "num_register_tokens", 0) or 0
    first = ["[CLS]"] if has("cls_token") or has("class_embedding") else []
    distilled = ["[DISTILL]"] if has("distillation_token") else []
    return [*first, *distilled, *(f"[REG{number}]" for number in range(registers))]


def are_many(inputs: Any) -> bool:
    """Whether this is a list of inputs; a list of token ids is one input."""
    return isinstance(inputs, list) and not (
        inputs and all(isinstance(each, int) for each in inputs)
    )


def batches(encoded: Sequence[Encoded], batch_tokens: int) -> Iterator[list[int]]:
    """Places of inputs that run together: of similar length, and not too many tokens."""
    (batch_tokens,) = integers([batch_tokens], "batch_tokens")
    if batch_tokens < 1:
        raise OptionError(f"batch_tokens must be at least 1; got {batch_tokens}")
    batch: list[int] = []
    for place in sorted(range(len(encoded)), key=lambda place: len(encoded[place].tokens)):
        if batch and (len(batch) + 1) * len(encoded[place].tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def token_ids(value: Any) -> list[int]:
    """Token ids from a list, an array or a tensor of whole numbers, of one sequence."""
    given = value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Iterable):
        value = list(value)
        if len(value) == 1 and isinstance(value[0], list):
            value = value[0]
        if all(isinstance(each, Integral) and not isinstance(each, bool) for each in value):
            return [int(each) for each in value]
        if all(isinstance(each, str) for each in value):
            raise OptionError(
                f"several texts must be a list of them; got {type(given).__name__}: put them in a list"
            )
    raise OptionError(f"an input must be a text or token ids; got {type(given).__name__}")


def padded(sequences: Sequence[Sequence[int]], padding: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Ids and mask [sequence, position], padded on the right."""
    import torch

    longest = max(map(len, sequences))
    ids = torch.tensor(
        [[*sequence, *[padding] * (longest - len(sequence))] for sequence in sequences]
    )
    mask = torch.tensor(
        [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences]
    )
    return ids, mask


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A block in which a model is in eval mode, every part of it; afterwards each part is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def require_torch() -> None:
    """Refuse early, and by the extra's name, when the libraries of models are not there; nothing but torch is loaded."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "models need torch and transformers: pip install 'attnflow[models]'"
        ) from error
    if find_spec("transformers") is None:
        raise MissingExtraError(
            "models need torch and transformers: pip install 'attnflow[models]'"
        )
