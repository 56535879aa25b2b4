"""`intervene`: change a model from inside, or its input, and see what the prediction becomes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from attnflow.analysis.generate.sampling import (
    check_generation_options,
    has_plain_steps,
    read_continuations,
    sample_tokens,
)
from attnflow.analysis.importance.blank_out import find_replacement
from attnflow.analysis.intervene.change import (
    Blanked,
    Change,
    ReadChange,
    localise,
    read_change,
)
from attnflow.analysis.intervene.intervention import Intervention, RunOutcome
from attnflow.capturing.capture import find_source
from attnflow.capturing.change import (
    ChangedPass,
    ChangedRun,
    Changes,
    average_heads,
    check_interface,
    run_changed,
)
from attnflow.core.checks import check_count
from attnflow.core.flow.max_flow import MaxFlow
from attnflow.errors import OptionError
from attnflow.models.encode import encode_inputs
from attnflow.models.encoded import Encoded, OneInput, are_many, batches
from attnflow.models.execution import unchanged
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import Foil, FoilNumber, Prediction, number_foil, predict_targets

if TYPE_CHECKING:
    import torch

Reference = OneInput | list[OneInput] | list[list[int]] | list[str]


@overload
def intervene(
    model: ModelLike,
    inputs: OneInput,
    changes: Change | None = ...,
    *,
    blank: Blanked | Iterable[Blanked] = ...,
    cut: MaxFlow | Iterable[Iterable[int] | MaxFlow] = ...,
    heads_off: Iterable[Iterable[int]] = ...,
    replacement: int | str | None = ...,
    reference: Reference | None = ...,
    target: int | str | None = ...,
    foil: Foil | None = ...,
    position: int | None = ...,
    max_new_tokens: int | None = ...,
) -> Intervention: ...
@overload
def intervene(
    model: ModelLike,
    inputs: OneInput,
    changes: Sequence[Change],
    *,
    replacement: int | str | None = ...,
    reference: Reference | None = ...,
    target: int | str | None = ...,
    foil: Foil | None = ...,
    position: int | None = ...,
    max_new_tokens: int | None = ...,
) -> list[Intervention]: ...
def intervene(
    model: ModelLike,
    inputs: OneInput,
    changes: Change | Sequence[Change] | None = None,
    *,
    blank: Blanked | Iterable[Blanked] = (),
    cut: MaxFlow | Iterable[Iterable[int] | MaxFlow] = (),
    heads_off: Iterable[Iterable[int]] = (),
    replacement: int | str | None = None,
    reference: Reference | None = None,
    target: int | str | None = None,
    foil: Foil | None = None,
    position: int | None = None,
    max_new_tokens: int | None = None,
) -> Intervention | list[Intervention]:
    """Change the input or the attention of a model, and compare its prediction before and after.

    An edge that is cut has a score of minus infinity, so that its row is shared out among the other
    keys; a row that loses every key has an attention output of zero. The residual connection is
    never cut. The model keeps its own kernels, and what is not changed stays as it was.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model. Cutting edges and
        switching heads off is for models on transformers' attention interface.
    inputs
        One input, as for `capture`.
    changes
        A `Change`, instead of blank, cut and heads_off; or a list of them, which run as one batch
        and give a list.
    blank
        Tokens to blank out: passages of the text that stand in it once, positions, or spans
        (start, end) of positions; or one of them.
    cut
        Edges of attention to cut: (layer, query, key) in all heads, or (layer, query, key, head);
        or a `MaxFlow` of the same input and model, whose minimum cut is cut; or a list of these.
    heads_off
        (layer, head) pairs of heads to switch off: their output is zero, or with `reference` its
        mean.
    replacement
        What replaces blanked tokens, as for `blank_out`.
    reference
        An input, or several: heads that are switched off give their mean output over all positions
        of these, instead of zero.
    target
        A class by name or number (for language models a token); the predicted one if None.
    foil
        A class that the target is contrasted with, by the difference of logits; `RUNNER_UP` is the
        most probable class other than the target, on the unchanged input.
    position
        As in `Model.predict`.
    max_new_tokens
        Causal language models also generate at most this many tokens, greedily, before and after
        (`.after.text`). Edges may then start at generated positions, which follow the input's;
        heads are off at every step, and blanked tokens need a replacement other than "attention".

    >>> import attnflow as af
    >>> text = "the keys to the cabinet"
    >>> attention = af.capture("verb-number", text)
    >>> best = af.max_flow(attention, source=(6, 0), target=(0, 2))
    >>> result = af.intervene("verb-number", text, cut=best)
    >>> f"{result.probability_change:.4f}", f"{result.change.residual_share:.2f}"
    ('-0.0036', '0.50')
    """
    given, several = read_changes(changes, Change(blank, cut, heads_off))
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens)
    model = open_model(model)
    encoded = encode_one(model, inputs)
    if max_new_tokens is not None:
        check_generates(model, encoded, max_new_tokens)
    attends = any(change.cut or change.heads_off for change in given)
    if attends:
        check_interface(model)
    with unchanged(model.model):
        run = InterventionRun(model, encoded, target, foil, position, max_new_tokens)
        found = run.read(given)
        blanked = any(read.blanked for read in found)
        means = average_reference(model, reference, found)
        blank_id = find_replacement(model, replacement) if blanked else None
        results = run.change(given, found, means, blank_id)
    return results if several else results[0]


def read_changes(changes: object, alone: Change) -> tuple[list[Change], bool]:
    """The changes to make, and whether a list of them was given."""
    if changes is None:
        return [alone], False
    if alone != Change():
        raise OptionError(
            "changes hold all that is changed; leave out blank, cut and heads_off, or put them in"
            " a Change"
        )
    several = not isinstance(changes, Change)
    listed: list[Change] = []
    for change in changes if isinstance(changes, list | tuple) else [changes]:
        if not isinstance(change, Change):
            raise OptionError(
                "changes must be a Change, or a list of them, as [Change(blank='keys')];"
                f" got {type(change).__name__}"
            )
        listed.append(change)
    if not listed:
        raise OptionError("at least one change must be given; got an empty list")
    return listed, several


def encode_one(model: Model, value: object) -> Encoded:
    """One input, encoded."""
    if are_many(value):
        raise OptionError(
            f"intervene takes one input; got a list of {len(value)}: call it for each of them"
        )
    refuse_foreign(model, value, "inputs")
    (encoded,), _ = encode_inputs(model, value)
    return encoded


def check_generates(model: Model, encoded: Encoded, count: int) -> None:
    """Refuse to generate with a model that cannot, or beyond its maximum length."""
    if model.task != "causal LM":
        raise OptionError(
            f"max_new_tokens needs a causal LM; {model.name} is for {model.task}: leave it out",
            options=["max_new_tokens"],
        )
    check_interface(model)
    check_generation_options(model, {})
    if not has_plain_steps(model, {}):
        raise OptionError(
            "an intervention follows steps of one token each, and the generation_config of"
            f" {model.name} has it guess tokens or read the prompt in chunks: switch that off there"
        )
    size = len(encoded.ids)
    if model.max_length is not None and size + count > model.max_length:
        raise OptionError(
            f"this model takes at most {model.max_length} tokens; got a prompt of {size}"
            f" and max_new_tokens={count}",
            options=[f"max_new_tokens={count}"],
        )


def refuse_foreign(model: Model, value: object, what: str) -> None:
    """Refuse an input that another model encoded."""
    if not isinstance(value, Encoded):
        return
    is_image = value.pixels is not None
    if is_image != model.is_vision or (not is_image and not is_known(model, value)):
        raise OptionError(
            f"{what} must be read by this model, {model.name}; got an input that another model"
            " encoded: give its text"
        )


def is_known(model: Model, encoded: Encoded) -> bool:
    """Whether tokens are those that a model has for these ids."""
    if max(encoded.ids) >= model.vocabulary_size:
        return False
    return model.names(encoded.ids) == encoded.tokens


def average_reference(
    model: Model, reference: Reference | None, found: Sequence[ReadChange]
) -> "Mapping[int, torch.Tensor] | None":
    """[head, width] by attention call: the mean outputs over a reference; None without one."""
    if reference is None:
        return None
    if not any(read.heads_off for read in found):
        raise OptionError(
            "reference is for heads that are switched off; got no heads_off: leave it out"
        )
    for value in reference if isinstance(reference, list) else [reference]:
        refuse_foreign(model, value, "reference")
    encoded, _ = encode_inputs(model, reference)
    if not encoded:
        raise OptionError("reference must be at least one input; got an empty list")
    return average_heads(model, encoded)


class InterventionRun:
    """One input of a model: run unchanged when it is made, and then with changes."""

    def __init__(
        self,
        model: Model,
        encoded: Encoded,
        target: int | str | None,
        foil: Foil | None,
        position: int | None,
        max_new_tokens: int | None = None,
    ) -> None:
        if not model.predicts and (target is not None or foil is not None):
            raise OptionError(
                f"target and foil are for models that predict; {model.name} has no head that does"
            )
        self.model, self.encoded = model, encoded
        number = None if target is None else model.target(target)
        against = number_foil(model, foil)
        self.focus = model.locate(encoded, position)
        self.place = model.logit_position(encoded, position)
        self.source = find_source(model)
        passed, places = run_changed(model, [encoded], [{}], [self.place], [()])
        self.layers = passed.layers
        (self.before,) = self.read_outcomes(passed, places, number, against)
        self.new = max_new_tokens
        self.before = self.go_on([encoded], [{}], [self.before])[0]

    def read_outcomes(
        self,
        passed: ChangedPass,
        places: Sequence[int],
        target: int | None,
        foil: FoilNumber | None,
    ) -> list[RunOutcome]:
        """The prediction and attention of each sequence of a pass."""
        model = self.model
        if not model.predicts:
            return [RunOutcome(None, None, attention) for attention in passed.attentions]
        logits = model.read_logits(passed.output, places)
        count = len(logits)
        foils = [] if foil is None else [foil] * count
        predictions: list[Prediction] = predict_targets(model, logits, [target] * count, foils)
        return [
            RunOutcome(prediction, float(row[prediction.target.number]), attention)
            for prediction, row, attention in zip(
                predictions, logits, passed.attentions, strict=True
            )
        ]

    def read(self, changes: Sequence[Change]) -> list[ReadChange]:
        """The changes, checked against this input."""
        name, fingerprint = self.model.name, self.source.fingerprint or ""
        return [
            read_change(change, self.encoded, self.layers, name, fingerprint, self.new or 0)
            for change in changes
        ]

    def change(
        self,
        given: Sequence[Change],
        found: Sequence[ReadChange],
        means: "Mapping[int, torch.Tensor] | None",
        blank: int | None,
    ) -> list[Intervention]:
        """Run the input with each change, in batches."""
        inputs = [self.blank(read.blanked, blank) for read in found]
        changes = [
            localise(change, read, self.layers, means)
            for change, read in zip(given, found, strict=True)
        ]
        hidden = [read.blanked if blank is None else () for read in found]
        after: dict[int, RunOutcome] = {}
        for batch in batches(inputs, self.model.batch_tokens):
            outcomes = self.run(
                [inputs[at] for at in batch],
                [changes[at] for at in batch],
                [hidden[at] for at in batch],
            )
            after |= dict(zip(batch, outcomes, strict=True))
        label = None if self.before.prediction is None else self.before.prediction.target.label
        source = replace(self.source, method="intervene", target=label)
        special = self.encoded.special + (False,) * len(self.encoded.decoder_tokens)
        return [
            Intervention(self.before, after[number], read, self.focus, special, source)
            for number, read in enumerate(found)
        ]

    def run(
        self,
        inputs: Sequence[Encoded],
        changes: Sequence[Changes],
        hidden: Sequence[Sequence[int]],
    ) -> list[RunOutcome]:
        """The outcomes of changed inputs, of the same target and foil as before."""
        passed, places = run_changed(
            self.model, inputs, changes, [self.place] * len(inputs), hidden
        )
        before = self.before.prediction
        target = None if before is None else before.target.number
        foil = None if before is None or before.foil is None else before.foil.number
        return self.go_on(inputs, changes, self.read_outcomes(passed, places, target, foil))

    def go_on(
        self, inputs: Sequence[Encoded], changes: Sequence[Changes], outcomes: list[RunOutcome]
    ) -> list[RunOutcome]:
        """The outcomes with what the model generates next, if it is asked to."""
        if self.new is None:
            return outcomes
        model = self.model
        prompts = [encoded.ids for encoded in inputs]
        options = {"max_new_tokens": self.new, "do_sample": False}
        run = ChangedRun(model, changes, per_step=len(self.layers))
        output, _ = sample_tokens(model, prompts, options, run.watch())
        found = read_continuations(model, prompts, output, options)
        return [
            outcome._replace(
                continuation=model.names(new.ids),
                text="" if model.tokenizer is None else model.tokenizer.decode(new.ids),
            )
            for outcome, new in zip(outcomes, found, strict=True)
        ]

    def blank(self, positions: Sequence[int], blank: int | None) -> Encoded:
        """The input with some tokens replaced, unless attention masks them out."""
        if not positions or blank is None:
            if positions and self.new is not None:
                raise OptionError(
                    "while a model generates, blanked tokens are replaced by others; give"
                    " replacement=, a token or its id",
                    options=["replacement="],
                )
            if positions and self.model.is_vision:
                raise OptionError(
                    "blank replaces tokens, and an image has none; cut edges or switch heads off"
                )
            return self.encoded
        gone = set(positions)
        (name,) = self.model.names([blank])
        old = zip(self.encoded.ids, self.encoded.tokens, strict=True)
        new = [(blank, name) if at in gone else each for at, each in enumerate(old)]
        ids, tokens = zip(*new, strict=True)
        return replace(self.encoded, ids=ids, tokens=tokens)
