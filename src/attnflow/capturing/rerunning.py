"""Rerunning the block of an attention with values set to zero, all else being as it was.

The *block* of an attention is the smallest module around it whose output is the residual stream
that the attention of the next block is added to: norms and MLP lie inside. A model's trace
(models/wiring.py) says which module that is. While a model runs on an input, what each block was
called with is kept; the block is then called again with many copies of it, and in each copy the
value of one key is zero.

The proof: with no value set to zero, a block must give again what it gave.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attnflow.capturing.assembly import read_arguments
from attnflow.capturing.following import trace_model, unfollowed
from attnflow.capturing.mixing import MISSING, LayerMix
from attnflow.errors import CaptureError, OptionError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import name_part
from attnflow.models.inputs import Encoded
from attnflow.models.listening import Attend, intercepting
from attnflow.models.model import Model
from attnflow.models.probing import make_probe_inputs
from attnflow.models.wiring import Event, Tap, Wiring, first_state, is_same, trace

if TYPE_CHECKING:
    import torch

TOKENS = 4096  # of all copies that a block takes at once
PROOF_COPIES = 2
BLOCKS: "WeakKeyDictionary[Any, list[str]]" = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Block:
    """One call of the block that holds an attention, of one input.

    `block.rerun(keys)` gives [key, query, model width]: the block's output with the value of each
    of these keys set to zero, in all heads.
    """

    name: str
    module: Any
    attention: Any  # the module that attends
    given: tuple[Any, ...]  # what the block was called with
    named: dict[str, Any]
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
            attend: Attend,
            module: Any,
            query: Any,
            key: Any,
            value: Any,
            *rest: Any,
            **options: Any,
        ) -> Any:
            if module is self.attention:
                if value.shape[0] != copies:
                    raise CaptureError(
                        f"{self.name} ({type(self.module).__name__}) does not take several copies"
                        " of its input, so values cannot be set to zero; use edges='contribution'"
                    )
                if len(keys):
                    value = value.clone()
                    value[torch.arange(copies), :, check_keys(keys, value.shape[2])] = 0.0
            return attend.function(module, query, key, value, *rest, **options)

        with (
            evaluating(self.module),
            torch.no_grad(),
            unfollowed(),
            intercepting(attend_without),
        ):
            output = self.module(*repeat(self.given, copies), **repeat(self.named, copies))
        state = first_state(output)
        assert state is not None  # it was one when the block was recorded
        return state.reshape(copies, *self.output.shape).float()

    def join(self, mix: LayerMix) -> LayerMix:
        """The mix of this attention, with what its block gave, and to run it again."""
        return replace(mix, output=self.output.float(), rerun=self.rerun)

    def check(self) -> None:
        """Refuse a block that, with nothing changed, does not give again what it gave."""
        output = self.output.float()
        again = self.call((), min(PROOF_COPIES, len(output)))
        length = output.norm(dim=-1).clamp_min(1e-30)
        worst = float(((again - output).norm(dim=-1) / length).max())
        if not worst <= MISSING[min(8, self.output.dtype.itemsize)]:
            raise CaptureError(
                f"{self.name} ({type(self.module).__name__}) gave another output when it was run"
                f" again, by {worst:.2g} of its length, so values cannot be set to zero;"
                " use edges='contribution'"
            )


def check_keys(keys: Sequence[int], count: int) -> "torch.Tensor":
    """[copy]: keys as an index."""
    import torch

    if any(not 0 <= key < count for key in keys):
        raise OptionError(f"keys must be in 0..{count - 1}; got {list(keys)}")
    return torch.tensor(list(keys), dtype=torch.long)


def repeat(value: Any, copies: int) -> Any:
    """What one sequence was given, for so many copies of it: states, masks, position tables.

    Tensors [1, ...] are of the sequence, and become [copy, ...]; what is the same for any sequence
    has no such dimension, and stays.
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


# ---- finding blocks -----------------------------------------------------------------------------


def find_blocks(model: Model) -> list[str]:
    """The name of the block of each attention call; traced once per model."""
    if model.model not in BLOCKS:
        wirings = trace_model(model)
        arguments, _ = make_probe_inputs(model, model.model)
        with evaluating(model.model), running(model):
            events = trace(model.model, arguments)
        BLOCKS[model.model] = name_blocks(events, wirings, dict(model.model.named_modules()))
    return BLOCKS[model.model]


