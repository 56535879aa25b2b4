"""`capture`: a model and an input in, `Attention` out.

`run_batch` runs a model once on several inputs and cuts each one's attention out of the recorded
calls (see listening.py); `assemble_stack` makes an `Attention` of one call per layer, for captured
inputs and for generated texts alike.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from attnflow.capturing.following import Finish, follow_layers
from attnflow.core.attention import Attention
from attnflow.core.provenance import Source
from attnflow.errors import CaptureError, WeightsError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import READS_AHEAD, name_part
from attnflow.models.fingerprint import quick_fingerprint
from attnflow.models.inputs import Encoded, Input, are_many, batches
from attnflow.models.listening import Call, collect_eager_calls, listening
from attnflow.models.model import BATCH_TOKENS, Model
from attnflow.models.weighing import check_heads, fill_empty_rows

if TYPE_CHECKING:
    import torch


@overload
def capture(
    model: "Model | torch.nn.Module",
    inputs: list[int],
    *,
    heads: str | None = "mean",
    truncation: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> Attention: ...


@overload
def capture(
    model: "Model | torch.nn.Module",
    inputs: list[Any],
    *,
    heads: str | None = "mean",
    truncation: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Attention]: ...


@overload
def capture(
    model: "Model | torch.nn.Module",
    inputs: Input,
    *,
    heads: str | None = "mean",
    truncation: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> Attention: ...


def capture(
    model: "Model | torch.nn.Module",
    inputs: "Input | list[Any]",
    *,
    heads: str | None = "mean",
    truncation: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> Attention | list[Attention]:
    """The attention of a model on one input, or a list of them on a list of inputs.

    Parameters
    ----------
    model
        A `Model`, or a Hugging Face model that takes token ids.
    inputs
        A text, a pair of texts, token ids or an image, or a list of such; a list of numbers is one
        input. For an encoder-decoder it may be a pair (source, target), and positions are those of
        the encoder, then of the decoder. Padding never enters.
    heads
        "mean", "max" or "min" fuse while capturing, so that one matrix per layer is kept; None
        keeps every head.
    truncation
        Cut off what is longer than the model takes.
    batch_tokens
        How many tokens run through the model together.

    >>> from transformers import BertConfig, BertModel
    >>> small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(**small, intermediate_size=8))
    >>> capture(model, [[101, 7592, 102], [101, 102]], heads=None)
    [<Attention: 2 layers, 2 heads, 3 positions>, <Attention: 2 layers, 2 heads, 2 positions>]
    """
    model = model if isinstance(model, Model) else Model(model)
    check_heads(heads)
    values = inputs if are_many(inputs) else [inputs]
    encoded = [model.encode(value, truncation=truncation) for value in values]
    most = min(batch_tokens, 1) if model.batch_tokens == 1 else batch_tokens
    attentions: dict[int, Attention] = {}
    for batch in batches(encoded, most):
        captured = capture_batch(model, [encoded[place] for place in batch], heads)
        attentions |= dict(zip(batch, captured, strict=True))
    return (
        [attentions[place] for place in range(len(encoded))] if values is inputs else attentions[0]
    )


def capture_batch(model: Model, inputs: Sequence[Encoded], heads: str | None) -> list[Attention]:
    """The attention of each input of a batch."""
    return run_batch(model, inputs, heads, logits=False).attentions


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass: the attention of each input, and what the model gave back."""

    attentions: list[Attention]
    output: Any


