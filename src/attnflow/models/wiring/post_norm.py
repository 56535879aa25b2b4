"""Post-norm: the residual stream after attention is the norm of the sum, y = norm(x + branch)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnflow.models.wiring.sums import ADDS_UP, LOOK_AHEAD, find_sum
from attnflow.models.wiring.trace import Tap, Trace, is_same
from attnflow.models.wiring.wiring import BranchWiring, Miss, Observation, StreamParts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PostNorm(BranchWiring):
    """y = norm(x + factor * passed(branch))."""

    norm: str  # the module that the sum passes before anything else reads it

    @classmethod
    def recognise(cls, trace: Trace, call: int) -> "PostNorm | Miss":
        """The wiring of an attention call whose sum is normed before it goes on."""
        found = find_sum(trace, call)
        if isinstance(found, Miss):
            return found
        norm = find_post_norm(trace, found.place)
        return Miss.NO_SUM if norm is None else found.make_wiring(cls, norm)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The states to observe; the layer is complete with the norm's output."""
        return (*super().taps, Tap("out", self.norm))

    def split_stream(self, observed: Observation) -> StreamParts:
        """The norm's output, and the parts of the sum through the norm; checked."""
        weights, projection, residual, total = super().split_stream(observed)
        stream = observed.state(Tap("out", self.norm))
        scale = observed.fit_scale(self.norm, total, stream)
        gain = observed.reader.gain(self.norm, total.shape[-1], total.device)
        return StreamParts(weights * scale, projection, scale * gain.turn(residual), stream)

    def list_gains(self) -> tuple[str, ...]:
        """The norms and factors between the projection and the residual stream, in order."""
        return (*self.passed, self.norm)


def find_post_norm(trace: Trace, place: int) -> str | None:
    """The norm through which the sum at a place continues; None if it continues as it is.

    The next branch decides: it is added either to the sum or to its norm.
    """
    events = trace.events
    event = events[place]
    contained = next(trace.modules[event.module].children(), None)
    if event.tap is None or event.tap.side != "in" or contained is not None:  # a norm has no parts
        return None
    output = trace.find_output(place)
    if output is None or output.state.shape != event.state.shape:
        return None
    normed = output.state
    if is_same(normed, event.state):
        return None
    outputs: list[torch.Tensor] = []
    for later in events[place + 1 :]:
        if later.tap is None or later.state.shape != normed.shape:
            continue
        for base, norm in ((event.state, None), (normed, event.module)):
            rest = later.state - base
            for added in outputs:
                limit = ADDS_UP[added.element_size()]
                if float((rest - added).norm()) <= limit * float(added.norm()):
                    return norm
        if later.tap.side == "out" and not is_same(later.state, normed):
            outputs.append(later.state)
        if len(outputs) > LOOK_AHEAD:
            break
    return None
