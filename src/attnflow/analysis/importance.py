"""How much the prediction depends on each token: `blank_out` and `input_gradient`.

Both ask the model itself, and are the yardsticks of the paper: token attention is good if it ranks
tokens as these do.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.core.graph import Floats, integers
from attnflow.core.groups import Group, Groups, read_groups, sum_groups, word_groups
from attnflow.errors import CaptureError, OptionError, RoundingWarning
from attnflow.models.execution import evaluating
from attnflow.models.inputs import Encoded, are_many, batches
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch

# a sum of numbers this small beside their length is zero but for rounding: of random signs it would
# be about 1
ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class Importance:
    """One number per token: how much the target's probability depends on it.

    values: [token]; signed ones are positive where a token speaks for the target, negative where it
    speaks against it, all others are not negative. target: the name of the class (or token) whose
    probability was watched; probability: what it is on the input as it stands.
    """

    values: Floats  # [token]
    method: str  # "blank_out" or "input_gradient"
    tokens: tuple[str, ...]
    target: str
    probability: float
    words: tuple[int | None, ...] | None = None
    signed: bool = False
    groups: tuple[Group, ...] | None = None  # what was taken together, if it was not tokens

    def top(self, k: int = 5) -> list[tuple[int, str, float]]:
        """The k most important tokens, for or against, as (position, token, value)."""
        order = np.argsort(-np.abs(self.values), kind="stable")[:k]
        return [(int(at), self.tokens[at], float(self.values[at])) for at in order]

    def by_word(self) -> "Importance":
        """The same with the tokens of each word summed; a token without a word stands alone.

        Blank-out refuses: a word is blanked out as a whole by `blank_out(..., groups="words")`.
        """
        if self.method == "blank_out":
            raise OptionError(
                "blank-out of a word is not the sum over its tokens;"
                " ask for it: blank_out(model, text, groups='words')"
            )
        groups = word_groups(self.tokens, self.words)
        names = tuple(group.name for group in groups)
        values = sum_groups(self.values, groups)
        return replace(self, values=values, tokens=names, words=None, groups=groups)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy:
            return np.array(self.values, dtype=dtype)
        return np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        watched = f"{self.target!r} ({self.probability:.3f})"
        return f"<Importance: {self.method} of {len(self.tokens)} tokens for {watched}>"


def blank_out(
    model: Any,
    inputs: Any,
    target: Any = None,
    *,
    replacement: int | str | None = None,
    position: int | None = None,
    groups: Groups | None = None,
    signed: bool = False,
    batch_tokens: int | None = None,
) -> Any:
    """The change of the target's probability when a token is replaced by UNK, for each in turn.

    Parameters
    ----------
    model
        A `Model`, or a Hugging Face model that takes token ids.
    inputs
        A text or token ids, or a list of them, which gives a list.
    target
        A class by name or number (for language models a token), one for all inputs or a list with
        one for each; what the model predicts if None.
    replacement
        A token, its id, or "attention", which takes the token out of the attention mask. If None:
        UNK, or the mask token if there is no UNK, or "attention" if there is neither. An UNK that
        also ends or starts texts, as GPT-2's, is none.
    position
        As in `Model.predict`.
    groups
        "words", or lists of positions: each group is blanked out as a whole.
    signed
        Keep the sign: positive where the token speaks for the target, so that its probability
        falls without it, negative where it speaks against it. Otherwise the absolute change.
    batch_tokens
        How many tokens run through the model together.

    >>> from attnflow import load
    >>> blank_out(load("verb-number"), "the keys to the old house").top(1)[0][:2]
    (2, 'keys')
    """
    model, many, encoded, targets = prepare(model, inputs, target, "blank_out")
    blank = find_replacement(model, replacement)
    at = [model.logit_position(each, position) for each in encoded]
    intact = [
        Variant(each, place, aim) for each, place, aim in zip(encoded, at, targets, strict=True)
    ]
    before = watch(model, intact, batch_tokens)
    results = measure_blank_out(
        model,
        encoded,
        at,
        before,
        blank=blank,
        groups=groups,
        signed=signed,
        batch_tokens=batch_tokens,
    )
    return results if many else results[0]


def measure_blank_out(
    model: Model,
    encoded: Sequence[Encoded],
    at: Sequence[int],
    before: Sequence[tuple[int, float]],
    *,
    blank: int | None,
    groups: Groups | None = None,
    signed: bool = False,
    batch_tokens: int | None = None,
) -> list[Importance]:
    """Blank-out of inputs whose target and probability, as they stand, are known.

    at: where each prediction is read. before: the class that is watched, and its probability.
    """
    units = [list_units(each, groups) for each in encoded]
    variants = [
        Variant(
            replace_tokens(each, unit.positions, blank),
            place,
            aim,
            unit.positions if blank is None else (),
        )
        for each, place, (aim, _), mine in zip(encoded, at, before, units, strict=True)
        for unit in mine
    ]
    after = iter(watch(model, variants, batch_tokens))
    results = []
    for each, (aim, probability), mine in zip(encoded, before, units, strict=True):
        drops = np.array([probability - next(after)[1] for _ in mine])
        results.append(
            Importance(
                drops if signed else np.abs(drops),
                "blank_out",
                tuple(unit.name for unit in mine),
                model.label(aim),
                probability,
                each.words if groups is None else None,
                signed,
                None if groups is None else mine,
            )
        )
    return results


def input_gradient(
    model: Any,
    inputs: Any,
    target: Any = None,
    *,
    of: str = "probability",
    reduce: str = "norm",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Any:
    """How steeply the target's probability changes with each token's embedding.

    Parameters
    ----------
    model, inputs, target, position, batch_tokens
        As in `blank_out`.
    of
        "probability" or "logit".
    reduce
        "norm": the length of the gradient at the word embedding. "times_input": the absolute sum of
        gradient times input, both where the first block begins (word plus position, where a model
        has both). "sum": the absolute sum of the gradient over the embedding axis, as the authors
        of the paper score it. Where a layer norm reads the embedding (BERT, GPT-2, the model that
        ships with attnflow), that sum is zero for every token, since a layer norm does not see a
        number that is added to the whole vector; a `RoundingWarning` says so.

    >>> from attnflow import load
    >>> input_gradient(load("verb-number"), "the key to the cabinets").tokens
    ('[CLS]', 'the', 'key', 'to', 'the', 'cabinets/NNS')
    """
    import torch

    if of not in ("probability", "logit"):
        raise OptionError(f"unknown of={of!r}; choose from probability, logit")
    if reduce not in REDUCTIONS:
        raise OptionError(f"unknown reduce={reduce!r}; choose from {', '.join(REDUCTIONS)}")
    model, many, encoded, targets = prepare(model, inputs, target, "input_gradient")
    at_block = reduce == "times_input"
    results: dict[int, Importance] = {}
    for batch in batches(encoded, model.batch_tokens if batch_tokens is None else batch_tokens):
        chosen = [encoded[place] for place in batch]
        places = [model.logit_position(each, position) for each in chosen]
        with (
            torch.inference_mode(False),
            evaluating(model.model),
            torch.enable_grad(),
            keep_state(model, at_block) as states,
        ):
            logits = model.logits(model.batch(chosen), places)  # [sequence, class]
            probabilities = model.probabilities(logits)
            aims = choose_targets(model, probabilities, [targets[place] for place in batch])
            scores = probabilities if of == "probability" else logits
            watched = scores[torch.arange(len(batch)), torch.tensor(aims)]
            (gradient,) = torch.autograd.grad(watched.sum(), states[0])  # [sequence, token, width]
        gradient, state = gradient.double(), states[0].detach().double()
        values = REDUCTIONS[reduce](gradient, state).cpu().numpy()
        if reduce == "sum":
            warn_of_rounding(model, values, gradient, states[0].dtype)
        for row, place in enumerate(batch):
            each, aim = encoded[place], aims[row]
            results[place] = Importance(
                values[row, : len(each.ids)].copy(),
                "input_gradient",
                each.tokens,
                model.label(aim),
                float(probabilities[row, aim].detach()),
                each.words,
            )
    return [results[place] for place in range(len(encoded))] if many else results[0]


# from gradient and state [sequence, position, width] to [sequence, position]
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda gradient, state: gradient.sum(dim=-1).abs(),
    "norm": lambda gradient, state: gradient.norm(dim=-1),
    "times_input": lambda gradient, state: (gradient * state).sum(dim=-1).abs(),
}
IMPORTANCES: dict[str, Callable[..., Any]] = {
    "blank_out": blank_out,
    "input_gradient": input_gradient,
}


@contextmanager
def keep_state(model: Model, at_block: bool) -> "Iterator[list[torch.Tensor]]":
    """A list for the state that the next pass of this thread begins with, to take gradients of.

    That is what the word embedding gives, or, with at_block, what enters the first block.
    """
    import torch

    kept: list[torch.Tensor] = []
    thread = threading.get_ident()  # hooks are the module's: another thread's passes call them too

    def keep(state: "torch.Tensor") -> "torch.Tensor":
        kept.append(state.detach().requires_grad_())
        return kept[-1]

    def after(module: Any, given: Any, output: "torch.Tensor") -> "torch.Tensor | None":
        return keep(output) if threading.get_ident() == thread else None

    def before(module: Any, given: Any, named: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return None
        if given:
            return (keep(given[0]), *given[1:]), named
        return given, named | {"hidden_states": keep(named["hidden_states"])}

    handle = (
        find_first_block(model).register_forward_pre_hook(before, with_kwargs=True)
        if at_block
        else model.embedding.register_forward_hook(after)
    )
    try:
        yield kept
    finally:
        handle.remove()


def find_first_block(model: Model) -> Any:
    """The module that computes the first layer: the first of the first list of modules."""
    import torch

    for module in model.model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module):
            return module[0]
    raise CaptureError(f"{model.name} has no list of layers; use reduce='norm'")


def warn_of_rounding(model: Model, sums: Floats, gradient: "torch.Tensor", dtype: Any) -> None:
    """Say so if sums [sequence, token] of gradients are zero but for rounding."""
    import torch

    coarse = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    lengths = REDUCTIONS["norm"](gradient, None).cpu().numpy()
    if (np.abs(sums) <= ROUNDING * max(1.0, coarse / 100) * lengths).all():
        warnings.warn(
            f"the gradient of {model.name} sums to zero over the embedding axis, because a layer"
            " norm reads the embedding: what reduce='sum' gives is rounding error;"
            " use reduce='norm'",
            RoundingWarning,
            stacklevel=3,
        )


# ---- what both share ----------------------------------------------------------------------------


def prepare(
    model: Any, inputs: Any, target: Any, method: str
) -> tuple[Model, bool, list[Encoded], list[int | None]]:
    """The model, whether a list was given, the encoded inputs, and the number of each target."""
    model = model if isinstance(model, Model) else Model(model)
    check_scorable(model, method)
    many = are_many(inputs)
    encoded = [model.encode(each) for each in (inputs if many else [inputs])]
    several = isinstance(target, list | tuple | np.ndarray)
    targets = list(target) if several else [target] * len(encoded)
    if len(targets) != len(encoded):
        raise OptionError(
            "targets must be one for all inputs or one for each;"
            f" got {len(targets)} for {len(encoded)} inputs"
        )
    numbers = {
        each: None if each is None else model.target(each) for each in dict.fromkeys(targets)
    }
    return model, many, encoded, [numbers[each] for each in targets]


def check_scorable(model: Model, method: str) -> None:
    """Refuse a model that has no importance of this kind."""
    if model.is_vision or model.is_encoder_decoder:
        kind = "images" if model.is_vision else "encoder-decoders"
        raise OptionError(
            f"{method} is for models that read one sequence of tokens, not for {kind};"
            f" got {model.name}"
        )
    if not model.predicts:
        raise OptionError(
            f"{method} watches a prediction, and {model.name} has no head that predicts; load the"
            " model with one, as AutoModelForSequenceClassification does"
        )


def find_replacement(model: Model, replacement: int | str | None) -> int | None:
    """The id that blanks a token out; None to take the token out of the attention mask."""
    tokenizer = model.tokenizer
    if replacement == "attention":
        return None
    if replacement is None:
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is not None and unknown not in model.marks:
            return int(unknown)
        mask = getattr(tokenizer, "mask_token_id", None)
        return None if mask is None else int(mask)
    if isinstance(replacement, str):
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        if replacement not in vocabulary:
            raise OptionError(
                "replacement must be a token of the model's vocabulary, its id, or 'attention';"
                f" got {replacement!r}"
            )
        replacement = int(vocabulary[replacement])
    (replacement,) = integers([replacement], "replacement")
    if not 0 <= replacement < model.vocabulary_size:
        raise OptionError(
            "replacement must be a token, 'attention', or an id from 0 to"
            f" {model.vocabulary_size - 1}; got {replacement!r}"
        )
    return replacement


@dataclass(frozen=True)
class Variant:
    """An input with some tokens blanked out, or none."""

    encoded: Encoded
    position: int  # where its prediction is read
    target: int | None  # the class to watch; None: what is predicted
    hidden: tuple[int, ...] = ()  # positions that attention does not see


def list_units(encoded: Encoded, groups: Groups | None) -> tuple[Group, ...]:
    """What is blanked out together: each token by itself, or groups of positions."""
    if groups is None:
        return tuple(Group(name, (place,)) for place, name in enumerate(encoded.tokens))
    return read_groups(groups, len(encoded.tokens), tokens=encoded.tokens, words=encoded.words)


def replace_tokens(encoded: Encoded, positions: Sequence[int], blank: int | None) -> Encoded:
    """The input with some tokens replaced; as it is, if they leave the attention mask instead."""
    if blank is None:
        return encoded
    gone = set(positions)
    ids = tuple(blank if place in gone else each for place, each in enumerate(encoded.ids))
    return replace(encoded, ids=ids)


def watch(
    model: Model, variants: Sequence[Variant], batch_tokens: int | None
) -> list[tuple[int, float]]:
    """The class that is watched in each variant, and its probability."""
    import torch

    most = model.batch_tokens if batch_tokens is None else batch_tokens
    found: dict[int, tuple[int, float]] = {}
    with evaluating(model.model), torch.no_grad():
        for batch in batches([variant.encoded for variant in variants], most):
            chosen = [variants[place] for place in batch]
            arguments = model.batch([variant.encoded for variant in chosen])
            for row, variant in enumerate(chosen):
                if variant.hidden:
                    arguments["attention_mask"][row, list(variant.hidden)] = 0
            logits = model.logits(arguments, [variant.position for variant in chosen])
            probabilities = model.probabilities(logits)
            aims = choose_targets(model, probabilities, [variant.target for variant in chosen])
            watched = probabilities[torch.arange(len(aims)), torch.tensor(aims)].tolist()
            found |= dict(zip(batch, zip(aims, watched, strict=True), strict=True))
    return [found[place] for place in range(len(variants))]


def choose_targets(
    model: Model, probabilities: "torch.Tensor", targets: Sequence[int | None]
) -> list[int]:
    """Each target, or the most probable class where none is given."""
    best = probabilities.argmax(dim=-1).tolist()
    chosen = [int(best[row]) if target is None else target for row, target in enumerate(targets)]
    if max(chosen) >= probabilities.shape[-1]:
        raise OptionError(
            f"target must be from 0 to {probabilities.shape[-1] - 1} for {model.name};"
            f" got {max(chosen)}"
        )
    return chosen