def run_batch(
    model: Model,
    inputs: Sequence[Encoded],
    heads: str | None,
    finish: Finish | None = None,
    *,
    logits: bool = True,
) -> ForwardPass:
    """Run the model once on a batch, and cut each input's attention out of the recorded calls.

    finish: told of each layer, with what it mixed, as `follow_layers` does. logits: whether the
    model's scores are wanted at every position.
    """
    import torch

    check_mixers(model)
    arguments = read_arguments(model, inputs, logits=logits)
    with evaluating(model.model), torch.no_grad(), running(model):
        if finish is not None:
            with follow_layers(model, finish, heads) as calls:
                output = model.model(**arguments)
        elif model.probe.interface:
            with listening(model.model, heads, model.depth or 1) as calls:
                output = model.model(**arguments)
        else:
            calls, output = collect_eager_calls(model.model, arguments, heads)
    if not calls:
        raise CaptureError(f"{model.name} made no attention that could be captured: it has none")
    source = find_source(model)
    if model.is_encoder_decoder:
        return ForwardPass(
            [
                assemble_pair(model, encoded, calls, place, heads, source=source)
                for place, encoded in enumerate(inputs)
            ],
            output,
        )
    check_layers(model, calls)
    return ForwardPass(
        [
            assemble_stack(
                model,
                calls,
                place,
                slice(0, len(encoded.tokens)),
                heads,
                tokens=encoded.tokens,
                words=encoded.words,
                grid=encoded.grid,
                source=source,
            )
            for place, encoded in enumerate(inputs)
        ],
        output,
    )


def read_arguments(
    model: Model, inputs: Sequence[Encoded], *, logits: bool = True
) -> dict[str, Any]:
    """What the model is called with; nothing follows, so that it needs no cache.

    logits: whether its scores are wanted at every position; else a language model gives the last.
    """
    arguments: dict[str, Any] = dict(model.batch(inputs))
    known = signature(model.model.forward).parameters
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "logits_to_keep" in known and not logits:
        arguments["logits_to_keep"] = 1
    return arguments


def check_mixers(model: Model) -> None:
    """Refuse a model in which anything but the recorded attention mixes positions."""
    mixer = model.probe.mixer
    if mixer is not None:
        raise CaptureError(
            f"{model.name} mixes positions by more than attention that can be recorded: {mixer};"
            " the rest alone would explain a part of the model as if it were the whole"
        )


def find_source(model: Model) -> Source:
    """Where a model's attention comes from: where it was loaded from, else its class."""
    return Source(model=model.origin or model.name, fingerprint=quick_fingerprint(model))


# ---- from calls to Attention --------------------------------------------------------------------


def check_layers(model: Model, calls: Sequence[Call]) -> None:
    """Refuse another number of calls than the model has layers."""
    if model.depth is not None and len(calls) != model.depth:
        raise CaptureError(
            f"{model.name} has {model.depth} layers, but {len(calls)} attention calls were"
            " recorded: capture would be wrong"
        )


def assemble_stack(
    model: Model,
    calls: Sequence[Call],
    place: int,
    span: slice,
    heads: str | None,
    *,
    source: Source | None = None,
    **names: Any,
) -> Attention:
    """The attention of an encoder, a decoder or a vision model: one call per layer.

    place: of the sequence in the batch. span: its positions, without padding. source: asked of the
    model if None. names: what `Attention` is to know of the tokens.
    """
    size = span.stop - span.start
    for number, call in enumerate(calls, start=1):
        if min(call.weights.shape[2:]) < span.stop or (
            model.is_vision and call.weights.shape[2] != size
        ):
            raise CaptureError(
                f"layer {number} of {model.name} attends over {call.weights.shape[2]} positions;"
                f" its input has {size}"
            )
    shares = [call.no_token_share for call in calls]
    no_token_share = None
    if any(share is not None for share in shares):
        no_token_share = np.stack(
            [
                np.zeros(size) if share is None else np.asarray(share[place, span])
                for share in shares
            ]
        )
    windows = [
        call.window if call.window is not None and call.window < size else None for call in calls
    ]
    # a language model that predicts the next token must not have seen it: then a mask went missing,
    # and that is an error
    reads_ahead = getattr(model.config, READS_AHEAD, False)
    causal = True if model.task == "causal LM" and size > 1 and not reads_ahead else None
    weights = stack_calls(model, calls, place, span, heads)
    return make_attention(
        model,
        weights,
        causal=causal,
        window=windows,
        no_token_share=no_token_share,
        fused=heads,
        source=source,
        **names,
    )


