"""Pre-norm: the residual stream after attention is the sum itself, y = x + branch.

Norms stand before attention, or on the branch (Gemma 2), or nowhere.
"""

from attnflow.models.wiring.sums import find_sum
from attnflow.models.wiring.trace import Trace
from attnflow.models.wiring.wiring import BranchWiring, Miss


class PreNorm(BranchWiring):
    """y = x + factor * passed(branch)."""

    @classmethod
    def recognise(cls, trace: Trace, call: int) -> "PreNorm | Miss":
        """The wiring of an attention call whose branch is added to the residual stream."""
        found = find_sum(trace, call)
        return found if isinstance(found, Miss) else found.make_wiring(cls)
