"""Watching `nn.MultiheadAttention`: each call of a watched module is recorded by who listens."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from attnflow.capturing.multihead import MultiheadInput, compute_multihead_weights
from attnflow.capturing.recordings import Recording, Recordings
from attnflow.errors import CaptureError

HIDDEN = -1e4  # a float padding mask hides a key at this value and below: no score brings it back


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
class PendingCall:
    """A forward of nn.MultiheadAttention that is under way."""

    module: Any
    native: bool = False  # torch's fused kernel for attention alone is taken


sessions: ContextVar[tuple[Session, ...]] = ContextVar("sessions", default=())
under_way: ContextVar[PendingCall | None] = ContextVar("under_way", default=None)
watch_lock = threading.RLock()
watches: dict[int, "Watch"] = {}  # by the id of the module, which a watch keeps alive


@contextmanager
def open_session(session: Session) -> Iterator[None]:
    """While this lasts, a session records the forward passes of this context.

    Not by the context variable's own reset: with-blocks may overlap without one inside the other.
    """
    sessions.set((*sessions.get(), session))
    try:
        yield
    finally:
        session.open = False  # also where the block is left in another context than it was entered
        sessions.set(tuple(other for other in sessions.get() if other is not session))


@contextmanager
def watch_module(module: Any) -> Iterator[None]:
    """While at least one of these lasts, the methods of a module pass by its watch."""
    with watch_lock:
        mine = watches.get(id(module))
        if mine is None:
            mine = watches[id(module)] = Watch(module)
        mine.users += 1
    try:
        yield
    finally:
        with watch_lock:
            mine.users -= 1
            if mine.users == 0:
                del watches[id(module)]
                mine.restore()


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
        import torch

        self.module, self.users = module, 0
        attention = isinstance(module, torch.nn.MultiheadAttention)
        methods = ("forward", "merge_masks") if attention else ("forward",)
        self.originals = {method: getattr(module, method) for method in methods}
        # somebody's own shadows, to be put back
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

    def find_listeners(self) -> list[tuple[Session, Place]]:
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
        listeners = self.find_listeners()
        if not listeners:
            return self.originals["forward"](*args, **kwargs)
        under = PendingCall(self.module)
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
        for session, place in self.find_listeners():
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
        # padded queries: nothing reads their rows, and a mask may leave them without a key
        idle = padding if same else None
        given = MultiheadInput(module, query, key, attn_mask, key_padding_mask, hint, idle)
        where = f"{place.name or 'the module'!r}, call {len(recordings)}"
        weights, share = compute_multihead_weights(given, session.heads, where)
        if nested:  # the module computed no row for them
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
