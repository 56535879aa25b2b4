"""`sample_tokens`: run a model's own `generate` on a batch of prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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

# Options of the model's own `generate` that change which attention there is to record.
REFUSED = {
    "inputs_embeds": "the prompt is what is explained, so it must be given as text or token ids",
    "inputs": "give the prompt as the prompt",
    "input_ids": "give the prompt as the prompt",
    "attention_mask": "it belongs to the prompt",
    "assistant_model": "a second model would choose tokens whose attention is not recorded",
    "prompt_lookup_num_tokens": "tokens that are guessed and thrown away would be recorded",
    "assistant_early_exit": "tokens that are guessed and thrown away would be recorded",
    "prefill_chunk_size": "the prompt is read at once",
    "guidance_scale": "a second prompt would be read beside this one",
    "custom_generate": "it runs third-party code",
    "trust_remote_code": "attnflow never runs code that comes with a model",
}
ONE_SEQUENCE = ("num_beams", "num_beam_groups", "num_return_sequences")
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

    ids: list[int]
    probabilities: tuple[float, ...]


def check_generation_options(model: Model, options: Mapping[str, object]) -> None:
    """Refuse options, given or in a generation_config, that capture cannot follow."""
    given = options.get("generation_config")
    if isinstance(given, dict):
        raise OptionError("generation_config must be a GenerationConfig; got a dict: unpack it")
    config = model.model.generation_config if given is None else given

    def find_setting(name: str) -> object:
        value = options.get(name)
        return getattr(config, name, None) if value is None else value

    for name, reason in REFUSED.items():
        value = find_setting(name)
        off = value is None or value is False or (name == "guidance_scale" and value == 1)
        if not off:
            raise OptionError(f"generate takes no {name}: {reason}; leave it out")
    for name in ONE_SEQUENCE:
        if given is None and name == "num_beams" and name not in options:
            continue  # a model's own beams are switched off
        value = find_setting(name)
        if value not in (None, 1):
            raise OptionError(
                f"generate follows one sequence per prompt, so {name} must be 1; got {value}"
            )


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
        "num_beams": 1,
        "use_cache": True,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_attentions": output_attentions,
    }
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


def read_continuations(
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    output: "GenerateDecoderOnlyOutput",
    options: Mapping[str, object],
) -> list[Continuation]:
    """The tokens after each prompt, without the padding of those that ended early."""
    import torch

    length, _ = pad_prompts(prompts)
    logits = torch.stack(output.logits, dim=1).float()  # [sequence, step, token]
    chosen = output.sequences[:, length:]  # [sequence, step]
    probabilities = logits.softmax(dim=-1).gather(2, chosen[:, : logits.shape[1], None])[..., 0]
    ends = find_end_tokens(model, options)
    # sequences that stop without an end token are padded while others of the batch go on
    padding = None
    if len(prompts) > 1 and any(options.get(name) for name in OTHER_STOPS):
        padding = options.get("pad_token_id", model.padding)
    continuations = []
    for place in range(len(prompts)):
        new = cut_padding(chosen[place].tolist(), ends, padding)
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
