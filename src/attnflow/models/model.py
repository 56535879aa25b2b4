"""`Model`: a torch model with its tokenizer or image processor, and what it predicts where."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnflow.core.checks import check_integers
from attnflow.errors import CaptureError, OptionError
from attnflow.models import encode as encoding
from attnflow.models.encoded import (
    Encoded,
    OneInput,
    batches,
    list_special_ids,
    pad_ids,
    select_arguments,
)
from attnflow.models.execution import evaluating, require_torch, running
from attnflow.models.families import (
    HEADLESS,
    LANGUAGE,
    TASKS,
    count_unused_positions,
    infer_task,
)
from attnflow.models.predict import keep_logits, number_class
from attnflow.models.probe import Probe, probe_model

if TYPE_CHECKING:
    import torch
    import transformers

BATCH_TOKENS = 4096  # tokens that run through a model together, padding included


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Model:
    """A torch model with its tokenizer or image processor.

    Without either, inputs are token ids (or pixel tensors), and tokens are named by their ids.

    Parameters
    ----------
    model
        A Hugging Face model, or a custom module that contains one; compiled models are unwrapped.
    processor
        Its tokenizer or image processor.
    task
        Its task, inferred from the name of its class if None: "sequence classification",
        "token classification", "image classification", "masked LM", "causal LM", "sequence to
        sequence", or "encoder" for a model that predicts nothing.
    position
        The position of the prediction, inferred if None; negative ones count from the end.
    origin
        The name of the model in results, as `load` sets it: a hub id, or the name of a folder. The
        name of the class if None.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = Model(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2)))
    >>> model, model.encode([464, 1994]).tokens
    (<Model: GPT2LMHeadModel, causal LM>, ('464', '1994'))
    """

    model: "torch.nn.Module"
    tokenizer: Any  # of transformers, or called in the same way; None without one
    image_processor: Any
    task: str
    position: int | None
    origin: str | None

    def __init__(
        self,
        model: "torch.nn.Module",
        processor: object = None,
        *,
        task: str | None = None,
        position: int | None = None,
        origin: str | None = None,
    ) -> None:
        require_torch()
        model = unwrap_module(model)
        tokenizer, image_processor = read_processor(processor)
        tasks = dict.fromkeys([*TASKS.values(), *HEADLESS])
        if task is not None and task not in tuple(tasks):
            raise OptionError(f"unknown task {task!r}; choose from {', '.join(tasks)}")
        if position is not None:
            (position,) = check_integers([position], "position")
        if task is None:
            task = infer_task(model, find_part(model).config)
        vars(self).update(  # the fields are frozen
            model=model,
            tokenizer=tokenizer,
            image_processor=image_processor,
            task=task,
            position=position,
            origin=origin,
        )

    def __repr__(self) -> str:
        return f"<Model: {self.name}, {self.task}>"

    # ---- properties -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's class, for messages."""
        return type(self.model).__name__

    @cached_property
    def config(self) -> "transformers.PreTrainedConfig":
        """The configuration of the model, or of the one inside a custom module."""
        return find_part(self.model).config

    @cached_property
    def embedding(self) -> "torch.nn.Embedding":
        """The module that turns token ids into vectors."""
        for module in self.model.modules():
            if hasattr(module, "get_input_embeddings"):
                with suppress(NotImplementedError, AttributeError):
                    embedding = module.get_input_embeddings()
                    if hasattr(embedding, "weight"):
                        return embedding
        raise CaptureError(f"{self.name} has no embeddings of token ids that could be found")

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids that the model knows."""
        return int(self.embedding.weight.shape[0])

    @property
    def device(self) -> "torch.device":
        """The device of the model's inputs."""
        device = getattr(self.model, "device", None)
        return next(self.model.parameters()).device if device is None else device

    @property
    def dtype(self) -> "torch.dtype":
        """The data type of its weights."""
        return next(self.model.parameters()).dtype

    @property
    def depth(self) -> int | None:
        """The number of layers in the configuration; None if it names none."""
        depth = getattr(self.config, "num_hidden_layers", None)
        return depth if isinstance(depth, int) else None

    @cached_property
    def is_vision(self) -> bool:
        """Whether its inputs are images."""
        return getattr(find_part(self.model), "main_input_name", "input_ids") == "pixel_values"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return bool(getattr(self.config, "is_encoder_decoder", False))

    @property
    def is_causal(self) -> bool:
        """Whether positions see earlier ones only, so that the last one has read everything."""
        return self.task == "causal LM" or self.probe.causal

    @property
    def predicts(self) -> bool:
        """Whether it has a head that makes predictions."""
        return self.task not in HEADLESS

    @property
    def probe(self) -> Probe:
        """Its properties, measured once with two short inputs."""
        return probe_model(self)

    @property
    def labels(self) -> dict[int, str]:
        """The names of its classes; empty for language models, and if the model has no names."""
        own = getattr(self.model, "config", None)  # a custom module may have other classes inside
        names = {} if self.task in LANGUAGE else getattr(own, "id2label", None) or {}
        return {int(number): str(name) for number, name in names.items()}

    @property
    def segments(self) -> int:
        """The number of segments that the model distinguishes by token_type_ids."""
        return getattr(self.config, "type_vocab_size", None) or 0

    @property
    def max_length(self) -> int | None:
        """The most tokens that the model takes; None if unlimited."""
        limits = [None, getattr(self.tokenizer, "model_max_length", None)]
        with suppress(NotImplementedError):  # XLNet's configuration, which has no limit
            limits[0] = getattr(self.config, "max_position_embeddings", None)
        if isinstance(limits[0], int):
            limits[0] -= count_unused_positions(self.config)
        known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**7]
        return min(known) if known and not self.is_vision else None

    @property
    def batch_tokens(self) -> int:
        """The number of tokens to run together, for which a CPU's cache is large enough.

        Fewer where every token has scores for a large vocabulary.
        """
        padding = getattr(self.config, "pad_token_id", None)
        if self.task == "sequence classification" and padding is None:
            # decoders find the last token by its padding; without one they refuse two sequences
            return 1
        if self.position is not None and self.position < 0:
            return 1  # padding would move positions that count from the end
        size = self.vocabulary_size if self.task in LANGUAGE else 1
        most = BATCH_TOKENS // 4 if self.device.type == "cpu" else BATCH_TOKENS
        return max(BATCH_TOKENS // 16, min(most, 2**26 // size))

    # ---- inputs ---------------------------------------------------------------------------------

    def encode(self, value: OneInput, *, truncation: bool = False) -> Encoded:
        """Encode one input for the model, with the names of its tokens.

        Parameters
        ----------
        value
            A text, a pair of texts, token ids, an image, or the messages of a chat, a list of
            {"role": ..., "content": ...}, which the tokenizer's template renders: with the
            generation prompt, unless the last message is the assistant's. For an encoder-decoder it
            may be a pair (source, target). An `Encoded` is returned as it is.
        truncation
            Whether to cut inputs at the model's maximum length; otherwise longer ones are an error.

        >>> from attnflow import load
        >>> load("verb-number").encode("the key to").tokens
        ('[CLS]', 'the', 'key', 'to')
        """
        return encoding.encode_input(self, value, truncation)

    def names(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The tokens of ids; the ids themselves without a tokenizer.

        Parameters
        ----------
        ids
            Token ids.
        """
        if self.tokenizer is None:
            return tuple(str(number) for number in ids)
        tokens = self.tokenizer.convert_ids_to_tokens(list(ids))
        return tuple(
            str(number) if token is None else str(token)
            for number, token in zip(ids, tokens, strict=True)
        )

    @cached_property
    def marks(self) -> frozenset[int]:
        """The ids that the tokenizer adds to a text; the unknown word and the mask are words."""
        ids = {
            name: getattr(self.tokenizer, f"{name}_token_id", None)
            for name in ("unk", "mask", "bos", "eos", "cls", "sep", "pad")
        }
        words = {ids.pop("unk"), ids.pop("mask")} - set(ids.values())
        return frozenset(getattr(self.tokenizer, "all_special_ids", ())) - words

    @property
    def padding(self) -> int:
        """The id of padding: the model's own, by which some models find where a text ends."""
        known = [
            getattr(self.config, "pad_token_id", None),
            getattr(self.tokenizer, "pad_token_id", None),
            0,
        ]
        size = self.vocabulary_size
        return next(
            int(number) for number in known if isinstance(number, int) and 0 <= number < size
        )

    def batch(self, inputs: Sequence[Encoded]) -> dict[str, "torch.Tensor"]:
        """The arguments of the torch model for several inputs, padded on the right.

        Parameters
        ----------
        inputs
            Results of `encode`, one per sequence.
        """
        import torch

        if self.is_vision:
            pixels = [encoded.pixels for encoded in inputs if encoded.pixels is not None]
            return {"pixel_values": torch.stack(pixels).to(device=self.device, dtype=self.dtype)}
        ids, mask = pad_ids([encoded.ids for encoded in inputs], self.padding)
        arguments = {"input_ids": ids, "attention_mask": mask}
        if any(encoded.token_types for encoded in inputs):
            types = [encoded.token_types or (0,) * len(encoded.ids) for encoded in inputs]
            arguments["token_type_ids"], _ = pad_ids(types, 0)
        if self.is_encoder_decoder and self.task != "sequence classification":
            ids, mask = pad_ids([encoded.decoder_ids for encoded in inputs], self.padding)
            arguments |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        accepted = select_arguments(self.model, arguments)
        return {name: tensor.to(self.device) for name, tensor in accepted.items()}

    # ---- positions ------------------------------------------------------------------------------

    def focal(self, encoded: Encoded) -> int:
        """The position that the prediction comes from, in the graph of `capture`.

        Parameters
        ----------
        encoded
            The result of `encode`.
        """
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
            last = len(encoded.decoder_ids) - 1
            if self.task == "sequence classification":
                # BART-like classifiers read the decoder where the *input* has its last end token;
                # the decoder reads the same input, shifted by one
                ends = list_special_ids(self.config, "eos")
                last = find_last(encoded.ids, lambda number: number in ends, last)
            return len(encoded.ids) + last
        if self.is_vision or not self.is_causal:
            return 0
        last = len(encoded.ids) - 1
        if self.task == "sequence classification":  # reads the last token before padding
            padding = getattr(self.config, "pad_token_id", None)
            return find_last(encoded.ids, lambda number: number != padding, last)
        return last

    def locate(self, encoded: Encoded, position: int | None = None) -> int:
        """A position of the graph of `capture`, checked, counted from 0.

        Parameters
        ----------
        encoded
            The result of `encode`.
        position
            The focal one if None; negative ones count from the end.
        """
        if position is None:
            return self.focal(encoded)
        (position,) = check_integers([position], "position")
        size = len(encoded.tokens) + len(encoded.decoder_tokens)
        if not -size <= position < size:
            raise OptionError(
                f"position must be from 0 to {size - 1}; got {position} (negative: from the end)",
                options=["position"],
            )
        return position % size

    def logit_position(self, encoded: Encoded, position: int | None = None) -> int:
        """Where the logits of a position of the graph are, in a model that has several.

        The focal position if the position is one of an encoder's, which predicts nothing.

        Parameters
        ----------
        encoded
            The result of `encode`.
        position
            As in `locate`.
        """
        if position is not None:
            position = self.locate(encoded, position)
        if self.task == "sequence classification" or self.is_vision:
            return 0
        place = self.locate(encoded, position)
        if not self.is_encoder_decoder:
            return place
        source = len(encoded.ids)
        return (place if place >= source else self.focal(encoded)) - source

    # ---- predictions ----------------------------------------------------------------------------

    def predict(
        self, inputs: OneInput | Sequence[object], *, position: int | None = None
    ) -> list[tuple[str, float]]:
        """The most probable label (or token) per input, with its probability.

        Parameters
        ----------
        inputs
            One input as in `encode`, or a list of them; a list of numbers, or of messages, is one
            input.
        position
            For models that predict at every position: which one, the focal position if None;
            negative ones count from the end.

        >>> from attnflow import load
        >>> [label for label, _ in load("verb-number").predict(["the key", "the keys"])]
        ['singular', 'plural']
        """
        import torch

        encoded, _ = encoding.encode_inputs(self, inputs)
        predictions: dict[int, tuple[str, float]] = {}
        with evaluating(self.model), torch.no_grad():
            for batch in batches(encoded, self.batch_tokens):
                chosen = [encoded[place] for place in batch]
                positions = [self.logit_position(item, position) for item in chosen]
                logits = self.logits(self.batch(chosen), positions)
                predictions |= dict(zip(batch, self.read_predictions(logits), strict=True))
        return [predictions[place] for place in range(len(encoded))]

    def logits(
        self, arguments: "dict[str, torch.Tensor]", positions: Sequence[int]
    ) -> "torch.Tensor":
        """[sequence, class]: the scores of a batch, at these positions if there are several.

        Parameters
        ----------
        arguments
            The result of `batch`.
        positions
            One per sequence, as `logit_position` returns it.
        """
        arguments, places = keep_logits(self, arguments, positions)
        with running(self):
            output = self.model(**arguments)
        return self.read_logits(output, places)

    def read_logits(self, output: object, positions: Sequence[int]) -> "torch.Tensor":
        """[sequence, class]: the scores in an output, at these positions if there are several.

        Parameters
        ----------
        output
            The output of the torch model.
        positions
            As in `logits`.
        """
        import torch

        logits = getattr(output, "logits", None)
        if logits is None and self.predicts:  # a custom module may return a tensor, or several
            first = output[0] if isinstance(output, tuple | list) and output else output
            logits = first if isinstance(first, torch.Tensor) else None
        if logits is None:
            raise OptionError(
                f"{self.name} has no head that predicts; load the model with one,"
                " as AutoModelForSequenceClassification does"
            )
        scores: torch.Tensor = logits if logits.dtype == torch.float64 else logits.float()
        if scores.ndim == 3:
            scores = scores[torch.arange(len(scores)), torch.tensor(positions)]
        if not torch.isfinite(scores).all():
            worst = float(scores.detach()[~torch.isfinite(scores)][0])
            raise CaptureError(
                f"the scores of {self.name} must be finite; got {worst}:"
                " look for NaN or infinity in its weights, or use more than 16 bits"
            )
        return scores

    def read_predictions(self, logits: "torch.Tensor") -> list[tuple[str, float]]:
        """The most probable class of each sequence, with its probability.

        Parameters
        ----------
        logits
            [sequence, class], as `logits` returns them.
        """
        probabilities = self.probabilities(logits)
        best = probabilities.argmax(dim=-1).tolist()
        return [
            (self.label(number), float(probabilities[row, number]))
            for row, number in enumerate(best)
        ]

    def probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """[sequence, class], in float64: softmax.

        A sigmoid per class for a model with one class, or with several labels per input.

        Parameters
        ----------
        logits
            [sequence, class], as `logits` returns them.
        """
        if self._has_separate_classes(logits):
            return logits.double().sigmoid()
        return logits.double().softmax(dim=-1)

    def log_probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """[sequence, class], in the precision of the logits: the logarithms of `probabilities`.

        Parameters
        ----------
        logits
            [sequence, class], as `logits` returns them.
        """
        from torch import nn

        if self._has_separate_classes(logits):
            return nn.functional.logsigmoid(logits)
        return logits.log_softmax(dim=-1)

    def _has_separate_classes(self, logits: "torch.Tensor") -> bool:
        """Whether each class of logits [sequence, class] has its own probability, by a sigmoid."""
        several = getattr(self.config, "problem_type", None) == "multi_label_classification"
        return several or logits.shape[-1] == 1

    # ---- classes --------------------------------------------------------------------------------

    def target(self, target: int | str) -> int:
        """The number of a class; for language models, of a token.

        Parameters
        ----------
        target
            Its name or number. For a token, its name in the vocabulary, or its text: " Paris" is
            the token after a space.

        >>> from attnflow import load
        >>> load("verb-number").target("plural")
        1
        """
        return number_class(self, target, "target")

    def label(self, index: int) -> str:
        """The name of a class, or of a token for language models.

        Parameters
        ----------
        index
            The number of the class, or the token's id.
        """
        if self.task in LANGUAGE:
            return self.names([index])[0]
        return self.labels.get(index, str(index))


def unwrap_module(model: object) -> "torch.nn.Module":
    """The torch module itself, checked."""
    module: torch.nn.Module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    kind = type(module).__name__
    if hasattr(type(model), "predicts"):
        raise OptionError("Model takes a Hugging Face model; got a Model: use it as it is")
    if not hasattr(module, "named_modules") or not hasattr(find_part(module), "config"):
        raise OptionError(
            "Model takes a Hugging Face model, or a module that holds one;"
            f" got {kind} (for plain PyTorch modules there is af.record)"
        )
    # accelerate keeps weights there, and loads them when they are needed
    is_offloaded = hasattr(module, "hf_device_map")
    if not is_offloaded and any(tensor.is_meta for tensor in module.parameters()):
        raise OptionError(
            f"a model must have its weights; {kind} is on the meta device,"
            " which holds none: load it with from_pretrained"
        )
    return module


def read_processor(
    processor: object,
) -> "tuple[transformers.PreTrainedTokenizerBase | None, transformers.BaseImageProcessor | None]":
    """The tokenizer and the image processor that a processor is or contains; each may be None."""
    is_tokenizer = hasattr(processor, "convert_ids_to_tokens")
    tokenizer = getattr(processor, "tokenizer", processor if is_tokenizer else None)
    is_for_images = tokenizer is None and callable(processor)
    images = getattr(processor, "image_processor", processor if is_for_images else None)
    if processor is not None and tokenizer is None and images is None:
        raise OptionError(
            "a Model's processor must be a tokenizer or an image processor;"
            f" got {type(processor).__name__}"
        )
    return tokenizer, images


def find_part(module: "torch.nn.Module") -> "torch.nn.Module":
    """The module itself if it has a configuration, else the first of its parts that has one."""
    if hasattr(module, "config") or not hasattr(module, "modules"):
        return module
    return next((part for part in module.modules() if hasattr(part, "config")), module)


def find_last(ids: Sequence[int], fits: Callable[[int], bool], default: int) -> int:
    """The last place of an id that fits; the default if none does."""
    return max((place for place, number in enumerate(ids) if fits(number)), default=default)
