"""Parallel: attention and an MLP read the same stream, and are added together (GPT-NeoX)."""

from dataclasses import dataclass

from attnflow.models.wiring.sums import find_sum
from attnflow.models.wiring.trace import Tap, Trace
from attnflow.models.wiring.wiring import BranchWiring, Miss, Observation, StreamParts


@dataclass(frozen=True)
class Parallel(BranchWiring):
    """y = x + passed(branch), observed together with the output of the module beside it."""

    beside: str

    @classmethod
    def recognise(cls, trace: Trace, call: int) -> "Parallel | Miss":
        """The wiring of an attention call that is added together with another module's output."""
        found = find_sum(trace, call, beside=True)
        if isinstance(found, Miss):
            return found
        assert found.parts.beside is not None
        return found.make_wiring(cls, found.parts.beside)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The states to observe; the layer is complete with the sum."""
        *others, stream = super().taps
        return (*others, Tap("out", self.beside), stream)

    def split_stream(self, observed: Observation) -> StreamParts:
        """The residual plus the branch, without the module beside it, and its parts; checked."""
        weights, projection, total = self.add_branch(observed)
        rest = observed.state(self.stream) - observed.state(Tap("out", self.beside))
        observed.check(total, rest, total, f"the stream after {self.attention}")
        return StreamParts(weights, projection, observed.residual, total)
