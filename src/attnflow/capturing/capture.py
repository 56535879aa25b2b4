"""`capture`: the attention of a model on an input.

`run_batch` runs a model once on several inputs and cuts the attention of each out of the recorded
calls (see models/attention_calls.py); `assemble_stack` makes an `Attention` of one call per layer,
for captured inputs and for generated texts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from attnflow.capturing.follow import Finish, follow_layers
from attnflow.core.arrays import Array
from attnflow.core.attention import Attention
from attnflow.core.provenance import Source
from attnflow.errors import CaptureError, WeightsError
from attnflow.models.attention_calls import LayerWeights, collect_eager_calls, record_weights
from attnflow.models.attention_weights import check_heads, fill_empty_rows
from attnflow.models.chats import Message
from attnflow.models.encode import encode_inputs
from attnflow.models.encoded import Encoded, OneInput, batches
from attnflow.models.execution import evaluating, running, unchanged
from attnflow.models.families import READS_AHEAD, name_part
from attnflow.models.fingerprint import quick_fingerprint
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import BATCH_TOKENS, Model
from attnflow.models.predict import keep_logits

if TYPE_CHECKING:
    import torch

Arguments = dict[str, "torch.Tensor | int | bool"]  # of a model's forward


@overload
def capture(
    model: ModelLike,
    inputs: list[int] | list[Message],
    *,
    heads: str | None = ...,
    truncation: bool = ...,
    batch_tokens: int = ...,
) -> Attention: ...


@overload
def capture(
    model: ModelLike,
    inputs: list[Any],
    *,
    heads: str | None = ...,
    truncation: bool = ...,
    batch_tokens: int = ...,
) -> list[Attention]: ...


@overload
def capture(
    model: ModelLike,
    inputs: OneInput,
    *,
    heads: str | None = ...,
    truncation: bool = ...,
    batch_tokens: int = ...,
) -> Attention: ...


def capture(
    model: ModelLike,
    inputs: OneInput | list[Any],
    *,
    heads: str | None = "mean",
    truncation: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> Attention | list[Attention]:
    """Capture the attention of a model on one input, or on each of a list of inputs.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    inputs
        A text, a pair of texts, token ids, an image or the messages of a chat, or a list of them; a
        list of numbers, or of messages, is one input. For an encoder-decoder it may be a pair
        (source, target), and positions are those of the encoder, then of the decoder. Padding is
        cut away.
    heads
        "mean", "max" or "min" fuse heads while capturing, so that one matrix per layer is kept;
        None keeps every head.
    truncation
        Whether to cut inputs to the maximum length of the model.
    batch_tokens
        The number of tokens per batch.

    >>> from transformers import BertConfig, BertModel
    >>> small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(**small, intermediate_size=8))
    >>> capture(model, [[101, 7592, 102], [101, 102]], heads=None)
    [<Attention: 2 layers, 2 heads, 3 positions>, <Attention: 2 layers, 2 heads, 2 positions>]
    """
    model = open_model(model)
    check_heads(heads)
    encoded, many = encode_inputs(model, inputs, truncation)
    most = min(batch_tokens, 1) if model.batch_tokens == 1 else batch_tokens
    attentions: dict[int, Attention] = {}
    with unchanged(model.model):
        for batch in batches(encoded, most):
            passed = run_batch(model, [encoded[place] for place in batch], heads, logits=False)
            attentions |= dict(zip(batch, passed.attentions, strict=True))
    return [attentions[place] for place in range(len(encoded))] if many else attentions[0]


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass: the attention of each input, and the output of the model."""

    attentions: list[Attention]
    output: Any


def run_batch(
    model: Model,
    inputs: Sequence[Encoded],
    heads: str | None,
    finish: Finish | None = None,
    *,
    logits: bool | Sequence[int] = True,
) -> ForwardPass:
    """Run the model once on a batch, and cut each input's attention out of the recorded calls.

    finish: called with each layer and its number, as by `follow_layers`. logits: whether the scores
    of the model are wanted at every position, or where they are, as for `read_arguments`.
    """
    import torch

    check_mixers(model)
    arguments = read_arguments(model, inputs, logits=logits)
    with evaluating(model.model), torch.no_grad(), running(model):
        if finish is not None:
            with follow_layers(model, finish, heads) as calls:
                output = model.model(**arguments)
        elif model.probe.interface:
            with record_weights(model.model, heads, model.depth or 1) as calls:
                output = model.model(**arguments)
        else:
            calls, output = collect_eager_calls(model.model, arguments, heads)
    return ForwardPass(assemble_batch(model, inputs, calls, heads), output)


