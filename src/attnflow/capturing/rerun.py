"""Rerunning the block of an attention with some values set to zero, and all else unchanged.

The *block* of an attention is the smallest module around it whose output is the residual stream
that the attention of the next block is added to: norms and MLP lie inside. Its wiring
(models/wiring/) names that module. While a model runs on an input, the arguments of each block are
kept; the block is then called again with many copies of them, and in each copy the value of one key
is zero.

The proof: with no value set to zero, a block must return the same output again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnflow.capturing.capture import read_arguments
from attnflow.capturing.follow import is_following
from attnflow.capturing.mix import LayerMix
from attnflow.errors import CaptureError, OptionError
from attnflow.models.attention_calls import AttentionFunction, AttentionOutput, intercept_attention
from attnflow.models.context import set_within
from attnflow.models.encoded import Encoded
from attnflow.models.execution import evaluating, running
from attnflow.models.hooks import watch_modules
from attnflow.models.model import Model
from attnflow.models.wiring.find import find_wirings
from attnflow.models.wiring.linear_maps import MISSING
from attnflow.models.wiring.trace import first_state

if TYPE_CHECKING:
    import torch

TOKENS = 4096  # of all copies that a block takes at once
PROOF_COPIES = 2


@dataclass(frozen=True, eq=False)
class RecordedBlock:
    """One call of the block around an attention, for one input.

    `block.rerun(keys)` returns [key, query, model width]: the block's output with the value of each
    of these keys set to zero, in all heads.
    """

    name: str
    module: "torch.nn.Module"
    attention: "torch.nn.Module"  # the module that attends
    given: tuple[object, ...]  # the arguments of the block
    named: dict[str, object]
    output: "torch.Tensor"  # [query, model width]

    def rerun(self, keys: Sequence[int]) -> "torch.Tensor":
        """[key, query, model width]: the output without the value of each key, in float32."""
        import torch

        at_once = max(1, TOKENS // len(self.output))
        parts = [
            self.call(keys[start : start + at_once], len(keys[start : start + at_once]))
            for start in range(0, len(keys), at_once)
        ]
        return torch.cat(parts) if parts else self.output.new_zeros((0, *self.output.shape)).float()

    def call(self, keys: Sequence[int], copies: int) -> "torch.Tensor":
        """[copy, query, model width]; in copy c the value of keys[c] is zero, if there are keys."""
        import torch

        def attend_without(
            function: AttentionFunction,
            module: "torch.nn.Module",
            *given: "torch.Tensor",
            **options: object,
        ) -> AttentionOutput:
            query, key, value, *rest = given
            if module is self.attention:
                if value.shape[0] != copies:
                    raise CaptureError(
                        f"{self.name} ({type(self.module).__name__}) does not take several copies"
                        " of its input, so values cannot be set to zero; use contribution edges"
                    )
                if len(keys):
                    value = value.clone()
                    value[torch.arange(copies), :, check_keys(keys, value.shape[2])] = 0.0
            return function.compute(module, query, key, value, *rest, **options)

        with (
            evaluating(self.module),
            torch.no_grad(),
            set_within(is_following, False),
            intercept_attention(attend_without),
        ):
            output = self.module(*repeat(self.given, copies), **repeat(self.named, copies))
        state = first_state(output)
        assert state is not None  # it was one when the block was recorded
        return state.reshape(copies, *self.output.shape).float()

    def join(self, mix: LayerMix) -> LayerMix:
        """The mix of this attention, with the output of its block and its `rerun`."""
        return replace(mix, output=self.output.float(), rerun=self.rerun)

    def check(self) -> None:
        """Refuse a block whose output differs when it runs again with nothing changed."""
        output = self.output.float()
        again = self.call((), min(PROOF_COPIES, len(output)))
        length = output.norm(dim=-1).clamp_min(1e-30)
        worst = float(((again - output).norm(dim=-1) / length).max())
        if not worst <= MISSING[min(8, self.output.dtype.itemsize)]:
            raise CaptureError(
                f"{self.name} ({type(self.module).__name__}) gave another output when it was run"
                f" again, by {worst:.2g} of its length, so values cannot be set to zero;"
                " use contribution edges"
            )


def check_keys(keys: Sequence[int], count: int) -> "torch.Tensor":
    """[copy]: keys as an index."""
    import torch

    if any(not 0 <= key < count for key in keys):
        raise OptionError(f"keys must be in 0..{count - 1}; got {list(keys)}")
    return torch.tensor(list(keys), dtype=torch.long)


def repeat(value: Any, copies: int) -> Any:
    """An argument of one sequence, repeated per copy: states, masks, position tables.

    Tensors [1, ...] belong to the sequence, and become [copy, ...]; anything that is the same for
    every sequence has no such axis, and stays.
    """
    import torch

    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(repeat(item, copies) for item in value)
    if isinstance(value, dict):
        return {name: repeat(item, copies) for name, item in value.items()}
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[0] != 1:
        return value
    expanded = value.expand(copies, *value.shape[1:])
    return expanded if value.ndim > 3 else expanded.contiguous()  # masks [1, 1, query, key] stay


def list_blocks(model: Model) -> list[str]:
    """The name of the block of each attention call."""
    wirings = find_wirings(model)
    for wiring in wirings:
        if wiring.block is None:
            kind = type(model.model.get_submodule(wiring.attention)).__name__
            raise CaptureError(
                f"the block around {wiring.attention} ({kind}) was not found, so values cannot be"
                " set to zero; use contribution edges"
            )
    return [wiring.block for wiring in wirings if wiring.block is not None]


# ---- recording ----------------------------------------------------------------------------------


class BlockCall(NamedTuple):
    """A call of a block that has not returned yet."""

    given: tuple[object, ...]
    named: dict[str, object]
    attentions: list[int]  # the numbers of the attention calls inside


def record_blocks(model: Model, encoded: Encoded) -> list[RecordedBlock]:
    """Record the block of each attention call on one input; checked."""
    import torch

    names = list_blocks(model)
    blocks = list(map(model.model.get_submodule, names))
    attentions = [model.model.get_submodule(each.attention) for each in find_wirings(model)]
    started: dict[torch.nn.Module, BlockCall] = {}  # the last call of each block in this thread
    found: dict[int, RecordedBlock] = {}  # by the number of the attention call
    count = 0

    def before(
        module: "torch.nn.Module", given: tuple[object, ...], named: dict[str, object]
    ) -> None:
        started[module] = BlockCall(given, named, [])

    def attend(
        function: AttentionFunction, module: "torch.nn.Module", *given: object, **options: object
    ) -> AttentionOutput:
        nonlocal count
        if count < len(blocks) and module is attentions[count]:
            started[blocks[count]].attentions.append(count)
            count += 1
        return function.compute(module, *given, **options)

    def after(module: "torch.nn.Module", given: tuple[object, ...], output: object) -> None:
        state = first_state(output)
        if state is None:
            return
        call = started[module]
        flat = state.detach().reshape(-1, state.shape[-1])
        for number in call.attentions:
            found[number] = RecordedBlock(
                names[number], module, attentions[number], call.given, call.named, flat
            )

    with (
        evaluating(model.model),
        torch.no_grad(),
        running(model),
        # before other hooks, and after them: the block with its hooks is what runs again
        watch_modules(dict.fromkeys(blocks), before=before, after=after, prepend=True),
        intercept_attention(attend),
    ):
        model.model(**read_arguments(model, [encoded]))
    if len(found) < len(blocks):
        raise CaptureError(f"{len(found)} of {len(blocks)} blocks were followed to their end")
    recorded = [found[number] for number in range(len(blocks))]
    with running(model):
        for block in recorded:
            block.check()
    return recorded
