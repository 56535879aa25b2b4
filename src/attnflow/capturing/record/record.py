"""`record`: the attention weights of PyTorch modules, computed beside their forward pass."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from attnflow.capturing.record.recordings import Recordings
from attnflow.capturing.record.watch import Place, Session, open_session, watch_module
from attnflow.errors import CaptureError, OptionError
from attnflow.models.attention_weights import check_heads
from attnflow.models.execution import require_torch

if TYPE_CHECKING:
    import torch


@contextmanager
def record(module: "torch.nn.Module", *, heads: str | None = "mean") -> Iterator[Recordings]:
    """Record the attention weights of every forward pass of a module in the with-block.

    Works for `nn.MultiheadAttention` and modules built on it: `nn.TransformerEncoder`,
    `nn.TransformerDecoder`, `nn.Transformer` and user-defined ones. The output of the module is
    unchanged to the last bit, fused kernels included; the weights are computed beside it, before
    dropout, and the module is left as it was found. Only forward passes of the thread (or asyncio
    task) that opened the with-block are recorded, so several threads can record one module at once.

    Parameters
    ----------
    module
        A `torch.nn.Module` that is or contains `nn.MultiheadAttention`.
    heads
        "mean", "max" or "min" fuse heads, and rows sum to 1 again; None keeps every head.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> encoder = torch.nn.TransformerEncoder(layer, num_layers=3).eval()
    >>> with record(encoder) as attentions:
    ...     _ = encoder(torch.randn(2, 5, 8))
    >>> [call.name for call in attentions], attentions[0].weights.shape
    (['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn'], (2, 1, 5, 5))
    >>> attentions.attention(sequence=1)
    <Attention: 3 layers, fused heads (mean), 5 positions>
    """
    require_torch("record", ["torch"])
    from torch import nn

    if not isinstance(module, nn.Module):
        raise OptionError(f"record takes a torch.nn.Module; got {type(module).__name__}")
    check_heads(heads)
    parts = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention)
    ]
    if not parts:
        raise CaptureError(
            f"record reads nn.MultiheadAttention, and this {type(module).__name__} has none;"
            " use af.capture for a Hugging Face model, or af.Attention for weights that you have"
        )
    session = Session(module, heads)
    for name, part in parts:
        if type(part).forward is not nn.MultiheadAttention.forward:
            raise CaptureError(
                f"{name or 'the module'!r} is a {type(part).__name__} that overrides forward, so"
                " record cannot compute its weights; use nn.MultiheadAttention, or af.Attention for"
                " weights that you have"
            )
        layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, nn.TransformerEncoderLayer) and layer.self_attn is part
        ]
        session.places[id(part)] = Place(part, name, layers)
    with ExitStack() as stack:
        for part in dict.fromkeys([module, *(part for _, part in parts)]):
            stack.enter_context(watch_module(part))
        stack.enter_context(open_session(session))
        yield session.recordings
    if not session.recordings:
        raise CaptureError(
            f"no attention was recorded; run the forward pass of this {type(module).__name__}"
            " itself inside the with-block, in the same thread; a copy or a scripted module is not"
            " recorded"
        )
