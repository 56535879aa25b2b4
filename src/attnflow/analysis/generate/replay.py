"""`replay`: an answer that is known, read by the model in one pass, as if it had generated it.

A causal model computes at each position what it computes there step by step with a cache. So one
pass over prompt and answer gives the attention that each token was chosen by, whatever chose it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from attnflow.analysis.generate.edges import GraphEdges, RowEdges, TokenEdges
from attnflow.analysis.generate.generation import Generation
from attnflow.analysis.generate.spans import find_offsets
from attnflow.analysis.job import FIRST_WHILE_GENERATING, Job, Plan, describe_missing_edges
from attnflow.analysis.long_inputs import find_segments, goes_by_rows, plan_rows
from attnflow.core.choices import Choices
from attnflow.edges.graphs import EdgePass, run_edges
from attnflow.errors import CaptureError, OptionError
from attnflow.models.chats import Message
from attnflow.models.encode import encode_inputs, read_ids, refuse_placeholders
from attnflow.models.encoded import Encoded, batches
from attnflow.models.execution import unchanged
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import Foil, FoilNumber, keep_logits
from attnflow.rows.products import Recomputed, StoredAttention, TensorPool, run_layers

OnePrompt = str | tuple[int, ...] | list[int] | list[Message]
OneAnswer = Iterable[int]


@overload
def replay(
    model: ModelLike,
    prompt: OnePrompt,
    answer_ids: OneAnswer,
    *,
    heads: str | None = "mean",
    edges: Choices | None = None,
    foil: Foil | None = None,
) -> Generation: ...


@overload
def replay(
    model: ModelLike,
    prompt: list[str] | list[list[int]] | list[list[Message]] | list[tuple[int, ...]],
    answer_ids: Sequence[OneAnswer],
    *,
    heads: str | None = "mean",
    edges: Choices | None = None,
    foil: Foil | None = None,
) -> list[Generation]: ...


def replay(
    model: ModelLike,
    prompt: object,
    answer_ids: object,
    *,
    heads: str | None = "mean",
    edges: Choices | None = None,
    foil: Foil | None = None,
) -> Generation | list[Generation]:
    """Read an answer that any server generated in one pass, as if this model had generated it.

    The result equals that of `generate`, had it chosen these tokens: the same attention, edges and
    probabilities, without generating again.

    Parameters
    ----------
    model
        The causal language model that generated the answer: a `Model`, a name or folder as `load`
        takes it, or a Hugging Face model.
    prompt
        One prompt or a list of them, as for `generate`. Token ids are safest: a text or a chat must
        be tokenised as the server did.
    answer_ids
        The token ids of the answer as the server gave them (of vLLM,
        `request.outputs[0].token_ids`); for a list of prompts, a list of answers.
    heads, edges, foil
        As for `generate`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> replay(model, [464, 1994], [318, 2626, 13]).rollout()
    <PromptAttention: rollout, 3 generated x 2 prompt tokens x 2 layers>
    """
    job = Job.read(edges=edges, heads=heads, foil=foil)
    model = open_language_model(model, "replay")
    prompts, many = read_prompts(model, prompt, "replay")
    answers = read_all_answers(model, answer_ids, prompts, many)
    plan = job.plan(model, FIRST_WHILE_GENERATING)
    against = read_foil_of_tokens(model, job, plan)
    generations = replay_answers(model, prompts, answers, heads, plan, against)
    return generations if many else generations[0]


# ---- what is given -------------------------------------------------------------------------------


def open_language_model(model: ModelLike, what: str) -> Model:
    """The model, a causal language model. what: the public function, for messages."""
    model = open_model(model)
    if model.task != "causal LM":
        raise OptionError(f"{what} needs a causal LM; {model.name} is for {model.task}")
    return model


def read_prompts(model: Model, prompt: object, what: str) -> tuple[list[Encoded], bool]:
    """Encode one prompt or several; whether they are several comes second."""
    for one in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(one, tuple) and any(isinstance(part, str) for part in one):
            raise OptionError(f"{what} takes one text per prompt; got the pair {one!r}")
    encoded, many = encode_inputs(model, prompt)
    if not encoded:
        raise OptionError(f"{what} needs at least one prompt; got an empty list")
    return encoded, many


def read_all_answers(
    model: Model, answer_ids: object, prompts: Sequence[Encoded], many: bool
) -> list[tuple[int, ...]]:
    """The tokens of each answer, checked. many: whether a list of answers is expected."""
    if not many:
        return [read_answer_ids(model, answer_ids, prompts[0], "answer_ids")]
    several = answer_ids if isinstance(answer_ids, list | tuple) else None
    if several is None or len(several) != len(prompts):
        given = type(answer_ids).__name__ if several is None else len(several)
        raise OptionError(
            "answer_ids must be a list with the token ids of one answer per prompt, here"
            f" {len(prompts)}; got {given}"
        )
    pairs = zip(several, prompts, strict=True)
    return [
        read_answer_ids(model, ids, encoded, f"answer_ids[{number}]")
        for number, (ids, encoded) in enumerate(pairs)
    ]


def read_answer_ids(
    model: Model, answer_ids: object, prompt: Encoded, what: str
) -> tuple[int, ...]:
    """The tokens of one answer, checked. what: its name, for messages."""
    if isinstance(answer_ids, str | bytes):
        raise OptionError(
            f"{what} must be the token ids that were generated; got a text, which may have been"
            " other tokens: give its ids"
        )
    try:
        ids = tuple(read_ids(answer_ids))
    except OptionError:
        raise OptionError(
            f"{what} must be token ids, whole numbers in a list; got {shorten_value(answer_ids)}"
        ) from None
    size = model.vocabulary_size
    if not ids:
        raise OptionError(f"{what} must have at least one token; got none")
    unknown = next((number for number in ids if not 0 <= number < size), None)
    if unknown is not None:
        raise OptionError(
            f"{what} must be token ids from 0 to {size - 1}, the vocabulary of {model.name}; got"
            f" {unknown}: give the model that generated them"
        )
    refuse_placeholders(model, ids)
    most = model.max_length
    if most is not None and len(prompt.ids) + len(ids) > most:
        raise OptionError(
            f"this model takes at most {most} tokens; got a prompt of {len(prompt.ids)} and an"
            f" answer of {len(ids)}"
        )
    return ids


def shorten_value(value: object) -> str:
    """A value for a message: as Python writes it if that is short, else its type."""
    written = repr(value)
    return written if len(written) <= 40 else f"a {type(value).__name__}"


def read_foil_of_tokens(model: Model, job: Job, plan: Plan) -> FoilNumber | None:
    """What generated tokens are contrasted with; refused where no edges watch them."""
    _, foil = job.check_target(model)
    if foil is not None and not any(weight.rules for weight in plan.weights.values()):
        raise OptionError(
            "a foil is for edges that watch each generated token, gradient or relevance; got edges"
            f" {', '.join(plan.weights)}: name such edges, or leave foil out"
        )
    return foil


# ---- one pass ------------------------------------------------------------------------------------


def replay_answers(
    model: Model,
    prompts: Sequence[Encoded],
    answers: Sequence[tuple[int, ...]],
    heads: str | None,
    plan: Plan,
    foil: FoilNumber | None = None,
) -> list[Generation]:
    """What was generated after each prompt, with the attention of one pass over both.

    Short ones run in batches, and long ones alone, without a graph. foil: what edges that watch
    generated tokens contrast them with.
    """
    cases = [Answered.join(model, *each) for each in zip(prompts, answers, strict=True)]
    made: dict[int, Generation] = {}
    short: list[int] = []
    for number, case in enumerate(cases):
        if heads == "mean" and goes_by_rows(model, case.size, plan.weights.values()):
            made[number] = replay_long(model, case, plan)
        else:
            short.append(number)
    for places in batches([cases[number].whole for number in short], model.batch_tokens):
        numbers = [short[place] for place in places]
        batch = [cases[number] for number in numbers]
        made |= dict(zip(numbers, replay_batch(model, batch, heads, plan, foil), strict=True))
    return [made[number] for number in range(len(cases))]


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer."""

    prompt: Encoded
    answer: tuple[int, ...]
    whole: Encoded  # the prompt and all tokens of the answer but the last, which nothing reads

    @classmethod
    def join(cls, model: Model, prompt: Encoded, answer: tuple[int, ...]) -> "Answered":
        """A prompt and its answer as one input."""
        return cls(prompt, answer, model.encode([*prompt.ids, *answer[:-1]]))

    @property
    def size(self) -> int:
        """The number of positions of prompt and answer."""
        return len(self.whole.ids)

    @property
    def positions(self) -> range:
        """The positions that predict the tokens of the answer."""
        return range(len(self.prompt.ids) - 1, self.size)