def name_blocks(
    events: Sequence[Event], wirings: Sequence[Wiring], modules: dict[str, Any]
) -> list[str]:
    """The blocks of a model's attention calls, from its trace."""
    calls = [place for place, event in enumerate(events) if event.tap is None]
    found = [find_block(events, calls, number, wirings) for number in range(len(calls))]
    kinds = {type(modules[name]) for name in found if name is not None}
    # the last block of a stack is followed by no other: it is of the kind of those before it
    names = [
        name or next((part for part in list_around(wiring) if type(modules[part]) in kinds), None)
        for name, wiring in zip(found, wirings, strict=True)
    ]
    return [
        name or find_listed(wiring, modules) for name, wiring in zip(names, wirings, strict=True)
    ]


def list_around(wiring: Wiring) -> list[str]:
    """The names of the modules around an attention, the smallest first."""
    parts = wiring.attention.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def find_block(
    events: Sequence[Event], calls: Sequence[int], number: int, wirings: Sequence[Wiring]
) -> str | None:
    """The smallest module around a call that gives the stream that the next block adds to."""
    for name in list_around(wirings[number]):
        end = find_event(events, Tap("out", name), range(calls[number], len(events)))
        if end is None:
            continue
        for later in range(number + 1, len(calls)):
            # attention to another sequence stands inside of a block, behind self-attention
            if calls[later] < end or name_part(wirings[later].attention) == "cross":
                continue
            before = range(calls[later] - 1, -1, -1)
            residual = find_event(events, wirings[later].residual, before)
            if residual is not None and is_same(events[residual].state, events[end].state):
                return name
            break
    return None


def find_event(events: Sequence[Event], tap: Tap, places: Sequence[int]) -> int | None:
    """The first of these places where a tap was seen."""
    return next((place for place in places if events[place].tap == tap), None)


def find_listed(wiring: Wiring, modules: dict[str, Any]) -> str:
    """The block of the only attention of a stack: the largest module around it in a list."""
    for name in reversed(list_around(wiring)):
        if name.rpartition(".")[2].isdigit():
            return name
    kind = type(modules[wiring.attention]).__name__
    raise CaptureError(
        f"the block around {wiring.attention} ({kind}) was not found, so values cannot be set to"
        " zero; use edges='contribution'"
    )


# ---- recording ----------------------------------------------------------------------------------


def record_blocks(model: Model, encoded: Encoded) -> list[Block]:
    """What the block of each attention call was given and gave on one input; checked."""
    import torch

    names = find_blocks(model)
    modules = dict(model.model.named_modules())
    attentions = [modules[wiring.attention] for wiring in trace_model(model)]
    blocks: list[Block | None] = [None] * len(names)
    count = 0

    def listen(attend: Attend, module: Any, *given: Any, **options: Any) -> Any:
        nonlocal count
        if count < len(names) and module is attentions[count]:
            active[names[count]][-1].calls.append(count)
            count += 1
        return attend.function(module, *given, **options)

    with (
        evaluating(model.model),
        torch.no_grad(),
        running(model),
        follow_blocks({name: modules[name] for name in names}) as active,
        intercepting(listen),
    ):
        model.model(**read_arguments(model, [encoded]))
    for name, calls in active.items():
        for call in calls:
            for number in call.calls:
                given = (attentions[number], call.given, call.named, call.output)
                blocks[number] = Block(name, modules[name], *given)
    if None in blocks:
        raise CaptureError(
            f"{len(names) - blocks.count(None)} of {len(names)} blocks were followed to their end"
        )
    done = [block for block in blocks if block is not None]
    with running(model):
        for block in done:
            block.check()
    return done


@dataclass(eq=False)
class BlockCall:
    """A call of a block that is not finished."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    calls: list[int]  # the attention calls inside
    output: Any = None


@contextmanager
def follow_blocks(modules: dict[str, Any]) -> Iterator[dict[str, list[BlockCall]]]:
    """The calls of each module in this thread, in order, which fill up while this lasts."""
    thread = threading.get_ident()
    calls: dict[str, list[BlockCall]] = {name: [] for name in modules}

    def watch(name: str, module: Any) -> Iterator[Any]:
        def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                calls[name].append(BlockCall(given, named, []))

        def after(_: Any, given: Any, output: Any) -> None:
            state = first_state(output)
            if threading.get_ident() == thread and state is not None:
                calls[name][-1].output = state.detach().reshape(-1, state.shape[-1])

        # before anybody else's hook, and after: the block as a whole is what is run again
        yield module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(after)

    with ExitStack() as hooks:
        for name, module in modules.items():
            for handle in watch(name, module):
                hooks.callback(handle.remove)
        yield calls
