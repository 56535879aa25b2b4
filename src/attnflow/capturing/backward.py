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
from attnflow.capturing.checkpointing import around_blocks, save_memory
from attnflow.errors import CaptureError, OptionError
from attnflow.models.attention_calls import AttentionFunction, AttentionOutput, intercept_attention
from attnflow.models.context import set_within
from attnflow.models.encoded import Encoded
from attnflow.models.execution import evaluating, running
from attnflow.models.model import Model
from attnflow.models.predict import (
    Foil,
    FoilNumber,
    RunnerUp,
    check_contrast,
    choose_foils,
    choose_targets,
    keep_logits,
    name_watched,
    number_class,
)
from attnflow.models.wiring.linear_maps import MISSING

if TYPE_CHECKING:
    import torch

    from attnflow.capturing.linearise import Lineariser
    from attnflow.capturing.rule_hooks import RuleHooks

WATCHED = ("logit", "log_probability", "probability")
# a class or token by name or number, None for the prediction; or with a foil, whose difference is
# watched
TargetOrPair = int | str | tuple[int | str | None, Foil] | None
WatchedTarget = (
    TargetOrPair | list[int] | list[int | None] | list[TargetOrPair]
)  # one for all inputs, or one per input
Aim = tuple[int | None] | tuple[int | None, FoilNumber]  # by number, with a foil or not
# the run_backward that this context belongs to, in any thread that recomputes blocks for it
current: ContextVar[object] = ContextVar("current", default=None)