def replay_batch(
    model: Model,
    cases: Sequence[Answered],
    heads: str | None,
    plan: Plan,
    foil: FoilNumber | None,
) -> list[Generation]:
    """Run a batch once, and make a graph of each kind of edges.

    Default edges that turn out not to be available are left out, with a note.
    """
    kept = sorted({position for case in cases for position in case.positions})
    inputs, notes = [case.whole for case in cases], tuple[str, ...]()

    def run_pass() -> EdgePass:
        in_pass = {name: weight for name, weight in plan.weights.items() if not weight.rules}
        with unchanged(model.model):
            return run_edges(model, inputs, in_pass, heads, logits=kept)

    try:
        passed, graphs = run_pass()
    except CaptureError as error:
        if plan.first is None:
            raise
        notes = (describe_missing_edges(plan.first, error),)
        plan = plan.drop_first()
        passed, graphs = run_pass()
    watching = {name: weight for name, weight in plan.weights.items() if weight.rules}
    generations = []
    for row, case in enumerate(cases):
        ids, size = (*case.whole.ids, case.answer[-1]), len(case.prompt.ids)
        _, places = keep_logits(model, {}, kept)
        at = [places[kept.index(position)] for position in case.positions]
        likely = read_probabilities(model, passed.output, row, at, case.answer)
        generation = describe_answer(model, case.prompt.ids, case.answer, likely)
        generations.append(
            replace(
                generation,
                captured=passed.attentions[row],
                other_edges={
                    **{name: GraphEdges(name, graph) for name, graph in graphs[row].items()},
                    **{
                        name: TokenEdges(model, ids, size, weight, foil)
                        for name, weight in watching.items()
                    },
                },
                notes=notes,
                shown=plan.choices,
            )
        )
    return generations


