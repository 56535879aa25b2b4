"""Hooks that apply a backward rule: autograd functions around attention and modules.

They are the identity in the forward pass, and apply the current rule in a backward pass. What they
need of the forward pass is saved by autograd, so that recomputed blocks keep nothing of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnflow.capturing.backward_rule import PLAIN, BackwardRule, ModuleCall

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from torch.utils.hooks import RemovableHandle

    from attnflow.capturing.backward_rule import ThreeGradients


class RuleHooks:
    """The hooks of one forward pass.

    Parameters
    ----------
    rules
        Those of the backward passes that follow; parts that none of them changes are not hooked.
    is_running
        Whether a module is called by this forward pass or its recomputation: hooks belong to the
        module, and passes of other threads call them too.
    """

    def __init__(self, rules: Sequence[BackwardRule], is_running: Callable[[], bool]) -> None:
        self.rules, self.is_running = rules, is_running
        self.rule = PLAIN  # of the current backward pass
        self.calls: list[HookedCall | None] = []  # of modules that have not returned yet

    def hook_attention(
        self, name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> "ThreeGradients":
        """Query, key and value unchanged, whose gradients the rule may change."""
        if all(rule.attention is None for rule in self.rules):
            return query, key, value
        hooked: ThreeGradients = AttentionInputs.apply(self, name, query, key, value)
        return hooked

    @contextmanager
    def hook_modules(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context, the modules that a rule concerns are hooked."""
        rules = [rule for rule in self.rules if rule.module is not None]
        with ExitStack() as handles:
            for name, module in model.named_modules() if rules else ():
                if any(rule.concerns(module) for rule in rules):
                    for handle in self.hook_module(name, module):
                        handles.callback(handle.remove)
            yield

    def hook_module(self, name: str, module: torch.nn.Module) -> "Iterator[RemovableHandle]":
        """Hook one module, and yield the handles."""

        # torch may call a hook that was just removed without its keyword arguments
        def before(
            _: torch.nn.Module, given: tuple[object, ...], named: dict[str, object] | None = None
        ) -> object:
            if named is None or not self.is_running():
                return None
            state = given[0] if given else named.get("hidden_states")
            if not isinstance(state, torch.Tensor) or not state.requires_grad:
                self.calls.append(None)
                return None
            call = HookedCall(self, name, module)
            self.calls.append(call)
            hooked = ModuleInput.apply(call, state)
            if given:
                return (hooked, *given[1:]), named
            return given, named | {"hidden_states": hooked}

        def after(_: torch.nn.Module, given: object, output: object) -> object:
            if not self.is_running():
                return None
            call = self.calls.pop()
            if call is None or not isinstance(output, torch.Tensor):
                return None
            return ModuleOutput.apply(call, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)


@dataclass(eq=False)
class HookedCall:
    """A call of a module; its output and gradient are set while a backward pass is inside it."""

    hooks: RuleHooks
    name: str
    module: torch.nn.Module
    left: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


class AttentionInputs(torch.autograd.Function):  # type: ignore[misc]
    """The identity on query, key and value of an attention."""

    @staticmethod
    def forward(
        ctx: "FunctionCtx",
        hooks: RuleHooks,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> "ThreeGradients":
        ctx.hooks, ctx.name = hooks, name
        return query.view_as(query), key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: "FunctionCtx", *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.hooks.rule.change_attention(ctx.name, *gradients)


class ModuleInput(torch.autograd.Function):  # type: ignore[misc]
    """The identity on the input of a module."""

    @staticmethod
    def forward(ctx: "FunctionCtx", call: HookedCall, state: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(state)
        return state.view_as(state)

    @staticmethod
    def backward(ctx: "FunctionCtx", own: torch.Tensor) -> tuple[None, torch.Tensor]:
        call = ctx.call
        left, gradient = call.left, call.gradient
        if left is None or gradient is None:  # the current rule does not concern this module
            return None, own
        call.left = call.gradient = None
        (entered,) = ctx.saved_tensors
        given = ModuleCall(call.name, call.module, entered.detach(), left.detach(), gradient, own)
        return None, call.hooks.rule.change_module(given)


class ModuleOutput(torch.autograd.Function):  # type: ignore[misc]
    """The identity on the output of a module."""

    @staticmethod
    def forward(ctx: "FunctionCtx", call: HookedCall, state: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(state)
        return state.clone()  # a model may change it in place, which autograd refuses on a view

    @staticmethod
    def backward(ctx: "FunctionCtx", gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        call = ctx.call
        if call.hooks.rule.concerns(call.module):
            (call.left,), call.gradient = ctx.saved_tensors, gradient
        return None, gradient
