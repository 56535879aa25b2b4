"""`Wiring`: the place of one attention call in its block, and the interface of wiring patterns.

A *wiring pattern* is a subclass of `Wiring`, in a file of its own. It recognises its blocks in the
trace of a model, names the states to observe, and splits the residual stream that was observed into
the parts of the keys. `BranchWiring` is what the patterns of this package share: attention is
projected to a branch, which may pass norms and factors, and is added to the residual stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from attnflow.models.families import name_part
from attnflow.models.wiring.linear_maps import ModuleReader, check_parts
from attnflow.models.wiring.trace import Tap, Trace

if TYPE_CHECKING:
    import torch


class Miss(IntEnum):
    """Why a pattern does not fit an attention call; of several, the largest is reported."""

    NO_PROJECTION = 0  # no module reads the output of attention
    NO_SUM = 1  # no state is the residual plus the branch
    OTHER_PATHS = 2  # there is one, but it does not carry everything


@dataclass(frozen=True, eq=False)
class Observation:
    """What was observed of one attention call, of one sequence without its padding, in float32."""

    attention: "torch.Tensor"  # [head, query, key]
    values: "torch.Tensor"  # [head, key, width]
    residual: "torch.Tensor"  # [query, model width]: the residual stream before attention
    state: "Callable[[Tap], torch.Tensor]"  # [query, model width]: what was observed at a tap
    reader: ModuleReader  # of the projections and norms
    dtype: "torch.dtype"  # of the model

    def check(
        self, parts: "torch.Tensor", whole: "torch.Tensor", observed: "torch.Tensor", what: str
    ) -> None:
        """Refuse parts [query, model width] that do not add up to the whole."""
        check_parts(parts, whole, observed, what, self.dtype)

    def fit_scale(self, name: str, entered: "torch.Tensor", left: "torch.Tensor") -> "torch.Tensor":
        """[query, 1]: the scale of a norm, from the states that entered and left it; checked."""
        gain = self.reader.gain(name, entered.shape[-1], entered.device)
        return gain.fit_scale(entered, left, name, self.dtype)


class StreamParts(NamedTuple):
    """The residual stream after attention, and the factors of its parts (see `LayerMix`)."""

    weights: "torch.Tensor"  # [head, query, key]: attention, times the scale of norms
    projection: "torch.Tensor"  # [head, width, model width]: of each head's values
    residual: "torch.Tensor"  # [query, model width]: the residual's own part
    stream: "torch.Tensor"  # [query, model width]


@dataclass(frozen=True)
class Wiring(ABC):
    """The place of one attention call in its block. Subclasses are the wiring patterns.

    Parameters
    ----------
    attention
        The module that attends.
    residual
        Where the residual stream before attention is observed.
    block
        The module to rerun with other values: the smallest one around the attention whose output
        is the residual stream of the next block. Inferred from the trace if a pattern leaves it
        None; None if it was not found.
    """

    attention: str
    residual: Tap
    block: str | None = field(default=None, kw_only=True)

    @classmethod
    @abstractmethod
    def recognise(cls, trace: Trace, call: int) -> "Wiring | Miss":
        """The wiring of the attention call at a place of the trace, if it is of this pattern."""

    @property
    @abstractmethod
    def taps(self) -> tuple[Tap, ...]:
        """The states to observe, the residual first; the layer is complete with the last one."""

    @abstractmethod
    def split_stream(self, observed: Observation) -> StreamParts:
        """The residual stream after attention, and its parts; checked against what was observed."""

    @abstractmethod
    def make_vectors(self, values: "torch.Tensor", reader: ModuleReader) -> "torch.Tensor":
        """[head, key, model width]: values [head, key, width] as they enter the stream."""

    @property
    def crosses(self) -> bool:
        """Whether it is the cross-attention of a block, after its self-attention."""
        return name_part(self.attention) == "cross"


@dataclass(frozen=True)
class BranchWiring(Wiring):
    """A branch that is added to the residual stream: total = x + factor * passed(branch).

    Parameters
    ----------
    projection
        The module that joins the heads; its output is the branch.
    passed
        Modules that the branch passes before it is added: norms, factors.
    factor
        By which the branch is multiplied then.
    stream
        Where the sum is observed.
    """

    projection: str
    passed: tuple[str, ...]
    factor: float
    stream: Tap

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The states to observe, the residual first; the layer is complete with the last one."""
        passed = [Tap(side, name) for name in self.passed for side in ("in", "out")]
        return (self.residual, Tap("out", self.projection), *passed, self.stream)

    def split_stream(self, observed: Observation) -> StreamParts:
        """The sum as the residual stream after attention, and its parts; checked."""
        weights, projection, total = self.add_branch(observed)
        stream = observed.state(self.stream)
        observed.check(total, stream, total, f"the stream after {self.attention}")
        return StreamParts(weights, projection, observed.residual, stream)

    def add_branch(
        self, observed: Observation
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """The weights and projection of a `StreamParts`, and the residual plus the branch.

        Heads, values and projection must add up to the branch that was observed.
        """
        heads, _, width = observed.values.shape
        joined, bias = observed.reader.projection(self.projection, heads * width)
        weights = observed.attention
        branch = observed.state(Tap("out", self.projection))
        mixed = (weights @ observed.values).transpose(0, 1).reshape(len(branch), -1) @ joined
        observed.check(mixed, branch - bias, branch, f"the branch of {self.attention}")
        added = branch
        for name in self.passed:
            entered, added = observed.state(Tap("in", name)), observed.state(Tap("out", name))
            weights = weights * observed.fit_scale(name, entered, added)
        total = observed.residual + self.factor * added
        return weights, joined.reshape(heads, width, -1), total

    def make_vectors(self, values: "torch.Tensor", reader: ModuleReader) -> "torch.Tensor":
        """[head, key, model width]: values through the projection, and what it passes."""
        heads, _, width = values.shape
        joined, _ = reader.projection(self.projection, heads * width)
        turned = joined.reshape(heads, width, -1) * self.factor
        # norms are linear: they may as well turn the projection
        for name in self.list_gains():
            turned = reader.gain(name, turned.shape[-1], values.device).turn(turned)
        return values @ turned

    def list_gains(self) -> tuple[str, ...]:
        """The norms and factors between the projection and the residual stream, in order."""
        return self.passed