def assemble_batch(
    model: Model,
    inputs: Sequence[Encoded],
    calls: Sequence[LayerWeights],
    heads: str | None,
    *,
    may_be_empty: bool = False,
) -> list[Attention]:
    """The attention of each input of a batch, from the recorded calls.

    may_be_empty: whether rows may be all 0, which become the identity.
    """
    if not calls:
        raise CaptureError(f"{model.name} has no attention that could be captured")
    if not model.is_encoder_decoder and model.depth not in (None, len(calls)):
        raise CaptureError(
            f"{model.name} has {model.depth} layers, but {len(calls)} attention calls were"
            " recorded: capture would be wrong"
        )
    source = find_source(model)
    attentions = []
    for place, encoded in enumerate(inputs):
        if model.is_encoder_decoder:
            attention = assemble_pair(model, encoded, calls, place, heads, source, may_be_empty)
        else:
            attention = assemble_stack(
                model,
                calls,
                place,
                slice(0, len(encoded.tokens)),
                heads,
                tokens=encoded.tokens,
                words=encoded.words,
                grid=encoded.grid,
                source=source,
                may_be_empty=may_be_empty,
            )
        attentions.append(attention)
    return attentions


def read_arguments(
    model: Model, inputs: Sequence[Encoded], *, logits: bool | Sequence[int] = True
) -> Arguments:
    """The arguments of the model's forward, without a cache.

    logits: whether scores are wanted at every position; if not, a language model computes the last.
    Or the positions where they are wanted; `keep_logits` says where they are in the output.
    """
    arguments: Arguments = {}
    if isinstance(logits, bool):
        arguments |= model.batch(inputs)
    else:
        arguments |= keep_logits(model, model.batch(inputs), logits)[0]
    known = signature(model.model.forward).parameters
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "logits_to_keep" in known and logits is False:
        arguments["logits_to_keep"] = 1
    return arguments


def check_mixers(model: Model) -> None:
    """Refuse a model in which positions are mixed by more than the recorded attention."""
    mixer = model.probe.mixer
    if mixer is not None:
        raise CaptureError(
            f"{model.name} mixes positions by more than attention that can be recorded: {mixer};"
            " the rest alone would explain a part of the model as if it were the whole"
        )


def find_source(model: Model) -> Source:
    """The source of a model's attention: where the model was loaded from, else its class."""
    return Source(model=model.origin or model.name, fingerprint=quick_fingerprint(model))


# ---- from calls to Attention --------------------------------------------------------------------


def assemble_stack(
    model: Model,
    calls: Sequence[LayerWeights],
    place: int,
    span: slice,
    heads: str | None,
    *,
    tokens: Sequence[str] | None = None,
    words: Sequence[int | None] | None = None,
    grid: tuple[int, int] | None = None,
    source: Source | None = None,
    may_be_empty: bool = False,
) -> Attention:
    """The attention of an encoder, a decoder or a vision model: one call per layer.

    place: the index of the sequence in the batch. span: its positions, without padding. tokens,
    words, grid: as for `Attention`. source: that of the model if None. may_be_empty: as for
    `assemble_batch`.
    """
    size = span.stop - span.start
    for number, call in enumerate(calls, start=1):
        queries, keys = call.weights.shape[2:]
        if min(queries, keys) < span.stop or (model.is_vision and queries != size):
            raise CaptureError(
                f"layer {number} of {model.name} gives {queries} x {keys} weights for an input of"
                f" {size} positions, so it does not attend from each position to all of them;"
                " such attention is not supported"
            )
    # the causal mask of a language model must not have been lost: checked if True
    reads_ahead = getattr(model.config, READS_AHEAD, False)
    must_be_causal = model.task == "causal LM" and size > 1 and not reads_ahead
    shares = [call.no_token_share for call in calls]
    with name_failure(model):
        return Attention(
            stack_calls(model, calls, place, span, may_be_empty or heads == "min"),
            causal=must_be_causal or None,
            window=[
                None if call.window is None or call.window >= size else call.window
                for call in calls
            ],
            no_token_share=stack_shares(
                [None if share is None else np.asarray(share[place, span]) for share in shares]
            ),
            tokens=tokens,
            words=words,
            grid=grid,
            fused=heads,
            source=source or find_source(model),
            copy=False,
        )


def stack_shares(shares: Sequence[Array | None]) -> Array | None:
    """[layer, query], 0 where a layer has no share; None if none has."""
    known = next((share for share in shares if share is not None), None)
    if known is None:
        return None
    return np.stack([np.zeros_like(known) if share is None else share for share in shares])


def stack_calls(
    model: Model, calls: Sequence[LayerWeights], place: int, span: slice, may_be_empty: bool
) -> Array:
    """[layer, head, query, key] of one sequence.

    Not a copy, where the array that the calls were written to holds exactly these layers.
    """
    shape = (len(calls), 1, count_heads(model, calls), span.stop, span.stop)
    base = calls[0].weights.base
    if (
        base is not None
        and base.shape == shape
        and span.start == 0
        and not may_be_empty
        and all(call.weights.base is base for call in calls)
    ):
        return base[:, 0]
    stacked = np.stack([call.weights[place, :, span, span] for call in calls])
    if may_be_empty:
        fill_empty_rows(stacked)
    return stacked


