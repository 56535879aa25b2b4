"""Backward passes from watched scalars: one forward pass, and one backward pass per `Watch`.

A watch is a scalar of the prediction, a backward rule, and the places whose gradients are wanted.
The model keeps its fused attention kernels: the gradient with respect to the output of an attention
is enough, as the gradient with respect to its weights follows from it (capturing/mix.py).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnflow.capturing.backward_rule import PLAIN, BackwardRule
from attnflow.capturing.capture import read_arguments
from attnflow.capturing.checkpointing import save_memory
from attnflow.errors import CaptureError, OptionError
from attnflow.models.attention_calls import AttentionFunction, AttentionOutput, intercept_attention
from attnflow.models.context import set_within
from attnflow.models.encoded import Encoded
from attnflow.models.execution import evaluating, running
from attnflow.models.model import Model
from attnflow.models.predict import choose_targets, keep_logits

if TYPE_CHECKING:
    import torch

    from attnflow.capturing.rule_hooks import RuleHooks

WATCHED = ("logit", "log_probability", "probability")
# a class or token by name or number, or two of them, whose difference is watched
TargetOrPair = int | str | tuple[int | str, int | str] | None
WatchedTarget = TargetOrPair | list[int | None]  # one for all inputs, or one per input
# the run_backward that this context belongs to, in any thread that recomputes blocks for it
current: ContextVar[object] = ContextVar("current", default=None)


@dataclass(frozen=True, eq=False)
class Watch:
    """A scalar of each prediction, and what its backward pass computes.

    Parameters
    ----------
    target
        One class for all inputs, two of them, whose difference is watched, or a list with one class
        per input. The predicted class where None.
    of
        "logit", "log_probability" or "probability" of the target.
    rule
        The rule of the backward pass.
    wanted
        Where gradients are taken: "attention", the output of every attention; "words", the output
        of the word embedding; "blocks", the input of the first block.
    """

    target: WatchedTarget = None
    of: str = "logit"
    rule: BackwardRule = PLAIN
    wanted: Sequence[str] = ("attention",)


@dataclass(frozen=True, eq=False)
class Gradients:
    """The result of one backward pass.

    Parameters
    ----------
    targets
        Per sequence, the number of the watched class, or of the two whose difference was watched.
    names
        Per sequence, the label of the target.
    attention
        By the number of the call, [sequence, query, head, width]: with respect to the output of
        that attention. Removing one frees its memory.
    states
        By "words" or "blocks", [sequence, token, width]: with respect to `BackwardPass.states`.
    """

    targets: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    attention: "dict[int, torch.Tensor]"
    states: "dict[str, torch.Tensor]"


@dataclass(frozen=True, eq=False)
class BackwardPass:
    """The result of `run_backward`.

    Parameters
    ----------
    logits
        [sequence, class]: the model's scores at the watched positions.
    states
        By "words" or "blocks", [sequence, token, width]: the states there.
    gradients
        The gradients of each watch, by the caller's key for it.
    """

    logits: "torch.Tensor"
    states: "dict[str, torch.Tensor]"
    gradients: dict[Hashable, Gradients] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ForwardGraph:
    """A forward pass with its autograd graph."""

    logits: "torch.Tensor"  # [sequence, class]
    attention: "list[torch.Tensor]"  # the output of each attention [sequence, query, head, width]
    states: "dict[str, torch.Tensor]"  # by "words" or "blocks", [sequence, token, width]
    hooks: "RuleHooks"


def run_backward(
    model: Model,
    inputs: Sequence[Encoded],
    watches: Mapping[Any, Watch],
    *,
    position: int | None = None,
) -> BackwardPass:
    """One forward pass over some inputs, and one backward pass per watch.

    watches: by any key, which `BackwardPass.gradients` has too. position: where the prediction is
    read; the focal position if None.
    """
    import torch

    aims = {
        key: read_targets(model, watch.target, watch.of, len(inputs))
        for key, watch in watches.items()
    }
    with (
        torch.inference_mode(False),
        evaluating(model.model),
        torch.enable_grad(),
        running(model),
        run_forward(model, inputs, list(watches.values()), position) as graph,
    ):
        states = {name: state.detach() for name, state in graph.states.items()}
        found = BackwardPass(graph.logits.detach(), states)
        for number, (key, watch) in enumerate(watches.items(), start=1):
            targets = fill_targets(model, graph.logits, aims[key])
            is_last = number == len(watches)
            found.gradients[key] = differentiate(model, graph, watch, targets, is_last)
        return found


@contextmanager
def run_forward(
    model: Model, inputs: Sequence[Encoded], watches: Sequence[Watch], position: int | None
) -> Iterator[ForwardGraph]:
    """Run the model once; within this context, backward passes through it obey their rules."""
    from attnflow.capturing.rule_hooks import RuleHooks

    wanted = {name for watch in watches for name in watch.wanted}
    if "attention" in wanted:
        check_gradient_edges(model)
    rules = [watch.rule for watch in watches]
    places = [model.logit_position(encoded, position) for encoded in inputs]
    names = {module: name for name, module in model.model.named_modules()}
    tokens = len(inputs) * max(len(encoded.tokens) for encoded in inputs)
    # one plain backward pass to the input keeps its blocks: recomputing them costs a third more
    recomputes = "attention" in wanted or rules != [PLAIN]
    outputs: list[torch.Tensor] = []
    is_forward = True  # not the recomputation of a block in a backward pass
    run = object()
    hooks = RuleHooks(rules, lambda: current.get() is run)

    def attend(
        function: AttentionFunction,
        module: "torch.nn.Module",
        *given: "torch.Tensor",
        **options: object,
    ) -> AttentionOutput:
        query, key, value, *rest = given
        hooked = hooks.hook_attention(names.get(module, "attention"), query, key, value)
        output = function.compute(module, *hooked, *rest, **options)
        if is_forward:
            outputs.append(output[0])
        return output

    with (
        # it may trace the model, which must not run the hooks
        save_memory(model, tokens) if recomputes else nullcontext(),
        set_within(current, run),
        require_gradients(model, wanted, run) as states,
        hooks.hook_modules(model.model),
        intercept_attention(attend),
    ):
        arguments, kept = keep_logits(model, read_arguments(model, inputs), places)
        if model.is_vision:
            arguments["pixel_values"] = arguments["pixel_values"].detach().requires_grad_()
        output = model.model(**arguments)
        is_forward = False
        yield ForwardGraph(model.read_logits(output, kept), outputs, states, hooks)


def check_gradient_edges(model: Model) -> None:
    """Refuse a model whose attention has no gradients of a prediction."""
    if not model.predicts:
        raise OptionError(
            f"gradient edges watch a prediction, and {model.name} has no head that predicts; use"
            " contribution edges"
        )
    if not model.probe.interface:
        raise CaptureError(
            f"{model.name} attends outside of transformers' attention interface, so gradient edges"
            " are not available for this model; use attention edges"
        )


def differentiate(
    model: Model,
    graph: ForwardGraph,
    watch: Watch,
    targets: Sequence[tuple[int, ...]],
    is_last: bool,
) -> Gradients:
    """Run the backward pass of one watch. is_last: whether the autograd graph may be freed."""
    import torch

    by_attention = graph.attention if "attention" in watch.wanted else []
    places = [name for name in watch.wanted if name != "attention"]
    graph.hooks.rule = watch.rule
    gradients = torch.autograd.grad(
        score_targets(model, graph.logits, targets, watch.of).sum(),
        [*by_attention, *(graph.states[name] for name in places)],
        retain_graph=not is_last,
    )
    return Gradients(
        tuple(targets),
        tuple(" - ".join(map(model.label, each)) for each in targets),
        dict(enumerate(gradients[: len(by_attention)])),
        dict(zip(places, gradients[len(by_attention) :], strict=True)),
    )


# ---- watched scalars ----------------------------------------------------------------------------


def read_targets(
    model: Model, target: WatchedTarget, of: str, count: int
) -> list[tuple[int | None, ...]]:
    """Per input, the number of its target, or of the two of a contrast; None: the prediction."""
    if of not in WATCHED:
        raise OptionError(f"unknown target_of {of!r}; choose from {', '.join(WATCHED)}")
    given = target if isinstance(target, list) else [target] * count
    if len(given) != count:
        raise OptionError(
            f"a list of targets has one for each of {count} inputs; got {len(given)}"
            " (a contrast is a tuple of two)"
        )
    if not model.predicts and any(each is not None for each in given):
        raise OptionError(
            f"a target is a class that the model predicts, and {model.name} has no head that"
            f" predicts; got {target!r}: leave it out"
        )
    return [(None,) if each is None else number_target(model, each) for each in given]


def number_target(model: Model, target: int | str | tuple[int | str, ...]) -> tuple[int, ...]:
    """The number of a class, or of two different ones."""
    if not isinstance(target, tuple):
        return (model.target(target),)
    if len(target) != 2:
        raise OptionError(f"a contrast is between two targets; got {len(target)}")
    first, second = (model.target(each) for each in target)
    if first == second:
        raise OptionError(f"a contrast is between two different targets; got {target!r}")
    return first, second


def fill_targets(
    model: Model, logits: "torch.Tensor", aims: Sequence[tuple[int | None, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The targets, the predicted class where None; checked against the classes of the model."""
    columns = zip(*aims, strict=True)  # the class of each, then those that contrasts subtract
    return tuple(zip(*(choose_targets(model, logits, each) for each in columns), strict=True))


