"""`Model`: a torch model with its tokenizer or image processor, and what it predicts where."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnflow.core.checks import check_integers
from attnflow.errors import CaptureError, OptionError
from attnflow.models import encoding, predicting
from attnflow.models.execution import require_torch, running
from attnflow.models.families import (
    HEADLESS,
    LANGUAGE,
    TASKS,
    count_unused_positions,
    infer_task,
)
from attnflow.models.inputs import Encoded, Input, are_many
from attnflow.models.probing import Probe, probe_model
from attnflow.models.wrapping import find_part, read_processor, unwrap_module

if TYPE_CHECKING:
    import torch

BATCH_TOKENS = 4096  # tokens that run through a model together, padding included


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Model:
    """A torch model and what turns inputs into its inputs: a tokenizer or an image processor.

    Without either, inputs are token ids (or pixel tensors), and tokens are named by their ids.

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
    origin
        The name that results give as their source, as `load` sets it: a hub id, or the name of a
        folder. The class's name if None.

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
    origin: str | None

    def __init__(
        self,
        model: Any,
        processor: Any = None,
        *,
        task: str | None = None,
        position: int | None = None,
        origin: str | None = None,
    ) -> None:
        require_torch()
        model = unwrap_module(model)
        tokenizer, image_processor = read_processor(processor)
        tasks = dict.fromkeys([*TASKS.values(), *HEADLESS])
        if task is not None and task not in tasks:
            raise OptionError(f"unknown task {task!r}; choose from {', '.join(tasks)}")
        if position is not None:
            (position,) = check_integers([position], "position")
        for name, value in {
            "model": model,
            "tokenizer": tokenizer,
            "image_processor": image_processor,
            "task": infer_task(model, find_part(model).config) if task is None else task,
            "position": position,
            "origin": origin,
        }.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<Model: {self.name}, {self.task}>"

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
        """How many token ids the model knows."""
        return int(self.embedding.weight.shape[0])

    @property
    def device(self) -> "torch.device":
        """Where the model's inputs belong."""
        device = getattr(self.model, "device", None)
        return next(self.model.parameters()).device if device is None else device

    @property
    def dtype(self) -> "torch.dtype":
        """The type of its numbers."""
        return next(self.model.parameters()).dtype

    @property
    def depth(self) -> int | None:
        """The number of layers in the configuration; None if it does not say."""
        depth = getattr(self.config, "num_hidden_layers", None)
        return depth if isinstance(depth, int) else None

    @cached_property
    def is_vision(self) -> bool:
        """Whether its inputs are images."""
        return getattr(find_part(self.model), "main_input_name", "input_ids") == "pixel_values"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder looks at an encoder."""
        return bool(getattr(self.config, "is_encoder_decoder", False))

    @property
    def is_causal(self) -> bool:
        """Whether no position sees a later one, so that the last one has read everything."""
        return self.task == "causal LM" or self.probe.causal

    @property
    def predicts(self) -> bool:
        """Whether it has a head that predicts something."""
        return self.task not in HEADLESS

    @property
    def probe(self) -> Probe:
        """What the model is made of: asked once, by two short inputs."""
        return probe_model(self)

    @property
    def labels(self) -> dict[int, str]:
        """The names of its classes; empty for language models, and where nobody named them."""
        own = getattr(self.model, "config", None)  # a user's module need not have the inner classes
        names = {} if self.task in LANGUAGE else getattr(own, "id2label", None) or {}
        return {int(number): str(name) for number, name in names.items()}

    @property
    def segments(self) -> int:
        """How many kinds of segments the model tells apart by token_type_ids."""
        return getattr(self.config, "type_vocab_size", None) or 0

    @property
    def max_length(self) -> int | None:
        """The most tokens that the model takes; None if there is no such number."""
        limits = [None, getattr(self.tokenizer, "model_max_length", None)]
        with suppress(NotImplementedError):  # XLNet's configuration, which has no limit
            limits[0] = getattr(self.config, "max_position_embeddings", None)
        if isinstance(limits[0], int):
            limits[0] -= count_unused_positions(self.config)
        known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**7]
        return min(known) if known and not self.is_vision else None

    @property
    def longest(self) -> int | None:
        """The old name of `max_length`."""
        warnings.warn("Model.longest is now Model.max_length", FutureWarning, stacklevel=2)
        return self.max_length

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

    # ---- inputs ---------------------------------------------------------------------------------

    def encode(self, value: Input, *, truncation: bool = False) -> Encoded:
        """One input as the model takes it, with the names of its tokens.

        Parameters
        ----------
        value
            A text, a pair of texts, token ids or an image; for an encoder-decoder it may be a pair
            (source, target). What is encoded already stays as it is.
        truncation
            Cut off what is longer than the model takes; otherwise it is an error.

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
        return encoding.find_marks(self.tokenizer)

    @property
    def padding(self) -> int:
        """The id of padding.

        The model's own, which looks for it itself (RoBERTa, decoders that classify).
        """
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
        """The model's own arguments for several inputs, padded on the right.

        Parameters
        ----------
        inputs
            What `encode` gave, one per sequence.
        """
        return encoding.make_batch(self, inputs)

    # ---- positions ------------------------------------------------------------------------------

    def focal(self, encoded: Encoded) -> int:
        """The position that the prediction comes from, in the graph of `capture`.

        Parameters
        ----------
        encoded
            What `encode` gave.
        """
        return predicting.find_focal(self, encoded)

    def locate(self, encoded: Encoded, position: int | None = None) -> int:
        """A position of the graph of `capture`, checked, counted from 0.

        Parameters
        ----------
        encoded
            What `encode` gave.
        position
            The focal one if None; negative ones count from the end.
        """
        return self.focal(encoded) if position is None else predicting.locate(encoded, position)

    def logit_position(self, encoded: Encoded, position: int | None = None) -> int:
        """Where the logits of a position of the graph are, in a model that has several.

        A source position of an encoder-decoder predicts nothing: then the focal one counts.

        Parameters
        ----------
        encoded
            What `encode` gave.
        position
            As in `locate`.
        """
        return predicting.find_logit_position(self, encoded, position)

    # ---- predictions ----------------------------------------------------------------------------

    def predict(
        self, inputs: "Input | list[Any]", *, position: int | None = None
    ) -> list[tuple[str, float]]:
        """The most probable label (or token) per input, with its probability.

        Parameters
        ----------
        inputs
            One input as in `encode`, or a list of them; a list of numbers is one input.
        position
            For models that predict at every position: where, instead of the focal position;
            negative ones count from the end.

        >>> from attnflow import load
        >>> [label for label, _ in load("verb-number").predict(["the key", "the keys"])]
        ['singular', 'plural']
        """
        values = inputs if are_many(inputs) else [inputs]
        encoded = [self.encode(value) for value in values]
        return predicting.predict_inputs(self, encoded, position)

    def logits(self, arguments: dict[str, Any], positions: Sequence[int]) -> "torch.Tensor":
        """[sequence, class]: a batch's scores, each at its position if every position has some.

        Parameters
        ----------
        arguments
            The model's own, as `batch` gives them.
        positions
            One per sequence, as `logit_position` gives it.
        """
        arguments, places = predicting.keep_logits(self, arguments, positions)
        with running(self):
            output = self.model(**arguments)
        return self.read_logits(output, places)

    def read_logits(self, output: Any, positions: Sequence[int]) -> "torch.Tensor":
        """[sequence, class]: the same, of what the model returned already.

        Parameters
        ----------
        output
            What the torch model returned.
        positions
            As in `logits`.
        """
        return predicting.read_logits(self, output, positions)

    def read_predictions(self, logits: "torch.Tensor") -> list[tuple[str, float]]:
        """The most probable class of each sequence, with its probability.

        Parameters
        ----------
        logits
            [sequence, class], as `logits` gives them.
        """
        probabilities = self.probabilities(logits)
        best = probabilities.argmax(dim=-1).tolist()
        return [
            (self.label(number), float(probabilities[row, number]))
            for row, number in enumerate(best)
        ]

    def probabilities(self, logits: "torch.Tensor") -> "torch.Tensor":
        """[sequence, class], in float64: softmax.

        A model with one class, or with several that may hold together: each by itself.

        Parameters
        ----------
        logits
            [sequence, class], as `logits` gives them.
        """
        several = getattr(self.config, "problem_type", None) == "multi_label_classification"
        alone = logits.shape[-1] == 1 or several
        return logits.double().sigmoid() if alone else logits.double().softmax(dim=-1)

    # ---- classes --------------------------------------------------------------------------------

    def target(self, target: int | str) -> int:
        """The number of a class; for language models, of a token.

        Parameters
        ----------
        target
            Its name or number.

        >>> from attnflow import load
        >>> load("verb-number").target("plural")
        1
        """
        return predicting.find_target(self, target)

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
