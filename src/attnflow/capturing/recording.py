"""`record`: the attention weights of any PyTorch module built on `nn.MultiheadAttention`, taken beside its own computation."""

import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.core.attention import FUSIONS, Attention
from attnflow.core.graph import Array, integers
from attnflow.errors import CaptureError, MissingExtraError, OptionError

BLOCK = (
    2**22
)  # numbers that one block of queries may hold in [batch, head, query, key]: 16 MB of float32
ROW_TOLERANCE = 1e-4  # how far from 1 a recorded row may sum
HIDDEN = -1e4  # a float padding mask hides a key at this value and below: no score brings it back


@dataclass(frozen=True, eq=False)
class Recording:
    """One call of one attention module."""

    name: str  # qualified module name, "layers.0.self_attn"; "" for the recorded module itself
    weights: Array  # [batch, head, query, key], head axis 1 if fused; float32, float64 for a float64 module
    padding: npt.NDArray[np.bool_] | None  # [batch, key], True: a padded key
    sink: (
        Array | None
    )  # [batch, query], mean over heads: the share of bias_k and the zero key, which are no tokens
    fused: str | None  # how heads were fused
    self_attention: bool  # queries and keys are the same sequence
    forward_pass: int  # of the recorded module inside the with-block, from 0


class Recordings(list[Recording]):
    """All recorded calls, in call order."""

    passes = 0  # forward passes begun inside the with-block

    def attention(
        self,
        sequence: int = 0,
        tokens: Iterable[str] | None = None,
        *,
        names: str = "",
        forward_pass: int | None = None,
    ) -> Attention:
        """The self-attention calls as the layers of one `Attention`, for one sequence of the batch, its padding cut away.

        tokens: one name a position, with or without those of padded positions. names: only calls whose name starts so; a * stands for
        anything, as in "decoder.layers.*.self_attn". forward_pass: which one, if several ran inside the with-block.
        """
        calls = [
            call
            for call in self
            if fnmatchcase(call.name, f"{names}*") and forward_pass in (None, call.forward_pass)
        ]
        if not calls:
            which = "" if forward_pass is None else f" in forward pass {forward_pass}"
            raise CaptureError(
                f"no recorded call has a name that starts with {names!r}{which}; recorded: {listed(self)}"
            )
        passes = sorted({call.forward_pass for call in calls})
        if len(passes) > 1:
            raise CaptureError(
                f"these calls are of {len(passes)} forward passes; pick one, as attention(forward_pass={passes[-1]})"
            )
        cross = [call for call in calls if not call.self_attention]
        if cross:
            raise CaptureError(
                f"attention() stacks self-attention, and {cross[0].name or 'this call'!r} is cross-attention;"
                f" pick by name, as attention(names='decoder.layers.*.self_attn'), from {listed(calls)}"
            )
        lengths = sorted({call.weights.shape[-1] for call in calls})
        if len(lengths) > 1:
            raise CaptureError(
                f"all layers of one stack must have the same length; got {', '.join(map(str, lengths))};"
                f" pick by name, as attention(names='encoder'), from {listed(calls)}"
            )
        (sequence,) = integers([sequence], "sequence")
        batch = min(len(call.weights) for call in calls)
        if not 0 <= sequence < batch:
            raise OptionError(
                f"sequence must be from 0 to {batch - 1}, its place in the batch; got {sequence}"
            )
        real = np.ones(lengths[0], bool)
        for call in calls:
            if call.padding is not None:
                real &= ~call.padding[sequence]
        if not real.any():
            raise CaptureError(f"sequence {sequence} is padding alone; pick one that has tokens")
        if tokens is not None and not isinstance(tokens, str):
            tokens = list(tokens)
            tokens = (
                [token for token, kept in zip(tokens, real, strict=True) if kept]
                if len(tokens) == len(real)
                else tokens
            )
        sinks = [
            np.zeros(len(real)) if call.sink is None else call.sink[sequence] for call in calls
        ]
        return Attention(
            [call.weights[sequence][:, real][:, :, real] for call in calls],
            tokens=tokens,
            fused=calls[0].fused,
            sink=np.stack(sinks)[:, real] if any(call.sink is not None for call in calls) else None,
        )