def score_targets(
    model: Model, logits: "torch.Tensor", targets: Sequence[tuple[int, ...]], of: str
) -> "torch.Tensor":
    """[sequence]: the watched scalar of each; the difference of two classes."""
    import torch

    scores = {
        "logit": lambda: logits,
        "log_probability": lambda: model.log_probabilities(logits),
        "probability": lambda: model.probabilities(logits),
    }[of]()
    rows = torch.arange(len(targets), device=scores.device)
    # [class of the target, sequence]
    chosen = [
        scores[rows, torch.tensor(each, device=scores.device)]
        for each in zip(*targets, strict=True)
    ]
    return chosen[0] if len(chosen) == 1 else chosen[0] - chosen[1]


# ---- where gradients are taken ------------------------------------------------------------------


@contextmanager
def require_gradients(
    model: Model, wanted: set[str], run: object
) -> "Iterator[dict[str, torch.Tensor]]":
    """Within this context, the first states of a run require gradients, even if no parameter does.

    Yields a dict that is filled with the states at "words" and, if wanted, "blocks". Images require
    gradients themselves.
    """
    states: dict[str, torch.Tensor] = {}

    def after_words(
        module: "torch.nn.Module", given: object, output: "torch.Tensor"
    ) -> "torch.Tensor | None":
        if current.get() is not run:  # another thread's pass
            return None
        state = output.detach().requires_grad_()
        states.setdefault("words", state)  # an encoder-decoder may embed its target by it too
        return state

    # torch may call a hook that was just removed without its keyword arguments
    def before_blocks(
        module: "torch.nn.Module",
        given: "tuple[torch.Tensor, ...]",
        named: dict[str, object] | None = None,
    ) -> object:
        if named is None or current.get() is not run or "blocks" in states:
            return None
        state: torch.Tensor = given[0] if given else named["hidden_states"]
        # a view, so that other readers of the state do not count
        states["blocks"] = state.view_as(state)
        if given:
            return (states["blocks"], *given[1:]), named
        return given, named | {"hidden_states": states["blocks"]}

    with ExitStack() as hooks:
        if not model.is_vision:
            hooks.callback(model.embedding.register_forward_hook(after_words).remove)
        if "blocks" in wanted:
            block = find_first_block(model)
            handle = block.register_forward_pre_hook(before_blocks, with_kwargs=True)
            hooks.callback(handle.remove)
        yield states


def find_first_block(model: Model) -> "torch.nn.Module":
    """The module that computes the first layer: the first of the first list of modules."""
    import torch

    for module in model.model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module):
            return module[0]
    raise CaptureError(f"{model.name} has no list of layers; use reduce='norm'")
