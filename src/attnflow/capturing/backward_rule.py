"""`BackwardRule`: the gradients that parts of a model pass on in a backward pass.

A rule changes the backward pass only: the forward pass is that of the model, bit for bit. It is
applied while a backward pass runs, so that one forward pass serves several backward passes, each
with its own rule.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnflow.core.choices import call_own
from attnflow.errors import OptionError

if TYPE_CHECKING:
    import torch

    ThreeGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# what a rule may make linear in the backward pass (capturing/linearise.py)
LINEAR_PARTS = ("norms", "activations", "products")


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module, once the backward pass has reached its input.

    Parameters
    ----------
    name
        The module's name within its model.
    module
        The module.
    entered
        [..., width]: its first input.
    left
        [..., width]: its output.
    gradient
        [..., width]: of the watched scalar with respect to `left`.
    own
        [..., width]: of the watched scalar with respect to `entered`, as computed by autograd
        (under the rules of modules inside this one).
    """

    name: str
    module: "torch.nn.Module"
    entered: "torch.Tensor"
    left: "torch.Tensor"
    gradient: "torch.Tensor"
    own: "torch.Tensor"


@dataclass(frozen=True)
class BackwardRule:
    """The gradients that attention and modules pass on; those of autograd where a field is None.

    Parameters
    ----------
    name
        The name of the rule in messages.
    attention
        A function of the gradients with respect to query, key and value, each
        [sequence, head, position, width], of one attention; returns the three to pass on. Zeros for
        query and key hold the attention weights fixed.
    module
        A function of a `ModuleCall`; returns the gradient with respect to the input of the module,
        or None for that of autograd. Called for modules that map one tensor to one tensor.
    applies_to
        A function of a module: whether `module` is called for it. Called for every module if None.
    linear
        The parts that are linear in the backward pass, with fixed factors: any of "norms" (the
        scale), "activations" (the ratio of output and input, and gates) and "products" (gated
        products hand half of the gradient to each factor).

    >>> import torch
    >>> def hold_weights(query, key, value):
    ...     return torch.zeros_like(query), torch.zeros_like(key), value
    >>> BackwardRule("fixed attention", attention=hold_weights).name
    'fixed attention'
    """

    name: str
    attention: "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], ThreeGradients] | None" = None
    module: "Callable[[ModuleCall], torch.Tensor | None] | None" = None
    applies_to: "Callable[[torch.nn.Module], bool] | None" = None
    linear: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "linear", read_parts(self.name, self.linear))
        if not isinstance(self.name, str) or not self.name:
            raise OptionError(f"the name of a backward rule must be a text; got {self.name!r}")
        for field in ("attention", "module", "applies_to"):
            function = getattr(self, field)
            if function is not None and not callable(function):
                raise OptionError(
                    f"{field} of backward rule {self.name!r} must be a function or None;"
                    f" got {type(function).__name__}"
                )
        if self.applies_to is not None and self.module is None:
            raise OptionError(
                f"applies_to of backward rule {self.name!r} selects the modules for which `module`"
                " is called; got module=None: give both"
            )

    @property
    def conserves(self) -> bool:
        """Whether the model is linear in its stream under this rule, up to its biases."""
        return set(self.linear) == set(LINEAR_PARTS) and self.attention is hold_attention

    def concerns(self, module: "torch.nn.Module") -> bool:
        """Whether the rule changes the gradient of a module.

        Parameters
        ----------
        module
            A part of a model.
        """
        if self.module is None or self.applies_to is None:
            return self.module is not None
        return bool(call_own(f"applies_to of backward rule {self.name!r}", self.applies_to, module))

    def change_attention(
        self, name: str, query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor"
    ) -> "ThreeGradients":
        """The gradients that an attention passes on to query, key and value; checked.

        Parameters
        ----------
        name
            The name of the attention module within its model.
        query, key, value
            The gradients as computed by autograd.
        """
        if self.attention is None:
            return query, key, value
        where = f"attention of backward rule {self.name!r} at {name}"
        found = call_own(where, self.attention, query, key, value)
        wanted = [tuple(gradient.shape) for gradient in (query, key, value)]
        if not isinstance(found, tuple | list) or [read_shape(each) for each in found] != wanted:
            raise OptionError(
                f"{where} must return three tensors of shapes {', '.join(map(str, wanted))};"
                f" got {describe_shapes(found)}"
            )
        return found[0], found[1], found[2]

    def change_module(self, call: ModuleCall) -> "torch.Tensor":
        """The gradient with respect to the input of a module; checked.

        Parameters
        ----------
        call
            The call of the module.
        """
        if self.module is None:
            return call.own
        where = f"module of backward rule {self.name!r} at {call.name}"
        found: torch.Tensor | None = call_own(where, self.module, call)
        if found is None:
            return call.own
        if read_shape(found) != tuple(call.entered.shape):
            raise OptionError(
                f"{where} must return None or a tensor of shape {tuple(call.entered.shape)};"
                f" got {describe_shapes(found)}"
            )
        return found


def read_parts(name: str, parts: Iterable[str]) -> frozenset[str]:
    """The parts that a rule makes linear, checked."""
    chosen = frozenset([parts] if isinstance(parts, str) else parts)
    unknown = sorted(map(str, chosen - set(LINEAR_PARTS)))
    if unknown:
        raise OptionError(
            f"unknown linear part {unknown[0]!r} of backward rule {name!r}; choose from"
            f" {', '.join(LINEAR_PARTS)}"
        )
    return chosen


def hold_attention(
    query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor"
) -> "ThreeGradients":
    """Hand on the gradient of values alone: the attention weights are held fixed."""
    return query.new_zeros(query.shape), key.new_zeros(key.shape), value


PLAIN: BackwardRule = BackwardRule("plain")
LINEARISED: BackwardRule = BackwardRule(
    "linearised", attention=hold_attention, linear=frozenset(LINEAR_PARTS)
)
BACKWARD_RULES: dict[str, BackwardRule] = {"plain": PLAIN, "linearised": LINEARISED}


def read_rule(chosen: BackwardRule | str | None) -> BackwardRule | None:
    """A backward rule, given by name or itself; None if no backward pass is needed.

    >>> read_rule("plain") is PLAIN
    True
    """
    if chosen is None or isinstance(chosen, BackwardRule):
        return chosen
    if not isinstance(chosen, str) or chosen not in BACKWARD_RULES:
        raise OptionError(
            f"unknown backward rule {chosen!r}; choose from {', '.join(BACKWARD_RULES)},"
            " or give a BackwardRule"
        )
    return BACKWARD_RULES[chosen]


def read_shape(value: object) -> tuple[int, ...] | None:
    """The shape of a tensor; None for anything else."""
    return tuple(value.shape) if hasattr(value, "new_zeros") and hasattr(value, "shape") else None


def describe_shapes(value: object) -> str:
    """What a rule returned, in messages."""
    if isinstance(value, tuple | list):
        return ", ".join(map(describe_shapes, value)) or "none"
    shape = read_shape(value)
    return type(value).__name__ if shape is None else str(shape)