@contextmanager
def record(module: Any, *, heads: str | None = "mean") -> Iterator[Recordings]:
    """Record the attention weights of every forward pass that `module` makes inside the with-block.

    For `nn.MultiheadAttention` and all that is built on it: `nn.TransformerEncoder`, `nn.TransformerDecoder`, `nn.Transformer`, your own.
    heads: "mean", "max" or "min" (rows sum to 1 again), or None to keep every head. The module
    computes what it always does, fused kernels included, to the last bit; the weights are computed
    beside it, before dropout, and the module is left as it was found. Only forward passes of the
    thread (or asyncio task) that opened the with-block are recorded, so that several threads can
    record one module at once.

    >>> import torch
    >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=3).eval()
    >>> with record(encoder) as attentions:
    ...     _ = encoder(torch.randn(2, 5, 8))
    >>> [call.name for call in attentions], attentions[0].weights.shape
    (['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn'], (2, 1, 5, 5))
    >>> attentions.attention(sequence=1)
    <Attention: 3 layers, fused heads (mean), 5 positions>
    """
    nn = import_torch().nn
    if not isinstance(module, nn.Module):
        raise OptionError(f"record takes a torch.nn.Module; got {type(module).__name__}")
    if heads is not None and heads not in FUSIONS:
        raise OptionError(
            f"unknown head fusion {heads!r}; choose from {', '.join(FUSIONS)}, or None to keep every head"
        )
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
    for name, part in parts:
        if type(part).forward is not nn.MultiheadAttention.forward:
            raise CaptureError(
                f"{name or 'the module'!r} is a {type(part).__name__} with a forward of its own,"
                " whose weights record cannot know; use nn.MultiheadAttention, or af.Attention for"
                " weights that you have"
            )
    session = Session(module, heads)
    for name, part in parts:
        layers = [
            each
            for each in module.modules()
            if isinstance(each, nn.TransformerEncoderLayer) and each.self_attn is part
        ]
        session.places[id(part)] = Place(part, name, layers)
    with ExitStack() as stack:
        for each in {id(each): each for each in (module, *(part for _, part in parts))}.values():
            stack.enter_context(watched(each))
        stack.enter_context(opened(session))
        yield session.recordings
    if not session.recordings:
        raise CaptureError(
            f"no attention was recorded; run the forward pass of this {type(module).__name__}"
            " itself inside the with-block, in the same thread; a copy of it, or a scripted one,"
            " is not seen"
        )


# ---- who listens ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """Where an attention module stands in what is recorded."""

    module: Any
    name: str  # qualified module name
    layers: list[Any]  # the nn.TransformerEncoderLayers around it, which may run fused


@dataclass(eq=False)
class Session:
    """One with-block of `record`."""

    module: Any
    heads: str | None
    places: dict[int, Place] = field(default_factory=dict)  # by the id of the attention module
    recordings: Recordings = field(default_factory=Recordings)
    open: bool = True


@dataclass(eq=False)
class Call:
    """A forward of nn.MultiheadAttention that is under way."""

    module: Any
    native: bool = False  # torch's fused kernel for attention alone is taken


sessions: ContextVar[tuple[Session, ...]] = ContextVar("sessions", default=())
under_way: ContextVar[Call | None] = ContextVar("under_way", default=None)
patching = threading.RLock()
watches: dict[int, "Watch"] = {}  # by the id of the module, which a watch keeps alive


@contextmanager
def opened(session: Session) -> Iterator[None]:
    """While this lasts, a session hears the forward passes of this context.

    Not by the context variable's own reset: with-blocks may overlap without one inside the other.
    """
    sessions.set((*sessions.get(), session))
    try:
        yield
    finally:
        session.open = False  # also where the block is left in another context than it was entered
        sessions.set(tuple(each for each in sessions.get() if each is not session))


@contextmanager
def watched(module: Any) -> Iterator[None]:
    """While at least one of these lasts, the methods of a module pass by its watch."""
    with patching:
        watch = watches.get(id(module))
        if watch is None:
            watch = watches[id(module)] = Watch(module)
        watch.users += 1
    try:
        yield
    finally:
        with patching:
            watch.users -= 1
            if watch.users == 0:
                del watches[id(module)]
                watch.restore()


