"""How much the prediction depends on each token, asked of the model itself: `blank_out` and `input_gradient`.

Both are the yardsticks of the paper: token attention is good if it ranks tokens as these do.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow.errors import OptionError, RoundingWarning
from attnflow.graph import Floats, integers
from attnflow.models import Encoded, Model, are_many, batches, evaluating
from attnflow.results import join_subwords, words_of

if TYPE_CHECKING:
    import torch

ROUNDING = 1e-4  # a sum of numbers this small beside their length is zero but for rounding: of random signs it would be about 1


@dataclass(frozen=True, eq=False)
class Importance:
    """One number a token: how much the target's probability depends on it.

    values: [token], none negative. target: the name of the class (or token) whose probability was watched; probability: what it is on
    the input as it stands.
    """

    values: Floats  # [token]
    method: str  # "blank_out" or "input_gradient"
    tokens: tuple[str, ...]
    target: str
    probability: float
    words: tuple[int | None, ...] | None = None

    def top(self, k: int = 5) -> list[tuple[int, str, float]]:
        """The k most important tokens, as (position, token, value)."""
        order = np.argsort(-self.values, kind="stable")[:k]
        return [(int(place), self.tokens[place], float(self.values[place])) for place in order]

    def by_word(self) -> "Importance":
        """The same with the tokens of each word summed; a token that belongs to no word stands alone."""
        groups = words_of(self.words)
        values = np.array([self.values[group].sum() for group in groups])
        names = tuple(join_subwords([self.tokens[place] for place in group]) for group in groups)
        return replace(self, values=values, tokens=names, words=None)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        return f"<Importance: {self.method} of {len(self.tokens)} tokens for {self.target!r} ({self.probability:.3f})>"


def blank_out(
    model: Any,
    inputs: Any,
    target: Any = None,
    *,
    replacement: int | str | None = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Any:
    """The absolute change of the target's probability when a token is replaced by UNK, for each token in turn.

    inputs: a text or token ids, or a list of them, which gives a list. target: a class by name or number (for language models a token),
    one for all inputs or a list with one for each; what the model predicts, if not given. replacement: a token, its id, or "attention",
    which takes the token out of the attention mask; without it: UNK, or the mask token if there is no UNK, or "attention" if there is
    neither. An UNK that also ends or starts texts, as GPT-2's, is none. position: as in `Model.predict`.

    >>> from attnflow import load
    >>> blank_out(load("verb-number"), "the keys to the old house").top(1)[0][:2]
    (2, 'keys')
    """
    model, many, encoded, targets = prepared(model, inputs, target, "blank_out")
    blank = replacement_of(model, replacement)
    at = [model.reads(each, position) for each in encoded]
    watched = [
        Variant(each, place, aim) for each, place, aim in zip(encoded, at, targets, strict=True)
    ]
    before = watch(model, watched, batch_tokens)
    results = [
        Importance(
            np.zeros(len(each.ids)),
            "blank_out",
            each.tokens,
            model.label(aim),
            probability,
            each.words,
        )
        for each, (aim, probability) in zip(encoded, before, strict=True)
    ]
    variants = [
        Variant(without(each, token, blank), place, aim, token if blank is None else None)
        for each, place, (aim, _) in zip(encoded, at, before, strict=True)
        for token in range(len(each.ids))
    ]
    after = iter(watch(model, variants, batch_tokens))
    for result in results:
        for token in range(len(result.values)):
            result.values[token] = abs(next(after)[1] - result.probability)
    return results if many else results[0]


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

    inputs, target, position: as in `blank_out`. of: "probability" or "logit". reduce: "norm", the length of the gradient; "times_input",
    the absolute sum of gradient times embedding; "sum", the absolute sum of the gradient over the embedding axis, as the authors of the
    paper score it. Where a layer norm reads the embedding (BERT, GPT-2, the model that ships with attnflow), that sum is zero for every
    token, since a layer norm does not see a number that is added to the whole vector; a `RoundingWarning` says so.

    >>> from attnflow import load
    >>> input_gradient(load("verb-number"), "the key to the cabinets").tokens
    ('[CLS]', 'the', 'key', 'to', 'the', 'cabinets/NNS')
    """
    import torch

    if of not in ("probability", "logit"):
        raise OptionError(f"unknown of={of!r}; choose from probability, logit")
    if reduce not in REDUCTIONS:
        raise OptionError(f"unknown reduce={reduce!r}; choose from {', '.join(REDUCTIONS)}")
    model, many, encoded, targets = prepared(model, inputs, target, "input_gradient")
    results: dict[int, Importance] = {}
    for batch in batches(encoded, model.batch_tokens if batch_tokens is None else batch_tokens):
        chosen = [encoded[place] for place in batch]
        embedded: list[torch.Tensor] = []

        def keep(
            module: Any,
            arguments: Any,
            output: "torch.Tensor",
            kept: "list[torch.Tensor]" = embedded,
        ) -> "torch.Tensor":
            kept.append(output.detach().requires_grad_())
            return kept[-1]

        handle = model.model.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.inference_mode(False), evaluating(model.model), torch.enable_grad():
                logits = model.logits(
                    model.batch(chosen), [model.reads(each, position) for each in chosen]
                )  # [sequence, class]
                probabilities = model.probabilities(logits)
                aims = targets_of(model, probabilities, [targets[place] for place in batch])
                watched = (probabilities if of == "probability" else logits)[
                    torch.arange(len(batch)), torch.tensor(aims)
                ]
                (gradient,) = torch.autograd.grad(
                    watched.sum(), embedded[0]
                )  # [sequence, position, width]
        finally:
            handle.remove()
        scores = REDUCTIONS[reduce](gradient.double(), embedded[0].detach().double()).cpu().numpy()
        rounding = ROUNDING * max(
            1.0, torch.finfo(gradient.dtype).eps / torch.finfo(torch.float32).eps / 100
        )
        if (
            reduce == "sum"
            and (
                np.abs(scores)
                <= rounding * REDUCTIONS["norm"](gradient.double(), None).cpu().numpy()
            ).all()
        ):
            warnings.warn(
                f"the gradient of {model.name} sums to zero over the embedding axis, because a layer norm reads the embedding:"
                " what reduce='sum' gives is rounding error; use reduce='norm'",
                RoundingWarning,
                stacklevel=2,
            )
        for row, place in enumerate(batch):
            each, aim = encoded[place], aims[row]
            values = scores[row, : len(each.ids)].copy()
            probability = float(probabilities[row, aim].detach())
            results[place] = Importance(
                values, "input_gradient", each.tokens, model.label(aim), probability, each.words
            )
    return [results[place] for place in range(len(encoded))] if many else results[0]