def count_heads(model: Model, calls: Sequence[LayerWeights]) -> int:
    """The number of heads that all layers have, 1 if they are fused; or an error."""
    counts = dict.fromkeys(call.weights.shape[1] for call in calls)
    if len(counts) > 1:
        raise CaptureError(
            f"the layers of {model.name} differ in their number of heads"
            f" ({', '.join(map(str, counts))}), so they do not form one array;"
            " give heads='mean', 'max' or 'min'"
        )
    (count,) = counts
    return int(count)


def assemble_pair(
    model: Model,
    encoded: Encoded,
    calls: Sequence[LayerWeights],
    place: int,
    heads: str | None,
    source: Source | None = None,
    may_be_empty: bool = False,
) -> Attention:
    """The attention of an encoder-decoder: one graph over encoder and decoder positions.

    An encoder layer mixes encoder positions; a decoder layer is two graph layers, self-attention
    and then attention to the encoder. source: that of the model if None. may_be_empty: as for
    `assemble_batch`.
    """
    count_heads(model, calls)
    encoder, decoder = len(encoded.ids), len(encoded.decoder_ids)
    layers = []
    for call in calls:
        rows, columns = place_part(name_part(call.name), encoder, decoder)
        height, width = rows.stop - rows.start, columns.stop - columns.start
        weights = call.weights[place, :, :height, :width]  # without padding
        layer = embed_layer(weights, rows, columns, encoder + decoder)
        if may_be_empty or heads == "min":
            fill_empty_rows(layer)
        layers.append(layer)
    order, titles = order_layers([call.name for call in calls])
    counts = Counter(name_part(call.name) for call in calls)
    if counts["decoder"] != counts["cross"] or not counts["encoder"]:
        raise CaptureError(
            f"{model.name} made {dict(counts)} attention calls: encoder, and decoder with"
            " cross-attention, were expected"
        )
    with name_failure(model):
        return Attention(
            np.stack([layers[index] for index in order]),
            tokens=(*encoded.tokens, *encoded.decoder_tokens),
            words=extend_words(encoded),
            fused=heads,
            causal=False,
            layer_names=titles,
            source=source or find_source(model),
            copy=False,
        )


def extend_words(encoded: Encoded) -> tuple[int | None, ...] | None:
    """The word of each position; those of a decoder after an encoder have none."""
    if encoded.words is None:
        return None
    return (*encoded.words, *[None] * len(encoded.decoder_tokens))


def embed_layer(layer: Array, rows: slice, columns: slice, size: int) -> Array:
    """[..., position, position]: a layer [..., query, key] at these rows and columns.

    Positions that the layer does not mix attend to themselves.
    """
    whole = np.zeros((*layer.shape[:-2], size, size), layer.dtype)
    whole[...] = np.eye(size)
    whole[..., rows, :] = 0.0
    whole[..., rows, columns] = layer
    return whole


def place_part(part: str, encoder: int, decoder: int) -> tuple[slice, slice]:
    """The rows and columns of an attention in the graph of an encoder-decoder.

    part: as `name_part` gives it. encoder, decoder: the number of positions of each.
    """
    below, above = slice(0, encoder), slice(encoder, encoder + decoder)
    return {"encoder": (below, below), "decoder": (above, above), "cross": (above, below)}[part]


def order_layers(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """The order of an encoder-decoder's attentions in the graph, and the names of its layers.

    names: of the modules that attend, in the order of their calls.

    >>> order_layers(["decoder.0.self_attn", "decoder.0.encoder_attn", "encoder.0.self_attn"])
    ([2, 0, 1], ['encoder 1', 'decoder 1 self', 'decoder 1 cross'])
    """
    counts: Counter[str] = Counter()
    titles = []
    for name in names:
        part = name_part(name)
        counts[part] += 1
        kind = {"encoder": "", "decoder": " self", "cross": " cross"}[part]
        titles.append(f"{'encoder' if part == 'encoder' else 'decoder'} {counts[part]}{kind}")
    # stable: the encoder runs first
    order = sorted(range(len(names)), key=lambda index: not titles[index].startswith("encoder"))
    return order, [titles[index] for index in order]


@contextmanager
def name_failure(model: Model) -> Iterator[None]:
    """Within this context, weights that are not attention are an error that names the model."""
    try:
        yield
    except WeightsError as error:
        raise CaptureError(
            f"the captured weights of {model.name} are not attention: {error}"
        ) from error
