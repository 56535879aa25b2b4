"""Watching `nn.MultiheadAttention` modules: sessions record the calls made in their context."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnflow.capturing.record.multihead import MultiheadInput, compute_multihead_weights
from attnflow.capturing.record.recordings import Recording, Recordings
from attnflow.errors import CaptureError
from attnflow.models.context import set_within

if TYPE_CHECKING:
    import torch

HIDDEN = -1e4  # a float padding mask hides a key at or below this value, whatever its score


@dataclass(frozen=True, eq=False)
class Place:
    """An attention module within the recorded module."""

    module: "torch.nn.MultiheadAttention"
    name: str  # qualified module name
    layers: "list[torch.nn.TransformerEncoderLayer]"  # the layers around it, which may run fused

    @property
    def title(self) -> str:
        """The name in messages."""
        return repr(self.name or "the module")


@dataclass(eq=False)
class Session:
    """One with-block of `record`."""

    module: "torch.nn.Module"
    heads: str | None
    places: dict[int, Place] = field(default_factory=dict)  # by the id of the attention module
    recordings: Recordings = field(default_factory=Recordings)
    open: bool = True


@dataclass(eq=False)
class PendingCall:
    """A call of `nn.MultiheadAttention.forward` that has not returned yet."""

    module: "torch.nn.MultiheadAttention"
    native: bool = False  # whether it runs in torch's fused kernel for attention alone


sessions: ContextVar[tuple[Session, ...]] = ContextVar("sessions", default=())
pending_call: ContextVar[PendingCall | None] = ContextVar("pending_call", default=None)
watch_lock = threading.RLock()
watches: dict[int, "ModuleWatch"] = {}  # by the id of the module, which a watch keeps alive


@contextmanager
def open_session(session: Session) -> Iterator[None]:
    """Within this context, a session records forward passes.

    The context variable is not reset by its token: with-blocks may overlap without being nested.
    """
    sessions.set((*sessions.get(), session))
    try:
        yield
    finally:
        session.open = False  # the block may be left in another context than it was entered in
        sessions.set(tuple(other for other in sessions.get() if other is not session))


@contextmanager
def watch_module(module: "torch.nn.Module") -> Iterator[None]:
    """Replace methods of a module by those of its watch, which overlapping contexts share."""
    with watch_lock:
        watch = watches.get(id(module))
        if watch is None:
            watch = watches[id(module)] = ModuleWatch(module)
        watch.users += 1
    try:
        yield
    finally:
        with watch_lock:
            watch.users -= 1
            if watch.users == 0:
                del watches[id(module)]
                watch.restore()


class ModuleWatch:
    """Replaces `forward` of a module, and `merge_masks` of `nn.MultiheadAttention`.

    The fused path of nn.TransformerEncoderLayer never calls its self_attn, but just before its
    kernel runs it calls self_attn.merge_masks with its input and masks. So a call of merge_masks
    from outside of forward is a fused layer.

    Hooks do not serve: nn.TransformerEncoderLayer leaves its fused path as soon as it has one, and
    its output then differs in the last bits.
    """

    def __init__(self, module: "torch.nn.Module") -> None:
        import torch

        self.module, self.users = module, 0
        attention = isinstance(module, torch.nn.MultiheadAttention)
        methods = ("forward", "merge_masks") if attention else ("forward",)
        self.originals = {method: getattr(module, method) for method in methods}
        # methods that were replaced on the instance before
        self.shadows = {
            method: vars(module)[method] for method in methods if method in vars(module)
        }
        for method in methods:
            setattr(module, method, getattr(self, method))

    def restore(self) -> None:
        """Leave the module as it was found."""
        for method in self.originals:
            vars(self.module).pop(method, None)
        vars(self.module).update(self.shadows)

    def find_sessions(self) -> list[tuple[Session, Place]]:
        """The open sessions of this context that record this module, and its place in each."""
        return [
            (session, session.places[id(self.module)])
            for session in sessions.get()
            if session.open and id(self.module) in session.places
        ]

    def forward(self, *args: object, **kwargs: object) -> object:
        for session in sessions.get():
            if session.open and session.module is self.module:
                session.recordings.passes += 1
        found = self.find_sessions()
        if not found:
            return self.originals["forward"](*args, **kwargs)
        pending = PendingCall(self.module)
        with set_within(pending_call, pending):
            output = self.originals["forward"](*args, **kwargs)
        bound = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        # only here does torch rely on is_causal and ignore attn_mask; everywhere else it applies
        # the mask and ignores is_causal
        is_causal = (
            call["is_causal"]
            and call["key_padding_mask"] is None
            and not call["need_weights"]
            and not pending.native
        )
        masks = call["attn_mask"], call["key_padding_mask"]
        for session, place in found:
            record_call(session, place, call["query"], call["key"], *masks, is_causal=is_causal)
        return output

    def merge_masks(
        self,
        attn_mask: "torch.Tensor | None",
        key_padding_mask: "torch.Tensor | None",
        query: "torch.Tensor",
    ) -> object:
        merged = self.originals["merge_masks"](attn_mask, key_padding_mask, query)
        pending = pending_call.get()
        if pending is not None and pending.module is self.module:
            # without biases, forward returns to the slow path
            pending.native = self.module.in_proj_bias is not None
            return merged
        # the fused kernel takes boolean masks: it hides every key whose mask is not 0, even where
        # a float mask is meant as a bias
        masks = [None if mask is None else mask != 0 for mask in (attn_mask, key_padding_mask)]
        for session, place in self.find_sessions():
            if len(place.layers) != 1:
                raise CaptureError(
                    f"{place.title} runs inside {len(place.layers)} recorded layers; record the"
                    " one layer around it"
                )
            (layer,) = place.layers
            norm = layer.norm1 if layer.norm_first else None
            record_call(session, place, query, query, *masks, norm=norm)
        return merged


def record_call(
    session: Session,
    place: Place,
    query: "torch.Tensor",
    key: "torch.Tensor",
    attn_mask: "torch.Tensor | None",
    key_padding_mask: "torch.Tensor | None",
    *,
    is_causal: bool = False,
    norm: "torch.nn.LayerNorm | None" = None,
) -> None:
    """Record one call, from its arguments. norm: the layer norm that a fused kernel applies."""
    import torch

    module, recordings = place.module, session.recordings
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        same, nested = query is key, query.is_nested
        if nested:
            lengths = torch.tensor([len(part) for part in query.unbind()], device=query.device)
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
        # rows of padded queries are not used, and a mask may leave them without a key
        unused = padding if same else None
        call = MultiheadInput(module, query, key, attn_mask, key_padding_mask, is_causal, unused)
        where = f"{place.title}, call {len(recordings)}"
        weights, share = compute_multihead_weights(call, session.heads, where)
        if nested and padding is not None:  # the module computed no row for padding
            weights.masked_fill_(padding.cpu()[:, None, :, None], 0.0)
    recordings.append(
        Recording(
            name=place.name,
            weights=weights.numpy(),
            padding=None if padding is None else padding.cpu().numpy().copy(),
            no_token_share=None if share is None else share.numpy(),
            fused=session.heads,
            self_attention=same,
            forward_pass=max(recordings.passes - 1, 0),
        )
    )