class Watch:
    """Stands in for `forward` of one module, and for `merge_masks` if it is attention.

    The sessions of the context that calls are told of the call; there may be none. The fused path
    of nn.TransformerEncoderLayer never calls its self_attn; but the last that it does before the
    kernel runs is to call self_attn.merge_masks with its input and masks. So a merge_masks that
    comes from outside of forward is a fused layer.

    Not a hook: nn.TransformerEncoderLayer leaves its fused path as soon as it sees one, and its
    output then differs in the last bits.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.users = module, 0
        attention = isinstance(module, import_torch().nn.MultiheadAttention)
        methods = ("forward", "merge_masks") if attention else ("forward",)
        self.originals = {method: getattr(module, method) for method in methods}
        # somebody's own shadows, to be put back
        self.found = {method: vars(module)[method] for method in methods if method in vars(module)}
        for method in methods:
            setattr(module, method, getattr(self, method))

    def restore(self) -> None:
        """Leave the module as it was found."""
        for method in self.originals:
            vars(self.module).pop(method, None)
        vars(self.module).update(self.found)

    def listeners(self) -> list[tuple[Session, Place]]:
        """The sessions of this context that record this module, and where it stands in them."""
        return [
            (session, session.places[id(self.module)])
            for session in sessions.get()
            if session.open and id(self.module) in session.places
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for session in sessions.get():
            if session.open and session.module is self.module:
                session.recordings.passes += 1
        listeners = self.listeners()
        if not listeners:
            return self.originals["forward"](*args, **kwargs)
        under = Call(self.module)
        token = under_way.set(under)
        try:
            output = self.originals["forward"](*args, **kwargs)
        finally:
            under_way.reset(token)
        given = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        # here torch believes the hint and does not look at attn_mask; everywhere else it takes the
        # mask and forgets the hint
        hint = (
            call["is_causal"]
            and call["key_padding_mask"] is None
            and not call["need_weights"]
            and not under.native
        )
        masks = call["attn_mask"], call["key_padding_mask"]
        for session, place in listeners:
            note_call(session, place, call["query"], call["key"], *masks, hint=hint)
        return output

    def merge_masks(self, attn_mask: Any, key_padding_mask: Any, query: Any) -> Any:
        merged = self.originals["merge_masks"](attn_mask, key_padding_mask, query)
        under = under_way.get()
        if under is not None and under.module is self.module:
            # without biases, forward turns back to the slow path
            under.native = self.module.in_proj_bias is not None
            return merged
        # the fused kernel takes masks as bool: it hides every key whose mask is not 0, also where a
        # float mask means a bias
        masks = [None if mask is None else mask != 0 for mask in (attn_mask, key_padding_mask)]
        for session, place in self.listeners():
            if len(place.layers) != 1:
                raise CaptureError(
                    f"{place.name or 'the module'!r} runs inside {len(place.layers)} recorded"
                    " layers; record the one layer around it"
                )
            (layer,) = place.layers
            norm = layer.norm1 if layer.norm_first else None
            note_call(session, place, query, query, *masks, norm=norm)
        return merged


def note_call(
    session: Session,
    place: Place,
    query: Any,
    key: Any,
    attn_mask: Any,
    key_padding_mask: Any,
    *,
    hint: bool = False,
    norm: Any = None,
) -> None:
    """Record one call, from what entered it. norm: the layer norm that a fused kernel has."""
    torch, module, recordings = import_torch(), place.module, session.recordings
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        same, nested = query is key, query.is_nested
        if nested:
            lengths = torch.tensor([len(each) for each in query.unbind()], device=query.device)
            query = key = query.to_padded_tensor(0.0)
            key_padding_mask = (
                torch.arange(query.shape[1], device=query.device)[None] >= lengths[:, None]
            )
        elif query.dim() == 2:
            query, key = query[None], key[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not module.batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        same = same or (query.shape == key.shape and torch.equal(query, key))
        padding = key_padding_mask
        if padding is not None and padding.is_floating_point():
            padding = padding <= HIDDEN
        if norm is not None:
            query = key = torch.nn.functional.layer_norm(
                query, query.shape[-1:], norm.weight, norm.bias, norm.eps
            )
        # padded queries: nothing reads their rows, and a mask may leave them without a key
        idle = padding if same else None
        where = f"{place.name or 'the module'!r}, call {len(recordings)}"
        weights, sink = attention_weights(
            module,
            query,
            key,
            attn_mask,
            key_padding_mask,
            hint=hint,
            idle=idle,
            heads=session.heads,
            place=where,
        )
        if nested:  # the module computed no row for them
            weights.masked_fill_(padding.cpu()[:, None, :, None], 0.0)
    recordings.append(
        Recording(
            name=place.name,
            weights=weights.numpy(),
            padding=None if padding is None else padding.cpu().numpy().copy(),
            sink=None if sink is None else sink.numpy(),
            fused=session.heads,
            self_attention=same,
            forward_pass=max(recordings.passes - 1, 0),
        )
    )


def attention_weights(
    module: Any,
    query: Any,
    key: Any,
    attn_mask: Any,
    key_padding_mask: Any,
    *,
    hint: bool,
    idle: Any,
    heads: str | None,
    place: str,
) -> tuple[Any, Any]:
    """[batch, head or 1, query, key] and, where the module adds keys that are no tokens, their share [batch, query].

    query, key: [batch, position, feature]. hint: the kernel's own causal mask in the place of attn_mask. idle: [batch, query], rows that
    nobody reads, 0 where they are undefined. place: names the call in errors.
    """
    torch = import_torch()
    linear, dtype = (
        torch.nn.functional.linear,
        torch.float64 if query.dtype == torch.float64 else torch.float32,
    )
    batch, length, size, count = len(query), query.shape[1], key.shape[1], module.num_heads

    if module.in_proj_weight is None:
        by_query, by_key = module.q_proj_weight, module.k_proj_weight
    else:
        by_query, by_key, _ = module.in_proj_weight.chunk(3)
    for_query, for_key, _ = (
        (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.to(dtype).chunk(3)
    )
    q = linear(query.to(dtype), by_query.to(dtype), for_query)  # [batch, query, embed]
    k = linear(key.to(dtype), by_key.to(dtype), for_key)  # [batch, key, embed]
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.to(dtype).expand(batch, 1, -1)], dim=1)
    if module.add_zero_attn:
        k = torch.cat([k, torch.zeros_like(k[:, :1])], dim=1)
    q, k = (
        each.unflatten(-1, (count, -1)).transpose(1, 2) for each in (q, k)
    )  # [batch, head, position, dim]
    q = q * q.shape[-1] ** -0.5

    masks = []  # each [batch or 1, head or 1, query, key]
    if hint:  # hides the added keys too
        masks.append(
            torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).triu(1)[None, None]
        )
    elif attn_mask is not None:
        masks.append(
            attn_mask[None, None]
            if attn_mask.dim() == 2
            else attn_mask.reshape(batch, count, length, size)
        )
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None].expand(-1, -1, length, -1))

    weights = torch.empty(batch, count if heads is None else 1, length, size, dtype=dtype)
    sink = torch.empty(batch, length, dtype=dtype) if k.shape[2] > size else None
    block = max(1, BLOCK // max(1, batch * count * k.shape[2]))
    for rows in (slice(start, start + block) for start in range(0, length, block)):
        scores = q[:, :, rows] @ k.transpose(-2, -1)  # [batch, head, block, key and added keys]
        for mask in masks:
            seen = scores[..., : mask.shape[-1]]
            seen.masked_fill_(
                mask[:, :, rows], -torch.inf
            ) if mask.dtype == torch.bool else seen.add_(mask[:, :, rows])
        part = torch.softmax(scores, dim=-1)
        if sink is not None:
            sink[:, rows] = part[..., size:].sum(-1).mean(1)
            part = part[..., :size] / part[..., :size].sum(-1, keepdim=True)
        if heads is not None:
            part = {"mean": part.mean, "max": part.amax, "min": part.amin}[heads](1, keepdim=True)
        if heads == "min" and length == size:  # where heads share no key, the query looks at itself
            part = (
                part
                + (part.sum(-1, keepdim=True) == 0)
                * torch.eye(size, dtype=dtype, device=q.device)[rows]
            )
        if heads in ("max", "min"):
            part = part / part.sum(-1, keepdim=True)
        sums = part.sum(-1)  # [batch, head or 1, block]
        wrong = ~((sums - 1).abs() <= ROW_TOLERANCE)
        if idle is not None:
            part = part.masked_fill((wrong.any(1) & idle[:, rows])[:, None, :, None], 0.0)
            wrong &= ~idle[:, None, rows]
        if wrong.any():
            sequence, head, row = wrong.nonzero()[0].tolist()
            where = f"{place}: query {rows.start + row} of sequence {sequence}"
            if (scores[sequence, :, row, :size] == -torch.inf).all(-1).any():  # in any head
                raise CaptureError(
                    f"{where} sees no key, so that its weights are NaN; give a mask that leaves every query one key"
                )
            raise CaptureError(
                f"{where}: weights must sum to 1 within {ROW_TOLERANCE:g}; got {float(sums[sequence, head, row]):.6g};"
                " look for NaN or infinity in the module's input and parameters"
            )
        weights[:, :, rows] = part
    return weights, sink


def listed(calls: Iterable[Recording]) -> str:
    """The names of calls, once each, not more than fit in a line."""
    names = list(dict.fromkeys(call.name or "the module itself" for call in calls))
    return (
        ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        if names
        else "none"
    )


def import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("record needs torch: pip install 'attnflow[models]'") from error
    return torch
