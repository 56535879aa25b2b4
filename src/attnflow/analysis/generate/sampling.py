"""Run a model's own `generate` on prompts: `sample_answers`, or `sample_tokens` while recording."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np

from attnflow.errors import CaptureError, OptionError
from attnflow.models.execution import evaluating, running
from attnflow.models.model import Model
from attnflow.progress import progress_bar

if TYPE_CHECKING:
    import torch
    from transformers.generation.utils import GenerateDecoderOnlyOutput

# Options of the model's own `generate` after which one pass would not read what it read.
REFUSED = {
    "inputs_embeds": "the prompt is what is explained, so it must be given as text or token ids",
    "inputs": "give the prompt as the prompt",
    "input_ids": "give the prompt as the prompt",
    "attention_mask": "it belongs to the prompt",
    "guidance_scale": "a second prompt would be read beside this one",
    "custom_generate": "it runs third-party code",
    "trust_remote_code": "attnflow never runs code that comes with a model",
}
ONE_SEQUENCE = ("num_beam_groups", "num_return_sequences")
# with these a model also reads tokens that it does not keep, so its steps are not recorded
GUESSING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
UNRECORDED = (*GUESSING, "prefill_chunk_size")
OTHER_STOPS = ("stopping_criteria", "stop_strings", "max_time")

Recorded = TypeVar("Recorded")


@dataclass
class StepCount:
    """A stopping criterion that reports each step; it stops only where a listener raised.

    Parameters
    ----------
    tick
        Called with (done, total).
    total
        The maximum number of steps.
    """

    tick: Callable[[int, int], None]
    total: int
    done: int = 0
    error: Exception | None = None

    def __call__(self, ids: "torch.Tensor", *_: object, **__: object) -> "torch.Tensor":
        """Whether each sequence stops."""
        self.done += 1
        try:
            self.tick(self.done, self.total)
        except Exception as error:  # of the listener, not of the model
            self.error = error
        return ids.new_full((len(ids),), self.error is not None).bool()


class Continuation(NamedTuple):
    """The tokens generated after one prompt.

    Parameters
    ----------
    ids
        The generated tokens, without padding.
    probabilities
        The probability of each token when it was chosen.
    """

    ids: tuple[int, ...]
    probabilities: tuple[float, ...]


def check_generation_options(model: Model, options: Mapping[str, object]) -> None:
    """Refuse options, given or in a generation_config, that give no one answer to read."""
    if isinstance(options.get("generation_config"), dict):
        raise OptionError("generation_config must be a GenerationConfig; got a dict: unpack it")
    for name, reason in REFUSED.items():
        value = find_setting(model, options, name)
        off = value is None or value is False or (name == "guidance_scale" and value == 1)
        if not off:
            raise OptionError(f"generate takes no {name}: {reason}; leave it out")
    for name in ONE_SEQUENCE:
        value = find_setting(model, options, name)
        if value not in (None, 1):
            raise OptionError(
                f"generate follows one sequence per prompt, so {name} must be 1; got {value}"
            )


def find_setting(model: Model, options: Mapping[str, object], name: str) -> object:
    """An option, or what it is in a generation_config that is given, or in the model's own."""
    given = options.get("generation_config")
    config = model.model.generation_config if given is None else given
    value = options.get(name)
    return getattr(config, name, None) if value is None else value


def count_beams(model: Model, options: Mapping[str, object]) -> object:
    """The number of beams; those that a model is set to itself are switched off."""
    if options.get("generation_config") is None and options.get("num_beams") is None:
        return 1
    return find_setting(model, options, "num_beams") or 1


def has_plain_steps(model: Model, options: Mapping[str, object]) -> bool:
    """Whether each step reads one token, which is kept, so that steps can be recorded."""
    unrecorded = any(find_setting(model, options, name) for name in UNRECORDED)
    return count_beams(model, options) == 1 and not unrecorded


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """The length of prompts padded on the left, and how many positions pad each of them."""
    length = max(map(len, prompts))
    return length, [length - len(ids) for ids in prompts]