def stack_calls(
    model: Model, calls: Sequence[Call], place: int, span: slice, heads: str | None
) -> npt.NDArray[np.float32]:
    """[layer, head, query, key] of one sequence.

    The array that the calls were written to, where it holds these layers and nothing else.
    """
    stacked: npt.NDArray[np.float32]
    count = count_heads(model, calls)
    base = calls[0].weights.base
    whole = (len(calls), 1, count, span.stop, span.stop)
    if (
        base is not None
        and base.shape == whole
        and span.start == 0
        and heads != "min"
        and all(call.weights.base is base for call in calls)
    ):
        stacked = base[:, 0]
        return stacked
    stacked = np.stack([call.weights[place, :, span, span] for call in calls])
    if heads == "min":
        fill_empty_rows(stacked)
    return stacked


def count_heads(model: Model, calls: Sequence[Call]) -> int:
    """The number of heads that all layers have, 1 if they are fused; or an error."""
    counts = dict.fromkeys(call.weights.shape[1] for call in calls)
    if len(counts) > 1:
        raise CaptureError(
            f"the layers of {model.name} differ in their number of heads"
            f" ({', '.join(map(str, counts))}), so they make no one array;"
            " give heads='mean', 'max' or 'min'"
        )
    (count,) = counts
    return int(count)


def assemble_pair(
    model: Model,
    encoded: Encoded,
    calls: Sequence[Call],
    place: int,
    heads: str | None,
    *,
    source: Source | None = None,
) -> Attention:
    """One graph over encoder and decoder positions: what a layer does not touch stays as it is.

    An encoder layer mixes encoder positions; a decoder layer is two graph layers, self-attention
    and then attention to the encoder. source: asked of the model if None.
    """
    count_heads(model, calls)
    encoder_size, decoder_size = len(encoded.ids), len(encoded.decoder_ids)
    size = encoder_size + decoder_size
    words = None if encoded.words is None else (*encoded.words, *[None] * decoder_size)
    layers = []
    for call in calls:
        rows, columns = place_part(name_part(call.name), encoder_size, decoder_size)
        identity = np.eye(size, dtype=np.float32)
        matrix = np.repeat(identity[None], call.weights.shape[1], axis=0)
        matrix[:, rows] = 0.0
        height, width = rows.stop - rows.start, columns.stop - columns.start
        matrix[:, rows, columns] = call.weights[place, :, :height, :width]
        if heads == "min":
            fill_empty_rows(matrix)
        layers.append(matrix)
    order, titles = order_layers([call.name for call in calls])
    counts = Counter(name_part(call.name) for call in calls)
    if counts["decoder"] != counts["cross"] or not counts["encoder"]:
        raise CaptureError(
            f"{model.name} made {dict(counts)} attention calls: encoder, and decoder with"
            " cross-attention, were expected"
        )
    return make_attention(
        model,
        np.stack([layers[index] for index in order]),
        tokens=(*encoded.tokens, *encoded.decoder_tokens),
        words=words,
        fused=heads,
        causal=False,
        layer_names=titles,
        source=source,
    )


def place_part(part: str, encoder: int, decoder: int) -> tuple[slice, slice]:
    """The rows and columns that attention of a part takes in the graph of an encoder-decoder.

    encoder, decoder: how many positions each has.
    """
    below, above = slice(0, encoder), slice(encoder, encoder + decoder)
    return {"encoder": (below, below), "decoder": (above, above), "cross": (above, below)}[part]


def order_layers(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """The order of an encoder-decoder's attentions in the graph, and what the layers are called.

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


def make_attention(
    model: Model,
    weights: npt.NDArray[np.float32],
    *,
    source: Source | None = None,
    **options: Any,
) -> Attention:
    """The Attention, or an error that says whose layer did not come out as attention.

    source: asked of the model if None.
    """
    source = find_source(model) if source is None else source
    try:
        return Attention(weights, copy=False, source=source, **options)
    except WeightsError as error:
        raise CaptureError(
            f"the captured weights of {model.name} are not attention: {error}"
        ) from error