@dataclass(frozen=True, eq=False)
class Watch:
    """A scalar of each prediction, and what its backward pass computes.

    Parameters
    ----------
    target
        One class for all inputs, two of them, whose difference is watched, or a list with one of
        these per input. The predicted class where None.
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
        Per watched prediction, the number of the class, or of the two whose difference was watched.
    names
        Per sequence, the label of the target, or of all targets of a span.
    attention
        By the number of the call, [sequence, query, head, width]: with respect to the output of
        that attention. Removing one frees its memory.
    states
        By "words" or "blocks", [sequence, token, width]: with respect to `BackwardPass.states`.
    scores
        Per watched prediction, the scalar.
    positions
        Per watched prediction, where it was read.
    biases
        The part of the scores' sum that comes from biases, if the rule is linear throughout and
        "blocks" are wanted; else 0.
    """

    targets: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    attention: "dict[int, torch.Tensor]"
    states: "dict[str, torch.Tensor]"
    scores: tuple[float, ...] = ()
    positions: tuple[int, ...] = ()
    biases: float = 0.0

    def list_watched(self, place: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """The scores and positions of one sequence, which has several if a span was watched.

        Parameters
        ----------
        place
            The number of the sequence.
        """
        part = slice(place, place + 1) if len(self.names) == len(self.scores) else slice(None)
        return self.scores[part], self.positions[part]


@dataclass(frozen=True, eq=False)
class BackwardPass:
    """The result of `run_backward`.

    Parameters
    ----------
    logits
        [sequence, class]: the model's scores at the watched positions; [position, class] of a span.
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

    logits: "torch.Tensor"  # [sequence, class], or [position, class] of a span
    attention: "list[torch.Tensor]"  # the output of each attention [sequence, query, head, width]
    states: "dict[str, torch.Tensor]"  # by "words" or "blocks", [sequence, token, width]
    positions: tuple[int, ...]  # where the logits were read
    sequences: int
    hooks: "RuleHooks"
    lineariser: "Lineariser"


def run_backward(
    model: Model,
    inputs: Sequence[Encoded],
    watches: Mapping[Any, Watch],
    *,
    position: int | Sequence[int] | None = None,
) -> BackwardPass:
    """One forward pass over some inputs, and one backward pass per watch.

    watches: by any key, which `BackwardPass.gradients` has too. position: where the prediction is
    read; the focal position if None. Several positions are of one input: its targets are one for
    each, and the sum of their scalars is watched.
    """
    import torch

    count = len(position) if isinstance(position, Sequence) else len(inputs)
    aims = {
        key: read_targets(model, watch.target, watch.of, count) for key, watch in watches.items()
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
    model: Model,
    inputs: Sequence[Encoded],
    watches: Sequence[Watch],
    position: int | Sequence[int] | None,
) -> Iterator[ForwardGraph]:
    """Run the model once; within this context, backward passes through it obey their rules."""
    from attnflow.capturing.linearise import Lineariser
    from attnflow.capturing.rule_hooks import RuleHooks

    wanted = {name for watch in watches for name in watch.wanted}
    if "attention" in wanted:
        check_gradient_edges(model)
    rules = [watch.rule for watch in watches]
    if isinstance(position, Sequence):
        places = [model.logit_position(inputs[0], each) for each in position]
    else:
        places = [model.logit_position(encoded, position) for encoded in inputs]
    names = {module: name for name, module in model.model.named_modules()}
    tokens = len(inputs) * max(len(encoded.tokens) for encoded in inputs)
    # one plain backward pass to the input keeps its blocks: recomputing them costs a third more
    recomputes = "attention" in wanted or rules != [PLAIN]
    outputs: list[torch.Tensor] = []
    is_forward = True  # not the recomputation of a block in a backward pass
    run = object()
    hooks = RuleHooks(rules, lambda: current.get() is run)
    lineariser = Lineariser(names)
    linearises = any(rule.linear for rule in rules)

    def attend(
        function: AttentionFunction,
        module: "torch.nn.Module",
        *given: "torch.Tensor",
        **options: object,
    ) -> AttentionOutput:
        query, key, value, *rest = given
        hooked = hooks.hook_attention(names.get(module, "attention"), query, key, value)
        with lineariser.seeing(False):
            output = function.compute(module, *hooked, *rest, **options)
        if is_forward:
            outputs.append(output[0])
        return output

    with (
        # it may trace the model, which must not run the hooks
        save_memory(model, tokens) if recomputes else nullcontext(),
        set_within(current, run),
        require_gradients(model, wanted, run, lineariser) as states,
        hooks.hook_modules(model.model),
        intercept_attention(attend),
        set_within(around_blocks, lineariser.watch if linearises else nullcontext),
    ):
        arguments, kept = keep_logits(model, read_arguments(model, inputs), places)
        if model.is_vision:
            arguments["pixel_values"] = arguments["pixel_values"].detach().requires_grad_()
        with around_blocks.get()():
            logits = model.read_logits(model.model(**arguments), kept)
        is_forward = False
        yield ForwardGraph(logits, outputs, states, tuple(places), len(inputs), hooks, lineariser)


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
    conserves = watch.rule.conserves and "blocks" in places
    graph.hooks.rule = graph.lineariser.rule = watch.rule
    graph.lineariser.biases = 0.0
    scores = score_targets(model, graph.logits, targets, watch.of)
    wanted = [*by_attention, *(graph.states[name] for name in places)]
    gradients = torch.autograd.grad(
        scores.sum(),
        [*wanted, graph.lineariser.anchor] if conserves else wanted,
        retain_graph=not is_last,
        allow_unused=conserves,  # the anchor has no gradient
    )[: len(wanted)]
    names = tuple(name_watched(model, each) for each in targets)
    found = Gradients(
        tuple(targets),
        (" ".join(names),) if graph.sequences < len(names) else names,
        dict(enumerate(gradients[: len(by_attention)])),
        dict(zip(places, gradients[len(by_attention) :], strict=True)),
        tuple(scores.tolist()),
        graph.positions,
        float(graph.lineariser.biases),
    )
    if conserves:
        check_conservation(model, graph, found)
    return found


def check_conservation(model: Model, graph: ForwardGraph, found: Gradients) -> None:
    """Refuse a linearised backward pass whose parts are not the watched scalar."""
    state = graph.states["blocks"]  # [sequence, token, width]
    # a small logit, or a difference of two, is only as precise as the largest one
    logits = float(graph.logits.detach().abs().amax(dim=-1).sum())
    relevance = (state.detach().double() * found.states["blocks"].double()).sum(dim=-1)
    missing = abs(float(relevance.sum()) + found.biases - sum(found.scores))
    whole = max(float(relevance.abs().sum()) + abs(found.biases), logits)
    # not 8 bytes: norms of many models compute in float32, whatever the state has
    if not missing <= MISSING[min(4, state.element_size())] * whole:
        raise CaptureError(
            f"the linearised backward pass of {model.name} was not understood: the relevance of"
            f" its input and biases misses the target's logit by {missing:.2g} of {whole:.3g};"
            " use gradient edges"
        )


# ---- watched scalars ----------------------------------------------------------------------------


def read_targets(model: Model, target: WatchedTarget, of: str, count: int) -> list[Aim]:
    """Per input, the number of its target, or of the two of a contrast; None: the prediction."""
    if of not in WATCHED:
        raise OptionError(
            f"unknown target_of {of!r}; choose from {', '.join(WATCHED)}", options=["target_of"]
        )
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
    return [number_target(model, each) for each in given]


def read_foil(target: TargetOrPair, foil: Foil | None) -> TargetOrPair:
    """A target with its foil, which may be in the target already, as its second class."""
    if foil is None:
        return target
    if isinstance(target, tuple):
        raise OptionError(
            f"a pair of targets has its foil; got foil={foil!r} as well: leave it out"
        )
    return target, foil


def pair_aims(
    targets: Sequence[int | None], foils: Sequence[FoilNumber | None]
) -> list[TargetOrPair]:
    """Each target with its foil; foils: of each target, or none at all."""
    against = foils or [None] * len(targets)
    return [read_foil(target, foil) for target, foil in zip(targets, against, strict=True)]


def number_target(model: Model, target: TargetOrPair) -> Aim:
    """The number of a class, or of two different ones."""
    if not isinstance(target, tuple):
        return (None if target is None else model.target(target),)
    if len(target) != 2:
        raise OptionError(f"a contrast is between two targets; got {len(target)}")
    named, against = target
    if against is None:
        raise OptionError(f"a contrast is between two named targets; got {target!r}")
    first = None if named is None else model.target(named)
    second = against if isinstance(against, RunnerUp) else number_class(model, against, "foil")
    check_contrast(model, first, second)
    return first, second


def fill_targets(
    model: Model, logits: "torch.Tensor", aims: Sequence[Aim]
) -> tuple[tuple[int, ...], ...]:
    """The targets, the predicted class where None, and foils; checked."""
    chosen = choose_targets(model, logits, [aim[0] for aim in aims])
    given = [aim[1] if len(aim) == 2 else None for aim in aims]
    foils = choose_foils(model, logits, chosen, given)
    return tuple(
        (target,) if foil is None else (target, foil)
        for target, foil in zip(chosen, foils, strict=True)
    )


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
    model: Model, wanted: set[str], run: object, lineariser: "Lineariser"
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
        lineariser.counts = True  # what is added from here on is a bias
        if given:
            return (states["blocks"], *given[1:]), named
        return given, named | {"hidden_states": states["blocks"]}

    with ExitStack() as hooks:
        for embedding in [] if model.is_vision else list_embeddings(model):
            hooks.callback(embedding.register_forward_hook(after_words).remove)
        if "blocks" in wanted:
            block = find_first_block(model)
            handle = block.register_forward_pre_hook(before_blocks, with_kwargs=True)
            hooks.callback(handle.remove)
        yield states


def list_embeddings(model: Model) -> "list[torch.nn.Module]":
    """The word embedding, and those that share its weights, as a decoder may beside an encoder."""
    shared = getattr(model.embedding, "weight", None)
    others = [
        module
        for module in model.model.modules()
        if shared is not None
        and module is not model.embedding
        and module.__dict__.get("_parameters", {}).get("weight") is shared
        and hasattr(module, "num_embeddings")
    ]
    return [model.embedding, *others]


def find_first_block(model: Model) -> "torch.nn.Module":
    """The module that computes the first layer: the first of the first list of modules."""
    import torch

    for module in model.model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module):
            return module[0]
    raise CaptureError(
        f"{model.name} has no list of layers, so the input of its first block is unknown; use"
        " gradient edges, or reduce='norm' for input gradients"
    )
