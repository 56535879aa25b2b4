"""`Model`: a torch model with its tokenizer or image processor, and what it predicts where."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attnflow.core.graph import integers
from attnflow.core.memory import is_of_memory
from attnflow.errors import AttnFlowError, CaptureError, MissingExtraError, OptionError
from attnflow.models.families import (
    HEADLESS,
    LANGUAGE,
    TASKS,
    check_settings,
    count_unused_positions,
    infer_task,
    list_image_marks,
)
from attnflow.models.inputs import (
    Encoded,
    are_many,
    batches,
    call_tokenizer,
    padded,
    patch_size,
    read_image,
    token_ids,
    tokenize,
)
from attnflow.models.listening import Probe, probe

if TYPE_CHECKING:
    import torch

BATCH_TOKENS = 4096  # tokens that run through a model together, padding included
PROBED = 5  # tokens of the inputs by which a model is asked what it is made of
PROBES: "WeakKeyDictionary[Any, Probe]" = WeakKeyDictionary()  # what each module answered


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Model:
    """A torch model and what turns inputs into its inputs: a tokenizer or an image processor.

    Without either, inputs are token ids (or pixel tensors), and tokens are called by their ids.

    Parameters
    ----------
    model
        A Hugging Face model, or a module of your own that holds one; compiled models are unwrapped.
    processor
        Its tokenizer or image processor.
    task
        What it predicts, inferred from the class's name if None: "sequence classification",
        "token classification", "image classification", "masked LM", "causal LM", "sequence to
        sequence", or "encoder" for a model that predicts nothing.
    position
        Where the prediction comes from, inferred if None; negative ones count from the end.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = Model(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2)))
    >>> model, model.encode([464, 1994]).tokens
    (<Model: GPT2LMHeadModel, causal LM>, ('464', '1994'))
    """

    model: Any
    tokenizer: Any
    image_processor: Any
    task: str
    position: int | None

    def __init__(
        self,
        model: Any,
        processor: Any = None,
        *,
        task: str | None = None,
        position: int | None = None,
    ) -> None:
        require_torch()
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        if not hasattr(model, "named_modules") or not hasattr(find_part(model), "config"):
            raise OptionError(
                "Model takes a Hugging Face model, or a module that holds one;"
                f" got {type(model).__name__} (for plain PyTorch modules there is af.record)"
            )
        if any(each.is_meta for each in model.parameters()) and not hasattr(model, "hf_device_map"):
            raise OptionError(
                f"a model must have its weights; {type(model).__name__} is on the meta device,"
                " which holds none: load it with from_pretrained"
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
                "a Model's processor must be a tokenizer or an image processor;"
                f" got {type(processor).__name__}"
            )
        if task is not None and task not in {*TASKS.values(), *HEADLESS}:
            known = ", ".join(dict.fromkeys([*TASKS.values(), *HEADLESS]))
            raise OptionError(f"unknown task {task!r}; choose from {known}")
        if position is not None:
            (position,) = integers([position], "position")
        for name, value in {
            "model": model,
            "tokenizer": tokenizer,
            "image_processor": images,
            "task": infer_task(model, find_part(model).config) if task is None else task,
            "position": position,
        }.items():
            object.__setattr__(self, name, value)

    # ---- what it is -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's class, for messages."""
        return type(self.model).__name__

    @cached_property
    def config(self) -> Any:
        """The configuration of the model, or of the one that a user's module holds."""
        return find_part(self.model).config

    @cached_property
    def embedding(self) -> Any:
        """The module that turns token ids into vectors."""
        for module in self.model.modules():
            if hasattr(module, "get_input_embeddings"):
                with suppress(NotImplementedError, AttributeError):
                    found = module.get_input_embeddings()
                    if hasattr(found, "weight"):
                        return found
        raise CaptureError(f"{self.name} has no embeddings of token ids that could be found")

    @property
    def vocabulary_size(self) -> int:
        """How many token ids the model knows."""
        return int(self.embedding.weight.shape[0])

    @property
    def device(self) -> Any:
        """Where the model's inputs belong."""
        found = getattr(self.model, "device", None)
        return next(self.model.parameters()).device if found is None else found

    @property
    def depth(self) -> int | None:
        """The number of layers that the configuration names; None if it names none."""
        found = getattr(self.config, "num_hidden_layers", None)
        return found if isinstance(found, int) else None

    @property
    def is_vision(self) -> bool:
        """Whether its inputs are images."""
        return getattr(find_part(self.model), "main_input_name", "input_ids") == "pixel_values"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder looks at an encoder."""
        return bool(getattr(self.config, "is_encoder_decoder", False))

    @property
    def predicts(self) -> bool:
        """Whether it has a head that predicts something."""
        return self.task not in HEADLESS

    @property
    def labels(self) -> dict[int, str]:
        """The names of its classes; empty for language models, and where nobody named them."""
        own = getattr(self.model, "config", None)  # a user's module need not have the inner classes
        names = {} if self.task in LANGUAGE else getattr(own, "id2label", None) or {}
        return {int(place): str(name) for place, name in names.items()}

    @property
    def segments(self) -> int:
        """How many kinds of segments the model tells apart by token_type_ids."""
        return getattr(self.config, "type_vocab_size", None) or 0

    @property
    def longest(self) -> int | None:
        """The most tokens that the model takes; None if there is no such number."""
        limits = [None, getattr(self.tokenizer, "model_max_length", None)]
        with suppress(NotImplementedError):  # XLNet's configuration, which has no limit
            limits[0] = getattr(self.config, "max_position_embeddings", None)
        if isinstance(limits[0], int):
            limits[0] -= count_unused_positions(self.config)
        known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**7]
        return min(known) if known and not self.is_vision else None

    @property
    def batch_tokens(self) -> int:
        """How many tokens to run together: as many as a CPU's cache likes.

        Fewer where every token has scores for a large vocabulary.
        """
        padding = getattr(self.config, "pad_token_id", None)
        if self.task == "sequence classification" and padding is None:
            # decoders find the last token by its padding; without one they refuse two sequences
            return 1
        if self.position is not None and self.position < 0:
            return 1  # counted from the end, which padding would move
        size = self.vocabulary_size if self.task in LANGUAGE else 1
        most = BATCH_TOKENS // 4 if self.device.type == "cpu" else BATCH_TOKENS
        return max(BATCH_TOKENS // 16, min(most, 2**26 // size))

    @property
    def probe(self) -> Probe:
        """What the model is made of: asked once, by two short inputs."""
        with probing:
            if self.model not in PROBES:
                PROBES[self.model] = self._probe()
            return PROBES[self.model]

    def _probe(self) -> Probe:
        check_settings(self.config, self.name)
        base = getattr(self.model, "base_model", self.model)  # heads may want special tokens
        for module in (base, self.model):
            arguments, changed = self._probe_inputs(module)
            try:
                with evaluating(self.model), running(self):
                    found = probe(module, arguments, changed)
            except CaptureError:
                if module is self.model:
                    raise
            else:
                break
        return found

    def _probe_inputs(self, module: Any) -> tuple[dict[str, Any], dict[int, int]]:
        """Arguments of two inputs that differ in one position; that position, by their length."""
        import torch

        if self.is_vision:
            down, across = patch_size(self.config)
            given = getattr(self.config, "image_size", None)
            high, wide = given if isinstance(given, Sequence) else (given or 2 * down,) * 2
            pixels = torch.zeros(2, getattr(self.config, "num_channels", 3), high, wide)
            pixels[1, :, :down, :across] = 1.0
            special = len(list_image_marks(self.model, self.config))
            count = special + (high // down) * (wide // across)
            return {"pixel_values": pixels.to(self.device, self.dtype)}, {count: special}
        known = {each for name in ("pad", "bos", "eos") for each in list_ids(self.config, name)}
        size = self.vocabulary_size
        order = [*range(size // 2, size), *range(size // 2)]
        free = [each for each in order if each not in known | self.marks] or order
        length = min(PROBED, self.longest or PROBED)
        first, other, *rest = (free * (length + 1))[: length + 1]
        ids = torch.tensor([[first, *rest], [other, *rest]], device=self.device)
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        changed = {length: 0}
        if self.is_encoder_decoder:
            arguments["decoder_input_ids"] = ids[:, : length - 1]
            changed[length - 1] = 0
        return self._accepted(arguments | {"use_cache": False}, module), changed

    @property
    def is_causal(self) -> bool:
        """Whether no position sees a later one, so that the last one has read everything."""
        return self.task == "causal LM" or self.probe.causal

    @property
    def dtype(self) -> Any:
        """The kind of its numbers."""
        return next(self.model.parameters()).dtype

    # ---- inputs ---------------------------------------------------------------------------------

    def encode(self, value: Any, *, truncation: bool = False) -> Encoded:
        """One input: a text, a pair of texts, token ids, an image; or a pair (source, target).

        What is encoded already stays as it is.
        """
        if isinstance(value, Encoded):
            return value
        if self.is_vision:
            return self._encode_image(value)
        target = None
        pair = isinstance(value, tuple) and len(value) == 2 and self.is_encoder_decoder
        if pair and not all(isinstance(part, int) for part in value):
            value, target = value
        ids, tokens, words, segments = self._read_tokens(value, truncation)
        decoder = self._decoder_ids(ids, target) if self.is_encoder_decoder else ()
        return Encoded(
            ids,
            tokens,
            words,
            decoder,
            self.names(decoder),
            special=tuple(each in self.marks for each in ids),
            segments=segments,
        )

    def _read_tokens(
        self, value: Any, truncation: bool
    ) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int | None, ...] | None, tuple[int, ...]]:
        """The ids of texts, or ids as they are; what they are called; words; segments."""
        texts = self._texts(value)
        found = tokenize(self.tokenizer, texts) if texts else None
        ids = tuple(token_ids(value)) if found is None else found.ids
        if not ids:
            raise OptionError("an input must have at least one token; got none")
        longest = self.longest
        if longest is not None and len(ids) > longest:
            if not truncation:
                raise OptionError(
                    f"this model takes at most {longest} tokens; got {len(ids)}:"
                    " pass truncation=True (--truncation) to cut the rest off"
                )
            found = tokenize(self.tokenizer, texts, longest) if texts else None
            ids = ids[:longest] if found is None else found.ids
        size = self.vocabulary_size
        if min(ids) < 0 or max(ids) >= size:
            worst = max(ids) if max(ids) >= size else min(ids)
            raise CaptureError(
                f"token ids of {self.name} must be from 0 to {size - 1}; got {worst}:"
                " the tokenizer does not fit the model"
            )
        if found is None:
            return ids, self.names(ids), None, ()
        segments = found.segments if self.segments > 1 else ()
        return ids, found.names or self.names(ids), found.words, segments

    def _texts(self, value: Any) -> tuple[str, ...]:
        """One text, or a pair of them, checked; none if the value is no text."""
        pair = isinstance(value, tuple) and len(value) == 2
        if pair and all(isinstance(each, str) for each in value):
            texts: tuple[str, ...] = value
            if self.segments < 2 and getattr(self.tokenizer, "sep_token", None) is None:
                raise OptionError(
                    "a pair of texts is for models with two segments;"
                    f" {self.name} reads one: join them, or put several texts in a list"
                )
        elif isinstance(value, str):
            texts = (value,)
        else:
            return ()
        if self.tokenizer is None:
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

    def _decoder_ids(self, ids: tuple[int, ...], target: Any) -> tuple[int, ...]:
        """What the decoder reads: the target, a classifier's own shifted input, or the start."""
        names = ("decoder_start_token_id", "bos_token_id")
        starts = [getattr(self.config, name, None) for name in names]
        start = next((each for each in starts if each is not None), 0)
        if not isinstance(start, int) or not 0 <= start < self.vocabulary_size:
            raise CaptureError(
                f"the decoder of {self.name} must start with a token id from 0 to"
                f" {self.vocabulary_size - 1}; its configuration says {start!r}"
            )
        if target is not None:
            found = (
                list(call_tokenizer(self.tokenizer, (), {"text_target": target})["input_ids"])
                if isinstance(target, str)
                else token_ids(target)
            )
            return (start, *found) if not found or found[0] != start else tuple(found)
        if self.task == "sequence classification":  # BART-like models shift the input themselves
            return (start, *ids[:-1])
        return (start,)

    def _encode_image(self, value: Any) -> Encoded:
        pixels = read_image(value, self.image_processor, self.config, self.name)
        down, across = patch_size(self.config)
        grid = (pixels.shape[1] // down, pixels.shape[2] // across)
        special = list_image_marks(self.model, self.config)
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

    @cached_property
    def marks(self) -> frozenset[int]:
        """The ids that the tokenizer adds to a text; the unknown word and the mask are words."""
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

    def batch(self, inputs: Sequence[Encoded]) -> dict[str, "torch.Tensor"]:
        """The model's own arguments for several inputs, padded on the right."""
        import torch

        if self.is_vision:
            pixels = [encoded.pixels for encoded in inputs if encoded.pixels is not None]
            return {"pixel_values": torch.stack(pixels).to(device=self.device, dtype=self.dtype)}
        ids, mask = padded([encoded.ids for encoded in inputs], self.padding)
        arguments = {"input_ids": ids, "attention_mask": mask}
        if any(encoded.segments for encoded in inputs):
            segments = [encoded.segments or (0,) * len(encoded.ids) for encoded in inputs]
            arguments["token_type_ids"], _ = padded(segments, 0)
        if self.is_encoder_decoder and self.task != "sequence classification":
            ids, mask = padded([encoded.decoder_ids for encoded in inputs], self.padding)
            arguments |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return {name: each.to(self.device) for name, each in self._accepted(arguments).items()}

    def _accepted(self, arguments: dict[str, Any], module: Any = None) -> dict[str, Any]:
        """Those arguments that a module's forward takes; all where it takes any."""
        known = signature((self.model if module is None else module).forward).parameters
        if any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
            optional = {"use_cache", "token_type_ids"} - set(known)
            return {name: each for name, each in arguments.items() if name not in optional}
        return {name: each for name, each in arguments.items() if name in known}

    @property
    def padding(self) -> int:
        """The id that stands where there is no token.

        The model's own, which looks for it itself (RoBERTa, decoders that classify).
        """
        known = [
            getattr(self.config, "pad_token_id", None),
            getattr(self.tokenizer, "pad_token_id", None),
            0,
        ]
        size = self.vocabulary_size
        return next(int(each) for each in known if isinstance(each, int) and 0 <= each < size)

    # ---- positions and predictions --------------------------------------------------------------

    def focal(self, encoded: Encoded) -> int:
        """The position that the prediction comes from, in the graph of `capture`."""
        if self.position is not None:
            return self.locate(encoded, self.position)
        if self.task == "masked LM":
            mask = getattr(self.tokenizer, "mask_token_id", None)
            if mask is None or mask not in encoded.ids:
                token = getattr(self.tokenizer, "mask_token", None) or "a mask token"
                raise OptionError(
                    "a masked LM is explained at its mask, and this text has none;"
                    f" put {token} in it"
                )
            return encoded.ids.index(mask)
        if self.is_encoder_decoder:
            # BART-like classifiers read the decoder where the *input* ends; its own input is the
            # same, shifted by one
            ends = [
                place
                for place, each in enumerate(encoded.ids)
                if each in list_ids(self.config, "eos")
            ]
            last = len(encoded.decoder_ids) - 1
            classifies = self.task == "sequence classification"
            return len(encoded.ids) + (ends[-1] if classifies and ends else last)
        if self.is_vision or not self.is_causal:
            return 0
        if self.task == "sequence classification":  # reads the last token that is no padding
            padding = getattr(self.config, "pad_token_id", None)
            return max(
                (place for place, each in enumerate(encoded.ids) if each != padding),
                default=len(encoded.ids) - 1,
            )
        return len(encoded.ids) - 1

    def locate(self, encoded: Encoded, position: int | None = None) -> int:
        """A position of the graph of `capture`: the focal one if None, else as given, checked.

        Negative positions count from the end.
        """
        if position is None:
            return self.focal(encoded)
        (position,) = integers([position], "position")
        size = len(encoded.tokens) + len(encoded.decoder_tokens)
        if not -size <= position < size:
            raise OptionError(f"position must be from 0 to {size - 1}; got {position}")
        return position % size

    def logit_position(self, encoded: Encoded, position: int | None = None) -> int:
        """Where the logits of a position of the graph are, in a model that has several.

        A source position of an encoder-decoder predicts nothing: then the focal one counts.
        """
        if self.task == "sequence classification" or self.is_vision:
            return 0
        place = self.locate(encoded, position)
        if not self.is_encoder_decoder:
            return place
        source = len(encoded.ids)
        return (place if place >= source else self.focal(encoded)) - source

    def predict(self, inputs: Any, *, position: int | None = None) -> list[tuple[str, float]]:
        """The most probable label (or token) of each input, with its probability.

        position: for models that predict at every position, another one than the focal one.
        """
        import torch

        encoded = [self.encode(value) for value in (inputs if are_many(inputs) else [inputs])]
        found: dict[int, tuple[str, float]] = {}
        with evaluating(self.model), torch.no_grad():
            for batch in batches(encoded, self.batch_tokens):
                chosen = [encoded[place] for place in batch]
                at = [self.logit_position(each, position) for each in chosen]
                found |= dict(
                    zip(
                        batch,
                        self.read_predictions(self.logits(self.batch(chosen), at)),
                        strict=True,
                    )
                )
        return [found[place] for place in range(len(encoded))]

    def read_predictions(self, logits: "torch.Tensor") -> list[tuple[str, float]]:
        """The most probable class of each row of logits [sequence, class], with its probability."""
        probabilities = self.probabilities(logits)
        best = probabilities.argmax(dim=-1).tolist()
        return [
            (self.label(place), float(probabilities[row, place])) for row, place in enumerate(best)
        ]

    def logits(self, arguments: dict[str, Any], positions: Sequence[int]) -> "torch.Tensor":
        """[sequence, class]: a batch's scores, each at its position if every position has some."""
        with running(self):
            output = self.model(**arguments)
        return self.read_logits(output, positions)

    def read_logits(self, output: Any, positions: Sequence[int]) -> "torch.Tensor":
        """[sequence, class]: the same, of what the model gave back already."""
        import torch

        logits = getattr(output, "logits", None)
        if logits is None and self.predicts:  # a user's module may give a tensor, or several
            first = output[0] if isinstance(output, tuple | list) and output else output
            logits = first if isinstance(first, torch.Tensor) else None
        if logits is None:
            raise OptionError(
                f"{self.name} has no head that predicts; load the model with one,"
                " as AutoModelForSequenceClassification does"
            )
        found: torch.Tensor = logits if logits.dtype == torch.float64 else logits.float()
        if found.ndim == 3:
            found = found[torch.arange(len(found)), torch.tensor(positions)]
        if not torch.isfinite(found).all():
            worst = float(found.detach()[~torch.isfinite(found)][0])
            raise CaptureError(
                f"the scores of {self.name} must be finite; got {worst}:"
                " look for NaN or infinity in its weights, or use more than 16 bits"
            )
        return found

    def probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """[sequence, class], in float64: softmax.

        A model with one class, or with several that may hold together: each by itself.
        """
        several = getattr(self.config, "problem_type", None) == "multi_label_classification"
        alone = logits.shape[-1] == 1 or several
        return logits.double().sigmoid() if alone else logits.double().softmax(dim=-1)

    def target(self, target: int | str) -> int:
        """The number of a class by its number or name; for language models, of a token."""
        labels = self.labels
        size = len(labels) or (self.vocabulary_size if self.task in LANGUAGE else None)
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
        if number < 0 or (size is not None and number >= size):
            most = "" if size is None else f" to {size - 1}"
            raise OptionError(f"target must be from 0{most} for {self.name}; got {target}")
        return number

    def _tokens_of(self, target: str) -> list[int]:
        """The ids of a token by its name in the vocabulary, or of a word within a text."""
        if self.task not in LANGUAGE or self.tokenizer is None:
            return []
        known = self.tokenizer.get_vocab()
        if target in known:
            return [int(known[target])]
        ways = [
            list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (f" {target}", target)
        ]
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return next((way for way in ways if len(way) == 1 and way[0] != unknown), [])

    def label(self, index: int) -> str:
        """The name of a class, or of a token for language models."""
        if self.task in LANGUAGE:
            return self.names([index])[0]
        return self.labels.get(index, str(index))

    def __repr__(self) -> str:
        return f"<Model: {self.name}, {self.task}>"


def find_part(model: Any) -> Any:
    """The model itself if it has a configuration, else the first of its parts that has one."""
    if hasattr(model, "config") or not hasattr(model, "modules"):
        return model
    return next((part for part in model.modules() if hasattr(part, "config")), model)


def list_ids(config: Any, name: str) -> list[int]:
    """The ids of a special token in a configuration: none, one or several."""
    found = getattr(config, f"{name}_token_id", None)
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


# ---- running ------------------------------------------------------------------------------------

probing = threading.RLock()
switching = threading.Lock()
held: dict[
    Any, int
] = {}  # modules that were in training mode, and by how many blocks they are held


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A block in which a model is in eval mode, every part of it; afterwards each is as it was.

    Blocks may overlap, in one thread or several: the last one to end switches back.
    """
    with switching:
        mine = [module for module in model.modules() if module.training or module in held]
        for module in mine:
            held[module] = held.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with switching:
            for module in mine:
                held[module] -= 1
                if not held[module]:
                    del held[module]
                    module.training = True


@contextmanager
def running(model: Model) -> Iterator[None]:
    """A block in which the model computes: whatever it raises becomes one line that names it."""
    try:
        yield
    except (AttnFlowError, MemoryError):
        raise
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        if is_of_memory(error):
            raise MemoryError(line) from error
        raise CaptureError(
            f"{model.name} failed on this input: {type(error).__name__}: {line[:300]}"
        ) from error


def require_torch() -> None:
    """Refuse early, and by the extra's name, where torch or transformers is missing."""
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