def sample_tokens(
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    options: Mapping[str, object],
    watch: AbstractContextManager[Recorded],
    *,
    output_logits: bool = True,
    output_attentions: bool = False,
) -> tuple["GenerateDecoderOnlyOutput", Recorded]:
    """Generate from prompts inside a context; the result, and what the context recorded."""
    import torch

    _, pads = pad_prompts(prompts)
    rows = [[model.padding] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)]
    seen = [[0] * pad + [1] * len(ids) for pad, ids in zip(pads, prompts, strict=True)]
    settings = {
        "pad_token_id": model.padding,
        **options,
        "input_ids": torch.tensor(rows, device=model.device),
        "attention_mask": torch.tensor(seen, device=model.device),
        "num_beams": count_beams(model, options),
        "use_cache": True,
        "return_dict_in_generate": True,
        "output_logits": output_logits,
        "output_attentions": output_attentions,
    }
    if model.tokenizer is not None and find_setting(model, options, "stop_strings"):
        settings.setdefault("tokenizer", model.tokenizer)
    with progress_bar("generating") as tick:
        steps = StepCount(tick, cast(int, options["max_new_tokens"]))
        try:
            with evaluating(model.model), torch.no_grad(), running(model), watch as recorded:
                asked = cast(Iterable[object], options.get("stopping_criteria") or ())
                settings["stopping_criteria"] = [*asked, steps]
                output = model.model.generate(**settings)
        except CaptureError as error:
            if not isinstance(error.__cause__, TypeError | ValueError):
                raise
            given = sorted(options.keys() - {"max_new_tokens"})
            among = f" (options: {', '.join(given)})" if given else ""
            raise OptionError(f"{model.name} cannot generate: {error.__cause__}{among}") from error
        if steps.error is not None:
            raise steps.error
        if steps.done < steps.total:  # it ended early
            tick(steps.done, steps.done)
    return output, recorded


def sample_answers(
    model: Model, prompts: Sequence[tuple[int, ...]], options: Mapping[str, object]
) -> list[tuple[int, ...]]:
    """The tokens that a model generates after each prompt; nothing is recorded."""
    guesses = any(find_setting(model, options, name) for name in GUESSING)
    answers: list[tuple[int, ...]] = []
    for batch in [[ids] for ids in prompts] if guesses else [prompts]:
        output, _ = sample_tokens(model, batch, options, nullcontext(), output_logits=False)
        answers += cut_answers(model, batch, output, options)
    return answers


def cut_answers(
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    output: "GenerateDecoderOnlyOutput",
    options: Mapping[str, object],
) -> list[tuple[int, ...]]:
    """The tokens after each prompt, without the padding of those that ended early."""
    length, _ = pad_prompts(prompts)
    ends = find_end_tokens(model, options)
    # sequences that stop without an end token are padded while others of the batch go on
    padding = None
    if len(prompts) > 1 and any(options.get(name) for name in OTHER_STOPS):
        padding = options.get("pad_token_id", model.padding)
    chosen = output.sequences[:, length:].tolist()  # [sequence, step]
    return [tuple(cut_padding(tokens, ends, padding)) for tokens in chosen]


def read_continuations(
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    output: "GenerateDecoderOnlyOutput",
    options: Mapping[str, object],
) -> list[Continuation]:
    """The tokens after each prompt, with their probabilities."""
    import torch

    length, _ = pad_prompts(prompts)
    logits = torch.stack(output.logits, dim=1).float()  # [sequence, step, token]
    chosen = output.sequences[:, length:]  # [sequence, step]
    probabilities = logits.softmax(dim=-1).gather(2, chosen[:, : logits.shape[1], None])[..., 0]
    continuations = []
    for place, new in enumerate(cut_answers(model, prompts, output, options)):
        certain = probabilities[place, : len(new)]
        if not torch.isfinite(certain).all():
            raise CaptureError(f"the scores of {model.name} must be finite; got NaN or infinity")
        continuations.append(Continuation(new, tuple(certain.tolist())))
    return continuations


def find_end_tokens(model: Model, options: Mapping[str, object]) -> set[int]:
    """The tokens that end a generation: by an option, a generation_config, or the model's own."""
    config = options.get("generation_config") or model.model.generation_config
    end = options.get("eos_token_id", getattr(config, "eos_token_id", None))
    ends = end.tolist() if hasattr(end, "tolist") else end  # of a tensor on any device
    return set() if ends is None else set(np.atleast_1d(np.asarray(ends)).tolist())


def cut_padding(tokens: Sequence[int], ends: set[int], padding: object) -> list[int]:
    """Generated tokens up to the one that ended them; the rest is padding.

    padding: the token after sequences that may have stopped without one of `ends`.
    """
    count = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    if count == len(tokens) and ends and padding is not None:
        while count > 1 and tokens[count - 1] == padding:
            count -= 1
    return list(tokens[:count])