# from gradient and embedding [sequence, position, width] to [sequence, position]
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda gradient, embedding: gradient.sum(dim=-1).abs(),
    "norm": lambda gradient, embedding: gradient.norm(dim=-1),
    "times_input": lambda gradient, embedding: (gradient * embedding).sum(dim=-1).abs(),
}
IMPORTANCES: dict[str, Callable[..., Any]] = {
    "blank_out": blank_out,
    "input_gradient": input_gradient,
}


# ---- what both share --------------------------------------------------------------------------------------------------------------


def prepared(
    model: Any, inputs: Any, target: Any, method: str
) -> tuple[Model, bool, list[Encoded], list[int | None]]:
    """The model, whether a list was given, the inputs as the model takes them, and the number of each one's target."""
    model = model if isinstance(model, Model) else Model(model)
    if model.is_vision or model.is_encoder_decoder:
        kind = "images" if model.is_vision else "encoder-decoders"
        raise OptionError(
            f"{method} is for models that read one sequence of tokens, not for {kind}; got {model.name}"
        )
    many = are_many(inputs)
    encoded = [model.encode(each) for each in (inputs if many else [inputs])]
    targets = (
        list(target) if isinstance(target, list | tuple | np.ndarray) else [target] * len(encoded)
    )
    if len(targets) != len(encoded):
        raise OptionError(
            f"targets must be one for all inputs or one for each; got {len(targets)} for {len(encoded)} inputs"
        )
    numbers = {
        each: None if each is None else model.target(each) for each in dict.fromkeys(targets)
    }
    return model, many, encoded, [numbers[each] for each in targets]


def replacement_of(model: Model, replacement: int | str | None) -> int | None:
    """The id that blanks a token out; None to take the token out of the attention mask."""
    tokenizer = model.tokenizer
    if replacement == "attention":
        return None
    if replacement is None:
        unknown, mask = (
            getattr(tokenizer, "unk_token_id", None),
            getattr(tokenizer, "mask_token_id", None),
        )
        return (
            int(unknown)
            if unknown is not None and unknown not in model.marks
            else None
            if mask is None
            else int(mask)
        )
    if isinstance(replacement, str):
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        if replacement not in vocabulary:
            raise OptionError(
                f"replacement must be a token of the model's vocabulary, its id, or 'attention'; got {replacement!r}"
            )
        replacement = int(vocabulary[replacement])
    (replacement,) = integers([replacement], "replacement")
    size = model.model.get_input_embeddings().weight.shape[0]
    if not 0 <= replacement < size:
        raise OptionError(
            f"replacement must be a token, 'attention', or an id from 0 to {size - 1}; got {replacement!r}"
        )
    return replacement


@dataclass(frozen=True)
class Variant:
    """An input with one token blanked out, or none."""

    encoded: Encoded
    position: int  # where its prediction is read
    target: int | None  # the class to watch; None: what is predicted
    hidden: int | None = None  # a position that attention does not see


def without(encoded: Encoded, token: int, blank: int | None) -> Encoded:
    """The input with one token replaced; as it is, if the token leaves the attention mask instead."""
    return (
        encoded
        if blank is None
        else replace(encoded, ids=(*encoded.ids[:token], blank, *encoded.ids[token + 1 :]))
    )


def watch(
    model: Model, variants: Sequence[Variant], batch_tokens: int | None
) -> list[tuple[int, float]]:
    """The class that is watched in each variant, and its probability."""
    import torch

    found: dict[int, tuple[int, float]] = {}
    with evaluating(model.model), torch.no_grad():
        for batch in batches(
            [variant.encoded for variant in variants],
            model.batch_tokens if batch_tokens is None else batch_tokens,
        ):
            chosen = [variants[place] for place in batch]
            arguments = model.batch([variant.encoded for variant in chosen])
            for row, variant in enumerate(chosen):
                if variant.hidden is not None:
                    arguments["attention_mask"][row, variant.hidden] = 0
            probabilities = model.probabilities(
                model.logits(arguments, [variant.position for variant in chosen])
            )
            aims = targets_of(model, probabilities, [variant.target for variant in chosen])
            watched = probabilities[torch.arange(len(aims)), torch.tensor(aims)].tolist()
            found |= dict(zip(batch, zip(aims, watched, strict=True), strict=True))
    return [found[place] for place in range(len(variants))]


def targets_of(
    model: Model, probabilities: "torch.Tensor", targets: Sequence[int | None]
) -> list[int]:
    """Each target, or the most probable class where none is given."""
    best = probabilities.argmax(dim=-1).tolist()
    chosen = [int(best[row]) if target is None else target for row, target in enumerate(targets)]
    if max(chosen) >= probabilities.shape[-1]:
        raise OptionError(
            f"target must be from 0 to {probabilities.shape[-1] - 1} for {model.name}; got {max(chosen)}"
        )
    return chosen