def replay_long(model: Model, case: Answered, plan: Plan) -> Generation:
    """Run a long input once and keep queries and keys, from which rows are computed."""
    plan, notes = plan_rows(plan.drop_first())  # rows on default edges would take too long
    pool, layers = TensorPool(model.depth or 1), list[Recomputed | StoredAttention]()

    def keep(number: int, layer: Recomputed | StoredAttention) -> None:
        layers.append(layer.keep(pool))

    output = run_layers(model, case.whole, keep, logits_at=case.positions)
    _, places = keep_logits(model, {}, case.positions)
    likely = read_probabilities(model, output, 0, places, case.answer)
    return replace(
        describe_answer(model, case.prompt.ids, case.answer, likely),
        other_edges={
            name: RowEdges(model, case.whole, weight, layers if name == "attention" else None)
            for name, weight in plan.weights.items()
        },
        notes=notes,
        shown=plan.choices,
        segments=find_segments(case.prompt),
    )


def read_probabilities(
    model: Model, output: Any, row: int, places: Sequence[int], answer: Sequence[int]
) -> tuple[float, ...]:
    """The probability of each token of an answer, from one row of the model's output.

    places: where the logits that predicted the tokens are.
    """
    import torch

    logits = output.logits[row, list(places)].float()  # [generated, token]
    chosen = torch.tensor(answer, device=logits.device)
    probabilities = logits.softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
    if not torch.isfinite(probabilities).all():
        raise CaptureError(f"the scores of {model.name} must be finite; got NaN or infinity")
    return tuple(probabilities.tolist())


def describe_answer(
    model: Model,
    prompt: Sequence[int],
    answer: Sequence[int],
    probabilities: tuple[float, ...],
) -> Generation:
    """The tokens of a generation, their probabilities and text, without attention."""
    tokenizer = model.tokenizer
    text = "" if tokenizer is None else tokenizer.decode(answer, skip_special_tokens=True)
    return Generation(
        text=text,
        tokens=model.names(answer),
        probabilities=probabilities,
        prompt=model.names(prompt),
        captured=None,
        special=frozenset(map(str, getattr(tokenizer, "all_special_tokens", ()))),
        offsets=find_offsets(tokenizer, answer, text),
    )
